"""Certificates of what real searches prove of small drawn networks, all of which the checker accepts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.test_check import KINDS, network
from verifiable_relu.check import check
from verifiable_relu.files import on_disk
from verifiable_relu.proof import Recorder
from verifiable_relu.proof.write import Subject, write_unsat
from verifiable_relu.readers import read_onnx
from verifiable_relu.readers.onnx.read import read_flat
from verifiable_relu.search.batch import QueryBatch
from verifiable_relu.search.budget import TimeBudget
from verifiable_relu.search.outcomes import Outcome, Verdict
from verifiable_relu.search.registry import make
from verifiable_relu.settings import default_settings
from verifiable_relu.spec.find import read_instances
from verifiable_relu.spec.property import Query
from verifiable_relu.spec.read import parse, read_vnnlib

SHARES = (-0.5, 0.7, 0.93)
"""Where thresholds are, between what CROWN proves and what points attain."""


def asked(method: str, queries: list[Query], told: Recorder | None, seconds: float = 5.0) -> list[Outcome]:
    batch = QueryBatch(queries, TimeBudget(seconds), observer=told)
    with default_settings():
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
    with default_settings():
        list(loose.ask(make("crown")))
    proved = (loose.outcomes[0].margin or 0.0) - 1000
    most = proved + share * (y[:, 0].min() - proved) - 1e-3
    both = [("Y_0", f"{most:.6f}"), ("Y_1", f"{y[:, 1].max():.6f}")]
    return data, text(low, high, [both, [("Y_0", f"{most - 1:.6f}")]])


STEPS = ("sign", "round", "quantised")

ASKED = [
    (kind, method)
    for kind in KINDS
    for method in ("alpha-crown", "bab", "split", "auto")
    if kind not in STEPS or method == "alpha-crown"
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
        proved += 1
        write_unsat(paths[0], Subject(data, prop.encode()), queries, range(len(queries)), told)
        assert check(*paths).startswith("unsat")
    assert proved


@pytest.mark.parametrize(
    ("kind", "method", "seed", "share"),
    [
        # The whole box is proved at once, by zonotopes or by slopes that would differ in its halves.
        ("abs", "split", 610, -0.5),
        ("prelu", "split", 610, -0.5),
        ("concat", "split", 1110, 0.7),
        # Default slopes of steps decide; slopes that were found of the whole box are no good in its parts.
        ("round", "split", 607, 0.7),
        ("round", "auto", 1021, 0.2),
        # The margin is as small as what coarse slopes lose.
        ("sigmoid", "bab", 611, 0.7),
        # A slope of 409, of a neuron with a coefficient of 0.0001, which coarse slopes change.
        ("spelled", "bab", 11044, 0.93),
        # Multipliers of a million, beside neurons whose coefficients matter.
        ("pool", "bab", 2068, 0.85),
        # Values between whole numbers, where one of them decides.
        ("quantised", "auto", 6016, 0.5),
    ],
)
def test_narrow_proofs_are_accepted(kind: str, method: str, seed: int, share: float, tmp_path: Path) -> None:
    data, prop = spec_of(kind, seed, share)
    net, _ = read_flat(data, kind)
    queries = [Query(net, each) for each in parse(prop, Path("a.vnnlib")).properties]
    told = Recorder()
    assert asked(method, queries, told, 100.0)[0].verdict is Verdict.UNSAT
    paths = [tmp_path / name for name in ("c.jsonl.gz", "n.onnx", "p.vnnlib")]
    paths[1].write_bytes(data)
    paths[2].write_text(prop)
    write_unsat(paths[0], Subject(data, prop.encode()), queries, range(len(queries)), told)
    assert check(*paths).startswith("unsat")


def test_what_was_not_told_has_no_certificate(tmp_path: Path) -> None:
    data, prop = spec_of("dense", 0, 0.0)
    net, _ = read_flat(data, "dense")
    queries = [Query(net, each) for each in parse(prop, Path("a.vnnlib")).properties]
    with pytest.raises(Exception, match="was not told"):
        write_unsat(tmp_path / "c", Subject(data, prop.encode()), queries, [0], Recorder())
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("family", "row"),
    [
        ("acasxu", "ACASXU_run2a_2_6_batch_2000 prop_4"),
        ("collins_rul_cnn", "NN_rul_full_window_20 monotonicity_CI_shift10_w20"),
        ("eran_2021", "ffnnSIGMOID__Point_6x200 mnist_spec_idx_1150_eps_0.01200"),
        ("mnist_fc", "mnist-net_256x4 prop_2_0.03"),
        ("oval21", "cifar_base_kw cifar_base_kw-img8717-eps0.011633986928104577"),
        ("rl_benchmarks", "dubinsrejoin dubinsrejoin_case_unsafe_55"),
        ("safenlp", "perturbations_0 hyperrectangle_5995"),
        ("tllverifybench", "tllBench_n=2_N=M=8_m=1_instance_0_3 property_N=8_3"),
    ],
)
def test_search_is_the_same_with_a_recorder(family: str, row: str, data: Path) -> None:
    """Verdicts and sub-problems of the given families do not depend on whether a proof is recorded."""
    onnx, prop = row.split(" ")
    rows = read_instances(data / "vnncomp" / family / "instances.csv")
    found = next(one for one in rows if f"/{onnx}.onnx" in str(one.onnx) and f"/{prop}.vnnlib" in str(one.vnnlib))
    network, spec = read_onnx(on_disk(found.onnx)), read_vnnlib(on_disk(found.vnnlib))
    queries = [Query(network, each) for each in spec.properties]
    # Each takes a second at most; what a slow machine leaves undecided says nothing.
    recorded, plain = (asked("auto", queries, told, 100.0) for told in (Recorder(), None))
    assert {outcome.verdict for outcome in plain} == {Verdict.UNSAT}
    for one, other in zip(recorded, plain, strict=True):
        assert one.verdict is other.verdict
        assert (one.subproblems or 0) == pytest.approx(other.subproblems or 0, rel=0.1)
