"""The sections of a page: what a folder of results has to say."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verifiable_relu.campaign.result import REFUSED, Result
from verifiable_relu.campaign.store import RESULTS, read_results
from verifiable_relu.errors import InputError, printable
from verifiable_relu.files import csv_cell, read_bytes, read_text
from verifiable_relu.journal import Kind, plain, read_journal
from verifiable_relu.report import campaign, training
from verifiable_relu.report.counterexamples import Gallery, spread
from verifiable_relu.report.names import natural
from verifiable_relu.report.page import Section
from verifiable_relu.report.picture import data_uri
from verifiable_relu.report.table import Cell, Table

_LARGEST = 1 << 26
"""The most bytes of a table or a figure of a study."""

STUDIES: Kind[dict[str, Any]] = Kind(b'{"kind": ', dict, dict)
"""The kind of the records of a study."""


@dataclass(frozen=True)
class Found:
    """What a page shows.

    Attributes:
        subtitle: a line below the title.
        sections: the sections.
        results: the results of a campaign; none for a study or a training.
        training: the record of a training; None for anything else.
    """

    subtitle: str
    sections: Sequence[Section]
    results: Sequence[Result] = ()
    training: training.Record | None = None


def of_source(source: Path, pictures: int) -> Found:
    """The page of a folder or of a training's record.

    Args:
        source: a folder with a file ``records.jsonl``, of a campaign or a study; or a record of a training, ``.json``.
        pictures: the most counterexamples to show.

    Raises:
        InputError: if there are no results, or if the records are damaged.
    """
    if source.suffix == ".json":
        return of_training(training.read_record(source))
    folder = source
    records = folder / "records.jsonl"
    try:
        if not plain(records):
            raise InputError("no results here: no such file", path=records)
        with records.open("rb") as file:
            start = file.read(len(RESULTS.start))
    except OSError as error:
        raise InputError(f"no results here: {error.strerror}", path=records) from None
    found = of_study(folder) if start.startswith(STUDIES.start) else of_results(_instances(folder), pictures)
    if not found.sections:
        raise InputError("no results here", path=folder)
    return found


def of_results(results: Sequence[Result], pictures: int) -> Found:
    """The page of a campaign's results."""
    if not results:
        return Found("", ())
    # Records have the order in which answers were found.
    results = sorted(campaign.asked(results), key=lambda result: (natural(result.onnx), natural(result.vnnlib)))
    count, methods = len(campaign.by_instance(results)), campaign.by_method(results)
    answers, said = {}, []
    for name, members in methods.items():
        mine = campaign.shares(members)
        part = "" if len(members) == count else f" (asked {len(members)})"
        answers["" if len(methods) == 1 else f"{name}{part}"] = mine
        said.append(", ".join(f"{share.count} {share.name}" for share in mine))
    if len(methods) == 1:
        subtitle = f"{count} instances: {said[0]}"
    else:
        told = "; ".join(f"{name}: {counts}" for name, counts in zip(answers, said, strict=True))
        subtitle = f"{count} instances, {len(methods)} methods. {told}"
    disputed = len(campaign.by_instance([result for result in results if result.disputed]))
    warning = f"Verifier and checker disagree on {disputed} instances: {REFUSED}, so that they are undecided."
    texts = [warning] if disputed else []
    sections = [
        Section("answers", "Answers", texts, shares=answers, tables=[campaign.by_network(results)]),
    ]
    at_radii = campaign.at_radii(results)
    charts = [
        (
            "Instances that are decided within a number of seconds each; further right and lower is better.",
            campaign.cactus(results),
        ),
        (
            "Margins: proven lower bounds, and the margin at counterexamples, which is at most 0.",
            campaign.margins(results),
        ),
        (
            "Certified accuracy: the share of the instances that is verified, and the share that is not violated. "
            "Instances are those that were asked, which may be images that the network classifies correctly alone.",
            campaign.certified(at_radii),
        ),
    ]
    drawn = [(caption, chart.svg()) for caption, chart in charts if chart is not None]
    tables = [campaign.stages(results), *([campaign.radii_table(at_radii)] if at_radii else [])]
    sections.append(Section("measures", "Time, margins and radii", charts=drawn, tables=tables))
    refuted = [result for result in results if result.counterexample is not None]
    violated = [members[0] for members in campaign.by_instance(refuted).values()]
    if violated and pictures:
        shown = list(Gallery().show(spread(violated, pictures)))
        more = f"{len(shown)} of {len(violated)}, spread over the networks." if len(shown) < len(violated) else ""
        texts = ["Each has been checked by exact or verified arithmetic and by a run in onnxruntime.", more]
        sections.append(Section("counterexamples", "Counterexamples", [text for text in texts if text], gallery=shown))
    sections.append(Section("instances", "Instances", tables=[campaign.instances(results)], filter=True))
    sections.append(Section("made-with", "Made with", facts=campaign.facts(results)))
    return Found(subtitle, sections, results)


def _instances(folder: Path) -> list[Result]:
    """The results that a folder holds, those of one file under two paths once, as the last run named it.

    A campaign that is resumed in another folder names its files by other paths.
    """
    results = read_results(folder)
    table = folder / "results.csv"
    try:
        rows = csv.DictReader(io.StringIO(read_text(table, _LARGEST)))
        listed = {(row["onnx"], row["vnnlib"]) for row in rows}
    except (InputError, KeyError, csv.Error):
        return results

    files: dict[tuple[str, ...], list[Result]] = {}
    for result in results:
        onnx, vnnlib = result.onnx, result.vnnlib
        names = (Path(onnx).name, Path(vnnlib).name) if result.query else (onnx, vnnlib)
        files.setdefault((result.verifier, result.query, *names), []).append(result)
    found = []
    for same in files.values():
        last = [result for result in same if (csv_cell(result.onnx), csv_cell(result.vnnlib)) in listed]
        found += last or same[-1:]
    return found


def of_training(record: training.Record) -> Found:
    """The page of a training's record."""
    sections = [
        Section(
            "curves", "Curves", charts=[(training.CAPTIONS[k], c.svg()) for k, c in training.charts(record).items()]
        ),
        Section("results", "Results", tables=[training.results(record)]),
        Section("options", "Options", tables=[training.options(record)], filter=True),
        Section("made-with", "Made with", facts={name: str(v) for name, v in record.get("versions", {}).items()}),
    ]
    named = record["options"]
    subtitle = f"{named.get('arm')} on {named.get('data')}, {len(record['epochs'])} epochs"
    return Found(subtitle, sections, training=record)


def of_study(folder: Path) -> Found:
    """The page of a study of ``benchmarks/``: its notes, figures and tables as they lie in the folder."""
    records = read_journal(folder, STUDIES)
    notes = list(dict.fromkeys(str(r["text"]) for r in records if r.get("kind") == "note" and "text" in r))
    figures = [
        (path.stem.replace("_", " "), data_uri(read_bytes(path, _LARGEST))) for path in sorted(folder.glob("*.png"))
    ]
    tables = [_table(path) for path in sorted(folder.glob("*.csv"))]
    sections = [
        Section("figures", "Figures", figures=figures) if figures else None,
        Section("tables", "Tables", tables=tables, filter=True) if tables else None,
        Section("conditions", "Measured under", texts=notes) if notes else None,
    ]
    return Found(f"{len(records)} records", [section for section in sections if section is not None])


def _table(path: Path) -> Table:
    """A CSV file as a table; columns whose cells are all numbers or empty have numbers."""
    try:
        rows = [row for row in csv.reader(io.StringIO(read_text(path, _LARGEST), newline="")) if row]
    except csv.Error as error:
        raise InputError(f"no table: {error}", path=path) from None
    head = rows[0] if rows else []
    body = [[*row, *[""] * len(head)][: len(head)] for row in rows[1:]]
    columns = [[_number(row[i]) for row in body] for i in range(len(head))]
    numeric = [all(v is not None for v, row in zip(column, body, strict=True) if row[i]) for i, column in
               enumerate(columns)]  # fmt: skip
    cells: list[list[Cell]] = [
        [columns[i][number] if numeric[i] else row[i] for i in range(len(head))] for number, row in enumerate(body)
    ]
    return Table([printable(name.replace("_", " ")) for name in head], cells, caption=path.stem.replace("_", " "))


def _number(text: str) -> float | None:
    try:
        return float(text) if json.dumps(float(text)) else None
    except ValueError:
        return None
