"""benchmarks/arms.py: nothing is trained twice, a killed run goes on, and the statistics are what they say."""

import csv
import importlib
import json
import math
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from scipy import stats

from verifiable_relu.data import Dataset
from verifiable_relu.errors import InputError
from verifiable_relu.report import estimate
from verifiable_relu.train import loop
from verifiable_relu.train.options import Options

BASE = Options("blobs", hidden=(5,), epochs=3, batch=20, eps=0.01)


@pytest.fixture
def arms(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    module = importlib.import_module("arms")
    random = np.random.default_rng(0)
    images, labels = random.random((40, 1, 3, 3)).astype(np.float32), np.arange(40) % 2
    blobs = Dataset("blobs", images, labels, (0.5,), (0.3,), np.ones(40, bool))
    monkeypatch.setattr(module, "_data", lambda *_: blobs)
    return module


def test_the_name_of_a_run_is_that_of_its_options(arms: ModuleType) -> None:
    others = [
        BASE,
        replace(BASE, seed=1),
        replace(BASE, arm="relu"),
        replace(BASE, rate=1e-3),
        replace(BASE, switch=0.5),
    ]
    assert len({arms.run_name(options) for options in others}) == len(others)
    assert arms.run_name(BASE) == arms.run_name(replace(BASE))


def test_the_grid(arms: ModuleType) -> None:
    grid = arms.grid_of(arms.parser().parse_args(["--data", "mnist,adult", "--seeds", "2", "--epochs", "8"]))
    assert len(grid) == 2 * 2 * len(arms.ARMS) and [options.seed for options in grid] == sorted(o.seed for o in grid)
    extra = [options for options in grid if options.finetune_extra]
    assert len(extra) == 4 and all(o.finetune_extra == 6 and o.total_epochs == 14 for o in extra)
    assert {(o.data, o.eps) for o in grid} == {("mnist", 0.02), ("adult", 0.01)}
    assert [arms.arm_name(vars(options)) for options in grid[: len(arms.ARMS)]] == list(arms.ARMS)
    chosen = {"model": "cnn", "hidden": (7,), "channels": (3,), "epochs": 2, "rate": 0.1, "crop": 1, "flip": True,
              "switch": 0.5, "schedule": "linear", "ramp": "learning", "lam_rate": "raw", "fall": "none",
              "inputs": "raw"}  # fmt: skip
    given = "--model cnn --hidden 7 --channels 3 --epochs 2 --rate 0.1 --crop 1 --flip --switch 0.5 --schedule linear "
    given += "--ramp learning --lam-rate raw --fall none --inputs raw --data mnist --arms relu --seeds 1"
    (options,) = arms.grid_of(arms.parser().parse_args(given.split()))
    assert {name: getattr(options, name) for name in chosen} == chosen


def test_networks_in_words(arms: ModuleType) -> None:
    named = {
        "MLP 2×128": {"hidden": (128, 128)},
        "MLP 64,32": {"hidden": (64, 32)},
        "CNN 16,32 + 1×100": {"model": "cnn"},
        "CNN3": {"model": "cnn3"},
        "ResNet, width 0.5": {"model": "resnet", "width": 0.5},
    }
    found = [arms.architecture(vars(Options("mnist", **options))) for options in named.values()]
    assert found == list(named)


def test_a_killed_run_goes_on_from_its_last_epoch(
    arms: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    name = arms.run(BASE, whole, whole)
    real, calls = loop.objective, 0

    def die_in_the_third_epoch(*arguments: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise KeyboardInterrupt
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "objective", die_in_the_third_epoch)
    with pytest.raises(KeyboardInterrupt):
        arms.run(BASE, killed, killed)
    assert not arms.finished(BASE, killed) and [path.suffix for path in killed.iterdir()] == [".checkpoint"]
    arms.run(BASE, killed, killed)
    assert calls == 6 + 2, "only the third epoch is trained again"
    assert arms.finished(BASE, killed) and {path.suffix for path in killed.iterdir()} == {".onnx", ".json"}
    assert (whole / f"{name}.onnx").read_bytes() == (killed / f"{name}.onnx").read_bytes()


def test_what_is_finished_is_not_trained_again(arms: ModuleType, tmp_path: Path) -> None:
    name = arms.run(BASE, tmp_path, tmp_path)
    assert arms.finished(BASE, tmp_path) and not arms.finished(replace(BASE, seed=1), tmp_path)
    record = json.loads((tmp_path / f"{name}.json").read_text())
    assert arms.stored_options(record) == BASE
    (tmp_path / f"{name}.json").write_text(json.dumps(record | {"options": record["options"] | {"rate": 1.0}}))
    with pytest.raises(InputError, match="a record of other options"):
        arms.finished(BASE, tmp_path)
    (tmp_path / f"{name}.json").write_text("{}")
    with pytest.raises(InputError, match="no record of a run"):
        arms.write_tables(tmp_path, tmp_path)


def test_an_interval_is_students() -> None:
    found = estimate([1.0, 2.0, 3.0])
    assert found.mean == 2 and found.half == pytest.approx(4.302652729911275 / math.sqrt(3)) and found.n == 3
    assert str(found) == "2.00 ± 2.48" and str(estimate([0.5])) == "0.5000"
    assert str(estimate([4e-5])) == "4.0e-05"


def test_profiles(arms: ModuleType) -> None:
    assert arms.correlation([[1, 2, 3, 4], [10, 20, 30, 40]]) == pytest.approx(1)
    # Ranks 1 2 3 against 2 1 3 have ½, against 3 2 1 −1, and these two −½ between them.
    assert arms.correlation([[1, 2, 3], [2, 1, 3], [3, 2, 1]]) == pytest.approx((0.5 - 1 - 0.5) / 3)
    assert math.isnan(arms.correlation([[1, 2], [2, 1]])) and math.isnan(arms.correlation([[1, 2, 3]]))
    assert math.isnan(arms.correlation([[1, 2, 3], [2, 2, 2]]))
    profiles = [[1.0, 2.0], [3.0, 2.5]]
    records = [{"results": {"lam_learned": lam}, "options": {"lam_init": 2.0}} for lam in profiles]
    assert arms.drift(records).mean == pytest.approx((1 + 0 + 1 + 0.5) / 4)
    assert arms.drift(records).half == pytest.approx(stats.t.ppf(0.975, 1) * 0.25 / 2)
    assert arms.profile(records) == "2.00 2.25"
    unlearned = [{"results": {"lam_learned": []}, "options": {"lam_init": 2.0}}]
    assert arms.drift(unlearned) is None and arms.profile(unlearned) is None


def test_the_oui_at_a_tenth_is_the_first_taken_then(arms: ModuleType) -> None:
    points = [{"part": part, "oui": oui} for part, oui in ((0.0, 0.1), (0.05, 0.2), (0.1, 0.3), (0.15, 0.4))]
    assert arms.early_oui([{"results": {"monitor": points}}]).mean == 0.3
    assert arms.early_oui([{"results": {"monitor": points}}, {"results": {}}]) is None


def test_means_over_seeds_of_each_arm_and_setting(arms: ModuleType, tmp_path: Path) -> None:
    for options in (BASE, replace(BASE, seed=1), replace(BASE, arm="relu"), replace(BASE, switch=0.5)):
        arms.run(options, tmp_path, tmp_path)
    text = arms.write_tables(tmp_path, tmp_path)
    with (tmp_path / "arms.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["arm"], row["seeds"], row["changed"]) for row in rows] == [
        ("lambda-gelu", "2", "batch=20"), ("relu", "1", "batch=20"), ("lambda-gelu", "1", "switch=0.5, batch=20"),
    ]  # fmt: skip
    results = [
        json.loads((tmp_path / f"{arms.run_name(options)}.json").read_text())["results"]
        for options in (BASE, replace(BASE, seed=1))
    ]
    for name, of in {
        "proven": lambda r: r["proven_logit_change"],
        "int8": lambda r: r["int8"]["clean"],
        "pruned 0.7": lambda r: r["pruned"]["0.7"],
        "OUI at 10 %": lambda r: next(p["oui"] for p in r["monitor"] if p["part"] >= 0.1),
    }.items():
        assert float(rows[0][name]) == pytest.approx(sum(map(of, results)) / 2, rel=1e-5), name
    assert rows[1]["before swap"] == rows[1]["λ per layer"] == ""
    assert text == (tmp_path / "arms.md").read_text()
    assert text.count("## blobs, MLP 1×5, 3 epochs") == 2 and "from 4 records" in text


def test_differences_from_rivals_are_paired_by_seed_within_a_setting(arms: ModuleType) -> None:
    def record(options: Options, clean: float) -> dict[str, object]:
        return {"options": vars(options), "results": {"clean": clean}}

    records = [record(replace(BASE, seed=seed), 0.9 + 0.02 * seed) for seed in range(4)]
    records += [record(replace(BASE, arm="relu", seed=seed), 0.88 + 0.021 * seed) for seed in (3, 1, 2, 0)]
    records += [record(replace(BASE, arm="relu", switch=0.5), 0.1)]
    (row,) = arms.against_rivals(arms.by_setting(records, arms.setting)).rows
    assert row[:5] == ("blobs", "MLP 1×5", "batch=20", "relu", 4) and row[6] == "λ-GELU higher"
    assert row[5].mean == pytest.approx(0.02 - 0.0015) and row[5].half < 0.005


def test_the_command_trains_in_a_process_of_its_own_and_then_only_tabulates(
    arms: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn", reason="needs scikit-learn")
    records = tmp_path / "records"
    command = ["--data", "digits", "--arms", "relu,lambda-gelu", "--seeds", "1", "--epochs", "1", "--hidden", "8",
               "--workers", "1", "--results", str(tmp_path), "--records", str(records),
               "--networks", str(tmp_path / "networks")]  # fmt: skip
    assert arms.main(command) == 0
    made = {path.name: path.stat().st_mtime_ns for path in records.iterdir()}
    assert len(made) == 2 and len(list((tmp_path / "networks").glob("*.onnx"))) == 2
    assert "| relu | 1 |" in capsys.readouterr().out
    assert arms.main(command) == 0
    assert {path.name: path.stat().st_mtime_ns for path in records.iterdir()} == made
    assert "2 runs, of which 2 are done" in capsys.readouterr().err
    assert arms.main([*command, "--arms", "tanh"]) == 2
    assert "'tanh' is none of" in capsys.readouterr().err
