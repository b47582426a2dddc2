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
  are off by γ·|K|·(F + |t|·m), where F is the largest |r| and m the largest |z|. Where a multiplier is added to λ, the
  term is K·(f(z) − (λ/K)·z).
- Maximum: y ≥ x_i of any rival i; and y ≤ s·x_j + c, with 0 ≤ s ≤ 1 and c the larger one of (1 − s)·u_j and
  u_k − s·l_j for the other rivals k: where j wins, y = x_j ≤ s·x_j + (1 − s)·x_j if the last x_j is at most u_j.

γ(n) counts all products and additions that a sum is made of. Where the rows of several readers of a value meet, each
addition is off by u of its result, which is charged when it is done (``_add``). In rational arithmetic γ is 0. Whatever
K is after a step, it is taken as it is: only its distance from the true product was charged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from verifiable_relu.check.errors import Refused
from verifiable_relu.check.functions import Curve, Difference, Function
from verifiable_relu.check.graph import Activation, Affine, Beside, Graph, Input, Maximum
from verifiable_relu.check.numbers import FLOAT, LARGE, OWN, TINY, UNIT, Float64, Number, apply, gamma

FEW = 16
"""Operations that are granted to every sum beyond its own."""

Ends = tuple[Number, Number]

Multipliers = Mapping[int, tuple[Number, Number, Number]]
"""By the activation's node: rows, neurons, and numbers that are added to λ; no row has a neuron twice."""


@dataclass(eq=False)
class Plane:
    """r ≤ Σ terms·values + constant of one neuron."""

    neuron: int
    terms: dict[int, Number]
    constant: float


@dataclass(eq=False)
class Lines:
    """Slopes t of an activation's neurons where K ≥ 0 and where K < 0, (size,) or (boxes, 1, size).

    ``columns``: the least f − t·z for the first t, the largest one for the second, and what to charge for |K|.
    """

    t: Ends
    columns: Number


@dataclass(eq=False)
class Rivals:
    """Of a maximum's windows: the rival below; the one above, its slope and the constant, and its charge."""

    below: Number
    above: Number
    slope: Number
    constant: Number
    charge: Number


@dataclass(eq=False)
class State:
    """All that is known at a node of a tree. Arrays are (size,), or (boxes, size) for many states at once.

    Attributes:
        ends: of every node between which numbers its value lies.
        slopes: of activations: slopes that records gave, NaN for none.
        rounds: the maxima whose rounds rows go through.
        planes: of activations.
        made: what was computed from all this.
    """

    graph: Graph
    ends: dict[int, Ends]
    slopes: dict[int, Ends] = field(default_factory=dict)
    rounds: frozenset[int] = frozenset()
    planes: dict[int, list[Plane]] = field(default_factory=dict)
    made: dict[Any, Any] = field(default_factory=dict)

    def child(self) -> State:
        """A copy that may change."""
        copied: dict[str, Any] = {name: dict(part) for name, part in vars(self).items() if isinstance(part, dict)}
        return replace(self, **copied)

    @property
    def is_single(self) -> bool:
        return all(low.ndim == 1 for part in (self.ends, self.slopes) for low, _ in part.values())

    def size(self, number: int) -> Number:
        """The largest absolute values of a node's entries."""
        return np.asarray(np.maximum(*map(np.abs, self.ends[number])))

    def is_empty(self) -> Number:
        """Whether the ends of some value have crossed: no point is left. () or (boxes,)."""
        crossed = (np.any(low > high, axis=-1) for low, high in self.ends.values())
        return np.asarray(functools.reduce(np.logical_or, crossed))

    def cut(self, number: int, entry: int, side: int, value: float) -> None:
        """Make ``value`` the lower end (side 1) or the upper one (−1) of an entry, where it is inside."""
        low, high = (end.copy() for end in self.ends[number])
        if side > 0:
            low[entry] = max(low[entry], value)
        else:
            high[entry] = min(high[entry], value)
        self.ends[number] = low, high
        self.made.clear()

    def propagate(self, after: int = -1) -> None:
        """Go on with interval arithmetic to the nodes behind ``after``, and keep the better ends.

        Raises:
            Refused: if a value is not bounded by ``LARGE``.
        """
        self.made.clear()
        for number in self.graph.order:
            if number > after and not isinstance(self.graph.nodes[number], Input):
                low, high = self._interval(number)
                if number in self.ends:
                    old_low, old_high = self.ends[number]
                    # What is no number is no better end.
                    low, high = np.where(low > old_low, low, old_low), np.where(high < old_high, high, old_high)
                self.ends[number] = low, high
            Refused.when(not np.all(self.size(number) <= LARGE), "values of the network are not bounded by 2³⁰⁰")

    def _interval(self, number: int) -> Ends:
        node: Any = self.graph.nodes[number]
        if isinstance(node, Affine):
            return self._affine(number, node)
        if isinstance(node, Activation):
            return self.function(number).range(*self.ends[node.source])
        if isinstance(node, Maximum):
            low, high = (end[..., node.rivals].max(-2) for end in self.ends[node.source])
            other = self.ends[node.rounds]
            return np.maximum(low, other[0]), np.minimum(high, other[1])
        low, high = self.ends[node.second]
        least, most = (a + b for a, b in zip(self.ends[node.first], self.ends[node.change], strict=True))
        return np.maximum(low, np.nextafter(least, -np.inf)), np.minimum(high, np.nextafter(most, np.inf))

    def _affine(self, number: int, node: Affine) -> Ends:
        total, reach = node.bias, np.zeros(node.size)
        for (source, matrix), absolute in zip(node.terms, node.absolute, strict=True):
            low, high = self.ends[source]
            centre = 0.5 * low + 0.5 * high
            # Three operations of the width are rounded.
            radius = np.maximum(high - centre, centre - low) * (1 + 8 * UNIT) + TINY
            total, reach = total + apply(matrix, centre), reach + apply(absolute, radius)
        own, off = self.charge(number)
        reach = reach + (2 * own + off) * OWN + TINY
        return total - reach, total + reach

    def charge(self, number: int) -> Ends:
        """Of an affine node, the charge of the checker's own rounding, and the rest of its charge."""
        node: Any = self.graph.nodes[number]

        def made() -> Ends:
            sums, size = self.sums(node), np.abs(node.bias)
            own = gamma(node.longest + FEW) * sums + gamma(node.size + FEW) * size
            return own, OWN * node.relative * (sums + size) + node.lost

        return self._kept(number, made)

    def sums(self, node: Affine) -> Number:
        """|W|·m of an affine node."""
        parts = zip(node.sources, node.absolute, strict=True)
        return np.asarray(sum((apply(matrix, self.size(source)) for source, matrix in parts), np.zeros(node.size)))

    def _kept(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]

    def function(self, number: int) -> Function:
        """The function of an activation; that of a pair's difference follows from the ends of both inputs."""
        node: Any = self.graph.nodes[number]
        if type(node.function) is not Function:
            return node.function
        beside: Any = self.graph.nodes[number + 1]
        both = [self.graph.nodes[one] for one in (beside.first, beside.second)]
        ends = [self.ends[activation.source] for activation in both]
        gaps = [_gap(activation.function, *end) for activation, end in zip(both, ends, strict=True)]
        active = np.minimum(ends[0][0], ends[1][0]) >= 0
        inactive = np.maximum(ends[0][1], ends[1][1]) <= 0
        return Difference(np.where(active, 1.0, 0.0), np.where(inactive, 0.0, 1.0), gaps[1], gaps[0])

    def lines(self, number: int, by: Float64) -> Lines:
        """The lines of an activation."""
        return self._kept((number, by.exact), lambda: self._lines(number, by))

    def _lines(self, number: int, by: Float64) -> Lines:
        node: Any = self.graph.nodes[number]
        function, (low, high) = self.function(number), self.ends[node.source]
        lower, upper = function.slopes(low, high)
        if number in self.slopes:
            free = function.is_open(low, high)
            lower, upper = (
                np.where(free & ~np.isnan(given), given, own)
                for given, own in zip(self.slopes[number], (lower, upper), strict=True)
            )
        t, ends = (by.of(lower), by.of(upper)), (by.of(low), by.of(high))
        steepest = np.maximum(np.abs(lower), np.abs(upper))
        charge = by.of(by.gamma(node.size + FEW) * (self.size(number) + steepest * self.size(node.source)))
        columns = np.broadcast_arrays(function.least(t[0], *ends, by), function.most(t[1], *ends, by), charge)
        up, down = (np.expand_dims(each, -2) if each.ndim > 1 else each for each in t)
        return Lines((up, down), np.stack(columns, -1))

    def maximum(self, number: int, by: Float64) -> Rivals:
        """The lines of a maximum that is bounded by single rivals."""
        return self._kept((number, by.exact), lambda: self._rivals(number, by))

    def _rivals(self, number: int, by: Float64) -> Rivals:
        node: Any = self.graph.nodes[number]
        low, high = (end[..., node.rivals] for end in self.ends[node.source])
        below, above = low.argmax(-2), high.argmax(-2)
        under, rival = (node.rivals[which, np.arange(node.size)] for which in (below, above))
        least, most = (np.take_along_axis(end, above[..., None, :], -2)[..., 0, :] for end in (low, high))
        # A rival that stands in several places is one; a bound of the others that is too high is a bound.
        best = np.where(node.rivals != rival[..., None, :], high, -LARGE).max(-2)
        slope = np.clip((most - np.maximum(least, best)) / np.where(most > least, most - least, 1.0), 0.0, 1.0)
        factor = by.of(slope)
        constant = np.maximum((1 - factor) * by.of(most), by.of(best) - factor * by.of(least))
        charge = by.gamma(node.rivals.size + FEW) * 4 * self.size(node.source)[..., node.rivals].max(-2)
        return Rivals(under, rival, factor, constant, charge)


def _gap(function: Function, low: Number, high: Number) -> Number:
    """How far a function is below ReLU at most, over [low, high]: |z|·Φ(−λ|z|), the same for z and −z."""
    if not isinstance(function, Curve):
        return np.zeros(np.shape(low))
    least, most = np.maximum(np.maximum(low, -high), 0.0), np.maximum(-low, high)
    # At −|z| a λ-GELU is −|z|·Φ(−λ|z|), and ReLU is 0.
    return np.asarray(-function.lower.least(np.zeros_like(low), -most, -least))


def root(graph: Graph, low: Number, high: Number) -> State:
    """What interval arithmetic knows over a box, or over many."""
    state = State(graph, {0: (low, high)})
    state.propagate()
    return state


def chosen(state: State, at: Any) -> State:
    """One of many states, or some."""
    found = state.child()
    found.made.clear()
    for part in (found.ends, found.slopes):
        for number, arrays in part.items():
            part[number] = tuple(a if a.ndim == 1 else a[at] for a in arrays)  # type: ignore[assignment]
    return found


def stacked(states: Sequence[State]) -> State:
    """Many states of one graph as one; arrays that are the same in all of them stay (size,)."""
    if len(states) == 1:
        return states[0]
    found = states[0].child()
    found.made.clear()
    for name in ("ends", "slopes"):
        parts = [getattr(state, name) for state in states]
        for number in set().union(*parts):
            none = np.full(found.graph.nodes[number].size, np.nan)
            ends = [part.get(number, (none, none)) for part in parts]
            same = all(each is ends[0] for each in ends)
            getattr(found, name)[number] = ends[0] if same else tuple(map(np.stack, zip(*ends, strict=True)))
    return found


class Walk:
    """Rows on their way back to the input.

    Args:
        state: what is known, (size,), or of many boxes, (boxes, size).
        by: the arithmetic.
        rows: coefficients of nodes' entries, (boxes, rows, size); of one box for one state.
        constant: (boxes, rows).
        loss: (boxes, rows) what was charged before.
        extra: multipliers; rows are counted through all boxes.
        alone: whether no activation of a pair is replaced by the first network's.
    """

    def __init__(
        self,
        state: State,
        by: Float64,
        rows: dict[int, Number],
        constant: Number,
        loss: Number,
        extra: Multipliers | None = None,
        alone: bool = False,
    ) -> None:
        self.state, self.by, self.extra, self.rows = state, by, extra or {}, rows
        self.constant, self.loss = constant, loss
        graph, last, self._alone = state.graph, max(rows), alone
        for number in reversed(graph.order[1 : graph.order.index(last) + 1]):
            if (found := self.rows.pop(number, None)) is not None:
                self._step(number, found)
        self.inputs = self.rows.pop(0, np.zeros((*constant.shape, graph.nodes[0].size)))

    def lower(self, box: Ends | None = None) -> Ends:
        """Lower bounds over the state's box, or another one, and what rounding may have taken from them."""
        low, high = (self._of(end) for end in box or self.state.ends[0])
        found = self.constant + np.minimum(self.inputs * low, self.inputs * high).sum(-1)
        if self.by.exact:
            return found - self.loss, 2 * self.loss
        size = np.maximum(np.abs(low), np.abs(high))
        loss = self.loss + gamma(size.shape[-1] + FEW) * (np.abs(self.inputs) * size).sum(-1)
        loss = (loss + gamma(2) * np.abs(found)) * OWN + TINY
        # What overflowed on the way is an infinity, or no number.
        return np.where(np.isfinite(found - loss), found - loss, -np.inf), 2 * loss

    def _of(self, values: Number) -> Number:
        """An array of the state, for each row, in the arithmetic."""
        return self.by.of(values if values.ndim == 1 else values[:, None, :])

    def _dot(self, rows: Number, values: Number) -> Number:
        values = self.by.of(values)
        return np.asarray(rows @ values if values.ndim == 1 else (rows @ values[..., None])[..., 0])

    def _add(self, number: int, rows: Number) -> None:
        known = self.rows.get(number)
        self.rows[number] = found = rows if known is None else known + rows
        if known is not None and not self.by.exact:
            self.loss = self.loss + gamma(1) * self._dot(np.abs(found), self.state.size(number))

    def _count(self, sums: Number, lost: Any) -> None:
        self.constant, self.loss = self.constant + sums, self.loss + lost
        if not self.by.exact:
            self.loss = self.loss + gamma(1) * np.abs(self.constant)

    def _step(self, number: int, rows: Number) -> None:
        node: Any = self.state.graph.nodes[number]
        if isinstance(node, Affine):
            own, off = self.state.charge(number)
            self._count(self._dot(rows, node.bias), self._dot(np.abs(rows), off if self.by.exact else own + off))
            flat = rows.reshape(-1, rows.shape[-1])
            for source, matrix in node.terms:
                self._add(source, self.by.pull(flat, matrix).reshape(*rows.shape[:2], -1))
        elif isinstance(node, Activation):
            self._activation(number, node, rows)
        elif isinstance(node, Maximum) and number in self.state.rounds:
            self._add(node.rounds, rows)
        elif isinstance(node, Maximum):
            self._maximum(number, node, rows)
        else:
            for source in (node.second,) if self._alone else (node.first, node.change):
                self._add(source, rows)

    def _activation(self, number: int, node: Activation, rows: Number) -> None:
        lines = self.state.lines(number, self.by)
        if number in self.state.planes:
            rows = self._planes(number, node, rows)
        rest, extra = rows, self.extra.get(number)
        if extra is not None:
            rest = rows.copy()
            rest.reshape(-1, node.size)[extra[0], extra[1]] *= 0
        above, below = np.maximum(rest, 0), np.minimum(rest, 0)
        up, down = above @ lines.columns, below @ lines.columns
        self._count(up[..., 0] + down[..., 1], up[..., 2] - down[..., 2])
        made = above * lines.t[0] + below * lines.t[1]
        if extra is not None:
            self._multiplied(number, node, rows, made, *extra)
        self._add(node.source, made)

    def _multiplied(self, number: int, node: Activation, rows: Number, made: Number, *extra: Number) -> None:
        """Count the terms of neurons with multipliers, and write their λ into ``made``."""
        which, neurons, given = extra
        lines, state = self.state.lines(number, self.by), self.state

        def some(values: Number) -> Number:
            flat = values.reshape(-1, node.size)
            return np.asarray(flat[which if len(flat) > 1 else 0, neurons])

        k = rows.reshape(-1, node.size)[which, neurons]
        multiplier = np.where(k >= 0, some(lines.t[0]), some(lines.t[1])) * k + self.by.of(given)
        ends = [self.by.of(some(end)) for end in state.ends[node.source]]
        r, z = some(state.size(number)), some(state.size(node.source))
        term = _least(node.function.take(neurons), k, multiplier, ends[0], ends[1], self.by.of(r), self.by)
        sums, lost = self.by.of(np.zeros(rows.size // node.size)), np.zeros(rows.size // node.size)
        np.add.at(sums, which, term)
        if not self.by.exact:
            np.add.at(lost, which, gamma(node.size + FEW) * (np.abs(k) * r + np.abs(multiplier) * z))
        self._count(sums.reshape(rows.shape[:2]), self.by.of(lost).reshape(rows.shape[:2]))
        made.reshape(-1, node.size)[which, neurons] = multiplier

    def _planes(self, number: int, node: Activation, rows: Number) -> Number:
        """Replace neurons with planes where K < 0, and return what is left."""
        rows, planes = rows.copy(), self.state.planes[number]
        low, high = (self._of(end) for end in self.state.ends[node.source])
        # Sums of as many terms as there are planes, each with its product, and of what is added later.
        part = self.by.gamma(2 * len(planes) + FEW)
        for plane in planes:
            j = plane.neuron
            k = np.where((low[..., j] < 0) & (high[..., j] > 0), np.minimum(rows[..., j], 0), 0 * rows[..., j])
            rows[..., j] = rows[..., j] - k
            lost: Any = abs(plane.constant)
            for source, terms in plane.terms.items():
                self._add(source, k[..., None] * self.by.of(terms))
                lost = lost + self._of(self.state.size(source) * np.abs(terms)).sum(-1)
            self._count(k * self.by.of(np.array(plane.constant))[()], 0 if self.by.exact else part * np.abs(k) * lost)
        return rows

    def _maximum(self, number: int, node: Maximum, rows: Number) -> None:
        rivals, size = self.state.maximum(number, self.by), self.state.graph.nodes[node.source].size
        below, above = np.maximum(rows, 0), np.minimum(rows, 0)
        self._count(self._dot(above, rivals.constant), self._dot(np.abs(rows), rivals.charge))
        found = self.by.of(np.zeros((rows.size // node.size, size)))
        slope = rivals.slope if rivals.slope.ndim == 1 else rivals.slope[:, None, :]
        for part, entries in ((below, rivals.below), (above * slope, rivals.above)):
            wide = np.broadcast_to(entries if entries.ndim == 1 else entries[:, None, :], rows.shape)
            np.add.at(
                found, (np.arange(len(found))[:, None], wide.reshape(len(found), -1)), part.reshape(len(found), -1)
            )
        self._add(node.source, found.reshape(*rows.shape[:2], size))


def _least(function: Function, k: Number, m: Number, low: Number, high: Number, r: Number, by: Float64) -> Number:
    """A lower bound of k·f(z) − m·z over [low, high], |f| ≤ r; rounding of products is charged elsewhere."""
    safe = (k != 0) if by.exact else (np.abs(m) <= 2.0**60 * np.abs(k)) & (k != 0)
    t = m / np.where(safe, k, 1)
    t = np.where(safe, t, 0 * t)
    curved = np.where(k > 0, k * function.least(t, low, high, by), k * function.most(t, low, high, by))
    # The function is nearly nothing next to the line.
    flat = np.minimum(-m * low, -m * high) - np.abs(k) * r
    return np.asarray(np.where(safe, curved, flat))


def lower_of(state: State, number: int, entries: Number, sides: Number) -> Number:
    """Lower bounds of sides·entries of a node's value, all (boxes, rows)."""
    rows = np.zeros((*entries.shape, state.graph.nodes[number].size))
    np.put_along_axis(rows, entries[..., None], np.broadcast_to(sides, entries.shape)[..., None], -1)
    none, graph = np.zeros(entries.shape), state.graph
    differs = any(isinstance(n, Beside) and graph.nodes[n.change].sources == (number,) for n in graph.nodes)
    alone = graph.second is not None and number >= graph.second and not differs
    return Walk(state, FLOAT, {number: rows}, none, none, alone=alone).lower()[0]
