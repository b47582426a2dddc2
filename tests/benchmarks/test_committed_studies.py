"""The tables of the studies in the repository are those of the records beside them."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from benchmarks.common.records import of, read_records
from benchmarks.study.claims import outcomes
from benchmarks.study.joined import joined
from benchmarks.study.state import State
from benchmarks.study.suite import find, read
from benchmarks.study.tables import tables
from verifiable_relu.train.options import Options

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
STUDIES = sorted(BENCHMARKS.glob("studies/*"))


def cells(text: str) -> list[list[str | float]]:
    """The cells of a CSV file, those that are numbers as numbers."""
    return [[value(cell) for cell in row] for row in csv.reader(io.StringIO(text))]


def value(cell: str) -> str | float:
    try:
        return float(cell)
    except ValueError:
        return cell


def close(cell: str | float) -> object:
    """What equals a cell: another machine's sums may differ in their last digits."""
    return cell if isinstance(cell, str) else pytest.approx(cell, rel=1e-4, abs=1e-9, nan_ok=True)


@pytest.mark.parametrize("folder", STUDIES, ids=lambda folder: folder.name)
def test_tables_of_a_study_follow_from_its_records(folder: Path) -> None:
    own = BENCHMARKS / "suites" / f"{folder.name}.toml"
    suite = read(own if own.is_file() else find(folder.name))
    state = State.of(read_records(folder))
    assert state.suite is not None and state.suite["digest"] == suite.record["digest"]
    study = joined(state.records(suite.cells()))
    made = {name: each for name, each in tables(study, outcomes(study)).items() if each.rows}
    files = {path.stem: path.read_text(encoding="utf-8") for path in (folder / "tables").glob("*.csv")}
    assert made.keys() == files.keys() and "main" in files
    for name, text in files.items():
        found, kept = cells(made[name].csv()), cells(text)
        assert found == [[close(cell) for cell in row] for row in kept], name


@pytest.mark.parametrize(
    ("folder", "names"),
    [("arms", ("arms",)), ("ablations", ("ablations",)), ("certified_training", ("stability", "certified_training"))],
)
def test_suites_train_what_the_committed_records_were_trained_with(folder: str, names: tuple[str, ...]) -> None:
    suites = [read(BENCHMARKS / "suites" / f"{name}.toml") for name in names]
    asked = [cell.options for suite in suites for cell in suite.cells()]
    records = of(read_records(BENCHMARKS / "results" / folder), "run")
    # Lists are tuples there; an option that a record lacks has its default.
    told = [{name: tuple(v) if isinstance(v, list) else v for name, v in r["options"].items()} for r in records]
    trained = [Options(**options) for options in told]
    assert len(asked) == len(set(asked)) == len(trained) and set(asked) == set(trained)


def test_there_are_studies_in_the_repository() -> None:
    assert {folder.name for folder in STUDIES} >= {"pareto", "small"}
