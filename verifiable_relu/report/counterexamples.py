"""Counterexamples for readers: beside the middle of the box that they are from, with what the network says of both."""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path

import numpy as np

from verifiable_relu.campaign.inputs import Entry, Loader
from verifiable_relu.campaign.result import Result
from verifiable_relu.campaign.store import counterexample_file
from verifiable_relu.errors import InputError
from verifiable_relu.spec.find import named, onnx_files

_SHOWN_INPUTS = 64
_SHOWN_OUTPUTS = 12


@dataclass(frozen=True)
class Shown:
    """A counterexample as a page shows it.

    Attributes:
        title: the property.
        network: its file.
        said: what changes, in a sentence.
        pictures: for inputs that are a picture, pairs of a caption and the address of a picture.
        inputs: for few inputs that are no picture, rows: name, lower and upper bound, counterexample.
        outputs: rows: name, output at the middle of the box (empty if it is not known), output at the counterexample.
        note: why something is missing; empty if nothing is.
        id: its anchor in the page.
        file: the file of the counterexample, relative to the folder of the results; on a page with its address.
    """

    title: str
    network: str
    said: str
    pictures: Sequence[tuple[str, str]] = ()
    inputs: Sequence[Sequence[str]] = ()
    outputs: Sequence[Sequence[str]] = ()
    note: str = ""
    id: str = ""
    file: str = ""


@dataclass
class Gallery:
    """The maker of what is shown; networks and properties that are there still are read again, each network once.

    Attributes:
        loader: the reader.
    """

    loader: Loader = field(default_factory=Loader)

    def show(self, results: Sequence[Result]) -> Iterator[Shown]:
        """The counterexamples of results that are *sat*, in their order."""
        for number, result in enumerate(results):
            if result.counterexample is not None:
                shown = self._shown(result, result.counterexample)
                yield replace(shown, id=f"counterexample-{number}", file=counterexample_file(result))

    def _shown(self, result: Result, point: np.ndarray) -> Shown:
        title, network = Path(result.vnnlib).name, named(result.onnx)
        outputs = np.array(result.outputs or ())
        try:
            lower, upper, before = self._original(result, point)
        except InputError as error:
            # Whoever keeps records need not keep the files that they are of.
            rows = [(f"Y{i}", "", f"{v:.5g}") for i, v in enumerate(outputs[:_SHOWN_OUTPUTS])]
            note = f"The middle of the box is not shown: {error}"
            return Shown(title, network, "", _pictures(None, point), (), rows, note)
        middle = (lower + upper) / 2
        said = ""
        if len(outputs) > 1:
            said = f"largest output: Y{before.argmax()} at the middle, Y{outputs.argmax()} at the counterexample"
        rows = [
            (f"Y{i}", f"{a:.5g}", f"{b:.5g}")
            for i, (a, b) in enumerate(zip(before, outputs, strict=True))
            if i < _SHOWN_OUTPUTS
        ]
        pictures = _pictures(middle, point)
        inputs: list[tuple[str, ...]] = []
        if not pictures and point.size <= _SHOWN_INPUTS:
            flat = zip(lower, upper, point.ravel(), strict=True)
            # Adding 0 makes −0 to 0.
            inputs = [(f"X{i}", *(f"{v + 0.0:.5g}" for v in values)) for i, values in enumerate(flat)]
        return Shown(title, network, said, pictures, inputs, rows)

    def _original(self, result: Result, point: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The box that the counterexample is from, flat, and the outputs at its middle.

        Raises:
            InputError: if the files are not there any more, or have changed.
        """
        import torch

        case = self.loader.case(Entry(Path(result.vnnlib), onnx_files(result.onnx), result.timeout))
        assert result.witness is not None
        box = next((q.property.box for q in case.queries if q.property.box.contains(result.witness)), None)
        network = case.queries[0].network
        if box is None or network.output_size != len(result.outputs or ()):
            raise InputError("the file has changed", path=result.vnnlib)
        middle = torch.as_tensor((box.lower + box.upper) / 2, dtype=torch.float32)
        with torch.inference_mode():
            said = network(middle.reshape(1, *network.input_shape)).flatten().double().numpy()
        return box.lower, box.upper, said


def spread(results: Sequence[Result], most: int) -> list[Result]:
    """At most ``most`` results, the first ones of every network, in their order."""
    places: Counter[str] = Counter()
    ranked = []
    for number, result in enumerate(results):
        ranked.append((places[result.onnx], number))
        places[result.onnx] += 1
    return [results[number] for _, number in sorted(sorted(ranked)[:most], key=itemgetter(1))]


def _pictures(middle: np.ndarray | None, point: np.ndarray) -> list[tuple[str, str]]:
    """The middle of the box, the counterexample and their difference, where inputs are a picture."""
    after = as_image(point.ravel().astype(np.float64), point.shape)
    if after is None:
        return []
    if middle is None:
        return [("counterexample", _address(after, *_range(after)))]
    before = as_image(middle, point.shape)
    assert before is not None
    low, high = _range(before)
    change = after - before
    most = float(np.abs(change).max()) or 1.0
    return [
        ("middle of the box", _address(before, low, high)),
        ("counterexample", _address(after, low, high)),
        (f"change, from −{most:.3g} (black) to {most:.3g} (white)", _address(change, -most, most)),
    ]


def _range(image: np.ndarray) -> tuple[float, float]:
    """The values that are shown as black and white: 0 and 1, or for other inputs the least and the greatest."""
    low, high = float(image.min()), float(image.max())
    return (0.0, 1.0) if low >= 0 and high <= 1 else (low, high)


def _address(image: np.ndarray, low: float, high: float) -> str:
    return data_uri(png(shades(image, low, high)))


def png(pixels: np.ndarray) -> bytes:
    """A picture as a PNG file.

    Args:
        pixels: (height, width) for grey or (height, width, 3) for colours, of the type uint8.
    """
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def data_uri(content: bytes, kind: str = "image/png") -> str:
    """The address under which a page shows a picture that is in the address itself."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def as_image(values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray | None:
    """Inputs of a network as a picture: (height, width) or (height, width, 3); None if they are none.

    Pictures are inputs of shape (1 or 3, height, width), (height, width, 1 or 3) or (height, width), and vectors whose
    size is that of a square picture of at least 8 × 8 in grey or in three colours.

    Args:
        values: the inputs, flat.
        shape: the shape of one input.
    """
    inner = tuple(extent for extent in shape if extent != 1)
    if len(inner) == 1:
        for channels in (1, 3):
            side = round((inner[0] / channels) ** 0.5)
            if side >= 8 and side * side * channels == inner[0]:
                return as_image(values, (channels, side, side))
        return None
    if len(inner) == 2 and min(inner) >= 4:
        return values.reshape(inner)
    if len(inner) == 3 and inner[0] == 3:
        return values.reshape(inner).transpose(1, 2, 0)
    if len(inner) == 3 and inner[2] == 3:
        return values.reshape(inner)
    return None


def shades(image: np.ndarray, low: float, high: float) -> np.ndarray:
    """A picture as bytes: ``low`` becomes 0, ``high`` 255, and what is beyond is cut off."""
    scaled = (image - low) / (high - low if high > low else 1.0)
    return np.asarray(np.rint(255 * scaled.clip(0, 1)), np.uint8)
