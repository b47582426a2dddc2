"""The claims, tables and figures of a study, from records whose truth is known."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.common.markup import Interval, Table
from benchmarks.study import figures, tables
from benchmarks.study.claims import Outcome, findings, outcomes
from benchmarks.study.joined import Setting, joined
from benchmarks.study.outcomes import CLAIMED, NUMBERS
from benchmarks.study.tables import Point, fronts, screening_table, undominated
from tests.support.study import ARMS, EPS, LIMIT, METHODS, Record, claim, failed, network, suite

ALL = range(20)


def certified(counts: Callable[[str, int], int]) -> Callable[..., tuple[str, float]]:
    """Answers by which an arm's network of a seed is certified on its first ``counts(arm, seed)`` images."""

    def answer(arm: str, weight: float, seed: int, image: int, eps: str, method: str) -> tuple[str, float]:
        return ("unsat", 0.1 + 0.01 * image) if image < counts(arm, seed) else ("unknown", LIMIT)

    return answer


def study_of(counts: Callable[[str, int], int], seeds: int, *claims: Record) -> list[Record]:
    answer = certified(counts)
    made = [suite(seeds, claims)]
    for seed in range(seeds):
        for arm in ARMS:
            made += network(arm, seed, ALL, answer)
    return made


def outcome(records: list[Record], name: str) -> Outcome:
    return next(each for each in outcomes(joined(records)) if each.claim["name"] == name)


def rows(table: Table) -> list[dict[str, Any]]:
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def planted(arm: str, seed: int) -> int:
    """λ-GELU is certified on six images more than ReLU; the direct swap differs from λ-GELU by chance alone."""
    return {"lambda-gelu": 15 + seed % 2, "relu": 9 + seed % 3, "gelu-swap": 14 + (seed * 7) % 3}[arm]


def test_a_planted_effect_is_shown_and_chance_is_not() -> None:
    records = study_of(planted, 6, claim("effect"), claim("chance", against="gelu-swap"))
    effect, chance = outcome(records, "effect"), outcome(records, "chance")
    # ReLU's networks are certified on 9, 10, 11, 9, 10, 11 of 20 images, the others on 15, 16, 15, 16, 15, 16.
    assert effect.first == pytest.approx(15.5 / 20) and effect.second == pytest.approx(10 / 20)
    assert effect.difference is not None and effect.difference.mean == pytest.approx(5.5 / 20)
    assert effect.images is not None and effect.images.n == 7, "images 9 to 15, each once, whatever the number of seeds"
    assert effect.reading == "shown" and effect.direction == "more"
    assert chance.reading == "not shown" and chance.corrected > 0.05
    said = findings([effect, chance])
    assert "**shown**" in said[0] and "`effect`" in said[0] and "77.50% against relu 50.00%" in said[0]
    assert "**not shown**" in said[1]


def test_a_claim_can_compare_with_another_network() -> None:
    def shifted(arm: str, seed: int) -> int:
        return 4 + seed % 2

    there = study_of(planted, 6, claim("beside", against="lambda-gelu", against_network="other"))
    other = [{**deepcopy(record), "network": "other", "cell": f"other {record['cell']}"} for record in
             study_of(shifted, 6) if record["kind"] != "suite"]  # fmt: skip
    found = outcome([*there, *other], "beside")
    assert found.first == pytest.approx(15.5 / 20) and found.second == pytest.approx(4.5 / 20)
    assert found.reading == "shown" and "against lambda-gelu, other 22.50%" in findings([found])[0]
    (row,) = rows(tables.claim_table([found]))
    assert row["against"] == "lambda-gelu, other" and row["network"] == "net"


def test_what_is_shown_against_the_expectation_is_said_so() -> None:
    records = study_of(planted, 6, claim("fewer", expected="fewer"), claim("same", expected="no difference"))
    assert outcome(records, "fewer").reading == outcome(records, "same").reading == "refuted: more"
    level = study_of(lambda arm, seed: 10, 6, claim("same", expected="no difference"))
    assert outcome(level, "same").reading == "not shown"


def test_arms_that_hardly_differ_are_equivalent_within_the_margin_of_the_claim() -> None:
    same = {"expected": "no difference", "against": "gelu-swap"}
    claims = [claim("near", margin=0.1, **same), claim("nearer", margin=0.01, **same), claim("none", **same)]
    near, nearer, none = outcomes(joined(study_of(planted, 6, *claims)))
    assert near.reading == "equivalent within 10 points" and near.least == none.least < 0.1
    assert near.corrected_equivalent == pytest.approx(2 * near.equivalent), "two claims have a margin"
    assert nearer.reading == none.reading == "not shown" and math.isnan(none.equivalent)
    far = outcome(study_of(planted, 6, claim("far", expected="no difference", margin=0.02)), "far")
    assert far.reading == "refuted: more" and far.equivalent > 0.5
    (row, *_) = rows(tables.claim_table([near]))
    assert row["margin"] == 0.1 and row["equivalent within"] == near.least
    assert "equivalence within 10 points: p = " in findings([near])[0]


def test_times_are_equivalent_by_the_ratio_of_the_seeds_means() -> None:
    def timed(arm: str, weight: float, seed: int, image: int, eps: str, method: str) -> tuple[str, float]:
        return "unsat", 0.1 * (image + 1) * (1.1 + 0.01 * seed if arm == "relu" else 1.0)

    times = {"measure": "seconds", "expected": "no difference"}
    made = [suite(5, [claim("near", margin=1.25, **times), claim("nearer", margin=1.05, **times)])]
    made += [
        record for seed in range(5) for arm in ("lambda-gelu", "relu") for record in network(arm, seed, ALL, timed)
    ]
    near, nearer = outcomes(joined(made))
    assert near.reading == "equivalent within a factor of 1.25, fewer" and nearer.reading == "refuted: fewer"
    assert 1.12 < near.least < 1.14


def test_holm_takes_away_what_a_claim_alone_would_show() -> None:
    alone = outcome(study_of(planted, 6, claim("effect")), "effect")
    others = [claim(f"none{i}", against="gelu-swap") for i in range(5)]
    among = outcome(study_of(planted, 6, claim("effect"), *others), "effect")
    assert alone.reading == "shown" and alone.p == among.p and among.reading == "not shown"


def test_one_lucky_seed_shows_nothing_though_the_images_do() -> None:
    found = outcome(
        study_of(lambda arm, seed: 18 if (arm, seed) == ("lambda-gelu", 0) else 9, 6, claim("luck")), "luck"
    )
    assert found.images is not None and found.images.p < 0.01 and found.seeds.p > 0.2
    assert found.reading == "not shown"


def test_two_images_show_nothing_though_all_seeds_agree() -> None:
    found = outcome(study_of(lambda arm, seed: 9 + (arm == "lambda-gelu") * (1 + seed % 2), 8, claim("few")), "few")
    assert found.images is not None and found.seeds.p < 0.01 and found.images.p == 0.5
    assert found.reading == "not shown"


def test_costs_are_compared_on_images_that_both_arms_classify_rightly() -> None:
    def slow(arm: str, weight: float, seed: int, image: int, eps: str, method: str) -> tuple[str, float]:
        # ReLU's own images, which λ-GELU classifies wrongly, would make it look slow.
        seconds = 4.0 if image > 15 else 0.1 * (image + 1) + (0.05 + 0.02 * seed) * (arm == "relu")
        return "unsat", seconds

    made = [suite(4, [claim("time", measure="seconds", expected="fewer"), claim("work", measure="subproblems")])]
    for seed in range(4):
        made += network("lambda-gelu", seed, range(16), slow) + network("relu", seed, range(2, 20), slow)
    time, work = outcome(made, "time"), outcome(made, "work")
    assert time.images is not None and time.images.n == 14 and time.images.effect == -1
    assert time.difference is not None and time.difference.mean == pytest.approx(-0.08)
    assert time.reading == "shown" and work.reading == "refuted: fewer"


def test_seconds_of_questions_that_were_asked_in_batches_are_void(full: list[Record]) -> None:
    batched = deepcopy(full)
    del batched[0]["suite"]["variants"]
    study = joined(batched)
    assert all(row["median s"] is row["mean s (PAR-2)"] is None for row in rows(tables.time_table(study)))
    assert [each.reading for each in outcomes(study) if each.claim["measure"] == "seconds"] == ["void"]
    assert not list(figures.times(study, "net")) and list(figures.times(joined(full), "net"))
    # Today's suite goes on with the records: seconds of both kinds are among them.
    assert joined(full).timed and not study.timed and not joined([*batched, full[0]]).timed


def test_undecided_questions_count_twice_their_limit() -> None:
    made = study_of(lambda arm, seed: 20 if arm == "relu" else 10, 2, claim("time", measure="seconds"))
    found = outcome(made, "time")
    assert found.first == pytest.approx((sum(0.1 + 0.01 * i for i in range(10)) + 10 * 2 * LIMIT) / 20)
    table = {row["arm"]: row for row in rows(tables.time_table(joined(made))) if row["method"] == "auto"}
    assert table["lambda-gelu"]["undecided"] == 20 and table["relu"]["undecided"] == 0
    assert table["lambda-gelu"]["mean s (PAR-2)"].mean == pytest.approx(found.first)
    assert table["lambda-gelu"]["median s"] == pytest.approx((0.19 + 10) / 2)


def test_times_are_of_the_images_that_all_arms_classify_rightly() -> None:
    made = [suite(1)]
    for arm, right in zip(ARMS, (range(12), range(4, 20), range(0, 20, 2)), strict=True):
        made += network(arm, 0, right, certified(lambda arm, seed: 20))
    assert {row["questions"] for row in rows(tables.time_table(joined(made)))} == {4}, "4, 6, 8 and 10"
    # A seed that one arm alone has cannot be compared.
    made += network("relu", 1, ALL, certified(lambda arm, seed: 20))
    assert {(row["seeds"], row["questions"]) for row in rows(tables.time_table(joined(made)))} == {(1, 4)}


def test_what_is_missing_is_a_dash_and_no_zero() -> None:
    made = [suite(3, [claim("some")]), *study_of(planted, 1)[1:], failed("relu", 1)]
    made += [record for record in network("relu", 2, ALL, certified(planted)) if record["kind"] != "answer"]
    made = [r for r in made if r.get("cell") != "net_gelu-swap_0.0_0"]
    found = {(row["arm"], row["ε"]): row for row in rows(tables.main_table(joined(made)))}
    relu, swap = found["relu", "1/255"], found["gelu-swap", "1/255"]
    assert relu["seeds"] == "2 of 3, 1 failed" and relu["answered"] == 1
    assert relu["certified, auto"].n == 1 and relu["certified, auto"].mean == 9 / 20, "seed 2 is not answered yet"
    assert relu["clean"].n == 2 and swap["seeds"] == "0 of 3"
    assert [swap[name] for name in ("clean", "attacked", "certified, auto")] == [None] * 3
    (claimed,) = outcomes(joined(made))
    assert claimed.reading == "not tested" and "one seed is no test" in findings([claimed])[0]


def test_an_accuracy_needs_the_answers_to_all_images() -> None:
    made = [suite(1), *network("relu", 0, ALL, certified(planted))]
    last = made.pop()
    assert (last["eps"], last["method"]) == (EPS[-1], METHODS[-1])
    (cell,) = joined(made).cells
    assert cell.value("certified", EPS[-1], METHODS[-1]) is None and cell.value("attacked", EPS[-1]) is None
    assert cell.value("certified", EPS[-1], METHODS[0]) == cell.value("certified", EPS[0]) == 9 / 20


def test_a_wrongly_classified_image_is_neither_attacked_nor_certified() -> None:
    def refuted(arm: str, weight: float, seed: int, image: int, eps: str, method: str) -> tuple[str, float]:
        return ("sat" if method == "auto" and image < 5 else "unsat" if image < 10 else "unknown"), 0.1

    (cell,) = joined([suite(1), *network("relu", 0, range(15), refuted)]).cells
    shares = [cell.value(measure, EPS[0]) for measure in ("clean", "attacked")]
    assert shares == [15 / 20, 10 / 20] and cell.value("certified", EPS[0], "auto") == 5 / 20


def test_without_a_method_that_attacks_the_attacked_accuracy_is_unknown() -> None:
    described = suite(1)
    described["suite"]["networks"][0]["methods"] = ["crown"]
    made = [r for r in network("relu", 0, ALL, certified(planted)) if r.get("method") != "auto"]
    (cell,) = joined([described, *made]).cells
    assert cell.value("attacked", EPS[0]) is None and cell.value("certified", EPS[0]) == 9 / 20
    assert cell.value("certified", EPS[0], "auto") is None


def test_times_are_of_methods_that_decide_and_certified_accuracies_of_methods_that_prove() -> None:
    described = suite(1)
    described["suite"]["networks"][0]["methods"] = ["crown", "attack", "auto"]
    described["suite"]["methods"].insert(1, {"name": "attack", "limit": LIMIT})
    made = network("relu", 0, ALL, certified(planted))
    made += [{**r, "method": "attack", "verdict": "unknown"} for r in made if r.get("method") == "auto"]
    study = joined([described, *made])
    assert {row["method"] for row in rows(tables.time_table(study))} == {"auto"}
    columns = tables.main_table(study).columns
    assert "certified, crown" in columns and "certified, attack" not in columns


def test_the_last_record_of_a_thing_counts() -> None:
    first = network("relu", 0, ALL, certified(lambda arm, seed: 3))
    second = network("relu", 0, ALL, certified(lambda arm, seed: 7))
    (cell,) = joined([suite(1), *first, *second]).cells
    assert cell.value("certified", EPS[0], "auto") == 7 / 20
    again = [failed("relu", 0), *network("relu", 0, ALL, certified(planted))]
    assert joined([suite(1), *again]).failed(Setting("net", "plain", 0.0, "relu")) == 0


def test_dominated_points_leave_the_front() -> None:
    accuracies = {0.0: (20, 2), 0.1: (18, 8), 0.2: (17, 6), 0.3: (14, 10), 0.4: (14, 9)}
    made = [suite(1, weights=list(accuracies))]
    for weight, (clean, proven) in accuracies.items():
        made += network("relu", 0, range(clean), certified(lambda arm, seed, n=proven: n), weight=weight)
    study = joined(made)
    kept = undominated(fronts(study)["net", EPS[0], "relu"])
    assert [point.setting.weight for point in kept] == [0.3, 0.1, 0.0]
    marks = [row["of its arm"] for row in rows(tables.pareto_table(study)) if row["ε"] == EPS[0]]
    assert marks == ["front", "front", "dominated", "front", "dominated"]


def test_means_that_differ_in_their_last_bit_alone_are_equal() -> None:
    # Added one by one; from Python 3.12 on, sum() rounds but once.
    means = [((0.1 + 0.2 + 0.3) / 3, 0.4), ((0.3 + 0.2 + 0.1) / 3, 0.5)]
    assert means[0][0] > means[1][0]
    worse, better = (
        Point(Setting("net", "plain", weight, "relu"), *(Interval(mean, mean, mean, 3) for mean in pair))
        for weight, pair in enumerate(means)
    )
    assert undominated([worse, better]) == [better]


def test_networks_are_matched_by_seed_and_likeness() -> None:
    made = [suite(2, weights=[0.0, 0.1])]
    for seed in range(2):
        for arm, weight, clean, neurons in (
            ("lambda-gelu", 0.0, 18, 30.0), ("lambda-gelu", 0.1, 14, 20.0),
            ("relu", 0.0, 20, 50.0), ("relu", 0.1, 18, 33.0 + seed),
        ):  # fmt: skip
            layers = {eps: [neurons, 1.0] for eps in EPS}
            measured = {"unstable": layers, "weight_norms": [3.0 * clean, 4.0 * clean]}
            made += network(arm, seed, range(clean), certified(planted), weight=weight, measures=measured)
    found = rows(tables.matched_table(joined(made)))
    assert {(row["minus"], row["matched by"], row["pairs"]) for row in found} == {
        ("relu", "clean", 2),
        ("relu", "norm", 2),
    }
    assert all(row["Δ unstable"].mean == pytest.approx(-3.5) for row in found)
    (first, *_) = rows(tables.unstable_table(joined(made)))
    assert first["per layer"] == "30.0 + 1.0" and first["norm of weights"].mean == pytest.approx(5 * 18)


def test_screening_finds_which_rule_tells() -> None:
    made = [suite(16)]
    random = np.random.default_rng(0)
    for seed in range(16):
        results = {"clean": 0.5 + 0.02 * seed, "monitor": [{"part": 0.1, "oui": 0.3 + 0.01 * seed}]}
        one = network("relu", seed, ALL, certified(planted), results=results)
        one[0]["epochs"] = [{"lam": [], "accuracy": float(random.random())}]
        one[0]["options"] |= {"rate": 0.1}
        made += one
    (row,) = rows(screening_table(joined(made)))
    assert row["trainings"] == 16 and row["all"] == 0.5
    assert row["OUI"].startswith("100 ") and row["OUI, batch form"] == "– / 0", "no record has that form"
    # A number that all have keeps all.
    assert row["learning rate"] == "50 [28, 72] / 100" and int(row["early accuracy"].split()[0]) < 80


def test_every_measure_that_can_be_claimed_has_an_outcome() -> None:
    claims = [claim(name, measure=name) for name in CLAIMED]
    numbers = {
        "clean_before_substitution": 0.5, "clean_after_substitution": 0.4, "mean_logit_change": 0.1,
        "worst_logit_change": 1.0, "proven_logit_change": 9.0, "flipped_predictions": 3, "lam_learned": [2.0, 3.0],
        "monitor": [{"part": 0.1, "oui": 0.4, "oui_batch": 0.5}], "patterns_settled": 0.5, "weights_settled": 0.6,
        "int8": {"clean": 0.4},
        "pruned": {"0.5": 0.4, "0.7": 0.3, "0.9": 0.1},
    }  # fmt: skip
    made = [suite(2, claims)]
    for seed in range(2):
        for arm in ("lambda-gelu", "relu"):
            shift = 0.01 * seed if arm == "relu" else 0.0
            measured = {"unstable": {eps: [3.0 + shift] for eps in EPS}}
            made += network(arm, seed, ALL, certified(planted), results=numbers, measures=measured)
    assert all(joined(made).cells[0].value(name) is not None for name in NUMBERS)
    for each in outcomes(joined(made)):
        assert not each.reading.startswith(("not measured", "not tested")) and each.difference is not None, each.claim[
            "name"
        ]


@pytest.fixture(scope="module")
def full() -> list[Record]:
    """The records of a study that has everything, of two seeds and two weights."""
    made = [suite(2, [claim("effect"), claim("time", measure="seconds")], [0.0, 0.1])]
    for seed in range(2):
        for weight in (0.0, 0.1):
            for arm in ARMS:
                lams = [1.5 + seed, 2.0, 1.2] if arm == "lambda-gelu" else []
                results = {"lam_learned": lams, "patterns_settled": 0.3, "weights_settled": 0.6, "int8": {"clean": 0.7}}
                joint = {"eps": "1/255", "images": 18, "inf": 12, "160": 11, "20": 6, "5": 0}
                measured = {
                    "unstable": {eps: [30.0, 4.0, 1.0] for eps in EPS}, "weight_norms": [1.0, 2.0], "joint": joint,
                }  # fmt: skip
                right = range(18 - round(30 * weight))
                one = network(arm, seed, right, certified(planted), weight=weight, results=results, measures=measured)
                one[0]["epochs"] = [
                    {"lam": lams, "accuracy": 0.4},
                    {"lam": [20 * lam for lam in lams], "accuracy": 0.6},
                ]
                made += one
    return [*made, {"kind": "note", "text": "made by hand"}]


def test_every_table_is_written_in_three_forms(full: list[Record], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(figures, "write", lambda study, folder: [])
    files = tables.write(full, tmp_path)
    page = (tmp_path / "report.md").read_text()
    assert "made by hand" in page and "## Findings" in page and "(row `effect`)" in page
    names = {"claims", *tables.SECTIONS} - {"screening"}
    assert {path.stem for path in files if path.suffix == ".csv"} == names
    for name in names:
        latex = (tmp_path / "tables" / f"{name}.tex").read_text()
        assert r"\toprule" in latex and (tmp_path / "tables" / f"{name}.md").read_text() in page
    joint = rows(tables.joint_table(joined(full)))[0]
    assert [joint[name].mean for name in ("ReLU alone", "λ ≥ 20")] == [12 / 18, 6 / 18]


@pytest.mark.thorough
def test_figures_are_drawn_of_what_there_is(full: list[Record], tmp_path: Path) -> None:
    one = deepcopy([record for record in full if record.get("eps") != EPS[1]])
    one[0]["suite"]["networks"][0]["eps"] = [EPS[0]]
    files = tables.write(one, tmp_path)
    drawn = [path for path in files if path.parent.name == "figures"]
    kinds = {path.stem for path in drawn}
    assert kinds == {"pareto-net", "cactus-net", "unstable-net", "profiles-net"}, "one radius makes no curve"
    for panel in figures.certified(joined(full), "net"):
        places = [[x for x, _ in one.points] for one in panel.series]
        assert all(len(radii) == 2 for radii in places) and len({radii[0] for radii in places}) == len(places) == 3
    assert all(path.read_bytes().startswith(b"%PDF" if path.suffix == ".pdf" else b"\x89PNG") for path in drawn)
    links = re.findall(r"\]\((figures/.*?)\)", (tmp_path / "report.md").read_text())
    assert len(links) == 4 and all((tmp_path / link).is_file() for link in links)


def test_a_network_that_no_complete_method_is_asked_about_has_no_times(full: list[Record]) -> None:
    bounds = json.loads(json.dumps(full).replace('"auto"', '"alpha-crown"'))
    assert list(figures.times(joined(full), "net")) and not list(figures.times(joined(bounds), "net"))


def test_a_study_that_is_not_finished_has_its_tables(full: list[Record], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(figures, "write", lambda study, folder: [])
    parts = [[], full[:1], full[:2], full[:40], full[:-200], full[1:], [r for r in full if r["kind"] != "images"]]
    parts += [[r for r in full if r["kind"] != "measure"], [r for r in full if r["kind"] != "training"]]
    for place, part in enumerate(parts):
        assert tables.write(part, tmp_path / str(place))
        for value in rows(tables.main_table(joined(part))):
            assert all(not (isinstance(cell, float) and math.isnan(cell)) for cell in value.values())


def test_a_folder_that_cannot_be_written_is_named(full: list[Record], tmp_path: Path) -> None:
    (tmp_path / "tables").write_text("")
    with pytest.raises(Exception, match=re.escape(str(tmp_path / "tables"))):
        tables.write(full[:1], tmp_path)
