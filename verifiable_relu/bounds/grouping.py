"""Rows of many samples in groups of equal size, each of one sample, and in chunks that fit in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Sizes of groups that are considered."""

_GROUP_COST = 1.5
"""The work of a group in units of that of a row: its sample's vectors are copied once for it."""


@dataclass(frozen=True, eq=False)
class Grouping:
    """Rows in groups of equal size; a group with too few rows repeats its last one.

    Attributes:
        rows: (groups, each) numbers of rows.
        key: (groups,) what the rows of each group have in common.
    """

    rows: Tensor
    key: Tensor

    @staticmethod
    def by_key(key: Tensor, keys: int, most: int) -> Grouping:
        """Return groups of rows with equal keys.

        Args:
            key: (rows,) numbers from 0 to ``keys`` − 1, in any order.
            keys: how many there may be.
            most: the largest size of a group.
        """
        count = len(key)
        if keys == 1:
            each = -(-count // -(-count // most))
            groups = -(-count // each)
            rows = torch.arange(groups * each, device=key.device).clamp(max=count - 1)
            return Grouping(rows.view(groups, each), key.new_zeros(groups))
        counts = torch.bincount(key, minlength=keys)
        sizes = [size for size in _SIZES if size <= most] or [1]
        costs = torch.stack([-(-counts // size).sum() * (size + _GROUP_COST) for size in sizes])
        # One synchronisation with the device for each layer, not for each chunk.
        each = sizes[int(costs.argmin())]
        pieces = -(-counts // each)
        groups_key = torch.repeat_interleave(torch.arange(keys, device=key.device), pieces)
        first = counts.cumsum(0) - counts
        number = torch.arange(len(groups_key), device=key.device) - (pieces.cumsum(0) - pieces)[groups_key]
        place = number[:, None] * each + torch.arange(each, device=key.device)
        place = torch.minimum(place, (counts[groups_key] - 1)[:, None]) + first[groups_key][:, None]
        order = key.argsort(stable=True)
        return Grouping(order[place], groups_key)

    def chunks(self, rows: int) -> Iterator[Grouping]:
        """Yield groups of at most ``rows`` rows together, or one group."""
        size = max(1, rows // self.rows.shape[1])
        for first in range(0, len(self.rows), size):
            yield Grouping(self.rows[first : first + size], self.key[first : first + size])
