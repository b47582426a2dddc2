"""Rational evaluation of networks by each op's definition, without code of the package but for the entries of maps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache

import mpmath
import numpy as np
from torch import Tensor

from verifiable_relu.ir.functions.function import Function
from verifiable_relu.ir.functions.piecewise_linear import PiecewiseLinear
from verifiable_relu.ir.functions.smooth import Hardened, Smooth
from verifiable_relu.ir.functions.steps import StepFunction
from verifiable_relu.ir.interval import Interval
from verifiable_relu.ir.linear import Diagonal
from verifiable_relu.ir.network import Affine, Elementwise, Input, Maximum, Network, Op, Product, Sum
from verifiable_relu.spec.property import Property

ZERO, ONE = Fraction(0), Fraction(1)
DIGITS = 80
"""The number of digits to which the values of smooth functions are computed."""
_TAIL = 1000
"""The argument from which on sigmoid-like functions equal their limits to more digits than ``DIGITS``."""


def exact(tensor: Tensor, size: int | None = None) -> np.ndarray:
    """The exact numbers of a tensor, or of one that is broadcast to ``size``, as an object array."""
    array = tensor.detach().cpu().double().numpy()
    array = array if size is None else np.broadcast_to(array, (size,))
    return np.vectorize(Fraction, otypes=[object])(array)


@lru_cache(maxsize=64)
def dense(op: Affine) -> np.ndarray:
    """The weights of an affine op, (n_out, n_in), as fractions: the stored ones, or exact reciprocals of divisors."""
    found = np.full((op.map.n_out, op.map.n_in), ZERO, dtype=object)
    if isinstance(op.map, Diagonal) and op.map.divisor is not None and op.weight_error:
        found[np.diag_indices(op.size)] = [1 / Fraction(d) for d in op.map.divisor.expand(op.size).tolist()]
        return found
    for i, j, w in zip(*(part.tolist() for part in op.map.entries()), strict=True):
        found[i, j] += Fraction(w)
    return found


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
"""Smooth functions by kind, of a number and the parameter."""

STEPPED: dict[str, Callable[[Fraction], int]] = {
    "Sign": lambda x: (x > 0) - (x < 0),
    "Floor": math.floor,
    "Ceil": math.ceil,
    "Round": round,
    "Truncate": math.trunc,
}
"""Functions that jump, by kind."""


def _rational(value: mpmath.mpf) -> Fraction:
    """The exact value of an mpmath number, which is always dyadic; 0 for a number below 2^-5000."""
    sign, mantissa, exponent, _ = value._mpf_
    return ZERO if exponent < -5000 else (-1) ** sign * int(mantissa) * Fraction(2) ** exponent


def _smooth(function: Smooth, value: Fraction) -> Fraction:
    if function.kind in ("Sigmoid", "Tanh", "GELU") and abs(value * Fraction(function.parameter)) > _TAIL:
        low, high = {"Sigmoid": (ZERO, ONE), "Tanh": (-ONE, ONE), "GELU": (ZERO, value)}[function.kind]
        return high if value > 0 else low
    # Far out digits before the point take the place of some after it.
    with mpmath.workdps(DIGITS + 30):
        z = mpmath.mpf(value.numerator) / value.denominator
        return _rational(FUNCTIONS[function.kind](z, mpmath.mpf(function.parameter)))


def function_values(function: Function, x: np.ndarray) -> np.ndarray:
    """The values of a function of exact numbers (n,), those of smooth ones to ``DIGITS`` digits; a family's limit's."""
    match function:
        case PiecewiseLinear():
            return np.where(x > 0, x, exact(function.slope_below, len(x)) * x)
        case Smooth():
            return np.array([_smooth(function, v) for v in x], dtype=object)
        case StepFunction():
            return np.array([Fraction(STEPPED[function.kind](v)) for v in x], dtype=object)
        case Hardened():
            return function_values(function.limit, x)
    raise TypeError(f"{function.kind} has no rational value")


def op_value(op: Op, *xs: np.ndarray) -> np.ndarray:
    """The exact value (size,) of an op other than the input, from those of its inputs."""
    match op:
        case Affine():
            found = dense(op) @ xs[0]
            return found if op.bias is None else found + exact(op.bias)
        case Sum():
            return sum(xs[1:], xs[0])
        case Product():
            return xs[0] * xs[1]
        case Maximum():
            return np.array([max(xs[0][column]) for column in op.candidates.T.numpy()], dtype=object)
        case Elementwise():
            return function_values(op.function, xs[0])
    raise TypeError(f"{type(op).__name__} has no rational value")


def exact_values(network: Network, x: Sequence[Fraction]) -> list[np.ndarray]:
    """Every op's exact value (size,) at a rational point."""
    values = [np.array(list(x), dtype=object)]
    for op in network.ops[1:]:
        values.append(op_value(op, *(values[i] for i in op.inputs)))
    return values


def exact_outputs(network: Network, x: Sequence[Fraction]) -> list[Fraction]:
    """The exact outputs at a rational point."""
    return list(exact_values(network, x)[-1])


def exact_forms(network: Network, unstable: set[tuple[int, int]], x: Sequence[Fraction]) -> list[np.ndarray]:
    """The value of every op as forms of 1, the inputs, and the values of unstable neurons, as fractions.

    Stable neurons are on the side of their kink on which they are at the inputs x; unstable neurons are numbered in the
    order of their ops and places.
    """
    number = {place: i for i, place in enumerate(sorted(unstable))}
    columns, at = 1 + network.input_size + len(number), exact_values(network, x)
    found: list[np.ndarray] = []
    for index, op in enumerate(network.ops):
        form = np.full((op.size, columns), ZERO, dtype=object)
        if isinstance(op, Input):
            form[np.arange(op.size), 1 + np.arange(op.size)] = ONE
        elif isinstance(op, Affine):
            form = dense(op) @ found[op.inputs[0]]
            if op.bias is not None:
                form[:, 0] += exact(op.bias)
        elif isinstance(op, Sum):
            form = sum(found[i] for i in op.inputs)
        elif isinstance(op, Elementwise):
            slope = below(op.function, op.size)
            for i in range(op.size):
                if (index, i) in number:
                    form[i, 1 + network.input_size + number[index, i]] = ONE
                else:
                    form[i] = found[op.inputs[0]][i] * (1 if at[op.inputs[0]][i] >= 0 else slope[i])
        found.append(form)
    return found


def below(function: Function, size: int) -> np.ndarray:
    """The slopes of a kinked function below zero."""
    assert isinstance(function, PiecewiseLinear)
    return exact(function.slope_below, size)


def intervals(network: Network, box: Interval) -> dict[int, Interval]:
    """Intervals of all ops by interval arithmetic, with far more room than rounding takes."""
    found = [box]
    for op in network.ops[1:]:
        xs = [found[i] for i in op.inputs]
        if isinstance(op, Affine):
            middle, radius = (xs[0].lower + xs[0].upper) / 2, (xs[0].upper - xs[0].lower) / 2
            y, spread = op.map.apply(middle), op.map.abs_apply(radius)
            y = y if op.bias is None else y + op.bias.double()
            spread = spread + 2.0**-40 * (1 + spread + op.map.abs_apply(middle.abs()) + y.abs())
            found.append(Interval(y - spread, y + spread))
        elif isinstance(op, Sum):
            found.append(Interval(sum(x.lower for x in xs) - 2.0**-40, sum(x.upper for x in xs) + 2.0**-40))
        elif isinstance(op, Maximum):
            found.append(Interval(*(end[:, op.candidates].amax(1) for end in (xs[0].lower, xs[0].upper))))
        elif isinstance(op, Elementwise):
            found.append(op.function.image(xs[0]))
        else:
            raise NotImplementedError
    return dict(enumerate(found))


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
    """Return True if outputs y are in the unsafe set; a row that holds with equality counts unless it is strict."""

    def holds(row: object) -> bool:
        left = sum(c * y[i] for i, c in row.coefficients)  # type: ignore[attr-defined]
        return bool(left < row.bound if row.strict else left <= row.bound)  # type: ignore[attr-defined]

    return any(all(map(holds, polytope)) for polytope in prop.unsafe)
