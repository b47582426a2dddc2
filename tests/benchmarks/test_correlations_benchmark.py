"""benchmarks/training/correlations.py: ranks against scipy and by hand, and what is compared with what."""

import math
from dataclasses import asdict, replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from benchmarks.common.study import RESULTS
from benchmarks.training import correlation_tables as tables
from benchmarks.training import correlations
from benchmarks.training.ablation_settings import BASE, STUDIES
from verifiable_relu.study.statistics import agreement, rank, spearman
from verifiable_relu.train.options import Options


def test_committed_tables_are_those_of_the_committed_records(tmp_path: Path) -> None:
    for name in ("arms", "ablations", "comparison"):
        (tmp_path / name).symlink_to(RESULTS / name)
    assert correlations.main(["--results", str(tmp_path / "correlations")]) == 0
    for path in (tmp_path / "correlations").iterdir():
        assert path.read_text() == (RESULTS / "correlations" / path.name).read_text()


def test_without_records_the_error_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert correlations.main(["--results", str(tmp_path / "correlations")]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path}/ablations/records.jsonl: no such file\n"


def test_rows_of_ranks_are_scipys() -> None:
    random = np.random.default_rng(1)
    one, other = random.integers(0, 5, (20, 7)).astype(float), random.random((20, 7))
    found = spearman(one, other)
    assert found == pytest.approx([stats.spearmanr(a, b).statistic for a, b in zip(one, other, strict=True)])
    assert math.isnan(spearman(np.ones((1, 3)), np.array([[1.0, 2.0, 3.0]]))[0])


def test_what_a_correlation_shows() -> None:
    random = np.random.default_rng(0)
    x = np.linspace(0, 1, 40)
    strong, none = rank([(a, -(a**3)) for a in x]), rank([(a, abs(a - 0.5)) for a in x])
    assert strong.rho == pytest.approx(-1) and strong.high < 0 and strong.reading == "negative"
    assert rank([(a, a + 0.3 * random.random()) for a in x]).reading == "positive"
    assert none.low < 0 < none.high and none.reading == "not shown"
    few = rank([(1, 1), (2, 2), (3, 3)])
    assert few.rho == pytest.approx(1) and few.n == 3 and few.p == pytest.approx(2 / 6, abs=0.03)
    assert few.reading == "not shown", "two orders of six are as good"
    long = random.random((2, 30))
    assert rank(list(long.T)).p == pytest.approx(stats.spearmanr(*long).pvalue, abs=0.03)
    for undefined in ([(1, 2), (2, 1)], [(1, 2), (1, 3), (1, 4)], []):
        found = rank(undefined)
        assert math.isnan(found.rho) and found.reading == "not shown" and found.n == len(undefined)


def test_agreement_is_that_of_all_pairs_and_its_chance_that_of_all_orders() -> None:
    profiles = [[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0], [2.0, 1.0, 3.0, 4.0]]
    mean, least, greatest, chance = agreement(profiles)
    assert (least, greatest) == (pytest.approx(0.8), pytest.approx(1)) and mean == pytest.approx((1 + 0.8 + 0.8) / 3)
    orders = [np.array(order) for order in permutations(range(4))]
    spread = np.var([3 + 1 + 1 - 1, 2 + 2 + 1, 9, 12])
    exact = np.mean([np.var(orders[0] + a + b) >= spread - 1e-9 for a in orders for b in orders])
    assert spread == np.var([4, 5, 9, 12]) and chance == pytest.approx(exact, abs=0.01)
    assert agreement([[1, 2, 3, 4], [4, 3, 2, 1]])[3] > 0.9


def record(options: Options, lam: float, oui: float, **results: Any) -> dict[str, Any]:
    points = [{"part": 0.0, "oui": 0.9}, {"part": 0.1, "oui": oui}]
    learned = [lam, lam] if options.anneals else []
    return {
        "run": f"{options.arm}{options.seed}{options.lam_factor}{options.lam_temperature}",
        "options": asdict(options),
        "results": {"lam_learned": learned, "monitor": points, "clean": 0.9 + 0.01 * options.seed, **results},
    }


def test_drift_against_outcomes_over_runs_and_settings() -> None:
    records = []
    for number, changes in enumerate(STUDIES["The (t, c) grid, raw rate"].values()):
        for seed in range(2):
            options = replace(BASE, **changes, seed=seed)
            # Within a setting the change falls with the drift, over the settings it grows.
            records.append(record(options, 2 + number + 0.1 * seed, 0.5, mean_logit_change=number - 0.1 * seed))
    rows = [dict(zip(tables.COLUMNS, row, strict=True)) for row in tables.drift_rows(records)]
    by = {(row["over"], row["points"], row["with"]): row for row in rows}
    raw = "The (t, c) grid, raw rate"
    assert by[raw, "means of settings", "mean logit change"]["ρ"] == pytest.approx(1)
    assert by[raw, "means of settings", "mean logit change"]["n"] == 12
    runs = by[raw, "runs", "mean logit change"]
    assert runs["n"] == 24 and runs["ρ"] < 1 and runs["reading"] == "positive"
    assert by[raw, "means of settings", "clean accuracy"]["reading"] == "not shown"
    assert not any(row["with"] == "certified accuracy" for row in rows), "nothing was certified"


def test_the_oui_is_compared_only_where_it_can_differ() -> None:
    arms = ("lambda-gelu", "gelu-swap", "gelu-swap-finetune", "relu")
    records = [
        record(Options("mnist", arm=arm, seed=seed), 2.0, 0.3 + 0.1 * place)
        for place, arm in enumerate(arms)
        for seed in range(3)
    ]
    lines = [
        {"run": each["run"], "images": 10, "eps": {eps: {"crown": crown, "unstable": [1.0, crown]}
         for eps, crown in (("0.01", 9), ("0.02", 7 - place // 3), ("0.03", 0))}}
        for place, each in enumerate(records)
    ]  # fmt: skip
    known = tables.with_bounds(records, lines)
    assert known[0]["results"]["certified"] == 0.7 and known[0]["results"]["unstable"] == 8
    assert "certified" not in tables.with_bounds(records, [])[0]["results"]
    rows = [dict(zip(tables.COLUMNS, row, strict=True)) for row in tables.oui_rows([], known)]
    certified = next(row for row in rows if (row["points"], row["with"]) == ("runs", "certified accuracy"))
    assert certified["n"] == 9, "fine-tuning begins as the direct swap does"
    assert certified["ρ"] == pytest.approx(-1) and certified["reading"] == "negative"


def test_which_settles_first() -> None:
    records = [
        record(replace(Options("mnist"), seed=seed), 2.0, 0.5, patterns_settled=early, weights_settled=0.8)
        for seed, early in enumerate((0.4, 0.5, 0.9))
    ]
    (row,) = tables.settled_table(records).rows
    found = dict(zip(tables.settled_table(records).columns, row, strict=True))
    assert found["patterns"].mean == pytest.approx(0.6) and found["weights"].mean == pytest.approx(0.8)
    assert found["weights : patterns"].mean == pytest.approx((2 + 1.6 + 0.8 / 0.9) / 3)
    assert found["first"] == "patterns in 2"
    assert not tables.settled_table([record(Options("mnist"), 2.0, 0.5)]).rows
