"""Branch and bound, whatever its nodes are and however these are bounded.

A node is bounded, closed if that proves enough, and otherwise kept until it is split; then its children are bounded.
What a node is, how it is bounded, split and proved, and which of the open ones are next, is told by those who derive
from ``Loop``: trees that exclude polytopes (``tree``), and trees that tighten intervals of neurons (``refine``).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor


class Kind(Protocol):
    """Nodes that are bounded together; ``objective``, (nodes,), says which of the loop's questions each is part of."""

    objective: Tensor

    def __len__(self) -> int: ...
    def __getitem__(self, chosen: Tensor) -> Self: ...


class Result(Protocol):
    """What bounding nodes has found: ``bound``, (nodes,) that of each; and ``blame``, (nodes, choices).

    The blame of a choice tells how much the bound may gain where the node is split on it, −1 where it is not.
    """

    bound: Tensor
    blame: Tensor

    def __getitem__(self, chosen: Tensor) -> Self: ...


class State(Enum):
    """What is known of a loop's questions."""

    OPEN = auto()
    PROVED = auto()
    REACHED = auto()
    STUCK = auto()
    FULL = auto()


K = TypeVar("K", bound=Kind)
R = TypeVar("R", bound=Result)


@dataclass(eq=False)
class Open(Generic[K]):
    """Open nodes with their bounds (nodes,), each with what it may be split on (nodes, choices), the best first."""

    nodes: K
    bound: Tensor
    choices: Tensor

    def __len__(self) -> int:
        return len(self.bound)

    def __getitem__(self, chosen: Tensor) -> Open[K]:
        return Open(self.nodes[chosen], self.bound[chosen], self.choices[chosen])


class Frontier(Generic[K]):
    """The open nodes; what came last is split first.

    Args:
        join: makes nodes of parts that were packed.
    """

    def __init__(self, join: Callable[[Sequence[Any]], K]) -> None:
        self._join = join
        self._chunks: list[tuple[Any, ...]] = []

    def __len__(self) -> int:
        return sum(len(bound) for _, bound, _ in self._chunks)

    @property
    def bytes(self) -> int:
        """What the nodes take."""
        return sum(p.bytes + b.nbytes + c.nbytes for p, b, c in self._chunks)

    def push(self, packed: Any, bound: Tensor, choices: Tensor) -> None:
        """Keep some nodes, at least one, as ``Open`` has them."""
        self._chunks.append((packed, bound.float(), choices))

    def pop(self, count: int) -> Open[K]:
        """The last nodes, so many at most and at least one."""
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
        return Open(self._join(packed), torch.cat(bounds), torch.cat(choices))

    def batches(self, size: int) -> Iterator[K]:
        """All nodes, so many at a time at most."""
        return (self._join([p[i : i + size]]) for p, _, _ in self._chunks for i in range(0, len(p), size))

    def dealt(self, hands: int) -> list[Frontier[K]]:
        """The nodes dealt out one by one, early and late ones to every hand; none stay here."""
        dealt = [Frontier(self._join) for _ in range(hands)]
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

    def take(self, other: Frontier[K]) -> None:
        """Put all nodes of another frontier, which is not used any more, behind those that are here."""
        self._chunks += other._chunks


@dataclass
class TreeProgress(Generic[K]):
    """What has become of some nodes, and of what these were split into.

    Attributes:
        open: the nodes that are open.
        lower: (objectives,) proven lower bounds of what is closed.
        state: what is known of them all.
        nodes: how many have been bounded.
        work: about how many multiplications, or what takes as long, that took.
        closed: the part of a tree that is closed, a node with d splits counted as 2⁻ᵈ.
        leaves: the nodes that are closed, where they are kept.
    """

    open: Frontier[K]
    lower: Tensor
    state: State = State.OPEN
    nodes: int = 0
    work: float = 0.0
    closed: float = 0.0
    leaves: list[Any] = field(default_factory=list)

    def add(self, other: TreeProgress[K]) -> None:
        """Take what has become of other nodes, which are then a part of these."""
        self.open.take(other.open)
        states = {self.state, other.state}
        ended = [state for state in (State.REACHED, State.STUCK, State.FULL) if state in states]
        self.state = ended[0] if ended else State.OPEN if len(self.open) else State.PROVED
        self.nodes, self.work = self.nodes + other.nodes, self.work + other.work
        self.lower, self.closed = torch.minimum(self.lower, other.lower), min(1.0, self.closed + other.closed)
        self.leaves += other.leaves


_OTHER_CHILD = 0.1
"""What the gain of the worse child counts where choices to split on are compared."""


class Loop(ABC, Generic[K, R]):
    """Nodes that are split until all of them are closed.

    Args:
        objectives: how many questions there are, of which each node is a part of one.
        join: as ``Frontier`` takes it.
        batch: how many nodes are split at once.
        choices: on how many neurons, or what else there is, a node may be split: where there are several, the children
            by each are bounded.
        memory: bytes of open nodes.
        looked: once so many nodes have been bounded, nodes are split on the first choice without a look.

    Attributes:
        now: what has become of the nodes.
    """

    def __init__(
        self,
        objectives: int,
        join: Callable[[Sequence[Any]], K],
        batch: int,
        choices: int,
        memory: float,
        looked: float = math.inf,
    ) -> None:
        self._join, self._batch, self._choices, self._memory, self._looked = join, batch, choices, memory, looked
        self._objectives = objectives
        self.now = self._before = self._none(Frontier(join))

    def _none(self, part: Frontier[K]) -> TreeProgress[K]:
        return TreeProgress(part, torch.full((self._objectives,), torch.inf, dtype=torch.float64))

    # What the kinds of loops differ in.

    @abstractmethod
    def bounded(self, nodes: K, look: bool = False) -> R:
        """Bound nodes, not proven, or only for a look at them; takes note of the work."""

    @abstractmethod
    def proven(self, nodes: K, found: R) -> Tensor:
        """(nodes,) proven lower bounds by what bounding them has found; −inf where nothing is proven."""

    @abstractmethod
    def children(self, nodes: K, choice: Tensor) -> K:
        """Twice as many nodes: the first child of each node by its choice (nodes,), then the second of each."""

    @abstractmethod
    def enough(self, nodes: K) -> Tensor:
        """(nodes,) what a node's bound is to be above so that it may be closed."""

    @abstractmethod
    def packed(self, nodes: K) -> Any:
        """Nodes as they are kept: in little memory, which ``bytes`` tells, with a length, and parts by ``[]``."""

    @abstractmethod
    def depth(self, nodes: K) -> Tensor:
        """(nodes,) how many splits led to each node."""

    def leaves(self, nodes: K, found: R) -> Any:
        """What proves nodes that are closed; None where that is not kept."""
        return None

    def more(self, nodes: K, found: R) -> Tensor:
        """(nodes,) bool, which of the nodes that a bound leaves open stay so after all else that is tried."""
        return torch.ones(len(nodes), dtype=torch.bool)

    # The loop.

    def begin(self, roots: K) -> None:
        """Bound the first nodes."""
        self._take(roots)

    def advance(self, chosen: Open[K] | None = None) -> None:
        """Split open nodes, those that came last if none are given, and bound what they are split into.

        Args:
            chosen: nodes that are none of the open ones any more.
        """
        self._take(self._split(chosen or self.now.open.pop(self._batch)))

    @property
    def _bounded_so_far(self) -> int:
        """How many nodes have been bounded, in a part of them those before it was dealt out as well."""
        return self._before.nodes + (0 if self.now is self._before else self.now.nodes)

    def _split(self, chosen: Open[K]) -> K:
        """The children by the best choices."""
        if self._choices == 1 or self._bounded_so_far >= self._looked:
            return self.children(chosen.nodes, chosen.choices[:, 0])
        tried, gains = [], []
        for choice in chosen.choices.T:
            nodes = self.children(chosen.nodes, choice.clamp(min=0))
            bound = self.bounded(nodes, look=True).bound
            gains.append(gain(bound.reshape(2, -1), chosen.bound).masked_fill_(choice < 0, -torch.inf))
            tried.append(self.packed(nodes))
        # Of choices that are as good as each other the first is taken.
        best, every = torch.stack(gains).argmax(0), torch.arange(len(chosen))
        place = best * 2 * len(chosen) + every
        return self._join(tried)[torch.cat([place, place + len(chosen)])]

    def _take(self, nodes: K) -> None:
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

    def close(self, nodes: K, found: R, floor: float = 0.0) -> Tensor:
        """Close the nodes of which more than ``floor`` is proven; returns which, (nodes,) bool."""
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

    def note(self, nodes: K, lower: Tensor, leaves: Any) -> None:
        """Take note of nodes that are closed, with these bounds (nodes,), and what proves them if that is kept."""
        now = self.now
        now.lower = least(now.lower, nodes.objective, lower)
        now.closed = min(1.0, now.closed + float((-self.depth(nodes)).exp2().sum()))
        if leaves is not None:
            now.leaves.append(leaves)

    def push(self, nodes: K, found: R) -> None:
        """Keep open nodes."""
        if not len(nodes):
            return
        choices = torch.zeros(len(nodes), 1, dtype=torch.long)
        if found.blame.shape[1]:
            likely, choices = found.blame.topk(min(self._choices, found.blame.shape[1]), 1)
            # The first is split on though nothing may be to blame.
            choices[:, 1:].masked_fill_(likely[:, 1:] <= 0, -1)
        self.now.open.push(self.packed(nodes), found.bound, choices)
        if self.now.open.bytes > self._memory and self.now.state is State.OPEN:
            self.now.state = State.FULL

    # Parts of the nodes, for several processes.

    def begin_part(self, part: Frontier[K]) -> None:
        """Go on with a part of the open nodes alone, until ``end_part``."""
        self._before, self.now = self.now, self._none(part)

    def end_part(self) -> TreeProgress[K]:
        """What has become of the part; the rest is as it was before ``begin_part``."""
        ended, self.now = self.now, self._before
        return ended

    def take_part(self, ended: TreeProgress[K] | None, part: Frontier[K]) -> None:
        """Take what has become of a part of the nodes, of which nothing is known where a process has failed."""
        self.now.add(ended or self._none(part))


def least(before: Tensor, objective: Tensor, lower: Tensor) -> Tensor:
    """(objectives,) the least bounds ``before`` and of nodes with bounds ``lower``, each part of an objective."""
    return before.scatter_reduce(0, objective, lower, "amin")


def gain(children: Tensor, parent: Tensor) -> Tensor:
    """How good splits are, (nodes,), by the bounds of both children (2, nodes) and of the parents (nodes,).

    What counts is the part of the way to zero that the better child goes: a tree with one child closed at every node is
    a path, one whose children all gain a little has exponentially many nodes. The other child decides among equals.
    """
    # Of a parent at zero, or without a bound, no part is known: every split of it is as good as another.
    part = ((children - parent) / parent.abs()).nan_to_num(0.0).clamp(0, 1)
    return part.amax(0) + _OTHER_CHILD * part.amin(0)
