"""The loop of branch and bound over splits of neurons, whatever the question.

A node is bounded, closed if that proves enough, and otherwise kept until it is split; then its children are bounded.
A ``Strategy`` says how a node is bounded and proved, and what is tried where a bound leaves it open: trees that exclude
polytopes (``tree``), and trees that tighten intervals of neurons (``refine``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor

from verifiable_relu.search.bab.ascent import Bounded
from verifiable_relu.search.bab.events import NeuronsSplit, NodesClosed, Observer
from verifiable_relu.search.bab.nodes import Frontier, Nodes, OpenNodes
from verifiable_relu.search.bab.relaxation import TreeRelaxation


class State(Enum):
    """What is known of a loop's questions."""

    OPEN = auto()
    PROVED = auto()
    REACHED = auto()
    STUCK = auto()
    FULL = auto()


@dataclass
class TreeProgress:
    """The state of some nodes, and of what these were split into.

    Attributes:
        open: the nodes that are open.
        lower: (objectives,) proven lower bounds of what is closed.
        state: what is known of them all.
        nodes: how many have been bounded.
        work: about how many multiplications, or what takes as long, that took.
        closed: the part of a tree that is closed, a node with d splits counted as 2⁻ᵈ.
        leaves: (objectives,) how many nodes of each are closed.
        columns: the neurons that the nodes have columns for, where they come from another process.
    """

    open: Frontier
    lower: Tensor
    leaves: Tensor
    state: State = State.OPEN
    nodes: int = 0
    work: float = 0.0
    closed: float = 0.0
    columns: Tensor | None = None

    def add(self, other: TreeProgress) -> None:
        """Take the state of other nodes, which are then a part of these."""
        self.open.take(other.open)
        states = {self.state, other.state}
        ended = [state for state in (State.REACHED, State.STUCK, State.FULL) if state in states]
        self.state = ended[0] if ended else State.OPEN if len(self.open) else State.PROVED
        self.nodes, self.work = self.nodes + other.nodes, self.work + other.work
        self.lower, self.closed = torch.minimum(self.lower, other.lower), min(1.0, self.closed + other.closed)
        self.leaves = self.leaves + other.leaves


@dataclass(frozen=True)
class Strategy:
    """How nodes are bounded and closed.

    Attributes:
        bound: bounds nodes, not proven; or only for a look at them.
        prove: returns proven lower bounds (nodes,); −inf or NaN where nothing is proven.
        enough: returns the bounds (nodes,) above which nodes may be closed.
        remain: returns which of the nodes that a bound leaves open stay so after all else that is tried, (nodes,) bool,
            and what is known of all of them.
        floor: nodes are closed with more than this proven.
        batch: nodes that are split at once.
        choices: how many neurons a node may be split on: where there are several, the children by each are bounded.
        looked: from this number of bounded nodes on, nodes are split on the first choice without a look.
        memory: bytes of open nodes.
    """

    bound: Callable[[Nodes, bool], Bounded]
    prove: Callable[[Bounded], Tensor]
    enough: Callable[[Nodes], Tensor]
    remain: Callable[[Bounded], tuple[Tensor, Bounded]]
    floor: float = 0.0
    batch: int = 512
    choices: int = 1
    looked: float = math.inf
    memory: float = math.inf


_OTHER_CHILD = 0.1
"""The weight of the gain of the worse child where choices to split on are compared."""


class Loop:
    """Nodes of one relaxation that are split until all of them are closed.

    Attributes:
        relaxation, strategy: the arguments.
        now: the state of the nodes.
    """

    def __init__(self, relaxation: TreeRelaxation, strategy: Strategy, observer: Observer | None = None) -> None:
        self.relaxation, self.strategy, self._observer = relaxation, strategy, observer
        self.now = self._before = self._none(Frontier())

    def _none(self, part: Frontier) -> TreeProgress:
        lower = self.relaxation.slopes.new_full((self.relaxation.objectives,), torch.inf)
        return TreeProgress(part, lower, torch.zeros_like(lower, dtype=torch.long))

    def begin(self, nodes: Nodes) -> None:
        """Bound nodes, close those that are proved, and keep the others, to be split later."""
        found, now = self.strategy.bound(nodes, False), self.now
        now.nodes += len(nodes)
        rest = (~self.close(found)).nonzero().squeeze(1)
        if len(rest):
            remains, found = self.strategy.remain(found[rest])
            self._push(found[remains.nonzero().squeeze(1)])
        if now.state is State.OPEN and not len(now.open):
            now.state = State.PROVED

    def advance(self, chosen: OpenNodes | None = None) -> None:
        """Split open nodes, those that came last if none are given, and bound what they are split into.

        Args:
            chosen: nodes that are none of the open ones any more.
        """
        self.begin(self._split(self.now.open.pop(self.strategy.batch) if chosen is None else chosen))

    def _split(self, chosen: OpenNodes) -> Nodes:
        """Return the children by the best choices."""
        # In a part of the nodes, those before it was dealt out count as well.
        bounded = self._before.nodes + (0 if self.now is self._before else self.now.nodes)
        neuron = chosen.choices[:, 0]
        if self.strategy.choices > 1 and bounded < self.strategy.looked:
            gains = []
            for choice in chosen.choices.T:
                nodes = chosen.nodes.split_on(choice.clamp(min=0), self.relaxation)
                bound = self.strategy.bound(nodes, True).bound
                gains.append(gain(bound.reshape(2, -1), chosen.bound).masked_fill_(choice < 0, -torch.inf))
            # Of choices that are as good as each other the first is taken.
            neuron = chosen.choices.gather(1, torch.stack(gains, 1).argmax(1, keepdim=True))[:, 0]
        children = chosen.nodes.split_on(neuron, self.relaxation)
        if self._observer is not None:
            place = self.relaxation.places(neuron)[:, None]
            segment = chosen.nodes.widened(len(self.relaxation.columns)).segment.gather(1, place)[:, 0]
            point = self.relaxation.segments.point(neuron, segment)
            self._observer(NeuronsSplit(self.relaxation, neuron, segment, point))
        return children

    def close(self, found: Bounded) -> Tensor:
        """Close the nodes with more than ``floor`` proven; returns which, (nodes,) bool."""
        closed = ~(found.bound <= self.strategy.enough(found.nodes))
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

    def _push(self, found: Bounded) -> None:
        """Keep open nodes."""
        if not len(found.bound):
            return
        choices = torch.zeros_like(found.nodes.objective)[:, None]
        if found.blame.shape[1]:
            likely, choices = found.blame.topk(min(self.strategy.choices, found.blame.shape[1]), 1)
            # The first is split on though nothing may be to blame.
            choices[:, 1:].masked_fill_(likely[:, 1:] <= 0, -1)
        self.now.open.push(OpenNodes(found.nodes, found.bound.float(), choices))
        if self.now.open.bytes > self.strategy.memory and self.now.state is State.OPEN:
            self.now.state = State.FULL

    # Parts of the nodes, for several processes.

    def begin_part(self, part: Frontier) -> None:
        """Go on with a part of the open nodes alone, until ``end_part``."""
        self._before, self.now = self.now, self._none(part)

    def end_part(self) -> TreeProgress:
        """Return the state of the part; the rest is as it was before ``begin_part``."""
        ended, self.now = self.now, self._before
        ended.columns = self.relaxation.columns.clone()
        return ended

    def take_part(self, ended: TreeProgress | None, part: Frontier) -> None:
        """Take the state of a part of the nodes; None where a process has failed, and nothing is known."""
        if ended is None:
            self.now.add(self._none(part))
            return
        if ended.columns is not None and not torch.equal(ended.columns, self.relaxation.columns):
            ended.open = ended.open.moved(self.relaxation.places(ended.columns))
        self.now.add(ended)


def gain(children: Tensor, parent: Tensor) -> Tensor:
    """Return how good splits are, (nodes,), by bounds of both children (2, nodes) and of the parents (nodes,).

    What counts is the part of the way to zero that the better child goes: a tree with one child closed at every node is
    a path, one whose children all gain a little has exponentially many nodes. The other child decides among equals.
    """
    # Of a parent at zero, or without a bound, no part is known: every split of it is as good as another.
    part = ((children - parent) / parent.abs()).nan_to_num(0.0).clamp(0, 1)
    return part.amax(0) + _OTHER_CHILD * part.amin(0)
