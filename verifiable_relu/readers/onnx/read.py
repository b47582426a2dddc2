"""Reading ONNX: one converter per operator and version, in a table; what is not in it is refused by name.

A name of the file stands for a constant (a numpy array), a value, which is computed from the input, or a table of what
depends on computed whole numbers. Reading goes in steps that know nothing of each other: the file is checked by the
standard's checker, every node becomes ops of a flat network one by one, functions that are written out are recognised
and neighbours merged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import torch

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.ir.linear import Gather
from verifiable_relu.ir.network import Affine, Elementwise, Network, Op, Shape, Source
from verifiable_relu.readers.builder import Builder, Value
from verifiable_relu.readers.derived import Derived, both, rounded
from verifiable_relu.readers.onnx import (  # noqa: F401 -- importing these modules fills the table of converters
    arithmetic,
    decisions,
    functions,
    indexed,
    moves,
    normalisation,
    quantised,
    reductions,
    resize,
    windows,
)
from verifiable_relu.readers.onnx.call import CONVERTERS, Call, Result
from verifiable_relu.readers.onnx.constants import RUNTIME, folded
from verifiable_relu.readers.onnx.indexed import INDEXED, ValueTable, Whole
from verifiable_relu.readers.onnx.model import (
    EVERYTHING,
    Chosen,
    array,
    declared_inputs,
    input_shape,
    load_model,
    opset_of,
    single,
)
from verifiable_relu.readers.simplify import finished, simplified
from verifiable_relu.rounding import SOFTPLUS_SHARE, above

__all__ = ["CONVERTERS", "Reading", "read_flat"]

MAX_VALUES = 1 << 26
"""Most values of all ops of a network together, for one sample."""

Named = Result | Derived | ValueTable
"""A name of the file stands for one of these."""

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


def read_flat(
    data: bytes,
    name: str,
    folder: Path | None = None,
    chosen: Chosen = EVERYTHING,
    require: Callable[[bytes], object] | None = None,
) -> tuple[Network, Reading]:
    """Read a flat network from the bytes of an ONNX file, without comparing it with what the file computes.

    Args:
        data: the bytes, unpacked.
        name: what to call the network.
        folder: where the file lies, for data in other files.
        chosen: the tensors of the file that are the network's inputs and outputs.
        require: called with the user's file where the network is read from another one, with one input and one output.

    Returns:
        The network, and the file as it was read node by node.

    Raises:
        UnsupportedError: if an operator, or the form in which it is used, is not supported; names the node.
        InputError: if the file is malformed, or refused by the ONNX checker, or holds NaN or infinite parameters.
    """
    model, data, repairs = load_model(data, folder, Reading)
    ports, replaced = single(model, chosen)
    if ports:
        if require is not None:
            require(data)
        data = model.SerializeToString()
    reading = Reading(model)
    ops = simplified(*finished(reading.build, reading.output))
    source = Source(
        input_shape=reading.input_shape,
        output_shape=reading.sample_shape,
        onnx=data,
        batched=reading.batched,
        ports=reading.shapes(ports),
        repairs=(*repairs, *replaced, *reading.cropped()),
    )
    return Network(ops, source, name), reading


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}


def _operator(node: onnx.NodeProto) -> tuple[str, str]:
    """Return the domain of a node's operator, and the operator's name in ``CONVERTERS``."""
    domain = "" if node.domain == "ai.onnx" else node.domain
    return domain, f"{domain}.{node.op_type}" if domain == RUNTIME else node.op_type


def _with_error(op: Op, off: float) -> Op:
    """Return an op whose weights and bias are off by a part of themselves more."""
    if not isinstance(op, Affine):
        return op
    # What is moved has no weight.
    error, bias_error = op.weight_error if isinstance(op.map, Gather) else both(op.weight_error, off), op.bias_error
    if op.bias is not None:
        before = torch.zeros(()) if bias_error is None else bias_error
        known = (op.bias.double().abs() + before).numpy()
        more = np.where(known == 0, 0.0, above(off * known))
        bias_error = torch.from_numpy(more if bias_error is None else above(more + before.numpy()))
    return replace(op, weight_error=error, bias_error=bias_error)


@dataclass
class Reading:
    """A model, node by node, without any merging: ``build`` has the ops of each that computes something.

    Attributes:
        observer: called with the reading, each node that has been read, and the number of the first op made for it.
        tensors: what each name of the file stands for.
        input_shape, batched: the shape of one sample, and whether the file's input has a batch axis before it.
        output: what the graph's output stands for.
        off: the relative error of constants of the node at hand.
        whole: names of computed tensors of whole numbers or truth values, and ``short`` those of few bits.
        wheres: computed whole numbers that may say where something is, by the name of their tensor.
        thresholds: by the name of a comparison's result the tensor that is above a number, and the number.
    """

    model: onnx.ModelProto
    observer: Callable[[Reading, onnx.NodeProto, int], None] | None = None
    tensors: dict[str, Named] = field(default_factory=dict)
    off: float = 0.0
    whole: set[str] = field(default_factory=set)
    short: set[str] = field(default_factory=set)
    wheres: dict[str, Whole] = field(default_factory=dict)
    thresholds: dict[str, tuple[Named | None, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        graph = self.model.graph
        for initializer in graph.initializer:
            if initializer.name in self.tensors:
                raise InputError("a name of two initializers", place=f"initializer '{initializer.name}'")
            self.tensors[initializer.name] = array(initializer, f"initializer '{initializer.name}'")
        (declared,) = declared_inputs(self.model)
        self.input_shape, self.batched = input_shape(declared)
        self.build = Builder(self.input_shape, declared.name)
        self.tensors[declared.name] = Value(0, (1,) * self.batched + self.input_shape)
        self.opset = opset_of(self.model)
        self._size = self.build.ops[0].size
        for position, node in enumerate(graph.node):
            self.take(node, node.name or (node.output[0] if node.output else str(position)))
        output = self.tensors.get(graph.output[0].name)
        if isinstance(output, ValueTable):
            self.build.name = "output"
            output = indexed.selected(self._call(graph.node[-1], ()), output)
        if not isinstance(output, Value):
            raise InputError("it is not computed from the input", place=f"output '{graph.output[0].name}'")
        self.output = output

    @property
    def sample_shape(self) -> Shape:
        """The output's shape without the leading 1 of two or more axes, and with one axis at least."""
        shape = self.output.shape
        return (shape[1:] if len(shape) >= 2 and shape[0] == 1 else shape) or (1,)

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
        """Yield for each Pad with negative pads what was made of it: not all that run files know these."""
        for node in self.model.graph.node:
            named = self.tensors.get(node.input[1]) if len(node.input) > 1 else _attributes(node).get("pads")
            if node.op_type == "Pad" and isinstance(named, np.ndarray | list) and np.min(named, initial=0) < 0:
                yield f"negative pads of '{node.name or node.output[0]}' take elements off"

    def take(self, node: onnx.NodeProto, label: str) -> None:
        """Read one node, which is called ``label``."""
        place = f"node '{label}' ({node.op_type})"
        known, self.off, self.build.name = len(self.build.ops), 0.0, label
        try:
            found = self._converted(node)
        except InputError as error:
            if error.place is not None:
                raise
            raise type(error)(error.message, place=place) from error
        except (ArithmeticError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise InputError(f"does not fit its inputs: {error}", place=place) from error
        if self.off:
            self.build.ops[known:] = [_with_error(op, self.off) for op in self.build.ops[known:]]
        # Arithmetic on arrays without axes makes numbers of them.
        found = np.asarray(found) if isinstance(found, np.generic) else found
        results = [found] if isinstance(found, Value | np.ndarray | Derived | ValueTable) else found
        sizes = [op.size for op in self.build.ops[known:]]
        if 0 in sizes or any(isinstance(result, Value) and not result.size for result in results):
            raise UnsupportedError("a tensor without elements", place=place)
        self._size += sum(sizes)
        if self._size > MAX_VALUES:
            raise UnsupportedError(f"more than {MAX_VALUES} values in all nodes together", place=place)
        for name, result in zip(node.output, results, strict=False):
            if name in self.tensors:
                raise InputError(f"its output '{name}' is the name of another tensor", place=place)
            if name and result is not None:
                self.tensors[name] = result
        if self.observer is not None:
            self.observer(self, node, known)

    def _converted(self, node: onnx.NodeProto) -> Named | Sequence[Named | None]:
        domain, operator = _operator(node)
        if domain not in ("", arithmetic.LEARNED) and (operator, 1) not in CONVERTERS:
            raise UnsupportedError(f"operators of the domain '{node.domain}' are not supported")
        if not node.output:
            raise InputError("it has no output")
        if node.op_type == "Where" and node.input[:1] and (softplus := self._softplus(node)):
            return softplus
        found: tuple[Any, ...] = tuple(self._lookup(name) for name in node.input)
        if node.op_type == "Constant":
            return _written(_attributes(node), f"node '{self.build.name}' (Constant)")
        if node.op_type in ("Shape", "Size") and found:
            if isinstance(found[0], ValueTable):
                return indexed.computed(found[:1], lambda case: [_shape(node, case[0])])
            return _shape(node, found[0])
        if node.op_type == "CastLike" and len(found) == 2:
            node, found = self._as_cast(node, found[1]), found[:1]
        if node.op_type == "Greater" and isinstance(found[1], np.ndarray) and found[1].size == 1:
            self.thresholds[node.output[0]] = found[0], float(found[1].item())
        places = INDEXED.get(node.op_type, ())
        given = [self._where(node, found, p) if p in places and name in self.wheres else found[p]
                 for p, name in enumerate(node.input[: len(found)])]  # fmt: skip
        if any(isinstance(value, ValueTable) for value in given):
            return self._chosen(node, given)
        return self._made(node, found)

    def _call(self, node: onnx.NodeProto, inputs: tuple[Result | None, ...], version: int = 1) -> Call:
        return Call(self.build, node.op_type, version, inputs, _attributes(node), node, self.opset)

    def _made(self, node: onnx.NodeProto, found: Sequence[Any]) -> Named | Sequence[Named | None]:
        """Return what a node makes of its inputs, none of them a table."""
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
        decisions.note_whole(node, inputs, self.whole, self.short)
        converter = CONVERTERS.get((operator, version))
        if converter is None:
            others = sorted(v for op, v in CONVERTERS if op == operator)
            read = f"; versions {', '.join(map(str, others))} of it are" if others else ""
            raise UnsupportedError(f"version {version} of this operator is not supported{read}")
        made = converter(self._call(node, inputs, version))
        first = made[0] if isinstance(made, list) else made
        if node.output[0] in self.whole and isinstance(first, Value):
            self._follow(node, found, first)
        return made

    def _stored(self, node: onnx.NodeProto, given: Sequence[Any]) -> tuple[Result | None, ...]:
        """Return inputs with constants as arrays; ``off`` is what the weights that they become may be off by."""
        inputs: list[Result | None] = []
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

    def _lookup(self, name: str) -> Named | None:
        if not name:
            return None
        try:
            return self.tensors[name]
        except KeyError:
            raise InputError(f"its input '{name}' is not computed before it, or not read") from None

    @cached_property
    def types(self) -> dict[str, int]:
        """The element types of the file's tensors, as the standard infers them, by name."""
        graph = onnx.shape_inference.infer_shapes(self.model).graph
        return {info.name: info.type.tensor_type.elem_type for info in (*graph.input, *graph.value_info, *graph.output)}

    def _as_cast(self, node: onnx.NodeProto, like: Named | None) -> onnx.NodeProto:
        """Return the Cast that a CastLike is."""
        kind = self.types.get(node.input[1])
        if not kind:
            if not isinstance(like, np.ndarray):
                raise UnsupportedError("of an unknown type")
            kind = onnx.helper.np_dtype_to_tensor_dtype(like.dtype)
        return onnx.helper.make_node("Cast", node.input[:1], node.output, to=kind)

    def _softplus(self, node: onnx.NodeProto) -> Value | None:
        """Return softplus(x) where a Where is softplus(x) for x ≤ c and x for x > c ≥ 20, as exporters spell it.

        x is less than softplus(x) by a factor between 1 and 1 − e⁻ᶜ/c: the factor is stored as 1 − 2⁻³⁴, which is off
        by no more than 2⁻³³.
        """
        x, threshold = self.thresholds.get(node.input[0], (None, 0.0))
        chosen, other = map(self._lookup, node.input[1:3])
        if not (isinstance(x, Value) and isinstance(chosen, Value) and isinstance(other, Value) and threshold >= 20):
            return None
        op, argument = self.build.ops[other.op], self.build.in_place(x)
        same = (
            other.index is None and other.shape == chosen.shape == x.shape and self.build.in_place(chosen) == argument
        )
        if not (same and isinstance(op, Elementwise) and op.function.kind == "Softplus" and op.inputs == (argument,)):
            return None
        return self.build.scale(other, torch.tensor(SOFTPLUS_SHARE[0], dtype=torch.float64), error=SOFTPLUS_SHARE[1])

    # Whole numbers that say where

    def _follow(self, node: onnx.NodeProto, inputs: Sequence[Any], made: Value) -> None:
        """Take note of whole numbers that may say where something is."""
        given = [self.wheres.get(name, value) for name, value in zip(node.input, inputs, strict=True)]
        whole = None
        if any(isinstance(value, Whole) for value in given):
            whole = indexed.followed(node, given, self.opset)
        if whole is None and made.size == 1:
            whole = Whole(np.full(made.shape, self.build.in_place(made)), np.zeros(made.shape, np.int64))
        if whole is not None:
            self.wheres[node.output[0]] = whole

    def _where(self, node: onnx.NodeProto, inputs: Sequence[Any], position: int) -> ValueTable:
        """Return an input of a node that says where, as a table of what it can be."""
        data = inputs[0]
        shapes = [a.shape for a in data.arrays] if isinstance(data, ValueTable) else [tuple(data.shape)]
        if any(len(shape) != len(shapes[0]) for shape in shapes):
            raise UnsupportedError("of a rank that depends on computed numbers")
        sizes = [max(one) for one in zip(*shapes, strict=True)]
        whole = self.wheres[node.input[position]]
        if node.op_type == "Gather":
            return ValueTable.of(whole, [sizes[_attributes(node).get("axis", 0)]], False)
        if node.op_type != "Slice":
            return ValueTable.of(whole, sizes[: whole.key.shape[-1]], False)
        axes = inputs[3] if len(inputs) > 3 else np.arange(whole.key.size)
        if not isinstance(axes, np.ndarray):
            raise UnsupportedError("axes that are computed")
        return ValueTable.of(whole, [max(sizes[axis] for axis in axes.reshape(-1).tolist())], True)

    def _chosen(self, node: onnx.NodeProto, given: Sequence[Any]) -> Any:
        """Return what a node makes of what depends on computed whole numbers."""
        call = self._call(node, ())
        if not any(isinstance(value, Value) for value in given):
            return indexed.computed(given, lambda case: cast(Sequence[Any], self._made(node, case)))
        if any(isinstance(given[p], ValueTable) for p in INDEXED.get(node.op_type, ()) if p < len(given)):

            def single_result(case: list[Any]) -> Result:
                found: Any = self._made(node, case)
                (result,) = found if isinstance(found, list | tuple) else [found]
                return cast(Result, result)

            return indexed.chosen(call, given, single_result)
        return self._made(node, [indexed.selected(call, v) if isinstance(v, ValueTable) else v for v in given])


def _shape(node: onnx.NodeProto, of: Result | Derived | None) -> np.ndarray:
    """Return what a Shape or a Size makes of a tensor, with a batch of 1."""
    if of is None:
        raise InputError("its input is missing")
    given = _attributes(node)
    shape = np.array(of.shape[given.get("start", 0) : given.get("end")], np.int64)
    return shape if node.op_type == "Shape" else np.asarray(shape.prod(dtype=np.int64))


def _written(attributes: dict[str, Any], place: str) -> np.ndarray:
    """Return the value of a Constant."""
    for attribute, value in attributes.items():
        if attribute == "value":
            return array(value, place)
        if attribute in ("value_float", "value_floats"):
            return np.array(value, np.float32)
        if attribute in ("value_int", "value_ints"):
            return np.array(value, np.int64)
    raise UnsupportedError("a constant that is no tensor of numbers", place=place)
