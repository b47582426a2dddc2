"""Small ONNX networks whose numbers are derived from others at scales from 1e-300 to 1e300, and near rounding.

Constants are computed from constants in ways that a float would round or lose, factors of batch normalisations,
divisions, means, dequantised weights and spelled GELUs overflow, underflow and are denormal on the way, and further
factors bring the output back to moderate sizes. The rational evaluator of ONNX files (``onnx_exact``), which shares no
code with the package, says what the output is at a point; properties begin there, just before it and just behind.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.support.asking import claims as ask
from verifiable_relu.errors import InputError
from verifiable_relu.readers import read_onnx
from verifiable_relu.search.outcomes import Trust, Verdict
from verifiable_relu.search.registry import make
from verifiable_relu.spec.property import Box, Property, Query, Row

from .judge import Report
from .onnx_exact import Evaluator, Value, _root, objects

DISTANCES = (Fraction(0), Fraction(1, 2**60), *(Fraction(1, 10**k) for k in (15, 12, 6)), Fraction(1, 2))
"""Of thresholds from the output, relative to its size."""


class _Evaluator(Evaluator):
    """The rational evaluator with the further operators that are used here."""

    def op_Sum(self, _: dict, *terms: Value) -> Any:
        return sum((term.array for term in terms[1:]), terms[0].array)

    def op_Mean(self, _: dict, *terms: Value) -> Any:
        return self.op_Sum({}, *terms) / Fraction(len(terms))

    def op_Reciprocal(self, _: dict, x: Value) -> Any:
        return objects(x.array, lambda v: 1 / v)

    def op_Sqrt(self, _: dict, x: Value) -> Any:
        self.rational = all(_root(v)[1] for v in x.array.reshape(-1))
        return objects(x.array, lambda v: _root(v)[0])

    def op_Pow(self, _: dict, x: Value, y: Value) -> Any:
        return objects(x.array, lambda v: v ** int(y.array.item()))

    def op_DequantizeLinear(self, _: dict, x: Value, scale: Value, zero: Value) -> Any:
        return (objects(x.array, Fraction) - zero.array.item()) * scale.array.item(), scale.kind

    def op_LayerNormalization(self, attributes: dict, x: Value, scale: Value, bias: Value) -> Any:
        self.rational = False
        d = x.array - x.array.sum(-1, keepdims=True) / Fraction(x.array.shape[-1])
        spread = (d * d).sum(-1, keepdims=True) / Fraction(x.array.shape[-1]) + Fraction(attributes["epsilon"])
        return d / objects(spread, lambda v: _root(v)[0]) * scale.array + bias.array

    def tensor(self, tensor: TensorProto) -> Value:
        if tensor.data_type == TensorProto.INT8:
            return Value(objects(numpy_helper.to_array(tensor), int), tensor.data_type, constant=True)
        return super().tensor(tensor)


class _Writer:
    """A network under construction: ``at`` is the name of the last value, of shape (1, ``width``)."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.kind = np.dtype(rng.choice(["float32", "float64"]))
        self.far = 300 if self.kind == np.float64 else 36
        self.width = int(rng.choice([1, 2, 3, 5]))
        self.at, self.size = "X", Fraction(1)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[TensorProto] = []
        self.inputs = self.width

    def number(self, exponent: float) -> float:
        """A number of about so many powers of ten, of either sign, that the type holds, perhaps as a denormal one."""
        low, high = (-322, 307) if self.kind == np.float64 else (-44, 38)
        value = float(self.rng.uniform(1, 9)) * 10.0 ** int(min(max(exponent, low), high))
        return float(self.kind.type(value))

    def exponent(self) -> int:
        """Of a factor: mostly moderate."""
        return int(self.rng.choice([0, 1, -1, 8, -8, self.far // 2, -self.far // 2, self.far, -self.far]))

    def opposed(self, first: int, second: int) -> tuple[int, int]:
        """The exponents of two factors: often those under which what is made of them vanishes."""
        return (first, second) if self.rng.random() < 0.3 else (self.exponent(), self.exponent())

    def constant(self, value: Any) -> str:
        made = value if isinstance(value, np.ndarray) else np.array(value, self.kind)
        self.constants.append(numpy_helper.from_array(made, f"c{len(self.constants)}"))
        return self.constants[-1].name

    def add(self, operator: str, *inputs: str, **attributes: Any) -> str:
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [name], name=name, **attributes))
        return name

    def grown(self, factor: float | Fraction) -> None:
        self.size *= abs(Fraction(factor)) or 1

    def model(self) -> onnx.ModelProto:
        kind = helper.np_dtype_to_tensor_dtype(self.kind)
        self.nodes[-1].output[0] = "Y"
        graph = helper.make_graph(
            self.nodes,
            "magnitudes",
            [helper.make_tensor_value_info("X", kind, [1, self.inputs])],
            [helper.make_tensor_value_info("Y", kind, [1, self.width])],
            self.constants,
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _division(w: _Writer) -> None:
    divisor = w.number(w.exponent()) * float(w.rng.choice([1, 1, -1]))
    w.at = w.add("Div", w.at, w.constant(divisor))
    w.grown(1 / Fraction(divisor))


def _batch_normalisation(w: _Writer) -> None:
    a, b = w.opposed(-w.far, w.far)
    gamma, variance = (np.array([w.number(e)] * w.width, w.kind) for e in (a, b))
    zero = np.zeros(w.width, w.kind)
    names = [w.constant(part) for part in (gamma, zero, zero, variance)]
    w.at = w.add("BatchNormalization", w.at, *names, epsilon=0.0)
    w.grown(Fraction(float(gamma[0])) / Fraction(math.isqrt(int(Fraction(float(variance[0])) * 10**700)), 10**350))


def _folded_product(w: _Writer) -> None:
    """A factor that is computed from constants; its parts may be beyond the type's range where it is not."""
    first, second = w.number(w.exponent()), w.number(w.exponent())
    match int(w.rng.integers(5)):
        case 0:
            name, value = w.add("Mul", w.constant(first), w.constant(second)), Fraction(first) * Fraction(second)
        case 1:
            name, value = w.add("Div", w.constant(first), w.constant(second)), Fraction(first) / Fraction(second)
        case 2:
            name, value = w.add("Reciprocal", w.constant(first)), 1 / Fraction(first)
        case 3:
            name, value = w.add("Pow", w.constant(first), w.constant(2.0)), Fraction(first) ** 2
        case _:
            square = w.add("Mul", w.constant(first), w.constant(second))
            name = w.add("Sqrt", square)
            value = Fraction(math.isqrt(int(Fraction(first) * Fraction(second) * 10**1400)), 10**700)
    w.at = w.add("Mul", w.at, name)
    w.grown(value)


def _folded_sum(w: _Writer) -> None:
    """A constant of which a sum in floats keeps few digits, or none, is added."""
    size = float(min(max(w.size, Fraction(1, 10**w.far)), Fraction(10**w.far)))
    part = float(w.kind.type(size * w.rng.uniform(0.1, 1)))
    with np.errstate(over="ignore"):
        large = float(w.kind.type(size * 2.0 ** int(w.rng.choice([4, 12, 23, 24, 30, 53, 60]))))
    if not (math.isfinite(large) and part):
        return
    big, small = w.constant(large), w.constant(part)
    match int(w.rng.integers(3)):
        case 0:
            name = w.add("Sub", w.add("Add", big, small), big)
        case 1:
            name = w.add("Sum", big, small, w.add("Neg", big))
        case _:
            row = np.array([[large, part, -large]], w.kind)
            name = w.add("ReduceMean", w.constant(row), axes=[1], keepdims=1)
    w.at = w.add(str(w.rng.choice(["Add", "Sub"])), w.at, name)


def _mean(w: _Writer) -> None:
    w.at, w.width = w.add("ReduceMean", w.at, axes=[1], keepdims=1), 1


def _dequantised(w: _Writer) -> None:
    if w.kind == np.float64:  # the operator has no such scales
        return _product(w)
    scale, zero = w.number(w.exponent()), int(w.rng.integers(-3, 4))
    whole = w.rng.integers(-100, 101, size=(w.width, 2)).astype(np.int8)
    names = w.constant(whole), w.constant(scale), w.constant(np.array(zero, np.int8))
    w.at, w.width = w.add("MatMul", w.at, w.add("DequantizeLinear", *names)), 2
    w.grown(50 * Fraction(scale))
    return None


def _product(w: _Writer) -> None:
    factors = [w.number(w.exponent()) for _ in range(2)]
    for factor in factors:
        w.at = w.add("Mul", w.at, w.constant(factor))
        w.grown(factor)


def _gelu(w: _Writer) -> None:
    inside = w.number(w.exponent())
    outside, other = (w.number(e) for e in w.opposed(-2 * w.far // 3, -2 * w.far // 3))
    gate = w.add("Add", w.add("Erf", w.add("Mul", w.at, w.constant(inside))), w.constant(1.0))
    factor = w.add("Mul", w.add("Mul", w.at, w.constant(outside)), w.constant(other))
    w.at = w.add("Mul", factor, gate)
    w.grown(Fraction(outside) * Fraction(other))


def _layer_normalisation(w: _Writer) -> None:
    if w.width < 3:
        return
    scale = np.array([w.number(w.exponent())] * w.width, w.kind)
    shift = np.zeros(w.width, w.kind)
    w.at = w.add("LayerNormalization", w.at, w.constant(scale), w.constant(shift), axis=1, epsilon=1e-5)
    w.size = Fraction(float(scale[0]))


def _relu(w: _Writer) -> None:
    w.at = w.add("LeakyRelu", w.at, alpha=0.25) if w.rng.random() < 0.5 else w.add("Relu", w.at)


STEPS: dict[str, Callable[[_Writer], None]] = {
    "batch normalisation": _batch_normalisation,
    "dequantised": _dequantised,
    "division": _division,
    "folded product": _folded_product,
    "folded sum": _folded_sum,
    "GELU": _gelu,
    "layer normalisation": _layer_normalisation,
    "mean": _mean,
    "products": _product,
}
"""Each is a step of a network in which a number is derived from others."""


def network(rng: np.random.Generator, kind: str) -> onnx.ModelProto:
    """A network with a step of a kind, and others, whose outputs are of moderate size where the type allows it."""
    w = _Writer(rng)
    steps = [STEPS[kind], *(STEPS[str(name)] for name in rng.choice(list(STEPS), size=int(rng.integers(0, 2))))]
    if rng.random() < 0.6:
        steps.insert(int(rng.integers(len(steps) + 1)), _relu)
    for step in steps:
        step(w)
    for _ in range(4):
        exponent = math.log10(w.size.denominator) - math.log10(w.size.numerator)
        if abs(exponent) >= 1:
            factor = w.number(round(min(max(exponent, -w.far), w.far)))
            w.at = w.add("Mul", w.at, w.constant(factor))
            w.grown(factor)
    if w.at == "X" or not w.nodes:
        w.at = w.add("Identity", w.at)
    return w.model()


@dataclass(frozen=True)
class Asked:
    """A query and what is right.

    Attributes:
        truth: sat if the point is a counterexample; unsat if it is none, and the box's only point; else None.
        exact: whether the output at the point is rational.
    """

    name: str
    query: Query
    model: onnx.ModelProto
    truth: Verdict | None


def output(model: onnx.ModelProto, point: Sequence[Fraction]) -> tuple[list[Fraction], bool]:
    """The outputs at a point, and whether they are rational."""
    (declared,) = model.graph.input
    array = np.empty((1, len(point)), dtype=object)
    array[0, :] = list(point)
    found = _Evaluator(model).run({declared.name: array}).values["Y"]
    return [Fraction(v) for v in found.array.reshape(-1)], found.exact


def asked(
    seed: int, numbers: Iterable[int], outcomes: Counter[str], kinds: Sequence[str] = tuple(STEPS)
) -> Iterator[Asked]:
    """Queries about random networks; those that are refused are counted."""
    for number in numbers:
        rng = np.random.default_rng([seed, number])
        kind = kinds[number % len(kinds)]
        model = network(rng, kind)
        try:
            read = read_onnx(model.SerializeToString(), f"{kind} {number}")
        except InputError:
            outcomes[f"refused: {kind}"] += 1
            continue
        outcomes[f"read: {kind}"] += 1
        single = rng.random() < 0.5
        point = [Fraction(int(k), 64) for k in rng.integers(-128, 129, size=read.input_size)]
        y, exact = output(model, point)
        index = int(rng.integers(len(y)))
        distance = DISTANCES[int(rng.integers(0 if exact else 2, len(DISTANCES)))] * abs(y[index])
        sat = bool(rng.random() < 0.6) or not single
        sign = int(rng.choice([-1, 1]))
        if not distance and not exact:
            continue
        # sign·Y ≥ sign·y − distance holds at the point; with + it does not.
        threshold = sign * y[index] + (-distance if sat else distance)
        row = Row(((index, Fraction(-sign)),), -threshold)
        away = [Fraction(int(k), 64) for k in rng.integers(0, 65, size=len(point))]
        low = point if single else [p - a * int(rng.integers(2)) for p, a in zip(point, away, strict=True)]
        high = point if single else [p + a * int(rng.integers(2)) for p, a in zip(point, away, strict=True)]
        prop = Property(Box.exact(low, high), ((row,),))
        truth = Verdict.SAT if sat or not distance else Verdict.UNSAT
        yield Asked(f"{kind} {number}", Query(read, prop), model, truth)


def magnitudes(
    methods: Mapping[str, float],
    *,
    seed: int = 0,
    count: int = 90,
    kinds: Sequence[str] = tuple(STEPS),
    report: Report | None = None,
    outcomes: Counter[str] | None = None,
) -> Report:
    """Each method on random networks at all scales: no verdict may contradict rational arithmetic."""
    report, outcomes = report or Report(), Counter[str]() if outcomes is None else outcomes
    cases = asked(seed, report.of(range(count)), outcomes, kinds)
    while batch := list(islice(cases, 32)):
        for method, seconds in methods.items():
            found = ask(make(method), [one.query for one in batch], seconds)
            for one, outcome in zip(batch, found, strict=True):
                report.decided[method, outcome.verdict] += 1
                # What a method claims in floating point, the campaign confirms; `auto` has it confirmed.
                claims = outcome.verdict is Verdict.SAT and outcome.trust is Trust.FLOAT and method != "auto"
                if outcome.verdict not in (one.truth, Verdict.UNKNOWN) and not claims:
                    report.note(f"{method} on {one.name}", f"{outcome.verdict}, {outcome.trust}, which is wrong")
    return report
