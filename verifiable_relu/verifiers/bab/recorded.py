"""The leaves of trees, recorded as they are closed, with multipliers of few digits (``trust.certificate``).

A leaf gives multipliers w to few of its neurons. Some of the others have the one that makes the chord the line over
the activation, K·(chord − t) where the coefficient K wants the activation to be as large as it can be: whoever checks
the leaf computes it, from the last layer to the first (``completed``); likewise all multipliers v of the values of
neurons with cuts. What a leaf proves is always computed anew with the multipliers that are written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from verifiable_relu.rounding import CLEAR, CLEAR_OF_WIDTH, LEAST_STEP
from verifiable_relu.trust.certificate import Branches, Leaf, Plane, Tighter
from verifiable_relu.trust.certificate import Tree as Certified
from verifiable_relu.verifiers.bab.curves import SEGMENTS, Curves
from verifiable_relu.verifiers.bab.folded import Folded
from verifiable_relu.verifiers.bab.proof import Proofs, of_rows
from verifiable_relu.verifiers.bab.strip import TreeRelaxation


@dataclass(frozen=True, eq=False)
class RecordedLeaves:
    """Leaves with their multipliers.

    Attributes:
        cuts: (cuts, 3) a leaf, a neuron, and the number of the segment that is cut; 0 where it is a kink that splits.
        sides: (cuts,) of the leaf, +1 above the cut and −1 below it.
        points: (cuts,) where a segment is cut.
        places: (multipliers, 2) leaf and neuron of each multiplier.
        values: (multipliers,).
        mu: (leaves, rows) multipliers of rows.
    """

    cuts: np.ndarray
    sides: np.ndarray
    points: np.ndarray
    places: np.ndarray
    values: np.ndarray
    mu: np.ndarray

    @staticmethod
    def of(split: Tensor, w: Tensor, mu: Tensor, curves: Curves | None, zeros: Tensor | None = None) -> RecordedLeaves:
        """From (leaves, neurons) splits, and multipliers that are zero where they are not written.

        Of the neurons ``zeros``, bool, zeros are written, too.

        Segment k of a smooth neuron has come from cutting the segments k/2, k/4, …, 1, rounded down.
        """
        at, number = split.nonzero(), split[split != 0].long()
        smooth = torch.zeros(len(at), dtype=torch.bool) if curves is None else curves.holds(at[:, 1])
        cuts = [torch.cat([at, torch.zeros_like(at[:, :1])], 1)[~smooth]]
        sides, points = [number[~smooth]], [torch.zeros(len(cuts[0]), dtype=torch.float64)]
        at, number = at[smooth], number[smooth]
        while curves is not None and len(at):
            above, number = 2 * (number % 2) - 1, number // 2
            kept = number > 0
            at, number = at[kept], number[kept]
            cuts.append(torch.cat([at, number[:, None]], 1))
            sides.append(above[kept])
            points.append(curves.points(at[:, 1], number))
        every = torch.cat(cuts)
        order = every[:, 0].argsort(stable=True)
        places = (w != 0 if zeros is None else (w != 0) | zeros).nonzero()
        values = w[places[:, 0], places[:, 1]]
        parts = (every[order], torch.cat(sides)[order], torch.cat(points)[order], places, values, mu)
        return RecordedLeaves(*(part.numpy() for part in parts))

    @property
    def neurons(self) -> np.ndarray:
        """The neurons that are split or have multipliers, some of them several times."""
        return np.concatenate([self.cuts[:, 1], self.places[:, 1]])

    @staticmethod
    def cat(parts: Sequence[RecordedLeaves]) -> RecordedLeaves:
        """All leaves of several."""
        starts = np.cumsum([0, *(len(part.mu) for part in parts)])

        def moved(name: str) -> np.ndarray:
            arrays = [getattr(part, name).copy() for part in parts]
            for start, array in zip(starts, arrays, strict=False):
                array[:, 0] += start
            return np.concatenate(arrays)

        rest = (np.concatenate([getattr(part, name) for part in parts]) for name in ("sides", "points", "values", "mu"))
        sides, points, values, mu = rest
        return RecordedLeaves(moved("cuts"), sides, points, moved("places"), values, mu)

    def written(self, numbers: np.ndarray) -> Branches:
        """As a certificate has them; ``numbers``: (neurons,) the number that each neuron has there."""
        keys, first, which = np.unique(
            self.cuts[:, 1] * SEGMENTS + self.cuts[:, 2], return_index=True, return_inverse=True
        )
        cuts = []
        for key, point in zip(keys.tolist(), self.points[first].tolist(), strict=True):
            cuts.append((int(numbers[key // SEGMENTS]), point if key % SEGMENTS else None))
        starts = np.arange(len(self.mu) + 1)
        cuts_of, values_of = (np.searchsorted(places[:, 0], starts) for places in (self.cuts, self.places))
        of_value = numbers[self.places[:, 1]]
        leaves = []
        for at, row in enumerate(np.concatenate([np.ones((len(self.mu), 1)), self.mu], 1)):
            mine, own = slice(*cuts_of[at : at + 2]), slice(*values_of[at : at + 2])
            leaves.append(Leaf(which[mine], self.sides[mine], of_value[own], self.values[own], row))
        return Branches(cuts, leaves)


_BITS = (10, 24, 52)
"""How many bits the largest multiplier of a leaf has: the fewest with which the leaf is still proven are taken. Tried
first is to give neurons that are not split no multiplier but the chord's; last, to give all of them their own."""

_SAME = 2.0**-8
"""A multiplier that differs from the chord's by no more than this part of it is not written."""

_GRID = 2.0**40
"""Slopes of lines that stand for curves are multiples of one by this."""

_GAIN = 0.01
"""A neuron's bound is recorded if it makes the interval narrower by this part of it, at least."""

_GIVEN_UP = 0.02
"""The part of what a tighter bound gains that may be given up for shorter multipliers."""

_STEP = 16
"""Tighter bounds are multiples of 2 to the power of minus this of their intervals' widths, about."""


class _Short:
    """Multipliers of leaves of one relaxation, made as short as what the leaves are to prove allows.

    The neurons ``chords``, (m,) bool, have the chord's multiplier where none is given; those of curves have none.
    """

    def __init__(self, strip: TreeRelaxation, proofs: Proofs, chords: Tensor) -> None:
        folded = strip.folded
        self._strip, self._proofs, self.chords = strip, proofs, chords & ~folded.smooth
        chord = (folded.upper - folded.slope * folded.lower) / (folded.upper - folded.lower)
        self._rate = (chord - strip.slopes) / strip.width
        self._over_chord = torch.where(chord > 0, -1 / chord, 0.0)
        self._every = torch.arange(folded.size)

    def _completed(
        self, split: Tensor, w: Tensor, mu: Tensor, objective: Tensor | None, given: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return w with the chord's multipliers where it is zero and the neuron is in ``chords`` and not split.

        Returned, too: v of the neurons with hull cuts, if there are any; and the coefficients (leaves, m) of all q̃.
        """
        strip, folded = self._strip, self._strip.folded
        n, free = folded.inputs, self.chords & (split == 0) & (w == 0) & ~strip.over & ~given
        q = of_rows(mu, objective, self._proofs.objectives) @ strip.rows.matrix[:, n:]
        w = w.clone()
        v = None if strip.cuts is None else torch.zeros(len(w), len(strip.cuts.neurons), dtype=torch.float64)
        for start, end in reversed(folded.blocks):
            mine = q[:, start:end]
            by_chord = free[:, start:end] & (mine < 0)
            w[:, start:end] = torch.where(by_chord, mine * self._rate[start:end], w[:, start:end])
            if v is not None and strip.cuts is not None:
                which, place = strip.over_of(torch.arange(start, end))
                over = start + which
                k, own = mine[:, which] / strip.width[over], w[:, over]
                by_line = self.chords[over] | given[:, over] | (own != 0)
                mixed = torch.where(k < 0, own * self._over_chord[over], torch.where(by_line, -k, 0.0))
                v[:, place] = torch.where(split[:, over] != 0, -k, mixed)
                given_ = (v[:, place] != 0).any(0)
                q[:, :start] += v[:, place[given_]] @ strip.base.of(place[given_]).matrix[:, n : n + start]
            used = start + (w[:, start:end] != 0).any(0).nonzero().squeeze(1)
            q[:, :start] += w[:, used] @ strip.neurons.of(used).matrix[:, n : n + start]
        return w, v, q

    def shortened(
        self, split: Tensor, w: Tensor, mu: Tensor, objective: Tensor | None, aim: Tensor, given: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return multipliers (leaves, m) and μ with which each leaf proves its aim (leaves,), and what it proves.

        With the most digits a leaf may prove less than its aim. The arguments are those of ``Proofs.lower``, with all
        columns; multipliers of the neurons ``given``, (leaves, m) bool, are written though they are zero.
        """
        w, mu = w.double(), mu.double().clamp(min=0)
        given = torch.zeros_like(w, dtype=torch.bool) if given is None else given
        q_free = self.chords & (split == 0) & ~given
        # What the chord's multiplier makes unnecessary.
        _, _, q = self._completed(split, w, mu, objective, given)
        chord = q * self._rate
        near = q_free & ~self._strip.over & (q < 0) & ((w - chord).abs() <= _SAME * chord.abs())
        found, found_mu, proven = torch.zeros_like(w), mu.clone(), torch.full((len(w),), -torch.inf).double()
        left = torch.arange(len(w))
        for bits, dropped in ((0, q_free), *((bits, near) for bits in _BITS), (_BITS[-1], torch.zeros_like(near))):
            kept = w[left].masked_fill(dropped[left], 0.0)
            short, short_mu = rounded(kept, bits or _BITS[0]), rounded(mu[left], bits or _BITS[0])
            own = None if objective is None else objective[left]
            whole, v, _ = self._completed(split[left], short, short_mu, own, given[left])
            value = self._proofs.lower(split[left], self._every, whole, short_mu, own, v)
            value = torch.where(value.isfinite(), value, -torch.inf)
            better = value > proven[left]
            chosen = left[better]
            found[chosen], found_mu[chosen], proven[chosen] = short[better], short_mu[better], value[better]
            left = left[~(proven[left] > aim[left])]
            if not len(left):
                break
        return found, found_mu, proven


class Recorded:
    """Writes the leaves of the tree of a polytope; ``adaptive``: (m,) bool, neurons that have adaptive lines."""

    def __init__(self, strip: TreeRelaxation, proofs: Proofs, adaptive: Tensor) -> None:
        self._strip, self._short = strip, _Short(strip, proofs, adaptive)
        self._spare = CLEAR * (strip.rows.matrix[0].abs().sum() + strip.rows.constant[0].abs())

    def closed(self, split: Tensor, columns: Tensor, w: Tensor, mu: Tensor, v: Tensor | None) -> RecordedLeaves:
        """Nodes that are proven; the arguments are those of ``Proofs.lower``."""
        whole = torch.zeros(len(w), self._strip.folded.size, dtype=torch.float64)
        whole[:, columns] = w.double()
        given = torch.zeros_like(whole, dtype=torch.bool)
        if v is not None:
            given[:, columns[self._strip.over_of(columns)[0]]] = v != 0
        # Neurons with cuts that use their lines there.
        given &= (split == 0) & ~self._short.chords
        short, short_mu, _ = self._short.shortened(split, whole, mu, None, self._spare.expand(len(w)), given)
        return RecordedLeaves.of(split, short, short_mu, self._strip.curves, given)

    def tree(self, parts: Sequence[RecordedLeaves], activations: Sequence[int]) -> Certified:
        """The tree that has these leaves, all of it, of a network whose activations are these nodes."""
        strip, leaves = self._strip, RecordedLeaves.cat(parts)
        chords = self._short.chords.nonzero().squeeze(1).numpy()
        used = np.unique(np.concatenate([chords, leaves.neurons]))
        numbers = np.zeros(strip.folded.size, np.int64)
        numbers[used] = np.arange(len(used))
        neurons = _named(strip.folded.places[used], activations)
        slopes = _slopes(strip.folded, strip.slopes, activations)
        branches, cuts = leaves.written(numbers), _cut_records(strip, activations)
        return Certified(slopes, neurons, numbers[chords].tolist(), branches, cuts)


def worth(folded: Folded, neurons: Tensor, found: Tensor) -> Tensor:
    """What is used of bounds that trees prove of some neurons' intervals: numbers of few digits that certificates have.

    Args:
        folded: the system.
        neurons: (k,) of the system.
        found: (2·k,) proven lower bounds of these neurons, and of their negatives.

    Returns:
        (2·k,) bounds that are a little lower, −inf where they would not gain enough.
    """
    before, width = torch.cat([folded.lower[neurons], -folded.upper[neurons]]), _widths(folded, neurons)
    kinked, spare = ~folded.smooth[neurons].repeat(2), CLEAR_OF_WIDTH * width
    decided = (found >= spare) & kinked
    step = torch.exp2(torch.floor(torch.log2(width)) - _STEP)
    below = torch.floor((found - _GIVEN_UP * (found - before) - spare) / step) * step
    bounds = torch.where(decided, 0.0, below)
    # Of a neuron that is stable nothing else is asked.
    gains = (found - before > _GAIN * width) & (decided | ~decided.roll(len(neurons)))
    return torch.where(gains & (bounds > before), bounds, -torch.inf)


def _widths(folded: Folded, neurons: Tensor) -> Tensor:
    """(2·k,) of the intervals of k neurons, twice."""
    return (folded.upper[neurons] - folded.lower[neurons]).repeat(2)


Raw = tuple[Tensor, Tensor, Tensor]
"""Leaves of intervals: splits (leaves, m), multipliers (leaves, m), and the row that each belongs to (leaves,)."""


@dataclass(frozen=True, eq=False)
class RecordedBound:
    """A bound of one neuron, with the leaves of its tree.

    Attributes:
        row: the neuron's number in its activation, and +1 for a lower bound, −1 for the negative of an upper one.
        value: the bound.
        places: (m, 2) activation and number of each neuron of the tree's relaxation.
        leaves: the tree.
        proved: whether its multipliers, as they are written, prove the bound.
    """

    row: tuple[int, int]
    value: float
    places: np.ndarray
    leaves: RecordedLeaves
    proved: bool


class Refined:
    """Tighter bounds of neurons, each with the leaves of its tree.

    Args:
        activations: the nodes that are activations, in order.

    Attributes:
        records: what is to be written, in the order in which it was proven.
        complete: whether all bounds are proved by what is to be written.
    """

    def __init__(self, activations: Sequence[int]) -> None:
        self._activations = activations
        self.records: list[Tighter] = []
        self.complete = True

    def written(
        self, folded: Folded, neurons: Tensor, strip: TreeRelaxation, leaves: Sequence[Raw], bounds: Tensor
    ) -> list[RecordedBound]:
        """Return what is written of the trees of a few neurons' (k,) intervals.

        The trees' relaxation has 2·k rows, these neurons and then their negatives, and ``bounds``, (2·k,), are to be
        proved (``worth``).
        """
        split, w, objective = (torch.cat(parts) for parts in zip(*leaves, strict=True))
        kept = bounds.isfinite()[objective].nonzero().squeeze(1)
        split, objective = split[kept], objective[kept]
        every, none = torch.ones(strip.folded.size, dtype=torch.bool), torch.zeros(len(kept), 0)
        short = _Short(strip, Proofs(strip, len(bounds)), every)
        aim = (bounds + CLEAR_OF_WIDTH * _widths(folded, neurons))[objective]
        chosen, _, proven = short.shortened(split, w[kept], none, objective, aim)
        proved = proven >= aim
        places, written = strip.folded.places.numpy(), []
        for row in bounds.isfinite().nonzero().squeeze(1).tolist():
            mine = (objective == row).nonzero().squeeze(1)
            side = 1 if row < len(neurons) else -1
            neuron = int(folded.places[neurons[row % len(neurons)], 1])
            part = RecordedLeaves.of(split[mine], chosen[mine], none[mine], strip.curves)
            written.append(RecordedBound((neuron, side), float(bounds[row]), places, part, bool(proved[mine].all())))
        return written

    def close(self, folded: Folded, slopes: Tensor, node: int, bounds: Sequence[RecordedBound]) -> None:
        """Put all bounds of the neurons of activation ``node`` into one record.

        ``folded`` is the system before, and ``slopes``, (m,), are those of its neurons in all trees.
        """
        if not bounds:
            return
        self.complete &= all(bound.proved for bound in bounds)
        key = int(folded.places[:, 1].max()) + 1
        keys = [bound.places[:, 0] * key + bound.places[:, 1] for bound in bounds]
        used = np.unique(np.concatenate(keys))
        neurons = [(self._activations.index(place // key), place % key) for place in used.tolist()]
        trees = [bound.leaves.written(np.searchsorted(used, mine)) for mine, bound in zip(keys, bounds, strict=True)]
        rows, least = np.array([bound.row for bound in bounds]), np.array([bound.value for bound in bounds])
        number = self._activations.index(node)
        before = _slopes(folded, slopes, self._activations[:number])
        chords = [at for at, place in enumerate(used.tolist()) if place // key not in folded.functions]
        self.records.append(Tighter(number, rows, least, before, neurons, chords, trees))


def _slopes(folded: Folded, slopes: Tensor, activations: Sequence[int]) -> np.ndarray:
    """The slopes of all neurons of some activations that a certificate calls open, given those (m,) of a system.

    The neurons of a smooth activation are all open; those that the system has not are lines.
    """
    parts = [np.zeros(0)]
    for node in activations:
        mine = folded.places[:, 0] == node
        own = slopes[mine]
        if node in folded.straight:
            own = (folded.straight[node] * _GRID).round() / _GRID
            own[folded.places[mine, 1]] = slopes[mine]
        parts.append(own.numpy())
    return np.concatenate(parts)


def _cut_records(strip: TreeRelaxation, activations: Sequence[int]) -> list[Plane]:
    """The cuts of a relaxation; neurons are numbered behind all inputs of the network."""
    folded, cuts = strip.folded, strip.cuts
    if cuts is None:
        return []
    numbers = torch.cat([folded.free, len(folded.center) + torch.arange(folded.size)])
    counts = torch.bincount(cuts.entries[0], minlength=len(cuts.neurons)).tolist()
    neurons, terms = _named(folded.places[cuts.neurons], activations), numbers[cuts.entries[1]]
    every = zip(neurons, terms.split(counts), cuts.parts.split(counts), cuts.bends, strict=True)
    return [Plane(neuron, *(part.numpy() for part in parts)) for neuron, *parts in every]


def _named(places: Tensor, activations: Sequence[int]) -> list[tuple[int, int]]:
    """Neurons, given as nodes and neurons, as numbers of activations and neurons."""
    position = {index: number for number, index in enumerate(activations)}
    return [(position[index], neuron) for index, neuron in places.tolist()]


def rounded(values: Tensor, bits: int) -> Tensor:
    """Values (leaves, k), each row rounded to multiples of a power of two: the largest has so many bits."""
    if not values.shape[1]:
        return values
    size = torch.log2(values.abs().amax(1, keepdim=True).clamp(min=LEAST_STEP))
    step = torch.exp2(torch.floor(size) - (bits - 1))
    return (values / step).round() * step
