"""HTML pages of campaigns and trainings. Templates hold all text and formats; a page needs no other file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from verifiable_relu import __version__
from verifiable_relu.campaign.result import Result
from verifiable_relu.campaign.store import counterexample_file
from verifiable_relu.errors import InputError, printable
from verifiable_relu.files import on_disk, read_text
from verifiable_relu.report import figures
from verifiable_relu.report.counterexamples import counterexamples, spread
from verifiable_relu.report.expected import LARGEST_FILE, counted
from verifiable_relu.report.summary import CampaignSummary, radius_text
from verifiable_relu.spec.find import named


def campaign_page(
    summary: CampaignSummary, title: str, most_shown: int, page: Path | None = None, folder: Path | None = None
) -> str:
    """Return the page of a campaign, or of several.

    Args:
        summary: the counts of their results.
        title: the title.
        most_shown: the most counterexamples to show.
        page: the folder of the page, from which rows lead to files that exist; None for no links to files.
        folder: the folder of the campaign; None for several campaigns.
    """
    chosen = spread(summary.refuted, most_shown)

    def evidence(result: Result) -> str:
        return _address(folder / counterexample_file(result), page) if folder else ""

    return _render(
        "campaign.html",
        title=title,
        summary=summary,
        shown=[*counterexamples(chosen)],
        anchors={(result.onnx, result.vnnlib): f"#counterexample-{n}" for n, result in enumerate(chosen)},
        charts=figures,
        counterexample_file=counterexample_file,
        evidence=evidence,
        address=lambda file: _address(on_disk(file), page),
        records={name: _address(folder / name, page) for name in ("records.jsonl", "results.csv")} if folder else {},
    )


def _address(file: Path, page: Path | None) -> str:
    """Return the address of a file as seen from the page's folder; empty if the file does not exist."""
    if page is None or not file.is_file():
        return ""
    try:
        where = os.path.relpath(file, page)
    except ValueError:  # Windows knows no path from one drive to another.
        return ""
    return "./" + quote(os.fsencode(Path(where).as_posix()))


def training_page(record: Mapping[str, Any], charts: Mapping[str, figures.Chart], title: str) -> str:
    """Return the page of a training's record."""
    rows = {name: _rows(record[name], "") for name in ("options", "results")}
    return _render("training.html", title=title, record=record, charts=charts, **rows)


def _rows(values: Mapping[str, Any], before: str) -> list[tuple[str, Any]]:
    """Return the names and values of nested results."""
    rows = []
    for name, value in values.items():
        path = f"{before} {name.replace('_', ' ')}".strip()
        if isinstance(value, dict):
            rows += _rows(value, path)
        else:
            rows.append((path, value))
    return rows


def _render(template: str, **values: Any) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {
        "counted": counted,
        "number": number,
        "sort_key": sort_key,
        "radius": radius_text,
        "named": named,
    }
    templates.filters |= {"printable": printable, "file_name": lambda path: Path(path).name}
    styles = {"answers": figures.ANSWER_STYLES, "colours": len(figures.COLOURS), "glyphs": figures.GLYPHS}
    return templates.get_template(template).render(version=__version__, **styles, **values)


def number(value: Any, digits: int = 4) -> str:
    """Return a number with so many significant digits; None and NaN are a dash, lists are joined by commas."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(number(each, digits) for each in value) or "–"
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)


def sort_key(value: float | None) -> str:
    """Return the text by which a page sorts a number; None and NaN come first."""
    return "-inf" if value is None or math.isnan(value) else repr(float(value))


def read_training(path: Path) -> Mapping[str, Any]:
    """Read the record that ``train`` wrote.

    Raises:
        InputError: if the file cannot be read, or is no such record.
    """
    try:
        record = json.loads(read_text(path, LARGEST_FILE))
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"no record of a training: {error}", path=path) from None
    wanted = {"options": dict, "results": dict, "epochs": list}
    if not isinstance(record, dict) or not all(isinstance(record.get(name), kind) for name, kind in wanted.items()):
        raise InputError("no record of a training: 'options', 'results' or 'epochs' is missing", path=path)
    for place, epoch in enumerate(record["epochs"], 1):
        if not (
            isinstance(epoch, dict)
            and all(isinstance(epoch.get(name), int | float) for name in ("loss", "accuracy"))
            and isinstance(epoch.get("lam"), list)
            and all(isinstance(lam, int | float) for lam in epoch["lam"])
        ):
            raise InputError("'loss', 'accuracy' or 'lam' is missing", path=path, place=f"epoch {place}")
    if not record["epochs"]:
        raise InputError("the training has no epoch", path=path)
    return record
