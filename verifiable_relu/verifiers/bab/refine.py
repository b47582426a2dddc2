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

from verifiable_relu.supervisor.forks import run_shares
from verifiable_relu.verifiers.bab.ascent import Bounded, DualAscent, Nodes
from verifiable_relu.verifiers.bab.folded import AffineForms, Folded
from verifiable_relu.verifiers.bab.loop import Loop, OpenNodes
from verifiable_relu.verifiers.bab.proof import Proofs
from verifiable_relu.verifiers.bab.recorded import Raw, RecordedBound, Refined, worth
from verifiable_relu.verifiers.bab.slopes import slopes_for_all
from verifiable_relu.verifiers.bab.strip import TreeRelaxation
from verifiable_relu.verifiers.base import TimeBudget

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
        """Return about how many multiplications a refinement takes, the cost of calling them included."""
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
        # One leaf of every tree costs a product of the layer's neurons, those before it, and all that these depend on.
        each = {layer: len(m) * int(m[0]) * (folded.inputs + int(m[0])) for layer, m in _layers(folded).items()}
        most = max(work for layer, work in each.items() if layer >= node)
        return round(self.leaves * min(self.earlier, most / max(1, each[node])))

    def refine(
        self, folded: Folded, rows: AffineForms, budget: TimeBudget, record: Refined | None = None
    ) -> tuple[Folded, AffineForms]:
        """Return the system with bounds that are refined, layer after layer, and rows expressed by it.

        Once no time is left, the rest of the neurons keep their bounds. With ``record``, what proves bounds is kept.
        """
        processes = 1 if folded.functions or self.work(folded) < budget.solo_work else budget.processes
        for node in _layers(folded):
            mine = _layers(folded)[node]
            # What depends on no other neuron has its exact interval.
            mine = mine[(folded.neurons.neurons[mine] != 0).any(1)]
            if budget.over() or not len(mine):
                continue
            options = replace(self, leaves=self._leaves(folded, node))
            groups = [mine[part] for part in _alike(folded.support(folded.neurons[mine]))]
            shares = [
                partial(options._share, folded, share, budget, record) for share in _dealt(groups, processes) if share
            ]
            found = run_shares(shares, budget.left, whole=True)
            lower, upper, written = folded.lower.clone(), folded.upper.clone(), []
            for share, one in zip(shares, found, strict=True):
                # Where a process has failed, this one does its share.
                for chosen, least, bounds in one or share(budget.over):
                    lower[chosen] = torch.maximum(lower[chosen], least[: len(chosen)])
                    upper[chosen] = torch.minimum(upper[chosen], -least[len(chosen) :])
                    written += bounds
            if record is not None:
                record.close(folded, slopes_for_all(folded), node, written)
            folded, rows = folded.tightened(lower, upper, rows)
        return folded, rows

    def _share(
        self,
        folded: Folded,
        groups: Sequence[Tensor],
        budget: TimeBudget,
        record: Refined | None,
        pause: Callable[[], bool],
    ) -> list[tuple[Tensor, Tensor, list[RecordedBound]]]:
        """Return for groups of neurons the neurons (k,), lower bounds of them and their negatives (2·k,), and records.

        Once no time is left, the rest is left out.
        """
        found: list[tuple[Tensor, Tensor, list[RecordedBound]]] = []

        def stop() -> bool:
            return budget.over() or pause()

        for group in groups:
            forms = folded.neurons[group]
            small, rows = folded.restricted(AffineForms.cat([forms, -forms]))
            together = max(1, _WORKING // (2 * self.leaves * 16 * (small.size + small.inputs)))
            for part in torch.arange(len(group)).split(together):
                if stop():
                    return found
                trees = _Intervals(self, small, rows[torch.cat([part, part + len(group)])], record is not None)
                proven = worth(folded, group[part], trees.search(stop))
                written = []
                if record is not None:
                    written = record.written(folded, group[part], trees.strip, trees.now.leaves, proven)
                found.append((group[part], proven, written))
        return found


def _layers(folded: Folded) -> dict[int, Tensor]:
    return {node: (folded.places[:, 0] == node).nonzero().squeeze(1) for node in folded.places[:, 0].unique().tolist()}


def _alike(support: Tensor) -> Iterator[Tensor]:
    _, group = support.unique(dim=0, return_inverse=True)
    return ((group == number).nonzero().squeeze(1) for number in group.unique())


def _dealt(groups: Sequence[Tensor], hands: int) -> list[list[Tensor]]:
    """Deal groups of neurons so that every hand has about as many neurons; large groups are divided."""
    dealt: list[list[Tensor]] = [[] for _ in range(hands)]
    sizes = [0] * hands
    for group in groups:
        pieces = hands if len(group) >= _LARGE * hands else 1
        for number in range(pieces):
            piece, hand = group[number::pieces], sizes.index(min(sizes))
            dealt[hand].append(piece)
            sizes[hand] += len(piece)
    return dealt


class _Intervals(Loop):
    """One tree for each row (2·k,) of a system; the rows of the second half are the negatives of the first."""

    def __init__(self, options: Refinement, folded: Folded, rows: AffineForms, keep: bool) -> None:
        count = len(rows)
        super().__init__(TreeRelaxation(folded, rows, slopes_for_all(folded)), count, options.batch)
        self._options, self._folded, self._rows, self._keep, strip = options, folded, rows, keep, self.strip
        self._ascent = DualAscent(strip, torch.ones(folded.size, dtype=torch.bool), torch.float32, count)
        self._proofs = Proofs(strip, count)
        # A neuron is stable where one of its objectives is above zero.
        self._stable = self._ascent.closed
        self._attained = torch.full((count,), torch.inf, dtype=torch.float64)
        self._closed, self._root = torch.zeros(count, dtype=torch.long), torch.full((count,), -torch.inf)
        self._try(-torch.sign(strip.rows.matrix[:, : folded.inputs]))
        self._aim()
        self._steps = options.first
        self.begin(Nodes.roots(folded.size, 0, count))
        self._steps = options.steps

    def _try(self, e: Tensor) -> None:
        _, r = self._folded.values(e)
        values = torch.addmm(self._rows.constant, e.double(), self._rows.inputs.T).addmm_(r, self._rows.neurons.T)
        self._attained = torch.minimum(self._attained, values.amin(0))

    def _aim(self) -> None:
        attained = self._attained.to(self._stable)
        gap = torch.where(self._root.isfinite(), attained - self._root, 0.0).clamp(min=0)
        short = attained - self._options.worthwhile * gap
        self._ascent.closed = torch.where(attained > 0, self._stable, torch.minimum(short, self._stable))
        self._ascent.aim = torch.where(attained > 0, 2 * self._stable, attained + self._stable)

    def search(self, stop: Callable[[], bool]) -> Tensor:
        """Split the worst nodes of every tree until it has enough, or needs no more.

        Returns:
            (2·k,) proven lower bounds: the least of all leaves of each tree.
        """
        while not stop() and len(chosen := self._worst()):
            self.advance(chosen)
        for nodes in self.now.open.batches(4 * self._batch):
            self._leave(nodes, self._ascent.run(nodes, 0))
        return self.now.lower

    def _worst(self) -> OpenNodes:
        """The nodes to split: the worst of each tree, of trees that are not done. The others stay open."""
        if not len(self.now.open):
            return OpenNodes(Nodes.roots(0, 0, 0), self._root[:0], self._closed[:0, None])
        self._aim()
        every, count = self.now.open.pop(len(self.now.open)), len(self._rows)
        objective, lower = every.nodes.objective, self.now.lower.to(every.bound)
        least = torch.full((count,), torch.inf).scatter_reduce(0, objective, every.bound, "amin")
        # A tree with a leaf that cannot be split gets no better than that.
        done = lower < least
        least = torch.minimum(least, lower)
        stable = least >= self._stable
        # Of a neuron that is stable nothing else is asked.
        done |= stable | stable.roll(count // 2) | (least >= self._ascent.closed)
        done |= torch.bincount(objective, minlength=count) + self._closed >= self._options.leaves
        chosen = (~done[objective] & (every.bound < self._ascent.closed[objective])).nonzero().squeeze(1)
        chosen = chosen[self._first(objective[chosen], every.bound[chosen])]
        rest = every[torch.ones(len(every), dtype=torch.bool).index_fill(0, chosen, False)]
        if len(rest):
            self.now.open.push(rest.nodes, rest.bound, rest.choices)
        return every[chosen]

    def _first(self, objective: Tensor, bound: Tensor) -> Tensor:
        """Return which nodes are split now: of each tree as many, those with the least bounds."""
        order = torch.argsort(bound, stable=True)
        order = order[torch.argsort(objective[order], stable=True)]
        mine = objective[order]
        rank = torch.arange(len(order)) - torch.searchsorted(mine, mine)
        return order[rank < max(1, self._options.batch // max(1, len(mine.unique())))]

    def bounded(self, nodes: Nodes, look: bool = False) -> Bounded:
        found = self._ascent.run(nodes, self._steps)
        if not self.now.nodes:
            self._root = found.bound
        self._try(self._ascent.minimisers(nodes))
        return found

    def proven(self, nodes: Nodes, found: Bounded) -> Tensor:
        lower = self._proofs.lower(nodes.split, found.columns, found.w, nodes.mu, nodes.objective)
        return torch.where(lower.isfinite(), lower, -torch.inf)

    def enough(self, nodes: Nodes) -> Tensor:
        return self._ascent.closed[nodes.objective]

    def close(self, nodes: Nodes, found: Bounded, floor: float = -math.inf) -> Tensor:
        return super().close(nodes, found, floor)

    def note(self, nodes: Nodes, lower: Tensor, leaves: Raw | None) -> None:
        super().note(nodes, lower, leaves)
        self._closed += torch.bincount(nodes.objective, minlength=len(self._closed))

    def more(self, nodes: Nodes, found: Bounded) -> Tensor:
        # What cannot be split is a leaf, whatever it proves.
        is_open = (found.blame > 0).any(1)
        if not bool(is_open.all()):
            self._leave(nodes[~is_open], found[~is_open])
        return is_open

    def _leave(self, nodes: Nodes, found: Bounded) -> None:
        self.note(nodes, self.proven(nodes, found), self.leaves(nodes, found))

    def leaves(self, nodes: Nodes, found: Bounded) -> Raw | None:
        # All neurons have multipliers.
        return (nodes.split, found.w, nodes.objective) if self._keep else None
