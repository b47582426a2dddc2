"""The leaves of one tree, recorded as they are closed, with multipliers of few digits (``trust.certificate``)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from verifiable_relu.trust.certificate import Leaf
from verifiable_relu.trust.certificate import Tree as Certified
from verifiable_relu.verifiers.bab.proof import Proofs
from verifiable_relu.verifiers.bab.strip import Strip

_BITS = (12, 24, 52)
"""How many bits the largest multiplier of a leaf has: the fewest with which the leaf is still proven are taken."""

_SPARE = 1e-11
"""What a leaf proves is to be above this part of the objective's size: others compute it with other rounding."""


class Recorded:
    """Leaves of a tree.

    Args:
        strip: the tree's relaxation.
        proofs: what proves its nodes.
    """

    def __init__(self, strip: Strip, proofs: Proofs) -> None:
        self._strip, self._proofs = strip, proofs
        self._spare = _SPARE * float(strip.rows.matrix[0].abs().sum() + strip.rows.constant[0].abs())
        self._parts: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []

    def closed(self, split: Tensor, columns: Tensor, w: Tensor, mu: Tensor) -> None:
        """Take nodes that are proven; the arguments are those of ``Proofs.lower``."""
        w, mu = w.double(), mu.double().clamp(min=0)
        left = torch.arange(len(w))
        for bits in _BITS:
            short, short_mu = _short(w[left], bits), _short(mu[left], bits)
            enough = self._proofs.lower(split[left], columns, short, short_mu) > self._spare
            if bits == _BITS[-1]:
                enough = torch.ones_like(enough)
            chosen = left[enough]
            if len(chosen):
                self._keep(split[chosen], columns, short[enough], short_mu[enough])
            left = left[~enough]
            if not len(left):
                break

    def _keep(self, split: Tensor, columns: Tensor, w: Tensor, mu: Tensor) -> None:
        """Nodes as places (node, neuron) of their splits and of their multipliers."""
        splits = split.nonzero().to(torch.int32).numpy()
        sides = split[split != 0].numpy()
        at, column = w.nonzero(as_tuple=True)
        places = torch.stack([at, columns[column]], 1).to(torch.int32).numpy()
        self._parts.append((splits, sides, places, w[at, column].numpy(), mu.numpy()))

    def tree(self, activations: Sequence[int]) -> Certified:
        """The tree, all of whose leaves have been recorded, of a network whose activations are these nodes."""
        used = np.unique(np.concatenate([np.zeros(0, np.int32), *(p[k][:, 1] for p in self._parts for k in (0, 2))]))
        leaves = []
        for splits, sides, places, values, mu in self._parts:
            splits_of, values_of = (np.searchsorted(p[:, 0], np.arange(len(mu) + 1)) for p in (splits, places))
            of_split, of_value = np.searchsorted(used, splits[:, 1]), np.searchsorted(used, places[:, 1])
            ones = np.ones((len(mu), 1))
            for at, row in enumerate(np.concatenate([ones, mu], 1)):
                mine, own = slice(*splits_of[at : at + 2]), slice(*values_of[at : at + 2])
                leaves.append(Leaf(of_split[mine], sides[mine], of_value[own], values[own], row))
        position = {index: number for number, index in enumerate(activations)}
        neurons = [(position[index], neuron) for index, neuron in self._strip.folded.places[used].tolist()]
        return Certified(self._strip.slopes.numpy(), neurons, leaves)


def _short(values: Tensor, bits: int) -> Tensor:
    """Values (nodes, k), each row rounded to multiples of a power of two: the largest has so many bits."""
    if not values.shape[1]:
        return values
    size = values.abs().amax(1, keepdim=True).clamp(min=2.0**-800)
    step = torch.exp2(torch.floor(torch.log2(size)) - (bits - 1))
    return (values / step).round() * step
