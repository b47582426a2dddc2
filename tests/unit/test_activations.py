"""The table of activations against samples, and against envelopes by brute force."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from fractions import Fraction

import mpmath
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.draws import draws
from verifiable_relu.bounds import Bounds, Lines, activations, crown_relaxation
from verifiable_relu.bounds.activations import image, relax, row
from verifiable_relu.bounds.rounding import backward_activation
from verifiable_relu.errors import UnsupportedError
from verifiable_relu.network import nodes as nodes_module
from verifiable_relu.network.build import Builder
from verifiable_relu.network.nodes import (
    Activation,
    Curve,
    Gelu,
    Hardened,
    LeakyRelu,
    Relu,
    Sigmoid,
    Smooth,
    Step,
    Tanh,
)
from verifiable_relu.rounding import unit_roundoff

LAMBDAS = (1.0, 5.0, 20.0, 160.0, 1e4)
DTYPES = (torch.float64, torch.float32)
PLACE = {"name": "act", "inputs": (0,), "shape": (1,)}


def gelu(lam: float, dtype: torch.dtype = torch.float64) -> Gelu:
    return Gelu(lam=torch.tensor(lam, dtype=dtype), **PLACE)


def leaky(slope: float) -> LeakyRelu:
    return LeakyRelu(slope=torch.tensor(slope, dtype=torch.float64), **PLACE)


def function(name: str, parameter: float = 1.0) -> Smooth:
    return Smooth(function=name, parameter=torch.tensor(parameter, dtype=torch.float64), **PLACE)


FUNCTIONS: dict[str, Smooth] = {
    **{name: function(name) for name in nodes_module.FUNCTIONS},
    "ELU, convex": function("ELU", 0.5),
    "Power": function("Power", 1.5),
    "Root": function("Root", 0.7),
    "ELU, with a kink": function("ELU", 1.6732632423543772),
}
DOMAINS = {
    "Asin": (-1.0, 1.0), "Acos": (-1.0, 1.0), "Acosh": (1.0, 1e6), "Atanh": (-0.999999, 0.999999),
    "Exp": (-60.0, 60.0), "Log": (1e-8, 1e6), "Sqrt": (1e-8, 1e6),
    "Reciprocal": (1e-8, 1e6), "InverseRoot": (1e-8, 1e6), "Power": (1e-8, 1e6), "Root": (1e-8, 1e6),
    "Sin": (-1e3, 1e3), "Cos": (-1e3, 1e3),
}  # fmt: skip
"""Where functions are defined that are not everywhere, are no larger than numbers are, and turn at numbers nearby."""
SMOOTH: dict[str, Activation] = {
    "sigmoid": Sigmoid(**PLACE),
    "tanh": Tanh(**PLACE),
    **{f"gelu{lam:g}": gelu(lam) for lam in LAMBDAS},
}
JUMPING: dict[str, Callable[[Tensor], Tensor]] = {
    "Sign": lambda x: (x > 0).double() - (x < 0).double(),
    "Floor": lambda x: torch.div(x, 1, rounding_mode="floor"),
    "Ceil": lambda x: -torch.div(-x, 1, rounding_mode="floor"),
    "Round": lambda x: torch.from_numpy(x.numpy().round()),
    "Truncate": lambda x: torch.div(x, 1, rounding_mode="trunc"),
}
NODES: dict[str, Activation] = {
    **{name: Step(function=name, **PLACE) for name in nodes_module.STEPS},
    "relu": Relu(**PLACE),
    "leaky0.1": leaky(0.1),
    "leaky1.5": leaky(1.5),
    "leaky-0.3": leaky(-0.3),
    **SMOOTH,
    **FUNCTIONS,
}
EVERYWHERE = {name: node for name, node in NODES.items() if name not in DOMAINS}
nodes = pytest.mark.parametrize("node", NODES.values(), ids=NODES.keys())
everywhere = pytest.mark.parametrize("node", EVERYWHERE.values(), ids=EVERYWHERE.keys())
best = pytest.mark.parametrize(
    "node", [n for n in NODES.values() if not isinstance(n, Smooth | Step)], ids=lambda n: n.op
)
smooth = pytest.mark.parametrize("node", SMOOTH.values(), ids=SMOOTH.keys())
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def scale(node: Activation) -> float:
    """The width of the interval on which the activation is curved."""
    return 1 / float(node.lam) if isinstance(node, Gelu) else 1.0


def stored(node: Activation, dtype: torch.dtype) -> Activation:
    """The node with its parameters rounded to ``dtype``."""
    cast = node.map_tensors(lambda t: t.to(dtype))
    assert isinstance(cast, Activation)
    return cast


OTHERWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Sigmoid": lambda x, _: 1 / (1 + torch.exp(-x)),
    "Tanh": lambda x, _: torch.tanh(x),
    "GELU": lambda x, lam: x * torch.special.ndtr(lam * x),
    "SiLU": lambda x, _: F.silu(x),
    "Mish": lambda x, _: x * torch.tanh(torch.logaddexp(x, torch.zeros_like(x))),
    "tanh-GELU": lambda x, _: x / (1 + torch.exp(-math.sqrt(8 / math.pi) * (x + 0.044715 * x**3))),
    "ELU": lambda x, alpha: torch.where(x > 0, x, alpha * torch.expm1(x)),
    "Softplus": lambda x, _: torch.logaddexp(x, torch.zeros_like(x)),
    "Softsign": lambda x, _: F.softsign(x),
    "HardSwish": lambda x, _: F.hardswish(x),
    "Erf": lambda x, _: torch.special.erf(x),
    "Atan": lambda x, _: torch.atan2(x, torch.ones_like(x)),
    "Asin": lambda x, _: torch.atan2(x, torch.sqrt((1 - x) * (1 + x))),
    "Acos": lambda x, _: 2 * torch.atan2(torch.sqrt(1 - x), torch.sqrt(1 + x)),
    "Asinh": lambda x, _: torch.asinh(x),
    "Acosh": lambda x, _: torch.acosh(x),
    "Atanh": lambda x, _: (torch.log1p(x) - torch.log1p(-x)) / 2,
    "Exp": lambda x, _: torch.exp2(x * math.log2(math.e)),
    "Square": lambda x, _: x**2,
    "Cube": lambda x, _: x**3,
    "Log": lambda x, _: torch.log2(x) * math.log(2),
    "Sqrt": lambda x, _: x**0.5,
    "Reciprocal": lambda x, _: x**-1.0,
    "InverseRoot": lambda x, _: x**-0.5,
    **dict.fromkeys(("Power", "Root"), lambda x, p: torch.exp2(p * torch.log2(x))),
    "Sin": lambda x, _: torch.sin(x),
    "Cos": lambda x, _: torch.cos(x),
}


def value(node: Activation, x: Tensor) -> Tensor:
    """The activation in float64, by formulas other than those of the table."""
    x = x.double()
    match node:
        case LeakyRelu():
            return x.clamp(min=0) + node.slope.double() * x.clamp(max=0)
        case Curve():
            return OTHERWISE[node.function](x, node.parameter.double())
        case Step():
            return JUMPING[node.function](x)
        case _:
            return x.clamp(min=0)


SPECIAL = (0.0, 1e-300, 1e-30, 1e-8, 1e-3, 0.1, 0.5, -activations.DIP, 1.0, math.sqrt(2), 1.5, 2, 3, 6, 9, 40, 1e3, 1e6)


def corpus(node: Activation, dtype: torch.dtype = torch.float64) -> Bounds:
    """All intervals between points of interest, in units of the activation's own width and in absolute units."""
    positive = torch.tensor(SPECIAL, dtype=torch.float64)
    points = torch.cat([positive * scale(node), -positive * scale(node), torch.tensor([-1e6, -1.0, 1.0, 1e6])])
    points = points.to(dtype).sort().values
    least, most = DOMAINS.get(node.function, (-1e9, 1e9)) if isinstance(node, Smooth) else (-1e9, 1e9)
    points = points[(points >= least) & (points <= most)]
    lower, upper = torch.meshgrid(points, points, indexing="ij")
    keep = lower <= upper
    return Bounds(lower[keep], upper[keep])


def samples(node: Activation, bounds: Bounds, count: int = 101) -> Tensor:
    """Points (intervals, points) of each interval: its ends, evenly spaced points, and points near special ones."""
    lb, ub = bounds.lower.double()[:, None], bounds.upper.double()[:, None]
    even = lb + (ub - lb) * torch.linspace(0, 1, count, dtype=torch.float64)
    special = torch.cat([torch.linspace(-6, 6, 97), torch.logspace(-9, 2, 45), -torch.logspace(-9, 2, 45)])
    special = special.double() * scale(node)
    x = torch.cat([even, special.expand(len(lb), -1), special + lb, special + ub], 1)
    if isinstance(node, Step):
        jumps = (2 * x).round() / 2
        x = torch.cat([x, jumps, *(torch.nextafter(jumps, torch.full_like(jumps, end)) for end in (-1e9, 1e9))], 1)
    return x.clamp(lb, ub)


def slack(node: Activation, bounds: Bounds, slope: Tensor, offset: Tensor) -> Tensor:
    """The rounding error that the table states for its lines and images."""
    known, dtype = row(node), bounds.lower.dtype
    reach = torch.maximum(bounds.lower.abs(), bounds.upper.abs()).double()
    relative = known.ulps * (slope.double().abs() * reach + offset.double().abs())
    return unit_roundoff(dtype) * (relative + known.absolute(node)) + 8 * torch.finfo(dtype).tiny


def assert_sound(node: Activation, bounds: Bounds, lines: Lines) -> None:
    x = samples(node, bounds)
    y = value(node, x)
    for slope, offset, sign in (
        (lines.lower_slope, lines.lower_offset, 1),
        (lines.upper_slope, lines.upper_offset, -1),
    ):
        assert bool((torch.isfinite(slope) & torch.isfinite(offset)).all())
        above = sign * (slope.double()[:, None] * x + offset.double()[:, None] - y)
        excess = above.amax(1) - slack(node, bounds, slope, offset)
        worst = int(excess.argmax())
        assert excess[worst] <= 0, (bounds.lower[worst], bounds.upper[worst], sign, excess[worst])


@pytest.mark.combined
@nodes
@dtypes
@pytest.mark.parametrize("alpha", (None, 0.0, 0.3, 1.0))
def test_lines_hold_on_every_interval_for_every_choice_of_support(
    node: Activation, dtype: torch.dtype, alpha: float | None
) -> None:
    node = stored(node, dtype)
    bounds = corpus(node, dtype)
    assert_sound(node, bounds, relax(node, bounds, None if alpha is None else torch.tensor(alpha, dtype=dtype)))


@pytest.mark.combined
@nodes
@dtypes
def test_images_are_exact(node: Activation, dtype: torch.dtype) -> None:
    node = stored(node, dtype)
    bounds = corpus(node, dtype)
    found, y = image(node, bounds), value(node, samples(node, bounds))
    known = row(node)
    # Samples miss the dip of λ-GELU by at most a sixteenth of its width, where f is flat to second order.
    missed = 2e-3 * scale(node) if isinstance(node, Gelu | Smooth) else 0.0
    for outside in (y.amin(1) - found.lower.double(), found.upper.double() - y.amax(1)):
        magnitude = torch.maximum(found.lower.abs(), found.upper.abs()).double()
        allowed = unit_roundoff(dtype) * (known.ulps * magnitude + known.absolute(node)) + 8 * torch.finfo(dtype).tiny
        assert bool((outside >= -allowed).all()) and bool((outside <= allowed + missed).all())


def interval(lower: float, upper: float) -> Bounds:
    return Bounds(torch.tensor([lower], dtype=torch.float64), torch.tensor([upper], dtype=torch.float64))


def extremes(dtype: torch.dtype) -> Bounds:
    """Intervals with extreme ends: adjacent, near zero, near overflow, near the least width; and any around zero."""
    info, generator = torch.finfo(dtype), torch.Generator().manual_seed(3)
    smallest, floor = info.tiny * info.eps, info.tiny**0.5
    powers = [smallest, 3 * smallest, info.tiny / 2, info.tiny, floor / 4, floor, 2 * floor, 1e-4, 1.0, 1e4, 1 / floor]
    points = [*powers, 1 / info.tiny, info.max / 4, info.max / 2]
    random = (1 + torch.rand(2, len(points), generator=generator, dtype=torch.float64)) * torch.tensor(points).double()
    near = torch.tensor([[1.0], [1 + info.eps]], dtype=torch.float64) * torch.tensor(points, dtype=torch.float64)
    positive = torch.cat([random[random <= info.max / 2], near[near <= info.max / 2], torch.zeros(1).double()])
    every = torch.cat([positive, -positive]).to(dtype).unique()
    lower, upper = torch.meshgrid(every, every, indexing="ij")
    around = (1 + 2 * torch.rand(2, 3000, generator=generator, dtype=torch.float64)).to(dtype)
    return Bounds(torch.cat([lower[lower <= upper], -around[0]]), torch.cat([upper[lower <= upper], around[1]]))


@dtypes
def test_the_rounding_error_of_relus_chord_is_within_the_stated_one(dtype: torch.dtype) -> None:
    """The error in exact arithmetic is within the stated one on both sides, and above a quarter of it somewhere."""
    node, bounds = Relu(**PLACE), extremes(dtype)
    lines, info = relax(node, bounds), torch.finfo(dtype)
    u, tiny, worst = Fraction(info.eps) / 2, Fraction(info.tiny), Fraction(0)
    parts = (t.tolist() for t in (bounds.lower, bounds.upper, lines.upper_slope, lines.upper_offset))
    for ends in zip(*parts, strict=True):
        low, high, slope, offset = (Fraction(v) for v in ends)
        points = [low, high, *([Fraction(0)] if low < 0 < high else [])]
        right = max(max(x, Fraction(0)) - slope * x for x in points)
        reach = max(abs(low), abs(high))
        unit = u * (abs(slope) * reach + abs(offset))
        off = max(abs(offset - right) - 2 * tiny * (1 + reach) * u, Fraction(0))
        assert off <= row(node).ulps * unit, ends
        worst = max(worst, off / unit if unit else Fraction(0))
    assert worst > Fraction(row(node).ulps, 4)
    zero = lines.lower_slope == 0
    assert bool((lines.lower_offset == 0).all() and (zero | (lines.lower_slope == 1)).all())


@pytest.mark.parametrize("flushing", (False, True))
@pytest.mark.parametrize("kind", (Relu, Hardened))
def test_a_chord_that_is_lost_to_underflow(kind: type[Activation], flushing: bool) -> None:
    """A slope u/(u − l) that underflows to zero: without outward rounding, the upper line would lie below relu(u)."""
    torch.set_flush_denormal(flushing)
    try:
        for low, high in itertools.product((-1e299, -1e150, -1.0), (1e-10, 1e-9, 1e-160, 1e-300, 5e-324)):
            build = Builder((1,))
            lam = {"lam": torch.tensor(1e4, dtype=torch.float64)} if kind is Hardened else {}
            one = torch.ones(1, 1, dtype=torch.float64)
            x = build.linear(build.activation(0, kind, "act", **lam), one, None, "out")
            net = build.network(x, name="lost")
            found = crown_relaxation(net, Bounds(low * one, high * one)).lower(2, -one, torch.tensor([0]))[0]
            assert not float(found) > -high, (low, high)
    finally:
        torch.set_flush_denormal(False)


ends = st.floats(-1e6, 1e6)


@everywhere
@settings(max_examples=draws(25), deadline=None)
@given(first=ends, second=ends, centre=st.floats(-12, 12), width=st.floats(0, 12))
def test_lines_hold_on_any_interval(node: Activation, first: float, second: float, centre: float, width: float) -> None:
    near = scale(node) * centre, scale(node) * (centre + width)
    pairs = torch.tensor([sorted((first, second)), near], dtype=torch.float64)
    bounds = Bounds(pairs[:, 0], pairs[:, 1])
    assert_sound(node, bounds, relax(node, bounds))


def envelope_at(node: Activation, bounds: Bounds, sign: int) -> Tensor:
    """The convex (sign 1) or concave (sign −1) envelope at the midpoint by brute force, as the best chord over it."""
    middle, half = (bounds.lower + bounds.upper)[:, None] / 2, (bounds.upper - bounds.lower)[:, None] / 2
    # How far the chord reaches to each side, first over all orders of magnitude, then closer and closer.
    ticks = torch.cat([torch.zeros(1), torch.logspace(-6, 0, 100)]).double()
    left = right = half * ticks
    best = torch.full_like(half, math.inf)
    for zoom in range(6):
        fa, fb = value(node, middle - left)[:, :, None], value(node, middle + right)[:, None, :]
        span = left[:, :, None] + right[:, None, :]
        weight = (right[:, None, :] / span).where(span > 0, 0.5)
        found = (sign * (weight * fa + (1 - weight) * fb)).flatten(1).min(1, keepdim=True)
        best = torch.minimum(best, found.values)
        factor = 1 + torch.linspace(-0.2, 0.2, 101, dtype=torch.float64) / 10**zoom
        left = torch.minimum(left.gather(1, found.indices // 101) * factor, half)
        right = torch.minimum(right.gather(1, found.indices % 101) * factor, half)
    return sign * best[:, 0]


@best
def test_lines_are_as_tight_as_any(node: Activation) -> None:
    """At the midpoint, the lines touch the envelope, which no sound line crosses: their area is the least possible."""
    generator = torch.Generator().manual_seed(2)
    shape = (150,)
    centre = torch.randn(shape, generator=generator, dtype=torch.float64) * 2
    width = 10 ** (torch.rand(shape, generator=generator, dtype=torch.float64) * 4 - 2.5)
    bounds = Bounds(scale(node) * (centre - width), scale(node) * (centre + width))
    lines = relax(node, bounds)
    middle = (bounds.lower + bounds.upper) / 2
    lower = lines.lower_slope * middle + lines.lower_offset
    upper = lines.upper_slope * middle + lines.upper_offset
    for gap in (envelope_at(node, bounds, 1) - lower, upper - envelope_at(node, bounds, -1)):
        assert float(gap.max()) <= 1e-7 * scale(node)


@pytest.mark.combined
@nodes
@dtypes
def test_gradients_are_finite(node: Activation, dtype: torch.dtype) -> None:
    node = stored(node, dtype)
    bounds = corpus(node, dtype)
    if isinstance(node, Smooth):
        # Where a function is upright, as arcsin at 1, it has no finite derivative by the end of an interval.
        steep = [node.known.slope(end, node.parameter).isfinite() for end in (bounds.lower, bounds.upper)]
        bounds = Bounds(bounds.lower[steep[0] & steep[1]], bounds.upper[steep[0] & steep[1]])
    leaves = [bounds.lower.requires_grad_(), bounds.upper.requires_grad_()]
    if isinstance(node, Gelu):
        leaves.append(node.lam.requires_grad_())
    alpha = torch.full_like(bounds.lower, 0.4).requires_grad_()
    for slope in (None, alpha):
        lines = relax(node, bounds, slope)
        total = sum(getattr(lines, name).sum() for name in vars(lines))
        wanted = [*leaves, alpha] if slope is not None else leaves
        for gradient in torch.autograd.grad(total, wanted, allow_unused=True):
            assert gradient is None or bool(torch.isfinite(gradient).all())
    found = image(node, bounds)
    for gradient in torch.autograd.grad((found.lower + found.upper).sum(), leaves):
        assert bool(torch.isfinite(gradient).all())
    if isinstance(node, Gelu):
        node.lam.requires_grad_(False)


@smooth
def test_gradients_are_right(node: Activation) -> None:
    """The table treats tangent points as constants in differentiation, which must not change the derivative."""
    lower = torch.tensor([-4.0, -0.3, -1.0, -7.0, -2.5, 0.2, 1.6, 0.6], dtype=torch.float64) * scale(node)
    upper = torch.tensor([1.5, 2.9, 8.0, -0.4, 2.2, 0.9, 3.0, 5.0], dtype=torch.float64) * scale(node)

    def middles(first: Tensor, second: Tensor) -> Tensor:
        # In units of the activation's width, so that one tolerance fits.
        lines = relax(node, Bounds(first * scale(node), second * scale(node)))
        middle = (first + second) / 2
        below = lines.lower_slope * middle + lines.lower_offset / scale(node)
        above = lines.upper_slope * middle + lines.upper_offset / scale(node)
        return torch.stack([below, above, lines.lower_slope, lines.upper_slope])

    leaves = (lower / scale(node)).requires_grad_(), (upper / scale(node)).requires_grad_()
    assert torch.autograd.gradcheck(middles, leaves, eps=1e-5, atol=1e-4)


def test_gradient_in_lambda_is_right() -> None:
    lower = torch.tensor([-4.0, -0.3, -1.0, -7.0, 0.2], dtype=torch.float64)
    upper = torch.tensor([1.5, 2.9, 8.0, -0.4, 0.9], dtype=torch.float64)

    def all_bounds(lam: Tensor) -> Tensor:
        node = Gelu(lam=lam, **PLACE)
        lines, found = relax(node, Bounds(lower, upper)), image(node, Bounds(lower, upper))
        return torch.stack([lines.lower_slope + lines.lower_offset, lines.upper_slope, found.lower, found.upper])

    assert torch.autograd.gradcheck(all_bounds, torch.tensor(2.0, dtype=torch.float64, requires_grad=True), atol=1e-4)


@nodes
def test_nan_bounds_give_no_finite_bounds(node: Activation) -> None:
    nan, one = torch.tensor([[math.nan, 1.0, math.nan]]).double(), torch.tensor([[2.0, math.nan, math.nan]]).double()
    bounds = Bounds(nan, one)
    found, lines = image(node, bounds), relax(node, bounds)
    assert bool((torch.isnan(found.lower) | torch.isnan(found.upper)).all())
    # Lines of ReLU can hold without the bound that is missing; what they are used with is NaN all the same.
    reach = torch.maximum(bounds.lower.abs(), bounds.upper.abs())
    used = lines.upper_slope if isinstance(node, Relu) else backward_activation(node, reach, reach, lines, 1)
    assert bool(torch.isnan(used).all())


def test_unknown_activations_are_named() -> None:
    class Swish(Activation):
        op = "Swish"

    with pytest.raises(UnsupportedError, match=r"node 'act' \(Swish\)"):
        relax(Swish(**PLACE), Bounds(torch.zeros(1), torch.ones(1)))


@pytest.mark.parametrize("name", ["Sin", "Cos"])
@dtypes
def test_waves_far_out_are_taken_for_all_their_values(name: str, dtype: torch.dtype) -> None:
    """There two neighbouring numbers may have the largest value between them."""
    far = torch.tensor([1e7, 1e9, 1e15, -1e12], dtype=dtype)
    bounds = Bounds(far, torch.nextafter(far, torch.full_like(far, torch.inf)))
    node = stored(function(name), dtype)
    found, lines = image(node, bounds), relax(node, bounds)
    wide = far.abs() > torch.finfo(dtype).eps ** -0.5
    assert bool((found.lower[wide] == -1).all() and (found.upper[wide] == 1).all())
    assert bool((lines.lower_slope[wide] == 0).all() and (lines.upper_offset[wide] == 1).all())


@pytest.mark.parametrize("name", ["Log", "Sqrt"])
def test_functions_where_they_are_not_defined_prove_nothing(name: str) -> None:
    found = image(function(name), interval(-1.0, 1.0))
    assert not bool((found.lower > -torch.inf).any())


def precise(node: Activation) -> Callable[[mpmath.mpf], mpmath.mpf]:
    """The activation in mpmath's arithmetic."""
    if isinstance(node, Gelu):
        lam = mpmath.mpf(float(node.lam))
        return lambda x: x * mpmath.erfc(-lam * x / mpmath.sqrt(2)) / 2
    return mpmath.tanh if isinstance(node, Tanh) else lambda x: 1 / (1 + mpmath.exp(-x))


def stationary(node: Activation, slope: mpmath.mpf) -> list[mpmath.mpf]:
    """The points at which the activation has a given slope, in mpmath's arithmetic."""
    if not isinstance(node, Gelu):
        factor = 1 if isinstance(node, Tanh) else 2
        if not 0 < slope * factor**2 < 1:
            return []
        x = factor * mpmath.acosh(1 / (factor * mpmath.sqrt(slope)))
        return [x, -x]
    found = []
    bend, far = mpmath.sqrt(2), mpmath.mpf(45)
    for left, right in ((-bend, bend), (-far, -bend), (bend, far)):

        def excess(t: mpmath.mpf) -> mpmath.mpf:
            return mpmath.erfc(-t / mpmath.sqrt(2)) / 2 + t * mpmath.npdf(t) - slope

        rising = excess(right) > 0
        if (excess(left) > 0) == rising:
            continue
        for _ in range(90):
            middle = (left + right) / 2
            left, right = (left, middle) if (excess(middle) > 0) == rising else (middle, right)
        found.append(left / float(node.lam))
    return found


@pytest.mark.combined
@smooth
@dtypes
def test_rounding_is_a_few_units(node: Activation, dtype: torch.dtype) -> None:
    """At every point where rounding can be largest, the stated 64 units are ten times the actual error."""
    node = stored(node, dtype)
    generator = torch.Generator().manual_seed(1)
    centre = torch.randn(12, generator=generator, dtype=torch.float64) * torch.logspace(-2, 2, 12).double()
    width = 10 ** (torch.rand(12, generator=generator, dtype=torch.float64) * 6 - 4)
    bounds = Bounds((scale(node) * (centre - width)).to(dtype), (scale(node) * (centre + width / 3)).to(dtype))
    lines, found, f, u = relax(node, bounds), image(node, bounds), precise(node), unit_roundoff(dtype)
    absolute, tiny = float(row(node).absolute(node)) / row(node).ulps, 4 * torch.finfo(dtype).tiny
    with mpmath.workdps(40):
        for i in range(len(centre)):
            lb, ub = mpmath.mpf(bounds.lower[i].item()), mpmath.mpf(bounds.upper[i].item())
            for slope, offset, sign in (
                (lines.lower_slope[i], lines.lower_offset[i], 1),
                (lines.upper_slope[i], lines.upper_offset[i], -1),
            ):
                s, o = mpmath.mpf(slope.item()), mpmath.mpf(offset.item())
                inside = [x for x in stationary(node, s) if lb < x < ub]
                unit = u * (abs(s) * max(abs(lb), abs(ub)) + abs(o) + absolute)
                gap = min(sign * (f(x) - s * x - o) for x in (lb, ub, *inside))
                assert abs(gap) <= 4 * unit + tiny, (bounds.lower[i], bounds.upper[i], sign)
            dip = [x for x in stationary(node, mpmath.mpf(0)) if lb < x < ub]
            values = [f(x) for x in (lb, ub, *dip)]
            for end, exact in ((found.lower[i], min(values)), (found.upper[i], max(values))):
                assert abs(mpmath.mpf(end.item()) - exact) <= 4 * u * (abs(exact) + absolute) + tiny
