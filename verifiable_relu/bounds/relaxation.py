"""A network over a batch of boxes, with lines in the place of its activations: what linear bounds are asked of."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cached_property

import torch
from torch import Tensor

from verifiable_relu.bounds.backward import Backward, by_intervals
from verifiable_relu.bounds.chunks import chunk_size, groups
from verifiable_relu.bounds.float32 import Float32
from verifiable_relu.bounds.forward import NodeBounds, Tighten
from verifiable_relu.bounds.lines import LineTable
from verifiable_relu.bounds.rows import Chunk
from verifiable_relu.bounds.rules import Rules
from verifiable_relu.bounds.tuning import MEMORY, TUNING, Tuning
from verifiable_relu.bounds.types import Bounds, Lines
from verifiable_relu.bounds.work import receptive
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Permute, Scale


class Relaxation:
    """A network over a batch of boxes: each node's bounds and each activation's lines, made as they are needed.

    In every sample of the batch bounds are wanted of other neurons, and of another number of them. So rows come in
    groups of equal size, each of one sample (``chunks.groups``), and what is known of a sample is held once for all
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
    """

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
        self._everywhere, self._work = float32, 0

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
    def backward(self) -> Backward:
        """Walks with coefficients in float32 where that is worth it."""
        return Backward(self.nodes, self.lines, Float32(self.nodes, self.tuning, self._everywhere), self.tuning)

    @cached_property
    def backward64(self) -> Backward:
        """Walks with coefficients in float64 alone, over the same bounds and lines."""
        return Backward(self.nodes, self.lines, Float32(self.nodes, self.tuning, never=True), self.tuning)

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
            rounded: whether to account for rounding. Without, the values may steer a search and prove nothing.
            record: takes the coefficients of the activations that have their own lines, (R, neurons), by index.
            coefficients: whether those of the node at which rows end are wanted.

        Returns:
            (R,) lower bounds; if ``rounded``, NaN or −inf where arithmetic broke down and never too high.
            (R, input_size) the coefficients A, if wanted, of the node at which rows end (``of_input``).
        """
        chunk = self._chunk(rows, sample, rounded, lines, coefficients)
        return self.backward.rows(target, rows, constant, chunk, record)

    def _chunk(
        self,
        rows: Tensor,
        sample: Tensor | None,
        rounded: bool = True,
        lines: Mapping[int, Lines] | None = None,
        coefficients: bool = False,
    ) -> Chunk:
        """Rows, (R, …), group after group, and the sample of each group."""
        groups = self.samples if sample is None else sample.shape[0]
        return Chunk(groups, rows.shape[0] // max(1, groups), sample, rounded, lines or {}, coefficients)

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
        self._work += neuron.shape[0] * receptive(self.network)[index]
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

        All coefficients are in float64 where that costs little beside what ``neurons`` has been asked for.

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
                backward = self.backward64 if self._little(count) else self.backward
                bounded = backward.rows(last, chosen, None, self._chunk(chosen, mine))[0]
            if isinstance(part, slice) and bounded.shape[0] == count:
                return bounded
            found[part] = bounded
        return found

    def _little(self, rows: int) -> bool:
        """Whether so many rows of the output are little work beside that of neurons, and would be in float32."""
        if self._everywhere or self.backward.float32.last_node < 0:
            return False
        return self._work > self.tuning.outputs_work * rows * receptive(self.network)[-1]
