"""Networks as runtimes compute them: evaluations by other code lie within the errors, and confirm counterexamples."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from onnx import helper, numpy_helper

from tests.soundness.test_arithmetic import KINDS, box_of, planted
from tests.soundness.test_arithmetic import evaluated as evaluated_file
from tests.support import nets
from tests.support.draws import draws
from tests.support.exact import exact_outputs
from tests.support.onnx_files import onnx_file
from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.execution.model import as_executed, execution_model
from verifiable_relu.execution.replay import replay
from verifiable_relu.ir import enclosure
from verifiable_relu.ir.exact import evaluate_exact
from verifiable_relu.ir.families import least_lambdas
from verifiable_relu.ir.network import Network
from verifiable_relu.readers.onnx.read import read_flat
from verifiable_relu.rounding import ARITHMETICS
from verifiable_relu.spec.property import Box, Property, Row
from verifiable_relu.trust.confirmation import Confirmation, confirm, margin_range

# Files


@np.errstate(invalid="ignore")
def test_a_file_is_charged_operator_by_operator() -> None:
    """Evaluations of files lie within the errors, which are not so large that nothing could leave them."""
    used = 0.0
    for kind, arithmetic, seed in itertools.product(KINDS, ARITHMETICS, range(3)):
        rng = np.random.default_rng(seed)
        data = kind(rng)
        try:
            network = as_executed(read_flat(data, "net")[0], arithmetic)
        except UnsupportedError:
            continue
        low, high = box_of(data, rng)
        point = (low + (high - low) * rng.random(low.shape)).astype(np.float32)
        found = enclosure.enclose(network, [Fraction(v) for v in point.tolist()])
        for _ in range(6):
            y = evaluated_file(data, point, arithmetic, rng)
            assert not (np.abs(y - found.value) > found.error).any()
            used = max(used, float(np.nan_to_num(np.abs(y - found.value) / found.error).max()))
    assert used > 1e-3


@pytest.mark.parametrize("arithmetic", ["real", "float32", "bfloat16", "float64"])
def test_what_is_not_modelled_in_a_file_is_named(arithmetic: str) -> None:
    hard = onnx_file([helper.make_node("HardSwish", ["x"], ["y"], name="h")], {"x": (1, 3)}, {"y": (1, 3)}, opset=20)
    network = read_flat(hard, "net")[0]
    if arithmetic == "real":
        assert as_executed(network, arithmetic) is network
        return
    said = "unknown arithmetic 'float64'" if arithmetic == "float64" else r"node 'h' \(HardSwish\)"
    with pytest.raises(InputError, match=said):
        as_executed(network, arithmetic)
    if arithmetic != "float64":
        # A network without a file is the one that is written for it.
        with pytest.raises(InputError, match=r"node 'v1' \(HardSwish\)"):
            as_executed(replace(network, source=replace(network.source, onnx=None)), arithmetic)


def test_a_family_runs_in_float32_alone() -> None:
    data = planted(np.random.default_rng(0))
    network = read_flat(data, "net")[0]
    both = execution_model(network, "float32", 5.0)
    assert least_lambdas(both) == [5.0] and both.arithmetic == "float32"
    assert least_lambdas(execution_model(network, "real", 5.0)) == [5.0]
    assert execution_model(network, "float32", False).digest == as_executed(network, "float32").digest
    with pytest.raises(InputError, match="rounds weights"):
        execution_model(network, "bfloat16", 5.0)


# Replay


def gemm(weight: np.ndarray, bias: np.ndarray, lead: tuple[int | str, ...] = ("n",)) -> bytes:
    """The ONNX file of y = W·x + b."""
    kind = helper.np_dtype_to_tensor_dtype(weight.dtype)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Add", ["h", "b"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", kind, (*lead, weight.shape[1]))],
        [helper.make_tensor_value_info("y", kind, (*lead, weight.shape[0]))],
        [numpy_helper.from_array(weight.T.copy(), "w"), numpy_helper.from_array(bias, "b")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    return model.SerializeToString()


def small(weight: Sequence[Sequence[float]], bias: Sequence[float], onnx: bytes | None = None) -> Network:
    """A one-layer network, and the ONNX file that computes it unless another is given."""
    chain, w, b = nets.Chain(len(weight[0])), torch.tensor(weight), torch.tensor(bias)
    chain.linear(w, b)
    network = chain.network()
    return replace(network, source=replace(network.source, onnx=onnx or gemm(w.numpy(), b.numpy())))


def union(*polytopes: tuple[tuple[int, int], ...]) -> Property:
    """A property over the box [0, 4]³ whose polytopes have rows sign·y_i ≤ 0."""
    rows = tuple(tuple(Row(((i, Fraction(sign)),), Fraction(0)) for i, sign in polytope) for polytope in polytopes)
    return Property(Box(np.zeros(3), np.full(3, 4.0)), rows)


def test_what_the_network_was_made_from_is_run() -> None:
    network, x = small([[1.0, 2.0, -1.0]], [0.5]), np.array([1, 2, 3], np.float32)
    assert replay(network, x).tolist() == [2.5]
    bare = replace(network.source, onnx=gemm(np.ones((1, 3), np.float32), np.zeros(1, np.float32), ()), batched=False)
    assert replay(replace(network, source=bare), x).tolist() == [6.0]
    double = replace(network.source, onnx=gemm(np.full((1, 3), 0.1), np.zeros(1)))
    outputs = replay(replace(network, source=double), x)
    assert outputs.dtype == np.float64 and outputs.tolist() == pytest.approx([0.6])
    module = replace(network.source, run=lambda point: 2 * point)
    assert replay(replace(network, source=module), x).tolist() == [2, 4, 6]
    alone = replace(network.source, onnx=None)
    assert replay(replace(network, source=alone), x).tolist() == [2.5]
    with pytest.raises(UnsupportedError, match="onnxruntime"):
        replay(replace(network, source=replace(network.source, onnx=b"no onnx")), x)


# Counterexamples


NETWORK = [[1.0, 1.0, -1.0], [0.0, 1.0, 0.0]], [0.0, 0.0]


def judged(network: Network, prop: Property, point: Sequence[Fraction]) -> Confirmation:
    """What is said of a point, whose outputs are those of exact evaluation where it is exact."""
    found = confirm(network, prop, point)
    if found.exact and found.outputs is not None:
        assert list(found.outputs) == exact_outputs(network, point)
    return found


def at(*values: float) -> list[Fraction]:
    return [Fraction(v) for v in values]


def test_a_counterexample_is_confirmed_by_exact_values_and_a_run() -> None:
    network, prop = small(*NETWORK), union(((0, 1),))
    found = judged(network, prop, at(1, 1, 3))
    assert found.confirmed and found.exact and found.margin == -1 and found.outputs == (-1, 1) and not found.detail
    for point, said in ((at(1, 1, 1), "neither"), (at(1, 1, 5), "outside"), (at(-1, 1, 3), "outside"), (at(1, 1), "2")):
        found = judged(network, prop, point)
        assert not found.confirmed and said in found.detail
    broken = judged(small(*NETWORK, onnx=b"no onnx"), prop, at(1, 1, 3))
    assert not broken.confirmed and "onnxruntime" in broken.detail


def test_strict_bounds_and_rows_hold_for_the_exact_point() -> None:
    row, box = Row(((0, Fraction(1)),), Fraction(-1), strict=True), Box(np.zeros(3), np.full(3, 4.0))
    opened = Box(np.zeros(3), np.full(3, 4.0), open_upper=frozenset({2}))
    for bounds, strict, point, confirmed in (
        (opened, True, at(1, 1, 4), False),
        (box, True, at(1, 1, 4), True),
        (box, True, at(1, 1, 3), False),
        (box, False, at(1, 1, 3), True),
    ):
        prop = Property(bounds, ((replace(row, strict=strict),),))
        assert judged(small(*NETWORK), prop, point).confirmed == confirmed


def test_points_and_values_that_float32_does_not_hold() -> None:
    tenth = Fraction(1, 10)
    near = Property(Box.exact([tenth], [tenth]), ((Row(((0, Fraction(1)),), Fraction(0)),),))
    assert judged(small([[-1.0]], [0.0]), near, [tenth]).confirmed
    far = Property(Box(np.array([1e300]), np.array([1e300])), ((Row(((0, Fraction(1)),), Fraction(0)),),))
    for weight in (-1.0, 1e30, -1e30):
        assert not judged(small([[weight]], [0.0]), far, at(1e300)).confirmed


def test_exact_values_and_the_run_must_agree() -> None:
    # float32 rounds 1 + 2⁻³⁰ − 1 to 0; real arithmetic does not.
    hidden, box = small([[1.0, 2.0**-30, -1.0]], [0.0]), Box(np.ones(3), np.ones(3))
    positive = Property(box, ((Row(((0, Fraction(-1)),), Fraction(0), strict=True),),))
    assert "replay does not" in judged(hidden, positive, at(1, 1, 1)).detail
    negative = Property(box, ((Row(((0, Fraction(1)),), Fraction(0)),),))
    assert "real arithmetic does not" in judged(hidden, negative, at(1, 1, 1)).detail
    # An exact value on the boundary is enough where the run is near.
    touched = Property(box, ((Row(((0, Fraction(1)),), Fraction(1, 2**30)),),))
    found = judged(small([[1.0, 2.0**-30, -1.0]], [0.0]), touched, at(1, 1, 1))
    assert found.confirmed and found.margin == 0


@pytest.mark.parametrize("seed", range(draws(12)))
def test_points_next_to_a_threshold_are_judged_exactly(seed: int) -> None:
    rng = np.random.default_rng(seed)
    network = nets.pieces(rng, nets.gaussian(rng))[seed % 7]
    network = replace(network, source=replace(network.source, run=network))
    point = [Fraction(v) for v in rng.normal(size=network.input_size).astype(np.float32).tolist()]
    ends = np.array([float(v) for v in point])
    value = evaluate_exact(network, point)[0]
    small_change = Fraction(1, 2**60)
    for threshold in (value, value + small_change, value - small_change, value + 1, value - 1):
        prop = Property(Box(ends, ends), ((Row(((0, Fraction(1)),), threshold),),))
        found = judged(network, prop, point)
        # Between these, the run decides.
        assert not (found.confirmed and threshold < value) and (found.confirmed or threshold < value + 1)


def test_margins_follow_the_errors_of_outputs() -> None:
    rng = np.random.default_rng(3)
    network = nets.mlp(rng, nets.gaussian(rng))
    point, prop = [Fraction(1, 3)] * network.input_size, union(((0, 1),), ((1, -1), (0, 1)))
    low, high = margin_range(prop, enclosure.enclose(network, point))
    assert low <= prop.margin(evaluate_exact(network, point)) <= high and high - low < 1e-10
    unknown = enclosure.Enclosed(np.zeros(2), np.array([0.0, np.inf]))
    assert margin_range(prop, unknown) == (-np.inf, np.inf)
