"""Computed whole numbers that say where something is: against onnxruntime, exact evaluation, bounds, every number."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import onnx.parser
import pytest
import torch

from tests.support import exact
from tests.support.asking import claims
from tests.support.solver_cases import row
from verifiable_relu.bounds import crown_relaxation
from verifiable_relu.bounds.tuning import Bounds
from verifiable_relu.errors import UnsupportedError
from verifiable_relu.network import Network, read_onnx
from verifiable_relu.network.source import replay
from verifiable_relu.spec.property import Box, Property, Query
from verifiable_relu.trust.replay import confirm
from verifiable_relu.verifiers.auto import Auto, recording
from verifiable_relu.verifiers.base import Verdict
from verifiable_relu.verifiers.split import InputSplit

BEGIN = """zero = Constant <value = int64[1] {0}> () one = Constant <value = int64[1] {1}> ()
    i = Slice(x, zero, one, zero) k = Cast <to = 7> (i)
    two = Constant <value = int64[1] {2}> () j = Slice(x, one, two, zero) m = Cast <to = 7> (j)
    four = Constant <value = int64[1] {4}> () rest = Slice(x, two, four, zero)
    low = Constant <value = int64 {0}> () single = Constant <value = int64 {1}> ()
    top = Constant <value = int64 {3}> () q = Clip(k, low, top)
    n = Clip(k, low, single) w = Clip(m, low, single)
    c = Constant <value = float[4, 2] {3.0, -1.0, 0.5, 2.0, -4.0, 1.5, 7.0, -2.5}> ()
"""
CASES = {
    "Gather of a constant": "g = Gather <axis = 0> (c, q) h = Squeeze(g, zero) y = Mul(h, rest)",
    "Gather of a computed tensor": "g = Gather <axis = 0> (rest, n) y = Mul(g, rest)",
    "Slice": """l = Add(k, one) s = Slice(c, k, l, zero) f = Shape(s) o = ConstantOfShape <value = float[1] {2.0}> (f)
        t = Concat <axis = 0> (o, c) e = ReduceSum(t, zero) h = Squeeze(e, zero) y = Mul(h, rest)""",
    "two numbers": """u = Unsqueeze(q, zero) v = Unsqueeze(w, zero) p = Concat <axis = 1> (u, v)
        d = Constant <value = float[1] {9.0}> () s = ScatterND(c, p, d) e = ReduceSum(s, zero)
        h = Squeeze(e, zero) y = Sub(h, rest)""",
}
LARGEST = {"Gather of a computed tensor": 1}


def network(body: str) -> Network:
    head = '<ir_version: 8, opset_import: ["": 13]> g (float[4] x) => (float[2] y)'
    return read_onnx(onnx.parser.parse_model(f"{head} {{ {BEGIN} {body} }}").SerializeToString())


NETWORKS: dict[str, Network] = {}


def of(name: str) -> Network:
    if name not in NETWORKS:
        NETWORKS[name] = network(CASES[name])
    return NETWORKS[name]


@pytest.mark.parametrize("name", CASES)
def test_values_and_bounds(name: str) -> None:
    net, rng, most = of(name), np.random.default_rng(0), LARGEST.get(name, 3)
    points = rng.normal(size=(20, 4)).astype(np.float32)
    points[:, 0], points[:, 1] = rng.uniform(0, most + 0.9, 20), rng.uniform(0, 1.9, 20)
    points[:10, :2] = np.floor(points[:10, :2])
    if name == "Slice":
        points[::5, 0] = rng.uniform(-9, 9, 4)
    found = []
    for x in points:
        y = exact.exact_outputs(net, [Fraction(float(v)) for v in x])
        assert np.allclose(replay(net, x), [float(v) for v in y], atol=1e-5)
        found.append(y)
    wide, rows = net.to(torch.float64), torch.cat([torch.eye(2), -torch.eye(2)]).double()
    for first, second in zip(points[:8], points[12:20], strict=True):
        ends = np.minimum(first, second), np.maximum(first, second)
        box = Bounds(*(torch.from_numpy(end).double().reshape(1, *net.input_shape) for end in ends))
        lower = crown_relaxation(wide, box).lower(len(net.nodes) - 1, rows, torch.zeros(4, dtype=torch.long))[0]
        for x, y in zip(points, found, strict=True):
            mixed = [Fraction(float(v)) for v in np.clip(x, *ends)]
            inside = y if (ends[0] <= x).all() and (x <= ends[1]).all() else exact.exact_outputs(net, mixed)
            assert bool((lower <= rows @ torch.tensor([float(v) for v in inside], dtype=torch.float64)).all())


@pytest.mark.parametrize("name", CASES)
def test_whole_values_have_whole_ends(name: str) -> None:
    """At points, in boxes, and in a batch of both: no value lies outside of ends that were moved inward."""
    net = of(name).to(torch.float64)
    lower = torch.tensor([[1.0, 0.0, 0.5, 0.75], [0.0, 0.0, -0.5, 0.5], [1.0, 1.0, 2.0, 1.0]], dtype=torch.float64)
    width = torch.tensor([[0.0], [1.0], [0.0]], dtype=torch.float64)
    found = crown_relaxation(net, Bounds(lower, lower + width), crown=False)
    found.advance(len(net.nodes) - 1)
    parts = torch.rand(200, 1, 4, generator=torch.Generator().manual_seed(0)).double()
    values = net.values((lower + parts * width).reshape(-1, *net.input_shape))
    for index in range(len(net.nodes)):
        box = found.nodes.values[index]
        own = values[index].reshape(200, *box.lower.shape)
        assert bool(((box.lower <= own + 1e-9) & (own - 1e-9 <= box.upper)).all())
        if index in net.whole:
            assert torch.equal(box.lower, box.lower.round()) and torch.equal(box.upper, box.upper.round())
            assert torch.equal(box.lower[::2], box.upper[::2])
    assert net.whole


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_splitting_decides_by_every_whole_number(name: str, whole: bool) -> None:
    """The ends are no whole numbers; where ``whole``, nothing else of the inputs varies."""
    net, most = of(name), LARGEST.get(name, 3)
    radius = 0.0 if whole else 0.01
    lower, upper = np.array([0.25, 0.0, 0.5, 0.75]), np.array([most + 0.5, 1.75, 0.5, 0.75])
    box = Box(lower - np.array([0, 0, radius, radius]), upper + np.array([0, 0, radius, radius]))
    every = [
        (i, j, 0.5 + a, 0.75 + b)
        for i in range(most + 1)
        for j in (0, 1)
        for a in {-radius, radius}
        for b in {-radius, radius}
    ]
    least = min(exact.exact_outputs(net, [Fraction(float(v)) for v in x])[0] for x in every)
    unsafe = lambda bound: Query(net, Property(box, ((row({0: 1}, bound),),)))  # noqa: E731
    for method in (InputSplit(), recording(InputSplit()), Auto()):
        (no,) = claims(method, [unsafe(least - Fraction(1, 100))], 20.0)
        assert no.verdict is Verdict.UNSAT, (method.name, no)
    (yes,) = claims(InputSplit(), [unsafe(least + Fraction(1, 100))], 20.0)
    assert (
        yes.verdict is Verdict.SAT
        and yes.witness is not None
        and confirm(unsafe(least + Fraction(1, 100)), yes.witness).confirmed
    )
    counted = sorted(int(v) for places in net.counted.values() for v in places)
    assert set(counted) <= {0, 1}


def test_an_input_that_matters_otherwise_is_split_anywhere() -> None:
    net = network("g = Gather <axis = 0> (c, q) h = Squeeze(g, zero) y = Add(h, i)")
    assert not {int(v) for places in net.counted.values() for v in places} & {0}


def test_a_shape_that_depends_on_a_computed_number_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="shape that depends"):
        network("l = Add(k, one) s = Slice(c, k, l, zero) t = Mul(s, rest) y = ReduceSum <keepdims = 0> (t, zero)")


@pytest.mark.parametrize("numbers", ["1.0, 1e30, 1.0, 2.0", "1e30, 1.0, 3e-20, -1e30", "0.1, 0.2, 1e8, 1e-9"])
def test_numbers_whose_differences_are_rounded_are_taken_exactly(numbers: str) -> None:
    """And a network may end in what a table says."""
    head = '<ir_version: 8, opset_import: ["": 13]> g (float[4] x) => (float[1] y)'
    body = f"d = Constant <value = float[4] {{{numbers}}}> () y = Gather <axis = 0> (d, q)"
    net = read_onnx(onnx.parser.parse_model(f"{head} {{ {BEGIN} {body} }}").SerializeToString())
    for place, number in enumerate(numbers.split(", ")):
        assert exact.exact_outputs(net, [Fraction(place), *[Fraction(0)] * 3]) == [Fraction(float(np.float32(number)))]


def test_a_result_without_elements_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="without elements"):
        network("u = Slice(rest, zero, k, zero) s = ReduceSum(u, zero) y = Mul(s, rest)")


def test_whole_numbers_that_float64_does_not_hold_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="float64 does not hold"):
        network(f"""d = Constant <value = int64[4] {{{2**60 + 1}, 5, 3, 1}}> () g = Gather <axis = 0> (d, q)
            p = Mul(g, m) f = Cast <to = 1> (p) y = Mul(f, rest)""")
