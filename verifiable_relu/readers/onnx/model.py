"""From the bytes of an ONNX file to a model with one input and one output that the standard's checker accepts.

Tensors may lie in another file, as exporters write them by default. The standard's library reads it where a plain
relative path names a file in the ONNX file's folder, and no link: a network from elsewhere must not have other files of
the machine read.

A file with several inputs or outputs becomes one with a single input and output, which is what a network has. The new
input is a vector of the elements of all inputs, one input after another, each in row-major order; a Gather with
constant indices takes each input out of it. The new output is a row of the elements of all outputs. Neither
computes anything, so that nothing is rounded. All that deals with a network's file, the comparison with onnxruntime and
the replay of counterexamples above all, has the new file in place of the user's.
"""

from __future__ import annotations

import heapq
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper
from onnx.external_data_helper import ExternalDataInfo, load_external_data_for_tensor

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.ir.network import Shape
from verifiable_relu.supervisor.forks import survives

OLDEST_IR, NEWEST_IR = 3, onnx.IR_VERSION
"""The versions of the file format that are read."""

MAX_BYTES = 1 << 31
"""The largest file, unpacked and with its data in other files: protobuf's own limit is 2 GiB."""

MAX_NODES = 100_000
"""Most nodes of a graph."""

_FIRST = {bytes([tag]) for tag in (0x08, 0x12, 0x1A, 0x22, 0x28, 0x32, 0x3A, 0x42, 0x72, 0xA2, 0xCA, 0xD2)}
"""First bytes of the fields of ``ModelProto``, as protobuf writes their numbers and types."""

_PLAIN = {
    "Abs", "Add", "AveragePool", "BatchNormalization", "Clip", "Concat", "Constant", "Conv", "Div", "Dropout", "Elu",
    "Erf", "Exp", "Flatten", "Gelu", "Gemm", "GlobalAveragePool", "Identity", "LeakyRelu", "Log", "MatMul", "Max",
    "MaxPool", "Min", "Mul", "Neg", "Pow", "ReduceMean", "ReduceSum", "Relu", "Reshape", "Sigmoid", "Softmax",
    "Softplus", "Sqrt", "Squeeze", "Sub", "Sum", "Tanh", "Transpose", "Unsqueeze",
}  # fmt: skip
"""Operators at which the standard's library was never seen to crash, in 1,500 random graphs of them alone.

It crashes (onnx 1.23.2) at EyeLike and Mish whose input has no type that is known, and at others.
"""

_CRASHES = "the ONNX library crashes on the file or does not end on it, or there is no memory for another process"


def load_model(
    data: bytes, folder: Path | None, read: Callable[[onnx.ModelProto], object]
) -> tuple[onnx.ModelProto, bytes, list[str]]:
    """Parse and check a file.

    Args:
        data: the file's bytes, unpacked.
        folder: where the file lies, for data in other files there.
        read: what will be done with the model. This and the check are tried in a process of its own first where the
            file has operators at which the standard's library may crash.

    Returns:
        A model with one flat graph of standard operators, which holds all its tensors, sorted and with outputs that
        have types and shapes; its bytes; and a sentence for each thing that the standard does not allow.

    Raises:
        InputError: if the bytes are no ONNX file, or one that the standard's checker refuses, or its data cannot be
            read.
        UnsupportedError: for a valid file with subgraphs or sparse tensors, or operators that the file defines itself.
    """
    try:
        model = onnx.load_model_from_string(data)
    except Exception:  # protobuf's own exception is no public class
        raise InputError("not an ONNX file") from None
    if not model.graph.node:
        raise InputError("not an ONNX file, or one without nodes")
    if len(model.graph.node) > MAX_NODES:
        raise UnsupportedError(f"{len(model.graph.node):,} nodes, where at most {MAX_NODES:,} are read")
    _refuse_unread_parts(model)
    repairs = ["nodes that the file has before what they need are sorted"] if sort(model.graph) else []
    repairs += _complete(model)
    if len({(entry.domain or "ai.onnx", entry.version) for entry in model.opset_import}) < len(model.opset_import):
        repairs.append("a set of operators is imported twice, in one version")
    # This comes before the checker, which would follow references to other files.
    if _load_external(model.graph, folder, MAX_BYTES - len(data)):
        data = model.SerializeToString()
    checked = model.SerializeToString() if repairs else data
    if any(node.op_type not in _PLAIN or node.domain for node in model.graph.node):

        def tried() -> None:
            onnx.checker.check_model(checked, full_check=True)
            onnx.shape_inference.infer_shapes(model, data_prop=True)
            read(model)

        if not survives(tried):
            raise InputError(_CRASHES)
    _checked(lambda: onnx.checker.check_model(checked, full_check=True))
    return model, data, repairs


def _checked(work: Callable[[], Any]) -> Any:
    """Return what the standard's library makes of a file, or raise why it refuses it."""
    try:
        return work()
    except Exception as error:  # shape inference has exceptions of its own, and lets others of C++ through
        kind = "" if isinstance(error, onnx.checker.ValidationError) else f"{type(error).__name__}: "
        raise InputError(f"the ONNX checker refuses the file: {kind}{error}") from None


def _load_external(graph: onnx.GraphProto, folder: Path | None, limit: int) -> bool:
    """Put numbers that lie in other files of a folder into the tensors themselves; returns True if there were any.

    The standard's library refuses files outside of the folder, and links. All these tensors have ``limit`` bytes at
    most.
    """
    found = False
    for place, tensor in _tensors(graph):
        if tensor.data_location != TensorProto.EXTERNAL:
            if tensor.external_data:
                raise InputError("names a file for its data, which it holds itself", place=place)
            continue
        if folder is None:
            raise UnsupportedError("its data lies in another file, and where is not known", place=place)
        try:
            with warnings.catch_warnings(action="ignore"):
                info = ExternalDataInfo(tensor)
                size = (
                    (folder / info.location).stat().st_size - (info.offset or 0) if info.length is None else info.length
                )
                if size > limit:
                    raise InputError(f"tensors of more than {MAX_BYTES:,} bytes together", place=place)
                load_external_data_for_tensor(tensor, str(folder))
        except InputError:
            raise
        except Exception as error:  # the library has exceptions of its own, and lets others of C++ through
            raise InputError(f"its data: {' '.join(str(error).split())}", place=place) from None
        found, limit = True, limit - len(tensor.raw_data)
    return found


def sort(graph: onnx.GraphProto) -> bool:
    """Sort nodes topologically, as the standard demands; returns True if they were not.

    The next node is always the first one of the file that needs nothing of those that are left: certificates count
    activations in this order.

    Raises:
        InputError: if nodes need each other in a circle.
    """
    made = {name: number for number, node in enumerate(graph.node) for name in node.output if name}
    needs = [{made[name] for name in node.input if name in made} for node in graph.node]
    if all(before < number for number, each in enumerate(needs) for before in each):
        return False
    sorter = TopologicalSorter(dict(enumerate(needs)))
    try:
        sorter.prepare()
    except CycleError:
        raise InputError("its nodes need each other in a circle") from None
    ready, order = list[int](), list[int]()
    while sorter.is_active():
        for number in sorter.get_ready():
            heapq.heappush(ready, number)
        order.append(heapq.heappop(ready))
        sorter.done(order[-1])
    _replace(graph.node, [graph.node[number] for number in order])
    return True


def _complete(model: onnx.ModelProto) -> Iterator[str]:
    """Give outputs without a type or a shape the inferred ones, drop what says nothing of other tensors; says so."""
    graph = model.graph
    typed = [info for info in graph.value_info if info.HasField("type")]
    if len(typed) < len(graph.value_info):
        yield f"{len(graph.value_info) - len(typed)} tensors are named without a type: that is left out"
        _replace(graph.value_info, typed)
    lacking = []
    for output in graph.output:
        kind = output.type.WhichOneof("value")
        if kind is None or (kind == "tensor_type" and not output.type.tensor_type.HasField("shape")):
            lacking.append(output)
    if not lacking:
        return
    if not survives(lambda: onnx.shape_inference.infer_shapes(model)):
        raise InputError(_CRASHES)
    inferred = _checked(lambda: onnx.shape_inference.infer_shapes(model))
    types = {output.name: output for output in inferred.graph.output}
    for output in lacking:
        output.CopyFrom(types[output.name])
        yield f"output '{output.name}' has no type or no shape: those that follow from the operators are taken"


def require_onnx(start: bytes) -> None:
    """Refuse a file whose first bytes are no ONNX file's: the first field is one of a model's."""
    if start[:1] not in _FIRST:
        raise InputError("not an ONNX file")


def opset_of(model: onnx.ModelProto, domain: str = "") -> int:
    """Return the version of the operators of a domain that a model imports; by default of the standard ones.

    Raises:
        InputError: if the model names none, or several; skl2onnx names one twice.
    """
    names = ("", "ai.onnx") if domain in ("", "ai.onnx") else (domain,)
    versions = {entry.version for entry in model.opset_import if entry.domain in names}
    if len(versions) != 1:
        which = "the standard operators" if "" in names else f"the operators of {domain}"
        raise InputError(f"the file imports {len(versions)} versions of {which} where one is expected")
    return int(versions.pop())


def _refuse_unread_parts(model: onnx.ModelProto) -> None:
    if not OLDEST_IR <= model.ir_version <= NEWEST_IR:
        raise UnsupportedError(f"IR version {model.ir_version}; versions {OLDEST_IR} to {NEWEST_IR} are read")
    opset_of(model)
    if model.functions:
        raise UnsupportedError(
            "an operator of the file's own is not supported", place=f"function '{model.functions[0].name}'"
        )
    if model.graph.sparse_initializer:
        raise UnsupportedError("sparse initializers are not supported: store dense ones")
    for node in model.graph.node:
        if any(attribute.HasField("g") or attribute.graphs for attribute in node.attribute):
            raise UnsupportedError("not supported: it has a subgraph", place=f"node '{node.name}' ({node.op_type})")


def _tensors(graph: onnx.GraphProto) -> Iterator[tuple[str, TensorProto]]:
    """Yield all tensors of a graph, with how messages name them."""
    for initializer in graph.initializer:
        yield f"initializer '{initializer.name}'", initializer
    for node in graph.node:
        for attribute in node.attribute:
            place = f"node '{node.name}' ({node.op_type})"
            if attribute.HasField("t"):
                yield place, attribute.t
            for tensor in attribute.tensors:
                yield place, tensor
            if attribute.HasField("sparse_tensor") or attribute.sparse_tensors:
                raise UnsupportedError("not supported: a sparse tensor", place=place)


def array(tensor: TensorProto, place: str) -> np.ndarray:
    """Return a tensor of the file as an array; bytes that do not fit its type and shape are refused."""
    try:
        return numpy_helper.to_array(tensor)
    except Exception as error:  # whatever the bytes make numpy say
        raise InputError(f"malformed: {error}", place=place) from error


FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT16)
"""The types of elements that inputs may have."""

WHOLE = (onnx.TensorProto.INT32, onnx.TensorProto.INT64, onnx.TensorProto.BOOL)
"""The other types of elements that outputs may have: a truth value is 0 or 1."""


@dataclass(frozen=True)
class Chosen:
    """The tensors of a file between which a network is read, by their names.

    Attributes:
        inputs: all inputs of the file, in the order in which the network takes them; empty: in the file's order.
        outputs: some of the file's outputs, in the order in which the network gives them; empty: all that have elements
            of floating-point numbers, in the file's order, or where there are none those of whole numbers. In the place
            of a map from classes to numbers (ZipMap) there are the numbers.
        hidden: computed tensors of the file that are outputs of the network after the others.
    """

    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()


EVERYTHING = Chosen()
"""The file's inputs and outputs in the file's order."""


def declared_inputs(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """Return the inputs of a file: old files list initializers among them, too, which are none."""
    initial = {initializer.name for initializer in model.graph.initializer}
    return [declared for declared in model.graph.input if declared.name not in initial]


def input_shape(declared: onnx.ValueInfoProto) -> tuple[Shape, bool]:
    """Return the shape of one sample, and whether the file has a batch axis before it.

    Raises:
        UnsupportedError: if the input is no tensor of floating-point numbers, or more of its dimensions than a
            leading one are symbolic.
    """
    place = f"input '{declared.name}'"
    kind = declared.type.tensor_type
    if kind.elem_type not in FLOATS:
        raise UnsupportedError("it is not a tensor of floating-point numbers", place=place)
    if not kind.HasField("shape"):
        raise UnsupportedError("it has no shape", place=place)
    sizes = [d.dim_value if d.HasField("dim_value") else 0 for d in kind.shape.dim]
    # Some exporters write 0 for a symbolic batch.
    batched = len(sizes) >= 2 and sizes[0] in (0, 1)
    shape = tuple(sizes[batched:])
    if not sizes or any(size < 1 for size in shape):
        shown = ", ".join(d.dim_param or str(d.dim_value) for d in kind.shape.dim)
        raise UnsupportedError(f"of shape ({shown}): only the leading dimension may be symbolic", place=place)
    return shape, batched


def single(model: onnx.ModelProto, chosen: Chosen = EVERYTHING) -> tuple[tuple[str, ...], list[str]]:
    """Make a file one with a single input and a single output, in place.

    Args:
        model: a file that the standard's checker accepts.
        chosen: the tensors between which the network is read.

    Returns:
        The names of the file's tensors that the network's input and output consist of: inputs, outputs, hidden ones;
        nothing if the file has a single input and a single output already, and is left as it is. And of each output
        that is no tensor of floating-point numbers, and was not chosen, what is taken in its place.

    Raises:
        InputError: if a chosen tensor does not exist, or is chosen twice.
        UnsupportedError: if no output is a tensor of numbers or truth values, or tensors differ in their types.
    """
    graph = model.graph
    inputs = _inputs(model, chosen)
    # A map's numbers are what a ZipMap makes it of. Their type is not declared; what is read of them shows it.
    maps = {name: node.input[0] for node in graph.node if node.op_type == "ZipMap" for name in node.output}
    outputs = _outputs(graph, maps, chosen)
    as_declared = outputs == [declared.name for declared in graph.output] and len(outputs) == 1
    if len(inputs) == 1 and as_declared:
        return (), []
    left = [declared.name for declared in graph.output if not chosen.outputs and declared.name not in outputs]
    instead = {True: "is a map, whose numbers are taken", False: "has no floating-point numbers and is left out"}
    names, needed, kept = (*(declared.name for declared in inputs), *outputs), set(outputs), list[onnx.NodeProto]()
    for node in reversed(graph.node):
        if needed.intersection(node.output):
            needed.update(node.input)
            kept.append(node)
    _replace(graph.node, kept[::-1])
    taken = {name for node in graph.node for name in (*node.input, *node.output)}
    taken.update(names, (initializer.name for initializer in graph.initializer))

    def free(base: str) -> str:
        """Return a name that nothing has."""
        while base in taken:
            base += "_"
        taken.add(base)
        return base

    if len(inputs) > 1:
        _take_from_one(graph, inputs, free)
    if not as_declared:
        _give_as_one(graph, outputs, free)
    return names, [f"output '{name}' {instead[name in maps]}" for name in left]


def _replace(field: Any, by: Sequence[Any]) -> None:
    del field[:]
    field.extend(by)


def _require_one_type(kinds: set[int], what: str) -> None:
    if len(kinds) > 1:
        shown = " and ".join(sorted(TensorProto.DataType.Name(kind).lower() for kind in kinds))
        raise UnsupportedError(f"{what} of different types, {shown}: convert one of them")


def _inputs(model: onnx.ModelProto, chosen: Chosen) -> list[onnx.ValueInfoProto]:
    found = {declared.name: declared for declared in declared_inputs(model)}
    if not found:
        raise UnsupportedError("the network has no input")
    if chosen.inputs and sorted(chosen.inputs) != sorted(found):
        raise InputError(f"the inputs are {_listed(found)}, not {_listed(chosen.inputs)}")
    kinds = {declared.type.tensor_type.elem_type for declared in found.values()}
    if kinds <= set(FLOATS):
        _require_one_type(kinds, "inputs")
    return [found[name] for name in chosen.inputs or found]


def _outputs(graph: onnx.GraphProto, maps: dict[str, str], chosen: Chosen) -> list[str]:
    """Return the names of the tensors that the network gives, in order; ``maps``: of maps those of their numbers."""
    types = {one.name: one.type.tensor_type.elem_type for one in graph.output if one.name not in maps}
    floats = [maps.get(one.name, one.name) for one in graph.output if types.get(one.name, FLOATS[0]) in FLOATS]
    whole = [name for name, kind in types.items() if kind in WHOLE]
    if not graph.output or not (floats or whole or chosen.outputs):
        raise UnsupportedError("no output is a tensor of numbers or truth values")
    if missing := [name for name in chosen.outputs if name not in floats + whole]:
        raise InputError(f"no output '{missing[0]}' of numbers; there are {_listed(floats + whole)}")
    computed = {name for node in graph.node for name in node.output if name}
    if missing := [name for name in chosen.hidden if name not in computed]:
        raise InputError(f"no node computes a tensor '{missing[0]}'")
    found = [*(chosen.outputs or floats or whole), *chosen.hidden]
    _require_one_type({types[name] for name in found if name in types}, "outputs")
    if len(set(found)) < len(found):
        raise InputError(f"a tensor is named twice among {_listed(found)}")
    return found


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names) or "none"


def _take_from_one(graph: onnx.GraphProto, inputs: Sequence[onnx.ValueInfoProto], free: Callable[[str], str]) -> None:
    """Put one input in the place of several, from which each is gathered."""
    whole, start, nodes = free("inputs"), 0, []
    for declared in inputs:
        shape, batched = input_shape(declared)
        places = np.arange(start, start + math.prod(shape)).reshape((1,) * batched + shape)
        indices = numpy_helper.from_array(places, free(f"{declared.name}/places"))
        graph.initializer.append(indices)
        nodes.append(onnx.helper.make_node("Gather", [whole, indices.name], [declared.name], name=declared.name))
        start += math.prod(shape)
    one = onnx.helper.make_tensor_value_info(whole, inputs[0].type.tensor_type.elem_type, [start])
    _replace(graph.input, [one, *(declared for declared in graph.input if declared not in inputs)])
    _replace(graph.node, [*nodes, *graph.node])


def _give_as_one(graph: onnx.GraphProto, outputs: Sequence[str], free: Callable[[str], str]) -> None:
    """Put one output in the place of several, in which they follow each other."""
    kind = next((o.type.tensor_type.elem_type for o in graph.output if o.name in outputs), TensorProto.FLOAT)
    rows = [free(f"{name}/row") for name in outputs]
    whole = free("outputs")
    for name, row in zip(outputs, rows, strict=True):
        graph.node.append(onnx.helper.make_node("Flatten", [name], [row], name=row, axis=0))
    graph.node.append(onnx.helper.make_node("Concat", rows, [whole], name=whole, axis=1))
    _replace(graph.output, [onnx.helper.make_tensor_value_info(whole, kind, [1, "outputs"])])
