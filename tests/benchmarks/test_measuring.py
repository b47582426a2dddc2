"""What the scripts of verification/ and speed/ measure: nothing twice, nothing lost, and counted as the tables say."""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.common.records import Record, Records, of, read_records
from benchmarks.speed import activation_cost, activation_steps, memory, startup
from benchmarks.verification import competition, shipped_networks, solver_scaling


def asked(study: Any, *arguments: str) -> argparse.Namespace:
    found: argparse.Namespace = study.STUDY.parser().parse_args(arguments)
    return found


class Certify:
    """The command, with answers by property file; it is interrupted at the file ``stop``."""

    def __init__(self, answers: dict[str, str], stop: str = "") -> None:
        self.answers, self.stop = answers, stop
        self.calls: list[str] = []

    def __call__(self, *arguments: str) -> tuple[str, float, float]:
        spec = Path(arguments[arguments.index("--spec") + 1])
        self.calls.append(spec.name)
        if spec.name == self.stop:
            raise KeyboardInterrupt
        if spec.suffix == ".csv":
            out = Path(arguments[arguments.index("--out") + 1])
            out.mkdir()
            with spec.open() as file, (out / "results.csv").open("w") as table:
                writer = csv.writer(table)
                writer.writerow(("onnx", "vnnlib", "answer", "seconds"))
                for onnx, vnnlib, _ in csv.reader(file):
                    writer.writerow((onnx, vnnlib, self.answers[Path(vnnlib).name], 0.5))
            return "", 2.0, 3.0
        return f"{self.answers[spec.name]}\n", 1.0, 0.75


@pytest.fixture
def family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A family of three instances: one of undisputed truth, one disputed, one with a replayed counterexample."""
    folder = tmp_path / "vnncomp" / "shapes"
    folder.mkdir(parents=True)
    names = ("agreed", "disputed", "replayed")
    (folder / "instances.csv").write_text("".join(f"n.onnx,{name}.vnnlib,30\n" for name in names))
    truth = "onnx,vnnlib,ce_check,consensus_verdict,note\n"
    truth += "n.onnx,agreed.vnnlib,,unsat,\nn.onnx,disputed.vnnlib,,unsat,split\nn.onnx,replayed.vnnlib,strict,unsat,\n"
    (folder / "truth.csv").write_text(truth)
    monkeypatch.setenv("VERIFIABLE_RELU_DATA", str(tmp_path))
    return folder


ANSWERS = {"agreed.vnnlib": "sat", "disputed.vnnlib": "sat", "replayed.vnnlib": "timed-out"}


def test_verdicts_are_judged_by_what_is_known(family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(competition, "certify", Certify(ANSWERS))
    assert competition.STUDY.main(["shapes", "--results", str(tmp_path / "out")]) == 0
    table = competition.table(read_records(tmp_path / "out"))
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    for row in rows:
        counts = ("instances", "sat", "unsat", "undecided", "wrong", "outvoted")
        assert [row[name] for name in counts] == [3, 2, 0, 1, 1, 1]
    assert [(row["mode"], row["wall s"], row["CPU s"]) for row in rows] == [("campaign", 2, 3), ("process", 3, 2.25)]


def test_a_family_that_was_interrupted_goes_on_after_its_last_instance(
    family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["shapes", "--results", str(tmp_path / "out")]
    monkeypatch.setattr(competition, "certify", Certify(ANSWERS, stop="disputed.vnnlib"))
    assert competition.STUDY.main(line) == 130
    assert "interrupted; the same command resumes: python -m benchmarks.verification" in capsys.readouterr().err
    before = read_records(tmp_path / "out")
    again = Certify(ANSWERS)
    monkeypatch.setattr(competition, "certify", again)
    assert competition.STUDY.main(line) == 0
    assert again.calls == ["disputed.vnnlib", "replayed.vnnlib"]
    found = read_records(tmp_path / "out")
    assert found[: len(before)] == before and len(of(found, "answer")) == 6
    assert competition.STUDY.main(line) == 0 and len(again.calls) == 2


def test_a_missing_family_is_one_line(family: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert competition.STUDY.main(["circles", "--results", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "circles" in error and error.count("\n") == 1


def test_solvers_answer_each_open_question_once(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="needs scikit-learn")
    chosen = asked(solver_scaling, "--images", "1", "--limit", "1", "--allowance", "2")
    for _ in range(2):
        with Records(tmp_path) as records:
            solver_scaling.measure(chosen, records)
        answers = of(read_records(tmp_path), "answer")
        places = [(record["method"], record["image"], record["radius"]) for record in answers]
        assert answers and len(set(places)) == len(places)
    table = solver_scaling.table(answers)
    column = list(table.columns).index("questions")
    assert sum(int(str(row[column])) for row in table.rows) == len(answers)


def answered(method: str, certified: int, clean: int = 90, refuted: int = 0, undecided: int = 0) -> Record:
    counts = {"certified": certified, "refuted": refuted, "undecided": undecided, "clean": clean}
    return {"network": "n", "eps": "0.1", "images": 100, "method": method, "unstable": 2.5, "seconds": 1.0, **counts}


def test_shares_of_the_shipped_networks() -> None:
    records = [answered("attack", 0, refuted=5), *(answered(m, 80, undecided=4) for m in shipped_networks.METHODS[1:])]
    assert not shipped_networks.table(records).rows, "a method is missing"
    records += [answered(shipped_networks.joint(lam), 40, clean=80) for lam in shipped_networks.JOINT]
    table = shipped_networks.table(records)
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert (row["clean"], row["attacked"], row["certified, auto"], row["undecided"]) == (0.9, 0.85, 0.8, 0.04)
    table = shipped_networks.joint_table(records)
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert (row["certified, crown"], row["also for λ ≥ 160"]) == (80, 0.5)


def test_starting_up_is_compared_with_importing_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(([0.1, 0.2, 0.9], [1.0, 2.0, 3.0], [1.5, 2.25, 4.0], [9.0, 9.0, 9.0]))
    monkeypatch.setattr(startup, "timed", lambda commands, runs: dict(zip(commands, seconds, strict=True)))
    with Records(tmp_path) as records:
        startup.measure(asked(startup, "--runs", "3"), records)
    text = startup.page(read_records(tmp_path), tmp_path).markdown()
    assert "`--help`: 0.20 s, within the limit of 0.5 s." in text
    assert "importing torch (median of the paired differences): 0.50 s, within the limit of 2 s." in text


def test_activations_take_turns_and_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    steps = [lambda name=name: calls.append(name) for name in activation_steps.ACTIVATIONS]  # type: ignore[misc]
    monkeypatch.setattr(activation_steps, "cases", lambda: {"network": lambda: steps})
    for _ in range(2):
        with Records(tmp_path) as records:
            activation_cost.measure(asked(activation_cost, "--pairs", "2"), records)
        assert [record["activation"] for record in of(records.all, "cost")] == list(activation_steps.ACTIVATIONS)
    turns = np.array(calls).reshape(-1, len(activation_steps.ACTIVATIONS))
    assert (turns == list(activation_steps.ACTIVATIONS)).all() and len(turns) == 5 + 2, "five turns to warm up"


def test_memory_has_a_cell_for_each_limit(tmp_path: Path) -> None:
    about = {"kind": "run", "network": "n", "method": "crown", "at_most": 20, "balls": 8, "eps": 0.01}
    found = {"MiB": 41.6, "seconds": 2.4, "verdicts": {"unknown": 3, "unsat": 5}}
    text = memory.page([{**about, **found, "limit": "64M"}], tmp_path).markdown()
    assert "| n | 8 of 0.01 | `crown` | 42 MiB, 2 s, 3 unknown, 5 unsat | – | – |" in text
