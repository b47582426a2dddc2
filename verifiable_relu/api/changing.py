"""Two models beside each other: how far their outputs differ around images, and whether their answers do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from verifiable_relu.network import Network
from verifiable_relu.network.onnx.running import meant
from verifiable_relu.network.product import NetworkPart, matched, product
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
        compared: whether activations of one stand beside those of the other, so that bounds know what both have in
            common.
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
    arithmetic: str = "real",
    clip: tuple[Number, Number] = (0, 1),
    normalize: tuple[object, object] | None = None,
    argument: str | None = None,
    memory: int | None = None,
    progress: bool = False,
) -> Change:
    """Bound how far the outputs of two models differ in L∞ balls around images, and decide whether their answers do.

    Both get the same input. Where they have the same build (a network and what became of it by rounding, pruning or
    fine-tuning, or by another activation), bounds of all neurons' differences are propagated (``bounds.beside``).

    Arguments that are not described are those of ``verify``; ``clip`` is that of its ``around``.

    Args:
        first: as ``model`` in ``verify``.
        second: likewise. Without it, ``joint`` is given, and the second model is the network with ReLU.
        beyond: asks whether any output differs by this much or more.
        same_class: asks whether both give the largest output to different classes; a tie counts as different.
        joint: the first stands for all networks with λ'-GELU, λ' ≥ λ, or ReLU in the place of its activations, as in
            ``verify``. Their *sat* is not decided, for a counterexample is an input of one network.
        arithmetic: of what runs both, as in ``verify``: the bounds are of any evaluation of each.

    Returns:
        The proven bounds, and for each image what was asked: *unsat* where no input of the ball does it.

    Raises:
        InputError: (a ``ValueError``) for a bad model, shape or number, or models whose shapes differ.
    """
    pixels, before = arguments.pixels(images), arguments.normalize(normalize)
    family = None if isinstance(joint, bool | np.bool_) and not joint else arguments.hardness(joint) or True
    if second is None and family is None:
        raise InputError("a second model is needed, or joint, which makes it the network with ReLU")
    one = meant(arguments.network(first, pixels.shape[1:], before, argument), arithmetic, family)
    other = (
        one.limit
        if second is None
        else meant(arguments.network(second, pixels.shape[1:], before, argument), arithmetic)
    )
    for network in (one, other):
        if network.input_shape != pixels.shape[1:]:
            raise InputError(f"images of shape {pixels.shape[1:]}, but a network takes {network.input_shape}")
    given: Any = arguments.radii(eps)
    classes = np.zeros(len(pixels), np.int64)
    balls = linf_properties(pixels, classes, given, max(2, one.output_size), clip)  # type: ignore[arg-type]
    named = [replace(ball, name=f"image {i}") for i, ball in enumerate(balls)]
    question = unsafe(one.output_size, beyond, arguments.flag(same_class, "same_class"))
    return compared(one, other, named, question, method, timeout, memory, progress)


def compared(
    one: Network,
    other: Network,
    boxes: Sequence[Property],
    question: tuple[Polytope, ...] = (),
    method: str = "auto",
    timeout: float = 60.0,
    memory: int | None = None,
    progress: bool = False,
) -> Change:
    """How the outputs of two networks differ over boxes, and whether one of them has an input that is asked for.

    Args:
        one, other: the networks; what bounds know of their differences, ``network.product`` says.
        boxes: properties, of which the names and the boxes count.
        question: the unsafe set of the outputs of both, ``one``'s first (``unsafe``); empty for none.
        method, timeout, memory, progress: as in ``verify``.

    Raises:
        InputError: if the shapes of the networks, or of a box, differ.
    """
    size, count = one.input_size, one.output_size
    if (one.input_shape, count) != (other.input_shape, other.output_size):
        shapes = (f"'{n.name}' of inputs {list(n.input_shape)} and {n.output_size} outputs" for n in (one, other))
        raise InputError(f"{' and '.join(shapes)} are not compared")
    for prop in boxes:
        if prop.box.size != size:
            raise InputError(f"a box of {prop.box.size} inputs, but the networks have {size}", place=prop.name)
    both = product([NetworkPart("first", one, range(size)), NetworkPart("second", other, range(size))], size)
    bounds, results = differences(both, boxes), Results()
    if question:
        asked = [Property(prop.box, question, prop.name) for prop in boxes]
        questions = [(prop.name, [Query(both, prop)]) for prop in asked]
        results = answered(both, questions, False, method, timeout, "cpu", memory, progress)
    return Change(bounds.lower.numpy(), bounds.upper.numpy(), bool(matched(one, other)), results)


def unsafe(count: int, beyond: Number | None = None, same_class: bool = False) -> tuple[Polytope, ...]:
    """The outputs of two networks with ``count`` each that are asked for, as in ``verify_change``; empty for none.

    Raises:
        InputError: for both questions at once, a difference that is not positive, or classes of a single output.
    """
    if beyond is not None and same_class:
        raise InputError("one question is asked: a difference beyond a number, or the same class")
    if beyond is not None:
        return _apart(count, exact_number(beyond, "beyond"))
    return _classes(count) if same_class else ()


@torch.no_grad()
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
