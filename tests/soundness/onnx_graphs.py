"""Random ONNX files, as a compiler would be tested with random programs.

``graph(seed)`` makes one: small, over the operators, attributes and opsets 7 to 23 that the package reads, with what
makes readers err: values read by several nodes, second names of a value (an ``Identity`` and whatever else changes
nothing), unused nodes, an output that is read again or is a second name, constants in every form and computed from
others, initialisers that are inputs too, constants on either side, empty optional inputs, repeated node names.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FLOAT, DOUBLE, INT64 = TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.INT64
TYPES = {FLOAT: np.float32, DOUBLE: np.float64, INT64: np.int64}
OPSETS = range(7, 24)
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Tensor:
    """A value that depends on the network's input; ``batch``: its first axis is the batch axis, of size 1."""

    name: str
    shape: Shape
    kind: int
    batch: bool

    @property
    def rank(self) -> int:
        return len(self.shape)


@dataclass(frozen=True)
class Case:
    """A generated file and what it was made from."""

    seed: int
    model: onnx.ModelProto
    weights: str
    """dyadic (multiples of 1/8), gaussian or extreme (scales from 1e-30 to 1e30)."""

    @cached_property
    def data(self) -> bytes:
        return self.model.SerializeToString()

    @property
    def operators(self) -> Counter[str]:
        return Counter(node.op_type for node in self.model.graph.node)


class Draft:
    """A file under construction."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.seed = seed
        self.opset = self.rng.choice(OPSETS)
        self.kind = DOUBLE if self.chance(0.25) else FLOAT
        self.weights = self.rng.choices(("dyadic", "gaussian", "extreme"), (75, 17, 8))[0]
        self.batch = self.rng.choices(("symbolic", "one", "absent"), (5, 3, 2))[0]
        self.computed_weights = self.rng.choice((0.0, 0.0, 0.0, 0.2))
        self.ir_version = self.rng.choice((3, 4, 7, 8, 9, 10))
        self.spelling = self.rng.choice(("v{}", "{}", "/layer/{}/out", "x:{}", "größe {}"))
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.known: list[tuple[str, np.ndarray]] = []
        self.pool: list[Tensor] = []
        self.read: Counter[str] = Counter()
        self.names = 0
        self.input = self.start()

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    # Names, nodes

    def name(self) -> str:
        self.names += 1
        return self.spelling.format(self.names)

    def node(self, operator: str, inputs: Sequence[str], **attributes: object) -> str:
        """Append a node with one output and return the output's name."""
        output = self.name()
        label = self.rng.choice(("", "", f"n{len(self.nodes)}", f"/{operator}.{len(self.nodes)}"))
        if self.chance(0.003):
            label = "node"  # which onnxruntime refuses where two nodes have it
        self.nodes.append(helper.make_node(operator, list(inputs), [output], name=label or None, **attributes))
        self.read.update(inputs)
        return output

    def emit(
        self, operator: str, inputs: Sequence[str], of: Tensor, shape: Shape | None = None, **attributes: object
    ) -> Tensor:
        """Append a node whose output is a value of the network, of the shape of ``of`` unless another is given."""
        name = self.node(operator, inputs, **attributes)
        return self.keep(name, of, of.shape if shape is None else shape)

    def keep(self, name: str, of: Tensor, shape: Shape, *, kind: int = 0, batch: bool | None = None) -> Tensor:
        batch = of.batch and bool(shape) and shape[0] == 1 if batch is None else batch
        self.pool.append(Tensor(name, tuple(shape), kind or of.kind, batch))
        return self.pool[-1]

    def start(self) -> Tensor:
        """The network's input."""
        size = self.rng.randint
        shape = self.rng.choice(
            (
                (size(1, 6),),
                (size(2, 6),),
                (size(1, 3), size(1, 4)),
                (size(1, 3), size(2, 5), size(2, 5)),
                (2, size(3, 5), size(3, 5)),
            )
        )
        declared: list[object] = list(shape)
        if self.batch != "absent":
            declared = [self.rng.choice(("N", "batch", None)) if self.batch == "symbolic" else 1, *shape]
            shape = (1, *shape)
        elif shape[0] == 1:
            shape = (2, *shape[1:])
            declared[0] = 2
        name = self.rng.choice(("x", "input.1", "0", "X"))
        self.inputs.append(helper.make_tensor_value_info(name, self.kind, declared))
        self.pool.append(Tensor(name, shape, self.kind, self.batch != "absent"))
        return self.pool[-1]

    def pick(self, fits: Callable[[Tensor], bool] = lambda _: True) -> Tensor | None:
        """A value that an operator can read: mostly the last one, else any, which is then read more than once."""
        fitting = [t for t in self.pool if fits(t)]
        if not fitting:
            return None
        return fitting[-1] if self.chance(0.6) else self.rng.choice(fitting)

    # Constants

    def numbers(self, shape: Shape, kind: int, *, positive: bool = False) -> np.ndarray:
        count = math.prod(shape)
        draw = self.rng
        if self.weights == "dyadic":
            values = [draw.randint(1 if positive else -12, 12) / 8 for _ in range(count)]
        else:
            values = [draw.gauss(0, 1) for _ in range(count)]
            if self.weights == "extreme" and self.chance(0.5):
                scale = 10.0 ** draw.uniform(-30, 30)
                values = [value * scale for value in values]
            if positive:
                values = [abs(value) + 1e-3 for value in values]
        return np.array(values, dtype=TYPES[kind]).reshape(shape)

    def weight(self, shape: Shape, kind: int, *, positive: bool = False) -> str:
        """The name of a constant of random numbers; sometimes of one that is there already."""
        used = [
            n
            for n, a in self.known
            if a.shape == shape and a.dtype == TYPES[kind] and not (positive and (a <= 0).any())
        ]
        if used and self.chance(0.25):
            return self.rng.choice(used)
        array = self.numbers(shape, kind, positive=positive)
        name = self.constant(array)
        self.known.append((name, array))
        return name

    def integers(self, values: Sequence[int]) -> str:
        return self.constant(np.array(values, dtype=np.int64))

    def constant(self, array: np.ndarray) -> str:
        """The name of a constant with the given entries, stored, or computed without rounding from stored ones."""
        if self.chance(0.15 if array.dtype == np.int64 else self.computed_weights):
            computed = self.computed(array)
            if computed is not None:
                return computed
        return self.stored(array)

    def stored(self, array: np.ndarray) -> str:
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        if self.chance(0.7) or (self.opset < 9 and array.dtype.kind != "f"):
            name = self.name()
            tensor = numpy_helper.from_array(array, name)
            if self.chance(0.3):
                tensor = helper.make_tensor(name, kind, array.shape, array.reshape(-1).tolist())
            self.initializers.append(tensor)
            if self.ir_version == 3 or self.chance(0.1):
                place = self.rng.randint(0, len(self.inputs))
                self.inputs.insert(place, helper.make_tensor_value_info(name, kind, array.shape))
            return name
        forms = ["value"]
        if self.opset >= 12 and array.ndim <= 1 and array.size and kind in (FLOAT, INT64):
            forms.append("value_float" if kind == FLOAT else "value_int")
        if self.opset >= 11 and array.ndim in (1, 2) and array.dtype.kind == "f" and array.any() and self.chance(0.02):
            forms = ["sparse_value"]
        form = self.rng.choice(forms)
        if form == "value":
            return self.node("Constant", [], value=numpy_helper.from_array(array))
        if form == "sparse_value":
            places = np.flatnonzero(array).astype(np.int64)
            values = numpy_helper.from_array(array.reshape(-1)[places], "sparse")
            sparse = helper.make_sparse_tensor(values, numpy_helper.from_array(places, "places"), array.shape)
            return self.node("Constant", [], sparse_value=sparse)
        entries = array.tolist()
        return self.node("Constant", [], **{form + ("s" if array.ndim else ""): entries})

    def computed(self, array: np.ndarray) -> str | None:
        """A constant computed from others, without rounding, in a random way; None where that way does not fit."""
        real = array.dtype.kind == "f"
        way = self.rng.choice(("same", "axes", "join", "part", "pick", "filled", "cast", "negated", "sum", "product"))
        match way:
            case "same":
                return self.node("Identity", [self.stored(array)])
            case "axes" if array.ndim >= 2:
                perm = self.permutation(array.ndim)
                return self.node("Transpose", [self.stored(array.transpose(np.argsort(perm)))], perm=perm)
            case "axes":
                if array.ndim == 1 and array.size == 1 and array.dtype == np.int64:
                    return self.unsqueeze(self.stored(array.reshape(())), [0])
                shape = self.stored(np.array(array.shape, dtype=np.int64))
                return self.node("Reshape", [self.stored(array.reshape(1, -1)), shape])
            case "join" if array.ndim and array.shape[0] >= 2:
                parts = [self.stored(part) for part in np.split(array, [self.rng.randint(1, array.shape[0] - 1)])]
                return self.node("Concat", parts, axis=self.rng.choice((0, 0, -array.ndim if self.opset >= 11 else 0)))
            case "part" if array.ndim:
                first = self.stored(np.concatenate([array, array[:1]]) if array.size else array)
                return self.slice(first, 0, 0, array.shape[0])
            case "pick" if array.ndim:
                order = self.permutation(array.shape[0])
                indices = self.stored(np.array(order, dtype=np.int64))
                return self.node("Gather", [self.stored(array[np.argsort(order)]), indices], axis=0)
            case "filled" if self.opset >= 9 and array.size and (array == array.flat[0]).all():
                shape = self.stored(np.array(array.shape, dtype=np.int64))
                if self.chance(0.5):
                    return self.node("Expand", [self.stored(array.reshape(-1)[:1].reshape((1,) * array.ndim)), shape])
                value = numpy_helper.from_array(array.reshape(-1)[:1])
                return self.node("ConstantOfShape", [shape], value=value)
            case "cast" if real:
                other = np.float64 if array.dtype == np.float32 or self.weights != "dyadic" else np.float32
                to = helper.np_dtype_to_tensor_dtype(array.dtype)
                return self.node("Cast", [self.stored(array.astype(other))], to=to)
            case "negated" if real:
                return self.node("Neg", [self.stored(-array)])
            case "sum" if real and self.weights == "dyadic":
                part = self.numbers(array.shape, helper.np_dtype_to_tensor_dtype(array.dtype))
                operator = self.rng.choice(("Add", "Sub"))
                other = array - part if operator == "Add" else array + part
                return self.node(operator, [self.stored(other), self.stored(part)])
            case "product" if real and self.weights == "dyadic":
                operator = self.rng.choice(("Mul", "Div"))
                other = array / 2 if operator == "Mul" else array * 2
                return self.node(operator, [self.stored(other), self.stored(np.array(2, dtype=array.dtype))])
        return None

    # Forms that depend on the opset

    def permutation(self, size: int) -> list[int]:
        order = list(range(size))
        self.rng.shuffle(order)
        return order

    def axes(self, operator: str, name: str, axes: Sequence[int] | None) -> str:
        """Squeeze or Unsqueeze, its axes an attribute before opset 13 and an input from there on."""
        if axes is None:
            return self.node(operator, [name])
        if self.opset < 13:
            return self.node(operator, [name], axes=list(axes))
        return self.node(operator, [name, self.integers(axes)])

    def unsqueeze(self, name: str, axes: Sequence[int]) -> str:
        return self.axes("Unsqueeze", name, axes)

    def slice(self, name: str, axis: int, start: int, end: int) -> str:
        if self.opset < 10:
            return self.node("Slice", [name], starts=[start], ends=[end], axes=[axis])
        inputs = [name, *(self.integers([value]) for value in (start, end, axis))]
        return self.node("Slice", inputs + ([self.integers([1])] if self.chance(0.3) else []))

    def shape_of(self, value: Tensor, sizes: Sequence[int]) -> str:
        """A shape for Reshape; sometimes with its first size taken from a value's own, as exporters do."""
        if value.rank and sizes and sizes[0] == value.shape[0] and self.chance(0.2):
            whole = self.node("Shape", [value.name])
            first = self.node("Gather", [whole, self.stored(np.array(0, dtype=np.int64))], axis=0)
            parts = [self.unsqueeze(first, [0])] + ([self.integers(sizes[1:])] if len(sizes) > 1 else [])
            return self.node("Concat", parts, axis=0)
        return self.integers(sizes)

    def reshape(self, value: Tensor, shape: Shape, **keep: bool) -> Tensor:
        """Reshape to ``shape``, spelt with 0 and −1 in random places."""
        sizes = list(shape)
        attributes: dict[str, object] = {}
        if self.opset >= 14 and self.chance(0.2):
            attributes["allowzero"] = self.rng.choice((0, 1))
        if not attributes.get("allowzero"):
            for axis in range(min(value.rank, len(sizes))):
                if sizes[axis] == value.shape[axis] and self.chance(0.4):
                    sizes[axis] = 0
        first = value.batch and bool(sizes) and self.batch == "symbolic"
        if first and sizes[0] == 1 and self.chance(0.8):
            sizes[0] = -1
        elif sizes and self.chance(0.6):
            sizes[self.rng.randrange(1 if first and len(sizes) > 1 else 0, len(sizes))] = -1
        name = self.node("Reshape", [value.name, self.shape_of(value, sizes)], **attributes)
        return self.keep(name, value, shape)

    def finish(self, output: Tensor) -> onnx.ModelProto:
        declared = output.shape if self.batch != "symbolic" else ("N", *output.shape[1:])
        if not self.chance(0.99):
            # A file that does not say the shape is read, and one that says another is refused.
            declared = None if self.chance(0.5) else (*declared, 2)
        info = helper.make_tensor_value_info(output.name, output.kind, declared)
        made = helper.make_graph(self.nodes, "random", self.inputs, [info], self.initializers)
        version = helper.make_opsetid(self.rng.choice(("", "", "ai.onnx")), self.opset)
        return helper.make_model(made, opset_imports=[version], ir_version=self.ir_version)


def graph(seed: int) -> Case:
    """The random file of a seed."""
    from .onnx_operators import OPERATORS, combined

    draft = Draft(seed)
    steps = draft.rng.randint(1, 9)
    while steps:
        operator = draft.rng.choices(list(OPERATORS), list(OPERATORS.values()))[0]
        if operator(draft) is not None:
            steps -= 1
    return Case(seed, draft.finish(combined(draft)), draft.weights)
