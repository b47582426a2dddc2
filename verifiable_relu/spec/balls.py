"""Questions of classifiers as properties: balls around data points, and sets that users describe with arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from numbers import Rational
from typing import Any

import numpy as np

from verifiable_relu.command_line import fraction
from verifiable_relu.errors import InputError
from verifiable_relu.rounding import LARGEST, above, below
from verifiable_relu.spec.property import (
    BallBounds,
    BallEnd,
    Box,
    Polytope,
    Property,
    Row,
    nearest,
    round_down,
    round_up,
)

_BLOCK = 1 << 15  # pixels that are computed at a time


def linf_properties(
    images: np.ndarray,
    labels: Sequence[int] | np.ndarray,
    eps: Fraction | float | np.ndarray,
    classes: int,
    clip: tuple[Fraction | float, Fraction | float] = (0, 1),
    names: Sequence[str] | None = None,
    decimals: int | None = None,
) -> list[Property]:
    """Return a property per image, which is *sat* if an input of the image's L∞ ball has another class.

    The box of an image holds the inputs in which each pixel differs from the image's by at most ``eps`` and lies within
    ``clip``. The unsafe set for the label l is the union over j ≠ l of {y : y_l ≤ y_j}: a tie counts as violated.

    Args:
        images: floats (n, …), in the units of ``clip``; each number is taken as the exact rational that it is.
        labels: (n,), in 0 … classes − 1.
        eps: the radius, ≥ 0; a ``Fraction`` stays exact. An array has a radius for each image, (n,), or for each
            pixel, in a shape that broadcasts to that of ``images``.
        classes: the network's number of outputs, at least 2.
        clip: the least and the greatest valid value of a pixel.
        names: the properties' names; ``linf_0``, ``linf_1`` … by default.
        decimals: decimals to which the box's bounds are rounded outward, for files; None keeps them exact.

    Raises:
        InputError: for a label, pixel, ``eps`` or ``clip`` out of range; the error names the image.
    """
    ends = list(clip) if np.iterable(clip) else []
    if len(ends) != 2:
        raise InputError(f"clip is {_shown(clip)}, not the two ends of a range")
    low, high = (exact_number(end, "clip") for end in ends)
    if low > high:
        raise InputError(f"the valid range {_rounded(low)} to {_rounded(high)} is empty")
    if len(labels) != len(images):
        raise InputError(f"{len(labels)} labels for {len(images)} images")
    names = [f"linf_{i}" for i in range(len(images))] if names is None else names
    size = math.prod(images.shape[1:])
    flat = np.asarray(images, dtype=np.float64).reshape(len(images), size)
    radii, level = _levels(eps, images.shape)
    level = np.broadcast_to(level, flat.shape)
    outside = ~((flat >= round_down(low)) & (flat <= round_up(high)))
    if outside.any():
        image, pixel = np.argwhere(outside)[0]
        said = f"a pixel is {float(flat[image, pixel])!r}, outside of the valid range"
        raise InputError(f"{said} [{_rounded(low)}, {_rounded(high)}]", place=f"image {image}")
    for bad in (i for i, label in enumerate(labels) if not 0 <= label < classes):
        raise InputError(f"the label is {labels[bad]}, outside of 0 to {classes - 1}", place=f"image {bad}")
    # A tie counts as violated. Properties of one label share their unsafe set.
    unsafe = [tuple((_at_most(i, j),) for j in range(classes) if j != i) for i in range(classes)]
    found: list[Property] = []
    sides = BallEnd(radii, low, decimals, 1), BallEnd(radii, -high, decimals, -1)
    step = max(1, _BLOCK // max(size, 1))  # blocks of images whose arrays fit in the processor's cache
    for start in range(0, len(flat), step):
        pixels, levels = flat[start : start + step], level[start : start + step]
        (lower, lower_inexact), (upper, upper_inexact) = (_rounded_ends(pixels, levels, side) for side in sides)
        for i, (each, index) in enumerate(zip(pixels, levels, strict=True)):
            pairs = zip(sides, (lower_inexact[i], upper_inexact[i]), strict=True)
            exact_lower, exact_upper = (BallBounds(end, each, index, inexact) for end, inexact in pairs)
            box = Box(lower[i], upper[i], exact_lower, exact_upper)
            found.append(Property(box, unsafe[int(labels[start + i])], names[start + i]))
    return found


def _levels(eps: object, shape: tuple[int, ...]) -> tuple[list[Fraction], np.ndarray]:
    """Return the different radii, and each pixel's index into them: shape () for a single radius, or (n, pixels)."""
    radii = [Fraction(0)]
    level: np.ndarray = np.zeros((), dtype=np.int64)
    if not isinstance(eps, np.ndarray | list | tuple) or np.ndim(eps) == 0:
        radii = [exact_number(eps, "eps")]
    else:
        given = np.asarray(eps, dtype=object)
        if given.ndim == 1:
            if len(given) != shape[0]:
                said = f"eps has {len(given)} radii for {shape[0]} images"
                raise InputError(f"{said}; for several radii of every image, call verify_radii")
            given = given.reshape(-1, *(1,) * (len(shape) - 1))
        index: dict[Fraction, int] = {}
        numbers = [index.setdefault(exact_number(value, "eps"), len(index)) for value in given.ravel().tolist()]
        try:
            level = np.broadcast_to(np.array(numbers, dtype=np.int64).reshape(given.shape), shape)
        except ValueError:
            raise InputError(f"eps of shape {given.shape} does not fit images of shape {shape}") from None
        radii, level = list(index) or radii, level.reshape(shape[0], math.prod(shape[1:]))
    if (smallest := min(radii)) < 0:
        raise InputError(f"eps is {_rounded(smallest)}, below 0")
    return radii, level


def _rounded_ends(pixels: np.ndarray, level: np.ndarray, end: BallEnd) -> tuple[np.ndarray, np.ndarray]:
    """Return one side's float64 bounds of balls, rounded outward, and where a bound is no float64 number.

    A radius ε is r − ρ with a float r. Knuth's TwoSum writes x − r = s + e, s the rounded difference, without any
    further error (The Art of Computer Programming 2, 4.2.2), so that x − ε = s + e + ρ. Where |ρ| < |e|, or e is 0,
    the sign of e + ρ is known; where |e + ρ| is below the distance from s to its neighbour on that side, x − ε is s or
    lies strictly between both. The few other pixels (a number is huge, or x is far smaller than ε) and bounds with
    ``decimals`` are computed from the exact ones.

    Pixels are finite and have, as ``level``, the shape (n, pixels). An end below ``least`` becomes ``least``.
    """
    near = [nearest(radius) for radius in end.radii]
    rest = [Fraction(r) - radius for r, radius in zip(near, end.radii, strict=True)]
    radius, sign = (np.array(each)[level] for each in (near, [float((v > 0) - (v < 0)) for v in rest]))
    size = np.array([round_up(min(abs(v), Fraction(LARGEST))) for v in rest])[level]
    with np.errstate(all="ignore"):
        x = end.sign * pixels
        total = x - radius
        part = total - x
        error = (x - (total - part)) - (radius + part)
        side = np.where(error == 0, sign, error)
        smaller = below(total)
        gap = np.where(np.signbit(side), total - smaller, above(total) - total)
        safe = (4 * np.abs(error) <= 3 * gap) & (4 * size < gap) & ((error == 0) | (size < np.abs(error)))
        # Adding 0.0 turns −0.0 into 0.0.
        floats = np.where(side < 0, smaller, total) + 0.0
    least = round_down(end.least)
    inexact, rounded = side != 0, Fraction(least) != end.least
    safe &= (floats != least) if rounded else True
    inexact[floats < least] = rounded
    np.maximum(floats, least, out=floats)
    spots = np.flatnonzero(~safe) if end.decimals is None else np.arange(pixels.size)
    # A pair of a pixel's value and its radius has the end of every pixel with this pair.
    values, at = np.unique(pixels.flat[spots], return_inverse=True)
    pairs, at = np.unique(at * len(near) + level.flat[spots], return_inverse=True)
    exact = (end.ratio(float(values[pair // len(near)]), pair % len(near)) for pair in pairs.tolist())
    if found := [_round_down(*each) for each in exact]:
        floats.flat[spots], inexact.flat[spots] = (np.array(each)[at] for each in zip(*found, strict=True))
    return end.sign * floats, inexact


def _round_down(top: int, bottom: int) -> tuple[float, bool]:
    """Return ``property.round_down`` of a quotient, and True if it differs from the quotient."""
    try:
        near = top / bottom  # Python rounds the quotient of two integers to nearest, once.
    except OverflowError:
        near = round_down(Fraction(top, bottom))
    a, b = near.as_integer_ratio()
    excess = a * bottom - top * b
    return below(near) if excess > 0 else near, excess != 0


def _at_most(first: int, second: int) -> Row:
    return Row(tuple(sorted([(first, Fraction(1)), (second, Fraction(-1))])), Fraction(0))


def exact_number(value: object, what: str) -> Fraction:
    """Return the exact value of a number, a text such as ``1/255``, or an array or tensor without axes.

    Raises:
        InputError: for any other value, NaN and infinity; the message calls the value ``what``.
    """
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, Rational | Decimal | float) and not isinstance(value, bool):
        try:
            return Fraction(value)
        except (ValueError, OverflowError):
            raise InputError(f"{what} is {value}, not a finite number") from None
    if isinstance(value, str):
        with suppress(ValueError):
            return fraction(value)
    raise InputError(f"{what} is {_shown(value)}, not a number")


def _rounded(value: Fraction) -> str:
    try:
        return repr(float(value))
    except OverflowError:
        return "a number beyond the range of float64"


def _shown(value: object) -> str:
    shape = getattr(value, "shape", None)
    return f"{value!r:.60}" if shape is None else f"{type(value).__name__} of shape {tuple(shape)}"


def targeted(target: int, classes: int) -> tuple[Polytope, ...]:
    """Return the outputs with which a class is predicted: y_j ≤ y_target for every other class j."""
    return (tuple(_at_most(j, target) for j in range(classes) if j != target),)


def box_property(
    lower: np.ndarray | Sequence[float],
    upper: np.ndarray | Sequence[float],
    *,
    unsafe: tuple[Any, Any] | list[tuple[Any, Any]] | None = None,
    safe: tuple[Any, Any] | None = None,
    name: str = "box",
) -> Property:
    """A property of a box of inputs and a polytope of outputs.

    Args:
        lower: the least value of each input, in any shape; taken exactly, fractions too.
        upper: the greatest values, in the same shape.
        unsafe: a pair (A, b), or a list of pairs: the property is violated by outputs with A·y ≤ b, for one of the
            pairs. A has a row for each constraint and a column for each output.
        safe: in place of ``unsafe``, a pair (A, b): the property holds if A·y ≤ b for all inputs of the box.
        name: the name in messages.

    Raises:
        InputError: if shapes do not fit, a number is not finite, the box is empty, or ``unsafe`` and ``safe`` given.
    """
    low, high = _exact(lower, "lower"), _exact(upper, "upper")
    if len(low) != len(high):
        raise InputError(f"the box has {len(low)} lower and {len(high)} upper bounds")
    if (unsafe is None) == (safe is None):
        raise InputError("either the unsafe or the safe outputs are given")
    polytopes: tuple[Polytope, ...]
    if unsafe is None:
        polytopes = tuple((row.negated(),) for row in _rows(safe))
    else:
        polytopes = tuple(map(_rows, [unsafe] if isinstance(unsafe, tuple) else unsafe))
    return Property(Box.exact(low, high), polytopes, name)


def _exact(values: Any, what: str) -> list[Fraction]:
    try:
        flat = np.asarray(values, dtype=object).ravel().tolist()
    except ValueError:
        raise InputError(f"{what}: not an array of numbers") from None
    return [exact_number(value, what) for value in flat]


def _rows(pair: Any) -> Polytope:
    try:
        matrix, bound = pair
        given = np.asarray(matrix, dtype=object)
    except (TypeError, ValueError):
        raise InputError("outputs are described by a pair (A, b) of matrix and vector, or a list of pairs") from None
    bounds = _exact(bound, "b")
    if given.ndim != 2 or given.shape[0] != len(bounds):
        raise InputError(f"A has the shape {given.shape}, where ({len(bounds)}, outputs) is expected")
    coefficients = ([exact_number(value, "A") for value in row] for row in given.tolist())
    pairs = zip(coefficients, bounds, strict=True)
    return tuple(Row(tuple((i, c) for i, c in enumerate(row) if c), limit) for row, limit in pairs)
