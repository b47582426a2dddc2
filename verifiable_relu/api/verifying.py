"""Functions by which Python programs ask about a model: around images, up to which radius, or about a property."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from verifiable_relu.api import arguments
from verifiable_relu.api.arguments import Model
from verifiable_relu.campaign import Case, Result, open_certificates, run
from verifiable_relu.campaign.console import Watcher
from verifiable_relu.campaign.inputs import chosen, compare_on_boxes
from verifiable_relu.errors import InputError
from verifiable_relu.execution.model import execution_model
from verifiable_relu.execution.replay import replay
from verifiable_relu.ir.network import Network
from verifiable_relu.ir.transform import NetworkPart, combine
from verifiable_relu.search.outcomes import Verdict
from verifiable_relu.settings import default_settings
from verifiable_relu.spec import Ball, Property, Query, SpecFile, linf_properties, queries, read_vnnlib
from verifiable_relu.spec.balls import exact_number, targeted
from verifiable_relu.spec.property import Polytope, nearest, round_down, round_up

if TYPE_CHECKING:
    from verifiable_relu.campaign.certificates import Certificates

Number = Fraction | float | str
Asked = Property | SpecFile | Path | str
"""A property, or a VNN-LIB file as it was read or by its path."""


class Results(list[Result]):
    """Results in the order of what was asked, with what they come to."""

    @property
    def summary(self) -> dict[str, float]:
        """Counts of what was asked, certified (*unsat*), refuted (*sat*) and undecided, and the seconds of all."""
        counts = Counter(result.verdict for result in self)
        return {
            "asked": len(self),
            "certified": counts[Verdict.UNSAT],
            "refuted": counts[Verdict.SAT],
            "undecided": counts[Verdict.UNKNOWN],
            "seconds": sum(result.seconds for result in self),
        }

    def __repr__(self) -> str:
        counts = dict(self.summary)
        seconds = counts.pop("seconds")
        return f"<Results: {', '.join(f'{count} {name}' for name, count in counts.items())}, {seconds:.1f} s>"


@dataclass(frozen=True, eq=False)
class Perturbation:
    """Question about each image, apart from a radius.

    Attributes:
        norm: inf, 2 or 1 (numbers or text). L1 and L2 balls are bounded by linear bounds in the dual norm; where these
            do not decide, the method is asked about the box around the ball, and ``detail`` says so.
        clip: the least and the greatest valid value of a pixel.
        mask: bool, in a shape that broadcasts to that of the images: the pixels that may change. For L∞ only.
        targets: (n,), classes: asks whether an input of the ball is given the target, in place of whether one is given
            another class than the label.
    """

    norm: float | str = math.inf
    clip: tuple[Number, Number] = (0, 1)
    mask: np.ndarray | Tensor | None = None
    targets: Sequence[int] | np.ndarray | Tensor | None = None

    @property
    def order(self) -> float:
        """The order of the norm."""
        names: dict[object, float] = {"inf": math.inf, "linf": math.inf, "1": 1, "l1": 1, "2": 2, "l2": 2}
        norm = names.get(self.norm.lower().lstrip("_")) if isinstance(self.norm, str) else self.norm
        if isinstance(norm, int | float) and not isinstance(norm, bool) and norm in (1, 2, math.inf):
            return float(norm)
        raise InputError(f"norm is {self.norm!r:.40}, none of inf, 2 and 1")

    def properties(self, network: Network, pixels: np.ndarray, labels: object, eps: object) -> list[Property]:
        """Return the property of each image, (n, *input shape)."""
        if pixels.shape[1:] != network.source.input_shape:
            raise InputError(f"images of shape {pixels.shape[1:]}, but the network takes {network.source.input_shape}")
        order, classes, count = self.order, network.output_size, len(pixels)
        if classes < 2:
            raise InputError(f"the network has {classes} output, but classes are compared")
        true = arguments.classes(self.targets, "targets") if labels is None else arguments.classes(labels)
        radii: Any = arguments.radii(eps)
        if self.mask is not None:
            if order != math.inf:
                raise InputError("masks are for norm=inf")
            radii = arguments.masked(radii, self.mask, pixels.shape)
        found = linf_properties(pixels, true, radii, classes, self.clip)  # type: ignore[arg-type]
        if order != math.inf:
            if np.ndim(radii) > 1:
                raise InputError("radii of pixels are for norm=inf; L1 and L2 balls have one for each image")
            numbers = np.broadcast_to(np.asarray(radii, dtype=object), (count,)).tolist()
            pairs = zip(np.asarray(pixels, dtype=np.float64).reshape(count, -1), numbers, strict=True)
            balls = [Ball(center, exact_number(radius, "eps"), int(order)) for center, radius in pairs]
            found = [replace(p, ball=ball) for p, ball in zip(found, balls, strict=True)]
        if self.targets is not None:
            wanted = arguments.classes(self.targets, "targets")
            if len(wanted) != count or not ((wanted >= 0) & (wanted < classes)).all():
                raise InputError(f"targets are {count} numbers in 0 to {classes - 1}, one for each image")
            found = [replace(p, unsafe=targeted(int(t), classes)) for p, t in zip(found, wanted, strict=True)]
        return found


@dataclass(frozen=True)
class VerifyOptions:
    """Options of every question; the attributes are arguments of ``verify``, which describes them."""

    method: str = "auto"
    timeout: Any = 60.0
    normalize: tuple[object, object] | None = None
    argument: str | None = None
    family: float | Sequence[float] | bool = False
    arithmetic: str = "real"
    device: str = "cpu"
    memory: int | None = None
    progress: bool = False

    def read(self, model: Model, shape: tuple[int, ...], as_family: bool = True) -> Network:
        """Return the network of a model as ``arithmetic`` runs it; ``as_family``: with the family that was asked."""
        network = arguments.network(model, shape, self.normalize, self.argument)
        return execution_model(network, self.arithmetic, arguments.family(self.family) if as_family else False)

    def answer(
        self,
        network: Network,
        questions: Sequence[tuple[str, list[Query]]],
        balls: bool = False,
        certificates: Certificates | None = None,
    ) -> Results:
        """Put named questions about a network to the method; with ``balls`` they are about L1 or L2 balls."""
        for name, known in (("method", str), ("device", (str, torch.device))):
            if not isinstance(value := getattr(self, name), known):
                raise InputError(f"a {name} is named by a string, not {value!r:.60}")
        limit, progress = exact_number(self.timeout, "the time limit"), arguments.flag(self.progress, "progress")
        if not 0 < limit <= sys.float_info.max:
            raise InputError(f"a time limit is a positive number of seconds, not {self.timeout!r:.60}")
        asked, budget = chosen(self.method, str(self.device), self.memory)
        if balls:
            from verifiable_relu.search.balls import InBalls

            asked = InBalls(asked)
        cases = [Case(network.name, name, tuple(queries), float(limit)) for name, queries in questions]
        compare_on_boxes(network, [query.property for case in cases for query in case.queries])
        with Watcher(len(cases), quiet=not progress) as observer:
            return Results(run(cases, asked, observer=observer, budget=budget, certificates=certificates))


@default_settings()
def verify(
    model: Model,
    images: np.ndarray | Tensor,
    labels: Sequence[int] | np.ndarray | Tensor | None = None,
    eps: Number | np.ndarray | Tensor | Sequence[Number] | None = None,
    method: str = "auto",
    timeout: float = 60.0,
    *,
    perturbation: Perturbation = Perturbation(),
    other_models: Model | Sequence[Model] = (),
    certificates: Path | str | None = None,
    normalize: tuple[object, object] | None = None,
    argument: str | None = None,
    family: float | Sequence[float] | bool = False,
    arithmetic: str = "real",
    device: str = "cpu",
    memory: int | None = None,
    progress: bool = False,
) -> Results:
    """Decide for each image whether the model gives the image's label to every input in the ball around it.

    The ball of an image is the set of inputs x with ‖x − image‖ ≤ ``eps`` whose pixels are valid.

    Args:
        model: a torch module, which is read in evaluation mode; a ``Network``; or an ONNX file, by path or as bytes.
        images: (n, *input shape), in the units of ``perturbation.clip``; each number is taken exactly, bit for bit. A
            ``DataLoader`` that yields images and labels stands for both, and with a single label there is one image.
        labels: (n,), the true classes; not needed with ``perturbation.targets``.
        eps: the radius, ≥ 0, in the same units; ``Fraction(1, 255)`` and ``"1/255"`` stay exact. Several are one for
            each image, (n,), or, for L∞, one for each pixel in a shape that broadcasts to that of ``images``. All
            numbers may be numpy scalars, or tensors without axes.
        method: the name of a verifier.
        timeout: seconds for each image.
        perturbation: norm, valid pixels, masks and targets.
        other_models: further models of the same images, such as the int8 file, which must give the label, too: one
            question, and one proof, about all models. They run in the same arithmetic, without ``family``.
        certificates: a folder for certificates and the property of each. The model and at most one other model are
            given by their paths. Each certificate is checked at once (``Result.certificate``). An *unsat* whose
            certificate is refused stands as ``rounded``, with a note; such a *sat* becomes *unknown*. With two models,
            only *unsat* has a certificate.
        normalize: mean and std, each one number or one for each channel, of a normalisation of the input that is not
            part of the model; images and ``eps`` are in the units before it.
        argument: the name of the argument of a torch module that takes the images; None stands for the first one. What
            the module returns is a tensor, or holds one alone or one called ``logits``.
        family: asks at once for the ReLU network and for all networks with λ'-GELU, λ' ≥ λ, in place of ReLU. The value
            is λ, for the network or for each layer; True takes that of the model's own λ-GELUs.
        arithmetic: ``real``, or the arithmetic of what runs the model's ONNX file (``write_onnx`` makes one of other
            models): ``float32``, ``tf32``, ``bfloat16`` or ``float16``. The answer is then about every evaluation of
            the file, in any order of its sums, and with ``family`` about real arithmetic, too.
        device: the torch device on which bounds and attack run.
        memory: the bytes that bounds may hold at once, approximately, for methods with such a limit; None leaves the
            method's own.
        progress: whether a line on stderr, if that is a terminal, shows the progress.

    Returns:
        One result per image, in their order. ``verdict`` is *unsat* where no input of the ball changes the class; *sat*
        where ``counterexample`` does (a tie of two outputs counts); otherwise *unknown*, for the reason in ``reason``
        and ``detail``. For *unsat*, ``margin`` ≥ 0 is a proven lower bound, over the ball, of the difference between
        the label's output and the largest other one.

    Raises:
        InputError: (a ``ValueError``) for a bad model, shape, number, label, method or limit.
    """
    images, labels = arguments.samples(images, labels)
    if images is None or eps is None:
        raise InputError("images, labels (or targets) and eps are needed; verify_properties asks without them")
    options = VerifyOptions(method, timeout, normalize, argument, family, arithmetic, device, memory, progress)
    count, ask = _asking(model, images, labels, perturbation, other_models, certificates, **vars(options))
    return ask(range(count), eps)


def _asking(
    model: Model,
    images: Any,
    labels: Any,
    perturbation: Perturbation = Perturbation(),
    other_models: Model | Sequence[Model] = (),
    certificates: Path | str | None = None,
    **given: Any,
) -> tuple[int, Callable[[Iterable[int], Any], Results]]:
    """Return the number of images, and a function that asks about some of them, by number, and a radius of all."""
    if "eps" in given:
        raise InputError("eps= is an argument of verify alone: here the radii are asked one after another")
    options = VerifyOptions(**given)
    if not isinstance(perturbation, Perturbation):
        raise InputError(f"perturbation must be a Perturbation, not {perturbation!r:.60}")
    if labels is None and perturbation.targets is None:
        raise InputError("images, labels (or targets) and eps are needed; verify_properties asks without them")
    pixels = arguments.pixels(images)
    network = options.read(model, pixels.shape[1:])
    single = (Path, str, bytes, torch.nn.Module, Network)
    others = [other_models] if isinstance(other_models, single) else list(other_models)
    parts = [network, *(options.read(other, pixels.shape[1:], as_family=False) for other in others)]
    whole = _together(parts) if others else network
    files, named = [model, *others], None if certificates is None else Path(certificates)
    if named and (len(files) > 2 or options.normalize or not all(isinstance(file, Path | str) for file in files)):
        said = "certificates= needs the model and at most one of other_models= as paths of files, and no normalize="
        raise InputError(said)
    kept = open_certificates(named, list(map(str, files)), parts)

    def moved(polytope: Polytope, start: int) -> Polytope:
        return tuple(replace(row, coefficients=tuple((i + start, c) for i, c in row.coefficients)) for row in polytope)

    def ask(numbers: Iterable[int], eps: Any) -> Results:
        properties = perturbation.properties(network, pixels, labels, eps)
        starts = range(0, whole.output_size, network.output_size)
        if others:
            # What is said of the first network's outputs is said of every network's.
            unsafe = [tuple(moved(each, start) for start in starts for each in p.unsafe) for p in properties]
            properties = [replace(p, unsafe=each) for p, each in zip(properties, unsafe, strict=True)]
        questions = [(f"image {i}", [Query(whole, properties[i])]) for i in numbers]
        return options.answer(whole, questions, perturbation.order != math.inf, kept)

    return len(pixels), ask


def _together(parts: Sequence[Network]) -> Network:
    """Return several networks of the same inputs as one, which has the outputs of all."""
    first = parts[0]
    for other in parts[1:]:
        if (other.source.input_shape, other.output_size) != (first.source.input_shape, first.output_size):
            said = f"takes inputs of shape {list(other.source.input_shape)} and has {other.output_size} outputs"
            raise InputError(f"'{other.name}' {said}, unlike the first model")
    size = first.input_size
    return combine([NetworkPart(f"part {i}", part, range(size)) for i, part in enumerate(parts)], size, replay)


@default_settings()
def verify_properties(
    model: Model, properties: Asked | Sequence[Asked], method: str = "auto", timeout: float = 60.0, **options: Any
) -> Results:
    """Decide for each property whether an input of its box has outputs in its unsafe set.

    Args:
        model: as in ``verify``.
        properties: a property (``spec.box_property``), the path of a VNN-LIB file, or a sequence of them.
        method: as in ``verify``.
        timeout: as in ``verify``.
        options: ``normalize``, ``argument``, ``family``, ``arithmetic``, ``device``, ``memory`` and ``progress``, as in
            ``verify``.

    Returns:
        One result per property, in their order. For *unsat*, ``margin`` ≥ 0 is a proven lower bound of how far the
        unsafe outputs are missed.

    Raises:
        InputError: (a ``ValueError``) for a bad model, property, number, method or limit.
    """
    chosen = VerifyOptions(method, timeout, **options)
    asked: Any = properties if np.iterable(properties) and not isinstance(properties, str) else [properties]
    specs = [read_vnnlib(each) if isinstance(each, Path | str) else each for each in asked]
    for spec in specs:
        if not isinstance(spec, Property | SpecFile):
            raise InputError(f"a property is a Property or a VNN-LIB file, not {spec!r:.40}")
    if not specs:
        raise InputError("no property is given")
    # The shape of the input sample, which only torch modules need.
    first = specs[0]
    shape = (first.box.size,) if isinstance(first, Property) else first.inputs.shape
    network = chosen.read(model, shape[1:] if len(shape) > 1 and shape[0] == 1 else shape)
    questions = [
        (spec.name, [Query(network, spec)])
        if isinstance(spec, Property)
        else (str(spec.path), list(queries(spec, network)))
        for spec in specs
    ]
    return chosen.answer(network, questions)


@dataclass(frozen=True)
class Radii:
    """Bounds of the largest radius of each image up to which no input changes its class, float64 (n,) each.

    Attributes:
        certified: the largest radius that was proved, rounded down; 0 if none was.
        refuted: the smallest radius with a confirmed counterexample, rounded up; inf if none was found.
        rounds: the number of rounds of the bisection.
    """

    certified: np.ndarray
    refuted: np.ndarray
    rounds: int


@default_settings()
def verify_radii(
    model: Model,
    images: np.ndarray | Tensor,
    labels: Sequence[int] | np.ndarray | Tensor,
    radii: Sequence[Number],
    **options: Any,
) -> list[Results]:
    """Answer every image for several radii, each from the last.

    A counterexample for a radius is one for every larger radius, and a proof for a radius is one for every smaller
    radius: the radii are asked in ascending order, and an image that is refuted is asked no more. All arguments but
    ``radii``, in any order, are those of ``verify``. Returns for each radius, in the given order, a result per image.

    Raises:
        InputError: as ``verify``, or if there are no radii.
    """
    try:
        exact = [exact_number(radius, "a radius") for radius in radii]
    except TypeError:
        raise InputError(f"radii are a list of numbers, not {radii!r:.40}") from None
    if not exact:
        raise InputError("there are no radii")
    count, ask = _asking(model, images, labels, **options)
    found: dict[Fraction, list[Result]] = {}
    known: dict[int, Result] = {}
    for radius in sorted(set(exact)):
        open_ = [i for i in range(count) if i not in known]
        results = known | dict(zip(open_, ask(open_, radius), strict=True))
        found[radius] = [results[i] for i in range(count)]
        known = {i: result for i, result in results.items() if result.verdict is Verdict.SAT}
    return [Results(found[radius]) for radius in exact]


@default_settings()
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
        options: further arguments of ``verify``, such as ``perturbation``; ``timeout`` is per image and round.

    Raises:
        InputError: as ``verify``, or for a bad ``upper`` or ``tolerance``.
    """
    limit, width = exact_number(upper, "upper"), exact_number(tolerance, "the tolerance")
    if limit <= 0 or width <= 0:
        raise InputError("upper and tolerance must be positive")
    count, ask = _asking(model, images, labels, method=method, **options)
    low, high = [Fraction(-1)] * count, [limit] * count
    refuted: list[float] = [math.inf] * count
    # The first round asks for the image alone, the second for the largest radius.
    asked, rounds = [Fraction(0)] * count, 0
    open_ = list(range(count))
    while open_:
        results = ask(open_, np.array(asked, dtype=object))
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
