"""Today's nodes for the ops of a flat network: shapes, transpositions and matrix products are recognised.

Goes away with the last user of ``network.graph``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verifiable_relu import ir
from verifiable_relu.ir import linear as maps
from verifiable_relu.ir.functions import Kinked, StepFunction
from verifiable_relu.ir.network import Affine, Elementwise, Op, Product, Shape, Sum, whole_ops
from verifiable_relu.network.build import as_network
from verifiable_relu.network.factors import bounded_factors
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import (
    Add,
    Conv2d,
    Extreme,
    Gelu,
    Input,
    LeakyRelu,
    Linear,
    MatMul,
    Maximum,
    Node,
    Permute,
    Relu,
    Reshape,
    Scale,
    Sparse,
    Step,
    curve,
)
from verifiable_relu.network.nodes import Product as ProductNode
from verifiable_relu.readers.derived import narrow
from verifiable_relu.rounding import UNIT, above

_ZERO = torch.zeros(())


def as_graph(network: ir.network.Network) -> Network:
    """Return a flat network as one of today's nodes."""
    source = network.source
    made = Nodes(network.ops, source.input_shape)
    last = made.reshaped(made.at[-1], source.output_shape, network.ops[-1].name)
    nodes, output = bounded_factors(made.nodes, last)
    return as_network(
        nodes,
        output,
        name=network.name,
        onnx=source.onnx,
        batched=source.batched,
        ports=source.ports,
        mended=source.repairs,
    )


class Nodes:
    """Nodes for ops, one after another.

    Attributes:
        nodes: the nodes.
        at: the node of each op; of an op that another one's node stands for, that node or −1.
        owner: the op of each node.
    """

    def __init__(self, ops: Sequence[Op], input_shape: Shape, groups: Mapping[int, object] | None = None) -> None:
        """Make the nodes.

        Args:
            ops: of a flat network.
            input_shape: of one sample.
            groups: what each op belongs to; a node stands for ops of one group alone, and keeps whole numbers apart.
        """
        self.ops, self.nodes, self.at, self.owner = ops, list[Node](), list[int](), list[int]()
        self._groups, self._whole = groups, frozenset() if groups is None else whole_ops(ops)
        self._uses = np.bincount([i for op in ops for i in op.inputs], minlength=len(ops))
        self._numbers = {id(op): number for number, op in enumerate(ops)}
        self._spared = self._find_spared()
        self._wanted = self._find_wanted()
        for number, op in enumerate(ops):
            self._op = number
            if number in self._spared:
                self.at.append(-1)
            elif not op.inputs:
                self.at.append(self._add(Input(name=op.name, inputs=(), shape=tuple(input_shape))))
            else:
                self.at.append(getattr(self, f"_{type(op).__name__.lower()}")(op))

    def _number(self, op: Op) -> int:
        return self._numbers[id(op)]

    def _add(self, node: Node) -> int:
        self.nodes.append(node)
        self.owner.append(self._op)
        return len(self.nodes) - 1

    def reshaped(self, x: int, shape: Sequence[int], name: str) -> int:
        """Return a node with the numbers of another one under a shape."""
        if self.nodes[x].shape == tuple(shape):
            return x
        return self._add(Reshape(name=name, inputs=(x,), shape=tuple(shape)))

    def _find_spared(self) -> set[int]:
        """Return the ops that are a part of what another op's node computes."""
        found: set[int] = set()
        for op in self.ops:
            if isinstance(op, Affine) and (center := self._center(op)) is not None:
                found.add(center)
            if (matrices := self._matrices(op)) is not None:
                found.update(matrices[0])
            if isinstance(op, ir.network.Maximum) and (halves := self._halves(op)) is not None:
                found.update(halves[0])
        return found

    def _find_wanted(self) -> dict[int, Shape]:
        """Return the shape in which those who read an op want it, where they say so."""
        found: dict[int, Shape] = {}
        for number in range(len(self.ops) - 1, 0, -1):
            op = self.ops[number]
            map = op.map if isinstance(op, Affine) else None
            shape = found.get(number)
            if isinstance(map, maps.Convolution):
                shape = map.in_shape
            elif isinstance(map, maps.Dense):
                shape = (map.copies, map.weight.shape[1]) if map.copies > 1 else None
            elif isinstance(map, maps.Gather | maps.Sparse) or isinstance(op, ir.network.Maximum):
                shape = None
            for source in op.inputs:
                if shape is not None and math.prod(shape) == self.ops[source].size:
                    found[source] = shape
        return found

    # Affine maps

    def _affine(self, op: Affine) -> int:
        matrices = self._matrices(op)
        if matrices is not None:
            return self._matmul(op, *matrices[1:])
        map = op.map
        if isinstance(map, maps.Diagonal):
            return self._scale(op, map)
        x = self.at[op.inputs[0]]
        if isinstance(map, maps.Convolution):
            return self._convolution(op, map, x)
        if isinstance(map, maps.Dense):
            return self._dense(op, map, x)
        shape = self._wanted.get(len(self.at), (op.size,))
        if isinstance(map, maps.Gather):
            return self._gathered(x, map.index.numpy().reshape(shape), op.name, op)
        assert isinstance(map, maps.Sparse)
        return self._sparse(x, map.index, map.weight, op.bias, shape, op.name, op)

    def _sparse(
        self, x: int, index: Tensor, weight: Tensor, bias: Tensor | None, shape: Shape, name: str, op: Affine | None
    ) -> int:
        error, more = (0.0, 0.0) if op is None else _errors(op)
        bias = weight.new_zeros(len(weight)) if bias is None else bias
        return self._add(
            Sparse(
                name=name,
                inputs=(x,),
                shape=tuple(shape),
                index=index,
                weight=weight,
                bias=bias,
                weight_error=error,
                offset_terms=more,
            )
        )

    def _gathered(self, x: int, index: np.ndarray, name: str, op: Affine | None = None) -> int:
        """Return a node of the elements of another one with these numbers, −1 standing for 0."""
        shape, flat = index.shape, index.reshape(-1)
        if op is None or (op.bias is None and op.bias_error is None):
            strides = _strides(flat) if len(flat) == self.nodes[x].size else None
            if strides is not None:
                order = sorted(range(len(strides)), key=lambda i: -strides[i][1])
                inner = self.reshaped(x, [strides[i][0] for i in order], name)
                sizes, axes = tuple(length for length, _ in strides), tuple(order.index(i) for i in range(len(order)))
                if axes != tuple(range(len(axes))):
                    inner = self._add(Permute(name=name, inputs=(inner,), shape=sizes, axes=axes))
                return self.reshaped(inner, shape, name)
        weight = torch.from_numpy((flat >= 0).astype(np.float32))[:, None]
        places = torch.from_numpy(np.maximum(flat, 0).astype(np.int64))[:, None]
        return self._sparse(x, places, weight, None if op is None else op.bias, shape, name, op)

    def _convolution(self, op: Affine, map: maps.Convolution, x: int) -> int:
        channels, bias = len(map.weight), op.bias
        each = None if bias is None else bias.reshape(channels, -1)
        simple = each is None or bool((each == each[:, :1]).all())
        error, more = _errors(op)
        found = self._add(
            Conv2d(
                name=op.name,
                inputs=(self.reshaped(x, map.in_shape, op.name),),
                shape=map.out_shape,
                weight=map.weight,
                bias=map.weight.new_zeros(channels) if each is None or not simple else each[:, 0].contiguous(),
                stride=map.stride,
                padding=map.padding,
                dilation=map.dilation,
                groups=map.groups,
                weight_error=error,
                offset_terms=more,
            )
        )
        return found if simple else self._shift(op, found)

    def _dense(self, op: Affine, map: maps.Dense, x: int) -> int:
        out, inner = map.weight.shape
        shape = self.nodes[x].shape
        if map.copies == 1:
            shape = (inner,)
        elif shape[-1] != inner:
            shape = (map.copies, inner)
        each = None if op.bias is None else op.bias.reshape(map.copies, out)
        simple = each is None or bool((each == each[:1]).all())
        error, more = _errors(op)
        found = self._add(
            Linear(
                name=op.name,
                inputs=(self.reshaped(x, shape, op.name),),
                shape=(*shape[:-1], out),
                weight=map.weight,
                bias=map.weight.new_zeros(out) if each is None or not simple else each[0],
                weight_error=error,
                offset_terms=more,
            )
        )
        return found if simple else self._shift(op, found)

    def _shift(self, op: Affine, x: int) -> int:
        """Add the bias of an op to a node."""
        assert op.bias is not None
        shape, (error, more) = self.nodes[x].shape, _errors(replace(op, weight_error=0.0))
        one = torch.ones(())
        parts = {"center": _ZERO, "scale": one, "shift": _small(op.bias, shape)}
        return self._add(Scale(name=op.name, inputs=(x,), shape=shape, weight_error=error, offset_terms=more, **parts))

    def _center(self, op: Affine) -> int | None:
        """Return the op before one that multiplies, where that subtracts numbers from x and nothing else reads it."""
        before = self.ops[op.inputs[0]]
        if not isinstance(op.map, maps.Diagonal) or bool((op.map.weight == 1).all()):
            return None
        plain = isinstance(before, Affine) and isinstance(before.map, maps.Diagonal) and before.is_exact
        if not (plain and self._uses[op.inputs[0]] == 1 and isinstance(before, Affine)):
            return None
        groups, source = self._groups, op.inputs[0]
        if groups is not None and (source in self._whole or groups.get(source) is not groups.get(self._number(op))):
            return None
        return source if before.bias is not None and bool((before.map.weight == 1).all()) else None

    def _scale(self, op: Affine, map: maps.Diagonal) -> int:
        center, source = self._center(op), op.inputs[0]
        middle: Tensor | None = None
        if center is not None:
            (source,), middle = self.ops[center].inputs, -self.ops[center].bias  # type: ignore[attr-defined]
        x = self.at[source]
        shape, (error, more) = self.nodes[x].shape, _errors(op)
        return self._add(
            Scale(
                name=op.name,
                inputs=(x,),
                shape=shape,
                center=_ZERO if middle is None else _small(middle, shape),
                scale=_small(map.weight, shape),
                shift=_ZERO if op.bias is None else _small(op.bias, shape),
                weight_error=error,
                offset_terms=more,
                divisor=None if map.divisor is None else _small(map.divisor, shape),
            )
        )

    # The others

    def _sum(self, op: Sum) -> int:
        total = self.at[op.inputs[0]]
        shape = self._wanted.get(len(self.at), self.nodes[total].shape)
        total = self.reshaped(total, shape, op.name)
        for source in op.inputs[1:]:
            part = self.reshaped(self.at[source], shape, op.name)
            total = self._add(Add(name=op.name, inputs=(total, part), shape=shape))
        return total

    def _product(self, op: Product) -> int:
        x, y = (self.at[i] for i in op.inputs)
        shape = self.nodes[x].shape
        return self._add(ProductNode(name=op.name, inputs=(x, self.reshaped(y, shape, op.name)), shape=shape))

    def _elementwise(self, op: Elementwise) -> int:
        x, function = self.at[op.inputs[0]], op.function
        return self._activation(x, function, op.name)

    def _activation(self, x: int, function: Any, name: str) -> int:
        given: dict[str, Any] = {"name": name, "inputs": (x,), "shape": self.nodes[x].shape}
        if isinstance(function, Kinked):
            if function.flat_below:
                return self._add(Relu(**given))
            return self._add(LeakyRelu(**given, slope=_small(function.slope_below, given["shape"])))
        if isinstance(function, StepFunction):
            return self._add(Step(**given, function=function.kind))
        parameter = float(function.parameters["parameter"])
        if function.kind == "GELU":
            return self._add(Gelu(**given, lam=narrow(torch.tensor(parameter, dtype=torch.float64))))
        return self._add(curve(function.kind, name, (x,), given["shape"], parameter))

    # Products of matrices

    def _matrices(self, op: Op) -> tuple[set[int], tuple[int, np.ndarray], tuple[int, np.ndarray]] | None:
        """Return a product of matrices: the ops that make it, and both factors as elements of ops, (heads, …)."""
        map = op.map if isinstance(op, Affine) else None
        if not isinstance(map, maps.Dense) or len(map.weight) != 1 or map.weight.shape[1] < 2 or map.copies < 2:
            return None
        product = self.ops[op.inputs[0]]
        one = isinstance(op, Affine) and op.is_exact and op.bias is None and bool((map.weight == 1).all())
        if not (one and isinstance(product, Product) and self._uses[op.inputs[0]] == 1):
            return None
        inner, spared, sides = map.weight.shape[1], {op.inputs[0]}, []
        for source in product.inputs:
            gather = self.ops[source]
            moved = isinstance(gather, Affine) and isinstance(gather.map, maps.Gather) and gather.bias is None
            if moved and isinstance(gather, Affine) and isinstance(gather.map, maps.Gather):
                sides.append((gather.inputs[0], gather.map.index.numpy().reshape(-1, inner)))
                spared |= {source} if self._uses[source] == 1 else set()
            else:
                sides.append((source, np.arange(gather.size).reshape(-1, inner)))
        (left, a), (right, b) = sides
        columns = _first(a)
        rows = _first(b.reshape(-1, columns * inner)) if len(a) % columns == 0 else 0
        if not rows or len(a) % (rows * columns):
            return None
        first, second = (each.reshape(-1, rows, columns, inner) for each in (a, b))
        if not ((first == first[:, :, :1]).all() and (second == second[:, :1]).all()):
            return None
        return spared, (left, first[:, :, 0]), (right, second[:, 0].swapaxes(1, 2))

    def _matmul(self, op: Op, left: tuple[int, np.ndarray], right: tuple[int, np.ndarray]) -> int:
        x, y = (self._gathered(self.at[source], index, op.name) for source, index in (left, right))
        heads, rows, inner = left[1].shape
        shape = (heads, rows, right[1].shape[2])
        return self._add(MatMul(name=op.name, inputs=(x, y), shape=shape, inner=inner))

    # Maxima

    def _halves(self, op: ir.network.Maximum) -> tuple[set[int], list[tuple[int, np.ndarray]]] | None:
        """Return two values whose larger elements an op takes: the ops that join them, and elements of ops."""
        joined, size = self.ops[op.inputs[0]], op.size
        both = np.arange(2 * size).reshape(2, size)
        if not (isinstance(joined, Sum) and len(joined.inputs) == 2 and self._uses[op.inputs[0]] == 1):
            return None
        if tuple(op.candidates.shape) != both.shape or not (op.candidates.numpy() == both).all():
            return None
        found = []
        for half, source in enumerate(joined.inputs):
            gather = self.ops[source]
            if not (isinstance(gather, Affine) and isinstance(gather.map, maps.Gather) and gather.bias is None):
                return None
            mine, other = gather.map.index.numpy().reshape(2, size)[[half, 1 - half]]
            if self._uses[source] > 1 or (mine < 0).any() or (other >= 0).any():
                return None
            found.append((gather.inputs[0], mine))
        return {op.inputs[0], *joined.inputs}, found

    def _maximum(self, op: ir.network.Maximum) -> int:
        shape = self._wanted.get(len(self.at), (op.size,))
        halves = self._halves(op)
        if halves is None:
            return self.reshaped(self._tournament(op), shape, op.name)
        x, y = (self.at[source] for source, _ in halves[1])
        alike = self.nodes[x].shape if self.nodes[x].size == op.size else shape
        x, y = (self._gathered(n, i.reshape(alike), op.name) for n, (_, i) in zip((x, y), halves[1], strict=True))
        minus = Scale(name=op.name, inputs=(x,), shape=alike, center=_ZERO, scale=torch.tensor(-1.0), shift=_ZERO)
        ahead = self._add(Add(name=op.name, inputs=(y, self._add(minus)), shape=alike))
        gained = self._add(Relu(name=op.name, inputs=(ahead,), shape=alike))
        made = self._add(Add(name=op.name, inputs=(x, gained), shape=alike))
        return self._add(Extreme(name=op.name, inputs=(x, y, made), shape=alike, sign=1))

    def _tournament(self, op: ir.network.Maximum) -> int:
        """Return maxima as ReLUs, max(a, b) = a + relu(b − a), and as maxima of what they are the maximum of."""
        # The first candidate stands again where an output has fewer.
        windows = op.candidates.numpy().copy()
        windows[1:][windows[1:] == windows[:1]] = -1
        order = np.argsort(windows < 0, axis=0, kind="stable")
        candidates = windows = np.take_along_axis(windows, order, axis=0)
        source = x = self.at[op.inputs[0]]
        while len(candidates) > 1:
            count, results = len(candidates) // 2, candidates.shape[1]
            first, second = candidates[0 : 2 * count : 2], candidates[1 : 2 * count : 2]
            pair = np.stack([second, first], -1).reshape(-1, 2)
            met = np.asarray((pair >= 0).all(1))
            weight = np.array([1, -1], np.float32) * met[:, None]
            # Where there is no opponent, the difference is a negative number, of which the ReLU makes 0.
            away = torch.from_numpy(np.where(met, 0.0, -1.0).astype(np.float32))
            places, weights = torch.from_numpy(np.maximum(pair, 0)), torch.from_numpy(weight.astype(np.float32))
            difference = self._sparse(x, places, weights, away, (count * results,), op.name, None)
            gained = self._add(Relu(name=op.name, inputs=(difference,), shape=(count * results,)))
            left = np.concatenate([first, candidates[2 * count :]]).reshape(-1)
            places_of_gains = np.where(np.arange(len(left)) < count * results, np.arange(len(left)), -1)
            parts = self._gathered(x, left, op.name), self._gathered(gained, places_of_gains, op.name)
            x = self._add(Add(name=op.name, inputs=parts, shape=(len(left),)))
            rest = len(candidates) - count
            there = left.reshape(rest, results) >= 0
            candidates = np.where(there, np.arange(rest * results).reshape(rest, results), -1)
        made = self._gathered(x, candidates[0], op.name)
        if len(windows) == 1:
            return made
        shape, index = (op.size,), torch.from_numpy(windows.astype(np.int64))
        return self._add(Maximum(name=op.name, inputs=(source, made), shape=shape, candidates=index))


def _first(rows: np.ndarray) -> int:
    """Return how many rows from the first one on are alike."""
    differs = (rows != rows[:1]).any(1)
    return int(differs.argmax()) if differs.any() else len(rows)


def _strides(index: np.ndarray) -> list[tuple[int, int]] | None:
    """Return the lengths and strides of the axes of an array whose elements are reordered, outer ones first."""
    found, inner, count = list[tuple[int, int]](), 1, len(index)
    if count and index[0] != 0:
        return None
    while inner < count:
        stride, length = int(index[inner]), 1
        while inner * length < count and index[inner * length] == stride * length:
            length += 1
        if length < 2 or count % (inner * length):
            return None
        found.insert(0, (length, stride))
        inner *= length
    made = np.zeros((), np.int64)
    for length, stride in found:
        made = made[..., None] + np.arange(length) * stride
    expected = 1
    for length, stride in sorted(found, key=lambda each: each[1]):
        if stride != expected:
            return None
        expected *= length
    return found or [(1, 1)] if bool((made.reshape(-1) == index).all()) else None


def _small(numbers: Tensor, shape: Shape) -> Tensor:
    """Return numbers of the elements of a shape without the axes along which they do not vary."""
    if numbers.ndim == 0 or numbers.stride() == (0,):
        return numbers.reshape(-1)[0].clone()
    small = numbers.reshape(shape)
    for axis in range(small.ndim):
        first = small.narrow(axis, 0, 1)
        if bool((small == first).all()):
            small = first
    varied = [axis for axis in range(small.ndim) if shape[axis] > 1]
    if small.numel() == 1 and varied:
        # Several numbers that are equal are no scalar: a GELU's λ is about what is before scalars alone.
        sizes = [length if axis == varied[-1] else 1 for axis, length in enumerate(shape)]
        small = small.expand(sizes).clone()
    while small.ndim and small.shape[0] == 1:
        small = small[0]
    return small


def _errors(op: Affine) -> tuple[float, float]:
    """Return the relative error of weights and bias together, and what else counts as a part of the bias."""
    error = op.weight_error
    if op.bias_error is None:
        return error, 0.0
    size = torch.zeros_like(op.bias_error) if op.bias is None else op.bias.double().abs()
    part = torch.where(size > 0, op.bias_error / size, 0.0)
    error = max(error, float(above(above(np.asarray(part.amax())))))
    rest = torch.where(size > 0, 0.0, op.bias_error)
    error = error or float(UNIT)
    return error, float(above(np.asarray(rest.amax() / error))) if bool(rest.any()) else 0.0
