"""Linear bound propagation (CROWN): backward substitution of linear relaxations, in batches of rows.

Source: Zhang et al., Efficient Neural Network Robustness Certification with General Activation Functions,
arXiv 1811.00866, theorem 3.2; for general graphs Xu et al., arXiv 2002.12920. For a row c of a target node,

    min over the box of c·y  ≥  A·x + constant,   x in the box,

is found by walking from the target back to the input: affine nodes pull A back by their adjoint, an activation
replaces A⁺ by A⁺·(lower line) and A⁻ by A⁻·(upper line). An upper bound is the negated lower bound of −c.

Rows are ragged: row r belongs to sample ``sample[r]`` of the batch, so that exactly the unstable neurons of each
sample are bounded and nothing is padded. Rounding errors are collected beside the constants, as ‖A‖₁ times a
per-sample error unit of each node (``rounding``), and subtracted at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from verifiable_relu.bounds import rounding
from verifiable_relu.bounds.activations import relax, row, unstable
from verifiable_relu.bounds.interval import intersect, magnitude, node_image
from verifiable_relu.bounds.types import Bounds, Lines
from verifiable_relu.bounds.window import Grid, Window, windows
from verifiable_relu.errors import UnsupportedError
from verifiable_relu.network.graph import (
    Activation,
    Add,
    Affine,
    Conv2d,
    Input,
    Linear,
    Network,
    Permute,
    Relu,
    Reshape,
    Scale,
)

MEMORY = 1 << 30
"""Default limit, in bytes, on the coefficients held at once while a chunk of rows is propagated."""

_CACHED = 1 << 23
"""The same on a CPU, where chunks that stay in the cache, and in memory that was touched before, go faster."""

_COPIES = 6
"""How many arrays of a chunk's coefficients are alive at once at the widest node."""


Search = Callable[["Relaxation", int, Tensor, Tensor, Tensor | None], Tensor]
"""Bounds rows·y + constant from below: of (relaxation, target, rows, sample, constant), as ``Relaxation.lower``."""


class Relaxation:
    """A network over a batch of boxes: each node's bounds and each activation's lines, made as they are needed.

    Args:
        network: in the dtype and on the device of ``box``.
        box: the inputs, shaped (batch, *input_shape).
        known: bounds of activation nodes' inputs, by activation node index, to be used as well.
    """

    def __init__(self, network: Network, box: Bounds, known: Mapping[int, Bounds] | None = None) -> None:
        self.network = network
        self.values: list[Bounds] = [box]
        self.pre: dict[int, Bounds] = {}
        self._known = known or {}
        self._lines: dict[int, Lines] = {}
        self._errors: dict[int, Tensor] = {}
        self._ends: dict[int, tuple[Tensor, ...]] = {}
        self._tables: dict[tuple[Grid, int, str], Tensor] = {}

    @property
    def samples(self) -> int:
        """The size of the batch."""
        return len(self.values[0].lower)

    def advance(self, index: int, tighten: Callable[[int, Bounds], Bounds] | None = None) -> None:
        """Extend the node bounds through node ``index``.

        ``tighten`` is asked for better bounds of each activation's input, by the activation's index.
        """
        for current in range(len(self.values), index + 1):
            node = self.network.nodes[current]
            boxes = [self.values[i] for i in node.inputs]
            if isinstance(node, Activation):
                if current in self._known:
                    boxes = [intersect(boxes[0], self._known[current])]
                elif tighten is not None:
                    boxes = [tighten(current, boxes[0])]
                    self.values[node.inputs[0]] = boxes[0]
                self.pre[current] = boxes[0]
            self.values.append(node_image(node, boxes))

    def lines(self, index: int) -> Lines:
        """The lines of activation ``index`` over its input's bounds."""
        if index not in self._lines:
            node = self.network.nodes[index]
            assert isinstance(node, Activation)
            self._lines[index] = relax(node, self.pre[index])
        return self._lines[index]

    def _sum(self, a: Tensor | Window, b: Tensor | Window, index: int) -> Tensor | Window:
        """The sum of two rows' coefficients of node ``index``."""
        if isinstance(a, Window) and isinstance(b, Window) and (both := a.plus(b)) is not None:
            return both
        shape = self.network.nodes[index].shape
        whole = [c.dense(shape) if isinstance(c, Window) else c for c in (a, b)]
        return whole[0] + whole[1]

    def _table(self, grid: Grid, index: int, name: str, values: Tensor) -> Tensor:
        """A grid's windows of some values of node ``index``, kept for the next chunk of rows."""
        key = (grid, index, name)
        if key not in self._tables:
            self._tables[key] = grid.table(values)
        return self._tables[key]

    def _windowed(self, a: Window, index: int, sample: Tensor) -> tuple[Tensor, Window | None] | None:
        """One step of ``lower`` within windows: what is added to the constants, and the rows before the node.

        None where the node does not act on windows.
        """
        node, grid = self.network.nodes[index], a.grid
        if len(node.shape) != 3 or math.prod(grid.size) > math.prod(node.shape[1:]):
            return None

        def at(name: str, values: Tensor, of: Tensor | None = sample) -> Tensor:
            return a.of(self._table(grid, index, name, values), of)

        def cleaned() -> Tensor:
            """The coefficients, zero beyond the edges."""
            if a.clean:
                return a.values
            return a.values * at("inside", a.values.new_ones(1, *node.shape), None)

        match node:
            case Input():
                box = self.values[index]
                positive, negative = _halves(a.values)
                return _dot(positive, at("lower", box.lower)) + _dot(negative, at("upper", box.upper)), None
            case Activation():
                lines = self.lines(index)
                positive, negative = _halves(a.values)
                added = _dot(negative, at("above", lines.upper_offset))
                if self._lifted(index):
                    added = added + _dot(positive, at("below", lines.lower_offset))
                values = (positive * at("low", lines.lower_slope)).addcmul_(negative, at("high", lines.upper_slope))
                return added, Window(values, a.point, grid, clean=True)
            case Conv2d() if node.groups == 1 and node.dilation == (1, 1):
                whole = Window(cleaned(), a.point, grid, clean=True)
                return whole.values.sum((2, 3)) @ node.bias, whole.before(node)
            case Scale():
                values = cleaned()
                added = _dot(values, at("offset", node.offset().expand(1, *node.shape), None))
                values = values * at("scale", node.scale.expand(1, *node.shape), None)
                return added, Window(values, a.point, grid, clean=True)
        return None

    def _lifted(self, index: int) -> bool:
        """Whether lower lines have offsets at all; ReLU's go through the origin."""
        return not isinstance(self.network.nodes[index], Relu)

    def free(self, index: int) -> Tensor:
        """Where activation ``index`` leaves a choice between lines, as 0 or 1: (batch, *shape)."""
        node = self.network.nodes[index]
        return unstable(node, self.pre[index]).to(self.values[0].lower)

    def chosen_lines(self, index: int, sample: Tensor, slope: Tensor) -> Lines:
        """The lines of activation ``index`` for rows that choose their own, by the ``slope`` of ``relax``.

        Args:
            index: the activation.
            sample: (rows,) the sample of each row.
            slope: (rows, *shape).
        """
        node = self.network.nodes[index]
        assert isinstance(node, Activation)
        if not isinstance(node, Relu):
            pre, curve = self.pre[index], row(node).curve
            mine = Bounds(_of(pre.lower, sample), _of(pre.upper, sample))
            if curve is None:
                return relax(node, mine, slope)
            if index not in self._ends:
                self._ends[index] = curve.slopes(node, pre, True)
            return curve.between(node, mine, tuple(_of(end, sample) for end in self._ends[index]), slope)
        # Of a ReLU's lines only the slope of the lower one is to be chosen, where it straddles zero.
        common, free = self.lines(index), self.free(index)
        fixed = common.lower_slope * (1 - free)
        return Lines(
            torch.addcmul(_of(fixed, sample), _of(free, sample), slope),
            _of(common.lower_offset, sample),
            _of(common.upper_slope, sample),
            _of(common.upper_offset, sample),
        )

    def _own_error(self, index: int, sample: Tensor, lines: Lines) -> Tensor:
        """Like ``error_unit``, (rows,), for rows with lines of their own."""
        node, pre = self.network.nodes[index], self.pre[index]
        assert isinstance(node, Activation)
        return rounding.backward_activation(node, Bounds(_of(pre.lower, sample), _of(pre.upper, sample)), lines)

    def error_unit(self, index: int, concretise: bool) -> Tensor:
        """(batch,) rounding error per unit of ‖A‖₁ when rows are pulled back through node ``index``, or end there."""
        node = self.network.nodes[index]
        if concretise:
            return rounding.concretise(node.size, magnitude(self.values[index]))
        if index not in self._errors:
            if isinstance(node, Affine):
                reach = rounding.reach(node, magnitude(self.values[node.inputs[0]]))
                self._errors[index] = rounding.backward_affine(node, reach)
            else:
                assert isinstance(node, Activation)
                self._errors[index] = rounding.backward_activation(node, self.pre[index], self.lines(index))
        return self._errors[index]

    def lower(
        self,
        target: int,
        rows: Tensor | Window,
        sample: Tensor,
        *,
        constant: Tensor | None = None,
        intervals: bool = False,
        lines: Mapping[int, Lines] | None = None,
        rounded: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Lower bounds of rows·y + constant over the box, y being the value of node ``target``.

        Args:
            target: the node; node bounds must have been advanced to it.
            rows: (R, *shape of the target).
            sample: (R,) the sample of each row.
            constant: (R,), by default 0.
            intervals: go back only to the last activations and take their intervals there, instead of relaxing
                them: interval bound propagation with the rows merged into the last affine map.
            lines: for some activations, by index, each row's own lines (``chosen_lines``), (R, *shape).
            rounded: whether to account for rounding. Without, the values may steer a search and prove nothing.

        Returns:
            (R,) lower bounds; if ``rounded``, NaN or −inf where arithmetic broke down and never too high.
            (R, input_size) the coefficients A of the inputs in the linear lower bound, zero where rows ended before.
        """
        nodes = self.network.nodes
        coefficients: dict[int, Tensor | Window] = {target: rows}
        norms: dict[int, Tensor] = {}
        like = rows.values if isinstance(rows, Window) else rows
        constant = like.new_zeros(len(rows)) if constant is None else constant
        scale = constant.abs()
        error = torch.zeros_like(constant)
        steps = 0
        reached = like.new_zeros(len(rows), nodes[0].size)

        def give(index: int, a: Tensor | Window, norm: Tensor | None = None) -> None:
            nonlocal error
            if index in coefficients:
                a, norm = self._sum(coefficients[index], a, index), None
                norms.pop(index, None)
                if rounded:
                    error = error + _norm(a) * rounding.accumulate(magnitude(self.values[index]))[sample]
            coefficients[index] = a
            if norm is not None:
                norms[index] = norm

        for index in range(target, -1, -1):
            if index not in coefficients:
                continue
            a, node = coefficients.pop(index), nodes[index]
            ends = isinstance(node, Input) or (intervals and isinstance(node, Activation))
            own = lines.get(index) if lines is not None and not ends else None
            if rounded and (ends or isinstance(node, Affine | Activation)):
                unit = self.error_unit(index, ends)[sample] if own is None else self._own_error(index, sample, own)
                norm = norms[index] if index in norms else _norm(a)
                error = error + norm * unit
            # Slopes of at most 1 let no coefficient grow.
            shrinks = isinstance(node, Relu) or (isinstance(node, Reshape | Permute) and index in norms)
            passed = norms.get(index, norm) if rounded and shrinks else None
            if isinstance(a, Window):
                if isinstance(node, Add):
                    for source in node.inputs:
                        give(source, a)
                    continue
                stepped = self._windowed(a, index, sample) if own is None else None
                if stepped is not None:
                    added, before = stepped
                    if before is not None:
                        give(node.inputs[0], before, passed)
                    constant, scale, steps = constant + added, scale + added.abs(), steps + 1
                    continue
                a = a.dense(node.shape)
            match node:
                case _ if ends:
                    if index == 0:
                        reached = a.flatten(1)
                    box = self.values[index]
                    added = _dots(*_halves(a), box.lower, box.upper, sample)
                case Affine():
                    added = _dot(a, node.offset())
                    give(node.inputs[0], node.adjoint(a, nodes[node.inputs[0]].shape))
                case Activation():
                    used, at = (self.lines(index), sample) if own is None else (own, None)
                    positive, negative = _halves(a)
                    added = _dot(negative, _of(used.upper_offset, at))
                    if own is not None or self._lifted(index):
                        added = added + _dot(positive, _of(used.lower_offset, at))
                    # One of the two products is an exact zero.
                    through = positive * _of(used.lower_slope, at)
                    give(node.inputs[0], through.addcmul_(negative, _of(used.upper_slope, at)), passed)
                case Add():
                    for source in node.inputs:
                        give(source, a)
                    continue
                case Reshape():
                    give(node.inputs[0], a.reshape(len(a), *nodes[node.inputs[0]].shape), passed)
                    continue
                case Permute():
                    give(node.inputs[0], node.adjoint(a), passed)
                    continue
                case _:
                    raise UnsupportedError("no linear bound is known", place=f"node '{node.name}' ({node.op})")
            constant = constant + added
            scale = scale + added.abs()
            steps += 1
        return rounding.total(constant, error, scale, steps) if rounded else constant, reached


def _norm(a: Tensor | Window) -> Tensor:
    if isinstance(a, Window):
        a = a.values
    return a.abs().flatten(1).sum(1)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).flatten(1).sum(1)


def _halves(a: Tensor) -> tuple[Tensor, Tensor]:
    """max(a, 0) and min(a, 0). A mask and torch.where take ten times as long."""
    return a.clamp(min=0), a.clamp(max=0)


def _of(lines: Tensor, sample: Tensor | None) -> Tensor:
    """What belongs to each row: that of its sample, or, without samples, what is the rows' own already."""
    return lines if sample is None else lines.index_select(0, sample)


def _dots(positive: Tensor, negative: Tensor, lower: Tensor, upper: Tensor, sample: Tensor | None) -> Tensor:
    """positive·lower + negative·upper, the last two being those of each row."""
    return _dot(positive, _of(lower, sample)) + _dot(negative, _of(upper, sample))


def both_signs(
    network: Network, index: int, neuron: Tensor, like: Tensor
) -> tuple[int, Tensor | Window, Tensor | None]:
    """The neurons of node ``index``, then their negatives, as rows of a target node, and constants; typed ``like``.

    A neuron of a linear layer is its row of the weights, one of an image a window of one point.
    """
    node = network.nodes[index]
    if isinstance(node, Linear) and len(node.shape) == 1 and not node.weight_error:
        weight, bias = node.weight.index_select(0, neuron), node.bias.index_select(0, neuron)
        return node.inputs[0], torch.cat([weight, -weight]), torch.cat([bias, -bias])
    sign = torch.cat([like.new_ones(len(neuron)), -like.new_ones(len(neuron))])
    if isinstance(node, Conv2d | Scale | Add) and len(node.shape) == 3:
        return index, windows(node.shape, neuron.repeat(2), sign), None
    ones = like.new_zeros(2 * len(neuron), node.size)
    ones[torch.arange(len(sign)), neuron.repeat(2)] = sign
    return index, ones.reshape(-1, *node.shape), None


def chunks(count: int, network: Network, like: Tensor, memory: int, copies: int = _COPIES) -> Iterator[slice]:
    """Slices of ``count`` rows, so small that a chunk's coefficients stay within ``memory``."""
    widest = max(node.size for node in network.nodes)
    limit = min(memory, _CACHED) if like.device.type == "cpu" else memory
    size = max(1, limit // (widest * like.element_size() * copies))
    for start in range(0, count, size):
        yield slice(start, min(count, start + size))


def _box_shaped(network: Network, index: int) -> bool:
    """Whether the node's exact image of a box is a box, so that intervals can't be improved upon."""
    node = network.nodes[index]
    return isinstance(node, Input) or (
        isinstance(node, Scale | Reshape | Permute | Activation) and _box_shaped(network, node.inputs[0])
    )


def interval_is_exact(network: Network, index: int) -> bool:
    """Whether interval arithmetic bounds every neuron of the node exactly (one affine map on a box)."""
    node = network.nodes[index]
    if isinstance(node, Reshape | Permute | Scale):
        return interval_is_exact(network, node.inputs[0])
    return _box_shaped(network, index) or (isinstance(node, Affine) and _box_shaped(network, node.inputs[0]))


def relaxed(
    network: Network,
    box: Bounds,
    *,
    memory: int = MEMORY,
    stop: Callable[[], bool] | None = None,
    search: Search | None = None,
    most: int | None = None,
) -> Relaxation:
    """A relaxation whose unstable neurons' pre-activations have been bounded by CROWN (``preactivation_bounds``).

    With ``most``, a layer of which more neurons are unstable keeps its intervals, sample by sample: a box in which
    nearly everything is unstable is bounded badly whatever it costs.
    """
    relaxation = Relaxation(network, box)

    def bound(index: int, interval: Bounds, search: Search | None) -> Bounds:
        """The interval, with every unstable neuron's two sides bounded anew."""
        activation = network.nodes[index]
        chosen = unstable(activation, interval).flatten(1)
        if most is not None:
            chosen = chosen & (chosen.sum(1, keepdim=True) <= most)
        pairs = chosen.nonzero()
        lower, upper = interval.lower.flatten(1).clone(), interval.upper.flatten(1).clone()
        # Windows take a fraction of the memory of whole rows.
        copies = 2 * _COPIES if search is not None or len(interval.lower.shape) != 4 else max(1, _COPIES // 2)
        for part in chunks(len(pairs), network, lower, memory, copies):
            if stop is not None and stop():
                break
            sample, neuron = pairs[part].unbind(1)
            count = len(sample)
            target, rows, constant = both_signs(network, activation.inputs[0], neuron, lower)
            if search is None:
                found = relaxation.lower(target, rows, sample.repeat(2), constant=constant)[0]
            else:
                whole = rows.dense(network.nodes[target].shape) if isinstance(rows, Window) else rows
                found = search(relaxation, target, whole, sample.repeat(2), constant)
            lower[sample, neuron] = torch.maximum(lower[sample, neuron], found[:count])
            upper[sample, neuron] = torch.minimum(upper[sample, neuron], -found[count:])
        return Bounds(lower.reshape(interval.lower.shape), upper.reshape(interval.upper.shape))

    def tighten(index: int, interval: Bounds) -> Bounds:
        if interval_is_exact(network, network.nodes[index].inputs[0]):
            return interval
        tight = bound(index, interval, None)
        return tight if search is None else bound(index, tight, search)

    relaxation.advance(len(network.nodes) - 1, tighten)
    return relaxation


def preactivation_bounds(
    network: Network,
    box: Bounds,
    *,
    memory: int = MEMORY,
    stop: Callable[[], bool] | None = None,
    search: Search | None = None,
) -> dict[int, Bounds]:
    """CROWN bounds of every activation's input, by activation node index, each (batch, *shape).

    Neurons that intervals already prove stable are not bounded again.

    Args:
        network: in the dtype and on the device of ``box``.
        box: the inputs, shaped (batch, *input_shape).
        memory: a limit in bytes on the coefficients held at once.
        stop: asked between chunks; once it returns True the rest keeps its interval bounds, which are looser
            and just as sound.
        search: better bounds for the neurons that CROWN leaves unstable (``alpha.ascend``).
    """
    return relaxed(network, box, memory=memory, stop=stop, search=search).pre


def linear_lower_bounds(
    network: Network,
    box: Bounds,
    preactivations: Mapping[int, Bounds],
    matrix: Tensor,
    sample: Tensor,
    *,
    intervals: bool = False,
    memory: int = MEMORY,
    stop: Callable[[], bool] | None = None,
) -> Tensor:
    """CROWN lower bounds of matrix·y over the box, y being the network's flattened output.

    Args:
        network: in the dtype and on the device of ``box``.
        box: the inputs, shaped (batch, *input_shape).
        preactivations: bounds of every activation's input, as ``preactivation_bounds`` returns.
        matrix: (R, outputs).
        sample: (R,) the sample of each row.
        intervals: interval bounds instead, the rows merged into the network's last affine map.
        memory: a limit in bytes on the coefficients held at once.
        stop: asked between chunks; once it returns True the remaining rows are left at −inf.

    Returns:
        (R,), rounding accounted for.
    """
    relaxation = Relaxation(network, box, preactivations)
    last = len(network.nodes) - 1
    relaxation.advance(last)
    rows = matrix.to(box.lower).reshape(len(matrix), *network.output_shape)
    parts = []
    for part in chunks(len(rows), network, rows, memory):
        if stop is not None and stop():
            parts.append(rows.new_full((part.stop - part.start,), -math.inf))
        else:
            parts.append(relaxation.lower(last, rows[part], sample[part], intervals=intervals)[0])
    return torch.cat(parts) if parts else rows.new_zeros(0)
