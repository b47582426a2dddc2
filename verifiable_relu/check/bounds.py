"""Rule 1 (docs/certificates.md): lower bounds of rows by multipliers; and interval arithmetic.

A *row* is Σ a·(values of nodes). It is pulled back through the network, node by node, from the last to the first. At
every step the row as it stands, Σ K·(values of earlier nodes) + c − loss, is at most the row that was given, at every
point of the state:

- Affine: v = W·x + b. The computed K·W is off by γ·|K|·|W| at most, entry by entry, which changes the row by no more
  than |K|·γ·|W|·m, where m are the largest |x| of the state. So each entry of v has a *charge*
  e = γ·(|W|·m + |b|) + θ·(|W|·m + |b|) + lost, and a row loses |K|·e. θ and ``lost`` are 0 but for coefficients that
  are not binary, and for what runs the network.
- Activation: r = f(z). With λ = t·K, K·r = λ·z + K·(r − t·z), whose second part is at least K times the least value of
  f(z) − t·z over the state's [l, u], and where K < 0 times the largest one. The computed λ, this product and the sum
  are off by γ·|K|·(F + |t|·m), where F is the largest |r| and m the largest |z|.
- Maximum: y ≥ x_i of any rival i; and y ≤ s·x_j + c, with 0 ≤ s ≤ 1 and c the larger one of (1 − s)·u_j and
  u_k − s·l_j for the other rivals k: where j wins, y = x_j ≤ s·x_j + (1 − s)·x_j if the last x_j is at most u_j.

γ(n) counts all products and additions that a sum is made of; what underflows is less than ``LOST``. Where the rows of
several readers of a value meet, each addition is off by u of its result, which is charged when it is done (``add``).
Whatever K is after a step, it is taken as it is: only its distance from the true product was charged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from verifiable_relu.check.errors import Refused
from verifiable_relu.check.functions import CheckedFunction, Curve, Difference
from verifiable_relu.check.graph import Activation, AffineNode, DifferenceNode, Graph, MaximumNode
from verifiable_relu.check.numbers import LARGE, LOST, OWN, TINY, UNIT, Number, apply, gamma, pulled

FEW = 16
"""Operations that are granted to every sum beyond its own."""

Ends = tuple[Number, Number]


@dataclass(eq=False)
class Plane:
    """r ≤ Σ terms·values + constant of one neuron."""

    neuron: int
    terms: dict[int, Number]
    constant: float


def _kept(method: Callable[..., Any]) -> Callable[..., Any]:
    """Keep what a state's method returns, until the state changes."""

    def found(state: State, number: int) -> Any:
        key = method.__name__, number
        if key not in state.made:
            state.made[key] = method(state, number)
        return state.made[key]

    return found


@dataclass(eq=False)
class State:
    """All that is known at a node of a tree, or at many at once. Arrays are (boxes, size), or (1, size) for all boxes.

    Attributes:
        ends: of every node between which numbers its value lies.
        slopes: of activations: slopes that records gave, NaN for none.
        planes: of activations.
        made: what was computed from all this.
    """

    graph: Graph
    ends: dict[int, Ends]
    slopes: dict[int, Ends] = field(default_factory=dict)
    planes: dict[int, list[Plane]] = field(default_factory=dict)
    made: dict[Any, Any] = field(default_factory=dict)

    def child(self) -> State:
        """Return a copy that may change."""
        copied: dict[str, Any] = {name: dict(part) for name, part in vars(self).items() if isinstance(part, dict)}
        return replace(self, **copied)

    def chosen(self, at: Any) -> State:
        """Return one of many states, or some."""
        found = replace(self.child(), made={})
        for part in (found.ends, found.slopes):
            for number, (low, high) in part.items():
                part[number] = low if len(low) == 1 else low[at], high if len(high) == 1 else high[at]
        return found

    @property
    def boxes(self) -> int:
        return max(len(end) for part in (self.ends, self.slopes) for ends in part.values() for end in ends)

    def size(self, number: int) -> Number:
        """Return the largest absolute values of a node's entries."""
        return np.asarray(np.maximum(*map(np.abs, self.ends[number])))

    def is_empty(self) -> Number:
        """Return for each box whether the ends of some value have crossed: no point is left."""
        crossed = (np.any(low > high, axis=-1) for low, high in self.ends.values())
        return np.asarray(functools.reduce(np.logical_or, crossed))

    def cut(self, number: int, entry: int, side: int, value: float) -> None:
        """Make ``value`` the lower end (side 1) or the upper one (−1) of an entry, where it is inside."""
        low, high = (end.copy() for end in self.ends[number])
        if side > 0:
            low[:, entry] = np.maximum(low[:, entry], value)
        else:
            high[:, entry] = np.minimum(high[:, entry], value)
        self.ends[number] = low, high
        self.made.clear()

    def propagate(self, after: int = 0) -> None:
        """Go on with interval arithmetic to the nodes behind ``after``, and keep the better ends.

        Raises:
            Refused: if a value is not bounded by ``LARGE``.
        """
        self.made.clear()
        for number in self.graph.order:
            if number > after:
                low, high = self.interval(number)
                if number in self.graph.whole:
                    low, high = np.ceil(low), np.floor(high)
                if number in self.ends:
                    old_low, old_high = self.ends[number]
                    # What is no number is no better end.
                    low, high = np.where(low > old_low, low, old_low), np.where(high < old_high, high, old_high)
                self.ends[number] = low, high
            Refused.when(not np.all(self.size(number) <= LARGE), "values of the network are not bounded by 2³⁰⁰")

    def interval(self, number: int) -> Ends:
        """Return numbers between which a node's values lie, if those of its sources lie between their ends."""
        node = self.graph.nodes[number]
        if isinstance(node, AffineNode):
            total, reach = node.bias[None], np.zeros((1, node.size))
            for source, matrix, absolute in zip(node.sources, node.matrices, node.absolute, strict=True):
                low, high = self.ends[source]
                centre = 0.5 * low + 0.5 * high
                # Three operations of the width are rounded.
                radius = np.maximum(high - centre, centre - low) * (1 + 8 * UNIT) + TINY
                total, reach = total + apply(matrix, centre), reach + apply(absolute, radius)
            reach = reach + self.charge(number, 2.0) * OWN + TINY
            return total - reach, total + reach
        if isinstance(node, Activation):
            return self.function(number).range(*self.ends[node.source])
        if isinstance(node, MaximumNode):
            low, high = self.ends[node.source]
            return low[:, node.rivals].max(-2), high[:, node.rivals].max(-2)
        first, second, change = (self.ends[source] for source in node.sources)
        least, most = (a + b for a, b in zip(first, change, strict=True))
        return np.maximum(second[0], np.nextafter(least, -np.inf)), np.minimum(second[1], np.nextafter(most, np.inf))

    def charge(self, number: int, times: float = 1.0) -> Number:
        """Return the charge of an affine node, with that of the checker's own rounding several times."""
        node: AffineNode = self.graph.nodes[number]
        sums, size = self.sums(number), np.abs(node.bias)
        own = gamma(node.longest + FEW) * sums + gamma(node.size + FEW) * size + LOST
        return times * own + OWN * node.relative * (sums + size) + node.lost

    @_kept
    def sums(self, number: int) -> Number:
        """Return |W|·m of an affine node."""
        node: AffineNode = self.graph.nodes[number]
        parts = zip(node.sources, node.absolute, strict=True)
        return np.asarray(sum((apply(matrix, self.size(source)) for source, matrix in parts), np.zeros((1, node.size))))

    def function(self, number: int) -> CheckedFunction:
        """Return the function of an activation; that of a pair's difference follows from the ends of both inputs."""
        node = self.graph.nodes[number]
        if type(node.function) is not CheckedFunction:
            return node.function
        both = [self.graph.nodes[one] for one in self.graph.nodes[number + 1].sources[:2]]
        (low, high), (other_low, other_high) = ends = [self.ends[activation.source] for activation in both]
        gaps = [_gap(activation.function, *end) for activation, end in zip(both, ends, strict=True)]
        least = np.where(np.minimum(low, other_low) >= 0, 1.0, 0.0)
        return Difference(least, np.where(np.maximum(high, other_high) <= 0, 0.0, 1.0), gaps[1], gaps[0])

    @_kept
    def lines(self, number: int) -> tuple[Number, Number, Number]:
        """Return slopes t of an activation's neurons where K ≥ 0 and where K < 0, (boxes, 1, size), and columns.

        These are the least f − t·z for the first t, the largest one for the second, and what to charge for |K|.
        """
        node, function = self.graph.nodes[number], self.function(number)
        low, high = self.ends[node.source]
        slopes = function.slopes(low, high)
        if number in self.slopes:
            free, pairs = function.is_open(low, high), zip(self.slopes[number], slopes, strict=True)
            slopes = tuple(np.where(free & ~np.isnan(given), given, own) for given, own in pairs)  # type: ignore
        up, down = slopes
        steepest = np.maximum(np.abs(up), np.abs(down))
        charge = gamma(node.size + FEW) * (self.size(number) + steepest * self.size(node.source)) + LOST
        columns = np.broadcast_arrays(function.least(up, low, high), function.most(down, low, high), charge)
        return up[:, None], down[:, None], np.stack(columns, -1)

    @_kept
    def rivals(self, number: int) -> tuple[Number, ...]:
        """Return of a maximum's windows the rival below, the one above, its slope, the constant, and the charge."""
        node: MaximumNode = self.graph.nodes[number]
        low, high = (end[:, node.rivals] for end in self.ends[node.source])
        below, above = low.argmax(1), high.argmax(1)
        under, rival = (node.rivals[which, np.arange(node.size)] for which in (below, above))
        least, most = (np.take_along_axis(end, above[:, None], 1)[:, 0] for end in (low, high))
        # A rival that stands in several places is one; a bound of the others that is too high is a bound.
        best = np.where(node.rivals != rival[:, None], high, -LARGE).max(1)
        slope = np.clip((most - np.maximum(least, best)) / np.where(most > least, most - least, 1.0), 0.0, 1.0)
        constant = np.maximum((1 - slope) * most, best - slope * least)
        charge = gamma(node.rivals.size + FEW) * 4 * self.size(node.source)[:, node.rivals].max(1) + LOST
        return under, rival, slope, constant, charge


def _gap(function: CheckedFunction, low: Number, high: Number) -> Number:
    """Return how far a function is below ReLU at most, over [low, high]: |z|·Φ(−λ|z|), the same for z and −z."""
    if not isinstance(function, Curve):
        return np.zeros(np.shape(low))
    least, most = np.maximum(np.maximum(low, -high), 0.0), np.maximum(-low, high)
    # At −|z| a λ-GELU is −|z|·Φ(−λ|z|), and ReLU is 0.
    return np.asarray(-function.lower.least(np.zeros_like(low), -most, -least))


def root(graph: Graph, low: Number, high: Number) -> State:
    """Return what interval arithmetic knows over a box, or over many."""
    state = State(graph, {0: (np.atleast_2d(low), np.atleast_2d(high))})
    state.propagate()
    return state


def stacked(states: Sequence[State]) -> State:
    """Return many states of one graph as one; arrays that are the same in all of them stay (1, size)."""
    if len(states) == 1:
        return states[0]
    found = replace(states[0].child(), made={})
    for name in ("ends", "slopes"):
        parts = [getattr(state, name) for state in states]
        for number in set().union(*parts):
            none = np.full((1, found.graph.nodes[number].size), np.nan)
            ends = [part.get(number, (none, none)) for part in parts]
            same = all(each is ends[0] for each in ends)
            getattr(found, name)[number] = ends[0] if same else tuple(map(np.concatenate, zip(*ends, strict=True)))
    return found


class Walk:
    """Rows on their way back to the input: coefficients by node, (boxes, rows, size); of one box for one state.

    ``constant`` and ``loss`` are (boxes, rows). Rows are added first, then pulled.
    """

    def __init__(self, state: State, boxes: int, rows: int) -> None:
        self.state, self.rows = state, dict[int, Number]()
        self.constant = self.loss = np.zeros((boxes, rows))

    def add(self, number: int, rows: Number) -> None:
        known = self.rows.get(number)
        self.rows[number] = found = rows if known is None else known + rows
        if known is not None:
            self.loss = self.loss + gamma(1) * _dot(np.abs(found), self.state.size(number))

    def count(self, sums: Any, lost: Any) -> None:
        self.constant = self.constant + sums
        self.loss = self.loss + lost + gamma(1) * np.abs(self.constant)

    def pull(self, alone: bool = False) -> Number:
        """Pull all rows back, and return their lower bounds over the state's box.

        Args:
            alone: whether no activation of a pair is replaced by the first network's.
        """
        for number in reversed(self.state.graph.order[1:]):
            if (found := self.rows.pop(number, None)) is not None:
                self._step(number, found, alone)
        low, high = (end[:, None] for end in self.state.ends[0])
        self.inputs = self.rows.pop(0, np.zeros((*self.constant.shape, low.shape[-1])))
        found = self.constant + np.minimum(self.inputs * low, self.inputs * high).sum(-1)
        loss = self.loss + gamma(low.shape[-1] + FEW) * (np.abs(self.inputs) * self.state.size(0)[:, None]).sum(-1)
        found = found - (loss + gamma(2) * np.abs(found)) * OWN - TINY
        # What overflowed on the way is an infinity, or no number.
        return np.where(np.isfinite(found), found, -np.inf)

    def _step(self, number: int, rows: Number, alone: bool) -> None:
        node = self.state.graph.nodes[number]
        if isinstance(node, AffineNode):
            self.count(_dot(rows, node.bias[None]), _dot(np.abs(rows), self.state.charge(number)))
            flat = rows.reshape(-1, rows.shape[-1])
            for source, matrix in node.terms:
                self.add(source, pulled(flat, matrix).reshape(*rows.shape[:2], -1))
        elif isinstance(node, Activation):
            up, down, columns = self.state.lines(number)
            if number in self.state.planes:
                rows = self._planes(number, node, rows)
            above, below = np.maximum(rows, 0), np.minimum(rows, 0)
            columns = columns[0] if len(columns) == 1 else columns
            lower, upper = above @ columns, below @ columns
            self.count(lower[..., 0] + upper[..., 1], lower[..., 2] - upper[..., 2])
            self.add(node.source, above * up + below * down)
        elif isinstance(node, MaximumNode):
            self._maximum(number, node, rows)
        else:
            first, second, change = node.sources
            for source in (second,) if alone else (first, change):
                self.add(source, rows)

    def _planes(self, number: int, node: Activation, rows: Number) -> Number:
        """Replace neurons with planes where K < 0, and return what is left."""
        rows, planes = rows.copy(), self.state.planes[number]
        low, high = (end[:, None] for end in self.state.ends[node.source])
        # Sums of as many terms as there are planes, each with its product, and of what is added later.
        part = gamma(2 * len(planes) + FEW)
        for plane in planes:
            j = plane.neuron
            k = np.where((low[..., j] < 0) & (high[..., j] > 0), np.minimum(rows[..., j], 0), 0.0)
            rows[..., j] = rows[..., j] - k
            lost: Any = abs(plane.constant)
            for source, terms in plane.terms.items():
                self.add(source, k[..., None] * terms)
                lost = lost + (self.state.size(source) * np.abs(terms)).sum(-1)[:, None]
            self.count(k * plane.constant, part * np.abs(k) * lost)
        return rows

    def _maximum(self, number: int, node: MaximumNode, rows: Number) -> None:
        under, over, slope, constant, charge = self.state.rivals(number)
        below, above = np.maximum(rows, 0), np.minimum(rows, 0)
        self.count(_dot(above, constant), _dot(np.abs(rows), charge))
        size = self.state.graph.nodes[node.source].size
        found = np.zeros((rows.size // node.size, size), rows.dtype)
        place = np.arange(len(found))[:, None]
        for part, entries in ((below, under), (above * slope[:, None], over)):
            wide = np.broadcast_to(entries[:, None], rows.shape)
            np.add.at(found, (place, wide.reshape(len(found), -1)), part.reshape(len(found), -1))
        self.add(node.source, found.reshape(*rows.shape[:2], size))


def _dot(rows: Number, values: Number) -> Number:
    return np.asarray(rows @ values[0] if len(values) == 1 else (rows @ values[..., None])[..., 0])


def lower_of(state: State, number: int, entries: Number, sides: Number) -> Number:
    """Return lower bounds of sides·entries of a node's value, all (boxes, rows)."""
    graph = state.graph
    rows = np.zeros((*entries.shape, graph.nodes[number].size))
    np.put_along_axis(rows, entries[..., None], np.broadcast_to(sides, entries.shape)[..., None], -1)
    differs = any(isinstance(n, DifferenceNode) and graph.nodes[n.sources[2]].source == number for n in graph.nodes)
    walk = Walk(state, *entries.shape)
    walk.add(number, rows)
    return walk.pull(alone=graph.second is not None and number >= graph.second and not differs)
