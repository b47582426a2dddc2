"""Certificates of *unsat*: trees of records in preorder, each node with what is known there (docs/certificates.md)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np

from verifiable_relu.check.bounds import Plane, State, Walk, root
from verifiable_relu.check.errors import BadInput, Refused
from verifiable_relu.check.functions import Function, Kinked
from verifiable_relu.check.goals import Counts, Leaf, Leaves, Polytope, tighten
from verifiable_relu.check.graph import Activation, Graph, Maximum
from verifiable_relu.check.numbers import FLOAT, UNIT, Number, outward
from verifiable_relu.check.properties import Disjunct, Row
from verifiable_relu.check.records import (
    DEEPEST,
    WAITING,
    Records,
    binary,
    integers,
    listed,
    number_of,
    numbers_of,
    rational,
)

Box = tuple[Any, Any]

KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "bound": ((), ("rows", "slopes")),
    "maximum": (("rounds",), ()),
    "plane": (("terms", "bends"), ()),
    "tighten": ((), ()),
    "close": ((), ("slopes", "multipliers")),
    "clip": (("ends",), ("slopes", "multipliers")),
    "split": ((), ()),
    "halve": ((), ()),
    "only": ((), ()),
    "slopes": ((), ()),
}
"""The records of a tree: the key that names each, others that it has, and others that it may have."""


@dataclass(eq=False)
class TreeNode:
    """A node of a tree whose records come next.

    Attributes:
        state: what is known.
        polytopes: those of the part, or the one of a claim about a neuron.
        left: the numbers of those that are not excluded yet.
        stale: whether interval arithmetic has not gone through the box yet.
        bounded: whether activations were bounded over this box.
    """

    state: State
    polytopes: list[Polytope]
    left: set[int]
    stale: bool = False
    bounded: bool = False

    def child(self, left: set[int] | None = None) -> TreeNode:
        return replace(self, state=self.state.child(), left=set(self.left) if left is None else left)


@dataclass
class Proof:
    """The check of one certificate.

    Attributes:
        heads: whether parts that compare outputs speak of the network without its head.
        require: of a state of the network over a box of the property, what must hold.
    """

    graph: Graph
    disjuncts: list[Disjunct]
    records: Records
    heads: bool = True
    require: Callable[[State], None] = lambda state: None
    counts: Counts = field(default_factory=Counts)

    def check(self) -> Counts:
        """Check everything up to the end.

        Raises:
            Refused: at the first thing that is not proven.
        """
        boxes: dict[tuple[Any, ...], int] = {}
        places = [boxes.setdefault((*d.lower, *d.upper), len(boxes)) for d in self.disjuncts]
        proven: list[tuple[int, set[tuple[Any, ...]]]] = []
        while "part" in self.records.peek():
            box, polytopes = self._part(list(boxes))
            proven += [(box, {row.key() for row in rows}) for rows in polytopes]
        self.records.end()
        for at, (disjunct, box) in enumerate(zip(self.disjuncts, places, strict=True)):
            keys = {row.key() for row in disjunct.rows}
            # Fewer conditions than the disjunct's are those of more points.
            if not any(box == other and rows <= keys for other, rows in proven):
                raise Refused(f"nothing is said of disjunct {at} of the property")
        return self.counts

    def _part(self, boxes: list[tuple[Any, ...]]) -> tuple[int, list[list[Row]]]:
        part, automatic = self.records.take("part", optional=("automatic",))
        if not isinstance(part, dict) or part.keys() != {"box", "polytopes"} or automatic not in (None, "triangle"):
            raise Refused("a part has a box and polytopes, and is automatic in a way that is known")
        ends = boxes[number_of(part["box"], len(boxes), "box of the property")]
        polytopes = [self._rows(rows) for rows in listed(part["polytopes"])]
        Refused.when(not polytopes, "a part has polytopes")
        graph = self.graph.asked(self.heads and all(row.compares for rows in polytopes for row in rows))
        low = np.array([outward(value, -np.inf) for value in ends[: len(ends) // 2]])
        high = np.array([outward(value, np.inf) for value in ends[len(ends) // 2 :]])
        state = root(graph, low, high)
        self.require(state)
        goals = [Polytope(graph.output, rows, graph.nodes[graph.output].size) for rows in polytopes]
        _Tree(self.records, self.counts, automatic is not None).check(TreeNode(state, goals, set(range(len(goals)))))
        return boxes.index(ends), polytopes

    def _rows(self, rows: Any) -> list[Row]:
        found, size = [], self.graph.nodes[self.graph.output].size
        for row in listed(rows):
            if not isinstance(row, dict) or row.keys() != {"y", "most"}:
                raise Refused("a row has y and most")
            pairs = [listed(term, 2) for term in listed(row["y"])]
            outputs = numbers_of([pair[0] for pair in pairs], size, "output").tolist()
            terms = [(at, rational(pair[1])) for at, pair in zip(outputs, pairs, strict=True)]
            if not terms or sorted(outputs) != outputs or not all(coefficient for _, coefficient in terms):
                raise Refused("outputs are in order, and their coefficients are not zero")
            found.append(Row(tuple(terms), rational(row["most"])))
        Refused.when(not found, "a polytope has rows")
        return found


class _Tree:
    """The trees of a part. Methods of the names in ``KINDS`` take a record, and return True if it ends the node."""

    def __init__(self, records: Records, counts: Counts, automatic: bool) -> None:
        self._records, self._counts, self._automatic = records, counts, automatic
        self._leaves = Leaves(counts)
        self._stack: list[TreeNode] = []

    def check(self, node: TreeNode) -> None:
        """Take the records of a tree, and prove it.

        Raises:
            Refused: if it is not proven.
        """
        self._stack = [node]
        while self._stack:
            at = self._stack.pop()
            while not self._record(at):
                pass
            if len(self._stack) > DEEPEST or len(self._stack) * node.state.graph.widest > WAITING:
                raise BadInput("the certificate's splits or halvings are too deep")
        self._leaves.prove()

    def _record(self, node: TreeNode) -> bool:
        record = self._records.peek()
        kind = next((kind for kind in KINDS if kind in record), "")
        Refused.when(not kind, f"a record of a tree is expected, not of {', '.join(record)[:80] or 'nothing'}")
        others, optional = KINDS[kind]
        values = self._records.take(kind, *others, optional=optional)
        later: list[TreeNode] | bool | None = getattr(self, f"_{kind}")(node, *values)
        if isinstance(later, list):
            self._stack += later
            return True
        return bool(later)

    def _activation(self, state: State, number: Any, kind: Any = Activation) -> int:
        found = state.graph.activations[number_of(number, len(state.graph.activations), "activation")]
        if not isinstance(state.graph.nodes[found], kind):
            raise Refused(f"activation {number} is of another kind")
        return found

    def _neuron(self, state: State, number: Any, neuron: Any) -> tuple[int, int]:
        source = state.graph.nodes[self._activation(state, number, Activation | Maximum)].sources[0]
        return source, number_of(neuron, state.graph.nodes[source].size, "neuron")

    def _slopes(self, node: TreeNode, given: Any) -> None:
        self._set_slopes(node.state, given)

    def _set_slopes(self, state: State, given: Any) -> None:
        for each in listed(given):
            number, neurons, slopes, kind = listed(each, 4)
            activation = self._activation(state, number)
            size = state.graph.nodes[activation].size
            places = numbers_of(neurons, size, "neuron")
            numbers = binary(slopes, len(places))
            if kind not in ("both", "lower", "upper"):
                raise Refused("slopes are those of both lines, of the lower or of the upper one")
            none = np.full(size, np.nan)
            lower, upper = (side.copy() for side in state.slopes.get(activation, (none, none)))
            for side, other in ((lower, "upper"), (upper, "lower")):
                if kind != other:
                    side[places] = numbers
            state.slopes[activation] = lower, upper
        state.made.clear()

    def _current(self, node: TreeNode) -> State:
        if node.stale:
            node.state.propagate()
            node.stale = False
        return node.state

    def _bound(self, node: TreeNode, number: Any, rows: Any, slopes: Any) -> None:
        state, picked = self._current(node), None
        activation = self._activation(state, number, Activation | Maximum)
        if rows is not None:
            sides = integers(rows)[1::2]
            if 2 * len(sides) != len(rows) or not set(sides) <= {-1, 1}:
                raise Refused("rows are neurons, each with a side 1 or -1")
            picked = np.array([self._neuron(state, number, j)[1] for j in rows[::2]], np.int64), np.array(sides)
        kept = dict(state.slopes)
        if slopes is not None:
            self._set_slopes(state, slopes)
        self._counts.bounds += tighten(state, activation, picked)
        if slopes is not None:
            state.slopes = kept
            state.made.clear()
        node.bounded = True

    def _maximum(self, node: TreeNode, number: Any, rounds: Any) -> None:
        Refused.when(rounds is not True, "a maximum is bounded by its rounds, or no record speaks of it")
        node.state.rounds |= {self._activation(node.state, number, Maximum)}

    def _plane(self, node: TreeNode, place: Any, terms: Any, bends: Any) -> None:
        state = self._current(node)
        number, neuron = listed(place, 2)
        activation = self._activation(state, number)
        source, neuron = self._neuron(state, number, neuron)
        function = state.function(activation)
        if not isinstance(function, Kinked):
            raise Refused("planes are those of functions with a kink")
        parts: dict[int, Number] = {}
        for each in listed(terms):
            of, places, numbers = listed(each, 3)
            before = 0 if of == -1 else self._activation(state, of)
            Refused.when(before >= activation or before in parts, "a plane has terms of each earlier activation once")
            index = numbers_of(places, state.graph.nodes[before].size, "neuron")
            parts[before] = np.zeros(state.graph.nodes[before].size)
            parts[before][index] = binary(numbers, len(index))
        mu, nu = np.maximum(binary(bends, 2), 0.0).tolist()
        constant = plane_constant(state, source, neuron, float(function.slope[neuron]), parts, (mu, nu))
        self._counts.bounds += 1
        Refused.when(not np.isfinite(constant), "the plane has no bound")
        others = [plane for plane in state.planes.get(activation, []) if plane.neuron != neuron]
        state.planes[activation] = [*others, Plane(neuron, parts, constant)]

    def _tighten(self, node: TreeNode, given: Any) -> list[TreeNode]:
        """A claim about a neuron: a tree of its own proves it, then it holds in the node."""
        number, neuron, side, mantissa, exponent = listed(given, 5)
        state = node.state
        source, neuron = self._neuron(state, number, neuron)
        side, value = _side(side), _number(mantissa, exponent)
        goal = Polytope(source, [Row(((neuron, Fraction(side)),), Fraction(value))], state.graph.nodes[source].size)
        claim = replace(node, state=state.child(), polytopes=[goal], left={0})
        state.cut(source, neuron, side, side * value)
        state.propagate(source)
        return [node, claim]

    def _wait(self, node: TreeNode, given: Any, slopes: Any, multipliers: Any, pieces: Sequence[Box] = ()) -> set[int]:
        """Let combinations wait to be proven; return the numbers of their polytopes."""
        state, extra, closed = node.state.child(), self._extra(node.state, multipliers), set[int]()
        if slopes is not None:
            self._set_slopes(state, slopes)
        for each in listed(given):
            at = number_of(listed(each)[0] if each else None, len(node.polytopes), "polytope")
            Refused.when(at not in node.left - closed or len(each) > 2, f"polytope {at} is not one that is left")
            closed.add(at)
            polytope = node.polytopes[at]
            mu = binary(each[1], len(polytope.rows)) if len(each) > 1 else np.ones(1)
            if len(mu) != len(polytope.rows) or (mu < 0).any():
                raise Refused("multipliers of rows are as many, and not negative")
            automatic = self._automatic and not node.bounded
            self._leaves.add(Leaf(state, polytope, mu, self._records.place, node.stale, automatic, extra, pieces))
        return closed

    def _extra(self, state: State, given: Any) -> dict[int, tuple[Number, Number]]:
        found: dict[int, tuple[Number, Number]] = {}
        for each in listed([] if given is None else given):
            number, neurons, numbers = listed(each, 3)
            activation = self._activation(state, number)
            node: Any = state.graph.nodes[activation]
            if activation in found or type(node.function) is Function:
                raise Refused("an activation other than a difference has its multipliers once")
            places = numbers_of(neurons, node.size, "neuron")
            found[activation] = places, binary(numbers, len(places))
        return found

    def _close(self, node: TreeNode, given: Any, slopes: Any, multipliers: Any) -> bool:
        node.left -= self._wait(node, given, slopes, multipliers)
        return not node.left

    def _clip(self, node: TreeNode, given: Any, ends: Any, slopes: Any, multipliers: Any) -> None:
        low, high = node.state.ends[0]
        pieces: list[Box] = []
        for each in listed(ends):
            at, side, mantissa, exponent = listed(each, 4)
            at, side, value = number_of(at, len(low), "input"), _side(side), _number(mantissa, exponent)
            # What is cut off lies beyond the new end, which is the other end of what is kept.
            kept, cut = [low.copy(), high.copy()], [low.copy(), high.copy()]
            if side > 0:
                kept[1][at], cut[0][at] = min(high[at], value), max(low[at], value)
            else:
                kept[0][at], cut[1][at] = max(low[at], value), min(high[at], value)
            if (cut[0] <= cut[1]).all():
                pieces.append((cut[0], cut[1]))
            low, high = kept
        if pieces and self._wait(node, given, slopes, multipliers, pieces) != node.left:
            raise Refused("every polytope that is left is to be excluded from what is clipped")
        node.state.ends[0] = low, high
        node.stale, node.bounded = True, False

    def _split(self, node: TreeNode, given: Any) -> list[TreeNode]:
        number, neuron, mantissa, exponent = listed(given, 4)
        return self._halves(node, self._neuron(node.state, number, neuron), _number(mantissa, exponent), (-1, 1))

    def _halve(self, node: TreeNode, given: Any) -> list[TreeNode]:
        at, mantissa, exponent = listed(given, 3)
        place = 0, number_of(at, len(node.state.ends[0][0]), "input")
        node.stale, node.bounded = True, False
        return self._halves(node, place, _number(mantissa, exponent), (1, -1))

    def _halves(self, node: TreeNode, place: tuple[int, int], value: float, sides: tuple[int, int]) -> list[TreeNode]:
        """Both halves of a node, the last one first in the certificate."""
        children = [node.child(), node.child()]
        for child, side in zip(children, sides, strict=True):
            child.state.cut(*place, side, value)
        return children

    def _only(self, node: TreeNode, given: Any) -> list[TreeNode]:
        chosen = set(numbers_of(given, len(node.polytopes), "polytope").tolist())
        Refused.when(not chosen < node.left or not chosen, "some of the polytopes that are left are expected")
        return [node.child(node.left - chosen), node.child(chosen)]


def _side(given: Any) -> int:
    Refused.when(type(given) is not int or given not in (1, -1), "a side is 1 or -1")
    return given


def _number(mantissa: Any, exponent: Any) -> float:
    return float(binary([exponent, mantissa], 1)[0])


def plane_constant(state: State, source: int, neuron: int, slope: float, terms: dict[int, Number], bends: Box) -> float:
    """The least c with r ≤ terms·v + c at all points of the state, but for rounding.

    Where z ≥ 0, r = z ≤ z + μ·(u − z), and where z ≤ 0, r = s·z ≤ s·z + ν·(z − l): c is the larger one of μ·u less the
    least terms·v − (1 − μ)·z, and of −ν·l less the least terms·v − (s + ν)·z.
    """
    mu, nu = bends
    low, high = (float(end[neuron]) for end in state.ends[source])
    rows = {number: np.stack([part, part])[None] for number, part in terms.items()}
    rows[source] = rows.get(source, np.zeros((1, 2, state.graph.nodes[source].size)))
    rows[source][0, :, neuron] -= 1 - mu, slope + nu
    off = 8 * UNIT * (1 + mu + abs(slope) + nu + np.abs(rows[source]).sum()) * max(abs(low), abs(high))
    found = Walk(state, FLOAT, rows, np.zeros((1, 2)), np.full((1, 2), off)).lower()[0][0]
    both = mu * high - found[0], -nu * low - found[1]
    slack = 8 * UNIT * (abs(mu * high) + abs(nu * low) + np.abs(found).sum())
    return float(max(both) + slack)
