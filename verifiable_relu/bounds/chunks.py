"""Rows in chunks that fit into memory, each of groups of equal size."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from verifiable_relu.bounds.tuning import Tuning
from verifiable_relu.network.graph import Network


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
    count: int, sample: Tensor | None, size: int, samples: int, digits: int | None = None
) -> Iterator[tuple[Tensor | slice, Tensor | None]]:
    """Rows in chunks of at most ``size``, each of some groups of equal size.

    Args:
        count: R, how many rows there are.
        sample: (R,) the sample of each row, in any order; None where there is one, or where all rows fit that come in
            turn, equally many of every sample.
        size: at least 1.
        samples: how many there are.
        digits: so many first binary digits alone of the number of rows in a group may differ from 0, where there are
            several samples: chunks then have few different sizes, and with 5 digits grow by at most 1/16. By default
            the number is not rounded.

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
    if count <= size and (sample is None or in_turn(sample, samples)):
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
        if digits is not None:
            taken -= taken % _last_digit(taken, 2)
        longest = pieces[taken - 1][0]
        if digits is not None:
            longest += -longest % _last_digit(longest, digits)
        lengths, starts, mine = torch.tensor(pieces[:taken], device=sample.device).unbind(1)
        del pieces[:taken]
        place = torch.minimum(torch.arange(longest, device=sample.device), lengths[:, None] - 1)
        yield order[starts[:, None] + place].flatten(), mine


def _last_digit(number: int, digits: int) -> int:
    """The power of two that the last of so many first binary digits of a number stands for."""
    return 1 << max(0, number.bit_length() - digits)


def in_turn(sample: Tensor, samples: int) -> bool:
    """Whether equally many rows of every sample come, one sample after another."""
    each, more = divmod(sample.shape[0], samples)
    return not more and torch.equal(sample, torch.arange(samples, device=sample.device).repeat_interleave(each))
