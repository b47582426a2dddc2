"""Bounds that are proven of one query before anything is split, handed from one method to the next.

A method that bounds the whole box of a query starts from the bounds that are known, tightens them, and hands on the
result (``BoundsCache``). So the steps of ``auto`` compute CROWN's bounds of a query once, and a later one has the
tighter bounds of every earlier one. All of it is proven, with rounding accounted for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from verifiable_relu.ir.interval import Interval


@dataclass(frozen=True, eq=False)
class RootBounds:
    """Bounds that are proven of one query over its whole box; tensors are in float64 on the CPU.

    Attributes:
        intervals: of what feeds nonlinear ops, by the number of the op that feeds, (1, size); infinite where nothing is
            known.
        lower: (polytopes,) lower bounds of the largest row of each polytope of the unsafe set, in the units of the
            property, as ``RowBatch`` counts polytopes; −inf where nothing is proven.
        reached: CROWN has bounded every unstable neuron before the ops up to this one; infinite for all.
        searched: with how many steps slopes have been searched for the bounds of every neuron that CROWN left unstable.
        has_rows: whether ``lower`` is CROWN's over these intervals.
    """

    intervals: Mapping[int, Interval]
    lower: Tensor
    reached: float = -1
    searched: int = 0
    has_rows: bool = False

    @property
    def bytes(self) -> int:
        return self.lower.nbytes + sum(x.lower.nbytes + x.upper.nbytes for x in self.intervals.values())

    def joined(self, other: RootBounds) -> RootBounds:
        """Return what this and other bounds of the same query say together."""
        intervals = {index: x.intersect(other.intervals[index]) for index, x in self.intervals.items()}
        # Of sound bounds over the same box, which has points: one of them is of another query.
        if any(bool((x.lower > x.upper).any()) for x in intervals.values()):
            raise RuntimeError("two bounds of one query exclude each other")
        return RootBounds(
            intervals,
            torch.maximum(self.lower, other.lower),
            max(self.reached, other.reached),
            max(self.searched, other.searched),
            self.has_rows or other.has_rows,
        )


class BoundsCache:
    """Bounds of the queries of a batch, by their numbers.

    All may take ``memory`` bytes together. Bounds for which there is no room are not kept: since every step goes
    through all queries in the same order, dropping the oldest ones would leave each step with those that it needs last.
    """

    def __init__(self, memory: int = 0) -> None:
        self._free = memory
        self._kept: dict[int, RootBounds] = {}

    def get(self, number: int) -> RootBounds | None:
        return self._kept.get(number)

    def drop(self, number: int) -> None:
        """Forget a query, which is decided."""
        if (root := self._kept.pop(number, None)) is not None:
            self._free += root.bytes

    def known(self, numbers: Sequence[int], device: torch.device) -> RootBounds | None:
        """Return what is known of some queries of one network, as one batch on a device; ``lower`` is left out."""
        roots = [self.get(number) for number in numbers]
        given = [root for root in roots if root is not None]
        if not given:
            return None
        intervals = {}
        for index, some in given[0].intervals.items():
            nothing = Interval(torch.full_like(some.lower, -math.inf), torch.full_like(some.upper, math.inf))
            found = [nothing if root is None else root.intervals[index] for root in roots]
            lower, upper = torch.cat([x.lower for x in found]), torch.cat([x.upper for x in found])
            intervals[index] = Interval(lower.to(device), upper.to(device))
        known = [root or RootBounds({}, torch.zeros(0)) for root in roots]
        reached, searched = min(root.reached for root in known), min(root.searched for root in known)
        return RootBounds(intervals, torch.zeros(0), reached, searched, all(root.has_rows for root in known))

    def learn(self, number: int, found: RootBounds) -> Tensor:
        """Take what is proven over the box of a query; returns ``lower`` as it is known altogether."""
        before = self.get(number)
        found = found if before is None else found.joined(before)
        self.drop(number)
        # Of a query that is decided nobody needs bounds any more.
        if found.bytes <= self._free and not bool((found.lower > 0).all()):
            self._free -= found.bytes
            self._kept[number] = found
        return found.lower

    def prove(self, number: int, lower: Mapping[int, float]) -> None:
        """Take proven lower bounds of some polytopes' largest rows, by the polytopes' numbers."""
        if (root := self.get(number)) is not None:
            best = root.lower.clone()
            for polytope, value in lower.items():
                best[polytope] = max(float(best[polytope]), value)
            self._kept[number] = replace(root, lower=best)


NO_BOUNDS = BoundsCache()
"""For methods that are asked by themselves: nothing is known, and nothing is kept."""
