"""Networks as lists of operations on flat vectors.

Every op maps vectors (batch, n) to a vector (batch, size). Images and matrices are known to readers alone, and to the
one linear map, ``Convolution``, that needs their shape. Six kinds of op are enough: minimum, concatenation, matrix
products of computed values and residual connections are made of them.

Weights keep the bits of the file. Where an op's numbers are not those that the file means (1/√(σ² + ε), an average over
nine pixels, the float32 arithmetic of a runtime), ``Affine`` carries a bound of the difference.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from verifiable_relu.dyadic import Dyadic
from verifiable_relu.errors import InputError
from verifiable_relu.ir.functions.function import Function
from verifiable_relu.ir.functions.steps import StepFunction
from verifiable_relu.ir.linear import Diagonal, Gather, LinearMap, TensorCache

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class Op:
    """One operation. ``inputs`` are numbers of earlier ops; ``size`` is n; ``name`` is the value's in its source."""

    name: str
    inputs: tuple[int, ...] = ()
    size: int
    _copies: TensorCache = field(default_factory=TensorCache, init=False, repr=False)

    @abstractmethod
    def value(self, *xs: Tensor) -> Tensor:
        """Return the op's value, (batch, size), of its inputs' values, in their dtype and on their device."""

    @property
    def place(self) -> str:
        """The op's name in error messages."""
        return f"node '{self.name}' ({type(self).__name__})"

    @property
    def parameters(self) -> dict[str, object]:
        """Everything but the name that defines the op, by name; those of its map or function among them."""
        found: dict[str, object] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, LinearMap):
                found |= {f.name: type(value).__name__, "weight": value.weight, **value.parameters}
            elif isinstance(value, Function):
                found |= {f.name: value.kind, **value.parameters}
            elif f.name not in ("name", "_copies"):
                found[f.name] = value
        return found

    @property
    def keeps_whole(self) -> bool:
        """True if the op makes whole numbers of whole numbers."""
        return True


@dataclass(frozen=True, eq=False, kw_only=True)
class Input(Op):
    """The network's one input: op 0."""

    def value(self, *xs: Tensor) -> Tensor:
        return xs[0]


@dataclass(frozen=True, eq=False, kw_only=True)
class Affine(Op):
    """y = W·x + b.

    Attributes:
        map: W.
        bias: b, (size,), of any floating-point dtype; None for 0.
        weight_error: |W_true − W| ≤ weight_error·|W|, entry by entry; 0 where the stored numbers are meant. Where
            W·x + b is what a runtime computes by rounding, W_true and b_true are other numbers at every x.
        bias_error: |b_true − b| ≤ bias_error, (size,), float64; None for 0.
    """

    map: LinearMap
    bias: Tensor | None = None
    weight_error: float = 0.0
    bias_error: Tensor | None = None

    def value(self, *xs: Tensor) -> Tensor:
        found = self.map.apply(xs[0])
        bias = self.bias_as(found)
        return found if bias is None else found + bias

    def bias_as(self, like: Tensor) -> Tensor | None:
        """Return b in the dtype and on the device of a tensor; None for 0."""
        if (bias := self.bias) is None:
            return None
        return self._copies((like.dtype, like.device), lambda: bias.to(like), not bias.requires_grad)

    @property
    def is_exact(self) -> bool:
        """True if the stored numbers are those that the file means."""
        return not self.weight_error and self.bias_error is None

    @property
    def keeps_whole(self) -> bool:
        return self.is_exact and _are_whole((self.map.weight, self.bias))


@dataclass(frozen=True, eq=False, kw_only=True)
class Sum(Op):
    """The sum of two or more inputs (a residual connection)."""

    def value(self, *xs: Tensor) -> Tensor:
        total = xs[0]
        for x in xs[1:]:
            total = total + x
        return total


@dataclass(frozen=True, eq=False, kw_only=True)
class Elementwise(Op):
    """y[i] = f(x[i])."""

    function: Function

    def value(self, *xs: Tensor) -> Tensor:
        return self.function.value(xs[0])

    @property
    def place(self) -> str:
        return f"node '{self.name}' ({self.function.kind})"

    @property
    def keeps_whole(self) -> bool:
        # Those with exact values are piecewise linear, steps, and powers.
        return self.is_exact and _are_whole(self.function.parameters.values())

    @property
    def is_exact(self) -> bool:
        """True if the function has rational values at rational points (``Function.exact``)."""
        return self.function.exact(Dyadic(np.zeros(1, dtype=object), 0), 1) is not None


@dataclass(frozen=True, eq=False, kw_only=True)
class Product(Op):
    """y[i] = x[i]·z[i] of two inputs. A matrix product is two gathers, this, and a sparse sum."""

    def value(self, *xs: Tensor) -> Tensor:
        return xs[0] * xs[1]


@dataclass(frozen=True, eq=False, kw_only=True)
class Maximum(Op):
    """y[i] = the largest of x[candidates[:, i]]. The minimum is −Maximum(−x).

    Attributes:
        candidates: (most, size) numbers of elements of x, the first one repeated where an output has fewer.
    """

    candidates: Tensor

    def value(self, *xs: Tensor) -> Tensor:
        return xs[0][:, self._copies(xs[0].device, lambda: self.candidates.to(xs[0].device))].amax(1)


class Pair(NamedTuple):
    """Elementwise ops f(z) and g(z′) of one size in two networks inside one, whose values bounds compare.

    A hint without a meaning for values: bounds may take g(z′) as f(z) + (g(z′) − f(z)), the last part by bounds of the
    op ``apart``, whose value is z′ − z. Often nothing else reads that op.

    Attributes:
        first, apart, second: numbers of ops, ``second`` the largest.
    """

    first: int
    apart: int
    second: int


@dataclass(frozen=True, eq=False)
class Source:
    """The source of a network: for replay, for messages, and for the shapes that users know.

    Attributes:
        input_shape, output_shape: of one sample.
        onnx: the bytes of the ONNX file, if it was read from one.
        run: computes the outputs (1, *output_shape) of a float32 sample (1, *input_shape) as the source does; None if
            the source is ``onnx``, or nothing.
        batched: whether the ONNX input has a leading batch axis.
        ports: where the user's file has several inputs or outputs: their ONNX shapes with a batch of 1, by name, inputs
            first. ``onnx`` is then a file with one of each.
        repairs: a sentence for each deviation of the file from the standard, saying how it was read.
    """

    input_shape: Shape
    output_shape: Shape
    onnx: bytes | None = None
    run: Callable[[Tensor], Tensor] | None = field(default=None, repr=False)
    batched: bool = True
    ports: Mapping[str, Shape] = field(default_factory=dict)
    repairs: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Network:
    """Ops in topological order: the first is the ``Input``, the last the output.

    Attributes:
        ops: the operations.
        source: what it was made from.
        name: for messages and tables.
        arithmetic: "real", or the arithmetic of ``rounding.ARITHMETICS`` whose errors the ops carry.
        pairs: elementwise ops of two networks inside this one that bounds compare; one at most for each ``second``.

    Raises:
        InputError: if an op's input does not come before it, a number of it is not finite, or a pair does not fit.
    """

    ops: tuple[Op, ...]
    source: Source
    name: str = "network"
    arithmetic: str = "real"
    pairs: tuple[Pair, ...] = ()

    def __post_init__(self) -> None:
        if not self.ops or not isinstance(self.ops[0], Input):
            raise InputError("a network starts with its input")
        for index, op in enumerate(self.ops):
            if any(source >= index for source in op.inputs) or (index and not op.inputs):
                raise InputError("an input does not come before the node", place=op.place)
            for name, value in op.parameters.items():
                if isinstance(value, Tensor) and value.is_floating_point() and not _is_finite(value):
                    raise InputError(f"{name} holds NaN or infinity", place=op.place)
        for pair in self.pairs:
            ops = [self.ops[i] for i in pair]
            if pair.second <= max(pair[:2]) or len({op.size for op in ops}) > 1 or not _compares(ops, self.ops):
                raise InputError("a pair names an op that does not compare its two activations", place=ops[-1].place)

    @property
    def input_size(self) -> int:
        """Number of input variables (X_0 … of VNN-LIB)."""
        return self.ops[0].size

    @property
    def output_size(self) -> int:
        """Number of output variables (Y_0 … of VNN-LIB)."""
        return self.ops[-1].size

    @cached_property
    def uses(self) -> tuple[int, ...]:
        """The number of uses of each op: as an input of another, or by a pair."""
        found = [0] * len(self.ops)
        for source in itertools.chain(*(op.inputs for op in self.ops), *(pair[:2] for pair in self.pairs)):
            found[source] += 1
        return tuple(found)

    @cached_property
    def activations(self) -> tuple[int, ...]:
        """Numbers of the elementwise ops, in order."""
        return tuple(index for index, op in enumerate(self.ops) if isinstance(op, Elementwise))

    @cached_property
    def curved(self) -> Op | None:
        """The first op that is not piecewise linear and continuous; without one, MILP and SMT are complete."""
        curved = (
            isinstance(op, Product) or (isinstance(op, Elementwise) and not op.function.piecewise_linear)
            for op in self.ops
        )
        return next(itertools.compress(self.ops, curved), None)

    @property
    def piecewise_linear(self) -> bool:
        """True if every op is piecewise linear and continuous."""
        return self.curved is None

    @cached_property
    def whole(self) -> frozenset[int]:
        """Numbers of the ops whose values are known to be whole numbers at every input."""
        return whole_ops(self.ops)

    @cached_property
    def keeping(self) -> frozenset[int]:
        """Numbers of the ops that make whole numbers of whole numbers; none, if no step function makes any."""
        keeping = (index for index, op in enumerate(self.ops) if index and op.keeps_whole)
        return frozenset(keeping if self.whole else ())

    @cached_property
    def integer_inputs(self) -> dict[str, Tensor]:
        """Inputs that matter only through the whole numbers that one step function makes of them.

        Returns:
            By the function's kind ("Floor", "Ceil", "Round", "Truncate") the numbers of some inputs, ascending.
        """
        # Which inputs are used, by users; the last place is that of no input.
        used: dict[str, Tensor] = defaultdict(lambda: torch.zeros(self.input_size + 1, dtype=torch.bool))
        # Which input each element of an op is; −1 for none.
        copies = {0: torch.arange(self.input_size)}
        for index, op in enumerate(self.ops):
            for source in copies.keys() & set(op.inputs):
                if (moved := _moved(op)) is not None:
                    copies[index] = torch.where(moved < 0, -1, copies[source][moved])
                    continue
                function = op.function if isinstance(op, Elementwise) else None
                used[function.kind if isinstance(function, StepFunction) else ""][copies[source]] = True
        used[""][copies.get(len(self.ops) - 1, [])] = True
        alone = torch.stack([*used.values()]).sum(0) == 1
        found = {kind: (used[kind] & alone)[:-1].nonzero()[:, 0] for kind in sorted(used.keys() - {"", "Sign"})}
        return {kind: places for kind, places in found.items() if len(places)}

    @cached_property
    def limit(self) -> Network:
        """The network that is evaluated: with ReLU in place of families of functions that tend to it."""
        if all(not isinstance(op, Elementwise) or op.function.limit is op.function for op in self.ops):
            return self
        ops = (replace(op, function=op.function.limit) if isinstance(op, Elementwise) else op for op in self.ops)
        return replace(self, ops=tuple(ops), source=replace(self.source, onnx=None, run=None))

    @cached_property
    def digest(self) -> str:
        """SHA-256 over kinds, wiring and the bits of every parameter: equal digests compute the same function."""
        state = hashlib.sha256()
        for op in self.ops:
            state.update(type(op).__name__.encode())
            for name, value in op.parameters.items():
                if isinstance(value, Tensor):
                    state.update(f"{name}={value.dtype}{tuple(value.shape)}".encode())
                    state.update(value.detach().cpu().numpy().tobytes())
                else:
                    state.update(f"{name}={value!r};".encode())
        return state.hexdigest()

    def values(self, x: Tensor) -> list[Tensor]:
        """Return every op's value for inputs x, (batch, input_size)."""
        values: list[Tensor] = []
        for op in self.ops:
            values.append(op.value(*(values[i] for i in op.inputs)) if op.inputs else x)
        return values

    def __call__(self, x: Tensor) -> Tensor:
        """Return the outputs (batch, output_size) of inputs x, (batch, input_size), in the dtype of x.

        Raises:
            InputError: if x has another shape.
        """
        if x.ndim != 2 or x.shape[1] != self.input_size:
            raise InputError(f"input of shape {tuple(x.shape)} where (batch, {self.input_size}) is expected")
        return self.values(x)[-1]


def _is_finite(numbers: Tensor) -> bool:
    """Return True if no number is NaN or infinite: both show in the extremes, which need no copy of the tensor."""
    return not numbers.numel() or all(math.isfinite(end) for end in torch.aminmax(numbers.detach()))


def whole_ops(ops: Sequence[Op]) -> frozenset[int]:
    """Return the numbers of the ops whose values are known to be whole numbers at every input."""
    found: set[int] = set()
    for index, op in enumerate(ops):
        steps = isinstance(op, Elementwise) and isinstance(op.function, StepFunction)
        if steps or (op.inputs and found.issuperset(op.inputs) and op.keeps_whole):
            found.add(index)
    return frozenset(found)


def live(ops: Sequence[Op], output: int, pairs: Iterable[Pair] = ()) -> tuple[tuple[Op, ...], dict[int, int]]:
    """Return the ops that an op needs, the input first and the op last, and their new numbers by old ones.

    An op's partner in a pair is needed with the op.
    """
    needed, compared = {0, output}, {pair.second: pair[:2] for pair in pairs}
    for index in range(output, 0, -1):
        if index in needed:
            needed.update(ops[index].inputs, compared.get(index, ()))
    number = {old: new for new, old in enumerate(sorted(needed))}
    return tuple(replace(ops[old], inputs=tuple(number[i] for i in ops[old].inputs)) for old in number), number


def _are_whole(numbers: Iterable[object]) -> bool:
    """Return True if all numbers of tensors and floats are whole; names and None are ignored."""
    return all(
        bool((torch.as_tensor(each) == torch.as_tensor(each).round()).all())
        for each in numbers
        if isinstance(each, Tensor | float)
    )


def _compares(pair: Sequence[Op], ops: Sequence[Op]) -> bool:
    """Return True if the second of three ops is a sum of the third one's input and the first one's times −1."""
    first, apart, second = pair
    if not (isinstance(first, Elementwise) and isinstance(second, Elementwise) and isinstance(apart, Sum)):
        return False
    minus = ops[apart.inputs[-1]]
    if not (isinstance(minus, Affine) and isinstance(minus.map, Diagonal) and minus.is_exact and minus.bias is None):
        return False
    turned = minus.inputs == first.inputs and bool((minus.map.weight == -1).all())
    return turned and apart.inputs == (*second.inputs, apart.inputs[-1])


def _moved(op: Op) -> Tensor | None:
    """Return the input elements that an op's elements are, −1 for constants; None if it does more than move."""
    if not isinstance(op, Affine) or not isinstance(op.map, Gather) or not op.is_exact:
        return None
    index = op.map.index
    return index if op.bias is None or not bool(op.bias[index >= 0].any()) else None
