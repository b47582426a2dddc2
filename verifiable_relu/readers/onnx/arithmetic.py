"""Sums, products and quotients, element by element and of matrices; scikit-learn's scalers and linear models.

skl2onnx writes the latter in the domain ai.onnx.ml. Their labels, which are no floating-point numbers, are not read.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.readers.builder import Value, paired, tensor
from verifiable_relu.readers.derived import deviations, scaled
from verifiable_relu.readers.onnx.call import Call, Result, axis_of, converts, operands

MAX_TERMS = 1 << 24
"""Most products of weights and inputs of an affine map that is read term by term."""

# Element by element


def constant_last(call: Call, left: Result | None, right: Result | None) -> tuple[Value, Value | Tensor]:
    """Return two operands of which one is computed at least, a constant second."""
    x, y = operands(call.build, left, right)
    x, y = (x, y) if isinstance(x, Value) else (y, x)
    assert isinstance(x, Value)
    return x, y


def added(call: Call, left: Result | None, right: Result | None, *, error: float = 0.0) -> Value:
    """Return the sum of two operands of which one is computed at least; ``error``: relative, of a constant."""
    x, y = constant_last(call, left, right)
    if isinstance(y, Tensor):
        return call.build.scale(x, shift=y, shift_error=error)
    return call.build.sum(x, y)


def times(call: Call, left: Result | None, right: Result | None) -> Value:
    """Return the product of two operands of which one is computed at least."""
    x, y = constant_last(call, left, right)
    return call.build.scale(x, y) if isinstance(y, Tensor) else call.build.product(x, y)


def negative(call: Call, x: Value) -> Value:
    """Return −x."""
    return call.build.scale(x, -1.0)


def difference(call: Call, left: Result | None, right: Result | None) -> Value:
    """Return left − right, of which one is computed at least."""
    x, y = operands(call.build, left, right)
    if isinstance(x, Value) and isinstance(y, Value):
        return call.build.sum(x, negative(call, y))
    if isinstance(x, Value):
        assert isinstance(y, Tensor)
        return call.build.scale(x, center=y)
    assert isinstance(y, Value)
    return call.build.scale(y, -1.0, shift=x)


@converts("Add", 7, 13, 14)
def _add(call: Call) -> Value:
    return added(call, *call.inputs)


@converts("Sum", 6, 8, 13)
def _sum(call: Call) -> Result:
    # Constants first, so that all that is computed comes after.
    ordered = sorted(call.given(), key=lambda given: not isinstance(given, Value))
    return functools.reduce(lambda x, y: added(call, x, y), ordered)


@converts("Mean", 6, 8, 13)
def _mean(call: Call) -> Value:
    total = _sum(call)
    assert isinstance(total, Value)
    return call.build.divided(total, torch.tensor(float(len(call.inputs))))


@converts("Sub", 7, 13, 14)
def _sub(call: Call) -> Value:
    return difference(call, *call.inputs)


@converts("Neg", 6, 13)
def _neg(call: Call) -> Value:
    return negative(call, call.value())


@converts("Mul", 7, 13, 14)
def _mul(call: Call) -> Value:
    return times(call, *call.inputs)


@converts("Div", 7, 13, 14)
def _div(call: Call) -> Value:
    x, y = operands(call.build, *call.inputs)
    if isinstance(y, Value):
        inverse = call.build.function(y, "Reciprocal")
        return call.build.product(x, inverse) if isinstance(x, Value) else call.build.scale(inverse, x)
    assert isinstance(x, Value)
    return call.build.divided(x, y)


@converts("IsNaN", 9, 13, 20)
def _is_nan(call: Call) -> np.ndarray:
    # Of what is no number nothing is proved, whatever a file does about it.
    return np.zeros(call.value().shape, np.bool_)


@converts("BatchNormalization", 7, 9, 14, 15)
def _batch_normalization(call: Call) -> Value:
    call.refuse(training_mode=0, spatial=1)
    x = call.value()
    channels = (-1, *(1,) * (len(x.shape) - 2))
    gamma, beta, mean, variance = (tensor(call.constant(i)).reshape(channels) for i in (1, 2, 3, 4))
    scale, error = deviations(gamma, variance, call.get("epsilon", float(np.float32(1e-5))))
    return call.build.scale(x, scale, shift=beta, center=mean, error=error)


@converts("Scaler", 1)
def _scaler(call: Call) -> Value:
    center, scale = (tensor(_numbers(call, name)) for name in ("offset", "scale"))
    return call.build.scale(call.value(), scale, center=center)


# Products of matrices


@converts("Gemm", 7, 9, 11, 13)
def _gemm(call: Call) -> Value:
    left, right = (
        _transposed(call, given) if call.get(name, 0) else given
        for given, name in zip(call.inputs, ("transA", "transB"), strict=False)
    )
    alpha, beta = call.get("alpha", 1.0), call.get("beta", 1.0)
    given = call.inputs[2] if len(call.inputs) > 2 and beta != 0 else None
    if isinstance(given, Value):
        return added(call, _product(call, left, right, alpha), call.build.scale(given, beta))
    if given is None:
        return _product(call, left, right, alpha)
    shift, off = scaled(tensor(given), beta)
    if isinstance(right, np.ndarray) and (given.ndim < 2 or given.shape[0] == 1):
        return _product(call, left, right, alpha, shift, off)
    return added(call, _product(call, left, right, alpha), shift.numpy(), error=off)


def _transposed(call: Call, given: Result | None) -> Result | None:
    return call.build.transposed(given, (1, 0)) if isinstance(given, Value) else None if given is None else given.T


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
    bias_error: float = 0.0,
) -> Value:
    """Return alpha times the matrix product of two operands of which one is computed at least.

    Alpha, a float32 number, is 1 where a constant has more axes than a matrix. The bias, of a relative error, is added
    to each row, where the right operand is a constant matrix.
    """
    build = call.build
    if isinstance(left, Value) and isinstance(right, np.ndarray):
        weight = _without_ones(right, len(left.shape))
        if weight.ndim != 2:
            return _contracted(call, left, right, first=False)
        factors, off = scaled(tensor(weight.T), alpha)
        return build.dense(left, factors, bias, off, bias_error)
    if isinstance(left, np.ndarray) and isinstance(right, Value):
        rank = len(right.shape)
        weight = _without_ones(left, rank)
        if weight.ndim != 2 or rank < 2:
            return _contracted(call, right, left, first=True)
        swap = (*range(rank - 2), rank - 1, rank - 2)
        factors, off = scaled(tensor(weight), alpha)
        return build.transposed(build.dense(build.transposed(right, swap), factors, None, off), swap)
    if not (isinstance(left, Value) and isinstance(right, Value)):
        raise UnsupportedError("an operand is missing")
    product = build.matmul(left, right)
    return product if alpha == 1 else build.scale(product, alpha)


def _without_ones(weight: np.ndarray, rank: int) -> np.ndarray:
    """Return the weight without leading axes of length 1 that do not enlarge a value of so many axes."""
    while 2 < weight.ndim <= rank and weight.shape[0] == 1:
        weight = weight[0]
    return weight


def _contracted(call: Call, x: Value, weight: np.ndarray, first: bool) -> Value:
    """Return the matrix product of x and a constant, ``first`` or second, as ``numpy.matmul`` has it, term by term."""
    places = np.arange(x.size).reshape(x.shape)
    left, right = (weight, places) if first else (places, weight)
    shape = np.matmul(np.empty(left.shape, np.bool_), np.empty(right.shape, np.bool_)).shape
    if left.shape[-1] * int(np.prod(shape)) > MAX_TERMS:
        raise UnsupportedError(f"more than {MAX_TERMS} products of weights and values")
    pairs = paired(left, right)
    index, numbers = reversed(pairs) if first else pairs
    return call.build.sparse(x, index, numbers, shape)


@converts("Einsum", 12, 28)
def _einsum(call: Call) -> Value:
    """Read a contraction of one or two tensors: a sum of products over the labels that the result has not."""
    equation, given = call.get("equation", b"").decode().replace(" ", ""), call.given()
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
    arrays = [one if isinstance(one, np.ndarray) else np.arange(one.size).reshape(one.shape) for one in given]
    sizes: dict[str, int] = {}
    for own, array in zip(labels, arrays, strict=True):
        if len(own) != array.ndim or any(sizes.setdefault(n, s) != s for n, s in zip(own, array.shape, strict=True)):
            raise InputError(f"its attribute equation = {equation} for shapes {[a.shape for a in arrays]}")
    full = tuple(sizes[name] for name in order)
    if math.prod(full) > MAX_TERMS:
        raise UnsupportedError(f"more than {MAX_TERMS} products of weights and values")
    spread = [np.broadcast_to(_along(array, own, order), full) for array, own in zip(arrays, labels, strict=True)]
    shape = full[: len(result)]
    match given:
        case [Value() as x, Value() as y]:
            product = call.build.product(call.build.moved(x, spread[0]), call.build.moved(y, spread[1]))
            return call.build.added_up(product.reshaped((*shape, math.prod(full[len(result) :]))))
        case [Value() as x]:
            return call.build.sparse(x, spread[0], np.ones(full, np.float32), shape)
    place = 0 if isinstance(given[0], Value) else 1
    return call.build.sparse(call.value(place), spread[place], spread[1 - place], shape)


def _along(array: np.ndarray, labels: str, order: Sequence[str]) -> np.ndarray:
    """Return an array with labelled axes, some perhaps alike, with one axis for each label of ``order``."""
    kept = [name for name in order if name in labels]
    found = np.einsum(array, [order.index(name) for name in labels], [order.index(name) for name in kept])
    return found.reshape([found.shape[kept.index(name)] if name in kept else 1 for name in order])


@converts("CumSum", 11, 14)
def _cumulative_sum(call: Call) -> Value:
    x, rank = call.value(), len(call.value().shape)
    axis = axis_of(int(call.constant(1).reshape(())), rank)
    length = x.shape[axis]
    if length > MAX_TERMS**0.5:
        raise InputError(f"sums up {length} values")
    weight = torch.ones(length, length).tril(-1 if call.get("exclusive", 0) else 0)
    axes = [*(a for a in range(rank) if a != axis), axis]
    last = call.build.transposed(x, axes)
    found = call.build.dense(last, weight.T if call.get("reverse", 0) else weight)
    return call.build.transposed(found, np.argsort(axes).tolist())


# scikit-learn's models

LEARNED = "ai.onnx.ml"
"""The domain of their operators."""


def _numbers(call: Call, attribute: str) -> np.ndarray:
    return np.array(call.get(attribute, ()), np.float32)


def _linear(call: Call, rows: int) -> Value:
    weight, bias = _numbers(call, "coefficients"), _numbers(call, "intercepts")
    if rows < 1 or weight.size % rows or bias.size not in (0, rows):
        raise InputError(f"{weight.size} coefficients and {bias.size} intercepts for {rows} outputs")
    return call.build.dense(call.value(), tensor(weight.reshape(rows, -1)), tensor(bias) if bias.size else None)


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
    operator = {b"SOFTMAX": "Softmax", b"LOGISTIC": "Sigmoid"}.get(after)
    if operator is None and after != b"NONE":
        raise UnsupportedError(f"its attribute post_transform = {after.decode(errors='replace')}")
    return [None, scores if operator is None else call.as_operator(operator, 13, [scores], {})]


@converts("Normalizer", 1, group="products")
def _normalizer(call: Call) -> Value:
    norms = {b"L1": "ReduceL1", b"L2": "ReduceL2"}
    norm = call.get("norm", b"MAX")
    if norm not in norms:
        raise UnsupportedError(f"its attribute norm = {norm.decode(errors='replace')}")
    x = call.value()
    size = call.as_operator(norms[norm], 13, [x], {"axes": (-1,), "keepdims": 1})
    return call.as_operator("Div", 14, [x, size], {})
