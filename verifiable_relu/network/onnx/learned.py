"""Operators of the domain ai.onnx.ml, in which scikit-learn's converter (skl2onnx) writes scalers and linear models.

Their labels, which are no floating-point numbers, are not read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.network.onnx.call import CONVERTERS, Call, Result, Value, converts, tensor

DOMAIN = "ai.onnx.ml"


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
