"""Networks as ``docs/certificates.md`` counts them, written from that page alone.

It knows dense networks and small convolutions, activations with a kink and curves, families, MaxPool, QuantizeLinear
and DequantizeLinear, and what runs in an arithmetic; of the rest it says ``Unsupported``. It imports nothing of the
package, computes in rational numbers, and rounds nowhere. ``page_checker`` reads certificates about them.

The network is taken apart into *neurons*. A value is a ``Form``: a constant and coefficients of *atoms*. Atoms are the
inputs (0, 1, …), and behind them the neurons' values r in the order in which they are counted. Hence a neuron's z is a
form of earlier atoms, and the page's walk replaces the atoms of a form, from the last neuron to the first. A maximum, a
difference and an error of rounding count as neurons, too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from tests.soundness import onnx_exact
from tests.soundness.page_curves import Curve, Family, Round, Sign, Smooth, root

ZERO, ONE = Fraction(0), Fraction(1)


class Refused(Exception):
    """The certificate proves nothing by what the page says."""


class Unsupported(Exception):
    """This checker does not know the network, the property or the kind of certificate."""


def need(holds: bool, what: str) -> None:
    if not holds:
        raise Refused(what)


class Form:
    """An affine form: a constant, and coefficients other than zero of atoms."""

    def __init__(self, terms: dict[int, Fraction] | None = None, constant: Fraction = ZERO) -> None:
        self.terms, self.constant = {} if terms is None else terms, constant

    def __add__(self, other: Form | Fraction) -> Form:
        found = Form(dict(self.terms), self.constant)
        return found.put(ONE, other)

    def __mul__(self, factor: Fraction) -> Form:
        if isinstance(factor, Form):
            raise Unsupported("a product of values")
        return Form({k: v * factor for k, v in self.terms.items()} if factor else {}, self.constant * factor)

    __radd__, __rmul__ = __add__, __mul__

    def __truediv__(self, divisor: Fraction | int) -> Form:
        if isinstance(divisor, Form):
            raise Unsupported("a quotient of values")
        return self * (ONE / divisor)

    def __rtruediv__(self, _: Fraction) -> Form:
        raise Unsupported("a quotient of values")

    def __sub__(self, other: Form | Fraction) -> Form:
        return self + other * -ONE

    def __rsub__(self, other: Fraction) -> Form:
        return self * -ONE + other

    def put(self, factor: Fraction, other: Form | Fraction) -> Form:
        """Add factor·other to this form; returned."""
        if not isinstance(other, Form):
            self.constant += factor * other
            return self
        if factor:
            self.constant += factor * other.constant
            for atom, value in other.terms.items():
                self.terms[atom] = self.terms.get(atom, ZERO) + factor * value
        return self


@dataclass
class Error:
    """|e| ≤ part·(Σ size·|value| + constant) + lost: what an operator's value may be off by."""

    part: Fraction
    lost: Fraction
    terms: list[tuple[Fraction, Form]]
    constant: Fraction


@dataclass(frozen=True)
class Arithmetic:
    """A row of the page's table."""

    operand: Fraction
    step: Fraction
    result: Fraction
    least: Fraction
    largest: Fraction
    digits: int
    lowest: int

    def sizes(self, count: int, weights: Fraction, small: bool = False) -> tuple[Fraction, Fraction]:
        """θ and λ of a sum of so many products."""
        fused = (count + 17) * self.step
        need(fused < 1, "a sum that is too long")
        tiny = count + 17 + weights + (count * self.largest / 2 if small else ZERO)
        return (1 + self.operand) ** 2 / (1 - fused) - 1, 4 * TINY * tiny + self.least

    def narrow(self, values: np.ndarray) -> np.ndarray:
        """Stored numbers, rounded to the narrower type, to nearest, ties to even."""
        if not self.result:
            return values

        def narrowed(value: Fraction) -> Fraction:
            above = abs(value)
            exponent = above.numerator.bit_length() - above.denominator.bit_length()
            exponent -= Fraction(2) ** exponent > above
            quantum = Fraction(2) ** (max(exponent, self.lowest) - self.digits + 1)
            return round(value / quantum) * quantum

        return shaped([narrowed(value) if value else value for value in values.ravel()], values.shape)


TINY = Fraction(2) ** -126


def _row(*exponents: int | None, digits: int = 24, lowest: int = -126) -> Arithmetic:
    return Arithmetic(*(ZERO if e is None else Fraction(2) ** e for e in exponents), digits, lowest)


ARITHMETICS = {
    "float32": _row(None, -24, None, None, 60),
    "tf32": _row(-10, -23, None, None, 60),
    "bfloat16": _row(None, -23, -8, None, 60, digits=8),
    "float16": _row(None, -23, -11, -25, 15, digits=11, lowest=-14),
}


@dataclass
class Network:
    """Neurons by activation, and outputs.

    Maxima, differences and errors count as neurons, too; a maximum's value is its input, what the tournament makes.
    """

    inputs: int
    outputs: list[Form] = field(default_factory=list)
    names: list[str] = field(default_factory=list)  # of the activations' outputs
    members: list[range] = field(default_factory=list)  # the numbers of each activation's neurons
    z: list[Form] = field(default_factory=list)  # the neurons' inputs
    s: list[Fraction] = field(default_factory=list)  # their slopes below zero
    maxima: dict[int, tuple[str, list[Form]]] = field(default_factory=dict)  # MaxPool's name and rivals, by number
    curves: dict[int, Curve] = field(default_factory=dict)  # of neurons without a kink
    joint: list[Fraction] = field(default_factory=list)  # of a family, λ of each activation of the first network
    differences: dict[int, tuple[int, int]] = field(default_factory=dict)  # the first and the other network's neuron
    errors: dict[int, Error] = field(default_factory=dict)  # of rounding, by number
    beside: dict[int, int] = field(default_factory=dict)  # the first network's activation for some of the other's
    counted: int = 0  # activations of the network that is read, so far

    def _neuron(self, z: Form, s: Fraction = ONE) -> Form:
        self.z.append(z)
        self.s.append(s)
        return Form({self.inputs + len(self.z) - 1: ONE})

    def maximum(self, name: str, rivals: list[Form], made: Form) -> Form:
        """Count a maximum; its value."""
        self.maxima[len(self.z)] = name, rivals
        return self._neuron(made)

    def error(self, error: Error) -> Form:
        """Count an error of rounding."""
        self.errors[len(self.z)] = error
        return self._neuron(Form())

    def activation(self, name: str, z: np.ndarray, s: np.ndarray | Fraction, curve: Curve | None = None) -> np.ndarray:
        """Count an activation, of slopes below zero or a curve; its values."""
        first, number = len(self.z), self.counted
        slopes = np.broadcast_to(np.asarray(s, object), z.shape).ravel()
        made = [self._neuron(form_of(value), below) for value, below in zip(z.ravel(), slopes, strict=True)]
        self._count(name, first)
        self.counted += 1
        if self.joint:
            need(number < len(self.joint), "another number of λ")
            need(all(not self.s[k] for k in self.members[-1]) and _is_gate(curve), "an activation of no family")
            curve = Family("Gelu", self.joint[number] * root(Fraction(1, 2)))
        if curve is not None:
            self.curves |= dict.fromkeys(self.members[-1], curve)
        if number in self.beside:
            self._difference(self.members[self.beside[number]], self.members[-1], name)
        return shaped(made, z.shape)

    def _count(self, name: str, first: int) -> None:
        self.names.append(name)
        self.members.append(range(first, len(self.z)))

    def _difference(self, mine: range, other: range, name: str) -> None:
        need(len(mine) == len(other), "a pair of activations of different sizes")
        plain = all(not self.s[k] and _is_gate(self.curves.get(k)) for k in (*mine, *other))
        need(plain, "a pair that is not of ReLUs or GELUs")
        first = len(self.z)
        for a, b in zip(mine, other, strict=True):
            self.differences[len(self.z)] = a, b
            self._neuron(self.z[b] - self.z[a])
        self._count(name, first)


def _is_gate(curve: Curve | None) -> bool:
    """Whether an activation without a slope below zero is ReLU, GELU, or of a family."""
    return curve is None or (isinstance(curve, Smooth) and curve.kind == "Gelu")


def varies(array: np.ndarray) -> bool:
    """Whether a value depends on the input; constants are as they are stored, or fractions."""
    return any(isinstance(value, Form) for value in array.flat)


def shaped(values: list[Any], shape: tuple[int, ...]) -> np.ndarray:
    """An array of forms."""
    found = np.empty(len(values), object)
    found[:] = values
    return found.reshape(shape)


def exact(array: np.ndarray) -> np.ndarray:
    """Numbers as fractions."""
    if array.dtype == object:
        return array
    if not np.isfinite(array).all():
        raise Unsupported("a number that is not finite")
    return shaped([Fraction(value) for value in array.ravel().tolist()], array.shape)


def form_of(value: Form | Fraction) -> Form:
    return value if isinstance(value, Form) else Form(constant=value)


def read_network(
    data: bytes, arithmetic: str | None = None, joint: list[Fraction] | None = None, first: Network | None = None
) -> Network:
    """The network of an ONNX file, or its family; behind ``first``, whose inputs it shares."""
    model = onnx.load_from_string(data)
    graph = model.graph
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    (given,) = [info for info in graph.input if info.name not in stored]
    shape = [dim.dim_value or 1 for dim in given.type.tensor_type.shape.dim]
    need(not joint or arithmetic is None or not ARITHMETICS[arithmetic].result, "a family with rounded weights")
    network = first or Network(math.prod(shape), joint=joint or [])
    need(network.inputs == math.prod(shape), "another number of inputs")
    x = shaped([Form({i: ONE}) for i in range(network.inputs)], tuple(shape))
    reader = _Reader(network, ARITHMETICS[arithmetic] if arithmetic is not None else None)
    reader.values |= stored
    reader.values[given.name] = reader.rounded(x)
    nodes = _in_order(list(graph.node))
    needed = {graph.output[0].name}
    for node in reversed(nodes):
        if needed & set(node.output):
            needed |= set(node.input)
    for node in nodes:
        if node.output[0] in needed:
            reader.read(node)
    output = graph.output[0].name
    if output in reader.quantised:
        raise Unsupported("an output that is quantised")
    outputs = reader.values[output].ravel()
    if arithmetic is not None:
        begun = {id(value) for value in reader.values[given.name].ravel()}
        need(not any(id(value) in begun for value in outputs), "an output that is a number of the input")
    need(not joint or len(joint) == network.counted, "another number of λ")
    if any(gate.product is None for gate in reader.gates):
        raise Unsupported("an Erf that is no part of GELU")
    network.outputs += map(form_of, outputs)
    return network


def _in_order(left: list[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """Nodes as they are read: the first one, each time, of which nothing that it needs is made by those left."""
    found = []
    while left:
        made = {name for node in left for name in node.output}
        at = next((at for at, node in enumerate(left) if not made & set(node.input)), None)
        need(at is not None, "nodes in a circle")
        found.append(left.pop(at))
    return found


def read_pair(
    data: bytes,
    other: bytes,
    beside: list[tuple[int, int]],
    arithmetic: str | None = None,
    joint: list[Fraction] | None = None,
) -> Network:
    """Two networks as one: the activations and outputs of the first, and those of the other behind them."""
    network = read_network(data, arithmetic, joint)
    need(all(i < len(network.names) for i, _ in beside), "a pair without an activation of the first network")
    network.beside, network.counted, network.joint = {j: i for i, j in beside}, 0, []
    need(len(network.beside) == len(beside), "an activation in two pairs")
    read_network(other, arithmetic, first=network)
    need(all(j < network.counted for j in network.beside), "a pair without an activation of the other network")
    return network


MOVES = ("Dropout", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
OFF = ("BatchNormalization", "Gelu", "LeakyRelu", "PRelu", "Sigmoid", "Tanh")
EXACT = (*MOVES, "Abs", "Constant", "MaxPool", "Relu")
QUANTISED = ("DequantizeLinear", "QuantizeLinear")
MEANS = ("AveragePool", "GlobalAveragePool")
SUMS = ("Add", "Conv", "ConvTranspose", "Div", "Gemm", "MatMul", "Mul", "Sub", *MEANS)
MOVES_OF_WHOLE_NUMBERS = ("Flatten", "Identity", "MaxPool", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
TAKEN_AWAY = (*MOVES, "Cast", "Slice")
FOLDED = ("Add", "BatchNormalization", "Div", "Mul", "Sub")
EVALUATED = (*SUMS, "Dropout", "Flatten", "Identity", "Transpose")
WHOLE = {"int8": (-(2**7), 2**7 - 1), "uint8": (0, 2**8 - 1), "int16": (-(2**15), 2**15 - 1), "uint16": (0, 2**16 - 1)}

STANDARD = onnx_exact.Evaluator(onnx.helper.make_model(onnx.GraphProto()))


@dataclass
class Gate:
    """part·erf(k·x) + constant, x before all scalars: r is that of GELU.

    Attributes:
        product: what the value is multiplied with, when that has been read.
    """

    x: np.ndarray
    r: np.ndarray
    part: Fraction
    constant: Fraction
    product: str | None = None


Chain = tuple[int, Fraction]
"""Of sums that follow each other: K, and the least product of their weights."""


class _Reader:
    """The values of a graph by their names."""

    def __init__(self, network: Network, arithmetic: Arithmetic | None) -> None:
        self.network, self.arithmetic = network, arithmetic
        self.values: dict[str, Any] = {}
        self.quantised: dict[str, str] = {}  # types of the values between QuantizeLinear and DequantizeLinear
        self.sums: dict[str, Chain] = {}  # of values that sums of products made, what a sum behind has to know
        self.scaled: dict[str, tuple[np.ndarray, Fraction]] = {}  # of products with scalars, value and factor
        self.gates: list[Gate] = []
        self.reached: dict[str, dict[str, Fraction]] = {}  # DequantizeLinear summed in a value, with N·σ of each
        self.nodes: dict[str, onnx.NodeProto] = {}  # by the names of their results

    def read(self, node: onnx.NodeProto) -> None:
        """Compute what a node computes."""
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        given, name, kind = [self.values[name] if name else None for name in node.input], node.output[0], node.op_type
        whole = [self.quantised[i] for i in node.input if i in self.quantised]
        if whole and kind not in (*MOVES_OF_WHOLE_NUMBERS, "DequantizeLinear"):
            raise Unsupported(f"{kind} of whole numbers")
        if self.arithmetic is not None:
            need(kind in (*EXACT, *QUANTISED, *SUMS, *OFF), f"{kind} that runs")
            need(kind not in QUANTISED or not self.arithmetic.result, f"{kind} in an arithmetic of 16 bits")
        self.nodes[name] = node
        if self.arithmetic is not None:
            self._need_kept(node)
        self._scale(node, given)
        self._reach(node, given)
        if kind == "QuantizeLinear":
            self.values[name] = self._quantised(node, attributes, *given)
        elif kind == "DequantizeLinear":
            self.values[name] = self._dequantised(node, attributes, *given)
        elif kind == "Erf" or any(isinstance(value, Gate) for value in given):
            self.values[name] = self._gated(node, given)
        elif kind in ("Sigmoid", "Tanh", "Gelu"):
            self.values[name] = self._curved(node, attributes, given[0])
        elif kind == "BatchNormalization":
            self.values[name] = self._normalised(node, attributes, *given)
        elif self.arithmetic is not None and kind in SUMS:
            self.values[name] = self._summed(node, attributes, given)
        else:
            if self.arithmetic is not None and kind == "PRelu":
                given[1] = self.arithmetic.narrow(exact(given[1]))
            value = _value(self.network, kind, name, attributes, given)
            if self.arithmetic is not None and kind in ("LeakyRelu", "PRelu"):
                need(kind == "PRelu" or not self.arithmetic.result, f"{kind} in an arithmetic of 16 bits")
                part, lost = self.arithmetic.sizes(1, ONE, small=True)
                value = self.rounded(self._off(value, part, lost))
            self.values[name] = value
            if kind in MOVES_OF_WHOLE_NUMBERS and whole:
                self.quantised[name] = whole[0]
            if kind in MOVES and node.input[0] in self.sums:
                self.sums[name] = self.sums[node.input[0]]

    def _scale(self, node: onnx.NodeProto, given: list[Any]) -> None:
        """Note a product of a computed value with a scalar, or its quotient."""
        if node.op_type not in ("Mul", "Div") or any(isinstance(value, Gate) for value in given):
            return
        places = [i for i, value in enumerate(given) if value.dtype != object and value.size == 1]
        if len(places) == 1 and (node.op_type == "Mul" or places == [1]):
            number, source = Fraction(given[places[0]].item()), 1 - places[0]
            x, factor = self.scaled.get(node.input[source], (given[source], ONE))
            self.scaled[node.output[0]] = x, factor * number if node.op_type == "Mul" else factor / number

    def _back(self, name: str, through: tuple[str, ...]) -> onnx.NodeProto:
        """The node that a value comes from through operators, stored numbers aside, and through those of no effect."""
        while (node := self.nodes.get(name)) is not None:
            constants = [v for i in node.input if (v := self.values.get(i)) is not None and not varies(v)]
            no_effect = {"Add": 0, "Sub": 0, "Mul": 1, "Div": 1}.get(node.op_type)
            idle = no_effect is not None and any((exact(value) == no_effect).all() for value in constants)
            if not idle and (node.op_type not in through or (no_effect is not None and not constants)):
                return node
            name = next((i for i in node.input if varies(self.values[i])), node.input[0])
        return onnx.NodeProto()

    def _steps(self, node: onnx.NodeProto) -> tuple[Any, ...] | None:
        """Scale, zero point and its type of a DequantizeLinear or QuantizeLinear."""
        if node.op_type not in QUANTISED:
            return None
        scale, zero = (*(self.values[i] for i in node.input[1:] if i), np.zeros((), np.uint8))[:2]
        return tuple(exact(scale).ravel()), tuple(exact(zero).ravel()), zero.dtype

    def _product(self, node: onnx.NodeProto) -> tuple[onnx.NodeProto, list[Any]] | None:
        """A Conv, Gemm or MatMul of numbers of one scale, or a stored bias added to it; and the steps of its inputs."""
        inputs = list(node.input)
        for a, b in (inputs, inputs[::-1]) if node.op_type == "Add" else ():
            if (found := self._back(a, TAKEN_AWAY)).op_type in PRODUCTS and not varies(self.values[b]):
                node, inputs = found, [*found.input[:2], b]
        if node.op_type not in PRODUCTS or not varies(self.values[inputs[0]]):
            return None
        return node, [self._steps(self._back(i, (*EXACT, *TAKEN_AWAY))) for i in inputs if i]

    def _need_kept(self, node: onnx.NodeProto) -> None:
        """Refuse what a session with default options computes otherwise (the page on arithmetic)."""
        if node.op_type == "QuantizeLinear":
            for more in ((), FOLDED):
                found = self._product(self._back(node.input[0], (*EXACT, *TAKEN_AWAY, *more)))
                x, *others = [None] if found is None else found[1]
                need(x is None or len(x[0]) > 1 or None not in others, "a float bias or weights that are quantised")
            before = self._back(node.input[0], TAKEN_AWAY)
            need(before.op_type != "DequantizeLinear" or self._steps(before) == self._steps(node), "quantised twice")
        elif (found := self._product(node)) is not None and found[1][1] is not None:
            product, (x, weight, *bias) = found
            dense = product.op_type == "MatMul" or (
                product.op_type == "Gemm" and not any(a.name == "transB" and a.i for a in product.attribute)
            )
            direct = self.nodes.get(product.input[0], product).op_type == "DequantizeLinear"
            need(direct or not dense, "quantised weights of what is not quantised")
            for own in bias if x is not None and len(x[0]) == 1 else ():
                scales = [x[0][0] * w for w in weight[0]]
                near = own is None or (len(own[0]) in (1, len(scales)) and not any(own[1]))
                pairs = zip(scales, (own[0] * len(scales))[: len(scales)], strict=True) if near and own else ()
                need(near and all(abs(a - b) <= a / 2**23 for a, b in pairs), "a bias of another scale")

    def _reach(self, node: onnx.NodeProto, given: list[Any]) -> None:
        """Note of which DequantizeLinear the results are summed in a value."""
        name = node.output[0]
        if node.op_type == "DequantizeLinear":
            kinds = [self.quantised.get(node.input[0], given[0].dtype.name)]
            kinds.append("uint8" if len(given) < 3 or given[2] is None else given[2].dtype.name)
            count = max(2 ** min(int(kind.lstrip("uint")), 16) for kind in kinds)
            self.reached[name] = {name: count * max(exact(given[1]).ravel())}
        elif node.op_type in ("Add", "Sub", *EXACT):
            self.reached[name] = {k: v for i in node.input for k, v in self.reached.get(i, {}).items()}

    def _gelu(self, name: str, source: str, k: Fraction) -> tuple[np.ndarray, np.ndarray, Fraction]:
        """Count a GELU of a value; x before all scalars, r, and the product of the scalars."""
        x, factor = (
            self.scaled.get(source, (self.values[source], ONE))
            if self.arithmetic is None
            else (self.values[source], ONE)
        )
        if factor <= 0:
            raise Unsupported("a GELU of a negative multiple")
        return x, self.network.activation(name, x, ZERO, Smooth("Gelu", factor * k)), factor

    def _curved(self, node: onnx.NodeProto, attributes: dict[str, Any], x: np.ndarray) -> np.ndarray:
        name, kind = node.output[0], node.op_type
        if kind == "Gelu":
            of = self.network.joint[self.network.counted : self.network.counted + 1]
            need(self.arithmetic is None or of in ([], [ONE]), "a GELU that runs and is no member of its family")
            if attributes.get("approximate", b"none") != b"none":
                raise Unsupported("a GELU by a hyperbolic tangent")
            _, r, factor = self._gelu(name, node.input[0], root(Fraction(1, 2)))
            value = r * factor
        else:
            value = self.network.activation(name, x, ONE, Smooth(kind))
        if self.arithmetic is None:
            return value
        unit = Fraction(2) ** -18
        part, lost = (unit, ZERO) if kind == "Gelu" else (ZERO, unit)
        return self.rounded(self._off(self._off(value, part, lost, x), *self.arithmetic.sizes(1, ONE)))

    def _gated(self, node: onnx.NodeProto, given: list[Any]) -> Gate | np.ndarray:
        """A GELU that is spelled out: what becomes of its erf."""
        if node.op_type == "Erf":
            x, r, _ = self._gelu(node.output[0], node.input[0], ONE)
            self.gates.append(Gate(x, r, ONE, ZERO))
            return self.gates[-1]
        place = next(i for i, value in enumerate(given) if isinstance(value, Gate))
        gate, other, source = given[place], given[1 - place], node.input[1 - place]
        if isinstance(other, np.ndarray) and other.dtype != object and other.size == 1:
            number = Fraction(other.item())
            found = Gate(gate.x, gate.r, gate.part, gate.constant)
            if node.op_type == "Add":
                found.constant += number
            elif node.op_type == "Mul" or (node.op_type == "Div" and not place):
                number = number if node.op_type == "Mul" else 1 / number
                found.part, found.constant = gate.part * number, gate.constant * number
            else:
                raise Unsupported("an Erf that is no part of GELU")
            gate.product = node.output[0]
            self.gates.append(found)
            return found
        x, factor = self.scaled.get(source, (other, ONE))
        if node.op_type != "Mul" or x is not gate.x or gate.part != gate.constant:
            raise Unsupported("an Erf that is no part of GELU")
        gate.product = node.output[0]
        return gate.r * (2 * factor * gate.part)

    def _off(self, values: np.ndarray, part: Fraction, lost: Fraction, of: np.ndarray | None = None) -> np.ndarray:
        """Values of which each has an error that is a part of its own, or of that of another array."""
        terms = zip(values.flat, (values if of is None else of).flat, strict=True)
        return shaped([v + self.network.error(Error(part, lost, [(ONE, z)], ZERO)) for v, z in terms], values.shape)

    def rounded(self, values: np.ndarray) -> np.ndarray:
        """Results, as the arithmetic keeps them."""
        if self.arithmetic is None or not self.arithmetic.result:
            return values
        return self._off(values, self.arithmetic.result, self.arithmetic.sizes(1, ONE)[1])

    def _summed(self, node: onnx.NodeProto, attributes: dict[str, Any], given: list[Any]) -> np.ndarray:
        """A sum of products that rounds: its numbers are found by an evaluation whose atoms are its inputs' entries."""
        assert self.arithmetic is not None
        computed = [v is not None and varies(v) for v in given]
        entries: list[Form] = []
        local: list[Any] = []
        for value, is_computed in zip(given, computed, strict=True):
            if is_computed:
                local.append(shaped([Form({len(entries) + i: ONE}) for i in range(value.size)], value.shape))
                entries += list(value.ravel())
            else:
                local.append(value if value is None else self.arithmetic.narrow(exact(value)))
        if not entries:
            raise Unsupported("a constant that is computed")
        if self.arithmetic.result and (node.op_type in ("Div", *MEANS) or {"alpha", "beta"} & set(attributes)):
            need(node.op_type not in ("Div", *MEANS), f"{node.op_type} in an arithmetic of 16 bits")
            need(attributes.get("alpha", 1) == 1 == attributes.get("beta", 1), "a weight that is made of others")
        made = _value(self.network, node.op_type, node.output[0], attributes, local)
        rows = [Form({k: w for k, w in form.terms.items() if w}, form.constant) for form in map(form_of, made.ravel())]
        before = [self.sums[n] for n, c in zip(node.input, computed, strict=True) if c and n in self.sums]
        found, self.sums[node.output[0]] = self._off_by_sums(rows, entries, before)
        return self.rounded(shaped(found, made.shape))

    def _off_by_sums(self, rows: list[Form], entries: list[Form], before: list[Chain]) -> tuple[list[Form], Chain]:
        """Sums of products of entries with their errors, and what a sum that follows has to know of them."""
        assert self.arithmetic is not None
        count = max(len(row.terms) for row in rows) + max((k for k, _ in before), default=0)
        least = min((abs(w) for row in rows for w in row.terms.values()), default=ONE)
        least *= min([ONE, *(w for _, w in before)])
        found = []
        for row in rows:
            need(len({id(entries[k]) for k in row.terms}) == len(row.terms), "a sum of a number with itself")
            terms = [(abs(w), entries[k]) for k, w in row.terms.items()]
            part, lost = self.arithmetic.sizes(count, sum((w for w, _ in terms), ZERO), small=least < TINY)
            value = Form(constant=row.constant)
            for k, w in row.terms.items():
                value.put(w, entries[k])
            found.append(value + self.network.error(Error(part, lost, terms, abs(row.constant))))
        return found, (count, least)

    def _normalised(self, node: onnx.NodeProto, attributes: dict[str, Any], x: np.ndarray, *stored: Any) -> np.ndarray:
        """BatchNormalization, whose factors are irrational: off by a part of themselves, counted as an error."""
        if attributes.get("training_mode"):
            raise Unsupported("a BatchNormalization that trains")
        need(self.arithmetic is None or not self.arithmetic.result, "BatchNormalization in an arithmetic of 16 bits")
        epsilon = Fraction(attributes.get("epsilon", float(np.float32(1e-5))))
        factor, bias, mean, variance = (exact(v) for v in stored)
        digits = Fraction(2) ** 200
        roots = [Fraction(math.isqrt(int((v + epsilon) * digits**2))) / digits for v in variance]
        channel = np.broadcast_to(np.arange(x.shape[1]).reshape(1, -1, *[1] * (x.ndim - 2)), x.shape).ravel()
        entries, chain = list(x.ravel()), self.sums.get(node.input[0])
        for rows in (
            [Form({i: ONE}, -mean[c]) for i, c in enumerate(channel)],
            [Form({i: factor[c] / roots[c]} if factor[c] else {}, bias[c]) for i, c in enumerate(channel)],
        ):
            if self.arithmetic is None:
                made = [entries[i] * row.terms.get(i, ZERO) + row.constant for i, row in enumerate(rows)]
            else:
                made, chain = self._off_by_sums(rows, entries, [chain] if chain else [])
                self.sums[node.output[0]] = chain
            before, entries = entries, made
        sizes = [(abs(row.terms.get(i, ZERO)), x_i) for i, (row, x_i) in enumerate(zip(rows, before, strict=True))]
        errors = [self.network.error(Error(Fraction(2) ** -150, ZERO, [size], ZERO)) for size in sizes]
        return shaped([value + error for value, error in zip(entries, errors, strict=True)], x.shape)

    def _along(self, numbers: Any, x: np.ndarray, attributes: dict[str, Any]) -> np.ndarray:
        """Scales or zero points, one for all or one for each place of an axis."""
        if attributes.get("block_size"):
            raise Unsupported("blocks")
        numbers = exact(numbers)
        if numbers.size == 1:
            return numbers.reshape(())
        shape = [1] * x.ndim
        shape[attributes.get("axis", 1)] = numbers.size
        return numbers.reshape(shape)

    def _quantised(
        self, node: onnx.NodeProto, attributes: dict[str, Any], x: Any, scale: Any, zero: Any = None
    ) -> np.ndarray:
        """QuantizeLinear of a computed value."""
        if not varies(x) or attributes.get("output_dtype"):
            raise Unsupported("a QuantizeLinear of stored numbers, or of a type that it names")
        kind, name = "uint8" if zero is None else zero.dtype.name, node.output[0]
        if kind not in WHOLE:
            raise Unsupported(f"whole numbers of {kind}")
        self.quantised[name] = kind
        a, b = (Fraction(end) for end in WHOLE[kind])
        sigma = self._along(scale, x, attributes)
        need(bool((sigma > 0).all()), "a scale that is not positive")
        p = ZERO if zero is None else self._along(zero, x, attributes)
        z = x * (1 / sigma)
        if self.arithmetic is not None:
            reached = sum(self.reached.get(node.input[0], {}).values(), ZERO)
            moved = 16 * Fraction(2) ** -24
            moved *= (b - a + 1 + 2 * reached / min(sigma.ravel())) / (1 - moved)
            scales = np.broadcast_to(sigma, x.shape).ravel()
            chain = self.sums.get(node.input[0], (0, ONE))[1]
            sizes = [self.arithmetic.sizes(1, 1 / s, small=chain / s < TINY) for s in scales]
            flat = [
                v + self.network.error(Error(part, lost + moved, [(ONE, v)], ZERO))
                for v, (part, lost) in zip(z.ravel(), sizes, strict=True)
            ]
            z = shaped(flat, x.shape)
        r = self.network.activation(name, z, ONE, Round())
        r = self.network.activation(name, r + (p - a), ZERO)
        r = self.network.activation(name, r * -ONE + (b - a), ZERO)
        return r * -ONE + b

    def _dequantised(
        self, node: onnx.NodeProto, attributes: dict[str, Any], q: Any, scale: Any, zero: Any = None
    ) -> np.ndarray:
        source = node.input[0]
        kind = self.quantised.get(source, q.dtype.name)
        if kind not in (*WHOLE, "int32") or (zero is not None and zero.dtype.name != kind):
            raise Unsupported(f"whole numbers of {kind}, or a zero point of another type")
        q = q if source in self.quantised else exact(q)
        p = ZERO if zero is None else self._along(zero, q, attributes)
        sigma = self._along(scale, q, attributes)
        if self.arithmetic is None or not varies(q):
            return (q - p) * sigma
        rows = [Form({i: s}) for i, s in enumerate(np.broadcast_to(np.asarray(sigma, object), q.shape).ravel())]
        found, self.sums[node.output[0]] = self._off_by_sums(rows, list((q - p).ravel()), [])
        return shaped(found, q.shape)


def _value(network: Network, kind: str, name: str, attributes: dict[str, Any], given: list[Any]) -> Any:
    """What a node computes: an object array of forms and fractions, or a constant as it is stored."""
    if kind == "Constant":
        return numpy_helper.to_array(attributes["value"])
    if kind == "Reshape":
        sizes = [given[0].shape[i] if size == 0 else int(size) for i, size in enumerate(given[1].tolist())]
        return given[0].reshape(sizes)
    if kind in ("Squeeze", "Unsqueeze"):
        axes = given[1].tolist() if len(given) > 1 else attributes.get("axes")
        return np.expand_dims(given[0], axes) if kind == "Unsqueeze" else np.squeeze(given[0], axes and tuple(axes))
    if kind in EVALUATED:
        return _evaluated(kind, attributes, given)
    a, *others = [v if v is None or v.dtype == object else exact(v) for v in given]
    match kind:
        case "Pad":
            sizes = [int(size) for size in given[1].tolist()]
            for axis in range(a.ndim):
                first, last, count = sizes[axis], sizes[a.ndim + axis], a.shape[axis]
                places = range(max(0, -first), max(0, count + min(0, last)))
                ends = [np.full((*a.shape[:axis], max(0, n), *a.shape[axis + 1 :]), ZERO) for n in (first, last)]
                a = np.concatenate([ends[0], a.take(places, axis), ends[1]], axis)
            return a
        case "Upsample":
            for axis, factor in enumerate(exact(others[0]).ravel()):
                a = np.repeat(a, int(factor), axis)
            return a
        case "Relu" | "Abs":
            return network.activation(name, a, ZERO if kind == "Relu" else -ONE)
        case "Round" | "Sign":
            return network.activation(name, a, ONE, Round() if kind == "Round" else Sign())
        case "LeakyRelu":
            return network.activation(name, a, Fraction(attributes.get("alpha", float(np.float32(0.01)))))
        case "PRelu":
            return network.activation(name, a, others[0])
        case "MaxPool":
            return _tournament(network, name, a, attributes)
    raise Unsupported(kind)


def _evaluated(kind: str, attributes: dict[str, Any], given: list[Any]) -> np.ndarray:
    """What an affine operator computes by the standard (``onnx_exact``), of forms in the place of numbers."""
    _need_plain(attributes)
    texts = {key: value.decode() if isinstance(value, bytes) else value for key, value in attributes.items()}
    numbers = [None if v is None else v if v.dtype == object else exact(v) for v in given]
    values = [None if v is None else onnx_exact.Value(v, onnx.TensorProto.FLOAT, constant=False) for v in numbers]
    try:
        return np.asarray(getattr(STANDARD, f"op_{kind}")(texts, *values), object)
    except onnx_exact.UnknownOperatorError as error:
        raise Unsupported(f"{kind}: {error}") from None


def _need_plain(attributes: dict[str, Any]) -> None:
    odd = attributes.get("auto_pad", b"NOTSET") != b"NOTSET"
    if odd or attributes.get("ceil_mode") or attributes.get("output_shape"):
        raise Unsupported("auto_pad, ceil_mode or output_shape")


def _windows(
    size: tuple[int, ...], kernel: tuple[int, ...], attributes: dict[str, Any]
) -> tuple[list[int], list[list[tuple[int, ...] | None]]]:
    """The numbers of windows, and in row-major order the places of each, those in the padding as None."""
    _need_plain(attributes)
    rank = len(size)
    strides, dilations = (attributes.get(key, [1] * rank) for key in ("strides", "dilations"))
    pads = attributes.get("pads", [0] * 2 * rank)
    covered = [size[i] + pads[i] + pads[rank + i] - dilations[i] * (kernel[i] - 1) - 1 for i in range(rank)]
    counts = [covered[i] // strides[i] + 1 for i in range(rank)]

    def place(out: tuple[int, ...], inside: tuple[int, ...]) -> tuple[int, ...] | None:
        found = tuple(out[i] * strides[i] - pads[i] + inside[i] * dilations[i] for i in range(rank))
        return found if all(0 <= p < n for p, n in zip(found, size, strict=True)) else None

    return counts, [[place(out, k) for k in product(*map(range, kernel))] for out in product(*map(range, counts))]


def _tournament(network: Network, name: str, x: np.ndarray, attributes: dict[str, Any]) -> np.ndarray:
    """A MaxPool as rounds of pairs."""
    kernel = tuple(attributes["kernel_shape"])
    counts, windows = _windows(x.shape[2:], kernel, attributes)
    rivals = [[x[(0, c, *at)] for at in places if at is not None] for c in range(x.shape[1]) for places in windows]
    first, most = rivals, math.prod(kernel)
    while most > 1:
        pairs = most // 2
        z = [
            (window[2 * p + 1] - window[2 * p]) if 2 * p + 1 < len(window) else -ONE
            for p in range(pairs)
            for window in rivals
        ]
        r = network.activation(name, shaped(z, (len(z),)), ZERO)
        on = []
        for number, window in enumerate(rivals):
            met = [window[2 * p] + r[p * len(rivals) + number] for p in range(len(window) // 2)]
            on.append(met + window[2 * len(met) :])
        rivals, most = on, most - pairs
    if math.prod(kernel) > 1:
        rivals = [[network.maximum(name, *each)] for each in zip(first, (made for (made,) in rivals), strict=True)]
    return shaped([value for (value,) in rivals], (1, x.shape[1], *counts))
