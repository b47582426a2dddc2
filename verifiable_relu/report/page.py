"""HTML pages of campaigns, with their counterexamples, and of trainings.

Templates hold all text and formats; a page needs no other file.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from verifiable_relu import __version__
from verifiable_relu.campaign.inputs import InstanceFiles, Loader
from verifiable_relu.campaign.result import Result
from verifiable_relu.campaign.store import counterexample_file
from verifiable_relu.errors import InputError, counted, printable
from verifiable_relu.files import on_disk, read_text
from verifiable_relu.report import figures
from verifiable_relu.report.summary import LARGEST_FILE, CampaignSummary, radius_text
from verifiable_relu.spec.find import named, onnx_files


def campaign_page(summary: CampaignSummary, title: str, most_shown: int, page: Path, folder: Path | None = None) -> str:
    """Return the page of a campaign, or of several, with at most ``most_shown`` counterexamples.

    Rows lead from the folder ``page`` to files that exist; ``folder`` is that of the campaign, None for several.
    """
    chosen = spread(summary.refuted, most_shown)

    def address(file: Path | None) -> str:
        """Return the address of a file as seen from the page; empty if the file does not exist."""
        # Windows knows no path from one drive to another.
        with contextlib.suppress(ValueError):
            if file is not None and file.is_file():
                return "./" + quote(os.fsencode(Path(os.path.relpath(file, page)).as_posix()))
        return ""

    return _render(
        "campaign.html",
        title=title,
        summary=summary,
        shown=[*counterexamples(chosen)],
        anchors={(result.onnx, result.vnnlib): f"#counterexample-{n}" for n, result in enumerate(chosen)},
        charts=figures,
        counterexample_file=counterexample_file,
        evidence=lambda result: address(folder and folder / counterexample_file(result)),
        address=lambda file: address(on_disk(file)),
        records={name: address(folder / name) for name in ("records.jsonl", "results.csv")} if folder else {},
    )


def training_page(record: Mapping[str, Any], charts: Mapping[str, figures.Chart], title: str) -> str:
    """Return the page of a training's record."""

    def rows(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
        for name, value in values.items():
            path = f"{before} {name.replace('_', ' ')}".strip()
            yield from rows(value, path) if isinstance(value, dict) else [(path, value)]

    nested = {name: [*rows(record[name])] for name in ("options", "results")}
    return _render("training.html", title=title, record=record, charts=charts, **nested)


def _render(template: str, **values: Any) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {"counted": counted, "number": number, "sort_key": sort_key, "radius": radius_text}
    templates.filters |= {"named": named, "printable": printable, "file_name": lambda path: Path(path).name}
    styles = {"answers": figures.ANSWER_STYLES, "colours": len(figures.COLOURS), "glyphs": figures.GLYPHS}
    return templates.get_template(template).render(version=__version__, **styles, **values)


def number(value: Any, digits: int = 4) -> str:
    """Return a number with ``digits`` significant digits; None and NaN are a dash, lists are joined by commas."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(number(each, digits) for each in value) or "–"
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)


def sort_key(value: float | None) -> str:
    """Return the text by which a page sorts a number; None and NaN come first."""
    return "-inf" if value is None or math.isnan(value) else repr(float(value))


def read_training(path: Path) -> Mapping[str, Any]:
    """Read the record that ``train`` wrote; an InputError if the file cannot be read, or is no such record."""
    try:
        record = json.loads(read_text(path, LARGEST_FILE))
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"no record of a training: {error}", path=path) from None
    wanted = {"options": dict, "results": dict, "epochs": list}
    if not isinstance(record, dict) or not all(isinstance(record.get(name), kind) for name, kind in wanted.items()):
        raise InputError("no record of a training: 'options', 'results' or 'epochs' is missing", path=path)
    for place, epoch in enumerate(record["epochs"], 1):
        given = epoch if isinstance(epoch, dict) else {}
        numbers, lam = [given.get("loss"), given.get("accuracy")], given.get("lam")
        if not isinstance(lam, list) or not all(isinstance(number, int | float) for number in [*numbers, *lam]):
            raise InputError("'loss', 'accuracy' or 'lam' is missing", path=path, place=f"epoch {place}")
    if not record["epochs"]:
        raise InputError("the training has no epoch", path=path)
    return record


def counterexamples(results: Sequence[Result]) -> Iterator[dict[str, Any]]:
    """Yield what a page shows of counterexamples; networks and properties that still exist are read again.

    What needs the box is empty where one is gone, and ``note`` says why: of each input its lower and upper bound and
    its value; of each output its values at the middle of the box and here; and the numbers of the ``largest`` outputs.
    """
    loader = Loader()
    for number, result in enumerate(results):
        point, after = result.counterexample, [float(value) for value in result.outputs or ()]
        assert point is not None
        before: Sequence[float | None] = [None] * len(after)
        inputs: list[list[float]] = []
        largest, middle, note = None, None, ""
        try:
            lower, upper, known = _box(loader, result)
        except InputError as error:
            # Whoever keeps records need not keep the files that they are about.
            note = str(error)
        else:
            # Adding 0 turns −0 into 0.
            inputs = (np.array([lower, upper, point.ravel()], np.float64).T + 0.0).tolist()
            before, largest, middle = known, (int(np.argmax(known)), int(np.argmax(after))), (lower + upper) / 2
        pictures, change = _pictures(point, middle)
        shown = {"id": f"counterexample-{number}", "result": result, "inputs": inputs, "largest": largest, "note": note}
        yield {**shown, "outputs": [*zip(before, after, strict=True)], "pictures": pictures, "change": change}


def _pictures(point: np.ndarray, middle: np.ndarray | None) -> tuple[dict[str, str], float]:
    """Return the pictures of a counterexample and of the middle of its box, and the largest change, which is white."""
    picture = as_image(point.ravel().astype(np.float64), point.shape)
    if picture is None:
        return {}, 0.0
    before = None if middle is None else as_image(middle, point.shape)
    if before is None:
        return {"counterexample": _base64(picture, *_range(picture))}, 0.0
    most = float(np.abs(picture - before).max()) or 1.0
    ends = _range(before)
    shown = {"middle": _base64(before, *ends), "counterexample": _base64(picture, *ends)}
    return {**shown, "change": _base64(picture - before, -most, most)}, most


def _box(loader: Loader, result: Result) -> tuple[np.ndarray, np.ndarray, list[float]]:
    """Return the box that a counterexample is from, flat, and the outputs at its middle.

    Raises an InputError if the files do not exist any more, or have changed.
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
        outputs = network(middle.reshape(1, -1)).flatten().double()
    return box.lower, box.upper, outputs.tolist()


def spread(results: Sequence[Result], most: int) -> list[Result]:
    """Return at most ``most`` results, the first ones of every network, in their order."""
    places: dict[str, count[int]] = defaultdict(count)
    ranked = sorted((next(places[result.onnx]), number) for number, result in enumerate(results))
    return [results[number] for number in sorted(number for _, number in ranked[: max(0, most)])]


def _range(image: np.ndarray) -> tuple[float, float]:
    """Return the values shown as black and white: 0 and 1, or for other inputs the least and the greatest."""
    low, high = float(image.min()), float(image.max())
    return (0.0, 1.0) if low >= 0 and high <= 1 else (low, high)


def _base64(image: np.ndarray, low: float, high: float) -> str:
    """Return a PNG file in base64: ``low`` is black and ``high`` is white, as are values beyond them."""
    from PIL import Image

    scaled = (image - low) / (high - low if high > low else 1.0)
    file = io.BytesIO()
    Image.fromarray(np.rint(255 * scaled.clip(0, 1)).astype(np.uint8)).save(file, "png")
    return base64.b64encode(file.getvalue()).decode()


def as_image(values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray | None:
    """Return flat inputs as a picture, (height, width) or (height, width, 3); None if they are no picture.

    Pictures are inputs of shape (1 or 3, height, width), (height, width, 1 or 3) or (height, width), and vectors whose
    size is that of a square picture of at least 8 × 8 in grey or in three colours.
    """
    inner = tuple(extent for extent in shape if extent != 1)
    for channels in (1, 3) if len(inner) == 1 else ():
        side = round((inner[0] / channels) ** 0.5)
        if side >= 8 and side * side * channels == inner[0]:
            return as_image(values, (channels, side, side))
    if (len(inner) == 2 and min(inner) >= 4) or (len(inner) == 3 and inner[2] == 3 and inner[0] != 3):
        return values.reshape(inner)
    return values.reshape(inner).transpose(1, 2, 0) if len(inner) == 3 and inner[0] == 3 else None
