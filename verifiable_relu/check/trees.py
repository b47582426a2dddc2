"""Trees of splits in a certificate: what excludes a polytope, and what proves tighter bounds of neurons."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np
from scipy import sparse

from verifiable_relu.check.arithmetic import EXACT, FLOAT, Float, Number
from verifiable_relu.check.conditions import HalfSpace
from verifiable_relu.check.errors import Refused
from verifiable_relu.check.graph import ActivationNode, Graph, SmoothNode
from verifiable_relu.check.least import BoundedRows, Least, TreeBounds, TreeLeaves, integral, of_box
from verifiable_relu.check.lines import CheckedRelaxation, MultiNeuronBounds, Signed
from verifiable_relu.check.planes import taken
from verifiable_relu.check.records import CertificateRecords, integer, integers, numbers, require_depth

WORKING = 1 << 23
"""About how many coefficients of leaves are held at once."""


@dataclass
class Counts:
    """What has been checked."""

    boxes: int = 0
    bounds: int = 0
    leaves: int = 0
    exact: int = 0

    def settle(
        self, least: Callable[[Number, Float], Least], claim: Number, strictly: bool
    ) -> tuple[int, float] | None:
        """The first row whose least value is not beyond its claim, and that value; None if there is none.

        Floating point decides where it can, and exact arithmetic elsewhere.

        Args:
            least: the least values of some rows, given by number, in some arithmetic.
            claim: (rows,).
            strictly: whether a row's least value must be above its claim; otherwise it may be equal.
        """
        found = least(np.arange(len(claim)), FLOAT)
        decided = found.beyond(claim)
        for at in np.flatnonzero(decided < 1):
            value = float(found.value[at])
            if decided[at] == 0:
                try:
                    one = least(np.array([at]), EXACT)
                    proven = one.value[0] - one.slack[0]
                    self.exact += 1
                    if proven > claim[at] or (proven == claim[at] and not strictly):
                        continue
                    value = float(proven)
                except (OverflowError, ValueError):
                    value = -np.inf
            return int(at), value
        return None


@dataclass(frozen=True, eq=False)
class _WrittenLeaf:
    """One leaf as it is written.

    Attributes:
        place: its record.
        path: the splits above it, (neuron of the tree, side, point): z is at least, or for the side −1 at most, there.
        neurons, multipliers: the neurons, of the tree, with multipliers, and these.
        rows: (rows,) μ.
    """

    place: str
    path: list[tuple[int, int, float]]
    neurons: list[int]
    multipliers: Number
    rows: Number


class Trees:
    """The proofs that follow the bounds of a box."""

    def __init__(self, graph: Graph, records: CertificateRecords, counts: Counts) -> None:
        self._graph, self._records, self._counts = graph, records, counts

    def tighter(self, relaxation: CheckedRelaxation) -> None:
        """Bounds of neurons of one activation, each proven by a tree over the bounds known so far."""
        number, rows, least, *tree = self._records.take("tighter", "rows", "least", "tree", "neurons", "chords")
        activations, place = self._graph.activations, self._records.place
        activation = activations[integer(number, len(activations), "activation")]
        node = self._graph.nodes[activation]
        assert isinstance(node, ActivationNode | SmoothNode)
        given = integers(rows)
        neurons = np.array([integer(neuron, node.size, "neuron") for neuron in given[::2]], np.intp)
        sides, claims = np.array(given[1::2], float), numbers(least, len(neurons))
        if len(sides) < len(neurons) or not (np.abs(sides) == 1).all():
            raise Refused("rows are neurons and sides, 1 for a lower bound and −1 for an upper one")
        unit = np.zeros((len(neurons), node.size))
        unit[np.arange(len(neurons)), neurons] = sides
        before = relaxation.neurons[activation].first
        shared = self._shared(relaxation, BoundedRows(node.source, unit, claims), tree, before, {})
        own = np.eye(len(neurons))
        every = (self._leaves(shared, partial(_row, own[at])) for at in range(len(neurons)))
        self._prove(shared, chain.from_iterable(every), strictly=False)
        known = relaxation.neurons[activation]
        low, high = known.lower.copy(), known.upper.copy()
        np.maximum.at(low, neurons[sides > 0], claims[sides > 0])
        np.minimum.at(high, neurons[sides < 0], -claims[sides < 0])
        if not (low <= high).all():
            raise Refused(f"{place}: a lower bound of '{node.name}' is above the upper one")
        self._counts.bounds += len(neurons)
        relaxation.claim(activation, low, high)

    def polytope(self, relaxation: CheckedRelaxation, rows: list[HalfSpace]) -> None:
        """What excludes one polytope of the unsafe set."""
        output = self._graph.output
        values = integral(rows, output, self._graph.nodes[output].size)
        if "plain" in self._records.peek():
            plain, slopes = self._records.take("plain", "slopes")
            self._plain(relaxation, values, _weights(plain, len(rows)), numbers(slopes, relaxation.slopes))
            return
        given = self._records.take("tree", "neurons", "chords")
        planes = taken(self._records, relaxation)
        tree = self._shared(relaxation, values, given, relaxation.open, planes)

        def weights(mu: Any) -> Number:
            return _weights(mu, len(rows)) if mu is not None or len(rows) > 1 else np.ones(1)

        self._prove(tree, self._leaves(tree, weights), strictly=True)

    def _shared(
        self,
        relaxation: CheckedRelaxation,
        rows: BoundedRows,
        tree: list[Any],
        count: int,
        planes: Mapping[int, MultiNeuronBounds],
    ) -> TreeBounds:
        """What the leaves of trees share; slopes are given for the first ``count`` open neurons."""
        given, named, chords = tree
        slopes = np.zeros(relaxation.open)
        slopes[:count] = numbers(given, count)
        activations = self._graph.activations
        neurons = []
        for group in named if isinstance(named, list) else [None]:
            if not isinstance(group, list) or len(group) != 2:
                raise Refused("neurons are lists of an activation and its neurons")
            activation = activations[integer(group[0], len(activations), "activation")]
            size = self._graph.nodes[activation].size
            neurons += [(activation, integer(j, size, "neuron")) for j in integers(group[1])]
        by_chord = [integer(j, len(neurons), "neuron of the tree") for j in integers(chords)]
        return TreeBounds(relaxation, rows, slopes, neurons, by_chord, planes)

    def _plain(self, relaxation: CheckedRelaxation, rows: BoundedRows, mu: Number, slopes: Number) -> None:
        """A polytope that no split is needed for, with the chord wherever it is the better line."""
        place, lines = self._records.place, Signed(slopes)
        objective = EXACT.of(mu)[None] @ EXACT.of(rows.matrix)
        scale = np.lcm.reduce([value.denominator for value in objective.ravel()], dtype=object)
        whole = (objective * scale).astype(np.float64)
        if any(int(value) != exact for value, exact in zip(whole.ravel(), (objective * scale).ravel(), strict=True)):
            raise Refused(f"{place}: the multipliers have too many digits")
        claim = np.array([(EXACT.of(mu) @ rows.most) * scale], dtype=object)

        def least(_: Number, ring: Float) -> Least:
            return of_box(relaxation, relaxation.pulled({rows.node: whole}, lines, ring), lines, ring)

        failed = self._counts.settle(least, claim, strictly=True)
        if failed is not None:
            raise Refused(f"{place}: the polytope is not excluded: its rows are proven to reach {failed[1]} only")
        self._counts.leaves += 1

    def _leaves(self, tree: TreeBounds, weights: Callable[[Any], Number]) -> Iterator[_WrittenLeaf]:
        """The leaves of a tree in preorder: a split, what is below its upper side, what is below its lower side."""
        path: list[tuple[int, int, float]] = []
        waiting: list[tuple[int, int, float]] = []
        records, count = self._records, len(tree.neurons)
        while True:
            if "split" in records.peek():
                neuron, point = self._split(tree, path)
                waiting.append((len(path), neuron, point))
                path.append((neuron, 1, point))
                require_depth(len(path), len(path))
                continue
            leaf, mu = records.take("leaf", optional=("rows",))
            given = integers(leaf)
            if len(given) % 2 == 0:
                raise Refused(f"{records.place}: multipliers are an exponent and pairs")
            neurons = given[1::2]
            if neurons and not 0 <= min(neurons) <= max(neurons) < count:
                raise Refused(f"{records.place}: a multiplier is that of no neuron of the tree")
            if len(set(neurons)) < len(neurons):
                raise Refused(f"{records.place}: a neuron has two multipliers")
            yield _WrittenLeaf(records.place, list(path), neurons, numbers(given[:1] + given[2::2]), weights(mu))
            if not waiting:
                return
            depth, neuron, point = waiting.pop()
            del path[depth:]
            path.append((neuron, -1, point))

    def _split(self, tree: TreeBounds, path: list[tuple[int, int, float]]) -> tuple[int, float]:
        """The neuron and the point of the split that is next, below the splits of ``path``."""
        (split,) = self._records.take("split")
        given = integers(split, 3) if isinstance(split, list) else [split]
        neuron = integer(given[0], len(tree.neurons), "neuron of the tree")
        before = [(side, point) for other, side, point in path if other == neuron]
        if bool(tree.curved[neuron]) != (len(given) == 3):
            raise Refused(f"{self._records.place}: neurons of curves, and no others, are split at a given point")
        if len(given) < 3:
            if before:
                raise Refused(f"{self._records.place}: neuron {neuron} is split twice")
            return neuron, 0.0
        (at,) = numbers(given[:0:-1], 1)
        low, high = (float(end[neuron]) for end in tree.ends)
        low = max([low, *(end for side, end in before if side > 0)])
        high = min([high, *(end for side, end in before if side < 0)])
        if not low < at < high:
            raise Refused(f"{self._records.place}: neuron {neuron} is split at {at}, beyond what is left of it")
        return neuron, float(at)

    def _prove(self, tree: TreeBounds, leaves: Iterator[_WrittenLeaf], strictly: bool) -> None:
        together = max(1, min(4096, WORKING // (tree.relaxation.inputs + tree.relaxation.open + len(tree.rows.most))))
        while part := list(islice(leaves, together)):
            shape = (len(part), len(tree.neurons))
            lower, upper = (np.tile(end, (len(part), 1)) for end in tree.ends)
            split, given, multipliers = np.zeros(shape, bool), np.zeros(shape, bool), np.zeros(shape)
            for at, leaf in enumerate(part):
                for neuron, side, point in leaf.path:
                    (lower if side > 0 else upper)[at, neuron] = point
                    split[at, neuron] = True
                given[at, leaf.neurons] = True
                multipliers[at, leaf.neurons] = leaf.multipliers
            mu = sparse.csr_array(np.stack([leaf.rows for leaf in part]))
            found = TreeLeaves(lower, upper, split, multipliers, given, mu)
            w = tree.multipliers(found)

            def least(chosen: Number, ring: Float, found: TreeLeaves = found, w: Number = w) -> Least:
                return tree.exactly(found[chosen], w[chosen]) if ring.exact else tree.least(found, w)

            failed = self._counts.settle(least, np.zeros(len(part)), strictly)
            if failed is not None:
                place, value = part[failed[0]].place, failed[1]
                raise Refused(f"{place}: the leaf is not excluded: its value is {value} at least, only")
            self._counts.leaves += len(part)


def _row(own: Number, given: Any) -> Number:
    """The multipliers of the rows where each has a tree of its own."""
    if given is not None:
        raise Refused("a leaf of one row gives no multipliers of rows")
    return own


def _weights(value: Any, rows: int) -> Number:
    found = numbers(value, rows)
    if not (found >= 0).all():
        raise Refused("a multiplier of a row is negative")
    return found
