"""Proofs for certificates: those that a verifier has recorded, or the same question proven once more, recorded."""

from __future__ import annotations

from dataclasses import replace

import torch

from verifiable_relu.bounds import Ascent, crown_relaxation, input_box
from verifiable_relu.spec.property import Query
from verifiable_relu.trust.certificate import Proof
from verifiable_relu.verifiers.bab import Bab
from verifiable_relu.verifiers.base import Budget, Verifier
from verifiable_relu.verifiers.recording import Recorder


def recording(verifier: Verifier) -> Verifier:
    """The verifier, recording its proofs if it can."""
    if isinstance(verifier, Bab):
        return replace(verifier, search=replace(verifier.search, record=True))
    return verifier


def prove(query: Query, seconds: float) -> Proof | None:
    """A recorded proof that a query is unsat: by CROWN and α-CROWN, else by branch and bound for so many seconds.

    None if there is none in this time, or the network is not piecewise linear.
    """
    network = query.network
    if not network.piecewise_linear:
        return None
    recorder = Recorder()
    with torch.no_grad():
        box = input_box([query.property], network)
        relaxation = crown_relaxation(network.to(torch.float64), box, coarse=recorder.coarse)
        found = recorder.proof(relaxation, 0, query.property, {}, Ascent())
    if found is not None:
        return found
    (outcome,) = recording(Bab()).verify([query], Budget.each(seconds, 1))
    return outcome.proof
