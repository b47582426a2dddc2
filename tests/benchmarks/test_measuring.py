"""What the scripts of verification/ and speed/ measure: nothing twice, nothing lost, and counted as the tables say."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.records import Record, Records, read_records
from benchmarks.speed import memory, startup
from benchmarks.verification import shipped_networks


def asked(study: Any, *arguments: str) -> argparse.Namespace:
    found: argparse.Namespace = study.SCRIPT.parser().parse_args(arguments)
    return found


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
    text = startup.page(read_records(tmp_path)).text
    assert "`--help`: 0.20 s, within the limit of 0.5 s." in text
    assert "importing torch (median of the paired differences): 0.50 s, within the limit of 2 s." in text


def test_memory_has_a_cell_for_each_limit() -> None:
    about = {"kind": "run", "network": "n", "method": "crown", "at_most": 20, "balls": 8, "eps": 0.01}
    found = {"MiB": 41.6, "seconds": 2.4, "verdicts": {"unknown": 3, "unsat": 5}}
    text = memory.page([{**about, **found, "limit": "64M"}]).text
    assert "| n | 8 of 0.01 | `crown` | 42 MiB, 2 s, 3 unknown, 5 unsat | – | – |" in text
