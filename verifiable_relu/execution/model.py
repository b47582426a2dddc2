"""The network that a query is about: as its file means it, or as a runtime computes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import onnx
import torch

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.execution.operators import OperatorLog
from verifiable_relu.execution.rounded import with_rounding
from verifiable_relu.ir.enclosure import sample_points
from verifiable_relu.ir.families import harden
from verifiable_relu.ir.network import Network, live
from verifiable_relu.readers.onnx.compare import compare_at
from verifiable_relu.readers.onnx.model import load_model
from verifiable_relu.readers.onnx.read import Reading
from verifiable_relu.readers.onnx.write import write_onnx
from verifiable_relu.readers.simplify import finished
from verifiable_relu.rounding import ARITHMETICS
from verifiable_relu.settings import neutral


@neutral()
def as_executed(network: Network, arithmetic: str) -> Network:
    """Return a network as its ONNX file is computed in an arithmetic.

    Args:
        network: read from an ONNX file, or one that can be written as such a file, which is then what is meant.
        arithmetic: ``real``, which leaves the network as it is, or one of ``rounding.ARITHMETICS``.

    Raises:
        InputError: for another name, or if onnxruntime computes something else than the operators of a quantised file.
        UnsupportedError: if the file has an operator, or a use of one, whose rounding is not modelled; names the node.
    """
    if arithmetic == "real":
        return network
    if arithmetic not in ARITHMETICS:
        raise InputError(f"unknown arithmetic '{arithmetic}'; there are real, {', '.join(ARITHMETICS)}")
    data = write_onnx(network)
    model, _, _ = load_model(data, None, Reading)
    log = OperatorLog()
    reading = Reading(model, log)
    declared = {tensor.type.tensor_type.elem_type for tensor in model.graph.input}
    if not declared <= {onnx.TensorProto.FLOAT}:
        raise UnsupportedError(f"the input of the network '{network.name}' is not declared as float32")
    try:
        ops, output = with_rounding(*finished(reading.build, reading.output), log.operators, ARITHMETICS[arithmetic])
    except OverflowError as error:
        raise UnsupportedError(f"the network '{network.name}': {error}") from None
    source = replace(network.source, onnx=data, run=None, batched=reading.batched)
    found = replace(network, ops=live(ops, output)[0], arithmetic=arithmetic, source=source)
    if any(operator.quantises for operator in log.operators.values()):
        compare_at(found, sample_points((found.input_size,), torch.float64).numpy())
    return found


def execution_model(
    network: Network, arithmetic: str = "real", family: float | Sequence[float] | bool | None = None
) -> Network:
    """Return the network as it runs, and with ``family`` all at once that it can have come from.

    Every op has the error of its rounding, and every function is any of its family: what bounds prove of the result
    holds for each λ'-GELU network with λ' ≥ λ, for the ReLU network, in real numbers, and for every evaluation of its
    file. (An error of zero is within each error, and ReLU rounds nothing.)

    Args:
        network: as in ``as_executed``, which says what is raised, too.
        arithmetic: as there.
        family: λ, as ``harden`` takes it; True for that of the network's own λ-GELUs, None or False for none.

    Raises:
        InputError: as ``as_executed`` and ``harden`` do; and for a family in an arithmetic that rounds weights.
    """
    found = as_executed(network, arithmetic)
    if family is None or family is False:
        return found
    lam = None if family is True else family
    members = harden(network, lam)
    if arithmetic == "real":
        return members
    if ARITHMETICS[arithmetic].result:
        # Members in real arithmetic have the stored weights, and bounds are those of rounded ones.
        raise InputError(f"no family is known in {arithmetic}, which rounds weights; ask in real arithmetic or float32")
    return harden(found, lam)
