"""Counterexamples for readers: inputs and outputs, at the middle of the box and at the counterexample."""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path

import numpy as np

from verifiable_relu.campaign.inputs import InstanceFiles, Loader
from verifiable_relu.campaign.result import Result
from verifiable_relu.errors import InputError
from verifiable_relu.spec.find import onnx_files


@dataclass(frozen=True)
class Counterexample:
    """A counterexample as a page shows it.

    Attributes:
        id: its anchor in the page.
        result: the result that it is of.
        inputs: for each input its lower and upper bound and its value; empty if the box is not known.
        outputs: for each output its value at the middle of the box (None if that is not known) and here.
        largest: the numbers of the largest outputs at the middle and here; None if the middle is not known.
        pictures: PNG files in base64 by what they show, for inputs that are a picture.
        change: the largest change of an input, which is white in the picture of the change.
        note: why the middle is not known; empty if it is.
    """

    id: str
    result: Result
    inputs: Sequence[tuple[float, ...]] = ()
    outputs: Sequence[tuple[float | None, float]] = ()
    largest: tuple[int, int] | None = None
    pictures: Mapping[str, str] = field(default_factory=dict)
    change: float = 0.0
    note: str = ""


def counterexamples(results: Sequence[Result]) -> Iterator[Counterexample]:
    """Yield the counterexamples of *sat* results; networks and properties that still exist are read again."""
    loader = Loader()
    for number, result in enumerate(results):
        point, after = result.counterexample, [float(value) for value in result.outputs or ()]
        assert point is not None
        shown = Counterexample(f"counterexample-{number}", result, outputs=[(None, value) for value in after])
        picture = as_image(point.ravel().astype(np.float64), point.shape)
        try:
            lower, upper, before = _box(loader, result)
        except InputError as error:
            # Whoever keeps records need not keep the files that they are about.
            pictures = {} if picture is None else {"counterexample": _base64(picture, *_range(picture))}
            yield replace(shown, pictures=pictures, note=str(error))
            continue
        # Adding 0 turns −0 into 0.
        inputs = [tuple(float(v) + 0.0 for v in row) for row in zip(lower, upper, point.flat, strict=True)]
        outputs = list(zip(before, after, strict=True))
        shown = replace(shown, inputs=inputs, outputs=outputs, largest=(int(np.argmax(before)), int(np.argmax(after))))
        middle = as_image((lower + upper) / 2, point.shape)
        if picture is not None and middle is not None:
            low, high = _range(middle)
            most = float(np.abs(picture - middle).max()) or 1.0
            pictures = {
                "middle": _base64(middle, low, high),
                "counterexample": _base64(picture, low, high),
                "change": _base64(picture - middle, -most, most),
            }
            shown = replace(shown, pictures=pictures, change=most)
        yield shown


def _box(loader: Loader, result: Result) -> tuple[np.ndarray, np.ndarray, list[float]]:
    """Return the box that a counterexample is from, flat, and the outputs at its middle.

    Raises:
        InputError: if the files do not exist any more, or have changed.
    """
    import torch

    case = loader.case(InstanceFiles(Path(result.vnnlib), onnx_files(result.onnx), result.timeout))
    assert result.witness is not None
    box = next((q.property.box for q in case.queries if q.property.box.contains(result.witness)), None)
    network = case.queries[0].network
    if box is None or network.output_size != len(result.outputs or ()):
        raise InputError("the file has changed", path=result.vnnlib)
    middle = torch.as_tensor((box.lower + box.upper) / 2, dtype=torch.float32)
    with torch.inference_mode():
        outputs = network(middle.reshape(1, *network.input_shape)).flatten().double()
    return box.lower, box.upper, outputs.tolist()


def spread(results: Sequence[Result], most: int) -> list[Result]:
    """Return at most ``most`` results, the first ones of every network, in their order."""
    places: Counter[str] = Counter()
    ranked = []
    for number, result in enumerate(results):
        ranked.append((places[result.onnx], number))
        places[result.onnx] += 1
    return [results[number] for _, number in sorted(sorted(ranked)[:most], key=itemgetter(1))]


def _range(image: np.ndarray) -> tuple[float, float]:
    """Return the values shown as black and white: 0 and 1, or for other inputs the least and the greatest."""
    low, high = float(image.min()), float(image.max())
    return (0.0, 1.0) if low >= 0 and high <= 1 else (low, high)


def _base64(image: np.ndarray, low: float, high: float) -> str:
    """Return a PNG file in base64, in which ``low`` is black and ``high`` is white."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(shades(image, low, high)).save(file, "png")
    return base64.b64encode(file.getvalue()).decode()


def as_image(values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray | None:
    """Return flat inputs as a picture, (height, width) or (height, width, 3); None if they are no picture.

    Pictures are inputs of shape (1 or 3, height, width), (height, width, 1 or 3) or (height, width), and vectors whose
    size is that of a square picture of at least 8 × 8 in grey or in three colours.
    """
    inner = tuple(extent for extent in shape if extent != 1)
    if len(inner) == 1:
        for channels in (1, 3):
            side = round((inner[0] / channels) ** 0.5)
            if side >= 8 and side * side * channels == inner[0]:
                return as_image(values, (channels, side, side))
    if len(inner) == 2 and min(inner) >= 4:
        return values.reshape(inner)
    if len(inner) == 3 and inner[0] == 3:
        return values.reshape(inner).transpose(1, 2, 0)
    if len(inner) == 3 and inner[2] == 3:
        return values.reshape(inner)
    return None


def shades(image: np.ndarray, low: float, high: float) -> np.ndarray:
    """Return a picture as bytes: ``low`` becomes 0, ``high`` 255, and values beyond them are cut off."""
    scaled = (image - low) / (high - low if high > low else 1.0)
    return np.asarray(np.rint(255 * scaled.clip(0, 1)), np.uint8)
