"""Linear bound propagation (CROWN): backward substitution of linear relaxations, in batches of rows.

Source: Zhang et al., Efficient Neural Network Robustness Certification with General Activation Functions,
arXiv 1811.00866, theorem 3.2; for general graphs Xu et al., arXiv 2002.12920. For a row c of a target node,

    min over the box of c·y  ≥  A·x + constant,   x in the box,

is found by walking from the target back to the input: affine nodes pull A back by their adjoint, an activation
replaces A⁺ by A⁺·(lower line) and A⁻ by A⁻·(upper line). An upper bound is the negated lower bound of −c.

Rows come in groups of equal size, each of one sample of the batch, so that what is known of a sample is held once for
all its rows (``groups``): a bound is wanted of other neurons, and of another number of them, in every sample. They are
propagated about a point of every node (``reference``), and what rounding may change is part of the lines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from verifiable_relu.bounds import rounding
from verifiable_relu.bounds.activations import relax, row, unstable
from verifiable_relu.bounds.interval import affine_image, intersect, largest, node_image
from verifiable_relu.bounds.reference import Reference, border
from verifiable_relu.bounds.types import Bounds, Lines
from verifiable_relu.bounds.window import Grid, Window, kernels, windows
from verifiable_relu.errors import UnsupportedError
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import (
    Activation,
    Add,
    Affine,
    Conv2d,
    Input,
    Linear,
    Permute,
    Relu,
    Reshape,
    Scale,
    Shape,
    folded,
    weight_like,
)

MEMORY = 1 << 30
"""Default limit, in bytes, on the coefficients held at once while a chunk of rows is propagated."""

_CACHED = 1 << 24
"""The same on a CPU, where chunks that stay in the cache, and in memory that was touched before, go faster."""

_ALIVE = 0.75
"""Up to this share of neurons that are not inactive, rows are worth restricting to them."""

_FULL = 2
"""From windows of this part of an image on, rows of whole images are faster: nothing has to be looked up row by row."""

_MULTIPLE = 8
"""Libraries prepare a convolution anew for every number of rows: so there are fewer of these."""

_DIGITS = 5
"""After so many binary digits the number of a group's rows has zeros alone, for the same reason."""

_WORTH = 1 << 18
"""From so many coefficients on, two passes are worth it, of which the second has fewer rows."""

_LITTLE = 64
"""From so many times as much work for bounds of neurons on, rows of outputs are cheap enough for float64."""

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

    def single(self, depth: int) -> _Step:
        """In float32, where products take part in so many sums."""
        assert self.floor is not None
        lift, floor = rounding.summed_single(self.lift, self.floor, depth)
        return replace(self, lift=lift, floor=floor).map(lambda t: t.float())

    @cached_property
    def _slopes(self) -> tuple[Tensor, Tensor]:
        """``low`` and ``rise`` for every row of a sample, (batch, 1, neurons)."""
        return self.low.unsqueeze(1), self.rise.unsqueeze(1)

    def back(self, a: Tensor, single: bool = False) -> tuple[Tensor, Tensor]:
        """Coefficients before the activation of those after it, (groups, each, neurons), and what their constants are.

        ``single``: of those in float32, whose offsets are summed in float32.
        """
        (low, rise), negative = self._slopes, a.clamp(max=0)
        before = (a * low).addcmul_(negative, rise)
        if single:
            assert self.floor is not None
            return before, _sum(negative.mul_(self.lift.unsqueeze(1)).addcmul_(a, self.floor.unsqueeze(1)), 1)
        return before, _dot(negative, self.lift, None if self.floor is None else (a, self.floor))


@dataclass(frozen=True)
class _Alive:
    """The neurons of a ReLU that are not inactive, sample by sample, with the linear map W·x + b before it.

    Of the other neurons no coefficient is passed on.

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
    def of(places: Tensor, samples: int, step: _Step, weight: Tensor) -> _Alive:
        """From the sample and the number of each, in order, (n, 2), how many samples there are, and the step of all."""
        sample, neuron = places.unbind(1)
        if samples == 1:
            chosen = step.map(lambda t: t.index_select(1, neuron))
            return _Alive(neuron[None], [len(neuron)], chosen, weight.index_select(0, neuron)[None])
        counts = torch.bincount(sample, minlength=samples)
        place = torch.arange(len(sample), device=sample.device) - (counts.cumsum(0) - counts)[sample]
        most = int(counts.max())
        numbers = sample.new_zeros(len(counts), most)
        numbers[sample, place] = neuron
        there = torch.arange(most, device=sample.device) < counts[:, None]
        return _Alive(numbers, counts.tolist(), step.map(lambda t: t.gather(1, numbers) * there), None)

    def restrict(self, a: Tensor, sample: Tensor | None, weight: Tensor) -> tuple[Tensor, _Step, Tensor, Tensor]:
        """Coefficients (groups, each, most) of those given of all neurons, steps (groups, most), rows of W, numbers."""
        if self.weight is not None and a.shape[0] == 1:
            return a.index_select(2, self.numbers[0]), self.step, self.weight, self.numbers
        numbers, step = self.numbers, self.step
        if sample is not None:
            most = max((self.counts[i] for i in sample.tolist()), default=0)
            numbers, step = numbers[sample, :most], step.map(lambda t: t[sample, :most])
        chosen = a.gather(2, numbers[:, None].expand(-1, a.shape[1], -1))
        return chosen, step, weight[numbers], numbers


class Relaxation:
    """A network over a batch of boxes: each node's bounds and each activation's lines, made as they are needed.

    Args:
        network: in the dtype and on the device of ``box``.
        box: the inputs, shaped (batch, *input_shape).
        known: bounds of activation nodes' inputs, by activation node index, to be used as well.
        single: coefficients in float32 wherever its rounding is accounted for, of networks in float64 on a CPU: half
            the memory, and bounds wider, by the more the smaller the box is and the deeper a dense network.

    Attributes:
        entry: the node at which rows end (``entry``).
        samples: the size of the batch.
        rising: of ReLUs whose inputs rows have bounded, by index: where the lower line is z, not 0; (batch, *shape).
    """

    def __init__(
        self, network: Network, box: Bounds, known: Mapping[int, Bounds] | None = None, single: bool = False
    ) -> None:
        self.network = network
        self.single = single
        self.samples = len(box.lower)
        self.entry = entry(network)
        self.values: list[Bounds] = [box]
        self.pre: dict[int, Bounds] = {}
        self.rising: dict[int, Tensor] = {}
        self._intervals: dict[int, Bounds] = {}
        self._known = known or {}
        self._lines: dict[int, Lines] = {}
        self._steps: dict[tuple[int, bool, int], _Step] = {}
        self._living: dict[int, Tensor] = {}
        self._work = 0
        self._alive: dict[tuple[int, bool], _Alive | None] = {}
        self._between: dict[int, Tensor | None] = {}
        self._radii: dict[tuple[int, int], Tensor] = {}
        self._most: dict[int, Tensor] = {}
        self._ends: dict[int, tuple[Tensor, ...]] = {}
        self._cells: dict[int, Tensor] = {}
        self._tables: dict[tuple[Grid, Hashable], Tensor] = {}

    @cached_property
    def border(self) -> int:
        """The last node whose coefficients are taken in float32 (``reference.border``)."""
        return border(self.network, self.entry, self.single) if self.narrows else -1

    @cached_property
    def narrows(self) -> bool:
        """Whether coefficients may be taken in float32 where the values are not."""
        lower, upper = self.values[0].lower, self.values[0].upper
        return rounding.single(lower) and not (lower.requires_grad or upper.requires_grad)

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
                    self._intervals.setdefault(node.inputs[0], boxes[0])
                    boxes = [tighten(current, boxes[0])]
                    self.values[node.inputs[0]] = boxes[0]
                self.pre[current] = boxes[0]
            if not isinstance(node, Affine):
                self.values.append(node_image(node, boxes))
                continue
            source, about, most = node.inputs[0], None, None
            rows = tighten is not None or bool(self._known)
            # Rows will need these points.
            if rows and self.reference.centred(source):
                about = self.reference.point(source), self.reference.point(current)
            if rows or isinstance(self.network.nodes[source], Relu):
                most = self.largest(source)
            self.values.append(affine_image(node, boxes[0], most, about, self.narrows))

    def double(self) -> Relaxation:
        """The same bounds and lines, with coefficients in float64 alone."""
        other = Relaxation(self.network, self.values[0])
        other.values, other.pre, other.rising = self.values, self.pre, self.rising
        other._intervals, other._lines, other._living = self._intervals, self._lines, self._living
        other.border = -1
        return other

    def bounds(self, index: int) -> Bounds:
        """Those of node ``index``."""
        self.advance(index)
        return self.values[index]

    def interval(self, index: int) -> Bounds:
        """What intervals make of node ``index`` from the bounds of those before it."""
        return self._intervals.get(index, self.bounds(index))

    def lines(self, index: int) -> Lines:
        """The lines of activation ``index`` over its input's bounds."""
        if index not in self._lines:
            node = self.network.nodes[index]
            assert isinstance(node, Activation)
            lines = relax(node, self.pre[index])
            if index in self.rising:
                lines = replace(lines, lower_slope=self.rising[index].to(lines.lower_slope))
            self._lines[index] = lines
        return self._lines[index]

    @cached_property
    def reference(self) -> Reference:
        """The points about which rows are propagated."""
        return Reference(self)

    def step(self, index: int, rounded: bool, depth: int = 0) -> _Step:
        """The lines of activation ``index`` as ``lower`` uses them, outward if ``rounded``.

        ``depth``: how many sums a product with numbers of its output takes part in, in float32.
        """
        key = (index, rounded, depth)
        if key not in self._steps:
            node = self.network.nodes[index]
            assert isinstance(node, Activation)
            if depth:
                self._steps[key] = self.step(index, rounded).single(depth)
            else:
                lines = self.lines(index)
                self._steps[key] = self.outward(index, lines, None) if rounded else _Step.of(node, lines)
        return self._steps[key]

    def outward(self, index: int, lines: Lines, sample: Tensor | None) -> _Step:
        """Lines of activation ``index`` about its points, moved outward by what rounding may change.

        Those of every sample, ``lines``; or rows' own, of the samples named.
        """
        node, reference = self.network.nodes[index], self.reference
        source = node.inputs[0]
        assert isinstance(node, Activation)

        def of(values: Tensor) -> Tensor:
            return values if sample is None else _of(values, sample)

        lines = Lines(*(t.flatten(1) for t in lines.parts()))
        z, error = of(reference.point(source).flatten(1)), of(reference.unit(source, self._sparing(index)))
        rise = lines.upper_slope - lines.lower_slope
        if isinstance(node, Relu):
            error = error * of(self.living(index))
            top = torch.addcmul(lines.upper_offset, rise, z)
        else:
            error = error * torch.maximum(lines.lower_slope.abs(), lines.upper_slope.abs())
            reach, image = of(reference.reach(source)), of(reference.reach(index))
            radius = of(reference.radius(source).flatten(1)) if index <= self.border else None
            error = error + rounding.backward_activation(node, reach, image, lines, reference.sums, radius)
            top = torch.addcmul(lines.upper_offset - lines.lower_offset, rise, z)
        floor = torch.addcmul(lines.lower_offset, lines.lower_slope, z) - of(reference.point(index).flatten(1))
        lift, floor = rounding.outward(top, floor, error, node.size + reference.sums)
        return _Step(lines.lower_slope, rise, floor, lift)

    def _sparing(self, index: int) -> int | None:
        """The activation, if rows of its input that come from it have no coefficients where it is inactive."""
        node = self.network.nodes[index]
        return index if isinstance(node, Relu) and self.network.uses[node.inputs[0]] == 1 else None

    def alive(self, index: int, rounded: bool) -> _Alive | None:
        """What of activation ``index`` is alive, where the linear map before it is worth restricting to that."""
        if (index, rounded) not in self._alive:
            node, found = self.network.nodes[index], None
            # Rows come to the last one but once.
            if isinstance(node, Relu) and self._restricts(node.inputs[0]) and index < self.network.last_activation:
                living = self.living(index)
                places = living.nonzero()
                most = len(places) if self.samples == 1 else int(living.sum(1).amax())
                if most <= _ALIVE * node.size:
                    # Those alive may be a number without factors.
                    depth = _deepest(node.size) if rounded and index <= self.border else 0
                    step = self.step(index, rounded, depth)
                    weight = self.weight(node.inputs[0], rounded)
                    found = _Alive.of(places, self.samples, step, weight)
            self._alive[index, rounded] = found
        return self._alive[index, rounded]

    def living(self, index: int) -> Tensor:
        """Which neurons of the ReLU ``index`` are not inactive: (batch, neurons) bool."""
        if index not in self._living:
            # What is NaN may be. Where intervals leave nothing, the point is 0 as well.
            self._living[index] = self.interval(index).upper.flatten(1) != 0
        return self._living[index]

    def between(self, index: int) -> Tensor | None:
        """W between what of activation ``index`` and of that before it is alive, (1, most, most of the other).

        None unless the linear map before ``index`` directly follows a ReLU that nobody else uses, in one sample.
        """
        if index not in self._between:
            linear, found = self.network.nodes[self.network.nodes[index].inputs[0]], None
            before = linear.inputs[0]
            if self.samples == 1 and self.network.uses[before] == 1:
                mine = self.alive(index, True)
                other = self.alive(before, True) if isinstance(self.network.nodes[before], Relu) else None
                if mine is not None and other is not None:
                    assert mine.weight is not None
                    found = mine.weight.index_select(2, other.numbers[0])
            self._between[index] = found
        return self._between[index]

    def _restricts(self, index: int) -> bool:
        """Whether the node is a dense linear map that one node alone uses."""
        node = self.network.nodes[index]
        return isinstance(node, Linear) and len(node.shape) == 1 and not node.sparse and self.network.uses[index] == 1

    def weight(self, index: int, rounded: bool) -> Tensor:
        """W of the linear map ``index`` as rows are multiplied with it."""
        node = self.network.nodes[index]
        assert isinstance(node, Linear)
        like = self.values[0].lower
        return weight_like(node, like.float() if rounded and self.reference.narrows(index) else like)

    def ball(self, index: int) -> tuple[Tensor, Tensor]:
        """Centre and radius of the box of node ``index``, flattened: (batch, size)."""
        box = self.bounds(index).flat()
        return torch.lerp(box.lower, box.upper, 0.5), (box.upper - box.lower) / 2

    def radius(self, index: int, terms: int = 0) -> Tensor:
        """(batch, size) r so large that −|A|·r, computed, is a lower bound of A·(v − v̂) where rows end.

        ``terms``: how many numbers are summed, if not the node's.
        """
        terms = terms or self.network.nodes[index].size
        key = (index, terms)
        if key not in self._radii:
            radius = self.reference.radius(index).flatten(1)
            if index <= self.border:
                radius = rounding.concretise(radius, _depth(terms), torch.float32).float()
            else:
                radius = rounding.concretise(radius, terms, radius.dtype)
            self._radii[key] = radius
        return self._radii[key]

    def cells(self, node: Conv2d, seen: Shape) -> Tensor:
        """The radius of the entry in cells of the convolution after it, for sums over an image or ``seen`` cells."""
        whole = node.cells_shape(node.shape[1:])
        # Sums in windows may be deeper, where their length has no factors.
        terms = max(math.prod(whole), math.prod(seen), key=_depth)
        if terms not in self._cells:
            image = self.radius(self.entry, terms=terms).unflatten(1, self.network.nodes[self.entry].shape)
            self._cells[terms] = node.in_cells(image)
        return self._cells[terms]

    def last_step(self, index: int) -> bool:
        """Whether rows of node ``index`` need not be pulled back to the entry: their values in cells tell as much."""
        node = self.network.nodes[index]
        if not isinstance(node, Conv2d) or index > self.border:
            return False
        return node.inputs[0] == self.entry and self.network.uses[self.entry] == 1

    def at(self, a: Window, index: int, name: str, sample: Tensor | None, *values: Tensor) -> Tensor:
        """Some values of node ``index`` within windows, (rows, channels, *size).

        ``values`` (batch, size) each, or (1, size) of every sample alike; several as if the node had a multiple of its
        channels. ``sample`` is that of ``neurons``.
        """
        shape = self.network.nodes[index].shape

        def images(sample: Tensor | None = None) -> Tensor:
            own = torch.cat([_of(t, sample) for t in values], 1).to(a.values.dtype)
            return own.reshape(len(own), -1, *shape[1:])

        if len(values[0]) > 1:
            return a.of(images(sample))
        # Which is worth keeping for the next chunk.
        return self._table(a, a.grid, (index, name), images)

    def _table(self, a: Window, grid: Grid, key: Hashable, images: Callable[[], Tensor]) -> Tensor:
        """What ``Window.of`` returns of one image."""
        if (grid, key) not in self._tables:
            self._tables[grid, key] = grid.table(images())
        return self._tables[grid, key].index_select(0, a.point)

    def windowed(self, a: Window, index: int, sample: Tensor | None) -> tuple[Tensor | None, Window | None] | None:
        """One step of ``neurons`` within windows: what is added to the constants, and the rows before the node.

        None where the node does not act on windows. ``sample`` is that of ``neurons``.
        """
        node, grid, each = self.network.nodes[index], a.grid, a.values[0].numel()
        if len(node.shape) != 3 or _FULL * math.prod(grid.size) > math.prod(node.shape[1:]):
            return None
        if index == self.entry:
            radius = self.at(a, index, "radius", sample, self.radius(index, terms=each))
            return -_sum(a.values.abs() * radius, 3), None
        if isinstance(node, Activation):
            step = self.step(index, True, max(_depth(each), _depth(node.size)) if index <= self.border else 0)
            assert step.floor is not None
            lines = self.at(a, index, "lines", sample, step.low, step.rise, step.lift, step.floor)
            low, rise, lift, floor = lines.chunk(4, 1)
            negative = a.values.clamp(max=0)
            values = (a.values * low).addcmul_(negative, rise)
            offsets = negative * lift if negative.requires_grad else negative.mul_(lift)
            return _sum(offsets.addcmul_(a.values, floor), 3), Window(values, a.point, grid, clean=True)
        if not isinstance(node, Scale) and not (isinstance(node, Conv2d) and node.plain):
            return None
        if not a.clean:
            # Coefficients beyond the edges stand for nothing.
            inside = self.at(a, index, "inside", None, a.values.new_ones(1, node.size))
            a = Window(a.values * inside, a.point, grid, clean=True)
        if isinstance(node, Scale):
            scale = self.at(a, index, "scale", None, node.scale.expand(1, *node.shape).flatten(1))
            return None, Window(a.values * scale, a.point, grid, clean=True)
        if self.last_step(index):
            shape = node.cells_shape(grid.size)
            cells, reached = self.cells(node, shape), replace(grid, size=(shape[1], shape[2]))
            many = len(cells) > 1
            radius = a.of(_of(cells, sample), reached) if many else self._table(a, reached, "cells", lambda: cells)
            return -_sum(node.cells(a.values).abs_().mul_(radius), 3), None
        return None, a.before(node)

    def free(self, index: int) -> Tensor:
        """Where activation ``index`` leaves a choice between lines, as 0 or 1: (batch, *shape)."""
        node = self.network.nodes[index]
        return unstable(node, self.pre[index]).to(self.values[0].lower)

    def chosen_lines(self, index: int, sample: Tensor, slope: Tensor) -> Lines:
        """The lines of activation ``index`` for rows that choose their own, by the ``slope`` of ``relax``.

        Args:
            index: the activation.
            sample: (rows,) the sample of each row.
            slope: (rows, *shape), in [0, 1].
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

    def lower(
        self,
        target: int,
        rows: Tensor,
        sample: Tensor | None = None,
        *,
        constant: Tensor | None = None,
        lines: Mapping[int, Lines] | None = None,
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
            lines: for some activations, by index, each row's own lines (``chosen_lines``), (R, *shape), with G = R.
            rounded: whether to account for rounding. Without, the values may steer a search and prove nothing.
            record: takes the coefficients of the activations that have their own lines, (R, neurons), by index.
            coefficients: whether those of ``entry`` are wanted.

        Returns:
            (R,) lower bounds; if ``rounded``, NaN or −inf where arithmetic broke down and never too high.
            (R, input_size) the coefficients A of ``entry`` in the linear lower bound, if wanted, and rows end there.
        """
        groups, each = self.grouped(rows, sample)
        a = rows.reshape(groups, each, -1)
        total = None
        if rounded:
            reference = self.reference
            total = _dot(a, _of(reference.point(target).flatten(1), sample))
            total = total - _dot(a.abs(), _of(reference.unit(target), sample))
            if target <= self.border:
                narrow = a.float()
                gone = (narrow.to(a) - a).abs()
                total = total - _dot(gone, _of(reference.radius(target).flatten(1), sample))
        walk = _Walk(self, sample, (groups, each), rounded, lines, record, coefficients)
        return walk.back(target, a, total, target, None if constant is None else constant.reshape(groups, each))

    def grouped(self, rows: Tensor, sample: Tensor | None) -> tuple[int, int]:
        """How many groups of how many rows each."""
        groups = self.samples if sample is None else sample.shape[0]
        return groups, rows.shape[0] // max(1, groups)

    def by_intervals(self, rows: Tensor, sample: Tensor | None = None, rounded: bool = True) -> Tensor:
        """Interval bounds of rows of the output from below, merged into the linear map if that is what gives it.

        Args:
            rows: (R, *output_shape), group after group.
            sample: (G,) the sample of each group of R/G rows; by default every sample, one after another.
            rounded: whether to account for rounding.

        Returns:
            (R,).
        """
        last, a = len(self.network.nodes) - 1, rows.reshape(*self.grouped(rows, sample), self.network.output_size)
        while isinstance(node := self.network.nodes[last], Reshape):
            last = node.inputs[0]
        linear = node if isinstance(node, Linear) and len(node.shape) == 1 else None
        source = last if linear is None else linear.inputs[0]
        center, radius = rounding.ball(self.bounds(source).flat())
        middle = center
        if linear is not None:
            middle, before = linear.forward(center), linear.adjoint(a, radius.shape[1:]).abs_()
        else:
            before = a.abs()
        if rounded:
            radius = rounding.concretise(radius, radius.shape[1], radius.dtype)
        total, reach = _dot(a, _of(middle, sample)), _dot(before, _of(radius, sample))
        if not rounded:
            return (total - reach).flatten()
        unit, lost = rounding.interval_rows(linear, self.largest(source), radius.shape[1])
        total = total - _dot(a.abs(), _of(unit, sample))
        return rounding.total(total - reach, _of(lost, sample)[:, None]).flatten()

    def neurons(self, index: int, neuron: Tensor, sign: Tensor, sample: Tensor | None = None) -> Tensor:
        """(R,) lower bounds of sign·(neurons of node ``index``), rounding accounted for.

        A neuron of a linear layer is a row of its weights, one of a convolution the kernel within a window.

        Args:
            index: the node; node bounds must have been advanced to the activations before it.
            neuron: (R,) their numbers, group after group.
            sign: (R,) ±1.
            sample: (G,) the sample of each group of R/G rows; by default every sample, one after another.
        """
        node, reference = self.network.nodes[index], self.reference
        (groups, each), number = self.grouped(neuron, sample), neuron
        self._work += neuron.shape[0] * self.network.receptive[index]
        if self.samples > 1:
            of = torch.arange(groups, device=neuron.device) if sample is None else sample
            number = (of[:, None] * node.size + neuron.reshape(groups, each)).flatten()
        point, unit = (
            t.flatten().index_select(0, number) for t in (reference.point(index), reference.unit(index, alone=True))
        )
        total = torch.addcmul(-unit, sign, point).reshape(groups, each)
        walk = _Walk(self, sample, (groups, each))
        rows: Tensor | Window
        if isinstance(node, Linear) and len(node.shape) == 1:
            weight = self.weight(index, True)
            rows = weight.index_select(0, neuron).mul_(sign.to(weight.dtype)[:, None]).reshape(groups, each, -1)
            return walk.back(node.inputs[0], rows, total, index)[0]
        if isinstance(node, Conv2d) and node.plain:
            narrow = node.inputs[0] <= self.border and reference.takes_single(index)
            rows = kernels(node, neuron, sign.float() if narrow else sign)
            return walk.back(node.inputs[0], rows, total, index)[0]
        if isinstance(node, Conv2d | Scale | Add) and len(node.shape) == 3:
            rows = windows(node.shape, neuron, sign)
        else:
            rows = sign.new_zeros(neuron.shape[0], node.size)
            rows = rows.scatter(1, neuron[:, None], sign[:, None]).reshape(groups, each, -1)
        return walk.back(index, rows, total, index)[0]

    def largest(self, index: int) -> Tensor:
        """(batch,) the largest absolute value that node ``index`` may have."""
        if index not in self._most:
            node = self.network.nodes[index]
            if isinstance(node, Reshape | Permute):
                self._most[index] = self.largest(node.inputs[0])
            elif isinstance(node, Relu):
                self._most[index] = self.bounds(index).upper.flatten(1).amax(1)
            else:
                self._most[index] = largest(self.bounds(index))
        return self._most[index]

    def of_input(self, rows: Tensor) -> Tensor:
        """Coefficients of the input, (R, input_size), from those of node ``entry``."""
        rows = rows.to(self.values[0].lower)
        for index in range(self.entry, 0, -1):
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
        """(R,) lower bounds of matrix·y, y being the flattened output (``linear_lower_bounds``).

        All their coefficients are in float64 where that costs little beside what ``neurons`` has been asked for.
        """
        network = self.network
        last = len(network.nodes) - 1
        self.advance(network.last_activation)
        little = self._work > _LITTLE * matrix.shape[0] * network.receptive[last]
        if little and self.border >= 0 and not self.single and not intervals:
            return self.double().outputs(matrix, sample, memory=memory, stop=stop)
        rows = matrix.to(self.values[0].lower).reshape(-1, *network.output_shape)
        count, found = rows.shape[0], rows.new_full((matrix.shape[0],), -math.inf)
        size = chunk_size(network, rows, memory, first=network.last_activation if intervals else 0)
        if sample is None and count > size and self.samples > 1:
            sample = torch.arange(self.samples, device=rows.device).repeat_interleave(count // self.samples)
        for part, mine in groups(count, sample, size, self.samples):
            if stop is not None and stop():
                break
            chosen = rows[part]
            bounded = self.by_intervals(chosen, mine) if intervals else self.lower(last, chosen, mine)[0]
            if isinstance(part, slice) and bounded.shape[0] == count:
                return bounded
            found[part] = bounded
        return found


class _Walk:
    """One chunk of rows on its way back through a relaxation's network (``Relaxation.lower``)."""

    def __init__(
        self,
        relaxation: Relaxation,
        sample: Tensor | None,
        grouped: tuple[int, int],
        rounded: bool = True,
        lines: Mapping[int, Lines] | None = None,
        record: dict[int, Tensor] | None = None,
        wanted: bool = False,
    ) -> None:
        self.of = relaxation
        self.nodes = relaxation.network.nodes
        self.sample, (self.groups, self.each) = sample, grouped
        self.rounded = rounded
        self.reference = relaxation.reference
        self.border = relaxation.border if rounded else -1
        self.lines, self.record = lines or {}, record
        self.wanted = wanted
        self.coefficients: dict[int, Tensor | Window] = {}
        # Activations whose coefficients are those of what is alive.
        self.restricted: set[int] = set()

    @cached_property
    def _named(self) -> Tensor:
        """(groups,) the sample of each group."""
        return torch.arange(self.groups, device=self.of.values[0].lower.device) if self.sample is None else self.sample

    def back(
        self,
        start: int,
        rows: Tensor | Window,
        total: Tensor | None,
        origin: int,
        constant: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """What ``Relaxation.lower`` returns.

        Args:
            start: the node.
            rows: of the node, (groups, each, neurons).
            total: their values at the points, less what rounding may change there, (groups, each), if it counts.
            origin: the node whose rows they were, and whose rounding errors are accounted for.
            constant: what is to be added, (groups, each).
        """
        self.start, self.total = start, total
        charged, reached = set(self.reference.covered(origin)), None
        self._give(start, rows)
        for index in range(start, -1, -1):
            if index not in self.coefficients:
                continue
            a, node = self.coefficients.pop(index), self.nodes[index]
            ends = index == self.of.entry
            if isinstance(node, Activation) and not ends and self.of.network.uses[node.inputs[0]] == 1:
                charged |= self.reference.covered(node.inputs[0])
            if self.rounded and not ends and index not in charged and isinstance(node, Affine | Add):
                self._less(self._weighed(a, index, "unit", self.reference.unit(index)))
                charged |= self.reference.covered(index)
            if isinstance(a, Window) and index not in self.lines and not isinstance(node, Add | Reshape | Permute):
                stepped = self.of.windowed(a, index, self.sample)
                if stepped is not None:
                    added, before = stepped
                    if added is not None:
                        self._plus(added.reshape(self.groups, self.each))
                    if before is not None:
                        self._give(node.inputs[0], before)
                    continue
            if index <= self.border and not self.wanted and self.of.last_step(index):
                assert isinstance(node, Conv2d)
                cells = node.cells(self._whole(a, index).reshape(-1, *node.shape))
                radius = _of(self.of.cells(node, node.cells_shape(node.shape[1:])), self.sample)
                products = cells.abs_().unflatten(0, (self.groups, self.each)).mul_(radius[:, None])
                self._less(_sum(products, 3))
                continue
            if ends:
                a = self._whole(a, index)
                self._concretise(a, index)
                if self.wanted and index == self.of.entry:
                    reached = a.flatten(0, 1)
                continue
            if isinstance(node, Add):
                for source in node.inputs:
                    self._give(source, a)
            else:
                self._through(a if index in self.restricted else self._whole(a, index), index)
        found = self.total
        assert found is not None
        if constant is not None:
            found = found + constant
        if self.rounded:
            lost = _of(self.reference.lost(origin), self.sample)[:, None]
            found = rounding.total(found, lost, constant)
        return found.flatten(), reached

    def _plus(self, term: Tensor) -> None:
        """Add to what is found so far, (groups, each)."""
        self.total = term if self.total is None else self.total + term

    def _less(self, term: Tensor) -> None:
        """Take away from it."""
        self.total = -term if self.total is None else self.total - term

    def _weighed(self, a: Tensor | Window, index: int, name: str, values: Tensor) -> Tensor:
        """|A|·values of node ``index``, (batch, size), in float32 not too low: (groups, each)."""
        if isinstance(a, Window):
            products = a.values.abs() * self.of.at(a, index, name, self.sample, values)
            found, count = _sum(products, 3).reshape(self.groups, self.each), products.shape[1:].numel()
        else:
            found, count = self._reach(a.abs(), index, _of(values, self.sample)), a.shape[-1]
        return found if index > self.border else rounding.weighed_single(found, _depth(count))

    def _reach(self, size: Tensor, index: int, values: Tensor) -> Tensor:
        """|A|·values of node ``index``, (groups or 1, size), as it is summed, of |A|, which nobody else wants."""
        if index > self.border:
            return _dot(size, values)
        return _sum(size.mul_(values.to(size.dtype)[:, None]), 1)

    def _whole(self, a: Tensor | Window, index: int) -> Tensor:
        """Dense coefficients of a node, (groups, each, neurons)."""
        if isinstance(a, Window):
            a = a.dense(self.nodes[index].shape)
        return a.reshape(self.groups, self.each, self.nodes[index].size)

    def _give(self, index: int, a: Tensor | Window) -> None:
        """Rows of node ``index``."""
        if index <= self.border:
            a = a.float()
        if index in self.coefficients:
            other = self.coefficients[index]
            both = a.plus(other) if isinstance(a, Window) and isinstance(other, Window) else None
            a = self._whole(a, index) + self._whole(other, index) if both is None else both
            if self.rounded:
                self._less(self._weighed(a, index, "sum", self.reference.merged(index)))
        self.coefficients[index] = a

    def _concretise(self, a: Tensor, index: int) -> None:
        """Take the least values of rows of a node at which they end."""
        if self.rounded:
            radius = _of(self.of.radius(index), self.sample)
        else:
            center, radius = (_of(t, self.sample) for t in self.of.ball(index))
            self._plus(_dot(a, center))
        # Gradients may want A, too; in float32 nobody else does.
        spent = index <= self.border and not self.wanted and not a.requires_grad
        self._less(self._reach(a.abs_() if spent else a.abs(), index, radius))

    def _through(self, a: Tensor | Window, index: int) -> None:
        """Pull rows back through a node of one input."""
        assert isinstance(a, Tensor)
        node = self.nodes[index]
        source = node.inputs[0]
        match node:
            case Reshape():
                self._give(source, a)
            case Permute():
                self._give(source, node.adjoint(a.reshape(-1, *node.shape)).reshape(self.groups, self.each, -1))
            case Affine():
                # Rows that begin here may have coefficients for neurons that are inactive after it.
                narrow = self.rounded and index != self.start and self.reference.narrows(index)
                a = a.float() if narrow else a
                shaped = a if len(node.shape) == 1 else a.reshape(-1, *node.shape)
                back = node.adjoint(shaped, self.nodes[source].shape)
                self._give(source, back.reshape(self.groups, self.each, -1))
                if not self.rounded:
                    self._plus(a @ node.offset().expand(node.shape).flatten())
            case Activation() if index in self.lines:
                own = self.lines[index]
                if self.record is not None:
                    self.record[index] = a.flatten(0, 1)
                step = self.of.outward(index, own, self._named) if self.rounded else _Step.of(node, own)
                self._relaxed(a, index, step.single(_depth(node.size)) if index <= self.border else step)
            case Activation() if (alive := self.of.alive(index, self.rounded)) is not None:
                linear = self.nodes[source]
                assert isinstance(linear, Linear)
                if index in self.restricted:
                    assert alive.weight is not None
                    step, weight, numbers = alive.step, alive.weight, alive.numbers
                else:
                    a, step, weight, numbers = alive.restrict(a, self.sample, self.of.weight(source, self.rounded))
                before, added = step.back(a, index <= self.border)
                self._plus(added)
                further = linear.inputs[0]
                free = self.rounded and further not in self.lines
                if free and (between := self.of.between(index)) is not None:
                    self.restricted.add(further)
                    weight = between
                self._give(further, before.to(weight.dtype) @ weight)
                if not self.rounded:
                    self._plus(_dot(before, linear.bias[numbers]))
            case Activation():
                step = self.of.step(index, self.rounded, _depth(node.size) if index <= self.border else 0)
                whole = self.sample is None or self.of.samples == 1
                self._relaxed(a, index, step if whole else step.map(lambda t: _of(t, self.sample)))
            case _:
                raise UnsupportedError("no linear bound is known", place=f"node '{node.name}' ({node.op})")

    def _relaxed(self, a: Tensor, index: int, step: _Step) -> None:
        """Pull rows back through an activation."""
        before, added = step.back(a, index <= self.border)
        self._plus(added)
        self._give(self.nodes[index].inputs[0], before)


def _dot(a: Tensor, values: Tensor, before: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """a·values group by group, (groups, each): of (groups, each, n) and (groups, n), or (1, n) for every group.

    ``before``: others of the same shapes, whose product comes first in the sum.
    """
    if a.shape[0] > 1 == values.shape[0]:
        one = before and (before[0].flatten(0, 1).unsqueeze(0), before[1])
        return _dot(a.flatten(0, 1).unsqueeze(0), values, one).view(a.shape[:2])
    if a.shape[0] > 1 == a.shape[1]:
        found = (a.squeeze(1) * values).sum(1, keepdim=True)
        return found if before is None else _dot(*before) + found
    return _products(a, values, before and _products(*before)).flatten(1)


def _products(a: Tensor, values: Tensor, start: Tensor | None = None) -> Tensor:
    """``start`` and a·values, of one group (1, each, 1), of several (groups, 1, each)."""
    # A column is faster, but not in several groups.
    first, second = (a, values.unsqueeze(2)) if a.shape[0] == 1 else (values.unsqueeze(1), a.mT)
    return torch.bmm(first, second) if start is None else torch.baddbmm(start, first, second)


def _depth(size: int) -> int:
    """How many sums a product takes part in where so many are summed in float32, and what is added before."""
    return sum(folded(size)) + 4


def _deepest(size: int) -> int:
    """The largest ``_depth`` of up to so many: of a number without factors, in one line."""
    return 1 + size + 4


def _sum(products: Tensor, axes: int) -> Tensor:
    """Sums along so many last axes."""
    products = products.flatten(-axes)
    if products.dtype == torch.float64 or not products.shape[-1]:
        return products.sum(-1)
    lines, length = folded(products.shape[-1])
    return products.view(*products.shape[:-1], lines, length).sum(-1).sum(-1) if lines > 1 else products.sum(-1)


def _of(values: Tensor, sample: Tensor | None) -> Tensor:
    """Those of the samples named, one after another; by default of every sample."""
    if sample is None or values.shape[0] == 1 == sample.shape[0]:
        return values
    return values.index_select(0, sample)


def signed(network: Network, index: int, neuron: Tensor, sign: Tensor) -> tuple[int, Tensor, Tensor | None]:
    """sign·(neurons of node ``index``) as rows of a target node, and constants, typed like ``sign``.

    ``neuron`` and ``sign``, ±1, are (R,). A neuron of a linear layer is its row of the weights.
    """
    node = network.nodes[index]
    if isinstance(node, Linear) and len(node.shape) == 1 and not node.weight_error:
        return node.inputs[0], node.weight[neuron] * sign[:, None], node.bias[neuron] * sign
    ones = sign.new_zeros(len(neuron), node.size).scatter(1, neuron[:, None], sign[:, None])
    return index, ones.reshape(-1, *node.shape), None


def chunk_size(network: Network, like: Tensor, memory: int, copies: float = _COPIES, first: int = 0) -> int:
    """How many rows may be propagated at once, back to node ``first``, for coefficients to stay within ``memory``."""
    limit = min(memory, _CACHED) if like.device.type == "cpu" else memory
    return max(1, int(limit / (network.widest[first] * like.element_size() * copies)))


def groups(
    count: int, sample: Tensor | None, size: int, samples: int, round_numbers: bool = False
) -> Iterator[tuple[Tensor | slice, Tensor | None]]:
    """Rows in chunks of at most ``size``, each of some groups of equal size.

    Args:
        count: R, how many rows there are.
        sample: (R,) the sample of each row, in any order; None where there is one, or where all rows fit that come in
            turn, equally many of every sample.
        size: at least 1.
        samples: how many there are.
        round_numbers: whether chunks are to be of few different sizes, where there are several samples; they may then
            be larger by 1/16.

    Yields:
        The rows, group after group, as an index, a group's last one repeated where it has too few; and (groups,) the
        sample of each, None for every sample, one after another.
    """
    if not count:
        return
    if samples == 1:
        for start in range(0, count, size):
            yield slice(start, start + size), None
        return
    if count <= size and (sample is None or _in_turn(sample, samples)):
        yield slice(0, count), None
        return
    assert sample is not None
    order = sample.argsort(stable=True)
    counts = torch.bincount(sample).tolist()
    begin, pieces = 0, []
    for which, number in enumerate(counts):
        parts = -(-number // size)
        for part_of in range(parts):
            first, end = number * part_of // parts, number * (part_of + 1) // parts
            pieces.append((end - first, begin + first, which))
        begin += number
    # Neighbours of nearly equal size leave little to repeat.
    pieces.sort()
    while pieces:
        taken = 1
        while taken < len(pieces) and (taken + 1) * pieces[taken][0] <= size:
            taken += 1
        if round_numbers:
            taken -= taken % _last_digit(taken, 2)
        longest = pieces[taken - 1][0]
        if round_numbers:
            longest += -longest % _last_digit(longest, _DIGITS)
        lengths, starts, mine = torch.tensor(pieces[:taken], device=sample.device).unbind(1)
        del pieces[:taken]
        place = torch.minimum(torch.arange(longest, device=sample.device), lengths[:, None] - 1)
        yield order[starts[:, None] + place].flatten(), mine


def _last_digit(number: int, digits: int) -> int:
    """What the last of so many first binary digits of a number stands for."""
    return 1 << max(0, number.bit_length() - digits)


def _in_turn(sample: Tensor, samples: int) -> bool:
    """Whether equally many rows of every sample come, one sample after another."""
    each, more = divmod(sample.shape[0], samples)
    return not more and torch.equal(sample, torch.arange(samples, device=sample.device).repeat_interleave(each))


def entry(network: Network) -> int:
    """The last node up to which a network only scales, shifts and reorders its inputs: a box there is a box still."""
    index = 0
    while index + 1 < len(network.nodes) and network.uses[index] == 1:
        after = network.nodes[index + 1]
        if after.inputs != (index,) or not isinstance(after, Scale | Reshape | Permute):
            break
        index += 1
    return index


@lru_cache(maxsize=1)
def _exact_by_intervals(network: Network) -> tuple[bool, ...]:
    """For every node, whether intervals bound it exactly: its image of the box is a box, or one affine map of such."""
    shaped: list[bool] = []
    exact: list[bool] = []
    for node in network.nodes:
        moves = isinstance(node, Scale | Reshape | Permute)
        before = bool(node.inputs) and shaped[node.inputs[0]]
        shaped.append(isinstance(node, Input) or (before and (moves or isinstance(node, Activation))))
        exact.append(exact[node.inputs[0]] if moves else shaped[-1] or (before and isinstance(node, Affine)))
    return tuple(exact)


def interval_is_exact(network: Network, index: int) -> bool:
    """Whether interval arithmetic bounds every neuron of the node exactly (one affine map on a box)."""
    return _exact_by_intervals(network)[index]


def relaxed(
    network: Network,
    box: Bounds,
    *,
    memory: int = MEMORY,
    stop: Callable[[], bool] | None = None,
    search: Search | None = None,
    most: int | None = None,
    single: bool = False,
) -> Relaxation:
    """A relaxation whose unstable neurons' pre-activations have been bounded by CROWN (``preactivation_bounds``).

    With ``most``, a layer of which more neurons are unstable keeps its intervals, sample by sample: a box in which
    nearly everything is unstable is bounded badly whatever it costs. ``single`` is that of ``Relaxation``.
    """
    relaxation = Relaxation(network, box, single=single)

    def bound(index: int, interval: Bounds, search: Search | None) -> Bounds:
        """The interval, with unstable neurons bounded anew.

        The lower line of a ReLU is chosen by what rows have found, as if there were no interval: where the interval is
        tighter, it could change the choice for the worse; the choice being the same, it makes what follows tighter.

        Of a ReLU that turns out inactive nobody uses the lower bound, and of one that turns out active, after which
        no other is bounded, the upper one: where that spares enough rows, they wait for the other side.
        """
        activation = network.nodes[index]
        chosen = unstable(activation, interval).flatten(1)
        if most is not None:
            chosen = chosen & (chosen.sum(1, keepdim=True) <= most)
        # Lower bounds of every neuron and of its negative.
        both = torch.stack([interval.lower.flatten(1), -interval.upper.flatten(1)])
        # Windows take part of the memory of whole rows.
        copies = _COPIES if search is not None or len(interval.lower.shape) != 4 else _COPIES // 3
        narrow = relaxation.border > relaxation.entry
        multiple = _MULTIPLE if narrow and relaxation.samples == 1 else 1
        size = -(-chunk_size(network, both, memory, copies / 2 if narrow else copies) // multiple) * multiple
        neurons, one = chosen.shape[1], both.new_ones(())
        other = -one

        def improve(places: Tensor) -> None:
            """Bound what lies at these places of ``both``, flattened, anew."""
            sample = places // neurons % relaxation.samples if relaxation.samples > 1 else None
            count = places.shape[0]
            if count % multiple:
                places = torch.cat([places, places[-1:].expand(-count % multiple)])
            for part, mine in groups(places.shape[0], sample, size, relaxation.samples, narrow):
                if stop is not None and stop():
                    return
                place = places[part]
                neuron, sign = place % neurons, torch.where(place < chosen.numel(), one, other)
                if search is None:
                    found = relaxation.neurons(activation.inputs[0], neuron, sign, mine)
                else:
                    target, rows, constant = signed(network, activation.inputs[0], neuron, sign)
                    every = torch.zeros_like(place) if sample is None else sample[part]
                    found = search(relaxation, target, rows, every, constant)
                both.view(-1).index_copy_(0, place, found)

        places = chosen.flatten().nonzero().squeeze(1)
        enough = _WORTH // network.receptive[activation.inputs[0]]
        if isinstance(activation, Relu) and len(places) > enough and int(chosen.sum(1).amax()) > enough:
            negative = both[0] < both[1]
            later = torch.stack([negative, ~negative & (index == network.last_activation)]) & chosen
            later &= later.sum((0, 2))[:, None] > enough
            improve((chosen & ~later).flatten().nonzero().squeeze(1))
            improve((later & (both < 0).all(0)).flatten().nonzero().squeeze(1))
        else:
            improve(torch.cat([places, places + chosen.numel()]))
        low, high = (side.reshape(interval.lower.shape) for side in both.unbind())
        if isinstance(activation, Relu):
            relaxation.rising[index] = low > high
        return intersect(interval, Bounds(low, -high))

    def tighten(index: int, interval: Bounds) -> Bounds:
        if interval_is_exact(network, network.nodes[index].inputs[0]):
            return interval
        tight = bound(index, interval, None)
        return tight if search is None else bound(index, tight, search)

    relaxation.advance(network.last_activation, tighten)
    return relaxation


def preactivation_bounds(
    network: Network,
    box: Bounds,
    *,
    memory: int = MEMORY,
    stop: Callable[[], bool] | None = None,
    search: Search | None = None,
    single: bool = False,
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
        single: coefficients in float32 (``Relaxation``).
    """
    return relaxed(network, box, memory=memory, stop=stop, search=search, single=single).pre


def linear_lower_bounds(
    network: Network,
    box: Bounds,
    preactivations: Mapping[int, Bounds],
    matrix: Tensor,
    sample: Tensor | None = None,
    *,
    intervals: bool = False,
    memory: int = MEMORY,
    stop: Callable[[], bool] | None = None,
    single: bool = False,
) -> Tensor:
    """CROWN lower bounds of matrix·y over the box, y being the network's flattened output.

    Args:
        network: in the dtype and on the device of ``box``.
        box: the inputs, shaped (batch, *input_shape).
        preactivations: bounds of every activation's input, as ``preactivation_bounds`` returns.
        matrix: (R, outputs).
        sample: (R,) the sample of each row; by default equally many of every sample, in turn.
        intervals: interval bounds instead, the rows merged into the network's last affine map.
        memory: a limit in bytes on the coefficients held at once.
        stop: asked between chunks; once it returns True the remaining rows are left at −inf.
        single: coefficients in float32 (``Relaxation``).

    Returns:
        (R,), rounding accounted for.
    """
    relaxation = Relaxation(network, box, preactivations, single)
    return relaxation.outputs(matrix, sample, intervals=intervals, memory=memory, stop=stop)
