"""Proofs for certificates: those that a verifier has recorded, or the same question proven once more, recorded."""

from __future__ import annotations

from dataclasses import fields, replace

import torch

from verifiable_relu.bounds import Ascent, crown_relaxation, input_box
from verifiable_relu.bounds.zonotope import NARROW
from verifiable_relu.spec.property import Query
from verifiable_relu.trust.certificate import Cover, Proof
from verifiable_relu.verifiers.bab import Bab
from verifiable_relu.verifiers.base import Budget, Verifier
from verifiable_relu.verifiers.incomplete import Crown
from verifiable_relu.verifiers.portfolio import Auto
from verifiable_relu.verifiers.recording import Recorder, uncertified
from verifiable_relu.verifiers.split import InputSplit, RecordedSplit


def recording(verifier: Verifier) -> Verifier:
    """The verifier, recording its proofs if it can."""
    if isinstance(verifier, Auto):
        return replace(verifier, prepare=recording)
    if isinstance(verifier, Crown | Bab):
        return replace(verifier, record=True)
    if isinstance(verifier, InputSplit):
        names = (field.name for field in fields(InputSplit) if field.name != "symbols")
        return RecordedSplit(**{name: getattr(verifier, name) for name in names})
    return verifier


def prove(query: Query, seconds: float) -> Proof | Cover | None:
    """A recorded proof that a query is unsat: by CROWN and α-CROWN, else by branch and bound for so many seconds.

    Branch and bound over neurons has half of the time, and that over few inputs the rest. None if there is no proof in
    this time, or the network has activations that certificates do not know.
    """
    network = query.network
    if uncertified(network):
        return None
    recorder = Recorder.of(network)
    with torch.no_grad():
        box = input_box([query.property], network)
        relaxation = crown_relaxation(network.to(torch.float64), box, coarse=recorder.coarse)
        found = recorder.proof(relaxation, 0, query.property, {}, Ascent())
    if found is not None:
        return found
    budget = Budget.each(seconds, 1)
    narrow = int((box.lower < box.upper).sum()) <= NARROW
    methods: list[tuple[Verifier, float]] = [(Bab(), 0.5), (InputSplit(), 1.0)] if narrow else [(Bab(), 1.0)]
    for method, share in methods:
        (outcome,) = recording(method).verify([query], budget.subset([0], share))
        if outcome.proof is not None:
            return outcome.proof
    return None
