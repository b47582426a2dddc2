"""The smooth functions: one row each of ``CURVES`` and of ``CHECKED``, which is written apart to check the former.

To add a function is to add these two rows, and one of the checker.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verifiable_relu.rounding import epsilon, tiny

Value = Callable[[Tensor, Any], Tensor]


_erf, _erfc = (np.vectorize(function, otypes=[np.float64]) for function in (math.erf, math.erfc))
Array = np.ndarray
_Slope = Callable[[Array, Array, float], Any]


@dataclass(frozen=True)
class Checked:
    """A function f(x, α) on float64 arrays.

    Attributes:
        value: f, off by a few units in the last place and of what ``beside`` says.
        slope: of (low, high, α), or a number: ≥ |f′(x, α)| for low ≤ x ≤ high, up to a few units in the last place.
        beside: what the error of ``value`` is relative to, in addition to the value itself.
        wide: whether ``value`` is as accurate in wider formats than float64.
    """

    value: Callable[[Array, float], Any]
    slope: _Slope | float
    beside: Callable[[Array], Array | float] = lambda x: 1.0
    wide: bool = True


def _numpy_sigmoid(x: Array) -> Any:
    # Of a negative x all digits count: SiLU and its like are multiples of this.
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + small), small / (1 + small))


def _softplus(x: Array) -> Any:
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def _largest(low: Array, high: Array) -> Any:
    return np.maximum(np.abs(low), np.abs(high))


def _inside(slope: Callable[[Array], Any]) -> _Slope:
    """Return the largest slope of a function on (−1, 1) that is steepest at the ends: by 1 − x² there, inf beyond."""

    def steepest(low: Array, high: Array, _: float) -> Any:
        far = _largest(low, high)
        return np.where(far < 1, slope(np.maximum((1 - far) * (1 + far), 0)), np.inf)

    return steepest


def _falling(slope: Callable[[Array, float], Any], least: float = 0.0) -> _Slope:
    """Return the largest slope of a function that is steepest at the lower end: infinite from ``least`` down."""
    return lambda low, high, alpha: np.where(low > least, slope(np.maximum(low, least), alpha), np.inf)


@dataclass(frozen=True)
class Curve:
    """A function f(x, p) of one variable with a positive parameter, 1 where it has none.

    Attributes:
        value, derivative: f and f′, as accurate as ``smooth`` says.
        rising: whether f′ rises, or else falls, before the first bend, between each two neighbouring bends, and after
            the last; None where f is linear.
        bends: where f turns from convex to concave or back, or its slope jumps, in order.
        turns: where f turns from falling to rising or back; each is a point where f is flat, or a bend.
        point: of (s, p, convex): the point where f is convex, or concave, and f′ is s; for slopes that f′ does not have
            there any number towards which f′ tends to s. None for functions whose points are looked up in a table.
        reach: f′ changes by less than 10⁻¹⁶ beyond −reach and reach, where a table ends.
        precision: of ``point``, relative to its size and 1.
        absolute: absolute errors of f and f′, relative to the relative ones.
        kinked: whether the slope jumps at bends, or f is not defined there.
        period: after which bends and turns repeat; those of one period are given.
        stretched: whether f(x, p) = f(p·x, 1)/p, so that bends, turns and reach are those for p = 1 divided by p.
        increasing: whether f increases everywhere.
        least, most: numbers that f(x) is never below, never above, whatever rounding makes of it.
        zero: f(x) ≥ 0 for every x ≥ ``zero`` and f(x) ≤ 0 for every x ≤ ``zero``; None if there is no such number.
        one_from, one_to: a number from which on f(x) ≥ 1, and one from which on f(x) ≤ 1, where that matters.
        saturated: from this |x| on f counts as 0 or x, from which it differs by less than 10⁻⁹·|x|.
        gated: as of ``Function``.
        power: the exponent, where f is x to a whole power.
        operator: the operator of ONNX that computes f and nothing else, if there is one.
        versions: the opsets in which definitions of the operator began that mean f.
        attribute: the name of the operator's attribute that is the parameter, 1 by default.
        torch: name of the operator of torch (aten).
        checked: the function again, from its definition and apart from the fields above, whose claims it checks.
    """

    value: Value
    derivative: Value
    rising: tuple[bool | None, ...]
    checked: Checked = field(kw_only=True)
    bends: tuple[float, ...] = ()
    turns: tuple[float, ...] = ()
    point: Callable[[Tensor, float, bool], Tensor] | None = None
    reach: float = math.inf
    precision: float = 2.0**-49
    absolute: float = 0.0
    kinked: bool = False
    period: float | None = None
    stretched: bool = False
    increasing: bool = False
    least: float = -math.inf
    most: float = math.inf
    zero: float | None = None
    one_from: float | None = None
    one_to: float | None = None
    saturated: float = math.inf
    gated: bool = False
    power: int = 0
    operator: str = ""
    versions: tuple[int, ...] = ()
    attribute: str = ""
    torch: str = ""


def _rectifier(value: Value, derivative: Value, bend: tuple[float, float], turn: float, **more: Any) -> Curve:
    """Return the row of a function that is concave, convex and concave, as x·P(x) are that tend to ReLU."""
    known: dict[str, Any] = {"gated": True, "zero": 0.0, "reach": 40.0, "precision": 2.0**-24, **more}
    return Curve(value, derivative, (False, True, False), bend, (turn,), **known)


_ROOT_2_PI = math.sqrt(2 / math.pi)
_CUBIC = 0.044715
_FAR = 1e9
"""From here on asinh and arcosh are ln(2x), up to 1/(4x²); squares of what is less do not overflow."""


def _erf_slope(x: Tensor, _: float) -> Tensor:
    # exp(−x²) to a few units of itself: the square of what is rounded to sixteenths is exact.
    near = torch.round(16 * x) / 16
    return 2 / math.sqrt(math.pi) * torch.exp(-near * near) * torch.exp((near - x) * (near + x))


def _gelu_slope(x: Tensor, lam: float) -> Tensor:
    t = lam * x
    return 0.5 * torch.special.erfc(t * -math.sqrt(0.5)) + t * torch.exp(-0.5 * t * t) / math.sqrt(2 * math.pi)


def _mish(x: Tensor, _: float) -> Tensor:
    # With v = σ(−x), tanh(softplus(x)) is (1 − v²)/(1 + v²), and 1 − v is σ(x).
    v = torch.sigmoid(-x)
    return x * torch.sigmoid(x) * (1 + v) / (1 + v * v)


def _mish_slope(x: Tensor, _: float) -> Tensor:
    v, s = torch.sigmoid(-x), torch.sigmoid(x)
    return s * (1 + v) / (1 + v * v) + x * s * (2 * v / (1 + v * v)) ** 2


def _inner(x: Tensor) -> Tensor:
    """Twice the argument of the hyperbolic tangent by which GELU is approximated: ½·(1 + tanh(z)) = σ(2z)."""
    return 2 * _ROOT_2_PI * (x + _CUBIC * x * x * x)


def _tanh_gelu_slope(x: Tensor, _: float) -> Tensor:
    z = _inner(x)
    # Where σ(−z) is 0, x·z′ may be infinite.
    steep = (torch.sigmoid(-z) * x).clamp(-1e30, 1e30) * (2 * _ROOT_2_PI * (1 + 3 * _CUBIC * x * x)).clamp(max=1e30)
    return torch.sigmoid(z) * (1 + steep)


def _asinh(x: Tensor, _: float) -> Tensor:
    size = x.abs()
    near = size.clamp(max=_FAR)
    near = torch.log1p(near + near * (near / (1 + torch.sqrt(1 + near * near))))
    return torch.where(size > _FAR, torch.log(size.clamp(min=1)) + math.log(2), near).copysign(x)


def _acosh(x: Tensor, _: float) -> Tensor:
    more = x - 1
    near = more.clamp(0, _FAR)
    near = torch.log1p(near + torch.sqrt(near * (near + 2)))
    found = torch.where(more > _FAR, torch.log(x.clamp(min=1)) + math.log(2), near)
    return torch.where(more >= 0, found, torch.nan)


def _power(x: Tensor, p: float) -> Tensor:
    return torch.where(x < 0, torch.nan, x**p)


def _power_slope(x: Tensor, p: float) -> Tensor:
    return torch.where(x < 0, torch.nan, p * x ** (p - 1))


def _positive(s: Tensor) -> Tensor:
    return s.clamp(min=tiny(s.dtype))


def _part(s: Tensor) -> Tensor:
    """Return slopes moved into (0, 1]."""
    return s.clamp(tiny(s.dtype), 1)


def _left(t: Tensor, convex: bool) -> Tensor:
    """Return the point ±t of a function that is convex left of 0 and concave right of it."""
    return -t if convex else t


def _arcosh_root(s: Tensor) -> Tensor:
    """Return the x ≥ 0 at which tanh′(x) = s: arcosh(s^(−½))."""
    s = _part(s)
    return torch.log1p(torch.sqrt(1 - s)) - 0.5 * torch.log(s)


def _arcsine_point(s: Tensor) -> Tensor:
    """Return the x ≥ 0 at which asin′(x) = s."""
    s = s.clamp(min=1)
    return torch.sqrt((s - 1) / s) * torch.sqrt((s + 1) / s)


def _wave(
    value: Value,
    derivative: Value,
    bends: tuple[float, float],
    turns: tuple[float, float],
    name: str,
    checked: Checked,
) -> Curve:
    first = bends[0] == 0
    return Curve(
        value, derivative, (first, not first), bends, turns,
        absolute=1.0, period=2 * math.pi, least=-1.0, most=1.0, operator=name, versions=(7, 22), torch=name.lower(),
        checked=checked,
    )  # fmt: skip


# fmt: off
CURVES: dict[str, Curve] = {
    "Sigmoid": Curve(
        lambda x, _: torch.sigmoid(x), lambda x, _: torch.sigmoid(x) * torch.sigmoid(-x), (True, False), (0.0,),
        point=lambda s, _, convex: _left(2 * _arcosh_root(4 * s), convex), increasing=True, least=0.0, most=1.0,
        operator="Sigmoid", versions=(6, 13), torch="sigmoid",
        # Of a sigmoid what is lost is bounded absolutely, which is enough here: tanh(x/2)/2 + 1/2 overflows nowhere.
        checked=Checked(lambda x, _: 0.5 + 0.5 * np.tanh(x / 2), 0.25),
    ),
    # tanh′ = 1 − tanh², without cancellation.
    "Tanh": Curve(
        lambda x, _: torch.tanh(x), lambda x, _: 4 * torch.sigmoid(2 * x) * torch.sigmoid(-2 * x), (True, False),
        (0.0,), point=lambda s, _, convex: _left(_arcosh_root(s), convex), increasing=True, least=-1.0, most=1.0,
        zero=0.0, operator="Tanh", versions=(6, 13), torch="tanh",
        checked=Checked(lambda x, _: np.tanh(x), 1.0),
    ),
    # λ-GELU, x·Φ(λx), by erfc, since 1 + erf leaves nothing but rounding errors for negative x. A relative error u of
    # λx moves f by u·|x·f′(x)| ≤ u·(|f(x)| + 0.294/λ).
    "GELU": _rectifier(
        lambda x, lam: 0.5 * x * torch.special.erfc(x * (-lam * math.sqrt(0.5))), _gelu_slope,
        (-math.sqrt(2), math.sqrt(2)), -0.7517915246935645, reach=9.0, absolute=1.0, stretched=True, saturated=6.0,
        torch="gelu",
        # The slope of x·Φ(λx) lies in [−0.12890, 1.12890] for every λ (arXiv 2603.21991). The computed argument t of
        # Φ has a relative error of a few u, which changes Φ(t) by at most that relative error times |t·φ(t)| < 1/4.
        # The complementary error function keeps its relative accuracy in the tail.
        checked=Checked(lambda x, lam: x * (0.5 * _erfc(-lam * x / math.sqrt(2))), 1.1290, np.abs, False),
    ),
    "SiLU": _rectifier(
        lambda x, _: x * torch.sigmoid(x), lambda x, _: torch.sigmoid(x) * (1 + x * torch.sigmoid(-x)),
        (-2.3993572805154677, 2.3993572805154677), -1.2784645427610738, torch="silu",
        checked=Checked(lambda x, _: x * _numpy_sigmoid(x), 1.0999),
    ),
    # P(x) = tanh(softplus(x)). With w = eˣ, 1 − P(x) = 2/(w² + 2w + 2) and P(−x) = (2w + 1)/(2w² + 2w + 1).
    "Mish": _rectifier(
        _mish, _mish_slope, (-2.2563763963607931, 1.4905711794854285), -1.1924312145154952,
        operator="Mish", versions=(18, 22), torch="mish",
        checked=Checked(lambda x, _: x * np.tanh(_softplus(x)), 1.0889),
    ),
    "tanh-GELU": _rectifier(
        lambda x, _: x * torch.sigmoid(_inner(x)), _tanh_gelu_slope, (-1.4185040087908284, 1.4185040087908284),
        -0.75246142207101626, reach=9.0, absolute=1.0,
        checked=Checked(
            lambda x, _: x * _numpy_sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)), 1.1295, wide=False
        ),
    ),
    # Libraries compute exp(x) − 1 as it is written, which is off by a roundoff of 1 next to 0.
    "ELU": Curve(
        lambda x, alpha: torch.where(x > 0, x, alpha * torch.expm1(x.clamp(max=0))),
        lambda x, alpha: torch.where(x > 0, 1.0, alpha * torch.exp(x.clamp(max=0))), (True, None), (0.0,),
        point=lambda s, alpha, _: torch.log(_positive(s / alpha)), absolute=1.0,
        kinked=True, increasing=True, zero=0.0, operator="Elu", versions=(6, 22), attribute="alpha",
        checked=Checked(
            lambda x, alpha: np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0))),
            lambda low, high, alpha: max(1.0, alpha),
        ),
    ),
    "Softplus": Curve(
        lambda x, _: x.clamp(min=0) + torch.log1p(torch.exp(-x.abs())), lambda x, _: torch.sigmoid(x), (True,),
        point=lambda s, *_: torch.logit(s.clamp(tiny(s.dtype), 1 - epsilon(s.dtype))), increasing=True, least=0.0,
        operator="Softplus", versions=(1, 22), torch="softplus",
        checked=Checked(lambda x, _: _softplus(x), 1.0),
    ),
    "Softsign": Curve(
        lambda x, _: x / (1 + x.abs()), lambda x, _: (1 + x.abs()) ** -2, (True, False), (0.0,),
        point=lambda s, _, convex: _left(_part(s) ** -0.5 - 1, convex), increasing=True, least=-1.0, most=1.0, zero=0.0,
        operator="Softsign", versions=(1, 22),
        checked=Checked(lambda x, _: x / (1 + np.abs(x)), 1.0),
    ),
    "HardSwish": Curve(
        lambda x, _: x * (x + 3).clamp(0, 6) / 6,
        lambda x, _: torch.where(x < -3, 0.0, torch.where(x > 3, 1.0, (2 * x + 3) / 6)),
        (None, True, None), (-3.0, 3.0), (-1.5,),
        point=lambda s, *_: 3 * s - 1.5, kinked=True, gated=True, zero=0.0,
        operator="HardSwish", versions=(14, 22), torch="hardswish",
        checked=Checked(lambda x, _: x * np.clip(x + 3, 0, 6) / 6, 1.5),
    ),
    "Erf": Curve(
        lambda x, _: torch.erf(x), _erf_slope, (True, False), (0.0,),
        point=lambda s, _, convex: _left(torch.sqrt(-torch.log(_part(s * (math.sqrt(math.pi) / 2)))), convex),
        increasing=True, least=-1.0, most=1.0, zero=0.0, operator="Erf", versions=(9, 13),
        torch="erf",
        checked=Checked(lambda x, _: _erf(x), 1.1284, wide=False),
    ),
    "Atan": Curve(
        lambda x, _: torch.atan(x), lambda x, _: 1 / (1 + x * x), (True, False), (0.0,),
        point=lambda s, _, convex: _left(torch.sqrt((1 - _part(s)) / _part(s)), convex), increasing=True, zero=0.0,
        operator="Atan", versions=(7, 22), torch="atan",
        checked=Checked(lambda x, _: np.arctan(x), 1.0),
    ),
    # Outside of [−1, 1], (−1, 1) or [1, ∞), where it is not defined, a function is NaN, and nothing is known of it.
    "Asin": Curve(
        lambda x, _: torch.asin(x), lambda x, _: 1 / torch.sqrt(((1 - x) * (1 + x)).clamp(min=0)), (False, True),
        (0.0,), point=lambda s, _, convex: _left(_arcsine_point(s), not convex), zero=0.0,
        operator="Asin", versions=(7, 22), torch="asin",
        checked=Checked(lambda x, _: np.arcsin(x), _inside(lambda rest: 1 / np.sqrt(rest))),
    ),
    "Acos": Curve(
        lambda x, _: torch.acos(x), lambda x, _: -1 / torch.sqrt(((1 - x) * (1 + x)).clamp(min=0)), (True, False),
        (0.0,), point=lambda s, _, convex: _left(_arcsine_point(-s), convex), least=0.0,
        operator="Acos", versions=(7, 22), torch="acos",
        checked=Checked(lambda x, _: np.arccos(x), _inside(lambda rest: 1 / np.sqrt(rest))),
    ),
    "Atanh": Curve(
        lambda x, _: torch.atanh(x), lambda x, _: 1 / ((1 - x) * (1 + x)).clamp(min=0), (False, True), (0.0,),
        point=lambda s, _, convex: _left(torch.sqrt((s.clamp(min=1) - 1) / s.clamp(min=1)), not convex), zero=0.0,
        operator="Atanh", versions=(9, 22), torch="atanh",
        checked=Checked(lambda x, _: np.arctanh(x), _inside(lambda rest: 1 / rest)),
    ),
    "Acosh": Curve(
        _acosh, lambda x, _: 1 / (torch.sqrt((x - 1).clamp(min=0)) * torch.sqrt(x + 1)), (False,),
        point=lambda s, *_: torch.sqrt(1 + _positive(s) ** -2), least=0.0,
        operator="Acosh", versions=(9, 22), torch="acosh",
        checked=Checked(lambda x, _: np.arccosh(x), _falling(lambda low, _: 1 / np.sqrt((low - 1) * (low + 1)), 1.0)),
    ),
    "Asinh": Curve(
        _asinh, lambda x, _: torch.where(x.abs() > _FAR, 1 / x.abs(), 1 / torch.sqrt(1 + x * x)), (True, False), (0.0,),
        point=lambda s, _, convex: _left(torch.sqrt((1 - _part(s)) * (1 + _part(s))) / _part(s), convex),
        increasing=True, zero=0.0, operator="Asinh", versions=(9, 22), torch="asinh",
        checked=Checked(lambda x, _: np.arcsinh(x), 1.0),
    ),
    "Exp": Curve(
        lambda x, _: torch.exp(x), lambda x, _: torch.exp(x), (True,), point=lambda s, *_: torch.log(_positive(s)),
        increasing=True, least=0.0, one_from=0.0, operator="Exp", versions=(6, 13), torch="exp",
        checked=Checked(lambda x, _: np.exp(x), lambda low, high, _: np.exp(high)),
    ),
    "Square": Curve(
        lambda x, _: x * x, lambda x, _: 2 * x, (True,), turns=(0.0,), point=lambda s, *_: s / 2, least=0.0, power=2,
        checked=Checked(lambda x, _: x * x, lambda low, high, _: 2 * _largest(low, high)),
    ),
    "Cube": Curve(
        lambda x, _: x * x * x, lambda x, _: 3 * x * x, (False, True), (0.0,),
        point=lambda s, _, convex: _left(torch.sqrt(s.clamp(min=0) / 3), not convex), increasing=True, zero=0.0,
        power=3,
        checked=Checked(lambda x, _: x**3, lambda low, high, _: 3 * _largest(low, high) ** 2),
    ),
    "Log": Curve(
        lambda x, _: torch.log(x), lambda x, _: 1 / x, (False,), point=lambda s, *_: 1 / _positive(s), zero=1.0,
        operator="Log", versions=(6, 13), torch="log",
        checked=Checked(lambda x, _: np.log(x), _falling(lambda low, _: 1 / low)),
    ),
    "Sqrt": Curve(
        lambda x, _: torch.sqrt(x), lambda x, _: 0.5 / torch.sqrt(x), (False,),
        point=lambda s, *_: (0.5 / _positive(s)) ** 2, least=0.0, operator="Sqrt", versions=(6, 13), torch="sqrt",
        checked=Checked(lambda x, _: np.sqrt(x), _falling(lambda low, _: 0.5 / np.sqrt(low))),
    ),
    # At 0, nothing is known: an interval about 0 has NaN for an image.
    "Reciprocal": Curve(
        lambda x, _: torch.where(x == 0, torch.nan, 1 / x), lambda x, _: -1 / (x * x), (False, True), (0.0,), (0.0,),
        point=lambda s, _, convex: _left(_positive(-s) ** -0.5, not convex), kinked=True, zero=0.0, one_to=1.0,
        operator="Reciprocal", versions=(6, 13), torch="reciprocal",
        checked=Checked(
            lambda x, _: 1 / x,
            lambda low, high, _: np.where((low > 0) | (high < 0), np.minimum(np.abs(low), np.abs(high)), 0.0) ** -2.0,
        ),
    ),
    "InverseRoot": Curve(
        lambda x, _: 1 / torch.sqrt(x), lambda x, _: -0.5 / (x * torch.sqrt(x)), (True,),
        point=lambda s, *_: (2 * _positive(-s)) ** (-2 / 3), least=0.0, one_to=1.0, torch="rsqrt",
        checked=Checked(lambda x, _: 1 / np.sqrt(x), _falling(lambda low, _: 0.5 * low**-1.5)),
    ),
    # x^p for x ≥ 0 and a p that is no whole number: above 1 it is convex, below 1 concave.
    "Power": Curve(
        _power, _power_slope, (True,), point=lambda s, p, _: (_positive(s) / p) ** (1 / (p - 1)), least=0.0,
        checked=Checked(
            lambda x, p: x**p, lambda low, high, p: np.where(low >= 0, p * np.maximum(high, 0) ** (p - 1), np.inf)
        ),
    ),
    "Root": Curve(
        _power, _power_slope, (False,), point=lambda s, p, _: (_positive(s) / p) ** (1 / (p - 1)), least=0.0,
        checked=Checked(lambda x, p: x**p, _falling(lambda low, p: p * low ** (p - 1))),
    ),
    "Sin": _wave(
        lambda x, _: torch.sin(x), lambda x, _: torch.cos(x), (0.0, math.pi), (math.pi / 2, 3 * math.pi / 2), "Sin",
        checked=Checked(lambda x, _: np.sin(x), 1.0),
    ),
    "Cos": _wave(
        lambda x, _: torch.cos(x), lambda x, _: -torch.sin(x), (math.pi / 2, 3 * math.pi / 2), (0.0, math.pi), "Cos",
        checked=Checked(lambda x, _: np.cos(x), 1.0),
    ),
}
# fmt: on
"""By kind."""
