"""The backward walk: rows of coefficients of a node, pulled back to the box of the inputs.

Source: Zhang et al., Efficient Neural Network Robustness Certification with General Activation Functions,
arXiv 1811.00866, theorem 3.2; for general graphs Xu et al., arXiv 2002.12920. For a row c of a target node,

    min over the box of c·y  ≥  A·x + constant,   x in the box,

is found by walking from the target back to the input: affine nodes pull A back by their adjoint, an activation
replaces A⁺ by A⁺·(lower line) and A⁻ by A⁻·(upper line). An upper bound is the negated lower bound of −c.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from verifiable_relu.bounds import rounding
from verifiable_relu.bounds.float32 import Float32
from verifiable_relu.bounds.forward import NodeBounds
from verifiable_relu.bounds.last_convolution import LastConvolution
from verifiable_relu.bounds.lines import LineTable, of_samples
from verifiable_relu.bounds.operators import ConvolutionOperator, DenseOperator, sums
from verifiable_relu.bounds.restrict import Restriction
from verifiable_relu.bounds.rows import Chunk, Restricted, Rows, Stepped, Stepper
from verifiable_relu.bounds.shifted import ShiftedLines
from verifiable_relu.bounds.slack import Slack
from verifiable_relu.bounds.tuning import Tuning
from verifiable_relu.bounds.window import Window, kernels, windows
from verifiable_relu.bounds.windowed import Windowed
from verifiable_relu.network.dispatch import Refusal, Table
from verifiable_relu.network.nodes import (
    Activation,
    Add,
    Affine,
    Bilinear,
    Conv2d,
    Input,
    Node,
    Permute,
    Reshape,
    Scale,
)


class Backward:
    """What a walk needs of a relaxation: its bounds, its lines, what rounding may change, and the faster steps.

    Args:
        bounds: the nodes' bounds.
        lines: the activations' lines.
        float32: which coefficients are in float32.
        tuning: which faster steps there are.
    """

    def __init__(self, bounds: NodeBounds, lines: LineTable, float32: Float32, tuning: Tuning) -> None:
        self.bounds, self.float32, self.tuning = bounds, float32, tuning
        self.slack = Slack(bounds, float32, tuning)
        self.shifted = ShiftedLines(bounds, lines, self.slack, float32, tuning)
        last = LastConvolution(bounds, self.slack, float32, tuning)
        self.windowed = Windowed(bounds, self.slack, self.shifted, last, tuning)
        self.steppers: list[Stepper] = [self.windowed] if tuning.windows else []
        self.steppers.append(last)
        if tuning.restrict:
            self.steppers.append(Restriction(bounds, self.shifted, float32, tuning))

    def rows(
        self,
        target: int,
        rows: Tensor,
        constant: Tensor | None,
        chunk: Chunk,
        record: dict[int, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Lower bounds of rows·y + constant, where y is the value of node ``target`` (``Relaxation.lower``)."""
        a = rows.reshape(chunk.groups, chunk.each, -1)
        total = self._begin(target, a, chunk.sample) if chunk.rounded else None
        added = None if constant is None else constant.reshape(chunk.groups, chunk.each)
        return Walk(self, chunk, record).back(target, a, total, target, added)

    def _begin(self, index: int, a: Tensor, sample: Tensor | None) -> Tensor:
        """Values of rows of a node at its point, less what rounding may change on the way back through the node."""
        found = value_at_point(self.bounds, index, a, sample)
        found = found - sums.dot(a.abs(), of_samples(self.slack.error(index), sample))
        if self.float32.holds(index):
            gone = (a.float().to(a) - a).abs()
            found = found - sums.dot(gone, of_samples(self.bounds.radius(index).flatten(1), sample))
        return found

    def neurons(self, index: int, neuron: Tensor, sign: Tensor, chunk: Chunk) -> Tensor:
        """(R,) lower bounds of sign·(neurons of node ``index``), rounding accounted for (``Relaxation.neurons``)."""
        node, number = self.bounds.network.nodes[index], neuron
        if self.bounds.samples > 1:
            groups = torch.arange(chunk.groups, device=neuron.device) if chunk.sample is None else chunk.sample
            number = (groups[:, None] * node.size + neuron.reshape(chunk.groups, chunk.each)).flatten()
        point, error = (
            t.flatten().index_select(0, number) for t in (self.bounds.point(index), self.slack.error(index, alone=True))
        )
        total = torch.addcmul(-error, sign, point).reshape(chunk.groups, chunk.each)
        start, rows = self._of_neurons(index, node, neuron, sign, chunk)
        return Walk(self, chunk).back(start, rows, total, index)[0]

    def _of_neurons(self, index: int, node: Node, neuron: Tensor, sign: Tensor, chunk: Chunk) -> tuple[int, Rows]:
        """sign·(neurons of node ``index``) as rows of that node, or of the node before an affine map, and which it is.

        A neuron of a dense layer is a row of its weights, one of a convolution the kernel within a window.
        """
        operator, shape = self.bounds.operators.find(index), (chunk.groups, chunk.each, -1)
        if isinstance(operator, DenseOperator) and len(node.shape) == 1:
            weight = operator.weight(torch.float32 if self.float32.narrows(index) else sign.dtype)
            return node.inputs[0], weight.index_select(0, neuron).mul_(sign.to(weight.dtype)[:, None]).reshape(shape)
        if isinstance(operator, ConvolutionOperator) and operator.plain:
            narrow = self.float32.holds(node.inputs[0]) and self.float32.sums(index)
            return node.inputs[0], kernels(operator, neuron, sign.float() if narrow else sign, self.tuning)
        if isinstance(node, Conv2d | Scale | Add) and len(node.shape) == 3:
            return index, windows(node.shape, neuron, sign, self.tuning)
        rows = sign.new_zeros(neuron.shape[0], node.size)
        return index, rows.scatter(1, neuron[:, None], sign[:, None]).reshape(shape)


def value_at_point(bounds: NodeBounds, index: int, a: Tensor, sample: Tensor | None) -> Tensor:
    """A·v̂ of rows A of node ``index``, (groups, each, neurons), and its point v̂: (groups, each)."""
    return sums.dot(a, of_samples(bounds.point(index).flatten(1), sample))


class Walk:
    """One chunk of rows on its way back.

    Args:
        of: what the walk needs of the relaxation.
        chunk: which rows they are.
        record: takes the coefficients of the activations that have their own lines, (rows, neurons), by index.
    """

    def __init__(self, of: Backward, chunk: Chunk, record: dict[int, Tensor] | None = None) -> None:
        self.of, self.chunk, self.record = of, chunk, record
        self.bounds, self.slack = of.bounds, of.slack
        self.nodes = of.bounds.network.nodes
        self.coefficients: dict[int, Rows] = {}
        self.total: Tensor | None = None

    def back(
        self, start: int, rows: Rows, total: Tensor | None, origin: int, constant: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The rows' lower bounds, (rows,), and their coefficients at the node at which they end, if these are wanted.

        Args:
            start: the node at which the rows begin.
            rows: of this node.
            total: their values at the points, less what rounding may change there, (groups, each), if it counts.
            origin: the node whose rows they are, ``start`` or the affine map after it; its rounding errors are in
                ``total``.
            constant: what is to be added, (groups, each).
        """
        self.start, self.total = start, total
        charged, reached = set(self.slack.covered(origin)), None
        self.give(start, rows)
        for index in range(start, -1, -1):
            if index not in self.coefficients:
                continue
            a, node = self.coefficients.pop(index), self.nodes[index]
            if index == self.bounds.start:
                reached = self._end(a, index)
                continue
            if isinstance(node, Activation) and self.bounds.network.uses[node.inputs[0]] == 1:
                charged |= self.slack.covered(node.inputs[0])
            if self.chunk.rounded and index not in charged and isinstance(node, Affine | Add):
                self.less(self._weighed(a, index, "error", self.slack.error(index)))
                charged |= self.slack.covered(index)
            stepped = self._stepped(index, a)
            if stepped is None:
                BACK[node](self, index, node, a)
                continue
            if stepped.constant is not None:
                self.plus(stepped.constant)
            if stepped.rows is not None:
                self.give(stepped.source, stepped.rows)
        found = self.total
        assert found is not None
        if constant is not None:
            found = found + constant
        if self.chunk.rounded:
            lost = of_samples(self.slack.lost(origin), self.chunk.sample)[:, None]
            found = rounding.total(found, lost, constant)
        return found.flatten(), reached

    def _stepped(self, index: int, a: Rows) -> Stepped | None:
        """A faster step, if there is one."""
        found = (stepper.step(index, a, self.chunk) for stepper in self.of.steppers)
        return next((stepped for stepped in found if stepped is not None), None)

    def plus(self, term: Tensor) -> None:
        """Add to what is found so far, (groups, each)."""
        self.total = term if self.total is None else self.total + term

    def less(self, term: Tensor) -> None:
        """Take away from it."""
        self.total = -term if self.total is None else self.total - term

    def give(self, index: int, a: Rows) -> None:
        """Rows of node ``index``, which are added to those that it has."""
        if self.narrow(index):
            a = a.float()
        if index in self.coefficients:
            a = self.merged(index, a, self.coefficients[index])
            if self.chunk.rounded:
                self.less(self._weighed(a, index, "sum", self.slack.merged(index)))
        self.coefficients[index] = a

    def merged(self, index: int, first: Rows, second: Rows) -> Rows:
        """The sum of two rows of node ``index``, in windows where the grids of both go together."""
        both = first.plus(second) if isinstance(first, Window) and isinstance(second, Window) else None
        return self.whole(first, index) + self.whole(second, index) if both is None else both

    def narrow(self, index: int) -> bool:
        """Whether coefficients of node ``index`` are in float32, in a network in float64."""
        return self.chunk.rounded and self.of.float32.holds(index)

    def whole(self, a: Rows, index: int) -> Tensor:
        """Dense coefficients of a node, (groups, each, neurons)."""
        assert not isinstance(a, Restricted)
        if isinstance(a, Window):
            a = a.dense(self.nodes[index].shape)
        return a.reshape(self.chunk.groups, self.chunk.each, self.nodes[index].size)

    def _weighed(self, a: Rows, index: int, name: str, values: Tensor) -> Tensor:
        """|A|·values of node ``index``, (batch, size), in float32 not too low: (groups, each)."""
        assert not isinstance(a, Restricted)
        if isinstance(a, Window):
            found, count = self.of.windowed.weighed(a, index, name, values, self.chunk), a.values[0].numel()
        else:
            found, count = self._summed(a.abs(), index, of_samples(values, self.chunk.sample)), a.shape[-1]
        return rounding.weighed_single(found, sums.depth(count, self.of.tuning)) if self.narrow(index) else found

    def _summed(self, size: Tensor, index: int, values: Tensor) -> Tensor:
        """The sum |A|·values as it is computed at node ``index``, (groups, each).

        Args:
            size: |A|, (groups, each, size); spent.
            index: the node.
            values: (groups or 1, size).
        """
        if not self.narrow(index):
            return sums.dot(size, values)
        return sums.last_axes(size.mul_(values.to(size.dtype)[:, None]), 1, self.of.tuning)

    def _end(self, a: Rows, index: int) -> Tensor | None:
        """Take the least values of rows over the box at which they end; returns their coefficients, if wanted."""
        stepped = None if self.chunk.coefficients else self._stepped(index, a)
        if stepped is not None:
            assert stepped.constant is not None
            self.plus(stepped.constant)
            return None
        dense = self.whole(a, index)
        if self.chunk.rounded:
            radius = of_samples(self.slack.end(), self.chunk.sample)
        else:
            center, radius = (of_samples(t, self.chunk.sample) for t in self.bounds.ball(index))
            self.plus(sums.dot(dense, center))
        self.plus(self.least(index, dense, radius))
        return dense.flatten(0, 1) if self.chunk.coefficients else None

    def least(self, index: int, a: Tensor, radius: Tensor) -> Tensor:
        """The least value −|A|·radius of A·(v − v̂) where |v − v̂| ≤ radius, of node ``index``: (groups, each).

        Args:
            index: the node at which rows end.
            a: (groups, each, size); spent, unless the coefficients are wanted.
            radius: (groups or 1, size).
        """
        # Gradients may want A, too; in float32 nobody else does.
        spent = self.narrow(index) and not self.chunk.coefficients and not a.requires_grad
        return -self._summed(a.abs_() if spent else a.abs(), index, radius)


def _through_sum(walk: Walk, index: int, node: Add, a: Rows) -> None:
    for source in node.inputs:
        walk.give(source, a)


def _through_reshape(walk: Walk, index: int, node: Reshape, a: Rows) -> None:
    walk.give(node.inputs[0], walk.whole(a, index))


def _through_permute(walk: Walk, index: int, node: Permute, a: Rows) -> None:
    dense = walk.whole(a, index)
    walk.give(node.inputs[0], node.adjoint(dense.reshape(-1, *node.shape)).reshape(*dense.shape[:2], -1))


def _through_product(walk: Walk, index: int, node: Bilinear, a: Rows) -> None:
    """(x̂₁ + d₁)∘(x̂₂ + d₂) is linear in d₁ and d₂ but for d₁∘d₂, which is charged (``rounding.bilinear``)."""
    dense, (first, second) = walk.whole(a, index), node.inputs
    walk.less(walk._weighed(dense, index, "product", walk.slack.product(index)))
    rows = dense.reshape(*dense.shape[:2], *node.shape)
    x, y = (of_samples(walk.bounds.point(i), walk.chunk.sample) for i in node.inputs)
    walk.give(first, node.to_first(rows, y).flatten(2))
    walk.give(second, node.to_second(rows, x).flatten(2))
    if not walk.chunk.rounded:
        walk.less(value_at_point(walk.bounds, index, dense, walk.chunk.sample))


def _through_affine(walk: Walk, index: int, node: Affine, a: Rows) -> None:
    dense, source = walk.whole(a, index), node.inputs[0]
    # Rows that begin here may have coefficients for neurons that are inactive after it.
    if walk.chunk.rounded and index != walk.start and walk.of.float32.narrows(index):
        dense = dense.float()
    shaped = dense if len(node.shape) == 1 else dense.reshape(-1, *node.shape)
    back = walk.bounds.operators[index].adjoint(shaped, walk.nodes[source].shape)
    walk.give(source, back.reshape(*dense.shape[:2], -1))
    if not walk.chunk.rounded:
        walk.plus(dense @ walk.bounds.operators[index].offset.expand(node.shape).flatten())


def _through_activation(walk: Walk, index: int, node: Activation, a: Rows) -> None:
    dense, chunk, shifted = walk.whole(a, index), walk.chunk, walk.of.shifted
    if index in chunk.lines:
        if walk.record is not None:
            walk.record[index] = dense.flatten(0, 1)
        named = torch.arange(chunk.groups, device=dense.device) if chunk.sample is None else chunk.sample
        step = shifted.own(index, chunk.lines[index], named, chunk.rounded)
    else:
        step = shifted.step(index, chunk.rounded, shifted.depth(index) if chunk.rounded else 0)
        if chunk.sample is not None and walk.bounds.samples > 1:
            step = step.of_samples(chunk.sample)
    before, constant = step.back(dense, walk.of.tuning)
    walk.plus(constant)
    walk.give(node.inputs[0], before)


BACK: Table[Callable[[Walk, int, Any, Rows], None]] = Table(
    "the backward walk",
    {
        Input: Refusal("rows end at the input"),
        Add: _through_sum,
        Bilinear: _through_product,
        Reshape: _through_reshape,
        Permute: _through_permute,
        Affine: _through_affine,
        Activation: _through_activation,
    },
)
"""How rows of a node become rows of its inputs."""


def by_intervals(bounds: NodeBounds, rows: Tensor, chunk: Chunk) -> Tensor:
    """(R,) interval bounds of rows of the output from below, merged into the last linear map if there is one.

    Args:
        bounds: the nodes' bounds.
        rows: (R, *output_shape), group after group.
        chunk: which rows they are.
    """
    nodes = bounds.network.nodes
    last, a = len(nodes) - 1, rows.reshape(chunk.groups, chunk.each, -1)
    while isinstance(nodes[last], Reshape):
        last = nodes[last].inputs[0]
    operator = bounds.operators.find(last)
    linear = operator if isinstance(operator, DenseOperator) and len(nodes[last].shape) == 1 else None
    source = last if linear is None else nodes[last].inputs[0]
    middle, radius = rounding.ball(bounds.of(source).flat())
    before = a.abs() if linear is None else linear.adjoint(a, radius.shape[1:]).abs_()
    middle = middle if linear is None else linear.forward(middle)
    if chunk.rounded:
        radius = rounding.concretise(radius, radius.shape[1], radius.dtype)
    total, reach = sums.dot(a, of_samples(middle, chunk.sample)), sums.dot(before, of_samples(radius, chunk.sample))
    if not chunk.rounded:
        return (total - reach).flatten()
    error, lost = rounding.interval_rows(linear, bounds.largest(source), radius.shape[1])
    total = total - sums.dot(a.abs(), of_samples(error, chunk.sample))
    return rounding.total(total - reach, of_samples(lost, chunk.sample)[:, None]).flatten()
