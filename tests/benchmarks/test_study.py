"""benchmarks/study: suites and their errors, keys, runs that resume, and tables from records whose truth is known."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.records import Record, Records, of, read_records, upgraded, versioned_key
from benchmarks.study import asking, tables
from benchmarks.study.__main__ import main
from benchmarks.study.claims import outcomes
from benchmarks.study.frames import Study
from benchmarks.study.runner import Runner
from benchmarks.study.suite import SUITES, Cell, Suite, read
from benchmarks.study.training import TrainingTask, key_of, options_of
from tests.support.processes import Process
from verifiable_relu.errors import InputError

SUITE = """
about = "a"
tuning = "none"
cut = "much"
arms = ["lambda-gelu", "late", "relu"]
seeds = 2
images = 4

[training]
hidden = [8]
epochs = 2

[[arm]]
name = "late"
of = "gelu-swap-finetune"
[arm.training]
switch = 0.5

[[network]]
name = "net"
data = "digits"
eps = ["0.01", "1/20", "0.2"]

[[network]]
name = "other"
data = "digits"
eps = ["1/20"]
arms = ["relu"]
seeds = [5]
methods = ["crown"]
[network.training]
eps = 0.5

[[objective]]
name = "plain"

[[objective]]
name = "stable"
option = "stability"
weights = [0.1, 1]

[[method]]
name = "crown"
limit = 3

[[method]]
name = "auto"
limit = 2.5

[[claim]]
name = "one"
says = "more"
network = "net"
arm = "lambda-gelu"
against = "relu"
measure = "certified"
eps = "1/20"
method = "auto"
expected = "more"
"""


def written(folder: Path, text: str = SUITE) -> Path:
    path = folder / "suite.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_suite_fills_in_what_networks_and_claims_leave_out(tmp_path: Path) -> None:
    suite, name = read(written(tmp_path))
    assert name == "suite" and len(suite.cells()) == 2 * 3 * 3 + 3
    assert suite.cells()[0] == ("net", "plain", 0.0, "lambda-gelu", 0) and suite.cells()[-1].seed == 5
    assert suite.network[0].methods == ("crown", "auto") and suite.network[1].methods == ("crown",)
    assert (suite.claim[0].objective, suite.claim[0].weight) == ("plain", 0.0)
    assert Cell("net", "stable", 0.1, "relu", 3).name == "net_relu_stable-0.1_seed3"


WRONG = [
    ('about = "a"', "about = 1", "Expected `str`, got `int` - at `$.about`"),
    ("seeds = 2", "seeds = 2\ncolour = 1", "unknown field `colour`"),
    ("images = 4", "images = 0", "$.images"),
    ('name = "auto"\nlimit', 'name = "crown"\nlimit', "method: 'crown' stands there twice"),
    ('name = "other"', 'name = "net"', "network: 'net' stands there twice"),
    ('methods = ["crown"]', 'methods = ["ibp"]', "network other: methods: 'ibp' is none of crown, auto"),
    ('"1/20", "0.2"', '"1/20", "2"', "eps must be radii between 0 and 1"),
    ('measure = "certified"', 'measure = "beauty"', "claim one: measure: 'beauty' is none of"),
    ('eps = "1/20"\nmethod', 'eps = "0.3"\nmethod', "claim one: eps: '0.3' is none of"),
    ('against = "relu"', 'against = "prelu"', "claim one: no setting net, plain 0, prelu"),
    ('expected = "more"', 'expected = "more"\nmargin = 0.1', "claim one: a margin belongs to 'no difference'"),
    ('expected = "more"', 'expected = "perhaps"', "$.claim[0].expected"),
    ("[training]", "[training", "suite.toml"),
]


@pytest.mark.parametrize(("before", "after", "said"), WRONG, ids=[said[:30] for _, _, said in WRONG])
def test_a_fault_of_a_suite_is_an_error_with_its_place(before: str, after: str, said: str, tmp_path: Path) -> None:
    assert before in SUITE
    with pytest.raises(InputError) as error:
        read(written(tmp_path, SUITE.replace(before, after)))
    assert said in str(error.value) and str(error.value).startswith(str(tmp_path))


@pytest.mark.parametrize(("before", "after"), [("hidden = [8]", "hidde = [8]"), ('of = "gelu', 'of = "swelu'),
                                               ("epochs = 2", 'epochs = "two"')])  # fmt: skip
def test_options_with_which_nothing_can_be_trained_are_found_when_a_study_is_run(
    before: str, after: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, SUITE.replace(before, after))
    read(path)
    assert main([str(path), "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_suites_of_the_repository_are_read() -> None:
    for path in SUITES.glob("*.toml"):
        suite, name = read(path.stem)
        assert name == path.stem and suite.cut and suite.tuning


def test_a_key_names_changed_options_alone_and_another_version_is_refused(tmp_path: Path) -> None:
    suite, _ = read(written(tmp_path))
    cell = Cell("net", "plain", 0.0, "late", 1)
    key = key_of(options_of(suite, cell))
    changed = {"data": "digits", "epochs": 2, "eps": 0.05, "hidden": [8], "switch": 0.5}
    assert key == upgraded(key) == {"version": 1, "method": "gelu-swap-finetune", "options": changed}
    assert key == key_of(options_of(suite, cell._replace(seed=7)))
    assert versioned_key("m", {"b": (1, 2), "a": 1}, {"a": 1})["options"] == {"b": [1, 2]}
    with pytest.raises(InputError, match="version 2"):
        upgraded({**key, "version": 2})


WHOLE = SUITE.replace("seeds = 2", "seeds = 1").replace('["lambda-gelu", "late", "relu"]', '["late", "relu"]')
SMALL = "\n\n".join(part for part in WHOLE.split("\n\n") if "stable" not in part and "claim" not in part)


@pytest.mark.thorough
def test_a_study_that_is_killed_goes_on_without_losing_or_repeating_anything(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="needs scikit-learn")
    path, out = written(tmp_path, SMALL), tmp_path / "out"
    with Process(["-m", "benchmarks.study", str(path), "--out", str(out), "--quiet"]) as process:
        until = time.monotonic() + 120
        while time.monotonic() < until and process.poll() is None:
            if (out / "records.jsonl").is_file() and '"answer"' in (out / "records.jsonl").read_text(encoding="utf-8"):
                break
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    before = read_records(out)
    assert main([str(path), "--out", str(out)]) == 0
    after = read_records(out)
    assert after[: len(before)] == before
    suite, _ = read(path)
    trainings = of(after, "training")
    assert [each["status"] for each in trainings] == ["trained"] * 3 and len(suite.cells()) == 3
    asked = [(r["cell"], r["eps"], r["method"], r["image"]) for r in of(after, "answer")]
    assert (
        len(asked) == len(set(asked)) == sum(len(r["right"]) * (6 if r["network"] == "net" else 1) for r in trainings)
    )
    assert all(r["trust"] for r in of(after, "answer") if r["verdict"] == "unsat")
    report = (out / "report.md").read_text(encoding="utf-8")
    assert "## Accuracy" in report and "## Time" in report and not list((out / "networks").glob("*.checkpoint"))
    # Nothing is left; other options are refused.
    assert main([str(path), "--out", str(out), "--quiet"]) == 0 and len(read_records(out)) == len(after)
    written(tmp_path, SMALL.replace("epochs = 2", "epochs = 3"))
    assert main([str(path), "--out", str(out), "--quiet"]) == 2


def test_what_fails_is_recorded_and_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn", reason="needs scikit-learn")
    suite, _ = read(written(tmp_path, SMALL))
    calls: list[str] = []

    def train(task: TrainingTask) -> Record:
        calls.append(task.cell.name)
        if len(calls) == 1:
            raise MemoryError("no room")
        return {**task.cell._asdict(), "key": key_of(task.options), "status": "diverged", "detail": "NaN"}

    monkeypatch.setattr(TrainingTask, "__call__", train)
    for _ in range(2):
        with Records(tmp_path / "out") as records:
            Runner(suite, tmp_path / "suite.toml", tmp_path / "out", records, 1, lambda line: None, suite.cells()).run()
    status = [record["status"] for record in of(read_records(tmp_path / "out"), "training")]
    assert status == ["failed", "diverged", "diverged", "diverged"] and calls[0] == calls[3]
    assert asking.is_final({"reason": "error", "verdict": "unknown", "limit": 9.0}, 1) is False
    assert asking.is_final({"reason": "timeout", "verdict": "unknown", "limit": 1.0}, 2.0) is False
    assert asking.is_final({"reason": "timeout", "verdict": "unknown", "limit": 2.0}, 2.0) is True


# Tables of planted records: 20 images, all right, of which the first so many are certified.
PLANTED = SUITE.replace("seeds = 2", "seeds = 6").replace("images = 4", "images = 20").replace('"late", ', "")


def planted(folder: Path, counts: Callable[[str, int], int], *claims: str, **changed: Any) -> Study:
    text = PLANTED[: PLANTED.index('[[network]]\nname = "other"')] + PLANTED[PLANTED.index("[[objective]]") :]
    text = text[: text.index("[[claim]]")] + "".join(f"[[claim]]\n{claim}\n" for claim in claims)
    suite, name = read(written(folder, text))
    return Study(name, suite, records(suite, counts, **changed))


def records(suite: Suite, counts: Callable[[str, int], int], sixth: bool = True, seconds: float = 1.0) -> list[Record]:
    made: list[Record] = [{"kind": "note", "text": "two cores"}]
    for cell in suite.cells():
        images = list(range(20))
        results = {"clean_test": 0.9, "unstable": {"1/20": [2.0, 1.5]}, "lam_learned": [1.0, 2.0, 3.0], "norm": 4.0}
        results |= {"joint": {"eps": "1/20", "images": 20, "inf": 10, "160": 10, "20": 5, "5": 0}}
        about = {"key": {}, "status": "trained", "detail": "", "results": results, "images": images, "right": images}
        made.append({"kind": "training", **cell._asdict(), **about})
        for method, image in ((m, i) for m in ("crown", "auto") for i in images if sixth or cell.seed < 5):
            certified = image < counts(cell.arm, cell.seed)
            verdict = "unsat" if certified else "unknown" if method == "crown" or image == 19 else "sat"
            took = seconds * (2 if cell.arm == "relu" else 1)
            about = {"cell": cell.name, "eps": "1/20", "method": method, "image": image, "limit": 2.5}
            told = {"verdict": verdict, "seconds": took, "subproblems": image, "margin": 1.0}
            made.append({"kind": "answer", **about, **told})
    return made


def claim(name: str, **changed: Any) -> str:
    fields = {"name": name, "says": name, "network": "net", "arm": "lambda-gelu", "against": "relu", "expected": "more"}
    fields |= {"measure": "certified", "eps": "1/20", "method": "auto", **changed}
    return "\n".join(f"{key} = {value!r}" for key, value in fields.items() if value != "")


def some(arm: str, seed: int) -> int:
    return 5 + seed % 2 + (6 + seed % 3) * (arm == "lambda-gelu")


def level(arm: str, seed: int) -> int:
    return 5 + 6 * (arm == "lambda-gelu")


def test_a_planted_effect_is_shown_and_chance_is_not(tmp_path: Path) -> None:
    study = planted(
        tmp_path, some, claim("effect"), claim("wrong", expected="fewer"), claim("same", expected="no difference")
    )
    effect, wrong, same = outcomes(study)
    assert (effect.reading, wrong.reading, same.reading) == ("shown", "refuted: more", "refuted: more")
    assert effect.difference is not None and effect.difference.mean == pytest.approx(7 / 20)
    assert effect.images is not None and effect.images.p == 2 ** (1 - effect.images.n)
    assert effect.corrected == pytest.approx(3 * max(effect.seeds.p, effect.images.p))
    (luck,) = outcomes(planted(tmp_path, lambda arm, seed: 9 + 9 * ((arm, seed) == ("lambda-gelu", 0)), claim("luck")))
    assert luck.reading == "not shown"


def test_equivalence_needs_a_margin_and_costs_are_ratios(tmp_path: Path) -> None:
    near = claim("near", expected="no difference", margin=0.5)
    cost = claim("cost", measure="seconds", expected="no difference", margin=4.0)
    first, second, third = outcomes(planted(tmp_path, level, near, cost, claim("plain", measure="seconds")))
    # Six equal differences are tested by their signs: 2/2⁶ for a difference, 1/2⁶ for equivalence, twice declared.
    assert first.reading == "equivalent within 0.5" and first.least == pytest.approx(0.3)
    assert first.corrected_equivalent == 2 / 2**6 and third.seeds.p == 2 / 2**6 and third.reading == "not shown"
    # One second against two, and one question undecided, which counts twice its limit of 2.5.
    assert second.reading == "equivalent within 4" and second.first == pytest.approx((19 * 1 + 5) / 20)
    assert second.least == pytest.approx((19 * 2 + 5) / (19 + 5))


def test_what_is_not_answered_is_no_accuracy(tmp_path: Path) -> None:
    study = planted(tmp_path, some, claim("effect"), sixth=False)
    (found,) = outcomes(study)
    assert found.seeds.n == 5
    asked = study.overall[study.overall.eps == "1/20"]
    assert asked.certified.isna().sum() == 6 and asked[asked.seed == 5].certified.isna().all()
    assert study.overall[study.overall.eps == "0.2"].certified.isna().all()
    lone = Study("none", study.suite, study.records[:1])
    assert outcomes(lone)[0].reading == "not measured" and math.isnan(outcomes(lone)[0].corrected)


def row(text: str, *words: str) -> dict[str, str]:
    """The first row of a table that has all the words, by its headings."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return dict(zip(lines[0], next(line for line in lines[2:] if set(words) <= set(line)), strict=True))


def test_tables_by_hand(tmp_path: Path) -> None:
    study = planted(tmp_path, lambda arm, seed: 10 if arm == "relu" else 4, claim("effect"))
    found = row(tables.accuracy_table(study), "relu", "1/20")
    assert (found["seeds"], found["certified"]) == ("6", "50.0% [50.0%, 50.0%]") and found["clean"].startswith("100.0%")
    assert found["not refuted"].startswith("55.0%") and found["unstable"].startswith("3.5")
    found = row(tables.time_table(study), "relu", "1/20")
    assert (found["safe"], found["unsafe"], found["undecided"], found["questions"]) == ("60", "54", "6", "120")
    assert found["mean s (PAR-2)"].startswith(f"{(19 * 2 + 5) / 20:.3g}") and found["branch"] == "95%"
    found = row(tables.versus_table(study), "relu", "1/20")
    assert found["certified, difference"].startswith("-30.0%") and found["time, ratio"].startswith("0.56")
    found = row(tables.joint_table(study), "relu")
    assert (found["ReLU alone"][:5], found["λ ≥ 20"][:5], found["λ ≥ 5"][:4]) == ("50.0%", "25.0%", "0.0%")
    assert row(tables.profile_table(study), "relu")["mean ρ"] == "1"
    page = tables.page_of(study, ["some.png"])
    assert "![some.png](some.png)" in page and "- two cores" in page and "| effect | effect | more |" in page


def test_bad_arguments_are_one_line_and_make_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path)
    for place, *asked in (["none.toml"], [path, "--jobs", "0"], [path, "--only", "x"], [path, "--seed", "9"]):
        assert main([str(place), *map(str, asked), "--out", str(tmp_path / "out")]) == 2
        assert capsys.readouterr().err.count("\n") == 1 and not (tmp_path / "out").exists()
    assert main([str(path), "--plan", "--out", str(tmp_path / "out")]) == 0
    assert "21 trainings" in capsys.readouterr().out and not (tmp_path / "out").exists()
