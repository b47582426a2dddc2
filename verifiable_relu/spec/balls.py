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
from verifiable_relu.rounding import below
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
        raise InputError(f"the valid range {nearest(low)} to {nearest(high)} is empty")
    if len(labels) != len(images):
        raise InputError(f"{len(labels)} labels for {len(images)} images")
    names = [f"linf_{i}" for i in range(len(images))] if names is None else names
    size = math.prod(images.shape[1:])
    flat = np.asarray(images, dtype=np.float64).reshape(len(images), size)
    radii, level = _levels(eps, images.shape)
    outside = ~((flat >= round_down(low)) & (flat <= round_up(high)))
    if outside.any():
        image, pixel = np.argwhere(outside)[0]
        said = f"a pixel is {float(flat[image, pixel])!r}, outside of the valid range"
        raise InputError(f"{said} [{nearest(low)}, {nearest(high)}]", place=f"image {image}")
    for bad in (i for i, label in enumerate(labels) if not 0 <= label < classes):
        raise InputError(f"the label is {labels[bad]}, outside of 0 to {classes - 1}", place=f"image {bad}")
    # A tie counts as violated. Properties of one label share their unsafe set.
    unsafe = [tuple((_at_most(i, j),) for j in range(classes) if j != i) for i in range(classes)]
    # Images have few different numbers: the ends of each pair of a pixel's value and its radius are computed once.
    values, at = np.unique(flat, return_inverse=True)
    pairs, at = np.unique(at.reshape(flat.shape) * len(radii) + level, return_inverse=True)
    numbers = [(float(values[pair // len(radii)]), pair % len(radii)) for pair in pairs.tolist()]
    sides = BallEnd(radii, low, decimals, 1), BallEnd(radii, -high, decimals, -1)
    (lower, lower_inexact), (upper, upper_inexact) = (_rounded_ends(end, numbers) for end in sides)
    found: list[Property] = []
    for pixels, index, row, label, name in zip(flat, level, at.reshape(flat.shape), labels, names, strict=True):
        low_end = BallBounds(sides[0], pixels, index, lower_inexact[row])
        high_end = BallBounds(sides[1], pixels, index, upper_inexact[row])
        found.append(Property(Box(lower[row], upper[row], low_end, high_end), unsafe[int(label)], name))
    return found


def _levels(eps: object, shape: tuple[int, ...]) -> tuple[list[Fraction], np.ndarray]:
    """Return the different radii, and each pixel's index into them, (n, pixels)."""
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
    radii = list(index) or [Fraction(0)]
    if (smallest := min(radii)) < 0:
        raise InputError(f"eps is {nearest(smallest)}, below 0")
    return radii, level.reshape(shape[0], math.prod(shape[1:]))


def _rounded_ends(end: BallEnd, numbers: Sequence[tuple[float, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return one side's float64 bounds of balls, rounded outward, and where a bound is no float64 number.

    ``numbers`` are pairs of a center's coordinate and the index of its radius.
    """
    floats = np.zeros(len(numbers))
    inexact = np.zeros(len(numbers), bool)
    for i, pair in enumerate(numbers):
        top, bottom = end.ratio(*pair)
        try:
            near = top / bottom  # Python rounds the quotient of two integers to nearest, once.
        except OverflowError:
            near = round_down(Fraction(top, bottom))
        a, b = near.as_integer_ratio()
        excess = a * bottom - top * b
        floats[i], inexact[i] = below(near) if excess > 0 else near, excess != 0
    return end.sign * floats, inexact


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
    """Make a property of a box of inputs and a polytope of outputs.

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
        raise InputError("give either the unsafe or the safe outputs")
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
