"""Certificates of *unsat*: the claimed bounds, the splits and the leaves, one after another (docs/certificates.md)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from verifiable_relu.check.arithmetic import Float, Number, RoundingModel, outward
from verifiable_relu.check.conditions import HalfSpace, UnsafeSet
from verifiable_relu.check.errors import Refused
from verifiable_relu.check.graph import ActivationNode, DifferenceNode, Graph, MaximumNode, SmoothNode
from verifiable_relu.check.least import Least, of_box
from verifiable_relu.check.lines import WORKING, CheckedRelaxation, Coefficients, CurvedNeurons, Signed
from verifiable_relu.check.records import CertificateRecords, integer, integers, numbers, rational, require_depth
from verifiable_relu.check.running import require_moderate
from verifiable_relu.check.trees import Counts, Trees
from verifiable_relu.check.zonotope import Boxes

TOGETHER = 1 << 10
"""Most bounds that are proven at once where their rows see little of the network."""


@dataclass
class CertificateProof:
    """The check of one certificate.

    Args:
        graph: the network.
        disjuncts: the unsafe set.
        records: the certificate, behind its first record.
        arithmetic: of what runs the network; None for real arithmetic.
    """

    graph: Graph
    disjuncts: list[UnsafeSet]
    records: CertificateRecords
    arithmetic: RoundingModel | None = None
    counts: Counts = field(default_factory=Counts)

    def check(self) -> Counts:
        """Check everything up to the end.

        Raises:
            Refused: at the first thing that is not proven.
        """
        boxes, places = self._boxes()
        proven: list[tuple[int, set[tuple[Any, ...]]]] = []
        while "part" in self.records.peek():
            (part,) = self.records.take("part")
            if not isinstance(part, dict) or part.keys() != {"box", "polytopes"}:
                raise Refused("a part has a box and polytopes")
            box = integer(part["box"], len(boxes), "box of the property")
            if not isinstance(part["polytopes"], list) or not part["polytopes"]:
                raise Refused("a part has polytopes")
            polytopes = [self._rows(rows) for rows in part["polytopes"]]
            self._cover(*boxes[box], polytopes)
            proven += [(box, {row.key() for row in rows}) for rows in polytopes]
        self.records.end()
        for at, (disjunct, box) in enumerate(zip(self.disjuncts, places, strict=True)):
            keys = {row.key() for row in disjunct.rows}
            if not any(box == other and rows <= keys for other, rows in proven):
                raise Refused(f"nothing is said of disjunct {at} of the property")
        return self.counts

    def _boxes(self) -> tuple[list[tuple[tuple[Any, ...], tuple[Any, ...]]], list[int]]:
        """The different boxes of the property in their order, and which one is that of each disjunct."""
        boxes: dict[tuple[tuple[Any, ...], tuple[Any, ...]], int] = {}
        found = [(tuple(disjunct.lower), tuple(disjunct.upper)) for disjunct in self.disjuncts]
        places = [boxes.setdefault(box, len(boxes)) for box in found]
        return list(boxes), places

    def _rows(self, rows: Any) -> list[HalfSpace]:
        if not isinstance(rows, list) or not rows:
            raise Refused("a polytope is a list of rows")
        found = []
        for row in rows:
            if not isinstance(row, dict) or row.keys() != {"y", "most"} or not isinstance(row["y"], list):
                raise Refused("a row has y and most")
            size = self.graph.nodes[self.graph.output].size
            terms = []
            for term in row["y"]:
                if not isinstance(term, list) or len(term) != 2:
                    raise Refused("a term is an output and a coefficient")
                terms.append((integer(term[0], size, "output"), rational(term[1])))
            places = [output for output, _ in terms]
            if not terms or sorted(set(places)) != places or not all(coefficient for _, coefficient in terms):
                raise Refused("outputs are in order, and their coefficients are not zero")
            found.append(HalfSpace(tuple(terms), rational(row["most"])))
        return found

    def _cover(self, lower: tuple[Any, ...], upper: tuple[Any, ...], polytopes: list[list[HalfSpace]]) -> None:
        """A box, or two that cover it, and so on."""
        low = np.array([outward(value, -np.inf) for value in lower])
        high = np.array([outward(value, np.inf) for value in upper])
        # What rounds may make a tie of a difference: its head counts.
        comparing = self.arithmetic is None and all(row.compares for rows in polytopes for row in rows)
        graph = self.graph.asked(comparing)
        if self.arithmetic is not None:
            require_moderate(graph, low, high, self.arithmetic.largest)
        pending, leaves = [(low, high)], Boxes(graph, polytopes, self.records, self.counts)
        while pending:
            low, high = pending.pop()
            if "zonotope" in self.records.peek():
                leaves.take(low, high)
                continue
            if "halve" not in self.records.peek():
                self._box(CheckedRelaxation(graph, low, high), polytopes)
                continue
            (halve,) = self.records.take("halve")
            at, mantissa, exponent = integers(halve, 3)
            place, (middle,) = integer(at, len(low), "input"), numbers([exponent, mantissa], 1)
            if not low[place] < middle < high[place]:
                raise Refused(f"the box is not halved at {middle}, beyond its ends or at one")
            require_depth(len(pending), len(low))
            below, above = high.copy(), low.copy()
            below[place] = above[place] = middle
            pending += [(above, high), (low, below)]
        leaves.prove()

    def _box(self, relaxation: CheckedRelaxation, polytopes: list[list[HalfSpace]]) -> None:
        (count,) = self.records.take("root")
        activations = relaxation.graph.activations
        if type(count) is not int or count != len(activations):
            raise Refused(f"bounds of {len(activations)} activations are expected")
        slopes = np.zeros(0)
        for activation in activations:
            slopes = self._bounds(relaxation, activation, slopes)
            while "maximum" in self.records.peek():
                self._maxima(relaxation)
        trees = Trees(relaxation.graph, self.records, self.counts)
        for rows in polytopes:
            while "tighter" in self.records.peek():
                trees.tighter(relaxation)
            trees.polytope(relaxation, rows)
        self.counts.boxes += 1

    def _bounds(self, relaxation: CheckedRelaxation, number_: int, slopes: Number) -> Number:
        """Check the claimed bounds of one activation; returns the shared slopes, its own among them."""
        node = relaxation.graph.nodes[number_]
        assert isinstance(node, ActivationNode | SmoothNode)
        keys, beside = ("activation", "lower", "upper", "slopes"), isinstance(node, DifferenceNode)
        name, lower, upper, shared, *alone = self.records.take(*keys, *(("alone",) if beside else ()))
        place = self.records.place
        if name != node.name:
            raise Refused(f"the activation '{node.name}' is expected, not '{str(name)[:40]}'")
        low, high = numbers(lower, node.size), numbers(upper, node.size)
        if not (low <= high).all():
            raise Refused(f"a lower bound of '{name}' is above the upper one")
        ends = relaxation.apart(node) if isinstance(node, DifferenceNode) else relaxation.ends(node.source)
        wanted = {(int(j), 1) for j in np.flatnonzero(~(ends[0] >= low))}
        wanted |= {(int(j), -1) for j in np.flatnonzero(~(ends[1] <= high))}
        claims = [(j, sign, low[j] if sign > 0 else -high[j]) for j, sign in sorted(wanted)]
        size = max(1, WORKING // max(other.size for other in relaxation.graph.nodes))
        own: list[tuple[tuple[int, int, Any], Number]] = []
        while "row" in self.records.peek():
            row, mine = self.records.take("row", "slopes")
            neuron, side = integers(row, 2)
            key = (integer(neuron, node.size, "neuron"), side)
            if side not in (1, -1):
                raise Refused("a side is 1, of a lower bound, or −1")
            vector = numbers(mine, relaxation.slopes)
            if key in wanted:
                wanted.discard(key)
                own.append(((*key, low[neuron] if side > 0 else -high[neuron]), vector))
            if len(own) == size:
                self._prove(relaxation, node, [c for c, _ in own], np.stack([v for _, v in own]), place)
                own = []
        if own:
            self._prove(relaxation, node, [c for c, _ in own], np.stack([v for _, v in own]), place)
        rest, near = [claim for claim in claims if claim[:2] in wanted], relaxation.graph.first[node.source]
        rest.sort(key=lambda claim: int(near[claim[0]]))
        at, together = 0, size
        while at < len(rest):
            widest = self._prove(relaxation, node, rest[at : at + together], slopes, place)
            at, together = at + together, max(size, min(TOGETHER, WORKING // widest))
        self.counts.bounds += 2 * node.size
        relaxation.claim(number_, low, high)
        if isinstance(known := relaxation.neurons[number_], CurvedNeurons) and beside:
            known.alone[[integer(neuron, node.size, "neuron") for neuron in integers(alone[0])]] = 1
        return np.concatenate([slopes, numbers(shared, relaxation.neurons[number_].count)])

    def _maxima(self, relaxation: CheckedRelaxation) -> None:
        """The entries by which maxima are bounded whose activations are behind."""
        name, *entries = self.records.take("maximum", "below", "above")
        nodes = relaxation.graph.nodes
        named = (at for at, node in enumerate(nodes) if isinstance(node, MaximumNode) and node.name == name)
        number = next(named, -1)
        waiting = (at for at in relaxation.graph.activations if at not in relaxation.neurons)
        if number < 0 or next(waiting, number) < number:
            raise Refused(f"{self.records.place}: no maxima '{str(name)[:40]}' end here")
        relaxation.bound(number, *(np.array(integers(part, nodes[number].size), np.intp) for part in entries))

    def _prove(
        self,
        relaxation: CheckedRelaxation,
        node: ActivationNode | SmoothNode,
        claims: list[tuple[int, int, Any]],
        slopes: Number,
        place: str,
    ) -> int:
        """Prove sign·(neuron) ≥ least for claims (neuron, sign, least); returns the most entries that were seen."""
        neurons, places = np.unique([j for j, _, _ in claims], return_inverse=True)
        unit, widest = np.zeros((len(claims), len(neurons))), 1
        unit[np.arange(len(claims)), places] = [sign for _, sign, _ in claims]

        def least(chosen: Number, ring: Float) -> Least:
            nonlocal widest
            lines = Signed(slopes[chosen] if slopes.ndim > 1 else slopes)
            alone = not isinstance(node, DifferenceNode)
            form = relaxation.pulled({node.source: Coefficients(neurons, unit[chosen])}, lines, ring, alone)
            widest = max(widest, form.widest)
            return of_box(relaxation, form, lines, ring)

        failed = self.counts.settle(least, np.array([least_ for _, _, least_ in claims]), strictly=False)
        if failed is not None:
            (j, sign, claim), found = claims[failed[0]], failed[1]
            side = "lower" if sign > 0 else "upper"
            raise Refused(
                f"{place}: the {side} bound {sign * claim} of neuron {j} of '{node.name}' is not proven, "
                f"only {sign * found}"
            )
        return widest
