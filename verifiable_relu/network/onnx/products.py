"""Products of matrices, with a constant one and of two computed ones, and scikit-learn's scalers and linear models.

skl2onnx writes the latter in the domain ai.onnx.ml. Their labels, which are no floating-point numbers, are not read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.network.derived import scaled
from verifiable_relu.network.onnx.call import CONVERTERS, Call, Result, Value, converts, tensor
from verifiable_relu.network.onnx.elementwise import added
from verifiable_relu.network.onnx.moves import Numbered, axis_of, expanded, ordered

MAX_TERMS = 1 << 24
"""Most products of weights and inputs of an affine map that is read term by term."""


@converts("Gemm", 7, 9, 11, 13)
def _gemm(call: Call) -> Value:
    left, right = (
        _transposed(call, given) if call.get(name, 0) else given
        for given, name in zip(call.inputs, ("transA", "transB"), strict=False)
    )
    alpha, beta = call.get("alpha", 1.0), call.get("beta", 1.0)
    given = call.inputs[2] if len(call.inputs) > 2 and beta != 0 else None
    if isinstance(given, Value):
        factor = torch.tensor(beta, dtype=torch.float32)
        scaled_given = Value(call.build.scale(given.index, call.name, scale=factor), given.leading)
        return added(call, _product(call, left, right, alpha), scaled_given)
    if given is None:
        return _product(call, left, right, alpha)
    shift, off = scaled(tensor(given), beta)
    if isinstance(right, np.ndarray) and (given.ndim < 2 or given.shape[0] == 1):
        return _product(call, left, right, alpha, shift, off)
    return added(call, _product(call, left, right, alpha), shift.numpy(), error=off)


def _transposed(call: Call, given: Result | None) -> Result | None:
    return ordered(call, given, (1, 0)) if isinstance(given, Value) else None if given is None else given.T


@converts("MatMul", 1, 9, 13)
def _matmul(call: Call) -> Value:
    left, right = call.inputs
    return _product(call, left, right)


def _product(
    call: Call,
    left: Result | None,
    right: Result | None,
    alpha: float = 1.0,
    bias: Tensor | None = None,
    error: float = 0.0,
) -> Value:
    """alpha times the matrix product of two operands, of which one is computed at least.

    Args:
        call: the node that is read.
        left, right: the operands.
        alpha: a float32 number; 1 where a constant operand has more axes than a matrix.
        bias: added to each row, where the right operand is a constant matrix.
        error: the relative error of the bias.
    """
    build, name = call.build, call.name
    if isinstance(left, Value) and isinstance(right, np.ndarray):
        weight = _without_ones(right, len(call.shape(left)))
        if weight.ndim != 2:
            return _contracted(call, left, right, first=False)
        factors, off = scaled(tensor(weight.T), alpha)
        return Value(build.linear(left.index, factors, bias, name, max(off, error)), left.leading)
    if isinstance(left, np.ndarray) and isinstance(right, Value):
        rank = len(call.shape(right))
        weight = _without_ones(left, rank)
        if weight.ndim != 2 or rank < 2:
            return _contracted(call, right, left, first=True)
        swap = (*range(rank - 2), rank - 1, rank - 2)
        columns = ordered(call, right, swap)
        factors, off = scaled(tensor(weight), alpha)
        return ordered(call, Value(build.linear(columns.index, factors, None, name, off), columns.leading), swap)
    if not (isinstance(left, Value) and isinstance(right, Value)):
        raise UnsupportedError("an operand is missing")
    product = multiplied(call, left, right)
    if alpha != 1:
        factor = torch.tensor(alpha, dtype=torch.float32)
        product = Value(build.scale(product.index, name, scale=factor), product.leading)
    return product


def multiplied(call: Call, left: Value, right: Value) -> Value:
    """The matrix product of two computed values, as ``numpy.matmul`` has it.

    Raises:
        InputError: if the shapes do not fit.
    """
    shapes = call.shape(left), call.shape(right)
    shape = np.matmul(np.empty(shapes[0], np.bool_), np.empty(shapes[1], np.bool_)).shape
    # A vector is a matrix of one row on the left, of one column on the right.
    rows, columns = (1, *shapes[0])[-2:], (*shapes[1], 1)[:2] if len(shapes[1]) == 1 else shapes[1][-2:]
    heads = np.broadcast_shapes(shapes[0][:-2], shapes[1][:-2])

    def operand(x: Value, matrix: Sequence[int]) -> int:
        whole = expanded(call, call.reshaped(x, (*call.shape(x)[:-2], *matrix)), (*heads, *matrix))
        return call.build.reshape(whole.index, (*heads, *matrix), call.name)

    product = call.build.matmul(operand(left, rows), operand(right, columns), call.name)
    return call.reshaped(Value(product, False), shape)


def _without_ones(weight: np.ndarray, rank: int) -> np.ndarray:
    """The weight without leading axes of length 1 that do not enlarge a value of so many axes."""
    while 2 < weight.ndim <= rank and weight.shape[0] == 1:
        weight = weight[0]
    return weight


def _contracted(call: Call, x: Value, weight: np.ndarray, first: bool) -> Value:
    """The matrix product of x and a constant of any shape, as ``numpy.matmul`` has it, term by term.

    Args:
        call: the node that is read.
        x: the computed operand.
        weight: the constant operand.
        first: whether the constant comes first.
    """
    places = Numbered().add(call, x) - 1
    left, right = (weight, places) if first else (places, weight)
    shape = np.matmul(np.empty(left.shape, np.bool_), np.empty(right.shape, np.bool_)).shape
    if left.shape[-1] * int(np.prod(shape)) > MAX_TERMS:
        raise UnsupportedError(f"more than {MAX_TERMS} products of weights and values")
    rows = left[None, :] if left.ndim == 1 else left
    columns = right[None, :] if right.ndim == 1 else np.swapaxes(right, -1, -2)
    pairs = np.broadcast_arrays(rows[..., :, None, :], columns[..., None, :, :])
    index, numbers = reversed(pairs) if first else pairs
    return call.sparse(x.index, index, numbers, shape)


@converts("Einsum", 12, 28)
def _einsum(call: Call) -> Value:
    """A contraction of one computed value, with at most one constant."""
    equation = call.get("equation", b"").decode().replace(" ", "")
    given = call.given()
    left, arrow, right = equation.partition("->")
    labels = left.split(",")
    if not (equation.replace(",", "").replace("->", "").isalpha() and len(labels) == len(given)):
        raise UnsupportedError(f"its attribute equation = {equation}")
    values = [i for i, one in enumerate(given) if isinstance(one, Value)]
    if len(values) == 2 == len(given):
        return _product_of_axes(call, labels, right if arrow else None)
    if len(values) != 1 or len(given) > 2:
        raise UnsupportedError("the product of two computed values, or of several constants")
    everything = "".join(labels)
    names = "".join(sorted(set(everything)))
    result = right if arrow else "".join(name for name in names if everything.count(name) == 1)
    order = [*result, *(name for name in names if name not in result)]
    if len(set(result)) < len(result) or not set(result) <= set(names):
        raise InputError(f"its attribute equation = {equation}")
    x = given[values[0]]
    assert isinstance(x, Value)
    arrays = [one if isinstance(one, np.ndarray) else Numbered().add(call, one) - 1 for one in given]
    sizes: dict[str, int] = {}
    for names_of, array in zip(labels, arrays, strict=True):
        if len(names_of) != array.ndim or any(
            sizes.setdefault(n, s) != s for n, s in zip(names_of, array.shape, strict=True)
        ):
            raise InputError(f"its attribute equation = {equation} for shapes {[a.shape for a in arrays]}")
    full = tuple(sizes[name] for name in order)
    if math.prod(full) > MAX_TERMS:
        raise UnsupportedError(f"more than {MAX_TERMS} products of weights and values")
    spread = [np.broadcast_to(_along(array, one, order), full) for array, one in zip(arrays, labels, strict=True)]
    outputs = full[: len(result)]
    weight = np.ones(full, np.float32) if len(given) == 1 else spread[1 - values[0]]
    return call.sparse(x.index, spread[values[0]], weight, outputs)


def _product_of_axes(call: Call, labels: Sequence[str], result: str | None) -> Value:
    """A contraction of two computed values as one product of matrices.

    Args:
        call: the node that is read.
        labels: of the axes of both.
        result: labels of the result; by default those that only one of both has, in the order of the alphabet.
    """
    first, second = labels
    x, y = call.value(0), call.value(1)
    if result is None:
        result = "".join(sorted(set(first) ^ set(second)))
    both, left, right = (
        [name for name in result if name in first and name in second],
        [name for name in result if name in first and name not in second],
        [name for name in result if name in second and name not in first],
    )
    inner = [name for name in first if name in second and name not in result]
    if len({*both, *left, *right}) < len(result) or sorted(first) != sorted([*both, *left, *inner]):
        raise UnsupportedError("labels that are no product of matrices")
    if sorted(second) != sorted([*both, *inner, *right]):
        raise UnsupportedError("labels that are no product of matrices")
    sizes = {**dict(zip(second, call.shape(y), strict=True)), **dict(zip(first, call.shape(x), strict=True))}
    if any(sizes[name] != size for name, size in zip(second, call.shape(y), strict=True)):
        raise InputError(f"the shapes {call.shape(x)} and {call.shape(y)}")

    def count(names: Sequence[str]) -> int:
        return math.prod(sizes[name] for name in names)

    def side(value: Value, own: str, *groups: Sequence[str]) -> int:
        moved = ordered(call, value, [own.index(name) for group in groups for name in group])
        return call.build.reshape(moved.index, tuple(count(group) for group in groups), call.name)

    product = call.build.matmul(side(x, first, both, left, inner), side(y, second, both, inner, right), call.name)
    found = [*both, *left, *right]
    whole = call.reshaped(Value(product, False), [sizes[name] for name in found])
    order = [found.index(name) for name in result]
    return ordered(call, whole, order)


def _along(array: np.ndarray, labels: str, order: Sequence[str]) -> np.ndarray:
    """An array whose axes have labels, of which some may be the same, with an axis for each label of ``order``."""
    kept = [name for name in order if name in labels]
    found = np.einsum(array, [order.index(name) for name in labels], [order.index(name) for name in kept])
    return found.reshape([found.shape[kept.index(name)] if name in kept else 1 for name in order])


@converts("CumSum", 11, 14)
def _cumulative_sum(call: Call) -> Value:
    x = call.value()
    rank = len(call.shape(x))
    axis = axis_of(int(call.constant(1).reshape(())), rank)
    length = call.shape(x)[axis]
    if length > MAX_TERMS**0.5:
        raise InputError(f"sums up {length} values")
    weight = torch.ones(length, length).tril(-1 if call.get("exclusive", 0) else 0)
    axes = [*(a for a in range(rank) if a != axis), axis]
    last = ordered(call, x, axes)
    found = call.build.linear(last.index, weight.T if call.get("reverse", 0) else weight, None, call.name)
    return ordered(call, Value(found, last.leading), np.argsort(axes).tolist())


LEARNED = "ai.onnx.ml"


def _as(call: Call, operator: str, version: int, *inputs: Value, **attributes: Any) -> Value:
    """What an operator of the standard domain makes of values."""
    found = CONVERTERS[operator, version](
        replace(call, op=operator, version=version, inputs=inputs, attributes=attributes)
    )
    assert isinstance(found, Value)
    return found


def _numbers(call: Call, attribute: str) -> np.ndarray:
    return np.array(call.get(attribute, ()), np.float32)


@converts("Scaler", 1)
def _scaler(call: Call) -> Value:
    x = call.value()
    center, scale = tensor(_numbers(call, "offset")), tensor(_numbers(call, "scale"))
    return Value(call.build.scale(x.index, call.name, center=center, scale=scale), x.leading)


def _linear(call: Call, rows: int) -> Value:
    x, weight, bias = call.value(), _numbers(call, "coefficients"), _numbers(call, "intercepts")
    if rows < 1 or weight.size % rows or bias.size not in (0, rows):
        raise InputError(f"{weight.size} coefficients and {bias.size} intercepts for {rows} outputs")
    added = tensor(bias) if bias.size else None
    return Value(call.build.linear(x.index, tensor(weight.reshape(rows, -1)), added, call.name), x.leading)


@converts("LinearRegressor", 1)
def _regressor(call: Call) -> Value:
    call.refuse(post_transform=b"NONE")
    return _linear(call, call.get("targets", 1))


@converts("LinearClassifier", 1)
def _classifier(call: Call) -> list[Result | None]:
    classes = len(call.get("classlabels_ints", ()) or call.get("classlabels_strings", ()))
    rows = _numbers(call, "intercepts").size or classes
    if rows != classes:
        raise UnsupportedError(f"{rows} scores for {classes} classes")
    scores, after = _linear(call, rows), call.get("post_transform", b"NONE")
    if after == b"SOFTMAX":
        scores = _as(call, "Softmax", 13, scores)
    elif after == b"LOGISTIC":
        scores = _as(call, "Sigmoid", 13, scores)
    elif after != b"NONE":
        raise UnsupportedError(f"its attribute post_transform = {after.decode(errors='replace')}")
    return [None, scores]


@converts("Normalizer", 1, group="products")
def _normalizer(call: Call) -> Value:
    norms = {b"L1": ("ReduceL1", 13), b"L2": ("ReduceL2", 13)}
    norm = call.get("norm", b"MAX")
    if norm not in norms:
        raise UnsupportedError(f"its attribute norm = {norm.decode(errors='replace')}")
    x = call.value()
    return _as(call, "Div", 14, x, _as(call, *norms[norm], x, axes=(-1,), keepdims=1))
