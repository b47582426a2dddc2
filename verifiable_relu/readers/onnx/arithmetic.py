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
from verifiable_relu.readers.builder import Value, tensor
from verifiable_relu.readers.derived import deviations, scaled
from verifiable_relu.readers.onnx.call import Call, Result, axis_of, converts, operands

MAX_TERMS = 1 << 24
"""Most products of weights and inputs of an affine map that is read term by term."""

# Element by element


def added(call: Call, left: Result | None, right: Result | None, *, error: float = 0.0) -> Value:
    """Return the sum of two operands of which one is computed at least; ``error``: relative, of a constant."""
    x, y = operands(call.build, left, right)
    if isinstance(x, Value) and isinstance(y, Value):
        return call.build.sum(x, y)
    value, constant = (x, y) if isinstance(x, Value) else (y, x)
    assert isinstance(value, Value) and isinstance(constant, Tensor)
    return call.build.scale(value, shift=constant, shift_error=error)


def times(call: Call, left: Result | None, right: Result | None) -> Value:
    """Return the product of two operands of which one is computed at least."""
    x, y = operands(call.build, left, right)
    if isinstance(x, Value) and isinstance(y, Value):
        return call.build.product(x, y)
    value, constant = (x, y) if isinstance(x, Value) else (y, x)
    assert isinstance(value, Value) and isinstance(constant, Tensor)
    return call.build.scale(value, constant)


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

    Args:
        call: the node that is read.
        left, right: the operands.
        alpha: a float32 number; 1 where a constant operand has more axes than a matrix.
        bias: added to each row, where the right operand is a constant matrix.
        bias_error: the relative error of the bias.
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
    """Return the matrix product of x and a constant of any shape, as ``numpy.matmul`` has it, term by term.

    Args:
        call: the node that is read.
        x: the computed operand.
        weight: the constant operand.
        first: whether the constant comes first.
    """
    places = np.arange(x.size).reshape(x.shape)
    left, right = (weight, places) if first else (places, weight)
    shape = np.matmul(np.empty(left.shape, np.bool_), np.empty(right.shape, np.bool_)).shape
    if left.shape[-1] * int(np.prod(shape)) > MAX_TERMS:
        raise UnsupportedError(f"more than {MAX_TERMS} products of weights and values")
    rows = left[None, :] if left.ndim == 1 else left
    columns = right[None, :] if right.ndim == 1 else np.swapaxes(right, -1, -2)
    pairs = np.broadcast_arrays(rows[..., :, None, :], columns[..., None, :, :])
    index, numbers = reversed(pairs) if first else pairs
    return call.build.sparse(x, index, numbers, shape)


@converts("Einsum", 12, 28)
def _einsum(call: Call) -> Value:
    """Read a contraction of one computed value, with at most one constant, or a product of two computed ones."""
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
    arrays = [one if isinstance(one, np.ndarray) else np.arange(one.size).reshape(one.shape) for one in given]
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
    weight = np.ones(full, np.float32) if len(given) == 1 else spread[1 - values[0]]
    return call.build.sparse(x, spread[values[0]], weight, full[: len(result)])


def _product_of_axes(call: Call, labels: Sequence[str], result: str | None) -> Value:
    """Return a contraction of two computed values as one product of matrices.

    Args:
        call: the node that is read.
        labels: of the axes of both.
        result: labels of the result; by default those that only one of both has, in the order of the alphabet.
    """
    (first, second), (x, y), build = labels, (call.value(0), call.value(1)), call.build
    if result is None:
        result = "".join(sorted(set(first) ^ set(second)))
    both, left, right = (
        [name for name in result if name in first and name in second],
        [name for name in result if name in first and name not in second],
        [name for name in result if name in second and name not in first],
    )
    inner = [name for name in first if name in second and name not in result]
    sides = (sorted([*both, *left, *inner]), sorted([*both, *inner, *right]))
    if len({*both, *left, *right}) < len(result) or (sorted(first), sorted(second)) != sides:
        raise UnsupportedError("labels that are no product of matrices")
    sizes = {**dict(zip(second, y.shape, strict=True)), **dict(zip(first, x.shape, strict=True))}
    if any(sizes[name] != size for name, size in zip(second, y.shape, strict=True)):
        raise InputError(f"the shapes {x.shape} and {y.shape}")

    def side(value: Value, own: str, *groups: Sequence[str]) -> Value:
        ordered = build.transposed(value, [own.index(name) for group in groups for name in group])
        return ordered.reshaped([math.prod(sizes[name] for name in group) for group in groups])

    product = build.matmul(side(x, first, both, left, inner), side(y, second, both, inner, right))
    found = [*both, *left, *right]
    return build.transposed(product.reshaped([sizes[name] for name in found]), [found.index(name) for name in result])


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
