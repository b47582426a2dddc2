"""The bound of the change of outputs by the substitution of ReLU, against samples, ascents and results by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.support.draws import draws
from tests.support.families import (
    COUPLED,
    NETWORKS,
    block,
    boxes,
    climb,
    gated,
    members,
    mlp,
    points,
    smooth,
    transformer,
)
from tests.support.nets import Chain
from verifiable_relu.bounds.change import substitution_change
from verifiable_relu.errors import InputError
from verifiable_relu.ir.families import between, harden, least_lambdas
from verifiable_relu.ir.interval import Interval
from verifiable_relu.ir.network import Affine, Network
from verifiable_relu.nn import LambdaGELU, substitute_relu
from verifiable_relu.readers import from_torch, read_onnx

SPECS = Path(__file__).parents[2] / "specs"
DEEPEST = 0.16997120747990369
"""max t·Φ(−t), at t = 0.7517915…"""


def differences(family: Network, x: Tensor, others: list[Network]) -> Tensor:
    """The differences of outputs (len(others)·len(x), batch, outputs) at points x, (…, batch, inputs)."""
    flat = x.flatten(0, 1)
    return torch.cat([(family.limit(flat) - other(flat)).unflatten(0, x.shape[:2]) for other in others])


def assert_within(found: Interval, seen: Tensor) -> None:
    """Sampled differences lie within the bound, where it is a number, up to the float64 rounding of the two numbers."""
    assert not bool((found.lower > seen.amin(0) + 1e-12).any())
    assert not bool((seen.amax(0) - 1e-12 > found.upper).any())


def assert_holds(family: Network, box: Interval) -> tuple[Tensor, Tensor]:
    """Check the bound at samples; returns the proven and the largest sampled change, (batch, outputs)."""
    found = substitution_change(family, box)
    seen = differences(family, points(box), members(family))
    exact = smooth(family)[0]
    for sign in (1, -1):
        towards = climb(box, lambda x, sign=sign: sign * (family.limit(x) - exact(x)).sum(1))  # type: ignore[misc]
        seen = torch.cat([seen, differences(family, towards, smooth(family, count=1))])
    assert_within(found, seen)
    return torch.maximum(-found.lower, found.upper), seen.abs().amax(0)


@pytest.mark.combined
@pytest.mark.parametrize("make", [*NETWORKS.values(), *COUPLED.values()])
@pytest.mark.parametrize("lam", (1.0, 5.0, 20.0, 160.0))
def test_no_sampled_change_is_larger(make: Callable[..., Network], lam: float) -> None:
    for seed in range(draws(2)):
        family = harden(make(seed), lam)
        proven, sampled = assert_holds(family, boxes(family))
        # Over wide boxes, the last ones, bounds of products and quotients may be infinite.
        known = proven[:4] if make in COUPLED.values() else proven
        assert bool((known >= 0).all()) and bool(torch.isfinite(known).all())
        # A test of soundness alone would be content with infinity. The first boxes are almost points, in which a
        # single neuron of large λ does not change.
        if make is not gated or lam < 160:
            assert float((sampled / proven)[:3].max()) > (0.01 if make is transformer else 0.2)


def test_what_comes_before_every_activation_does_not_change() -> None:
    """The normalisation before a feed-forward block is the same in both networks: only δ of each neuron counts."""
    family = harden(block(), 5.0)
    found = substitution_change(family, boxes(family))
    last = [op for op in family.ops if isinstance(op, Affine)][-1].map.weight
    assert bool((found.upper <= last.clamp(min=0).sum(1) * DEEPEST / 5 + 1e-9).all())
    assert bool((found.lower >= -last.abs().sum(1)).all())


@pytest.mark.parametrize("name", NETWORKS)
def test_every_layer_has_its_own_lambda(name: str) -> None:
    network = NETWORKS[name](3)
    rest = [50.0] * (len(network.activations) - 1)
    for lams in ([2.0, *rest], [*rest, 2.0]):
        family = harden(network, lams)
        assert_holds(family, boxes(family))


def neuron(bias: float, lam: float, out: float = 1.0) -> Network:
    """The network y = out·f(x + bias) + 1."""
    chain, number = Chain(1), lambda value: torch.tensor([[value]], dtype=torch.float64)
    chain.linear(number(1.0), number(bias)[0])
    chain.act()
    chain.linear(number(out), number(1.0)[0])
    return harden(chain.network("one"), lam)


def interval(lower: float, upper: float) -> Interval:
    return Interval(torch.tensor([[lower]], dtype=torch.float64), torch.tensor([[upper]], dtype=torch.float64))


@pytest.mark.parametrize(
    ("bias", "low", "high", "gap"),
    [
        (0.0, -1.0, 1.0, DEEPEST / 5),
        # 5·0.2 = 1 is past the largest gap, which is at 5·|z| = 0.75, and 5·0.1 = 0.5 before it.
        (0.0, 0.2, 1.0, 0.2 * 0.5 * math.erfc(1 / math.sqrt(2))),
        (0.0, -1.0, -0.2, 0.2 * 0.5 * math.erfc(1 / math.sqrt(2))),
        (0.0, -0.05, 0.1, 0.1 * 0.5 * math.erfc(0.5 / math.sqrt(2))),
        (1.5, -1.5, -1.5, 0.0),
    ],
)
def test_one_neuron_by_hand(bias: float, low: float, high: float, gap: float) -> None:
    for out in (1.0, -2.0):
        found, ends = substitution_change(neuron(bias, 5.0, out), interval(low, high)), sorted((0.0, out * gap))
        assert float(found.lower) == pytest.approx(ends[0], abs=1e-12) and float(found.lower) <= ends[0]
        assert float(found.upper) == pytest.approx(ends[1], abs=1e-12) and float(found.upper) >= ends[1]


def test_stopped_early_it_is_looser_and_sound() -> None:
    family = harden(mlp(), 3.0)
    box = boxes(family)
    early, late = substitution_change(family, box, stop=lambda: True), substitution_change(family, box)
    assert bool((early.lower <= late.lower).all()) and bool((late.upper <= early.upper).all())
    assert not torch.equal(early.upper, late.upper)


def test_bad_networks_and_numbers_prove_nothing() -> None:
    with pytest.raises(InputError, match="which λ they come from"):
        substitution_change(mlp(), boxes(mlp()))
    family = harden(mlp(), 2.0)
    box = boxes(family)
    box.upper[0, 2] = float("nan")
    found = substitution_change(family, box)
    assert not bool(found.lower[0].isfinite().any()) and not bool(found.upper[0].isfinite().any())
    assert bool(torch.isfinite(found.upper[1:]).all())


@pytest.mark.parametrize("name", ("mnist_mlp", "mnist_cnn", "cifar_cnn"))
def test_the_shipped_networks(name: str) -> None:
    """The change is bounded at the networks' final λ, around a point and over the whole domain."""
    lams = json.loads((SPECS / f"{name}.json").read_text())["epochs"][-1]["lam"]
    family = harden(read_onnx(SPECS / f"{name}.onnx"), lams)
    assert least_lambdas(family) == lams
    zero, one = (torch.full((1, family.input_size), end, dtype=torch.float64) for end in (0.0, 1.0))
    center = torch.rand(zero.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for box in (Interval(zero, one), Interval((center - 0.01).clamp(min=0), (center + 0.01).clamp(max=1))):
        found = substitution_change(family, box)
        assert_within(found, differences(family, points(box, count=12), smooth(family, count=1)))
        assert float((found.upper - found.lower).max()) < 10


def test_what_is_no_swap_is_refused() -> None:
    gelu = from_torch(nn.Sequential(nn.Linear(2, 3), nn.GELU(), nn.Linear(3, 3), nn.SiLU(), nn.Linear(3, 1)), (2,))
    others: dict[str, list[nn.Module]] = {
        "no activation was swapped": [nn.GELU(), nn.Linear(3, 3), nn.SiLU()],
        "takes the place of": [nn.ReLU(), nn.Linear(3, 3), nn.Mish()],
        "more of the network than activations": [nn.ReLU(), nn.Linear(3, 3)],
    }
    for said, parts in others.items():
        with pytest.raises(InputError, match=said):
            between(gelu, from_torch(nn.Sequential(nn.Linear(2, 3), *parts, nn.Linear(3, 1)), (2,)))


@pytest.mark.parametrize("front", [nn.LayerNorm(6), nn.ReLU()], ids=lambda module: type(module).__name__)
@pytest.mark.parametrize("behind", [nn.ReLU(), nn.Tanh(), nn.Softplus(), nn.LeakyReLU(0.125)], ids=str)
def test_the_change_holds_through_what_is_before_and_behind(front: nn.Module, behind: nn.Module) -> None:
    torch.manual_seed(1)
    gate = LambdaGELU(4.0)
    model = nn.Sequential(nn.Linear(3, 6), front, nn.Linear(6, 8), gate, nn.Linear(8, 6), behind, nn.Linear(6, 2))
    model = model.double().eval().requires_grad_(False)
    x = 3 * torch.rand(400, 3, dtype=torch.float64) - 1
    box = Interval(x.amin(0, keepdim=True), x.amax(0, keepdim=True))
    found = substitution_change(from_torch(model, (3,), exact=True), box)
    assert bool(found.lower.isfinite().all()) and bool(found.upper.isfinite().all())
    seen = substitute_relu(model)(x) - model(x)
    assert float(seen.abs().max()) > 0
    assert_within(found, seen[:, None])
