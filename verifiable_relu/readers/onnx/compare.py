"""Comparison of a network that was read from ONNX with its file, as onnxruntime runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor

from verifiable_relu import runtime
from verifiable_relu.errors import InputError
from verifiable_relu.ir.enclosure import Mismatch, find_difference, sample_points
from verifiable_relu.ir.network import Network, Op
from verifiable_relu.readers.onnx.model import declared_inputs
from verifiable_relu.rounding import ARITHMETICS, unit_roundoff

_COMPLAINT = "the network that was read does not compute what the file does"


def compare(network: Network, ops: Sequence[Op], places: Mapping[str, int]) -> None:
    """Evaluate a network and the file it came from at points that suit any network.

    Args:
        network: as it was read, with the file's bytes.
        ops: as they were read, before anything was merged.
        places: the number of the op behind each computed tensor of the file.

    Raises:
        InputError: if onnxruntime refuses the file, or the two differ by more than rounding explains; it names the
            first node of the file at which they part.
    """
    assert network.source.onnx is not None
    source = _FileRun(network.source.onnx)
    points = sample_points(network.source.input_shape, source.dtype)
    if _output_difference(network, source, points, expected=True) is None:
        return
    model = onnx.load_model_from_string(network.source.onnx)
    computed = {output for node in model.graph.node for output in node.output}
    shown = {output.name for output in model.graph.output}
    watched = {name: index for name, index in places.items() if name in computed and index > 0}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in watched if name not in shown)
    source = _FileRun(model.SerializeToString())
    names = [output.name for output in model.graph.output]
    found = dict(zip(names, source.outputs(points, network.source.batched), strict=True))
    part = _difference(ops, points, {index: found[name] for name, index in watched.items()}, source.unit)
    if part is None:
        raise InputError(f"{_COMPLAINT}, though each single node does")
    raise InputError(f"{_COMPLAINT}: {part}", place=f"node '{part.op.name}'")


def compare_at(network: Network, points: np.ndarray) -> None:
    """Evaluate a network and the file it came from at further points, such as those of a property's box.

    A quantised file in a runtime's arithmetic is also compared with an onnxruntime session with default options.

    Args:
        network: as it was read from a file; one that was not is not compared, nor one in an arithmetic that rounds
            weights, in which no session runs.
        points: (batch, input size), rounded to float32 here; those beyond its range are left out.

    Raises:
        InputError: if the two differ by more than rounding explains.
    """
    arithmetic = ARITHMETICS.get(network.arithmetic)
    if network.source.onnx is None or (arithmetic is not None and arithmetic.result):
        return
    with np.errstate(over="ignore"):
        narrow = torch.from_numpy(points.astype(np.float32))
    narrow = narrow[torch.isfinite(narrow).all(1)]
    complaints = {False: _COMPLAINT}
    if network.arithmetic != "real" and is_quantised(network.source.onnx):
        complaints[True] = "with default options onnxruntime computes something else than the operators of the file"
    for default, complaint in complaints.items() if len(narrow) else ():
        try:
            source = _FileRun(network.source.onnx, default)
        except InputError:
            if default:
                # Version 1.31 refuses some files that it runs as they are written: there is nothing to compare.
                continue
            raise
        inputs = narrow.to(source.dtype).reshape(-1, *network.source.input_shape)
        if (found := _output_difference(network, source, inputs)) is not None:
            raise InputError(f"{complaint} at a point of the property's box: {found}")


def _output_difference(network: Network, source: _FileRun, points: Tensor, expected: bool = False) -> Mismatch | None:
    """Return where the file's outputs differ from the network's; with ``expected`` some must be finite."""
    found = source.outputs(points, network.source.batched)[0]
    if expected and not bool(torch.isfinite(found).any()):
        raise InputError("no output is finite where the network is compared with its file")
    if found.shape[1] != network.output_size:
        raise InputError(f"{found.shape[1]} outputs are computed where {network.output_size} were read")
    return _difference(network.ops, points, {len(network.ops) - 1: found}, source.unit)


def _difference(ops: Sequence[Op], points: Tensor, seen: Mapping[int, Tensor], unit: float) -> Mismatch | None:
    """Return where a source of unit roundoff ``unit`` differs from the ops.

    Float32, which takes half the time, is enough where it finds no difference: a bound of an error may underflow in it,
    which makes the comparison too strict, not too lax.
    """
    x = points.flatten(1)
    quick = find_difference(ops, x, seen, 2 * unit, x.dtype)
    return None if quick is None else find_difference(ops, x, seen, unit, torch.float64)


_TYPES = {
    "tensor(float)": (np.float32, torch.float32, unit_roundoff(torch.float32)),
    # onnxruntime computes erf of float64 numbers in float32, and so is whatever stands behind a Cast to it.
    "tensor(double)": (np.float64, torch.float64, unit_roundoff(torch.float32)),
    "tensor(float16)": (np.float16, torch.float32, unit_roundoff(torch.float16)),
}
"""By the type of a file's input: the type of its arrays, that in which it is compared, and its unit roundoff."""


class _FileRun:
    """Runner of a file: onnxruntime, or the standard's reference evaluator where that has no kernel.

    Attributes:
        dtype: in which the file's numbers are compared.
        unit: the unit roundoff in which it computes.
    """

    def __init__(self, data: bytes, default: bool = False) -> None:
        session = require_runs(data, default)
        if session is not None:
            (declared,) = session.get_inputs()
            self._runner, self._run, kind = "onnxruntime", session.run, declared.type
        else:
            self._runner, self._run, declared = "the ONNX reference evaluator", *_evaluator(data)
            kind = f"tensor({onnx.TensorProto.DataType.Name(declared.type.tensor_type.elem_type).lower()})"
        self._name = declared.name
        self._array, self.dtype, self.unit = _TYPES[kind]

    def outputs(self, points: Tensor, batched: bool) -> list[Tensor]:
        """Return each output of the graph, (batch, size), for points (batch, *input shape)."""
        try:
            with np.errstate(all="ignore"):
                samples = points.numpy().astype(self._array)
                runs = [self._run(None, {self._name: x[None] if batched else x}) for x in samples]
        except Exception as error:  # the runners' exceptions share no narrower base
            raise InputError(f"{self._runner} cannot run the file: {error}") from None
        each = zip(*runs, strict=True)
        return [torch.from_numpy(np.stack([np.reshape(x, -1) for x in found])).to(points.dtype) for found in each]


_WHOLE = b"QLinear", b"QGemm", b"Integer"
"""Parts of the names of operators that are kernels of whole numbers."""


def is_quantised(data: bytes) -> bool:
    """Return True if a file may have quantised operators, by their names."""
    return any(name in data for name in (b"eLinear", *_WHOLE))


def require_runs(data: bytes, default: bool = False) -> Any:
    """Return an onnxruntime session of the file; None if it lacks a kernel for some operator.

    Raises:
        InputError: if it refuses the file for another reason.
    """
    # Of kernels of whole numbers, those that do not saturate are an optimisation.
    quantised = is_quantised(data)
    optimised = default or not quantised or any(name in data for name in _WHOLE)
    try:
        # The standard's function is compared; a counterexample is replayed by the machine's runtime.
        return runtime.kept_session(data, precise=quantised, optimised=optimised)
    except Exception as error:  # onnxruntime's exceptions share no narrower base
        if type(error).__name__ == "NotImplemented":
            return None
        raise InputError(f"onnxruntime refuses the file: {error}") from None


def _evaluator(data: bytes) -> tuple[Any, onnx.ValueInfoProto]:
    from onnx.reference import ReferenceEvaluator

    model = onnx.load_model_from_string(data)
    for imported in model.opset_import:
        # The evaluator knows the standard's domain by its empty name alone.
        imported.domain = "" if imported.domain == "ai.onnx" else imported.domain
    (declared,) = declared_inputs(model)
    try:
        return ReferenceEvaluator(model).run, declared
    except Exception as error:  # the evaluator has no exception of its own
        raise InputError(f"the ONNX reference evaluator refuses the file: {error}") from None
