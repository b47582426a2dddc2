"""Sums of products, in float64 as a library takes them, in float32 in short lines so that few errors add up.

A float32 sum of n numbers is taken as ``lines`` partial sums of ``length`` numbers each, lines·length = n; a product
then takes part in at most lines + length additions instead of n.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from verifiable_relu.bounds.tuning import Tuning


@cache
def lines(count: int, least: int) -> tuple[int, int]:
    """How ``count`` numbers are summed in float32: in how many partial sums of how many numbers each."""
    length = next(n for n in range(min(count, least), count + 1) if count % n == 0)
    return count // length, length


@cache
def steps(count: int, least: int) -> tuple[int, int]:
    """The two steps in which ``count`` partial sums are summed: (1, count), one step, below ``least`` of them."""
    first = next(n for n in range(math.isqrt(count), 0, -1) if count % n == 0)
    return (first, count // first) if count >= least else (1, count)


def depth(count: int, tuning: Tuning) -> int:
    """In how many float32 additions a product takes part where ``count`` products are summed and added to a total."""
    return sum(lines(count, tuning.sum_length)) + 4


def deepest(count: int) -> int:
    """The largest ``depth`` of sums of up to ``count`` products: a prime number of them is summed in one line."""
    return 1 + count + 4


def last_axes(products: Tensor, axes: int, tuning: Tuning) -> Tensor:
    """The sums of products along so many last axes."""
    products = products.flatten(-axes)
    if products.dtype == torch.float64 or not products.shape[-1]:
        return products.sum(-1)
    many, length = lines(products.shape[-1], tuning.sum_length)
    return products.view(*products.shape[:-1], many, length).sum(-1).sum(-1) if many > 1 else products.sum(-1)


def dot(a: Tensor, values: Tensor, before: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """a·values of every row of every group.

    Args:
        a: (groups, each, n), rows in groups of equal size.
        values: (groups, n), or (1, n) for every group.
        before: another pair of the same shapes, whose product comes first in the sum.

    Returns:
        (groups, each).
    """
    if a.shape[0] > 1 == values.shape[0]:
        one = before and (before[0].flatten(0, 1).unsqueeze(0), before[1])
        return dot(a.flatten(0, 1).unsqueeze(0), values, one).view(a.shape[:2])
    if a.shape[0] > 1 == a.shape[1]:
        found = (a.squeeze(1) * values).sum(1, keepdim=True)
        return found if before is None else dot(*before) + found
    return _products(a, values, before and _products(*before)).flatten(1)


def _products(a: Tensor, values: Tensor, start: Tensor | None = None) -> Tensor:
    """``start`` + a·values, (1, each, 1) of one group, (groups, 1, each) of several."""
    # A column is faster, but not in several groups.
    first, second = (a, values.unsqueeze(2)) if a.shape[0] == 1 else (values.unsqueeze(1), a.mT)
    return torch.bmm(first, second) if start is None else torch.baddbmm(start, first, second)
