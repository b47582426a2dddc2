"""Rational evaluation of networks by each operator's definition, without code of the package."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import mpmath
import numpy as np
from torch import Tensor
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import (
    Add,
    Conv2d,
    Extreme,
    Gelu,
    Identity,
    Input,
    LeakyRelu,
    Linear,
    MatMul,
    Maximum,
    Node,
    Permute,
    Product,
    Relu,
    Reshape,
    Scale,
    Sigmoid,
    Smooth,
    Sparse,
    Step,
    Tanh,
)

from verifiable_relu.spec.property import Property

ZERO = Fraction(0)


def rational(tensor: Tensor, shape: Sequence[int]) -> np.ndarray:
    """The exact numbers of a tensor, broadcast to ``shape``, as an object array."""
    array = np.empty(tuple(shape), dtype=object)
    array[...] = np.vectorize(lambda v: Fraction(float(v)), otypes=[object])(tensor.detach().cpu().numpy())
    return array


def _linear(node: Linear, x: np.ndarray) -> np.ndarray:
    weight = rational(node.weight, node.weight.shape)
    return x @ weight.T + rational(node.bias, node.bias.shape)


def _convolution(node: Conv2d, x: np.ndarray) -> np.ndarray:
    weight, bias = rational(node.weight, node.weight.shape), rational(node.bias, node.bias.shape)
    top, left, bottom, right = node.padding
    channels, height, width = x.shape
    padded = np.full((channels, height + top + bottom, width + left + right), ZERO, dtype=object)
    padded[:, top : top + height, left : left + width] = x
    out_channels, per_group, rows, columns = weight.shape
    value = np.full(node.shape, ZERO, dtype=object)
    for o in range(out_channels):
        first = o // (out_channels // node.groups) * per_group
        value[o] = bias[o]
        for c in range(per_group):
            for u in range(rows):
                for v in range(columns):
                    start_row, start_column = u * node.dilation[0], v * node.dilation[1]
                    window = padded[
                        first + c,
                        start_row : start_row + (node.shape[1] - 1) * node.stride[0] + 1 : node.stride[0],
                        start_column : start_column + (node.shape[2] - 1) * node.stride[1] + 1 : node.stride[1],
                    ]
                    value[o] = value[o] + weight[o, c, u, v] * window
    return value


DIGITS = 80
"""The number of digits to which the values of smooth activations are computed."""


def _rational(value: mpmath.mpf) -> Fraction:
    """The exact value of an mpmath number, which is always dyadic; 0 for a number below 2^-5000."""
    sign, mantissa, exponent, _ = value._mpf_
    if exponent < -5000:
        return ZERO
    return (-1) ** sign * int(mantissa) * Fraction(2) ** exponent


_TAIL = 1000
"""The argument from which on smooth activations equal their limits to more digits than ``DIGITS``."""


def _smooth(node: Sigmoid | Tanh | Gelu, x: np.ndarray) -> np.ndarray:
    def at(value: Fraction) -> Fraction:
        reach = value * Fraction(float(node.lam)) if isinstance(node, Gelu) else value
        if abs(reach) > _TAIL:
            right, left = (value, ZERO) if isinstance(node, Gelu) else (Fraction(1), -Fraction(isinstance(node, Tanh)))
            return right if reach > 0 else left
        with mpmath.workdps(DIGITS + 10):
            z = mpmath.mpf(value.numerator) / value.denominator
            return _rational(FUNCTIONS[node.function](z, mpmath.mpf(float(node.parameter))))

    return np.vectorize(at, otypes=[object])(x)


def _softplus(x: mpmath.mpf) -> mpmath.mpf:
    return max(x, mpmath.mpf(0)) + mpmath.log1p(mpmath.exp(-abs(x)))


FUNCTIONS: dict[str, Callable[[mpmath.mpf, mpmath.mpf], mpmath.mpf]] = {
    "Sigmoid": lambda x, _: 1 / (1 + mpmath.exp(-x)),
    "Tanh": lambda x, _: mpmath.tanh(x),
    "GELU": lambda x, lam: x / 2 * mpmath.erfc(-lam * x / mpmath.sqrt(2)),
    "SiLU": lambda x, _: x / (1 + mpmath.exp(-x)),
    "Mish": lambda x, _: x * mpmath.tanh(_softplus(x)),
    "tanh-GELU": lambda x, _: x / (1 + mpmath.exp(-mpmath.sqrt(8 / mpmath.pi) * (x + mpmath.mpf("0.044715") * x**3))),
    "ELU": lambda x, alpha: x if x > 0 else alpha * mpmath.expm1(x),
    "Softplus": lambda x, _: _softplus(x),
    "Softsign": lambda x, _: x / (1 + abs(x)),
    "HardSwish": lambda x, _: x * min(max(x + 3, 0), 6) / 6,
    "Erf": lambda x, _: mpmath.erf(x),
    "Atan": lambda x, _: mpmath.atan(x),
    "Asin": lambda x, _: mpmath.asin(x),
    "Acos": lambda x, _: mpmath.acos(x),
    "Asinh": lambda x, _: mpmath.asinh(x),
    "Acosh": lambda x, _: mpmath.acosh(x),
    "Atanh": lambda x, _: mpmath.atanh(x),
    "Exp": lambda x, _: mpmath.exp(x),
    "Square": lambda x, _: x * x,
    "Cube": lambda x, _: x**3,
    "Log": lambda x, _: mpmath.log(x),
    "Sqrt": lambda x, _: mpmath.sqrt(x),
    "Reciprocal": lambda x, _: 1 / x,
    "InverseRoot": lambda x, _: 1 / mpmath.sqrt(x),
    **dict.fromkeys(("Power", "Root"), lambda x, p: x**p),
    "Sin": lambda x, _: mpmath.sin(x),
    "Cos": lambda x, _: mpmath.cos(x),
}
"""Smooth functions by name, of a number and the parameter."""


STEPPED: dict[str, Callable[[Fraction], int]] = {
    "Sign": lambda x: (x > 0) - (x < 0),
    "Floor": math.floor,
    "Ceil": math.ceil,
    "Round": round,
    "Truncate": math.trunc,
}
"""Functions that jump, by name."""


def _function(node: Smooth, x: np.ndarray) -> np.ndarray:
    parameter = mpmath.mpf(float(node.parameter))

    def at(value: Fraction) -> Fraction:
        # Far out digits before the point take the place of some after it.
        with mpmath.workdps(DIGITS + 30):
            return _rational(FUNCTIONS[node.function](mpmath.mpf(value.numerator) / value.denominator, parameter))

    return np.vectorize(at, otypes=[object])(x)


def node_value(node: Node, inputs: Sequence[np.ndarray]) -> np.ndarray:
    """The exact value of a node other than the input, from the exact values of its inputs in their shapes."""
    match node:
        case Linear():
            return _linear(node, inputs[0])
        case Conv2d():
            return _convolution(node, inputs[0])
        case Sparse():
            terms = rational(node.weight, node.weight.shape) * inputs[0].reshape(-1)[node.index.numpy()]
            return (terms.sum(1) + rational(node.bias, node.bias.shape)).reshape(node.shape)
        case Scale():
            center, scale, shift = (rational(t, node.shape) for t in (node.center, node.scale, node.shift))
            return scale * (inputs[0] - center) + shift
        case Add():
            return inputs[0] + inputs[1]
        case Identity():
            return inputs[0]
        case Product():
            return inputs[0] * inputs[1]
        case MatMul():
            return np.matmul(*inputs)
        case Relu():
            return np.where(inputs[0] > 0, inputs[0], ZERO)
        case LeakyRelu():
            return np.where(inputs[0] > 0, inputs[0], rational(node.slope, node.shape) * inputs[0])
        case Sigmoid() | Tanh() | Gelu():
            return _smooth(node, inputs[0])
        case Smooth():
            return _function(node, inputs[0])
        case Step():
            return np.vectorize(lambda v: Fraction(STEPPED[node.function](v)), otypes=[object])(inputs[0])
        case Maximum():
            flat, places = inputs[0].reshape(-1), node.candidates.numpy()
            found = [max(flat[places[places[:, i] >= 0, i]]) for i in range(node.size)]
            return np.array(found, object).reshape(node.shape)
        case Extreme():
            return np.where((inputs[0] > inputs[1]) == (node.sign > 0), inputs[0], inputs[1])
        case Reshape():
            return inputs[0].reshape(node.shape)
        case Permute():
            return inputs[0].transpose(node.axes)
    raise TypeError(f"{node.op} has no rational value")


def exact_values(network: Network, x: Sequence[Fraction]) -> list[np.ndarray]:
    """Every node's exact value at a rational point, as object arrays in node order.

    The values of smooth activations, which are irrational, are rounded to ``DIGITS`` digits.
    """
    values: list[np.ndarray] = []
    for node in network.nodes:
        if isinstance(node, Input):
            value = np.array(list(x), dtype=object).reshape(node.shape)
        else:
            value = node_value(node, [values[i] for i in node.inputs])
        assert value.shape == tuple(node.shape), (node.op, value.shape, node.shape)
        values.append(value)
    return values


def exact_outputs(network: Network, x: Sequence[Fraction]) -> list[Fraction]:
    """The exact outputs at a rational point, in row-major order."""
    return list(exact_values(network, x)[-1].reshape(-1))


def margin(prop: Property, y: Sequence[Fraction]) -> Fraction | float:
    """The margin of outputs y: the minimum over polytopes of the maximum over rows of A·y − b."""
    return min(
        (
            max((sum(c * y[i] for i, c in row.coefficients) - row.bound for row in polytope), default=-math.inf)
            for polytope in prop.unsafe
        ),
        default=math.inf,
    )


def violated(prop: Property, y: Sequence[Fraction]) -> bool:
    """Whether outputs y are in the unsafe set; a row that holds with equality counts unless the row is strict."""
    for polytope in prop.unsafe:
        inside = True
        for row in polytope:
            left = sum(c * y[i] for i, c in row.coefficients)
            inside = inside and (left < row.bound if row.strict else left <= row.bound)
        if inside:
            return True
    return False
