"""Two models beside each other: how far their outputs differ around images, and whether their answers do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verifiable_relu.api import arguments
from verifiable_relu.api.arguments import Model
from verifiable_relu.api.verifying import Number, Results, answered
from verifiable_relu.bounds import Bounds, crown_relaxation, input_box
from verifiable_relu.errors import InputError
from verifiable_relu.network import Network, hardened
from verifiable_relu.network.product import Part, isomorphic, product
from verifiable_relu.settings import neutral
from verifiable_relu.spec import Property, Query, linf_properties
from verifiable_relu.spec.balls import exact_number
from verifiable_relu.spec.property import Polytope, Row

_BATCH = 8
"""How many balls are bounded at once."""


@dataclass(frozen=True, eq=False)
class Change:
    """How the outputs of a second model differ from those of a first around each image.

    Attributes:
        lower, upper: float64 (n, outputs), proven bounds of second − first at every input of the ball.
        compared: whether both have the same build, so that bounds know what they have in common.
        results: for each image the answer to the question that was asked; empty if none was.
    """

    lower: np.ndarray
    upper: np.ndarray
    compared: bool
    results: Results

    @property
    def largest(self) -> np.ndarray:
        """(n,) the largest difference of any output that is not excluded."""
        return np.maximum(-self.lower, self.upper).max(1)

    def __repr__(self) -> str:
        return f"<Change: at most {self.largest.max(initial=0):.3g} around {len(self.lower)} images, {self.results}>"


@neutral()
def verify_change(
    first: Model,
    second: Model | None,
    images: np.ndarray | Tensor,
    eps: Number | np.ndarray | Tensor | Sequence[Number],
    *,
    beyond: Number | None = None,
    same_class: bool = False,
    method: str = "auto",
    timeout: float = 60.0,
    joint: float | Sequence[float] | bool = False,
    clip: tuple[Number, Number] = (0, 1),
    normalize: tuple[object, object] | None = None,
    argument: str | None = None,
    memory: int | None = None,
    progress: bool = False,
) -> Change:
    """Bound how far the outputs of two models differ in L∞ balls around images, and decide whether their answers do.

    Both get the same input. Where they have the same build (a network and what became of it by rounding, pruning or
    fine-tuning, or by another activation), bounds of all neurons' differences are propagated (``bounds.beside``).

    Args:
        first, second: as ``model`` in ``verify``. Without a second one, ``joint`` is given, and the second is the
            network with ReLU.
        images, eps, normalize, argument, memory, progress: as in ``verify``; ``clip`` as in its ``around``.
        beyond: asks whether any output differs by this much or more.
        same_class: asks whether both give the largest output to different classes; a tie counts as different.
        method, timeout: of the question, as in ``verify``.
        joint: the first stands for all networks with λ'-GELU, λ' ≥ λ, or ReLU in the place of its activations, as in
            ``verify``. Their *sat* is not decided, for a counterexample is an input of one network.

    Returns:
        The proven bounds, and for each image what was asked: *unsat* where no input of the ball does it.

    Raises:
        InputError: (a ``ValueError``) for a bad model, shape or number, or models whose shapes differ.
    """
    pixels, before = arguments.pixels(images), arguments.normalize(normalize)
    one = arguments.network(first, pixels.shape[1:], before, argument)
    if not isinstance(joint, bool | np.bool_) or joint:
        one = hardened(one, arguments.hardness(joint))
    elif second is None:
        raise InputError("a second model is needed, or joint, which makes it the network with ReLU")
    other = one.limit if second is None else arguments.network(second, pixels.shape[1:], before, argument)
    for network in (one, other):
        if network.input_shape != pixels.shape[1:]:
            raise InputError(f"images of shape {pixels.shape[1:]}, but a network takes {network.input_shape}")
    if one.output_size != other.output_size:
        raise InputError(f"models with {one.output_size} and {other.output_size} outputs are not compared")
    if beyond is not None and arguments.flag(same_class, "same_class"):
        raise InputError("one question is asked: beyond or same_class")
    count, size = one.output_size, one.input_size
    both = product([Part("first", one, range(size)), Part("second", other, range(size))], size)
    given: Any = arguments.radii(eps)
    balls = linf_properties(pixels, np.zeros(len(pixels), np.int64), given, max(2, count), clip)  # type: ignore[arg-type]
    bounds = differences(both, balls)
    unsafe: tuple[Polytope, ...] = ()
    if beyond is not None:
        unsafe = _apart(count, exact_number(beyond, "beyond"))
    elif same_class:
        unsafe = _classes(count)
    asked = [Property(ball.box, unsafe, f"image {i}") for i, ball in enumerate(balls)] if unsafe else []
    questions = [(prop.name, [Query(both, prop)]) for prop in asked]
    results = answered(both, questions, False, method, timeout, "cpu", memory, progress) if questions else Results()
    return Change(bounds.lower.numpy(), bounds.upper.numpy(), isomorphic(one, other), results)


def differences(both: Network, balls: Sequence[Property]) -> Bounds:
    """Bounds of the later half of the outputs less the first one over boxes, (boxes, half), rounding accounted for."""
    net, half = both.to(torch.float64), both.output_size // 2
    one = torch.eye(half, dtype=torch.float64)
    rows = torch.cat([one, -one], 1)
    found = []
    for start in range(0, len(balls), _BATCH):
        box = input_box(balls[start : start + _BATCH], net)
        relaxation = crown_relaxation(net, box)
        values = relaxation.outputs(torch.cat([-rows, rows]).repeat(len(box.lower), 1))
        found.append(values.unflatten(0, (len(box.lower), 2, half)))
    every = torch.cat([torch.zeros(0, 2, half, dtype=torch.float64), *found])
    return Bounds(every[:, 0], -every[:, 1])


def _row(coefficients: dict[int, int], bound: Fraction = Fraction(0)) -> Row:
    return Row(tuple((i, Fraction(c)) for i, c in sorted(coefficients.items())), bound)


def _apart(count: int, most: Fraction) -> tuple[Polytope, ...]:
    """Where an output of the later half differs from its own of the first one by ``most`` or more."""
    if most <= 0:
        raise InputError("beyond is positive")
    return tuple((_row({k: sign, count + k: -sign}, -most),) for k in range(count) for sign in (1, -1))


def _classes(count: int) -> tuple[Polytope, ...]:
    """Where an output is the largest of the first half, and another one of the later half at least as large as its."""
    if count < 2:
        raise InputError(f"the networks have {count} output, but classes are compared")
    largest = [tuple(_row({k: 1, top: -1}) for k in range(count) if k != top) for top in range(count)]
    return tuple(
        (*largest[top], _row({count + top: 1, count + k: -1})) for top in range(count) for k in range(count) if k != top
    )
