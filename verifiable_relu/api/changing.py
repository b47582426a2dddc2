"""Comparison of two models: how far their outputs differ around images, and whether their answers do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from verifiable_relu.api import arguments
from verifiable_relu.api.arguments import Model
from verifiable_relu.api.verifying import Number, Results, VerifyOptions
from verifiable_relu.bounds.backward import Relaxation
from verifiable_relu.bounds.linear_bounds import bound_by_crown, lower_of_rows
from verifiable_relu.bounds.neuron_bounds import BASE
from verifiable_relu.errors import InputError
from verifiable_relu.execution.replay import replay
from verifiable_relu.ir.interval import Interval
from verifiable_relu.ir.network import Network
from verifiable_relu.ir.transform import NetworkPart, combine, matched
from verifiable_relu.search.property_rows import input_box
from verifiable_relu.settings import default_settings
from verifiable_relu.spec import Property, Query, linf_properties
from verifiable_relu.spec.balls import exact_number
from verifiable_relu.spec.property import Polytope, Row

if TYPE_CHECKING:
    from verifiable_relu.campaign.certificates import Certificates

_BATCH = 8  # Balls that are bounded at once.


@dataclass(frozen=True, eq=False)
class Change:
    """Differences of a second model's outputs from those of a first, around each image.

    Attributes:
        lower: float64 (n, outputs), proven lower bounds of second − first at every input of the ball.
        upper: proven upper bounds, of the same shape.
        compared: whether activations of one are compared with those of the other, and bounds know what they share.
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


@default_settings()
def verify_change(
    first: Model,
    second: Model | None,
    images: np.ndarray | Tensor,
    eps: Number | np.ndarray | Tensor | Sequence[Number],
    *,
    delta: Number | None = None,
    top1: bool = False,
    clip: tuple[Number, Number] = (0, 1),
    **options: Any,
) -> Change:
    """Bound how far the outputs of two models differ in L∞ balls around images, and decide whether their answers do.

    Both get the same input. Where they have the same build (a network and what became of it by rounding, pruning or
    fine-tuning, or by another activation), bounds of all neurons' differences are propagated (``bounds.differences``).

    Args:
        first: as ``model`` in ``verify``.
        second: as ``first``. Without it, ``family`` is given, and the second model is the network with ReLU.
        images: as in ``verify``.
        eps: as in ``verify``.
        delta: asks whether some output differs by this much or more.
        top1: asks whether the largest outputs are of different classes; a tie counts as different.
        clip: the least and the greatest valid value of a pixel.
        options: ``method``, ``timeout``, ``normalize``, ``argument``, ``family``, ``arithmetic``, ``device``,
            ``memory`` and ``progress``, as in ``verify``. With ``family``, the first model stands for ReLU and all
            λ'-GELU, λ' ≥ λ, in place of its activations; *sat* is not decided then, because a counterexample belongs to
            one network. Both models run in ``arithmetic``: the bounds hold for any evaluation of each.

    Returns:
        The proven bounds, and the answer for each image: *unsat* if no input of the ball does what was asked.

    Raises:
        InputError: (a ``ValueError``) for a bad model, shape or number, or models whose shapes differ.
    """
    chosen, pixels = VerifyOptions(**options), arguments.pixels(images)
    shape = pixels.shape[1:]
    if second is None and arguments.family(chosen.family) is False:
        raise InputError("a second model is needed, or family=, with which it is the network with ReLU")
    one = chosen.read(first, shape)
    other = one.limit if second is None else chosen.read(second, shape, as_family=False)
    for network in (one, other):
        if network.source.input_shape != shape:
            raise InputError(f"images of shape {shape}, but a network takes {network.source.input_shape}")
    names, given = [f"image {i}" for i in range(len(pixels))], arguments.radii(eps)
    balls = linf_properties(pixels, [0] * len(pixels), given, 2, clip, names)  # type: ignore[arg-type]
    question = unsafe(one.output_size, delta, arguments.flag(top1, "top1"))
    return compared(one, other, balls, question, chosen)


def compared(
    one: Network,
    other: Network,
    boxes: Sequence[Property],
    question: tuple[Polytope, ...] = (),
    options: VerifyOptions = VerifyOptions(),  # noqa: B008 -- frozen
    certificates: Certificates | None = None,
) -> Change:
    """Compare two networks over boxes, and ask whether one of these has an input that is asked for.

    Of the properties ``boxes`` the names and the boxes count. ``question`` is the unsafe set of the outputs of both,
    ``one``'s first (``unsafe``); empty for none. The options are those of ``verify`` for networks that are read, and
    ``certificates`` is the folder for certificates of both networks' files. Raises an InputError if shapes differ.
    """
    size, count = one.input_size, one.output_size
    if (one.source.input_shape, count) != (other.source.input_shape, other.output_size):
        first, second = (
            f"'{n.name}' of inputs {list(n.source.input_shape)} and {n.output_size} outputs" for n in (one, other)
        )
        raise InputError(f"{first} and {second} cannot be compared: their shapes differ")
    for prop in boxes:
        if prop.box.size != size:
            raise InputError(f"a box of {prop.box.size} inputs, but the networks have {size}", place=prop.name)
    parts = [NetworkPart("first", one, range(size)), NetworkPart("second", other, range(size))]
    both = combine(parts, size, replay)
    bounds, results = differences(both, boxes), Results()
    if question:
        asked = [(prop.name, [Query(both, Property(prop.box, question, prop.name))]) for prop in boxes]
        results = options.answer(both, asked, certificates=certificates)
    return Change(bounds.lower.numpy(), bounds.upper.numpy(), bool(matched(one, other)), results)


def unsafe(count: int, delta: Number | None = None, top1: bool = False) -> tuple[Polytope, ...]:
    """Return the outputs of two networks with ``count`` each that ``verify_change`` asks for; empty for none.

    Raises an InputError for both questions at once, a difference that is not positive, or classes of a single output.
    """

    def row(coefficients: dict[int, int], bound: Fraction = Fraction(0)) -> Row:
        return Row(tuple((i, Fraction(c)) for i, c in sorted(coefficients.items())), bound)

    if delta is not None and top1:
        raise InputError("delta and top1 are one question each: give one of them")
    if delta is not None:
        most = exact_number(delta, "delta")
        if most <= 0:
            raise InputError(f"delta must be positive, got {delta}")
        return tuple((row({k: sign, count + k: -sign}, -most),) for k in range(count) for sign in (1, -1))
    if not top1:
        return ()
    if count < 2:
        raise InputError(f"the networks have {count} output, but classes are compared")
    # An output is the largest of the first network, and another one of the second at least as large as it is there.
    return tuple(
        (*(row({i: 1, top: -1}) for i in range(count) if i != top), row({count + top: 1, count + k: -1}))
        for top in range(count)
        for k in range(count)
        if k != top
    )


@torch.no_grad()
def differences(both: Network, balls: Sequence[Property]) -> Interval:
    """Bound the later half of the outputs less the first one over boxes, (boxes, half), rounding accounted for."""
    half = both.output_size // 2
    one = torch.eye(half, dtype=BASE)
    rows = torch.cat([torch.cat([-one, one], 1), torch.cat([one, -one], 1)])
    found = [torch.zeros(0, 2, half, dtype=BASE)]
    for start in range(0, len(balls), _BATCH):
        box = input_box(balls[start : start + _BATCH], BASE, "cpu")
        relaxation = bound_by_crown(Relaxation(both, box))
        value, _ = lower_of_rows(relaxation, rows.repeat(len(box.lower), 1))
        found.append(value.unflatten(0, (len(box.lower), 2, half)))
    every = torch.cat(found)
    return Interval(every[:, 0], -every[:, 1])
