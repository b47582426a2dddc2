"""Certificates of what real searches prove of small drawn networks, all of which the checker accepts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.test_check import KINDS, network
from verifiable_relu.check import check
from verifiable_relu.errors import UnsupportedError
from verifiable_relu.proof import Recorder
from verifiable_relu.proof.write import Subject, write_unsat
from verifiable_relu.readers.onnx.read import read_flat
from verifiable_relu.search.batch import QueryBatch
from verifiable_relu.search.budget import TimeBudget
from verifiable_relu.search.outcomes import Outcome, Verdict
from verifiable_relu.search.registry import make
from verifiable_relu.settings import neutral
from verifiable_relu.spec.property import Query
from verifiable_relu.spec.read import parse

SHARES = (-0.5, 0.7, 0.93)
"""Where thresholds are, between what CROWN proves and what points attain."""


def asked(method: str, queries: list[Query], told: Recorder | None) -> list[Outcome]:
    batch = QueryBatch(queries, TimeBudget(5.0), observer=told)
    with neutral():
        for _ in batch.ask(make(method)):
            pass
    return [batch.outcomes[number] for number in batch.queries]


def text(low: Any, high: Any, rows: list[list[tuple[str, str]]]) -> str:
    """A property: the box, and a disjunction of conjunctions of (expression, most)."""
    lines = [f"(declare-const X_{i} Real)" for i in range(len(low))] + [f"(declare-const Y_{i} Real)" for i in range(2)]
    lines += [
        f"(assert (>= X_{i} {a}))\n(assert (<= X_{i} {b}))" for i, (a, b) in enumerate(zip(low, high, strict=True))
    ]
    parts = ["(and " + " ".join(f"(<= {y} {most})" for y, most in each) + ")" for each in rows]
    return "\n".join([*lines, f"(assert (or {' '.join(parts)}))"]) + "\n"


def spec_of(kind: str, seed: int, share: float) -> tuple[bytes, str]:
    """A network, and a property that nothing reaches, or nearly so."""
    data = network(kind, seed)
    net, _ = read_flat(data, kind)
    rng = np.random.default_rng(seed)
    low = rng.integers(-8, 0, net.input_size) / 8
    high = low + rng.integers(4, 9, net.input_size) / 8
    x = torch.from_numpy(low + (high - low) * rng.random((4000, net.input_size)))
    y = net(x).numpy()
    loose = QueryBatch([Query(net, parse(text(low, high, [[("Y_0", "-1000.0")]]), Path("a")).properties[0])])
    with neutral():
        list(loose.ask(make("crown")))
    proved = (loose.outcomes[0].margin or 0.0) - 1000
    most = proved + share * (y[:, 0].min() - proved) - 1e-3
    both = [("Y_0", f"{most:.6f}"), ("Y_1", f"{y[:, 1].max():.6f}")]
    return data, text(low, high, [both, [("Y_0", f"{most - 1:.6f}")]])


STEPS = ("sign", "round", "quantised")

REFUSED = {("leaky", "alpha-crown"), ("leaky", "auto")}
"""Proofs that the recorder cannot put into a certificate yet."""

ASKED = [
    (kind, method)
    for kind in KINDS
    for method in ("alpha-crown", "bab", "split", "auto")
    if (kind, method) not in REFUSED and (kind not in STEPS or method == "alpha-crown")
]


@pytest.mark.parametrize(("kind", "method"), ASKED)
def test_every_proof_is_accepted(kind: str, method: str, tmp_path: Path) -> None:
    proved = 0
    for seed, share in enumerate(SHARES):
        data, prop = spec_of(kind, seed, share)
        net, _ = read_flat(data, kind)
        queries = [Query(net, each) for each in parse(prop, Path("a.vnnlib")).properties]
        told = Recorder()
        found, plain = asked(method, queries, told), asked(method, queries, None)
        assert [outcome.verdict for outcome in found] == [outcome.verdict for outcome in plain]
        if any(outcome.verdict is not Verdict.UNSAT for outcome in found):
            continue
        assert [outcome.subproblems for outcome in found] == [outcome.subproblems for outcome in plain]
        paths = [tmp_path / name for name in ("c.jsonl.gz", "n.onnx", "p.vnnlib")]
        paths[1].write_bytes(data)
        paths[2].write_text(prop)
        subject = Subject(data, prop.encode())
        proved += 1
        try:
            write_unsat(paths[0], subject, queries, range(len(queries)), told)
        except UnsupportedError as error:
            assert kind == "pool" and method in ("bab", "auto"), error
            assert "trees of branch and bound over maxima" in str(error)
            assert not paths[0].exists()
            continue
        assert check(*paths).startswith("unsat")
    assert proved


def test_what_was_not_told_has_no_certificate(tmp_path: Path) -> None:
    data, prop = spec_of("dense", 0, 0.0)
    net, _ = read_flat(data, "dense")
    queries = [Query(net, each) for each in parse(prop, Path("a.vnnlib")).properties]
    with pytest.raises(Exception, match="was not told"):
        write_unsat(tmp_path / "c", Subject(data, prop.encode()), queries, [0], Recorder())
    assert not (tmp_path / "c").exists()
