"""The competition's instances: nothing is asked twice, nothing lost, and answers are counted as the tables say."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.markup import Table
from benchmarks.common.records import Record, Records, of, read_records
from benchmarks.verification import competition, competition_asking, competition_tables
from benchmarks.verification.competition_asking import Ran
from verifiable_relu.campaign import Result, Store
from verifiable_relu.search.outcomes import Reason, Trust, Verdict

pytest.importorskip("matplotlib", reason="needs matplotlib")

SAT = Result(
    *("", "", Verdict.SAT, Reason.REFUTED, "attack", 0.5, Trust.EXACT, -1.0, (Fraction(1),), (0.0,), (1,)),
    query="q",
)
PROVEN = Result("", "", Verdict.UNSAT, Reason.PROVED, "bab", 0.25, Trust.ROUNDED, 0.5, unstable=7, query="q")
BELIEVED = Result("", "", Verdict.UNSAT, Reason.PROVED, "milp", 2.0, Trust.FLOAT, 0.5, query="q")
LATE = Result("", "", Verdict.UNKNOWN, Reason.TIMEOUT, "bab", 9.0, margin=-3.0, unstable=40, query="q")

FINE = Ran(0, "", 1.0, 0.75)
CRASHED = Ran(-11, "Segmentation fault", 1.0, 0.5)

ANSWERS = {"agreed": SAT, "disputed": SAT, "replayed": LATE}
"""Of the fixture's three instances; the first one is wrong."""


class Certify:
    """The command, with an answer for each property file; at one without an answer it ends as it is told to.

    Attributes:
        calls: the name of each property that it was asked about, or ``campaign``.
        jobs: the processes that each call was to have.
    """

    ran = FINE

    def __init__(self, answers: dict[str, Result], end: Callable[[], Ran] = lambda: CRASHED) -> None:
        self.answers, self.end = answers, end
        self.calls: list[str] = []
        self.jobs: list[int] = []

    def __call__(self, patience: float, *arguments: str) -> Ran:
        value = dict(pairwise(arguments))
        spec = Path(value["--spec"])
        many = spec.suffix == ".csv"
        asked = (
            [row[:2] for row in csv.reader(spec.read_text().splitlines())] if many else [[value["--net"], str(spec)]]
        )
        self.calls += ["campaign"] if many else [spec.stem]
        self.jobs.append(int(value["--jobs"]))
        with Store(value["--out"]) as store:
            for onnx, vnnlib in asked:
                answer = self.answers.get(Path(vnnlib).stem)
                if answer is None:
                    return self.end()
                store.append(Result(**{**vars(answer), "onnx": onnx, "vnnlib": vnnlib}))
        return self.ran


def interrupted() -> Ran:
    raise KeyboardInterrupt


@pytest.fixture
def family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A family of three instances: one of undisputed truth, one disputed, one with a replayed counterexample."""
    folder = tmp_path / "data" / "vnncomp" / "shapes"
    folder.mkdir(parents=True)
    names = ("agreed", "disputed", "replayed")
    (folder / "instances.csv").write_text("".join(f"onnx/n.onnx,v/{name}.vnnlib,30\n" for name in names))
    truth = "onnx,vnnlib,ce_check,consensus_verdict,note,best_tool_time,abcrown_time\n"
    truth += "onnx/n.onnx,v/agreed.vnnlib,,unsat,,2,5\nonnx/n.onnx,v/disputed.vnnlib,,unsat,split,90,\n"
    truth += "onnx/n.onnx,v/replayed.vnnlib,strict,unsat,,3,80\n"
    (folder / "truth.csv").write_text(truth)
    monkeypatch.setenv("VERIFIABLE_RELU_DATA", str(tmp_path / "data"))
    return folder


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def ask(out: Path, certify: Certify, monkeypatch: pytest.MonkeyPatch, *more: str) -> list[str]:
    """Measure the family, without a page; what was asked of the command."""
    monkeypatch.setattr(competition_asking, "certify", certify)
    with Records(out) as records:
        competition.measure(competition.SCRIPT.parser().parse_args(["shapes", *more]), records)
    return certify.calls


def stop(out: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> None:
    """Run the script on the family; it is interrupted after the first instance."""
    monkeypatch.setattr(competition_asking, "certify", Certify({"agreed": PROVEN}, interrupted))
    assert competition.SCRIPT.main(["shapes", "--results", str(out), *more]) == 130


def rows(table: Table) -> list[dict[str, Any]]:
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def answers(out: Path, mode: str) -> dict[str, Record]:
    return {Path(r["vnnlib"]).stem: r for r in of(read_records(out), "answer") if r["mode"] == mode}


def test_verdicts_are_judged_by_what_is_known(family: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(out, Certify(ANSWERS), monkeypatch)
    found = rows(competition_tables.families(read_records(out)))
    for row in found:
        counts = ("instances", "sat", "unsat", "undecided", "errors", "wrong", "outvoted")
        assert [row[name] for name in counts] == [3, 2, 0, 1, 0, 1, 1]
    assert [(row["mode"], row["wall s"], row["CPU s"], row["slowest s"]) for row in found] == [
        ("campaign", 1.0, 0.75, 9.0),
        ("process", 3.0, 2.25, 1.0),
    ]
    (row,) = rows(competition_tables.competitors(read_records(out)))
    assert (row["ours"], row["α,β-CROWN"], row["best tool"]) == (1, 1, 2), "within the limit, and not wrong"


def test_an_unsat_is_proven_unless_it_is_trusted_as_floating_point(
    family: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(out, Certify({"agreed": PROVEN, "disputed": BELIEVED, "replayed": SAT}), monkeypatch, "--modes", "process")
    (row,) = rows(competition_tables.families(read_records(out)))
    assert (row["sat"], row["unsat"], row["proven"], row["wrong"]) == (1, 2, 1, 0)
    record = answers(out, "process")["agreed"]
    assert (record["decided_by"], record["unstable"], record["seconds"], record["cpu"]) == ("bab", 7, 1.0, 0.75)


@pytest.mark.parametrize("mode", ["campaign", "process", "cores"])
def test_an_instance_at_which_the_command_crashes_is_an_error_with_its_complaint(
    family: Path, out: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    certify = Certify({"agreed": PROVEN, "disputed": PROVEN})
    ask(out, certify, monkeypatch, "--modes", mode)
    (row,) = rows(competition_tables.families(read_records(out)))
    assert (row["unsat"], row["undecided"], row["errors"]) == (2, 0, 1)
    assert "Segmentation fault" in answers(out, mode)["replayed"]["detail"]
    before = list(certify.calls)
    assert ask(out, certify, monkeypatch, "--modes", mode) == before, "it is not asked again"


def test_processes_that_were_interrupted_go_on_after_the_last_instance(
    family: Path, out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stop(out, monkeypatch, "--modes", "process")
    assert "interrupted; the same command resumes: python -m benchmarks.verification" in capsys.readouterr().err
    before = read_records(out)
    assert len(of(before, "answer")) == 1
    again = ask(out, Certify(ANSWERS), monkeypatch, "--modes", "process")
    assert again == ["disputed", "replayed"] and read_records(out)[: len(before)] == before


def test_a_campaign_that_was_interrupted_goes_on_with_what_it_has_and_tells_no_whole_time(
    family: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop(out, monkeypatch, "--modes", "campaign")
    assert not of(read_records(out), "answer")
    (kept,) = (out / "unfinished").iterdir()
    with Store(kept) as store:
        assert len(store) == 1, "the same folder is given to the command again"
    again = Certify(ANSWERS)
    assert ask(out, again, monkeypatch, "--modes", "campaign") == ["campaign"]
    assert len(of(read_records(out), "answer")) == 3 and not (out / "unfinished").exists()
    (row,) = rows(competition_tables.families(read_records(out)))
    assert row["instances"] == 3 and row["wall s"] is None and row["CPU s"] is None
    assert ask(out, again, monkeypatch, "--modes", "campaign") == ["campaign"], "it is not asked a second time"


def test_the_page_has_every_table(
    family: Path, out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(competition_asking, "certify", Certify({**ANSWERS, "agreed": PROVEN}))
    (out.parent / "peers.csv").write_text(PEERS)
    line = ["shapes", "--results", str(out), "--peers", str(out.parent / "peers.csv")]
    assert competition.SCRIPT.main(line) == 0
    printed = capsys.readouterr().out
    for part in ("Beside other tools", "Beside the competition", "What decided", "What is not decided", "5 rows of"):
        assert part in printed
    assert (out / f"{out.name}.md").read_text(encoding="utf-8") in printed


def test_one_process_and_one_for_each_core_are_compared_on_what_both_solve(
    family: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(competition_asking, "cores", lambda: 3)
    slow = Ran(0, "", 12.0, 11.0)
    for mode, answers, ran in (
        ("process", {"agreed": PROVEN, "disputed": PROVEN, "replayed": LATE}, slow),
        ("cores", {"agreed": PROVEN, "disputed": LATE, "replayed": SAT}, FINE),
    ):
        certify = Certify(answers)
        monkeypatch.setattr(Certify, "ran", ran)
        ask(out, certify, monkeypatch, "--modes", mode)
        assert certify.jobs == [{"process": 1, "cores": 3}[mode]] * 3
    assert competition_tables.shared(read_records(out)).rows == [
        ("shapes", "any time", 3, 2, 2, 1, 12.0, 1.0, 11.0, 0.75),
        ("shapes", "10 s or more", 3, 2, 2, 1, 12.0, 1.0, 11.0, 0.75),
    ]


PEERS = """\
tool,benchmark,onnx,vnnlib,verdict,wall_s,cpu_s,rss_mb,consensus,timeout_s,load
slow,shapes,n.onnx,agreed.vnnlib,unsat,9,8.0,1,unsat,60,1
slow,shapes,n.onnx,replayed.vnnlib,timeout,70,60,1,sat,60,1
quick,shapes,n.onnx,agreed.vnnlib,unsat,2,1.5,1,unsat,60,1
quick,shapes,n.onnx,replayed.vnnlib,unsat,2,1.0,1,sat,60,1
quick,circles,c.onnx,c.vnnlib,sat,2,1.0,1,sat,60,1
"""


def test_beside_other_tools_are_the_instances_that_they_were_asked_about(
    family: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (family.parents[2] / "peers").mkdir()
    (family.parents[2] / "peers" / "peers.csv").write_text(PEERS)
    (family.parents[2] / "peers" / "README.md").write_text("# Peers\n\nTwo cores,\none thread.\n\nMore.\n")
    certify = Certify({"agreed": PROVEN, "replayed": SAT})
    assert ask(out, certify, monkeypatch, "--set", "peers", "--modes", "process") == ["agreed", "replayed"]
    records = read_records(out)
    assert [record["text"] for record in of(records, "source")] == ["Two cores, one thread."]
    found = {(row["family"], row["tool"]): row for row in rows(competition_tables.beside(records, "process", "cpu"))}
    assert {family for family, _ in found} == {"shapes", "all"}, "nothing was asked about circles"
    columns = ("asked", "solved", "its CPU s", "solved by us", "our s", "solved by both", "its CPU s there", "our part")
    expected = {
        "slow": (2, 1, 8.0, 2, 1.5, 1, 8.0, 0.75 / 8),
        "quick": (2, 1, 1.5, 2, 1.5, 1, 1.5, 0.5),
        "all together, best per instance": (2, 1, 1.5, 2, 1.5, 1, 1.5, 0.5),
    }
    for tool, values in expected.items():
        for name in ("shapes", "all"):
            assert tuple(found[name, tool][column] for column in columns) == values, (name, tool)


def test_every_folder_of_the_competitions_form_is_asked_for_certificates(
    family: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = family.parents[1] / "competition_2026" / "pair"
    pair.mkdir(parents=True)
    networks = "\"[('f', 'f.onnx'), ('g', 'g.onnx')]\""
    (pair / "instances.csv").write_text(f"{networks},v/both.vnnlib,30\n")
    (pair / "truth.csv").write_text(f"network,property,votes_sat,votes_unsat\n{networks},v/both.vnnlib,0,3\n")
    monkeypatch.setattr(
        competition_asking, "certify", Certify({"agreed": replace(PROVEN, trust=Trust.CHECKED), "both": SAT})
    )
    with Records(out) as records:
        asked = ["--set", "every", "--modes", "certified", "--count", "1"]
        competition.measure(competition.SCRIPT.parser().parse_args(asked), records)
    found = [tuple(row.values()) for row in rows(competition_tables.every(read_records(out)))]
    assert found == [
        (60.0, "shapes", 1, 1, 1, 0, 1, 0, 1, 0.75, 0, 1, 0),
        (60.0, "pair", 1, 1, 1, 1, 0, 1, 0, 0.75, 0, 1, 0),
        (60.0, "all", 2, 2, 2, 1, 1, 1, 1, 1.5, 0, 2, 0),
    ]


def test_the_command_is_run_and_killed_when_it_does_not_end() -> None:
    ran = competition_asking.certify(60, "--colour", "red")
    assert ran.status == 2 and "--colour" in ran.complaint and ran.cpu > 0 and not ran.crashed
    assert competition_asking.certify(0.001, "--help").crashed
