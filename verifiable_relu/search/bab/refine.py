"""Tighter intervals of unstable neurons' pre-activations, by branch and bound for each of them.

In a deep network most of what a bound loses, it loses in the intervals of the pre-activations: these are bounded layer
by layer, each over relaxations of all layers before it. Here each end of each interval is a small tree of its own, over
the neurons before it. Some tens of leaves close a good part of the distance to the exact interval; neurons that become
stable leave the system, and every later layer is bounded over the tighter ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from verifiable_relu.ir.interval import Interval
from verifiable_relu.ir.network import Network
from verifiable_relu.search.bab.ascent import DualAscent
from verifiable_relu.search.bab.loop import Bounded, IntervalsTightened, Loop, Nodes, Observer, Strategy
from verifiable_relu.search.bab.proof import lower_bounds
from verifiable_relu.search.bab.relaxation import TreeRelaxation
from verifiable_relu.search.bab.slopes import slopes_for_all
from verifiable_relu.search.bab.system import AffineForms, ReducedSystem, eliminate_stable_neurons
from verifiable_relu.search.budget import TimeBudget
from verifiable_relu.supervisor.forks import run_shares

_WORKING = 1 << 27  # Bytes that the trees searched at once may take
_LARGE = 4  # Neurons of one group that a process is dealt, at least, where others get some of this group, too
_CALL = 1e7  # Multiplications that could be done in the time that the calls of one step of an ascent take
_GAIN = 0.01  # An end of an interval is moved if that makes the interval narrower by this part of it, at least


@dataclass(frozen=True)
class Refinement:
    """How the intervals of neurons are refined."""

    # At most, of the tree of one end of one interval, in a layer that no later one takes more work than
    leaves: int = 8
    # The trees of a layer have at most this multiple of the leaves, as many as make its work equal to that of the later
    # layer that takes the most: every later layer gains from tighter intervals of an earlier one
    earlier: int = 16
    first: int = 20  # Steps of the ascent at the root of each tree
    steps: int = 6  # Of the ascent at every other node
    batch: int = 256  # About how many nodes are split at once
    # A leaf is closed where less than this part of the distance between the root's bound and a value that is attained
    # is left
    worthwhile: float = 0.05

    def work(self, system: ReducedSystem) -> float:
        """Return about how many multiplications a refinement takes, the cost of calling them included."""
        support, total = system.support(system.neurons), 0.0
        for block in system.blocks:
            leaves = self.leaves_of(system, block.op)
            for part in _alike(support[block.part]):
                before = int(support[block.start + int(part[0])].sum())
                if before:
                    nodes = 4 * len(part) * leaves
                    calls = max(nodes / self.batch, math.log2(leaves) + 1)
                    each = 2 * before * (system.inputs + before)
                    total += (self.steps + 1) * (nodes * each + calls * _CALL)
        return total

    def leaves_of(self, system: ReducedSystem, op: int) -> int:
        """Return the leaves of each tree of an op's neurons."""
        # One leaf of every tree costs a product of the layer's neurons, those before it, and all that these depend on.
        each = {
            block.op: (block.end - block.start) * block.start * (system.inputs + block.start) for block in system.blocks
        }
        most = max(work for layer, work in each.items() if layer >= op)
        return round(self.leaves * min(self.earlier, most / max(1, each[op])))


def refine_intervals(
    network: Network,
    box: Interval,
    intervals: Mapping[int, Interval],
    refinement: Refinement,
    budget: TimeBudget,
    observer: Observer | None = None,
) -> dict[int, Interval]:
    """Return tighter intervals of the ops that feed elementwise ops, refined layer after layer.

    Once no time is left, the rest of the neurons keep theirs.

    Args:
        network, box, intervals: as ``eliminate_stable_neurons`` takes them.
        refinement: the method.
        budget: of the work.
        observer: told of leaves and intervals.
    """
    found = dict(intervals)
    whole = eliminate_stable_neurons(network, box, found)
    # An observer is told by this process alone.
    shared = observer is None and whole.piecewise_linear and refinement.work(whole) >= budget.solo_work
    for block in whole.blocks[1:]:
        if budget.over():
            break
        source = network.ops[block.op].inputs[0]
        system = eliminate_stable_neurons(network, box, found, until=block.op)
        mine, x = whole.places[block.part, 1], found[source]
        rows = system.outputs(one_hot(mine, network.ops[source].size).double(), source)
        # A neuron that no other one feeds has its exact interval.
        groups = [part for part in _alike(system.support(rows)) if bool((rows.neurons[part] != 0).any())]
        options = replace(refinement, leaves=refinement.leaves_of(whole, block.op))
        ends = torch.stack([x.lower[0, mine], -x.upper[0, mine]])
        layer = _Layer(options, system, rows, ends, block.op, mine, observer)
        hands = _dealt(groups, budget.processes if shared else 1)
        shares = [partial(layer.share, hand, budget) for hand in hands if hand]
        for share, done in zip(shares, run_shares(shares, budget.left, whole=True), strict=True):
            # Where a process has failed, this one does its share.
            ends = torch.maximum(ends, share(budget.over) if done is None else done)
        found[source] = Interval(
            x.lower.index_copy(1, mine, ends[None, 0]), x.upper.index_copy(1, mine, -ends[None, 1])
        )
    return found


@dataclass(frozen=True, eq=False)
class _Layer:
    """The neurons of one op whose intervals are refined."""

    options: Refinement  # Of the refinement
    system: ReducedSystem  # Of the neurons before
    rows: AffineForms  # The pre-activations as forms of these
    ends: Tensor  # (2, count) lower bounds of the pre-activations and of their negatives
    # op, numbers: the op, and which of its neurons these are
    op: int
    numbers: Tensor
    observer: Observer | None  # Told of events

    def share(self, groups: Sequence[Tensor], budget: TimeBudget, pause: Callable[[], bool]) -> Tensor:
        """Return better ends of groups of neurons; once no time is left, the rest is left out."""
        found = self.ends.clone()

        def stop() -> bool:
            return budget.over() or pause()

        for group in groups:
            forms = self.rows[group]
            small, rows = self.system.restricted(AffineForms.cat([forms, -forms]))
            together = max(1, _WORKING // (2 * self.options.leaves * 16 * (small.size + small.inputs)))
            for part in torch.arange(len(group), device=group.device).split(together):
                if stop():
                    return found
                chosen, before = group[part], self.ends[:, group[part]]
                trees = _IntervalTrees(self.options, small, rows[torch.cat([part, part + len(group)])], self.observer)
                proven = trees.search(stop).reshape(2, -1)
                better = torch.where(proven - before > -_GAIN * before.sum(0), proven, -torch.inf)
                found[:, chosen] = torch.maximum(before, better)
                if self.observer is not None:
                    made = (better[0], -better[1], trees.loop.relaxation)
                    self.observer(IntervalsTightened(self.op, self.numbers[chosen], *made))
        return found


def _alike(support: Tensor) -> Iterator[Tensor]:
    """Return groups of rows with the same support."""
    _, group = support.unique(dim=0, return_inverse=True)
    return ((group == number).nonzero().squeeze(1) for number in group.unique())


def _dealt(groups: Sequence[Tensor], hands: int) -> list[list[Tensor]]:
    """Deal groups of neurons so that every hand has about as many neurons; large groups are divided."""
    dealt: list[list[Tensor]] = [[] for _ in range(hands)]
    for group in groups:
        pieces = hands if len(group) >= _LARGE * hands else 1
        for number in range(pieces):
            min(dealt, key=lambda hand: sum(map(len, hand))).append(group[number::pieces])
    return dealt


class _IntervalTrees:
    """One tree for each row (2·k,) of a system; the rows of the second half are the negatives of the first."""

    def __init__(
        self, options: Refinement, system: ReducedSystem, rows: AffineForms, observer: Observer | None
    ) -> None:
        self._options, self._system, self._rows, count = options, system, rows, len(rows)
        relaxation = TreeRelaxation(system, rows, slopes_for_all(system), count)
        self._ascent = DualAscent(relaxation, torch.ones_like(relaxation.over), torch.float32)
        strategy = Strategy(self._bound, self._prove, self._enough, self._remain, -math.inf, options.batch)
        self.loop = Loop(relaxation, strategy, observer)
        # A neuron is stable where one of its objectives is above zero.
        self._stable = self._ascent.closed
        self._attained = torch.full_like(rows.constant, torch.inf)
        self._root = torch.full_like(self._stable, -torch.inf)
        self._try(-torch.sign(relaxation.rows.matrix[:, : system.inputs]))
        self._aim()
        self._steps = options.first
        self.loop.begin(Nodes.roots(relaxation))
        self._steps = options.steps

    def _try(self, e: Tensor) -> None:
        _, r = self._system.values(e)
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
        while not stop() and len(self.loop.now.open) and len(chosen := self._worst()):
            self.loop.advance(chosen)
        for nodes in self.loop.now.open.batches(4 * self._options.batch):
            self._leave(self._ascent.run(nodes, 0))
        return self.loop.now.lower

    def _worst(self) -> Nodes:
        """Return the nodes to split: the worst of each tree, of trees that are not done. The others stay open."""
        self._aim()
        now, count = self.loop.now, len(self._rows)
        every = now.open.pop(len(now.open))
        objective, lower = every.objective, now.lower.to(every.bound)
        least = torch.full_like(lower, torch.inf).scatter_reduce(0, objective, every.bound, "amin")
        # A tree with a leaf that cannot be split gets no better than that.
        done = lower < least
        least = torch.minimum(least, lower)
        stable = least >= self._stable
        # Of a neuron that is stable nothing else is asked.
        done |= stable | stable.roll(count // 2) | (least >= self._ascent.closed)
        done |= torch.bincount(objective, minlength=count) + now.leaves >= self._options.leaves
        chosen = (~done[objective] & (every.bound < self._ascent.closed[objective])).nonzero().squeeze(1)
        # Of each tree as many, those with the least bounds.
        order = chosen[torch.argsort(every.bound[chosen], stable=True)]
        order = order[torch.argsort(objective[order], stable=True)]
        mine = objective[order]
        rank = torch.arange(len(order), device=order.device) - torch.searchsorted(mine, mine)
        chosen = order[rank < max(1, self._options.batch // max(1, len(mine.unique())))]
        now.open.push(every[torch.ones_like(objective, dtype=torch.bool).index_fill(0, chosen, False)])
        return every[chosen]

    def _bound(self, nodes: Nodes, look: bool) -> Bounded:
        found = self._ascent.run(nodes, self._steps)
        if not self.loop.now.nodes:
            self._root = found.bound
        self._try(self._ascent.minimisers(found.nodes))
        return found

    def _prove(self, found: Bounded) -> Tensor:
        lower = lower_bounds(self.loop.relaxation, found)
        return torch.where(lower.isfinite(), lower, -torch.inf)

    def _enough(self, nodes: Nodes) -> Tensor:
        return self._ascent.closed[nodes.objective]

    def _remain(self, found: Bounded) -> Bounded:
        # What cannot be split is a leaf, whatever it proves.
        remains = (found.blame > 0).any(1)
        leaves = (~remains).nonzero().squeeze(1)
        if not len(leaves):
            return found
        self._leave(found[leaves])
        return found[remains.nonzero().squeeze(1)]

    def _leave(self, found: Bounded) -> None:
        self.loop.note(found, self._prove(found))
