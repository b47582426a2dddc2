"""Neurons of a dense layer that always have another neuron's value, or its negative.

Networks that compute a maximum or an absolute value hold such neurons: max(a, b) = (|a − b| + a + b)/2 is written with
the ReLUs of a − b, b − a, a + b and −a − b. Since max(−z, 0) = max(z, 0) − z, one unknown serves both neurons of a
pair: bounds that know of it see that max(z, 0) − max(−z, 0) is z, which bounds of each neuron by itself cannot.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from verifiable_relu.network.nodes import Linear


@dataclass(frozen=True, eq=False)
class Mirrors:
    """For each neuron of a layer one neuron with the same magnitude for every input.

    Attributes:
        first: (size,) the number of that neuron, which is the neuron itself or an earlier one.
        turned: (size,) whether the neuron has that neuron's value times −1.
    """

    first: Tensor
    turned: Tensor

    @cached_property
    def leads(self) -> Tensor:
        """(size,) whether the neuron is that neuron itself."""
        return self.first == torch.arange(len(self.first), device=self.first.device)


def mirrors(node: Linear) -> Mirrors | None:
    """The neurons of a dense layer that mirror or repeat an earlier one; None where there are none.

    Two neurons belong together where their weights and biases are the same numbers, or the same but for their sign.
    """
    if node.weight_error or node.weight.requires_grad or node.bias.requires_grad:
        return None
    rows = torch.cat([node.weight, node.bias[:, None]], 1).detach().double()
    # Rows with the same magnitudes have the same sum of products with random numbers, up to its sign.
    generator = torch.Generator().manual_seed(0)
    chances = torch.rand(rows.shape[1], generator=generator, dtype=torch.float64).to(rows)
    sums = (rows * chances).sum(1).abs()
    order = sums.argsort(stable=True)
    begins = torch.ones(len(order), dtype=torch.bool, device=rows.device)
    begins[1:] = sums[order[1:]] != sums[order[:-1]]
    place = begins.nonzero().squeeze(1)[begins.cumsum(0) - 1]
    first = torch.empty_like(order)
    first[order] = order[place]
    own = torch.arange(len(order), device=rows.device)
    later = (first != own).nonzero().squeeze(1)
    # What the sums suggest is compared number by number.
    same = (rows[later] == rows[first[later]]).all(1)
    turned = (rows[later] == -rows[first[later]]).all(1) & ~same
    first[later] = torch.where(same | turned, first[later], later)
    if not bool((same | turned).any()):
        return None
    every = torch.zeros_like(begins).index_fill_(0, later[turned], True)
    # The map is applied at every position before the last axis.
    positions = node.size // len(order)
    starts = torch.arange(positions, device=rows.device)[:, None] * len(order)
    return Mirrors((starts + first).flatten(), every.repeat(positions))
