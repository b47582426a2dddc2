"""Operators on numbers taken together along axes: matrix products, sums, extremes, softmax and normalisations.

    softmax(x)_i              1/Σ_j exp(x_j − x_i); of two numbers σ(x_i − x_j)
    log softmax(x)_i          −log Σ_j exp(x_j − x_i); of two numbers −softplus(x_j − x_i)
    normalised(x)_i           d_i/√(ε + Σ_j d_j²/n), d = x or x without its mean

Differences of the numbers are bounded as such: what all of them have in common vanishes. Where there would be too many
differences, softmax(x)_i is exp(x_i − m)/Σ_j exp(x_j − m), m being the mean, though any m would do.

Of scikit-learn's models, which skl2onnx writes in the domain ai.onnx.ml, the labels, which are no floating-point
numbers, are not read.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.ir.linear import Diagonal
from verifiable_relu.ir.network import Affine
from verifiable_relu.readers.builder import MOST_TERMS, OpBuilder, Value, places, require_few, tensor
from verifiable_relu.readers.derived import deviations, quotient, scaled, share
from verifiable_relu.readers.onnx.call import NodeCall, Result, axis_of, converts
from verifiable_relu.readers.onnx.elementwise import added, clipped
from verifiable_relu.rounding import above

MAX_DIFFERENCES = 1 << 15
"""Most differences of the numbers of all rows of one softmax."""

MAX_ROW = 1 << 12
"""Most numbers that are normalised together: each is subtracted from each."""

# Products of matrices


@converts("Gemm", 7, 9, 11, 13)
def _gemm(call: NodeCall) -> Value:
    named = zip(call.inputs, ("transA", "transB"), strict=False)
    left, right = (_swapped(call, given) if call.get(name, 0) else given for given, name in named)
    alpha, beta = call.get("alpha", 1.0), call.get("beta", 1.0)
    given = call.inputs[2] if len(call.inputs) > 2 and beta != 0 else None
    if given is None:
        return _product(call, left, right, alpha)
    if isinstance(given, Value):
        return added(call, _product(call, left, right, alpha), call.build.scale(given, beta))
    shift, off = scaled(tensor(given), beta)
    if isinstance(right, np.ndarray) and (given.ndim < 2 or given.shape[0] == 1):
        return _product(call, left, right, alpha, shift, off)
    return added(call, _product(call, left, right, alpha), shift.numpy(), error=off)


converts("MatMul", 1, 9, 13)(lambda call: _product(call, call.inputs[0], call.inputs[1]))


def _swapped(call: NodeCall, x: Any) -> Any:
    if not isinstance(x, Value):
        return np.swapaxes(x, -1, -2)
    axes = list(range(len(x.shape)))
    return call.build.transposed(x, [*axes[:-2], *axes[:-3:-1]])


def _product(
    call: NodeCall,
    left: Result | None,
    right: Result | None,
    alpha: float = 1.0,
    bias: Tensor | None = None,
    bias_error: float = 0.0,
) -> Value:
    """Return alpha times the matrix product of two operands, at least one of them computed.

    Alpha, a float32 number, is 1 where a constant has more axes than a matrix. The bias, of a relative error, is added
    to each row, where the right operand is a constant matrix.
    """
    build = call.build
    if isinstance(left, Value) and isinstance(right, Value):
        product = build.matmul(left, right)
        return product if alpha == 1 else build.scale(product, alpha)
    x, weight = (left, right) if isinstance(left, Value) else (right, left)
    if not isinstance(x, Value) or not isinstance(weight, np.ndarray):
        raise UnsupportedError("an operand is missing")
    # Leading axes of length 1 do not enlarge the other operand.
    while 2 < weight.ndim <= len(x.shape) and weight.shape[0] == 1:
        weight = weight[0]
    if weight.ndim != 2 or (x is right and len(x.shape) < 2):
        return build.matmul(weight, x) if x is right else build.matmul(x, weight)
    factors, off = scaled(tensor(weight.T if x is left else weight), alpha)
    if x is left:
        return build.dense(x, factors, bias, off, bias_error)
    found: Value = _swapped(call, build.dense(_swapped(call, x), factors, None, off))
    return found


@converts("Einsum", 12, 28)
def _einsum(call: NodeCall) -> Value:
    """Read a contraction of one or two tensors: a sum of products over the labels that the result has not."""
    equation, given = (
        call.get("equation", b"").decode().replace(" ", ""),
        [one for one in call.inputs if one is not None],
    )
    left, arrow, right = equation.partition("->")
    labels = left.split(",")
    if not (equation.replace(",", "").replace("->", "").isalpha() and len(labels) == len(given)):
        raise UnsupportedError(f"its attribute equation = {equation}")
    if len(given) > 2:
        raise UnsupportedError("the product of more than two tensors")
    everything = "".join(labels)
    names = sorted(set(everything))
    result = right if arrow else "".join(name for name in names if everything.count(name) == 1)
    order = [*result, *(name for name in names if name not in result)]
    if len(set(result)) < len(result) or not set(result) <= set(names):
        raise InputError(f"its attribute equation = {equation}")
    sizes: dict[str, int] = {}
    for own, one in zip(labels, given, strict=True):
        if len(own) != len(one.shape) or any(sizes.setdefault(n, s) != s for n, s in zip(own, one.shape, strict=True)):
            raise InputError(f"its attribute equation = {equation} for shapes {[a.shape for a in given]}")
    full = tuple(sizes[name] for name in order)
    require_few(math.prod(full))
    spread, every = [], range(len(order))
    for own, array in zip(labels, map(places, given), strict=True):
        spread.append(np.einsum(array, [*map(order.index, own)], np.ones(full, array.dtype), every, every))
    return call.build.contracted(given, spread, full[: len(result)])


@converts("CumSum", 11, 14)
def _cumulative_sum(call: NodeCall) -> Value:
    x = call.value()
    rows = RowMatrix(call.build, x, [axis_of(int(call.constant(1).reshape(())), len(x.shape))])
    if rows.length > MOST_TERMS**0.5:
        raise InputError(f"a sum of {rows.length} values")
    weight = torch.ones(rows.length, rows.length).tril(-1 if call.get("exclusive", 0) else 0)
    return rows.back(call.build.dense(rows.values, weight.T if call.get("reverse", 0) else weight))


# Rows


class RowMatrix:
    """A matrix ``values``, (count, length), whose rows are the numbers of x that are taken together."""

    def __init__(self, build: OpBuilder, x: Value, axes: Sequence[int]) -> None:
        self._build, self._shape = build, x.shape
        self._order = [*(axis for axis in range(len(x.shape)) if axis not in axes), *axes]
        self.length = math.prod(x.shape[axis] for axis in axes)
        self.count = x.size // max(1, self.length)
        self.values = build.transposed(x, self._order).reshaped((self.count, self.length))

    def back(self, rows: Value) -> Value:
        """Return a matrix of the same shape as a value of the shape of x."""
        ordered = rows.reshaped([self._shape[axis] for axis in self._order])
        return self._build.transposed(ordered, np.argsort(self._order).tolist())

    def along(self, array: np.ndarray) -> np.ndarray:
        """Return an array of the shape of x as rows."""
        return array.transpose(self._order).reshape(self.values.shape)

    def repeated(self, numbers: Value) -> Value:
        """Return one number for each row, (count elements), as often as the row is long."""
        return self._build.moved(numbers, np.repeat(np.arange(self.count), self.length).reshape(self.values.shape))


# Reductions: from rows to one number for each

Join = Callable[[OpBuilder, RowMatrix], Value]


def _mean(build: OpBuilder, rows: RowMatrix) -> Value:
    return build.added_up(rows.values, *share(rows.length))


def _largest(build: OpBuilder, rows: RowMatrix) -> Value:
    if not rows.values.size:
        raise UnsupportedError("the extreme of no values")
    return build.maximum(rows.values, np.arange(rows.values.size).reshape(rows.values.shape).T, (rows.count,))


def _multiplied(build: OpBuilder, rows: RowMatrix) -> Value:
    columns = np.arange(rows.values.size).reshape(rows.values.shape).T
    factors = [build.moved(rows.values, column) for column in columns]
    while len(factors) > 1:
        paired = [build.product(*pair) for pair in zip(factors[0::2], factors[1::2], strict=False)]
        factors = paired + factors[2 * len(paired) :]
    return factors[0]


def _reduced(call: NodeCall, join: Join, before: str, after: str) -> Value:
    """Return what becomes of x along the axes that an attribute or an input names; along all if none is named.

    A function of one variable is applied before the numbers are joined, and one after.
    """
    x, build, rank = call.value(), call.build, len(call.value().shape)
    named, keep = call.optional(1), call.get("keepdims", 1)
    given = call.get("axes", None) if named is None else named.reshape(-1).tolist()
    every = () if call.get("noop_with_empty_axes", 0) else range(rank)
    axes = sorted({axis_of(int(axis), rank) for axis in given or every})
    if not axes and rank and {before, after} & {"Exp", "Log", "Square"}:
        raise UnsupportedError("a reduction along no axes")
    x = _applied(build, x, before)
    if axes:
        shape = [1 if i in axes else n for i, n in enumerate(x.shape) if keep or i not in axes]
        x = join(build, RowMatrix(build, x, axes)).reshaped(shape)
    return _applied(build, x, after)


def _applied(build: OpBuilder, x: Value, kind: str) -> Value:
    if kind == "Neg":
        return build.scale(x, -1.0)
    return build.size_of(x) if kind == "Abs" else build.function(x, kind) if kind else x


def _total(build: OpBuilder, rows: RowMatrix) -> Value:
    return build.added_up(rows.values)


for _operator, _versions, _group, _join, _before, _after in (
    ("Sum", (1, 11, 13), "affine", _total, "", ""),
    ("Mean", (1, 11, 13, 18), "affine", _mean, "", ""),
    ("L1", (1, 11, 13, 18), "maxima", _total, "Abs", ""),
    ("SumSquare", (1, 11, 13, 18), "smooth", _total, "Square", ""),
    ("L2", (1, 11, 13, 18), "smooth", _total, "Square", "Sqrt"),
    ("LogSum", (1, 11, 13, 18, 28), "smooth", _total, "", "Log"),
    ("LogSumExp", (1, 11, 13, 18, 28), "smooth", _total, "Exp", "Log"),
    ("Max", (1, 11, 12, 13, 18, 20), "maxima", _largest, "", ""),
    ("Min", (1, 11, 12, 13, 18, 20), "maxima", _largest, "Neg", "Neg"),
    ("Prod", (1, 11, 13, 18), "products", _multiplied, "", ""),
):
    _read = functools.partial(_reduced, join=_join, before=_before, after=_after)
    converts(f"Reduce{_operator}", *_versions, group=_group)(_read)


# Softmax


def _differences(build: OpBuilder, rows: RowMatrix) -> Value:
    """Return x_j − x_i, (count, length, length), j being the last axis."""
    each = np.arange(rows.count * rows.length).reshape(rows.count, rows.length)
    pairs = np.stack(np.broadcast_arrays(each[:, None, :], each[:, :, None]), -1).reshape(-1, 2)
    weight = np.where(pairs[:, :1] == pairs[:, 1:], 0.0, [[1.0, -1.0]]).astype(np.float32)
    return build.sparse(rows.values, pairs, weight, (rows.count, rows.length, rows.length))


def _masked(build: OpBuilder, x: Value) -> tuple[Value, np.ndarray | None]:
    """Return x with 0 in the place of the numbers to which −inf was added, and where these are; None for nowhere."""
    op = build.ops[x.op]
    if not (isinstance(op, Affine) and isinstance(op.map, Diagonal)) or op.bias is None:
        return x, None
    gone = op.bias == -torch.inf
    if not bool(gone.any()):
        return x, None
    weight, shift = torch.where(gone, 0.0, op.map.weight), torch.where(gone, 0.0, op.bias)
    before = Value(op.inputs[0], (op.size,))
    kept = build.affine(before, Diagonal(weight), shift, (op.size,), op.weight_error, 0.0)
    hidden = np.concatenate([gone.numpy(), [False]])
    return Value(kept.op, x.shape, x.index), hidden[x.numbers]


def _softmax(call: NodeCall, logarithm: bool) -> Value:
    build, there = call.build, None
    x, gone = _masked(build, call.value())
    axis, rank = axis_of(call.get("axis", -1 if call.version >= 13 else 1), len(x.shape)), len(x.shape)
    # Older versions read the shape as a matrix, whose rows lie along the axis and all after it.
    rows = RowMatrix(build, x, range(axis, axis + 1 if call.version >= 13 else rank))
    if gone is not None:
        # 0 where −inf was added, else 1.
        there = torch.from_numpy(1.0 - rows.along(gone).astype(np.float32))
        if logarithm:
            raise UnsupportedError("the logarithm of a softmax of masked (−inf) numbers")
        if not bool(there.any(1).all()):
            raise UnsupportedError("a softmax of nothing but −inf")
    if rows.length == 2 and there is None:
        sign = -1.0 if logarithm else 1.0
        other = build.dense(rows.values, torch.tensor([[sign, -sign], [-sign, sign]]))
        found = build.function(other, "Softplus" if logarithm else "Sigmoid")
        return rows.back(build.scale(found, sign) if logarithm else found)
    if rows.count * rows.length**2 <= MAX_DIFFERENCES:
        powers = build.function(_differences(build, rows), "Exp")
        sums = build.added_up(powers if there is None else build.scale(powers, there[:, None, :]))
        if logarithm:
            return rows.back(build.scale(build.function(sums, "Log"), -1.0))
        found = build.function(sums, "Reciprocal")
        return rows.back(found if there is None else build.scale(found, there))
    mean = rows.repeated(build.added_up(rows.values, -share(rows.length)[0].float()))
    shifted = build.sum(rows.values, mean)
    powers = build.function(shifted, "Exp")
    powers = powers if there is None else build.scale(powers, there)
    total = build.added_up(powers)
    if logarithm:
        return rows.back(build.sum(shifted, rows.repeated(build.scale(build.function(total, "Log"), -1.0))))
    found = build.product(powers, rows.repeated(build.function(total, "Reciprocal")))
    # Bounds of products do not know it.
    return rows.back(clipped(call, found, 0.0, 1.0))


converts("Softmax", 1, 11, 13, group="smooth")(functools.partial(_softmax, logarithm=False))
converts("LogSoftmax", 1, 11, 13, group="smooth")(functools.partial(_softmax, logarithm=True))


# Normalisations


def _normalised(call: NodeCall, x: Value, axes: Sequence[int], centred: bool = True) -> Value:
    """Return x, perhaps without its mean, divided by the root of ε + the mean of its squares along some axes."""
    # An attribute is a float32 number, its default too.
    epsilon = call.get("epsilon", 1e-5)
    if not epsilon >= 0:
        raise UnsupportedError(f"its attribute epsilon = {epsilon}")
    build, rows = call.build, RowMatrix(call.build, x, axes)
    values, (number, error) = rows.values, share(rows.length)
    if centred:
        # One matrix, so that intervals know what x and its mean have in common.
        if rows.length > MAX_ROW:
            raise UnsupportedError(f"{rows.length} numbers are normalised together, more than {MAX_ROW}")
        own, error_of_own = quotient(rows.length - 1.0, torch.tensor(float(rows.length), dtype=torch.float64))
        weight = torch.full((rows.length, rows.length), -float(number), dtype=torch.float64).fill_diagonal_(float(own))
        values = build.dense(rows.values, weight, None, max(error, error_of_own))
    mean = build.added_up(build.function(values, "Square"), number, error)
    root = build.function(build.scale(mean, shift=epsilon), "InverseRoot")
    found = build.product(values, rows.repeated(root))
    # d_i² is at most n times the mean of all squares, and n − 1 times where the numbers add up to 0.
    most = float(above(np.float32(math.sqrt(rows.length - centred))))
    return rows.back(clipped(call, found, -most, most))


def _along_last(call: NodeCall, centred: bool) -> Value:
    rank = len(call.value().shape)
    found = _normalised(call, call.value(), range(axis_of(call.get("axis", -1), rank), rank), centred)
    scale, shift = (None if (v := call.optional(i)) is None else tensor(v) for i in (1, 2))
    return found if scale is None and shift is None else call.build.scale(found, scale, shift=shift)


converts("LayerNormalization", 17, group="products")(functools.partial(_along_last, centred=True))
converts("RMSNormalization", 23, group="products")(functools.partial(_along_last, centred=False))


def _by_channel(call: NodeCall, *positions: int) -> list[torch.Tensor]:
    """Return inputs that hold one number for each channel of the first, in a shape that broadcasts against it."""
    return [tensor(call.constant(i)).reshape(-1, *(1,) * (len(call.value().shape) - 2)) for i in positions]


@converts("BatchNormalization", 7, 9, 14, 15)
def _batch_normalization(call: NodeCall) -> Value:
    call.refuse(training_mode=0, spatial=1)
    gamma, beta, mean, variance = _by_channel(call, 1, 2, 3, 4)
    scale, error = deviations(gamma, variance, call.get("epsilon", float(np.float32(1e-5))))
    return call.build.scale(call.value(), scale, shift=beta, center=mean, error=error)


@converts("GroupNormalization", 21, group="products")
@converts("InstanceNormalization", 1, 6, 22, group="products")
def _group_normalisation(call: NodeCall) -> Value:
    x = call.value()
    batch, channels, *others = x.shape
    # A channel is a group of an instance normalisation.
    groups = call.get("num_groups", channels)
    if channels % groups:
        raise UnsupportedError(f"{groups} groups of shape {x.shape}")
    parted = x.reshaped((batch, groups, channels // groups, *others))
    found = _normalised(call, parted, range(2, len(parted.shape))).reshaped(x.shape)
    scale, shift = _by_channel(call, 1, 2)
    return call.build.scale(found, scale, shift=shift)


# scikit-learn's models

LEARNED = "ai.onnx.ml"
"""The domain of their operators."""


def _numbers(call: NodeCall, attribute: str) -> Tensor:
    return torch.tensor(call.get(attribute, ()), dtype=torch.float32)


def _linear(call: NodeCall, rows: int) -> Value:
    weight, bias = _numbers(call, "coefficients"), _numbers(call, "intercepts")
    if rows < 1 or weight.numel() % rows or bias.numel() not in (0, rows):
        raise InputError(f"{weight.numel()} coefficients and {bias.numel()} intercepts for {rows} outputs")
    return call.build.dense(call.value(), weight.reshape(rows, -1), bias if bias.numel() else None)


@converts("Scaler", 1)
def _scaler(call: NodeCall) -> Value:
    return call.build.scale(call.value(), _numbers(call, "scale"), center=_numbers(call, "offset"))


@converts("LinearRegressor", 1)
def _regressor(call: NodeCall) -> Value:
    call.refuse(post_transform=b"NONE")
    return _linear(call, call.get("targets", 1))


@converts("LinearClassifier", 1)
def _classifier(call: NodeCall) -> list[Result | None]:
    classes = len(call.get("classlabels_ints", ()) or call.get("classlabels_strings", ()))
    rows = _numbers(call, "intercepts").numel() or classes
    if rows != classes:
        raise UnsupportedError(f"{rows} scores for {classes} classes")
    scores, known = _linear(call, rows), {b"NONE": None, b"SOFTMAX": "Softmax", b"LOGISTIC": "Sigmoid"}
    operator = call.choice("post_transform", b"NONE", known)
    return [None, call.as_operator(operator, 13, [scores], {}) if operator else scores]


@converts("Normalizer", 1, group="products")
def _normalizer(call: NodeCall) -> Value:
    norm = call.choice("norm", b"MAX", {b"L1": "ReduceL1", b"L2": "ReduceL2"})
    size = call.as_operator(norm, 13, [call.value()], {"axes": (-1,), "keepdims": 1})
    return call.as_operator("Div", 14, [call.value(), size], {})
