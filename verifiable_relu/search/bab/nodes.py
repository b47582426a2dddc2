"""Nodes of a search tree, as tensors: the segment of each neuron that the node leaves, and its multipliers.

A batch of nodes has a column for each neuron that was ever split in the tree, or has lines of its own
(``TreeRelaxation.columns``): few of all neurons. Open nodes are one record of tensors, on the device of the search.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from verifiable_relu.search.bab.relaxation import TreeRelaxation


@dataclass(frozen=True, eq=False)
class Nodes:
    """Nodes that are bounded together.

    Attributes:
        segment: (nodes, k) int8, the segment of each neuron among the first k columns; 0 if it is open.
        multipliers: (nodes, k) γ of the neurons, as the ascent has them.
        mu: (nodes, rows behind the objectives) the multipliers of these rows.
        objective: (nodes,) the number of the relaxation's row that is bounded.
    """

    segment: Tensor
    multipliers: Tensor
    mu: Tensor
    objective: Tensor

    def __len__(self) -> int:
        return len(self.objective)

    def __getitem__(self, chosen: Tensor | slice) -> Nodes:
        return Nodes(*(t[chosen] for t in vars(self).values()))

    @staticmethod
    def roots(relaxation: TreeRelaxation) -> Nodes:
        """Return a node without splits for each objective."""
        like, count, k = relaxation.slopes.float(), relaxation.objectives, len(relaxation.columns)
        segment = torch.zeros(count, k, dtype=torch.int8, device=like.device)
        objective = torch.arange(count, device=like.device)
        return Nodes(segment, like.new_zeros(count, k), like.new_zeros(count, len(relaxation.rows) - count), objective)

    @staticmethod
    def cat(parts: list[Nodes]) -> Nodes:
        """Return the nodes of several, with as many columns as the widest."""
        k = max(part.segment.shape[1] for part in parts)
        wide = (vars(part.widened(k)).values() for part in parts)
        return Nodes(*(torch.cat(column) for column in zip(*wide, strict=True)))

    def widened(self, columns: int) -> Nodes:
        """Return the nodes with more columns, of open neurons."""
        more = columns - self.segment.shape[1]
        if not more:
            return self
        return Nodes(pad(self.segment, (0, more)), pad(self.multipliers, (0, more)), self.mu, self.objective)

    def split_on(self, neuron: Tensor, relaxation: TreeRelaxation) -> Nodes:
        """Return twice as many nodes: each one's upper half by a neuron (nodes,), then all lower halves.

        A segment that is not cut any more is the same in both halves.
        """
        place = relaxation.places(neuron)[:, None]
        wide = self.widened(len(relaxation.columns))
        before = wide.segment.gather(1, place)[:, 0]
        relaxation.segments.cut(neuron, before)
        lower = 2 * before.clamp(min=1)
        whole = before >= relaxation.segments.last[neuron]
        halves = torch.cat([torch.where(whole, before, half) for half in (lower + 1, lower)])
        segment = wide.segment.repeat(2, 1).scatter(1, place.repeat(2, 1), halves[:, None])
        multipliers = wide.multipliers.scatter(1, place, 0).repeat(2, 1)
        return Nodes(segment, multipliers, self.mu.repeat(2, 1), self.objective.repeat(2))

    def depth(self) -> Tensor:
        """Return the number of splits that led to each node, (nodes,) in float64: the cuts that made its segments."""
        return self.segment.double().clamp(min=1).log2().floor().sum(1)


@dataclass(frozen=True, eq=False)
class OpenNodes:
    """Open nodes with their bounds (nodes,), each with neurons to split on (nodes, choices), the best first.

    A choice of −1 is none.
    """

    nodes: Nodes
    bound: Tensor
    choices: Tensor

    def __len__(self) -> int:
        return len(self.bound)

    def __getitem__(self, chosen: Tensor | slice) -> OpenNodes:
        return OpenNodes(self.nodes[chosen], self.bound[chosen], self.choices[chosen])

    @staticmethod
    def cat(parts: list[OpenNodes]) -> OpenNodes:
        """Return the nodes of several."""
        bound, choices = (torch.cat(column) for column in zip(*((p.bound, p.choices) for p in parts), strict=True))
        return OpenNodes(Nodes.cat([part.nodes for part in parts]), bound, choices)

    @property
    def bytes(self) -> int:
        """The memory that the nodes take."""
        return sum(t.nbytes for t in (*vars(self.nodes).values(), self.bound, self.choices))


class Frontier:
    """The open nodes of a tree; those that came last are at the end.

    Nodes that came together stay in one record until some of them are taken.
    """

    def __init__(self) -> None:
        self._parts: list[OpenNodes] = []

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    @property
    def bytes(self) -> int:
        """The memory that the nodes take."""
        return sum(part.bytes for part in self._parts)

    def push(self, nodes: OpenNodes) -> None:
        """Keep some nodes."""
        if len(nodes):
            self._parts.append(nodes)

    def pop(self, count: int) -> OpenNodes:
        """Return the last nodes, at most ``count`` and at least one."""
        taken = []
        while self._parts and count > 0:
            part = self._parts.pop()
            if len(part) > count:
                self._parts.append(part[: len(part) - count])
                part = part[len(part) - count :]
            taken.append(part)
            count -= len(part)
        return OpenNodes.cat(taken)

    def batches(self, size: int) -> Iterator[Nodes]:
        """Yield all nodes, at most ``size`` at a time."""
        return (part.nodes[i : i + size] for part in self._parts for i in range(0, len(part), size))

    def deal(self, hands: int) -> list[Frontier]:
        """Return the nodes dealt out one by one, early and late ones to every hand; none stay here."""
        dealt = [Frontier() for _ in range(hands)]
        begin = 0
        for part in self._parts:
            every = torch.arange(len(part), device=part.bound.device)
            for number, hand in enumerate(dealt):
                # A copy: a view would be sent with all that it is a view of.
                hand.push(part[every[(number - begin) % hands :: hands]])
            begin += len(part)
        self._parts = []
        return dealt

    def take(self, other: Frontier) -> None:
        """Put all nodes of another frontier, which is not used any more, behind those that are here."""
        self._parts += other._parts

    def moved(self, place: Tensor) -> Frontier:
        """Return the nodes with their columns at other places (columns,)."""
        found, width = Frontier(), int(place.max()) + 1 if len(place) else 0
        for part in self._parts:
            mine, at = part.nodes, place[: part.nodes.segment.shape[1]]
            segment, multipliers = (
                t.new_zeros(len(part), width).index_copy_(1, at, t) for t in (mine.segment, mine.multipliers)
            )
            found.push(OpenNodes(Nodes(segment, multipliers, mine.mu, mine.objective), part.bound, part.choices))
        return found
