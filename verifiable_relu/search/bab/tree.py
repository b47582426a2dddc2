"""Trees over the segments of unstable neurons that exclude a polytope, on one relaxation that all nodes share.

Only a proof closes a node (``proof``). An open node is split on the neuron whose linear bounds loosen the node's own
bound most; where none does much, more steps optimise the bounds of every neuron. Points at which relaxations are
least are tried as counterexamples all along.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from verifiable_relu.rounding import TINY, mean_below
from verifiable_relu.search.bab.ascent import DualAscent
from verifiable_relu.search.bab.loop import Bounded, Loop, Nodes, Observer, Strategy, TreeState
from verifiable_relu.search.bab.proof import lower_bounds
from verifiable_relu.search.bab.relaxation import TreeRelaxation

_WORKING = 1 << 27  # Bytes of coefficients of the nodes that are bounded at once
_OTHER = 150  # Everything else that is done for a node takes as much work as this number of rows of the system
_NEW = 0.5  # The weight of the blame of a neuron without a row, compared with others, where rows are to be few
# Nodes that are finished at once, and the work of that, at most: the clock is to be looked at often enough
_MOST, _TOGETHER = 32, 1e10
_LAST = 300  # Steps of a node without open neurons: there is nothing else to do
_CANDIDATES = 4  # The nodes of a batch, those with the least bounds, that are asked for a counterexample

Decide = Callable[[Tensor, Tensor], bool | None]
"""Tells, by the numbers (k,) of a node's split neurons and their segments (k,), whether none of its points is a
counterexample; None where it does not know."""


@dataclass(frozen=True)
class Branching:
    """Options of the search of a tree."""

    steps: int = 2  # Of the ascent for each node
    # Open neurons whose linear bounds are optimised: those that matter most at the root
    adaptive_neurons: int = 32
    batch: int = 512  # Most nodes that are split at once
    # A node is finished (more steps, all neurons optimised) where the relaxations of all neurons together loosen its
    # bound by no more than this part of it
    finish_below_blame: float = 0.5
    # A finished node below this part is put to ``decide``, and searched for a counterexample
    decide_below_blame: float = 0.05
    finishing_steps: int = 30  # Steps of the ascent that finishes a node
    choices: int = 1  # Neurons that a node may be split on; with several, the children by each are bounded
    look_steps: int = 4  # Steps of the ascent for these children
    # After this number of bounded nodes, each is split on its first choice, and no others are tried
    look_until_nodes: float = math.inf


class PhaseTree:
    """Tree that proves or refutes that no point of the box makes all of some rows at most zero.

    Args:
        relaxation: its first row is the objective.
        scale: (rows,) the factor of each row, a multiple of a row of the property.
        reached: whether one of some scaled inputs (points, n) is a counterexample, which ends the search; if True
            follows, points below these are tried, too.
        left: tells how many seconds are left.
        options: of the search.
        memory: bytes of open nodes.
        decide: decides nodes that nothing else closes, such as z3; None without such a solver.
        observer: told of events.
    """

    def __init__(
        self,
        relaxation: TreeRelaxation,
        scale: Tensor,
        reached: Callable[..., bool],
        left: Callable[[], float],
        options: Branching,
        memory: float,
        decide: Decide | None = None,
        observer: Observer | None = None,
    ) -> None:
        self._relaxation, self._system = relaxation, relaxation.system
        self._scale, self._decide = scale, decide
        self._reached, self._left, self._options = reached, left, options
        size, segments = self._system.size, relaxation.segments
        batch = max(16, min(options.batch, _WORKING // (24 * (self._system.inputs + size + 1))))
        rest = (batch, options.choices, options.look_until_nodes, memory)
        enough = relaxation.slopes.new_zeros(1)
        self.loop = Loop(relaxation, Strategy(self._bound, self._prove, enough, self._remain, 0.0, *rest), observer)
        none, nodes = torch.zeros_like(relaxation.over), Nodes.roots(relaxation, max(1, min(options.choices, size)))
        # A line is better for being adaptive on the side of a kink.
        first = DualAscent(relaxation, none, torch.float32).run(nodes, 0).coefficients[0].double()
        on_side = torch.where(segments.concave, -first, first)
        weight = torch.where(segments.kinked & ~relaxation.over, on_side, first.abs())
        matter = weight.topk(min(size, options.adaptive_neurons)).indices
        self._ascent = DualAscent(relaxation, none.index_fill(0, matter, True), torch.float32)
        # All nodes begin with the root's multipliers.
        root = self._ascent.run(nodes, options.finishing_steps)
        proven = self._prove(root)
        self._at_root = float(proven[0])
        if self._at_root > 0:
            self.loop.note(root, proven)
            self.loop.now.nodes, self.loop.now.state = 1, TreeState.PROVED
        else:
            self.loop.begin(root.nodes)

    def bound(self, stop: Callable[[], bool]) -> float:
        """Return a lower bound of the largest of the property's rows: the root's once ``stop`` says so.

        Open nodes that are proved are closed.
        """
        lower = float(self.loop.now.lower[0])
        for nodes in self.loop.now.open.batches(self.loop.strategy.batch):
            if stop():
                return self._at_root
            found = self._ascent.run(nodes, 0)
            proven = self._prove(found)
            lower = min(lower, float(proven.min()))
            if lower > 0:
                self.loop.note(found, proven)
        return max(lower, self._at_root)

    def _bound(self, nodes: Nodes, look: bool) -> Bounded:
        steps = self._options.look_steps if look else self._options.steps
        found = self._ascent.run(nodes, steps)
        self._count(len(nodes), steps, len(found.columns))
        if not self._system.whole:
            found.blame.mul_(torch.where(self._relaxation.made, 1.0, _NEW).to(found.blame))
        return found

    def _prove(self, found: Bounded) -> Tensor:
        # The rows are multiples of the property's. Where the objective plus Σ μ_i·row_i is at least b, the largest of
        # the property's rows is at least b / (scale_0 + Σ μ_i·scale_i).
        parts = self._scale[0] + found.nodes.mu.double().clamp(min=0) @ self._scale[1:]
        return mean_below(lower_bounds(self._relaxation, found), parts, len(self._scale))

    def _remain(self, found: Bounded) -> Bounded:
        """Look for counterexamples, and finish nodes whose splits promise little."""
        options, now = self._options, self.loop.now
        worst = found.bound.topk(min(len(found.bound), _CANDIDATES), largest=False).indices
        if self._reached(self._ascent.minimisers(found.nodes[worst])):
            now.state = TreeState.REACHED
            return found
        stalled = (_total(found.blame) <= options.finish_below_blame * found.bound.abs()) | (found.blame < 0).all(1)
        numbers = stalled.nonzero().squeeze(1)
        if not len(numbers):
            return found
        remains, one = torch.ones_like(stalled), max(1.0, self._work(1, options.finishing_steps, self._system.size))
        for part in numbers.split(max(1, min(_MOST, int(_TOGETHER / one)))):
            if self._left() > 0 and now.state is TreeState.OPEN:
                remains[part], found = self._finish(found, part)
        return found[remains.nonzero().squeeze(1)]

    def _finish(self, found: Bounded, part: Tensor) -> tuple[Tensor, Bounded]:
        """Return which nodes ``part`` stay open after more steps, and a decision where these gain little."""
        now, mine = self.loop.now, found[part]
        if not self._system.whole:
            # Nothing but splits closes it.
            if bool((mine.blame < 0).all(1).any()):
                now.state = TreeState.STUCK
            found.blame[part] = self._or_gaps(mine)
            return torch.ones_like(part, dtype=torch.bool), found
        mine = self._everywhere.run(mine.nodes, self._options.finishing_steps)
        self._count(len(part), self._options.finishing_steps, self._system.size)
        is_open = ~self.loop.close(mine)
        last = (mine.blame < 0).all(1)
        rest = (is_open & last).nonzero().squeeze(1)
        if len(rest):
            self._count(len(rest), _LAST, self._system.size)
            is_open[rest] = ~self.loop.close(self._everywhere.run(mine.nodes[rest], _LAST, 1.0))
        settled = is_open & (last | (_total(mine.blame) < self._options.decide_below_blame * mine.bound.abs()))
        numbers = settled.nonzero().squeeze(1)
        if len(numbers) and self._reached(self._everywhere.minimisers(mine.nodes[numbers]), True):
            now.state = TreeState.REACHED
        for number in numbers:
            if self._left() <= 0 or now.state is not TreeState.OPEN:
                break
            is_open[number] = not self._decided(mine[number[None]], bool(last[number]))
        found.blame[part] = self._or_gaps(mine).to(found.blame)
        # Multipliers of open neurons without lines of their own are lost.
        width = mine.nodes.segment.shape[1]
        kept = (mine.nodes.segment != 0) | self._ascent.adaptive[self._relaxation.columns[:width]]
        nodes = found.nodes.widened(len(self._relaxation.columns))
        multipliers, mu = nodes.multipliers.clone(), nodes.mu.clone()
        multipliers[part, :width], mu[part] = mine.nodes.multipliers * kept, mine.nodes.mu
        return is_open, replace(found, nodes=replace(nodes, multipliers=multipliers, mu=mu))

    @cached_property
    def _everywhere(self) -> DualAscent:
        return DualAscent(self._relaxation, torch.ones_like(self._relaxation.over), torch.float64)

    def _or_gaps(self, found: Bounded) -> Tensor:
        """Return each neuron's blame; where no linear bound costs anything, the gap between both bounds."""
        segments, width = self._relaxation.segments, self._relaxation.width
        gaps = (torch.maximum(*segments.open_gaps) * width).repeat(len(found.bound), 1)
        mine = torch.maximum(*segments.gaps(found.neurons, found.segment)) * width[found.neurons]
        gaps[:, found.neurons] = mine
        gaps.masked_fill_(found.blame < 0, -1)
        return torch.where(_total(found.blame)[:, None] > 0, found.blame, gaps.to(found.blame))

    def _decided(self, found: Bounded, last: bool) -> bool:
        """Return True if one node is decided to hold no counterexample; it may also be the end of the search."""
        known = None
        if self._decide is not None:
            split = found.segment[0] > 1
            known = self._decide(found.neurons[split], found.segment[0, split])
        if known:
            # Nothing but the sign of the margin is known.
            self.loop.note(found, torch.full_like(found.bound, TINY, dtype=torch.float64))
        elif known is False:
            self.loop.now.state = TreeState.REACHED
        elif last and self._left() > 0:
            self.loop.now.state = TreeState.STUCK
        return known is True

    def _count(self, nodes: int, steps: int, rows: int) -> None:
        self.loop.now.work += self._work(nodes, steps, rows)

    def _work(self, nodes: int, steps: int, rows: int) -> float:
        """Return the work of some steps with some rows of the system, for some nodes."""
        return 2.0 * nodes * (steps + 1) * (rows + _OTHER) * (self._system.inputs + self._system.size)


def _total(blame: Tensor) -> Tensor:
    """Return at most how far each node's bound is below the network's value at the relaxation's minimiser.

    This holds at the best multipliers: a point with a negative value is then a counterexample.
    """
    return blame.clamp(min=0).sum(1)
