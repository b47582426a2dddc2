"""Functions against mpmath, against exact fractions, and against each other: what they claim holds, and tightly."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import mpmath as mp
import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.exact import FUNCTIONS
from verifiable_relu.dyadic import Dyadic
from verifiable_relu.errors import UnsupportedError
from verifiable_relu.ir.functions import TORCH, Function, Hardened, PiecewiseLinear, Smooth, StepFunction, function
from verifiable_relu.ir.functions.curves import CURVES
from verifiable_relu.ir.functions.steps import STEPS
from verifiable_relu.ir.interval import Interval

KINKED = {slope: PiecewiseLinear(torch.tensor(slope)) for slope in (0.0, 0.1, 0.5, 1.0, 1.7, -0.3, -4.0, 1e-30)}
kinked = pytest.mark.parametrize("slope", KINKED)


def intervals(seed: int, count: int = 200) -> Interval:
    """Return intervals (1, count) of all sizes and places, also about 0, points, and halves that begin at 0."""
    random = torch.Generator().manual_seed(seed)
    size = 10.0 ** torch.randint(-12, 9, (2, count), generator=random)
    first, second = torch.randn(2, count, generator=random, dtype=torch.float64) * size
    second = torch.where(torch.rand(count, generator=random) < 0.4, first + second * first.abs() * 1e-3, second)
    first[::17], second[::29], second[::31] = 0, 0, first[::31]
    return Interval(torch.minimum(first, second)[None], torch.maximum(first, second)[None])


def fraction(function: Function, x: float) -> Fraction:
    """Return f(x) of a piecewise-linear function."""
    value = function.exact(Dyadic.from_floats(np.array([x])), 1)
    assert value is not None
    return int(value.numbers.reshape(-1)[0]) * Fraction(2) ** value.exponent


def points(x: Interval) -> list[list[float]]:
    """Return both ends of each interval, 0 where it lies between them, and the middle."""
    lower, upper = x.lower[0].tolist(), x.upper[0].tolist()
    return [[a, b, min(max(0.0, a), b), a / 2 + b / 2] for a, b in zip(lower, upper, strict=True)]


@kinked
def test_lines_of_any_slope_hold_exactly(slope: float) -> None:
    function, x = KINKED[slope], intervals(1)
    random = torch.Generator().manual_seed(2)
    chosen = torch.stack(
        [
            *function.slopes(x),
            *vars(function.slope_range(x)).values(),
            torch.randn(x.lower.shape, generator=random).double() * 3,
            torch.full_like(x.lower, -1e-310),
            torch.full_like(x.lower, 1 + 2.0**-52),
            torch.full_like(x.lower, slope),
        ]
    )
    floor, top = function.floor(x, chosen), function.top(x, chosen)
    for place, numbers in enumerate(points(x)):
        values = [(Fraction(t), fraction(function, t)) for t in numbers]
        for s, low, high in zip(*(part[:, 0, place].tolist() for part in (chosen, floor, top)), strict=True):
            assert all(Fraction(s) * t + Fraction(low) <= y <= Fraction(s) * t + Fraction(high) for t, y in values)


@kinked
def test_images_hold_exactly(slope: float) -> None:
    function, x = KINKED[slope], intervals(3)
    image = function.image(x)
    for place, numbers in enumerate(points(x)):
        low, high = float(image.lower[0, place]), float(image.upper[0, place])
        values = [fraction(function, t) for t in numbers]
        assert low <= min(values) and max(values) <= high
        size = max(map(abs, values))
        assert float(min(values)) - low <= 1e-15 * size + 1e-200 and high - float(max(values)) <= 1e-15 * size + 1e-200


def test_relu_is_bounded_as_crown_does() -> None:
    relu, x = (
        PiecewiseLinear(),
        Interval(*torch.tensor([[[-1.0, -3.0, 2.0, -2.0, 0.0]], [[3.0, 1.0, 5.0, -1.0, 0.0]]]).double()),
    )
    low, high = relu.slopes(x)
    assert low.tolist() == [[1, 0, 1, 0, 0]]
    assert high.tolist() == [[0.75, 0.25, 1, 0, 0]]
    assert relu.floor(x, low).tolist() == [[0, 0, 0, 0, 0]]
    torch.testing.assert_close(relu.top(x, high), torch.tensor([[0.75, 0.75, 0, 0, 0]]).double())
    assert relu.unstable(x).tolist() == [[True, True, False, False, False]]
    other = Interval(torch.full_like(x.lower, -9), torch.ones_like(x.lower))
    assert relu.slopes(x, other)[0].tolist() == [[0, 0, 1, 0, 0]]


def test_each_element_has_its_own_slope() -> None:
    slopes = torch.tensor([0.25, 2.0, -1.0])
    function, x = PiecewiseLinear(slopes), intervals(5, 3 * 100)
    x = Interval(x.lower.reshape(100, 3), x.upper.reshape(100, 3))
    together = function.relaxation(x, *function.slopes(x))
    for i in range(3):
        alone, mine = function.select(torch.tensor([i])), x.columns(torch.tensor([i]))
        for found, expected in zip(
            vars(together).values(), vars(alone.relaxation(mine, *alone.slopes(mine))).values(), strict=True
        ):
            assert torch.equal(found[:, i : i + 1], expected)


def test_the_derivative_of_offsets_of_lines_through_the_kink_is_zero() -> None:
    relu, x = PiecewiseLinear(), Interval(torch.tensor([[-1.0, -2.0]]), torch.tensor([[2.0, 1.0]]))
    slope = torch.tensor([[[0.0, 1.0]], [[0.5, 2.0]]], requires_grad=True)
    relu.floor(x, slope).sum().backward()
    assert isinstance(slope.grad, Tensor) and slope.grad.round().tolist() == [[[0, 0]], [[0, -1]]]


# Smooth functions


def _inner(x: Any) -> Any:
    return 2 * mp.sqrt(2 / mp.pi) * (x + mp.mpf("0.044715") * x**3)


DOMAINS = {
    "Asin": (-1.0, 1.0), "Acos": (-1.0, 1.0), "Acosh": (1.0, 1e6), "Atanh": (-0.999999, 0.999999), "Exp": (-60.0, 60.0),
    **dict.fromkeys(("Log", "Sqrt", "Reciprocal", "InverseRoot", "Power", "Root"), (1e-8, 1e6)),
}  # fmt: skip
SMOOTH = {
    **{kind: Smooth(kind) for kind in CURVES if kind not in ("Power", "Root")},
    **{f"GELU {lam:g}": Smooth("GELU", lam) for lam in (5.0, 160.0, 1e4)},
    **{f"ELU {alpha:g}": Smooth("ELU", alpha) for alpha in (0.5, 1.75)},
    "Power": Smooth("Power", 1.5),
    "Root": Smooth("Root", 0.75),
}
smooth = pytest.mark.parametrize("name", SMOOTH)
dtypes = pytest.mark.parametrize("dtype", (torch.float64, torch.float32), ids=str)


def within_domain(f: Smooth, seed: int, count: int, dtype: torch.dtype = torch.float64) -> Interval:
    """Return intervals (1, count) of all sizes, many of them about where the function bends."""
    random = torch.Generator().manual_seed(seed)
    least, most = DOMAINS.get(f.kind, (-math.inf, math.inf))
    width = 10.0 ** torch.empty(count).uniform_(-7, 1.5, generator=random).double()
    centre = torch.randn(count, generator=random).double() * 3
    for place, bend in enumerate(f.curve.bends):
        centre[place::5] = bend + width[place::5] * torch.randn(len(centre[place::5]), generator=random)
    if least > 0:
        centre = 10.0 ** torch.empty(count).uniform_(-7, 5, generator=random).double() + least
        width = centre * width / 40
    centre[4::9] *= 10.0 ** torch.randint(0, 4, (len(centre[4::9]),), generator=random)
    ends = torch.stack([centre - width, centre + width * torch.rand(count, generator=random)])
    ends = ends / (f.parameter if f.kind == "GELU" else 1)
    ends = ends.clamp(least, most).to(dtype).sort(0).values
    return Interval(ends[:1], ends[1:])


def candidates(f: Smooth, x: Interval) -> Tensor:
    """Return slopes (slopes, 1, n): those that are chosen, those of the function, and any."""
    random = torch.Generator().manual_seed(9)
    own = [f.derivative(torch.lerp(x.lower, x.upper, t)) for t in (0.1, 0.5, 0.8)]
    other = torch.randn((3, *x.lower.shape), generator=random).to(own[0])
    found = torch.stack([*f.slopes(x), *vars(f.slope_range(x)).values(), *own, *other, own[0] * (1 + other[0] / 10)])
    return found.nan_to_num(0)


def worst_points(f: Smooth, x: Interval, slope: Tensor) -> list[Tensor]:
    """Return points (slopes, 1, n) at which lines may be exceeded: ends, bends, and the extremes of many points."""
    shares = torch.linspace(0, 1, 400, dtype=x.lower.dtype)
    points = torch.lerp(x.lower, x.upper, (1 - torch.cos(math.pi * shares))[:, None, None] / 2)
    points = points.clamp(x.lower, x.upper)
    heights = f.value(points)[:, None] - slope * points[:, None]
    found = [heights.nan_to_num(math.inf).argmin(0), heights.nan_to_num(-math.inf).argmax(0)]
    chosen = [points.expand(-1, *x.lower.shape).gather(0, place) for place in found]
    return [x.lower.expand_as(slope), x.upper.expand_as(slope), *chosen]


def violations(f: Smooth, x: Interval, slope: Tensor) -> int:
    """Return how many points of lines of given slopes are on the wrong side, of all that are compared."""
    floor, top = f.floor(x, slope), f.top(x, slope)
    found = 0
    for points in worst_points(f, x, slope):
        for t, s, low, high in zip(*(part.flatten().tolist() for part in (points, slope, floor, top)), strict=True):
            height = FUNCTIONS[f.kind](mp.mpf(t), mp.mpf(f.parameter)) - mp.mpf(s) * mp.mpf(t)
            found += bool(height < low) + bool(height > high)
    return found


@smooth
@dtypes
def test_smooth_lines_of_any_slope_hold(name: str, dtype: torch.dtype) -> None:
    f, x = SMOOTH[name], within_domain(SMOOTH[name], 1, 60, dtype)
    with mp.workdps(50):
        assert violations(f, x, candidates(f, x)) == 0


@pytest.mark.parametrize("name", ["Softplus", "Tanh"])
def test_smooth_lines_hold_with_points_that_are_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CURVES, name, replace(CURVES[name], point=lambda s, *_: torch.ones_like(s)))
    test_smooth_lines_of_any_slope_hold(name, torch.float64)


@smooth
@dtypes
def test_smooth_images_hold(name: str, dtype: torch.dtype) -> None:
    f, x = SMOOTH[name], within_domain(SMOOTH[name], 2, 200, dtype)
    image = f.image(x)
    zero = torch.zeros(1, *x.lower.shape, dtype=dtype)
    with mp.workdps(50):
        for points in worst_points(f, x, zero):
            for t, low, high in zip(*(p.flatten().tolist() for p in (points, image.lower, image.upper)), strict=True):
                assert low <= FUNCTIONS[f.kind](mp.mpf(t), mp.mpf(f.parameter)) <= high


@smooth
def test_smooth_functions_are_enclosed(name: str) -> None:
    f, x = SMOOTH[name], within_domain(SMOOTH[name], 3, 100)
    middle, radius = ((x.lower + x.upper) / 2).numpy()[0], ((x.upper - x.lower) / 2 * (1 + 1e-12)).numpy()[0]
    for error in (0 * radius, radius):
        y, spread = f.enclose(middle, error, 2.0**-53)
        with mp.workdps(50):
            for place in range(len(middle)):
                for share in (-1, -0.3, 0, 1):
                    t = mp.mpf(float(middle[place])) + share * mp.mpf(float(error[place]))
                    if DOMAINS.get(f.kind, (-math.inf,))[0] <= t <= DOMAINS.get(f.kind, (0, math.inf))[1]:
                        true = FUNCTIONS[f.kind](t, mp.mpf(f.parameter))
                        assert not abs(true - mp.mpf(float(y[place]))) > mp.mpf(float(spread[place]))


@smooth
def test_derivatives_are_as_accurate_as_offsets_assume(name: str) -> None:
    f, x = SMOOTH[name], within_domain(SMOOTH[name], 4, 100)
    points = (x.lower + x.upper)[0] / 2
    points = points[~torch.isin(points, torch.tensor((*f.curve.bends, -1, 1)).double()) & (points.abs() < 200)]
    for t, found in zip(points.tolist(), f.derivative(points).tolist(), strict=True):
        with mp.workdps(250):
            step = mp.mpf(10) ** -60
            high, low = (FUNCTIONS[f.kind](mp.mpf(t) + sign * step, mp.mpf(f.parameter)) for sign in (1, -1))
            true = (high - low) / (2 * step)
        near = 0.5 if f.gated and abs(t) <= 3 * (1 / f.parameter if f.kind == "GELU" else 1) else 0
        # Of exp(−x²), a part x²·u may be lost.
        far = {"GELU": (f.parameter * t) ** 2, "tanh-GELU": 3 * abs(float(_inner(t)))}.get(f.kind, 0)
        assert abs(true - found) <= 2.0**-53 * ((8 + far) * abs(true) + 8 * near) + 1e-300


ALL: dict[str, Function] = {
    **SMOOTH,
    **{f"PiecewiseLinear {slope:g}": function for slope, function in KINKED.items()},
    **{kind: StepFunction(kind) for kind in STEPS},
    "Hardened": Hardened(Smooth("GELU", 5.0)),
    "Hardened SiLU": Hardened(Smooth("SiLU")),
}


@pytest.mark.parametrize("name", [name for name, f in ALL.items() if isinstance(f, Smooth) and f.kind != "Atanh"])
def test_no_line_of_a_slope_can_be_moved_towards_the_function(name: str) -> None:
    """The lines of CROWN's slopes come within a hundredth of the function's range on the interval, at some point."""
    f = ALL[name]
    assert isinstance(f, Smooth)
    x = within_domain(f, 6, 300)
    lines = f.relaxation(x, *f.slopes(x))
    t = torch.lerp(x.lower, x.upper, torch.linspace(0, 1, 4001, dtype=torch.float64)[:, None])
    y = f.value(t)
    size = y.amax(0) - y.amin(0) + 1e-9 * (1 + y.abs().amax(0)) + 1e-12 * torch.maximum(x.lower.abs(), x.upper.abs())[0]
    known = y.isfinite().all(0) & (x.upper - x.lower < 5)[0]
    for slope, offset, sign in (
        (lines.lower_slope, lines.lower_offset, 1),
        (lines.upper_slope, lines.upper_offset, -1),
    ):
        gap = (sign * (y - slope * t - offset)).amin(0)
        assert bool((gap[known] <= 1e-2 * size[known]).all())


@pytest.mark.parametrize("name", ["Sigmoid", "GELU", "GELU 160", "Tanh", "Exp", "Reciprocal", "ELU 1.75", "Sin"])
def test_offsets_are_differentiable_in_the_slope(name: str) -> None:
    f, x = SMOOTH[name], within_domain(SMOOTH[name], 8, 50)
    bounds = f.slope_range(x)
    for offset, first, last in (
        (f.floor, bounds.lower_from, bounds.lower_to),
        (f.top, bounds.upper_from, bounds.upper_to),
    ):
        slope = torch.lerp(first, last, 0.4).requires_grad_()
        (gradient,) = torch.autograd.grad(offset(x, slope).sum(), slope)
        # Minus the point at which the line touches f.
        assert bool((gradient <= -x.lower + 1e-9).all() and (gradient >= -x.upper - 1e-9).all())


@pytest.mark.parametrize("name", ALL)
def test_rows_that_choose_their_own_slopes(name: str) -> None:
    f = ALL[name]
    x = within_domain(f, 10, 40) if isinstance(f, Smooth) else intervals(10, 40)
    slopes = torch.stack(f.slopes(x))
    together = f.floor(x, slopes), f.top(x, slopes)
    for row in range(2):
        assert torch.equal(together[0][row], f.floor(x, slopes[row]))
        assert torch.equal(together[1][row], f.top(x, slopes[row]))


@pytest.mark.parametrize("name", ALL)
def test_nothing_is_known_of_what_is_no_number(name: str) -> None:
    f, nan = ALL[name], torch.tensor([[math.nan, math.nan, 0.5]], dtype=torch.float64)
    x = Interval(nan, torch.tensor([[math.nan, 1.0, math.nan]], dtype=torch.float64))
    image, lines = f.image(x), f.relaxation(x, *f.slopes(x))
    assert not bool((image.lower.isfinite() & image.upper.isfinite()).any())
    constant = lines.upper_slope == 0
    assert not bool((lines.upper_offset.isfinite() & constant).any())
    assert bool(f.unstable(x)[0, :1].item())


@pytest.mark.parametrize(
    ("name", "lower", "upper"),
    [("Reciprocal", -1.0, 2.0), ("Reciprocal", 0.0, 1.0), ("Log", -1.0, 1.0), ("Sqrt", -1e-9, 1.0),
     ("Asin", 0.5, 1.5), ("Acosh", 0.5, 2.0), ("Atanh", -2.0, 0.0), ("Power", -1.0, 1.0)],
)  # fmt: skip
def test_nothing_is_known_beyond_a_domain(name: str, lower: float, upper: float) -> None:
    f, x = SMOOTH[name], Interval(*torch.tensor([[[lower]], [[upper]]], dtype=torch.float64))
    image, lines = f.image(x), f.relaxation(x, *f.slopes(x))
    assert not bool((image.lower.isfinite() & image.upper.isfinite()).any())
    assert not bool((lines.lower_offset.isfinite() & lines.upper_offset.isfinite()).any())
    assert not bool(f.derivative_range(x).upper.isfinite())


@smooth
def test_derivatives_are_in_their_range(name: str) -> None:
    f, x = SMOOTH[name], within_domain(SMOOTH[name], 11, 300)
    known = f.derivative_range(x)
    for share in (0.0, 0.3, 0.9, 1.0):
        slope = f.derivative(torch.lerp(x.lower, x.upper, share))
        assert bool(((known.lower <= slope) & (slope <= known.upper) | ~slope.isfinite()).all())


@pytest.mark.parametrize("kind", STEPS)
def test_jumping_functions_hold_exactly(kind: str) -> None:
    f, x = StepFunction(kind), intervals(12, 20)
    lower = torch.cat([x.lower, x.lower.round(), torch.full_like(x.lower, -0.5)], 1)
    upper = torch.cat([x.upper, x.upper.round(), torch.full_like(x.upper, 1.5)], 1)
    x = Interval(torch.minimum(lower, upper), torch.maximum(lower, upper))
    chosen = torch.stack([*f.slopes(x), *vars(f.slope_range(x)).values(), x.lower * 0 + 0.3, x.lower * 0 - 2])
    floor, top, image = f.floor(x, chosen), f.top(x, chosen), f.image(x)
    whole = [torch.ceil(x.lower), torch.floor(x.upper), torch.floor(x.lower + 0.5) + 0.5, torch.zeros_like(x.lower)]
    near = [p.nextafter(p + side) for p in whole for side in (-1, 1)]
    for points in (x.lower, x.upper, *(p.clamp(x.lower, x.upper) for p in (*whole, *near))):
        values = [fraction(f, t) for t in points[0].tolist()]
        assert [float(v) for v in values] == f.value(points)[0].tolist()
        ends = zip(values, image.lower[0].tolist(), image.upper[0].tolist(), strict=True)
        assert all(low <= v <= high for v, low, high in ends)
        for s, low, high in zip(chosen[:, 0].tolist(), floor[:, 0].tolist(), top[:, 0].tolist(), strict=True):
            for t, v, *line in zip(points[0].tolist(), values, s, low, high, strict=True):
                rise = Fraction(line[0]) * Fraction(t)
                assert rise + Fraction(line[1]) <= v <= rise + Fraction(line[2])
        y, error = f.enclose(points[0].numpy(), np.full(points.shape[1], 0.25), 2.0**-53)
        for t, m, e in zip(points[0].tolist(), y.tolist(), error.tolist(), strict=True):
            assert all(abs(fraction(f, t + d) - Fraction(m)) <= e for d in (-0.25, 0.25))


def test_splits_are_those_of_branch_and_bound() -> None:

    x = within_domain(SMOOTH["GELU"], 13, 200)
    for name in ("Tanh", "SiLU", "ELU 1.75"):
        point = SMOOTH[name].split_point(x)
        assert bool(((x.lower <= point) & (point <= x.upper)).all())
    assert PiecewiseLinear().split_point(
        Interval(torch.tensor([[-1.0, 1.0]]), torch.tensor([[3.0, 3.0]]))
    ).tolist() == [[0, 2]]


def test_functions_are_found_by_name() -> None:
    assert TORCH["silu"] == "SiLU"
    for kind in (*CURVES, *STEPS, "Relu"):
        found = function(kind, 2.0)
        assert (
            found.kind == kind
            and found.is_same(function(kind, 2.0))
            and not found.is_same(PiecewiseLinear(torch.ones(())))
        )
    assert not function("ELU", 0.5).is_same(function("ELU", 0.25))
    with pytest.raises(UnsupportedError):
        function("Bessel")


@pytest.mark.parametrize(
    "f", [PiecewiseLinear(torch.tensor(0.0)), Smooth("GELU"), Smooth("Log"), Hardened(Smooth("GELU"))]
)
def test_of_an_interval_that_is_not_known_nothing_is_stable(f: Function) -> None:
    known = torch.tensor([[-1.0, 1.0, 2.0]], dtype=torch.float64)
    nan = torch.full_like(known, math.nan)
    assert f.unstable(Interval(nan, nan)).all()
