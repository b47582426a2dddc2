"""Segments of pre-activations: which part of its interval a node leaves a neuron, and how its value lies there.

For a whole tree the value of neuron j is a line of one slope t_j and a remainder (``relaxation``),

    r_j = t_j·z_j + o_j + Q_j·q̃_j,   0 ≤ q̃_j ≤ 1.

A split cuts a segment of [l_j, u_j] at the point that the function names: at the kink of a ReLU, whose two halves are
its phases, and at a point of a smooth function. Segments are numbered as in a heap: 1 is [l, u], and the halves of
segment k are 2k below and 2k + 1 above. On each segment the points (z, q̃) of the function lie in a polygon: the graph
itself of a piecewise-linear function, the band between two linear bounds of another one. A multiplier of z is optimal
at a vertex, so that polygons are all that a proof needs. An ascent uses a line below q̃ and one above it.

Number 0 stands for an open neuron of which only 0 ≤ q̃ ≤ 1 is used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verifiable_relu.errors import UnsupportedError
from verifiable_relu.ir.interval import Interval
from verifiable_relu.rounding import divisor
from verifiable_relu.search.bab.forms import Block
from verifiable_relu.search.bab.system import ReducedSystem

_MOST = 64
"""Segments of smooth neurons from this number on are not cut, so that a number fits into eight bits."""

_POINTS = 16
"""Points of a segment, and one more, at which the distance of its lines from the function is measured."""


@dataclass(frozen=True, eq=False)
class SegmentLines:
    """Lines of q̃ on some segments, all of one shape: rate·z + offset below and above, and the ends of z."""

    lower: Tensor
    upper: Tensor
    rate_below: Tensor
    rate_above: Tensor
    offset_below: Tensor
    offset_above: Tensor


class Segments:
    """The segments of all neurons of a system, whose lines are computed once for a tree.

    Args:
        system: the neurons.
        slopes, offset, width: (m,) t, o and Q.

    Attributes:
        last: (m,) segments from this number on are not cut.
        kinked: (m,) bool, the neurons with a kink, of which any line through it will do on one side.
        all_kinked: whether all neurons have a kink.
        concave: (m,) bool, those of them whose other side is the lower one.
        has_concave: whether there are any.
        flattest, steepest: (m,) between these rates, of q̃ by z, are the lines through the kink; for concave neurons
            the other way round.

    Raises:
        UnsupportedError: if a line is not finite.
    """

    def __init__(self, system: ReducedSystem, slopes: Tensor, offset: Tensor, width: Tensor) -> None:
        self._system, self._slopes, self._offset, self._width = system, slopes, offset, width
        linear = [block.function.piecewise_linear for block in system.blocks]
        self._count = 4 if all(linear) else 2 * _MOST
        counts = torch.tensor([block.end - block.start for block in system.blocks], dtype=torch.long)
        self.kinked = torch.tensor(linear, dtype=torch.bool).repeat_interleave(counts).to(slopes.device)
        self.last = torch.where(self.kinked, 2, _MOST)
        shape = (system.size, self._count)
        # Lines below and above, in the order of ``SegmentLines``; 0 ≤ q̃ ≤ 1 until they are computed.
        self._lines = slopes.new_zeros(6, *shape)
        self._lines[5] = 1
        self._lines[0], self._lines[1] = system.lower[:, None], system.upper[:, None]
        self._gaps = slopes.new_ones(2, *shape)
        self._vertices = slopes.new_zeros(2, 4, *shape)
        self._sizes = slopes.new_zeros(shape)
        self._is_cut = torch.zeros(shape, dtype=torch.bool, device=slopes.device)
        self.concave = torch.zeros_like(self.kinked)
        self.flattest, self.steepest = torch.zeros_like(slopes), torch.zeros_like(slopes)
        every = torch.arange(system.size, device=slopes.device)
        self.all_kinked, phases = all(linear), 3 if all(linear) else 1
        numbers, segment = every.repeat_interleave(phases), 1 + torch.arange(phases).to(every).repeat(len(every))
        lower, upper = system.lower.repeat_interleave(phases), system.upper.repeat_interleave(phases)
        if self.all_kinked:
            lower, upper = lower.masked_fill(segment == 3, 0), upper.masked_fill(segment == 2, 0)
            self._is_cut[:, 1] = True
        self._fill(numbers, segment, lower, upper)
        self._gaps[:, :, 0] = torch.where(self.kinked, self._gaps[:, :, 1], 1.0)
        self.has_concave = bool(self.concave.any())

    def _fill(self, numbers: Tensor, segment: Tensor, lower: Tensor, upper: Tensor) -> None:
        """Compute segments [lower, upper] of neurons, by their numbers in ascending order."""
        for block in self._system.blocks:
            first, end = torch.searchsorted(numbers, torch.tensor([block.start, block.end]).to(numbers)).tolist()
            if end > first:
                part = slice(first, end)
                fill = self._fill_linear if block.function.piecewise_linear else self._fill_smooth
                fill(block, numbers[part], segment[part], Interval(lower[None, part], upper[None, part]))
        at = (numbers, segment)
        if not bool(self._lines[(slice(None), *at)].isfinite().all() & self._vertices[(..., *at)].isfinite().all()):
            raise UnsupportedError("the linear bounds of an activation are not finite")

    def _fill_linear(self, block: Block, numbers: Tensor, segment: Tensor, x: Interval) -> None:
        middle = block.select(numbers).split_point(x)
        z = torch.cat([x.lower, middle, x.upper, x.upper])
        r = block.select(numbers).value(z)
        q = self._remainder(numbers, r - self._slopes[numbers] * z)
        chord = (q[2] - q[0]) / divisor(z[2] - z[0])
        from_chord = q[0] + chord * (middle[0] - z[0]) - q[1]
        whole = segment < self.last[numbers]
        through = torch.stack([chord, q[0] - chord * z[0]])
        flat = torch.stack([torch.zeros_like(chord), q[1]])
        convex = whole & (from_chord >= 0)
        below = torch.where(convex, flat, through)
        above = torch.where(whole & ~convex, flat, through)
        gaps = torch.where(whole, torch.stack([-from_chord, from_chord]).clamp(min=0), 0.0)
        size = (r.abs() + (self._slopes[numbers] * z).abs()).amax(0)
        self._put(numbers, segment, z, q, (below, above), gaps, size)
        left, right = (q[1] - q[0]) / divisor(z[1] - z[0]), (q[2] - q[1]) / divisor(z[2] - z[1])
        first = numbers[whole]
        self.concave[first] = ~convex[whole]
        self.flattest[first], self.steepest[first] = left[whole], right[whole]

    def _fill_smooth(self, block: Block, numbers: Tensor, segment: Tensor, x: Interval) -> None:
        function, t, width = block.select(numbers), self._slopes[numbers], self._width[numbers]
        lines = function.relaxation(x, *function.slopes(x))
        pairs = ((lines.lower_slope, lines.lower_offset), (lines.upper_slope, lines.upper_offset))
        below, above = (torch.cat([(s - t) / width, self._remainder(numbers, o)]) for s, o in pairs)
        ends = torch.cat([x.lower, x.upper])
        q = torch.cat([rate * ends + offset for rate, offset in (below, above)])
        share = torch.arange(_POINTS + 1, device=t.device, dtype=t.dtype)[:, None] / _POINTS
        at = torch.lerp(x.lower, x.upper, share)
        y = self._remainder(numbers, function.value(at) - t * at)
        gaps = torch.stack([(y - below[0] * at - below[1]).amax(0), (above[0] * at + above[1] - y).amax(0)])
        reach = ends.abs().amax(0)
        slopes, offsets = (torch.maximum(*(pair[i].abs()[0] for pair in pairs)) for i in range(2))
        self._put(numbers, segment, ends.repeat(2, 1), q, (below, above), gaps, (slopes + t.abs()) * reach + offsets)

    def _remainder(self, numbers: Tensor, values: Tensor) -> Tensor:
        """Return q̃ of r − t·z."""
        return (values - self._offset[numbers]) / self._width[numbers]

    def _put(
        self,
        numbers: Tensor,
        segment: Tensor,
        z: Tensor,
        q: Tensor,
        lines: tuple[Tensor, Tensor],
        gaps: Tensor,
        size: Tensor,
    ) -> None:
        (below, above), at = lines, (numbers, segment)
        ends = (z[0], z[-1])
        self._lines[(slice(None), *at)] = torch.stack([*ends, below[0], above[0], below[1], above[1]])
        self._vertices[(..., *at)], self._gaps[(slice(None), *at)] = torch.stack([z, q]), gaps.clamp(min=0)
        self._sizes[at] = (size + self._offset[numbers].abs()) / self._width[numbers]

    def cut(self, numbers: Tensor, segment: Tensor) -> None:
        """Compute the halves of segments (count,) of neurons (count,), unless they are known."""
        keys = (numbers * self._count + segment.long().clamp(min=1)).unique()
        numbers, segment = keys // self._count, keys % self._count
        todo = ~self._is_cut[numbers, segment] & (segment < self.last[numbers])
        numbers, segment = numbers[todo], segment[todo]
        if not len(numbers):
            return
        lower, upper = self._lines[0, numbers, segment], self._lines[1, numbers, segment]
        point = torch.zeros_like(lower)
        for block in self._system.blocks:
            mine = (numbers >= block.start) & (numbers < block.end)
            if bool(mine.any()):
                x = Interval(lower[None, mine], upper[None, mine])
                point[mine] = block.select(numbers[mine]).split_point(x)[0]
        self._fill(numbers, 2 * segment, lower, point)
        self._fill(numbers, 2 * segment + 1, point, upper)
        self._is_cut[numbers, segment] = True

    def point(self, numbers: Tensor, segment: Tensor) -> Tensor:
        """Return where segments of neurons that were cut, (count,) each, were cut."""
        return self._lines[1, numbers, 2 * segment.long().clamp(min=1)]

    def lines(self, numbers: Tensor, segment: Tensor, dtype: torch.dtype) -> SegmentLines:
        """Return the lines of segments (nodes, k) of neurons (k,)."""
        at = numbers * self._count + segment.long()
        return SegmentLines(*self._lines.flatten(1).index_select(1, at.flatten()).to(dtype).unflatten(1, at.shape))

    def gaps(self, numbers: Tensor, segment: Tensor) -> tuple[Tensor, Tensor]:
        """Return how far q̃ is from the line below and from that above, at most, (nodes, k) each."""
        at = numbers * self._count + segment.long()
        return self._gaps[0].flatten().take(at), self._gaps[1].flatten().take(at)

    @property
    def open_gaps(self) -> tuple[Tensor, Tensor]:
        """As ``gaps`` of open neurons, (m,) each."""
        return self._gaps[0, :, 0], self._gaps[1, :, 0]

    def least(self, numbers: Tensor, segment: Tensor, c: Tensor, pull: Tensor, unit: float) -> tuple[Tensor, Tensor]:
        """Return lower bounds of c·q̃ + pull·z over segments (nodes, k) of neurons (k,), and their rounding errors.

        Args:
            numbers, segment: as above.
            c, pull: (nodes, k).
            unit: what a sum of the terms loses, relative to their sizes.
        """
        at = numbers * self._count + segment.long().clamp(min=1)
        z, q = self._vertices.flatten(2).flatten(0, 1).index_select(1, at.flatten()).unflatten(1, at.shape).split(4)
        polygon = c * q[0] + pull * z[0]
        for more in range(1, 4):
            polygon = torch.minimum(polygon, c * q[more] + pull * z[more])
        band = c.clamp(max=0) + torch.minimum(pull * z[0], pull * z[-1])
        reach = torch.maximum(z[0].abs(), z[-1].abs())
        error = unit * (c.abs() * (self._sizes.flatten().take(at) + 1) + pull.abs() * reach)
        return torch.maximum(polygon, band), error
