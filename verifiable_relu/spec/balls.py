"""The L∞ robustness of classifiers as properties: a ball around a data point, and all classes but the point's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction
from numbers import Rational

import numpy as np

from verifiable_relu.errors import InputError
from verifiable_relu.spec.property import Box, Polytope, Property, Row, round_down, round_up


def linf_property(
    image: np.ndarray,
    label: int,
    eps: Fraction | float,
    classes: int,
    clip: tuple[Fraction | float, Fraction | float] = (0, 1),
    name: str = "linf",
    decimals: int | None = None,
) -> Property:
    """The property of one image, a single sample of any shape; see :func:`linf_properties`."""
    return linf_properties(image[None], [label], eps, classes, clip, [name], decimals)[0]


def linf_properties(
    images: np.ndarray,
    labels: Sequence[int] | np.ndarray,
    eps: Fraction | float | np.ndarray,
    classes: int,
    clip: tuple[Fraction | float, Fraction | float] = (0, 1),
    names: Sequence[str] | None = None,
    decimals: int | None = None,
) -> list[Property]:
    """One property per image, which is *sat* if an input in the image's L∞ ball has another class than the image.

    The box of an image holds the inputs in which each pixel differs from the image's by at most ``eps`` and lies within
    ``clip``. The unsafe set for the label l is the union over j ≠ l of {y : y_l ≤ y_j}: a tie counts as violated.

    Args:
        images: floats (n, …), in the units of ``clip``; each number is taken as the exact rational that it is.
        labels: (n,), in 0 … classes − 1.
        eps: the radius, ≥ 0; a ``Fraction`` such as ``Fraction(1, 255)`` stays exact. An array of radii has one
            for each image, (n,), or for each pixel, in a shape that broadcasts to that of ``images``.
        classes: the network's number of outputs, at least 2.
        clip: the least and the greatest valid value of a pixel.
        names: the properties' names, one per image; ``linf_0``, ``linf_1`` … by default.
        decimals: the number of decimals to which the box's bounds are rounded outward, for files; None keeps them
            exact.

    Raises:
        InputError: for a label, pixel, ``eps`` or ``clip`` out of range; the error names the image.
    """
    low, high = _range(clip)
    if low > high:
        raise InputError(f"the valid range {_rounded(low)} to {_rounded(high)} is empty")
    if len(labels) != len(images):
        raise InputError(f"{len(labels)} labels for {len(images)} images")
    names = [f"linf_{i}" for i in range(len(images))] if names is None else names
    size = math.prod(images.shape[1:])
    flat = np.asarray(images, dtype=np.float64).reshape(len(images), size)
    radii, level = _levels(eps, images.shape)
    unsafe = [_other_class(label, classes) for label in range(classes)]
    values, positions = np.unique(flat, return_inverse=True)
    outside = ~((values >= round_down(low)) & (values <= round_up(high)))
    if outside.any():
        image, pixel = np.argwhere(outside[positions.reshape(flat.shape)])[0]
        value = float(flat[image, pixel])
        message = f"a pixel is {value!r}, outside of the valid range [{_rounded(low)}, {_rounded(high)}]"
        raise InputError(message, place=f"image {image}")
    # A pair of a pixel's value and its radius has the bounds of every pixel with this pair.
    numbers = positions.reshape(flat.shape) * len(radii) + level
    pairs, positions = np.unique(numbers, return_inverse=True)
    pixels = [(Fraction(float(values[pair // len(radii)])), radii[pair % len(radii)]) for pair in pairs.tolist()]
    lower = _Faces([max(_floor(value - radius, decimals), low) for value, radius in pixels], round_down)
    upper = _Faces([min(-_floor(-value - radius, decimals), high) for value, radius in pixels], round_up)
    found = []
    for i, (label, name, position) in enumerate(zip(labels, names, positions.reshape(flat.shape), strict=True)):
        if not 0 <= label < classes:
            raise InputError(f"the label is {label}, outside of 0 to {classes - 1}", place=f"image {i}")
        box = Box(lower.floats[position], upper.floats[position], lower.exact(position), upper.exact(position))
        found.append(Property(box, unsafe[label], name))
    return found


def _levels(eps: object, shape: tuple[int, ...]) -> tuple[list[Fraction], np.ndarray]:
    """The different radii of a number or an array of radii, and the index of each pixel's radius.

    Returns:
        The radii, and their indices in the shape () for a single radius, or (n, pixels).

    Raises:
        InputError: if the radii are no numbers ≥ 0 or of a shape that does not fit that of the images.
    """
    if not isinstance(eps, np.ndarray | list | tuple) or np.ndim(eps) == 0:
        radii = [exact_number(eps, "eps")]
        level: np.ndarray = np.zeros((), dtype=np.int64)
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
        radii, level = list(index) or [Fraction(0)], level.reshape(shape[0], math.prod(shape[1:]))
    negative = next((radius for radius in radii if radius < 0), None)
    if negative is not None:
        raise InputError(f"eps is {_rounded(negative)}, below 0")
    return radii, level


class _Faces:
    """The lower or the upper bounds of a box, one for each pixel value that occurs in a data set.

    A data set has few different pixel values, such as 256, and the bound of each is computed once.

    Args:
        values: the exact bounds, by the index of the pixel value.
        outward: rounds an exact bound outward to float64.
    """

    def __init__(self, values: Sequence[Fraction], outward: Callable[[Fraction], float]) -> None:
        self.values = values
        self.floats = np.array([outward(value) for value in values])
        self.inexact = np.array([Fraction(float(f)) != value for f, value in zip(self.floats, values, strict=True)])

    def exact(self, position: np.ndarray) -> dict[int, Fraction]:
        """The bounds of an image's pixels that float64 does not represent, by pixel.

        Args:
            position: for each pixel of the image, the index of its value.
        """
        where = np.flatnonzero(self.inexact[position])
        return {i: self.values[p] for i, p in zip(where.tolist(), position[where].tolist(), strict=True)}


def _other_class(label: int, classes: int) -> tuple[Polytope, ...]:
    one = Fraction(1)
    rows = (sorted([(label, one), (other, -one)]) for other in range(classes) if other != label)
    return tuple((Row(tuple(row), Fraction(0)),) for row in rows)


def _floor(value: Fraction, decimals: int | None) -> Fraction:
    return value if decimals is None else Fraction(math.floor(value * 10**decimals), 10**decimals)


def exact_number(value: object, what: str) -> Fraction:
    """The exact value of a Python or numpy number, a fraction, or an array or tensor without axes.

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
    raise InputError(f"{what} is {_shown(value)}, not a number")


def _range(clip: object) -> tuple[Fraction, Fraction]:
    try:
        ends = list(clip)  # type: ignore[call-overload]
    except TypeError:
        ends = []
    if len(ends) != 2:
        raise InputError(f"clip is {_shown(clip)}, not the two ends of a range")
    return exact_number(ends[0], "clip"), exact_number(ends[1], "clip")


def _rounded(value: Fraction) -> str:
    try:
        return repr(float(value))
    except OverflowError:
        return "a number beyond the range of float64"


def _shown(value: object) -> str:
    shape = getattr(value, "shape", None)
    return f"{type(value).__name__} of shape {tuple(shape)}" if shape is not None else f"{value!r:.60}"
