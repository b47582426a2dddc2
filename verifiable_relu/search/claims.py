"""Points that are claimed to be counterexamples: judged in floating point or in rational arithmetic."""

from __future__ import annotations

import numpy as np
import torch

from verifiable_relu.ir.exact import evaluate_exact, is_evaluable
from verifiable_relu.ir.network import Network
from verifiable_relu.search.outcomes import Outcome, Reason, Trust, Verdict
from verifiable_relu.spec.property import Property, nearest
from verifiable_relu.spec.row_batch import RowBatch


def claim(network: Network, prop: Property, point: np.ndarray, method: str) -> Outcome | None:
    """Return a *sat* claim for the exact point of the box nearest to a point; None if its margin there is positive.

    Args:
        network: it is evaluated in float64, or in float32 where what runs it rounds.
        prop: the property.
        point: (inputs,), in or near the property's box.
        method: the method that claims.
    """
    witness = prop.box.witness(point)
    x = torch.tensor([[float(v) for v in witness]], dtype=torch.float64)
    with torch.no_grad():
        y = network(x if network.arithmetic == "real" else x.float())[0].double()
    rows = RowBatch.from_properties([prop], network.output_size)
    margin = float(rows.margins(rows.matrix @ y - rows.bound))
    # An overflow to infinity or NaN says nothing of the true margin.
    if not (margin <= 0 and bool(torch.isfinite(y).all())):
        return None
    return Outcome(Verdict.SAT, Reason.REFUTED, method, Trust.FLOAT, margin, witness, subproblems=0)


def exact_claim(network: Network, prop: Property, point: np.ndarray, method: str) -> Outcome | None:
    """Return what ``claim`` does, judged in rational arithmetic where the network can be evaluated in it."""
    if not is_evaluable(network):
        return claim(network, prop, point, method)
    witness = prop.box.witness(point)
    outputs = evaluate_exact(network, witness)
    if not (prop.box.contains(witness) and prop.violated(outputs)):
        return None
    return Outcome(Verdict.SAT, Reason.REFUTED, method, Trust.EXACT, nearest(prop.margin(outputs)), witness)
