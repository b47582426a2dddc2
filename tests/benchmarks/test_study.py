"""Studies: the file that describes one, its cells, and a run that is killed and goes on."""

from __future__ import annotations

import hashlib
import json
import math
import pickle
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.common.records import Records, read_records
from benchmarks.study import asking
from benchmarks.study.__main__ import main
from benchmarks.study.cells import Cell, Places
from benchmarks.study.joined import joined
from benchmarks.study.runner import Runner
from benchmarks.study.state import State, each, gathered, question
from benchmarks.study.suite import SHIPPED, find, read
from benchmarks.study.tables import main_table
from benchmarks.study.training import Training, images_of
from tests.support.processes import Process
from verifiable_relu.campaign.worker import Ask, Part
from verifiable_relu.errors import InputError
from verifiable_relu.network import read_onnx
from verifiable_relu.spec import read_vnnlib
from verifiable_relu.train.export import outputs
from verifiable_relu.train.loop import build
from verifiable_relu.train.options import Options
from verifiable_relu.verifiers.registry import make, methods

SUITE = """\
about = "a"
tuning = "t"
cut = "c"
arms = ["relu", "gelu-swap-finetune", "gelu-swap-finetune-extra"]
seeds = 2
images = 10

[training]
epochs = 8
rate = 0.01

[[network]]
name = "one"
data = "own.npz"
eps = ["0.01", "1/50"]
[network.training]
hidden = [8]
rate = 0.02

[[network]]
name = "two"
data = "digits"
eps = ["0.1"]
arms = ["relu"]
seeds = 1
methods = ["crown"]

[[objective]]
name = "plain"

[[objective]]
name = "stable"
option = "stability"
weights = [0.1, 0.2]
[objective.training]
rate = 0.03

[[method]]
name = "crown"
limit = 1

[[method]]
name = "auto"
limit = 2.5

[[claim]]
name = "more"
says = "More."
network = "one"
arm = "relu"
against = "gelu-swap-finetune"
objective = "stable"
weight = 0.2
measure = "certified"
eps = "1/50"
method = "auto"
expected = "more"
"""


def written(folder: Path, text: str = SUITE) -> Path:
    path = folder / "suite.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_cells_are_all_combinations_seed_by_seed_with_names_of_their_own(tmp_path: Path) -> None:
    suite = read(written(tmp_path))
    cells = suite.cells()
    # Three arms and three weights, plain's among them, twice; one arm and three weights once.
    assert len(cells) == 2 * 9 + 3 == len({cell.name for cell in cells}) == len({cell.options for cell in cells})
    assert [cell.options.seed for cell in cells] == sorted(cell.options.seed for cell in cells)
    assert {cell.network for cell in cells if cell.options.seed == 1} == {"one"}
    rates = {(cell.network, cell.objective): cell.options.rate for cell in cells}
    assert rates == {("one", "plain"): 0.02, ("one", "stable"): 0.03, ("two", "plain"): 0.01, ("two", "stable"): 0.03}
    assert {cell.options.stability for cell in cells} == {0.0, 0.1, 0.2}
    extra = [cell.options for cell in cells if cell.arm.endswith("-extra")]
    assert {(options.arm, options.finetune_extra) for options in extra} == {("gelu-swap-finetune", 6)}
    assert {cell.options.eps for cell in cells} == {0.02, 0.1}
    assert {cell.source for cell in cells} == {str(tmp_path / "own.npz"), "digits"}
    assert not any(str(tmp_path) in json.dumps(cell.record) for cell in cells)
    assert suite.setting("two").methods == ("crown",) and suite.setting("one").methods == ("crown", "auto")


def test_a_suite_has_arms_and_seeds_of_its_own(tmp_path: Path) -> None:
    own = '[[arm]]\nname = "late"\nof = "gelu-swap-finetune"\n[arm.training]\nswitch = 0.75\nrate = 0.05\n\n[training]'
    text = SUITE.replace('arms = ["relu", ', 'arms = ["late", "relu", ').replace("[training]", own, 1)
    suite = read(written(tmp_path, text.replace("seeds = 2", "seeds = [4, 11]")))
    cells = [cell for cell in suite.cells() if cell.network == "one"]
    assert sorted({cell.options.seed for cell in cells}) == [4, 11]
    late = [cell.options for cell in cells if cell.arm == "late"]
    assert {(each.arm, each.switch, each.rate) for each in late} == {("gelu-swap-finetune", 0.75, 0.05)}
    others = [cell.options for cell in cells if cell.arm == "gelu-swap-finetune"]
    assert {each.switch for each in others} == {0.25} and len(others) == len(late)


def test_a_claim_names_another_network_by_what_both_have(tmp_path: Path) -> None:
    beside = SUITE.replace('measure = "certified"\neps = "1/50"\nmethod = "auto"', 'measure = "clean"')
    (claim,) = read(written(tmp_path, beside.replace('against = "gelu-swap-finetune"', 'against = "relu"') +
                            'against_network = "two"\n')).claims  # fmt: skip
    assert (claim.network, claim.against_network, claim.against) == ("one", "two", "relu")
    for text, said in (
        (beside + 'against_network = "three"\n', "'three' is none of one, two"),
        (beside + 'against_network = "two"\n', "'gelu-swap-finetune' is none of relu"),
        (SUITE.replace('"gelu-swap-finetune"\nobjective', '"relu"\nobjective') + 'against_network = "two"\n', "eps: "),
    ):
        with pytest.raises(InputError, match=said):
            read(written(tmp_path, text))


WRONG = (
    ("seeds = 2\n", "seeds = 2\nsedes = 3\n", 6, "unknown key 'sedes'"),
    ("epochs = 8", "epochz = 8", 9, "'epochz' is no option of a training"),
    ("epochs = 8", "epochs = 0", 9, "epochs: must be at least 1"),
    ("epochs = 8", "epochs = 8.5", 9, "must be a whole number"),
    ("epochs = 8", "seed = 8", 9, "'seed' is no option"),
    ("hidden = [8]", "hidden = 8", 17, "must be a list of whole numbers"),
    ("hidden = [8]", 'hidden = [8]\nmodel = "tree"', 18, "'tree' is none of mlp"),
    ("rate = 0.03", "certified_by = 'sabr'", 36, "certified_by: needs --certified"),
    ('"1/50"]', '"0"]', 15, "radii between 0 and 1"),
    ('data = "digits"', 'data = "numbers"', 22, "'numbers' is no .npz file"),
    ('methods = ["crown"]', 'methods = ["milp"]', 26, "'milp' is none of crown, auto"),
    ('name = "two"', 'name = "one"', 21, "there is another 'one' before"),
    ('option = "stability"', 'option = "rate"', 33, "'rate' is none of certified"),
    ("weights = [0.1, 0.2]\n", "", 31, "'weights' is missing"),
    ("weights = [0.1, 0.2]", "weights = [0.1, 0.1]", 34, "different numbers"),
    ('name = "crown"\nlimit = 1', 'name = "magic"\nlimit = 1', 39, "'magic' is none of auto"),
    ("limit = 2.5", "limit = 0", 44, "positive number"),
    ("weight = 0.2", "weight = 0.3", 53, "has no weight 0.3"),
    ('against = "gelu-swap-finetune"', 'against = "prelu"', 51, "'prelu' is none of"),
    ('expected = "more"', 'expected = "better"', 57, "'better' is none of more"),
    (
        'expected = "more"',
        'expected = "more"\nmargin = 0.1',
        58,
        "a margin belongs to a claim that expects no difference",
    ),
    (
        '"certified"\neps = "1/50"\nmethod = "auto"\nexpected = "more"',
        '"seconds"\neps = "1/50"\nmethod = "auto"\nexpected = "no difference"\nmargin = 0.8',
        58,
        "ratio, above 1",
    ),
    ("seeds = 2\n", "seeds = [1, 1]\n", 5, "a list of different seeds"),
    ("seeds = 2\n", "seeds = [-1]\n", 5, "a list of different seeds"),
    ("[training]\n", '[[arm]]\nname = "relu"\nof = "relu"\n[training]\n', 9, "'relu' is an arm of the trainer"),
    ("[training]\n", '[[arm]]\nname = "late"\nof = "later"\n[training]\n', 10, "'later' is none of"),
    ("images = 10", "images = ten", 6, "no TOML"),
    ("limit = 1\n", 'limit = 1\narithmetic = "float8"\n', 41, "'float8' is none of real, float32,"),
    ("[[method]]", "[method]", 38, "method: must be a list"),
)


@pytest.mark.parametrize(("before", "after", "line", "said"), WRONG, ids=lambda value: str(value)[:30])
def test_a_fault_of_a_suite_is_an_error_with_its_line(
    before: str, after: str, line: int, said: str, tmp_path: Path
) -> None:
    assert before in SUITE
    text = SUITE.replace(before, after) if before != "[[method]]" else SUITE.replace(before, after, 1).replace(
        '[[method]]\nname = "auto"\nlimit = 2.5\n', ""
    )  # fmt: skip
    with pytest.raises(InputError) as error:
        read(written(tmp_path, text))
    assert str(error.value).startswith(f"{tmp_path}/suite.toml: line {line}: ") and said in str(error.value)


def test_suites_are_read() -> None:
    names = sorted(path.stem for path in SHIPPED.glob("*.toml"))
    for name in names:
        suite = read(find(name))
        assert suite.name == name and suite.cut and suite.tuning
    assert find("smoke.toml") == Path("smoke.toml")


def test_bad_arguments_are_one_line_and_make_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "out")]
    for given, said in (
        ([str(tmp_path / "none.toml")], "none.toml: no such file"),
        (["smoke", "--only", "mnist"], "--only: 'mnist' is none of digits-mlp"),
        (["smoke", "--arm", "gelu"], "--arm: 'gelu' is none of lambda-gelu, relu"),
        (["smoke", "--seed", "7"], "--seed: '7' is none of 0"),
        (
            ["e1", "--only", "adult-mlp", "--arm", "relu-longer"],
            "--only: no network of the suite has these arms and seeds",
        ),
        (["smoke", "--jobs", "0"], "--jobs: must be from 1 to 1,000, not 0"),
    ):
        assert main([*given, *out]) == 2
        error = capsys.readouterr().err
        assert error.startswith("study: ") and error.endswith(f"{said}\n") and error.count("\n") == 1
    with pytest.raises(SystemExit, match="2"):
        main(["smoke", "--executor", "dask://here", *out])
    assert "'dask://here' is not of the form dask://HOST:PORT" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_verifiers_of_all_methods_can_be_sent_to_workers() -> None:
    for name in methods():
        if not name.startswith(("marabou", "auto_lirpa")):
            assert repr(pickle.loads(pickle.dumps(make(name)))) == repr(make(name))


def test_a_training_that_diverges_is_recorded_as_such(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "own.npz", images=rng.random((40, 3)), labels=np.arange(40) % 2)
    suite = read(written(tmp_path, SUITE.replace("rate = 0.02", "rate = 1e30")))
    places = Places(tmp_path)
    places.networks.mkdir()
    found = Training(suite.cells()[0], places)()
    assert found["status"] == "diverged" and "infinite or NaN" in found["detail"] and found["results"] == {}
    assert not list(places.networks.glob("*.onnx"))


def test_the_file_of_a_ball_asks_the_same_as_the_study(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="needs scikit-learn for the data set")
    test = images_of("digits")
    path = tmp_path / "0.vnnlib.gz"
    asking.property_file(path, test, 3, "1/255", 10)
    (read_back,) = read_vnnlib(path).properties
    assert read_back.digest == asking.ball(test, 3, "1/255", 10).digest


@pytest.mark.parametrize("arms", [2, 3, 5])
def test_each_network_is_asked_early_as_often_as_late(arms: int) -> None:
    """The first question about an image takes longer than the others."""
    balls = [
        asking.Ball(Path(str(image)), Path(f"{arm}.onnx"), 1.0, "d", "0.1", image, 3)
        for arm in range(arms)
        for image in range(60)
    ]
    order = asking.shuffled(balls, "0")
    assert sorted(order, key=balls.index) == balls and order != balls
    assert order == asking.shuffled(balls[::-1], "0") != asking.shuffled(balls, "1")
    places: dict[Path | None, list[int]] = {}
    for number, one in enumerate(order):
        assert one.image == order[number - number % arms].image
        places.setdefault(one.onnx, []).append(number % arms)
    for found in places.values():
        assert abs(sum(found) / 60 - (arms - 1) / 2) < 0.1 and len(set(found)) == arms


ORDERED = """\
about = "a"
tuning = "t"
cut = "c"
arms = [{arms}]
seeds = 1
images = 10

[training]
epochs = 1

[[network]]
name = "one"
data = "own.npz"
eps = ["0.2"]
[network.training]
hidden = [8]

[[objective]]
name = "plain"

[[method]]
name = "crown"
limit = 5

[[method]]
name = "bab"
limit = 5

[[claim]]
name = "c"
says = "s"
network = "one"
arm = "gelu-swap"
against = "relu"
measure = "clean"
expected = "more"
"""


class Here:
    """A hand that is this process, and keeps the parts that it was given."""

    def __init__(self) -> None:
        self.parts: list[list[tuple[str, str, int]]] = []

    def perform(self, task: Any, ask: Ask) -> Any:
        if isinstance(task, Part):
            self.parts.append([(b.onnx.name, b.eps, b.image) for _, b in task.entries if isinstance(b, asking.Ball)])
        return task(ask)

    def stop(self) -> None:
        pass


def asked_alike(folder: Path, arms: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> tuple[Here, State]:
    """A study of arms that all have the same networks, for want of a difference in their trainings."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    images = rng.random((60, 6), dtype=np.float32)
    labels = np.arange(60) % 3
    np.savez(folder / "own.npz", images=images, labels=labels, test_images=images, test_labels=labels)
    (folder / "suite.toml").write_text(ORDERED.format(arms=", ".join(f'"{arm}"' for arm in arms)))
    suite, places, hand = read(folder / "suite.toml"), Places(folder / "out"), Here()
    with Records(places.folder) as records:
        study = Runner(suite, places, records, [hand], lambda line: None)

        def same(cells: Sequence[Cell]) -> None:
            train(study, cells)
            for cell in cells:
                other = next(c for c in cells if c.arm == "relu")
                places.network(cell).write_bytes(places.network(other).read_bytes())

        train = Runner.train
        monkeypatch.setattr(study, "train", same)
        study.run()
        return hand, State.of(records.all)


@pytest.mark.thorough
def test_the_order_of_arms_in_a_suite_changes_no_question_and_no_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seconds once measured the place of an arm in the list, since the instances of a batch share its time."""
    arms = ["relu", "gelu-swap", "lambda-gelu"]
    first, known = asked_alike(tmp_path / "one", arms, monkeypatch)
    second, again = asked_alike(tmp_path / "two", arms[::-1], monkeypatch)
    assert first.parts == second.parts and all(len(part) == 1 for part in first.parts)
    # Neither arms, nor radii, nor images come in their order.
    names = [part[0][0].split("_")[1] for part in first.parts]
    changes = sum(one != other for one, other in pairwise(names))
    assert set(names) == set(arms) and changes > len(names) / 3
    assert first.parts != sorted(first.parts)

    def counts(state: State) -> dict[str, list[tuple[Any, ...]]]:
        """Verdicts, sub-problems and margins of each arm's answers, in the order of the questions."""
        found: dict[str, list[tuple[Any, ...]]] = {}
        for (cell, *asked), answered in sorted(state.answers.items()):
            said = (answered["verdict"], answered["subproblems"], answered["margin"])
            found.setdefault(cell.split("_")[1], []).append((cell.split("_")[3], *asked, *said))
        return found

    one, other = counts(known), counts(again)
    assert one == other
    assert one["relu"] == one["gelu-swap"] == one["lambda-gelu"]
    assert any(said[-2] for said in one["relu"]), "no question branches"


@pytest.mark.thorough
def test_committed_records_go_on_with_networks_that_are_trained_again_and_compared(tmp_path: Path) -> None:
    images = np.random.default_rng(0).random((60, 6), dtype=np.float32)
    labels = np.arange(60) % 3
    np.savez(tmp_path / "own.npz", images=images, labels=labels, test_images=images, test_labels=labels)
    places, said = Places(tmp_path / "out"), list[str]()

    def run(asked: int) -> State:
        text = ORDERED.format(arms='"relu", "gelu-swap"').replace("images = 10", f"images = {asked}")
        with Records(places.folder) as records:
            Runner(read(written(tmp_path, text)), places, records, [Here()], said.append).run()
        return State.of(read_records(places.folder))

    first = run(3)
    shutil.rmtree(places.networks)
    assert run(3).trainings == first.trainings and not any("again" in line for line in said), "nothing was left to ask"
    second = run(5)
    assert sum("trained again, the same as recorded" in line for line in said) == 2
    assert second.trainings == first.trainings and len(second.answers) > len(first.answers)
    assert all(second.answers[asked]["verdict"] == answer["verdict"] for asked, answer in first.answers.items())
    shutil.rmtree(places.networks)
    text = (places.folder / "records.jsonl").read_text()
    onnx = next(iter(first.trainings.values()))["files"]["onnx"]
    (places.folder / "records.jsonl").write_text(text.replace(onnx, "0" * 64))
    with pytest.raises(InputError, match="another network than the recorded one"):
        run(6)


def own_network(shape: Sequence[int], classes: int, activation: Any, normalize: nn.Module | None) -> nn.Module:
    """A module of a user's own, with a connection around its activation."""

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.act = nn.Linear(math.prod(shape), 5), activation()
            self.last, self.normalize = nn.Linear(5, classes), normalize or nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen = self.first(self.normalize(x).flatten(1))
            found: torch.Tensor = self.last(self.act(seen) + seen)
            return found

    return Around()


def own_loss(logits: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """Cross-entropy with smoothed labels."""
    return nn.functional.cross_entropy(logits, classes, label_smoothing=0.1)


def test_a_users_own_module_and_loss_on_a_validation_split(tmp_path: Path) -> None:
    images, labels = np.random.default_rng(0).random((60, 6), dtype=np.float32), np.arange(60) % 3
    np.savez(tmp_path / "own.npz", images=images, labels=labels, test_images=0 * images[:2], test_labels=labels[:2])
    text = ORDERED.format(arms='"lambda-gelu-kept"').replace("own.npz", "own.npz:validation")
    text = text.replace("[8]", f'[8]\nmodel = "{__name__}:own_network"\nloss = "{__name__}:own_loss"')
    text = text.replace('"gelu-swap"', '"lambda-gelu-kept"').replace('"relu"', '"lambda-gelu-kept"')
    text = text.replace('[[method]]\nname = "bab"\nlimit = 5\n', "")
    places = Places(tmp_path / "out")

    def run(text: str) -> None:
        with Records(places.folder) as records:
            Runner(read(written(tmp_path, text)), places, records, [Here()], lambda line: None).run()

    run(text)
    found = read_records(places.folder)
    trainings = [each for each in found if each["kind"] == "training"]
    (training,) = trainings
    assert training["status"] == "trained" and training["architecture"] == f"{__name__}:own_network"
    assert training["training_images"] == 54
    held = np.arange(9, 60, 10)
    validation = images_of(f"{tmp_path / 'own.npz'}:validation")
    assert np.array_equal(validation.images.reshape(6, 6), images[held])
    asked = [each["images"] for each in found if each["kind"] == "images"]
    assert asked == [list(range(6))]
    try:
        import pandas  # noqa: F401 -- an extra of the user's
    except ImportError:
        with pytest.raises(InputError, match="pip install pandas"):
            joined(found).to_pandas()
    else:
        table = joined(found).to_pandas()
        assert len(table) == len(State.of(found).answers) and set(table["arm"]) <= {"lambda-gelu-kept"}
    # A radius that is added would train other networks, unless the suite says for which ε they are trained.
    more = text.replace('eps = ["0.2"]', 'eps = ["0.2", "0.3"]')
    with pytest.raises(InputError, match=r"with ε = 0\.3 where it was 0\.2: say eps = "):
        run(more)
    run(more.replace("hidden", "eps = 0.2\nhidden"))
    again = [each for each in read_records(places.folder) if each["kind"] == "training"]
    radii = {eps for eps, _ in joined(read_records(places.folder)).cells[0].answers}
    assert again == trainings and radii == {"0.2", "0.3"}
    for name, said in (("none.such:thing", "No module named"), (f"{__name__}:nothing", "nothing")):
        with pytest.raises(InputError, match=said):
            build(Options("digits", model=name), validation)


@pytest.mark.thorough
def test_methods_ask_in_an_arithmetic_and_about_the_int8_file(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    images, labels = rng.random((300, 6), dtype=np.float32), np.arange(300) % 3
    images[np.arange(300), labels] += 2
    images /= images.max()
    np.savez(tmp_path / "own.npz", images=images, labels=labels, test_images=images[:12], test_labels=labels[:12])
    ways = "".join(
        f'[[method]]\nname = "auto"\nlimit = 5\n{line}\n'
        for line in ("", 'arithmetic = "bfloat16"', 'arithmetic = "int8"')
    )
    text = ORDERED.format(arms='"relu"').replace('"gelu-swap"', '"relu"').replace('eps = ["0.2"]', 'eps = ["0.02"]')
    text = text.replace('[[method]]\nname = "bab"\nlimit = 5\n', ways).replace("epochs = 1", "epochs = 30")
    text = text.replace('[[method]]\nname = "crown"\nlimit = 5\n', "")
    suite, places = read(written(tmp_path, text)), Places(tmp_path / "out")
    with Records(places.folder) as records:
        Runner(suite, places, records, [Here()], lambda line: None).run()
    found = joined(read_records(places.folder))
    (cell,) = suite.cells()
    kept, net = found.cells[0], places.int8(cell).read_bytes()
    assert kept.measures["int8_file"] == hashlib.sha256(net).hexdigest() and b"QuantizeLinear" in net
    names = {"auto", "auto-bfloat16", "auto-int8"}
    assert {method for _, method in kept.answers} == names == set(kept.methods) and kept.real == ("auto",)
    test, proven = images_of(str(tmp_path / "own.npz")), kept.said("unsat", "0.02", "auto-int8")
    assert proven and proven < kept.right, "too easy or too hard to say anything"
    for image in proven:
        around = test.images[image] + rng.uniform(-0.02, 0.02, (200, *test.images.shape[1:])).astype(np.float32)
        assert (outputs(net, around.clip(0, 1)).argmax(1) == test.labels[image]).all()
    shares = {name: kept.value("certified", "0.02", name) for name in names}
    assert shares["auto"] >= max(shares["auto-bfloat16"], shares["auto-int8"])
    titles = main_table(found).columns
    assert {"certified, auto-int8", "attacked, auto-int8"} <= set(titles) and "attacked, auto" not in titles


def lines(folder: Path) -> list[dict[str, Any]]:
    path = folder / "records.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


@pytest.mark.seldom
def test_a_study_that_is_killed_goes_on_without_losing_or_repeating_anything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn", reason="needs scikit-learn for the data set")
    suite, places = read(find("smoke")), Places(tmp_path / "out")
    command = ["smoke", "--out", str(places.folder), "--quiet"]
    damaged, *_ = suite.cells()
    places.networks.mkdir(parents=True)
    places.checkpoint(damaged).write_bytes(b"nothing")
    with Process(["-m", "benchmarks.study", *command]) as process:
        # The first network cannot be trained, which does not stop the others.
        while not any(record["kind"] == "answer" for record in lines(places.folder)):
            assert process.poll() is None
            time.sleep(0.1)
        process.kill()
        process.wait()
    before = [record for record in lines(places.folder) if record["kind"] != "note"]
    assert [r["status"] for r in before if r["kind"] == "training"] == ["failed", "trained"]
    places.checkpoint(damaged).unlink()

    # It goes on elsewhere.
    with Records(places.folder) as records:
        Runner(suite, places, records, [Here()], lambda line: None).run()
    after = [record for record in lines(places.folder) if record["kind"] != "note"]
    known = [record for record in before if record["kind"] != "answer"]
    assert after[: len(known)] == known
    assert [r["status"] for r in after[len(known) :] if r["kind"] == "training"] == ["trained"]
    state = State.of(after)
    assert State.of(before).answers.items() <= state.answers.items()
    for cell in suite.cells():
        right = state.right(cell, 10)
        assert right and places.network(cell).is_file() and not places.checkpoint(cell).exists()
        network, test = read_onnx(places.network(cell)), images_of("digits")
        assert right == asking.right(network, test, np.arange(10)).tolist()
        wanted = {(cell.name, eps, by, i) for eps in ("0.05", "0.2") for by in ("crown", "auto") for i in right}
        assert wanted == {question for question in state.answers if question[0] == cell.name}
    # The answers that came one by one stand together now, each once.
    asked = Counter(question(answer) for r in after if r["kind"] == "answers" for answer in each(r))
    assert set(asked.values()) == {1} and not any(r["kind"] == "answer" for r in after)
    # What one method proves, none refutes; the attack and the search are part of auto.
    for (cell, eps, method, image), answer in state.answers.items():
        other = state.answers[cell, eps, "auto" if method == "crown" else "crown", image]
        assert {answer["verdict"], other["verdict"]} != {"sat", "unsat"}
    listed = (places.folder / "instances.csv").read_text(encoding="utf-8").splitlines()
    assert len(listed) == len(state.answers) // 2
    onnx, vnnlib, _ = listed[0].split(",")
    assert (places.folder / onnx).is_file() and (places.folder / f"{vnnlib}.gz").is_file()

    # Nothing is left but the tables.
    assert main(command) == 0
    assert [record for record in lines(places.folder) if record["kind"] != "note"] == after
    assert "Findings" in (places.folder / "report.md").read_text(encoding="utf-8")
    capsys.readouterr()
    assert main(["smoke", "--out", str(places.folder), "--plan"]) == 0
    shown = capsys.readouterr().out
    assert f"2 of 2 are trained, {len(state.answers)} of at most {len(state.answers)} questions answered" in shown


def test_answers_are_asked_again_only_where_another_run_could_say_more() -> None:
    def answered(limit: float, **fields: object) -> bool:
        known = {"cell": "c", "eps": "0.1", "method": "auto", "image": 3, "limit": 5.0, **fields}
        return State.of([{"kind": "answer", **known}]).answered(("c", "0.1", "auto", 3), limit)

    assert answered(50.0, verdict="unsat", reason="proved") and answered(50.0, verdict="sat", reason="refuted")
    assert answered(5.0, verdict="unknown", reason="timeout") and answered(1.0, verdict="unknown", reason="incomplete")
    assert not answered(6.0, verdict="unknown", reason="timeout")
    assert not answered(1.0, verdict="unknown", reason="error") and not answered(
        1.0, verdict="unknown", reason="memory"
    )
    assert not State().answered(("c", "0.1", "auto", 3), 1.0)


def answer(image: int, seconds: float, **fields: object) -> dict[str, Any]:
    known = {"kind": "answer", "cell": "c", "eps": "0.1", "method": "auto", "verdict": "unsat", "limit": 5.0}
    own = {"seconds": seconds, "subproblems": image, "unstable": None, "margin": 0.5}
    return {**known, "image": image, **own, **fields}


def test_answers_that_stand_together_are_those_that_came_one_by_one_and_the_last_one_counts() -> None:
    late = answer(2, 5.0, verdict="unknown")
    records = [answer(1, 0.1), late, answer(3, 0.3), answer(2, 0.2, limit=9.0), answer(1, 0.4, eps="0.2"), answer(1, 7)]
    together = gathered([{"kind": "note", "text": "n"}, *records])
    assert [r["kind"] for r in together] == ["note", *3 * ["answers"]]
    assert together[1]["image"] == [1, 3] and together[1]["seconds"] == [7, 0.3] and together[1]["margin"] == 0.5
    assert State.of(together).answers == State.of(records).answers and late not in State.of(together).answers.values()
    more = [*together, answer(4, 0.1), answer(3, 1.0)]
    assert State.of(gathered(more)).answers == State.of(more).answers and len(gathered(more)) == len(together)


def test_a_kill_while_records_are_replaced_leaves_the_old_ones(tmp_path: Path) -> None:
    with Records(tmp_path) as records:
        records.append("answer", answer(1, 0.1))
        with pytest.raises(ValueError, match="JSON"):
            records.replace([answer(2, 0.2), answer(3, float("nan"))])
        records.append("answer", answer(4, 0.4))
        assert [record["image"] for record in lines(tmp_path)] == [record["image"] for record in records.all] == [1, 4]
    # The half-written file of a run that was killed then is in nobody's way.
    (tmp_path / ".records.jsonl.new").write_bytes(b'{"kind": "answer"')
    with Records(tmp_path) as records:
        records.replace(gathered(records.all))
        records.append("note", {"text": "n"})
    assert [record["kind"] for record in lines(tmp_path)] == ["answers", "note"]


def test_records_are_the_latest_of_the_cells_that_the_suite_has(tmp_path: Path) -> None:
    first, second, *_ = read(written(tmp_path)).cells()
    known = [
        {"kind": "note", "text": "n"},
        {"kind": "suite", "name": "old"},
        {"kind": "training", "cell": first.name, "status": "failed"},
        {"kind": "training", "cell": "of another suite", "status": "trained"},
        {"kind": "suite", "name": "new"},
        {"kind": "training", "cell": first.name, "status": "trained"},
        {"kind": "measure", "cell": second.name, "name": "norm", "value": 1},
    ]
    state = State.of(known)
    assert state.records([first, second]) == [known[0], known[4], known[5], known[6]]
    assert state.trained(first) and state.settled(first) and not state.trained(second) and not state.settled(second)
