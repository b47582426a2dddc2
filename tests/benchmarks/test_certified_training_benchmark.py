"""benchmarks/training/certified_training.py: what it trains, and that no network is asked the same twice."""

from pathlib import Path

import pytest
from torch import nn

from benchmarks.common.questions import clean
from benchmarks.common.runs import network_path, run_name
from benchmarks.training import certified_training as benchmark
from verifiable_relu.data import load
from verifiable_relu.network import from_torch, write_onnx
from verifiable_relu.nn import mlp
from verifiable_relu.study.records import Records, of, read_records
from verifiable_relu.train.options import Options

RESULTS = {"seconds_per_step": 0.002}


def test_the_grids() -> None:
    grid = benchmark.stability_grid(3)
    assert [options.arm for options in grid] == ["lambda-gelu", "relu"] * 4 and {o.seed for o in grid} == {3}
    assert [options.stability for options in grid[::2]] == pytest.approx([0, 0.0768, 0.256, 0.768])
    assert {options.terms_grow for options in grid[2:]} == {"ramp"}
    grid = benchmark.certified_grid(0)
    assert [options.certified_by for options in grid[::2]] == ["ibp"] * 3 + ["sabr", "crown-ibp"]
    names = [run_name(options) for options in grid + benchmark.stability_grid(0)]
    assert len(set(names)) == len(names)


def kept(run: str, part: str, ibp: int, unstable: float) -> dict[str, object]:
    few = {"clean": 19, "attacked": 18, "crown": 10, "alpha-crown": 12, "unstable": unstable}
    about = {"part": part, "run": run, "network": "x", "eps": "0.02", "images": [100, 20]}
    return {"kind": "measured", **about, "clean": 90, "ibp": ibp, "few": few}


def test_rows_are_means_over_seeds() -> None:
    records = []
    for seed, (ibp, unstable) in enumerate([(10, 4.0), (20, 6.0)]):
        options = {**vars(Options("mnist", hidden=(6, 4), eps=0.02, stability=0.1, seed=seed))}
        records.append({"kind": "run", "run": f"run{seed}", "options": options, "results": RESULTS})
        records.append(kept(f"run{seed}", "stability", ibp, unstable))
    table = benchmark.table(records, "stability")
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert len(table.rows) == 1 and row["seeds"] == 2 and row["net"] == "MLP 6,4" and row["stability, summed"] == "0.01"
    shares = ("clean", "certified, IBP", "CROWN", "α-CROWN", "attacked", "unstable")
    assert [row[name].mean for name in shares] == pytest.approx([0.9, 0.15, 0.5, 0.6, 0.9, 5.0])
    assert not benchmark.table(records, "certified").rows


def test_networks_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn", reason="needs scikit-learn")
    options = Options("digits", hidden=(8,), eps=0.02)
    monkeypatch.setattr(benchmark, "GRIDS", {"stability": lambda seed: [options], "certified": lambda seed: []})
    network = from_torch(mlp([64, 8, 10], nn.ReLU), (1, 8, 8))
    write_onnx(network, network_path(tmp_path, options))
    with Records(tmp_path) as records:
        records.append("run", {"run": run_name(options), "options": vars(options), "results": RESULTS})
    asked = ["--seeds", "1", "--many", "60", "--few", "30", "--results", str(tmp_path), "--networks", str(tmp_path)]
    assert benchmark.STUDY.main(asked) == 0
    found = read_records(tmp_path)
    (record,) = of(found, "measured")
    few = record["few"]
    test = load("digits", "test")
    right = clean(network, test.images[:60], test.labels[:60])
    assert record["clean"] == right.sum() and few["clean"] == right[:30].sum()
    assert record["ibp"] <= record["clean"]
    assert few["crown"] <= few["alpha-crown"] <= few["attacked"] <= few["clean"]
    assert 0 <= few["unstable"] <= 8
    assert benchmark.STUDY.main(asked) == 0
    assert read_records(tmp_path) == found
    assert "stability" in (tmp_path / "certified_training.md").read_text()


def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark.STUDY.main(["--parts", "all", "--results", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "error: no part 'all'; there are stability, certified\n"
    assert not read_records(tmp_path)
