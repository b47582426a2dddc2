"""The loop of branch and bound over neuron splits, for any question, and the nodes that it works on.

A *segment* is the part of a neuron's interval that splits have left (``relaxation.Segments``); a node has one of each
neuron. Its tensors have a column for each neuron that was ever split in the tree, or whose linear bounds are optimised.

A node is bounded, closed if that proves enough, and otherwise kept until it is split; then its children are bounded.
It is split on the neuron with the most *blame*: the most by which a neuron's linear bounds loosen the node's bound. Or
the children by several of them are bounded, and ``gain`` decides. A ``Strategy`` says how nodes are bounded and proved,
in trees that exclude polytopes (``tree``) and in those that tighten intervals (``query.refine_intervals``).

**Events** tell an observer what a search proves, at the moment it is proven. An event holds tensors of a batch: all
that another proof of the same inequality (``proof``) needs. Multipliers are hints: whoever writes them may round them.
Trees are told apart by their relaxations, which have the system, slopes, rows, and the points where segments were cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum, auto

import torch
from torch import Tensor
from torch.nn.functional import pad

from verifiable_relu.search.bab.relaxation import TreeRelaxation
from verifiable_relu.search.records import Stack, TensorRecord

_OTHER_CHILD = 0.1  # The weight of the gain of the worse child where choices to split on are compared


@dataclass(frozen=True, eq=False)
class TreeBegun:
    """A tree that is to exclude a polytope has begun; if several trees are, one proven tree suffices."""

    relaxation: TreeRelaxation  # Of the tree
    polytope: int  # Its number, as ``PropertyRows`` counts polytopes
    order: Tensor  # (rows,) which row of the polytope each row of the relaxation is; the first is the objective
    scale: Tensor  # (rows,) the factors of the rows


@dataclass(frozen=True, eq=False)
class TreeEnded:
    """A tree has ended or was given up; if it ``is_proved``, its closed nodes exclude the polytope."""

    relaxation: TreeRelaxation
    is_proved: bool


@dataclass(frozen=True, eq=False)
class NodesClosed:
    """Nodes of a tree have been proven, with these multipliers."""

    relaxation: TreeRelaxation  # Of the tree
    objective: Tensor  # (nodes,) the row that is bounded
    neurons: Tensor  # (k,) the neurons with segments or multipliers, by their numbers in the system
    segment: Tensor  # (nodes, k) their segments; 0 and 1 are the whole interval
    w: Tensor  # (nodes, k) the multipliers of their pre-activations; those of all other neurons are 0
    v: Tensor  # (nodes, h) those of the values of the h of these neurons that have hull cuts (``TreeRelaxation.base``)
    mu: Tensor  # (nodes, rows behind the objectives) multipliers of rows
    lower: Tensor  # (nodes,) what is proven of the objective, or of the largest row of its polytope


@dataclass(frozen=True, eq=False)
class IntervalsTightened:
    """Trees have proven tighter intervals of pre-activations; their leaves were reported before."""

    op: int  # The elementwise op that the pre-activations feed
    numbers: Tensor  # (count,) its elements
    # lower, upper: (count,) the ends; infinite where nothing was gained
    lower: Tensor
    upper: Tensor
    # Of the trees: its first objectives are the pre-activations ``numbers``, then their negatives
    relaxation: TreeRelaxation


Event = TreeBegun | TreeEnded | NodesClosed | IntervalsTightened
Observer = Callable[[Event], None]


@dataclass(frozen=True, eq=False)
class Nodes(TensorRecord):
    """A batch of nodes; each tensor has a row per node."""

    segment: Tensor  # (nodes, k) int8, the segment of each neuron among the first k columns; 0 if it is open
    multipliers: Tensor  # (nodes, k) γ of the neurons, as the ascent has them
    mu: Tensor  # (nodes, rows behind the objectives) the multipliers of these rows
    objective: Tensor  # (nodes,) the number of the relaxation's row that is bounded
    bound: Tensor  # (nodes,) the bound that left the node open, not proven
    choices: Tensor  # (nodes, choices) neurons to split on, the best first; −1 is none

    @staticmethod
    def roots(relaxation: TreeRelaxation, choices: int = 1) -> Nodes:
        """Return a node without splits for each objective."""
        like, count, k = relaxation.slopes.float(), relaxation.objectives, len(relaxation.columns)
        segment = torch.zeros(count, k, dtype=torch.int8, device=like.device)
        multipliers, mu = like.new_zeros(count, k), like.new_zeros(count, len(relaxation.rows) - count)
        objective = torch.arange(count, device=like.device)
        return Nodes(segment, multipliers, mu, objective, mu.new_zeros(count), objective.new_zeros(count, choices))

    def widened(self, columns: int) -> Nodes:
        """Return the nodes with more columns, of open neurons."""
        more = columns - self.segment.shape[1]
        if not more:
            return self
        return replace(self, segment=pad(self.segment, (0, more)), multipliers=pad(self.multipliers, (0, more)))

    def moved(self, place: Tensor) -> Nodes:
        """Return the nodes with their columns at other places (columns,)."""
        width, at = int(place.max()) + 1 if len(place) else 0, place[: self.segment.shape[1]]
        old = (self.segment, self.multipliers)
        segment, multipliers = (t.new_zeros(len(self), width).index_copy_(1, at, t) for t in old)
        return replace(self, segment=segment, multipliers=multipliers)

    def split_on(self, neuron: Tensor, relaxation: TreeRelaxation) -> Nodes:
        """Return the children of nodes split on a neuron each (nodes,): all upper halves, then all lower halves.

        A segment that is not cut any further is the same in both halves.
        """
        place = relaxation.places(neuron)[:, None]
        wide = self.widened(len(relaxation.columns))
        before = wide.segment.gather(1, place)[:, 0]
        relaxation.segments.cut(neuron, before)
        lower = 2 * before.clamp(min=1)
        whole = before >= relaxation.segments.last[neuron]
        halves = torch.cat([torch.where(whole, before, half) for half in (lower + 1, lower)])
        every = torch.arange(len(self), device=neuron.device).repeat(2)
        twice = replace(wide, multipliers=wide.multipliers.scatter(1, place, 0))[every]
        return replace(twice, segment=twice.segment.scatter(1, place[every], halves[:, None]))

    def depth(self) -> Tensor:
        """Return the number of splits that led to each node, (nodes,) in float64: the cuts that made its segments."""
        return self.segment.double().clamp(min=1).log2().floor().sum(1)


@dataclass(frozen=True, eq=False)
class Bounded:
    """The best that an ascent found for each node of a batch."""

    nodes: Nodes  # The nodes, with the multipliers γ and μ that were found
    bound: Tensor  # (nodes,) of each node's objective; not a proof
    columns: Tensor  # (k,) the columns of neurons that have multipliers in some node, by ascending neuron
    neurons: Tensor  # (k,) these neurons
    segment: Tensor  # (nodes, k) their segments; 0 where only 0 ≤ q̃ ≤ 1 is used
    w: Tensor  # (nodes, k) their multipliers
    v: Tensor  # (nodes, h) those of the values of the h of these neurons that have hull cuts
    coefficients: Tensor  # (nodes, m) of the remainders q̃
    blame: Tensor  # (nodes, m) how much the lines of each neuron cost the bound at most; −1 if it is not split further

    def __getitem__(self, chosen: Tensor) -> Bounded:
        parts = (t[chosen] for t in (self.segment, self.w, self.v, self.coefficients, self.blame))
        return Bounded(self.nodes[chosen], self.bound[chosen], self.columns, self.neurons, *parts)


class TreeState(Enum):
    """State of a tree; one that is searched in several parts has the last of their states."""

    PROVED = auto()
    OPEN = auto()
    FULL = auto()
    STUCK = auto()
    REACHED = auto()


@dataclass
class TreeProgress:
    """Progress of a tree: its open nodes, and what is proven and spent so far."""

    open: Stack[Nodes]  # The nodes that are open
    # lower, leaves: (objectives,) proven lower bounds of the nodes of each that are closed, and how many these are
    lower: Tensor
    leaves: Tensor
    state: TreeState = TreeState.OPEN  # The state of all of them
    nodes: int = 0  # How many have been bounded
    work: float = 0.0  # About how many multiplications, or what takes as long, that took
    closed: float = 0.0  # The part of a tree that is closed, a node with d splits counted as 2⁻ᵈ
    columns: Tensor | None = None  # The neurons that the nodes have columns for, where they come from another process


@dataclass(frozen=True)
class Strategy:
    """Functions and limits with which a loop bounds and closes nodes."""

    bound: Callable[[Nodes, bool], Bounded]  # Bounds nodes, not proven; or only for a look at them
    prove: Callable[[Bounded], Tensor]  # Returns proven lower bounds (nodes,); −inf or NaN where nothing is proven
    enough: Tensor  # (objectives,) the bounds above which nodes may be closed
    # Returns those of the nodes that a bound leaves open which stay so after all else that is tried
    remain: Callable[[Bounded], Bounded]
    floor: float = 0.0  # Nodes are closed with more than this proven
    batch: int = 512  # Nodes that are split at once
    # How many neurons a node may be split on: where there are several, the children by each are bounded
    choices: int = 1
    look_until_nodes: float = math.inf  # After this number of bounded nodes, each is split on its first choice
    memory: float = math.inf  # Bytes of open nodes


class Loop:
    """Nodes of one relaxation that are split until all of them are closed.

    Attributes:
        relaxation, strategy: the arguments.
        now: the state of the nodes.
    """

    def __init__(self, relaxation: TreeRelaxation, strategy: Strategy, observer: Observer | None = None) -> None:
        self.relaxation, self.strategy, self._observer = relaxation, strategy, observer
        self.now = self._before = self._none(Stack(Nodes.roots(relaxation)[:0]))

    def _none(self, part: Stack[Nodes]) -> TreeProgress:
        lower = self.relaxation.slopes.new_full((self.relaxation.objectives,), torch.inf)
        return TreeProgress(part, lower, torch.zeros_like(lower, dtype=torch.long))

    def begin(self, nodes: Nodes) -> None:
        """Bound nodes, close those that are proved, and keep the others, to be split later."""
        found, now = self.strategy.bound(nodes, False), self.now
        now.nodes += len(nodes)
        rest = (~self.close(found)).nonzero().squeeze(1)
        if len(rest):
            found = self.strategy.remain(found[rest])
            choices = torch.zeros_like(found.nodes.choices)
            if found.blame.shape[1]:
                likely, choices = found.blame.topk(choices.shape[1], 1)
                # The first is split on though nothing may be to blame.
                choices[:, 1:].masked_fill_(likely[:, 1:] <= 0, -1)
            now.open.push(replace(found.nodes, bound=found.bound.float(), choices=choices))
        if now.state is TreeState.OPEN and not len(now.open):
            now.state = TreeState.PROVED
        elif now.state is TreeState.OPEN and now.open.bytes > self.strategy.memory:
            now.state = TreeState.FULL

    def advance(self, chosen: Nodes | None = None) -> None:
        """Split open nodes, those that came last if none are given, and bound what they are split into.

        Args:
            chosen: nodes that have been taken out of the open ones.
        """
        chosen = self.now.open.pop(self.strategy.batch) if chosen is None else chosen
        neuron = chosen.choices[:, 0]
        # In a part of the nodes, those before it was dealt out count as well.
        bounded = self._before.nodes + (0 if self.now is self._before else self.now.nodes)
        if self.strategy.choices > 1 and bounded < self.strategy.look_until_nodes:
            gains = []
            for choice in chosen.choices.T:
                bound = self.strategy.bound(chosen.split_on(choice.clamp(min=0), self.relaxation), True).bound
                gains.append(gain(bound.reshape(2, -1), chosen.bound).masked_fill_(choice < 0, -torch.inf))
            # Of choices that are as good as each other the first is taken.
            neuron = chosen.choices.gather(1, torch.stack(gains, 1).argmax(1, keepdim=True))[:, 0]
        self.begin(chosen.split_on(neuron, self.relaxation))

    def close(self, found: Bounded) -> Tensor:
        """Close the nodes whose proven bound exceeds ``floor``; returns which are closed, (nodes,) bool."""
        closed = ~(found.bound <= self.strategy.enough[found.nodes.objective])
        likely = closed.nonzero().squeeze(1)
        if len(likely):
            mine = found[likely]
            lower = self.strategy.prove(mine)
            proved = lower > self.strategy.floor
            closed[likely] = proved
            done = proved.nonzero().squeeze(1)
            if len(done):
                self.note(mine[done], lower[done])
        return closed

    def note(self, found: Bounded, lower: Tensor) -> None:
        """Take note of nodes that are closed, with these bounds (nodes,)."""
        now, nodes = self.now, found.nodes
        now.lower = now.lower.scatter_reduce(0, nodes.objective, lower, "amin")
        now.leaves = now.leaves + torch.bincount(nodes.objective, minlength=len(now.leaves))
        now.closed = min(1.0, now.closed + float((-nodes.depth()).exp2().sum()))
        if self._observer is not None:
            parts = (nodes.objective, found.neurons, found.segment, found.w, found.v, nodes.mu)
            self._observer(NodesClosed(self.relaxation, *parts, lower))

    # Parts of the nodes, for several processes.

    def begin_part(self, part: Stack[Nodes]) -> None:
        """Go on with a part of the open nodes alone, until ``end_part``."""
        self._before, self.now = self.now, self._none(part)

    def end_part(self) -> TreeProgress:
        """Return the state of the part; the rest is as it was before ``begin_part``."""
        ended, self.now = self.now, self._before
        ended.columns = self.relaxation.columns.clone()
        return ended

    def take_part(self, ended: TreeProgress | None, part: Stack[Nodes]) -> None:
        """Take the state of a part of the nodes; None where a process has failed, and nothing is known."""
        now, more = self.now, ended or self._none(part)
        if len(more.open):
            nodes = more.open.pop(len(more.open))
            if more.columns is not None and not torch.equal(more.columns, self.relaxation.columns):
                nodes = nodes.moved(self.relaxation.places(more.columns))
            now.open.push(nodes)
        ends = max(now.state, more.state, key=lambda state: state.value)
        now.state = ends if ends.value > TreeState.OPEN.value else TreeState.OPEN if len(now.open) else TreeState.PROVED
        now.nodes, now.work = now.nodes + more.nodes, now.work + more.work
        now.lower, now.closed = torch.minimum(now.lower, more.lower), min(1.0, now.closed + more.closed)
        now.leaves = now.leaves + more.leaves


def gain(children: Tensor, parent: Tensor) -> Tensor:
    """Return scores of splits, (nodes,), from bounds of both children (2, nodes) and of the parents (nodes,).

    What counts is the part of the way to zero that the better child goes: a tree with one child closed at every node is
    a path, one whose children all gain a little has exponentially many nodes. The other child decides among equals.
    """
    # Of a parent at zero, or without a bound, no part is known: every split of it is as good as another.
    part = ((children - parent) / parent.abs()).nan_to_num(0.0).clamp(0, 1)
    return part.amax(0) + _OTHER_CHILD * part.amin(0)
