"""The values of a network's nodes, each with a bound of how far the arithmetic that computed it may be off.

With e the bound of a node's input x, y its value as computed, u the unit roundoff and c(K) what rounding may change in
a sum of K products, as a part of the sum of their absolute values:

    y = W·x + b, sums of K terms        |W|·(e + c·(|x| + e)) + c·|b|, c = c(K) + twice what the weights are off by
    y = x₁∘x₂, sums of K terms          |x₁|∘e₂ + e₁∘|x₂| + e₁∘e₂ + c(K)·(|x₁| + e₁)∘(|x₂| + e₂)
    y = x₁ + x₂                         e₁ + e₂ + 2u·(|x₁| + e₁ + |x₂| + e₂)
    max(x, 0) + s·min(x, 0)             max(1, |s|)·e + 64u·|y|
    a function that jumps               as far as it jumps within e of x
    other functions of one variable     the largest slope within e of x, times e, and 64u·(|y| + what is lost beside it)

This is a running error analysis (N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., SIAM 2002,
section 3.3). 64u is granted to elementary functions and the few operations around them. Which c, and who computes the
values, an ``Arithmetic`` says: ``network.agreement`` and ``trust.enclose`` have one each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from verifiable_relu.ir.enclosure import Enclosed
from verifiable_relu.network.dispatch import Refusal, Table
from verifiable_relu.network.nodes import (
    Add,
    Affine,
    Bilinear,
    Curve,
    Hardened,
    Identity,
    Kinked,
    MatMul,
    Node,
    Permute,
    Reshape,
    Scale,
    Seen,
    Sparse,
    Step,
)
from verifiable_relu.rounding import ENCLOSE_OWN, ENCLOSE_ULPS, above, below


class Arithmetic:
    """How the operators of a network are computed, and how far a computed number may be off.

    Attributes:
        unit: the unit roundoff u.
        tiny: what underflow may take from any operation, sums of many terms included.
        knows_zeros: whether stored numbers are exact, so that W·0 + b is b. They are not where a network that rounds
            its constants is compared with a file that does not.
    """

    unit: float
    tiny: float
    knows_zeros: bool = False

    def sums(self, terms: int) -> float:
        """c(K): how far a sum of K = ``terms`` products may be off, as a part of the sum of their absolute values."""
        raise NotImplementedError

    def affine(self, node: Affine, x: np.ndarray) -> np.ndarray:
        """W·x + b."""
        raise NotImplementedError

    def spread(self, node: Affine, size: np.ndarray, part: float) -> np.ndarray:
        """|W|·size + part·|b|, with a bound of all terms of which b is made."""
        raise NotImplementedError

    def curve(self, node: Curve, x: Enclosed) -> tuple[np.ndarray, np.ndarray | float, np.ndarray | float]:
        """The value, the largest slope within the error of x, and what counts beside |y| in units of 64u."""
        raise NotImplementedError

    def enclosed(self, node: Node, inputs: Sequence[Enclosed]) -> Enclosed:
        """The value of a node from those of its inputs.

        Raises:
            UnsupportedError: if the node stands for more than one value.
        """
        found = ENCLOSURES[node](self, node, *inputs)
        error = found.error * ENCLOSE_OWN + self.tiny
        # What only moves numbers leaves those without an error as they are.
        moves = isinstance(node, Reshape | Permute | Identity | Seen) or (isinstance(node, Sparse) and node.moves)
        if moves:
            return Enclosed(found.value, np.where(found.error == 0, 0, error))
        certain = self.knows_zeros and self._certain(node, inputs[0], found)
        return Enclosed(found.value, np.where(certain, 0, error))

    def _certain(self, node: Node, x: Enclosed, found: Enclosed) -> np.ndarray:
        """Where nothing is rounded: W·0 + b is the stored b, and a function is 0 at 0 if it is computed to be."""
        if isinstance(node, Curve):
            zero: np.ndarray = (x.magnitude == 0) & (found.value == 0)
            return zero
        if isinstance(node, Kinked):
            below = node.below.detach().cpu().numpy()
            moved: np.ndarray = (x.error == 0) & ((x.value >= 0) | (np.abs(below) == 1))
            return moved | ((below == 0) & (x.value + x.error <= 0))
        if not isinstance(node, Affine) or node.weight_error or (isinstance(node, Scale) and bool(node.center.any())):
            return np.zeros(found.value.shape, dtype=bool)
        terms = self.spread(node, (x.magnitude != 0).astype(x.value.dtype), 0.0)
        return np.broadcast_to(terms == 0, found.value.shape)


def whole(x: Enclosed) -> Enclosed:
    """Values that are whole numbers, without an error where just one such number is enclosed."""
    near = np.rint(x.value)
    off = np.abs(x.value - near)
    known = (off <= x.error) & (x.error < 0.5) & (np.abs(near) < _WHOLE)
    return Enclosed(np.where(known, near, x.value), np.where(known, 0, x.error))


_WHOLE = 2.0**52
"""Below this, neighbouring whole numbers are a full unit apart, in any format."""


def _affine(by: Arithmetic, node: Affine, x: Enclosed) -> Enclosed:
    part = by.sums(node.terms) + 2 * node.weight_error
    # A number that is moved is not rounded.
    off = x.error if isinstance(node, Sparse) and node.moves else x.error + part * x.magnitude
    return Enclosed(by.affine(node, x.value), by.spread(node, off, part))


def _add(by: Arithmetic, node: Add, x: Enclosed, y: Enclosed) -> Enclosed:
    return Enclosed(x.value + y.value, x.error + y.error + 2 * by.unit * (x.magnitude + y.magnitude))


def _bilinear(by: Arithmetic, node: Bilinear, x: Enclosed, y: Enclosed) -> Enclosed:
    product = np.matmul if isinstance(node, MatMul) else np.multiply
    spread = product(x.magnitude, y.error) + product(x.error, y.magnitude)
    return Enclosed(product(x.value, y.value), spread + by.sums(node.terms) * product(x.magnitude, y.magnitude))


def _moved(by: Arithmetic, node: Reshape, x: Enclosed) -> Enclosed:
    return Enclosed(*(part.reshape(len(part), *node.shape) for part in (x.value, x.error)))


def _permuted(by: Arithmetic, node: Permute, x: Enclosed) -> Enclosed:
    return Enclosed(*(part.transpose(0, *(axis + 1 for axis in node.axes)) for part in (x.value, x.error)))


def _kinked(by: Arithmetic, node: Kinked, x: Enclosed) -> Enclosed:
    below = node.below.detach().cpu().numpy().astype(x.value.dtype)
    value = np.where(x.value >= 0, x.value, below * x.value)
    return Enclosed(value, np.maximum(np.abs(below), 1) * x.error + ENCLOSE_ULPS * by.unit * np.abs(value))


STEPPED: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Sign": np.sign,
    "Floor": np.floor,
    "Ceil": np.ceil,
    "Round": np.rint,
    "Truncate": np.trunc,
}
"""The functions that jump, by the names that nodes have for them, apart from the table of nodes."""


def _step(by: Arithmetic, node: Step, x: Enclosed) -> Enclosed:
    at = STEPPED[node.function]
    value, certain = at(x.value), x.error == 0
    low, high = (at(np.where(certain, x.value, end)) for end in (below(x.value - x.error), above(x.value + x.error)))
    return Enclosed(value, np.maximum(high - value, value - low))


def _curve(by: Arithmetic, node: Curve, x: Enclosed) -> Enclosed:
    value, steepest, beside = by.curve(node, x)
    return Enclosed(value, steepest * x.error + ENCLOSE_ULPS * by.unit * (np.abs(value) + beside))


ENCLOSURES: Table[Callable[..., Enclosed]] = Table(
    "evaluation with error bounds",
    {
        Affine: _affine,
        Add: _add,
        Bilinear: _bilinear,
        Seen: lambda by, node, *xs: xs[-1],
        Reshape: _moved,
        Permute: _permuted,
        Identity: lambda by, node, x: x,
        Kinked: _kinked,
        Step: _step,
        Curve: _curve,
        Hardened: Refusal("stands for a set of activations, not for one value"),
    },
)
"""The enclosed value of each kind of node, but for underflow: of the arithmetic, the node and its inputs' values."""
