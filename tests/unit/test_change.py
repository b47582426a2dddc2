"""The bound of the change of outputs by the substitution of ReLU, against samples, ascents and results by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.support.draws import draws
from tests.support.families import (
    COUPLED,
    NETWORKS,
    Random,
    block,
    boxes,
    climb,
    function,
    gated,
    least,
    members,
    mlp,
    padded,
    points,
    residual,
    smooth,
    transformer,
)
from tests.support.hooks import Hook
from verifiable_relu.bounds import Bounds, substitution_change
from verifiable_relu.bounds.activations import image, slope_range
from verifiable_relu.errors import InputError
from verifiable_relu.ir.functions.curves import CHECKED
from verifiable_relu.network import from_torch, hardened, read_onnx
from verifiable_relu.network.build import Builder
from verifiable_relu.network.family import swapped
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import (
    FUNCTIONS,
    Gelu,
    Hardened,
    LeakyRelu,
    Linear,
    Relu,
    Sigmoid,
    Smooth,
    Sparse,
    Tanh,
)
from verifiable_relu.nn import LambdaGELU, substitute_relu

SPECS = Path(__file__).parents[2] / "specs"
DEEPEST = 0.16997120747990369
"""max t·Φ(−t), at t = 0.7517915…"""

BENDS = torch.tensor([-3.0, 0.0, 3.0], dtype=torch.float64)
"""Where slopes jump."""

networks = pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS.keys())


def differences(family: Network, x: Tensor, others: list[Network]) -> Tensor:
    """The differences of outputs (len(others)·len(x), batch, outputs) at points x, (…, batch, *shape)."""
    flat = x.flatten(0, 1)
    return torch.cat([(family.limit(flat) - other(flat)).unflatten(0, x.shape[:2]) for other in others])


def assert_within(found: Bounds, seen: Tensor) -> None:
    """Sampled differences lie within the bound, where it is a number, up to the float64 rounding of the two numbers."""
    assert not bool((found.lower > seen.amin(0) + 1e-12).any())
    assert not bool((seen.amax(0) - 1e-12 > found.upper).any())


def assert_holds(family: Network, box: Bounds) -> tuple[Tensor, Tensor]:
    """Check the bound at samples; returns the proven and the largest sampled change, (batch, outputs)."""
    found = substitution_change(family, box)
    seen = differences(family, points(box), members(family))
    exact = smooth(family)[0]
    for sign in (1, -1):
        towards = climb(box, lambda x, sign=sign: sign * (family.limit(x) - exact(x)).sum(1))
        seen = torch.cat([seen, differences(family, towards, smooth(family, count=1))])
    assert_within(found, seen)
    return torch.maximum(-found.lower, found.upper), seen.abs().amax(0)


@pytest.mark.combined
@pytest.mark.parametrize("make", [*NETWORKS.values(), *COUPLED.values()])
@pytest.mark.parametrize("lam", (1.0, 5.0, 20.0, 160.0))
def test_no_sampled_change_is_larger(make: Callable[..., Network], lam: float) -> None:
    for seed in range(draws(2)):
        family = hardened(make(seed), lam)
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
    family = hardened(block(), 5.0).to(torch.float64)
    box = boxes(family)
    found = substitution_change(family, box)
    last = next(node for node in reversed(family.nodes) if node.op == "Linear")
    assert isinstance(last, Linear)
    most = last.weight.clamp(min=0).sum(1) * DEEPEST / 5
    assert bool((found.upper <= most + 1e-9).all()) and bool((found.lower >= -last.weight.abs().sum(1)).all())


def test_a_network_without_a_change_has_none() -> None:
    """A λ-GELU that no output depends on changes nothing."""
    build = Builder((2,))
    eye = torch.eye(2, dtype=torch.float64)
    build.activation(build.linear(0, eye, None, "unused"), Relu, "act")
    nodes = (*build.nodes, *Builder((2,)).nodes[1:])
    family = hardened(Network((*nodes, replace(nodes[1], name="out", inputs=(0,)))), 2.0)
    found = substitution_change(family, boxes(family))
    assert not found.lower.any() and not found.upper.any()


def kinds() -> dict[str, Callable[[Builder, int], int]]:
    """What makes each activation that both networks may have, by name."""
    number = partial(torch.tensor, dtype=torch.float64)
    made: dict[str, Callable[[Builder, int], int]] = {
        "Sigmoid": lambda build, x: build.activation(x, Sigmoid, "behind"),
        "Tanh": lambda build, x: build.activation(x, Tanh, "behind"),
        **{
            f"LeakyRelu {slope}": lambda build, x, s=slope: build.activation(x, LeakyRelu, "behind", slope=number(s))
            for slope in (0.1, -0.5, 1.5)
        },
    }
    for name in FUNCTIONS:
        for parameter in {"ELU": (0.4, 1.0, 2.5), "Power": (1.5,), "Root": (0.7,)}.get(name, (1.0,)):
            made[f"{name} {parameter}"] = lambda build, x, n=name, p=parameter: build.append(
                Smooth(name="behind", inputs=(x,), shape=build.shape(x), function=n, parameter=number(p))
            )
    return made


@pytest.mark.parametrize("kind", kinds())
def test_slopes_over_an_interval_are_those_at_its_points(kind: str) -> None:
    build, rng = Builder((1,)), torch.Generator().manual_seed(0)
    kinds()[kind](build, 0)
    node = build.nodes[-1]
    # Ends on both sides of every bend, at bends, and far out; those of functions for positive numbers are moved there.
    ends = 6 * torch.rand(2, 200, generator=rng, dtype=torch.float64) - 3
    ends[:, 150:] = (3 * ends[:, 150:]).round()
    ends = ends[:, ends[0] != ends[1]]
    lower, upper = ends.amin(0), ends.amax(0)
    if kind.split()[0] in ("Log", "Reciprocal", "Sqrt", "InverseRoot", "Acosh", "Power", "Root"):
        lower, upper = lower + 10.5, upper + 10.5
    if kind.split()[0] in ("Asin", "Acos", "Atanh"):
        lower, upper = lower / 10, upper / 10
    found = slope_range(node, Bounds(lower[:, None], upper[:, None]))
    x = lower + torch.linspace(0, 1, 601, dtype=torch.float64)[:, None] * (upper - lower)
    # Where a function has a kink, torch's derivative is any number.
    x = torch.where(x.abs() < 1e-9, torch.where(upper > 0, 1e-9, -1e-9), x).requires_grad_()
    (slopes,) = torch.autograd.grad(node.forward(x).sum(), x)
    # torch's derivatives have absolute errors of a few roundoffs.
    least, most = slopes.amin(0) + 1e-13, slopes.amax(0) - 1e-13
    assert bool((found.lower[:, 0] <= least).all()) and bool((most <= found.upper[:, 0]).all())
    # No wider than the slopes at the points, but for what lies between these; at a bend there may be two slopes.
    near = 3e-2 * (1 + slopes.abs().amax(0))
    inside = (slopes.amin(0) - found.lower[:, 0] <= near) & (found.upper[:, 0] - slopes.amax(0) <= near)
    at_bend = (ends[:, :, None] - BENDS).abs().flatten(2).amin((0, 2)) < 0.05
    assert bool((inside | at_bend).all())


# A network with an error function has no family: it may be a part of a GELU.
@pytest.mark.parametrize("kind", [kind for kind in kinds() if not kind.startswith("Erf ")])
def test_no_sampled_change_is_larger_behind_any_activation(kind: str) -> None:
    rng, build = Random(0), Builder((3,))
    lam = torch.tensor(3.0, dtype=torch.float64)
    x = build.activation(build.linear(0, rng.normal(4, 3), rng.normal(4), "in"), Gelu, "act", lam=lam)
    x = kinds()[kind](build, build.linear(x, rng.normal(3, 4) / 3, rng.normal(3), "mid"))
    network = build.network(build.linear(x, rng.normal(2, 3), None, "out"), name="behind")
    assert_holds(hardened(network), boxes(network))


GATED = [name for name, known in FUNCTIONS.items() if known.gated]


@pytest.mark.parametrize("name", GATED)
def test_a_gate_rises_from_0_to_1_and_no_slower_than_its_mirror_image(name: str) -> None:
    """By another evaluation of the function than that of the nodes."""
    x = np.linspace(1e-3, 30, 100_001)
    left, right = (CHECKED[name].value(sign * x, 1.0) for sign in (-1, 1))
    gates = [-left[::-1] / x[::-1], right / x]
    assert (np.diff(np.concatenate(gates)) >= -1e-13).all() and gates[0][0] < 1e-9 and gates[1][-1] > 1 - 1e-9
    assert (x - right >= -1e-13).all() and (x - right <= -left + 1e-13).all()


@pytest.mark.combined
@pytest.mark.parametrize("name", GATED)
@pytest.mark.parametrize("other", [*GATED, "Relu", "Tanh"])
def test_no_sampled_change_is_larger_where_others_than_gelu_are_swapped(name: str, other: str) -> None:
    for seed in range(draws(3)):
        rng = Random(seed)
        weights = [(rng.normal(5, 3), rng.normal(5)), (rng.normal(5, 5), rng.normal(5)), (rng.normal(2, 5), None)]

        def made(first: str, second: str, lam: float = 1.0, weights: list[Any] = weights) -> Network:
            build = Builder((3,))
            x = 0
            for weight, name, at in zip(weights, (first, second, ""), ("in", "mid", "out"), strict=True):
                x = build.linear(x, *weight, at)
                if name in GATED:
                    x = build.scale(x, f"{at}/hard", scale=torch.tensor(lam, dtype=torch.float64))
                    x = function(build, x, name, f"{at}/act")
                    x = build.scale(x, f"{at}/soft", scale=torch.tensor(1 / lam, dtype=torch.float64))
                elif name:
                    x = build.activation(x, Relu if name == "Relu" else Tanh, f"{at}/act")
            return build.network(x, name="swapped")

        smooth, hard = made(name, other), made("Relu", "Relu" if other in GATED else other)
        family = swapped(smooth, hard)
        assert sum(isinstance(node, Hardened) for node in family.nodes) == 1 + (other in GATED)
        box = boxes(family)
        found, x = substitution_change(family, box), points(box)
        assert torch.equal(family.limit(x[0]), hard(x[0]))
        # Harder functions are between the two.
        assert_within(found, differences(family, x, [smooth, made(name, other, 2.0), made(name, other, 16.0)]))
        proven, seen = torch.maximum(-found.lower, found.upper), differences(family, x, [smooth]).abs().amax(0)
        assert float((seen / proven)[:3].max()) > 0.1


def test_what_is_no_swap_is_refused() -> None:
    gelu = from_torch(nn.Sequential(nn.Linear(2, 3), nn.GELU(), nn.Linear(3, 3), nn.SiLU(), nn.Linear(3, 1)), (2,))
    others: dict[str, list[nn.Module]] = {
        "no activation was swapped": [nn.GELU(), nn.Linear(3, 3), nn.SiLU()],
        "takes the place of": [nn.ReLU(), nn.Linear(3, 3), nn.Mish()],
        "more of the network than activations": [nn.ReLU(), nn.Linear(3, 3)],
    }
    for said, parts in others.items():
        with pytest.raises(InputError, match=said):
            swapped(gelu, from_torch(nn.Sequential(nn.Linear(2, 3), *parts, nn.Linear(3, 1)), (2,)))


DEFINED = {
    **dict.fromkeys(("Log", "Reciprocal", "Sqrt", "InverseRoot"), ((-1.0, 1.0), (2.0, 3.0))),
    **dict.fromkeys(("Asin", "Acos", "Atanh"), ((-1.0, 2.0), (0.6, 1.2))),
    "Acosh": ((-1.0, 2.0), (2.0, 3.0)),
}
"""Inputs from and to which half less is no argument, or one, of a function that is not defined everywhere."""


@pytest.mark.parametrize("name", DEFINED)
def test_nothing_is_known_behind_a_function_that_is_not_defined_everywhere(name: str) -> None:
    """Its slope at both ends of an interval in which it is not defined says nothing of those between."""
    build = Builder((1,))
    x = build.scale(build.activation(0, Relu, "act"), "shift", shift=torch.tensor(-0.5, dtype=torch.float64))
    family = hardened(build.network(function(build, x, name, "function"), name="partial"), 2.0)
    beyond, inside = DEFINED[name]
    found = substitution_change(family, interval(*beyond))
    assert not bool(torch.isfinite(found.lower).any()) and not bool(torch.isfinite(found.upper).any())
    defined = substitution_change(family, interval(*inside))
    assert bool(torch.isfinite(defined.lower).all()) and bool(torch.isfinite(defined.upper).all())


@networks
def test_every_layer_has_its_own_lambda(make: Callable[..., Network]) -> None:
    network = make(3)
    count = len(network.activations)
    soft_first = hardened(network, [2.0, *[50.0] * (count - 1)])
    soft_last = hardened(network, [*[50.0] * (count - 1), 2.0])
    for family in (soft_first, soft_last):
        assert_holds(family, boxes(family))


def neuron(weight: float, bias: float, lam: float, out: float = 1.0) -> Network:
    """The network y = out·f(weight·x + bias)."""
    build = Builder((1,))
    number = lambda value: torch.tensor([[value]], dtype=torch.float64)  # noqa: E731
    x = build.activation(build.linear(0, number(weight), number(bias)[0], "in"), Relu, "act")
    return hardened(build.network(build.linear(x, number(out), torch.ones(1).double(), "out"), name="one"), lam)


def interval(lower: float, upper: float) -> Bounds:
    return Bounds(torch.tensor([[lower]], dtype=torch.float64), torch.tensor([[upper]], dtype=torch.float64))


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
        found = substitution_change(neuron(1.0, bias, 5.0, out), interval(low, high))
        ends = sorted((0.0, out * gap))
        assert float(found.lower) == pytest.approx(ends[0], abs=1e-12)
        assert float(found.upper) == pytest.approx(ends[1], abs=1e-12)
        assert float(found.lower) <= ends[0] and ends[1] <= float(found.upper)


def test_stopped_early_it_is_looser_and_sound() -> None:
    family = hardened(mlp(), 3.0)
    box = boxes(family)
    early, late = substitution_change(family, box, stop=lambda: True), substitution_change(family, box)
    assert bool((early.lower <= late.lower).all()) and bool((late.upper <= early.upper).all())
    assert not torch.equal(early.upper, late.upper)


def test_bad_networks_are_refused() -> None:
    with pytest.raises(InputError, match="which λ they come from"):
        substitution_change(mlp(), boxes(mlp()))


def test_nan_proves_nothing() -> None:
    family = hardened(mlp(), 2.0)
    box = boxes(family)
    box.upper[0, 2] = float("nan")
    found = substitution_change(family, box)
    assert bool(torch.isnan(found.lower[0]).all()) and bool(torch.isnan(found.upper[0]).all())
    assert bool(torch.isfinite(found.upper[1:]).all())


@pytest.mark.parametrize("name", ("mnist_mlp", "mnist_cnn", "cifar_cnn"))
def test_the_shipped_networks(name: str) -> None:
    """The change is bounded at the networks' final λ, around a point and over the whole domain."""
    lams = json.loads((SPECS / f"{name}.json").read_text())["epochs"][-1]["lam"]
    family = hardened(read_onnx(SPECS / f"{name}.onnx"), lams).to(torch.float64)
    assert least(family) == lams
    zero, one = torch.zeros(1, *family.input_shape).double(), torch.ones(1, *family.input_shape).double()
    center = torch.rand(zero.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for box in (Bounds(zero, one), Bounds((center - 0.01).clamp(min=0), (center + 0.01).clamp(max=1))):
        found = substitution_change(family, box)
        seen = differences(family, points(box, count=12), smooth(family, count=1))
        assert_within(found, seen)
        assert float((found.upper - found.lower).max()) < 10


def _gap_at_the_ends(right: Any, node: Hardened, pre: Bounds) -> Tensor:
    ends = (-image(node, Bounds(-end.abs(), -end.abs())).lower for end in (pre.lower, pre.upper))
    return torch.maximum(*ends)


def _constants_stay(right: Any, differences: Any, index: int, node: Sparse, sources: list[int | None]) -> int | None:
    place: int | None = right(differences, index, node, sources)
    if place is not None:
        differences.nodes[place] = replace(differences.nodes[place], bias=node.bias)
    return place


def _middle_of_factors(right: Any, relaxation: Any, index: int) -> Bounds:
    found: Bounds = right(relaxation, index)
    if type(relaxation.network.nodes[index]).__name__ != "Identity":
        return found
    centre = (found.lower + found.upper) / 2
    return Bounds(centre, centre)


def _first_gap_alone(right: Any, node: Hardened, pre: Bounds) -> Tensor:
    found: Tensor = right(node, pre)
    return found if node.name in ("act0", "act1") else 0 * found


FAULTS: dict[str, tuple[Hook, tuple[Callable[[int], Network], ...]]] = {
    "first gap alone": (Hook("bounds.beside:gap", _first_gap_alone), (mlp, residual)),
    "gap at the ends": (Hook("bounds.beside:gap", _gap_at_the_ends), (mlp, residual)),
    "bounds of pre-activations of ReLU": (
        Hook("bounds.crown:preactivation_bounds", lambda right, f, box, **options: right(f.limit, box, **options)),
        (mlp, residual),
    ),
    "constants stay": (Hook("bounds.change:MAKERS", _constants_stay, Sparse), (padded, gated)),
    "slope at one end": (
        Hook("bounds.activations:slope_range", lambda right, node, pre: right(node, Bounds(pre.lower, pre.lower))),
        (padded, gated),
    ),
    "factors in the middle of their bounds": (
        Hook("bounds.relaxation:Relaxation.bounds", _middle_of_factors),
        (padded, gated),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_seen(name: str) -> None:
    hook, makes = FAULTS[name]
    with hook.applied(), pytest.raises(AssertionError):
        assert_holds(neuron(1.0, 0.0, 5.0), interval(-1, 1))
        for seed in range(6):
            for make in makes:
                family = hardened(make(seed), 1.0)
                assert_holds(family, boxes(family))


@pytest.mark.parametrize("parts", ["normalised before", "relu before and behind"])
def test_relus_beside_gates_stay_and_the_change_holds_through_them(parts: str) -> None:
    torch.manual_seed(1)
    gate = LambdaGELU(4.0)
    front: list[nn.Module] = [nn.LayerNorm(6)] if parts == "normalised before" else [nn.ReLU()]
    model = nn.Sequential(nn.Linear(3, 6), *front, nn.Linear(6, 8), gate, nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))
    model = model.double().eval().requires_grad_(False)
    network = from_torch(model, (3,)).to(torch.float64)
    family = hardened(network)
    assert sum(isinstance(node, Hardened) for node in family.nodes) == 1
    assert any(isinstance(node, Relu) for node in family.nodes)
    x = 3 * torch.rand(400, 3, dtype=torch.float64) - 1
    found = substitution_change(network, Bounds(x.amin(0, keepdim=True), x.amax(0, keepdim=True)))
    assert bool(found.lower.isfinite().all()) and bool(found.upper.isfinite().all())
    seen = substitute_relu(model)(x) - model(x)
    assert float(seen.abs().max()) > 0
    assert_within(found, seen[:, None])
