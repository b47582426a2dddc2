"""Devices other than the CPU: bounds, verifiers and training keep all their tensors on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.asking import claims
from tests.support.elsewhere import DEVICE, Elsewhere
from tests.support.families import boxes
from tests.unit.test_api import IMAGES, LABELS, MODEL
from tests.unit.test_bounds import ACTS, Act, images, mixed, mlp, moved
from tests.unit.test_train import CNN, FULL, blobs
from verifiable_relu import verify
from verifiable_relu.bounds import Ascent, Bounds, preactivation_bounds, substitution_change
from verifiable_relu.errors import InputError
from verifiable_relu.network import from_torch, hardened
from verifiable_relu.network.graph import Network, require_device
from verifiable_relu.network.nodes.affine import Conv2d
from verifiable_relu.spec import Box, Property, Query, Row
from verifiable_relu.train.loop import train
from verifiable_relu.train.options import Options
from verifiable_relu.verifiers.base import Outcome, Trust, Verdict
from verifiable_relu.verifiers.batch import Verifier
from verifiable_relu.verifiers.incomplete import AlphaCrown, Crown, Ibp
from verifiable_relu.verifiers.registry import make

NETWORKS: dict[str, Callable[[Act], Network]] = {"mlp": mlp, "images": images, "mixed": mixed, "moved": moved}
networks = pytest.mark.parametrize("name", NETWORKS)
BOUNDS = ("ibp", "crown-ibp", "crown", "alpha-crown")
ANSWERED = [
    *((method, "relu", name) for method in BOUNDS for name in NETWORKS),
    *((method, "relu", name) for method in ("attack", "split", "auto") for name in ("mlp", "images", "moved")),
    # What other activations need of a device does not depend on the nodes beside them.
    *((method, act, "mixed") for method in BOUNDS for act in ("leaky1.5", "tanh", "gelu5")),
    *((method, "gelu5", "mlp") for method in ("attack", "split", "auto")),
]


@pytest.fixture
def elsewhere() -> Iterator[None]:
    with Elsewhere():
        yield


def queries(network: Network) -> list[Query]:
    """Queries of 1 to 3 polytopes with 1 or more rows, of which some are *sat* and some *unsat*."""
    box, made = boxes(network, batch=3).flat(), []
    middle, radius = (box.lower + box.upper) / 2, (box.upper - box.lower) / 8
    box, center = Bounds(middle - radius, middle + radius), network(middle.reshape(-1, *network.input_shape)).flatten(1)
    for i, y in enumerate(center.tolist()):
        # y_j is less by a lot, or y_0 by a little.
        rows = [Row(((j, Fraction(1)),), Fraction(y[j]) - (50 if j else Fraction(1, 4))) for j in range(len(y))]
        polytopes = tuple((row, rows[0]) if i == 2 else (row,) for row in rows[: i + 1])
        made.append(Query(network, Property(Box(box.lower[i].numpy(), box.upper[i].numpy()), polytopes)))
    return made


NARROW = ("mlp", "moved")


def check(method: Verifier, asked: list[Query], looser: float = 1e-3, **limits: int) -> list[Outcome]:
    """The answers on the CPU and on the other device are the same, but for margins that may be slightly lower."""
    here = claims(method, asked, 60, **limits)
    with Elsewhere():
        there = claims(method, asked, 60, device="cuda", **limits)
    for a, b in zip(here, there, strict=True):
        assert (a.verdict, a.reason, a.unstable) == (b.verdict, b.reason, b.unstable), b.detail
        if isinstance(method, Ibp | Crown):
            assert a.margin is not None and b.margin is not None
            assert -1e-3 < a.margin - b.margin <= looser * (1 + abs(a.margin))
    return there


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dilation", [(1, 1), (1, 2)])
@pytest.mark.parametrize("stride", [(1, 1), (2, 3)])
@pytest.mark.parametrize("padding", [(0, 0, 0, 0), (1, 0, 2, 1)])
def test_convolutions_elsewhere_are_matrix_products(
    groups: int,
    dilation: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int, int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    shapes = ((6, 4 // groups, 3, 2), (6,), (5, 4, 8, 9))
    weight, bias, x = (torch.randn(*shape, dtype=torch.float64) for shape in shapes)
    how: dict[str, Any] = {"stride": stride, "dilation": dilation, "padding": padding, "groups": groups}

    def node(weight: Tensor, bias: Tensor) -> Conv2d:
        return Conv2d(name="", inputs=(0,), shape=(), weight=weight, bias=bias, **how)

    y = node(weight, bias).forward(x)
    a = torch.randn_like(y)
    back = node(weight, bias).adjoint(a, (4, 8, 9))
    for name in ("conv2d", "conv_transpose2d"):
        monkeypatch.setattr(torch.nn.functional, name, None)
    with Elsewhere():
        there = node(weight.to(DEVICE), bias.to(DEVICE))
        found = there.forward(x.to(DEVICE)).cpu(), there.adjoint(a.to(DEVICE), (4, 8, 9)).cpu()
    torch.testing.assert_close(found, (y, back), rtol=1e-12, atol=1e-12)


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


@pytest.mark.combined
@pytest.mark.parametrize(("method", "act", "name"), ANSWERED)
def test_a_method_answers_as_on_the_cpu(method: str, act: str, name: str) -> None:
    network = NETWORKS[name](ACTS[act])
    there = check(make(method), queries(network))
    assert {o.trust for o in there if o.verdict is Verdict.UNSAT} <= {Trust.ROUNDED}


@pytest.mark.combined
@pytest.mark.parametrize("method", [Crown, AlphaCrown])
@pytest.mark.parametrize(
    ("options", "limits", "name"),
    # So little memory takes many chunks, and long, in a network with many neurons.
    [*(({"dtype": "float32"}, {}, name) for name in NETWORKS), *(({}, {"memory": 1 << 14}, name) for name in NARROW)],
    ids=str,
)
def test_bounds_with_options_are_those_of_the_cpu(
    name: str, method: type[Crown], options: dict[str, str], limits: dict[str, int]
) -> None:
    search = {"intermediate": Ascent(steps=3)} if method is AlphaCrown else {}
    network = NETWORKS[name](ACTS["relu"])
    check(method(**options, **search), queries(network), 0.1 if options else 1e-3, **limits)  # type: ignore[arg-type]


@pytest.mark.parametrize("coefficient", [1 << 24, (1 << 24) + 1])
def test_what_is_no_float32_number_is_not_proven_in_float32(coefficient: int, elsewhere: None) -> None:
    network = mlp(ACTS["relu"])
    box = Box(*(boxes(network, batch=1).flat().lower[0].numpy() for _ in range(2)))
    query = Query(network, Property(box, ((Row(((0, Fraction(coefficient)),), Fraction(-(10**12))),),)))
    (outcome,) = claims(Crown(dtype="float32"), [query], 60, device="cuda")
    assert outcome.verdict is Verdict.UNSAT
    assert outcome.trust is (Trust.ROUNDED if coefficient == 1 << 24 else Trust.FLOAT)


@pytest.mark.seldom
@networks
def test_the_joint_certificate_is_that_of_the_cpu(name: str) -> None:
    family = hardened(NETWORKS[name](ACTS["gelu5"]))
    check(make("crown"), queries(family))
    box = boxes(family, batch=3)
    here = substitution_change(family, box)
    with Elsewhere():
        network, there = family.to(torch.float64, "cuda"), Bounds(box.lower.to(DEVICE), box.upper.to(DEVICE))
        found = substitution_change(network, there)
        pre = preactivation_bounds(network, there)
        assert found.lower.device == DEVICE and all(bounds.lower.device == DEVICE for bounds in pre.values())
        torch.testing.assert_close(found.lower.cpu(), here.lower, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found.upper.cpu(), here.upper, rtol=1e-6, atol=1e-6)


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
    assert [epoch["loss"] for epoch in here] == [epoch["loss"] for epoch in there]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_module_and_images_may_be_there(device: str, elsewhere: None) -> None:
    model, data = deepcopy(MODEL).to(DEVICE), torch.from_numpy(IMAGES).to(DEVICE)
    results = verify(model, data, torch.tensor(LABELS, device=DEVICE), 0.125, device=device)
    assert [str(r.verdict) for r in results] == ["unsat", "unsat", "sat"]


def test_constants_of_a_module_are_where_its_parameters_are(elsewhere: None) -> None:
    layers = torch.nn.AvgPool2d(2), torch.nn.Flatten(), torch.nn.Linear(4, 3), torch.nn.LeakyReLU(), torch.nn.GELU()
    module = torch.nn.Sequential(*layers).to(DEVICE)
    x = torch.rand(2, 1, 4, 4, device=DEVICE)
    torch.testing.assert_close(from_torch(module, (1, 4, 4))(x).cpu(), module(x).cpu())
