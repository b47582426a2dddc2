"""The nodes of a tree that are bounded together, what they are split into, and what is found for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verifiable_relu.verifiers.bab.curves import LAST, Curves


@dataclass(eq=False)
class Batch:
    """Nodes that are bounded together.

    Attributes:
        split: (nodes, m) int8, +1 active, −1 inactive, 0 open; of a smooth neuron, the number of its segment.
        multipliers: (nodes, m) β of split neurons, γ of open ones that have adaptive lines, otherwise zero.
        mu: (nodes, rows behind the objectives) of these rows.
        objective: (nodes,) which of the relaxation's first rows is bounded.
    """

    split: Tensor
    multipliers: Tensor
    mu: Tensor
    objective: Tensor

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, chosen: Tensor) -> Batch:
        return Batch(self.split[chosen], self.multipliers[chosen], self.mu[chosen], self.objective[chosen])

    def parts(self, size: int) -> Iterator[Batch]:
        """At most ``size`` nodes at a time."""
        return (self[number] for number in torch.arange(len(self)).split(size))

    def split_on(self, neuron: Tensor, curves: Curves | None = None) -> Batch:
        """Twice as many nodes: those in which each node's neuron (nodes,) is active, then those in which it is not.

        A segment of a smooth neuron is cut, and the nodes of the lower halves come first.
        """
        smooth = None
        if curves is not None:
            curves.cut(neuron, self.split[torch.arange(len(self)), neuron])
            smooth = curves.holds(neuron)
        multipliers = self.multipliers.scatter(1, neuron[:, None], 0)
        rest = (t.repeat(2, *[1] * (t.dim() - 1)) for t in (multipliers, self.mu, self.objective))
        return Batch(torch.cat(children(self.split, neuron, smooth)), *rest)

    @staticmethod
    def roots(neurons: int, behind: int, objectives: int = 1) -> Batch:
        """A node without splits for each objective, of so many neurons and rows behind the objectives."""
        split = torch.zeros(objectives, neurons, dtype=torch.int8)
        multipliers, mu = torch.zeros(objectives, neurons), torch.zeros(objectives, behind)
        return Batch(split, multipliers, mu, torch.arange(objectives))

    @staticmethod
    def cat(parts: Sequence[Batch]) -> Batch:
        """The nodes of several."""
        fields = zip(*((p.split, p.multipliers, p.mu, p.objective) for p in parts), strict=True)
        return Batch(*(torch.cat(field) for field in fields))


def children(split: Tensor, neuron: Tensor, smooth: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The two nodes that each node is split into: those in which its neuron is active, and those in which it is not.

    Of a smooth neuron: those in which it is in the lower half of its segment, and in the upper half.

    Args:
        split: (nodes, m) int8, as ``Proofs.lower`` takes them.
        neuron: (nodes,) the number of the neuron that each node is split on.
        smooth: (nodes,) bool, whether that neuron is smooth; None if none is.
    """
    active, inactive, number = split.clone(), split.clone(), torch.arange(len(split))
    active[number, neuron], inactive[number, neuron] = 1, -1
    if smooth is not None and bool(smooth.any()):
        number, neuron = number[smooth], neuron[smooth]
        before = split[number, neuron]
        lower = 2 * before.clamp(min=1, max=LAST - 1)
        # What is not cut stays as it is in both.
        whole = before >= LAST
        active[number, neuron] = torch.where(whole, before, lower)
        inactive[number, neuron] = torch.where(whole, before, lower + 1)
    return active, inactive


def depth(split: Tensor, smooth: Tensor) -> Tensor:
    """How many splits led to each node, (nodes,): one for a phase, for a segment as many as it was cut out by.

    Args:
        split: (nodes, m) int8, as ``Proofs.lower`` takes it.
        smooth: (m,) bool, which neurons have segments.
    """
    cuts = split.double().clamp(min=1).log2().floor()
    return torch.where(smooth, cuts, (split != 0).double()).sum(1)


@dataclass(eq=False)
class Bounded:
    """The best that an ascent found for each node of a batch.

    Attributes:
        bound: (nodes,) of each node's objective; not a proof.
        columns: (k,) the neurons that have multipliers in some node.
        w: (nodes, k) their multipliers, as ``Proofs.lower`` takes them.
        v: (nodes, h) the multipliers of the values of those among the k that have planes; None without planes.
        coefficients: (nodes, m) of the remainders q̃.
        blame: (nodes, m) how much each open neuron's line over the activation costs the bound; −1 if split. Of a
            smooth neuron, how much its line costs at most; −1 if its segment is not cut.
    """

    bound: Tensor
    columns: Tensor
    w: Tensor
    v: Tensor | None
    coefficients: Tensor
    blame: Tensor

    def __getitem__(self, chosen: Tensor) -> Bounded:
        parts = (t[chosen] for t in (self.coefficients, self.blame))
        v = None if self.v is None else self.v[chosen]
        return Bounded(self.bound[chosen], self.columns, self.w[chosen], v, *parts)
