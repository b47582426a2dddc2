"""The verifier ``attack``: points that PGD proposes, claimed as counterexamples where float64 confirms their margin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch

from verifiable_relu.network.graph import Network
from verifiable_relu.pgd import Pgd
from verifiable_relu.spec.property import Property
from verifiable_relu.spec.row_batch import RowBatch
from verifiable_relu.verifiers.base import Batched, Limits, Outcome, Reason, Trust, Verdict
from verifiable_relu.verifiers.docket import Docket

_BATCH = 128
"""The most queries that are attacked at once."""

_MEMORY = 1 << 30
"""The bytes that an attack may hold at once, approximately."""

_COPIES = 3
"""The numbers held for each neuron and starting point: value, gradient, and an intermediate result for the gradient."""


def claim(network: Network, prop: Property, point: np.ndarray, method: str) -> Outcome | None:
    """A *sat* claim for the exact point of the box nearest to ``point``; None if its margin in float64 is positive.

    Args:
        network: of any dtype; it is evaluated in float64.
        prop: the property.
        point: (input_size,), a point in or near the property's box.
        method: the verifier that claims.
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
    return Outcome(Verdict.SAT, Reason.REFUTED, method, Trust.FLOAT, margin, witness, subproblems=0)


@dataclass(frozen=True)
class Attack(Batched):
    """PGD on the margin, batched over properties; never answers *unsat*.

    Attributes:
        pgd: the options of the search.
    """

    pgd: Pgd = field(default_factory=Pgd)

    name: ClassVar[str] = "attack"

    def size(self, network: Network, limits: Limits) -> int:
        """As ``Batched.size``, by what a search holds."""
        neurons = sum(node.size for node in network.nodes)
        return max(1, min(_BATCH, _MEMORY // (neurons * 4 * _COPIES * self.pgd.starts)))

    def answer(self, part: Docket, work: Limits) -> Sequence[Outcome]:
        """As ``Batched.answer``."""
        properties = [query.property for query in part.queries.values()]
        points, margins = self.pgd.search(part.network, properties, work.stop, work.device)
        undecided = Outcome.unknown(Reason.INCOMPLETE, self.name, "no counterexample was found", subproblems=0)
        return [
            (claim(part.network, prop, point, self.name) if margin <= 0 else None) or undecided
            for prop, point, margin in zip(properties, points.numpy(), margins.tolist(), strict=True)
        ]
