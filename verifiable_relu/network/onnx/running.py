"""A network as a runtime computes it: every operator that rounds becomes a node with the error of its rounding.

What is proved of the result holds for every evaluation of the file in an arithmetic of ``rounding.ARITHMETICS``: at
each input, what the runtime computes is what the nodes compute with some weights and offsets within their errors
(``Affine.weight_error``, ``Affine.offset_terms``). An operator of the file stays what it is, so nothing is simplified
here: two operators that cancel each other in real arithmetic do not in a runtime. The model, operator by operator:

- **Sums of products** (``SUMS``): W·x + b with the error of ``RuntimeArithmetic.relative`` on every product and b. The
  number of terms counts those of the affine operators right before it as well, since a runtime may fuse a product, a
  bias, a batch normalisation and a residual sum into one sum in any order. The sum x + y of two computed values has the
  error on x and on y.
- **What compares or moves numbers** (``EXACT``) computes them as they are.
- **Quantised operators** (``quantises``) round where they divide or multiply by a scale; whole numbers are exact, and
  before it is rounded to one a number is off by ``rounding.tie`` more.
- **Sigmoid, Tanh and Erf** are off by ``rounding.ELEMENTARY``, GELU by that part of its argument, Exp by that part of
  itself, and by the rounding of their result; Softmax by that and by the error of a sum of its numbers.
- Everything else is refused by name, and so are constants that the file computes from constants by rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.execution.operators import ADDING, EXACT, SUMS, quantises
from verifiable_relu.execution.requantised import Requantised
from verifiable_relu.ir.enclosure import sample_points
from verifiable_relu.network.adapt import Nodes
from verifiable_relu.network.build import as_network
from verifiable_relu.network.family import hardened
from verifiable_relu.network.graph import Network, whole
from verifiable_relu.network.nodes import (
    Activation,
    Add,
    Affine,
    Curve,
    Gelu,
    Kinked,
    Node,
    Permute,
    Product,
    Reshape,
    Scale,
    Sparse,
    Step,
)
from verifiable_relu.network.onnx.compare import compare_at
from verifiable_relu.network.onnx.write import write_onnx
from verifiable_relu.readers.builder import Value
from verifiable_relu.readers.derived import Derived, both
from verifiable_relu.readers.onnx.model import load_model
from verifiable_relu.readers.onnx.read import Reading
from verifiable_relu.rounding import ARITHMETICS, ELEMENTARY, SPARE, RuntimeArithmetic, not_below, tie, tiny
from verifiable_relu.settings import neutral


def rounds(operator: str) -> bool:
    """Whether an operator's result is rounded."""
    return operator in SUMS or quantises(operator)


@neutral()
def deployed(network: Network, arithmetic: str) -> Network:
    """The network as its ONNX file is computed in an arithmetic.

    Args:
        network: read from an ONNX file, or one that can be written as such a file, which is then what is meant.
        arithmetic: ``real``, which leaves the network as it is, or one of ``rounding.ARITHMETICS``.

    Raises:
        InputError: for another name.
        UnsupportedError: if the file has an operator, or a use of one, whose rounding is not modelled; names the node.
    """
    if arithmetic == "real":
        return network
    if arithmetic not in ARITHMETICS:
        raise InputError(f"unknown arithmetic '{arithmetic}'; there are real, {', '.join(ARITHMETICS)}")
    data = network.onnx if network.onnx is not None else write_onnx(network)
    model, data, _ = load_model(data, None, _RecordedReading)
    reading = _RecordedReading(model)
    declared = {tensor.type.tensor_type.elem_type for tensor in model.graph.input}
    if not declared <= {onnx.TensorProto.FLOAT}:
        raise UnsupportedError(f"the input of the network '{network.name}' is not declared as float32")
    try:
        nodes, output = _rounding(reading, ARITHMETICS[arithmetic])
    except OverflowError as error:
        raise UnsupportedError(f"the network '{network.name}': {error}") from None
    found = as_network(nodes, output, name=network.name, onnx=data, batched=reading.batched, ports=network.ports)
    found = replace(found, arithmetic=arithmetic, mended=network.mended)
    if reading.quantised:
        compare_at(found, sample_points(found.input_shape, torch.float64).reshape(-1, found.input_size).numpy())
    return found


def meant(network: Network, arithmetic: str = "real", joint: float | Sequence[float] | bool | None = None) -> Network:
    """The network as it runs, and with ``joint`` all at once that it can have come from.

    Every node has the error of its rounding, and every activation is any of its family: what bounds prove of the result
    holds for each λ'-GELU network with λ' ≥ λ, for the ReLU network, in real numbers, and for every evaluation of its
    file. (An error of zero is within each error, and ReLU rounds nothing.)

    Args:
        network: as in ``deployed``, which says what is raised, too.
        arithmetic: as there.
        joint: λ, as ``hardened`` takes it; True for that of the network's own λ-GELUs, None or False for none.

    Raises:
        InputError: as ``deployed`` and ``hardened`` do; and for a family in an arithmetic that rounds weights.
    """
    found = deployed(network, arithmetic)
    if joint is None or joint is False:
        return found
    lam = None if joint is True else joint
    family = hardened(network, lam)
    if arithmetic == "real":
        return family
    if ARITHMETICS[arithmetic].result:
        # Members in real arithmetic have the stored weights, and bounds are those of rounded ones.
        raise InputError(f"no family is known in {arithmetic}, which rounds weights; ask in real arithmetic or float32")
    return hardened(found, lam)


@dataclass
class _RecordedReading(Reading):
    """A model, node by node, with the operator from which each op comes.

    Attributes:
        operators: by the number of an op of ``build``.
        constants: the names of constants that are rounded, since the file stores them as whole numbers.
        spans: by name of a tensor that sums numbers of whole ones, Σ 2·N_i·s_i of these (``rounding.tie``).
        quantised: by name of a quantising operator's result N and the span of what it quantises.
    """

    operators: dict[int, onnx.NodeProto] = field(default_factory=dict)
    constants: set[str] = field(default_factory=set)
    spans: dict[str, Fraction] = field(default_factory=dict)
    quantised: dict[str, tuple[int, Fraction]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._requantised = Requantised(self.tensors, EXACT)
        super().__post_init__()

    def _numbers(self, names: Iterable[str]) -> int:
        """How many numbers the largest type of quantised ones has that is among those of some tensors."""
        found = []
        for name in filter(None, names):
            tensor, kind = self.tensors.get(name), self.types.get(name, 0)
            dtype = tensor.dtype if isinstance(tensor, np.ndarray) else None
            if dtype is None and kind:
                dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind))
            bits = str(dtype).rpartition("int")[2]
            if bits.isdigit() and int(bits) <= 16:
                found.append(2 ** int(bits))
        return max(found, default=2**16)

    def _spanned(self, node: onnx.NodeProto) -> None:
        """Note how large the terms of sums of quantised numbers may be."""
        before = sum((self.spans.get(name, Fraction(0)) for name in node.input), Fraction(0))

        def span(numbers: str, scale: str, *zero: str) -> Fraction:
            scales = self.tensors[scale]
            assert isinstance(scales, np.ndarray)
            return 2 * self._numbers((numbers, *zero)) * Fraction(float(np.abs(scales).max()))

        if node.op_type == "DequantizeLinear":
            self.spans[node.output[0]] = span(*node.input[:3])
        elif node.op_type == "QLinearAdd":
            summed = span(*node.input[:3]) + span(*node.input[3:6])
            self.quantised[node.output[0]] = self._numbers(node.input), summed
        elif quantises(node.op_type):
            # All others multiply, or move numbers.
            summed = before if node.op_type == "QuantizeLinear" else Fraction(0)
            self.quantised[node.output[0]] = self._numbers((*node.input, node.output[0])), summed
        elif node.op_type in ADDING or node.op_type in EXACT:
            self.spans[node.output[0]] = before

    def take(self, node: onnx.NodeProto, label: str) -> None:
        known = len(self.build.ops)
        super().take(node, label)
        found = [self.tensors[name] for name in node.output if name in self.tensors]
        if node.op_type in ("Constant", "ConstantOfShape", "Shape", "Size"):
            return
        floats = any(isinstance(f, Derived) or (isinstance(f, np.ndarray) and f.dtype.kind == "f") for f in found)
        place = f"node '{label}' ({node.op_type})"
        try:
            self._requantised.take(node)
        except UnsupportedError as error:
            raise UnsupportedError(error.message, place=place) from None
        if node.op_type == "Cast":
            to = {attribute.i for attribute in node.attribute if attribute.name == "to"}
            short = to != {onnx.TensorProto.FLOAT} or node.input[0] in self.whole
            if any(isinstance(f, Value) for f in found) and short:
                raise UnsupportedError("rounding to another type is not modelled", place=place)
            return
        computed = any(isinstance(f, Value) for f in found)
        stored = node.op_type == "DequantizeLinear" and not computed
        if given := self.constants.intersection(node.input):
            # They are operands that the file has in more digits than float32 (``rounding.SPARE``), where they multiply.
            stored = stored or (node.op_type in EXACT and not computed)
            if not stored and not (node.op_type in SUMS and computed):
                raise UnsupportedError(f"the rounding of '{min(given)}' is not modelled here", place=place)
        if stored:
            self.constants.update(node.output)
            self._spanned(node)
            return
        if not (rounds(node.op_type) or node.op_type in EXACT) or (floats and rounds(node.op_type)):
            what = "of constants " if floats else ""
            raise UnsupportedError(f"the rounding of this operator {what}is not modelled", place=place)
        if node.op_type in ("Sum", "Mean") and len(node.input) > SPARE // 2:
            raise UnsupportedError(f"more than {SPARE // 2} inputs, whose rounding is not modelled", place=place)
        for index in range(known, len(self.build.ops)):
            self.operators[index] = node
        self._spanned(node)


ONE, ZERO = torch.ones((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)


class _Rounding:
    """Nodes with the errors of their rounding, one after another.

    Attributes:
        by: the arithmetic.
        nodes: so far.
    """

    def __init__(self, by: RuntimeArithmetic) -> None:
        self.by = by
        self.nodes: list[Node] = []

    def add(self, node: Node) -> int:
        """Add a node as it is; returns its index."""
        self.nodes.append(node)
        return len(self.nodes) - 1

    def off(self, node: Any, terms: int, small: bool) -> int:
        """Add an affine node whose weights and offsets are off by the rounding of a sum of ``terms`` terms.

        ``small``: as ``RuntimeArithmetic.lost`` takes it.
        """
        lost = self.by.lost(terms, 2 * float(node.row_sums().amax()), small)
        return self._with(node, self.by.relative(terms), lost)

    def noise(
        self, source: int, relative: float, absolute: float = 0.0, small: bool = False, factor: float = 1.0
    ) -> int:
        """Add the value of a node times 1 + δ, |δ| ≤ ``relative``, plus an error of at most ``absolute``.

        ``small``: whether it is a product with a weight that may be below the smallest normal number; ``factor``: twice
        the size of the weight, as ``off`` takes it, where that is large.
        """
        node = self.nodes[source]
        same = Scale(name=node.name, inputs=(source,), shape=node.shape, center=ZERO, scale=ONE, shift=ZERO)
        return self._with(same, relative, self.by.lost(1, factor, small) + absolute)

    def result(self, index: int) -> int:
        """What is kept of the result of an operator."""
        return self.noise(index, float(self.by.result)) if self.by.result else index

    def _with(self, node: Any, relative: float, absolute: float) -> int:
        error = both(node.weight_error, relative)
        # |b_true − b| ≤ error·(|b| + offset_terms), of which the second part is to be the absolute error.
        terms = not_below(Fraction(absolute) / Fraction(error))
        return self.add(replace(node, weight_error=error, offset_terms=terms))

    def operator(self, node: Node, before: int, small: bool) -> tuple[int, int]:
        """Add a node of an operator that rounds; returns the index of its result and the terms of its sum.

        Args:
            node: the node, of these nodes.
            before: how many terms the affine operators right before it sum.
            small: as ``off`` takes it.
        """
        if isinstance(node, Reshape | Permute) or (isinstance(node, Sparse) and node.moves):
            return self.add(node), before
        if isinstance(node, Affine):
            terms = before + node.terms
            return self.result(self.off(node, terms, small)), terms
        if isinstance(node, Add):
            part = self.by.relative(before + 1)
            summands = tuple(self.noise(source, part) for source in node.inputs)
            return self.result(self.add(replace(node, inputs=summands))), before + 1
        absolute, relative = 0.0, self.by.relative(1)
        if isinstance(node, Gelu) or getattr(node, "function", "") == "tanh-GELU":
            # x·(1 + δ) − x is what it is off by.
            minus = Scale(name=node.name, inputs=node.inputs, shape=node.shape, center=ZERO, scale=-ONE, shift=ZERO)
            off = self.add(
                Add(name=node.name, inputs=(self.noise(node.inputs[0], ELEMENTARY), self.add(minus)), shape=node.shape)
            )
            index = self.add(Add(name=node.name, inputs=(self.add(node), off), shape=node.shape))
            return self.result(self.noise(index, relative)), 0
        if isinstance(node, Curve) and node.function in ("Sigmoid", "Tanh", "Erf"):
            absolute = ELEMENTARY
        elif isinstance(node, Curve) and node.function == "Exp":
            relative = both(relative, ELEMENTARY)
        elif not isinstance(node, Product | Kinked):
            raise UnsupportedError(f"the rounding of {node.op} is not modelled", place=node.place)
        return self.result(self.noise(self.add(node), relative, absolute, isinstance(node, Kinked))), 0


def _rounding(reading: _RecordedReading, by: RuntimeArithmetic) -> tuple[list[Node], int]:
    """The nodes with the errors of their rounding, and the index of the output."""
    made = _Rounding(by)
    output = reading.build.in_place(reading.output)
    given_nodes = Nodes(reading.build.ops, reading.input_shape, reading.operators)
    last = given_nodes.reshaped(given_nodes.at[output], reading.sample_shape, "output")
    read_nodes = given_nodes.nodes
    operators = [reading.operators.get(owner) for owner in given_nodes.owner]
    # Of each node: its result's index, how many terms the affine operators up to it sum, the least product
    # of weights of those that follow each other, and whether it has numbers of the input as they were given.
    at: list[int] = []
    least: list[float] = []
    terms: list[int] = []
    given: list[bool] = []
    counted = whole(read_nodes)
    for index, read in enumerate(read_nodes):
        before = max((terms[i] for i in read.inputs), default=0)
        node = replace(read, inputs=tuple(at[i] for i in read.inputs))
        operator = operators[index]
        product = min((least[i] for i in read.inputs), default=1.0)
        if isinstance(read, Affine):
            product = _least_weight(read) * min(1.0, product)
        least.append(1.0 if isinstance(read, Activation) else product)
        if operator is None:
            found, count = made.result(made.add(node)), 0
        else:
            node = _narrowed(node, operator, by.name) if by.result else node
            if quantises(operator.op_type) and index in counted:
                if isinstance(node, Step):
                    numbers, summed = reading.quantised[operator.output[0]]
                    by_scale: Any = read_nodes[read.inputs[0]]
                    scale = float(by_scale.divisor.abs().min())
                    off = tie(numbers, summed / Fraction(scale))
                    off = made.noise(node.inputs[0], by.relative(1), off, factor=max(1.0, 2 / scale))
                    node = replace(node, inputs=(off,))
                found, count = made.add(node), 0
            elif operator.op_type == "Softmax":
                # Its nodes are exact, but for the last one.
                found, count = made.add(node), 0
                if operators[index + 1 : index + 2] != [operator]:
                    length = max(node.shape, default=1) if reading.opset >= 13 else node.size
                    found = made.result(made.noise(found, by.relative(length), ELEMENTARY))
            elif rounds(operator.op_type):
                found, count = made.operator(node, before, least[-1] < tiny(torch.float32))
            else:
                found, count = made.add(node), 0 if isinstance(node, Activation) else before
        at.append(found)
        terms.append(count)
        rounded = operator is not None and rounds(operator.op_type)
        given.append(not rounded and (not index or any(given[i] for i in read.inputs)))
    if given[last]:
        raise UnsupportedError("an output is a number of the input: what a runtime makes of it is not modelled")
    return made.nodes, at[last]


def _least_weight(node: Affine) -> float:
    """The size of the least weight that is not zero; 1 where all are."""
    weights = [part for name in ("weight", "scale") if isinstance(part := getattr(node, name, None), Tensor)]
    return min((float(w[w != 0].abs().min()) for w in weights if bool((w != 0).any())), default=1.0)


def _narrowed(node: Node, operator: onnx.NodeProto, name: str) -> Node:
    """A node of an operator whose stored numbers are rounded to a narrower format, by its name.

    Raises:
        UnsupportedError: if the node has other numbers than those that the operator stores.
    """
    if operator.op_type in ("AveragePool", "GlobalAveragePool", "Mean", "ReduceMean", "ReduceSum"):
        return node
    derived = operator.op_type in ("BatchNormalization", "Div", "HardSigmoid", "LeakyRelu")
    factors = {a.f for a in operator.attribute if operator.op_type == "Gemm" and a.name in ("alpha", "beta")}
    if derived or factors - {1.0} or quantises(operator.op_type):
        place = f"node '{node.name}' ({operator.op_type})"
        raise UnsupportedError(f"numbers that are computed from stored ones are not modelled in {name}", place=place)

    def rounded(numbers: Tensor) -> Tensor:
        found = numbers.to(getattr(torch, name)).to(numbers.dtype)
        if not bool(found.isfinite().all()):
            place = f"node '{node.name}' ({operator.op_type})"
            raise UnsupportedError(f"a stored number is beyond the range of {name}", place=place)
        return found

    return node.map_tensors(rounded)
