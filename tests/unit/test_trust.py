"""The independent checker: exact evaluation against definitions written out, enclosures, and confirmation."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from tests.support.draws import draws
from tests.support.exact import exact_outputs
from tests.support.layers import Layers, of_many_sizes
from verifiable_relu.errors import UnsupportedError
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import (
    Add,
    Gelu,
    Input,
    LeakyRelu,
    Linear,
    Node,
    Permute,
    Relu,
    Scale,
    Sigmoid,
    Tanh,
)
from verifiable_relu.network.source import replay
from verifiable_relu.rounding import ENCLOSE_UNITS
from verifiable_relu.spec.property import Box, Property, Query, Row
from verifiable_relu.trust import confirm, evaluate_exact
from verifiable_relu.trust.confirmation import margin_range
from verifiable_relu.trust.enclose import enclose, formats
from verifiable_relu.trust.replay import _EXACT_PRODUCTS


def layers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Layers:
    return Layers(*shape, seed=seed, draw=of_many_sizes, dtype=dtype)


def everything(seed: int, dtype: torch.dtype = torch.float32) -> Network:
    """A small network with every operator that has exact values."""
    b = layers(2, 5, 6, seed=seed, dtype=dtype)
    b.add(Scale, center=b.numbers(2, 1, 1), scale=b.numbers(2, 1, 1), shift=b.numbers(1))
    b.conv(4, (3, 2), stride=(2, 1), padding=(1, 0, 2, 1), dilation=(1, 2), groups=2).add(Relu)
    b.conv(3, (2, 2)).add(LeakyRelu, slope=b.numbers(3, 1, 1))
    b.add(Permute, (*b.shape[1:], 3), axes=(1, 2, 0)).linear(3)
    b.add(Add, inputs=(len(b.nodes) - 1, len(b.nodes) - 2))
    return b.flatten().linear(6).add(Relu).linear(3).network()


def points(network: Network, seed: int) -> list[list[Fraction]]:
    """Points of float32 numbers, of decimals, and of fractions with various denominators."""
    random = np.random.default_rng(seed)
    values = random.normal(size=network.input_size)
    return [
        [Fraction(float(v)) for v in values.astype(np.float32)],
        [Fraction(round(v * 10**6), 10**6) for v in values],
        [Fraction(round(v * 1000), int(random.integers(1, 90))) for v in values],
        [Fraction(0)] * network.input_size,
        [Fraction(round(v * 10), 7) * Fraction(10) ** (40 * (-1) ** i) for i, v in enumerate(values)],
    ]


@pytest.mark.parametrize("seed", range(draws(4)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exact_evaluation_equals_the_definitions(seed: int, dtype: torch.dtype) -> None:
    network = everything(seed, dtype)
    for point in points(network, seed):
        assert evaluate_exact(network, point) == exact_outputs(network, point)


def test_networks_without_an_exact_value_are_refused() -> None:
    smooth = layers(2, seed=0).linear(2).add(Sigmoid).network()
    averaging = Network(tuple(replace(n, weight_error=1e-16) if isinstance(n, Linear) else n for n in smooth.nodes[:2]))
    for network in (smooth, averaging):
        with pytest.raises(UnsupportedError, match="rational"):
            evaluate_exact(network, [Fraction(0), Fraction(0)])


@pytest.mark.parametrize("seed", range(draws(8)))
def test_enclosures_hold_the_exact_outputs_and_are_narrow(seed: int) -> None:
    network = everything(seed)
    for point in points(network, seed):
        exact = evaluate_exact(network, point)
        for dtype in formats(network):
            enclosed = enclose(network, point, dtype)
            for value, error, truth in zip(enclosed.value, enclosed.error, exact, strict=True):
                value, error = (Fraction(*v.as_integer_ratio()) for v in (value, error))
                assert abs(value - truth) <= error
                assert error <= ENCLOSE_UNITS[dtype] * 1e8 * (1 + max(abs(float(v)) for v in exact))


@pytest.mark.parametrize("activation", [Sigmoid, Tanh, Gelu])
@pytest.mark.parametrize("dtype", list(ENCLOSE_UNITS))
def test_enclosures_hold_smooth_networks(activation: type[Node], dtype: type[np.floating[Any]]) -> None:
    import mpmath

    options = {"lam": torch.tensor(3.0)} if activation is Gelu else {}
    b = layers(3, seed=1)
    network = b.linear(5).add(activation, **options).linear(2).network()
    point = points(network, 1)[2]
    values: list[list[mpmath.mpf]] = []
    with mpmath.workdps(60):

        def apply(v: mpmath.mpf) -> mpmath.mpf:
            match activation.op:
                case "Sigmoid":
                    return 1 / (1 + mpmath.exp(-v))
                case "Tanh":
                    return mpmath.tanh(v)
            return v * mpmath.ncdf(3 * v)

        values = [[mpmath.mpf(v.numerator) / v.denominator for v in point]]
        for node in network.nodes[1:]:
            at = values[-1]
            if isinstance(node, Linear):
                rows = zip(node.weight.tolist(), node.bias.tolist(), strict=True)
                values.append([mpmath.fdot(row, at) + offset for row, offset in rows])
            else:
                values.append([apply(v) for v in at])
        assert (dtype is np.float64 or activation is not Gelu) is (dtype in formats(network))
        enclosed = enclose(network, point, dtype)
        for value, error, truth in zip(enclosed.value, enclosed.error, values[-1], strict=True):
            value, error = (mpmath.mpf(n) / d for n, d in (v.as_integer_ratio() for v in (value, error)))
            assert dtype not in formats(network) or abs(truth - value) <= error
            assert error <= ENCLOSE_UNITS[dtype] * 1e7 * (1 + abs(value))


def test_stored_weight_errors_widen_the_enclosure() -> None:
    network = layers(3, seed=2).linear(3).network()
    uncertain = Network((network.nodes[0], replace(network.nodes[1], weight_error=1e-6)))  # type: ignore[call-arg]
    point = [Fraction(1), Fraction(-1), Fraction(2)]
    weight = network.nodes[1].weight.double()  # type: ignore[attr-defined]
    bias = network.nodes[1].bias.double()  # type: ignore[attr-defined]
    reach = 1e-6 * (weight.abs() @ torch.tensor([1.0, 1.0, 2.0], dtype=torch.float64) + bias.abs())
    assert (enclose(uncertain, point).error >= reach.numpy()).all()


def test_the_margin_range_follows_the_errors() -> None:
    network = layers(3, seed=3).linear(2).network()
    point = [Fraction(1), Fraction(1, 3), Fraction(2)]
    prop = union(((0, 1),), ((1, -1), (0, 1)))
    low, high = margin_range(prop, enclose(network, point))
    truth = prop.margin(evaluate_exact(network, point))
    assert low <= truth <= high and high - low < 1e-10


def union(*polytopes: tuple[tuple[int, int], ...]) -> Property:
    """A property over the box [0, 4]³ whose polytopes have rows sign·y_i ≤ 0."""
    rows = tuple(tuple(Row(((i, Fraction(sign)),), Fraction(0)) for i, sign in polytope) for polytope in polytopes)
    return Property(Box(np.zeros(3), np.full(3, 4.0)), rows)


def small(weight: Sequence[Sequence[float]], bias: Sequence[float], **options: object) -> Network:
    """A one-layer network, and the ONNX file that computes it unless another is given."""
    w, b = torch.tensor(weight), torch.tensor(bias)
    outputs, inputs = w.shape
    nodes = (
        Input(name="x", inputs=(), shape=(inputs,)),
        Linear(name="l", inputs=(0,), shape=(outputs,), weight=w, bias=b),
    )
    return Network(nodes, **{"onnx": gemm(w.numpy(), b.numpy()), **options})  # type: ignore[arg-type]


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
    assert kind in (TensorProto.FLOAT, TensorProto.DOUBLE)
    onnx.checker.check_model(model)
    return model.SerializeToString()


def test_replay_runs_the_file_itself() -> None:
    network = small([[1.0, 2.0, -1.0]], [0.5])
    assert replay(network, np.array([1, 2, 3], np.float32)).tolist() == [2.5]
    bare = replace(network, onnx=gemm(np.ones((1, 3), np.float32), np.zeros(1, np.float32), ()), batched=False)
    assert replay(bare, np.array([1, 2, 3], np.float32)).tolist() == [6.0]
    double = replace(network, onnx=gemm(np.full((1, 3), 0.1), np.zeros(1)))
    outputs = replay(double, np.array([1, 2, 3], np.float32))
    assert outputs.dtype == np.float64 and outputs.tolist() == pytest.approx([0.6])


def test_a_file_that_onnxruntime_cannot_run_is_unsupported() -> None:
    network = small([[1.0, 2.0, -1.0]], [0.5], onnx=b"no onnx")
    with pytest.raises(UnsupportedError, match="onnxruntime"):
        replay(network, np.zeros(3, np.float32))
    judged = confirm(Query(network, union(((0, 1),))), [Fraction(0), Fraction(0), Fraction(3)])
    assert not judged.confirmed and "onnxruntime" in judged.detail


def test_values_beyond_float32_are_not_confirmed() -> None:
    far = Property(Box(np.array([1e300]), np.array([1e300])), ((Row(((0, Fraction(1)),), Fraction(0)),),))
    judged = confirm(Query(small([[-1.0]], [0.0]), far), [Fraction(1e300)])
    assert not judged.confirmed and "replay does not" in judged.detail


@pytest.mark.parametrize("sign", [1, -1])
def test_an_exact_margin_beyond_float64_is_judged_by_its_sign(sign: int) -> None:
    box = Box(np.array([1e300]), np.array([1e300]))
    query = Query(small([[sign * 1e30]], [0.0]), Property(box, ((Row(((0, Fraction(1)),), Fraction(0)),),)))
    judged = confirm(query, [Fraction(1e300)])
    assert judged.exact and not judged.confirmed
    assert judged.margin == sign * sys.float_info.max


NETWORK = [[1.0, 1.0, -1.0], [0.0, 1.0, 0.0]], [0.0, 0.0]


def test_a_true_counterexample_is_confirmed() -> None:
    judged = confirm(Query(small(*NETWORK), union(((0, 1),))), [Fraction(1), Fraction(1), Fraction(3)])
    assert judged.confirmed and judged.exact and judged.margin == -1 and judged.outputs == (-1, 1)
    assert judged.replayed is not None and judged.replayed.tolist() == [-1, 1] and judged.detail == ""


@pytest.mark.parametrize(
    "point, complaint",
    [
        ((1, 1, 1), "neither"),
        ((1, 1, 5), "outside the box"),
        ((-1, 1, 3), "outside the box"),
        ((1, 1), "coordinates"),
    ],
)
def test_a_false_counterexample_is_not_confirmed(point: tuple[int, ...], complaint: str) -> None:
    judged = confirm(Query(small(*NETWORK), union(((0, 1),))), [Fraction(v) for v in point])
    assert not judged.confirmed and complaint in judged.detail


def test_strict_bounds_and_strict_rows_hold_for_the_exact_point() -> None:
    network = small(*NETWORK)
    row = Row(((0, Fraction(1)),), Fraction(-1), strict=True)
    box = Box(np.zeros(3), np.full(3, 4.0), open_upper=frozenset({2}))
    corner = [Fraction(1), Fraction(1), Fraction(4)]
    assert "outside the box" in confirm(Query(network, Property(box, ((row,),))), corner).detail
    closed = Property(Box(np.zeros(3), np.full(3, 4.0)), ((row,),))
    assert confirm(Query(network, closed), corner).confirmed
    on_the_row = [Fraction(1), Fraction(1), Fraction(3)]
    assert not confirm(Query(network, closed), on_the_row).confirmed
    loose = Property(closed.box, ((replace(row, strict=False),),))
    assert confirm(Query(network, loose), on_the_row).confirmed


def test_the_rounded_point_may_leave_the_box() -> None:
    tenth = Fraction(1, 10)
    assert Fraction(float(np.float32(0.1))) > tenth
    box = Box.exact([tenth], [tenth])
    network = small([[-1.0]], [0.0])
    assert confirm(Query(network, Property(box, ((Row(((0, Fraction(1)),), Fraction(0)),),))), [tenth]).confirmed


def test_exact_and_replay_must_agree() -> None:
    # float32 rounds 1 + 2⁻³⁰ − 1 to 0; real arithmetic does not.
    hidden = small([[1.0, 2.0**-30, -1.0]], [0.0])
    positive = Property(Box(np.ones(3), np.ones(3)), ((Row(((0, Fraction(-1)),), Fraction(0), strict=True),),))
    nonpositive = Property(Box(np.ones(3), np.ones(3)), ((Row(((0, Fraction(1)),), Fraction(0)),),))
    point = [Fraction(1)] * 3
    judged = confirm(Query(hidden, positive), point)
    assert not judged.confirmed and "replay does not" in judged.detail and judged.outputs == (Fraction(2) ** -30,)
    judged = confirm(Query(hidden, nonpositive), point)
    assert not judged.confirmed and "real arithmetic does not" in judged.detail


def test_a_network_without_exact_value_needs_a_clear_margin() -> None:
    nodes = (*small(*NETWORK).nodes, Sigmoid(name="s", inputs=(1,), shape=(2,)))
    graph = onnx.load_from_string(gemm(np.array(NETWORK[0], np.float32), np.array(NETWORK[1], np.float32)))
    graph.graph.node.append(helper.make_node("Sigmoid", ["y"], ["z"]))
    graph.graph.output[0].name = "z"
    network = Network(nodes, onnx=graph.SerializeToString())
    below_half = Property(union(((0, 1),)).box, ((Row(((0, Fraction(1)),), Fraction(1, 2)),),))
    clear = confirm(Query(network, below_half), [Fraction(1), Fraction(1), Fraction(3)])
    assert clear.confirmed and not clear.exact and clear.outputs is None
    assert clear.margin == pytest.approx(1 / (1 + math.e) - 0.5)
    on_the_boundary = confirm(Query(network, below_half), [Fraction(1), Fraction(1), Fraction(2)])
    assert not on_the_boundary.confirmed and "no exact evaluation" in on_the_boundary.detail


@pytest.mark.thorough
def test_a_large_network_is_judged_by_its_enclosure_unless_that_is_inconclusive() -> None:
    width = math.isqrt(_EXACT_PRODUCTS) + 1
    weight = torch.zeros(width, width)
    weight[:, 0] = 1.0
    nodes = (
        Input(name="x", inputs=(), shape=(width,)),
        Linear(name="l", inputs=(0,), shape=(width,), weight=weight, bias=torch.zeros(width)),
        Linear(name="m", inputs=(1,), shape=(1,), weight=torch.eye(1, width), bias=torch.zeros(1)),
    )
    network = Network(nodes, onnx=gemm(torch.eye(1, width).numpy(), np.zeros(1, np.float32)))
    box = Box(np.full(width, -1.0), np.ones(width))
    query = Query(network, Property(box, ((Row(((0, Fraction(1)),), Fraction(0)),),)))
    clear = confirm(query, [Fraction(-1)] * width)
    assert clear.confirmed and not clear.exact
    boundary = confirm(query, [Fraction(0)] * width)
    assert boundary.confirmed and boundary.exact and boundary.margin == 0
