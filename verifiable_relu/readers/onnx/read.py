"""Reading ONNX: a table of converters, one per operator and version; other operators are refused by name.

A name of the file stands for a constant (a numpy array), a value, which is computed from the input, or a table of what
depends on computed whole numbers. Reading goes in steps that know nothing of each other: the file is checked by the
standard's checker, every node becomes ops of a flat network one by one, functions that are written out are recognised
and neighbours merged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.ir.network import Network, Shape, Source
from verifiable_relu.readers.builder import OpBuilder, Value
from verifiable_relu.readers.derived import Derived, rounded
from verifiable_relu.readers.onnx import whole, windows  # noqa: F401 -- importing these fills the table of converters
from verifiable_relu.readers.onnx.call import CONVERTERS, NodeCall, Result, converter_of, operator_of
from verifiable_relu.readers.onnx.constants import Constant, attributes_of, folded
from verifiable_relu.readers.onnx.model import Chosen, array, declared_inputs, input_shape, load_model, opset_of, single
from verifiable_relu.readers.onnx.reductions import LEARNED
from verifiable_relu.readers.simplify import finished, simplified

__all__ = ["CONVERTERS", "Reading", "read_flat"]

MAX_VALUES = 1 << 26
"""Most values of all ops of a network together, for one sample."""

Named = Result | Derived | whole.ValueTable
"""A name of the file stands for one of these."""

_WEIGHTS: dict[str, Sequence[int]] = {
    **dict.fromkeys(("Add", "Concat", "Div", "Einsum", "MatMul", "Max", "Min", "Mul", "Sub", "Sum"), range(1 << 16)),
    **dict.fromkeys(("Conv", "ConvTranspose", "GroupNormalization", "InstanceNormalization", "Where"), (1, 2)),
    **dict.fromkeys(("LayerNormalization", "RMSNormalization"), (1, 2)),
    "BatchNormalization": (1, 2, 3),
    "Gemm": (0, 1, 2),
    "Pad": (2,),
}
"""The inputs of operators that become weights and biases alone, so that they may be known up to an error."""


def read_flat(
    data: bytes,
    name: str,
    folder: Path | None = None,
    chosen: Chosen | None = None,
    require: Callable[[bytes], object] | None = None,
) -> tuple[Network, Reading]:
    """Read a network as ``read_onnx`` does, with its errors, but without comparing it with what the file computes.

    Data in other files lie in the ``folder``. Where the network is read from another file than the user's, one with one
    input and one output, the user's is given to ``require``. Returned are the network, and the file node by node.
    """
    model, data, repairs = load_model(data, folder, Reading)
    ports, replaced = single(model, chosen or Chosen())
    if ports:
        if require is not None:
            require(data)
        data = model.SerializeToString()
    reading = Reading(model)
    ops = simplified(*finished(reading.build, reading.output))
    shape = reading.output.shape
    source = Source(
        input_shape=reading.input_shape,
        # Without the leading 1 of two or more axes, and with one axis at least.
        output_shape=(shape[1:] if len(shape) >= 2 and shape[0] == 1 else shape) or (1,),
        onnx=data,
        batched=reading.batched,
        ports=reading.shapes(ports),
        repairs=(*repairs, *replaced, *reading.cropped()),
    )
    return Network(ops, source, name), reading


@dataclass
class Reading:
    """Reading of a model node by node, without any merging; ``build`` has the ops so far.

    Attributes:
        observer: called with the reading, each node that has been read, and the number of the first op made for it.
        tensors: the meaning of each name of the file.
        input_shape, batched: the shape of one sample, and whether the file's input has a batch axis before it.
        output: the value of the graph's output.
        counted: names of computed tensors of whole numbers or truth values, and ``short`` those of few bits.
    """

    model: onnx.ModelProto
    observer: Callable[[Reading, onnx.NodeProto, int], None] | None = None
    tensors: dict[str, Named] = field(default_factory=dict)
    counted: set[str] = field(default_factory=set)
    short: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        graph = self.model.graph
        for initializer in graph.initializer:
            if initializer.name in self.tensors:
                raise InputError("a name of two initializers", place=f"initializer '{initializer.name}'")
            self.tensors[initializer.name] = array(initializer, f"initializer '{initializer.name}'")
        (declared,) = declared_inputs(self.model)
        self.input_shape, self.batched = input_shape(declared)
        self.build = OpBuilder(self.input_shape, declared.name)
        self.tensors[declared.name] = Value(0, (1,) * self.batched + self.input_shape)
        self.opset = opset_of(self.model)
        self._makers = {name: node for node in graph.node for name in node.output}
        self._size = self.build.ops[0].size
        for position, node in enumerate(graph.node):
            self.take(node, node.name or (node.output[0] if node.output else str(position)))
        output = self.tensors.get(graph.output[0].name)
        if isinstance(output, whole.ValueTable):
            self.build.name = "output"
            output = whole.selected(self._call(graph.node[-1], ()), output)
        if not isinstance(output, Value):
            raise InputError("it is not computed from the input", place=f"output '{graph.output[0].name}'")
        self.output = output

    def shapes(self, names: Sequence[str]) -> dict[str, Shape]:
        """Return the ONNX shape of each of some tensors, with a batch of 1."""
        computed = self.computed()
        for name in names:
            if name not in computed:
                raise InputError("it is not computed from the input", place=f"output '{name}'")
        return {name: computed[name].shape for name in names}

    def computed(self) -> dict[str, Value]:
        """Return the computed tensors by their names, in the order of the file."""
        return {name: found for name, found in self.tensors.items() if isinstance(found, Value)}

    def cropped(self) -> Iterator[str]:
        """Yield a sentence for each Pad with negative pads, which not every runtime knows."""
        for node in self.model.graph.node:
            named = self.tensors.get(node.input[1]) if len(node.input) > 1 else attributes_of(node).get("pads")
            if node.op_type == "Pad" and isinstance(named, np.ndarray | list) and np.min(named, initial=0) < 0:
                yield f"negative pads of '{node.name or node.output[0]}' take elements off"

    def take(self, node: onnx.NodeProto, label: str) -> None:
        """Read one node, named ``label`` in messages."""
        place = f"node '{label}' ({node.op_type})"
        known, self.build.name = len(self.build.ops), label
        try:
            found = self._converted(node)
        except InputError as error:
            if error.place is not None:
                raise
            prefix = "not supported: " if isinstance(error, UnsupportedError) else ""
            raise type(error)(prefix + error.message, place=place) from error
        except (ArithmeticError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise InputError(f"does not fit its inputs: {error}", place=place) from error
        self.build.off = 0.0
        # Arithmetic on arrays without axes makes numbers of them.
        found = np.asarray(found) if isinstance(found, np.generic) else found
        results = [found] if isinstance(found, Value | np.ndarray | Derived | whole.ValueTable) else found
        sizes = [op.size for op in self.build.ops[known:]]
        if 0 in sizes or any(isinstance(result, Value) and not result.size for result in results):
            raise UnsupportedError("not supported: a tensor without elements", place=place)
        self._size += sum(sizes)
        if self._size > MAX_VALUES:
            raise UnsupportedError(f"more than {MAX_VALUES:,} values in all nodes together", place=place)
        for name, result in zip(node.output, results, strict=False):
            if name in self.tensors:
                raise InputError(f"its output '{name}' is the name of another tensor", place=place)
            if name and result is not None:
                self.tensors[name] = result
        if self.observer is not None:
            self.observer(self, node, known)

    def _converted(self, node: onnx.NodeProto) -> Named | Sequence[Named | None]:
        domain, operator = operator_of(node)
        if domain not in ("", LEARNED) and (operator, 1) not in CONVERTERS:
            raise UnsupportedError(f"an operator of the domain '{node.domain}'")
        if not node.output:
            raise InputError("it has no output")
        if missing := [name for name in node.input if name and name not in self.tensors]:
            raise InputError(f"its input '{missing[0]}' is not computed before it, or not read")
        found: tuple[Any, ...] = tuple(self.tensors[name] if name else None for name in node.input)
        if node.op_type == "Constant":
            return _written(attributes_of(node), f"node '{self.build.name}' (Constant)")
        if node.op_type in ("Shape", "Size") and found and found[0] is not None:

            def counted(case: Sequence[Any]) -> Sequence[Constant]:
                return folded(node, [np.broadcast_to(np.float32(0), case[0].shape)], self.opset)

            return (
                whole.computed(found[:1], counted) if isinstance(found[0], whole.ValueTable) else list(counted(found))
            )
        if node.op_type == "CastLike" and len(found) == 2:
            if not (kind := self.types.get(node.output[0])):
                raise UnsupportedError("a cast to an unknown type")
            node, found = onnx.helper.make_node("Cast", node.input[:1], node.output, to=kind), found[:1]
        given = list(found)
        for place in whole.INDEXED.get(node.op_type, ())[: max(0, len(found) - 1)]:
            given[place] = self._table(node, place, found)
        if any(isinstance(value, whole.ValueTable) for value in given):
            return self._chosen(node, given)
        return self._made(node, found)

    def _call(self, node: onnx.NodeProto, inputs: tuple[Result | None, ...], version: int = 1) -> NodeCall:
        return NodeCall(self.build, node.op_type, version, inputs, attributes_of(node), node, self.opset)

    def _made(self, node: onnx.NodeProto, found: Sequence[Any]) -> Named | Sequence[Named | None]:
        """Return the results of a node whose inputs are not tables."""
        constants = [value for value in found if not isinstance(value, Value)]
        if found and len(constants) == len(found):
            return list(folded(node, constants, self.opset))
        inputs = self._stored(node, found)
        converter, version = converter_of(node, opset_of(self.model, operator_of(node)[0]))
        whole.note_whole(node, inputs, self.counted, self.short)
        return converter(self._call(node, inputs, version))

    def _stored(self, node: onnx.NodeProto, given: Sequence[Any]) -> tuple[Result | None, ...]:
        """Return inputs with constants as arrays; ``build.off`` is what the weights that they become may be off by."""
        inputs: list[Result | None] = []
        for position, value in enumerate(given):
            if isinstance(value, Derived):
                if position not in _WEIGHTS.get(node.op_type, ()):
                    raise UnsupportedError(f"its input {position} is a constant that float64 cannot hold exactly")
                numbers, error = rounded(value)
                # A node multiplies at most two of its constants with each other, and divides by one.
                self.build.off = max(self.build.off, 4 * error)
                value = numbers.numpy()
            inputs.append(value)
        return tuple(inputs)

    @cached_property
    def types(self) -> dict[str, int]:
        """The element types of the file's tensors, as the standard infers them, by name."""
        graph = onnx.shape_inference.infer_shapes(self.model).graph
        return {info.name: info.type.tensor_type.elem_type for info in (*graph.input, *graph.value_info, *graph.output)}

    def _places(self, name: str, chosen: dict[int, int]) -> np.ndarray | None:
        """Return whole numbers that may say where something is, each a computed one plus a constant; None for others.

        The computed ones are as ``chosen`` by their ops, which have one element each; those not chosen are added as 0.
        """
        found = self.tensors.get(name)
        if not isinstance(found, Value):
            return found if isinstance(found, np.ndarray) and found.dtype.kind == "i" else None
        if name not in self.counted:
            return None
        node = self._makers[name]
        shifts = node.op_type in ("Add", "Sub") and isinstance(self.tensors[node.input[1]], np.ndarray)
        given = [self._places(each, chosen) for each in node.input] if shifts or node.op_type in whole.KEEPS else [None]
        if all(numbers is not None for numbers in given):
            (made,) = folded(node, given, self.opset)
            return made if isinstance(made, np.ndarray) and made.dtype.kind == "i" else None
        if found.size > 1:
            return None
        return np.full(found.shape, chosen.setdefault(self.build.in_place(found), 0))

    def _table(self, node: onnx.NodeProto, place: int, inputs: Sequence[Any]) -> Any:
        """Return the table of an index input that is computed, or else the input."""
        ops: dict[int, int] = {}
        offset = self._places(node.input[place], ops) if isinstance(inputs[place], Value) else None
        if offset is None:
            return inputs[place]
        parts = {op: np.asarray(self._places(node.input[place], {**ops, op: 1})) - offset for op in ops}
        return whole.ValueTable.of_input(self._call(node, ()), inputs, offset, parts)

    def _chosen(self, node: onnx.NodeProto, given: Sequence[Any]) -> Any:
        """Return the results of a node with inputs that depend on computed whole numbers."""
        call = self._call(node, ())
        if not any(isinstance(value, Value) for value in given):
            return whole.computed(given, lambda case: cast(Sequence[Any], self._made(node, case)))
        if any(isinstance(given[p], whole.ValueTable) for p in whole.INDEXED.get(node.op_type, ()) if p < len(given)):
            return whole.choice_sum(call, given, lambda case: cast(Sequence[Result], self._made(node, case))[0])
        return self._made(node, [whole.selected(call, v) if isinstance(v, whole.ValueTable) else v for v in given])


def _written(attributes: dict[str, Any], place: str) -> np.ndarray:
    for attribute, value in attributes.items():
        if attribute == "value":
            return array(value, place)
        if attribute in ("value_float", "value_floats"):
            return np.array(value, np.float32)
        if attribute in ("value_int", "value_ints"):
            return np.array(value, np.int64)
    raise UnsupportedError("a constant that is no tensor of numbers", place=place)
