"""Functions of one variable, element by element."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from verifiable_relu.errors import UnsupportedError
from verifiable_relu.ir.functions.curves import CURVES
from verifiable_relu.ir.functions.steps import STEPS
from verifiable_relu.readers.builder import Value, tensor
from verifiable_relu.readers.derived import Derived, logarithm, rounded
from verifiable_relu.readers.onnx.call import Call, Converter, converts, float32


@converts("Relu", 6, 13, 14, group="pieces")
def _relu(call: Call) -> Value:
    return call.build.relu(call.value())


@converts("LeakyRelu", 6, 16, group="pieces")
def _leaky_relu(call: Call) -> Value:
    return call.build.leaky(call.value(), call.get("alpha", 0.01))


@converts("PRelu", 7, 9, 16, group="pieces")
def _prelu(call: Call) -> Value:
    return call.build.leaky(call.value(), tensor(call.constant(1)))


@converts("Abs", 6, 13, group="maxima")
def _abs(call: Call) -> Value:
    return call.build.size_of(call.value())


@converts("Gelu", 20, group="smooth")
def _gelu(call: Call) -> Value:
    kinds = {b"none": "GELU", b"tanh": "tanh-GELU"}
    approximate = call.get("approximate", b"none")
    if approximate not in kinds:
        raise UnsupportedError(f"its attribute approximate = {approximate!r}")
    return call.build.function(call.value(), kinds[approximate])


def _positive(call: Call, attribute: str) -> float:
    found: float = call.get(attribute, 1.0)
    if not found > 0:
        raise UnsupportedError(f"its attribute {attribute} = {found}")
    return found


def _of_kind(kind: str, attribute: str) -> Converter:
    return lambda call: call.build.function(call.value(), kind, _positive(call, attribute) if attribute else 1.0)


for _kind, _curve in CURVES.items():
    if _curve.operator:
        converts(_curve.operator, *_curve.versions, group="smooth")(_of_kind(_kind, _curve.attribute))


@converts("Selu", 6, 22, group="smooth")
def _selu(call: Call) -> Value:
    # Attributes are float32 numbers, their defaults too.
    alpha, gamma = (call.get(*default) for default in (("alpha", 1.6732631921768188), ("gamma", 1.0507010221481323)))
    if not alpha > 0:
        raise UnsupportedError(f"its attribute alpha = {alpha}")
    return _scaled(call, call.build.function(call.value(), "ELU", alpha), gamma)


@converts("Celu", 12, 28, group="smooth")
def _celu(call: Call) -> Value:
    # max(x, 0) + min(0, α·(exp(x/α) − 1)) is α·ELU(x/α).
    alpha = _positive(call, "alpha")
    inside = call.build.divided(call.value(), float32(alpha))
    return _scaled(call, call.build.function(inside, "ELU"), alpha)


@converts("Swish", 24, group="smooth")
def _swish(call: Call) -> Value:
    # x·σ(α·x) is SiLU(α·x)/α.
    alpha = call.get("alpha", 1.0)
    if alpha == 0:
        return _scaled(call, call.value(), 0.5)
    inside = _scaled(call, call.value(), alpha)
    return call.build.divided(call.build.function(inside, "SiLU"), float32(alpha))


def _scaled(call: Call, x: Value, factor: float) -> Value:
    return x if factor == 1 else call.build.scale(x, factor)


_POWERS = {-1.0: "Reciprocal", -0.5: "InverseRoot", 0.5: "Sqrt", 1.0: None, 2.0: "Square", 3.0: "Cube"}
"""The functions that are powers, by their exponents."""

MAX_POWER = 64
"""The largest exponent that is read."""


@converts("Pow", 7, 12, 13, 15, group="smooth")
def _pow(call: Call) -> Value:
    base = call.inputs[0]
    if isinstance(base, np.ndarray):
        return _power_of_constant(call, base)
    given, x, build = call.constant(1), call.value(), call.build
    if len(set(given.reshape(-1).tolist())) != 1 or given.ndim > len(x.shape):
        raise UnsupportedError("different exponents, or an exponent that enlarges its base")
    exponent = float(given.reshape(-1)[0])
    if exponent in _POWERS:
        kind = _POWERS[exponent]
        return x if kind is None else build.function(x, kind)
    if not 0 < abs(exponent) <= MAX_POWER:
        raise UnsupportedError(f"the exponent {exponent:g}, where numbers up to ±{MAX_POWER} are read")
    if exponent == int(exponent):
        power = _power(call, x, int(abs(exponent)))
    else:
        power = build.function(x, "Power" if abs(exponent) > 1 else "Root", abs(exponent))
    return power if exponent > 0 else build.function(power, "Reciprocal")


def _power(call: Call, x: Value, exponent: int) -> Value:
    """Return x to a positive whole exponent, by squares, cubes and one product for what is left."""
    for factor, kind in ((2, "Square"), (3, "Cube")):
        if exponent % factor == 0:
            return call.build.function(_power(call, x, exponent // factor), kind)
    return x if exponent == 1 else call.build.product(x, _power(call, x, exponent - 1))


def _power_of_constant(call: Call, base: np.ndarray) -> Value:
    """Return a to computed exponents, for constants a > 0: exp(x·log a)."""
    if not bool((base > 0).all()):
        raise UnsupportedError("powers of a number that is not positive")
    number, error = rounded(logarithm(Derived.of(base)))
    return call.build.function(call.build.scale(call.value(1), number, error=error), "Exp")


def stepped(call: Call, kind: str) -> Value:
    """Return a function that jumps of the node's first input; whole numbers are left as they are."""
    x = call.value()
    return x if kind != "Sign" and call.build.is_whole(x) else call.build.function(x, kind)


def _of_step(kind: str) -> Converter:
    return lambda call: stepped(call, kind)


for _kind, _step in STEPS.items():
    if _step.operator:
        converts(_step.operator, *_step.versions, group="steps")(_of_step(_kind))


def bounded(call: Call, x: Value, end: Any, sign: int) -> Value:
    """Return max(x, end), or min(x, end) for ``sign`` −1, the end being broadcast to the shape of x.

    Ends that bound nothing are allowed for: −inf of a maximum, inf of a minimum.
    """
    end = torch.as_tensor(end, dtype=None if isinstance(end, torch.Tensor) else torch.float32)
    if bool((end == -sign * torch.inf).all()):
        return x
    if not bool(torch.isfinite(end).all()):
        raise UnsupportedError("an end that is not finite")
    build, turn = call.build, torch.full_like(end, float(sign))
    if bool((end.abs() > FAR).any()):
        # x + s·relu(s·(end − x)).
        beyond = build.relu(build.scale(x, -turn, center=end))
        return build.sum(x, build.scale(beyond, turn))
    # end + s·relu(s·(x − end)).
    return build.scale(build.relu(build.scale(x, turn, center=end)), turn, shift=end)


FAR = 2.0**12
"""Beyond it, an end is not added to and subtracted from values: rounding, relative to the end, would drown them.

The form for nearer ends has one use of the value instead of two, and so has tighter intervals.
"""
