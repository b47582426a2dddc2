"""benchmarks/certified_training.py: what it trains, what it asks of each network, and that nothing is asked twice."""

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest
from torch import nn

from verifiable_relu.network import from_torch, write_onnx
from verifiable_relu.nn import mlp
from verifiable_relu.train.options import Options

RECORD = {"seconds_per_step": 0.002}


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("certified_training")


def test_the_grids(benchmark: ModuleType) -> None:
    grid = benchmark.stability_grid(3)
    assert [options.arm for options in grid] == ["lambda-gelu", "relu"] * 4 and {o.seed for o in grid} == {3}
    assert [options.stability for options in grid[::2]] == pytest.approx([0, 0.0768, 0.256, 0.768])
    assert {options.terms_grow for options in grid[2:]} == {"ramp"}
    grid = benchmark.certified_grid(0)
    assert [options.certified_by for options in grid[::2]] == ["ibp"] * 3 + ["sabr", "crown-ibp"]
    names = [benchmark.run_name(options) for options in grid + benchmark.stability_grid(0)]
    assert len(set(names)) == len(names)


def kept(run: str, part: str, ibp: int, unstable: float) -> dict[str, object]:
    few = {"clean": 19, "attacked": 18, "crown": 10, "alpha-crown": 12, "unstable": unstable}
    about = {"part": part, "run": run, "network": "x", "eps": "0.02", "images": [100, 20]}
    return {**about, "clean": 90, "ibp": ibp, "few": few}


def test_rows_are_means_over_seeds(benchmark: ModuleType, tmp_path: Path) -> None:
    records = []
    for seed, (ibp, unstable) in enumerate([(10, 4.0), (20, 6.0)]):
        options = {**vars(Options("mnist", hidden=(6, 4), eps=0.02, stability=0.1, seed=seed))}
        (tmp_path / f"run{seed}.json").write_text(json.dumps({"options": options, "results": RECORD}))
        records.append(kept(f"run{seed}", "stability", ibp, unstable))
    table = benchmark.table(records, tmp_path, "stability")
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert len(table.rows) == 1 and row["seeds"] == 2 and row["net"] == "MLP 6,4" and row["stability, summed"] == "0.01"
    shares = ("clean", "certified, IBP", "CROWN", "α-CROWN", "attacked", "unstable")
    assert [row[name].mean for name in shares] == pytest.approx([0.9, 0.15, 0.5, 0.6, 0.9, 5.0])
    assert not benchmark.table(records, tmp_path, "certified").rows


def test_networks_are_measured_once(benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn", reason="needs scikit-learn")
    options = Options("digits", hidden=(8,), eps=0.02)
    monkeypatch.setattr(benchmark, "GRIDS", {"stability": lambda seed: [options], "certified": lambda seed: []})
    run = benchmark.run_name(options)
    network = from_torch(mlp([64, 8, 10], nn.ReLU), (1, 8, 8))
    write_onnx(network, tmp_path / f"{run}.onnx")
    runs = tmp_path / "runs"
    runs.mkdir()
    (runs / f"{run}.json").write_text(json.dumps({"options": vars(options), "results": RECORD}))
    asked = ["--seeds", "1", "--many", "60", "--few", "30", "--results", str(tmp_path), "--networks", str(tmp_path)]
    assert benchmark.main(asked) == 0
    (line,) = (tmp_path / "measured.jsonl").read_text().splitlines()
    record = json.loads(line)
    few = record["few"]
    test = benchmark.load("digits", "test")
    right = benchmark.clean(network, test.images[:60], test.labels[:60])
    assert record["clean"] == right.sum() and few["clean"] == right[:30].sum()
    assert record["ibp"] <= record["clean"]
    assert few["crown"] <= few["alpha-crown"] <= few["attacked"] <= few["clean"]
    assert 0 <= few["unstable"] <= 8
    assert benchmark.main(asked) == 0
    assert (tmp_path / "measured.jsonl").read_text().splitlines() == [line]
    assert "stability" in (tmp_path / "certified_training.md").read_text()


def test_bad_input_is_one_line(benchmark: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark.main(["--parts", "all", "--results", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "error: no part 'all'; there are stability, certified\n"
    assert not list(tmp_path.iterdir())
