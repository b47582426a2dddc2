"""Linear bound propagation (CROWN): backward substitution of linear relaxations, in batches of rows.

Source: Zhang et al., Efficient Neural Network Robustness Certification with General Activation Functions,
arXiv 1811.00866, theorem 3.2; for general graphs Xu et al., arXiv 2002.12920. For a row c of a target node,

    min over the box of c·y  ≥  A·x + constant,   x in the box,

is found by walking from the target back to the input: affine nodes pull A back by their adjoint, an activation
replaces A⁺ by A⁺·(lower line) and A⁻ by A⁻·(upper line). An upper bound is the negated lower bound of −c.

Rows come in groups of equal size, each of one sample of the batch, so that what is known of a sample is held once for
all its rows (``groups``): a bound is wanted of other neurons, and of another number of them, in every sample. Rounding
errors are collected beside the constants, as ‖A‖₁ times a per-sample error unit of each node (``rounding``), and
subtracted at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from verifiable_relu.bounds import rounding
from verifiable_relu.bounds.activations import relax, row, unstable
from verifiable_relu.bounds.interval import intersect, largest, node_image
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

_CACHED = 1 << 24
"""The same on a CPU, where chunks that stay in the cache, and in memory that was touched before, go faster."""

_SINGLE = 192
"""So many terms, of the first convolutions together, may be summed in float32: these are where the time goes, and where
it moves bounds least, in the networks of ``benchmarks/bounds_speed.py`` by at most 1e-4 of their width."""

_ALIVE = 0.75
"""Up to this share of neurons that are not inactive, rows are worth restricting to them."""

_FULL = 2
"""From windows of this part of an image on, rows of whole images are faster: nothing has to be looked up row by row."""

_WORTH = 1 << 18
"""From so many coefficients on, two passes are worth it, of which the second has fewer rows."""

_COPIES = 6
"""How many arrays of a chunk's coefficients are alive at once at the widest node."""


Search = Callable[["Relaxation", int, Tensor, Tensor, Tensor | None], Tensor]
"""Bounds rows·y + constant from below: of (relaxation, target, rows, sample, constant), as ``Relaxation.lower``."""


@dataclass(frozen=True)
class _Step:
    """How rows A of an activation's output are replaced by rows of its input, each (batch, neurons).

    A⁺·(lower line) + A⁻·(upper line) is A·(lower line) + A⁻·(upper line − lower line): slopes ``low`` and ``rise``,
    offsets ``floor`` and ``lift``. ``floor`` is None where all lower lines go through the origin.
    """

    low: Tensor
    rise: Tensor
    floor: Tensor | None
    lift: Tensor

    @staticmethod
    def of(node: Activation, lines: Lines) -> _Step:
        """The same lines."""
        through = isinstance(node, Relu)
        step = _Step(
            lines.lower_slope,
            lines.upper_slope - lines.lower_slope,
            None if through else lines.lower_offset,
            lines.upper_offset if through else lines.upper_offset - lines.lower_offset,
        )
        return step.map(lambda t: t.flatten(1))

    def map(self, change: Callable[[Tensor], Tensor]) -> _Step:
        """With ``change`` applied to each."""
        floor = None if self.floor is None else change(self.floor)
        return _Step(change(self.low), change(self.rise), floor, change(self.lift))


@dataclass(frozen=True)
class _Single:
    """What pulling rows A back through a convolution in float32 takes (``rounding.backward_single``).

    Attributes:
        center: c of the box of inputs, (batch, inputs).
        image: W·c + b, (batch, neurons).
        error: of one unit of |A|, (batch, neurons), and of any row, (batch,), beside ``Relaxation.error_unit``.
    """

    center: Tensor
    image: Tensor
    error: tuple[Tensor, Tensor]

    @staticmethod
    def of(node: Conv2d, box: Bounds) -> _Single:
        """Over a box of the convolution's inputs."""
        center = torch.lerp(box.lower, box.upper, 0.5)
        spread = node.absolute(rounding.radius(box, center))
        per_entry, lost = rounding.backward_single(node, spread, largest(box), center[0].numel())
        return _Single(center.flatten(1), node.forward(center).flatten(1), (per_entry.flatten(1), lost))


@dataclass(frozen=True)
class _Alive:
    """The neurons of a ReLU that are not inactive, sample by sample, with the linear map W·x + b before it.

    Of the other neurons no coefficient is passed on. What b adds to a row is part of ``lift`` and ``floor``.

    Attributes:
        numbers: (batch, most) their numbers; what lies beyond a sample's count is to be ignored, and has a step of 0.
        counts: for each sample.
        step: theirs, (batch, most) each.
        weight: their rows of W, (batch, most, inputs), where there is one sample.
    """

    numbers: Tensor
    counts: list[int]
    step: _Step
    weight: Tensor | None

    @staticmethod
    def of(pre: Bounds, step: _Step, linear: Linear) -> _Alive:
        """From bounds and step of all neurons, (batch, neurons)."""
        bias = linear.bias
        step = _Step(step.low, step.rise, step.low * bias, torch.addcmul(step.lift, step.rise, bias))
        if len(pre.upper) == 1:
            numbers = (~(pre.upper <= 0)).nonzero()[:, 1][None]
            chosen = step.map(lambda t: t.index_select(1, numbers[0]))
            return _Alive(numbers, [numbers.shape[1]], chosen, linear.weight[None, numbers[0]])
        sample, neuron = (~(pre.upper <= 0)).nonzero().unbind(1)
        counts = torch.bincount(sample, minlength=len(pre.upper))
        place = torch.arange(len(sample), device=sample.device) - (counts.cumsum(0) - counts)[sample]
        most = int(counts.max())
        numbers = sample.new_zeros(len(counts), most)
        numbers[sample, place] = neuron
        there = torch.arange(most, device=sample.device) < counts[:, None]
        return _Alive(numbers, counts.tolist(), step.map(lambda t: t.gather(1, numbers) * there), None)

    def restrict(self, a: Tensor, sample: Tensor, linear: Linear) -> tuple[Tensor, _Step, Tensor]:
        """Coefficients (groups, each, most) of those given of all neurons, steps (groups, most) and rows of W."""
        if self.weight is not None and len(sample) == 1:
            return a.index_select(2, self.numbers[0]), self.step, self.weight
        most = max((self.counts[i] for i in sample.tolist()), default=0)
        numbers = self.numbers[sample, :most]
        chosen = a.gather(2, numbers[:, None].expand(-1, a.shape[1], -1))
        return chosen, self.step.map(lambda t: t[sample, :most]), linear.weight[numbers]


class Relaxation:
    """A network over a batch of boxes: each node's bounds and each activation's lines, made as they are needed.

    Args:
        network: in the dtype and on the device of ``box``.
        box: the inputs, shaped (batch, *input_shape).
        known: bounds of activation nodes' inputs, by activation node index, to be used as well.

    Attributes:
        entry: the node at which rows end (``entry``).
    """

    def __init__(self, network: Network, box: Bounds, known: Mapping[int, Bounds] | None = None) -> None:
        self.network = network
        self.entry = entry(network)
        self.values: list[Bounds] = [box]
        self.pre: dict[int, Bounds] = {}
        self._known = known or {}
        self._in_single = in_single(network, box)
        self._lines: dict[int, Lines] = {}
        self._steps: dict[int, _Step] = {}
        self._living: dict[int, _Alive | None] = {}
        self._singles: dict[int, _Single | None] = {}
        self._balls: dict[tuple[int, bool], tuple[Tensor, Tensor]] = {}
        self._errors: dict[int, Tensor] = {}
        self._most: dict[int, Tensor] = {}
        self._lost: dict[tuple[int, bool], Tensor] = {}
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

    def _step(self, index: int) -> _Step:
        """The lines of activation ``index`` as ``lower`` uses them."""
        if index not in self._steps:
            node = self.network.nodes[index]
            assert isinstance(node, Activation)
            self._steps[index] = _Step.of(node, self.lines(index))
        return self._steps[index]

    def _alive(self, index: int) -> _Alive | None:
        """What of activation ``index`` is alive, where the linear map before it is worth restricting to that."""
        if index not in self._living:
            node, found = self.network.nodes[index], None
            if isinstance(node, Relu) and self._restricts(node.inputs[0]):
                linear = self.network.nodes[node.inputs[0]]
                most = int((~(self.pre[index].upper <= 0)).sum(1).amax())
                if most <= _ALIVE * node.size:
                    assert isinstance(linear, Linear)
                    found = _Alive.of(self.pre[index], self._step(index), linear)
            self._living[index] = found
        return self._living[index]

    def _restricts(self, index: int) -> bool:
        """Whether the node is a dense linear map that one node alone uses."""
        node = self.network.nodes[index]
        return isinstance(node, Linear) and len(node.shape) == 1 and not node.sparse and self.network.uses[index] == 1

    def _single(self, index: int) -> _Single | None:
        """For a convolution that rows are pulled back through in float32."""
        if index not in self._singles:
            node, found = self.network.nodes[index], None
            if isinstance(node, Conv2d) and index in self._in_single:
                found = _Single.of(node, self.values[node.inputs[0]])
            self._singles[index] = found
        return self._singles[index]

    def ball(self, index: int, rounded: bool = False) -> tuple[Tensor, Tensor]:
        """Centre c and radius r of the box of node ``index``, flattened: (batch, size).

        If ``rounded``, r is so large that A·c − |A|·r, computed, is a lower bound of A·x, up to underflow.
        """
        if (index, rounded) not in self._balls:
            self.advance(index)
            box = Bounds(self.values[index].lower.flatten(1), self.values[index].upper.flatten(1))
            center, radius = torch.lerp(box.lower, box.upper, 0.5), (box.upper - box.lower) / 2
            if rounded:
                radius = radius + rounding.concretise(box.lower.shape[1], largest(box))[:, None]
            self._balls[index, rounded] = center, radius
        return self._balls[index, rounded]

    def _table(self, grid: Grid, index: int, name: str, values: Tensor) -> Tensor:
        """A grid's windows of some values of node ``index``, kept for the next chunk of rows."""
        key = (grid, index, name)
        if key not in self._tables:
            self._tables[key] = grid.table(values)
        return self._tables[key]

    def _windowed(
        self, a: Window, index: int, sample: Tensor, rounded: bool
    ) -> tuple[Tensor, Window | None, Tensor | None] | None:
        """One step of ``lower`` within windows: what is added to the constants, the rows before the node, an error.

        None where the node does not act on windows. ``sample`` (rows,) is that of each row. The error is that of
        rounding, where the node's unit does not cover it.
        """
        node, grid = self.network.nodes[index], a.grid
        if len(node.shape) != 3 or _FULL * math.prod(grid.size) > math.prod(node.shape[1:]):
            return None

        def at(name: str, values: Tensor, of: Tensor | None = sample) -> Tensor:
            return a.of(self._table(grid, index, name, values), of)

        def dot(x: Tensor, y: Tensor) -> Tensor:
            return (x * y).flatten(1).sum(1)

        def cleaned() -> Tensor:
            """The coefficients, zero beyond the edges."""
            if a.clean:
                return a.values
            return a.values * at("inside", a.values.new_ones(1, *node.shape), None)

        match node:
            case _ if index == self.entry:
                center, radius = (t.unflatten(1, node.shape) for t in self.ball(index, rounded))
                name = "radius" if rounded else "exact radius"
                return dot(a.values, at("center", center)) - dot(a.values.abs(), at(name, radius)), None, None
            case Activation():
                step = self._step(index).map(lambda t: t.unflatten(1, node.shape))
                negative = a.values.clamp(max=0)
                added = dot(negative, at("lift", step.lift))
                if step.floor is not None:
                    added = added + dot(a.values, at("floor", step.floor))
                values = (a.values * at("low", step.low)).addcmul_(negative, at("rise", step.rise))
                return added, Window(values, a.point, grid, clean=True), None
            case Conv2d() if node.plain:
                whole = Window(cleaned(), a.point, grid, clean=True)
                if whole.small(node) or (single := self._single(index)) is None:
                    return whole.values.sum((2, 3)) @ node.bias, whole.before(node), None
                before, source = whole.before(node, single=True), node.inputs[0]
                center = single.center.unflatten(1, self.network.nodes[source].shape)
                image, error = (t.unflatten(1, node.shape) for t in (single.image, single.error[0]))
                added = dot(whole.values, at("image", image))
                added = added - dot(before.values, before.of(self._table(before.grid, index, "input", center), sample))
                lost = dot(whole.values.abs(), at("error", error)) + single.error[1][sample] if rounded else None
                return added, before, lost
            case Scale():
                values = cleaned()
                added = dot(values, at("offset", node.offset().expand(1, *node.shape), None))
                values = values * at("scale", node.scale.expand(1, *node.shape), None)
                return added, Window(values, a.point, grid, clean=True), None
        return None

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

    def error_unit(self, index: int) -> Tensor:
        """(batch,) rounding error per unit of ‖A‖₁ when rows are pulled back through node ``index``."""
        if index not in self._errors:
            node = self.network.nodes[index]
            if isinstance(node, Affine):
                unit = rounding.backward_affine(node, self._largest(node.inputs[0]))
            else:
                assert isinstance(node, Activation)
                unit = rounding.backward_activation(node, self.pre[index], self.lines(index))
            self._errors[index] = unit
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
        record: dict[int, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Lower bounds of rows·y + constant over the box, y being the value of node ``target``.

        Args:
            target: the node; node bounds must have been advanced to it.
            rows: (R, *shape of the target), group after group.
            sample: (G,) the sample of each group of R/G rows; with G = R, of each row.
            constant: (R,), by default 0.
            intervals: go back only to the last activations and take their intervals there, instead of relaxing
                them: interval bound propagation with the rows merged into the last affine map.
            lines: for some activations, by index, each row's own lines (``chosen_lines``), (R, *shape), with G = R.
            rounded: whether to account for rounding. Without, the values may steer a search and prove nothing.
            record: takes the coefficients of the activations that have their own lines, (R, neurons), by index.

        Returns:
            (R,) lower bounds; if ``rounded``, NaN or −inf where arithmetic broke down and never too high.
            (R, input_size) the coefficients A of ``entry`` in the linear lower bound; None if rows ended elsewhere.
        """
        nodes = self.network.nodes
        groups, each = len(sample), len(rows) // max(1, len(sample))
        every: Tensor | None = None

        def whole(a: Tensor | Window, index: int) -> Tensor:
            """Dense coefficients of a node, (groups, each, neurons)."""
            if isinstance(a, Window):
                a = a.dense(nodes[index].shape)
            return a.reshape(groups, each, nodes[index].size)

        def mine(values: Tensor) -> Tensor:
            """A value of each sample as one of each group, (groups, 1)."""
            return _of(values, sample)[:, None]

        terms = [] if constant is None else [constant.reshape(groups, each)]
        errors: list[Tensor] = []
        reached: Tensor | None = None
        coefficients: dict[int, Tensor | Window] = {target: rows if isinstance(rows, Window) else whole(rows, target)}
        norms: dict[int, Tensor] = {}
        passed: list[int] = []

        def give(index: int, a: Tensor | Window, norm: Tensor | None) -> None:
            """Rows of node ``index``, and upper bounds of their ‖A‖₁ if these are known."""
            if index in coefficients:
                other = coefficients[index]
                both = a.plus(other) if isinstance(a, Window) and isinstance(other, Window) else None
                a, norm = whole(a, index) + whole(other, index) if both is None else both, None
                norms.pop(index, None)
                if rounded:
                    errors.append(self._norm(a, groups) * mine(rounding.accumulate(self._largest(index))))
            coefficients[index] = a
            if norm is not None:
                norms[index] = norm

        def unit(index: int, own: Lines | None) -> Tensor:
            """The rounding error of one unit of ‖A‖₁ at a node, (groups, 1)."""
            if own is None:
                return mine(self.error_unit(index))
            node, pre = nodes[index], self.pre[index]
            assert isinstance(node, Activation)
            bounds = Bounds(_of(pre.lower, sample), _of(pre.upper, sample))
            return rounding.backward_activation(node, bounds, own)[:, None]

        for index in range(target, -1, -1):
            if index not in coefficients:
                continue
            a, node, norm = coefficients.pop(index), nodes[index], norms.get(index)
            ends = index == self.entry or (intervals and isinstance(node, Activation))
            own = lines.get(index) if lines is not None and not ends else None
            if not ends:
                passed.append(index)
            if isinstance(node, Add):
                for source in node.inputs:
                    give(source, a, norm)
                continue
            if isinstance(node, Reshape) and not ends:
                give(node.inputs[0], whole(a, index), norm)
                continue
            if isinstance(node, Permute) and not ends:
                back = node.adjoint(whole(a, index).reshape(-1, *node.shape))
                give(node.inputs[0], back.reshape(groups, each, -1), norm)
                continue
            if isinstance(a, Window):
                if every is None:
                    every = sample if each == 1 else sample.repeat_interleave(each)
                stepped = self._windowed(a, index, every, rounded) if own is None else None
                if stepped is not None:
                    added, before, lost = stepped[0].reshape(groups, each), *stepped[1:]
                    if rounded and before is not None:
                        norm = self._norm(a, groups) if norm is None else norm
                        errors.append(norm * unit(index, own))
                        if lost is not None:
                            errors.append(lost.reshape(groups, each))
                    if before is not None:
                        give(node.inputs[0], before, norm if isinstance(node, Relu) else None)
                    terms.append(added)
                    continue
                a = whole(a, index)
            if rounded and not ends:
                norm = self._norm(a, groups) if norm is None else norm
                errors.append(norm * unit(index, own))
            match node:
                case _ if ends:
                    center, radius = (_of(t, sample) for t in self.ball(index, rounded))
                    added = _dot(a, center) - _dot(a.abs(), radius)
                    if index == self.entry:
                        reached = a.flatten(0, 1)
                case Conv2d() if (single := self._single(index)) is not None:
                    shape = nodes[node.inputs[0]].shape
                    back = node.adjoint(a.reshape(-1, *node.shape), shape, single=True).reshape(groups, each, -1)
                    added = _dot(a, _of(single.image, sample)) - _dot(back, _of(single.center, sample))
                    if rounded:
                        per_entry, lost = (_of(t, sample) for t in single.error)
                        errors += [_dot(a.abs(), per_entry), lost[:, None].expand(groups, each)]
                    give(node.inputs[0], back, None)
                case Affine():
                    added = a @ node.offset().expand(node.shape).flatten()
                    shape = nodes[node.inputs[0]].shape
                    back = node.adjoint(a if len(node.shape) == 1 else a.reshape(-1, *node.shape), shape)
                    give(node.inputs[0], back.reshape(groups, each, -1), None)
                case Activation() if own is None and (alive := self._alive(index)) is not None:
                    linear = nodes[node.inputs[0]]
                    assert isinstance(linear, Linear)
                    passed.append(node.inputs[0])
                    if norm is not None:
                        errors.append(norm * unit(node.inputs[0], own))
                    a, step, weight = alive.restrict(a, sample, linear)
                    negative = a.clamp(max=0)
                    assert step.floor is not None
                    added = _dot(negative, step.lift) + _dot(a, step.floor)
                    a = (a * step.low[:, None]).addcmul_(negative, step.rise[:, None])
                    give(linear.inputs[0], a @ weight, None)
                case Activation():
                    step = self._step(index).map(lambda t: _of(t, sample)) if own is None else _Step.of(node, own)
                    if record is not None and own is not None:
                        record[index] = a.flatten(0, 1)
                    negative = a.clamp(max=0)
                    added = _dot(negative, step.lift)
                    if step.floor is not None:
                        added = added + _dot(a, step.floor)
                    a = (a * step.low[:, None]).addcmul_(negative, step.rise[:, None])
                    # Slopes of at most 1 let no coefficient grow.
                    give(node.inputs[0], a, norm if isinstance(node, Relu) else None)
                case _:
                    raise UnsupportedError("no linear bound is known", place=f"node '{node.name}' ({node.op})")
            terms.append(added)
        if rounded:
            errors.append(mine(self._underflow(target, intervals, passed)).expand(groups, each))
        found = rounding.total(torch.stack(terms), errors) if rounded else sum(terms[1:], terms[0])
        return found.flatten(), reached

    def _largest(self, index: int) -> Tensor:
        """(batch,) the largest absolute value that node ``index`` may have."""
        if index not in self._most:
            self._most[index] = largest(self.values[index])
        return self._most[index]

    def _underflow(self, target: int, intervals: bool, passed: Sequence[int]) -> Tensor:
        """(batch,) what underflow may change in a row of ``target`` on its way back through the nodes ``passed``."""
        if (target, intervals) not in self._lost:
            nodes = [self.network.nodes[i] for i in passed]
            lost = [rounding.underflow(node, self._largest(node.inputs[0])) for node in nodes]
            self._lost[target, intervals] = sum(lost, self.values[0].lower.new_zeros(self.samples))
        return self._lost[target, intervals]

    def of_input(self, rows: Tensor) -> Tensor:
        """Coefficients of the input, (R, input_size), from those of node ``entry``."""
        for index in range(self.entry, 0, -1):
            node, shape = self.network.nodes[index], self.network.nodes[self.network.nodes[index].inputs[0]].shape
            rows = rows.reshape(-1, *node.shape)
            if isinstance(node, Scale):
                rows = node.adjoint(rows, shape)
            elif isinstance(node, Permute):
                rows = node.adjoint(rows)
        return rows.flatten(1)

    @staticmethod
    def _norm(a: Tensor | Window, groups: int) -> Tensor:
        """‖A‖₁ of rows: (groups, each)."""
        if isinstance(a, Window):
            return a.values.abs().flatten(1).sum(1).reshape(groups, -1)
        return a.abs().sum(2)

    def outputs(
        self,
        matrix: Tensor,
        sample: Tensor,
        *,
        intervals: bool = False,
        memory: int = MEMORY,
        stop: Callable[[], bool] | None = None,
    ) -> Tensor:
        """(R,) lower bounds of matrix·y, y being the flattened output (``linear_lower_bounds``)."""
        network = self.network
        last = len(network.nodes) - 1
        self.advance(last)
        rows = matrix.to(self.values[0].lower).reshape(len(matrix), *network.output_shape)
        parts: list[Tensor] = []
        order: list[Tensor] = []
        for number, mine in groups(sample, chunk_size(network, rows, memory), self.samples):
            order.append(number.flatten())
            if stop is not None and stop():
                parts.append(rows.new_full((number.numel(),), -math.inf))
            else:
                parts.append(self.lower(last, rows[order[-1]], mine, intervals=intervals)[0])
        if not parts:
            return rows.new_zeros(0)
        found = torch.cat(parts)
        return found.new_empty(len(rows)).index_copy(0, torch.cat(order), found)


def _dot(a: Tensor, values: Tensor) -> Tensor:
    """a·values group by group: of (groups, each, n) and (groups, n), (groups, each)."""
    if len(values) == 1:
        return F.linear(a, values).squeeze(2)
    if a.shape[1] == 1:
        return (a.squeeze(1) * values).sum(1, keepdim=True)
    return (values[:, None] @ a.mT).squeeze(1)


def _of(values: Tensor, sample: Tensor) -> Tensor:
    """Those of the samples named, one after another."""
    if len(values) == 1 == len(sample):
        return values
    return values.index_select(0, sample)


def signed(network: Network, index: int, neuron: Tensor, sign: Tensor) -> tuple[int, Tensor | Window, Tensor | None]:
    """sign·(neurons of node ``index``) as rows of a target node, and constants, typed like ``sign``.

    ``neuron`` and ``sign``, ±1, are (R,). A neuron of a linear layer is its row of the weights, one of an image a
    window of one point.
    """
    node = network.nodes[index]
    if isinstance(node, Linear) and len(node.shape) == 1 and not node.weight_error:
        return node.inputs[0], node.weight[neuron] * sign[:, None], node.bias[neuron] * sign
    if isinstance(node, Conv2d | Scale | Add) and len(node.shape) == 3:
        return index, windows(node.shape, neuron, sign), None
    ones = sign.new_zeros(len(neuron), node.size)
    ones[torch.arange(len(neuron), device=sign.device), neuron] = sign
    return index, ones.reshape(-1, *node.shape), None


def chunk_size(network: Network, like: Tensor, memory: int, copies: int = _COPIES) -> int:
    """How many rows may be propagated at once, for their coefficients to stay within ``memory``."""
    widest = max(node.size for node in network.nodes)
    limit = min(memory, _CACHED) if like.device.type == "cpu" else memory
    return max(1, limit // (widest * like.element_size() * copies))


def groups(sample: Tensor, size: int, samples: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows in chunks of at most ``size``, each of some groups of equal size.

    Args:
        sample: (R,) the sample of each row, in any order.
        size: at least 1.
        samples: how many there are.

    Yields:
        (groups, each) numbers of rows, a group's last one repeated where it has too few, and (groups,) its sample.
    """
    if samples == 1:
        for start in range(0, len(sample), size):
            yield torch.arange(start, min(start + size, len(sample)), device=sample.device)[None], sample[:1]
        return
    order = sample.argsort(stable=True)
    counts = torch.bincount(sample).tolist()
    begin, pieces = 0, []
    for which, count in enumerate(counts):
        parts = -(-count // size)
        for part in range(parts):
            first, end = count * part // parts, count * (part + 1) // parts
            pieces.append((end - first, begin + first, which))
        begin += count
    # Neighbours of nearly equal size leave little to repeat.
    pieces.sort()
    while pieces:
        taken = 1
        while taken < len(pieces) and (taken + 1) * pieces[taken][0] <= size:
            taken += 1
        lengths, starts, mine = torch.tensor(pieces[:taken], device=sample.device).unbind(1)
        del pieces[:taken]
        place = torch.minimum(torch.arange(int(lengths[-1]), device=sample.device), lengths[:, None] - 1)
        yield order[starts[:, None] + place], mine


def in_single(network: Network, box: Bounds) -> frozenset[int]:
    """The convolutions that rows are pulled back through in float32, by index: the first of the network."""
    found, terms = set(), 0
    for index, node in enumerate(network.nodes):
        if isinstance(node, Conv2d):
            terms += node.adjoint_terms
            if terms <= _SINGLE and rounding.single(node, box.lower):
                found.add(index)
    return frozenset(found)


def entry(network: Network) -> int:
    """The last node up to which a network only scales, shifts and reorders its inputs: a box there is a box still."""
    index = 0
    while index + 1 < len(network.nodes) and network.uses[index] == 1:
        after = network.nodes[index + 1]
        if after.inputs != (index,) or not isinstance(after, Scale | Reshape | Permute):
            break
        index += 1
    return index


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
        """The interval, with unstable neurons bounded anew.

        Of a ReLU that turns out inactive the lower bound is used by nobody: in samples with many unstable neurons,
        those that are mostly negative are bounded from above first.
        """
        activation = network.nodes[index]
        chosen = unstable(activation, interval).flatten(1)
        if most is not None:
            chosen = chosen & (chosen.sum(1, keepdim=True) <= most)
        # Lower bounds of every neuron and of its negative.
        both = torch.stack([interval.lower.flatten(1), -interval.upper.flatten(1)])
        # Windows take part of the memory of whole rows.
        copies = _COPIES if search is not None or len(interval.lower.shape) != 4 else _COPIES // 3
        size = chunk_size(network, both, memory, copies)

        def side(wanted: Tensor) -> None:
            """Bound what is wanted of ``both`` anew."""
            negative, sample, neuron = wanted.nonzero().unbind(1)
            for number, mine in groups(sample, size, relaxation.samples):
                if stop is not None and stop():
                    return
                part = number.flatten()
                at = negative[part], sample[part], neuron[part]
                target, rows, constant = signed(network, activation.inputs[0], at[2], (1 - 2 * at[0]).to(both))
                if search is None:
                    found = relaxation.lower(target, rows, mine, constant=constant)[0]
                else:
                    whole = rows.dense(network.nodes[target].shape) if isinstance(rows, Window) else rows
                    found = search(relaxation, target, whole, at[1], constant)
                both[at] = torch.maximum(both[at], found)

        many = _WORTH // sum(node.size for node in network.nodes[:index])
        later = chosen & (both[0] < both[1]) & (chosen.sum(1, keepdim=True) > many)
        if isinstance(activation, Relu) and bool(later.any()):
            side(torch.stack([chosen & ~later, chosen]))
            side(torch.stack([later & (both[1] < 0), torch.zeros_like(later)]))
        else:
            side(torch.stack([chosen, chosen]))
        return Bounds(both[0].reshape(interval.lower.shape), -both[1].reshape(interval.upper.shape))

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
    return relaxation.outputs(matrix, sample, intervals=intervals, memory=memory, stop=stop)
