"""Resize and Upsample: each output is a mean of inputs near the place that it comes from.

Places and weights are worked out as fractions, one axis at a time, from the standard's definition of the operator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.readers.builder import Value
from verifiable_relu.readers.derived import Derived, both, rounded
from verifiable_relu.readers.onnx.call import Call, axis_of, converts
from verifiable_relu.readers.onnx.windows import MAX_CELLS
from verifiable_relu.rounding import LEAST_WEIGHT, UNIT

_HALF = Fraction(1, 2)


@dataclass(frozen=True)
class Axis:
    """One axis: its length before and after, and the factor between them."""

    before: int
    after: int
    scale: Fraction


def _symmetric(axis: Axis, i: int) -> Fraction:
    return Fraction(axis.before, 2) * (1 - axis.after / (axis.scale * axis.before)) + (i + _HALF) / axis.scale - _HALF


PLACES: dict[bytes, Callable[[Axis, int], Fraction]] = {
    b"asymmetric": lambda axis, i: i / axis.scale,
    b"half_pixel": lambda axis, i: (i + _HALF) / axis.scale - _HALF,
    b"pytorch_half_pixel": lambda axis, i: (i + _HALF) / axis.scale - _HALF if axis.after > 1 else Fraction(0),
    b"align_corners": lambda axis, i: (
        Fraction(i * (axis.before - 1), axis.after - 1) if axis.after > 1 else Fraction(0)
    ),
    b"half_pixel_symmetric": _symmetric,
}
"""The place that an output comes from, in the numbering of the inputs, by ``coordinate_transformation_mode``."""

NEAREST: dict[bytes, Callable[[Fraction], int]] = {
    b"round_prefer_floor": lambda place: math.ceil(place - _HALF),
    b"round_prefer_ceil": lambda place: math.floor(place + _HALF),
    b"floor": math.floor,
    b"ceil": math.ceil,
}
"""The input that is taken for one at a place between inputs, by ``nearest_mode``."""

Terms = list[tuple[int, Fraction]]
"""Inputs along an axis, which may lie beyond its ends, and their weights."""


def _linear(place: Fraction) -> Terms:
    first = math.floor(place)
    return [(first, 1 - (place - first)), (first + 1, place - first)]


def _cubic(place: Fraction, a: Fraction) -> Terms:
    """R. Keys, Cubic Convolution Interpolation for Digital Image Processing, IEEE Trans. ASSP 29, 1981, eq. 15."""
    first, terms = math.floor(place), []
    for i in range(first - 1, first + 3):
        s = abs(place - i)
        near = ((a + 2) * s - (a + 3)) * s * s + 1
        far = ((a * s - 5 * a) * s + 8 * a) * s - 4 * a
        terms.append((i, near if s <= 1 else far))
    return terms


@converts("Resize", 11, 13, 18, 19)
def _resize(call: Call) -> Value:
    call.refuse(antialias=0, keep_aspect_ratio_policy=b"stretch")
    mode, where = call.get("mode", b"nearest"), call.get("coordinate_transformation_mode", b"half_pixel")
    if where not in PLACES:
        raise UnsupportedError(f"its attribute coordinate_transformation_mode = {where!r}")
    shape = call.value().shape
    axes = [axis_of(axis, len(shape)) for axis in call.get("axes", range(len(shape)))]
    scales, sizes = (None if given is None or not given.size else given for given in map(call.optional, (2, 3)))
    if (scales is None) == (sizes is None) or len(set(axes)) < len(axes):
        raise InputError("names neither scales nor sizes, or both, or an axis twice")
    given = (scales if sizes is None else sizes).reshape(-1).tolist()  # type: ignore[union-attr]
    if len(given) != len(axes):
        raise InputError(f"{len(given)} factors or sizes for {len(axes)} axes")
    factors = [Fraction(1)] * len(shape)
    for axis, value in zip(axes, given, strict=True):
        factors[axis] = Fraction(value) if sizes is None else Fraction(int(value), shape[axis])
    resized = [Axis(size, math.floor(factor * size), factor) for size, factor in zip(shape, factors, strict=True)]
    if where == b"align_corners" and any(axis.scale * axis.before != axis.after for axis in resized):
        # The standard's own test cases and onnxruntime take different lengths for the result's.
        raise UnsupportedError("aligns corners of a result of no whole length")
    if mode == b"linear":
        call.refuse(exclude_outside=0)
    inside = mode == b"cubic" and bool(call.get("exclude_outside", 0))
    terms = _terms(call, mode, (b"linear", b"cubic"), call.get("nearest_mode", b"round_prefer_floor"))
    return _interpolated(call, call.value(), resized, where, terms, inside)


@converts("Upsample", 7, 9)
@converts("Resize", 10)
def _upsample(call: Call) -> Value:
    x, shape = call.value(), call.value().shape
    scales = call.get("scales", ()) if (call.op, call.version) == ("Upsample", 7) else call.constant(1).reshape(-1)
    if len(scales) != len(shape):
        raise InputError(f"{len(scales)} factors for {len(shape)} axes")
    factors = [Fraction(float(scale)) for scale in scales]
    axes = [Axis(size, math.floor(factor * size), factor) for size, factor in zip(shape, factors, strict=True)]
    terms = _terms(call, call.get("mode", b"nearest"), (b"linear", b"bilinear"), b"floor")
    return _interpolated(call, x, axes, b"asymmetric", terms)


def _terms(call: Call, mode: bytes, others: Sequence[bytes], rounds: bytes) -> Callable[[Fraction], Terms]:
    """Return the terms of a place in a mode: nearest, which ``rounds``, or one of some others."""
    if mode == b"nearest":
        nearest = NEAREST.get(rounds)
        if nearest is None:
            raise UnsupportedError(f"its attribute nearest_mode = {rounds!r}")
        return lambda place: [(nearest(place), Fraction(1))]
    if mode not in others:
        raise UnsupportedError(f"its attribute mode = {mode!r}")
    a = Fraction(float(np.float32(call.get("cubic_coeff_a", -0.75))))
    return (lambda place: _cubic(place, a)) if mode == b"cubic" else _linear


def _interpolated(
    call: Call,
    x: Value,
    axes: Sequence[Axis],
    where: bytes,
    terms: Callable[[Fraction], Terms],
    inside: bool = False,
) -> Value:
    """Return x resized along all its axes.

    Args:
        where: a key of ``PLACES``.
        terms: of a place between inputs. Inputs beyond an end are the one at the end.
        inside: leave these out instead, the other weights made larger so that their sum is 1.
    """
    if min(axis.after for axis in axes) < 1:
        raise InputError(f"resizes to {[axis.after for axis in axes]}")
    lines = [_line(axis, where, terms, inside) for axis in axes]
    shape, count = tuple(axis.after for axis in axes), math.prod(len(places) for places, _ in lines)
    if math.prod(shape) * count > MAX_CELLS:
        raise UnsupportedError(f"a result with more than {MAX_CELLS} terms")
    dims = len(axes)
    index, weight = np.zeros((1,) * 2 * dims, np.int64), np.ones((1,) * 2 * dims)
    error, short = 0.0, True
    for d, (places, shares) in enumerate(lines):
        size = [len(places) if a == d else axes[d].after if a == dims + d else 1 for a in range(2 * dims)]
        index = index * axes[d].before + places.reshape(size)
        rounded_shares, off = rounded(Derived(shares))
        weight = weight * rounded_shares.numpy().reshape(size)
        # Weights of few binary places.
        short &= all(w.denominator & (w.denominator - 1) == 0 and w.denominator <= 1 << 48 // dims for w in shares.flat)
        # Each product rounds once more, unless all its factors are short.
        error = both(both(error, off), 0.0 if short else float(UNIT))
    full = (*(len(places) for places, _ in lines), *shape)
    rows = np.broadcast_to(index, full).reshape(count, -1).T
    if count == 1 and bool((weight == 1).all()):
        return call.build.moved(x, rows.reshape(shape))
    wide = np.broadcast_to(weight, full).reshape(count, -1).T
    if bool(((wide != 0) & (np.abs(wide) < LEAST_WEIGHT)).any()):
        raise UnsupportedError("weights next to 0")
    return call.build.sparse(x, rows, wide, shape, error=error)


def _line(axis: Axis, where: bytes, terms: Callable[[Fraction], Terms], inside: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the inputs and weights, as fractions, of each output along one axis: (terms, outputs) each."""
    unchanged = axis.scale == 1 and axis.before == axis.after
    found = [[(i, Fraction(1))] if unchanged else terms(PLACES[where](axis, i)) for i in range(axis.after)]
    if inside and not unchanged:
        found = [[(i, w if 0 <= i < axis.before else Fraction(0)) for i, w in row] for row in found]
        found = [[(i, w / sum(share for _, share in row)) for i, w in row] for row in found]
    places = np.array([[min(max(i, 0), axis.before - 1) for i, _ in row] for row in found], np.int64).T
    shares = np.array([[w for _, w in row] for row in found], dtype=object).T
    return places, shares
