"""Branch and bound over the splits of neurons, whatever the question.

A node is bounded, closed if that proves enough, and otherwise kept until it is split; then its children are bounded.
Those who derive from ``Loop`` say how a node is bounded and proved, and which of the open ones are next: trees that
exclude polytopes (``tree``), and trees that tighten intervals of neurons (``refine``).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor

from verifiable_relu.verifiers.bab.ascent import Bounded, Nodes, Packed, depth
from verifiable_relu.verifiers.bab.strip import TreeRelaxation


class State(Enum):
    """What is known of a loop's questions."""

    OPEN = auto()
    PROVED = auto()
    REACHED = auto()
    STUCK = auto()
    FULL = auto()


@dataclass(eq=False)
class OpenNodes:
    """Open nodes with their bounds (nodes,), each with its choices to split on (nodes, choices), the best first."""

    nodes: Nodes
    bound: Tensor
    choices: Tensor

    def __len__(self) -> int:
        return len(self.bound)

    def __getitem__(self, chosen: Tensor) -> OpenNodes:
        return OpenNodes(self.nodes[chosen], self.bound[chosen], self.choices[chosen])


class Frontier:
    """The open nodes; what came last is split first."""

    def __init__(self) -> None:
        self._chunks: list[tuple[Any, ...]] = []

    def __len__(self) -> int:
        return sum(len(bound) for _, bound, _ in self._chunks)

    @property
    def bytes(self) -> int:
        """The memory that the nodes take."""
        return sum(p.bytes + b.nbytes + c.nbytes for p, b, c in self._chunks)

    def push(self, nodes: Nodes, bound: Tensor, choices: Tensor) -> None:
        """Keep some nodes, at least one, as ``OpenNodes`` has them."""
        self._chunks.append((nodes.packed(), bound.float(), choices))

    def pop(self, count: int) -> OpenNodes:
        """Return the last nodes, at most ``count`` and at least one."""
        chosen = []
        while self._chunks and count > 0:
            chunk = self._chunks.pop()
            if len(chunk[0]) > count:
                first = len(chunk[0]) - count
                self._chunks.append(tuple(part[:first] for part in chunk))
                chunk = tuple(part[first:] for part in chunk)
            chosen.append(chunk)
            count -= len(chunk[0])
        packed, bounds, choices = zip(*chosen, strict=True)
        return OpenNodes(Packed.join(packed), torch.cat(bounds), torch.cat(choices))

    def batches(self, size: int) -> Iterator[Nodes]:
        """Yield all nodes, at most ``size`` at a time."""
        return (Packed.join([p[i : i + size]]) for p, _, _ in self._chunks for i in range(0, len(p), size))

    def dealt(self, hands: int) -> list[Frontier]:
        """Return the nodes dealt out one by one, early and late ones to every hand; none stay here."""
        dealt = [Frontier() for _ in range(hands)]
        begin = 0
        for chunk in self._chunks:
            count = len(chunk[0])
            for number, hand in enumerate(dealt):
                # A copy: views of views would have strides without bounds, and be sent with all that they are views of.
                mine = torch.arange(count)[(number - begin) % hands :: hands]
                if len(mine):
                    hand._chunks.append(tuple(part[mine] for part in chunk))
            begin += count
        self._chunks = []
        return dealt

    def take(self, other: Frontier) -> None:
        """Put all nodes of another frontier, which is not used any more, behind those that are here."""
        self._chunks += other._chunks


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
        leaves: the nodes that are closed, where they are kept.
    """

    open: Frontier
    lower: Tensor
    state: State = State.OPEN
    nodes: int = 0
    work: float = 0.0
    closed: float = 0.0
    leaves: list[Any] = field(default_factory=list)

    def add(self, other: TreeProgress) -> None:
        """Take the state of other nodes, which are then a part of these."""
        self.open.take(other.open)
        states = {self.state, other.state}
        ended = [state for state in (State.REACHED, State.STUCK, State.FULL) if state in states]
        self.state = ended[0] if ended else State.OPEN if len(self.open) else State.PROVED
        self.nodes, self.work = self.nodes + other.nodes, self.work + other.work
        self.lower, self.closed = torch.minimum(self.lower, other.lower), min(1.0, self.closed + other.closed)
        self.leaves += other.leaves


_OTHER_CHILD = 0.1
"""The weight of the gain of the worse child where choices to split on are compared."""


class Loop(ABC):
    """Nodes that are split until all of them are closed.

    Args:
        strip: the relaxation of all nodes.
        objectives: how many questions there are, each node being part of one.
        batch: how many nodes are split at once.
        choices: how many neurons a node may be split on: where there are several, the children by each are bounded.
        memory: bytes of open nodes.
        looked: from this number of bounded nodes on, nodes are split on the first choice without a look.

    Attributes:
        strip: as above.
        now: the state of the nodes.
    """

    def __init__(
        self,
        strip: TreeRelaxation,
        objectives: int,
        batch: int,
        choices: int = 1,
        memory: float = math.inf,
        looked: float = math.inf,
    ) -> None:
        self.strip, self._objectives, self._smooth = strip, objectives, strip.folded.smooth
        self._batch, self._choices, self._memory, self._looked = batch, choices, memory, looked
        self.now = self._before = self._none(Frontier())

    def _none(self, part: Frontier) -> TreeProgress:
        return TreeProgress(part, torch.full((self._objectives,), torch.inf, dtype=torch.float64))

    # The kinds of loops differ in these.

    @abstractmethod
    def bounded(self, nodes: Nodes, look: bool = False) -> Bounded:
        """Bound nodes, not proven, or only for a look at them; takes note of the work."""

    @abstractmethod
    def proven(self, nodes: Nodes, found: Bounded) -> Tensor:
        """Return proven lower bounds (nodes,) by what bounding nodes has found; −inf where nothing is proven."""

    @abstractmethod
    def enough(self, nodes: Nodes) -> Tensor:
        """Return the bounds (nodes,) above which nodes may be closed."""

    @abstractmethod
    def leaves(self, nodes: Nodes, found: Bounded) -> Any:
        """Return what proves nodes that are closed; None where that is not kept."""

    @abstractmethod
    def more(self, nodes: Nodes, found: Bounded) -> Tensor:
        """Return which of the nodes that a bound leaves open stay so after all else that is tried, (nodes,) bool."""

    # The loop.

    def begin(self, nodes: Nodes) -> None:
        """Bound nodes, close those that are proved, and keep the others, to be split later."""
        found, now = self.bounded(nodes), self.now
        now.nodes += len(nodes)
        rest = (~self.close(nodes, found)).nonzero().squeeze(1)
        if len(rest):
            nodes, found = nodes[rest], found[rest]
            rest = self.more(nodes, found).nonzero().squeeze(1)
            self.push(nodes[rest], found[rest])
        if now.state is State.OPEN and not len(now.open):
            now.state = State.PROVED

    def advance(self, chosen: OpenNodes | None = None) -> None:
        """Split open nodes, those that came last if none are given, and bound what they are split into.

        Args:
            chosen: nodes that are none of the open ones any more.
        """
        self.begin(self._split(chosen or self.now.open.pop(self._batch)))

    def _split(self, chosen: OpenNodes) -> Nodes:
        """Return the children by the best choices."""
        # In a part of the nodes, those before it was dealt out count as well.
        bounded = self._before.nodes + (0 if self.now is self._before else self.now.nodes)
        if self._choices == 1 or bounded >= self._looked:
            return chosen.nodes.split_on(chosen.choices[:, 0], self.strip.curves)
        tried, gains = [], []
        for choice in chosen.choices.T:
            nodes = chosen.nodes.split_on(choice.clamp(min=0), self.strip.curves)
            bound = self.bounded(nodes, look=True).bound
            gains.append(gain(bound.reshape(2, -1), chosen.bound).masked_fill_(choice < 0, -torch.inf))
            tried.append(nodes.packed())
        # Of choices that are as good as each other the first is taken.
        best, every = torch.stack(gains).argmax(0), torch.arange(len(chosen))
        place = best * 2 * len(chosen) + every
        return Packed.join(tried)[torch.cat([place, place + len(chosen)])]

    def close(self, nodes: Nodes, found: Bounded, floor: float = 0.0) -> Tensor:
        """Close the nodes with more than ``floor`` proven; returns which, (nodes,) bool."""
        closed = ~(found.bound <= self.enough(nodes))
        likely = closed.nonzero().squeeze(1)
        if len(likely):
            lower = self.proven(nodes[likely], found[likely])
            closed[likely] = lower > floor
            done = likely[lower > floor]
            if len(done):
                mine = nodes[done]
                self.note(mine, lower[lower > floor], self.leaves(mine, found[done]))
        return closed

    def note(self, nodes: Nodes, lower: Tensor, leaves: Any) -> None:
        """Take note of nodes that are closed, with these bounds (nodes,), and what proves them if that is kept."""
        now = self.now
        now.lower = now.lower.scatter_reduce(0, nodes.objective, lower, "amin")
        now.closed = min(1.0, now.closed + float((-depth(nodes.split, self._smooth)).exp2().sum()))
        if leaves is not None:
            now.leaves.append(leaves)

    def push(self, nodes: Nodes, found: Bounded) -> None:
        """Keep open nodes."""
        if not len(nodes):
            return
        choices = torch.zeros(len(nodes), 1, dtype=torch.long)
        if found.blame.shape[1]:
            likely, choices = found.blame.topk(min(self._choices, found.blame.shape[1]), 1)
            # The first is split on though nothing may be to blame.
            choices[:, 1:].masked_fill_(likely[:, 1:] <= 0, -1)
        self.now.open.push(nodes, found.bound, choices)
        if self.now.open.bytes > self._memory and self.now.state is State.OPEN:
            self.now.state = State.FULL

    # Parts of the nodes, for several processes.

    def begin_part(self, part: Frontier) -> None:
        """Go on with a part of the open nodes alone, until ``end_part``."""
        self._before, self.now = self.now, self._none(part)

    def end_part(self) -> TreeProgress:
        """Return the state of the part; the rest is as it was before ``begin_part``."""
        ended, self.now = self.now, self._before
        return ended

    def take_part(self, ended: TreeProgress | None, part: Frontier) -> None:
        """Take the state of a part of the nodes; None where a process has failed, and nothing is known."""
        self.now.add(ended or self._none(part))


def gain(children: Tensor, parent: Tensor) -> Tensor:
    """Return how good splits are, (nodes,), by bounds of both children (2, nodes) and of the parents (nodes,).

    What counts is the part of the way to zero that the better child goes: a tree with one child closed at every node is
    a path, one whose children all gain a little has exponentially many nodes. The other child decides among equals.
    """
    # Of a parent at zero, or without a bound, no part is known: every split of it is as good as another.
    part = ((children - parent) / parent.abs()).nan_to_num(0.0).clamp(0, 1)
    return part.amax(0) + _OTHER_CHILD * part.amin(0)
