"""Questions beyond L∞ balls: sets of inputs and of outputs that users describe with arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from typing import Any

import numpy as np

from verifiable_relu.errors import InputError
from verifiable_relu.spec.balls import exact_number
from verifiable_relu.spec.property import Ball, Box, Polytope, Property, Row

MOST_POLYTOPES = 10_000
"""The most polytopes of the unsafe set of a top-k question."""

Pair = tuple[Any, Any]
"""A pair (A, b) of a matrix and a vector, which stands for A·y ≤ b."""


def targeted(target: int, classes: int) -> tuple[Polytope, ...]:
    """The outputs with which a class is predicted: y_j ≤ y_target for every other class j."""
    one = Fraction(1)
    rows = (tuple(sorted([(j, one), (target, -one)])) for j in range(classes) if j != target)
    return (tuple(Row(row, Fraction(0)) for row in rows),)


def outside_top(label: int, count: int, classes: int) -> tuple[Polytope, ...]:
    """The outputs with which a class is not surely among the ``count`` largest: so many others reach it at least.

    Raises:
        InputError: if ``count`` is not in 1 … classes − 1, or if there are too many subsets of other classes.
    """
    if not 1 <= count < classes:
        raise InputError(f"top_k is {count}, outside of 1 to {classes - 1}")
    if math.comb(classes - 1, count) > MOST_POLYTOPES:
        raise InputError(f"top_k = {count} of {classes} classes makes more than {MOST_POLYTOPES:,} cases")
    one = Fraction(1)
    others = [j for j in range(classes) if j != label]
    return tuple(
        tuple(Row(tuple(sorted([(label, one), (j, -one)])), Fraction(0)) for j in chosen)
        for chosen in combinations(others, count)
    )


def within_balls(
    properties: Sequence[Property], images: np.ndarray, radii: Sequence[Fraction], order: int
) -> list[Property]:
    """Properties of L∞ balls, asked for the L1 or L2 balls in them.

    Args:
        properties: those of the L∞ balls with the same radii.
        images: (n, …), the centres.
        radii: (n,).
        order: 1 or 2.
    """
    centers = np.asarray(images, dtype=np.float64).reshape(len(images), -1)
    return [
        replace(prop, ball=Ball(center, radius, order))
        for prop, center, radius in zip(properties, centers, radii, strict=True)
    ]


def patch_masks(shape: tuple[int, ...], size: tuple[int, int]) -> np.ndarray:
    """The pixels of a rectangle at each of its places in an image, in all channels.

    Args:
        shape: (…, height, width) of an image.
        size: (height, width) of the rectangle.

    Returns:
        Bool (places, *shape).

    Raises:
        InputError: if the rectangle does not fit the image.
    """
    if len(shape) < 2 or not all(0 < part <= whole for part, whole in zip(size, shape[-2:], strict=True)):
        raise InputError(f"a patch of {size[0]}×{size[1]} pixels does not fit images of shape {shape}")
    places = list(np.ndindex(*(whole - part + 1 for part, whole in zip(size, shape[-2:], strict=True))))
    masks = np.zeros((len(places), *shape), dtype=bool)
    for index, (top, left) in enumerate(places):
        masks[index, ..., top : top + size[0], left : left + size[1]] = True
    return masks


def box_property(
    lower: np.ndarray | Sequence[float],
    upper: np.ndarray | Sequence[float],
    *,
    unsafe: Pair | list[Pair] | None = None,
    safe: Pair | None = None,
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
        InputError: if shapes do not fit, a number is not finite, the box is empty, or if not one of ``unsafe`` and
            ``safe`` is given.
    """
    low, high = _exact(lower, "lower"), _exact(upper, "upper")
    if len(low) != len(high):
        raise InputError(f"the box has {len(low)} lower and {len(high)} upper bounds")
    if (unsafe is None) == (safe is None):
        raise InputError("either the unsafe or the safe outputs are given")
    polytopes: tuple[Polytope, ...]
    if unsafe is None:
        negated = (Row(tuple((i, -c) for i, c in row.coefficients), -row.bound, strict=True) for row in _rows(safe))
        polytopes = tuple((row,) for row in negated)
    else:
        polytopes = tuple(_rows(pair) for pair in ([unsafe] if isinstance(unsafe, tuple) else unsafe))
    return Property(Box.exact(low, high), polytopes, name)


def _exact(values: Any, what: str) -> list[Fraction]:
    try:
        flat = np.asarray(values, dtype=object).ravel().tolist()
    except ValueError:
        raise InputError(f"{what}: not an array of numbers") from None
    return [exact_number(value, what) for value in flat]


def _rows(pair: Any) -> Polytope:
    """The rows of a pair (A, b)."""
    try:
        matrix, bound = pair
        given = np.asarray(matrix, dtype=object)
    except (TypeError, ValueError):
        raise InputError("outputs are described by a pair (A, b) of matrix and vector, or a list of pairs") from None
    bounds = _exact(bound, "b")
    if given.ndim != 2 or given.shape[0] != len(bounds):
        raise InputError(f"A has the shape {given.shape}, where ({len(bounds)}, outputs) is expected")
    found = []
    for row, limit in zip(given.tolist(), bounds, strict=True):
        coefficients = [exact_number(value, "A") for value in row]
        found.append(Row(tuple((i, c) for i, c in enumerate(coefficients) if c), limit))
    return tuple(found)
