"""The arms of the comparison: their common data, the replacement by ReLU, and the measurements."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

from verifiable_relu.data import Dataset
from verifiable_relu.errors import InputError
from verifiable_relu.hardening.proven import with_proof
from verifiable_relu.nn import substitute_relu
from verifiable_relu.nn.gates import SUPREMUM
from verifiable_relu.train import loop
from verifiable_relu.train.export import export, finish
from verifiable_relu.train.loop import Callback, TrainingStep, build, train
from verifiable_relu.train.options import ARMS, Model, Options
from verifiable_relu.train.swap import measure

PER_EPOCH = 4


def blobs() -> Dataset:
    """Two hundred noisy images of three classes."""
    random = np.random.default_rng(1)
    centres = random.random((3, 1, 4, 4))
    labels = random.integers(0, 3, 200)
    images = np.clip(centres[labels] + random.normal(0, 0.15, (200, 1, 4, 4)), 0, 1).astype(np.float32)
    return Dataset("blobs", images, labels, (0.5,), (0.3,), np.ones(200, bool))


BASE = Options("blobs", hidden=(12, 12), epochs=4, batch=50, rate=2e-2, eps=0.02, seed=5)
FINETUNED = replace(BASE, arm="gelu-swap-finetune")


def stop_at(last: int) -> Callback:
    """A callback that interrupts the training after the step ``last``."""

    def stop(state: TrainingStep) -> None:
        if state.step == last:
            raise KeyboardInterrupt

    return stop


def types(model: nn.Sequential) -> list[str]:
    return [type(module).__name__ for module in model]


@pytest.mark.seldom
@pytest.mark.thorough
def test_arms_share_weights_order_and_points(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list[torch.Tensor]] = {arm: [] for arm in ARMS}
    weights = {}
    real = loop.objective
    for arm, points in seen.items():

        def record(model: nn.Sequential, x: torch.Tensor, *rest: object, points: list[torch.Tensor] = points) -> object:
            points.append(x)
            return real(model, x, *rest)  # type: ignore[arg-type]

        monkeypatch.setattr(loop, "objective", record)
        options = replace(BASE, arm=arm, crop=1, flip=True)
        initial = build(options, blobs())
        weights[arm] = [initial[index].weight for index in (2, 4, 6)]
        train(options, blobs())
    for arm, points in seen.items():
        assert len(points) == 4 * PER_EPOCH, arm
        assert all(torch.equal(a, b) for a, b in zip(points, seen["relu"], strict=True)), arm
        assert all(torch.equal(a, b) for a, b in zip(weights[arm], weights["relu"], strict=True)), arm


@pytest.mark.thorough
@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_learns_and_becomes_its_network(arm: str, tmp_path: Path) -> None:
    data = blobs()
    options = replace(BASE, arm=arm, epochs=8)
    trained = train(options, data)
    results = export(trained, options, data, data, tmp_path / "net.onnx")
    assert results["clean"] > 0.9
    assert ("clean_after_substitution" in results) == (ARMS[arm].swap != "never")
    hard, record = finish(trained, options, data, data)
    assert types(hard)[3] == (ARMS[arm].activation if ARMS[arm].swap == "never" else "ReLU")
    lam = np.array([epoch["lam"] for epoch in record["epochs"]])
    if options.anneals:
        assert lam.shape == (8, 2) and lam[-1] == pytest.approx([160, 160], rel=1e-5)
        assert len(results["lam_learned"]) == 2
    else:
        assert lam.shape == (8, 0) and results["lam_learned"] == []
    assert {"monitor", "int8", "pruned", "proven_logit_change"}.isdisjoint(results)
    assert json.loads((tmp_path / "net.json").read_text())["results"]["clean"] == results["clean"]


@pytest.mark.seldom
@pytest.mark.parametrize(("switch", "first"), [(0.0, 0), (0.1, 1), (0.5, 2), (0.75, 3), (0.99, 3)])
def test_lambda_grows_from_the_epoch_of_the_switch_on(switch: float, first: int) -> None:
    options = replace(BASE, switch=switch, schedule="linear", lam_factor=1e-9)
    assert options.switch_epoch == first
    lam = [epoch["lam"][0] for epoch in train(options, blobs()).history]
    assert [value > BASE.lam_init + 1e-3 for value in lam] == [epoch >= first for epoch in range(4)]


@pytest.mark.thorough
def test_fine_tuning_at_equal_total_epochs_swaps_at_the_switch() -> None:
    trained = train(FINETUNED, blobs())
    assert len(trained.history) == 4 and trained.swap is not None
    assert types(trained.model)[3] == "ReLU"


@pytest.mark.seldom
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("options", "at"),
    [
        (FINETUNED, 2),
        (BASE, 2 * PER_EPOCH - 1),
        (replace(BASE, optimizer="sgd"), 2),
    ],
)
def test_resumed_arms_are_the_uninterrupted_ones(options: Options, at: int, tmp_path: Path) -> None:
    saved = tmp_path / "net.checkpoint"
    whole = train(options, blobs())

    with pytest.raises(KeyboardInterrupt):
        train(options, blobs(), saved, stop_at(PER_EPOCH + at))
    resumed = train(options, blobs(), saved)
    assert whole.swap == resumed.swap and whole.learned == resumed.learned
    assert types(whole.model) == types(resumed.model)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name


# What the replacement does


def test_the_measured_disruption_is_exact_on_two_images() -> None:
    """One neuron z = x, logits (2a + 0.05, 0) for its activation a: GELU(±1) = ±Φ(±1)."""
    last = nn.Linear(1, 2)
    first = nn.Linear(1, 1)
    with torch.no_grad():
        first.weight.fill_(1)
        first.bias.zero_()
        last.weight.copy_(torch.tensor([[2.0], [0.0]]))
        last.bias.copy_(torch.tensor([0.05, 0.0]))
    smooth = nn.Sequential(nn.Flatten(), first, nn.GELU(), last)
    images, labels = torch.tensor([[1.0], [-1.0]]), torch.tensor([0, 0])
    hard = substitute_relu(smooth)
    swap = measure(smooth, hard, [(images, labels)])
    gap = 0.15865525393145707  # Φ(−1), by which GELU lies below ReLU at both
    assert swap.mean == pytest.approx(2 * gap / 2, rel=1e-6) and swap.worst == pytest.approx(2 * gap)
    assert (swap.accuracy_smooth, swap.accuracy, swap.flipped, swap.samples) == (0.5, 1.0, 1, 2)
    assert swap.region == (-1, 1) and swap.proven is None and "not asked for" in swap.unproven
    # On [0, 1] the largest gap is the supremum, at 0.75.
    proven = with_proof(replace(swap, region=(0.0, 1.0)), smooth, hard, (1,), math.inf).proven
    assert proven is not None and 2 * SUPREMUM <= proven <= 2 * SUPREMUM * (1 + 1e-6)


# Networks of fixed layers

SMALL = replace(BASE, model="resnet", epochs=2, batch=100, rate=5e-3)
"""Two steps an epoch."""


@pytest.mark.seldom
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "arm"),
    # One arm of each way to swap; ``test_every_arm_learns_and_becomes_its_network`` has all of them.
    [("cnn7", "lambda-gelu"), ("resnet", "gelu-swap-finetune"), ("resnet", "prelu")],
)
def test_fixed_networks_train_with_every_swap(model: Model, arm: str, tmp_path: Path) -> None:
    data = blobs()
    options = replace(SMALL, model=model, arm=arm)
    trained = train(options, data)
    results = export(trained, options, data, data, tmp_path / "net.onnx")
    layers = 7 if model == "resnet" else 6
    if options.anneals:
        assert trained.history[-1]["lam"] == pytest.approx([160] * layers, rel=1e-5)
    x = torch.from_numpy(data.images)
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx", providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {session.get_inputs()[0].name: data.images})
    hard = substitute_relu(trained.model)
    torch.testing.assert_close(torch.from_numpy(y), hard(x).detach(), rtol=1e-5, atol=1e-5)
    assert results["clean"] == (y.argmax(1) == data.labels).mean()
    assert results["not_refuted_of_these"] <= results["clean_of_these"]


@pytest.mark.seldom
@pytest.mark.thorough
@pytest.mark.parametrize("model", ["cnn5", "cnn7", "resnet"])
def test_fixed_networks_are_trained_with_certified_terms_and_resumed(model: Model, tmp_path: Path) -> None:
    options = replace(SMALL, model=model, certified=0.5, stability=0.01, arm="gelu-swap-finetune")
    whole = train(options, blobs())
    with pytest.raises(KeyboardInterrupt):
        train(options, blobs(), tmp_path / "net", stop_at(3))
    resumed = train(options, blobs(), tmp_path / "net")
    assert whole.swap == resumed.swap
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name


def test_batch_normalisation_learns_in_training_and_is_fixed_elsewhere() -> None:
    data = blobs()
    options = replace(SMALL, model="cnn7", eps=0.0, epochs=1, arm="gelu-swap-finetune")
    trained = train(options, data)
    seen = [module.num_batches_tracked for module in trained.model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert [int(n) for n in seen] == [2] * 5, "the replacement does not move the averages"
    with pytest.raises(InputError, match="--batch: the last step of an epoch has one image"):
        train(replace(options, batch=199), data)
    with pytest.raises(InputError, match="--model: a 4×4 kernel does not fit the 1×1 input"):
        build(replace(BASE, model="cnn"), replace(data, images=data.images[:, :, :1, :1]))
