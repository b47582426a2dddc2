"""A file with several inputs or outputs as one with a single input and output, which is what a network has.

The new input is a vector of the elements of all inputs, one input after another, each in row-major order; a Gather with
constant indices takes each input out of it. The new output is a row of the elements of all outputs likewise. Neither
computes anything, so that nothing is rounded. All that deals with a network's file, the comparison with onnxruntime and
the replay of counterexamples above all, has the new file in place of the user's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import numpy_helper

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.network.nodes import Shape

FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT16)
"""The types of elements that inputs and outputs may have."""


@dataclass(frozen=True)
class Chosen:
    """The tensors of a file between which a network is read, by their names.

    Attributes:
        inputs: all inputs of the file, in the order in which the network takes them; empty: in the file's order.
        outputs: some of the file's outputs, in the order in which the network gives them; empty: all that have elements
            of floating-point numbers, in the file's order. In the place of a map from classes to numbers (ZipMap) there
            are the numbers.
        hidden: computed tensors of the file that are outputs of the network after the others.
    """

    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()


EVERYTHING = Chosen()
"""The file's inputs and outputs in the file's order."""


def declared_inputs(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """The inputs of a file: old files list initializers among them, too, which are none."""
    initial = {initializer.name for initializer in model.graph.initializer}
    return [declared for declared in model.graph.input if declared.name not in initial]


def input_shape(declared: onnx.ValueInfoProto) -> tuple[Shape, bool]:
    """The shape of one sample, and whether the file has a batch axis before it.

    Raises:
        UnsupportedError: if the input is no tensor of floating-point numbers, or more of its dimensions than a
            leading one are symbolic.
    """
    place = f"input '{declared.name}'"
    kind = declared.type.tensor_type
    if kind.elem_type not in FLOATS:
        raise UnsupportedError("is no tensor of floating-point numbers", place=place)
    if not kind.HasField("shape"):
        raise UnsupportedError("has no shape", place=place)
    sizes = [d.dim_value if d.HasField("dim_value") else 0 for d in kind.shape.dim]
    # Some exporters write 0 for a symbolic batch.
    batched = len(sizes) >= 2 and sizes[0] in (0, 1)
    shape = tuple(sizes[batched:])
    if not sizes or any(size < 1 for size in shape):
        shown = ", ".join(d.dim_param or str(d.dim_value) for d in kind.shape.dim)
        raise UnsupportedError(f"of shape ({shown}): only the leading dimension may be symbolic", place=place)
    return shape, batched


def single(model: onnx.ModelProto, chosen: Chosen = EVERYTHING) -> tuple[str, ...]:
    """Make a file one with a single input and a single output, in place.

    Args:
        model: a file that the standard's checker accepts.
        chosen: the tensors between which the network is read.

    Returns:
        The names of the file's tensors that the network's input and output consist of: inputs, outputs, hidden ones;
        nothing if the file has a single input and a single output already, and is left as it is.

    Raises:
        InputError: if a chosen tensor does not exist, or is chosen twice.
        UnsupportedError: if no output is a tensor of floating-point numbers, or tensors differ in their types.
    """
    graph = model.graph
    inputs = _inputs(model, chosen)
    outputs = _outputs(graph, chosen)
    as_declared = len(outputs) == 1 and outputs == [declared.name for declared in graph.output]
    if len(inputs) == 1 and as_declared:
        return ()
    names = (*(declared.name for declared in inputs), *outputs)
    _keep_needed(graph, outputs)
    taken = {name for node in graph.node for name in (*node.input, *node.output)} | set(names)
    taken |= {initializer.name for initializer in graph.initializer}
    if len(inputs) > 1:
        _take_from_one(graph, inputs, taken)
    if not as_declared:
        _give_as_one(graph, outputs, taken)
    return names


def _inputs(model: onnx.ModelProto, chosen: Chosen) -> list[onnx.ValueInfoProto]:
    """The inputs in the order in which the network takes them."""
    found = {declared.name: declared for declared in declared_inputs(model)}
    if not found:
        raise UnsupportedError("no input")
    if chosen.inputs and sorted(chosen.inputs) != sorted(found):
        raise InputError(f"the inputs are {_listed(found)}, not {_listed(chosen.inputs)}")
    ordered = [found[name] for name in chosen.inputs or found]
    types = {declared.type.tensor_type.elem_type for declared in ordered}
    if len(types) > 1 and types <= set(FLOATS):
        shown = " and ".join(sorted(onnx.TensorProto.DataType.Name(kind).lower() for kind in types))
        raise UnsupportedError(f"inputs of different types, {shown}: convert one of them")
    return ordered


def _outputs(graph: onnx.GraphProto, chosen: Chosen) -> list[str]:
    """The names of the tensors that the network gives, in order."""
    computed = {name for node in graph.node for name in node.output if name}
    # What a map's numbers are is not declared; what is read of them shows whether they are floating-point numbers.
    maps = {name: node.input[0] for node in graph.node if node.op_type == "ZipMap" for name in node.output}
    floats = [
        maps.get(declared.name, declared.name)
        for declared in graph.output
        if declared.name in maps or declared.type.tensor_type.elem_type in FLOATS
    ]
    if not graph.output or not (floats or chosen.outputs):
        raise UnsupportedError("no output is a tensor of floating-point numbers")
    for name in chosen.outputs:
        if name not in floats:
            raise InputError(f"no output '{name}' of floating-point numbers; there are {_listed(floats)}")
    for name in chosen.hidden:
        if name not in computed:
            raise InputError(f"no node computes a tensor '{name}'")
    found = [*(chosen.outputs or floats), *chosen.hidden]
    types = {one.name: one.type.tensor_type.elem_type for one in graph.output if one.name not in maps}
    if len(kinds := {types[name] for name in found if name in types}) > 1:
        shown = " and ".join(sorted(onnx.TensorProto.DataType.Name(kind).lower() for kind in kinds))
        raise UnsupportedError(f"outputs of different types, {shown}: convert one of them")
    if len(set(found)) < len(found):
        raise InputError(f"a tensor is named twice among {_listed(found)}")
    return found


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names) or "none"


def _keep_needed(graph: onnx.GraphProto, outputs: Sequence[str]) -> None:
    """Drop the nodes that no output depends on."""
    needed = set(outputs)
    kept = []
    for node in reversed(graph.node):
        if needed.intersection(node.output):
            needed.update(node.input)
            kept.append(node)
    del graph.node[:]
    graph.node.extend(reversed(kept))


def _free(base: str, taken: set[str]) -> str:
    """A name that no tensor has, which is taken from now on."""
    name = base
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def _take_from_one(graph: onnx.GraphProto, inputs: Sequence[onnx.ValueInfoProto], taken: set[str]) -> None:
    """Put one input in the place of several, from which each is gathered."""
    whole, start, nodes = _free("inputs", taken), 0, []
    for declared in inputs:
        shape, batched = input_shape(declared)
        size = math.prod(shape)
        places = np.arange(start, start + size).reshape((1,) * batched + shape)
        indices = numpy_helper.from_array(places, _free(f"{declared.name}/places", taken))
        graph.initializer.append(indices)
        nodes.append(onnx.helper.make_node("Gather", [whole, indices.name], [declared.name], name=declared.name))
        start += size
    kind = inputs[0].type.tensor_type.elem_type
    listed = {declared.name for declared in inputs}
    rest = [declared for declared in graph.input if declared.name not in listed]
    del graph.input[:]
    graph.input.extend([onnx.helper.make_tensor_value_info(whole, kind, [start]), *rest])
    nodes += graph.node
    del graph.node[:]
    graph.node.extend(nodes)


def _give_as_one(graph: onnx.GraphProto, outputs: Sequence[str], taken: set[str]) -> None:
    """Put one output in the place of several, in which they follow each other."""
    kind = next((o.type.tensor_type.elem_type for o in graph.output if o.name in outputs), onnx.TensorProto.FLOAT)
    rows = [_free(f"{name}/row", taken) for name in outputs]
    whole = _free("outputs", taken)
    for name, row in zip(outputs, rows, strict=True):
        graph.node.append(onnx.helper.make_node("Flatten", [name], [row], name=row, axis=0))
    graph.node.append(onnx.helper.make_node("Concat", rows, [whole], name=whole, axis=1))
    del graph.output[:]
    graph.output.append(onnx.helper.make_tensor_value_info(whole, kind, [1, "outputs"]))
