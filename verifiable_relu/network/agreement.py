"""Whether a network computes what its source computes, to within rounding.

Wrong verdicts have come from networks that were read wrongly, not only from wrong bounds, so that a network is believed
once it has been compared. It is evaluated together with a bound of how far the source, which computes in a precision of
unit roundoff u, may be off by rounding (``enclosure``).

In a long sum rounding errors are as good as independent, and grow with √K (N. J. Higham, T. Mary, A New Approach to
Probabilistic Rounding Error Analysis, SIAM J. Sci. Comput. 41, 2019, A2815): c(K) = (min(K, 16·√K) + 32)·u. That leaves
room for how libraries compute: elementary functions of some units in the last place, batch normalisation as one
multiplication and one addition, a division as a multiplication by the reciprocal. A convolution may be computed by a
transform, whose errors spread within an image: there the largest bound of a channel counts for all of it.

This is a test of whether the graph is the right one, not a proof: no bound and no verdict rests on the numbers here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from verifiable_relu.ir.enclosure import Enclosed
from verifiable_relu.network.enclosure import Arithmetic
from verifiable_relu.network.nodes import Affine, Conv2d, Curve, Node
from verifiable_relu.rounding import largest, tiny

_INDEPENDENT = 16
"""Times √K: how far a sum of K terms is off where errors are independent, in units of roundoff of its terms."""

_SLACK = 32
"""Rounding errors of an affine map beyond those of its sums."""


@dataclass(frozen=True)
class Parting:
    """Where a network and its source differ by more than rounding explains.

    Attributes:
        node: the first such node.
        expected, found: the source's value and the network's.
        bound: the largest difference that rounding explains.
    """

    node: Node
    expected: float
    found: float
    bound: float

    def __str__(self) -> str:
        numbers = f"{self.expected:.9g} there, and {self.found:.9g} here"
        return f"{numbers} (rounding explains a difference of {self.bound:.2g})"


class _TorchArithmetic(Arithmetic):
    """The network's own operators, computed by torch, where the source computes in unit roundoff ``unit``."""

    def __init__(self, unit: float, tiny: float) -> None:
        self.unit, self.tiny = unit, tiny

    def sums(self, terms: int) -> float:
        return (min(terms, _INDEPENDENT * math.sqrt(terms)) + _SLACK) * self.unit

    def affine(self, node: Affine, x: np.ndarray) -> np.ndarray:
        return node.forward(torch.from_numpy(x)).numpy()

    def spread(self, node: Affine, size: np.ndarray, part: float) -> np.ndarray:
        found = (node.absolute(torch.from_numpy(size)) + part * node.offset_magnitude()).numpy()
        return np.broadcast_to(found.max((2, 3), keepdims=True), found.shape) if isinstance(node, Conv2d) else found

    def curve(self, node: Curve, x: Enclosed) -> tuple[np.ndarray, np.ndarray | float, np.ndarray | float]:
        """By the largest slope of the function, or else by its slopes at x and at both ends about it."""
        known, parameter = node.known, float(node.parameter)
        scale = parameter if known.stretched else 1.0
        steep: np.ndarray | float = known.steepest * (1.0 if known.stretched else max(1.0, parameter))
        if not math.isfinite(known.steepest):
            ends = torch.from_numpy(np.stack([x.value - x.error, x.value, x.value + x.error]))
            steep = known.slope(ends, node.parameter).abs().amax(0).numpy()
        beside = (known.absolute + np.minimum(1, steep * np.abs(scale * x.value))) / scale
        return node.forward(torch.from_numpy(x.value)).numpy(), steep, beside


@torch.no_grad()
@np.errstate(all="ignore")
def parting(
    nodes: Sequence[Node], x: Tensor, seen: Mapping[int, Tensor], unit: float, dtype: torch.dtype = torch.float64
) -> Parting | None:
    """The first node at which the source's values are not the network's; None where all agree.

    A node that was seen passes the source's value on, as exact, so that each part of the network is held against its
    own rounding only. With the output alone in ``seen``, all rounding errors on the way add up.

    Args:
        nodes: of the network that is to be believed or not, in topological order, the input first.
        x: inputs, (batch, *input_shape), in the source's precision.
        seen: the source's values, (batch, *shape), by node index. Where they overflow, nothing is compared.
        unit: the unit roundoff of the source; where ``dtype`` is no finer than the source, twice that.
        dtype: in which the network is evaluated here.
    """
    by, huge = _TorchArithmetic(unit, tiny(x.dtype)), largest(x.dtype) / 4
    start = x.to("cpu", dtype).numpy()
    values: dict[int, Enclosed] = {0: Enclosed(start, np.zeros_like(start))}
    last = {source: index for index, node in enumerate(nodes) for source in node.inputs}
    for index, node in enumerate(nodes):
        if index:
            here = node.map_tensors(lambda t: t.detach().to("cpu", dtype))
            found = by.enclosed(here, [values[i] for i in node.inputs])
            # An infinite error times a weight of zero is none, but not a number either.
            unknown = np.isnan(found.value) | ~(np.abs(found.value) + found.error < huge)
            values[index] = Enclosed(np.nan_to_num(found.value, nan=0.0), np.where(unknown, np.inf, found.error))
        value, error = values[index].value, values[index].error
        if index in seen:
            expected = seen[index].to("cpu", dtype).numpy()
            apart = ~((error == np.inf) | (np.abs(expected - value) <= error))
            if apart.any():
                worst = int(apart.argmax())
                return Parting(node, *(float(part.flat[worst]) for part in (expected, value, error)))
            values[index] = Enclosed(expected, np.where(np.isfinite(expected), np.zeros_like(expected), np.inf))
        for source in node.inputs:
            if last[source] == index:
                values.pop(source, None)
    return None
