"""Training: schedules, learning rates of λ, the arms, complete small trainings, and the command."""

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.processes import environment
from tests.support.trainings import BASE, PER_EPOCH, blobs, stop_at
from verifiable_relu.data import load
from verifiable_relu.errors import LONGEST, InputError
from verifiable_relu.hardening.loop import with_proof
from verifiable_relu.nn import LambdaGELU, substitute_relu
from verifiable_relu.nn.gates import SUPREMUM
from verifiable_relu.readers import read_onnx
from verifiable_relu.settings import find_device
from verifiable_relu.train import loop
from verifiable_relu.train.__main__ import main, parser
from verifiable_relu.train.batches import measure
from verifiable_relu.train.export import export
from verifiable_relu.train.loop import Training, accuracy, build, not_refuted, train
from verifiable_relu.train.losses import augment
from verifiable_relu.train.options import ARMS, SCHEDULES, Options, Schedule, number, sizes

FULL = replace(BASE, eps=0.03, warmup=1, attack_steps=2, certified=0.1, stability=0.05)
"""A training with every term of the loss."""

CNN = replace(FULL, model="cnn", channels=(4,), hidden=(8,), epochs=2, crop=1, flip=True)
FINETUNED = replace(BASE, arm="gelu-swap-finetune")
SMALL = replace(BASE, model="resnet", epochs=2, batch=100, rate=5e-3)
"""Networks of fixed layers; two steps an epoch."""


@pytest.fixture(scope="module")
def trained() -> Training:
    return train(replace(FULL, epochs=8), blobs())


def types(model: nn.Sequential) -> list[str]:
    return [type(module).__name__ for module in model]


def equal(one: nn.Module, other: nn.Module) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(value, theirs[name]) for name, value in ours.items())


# Schedules and rates


def test_annealing_progress_is_the_papers_at_the_end_of_each_epoch() -> None:
    epochs, per_epoch, start = 10, 7, 3
    annealing = loop.Annealing(LambdaGELU(2.0), (epochs - start) * per_epoch, 160, "linear")
    values = [2.0]
    for _ in range((epochs - start) * per_epoch):
        annealing.step()
        values += [gate.lam.item() for gate in annealing.gates]
    for epoch in range(start, epochs):
        progress = (epoch - start + 1) / (epochs - start)
        assert values[(epoch - start + 1) * per_epoch] == pytest.approx(2 + 158 * progress, rel=1e-5)
    assert all(b > a for a, b in pairwise(values)) and not annealing.gates[0].s.requires_grad


@pytest.mark.parametrize(("name", "middle"), [("linear", 81.0), ("log", math.sqrt(320)), ("inverse", 320 / 81)])
def test_hardness_follows_its_schedule(name: Schedule, middle: float) -> None:
    found = [loop.hardness(name, 2, 160, progress) for progress in (0, 0.5, 1)]
    assert found == pytest.approx([2, middle, 160])


def test_augmentation_crops_and_mirrors() -> None:
    image = torch.arange(1.0, 26).reshape(1, 1, 5, 5).expand(200, 1, 5, 5)
    generator = torch.Generator().manual_seed(0)
    assert augment(image, 0, False, generator) is image
    flipped = augment(image, 0, True, generator)
    mirrored = (flipped == image.flip(3)).all((1, 2, 3))
    assert ((flipped == image).all((1, 2, 3)) ^ mirrored).all() and 60 < mirrored.sum() < 140
    padded = F.pad(image[:1], (2, 2, 2, 2))[0, 0]
    places = {padded[i : i + 5, j : j + 5].numpy().tobytes() for i in range(5) for j in range(5)}
    assert {crop.numpy().tobytes() for crop in augment(image, 2, False, generator)[:, 0]} == places


def test_raw_inputs_are_not_standardised() -> None:
    data, x = blobs(), torch.rand(5, 1, 4, 4)
    for options in (FULL, CNN):
        standardised, raw = build(options, data), build(replace(options, inputs="raw"), data)
        assert torch.equal(standardised(x), raw((x - 0.5) / 0.3)) and not torch.equal(standardised(x), raw(x))


# Arms


def test_arms_share_weights_and_points() -> None:
    """Of a network without activations, so that all arms compute the same, the losses tell the order of the images."""
    options = [replace(BASE, arm=arm, crop=1, flip=True) for arm in ARMS]
    first, *others = [[build(each, blobs())[index].weight for index in (2, 4, 6)] for each in options]
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
    linear = [replace(each, hidden=()) for each in options if not ARMS[each.arm].anneals]
    losses = [[epoch["loss"] for epoch in train(each, blobs()).history] for each in linear]
    assert losses == losses[:1] * len(linear)


@pytest.mark.thorough
@pytest.mark.parametrize("arm", [name for name, arm in ARMS.items() if arm.swap != "never"])
def test_every_arm_learns_and_becomes_its_network(arm: str, tmp_path: Path) -> None:
    data, options = blobs(), replace(BASE, arm=arm, epochs=8)
    made = train(options, data)
    results = export(made, options, data, data, tmp_path / "net.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx", providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {session.get_inputs()[0].name: data.images})
    expected = substitute_relu(made.model)(torch.from_numpy(data.images)).detach()
    torch.testing.assert_close(torch.from_numpy(y), expected, rtol=1e-5, atol=1e-5)
    assert results["clean"] == (y.argmax(1) == data.labels).mean()
    assert results["not_refuted_of_these"] <= results["clean_of_these"]
    assert results["clean"] > 0.9 and ("clean_after_substitution" in results) == (ARMS[arm].swap != "never")
    operators = [node.op_type for node in onnx.load(tmp_path / "net.onnx").graph.node]
    assert operators.count("PRelu" if arm == "prelu" else "Relu") == 2
    record = json.loads((tmp_path / "net.json").read_text())
    lam = np.array([epoch["lam"] for epoch in record["epochs"]])
    if ARMS[arm].anneals:
        assert lam.shape == (8, 2) and lam[-1] == pytest.approx([160, 160], rel=1e-5)
        assert len(results["lam_learned"]) == 2
    else:
        assert lam.shape == (8, 0) and results["lam_learned"] == []
    assert record["results"] == results


def test_the_measured_disruption_is_exact_on_two_images() -> None:
    """One neuron z = x, logits (2a + 0.05, 0) for its activation a: GELU(±1) = ±Φ(±1)."""
    first, last = nn.Linear(1, 1), nn.Linear(1, 2)
    with torch.no_grad():
        first.weight.fill_(1)
        first.bias.zero_()
        last.weight.copy_(torch.tensor([[2.0], [0.0]]))
        last.bias.copy_(torch.tensor([0.05, 0.0]))
    smooth = nn.Sequential(nn.Flatten(), first, nn.GELU(), last)
    hard = substitute_relu(smooth)
    swap = measure(smooth, hard, [(torch.tensor([[1.0], [-1.0]]), torch.tensor([0, 0]))])
    gap = 0.15865525393145707  # Φ(−1), by which GELU lies below ReLU at both
    assert swap.mean == pytest.approx(2 * gap / 2, rel=1e-6) and swap.worst == pytest.approx(2 * gap)
    assert (swap.accuracy_smooth, swap.accuracy, swap.flipped, swap.samples) == (0.5, 1.0, 1, 2)
    assert swap.region == (-1, 1) and swap.proven is None and "not asked for" in swap.unproven
    # On [0, 1] the largest gap is the supremum, at 0.75.
    proven = with_proof(replace(swap, region=(0.0, 1.0)), smooth, hard, (1,), math.inf).proven
    assert proven is not None and 2 * SUPREMUM <= proven <= 2 * SUPREMUM * (1 + 1e-6)


def test_batch_normalisation_learns_in_training_and_is_fixed_elsewhere() -> None:
    data, options = blobs(), replace(SMALL, model="cnn7", eps=0.0, epochs=1, arm="gelu-swap-finetune")
    seen = [m.num_batches_tracked for m in train(options, data).model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert [int(n) for n in seen] == [2] * 5, "the replacement does not move the averages"
    with pytest.raises(InputError, match="--batch: the last step of an epoch has one image"):
        train(replace(options, batch=199), data)
    with pytest.raises(InputError, match="--model: a 4×4 kernel does not fit the 1×1 input"):
        build(replace(BASE, model="cnn"), replace(data, images=data.images[:, :, :1, :1]))


# Whole trainings


@pytest.mark.thorough
def test_training_learns_and_hardens(trained: Training) -> None:
    data = blobs()
    images, labels = torch.from_numpy(data.images), torch.from_numpy(data.labels)
    hard = substitute_relu(trained.model)
    assert accuracy(hard, images, labels) > 0.9 and not_refuted(hard, images, labels, FULL.eps, 0) > 0.8
    lam = np.array([epoch["lam"] for epoch in trained.history])
    assert lam.shape == (8, 2) and (lam >= 1).all() and (np.diff(lam[1:], axis=0) > 0).all()
    assert lam[-1] == pytest.approx([160, 160], rel=1e-5)
    assert (lam[0] != FULL.lam_init).all(), "λ is learned before it is annealed"
    first, gate = trained.model[:3], trained.model[3]
    gap = torch.relu(first(images)) - gate(first(images))
    assert gap.min() >= -1e-6 and 0 < gap.max() <= 0.17 / 160 + 1e-6


@pytest.mark.seldom
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("options", "at"),
    [
        (FULL, PER_EPOCH + 3),
        (CNN, PER_EPOCH + 3),
        (FINETUNED, PER_EPOCH + 2),
        (BASE, 3 * PER_EPOCH - 1),
        (replace(BASE, optimizer="sgd"), PER_EPOCH + 2),
        *((replace(SMALL, model=model, certified=0.5, arm="gelu-swap-finetune"), 3) for model in ("cnn5", "cnn7")),
    ],
)
def test_a_resumed_training_is_the_uninterrupted_one(options: Options, at: int, tmp_path: Path) -> None:
    saved, steps = tmp_path / "net.checkpoint", list[int]()
    whole = train(options, blobs())
    with pytest.raises(KeyboardInterrupt):
        train(options, blobs(), saved, stop_at(at))
    resumed = train(options, blobs(), saved, lambda state: steps.append(state.step))
    per_epoch = -(-200 // options.batch)
    assert steps[0] == at // per_epoch * per_epoch + 1, "complete epochs are not done again"
    assert equal(whole.model, resumed.model) and types(whole.model) == types(resumed.model)
    assert whole.swap == resumed.swap and whole.learned == resumed.learned
    assert [epoch["lam"] for epoch in whole.history] == [epoch["lam"] for epoch in resumed.history]


@pytest.mark.seldom
def test_the_seed_decides(trained: Training) -> None:
    torch.manual_seed(123)
    options = replace(FULL, epochs=8)
    assert equal(train(options, blobs()).model, trained.model)
    assert not equal(train(replace(options, seed=4), blobs()).model, trained.model)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_ends_at_the_target(name: Schedule) -> None:
    gate = train(replace(BASE, schedule=name, epochs=2, lam_target=50), blobs(100)).model[3]
    assert isinstance(gate, LambdaGELU) and gate.lam.item() == pytest.approx(50, rel=1e-5)


def test_checkpoints_of_others_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    saved, options = tmp_path / "net.checkpoint", replace(BASE, epochs=1)
    train(options, blobs(50), saved)
    with pytest.raises(InputError, match="--seed 5, not 6"):
        train(replace(options, seed=6), blobs(50), saved)
    saved.write_bytes(saved.read_bytes()[:100])
    with pytest.raises(InputError, match="not a readable checkpoint"):
        train(options, blobs(50), saved)
    assert list(tmp_path.iterdir()) == [saved]


def test_a_loss_that_explodes_is_reported() -> None:
    with pytest.raises(InputError, match=r"epoch \d+: the loss is infinite or NaN"):
        train(replace(BASE, optimizer="sgd", rate=1e6, epochs=2), blobs())


# The command


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"epochs": 0}, "--epochs: must be from 1 to 1,000,000, got 0"),
        ({"lam_target": 2e6}, "--lam-target: must be from 1 to 1,000,000"),
        ({"eps": math.nan}, "--eps"),
        ({"eps": 1.0}, "--eps: must be below 1"),
        ({"switch": 1.0}, "--switch: must be below 1"),
        ({"rate": 0.0}, "--rate: must be a positive number"),
        ({"model": "lenet"}, "'lenet' is not one of mlp, cnn"),
        ({"schedule": "cubic"}, "--schedule"),
        ({"hidden": (10, 0)}, "--hidden"),
        ({"hidden": (5,) * 3000}, "--hidden"),
        ({"decay": math.inf}, "--decay"),
        ({"seed": 2**63}, "--seed"),
    ],
)
def test_bad_options_are_named(change: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        replace(FULL, **change)  # type: ignore[arg-type]


def test_a_gpu_is_taken_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for there, name in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert find_device("auto") == name


def test_numbers_and_sizes_of_the_command_line_are_read() -> None:
    assert number("2/255") == 2 / 255 and number("0.03") == 0.03 and sizes("16,32") == (16, 32) and sizes("") == ()
    for text in ("1/0", "two", "1e999999999", "9" * 5000, "nan", "٥"):
        with pytest.raises(ValueError, match="neither a number nor a fraction"):
            number(text)
    values = vars(parser().parse_args(["--data", "digits", "--out", "x.onnx"]))
    assert (values.pop("out"), values.pop("device")) == (Path("x.onnx"), "auto")
    assert not values.pop("debug") and not values.pop("int8") and Options(**values) == Options("digits")


@pytest.mark.thorough
def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for change, words in [
        ({"--out": str(tmp_path / "net.pt")}, "must end in .onnx"),
        ({"--out": str(tmp_path / "no" / "net.onnx")}, "no such folder"),
        ({"--data": "imagenet"}, "no data set 'imagenet'"),
        ({"--epochs": "0"}, "--epochs"),
        ({"--device": "nowhere"}, "no device 'nowhere'"),
        ({"--out": str(tmp_path / ("x" * 5000 + ".onnx"))}, "cannot be written"),
        ({"--out": str(tmp_path / "a\0b.onnx")}, "embedded null byte"),
        ({"--hidden": "1000000,1000000"}, "into the memory"),
        ({"--data": "digits\x1b[31m" * 500}, r"digits\x1b[31m"),
    ]:
        given = {"--data": "digits", "--out": str(tmp_path / "net.onnx"), **change}
        assert main([word for pair in given.items() for word in pair]) == 2
        shown = capsys.readouterr().err
        *_, error = shown.splitlines()
        assert words in error and error.startswith("train: ") and len(error) <= LONGEST + 7
        # The bar is there already when memory runs out.
        assert shown.count("\n") == 1 or "memory" in words


@pytest.mark.thorough
def test_the_command_writes_network_and_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn", reason="needs scikit-learn")
    out = tmp_path / "digits.onnx"
    command = f"--data digits --hidden 16 --epochs 2 --batch 64 --eps 1/255 --int8 --out {out}"
    assert main(command.split()) == 0
    record = json.loads(out.with_suffix(".json").read_text())
    assert record["options"]["seed"] == 0 and record["training_images"] == 1347 and len(record["epochs"]) == 2
    assert "torch" in record["versions"] and 0 < record["results"]["int8"]["mean_logit_change"] < 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["digits.int8.onnx", "digits.json", "digits.onnx"]
    assert read_onnx(tmp_path / "digits.int8.onnx").output_size == 10
    session = onnxruntime.InferenceSession(str(out))
    test = load("digits", "test")
    (name,) = (entry.name for entry in session.get_inputs())
    logits = np.concatenate([session.run(None, {name: image[None]})[0] for image in test.images])
    assert (logits.argmax(1) == test.labels).mean() == pytest.approx(record["results"]["clean_after_substitution"])
    assert "clean after substitution" in capsys.readouterr().out


def test_the_command_trains_on_arrays_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = blobs(120)
    np.savez(tmp_path / "own.npz", images=data.images, labels=data.labels)
    command = f"--data {tmp_path}/own.npz --hidden 8 --epochs 6 --batch 12 --rate 0.02 --out {tmp_path}/own.onnx"
    assert main(command.split()) == 0
    record = json.loads((tmp_path / "own.json").read_text())
    assert record["training_images"] == 108 and record["results"]["clean"] > 0.8
    assert f"{record['results']['clean']:.2%}" in capsys.readouterr().out


@pytest.mark.thorough
def test_a_training_loads_no_verifier_and_no_bounds(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="needs scikit-learn")
    code = (
        "import sys; from verifiable_relu.train.__main__ import main; "
        "assert main(['--data', 'digits', '--hidden', '4', '--epochs', '1', '--out', 'net.onnx']) == 0; "
        "print(sorted({name.split('.')[1] for name in sys.modules if name.startswith('verifiable_relu.')}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True
    )
    loaded = set(re.findall(r"\w+", done.stdout.splitlines()[-1]))
    assert "train" in loaded and loaded.isdisjoint({"api", "bounds", "campaign", "check", "trust", "verifiers"})


# The networks that ship with the project

SHIPPED = sorted((Path(__file__).parents[2] / "specs").glob("*.json"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_networks_are_hardened_relu_networks(path: Path) -> None:
    record = json.loads(path.read_text())
    assert len(record["epochs"]) == record["options"]["epochs"]
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
