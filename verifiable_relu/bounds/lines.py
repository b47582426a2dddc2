"""The lines under and over every activation that a relaxation puts in its place."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from verifiable_relu.bounds.activations import relax, row, unstable
from verifiable_relu.bounds.forward import NodeBounds
from verifiable_relu.bounds.types import Bounds, Lines
from verifiable_relu.network.nodes import Activation, Relu


def of_samples(values: Tensor, sample: Tensor | None) -> Tensor:
    """The values, (batch, …), of the samples named, one after another; by default of every sample."""
    if sample is None or values.shape[0] == 1 == sample.shape[0]:
        return values
    return values.index_select(0, sample)


class LineTable:
    """The lines of each activation over its input's bounds.

    Args:
        bounds: the nodes' bounds.

    Attributes:
        identity_lower: of ReLUs whose inputs rows have bounded, by index: for which neurons the lower line is z, not 0;
            (batch, *shape) bool.
    """

    def __init__(self, bounds: NodeBounds) -> None:
        self._bounds = bounds
        self.identity_lower: dict[int, Tensor] = {}
        self._lines: dict[int, Lines] = {}
        self._ends: dict[int, tuple[Tensor, ...]] = {}

    def node(self, index: int) -> Activation:
        """The activation node ``index``."""
        node = self._bounds.network.nodes[index]
        assert isinstance(node, Activation)
        return node

    def of(self, index: int) -> Lines:
        """The lines of activation ``index`` that all rows share, (batch, *shape)."""
        if index not in self._lines:
            lines = self._bounds.rules.lines(index, self.node(index), self._bounds.pre[index])
            if index in self.identity_lower:
                lines = replace(lines, lower_slope=self.identity_lower[index].to(lines.lower_slope))
            self._lines[index] = lines
        return self._lines[index]

    def free(self, index: int) -> Tensor:
        """Where activation ``index`` leaves a choice between lines, as 0 or 1: (batch, *shape)."""
        return unstable(self.node(index), self._bounds.pre[index]).to(self._bounds.values[0].lower)

    def chosen(self, index: int, sample: Tensor, slope: Tensor) -> Lines:
        """The lines of activation ``index`` for rows that choose their own, as ``slope`` of ``activations.relax`` does.

        Args:
            index: the activation.
            sample: (rows,) the sample of each row.
            slope: (rows, *shape), in [0, 1].
        """
        node = self.node(index)
        if not isinstance(node, Relu):
            pre, curve = self._bounds.pre[index], row(node).curve
            mine = Bounds(of_samples(pre.lower, sample), of_samples(pre.upper, sample))
            if curve is None:
                return relax(node, mine, slope)
            if index not in self._ends:
                self._ends[index] = curve.slopes(node, pre, True)
            return curve.between(node, mine, tuple(of_samples(end, sample) for end in self._ends[index]), slope)
        # Of a ReLU only the slope of the lower line can be chosen, and only where the bounds straddle zero.
        common, free = self.of(index), self.free(index)
        fixed = common.lower_slope * (1 - free)
        return Lines(
            torch.addcmul(of_samples(fixed, sample), of_samples(free, sample), slope),
            of_samples(common.lower_offset, sample),
            of_samples(common.upper_slope, sample),
            of_samples(common.upper_offset, sample),
        )
