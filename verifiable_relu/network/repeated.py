"""A network without repeated neurons that computes the same function, in real arithmetic on the stored weights.

Networks that are written by a program often compute one value many times: a lattice of maxima compares the same two
linear functions in many of its groups. Where two neurons of a layer have the same weights and biases, one of them is
left out, and the columns that multiply them in the next layer are added; dense layers that follow each other become
one. Either is done only where the sums are exact, so that no bit of the function changes. A network with other
operators than dense layers and ReLUs stays as it is.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import torch
from torch import Tensor

from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Linear, Node, Relu
from verifiable_relu.rounding import COMMON_STEP

_PRODUCTS = 200_000
"""The most products of numbers that are checked in rational arithmetic for one pair of layers."""


def without_repeated(network: Network) -> Network:
    """The network without repeated neurons; the network itself where there is none, or where it has other operators.

    The result is in float64 and has no ONNX file: its neurons are not those of the file. Cached.
    """
    return network.once("without repeated neurons", lambda: _smaller(network) or network)


def _smaller(network: Network) -> Network | None:
    """The smaller network, or None."""
    chain = network.nodes[1:]
    plain = all(
        type(node) in (Linear, Relu) and node.inputs == (i,) and len(node.shape) == 1 for i, node in enumerate(chain)
    )
    if not plain or len(network.input_shape) != 1 or any(_unsure(node) for node in chain):
        return None
    nodes: list[Node] = [network.nodes[0]]
    # The outputs keep their number and order: no dense layer follows whose columns could be added or sorted.
    last = max((index for index, node in enumerate(chain, start=1) if isinstance(node, Linear)), default=0)
    # For each neuron of the network its number in the last of the nodes.
    place = torch.arange(network.input_size)
    for index, node in enumerate(chain, start=1):
        if isinstance(node, Relu):
            nodes.append(replace(node, inputs=(len(nodes) - 1,), shape=nodes[-1].shape))
            continue
        assert isinstance(node, Linear)
        merged = merged_columns(node.weight.detach().double(), place, nodes[-1].size)
        if merged is None:
            return None
        weight, bias = merged, node.bias.detach().double()
        place = torch.arange(len(bias))
        if index < last:
            rows, place = torch.unique(torch.cat([weight, bias[:, None]], 1), dim=0, return_inverse=True)
            weight, bias = rows[:, :-1].contiguous(), rows[:, -1].contiguous()
        before = nodes[-1]
        if isinstance(before, Linear):
            one = one_layer(weight, bias, before)
            if one is not None:
                nodes.pop()
                weight, bias = one
        made = replace(node, inputs=(len(nodes) - 1,), shape=(len(bias),), weight=weight, bias=bias)
        nodes.append(made)
    if sum(node.size for node in nodes) >= sum(node.size for node in network.nodes):
        return None
    return Network(tuple(nodes), name=network.name, batched=network.batched)


def _unsure(node: Node) -> bool:
    """Whether weights are known up to an error only, or a gradient is wanted."""
    return isinstance(node, Linear) and bool(node.weight_error or node.weight.requires_grad or node.bias.requires_grad)


def merged_columns(weight: Tensor, place: Tensor, size: int) -> Tensor | None:
    """The weights with the columns of repeated neurons added, (rows, size); None where that may not be exact."""
    if size == len(place):
        # Neurons are sorted all the same.
        merged = torch.empty_like(weight)
        merged[:, place] = weight
        return merged
    units = weight[weight != 0] / COMMON_STEP
    if not bool((units == units.round()).all()) or float(weight.abs().sum(1).amax()) >= COMMON_STEP * 2.0**52:
        return None
    return weight.new_zeros(len(weight), size).index_add_(1, place, weight)


def one_layer(weight: Tensor, bias: Tensor, first: Linear) -> tuple[Tensor, Tensor] | None:
    """Weight and bias of two dense layers as one, where that is exact and no larger; else None."""
    inputs = first.weight.shape[1]
    if len(bias) * inputs > weight.numel() + first.weight.numel():
        return None
    if int(weight.count_nonzero()) * (inputs + 1) > _PRODUCTS:
        return None
    before = torch.cat([first.weight, first.bias[:, None]], 1)
    product = weight @ before
    product[:, -1] += bias
    if not bool(product.isfinite().all()):
        return None
    numbers = [[Fraction(v) for v in row] for row in before.tolist()]
    for row, own, found in zip(weight, bias.tolist(), product.tolist(), strict=True):
        terms = [(Fraction(float(row[k])), numbers[k]) for k in row.nonzero().flatten().tolist()]
        for column, value in enumerate(found):
            exact = sum((factor * line[column] for factor, line in terms), Fraction(own if column == inputs else 0))
            if exact != Fraction(value):
                return None
    return product[:, :-1].contiguous(), product[:, -1].contiguous()
