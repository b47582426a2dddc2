"""Certificates of *unsat*: the claimed bounds, the splits and the leaves, one after another (docs/certificates.md)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy import sparse

from verifiable_relu.check.arithmetic import EXACT, FLOAT, Float, Number
from verifiable_relu.check.conditions import Disjunct, Row
from verifiable_relu.check.errors import BadInput, Refused
from verifiable_relu.check.graph import Activation, Graph, Smooth
from verifiable_relu.check.least import Least, Leaves, Tree, integral, of_box
from verifiable_relu.check.lines import WORKING, Relaxation, Signed
from verifiable_relu.check.records import Records, integer, integers, numbers, rational

TOGETHER = 1024
"""Leaves that are bounded at once."""


@dataclass
class Counts:
    """What has been checked."""

    boxes: int = 0
    bounds: int = 0
    leaves: int = 0
    exact: int = 0


@dataclass
class Proof:
    """The check of one certificate.

    Args:
        graph: the network.
        disjuncts: the unsafe set.
        records: the certificate, behind its first record.
    """

    graph: Graph
    disjuncts: list[Disjunct]
    records: Records
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
        empty = [any(low > high for low, high in zip(*box, strict=True)) for box in boxes]
        for at, (disjunct, box) in enumerate(zip(self.disjuncts, places, strict=True)):
            keys = {row.key() for row in disjunct.rows}
            if not empty[box] and not any(box == other and rows <= keys for other, rows in proven):
                raise Refused(f"nothing is said of disjunct {at} of the property")
        return self.counts

    def _boxes(self) -> tuple[list[tuple[list[Any], list[Any]]], list[int]]:
        """The different boxes of the property in their order, and which one is that of each disjunct."""
        boxes: list[tuple[list[Any], list[Any]]] = []
        places = []
        for disjunct in self.disjuncts:
            box = (disjunct.lower, disjunct.upper)
            if box not in boxes:
                boxes.append(box)
            places.append(boxes.index(box))
        return boxes, places

    def _rows(self, rows: Any) -> list[Row]:
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
            found.append(Row(tuple(terms), rational(row["most"])))
        return found

    def _cover(self, lower: list[Any], upper: list[Any], polytopes: list[list[Row]]) -> None:
        """A box, or two that cover it, and so on."""
        low = np.array([_outward(value, -np.inf) for value in lower])
        high = np.array([_outward(value, np.inf) for value in upper])
        pending = [(low, high)]
        while pending:
            low, high = pending.pop()
            if "halve" not in self.records.peek():
                self._box(low, high, polytopes)
                continue
            (halve,) = self.records.take("halve")
            at, mantissa, exponent = integers(halve, 3)
            place, (middle,) = integer(at, len(low), "input"), numbers([exponent, mantissa], 1)
            if not low[place] <= middle <= high[place]:
                raise Refused(f"the box is not halved at {middle}, beyond its ends")
            below, above = high.copy(), low.copy()
            below[place] = above[place] = middle
            pending += [(above, high), (low, below)]

    def _box(self, low: Number, high: Number, polytopes: list[list[Row]]) -> None:
        (count,) = self.records.take("root")
        activations = self.graph.activations
        if type(count) is not int or count != len(activations):
            raise Refused(f"bounds of {len(activations)} activations are expected")
        relaxation = Relaxation(self.graph, low, high)
        slopes = np.zeros(0)
        for activation in activations:
            slopes = self._bounds(relaxation, activation, slopes)
        for rows in polytopes:
            self._polytope(relaxation, rows)
        self.counts.boxes += 1

    def _bounds(self, relaxation: Relaxation, number_: int, slopes: Number) -> Number:
        """Check the claimed bounds of one activation; returns the shared slopes, its own among them."""
        node = self.graph.nodes[number_]
        assert isinstance(node, Activation | Smooth)
        name, lower, upper, shared = self.records.take("activation", "lower", "upper", "slopes")
        place = self.records.place
        if name != node.name:
            raise Refused(f"the activation '{node.name}' is expected, not '{str(name)[:40]}'")
        low, high = numbers(lower, node.size), numbers(upper, node.size)
        if not (low <= high).all():
            raise Refused(f"a lower bound of '{name}' is above the upper one")
        ends = relaxation.ends(node.source)
        wanted = {(int(j), 1) for j in np.flatnonzero(~(ends[0] >= low))}
        wanted |= {(int(j), -1) for j in np.flatnonzero(~(ends[1] <= high))}
        claims = [(j, sign, low[j] if sign > 0 else -high[j]) for j, sign in sorted(wanted)]
        size = max(1, WORKING // max(other.size for other in self.graph.nodes))
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
        rest = [claim for claim in claims if claim[:2] in wanted]
        for at in range(0, len(rest), size):
            self._prove(relaxation, node, rest[at : at + size], slopes, place)
        self.counts.bounds += 2 * node.size
        relaxation.claim(number_, low, high)
        return np.concatenate([slopes, numbers(shared, relaxation.neurons[number_].count)])

    def _prove(
        self,
        relaxation: Relaxation,
        node: Activation | Smooth,
        claims: list[tuple[int, int, Any]],
        slopes: Number,
        place: str,
    ) -> None:
        """Prove sign·(neuron) ≥ least for claims (neuron, sign, least)."""
        unit = np.zeros((len(claims), node.size))
        unit[np.arange(len(claims)), [j for j, _, _ in claims]] = [sign for _, sign, _ in claims]

        def least(chosen: Number, ring: Float) -> Least:
            lines = Signed(slopes[chosen] if slopes.ndim > 1 else slopes)
            return of_box(relaxation, relaxation.forms({node.source: unit[chosen]}, lines, ring), lines, ring)

        failed = self._settled(least, np.array([least_ for _, _, least_ in claims]), strictly=False)
        if failed is not None:
            (j, sign, claim), found = claims[failed[0]], failed[1]
            side = "lower" if sign > 0 else "upper"
            raise Refused(
                f"{place}: the {side} bound {sign * claim} of neuron {j} of '{node.name}' is not proven, "
                f"only {sign * found}"
            )

    def _settled(
        self, least: Callable[[Number, Float], Least], claim: Number, strictly: bool
    ) -> tuple[int, float] | None:
        """The first row whose least value is not beyond its claim, and that value; None if there is none.

        Floating point decides where it can, and exact arithmetic elsewhere.
        """
        every = np.arange(len(claim))
        found = least(every, FLOAT)
        decided = found.beyond(claim)
        for at in np.flatnonzero(decided < 1):
            value = float(found.value[at])
            if decided[at] == 0:
                try:
                    one = least(every[at : at + 1], EXACT)
                    proven = one.value[0] - one.slack[0]
                    self.counts.exact += 1
                    if proven > claim[at] or (proven == claim[at] and not strictly):
                        continue
                    value = float(proven)
                except (OverflowError, ValueError):
                    value = -np.inf
            return int(at), value
        return None

    def _polytope(self, relaxation: Relaxation, rows: list[Row]) -> None:
        if "plain" in self.records.peek():
            plain, slopes = self.records.take("plain", "slopes")
            self._plain(relaxation, rows, _weights(plain, len(rows)), numbers(slopes, relaxation.slopes))
            return
        slopes, named = self.records.take("tree", "neurons")
        activations = self.graph.activations
        neurons = []
        for group in named if isinstance(named, list) else [None]:
            if not isinstance(group, list) or len(group) != 2:
                raise Refused("neurons are lists of an activation and its neurons")
            activation = activations[integer(group[0], len(activations), "activation")]
            size = self.graph.nodes[activation].size
            neurons += [(activation, integer(j, size, "neuron")) for j in integers(group[1])]
        tree = Tree(relaxation, rows, numbers(slopes, relaxation.slopes), neurons)
        self._tree(tree, len(rows))

    def _plain(self, relaxation: Relaxation, rows: list[Row], mu: Number, slopes: Number) -> None:
        """A polytope that no split is needed for, with the chord wherever it is the better line."""
        place, (matrix, most) = self.records.place, integral(rows, self.graph.nodes[self.graph.output].size)
        objective, lines = EXACT.of(mu)[None] @ EXACT.of(matrix), Signed(slopes)
        scale = np.lcm.reduce([value.denominator for value in objective.ravel()], dtype=object)
        whole = (objective * scale).astype(np.float64)
        if any(int(value) != exact for value, exact in zip(whole.ravel(), (objective * scale).ravel(), strict=True)):
            raise Refused(f"{place}: the multipliers have too many digits")
        claim = np.array([(EXACT.of(mu) @ most) * scale], dtype=object)

        def least(chosen: Number, ring: Float) -> Least:
            return of_box(relaxation, relaxation.forms({self.graph.output: whole}, lines, ring), lines, ring)

        failed = self._settled(least, claim, strictly=True)
        if failed is not None:
            raise Refused(f"{place}: the polytope is not excluded: its rows are proven to reach {failed[1]} only")
        self.counts.leaves += 1

    def _tree(self, tree: Tree, rows: int) -> None:
        """A tree in preorder: a split, what is below its active side, what is below its inactive side; or a leaf."""
        path: list[tuple[int, int]] = []
        waiting: list[tuple[int, int, int]] = []
        ready: list[tuple[str, list[tuple[int, int]], list[int], Number]] = []
        count = len(tree.neurons)
        while True:
            if "split" in self.records.peek():
                (split,) = self.records.take("split")
                neuron = integer(split, count, "neuron of the tree")
                if any(neuron == other for other, _ in path):
                    raise Refused(f"{self.records.place}: neuron {neuron} is split twice")
                waiting.append((len(path), neuron, -1))
                path.append((neuron, 1))
                continue
            leaf, mu = self.records.take("leaf", optional=("rows",))
            multipliers = integers(leaf)
            if len(multipliers) % 2 == 0:
                raise Refused(f"{self.records.place}: multipliers are an exponent and pairs")
            numbers(multipliers[:1] + multipliers[2::2])
            for neuron in multipliers[1::2]:
                integer(neuron, count, "neuron of the tree")
            if len(set(multipliers[1::2])) < len(multipliers) // 2:
                raise Refused(f"{self.records.place}: a neuron has two multipliers")
            weights = _weights(mu, rows) if mu is not None or rows > 1 else np.ones(1)
            ready.append((self.records.place, list(path), multipliers, weights))
            if len(ready) == TOGETHER or not waiting:
                self._leaves(tree, ready)
                ready = []
            if not waiting:
                return
            depth, neuron, side = waiting.pop()
            del path[depth:]
            path.append((neuron, side))

    def _leaves(self, tree: Tree, ready: list[tuple[str, list[tuple[int, int]], list[int], Number]]) -> None:
        split = np.zeros((len(ready), len(tree.neurons)), np.int8)
        starts, columns, values = [0], [], []
        for at, (_, path, multipliers, _) in enumerate(ready):
            for neuron, side in path:
                split[at, neuron] = side
            columns += multipliers[1::2]
            values += numbers(multipliers[:1] + multipliers[2::2]).tolist()
            starts.append(len(columns))
        shape = (len(ready), len(tree.neurons))
        w = sparse.csr_array((np.array(values, float), np.array(columns, np.int32), np.array(starts)), shape=shape)
        mu = np.stack([weights for _, _, _, weights in ready])

        def least(chosen: Number, ring: Float) -> Least:
            if not ring.exact:
                return tree.least(Leaves(split, w, mu))
            return tree.exactly(split[chosen[0]], w[[chosen[0]]].toarray()[0], mu[chosen[0]])

        failed = self._settled(least, np.zeros(len(ready)), strictly=True)
        if failed is not None:
            raise Refused(f"{ready[failed[0]][0]}: the leaf is not excluded: its value is {failed[1]} at least, only")
        self.counts.leaves += len(ready)


def _weights(value: Any, rows: int) -> Number:
    found = numbers(value, rows)
    if not (found >= 0).all():
        raise Refused("a multiplier of a row is negative")
    return found


def _outward(value: Any, towards: float) -> float:
    """The nearest float64 number on one side of a rational one."""
    if abs(value) > 1 << 500:
        raise BadInput("an end of the box is beyond ±2⁵⁰⁰")
    found = float(value)
    if (found < value) if towards > 0 else (found > value):
        found = float(np.nextafter(found, towards))
    return found
