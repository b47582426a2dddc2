"""The smooth functions, a row of ``CURVES`` each. A new one needs a row here, its certificates one in the checker."""

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


def _numpy_sigmoid(x: Array) -> Any:
    # Of a negative x all digits count: SiLU and its like are multiples of this.
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + small), small / (1 + small))


def _softplus(x: Array) -> Any:
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


@dataclass(frozen=True)
class SmoothCurve:
    """A function f(x, p) of one variable with a positive parameter, 1 where it has none.

    Attributes:
        value, derivative: f and f′, as accurate as ``smooth`` says.
        rising: whether f′ rises, or else falls, before the first bend, between each two neighbouring bends, and after
            the last; None where f is linear.
        bends: where f turns from convex to concave or back, or its slope jumps, in order.
        turns: where f turns from falling to rising or back; each is a point where f is flat, or a bend.
        point: of (s, p): the point where f′ is s, that right of 0 where f is ``mirrored``; for slopes that f′ does not
            have there any number towards which f′ tends to s. None for functions with points in a table.
        mirrored: whether f′(−x) = f′(x), and f bends at 0.
        precision: of ``point``, relative to its size and 1.
        absolute: absolute errors of f and f′, relative to the relative ones.
        kinked: whether the slope jumps at bends, or f is not defined there.
        period: after which bends and turns repeat; those of one period are given.
        stretched: whether f(x, p) = f(p·x, 1)/p, so that bends and turns are those for p = 1 divided by p.
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
        numpy: f again, of numpy's arrays and from its definition: off by a few units in the last place of itself and
            of ``error_scale``; ``wide``: in wider formats than float64, too.
    """

    value: Value
    derivative: Value
    rising: tuple[bool | None, ...]
    numpy: Callable[[Array, float], Any] = field(kw_only=True)
    bends: tuple[float, ...] = ()
    turns: tuple[float, ...] = ()
    point: Callable[[Tensor, float], Tensor] | None = None
    mirrored: bool = False
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
    error_scale: Callable[[Array], Any] = lambda x: 1.0
    wide: bool = True


def _rectifier(value: Value, derivative: Value, bend: tuple[float, float], turn: float, **more: Any) -> SmoothCurve:
    """Return the row of a function that is concave, convex and concave, as x·P(x) are that tend to ReLU."""
    known: dict[str, Any] = {"gated": True, "zero": 0.0, "precision": 2.0**-24, **more}
    return SmoothCurve(value, derivative, (False, True, False), bend, (turn,), **known)


def _odd(value: Value, derivative: Value, point: Callable[[Tensor, float], Tensor], **more: Any) -> SmoothCurve:
    """Return the row of a function that bends at 0 alone and that a point mirrors: convex, then concave by default."""
    known: dict[str, Any] = {"rising": (True, False), "bends": (0.0,), "mirrored": True, "zero": 0.0, **more}
    return SmoothCurve(value, derivative, point=point, **known)


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


def _positive(s: Tensor) -> Tensor:
    return s.clamp(min=tiny(s.dtype))


def _part(s: Tensor) -> Tensor:
    """Return slopes moved into (0, 1]."""
    return s.clamp(tiny(s.dtype), 1)


def _arcosh_root(s: Tensor) -> Tensor:
    """Return the x ≥ 0 at which tanh′(x) = s: arcosh(s^(−½))."""
    s = _part(s)
    return torch.log1p(torch.sqrt(1 - s)) - 0.5 * torch.log(s)


def _arcsine_point(s: Tensor) -> Tensor:
    """Return the x ≥ 0 at which asin′(x) = s."""
    s = s.clamp(min=1)
    return torch.sqrt((s - 1) / s) * torch.sqrt((s + 1) / s)


def _wave(
    value: Value, derivative: Value, bends: tuple[float, float], turns: tuple[float, float], **more: Any
) -> SmoothCurve:
    """Return the row of a sine: the slope of its first piece rises where that begins at 0."""
    known = {"absolute": 1.0, "period": 2 * math.pi, "least": -1.0, "most": 1.0, "versions": (7, 22), **more}
    return SmoothCurve(value, derivative, (bends[0] == 0, bends[0] != 0), bends, turns, **known)


# fmt: off
CURVES: dict[str, SmoothCurve] = {
    # Of a sigmoid what is lost is bounded absolutely, which is enough here: tanh(x/2)/2 + 1/2 overflows nowhere.
    "Sigmoid": _odd(
        lambda x, _: torch.sigmoid(x), lambda x, _: torch.sigmoid(x) * torch.sigmoid(-x),
        lambda s, _: 2 * _arcosh_root(4 * s), increasing=True, zero=None, least=0.0, most=1.0,
        operator="Sigmoid", versions=(6, 13), torch="sigmoid", numpy=lambda x, _: 0.5 + 0.5 * np.tanh(x / 2),
    ),
    # tanh′ = 1 − tanh², without cancellation.
    "Tanh": _odd(
        lambda x, _: torch.tanh(x), lambda x, _: 4 * torch.sigmoid(2 * x) * torch.sigmoid(-2 * x),
        lambda s, _: _arcosh_root(s), increasing=True, least=-1.0, most=1.0,
        operator="Tanh", versions=(6, 13), torch="tanh", numpy=lambda x, _: np.tanh(x),
    ),
    # λ-GELU, x·Φ(λx), by erfc, since 1 + erf leaves nothing but rounding errors for negative x. A relative error u of
    # λx moves f by u·|x·f′(x)| ≤ u·(|f(x)| + 0.294/λ), and Φ(t) by at most that error times |t·φ(t)| < 1/4.
    # The complementary error function keeps its relative accuracy in the tail.
    "GELU": _rectifier(
        lambda x, lam: 0.5 * x * torch.special.erfc(x * (-lam * math.sqrt(0.5))), _gelu_slope,
        (-math.sqrt(2), math.sqrt(2)), -0.7517915246935645, absolute=1.0, stretched=True, saturated=6.0,
        torch="gelu", numpy=lambda x, lam: x * (0.5 * _erfc(-lam * x / math.sqrt(2))), error_scale=np.abs, wide=False,
    ),
    "SiLU": _rectifier(
        lambda x, _: x * torch.sigmoid(x), lambda x, _: torch.sigmoid(x) * (1 + x * torch.sigmoid(-x)),
        (-2.3993572805154677, 2.3993572805154677), -1.2784645427610738, torch="silu",
        numpy=lambda x, _: x * _numpy_sigmoid(x),
    ),
    # P(x) = tanh(softplus(x)). With w = eˣ, 1 − P(x) = 2/(w² + 2w + 2) and P(−x) = (2w + 1)/(2w² + 2w + 1).
    "Mish": _rectifier(
        _mish, _mish_slope, (-2.2563763963607931, 1.4905711794854285), -1.1924312145154952,
        operator="Mish", versions=(18, 22), torch="mish", numpy=lambda x, _: x * np.tanh(_softplus(x)),
    ),
    "tanh-GELU": _rectifier(
        lambda x, _: x * torch.sigmoid(_inner(x)), _tanh_gelu_slope, (-1.4185040087908284, 1.4185040087908284),
        -0.75246142207101626, absolute=1.0, wide=False,
        numpy=lambda x, _: x * _numpy_sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)),
    ),
    # Libraries compute exp(x) − 1 as it is written, which is off by a roundoff of 1 next to 0.
    "ELU": SmoothCurve(
        lambda x, alpha: torch.where(x > 0, x, alpha * torch.expm1(x.clamp(max=0))),
        lambda x, alpha: torch.where(x > 0, 1.0, alpha * torch.exp(x.clamp(max=0))), (True, None), (0.0,),
        point=lambda s, alpha: torch.log(_positive(s / alpha)), absolute=1.0,
        kinked=True, increasing=True, zero=0.0, operator="Elu", versions=(6, 22), attribute="alpha",
        numpy=lambda x, alpha: np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0))),
    ),
    "Softplus": SmoothCurve(
        lambda x, _: x.clamp(min=0) + torch.log1p(torch.exp(-x.abs())), lambda x, _: torch.sigmoid(x), (True,),
        point=lambda s, _: torch.logit(s.clamp(tiny(s.dtype), 1 - epsilon(s.dtype))), increasing=True, least=0.0,
        operator="Softplus", versions=(1, 22), torch="softplus", numpy=lambda x, _: _softplus(x),
    ),
    "Softsign": _odd(
        lambda x, _: x / (1 + x.abs()), lambda x, _: (1 + x.abs()) ** -2, lambda s, _: _part(s) ** -0.5 - 1,
        increasing=True, least=-1.0, most=1.0, operator="Softsign", versions=(1, 22),
        numpy=lambda x, _: x / (1 + np.abs(x)),
    ),
    "HardSwish": SmoothCurve(
        lambda x, _: x * (x + 3).clamp(0, 6) / 6,
        lambda x, _: torch.where(x < -3, 0.0, torch.where(x > 3, 1.0, (2 * x + 3) / 6)),
        (None, True, None), (-3.0, 3.0), (-1.5,), point=lambda s, _: 3 * s - 1.5, kinked=True, gated=True, zero=0.0,
        operator="HardSwish", versions=(14, 22), torch="hardswish",
        numpy=lambda x, _: x * np.clip(x + 3, 0, 6) / 6,
    ),
    "Erf": _odd(
        lambda x, _: torch.erf(x), _erf_slope,
        lambda s, _: torch.sqrt(-torch.log(_part(s * (math.sqrt(math.pi) / 2)))), increasing=True, least=-1.0, most=1.0,
        operator="Erf", versions=(9, 13), torch="erf", numpy=lambda x, _: _erf(x), wide=False,
    ),
    "Atan": _odd(
        lambda x, _: torch.atan(x), lambda x, _: 1 / (1 + x * x),
        lambda s, _: torch.sqrt((1 - _part(s)) / _part(s)), increasing=True,
        operator="Atan", versions=(7, 22), torch="atan", numpy=lambda x, _: np.arctan(x),
    ),
    # Outside of [−1, 1], (−1, 1) or [1, ∞), where it is not defined, a function is NaN, and nothing is known of it.
    "Asin": _odd(
        lambda x, _: torch.asin(x), lambda x, _: 1 / torch.sqrt(((1 - x) * (1 + x)).clamp(min=0)),
        lambda s, _: _arcsine_point(s), rising=(False, True),
        operator="Asin", versions=(7, 22), torch="asin", numpy=lambda x, _: np.arcsin(x),
    ),
    "Acos": _odd(
        lambda x, _: torch.acos(x), lambda x, _: -1 / torch.sqrt(((1 - x) * (1 + x)).clamp(min=0)),
        lambda s, _: _arcsine_point(-s), zero=None, least=0.0,
        operator="Acos", versions=(7, 22), torch="acos", numpy=lambda x, _: np.arccos(x),
    ),
    "Atanh": _odd(
        lambda x, _: torch.atanh(x), lambda x, _: 1 / ((1 - x) * (1 + x)).clamp(min=0),
        lambda s, _: torch.sqrt((s.clamp(min=1) - 1) / s.clamp(min=1)), rising=(False, True),
        operator="Atanh", versions=(9, 22), torch="atanh", numpy=lambda x, _: np.arctanh(x),
    ),
    "Acosh": SmoothCurve(
        _acosh, lambda x, _: 1 / (torch.sqrt((x - 1).clamp(min=0)) * torch.sqrt(x + 1)), (False,),
        point=lambda s, _: torch.sqrt(1 + _positive(s) ** -2), least=0.0,
        operator="Acosh", versions=(9, 22), torch="acosh", numpy=lambda x, _: np.arccosh(x),
    ),
    "Asinh": _odd(
        _asinh, lambda x, _: torch.where(x.abs() > _FAR, 1 / x.abs(), 1 / torch.sqrt(1 + x * x)),
        lambda s, _: torch.sqrt((1 - _part(s)) * (1 + _part(s))) / _part(s), increasing=True,
        operator="Asinh", versions=(9, 22), torch="asinh", numpy=lambda x, _: np.arcsinh(x),
    ),
    "Exp": SmoothCurve(
        lambda x, _: torch.exp(x), lambda x, _: torch.exp(x), (True,), point=lambda s, _: torch.log(_positive(s)),
        increasing=True, least=0.0, one_from=0.0, operator="Exp", versions=(6, 13), torch="exp",
        numpy=lambda x, _: np.exp(x),
    ),
    "Square": SmoothCurve(
        lambda x, _: x * x, lambda x, _: 2 * x, (True,), turns=(0.0,), point=lambda s, _: s / 2, least=0.0, power=2,
        numpy=lambda x, _: x * x,
    ),
    "Cube": _odd(
        lambda x, _: x * x * x, lambda x, _: 3 * x * x, lambda s, _: torch.sqrt(s.clamp(min=0) / 3),
        rising=(False, True), increasing=True, power=3, numpy=lambda x, _: x**3,
    ),
    "Log": SmoothCurve(
        lambda x, _: torch.log(x), lambda x, _: 1 / x, (False,), point=lambda s, _: 1 / _positive(s), zero=1.0,
        operator="Log", versions=(6, 13), torch="log", numpy=lambda x, _: np.log(x),
    ),
    "Sqrt": SmoothCurve(
        lambda x, _: torch.sqrt(x), lambda x, _: 0.5 / torch.sqrt(x), (False,),
        point=lambda s, _: (0.5 / _positive(s)) ** 2, least=0.0, operator="Sqrt", versions=(6, 13), torch="sqrt",
        numpy=lambda x, _: np.sqrt(x),
    ),
    # At 0, nothing is known: an interval about 0 has NaN for an image.
    "Reciprocal": _odd(
        lambda x, _: torch.where(x == 0, torch.nan, 1 / x), lambda x, _: -1 / (x * x),
        lambda s, _: _positive(-s) ** -0.5, rising=(False, True), turns=(0.0,), kinked=True, one_to=1.0,
        operator="Reciprocal", versions=(6, 13), torch="reciprocal", numpy=lambda x, _: 1 / x,
    ),
    "InverseRoot": SmoothCurve(
        lambda x, _: 1 / torch.sqrt(x), lambda x, _: -0.5 / (x * torch.sqrt(x)), (True,),
        point=lambda s, _: (2 * _positive(-s)) ** (-2 / 3), least=0.0, one_to=1.0, torch="rsqrt",
        numpy=lambda x, _: 1 / np.sqrt(x),
    ),
    # x^p for x ≥ 0 and a p that is no whole number: above 1 it is convex, below 1 concave.
    **{
        kind: SmoothCurve(
            lambda x, p: torch.where(x < 0, torch.nan, x**p),
            lambda x, p: torch.where(x < 0, torch.nan, p * x ** (p - 1)),
            (kind == "Power",), point=lambda s, p: (_positive(s) / p) ** (1 / (p - 1)), least=0.0,
            numpy=lambda x, p: x**p,
        )
        for kind in ("Power", "Root")
    },
    "Sin": _wave(
        lambda x, _: torch.sin(x), lambda x, _: torch.cos(x), (0.0, math.pi), (math.pi / 2, 3 * math.pi / 2),
        operator="Sin", torch="sin", numpy=lambda x, _: np.sin(x),
    ),
    "Cos": _wave(
        lambda x, _: torch.cos(x), lambda x, _: -torch.sin(x), (math.pi / 2, 3 * math.pi / 2), (0.0, math.pi),
        operator="Cos", torch="cos", numpy=lambda x, _: np.cos(x),
    ),
}
# fmt: on
"""By kind."""
