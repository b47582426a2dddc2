"""The verifier ``attack``: points that PGD proposes, claimed as counterexamples where float64 confirms their margin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import torch

from verifiable_relu.network.graph import Network
from verifiable_relu.pgd import Pgd
from verifiable_relu.settings import neutral
from verifiable_relu.spec.property import Property, Query
from verifiable_relu.spec.row_batch import RowBatch
from verifiable_relu.verifiers.base import (
    SILENT,
    Budget,
    Outcome,
    Progress,
    Reason,
    Trust,
    Verdict,
    deadline,
    fault,
    in_batches,
)
from verifiable_relu.verifiers.root import NONE, Roots

_BATCH = 128
"""The most queries that are attacked at once."""

_MEMORY = 1 << 30
"""The bytes that an attack may hold at once, approximately."""

_COPIES = 3
"""The numbers held for each neuron and starting point: value, gradient, and an intermediate result for the gradient."""


def batch_size(network: Network, pgd: Pgd) -> int:
    """The number of queries of a network that are attacked at once."""
    neurons = sum(node.size for node in network.nodes)
    return max(1, min(_BATCH, _MEMORY // (neurons * 4 * _COPIES * pgd.starts)))


def claim(
    network: Network, prop: Property, point: np.ndarray, method: str, seconds: dict[str, float]
) -> Outcome | None:
    """A *sat* claim for the exact point of the box nearest to ``point``; None if its margin in float64 is positive.

    Args:
        network: of any dtype; it is evaluated in float64.
        prop: the property.
        point: (input_size,), a point in or near the property's box.
        method: the verifier that claims.
        seconds: the time charged to the query, by stage name.
    """
    witness = prop.box.witness(point)
    rows = RowBatch.of([prop], network.output_size)
    x = torch.tensor([float(v) for v in witness], dtype=torch.float64).reshape(1, *network.input_shape)
    with torch.no_grad():
        y = network.to(torch.float64)(x).flatten()
    margin = float(rows.margins(rows.matrix @ y - rows.bound))
    # An overflow to infinity or NaN says nothing of the true margin.
    if not (margin <= 0 and bool(torch.isfinite(y).all())):
        return None
    return Outcome(Verdict.SAT, Reason.REFUTED, method, Trust.FLOAT, margin, witness, seconds=seconds)


@dataclass(frozen=True)
class Attack:
    """PGD on the margin, batched over properties; never answers *unsat*.

    Attributes:
        pgd: the options of the search.
        device: the torch device on which the search runs.
    """

    pgd: Pgd = field(default_factory=Pgd)
    device: str = "cpu"

    name: ClassVar[str] = "attack"

    @neutral()
    def verify(
        self, queries: Sequence[Query], budget: Budget, progress: Progress = SILENT, roots: Roots = NONE
    ) -> list[Outcome]:
        return in_batches(
            self.name,
            queries,
            progress,
            lambda network: batch_size(network, self.pgd),
            lambda network, part: self._batch(network, queries, part, budget),
        )

    def _batch(self, network: Network, queries: Sequence[Query], part: list[int], budget: Budget) -> list[Outcome]:
        allowance = budget.subset(part).total()
        if allowance <= 0:
            return [Outcome.unknown(Reason.TIMEOUT, self.name, "no time was left")] * len(part)
        properties = [queries[i].property for i in part]
        try:
            with budget.charging(part) as elapsed:
                points, margins = self.pgd.search(network, properties, deadline(elapsed, allowance), self.device)
                seconds = {self.name: elapsed() / len(part)}
                claims = [
                    claim(network, prop, point, self.name, seconds) if margin <= 0 else None
                    for prop, point, margin in zip(properties, points.numpy(), margins.tolist(), strict=True)
                ]
                late = elapsed() > allowance
        except Exception as error:
            return [fault(error, self.name)] * len(part)
        reason = Reason.TIMEOUT if late else Reason.INCOMPLETE
        detail = "the budget ran out" if late else "no counterexample was found"
        undecided = Outcome.unknown(reason, self.name, detail, seconds=seconds)
        return [replace(found or undecided, subproblems=0) for found in claims]
