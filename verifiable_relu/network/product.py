"""Several networks as one: inputs that may be shared, and all outputs after one another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from verifiable_relu.errors import InputError
from verifiable_relu.network.build import Builder
from verifiable_relu.network.graph import Network


@dataclass(frozen=True)
class Part:
    """A network of a product.

    Attributes:
        label: put before the names of the network's nodes.
        network: the network.
        inputs: for each element of the network's input, in row-major order, the product's input that it is.
    """

    label: str
    network: Network
    inputs: Sequence[int]


def product(parts: Sequence[Part], size: int, passed: bool = False) -> Network:
    """The network that computes several networks at once, on inputs (size,).

    Its outputs are those of the parts, one after the other, each in row-major order, and with ``passed`` its own inputs
    after them. What is added to the parts are matrices of zeros and ones, so that nothing is rounded.

    Raises:
        InputError: if ``inputs`` do not fit.
    """
    build = Builder((size,))
    total = sum(part.network.output_size for part in parts) + size * passed
    summands, start = [], 0
    for part in parts:
        if len(part.inputs) != part.network.input_size:
            raise InputError(f"{len(part.inputs)} inputs for the network '{part.network.name}'")
        at = 0
        if list(part.inputs) != list(range(size)):
            at = build.linear(0, _ones(range(len(part.inputs)), part.inputs, len(part.inputs), size), None, "inputs")
        at = build.reshape(at, part.network.input_shape, f"{part.label}/input")
        places = {0: at}
        for index, node in enumerate(part.network.nodes[1:], 1):
            moved = replace(node, name=f"{part.label}/{node.name}", inputs=tuple(places[i] for i in node.inputs))
            places[index] = build.append(moved)
        count = part.network.output_size
        flat = build.reshape(places[len(part.network.nodes) - 1], (count,), f"{part.label}/output")
        matrix = _ones(range(start, start + count), range(count), total, count)
        summands.append(build.linear(flat, matrix, None, f"{part.label}/placed"))
        start += count
    if passed:
        summands.append(build.linear(0, _ones(range(start, total), range(size), total, size), None, "passed"))
    output, *others = summands
    for other in others:
        output = build.add(output, other, "joined")
    return build.network(output, name=" and ".join(part.label for part in parts))


def _ones(rows: Sequence[int], columns: Sequence[int], height: int, width: int) -> Tensor:
    """The matrix with ones at (rows, columns) and zeros elsewhere, which every precision holds."""
    matrix = torch.zeros(height, width)
    matrix[list(rows), list(columns)] = 1
    return matrix
