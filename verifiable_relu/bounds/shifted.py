"""Lines of activations about the nodes' points, moved outward by what rounding may change: one step of a row back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from verifiable_relu.bounds import rounding
from verifiable_relu.bounds.float32 import Float32
from verifiable_relu.bounds.forward import NodeBounds
from verifiable_relu.bounds.lines import LineTable, of_samples
from verifiable_relu.bounds.operators import sums
from verifiable_relu.bounds.slack import Slack
from verifiable_relu.bounds.tuning import Tuning
from verifiable_relu.bounds.types import Lines
from verifiable_relu.network.nodes import Activation, Relu


@dataclass(frozen=True)
class Step:
    """How rows A of an activation's output are replaced by rows of its input.

    A⁺·(lower line) + A⁻·(upper line) is taken as A·(lower line) + A⁻·(upper line − lower line).

    Attributes:
        low: the slope of the lower line, (batch, neurons).
        rise: the slope of the difference of both lines, likewise.
        floor: the offset of the lower line, likewise; None where all lower lines go through the origin.
        lift: the offset of the difference, likewise.
        float32: whether rows, and the sums of their constants, are in float32 in a network in float64.
    """

    low: Tensor
    rise: Tensor
    floor: Tensor | None
    lift: Tensor
    float32: bool = False

    @staticmethod
    def of(node: Activation, lines: Lines) -> Step:
        """The lines as they are."""
        through = isinstance(node, Relu)
        step = Step(
            lines.lower_slope,
            lines.upper_slope - lines.lower_slope,
            None if through else lines.lower_offset,
            lines.upper_offset if through else lines.upper_offset - lines.lower_offset,
        )
        return step.map(lambda t: t.flatten(1))

    def map(self, change: Callable[[Tensor], Tensor]) -> Step:
        """The step with ``change`` applied to each slope and offset."""
        floor = None if self.floor is None else change(self.floor)
        return Step(change(self.low), change(self.rise), floor, change(self.lift), self.float32)

    def of_samples(self, sample: Tensor | None) -> Step:
        """The steps of the samples named, one after another; by default of every sample."""
        return self.map(lambda t: of_samples(t, sample))

    def in_float32(self, depth: int) -> Step:
        """The step in float32, outward enough for sums in which a product takes part in ``depth`` additions."""
        assert self.floor is not None
        lift, floor = rounding.summed_single(self.lift, self.floor, depth)
        return replace(self, lift=lift, floor=floor, float32=True).map(lambda t: t.float())

    @cached_property
    def _slopes(self) -> tuple[Tensor, Tensor]:
        """``low`` and ``rise`` for every row of a sample, (batch, 1, neurons)."""
        return self.low.unsqueeze(1), self.rise.unsqueeze(1)

    def back(self, a: Tensor, tuning: Tuning) -> tuple[Tensor, Tensor]:
        """Coefficients before the activation of those after it, (groups, each, neurons), and their constants."""
        (low, rise), negative = self._slopes, a.clamp(max=0)
        before = (a * low).addcmul_(negative, rise)
        if self.float32:
            assert self.floor is not None
            products = negative.mul_(self.lift.unsqueeze(1)).addcmul_(a, self.floor.unsqueeze(1))
            return before, sums.last_axes(products, 1, tuning)
        return before, sums.dot(negative, self.lift, None if self.floor is None else (a, self.floor))


class ShiftedLines:
    """The steps through the activations of a relaxation, made as they are needed.

    Args:
        bounds: the nodes' bounds and points.
        lines: the activations' lines.
        slack: what rounding may change.
        float32: which coefficients are in float32.
        tuning: of sums in float32.
    """

    def __init__(self, bounds: NodeBounds, lines: LineTable, slack: Slack, float32: Float32, tuning: Tuning) -> None:
        self._bounds, self._lines, self._slack, self._float32 = bounds, lines, slack, float32
        self._tuning = tuning
        self._steps: dict[tuple[int, bool, int], Step] = {}

    def depth(self, index: int, count: int | None = None) -> int:
        """In how many float32 additions a product with a neuron of activation ``index`` takes part; 0 in float64.

        Args:
            index: the activation.
            count: how many products are summed, if not as many as the activation has neurons.
        """
        if not self._float32.holds(index):
            return 0
        own = sums.depth(self._lines.node(index).size, self._tuning)
        return own if count is None else max(own, sums.depth(count, self._tuning))

    def step(self, index: int, rounded: bool, depth: int = 0) -> Step:
        """The step through activation ``index`` that all rows of a sample share.

        Args:
            index: the activation.
            rounded: whether to account for rounding: about the nodes' points, and outward.
            depth: in float32, how many additions a product takes part in; 0 for float64.
        """
        key = (index, rounded, depth)
        if key not in self._steps:
            if depth:
                self._steps[key] = self.step(index, rounded).in_float32(depth)
            else:
                lines = self._lines.of(index)
                self._steps[key] = (
                    self.outward(index, lines, None) if rounded else Step.of(self._lines.node(index), lines)
                )
        return self._steps[key]

    def own(self, index: int, lines: Lines, sample: Tensor, rounded: bool) -> Step:
        """The step through activation ``index`` of rows that have their own lines, (rows, *shape).

        ``sample``: (rows,) the sample of each.
        """
        if not rounded:
            return Step.of(self._lines.node(index), lines)
        step, depth = self.outward(index, lines, sample), self.depth(index)
        return step.in_float32(depth) if depth else step

    def outward(self, index: int, lines: Lines, sample: Tensor | None) -> Step:
        """The step of lines about the points of activation ``index``, moved outward by what rounding may change.

        Args:
            index: the activation.
            lines: those of every sample, (batch, *shape); or rows' own lines, (rows, *shape).
            sample: (rows,) the sample of each row that has its own lines, else None.
        """
        node, bounds, slack = self._lines.node(index), self._bounds, self._slack
        source = node.inputs[0]

        def of(values: Tensor) -> Tensor:
            return values if sample is None else of_samples(values, sample)

        lines = Lines(*(t.flatten(1) for t in lines.parts()))
        z, error = of(bounds.point(source).flatten(1)), of(slack.error(source, slack.after_relu(index)))
        if isinstance(node, Relu):
            error = error * of(bounds.possibly_active(index))
        else:
            error = error * torch.maximum(lines.lower_slope.abs(), lines.upper_slope.abs())
            magnitude, image = of(bounds.magnitude(source)), of(bounds.magnitude(index))
            radius = of(bounds.radius(source).flatten(1)) if self._float32.holds(index) else None
            error = error + rounding.backward_activation(node, magnitude, image, lines, slack.sums, radius)
        top, floor = width_at(lines, z), height_at(lines, z, of(bounds.point(index).flatten(1)))
        lift, floor = rounding.outward(top, floor, error, node.size + slack.sums)
        return Step(lines.lower_slope, lines.upper_slope - lines.lower_slope, floor, lift)


def width_at(lines: Lines, z: Tensor) -> Tensor:
    """How far the upper line lies above the lower line at z."""
    return torch.addcmul(lines.upper_offset - lines.lower_offset, lines.upper_slope - lines.lower_slope, z)


def height_at(lines: Lines, z: Tensor, value: Tensor) -> Tensor:
    """How far the lower line lies above a value at z."""
    return torch.addcmul(lines.lower_offset, lines.lower_slope, z) - value
