"""The attacks of ``split``: on boxes that are far from being proved, and on the whole box of a query."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from verifiable_relu.bounds.forward import rough
from verifiable_relu.network.graph import Network
from verifiable_relu.pgd import Descent, Pgd
from verifiable_relu.spec.property import Property
from verifiable_relu.spec.row_batch import RowBatch

_ATTACKED = 1 << 13
"""Boxes times neurons of what is attacked at once."""


class BoxAttack:
    """Searches for points of negative margin; nothing that they find is a verdict.

    Args:
        network: of all queries.
        pgd: how boxes are attacked.
        search: how the whole box of a query is attacked.
        device: where to run.
    """

    def __init__(self, network: Network, pgd: Pgd, search: Pgd, device: str) -> None:
        self._network, self._pgd, self._search, self._device = network, pgd, search, device
        self._rough, self._dtype = rough(network, device)
        self._generator = torch.Generator().manual_seed(pgd.seed)
        self.most = max(1, _ATTACKED // sum(node.size for node in network.nodes))

    def boxes(self, lower: Tensor, upper: Tensor, rows: RowBatch, stop: Callable[[], bool]) -> list[tuple[int, Tensor]]:
        """Boxes, by number, with points that seem to be counterexamples.

        Args:
            lower, upper: (batch, inputs), of which ``most`` is a good number.
            rows: those of the boxes' properties, as a batch.
            stop: called between steps; the search ends when it returns True.
        """
        low, high = lower.to(self._dtype), upper.to(self._dtype)
        descent = Descent(self._pgd, self._rough, low, high, rows.to(low), stop)
        return _reached(*descent.of_margins(descent.anywhere(self._generator)))

    def wholes(self, properties: Sequence[Property], stop: Callable[[], bool]) -> list[tuple[int, Tensor]]:
        """Properties, by number, with points of their boxes that seem to be counterexamples."""
        return _reached(*self._search.search(self._network, properties, stop, self._device))


def _reached(points: Tensor, margins: Tensor) -> list[tuple[int, Tensor]]:
    return [(number, points[number]) for number in (margins <= 0).nonzero().squeeze(1).tolist()]
