"""benchmarks/study/training.py: measures of networks against brute force, numbers of trainings, options of suites."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.study.training import HARDNESSES, joint, measure, numbers
from verifiable_relu.data import Dataset
from verifiable_relu.ir.network import Network
from verifiable_relu.nn import mlp
from verifiable_relu.readers import from_torch

EPS = "1/20"


@pytest.fixture(scope="module")
def model() -> nn.Sequential:
    torch.manual_seed(0)
    made = mlp([4, 12, 6, 3], nn.ReLU).eval()
    with torch.no_grad():
        # Otherwise, it would give all images one class.
        made[-1].bias -= made(torch.rand(100, 1, 2, 2)).mean(0)  # type: ignore[operator, union-attr]
    return made


@pytest.fixture(scope="module")
def data(model: nn.Sequential) -> Dataset:
    images = np.random.default_rng(0).random((25, 1, 2, 2), dtype=np.float32)
    labels = model(torch.from_numpy(images)).argmax(1).numpy()
    return Dataset("made", images, labels, (0.0,), (1.0,), np.ones(25, bool))


def read(model: nn.Module) -> Network:
    return from_torch(model, (1, 2, 2))


def test_unstable_neurons_of_the_first_layer_are_those_of_intervals(model: nn.Sequential, data: Dataset) -> None:
    first = next(module for module in model if isinstance(module, nn.Linear))
    weight, bias = first.weight.detach().double().numpy(), first.bias.detach().double().numpy()
    x = data.images.reshape(25, 4).astype(float)
    low, high = np.clip(x - 0.05, 0, 1), np.clip(x + 0.05, 0, 1)
    middle, radius = (low + high) / 2 @ weight.T + bias, (high - low) / 2 @ abs(weight).T
    found = measure(read(model), data, np.arange(25), [EPS])["unstable"][EPS]
    assert len(found) == 2
    assert found[0] == np.sum(abs(middle) < radius) / 25


def test_no_neuron_that_changes_sign_in_the_ball_is_counted_as_stable(model: nn.Sequential, data: Dataset) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.from_numpy(data.images)
    within = (x[:, None] + (2 * torch.rand(25, 500, 1, 2, 2, generator=generator) - 1) * 0.05).clamp(0, 1)
    relus = [place for place, module in enumerate(model) if isinstance(module, nn.ReLU)]
    found = measure(read(model), data, np.arange(25), [EPS])["unstable"][EPS]
    for count, place in zip(found, relus, strict=True):
        active = model[:place](within.flatten(0, 1)).reshape(25, 500, -1) > 0
        seen = (active.any(1) & ~active.all(1)).sum().item() / 25
        assert seen <= count
        assert count > 0


def test_the_norm_is_that_of_all_weights_together(model: nn.Sequential, data: Dataset) -> None:
    weights = [w for layer in model if isinstance(layer, nn.Linear) for w in layer.weight.flatten().tolist()]
    found = measure(read(model), data, np.array([], dtype=int), [EPS])
    assert found == {"norm": pytest.approx(math.sqrt(sum(w**2 for w in weights))), "unstable": {}}


def test_joint_certificates_are_fewer_for_larger_families(model: nn.Sequential, data: Dataset) -> None:
    found = joint(read(model), data.images, data.labels, EPS)
    assert found is not None and (found["eps"], found["images"]) == (EPS, 25)
    counts = [found["inf"], *(found[str(lam)] for lam in HARDNESSES)]
    assert counts == sorted(counts, reverse=True) and counts[0] > counts[-1]


def test_measures_are_over_the_given_images_and_joint_certificates_of_relu_alone(
    model: nn.Sequential, data: Dataset
) -> None:
    few = np.array([3, 5, 8])
    found = measure(read(model), data, few, ["0.01", EPS, "0.1"])
    assert found["joint"]["eps"] == EPS and found["joint"]["images"] == 3
    totals = [sum(layers) for layers in found["unstable"].values()]
    assert totals == sorted(totals) and len(totals) == 3
    assert "joint" not in measure(read(mlp([4, 5, 3], nn.GELU).eval()), data, few, [EPS])


def test_numbers_of_a_training() -> None:
    epochs = [{"accuracy": accuracy} for accuracy in (0.1, 0.2, 0.3, *[1.0] * 22)]
    results = {"clean": 0.9, "pruned": {"0.5": 0.4}, "proven_logit_change": None, "lam_learned": [1.5, 2.0]}
    results["monitor"] = [{"part": 0.05, "oui": 0.3}, {"part": 0.1, "oui": 0.5}]
    found = numbers({"results": results, "options": {"lam_init": 1.0, "rate": 0.01}, "epochs": epochs})
    assert found == {
        "clean_test": 0.9, "pruned_0.5": 0.4, "lam_learned": [1.5, 2.0], "drift": 0.75, "rate": 0.01,
        "oui_early": 0.5, "accuracy_early": 0.3,
    }  # fmt: skip
