"""Networks as ``docs/certificates.md`` counts them, written from that page alone.

The network is a list of *atoms*: the inputs, the values that sums of products make, the neurons' values r, and maxima.
Each but an input is defined by earlier atoms, so that rule 1 replaces them from the last to the first, and interval
arithmetic goes from the first to the last. It imports nothing of the package and computes in rational numbers. It knows
no quantised numbers, no GELU that is spelled out, Round and Sign, families, arithmetics, nor two networks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from tests.soundness import onnx_exact
from tests.soundness.page_functions import ONE, ZERO, Kinked, Smooth, root


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

    def put(self, factor: Fraction, other: Form | Fraction) -> Form:
        """Add factor·other to this form; returned."""
        if not isinstance(other, Form):
            self.constant += factor * other
            return self
        self.constant += factor * other.constant
        for atom, value in other.terms.items():
            self.terms[atom] = self.terms.get(atom, ZERO) + factor * value
            if not self.terms[atom]:
                del self.terms[atom]
        return self

    def copy(self) -> Form:
        return Form(dict(self.terms), self.constant)

    def __add__(self, other: Form | Fraction) -> Form:
        return self.copy().put(ONE, other)

    def __mul__(self, factor: Fraction) -> Form:
        if isinstance(factor, Form):
            raise Unsupported("a product of values")
        return Form().put(factor, self) if factor else Form()

    __radd__, __rmul__ = __add__, __mul__

    def __truediv__(self, divisor: Fraction | int) -> Form:
        if isinstance(divisor, Form):
            raise Unsupported("a quotient of values")
        return self * (ONE / divisor)

    def __rtruediv__(self, _: Fraction) -> Form:
        raise Unsupported("a quotient of values")

    def __neg__(self) -> Form:
        return self * -ONE

    def __sub__(self, other: Form | Fraction) -> Form:
        return self + other * -ONE

    def __rsub__(self, other: Fraction) -> Form:
        return self * -ONE + other


@dataclass
class Atom:
    """A value: affine (``form``), a neuron's value (``function`` of atom ``z``), or a maximum (of ``rivals``).

    Attributes:
        noise: an affine value may be off by this part of Σ |w|·|x|.
        twin: an atom of the same value, of which intervals say more.
        activation: the number of a neuron's activation.
    """

    form: Form | None = None
    noise: Fraction = ZERO
    function: Kinked | Smooth | None = None
    z: int = -1
    rivals: list[int] = field(default_factory=list)
    activation: int = -1
    twin: int = -1


@dataclass
class Activation:
    """Atoms z and r of the neurons; of a maximum ``r`` has a value for each window, and z all entries of its input."""

    z: list[int]
    r: list[int]
    is_maximum: bool = False


@dataclass
class Network:
    """Atoms, the first of which are the inputs, activations as they are counted, and outputs."""

    inputs: int
    atoms: list[Atom] = field(default_factory=list)
    activations: list[Activation] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    has_tournaments: bool = False

    def add(self, atom: Atom) -> Form:
        self.atoms.append(atom)
        return Form({len(self.atoms) - 1: ONE})

    def atom_of(self, value: Form | Fraction) -> int:
        """Return the atom that a value is, or a new affine one."""
        if isinstance(value, Form) and not value.constant and list(value.terms.values()) == [ONE]:
            return next(iter(value.terms))
        self.add(Atom(form=value if isinstance(value, Form) else Form(constant=value)))
        return len(self.atoms) - 1

    def activation(self, z: np.ndarray, functions: Iterable[Kinked | Smooth]) -> np.ndarray:
        """Count an activation; its values."""
        number = len(self.activations)
        before = [self.atom_of(value) for value in z.ravel()]
        made = [
            self.add(Atom(function=f, z=atom, activation=number)) for f, atom in zip(functions, before, strict=True)
        ]
        self.activations.append(Activation(before, [next(iter(form.terms)) for form in made]))
        return shaped(made, z.shape)


def with_tournaments(net: Network) -> tuple[Network, list[int], list[int]]:
    """Return the network in which maxima are tournaments, the atoms there of each value, and activations' numbers."""
    new, place, numbers = Network(net.inputs, has_tournaments=True), list[int](), list[int]()
    while len(place) < len(net.atoms):
        atom = net.atoms[len(place)]
        if atom.activation < 0:
            form = atom.form and Form({place[k]: c for k, c in atom.form.terms.items()}, atom.form.constant)
            new.add(replace(atom, form=form))
            place.append(len(new.atoms) - 1)
            continue
        old, number, made = net.activations[atom.activation], len(new.activations), list[int]()
        numbers.append(number)
        for one in (net.atoms[r] for r in old.r):
            rivals = [place[k] for k in one.rivals]
            new.add(replace(one, z=-1 if old.is_maximum else place[one.z], rivals=rivals, activation=number))
            made.append(len(new.atoms) - 1)
        new.activations.append(Activation([place[z] for z in old.z], made, old.is_maximum))
        place += _play(new, made) if old.is_maximum else made
    new.outputs = [place[k] for k in net.outputs]
    return new, place, [*numbers, len(new.activations)]


def _play(net: Network, windows: list[int]) -> list[int]:
    """Add the rounds of a maximum, and return the last winners."""

    def added(atom: Atom) -> int:
        net.add(atom)
        return len(net.atoms) - 1

    rivals = [net.atoms[k].rivals for k in windows]
    entries, most = net.activations[-1].z, max(map(len, rivals))
    left = [[*mine, *[mine[0]] * (most - len(mine))] for mine in rivals]
    while len(left[0]) > 1:
        half, number, best = (len(left[0]) + 1) // 2, len(net.activations), windows
        pairs = [(mine[i], mine[len(mine) - half + i]) for i in range(half) for mine in left]
        if half > 1:
            best = [added(Atom(rivals=[a, b], activation=number)) for a, b in pairs]
            net.activations.append(Activation(entries, best, is_maximum=True))
            number += 1
        gaps = [added(Atom(form=Form({b: ONE}) - Form({a: ONE}))) for a, b in pairs]
        relus = [added(Atom(function=Kinked(ZERO), z=gap, activation=number)) for gap in gaps]
        net.activations.append(Activation(gaps, relus))
        sums = [Form({a: ONE, relu: ONE}) for (a, _), relu in zip(pairs, relus, strict=True)]
        entries = [added(Atom(form=form, twin=twin)) for form, twin in zip(sums, best, strict=True)]
        left = [entries[window :: len(windows)] for window in range(len(windows))]
    return entries


def shaped(values: list[Any], shape: tuple[int, ...]) -> np.ndarray:
    """Return an array of forms."""
    found = np.empty(len(values), object)
    found[:] = values
    return found.reshape(shape)


def varies(array: np.ndarray) -> bool:
    """Return True if a value depends on the input."""
    return any(isinstance(value, Form) for value in array.flat)


HEADS = ("Sigmoid", "Tanh", "Erf", "Exp", "Atan", "Asinh", "Softplus", "Softsign", "Softmax", "LogSoftmax")
MOVES = (
    "Concat", "Dropout", "Flatten", "Gather", "Identity", "Pad", "Reshape", "Slice", "Squeeze", "Transpose",
    "Unsqueeze",
)  # fmt: skip
SUMS = (
    "Add",
    "AveragePool",
    "Conv",
    "ConvTranspose",
    "Div",
    "Gemm",
    "GlobalAveragePool",
    "MatMul",
    "Mul",
    "Neg",
    "Sub",
)


def read_network(data: bytes, headless: bool = False) -> Network:
    """Return the network of an ONNX file; ``headless``: without its head."""
    graph = (model := onnx.load_from_string(data)).graph
    stored = {tensor.name: tensor for tensor in graph.initializer}
    (given,) = [info for info in graph.input if info.name not in stored]
    shape = tuple(dim.dim_value or 1 for dim in given.type.tensor_type.shape.dim)
    network = Network(math.prod(shape))
    reader = _Reader(network, model)
    reader.values = {name: reader.stored(numpy_helper.to_array(tensor)) for name, tensor in stored.items()}
    reader.values[given.name] = shaped([network.add(Atom()) for _ in range(network.inputs)], shape)
    makers = {name: node for node in graph.node for name in node.output}
    output = graph.output[0].name
    while headless and output in makers and makers[output].op_type in HEADS:
        output = makers[output].input[0]
    needed, stack = set(), [output]
    while stack:
        node = makers.get(stack.pop())
        if node is not None and node.output[0] not in needed:
            needed.add(node.output[0])
            stack += node.input
    for node in graph.node:
        if node.output[0] in needed:
            reader.read(node)
    network.outputs = [network.atom_of(value) for value in reader.values[output].ravel()]
    return network


class _Reader:
    """The values of a graph by their names: arrays of forms, fractions, integers or truth values."""

    def __init__(self, network: Network, model: onnx.ModelProto) -> None:
        self.network, self.standard = network, onnx_exact.Evaluator(model)
        self.values: dict[str, Any] = {}
        self.scaled: dict[str, tuple[np.ndarray, Fraction]] = {}  # products with scalars, as value and factor

    def stored(self, array: np.ndarray) -> np.ndarray:
        if array.dtype.kind != "f":
            return onnx_exact.objects(array, lambda v: v)
        if not np.isfinite(array).all() and array.size > 1:
            raise Unsupported("numbers that are not finite")
        return onnx_exact.objects(array, lambda v: Fraction(v) if math.isfinite(v) else v)

    def read(self, node: onnx.NodeProto) -> None:
        """Compute what a node computes."""
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        attributes = {key: value.decode() if isinstance(value, bytes) else value for key, value in attributes.items()}
        given, name, kind = [self.values[name] if name else None for name in node.input], node.output[0], node.op_type
        computed = [v is not None and varies(v) for v in given]
        if kind == "Constant":
            self.values[name] = self.stored(numpy_helper.to_array(attributes["value"]))
            return
        if not any(computed):
            self.values[name] = self._standard(kind, attributes, given)
            return
        self._scale(node, given)
        if kind in SUMS:
            made = self._standard(kind, attributes, given)
            self.values[name] = self._affine(made)
        elif kind in MOVES:
            self.values[name] = self._standard(kind, attributes, given)
        elif kind == "BatchNormalization":
            self.values[name] = self._normalised(attributes, *given)
        else:
            self.values[name] = self._activation(node, attributes, *given)

    def _affine(self, values: np.ndarray, noise: Fraction = ZERO) -> np.ndarray:
        """Return new atoms for what an operator has summed."""
        made = [self.network.add(Atom(form=v, noise=noise)) if isinstance(v, Form) else v for v in values.ravel()]
        return shaped(made, values.shape)

    def _standard(self, kind: str, attributes: dict[str, Any], given: list[Any]) -> np.ndarray:
        """Return what an operator computes by the standard (``onnx_exact``), of forms in the place of numbers."""
        if (kind == "AveragePool" and attributes.get("ceil_mode")) or attributes.get("output_shape"):
            raise Unsupported("ceil_mode or output_shape")
        if kind == "ConvTranspose" and attributes.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
            raise Unsupported("auto_pad of a ConvTranspose")
        values = [None if v is None else onnx_exact.Value(v, onnx.TensorProto.FLOAT, constant=False) for v in given]
        try:
            made = getattr(self.standard, f"op_{kind}")(attributes, *values)
        except (onnx_exact.UnknownOperatorError, AttributeError) as error:
            raise Unsupported(f"{kind}: {error}") from None
        made = made[0] if isinstance(made, tuple) else made
        return made if isinstance(made, np.ndarray) else shaped([made], ())

    def _activation(self, node: onnx.NodeProto, attributes: dict[str, Any], x: np.ndarray, *others: Any) -> np.ndarray:
        count, kind = x.size, node.op_type
        functions: list[Kinked | Smooth]
        match kind:
            case "Relu" | "Abs":
                functions = [Kinked(ZERO if kind == "Relu" else -ONE)] * count
            case "LeakyRelu":
                functions = [Kinked(Fraction(attributes.get("alpha", float(np.float32(0.01)))))] * count
            case "PRelu":
                functions = [Kinked(s) for s in np.broadcast_to(others[0], x.shape).ravel()]
            case "Sigmoid" | "Tanh":
                functions = [Smooth(kind)] * count
            case "Gelu":
                if attributes.get("approximate", "none") != "none":
                    raise Unsupported("a GELU by a hyperbolic tangent")
                x, factor = self.scaled.get(node.input[0], (x, ONE))
                if not Fraction(1, 2**40) <= factor <= 2**40:
                    raise Unsupported("a GELU of such a multiple")
                r = self.network.activation(x, [Smooth("Gelu", factor * root(Fraction(1, 2)))] * count)
                return self._affine(r * factor) if factor != 1 else r
            case "MaxPool":
                return self._maxima(x, attributes)
            case _:
                raise Unsupported(kind)
        return self.network.activation(x, functions)

    def _maxima(self, x: np.ndarray, attributes: dict[str, Any]) -> np.ndarray:
        """MaxPool: a maximum of each window; of windows of one entry, that entry."""
        kernel = tuple(attributes["kernel_shape"])
        strides, dilations, first, _, sizes = self.standard.windows(attributes, x.shape[2:], kernel)
        windows, network = [], self.network
        for at in np.ndindex(x.shape[1], *sizes):
            corner = [p * s - f for p, s, f in zip(at[1:], strides, first, strict=True)]
            offsets = (np.multiply(offset, dilations) for offset in np.ndindex(*kernel))
            places = [[int(v) for v in offset + corner] for offset in offsets]
            inside = [p for p in places if all(0 <= i < n for i, n in zip(p, x.shape[2:], strict=True))]
            windows.append([x[(0, at[0], *p)] for p in inside])
        most = max(map(len, windows))
        if most > 1:
            rivals = [[network.atom_of(value) for value in window] for window in windows]
            number, entries = len(network.activations), [network.atom_of(value) for value in x.ravel()]
            values = [network.add(Atom(rivals=mine, activation=number)) for mine in rivals]
            network.activations.append(Activation(entries, [next(iter(v.terms)) for v in values], is_maximum=True))
        else:
            values = [value for (value,) in windows]
        return shaped(values, (1, x.shape[1], *sizes))

    def _normalised(self, attributes: dict[str, Any], x: np.ndarray, *stored: np.ndarray) -> np.ndarray:
        epsilon = Fraction(attributes.get("epsilon", float(np.float32(1e-5))))
        factor, bias, mean, variance = (v.reshape(-1, *[1] * (x.ndim - 2)) for v in stored)
        roots = shaped([root(v + epsilon) for v in variance.ravel()], variance.shape)
        exact = all(r * r == v + epsilon for r, v in zip(roots.ravel(), variance.ravel(), strict=True))
        return self._affine((x - mean) * (factor / roots) + bias, ZERO if exact else Fraction(1, 10**50))

    def _scale(self, node: onnx.NodeProto, given: list[Any]) -> None:
        """Note a product of a computed value with a scalar, or its quotient; moves keep the note."""
        if node.op_type in MOVES and node.op_type not in ("Concat", "Pad") and node.input[0] in self.scaled:
            x, factor = self.scaled[node.input[0]]
            attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
            self.scaled[node.output[0]] = self._standard(node.op_type, attributes, [x, *given[1:]]), factor
        if node.op_type not in ("Mul", "Div"):
            return
        places = [i for i, value in enumerate(given) if not varies(value) and value.size == 1]
        if len(places) == 1 and (node.op_type == "Mul" or places == [1]):
            number, source = given[places[0]].ravel()[0], 1 - places[0]
            x, factor = self.scaled.get(node.input[source], (given[source], ONE))
            self.scaled[node.output[0]] = x, factor * number if node.op_type == "Mul" else factor / number
