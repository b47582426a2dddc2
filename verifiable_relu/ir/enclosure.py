"""Values of a network, each with a bound of the error of the arithmetic that computed it.

With e the error of an op's input x, y its value as computed, u the unit roundoff and c(K) the error of a
sum of K products, relative to the sum of their magnitudes:

    y = W·x + b, sums of K terms    |W|·(e + c·(|x| + e)) + c·|b|, c = c(K) + twice what the weights are off by
    y = x₁·x₂                       (|x₁| + e₁)·e₂ + e₁·(|x₂| + e₂) + c(1)·(|x₁| + e₁)·(|x₂| + e₂)
    y = x₁ + … + xₙ                 Σ eᵢ + 2(n − 1)u·Σ (|xᵢ| + eᵢ); Σ eᵢ where at most one of them is not 0
    y = max(x₁, …)                  the largest error of those that may be the largest
    y = f(x)                        Function.enclose

This is a running error analysis (N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., SIAM 2002,
section 3.3), used twice. ``enclose`` proves what a network computes: values in numpy, without code that torch
or bounds use, and errors by the slopes of functions that bounds have, too. ``find_difference`` tests whether a network
computes what its source does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verifiable_relu.ir.linear import Convolution, Diagonal, LinearMap
from verifiable_relu.ir.network import Affine, Elementwise, Maximum, Network, Op, Product
from verifiable_relu.rounding import ENCLOSE_OWN, ENCLOSE_TINY, ENCLOSE_UNITS, above, below, largest, tiny

Array = np.ndarray


@dataclass(frozen=True, eq=False)
class Enclosed:
    """Values known to lie in [value − error, value + error], (batch, n) each; unknown where the error is inf or NaN."""

    value: Array
    error: Array

    @property
    def magnitude(self) -> Array:
        """An upper bound of the true values' sizes."""
        size: Array = np.abs(self.value) + self.error
        return size


@dataclass(frozen=True)
class Arithmetic:
    """Arithmetic in which sums are computed, with bounds of its rounding errors.

    Attributes:
        unit: the unit roundoff u.
        tiny: the most that underflow takes from any operation, sums of many terms included.
        sums: c(K).
        apply: W·x, or |W|·x for True, of a map and x (batch, n_in).
        knows_zeros: whether W·0 + b is the stored b: not where a network that rounds its constants is compared with a
            source that does not.
    """

    unit: float
    tiny: float
    sums: Callable[[int], float]
    apply: Callable[[LinearMap, Array, bool], Array]
    knows_zeros: bool

    def enclose(self, op: Op, *inputs: Enclosed) -> Enclosed:
        """Return the op's enclosed value from those of its inputs.

        Raises:
            UnsupportedError: if its function stands for more than one value.
        """
        x = inputs[0]
        if isinstance(op, Affine):
            return self._affine(op, x)
        if isinstance(op, Elementwise):
            value, error = op.function.enclose(x.value, x.error, self.unit)
            return Enclosed(value, error if self.knows_zeros else error + self.tiny)
        if isinstance(op, Maximum):
            value, error = (part[:, op.candidates.numpy()] for part in (x.value, x.error))
            smaller = above(value + error) < below((value - error).max(1, keepdims=True))
            return Enclosed(value.max(1), np.where(smaller, 0, error).max(1))
        if isinstance(op, Product):
            first, second = (each.magnitude for each in inputs)
            error = first * inputs[1].error + x.error * second + self.sums(1) * first * second
            return Enclosed(x.value * inputs[1].value, error * ENCLOSE_OWN + self.tiny)
        value, error = (sum(parts[1:], parts[0]) for parts in ([i.value for i in inputs], [i.error for i in inputs]))
        sizes = [each.magnitude for each in inputs]
        rounded = error + 2 * (len(inputs) - 1) * self.unit * sum(sizes)
        alone = sum((size != 0).astype(int) for size in sizes) <= 1
        return Enclosed(value, np.where(alone, error, rounded * ENCLOSE_OWN + self.tiny))

    def _affine(self, op: Affine, x: Enclosed) -> Enclosed:
        part, moved = self.sums(op.map.terms) + 2 * op.weight_error, np.array(not op.map.terms and op.is_exact)
        # A factor of 1 may stand for several factors of the source, and each rounds.
        moved = moved & (self.knows_zeros | (not isinstance(op.map, Diagonal)))
        value = self.apply(op.map, x.value, False)
        error = self.apply(op.map, x.error if moved else x.error + part * x.magnitude, True)
        if op.bias is not None:
            bias = op.bias.detach().cpu().numpy().astype(value.dtype)
            # A number that is moved is not rounded, but where something is added to it.
            error = error + part * (np.where(moved & (bias != 0), np.abs(value) + error, 0) + np.abs(bias))
            value, moved = value + bias, moved & (bias == 0)
        if op.bias_error is not None:
            error = error + 2 * op.bias_error.cpu().numpy()
        error = np.where(moved & (error == 0), 0, error * ENCLOSE_OWN + self.tiny)
        if self.knows_zeros and op.bias_error is None:
            error = np.where(self.apply(op.map, (x.magnitude != 0).astype(value.dtype), True) == 0, 0, error)
        return Enclosed(value, error)


# --- What a network computes -----------------------------------------------------------------------------------------


def _by_numpy(of: LinearMap, x: Array, sizes: bool) -> Array:
    weight = of.weight.detach().cpu().numpy().astype(x.dtype)
    return np.stack([of.product(np.abs(weight) if sizes else weight, row) for row in x])


# An overflow or a division by zero leaves an error of inf or NaN; numpy's warnings would add nothing.
@np.errstate(over="ignore", invalid="ignore", divide="ignore")
def enclose(network: Network, x: Sequence[Fraction], dtype: type[np.floating[Any]] = np.float64) -> Enclosed:
    """Return the outputs at an exact point, (output_size,), each with a bound of its error.

    A sum of n terms is off by c(n) = γ_{n+4}, γ_n = n·u/(1 − n·u), of the sum of sizes (Higham, section 3.1).

    Args:
        network: without functions that stand for sets of functions.
        x: (input_size,).
        dtype: one of ``formats(network)``.

    Raises:
        UnsupportedError: if some function stands for a set.
    """
    unit, near = ENCLOSE_UNITS[dtype], [float(value) for value in x]
    rest = [float(v - Fraction(n)) if math.isfinite(n) else 0.0 for v, n in zip(x, near, strict=True)]
    point = (np.array(near, dtype) + np.array(rest, dtype))[None]
    exact = np.array([math.isfinite(n) and Fraction(n) == v for v, n in zip(x, near, strict=True)])
    by = Arithmetic(unit, ENCLOSE_TINY, lambda n: (n + 4) * unit / (1 - (n + 4) * unit), _by_numpy, knows_zeros=True)
    values = [Enclosed(point, np.where(exact, 0, 2 * unit * np.abs(point) + ENCLOSE_TINY))]
    for index, op in enumerate(network.ops[1:], 1):
        found = by.enclose(op, *(values[i] for i in op.inputs))
        values.append(whole(found) if index in network.whole else found)
    return Enclosed(values[-1].value[0], values[-1].error[0])


def formats(network: Network) -> list[type[np.floating[Any]]]:
    """Return the formats in which a network can be enclosed, from narrow to wide."""
    functions = (op.function for op in network.ops if isinstance(op, Elementwise))
    return list(ENCLOSE_UNITS) if all(function.wide for function in functions) else [np.float64]


def whole(x: Enclosed) -> Enclosed:
    """Return values known to be whole numbers, without error where only one such number is enclosed."""
    near = np.rint(x.value)
    off = np.abs(x.value - near)
    known = (off <= x.error) & (x.error < 0.5) & (np.abs(near) < WHOLE)
    return Enclosed(np.where(known, near, x.value), np.where(known, 0, x.error))


WHOLE = 2.0**52
"""Below this, neighbouring whole numbers are a full unit apart, in any format."""


# --- What its source computes ----------------------------------------------------------------------------------------

INDEPENDENT = 16
"""Times √K: how far a sum of K terms is off where errors are independent, in units of roundoff of its terms."""

SLACK = 32
"""Rounding errors of an affine map beyond those of its sums, in units of roundoff: those of batch normalisation as one
multiplication and one addition, or of a division as a multiplication by the reciprocal."""


def sample_points(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return inputs that suit any network: zero, pixels in [0, 1], and normal draws of deviation 1 and 8, 3 of each.

    Args:
        shape: of one sample.
        dtype: of the points, which are float32 numbers in any case.

    Returns:
        (10, *shape); the same for every call.
    """
    # Whatever the user's default device and type are.
    options: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    generator = torch.Generator().manual_seed(0)
    pixels = torch.rand((3, *shape), generator=generator, **options)
    normal = torch.randn((6, *shape), generator=generator, **options)
    normal[3:] *= 8
    return torch.cat([torch.zeros((1, *shape), **options), pixels, normal]).to(dtype)


@dataclass(frozen=True)
class Mismatch:
    """A value in which a network and its source differ by more than rounding explains.

    Attributes:
        op: the first such op.
        expected, found: the source's value and the network's.
        bound: the largest difference that rounding explains.
    """

    op: Op
    expected: float
    found: float
    bound: float

    def __str__(self) -> str:
        numbers = f"{self.expected:.9g} there, and {self.found:.9g} here"
        return f"{numbers} (rounding explains a difference of {self.bound:.2g})"


def _by_torch(of: LinearMap, x: Array, sizes: bool) -> Array:
    point = torch.from_numpy(np.ascontiguousarray(x))
    if not sizes:
        return of.apply(point).numpy()
    found = of.abs_apply(point).numpy()
    if not isinstance(of, Convolution):
        return found
    # A convolution may be computed by a transform, whose errors spread within an image.
    image = found.reshape(-1, *of.out_shape)
    return np.broadcast_to(image.max((2, 3), keepdims=True), image.shape).reshape(found.shape)


@torch.no_grad()
@np.errstate(all="ignore")
def find_difference(
    ops: Sequence[Op], x: Tensor, seen: Mapping[int, Tensor], unit: float, dtype: torch.dtype = torch.float64
) -> Mismatch | None:
    """Return the first op at which the source's values are not the network's; None where all agree.

    An op that was seen passes on the source's value as exact, so that each part of the network is compared with its own
    rounding only. With the output alone in ``seen``, all rounding errors on the way add up. Errors of a long sum are as
    good as independent: c(K) = (min(K, 16·√K) + 32)·u (N. J. Higham, T. Mary, A New Approach to Probabilistic Rounding
    Error Analysis, SIAM J. Sci. Comput. 41, 2019, A2815). This is a test of whether the ops are the right ones, not a
    proof: no bound and no verdict rests on the numbers here.

    Args:
        ops: of the network, in topological order, the input first.
        x: inputs, (batch, input_size), in the source's precision.
        seen: the source's values, (batch, size), by op number. Where they overflow, nothing is compared.
        unit: the unit roundoff of the source; where ``dtype`` is no finer than the source, twice that.
        dtype: in which the network is evaluated here.
    """
    by = Arithmetic(
        unit, tiny(x.dtype), lambda n: (min(n, INDEPENDENT * math.sqrt(n)) + SLACK) * unit, _by_torch, knows_zeros=False
    )
    start = x.to("cpu", dtype).numpy()
    values = {0: Enclosed(start, np.zeros_like(start))}
    last = {source: index for index, op in enumerate(ops) for source in op.inputs}
    for index, op in enumerate(ops):
        if index:
            found = by.enclose(op, *(values[i] for i in op.inputs))
            # An infinite error times a weight of zero is none, but not a number either.
            unknown = np.isnan(found.value) | ~(found.magnitude < largest(x.dtype) / 4)
            values[index] = Enclosed(np.nan_to_num(found.value, nan=0.0), np.where(unknown, np.inf, found.error))
        value, error = values[index].value, values[index].error
        if index in seen:
            expected = seen[index].to("cpu", dtype).numpy()
            apart = ~((error == np.inf) | (np.abs(expected - value) <= error))
            if apart.any():
                worst = int(apart.argmax())
                return Mismatch(op, *(float(part.flat[worst]) for part in (expected, value, error)))
            values[index] = Enclosed(expected, np.where(np.isfinite(expected), np.zeros_like(expected), np.inf))
        for source in op.inputs:
            if last[source] == index:
                values.pop(source, None)
    return None
