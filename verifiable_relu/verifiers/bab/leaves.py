"""The leaves of a tree, as a certificate has them (``trust.certificate``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from verifiable_relu.trust.certificate import Branches, Leaf
from verifiable_relu.verifiers.bab.curves import SEGMENTS, Curves


@dataclass(frozen=True, eq=False)
class Leaves:
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
    def of(split: Tensor, w: Tensor, mu: Tensor, curves: Curves | None, zeros: Tensor | None = None) -> Leaves:
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
        return Leaves(*(part.numpy() for part in parts))

    @property
    def neurons(self) -> np.ndarray:
        """The neurons that are split or have multipliers, some of them several times."""
        return np.concatenate([self.cuts[:, 1], self.places[:, 1]])

    @staticmethod
    def cat(parts: Sequence[Leaves]) -> Leaves:
        """All leaves of several."""
        starts = np.cumsum([0, *(len(part.mu) for part in parts)])

        def moved(name: str) -> np.ndarray:
            arrays = [getattr(part, name).copy() for part in parts]
            for start, array in zip(starts, arrays, strict=False):
                array[:, 0] += start
            return np.concatenate(arrays)

        rest = (np.concatenate([getattr(part, name) for part in parts]) for name in ("sides", "points", "values", "mu"))
        sides, points, values, mu = rest
        return Leaves(moved("cuts"), sides, points, moved("places"), values, mu)

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
