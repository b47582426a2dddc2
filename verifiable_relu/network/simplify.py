"""What stands before an activation, and networks without the neurons that a program has written several times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import torch
from torch import Tensor

from verifiable_relu.network.graph import Network, whole
from verifiable_relu.network.nodes import (
    Gelu,
    Identity,
    Linear,
    Node,
    Permute,
    Relu,
    Reshape,
    Scale,
    Sparse,
)
from verifiable_relu.rounding import COMMON_STEP

Graph = tuple[list[Node], int]
"""Nodes in topological order, the input first, and the index of the output."""


def needed(nodes: Sequence[Node], output: int) -> list[int]:
    """The nodes that the output depends on, itself and the input included, in order."""
    found = {0}
    pending = [output]
    while pending:
        index = pending.pop()
        if index not in found:
            found.add(index)
            pending += nodes[index].inputs
    return sorted(found)


def live(nodes: Sequence[Node], output: int) -> Graph:
    """The input and the nodes that the output needs."""
    position = {old: new for new, old in enumerate(needed(nodes, output))}
    kept = [replace(nodes[old], inputs=tuple(position[i] for i in nodes[old].inputs)) for old in position]
    return kept, position[output]


def _is(part: Tensor, number: float) -> bool:
    return bool((part == number).all())


@dataclass(frozen=True)
class Argument:
    """The argument of an activation as factor·x, x being what is before all factors.

    Attributes:
        base: the node that x is made of by ``nodes`` alone, the first one last.
        nodes: those between that are no factors.
        factor: the product of the numbers of all Scales between that multiply or divide by one number.
        error: relative, of ``factor``.
        vague: the name of what stands before x and multiplies, too: by several numbers, or numbers of which some are
            chosen, or of another GELU; or nothing.
    """

    base: int
    nodes: tuple[Node, ...] = ()
    factor: Fraction = Fraction(1)
    error: Fraction = Fraction(0)
    vague: str = ""


def argument(nodes: Sequence[Node], index: int) -> Argument:
    """Trace a node's value back to what is before all factors: λ of a GELU is about that, here and nowhere else.

    Reshape and Permute may stand between, and in (x − c)·s, s is a factor of x − c. What a Scale makes of whole
    numbers, such as a quantised network's, is no multiple of them, and a batch normalisation of several channels is a
    layer as others are.
    """
    found, passed, chosen = Argument(index), list[Node](), False
    counted = whole(nodes[:index])
    while True:
        node = nodes[index]
        if isinstance(node, Gelu):
            return replace(found, vague=node.name)
        if isinstance(node, Sparse) and node.moves:
            chosen = True
        elif isinstance(node, Reshape | Permute | Identity):
            passed.append(node)
        elif not isinstance(node, Scale) or not _is(node.shift, 0) or node.inputs[0] in counted:
            return found
        elif not _is(node.scale, 1):
            if node.scale.numel() > 1 or chosen or not bool(torch.isfinite(node.scale).all()):
                normalised = bool(node.weight_error) and node.divisor is None and not chosen
                return found if normalised else replace(found, vague=node.name)
            number, off = _number(node)
            if not _is(node.center, 0):
                passed.append(replace(node, scale=torch.ones_like(node.scale), weight_error=0.0, divisor=None))
            error = (1 + found.error) * (1 + off) - 1
            found = Argument(node.inputs[0], tuple(passed), found.factor * number, error)
        if isinstance(node, Scale) and not _is(node.center, 0):
            return found
        (index,) = node.inputs


def _number(node: Scale) -> tuple[Fraction, Fraction]:
    """The one number that a Scale multiplies by, of a division the exact quotient, and its relative error."""
    if node.divisor is not None:
        return 1 / Fraction(float(node.divisor)), Fraction(0)
    return Fraction(float(node.scale)), Fraction(node.weight_error)


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
