"""Boxes that are proven by zonotopes: affine forms of all nodes in one forward pass, many boxes at once.

The value of a node is c + Σ_k G_k·ε_k, with ε_k between −1 and 1, up to an error e. The first ε are the inputs that
vary. Every open neuron with the slope t of its chord adds one for q, which lies between the least and the largest of
0, (1 − t)·u and (s − t)·l, where [l, u] are the bounds that its form gives.

Everything is float64: with S = |c| + Σ_k |G_k| + e, one affine map makes e larger by at most γ·(|W|·S + |b|), and one
activation by a few units of |t|·S + |q|.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from verifiable_relu.check.arithmetic import OWN, TINY, UNIT, Matrix, Number, above, gamma
from verifiable_relu.check.conditions import HalfSpace
from verifiable_relu.check.errors import Refused
from verifiable_relu.check.graph import ActivationNode, AffineNode, Graph, MaximumNode
from verifiable_relu.check.least import integral
from verifiable_relu.check.records import CertificateRecords, integer, integers
from verifiable_relu.check.trees import Counts

WORKING = 1 << 19
"""About how many coefficients of one node are held at once."""


class Boxes:
    """The boxes of a cover that are proven by zonotopes, collected to be bounded together.

    Args:
        graph: the network.
        polytopes: what is to be excluded.
        records: the certificate.
        counts: what has been checked.
    """

    def __init__(
        self, graph: Graph, polytopes: list[list[HalfSpace]], records: CertificateRecords, counts: Counts
    ) -> None:
        self._graph, self._records, self._counts = graph, records, counts
        self._rows = [integral(rows, graph.output, graph.nodes[graph.output].size) for rows in polytopes]
        self._starts = np.cumsum([0] + [len(rows.most) for rows in self._rows])
        symbols = graph.nodes[0].size + sum(graph.nodes[number].size for number in graph.activations)
        self._most = max(1, WORKING // (symbols * max(node.size for node in graph.nodes)))
        self._waiting: list[tuple[str, Number, Number, list[int]]] = []

    def take(self, low: Number, high: Number) -> None:
        """Take a box, whose record is next."""
        (chosen,) = self._records.take("zonotope")
        if not all(isinstance(self._graph.nodes[number], ActivationNode) for number in self._graph.activations):
            raise Refused("zonotopes are of piecewise-linear networks")
        rows = integers(chosen, len(self._rows))
        places = [integer(row, len(of.most), "row") for row, of in zip(rows, self._rows, strict=True)]
        self._waiting.append((self._records.place, low, high, places))
        if len(self._waiting) >= self._most:
            self.prove()

    def prove(self) -> None:
        """Prove the boxes that were taken.

        Raises:
            Refused: if the row that a box names for a polytope is not positive there.
        """
        if not self._waiting:
            return
        places, low, high, chosen = zip(*self._waiting, strict=True)
        self._waiting = []
        matrix, most = (np.concatenate([getattr(rows, part) for rows in self._rows]) for part in ("matrix", "most"))
        output = AffineNode([(self._graph.output, matrix)], -most.astype(float))
        found = propagated(self._graph, np.stack(low), np.stack(high), output)
        lower = found.ends()[0] - 4 * UNIT * np.abs(output.bias)
        lower = np.take_along_axis(lower, self._starts[:-1] + np.array(chosen), 1)
        for at in np.flatnonzero(~(lower > 0).all(1)):
            value = lower[at].min()
            raise Refused(f"{places[at]}: the box is not excluded: by its zonotope a row is {value} at least, only")
        self._counts.boxes += len(places)
        self._counts.leaves += lower.size


@dataclass(eq=False)
class ZonotopeForm:
    """The values of a node over a batch of boxes.

    Attributes:
        center: (boxes, size).
        generators: (boxes, symbols, size), of the first symbols; of later ones they are zero.
        error: (boxes, size).
    """

    center: Number
    generators: Number
    error: Number

    @cached_property
    def size(self) -> Number:
        """(boxes, size) how far the value is from its centre, at most."""
        return (np.abs(self.generators).sum(1) + self.error) * (1 + gamma(self.generators.shape[1] + 8))

    def ends(self) -> tuple[Number, Number]:
        """Bounds of the value, rounded outward."""
        reach = self.size
        reach = reach + 8 * UNIT * (np.abs(self.center) + reach) + TINY
        return self.center - reach, self.center + reach


def propagated(graph: Graph, low: Number, high: Number, last: AffineNode) -> ZonotopeForm:
    """The form of an affine map of the network's values over boxes (boxes, inputs)."""
    center = 0.5 * low + 0.5 * high
    radius = np.maximum(high - center, center - low)
    radius = np.where(radius > 0, above(radius), 0)
    varying = np.flatnonzero((radius > 0).any(0))
    generators = np.zeros((len(low), len(varying), low.shape[1]))
    generators[:, np.arange(len(varying)), varying] = radius[:, varying]
    found = {0: ZonotopeForm(center, generators, np.zeros_like(center))}
    symbols = len(varying)
    for number in graph.needed:
        node = graph.nodes[number]
        if isinstance(node, AffineNode):
            found[number] = _affine(node, found)
        elif isinstance(node, ActivationNode):
            found[number] = _activation(node, found[node.source], symbols)
            symbols = found[number].generators.shape[1]
        elif isinstance(node, MaximumNode):
            found[number] = found[node.made]
    return _affine(last, found)


def _affine(node: AffineNode, found: dict[int, ZonotopeForm]) -> ZonotopeForm:
    absolutes = [absolute for _, absolute in node.absolute]
    parts = [(found[source], matrix, b) for (source, matrix), b in zip(node.terms, absolutes, strict=True)]
    symbols = max(form.generators.shape[1] for form, _, _ in parts)
    center, size, error = node.bias, np.abs(node.bias), np.zeros(node.size)
    generators = np.zeros((len(parts[0][0].center), symbols, node.size))
    for form, matrix, absolute in parts:
        center = center + _times(form.center, matrix)
        generators[:, : form.generators.shape[1]] += _times(form.generators, matrix)
        size = size + _times(np.abs(form.center) + form.size, absolute)
        error = error + _times(form.error, absolute)
    lost = 2 * (gamma(node.count + len(parts) + 8) + node.relative) * size + node.lost
    return ZonotopeForm(center, generators, OWN * (error + lost + TINY))


def _times(rows: Number, matrix: Matrix) -> Number:
    """matrix·row of rows (…, size)."""
    flat = rows.reshape(-1, rows.shape[-1])
    return np.asarray(flat @ matrix.T).reshape(*rows.shape[:-1], matrix.shape[0])


def _activation(node: ActivationNode, before: ZonotopeForm, symbols: int) -> ZonotopeForm:
    low, high = before.ends()
    is_open = (low < 0) & (high > 0)
    width = np.where(is_open, high - low, 1.0)
    chord = np.clip((high - node.slope * low) / width, np.minimum(node.slope, 1), np.maximum(node.slope, 1))
    t = np.where(is_open, chord, np.where(low >= 0, 1.0, node.slope))
    above, below = np.where(is_open, (1 - t) * high, 0), np.where(is_open, (node.slope - t) * low, 0)
    least, most = np.minimum(np.minimum(above, below), 0), np.maximum(np.maximum(above, below), 0)
    reach = np.abs(t) * (np.abs(before.center) + before.size) + most - least
    error = np.abs(t) * before.error + 8 * UNIT * reach + TINY
    added = np.flatnonzero(is_open.any(0))
    generators = np.zeros((len(low), symbols + len(added), node.size))
    generators[:, : before.generators.shape[1]] = t[:, None] * before.generators
    generators[:, symbols + np.arange(len(added)), added] = 0.5 * (most - least)[:, added]
    return ZonotopeForm(t * before.center + 0.5 * (least + most), generators, OWN * error)
