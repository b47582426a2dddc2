"""The checker of certificates of version 6: no hint makes a false claim true, and good hints prove true ones."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

from tests.soundness import onnx_graphs
from tests.soundness.onnx_exact import exact
from tests.support.onnx_files import onnx_file
from verifiable_relu.check import bounds, proof
from verifiable_relu.check.__main__ import main
from verifiable_relu.check.bounds import State, root
from verifiable_relu.check.checker import enclosed
from verifiable_relu.check.errors import BadInput, Refused
from verifiable_relu.check.functions import Kinked
from verifiable_relu.check.graph import Activation, Graph
from verifiable_relu.check.model import read_model
from verifiable_relu.check.proof import Polytope, Proof, ProofLeaf, plane_constant, proven, tighten
from verifiable_relu.check.properties import Disjunct, RowCondition
from verifiable_relu.check.records import Records

Tree = list[dict[str, Any]]

KINDS = (
    "dense", "leaky", "abs", "prelu", "residual", "concat", "conv", "pool", "mean", "transposed", "norm", "sign",
    "round", "sigmoid", "tanh", "gelu", "spelled", "quantised",
)  # fmt: skip

PIECEWISE = KINDS[:11]


class Draft:
    """Nodes of a small ONNX file, with weights that are multiples of 1/8."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.stored: dict[str, Any] = {}
        self.last = "x"

    def numbers(self, *shape: int, most: int = 12) -> str:
        return self.constant(self.rng.integers(-most, most + 1, shape) / 8)

    def constant(self, value: Any) -> str:
        name = f"c{len(self.stored)}"
        self.stored[name] = value
        return name

    def add(self, operator: str, *inputs: str, **attributes: Any) -> str:
        self.last = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, list(inputs), [self.last], **attributes))
        return self.last

    def dense(self, x: str, inputs: int, outputs: int) -> str:
        if self.rng.random() < 0.5:
            return self.add("Gemm", x, self.numbers(outputs, inputs), self.numbers(outputs), transB=1)
        return self.add("Add", self.add("MatMul", x, self.numbers(inputs, outputs)), self.numbers(outputs))

    def activation(self, kind: str, x: str, size: int) -> str:
        match kind:
            case "leaky":
                return self.add("LeakyRelu", x, alpha=float(self.rng.choice([-0.5, 0.25, 2.0])))
            case "prelu":
                return self.add("PRelu", x, self.numbers(size))
            case "abs" | "sign" | "round" | "sigmoid" | "tanh" | "gelu":
                return self.add(kind.capitalize(), x)
            case "spelled":
                erf = self.add("Erf", self.add("Mul", x, self.constant(np.float32(1.25))))
                gate = self.add(
                    "Mul", self.add("Add", erf, self.constant(np.float32(1))), self.constant(np.float32(0.5))
                )
                return self.add("Mul", x, gate)
            case "quantised":
                steps = self.constant(np.float32(0.25)), self.constant(np.int64(3))
                whole = self.add("QuantizeLinear", x, *steps)
                return self.add("DequantizeLinear", whole, *steps)
        return self.add("Relu", x)

    def file(self, inputs: list[int], outputs: int) -> bytes:
        data = onnx_file(self.nodes, {"x": inputs}, {self.last: [1, outputs]}, 20, **self.stored)
        model = onnx.load_from_string(data)
        for tensor in model.graph.initializer:
            if tensor.data_type == onnx.TensorProto.INT64 and not tensor.dims:
                tensor.CopyFrom(onnx.numpy_helper.from_array(np.array(3, np.uint8), tensor.name))
        return bytes(model.SerializeToString())


@cache
def network(kind: str, seed: int, outputs: int = 2) -> bytes:
    """A network of few neurons."""
    d = Draft(seed)
    if kind in ("conv", "pool", "mean", "transposed"):
        x = d.add("Reshape", "x", d.constant(np.array([1, 1, 3, 2])))
        x = d.add("Conv", x, d.numbers(2, 1, 2, 2), d.numbers(2), pads=[0, 0, 1, 1])
        if kind == "pool":
            x = d.add("MaxPool", x, kernel_shape=[2, 2], pads=[1, 0, 0, 0])
        if kind == "mean":
            x = d.add("AveragePool", x, kernel_shape=[3, 1], pads=[1, 0, 0, 0])
        x = d.add("Relu", x)
        if kind == "transposed":
            x = d.add("Relu", d.add("ConvTranspose", x, d.numbers(2, 1, 2, 1), strides=[2, 1]))
        size = {"conv": 12, "pool": 8 - 2, "mean": 8, "transposed": 12}[kind]
        x = d.add("Flatten", x)
        d.dense(x, size if kind != "pool" else 6, outputs)
        return d.file([1, 6], outputs)
    h = d.activation(kind, d.dense("x", 2, 4), 4)
    g = d.activation(kind, d.dense(h, 4, 3), 3)
    if kind == "residual":
        g = d.activation(kind, d.add("Sub", d.dense(h, 4, 3), g), 3)
    if kind == "concat":
        d.add("Concat", g, h, axis=1)
        g = d.add("Slice", d.last, *(d.constant(np.array([n])) for n in (1, 7, 1, 2)))
    if kind == "norm":
        g = d.add(
            "BatchNormalization",
            g,
            *(d.constant(v) for v in ([0.5, -1.0, 3.0], [1.0, 0.0, 2.0], [0.25, 1.0, 0.0], [1.0, 2.0, 3.0])),
        )
        g = d.add("Relu", g)
    d.dense(g, 3, outputs)
    return d.file([1, 2], outputs)


@cache
def graph(kind: str, seed: int) -> Graph:
    return read_model(network(kind, seed))


@cache
def session(data: bytes) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])


def value(kind: str, data: bytes, point: list[Fraction]) -> list[Fraction]:
    """The outputs at a point, exactly, or to 2⁻¹⁶ where they are irrational."""
    if kind in PIECEWISE:
        model = onnx.load_from_string(data)
        x = np.array([point], object)
        return list(exact(model, {"x": x})[model.graph.output[0].name].ravel())
    # Sums of a few multiples of small powers of two are exact in float32.
    return [Fraction(float(y)) for y in run(data, point)]


def run(data: bytes, point: list[Fraction]) -> np.ndarray:
    return session(data).run(None, {"x": np.array([point], np.float32)})[0].ravel()


def short(values: Any, bits: int = 12) -> list[int]:
    """Numbers as [e, m₁, …]."""
    return [-bits, *(round(float(v) * 2**bits) for v in np.ravel(values))]


class Writer:
    """Hints, good ones and wild ones."""

    def __init__(self, seed: int, graph: Graph, low: np.ndarray, high: np.ndarray, rows: int) -> None:
        self.rng = random.Random(seed)
        self.wild = self.rng.random() < 0.5
        self.graph, self.low, self.high, self.rows = graph, low, high, rows
        self.places = [graph.nodes[number] for number in graph.activations]
        self.sizes = [graph.nodes[node.sources[0]].size for node in self.places]
        self.curved = [isinstance(node, Activation) for node in self.places]

    def some(self, size: int) -> list[int]:
        return sorted(self.rng.sample(range(size), self.rng.randint(0, min(3, size))))

    def hints(self, of: int, kinds: bool) -> list[list[Any]]:
        """Slopes, or multipliers, of some neurons."""
        found = []
        for a in range(of if self.wild else 0):
            if self.curved[a] and self.rng.random() < 0.6:
                j = self.some(self.sizes[a])
                numbers = short([self.rng.choice([0, 1, self.rng.gauss(0.5, 0.4), self.rng.gauss(0, 3)]) for _ in j])
                found.append([a, j, numbers, *([self.rng.choice(["both", "lower", "upper"])] if kinds else [])])
        return found

    def leaf(self, left: list[int], rows: int | None = None) -> dict[str, Any]:
        def mu() -> list[int]:
            return short([abs(self.rng.gauss(1, 0.5)) for _ in range(self.rows if rows is None else rows)])

        record: dict[str, Any] = {"close": [[p, mu()] for p in left]}
        if self.rng.random() < 0.3:
            record["slopes"] = self.hints(len(self.places), True)
        if self.rng.random() < 0.4:
            record["multipliers"] = [
                hint for hint in self.hints(len(self.places), False) if len(hint[1]) == len(set(hint[1]))
            ]
        return record

    def tree(self, left: list[int], depth: int, rows: int | None = None) -> Iterator[dict[str, Any]]:
        draw = self.rng.random
        for a in range(len(self.places)):
            if draw() < 0.85 or not self.wild:
                yield {"bound": a, **({"slopes": self.hints(a, True)} if draw() < 0.2 else {})}
            if draw() < 0.1 and isinstance(getattr(self.places[a], "function", None), Kinked):
                yield from self.plane(a)
        if draw() < 0.2:
            yield {"slopes": self.hints(len(self.places), True)}
        if draw() < 0.25 and depth:
            yield from self.claim(depth)
        if not depth or draw() < 0.1:
            yield self.leaf(left, rows)
        elif len(left) > 1 and draw() < 0.3:
            yield {"only": left[:1]}
            yield from self.tree(left[:1], depth - 1, rows)
            yield from self.tree(left[1:], depth - 1, rows)
        elif draw() < 0.5:
            i = self.rng.randrange(len(self.low))
            _, m = short(self.rng.uniform(self.low[i], self.high[i]))
            yield {"halve": [i, m, -12]}
            yield from self.tree(left, depth - 1, rows)
            yield from self.tree(left, depth - 1, rows)
        else:
            a = self.rng.randrange(len(self.places))
            point = short(self.rng.choice([0, 0, self.rng.gauss(0, 1)]))[1]
            yield {"split": [a, self.rng.randrange(self.sizes[a]), point, -12]}
            yield from self.tree(left, depth - 1, rows)
            yield from self.tree(left, depth - 1, rows)

    def claim(self, depth: int) -> Iterator[dict[str, Any]]:
        a = self.rng.randrange(len(self.places))
        v = round(-abs(self.rng.gauss(0, 6)) * 2**12)
        yield {"tighten": [a, self.rng.randrange(self.sizes[a]), self.rng.choice([1, -1]), v, -12]}
        yield from self.tree([0], 1 if depth > 1 else 0, 1)

    def plane(self, a: int) -> Iterator[dict[str, Any]]:
        terms = [[-1, (j := self.some(len(self.low))), short([self.rng.gauss(0, 1) for _ in j])]]
        if a and self.curved[0]:
            j = self.some(self.graph.nodes[self.graph.activations[0]].size)
            terms.append([0, j, short([self.rng.gauss(0, 1) for _ in j])])
        bends = short([abs(self.rng.gauss(0, 1)), abs(self.rng.gauss(0, 1))])
        yield {"plane": [a, self.rng.randrange(self.sizes[a])], "terms": terms, "bends": bends}


def outcome(graph: Graph, disjuncts: list[Disjunct], tree: Tree) -> str:
    """Why a tree for the first part is refused, or nothing."""
    polytopes = [
        [{"y": [[i, str(c)] for i, c in row.y], "most": str(row.most)} for row in disjunct.rows]
        for disjunct in disjuncts
    ]
    records = [{"part": {"box": 0, "polytopes": polytopes}}, *tree]
    lines = iter([*(json.dumps(each).encode() + b"\n" for each in records), b'{"end": %d}\n' % len(records)])
    try:
        with np.errstate(all="ignore"):
            Proof(graph, disjuncts, Records(lambda _: next(lines, b""))).check()
    except Refused as error:
        return str(error)
    return ""


def boxed(center: list[Fraction], radius: Fraction, rows: list[list[RowCondition]]) -> list[Disjunct]:
    low, high = [c - radius for c in center], [c + radius for c in center]
    return [Disjunct(low, high, each, set()) for each in rows]


@pytest.mark.parametrize("kind", KINDS)
def test_no_hints_exclude_a_point_that_is_reached(kind: str) -> None:
    refused = 0
    count = 25 if kind in PIECEWISE else 5
    for seed in range(count):
        rng = random.Random(f"{kind}{seed}")
        data, known = network(kind, seed % 6), graph(kind, seed % 6)
        n = known.nodes[0].size
        center = [Fraction(rng.randint(-16, 16), 16) for _ in range(n)]
        radius = Fraction(rng.choice([0, 1, 4, 32]), 32)
        weight = rng.choice([(1, 0), (-1, 2)])
        # Of many points, the one at which a row is least.
        points = [[c + radius * Fraction(rng.randint(-8, 8), 8) for c in center] for _ in range(25)]
        points += [[c + radius * rng.choice([-1, 1]) for c in center] for _ in range(15)]
        point = min(points, key=lambda x: np.dot(weight, run(data, x)))
        y = value(kind, data, point)
        if kind in ("norm", "sigmoid", "tanh", "gelu", "spelled"):
            y = [v + Fraction(1, 2**12) * sign for v, sign in zip(y, (1, 2), strict=True)]
        # Both rows hold at the point, one or both of them barely.
        rows = [
            RowCondition(((0, Fraction(1)),), y[0] + rng.choice([0, 0, Fraction(1, 2**20)])),
            RowCondition(((0, Fraction(-1)), (1, Fraction(2))), 2 * y[1] - y[0] + rng.choice([0, Fraction(1, 64)])),
        ]
        chosen = rng.choice([rows, *[rows[:1] if weight[0] > 0 else rows[1:]] * 3])
        disjuncts = boxed(center, radius, [chosen])
        ends = (np.array([float(c) for c in side]) for side in (disjuncts[0].lower, disjuncts[0].upper))
        writer = Writer(seed, known, *ends, len(chosen))
        tree = list(writer.tree([0], rng.randint(0, 4)))
        said = outcome(known, disjuncts, tree)
        assert said, (kind, seed, tree)
        refused += "proven" in said
    assert refused == count


def ends(disjunct: Disjunct) -> tuple[np.ndarray, np.ndarray]:
    low, high = (np.array([float(value) for value in side]) for side in (disjunct.lower, disjunct.upper))
    return low, high


@pytest.mark.parametrize("kind", PIECEWISE)
def test_rounding_is_within_the_error_that_is_charged(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random hints: the bound, less its error, is below that in numbers of more digits."""
    for seed in range(12):
        known = graph(kind, seed % 6)
        rng = np.random.default_rng(seed)
        center = rng.integers(-16, 17, known.nodes[0].size) / 16
        state = root(known, center - rng.choice([0.0, 0.1, 1.0]), center + 0.125)
        writer = Writer(seed, known, center, center, 1)
        for number in known.activations:
            tighten(state, number)
            node: Any = known.nodes[number]
            if isinstance(node, Activation):
                given = node.function.slopes(*state.ends[node.source])
                other = rng.normal(0.5, 0.5, (2, 1, node.size))
                state.slopes[number] = tuple(np.where(rng.random((1, node.size)) < 0.5, other, np.stack(given)))
        extra = {
            known.activations[a]: (np.array(j, np.int64), np.array(numbers[1:]) / 2**12)
            for a, j, numbers in writer.hints(len(writer.places), False)
        }
        goal = Polytope(known.output, [RowCondition(((0, Fraction(1, 3)), (1, Fraction(-7, 5))), Fraction(1, 7))])
        # Their products with 3/4 are not rounded.
        goal.terms = [(at, v.astype(np.float32).astype(float), float(np.float32(most))) for at, v, most in goal.terms]
        (low,), _ = proven(state, [ProofLeaf(state, goal, np.array([0.75]), "", extra=extra)])
        wide = State(known, {n: tuple(end.astype(np.longdouble) for end in e) for n, e in state.ends.items()})  # type: ignore
        wide.slopes = state.slopes
        exact_extra = {n: (j, w.astype(np.longdouble)) for n, (j, w) in extra.items()}
        with monkeypatch.context() as patch:
            for module, name in itertools.product((bounds, proof), ("gamma", "TINY", "LOST")):
                patch.setattr(module, name, (lambda _: 0.0) if name == "gamma" else 0.0, raising=False)
            (exactly,), _ = proven(wide, [ProofLeaf(wide, goal, np.array([0.75]), "", extra=exact_extra)])
        assert low <= exactly <= low + 1e-11


@pytest.mark.parametrize("kind", KINDS)
def test_boxes_prove_almost_the_least_value(kind: str) -> None:
    """A cover by small boxes: its tightest threshold is below the least value of a grid, and close to it."""
    if kind in ("sign", "round", "quantised"):
        pytest.skip("steps are no narrower in small boxes")
    data, known = network(kind, 1), graph(kind, 1)
    n = known.nodes[0].size
    center = [Fraction(1, 4)] * n
    radius = Fraction(1, 64 if n > 2 else 8)
    steps = 3 if n > 2 else 9
    grid = itertools.product(
        *[[c + radius * Fraction(2 * i, steps - 1) - radius for i in range(steps)] for c in center]
    )
    least = value(kind, data, min(map(list, grid), key=lambda point: run(data, point)[0]))[0]

    def cover(low: list[float], high: list[float], depth: int) -> Iterator[dict[str, Any]]:
        i = depth % n
        middle = (low[i] + high[i]) / 2
        if depth == (4 if n > 2 else 8 if kind in PIECEWISE else 6):
            yield {"close": [[0]]}
            return
        yield {"halve": [i, round(middle * 2**20), -20]}
        yield from cover(low, [middle if j == i else v for j, v in enumerate(high)], depth + 1)
        yield from cover([middle if j == i else v for j, v in enumerate(low)], high, depth + 1)

    disjunct = boxed(center, radius, [[]])[0]
    tree = list(cover(*map(list, ends(disjunct)), 0))
    tight, loose = (
        boxed(center, radius, [[RowCondition(((0, Fraction(1)),), threshold)]])
        for threshold in (least + Fraction(1, 2**12), least - Fraction(1, 5) * (1 + abs(least)))
    )
    assert "proven" in outcome(known, tight, tree)
    assert not outcome(known, loose, tree)


ABSOLUTE = onnx_file(
    [
        helper.make_node("Gemm", ["x", "w"], ["z"]),
        helper.make_node("Relu", ["z"], ["r"]),
        helper.make_node("Gemm", ["r", "v", "b"], ["y"]),
    ],
    {"x": [1, 1]},
    {"y": [1, 1]},
    w=[[1.0, -1.0]],
    v=[[1.0], [1.0]],
    b=[0.5],
)


@pytest.mark.parametrize("seed", range(20))
def test_planes_are_above_the_neuron(seed: int) -> None:
    """A plane's constant is at least r − g·v at all points of a grid."""
    rng = np.random.default_rng(seed)
    known = graph("leaky", seed % 6)
    state = root(known, np.array([-0.5, -0.5]), np.array([0.5, 0.25]))
    first, second = known.activations[:2]
    tighten(state, second)
    source, neuron = known.nodes[second].sources[0], int(rng.integers(3))
    slope = float(known.nodes[second].function.slope[neuron])
    g, h, bends = rng.normal(0, 1, 2), rng.normal(0, 1, 4), tuple(np.abs(rng.normal(0, 0.5, 2)))
    constant = plane_constant(state, source, neuron, slope, {0: g, first: h}, bends)
    for x in itertools.product(np.linspace(-0.5, 0.5, 9), np.linspace(-0.5, 0.25, 9)):
        at = root(known, np.array(x), np.array(x)).ends
        values = (at[number][0][0] for number in (second, 0, first))
        r, v, earlier = next(values)[neuron], next(values), next(values)
        assert r <= g @ v + h @ earlier + constant + 1e-9


@pytest.mark.parametrize("seed", range(40))
def test_files_are_read_as_the_standard_defines_them(seed: int) -> None:
    """Values at a point, exactly or enclosed, of random files of all operators."""
    model = onnx_graphs.graph(seed).model
    try:
        known = read_model(model.SerializeToString())
    except BadInput:
        return
    shape = [d.dim_value or 1 for d in model.graph.input[0].type.tensor_type.shape.dim]
    rng = random.Random(seed)
    point = [Fraction(rng.randint(-16, 16), 8) for _ in range(int(np.prod(shape)))]
    entry = next(i.name for i in model.graph.input if i.name not in {t.name for t in model.graph.initializer})
    expected = exact(model, {entry: np.array(point, object).reshape(shape)})[model.graph.output[0].name].ravel()
    try:
        found = enclosed(known, point)
    except (BadInput, Refused):
        return
    for (low, high), y in zip(found, expected, strict=True):
        assert low - abs(y) / 10**12 <= y <= high + abs(y) / 10**12


def files(folder: Path, prop: str, tree: Tree, data: bytes = ABSOLUTE, **keys: Any) -> list[str]:
    """The arguments of the command that checks a tree, in files."""
    (folder / "n.onnx").write_bytes(data)
    (folder / "p.vnnlib").write_text(prop)
    digests = {"network": sha256(data).hexdigest(), "property": sha256(prop.encode()).hexdigest()}
    records = [{"certificate": 6, "claim": "unsat", **digests, "says": "", **keys}, *tree]
    lines = [json.dumps(each) for each in [*records, {"end": len(records)}]]
    (folder / "c.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return [str(folder / "c.jsonl"), "--net", str(folder / "n.onnx"), "--spec", str(folder / "p.vnnlib")]


PROPERTY = """(declare-const X_0 Real) (declare-const Y_0 Real)
(assert (>= X_0 -1)) (assert (<= X_0 1)) (assert (<= Y_0 {}))"""
CLAIM: Tree = [{"part": {"box": 0, "polytopes": [[{"y": [[0, "1"]], "most": "7/16"}]]}}, {"close": [[0]]}]


def test_the_command_says_in_a_line_what_it_finds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(change: Callable[[str], str] = str, most: str = "0.4375", **keys: Any) -> tuple[int, str]:
        arguments = files(tmp_path, PROPERTY.format(most), CLAIM, **keys)
        path = Path(arguments[0])
        path.write_text(change(path.read_text()))
        status = main(arguments)
        said = capsys.readouterr()
        assert (said.out + said.err).count("\n") == 1
        return status, said.out + said.err

    assert run() == (0, run()[1])
    assert run()[1].startswith("accepted: unsat: in real arithmetic on the stored weights the network maps no point")
    refused = {
        "nothing is said of disjunct 0": {"most": "0.5"},
        "version 5": {"certificate": 5},
        "another network": {"network": "0"},
        "is neither": {"claim": "maybe"},
        "arithmetic": {"arithmetic": "int8"},
        "hardness": {"family": ["1", "1"]},
    }
    for said, keys in refused.items():
        assert run(**keys)[0] == 1 and said in run(**keys)[1]
    broken: dict[str, Callable[[str], str]] = {
        "ends too early": lambda text: text[:-1],
        "come before the end": lambda text: text.replace('"end": 3', '"end": 2'),
        "no record": lambda text: text.replace("close", '"'),
        "follows the end": lambda text: text + "\n",
        "is the number of no polytope": lambda text: text.replace("[[0]]}", "[[1]]}"),
        "not one that is left": lambda text: text.replace("[[0]]}", "[[0], [0]]}"),
        "not of close": lambda text: text.replace('"close": [[0]]', '"close": [[0]], "x": 1'),
    }
    for said, change in broken.items():
        assert run(change)[0] == 1 and said in run(change)[1]
    beyond: dict[str, Callable[[str], str]] = {
        "nested too deeply": lambda text: text.replace("[[0]]", "[" * 9999 + "0" + "]" * 9999),
        "too many digits": lambda text: text.replace("[[0]]", "[[" + "1" * 5000 + "]]"),
        "too long": lambda text: text.replace("[[0]]", "[[0]" + " " * (1 << 25) + "]"),
        "too deep": lambda text: text.replace('{"close"', '{"halve": [0, 0, 0]}\n' * 1100 + '{"close"'),
    }
    for said, change in beyond.items():
        assert run(change)[0] == 2 and said in run(change)[1]
    assert main([str(tmp_path / "none"), "--net", "n", "--spec", "p"]) == 2


def test_points_are_evaluated(tmp_path: Path) -> None:
    for point, most, status in (("1/3", "0.84", 0), ("1/3", "0.83", 1), ("2", "0.84", 1), ("-1e-1", "0.6", 0)):
        assert main(files(tmp_path, PROPERTY.format(most), [{"point": [point]}], claim="sat")) == status


@pytest.mark.parametrize("given", [{"family": ["3/2"]}, {"arithmetic": "float32"}, {"arithmetic": "bfloat16"}])
def test_families_and_arithmetics_are_further_from_the_threshold(given: dict[str, Any], tmp_path: Path) -> None:
    """ReLU(x) + ReLU(−x) + 1/2 is 1/2 at 0; what runs, and λ-GELUs, may be a little less by what is known of each."""

    keys = dict(given)

    def accepted(most: str) -> bool:
        tree: Tree = [{"part": {"box": 0, "polytopes": [[{"y": [[0, "1"]], "most": most}]]}}, {"bound": 0}]
        tree += [{"halve": [0, 0, 0]}, *[{"bound": 0}, {"close": [[0]]}] * 2]
        return main(files(tmp_path, PROPERTY.format(most), tree, **keys)) == 0

    assert not accepted("0.5") and not accepted("0.49999999")
    assert accepted("0.05" if "family" in given else "0.45")
    keys.clear()
    assert accepted("0.49999999")


def test_two_networks_differ_by_little(tmp_path: Path) -> None:
    """|x| + 1/2 and the same with weights that differ by 1/16: bounded as pairs, not by each for itself."""
    other = onnx.load_from_string(ABSOLUTE)
    for tensor in other.graph.initializer:
        if tensor.name == "w":
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.array([[1.0625, -1.0]], np.float32), "w"))
    (tmp_path / "o.onnx").write_bytes(other.SerializeToString())
    text = PROPERTY.format("5").replace("(assert (<= Y_0 5))", "(declare-const Y_1 Real) (assert (<= (- Y_1 Y_0) {}))")
    for most, status in (("-0.25", 0), ("-0.0625", 1)):
        rows = [{"y": [[0, "-1"], [1, "1"]], "most": most}]
        # Activations: the first network's 0, the other's 1, the difference 2.
        tree: Tree = [{"part": {"box": 0, "polytopes": [rows]}}, *[{"bound": a} for a in range(3)], {"close": [[0]]}]
        pairs = {"other": sha256(other.SerializeToString()).hexdigest(), "pairs": [[0, 0]]}
        arguments = files(tmp_path, text.format(most), tree, **pairs)
        assert main([*arguments, "--other", str(tmp_path / "o.onnx")]) == status
