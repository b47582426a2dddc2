"""The pages of the studies in the repository follow from the records beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.common.records import SUFFIX, of, read_records, upgraded
from benchmarks.study import tables
from benchmarks.study.__main__ import STUDIES
from benchmarks.study.claims import outcomes
from benchmarks.study.frames import Study
from benchmarks.study.suite import Cell, read

NAMES = sorted(path.name.removesuffix(SUFFIX) for path in STUDIES.glob(f"*{SUFFIX}"))
PAGE = (Path(__file__).parents[2] / "docs" / "study.md").read_text(encoding="utf-8")


def study(name: str) -> Study:
    return Study(name, read(name)[0], read_records(STUDIES / f"{name}{SUFFIX}"))


def test_there_are_studies() -> None:
    assert {"e1", "e2", "small"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_study_has_its_page(name: str) -> None:
    found = study(name)
    trainings = of(found.records, "training")
    cells = [Cell(*(each[field] for field in Cell._fields)) for each in trainings]
    assert len(set(cells)) == len(cells) and set(cells) <= set(found.suite.cells())
    assert all(upgraded(each["key"])["method"] for each in trainings)
    assert "## Accuracy" in tables.page_of(found, [])
    # The page of findings counts claims.
    readings = [each.reading for each in outcomes(found)]
    shown, equivalent = readings.count("shown"), sum(each.startswith("equivalent") for each in readings)
    assert f"| `{name}` | {len(readings)} | {shown} | {equivalent} |" in PAGE
