"""A checker of certificates, written from ``docs/certificates.md`` alone, in rational arithmetic throughout.

It knows dense networks and small convolutions with piecewise-linear activations and MaxPool, and properties in VNN-LIB
1.0; of the rest it says ``Unsupported``. It imports nothing of the package, is slow, and rounds nowhere: what it
accepts is a proof by the page's own words. The project's checker is compared with it.

The network is taken apart into *neurons*. A value is a ``Form``: a constant and coefficients of *atoms*. Atoms are the
inputs (0, 1, …), and behind them the neurons' values r in the order in which they are counted. Hence a neuron's z is a
form of earlier atoms, and the page's walk replaces the atoms of a form, from the last neuron to the first.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise, product
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

ZERO, ONE = Fraction(0), Fraction(1)


class Refused(Exception):
    """The certificate proves nothing by what the page says."""


class Unsupported(Exception):
    """This checker does not know the network, the property or the kind of certificate."""


def need(holds: bool, what: str) -> None:
    if not holds:
        raise Refused(what)


# ---------------------------------------------------------------------------------------------------------- networks


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
class Network:
    """Neurons by activation, and outputs.

    Attributes:
        names: of the activations' outputs.
        members: the numbers of each activation's neurons.
        z: the neurons' inputs.
        s: their slopes below zero.
        maxima: of each maximum its number, its MaxPool's name and its rivals. It counts as a neuron whose value is
            its input, what the tournament makes, and which no activation has.
    """

    inputs: int
    outputs: list[Form] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    members: list[range] = field(default_factory=list)
    z: list[Form] = field(default_factory=list)
    s: list[Fraction] = field(default_factory=list)
    maxima: dict[int, tuple[str, list[Form]]] = field(default_factory=dict)

    def maximum(self, name: str, rivals: list[Form], made: Form) -> Form:
        """Count a maximum; its value."""
        self.maxima[len(self.z)] = name, rivals
        self.z.append(made)
        self.s.append(ONE)
        return Form({self.inputs + len(self.z) - 1: ONE})

    def activation(self, name: str, z: np.ndarray, s: np.ndarray) -> np.ndarray:
        """Count an activation; its values."""
        first = len(self.z)
        self.z += [value if isinstance(value, Form) else Form(constant=value) for value in z.ravel()]
        self.s += list(s.ravel())
        self.names.append(name)
        self.members.append(range(first, len(self.z)))
        values = np.empty(z.size, object)
        values[:] = [Form({self.inputs + k: ONE}) for k in self.members[-1]]
        return values.reshape(z.shape)


def exact(array: np.ndarray) -> np.ndarray:
    """The same numbers as fractions."""
    if not np.isfinite(array).all():
        raise Unsupported("a number that is not finite")
    found = np.empty(array.size, object)
    found[:] = [Fraction(value) for value in array.ravel().tolist()]
    return found.reshape(array.shape)


def read_network(data: bytes) -> Network:
    """The network of an ONNX file."""
    model = onnx.load_from_string(data)
    graph = model.graph
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    (given,) = [info for info in graph.input if info.name not in stored]
    shape = [dim.dim_value or 1 for dim in given.type.tensor_type.shape.dim]
    network = Network(math.prod(shape))
    x = np.empty(network.inputs, object)
    x[:] = [Form({i: ONE}) for i in range(network.inputs)]
    values: dict[str, Any] = dict(stored)
    values[given.name] = x.reshape(shape)
    needed = {graph.output[0].name}
    for node in reversed(graph.node):
        if needed & set(node.output):
            needed |= set(node.input)
    for node in graph.node:
        if node.output[0] in needed:
            values[node.output[0]] = _value(network, node, [values[name] if name else None for name in node.input])
    network.outputs = [v if isinstance(v, Form) else Form(constant=v) for v in values[graph.output[0].name].ravel()]
    return network


def _value(network: Network, node: onnx.NodeProto, given: list[Any]) -> Any:
    """What a node computes: an object array of forms and fractions, or a constant as it is stored."""
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    name = node.output[0]
    if node.op_type == "Constant":
        return numpy_helper.to_array(attributes["value"])
    if node.op_type == "Reshape":
        sizes = [given[0].shape[i] if size == 0 else int(size) for i, size in enumerate(given[1].tolist())]
        return given[0].reshape(sizes)
    a, *others = [v if v is None or v.dtype == object else exact(v) for v in given]
    match node.op_type:
        case "Identity":
            return a
        case "Flatten":
            return a.reshape(math.prod(a.shape[: attributes.get("axis", 1)]), -1)
        case "Transpose":
            return a.transpose(attributes.get("perm"))
        case "Add":
            return a + others[0]
        case "Sub":
            return a - others[0]
        case "Mul":
            return a * others[0]
        case "MatMul":
            return a @ others[0]
        case "Gemm":
            alpha, beta = (Fraction(attributes.get(key, 1.0)) for key in ("alpha", "beta"))
            a = a.T if attributes.get("transA") else a
            b = others[0].T if attributes.get("transB") else others[0]
            return (a @ b) * alpha + (others[1] * beta if len(others) > 1 else ZERO)
        case "Relu" | "Abs":
            return network.activation(name, a, np.full(a.shape, ZERO if node.op_type == "Relu" else -ONE, object))
        case "LeakyRelu":
            return network.activation(
                name, a, np.full(a.shape, Fraction(attributes.get("alpha", float(np.float32(0.01)))), object)
            )
        case "PRelu":
            return network.activation(name, a, np.broadcast_to(others[0], a.shape))
        case "Conv":
            return _convolution(a, attributes, *others)
        case "MaxPool":
            return _tournament(network, name, a, attributes)
    raise Unsupported(node.op_type)


def _windows(size: tuple[int, ...], kernel: tuple[int, ...], attributes: dict[str, Any]) -> Iterator[list[tuple]]:
    """The places of each window of a plane, those in the padding as None; windows in row-major order."""
    if attributes.get("auto_pad", b"NOTSET") != b"NOTSET" or attributes.get("ceil_mode"):
        raise Unsupported("auto_pad or ceil_mode")
    rank = len(size)
    strides, dilations = (attributes.get(key, [1] * rank) for key in ("strides", "dilations"))
    pads = attributes.get("pads", [0] * 2 * rank)
    counts = [
        (size[i] + pads[i] + pads[rank + i] - dilations[i] * (kernel[i] - 1) - 1) // strides[i] + 1 for i in range(rank)
    ]
    for out in product(*map(range, counts)):
        places = []
        for inside in product(*map(range, kernel)):
            place = tuple(out[i] * strides[i] - pads[i] + inside[i] * dilations[i] for i in range(rank))
            places.append(place if all(0 <= p < n for p, n in zip(place, size, strict=True)) else None)
        yield places


def _counts(size: tuple[int, ...], kernel: tuple[int, ...], attributes: dict[str, Any]) -> list[int]:
    rank = len(size)
    strides, dilations = (attributes.get(key, [1] * rank) for key in ("strides", "dilations"))
    pads = attributes.get("pads", [0] * 2 * rank)
    return [
        (size[i] + pads[i] + pads[rank + i] - dilations[i] * (kernel[i] - 1) - 1) // strides[i] + 1 for i in range(rank)
    ]


def _convolution(x: np.ndarray, attributes: dict[str, Any], weight: np.ndarray, bias: Any = None) -> np.ndarray:
    """A convolution of (1, channels, …)."""
    size, kernel, per = x.shape[2:], weight.shape[2:], weight.shape[1]
    together = len(weight) // attributes.get("group", 1)
    found = []
    for channel in range(len(weight)):
        for places in _windows(size, kernel, attributes):
            total = Form(constant=ZERO if bias is None else bias[channel])
            for place, inside in zip(places, product(*map(range, kernel)), strict=True):
                for c in range(per if place is not None else 0):
                    total.put(weight[(channel, c, *inside)], x[(0, channel // together * per + c, *place)])
            found.append(total)
    values = np.empty(len(found), object)
    values[:] = found
    return values.reshape(1, len(weight), *_counts(size, kernel, attributes))


def _tournament(network: Network, name: str, x: np.ndarray, attributes: dict[str, Any]) -> np.ndarray:
    """A MaxPool as rounds of pairs."""
    kernel = tuple(attributes["kernel_shape"])
    size = x.shape[2:]
    rivals = [
        [x[(0, c, *place)] for place in places if place is not None]
        for c in range(x.shape[1])
        for places in _windows(size, kernel, attributes)
    ]
    first, most = rivals, math.prod(kernel)
    while most > 1:
        pairs = most // 2
        z = np.empty(pairs * len(rivals), object)
        z[:] = [
            (window[2 * p + 1] - window[2 * p]) if 2 * p + 1 < len(window) else -ONE
            for p in range(pairs)
            for window in rivals
        ]
        r = network.activation(name, z, np.full(z.shape, ZERO, object))
        on = []
        for number, window in enumerate(rivals):
            met = [window[2 * p] + r[p * len(rivals) + number] for p in range(len(window) // 2)]
            on.append(met + window[2 * len(met) :])
        rivals, most = on, most - pairs
    values = np.empty(len(rivals), object)
    values[:] = [
        network.maximum(name, window, made) if math.prod(kernel) > 1 else made
        for window, (made,) in zip(first, rivals, strict=True)
    ]
    return values.reshape(1, x.shape[1], *_counts(size, kernel, attributes))


# -------------------------------------------------------------------------------------------------------- properties

Row = tuple[dict[int, Fraction], Fraction]
"""Coefficients other than zero of outputs, and the most that their sum may be."""


@dataclass(frozen=True)
class Disjunct:
    """A box, its ends as they are written, and rows."""

    lower: list[Fraction]
    upper: list[Fraction]
    rows: list[Row]
    strict: list[bool]


def read_property(text: bytes) -> list[Disjunct]:
    """The disjuncts of a file in VNN-LIB 1.0."""
    words = re.findall(r"[()]|[^\s()]+", re.sub(r";[^\n]*", "", text.decode()))
    if "vnnlib-version" in words:
        raise Unsupported("VNN-LIB 2.0")
    stack: list[list[Any]] = [[]]
    for word in words:
        if word == "(":
            stack.append([])
        elif word == ")":
            closed = stack.pop()
            stack[-1].append(closed)
        else:
            stack[-1].append(word)
    names = [command[1] for command in stack[0] if command[0] == "declare-const"]
    inputs = sum(name.startswith("X_") for name in names)
    choices: list[list[list[Any]]] = [_expanded(command[1]) for command in stack[0] if command[0] == "assert"]
    found = []
    for chosen in product(*choices):
        if (one := _disjunct([atom for part in chosen for atom in part], inputs)) is not None:
            found.append(one)
    return found


def _expanded(formula: list[Any]) -> list[list[Any]]:
    """The alternatives of a formula, each a list of conditions."""
    if formula[0] == "or":
        return [one for part in formula[1:] for one in _expanded(part)]
    if formula[0] == "and":
        return [[a for part in chosen for a in part] for chosen in product(*map(_expanded, formula[1:]))]
    if formula[0] not in ("<=", ">=", "<", ">", "="):
        raise Unsupported(str(formula[0]))
    return [[formula]]


def _linear(term: Any) -> dict[str, Fraction]:
    """Coefficients by variable; the constant under the empty name."""
    if isinstance(term, str):
        return {term: ONE} if term[0] in "XY" else {"": Fraction(term)}
    operator, *rest = term
    parts = [_linear(part) for part in rest]
    found: dict[str, Fraction] = {}
    if operator == "*":
        factor = math.prod([part[""] for part in parts if set(part) == {""}], start=ONE)
        (others,) = [part for part in parts if set(part) != {""}] or [{"": ONE}]
        return {name: factor * value for name, value in others.items()}
    if operator == "/":
        return {name: value / parts[1][""] for name, value in parts[0].items()}
    for number, part in enumerate(parts):
        sign = -ONE if operator == "-" and (number or len(parts) == 1) else ONE
        for name, value in part.items():
            found[name] = found.get(name, ZERO) + sign * value
    return found


def _disjunct(conditions: list[Any], inputs: int) -> Disjunct | None:
    lower: list[Any] = [None] * inputs
    upper: list[Any] = [None] * inputs
    open_ends: set[tuple[int, bool]] = set()
    rows: list[Row] = []
    stricts: list[bool] = []
    for operator, left, right in conditions:
        for sign in {"=": (1, -1), "<": (1,), "<=": (1,), ">": (-1,), ">=": (-1,)}[operator]:
            strict = operator in "<>"
            total = {name: sign * value for name, value in _linear(["-", left, right]).items() if value}
            most = -total.pop("", ZERO)
            if not total:
                if not (most > 0 if strict else most >= 0):
                    return None
            elif all(name[0] == "Y" for name in total):
                rows.append(({int(name[2:]): value for name, value in sorted(total.items())}, most))
                stricts.append(strict)
            elif len(total) == 1 and next(iter(total))[0] == "X":
                ((name, value),) = total.items()
                i, end = int(name[2:]), most / value
                ends = upper if value > 0 else lower
                if ends[i] is None or (end < ends[i] if value > 0 else end > ends[i]):
                    ends[i] = end
                    open_ends.discard((i, value > 0))
                if strict and ends[i] == end:
                    open_ends.add((i, value > 0))
            else:
                raise Unsupported("a condition on several inputs")
    if None in lower or None in upper:
        raise Unsupported("an input without bounds")
    for i, (low, high) in enumerate(zip(lower, upper, strict=True)):
        if low > high or (low == high and open_ends & {(i, True), (i, False)}):
            return None
    return Disjunct(lower, upper, rows, stricts)


def outward(value: Fraction, up: bool) -> Fraction:
    """The nearest float64 that is not below (not above) a number."""
    near = float(value)
    if (Fraction(near) < value) if up else (Fraction(near) > value):
        near = math.nextafter(near, math.inf if up else -math.inf)
    return Fraction(near)


# ------------------------------------------------------------------------------------------------------ certificates


def binary(given: Any, count: int | None = None) -> list[Fraction]:
    """A list of binary numbers."""
    need(isinstance(given, list) and all(type(v) is int for v in given), "no list of binary numbers")
    exponent, *mantissas = given or [0]
    need(abs(exponent) <= 900 and all(abs(m) <= 1 << 53 for m in mantissas), "a binary number that is too large")
    need(count is None or len(mantissas) == count, f"{len(mantissas)} numbers for {count}")
    return [m * Fraction(2) ** exponent for m in mantissas]


def index(given: Any, count: int) -> int:
    """A number that counts something."""
    need(type(given) is int and 0 <= given < count, f"{given} is no number below {count}")
    return int(given)


def keys(record: Any, *wanted: str, perhaps: tuple[str, ...] = ()) -> None:
    """Refuse a record whose keys are others."""
    need(isinstance(record, dict) and set(wanted) <= set(record) <= {*wanted, *perhaps}, f"{wanted} are expected")


def read_records(data: bytes) -> list[dict[str, Any]]:
    """The records of a file."""
    unpacked = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        need(len(dict(pairs)) == len(pairs), "a key twice")
        return dict(pairs)

    try:
        found = [json.loads(line, object_pairs_hook=once) for line in unpacked.decode().splitlines()]
    except ValueError as error:
        raise Refused(f"no JSON: {error}") from None
    need(len(found) > 1 and all(isinstance(record, dict) for record in found), "no records")
    return found


def check(certificate: bytes, network: bytes, prop: bytes) -> str:
    """The claim of a certificate that holds.

    Raises:
        Refused: if the certificate proves nothing.
        Unsupported: if it is about something that this checker does not know.
    """
    found = read_records(certificate)
    first, last = found[0], found[-1]
    need(last == {"end": len(found) - 1} and type(last["end"]) is int, "no end")
    if "joint" in first:
        raise Unsupported("a family")
    keys(first, "certificate", "claim", "network", "property", "says")
    need(first["certificate"] == 4 and type(first["certificate"]) is int, "another version")
    need(first["network"] == hashlib.sha256(network).hexdigest(), "another network")
    need(first["property"] == hashlib.sha256(prop).hexdigest(), "another property")
    net, disjuncts = read_network(network), read_property(prop)
    if first["claim"] == "sat":
        need(len(found) == 3, "three records are expected")
        keys(found[1], "point")
        _reaches(net, disjuncts, found[1]["point"])
    else:
        need(first["claim"] == "unsat", "no claim")
        _Unsat(net, disjuncts, found[1:-1]).check()
    return str(first["claim"])


def _reaches(net: Network, disjuncts: list[Disjunct], point: Any) -> None:
    """Refuse a point that is no counterexample."""
    need(isinstance(point, list) and len(point) == net.inputs, "no point")
    x = [_rational(value) for value in point]
    atoms = list(x)
    for z, s in zip(net.z, net.s, strict=True):
        value = at(z, atoms)
        atoms.append(value if value >= 0 else s * value)
    y = [at(form, atoms) for form in net.outputs]
    for d in disjuncts:
        inside = all(low <= v <= high for low, v, high in zip(d.lower, x, d.upper, strict=True))
        totals = [(sum(c * y[i] for i, c in row.items()), most) for row, most in d.rows]
        if inside and all(t < m if s else t <= m for (t, m), s in zip(totals, d.strict, strict=True)):
            return
    raise Refused("the point is not unsafe")


def at(form: Form, atoms: list[Fraction]) -> Fraction:
    return form.constant + sum((c * atoms[k] for k, c in form.terms.items()), ZERO)


def _rational(given: Any) -> Fraction:
    need(isinstance(given, str), "no rational number")
    try:
        return Fraction(given)
    except (ValueError, ZeroDivisionError):
        raise Refused(f"{given!r} is no rational number") from None


Box = tuple[list[Fraction], list[Fraction]]


class _Unsat:
    """The parts of a certificate, record by record."""

    def __init__(self, net: Network, disjuncts: list[Disjunct], found: list[dict[str, Any]]) -> None:
        self.net, self.disjuncts, self.records, self.place = net, disjuncts, found, 0
        self.boxes: list[Box] = []
        self.box_of = []
        for d in disjuncts:
            box = [outward(v, False) for v in d.lower], [outward(v, True) for v in d.upper]
            if box not in self.boxes:
                self.boxes.append(box)
            self.box_of.append(self.boxes.index(box))

    def next(self) -> dict[str, Any]:
        need(self.place < len(self.records), "a record is missing")
        self.place += 1
        return self.records[self.place - 1]

    def coming(self, key: str) -> bool:
        return self.place < len(self.records) and key in self.records[self.place]

    def check(self) -> None:
        """Refuse what does not prove that no disjunct is reached."""
        parts: list[tuple[int, list[list[Row]]]] = []
        while self.place < len(self.records):
            record = self.next()
            keys(record, "part")
            keys(record["part"], "box", "polytopes")
            box = index(record["part"]["box"], len(self.boxes))
            need(isinstance(record["part"]["polytopes"], list), "no polytopes")
            polytopes = [self.polytope(given) for given in record["part"]["polytopes"]]
            parts.append((box, polytopes))
            self.cover(self.boxes[box], polytopes)
        for d, box in zip(self.disjuncts, self.box_of, strict=True):
            need(
                any(
                    number == box and all(any(_multiple(row, r) for r in d.rows) for row in polytope)
                    for number, polytopes in parts
                    for polytope in polytopes
                ),
                "a disjunct is not covered",
            )

    def polytope(self, given: Any) -> list[Row]:
        need(isinstance(given, list), "no polytope")
        found = []
        for row in given:
            keys(row, "y", "most")
            need(isinstance(row["y"], list) and all(isinstance(t, list) and len(t) == 2 for t in row["y"]), "no row")
            terms = [(index(i, len(self.net.outputs)), _rational(c)) for i, c in row["y"]]
            need(all(a[0] < b[0] for a, b in pairwise(terms)), "outputs out of order")
            need(all(c for _, c in terms), "a coefficient of zero")
            found.append((dict(terms), _rational(row["most"])))
        return found

    def cover(self, box: Box, polytopes: list[list[Row]]) -> None:
        """Read a cover of a box, and all that belongs to it."""
        waiting = [box]
        while waiting:
            low, high = waiting.pop()
            record = self.next()
            if "halve" in record:
                keys(record, "halve")
                need(isinstance(record["halve"], list) and len(record["halve"]) == 3, "no halve")
                i, m, e = record["halve"]
                i, (middle,) = index(i, len(low)), binary([e, m])
                below, above = list(high), list(low)
                need(low[i] < middle < high[i], "a box that is not halved between its ends")
                below[i] = above[i] = middle
                waiting += [(above, high), (low, below)]
            elif "zonotope" in record:
                keys(record, "zonotope")
                need(isinstance(record["zonotope"], list), "no rows")
                need(len(record["zonotope"]) == len(polytopes), "a row for each polytope")
                over = Bounds.zonotope(self.net, (low, high))
                for number, polytope in zip(record["zonotope"], polytopes, strict=True):
                    g = self.integral(polytope[index(number, len(polytope))])
                    need(over.least(g, over.chord_slopes) > 0, "a row that the zonotope does not prove")
            else:
                keys(record, "root")
                need(
                    type(record["root"]) is int and record["root"] == len(self.net.names),
                    "another number of activations",
                )
                self.root((low, high), polytopes)

    def integral(self, row: Row) -> Form:
        """g of a row."""
        factor = Fraction(math.lcm(1, *(c.denominator for c in row[0].values())))
        form = Form(constant=-factor * row[1])
        for i, c in row[0].items():
            form.put(factor * c, self.net.outputs[i])
        return form

    def root(self, box: Box, polytopes: list[list[Row]]) -> None:
        over = Bounds(self.net, box)
        shared: dict[int, Fraction] = {}
        for number, name in enumerate(self.net.names):
            self.activation(over, number, name, shared)
            while self.coming("maximum"):
                self.maxima(over)
        for polytope in polytopes:
            while self.coming("tighter"):
                self.tighter(over)
            g = [self.integral(row) for row in polytope]
            record = self.next()
            if "plain" in record:
                keys(record, "plain", "slopes")
                mu = binary(record["plain"], len(g))
                need(all(m >= 0 for m in mu), "a negative multiplier")
                slopes = dict(zip(over.open(), binary(record["slopes"], len(over.open())), strict=True))
                need(over.least(_sum(mu, g), over.by_sign(slopes)) > 0, "a plain proof that fails")
            else:
                Tree(self, over, record, g).check()

    def activation(self, over: Bounds, number: int, name: str, shared: dict[int, Fraction]) -> None:
        """Bounds of an activation."""
        record = self.next()
        keys(record, "activation", "lower", "upper", "slopes")
        need(record["activation"] == name, "another activation")
        members = self.net.members[number]
        lower, upper = (binary(record[side], len(members)) for side in ("lower", "upper"))
        before = list(over.open())
        rows: dict[tuple[int, int], list[dict[int, Fraction]]] = {}
        while self.coming("row"):
            own = self.next()
            keys(own, "row", "slopes")
            need(isinstance(own["row"], list) and len(own["row"]) == 2, "no row")
            j, side = index(own["row"][0], len(members)), own["row"][1]
            need(side in (1, -1) and type(side) is int, "no side")
            slopes = dict(zip(before, binary(own["slopes"], len(before)), strict=True))
            rows.setdefault((j, side), []).append(slopes)
        for j, k in enumerate(members):
            for side, bound in ((1, lower[j]), (-1, -upper[j])):
                form = self.net.z[k] * Fraction(side)
                ways = [shared, *rows.get((j, side), [])]
                need(
                    over.interval(form) >= bound or any(over.least(form, over.by_sign(w)) >= bound for w in ways),
                    f"bound {side} of neuron {j} of {name}",
                )
        over.lower.update(zip(members, lower, strict=True))
        over.upper.update(zip(members, upper, strict=True))
        opened = [k for k in members if k in set(over.open())]
        shared.update(zip(opened, binary(record["slopes"], len(opened)), strict=True))

    def maxima(self, over: Bounds) -> None:
        """The entries by which the maxima of a MaxPool are bounded."""
        record = self.next()
        keys(record, "maximum", "below", "above")
        every = [k for k, (name, _) in self.net.maxima.items() if name == record["maximum"]]
        need(bool(every), "no maxima of this name")
        earlier = [k for members in self.net.members for k in members if k < every[0]]
        need(all(k in over.lower for k in earlier), "maxima before their activations")
        for side in ("below", "above"):
            need(isinstance(record[side], list) and len(record[side]) == len(every), "an entry for each maximum")
        for k, i, j in zip(every, record["below"], record["above"], strict=True):
            rivals = self.net.maxima[k][1]
            i, j = index(i, len(rivals)), index(j, len(rivals))
            low, high = over.interval(rivals[j]), [-over.interval(rival * -ONE) for rival in rivals]
            t = max([low, *high[:j], *high[j + 1 :]])
            s = (high[j] - t) / (high[j] - low) if high[j] > low and high[j] > t else ZERO
            over.windows[k] = rivals[i], rivals[j] * s + max(t - s * low, high[j] - s * high[j])

    def tighter(self, over: Bounds) -> None:
        """Tighter bounds of an activation."""
        record = self.next()
        keys(record, "tighter", "rows", "least", "tree", "neurons", "chords")
        number = index(record["tighter"], len(self.net.members))
        members = self.net.members[number]
        rows = record["rows"]
        need(isinstance(rows, list) and len(rows) % 2 == 0, "no rows")
        pairs = [(index(j, len(members)), side) for j, side in zip(rows[::2], rows[1::2], strict=True)]
        need(all(side in (1, -1) and type(side) is int for _, side in pairs), "no side")
        least = binary(record["least"], len(pairs))
        for (j, side), value in zip(pairs, least, strict=True):
            form = self.net.z[members[j]] * Fraction(side) - value
            tree = Tree(self, over, {key: record[key] for key in ("tree", "neurons", "chords")}, [form], members[0])
            tree.check()
        for (j, side), value in zip(pairs, least, strict=True):
            k = members[j]
            if side > 0:
                over.lower[k] = max(over.lower[k], value)
            else:
                over.upper[k] = min(over.upper[k], -value)


def _multiple(row: Row, of: Row) -> bool:
    """Whether a row is a positive multiple of another."""
    (terms, most), (others, limit) = row, of
    if not terms or terms.keys() != others.keys():
        return False
    i = next(iter(terms))
    factor = terms[i] / others[i]
    return factor > 0 and most == factor * limit and all(terms[i] == factor * others[i] for i in terms)


def _sum(factors: Iterable[Fraction], forms: Iterable[Form]) -> Form:
    total = Form()
    for factor, form in zip(factors, forms, strict=True):
        total.put(factor, form)
    return total


Choice = Callable[[int, Fraction], Fraction]
"""The slope of an open neuron, given the coefficient K that its value has."""


class Bounds:
    """A box, and bounds of neurons; those of later activations may be missing."""

    def __init__(self, net: Network, box: Box) -> None:
        self.net, self.box = net, box
        self.lower: dict[int, Fraction] = {}
        self.upper: dict[int, Fraction] = {}
        self.windows: dict[int, tuple[Form, Form]] = {}

    @classmethod
    def zonotope(cls, net: Network, box: Box) -> Bounds:
        """Each neuron's bounds are those of its form over the earlier ones' remainders, every slope the chord."""
        over = cls(net, box)
        for members in net.members:
            for k in members:
                over.lower[k] = over.least(net.z[k], over.chord_slopes)
                over.upper[k] = -over.least(net.z[k] * -ONE, over.chord_slopes)
        return over

    def open(self) -> list[int]:
        return [k for k in self.lower if self.is_open(k)]

    def is_open(self, k: int) -> bool:
        return k not in self.net.maxima and self.lower[k] < 0 < self.upper[k]

    def chord(self, k: int) -> Fraction:
        return (self.upper[k] - self.net.s[k] * self.lower[k]) / (self.upper[k] - self.lower[k])

    def chord_slopes(self, k: int, _: Fraction) -> Fraction:
        return self.chord(k)

    def by_sign(self, slopes: dict[int, Fraction]) -> Choice:
        """The certificate's slope or the chord, by the sign of the coefficient."""
        return lambda k, K: slopes[k] if (K >= 0) == (self.net.s[k] <= 1) else self.chord(k)

    def fixed(self, k: int) -> Fraction:
        """The slope of a neuron that is not open."""
        return ONE if k in self.net.maxima or self.lower[k] >= 0 else self.net.s[k]

    def value(self, k: int, z: Fraction) -> Fraction:
        """A neuron's value."""
        return z if z >= 0 else self.net.s[k] * z

    def ends(self, k: int) -> tuple[Fraction, Fraction]:
        """The least and the largest value of a neuron."""
        if k in self.net.maxima:
            made, rivals = self.net.z[k], self.net.maxima[k][1]
            low = max(self.interval(rival) for rival in rivals)
            high = max(-self.interval(rival * -ONE) for rival in rivals)
            return max(low, self.interval(made)), min(high, -self.interval(made * -ONE))
        values = [self.value(k, z) for z in (self.lower[k], self.upper[k])] + [ZERO] * self.is_open(k)
        return min(values), max(values)

    def interval(self, form: Form) -> Fraction:
        """A lower bound of a form by interval arithmetic over its atoms."""
        total = form.constant
        for atom, c in form.terms.items():
            low, high = self.ends(atom - self.net.inputs) if atom >= self.net.inputs else self.side(atom)
            total += min(c * low, c * high)
        return total

    def side(self, i: int) -> tuple[Fraction, Fraction]:
        return self.box[0][i], self.box[1][i]

    def least(self, form: Form, slope: Choice) -> Fraction:
        """The walk's lower bound of a form."""
        form = Form(dict(form.terms), form.constant)
        for k in range(len(self.net.z) - 1, -1, -1):
            K = form.terms.pop(self.net.inputs + k, ZERO)
            if not K:
                continue
            if k in self.windows:
                form.put(K, self.windows[k][K < 0])
            elif self.is_open(k):
                t = slope(k, K)
                form.put(K * t, self.net.z[k])
                form.constant += min(K * (self.value(k, z) - t * z) for z in (ZERO, self.lower[k], self.upper[k]))
            else:
                form.put(K * self.fixed(k), self.net.z[k])
        return self.interval(form)


@dataclass
class Plane:
    """r ≤ g·v + c, and how far below that r may be."""

    form: Form
    drop: Fraction


class Tree:
    """A proof by splits."""

    def __init__(
        self, reader: _Unsat, over: Bounds, record: dict[str, Any], g: list[Form], before: int | None = None
    ) -> None:
        keys(record, "tree", "neurons", "chords")
        self.reader, self.over, self.net, self.g = reader, over, over.net, g
        self.refining = before is not None
        opened = [k for k in over.open() if before is None or k < before]
        self.slopes = dict(zip(opened, binary(record["tree"], len(opened)), strict=True))
        self.neurons: list[int] = []
        need(isinstance(record["neurons"], list), "no neurons")
        for entry in record["neurons"]:
            need(isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], list), "no neurons")
            members = self.net.members[index(entry[0], len(self.net.members))]
            for j in entry[1]:
                k = members[index(j, len(members))]
                need(k in self.slopes and k not in self.neurons, "a neuron that is not open, or twice")
                self.neurons.append(k)
        need(isinstance(record["chords"], list), "no chords")
        self.chords = {self.neurons[index(j, len(self.neurons))] for j in record["chords"]}
        self.planes: dict[int, Plane] = {}
        terms: list[int] | None = None
        while before is None and reader.coming("plane"):
            terms = self.plane(reader.next(), terms)

    def plane(self, record: dict[str, Any], terms: list[int] | None) -> list[int]:
        """Read a plane; returns its terms as atoms."""
        keys(record, "plane", "parts", "bends", perhaps=("terms",))
        need(isinstance(record["plane"], list) and len(record["plane"]) == 2, "no plane")
        members = self.net.members[index(record["plane"][0], len(self.net.members))]
        k = members[index(record["plane"][1], len(members))]
        need(k in self.slopes and self.net.s[k] <= 1 and k not in self.planes, "a plane of such a neuron")
        opened = self.over.open()
        if "terms" in record:
            need(isinstance(record["terms"], list), "no terms")
            numbers = [index(i, self.net.inputs + len(opened)) for i in record["terms"]]
            n = self.net.inputs
            terms = [i if i < n else n + opened[i - n] for i in numbers]
            need(len(set(terms)) == len(terms), "a term twice")
        if terms is None:
            raise Refused("a plane without terms")
        need(all(atom < self.net.inputs + members[0] for atom in terms), "a term that is not before the neuron")
        parts = binary(record["parts"], len(terms))
        mu, nu = binary(record["bends"], 2)
        need(mu >= 0 and nu >= 0, "a negative bend")
        z = self.kept_open(self.net.z[k])
        g = Form({atom: p * z.terms[atom] for atom, p in zip(terms, parts, strict=True) if atom in z.terms})
        low, high, s = self.over.lower[k], self.over.upper[k], self.net.s[k]
        c = max(
            -self.over.interval(g - z * (1 - mu)) + mu * high,
            -self.over.interval(g - z * (s + nu)) - nu * low,
        )
        form = g + c
        drop = -self.over.interval(z * self.over.chord(k) - form)
        self.planes[k] = Plane(form, drop)
        return terms

    def kept_open(self, form: Form) -> Form:
        """The form over inputs and open neurons' values."""
        form = Form(dict(form.terms), form.constant)
        for k in range(len(self.net.z) - 1, -1, -1):
            if self.net.inputs + k in form.terms and not self.over.is_open(k):
                form.put(form.terms.pop(self.net.inputs + k) * self.over.fixed(k), self.net.z[k])
        return form

    def check(self) -> None:
        """Read the nodes, and refuse a leaf that proves nothing."""
        waiting: list[dict[int, int]] = [{}]
        while waiting:
            path = waiting.pop()
            record = self.reader.next()
            if "split" in record:
                keys(record, "split")
                if isinstance(record["split"], list):
                    raise Refused("a split of a curve")
                k = self.neurons[index(record["split"], len(self.neurons))]
                need(k not in path, "a neuron is split twice")
                waiting += [{**path, k: -1}, {**path, k: 1}]
            else:
                bound = self.leaf(record, path)
                need(bound > 0 or (self.refining and bound == 0), "a leaf that fails")

    def leaf(self, record: dict[str, Any], path: dict[int, int]) -> Fraction:
        """A lower bound of Σ μ·g below the splits of a path."""
        keys(record, "leaf", perhaps=() if self.refining else ("rows",))
        need(isinstance(record["leaf"], list) and len(record["leaf"]) % 2 == 1, "no leaf")
        places = record["leaf"][1::2]
        w = dict(
            zip(
                [self.neurons[index(j, len(self.neurons))] for j in places],
                binary([record["leaf"][0], *record["leaf"][2::2]]),
                strict=True,
            )
        )
        need(len(w) == len(places), "a multiplier twice")
        need("rows" in record or len(self.g) == 1, "no multipliers of rows")
        mu = binary(record["rows"], len(self.g)) if "rows" in record else [ONE]
        need(all(m >= 0 for m in mu), "a negative multiplier")
        form = _sum(mu, self.g)
        for k in range(len(self.net.z) - 1, -1, -1):
            K = form.terms.pop(self.net.inputs + k, ZERO)
            if k not in self.slopes:
                if K:
                    form.put(K * self.over.fixed(k), self.net.z[k])
                continue
            low, high = self.over.lower[k], self.over.upper[k]
            points = [ZERO, *([high] if path.get(k) != -1 else []), *([low] if path.get(k) != 1 else [])]
            given = w.get(k, ZERO)
            if k in self.planes:
                v = self.second(k, K, given, k in path, k in w)
                form.put(K + v, self.planes[k].form)
                form.constant += min(ZERO, -(K + v) * self.planes[k].drop)
                form.constant += min(-v * self.over.value(k, z) - given * z for z in points)
            else:
                t = self.slopes[k]
                if k in self.chords and k not in w and k not in path:
                    given = self.chorded(k, K, t)
                form.put(K * t, self.net.z[k])
                form.constant += min(K * (self.over.value(k, z) - t * z) - given * z for z in points)
            form.put(given, self.net.z[k])
        return self.over.interval(form)

    def chorded(self, k: int, K: Fraction, t: Fraction) -> Fraction:
        """The w of a neuron among ``chords``: it makes the slope that of the chord."""
        return K * (self.over.chord(k) - t) if (K < 0) != (self.net.s[k] > 1) else ZERO

    def second(self, k: int, K: Fraction, w: Fraction, is_split: bool, is_given: bool) -> Fraction:
        """The multiplier v of a neuron with a plane."""
        if k not in self.neurons:
            return ZERO
        if is_split:
            return -K
        if K >= 0:
            return -K if is_given or k in self.chords else ZERO
        return -w / self.over.chord(k) if self.over.chord(k) > 0 else ZERO
