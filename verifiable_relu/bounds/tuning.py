"""What bound propagation passes around, every threshold in one value, and how many rows go together.

No threshold decides whether a bound is sound; each decides how fast it is computed, and some by how much rounding
widens it. The defaults were set with ``benchmarks/speed/bounds_speed.py`` on a CPU. A test, or a device of another
kind, hands in a ``Tuning`` of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from verifiable_relu.network.graph import Network


@dataclass(frozen=True)
class Bounds:
    """Element-wise bounds of a batch: ``lower`` ≤ value ≤ ``upper``, both shaped (batch, *shape)."""

    lower: Tensor
    upper: Tensor

    def flat(self) -> Bounds:
        """The same bounds shaped (batch, neurons)."""
        return Bounds(self.lower.flatten(1), self.upper.flatten(1))


@dataclass(frozen=True)
class Lines:
    """A linear relaxation of an activation f on [l, u], neuron by neuron:

        lower_slope·x + lower_offset ≤ f(x) ≤ upper_slope·x + upper_offset  for all x in [l, u].

    All four are shaped like the bounds that they were made from.
    """

    lower_slope: Tensor
    lower_offset: Tensor
    upper_slope: Tensor
    upper_offset: Tensor

    def parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All four, in this order."""
        return self.lower_slope, self.lower_offset, self.upper_slope, self.upper_offset


MEMORY = 1 << 30
"""Bytes of coefficients that a method may hold at once by default."""


@dataclass(frozen=True)
class Tuning:
    """When bound propagation takes which of two ways to the same bounds.

    Attributes:
        float32: whether coefficients and sums may be in float32 where rounding of float32 is accounted for.
        windows: whether rows of neurons of a convolution are kept in the window of the image that they see.
        restrict: whether rows leave out neurons of a ReLU that are inactive, in dense layers.

        chunk_bytes: bytes of coefficients propagated at once on a CPU: what stays in the cache goes faster.
        copies: arrays of a chunk's coefficients that are alive at once at the widest node.
        windowed_copies: the same for rows in windows, which take a part of the memory of whole rows.

        active_share: rows are restricted to neurons that may be active up to this share of them.
        window_share: windows are used up to this share of the image's area.
        window_start: whole rows that are zero but for such a share become windows.

        float32_depth: terms that sums in float32 of the first convolutions may have together: these take most of the
            time and move bounds least, in the networks of the benchmark by at most 1e-4 of their width.
        float32_inputs: from so many inputs on the coefficients of the inputs alone are taken in float32 ...
        float32_neurons: ... behind a first dense layer of at most so many neurons.

        sum_length: least numbers added one after another in a float32 sum of many: fewer take more time, more err more.

        search_bytes: bytes that the search for slopes (α-CROWN) holds at once; more gain nothing.
        search_copies: arrays of every activation's size that the search holds for each row.
        search_pairs: of a product that is a sum of more products of two numbers, in all its outputs, planes are not
            searched for.
    """

    float32: bool = True
    windows: bool = True
    restrict: bool = True

    chunk_bytes: int = 1 << 24
    copies: float = 6
    windowed_copies: float = 2

    active_share: float = 0.75
    window_share: float = 0.5
    window_start: float = 0.1

    float32_depth: int = 192
    float32_inputs: int = 256
    float32_neurons: int = 256

    sum_length: int = 96

    search_bytes: int = 1 << 28
    search_copies: int = 13
    search_pairs: int = 1 << 16


TUNING = Tuning()
"""The defaults."""

PLAIN = Tuning(float32=False, windows=False, restrict=False)
"""Without any acceleration."""


def chunk_size(
    network: Network, like: Tensor, memory: int, tuning: Tuning, copies: float | None = None, first: int = 0
) -> int:
    """How many rows may be propagated at once.

    Args:
        network: the network.
        like: a tensor of the dtype and on the device of the rows.
        memory: a limit in bytes on the coefficients held at once.
        tuning: of the size of chunks.
        copies: how many arrays of coefficients are alive at once; by default those of dense rows.
        first: the node to which rows are pulled back.
    """
    limit = min(memory, tuning.chunk_bytes) if like.device.type == "cpu" else memory
    each = network.widest[first] * like.element_size() * (tuning.copies if copies is None else copies)
    return max(1, int(limit / each))


def groups(
    count: int, sample: Tensor | None, size: int, samples: int
) -> Iterator[tuple[Tensor | slice, Tensor | None]]:
    """Rows in chunks of at most ``size``, each of some groups of equal size.

    Args:
        count: R, how many rows there are.
        sample: (R,) the sample of each row, in any order; None where there is one, or where all rows fit that come in
            turn, equally many of every sample.
        size: at least 1.
        samples: how many there are.

    Yields:
        The rows, group after group, as an index, a group's last one repeated where it has too few; and (groups,) the
        sample of each, None for every sample, one after another.
    """
    if not count:
        return
    if samples == 1:
        for start in range(0, count, size):
            yield slice(start, start + size), None
        return
    if count <= size:
        every = torch.arange(samples, device=None if sample is None else sample.device)
        if sample is None or torch.equal(sample, every.repeat_interleave(count // samples)):
            yield slice(0, count), None
            return
    assert sample is not None
    order = sample.argsort(stable=True)
    counts = torch.bincount(sample).tolist()
    begin, pieces = 0, []
    for which, number in enumerate(counts):
        parts = -(-number // size)
        for part_of in range(parts):
            first, end = number * part_of // parts, number * (part_of + 1) // parts
            pieces.append((end - first, begin + first, which))
        begin += number
    # Neighbours of nearly equal size leave little to repeat.
    pieces.sort()
    while pieces:
        taken = 1
        while taken < len(pieces) and (taken + 1) * pieces[taken][0] <= size:
            taken += 1
        longest = pieces[taken - 1][0]
        lengths, starts, mine = torch.tensor(pieces[:taken], device=sample.device).unbind(1)
        del pieces[:taken]
        place = torch.minimum(torch.arange(longest, device=sample.device), lengths[:, None] - 1)
        yield order[starts[:, None] + place].flatten(), mine
