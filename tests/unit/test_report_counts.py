"""What a page counts: every instance of a campaign once for each method, whatever its files are called."""

from __future__ import annotations

import csv
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from tests.support.scripted import Scripted
from tests.unit.test_report_page import Reader, answer, classifier
from verifiable_relu.campaign import Store, run
from verifiable_relu.campaign.inputs import InstanceFiles, Loader
from verifiable_relu.campaign.result import Result
from verifiable_relu.campaign.store import read_results
from verifiable_relu.certify import main as certify
from verifiable_relu.readers import write_onnx
from verifiable_relu.report.__main__ import main as report
from verifiable_relu.report.summary import (
    CampaignSummary,
    read_campaigns,
    read_expected,
)
from verifiable_relu.search.batch import Verifier
from verifiable_relu.search.outcomes import Reason, Trust, Verdict
from verifiable_relu.spec import Box, Property, Row, write_vnnlib

ONE = Scripted(answer)


@dataclass(frozen=True)
class Other(Scripted):
    """Another method with the same answers."""

    name = "other"


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
            entries = [InstanceFiles(path, path.parent / "net.onnx", 9.0) for path in files[first : first + batch]]
            run([loader.read(entry) for entry in entries], verifier, store)


def rows(out: Path) -> list[dict[str, str]]:
    with (out / "results.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def summary(*folders: Path, expected: Path | None = None) -> CampaignSummary:
    return CampaignSummary(read_campaigns(folders), read_expected(expected) if expected else ())


def page(out: Path) -> tuple[CampaignSummary, Reader]:
    assert report([str(out)]) == 0
    return summary(out), Reader((out / "report.html").read_text())


def text(reader: Reader) -> str:
    return " ".join(data for _, data in reader.texts)


def counted(found: CampaignSummary) -> list[dict[str, int]]:
    return [group.counts for group in found.methods]


@pytest.mark.thorough
@pytest.mark.parametrize("batch", [3, *(pytest.param(n, marks=pytest.mark.seldom) for n in (1, 100))])
def test_twins_count_and_have_records(files: list[Path], tmp_path: Path, batch: int) -> None:
    out = tmp_path / "out"
    asked(files, out, batch=batch)
    found, shown = page(out)
    assert counted(found) == [{"unsat": 4, "sat": 4}] and text(shown).count("8 instances: 4 unsat, 4 sat") == 1
    assert {Path(result.vnnlib) for result in read_results(out)} == set(files)
    for row in rows(out):
        name = row["counterexample"]
        assert bool(name) == (row["answer"] == "sat")
        assert not name or (out / name).read_text().count("\n") > 64
    # Whoever asks again finds every record, and writes none.
    before = (out / "records.jsonl").read_bytes()
    asked(files, out, batch=batch)
    assert (out / "records.jsonl").read_bytes() == before


@pytest.mark.thorough
@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.seldom)])
def test_every_row_of_the_table_counts(files: list[Path], tmp_path: Path, jobs: int) -> None:
    """The command, in one process and in several: the half of the list that is violated is half of the page."""
    (tmp_path / "broken.vnnlib").write_text("(assert")
    table = [f"net.onnx,{path.name},9" for path in [*files, tmp_path / "broken.vnnlib"]]
    (tmp_path / "instances.csv").write_text("\n".join(table) + "\n")
    for _ in range(2 if jobs == 1 else 1):
        command = ["--spec", str(tmp_path / "instances.csv"), "--method", "crown", "--out", str(tmp_path / "out")]
        assert certify([*command, "--quiet", "--jobs", str(jobs)]) == 2
        listed = rows(tmp_path / "out")
        found, shown = page(tmp_path / "out")
        assert len(listed) == 9 and f"{len(listed)} instances: " in text(shown)
        (counts,) = counted(found)
        assert counts == {a: sum(row["answer"] == a for row in listed) for a in {row["answer"] for row in listed}}


@pytest.mark.thorough
def test_two_methods_are_two_columns(files: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    asked(files, out, ONE)
    asked(files[:2], out, TWO)
    found, shown = page(out)
    assert counted(found) == [{"unsat": 4, "sat": 4}, {"unsat": 2}]
    assert "8 instances, 2 methods." in text(shown) and "(asked 2): 2 unsat" in text(shown)
    assert sum(data.startswith("answer, ") for tag, data in shown.texts if tag == "th") == 2
    assert sorted(len(results) for results in found.instances.values()) == [1] * 6 + [2] * 2
    assert len(shown.all("article")) == 4
    asked(files, out, TWO)
    found, shown = page(out)
    assert counted(found) == [{"unsat": 4, "sat": 4}] * 2 and "8 instances, 2 methods." in text(shown)
    assert len(shown.all("article")) == 4 and {method for method, _ in found.stages} == {
        g.method for g in found.methods
    }


def test_a_thousand_instances_with_twins_of_two_campaigns_stand_side_by_side(tmp_path: Path) -> None:
    """Every row counts, in both campaigns, whose folders and paths differ; verdicts are compared with expected ones."""
    sat, unsat = Verdict.SAT, Verdict.UNSAT
    for name, stronger in (("weak", False), ("strong", True)):
        with Store(tmp_path / name) as store:
            for number in range(1_000):
                # Each question has a twin; 1 in 4 is violated, and the weak method leaves 1 in 10 undecided.
                question, given = number // 2, sat if number // 2 % 4 == 0 else unsat
                decided = stronger or question % 10
                reason = Reason.TIMEOUT if not decided else Reason.REFUTED if given is sat else Reason.PROVED
                result = Result(
                    f"{name}/net.onnx", f"{name}/p{number}.vnnlib", given if decided else Verdict.UNKNOWN, reason, "m",
                    0.1 if stronger else 0.3, Trust.EXACT if decided else None, 0.0, query=f"{question}",
                    witness=(Fraction(1, 3),) if given is sat else None, shape=(1,), timeout=9.0, verifier="M()",
                    outputs=(1.0,) if given is sat else None,
                )  # fmt: skip
                store.append(result)
    rows = [f"net.onnx,p{n}.vnnlib.gz,9,{'sat' if n // 2 % 4 == 0 or n == 7 else 'unsat'}" for n in range(1_000)]
    (tmp_path / "list.csv").write_text("\n".join(rows))
    found = summary(tmp_path / "weak", tmp_path / "strong", expected=tmp_path / "list.csv")
    weak, strong = counted(found)
    assert strong == {"unsat": 750, "sat": 250} and sum(weak.values()) == 1_000 and weak["timed-out"] == 100
    (pair,) = found.pairs
    assert pair.names == ("m in weak", "m in strong") and len(pair.results) == 1_000 and pair.contrary == []
    assert (len(pair.both), len(pair.only(0)), len(pair.only(1))) == (900, 0, 100)
    assert pair.time_ratio == pytest.approx(3)
    assert [row[1:] for row in found.expected_counts] == [(1_000, 899, 1, 100), (1_000, 999, 1, 0)]
    assert found.notes == [
        "Expected verdicts: 1000 rows, 1000 match an instance.",
        "1 instance with another verdict than expected: p7.vnnlib of net.onnx is unsat, expected sat.",
    ]
    assert len(found.instances) == 1_000


@pytest.mark.thorough
def test_rows_that_cannot_be_read_count_once_in_each_campaign(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two campaigns of one list, asked from two folders, of which one is resumed in the other, mended and damaged."""
    bad = [tmp_path / "bad.vnnlib", tmp_path / "deep" / "bad.vnnlib"]
    (tmp_path / "deep").mkdir()
    shutil.copy(tmp_path / "net.onnx", tmp_path / "deep")
    for path in bad:
        path.write_text("(assert")

    def given(folder: Path, out: str, verifier: Verifier, onnx: bool = True) -> None:
        monkeypatch.chdir(folder)
        names = [Path(os.path.relpath(path)) for path in [*files, *bad]]
        entries = [InstanceFiles(path, path.parent / "net.onnx" if onnx else None, 9.0) for path in names]
        with Store(tmp_path / out) as store:
            run([Loader(arithmetic="real").read(entry) for entry in entries], verifier, store)

    def pages() -> list[CampaignSummary]:
        one, two = tmp_path / "one", tmp_path / "two"
        found = [summary(one), summary(two), summary(one, two), summary(two, one)]
        assert all(len(each.instances) == len(group.results) == 10 for each in found for group in each.methods)
        return found

    every = {"unsat": 4, "sat": 4, "unknown": 2}
    given(tmp_path, "one", ONE)
    given(tmp_path / "deep", "two", TWO)
    given(tmp_path, "two", TWO)
    for found in pages():
        assert all(counts == every for counts in counted(found))
    # One campaign is asked again once a file is mended, by another path.
    shutil.copy(files[0], bad[0])
    given(tmp_path / "deep", "one", ONE)
    for found in pages():
        assert {"unsat": 5, "sat": 4, "unknown": 1} in counted(found) or len(counted(found)) == 1
    # The network of a property that cannot be read is not looked for.
    files[0].write_text("(assert")
    given(tmp_path, "two", TWO, onnx=False)
    assert len(pages()) == 4


COMPETITION = """category,onnx,vnnlib,prepare,result,time
c,./b/c/onnx/net.onnx,./b/c/vnnlib/p0.vnnlib,0.1,{0},1.2
c,./b/c/onnx/net.onnx,./b/c/vnnlib/p1.vnnlib,0.1,{1},1.2
c,./b/c/onnx/net.onnx,./b/c/vnnlib/p2.vnnlib,0.1,timeout,9
c,./b/d/onnx/net.onnx,./b/d/vnnlib/p0.vnnlib,0.1,{1},1.2
"""


@pytest.mark.parametrize("words", [("unsat", "sat"), ("holds", "violated"), ("HOLDS", " violated ")])
@pytest.mark.parametrize("category", [True, False])
def test_the_results_of_the_competition_are_expected_verdicts(
    words: tuple[str, str], category: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Store(tmp_path / "out") as store:
        for number in range(3):
            names = "c/onnx/net.onnx", f"c/vnnlib/p{number}.vnnlib"
            known = {"trust": Trust.EXACT, "query": str(number), "verifier": "M()"}
            store.append(Result(*names, Verdict.UNSAT, Reason.PROVED, "m", 0.1, **known))  # type: ignore[arg-type]
    table = tmp_path / "theirs.csv"
    lines = COMPETITION.format(*words).splitlines()
    table.write_text("\n".join(line if category else line.partition(",")[2] for line in lines))
    assert report([str(tmp_path / "out"), "--expected", str(table)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == [
        "Expected verdicts: 4 rows, 3 match an instance, 1 of these without a verdict.",
        "1 instance with another verdict than expected: p1.vnnlib of net.onnx is unsat, expected sat.",
    ]
    assert [row[1:] for row in summary(tmp_path / "out", expected=table).expected_counts] == [(2, 1, 1, 0)]
    # Of files of other names, nothing is said of their verdicts, and that is said.
    table.write_text(table.read_text().replace("net.onnx", "other.onnx"))
    assert report([str(tmp_path / "out"), "--expected", str(table)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "Expected verdicts: 4 rows, 0 match an instance."
    # Rows about the same files that contradict each other are no expected verdict.
    table.write_text(f"net.onnx,p1.vnnlib,9,{words[0]}\nnet.onnx,p1.vnnlib,9,{words[1]}\n")
    assert report([str(tmp_path / "out"), "--expected", str(table)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == (
        "Expected verdicts: 2 rows, 2 match an instance, 1 instance with rows that contradict each other."
    )
    table.write_text("a,b,c\n")
    assert report([str(tmp_path / "out"), "--expected", str(table)]) == 2
    assert "no row has a network and a property" in capsys.readouterr().err
