"""Certificates of *unsat*: trees of records in preorder, each node with what is known there (docs/certificates.md).

Polytopes are excluded by leaves, many at once (rule 3 by rule 1).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np

from verifiable_relu.check.bounds import Ends, Plane, State, Walk, lower_of, root, stacked
from verifiable_relu.check.errors import BadInput, Refused
from verifiable_relu.check.functions import Function, Kinked
from verifiable_relu.check.graph import Activation, Graph, Maximum
from verifiable_relu.check.numbers import EXACT, FLOAT, TINY, UNIT, Arithmetic, Number, outward
from verifiable_relu.check.properties import Disjunct, Row
from verifiable_relu.check.records import Records, binary, listed, number_of, numbers_of, rational, sign

TOGETHER, ROOM = 1 << 10, 1 << 23
"""Most leaves that wait to be proven at once, and most numbers of their states."""

CHUNK = 1 << 18
"""Most coefficients of rows that are pulled back at once."""

HALVINGS, ALL_HALVINGS = 10, 1 << 16
"""How often a checker halves the box of an automatic leaf, in a row, and boxes in one certificate, at most."""

DEEPEST, WAITING = 1024, 1 << 24
"""Most halves of splits that wait; and most numbers of what waits there, of boxes and of neurons."""

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


@dataclass
class Counts:
    """How much was proven."""

    bounds: int = 0
    leaves: int = 0
    boxes: int = 0
    exact: int = 0
    halvings: int = 0


@dataclass(eq=False)
class Polytope:
    """Rows g = Σ c·v − most of the entries v of a node; at each of its points all are ≤ 0."""

    node: int
    rows: list[Row]
    size: int

    def combined(self, mu: Number, size: Number, by: Arithmetic) -> tuple[Number, Number, Number]:
        """Return the coefficients of Σ μ·g, its constant, and what rounding may change it by where |v| ≤ ``size``.

        In float64 a coefficient is rounded, multiplied, and added up: n + 2 roundings of n products.
        """
        found, sizes, constant, lost = by.of(np.zeros(self.size)), np.zeros(self.size), by.of(np.zeros(1))[0], 0.0
        for factor, row in zip(by.of(mu), self.rows, strict=True):
            for at, value in row.y:
                found[at] += factor * (value if by.exact else float(value))
                sizes[at] += abs(float(factor) * float(value))
            constant -= factor * (row.most if by.exact else float(row.most))
            lost += abs(float(factor) * float(row.most))
        off = by.gamma(len(mu) + 3) * (sizes @ size + lost) + TINY
        return found, np.array(constant), np.array(Fraction(0) if by.exact else off)


@dataclass(eq=False)
class Leaf:
    """A polytope that is to be excluded from a state.

    Attributes:
        mu: multipliers of the polytope's rows.
        place: the record that says so.
        stale: whether the box has changed since interval arithmetic went through it.
        automatic: whether the activations are bounded before.
        extra: multipliers of neurons, by activation: neurons and numbers.
        pieces: boxes (lower, upper) that are to be covered in the place of the state's own.
        halvings: how often the box of an automatic leaf was halved.
    """

    state: State
    polytope: Polytope
    mu: Number
    place: str
    stale: bool = False
    automatic: bool = False
    extra: dict[int, tuple[Number, Number]] = field(default_factory=dict)
    pieces: Sequence[Ends] = ()
    halvings: int = 0

    @property
    def kind(self) -> tuple[Any, ...]:
        """Leaves of one kind are proven at once."""
        planes = tuple((number, id(value)) for number, value in self.state.planes.items())
        return id(self.state.graph), self.polytope.node, self.stale, self.automatic, self.state.rounds, planes


class Leaves:
    """Leaves that wait, and are proven together."""

    def __init__(self, counts: Counts) -> None:
        self._waiting: list[Leaf] = []
        self._counts = counts

    def add(self, leaf: Leaf) -> None:
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
            kinds: dict[tuple[Any, ...], list[Leaf]] = defaultdict(list)
            for leaf in self._waiting:
                kinds[leaf.kind].append(leaf)
            self._waiting = []
            for leaves in kinds.values():
                self._prove(leaves)

    def _prove(self, leaves: list[Leaf]) -> None:
        states = {id(leaf.state): leaf.state for leaf in leaves}
        state, first, counts = stacked(list(states.values())), leaves[0], self._counts
        if first.stale or first.automatic:
            state = state.child()
            state.propagate()
        if first.automatic:
            counts.boxes += len(states)
            for number in sorted(state.graph.needed(first.polytope.node, state.rounds)):
                if isinstance(state.graph.nodes[number], Activation | Maximum):
                    counts.bounds += tighten(state, number)
        if 1 < len(states) < len(leaves):
            numbers = {key: number for number, key in enumerate(states)}
            state = state.chosen(np.array([numbers[id(leaf.state)] for leaf in leaves]))
        low, slack, walk = proven(state, leaves)
        empty = np.broadcast_to(state.is_empty(), len(leaves))
        for number in np.flatnonzero(~((low > 0) | empty)).tolist():
            leaf = leaves[number]
            if low[number] + slack[number] > 0 and state.graph.is_exact:
                counts.exact += 1
                if proven(state.chosen([number]), [leaf], EXACT)[0][0] > 0:
                    continue
            halved = leaf.automatic and not leaf.pieces and leaf.halvings < HALVINGS
            if not halved or counts.halvings >= ALL_HALVINGS:
                raise Refused(f"{leaf.place}: the sum is not proven to be positive ({low[number]:.3g})")
            self._halve(leaf, walk.inputs.reshape(len(leaves), -1)[number])
        counts.leaves += len(leaves)

    def _halve(self, leaf: Leaf, row: Number) -> None:
        """Let both halves of a leaf's box wait: it is cut where the row varies most."""
        self._counts.halvings += 1
        (low,), (high,) = leaf.state.ends[0]
        at = int((np.abs(row) * (high - low)).argmax())
        for side in (1, -1):
            state = leaf.state.child()
            state.cut(0, at, side, float(low[at] / 2 + high[at] / 2))
            self._waiting.append(replace(leaf, state=state, stale=True, halvings=leaf.halvings + 1))


def proven(state: State, leaves: list[Leaf], by: Arithmetic = FLOAT) -> tuple[Number, Number, Walk]:
    """Return the least value of each leaf's combination, how much larger it may be, and the rows at the input.

    Leaves are of one state, or each has one.
    """
    polytope = leaves[0].polytope
    sizes = np.broadcast_to(state.size(polytope.node), (len(leaves), polytope.size))
    sums = [leaf.polytope.combined(leaf.mu, size, by) for leaf, size in zip(leaves, sizes, strict=True)]
    # Rows of one state, or a row of each state.
    axis = 0 if state.boxes == 1 else 1
    rows, constant, loss = (np.expand_dims(np.stack(each), axis) for each in zip(*sums, strict=True))
    parts: dict[int, list[tuple[Number, Number, Number]]] = defaultdict(list)
    for row, leaf in enumerate(leaves):
        for number, (neurons, given) in leaf.extra.items():
            parts[number].append((np.full(len(neurons), row), neurons, given))
    extra: Any = {number: tuple(map(np.concatenate, zip(*each, strict=True))) for number, each in parts.items()}
    walk = Walk(state, by, {polytope.node: rows}, constant, loss, extra)
    low, slack = (each.ravel() for each in walk.lower())
    for pieces in {id(leaf.pieces): leaf.pieces for leaf in leaves if leaf.pieces}.values():
        found = [[each.ravel() for each in walk.lower(piece)] for piece in pieces]
        for i, leaf in enumerate(leaves):
            if leaf.pieces is pieces:
                low[i], slack[i] = min((each[0][i], each[1][i]) for each in found)
    return low, slack, walk


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
        # Where a box has fewer, others stand in their place, of which nothing is taken.
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
        stale: whether interval arithmetic has not gone through the box yet.
        bounded: whether activations were bounded over this box.
    """

    state: State
    polytopes: list[Polytope]
    left: set[int]
    stale: bool = False
    bounded: bool = False

    def current(self) -> State:
        """Return the state, with interval arithmetic gone through its box."""
        if self.stale:
            self.state.propagate()
        self.stale = False
        return self.state


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
        box = number_of(part["box"], len(boxes), "box of the property")
        polytopes = [self._rows(rows) for rows in listed(part["polytopes"])]
        Refused.when(not polytopes, "a part has polytopes")
        graph = self.graph.asked(self.heads and all(row.compares for rows in polytopes for row in rows))
        size = graph.nodes[0].size
        low = np.array([outward(value, -np.inf) for value in boxes[box][:size]])
        state = root(graph, low, np.array([outward(value, np.inf) for value in boxes[box][size:]]))
        self.require(state)
        goals = [Polytope(graph.output, rows, graph.nodes[graph.output].size) for rows in polytopes]
        _Tree(self.records, self.counts, automatic is not None).check(TreeNode(state, goals, set(range(len(goals)))))
        return box, polytopes

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
    """The trees of a part. Methods of the names in ``KINDS`` take a record.

    They return True if it ends the node, and the nodes that follow, the last one first in the certificate.
    """

    def __init__(self, records: Records, counts: Counts, automatic: bool) -> None:
        self._records, self._counts, self._automatic = records, counts, automatic
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

    def _activation(self, state: State, number: Any, kind: Any = Activation | Maximum) -> int:
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
        node.bounded = True

    def _maximum(self, node: TreeNode, number: Any, rounds: Any) -> None:
        Refused.when(rounds is not True, "a maximum is bounded by its rounds, or no record speaks of it")
        node.state.rounds |= {self._activation(node.state, number, Maximum)}

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
        goal = Polytope(source, [Row(((neuron, Fraction(side)),), Fraction(value))], state.graph.nodes[source].size)
        claim = replace(node, state=state.child(), polytopes=[goal], left={0})
        state.cut(source, neuron, side, side * value)
        state.propagate(source)
        return [node, claim]

    def _wait(self, node: TreeNode, given: Any, slopes: Any, multipliers: Any, pieces: Sequence[Ends] = ()) -> set[int]:
        """Let combinations wait to be proven; return the numbers of their polytopes."""
        state, extra, closed = node.state.child(), self._extra(node.state, multipliers), set[int]()
        if slopes is not None:
            self._slopes(node, slopes, state)
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
        found: dict[int, Any] = {}
        for activation, *hint in self._hints(state, [] if given is None else given, 3):
            once = activation not in found and type(state.graph.nodes[activation].function) is not Function
            Refused.when(not once, "an activation other than a difference has its multipliers once")
            found[activation] = tuple(hint)
        return found

    def _close(self, node: TreeNode, given: Any, slopes: Any, multipliers: Any) -> bool:
        node.left -= self._wait(node, given, slopes, multipliers)
        return not node.left

    def _clip(self, node: TreeNode, given: Any, ends: Any, slopes: Any, multipliers: Any) -> None:
        kept, pieces = node.state.child(), list[Ends]()
        for each in listed(ends):
            at, side, *value = listed(each, 4)
            at, side, end = number_of(at, node.state.graph.nodes[0].size, "input"), sign(side), _number(*value)
            # What is cut off lies beyond the new end, which is the other end of what is kept.
            off = kept.child()
            off.cut(0, at, side, end)
            kept.cut(0, at, -side, end)
            if np.all(off.ends[0][0] <= off.ends[0][1]):
                pieces.append(off.ends[0])
        if pieces and self._wait(node, given, slopes, multipliers, pieces) != node.left:
            raise Refused("every polytope that is left is to be excluded from what is clipped")
        node.state, node.stale, node.bounded = kept, True, False

    def _split(self, node: TreeNode, given: Any) -> list[TreeNode]:
        number, neuron, *value = listed(given, 4)
        return self._halves(node, self._neuron(node.state, number, neuron), _number(*value), (-1, 1))

    def _halve(self, node: TreeNode, given: Any) -> list[TreeNode]:
        at, *value = listed(given, 3)
        node.stale, node.bounded = True, False
        place = 0, number_of(at, node.state.graph.nodes[0].size, "input")
        return self._halves(node, place, _number(*value), (1, -1))

    def _halves(self, node: TreeNode, place: tuple[int, int], value: float, sides: tuple[int, int]) -> list[TreeNode]:
        children = [replace(node, state=node.state.child(), left=set(node.left)) for _ in sides]
        for child, side in zip(children, sides, strict=True):
            child.state.cut(*place, side, value)
        return children

    def _only(self, node: TreeNode, given: Any) -> list[TreeNode]:
        chosen = set(numbers_of(given, len(node.polytopes), "polytope").tolist())
        Refused.when(not chosen < node.left or not chosen, "some of the polytopes that are left are expected")
        return [replace(node, state=node.state.child(), left=left) for left in (node.left - chosen, chosen)]


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
    found = Walk(state, FLOAT, rows, np.zeros((1, 2)), np.full((1, 2), off)).lower()[0][0]
    both = mu * high - found[0], -nu * low - found[1]
    slack = 8 * UNIT * (abs(mu * high) + abs(nu * low) + np.abs(found).sum())
    return float(max(both) + slack)
