"""Merging repeated neurons changes no bit of a network's function, and is left alone where it might."""

from __future__ import annotations

import itertools
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support import nets
from tests.support.exact import exact_values
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Linear, Relu
from verifiable_relu.network.simplify import without_repeated


def lattice(rng: np.random.Generator, functions: int = 4, groups: int = 6) -> Network:
    """The maxima of overlapping groups of four affine functions of two inputs, each maximum written by four ReLUs."""
    chain = nets.Chain((2,))
    slopes, values = (torch.from_numpy(rng.normal(size=size)) for size in ((functions, 2), functions))
    chain.linear(slopes, values)
    members = [list(rng.choice(functions, 4, replace=False)) for _ in range(groups)]
    chosen = torch.zeros(4 * groups, functions)
    chosen[torch.arange(4 * groups), torch.tensor(list(itertools.chain(*members)))] = 1
    chain.linear(chosen, torch.zeros(4 * groups))
    for width in (4 * groups, 2 * groups):
        pairs = torch.eye(width // 2)
        four = torch.tensor([[1.0, -1.0], [-1.0, 1.0], [1.0, 1.0], [-1.0, -1.0]])
        chain.linear(torch.kron(pairs, four), torch.zeros(2 * width))
        chain.add(Relu, (2 * width,))
        chain.linear(torch.kron(pairs, torch.tensor([[0.5, 0.5, 0.5, -0.5]])), torch.zeros(width // 2))
    return chain.network("lattice")


def points(network: Network, rng: np.random.Generator, count: int = 4) -> list[list[Fraction]]:
    return [[Fraction(v) for v in rng.normal(size=network.input_size)] for _ in range(count)]


def outputs(network: Network, point: list[Fraction]) -> list[Fraction]:
    return list(exact_values(network, point)[len(network.nodes) - 1].flatten())


def repeated(network: Network, factor: float) -> Network:
    """A fully connected network with every hidden neuron twice; what multiplies the second is smaller by a factor."""
    nodes, before = list(network.nodes), False
    for index, node in enumerate(nodes):
        if isinstance(node, Linear):
            halves: list[Tensor] = [node.weight, node.weight.double() * factor] if before else [node.weight]
            before = index < network.last_activation
            times = 2 if before else 1
            weight, bias = torch.cat(halves, 1).repeat(times, 1), node.bias.repeat(times)
            nodes[index] = replace(node, weight=weight, bias=bias, shape=(len(bias),))
        elif index:
            nodes[index] = replace(node, shape=nodes[node.inputs[0]].shape)
    return Network(tuple(nodes))


def test_a_lattice_keeps_its_function_with_fewer_neurons() -> None:
    for seed in range(3):
        rng = np.random.default_rng(seed)
        network = lattice(rng)
        smaller = without_repeated(network)
        assert sum(node.size for node in smaller.nodes) < 0.8 * sum(node.size for node in network.nodes)
        for point in points(network, rng):
            assert outputs(smaller, point) == outputs(network, point)


def test_columns_are_not_added_where_the_sums_are_rounded() -> None:
    rng = np.random.default_rng(0)
    network = repeated(nets.mlp(rng, nets.gaussian(rng)), 2.0**-40)
    smaller = without_repeated(network)
    for point in points(network, rng):
        assert outputs(smaller, point) == outputs(network, point)
    assert smaller is network


def test_repeated_neurons_with_dyadic_weights_are_merged() -> None:
    rng = np.random.default_rng(1)
    network = repeated(nets.mlp(rng, nets.gaussian(rng)), 0.5)
    nodes = [
        replace(node, weight=(node.weight * 64).round() / 64) if isinstance(node, Linear) else node
        for node in network.nodes
    ]
    dyadic = Network(tuple(nodes))
    smaller = without_repeated(dyadic)
    assert sum(node.size for node in smaller.nodes) < sum(node.size for node in dyadic.nodes)
    for point in points(dyadic, rng):
        assert outputs(smaller, point) == outputs(dyadic, point)


@pytest.mark.parametrize("widths", [(2, 3, 2, 2), (2, 3, 2)])
def test_outputs_keep_their_number_and_order_where_a_relu_comes_last(widths: tuple[int, ...]) -> None:
    for seed in range(8):
        rng = np.random.default_rng(seed)
        network = repeated(nets.mlp(rng, nets.eighths(rng), widths=widths), 0.5)
        last = network.nodes[-1]
        assert isinstance(last, Linear)
        # The first output is there twice, and rows are in no order.
        twice = replace(last, weight=last.weight[[1, 0, 1]], bias=last.bias[[1, 0, 1]], shape=(3,))
        ends = Relu(name="last", inputs=(len(network.nodes) - 1,), shape=(3,))
        network = Network((*network.nodes[:-1], twice, ends))
        smaller = without_repeated(network)
        assert smaller is not network
        for point in points(network, rng):
            assert outputs(smaller, point) == outputs(network, point)


def test_weights_that_are_not_known_exactly_are_not_merged() -> None:
    network = lattice(np.random.default_rng(0))
    loose = tuple(replace(node, weight_error=1e-9) if isinstance(node, Linear) else node for node in network.nodes)
    unsure = Network(loose)
    assert without_repeated(unsure) is unsure
