"""Smooth functions of one variable, by name: their values, and where their slopes rise and fall.

A node of the kind ``Smooth`` names one of them. What is said here of a function's slope is all that bound propagation
needs: between two neighbouring bends the slope only rises or only falls.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_ROOT_2_PI = math.sqrt(2 / math.pi)
_CUBIC = 0.044715


@dataclass(frozen=True)
class Function:
    """A function of one variable and, where it has one, a positive parameter, both tensors.

    Attributes:
        value: f(x, parameter), with a relative error of a few units in the last place, and an absolute one of a few
            unit roundoffs where ``absolute`` says so.
        slope: f′(x, parameter); at a bend where it jumps either of its values.
        rising: whether the slope only rises, or else only falls, before the first bend, between each two neighbouring
            bends, and after the last.
        bends: where f turns from convex to concave or back, or its slope jumps, in order.
        turns: where f turns from falling to rising or back; each is a point where f is flat, or a bend.
        steepest: the largest |f′| for a parameter of 1, infinite if there is none.
        absolute: the absolute error of ``value`` in unit roundoffs is this many times that of one operation.
        period: after which bends and turns repeat; they are those of one period then. None if they do not.
    """

    value: Callable[[Tensor, Tensor], Tensor]
    slope: Callable[[Tensor, Tensor], Tensor]
    rising: tuple[bool, ...]
    bends: tuple[float, ...] = ()
    turns: tuple[float, ...] = ()
    steepest: float = math.inf
    absolute: float = 0.0
    period: float | None = None


def _silu(x: Tensor, _: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def _silu_slope(x: Tensor, _: Tensor) -> Tensor:
    return torch.sigmoid(x) * (1 + x * torch.sigmoid(-x))


def _softplus(x: Tensor, _: Tensor) -> Tensor:
    return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))


def _mish(x: Tensor, p: Tensor) -> Tensor:
    return x * torch.tanh(_softplus(x, p))


def _mish_slope(x: Tensor, p: Tensor) -> Tensor:
    t = torch.tanh(_softplus(x, p))
    return t + x * (1 - t) * (1 + t) * torch.sigmoid(x)


def _inner(x: Tensor) -> Tensor:
    """Twice the argument of the hyperbolic tangent by which GELU is approximated."""
    return 2 * _ROOT_2_PI * (x + _CUBIC * x * x * x)


def _tanh_gelu(x: Tensor, _: Tensor) -> Tensor:
    # ½·(1 + tanh(z)) = σ(2z), which keeps its relative accuracy where z is negative.
    return x * torch.sigmoid(_inner(x))


def _tanh_gelu_slope(x: Tensor, _: Tensor) -> Tensor:
    z = _inner(x)
    # Where σ(−z) is 0, x·z′ may be infinite.
    steep = (torch.sigmoid(-z) * x).clamp(-1e30, 1e30) * (2 * _ROOT_2_PI * (1 + 3 * _CUBIC * x * x)).clamp(max=1e30)
    return torch.sigmoid(z) * (1 + steep)


def _elu(x: Tensor, alpha: Tensor) -> Tensor:
    return torch.where(x > 0, x, alpha * torch.expm1(x.clamp(max=0)))


def _elu_slope(x: Tensor, alpha: Tensor) -> Tensor:
    return torch.where(x > 0, torch.ones_like(x), alpha * torch.exp(x.clamp(max=0)))


def _hard_swish(x: Tensor, _: Tensor) -> Tensor:
    return x * (x + 3).clamp(0, 6) / 6


def _hard_swish_slope(x: Tensor, _: Tensor) -> Tensor:
    return torch.where(x <= -3, 0.0, torch.where(x >= 3, 1.0, (2 * x + 3) / 6))


_S_SHAPED = (False, True, False)
"""Concave, convex, concave."""

FUNCTIONS: dict[str, Function] = {
    "SiLU": Function(
        _silu,
        _silu_slope,
        _S_SHAPED,
        (-2.3993572805154677, 2.3993572805154677),
        (-1.2784645427610738,),
        steepest=1.09984,
    ),
    "Mish": Function(
        _mish,
        _mish_slope,
        _S_SHAPED,
        (-2.2563763963607931, 1.4905711794854285),
        (-1.1924312145154952,),
        steepest=1.0885,
    ),
    "tanh-GELU": Function(
        _tanh_gelu,
        _tanh_gelu_slope,
        _S_SHAPED,
        (-1.4185040087908284, 1.4185040087908284),
        (-0.75246142207101626,),
        steepest=1.13,
        absolute=1.0,
    ),
    "ELU": Function(_elu, _elu_slope, (True, True), (0.0,), steepest=1.0),
    "Softplus": Function(_softplus, lambda x, _: torch.sigmoid(x), (True,), steepest=1.0),
    "Softsign": Function(
        lambda x, _: x / (1 + x.abs()), lambda x, _: (1 + x.abs()) ** -2, (True, False), (0.0,), steepest=1.0
    ),
    "HardSwish": Function(_hard_swish, _hard_swish_slope, (True, True, True), (-3.0, 3.0), (-1.5,), steepest=1.5),
    "Erf": Function(
        lambda x, _: torch.erf(x),
        lambda x, _: 2 / math.sqrt(math.pi) * torch.exp(-x * x),
        (True, False),
        (0.0,),
        steepest=1.1284,
    ),
    "Atan": Function(lambda x, _: torch.atan(x), lambda x, _: 1 / (1 + x * x), (True, False), (0.0,), steepest=1.0),
    "Exp": Function(lambda x, _: torch.exp(x), lambda x, _: torch.exp(x), (True,)),
    "Square": Function(lambda x, _: x * x, lambda x, _: 2 * x, (True,), turns=(0.0,)),
    "Cube": Function(lambda x, _: x * x * x, lambda x, _: 3 * x * x, (False, True), (0.0,)),
    "Log": Function(lambda x, _: torch.log(x), lambda x, _: 1 / x, (False,)),
    "Sqrt": Function(lambda x, _: torch.sqrt(x), lambda x, _: 0.5 / torch.sqrt(x), (False,)),
    "Reciprocal": Function(
        # At 0, nothing is known: an interval about 0 has NaN for an image.
        lambda x, _: torch.where(x == 0, torch.nan, 1 / x),
        lambda x, _: -1 / (x * x),
        (False, True),
        (0.0,),
        (0.0,),
    ),
    "InverseRoot": Function(lambda x, _: 1 / torch.sqrt(x), lambda x, _: -0.5 / (x * torch.sqrt(x)), (True,)),
    "Sin": Function(
        lambda x, _: torch.sin(x),
        lambda x, _: torch.cos(x),
        (True, False, True),
        (0.0, math.pi),
        (math.pi / 2, 3 * math.pi / 2),
        steepest=1.0,
        absolute=1.0,
        period=2 * math.pi,
    ),
    "Cos": Function(
        lambda x, _: torch.cos(x),
        lambda x, _: -torch.sin(x),
        (False, True, False),
        (math.pi / 2, 3 * math.pi / 2),
        (0.0, math.pi),
        steepest=1.0,
        absolute=1.0,
        period=2 * math.pi,
    ),
}
"""By the name that nodes have for them. The parameter is α of ELU; the others take none, and 1 is given for it."""
