"""The HTML page of a folder of results or of a training's record: its sections, and how they become one file."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from verifiable_relu import __version__
from verifiable_relu.campaign.result import REFUSED, Result
from verifiable_relu.campaign.store import RESULTS, read_results
from verifiable_relu.errors import InputError, printable
from verifiable_relu.files import csv_cell, read_bytes, read_text
from verifiable_relu.journal import Kind, plain, read_journal
from verifiable_relu.report import campaign
from verifiable_relu.report.counterexamples import Gallery, Shown, data_uri, spread
from verifiable_relu.report.expected import Expected, counted, read_expected
from verifiable_relu.report.figures import ANSWERS, COLOURS, Axis, Chart, Series
from verifiable_relu.report.table import Cell, Link, Table, natural

_LARGEST = 1 << 26
"""The most bytes of a record of a training, or of a table or a figure of a study."""

SCATTER = (
    "Seconds of two methods for each instance that one of them decides; below the line the second is faster. What one "
    "of them leaves undecided is at its time limit."
)

STUDIES: Kind[dict[str, Any]] = Kind(b'{"kind": ', dict, dict)
"""The kind of the records of a study."""


@dataclass(frozen=True)
class Section:
    """A part of a page; what is empty is left out.

    Attributes:
        id: its anchor, unique in the page.
        title: its heading.
        texts: paragraphs.
        shares: for each method (the only one has no name) the number of instances with each answer, shown as a bar.
        charts: pairs of a caption and a chart.
        figures: pairs of a caption and the address of a picture.
        tables: tables; readers can sort each by any column.
        filter: whether readers can choose rows of the tables by words.
        gallery: counterexamples.
        facts: names and values.
        files: links to files.
    """

    id: str
    title: str
    texts: Sequence[str] = ()
    shares: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    charts: Sequence[tuple[str, Chart]] = ()
    figures: Sequence[tuple[str, str]] = ()
    tables: Sequence[Table] = ()
    filter: bool = False
    gallery: Sequence[Shown] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    files: Sequence[Link] = ()


@dataclass(frozen=True)
class Found:
    """What a page shows.

    Attributes:
        subtitle: a line below the title.
        sections: the sections.
        results: the results of a campaign; none for a study or a training.
        notes: sentences about the results that the command prints, too.
        curves: the charts of a training, by name; none for anything else.
    """

    subtitle: str
    sections: Sequence[Section]
    results: Sequence[Result] = ()
    notes: Sequence[str] = ()
    curves: Mapping[str, Chart] = field(default_factory=dict)

    def html(self, title: str) -> str:
        """The page."""
        from jinja2 import Environment, FileSystemLoader, StrictUndefined

        templates = FileSystemLoader(Path(__file__).parent)
        numbers = count(1)
        page = Environment(loader=templates, autoescape=True, undefined=StrictUndefined).get_template("page.html")
        return page.render(
            title=title,
            subtitle=self.subtitle,
            sections=self.sections,
            version=__version__,
            colours=len(COLOURS),
            answers=ANSWERS,
            loop_number=lambda: next(numbers),
        )


def of_source(
    source: Path,
    pictures: int,
    others: Sequence[Path] = (),
    expected: Path | None = None,
    page: Path | None = None,
) -> Found:
    """The page of a folder or of a training's record.

    Args:
        source: a folder with a file ``records.jsonl``, of a campaign or a study; or a record of a training, ``.json``.
        pictures: the most counterexamples to show.
        others: folders of other campaigns, to be shown beside the first one.
        expected: a table of verdicts with which a campaign's are compared (``read_expected``).
        page: the folder in which the page will lie, whose rows then lead to the files of a campaign that are there.

    Raises:
        InputError: if there are no results, if the records are damaged, or if what has no instances is to be compared.
    """
    if others or expected is not None:
        for folder in (source, *others):
            if folder.suffix == ".json" or not _campaign(folder):
                raise InputError("no campaign, which alone is compared", path=folder)
    elif source.suffix == ".json":
        return of_training(read_record(source))
    elif not _campaign(source):
        return of_study(source)
    results = _instances(source)
    if others:
        results = campaign.beside({folder: _instances(folder) for folder in (source, *others)})
    evidence = campaign.Evidence(page, source if not others else None)
    found = of_results(results, pictures, Expected() if expected is None else read_expected(expected), evidence)
    if not found.sections:
        raise InputError("no results here", path=source)
    return found


def _campaign(folder: Path) -> bool:
    """Whether a folder has the records of a campaign, rather than of a study."""
    records = folder / "records.jsonl"
    try:
        if not plain(records):
            raise InputError("no results here: no such file", path=records)
        with records.open("rb") as file:
            return not file.read(len(RESULTS.start)).startswith(STUDIES.start)
    except OSError as error:
        raise InputError(f"no results here: {error.strerror}", path=records) from None


def of_results(
    results: Sequence[Result],
    pictures: int,
    expected: Expected = Expected(),  # noqa: B008 -- frozen
    evidence: campaign.Evidence = campaign.NOWHERE,
) -> Found:
    """The page of a campaign's results.

    Args:
        results: the results.
        pictures: the most counterexamples to show.
        expected: the verdicts with which these are compared.
        evidence: where the files are that rows lead to.
    """
    if not results:
        return Found("", ())
    # Records have the order in which answers were found.
    results = sorted(results, key=lambda result: (natural(result.onnx), natural(result.vnnlib)))
    every, methods = list(campaign.by_instance(results)), campaign.by_method(results)
    total, known = counted(len(every), "instance"), len(every)
    answers, said = {}, []
    for name, members in methods.items():
        mine = campaign.shares(members)
        part = "" if len(members) == known else f" (asked {len(members)})"
        answers["" if len(methods) == 1 else f"{name}{part}"] = mine
        said.append(", ".join(f"{number} {answer}" for answer, number in mine.items()))
    if len(methods) == 1:
        subtitle = f"{total}: {said[0]}"
    else:
        told = "; ".join(f"{name}: {counts}" for name, counts in zip(answers, said, strict=True))
        subtitle = f"{total}, {len(methods)} methods. {told}"
    disputed = len(campaign.by_instance([result for result in results if result.disputed]))
    notes = [expected.summary(every)] if expected.rows else []
    if disputed:
        notes.append(f"Verifier and checker disagree on {counted(disputed, 'instance')}: {REFUSED}.")
    pairs = campaign.pairs(results)
    if contrary := campaign.contradicted(results):
        notes.append(f"Methods contradict each other (sat and unsat) about {counted(contrary, 'instance')}.")
    if wrong := campaign.unexpected(results, expected):
        notes.append(wrong)
    at_radii = campaign.at_radii(results)
    charts = {
        "Instances that are decided within a number of seconds each; further right and lower is better.":
            campaign.cactus(results),
        "Margins: proven lower bounds, and the margin at counterexamples, which is at most 0.":
            campaign.margins(results),
        "Certified accuracy: the share of the instances that is certified, and the share that is not refuted. "
        "Instances are those that were asked, which may be images that the network classifies correctly alone.":
            campaign.certified(at_radii),
    }  # fmt: skip
    drawn = [(caption, chart) for caption, chart in charts.items() if chart is not None]
    tables = [campaign.stages(results), *([campaign.radii_table(at_radii)] if at_radii else [])]
    refuted = [result for result in results if result.counterexample is not None]
    refuted = [members[0] for members in campaign.by_instance(refuted).values()]
    chosen = spread(refuted, pictures)
    shown = [replace(one, file=evidence.at(one.file)) for one in Gallery().show(chosen)]
    places = {(result.onnx, result.vnnlib): f"#{one.id}" for result, one in zip(chosen, shown, strict=True)}
    texts = ["Each has been checked by exact or verified arithmetic and by a run in onnxruntime."]
    if len(shown) < len(refuted):
        texts.append(f"{len(shown)} of {len(refuted)}, spread over the networks.")
    compared = campaign.met(results, expected)
    counts = [campaign.by_network(results), *([compared] if compared.rows else [])]
    beside = Section(
        "beside",
        "Side by side",
        charts=[(SCATTER, chart) for pair in pairs if (chart := pair.scatter()) is not None],
        tables=[campaign.paired(pairs), campaign.alone(pairs, places)],
    )
    sections = [
        Section("answers", "Answers", notes, answers, tables=counts),
        *([beside] if pairs else []),
        Section("measures", "Time, margins and radii", charts=drawn, tables=tables),
        *([Section("counterexamples", "Counterexamples", texts, gallery=shown)] if shown else []),
        Section(
            "instances", "Instances", tables=[campaign.instances(results, places, expected, evidence)], filter=True
        ),
        Section("made-with", "Made with", facts=campaign.facts(results), files=evidence.records()),
    ]
    return Found(subtitle, sections, results, notes)


def _instances(folder: Path) -> list[Result]:
    """The results that a folder holds, those of one instance under two paths once, as the last run named it.

    A campaign that is resumed in another folder names its files by other paths.
    """
    results = [campaign.about(result) for result in read_results(folder)]
    table = folder / "results.csv"
    try:
        rows = csv.DictReader(io.StringIO(read_text(table, _LARGEST)))
        listed = {(row["onnx"], row["vnnlib"]) for row in rows}
    except (InputError, KeyError, csv.Error):
        return results

    def in_last_run(result: Result) -> bool:
        return (csv_cell(result.onnx), csv_cell(result.vnnlib)) in listed

    kept: dict[tuple[str, str], list[Result]] = {}
    earlier = [result for result in reversed(results) if not in_last_run(result)]
    for result in (*filter(in_last_run, results), *earlier):
        same = kept.setdefault((result.verifier, Path(result.vnnlib).name), [])
        if in_last_run(result) or not any(campaign.unlike(result, other) for other in same):
            same.append(result)
    chosen = {id(result) for same in kept.values() for result in same}
    return [result for result in results if id(result) in chosen]


def of_study(folder: Path) -> Found:
    """The page of a study: its notes, figures and tables as they lie in the folder and its ``figures`` and ``tables``.

    Raises:
        InputError: if a table is none.
    """
    records = read_journal(folder, STUDIES)
    notes = list(dict.fromkeys(str(r["text"]) for r in records if r.get("kind") == "note" and "text" in r))
    pictures, files = (
        sorted([*folder.glob(f"*.{kind}"), *folder.glob(f"{beside}/*.{kind}")])
        for kind, beside in (("png", "figures"), ("csv", "tables"))
    )
    figures = [(path.stem.replace("_", " "), data_uri(read_bytes(path, _LARGEST))) for path in pictures]
    sections = [
        Section("figures", "Figures", figures=figures) if figures else None,
        Section("tables", "Tables", tables=list(map(_table, files)), filter=True) if files else None,
        Section("conditions", "Measured under", texts=notes) if notes else None,
    ]
    return Found(f"{len(records)} records", [section for section in sections if section is not None])


def _table(path: Path) -> Table:
    """A CSV file as a table; columns whose cells are all numbers or empty have numbers."""
    try:
        rows = [row for row in csv.reader(io.StringIO(read_text(path, _LARGEST), newline="")) if row]
    except csv.Error as error:
        raise InputError(f"no table: {error}", path=path) from None
    head, body = (rows[0], rows[1:]) if rows else ([], [])
    columns: list[Sequence[Cell]] = []
    for place in range(len(head)):
        texts = [row[place] if place < len(row) else "" for row in body]
        numbers = [_number(text) for text in texts]
        columns.append(numbers if all(n is not None or not t for n, t in zip(numbers, texts, strict=True)) else texts)
    names = [printable(name.replace("_", " ")) for name in head]
    return Table(names, list(zip(*columns, strict=True)), caption=path.stem.replace("_", " "))


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


Record = Mapping[str, Any]
"""The record of a training, as ``train`` writes it."""

CURVES = {
    "loss": ("mean loss", "Loss: the mean over each epoch."),
    "accuracy": (
        "accuracy on training images",
        "Accuracy on the images trained on, augmented and attacked if the training does so.",
    ),
    "lam": ("λ", "Hardness: λ of each layer at the end of each epoch. ReLU is the limit of large λ."),
    "unstable": (
        "unstable neurons per image",
        "Unstable neurons: the mean over the measured training images, by intervals of the options' ε.",
    ),
}
"""The vertical axis and the caption of each chart of a training."""


def read_record(path: Path) -> Record:
    """The record that ``train`` wrote.

    Raises:
        InputError: if the file cannot be read, or is no such record.
    """
    try:
        record = json.loads(read_text(path, _LARGEST))
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"no record of a training: {error}", path=path) from None
    wanted = {"options": dict, "results": dict, "epochs": list}
    if not isinstance(record, dict) or not all(isinstance(record.get(name), kind) for name, kind in wanted.items()):
        raise InputError("no record of a training: 'options', 'results' or 'epochs' is missing", path=path)
    for number, epoch in enumerate(record["epochs"]):
        if not (
            isinstance(epoch, dict)
            and all(isinstance(epoch.get(name), int | float) for name in ("loss", "accuracy"))
            and isinstance(epoch.get("lam"), list)
            and all(isinstance(lam, int | float) for lam in epoch["lam"])
        ):
            raise InputError("'loss', 'accuracy' or 'lam' is missing", path=path, place=f"epoch {number + 1}")
    if not record["epochs"]:
        raise InputError("the training has no epoch", path=path)
    return record


def of_training(record: Record) -> Found:
    """The page of a training's record."""
    named, drawn = record["options"], curves(record)
    options = [(name.replace("_", " "), _shown(value)) for name, value in named.items()]
    results = list(_rows(record["results"], ""))
    sections = [
        Section("curves", "Curves", charts=[(CURVES[name][1], chart) for name, chart in drawn.items()]),
        Section("results", "Results", tables=[Table(("result", "value"), results, caption="Results")]),
        Section("options", "Options", tables=[Table(("option", "value"), options, caption="Options")], filter=True),
        Section("made-with", "Made with", facts={name: str(v) for name, v in record.get("versions", {}).items()}),
    ]
    subtitle = f"{named.get('arm')} on {named.get('data')}, {len(record['epochs'])} epochs"
    return Found(subtitle, sections, curves=drawn)


def curves(record: Record) -> dict[str, Chart]:
    """The charts that the record has numbers for, by the names of ``CURVES``."""
    epochs = record["epochs"]
    found: dict[str, Mapping[str, Sequence[float]]] = {
        name: {f"training {name}": [float(epoch[name]) for epoch in epochs]} for name in ("loss", "accuracy")
    }
    layers = enumerate(zip(*(epoch["lam"] for epoch in epochs), strict=False))
    found["lam"] = {f"layer {k + 1}": list(map(float, layer)) for k, layer in layers}
    measured = [
        point for point in record["results"].get("monitor", ()) if isinstance(point.get("unstable"), int | float)
    ]
    found["unstable"] = {"unstable neurons": [float(point["unstable"]) for point in measured]} if measured else {}
    charts = {}
    for name, lines in found.items():
        if lines:
            times = [len(epochs) * point["part"] for point in measured] if name == "unstable" else count(1.0)
            each = enumerate(lines.items())
            series = [Series(title, list(zip(times, ys, strict=False)), style=k) for k, (title, ys) in each]
            label, caption = CURVES[name]
            shown = next(iter(lines.values()))
            charts[name] = Chart(
                label,
                series,
                Axis("epoch", ends=(0.0, len(epochs) + 0.5)),
                Axis(label, "log" if name == "lam" else "linear", percent=name == "accuracy"),
                f"{caption} From {shown[0]:.4g} to {shown[-1]:.4g}.",
            )
    return charts


def _rows(values: Mapping[str, Any], before: str) -> Iterator[Sequence[Cell]]:
    for name, value in values.items():
        title = f"{before} {name.replace('_', ' ')}".strip()
        if isinstance(value, dict):
            yield from _rows(value, title)
        elif name != "monitor":
            yield title, _shown(value)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_shown, value)) or "–"
    return f"{value:.5g}" if isinstance(value, float) else "–" if value is None else str(value)
