"""Certificates of families, of what runs, of two networks and of points, from real searches."""

from __future__ import annotations

import gzip
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from verifiable_relu.campaign.certificates import Certificates, Kept
from verifiable_relu.execution.model import execution_model
from verifiable_relu.execution.replay import replay
from verifiable_relu.ir.network import Network
from verifiable_relu.ir.transform import NetworkPart, combine
from verifiable_relu.proof import Recorder
from verifiable_relu.readers import read_onnx
from verifiable_relu.search.batch import QueryBatch
from verifiable_relu.search.budget import TimeBudget
from verifiable_relu.search.outcomes import Outcome, Verdict
from verifiable_relu.search.registry import make
from verifiable_relu.settings import default_settings
from verifiable_relu.spec.property import Box, Property, Query, Row
from verifiable_relu.spec.specfile import vnnlib_text

KINDS = ("Relu", "Gelu", "scaled")


def written(kind: str, seed: int, change: float = 0.0) -> bytes:
    """A network with two layers of activations; ``scaled``: 0.25·Gelu(4·x). Weights are off by ``change``."""
    rng, other = np.random.default_rng(seed), np.random.default_rng(seed + 1)
    nodes, stored, at = [], {}, "x"

    def add(operator: str, *given: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(operator, given, [f"v{len(nodes)}"], **attributes))
        return f"v{len(nodes) - 1}"

    def number(*values: Any) -> str:
        stored[f"c{len(stored)}"] = np.float32(values[0])
        return f"c{len(stored) - 1}"

    for layer, (before, after) in enumerate(((3, 6), (6, 5), (5, 2))):
        weight = rng.normal(size=(before, after)) / before**0.5 * (1 + change * other.normal(size=(before, after)))
        at = add("Gemm", at, number(weight), number(rng.normal(size=after) / 4))
        if layer < 2:
            match kind:
                case "scaled":
                    at = add("Mul", add("Gelu", add("Mul", at, number(4.0))), number(0.25))
                case _:
                    at = add(kind, at)
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, s]) for n, s in (("x", 3), (at, 2))]
    stored_tensors = [numpy_helper.from_array(value, name) for name, value in stored.items()]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], stored_tensors)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    return bytes(made.SerializeToString())


def asked(network: Network, prop: Property, method: str) -> tuple[Outcome, Recorder]:
    told = Recorder()
    batch = QueryBatch([Query(network, prop)], TimeBudget(1.0), observer=told)
    with default_settings():
        for _ in batch.ask(make(method)):
            pass
    return batch.outcomes[0], told


def property_of(network: Network, seed: int, share: float, radius: float = 0.3) -> Property:
    """Whether the first output is low: ``share`` of the way from CROWN's bound to the least of some points."""
    rng = np.random.default_rng(seed)
    center = np.float32(rng.normal(size=3)).astype(float)
    low, high = (np.float32(center + side * radius).astype(float) for side in (-1, 1))
    loose, _ = asked(network, Property(Box(low, high), ((Row(((0, Fraction(1)),), Fraction(-1000)),),)), "crown")
    proved = (loose.margin or 0.0) - 1000
    y = network.limit(torch.from_numpy(low + (high - low) * rng.random((2000, 3)))).numpy()
    most = proved + share * (float(y[:, 0].min()) - proved) - 1e-3
    return Property(Box(low, high), ((Row(((0, Fraction(1)),), Fraction(f"{most:.6f}")),),), name="low")


def kept(folder: Path, data: bytes, network: Network, prop: Property, method: str) -> tuple[Outcome, Kept]:
    """The outcome, and what became of its certificate; nothing does of what is unknown."""
    (folder / "n.onnx").write_bytes(data)
    (folder / "p.vnnlib").write_text("(declare-const Y_1 Real)\n" + vnnlib_text(prop))
    outcome, told = asked(network, prop, method)
    if outcome.verdict is Verdict.UNKNOWN:
        return outcome, Kept(False, "")
    names = [str(folder / name) for name in ("n.onnx", "p.vnnlib")]
    query = Query(network, prop)
    return outcome, Certificates(folder / "c").keep(*names, [query], [outcome], 2.0, told, [0])


@pytest.mark.parametrize("method", ["crown", "alpha-crown", "auto"])
@pytest.mark.parametrize("kind", KINDS)
def test_proofs_of_families_are_accepted(kind: str, method: str, tmp_path: Path) -> None:
    proved = 0
    for seed, share in enumerate((-0.5, 0.3)):
        data = written(kind, seed)
        network = execution_model(read_onnx(data), family=2.0 if kind == "scaled" else 1.0)
        outcome, said = kept(tmp_path, data, network, property_of(network, seed, share), method)
        if outcome.verdict is Verdict.UNSAT:
            assert said.accepted and "every network" in said.detail, said
            proved += 1
    assert proved


@pytest.mark.parametrize(
    ("arithmetic", "method"),
    [*(("float32", name) for name in ("crown", "split", "auto")), ("bfloat16", "alpha-crown"), ("float16", "crown")],
)
def test_proofs_about_what_runs_are_accepted(arithmetic: str, method: str, tmp_path: Path) -> None:
    proved = 0
    for seed, share in enumerate((-0.5, 0.3)):
        data = written("Relu", seed)
        network = execution_model(read_onnx(data), arithmetic)
        outcome, said = kept(tmp_path, data, network, property_of(network, seed, share), method)
        if outcome.verdict is Verdict.UNSAT:
            assert said.accepted and f"in {arithmetic}" in said.detail, said
            proved += 1
    assert proved


@pytest.mark.parametrize(
    ("kind", "method", "seed", "share"),
    [("Relu", "alpha-crown", 3, 0.0), ("Gelu", "alpha-crown", 3, 0.0), ("Gelu", "split", 3018, 0.1)],
)
def test_proofs_of_families_that_run_are_accepted(
    kind: str, method: str, seed: int, share: float, tmp_path: Path
) -> None:
    data = written(kind, seed)
    network = execution_model(read_onnx(data), "float32", 1.0)
    outcome, said = kept(tmp_path, data, network, property_of(network, seed, share), method)
    assert outcome.verdict is Verdict.UNSAT
    assert said.accepted and "in float32" in said.detail and "every" not in said.detail, said


@pytest.mark.parametrize("family", [None, 1.0])
@pytest.mark.parametrize(("one", "other"), [("Relu", "Relu"), ("Gelu", "Relu"), ("Gelu", "Gelu")])
def test_proofs_of_two_networks_are_accepted_or_not_written(
    one: str, other: str, family: float | None, tmp_path: Path
) -> None:
    """Outputs of a network and of one with weights that are off by a hundredth differ by little."""
    data = written(one, 5), written(other, 5, 0.01 if one == other else 0.0)
    networks = execution_model(read_onnx(data[0]), family=family), read_onnx(data[1])
    files = tuple(str(tmp_path / name) for name in ("a.onnx", "b.onnx"))
    for file, each in zip(files, data, strict=True):
        Path(file).write_bytes(each)
    low, high = np.full(3, -0.1), np.full(3, 0.1)
    # The change of the first output reaches ``most``.
    parts = [NetworkPart(name, each, range(3)) for name, each in zip("ab", networks, strict=True)]
    joined = combine(parts, 3, replay, paired=True)
    for sign in (1, -1):
        row = Row(((0, Fraction(sign)), (2, Fraction(-sign))), Fraction(-5000))
        loose, _ = asked(joined, Property(Box(low, high), ((row,),)), "alpha-crown")
        assert loose.margin is not None and loose.verdict is Verdict.UNSAT
        most = Fraction(f"{loose.margin - 5000 - 1e-3:.6f}")
        prop = Property(Box(low, high), ((Row(row.coefficients, most),),), name=f"change{sign}")
        kept = Certificates(tmp_path / "c", files, networks)
        said = kept.keep("", prop.name, [Query(joined, prop)], [loose], 1.0)
        # The search may bound differences of curves better than a certificate can: then there is none, with a reason.
        assert not said.refused and said.detail
        if (one, other, family) == ("Relu", "Relu", None):
            assert said.accepted and "pair of networks" in said.detail, said
            head = json.loads(gzip.decompress(Path(said.file).read_bytes()).splitlines()[0])
            assert len(head["pairs"]) == 2


def test_points_are_accepted_and_such_of_a_family_too_or_of_what_runs_not(tmp_path: Path) -> None:
    data = written("Relu", 0)
    real = read_onnx(data)
    reached = property_of(real, 0, 1.0)
    prop = Property(reached.box, ((Row(((0, Fraction(1)),), reached.unsafe[0][0].bound + 1),),), name="p")
    outcome, said = kept(tmp_path, data, real, prop, "auto")
    assert outcome.verdict is Verdict.SAT and said.accepted and said.detail.startswith("sat"), said
    single = execution_model(read_onnx(data), "float32")
    outcome, said = kept(tmp_path, data, single, prop, "auto")
    assert outcome.verdict is Verdict.SAT and not said.accepted and "a run found them" in said.detail
    family = execution_model(read_onnx(data), family=1.0)
    outcome, said = kept(tmp_path, data, family, prop, "auto")
    assert outcome.verdict is Verdict.SAT and said.accepted and said.detail.startswith("sat"), said
