"""Several radii at once, and the largest radius that is proved, by bisection."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from torch import Tensor

from verifiable_relu.api import arguments
from verifiable_relu.api.arguments import Model
from verifiable_relu.api.verifying import Around, Number, Results, verify
from verifiable_relu.campaign import Result
from verifiable_relu.errors import InputError
from verifiable_relu.settings import neutral
from verifiable_relu.spec.balls import exact_number
from verifiable_relu.spec.property import nearest, round_down, round_up
from verifiable_relu.verifiers.base import Verdict


@dataclass(frozen=True)
class Radii:
    """Bounds of the largest radius of each image up to which no input changes its class.

    Attributes:
        certified: float64 (n,), the largest radius that was proved, rounded down; 0 if none was.
        refuted: float64 (n,), the smallest radius with a confirmed counterexample, rounded up; inf if none was found.
        rounds: the number of rounds of the bisection.
    """

    certified: np.ndarray
    refuted: np.ndarray
    rounds: int


@neutral()
def verify_radii(
    model: Model,
    images: np.ndarray | Tensor,
    labels: Sequence[int] | np.ndarray | Tensor,
    radii: Sequence[Number],
    **options: Any,
) -> list[Results]:
    """Answer every image for several radii, each from the last.

    A counterexample for a radius is one for every larger radius, and a proof for a radius is one for every smaller
    radius: the radii are asked in ascending order, and an image that is refuted is asked no more.

    Args:
        model: as in ``verify``.
        images: as in ``verify``.
        labels: as in ``verify``.
        radii: the radii, in any order.
        options: further arguments of ``verify``.

    Returns:
        For each radius, in the given order, a result per image.

    Raises:
        InputError: as ``verify``, or if there are no radii.
    """
    try:
        exact = [exact_number(radius, "a radius") for radius in radii]
    except TypeError:
        raise InputError(f"radii are a list of numbers, not {radii!r:.40}") from None
    if not exact:
        raise InputError("there are no radii")
    count, ask = _asking(model, images, labels, options)
    found: dict[Fraction, list[Result]] = {}
    known: dict[int, Result] = {}
    for radius in sorted(set(exact)):
        open_ = [i for i in range(count) if i not in known]
        results = known | dict(zip(open_, ask(open_, radius), strict=True))
        found[radius] = [results[i] for i in range(count)]
        known = {i: result for i, result in results.items() if result.verdict is Verdict.SAT}
    return [Results(found[radius]) for radius in exact]


@neutral()
def certified_radius(
    model: Model,
    images: np.ndarray | Tensor,
    labels: Sequence[int] | np.ndarray | Tensor,
    *,
    upper: Number = 1,
    tolerance: Number = Fraction(1, 1000),
    method: str = "crown",
    **options: Any,
) -> Radii:
    """Bisect for the largest radius that is proved around each image, all images in one batch per round.

    Args:
        model: as in ``verify``.
        images: as in ``verify``.
        labels: as in ``verify``.
        upper: the largest radius that is tried, > 0.
        tolerance: the bisection ends when every image's radius is known to be in an interval of at most this width, or
            to be larger than ``upper``. Where ``method`` decides nothing, the interval is that between proved and not
            proved.
        method: the name of a verifier. A method of bounds proves at every smaller radius what it proves at a larger
            one, as a rule; a radius that is returned was itself proved in any case.
        options: further arguments of ``verify``, such as ``around`` and ``timeout`` (seconds for an image and round).

    Raises:
        InputError: as ``verify``, or for a bad ``upper`` or ``tolerance``.
    """
    limit, width = exact_number(upper, "upper"), exact_number(tolerance, "the tolerance")
    if limit <= 0 or width <= 0:
        raise InputError("upper and the tolerance are positive")
    count, ask = _asking(model, images, labels, {**options, "method": method})
    low, high = [Fraction(-1)] * count, [limit] * count
    refuted: list[float] = [math.inf] * count
    # The first round asks for the image alone, the second for the largest radius.
    asked, rounds = [Fraction(0)] * count, 0
    open_ = list(range(count))
    while open_:
        results = ask(open_, np.array([asked[i] for i in open_], dtype=object))
        for i, result in zip(open_, results, strict=True):
            if result.verdict is Verdict.UNSAT:
                low[i] = asked[i]
            else:
                high[i] = min(high[i], asked[i])
                if result.verdict is Verdict.SAT:
                    refuted[i] = min(refuted[i], round_up(asked[i]))
            asked[i] = limit if rounds == 0 else (max(low[i], Fraction(0)) + high[i]) / 2
        rounds += 1
        open_ = [i for i in open_ if low[i] >= 0 and low[i] < limit and high[i] - low[i] > width]
    certified = np.array([round_down(max(radius, Fraction(0))) for radius in low])
    return Radii(certified, np.array([nearest(radius) for radius in refuted]), rounds)


def _asking(
    model: Model, images: Any, labels: Any, options: dict[str, Any]
) -> tuple[int, Callable[[list[int], Any], Results]]:
    """Return the number of images, and ``verify`` for some of them and a radius, of a model that is read once.

    Raises:
        InputError: for bad images, labels or a model, or an option of ``verify`` that has no meaning here.
    """
    if "eps" in options:
        raise InputError("several radii are asked about images; eps has no meaning with them")
    pixels, true = arguments.pixels(images), arguments.classes(labels)
    if len(pixels) != len(true):
        raise InputError(f"{len(true)} labels for {len(pixels)} images")
    around, normalize = options.pop("around", Around()), options.pop("normalize", None)
    network = arguments.network(model, pixels.shape[1:], normalize, options.pop("argument", None))

    def ask(open_: list[int], eps: Any) -> Results:
        chosen = around.chosen(open_, pixels.shape)
        return verify(network, pixels[open_], true[open_], eps, around=chosen, **options)

    return len(pixels), ask
