"""Certificates of *unsat*: trees of records in preorder, each node with what is known there (docs/certificates.md).

Polytopes are excluded by leaves, many at once (rule 3 by rule 1).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np

from verifiable_relu.check.bounds import FEW, Plane, State, Walk, lower_of, root, stacked
from verifiable_relu.check.errors import BadInput, Refused
from verifiable_relu.check.functions import Kinked
from verifiable_relu.check.graph import Activation, Graph, MaximumNode
from verifiable_relu.check.numbers import TINY, UNIT, Number, gamma, outward
from verifiable_relu.check.properties import Disjunct, RowCondition
from verifiable_relu.check.records import Records, binary, listed, number_of, numbers_of, rational, sign
from verifiable_relu.check.running import RoundingModel, require_moderate

TOGETHER, ROOM = 1 << 10, 1 << 23
"""Most leaves that wait to be proven at once, and most numbers of their states."""

CHUNK = 1 << 18
"""Most coefficients of rows that are pulled back at once."""

HALVINGS, ALL_HALVINGS = 20, 1 << 16
"""How often a checker halves the box of a fresh leaf, in a row, and boxes in one certificate, at most."""

LEAST = Fraction(1, 2**1000)
"""The smallest number other than zero that a row may have; the largest is its reciprocal."""

DEEPEST, WAITING = 1024, 1 << 24
"""Most halves of splits that wait; and most numbers of what waits there, of boxes and of neurons."""

KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "bound": ((), ("rows", "slopes")),
    "plane": (("terms", "bends"), ()),
    "tighten": ((), ()),
    "close": ((), ("slopes", "multipliers")),
    "split": ((), ()),
    "halve": ((), ()),
    "only": ((), ()),
    "slopes": ((), ()),
    "tournaments": ((), ()),
}
"""The records of a tree: the key that names each, others that it has, and others that it may have."""


@dataclass
class Counts:
    """Counts of what was proven."""

    bounds: int = 0
    leaves: int = 0
    boxes: int = 0
    halvings: int = 0


class Polytope:
    """Rows g = Σ c·v − most of the entries v of a node; at each of its points all are ≤ 0.

    Raises:
        BadInput: if float64 cannot hold a number nearly as it is.
    """

    def __init__(self, node: int, rows: Sequence[RowCondition]) -> None:
        self.node, self.terms = node, list[tuple[Number, Number, float]]()
        for row in rows:
            sizes = [abs(value) for _, value in row.y] + [abs(row.most)] * bool(row.most)
            BadInput.when(min(sizes) < LEAST or max(sizes) > 1 / LEAST, "a row has a number beyond 2^±1000")
            places, values = zip(*row.y, strict=True)
            self.terms.append((np.array(places), np.array([float(value) for value in values]), float(row.most)))

    def moved(self, node: int) -> Polytope:
        """Return the same rows of another node of the same value."""
        found = copy(self)
        found.node = node
        return found

    def combined(self, mu: Number, size: Number) -> tuple[Number, Any, Any]:
        """Return the coefficients of Σ μ·g, its constant, and what rounding may change it by where |v| ≤ ``size``.

        A coefficient is rounded, multiplied, and added up: n + 2 roundings of n products.
        """
        found, constant, sizes = np.zeros(len(size)), 0.0, 0.0
        for factor, (at, values, most) in zip(mu, self.terms, strict=True):
            found[at] += factor * values
            constant -= factor * most
            sizes += factor * (np.abs(values) @ size[at] + abs(most))
        return found, constant, gamma(len(mu) + 3) * sizes + TINY


@dataclass(eq=False)
class ProofLeaf:
    """A polytope that is to be excluded from a state.

    Attributes:
        mu: multipliers of the polytope's rows.
        place: the record that says so.
        fresh: whether the box was halved, and no activation was bounded since.
        extra: multipliers w of pre-activations z, by activation: neurons and numbers.
        halvings: how often the box of a fresh leaf was halved.
    """

    state: State
    polytope: Polytope
    mu: Number
    place: str
    fresh: bool = False
    extra: dict[int, tuple[Number, Number]] = field(default_factory=dict)
    halvings: int = 0

    @property
    def kind(self) -> tuple[Any, ...]:
        """Leaves of one kind are proven at once."""
        planes = tuple((number, id(value)) for number, value in self.state.planes.items())
        return id(self.state.graph), self.polytope.node, self.fresh, planes


class Leaves:
    """Leaves that wait, and are proven together."""

    def __init__(self, counts: Counts) -> None:
        self._waiting: list[ProofLeaf] = []
        self._counts = counts

    def add(self, leaf: ProofLeaf) -> None:
        """Prove a leaf, now or later."""
        self._waiting.append(leaf)
        if len(self._waiting) >= min(TOGETHER, ROOM // leaf.state.graph.widest + 1):
            self.prove()

    def prove(self) -> None:
        """Prove all that wait.

        Raises:
            Refused: at the first one that is not proven.
        """
        while self._waiting:
            kinds: dict[tuple[Any, ...], list[ProofLeaf]] = defaultdict(list)
            for leaf in self._waiting:
                kinds[leaf.kind].append(leaf)
            self._waiting = []
            for leaves in kinds.values():
                self._prove(leaves)

    def _prove(self, leaves: list[ProofLeaf]) -> None:
        states = {id(leaf.state): leaf.state for leaf in leaves}
        state, first, counts = stacked(list(states.values())), leaves[0], self._counts
        if first.fresh:
            state = state.child()
            state.propagate()
            counts.boxes += len(states)
            for number in sorted(state.graph.needed(first.polytope.node)):
                if isinstance(state.graph.nodes[number], Activation | MaximumNode):
                    counts.bounds += tighten(state, number)
        if 1 < len(states) < len(leaves):
            numbers = {key: number for number, key in enumerate(states)}
            state = state.chosen(np.array([numbers[id(leaf.state)] for leaf in leaves]))
        low, inputs = proven(state, leaves)
        empty = np.broadcast_to(state.is_empty(), len(leaves))
        for number in np.flatnonzero(~((low > 0) | empty)).tolist():
            leaf = leaves[number]
            if not leaf.fresh or leaf.halvings >= HALVINGS or counts.halvings >= ALL_HALVINGS:
                raise Refused(f"{leaf.place}: the sum is not proven to be positive ({low[number]:.3g})")
            self._halve(leaf, inputs[number])
        counts.leaves += len(leaves)

    def _halve(self, leaf: ProofLeaf, row: Number) -> None:
        """Let both halves of a leaf's box wait: it is cut where the row or, in turn, the first layers vary most."""
        self._counts.halvings += 1
        (low,), (high,) = leaf.state.ends[0]
        by_row = np.abs(row) * (high - low)
        by_layers = leaf.state.graph.reach * (high - low)
        at = int((by_layers if leaf.halvings % 2 or not by_row.any() else by_row).argmax())
        for side in (1, -1):
            state = leaf.state.child()
            state.cut(0, at, side, float(low[at] / 2 + high[at] / 2))
            self._waiting.append(replace(leaf, state=state, halvings=leaf.halvings + 1))


def proven(state: State, leaves: list[ProofLeaf]) -> tuple[Number, Number]:
    """Return the least value of each leaf's combination, and the rows at the input.

    Leaves are of one state, or each has one. A multiplier w of z adds w·z − max(w·l, w·u), which is never positive.
    """
    polytope, count = leaves[0].polytope, len(leaves)
    # Rows of one state, or a row of each state.
    axis = 0 if state.boxes == 1 else 1
    walk = Walk(state, *((1, count) if state.boxes == 1 else (count, 1)))
    sizes = np.broadcast_to(state.size(polytope.node), (count, state.graph.nodes[polytope.node].size))
    sums = [leaf.polytope.combined(leaf.mu, size) for leaf, size in zip(leaves, sizes, strict=True)]
    rows, constant, loss = (np.expand_dims(np.stack(each), axis) for each in zip(*sums, strict=True))
    walk.count(constant, loss)
    walk.add(polytope.node, rows)
    for number in sorted({number for leaf in leaves for number in leaf.extra}):
        source = state.graph.nodes[number].source
        given = np.zeros((count, state.graph.nodes[source].size))
        for row, leaf in zip(given, leaves, strict=True):
            if number in leaf.extra:
                row[leaf.extra[number][0]] = leaf.extra[number][1]
        low, high = state.ends[source]
        most = np.maximum(given * low, given * high).sum(-1)
        lost = gamma(given.shape[1] + FEW) * (np.abs(given) * state.size(source)).sum(-1)
        walk.count(-np.expand_dims(most, axis), np.expand_dims(lost, axis))
        walk.add(source, np.expand_dims(given, axis))
    return walk.pull().ravel(), walk.inputs.reshape(count, -1)


def tighten(state: State, number: int, rows: tuple[Number, Number] | None = None) -> int:
    """Bound the neurons of an activation by rule 1; return how many rows that took.

    Args:
        state: is changed.
        number: the activation's node.
        rows: neurons and sides; None for both sides of all that are open.
    """
    source = state.graph.nodes[number].source
    shape = boxes, _ = state.boxes, state.graph.nodes[source].size
    low, high = (np.broadcast_to(end, shape).copy() for end in state.ends[source])
    if rows is None:
        free = np.broadcast_to(_open(state, number), shape)
        # Where a box has fewer, others stand in their place, and are not used.
        neurons = np.argsort(~free, axis=1, kind="stable")[:, : int(free.sum(1).max(initial=0))]
        sides, neurons = np.repeat([[1, -1]], neurons.shape[1], 1), np.tile(neurons, 2)
        valid = np.take_along_axis(free, neurons, 1)
    else:
        neurons, sides = np.atleast_2d(rows[0]), np.atleast_2d(rows[1])
        valid = np.ones(neurons.shape, bool)
    count = neurons.shape[1]
    step = max(1, CHUNK // max(state.graph.widest, 64))
    together = max(1, step // max(1, count))
    for first in range(0, boxes, together):
        box = slice(first, first + together)
        some, place = state.chosen(box) if boxes > together else state, np.arange(boxes)[box, None]
        for start in range(0, count, step):
            part = slice(start, start + step)
            side, at = sides[:, part], (place, neurons[box, part])
            found = lower_of(some, source, neurons[box, part], side)
            found = np.where(np.isfinite(found) & valid[box, part], found, -np.inf)
            np.maximum.at(low, at, np.where(side > 0, found, -np.inf))
            np.minimum.at(high, at, np.where(side > 0, np.inf, -found))
    if count:
        state.ends[source] = low, high
        state.propagate(source)
    return neurons.size


def _open(state: State, number: int) -> Number:
    """Return which entries of an activation's input may matter: of a maximum, the rivals that may win."""
    node = state.graph.nodes[number]
    low, high = state.ends[node.source]
    if isinstance(node, Activation):
        return state.function(number).is_open(low, high)
    alive = high[:, node.rivals] > low[:, node.rivals].max(1)[:, None]
    alive &= (alive.sum(1) > 1)[:, None]
    found = np.zeros(np.broadcast_shapes(low.shape, high.shape), bool)
    for entries, live in zip(node.rivals, np.moveaxis(alive, 1, 0), strict=True):
        np.logical_or.at(found, (np.arange(len(found))[:, None], entries), live)
    return found


@dataclass(eq=False)
class TreeNode:
    """A node of a tree whose records come next.

    Attributes:
        state: what is known.
        polytopes: those of the part, or the one of a claim about a neuron.
        left: the numbers of those that are not excluded yet.
        fresh: whether the box was halved, and no activation was bounded since.
    """

    state: State
    polytopes: list[Polytope]
    left: set[int]
    fresh: bool = False

    def current(self) -> State:
        """Return the state, with interval arithmetic gone through its box."""
        if self.fresh:
            self.state.propagate()
        return self.state


@dataclass
class Proof:
    """The check of one certificate; ``running`` is what runs the network."""

    graph: Graph
    disjuncts: list[Disjunct]
    records: Records
    running: RoundingModel | None = None
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

    def _part(self, boxes: list[tuple[Any, ...]]) -> tuple[int, list[list[RowCondition]]]:
        (part,) = self.records.take("part")
        if not isinstance(part, dict) or part.keys() != {"box", "polytopes"}:
            raise Refused("a part has a box and polytopes")
        box = number_of(part["box"], len(boxes), "box of the property")
        polytopes = [self._rows(rows) for rows in listed(part["polytopes"])]
        Refused.when(not polytopes, "a part has polytopes")
        heads = self.running is None and self.graph.second is None
        graph = self.graph.asked(heads and all(row.compares for rows in polytopes for row in rows))
        size = graph.nodes[0].size
        low = np.array([outward(value, -np.inf) for value in boxes[box][:size]])
        state = root(graph, low, np.array([outward(value, np.inf) for value in boxes[box][size:]]))
        if self.running is not None:
            require_moderate(state, self.running.largest)
        goals = [Polytope(graph.output, rows) for rows in polytopes]
        _ProofTree(self.records, self.counts).check(TreeNode(state, goals, set(range(len(goals)))))
        return box, polytopes

    def _rows(self, rows: Any) -> list[RowCondition]:
        found, size = [], self.graph.nodes[self.graph.output].size
        for row in listed(rows):
            if not isinstance(row, dict) or row.keys() != {"y", "most"}:
                raise Refused("a row has y and most")
            pairs = [listed(term, 2) for term in listed(row["y"])]
            outputs = numbers_of([pair[0] for pair in pairs], size, "output").tolist()
            terms = [(at, rational(pair[1])) for at, pair in zip(outputs, pairs, strict=True)]
            if not terms or sorted(outputs) != outputs or not all(coefficient for _, coefficient in terms):
                raise Refused("outputs are in order, and their coefficients are not zero")
            found.append(RowCondition(tuple(terms), rational(row["most"])))
        Refused.when(not found, "a polytope has rows")
        return found


class _ProofTree:
    """The trees of a part. Methods of the names in ``KINDS`` take a record.

    They return True if it ends the node, and the nodes that follow, the last one first in the certificate.
    """

    def __init__(self, records: Records, counts: Counts) -> None:
        self._records, self._counts = records, counts
        self._leaves = Leaves(counts)

    def check(self, node: TreeNode) -> None:
        """Take the records of a tree, and prove it.

        Raises:
            Refused: if it is not proven.
        """
        stack = [node]
        while stack:
            at, later = stack.pop(), None
            while not later:
                record = self._records.peek()
                kind = next((kind for kind in KINDS if kind in record), "")
                Refused.when(not kind, f"a record of a tree is expected, not of {', '.join(record)[:80] or 'nothing'}")
                others, optional = KINDS[kind]
                later = getattr(self, f"_{kind}")(at, *self._records.take(kind, *others, optional=optional))
            stack += later if isinstance(later, list) else []
            if len(stack) > DEEPEST or len(stack) * node.state.graph.widest > WAITING:
                raise BadInput("the certificate's splits or halvings are too deep")
        self._leaves.prove()

    def _activation(self, state: State, number: Any, kind: Any = Activation | MaximumNode) -> int:
        found = state.graph.activations[number_of(number, len(state.graph.activations), "activation")]
        if not isinstance(state.graph.nodes[found], kind):
            raise Refused(f"activation {number} is of another kind")
        return found

    def _neuron(self, state: State, number: Any, neuron: Any) -> tuple[int, int]:
        source = state.graph.nodes[self._activation(state, number)].source
        return source, number_of(neuron, state.graph.nodes[source].size, "neuron")

    def _hints(self, state: State, given: Any, length: int, inputs: bool = False) -> Iterator[tuple[Any, ...]]:
        """Yield activations, neurons, numbers for them, and the rest; with ``inputs``, −1 stands for these."""
        for each in listed(given):
            number, neurons, values, *more = listed(each, length)
            activation = 0 if inputs and number == -1 else self._activation(state, number, Activation)
            places = numbers_of(neurons, state.graph.nodes[activation].size, "neuron")
            yield activation, places, binary(values, len(places)), *more

    def _slopes(self, node: TreeNode, given: Any, state: State | None = None) -> None:
        state = state or node.state
        for activation, places, numbers, kind in self._hints(state, given, 4):
            known = kind in ("both", "lower", "upper")
            Refused.when(not known, "slopes are those of both lines, of the lower or of the upper one")
            none = np.full((1, state.graph.nodes[activation].size), np.nan)
            lower, upper = (side.copy() for side in state.slopes.get(activation, (none, none)))
            for side, other in ((lower, "upper"), (upper, "lower")):
                if kind != other:
                    side[0, places] = numbers
            state.slopes[activation] = lower, upper
        state.made.clear()

    def _bound(self, node: TreeNode, number: Any, rows: Any, slopes: Any) -> None:
        state, picked = node.current(), None
        activation = self._activation(state, number)
        if rows is not None:
            sides = [sign(side) for side in listed(rows)[1::2]]
            Refused.when(2 * len(sides) != len(rows), "rows are neurons, each with a side 1 or -1")
            picked = np.array([self._neuron(state, number, j)[1] for j in rows[::2]], np.int64), np.array(sides)
        kept = dict(state.slopes)
        if slopes is not None:
            self._slopes(node, slopes)
        self._counts.bounds += tighten(state, activation, picked)
        if slopes is not None:
            state.slopes = kept
            state.made.clear()
        node.fresh = False

    def _tournaments(self, node: TreeNode, given: Any) -> None:
        """Let rows pass maxima as tournaments from here on; activations have the numbers of that graph."""
        state = node.current()
        Refused.when(given is not True or state.graph.has_tournaments, "tournaments are said once, to be true")
        graph, place = state.graph.tournaments
        node.state = State(graph, {place[number]: ends for number, ends in state.ends.items()})
        node.state.propagate()
        node.polytopes = [polytope.moved(place[polytope.node]) for polytope in node.polytopes]

    def _plane(self, node: TreeNode, place: Any, terms: Any, bends: Any) -> None:
        state = node.current()
        number, neuron = listed(place, 2)
        activation = self._activation(state, number, Activation)
        source, neuron = self._neuron(state, number, neuron)
        function = state.graph.nodes[activation].function
        if not isinstance(function, Kinked):
            raise Refused("planes are those of functions with a kink")
        parts: dict[int, Number] = {}
        for before, places, numbers in self._hints(state, terms, 3, inputs=True):
            Refused.when(before >= activation or before in parts, "a plane has terms of each earlier activation once")
            parts[before] = np.zeros(state.graph.nodes[before].size)
            parts[before][places] = numbers
        mu, nu = np.maximum(binary(bends, 2), 0.0).tolist()
        constant = plane_constant(state, source, neuron, float(function.slope[neuron]), parts, (mu, nu))
        self._counts.bounds += 1
        Refused.when(not np.isfinite(constant), "the plane has no bound")
        others = [plane for plane in state.planes.get(activation, []) if plane.neuron != neuron]
        state.planes[activation] = [*others, Plane(neuron, parts, constant)]

    def _tighten(self, node: TreeNode, given: Any) -> list[TreeNode]:
        """Take a claim about a neuron: a tree of its own proves it, then it holds in the node."""
        number, neuron, side, *end = listed(given, 5)
        state = node.state
        source, neuron = self._neuron(state, number, neuron)
        side, value = sign(side), _number(*end)
        goal = Polytope(source, [RowCondition(((neuron, Fraction(side)),), Fraction(value))])
        claim = replace(node, state=state.child(), polytopes=[goal], left={0})
        state.cut(source, neuron, side, side * value)
        state.propagate(source)
        return [node, claim]

    def _close(self, node: TreeNode, given: Any, slopes: Any, multipliers: Any) -> bool:
        """Let combinations wait to be proven."""
        state, extra = node.state.child(), dict[int, tuple[Number, Number]]()
        for activation, *hint in self._hints(state, [] if multipliers is None else multipliers, 3):
            Refused.when(activation in extra, "an activation has its multipliers once")
            extra[activation] = hint[0], hint[1]
        if slopes is not None:
            self._slopes(node, slopes, state)
        for each in listed(given):
            at = number_of(listed(each)[0] if each else None, len(node.polytopes), "polytope")
            Refused.when(at not in node.left or len(each) > 2, f"polytope {at} is not one that is left")
            node.left.discard(at)
            polytope = node.polytopes[at]
            mu = binary(each[1], len(polytope.terms)) if len(each) > 1 else np.ones(1)
            if len(mu) != len(polytope.terms) or (mu < 0).any():
                raise Refused("multipliers of rows are as many, and not negative")
            self._leaves.add(ProofLeaf(state, polytope, mu, self._records.place, node.fresh, extra))
        return not node.left

    def _split(self, node: TreeNode, given: Any) -> list[TreeNode]:
        number, neuron, *value = listed(given, 4)
        return _halves(node, self._neuron(node.state, number, neuron), _number(*value), (-1, 1))

    def _halve(self, node: TreeNode, given: Any) -> list[TreeNode]:
        at, *value = listed(given, 3)
        node.fresh = True
        node.state.slopes.clear()
        place = 0, number_of(at, node.state.graph.nodes[0].size, "input")
        return _halves(node, place, _number(*value), (1, -1))

    def _only(self, node: TreeNode, given: Any) -> list[TreeNode]:
        chosen = set(numbers_of(given, len(node.polytopes), "polytope").tolist())
        Refused.when(not chosen < node.left or not chosen, "some of the polytopes that are left are expected")
        return [replace(node, state=node.state.child(), left=left) for left in (node.left - chosen, chosen)]


def _halves(node: TreeNode, place: tuple[int, int], value: float, sides: tuple[int, int]) -> list[TreeNode]:
    children = [replace(node, state=node.state.child(), left=set(node.left)) for _ in sides]
    for child, side in zip(children, sides, strict=True):
        child.state.cut(*place, side, value)
    return children


def _number(mantissa: Any, exponent: Any) -> float:
    return float(binary([exponent, mantissa], 1)[0])


def plane_constant(
    state: State, source: int, neuron: int, slope: float, terms: dict[int, Number], bends: tuple[float, float]
) -> float:
    """Return the least c with r ≤ terms·v + c at all points of the state, but for rounding.

    Where z ≥ 0, r = z ≤ z + μ·(u − z), and where z ≤ 0, r = s·z ≤ s·z + ν·(z − l): c is the larger one of μ·u less the
    least terms·v − (1 − μ)·z, and of −ν·l less the least terms·v − (s + ν)·z.
    """
    mu, nu = bends
    low, high = (float(end[0, neuron]) for end in state.ends[source])
    rows = {number: np.stack([part, part])[None] for number, part in terms.items()}
    rows[source] = rows.get(source, np.zeros((1, 2, state.graph.nodes[source].size)))
    rows[source][0, :, neuron] -= 1 - mu, slope + nu
    off = 8 * UNIT * (1 + mu + abs(slope) + nu + np.abs(rows[source]).sum()) * max(abs(low), abs(high))
    walk = Walk(state, 1, 2)
    walk.count(0.0, off)
    for number, part in rows.items():
        walk.add(number, part)
    (found,) = walk.pull()
    both = mu * high - found[0], -nu * low - found[1]
    slack = 8 * UNIT * (abs(mu * high) + abs(nu * low) + np.abs(found).sum())
    return float(max(both) + slack)
