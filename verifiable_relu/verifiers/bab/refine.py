"""Tighter bounds of unstable neurons' pre-activations, by branch and bound for each of them.

In a deep network most of what a bound loses, it loses in the intervals of the pre-activations: these are bounded layer
by layer, each over relaxations of all layers before it. Here each side of each interval is a small tree of its own,
over the phases of the neurons before it. Some tens of leaves close a good part of the distance to the exact interval;
neurons that become stable leave the system, and every later layer is bounded over the tighter ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from verifiable_relu.verifiers.bab.ascent import Ascent, Batch, Bounded
from verifiable_relu.verifiers.bab.folded import Folded, Rows
from verifiable_relu.verifiers.bab.limits import Limits
from verifiable_relu.verifiers.bab.proof import Proofs
from verifiable_relu.verifiers.bab.recorded import Bound, Refined
from verifiable_relu.verifiers.bab.strip import Slopes, Strip
from verifiable_relu.verifiers.copies import at_once

_WORKING = 1 << 27
"""Bytes that the trees searched at once may take."""

_LARGE = 4
"""Neurons of one group that a process is dealt, at least, where others get some of this group, too."""

_CALL = 1e7
"""Multiplications that could be done in the time that the calls of one step of an ascent take."""


@dataclass(frozen=True)
class Refinement:
    """How the bounds of neurons are refined.

    Attributes:
        leaves: at most, of the tree of one side of one interval, in a layer that no later one takes more work than.
        earlier: at most so many times as many leaves have the trees of a layer, as many as make its work equal to that
            of the later layer that takes the most: every later layer gains from tighter bounds of an earlier one.
        first: steps of the ascent at the root of each tree.
        steps: likewise at every other node.
        batch: about how many nodes are split at once.
        worthwhile: a leaf is closed where less than this part of the distance between the root's bound and a value
            that is attained is left.
    """

    leaves: int = 8
    earlier: int = 16
    first: int = 20
    steps: int = 6
    batch: int = 256
    worthwhile: float = 0.05

    def work(self, folded: Folded) -> float:
        """About how many multiplications a refinement takes, what it costs to call them included."""
        support = folded.support(folded.neurons)
        total = 0.0
        for node, mine in _layers(folded).items():
            leaves = self._leaves(folded, node)
            for part in _alike(support[mine]):
                before = int(support[mine[part[0]]].sum())
                if before:
                    nodes = 4 * len(part) * leaves
                    calls = max(nodes / self.batch, math.log2(leaves) + 1)
                    each = 2 * before * (folded.inputs + before)
                    total += (self.steps + 1) * (nodes * each + calls * _CALL)
        return total

    def _leaves(self, folded: Folded, node: int) -> int:
        """The leaves of each tree of one layer."""
        # One leaf of every tree costs a product of the layer's neurons, those before it, and all that these depend on.
        each = {layer: len(m) * int(m[0]) * (folded.inputs + int(m[0])) for layer, m in _layers(folded).items()}
        most = max(work for layer, work in each.items() if layer >= node)
        return round(self.leaves * min(self.earlier, most / max(1, each[node])))

    def refine(self, folded: Folded, rows: Rows, limits: Limits, record: Refined | None = None) -> tuple[Folded, Rows]:
        """The system with bounds that are refined, layer after layer, and rows expressed by it.

        Once no time is left, the rest of the neurons keep their bounds. With ``record``, bounds are those that it
        records.
        """
        processes = 1 if folded.functions or self.work(folded) < limits.alone else limits.processes
        for node in _layers(folded):
            mine = _layers(folded)[node]
            # What depends on no other neuron has its exact interval.
            mine = mine[(folded.neurons.neurons[mine] != 0).any(1)]
            if limits.over() or not len(mine):
                continue
            options = replace(self, leaves=self._leaves(folded, node))
            groups = [mine[part] for part in _alike(folded.support(folded.neurons[mine]))]
            shares = [
                partial(options._share, folded, share, limits, record) for share in _dealt(groups, processes) if share
            ]
            found = at_once(shares, limits.left, whole=True)
            lower, upper, written = folded.lower.clone(), folded.upper.clone(), []
            for share, one in zip(shares, found, strict=True):
                # Where a process has failed, this one does its share.
                for chosen, least, bounds in one or share(limits.over):
                    lower[chosen] = torch.maximum(lower[chosen], least[: len(chosen)])
                    upper[chosen] = torch.minimum(upper[chosen], -least[len(chosen) :])
                    written += bounds
            if record is not None:
                record.close(folded, Slopes.anywhere(folded), node, written)
            folded, rows = folded.tightened(lower, upper, rows)
        return folded, rows

    def _share(
        self,
        folded: Folded,
        groups: Sequence[Tensor],
        limits: Limits,
        record: Refined | None,
        pause: Callable[[], bool],
    ) -> list[tuple[Tensor, Tensor, list[Bound]]]:
        """For some groups of neurons: the neurons (k,), what is proven of them (2·k,), and what is recorded of that.

        Once no time is left, the other groups are left out.
        """
        found = []
        for chosen in groups:
            if limits.over():
                break
            forms = folded.neurons[chosen]
            stop = lambda: limits.over() or pause()  # noqa: E731
            found.append((chosen, *self._least(folded, Rows.cat([forms, -forms]), stop, chosen, record)))
        return found

    def _least(
        self, whole: Folded, rows: Rows, stop: Callable[[], bool], neurons: Tensor, record: Refined | None
    ) -> tuple[Tensor, list[Bound]]:
        """Lower bounds over the box of rows and, in the second half of ``rows``, of their negatives.

        The rows are those of k ``neurons`` of the system. Returned are (2·k,) proven bounds, and what is recorded.
        """
        folded, rows = whole.restricted(rows)
        half = len(rows) // 2
        together = max(1, _WORKING // (2 * self.leaves * 16 * (folded.size + folded.inputs)))
        found, bounds = torch.full((2, half), -torch.inf, dtype=torch.float64), []
        for part in torch.arange(half).split(together):
            if stop():
                break
            trees = _Trees(self, folded, Rows.cat([rows[part], rows[part + half]]))
            trees.search(stop)
            proven = trees.proven()
            if record is not None:
                proven, written = record.written(whole, neurons[part], trees.strip, trees.leaves(), proven)
                bounds += written
            found[:, part] = proven.reshape(2, -1)
        return found.flatten(), bounds


def _layers(folded: Folded) -> dict[int, Tensor]:
    """By activation node, in their order, the numbers of its neurons, which are one after the other."""
    return {node: (folded.places[:, 0] == node).nonzero().squeeze(1) for node in folded.places[:, 0].unique().tolist()}


def _alike(support: Tensor) -> Iterator[Tensor]:
    """The numbers of the rows (rows, m) that are alike, group by group."""
    _, group = support.unique(dim=0, return_inverse=True)
    return ((group == number).nonzero().squeeze(1) for number in group.unique())


def _dealt(groups: Sequence[Tensor], hands: int) -> list[list[Tensor]]:
    """Groups of neurons dealt out so that every hand has about as many neurons; large groups are divided."""
    dealt: list[list[Tensor]] = [[] for _ in range(hands)]
    sizes = [0] * hands
    for group in groups:
        pieces = hands if len(group) >= _LARGE * hands else 1
        for number in range(pieces):
            piece, hand = group[number::pieces], sizes.index(min(sizes))
            dealt[hand].append(piece)
            sizes[hand] += len(piece)
    return dealt


class _Trees:
    """One tree for each row of a system; the rows of the second half are the negatives of the first.

    Args:
        options: of the search.
        folded: the system.
        rows: (2·k,) the objectives.

    Attributes:
        strip: the relaxation of all trees.
    """

    def __init__(self, options: Refinement, folded: Folded, rows: Rows) -> None:
        self._options, self._folded, self._rows = options, folded, rows
        count = len(rows)
        self.strip = strip = Strip(folded, rows, Slopes.anywhere(folded))
        self._curves = strip.curves
        self._ascent = Ascent(strip, torch.ones(folded.size, dtype=torch.bool), torch.float32, count)
        self._proofs = Proofs(strip, count)
        # A neuron is stable where one of its objectives is above zero.
        self._stable = self._ascent.closed
        self._attained = torch.full((count,), torch.inf, dtype=torch.float64)
        self._leaves = Batch.roots(folded.size, 0, count)
        self._bound = torch.zeros(0)
        self._neuron = torch.zeros(0, dtype=torch.long)
        self._try(-torch.sign(strip.rows.matrix[:, : folded.inputs]))
        self._aim(torch.full((count,), -torch.inf))
        self._bound, self._neuron = self._run(self._leaves, options.first)
        self._root = self._bound.clone()

    def _try(self, e: Tensor) -> None:
        """Take note of the objectives' values at scaled inputs (points, n)."""
        _, r = self._folded.values(e)
        values = torch.addmm(self._rows.constant, e.double(), self._rows.inputs.T).addmm_(r, self._rows.neurons.T)
        self._attained = torch.minimum(self._attained, values.amin(0))

    def _aim(self, root: Tensor) -> None:
        """Close what cannot become better by much, or need not."""
        attained = self._attained.to(self._stable)
        gap = torch.where(root.isfinite(), attained - root, 0.0).clamp(min=0)
        short = attained - self._options.worthwhile * gap
        self._ascent.closed = torch.where(attained > 0, self._stable, torch.minimum(short, self._stable))
        self._ascent.aim = torch.where(attained > 0, 2 * self._stable, attained + self._stable)

    def _run(self, batch: Batch, steps: int) -> tuple[Tensor, Tensor]:
        """The bounds of nodes, and the neurons on which they are to be split, −1 where no neuron costs anything."""
        found = self._ascent.run(batch, steps)
        blame, neuron = found.blame.max(1) if self._folded.size else (found.bound * 0, self._neuron)
        self._try(self._ascent.minimisers(batch))
        return found.bound, torch.where(blame > 0, neuron, -1)

    def search(self, stop: Callable[[], bool]) -> None:
        """Split the worst leaves of every tree until it has enough, or needs no more."""
        while not stop():
            self._aim(self._root)
            chosen = self._worst()
            if not len(chosen):
                return
            children = self._leaves[chosen].split_on(self._neuron[chosen], self._curves)
            bound, split = self._run(children, self._options.steps)
            # What holds of a node holds of its children.
            bound = torch.maximum(bound, self._bound[chosen].repeat(2))
            kept = torch.ones(len(self._bound), dtype=torch.bool).index_fill(0, chosen, False).nonzero().squeeze(1)
            self._leaves = Batch.cat([self._leaves[kept], children])
            self._bound = torch.cat([self._bound[kept], bound])
            self._neuron = torch.cat([self._neuron[kept], split])

    def _worst(self) -> Tensor:
        """The numbers of the leaves to split: the worst of each tree, of trees that are not done."""
        objective, count = self._leaves.objective, len(self._rows)
        least = torch.full((count,), torch.inf).scatter_reduce(0, objective, self._bound, "amin")
        stable = least >= self._stable
        # Of a neuron that is stable nothing else is asked.
        done = stable | stable.roll(count // 2) | (least >= self._ascent.closed)
        done |= torch.bincount(objective, minlength=count) >= self._options.leaves
        is_open = (~done[objective] & (self._neuron >= 0) & (self._bound < self._ascent.closed[objective])).nonzero()
        is_open = is_open.squeeze(1)
        # A tree whose worst leaf cannot be split gets no better.
        is_open = is_open[self._tops(objective[is_open], self._bound[is_open], least)]
        return is_open

    def _tops(self, objective: Tensor, bound: Tensor, least: Tensor) -> Tensor:
        """Which of some open leaves are split now."""
        order = torch.argsort(bound, stable=True)
        order = order[torch.argsort(objective[order], stable=True)]
        mine = objective[order]
        first = torch.searchsorted(mine, mine)
        rank = torch.arange(len(order)) - first
        trees = len(mine.unique())
        return order[rank < max(1, self._options.batch // max(1, trees))]

    def proven(self) -> Tensor:
        """(2·k,) proven lower bounds: the least of all leaves of each tree."""
        bounds = []
        for batch, found in self._runs():
            proven = self._proofs.lower(batch.split, found.columns, found.w, batch.mu, batch.objective)
            bounds.append(torch.where(proven.isfinite(), proven, -torch.inf))
        return least(torch.cat(bounds), self._leaves.objective, len(self._rows))

    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        """Splits (leaves, m) and multipliers (leaves, m) of all leaves, and the row that each belongs to."""
        w = torch.zeros(self._leaves.split.shape, dtype=torch.float64)
        start = 0
        for batch, found in self._runs():
            w[start : start + len(batch), found.columns] = found.w.double()
            start += len(batch)
        return self._leaves.split, w, self._leaves.objective

    def _runs(self) -> Iterator[tuple[Batch, Bounded]]:
        """The leaves batch by batch, with what their multipliers make of them."""
        return ((batch, self._ascent.run(batch, 0)) for batch in self._leaves.parts(4 * self._options.batch))


def least(bounds: Tensor, objective: Tensor, objectives: int) -> Tensor:
    """(objectives,) the least of the bounds of all leaves (leaves,) of each objective's tree."""
    return torch.full((objectives,), torch.inf, dtype=torch.float64).scatter_reduce(0, objective, bounds, "amin")
