"""Certificates for tests: a small network and property, what proves them, and certificates as lists of records."""

from __future__ import annotations

import gzip
import hashlib
import json
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support.asking import claims
from tests.support.solver_cases import ball, mlp, residual, row
from verifiable_relu.bounds import crown_relaxation, input_box
from verifiable_relu.check import check
from verifiable_relu.network import read_onnx, write_onnx
from verifiable_relu.spec.property import Box, Polytope, Property, Query
from verifiable_relu.spec.specfile import vnnlib_text
from verifiable_relu.trust.certificate import Proof
from verifiable_relu.trust.certificate_file import write_unsat
from verifiable_relu.verifiers.bab import Bab
from verifiable_relu.verifiers.bab.query import FoldedQuery
from verifiable_relu.verifiers.bab.refine import Refinement
from verifiable_relu.verifiers.bab.search import Schedule, TreeScheduler, WitnessCheck
from verifiable_relu.verifiers.bab.slopes import Above, Slopes
from verifiable_relu.verifiers.bab.tree import Branching
from verifiable_relu.verifiers.base import TimeBudget, Verdict
from verifiable_relu.verifiers.batch import Verifier
from verifiable_relu.verifiers.recording import Recorder
from verifiable_relu.verifiers.split import InputSplit

Records = list[dict[str, Any]]


@dataclass(frozen=True, eq=False)
class Case:
    """Files, and the records of a certificate that is right."""

    network: bytes
    prop: bytes
    records: Records


def records(path: Path) -> Records:
    """Those of a certificate."""
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


def written(changed: Records) -> bytes:
    """Records as a certificate, their number at the end put right."""
    lines = [json.dumps(record) for record in changed if "end" not in record]
    return "".join(f"{line}\n" for line in [*lines, json.dumps({"end": len(lines)})]).encode()


def checked(
    folder: Path, case: Case, certificate: bytes, network: bytes | None = None, prop: bytes | None = None
) -> str:
    """What the checker says of a certificate.

    Raises:
        Refused: as ``check`` does, and BadInput.
    """
    files = {
        "net.onnx": case.network if network is None else network,
        "p.vnnlib": case.prop if prop is None else prop,
        "certificate": certificate,
    }
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return check(folder / "certificate", folder / "net.onnx", folder / "p.vnnlib")


def proven(
    folder: Path,
    network: bytes,
    prop: Property,
    verifier: Verifier | None = None,
    processes: int = 1,
    **search: Any,
) -> Case:
    """The case of a property that branch and bound, or the verifier given, proves."""
    method = verifier or Bab(search=Branching(**search), record=True)
    (outcome,) = claims(method, [Query(read_onnx(network), prop)], 600.0, processes=processes)
    assert outcome.verdict is Verdict.UNSAT, outcome
    assert outcome.proof is not None
    return recorded(folder, network, prop, outcome.proof)


def recorded(folder: Path, network: bytes, prop: Property, proof: Proof) -> Case:
    """The case of a property that has been proved."""
    text = vnnlib_text(prop).encode()
    write_unsat(folder / "made", network, text, [(0, proof)])
    return Case(network, text, records(folder / "made"))


def excluded(box: Box, rows: Polytope) -> Property:
    """A box and one polytope."""
    return Property(box, (rows,))


def one_point(network: bytes, digest_of: bytes, point: list[Fraction]) -> Records:
    """A certificate of sat."""
    digests = {"network": hashlib.sha256(network).hexdigest(), "property": hashlib.sha256(digest_of).hexdigest()}
    return [{"certificate": 4, "claim": "sat", **digests, "says": ""}, {"point": [str(x) for x in point]}, {"end": 2}]


def near(value: float) -> Fraction:
    """A short number a little below a value that was found by sampling."""
    return Fraction(int(np.floor((value - 0.02) * 256)), 256)


@cache
def tree_case(folder: Path, kind: str = "mlp") -> Case:
    """A network whose proof is a tree of several leaves."""
    return proven(folder, *question(kind), steps=0, finishing=0)


@cache
def refined_case(folder: Path, kind: str = "mlp") -> Case:
    """A network whose proof begins with tighter bounds of neurons."""
    rounds = Schedule(Refinement(leaves=8), first=0, patience=0)
    return proven(folder, *question(kind), Bab(search=Branching(steps=0, finishing=0), rounds=rounds, record=True))


def over_planes(
    query: Query, search: Branching, above: Above | None = None, seconds: float = 600.0, processes: int = 1
) -> Proof | None:
    """The proof that a query is unsat by trees that have planes over their neurons from the beginning, if there is one.

    Args:
        seconds: until the search ends without a proof.
        processes: how many processes share the work from the beginning.
    """
    prop, recorder = query.property, Recorder.of(query.network)
    never, budget = (lambda: False), TimeBudget(memory=1 << 30, processes=processes, solo_work=0).begun(seconds)
    with torch.no_grad():
        box = input_box([prop], query.network)
        relaxation = crown_relaxation(query.network.to(torch.float64), box, coarse=recorder.coarse)
        polytopes = list(range(len(prop.unsafe)))
        system = FoldedQuery.of(query, relaxation, 0, polytopes, Slopes(), never)
        system = system.with_relaxations(above or Above(), polytopes, budget)
        forest = TreeScheduler(system, polytopes, WitnessCheck(query, "bab"), search, budget, keep=True)
        forest.search()
        if len(forest.recorded) < len(polytopes):
            return None
        trees = {number: (system.parts[number].order.tolist(), forest.recorded[number], ()) for number in polytopes}
        return recorder.proof(relaxation, 0, prop, trees)


@cache
def planes_case(folder: Path, seed: int, **search: Any) -> Case:
    """A network whose proof is a tree of several leaves over planes."""
    rng = np.random.default_rng(seed)
    network = mlp(rng, (4, 9, 8, 2))
    box = ball(np.round(rng.normal(size=4) * 8) / 8, 1.0)
    shares = np.concatenate([rng.uniform(size=(20_000, 4)), rng.integers(0, 2, (20_000, 4))])
    outputs = network(torch.from_numpy(box.lower + shares * (box.upper - box.lower)))
    values = outputs[:, 0] - outputs[:, 1]
    low, high = float(values.min()), float(values.max())
    prop = excluded(box, (row({0: 1, 1: -1}, near(low - 0.01 * (high - low))),))
    data = write_onnx(network)
    proof = over_planes(Query(read_onnx(data), prop), Branching(**search))
    assert proof is not None
    return recorded(folder, data, prop, proof)


@cache
def cover_case(folder: Path, kind: str = "mlp") -> Case:
    """A network whose box is halved until zonotopes prove every part, or CROWN's bounds where there are none."""
    return proven(folder, *question(kind), InputSplit(batch=4, record=True))


def question(kind: str) -> tuple[bytes, Property]:
    """A network, and a property that barely holds."""
    rng = np.random.default_rng({"mlp": 5, "leaky": 3, "residual": 0}[kind])
    network = residual(rng) if kind == "residual" else mlp(rng, (3, 4, 4, 2), leaky=kind == "leaky")
    box = ball(np.round(rng.normal(size=network.input_size) * 8) / 8, 0.25 if kind == "residual" else 1.0)
    # The least values of small networks are often at corners.
    shares = np.concatenate([rng.uniform(size=(5_000, box.size)), rng.integers(0, 2, (5_000, box.size))])
    points = box.lower + shares * (box.upper - box.lower)
    outputs = network(torch.from_numpy(points.reshape(-1, *network.input_shape)))
    value = float((outputs[:, 0] - outputs[:, 1]).min())
    return write_onnx(network), excluded(box, (row({0: 1, 1: -1}, near(value)),))
