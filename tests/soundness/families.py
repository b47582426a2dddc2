"""Families of random networks with random scalars around their activations, asked about members that were evaluated.

An activation is ReLU, the operator Gelu, or GELU spelled out with Erf. Before it stand products, quotients, negatives,
sums and reshapes with constants at random, and after it more of them. The evaluator shares no code with the package: it
follows the same steps in floating point and knows, of each activation, the x before all scalars and their product c.
Its members have |c|·x·Φ(λ'·x), or the negative argument of it, with λ' ≥ λ, or ReLU (``docs/certificates.md``,
*Families*). The output that some member has at some point of the box is in the unsafe set, so that *unsat* is wrong.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.support.asking import claims
from verifiable_relu.errors import InputError
from verifiable_relu.execution.model import execution_model
from verifiable_relu.readers import read_onnx
from verifiable_relu.search.outcomes import Verdict
from verifiable_relu.search.registry import make
from verifiable_relu.spec.property import Box, Property, Query, Row

Array = np.ndarray

NUMBERS = (2.0, 4.0, 0.5, 3.0, 7.1, 3.3, 0.3, 1.7, 0.05, 11.0, 1.0, 2.0**23, 2.0**-24)
"""Scalars, of which few are seldom drawn (``_scalar``)."""

SHARES = np.array([2, 2, 2, 2, 4, 4, 3, 3, 2, 2, 1, 0.3, 0.3])


ARITHMETIC = ("real", "real", "float32", "real", "tf32")
"""Of networks in turn."""

STEPS = {"Mul": 0.34, "Div": 0.34, "Neg": 0.06, "Add": 0.07, "Sub": 0.06, "Reshape": 0.08, "several": 0.05}
"""What stands before and after activations, and how often."""


def _gaussian(x: Array) -> Array:
    """Φ(x)."""
    return 0.5 * np.vectorize(math.erfc, otypes=[float])(-x / math.sqrt(2))


@dataclass
class Value:
    """A computed tensor as factor·x, member by member and point by point, (members, points, width).

    Attributes:
        name: in the file, where it has an axis more if it is ``deep``.
    """

    name: str
    x: Array
    factor: Array = field(default_factory=lambda: np.ones(1))
    deep: bool = False

    @property
    def array(self) -> Array:
        return self.factor * self.x


@dataclass
class Random:
    """A network that is drawn, written and evaluated step by step.

    Attributes:
        lams: (members, activations) the λ' of the members, infinite for ReLU; the first is λ itself.
        own: of each GELU its own λ.
        largest: the size of the largest number on the way.
    """

    seed: int
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    stored: list[onnx.TensorProto] = field(default_factory=list)
    own: list[float] = field(default_factory=list)
    largest: float = 1.0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.least = float(self.rng.choice([1, 1, 1, 1.5, 2, 5]))
        harder = np.exp(np.abs(self.rng.normal(0, 1, (6, 8)))) * (self.rng.random((6, 8)) < 0.7)
        harder[:2], harder[2] = 1, np.inf
        self.lams = self.least * np.where(harder == 0, np.inf, np.maximum(harder, 1))
        size = int(self.rng.integers(1, 4))
        self.center, self.eps = self.rng.normal(0, 1, size), self.rng.choice([1e-4, 1e-3, 0.02])
        points = self.center + self.eps * np.concatenate([self.rng.uniform(-1, 1, (3, size)), np.zeros((1, size))])
        value = Value("X", np.broadcast_to(points, (len(self.lams), *points.shape)))
        for _ in range(int(self.rng.integers(1, 4))):
            value = self._layer(value)
        self.output = self._dense(value, 1)

    def constant(self, number: float | Array) -> str:
        name = f"k{len(self.stored)}"
        self.stored.append(numpy_helper.from_array(np.asarray(number, np.float32), name))
        return name

    def node(self, operator: str, *inputs: str, **attributes: object) -> str:
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, list(inputs), [name], name=name, **attributes))
        return name

    def _seen(self, value: Value) -> Value:
        self.largest = max(self.largest, float(np.abs(value.array).max()))
        return value

    def _flat(self, value: Value) -> Value:
        return self._reshaped(value, False) if value.deep else value

    def _reshaped(self, value: Value, deep: bool) -> Value:
        shape = np.array([1] * (1 + deep) + [value.array.shape[-1]])
        self.stored.append(numpy_helper.from_array(shape, f"k{len(self.stored)}"))
        return Value(self.node("Reshape", value.name, self.stored[-1].name), value.x, value.factor, deep)

    def _dense(self, value: Value, outputs: int) -> Value:
        value = self._flat(value)
        weight = self.rng.normal(0, 1, (value.array.shape[-1], outputs)).astype(np.float32)
        bias = (self.rng.normal(0, 0.5, outputs) * (self.rng.random() < 0.7)).astype(np.float32)
        name = self.node("Gemm", value.name, self.constant(weight), self.constant(bias))
        self._seen(Value("", np.abs(value.array) @ np.abs(weight.astype(float))))
        return self._seen(Value(name, value.array @ weight.astype(float) + bias))

    def _layer(self, value: Value) -> Value:
        before = value
        if self.rng.random() < 0.8:
            value = self._dense(value, int(self.rng.integers(1, 4)))
        for _ in range(int(self.rng.integers(0, 4))):
            value = self._scalar(value)
        value = self._activation(value)
        for _ in range(int(self.rng.integers(0, 3))):
            value = self._scalar(value)
        value = self._flat(value)
        if before.array.shape == value.array.shape and self.rng.random() < 0.3:
            return self._seen(Value(self.node("Add", before.name, value.name), before.array + value.array))
        return self._dense(value, int(self.rng.integers(1, 4)))

    def _scalar(self, value: Value) -> Value:
        """A product with a constant, a quotient, a negative, a sum or a reshape."""
        rng, width = self.rng, value.array.shape[-1]
        number = np.float32(rng.choice(NUMBERS, p=SHARES / SHARES.sum()) * rng.choice([1, 1, 1, -1]))
        shape = [(), (1,), (1, 1)][rng.integers(3)]
        match rng.choice(list(STEPS), p=list(STEPS.values())):
            case "Mul":
                return self._times(value, "Mul", np.full(shape, number))
            case "Div":
                return self._times(value, "Div", np.full(shape, number))
            case "several":
                several = np.full(width, number) if rng.random() < 0.5 else rng.normal(0, 2, width)
                return self._times(value, "Mul", several)
            case "Neg":
                return Value(self.node("Neg", value.name), value.x, -value.factor, value.deep)
            case "Reshape":
                return self._reshaped(value, not value.deep)
            case operator:
                added = np.float32(rng.normal())
                name = self.node(str(operator), value.name, self.constant(np.full(shape, added)))
                total = value.array + float(added) if operator == "Add" else value.array - float(added)
                return self._seen(Value(name, total, deep=value.deep))

    def _times(self, value: Value, operator: str, numbers: Array) -> Value:
        """A product with constants, or a quotient."""
        by = np.asarray(numbers, np.float32).astype(float).reshape(-1)
        inputs = [value.name, self.constant(numbers)]
        if operator == "Mul" and self.rng.random() < 0.5:
            inputs.reverse()
        factor = value.factor * by if operator == "Mul" else value.factor / by
        return self._seen(Value(self.node(operator, *inputs), value.x, factor, value.deep))

    def _activation(self, value: Value) -> Value:
        lams = self.lams[:, len(self.own), None, None]
        hard, soft = np.isinf(lams), np.where(np.isinf(lams), 1, lams)
        kind = self.rng.choice(["Relu", "Gelu", "Erf"], p=[0.2, 0.4, 0.4])
        if kind == "Relu":
            self.own.append(math.inf)
            z = value.array
            found = np.where(hard, np.maximum(z, 0), z * _gaussian(soft * z))
            return self._seen(Value(self.node("Relu", value.name), found, deep=value.deep))
        inside, outer, root = value, value, 1.0
        if kind == "Gelu":
            name = self.node("Gelu", value.name)
        else:
            number = np.float32(self.rng.choice([math.sqrt(0.5), 1.0, 2.0, 0.4]))
            inside, root = self._times(value, str(self.rng.choice(["Mul", "Div"])), number), math.sqrt(2)
            if self.rng.random() < 0.3:
                outer = self._times(value, "Mul", np.float32(self.rng.choice(NUMBERS[:10])))
            gate = self.node("Add", self.node("Erf", inside.name), self.constant(1.0))
            if half := self.rng.random() < 0.5:
                gate = self.node("Mul", gate, self.constant(0.5))
            name = self.node("Mul", outer.name, gate)
            outer = Value("", outer.x, outer.factor * (1 if half else 2))
        self.own.append(float(np.abs(inside.factor).min()) * root)
        # The argument's sign is that of the factor, and λ' is with respect to x.
        x = np.sign(inside.factor) * value.x
        return self._seen(Value(name, outer.array * np.where(hard, x >= 0, _gaussian(soft * x)), deep=value.deep))

    def file(self) -> bytes:
        shapes = (("X", [1, len(self.center)]), (self.output.name, [1, 1]))
        x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes)
        graph = helper.make_graph(self.nodes, "g", [x], [y], self.stored)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
        return bytes(model.SerializeToString())


def asked(drawn: Random, sign: int, distance: float) -> Property:
    """Whether the output, times ``sign``, is at most that of the least member, and a part of the largest number."""
    least = float((sign * drawn.output.array).min())
    most = Fraction(least + distance * drawn.largest)
    # A constant stands for an output without a coefficient.
    return Property(Box(drawn.center - drawn.eps, drawn.center + drawn.eps), ((Row(((0, Fraction(sign)),), most),),))


def problems(seeds: Iterable[int], counts: Counter[str]) -> Iterator[str]:
    """Verdicts that are wrong of networks by their seeds; ``counts`` says how many were refused, decided, left open."""
    for seed in seeds:
        drawn = Random(seed)
        data, arithmetic = drawn.file(), ARITHMETIC[seed % len(ARITHMETIC)]
        try:
            network = execution_model(read_onnx(data), arithmetic, drawn.least)
        except InputError as error:
            counts[f"refused: {error.message.partition(':')[0].partition(' ')[0]}"] += 1
            continue
        reached = [Query(network, asked(drawn, sign, 1e-9)) for sign in (1, -1)]
        beyond = Query(network, asked(drawn, 1, -0.05))
        *wrong, right = claims(make("crown"), [*reached, beyond], 1.0)
        if any(outcome.verdict is Verdict.UNSAT for outcome in wrong):
            yield f"{seed}: a member that violates is called unsat in {arithmetic}"
        counts[f"{arithmetic}: {'unsat' if right.verdict is Verdict.UNSAT else 'open'} beyond what is reached"] += 1
