"""Polytopes that are to be excluded, and leaves that exclude them, many at once (rule 3 by rule 1)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np

from verifiable_relu.check.bounds import State, Walk, chosen, lower_of, stacked
from verifiable_relu.check.errors import Refused
from verifiable_relu.check.graph import Activation, Maximum
from verifiable_relu.check.numbers import EXACT, FLOAT, TINY, Float64, Number, gamma
from verifiable_relu.check.properties import Row

TOGETHER, ROOM = 1 << 10, 1 << 23
"""Most leaves that wait to be proven at once, and most numbers of their states."""

CHUNK = 1 << 18
"""Most coefficients of rows that are pulled back at once."""

HALVINGS = 10
"""How often a checker halves the box of an automatic leaf, at most."""

WORK = 1 << 24
"""Exact arithmetic is tried for networks of at most so many coefficients."""


@dataclass
class Counts:
    """How much was proven."""

    bounds: int = 0
    leaves: int = 0
    boxes: int = 0
    exact: int = 0


@dataclass(eq=False)
class Polytope:
    """Rows g = Σ c·v − most of the entries v of a node; at each of its points all are ≤ 0."""

    node: int
    rows: list[Row]
    size: int

    def combined(self, mu: Number, size: Number, by: Float64) -> tuple[Number, Number, Number]:
        """The coefficients of Σ μ·g, its constant, and what rounding may change it by where |v| ≤ ``size``.

        In float64 a coefficient is rounded, multiplied, and added up: n + 2 roundings of n products.
        """
        found, sizes, constant, lost = by.of(np.zeros(self.size)), np.zeros(self.size), by.of(np.zeros(1))[0], 0.0
        for factor, row in zip(by.of(mu), self.rows, strict=True):
            for at, value in row.y:
                found[at] += factor * (value if by.exact else float(value))
                sizes[at] += abs(float(factor) * float(value))
            constant -= factor * (row.most if by.exact else float(row.most))
            lost += abs(float(factor) * float(row.most))
        off = gamma(len(mu) + 3) * (sizes @ size + lost) + TINY
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
    pieces: Sequence[tuple[Number, Number]] = ()
    halvings: int = 0

    @property
    def kind(self) -> tuple[Any, ...]:
        """Leaves of one kind are proven at once."""
        state = self.state
        planes = tuple((number, id(value)) for number, value in state.planes.items())
        return id(state.graph), self.polytope.node, self.stale, self.automatic, state.rounds, planes


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
        places = {id(leaf.state): leaf.state for leaf in leaves}
        state, first = stacked(list(places.values())), leaves[0]
        if first.stale or first.automatic:
            state = state.child()
            state.propagate()
        if first.automatic:
            self._counts.boxes += len(places)
            self._counts.bounds += sum(tighten(state, number) for number in used(state, first.polytope.node))
        if 1 < len(places) < len(leaves):
            numbers = {key: number for number, key in enumerate(places)}
            state = chosen(state, np.array([numbers[id(leaf.state)] for leaf in leaves]))
        low, slack, walk = proven(state, leaves)
        empty = np.broadcast_to(state.is_empty(), len(leaves))
        for number in np.flatnonzero(~((low > 0) | empty)).tolist():
            if not (low[number] + slack[number] > 0 and self._exactly(state, leaves[number], number)):
                if first.automatic and not leaves[number].pieces and leaves[number].halvings < HALVINGS:
                    self._halve(leaves[number], walk.inputs.reshape(len(leaves), -1)[number])
                    continue
                raise Refused(f"{leaves[number].place}: the sum is not proven to be positive ({low[number]:.3g})")
        self._counts.leaves += len(leaves)

    def _halve(self, leaf: Leaf, row: Number) -> None:
        """Let both halves of a leaf's box wait: it is cut where the row varies most."""
        low, high = leaf.state.ends[0]
        at = int((np.abs(row) * (high - low)).argmax())
        for side in (1, -1):
            state = leaf.state.child()
            state.cut(0, at, side, float(low[at] / 2 + high[at] / 2))
            self._waiting.append(replace(leaf, state=state, stale=True, halvings=leaf.halvings + 1))

    def _exactly(self, state: State, leaf: Leaf, number: int) -> bool:
        if not state.graph.exact or state.graph.work > WORK:
            return False
        self._counts.exact += 1
        low, *_ = proven(state if state.is_single else chosen(state, number), [leaf], EXACT)
        return bool(low[0] > 0)


def proven(state: State, leaves: list[Leaf], by: Float64 = FLOAT) -> tuple[Number, Number, Walk]:
    """The least value of each leaf's combination, how much larger it may be, and the rows at the input.

    Leaves are of one state, or each has one.
    """
    polytope = leaves[0].polytope
    sizes = np.broadcast_to(state.size(polytope.node), (len(leaves), polytope.size))
    sums = [leaf.polytope.combined(leaf.mu, size, by) for leaf, size in zip(leaves, sizes, strict=True)]
    # Rows of one state, or a row of each state.
    axis = 0 if state.is_single else 1
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


def used(state: State, node: int) -> list[int]:
    """The activations that rows of a node pass, in order."""
    found, waiting = set(), [node]
    while waiting:
        if (number := waiting.pop()) in found:
            continue
        found.add(number)
        at: Any = state.graph.nodes[number]
        if isinstance(at, Maximum):
            waiting.append(at.rounds if number in state.rounds else at.source)
        else:
            waiting.extend(at.sources)
    return [number for number in sorted(found) if isinstance(state.graph.nodes[number], Activation | Maximum)]


def tighten(state: State, number: int, rows: tuple[Number, Number] | None = None) -> int:
    """Bound the neurons of an activation by rule 1; return how many rows that took.

    Args:
        state: is changed.
        number: the activation's node.
        rows: neurons and sides; None for both sides of all that are open.
    """
    node: Any = state.graph.nodes[number]
    # Ends that all boxes share are each box's.
    boxes = max(len(end) if end.ndim > 1 else 1 for ends in state.ends.values() for end in ends)
    size = state.graph.nodes[node.source].size
    low, high = (np.broadcast_to(end, (boxes, size)).copy() for end in state.ends[node.source])
    if rows is None:
        free = np.broadcast_to(_open(state, number, node), (boxes, size))
        # Where a box has fewer, others stand in their place, of which nothing is taken.
        neurons = np.argsort(~free, axis=1, kind="stable")[:, : int(free.sum(1).max(initial=0))]
        sides = np.repeat([[1, -1]], neurons.shape[1], 1)
        neurons = np.tile(neurons, 2)
        valid = np.take_along_axis(free, neurons, 1)
    else:
        neurons, sides = np.atleast_2d(rows[0]), np.atleast_2d(rows[1])
        valid = np.ones(neurons.shape, bool)
    # Rows of one state are taken in parts, or all rows of some states.
    single, step = state.is_single, CHUNK // max(state.graph.widest, 64)
    step = max(1, step // (1 if single else max(1, neurons.shape[1])))
    for start in range(0, neurons.shape[1] if single else len(neurons) * bool(neurons.size), step):
        part: Any = (slice(None), slice(start, start + step)) if single else slice(start, start + step)
        side = sides[:, part[1]] if single else sides
        found = lower_of(state if single else chosen(state, part), node.source, neurons[part], side)
        found = np.where(np.isfinite(found) & valid[part], found, -np.inf)
        at = np.arange(boxes)[:, None][slice(None) if single else part]
        np.maximum.at(low, (at, neurons[part]), np.where(side > 0, found, -np.inf))
        np.minimum.at(high, (at, neurons[part]), np.where(side > 0, np.inf, -found))
    if neurons.size:
        state.ends[node.source] = (low[0], high[0]) if single else (low, high)
        state.propagate(node.source)
    return neurons.size


def _open(state: State, number: int, node: Any) -> Number:
    """Which entries of an activation's input may matter: of a maximum, the rivals that more than one may win."""
    low, high = state.ends[node.source]
    if isinstance(node, Activation):
        return state.function(number).is_open(low, high)
    alive = high[..., node.rivals] > low[..., node.rivals].max(-2)[..., None, :]
    alive &= (alive.sum(-2) > 1)[..., None, :]
    found = np.zeros(np.atleast_2d(low).shape, bool)
    for entries, live in zip(node.rivals, np.moveaxis(alive, -2, 0), strict=True):
        np.logical_or.at(found, (np.arange(len(found))[:, None], entries), np.atleast_2d(live))
    return found
