"""Reading ONNX: one converter per operator and version, in a table; whatever is not in it is refused by name.

A tensor of the file is a constant (a numpy array) or a value, computed from the input. Files carry a batch axis,
networks do not: a ``Value`` says whether the leading 1 of its ONNX shape is that axis. Reading goes in steps that know
nothing of each other: the file is checked by the standard's checker, every node becomes nodes of a network one by
one, functions that are written out are recognised and neighbours merged by the network's own wiring, and the result is
compared with what the file computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import torch

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.files import read_bytes
from verifiable_relu.network.build import Builder, as_network
from verifiable_relu.network.derived import Derived, both, rounded
from verifiable_relu.network.factors import bounded_factors
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Affine, Shape, Smooth
from verifiable_relu.network.onnx import (  # noqa: F401 -- importing these modules fills the table of converters
    activations,
    elementwise,
    moves,
    normalisation,
    products,
    quantised,
    reduce,
    resize,
    steps,
    tables,
    windows,
)
from verifiable_relu.network.onnx.call import CONVERTERS, Call, Result, Value
from verifiable_relu.network.onnx.compare import compare, require_runs
from verifiable_relu.network.onnx.constants import RUNTIME, folded, written
from verifiable_relu.network.onnx.model import (
    EVERYTHING,
    MAX_BYTES,
    Chosen,
    array,
    declared_inputs,
    input_shape,
    load_model,
    opset_of,
    require_onnx,
    single,
)
from verifiable_relu.network.onnx.tables import ValueTable, Whole
from verifiable_relu.network.simplify import bare, simplify, spelled
from verifiable_relu.rounding import SOFTPLUS_SHARE
from verifiable_relu.settings import neutral

__all__ = ["CONVERTERS", "onnx_bytes", "read_onnx"]

MAX_VALUES = 1 << 26
"""Most values of all nodes of a network together, for one sample."""


@neutral()
def read_onnx(
    source: Path | str | bytes, name: str | None = None, chosen: Chosen = EVERYTHING, data: bytes | None = None
) -> Network:
    """Read a network from an ONNX file (gzipped or not) or from the bytes of one.

    Args:
        source: the path, or the file's bytes. Where ``NAME`` does not exist but ``NAME.gz`` does, that is read.
        name: what to call the network; by default the file's stem.
        chosen: the tensors of the file that are the network's inputs and outputs.
        data: the bytes of the file that ``source`` names, unpacked, where they have been read (``onnx_bytes``).

    Returns:
        The network with the weights' own bits; it computes what the file does in onnxruntime, up to rounding, at
        the points at which both were evaluated (``compare``). An input of rank ≥ 2 whose leading dimension is 1 or
        symbolic has a batch axis, which the network's shapes leave out; any other input is one sample. Of a file with
        several inputs or outputs, or with outputs that are left out, the network takes and gives one vector, in which
        they follow each other (``Network.ports``).

    Raises:
        UnsupportedError: if an operator, or the form in which it is used, is not supported; names the node.
        InputError: if the file is missing, malformed, refused by the ONNX checker or by onnxruntime, holds NaN or
            infinite parameters, or computes something else than the network that was read from it.
    """
    if isinstance(source, bytes):
        return _read(source, name or "network", None, chosen)
    path = Path(source)
    try:
        return _read(
            onnx_bytes(path) if data is None else data,
            name or Path(path.name.removesuffix(".gz")).stem,
            path.parent,
            chosen,
        )
    except InputError as error:
        raise error.located(path) from error


def onnx_bytes(path: Path) -> bytes:
    """The bytes of an ONNX file, unpacked.

    Raises:
        InputError: if the file cannot be read, is larger than ``MAX_BYTES``, or begins as no ONNX file does.
    """
    return read_bytes(path, MAX_BYTES, require_onnx)


def _read(data: bytes, name: str, folder: Path | None, chosen: Chosen) -> Network:
    model, data, mended = load_model(data, folder, Reading)
    ports, replaced = single(model, chosen)
    if ports:
        # The user's file must be one that runs, too, with what is left out of it.
        require_runs(data)
        data = model.SerializeToString()
    reading = Reading(model)
    nodes, output = bounded_factors(*bare(*simplify(*spelled(reading.build.nodes, reading.output.index))))
    mended += [*replaced, *reading.cropped()]
    network = as_network(
        nodes, output, name=name, onnx=data, batched=reading.batched, ports=reading.shapes(ports), mended=mended
    )
    nodes, names = reading.build.nodes, reading.computed()
    # Large files are in memory several times over by now.
    del model, reading
    compare(network, nodes, names)
    return network


_Named = Result | Derived | ValueTable
"""What a name of the file stands for."""


def _operator(node: onnx.NodeProto) -> tuple[str, str]:
    """The domain of a node's operator, and the operator's name in ``CONVERTERS``."""
    domain = "" if node.domain == "ai.onnx" else node.domain
    return domain, f"{domain}.{node.op_type}" if domain == RUNTIME else node.op_type


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}


_ALL = range(1 << 16)

_WEIGHTS: dict[str, Sequence[int]] = {
    **dict.fromkeys(("Add", "Concat", "Div", "Einsum", "MatMul", "Max", "Min", "Mul", "Sub", "Sum"), _ALL),
    **dict.fromkeys(("Conv", "ConvTranspose", "GroupNormalization", "InstanceNormalization", "Where"), (1, 2)),
    **dict.fromkeys(("LayerNormalization", "RMSNormalization"), (1, 2)),
    "BatchNormalization": (1, 2, 3),
    "Gemm": (0, 1, 2),
    "Pad": (2,),
}
"""The inputs of operators that become weights and biases alone, so that they may be known up to an error."""


@dataclass
class Reading:
    """A model, node by node, without any merging: ``build`` has a node for each that computes something.

    Attributes:
        tensors: what each name of the file stands for.
        batched: whether the file's input has a batch axis.
        output: what the graph's output stands for.
        off: the relative error of constants of the node at hand.
    """

    model: onnx.ModelProto
    tensors: dict[str, _Named] = field(default_factory=dict)
    off: float = 0.0

    def __post_init__(self) -> None:
        graph = self.model.graph
        for initializer in graph.initializer:
            if initializer.name in self.tensors:
                raise InputError("a name of two initializers", place=f"initializer '{initializer.name}'")
            self.tensors[initializer.name] = array(initializer, f"initializer '{initializer.name}'")
        (declared,) = declared_inputs(self.model)
        shape, self.batched = input_shape(declared)
        self.build = Builder(shape, declared.name)
        self.tensors[declared.name] = Value(0, self.batched)
        self.opset = opset_of(self.model)
        self.thresholds: dict[str, tuple[_Named | None, float]] = {}
        self.whole: set[str] = set()
        self.short: set[str] = set()
        self.wheres: dict[str, Whole] = {}
        self._size = self.build.nodes[0].size
        for position, node in enumerate(graph.node):
            self.take(node, node.name or (node.output[0] if node.output else str(position)))
        output = self.tensors.get(graph.output[0].name)
        if isinstance(output, ValueTable):
            output = tables.selected(self._call(graph.node[-1], "output"), output)
        if not isinstance(output, Value):
            raise InputError("it is not computed from the input", place=f"output '{graph.output[0].name}'")
        self.output = output

    def shapes(self, names: Sequence[str]) -> dict[str, Shape]:
        """The ONNX shape of each of some tensors, with a batch of 1."""
        found = {name: self.tensors[name] for name in names}
        for name, tensor in found.items():
            if not isinstance(tensor, Value):
                raise InputError("it is not computed from the input", place=f"output '{name}'")
        return {name: (1,) * t.leading + self.build.shape(t.index) for name, t in found.items() if isinstance(t, Value)}

    def computed(self) -> dict[str, int]:
        """The node of ``build`` behind each name that stands for a computed tensor, in the order of the file."""
        return {name: found.index for name, found in self.tensors.items() if isinstance(found, Value)}

    def cropped(self) -> Iterator[str]:
        """Says of each Pad with negative pads what was made of it: not all that run files know these."""
        for node in self.model.graph.node:
            named = self.tensors.get(node.input[1]) if len(node.input) > 1 else _attributes(node).get("pads")
            if node.op_type == "Pad" and isinstance(named, np.ndarray | list) and np.min(named, initial=0) < 0:
                yield f"negative pads of '{node.name or node.output[0]}' take elements off"

    def take(self, node: onnx.NodeProto, label: str) -> None:
        """Read one node."""
        place = f"node '{label}' ({node.op_type})"
        known, self.off = len(self.build.nodes), 0.0
        try:
            found = self._converted(node, label)
        except InputError as error:
            if error.place is not None:
                raise
            raise type(error)(error.message, place=place) from error
        except (ArithmeticError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise InputError(f"does not fit its inputs: {error}", place=place) from error
        for index in range(known, len(self.build.nodes)):
            made = self.build.nodes[index]
            if self.off and isinstance(made, Affine):
                self.build.nodes[index] = made.with_error(both(made.weight_error, self.off))
        if any(made.size == 0 for made in self.build.nodes[known:]):
            raise UnsupportedError("a tensor without elements", place=place)
        self._size += sum(made.size for made in self.build.nodes[known:])
        if self._size > MAX_VALUES:
            raise UnsupportedError(f"more than {MAX_VALUES} values in all nodes together", place=place)
        if isinstance(found, np.generic):
            # Arithmetic on arrays without axes makes these of them.
            found = np.asarray(found)
        results = [found] if isinstance(found, Value | np.ndarray | Derived | ValueTable) else found
        for name, result in zip(node.output, results, strict=False):
            if name in self.tensors:
                raise InputError(f"its output '{name}' is the name of another tensor", place=place)
            if name and result is not None:
                self.tensors[name] = result

    def _converted(self, node: onnx.NodeProto, label: str) -> _Named | Sequence[_Named | None]:
        domain, operator = _operator(node)
        if domain not in ("", products.LEARNED) and (operator, 1) not in CONVERTERS:
            raise UnsupportedError(f"operators of the domain '{node.domain}' are not supported")
        if not node.output:
            raise InputError("it has no output")
        if node.op_type == "Where" and node.input[:1] and (share := self._softplus(node, label)):
            return share
        found: tuple[Any, ...] = tuple(self._lookup(name) for name in node.input)
        if node.op_type == "Constant":
            return written(_attributes(node), f"node '{label}' (Constant)")
        if node.op_type in ("Shape", "Size") and found:

            def shape(of: Result | Derived | None) -> np.ndarray:
                known = self._shape(of, _attributes(node))
                return known if node.op_type == "Shape" else known.prod(dtype=np.int64)[()].reshape(())

            if isinstance(found[0], ValueTable):
                return tables.computed(found[:1], lambda case: [shape(case[0])])
            return shape(found[0])
        if node.op_type == "CastLike" and len(found) == 2:
            return self._cast_like(node, label, found[0], found[1])
        if node.op_type == "Greater" and isinstance(found[1], np.ndarray) and found[1].size == 1:
            self.thresholds[node.output[0]] = found[0], float(found[1].item())
        places = tables.INDEXED.get(node.op_type, ())
        say = [p for p, name in enumerate(node.input) if p in places and name in self.wheres]
        if say or any(isinstance(value, ValueTable) for value in found):
            return self._chosen(
                node, label, [self._where(node, found, p) if p in say else v for p, v in enumerate(found)]
            )
        return self._made(node, label, found)

    def _where(self, node: onnx.NodeProto, inputs: Sequence[Any], position: int) -> ValueTable:
        """An input of a node that says where, as a table of what it can be."""
        data = inputs[0]
        shapes = (
            [a.shape for a in data.arrays] if isinstance(data, ValueTable) else [tuple(self._shape(data, {}).tolist())]
        )
        if any(len(shape) != len(shapes[0]) for shape in shapes):
            raise UnsupportedError("of a rank that depends on computed numbers")
        sizes = [max(one) for one in zip(*shapes, strict=True)]
        whole = self.wheres[node.input[position]]
        if node.op_type == "Gather":
            (axis,) = [a.i for a in node.attribute if a.name == "axis"] or [0]
            return ValueTable.of(whole, [sizes[axis]], False)
        if node.op_type != "Slice":
            return ValueTable.of(whole, sizes[: whole.key.shape[-1]], False)
        axes = inputs[3] if len(inputs) > 3 else np.arange(whole.key.size)
        if not isinstance(axes, np.ndarray):
            raise UnsupportedError("axes that are computed")
        return ValueTable.of(whole, [max(sizes[axis] for axis in axes.reshape(-1).tolist())], True)

    def _call(self, node: onnx.NodeProto, label: str) -> Call:
        """A call whose inputs do not matter."""
        return Call(self.build, node.op_type, 1, label, (), {}, node, self.opset)

    def _chosen(self, node: onnx.NodeProto, label: str, given: Sequence[Any]) -> Any:
        """What a node makes of what depends on computed whole numbers."""
        call = self._call(node, label)
        if not any(isinstance(value, Value) for value in given):
            return tables.computed(given, lambda case: cast(Sequence[Any], self._made(node, label, case)))
        if any(isinstance(given[p], ValueTable) for p in tables.INDEXED.get(node.op_type, ()) if p < len(given)):
            return tables.chosen(call, given, lambda case: self._single(self._made(node, label, case)))
        values = [tables.selected(call, value) if isinstance(value, ValueTable) else value for value in given]
        return self._made(node, label, values)

    @staticmethod
    def _single(found: Any) -> Result:
        (result,) = found if isinstance(found, list | tuple) else [found]
        return result

    def _made(self, node: onnx.NodeProto, label: str, found: Sequence[Any]) -> _Named | Sequence[_Named | None]:
        """What a node makes of its inputs, none of them a table."""
        domain, operator = _operator(node)
        constants = [value for value in found if not isinstance(value, Value)]
        if found and len(constants) == len(found):
            return list(folded(node, constants, self.opset))
        inputs = self._stored(node, found)
        try:
            opset = opset_of(self.model, domain)
            # The standard knows nothing of the runtime's own operators, which have one version.
            known = operator == node.op_type
            version = onnx.defs.get_schema(node.op_type, opset, domain).since_version if known else 1
        except onnx.defs.SchemaError:
            raise UnsupportedError(f"no operator of opset {opset}") from None
        if self._counts(node, inputs):
            self.whole.update(node.output)
            if steps.is_short(node.op_type, not self.short.isdisjoint(node.input)):
                self.short.update(node.output)
        converter = CONVERTERS.get((operator, version))
        if converter is None:
            others = sorted(v for op, v in CONVERTERS if op == operator)
            read = f"; versions {', '.join(map(str, others))} of it are" if others else ""
            raise UnsupportedError(f"version {version} of this operator is not supported{read}")
        given = _attributes(node)
        made = converter(Call(self.build, node.op_type, version, label, inputs, given, node, self.opset))
        first = made[0] if isinstance(made, list) else made
        if node.output[0] in self.whole and isinstance(first, Value):
            self._follow(node, found, first)
        return made

    def _follow(self, node: onnx.NodeProto, inputs: Sequence[Any], made: Value) -> None:
        """Take note of whole numbers that may say where something is."""
        given = [self.wheres.get(name, value) for name, value in zip(node.input, inputs, strict=True)]
        whole = None
        if any(isinstance(value, Whole) for value in given):
            whole = tables.followed(node, given, self.opset)
        if whole is None and self.build.size(made.index) == 1:
            shape = tuple(self._shape(made, {}).tolist())
            whole = Whole(np.full(shape, made.index), np.zeros(shape, np.int64))
        if whole is not None:
            self.wheres[node.output[0]] = whole

    def _stored(self, node: onnx.NodeProto, given: Sequence[Any]) -> tuple[np.ndarray | Value | None, ...]:
        """Inputs of a node with constants as arrays; ``off`` is what the weights that they become may be off by."""
        inputs: list[np.ndarray | Value | None] = []
        for position, value in enumerate(given):
            if isinstance(value, Derived):
                if position not in _WEIGHTS.get(node.op_type, ()):
                    raise UnsupportedError(f"its input {position} is a constant that no float64 number is")
                numbers, error = rounded(value)
                # A node multiplies at most two of its constants with each other, and divides by one.
                self.off = max(self.off, 4 * error)
                value = numbers.numpy()
            inputs.append(value)
        return tuple(inputs)

    def _softplus(self, node: onnx.NodeProto, label: str) -> Value | None:
        """softplus(x) for x ≤ c and x for x > c ≥ 20, as exporters spell softplus, if a Where is that.

        x is less than softplus(x) by a factor between 1 and 1 − e⁻ᶜ/c: the factor is stored as 1 − 2⁻³⁴, which is off
        by no more than 2⁻³³.
        """
        x, threshold = self.thresholds.get(node.input[0], (None, 0.0))
        chosen, other = map(self._lookup, node.input[1:3])
        if isinstance(x, Value) and isinstance(chosen, Value) and isinstance(other, Value) and threshold >= 20:
            function = self.build.nodes[other.index]
            same = chosen.index == x.index and function.inputs == (x.index,)
            if same and isinstance(function, Smooth) and function.function == "Softplus":
                factor = torch.tensor(SOFTPLUS_SHARE[0], dtype=torch.float64)
                return Value(self.build.scale(other.index, label, scale=factor, error=SOFTPLUS_SHARE[1]), other.leading)
        return None

    def _cast_like(
        self, node: onnx.NodeProto, label: str, given: _Named | None, like: _Named | None
    ) -> _Named | Sequence[_Named | None]:
        """``given`` in the number type of ``like``."""
        if given is None or like is None:
            raise InputError("an input is missing")
        kind = self.types.get(node.input[1])
        if kind:
            dtype = onnx.helper.tensor_dtype_to_np_dtype(kind)
        elif isinstance(like, np.ndarray):
            dtype = like.dtype
        else:
            raise UnsupportedError("of an unknown type")
        cast = onnx.helper.make_node(
            "Cast", node.input[:1], node.output, to=onnx.helper.np_dtype_to_tensor_dtype(dtype)
        )
        return self._converted(cast, label)

    def _counts(self, node: onnx.NodeProto, inputs: Sequence[np.ndarray | Value | None]) -> bool:
        """Whether a node's result is of whole numbers or truth values.

        Raises:
            UnsupportedError: for an operator that may mean something else of whole numbers, such as a division.
        """
        kinds = [
            isinstance(value, Value) and name in self.whole for name, value in zip(node.input, inputs, strict=True)
        ]
        if any(kinds) and not steps.counts(node.op_type):
            raise UnsupportedError("of computed whole numbers is not supported")
        return steps.is_counted(node, inputs, kinds)

    @cached_property
    def types(self) -> dict[str, int]:
        """The element types of the file's tensors, as the standard infers them, by name."""
        graph = onnx.shape_inference.infer_shapes(self.model).graph
        return {info.name: info.type.tensor_type.elem_type for info in (*graph.input, *graph.value_info, *graph.output)}

    def _lookup(self, name: str) -> _Named | None:
        if not name:
            return None
        try:
            return self.tensors[name]
        except KeyError:
            raise InputError(f"its input '{name}' is not computed before it, or not read") from None

    def _shape(self, of: Result | Derived | None, attributes: dict[str, int]) -> np.ndarray:
        """The ONNX shape of a tensor, with a batch of 1."""
        if of is None:
            raise InputError("its input is missing")
        shape = (1,) * of.leading + self.build.shape(of.index) if isinstance(of, Value) else of.shape
        return np.array(shape[attributes.get("start", 0) : attributes.get("end")], np.int64)
