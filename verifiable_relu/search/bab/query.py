"""A query as a reduced system: its open polytopes, their relaxations, and tighter intervals of its neurons.

**Refinement.** In a deep network a bound is loose mostly because the intervals of the pre-activations are: these
are bounded layer by layer, each over relaxations of all layers before it. Here each end of each interval is a small
tree of its own, over the neurons before it. Some tens of leaves close a good part of the distance to the exact
interval; neurons that become stable leave the system, and every later layer is bounded over the tighter ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from verifiable_relu.bounds.alpha import Ascent
from verifiable_relu.errors import OutOfTime
from verifiable_relu.ir.interval import Interval
from verifiable_relu.ir.network import Network
from verifiable_relu.rounding import OWN, unit_roundoff
from verifiable_relu.search.bab.ascent import DualAscent
from verifiable_relu.search.bab.loop import Bounded, IntervalsTightened, Loop, Nodes, Observer, Strategy
from verifiable_relu.search.bab.proof import lower_bounds
from verifiable_relu.search.bab.relaxation import TreeRelaxation
from verifiable_relu.search.bab.slopes import Improve, OpenPolytope, row_slopes, slopes_for_all
from verifiable_relu.search.bab.system import AffineForms, ReducedSystem, eliminate_stable_neurons, is_whole
from verifiable_relu.search.budget import TimeBudget
from verifiable_relu.search.property_rows import PropertyRows
from verifiable_relu.supervisor.forks import run_shares

_ROWS = 512  # About how many neurons a tree makes rows of where the system is not held as a whole
_REFINING = 0.25  # The part of the time left that one refinement may take: on convolutions it would take all of it
_WORKING = 1 << 27  # Bytes that the trees searched at once may take
_CALL = 1e7  # Multiplications that could be done in the time that the calls of one step of an ascent take
_GAIN = 0.01  # An end of an interval is moved if that makes the interval narrower by this part of it, at least


def tree_bytes(inputs: int, neurons: int) -> int:
    """Return an estimate of the bytes that a tree takes, without its open nodes."""
    return 16 * ((neurons if is_whole(inputs, neurons) else _ROWS) + 1) * (inputs + neurons + 1)


class ReducedQuery:
    """The reduced system of one query, and the relaxations of its open polytopes.

    Args:
        network: without maxima and products.
        box: of the inputs, (1, inputs).
        intervals: of the ops that feed elementwise ops, (1, size).
        rows: of the query's property.
        polytopes: those that are to be excluded, as ``rows`` counts them; each has a row.
        stop: asked now and then.

    Attributes:
        system, intervals: as above.
        parts: the polytopes, the one with the least bound first.

    Raises:
        OutOfTime: once ``stop`` says so.
    """

    def __init__(
        self,
        network: Network,
        box: Interval,
        intervals: Mapping[int, Interval],
        rows: PropertyRows,
        polytopes: Collection[int],
        stop: Callable[[], bool],
    ) -> None:
        self._network, self._box, self._rows = network, box, rows
        self.intervals = intervals
        self.system = system = eliminate_stable_neurons(network, box, intervals)
        kept = torch.isin(rows.polytope[0], torch.tensor(sorted(polytopes))).nonzero().squeeze(1)
        matrix, bound, scale = (part[0, kept].to(box.lower) for part in (rows.matrix, rows.bound, rows.scale))
        forms = system.outputs(matrix)
        rounding = OWN * unit_roundoff(torch.float64) * (forms.constant.abs() + bound.abs())
        forms = replace(forms, constant=forms.constant - bound, error=forms.error + rounding)
        # Trees over kinks adapt their own lines: there the search took longer than what it saved.
        system.relaxation.stop = stop
        slopes, lower = row_slopes(system, matrix, None if system.piecewise_linear else Ascent())
        lower = lower - bound
        if stop():
            raise OutOfTime
        least, polytope = [], rows.polytope[0, kept].to(box.lower.device)
        for number in sorted(polytopes):
            mine = (polytope == number).nonzero().squeeze(1)
            order = lower[mine].argsort(descending=True)
            mine = mine[order]
            first = int(mine[0])
            part = OpenPolytope(forms[mine], scale[mine], order, matrix[first], slopes[first])
            least.append((float(lower[first]), number, part))
        self.parts = {number: part for _, number, part in sorted(least, key=lambda each: each[0])}

    @property
    def width(self) -> float:
        """The widths of all intervals of unstable neurons together."""
        return float((self.system.upper - self.system.lower).sum())

    def refined(
        self, refinement: Refinement, polytopes: Collection[int], budget: TimeBudget, observer: Observer | None
    ) -> ReducedQuery:
        """Return the query with some of the polytopes, and tighter intervals of the neurons.

        Neurons that the refinement does not reach in the part ``_REFINING`` of the time left keep theirs.

        Raises:
            OutOfTime: if no time is left.
        """
        left = budget.left()
        rest = (1 - _REFINING) * left if left < math.inf else 0.0
        short = replace(budget, seconds=budget.seconds - rest)
        found = refine_intervals(self._network, self._box, self.intervals, refinement, short, observer)
        return ReducedQuery(self._network, self._box, found, self._rows, polytopes, budget.over)

    def improved(self, improve: Improve, polytopes: Sequence[int], budget: TimeBudget) -> ReducedQuery:
        """Return the query with better relaxations of polytopes; each is searched for once."""
        bare = [polytope for polytope in polytopes if not self.parts[polytope].improved]
        found = copy(self)
        found.parts = dict(self.parts)
        hands = [part for part in (bare[k :: budget.processes] for k in range(budget.processes)) if part]

        def share(hand: Sequence[int], pause: Callable[[], bool]) -> list[OpenPolytope]:
            return improve(self.system, [self.parts[number] for number in hand], lambda: budget.over() or pause())

        shares = [partial(share, hand) for hand in hands]
        for hand, parts in zip(hands, run_shares(shares, budget.left, whole=True) if shares else [], strict=True):
            # Where a process has failed, this one does its share.
            every = zip(hand, parts or share(hand, budget.over), strict=True)
            found.parts.update((number, replace(part, improved=True)) for number, part in every)
        return found

    def relaxation(self, polytope: int) -> TreeRelaxation:
        """Return the relaxation for the tree of a polytope."""
        part = self.parts[polytope]
        return TreeRelaxation(self.system, part.rows, part.slopes, 1, part.cuts)


@dataclass(frozen=True)
class Refinement:
    """Options of the refinement of neurons' intervals."""

    # At most, of the tree of one end of one interval, in a layer that no later one takes more work than
    leaves: int = 8
    # The trees of a layer have at most this multiple of the leaves, as many as make its work equal to that of the later
    # layer that takes the most: every later layer gains from tighter intervals of an earlier one
    earlier_factor: int = 16
    root_steps: int = 20  # Steps of the ascent at the root of each tree
    steps: int = 6  # Of the ascent at every other node
    batch: int = 256  # About how many nodes are split at once

    def work(self, system: ReducedSystem) -> float:
        """Return an estimate of a refinement's multiplications, the overhead of calls included."""
        total = 0.0
        for block in system.blocks:
            if before := block.start:
                leaves = self.leaves_of(system, block.op)
                nodes = 4 * len(block) * leaves
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
        return round(self.leaves * min(self.earlier_factor, most / max(1, each[op])))


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
        rows = system.outputs(one_hot(block.chosen, network.ops[source].size).double(), source)
        # A neuron that no other one feeds has its exact interval.
        fed = (rows.neurons != 0).any(1)
        mine, rows, x = block.chosen[fed], rows[fed], found[source]
        if not len(mine):
            continue
        options = replace(refinement, leaves=refinement.leaves_of(whole, block.op))
        ends = torch.stack([x.lower[0, mine], -x.upper[0, mine]])
        layer = _Layer(options, system, rows, ends, block.op, mine, observer)
        count = budget.processes if shared else 1
        hands = [torch.arange(number, len(mine), count, device=mine.device) for number in range(min(count, len(mine)))]
        shares = [partial(layer.share, hand, budget) for hand in hands]
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

    def share(self, chosen: Tensor, budget: TimeBudget, pause: Callable[[], bool]) -> Tensor:
        """Return tighter ends for chosen neurons; those that are not reached in time are left out."""
        found, system = self.ends.clone(), self.system

        def stop() -> bool:
            return budget.over() or pause()

        for part in chosen.split(max(1, _WORKING // (2 * self.options.leaves * 16 * (system.size + system.inputs)))):
            if stop():
                break
            trees = _IntervalTrees(self, part)
            before, proven = self.ends[:, part], trees.search(stop).reshape(2, -1)
            better = torch.where(proven - before > -_GAIN * before.sum(0), proven, -torch.inf)
            found[:, part] = torch.maximum(before, better)
            if self.observer is not None:
                made = (better[0], -better[1], trees.loop.relaxation)
                self.observer(IntervalsTightened(self.op, self.numbers[part], *made))
        return found


class _IntervalTrees:
    """Two trees for each of k neurons of a layer: the first k rows bound pre-activations, the others negatives."""

    def __init__(self, layer: _Layer, chosen: Tensor) -> None:
        rows = layer.rows[chosen]
        rows, count = AffineForms.cat([rows, -rows]), 2 * len(rows)
        self._options, self._count = layer.options, count
        options, relaxation = layer.options, TreeRelaxation(layer.system, rows, slopes_for_all(layer.system), count)
        self._ascent = DualAscent(relaxation, torch.ones_like(relaxation.over), torch.float32)
        strategy = Strategy(self._bound, self._prove, self._ascent.closed, self._remain, -math.inf, options.batch)
        self.loop = Loop(relaxation, strategy, layer.observer)
        self._steps = options.root_steps
        self.loop.begin(Nodes.roots(relaxation))
        self._steps = options.steps

    def search(self, stop: Callable[[], bool]) -> Tensor:
        """Split the worst nodes of each tree until it has enough leaves or a good enough bound.

        Returns:
            (2·k,) proven lower bounds: the least of all leaves of each tree.
        """
        while not stop() and len(self.loop.now.open) and len(chosen := self._worst()):
            self.loop.advance(chosen)
        for nodes in self.loop.now.open.batches(4 * self._options.batch):
            self._leave(self._ascent.run(nodes, 0))
        return self.loop.now.lower

    def _worst(self) -> Nodes:
        """Return the nodes to split, the worst of each tree that is not done; the others stay open."""
        now, count = self.loop.now, self._count
        every = now.open.pop(len(now.open))
        objective, lower = every.objective, now.lower.to(every.bound)
        least = torch.full_like(lower, torch.inf).scatter_reduce(0, objective, every.bound, "amin")
        # A tree with a leaf that cannot be split gets no better than that.
        done = lower < least
        least = torch.minimum(least, lower)
        # A neuron is stable where one of its objectives is above zero; then nothing else is asked of it.
        stable = least >= self._ascent.closed
        done |= stable | stable.roll(count // 2)
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
        return self._ascent.run(nodes, self._steps)

    def _prove(self, found: Bounded) -> Tensor:
        lower = lower_bounds(self.loop.relaxation, found)
        return torch.where(lower.isfinite(), lower, -torch.inf)

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
