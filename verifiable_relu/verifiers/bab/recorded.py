"""The leaves of trees, recorded as they are closed, with multipliers of few digits (``trust.certificate``).

A leaf gives multipliers w to few of its neurons. Some of the others have the one that makes the chord the line over
the activation, K·(chord − t) where the coefficient K wants the activation to be as large as it can be: whoever checks
the leaf computes it, from the last layer to the first (``completed``). What a leaf proves is always computed anew with
the multipliers that are written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from verifiable_relu.trust.certificate import Leaf, Tighter
from verifiable_relu.trust.certificate import Tree as Certified
from verifiable_relu.verifiers.bab.folded import Folded
from verifiable_relu.verifiers.bab.proof import Proofs, of_rows
from verifiable_relu.verifiers.bab.strip import Strip

_BITS = (0, 10, 24, 52)
"""How many bits the largest multiplier of a leaf has: the fewest with which the leaf is still proven are taken; with 0
bits neurons that are not split have no multiplier but the chord's, and those that are split have those of 10 bits."""

_SPARE = 1e-11
"""What a leaf proves is to be above this part of the objective's size: others compute it with other rounding."""

_GAIN = 0.01
"""A neuron's bound is recorded if it makes the interval narrower by this part of it, at least."""

_GIVEN_UP = 0.02
"""The part of what a tighter bound gains that may be given up for shorter multipliers."""

_STEP = 16
"""Tighter bounds are multiples of 2 to the power of minus this of their intervals' widths, about."""


@dataclass(frozen=True, eq=False)
class _Leaves:
    """Leaves with their multipliers: places (leaf, neuron) of splits and of multipliers, and both; μ (leaves, rows)."""

    splits: np.ndarray
    sides: np.ndarray
    places: np.ndarray
    values: np.ndarray
    mu: np.ndarray

    @staticmethod
    def of(split: Tensor, w: Tensor, mu: Tensor) -> _Leaves:
        """From (leaves, neurons) splits, and multipliers that are zero where they are not written."""
        places = w.nonzero()
        values = w[places[:, 0], places[:, 1]].numpy()
        splits, sides = split.nonzero().numpy(), split[split != 0].numpy()
        return _Leaves(splits, sides, places.numpy(), values, mu.numpy())

    def written(self, numbers: np.ndarray) -> list[Leaf]:
        """As a certificate has them; ``numbers``: (neurons,) the number that each neuron has there."""
        starts = np.arange(len(self.mu) + 1)
        splits_of, values_of = (np.searchsorted(places[:, 0], starts) for places in (self.splits, self.places))
        of_split, of_value = numbers[self.splits[:, 1]], numbers[self.places[:, 1]]
        leaves = []
        for at, row in enumerate(np.concatenate([np.ones((len(self.mu), 1)), self.mu], 1)):
            mine, own = slice(*splits_of[at : at + 2]), slice(*values_of[at : at + 2])
            leaves.append(Leaf(of_split[mine], self.sides[mine], of_value[own], self.values[own], row))
        return leaves


class _Short:
    """Multipliers of leaves of one relaxation, made as short as what the leaves are to prove allows.

    Args:
        strip: the relaxation.
        proofs: what proves its leaves.
        chords: (m,) bool, the neurons that have the chord's multiplier where none is given.
    """

    def __init__(self, strip: Strip, proofs: Proofs, chords: Tensor) -> None:
        folded = strip.folded
        self._strip, self._proofs, self.chords = strip, proofs, chords
        chord = (folded.upper - folded.slope * folded.lower) / (folded.upper - folded.lower)
        self._rate = (chord - strip.slopes) / strip.width
        self._every = torch.arange(folded.size)

    def completed(self, split: Tensor, w: Tensor, mu: Tensor, objective: Tensor | None) -> Tensor:
        """(leaves, m) multipliers with the chord's where they are zero and the neuron is in ``chords``, and not split.

        The arguments are those of ``Proofs.lower``, with all columns.
        """
        strip = self._strip
        n, free = strip.folded.inputs, self.chords & (split == 0) & (w == 0)
        q = of_rows(mu, objective, self._proofs.objectives) @ strip.rows.matrix[:, n:]
        w = w.clone()
        for start, end in reversed(strip.folded.blocks):
            mine = q[:, start:end]
            by_chord = free[:, start:end] & (mine < 0)
            w[:, start:end] = torch.where(by_chord, mine * self._rate[start:end], w[:, start:end])
            q[:, :start] += w[:, start:end] @ strip.neurons.matrix[start:end, n : n + start]
        return w

    def shortened(
        self, split: Tensor, w: Tensor, mu: Tensor, objective: Tensor | None, aim: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Multipliers (leaves, m) to be written and μ with which each leaf proves its aim, and what it proves.

        With the most digits a leaf may prove less than its aim.
        """
        w, mu = w.double(), mu.double().clamp(min=0)
        q_free = self.chords & (split == 0)
        # What the chord's multiplier makes unnecessary.
        implied = q_free & (self.completed(split, torch.where(q_free, 0.0, w), mu, objective) != 0)
        w = torch.where(implied, 0.0, w)
        found, found_mu, proven = torch.zeros_like(w), mu.clone(), torch.full((len(w),), -torch.inf).double()
        left = torch.arange(len(w))
        for bits in _BITS:
            given = torch.where(q_free[left], 0.0, w[left]) if not bits else w[left]
            short, short_mu = rounded(given, bits or _BITS[1]), rounded(mu[left], bits or _BITS[1])
            own = None if objective is None else objective[left]
            whole = self.completed(split[left], short, short_mu, own)
            value = self._proofs.lower(split[left], self._every, whole, short_mu, own)
            value = torch.where(value.isfinite(), value, -torch.inf)
            better = value > proven[left]
            chosen = left[better]
            found[chosen], found_mu[chosen], proven[chosen] = short[better], short_mu[better], value[better]
            left = left[~(proven[left] > aim[left])]
            if not len(left):
                break
        return found, found_mu, proven


class Recorded:
    """The leaves of the tree of a polytope.

    Args:
        strip: the tree's relaxation.
        proofs: what proves its nodes.
        adaptive: (m,) bool, the neurons that have adaptive lines while they are open.
    """

    def __init__(self, strip: Strip, proofs: Proofs, adaptive: Tensor) -> None:
        self._strip, self._short = strip, _Short(strip, proofs, adaptive)
        self._spare = _SPARE * (strip.rows.matrix[0].abs().sum() + strip.rows.constant[0].abs())
        self._parts: list[_Leaves] = []

    def closed(self, split: Tensor, columns: Tensor, w: Tensor, mu: Tensor) -> None:
        """Take nodes that are proven; the arguments are those of ``Proofs.lower``."""
        whole = torch.zeros(len(w), self._strip.folded.size, dtype=torch.float64)
        whole[:, columns] = w.double()
        short, short_mu, _ = self._short.shortened(split, whole, mu, None, self._spare.expand(len(w)))
        self._parts.append(_Leaves.of(split, short, short_mu))

    def tree(self, activations: Sequence[int]) -> Certified:
        """The tree, all of whose leaves have been recorded, of a network whose activations are these nodes."""
        chords = self._short.chords.nonzero().squeeze(1).numpy()
        used = np.unique(
            np.concatenate([chords, *(p[:, 1] for part in self._parts for p in (part.splits, part.places))])
        )
        numbers = np.zeros(self._strip.folded.size, np.int64)
        numbers[used] = np.arange(len(used))
        leaves = [leaf for part in self._parts for leaf in part.written(numbers)]
        neurons = _named(self._strip.folded.places[used], activations)
        return Certified(self._strip.slopes.numpy(), neurons, numbers[chords].tolist(), leaves)


class Refined:
    """Tighter bounds of neurons, each with the leaves of its tree.

    Args:
        activations: the nodes that are activations, in order.

    Attributes:
        records: what is to be written, in the order in which it was proven.
    """

    def __init__(self, activations: Sequence[int]) -> None:
        self._activations = activations
        self._bounds: list[tuple[tuple[int, int], float, np.ndarray, _Leaves]] = []
        self.records: list[Tighter] = []

    def take(
        self, folded: Folded, neurons: Tensor, strip: Strip, leaves: tuple[Tensor, Tensor, Tensor], found: Tensor
    ) -> Tensor:
        """Take the trees of a few neurons' intervals.

        Args:
            folded: the system.
            neurons: (k,) of the system.
            strip: the trees' relaxation, whose 2·k rows are these neurons and then their negatives.
            leaves: splits (leaves, m) of the relaxation's m neurons, their multipliers, and each leaf's row.
            found: (2·k,) what the trees prove.

        Returns:
            (2·k,) the lower bounds that are recorded; −inf where none is.
        """
        split, w, objective = leaves
        lower, upper = folded.lower[neurons], folded.upper[neurons]
        before, width = torch.cat([lower, -upper]), (upper - lower).repeat(2)
        decided = found >= 0
        # Of a neuron that is stable nothing else is asked.
        wanted = (found - before > _GAIN * width) & (decided | ~decided.roll(len(neurons)))
        found = torch.where(wanted, found.clamp(max=0), -torch.inf)
        aim = torch.where(decided, 0.0, found - _GIVEN_UP * (found - before))
        kept = wanted[objective].nonzero().squeeze(1)
        bounds = torch.full_like(found, -torch.inf)
        if not len(kept):
            return bounds
        split, objective = split[kept], objective[kept]
        every = torch.ones(strip.folded.size, dtype=torch.bool)
        none = torch.zeros(len(kept), 0)
        spare = 2.0**-30 * width
        short, _, proven = _Short(strip, Proofs(strip, len(found)), every).shortened(
            split, w[kept], none, objective, (aim + spare)[objective]
        )
        least = torch.full_like(found, torch.inf).scatter_reduce(0, objective, proven, "amin") - spare
        step = torch.exp2(torch.floor(torch.log2(width)) - _STEP)
        rounded_ = torch.where(least >= 0, 0.0, torch.floor(least / step) * step)
        bounds = torch.where(wanted & (rounded_ > before), rounded_, bounds)
        places = strip.folded.places.numpy()
        for row in bounds.isfinite().nonzero().squeeze(1).tolist():
            mine = (objective == row).nonzero().squeeze(1)
            side = 1 if row < len(neurons) else -1
            neuron = int(folded.places[neurons[row % len(neurons)], 1])
            part = _Leaves.of(split[mine], short[mine], torch.zeros(len(mine), 0))
            self._bounds.append(((neuron, side), float(bounds[row]), places, part))
        return bounds

    def close(self, folded: Folded, slopes: Tensor, node: int) -> None:
        """Put what was taken of one activation into one record.

        Args:
            folded: the system before.
            slopes: (m,) of its neurons, those of all trees.
            node: the activation.
        """
        if not self._bounds:
            return
        key = int(folded.places[:, 1].max()) + 1
        keys = [places[:, 0] * key + places[:, 1] for _, _, places, _ in self._bounds]
        used = np.unique(np.concatenate(keys))
        neurons = [(self._activations.index(place // key), place % key) for place in used.tolist()]
        trees = [part.written(np.searchsorted(used, mine)) for mine, (*_, part) in zip(keys, self._bounds, strict=True)]
        rows, least = np.array([row for row, *_ in self._bounds]), np.array([value for _, value, *_ in self._bounds])
        before = slopes[folded.places[:, 0] < node].numpy()
        number = self._activations.index(node)
        self.records.append(Tighter(number, rows, least, before, neurons, range(len(neurons)), trees))
        self._bounds = []


def _named(places: Tensor, activations: Sequence[int]) -> list[tuple[int, int]]:
    """Neurons, given as nodes and neurons, as numbers of activations and neurons."""
    position = {index: number for number, index in enumerate(activations)}
    return [(position[index], neuron) for index, neuron in places.tolist()]


def rounded(values: Tensor, bits: int) -> Tensor:
    """Values (leaves, k), each row rounded to multiples of a power of two: the largest has so many bits."""
    if not values.shape[1]:
        return values
    size = values.abs().amax(1, keepdim=True).clamp(min=2.0**-800)
    step = torch.exp2(torch.floor(torch.log2(size)) - (bits - 1))
    return (values / step).round() * step
