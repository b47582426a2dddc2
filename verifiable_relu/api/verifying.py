"""What Python programs ask: is a model's answer the same for all inputs around images, or for all of a property?"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from verifiable_relu.api import arguments
from verifiable_relu.api.arguments import Model
from verifiable_relu.campaign import Case, Result, run
from verifiable_relu.campaign.inputs import believe, chosen, time_limit
from verifiable_relu.errors import InputError
from verifiable_relu.network import Network
from verifiable_relu.network.onnx.running import meant
from verifiable_relu.network.product import NetworkPart, product
from verifiable_relu.settings import neutral
from verifiable_relu.spec import Property, Query, SpecFile, linf_properties, queries, read_vnnlib
from verifiable_relu.spec.balls import exact_number, targeted, within_balls
from verifiable_relu.spec.property import Polytope
from verifiable_relu.verifiers.base import Verdict

if TYPE_CHECKING:
    from verifiable_relu.campaign.certificates import Certificates


class Results(list[Result]):
    """Results in the order of what was asked, with what they come to."""

    @property
    def summary(self) -> dict[str, float]:
        """How many were asked, certified (*unsat*), refuted (*sat*) and undecided, and the seconds charged to all."""
        counts = Counter(result.verdict for result in self)
        return {
            "asked": len(self),
            "certified": counts[Verdict.UNSAT],
            "refuted": counts[Verdict.SAT],
            "undecided": counts[Verdict.UNKNOWN],
            "seconds": sum(result.seconds for result in self),
        }

    def to_pandas(self) -> Any:
        """A ``pandas.DataFrame`` with a row for each result: what was asked, answer, reason, method, margin, seconds.

        Raises:
            InputError: if pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise InputError("to_pandas needs the package pandas") from None
        names = ("vnnlib", "answer", "reason", "method", "trust", "margin", "seconds", "unstable", "subproblems")
        rows = [{name: getattr(result, name) for name in names} for result in self]
        return pandas.DataFrame(rows, columns=list(names)).rename(columns={"vnnlib": "asked"})

    def __repr__(self) -> str:
        counts = dict(self.summary)
        seconds = counts.pop("seconds")
        return f"<Results: {', '.join(f'{count} {name}' for name, count in counts.items())}, {seconds:.1f} s>"


Number = Fraction | float | str
Asked = Property | SpecFile | Path | str
"""A property, or a VNN-LIB file as it was read or by its path."""


@dataclass(frozen=True, eq=False)
class Around:
    """What is asked around each image, beside a radius.

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

    def of(self, chosen: Sequence[int], shape: tuple[int, ...]) -> Around:
        """The same for some of the images, (n, …), by their numbers: with the targets and masks of these."""
        found: dict[str, np.ndarray] = {}
        for name, axes in (("targets", 1), ("mask", len(shape))):
            if (given := getattr(self, name)) is not None:
                values = arguments.array(given, name)
                # What fits no image is refused later, and a mask with fewer axes is for every image.
                if values.ndim == axes and len(values) == shape[0]:
                    found[name] = values[chosen]
        return replace(self, **found)  # type: ignore[arg-type]


@neutral()
def verify(
    model: Model,
    images: np.ndarray | Tensor,
    labels: Sequence[int] | np.ndarray | Tensor | None = None,
    eps: Number | np.ndarray | Tensor | Sequence[Number] | None = None,
    method: str = "auto",
    timeout: float = 60.0,
    *,
    around: Around = Around(),
    normalize: tuple[object, object] | None = None,
    argument: str | None = None,
    joint: float | Sequence[float] | bool = False,
    arithmetic: str = "real",
    also: Model | Sequence[Model] = (),
    certificates: Path | str | None = None,
    device: str = "cpu",
    memory: int | None = None,
    progress: bool = False,
) -> Results:
    """Decide for each image whether the model gives the image's label to every input in the ball around it.

    The ball of an image is the set of inputs x with ‖x − image‖ ≤ ``eps`` whose pixels are valid.

    Args:
        model: a torch module, which is read in evaluation mode; a ``Network``; or an ONNX file, by path or as bytes.
        images: (n, *input shape), in the units of ``around.clip``; each number is taken exactly, bit for bit. A
            ``DataLoader`` that yields images and labels stands for both, and with a single label there is one image.
        labels: (n,), the true classes; not needed with ``around.targets``.
        eps: the radius, ≥ 0, in the same units; ``Fraction(1, 255)`` and ``"1/255"`` stay exact. Several
            are one for each image, (n,), or, for L∞, one for each pixel in a shape that broadcasts to that of
            ``images``. All numbers may be numpy scalars, or tensors without axes.
        method: the name of a verifier.
        timeout: seconds for each image.
        around: norm, valid pixels, masks and targets.
        normalize: what the model expects to be subtracted from its input and what this is divided by then, one number
            or one for each channel each, if that is not part of the model; images and ``eps`` are in the units before
            that.
        argument: the name of the argument of a torch module that takes the images; None stands for the first one. What
            the module returns is a tensor, or holds one alone or one called ``logits``.
        joint: asks at once for the ReLU network and for all networks that have λ'-GELU with λ' ≥ λ in place of ReLU.
            The value is λ, one number for the network or one for each layer; True takes the λ of the model's own
            λ-GELUs (``network.hardened``), and False asks for the model alone.
        arithmetic: ``real``, or the arithmetic of what runs the model's ONNX file: ``float32``, ``tf32``,
            ``bfloat16`` or ``float16``. The answer is then about every evaluation of the file, in any order of its sums
            (``network.deployed``); of a model that is no file, it is about the file that ``write_onnx`` writes. With
            ``joint``, it is about every network of the set in real arithmetic, too.
        also: further models of the same images, such as the int8 file, which are to give the label, too: one question,
            and one proof, about all. They are taken in the same arithmetic, without ``joint``.
        certificates: a folder for certificates, with the property of each beside it; the model and at most one of
            ``also`` are given by their paths. Each certificate is checked at once (``Result.certificate``), and one
            that is refused makes its verdict *unknown*. Of two models, only *unsat* has one.
        device: the torch device on which bounds and attack run.
        memory: the bytes that bounds may hold at once, approximately, for methods with such a limit; None leaves the
            method's own.
        progress: whether a progress bar is shown on stderr.

    Returns:
        One result per image, in their order. ``verdict`` is *unsat* where no input of the ball changes the class; *sat*
        where ``counterexample`` does (a tie of two outputs counts); otherwise *unknown*, for the reason in ``reason``
        and ``detail``. For *unsat*, ``margin`` ≥ 0 is a proven lower bound, over the ball, of the difference between
        the label's output and the largest other one.

    Raises:
        InputError: (a ``ValueError``) for a bad model, shape, number, label, method or limit.
    """
    if not isinstance(around, Around):
        raise InputError(f"around is {around!r:.60}, no Around")
    images, labels = arguments.samples(images, labels)
    if images is None or eps is None or (labels is None and around.targets is None):
        raise InputError("images, labels (or targets) and eps are needed; verify_properties asks without them")
    pixels = arguments.pixels(images)
    first = arguments.normalize(normalize)
    network = _meant(arguments.network(model, pixels.shape[1:], first, argument), joint, arithmetic)
    order = _order(around.norm)
    properties = _balls(network, pixels, labels, arguments.radii(eps), order, around)
    whole = [network]
    others = [also] if isinstance(also, Path | str | bytes | torch.nn.Module | Network) else list(also)
    if others:
        read = [arguments.network(other, pixels.shape[1:], first, argument) for other in others]
        whole += [meant(other, arithmetic) for other in read]
        network, properties = _together(whole, properties)
    questions = [(f"image {i}", [Query(network, prop)]) for i, prop in enumerate(properties)]
    kept = None
    if certificates is not None:
        # Imported here, because few questions need the checker.
        from verifiable_relu.campaign.certificates import Certificates

        files = [model, *others]
        if len(files) > 2 or not all(isinstance(file, Path | str) for file in files) or first is not None:
            raise InputError("certificates= needs model and at most one of also= as paths of files, and no normalize=")
        kept = Certificates(Path(certificates), list(map(str, files)), whole)
    return answered(network, questions, order != math.inf, method, timeout, device, memory, progress, kept)


@neutral()
def verify_properties(
    model: Model,
    properties: Asked | Sequence[Asked],
    method: str = "auto",
    timeout: float = 60.0,
    *,
    normalize: tuple[object, object] | None = None,
    argument: str | None = None,
    joint: float | Sequence[float] | bool = False,
    arithmetic: str = "real",
    device: str = "cpu",
    memory: int | None = None,
    progress: bool = False,
) -> Results:
    """Decide for each property whether an input of its box has outputs in its unsafe set.

    All arguments but the properties are those of ``verify``.

    Args:
        properties: a property (``spec.box_property``), the path of a VNN-LIB file, or a sequence of them.

    Returns:
        One result per property, in their order. For *unsat*, ``margin`` ≥ 0 is a proven lower bound of how far the
        unsafe outputs are missed.

    Raises:
        InputError: (a ``ValueError``) for a bad model, property, number, method or limit.
    """
    specs = _specs(properties)
    first = arguments.normalize(normalize)
    network = _meant(arguments.network(model, _shape(specs, model), first, argument), joint, arithmetic)
    questions = [(name, _queries(spec, network)) for name, spec in specs]
    return answered(network, questions, False, method, timeout, device, memory, progress)


def answered(
    network: Network,
    questions: Sequence[tuple[str, list[Query]]],
    balls: bool,
    method: object,
    timeout: object,
    device: object,
    memory: int | None,
    progress: object,
    certificates: Certificates | None = None,
) -> Results:
    """Put named questions about a network to a method; ``balls``: whether they are about L1 or L2 balls."""
    if not isinstance(method, str):
        raise InputError(f"a method is named by a string, not {method!r:.60}")
    if not isinstance(device, str | torch.device):
        raise InputError(f"a device is named by a string, not {device!r:.60}")
    limit = time_limit(arguments.number(timeout, "the time limit"))
    shown = arguments.flag(progress, "progress")
    asked, budget = chosen(method, str(device), memory)
    if certificates is not None and len(certificates.files) == 1:
        from verifiable_relu.verifiers.auto import recording

        asked = recording(asked)
    if balls:
        from verifiable_relu.verifiers.balls import InBalls

        asked = InBalls(asked)
    cases = [Case(network.name, name, tuple(queries), limit) for name, queries in questions]
    believe(network, [query.property for case in cases for query in case.queries])
    if not shown:
        return Results(run(cases, asked, budget=budget, certificates=certificates))
    # Imported here, because the bar alone needs the library rich.
    from verifiable_relu.campaign.console import Watcher

    with Watcher(len(cases)) as watcher:
        return Results(run(cases, asked, observer=watcher, budget=budget, certificates=certificates))


def _meant(network: Network, joint: float | Sequence[float] | bool, arithmetic: str) -> Network:
    """The network, the set of networks, or the network as it runs, that the question is about."""
    alone = isinstance(joint, bool | np.bool_) and not joint
    return meant(network, arithmetic, None if alone else arguments.hardness(joint) or True)


def _together(parts: Sequence[Network], properties: list[Property]) -> tuple[Network, list[Property]]:
    """Several networks as one, and the properties of which each says of every one what it said of the first.

    Raises:
        InputError: if the shapes of the networks' inputs, or the numbers of their outputs, differ.
    """
    first = parts[0]
    size, count = first.input_size, first.output_size
    for other in parts[1:]:
        if (other.input_shape, other.output_size) != (first.input_shape, count):
            shape = list(other.input_shape)
            raise InputError(
                f"'{other.name}' takes inputs of shape {shape} and has {other.output_size} outputs: not alike"
            )
    both = product([NetworkPart(f"part {i}", part, range(size)) for i, part in enumerate(parts)], size)

    def moved(polytope: Polytope, start: int) -> Polytope:
        return tuple(replace(row, coefficients=tuple((i + start, c) for i, c in row.coefficients)) for row in polytope)

    starts = [count * number for number in range(len(parts))]
    return both, [
        replace(p, unsafe=tuple(moved(polytope, start) for start in starts for polytope in p.unsafe))
        for p in properties
    ]


def _order(norm: object) -> float:
    """The order of a norm, which users write as a number or text."""
    names: dict[object, float] = {"inf": math.inf, "linf": math.inf, "1": 1, "l1": 1, "2": 2, "l2": 2}
    given: object = norm.lower().lstrip("_") if isinstance(norm, str) else norm
    found = names.get(given) if isinstance(given, str) else given
    if isinstance(found, int | float) and not isinstance(found, bool) and found in (1, 2, math.inf):
        return float(found)
    raise InputError(f"norm is {norm!r:.40}, none of inf, 2 and 1")


def _balls(
    network: Network,
    pixels: np.ndarray,
    labels: object,
    eps: object,
    order: float,
    around: Around,
) -> list[Property]:
    """The property of each image."""
    mask, targets = around.mask, around.targets
    if pixels.shape[1:] != network.input_shape:
        raise InputError(f"images of shape {pixels.shape[1:]}, but the network takes {network.input_shape}")
    classes, count = network.output_size, len(pixels)
    if classes < 2:
        raise InputError(f"the network has {classes} output, but classes are compared")
    true = arguments.classes(targets, "targets") if labels is None else arguments.classes(labels)
    if mask is not None:
        if order != math.inf:
            raise InputError("masks are for norm=inf")
        eps = arguments.masked(eps, mask, pixels.shape)
    found = linf_properties(pixels, true, eps, classes, around.clip)  # type: ignore[arg-type]
    if order != math.inf:
        if np.ndim(eps) > 1:  # type: ignore[arg-type]
            raise InputError("radii of pixels are for norm=inf; L1 and L2 balls have one for each image")
        numbers = np.broadcast_to(np.asarray(eps, dtype=object), (count,)).tolist()
        found = within_balls(found, pixels, [exact_number(radius, "eps") for radius in numbers], int(order))
    if targets is not None:
        wanted = arguments.classes(targets, "targets")
        if len(wanted) != count or not ((wanted >= 0) & (wanted < classes)).all():
            raise InputError(f"targets are {count} numbers in 0 to {classes - 1}, one for each image")
        found = [replace(p, unsafe=targeted(int(t), classes)) for p, t in zip(found, wanted, strict=True)]
    return found


def _specs(asked: Asked | Sequence[Asked]) -> list[tuple[str, Property | SpecFile]]:
    """The properties and files that are asked about, with names."""
    try:
        several = [asked] if isinstance(asked, Property | SpecFile | Path | str) else list(asked)
    except TypeError:
        raise InputError(f"properties are a property, a VNN-LIB file or a list of them, not {asked!r:.40}") from None
    found: list[tuple[str, Property | SpecFile]] = []
    for each in several:
        if isinstance(each, Path | str):
            each = read_vnnlib(each)
        if isinstance(each, SpecFile):
            found.append((str(each.path), each))
        elif isinstance(each, Property):
            found.append((each.name, each))
        else:
            raise InputError(f"a property is a Property or a VNN-LIB file, not {type(each).__name__}")
    return found


def _shape(specs: Sequence[tuple[str, Property | SpecFile]], model: Model) -> tuple[int, ...]:
    """The shape of the input sample that properties speak of, which only torch modules need."""
    if not specs:
        raise InputError("there are no properties")
    spec = specs[0][1]
    if isinstance(spec, Property):
        return (spec.box.size,)
    shape = spec.inputs.shape
    return shape[1:] if len(shape) > 1 and shape[0] == 1 else shape


def _queries(spec: Property | SpecFile, network: Network) -> list[Query]:
    return [Query(network, spec)] if isinstance(spec, Property) else queries(spec, network)
