"""What the ledger keeps of a query and of a training."""

from __future__ import annotations

import gzip
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.ledger.meter import digest, metered
from tests.ledger.queries import Question
from tests.support.asking import claims
from verifiable_relu.bounds import Ascent, Bounds, Relaxation, ascend, crown_relaxation, input_box, neurons
from verifiable_relu.bounds.zonotope import NARROW, Zonotopes, takes
from verifiable_relu.check import check
from verifiable_relu.data import Dataset
from verifiable_relu.errors import UnsupportedError
from verifiable_relu.files import read_bytes
from verifiable_relu.hardening import harden
from verifiable_relu.network.graph import Network
from verifiable_relu.network.simplify import without_repeated
from verifiable_relu.nn import LambdaGELU
from verifiable_relu.spec.property import Query
from verifiable_relu.spec.row_batch import RowBatch
from verifiable_relu.train.loop import train
from verifiable_relu.train.options import Options
from verifiable_relu.trust.certificate_file import write_unsat
from verifiable_relu.verifiers.auto import recording
from verifiable_relu.verifiers.bab.folding import fold
from verifiable_relu.verifiers.base import Outcome, Verdict, Verifier
from verifiable_relu.verifiers.registry import make

Entry = dict[str, Any]
"""By kind what is kept, as JSON: digests, verdicts, numbers."""

SECONDS = {"crown": 1.0, "alpha-crown": 1.0, "bab": 1.5, "split": 1.5, "auto": 3.0}
"""What each method may take of the work that ``meter`` shows as seconds."""

MOST_NEURONS = 20_000
"""Larger networks are asked of ``auto`` alone."""


def of_query(question: Question, brief: bool = False) -> Entry:
    """What the ledger keeps of a query; ``brief``: the verdict of ``auto`` alone, with its certificate.

    What the library does not take, is kept as the error that says so.
    """
    query = question.query
    small = sum(node.size for node in query.network.nodes) <= MOST_NEURONS
    narrow = int((query.property.box.lower < query.property.box.upper).sum()) <= 8
    entry: Entry = {"verdicts": {}, "numbers": {}, "trees": {}}
    methods = list(SECONDS) if small and not brief else ["auto"]
    for name in methods:
        if name != "split" or narrow:
            _answer(entry, name, make(name), query)
    if small and not brief:
        with torch.no_grad():
            entry["bounds"] = {}
            for name, bounds in _bounds(query):
                entry["bounds"][name] = bounds()
            entry["folded"] = _or_error(lambda: _folded(query))
    if question.vnnlib is not None and small and entry["verdicts"]["auto"] == "unsat":
        # The checker takes its time with large certificates, and refuses no smaller ones than those.
        entry["certificates"] = _or_error(lambda: _certificate(question))
    return entry


def answer(entry: Entry) -> list[Any]:
    """The verdict of ``auto``, and whether a certificate was accepted, if one was made."""
    made = entry.get("certificates")
    return [entry["verdicts"]["auto"], made[-1] if isinstance(made, list) else None]


def _or_error(made: Callable[[], Any]) -> Any:
    try:
        return made()
    except (UnsupportedError, NotImplementedError, LookupError) as error:
        return f"{type(error).__name__}: {error}"


def _answer(entry: Entry, name: str, verifier: Verifier, query: Query) -> Outcome:
    """Ask a method, and keep its answer and its way to it."""
    with metered() as meter:
        (outcome,) = claims(verifier, [query], [SECONDS.get(name, 3.0)], clock=meter.clock)
    margin = None if outcome.margin is None else float(outcome.margin).hex()
    witness = None if outcome.witness is None else digest(outcome.witness)
    entry["verdicts"][name] = str(outcome.verdict)
    entry["numbers"][name] = [str(outcome.reason), outcome.method, margin, witness, outcome.subproblems]
    if meter.seen:
        entry["trees"][name] = [meter.nodes, "".join(meter.seen)]
    return outcome


def _bounds(query: Query) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The bounds of nodes and of the property's rows by each relaxation."""
    network = query.network.to(torch.float64)
    box = input_box([query.property], query.network)
    rows = RowBatch.of([query.property], query.network.output_size)
    count, few = len(network.nodes), Ascent(steps=4)

    def found(relaxation: Relaxation, *more: Tensor) -> str:
        relaxation.advance(count - 1)
        nodes = [relaxation.bounds(index) for index in range(count)]
        outputs = relaxation.outputs(rows.matrix, rows.sample)
        by_intervals = relaxation.outputs(rows.matrix, rows.sample, intervals=True)
        return digest(nodes, relaxation.pre, outputs, by_intervals, *more)

    def intervals() -> Relaxation:
        relaxation = Relaxation(network, box)
        relaxation.advance(network.last_activation)
        return relaxation

    def alpha() -> str:
        relaxation = crown_relaxation(network, box, search=neurons(few))
        matrix = rows.matrix.reshape(-1, *network.output_shape)
        return found(relaxation, ascend(relaxation, count - 1, matrix, rows.sample, few).lower)

    def zonotopes() -> str:
        forms = Zonotopes(without_repeated(network).to(torch.float64), box)
        return digest(forms.pre, forms.output.bounds(), *forms.lower(rows.matrix, rows.sample), forms.share)

    yield "ibp", lambda: _or_error(lambda: found(intervals()))
    yield "crown", lambda: _or_error(lambda: found(crown_relaxation(network, box)))
    yield "crown in float32", lambda: _or_error(lambda: found(crown_relaxation(network, box, float32=True)))
    yield "crown of a batch", lambda: _or_error(lambda: _batch(network, box, rows))
    yield "alpha-crown", lambda: _or_error(alpha)
    varying = int((box.lower < box.upper).sum())
    if varying <= NARROW and takes(without_repeated(network)):
        yield "zonotope", lambda: _or_error(zonotopes)


def _batch(network: Network, box: Bounds, rows: RowBatch) -> str:
    """Bounds of a few boxes at once: the box, its lower half along every input, and its centre."""
    middle = torch.lerp(box.lower, box.upper, 0.5)
    many = Bounds(torch.cat([box.lower, box.lower, middle]), torch.cat([box.upper, middle, middle]))
    relaxation = crown_relaxation(network, many)
    sample = torch.arange(3).repeat_interleave(len(rows.matrix))
    return digest(relaxation.pre, relaxation.outputs(rows.matrix.repeat(3, 1), sample))


def _folded(query: Query) -> str:
    network = query.network.to(torch.float64)
    relaxation = crown_relaxation(network, input_box([query.property], query.network))
    relaxation.advance(len(network.nodes) - 1)
    rows = RowBatch.of([query.property], query.network.output_size)
    folded, outputs = fold(relaxation, 0, query.property.box, rows.matrix)
    ends = (folded.center, folded.radius, folded.free, folded.lower, folded.upper, folded.slope, folded.places)
    return digest(*ends, folded.neurons, outputs)


def _certificate(question: Question) -> Any:
    """The digest of what a certificate holds, and whether the checker accepts it."""
    assert question.onnx is not None and question.vnnlib is not None
    entry: Entry = {"verdicts": {}, "numbers": {}, "trees": {}}
    outcome = _answer(entry, "auto", recording(make("auto")), question.query)
    if outcome.verdict is not Verdict.UNSAT or outcome.proof is None:
        return [str(outcome.verdict), None, False]
    network = question.query.network.onnx
    assert network is not None
    with tempfile.TemporaryDirectory() as folder:
        made, onnx, vnnlib = (Path(folder) / name for name in ("made.gz", "network.onnx", "p.vnnlib"))
        onnx.write_bytes(network)
        vnnlib.write_bytes(read_bytes(question.vnnlib, 1 << 30))
        write_unsat(made, network, vnnlib.read_bytes(), [(0, outcome.proof)])
        accepted = check(made, onnx, vnnlib)
        lines = gzip.decompress(made.read_bytes()).splitlines()
    return [str(outcome.verdict), digest(b"\n".join(lines)), bool(accepted)]


def trainings() -> Iterator[tuple[str, Callable[[], Entry]]]:
    """Five short trainings and a hardening, by name: the weights that come out."""
    random = np.random.default_rng(0)
    centres = random.random((3, 1, 6, 6))
    labels = random.integers(0, 3, 200)
    images = np.clip(centres[labels] + random.normal(0, 0.15, (200, 1, 6, 6)), 0, 1).astype(np.float32)
    data = Dataset("blobs", images, labels, (0.5,), (0.3,), np.ones(200, bool))
    mlp = Options("blobs", hidden=(16, 16), epochs=3, batch=50, eps=0.03, warmup=1, attack_steps=2, certified=0.1,
                  stability=0.05, l1=1e-5, seed=3)  # fmt: skip
    each = {
        "mlp": mlp,
        "mlp by sgd": replace(mlp, optimizer="sgd", arm="relu", attack_steps=0),
        "mlp by crown-ibp": replace(mlp, certified_by="crown-ibp", certified=0.5, initialisation="ibp"),
        "gelu": replace(mlp, arm="gelu-swap", epochs=4, schedule="log"),
        "cnn": replace(mlp, model="cnn", channels=(4,), hidden=(8,), crop=1, flip=True, certified_by="sabr"),
    }
    for name, options in each.items():
        yield f"training/{name}", lambda options=options: _weights(train(options, data).model)

    def hardened() -> Entry:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(36, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3))
        given = (torch.from_numpy(images).flatten(1), torch.from_numpy(labels))
        torch.manual_seed(1)
        found = harden(model, given, epochs=2, region=(0.0, 1.0))
        lams = [gate.lam.detach() for gate in found.smooth.modules() if isinstance(gate, LambdaGELU)]
        return {"weights": digest(_weights(found.model), _weights(found.smooth), lams)}

    yield "training/hardened", hardened


def _weights(model: nn.Module) -> Entry:
    return {"weights": digest({name: value for name, value in model.state_dict().items() if value.is_floating_point()})}
