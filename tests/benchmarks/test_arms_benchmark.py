"""benchmarks/training/arms.py: the statistics of its page are what they say."""

import csv
import math
from dataclasses import replace
from pathlib import Path

import pytest
from scipy import stats

from benchmarks.common.measures import by_setting, correlation, drift, early_oui, profile, setting
from benchmarks.training import arms
from verifiable_relu.errors import InputError
from verifiable_relu.report.estimate import estimate
from verifiable_relu.study import cells
from verifiable_relu.train.options import Options

BASE = Options("blobs", hidden=(5,), epochs=3, batch=20, eps=0.01)


def test_networks_in_words() -> None:
    named = {
        "MLP 2×128": {"hidden": (128, 128)},
        "MLP 64,32": {"hidden": (64, 32)},
        "CNN 16,32 + 1×100": {"model": "cnn"},
        "CNN3": {"model": "cnn3"},
        "ResNet, width 0.5": {"model": "resnet", "width": 0.5},
    }
    found = [cells.architecture(vars(Options("mnist", **options))) for options in named.values()]
    assert found == list(named)


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


def trained(options: Options, clean: float) -> dict[str, object]:
    points = [{"part": part, "oui": 0.3 + part + clean} for part in (0.0, 0.1, 0.2)]
    results = {"clean": clean, "proven_logit_change": clean / 9, "lam_learned": [1.5] if "gelu" in options.arm else []}
    results |= {"int8": {"clean": clean - 0.1}, "pruned": {"0.7": clean - 0.2}, "monitor": points}
    if options.arm != "relu":
        results |= {"clean_before_substitution": clean}
    name = f"{options.arm}{options.seed}{options.switch}"
    return {"kind": "run", "run": name, "options": vars(options), "results": results, "note": ""}


def test_means_over_seeds_of_each_arm_and_setting(tmp_path: Path) -> None:
    grid = (BASE, replace(BASE, seed=1), replace(BASE, arm="relu"), replace(BASE, switch=0.5))
    records = [trained(options, 0.7 + 0.05 * number) for number, options in enumerate(grid)]
    text = arms.page(records, tmp_path).write(tmp_path)
    with (tmp_path / "arms.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["arm"], row["seeds"], row["changed"]) for row in rows] == [
        ("lambda-gelu", "2", "batch=20"), ("relu", "1", "batch=20"), ("lambda-gelu", "1", "switch=0.5, batch=20"),
    ]  # fmt: skip
    expected = {"clean": 0.725, "proven": 0.725 / 9, "int8": 0.625, "pruned 0.7": 0.525, "OUI at 10 %": 1.125}
    for name, value in expected.items():
        assert float(rows[0][name]) == pytest.approx(value, rel=1e-5), name
    assert rows[1]["before swap"] == rows[1]["λ per layer"] == ""
    assert text == (tmp_path / "arms.md").read_text()
    assert text.count("## blobs, MLP 1×5, 3 epochs") == 2 and "From 4 records" in text
    with pytest.raises(InputError, match="not the record of a training"):
        arms.page([{"kind": "run", "run": "a"}], tmp_path)


def test_differences_from_rivals_are_paired_by_seed_within_a_setting() -> None:
    def record(options: Options, clean: float) -> dict[str, object]:
        return {"options": vars(options), "results": {"clean": clean}}

    records = [record(replace(BASE, seed=seed), 0.9 + 0.02 * seed) for seed in range(4)]
    records += [record(replace(BASE, arm="relu", seed=seed), 0.88 + 0.021 * seed) for seed in (3, 1, 2, 0)]
    records += [record(replace(BASE, arm="relu", switch=0.5), 0.1)]
    (row,) = arms.against_rivals(by_setting(records, setting)).rows
    assert row[:5] == ("blobs", "MLP 1×5", "batch=20", "relu", 4) and row[6] == "λ-GELU higher"
    assert row[5].mean == pytest.approx(0.02 - 0.0015) and row[5].half < 0.005
