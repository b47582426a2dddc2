"""The instances of the verification competition, what is known of them, and what other tools answered."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.records import Record, Records, of
from verifiable_relu.errors import InputError
from verifiable_relu.files import read_text

STANDING = (
    "test",
    "rl_benchmarks",
    "collins_rul_cnn",
    "tllverifybench",
    "acasxu",
    "mnist_fc",
    "oval21",
    "eran_2021",
    "safenlp",
)
"""The families of the standing set."""

FIRST = {"safenlp": 300}
"""Of these families the standing set has only so many instances, the first ones."""

COMPETITORS = ("abcrown", "nnenum", "neuralsat", "marabou")
"""The tools whose seconds in the competition truth.csv has."""

_HOMES = ("vnncomp", "competition_2026")
"""The folders of families below that of all data."""

_LARGEST = 1 << 26
"""Bytes of a table."""

_PEER_COLUMNS = ("tool", "benchmark", "onnx", "vnnlib", "verdict", "wall_s", "cpu_s", "consensus", "timeout_s", "load")
"""The columns of peers.csv that are read."""


@dataclass(frozen=True)
class Instance:
    """A line of a family's instances.csv, and what is known of it.

    Attributes:
        onnx, vnnlib: files below the folder of the family.
        seconds: the competition's time limit.
        truth: sat, unsat or unknown, the consensus of the competition's tools, a counterexample that was replayed
            outweighing all of them; ``disputed (unsat)`` where they disagreed and most said unsat.
        competition: by tool the seconds that it took in the competition, on the competition's machines, where it
            answered; ``best`` is the least time of all tools.
    """

    onnx: str
    vnnlib: str
    seconds: float
    truth: str
    competition: dict[str, float]

    @property
    def names(self) -> tuple[str, str]:
        """The names of the two files without their folders, as peers.csv has them."""
        # Imported here, since --help need not wait for the import.
        from verifiable_relu.spec.find import named

        return named(self.onnx), Path(self.vnnlib).name


def families(data: Path, subset: str) -> list[str]:
    """The families of a set, where none are named."""
    if subset != "every":
        return list(STANDING)
    return [table.parent.name for home in _HOMES for table in sorted((data / home).glob("*/instances.csv"))]


def folder(data: Path, family: str) -> Path:
    """The folder of a family, which is named by its name below the data or by a path."""
    return next((path for home in _HOMES if (path := data / home / family).is_dir()), Path(family).resolve())


def instances(folder: Path) -> list[Instance]:
    """All instances of the family in a folder, in the order of instances.csv.

    Raises:
        InputError: if instances.csv is missing, or truth.csv has no line for an instance; without truth.csv nothing is
            known of any.
    """
    table = folder / "truth.csv"
    known = {tuple(row.values())[:2]: row for row in _rows(table)} if table.is_file() else None
    found = []
    for onnx, vnnlib, seconds in csv.reader(io.StringIO(read_text(folder / "instances.csv", _LARGEST))):
        row = {} if known is None else known.get((onnx, vnnlib))
        if row is None:
            raise InputError("no line for an instance", path=folder / "truth.csv", place=f"{onnx}, {vnnlib}")
        times = {tool: row.get(f"{tool}_time") for tool in COMPETITORS} | {"best": row.get("best_tool_time")}
        competition = {tool: float(time) for tool, time in times.items() if time}
        found.append(Instance(onnx, vnnlib, float(seconds), _truth(row), competition))
    return found


def chosen(family: str, folder: Path, subset: str, count: int | None, records: Sequence[Record]) -> list[Instance]:
    """The instances of a family that are asked about.

    Args:
        family: its name.
        folder: where it lies.
        subset: ``standing`` for the standing set, ``peers`` for those that another tool was asked about.
        count: only so many, the first ones; None for all.
        records: of the study; they have the answers of other tools.

    Raises:
        InputError: as ``instances``.
    """
    found = instances(folder)
    if subset == "peers":
        asked = {(row["onnx"], row["vnnlib"]) for row in of(records, "peer") if row["family"] == family}
        return [each for each in found if each.names in asked][:count]
    return found[: FIRST.get(family)][:count]


def take_peers(path: Path, records: Records) -> None:
    """Record the answers of other tools, a record of kind ``peer`` each, and where they come from, once.

    The first paragraph of a README.md beside the table says how its rows were measured; it goes into a record of kind
    ``source``.

    Raises:
        InputError: if the table is missing, or lacks a column.
    """
    if records.of("peer"):
        return
    rows = list(_rows(path))
    if not rows or not set(_PEER_COLUMNS) <= rows[0].keys():
        raise InputError(f"no table with the columns {', '.join(_PEER_COLUMNS)}", path=path)
    readme = path.with_name("README.md")
    text = _first_paragraph(read_text(readme, _LARGEST)) if readme.is_file() else f"{len(rows)} rows of {path.name}"
    records.append("source", {"text": text})
    for row in rows:
        names = {"tool": row["tool"], "family": row["benchmark"], "onnx": row["onnx"], "vnnlib": row["vnnlib"]}
        numbers = {"limit": row["timeout_s"], "seconds": row["wall_s"], "cpu": row["cpu_s"], "load": row["load"]}
        said = {"verdict": row["verdict"], "truth": row["consensus"]}
        records.append("peer", {**names, **said, **{name: float(value) for name, value in numbers.items()}})


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    return csv.DictReader(io.StringIO(read_text(path, _LARGEST)))


def _truth(row: dict[str, str]) -> str:
    if "consensus_verdict" not in row:
        sat, unsat = (int(row.get(votes) or 0) for votes in ("votes_sat", "votes_unsat"))
        most = "sat" if sat > unsat else "unsat" if unsat > sat else "unknown"
        return f"disputed ({most})" if sat and unsat else most
    if row["ce_check"] in ("strict", "tol1e-4"):
        return "sat"
    return f"disputed ({row['consensus_verdict']})" if row["note"] else row["consensus_verdict"]


def _first_paragraph(text: str) -> str:
    """The first paragraph that is no heading, as one line."""
    paragraphs = (" ".join(part.split()) for part in text.split("\n\n"))
    return next((part for part in paragraphs if part and not part.startswith("#")), "")
