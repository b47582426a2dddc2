"""Faster steps of rows on their way back than the plain ones; each of them can be left out.

**Windows.** A neuron of a convolution depends on a patch of its input, that on a larger patch before, and so on.
Pulling back whole images of coefficients, nearly all zeros, is most of CROWN's work in a convolutional network; windows
are all of the same size, and only their position differs from row to row. (The idea is that of the patches mode in Xu
et al., arXiv 2002.12920; the windows here lie on the grid of the neurons that they started from.)

**Rows of possibly active neurons alone.** An inactive neuron passes no coefficient on. Its column of the rows, and its
row of the weight, are left out of the product with the layer's weight; and where two such layers follow each other, of
the next product's result, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from verifiable_relu.bounds import sums
from verifiable_relu.bounds.forward import NodeBounds
from verifiable_relu.bounds.kinds import of_samples
from verifiable_relu.bounds.operators import ConvolutionOperator, DenseOperator, framed
from verifiable_relu.bounds.slack import Float32, LineStep, ShiftedLines, Slack
from verifiable_relu.bounds.tuning import Lines, Tuning
from verifiable_relu.network.nodes import Activation, Conv2d, Relu, Scale, Shape

_TABLE_ROWS = 4
"""Where there are at most so many windows for each row, all windows are copied once in turn."""


@dataclass(frozen=True)
class Grid:
    """Where windows lie in a node of shape (channels, height, width).

    The window of grid point (i, j) begins at row i·stride[0] − offset[0] and has size[0] rows; columns likewise.
    Windows may reach beyond the edges; entries there belong to padding and stand for nothing.
    """

    points: tuple[int, int]
    size: tuple[int, int]
    stride: tuple[int, int]
    offset: tuple[int, int]

    def before(self, node: Conv2d) -> Grid:
        """The grid in the input of a convolution whose output this one lies in."""
        size = tuple((n - 1) * s + k for n, s, k in zip(self.size, node.stride, node.weight.shape[2:], strict=True))
        stride = tuple(n * s for n, s in zip(self.stride, node.stride, strict=True))
        offset = tuple(n * s + p for n, s, p in zip(self.offset, node.stride, node.padding[:2], strict=True))
        return Grid(self.points, size, stride, offset)  # type: ignore[arg-type]

    def table(self, values: Tensor) -> Tensor:
        """The windows of values (batch, channels, height, width): (batch·points, channels, *size), 0 beyond edges."""
        return self.views(values).reshape(-1, values.shape[1], *self.size)

    def views(self, values: Tensor) -> Tensor:
        """The same as (batch, *points, channels, *size), not copied."""
        margins = []
        for axis in (1, 0):
            reach = (self.points[axis] - 1) * self.stride[axis] + self.size[axis] - self.offset[axis]
            margins += [self.offset[axis], reach - values.shape[2 + axis]]
        # Windows may begin after the image ends, or end before it begins.
        rows = framed(values, margins).unfold(2, self.size[0], self.stride[0])
        return rows.unfold(3, self.size[1], self.stride[1]).permute(0, 2, 3, 1, 4, 5)


@dataclass(frozen=True)
class Window:
    """Rows of coefficients of a node, given in their windows.

    Attributes:
        values: (rows, channels, *grid.size).
        point: (rows,) the number of each row's grid point, in row-major order.
        grid: where the windows lie.
        clean: whether the values beyond the edges are known to be zero.
    """

    values: Tensor
    point: Tensor
    grid: Grid
    clean: bool = False

    def __len__(self) -> int:
        return len(self.values)

    def of(self, images: Tensor, grid: Grid | None = None) -> Tensor:
        """What lies in each row's window, or in that of another grid with as many points.

        ``images`` (groups, channels, height, width), of the groups that rows come in.
        """
        grid, (down, right), each = grid or self.grid, self.grid.points, len(self) // len(images)
        group = torch.arange(len(images), device=images.device).repeat_interleave(each)
        if down * right <= _TABLE_ROWS * each:
            return grid.table(images).index_select(0, group * (down * right) + self.point)
        return grid.views(images)[group, self.point.div(right, rounding_mode="floor"), self.point % right]

    def before(self, operator: ConvolutionOperator) -> Window:
        """Pulled back through a convolution."""
        weight, grid = operator.node.weight, self.grid.before(operator.node)
        if self.values.dtype == weight.dtype and operator.plain and self.grid.size == (1, 1):
            values = (self.values.flatten(1) @ weight.flatten(1)).unflatten(1, weight.shape[1:])
        else:
            values = operator.transposed(self.values, grid.size)
        return Window(values, self.point, grid)

    def float(self) -> Window:
        """In float32."""
        return self if self.values.dtype == torch.float32 else replace(self, values=self.values.float())

    def plus(self, other: Window) -> Window | None:
        """The sum, in windows that cover both; None where the grids do not go together."""
        ours, theirs = self.grid, other.grid
        if (ours.points, ours.stride) != (theirs.points, theirs.stride):
            return None
        pairs = [*zip(ours.offset, ours.size, theirs.offset, theirs.size, strict=True)]
        offset = tuple(max(a, b) for a, _, b, _ in pairs)
        size = tuple(most + max(n - a, m - b) for most, (a, n, b, m) in zip(offset, pairs, strict=True))
        grid = Grid(ours.points, size, ours.stride, offset)  # type: ignore[arg-type]
        values = self._within(grid) + other._within(grid)
        return Window(values, self.point, grid, self.clean and other.clean)

    def _within(self, grid: Grid) -> Tensor:
        """The values in larger windows, zero where they had none."""
        margins = []
        for axis in (1, 0):
            before = grid.offset[axis] - self.grid.offset[axis]
            margins += [before, grid.size[axis] - self.grid.size[axis] - before]
        return F.pad(self.values, margins)

    def dense(self, shape: Shape) -> Tensor:
        """The rows as whole coefficients (rows, *shape)."""
        channels, height, width = shape
        (rows, columns), (down, right) = self.grid.size, self.grid.stride
        top = self.point.div(self.grid.points[1], rounding_mode="floor") * down - self.grid.offset[0]
        left = self.point % self.grid.points[1] * right - self.grid.offset[1]
        # A margin of one takes all that lies beyond the edges.
        canvas = self.values.new_zeros(len(self.values), channels, height + 2, width + 2)
        y = (top[:, None] + torch.arange(rows, device=top.device)).clamp(-1, height)[:, :, None] + 1
        x = (left[:, None] + torch.arange(columns, device=top.device)).clamp(-1, width)[:, None, :] + 1
        at = (y * canvas.shape[3] + x).flatten(1)[:, None].expand(-1, channels, -1)
        whole = canvas.flatten(2).scatter(2, at, self.values.flatten(2)).reshape(canvas.shape)
        return whole[:, :, 1 : 1 + height, 1 : 1 + width]


def kernels(operator: ConvolutionOperator, neuron: Tensor, sign: Tensor) -> Window:
    """sign·(neurons of a convolution) as rows of its input: kernels in their windows.

    Args:
        operator: the convolution, plain.
        neuron: (rows,) the neurons' numbers, in row-major order.
        sign: (rows,) ±1, in the dtype that the rows are to have.
    """
    points = operator.node.shape[1:]
    size = math.prod(points)
    values = operator.weight(sign.dtype).index_select(0, neuron // size).mul_(sign[:, None, None, None])
    grid = Grid(points, (1, 1), (1, 1), (0, 0)).before(operator.node)  # type: ignore[arg-type]
    return Window(values, neuron % size, grid)


def windows(shape: Shape, neuron: Tensor, sign: Tensor) -> Window:
    """sign·(neurons of a node) as rows of that node, each in a window of one point.

    Args:
        shape: of the node, (channels, height, width).
        neuron: (rows,) the neurons' numbers, in row-major order.
        sign: (rows,) ±1.
    """
    channels, height, width = shape
    channel = neuron.div(height * width, rounding_mode="floor")
    values = sign.new_zeros(len(neuron), channels, 1, 1)
    values[torch.arange(len(neuron), device=neuron.device), channel] = sign[:, None, None]
    grid = Grid((height, width), (1, 1), (1, 1), (0, 0))
    return Window(values, neuron % (height * width), grid, clean=True)


def seen(rows: Tensor, most: float) -> Window | None:
    """Dense rows of a node in the windows outside of which they are zero; None where one has more than ``most`` pixels.

    Args:
        rows: (rows, channels, height, width).
        most: how many pixels a window may have.
    """

    def extent(rows: Tensor) -> tuple[list[Tensor], list[int]]:
        """Where the window of each row begins, and how large all have to be."""
        places, found = (rows != 0).any(1), []
        for axis in (2, 1):
            there = places.any(axis).to(torch.uint8)
            first, last = there.argmax(1), there.shape[1] - 1 - there.flip(1).argmax(1)
            found.append((first, int((torch.where(there.amax(1) > 0, last, first) - first).amax()) + 1))
        return [first for first, _ in found], [size for _, size in found]

    # Most rows of one node see as much as the first one.
    if not len(rows) or math.prod(extent(rows[:1])[1]) > most:
        return None
    (top, left), (height, width) = extent(rows)
    if height * width > most:
        return None
    views = F.pad(rows, (0, width - 1, 0, height - 1)).unfold(2, height, 1).unfold(3, width, 1)
    values = views[torch.arange(len(rows), device=rows.device), :, top, left]
    down, right = rows.shape[2:]
    return Window(values, top * right + left, Grid((down, right), (height, width), (1, 1), (0, 0)), True)


@dataclass(frozen=True)
class Restricted:
    """Coefficients of the possibly active neurons of a ReLU alone: (1, each, how many), in order (``restrict``)."""

    values: Tensor

    def float(self) -> Restricted:
        """In float32."""
        return Restricted(self.values.float())


Coefficients = Tensor | Window | Restricted
"""Coefficients of a node: dense, (groups, each, neurons); in windows, group after group; or of some neurons."""


@dataclass(frozen=True)
class Chunk:
    """Rows that are propagated together: groups of equal size, each of one sample of the batch.

    Attributes:
        groups: how many groups there are.
        each: how many rows a group has.
        sample: (groups,) the sample of each group; None for every sample, one after another.
        rounded: whether rounding is accounted for. Without, values may steer a search and prove nothing.
        lines: for some activations, by index, each row's own lines, (rows, *shape), where groups have one row each.
        coefficients: whether those of the node at which rows end are wanted.
        tilts: for some products, by index, each row's own planes, (rows, *pairs), where groups have one row each.
    """

    groups: int
    each: int
    sample: Tensor | None
    rounded: bool = True
    lines: Mapping[int, Lines] = field(default_factory=dict)
    coefficients: bool = False
    tilts: Mapping[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Stepped:
    """The result of a faster step back.

    Attributes:
        constant: (groups, each) what the step adds to the rows' values; None for nothing.
        source: the node that the step has reached; −1 where the rows have ended.
        rows: the coefficients of that node; None where the rows have ended.
    """

    constant: Tensor | None
    source: int = -1
    rows: Coefficients | None = None


class Stepper(Protocol):
    """A faster way to take rows back through some nodes (``Windowed``, ``Restriction``)."""

    def step(self, index: int, rows: Coefficients, chunk: Chunk) -> Stepped | None:
        """One step back from node ``index``; None if the plain step is to be taken for these rows."""


class Windowed:
    """A stepper of rows that are given in windows smaller than the image."""

    def __init__(self, bounds: NodeBounds, slack: Slack, shifted: ShiftedLines, tuning: Tuning) -> None:
        self._bounds, self._slack, self._shifted = bounds, slack, shifted
        self._tuning = tuning
        self.tables: dict[tuple[Grid, Hashable], Tensor] = {}

    def step(self, index: int, rows: Coefficients, chunk: Chunk) -> Stepped | None:
        """One step within windows; None where rows are dense, or the node does not act on windows."""
        if isinstance(rows, Tensor) and chunk.rounded and not (chunk.coefficients or chunk.lines):
            rows = self._seen(rows, index)
        if not isinstance(rows, Window) or not chunk.rounded or index in chunk.lines:
            return None
        node, size = self._bounds.network.nodes[index], rows.grid.size
        if len(node.shape) != 3 or math.prod(size) > self._tuning.window_share * math.prod(node.shape[1:]):
            return None
        if index == self._bounds.start:
            return Stepped(self._added(-self._end(rows, index, chunk.sample), chunk))
        if isinstance(node, Activation):
            return self._through_activation(rows, index, node, chunk)
        operator = self._bounds.operators.find(index)
        if isinstance(node, Scale):
            rows = self._clean(rows, index)
            scale = self.at(rows, index, "scale", None, node.scale.expand(1, *node.shape).flatten(1))
            return Stepped(None, node.inputs[0], replace(rows, values=rows.values * scale))
        if not isinstance(operator, ConvolutionOperator) or not operator.pulls_back(rows.values.dtype):
            return None
        rows = self._clean(rows, index)
        return Stepped(None, operator.node.inputs[0], rows.before(operator))

    def _seen(self, rows: Tensor, index: int) -> Coefficients:
        """Dense rows of a convolution in windows, where these are small enough to grow on their way back."""
        operator = self._bounds.operators.find(index)
        if not isinstance(operator, ConvolutionOperator) or not operator.pulls_back(rows.dtype):
            return rows
        shape = operator.node.shape
        found = seen(rows.reshape(-1, *shape), self._tuning.window_start * math.prod(shape[1:]))
        return rows if found is None else found

    def weighed(self, rows: Window, index: int, name: str, values: Tensor, chunk: Chunk) -> Tensor:
        """|A|·values of node ``index``, (batch, size): (groups, each)."""
        products = rows.values.abs() * self.at(rows, index, name, chunk.sample, values)
        return self._added(sums.last_axes(products, 3, self._tuning), chunk)

    def at(self, a: Window, index: int, name: str, sample: Tensor | None, *values: Tensor) -> Tensor:
        """Values of node ``index`` that lie in the windows of rows, (rows, channels, *size of the window).

        Args:
            a: the rows.
            index: the node.
            name: of the values, under which the windows are kept.
            sample: of the chunk.
            values: (batch, size) each, or (1, size) if every sample has the same. Several come one after another, as
                more channels.
        """
        shape = self._bounds.network.nodes[index].shape

        def images(sample: Tensor | None = None) -> Tensor:
            own = torch.cat([of_samples(t, sample) for t in values], 1).to(a.values.dtype)
            return own.reshape(len(own), -1, *shape[1:])

        if len(values[0]) > 1:
            return a.of(images(sample))
        # The windows of one image serve the next chunk, too.
        return self._table(a, a.grid, (index, name), images)

    def _table(self, a: Window, grid: Grid, key: Hashable, images: Callable[[], Tensor]) -> Tensor:
        """What ``Window.of`` returns for one image, which ``images`` makes; its windows are kept under the key."""
        if (grid, key) not in self.tables:
            self.tables[grid, key] = grid.table(images())
        return self.tables[grid, key].index_select(0, a.point)

    def _added(self, found: Tensor, chunk: Chunk) -> Tensor:
        """Values of rows, (rows,), as (groups, each)."""
        return found.reshape(chunk.groups, chunk.each)

    def _clean(self, a: Window, index: int) -> Window:
        """Without coefficients beyond the edges, which stand for nothing."""
        if a.clean:
            return a
        inside = self.at(a, index, "inside", None, a.values.new_ones(1, self._bounds.network.nodes[index].size))
        return replace(a, values=a.values * inside, clean=True)

    def _end(self, a: Window, index: int, sample: Tensor | None) -> Tensor:
        """|A|·radius where rows end, (rows,)."""
        radius = self.at(a, index, "radius", sample, self._slack.end(terms=a.values[0].numel()))
        return sums.last_axes(a.values.abs() * radius, 3, self._tuning)

    def _through_activation(self, a: Window, index: int, node: Activation, chunk: Chunk) -> Stepped:
        step = self._shifted.step(index, True, self._shifted.depth(index, a.values[0].numel()))
        assert step.floor is not None
        lines = self.at(a, index, "lines", chunk.sample, step.low, step.rise, step.lift, step.floor)
        low, rise, lift, floor = lines.chunk(4, 1)
        negative = a.values.clamp(max=0)
        values = (a.values * low).addcmul_(negative, rise)
        offsets = negative * lift if negative.requires_grad else negative.mul_(lift)
        constant = sums.last_axes(offsets.addcmul_(a.values, floor), 3, self._tuning)
        return Stepped(self._added(constant, chunk), node.inputs[0], replace(a, values=values, clean=True))


@dataclass(frozen=True)
class _Active:
    """The neurons of a ReLU that are not known to be inactive, sample by sample, with the map W·x + b before it.

    Attributes:
        numbers: (batch, most) their numbers; what lies beyond a sample's count is to be ignored, and has a step of 0.
        counts: for each sample.
        step: theirs, (batch, most) each.
        weight: their rows of W, (1, most, inputs), where there is one sample.
    """

    numbers: Tensor
    counts: list[int]
    step: LineStep
    weight: Tensor | None

    @staticmethod
    def of(places: Tensor, samples: int, step: LineStep, weight: Tensor) -> _Active:
        """The possibly active neurons at ``places``, (n, 2) sample and number of each, in order.

        Args:
            places: which they are.
            samples: how many samples there are.
            step: that of all neurons.
            weight: W, (neurons, inputs).
        """
        sample, neuron = places.unbind(1)
        if samples == 1:
            chosen = step.map(lambda t: t.index_select(1, neuron))
            return _Active(neuron[None], [len(neuron)], chosen, weight.index_select(0, neuron)[None])
        counts = torch.bincount(sample, minlength=samples)
        place = torch.arange(len(sample), device=sample.device) - (counts.cumsum(0) - counts)[sample]
        most = int(counts.max())
        numbers = sample.new_zeros(len(counts), most)
        numbers[sample, place] = neuron
        there = torch.arange(most, device=sample.device) < counts[:, None]
        return _Active(numbers, counts.tolist(), step.map(lambda t: t.gather(1, numbers) * there), None)

    def of_rows(self, a: Tensor, sample: Tensor | None, weight: Tensor) -> tuple[Tensor, LineStep, Tensor, Tensor]:
        """What rows need of the possibly active neurons of their samples.

        Returns:
            Of these neurons alone the coefficients (groups, each, most), the steps (groups, most), the rows of W
            (groups, most, inputs), and the neurons' numbers (groups, most).
        """
        if self.weight is not None and a.shape[0] == 1:
            return a.index_select(2, self.numbers[0]), self.step, self.weight, self.numbers
        numbers, step = self.numbers, self.step
        if sample is not None:
            most = max((self.counts[i] for i in sample.tolist()), default=0)
            numbers, step = numbers[sample, :most], step.map(lambda t: t[sample, :most])
        chosen = a.gather(2, numbers[:, None].expand(-1, a.shape[1], -1))
        return chosen, step, weight[numbers], numbers


class Restriction:
    """A stepper through a ReLU and the dense layer before it at once."""

    def __init__(self, bounds: NodeBounds, shifted: ShiftedLines, float32: Float32, tuning: Tuning) -> None:
        self._bounds, self._shifted, self._float32, self._tuning = bounds, shifted, float32, tuning
        self._active: dict[tuple[int, bool], _Active | None] = {}
        self._between: dict[int, Tensor | None] = {}

    def step(self, index: int, rows: Coefficients, chunk: Chunk) -> Stepped | None:
        """Two steps back: through ReLU ``index`` and the layer before it."""
        if index in chunk.lines or isinstance(rows, Window):
            return None
        active = self.active(index, chunk.rounded)
        if active is None:
            return None
        source = self._bounds.network.nodes[index].inputs[0]
        operator = self._dense(source)
        assert operator is not None
        if isinstance(rows, Restricted):
            assert active.weight is not None
            a, step, weight, numbers = rows.values, active.step, active.weight, active.numbers
        else:
            given = operator.weight(self._dtype(source, chunk.rounded))
            a, step, weight, numbers = active.of_rows(rows, chunk.sample, given)
        before, constant = step.back(a, self._tuning)
        further = operator.node.inputs[0]
        between = self.between(index) if chunk.rounded and further not in chunk.lines else None
        found = before.to(weight.dtype) @ (weight if between is None else between)
        if not chunk.rounded:
            constant = constant + sums.dot(before, operator.node.bias[numbers])
        return Stepped(constant, further, found if between is None else Restricted(found))

    def active(self, index: int, rounded: bool) -> _Active | None:
        """What of activation ``index`` may be active, where it is a ReLU and leaving out the others is worth it."""
        if (index, rounded) not in self._active:
            node, found = self._bounds.network.nodes[index], None
            operator = self._dense(node.inputs[0]) if isinstance(node, Relu) else None
            # Rows come to the last activation once only: it is not worth the preparation.
            if operator is not None and index < self._bounds.network.last_activation:
                places = self._bounds.possibly_active(index)
                samples = self._bounds.samples
                most = int(places.sum(1).amax()) if samples > 1 else int(places.sum())
                if most <= self._tuning.active_share * node.size:
                    # The number of those that may be active may have no factors.
                    depth = sums.deepest(node.size) if rounded and self._float32.holds(index) else 0
                    step = self._shifted.step(index, rounded, depth)
                    weight = operator.weight(self._dtype(node.inputs[0], rounded))
                    found = _Active.of(places.nonzero(), samples, step, weight)
            self._active[index, rounded] = found
        return self._active[index, rounded]

    def between(self, index: int) -> Tensor | None:
        """W between what of activation ``index`` and of that before it may be active: (1, most, most of the other).

        None unless the linear map before ``index`` directly follows a ReLU that nobody else uses, in one sample.
        """
        if index not in self._between:
            network, found = self._bounds.network, None
            before = network.nodes[network.nodes[index].inputs[0]].inputs[0]
            if self._bounds.samples == 1 and network.uses[before] == 1:
                mine = self.active(index, True)
                other = self.active(before, True) if isinstance(network.nodes[before], Relu) else None
                if mine is not None and other is not None:
                    assert mine.weight is not None
                    found = mine.weight.index_select(2, other.numbers[0])
            self._between[index] = found
        return self._between[index]

    def _dense(self, index: int) -> DenseOperator | None:
        """The operator of node ``index``, if that is a dense layer of vectors that one node alone uses."""
        network = self._bounds.network
        if len(network.nodes[index].shape) != 1 or network.uses[index] != 1:
            return None
        operator = self._bounds.operators.find(index)
        return operator if isinstance(operator, DenseOperator) and not operator.sparse else None

    def _dtype(self, index: int, rounded: bool) -> torch.dtype:
        """Of the weight of layer ``index`` as rows are multiplied with it."""
        return torch.float32 if rounded and self._float32.narrows(index) else self._bounds.values[0].lower.dtype
