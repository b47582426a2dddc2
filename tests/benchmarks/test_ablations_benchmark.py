"""benchmarks/training/ablations.py: its tables say what the records hold."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.training import ablations
from benchmarks.training.ablation_settings import BASE, trained
from verifiable_relu.train.options import Options


def record(options: Options, clean: float, **more: Any) -> dict[str, Any]:
    results = {"clean": clean, "lam_learned": [1.2, 1.5], "proven_logit_change": 0.1, **more}
    return {"options": asdict(options), "results": results}


def test_differences_are_from_the_defaults_paired_by_seed() -> None:
    base = [record(replace(BASE, seed=seed), 0.8 + 0.05 * seed) for seed in range(3)]
    late = [record(replace(BASE, switch=0.5, seed=seed), 0.81 + 0.05 * seed) for seed in (2, 0, 1)]
    table = ablations.tables([*late, *base])["Switch point"]
    rows = {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert set(rows) == {"25%", "50%"} and rows["25%"]["Δ clean"] is None
    assert rows["50%"]["Δ clean"].mean == pytest.approx(0.01)
    assert rows["50%"]["Δ clean"].half < 1e-6 < rows["50%"]["clean"].half
    assert rows["50%"]["seeds"] == 3 and rows["50%"]["Δ certified"] is None
    assert rows["50%"]["drift"].mean == pytest.approx((1.6931472 - 1.2 + 1.6931472 - 1.5) / 2, abs=1e-6)


def test_the_page_is_made_of_the_records(tmp_path: Path) -> None:
    records = []
    for seed in range(2):
        options = replace(BASE, schedule="linear", seed=seed)
        records.append({"kind": "run", "run": "a" + str(seed), **record(options, 0.9)})
    line = {"kind": "certified", "run": "a" + str(seed), "network": "a", "eps": "0.01", "images": 200}
    records.append({**line, "clean": 180, "certified": 150, "unstable": 4.0})
    known = {each["run"]: each["results"] for each in trained(records)}
    assert known[line["run"]]["certified"] == 0.75 and known[line["run"]]["unstable"] == 4.0
    assert sum("certified" in results for results in known.values()) == 1
    text = ablations.page(records, tmp_path).write(tmp_path)
    assert "## Schedule" in text and "## Switch point" not in text and "| linear | 2 | 0.9000 " in text
    assert (tmp_path / "ablations.csv").read_text().startswith("study,setting,seeds,clean,")
