"""Devices other than the CPU: bounds, verifiers and training keep all their tensors on one device."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.support import flat_nets
from tests.support.asking import claims
from tests.support.elsewhere import DEVICE, Elsewhere
from tests.unit.test_api import IMAGES, LABELS, MODEL
from tests.unit.test_train import CNN, FULL, blobs
from verifiable_relu import verify
from verifiable_relu.errors import InputError
from verifiable_relu.readers import from_torch
from verifiable_relu.search.outcomes import Trust, Verdict
from verifiable_relu.search.registry import make
from verifiable_relu.settings import require_device
from verifiable_relu.spec.property import Box, Property, Query, Row
from verifiable_relu.train.loop import train
from verifiable_relu.train.options import Options


@pytest.fixture
def elsewhere() -> Iterator[None]:
    with Elsewhere():
        yield


def test_a_device_refuses_what_is_elsewhere(elsewhere: None) -> None:
    there, here = torch.ones(3, device=DEVICE), torch.ones(3)
    assert (there + 1).device == DEVICE == here.to(there).device and there.cpu().device == here.device
    assert isinstance(there.tolist(), list) and float(there.sum()) == 3 and there[torch.tensor([0, 1])].device == DEVICE
    for meet in (torch.add, torch.Tensor.index_add, torch.Tensor.__getitem__):
        with pytest.raises(RuntimeError, match="and on the CPU"):
            meet(here, there) if meet is not torch.Tensor.index_add else meet(there, 0, torch.arange(3), there)
    with pytest.raises(TypeError, match="numpy"):
        there.numpy()
    require_device("cuda")


def test_the_pretended_device_is_gone_when_its_mode_ends() -> None:
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="cuda"):
            require_device("cuda")


@pytest.mark.parametrize("name", ["mlp", "residual", "pooled"])
@pytest.mark.parametrize("method", ["ibp", "crown-ibp", "crown", "alpha-crown", "attack", "split", "auto"])
def test_a_method_answers_as_on_the_cpu(method: str, name: str) -> None:
    rng = np.random.default_rng(1)
    network = getattr(flat_nets, name)(rng)
    middle = rng.integers(-4, 5, network.input_size) / 8
    (y,), box = network(torch.from_numpy(middle)[None]).tolist(), Box(middle - 0.125, middle + 0.125)
    # An output is less by a little, or by a lot.
    asked = [
        Query(network, Property(box, tuple((Row(((j, Fraction(1)),), Fraction(v) - gap),) for j, v in enumerate(y))))
        for gap in (Fraction(1, 64), Fraction(50))
    ]
    here = claims(make(method), asked, 60)
    with Elsewhere():
        there = claims(make(method), asked, 60, device=DEVICE.type)
    assert [(o.verdict, o.reason, o.unstable) for o in there] == [(o.verdict, o.reason, o.unstable) for o in here]
    for a, b in zip(here, there, strict=True):
        assert (a.margin is None) == (b.margin is None)
        if a.margin is not None and b.margin is not None and method in ("ibp", "crown-ibp", "crown", "alpha-crown"):
            assert abs(a.margin - b.margin) <= 1e-3 * (1 + abs(a.margin))
    assert {o.trust for o in there if o.verdict is Verdict.UNSAT} <= {Trust.ROUNDED}


CERTIFIED = replace(FULL, certified_by="crown-ibp", epochs=2)


@pytest.mark.seldom
@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        replace(FULL, epochs=2),
        CNN,
        CERTIFIED,
        replace(CERTIFIED, arm="gelu-swap-finetune"),
        replace(CERTIFIED, arm="swish"),
    ],
    ids=lambda options: f"{options.model} {options.arm} {options.certified_by}",
)
def test_a_training_has_the_losses_of_one_on_the_cpu(options: Options) -> None:
    here = train(options, blobs()).history
    with Elsewhere():
        there = train(options, blobs(), device="cuda").history
    losses, found = [epoch["loss"] for epoch in here], [epoch["loss"] for epoch in there]
    # With convolutions the last bit of float32 has been seen to differ.
    assert found == (pytest.approx(losses, rel=1e-6, abs=0) if options.model == "cnn" else losses)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_module_and_images_may_be_there(device: str, elsewhere: None) -> None:
    model, data = deepcopy(MODEL).to(DEVICE), torch.from_numpy(IMAGES).to(DEVICE)
    results = verify(model, data, torch.tensor(LABELS, device=DEVICE), 0.125, device=device)
    assert [str(r.verdict) for r in results] == ["unsat", "unsat", "sat"]


def test_constants_of_a_module_are_where_its_parameters_are(elsewhere: None) -> None:
    layers = torch.nn.AvgPool2d(2), torch.nn.Flatten(), torch.nn.Linear(4, 3), torch.nn.LeakyReLU(), torch.nn.GELU()
    module = torch.nn.Sequential(*layers).to(DEVICE)
    x = torch.rand(2, 1, 4, 4, device=DEVICE)
    torch.testing.assert_close(from_torch(module, (1, 4, 4))(x.flatten(1)).cpu(), module(x).cpu())
