"""A network under construction: ops on flat vectors, and values that locate a tensor's elements in them.

A move of elements (a reshape, a transposition, a slice, a pad with zeros) makes no op. It is an array of numbers of
elements, and moves of moves compose. Where an op needs its elements in place, one ``Gather`` puts them there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.ir.functions import StepFunction, function
from verifiable_relu.ir.functions.function import Function
from verifiable_relu.ir.functions.piecewise_linear import PiecewiseLinear
from verifiable_relu.ir.linear import Convolution, Dense, Diagonal, Gather, LinearMap, Sparse
from verifiable_relu.ir.network import Affine, Elementwise, Input, Maximum, Op, Product, Shape, Sum
from verifiable_relu.readers.derived import both, quotient
from verifiable_relu.rounding import above

MOST_TERMS = 1 << 24
"""Most terms of all sums together that one op, read term by term, consists of."""


@dataclass(frozen=True, eq=False)
class Value:
    """A computed tensor: elements of an op's vector under a shape.

    Attributes:
        op: number of the op.
        shape: of the tensor, the batch axis with its 1 included where the tensor has one.
        index: (elements,) the number of each in the op's vector, −1 for the constant 0; None for all in order.
    """

    op: int
    shape: Shape
    index: np.ndarray | None = None

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def numbers(self) -> np.ndarray:
        """The number of each element in the op's vector, in the tensor's shape; −1 for the constant 0."""
        return (np.arange(self.size) if self.index is None else self.index).reshape(self.shape)

    def reshaped(self, shape: Sequence[int]) -> Value:
        """Return the elements in order under another shape; the number of elements stays."""
        if math.prod(shape) != self.size:
            raise InputError(f"shape {self.shape} cannot become {tuple(shape)}")
        return Value(self.op, tuple(shape), self.index)


class OpBuilder:
    """Builder of a network: ops are added one by one, with sizes computed and checked.

    Attributes:
        ops: so far; the first is the input.
        name: the name of the ops that are added.
        off: the relative error of weights and bias of each affine op that is added, on top of its arguments'.
        whole: numbers of ops whose values are whole numbers, whatever the input is.
    """

    def __init__(self, shape: Shape, name: str = "input") -> None:
        self.ops: list[Op] = [Input(name=name, size=math.prod(shape))]
        self.name, self.off = name, 0.0
        self.whole: set[int] = set()
        self._placed: dict[tuple[int, int], tuple[np.ndarray, int]] = {}

    def is_whole(self, x: Value) -> bool:
        """Return True if the elements are known to be whole numbers, whatever the input is."""
        return x.op in self.whole

    def _add(self, kind: type[Op], xs: Sequence[Value], shape: Sequence[int], **parts: Any) -> Value:
        """Add an op that reads values, and return its own in a shape."""
        op = kind(name=self.name, inputs=tuple(map(self.in_place, xs)), size=math.prod(shape), **parts)
        made = isinstance(op, Elementwise) and isinstance(op.function, StepFunction)
        if made or (self.whole and self.whole.issuperset(op.inputs) and op.keeps_whole):
            self.whole.add(len(self.ops))
        self.ops.append(op)
        return Value(len(self.ops) - 1, tuple(shape))

    # Moves

    def moved(self, x: Value, numbers: np.ndarray) -> Value:
        """Return a tensor of elements of x by their numbers in x, in row-major order; −1 for the constant 0."""
        index = numbers.reshape(-1)
        if x.index is not None:
            index = np.where(index < 0, -1, x.index[index])
        return Value(x.op, numbers.shape, None if np.array_equal(index, np.arange(self.ops[x.op].size)) else index)

    def joined(self, parts: Sequence[tuple[Value, np.ndarray]], rest: np.ndarray, shape: Sequence[int]) -> Value:
        """Return a tensor of elements of several values, and of constants.

        Args:
            parts: values, and for each element of the result its number in the value or −1, (elements,).
            rest: (elements,) the constant that is added to each.
            shape: of the result.
        """
        by_op: dict[int, np.ndarray] = {}
        for x, numbers in parts:
            by_op[x.op] = np.maximum(by_op.get(x.op, -1), self.moved(x, numbers).numbers)
        bias, terms = tensor(rest) if rest.any() else None, []
        for op, index in by_op.items():
            whole = Value(op, (self.ops[op].size,))
            if len(by_op) == 1 and bias is None:
                return self.moved(whole, index.reshape(tuple(shape)))
            terms.append(self.affine(whole, Gather(torch.from_numpy(np.array(index)), whole.size), bias, shape))
            bias = None
        return self.sum(*terms)

    def broadcast(self, x: Value, shape: Sequence[int]) -> Value:
        """Return x repeated along axes, in a shape to which it broadcasts."""
        return x if x.shape == tuple(shape) else self.moved(x, np.broadcast_to(places(x), shape))

    def transposed(self, x: Value, axes: Sequence[int]) -> Value:
        """Return x with its axes in another order: axis i of the result is axis ``axes[i]`` of x."""
        return self.moved(x, places(x).transpose(axes))

    def in_place(self, x: Value) -> int:
        """Return the number of an op whose vector is the elements of x in order; adds a gather where it needs one."""
        if x.index is None:
            return x.op
        # Whoever reads one tensor reads one op: that is how spelled functions are recognised.
        key = x.op, id(x.index)
        if key not in self._placed:
            gather = Gather(torch.from_numpy(np.array(x.index)), self.ops[x.op].size)
            self._placed[key] = x.index, self.affine(Value(x.op, (gather.n_in,)), gather, None, x.shape).op
        return self._placed[key][1]

    # Affine maps

    def affine(
        self,
        x: Value,
        map: LinearMap,
        bias: Tensor | None,
        shape: Sequence[int],
        error: float = 0.0,
        bias_error: float = 0.0,
    ) -> Value:
        """Return W·x + b in a shape; ``error`` and ``bias_error``: relative, of the weights and of the bias."""
        off, part = None, both(bias_error, self.off)
        if bias is not None and part:
            off = torch.from_numpy(np.where(bias == 0, 0.0, above(part * bias.double().abs().numpy())))
        # What is moved has no weight.
        error = error if isinstance(map, Gather) else both(error, self.off)
        return self._add(Affine, (x,), shape, map=map, bias=bias, weight_error=error, bias_error=off)

    def constant(self, numbers: Tensor, shape: Shape) -> Tensor:
        """Return a constant that is broadcast to a shape, (elements,), and does not enlarge it."""
        small = tuple(numbers.shape)
        if len(small) > len(shape) or any(a not in (1, b) for a, b in zip(small[::-1], shape[::-1], strict=False)):
            raise UnsupportedError(f"broadcasts a value of shape {shape} against a constant of shape {small}")
        # One number keeps a stride of 0: it takes no memory.
        return numbers.reshape(()).expand(math.prod(shape)) if numbers.numel() == 1 else numbers.expand(shape).flatten()

    def scale(
        self,
        x: Value,
        factor: Tensor | float | None = None,
        shift: Tensor | float | None = None,
        center: Tensor | None = None,
        error: float = 0.0,
        shift_error: float = 0.0,
        divisor: Tensor | None = None,
    ) -> Value:
        """Return (x − center)·factor + shift, each broadcast to the shape of x; a number means a float32 number.

        ``error`` and ``shift_error`` are relative errors of the factor and of the shift; by the ``divisor`` x − center
        is divided, where that is what ``factor`` and ``error`` stand for.
        """
        weight, added, middle, by = (
            None if given is None else self.constant(as_tensor(given), x.shape)
            for given in (factor, shift, center, divisor)
        )
        weight = torch.ones(()).expand(x.size) if weight is None else weight
        added = added if _matters(added) else None
        if middle is not None and _matters(middle):
            if added is None and not error and bool((weight.abs() == 1).all()):
                added = -weight * middle
            else:
                x = self.scale(x.reshaped((x.size,)), shift=-middle).reshaped(x.shape)
        return self.affine(x, Diagonal(weight, by), added, x.shape, error, shift_error)

    def divided(self, x: Value, by: Tensor | float) -> Value:
        """Return x/by, ``by`` being broadcast to the shape of x."""
        by = as_tensor(by)
        factor, error = quotient(1.0, by)
        return self.scale(x, factor, error=error, divisor=by)

    def dense(
        self, x: Value, weight: Tensor, bias: Tensor | None = None, error: float = 0.0, bias_error: float = 0.0
    ) -> Value:
        """Return x·weightᵀ + bias over the last axis; ``weight`` (out, in), ``bias`` (out,)."""
        if not x.shape or weight.ndim != 2 or weight.shape[1] != x.shape[-1]:
            raise InputError(f"a weight of shape {tuple(weight.shape)} (outputs, inputs) does not fit inputs {x.shape}")
        copies, shape = x.size // x.shape[-1], (*x.shape[:-1], len(weight))
        if bias is not None:
            bias = self.constant(bias, (*(1,) * (bias.ndim - 1), len(weight))).repeat(copies)
        if copies == 1 and x.index is not None and np.array_equal(np.sort(x.index), np.arange(self.ops[x.op].size)):
            # The order of the elements is that of the weight's columns.
            weight, x = weight[:, np.argsort(x.index)], Value(x.op, (len(x.index),))
        return self.affine(x, Dense(weight, copies), bias, shape, error, bias_error)

    def convolution(self, x: Value, weight: Tensor, bias: Tensor | None, error: float = 0.0, **window: Any) -> Value:
        """Return a convolution of (channels, height, width), perhaps with axes of length 1 before these.

        The weight is (out, in / groups, height, width), of a relative ``error``, the bias (out,) or one number, and
        ``window`` has stride, padding, dilation and groups, as ``Convolution`` takes them. All fit the image.
        """
        channels, height, width = x.shape[-3:]
        map, full = Convolution(weight.contiguous(), (channels, height, width), **window), None
        if bias is not None and _matters(bias):
            full = bias.reshape(-1).expand(len(weight)).repeat_interleave(map.n_out // len(weight))
        return self.affine(x, map, full, (*x.shape[:-3], *map.out_shape), error)

    def sparse(
        self,
        x: Value,
        index: np.ndarray,
        weight: np.ndarray,
        shape: Sequence[int],
        bias: np.ndarray | None = None,
        error: float = 0.0,
    ) -> Value:
        """Return Σ_k weight[i, k]·x[index[i, k]] + bias[i] in a shape.

        The index is (outputs, terms), or has any shape with as many entries, to which the weight, of a relative
        ``error``, is broadcast; the bias is (outputs,).
        """
        rows = math.prod(shape)
        if not rows:
            raise UnsupportedError("a computed tensor without elements")
        places = np.asarray(index, np.int64).reshape(rows, -1)
        places = places if x.index is None else x.index[places]
        source = Value(x.op, (self.ops[x.op].size,))
        numbers = tensor(np.broadcast_to(weight, index.shape).reshape(rows, -1))
        numbers = torch.where(torch.from_numpy(places < 0), 0.0, numbers)
        map = Sparse(torch.from_numpy(np.maximum(places, 0)), numbers, source.size)
        return self.affine(source, map, None if bias is None or not bias.any() else tensor(bias), shape, error)

    # Other ops

    def sum(self, *xs: Value) -> Value:
        """Return the sum of values of one shape."""
        return xs[0] if len(xs) == 1 else self._add(Sum, xs, xs[0].shape)

    def product(self, x: Value, y: Value) -> Value:
        """Return x·y, element by element, of values of one shape."""
        return self._add(Product, (x, y), x.shape)

    def matmul(self, left: Value | np.ndarray, right: Value | np.ndarray) -> Value:
        """Return the matrix product of two operands, one computed at least, as ``numpy.matmul`` has it, by terms."""
        first, second = places(left), places(right)
        shape = np.matmul(np.empty(first.shape, np.bool_), np.empty(second.shape, np.bool_)).shape
        rows = first[None, :] if first.ndim == 1 else first
        columns = second[None, :] if second.ndim == 1 else np.swapaxes(second, -1, -2)
        spread = np.broadcast_arrays(rows[..., :, None, :], columns[..., None, :, :])
        return self.contracted((left, right), spread, shape)

    def contracted(
        self, given: Sequence[Value | np.ndarray], spread: Sequence[np.ndarray], shape: Sequence[int]
    ) -> Value:
        """Return sums of products of elements of two tensors, or sums of elements of one, in a shape.

        The arrays ``spread``, one for each tensor, hold for each term, those of one sum in a row, the element's number
        in a computed tensor, or the element of a constant.
        """
        terms = spread[0]
        require_few(terms.size)
        match given:
            case [Value() as x, Value() as y]:
                product = self.product(self.moved(x, terms), self.moved(y, spread[1]))
                return self.added_up(product.reshaped((*shape, terms.size // max(1, math.prod(shape)))))
            case [Value() as x]:
                return self.sparse(x, terms, np.ones(terms.shape, np.float32), shape)
            case [Value() as x, _]:
                return self.sparse(x, terms, spread[1], shape)
        assert isinstance(given[1], Value)
        return self.sparse(given[1], spread[1], terms, shape)

    def added_up(self, x: Value, factor: Tensor | None = None, error: float = 0.0) -> Value:
        """Return the sums over the last axis, times a number of a relative error."""
        *shape, length = x.shape
        if length == 1 and factor is None:
            return x.reshaped(shape)
        factor = torch.ones(()) if factor is None else factor
        return self.dense(x, factor.reshape(1, 1).repeat(1, length), None, error).reshaped(shape)

    def apply(self, x: Value, of: Function) -> Value:
        """Return f(x), element by element."""
        return self._add(Elementwise, (x,), x.shape, function=of)

    def relu(self, x: Value) -> Value:
        """Return max(x, 0)."""
        return self.apply(x, PiecewiseLinear())

    def leaky(self, x: Value, slope: Tensor | float) -> Value:
        """Return max(x, 0) + slope·min(x, 0), the slope being broadcast to the shape of x."""
        full = self.constant(as_tensor(slope), x.shape)
        return self.apply(x, PiecewiseLinear(full[0] if full.stride() == (0,) else full))

    def size_of(self, x: Value) -> Value:
        """Return |x|."""
        return self.leaky(x, -1.0)

    def function(self, x: Value, kind: str, parameter: float = 1.0) -> Value:
        """Return a function of x without parameters of single elements, by its kind."""
        return self.apply(x, function(kind, parameter))

    def maximum(self, x: Value, candidates: np.ndarray, shape: Sequence[int]) -> Value:
        """Return the largest of some elements of x: of ``candidates``, (most, results), numbers of elements of x.

        −1 stands for none; each result has one at least.
        """
        order = np.argsort(candidates < 0, axis=0, kind="stable")
        numbers = np.take_along_axis(candidates, order, axis=0)
        numbers = np.where(numbers < 0, numbers[:1], numbers)
        if len(numbers) == 1:
            return self.moved(x, numbers.reshape(tuple(shape)))
        if x.index is not None and not (x.index < 0).any():
            numbers = x.index[numbers]
            x = Value(x.op, (self.ops[x.op].size,))
        return self._add(Maximum, (x,), shape, candidates=torch.from_numpy(np.array(numbers, np.int64)))

    def larger(self, x: Value, y: Value) -> Value:
        """Return max(x, y), element by element, of values of one shape."""
        own, none = np.arange(x.size), np.full(x.size, -1)
        halves = (x, np.concatenate([own, none])), (y, np.concatenate([none, own]))
        pair = self.joined(halves, np.zeros(2 * x.size), (2 * x.size,))
        return self.maximum(pair, np.arange(2 * x.size).reshape(2, -1), x.shape)


def as_tensor(numbers: Tensor | float) -> Tensor:
    """Return numbers as a tensor: a number means a float32 number, as ONNX's attributes are."""
    return numbers if isinstance(numbers, Tensor) else torch.tensor(numbers, dtype=torch.float32)


def _matters(numbers: Tensor | None) -> bool:
    """Return True for numbers that are not all zero, or are trained."""
    return numbers is not None and (numbers.requires_grad or bool(numbers.any()))


def places(x: Value | np.ndarray) -> np.ndarray:
    """Return a constant, or the numbers of a value's elements in its shape."""
    return np.arange(x.size).reshape(x.shape) if isinstance(x, Value) else x


def require_few(terms: int) -> None:
    """Refuse an op with more than ``MOST_TERMS`` products or window elements, before memory is allocated."""
    if terms > MOST_TERMS:
        raise UnsupportedError(f"a sum of more than {MOST_TERMS:,} terms")


def tensor(array: np.ndarray) -> Tensor:
    """Return a parameter as a tensor: float32 and float64 keep their bits, float16 and whole numbers widen.

    Other types are refused, and whole numbers beyond those that float64 holds.
    """
    if array.dtype.kind in "iub":
        wide = array.astype(np.float64)
        if wide.size and float(np.abs(wide).max()) > 2.0**53:
            raise UnsupportedError("a whole number of more than 53 bits")
        single = wide.astype(np.float32)
        return torch.from_numpy(single if bool((single == wide).all()) else wide)
    if array.dtype not in (np.float16, np.float32, np.float64):
        raise UnsupportedError(f"a parameter of type {array.dtype}")
    return torch.from_numpy(np.array(array, dtype=np.float64 if array.dtype == np.float64 else np.float32))
