"""benchmarks/comparison.py: nothing is asked twice, a killed run goes on, and the figures say what the records hold."""

import importlib
import json
import math
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from verifiable_relu.errors import InputError
from verifiable_relu.report import Estimate


@pytest.fixture
def comparison(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("comparison")


def test_a_torn_line_is_dropped_and_the_rest_is_known(comparison: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "bounds.jsonl"
    first = comparison.Lines(path, ("run", "images"))
    first.append({"run": "a", "images": 3, "clean": 2})
    with path.open("a") as file:
        file.write('{"run": "b", "ima')
    again = comparison.Lines(path, ("run", "images"))
    assert {"run": "a", "images": 3} in again
    assert {"run": "a", "images": 4} not in again
    assert {"run": "b", "images": 3} not in again
    again.append({"run": "b", "images": 3})
    assert [json.loads(line)["run"] for line in path.read_text().splitlines()] == ["a", "b"]


def test_a_file_of_something_else_is_refused(comparison: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "bounds.jsonl"
    path.write_text('{"other": 1}\n')
    with pytest.raises(InputError, match="no records of a comparison"):
        comparison.Lines(path, ("run",))


def bounds_record(arm: str, seed: int, certified: int, neurons: float) -> dict[str, object]:
    answers = {"attacked": 9, "ibp": 1, "crown": certified, "alpha-crown": certified, "unstable": [neurons, 1.0]}
    title = {"run": f"{arm}{seed}", "data": "mnist", "architecture": "MLP", "arm": arm, "seed": seed}
    return {**title, "images": 100, "clean": 98, "eps": dict.fromkeys(("0.01", "0.02", "0.03"), answers)}


def test_differences_are_paired_by_seed(comparison: ModuleType) -> None:
    # Every seed differs by about the same small amount; unpaired intervals would hide it.
    records = [bounds_record("relu", seed, 2 + 3 * seed, 50.0 + 20 * seed) for seed in range(3)]
    records += [bounds_record("lambda-gelu", seed, more, 52 + 20.5 * seed) for seed, more in enumerate((12, 15, 19))]
    table = comparison.difference_table(records)
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert row["λ-GELU hardened minus"] == "relu"
    assert row["Δ certified, alpha-crown"].mean == pytest.approx((10 + 10 + 11) / 300)
    assert row["Δ unstable"].mean == pytest.approx(2.5)
    assert (row["certified"], row["unstable neurons"]) == ("more", "more")
    (sentence,) = comparison.answer(table)
    assert "more images certified (α-CROWN) in 3, fewer in 0" in sentence
    assert "fewer unstable neurons in 0, more in 3" in sentence
    assert "unstable neurons from +2.5 to +2.5" in sentence


def test_what_an_interval_shows(comparison: ModuleType) -> None:
    def said(mean: float, half: float, n: int = 3) -> str:
        return str(comparison.reading(Estimate(mean, half, n), "more", "fewer"))

    assert said(0.2, 0.1) == "more"
    assert said(-0.2, 0.1) == "fewer"
    assert said(0.1, 0.2) == "not shown"
    assert said(0.2, 0.0, n=2) == "not shown"
    assert said(0.2, 0.0) == "not shown"
    assert said(0.2, math.nan, n=1) == "not shown"


def test_an_undecided_question_counts_with_the_limit(comparison: ModuleType) -> None:
    def replied(verdict: str, seconds: float, by_bounds: bool = False) -> dict[str, object]:
        return {"verdict": verdict, "seconds": seconds, "by_bounds": by_bounds, "unstable": 4}

    title = {"run": "relu0", "data": "mnist", "architecture": "MLP", "arm": "relu", "seed": 0}
    answers = [replied("unsat", 1.0, True), replied("sat", 2.0), replied("unknown", 0.5)]
    record = {**title, "eps": "0.03", "limit": 5.0, "images": [1, 2, 4], "answers": {"milp": answers, "smt": answers}}
    table = comparison.solver_table([record])
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert (row["safe"], row["unsafe"], row["undecided"], row["by bounds"]) == (1, 1, 1, 1)
    assert row["mean s"] == pytest.approx(np.mean([1, 2, 5]))
    assert row["mean s, bounds undecided"] == pytest.approx(3.5)
