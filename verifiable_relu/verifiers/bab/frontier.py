"""The open nodes of a tree, and what becomes of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

import torch
from torch import Tensor

from verifiable_relu.verifiers.bab.leaves import Leaves
from verifiable_relu.verifiers.bab.nodes import Batch


@dataclass(eq=False)
class _Chunk:
    """Open nodes with their bounds, each with the neurons that it may be split on, the likeliest first.

    Columns without splits or multipliers are left out.
    """

    columns: Tensor
    split: Tensor
    multipliers: Tensor
    mu: Tensor
    bound: Tensor
    neurons: Tensor

    def __getitem__(self, chosen: slice | Tensor) -> _Chunk:
        rest = (t[chosen] for t in (self.split, self.multipliers, self.mu, self.bound, self.neurons))
        return _Chunk(self.columns, *rest)

    def batch(self, size: int) -> Batch:
        """The nodes with all their ``size`` columns."""
        split = torch.zeros(len(self), size, dtype=torch.int8)
        multipliers = torch.zeros(len(self), size)
        split[:, self.columns], multipliers[:, self.columns] = self.split, self.multipliers
        return Batch(split, multipliers, self.mu, torch.zeros(len(self.mu), dtype=torch.long))

    def __len__(self) -> int:
        return len(self.bound)

    @property
    def bytes(self) -> int:
        return len(self) * (5 * len(self.columns) + 4 * self.mu.shape[1] + 4 + 8 * self.neurons.shape[1])


class Frontier:
    """The open nodes of a tree over so many neurons; what came last is split first."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._chunks: list[_Chunk] = []

    def __len__(self) -> int:
        return sum(len(chunk) for chunk in self._chunks)

    @property
    def bytes(self) -> int:
        """What the nodes take."""
        return sum(chunk.bytes for chunk in self._chunks)

    def push(self, batch: Batch, bound: Tensor, neurons: Tensor) -> None:
        """Keep nodes.

        Args:
            batch: at least one node.
            bound: (nodes,).
            neurons: (nodes, choices) that each may be split on, the likeliest first, −1 for none.
        """
        columns = ((batch.split != 0) | (batch.multipliers != 0)).any(0).nonzero().squeeze(1)
        split, multipliers = batch.split[:, columns], batch.multipliers[:, columns]
        self._chunks.append(_Chunk(columns, split, multipliers, batch.mu, bound.float(), neurons))

    def pop(self, count: int) -> tuple[Batch, Tensor, Tensor]:
        """The last nodes, so many at most and at least one, as ``push`` took them."""
        chosen: list[_Chunk] = []
        while self._chunks and count:
            chunk = self._chunks.pop()
            if len(chunk) > count:
                self._chunks.append(chunk[:-count])
                chunk = chunk[-count:]
            chosen.append(chunk)
            count -= len(chunk)
        nodes = Batch.cat([chunk.batch(self._size) for chunk in chosen])
        return nodes, torch.cat([chunk.bound for chunk in chosen]), torch.cat([chunk.neurons for chunk in chosen])

    def batches(self, size: int) -> Iterator[Batch]:
        """All nodes, so many at a time at most."""
        return (batch for chunk in self._chunks for batch in chunk.batch(self._size).parts(size))

    def dealt(self, hands: int) -> list[Frontier]:
        """The nodes dealt out one by one, early and late ones to every hand; none stay here."""
        dealt = [Frontier(self._size) for _ in range(hands)]
        begin = 0
        for chunk in self._chunks:
            for number, hand in enumerate(dealt):
                # A copy: views of views would have strides without bounds, and be sent with all that they are views of.
                mine = torch.arange(len(chunk))[(number - begin) % hands :: hands]
                if len(mine):
                    hand._chunks.append(chunk[mine])
            begin += len(chunk)
        self._chunks = []
        return dealt

    def take(self, other: Frontier) -> None:
        """Put all nodes of another frontier, which is not used any more, behind those that are here."""
        self._chunks += other._chunks


class State(Enum):
    """What is known of a tree."""

    OPEN = auto()
    PROVED = auto()
    REACHED = auto()
    STUCK = auto()
    FULL = auto()


@dataclass
class Progress:
    """What has become of some nodes of a tree, and of what these were split into.

    Attributes:
        open: the nodes that are open.
        state: what is known of them all.
        nodes, work, lower, closed: as ``Tree`` has them.
        leaves: the nodes that are closed, where they are recorded.
    """

    open: Frontier
    state: State = State.OPEN
    nodes: int = 0
    work: float = 0.0
    lower: float = math.inf
    closed: float = 0.0
    leaves: list[Leaves] = field(default_factory=list)

    def add(self, other: Progress) -> None:
        """Take what has become of other nodes of the same tree, which are then a part of these."""
        self.open.take(other.open)
        states = {self.state, other.state}
        ended = [state for state in (State.REACHED, State.STUCK, State.FULL) if state in states]
        self.state = ended[0] if ended else State.OPEN if len(self.open) else State.PROVED
        self.nodes, self.work = self.nodes + other.nodes, self.work + other.work
        self.lower, self.closed = min(self.lower, other.lower), min(1.0, self.closed + other.closed)
        self.leaves += other.leaves
