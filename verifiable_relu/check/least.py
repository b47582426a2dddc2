"""The least values of forms: over the whole box, and at the leaves of a tree of splits.

At a leaf more is known of the neurons that are split: z_j lies in a part [a_j, b_j] of [l_j, u_j]. For any μ ≥ 0 of the
rows of a polytope, which are at most zero in the unsafe set, and any multipliers w of neurons,

    Σ μ_i·row_i = Σ μ_i·row_i + Σ w_j·(form of z_j − z_j),

whose right side is affine in x and, for each open neuron j, a function of z_j alone, K_j·q_j(z_j) − w_j·z_j. Where the
sum of all least values is positive, no point of the leaf is unsafe.

Of a neuron with a kink, this function is linear on either side of 0: it is least at 0 or at an end of what the leaf
allows. Of a curve f, q_j = f(z_j) − t_j·z_j, and with any number t′

    K_j·q_j − w_j·z_j = K_j·(f(z_j) − t′·z_j) + d·z_j,   d = K_j·(t′ − t_j) − w_j,

whose first part ``curves`` bounds over [a_j, b_j], and whose second part is least at an end. With t′ = t_j + w_j/K_j
the second part is nothing but what rounding leaves of it.

Of a neuron with a plane, r_j is the plane's value less d_j, which is between 0 and the plane's width. It may have a
multiplier of its own, v_j: then v_j·(form of r_j − r_j) is added as well, which leaves −v_j·r_j − w_j·z_j, linear on
either side of 0, and a term of d_j, which takes its better end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby
from typing import Any

import numpy as np

from verifiable_relu.check.arithmetic import EXACT, FLOAT, OWN, SMALL, TINY, Float, Matrix, Number, gamma, positive
from verifiable_relu.check.conditions import HalfSpace
from verifiable_relu.check.errors import BadInput, Refused
from verifiable_relu.check.graph import ActivationNode, DifferenceNode, SmoothNode
from verifiable_relu.check.lines import (
    WORKING,
    CheckedRelaxation,
    CurvedNeurons,
    Fixed,
    LinearForms,
    MultiNeuronBounds,
    Neurons,
    Pulled,
    Signed,
)


@dataclass
class Least:
    """Least values, (rows,), and how far they are off, at most."""

    value: Number
    slack: Number

    def beyond(self, claim: Any) -> Number:
        """(rows,) 1 where the least value is above the claim, −1 where it is not, 0 where rounding hides it.

        What has overflowed is above nothing.
        """
        sure = np.asarray(self.value - self.slack > claim, bool)
        if self.value.dtype != object:
            sure &= np.isfinite(self.value)
        never = ~np.asarray(self.value + self.slack > claim, bool)
        return np.where(sure, 1, np.where(never, -1, 0))


def of_box(relaxation: CheckedRelaxation, form: Pulled, slopes: Signed, ring: Float) -> Least:
    """The least values of forms made with ``slopes`` over the box and over what each q can be by itself."""
    value, terms, size = form.constant, len(relaxation.neurons) + 8, np.abs(form.constant)
    for number, part in form.parts.items():
        if number:
            low, high = slopes.remainders(relaxation.neurons[number], part, ring)
        else:
            low, high = (ring.of(end[part.entries]) for end in (relaxation.lower, relaxation.upper))
        a, terms = part.values, terms + len(part.entries)
        value = value + np.where(positive(a), a * low, a * high).sum(1)
        if not ring.exact:
            size = size + (np.abs(a) * (np.maximum(np.abs(low), np.abs(high)) + SMALL)).sum(1)
    if ring.exact:
        return Least(value, form.error)
    return Least(value, form.error + OWN * (gamma(terms) * size + TINY))


@dataclass(frozen=True, eq=False)
class BoundedRows:
    """Values matrix·(value of a node) − most.

    Attributes:
        node: the number of the node.
        matrix: (rows, size of the node), in float64.
        most: (rows,) numbers that are exact, ``Fraction`` or float64.
    """

    node: int
    matrix: Number
    most: Number


@dataclass(eq=False)
class TreeLeaves:
    """Leaves of trees.

    Attributes:
        lower, upper: (leaves, neurons) a and b of the trees' neurons.
        split: (leaves, neurons) bool, whether these are others than l and u.
        multipliers: (leaves, neurons) w, where ``given`` says so, and elsewhere 0.
        given: (leaves, neurons) bool.
        rows: (leaves, rows) μ, sparse.
    """

    lower: Number
    upper: Number
    split: Number
    multipliers: Number
    given: Number
    rows: Matrix

    def __getitem__(self, chosen: Number) -> TreeLeaves:
        parts = (self.lower, self.upper, self.split, self.multipliers, self.given, self.rows)
        return TreeLeaves(*(part[chosen] for part in parts))


class TreeBounds:
    """What all leaves of some trees share.

    Args:
        relaxation: with bounds of all pre-activations.
        rows: what is bounded from below.
        slopes: (open,) of all open neurons.
        neurons: those that are split or have multipliers, as (number of the activation, neuron).
        chords: those of ``neurons``, by number, that have the chord's multiplier at a leaf that gives them none.
        planes: by the number of an activation's node.
    """

    def __init__(
        self,
        relaxation: CheckedRelaxation,
        rows: BoundedRows,
        slopes: Number,
        neurons: list[tuple[int, int]],
        chords: list[int],
        planes: Mapping[int, MultiNeuronBounds],
    ) -> None:
        self.relaxation, self.rows, self.neurons, self._planes = relaxation, rows, neurons, planes
        self._slopes = slopes.copy()
        self._width, self._over = np.zeros(len(slopes)), np.zeros(len(slopes), bool)
        for activation, found in planes.items():
            of = relaxation.neurons[activation].first + found.at
            self._slopes[of], self._width[of], self._over[of] = 0, found.width, True
        places, curved = [], []
        for activation, neuron in neurons:
            known = relaxation.neurons[activation]
            if isinstance(relaxation.graph.nodes[activation], DifferenceNode):
                raise Refused("a difference of two activations has no splits and no multipliers")
            at = np.searchsorted(known.open, neuron)
            if at == len(known.open) or known.open[at] != neuron:
                raise Refused(f"neuron {neuron} of the activation {activation} has one phase by its bounds")
            places.append(known.first + int(at))
            curved.append(isinstance(known, CurvedNeurons))
        if len(set(places)) < len(places):
            raise Refused("a neuron is named twice")
        self._places, self.curved = np.array(places, dtype=np.intp), np.array(curved, dtype=bool)
        # Those of the neurons that have planes, by number.
        self._planed = np.flatnonzero(self._over[self._places])
        if self.curved[chords].any():
            raise Refused("a curve has no chord that would be its own")
        every = relaxation.neurons.values()
        self._low, self._high = (
            np.concatenate([np.zeros(0), *(getattr(known, name) for known in every)]) for name in ("low", "high")
        )
        flat = (np.zeros(0), *(np.zeros(len(known.open)) for known in every))
        self._slope, self._chord, self._least, self._most = (np.concatenate(flat) for _ in range(4))
        self._curves = []
        for number, known in relaxation.neurons.items():
            if isinstance(known, Neurons):
                self._slope[known.part], self._chord[known.part] = known.slope, known.chord
                continue
            t = slopes[known.part]
            self._least[known.part] = known.curve.least(known.lower, known.upper, t)
            self._most[known.part] = known.curve.most(known.lower, known.upper, t)
            self._curves.append((known, np.flatnonzero([activation == number for activation, _ in neurons])))
        self._by_chord = np.zeros(len(neurons), bool)
        self._by_chord[chords] = True
        self._forms = self._pulled_back()
        self._between = self._forms.coefficients[:, relaxation.inputs + self._places]
        n, form = relaxation.inputs, self._forms
        most = np.maximum(np.abs(relaxation.lower), np.abs(relaxation.upper))
        reach = np.maximum(np.abs(self._low), np.abs(self._high))
        # All numbers that a neuron's term is made of are at most these times |K|, and four times its reach times |w|.
        of_q = np.maximum(np.abs(self._least), np.abs(self._most))
        for known in every:
            if isinstance(known, Neurons):
                above, below = self._kinked(FLOAT)
                of_q[known.part] = (np.maximum(np.abs(above), np.abs(below)) + self._width)[known.part]
            else:
                of_q[known.part] += 4 * np.abs(slopes[known.part]) * reach[known.part]
        most = np.concatenate([most, of_q]) + SMALL
        # By how much one unit of a multiplier makes all numbers together larger.
        self._sizes = np.abs(form.coefficients) @ most + np.abs(form.constant)
        of_r = (1 + np.abs(self._slope)) * reach
        own = np.concatenate([reach[self._places], of_r[self._places[self._planed]]])
        self._sizes[len(rows.most) :] += 4 * own
        self._spread = 1 + float(most.sum()) + float(reach.sum())
        self._inputs = n

    @property
    def ends(self) -> tuple[Number, Number]:
        """l and u of the tree's neurons."""
        return self._low[self._places], self._high[self._places]

    def _source(self, activation: int) -> int:
        """The node of an activation's pre-activations."""
        node = self.relaxation.graph.nodes[activation]
        assert isinstance(node, ActivationNode | SmoothNode)
        return node.source

    def _kinked(self, ring: Float) -> tuple[Number, Number]:
        """q at the upper and at the lower end, of neurons with a kink."""
        t = ring.of(self._slopes)
        return (1 - t) * ring.of(self._high), (ring.of(self._slope) - t) * ring.of(self._low)

    def _pulled_back(self) -> LinearForms:
        """The forms of the rows, of the neurons' pre-activations, and of the values of those with planes."""
        nodes, lines = self.relaxation.graph.nodes, Fixed(self._slopes, self._planes)
        together = max(1, WORKING // max(node.size for node in nodes))
        found = []
        for at in range(0, len(self.rows.most), together):
            part, most = (whole[at : at + together] for whole in (self.rows.matrix, self.rows.most.astype(float)))
            form = self.relaxation.forms({self.rows.node: part}, lines)
            error = form.error + gamma(4) * (np.abs(form.constant) + np.abs(most)) + TINY
            found.append(LinearForms(form.coefficients, form.constant - most, error))
        values = [self.neurons[j] for j in self._planed]
        for wanted, behind in ((self.neurons, False), (values, True)):
            for activation, members in groupby(wanted, lambda named: named[0]):
                number, every = activation if behind else self._source(activation), [neuron for _, neuron in members]
                for at in range(0, len(every), together):
                    some = every[at : at + together]
                    unit = np.zeros((len(some), nodes[activation].size))
                    unit[np.arange(len(some)), some] = 1
                    found.append(self.relaxation.forms({number: unit}, lines))
        parts = zip(*((f.coefficients, f.constant, f.error) for f in found), strict=True)
        return LinearForms(*(np.concatenate(part) for part in parts))

    def multipliers(self, leaves: TreeLeaves) -> Number:
        """(leaves, neurons + planes) w, completed, and behind it v of the neurons with planes.

        K is the neuron's coefficient in the sum of the rows and of the forms of later neurons, times their multipliers.
        Where no w is given and the chord is wanted, w is K·(chord − t). All of a value with a plane is left to splits
        and to the line below, v = −K, where the neuron is split, or K ≥ 0 and it has a multiplier or is one of those
        with chords; where K < 0, so much of it is left to the chord as w says. Any multipliers are as sound as others,
        so that rounding does not matter here.
        """
        count, every = len(self.rows.most), len(self.neurons)
        w = np.concatenate([leaves.multipliers, np.zeros((len(leaves.multipliers), len(self._planed)))], 1)
        if not self._by_chord.any() and not len(self._planed):
            return w
        chord, over = self._chord[self._places], self._over[self._places]
        slope = chord - self._slopes[self._places]
        concave = (self._slope > 1)[self._places]
        k = leaves.rows @ self._between[:count]
        activations = np.array([activation for activation, _ in self.neurons])
        for activation in sorted(set(activations.tolist()), reverse=True):
            mine = np.flatnonzero(activations == activation)
            far = (k[:, mine] < 0) ^ concave[mine]
            wanted = (self._by_chord & ~over)[mine] & ~leaves.split[:, mine] & ~leaves.given[:, mine]
            w[:, mine] = np.where(wanted & far, k[:, mine] * slope[mine], w[:, mine])
            at = np.flatnonzero(activations[self._planed] == activation)
            those = self._planed[at]
            k_those, by_line = k[:, those], self._by_chord[those] | leaves.given[:, those]
            by_chord = -w[:, those] / np.where(chord[those] > 0, chord[those], np.inf)
            v = np.where(k_those < 0, by_chord, np.where(by_line, -k_those, 0))
            w[:, every + at] = np.where(leaves.split[:, those], -k_those, v)
            k = k + w[:, mine] @ self._between[count + mine] + w[:, every + at] @ self._between[count + every + at]
        return w

    def least(self, leaves: TreeLeaves, w: Number) -> Least:
        """The least values of Σ μ·row at leaves with multipliers (leaves, neurons + planes), in float64.

        All numbers that are added for a leaf are together at most ``size``.
        """
        form, n, count = self._forms, self._inputs, len(self.rows.most)

        def joined(parts: Number) -> Number:
            return np.asarray(leaves.rows @ parts[:count] + w @ parts[count:])

        c, constant = joined(form.coefficients), joined(form.constant)
        # Its size does not tell whether a coefficient has overflowed: the variable may be small.
        c = np.where(np.isfinite(c).all(1, keepdims=True), c, np.nan)
        x = c[:, :n]
        value = constant + np.where(x > 0, x * self.relaxation.lower, x * self.relaxation.upper).sum(1)
        value = value + self._terms(c[:, n:], leaves, w, FLOAT).sum(1)
        mu, absolute = leaves.rows, np.abs(w)
        size = mu @ self._sizes[:count] + absolute @ self._sizes[count:]
        error = mu @ form.error[:count] + absolute @ form.error[count:]
        terms = c.shape[1] + w.shape[1] + count + 16
        weight = 1 + mu.sum(1) + absolute.sum(1)
        return Least(value, OWN * (error + 2 * gamma(terms) * size + TINY * self._spread * weight))

    def _terms(self, k: Number, leaves: TreeLeaves, w: Number, ring: Float) -> Number:
        """(leaves, open) the least values of K·q(z) − w·z over what the leaves leave of each neuron.

        Of a neuron with a plane that of −v·r − w·z, and of −K·d.
        """
        (above, below), high, low = self._kinked(ring), ring.of(self._high), ring.of(self._low)
        places, every = self._places, len(self.neurons)
        kinked, w, v = k, w[:, :every], w[:, every:]
        if self._over.any():
            kinked = k.copy()
            kinked[:, self._over] = ring.of(np.zeros(1))
            kinked[:, places[self._planed]] = -v
        at_upper, at_lower = kinked * above, kinked * below
        at_upper[:, places] = at_upper[:, places] - w * high[places]
        at_lower[:, places] = at_lower[:, places] - w * low[places]
        at_upper[:, places] = np.where(leaves.upper <= 0, 0, at_upper[:, places])
        at_lower[:, places] = np.where(leaves.lower >= 0, 0, at_lower[:, places])
        found = np.minimum(np.minimum(at_upper, at_lower), 0)
        if self._over.any():
            found = found + np.where(positive(k), -k * ring.of(self._width), 0)
        for known, columns in self._curves:
            mine = k[:, known.part]
            bound = np.where(positive(mine), ring.of(self._least[known.part]), ring.of(self._most[known.part]))
            found[:, known.part] = mine * bound
            rows, chosen = np.nonzero(leaves.split[:, columns] | (w[:, columns] != 0))
            at = places[columns[chosen]]
            ends = leaves.lower[:, columns][rows, chosen], leaves.upper[:, columns][rows, chosen]
            found[rows, at] = self._on_curve(known, at, k[rows, at], w[:, columns][rows, chosen], ends, ring)
        return found

    def _on_curve(
        self, known: CurvedNeurons, at: Number, k: Number, w: Number, ends: tuple[Number, Number], ring: Float
    ) -> Number:
        """The least values of K·q(z) − w·z of some neurons ``at`` of a curve, z between the ends."""
        low, high = ends
        # Rounded, these choose the line; which side of the curve counts is K's own sign, however small K is.
        pulled, pull, t = k.astype(np.float64), w.astype(np.float64), self._slopes[at]
        # No curve is as steep as that: with steeper lines it is least at the same end.
        steepest = 2 + known.curve.steepest
        line = np.clip(np.where(pulled != 0, t + pull / np.where(pulled != 0, pulled, 1), t), -steepest, steepest)
        bound, under = np.zeros(len(k)), positive(k)
        bound[under] = known.curve.least(low[under], high[under], line[under])
        bound[~under] = known.curve.most(low[~under], high[~under], line[~under])
        rest = k * (ring.of(line) - ring.of(t)) - w
        return np.asarray(k * ring.of(bound) + np.minimum(rest * ring.of(low), rest * ring.of(high)))

    def exactly(self, leaf: TreeLeaves, w: Number) -> Least:
        """The least value at one leaf with multipliers (1, neurons + planes), in exact arithmetic: one walk."""
        relaxation, ring = self.relaxation, EXACT
        nodes, mu = relaxation.graph.nodes, ring.of(leaf.rows.toarray())
        rows = {self.rows.node: mu @ ring.of(self.rows.matrix)}
        values = [self.neurons[j] for j in self._planed]
        places = [(self._source(activation), neuron) for activation, neuron in self.neurons] + values
        for (number, neuron), weight in zip(places, w[0].tolist(), strict=True):
            if weight:
                row = rows.setdefault(number, ring.of(np.zeros((1, nodes[number].size))))
                row[0, neuron] += Fraction(weight)
        form = relaxation.forms(rows, Fixed(self._slopes, self._planes), ring)
        x = form.coefficients[:, : self._inputs]
        value = form.constant - mu @ ring.of(self.rows.most)
        value = value + np.where(positive(x), x * ring.of(relaxation.lower), x * ring.of(relaxation.upper)).sum(1)
        k = form.coefficients[:, self._inputs :]
        value = value + self._terms(k, leaf, ring.of(w), ring).sum(1)
        return Least(value, form.error)


def integral(rows: list[HalfSpace], node: int, outputs: int) -> BoundedRows:
    """Rows of a property on the output, a node, times the least numbers that make their coefficients integers.

    Raises:
        BadInput: if there are no such integers below 2⁵³.
    """
    matrix, most = np.zeros((len(rows), outputs)), np.empty(len(rows), dtype=object)
    for at, row in enumerate(rows):
        scale = int(np.lcm.reduce([coefficient.denominator for _, coefficient in row.y], dtype=object))
        for output, coefficient in row.y:
            if abs(coefficient * scale) > 1 << 53 or output >= outputs:
                raise BadInput("a coefficient of a condition has too many digits, or is of no output")
            matrix[at, output] = int(coefficient * scale)
        most[at] = row.most * scale
        if abs(most[at]) > 1 << 900:
            raise BadInput("a number of a condition is too large")
    return BoundedRows(node, matrix, most)
