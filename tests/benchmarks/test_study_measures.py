"""verifiable_relu/study/measures.py and outcomes.py: measures of networks against brute force, numbers of trainings."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.study.measures import HARDNESSES, joint, measure_network, unstable_layers, weight_norms
from benchmarks.study.outcomes import early_accuracy, number
from verifiable_relu.data import Dataset
from verifiable_relu.network import Network, from_torch, hardened
from verifiable_relu.nn import mlp
from verifiable_relu.train.options import Options

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
    found = unstable_layers(read(model), data.images, EPS)
    assert found is not None and len(found) == 2
    assert found[0] == np.sum(abs(middle) < radius) / 25


def test_no_neuron_that_changes_sign_in_the_ball_is_counted_as_stable(model: nn.Sequential, data: Dataset) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.from_numpy(data.images)
    within = (x[:, None] + (2 * torch.rand(25, 500, 1, 2, 2, generator=generator) - 1) * 0.05).clamp(0, 1)
    relus = [place for place, module in enumerate(model) if isinstance(module, nn.ReLU)]
    found = unstable_layers(read(model), data.images, EPS)
    assert found is not None
    for count, place in zip(found, relus, strict=True):
        active = model[:place](within.flatten(0, 1)).reshape(25, 500, -1) > 0
        seen = (active.any(1) & ~active.all(1)).sum().item() / 25
        assert seen <= count
        assert count > 0


def test_without_images_nothing_is_counted(model: nn.Sequential, data: Dataset) -> None:
    found = measure_network(read(model), None, Options("digits"), data, np.array([], dtype=int), [EPS])
    assert found["unstable"] == {EPS: None} and found["joint"]["images"] == 0


def test_weight_norms_are_frobenius(model: nn.Sequential) -> None:
    layers = [module for module in model if isinstance(module, nn.Linear)]
    norms = [math.sqrt(sum(w**2 for w in layer.weight.flatten().tolist())) for layer in layers]
    assert weight_norms(read(model)) == pytest.approx(norms)


def test_joint_certificates_are_fewer_for_larger_families(model: nn.Sequential, data: Dataset) -> None:
    found = joint(read(model), data.images, data.labels, EPS)
    assert found is not None and (found["eps"], found["images"]) == (EPS, 25)
    counts = [found["inf"], *(found[str(lam)] for lam in HARDNESSES)]
    assert counts == sorted(counts, reverse=True) and counts[0] > counts[-1]


def test_joint_certificates_are_of_relu_networks_alone(data: Dataset) -> None:
    torch.manual_seed(0)
    for activation in (nn.PReLU, nn.GELU):
        network = read(mlp([4, 5, 3], activation).eval())
        assert joint(network, data.images[:2], data.labels[:2], EPS) is None
    relu = read(mlp([4, 5, 3], nn.ReLU).eval())
    assert joint(hardened(relu, 20.0), data.images[:2], data.labels[:2], EPS) is None


def test_the_measures_of_a_network_are_over_the_asked_images(model: nn.Sequential, data: Dataset) -> None:
    few = np.array([3, 5, 8])
    found = measure_network(read(model), None, Options("digits"), data, few, ["0.01", EPS, "0.1"])
    assert found["unstable"][EPS] == unstable_layers(read(model), data.images[few], EPS)
    assert list(found["unstable"]) == ["0.01", EPS, "0.1"] and found["joint"]["eps"] == EPS
    totals = [sum(layers) for layers in found["unstable"].values()]
    assert totals == sorted(totals) and found["joint"]["images"] == 3


def test_the_early_accuracy_is_that_of_the_epoch_in_which_a_tenth_is_passed() -> None:
    epochs = [{"accuracy": accuracy} for accuracy in (0.1, 0.2, 0.3)]
    assert early_accuracy({"epochs": epochs}) == 0.1
    assert early_accuracy({"epochs": [*epochs, *[{"accuracy": 1.0}] * 22]}) == 0.3
    assert math.isnan(early_accuracy({"epochs": []}))


def test_a_number_that_a_record_lacks_is_none() -> None:
    record = {"results": {"pruned": {"0.5": 0.4}, "proven_logit_change": None}, "options": {"lam_init": 1.0}}
    assert number(record, "pruned_0.5") == 0.4
    for name in ("pruned_0.9", "int8", "proven_logit_change", "drift", "oui_early"):
        assert number(record, name) is None
