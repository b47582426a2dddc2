"""What is proved of an arithmetic holds for every evaluation in it: tried with evaluators that share no code with it.

Networks that sense the order or the precision of their sums compute other numbers in a runtime than in real arithmetic.
Each is evaluated by numpy, operator by operator, with sums in random orders and parentheses, fused or not, and with
small numbers kept or taken for zero. No method may prove that an output which one of them computes does not occur.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from fractions import Fraction

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from scipy import special

from verifiable_relu import verify_properties
from verifiable_relu.errors import InputError
from verifiable_relu.execution import rounded
from verifiable_relu.execution.model import as_executed
from verifiable_relu.ir.network import Product, Sum
from verifiable_relu.readers import read_onnx
from verifiable_relu.rounding import ARITHMETICS, ELEMENTARY, RuntimeArithmetic
from verifiable_relu.search.outcomes import Trust, Verdict
from verifiable_relu.spec.property import Box, Property, Row

Rng = np.random.Generator
Round = Callable[[np.ndarray], np.ndarray]

TINY = np.finfo(np.float32).tiny


def written(nodes: list[onnx.NodeProto], inputs: int, shape: tuple[int, ...] = (), **constants: np.ndarray) -> bytes:
    """A file with the input ``x`` and the output ``y``."""
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, *(shape or (inputs,))])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray(value, np.float32), name) for name, value in constants.items()],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    return onnx.shape_inference.infer_shapes(made).SerializeToString()


# Evaluations in an arithmetic


def half(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def short(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).astype(np.float32)


RESULTS: dict[str, Round] = {"bfloat16": half, "float16": short}


def cut(x: np.ndarray) -> np.ndarray:
    return (np.ascontiguousarray(x, np.float32).view(np.int32) & -(1 << 13)).view(np.float32)


def summed(terms: list[np.float32], rng: Rng) -> np.float32:
    """The sum of float32 numbers in a random order and random parentheses."""
    terms = list(terms)
    kind = rng.integers(3)
    if kind:
        rng.shuffle(terms)
    while len(terms) > 1:
        at = 0 if kind < 2 else int(rng.integers(len(terms) - 1))
        terms[at : at + 2] = [np.float32(terms[at] + terms[at + 1])]
    return terms[0]


def product_sum(w: np.ndarray, x: np.ndarray, b: np.float32, rng: Rng, flush: bool) -> np.float32:
    """w·x + b in float32: of products that are rounded, or are fused with the additions of a running sum."""
    order = rng.permutation(len(w))
    if rng.random() < 0.4:
        total = b
        for k in order:
            # One rounding: the product and the sum of two float32 numbers of moderate size are exact in longdouble.
            total = np.float32(np.longdouble(w[k]) * np.longdouble(x[k]) + np.longdouble(total))
        return total
    found = [np.float32(w[k] * x[k]) for k in range(len(w))] + [b]
    if flush:
        found = [np.float32(0) if abs(v) < TINY else v for v in found]
    return summed(found, rng)


def shape_of(graph: onnx.GraphProto) -> list[int]:
    return [d.dim_value for d in graph.input[0].type.tensor_type.shape.dim]


def windowed(node: onnx.NodeProto, a: list[np.ndarray], operand: Round, rng: Rng, flush: bool) -> np.ndarray:
    """Sums over windows of one image, each in an order of its own: means are quotients, or sums of parts."""
    given = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    x, rank = a[0][0], a[0].ndim - 2
    pads, strides = given.get("pads", [0] * 2 * rank), given.get("strides", [1] * rank)
    # The entries, and their weights, of each value.
    found: dict[tuple[int, ...], list[tuple[tuple[int, ...], np.float32]]] = {}
    if node.op_type == "ConvTranspose":
        kernel = a[1].shape[2:]
        sizes = [(x.shape[1 + i] - 1) * strides[i] + kernel[i] - pads[i] - pads[rank + i] for i in range(rank)]
        found = {place: [] for place in np.ndindex(a[1].shape[1], *sizes)}
        for entry in np.ndindex(x.shape):
            for out, *k in np.ndindex(*a[1].shape[1:]):
                place = (out, *(p * s + o - f for p, s, o, f in zip(entry[1:], strides, k, pads, strict=False)))
                if place in found:
                    found[place].append((entry, a[1][(entry[0], out, *k)]))
    else:
        kernel = given.get("kernel_shape", x.shape[1:])
        sizes = [(x.shape[1 + i] + pads[i] + pads[rank + i] - kernel[i]) // strides[i] + 1 for i in range(rank)]
        for channel, *place in np.ndindex(x.shape[0], *sizes):
            entries = [
                (channel, *(p * s + o - f for p, s, o, f in zip(place, strides, k, pads, strict=False)))
                for k in np.ndindex(*kernel)
            ]
            covered = [e for e in entries if all(0 <= i < n for i, n in zip(e, x.shape, strict=True))]
            count = np.float32(len(entries) if given.get("count_include_pad") else len(covered))
            found[channel, *place] = [(e, count) for e in covered]
    y = np.zeros((a[1].shape[1] if node.op_type == "ConvTranspose" else x.shape[0], *sizes), np.float32)
    for place, terms in found.items():
        values = operand(np.array([x[entry] for entry, _ in terms], np.float32))
        weights = np.array([weight for _, weight in terms], np.float32)
        if node.op_type == "ConvTranspose":
            y[place] = product_sum(operand(weights), values, np.float32(a[2][place[0]]), rng, flush)
        elif rng.integers(2):
            y[place] = product_sum(np.ones_like(values), values, np.float32(0), rng, flush) / weights[0]
        else:
            y[place] = product_sum(operand(np.float32(1) / weights), values, np.float32(0), rng, flush)
    return y[None]


def evaluated(data: bytes, point: np.ndarray, arithmetic: str, rng: Rng) -> np.ndarray:
    """The outputs of a file at a float32 point, in one evaluation of an arithmetic."""
    graph = onnx.load_from_string(data).graph
    result = RESULTS.get(arithmetic, np.asarray)
    operand: Round = cut if arithmetic == "tf32" else np.asarray
    flush = bool(rng.integers(2))

    def kept(x: np.ndarray) -> np.ndarray:
        x = result(np.asarray(x, np.float32))
        return np.where(np.abs(x) < TINY, np.float32(0), x) if flush else x

    known = {c.name: result(numpy_helper.to_array(c)) for c in graph.initializer}
    known["x"] = kept(point.astype(np.float32)).reshape(
        [d.dim_value for d in graph.input[0].type.tensor_type.shape.dim]
    )
    for node in graph.node:
        a = [known[name] for name in node.input]
        match node.op_type:
            case "Gemm":
                bias = a[2] if len(a) > 2 else np.zeros(a[1].shape[0], np.float32)
                x, w = operand(a[0][0]), operand(a[1])
                y = np.array([[product_sum(w[i], x, bias[i], rng, flush) for i in range(len(w))]])
            case "Conv":
                # Of width and height of the kernel, no padding, one image.
                x, w = operand(a[0][0]), operand(a[1])
                height, width = (n - k + 1 for n, k in zip(x.shape[1:], w.shape[2:], strict=True))
                y = np.zeros((1, len(w), height, width), np.float32)
                for o, i, j in np.ndindex(*y.shape[1:]):
                    window = x[:, i : i + w.shape[2], j : j + w.shape[3]].reshape(-1)
                    y[0, o, i, j] = product_sum(w[o].reshape(-1), window, np.float32(a[2][o]), rng, flush)
            case "ConvTranspose" | "AveragePool" | "GlobalAveragePool":
                y = windowed(node, a, operand, rng, flush)
            case "Add" | "Sub" | "Mul" | "Div":
                y = {"Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide}[node.op_type](a[0], a[1])
            case "Sum":
                y = np.vectorize(lambda *each: summed(list(each), rng), otypes=[np.float32])(*a)
            case "Relu":
                y = np.maximum(a[0], np.float32(0))
            case "Max":
                y = np.maximum(a[0], a[1])
            case "LeakyRelu":
                y = np.where(a[0] >= 0, a[0], a[0] * np.float32(node.attribute[0].f))
            case "BatchNormalization":
                x, (scale, shift, mean, variance) = a[0], (p.reshape(-1, *[1] * (a[0].ndim - 2)) for p in a[1:])
                factor = scale / np.sqrt(variance + np.float32(1e-5))
                y = (x - mean) * factor + shift if rng.integers(2) else x * factor + (shift - mean * factor)
            case "Flatten":
                y = a[0].reshape(1, -1)
            case other:
                raise AssertionError(other)
        known[node.output[0]] = kept(y)
    return known["y"].reshape(-1)


# Networks that sense


def gemm(x: str, y: str, w: str, b: str) -> onnx.NodeProto:
    return helper.make_node("Gemm", [x, w, b], [y], transB=1)


def absorbed(rng: Rng) -> bytes:
    """x + 2ᵏ − 2ᵏ, operator by operator, or as x·a + big·b − big·b in one sum, times what is left of 1."""
    big = np.float32(2.0 ** rng.integers(10, 40))
    match rng.integers(5):
        case 0:
            nodes = [helper.make_node("Add", ["x", "c"], ["h"]), helper.make_node("Sub", ["h", "c"], ["y"])]
            return written(nodes, 1, c=[big])
        case 1:
            # The order of one sum decides.
            nodes = [gemm("x", "h", "w", "b"), gemm("h", "y", "v", "d")]
            return written(nodes, 1, w=[[0], [1], [0]], b=[big, 0, big], v=[[1, 1, -1]], d=[0])
        case 2:
            nodes = [
                gemm("x", "h", "w", "b"),
                helper.make_node("Relu", ["h"], ["r"]),
                gemm("r", "y", "v", "d"),
            ]
            return written(nodes, 1, w=[[1]], b=[big], v=[[1]], d=[-big])
        case 3:
            nodes = [helper.make_node("Sum", ["x", "c", "m"], ["y"])]
            return written(nodes, 1, c=[big], m=[-big])
        case _:
            nodes = [
                helper.make_node("BatchNormalization", ["x", "s", "b", "m", "v"], ["y"]),
            ]
            return written(nodes, 1, (1, 1, 1), s=[1], b=[big], m=[big], v=[1])


def flushed(rng: Rng) -> bytes:
    """What is too small for a normal number, made large again."""
    nodes = [helper.make_node("Mul", ["x", "s"], ["h"]), helper.make_node("Mul", ["h", "l"], ["y"])]
    return written(nodes, 1, s=[2.0**-100], l=[np.float32(2.0**100)]) if rng.integers(2) else written(
        [helper.make_node("Mul", ["x", "s"], ["g"]), helper.make_node("Mul", ["g", "s"], ["h"]),
         helper.make_node("Mul", ["h", "l"], ["i"]), helper.make_node("Mul", ["i", "l"], ["y"])],
        1, s=[2.0**-64], l=[np.float32(2.0**64)],
    )  # fmt: skip


def planted(rng: Rng) -> bytes:
    """A small network with a neuron that is what rounding leaves of its input, through a ReLU."""
    width, big = int(rng.integers(2, 5)), np.float32(2.0 ** rng.integers(8, 26))
    w = rng.normal(size=(width + 1, 3)).astype(np.float32)
    b = rng.normal(size=width + 1).astype(np.float32)
    b[-1] = big
    v = rng.normal(size=(2, width + 1)).astype(np.float32)
    v[:, -1] = 1
    d = np.full(2, -big, np.float32)
    return written(
        [gemm("x", "h", "w", "b"), helper.make_node("Relu", ["h"], ["r"]), gemm("r", "y", "v", "d")],
        3,
        w=w,
        b=b,
        v=v,
        d=d,
    )


def convolved(rng: Rng, leaky: bool = True) -> bytes:
    """A convolution and a dense layer whose numbers are of very different sizes."""
    kernel = (rng.normal(size=(2, 1, 2, 2)) * 4.0 ** rng.integers(-6, 7, (2, 1, 2, 2))).astype(np.float32)
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["h"]),
        helper.make_node("LeakyRelu", ["h"], ["r"], alpha=0.1) if leaky else helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("Flatten", ["r"], ["f"]),
        gemm("f", "g", "v", "d"),
        helper.make_node("Max", ["g", "e"], ["y"]),
    ]
    v = (rng.normal(size=(2, 8)) * 4.0 ** rng.integers(-6, 7, (2, 8))).astype(np.float32)
    return written(
        nodes, 9, (1, 3, 3), w=kernel, b=rng.normal(size=2), v=v, d=rng.normal(size=2), e=rng.normal(size=2) - 50
    )


def residual(rng: Rng) -> bytes:
    """A sum of two computed values of which both are large."""
    big = np.float32(2.0 ** rng.integers(6, 22))
    nodes = [
        gemm("x", "h", "w", "b"),
        helper.make_node("Relu", ["h"], ["r"]),
        gemm("r", "s", "v", "d"),
        helper.make_node("Add", ["s", "h"], ["y"]),
    ]
    w, v = (rng.normal(size=(3, 3)).astype(np.float32) for _ in range(2))
    return written(nodes, 3, w=w, b=np.full(3, big), v=v - np.eye(3, dtype=np.float32), d=np.full(3, big / 7))


def compared(rng: Rng) -> bytes:
    """A sum of numbers that nothing has rounded before or rounds afterwards: x and the larger of x and 2ᵏ."""
    nodes = [helper.make_node("Max", ["x", "c"], ["m"]), helper.make_node("Add", ["x", "m"], ["y"])]
    return written(nodes, 1, c=[np.float32(2.0 ** rng.integers(20, 40))])


def multiplied(rng: Rng) -> bytes:
    """A product of two computed values that nothing has rounded before: the larger of x and each of two constants."""
    nodes = [
        helper.make_node("Max", ["x", "c"], ["a"]),
        helper.make_node("Max", ["x", "d"], ["b"]),
        helper.make_node("Mul", ["a", "b"], ["y"]),
    ]
    return written(nodes, 1, c=rng.uniform(8, 90, 1), d=rng.uniform(8, 90, 1))


KINDS = (absorbed, flushed, planted, convolved, residual, compared, multiplied)


def box_of(data: bytes, rng: Rng) -> tuple[np.ndarray, np.ndarray]:
    size = int(np.prod(shape_of(onnx.load_from_string(data).graph)))
    center = rng.normal(size=size).astype(np.float32)
    radius = np.float32(rng.choice([0, 1e-3, 0.1]))
    return (center - radius).astype(np.float32), (center + radius).astype(np.float32)


def runs(data: bytes, low: np.ndarray, high: np.ndarray, arithmetic: str, rng: Rng, count: int) -> np.ndarray:
    """The first output at random points of a box in random evaluations."""
    found = []
    for _ in range(count):
        share = rng.integers(0, 2, low.size) if rng.random() < 0.5 else rng.random(low.size)
        point = np.clip((low + share * (high - low)).astype(np.float32), low, high)
        with np.errstate(all="ignore"):
            found.append(evaluated(data, point, arithmetic, rng)[0])
    return np.array(found)


def beyond(low: np.ndarray, high: np.ndarray, sign: int, threshold: float) -> Property:
    """Whether sign·y₀ ≥ sign·threshold occurs in a box."""
    row = Row(((0, Fraction(-sign)),), Fraction(-sign) * Fraction(threshold))
    return Property(Box(np.float64(low), np.float64(high)), ((row,),))


def asked(data: bytes, low: np.ndarray, high: np.ndarray, sign: int, threshold: float, arithmetic: str, method: str):
    prop = beyond(low, high, sign, threshold)
    # What is proved of so few neurons is proved in less; searches for a proof that there is not go on to the limit.
    return verify_properties(data, prop, method, 0.4 if method == "crown" else 0.1, arithmetic=arithmetic)[0]


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_output_that_an_evaluation_computes_is_never_proved_not_to_occur(kind, arithmetic: str) -> None:
    rng = np.random.default_rng([KINDS.index(kind), *arithmetic.encode()])
    proved = 0
    for case in range(6):
        data = convolved(rng, arithmetic not in RESULTS) if kind is convolved else kind(rng)
        if arithmetic in RESULTS and b"BatchNormalization" in data:
            continue
        low, high = box_of(data, rng)
        outputs = runs(data, low, high, arithmetic, rng, 60)
        method = ("crown", "bab", "ibp", "split", "alpha-crown", "milp")[case]
        if not np.isfinite(outputs).all():
            # Nothing is proved where something overflows; weights may, when the file is taken in the arithmetic.
            try:
                assert asked(data, low, high, 1, 1e30, arithmetic, "crown").verdict is not Verdict.UNSAT
            except InputError as error:
                assert "beyond the range of float16" in str(error)
            continue
        for sign, reached in ((1, outputs.max()), (-1, outputs.min())):
            result = asked(data, low, high, sign, float(reached), arithmetic, method)
            assert result.verdict is not Verdict.UNSAT, (kind.__name__, arithmetic, method, sign, reached)
            # Far beyond what is reached there is a proof: the errors are bounded.
            far = float(reached) + sign * 8 * max(1.0, float(np.abs(outputs).max())) * 2.0**30
            proved += asked(data, low, high, sign, far, arithmetic, "crown").verdict is Verdict.UNSAT
    assert proved or arithmetic == "float16"


@pytest.mark.parametrize("fault", ["relative", "lost", "result", "sum of two", "product"])
def test_an_error_that_is_left_out_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above finds a model that lacks a part."""
    name, kinds = ("bfloat16", (residual, planted)) if fault == "result" else ("float32", (absorbed, planted, residual))
    if fault == "relative":
        monkeypatch.setattr(RuntimeArithmetic, "relative", lambda self, terms: 2.0**-40)
    elif fault == "lost":
        kinds = (flushed,)
        monkeypatch.setattr(RuntimeArithmetic, "lost", lambda *_: 0.0)
    elif fault == "result":
        monkeypatch.setattr(rounded._Rounding, "result", lambda self, source: source)
    else:
        kinds, left_out = ((compared,), Sum) if fault == "sum of two" else ((multiplied,), Product)
        whole = rounded._Rounding.rounded
        monkeypatch.setattr(
            rounded._Rounding,
            "rounded",
            lambda self, op, *rest: self.add(op) if isinstance(op, left_out) else whole(self, op, *rest),
        )
    rng = np.random.default_rng(1)
    for case in range(60):
        data = kinds[case % len(kinds)](rng)
        low, high = box_of(data, rng)
        outputs = runs(data, low, high, name, rng, 40)
        for sign, reached in ((1, outputs.max()), (-1, outputs.min())):
            # Some files are refused, since float32 leaves nothing of what they compute.
            with contextlib.suppress(InputError):
                if asked(data, low, high, sign, float(reached), name, "crown").verdict is Verdict.UNSAT:
                    return
    pytest.fail("no wrong proof was found")


def test_real_arithmetic_proves_what_no_runtime_computes() -> None:
    """The questions above are hard: of real numbers the same methods prove what evaluations contradict."""
    rng, contradicted = np.random.default_rng(5), 0
    for _ in range(12):
        data = absorbed(rng)
        low, high = box_of(data, rng)
        outputs = runs(data, low, high, "float32", rng, 30)
        for sign, reached in ((1, outputs.max()), (-1, outputs.min())):
            contradicted += asked(data, low, high, sign, float(reached), "real", "crown").verdict is Verdict.UNSAT
    assert contradicted >= 6


def test_what_onnxruntime_computes_is_sat_though_real_arithmetic_forbids_it() -> None:
    nodes = [helper.make_node("Add", ["x", "c"], ["h"]), helper.make_node("Sub", ["h", "c"], ["y"])]
    data = written(nodes, 1, c=[2.0**30])
    low, high = np.float32([0.45]), np.float32([0.55])
    prop = beyond(low, high, -1, 0.2)
    real, single = (verify_properties(data, prop, "auto", 10.0, arithmetic=name)[0] for name in ("real", "float32"))
    assert real.verdict is Verdict.UNSAT
    assert single.verdict is Verdict.SAT and single.arithmetic == "float32" and single.outputs == (0.0,)


def test_where_orders_disagree_the_answer_says_so() -> None:
    """One sum of three terms: 2³⁰ + x − 2³⁰ is 0 in one order and x in another."""
    nodes = [helper.make_node("Sum", ["x", "c", "m"], ["y"])]
    data = written(nodes, 1, c=[2.0**30], m=[-(2.0**30)])
    low, high = np.float32([0.45]), np.float32([0.55])
    for sign, threshold in ((1, 0.4), (-1, 0.2)):
        prop = beyond(low, high, sign, threshold)
        assert verify_properties(data, prop, "bab", 0.5, arithmetic="float32")[0].verdict is not Verdict.UNSAT


def test_overflow_is_not_proved_away() -> None:
    nodes = [helper.make_node("Mul", ["x", "c"], ["h"]), helper.make_node("Mul", ["h", "c"], ["y"])]
    data = written(nodes, 1, c=[2.0**70])
    prop = beyond(np.float32([1.0]), np.float32([2.0]), -1, 0.0)
    assert verify_properties(data, prop, "crown", 5.0)[0].verdict is Verdict.UNSAT
    result = verify_properties(data, prop, "crown", 5.0, arithmetic="float32")[0]
    assert result.verdict is Verdict.UNKNOWN and "overflow" in result.detail


def test_a_method_that_does_not_account_for_rounding_proves_nothing() -> None:
    data = planted(np.random.default_rng(1))
    prop = beyond(np.zeros(3, np.float32), np.ones(3, np.float32), 1, 1e12)
    result = verify_properties(data, prop, "auto_lirpa-ibp", 60.0, arithmetic="float32")[0]
    assert result.trust is not Trust.FLOAT and result.verdict is Verdict.UNKNOWN


@pytest.mark.parametrize("op", ["LogSoftmax", "Softplus"])
def test_operators_whose_rounding_is_not_modelled_are_refused_by_name(op: str) -> None:
    data = written([helper.make_node(op, ["x"], ["y"])], 3)
    with pytest.raises(Exception, match=rf"\({op}\).*not modelled"):
        verify_properties(data, beyond(np.zeros(3), np.ones(3), 1, 2.0), "crown", arithmetic="float32")


@pytest.mark.parametrize("arithmetic", ["float32", "float16"])
def test_a_gelu_network_is_what_it_computes(arithmetic: str) -> None:
    """A small network with GELU: nothing is proved that torch computes otherwise, and much that it does not."""
    import torch

    rng = np.random.default_rng(7)
    w, b, v = rng.normal(size=(6, 3)), rng.normal(size=6), rng.normal(size=(1, 6))
    gelu = helper.make_node("Gelu", ["h"], ["r"])
    data = written([gemm("x", "h", "w", "b"), gelu, gemm("r", "y", "v", "d")], 3, w=w, b=b, v=v, d=[0.5])
    low = rng.normal(size=3).astype(np.float32)
    narrow = torch.float16 if arithmetic == "float16" else torch.float32
    numbers = [torch.from_numpy(np.asarray(each, np.float32)).to(narrow).float() for each in (low, w, b, v, 0.5)]
    x, w, b, v, d = numbers
    hidden = torch.nn.functional.gelu((w @ x + b).to(narrow).float()).to(narrow).float()
    reached = float((v @ hidden + d).to(narrow))
    for sign in (1, -1):
        assert asked(data, low, low, sign, reached, arithmetic, "crown").verdict is not Verdict.UNSAT
        away = reached + sign * (0.1 if arithmetic == "float16" else 1e-3)
        assert asked(data, low, low, sign, away, arithmetic, "crown").verdict is Verdict.UNSAT


def test_float16_overflows_where_float32_does_not() -> None:
    data = written([helper.make_node("Mul", ["x", "c"], ["y"])], 1, c=[300.0])
    prop = beyond(np.float32([100]), np.float32([200]), -1, 0.0)
    assert verify_properties(data, prop, "crown", 5.0, arithmetic="float32")[0].verdict is Verdict.UNSAT
    result = verify_properties(data, prop, "crown", 5.0, arithmetic="float16")[0]
    assert result.verdict is Verdict.UNKNOWN and "overflow" in result.detail


def test_a_path_from_input_to_output_without_rounding_is_refused() -> None:
    data = written([helper.make_node("Relu", ["x"], ["y"])], 3)
    with pytest.raises(Exception, match="an output is a copy of an input"):
        as_executed(read_onnx(data), "float32")


def test_smooth_functions_are_off_by_less_than_is_granted() -> None:
    """onnxruntime's and torch's, at a million points: the granted error is a statement about runtimes."""
    import torch

    x = np.concatenate([np.linspace(-30, 30, 500_001), np.logspace(-30, 2, 100_001), -np.logspace(-30, 2, 100_001)])
    x = x.astype(np.float32)
    wide, x64, one = x.astype(np.longdouble), x.astype(np.float64), np.ones(1)
    # What each is, and what its error is a part of.
    exact = {
        "Sigmoid": (1 / (1 + np.exp(-wide)), one, torch.sigmoid),
        "Tanh": (np.tanh(wide), one, torch.tanh),
        "Erf": (special.erf(x.astype(np.float64)), one, torch.erf),
        "Gelu": (wide / 2 * special.erfc(-x / np.sqrt(2.0)), np.abs(x), torch.nn.functional.gelu),
        "Gelu tanh": (
            x64 * special.expit(np.sqrt(8 / math.pi) * (x64 + 0.044715 * x64**3)),
            np.abs(x),
            lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        ),
        "Exp": (np.exp(wide), np.exp(wide), torch.exp),
    }
    for named, (value, size, function) in exact.items():
        op, *approximate = named.split()
        attributes = {"approximate": approximate[0]} if approximate else {}
        session = onnxruntime.InferenceSession(written([helper.make_node(op, ["x"], ["y"], **attributes)], x.size))
        for found in (session.run(None, {"x": x[None]})[0][0], function(torch.from_numpy(x)).numpy()):
            with np.errstate(over="ignore", invalid="ignore"):
                off = np.abs(found - value) <= ELEMENTARY / 8 * size + 2.0**-125
            assert (off | (value > 2.0**60)).all(), named


@pytest.mark.parametrize("length", [2, 3, 10, 1000])
def test_a_softmax_is_off_by_less_than_is_granted(length: int) -> None:
    import torch

    rng = np.random.default_rng(length)
    x = (rng.normal(size=(400, length)) * 10 ** rng.uniform(-3, 1.5, (400, 1))).astype(np.float32)
    wide = np.exp(x.astype(np.longdouble) - x.max(1, keepdims=True))
    value = wide / wide.sum(1, keepdims=True)
    graph = helper.make_graph(
        [helper.make_node("Softmax", ["x"], ["y"])],
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, list(x.shape))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, list(x.shape))],
    )
    data = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9).SerializeToString()
    for found in (
        onnxruntime.InferenceSession(data).run(None, {"x": x})[0],
        torch.softmax(torch.from_numpy(x), 1).numpy(),
    ):
        assert (np.abs(found - value) <= ELEMENTARY / 8 + value * length * 2.0**-24).all()


@pytest.mark.parametrize("last", ["Softmax", "Exp", "Gelu"])
def test_a_network_with_a_smooth_end_is_what_it_computes(last: str) -> None:
    """Nothing is proved that onnxruntime computes otherwise, and what is a little beyond is."""
    rng = np.random.default_rng(3)
    attributes = {"approximate": "tanh"} if last == "Gelu" else {}
    nodes = [gemm("x", "h", "w", "b"), helper.make_node(last, ["h"], ["y"], **attributes)]
    data = written(nodes, 3, w=rng.normal(size=(3, 3)), b=rng.normal(size=3))
    session = onnxruntime.InferenceSession(data)
    for _ in range(3):
        x = rng.normal(size=3).astype(np.float32)
        reached = float(session.run(None, {"x": x[None]})[0][0, 0])
        for sign in (1, -1):
            assert asked(data, x, x, sign, reached, "float32", "crown").verdict is not Verdict.UNSAT
            beside = asked(data, x, x, sign, reached + sign * 1e-4 * max(1, abs(reached)), "float32", "crown")
            assert beside.verdict is Verdict.UNSAT


def test_reason_of_a_refusal_is_the_files(tmp_path) -> None:
    """``certify --arithmetic`` names the file and the node."""
    from verifiable_relu.certify import main

    path = tmp_path / "net.onnx"
    path.write_bytes(written([helper.make_node("LogSoftmax", ["x"], ["y"], name="last")], 2))
    spec = tmp_path / "p.vnnlib"
    spec.write_text(
        "(declare-const X_0 Real)(declare-const X_1 Real)(declare-const Y_0 Real)(declare-const Y_1 Real)"
        "(assert (<= X_0 1))(assert (>= X_0 0))(assert (<= X_1 1))(assert (>= X_1 0))(assert (>= Y_0 2))"
    )
    assert main(["--spec", str(spec), "--net", str(path), "--arithmetic", "float32"]) == 2
