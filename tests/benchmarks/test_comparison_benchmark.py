"""benchmarks/training/comparison.py: its tables say what the records hold."""

import math

import numpy as np
import pytest

from benchmarks.common.measures import reading
from benchmarks.training import comparison_tables as tables
from verifiable_relu.report.estimate import Estimate


def bounds_record(arm: str, seed: int, certified: int, neurons: float) -> dict[str, object]:
    answers = {"attacked": 9, "ibp": 1, "crown": certified, "alpha-crown": certified, "unstable": [neurons, 1.0]}
    title = {"run": f"{arm}{seed}", "data": "mnist", "architecture": "MLP", "arm": arm, "seed": seed}
    return {**title, "images": 100, "clean": 98, "eps": dict.fromkeys(("0.01", "0.02", "0.03"), answers)}


def test_differences_are_paired_by_seed() -> None:
    # Every seed differs by about the same small amount; unpaired intervals would hide it.
    records = [bounds_record("relu", seed, 2 + 3 * seed, 50.0 + 20 * seed) for seed in range(3)]
    records += [bounds_record("lambda-gelu", seed, more, 52 + 20.5 * seed) for seed, more in enumerate((12, 15, 19))]
    table = tables.difference_table(records)
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert row["λ-GELU hardened minus"] == "relu"
    assert row["Δ certified, alpha-crown"].mean == pytest.approx((10 + 10 + 11) / 300)
    assert row["Δ unstable"].mean == pytest.approx(2.5)
    assert (row["certified"], row["unstable neurons"]) == ("more", "more")
    (sentence,) = tables.answer(table)
    assert "more images certified (α-CROWN) in 3, fewer in 0" in sentence
    assert "fewer unstable neurons in 0, more in 3" in sentence
    assert "unstable neurons from +2.5 to +2.5" in sentence


def test_what_an_interval_shows() -> None:
    def said(mean: float, half: float, n: int = 3) -> str:
        return str(reading(Estimate(mean, half, n), "more", "fewer"))

    assert said(0.2, 0.1) == "more"
    assert said(-0.2, 0.1) == "fewer"
    assert said(0.1, 0.2) == "not shown"
    assert said(0.2, 0.0, n=2) == "not shown"
    assert said(0.2, 0.0) == "not shown"
    assert said(0.2, math.nan, n=1) == "not shown"


def test_an_undecided_question_counts_with_the_limit() -> None:
    def replied(verdict: str, seconds: float, by_bounds: bool = False) -> dict[str, object]:
        return {"verdict": verdict, "seconds": seconds, "by_bounds": by_bounds, "unstable": 4}

    title = {"run": "relu0", "data": "mnist", "architecture": "MLP", "arm": "relu", "seed": 0}
    answers = [replied("unsat", 1.0, True), replied("sat", 2.0), replied("unknown", 0.5)]
    record = {**title, "eps": "0.03", "limit": 5.0, "images": [1, 2, 4], "answers": {"milp": answers, "smt": answers}}
    table = tables.solver_table([record])
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert (row["safe"], row["unsafe"], row["undecided"], row["by bounds"]) == (1, 1, 1, 1)
    assert row["mean s"] == pytest.approx(np.mean([1, 2, 5]))
    assert row["mean s, bounds undecided"] == pytest.approx(3.5)
