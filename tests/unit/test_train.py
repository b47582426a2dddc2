"""Training: schedules, learning rates of λ, and complete small trainings."""

import json
import math
import os
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F

from verifiable_relu import files
from verifiable_relu.data import Dataset, load
from verifiable_relu.errors import LONGEST, InputError
from verifiable_relu.network import read_onnx
from verifiable_relu.network.graph import device as find_device
from verifiable_relu.nn import LambdaGELU, mlp, substitute_relu
from verifiable_relu.train import schedule
from verifiable_relu.train.__main__ import main, parser
from verifiable_relu.train.loop import Trained, accuracy, build, not_refuted, train
from verifiable_relu.train.losses import augment
from verifiable_relu.train.options import Options, number, sizes
from verifiable_relu.train.schedule import make_optimizer, rate_of_s, set_rates

SCHEDULES = ("linear", "log", "inverse")


def blobs(n: int = 300, shape: tuple[int, int, int] = (1, 6, 6)) -> Dataset:
    """Three classes of noisy images around three fixed ones."""
    random = np.random.default_rng(0)
    centres = random.random((3, *shape))
    labels = random.integers(0, 3, n)
    images = np.clip(centres[labels] + random.normal(0, 0.15, (n, *shape)), 0, 1).astype(np.float32)
    return Dataset("blobs", images, labels, (0.5,), (0.3,), np.ones(n, bool))


MLP = Options("blobs", hidden=(16, 16), epochs=4, batch=50, eps=0.03, warmup=1, attack_steps=2, certified=0.1,
              stability=0.05, l1=1e-5, seed=3)  # fmt: skip
LONGER = replace(MLP, epochs=8, rate=2e-2)
CNN = replace(MLP, model="cnn", channels=(4,), hidden=(8,), epochs=2, crop=1, flip=True)


@pytest.fixture(scope="module")
def trained() -> Trained:
    return train(LONGER, blobs())


# Schedules


@pytest.mark.parametrize(("epochs", "start"), [(1, 0), (2, 1), (4, 1), (5, 2), (40, 10), (41, 11)])
def test_annealing_begins_after_a_quarter(epochs: int, start: int) -> None:
    assert Options("blobs", epochs=epochs).first_annealed == start


def test_annealing_progress_is_the_papers_at_the_end_of_each_epoch() -> None:
    epochs, per_epoch, start = 10, 7, 3
    annealing = schedule.Annealing(LambdaGELU(2.0), (epochs - start) * per_epoch, 160, "linear")
    values = [2.0]
    for _ in range((epochs - start) * per_epoch):
        annealing.step()
        values += annealing.lam
    for epoch in range(start, epochs):
        progress = (epoch - start + 1) / (epochs - start)
        assert values[(epoch - start + 1) * per_epoch] == pytest.approx(2 + 158 * progress, rel=1e-5)
    assert all(b > a for a, b in pairwise(values)) and not annealing.gates[0].s.requires_grad


def test_annealing_that_is_resumed_goes_on_as_before() -> None:
    whole = schedule.Annealing(LambdaGELU(2.0), 6, 160)
    for _ in range(4):
        whole.step()
    resumed = schedule.Annealing(LambdaGELU(9.0), 6, 160, start=whole.start, taken=4)
    for _ in range(2):
        whole.step()
        resumed.step()
        assert whole.lam == resumed.lam
    resumed.gates[0].set_lam(5)
    resumed.settle()
    assert resumed.lam == pytest.approx([160], rel=1e-6)


@pytest.mark.parametrize(("name", "middle"), [("linear", 81.0), ("log", math.sqrt(320)), ("inverse", 320 / 81)])
def test_hardness_follows_its_schedule(name: schedule.Schedule, middle: float) -> None:
    assert schedule.hardness(name, 2, 160, 0) == pytest.approx(2)
    assert schedule.hardness(name, 2, 160, 0.5) == pytest.approx(middle)
    assert schedule.hardness(name, 2, 160, 1) == pytest.approx(160)


def test_the_learning_rate_is_one_cycle() -> None:
    rates = [schedule.learning_rate(0.1, 0.25, step, 100) for step in range(100)]
    assert rates[0] == pytest.approx(0.004) and max(rates) <= 0.1 and rates[25] == pytest.approx(0.1, rel=1e-3)
    assert all(a < b for a, b in pairwise(rates[:25])) and all(a > b for a, b in pairwise(rates[26:]))
    assert 0 < rates[-1] < 1e-4
    kept = [schedule.learning_rate(0.1, 0.25, step, 100, "none") for step in range(100)]
    assert kept[:25] == rates[:25] and set(kept[25:]) == {0.1}
    options = Options("none", epochs=4, rise=0.0, fall="none")
    assert {schedule.rate_at(options, step, 10) for step in range(40)} == {options.rate}
    assert [schedule.warmup(step, 4) for step in (0, 2, 4, 9)] == [0, 0.5, 1, 1] and schedule.warmup(0, 0) == 1


def test_raw_inputs_are_not_standardised() -> None:
    data, x = blobs(), torch.rand(5, 1, 6, 6)
    for options in (MLP, CNN):
        standardised, raw = build(options, data), build(replace(options, inputs="raw"), data)
        assert torch.equal(standardised(x), raw((x - 0.5) / 0.3)) and not torch.equal(standardised(x), raw(x))


# The rates of λ


def test_s_is_not_decayed_and_has_the_matched_rate() -> None:
    model = mlp([4, 5, 6, 2])
    optimizer = make_optimizer(model, MLP)
    set_rates(optimizer, model, 1e-3, MLP)
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    assert len(group_of) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        group = group_of[id(parameter)]
        is_s = name.endswith(".s")
        assert group["weight_decay"] == (MLP.decay if name.endswith("weight") else 0)
        assert group["lr"] == pytest.approx(9 * 0.1 * 1e-3 if is_s else 1e-3)


@pytest.mark.parametrize(
    ("rule", "lam", "expected"),
    [("raw", 2.0, 9e-3), ("matched", 2.0, 9e-4), ("natural", 1 + math.log(2), 18e-4), ("natural", 1.01, 9e-4 / 0.05)],
)
def test_the_rate_of_s_follows_its_rule(rule: str, lam: float, expected: float) -> None:
    assert rate_of_s(LambdaGELU(lam), 1e-3, replace(MLP, lam_rate=rule)) == pytest.approx(expected, rel=1e-4)


def test_the_natural_rate_moves_lambda_by_c_times_the_rate() -> None:
    for lam in (1.5, 3.0, 20.0):
        gate = LambdaGELU(lam).double()
        options = replace(MLP, lam_rate="natural")
        model = torch.nn.Sequential(gate)
        optimizer = make_optimizer(model, options)
        set_rates(optimizer, model, 1e-5, options)
        (-gate.lam).backward()
        optimizer.step()
        assert gate.lam.item() - lam == pytest.approx(9e-5, rel=1e-2)


def test_augmentation_crops_and_mirrors() -> None:
    image = torch.arange(1.0, 26).reshape(1, 1, 5, 5).expand(200, 1, 5, 5)
    generator = torch.Generator().manual_seed(0)
    assert augment(image, 0, False, generator) is image
    flipped = augment(image, 0, True, generator)
    mirrored = (flipped == image.flip(3)).all((1, 2, 3))
    assert ((flipped == image).all((1, 2, 3)) ^ mirrored).all() and 60 < mirrored.sum() < 140
    padded = F.pad(image[:1], (2, 2, 2, 2))[0, 0]
    places = {padded[i : i + 5, j : j + 5].numpy().tobytes() for i in range(5) for j in range(5)}
    crops = {crop.numpy().tobytes() for crop in augment(image, 2, False, generator)[:, 0]}
    assert crops == places


# Whole trainings


@pytest.mark.thorough
def test_training_learns_and_hardens(trained: Trained) -> None:
    test = blobs()
    images, labels = torch.from_numpy(test.images), torch.from_numpy(test.labels)
    hard = substitute_relu(trained.model)
    assert accuracy(hard, images, labels) > 0.9
    assert not_refuted(hard, images, labels, MLP.eps, 0) > 0.8
    gates = [module for module in trained.model if isinstance(module, LambdaGELU)]
    assert [gate.lam.item() for gate in gates] == pytest.approx([160, 160], rel=1e-5)
    lam = np.array([epoch["lam"] for epoch in trained.history])
    assert lam.shape == (8, 2) and (lam >= 1).all() and (np.diff(lam[1:], axis=0) > 0).all()
    gates = [module for module in build(LONGER, test) if isinstance(module, LambdaGELU)]
    assert (lam[0] != [gate.lam.item() for gate in gates]).all(), "λ is learned before it is annealed"


def test_substitution_changes_each_neuron_by_little(trained: Trained) -> None:
    x = torch.from_numpy(blobs().images)
    first, gate = trained.model[:3], trained.model[3]
    gap = torch.relu(first(x)) - gate(first(x))
    assert gap.min() >= -1e-6 and gap.max() <= 0.17 / 160 + 1e-6 and gap.max() > 0


@pytest.mark.seldom
@pytest.mark.parametrize("options", [MLP, CNN])
def test_a_resumed_training_is_the_uninterrupted_one(options: Options, tmp_path: Path) -> None:
    saved = tmp_path / "net.checkpoint"
    whole = train(options, blobs())
    per_epoch = 6

    def interrupt(step: int, _: str) -> None:
        if step == per_epoch + 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(options, blobs(), saved, interrupt)
    steps: list[int] = []
    resumed = train(options, blobs(), saved, lambda step, _: steps.append(step))
    assert steps[0] == per_epoch + 1, "the first epoch is not done again"
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
    assert [epoch["lam"] for epoch in whole.history] == [epoch["lam"] for epoch in resumed.history]


@pytest.mark.seldom
def test_the_seed_decides(trained: Trained) -> None:
    torch.manual_seed(123)
    again, other = train(LONGER, blobs()), train(replace(LONGER, seed=4), blobs())
    assert torch.equal(again.model[-1].weight, trained.model[-1].weight)
    assert not torch.equal(other.model[-1].weight, trained.model[-1].weight)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_ends_at_the_target(name: schedule.Schedule) -> None:
    options = replace(MLP, schedule=name, epochs=2, attack_steps=0, lam_target=50)
    gate = train(options, blobs(100)).model[3]
    assert isinstance(gate, LambdaGELU) and gate.lam.item() == pytest.approx(50, rel=1e-5)


def test_checkpoints_of_others_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    saved = tmp_path / "net.checkpoint"
    train(replace(MLP, epochs=1), blobs(50), saved)
    with pytest.raises(InputError, match="--seed 3, not 5"):
        train(replace(MLP, epochs=1, seed=5), blobs(50), saved)
    saved.write_bytes(saved.read_bytes()[:100])
    with pytest.raises(InputError, match="not a readable checkpoint"):
        train(replace(MLP, epochs=1), blobs(50), saved)
    assert list(tmp_path.iterdir()) == [saved]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    files.write_whole(path, b"old")

    def fail(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(files.os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        files.write_whole(path, b"new")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_a_loss_that_explodes_is_reported() -> None:
    with pytest.raises(InputError, match=r"epoch \d+: the loss is infinite or NaN"):
        train(replace(MLP, rate=1e30, rise=0.0, epochs=2), blobs())


# The command


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"epochs": 0}, "--epochs: must be at least 1, got 0"),
        ({"lam_target": 0.5}, "--lam-target"),
        ({"lam_target": 2e6}, "--lam-target: asks for a λ above 1e.06"),
        ({"tolerance": 1e-300}, "--tolerance: asks for a λ above"),
        ({"eps": -0.1}, "--eps"),
        ({"eps": math.nan}, "--eps"),
        ({"eps": 2.0}, "images lie in"),
        ({"rate": math.nan}, "--rate"),
        ({"certified": 1.5}, "--certified"),
        ({"model": "lenet"}, "'lenet' is none of mlp, cnn"),
        ({"schedule": "cubic"}, "--schedule"),
        ({"hidden": (10, 0)}, "--hidden"),
        ({"hidden": (10**12,)}, "--hidden"),
        ({"hidden": (5,) * 3000}, "--hidden"),
        ({"epochs": 10**30}, "--epochs: must be at most"),
        ({"decay": math.inf}, "--decay"),
        ({"width": 1e300}, "--width"),
        ({"seed": -1}, "--seed"),
        ({"seed": 2**63}, "--seed"),
        ({"crop": 10**9}, "--crop"),
    ],
)
def test_bad_options_are_named(change: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        replace(MLP, **change)


def test_numbers_and_sizes_of_the_command_line_are_read() -> None:
    assert number("2/255") == 2 / 255 and number("0.03") == 0.03 and sizes("16,32") == (16, 32) and sizes("") == ()
    for text in ("1/0", "two", "1e999999999", "9" * 5000, "nan", "٥"):
        with pytest.raises(ValueError, match="neither a number nor a fraction"):
            number(text)


def test_every_option_is_on_the_command_line() -> None:
    values = vars(parser().parse_args(["--data", "digits", "--out", "x.onnx"]))
    assert values.pop("out") == Path("x.onnx") and values.pop("device") == "auto"
    assert values.pop("tensorboard") is None and not values.pop("debug") and not values.pop("int8")
    assert Options(**values) == Options("digits")


def test_a_device_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--data", "digits", "--device", "nowhere", "--out", str(tmp_path / "x.onnx")]) == 2
    assert re.fullmatch(r"train: no device 'nowhere': .*\n", capsys.readouterr().err)


def test_a_gpu_is_taken_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for there, name in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert find_device("auto") == name


@pytest.mark.thorough
def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in [
        (["--data", "digits", "--out", str(tmp_path / "net.pt")], "must end in .onnx"),
        (["--data", "digits", "--out", str(tmp_path / "no" / "net.onnx")], "no such folder"),
        (["--data", "imagenet", "--out", str(tmp_path / "net.onnx")], "no data set 'imagenet'"),
        (["--data", "digits", "--epochs", "0", "--out", str(tmp_path / "net.onnx")], "--epochs"),
        (["--data", "digits", "--out", str(tmp_path / ("x" * 5000 + ".onnx"))], "cannot be written"),
        (["--data", "digits", "--out", str(tmp_path / "a\0b.onnx")], "not a file name"),
        (["--data", "digits", "--hidden", "1000000,1000000", "--out", str(tmp_path / "net.onnx")], "into the memory"),
        (["--data", "digits\x1b[31m" * 500, "--out", str(tmp_path / "net.onnx")], r"digits\x1b[31m"),
    ]:
        assert main(arguments) == 2
        shown = capsys.readouterr().err
        *_, error = shown.splitlines()
        assert words in error and error.startswith("train: ") and len(error) <= LONGEST + 7
        # The bar is there already when memory runs out.
        assert shown.count("\n") == 1 or "memory" in words


@pytest.mark.thorough
def test_the_command_writes_network_and_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn", reason="needs scikit-learn")
    out = tmp_path / "digits.onnx"
    command = [
        "--data",
        "digits",
        "--hidden",
        "16",
        "--epochs",
        "2",
        "--batch",
        "64",
        "--eps",
        "1/255",
        "--int8",
        "--out",
        str(out),
    ]
    assert main(command) == 0
    record = json.loads(out.with_suffix(".json").read_text())
    assert record["options"]["seed"] == 0 and record["training_images"] == 1347 and len(record["epochs"]) == 2
    assert "torch" in record["versions"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["digits.int8.onnx", "digits.json", "digits.onnx"]
    assert read_onnx(tmp_path / "digits.int8.onnx").output_size == 10
    session = onnxruntime.InferenceSession(str(out))
    test = load("digits", "test")
    (name,) = (entry.name for entry in session.get_inputs())
    logits = np.concatenate([session.run(None, {name: image[None]})[0] for image in test.images])
    assert (logits.argmax(1) == test.labels).mean() == pytest.approx(record["results"]["clean_after_substitution"])
    assert "clean after substitution" in capsys.readouterr().out


# The networks that ship with the project

SHIPPED = sorted((Path(__file__).parents[2] / "specs").glob("*.json"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_networks_are_hardened_relu_networks(path: Path) -> None:
    record = json.loads(path.read_text())
    options = Options(**{name: tuple(v) if isinstance(v, list) else v for name, v in record["options"].items()})
    assert len(record["epochs"]) == options.epochs
    assert record["epochs"][-1]["lam"] == pytest.approx([160] * len(record["epochs"][-1]["lam"]), rel=1e-5)
    results = record["results"]
    assert abs(results["clean_before_substitution"] - results["clean_after_substitution"]) <= 2e-3
    assert path.with_suffix(".onnx").stat().st_size < 400_000
    operators = [node.op_type for node in onnx.load(path.with_suffix(".onnx")).graph.node]
    assert operators.count("Relu") == len(record["epochs"][-1]["lam"]) and "Gelu" not in operators


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_networks_are_as_accurate_as_recorded(path: Path) -> None:
    record = json.loads(path.read_text())
    root, name = os.environ.get("VERIFIABLE_RELU_DATA"), record["options"]["data"]
    if root is None or not (Path(root) / name).is_dir():
        pytest.skip(f"VERIFIABLE_RELU_DATA names no folder with {name}")
    test = load(name, "test")
    session = onnxruntime.InferenceSession(path.with_suffix(".onnx"))
    (logits,) = session.run(None, {session.get_inputs()[0].name: test.images[:1000]})
    assert (logits.argmax(1) == test.labels[:1000]).mean() == pytest.approx(record["results"]["clean_of_these"])
