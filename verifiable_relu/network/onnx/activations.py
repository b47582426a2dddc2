"""Element-wise activations."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from verifiable_relu.errors import UnsupportedError
from verifiable_relu.network.build import Builder
from verifiable_relu.network.derived import Derived, logarithm, rounded
from verifiable_relu.network.nodes import FUNCTIONS, Function, Gelu, LeakyRelu, Relu, curve
from verifiable_relu.network.onnx.call import Call, Converter, Value, converts
from verifiable_relu.network.onnx.elementwise import divided
from verifiable_relu.network.onnx.reduce import axes_of, summed


def _activation(call: Call, kind: type[Any], **parameters: Tensor) -> Value:
    x = call.value()
    return Value(call.build.activation(x.index, kind, call.name, **parameters), x.leading)


def smooth(build: Builder, x: int, function: str, name: str, parameter: float = 1.0) -> int:
    """A node of a smooth function, by its name."""
    return build.append(curve(function, name, (x,), build.shape(x), parameter))


@converts("Relu", 6, 13, 14, group="pieces")
def _relu(call: Call) -> Value:
    return _activation(call, Relu)


@converts("LeakyRelu", 6, 16, group="pieces")
def _leaky_relu(call: Call) -> Value:
    return _activation(call, LeakyRelu, slope=torch.tensor(call.get("alpha", 0.01), dtype=torch.float32))


@converts("PRelu", 7, 9, 16, group="pieces")
def _prelu(call: Call) -> Value:
    return _activation(call, LeakyRelu, slope=call.beside(call.constant(1), call.value()))


@converts("Gelu", 20, group="smooth")
def _gelu(call: Call) -> Value:
    approximate = call.get("approximate", b"none")
    if approximate == b"none":
        return _activation(call, Gelu, lam=torch.tensor(1.0))
    if approximate == b"tanh":
        return _smooth(call, "tanh-GELU")
    raise UnsupportedError(f"its attribute approximate = {approximate!r}")


def _smooth(call: Call, function: str, x: Value | None = None, parameter: float = 1.0) -> Value:
    """A smooth function of x, by default of the node's first input."""
    x = x or call.value()
    return Value(smooth(call.build, x.index, function, call.name, parameter), x.leading)


def _positive(call: Call, attribute: str) -> float:
    found: float = call.get(attribute, 1.0)
    if not found > 0:
        raise UnsupportedError(f"its attribute {attribute} = {found}")
    return found


def _row(name: str, known: Function) -> Converter:
    """What reads the operator of a row of ``FUNCTIONS``."""
    return lambda call: _smooth(call, name, None, _positive(call, known.attribute) if known.attribute else 1.0)


for _name, _known in FUNCTIONS.items():
    converts(_known.operator, *_known.versions, group="smooth")(_row(_name, _known))


@converts("Selu", 6, 22, group="smooth")
def _selu(call: Call) -> Value:
    # Attributes are float32 numbers, their defaults too.
    alpha, gamma = (call.get(*default) for default in (("alpha", 1.6732631921768188), ("gamma", 1.0507010221481323)))
    if not alpha > 0:
        raise UnsupportedError(f"its attribute alpha = {alpha}")
    return _scaled(call, _smooth(call, "ELU", None, alpha), gamma)


@converts("Celu", 12, 28, group="smooth")
def _celu(call: Call) -> Value:
    # max(x, 0) + min(0, α·(exp(x/α) − 1)) is α·ELU(x/α).
    alpha = _positive(call, "alpha")
    inside = divided(call, call.value(), torch.tensor(alpha, dtype=torch.float32))
    return _scaled(call, _smooth(call, "ELU", inside), alpha)


@converts("Swish", 24, group="smooth")
def _swish(call: Call) -> Value:
    # x·σ(α·x) is SiLU(α·x)/α.
    alpha = call.get("alpha", 1.0)
    if alpha == 0:
        return _scaled(call, call.value(), 0.5)
    inside = _scaled(call, call.value(), alpha)
    return divided(call, _smooth(call, "SiLU", inside), torch.tensor(alpha, dtype=torch.float32))


def _scaled(call: Call, x: Value, factor: float) -> Value:
    if factor == 1:
        return x
    number = torch.tensor(factor, dtype=torch.float32)
    return Value(call.build.scale(x.index, call.name, scale=number), x.leading)


@converts("Pow", 7, 12, 13, 15, group="smooth")
def _pow(call: Call) -> Value:
    base = call.inputs[0]
    if isinstance(base, np.ndarray):
        return _power_of_constant(call, base)
    given = call.constant(1)
    if len(set(given.reshape(-1).tolist())) != 1 or given.ndim > len(call.shape(call.value())):
        raise UnsupportedError("different exponents, or an exponent that enlarges its base")
    exponent = float(given.reshape(-1)[0])
    x = call.value()
    if exponent in POWERS:
        return x if POWERS[exponent] is None else _smooth(call, str(POWERS[exponent]))
    whole = int(abs(exponent)) if exponent == int(exponent) else 0
    if not 0 < abs(exponent) <= MAX_POWER:
        raise UnsupportedError(f"the exponent {exponent:g}, where numbers up to ±{MAX_POWER} are read")
    if whole:
        power = Value(_power(call, x.index, whole), x.leading)
    else:
        power = _smooth(call, "Power" if abs(exponent) > 1 else "Root", parameter=abs(exponent))
    return power if exponent > 0 else _smooth(call, "Reciprocal", power)


POWERS: dict[float, str | None] = {
    -1.0: "Reciprocal", -0.5: "InverseRoot", 0.5: "Sqrt", 1.0: None, 2.0: "Square", 3.0: "Cube",
}  # fmt: skip
"""The functions that are powers, by their exponents."""

MAX_POWER = 64
"""The largest exponent that is read."""


def _power(call: Call, x: int, exponent: int) -> int:
    """x to a positive whole exponent, by squares, cubes and one product for what is left."""
    for factor, function in ((2, "Square"), (3, "Cube")):
        if exponent % factor == 0:
            return smooth(call.build, _power(call, x, exponent // factor), function, call.name)
    return x if exponent == 1 else call.build.product(x, _power(call, x, exponent - 1), call.name)


def _power_of_constant(call: Call, base: np.ndarray) -> Value:
    """a to computed exponents, for constants a > 0: exp(x·log a)."""
    x = call.value(1)
    numbers = call.beside(base, x)
    if not bool((numbers > 0).all()):
        raise UnsupportedError("powers of a number that is not positive")
    number, error = rounded(logarithm(Derived.of(numbers.numpy())))
    inside = call.build.scale(x.index, call.name, scale=number, error=error)
    return _smooth(call, "Exp", Value(inside, x.leading))


def _reduced(call: Call, before: str | None, after: str | None) -> Value:
    """A sum along axes of a function of the numbers, and a function of it."""
    x = call.value() if before is None else _smooth(call, before)
    if not axes_of(call):
        raise UnsupportedError("along no axes")
    total = summed(call, x)
    return total if after is None else _smooth(call, after, total)


@converts("ReduceSumSquare", 1, 11, 13, 18, group="smooth")
def _sum_of_squares(call: Call) -> Value:
    return _reduced(call, "Square", None)


@converts("ReduceL2", 1, 11, 13, 18, group="smooth")
def _euclidean(call: Call) -> Value:
    return _reduced(call, "Square", "Sqrt")


@converts("ReduceLogSum", 1, 11, 13, 18, 28, group="smooth")
def _log_of_sum(call: Call) -> Value:
    return _reduced(call, None, "Log")


@converts("ReduceLogSumExp", 1, 11, 13, 18, 28, group="smooth")
def _log_of_sum_of_exponentials(call: Call) -> Value:
    return _reduced(call, "Exp", "Log")
