"""Bounds that are proven of one query before anything is split, handed from one verifier to the next.

A verifier that bounds the whole box of a query starts from the bounds that are known, tightens them, and hands on the
result (``BoundsCache``). So the stages of ``auto`` compute CROWN's bounds of a query once, and a later one has the
tighter bounds of every earlier one.

All of it is proven, with rounding accounted for: bounds from arithmetic whose rounding errors are not
covered (``rounding.covers``) are neither handed on nor mixed with such bounds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from verifiable_relu.bounds import Bounds, Relaxation, crown_relaxation
from verifiable_relu.bounds.crown import Search
from verifiable_relu.bounds.forward import intersect
from verifiable_relu.bounds.rounding import covers
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Node
from verifiable_relu.spec.row_batch import RowBatch


@dataclass(frozen=True, eq=False)
class RootBounds:
    """Bounds that are proven of one query, or of each of a batch of queries, over its whole box.

    Attributes:
        pre: bounds of every activation's input, by the activation's node index, (queries, *shape) in float64; infinite
            where nothing is known.
        lower: (polytopes,) lower bounds of the largest row of each polytope of the unsafe set, in the units of the
            property and as ``RowBatch`` counts polytopes; −inf where nothing is proven.
        reached: up to this node CROWN has bounded every unstable neuron, so that it need not do so again; infinite
            where it has bounded all.
        searched: with how many steps slopes have been searched for the bounds of every neuron that CROWN left unstable.
    """

    pre: Mapping[int, Bounds]
    lower: Tensor
    reached: float
    searched: int

    @property
    def bounded(self) -> bool:
        """True if CROWN has bounded every unstable neuron."""
        return self.reached == math.inf

    @property
    def bytes(self) -> int:
        """The memory that the bounds take."""
        return self.lower.nbytes + sum(b.lower.nbytes + b.upper.nbytes for b in self.pre.values())


class BoundsCache:
    """Bounds of the queries of a batch, by their numbers.

    Bounds for which there is no room are not kept, and whoever needs them computes them again: since every stage goes
    through all queries in the same order, dropping the oldest ones instead would leave each stage with those that it
    needs last.

    Args:
        memory: bytes that all bounds may take together; with 0 nothing is handed on.
    """

    def __init__(self, memory: int = 0) -> None:
        self._free = memory
        self._kept: dict[int, RootBounds] = {}

    def get(self, number: int) -> RootBounds | None:
        """Return the bounds of a query, if there are any."""
        return self._kept.get(number)

    def drop(self, number: int) -> None:
        """Forget a query, which is decided."""
        root = self._kept.pop(number, None)
        if root is not None:
            self._free += root.bytes

    def known(self, numbers: Sequence[int], network: Network, like: Tensor) -> RootBounds | None:
        """Return what is known of the boxes of some queries of one network; None if nothing is, or may be used.

        Args:
            numbers: of the queries.
            network: their network, as it is to be bounded.
            like: a tensor of the dtype and on the device of the boxes.
        """
        roots = [self.get(number) for number in numbers]
        if not any(roots) or not _shared(network, like):
            return None
        pre = {}
        for index in sorted(set().union(*(root.pre for root in roots if root is not None))):
            shape = (1, *network.nodes[network.nodes[index].inputs[0]].shape)
            free = torch.full(shape, torch.inf, dtype=torch.float64)
            found = [Bounds(-free, free) if root is None else root.pre[index] for root in roots]
            ends = (torch.cat([b.lower for b in found]), torch.cat([b.upper for b in found]))
            pre[index] = Bounds(*(end.to(like) for end in ends))
        reached = min(-1 if root is None else root.reached for root in roots)
        searched = min(0 if root is None else root.searched for root in roots)
        # Bounds of the properties' rows are put together where they are learnt.
        return RootBounds(pre, torch.zeros(0, dtype=torch.float64), reached, searched)

    def learn(
        self,
        numbers: Sequence[int],
        network: Network,
        pre: Mapping[int, Bounds],
        rows: RowBatch,
        values: Tensor,
        *,
        reached: float,
        searched: int = 0,
    ) -> Tensor:
        """Take what a verifier has proven over the boxes of a batch of queries, and tell what is proven altogether.

        Args:
            numbers: of the queries of the batch.
            network: the network that was bounded.
            pre, reached, searched: as ``RootBounds`` has them.
            rows: the rows of the queries' properties, in the order of the queries.
            values: (rows,) proven lower bounds of matrix·y − bound of ``rows``, in float64 on the CPU.

        Returns:
            (polytopes,) for each polytope of ``rows`` the best lower bound known of its largest row, in the
            property's units; −inf where nothing is known.
        """
        lower = rows.largest(torch.where(values.isnan(), -torch.inf, values))
        if not pre or not _shared(network, next(iter(pre.values())).lower):
            return lower
        parts = [lower[:0]]
        with torch.inference_mode(False):
            for sample, (number, mine) in enumerate(zip(numbers, lower.split(rows.polytopes), strict=True)):
                before = self.get(number)
                best = mine.clone() if before is None else torch.maximum(mine, before.lower)
                parts.append(best)
                # Of a query that is decided nobody needs bounds any more.
                self.drop(number)
                if not bool((best > 0).all()):
                    own = {i: _copy(b, sample) for i, b in pre.items()}
                    root = RootBounds(own, best, reached, searched)
                    if before is not None:
                        own = {i: _both(network.nodes[i], b, before.pre[i]) for i, b in own.items()}
                        root = RootBounds(own, best, max(reached, before.reached), max(searched, before.searched))
                    if root.bytes <= self._free:
                        self._free -= root.bytes
                        self._kept[number] = root
        return torch.cat(parts)

    def prove(self, number: int, lower: Mapping[int, float]) -> None:
        """Take proven lower bounds of some polytopes' largest rows, by the polytopes' numbers in ``RowBatch``."""
        root = self.get(number)
        if root is not None:
            best = root.lower.clone()
            for polytope, value in lower.items():
                best[polytope] = max(float(best[polytope]), value)
            self._kept[number] = replace(root, lower=best)


NO_BOUNDS = BoundsCache()
"""For verifiers that are asked by themselves: nothing is known, and nothing is kept."""


def _shared(network: Network, like: Tensor) -> bool:
    """Return True if bounds of the network in the dtype and on the device of a tensor may be kept."""
    return like.dtype == torch.float64 and covers(network, like.dtype, like.device)


def _copy(bounds: Bounds, sample: int) -> Bounds:
    """Return a copy of one sample's bounds on the CPU, which keeps no other sample's in memory.

    NaN, of which nothing is known, becomes infinite.
    """
    lower, upper = (end.detach()[sample : sample + 1].cpu() for end in (bounds.lower, bounds.upper))
    return Bounds(torch.where(lower.isnan(), -torch.inf, lower), torch.where(upper.isnan(), torch.inf, upper))


def _both(node: Node, first: Bounds, second: Bounds) -> Bounds:
    """Intersect two bounds of the input of an activation.

    Raises:
        RuntimeError: if they leave nothing of some neuron. Sound bounds over the same box, which has points, cannot do
            that: one of them is of another query.
    """
    both = intersect(first, second)
    if bool((both.lower > both.upper).any()):
        raise RuntimeError(f"two bounds before node '{node.name}' ({node.op}) exclude each other")
    return both


def relaxation(
    network: Network,
    box: Bounds,
    known: RootBounds | None,
    *,
    search: Search | None = None,
    steps: int = 0,
    **options: Any,
) -> Relaxation:
    """Make a relaxation with CROWN's bounds of every unstable neuron, or with better ones that are known.

    Args:
        network: in the dtype and on the device of ``box``.
        box: the whole boxes of some queries, shaped (batch, *input_shape).
        known: what is known of these queries. What CROWN, or the search, has done before is not done again.
        search: better bounds of neurons that CROWN leaves unstable (``bounds.neurons``), by ``steps`` steps.
        options: of ``crown_relaxation``.

    Raises:
        RuntimeError: if what is known leaves nothing of some box, as bounds of another query would.
    """
    if known is None:
        return crown_relaxation(network, box, search=search, **options)
    search = None if known.searched >= steps else search
    options |= {"crown": not known.bounded, "done": known.reached, "search": search}
    found = crown_relaxation(network, box, known=known.pre, **options)
    if bool(found.nodes.empty().any()):
        raise RuntimeError(f"bounds that are known of the network '{network.name}' exclude those by intervals")
    return found
