"""What the scripts of verification/ and speed/ measure: nothing twice, nothing lost, and counted as the tables say."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.common.records import Record, Records, of, read_records
from benchmarks.speed import activation_cost, activation_steps, memory, startup
from benchmarks.verification import shipped_networks, solver_scaling


def asked(study: Any, *arguments: str) -> argparse.Namespace:
    found: argparse.Namespace = study.STUDY.parser().parse_args(arguments)
    return found


def test_solvers_answer_each_open_question_once(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="needs scikit-learn")
    few = ("--widths", "24", "--images", "1", "--limit", "1", "--allowance", "1")
    chosen = asked(solver_scaling, *few, "--methods", "bab", "milp", "smt")
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
    assert (row["clean"], row["not refuted"], row["certified, auto"], row["undecided"]) == (0.9, 0.85, 0.8, 0.04)
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
