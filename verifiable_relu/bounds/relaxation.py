"""A network over a batch of boxes, with lines in the place of its activations: what linear bounds are asked of.

**The backward walk.** Source: Zhang et al., Efficient Neural Network Robustness Certification with General Activation
Functions, arXiv 1811.00866, theorem 3.2; for general graphs Xu et al., arXiv 2002.12920. For a row c of a target node,

    min over the box of c·y  ≥  A·x + constant,   x in the box,

is found by walking from the target back to the input: affine nodes pull A back by their adjoint, an activation
replaces A⁺ by A⁺·(lower line) and A⁻ by A⁻·(upper line). An upper bound is the negated lower bound of −c.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from verifiable_relu.bounds import rounding, sums
from verifiable_relu.bounds.forward import NodeBounds, Rules, Tighten
from verifiable_relu.bounds.kinds import of_samples
from verifiable_relu.bounds.operators import ConvolutionOperator, DenseOperator
from verifiable_relu.bounds.slack import Float32, LineTable, ShiftedLines, Slack
from verifiable_relu.bounds.tuning import MEMORY, TUNING, Bounds, Lines, Tuning, chunk_size, groups
from verifiable_relu.bounds.windowed import (
    Chunk,
    Coefficients,
    LastConvolution,
    Restricted,
    Restriction,
    Stepped,
    Stepper,
    Window,
    Windowed,
    kernels,
    windows,
)
from verifiable_relu.network.dispatch import Refusal, Table
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import (
    Activation,
    Add,
    Affine,
    Beside,
    Bilinear,
    Conv2d,
    Extreme,
    Input,
    Maximum,
    Node,
    Permute,
    Reshape,
    Scale,
    Sparse,
)


class BackwardPropagator:
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
        return BackwardPass(self, chunk, record).back(target, a, total, target, added)

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
        return BackwardPass(self, chunk).back(start, rows, total, index)[0]

    def _of_neurons(
        self, index: int, node: Node, neuron: Tensor, sign: Tensor, chunk: Chunk
    ) -> tuple[int, Coefficients]:
        """sign·(neurons of node ``index``) as rows of that node, or of the node before an affine map, and which it is.

        A neuron of a dense layer is a row of its weights, one of a convolution the kernel within a window; of sums and
        differences of few numbers the coefficients are whole, which no sum rounds.
        """
        operator, shape = self.bounds.operators.find(index), (chunk.groups, chunk.each, -1)
        if isinstance(operator, DenseOperator) and len(node.shape) == 1:
            weight = operator.weight(torch.float32 if self.float32.narrows(index) else sign.dtype)
            return node.inputs[0], weight.index_select(0, neuron).mul_(sign.to(weight.dtype)[:, None]).reshape(shape)
        if isinstance(operator, ConvolutionOperator) and operator.plain:
            narrow = self.float32.holds(node.inputs[0]) and self.float32.sums(index)
            return node.inputs[0], kernels(operator, neuron, sign.float() if narrow else sign, self.tuning)
        if isinstance(node, Sparse) and node.differences:
            whole = sign.new_zeros(len(neuron), self.bounds.network.nodes[node.inputs[0]].size)
            where = node.index.to(sign.device)[neuron]
            return node.inputs[0], whole.scatter_add_(1, where, node.weight[neuron] * sign[:, None]).reshape(shape)
        if isinstance(node, Conv2d | Scale | Add) and len(node.shape) == 3:
            return index, windows(node.shape, neuron, sign, self.tuning)
        rows = sign.new_zeros(neuron.shape[0], node.size)
        return index, rows.scatter(1, neuron[:, None], sign[:, None]).reshape(shape)


class BackwardPass:
    """One chunk of rows on its way back.

    Args:
        of: what the walk needs of the relaxation.
        chunk: which rows they are.
        record: takes the coefficients of products and of the activations that have their own lines, (rows, neurons),
            by index.
    """

    def __init__(self, of: BackwardPropagator, chunk: Chunk, record: dict[int, Tensor] | None = None) -> None:
        self.of, self.chunk, self.record = of, chunk, record
        self.bounds, self.slack = of.bounds, of.slack
        self.nodes = of.bounds.network.nodes
        self.coefficients: dict[int, Coefficients] = {}
        self.total: Tensor | None = None

    def back(
        self, start: int, rows: Coefficients, total: Tensor | None, origin: int, constant: Tensor | None = None
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
        self.alone = any(origin in node.inputs for node in self.nodes if isinstance(node, Activation))
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
                self.less(self.weighed(a, index, "error", self.slack.error(index)))
                charged |= self.slack.covered(index)
            stepped = self._stepped(index, a)
            if stepped is None:
                _BACK[node](self, index, node, a)
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

    def _stepped(self, index: int, a: Coefficients) -> Stepped | None:
        """A faster step, if there is one."""
        found = (stepper.step(index, a, self.chunk) for stepper in self.of.steppers)
        return next((stepped for stepped in found if stepped is not None), None)

    def plus(self, term: Tensor) -> None:
        """Add to what is found so far, (groups, each)."""
        self.total = term if self.total is None else self.total + term

    def less(self, term: Tensor) -> None:
        """Take away from it."""
        self.total = -term if self.total is None else self.total - term

    def give(self, index: int, a: Coefficients) -> None:
        """Rows of node ``index``, which are added to those that it has."""
        if self.narrow(index):
            a = a.float()
        if index in self.coefficients:
            a = self.merged(index, a, self.coefficients[index])
            if self.chunk.rounded:
                self.less(self.weighed(a, index, "sum", self.slack.merged(index)))
        self.coefficients[index] = a

    def merged(self, index: int, first: Coefficients, second: Coefficients) -> Coefficients:
        """The sum of two rows of node ``index``, in windows where the grids of both go together."""
        both = first.plus(second) if isinstance(first, Window) and isinstance(second, Window) else None
        return self.whole(first, index) + self.whole(second, index) if both is None else both

    def narrow(self, index: int) -> bool:
        """Whether coefficients of node ``index`` are in float32, in a network in float64."""
        return self.chunk.rounded and self.of.float32.holds(index)

    def whole(self, a: Coefficients, index: int) -> Tensor:
        """Dense coefficients of a node, (groups, each, neurons)."""
        assert not isinstance(a, Restricted)
        if isinstance(a, Window):
            a = a.dense(self.nodes[index].shape)
        return a.reshape(self.chunk.groups, self.chunk.each, self.nodes[index].size)

    def weighed(self, a: Coefficients, index: int, name: str, values: Tensor) -> Tensor:
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

    def _end(self, a: Coefficients, index: int) -> Tensor | None:
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


def _back_map(walk: BackwardPass, index: int, node: Affine, a: Coefficients) -> None:
    dense, source = walk.whole(a, index), node.inputs[0]
    # Rows that begin here may have coefficients for neurons that are inactive after it.
    if walk.chunk.rounded and index != walk.start and walk.of.float32.narrows(index):
        dense = dense.float()
    shaped = dense if len(node.shape) == 1 else dense.reshape(-1, *node.shape)
    back = walk.bounds.operators[index].adjoint(shaped, walk.nodes[source].shape)
    walk.give(source, back.reshape(*dense.shape[:2], -1))
    if not walk.chunk.rounded:
        walk.plus(dense @ walk.bounds.operators[index].offset.expand(node.shape).flatten())


def _back_activation(walk: BackwardPass, index: int, node: Activation, a: Coefficients) -> None:
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


def _back_sum(walk: BackwardPass, index: int, node: Add, a: Coefficients) -> None:
    for source in node.inputs:
        walk.give(source, a)


def _back_bilinear(walk: BackwardPass, index: int, node: Bilinear, a: Coefficients) -> None:
    """(x̂₁ + d₁)∘(x̂₂ + d₂) is linear in d₁ and d₂ but for d₁∘d₂.

    With |d₁| ≤ r₁ and |d₂| ≤ r₂, for every t in [−1, 1] and σ = ±1

        σ·d₁·d₂  ≥  t·(r₂·d₁ + σ·r₁·d₂) − r₁·r₂,

    a mean of McCormick's two planes (``rounding.bilinear``), whose constant does not depend on t; without a choice
    of t it is 0. A row that has a at the product takes |a| times that for the sign σ of a.
    """
    dense, (first, second) = walk.whole(a, index), node.inputs
    walk.less(walk.weighed(dense, index, "product", walk.slack.product(index)))
    rows = dense.reshape(*dense.shape[:2], *node.shape)
    x, y = (of_samples(walk.bounds.point(i), walk.chunk.sample) for i in node.inputs)
    to_first, to_second = node.to_first(rows, y), node.to_second(rows, x)
    if walk.record is not None:
        walk.record[index] = dense.flatten(0, 1)
    tilt = walk.chunk.tilts.get(index)
    if tilt is not None:
        r, s = (of_samples(walk.bounds.radius(i), walk.chunk.sample) for i in node.inputs)
        rows = rows.flatten(0, 1)
        more = node.weighed_to_first(rows.abs(), tilt, s), node.weighed_to_second(rows, tilt, r)
        to_first, to_second = to_first + more[0].unsqueeze(1), to_second + more[1].unsqueeze(1)
        if not walk.chunk.rounded:
            # Without rounding rows are of the factors themselves, not of their distances from the points.
            for extra, at in zip(more, (x, y), strict=True):
                walk.less((extra * at).flatten(1).sum(1, keepdim=True))
    walk.give(first, to_first.flatten(2))
    walk.give(second, to_second.flatten(2))
    if not walk.chunk.rounded:
        walk.less(value_at_point(walk.bounds, index, dense, walk.chunk.sample))


def _back_maximum(walk: BackwardPass, index: int, node: Maximum, a: Coefficients) -> None:
    dense, (source, _), chunk = walk.whole(a, index), node.inputs, walk.chunk
    if walk.record is not None:
        walk.record[index] = dense.flatten(0, 1)
    between = walk.of.shifted.between(index, chunk.rounded).of_samples(chunk.sample)
    before, constant = between.back(dense, walk.nodes[source].size)
    walk.plus(constant)
    walk.give(source, before)


def _back_extreme(walk: BackwardPass, index: int, node: Extreme, a: Coefficients) -> None:
    walk.give(node.inputs[-1], a)


def _back_difference(walk: BackwardPass, index: int, node: Beside, a: Coefficients) -> None:
    dense, chunk = walk.whole(a, index), walk.chunk
    if walk.alone:
        # A neuron of the second network is bounded as if there were no other.
        walk.give(node.inputs[2], dense)
        return
    if walk.record is not None:
        walk.record[index] = dense.flatten(0, 1)
    *rows, constant = walk.of.shifted.aside(index, chunk.rounded).of_samples(chunk.sample).back(dense)
    walk.plus(constant)
    for source, mine in zip(node.inputs, rows, strict=True):
        if mine is not None:
            walk.give(source, mine)


def _back_reshape(walk: BackwardPass, index: int, node: Reshape, a: Coefficients) -> None:
    walk.give(node.inputs[0], walk.whole(a, index))


def _back_permute(walk: BackwardPass, index: int, node: Permute, a: Coefficients) -> None:
    dense = walk.whole(a, index)
    walk.give(node.inputs[0], node.adjoint(dense.reshape(-1, *node.shape)).reshape(*dense.shape[:2], -1))


_BACK: Table[Callable[[BackwardPass, int, Any, Coefficients], None]] = Table(
    "linear bounds",
    {
        Input: Refusal("rows end at the input"),
        Affine: _back_map,
        Activation: _back_activation,
        Add: _back_sum,
        Bilinear: _back_bilinear,
        Maximum: _back_maximum,
        Extreme: _back_extreme,
        Beside: _back_difference,
        Reshape: _back_reshape,
        Permute: _back_permute,
    },
)
"""Rows of each kind of node given to its inputs, of (the walk, the node's index, the node, the rows)."""


def value_at_point(bounds: NodeBounds, index: int, a: Tensor, sample: Tensor | None) -> Tensor:
    """A·v̂ of rows A of node ``index``, (groups, each, neurons), and its point v̂: (groups, each)."""
    return sums.dot(a, of_samples(bounds.point(index).flatten(1), sample))


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
    error, lost = rounding.interval_rows(linear, rounding.size(bounds.of(source)).flatten(1))
    total = total - sums.dot(a.abs(), of_samples(error, chunk.sample))
    return rounding.total(total - reach, of_samples(lost, chunk.sample)[:, None]).flatten()


class Relaxation:
    """A network over a batch of boxes: each node's bounds and each activation's lines, made as they are needed.

    In every sample of the batch bounds are wanted of other neurons, and of another number of them. So rows come in
    groups of equal size, each of one sample (``tuning.groups``), and what is known of a sample is held once for all
    rows of a group.

    Args:
        network: in the dtype and on the device of ``box``.
        box: the inputs, shaped (batch, *input_shape).
        known: bounds of activation nodes' inputs, by activation node index, to be used as well.
        float32: take coefficients in float32 wherever its rounding is accounted for, in networks in float64 on a CPU.
            That halves the memory and widens bounds, more so the smaller the box is and the deeper a dense network is.
            By default coefficients are in float32 only where that widens bounds by little.
        tuning: thresholds.
        rules: what activations are taken for.

    Attributes:
        nodes: the nodes' bounds.
        lines: the activations' lines.
        reached: CROWN has bounded what is unstable of the inputs of activations up to this node.
    """

    reached: float = -1

    def __init__(
        self,
        network: Network,
        box: Bounds,
        known: Mapping[int, Bounds] | None = None,
        float32: bool = False,
        *,
        tuning: Tuning = TUNING,
        rules: Rules | None = None,
    ) -> None:
        self.network, self.tuning = network, tuning
        self.nodes = NodeBounds(network, box, rules or Rules(), tuning, known)
        self.lines = LineTable(self.nodes)
        self._everywhere = float32

    @property
    def samples(self) -> int:
        """The size of the batch."""
        return self.nodes.samples

    @property
    def box(self) -> Bounds:
        """The inputs, (batch, *input_shape)."""
        return self.nodes.values[0]

    @property
    def pre(self) -> dict[int, Bounds]:
        """Bounds of the activations' inputs so far, by activation node index, each (batch, *shape)."""
        return self.nodes.pre

    @cached_property
    def backward(self) -> BackwardPropagator:
        """Walks with coefficients in float32 where that is worth it."""
        return BackwardPropagator(
            self.nodes, self.lines, Float32(self.nodes, self.tuning, self._everywhere), self.tuning
        )

    def advance(self, index: int, tighten: Tighten | None = None) -> None:
        """Extend the nodes' bounds through node ``index`` (``NodeBounds.advance``)."""
        self.nodes.advance(index, tighten)

    def bounds(self, index: int) -> Bounds:
        """Those of node ``index``, (batch, *shape)."""
        return self.nodes.of(index)

    def lower(
        self,
        target: int,
        rows: Tensor,
        sample: Tensor | None = None,
        *,
        constant: Tensor | None = None,
        lines: Mapping[int, Lines] | None = None,
        tilts: Mapping[int, Tensor] | None = None,
        rounded: bool = True,
        record: dict[int, Tensor] | None = None,
        coefficients: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Lower bounds of rows·y + constant over the box, y being the value of node ``target``.

        Args:
            target: the node; node bounds must have been advanced to the activations before it.
            rows: (R, *shape of the target), group after group.
            sample: (G,) the sample of each group of R/G rows; with G = R, of each row. By default that is every
                sample, one after another.
            constant: (R,), by default 0.
            lines: for some activations, by index, each row's own lines (``LineTable.chosen``), (R, *shape), with G = R.
            tilts: for some products, by index, each row's own planes, a number in [−1, 1] for every product of two
                numbers, (R, *pairs), with G = R: +1 and −1 are McCormick's, 0 is halfway between them.
            rounded: whether to account for rounding. Without, the values may steer a search and prove nothing.
            record: takes the coefficients of products and of the activations that have their own lines, (R, neurons),
                by index.
            coefficients: whether those of the node at which rows end are wanted.

        Returns:
            (R,) lower bounds; if ``rounded``, NaN or −inf where arithmetic broke down and never too high.
            (R, input_size) the coefficients A, if wanted, of the node at which rows end (``of_input``).
        """
        chunk = self._chunk(rows, sample, rounded, lines, coefficients, tilts)
        return self.backward.rows(target, rows, constant, chunk, record)

    def _chunk(
        self,
        rows: Tensor,
        sample: Tensor | None,
        rounded: bool = True,
        lines: Mapping[int, Lines] | None = None,
        coefficients: bool = False,
        tilts: Mapping[int, Tensor] | None = None,
    ) -> Chunk:
        """Rows, (R, …), group after group, and the sample of each group."""
        groups = self.samples if sample is None else sample.shape[0]
        return Chunk(groups, rows.shape[0] // max(1, groups), sample, rounded, lines or {}, coefficients, tilts or {})

    def by_intervals(self, rows: Tensor, sample: Tensor | None = None, rounded: bool = True) -> Tensor:
        """Interval bounds of rows of the output from below, merged into the linear map if that is what gives it.

        Args:
            rows: (R, *output_shape), group after group.
            sample: (G,) the sample of each group of R/G rows; by default every sample, one after another.
            rounded: whether to account for rounding.

        Returns:
            (R,).
        """
        return by_intervals(self.nodes, rows, self._chunk(rows, sample, rounded))

    def neurons(self, index: int, neuron: Tensor, sign: Tensor, sample: Tensor | None = None) -> Tensor:
        """(R,) lower bounds of sign·(neurons of node ``index``), rounding accounted for.

        Args:
            index: the node; node bounds must have been advanced to the activations before it.
            neuron: (R,) their numbers, group after group.
            sign: (R,) ±1.
            sample: (G,) the sample of each group of R/G rows; by default every sample, one after another.
        """
        return self.backward.neurons(index, neuron, sign, self._chunk(neuron, sample))

    def of_input(self, rows: Tensor) -> Tensor:
        """Coefficients of the input, (R, input_size), from those of the node at which rows end."""
        rows = rows.to(self.box.lower)
        for index in range(self.nodes.start, 0, -1):
            node, shape = self.network.nodes[index], self.network.nodes[self.network.nodes[index].inputs[0]].shape
            rows = rows.reshape(-1, *node.shape)
            if isinstance(node, Scale):
                rows = node.adjoint(rows, shape)
            elif isinstance(node, Permute):
                rows = node.adjoint(rows)
        return rows.flatten(1)

    def outputs(
        self,
        matrix: Tensor,
        sample: Tensor | None = None,
        *,
        intervals: bool = False,
        memory: int = MEMORY,
        stop: Callable[[], bool] | None = None,
    ) -> Tensor:
        """(R,) lower bounds of matrix·y over the box, y being the flattened output, rounding accounted for.

        Args:
            matrix: (R, outputs).
            sample: (R,) the sample of each row; by default equally many of every sample, in turn.
            intervals: interval bounds instead, the rows merged into the network's last affine map.
            memory: a limit in bytes on the coefficients held at once.
            stop: asked between chunks; once it returns True the remaining rows are left at −inf.
        """
        network = self.network
        last = len(network.nodes) - 1
        self.advance(network.last_activation)
        rows = matrix.to(self.box.lower).reshape(-1, *network.output_shape)
        count, found = rows.shape[0], rows.new_full((matrix.shape[0],), -math.inf)
        first = network.last_activation if intervals else 0
        size = chunk_size(network, rows, memory, self.tuning, first=first)
        if sample is None and count > size and self.samples > 1:
            sample = torch.arange(self.samples, device=rows.device).repeat_interleave(count // self.samples)
        for part, mine in groups(count, sample, size, self.samples):
            if stop is not None and stop():
                break
            chosen = rows[part]
            if intervals:
                bounded = self.by_intervals(chosen, mine)
            else:
                bounded = self.backward.rows(last, chosen, None, self._chunk(chosen, mine))[0]
            if isinstance(part, slice) and bounded.shape[0] == count:
                return bounded
            found[part] = bounded
        return found
