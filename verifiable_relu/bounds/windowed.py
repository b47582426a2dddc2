"""Steps back within windows: through activations, scalings and plain convolutions, and to the inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import replace

import torch
from torch import Tensor

from verifiable_relu.bounds.forward import NodeBounds
from verifiable_relu.bounds.last_convolution import LastConvolution
from verifiable_relu.bounds.lines import of_samples
from verifiable_relu.bounds.operators import ConvolutionOperator, sums
from verifiable_relu.bounds.rows import Chunk, Rows, Stepped
from verifiable_relu.bounds.shifted import ShiftedLines
from verifiable_relu.bounds.slack import Slack
from verifiable_relu.bounds.tuning import Tuning
from verifiable_relu.bounds.window import Grid, Window
from verifiable_relu.network.nodes import Activation, Scale


class Windowed:
    """A stepper of rows that are given in windows smaller than the image.

    Args:
        bounds: the nodes' bounds.
        slack: what rounding may change.
        shifted: the steps through activations.
        last: the step through a convolution of the inputs.
        tuning: how large windows may be.
    """

    def __init__(
        self, bounds: NodeBounds, slack: Slack, shifted: ShiftedLines, last: LastConvolution, tuning: Tuning
    ) -> None:
        self._bounds, self._slack, self._shifted, self._last = bounds, slack, shifted, last
        self._tuning = tuning
        self.tables: dict[tuple[Grid, Hashable], Tensor] = {}

    def step(self, index: int, rows: Rows, chunk: Chunk) -> Stepped | None:
        """One step within windows; None where rows are dense, or the node does not act on windows."""
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
        if not isinstance(operator, ConvolutionOperator) or not operator.plain:
            return None
        rows = self._clean(rows, index)
        if self._last.operator(index) is not None:
            return Stepped(self._added(-self.in_cells(rows, operator, chunk.sample), chunk))
        return Stepped(None, operator.node.inputs[0], rows.before(operator))

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

    def in_cells(self, a: Window, operator: ConvolutionOperator, sample: Tensor | None) -> Tensor:
        """|A|·radius in cells of the inputs, (rows,), of rows of the convolution at which they end."""
        cells = self._last.radius(operator, operator.cells_shape(a.grid.size))
        reached = a.grid.cells_before(operator)
        many = len(cells) > 1
        radius = a.of(of_samples(cells, sample), reached) if many else self._table(a, reached, "cells", lambda: cells)
        return sums.last_axes(operator.cells(a.values).abs_().mul_(radius), 3, self._tuning)
