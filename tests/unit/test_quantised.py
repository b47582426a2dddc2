"""Quantised operators: random graphs against onnxruntime, an evaluator in fractions of its own, bounds and verdicts."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from tests.support.quantised_nets import MS, Graph, u8
from tests.support.solver_cases import row
from verifiable_relu.bounds.backward import Relaxation
from verifiable_relu.bounds.linear_bounds import bound_by_crown, lower_of_rows
from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.execution.model import as_executed
from verifiable_relu.ir.enclosure import enclose
from verifiable_relu.ir.exact import evaluate_exact, is_evaluable
from verifiable_relu.ir.interval import Interval
from verifiable_relu.ir.network import Network
from verifiable_relu.readers import read_onnx
from verifiable_relu.rounding import tie
from verifiable_relu.search.batch import answers
from verifiable_relu.search.bounding import Crown
from verifiable_relu.search.outcomes import Verdict
from verifiable_relu.spec.property import Box, Property, Query
from verifiable_relu.trust.confirmation import confirm


def _dense(g: Graph) -> str:
    s, t = g.scale(), g.scale()
    x = g.both("x", s, u8(128))
    w = g("DequantizeLinear", g.whole(np.int8, 6, 5), t, np.array(3, np.int8))
    # Where a bias has another scale, onnxruntime's optimised file computes another function than the file says.
    bias = g("DequantizeLinear", g.whole(np.int32, 5, most=1000), s * t)
    h = g("Relu", g("Add", g("MatMul", x, w), bias))
    h = g.both(h, g.scale(), u8(0))
    w = g("DequantizeLinear", g("QuantizeLinear", g.rng.normal(size=(5, 3)).astype(np.float32), g.scale()), g.scale())
    return g.both(g("MatMul", h, w), g.scale(about=0.1), np.array(-7, np.int8))


def _per_axis(g: Graph) -> str:
    x = g.both("x", g.scale(2), g.whole(np.int8, 2, most=9), axis=1)
    w = g("DequantizeLinear", g.whole(np.int8, 3, 2, 2, 2), g.scale(3), np.zeros(3, np.int8), axis=0)
    bias = g("DequantizeLinear", g.whole(np.int32, 3, most=999), g.scale(3, about=1e-3), axis=0)
    h = g("QuantizeLinear", g("Conv", x, w, bias, pads=[0, 1, 0, 1]), g.scale(about=0.05), u8(100))
    pooled = g("MaxPool", h, kernel_shape=[2, 2], pads=[0, 0, 1, 1])
    kept = g("Clip", pooled, u8(70), u8(180))
    return g("DequantizeLinear", g("Flatten", g("Transpose", kept, perm=[0, 2, 3, 1])), g.scale(), u8(90))


def _wide(g: Graph) -> str:
    x = g.both("x", g.scale(about=1e-4), np.array(30_000, np.uint16))
    w = g("DequantizeLinear", g.whole(np.int16, 6, 4, most=30_000), g.scale(about=1e-4), np.array(5, np.int16))
    return g.both(g("MatMul", x, w), g.scale(about=1e-3), np.array(-100, np.int16))


def _early(g: Graph) -> str:
    """Four and 16 bits before the standard had them."""
    four = helper.make_tensor("", TensorProto.INT4, (6, 4), g.rng.integers(-8, 8, 24))
    w = g("DequantizeLinear", four, g.scale(4), None, domain=MS, axis=1)
    x = g.both("x", g.scale(about=1e-4), np.array(30_000, np.uint16), domain=MS)
    return g.both(g("MatMul", x, w), g.scale(about=1e-3), np.array(-100, np.int16), domain=MS)


def _narrow(g: Graph) -> str:
    """Four bits, and blocks of three."""
    four = helper.make_tensor("", TensorProto.INT4, (6, 2), g.rng.integers(-8, 8, 12))
    w = g("DequantizeLinear", four, g.scale(2, 2, about=0.2), axis=0, block_size=3)
    zero = helper.make_tensor("", TensorProto.UINT4, (), [7])
    x = g.both("x", np.asarray(0.2, np.float32), zero)
    blocks = g("QuantizeLinear", g("MatMul", x, w), g.scale(1, 2), axis=1, block_size=1, output_dtype=TensorProto.INT8)
    return g("DequantizeLinear", blocks, g.scale(1, 2), axis=1, block_size=1)


def _qlinear_matmul(g: Graph) -> str:
    s, t = g.scale(), g.scale(about=0.05)
    x = g("QuantizeLinear", "x", s, u8(120))
    w, ws, wz = g.whole(np.int8, 6, 4), g.scale(4), g.whole(np.int8, 4, most=3)
    h = g("QLinearMatMul", x, s, u8(120), w, ws, wz, t, u8(99))
    both = g("QLinearMatMul", g("Transpose", h, perm=[1, 0]), t, u8(99), h, t, u8(99), g.scale(about=0.5), u8(128))
    return g("DequantizeLinear", both, g.scale(), u8(128))


def _qlinear_conv(g: Graph) -> str:
    s, g.rank = g.scale(), 4
    x = g("QuantizeLinear", "x", s, u8(120))
    bias = g.whole(np.int32, 3, most=500)
    kernel = g.whole(np.int8, 3, 2, 2, 3), g.scale(3), np.zeros(3, np.int8)
    h = g("QLinearConv", x, s, u8(120), *kernel, g.scale(about=0.06), u8(128), bias, pads=[1, 1, 0, 1], strides=[1, 2])
    return g("DequantizeLinear", h, g.scale(), u8(128))


def _integer(g: Graph) -> str:
    x = g("QuantizeLinear", "x", g.scale(), u8(120))
    c = g("ConvInteger", x, g.whole(np.uint8, 2, 2, 2, 2), u8(120), u8(20))
    rows = g("Reshape", x, np.array([8, 4]))
    m = g("MatMulInteger", rows, g.whole(np.uint8, 4, 3), u8(120), u8(30))
    parts = [g("Reshape", g("Cast", part, to=1), np.array([1, -1])) for part in (c, m)]
    return g("Mul", g("Concat", *parts, axis=1), g.scale(about=1e-3))


def _runtime(operator: str, *attributes: tuple[str, Any], operands: int = 1) -> Callable[[Graph], str]:
    def made(g: Graph) -> str:
        g.rank = 4 if operator.endswith("Pool") else 2
        zeros = [g.whole(np.uint8, most=99) for _ in range(operands)]
        scales = [g.scale() for _ in zeros]
        inputs = [g("QuantizeLinear", "x", *pair) for pair in zip(scales, zeros, strict=True)]
        last = g.scale(about=0.03), u8(77)
        given = [one for triple in zip(inputs, scales, zeros, strict=True) for one in triple]
        order = [*last, *given] if operator == "QLinearConcat" else [*given, *last]
        return g("DequantizeLinear", g(operator, *order, domain=MS, **dict(attributes)), *last)

    return made


def _qgemm(g: Graph) -> str:
    s = g.scale()
    x = g("QuantizeLinear", "x", s, u8(120))
    weights = g.whole(np.int8, 4, 6), g.scale(4), np.zeros(4, np.int8)
    bias = g.whole(np.int32, 4, most=500)
    h = g("QGemm", x, s, u8(120), *weights, bias, g.scale(about=0.05), u8(128), domain=MS, alpha=0.75, transB=1)
    scale = g.scale(about=0.05)
    return g("QGemm", h, scale, u8(128), g.whole(np.int8, 4, 3), g.scale(), np.array(2, np.int8), domain=MS)


NOT_IN_FLOAT32 = {"integers"}
FLAT, IMAGE = (1, 6), (1, 2, 4, 4)
CASES: dict[str, tuple[int, tuple[int, ...], Callable[[Graph], str]]] = {
    "dense": (10, FLAT, _dense),
    "per axis": (13, IMAGE, _per_axis),
    "16 bits": (21, FLAT, _wide),
    "before opset 21": (17, FLAT, _early),
    "4 bits, blocks": (21, FLAT, _narrow),
    "QLinearMatMul": (13, FLAT, _qlinear_matmul),
    "QLinearConv": (13, IMAGE, _qlinear_conv),
    "integers": (13, IMAGE, _integer),
    "QGemm": (13, FLAT, _qgemm),
    "QLinearAdd": (13, FLAT, _runtime("QLinearAdd", operands=2)),
    "QLinearMul": (13, FLAT, _runtime("QLinearMul", operands=2)),
    "QLinearConcat": (13, FLAT, _runtime("QLinearConcat", ("axis", 1), operands=2)),
    "QLinearSigmoid": (13, FLAT, _runtime("QLinearSigmoid")),
    "QLinearLeakyRelu": (13, FLAT, _runtime("QLinearLeakyRelu", ("alpha", 0.25))),
    "QLinearAveragePool": (13, IMAGE, _runtime("QLinearAveragePool", ("kernel_shape", [2, 2]), ("strides", [2, 2]))),
    "QLinearGlobalAveragePool": (13, IMAGE, _runtime("QLinearGlobalAveragePool")),
}


@functools.cache
def of(name: str) -> tuple[bytes, Network]:
    opset, shape, make = CASES[name]
    g = Graph(opset, sum(map(ord, name)))
    data = g.file(make(g), shape)
    return data, read_onnx(data)


# --- an evaluator of its own ---------------------------------------------------------------------------------------


def exactly(array: np.ndarray) -> np.ndarray:
    made = [Fraction(float(v)) for v in array.astype(np.float64).flat]
    return np.array([*made, None], dtype=object)[:-1].reshape(array.shape)


def spread(values: np.ndarray, shape: tuple[int, ...], axis: int, block: int) -> np.ndarray:
    if values.size == 1:
        return values.reshape(())
    places = np.indices(shape)
    at = [places[i] // block if i == axis and block else places[i] for i in range(len(shape))]
    return values[tuple(at)] if block else values[places[axis]]


def windows(x: np.ndarray, kernel: tuple[int, ...], pads: list[int], strides: list[int], fill: Any) -> np.ndarray:
    (_, channels, rows, columns), (top, left, bottom, right) = x.shape, pads
    padded = np.full((channels, top + rows + bottom, left + columns + right), fill, dtype=object)
    padded[:, top : top + rows, left : left + columns] = x[0]
    seen = np.lib.stride_tricks.sliding_window_view(padded, kernel, axis=(1, 2))
    return seen[:, :: strides[0], :: strides[1]]


class Evaluator:
    """A file of the cases at one point, in fractions; smooth functions in float64."""

    def __init__(self, data: bytes) -> None:
        self.model = onnx.load_from_string(data)
        self.stored = {c.name: numpy_helper.to_array(c) for c in self.model.graph.initializer}

    def __call__(self, x: np.ndarray) -> np.ndarray:
        self.values = {name: exactly(array) for name, array in self.stored.items()} | {"x": exactly(x), "": None}
        for node in self.model.graph.node:
            self.a = {a.name: helper.get_attribute_value(a) for a in node.attribute}
            self.node, given = node, [self.values[name] for name in node.input]
            self.values[node.output[0]] = np.asarray(getattr(self, node.op_type)(*given), dtype=object)
        return self.values[self.model.graph.output[0].name].reshape(-1)

    def limits(self, position: int) -> tuple[int, int]:
        names = list(self.node.input) + [""] * 9
        kinds = {"int8": (-128, 127), "uint8": (0, 255), "int16": (-(2**15), 2**15 - 1), "uint16": (0, 2**16 - 1)}
        kinds |= {"uint4": (0, 15)}
        if names[position]:
            return kinds[str(self.stored[names[position]].dtype)]
        return kinds["int8" if self.a.get("output_dtype") == TensorProto.INT8 else "uint8"]

    def quantised(self, x: Any, scale: Any, zero: Any, position: int) -> np.ndarray:
        low, high = self.limits(position)
        axis, block = self.a.get("axis", 1), self.a.get("block_size", 0)
        s = spread(scale, x.shape, axis, block)
        z = np.array(0, dtype=object) if zero is None else spread(zero, x.shape, axis, block)
        # Python rounds fractions to the even neighbour.
        made = np.frompyfunc(lambda v, s, z: Fraction(min(max(round(Fraction(v) / s) + int(z), low), high)), 3, 1)
        return made(x, s, z)

    def QuantizeLinear(self, x: Any, scale: Any, zero: Any = None) -> Any:
        if self.node.input[0] in self.stored:
            # What the file stores is divided in float32.
            stored, s = self.stored[self.node.input[0]], self.stored[self.node.input[1]]
            return exactly(np.clip(np.rint(stored / s), *self.limits(2)))
        return self.quantised(x, scale, zero, 2)

    def DequantizeLinear(self, x: Any, scale: Any, zero: Any = None) -> Any:
        axis, block = self.a.get("axis", 1), self.a.get("block_size", 0)
        return (x - (0 if zero is None else spread(zero, x.shape, axis, block))) * spread(scale, x.shape, axis, block)

    def MatMul(self, x: Any, y: Any) -> Any:
        return x @ y

    def MatMulInteger(self, x: Any, y: Any, p: Any, q: Any) -> Any:
        return (x - p) @ (y - q)

    def QLinearMatMul(self, x: Any, s: Any, p: Any, y: Any, t: Any, q: Any, u: Any, r: Any) -> Any:
        return self.quantised(((x - p) * s) @ ((y - q) * t), u, r, 7)

    def QGemm(self, x: Any, s: Any, p: Any, y: Any, t: Any, q: Any, c: Any = None, u: Any = None, r: Any = None) -> Any:
        right = (y - (q[:, None] if q.size > 1 else q)) * (t[:, None] if t.size > 1 else t)
        found = ((x - p) * s) @ (right.T if self.a.get("transB") else right)
        found = (found + (0 if c is None else c * s * t)) * Fraction(self.a.get("alpha", 1.0))
        return found if u is None else self.quantised(found, u, r, 8)

    def Conv(self, x: Any, w: Any, b: Any = None) -> Any:
        seen = windows(x, w.shape[2:], self.a.get("pads", [0] * 4), self.a.get("strides", [1, 1]), Fraction(0))
        found = np.tensordot(w, seen, ([1, 2, 3], [0, 3, 4]))
        return (found if b is None else found + b[:, None, None])[None]

    def ConvInteger(self, x: Any, w: Any, p: Any, q: Any) -> Any:
        return self.Conv(x - p, w - q)

    def QLinearConv(self, x: Any, s: Any, p: Any, w: Any, t: Any, q: Any, u: Any, r: Any, b: Any) -> Any:
        found = self.Conv((x - p) * s, (w - q[:, None, None, None]) * t[:, None, None, None], b * s * t)
        return self.quantised(found, u, r, 7)

    def MaxPool(self, x: Any) -> Any:
        return windows(x, (2, 2), self.a["pads"], [1, 1], Fraction(-(10**9))).max((-1, -2))[None]

    def Relu(self, x: Any) -> Any:
        return np.maximum(x, Fraction(0))

    def Clip(self, x: Any, low: Any, high: Any) -> Any:
        return np.minimum(np.maximum(x, low), high)

    def Add(self, x: Any, y: Any) -> Any:
        return x + y

    def Mul(self, x: Any, y: Any) -> Any:
        return x * y

    def Cast(self, x: Any) -> Any:
        return x

    def Concat(self, *xs: Any) -> Any:
        return np.concatenate(xs, self.a["axis"])

    def Reshape(self, x: Any, shape: Any) -> Any:
        return x.reshape([int(n) for n in shape])

    def Flatten(self, x: Any) -> Any:
        return x.reshape(1, -1)

    def Transpose(self, x: Any) -> Any:
        return x.transpose(self.a["perm"])

    def _between(self, function: Callable[..., Any], *given: Any) -> Any:
        *triples, scale, zero = given
        values = [(triples[i] - triples[i + 2]) * triples[i + 1] for i in range(0, len(triples), 3)]
        return self.quantised(np.asarray(function(*values), dtype=object), scale, zero, len(given) - 1)

    def QLinearAdd(self, *given: Any) -> Any:
        return self._between(lambda x, y: x + y, *given)

    def QLinearMul(self, *given: Any) -> Any:
        return self._between(lambda x, y: x * y, *given)

    def QLinearConcat(self, scale: Any, zero: Any, *given: Any) -> Any:
        values = [(given[i] - given[i + 2]) * given[i + 1] for i in range(0, len(given), 3)]
        return self.quantised(np.concatenate(values, 1), scale, zero, 1)

    def QLinearSigmoid(self, *given: Any) -> Any:
        return self._between(np.frompyfunc(lambda v: 1 / (1 + math.exp(-v)), 1, 1), *given)

    def QLinearLeakyRelu(self, *given: Any) -> Any:
        slope = Fraction(self.a["alpha"])
        return self._between(lambda x: np.where(x < 0, slope * x, x), *given)

    def QLinearAveragePool(self, *given: Any) -> Any:
        return self._between(lambda x: windows(x, (2, 2), [0] * 4, [2, 2], 0).sum((-1, -2))[None] / 4, *given)

    def QLinearGlobalAveragePool(self, *given: Any) -> Any:
        return self._between(lambda x: x.sum((2, 3), keepdims=True) / 16, *given)


def sessions(data: bytes) -> list[onnxruntime.InferenceSession]:
    made = []
    for level in (
        onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
        onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
    ):
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level, options.log_severity_level = level, 4
        made.append(onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"]))
    return made


@pytest.mark.parametrize("name", CASES)
def test_values_bounds_and_verdicts(name: str) -> None:
    """At random points: both evaluations, onnxruntime with and without optimisations; bounds and a proof about them."""
    data, net = of(name)
    rng, size = np.random.default_rng(0), net.input_size
    points = (rng.normal(size=(12, size)) * rng.choice([0.3, 1, 4], (12, 1))).astype(np.float32)
    shape = CASES[name][1]
    evaluate = Evaluator(data)
    found = np.array([evaluate(x.reshape(shape)) for x in points])
    for x, y in zip(points, found, strict=True):
        rational = [Fraction(float(v)) for v in x]
        if is_evaluable(net):
            assert evaluate_exact(net, rational) == list(y)
        about = enclose(net, rational)
        assert (np.abs(about.value - y.astype(np.float64)) <= about.error).all()
    runtimes = []
    for session in sessions(data):
        ran = np.array([session.run(None, {"x": x.reshape(shape)})[0].reshape(-1) for x in points])
        runtimes.append(ran)
        # Next to a tie float32 may round to the other neighbour.
        off = np.abs(ran - found.astype(np.float64)).max(1)
        assert (off < 1e-4).mean() > 0.8 and off.max() < 1.5
    low, high = points.min(0), points.max(0)
    box = Interval(*(torch.from_numpy(end).double().reshape(1, -1) for end in (low, high)))
    rows = torch.cat([torch.eye(net.output_size), -torch.eye(net.output_size)]).double()
    try:
        runs = as_executed(net, "float32")
    except UnsupportedError:
        assert name in NOT_IN_FLOAT32
    else:
        assert name not in NOT_IN_FLOAT32
        floor = lower_of_rows(bound_by_crown(Relaxation(runs, box)), rows)[0]
        for ran in runtimes:
            assert bool((rows @ torch.from_numpy(ran).double().T >= floor[:, None]).all())
    lower = lower_of_rows(bound_by_crown(Relaxation(net, box)), rows)[0]
    assert bool((rows @ torch.tensor(found.astype(np.float64)).T >= lower[:, None]).all())
    least = min(y[0] for y in found)
    queries = [
        Query(net, Property(Box(low.astype(np.float64), high.astype(np.float64)), ((row({0: 1}, bound),),)))
        for bound in (Fraction(least), Fraction(float(lower[0])) - Fraction(1, 8))
    ]
    attained, beyond = answers(Crown(), queries)
    assert attained.verdict is not Verdict.UNSAT and beyond.verdict is Verdict.UNSAT


@pytest.mark.parametrize("seed", range(3))
def test_where_weights_alone_are_quantised_the_file_is_read_as_it_is_written(seed: int) -> None:
    """By default, onnxruntime quantises in such a file what the weights are multiplied with, too."""
    g = Graph(21, seed)
    h = g("MatMul", "x", g("DequantizeLinear", g.whole(np.int8, 6, 5), g.scale(5), np.zeros(5, np.int8), axis=1))
    h = g("MatMul", g("Relu", h), g("DequantizeLinear", g.whole(np.int8, 5, 3), g.scale(3), axis=1))
    data = g.file(h, FLAT)
    x = np.random.default_rng(seed).normal(size=6).astype(np.float32)
    exact = Evaluator(data)(x.reshape(FLAT))
    assert evaluate_exact(read_onnx(data), [Fraction(float(v)) for v in x]) == list(exact)


def test_halves_go_to_the_even_neighbour() -> None:
    """Ties of x/s and numbers beyond the range, exactly, with a scale of which no float is the reciprocal."""
    g = Graph(13, 0)
    scale = np.float32(0.75)
    net = read_onnx(g.file(g.both("x", np.asarray(scale), np.array(3, np.int8)), FLAT))
    x = np.array([0.5, 1.5, 2.5, -0.5, -130.5, 123.5]) * 0.75
    assert is_evaluable(net) and any(getattr(op, "weight_error", 0) > 0 for op in net.ops)
    expected = [Fraction(3, 4) * v for v in (0, 2, 2, 0, -130, 124)]
    assert evaluate_exact(net, [Fraction(v) for v in x]) == expected
    (session, _) = sessions(net.source.onnx or b"")
    assert session.run(None, {"x": x.astype(np.float32)[None]})[0].reshape(-1).tolist() == [float(v) for v in expected]
    beside = [Fraction(float(v)) + Fraction(1, 10**30) for v in x]
    assert evaluate_exact(net, beside) == [Fraction(3, 4) * v for v in (1, 2, 3, 0, -130, 124)]


def test_a_half_that_float32_makes_is_an_evaluation() -> None:
    """x/s lies below a half, and in float32 upon it: real arithmetic proves what an evaluation contradicts."""
    g = Graph(13, 0)
    scale = np.float32(0.1)
    net = read_onnx(g.file(g.both("x", np.asarray(scale), np.array(0, np.int8)), (1, 1)))
    halves = np.arange(1, 100, 2, dtype=np.float32) + np.float32(0.5)
    points = np.concatenate([np.nextafter(halves * scale, np.float32(end)) for end in (0, 99)] + [halves * scale])
    found = [
        x for x in points if x / scale in halves and Fraction(float(x)) / Fraction(float(scale)) % 1 < Fraction(1, 2)
    ]
    assert found
    point = np.float64(found[0])
    below = Fraction(float(scale)) * (Fraction(float(found[0] / scale)) - Fraction(1, 2))
    prop = Property(Box(np.array([point]), np.array([point])), ((row({0: -1}, -below - Fraction(1, 100)),),))
    (real,) = answers(Crown(), [Query(net, prop)])
    (runs,) = answers(Crown(), [Query(as_executed(net, "float32"), prop)])
    assert real.verdict is Verdict.UNSAT and runs.verdict is not Verdict.UNSAT
    assert confirm(as_executed(net, "float32"), prop, [Fraction(point)]).confirmed


def _dynamic(g: Graph) -> str:
    g.nodes.append(helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]))
    return g("DequantizeLinear", "q", "s", "z")


def _float8(g: Graph) -> str:
    zero = helper.make_tensor("", TensorProto.FLOAT8E4M3FN, (), [0.0])
    return g.both("x", g.scale(), zero)


def _sum_of_bytes(g: Graph) -> str:
    x = g("QuantizeLinear", "x", g.scale(), u8(128))
    return g("DequantizeLinear", g("Add", x, x), g.scale(), u8(128))


REFUSED: dict[str, tuple[Callable[[Graph], str], str]] = {
    "dynamic": (_dynamic, r"node 't0' \(DynamicQuantizeLinear\)|DynamicQuantizeLinear"),
    "float8": (_float8, "quantised to float8"),
    "sums": (_sum_of_bytes, "wrap around"),
    "scales": (lambda g: g.both("x", g.scale(5), None, axis=1), "scales or zero points of shape"),
    "other": (lambda g: g("QLinearReduceMean", "x", g.scale(), u8(1), g.scale(), u8(1), domain=MS), "com.microsoft"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_read_is_refused_by_name(name: str) -> None:
    make, reason = REFUSED[name]
    g = Graph(21, 1)
    with pytest.raises((UnsupportedError, InputError), match=reason):
        read_onnx(g.file(make(g), FLAT))


@pytest.mark.parametrize("fused", [True, False])
def test_a_quantised_sum_of_scales_far_apart_holds_what_kernels_compute(fused: bool) -> None:
    """A kernel that adds zero points times quotients of scales first, in float32, is within the bounds."""
    rng = np.random.default_rng(3)
    beyond = 0
    for case in range(30):
        g = Graph(13, case)
        # ±a is next to a tie, and rounds to nothing in steps of b.
        a = np.float32(rng.integers(90, 120) + 0.5 + rng.uniform(-1e-3, 1e-3))
        b, s = np.float32(3 * a + rng.random()), np.float32(1)
        za, zb, zy = u8(int(rng.integers(200, 250))), u8(int(rng.integers(200, 250))), u8(128)
        x, y = g("QuantizeLinear", "x", a, za), g("QuantizeLinear", "x", b, zb)
        if fused:
            q = g("QLinearAdd", x, a, za, y, b, zb, s, zy, domain=MS)
        else:
            both = g("Sub", g("DequantizeLinear", x, a, za), g("DequantizeLinear", y, b, zb))
            q = g("QuantizeLinear", both, s, zy)
        runs = as_executed(read_onnx(g.file(g("DequantizeLinear", q, s, zy), (1, 4))), "float32")
        points = (rng.integers(-1, 2, 4) * a).astype(np.float32)
        box = Interval(*(torch.from_numpy(points).double()[None],) * 2)
        least = Relaxation(runs, box, dtype=torch.float64).advance().bounds[-1].interval
        sign = 1 if fused else -1
        ra, rb = np.float32(a / s), np.float32(sign) * np.float32(b / s)
        qa = np.clip(np.rint(points / a) + za, 0, 255).astype(np.float32)
        qb = np.clip(np.rint(points / b) + zb, 0, 255).astype(np.float32)
        fixed = np.float32(zy) - (ra * np.float32(za) + rb * np.float32(zb))
        kernel = np.clip(np.rint(qa * ra + (qb * rb + fixed)), 0, 255) - np.float32(zy)
        assert bool((least.lower.numpy() <= kernel).all() and (kernel <= least.upper.numpy()).all())
        true = np.clip(np.rint(float(a) * (qa - float(za)) + sign * float(b) * (qb - float(zb))), -128, 127)
        beyond += int((kernel != true).sum())
    assert beyond


def test_what_a_quotient_may_be_off_by_is_derived() -> None:
    """In rational numbers: a kernel's sum is within γ of the sizes of its terms."""
    assert tie(256, Fraction(0)) <= 2.0**-12 * 1.001 and tie(1 << 16, Fraction(0)) >= 2.0**-4
    rng = np.random.default_rng(0)
    for _ in range(300):
        bits = int(rng.choice([8, 16]))
        n, s = 2**bits, np.float32(rng.uniform(0.01, 1))
        scales = (s * 2.0 ** rng.uniform(-3, 8, 2)).astype(np.float32)
        q, z, zy = rng.integers(0, n, 2), rng.integers(0, n, 2), int(rng.integers(0, n))
        ratio = scales / s
        fixed = np.float32(zy) - (ratio[0] * np.float32(z[0]) + ratio[1] * np.float32(z[1]))
        kernel = np.float32(q[0]) * ratio[0] + (np.float32(q[1]) * ratio[1] + fixed)
        exact = [Fraction(float(each)) / Fraction(float(s)) for each in scales]
        true = sum(((int(q[i]) - int(z[i])) * exact[i] for i in range(2)), Fraction(zy))
        assert abs(Fraction(float(kernel)) - true) <= tie(n, 2 * n * sum(exact, Fraction(0)))
