"""The graph network as a flat one: shapes, views and second definitions of maxima end here."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from verifiable_relu.errors import UnsupportedError
from verifiable_relu.ir.functions.function import Function
from verifiable_relu.ir.functions.hardened import Hardened
from verifiable_relu.ir.functions.kinked import Kinked
from verifiable_relu.ir.functions.smooth import Smooth
from verifiable_relu.ir.functions.steps import StepFunction
from verifiable_relu.ir.linear import Convolution, Dense, Diagonal, Gather, LinearMap, Sparse
from verifiable_relu.ir.network import (
    Affine,
    Elementwise,
    Input,
    Maximum,
    Network,
    Op,
    Pair,
    Product,
    Source,
    Sum,
    live,
)
from verifiable_relu.network import graph, nodes
from verifiable_relu.rounding import FEW


def flatten(network: graph.Network) -> Network:
    """Return the flat network that computes the same function, on samples in row-major order.

    Raises:
        UnsupportedError: if a node is of a kind that has no flat counterpart.
    """
    build = _Builder(network)
    for index in range(len(network.nodes)):
        build.add(index)
    ops, number = live(build.ops, build.at[len(network.nodes) - 1], build.pairs)
    pairs = tuple(Pair(*(number[i] for i in pair)) for pair in build.pairs if pair.second in number)
    source = Source(
        network.input_shape,
        network.output_shape,
        network.onnx,
        network.run,
        network.batched,
        network.ports,
        network.mended,
    )
    return Network(ops, source, network.name, network.arithmetic, pairs)


class _Builder:
    """The ops so far; ``at`` has the number of the op that has a node's value."""

    def __init__(self, network: graph.Network) -> None:
        self.nodes = network.nodes
        self.ops: list[Op] = []
        self.at: dict[int, int] = {}
        self.pairs: list[Pair] = []

    def put(self, op: Op) -> int:
        self.ops.append(op)
        return len(self.ops) - 1

    def map(self, name: str, source: int, of: LinearMap) -> int:
        """Add a map without a bias or an error."""
        return self.put(Affine(name=name, inputs=(source,), size=of.n_out, map=of))

    def add(self, index: int) -> None:
        """Add the ops of a node."""
        node = self.nodes[index]
        inputs, name, size = tuple(self.at[i] for i in node.inputs), node.name, node.size
        shapes = [self.nodes[i].shape for i in node.inputs]
        if isinstance(node, nodes.Input):
            found = self.put(Input(name=name, size=size))
        elif isinstance(node, nodes.Reshape | nodes.Identity):
            (found,) = inputs
        elif isinstance(node, nodes.Permute):
            order = torch.arange(size).reshape(shapes[0]).permute(node.axes).flatten()
            found = self.map(name, inputs[0], Gather(order, size))
        elif isinstance(node, nodes.Scale):
            found = self._scale(node, inputs[0])
        elif isinstance(node, nodes.Affine):
            found = self._affine(node, inputs[0], shapes[0])
        elif isinstance(node, nodes.Add):
            found = self.put(Sum(name=name, inputs=inputs, size=size))
        elif isinstance(node, nodes.Product):
            found = self.put(Product(name=name, inputs=inputs, size=size))
        elif isinstance(node, nodes.MatMul):
            found = self._matrix_product(node, *inputs)
        elif isinstance(node, nodes.Maximum):
            candidates = torch.where(node.candidates < 0, node.candidates[:1], node.candidates)
            found = self.put(Maximum(name=name, inputs=inputs[:1], size=size, candidates=candidates))
        elif isinstance(node, nodes.Extreme):
            found = self._extreme(node, *inputs[:2])
        elif isinstance(node, nodes.Beside):
            # The second function may have come before the difference.
            apart, first, second = inputs
            found = self.at[node.inputs[2]] = self.put(self.ops[second])
            self.pairs.append(Pair(first, apart, found))
        elif isinstance(node, nodes.Activation):
            found = self.put(Elementwise(name=name, inputs=inputs, size=size, function=_function(node)))
        else:
            raise UnsupportedError("there is no flat operation of this kind", place=node.place)
        self.at[index] = found

    def _affine(self, node: nodes.Affine, source: int, shape: nodes.Shape) -> int:
        size = self.ops[source].size
        made: LinearMap
        if isinstance(node, nodes.Linear):
            made = Dense(node.weight, node.size // len(node.weight))
        elif isinstance(node, nodes.Conv2d):
            channels, height, width = shape
            fields = (node.stride, node.padding, node.dilation, node.groups)
            made = Convolution(node.weight, (channels, height, width), *fields)
        elif isinstance(node, nodes.Sparse) and node.moves:
            made = Gather(torch.where(node.weight[:, 0] == 0, -1, node.index[:, 0]), size)
        elif isinstance(node, nodes.Sparse):
            made = Sparse(node.index, node.weight, size)
        else:
            raise UnsupportedError("there is no flat map of this kind", place=node.place)
        return self._with_bias(node, source, made, _full(node.offset(), node), node.weight_error, node.offset_terms)

    def _with_bias(
        self, node: nodes.Affine, source: int, of: LinearMap, bias: Tensor, error: float, terms: float | Tensor = 0.0
    ) -> int:
        """Add W·x + b of which the numbers are off by a part of themselves, and b by that part of ``terms``, too."""
        # A division changes its own constants nowhere, but where it is one that rounds.
        off = 0.0 if node.divisor is not None and not node.offset_terms else node.weight_error
        bias_error = FEW * off * (bias.double().abs() + terms) if off else None
        op = Affine(name=node.name, inputs=(source,), size=node.size, map=of, weight_error=error, bias_error=bias_error)
        return self.put(replace(op, bias=bias) if bool(bias.any()) else op)

    def _scale(self, node: nodes.Scale, source: int) -> int:
        center, scale, shift = (_full(t, node) for t in (node.center, node.scale, node.shift))
        error = node.weight_error
        if not error and bool((scale == 1).all()) and not (bool(center.any()) and bool(shift.any())):
            return self._with_bias(node, source, Diagonal(scale), shift - center, 0.0)
        if bool(center.any()):
            source = self._with_bias(node, source, Diagonal(torch.ones(node.size)), -center, 0.0)
        divisor = None if node.divisor is None else _full(node.divisor, node)
        # Where a runtime rounds, scale·x and scale·center are off by different numbers.
        apart = (scale.double() * center).abs() if node.offset_terms else 0.0
        return self._with_bias(node, source, Diagonal(scale, divisor), shift, error, node.offset_terms + apart)

    def _matrix_product(self, node: nodes.MatMul, x: int, z: int) -> int:
        """The products of all pairs, (…, n, k, m), and their sums."""
        *leading, n, m = node.shape
        left = torch.arange(self.ops[x].size).reshape(*leading, n, node.inner, 1)
        right = torch.arange(self.ops[z].size).reshape(*leading, 1, node.inner, m)
        shape = (*leading, n, node.inner, m)
        factors = [
            self.map(f"{node.name}/{side}", source, Gather(index.expand(shape).flatten(), self.ops[source].size))
            for side, source, index in (("left", x, left), ("right", z, right))
        ]
        products = self.put(Product(name=f"{node.name}/products", inputs=tuple(factors), size=math.prod(shape)))
        terms = torch.arange(math.prod(shape)).reshape(shape).transpose(-1, -2).reshape(-1, node.inner)
        return self.map(node.name, products, Sparse(terms, torch.ones(terms.shape), terms.numel()))

    def _extreme(self, node: nodes.Extreme, x: int, y: int) -> int:
        """max(x, y) of a concatenation, or −max(−x, −y)."""
        size, name = node.size, node.name
        sign = Diagonal(torch.full((size,), float(node.sign)))
        place, none = torch.arange(size), torch.full((size,), -1)
        parts = []
        for side, source, order in (("left", x, (place, none)), ("right", y, (none, place))):
            signed = source if node.sign > 0 else self.map(f"{name}/{side} negative", source, sign)
            parts.append(self.map(f"{name}/{side}", signed, Gather(torch.cat(order), size)))
        both = self.put(Sum(name=f"{name}/both", inputs=tuple(parts), size=2 * size))
        candidates = torch.stack([place, place + size])
        found = self.put(Maximum(name=name, inputs=(both,), size=size, candidates=candidates))
        return found if node.sign > 0 else self.map(f"{name}/negative", found, sign)


def _full(tensor: Tensor, node: nodes.Node) -> Tensor:
    return tensor.expand(node.shape).reshape(-1)


def _function(node: nodes.Activation) -> Function:
    if isinstance(node, nodes.Kinked):
        return Kinked(node.below if node.below.ndim == 0 else _full(node.below, node))
    if isinstance(node, nodes.Curve):
        return Smooth(node.function, float(node.parameter))
    if isinstance(node, nodes.Step):
        return StepFunction(node.function)
    if isinstance(node, nodes.Hardened):
        return Hardened(Smooth(node.function, float(node.lam)))
    raise UnsupportedError("there is no flat function of this kind", place=node.place)
