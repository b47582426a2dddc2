"""Affine forms pulled back through a network whose neurons lie between claimed bounds.

Of a neuron with the pre-activation z between l < 0 and u > 0 and the slope s below zero, the value is r = t·z + q for
any slope t, and q, which is a function of z, is (1 − t)·z where z ≥ 0 and (s − t)·z where z ≤ 0: it lies between the
least and the largest of 0, (1 − t)·u and (s − t)·l. Putting t·z + q in the place of r, node by node from the last to
the first, makes of any sum of values an affine form of the input x and of the q. Of a neuron whose activation is a
curve f, q = f(z) − t·z, and ``curves`` tells between which numbers it lies.

In float64 a form comes with an ``error``: how far it is from what it stands for, at most, at any point of the box.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np
from scipy import sparse

from verifiable_relu.check.arithmetic import FLOAT, OWN, SMALL, TINY, UNIT, Exact, Float, Matrix, Number, above, gamma
from verifiable_relu.check.curves import DifferenceSlopes
from verifiable_relu.check.errors import Refused
from verifiable_relu.check.graph import (
    ActivationNode,
    AffineNode,
    DifferenceNode,
    Either,
    Graph,
    MaximumNode,
    Node,
    SmoothNode,
    pick,
)

WORKING = 1 << 22
"""Most coefficients of one node that are pulled back at once."""


@dataclass(eq=False)
class LinearForms:
    """Forms coefficients·(x, q of all open neurons) + constant, one a row; shaped (rows, …)."""

    coefficients: Number
    constant: Number
    error: Number


@dataclass(frozen=True, eq=False)
class Coefficients:
    """Coefficients (rows, entries) of some entries of a value, whose numbers rise; those of all others are zero."""

    entries: Number
    values: Number

    @staticmethod
    def of(values: Number) -> Coefficients:
        """Those of (rows, size) that are not zero in some row."""
        entries = np.flatnonzero((values != 0).any(0))
        return Coefficients(entries, values[:, entries])

    def through(self, matrix: Matrix, ring: Float) -> Coefficients:
        """The coefficients of v where these are those of matrix·v."""
        size, whole = matrix.shape[1], len(self.entries) == matrix.shape[0]
        matrix = matrix if whole else matrix[self.entries]
        every = np.arange(size)
        if not sparse.issparse(matrix):
            return Coefficients(every, ring.times(self.values, matrix))
        seen = np.zeros(size, bool)
        seen[matrix.indices] = True
        entries = np.flatnonzero(seen)
        if 2 * len(entries) > size:
            return Coefficients(every, ring.times(self.values, matrix))
        every[entries] = np.arange(len(entries))
        shape = (matrix.shape[0], len(entries))
        narrow = sparse.csr_array((matrix.data, every[matrix.indices], matrix.indptr), shape=shape)
        return Coefficients(entries, ring.times(self.values, narrow))

    def __add__(self, other: Coefficients) -> Coefficients:
        entries = np.union1d(self.entries, other.entries)
        values = np.zeros((len(self.values), len(entries)), self.values.dtype)
        values[:, np.searchsorted(entries, self.entries)] = self.values
        values[:, np.searchsorted(entries, other.entries)] += other.values
        return Coefficients(entries, values)


@dataclass(frozen=True, eq=False)
class Pulled:
    """Forms as those of ``LinearForms``, of those inputs and open neurons alone whose coefficients may not be zero.

    Attributes:
        parts: by the number of a node, of the input (0) by its entries, of an activation by its open neurons.
        widest: the most entries of a node whose coefficients were not zero.
    """

    parts: Mapping[int, Coefficients]
    constant: Number
    error: Number
    widest: int


class OpenNeurons:
    """The neurons of one activation that are open, among those of all activations.

    Attributes:
        open: (open,) by number.
        first: where they begin among those of all activations.
        given: where their slopes begin among those of all activations.
    """

    open: Number
    first: int = 0
    given: int = 0

    @property
    def part(self) -> slice:
        """Of the open neurons among those of all activations."""
        return slice(self.first, self.first + len(self.open))

    def among(self, neurons: Number) -> tuple[Number, Number]:
        """Which of some neurons, by their place among these, are open; and their numbers among the open ones."""
        at = np.searchsorted(self.open, neurons)
        places = np.flatnonzero(np.append(self.open, -1)[at] == neurons)
        return places, at[places]


class Neurons(OpenNeurons):
    """The claimed bounds of one activation's pre-activations, and what follows from them.

    Attributes:
        lower, upper: (size,).
        open: the neurons that the bounds leave between two phases.
        passing: (size,) the slope of the others.
    """

    def __init__(self, node: ActivationNode, lower: Number, upper: Number) -> None:
        self.lower, self.upper = lower, upper
        self.passing = np.where(lower >= 0, 1.0, node.slope)
        self.open = np.flatnonzero((lower < 0) & (upper > 0))
        self.slope = node.slope[self.open]
        self.low, self.high = lower[self.open], upper[self.open]
        self.chord = np.clip(
            (self.high - self.slope * self.low) / (self.high - self.low),
            np.minimum(self.slope, 1.0),
            np.maximum(self.slope, 1.0),
        )

    @property
    def count(self) -> int:
        """How many slopes there are."""
        return len(self.open)

    def slopes(self, vector: Number) -> Number:
        """Those of these neurons among the slopes of all activations."""
        return vector[..., self.given : self.given + len(self.open)]


class CurvedNeurons(OpenNeurons):
    """The claimed bounds of the inputs of curves; all of these neurons are open.

    Their slopes are those for coefficients of at least zero, and behind them those for coefficients below zero.

    Attributes:
        lower, upper: (size,), which are low and high, too.
        curve: what their values are.
        alone: (size,) of differences 1 where the second value is taken by itself, and 0 elsewhere.
    """

    def __init__(self, node: SmoothNode, lower: Number, upper: Number) -> None:
        self.lower, self.upper, self.curve = lower, upper, node.curve
        self.alone = np.zeros(node.size)
        self.low, self.high = lower, upper
        self.open, self.passing = np.arange(node.size), np.zeros(node.size)

    @property
    def count(self) -> int:
        """How many slopes there are."""
        return 2 * len(self.open)

    def pair(self, vector: Number) -> tuple[Number, Number]:
        """The slopes for coefficients of at least zero, and for others."""
        middle = self.given + len(self.open)
        return vector[..., self.given : middle], vector[..., middle : middle + len(self.open)]


@dataclass(frozen=True, eq=False)
class MultiNeuronBounds:
    """Upper bounds of some neurons of one activation, affine in inputs and in values of neurons before (``planes``).

    Attributes:
        at: (planes,) which of the activation's open neurons they are over.
        terms: the number of a node, and a sparse (planes, size of that node) matrix of the coefficients of its value.
        constant: (planes,).
        width: (planes,) by how much a plane is above its neuron's value, at most.
        unit: (planes,) how much rounding changes a form into which one unit of a plane is put, at most.
    """

    at: Number
    terms: list[tuple[int, Matrix]]
    constant: Number
    width: Number
    unit: Number


@dataclass(frozen=True, eq=False)
class MaximumBounds:
    """Bounds of maxima by one entry each, below and above.

    Attributes:
        below, above: (maxima, entries) of the coefficients of the entries' values.
        constant: (maxima,) of the upper bounds.
        unit: (maxima,) how much rounding changes a form into which one unit of a bound is put, at most.
    """

    below: Matrix
    above: Matrix
    constant: Number
    unit: Number


@dataclass(frozen=True, eq=False)
class Fixed:
    """The same slopes for all rows, whatever the signs of their coefficients.

    Of a neuron with a plane, r is the plane's value less d, and d takes the place of q.

    Attributes:
        vector: one slope for each of the open neurons of all activations; zero for neurons with planes.
        planes: by the number of an activation's node.
    """

    vector: Number
    planes: Mapping[int, MultiNeuronBounds] = field(default_factory=dict)

    def slopes(self, neurons: Neurons | CurvedNeurons, part: Coefficients, ring: Float) -> Number:
        """The slopes t of the open neurons that have coefficients, broadcastable to these."""
        return ring.of(self.vector[neurons.part][part.entries])


@dataclass(frozen=True, eq=False)
class Signed:
    """Slopes that depend on the signs of coefficients.

    Where a coefficient wants a piecewise-linear activation to be as large as it can be, the chord is taken, otherwise
    the slope given. (The chord is above a convex activation, and below a concave one.) Curves have a slope for either.

    Attributes:
        vector: the slopes of all activations, the same or (rows, slopes) for each row.
    """

    vector: Number
    planes: ClassVar[Mapping[int, MultiNeuronBounds]] = {}

    def slopes(self, neurons: Neurons | CurvedNeurons, part: Coefficients, ring: Float) -> Number:
        """As those of ``Fixed``."""
        which, a = part.entries, part.values
        if isinstance(neurons, CurvedNeurons):
            under, over = neurons.pair(self.vector)
            return np.where(a >= 0, ring.of(under[..., which]), ring.of(over[..., which]))
        far = a * np.where(neurons.slope[which] > 1, -1, 1) < 0
        return np.where(far, ring.of(neurons.chord[which]), ring.of(neurons.slopes(self.vector)[..., which]))

    def remainders(self, neurons: Neurons | CurvedNeurons, part: Coefficients, ring: Float) -> tuple[Number, Number]:
        """Numbers between which q lies: the lower one where its coefficient is above 0, the upper one elsewhere."""
        which = part.entries
        if isinstance(neurons, CurvedNeurons):
            (under, over), low, high = neurons.pair(self.vector), neurons.lower, neurons.upper
            least, most = neurons.curve.least(low, high, under), neurons.curve.most(low, high, over)
            return ring.of(least[..., which]), ring.of(most[..., which])
        t = self.slopes(neurons, part, ring)
        above, below = (
            (1 - t) * ring.of(neurons.high[which]),
            (ring.of(neurons.slope[which]) - t) * ring.of(neurons.low[which]),
        )
        return np.minimum(np.minimum(above, below), 0), np.maximum(np.maximum(above, below), 0)


Slopes = Fixed | Signed


class CheckedRelaxation:
    """A network over a box, with bounds of pre-activations that are known so far.

    Args:
        graph: the network.
        lower, upper: (inputs,) the box, in float64.
    """

    def __init__(self, graph: Graph, lower: Number, upper: Number) -> None:
        self.graph, self.lower, self.upper = graph, lower, upper
        self.neurons: dict[int, Neurons | CurvedNeurons] = {}
        self.windows: dict[int, MaximumBounds] = {}
        self._ends: dict[int, tuple[Number, Number]] = {0: (lower, upper)}
        self._units: dict[int, tuple[Number, float]] = {}

    @property
    def inputs(self) -> int:
        return len(self.lower)

    @property
    def open(self) -> int:
        """How many open neurons there are so far."""
        return sum(len(n.open) for n in self.neurons.values())

    @property
    def slopes(self) -> int:
        """How many slopes these have."""
        return sum(n.count for n in self.neurons.values())

    def claim(self, activation: int, lower: Number, upper: Number) -> None:
        """Go on with these bounds of the pre-activations of an activation, be they its first ones or tighter ones."""
        node = self.graph.nodes[activation]
        if isinstance(node, DifferenceNode):
            self.neurons[activation] = CurvedNeurons(replace(node, curve=self._secants(node)), lower, upper)
        elif isinstance(node, SmoothNode):
            self.neurons[activation] = CurvedNeurons(node, lower, upper)
        else:
            assert isinstance(node, ActivationNode)
            self.neurons[activation] = Neurons(node, lower, upper)
        first = given = 0
        for neurons in self.neurons.values():
            neurons.first, neurons.given = first, given
            first, given = first + len(neurons.open), given + neurons.count

    def _secants(self, node: DifferenceNode) -> DifferenceSlopes:
        """What is known of a difference of activations over the bounds that are claimed of their inputs.

        λ-GELU is below ReLU by |z|·Φ(−λ·|z|), which is −(its value at −|z|), and never above it.
        """
        first, second = self.neurons[node.first], self.neurons[node.second]
        low, high = np.minimum(first.lower, second.lower), np.maximum(first.upper, second.upper)
        gaps = []
        for known in (second, first):
            near = np.maximum(np.maximum(known.lower, -known.upper), 0)
            far = np.maximum(-known.lower, known.upper)
            flat = np.zeros(node.size)
            gaps.append(
                np.maximum(-known.curve.least(-far, -near, flat), 0) if isinstance(known, CurvedNeurons) else flat
            )
        return DifferenceSlopes((low >= 0).astype(float), (high > 0).astype(float), *gaps)

    def apart(self, node: DifferenceNode) -> tuple[Number, Number]:
        """The ends of a difference z′ − z by intervals: of its walk, and of what is claimed of z and z′."""
        (low, high), first, second = self.ends(node.source), self.neurons[node.first], self.neurons[node.second]
        below, beyond = -above(first.upper - second.lower), above(second.upper - first.lower)
        return np.fmax(low, below), np.fmin(high, beyond)

    def bound(self, number: int, below: Number, above: Number) -> None:
        """Bound maxima by an entry each (docs/certificates.md), over the bounds claimed so far.

        Args:
            number: of their node.
            below: (size,) the entry of the lower bound, by its number among the maximum's rivals.
            above: (size,) that of the upper one.

        Raises:
            Refused: if a maximum has no such entry.
        """
        node = self.graph.nodes[number]
        assert isinstance(node, MaximumNode)
        every, given = np.arange(node.size), np.stack([below, above])
        if given.min() < 0 or given.max() >= len(node.rivals) or (node.rivals[given, every] < 0).any():
            raise Refused(f"a maximum of '{node.name}' has no such entry")
        low, high = self.ends(node.source)
        there = node.rivals >= 0
        there[above, every] = False
        others = np.where(there, high[node.rivals], -np.inf).max(0)
        under, entry = node.rivals[given, every]
        start, end = low[entry], high[entry]
        level = np.maximum(others, start)
        slope = np.clip((end - level) / np.where(end > start, end - start, 1), 0, 1)
        size = np.abs(start) + np.abs(end) + np.abs(level)
        constant = np.maximum(level - slope * start, end - slope * end) + 8 * UNIT * size + TINY
        most = self.most(node.source)
        lost = gamma(2 * node.size + len(self.graph.nodes) + 16)
        unit = lost * (most[under] + most[entry] + np.abs(constant)) + TINY
        steep = sparse.csr_array(sparse.diags_array(slope) @ pick(entry, len(low)))
        self.windows[number] = MaximumBounds(pick(under, len(low)), steep, constant, unit)

    def ends(self, number: int) -> tuple[Number, Number]:
        """Bounds of a node's value by interval arithmetic from the claimed bounds before it, rounded outward.

        Of W·v + b with |v − c| ≤ r the bounds are W·c + b ∓ |W|·r; the terms of all sums are together at most
        2·(|W|·(|c| + r) + |b|).
        """
        if number not in self._ends:
            node = self.graph.nodes[number]
            known = self.neurons.get(number)
            if isinstance(node, SmoothNode) and isinstance(known, CurvedNeurons):
                flat = np.zeros(node.size)
                ends = (bound(known.lower, known.upper, flat) for bound in (known.curve.least, known.curve.most))
                low, high = ends
                self._ends[number] = low, high
            elif isinstance(node, Either):
                self._ends[number] = self.ends(node.second)
            elif isinstance(node, ActivationNode) and known is not None:
                (low, below), (above_, high) = node.at(known.lower), node.at(known.upper)
                low, high = np.minimum(low, above_), np.maximum(below, high)
                # The kink lies between the ends.
                kink = (known.lower < 0) & (known.upper > 0)
                self._ends[number] = np.where(kink, np.minimum(low, 0), low), np.where(kink, np.maximum(high, 0), high)
            elif isinstance(node, MaximumNode):
                seen, made = self.ends(node.source), self.ends(node.made)
                low, high = (np.where(node.rivals >= 0, end[node.rivals], -np.inf).max(0) for end in seen)
                self._ends[number] = np.maximum(low, made[0]), np.minimum(high, made[1])
            else:
                assert isinstance(node, AffineNode)
                self._ends[number] = self._image(node)
        return self._ends[number]

    def _image(self, node: AffineNode) -> tuple[Number, Number]:
        middle, reach, size = node.bias.copy(), np.zeros(node.size), np.abs(node.bias)
        spread = 0.0
        for (source, matrix), (_, absolute) in zip(node.terms, node.absolute, strict=True):
            low, high = self.ends(source)
            center = 0.5 * low + 0.5 * high
            radius = above(np.maximum(high - center, center - low))
            middle += matrix @ center
            reach += absolute @ radius
            size += absolute @ (np.abs(center) + radius)
            spread += float(np.abs(center).sum() + radius.sum())
        slack = OWN * ((2 * gamma(node.count + 8) + node.relative) * size + node.lost) + TINY * (1 + spread)
        return self._signed(node, middle - reach - slack, middle + reach + slack)

    def _signed(self, node: AffineNode, low: Number, high: Number) -> tuple[Number, Number]:
        """Bounds cut at zero where neither the bias nor a term has the other sign, which no rounding changes."""
        rising, falling = node.signs
        if node.lost.any() or node.relative >= 1 or not (rising | falling).any():
            return low, high
        below, beyond = np.zeros(node.size), np.zeros(node.size)
        for source, absolute in node.absolute:
            ends = self.ends(source)
            below += absolute @ (ends[0] < 0)
            beyond += absolute @ (ends[1] > 0)
        positive = (node.bias >= 0) & ((rising & (below == 0)) | (falling & (beyond == 0)))
        negative = (node.bias <= 0) & ((rising & (beyond == 0)) | (falling & (below == 0)))
        return np.where(positive, np.maximum(low, 0), low), np.where(negative, np.minimum(high, 0), high)

    def most(self, number: int) -> Number:
        """(size,) how large the value of a node is, at most, in the box, and ``SMALL`` more."""
        low, high = self.ends(number)
        return np.maximum(np.abs(low), np.abs(high)) + SMALL

    def _unit(self, number: int, node: AffineNode) -> tuple[Number, float]:
        """(size,) how much pulling one unit of a coefficient back through a node changes a form, at most; and TINY's.

        The row a of a·v, v = W·w + b, becomes fl(a·W), which is off by at most γ·|a|·|W|, and the constant grows by
        fl(a·b). At |w| ≤ M that changes a·v by at most γ·|a|·|W|·M + γ′·|a|·|b|, where γ′ also covers the additions of
        the constants of all nodes, and both cover what W and b are off by; what v has lost beside that is added.
        Products with zeros are exact. TINY by itself is what the unit, which is multiplied by a, has lost to underflow.
        """
        if number not in self._units:
            size, spread = np.zeros(node.size), 0.0
            for source, absolute in node.absolute:
                size = size + absolute @ self.most(source)
                spread += float(self.most(source).sum())
            # Of a·b, all of a node's entries are one sum.
            terms, offsets = node.count + 8, node.size + len(self.graph.nodes) + 8
            unit = (gamma(terms) + node.relative) * size + (gamma(offsets) + node.relative) * np.abs(node.bias)
            self._units[number] = OWN * (unit + node.lost) + TINY, TINY * (1 + spread)
        return self._units[number]

    def forms(
        self, rows: Mapping[int, Number | Coefficients], slopes: Slopes, arithmetic: Float = FLOAT
    ) -> LinearForms:
        """``pulled``, with the coefficients of all inputs and open neurons."""
        found = self.pulled(rows, slopes, arithmetic)
        coefficients = arithmetic.of(np.zeros((len(found.constant), self.inputs + self.open)))
        for number, part in found.parts.items():
            first = self.inputs + self.neurons[number].first if number else 0
            coefficients[:, first + part.entries] = part.values
        return LinearForms(coefficients, found.constant, found.error)

    def pulled(
        self, rows: Mapping[int, Number | Coefficients], slopes: Slopes, arithmetic: Float = FLOAT, alone: bool = False
    ) -> Pulled:
        """The forms of Σ rows·(value of node), given (rows, size of the node) by the number of the node.

        ``alone``: through a network beside another by itself.
        """
        ring, nodes = arithmetic, self.graph.nodes
        pending = {}
        for number, row in rows.items():
            part = row if isinstance(row, Coefficients) else Coefficients.of(row)
            pending[number] = Coefficients(part.entries, ring.of(part.values))
        count = len(next(iter(pending.values())).values)
        constant, error = ring.of(np.zeros(count)), ring.of(np.zeros(count))
        parts: dict[int, Coefficients] = {}
        widest = 1
        while pending:
            number = max(pending)
            part, node = pending.pop(number), nodes[number]
            columns, a = part.entries, part.values
            widest = max(widest, len(columns))
            given: list[tuple[int, Coefficients]] = []
            if isinstance(node, ActivationNode | SmoothNode):
                known = self.neurons[number]
                passing = np.broadcast_to(ring.of(known.passing[columns]), a.shape)
                at, which = known.among(columns)
                # What is neither open nor passed on is gone.
                goes = known.passing[columns] != 0
                goes[at] = True
                parts[number] = mine = Coefficients(which, a[:, at])
                if len(at):
                    passing = passing.copy()
                    passing[:, at] = slopes.slopes(known, mine, ring)
                given = [(node.source, Coefficients(columns[goes], (a * passing)[:, goes]))]
                if number in slopes.planes:
                    over = slopes.planes[number]
                    every = ring.of(np.zeros((count, len(known.open))))
                    every[:, which] = mine.values
                    above_ = every[:, over.at]
                    constant = constant + above_ @ ring.of(over.constant)
                    given += [
                        (source, Coefficients(np.arange(len(over.at)), above_).through(m, ring))
                        for source, m in over.terms
                    ]
                    if not ring.exact:
                        spread = sum(1 + float(self.most(source).sum()) for source, _ in over.terms)
                        error = error + np.abs(above_) @ over.unit + TINY * spread
            elif isinstance(node, MaximumNode):
                given = [(node.made, part)]
                if number in self.windows and isinstance(slopes, Signed):
                    by, least, most = self.windows[number], np.minimum(a, 0), np.maximum(a, 0)
                    sides = ((most, by.below), (least, by.above))
                    given = [(node.source, Coefficients(columns, side).through(matrix, ring)) for side, matrix in sides]
                    constant = constant + least @ ring.of(by.constant[columns])
                    if not ring.exact:
                        spread = float(self.most(node.source).sum())
                        error = error + np.abs(a) @ by.unit[columns] + TINY * (1 + spread)
            elif isinstance(node, Either):
                known = self.neurons[node.beside]
                assert isinstance(known, CurvedNeurons)
                mine = Coefficients(columns, a * ring.of(np.ones(len(columns)) if alone else known.alone[columns]))
                rest = Coefficients(columns, a - mine.values)
                given = [(node.second, mine), (node.first, rest), (node.beside, rest)]
                if alone:
                    given = given[:1]
            elif isinstance(node, AffineNode):
                constant = constant + a @ ring.of(node.bias[columns])
                given = [(source, part.through(matrix, ring)) for source, matrix in node.terms]
            else:
                parts[number] = part
            error = error + self._lost(number, node, part, given, ring)
            for source, back in given:
                if not len(back.entries):
                    continue
                if isinstance(ring, Exact):
                    short, off = ring.shortened(back.values)
                    error = error + off @ ring.of(self.most(source)[back.entries])
                    back = Coefficients(back.entries, short)
                if source in pending:
                    back = pending[source] + back
                    if not ring.exact:
                        error = error + np.abs(back.values) @ (UNIT * self.most(source)[back.entries])
                pending[source] = back
        return Pulled(parts, constant, OWN * error if not ring.exact else error, widest)

    def _lost(
        self, number: int, node: Node, part: Coefficients, given: list[tuple[int, Coefficients]], ring: Float
    ) -> Number:
        """What one step back changes, at most."""
        a = part.values
        if ring.exact:
            size = Coefficients(part.entries, np.abs(a))
            lost: Any = ring.of(np.zeros(len(a)))
            if isinstance(node, AffineNode) and node.relative:
                # The product of these may be too small for float64, the relative error by itself never.
                lost = size.values @ ring.of(np.abs(node.bias[part.entries]))
                for source, absolute in node.absolute:
                    back = size.through(absolute, ring)
                    lost = lost + back.values @ ring.of(self.most(source)[back.entries])
                lost = lost * Fraction(node.relative) + size.values @ ring.of(node.lost[part.entries])
            return np.asarray(lost)
        if isinstance(node, ActivationNode | SmoothNode):
            source, back = given[0]
            most = self.most(source)
            return np.abs(back.values) @ (UNIT * most[back.entries]) + TINY * (1 + float(most.sum()))
        if isinstance(node, AffineNode):
            unit, lost = self._unit(number, node)
            return np.abs(a) @ unit[part.entries] + lost
        return np.zeros(len(a))
