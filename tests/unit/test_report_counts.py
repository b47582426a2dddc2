"""What a page counts: every instance of a campaign once for each method, whatever its files are called."""

from __future__ import annotations

import csv
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.support.scripted import Scripted
from tests.unit.test_report_page import Reader, answer, classifier
from verifiable_relu.campaign import Store, run
from verifiable_relu.campaign.inputs import Entry, Loader
from verifiable_relu.campaign.store import read_results
from verifiable_relu.certify import main as certify
from verifiable_relu.network import write_onnx
from verifiable_relu.report import campaign
from verifiable_relu.report.__main__ import main as report
from verifiable_relu.report.page import Found, of_source
from verifiable_relu.spec import Box, Property, Row, write_vnnlib
from verifiable_relu.verifiers.base import Verifier

ONE = Scripted(answer)


@dataclass(frozen=True)
class Other(Scripted):
    """Another method with the same answers."""


TWO = Other(answer)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Four properties, two of which are violated, and for each a twin: another file that asks the same."""
    write_onnx(classifier(), tmp_path / "net.onnx")
    image = np.linspace(0.2, 0.8, 64).reshape(8, 8)
    image[:, :4] += 0.1
    made = []
    for number, eps in enumerate((0.01, 0.02, 0.2, 0.25)):
        unsafe = ((Row(((0, 1), (1, -1)), 0),),)
        path = tmp_path / f"p{number}.vnnlib"
        write_vnnlib(Property(Box(image.ravel() - eps, image.ravel() + eps), unsafe), path, comments=(f"eps {eps}",))
        made += [path, Path(shutil.copy(path, tmp_path / f"twin{number}.vnnlib"))]
    return made


def asked(files: Sequence[Path], out: Path, verifier: Verifier = ONE, batch: int = 100) -> None:
    loader = Loader()
    with Store(out) as store:
        for first in range(0, len(files), batch):
            entries = [Entry(path, path.parent / "net.onnx", 9.0) for path in files[first : first + batch]]
            run([loader.read(entry) for entry in entries], verifier, store)


def rows(out: Path) -> list[dict[str, str]]:
    with (out / "results.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def page(out: Path) -> tuple[Found, str]:
    assert report([str(out)]) == 0
    return of_source(out, 60), " ".join(text for _, text in Reader((out / "report.html").read_text()).texts)


def counted(found: Found) -> list[dict[str, int]]:
    shares = next(section.shares for section in found.sections if section.id == "answers")
    return [dict(counts) for counts in shares.values()]


@pytest.mark.parametrize("batch", [1, 3, 100])
def test_twins_count_and_have_records(files: list[Path], tmp_path: Path, batch: int) -> None:
    out = tmp_path / "out"
    asked(files, out, batch=batch)
    found, text = page(out)
    assert counted(found) == [{"unsat": 4, "sat": 4}] and text.count("8 instances: 4 verified, 4 violated") == 1
    assert {Path(result.vnnlib) for result in read_results(out)} == set(files)
    for row in rows(out):
        name = row["counterexample"]
        assert bool(name) == (row["answer"] == "sat")
        assert not name or (out / name).read_text().count("\n") > 64
    # Whoever asks again finds every record, and writes none.
    before = (out / "records.jsonl").read_bytes()
    asked(files, out, batch=batch)
    assert (out / "records.jsonl").read_bytes() == before


@pytest.mark.parametrize("jobs", [1, 2])
def test_every_row_of_the_table_counts(files: list[Path], tmp_path: Path, jobs: int) -> None:
    """The command, in one process and in several: the half of the list that is violated is half of the page."""
    (tmp_path / "broken.vnnlib").write_text("(assert")
    table = [f"net.onnx,{path.name},9" for path in [*files, tmp_path / "broken.vnnlib"]]
    (tmp_path / "instances.csv").write_text("\n".join(table) + "\n")
    for _ in range(2 if jobs == 1 else 1):
        command = ["--spec", str(tmp_path / "instances.csv"), "--method", "crown", "--out", str(tmp_path / "out")]
        assert certify([*command, "--quiet", "--jobs", str(jobs)]) == 2
        listed = rows(tmp_path / "out")
        found, text = page(tmp_path / "out")
        assert len(listed) == 9 and f"{len(listed)} instances: " in text
        (counts,) = counted(found)
        assert counts == {a: sum(row["answer"] == a for row in listed) for a in {row["answer"] for row in listed}}


def test_two_methods_are_two_columns(files: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    asked(files, out, ONE)
    asked(files[:2], out, TWO)
    found, text = page(out)
    assert counted(found) == [{"unsat": 4, "sat": 4}, {"unsat": 2}]
    assert "8 instances, 2 methods." in text and "(asked 2): 2 verified" in text
    (table,) = next(section.tables for section in found.sections if section.id == "instances")
    assert len(table.rows) == 8 and table.columns[:2] == ("property", "network")
    answers = [column for column, name in enumerate(table.columns) if name.startswith("answer, ")]
    assert len(answers) == 2
    assert sorted(str(row[answers[1]]) for row in table.rows) == ["None"] * 6 + ["unsat"] * 2
    shown = next(section for section in found.sections if section.id == "counterexamples")
    asked(files, out, TWO)
    again, text = page(out)
    assert counted(again) == [{"unsat": 4, "sat": 4}] * 2 and "8 instances, 2 methods." in text
    both = next(section for section in again.sections if section.id == "counterexamples")
    assert len(both.gallery) == len(shown.gallery) == 4
    measures = next(section for section in again.sections if section.id == "measures")
    assert {row[0] for row in measures.tables[0].rows} == set(campaign.by_method(again.results))


def test_what_cannot_be_read_was_given_to_every_method(files: list[Path], tmp_path: Path) -> None:
    out, bad = tmp_path / "out", tmp_path / "bad.vnnlib"
    bad.write_text("(assert")
    for method in (ONE, TWO):
        asked([*files, bad], out, method)
    found, text = page(out)
    assert counted(found) == [{"unsat": 4, "sat": 4, "unknown": 1}] * 2 and "9 instances, 2 methods." in text
    # Once the file can be read, its answers count and the complaint does not.
    shutil.copy(files[0], bad)
    for method in (ONE, TWO):
        asked([*files, bad], out, method)
    assert counted(page(out)[0]) == [{"unsat": 5, "sat": 4}] * 2


def test_a_campaign_that_is_resumed_elsewhere_counts_its_files_once(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    (tmp_path / "deep").mkdir()
    for folder in (tmp_path, tmp_path / "deep", tmp_path):
        monkeypatch.chdir(folder)
        asked([Path(os.path.relpath(path)) for path in files], out)
        found, _ = page(out)
        assert counted(found) == [{"unsat": 4, "sat": 4}]
        assert {result.vnnlib for result in found.results} == {row["vnnlib"] for row in rows(out)}
    # A later list is no reason to forget an earlier one.
    asked([Path(os.path.relpath(path)) for path in files[:3]], out)
    assert counted(page(out)[0]) == [{"unsat": 4, "sat": 4}]


def test_figures_for_papers_count_as_the_page_does(files: list[Path], tmp_path: Path) -> None:
    asked(files, tmp_path / "out")
    found, _ = page(tmp_path / "out")
    table = campaign.by_network(found.results)
    assert [row[2] for row in table.rows] == [8]
    assert not re.search("not asked", str(table.rows))
