"""Certificates about quantised files: the checker's own reading holds exact values, and forgeries fail."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import TensorProto

from tests.support.asking import claims
from tests.support.certificates import Case, checked, recorded, records, written
from tests.support.draws import draws
from tests.support.solver_cases import row
from tests.unit.test_quantised import Evaluator, Graph, u8
from verifiable_relu.bounds import Bounds, interval_bounds
from verifiable_relu.check import BadInput, Refused
from verifiable_relu.check.arithmetic import ARITHMETICS
from verifiable_relu.check.curves import ROUNDED
from verifiable_relu.check.graph import ActivationNode, SmoothNode
from verifiable_relu.check.lines import CheckedRelaxation
from verifiable_relu.check.model import read_model
from verifiable_relu.network import deployed, read_onnx
from verifiable_relu.spec.property import Box, Property, Query
from verifiable_relu.spec.specfile import vnnlib_text
from verifiable_relu.trust.certificate_file import write_unsat
from verifiable_relu.verifiers.base import Verdict
from verifiable_relu.verifiers.batch import Verifier
from verifiable_relu.verifiers.incomplete import AlphaCrown, Crown
from verifiable_relu.verifiers.split import InputSplit


def _dense(g: Graph) -> str:
    s, t = g.scale(), g.scale(5)
    x = g.both("x", s, u8(128))
    w = g("DequantizeLinear", g.whole(np.int8, 6, 5), t, g.whole(np.int8, 5, most=3), axis=1)
    bias = g("DequantizeLinear", g.whole(np.int32, 5, most=1000), s * t, axis=0)
    h = g.both(g("Relu", g("Add", g("MatMul", x, w), bias)), g.scale(about=0.1), u8(0))
    w = g("DequantizeLinear", g.whole(np.int8, 5, 3), g.scale())
    return g.both(g("MatMul", h, w), g.scale(about=0.1), np.array(-7, np.int8))


def _folded(g: Graph) -> str:
    """The saturation of the first layer is its ReLU."""
    x = g.both("x", np.asarray(0.0625, np.float32), np.array(-4, np.int8))
    w = g("DequantizeLinear", g.whole(np.int8, 6, 5), g.scale())
    h = g.both(g("MatMul", x, w), g.scale(about=0.1), np.array(-128, np.int8))
    return g("MatMul", h, g("DequantizeLinear", g.whole(np.int8, 5, 3), g.scale()))


def _images(g: Graph) -> str:
    x = g.both("x", g.scale(2), g.whole(np.int8, 2, most=9), axis=1)
    w = g("DequantizeLinear", g.whole(np.int8, 3, 2, 2, 2), g.scale(3), np.zeros(3, np.int8), axis=0)
    bias = g("DequantizeLinear", g.whole(np.int32, 3, most=999), g.scale(3, about=1e-3), axis=0)
    h = g("QuantizeLinear", g("Conv", x, w, bias, pads=[0, 1, 0, 1]), g.scale(about=0.05), u8(100))
    pooled = g("MaxPool", h, kernel_shape=[2, 2], pads=[0, 0, 1, 1])
    return g("DequantizeLinear", g("Flatten", g("Transpose", pooled, perm=[0, 2, 3, 1])), g.scale(), u8(100))


def _wide(g: Graph) -> str:
    x = g.both("x", g.scale(about=1e-4), np.array(30_000, np.uint16))
    w = g("DequantizeLinear", g.whole(np.int16, 6, 4, most=30_000), g.scale(about=1e-4), np.array(5, np.int16))
    return g.both(g("MatMul", x, w), g.scale(about=1e-3), np.array(-100, np.int16))


CASES = {"dense": (13, _dense), "folded": (10, _folded), "images": (13, _images), "16 bits": (21, _wide)}
SHAPES = {"images": (1, 2, 4, 4)}


@cache
def of(name: str, seed: int = 0) -> bytes:
    opset, make = CASES[name]
    g = Graph(opset, sum(map(ord, name)) + 1000 * seed)
    return g.file(make(g), SHAPES.get(name, (1, 6)))


def values(name: str, data: bytes, points: np.ndarray) -> list[list[Fraction]]:
    evaluate = Evaluator(data)
    return [list(evaluate(x.reshape(SHAPES.get(name, (1, 6))))) for x in points]


def drawn(name: str, seed: int, count: int, wide: float = 0.3) -> np.ndarray:
    """Points around a point; some where numbers saturate, and some on the boundary of two steps."""
    rng, size = np.random.default_rng(seed), int(np.prod(SHAPES.get(name, (1, 6))))
    points = rng.normal(size=size) * rng.choice([0.5, 5]) + wide * rng.uniform(-1, 1, (count, size))
    points[::3] = np.round(points[::3] * 32) / 32
    return points.astype(np.float32)


def enclosed(
    data: bytes, low: np.ndarray, high: np.ndarray, arithmetic: str | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The checker's bounds of all outputs over a box, by intervals alone."""
    graph = read_model(data, None if arithmetic is None else ARITHMETICS[arithmetic])
    found = CheckedRelaxation(graph, low.astype(float), high.astype(float))
    for number in found.graph.activations:
        node = found.graph.nodes[number]
        assert isinstance(node, ActivationNode | SmoothNode)
        found.claim(number, *found.ends(node.source))
    return found.ends(found.graph.output)


@pytest.mark.parametrize("name", CASES)
def test_exact_values_are_within_the_checkers_bounds(name: str) -> None:
    for seed in range(draws(4)):
        data, points = of(name, seed), drawn(name, seed, 9)
        found = values(name, data, points)
        low, high = enclosed(data, points.min(0), points.max(0))
        for x, y in zip(points, found, strict=True):
            bottom, top = enclosed(data, x, x)
            assert all(Fraction(a) <= v <= Fraction(b) for a, v, b in zip(low, y, high, strict=True))
            assert all(Fraction(a) <= v <= Fraction(b) for a, v, b in zip(bottom, y, top, strict=True))


@cache
def proved(folder: Path, name: str, method: str = "crown") -> tuple[Case, Fraction]:
    """A property that a method proves, and the least sum of the outputs that points have."""
    methods: dict[str, Verifier] = {
        "crown": Crown(record=True), "alpha-crown": AlphaCrown(record=True), "split": InputSplit(batch=4, record=True)
    }  # fmt: skip
    data, points = of(name), drawn(name, 1, 40)
    found = values(name, data, points)
    least, every = min(sum(y, Fraction(0)) for y in found), dict.fromkeys(range(len(found[0])), 1.0)
    box = Box(points.min(0).astype(float), points.max(0).astype(float))
    for gap in (Fraction(1, 4), Fraction(1), Fraction(4), Fraction(64)):
        prop = Property(box, ((row(every, Fraction(round(float(least - gap) * 64), 64)),),))
        (outcome,) = claims(methods[method], [Query(read_onnx(data), prop)], 2.0)
        if outcome.verdict is Verdict.UNSAT:
            assert outcome.proof is not None
            return recorded(folder, data, prop, outcome.proof), least
    raise AssertionError("no property was proved")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quantised")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("method", ["crown", "alpha-crown", "split"])
def test_proofs_are_accepted(name: str, method: str, folder: Path) -> None:
    case, _ = proved(folder, name, method)
    assert checked(folder, case, written(case.records)).startswith("unsat: ")


@pytest.mark.parametrize("name", CASES)
def test_forged_proofs_are_refused(name: str, folder: Path) -> None:
    """A claim that a point contradicts, with any bounds moved inward at random; and one of another file."""
    case, least = proved(folder, name)
    text = case.prop.decode()
    (line,) = (line for line in text.splitlines() if "Y_0" in line and "assert" in line)
    bound = line.split()[-1].rstrip(")")
    # At the point with the least value, the forged property does not hold.
    prop = text.replace(line, line.replace(bound, str(float(least) + 1e-3))).encode()
    head = case.records[0] | {"property": hashlib.sha256(prop).hexdigest()}
    part = case.records[1]["part"]
    (asked,) = part["polytopes"]
    most = {"polytopes": [[asked[0] | {"most": str(float(least) + 1e-3)}]]}
    forged = [head, {"part": part | most}, *case.records[2:]]
    places = [i for i, record in enumerate(forged) if "activation" in record]
    rng = np.random.default_rng(2)
    for _ in range(draws(30)):
        changed = [dict(record) for record in forged]
        for i in rng.choice(places, min(len(places), int(rng.integers(0, 4))), replace=False):
            for side, sign in (("lower", 1), ("upper", -1)):
                exponent, *mantissas = changed[i][side]
                size = rng.choice([1, 0.5, 0.25]) / 2.0**exponent
                by = [sign * int(n * size) for n in rng.integers(0, 2, len(mantissas))]
                changed[i][side] = [exponent, *(m + b for m, b in zip(mantissas, by, strict=True))]
        with pytest.raises(Refused):
            checked(folder, case, written(changed), prop=prop)
    other = of(name, 7)
    moved = [case.records[0] | {"network": hashlib.sha256(other).hexdigest()}, *case.records[1:]]
    with pytest.raises(Refused, match="of another network"):
        checked(folder, case, written(case.records), network=other)
    with pytest.raises(Refused):
        checked(folder, case, written(moved), network=other)


def test_a_step_is_no_line(folder: Path) -> None:
    """Over a box within which a number is rounded up and down, it is not what is rounded."""
    g = Graph(13, 0)
    data = g.file(g.both("x", np.asarray(1.0, np.float32), np.array(0, np.int8)), (1, 1))
    for low, high, reached in ((0.25, 0.75, (0, 1)), (0.5, 0.5, (0, 1)), (1.5, 1.5, (1, 2)), (200, 300, (127, 127))):
        bottom, top = enclosed(data, np.array([low]), np.array([high]))
        assert bottom[0] == pytest.approx(reached[0], abs=1e-9) and top[0] == pytest.approx(reached[1], abs=1e-9)
        assert bottom[0] <= reached[0] and top[0] >= reached[1]


def test_what_lines_leave_of_rounding_is_within_the_checkers_bounds() -> None:
    rng = np.random.default_rng(3)
    for _ in range(draws(300)):
        low, high = np.sort(np.round(rng.normal(size=2) * rng.choice([0.5, 2, 20]) * 8) / rng.choice([8, 7.9]))
        t = np.array([rng.choice([0, 1, rng.random(), rng.normal()])])
        halves = np.arange(np.floor(low), np.ceil(high)) + 0.5
        z = np.clip(
            np.concatenate([[low, high], low + rng.random(200) * (high - low), halves, halves + 1e-9]), low, high
        )
        rest = np.rint(z) - t * z
        least, most = (bound(np.array([low]), np.array([high]), t) for bound in (ROUNDED.least, ROUNDED.most))
        assert (least <= rest + 1e-13).all() and (rest - 1e-13 <= most).all()
        assert most - least <= np.abs(1 - t) * (high - low) + 1 + 1e-9


def _bytes_added(g: Graph) -> str:
    x = g("QuantizeLinear", "x", g.scale(), u8(0))
    return g("DequantizeLinear", g("Add", x, x), g.scale(), u8(0))


def _blocks(g: Graph) -> str:
    x = g("QuantizeLinear", "x", g.scale(1, 2), axis=1, block_size=3, output_dtype=TensorProto.INT8)
    return g("DequantizeLinear", x, g.scale(1, 2), axis=1, block_size=3)


def _other_zero(g: Graph) -> str:
    return g("DequantizeLinear", g("QuantizeLinear", "x", g.scale(), u8(3)), g.scale(), np.array(3, np.int8))


def _negative(g: Graph) -> str:
    return g.both("x", np.asarray(-0.5, np.float32), u8(3))


def _long(g: Graph) -> str:
    return g("Add", "x", g("DequantizeLinear", np.array([2**31 - 1] * 6, np.int32), g.scale()))


@pytest.mark.parametrize("make", [_bytes_added, _blocks, _other_zero, _negative, _long])
def test_what_is_not_known_is_refused(make: Callable[[Graph], str]) -> None:
    g = Graph(21, 3)
    data = g.file(make(g), (1, 6))
    with pytest.raises(BadInput):
        read_model(data)


def _ran(data: bytes, points: np.ndarray, shape: tuple[int, ...] = (1, -1)) -> list[np.ndarray]:
    """What onnxruntime computes, with its optimisations and without."""
    found = []
    for level in (
        onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
        onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
    ):
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = level
        options.add_session_config_entry("session.x64quantprecision", "1")
        session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        found.append(np.stack([session.run(None, {"x": point.reshape(shape)})[0][0] for point in points]))
    return found


def test_both_neighbours_of_a_quotient_that_float32_rounds_are_within_the_bounds() -> None:
    """Numbers whose quotient float32 rounds to a half, of which real arithmetic takes another neighbour."""
    g = Graph(13, 0)
    data = g.file(g.both("x", np.asarray(0.1, np.float32), np.array(3, np.int8)), (1, 1))
    halves = ((np.arange(-100, 100) + 0.5).astype(np.float32) * np.float32(0.1))[:, None]
    points = np.concatenate([halves, np.nextafter(halves, np.float32(9e9)), np.nextafter(halves, np.float32(-9e9))])
    exact, evaluate, differ = [], Evaluator(data), 0
    for x in points:
        (value,) = evaluate(x.reshape(1, 1))
        exact.append(float(value))
    for x, real, *ran in zip(points, exact, *(found[:, 0] for found in _ran(data, points)), strict=True):
        bottom, top = enclosed(data, x, x, "float32")
        assert bottom[0] <= real <= top[0] and all(bottom[0] <= y <= top[0] for y in ran)
        low, high = enclosed(data, x, x)
        differ += not all(low[0] - 1e-6 <= y <= high[0] + 1e-6 for y in ran)
    assert differ > 5


def test_a_number_that_may_be_taken_for_zero_may_be_quantised_so() -> None:
    """Where the scale is as small as numbers that some processors take for zero."""
    g = Graph(13, 0)
    scale = np.asarray(2.0**-126, np.float32)
    data = g.file(g.both("x", scale, np.array(0, np.int8)), (1, 1))
    x = np.array([0.9 * 2.0**-126], np.float32)
    bottom, _ = enclosed(data, x, x, "float32")
    at = torch.tensor(x, dtype=torch.float64)[None]
    found = interval_bounds(deployed(read_onnx(data), "float32").to(torch.float64), Bounds(at, at))
    assert bottom[0] <= 0 and found[-1].lower.item() <= 0


@pytest.mark.parametrize("name", CASES)
def test_proofs_in_float32_are_accepted(name: str, folder: Path) -> None:
    data, points = of(name), drawn(name, 1, 30, 0.1)
    low, high = points.min(0), points.max(0)
    bottom, top = enclosed(data, low, high, "float32")
    for found in _ran(data, points, SHAPES.get(name, (1, 6))):
        flat = found.reshape(len(points), -1)
        assert (bottom <= flat).all() and (flat <= top).all()
    asked = float(2 * top[0] - bottom[0] + 1)
    prop = Property(Box(low.astype(float), high.astype(float)), ((row({0: -1.0}, Fraction(-round(asked * 64), 64)),),))
    (outcome,) = claims(Crown(record=True), [Query(deployed(read_onnx(data), "float32"), prop)], 5.0)
    assert outcome.verdict is Verdict.UNSAT and outcome.proof is not None
    more = "".join(f"(declare-const Y_{i} Real)\n" for i in range(1, len(top)))
    text = (more + vnnlib_text(prop)).encode()
    write_unsat(folder / "float32", data, text, [(0, outcome.proof)], arithmetic="float32")
    case = Case(data, text, records(folder / "float32"))
    assert "no evaluation of the network in float32" in checked(folder, case, written(case.records))
    forged = [case.records[0] | {"arithmetic": "bfloat16"}, *case.records[1:]]
    with pytest.raises(BadInput, match="not known in this arithmetic"):
        checked(folder, case, written(forged))
