"""Random quantised networks: no evaluation by onnxruntime contradicts a verdict about float32, no proof is refused.

Each file is run by a session of onnxruntime as it comes and by one without optimisations. Files of which the first
computes another function than the file says are refused by name.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

from tests.support.draws import draws
from tests.support.hooks import Hook
from tests.support.quantised_nets import Graph, RandomNetwork, u8
from tests.support.solver_cases import row
from verifiable_relu.bounds.backward import Relaxation
from verifiable_relu.check import BadInput, Refused, check
from verifiable_relu.check.model import read_model
from verifiable_relu.check.running import ARITHMETICS
from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.execution import model as executed
from verifiable_relu.execution.model import Requantised, as_executed
from verifiable_relu.ir.interval import Interval
from verifiable_relu.ir.network import Network
from verifiable_relu.proof.recorder import Recorder
from verifiable_relu.proof.write import Subject, write_unsat
from verifiable_relu.readers import read_onnx
from verifiable_relu.search.batch import QueryBatch
from verifiable_relu.search.bounding import Crown
from verifiable_relu.search.budget import TimeBudget
from verifiable_relu.search.outcomes import Verdict
from verifiable_relu.spec.property import Box, Property, Query
from verifiable_relu.spec.specfile import vnnlib_text


def ran(data: bytes, points: np.ndarray, shape: tuple[int, ...]) -> list[np.ndarray]:
    """The outputs (points, outputs) by default, and without optimisations; by the sessions that load the file."""
    found, levels = [], onnxruntime.GraphOptimizationLevel
    for level in (levels.ORT_ENABLE_ALL, levels.ORT_DISABLE_ALL):
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level, options.log_severity_level = level, 4
        options.intra_op_num_threads = 1
        # The one option that the page names: sums do not saturate on processors without VNNI.
        options.add_session_config_entry("session.x64quantprecision", "1")
        try:
            session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        except Exception:
            # Version 1.31 refuses some files with its optimisations.
            assert level is levels.ORT_ENABLE_ALL
            continue
        found.append(np.stack([session.run(None, {"x": x.reshape(shape)})[0].reshape(-1) for x in points]))
    return found


def outside(made: RandomNetwork, network: Network, seed: int) -> int:
    """How many values are outside of what the model allows at their points."""
    points = np.random.default_rng(seed).normal(size=(12, network.input_size)).astype(np.float32)
    at = torch.from_numpy(points).double()
    allowed = Relaxation(network, Interval(at, at), dtype=torch.float64).advance().bounds[-1].interval
    low, high = allowed.lower.numpy(), allowed.upper.numpy()
    return sum(int(((y < low) | (high < y)).sum()) for y in ran(made.data, points, made.shape))


@pytest.mark.parametrize("kept", [True, False])
def test_evaluations_are_within_the_model(kept: bool) -> None:
    read = 0
    for seed in range(draws(120)):
        made = RandomNetwork(seed, kept)
        try:
            network = as_executed(read_onnx(made.data), "float32")
        except InputError:
            assert not kept
            continue
        read += 1
        assert not outside(made, network, seed), seed
    assert read


def test_files_that_are_not_refused_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is refused, evaluations are outside of the model."""
    monkeypatch.setattr(Requantised, "take", lambda self, *given: None)
    monkeypatch.setattr(executed, "compare_at", lambda network, points: None)
    for seed in range(200):
        made = RandomNetwork(seed, False)
        if outside(made, as_executed(read_onnx(made.data), "float32"), seed):
            return
    raise AssertionError("no evaluation shows the fault")


def proofs(seed: int, folder: Path) -> int:
    """Require of thresholds between evaluations and bounds that no proof is wrong or refused; returns the proofs."""
    made, proved = RandomNetwork(seed, True), 0
    network, rng = as_executed(read_onnx(made.data), "float32"), np.random.default_rng(seed)
    size, radius = network.input_size, rng.choice([0, 1e-3, 0.1])
    centre = rng.normal(size=size) / 2
    low, high = (centre - radius).astype(np.float32), (centre + radius).astype(np.float32)
    share = np.concatenate([rng.random((6, size)), rng.integers(0, 2, (6, size))])
    points = np.clip((low + share * (high - low)).astype(np.float32), low, high)
    sign = int(rng.choice([1, -1]))
    reached = max(float((sign * y[:, 0]).max()) for y in ran(made.data, points, made.shape))
    far, bound = 4096.0, 0.0
    for part in (None, 1.0, 0.5, 0.0):
        beyond = 1e-9 * (1 + abs(bound)) if part == 1 else 0.0
        asked = Fraction(far if part is None else reached + part * (bound - reached) + beyond)
        prop = Property(Box(low.astype(float), high.astype(float)), ((row({0: -float(sign)}, -asked),),))
        ((_, outcome),) = Crown().claims(QueryBatch([Query(network, prop)], TimeBudget(5.0)))
        if part is None:
            assert outcome.margin is not None
            bound = far - outcome.margin
        if outcome.verdict is not Verdict.UNSAT:
            continue
        assert asked > Fraction(reached), seed
        # Certificates speak of real arithmetic.
        query, told = Query(read_onnx(made.data), prop), Recorder()
        ((_, outcome),) = Crown().claims(QueryBatch([query], TimeBudget(5.0), observer=told))
        if outcome.verdict is not Verdict.UNSAT:
            continue
        others = "".join(f"(declare-const Y_{i} Real)\n" for i in range(1, network.output_size))
        net, spec, kept = folder / "net.onnx", folder / "p.vnnlib", folder / "kept"
        net.write_bytes(made.data)
        spec.write_text(others + vnnlib_text(prop))
        write_unsat(kept, Subject(made.data, spec.read_bytes()), [query], [0], told)
        check(kept, net, spec)
        proved += 1
    return proved


def test_thresholds_between_evaluations_and_bounds(tmp_path: Path) -> None:
    """Nothing is proved that an evaluation contradicts, and the checker accepts what is."""
    assert sum(proofs(seed, tmp_path) for seed in range(draws(40)))


FAULTS = {
    # With a seed from which a network shows it soon.
    "half of what a kernel adds to a quotient": (
        51,
        Hook("rounding:tie", lambda right, *given: right(*given) / 2),
    ),
    "a quarter of a step on both sides": (
        51,
        Hook("ir.functions.steps:StepFunction.step", lambda right, f: replace(right(f), band=(0.25, 0.25))),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_in_the_model_and_in_bounds_show(fault: str, tmp_path: Path) -> None:
    first, hook = FAULTS[fault]
    with hook.applied():
        for seed in range(first, first + 60):
            try:
                proofs(seed, tmp_path)
            except (AssertionError, Refused):
                return
    raise AssertionError("nothing shows the fault")


def _biased(g: Graph, bias: str | np.ndarray, operator: str = "Gemm") -> str:
    x = g.both("x", np.float32(0.1), u8(128))
    w = g("DequantizeLinear", np.ones((6, 6), np.int8), np.float32(0.1), np.int8(0))
    made = g("Gemm", x, w, bias, transB=1) if operator == "Gemm" else g("Add", g("MatMul", x, w), bias)
    return g.both(made, np.float32(0.0249), u8(128))


def _weights_alone(g: Graph, **attributes: int) -> str:
    w = g("DequantizeLinear", g.whole(np.int8, 6, 6), g.scale(), np.int8(0))
    return g("Gemm", g("Relu", g.both("x", g.scale(), u8(9))), w, **attributes)


def _float_weights(g: Graph, operator: str = "Relu", *stored: np.ndarray) -> str:
    x, weight = g.both("x", g.scale(), u8(9)), g.rng.normal(size=(6, 6)).astype(np.float32)
    if operator != "Relu":
        x, weight = g("Reshape", x, np.array([1, 6, 1, 1])), weight.reshape(6, 6, 1, 1)
    made = g(operator, g("Conv" if weight.ndim == 4 else "Gemm", x, weight), *stored)
    return g("Flatten", g.both(made, g.scale(), u8(0)))


def _twice(g: Graph, operator: str, *stored: Any, **attributes: int) -> str:
    return g.both(g(operator, g.both("x", g.scale(), u8(9)), *stored, **attributes), g.scale(), u8(9))


def _bias(scale: float, zero: int = 0) -> dict[str, np.ndarray]:
    return {"whole": np.full(6, 3, np.int32), "scale": np.float32(scale), "zero": np.array(zero, np.int32)}


CHANGED = {
    "float bias": lambda g: _biased(g, np.full(6, 0.0149, np.float32)),
    "float addend": lambda g: _biased(g, np.full(6, 0.0149, np.float32), "MatMul"),
    "bias of another scale": lambda g: _biased(g, g("DequantizeLinear", *_bias(0.001).values())),
    "addend of another scale": lambda g: _biased(g, g("DequantizeLinear", *_bias(0.001).values()), "MatMul"),
    "float weights": _float_weights,
    "weights alone": _weights_alone,
    "float weights, scaled": lambda g: _float_weights(g, "Mul", np.float32(0.7)),
    "float weights, normalised": lambda g: _float_weights(g, "BatchNormalization", *np.float32([[0.7] * 6] * 4)),
    "quantised twice": lambda g: g.both(g.both("x", g.scale(), u8(9)), g.scale(), u8(9)),
    "quantised twice, with a sum": lambda g: _twice(g, "Add", np.float32(0)),
    "quantised twice, with a product": lambda g: _twice(g, "Mul", np.float32(1)),
    "quantised twice, with a cast": lambda g: _twice(g, "Cast", to=1),
    "quantised twice, in another shape": lambda g: _twice(g, "Expand", np.array([1, 6])),
}


@pytest.mark.parametrize("name", CHANGED)
def test_files_that_default_sessions_change_are_refused_by_name(name: str) -> None:
    g = Graph(21, 0)
    data = g.file(CHANGED[name](g), (1, 6))
    network = read_onnx(data)
    with pytest.raises(UnsupportedError, match="by default onnxruntime") as raised:
        as_executed(network, "float32")
    assert str(raised.value).startswith("node 't")
    with pytest.raises(BadInput, match="its rounding is not known"):
        read_model(data, ARITHMETICS["float32"])
    points = np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32)
    first, second = ran(data, points, (1, 6))
    assert np.abs(first - second).max() > 1e-4


def test_files_like_these_that_are_kept_are_taken() -> None:
    scale = np.float32(0.1) * np.float32(0.1)
    for make in (
        lambda g: _biased(g, g("DequantizeLinear", *_bias(scale).values())),
        lambda g: _weights_alone(g, transB=1),
        lambda g: g.both(g("Flatten", g.both("x", np.float32(0.1), u8(9))), np.float32(0.1), u8(9)),
    ):
        g = Graph(21, 0)
        data = g.file(make(g), (1, 6))
        assert as_executed(read_onnx(data), "float32").arithmetic == "float32"
