"""benchmarks/training/arms.py: nothing is trained twice, a killed run goes on, and the statistics are what they say."""

import csv
import math
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from benchmarks.common import runs
from benchmarks.common.measures import by_setting, correlation, drift, early_oui, profile, stored_options
from benchmarks.training import arms
from tests.support.processes import Process
from verifiable_relu.data import Dataset
from verifiable_relu.errors import InputError
from verifiable_relu.report.estimate import estimate
from verifiable_relu.study import variants
from verifiable_relu.study.records import Records, of, read_records
from verifiable_relu.train import loop
from verifiable_relu.train.options import Options

ROOT = Path(__file__).resolve().parents[2]
BASE = Options("blobs", hidden=(5,), epochs=3, batch=20, eps=0.01)


@pytest.fixture(autouse=True)
def blobs(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    images, labels = random.random((40, 1, 3, 3)).astype(np.float32), np.arange(40) % 2
    data = Dataset("blobs", images, labels, (0.5,), (0.3,), np.ones(40, bool))
    monkeypatch.setattr(runs, "dataset_of", lambda *_: data)


def train(folder: Path, *grid: Options) -> None:
    """Train in this process what ``train_all`` would train in others."""
    with Records(folder) as records:
        for options in grid:
            runs.keep(options, runs.run(options, folder), records, folder)


def test_the_name_of_a_run_is_that_of_its_options() -> None:
    others = [
        BASE,
        replace(BASE, seed=1),
        replace(BASE, arm="relu"),
        replace(BASE, rate=1e-3),
        replace(BASE, switch=0.5),
    ]
    assert len({runs.run_name(options) for options in others}) == len(others)
    assert runs.run_name(BASE) == runs.run_name(replace(BASE))


def test_the_grid() -> None:
    grid = runs.grid_of(arms.STUDY.parser().parse_args(["--data", "mnist,adult", "--seeds", "2", "--epochs", "8"]))
    assert len(grid) == 2 * 2 * len(variants.VARIANTS) and [options.seed for options in grid] == sorted(
        o.seed for o in grid
    )
    extra = [options for options in grid if options.finetune_extra]
    assert len(extra) == 4 and all(o.finetune_extra == 6 and o.total_epochs == 14 for o in extra)
    assert {(o.data, o.eps) for o in grid} == {("mnist", 0.02), ("adult", 0.01)}
    assert [variants.variant_name(vars(options)) for options in grid[: len(variants.VARIANTS)]] == list(
        variants.VARIANTS
    )
    chosen = {"model": "cnn", "hidden": (7,), "channels": (3,), "epochs": 2, "rate": 0.1, "crop": 1, "flip": True,
              "switch": 0.5, "schedule": "linear", "ramp": "learning", "lam_rate": "raw", "fall": "none",
              "inputs": "raw"}  # fmt: skip
    given = "--model cnn --hidden 7 --channels 3 --epochs 2 --rate 0.1 --crop 1 --flip --switch 0.5 --schedule linear "
    given += "--ramp learning --lam-rate raw --fall none --inputs raw --data mnist --arms relu --seeds 1"
    (options,) = runs.grid_of(arms.STUDY.parser().parse_args(given.split()))
    assert {name: getattr(options, name) for name in chosen} == chosen


def test_networks_in_words() -> None:
    named = {
        "MLP 2×128": {"hidden": (128, 128)},
        "MLP 64,32": {"hidden": (64, 32)},
        "CNN 16,32 + 1×100": {"model": "cnn"},
        "CNN3": {"model": "cnn3"},
        "ResNet, width 0.5": {"model": "resnet", "width": 0.5},
    }
    found = [variants.architecture(vars(Options("mnist", **options))) for options in named.values()]
    assert found == list(named)


def test_a_run_that_is_interrupted_goes_on_from_its_last_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    killed.mkdir()
    train(whole, BASE)
    real, calls = loop.objective, 0

    def die_in_the_third_epoch(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(loop, "objective", die_in_the_third_epoch)
    with pytest.raises(KeyboardInterrupt):
        train(killed, BASE)
    assert not runs.finished(BASE, read_records(killed)) and runs.checkpoint(killed, BASE).exists()
    train(killed, BASE)
    assert calls == 6 + 2, "only the third epoch is trained again"
    assert runs.finished(BASE, read_records(killed)) and not runs.checkpoint(killed, BASE).exists()
    assert runs.network_path(whole, BASE).read_bytes() == runs.network_path(killed, BASE).read_bytes()


def test_a_run_whose_record_was_not_kept_is_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = runs.run(BASE, tmp_path)

    def never(*arguments: Any) -> Any:
        raise AssertionError("trained again")

    monkeypatch.setattr(loop, "objective", never)
    assert runs.run(BASE, tmp_path)["results"]["clean"] == first["results"]["clean"]


def test_what_is_finished_is_known_by_its_options(tmp_path: Path) -> None:
    train(tmp_path, BASE)
    (record,) = read_records(tmp_path)
    assert stored_options(record) == BASE and runs.finished(BASE, [record])
    assert not runs.finished(replace(BASE, seed=1), [record])
    with pytest.raises(InputError, match="has other options"):
        runs.finished(BASE, [record | {"options": record["options"] | {"rate": 1.0}}])
    with pytest.raises(InputError, match="not the record of a training"):
        arms.page([{"kind": "run", "run": "a"}], tmp_path)


def test_an_interval_is_students() -> None:
    found = estimate([1.0, 2.0, 3.0])
    assert found.mean == 2 and found.half == pytest.approx(4.302652729911275 / math.sqrt(3)) and found.n == 3
    assert str(found) == "2.00 ± 2.48" and str(estimate([0.5])) == "0.5000"
    assert str(estimate([4e-5])) == "4.0e-05"


def test_profiles() -> None:
    assert correlation([[1, 2, 3, 4], [10, 20, 30, 40]]) == pytest.approx(1)
    # Ranks 1 2 3 against 2 1 3 have ½, against 3 2 1 −1, and these two −½ between them.
    assert correlation([[1, 2, 3], [2, 1, 3], [3, 2, 1]]) == pytest.approx((0.5 - 1 - 0.5) / 3)
    assert math.isnan(correlation([[1, 2], [2, 1]])) and math.isnan(correlation([[1, 2, 3]]))
    assert math.isnan(correlation([[1, 2, 3], [2, 2, 2]]))
    profiles = [[1.0, 2.0], [3.0, 2.5]]
    records = [{"results": {"lam_learned": lam}, "options": {"lam_init": 2.0}} for lam in profiles]
    assert drift(records).mean == pytest.approx((1 + 0 + 1 + 0.5) / 4)
    assert drift(records).half == pytest.approx(stats.t.ppf(0.975, 1) * 0.25 / 2)
    assert profile(records) == "2.00 2.25"
    unlearned = [{"results": {"lam_learned": []}, "options": {"lam_init": 2.0}}]
    assert drift(unlearned) is None and profile(unlearned) is None


def test_the_oui_at_a_tenth_is_the_first_taken_then() -> None:
    points = [{"part": part, "oui": oui} for part, oui in ((0.0, 0.1), (0.05, 0.2), (0.1, 0.3), (0.15, 0.4))]
    assert early_oui([{"results": {"monitor": points}}]).mean == 0.3
    assert early_oui([{"results": {"monitor": points}}, {"results": {}}]) is None


def test_means_over_seeds_of_each_arm_and_setting(tmp_path: Path) -> None:
    grid = (BASE, replace(BASE, seed=1), replace(BASE, arm="relu"), replace(BASE, switch=0.5))
    train(tmp_path, *grid)
    records = read_records(tmp_path)
    text = arms.page(records, tmp_path).write(tmp_path)
    with (tmp_path / "arms.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["arm"], row["seeds"], row["changed"]) for row in rows] == [
        ("lambda-gelu", "2", "batch=20"), ("relu", "1", "batch=20"), ("lambda-gelu", "1", "switch=0.5, batch=20"),
    ]  # fmt: skip
    results = [record["results"] for record in records[:2]]
    for name, result in {
        "proven": lambda r: r["proven_logit_change"],
        "int8": lambda r: r["int8"]["clean"],
        "pruned 0.7": lambda r: r["pruned"]["0.7"],
        "OUI at 10 %": lambda r: next(p["oui"] for p in r["monitor"] if p["part"] >= 0.1),
    }.items():
        assert float(rows[0][name]) == pytest.approx(sum(map(result, results)) / 2, rel=1e-5), name
    assert rows[1]["before swap"] == rows[1]["λ per layer"] == ""
    assert text == (tmp_path / "arms.md").read_text()
    assert text.count("## blobs, MLP 1×5, 3 epochs") == 2 and "From 4 records" in text


def test_differences_from_rivals_are_paired_by_seed_within_a_setting() -> None:
    def record(options: Options, clean: float) -> dict[str, object]:
        return {"options": vars(options), "results": {"clean": clean}}

    records = [record(replace(BASE, seed=seed), 0.9 + 0.02 * seed) for seed in range(4)]
    records += [record(replace(BASE, arm="relu", seed=seed), 0.88 + 0.021 * seed) for seed in (3, 1, 2, 0)]
    records += [record(replace(BASE, arm="relu", switch=0.5), 0.1)]
    (row,) = arms.against_rivals(by_setting(records, runs.setting)).rows
    assert row[:5] == ("blobs", "MLP 1×5", "batch=20", "relu", 4) and row[6] == "λ-GELU higher"
    assert row[5].mean == pytest.approx(0.02 - 0.0015) and row[5].half < 0.005


COMMAND = ("--data", "digits", "--arms", "relu,lambda-gelu", "--epochs", "1", "--hidden", "8", "--workers", "1")


def test_the_command_trains_in_a_process_of_its_own_and_then_only_tabulates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn", reason="needs scikit-learn")
    networks = tmp_path / "networks"
    command = [*COMMAND, "--seeds", "1", "--results", str(tmp_path), "--networks", str(networks)]
    assert arms.STUDY.main(command) == 0
    made = (tmp_path / "records.jsonl").read_bytes()
    assert made.count(b"\n") == 3 and made.startswith(b'{"kind": "note", ')
    assert {path.suffix for path in networks.iterdir()} == {".onnx"} and len(list(networks.iterdir())) == 2
    assert "| relu | 1 |" in capsys.readouterr().out
    assert arms.STUDY.main(command) == 0
    assert (tmp_path / "records.jsonl").read_bytes() == made
    assert "2 runs, of which 2 are done" in capsys.readouterr().err
    assert arms.STUDY.main([*command, "--arms", "tanh"]) == 2
    assert "'tanh' is none of" in capsys.readouterr().err
    assert arms.STUDY.main([*command, "--data", "letters"]) == 2
    assert "'letters' is none of" in capsys.readouterr().err


def test_ctrl_c_keeps_every_run_that_was_finished(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="needs scikit-learn")
    command = [*COMMAND, "--seeds", "50", "--results", str(tmp_path), "--networks", str(tmp_path / "networks")]
    with Process(["-m", "benchmarks.training.arms", *command], cwd=ROOT, new_session=True) as process:
        while not (tmp_path / "records.jsonl").exists() or not of(read_records(tmp_path), "run"):
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.1)
        before = len(of(read_records(tmp_path), "run"))
        # A terminal interrupts the workers too.
        os.killpg(process.pid, signal.SIGINT)
        error = process.stderr.read()
    assert process.returncode == 130 and "interrupted; the same command resumes: python -m benchmarks" in error
    found = of(read_records(tmp_path), "run")
    assert before <= len(found) < 100
    networks = {path.stem for path in (tmp_path / "networks").glob("*.onnx")}
    assert {record["run"] for record in found} <= networks
