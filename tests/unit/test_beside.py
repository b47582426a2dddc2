"""Bounds of two networks beside each other: against samples, against exact values, and against each by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.support.draws import draws
from tests.support.families import NETWORKS, Random, boxes, members, points
from verifiable_relu.bounds import Bounds, crown_relaxation
from verifiable_relu.bounds import beside as aside
from verifiable_relu.bounds.crown import Ascent, ascend
from verifiable_relu.bounds.tuning import Lines
from verifiable_relu.bounds.zonotope import Zonotopes, takes
from verifiable_relu.network import hardened
from verifiable_relu.network import product as products
from verifiable_relu.network.build import Builder
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Beside, Gelu, LeakyRelu, Linear, Relu, Sigmoid, curve
from verifiable_relu.network.product import NetworkPart, product

CHANGES = {"none": 0.0, "rounded": 1e-3, "tuned": 0.05, "another": 1.0}


def changed(network: Network, share: float, seed: int = 1) -> Network:
    """The network with weights that are off by about this share of themselves."""
    rng = torch.Generator().manual_seed(seed)
    moved = lambda t: t * (1 + share * torch.randn(t.shape, generator=rng, dtype=torch.float64).to(t.dtype))  # noqa: E731
    return replace(network, nodes=tuple(node.map_tensors(moved) for node in network.nodes), onnx=None, run=None)


def with_gates(network: Network, kind: str) -> Network:
    """The network with other activations."""
    number = torch.tensor(3.0, dtype=torch.float64)
    nodes = list(network.nodes)
    for index in network.activations:
        node = nodes[index]
        fields = {"name": node.name, "inputs": node.inputs, "shape": node.shape}
        nodes[index] = {
            "relu": lambda f=fields: Relu(**f),
            "gelu": lambda f=fields: Gelu(**f, lam=number),
            "leaky": lambda f=fields: LeakyRelu(**f, slope=number / 30),
            "sigmoid": lambda f=fields: Sigmoid(**f),
            "silu": lambda f=fields: curve("SiLU", **f),
        }[kind]()
    return replace(network, nodes=tuple(nodes), onnx=None, run=None)


def beside(f: Network, g: Network) -> tuple[Network, Tensor]:
    """Both at the same inputs, and rows that are the differences of outputs and their negatives."""
    size = f.input_size
    both = product([NetworkPart("f", f, range(size)), NetworkPart("g", g, range(size))], size).to(torch.float64)
    one = torch.eye(f.output_size, dtype=torch.float64)
    rows = torch.cat([-one, one], 1)
    return both, torch.cat([rows, -rows])


def plain(monkeypatch: pytest.MonkeyPatch, f: Network, g: Network) -> Network:
    """Both at the same inputs, of which nothing is known but each by itself."""
    with monkeypatch.context() as patch:
        patch.setattr(products, "isomorphic", lambda first, second: False)
        return beside(f, g)[0]


def flat(box: Bounds) -> Bounds:
    return Bounds(box.lower.flatten(1), box.upper.flatten(1))


def crown(network: Network, box: Bounds, rows: Tensor) -> Tensor:
    """(batch, rows) lower bounds."""
    samples = len(box.lower)
    return crown_relaxation(network, box).outputs(rows.repeat(samples, 1)).unflatten(0, (samples, -1))


@pytest.mark.combined
@pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS.keys())
@pytest.mark.parametrize("share", CHANGES.values(), ids=CHANGES.keys())
def test_no_sampled_difference_is_larger(
    make: Callable[..., Network], share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(draws(1)):
        f = make(seed).to(torch.float64)
        box = boxes(f)
        for first, second in (
            ("relu", "relu"),
            ("gelu", "relu"),
            ("silu", "silu"),
        ):
            mine = with_gates(f, first), with_gates(changed(f, share), second)
            both, rows = beside(*mine)
            assert any(isinstance(node, Beside) for node in both.nodes)
            found = crown(both, flat(box), rows)
            x = points(box).flatten(2)
            seen = (both(x.flatten(0, 1)) @ rows.T).unflatten(0, x.shape[:2])
            torch.testing.assert_close(
                seen[..., : f.output_size].flatten(0, 1),
                mine[1](x.reshape(-1, *f.input_shape)).flatten(1) - mine[0](x.reshape(-1, *f.input_shape)).flatten(1),
            )
            assert bool((found <= seen.amin(0) + 1e-12).all())
            apart = crown(plain(monkeypatch, *mine), flat(box), rows)
            assert float((-found).sum()) <= 1.1 * float((-apart).sum()) + 1e-9


@pytest.mark.parametrize("kind", ("mlp", "residual"))
def test_what_is_equal_cancels(kind: str) -> None:
    """Equal networks do not differ, but for rounding; a small change counts as it is, not as the box is wide."""
    f = NETWORKS[kind](2).to(torch.float64)
    for share, most in ((0.0, 1e-8), (1e-6, 1e-3)):
        both, rows = beside(f, changed(f, share))
        assert float(-crown(both, flat(boxes(f)), rows).min()) < most


def test_every_member_of_a_family_is_meant() -> None:
    family = hardened(NETWORKS["mlp"](0), 5.0).to(torch.float64)
    both, rows = beside(family, family.limit)
    found = crown(both, flat(boxes(family)), rows)
    x = points(boxes(family)).flatten(2)
    for other in members(family):
        difference = (family.limit(x.flatten(0, 1)) - other(x.flatten(0, 1))).unflatten(0, x.shape[:2])
        assert bool((found <= torch.cat([difference, -difference], 2).amin(0) + 1e-12).all())


@pytest.mark.parametrize("share", CHANGES.values(), ids=CHANGES.keys())
def test_zonotopes_and_searched_slopes_hold(share: float) -> None:
    for seed in range(draws(2)):
        f = NETWORKS["mlp"](seed).to(torch.float64)
        both, rows = beside(f, changed(f, share))
        box = flat(boxes(f))
        x = points(box)
        seen = (both(x.flatten(0, 1)) @ rows.T).unflatten(0, x.shape[:2]).amin(0)
        samples, matrix = len(box.lower), rows.repeat(len(box.lower), 1)
        sample = torch.arange(samples).repeat_interleave(len(rows))
        assert takes(both)
        forms = Zonotopes(both, box)
        first = forms.lower(matrix, sample)[0].unflatten(0, (samples, -1))
        relaxation = crown_relaxation(both, box, known=forms.pre, crown=False)
        second = relaxation.outputs(matrix).unflatten(0, (samples, -1))
        third = ascend(relaxation, len(both.nodes) - 1, matrix, sample, Ascent(steps=5)).lower.unflatten(
            0, second.shape
        )
        for found in (first, second, third):
            assert bool((found <= seen + 1e-12).all())
        assert bool((third >= second - 1e-9).all())
        # Few symbols are looser and as sound.
        few = Zonotopes(both, box, 2).lower(matrix, sample)[0].unflatten(0, (samples, -1))
        assert bool((few <= seen + 1e-12).all())


Layers = list[tuple[list[list[Fraction]], list[Fraction]]]
"""Weights and biases of dense layers with ReLUs between them."""


def layers_of(network: Network) -> Layers:
    return [
        ([[Fraction(w) for w in row] for row in node.weight.tolist()], [Fraction(b) for b in node.bias.tolist()])
        for node in network.nodes
        if isinstance(node, Linear)
    ]


def exactly(layers: Layers, x: Fraction) -> list[Fraction]:
    """The value of the last layer at an input."""
    values = [x]
    for number, (weight, bias) in enumerate(layers):
        values = values if number == 0 else [max(v, Fraction(0)) for v in values]
        values = [
            sum((w * v for w, v in zip(row, values, strict=True)), b) for row, b in zip(weight, bias, strict=True)
        ]
    return values


def kinks(layers: Layers, cuts: list[Fraction]) -> list[Fraction]:
    """The inputs between the first and the last of ``cuts`` where the network may not be linear, and ``cuts``."""
    for count in range(1, len(layers)):
        more = set(cuts)
        for left, right in pairwise(cuts):
            pairs = zip(exactly(layers[:count], left), exactly(layers[:count], right), strict=True)
            more.update(left + (right - left) * a / (a - b) for a, b in pairs if a * b < 0)
        cuts = sorted(more)
    return cuts


@pytest.mark.parametrize("share", (0.01, 0.3))
def test_exact_differences_of_networks_of_one_input(share: float) -> None:
    """The difference of piecewise-linear functions is extreme at a kink of either, in rational numbers."""
    for seed in range(draws(4)):
        rng, build, x = Random(seed), Builder((1,)), 0
        for number, (inputs, outputs) in enumerate(((1, 4), (4, 4), (4, 2))):
            x = build.linear(x, rng.normal(outputs, inputs), rng.normal(outputs), f"layer {number}")
            x = build.activation(x, Relu, f"act {number}") if outputs == 4 else x
        f = build.network(x, name="f").to(torch.float64)
        g = changed(f, share, seed)
        both, rows = beside(f, g)
        for end in (0.25, 2.0):
            box = Bounds(torch.tensor([[-end]], dtype=torch.float64), torch.tensor([[end]], dtype=torch.float64))
            # Between two of these both networks are linear.
            cuts = kinks(layers_of(g), kinks(layers_of(f), [Fraction(-end), Fraction(end)]))
            pairs = [zip(exactly(layers_of(f), x), exactly(layers_of(g), x), strict=True) for x in cuts]
            differences = [[v - u for u, v in pair] for pair in pairs]
            least = [min(sign * d[k] for d in differences) for sign in (1, -1) for k in range(2)]
            sample = torch.zeros(4, dtype=torch.long)
            for found in (crown(both, box, rows)[0], Zonotopes(both, box).lower(rows, sample)[0]):
                assert all(Fraction(value) <= exact for value, exact in zip(found.tolist(), least, strict=True))
                assert float(-found.sum()) < 60 * float(-sum(least)) + 1e-9


def assert_holds(seed: int, share: float) -> None:
    f = NETWORKS["mlp"](seed).to(torch.float64)
    both, rows = beside(with_gates(f, "gelu"), changed(f, share))
    x = points(boxes(f)).flatten(2)
    seen = (both(x.flatten(0, 1)) @ rows.T).unflatten(0, x.shape[:2]).amin(0)
    assert bool((crown(both, flat(boxes(f)), rows) <= seen + 1e-12).all())


def _gap_of_one(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(aside, "gap", lambda node, pre: torch.zeros_like(pre.lower))


def _no_difference_comes_in(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(aside.Secants, "moved", lambda self, d: Bounds(0 * d, 0 * d))


def _nothing_above(patch: pytest.MonkeyPatch) -> None:
    """A fault: the upper line is the lower one."""
    whole = aside.Secants.lines

    def lines(self: aside.Secants, d: Bounds) -> Lines:
        found = whole(self, d)
        return Lines(found.lower_slope, found.lower_offset, found.lower_slope, found.lower_offset)

    patch.setattr(aside.Secants, "lines", lines)


@pytest.mark.parametrize("fault", (_gap_of_one, _no_difference_comes_in, _nothing_above))
def test_faults_are_seen(fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        for seed in range(3):
            for share in (1e-3, 0.05):
                assert_holds(seed, share)
