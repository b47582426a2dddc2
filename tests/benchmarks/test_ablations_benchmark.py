"""benchmarks/training/ablations.py: what the grid holds, what is certified, and that tables say what records hold."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.common.runs import network_path, run_name
from benchmarks.training import ablations
from benchmarks.training.ablation_settings import BASE, STUDIES, trained
from verifiable_relu import data
from verifiable_relu.data import Dataset
from verifiable_relu.network import from_torch, write_onnx
from verifiable_relu.study.records import Records, of
from verifiable_relu.train.options import Options


def record(options: Options, clean: float, **more: Any) -> dict[str, Any]:
    results = {"clean": clean, "lam_learned": [1.2, 1.5], "proven_logit_change": 0.1, **more}
    return {"options": asdict(options), "results": results}


def test_the_grid_holds_every_setting_once_seed_by_seed() -> None:
    grid = ablations.grid_of(2)
    assert len(set(grid)) == len(grid) and [o.seed for o in grid] == sorted(o.seed for o in grid)
    settings = [changes for study in STUDIES.values() for changes in study.values()]
    assert {replace(o, seed=0) for o in grid} == {replace(BASE, **changes) for changes in settings}
    assert sum(replace(o, seed=0) == BASE for o in grid) == 2, "the defaults are part of most studies"
    assert {o.switch for o in grid} == {0, 0.1, 0.25, 0.5, 0.75}
    raw = {(o.lam_temperature, o.lam_factor) for o in grid if o.lam_rate == "raw" and o.optimizer == "adamw"}
    assert raw == {(t, c) for t in (0.05, 0.1, 0.2, 1.0) for c in (1.0, 9.0, 25.0)}
    starts = [replace(BASE, switch=part).first_annealed for part in (0.0, 0.1, 0.25, 0.5, 0.75)]
    assert starts == [0, 1, 2, 3, 5], "as the text above the tables says"


def test_what_is_certified_is_counted_over_all_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # y = (x, 1 − x) and a neuron that is unstable for x within 0.01 of 0.5; the class is proven beyond that.
    model = nn.Sequential(nn.Flatten(), nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 2))
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([[1.0], [1.0]]))
        model[1].bias.copy_(torch.tensor([0.0, -0.5]))
        model[3].weight.copy_(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
        model[3].bias.copy_(torch.tensor([0.0, 1.0]))
    images = np.array([0.2, 0.495, 0.505, 0.9, 0.9], dtype=np.float32).reshape(-1, 1, 1, 1)
    labels = np.array([1, 1, 0, 0, 1])
    test = Dataset("dots", images, labels, (0.0,), (1.0,), np.ones(5, bool))
    monkeypatch.setattr(data, "load", lambda *_: test, raising=False)
    network_path(tmp_path, BASE).write_bytes(write_onnx(from_torch(model, (1, 1, 1))))
    for _ in range(2):
        with Records(tmp_path) as records:
            ablations.certify([BASE], records, tmp_path, 5)
            (line,) = of(records.all, "certified")
    assert (line["run"], line["images"], line["clean"], line["certified"]) == (run_name(BASE), 5, 4, 2)
    assert line["unstable"] == pytest.approx(2 / 4)


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
        records.append({"kind": "run", "run": run_name(options), **record(options, 0.9)})
    line = {"kind": "certified", "run": run_name(options), "network": "a", "eps": "0.01", "images": 200}
    records.append({**line, "clean": 180, "certified": 150, "unstable": 4.0})
    known = {each["run"]: each["results"] for each in trained(records)}
    assert known[line["run"]]["certified"] == 0.75 and known[line["run"]]["unstable"] == 4.0
    assert sum("certified" in results for results in known.values()) == 1
    text = ablations.page(records, tmp_path).write(tmp_path)
    assert "## Schedule" in text and "## Switch point" not in text and "| linear | 2 | 0.9000 " in text
    assert (tmp_path / "ablations.csv").read_text().startswith("study,setting,seeds,clean,")
