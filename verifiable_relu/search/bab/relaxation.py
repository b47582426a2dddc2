"""The relaxation that all nodes of a tree share, and the segments of pre-activations that a node adds.

With any slope t_j, the value of neuron j is a line and a bounded remainder,

    r_j = t_j·z_j + o_j + q_j,   o_j = min (f_j(z) − t_j·z),   0 ≤ q_j ≤ Q_j = max (f_j(z) − t_j·z) − o_j

over z ∈ [l_j, u_j]. Put into the reduced system block by block, this makes all pre-activations and the objective affine
in e ∈ [−1, 1]ⁿ and q̃ = q/Q ∈ [0, 1]ᵐ. The objective's least value over that box is the α-CROWN bound with the slopes
t_j (Xu et al., arXiv 2011.13824). Nodes of a tree change neither slopes nor forms: that makes them cheap.

A split cuts a segment of [l_j, u_j] at the point that the function names: at the kink of a ReLU, whose two halves are
its phases, and at a point of a smooth function. Segments are numbered as in a heap: 1 is [l, u], and the halves of
segment k are 2k below and 2k + 1 above. On each segment the points (z, q̃) of the function lie in a polygon: the graph
itself of a piecewise-linear function, the band between two linear bounds of another one. A multiplier of z is optimal
at a vertex, so that polygons are all that a proof needs. An ascent uses a line below q̃ and one above it. Number 0
stands for an open neuron, for which only 0 ≤ q̃ ≤ 1 is used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verifiable_relu.errors import UnsupportedError
from verifiable_relu.ir.interval import Interval
from verifiable_relu.rounding import FEW, LEAST_WIDTH, OWN, TINY, divisor, gamma, unit_roundoff
from verifiable_relu.search.bab.slopes import HullCuts
from verifiable_relu.search.bab.system import AffineForms, Block, ReducedSystem, Replacement
from verifiable_relu.search.records import Stack

_MOST = 64  # Segments of smooth neurons from this number on are not cut, so that a number fits into eight bits
_POINTS = 16  # Points of a segment, and one more, at which the distance of its lines from the function is measured
_UNIT = unit_roundoff(torch.float64)


@dataclass(frozen=True, eq=False)
class SegmentLines:
    """Linear bounds rate·z + offset of q̃ on some segments, below and above, and the segments' ends in z."""

    lower: Tensor
    upper: Tensor
    rate_below: Tensor
    rate_above: Tensor
    offset_below: Tensor
    offset_above: Tensor


class Segments:
    """Segments of all neurons of a system; their linear bounds are computed once per tree.

    Args:
        system: the neurons.
        slopes, offset, width: (m,) t, o and Q.

    Attributes:
        last: (m,) segments from this number on are not cut.
        kinked: (m,) bool, neurons whose function has a kink: on one side any line through it is a bound.
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
        self.all_kinked = all(linear)
        self._count, phases = (4, 3) if self.all_kinked else (2 * _MOST, 1)
        counts = torch.tensor([len(block) for block in system.blocks], dtype=torch.long)
        self.kinked = torch.tensor(linear, dtype=torch.bool).repeat_interleave(counts).to(slopes.device)
        self.last = torch.where(self.kinked, 2, _MOST)
        shape = (system.size, self._count)
        # In the order of ``SegmentLines``; 0 ≤ q̃ ≤ 1 until they are computed.
        self._lines = slopes.new_zeros(6, *shape)
        self._lines[5] = 1
        self._lines[0], self._lines[1] = system.lower[:, None], system.upper[:, None]
        self._gaps, self._sizes = slopes.new_ones(2, *shape), slopes.new_zeros(shape)
        self._vertices = slopes.new_zeros(2, 4, *shape)
        self._is_cut = torch.zeros(shape, dtype=torch.bool, device=slopes.device)
        self.concave = torch.zeros_like(self.kinked)
        self.flattest, self.steepest = torch.zeros_like(slopes), torch.zeros_like(slopes)
        every = torch.arange(system.size, device=slopes.device)
        numbers, segment = every.repeat_interleave(phases), 1 + torch.arange(phases).to(every).repeat(len(every))
        lower, upper = system.lower.repeat_interleave(phases), system.upper.repeat_interleave(phases)
        if self.all_kinked:
            lower, upper = lower.masked_fill(segment == 3, 0), upper.masked_fill(segment == 2, 0)
            self._is_cut[:, 1] = True
        self._fill(numbers, segment, lower, upper)
        self._gaps[:, :, 0] = torch.where(self.kinked, self._gaps[:, :, 1], 1.0)
        self.has_concave = bool(self.concave.any())

    def _fill(self, numbers: Tensor, segment: Tensor, lower: Tensor, upper: Tensor) -> None:
        """Compute segments [lower, upper] of neurons."""
        for block in self._system.blocks:
            mine = ((numbers >= block.start) & (numbers < block.end)).nonzero().squeeze(1)
            if len(mine):
                self._fill_block(block, numbers[mine], segment[mine], Interval(lower[None, mine], upper[None, mine]))
        at = (numbers, segment)
        if not bool(self._lines[(slice(None), *at)].isfinite().all() & self._vertices[(..., *at)].isfinite().all()):
            raise UnsupportedError("the linear bounds of an activation are not finite")

    def _fill_block(self, block: Block, numbers: Tensor, segment: Tensor, x: Interval) -> None:
        function, t, width = block.select(numbers), self._slopes[numbers], self._width[numbers]
        whole, ends = segment < self.last[numbers], torch.cat([x.lower, x.upper])

        def remainder(values: Tensor) -> Tensor:
            return (values - self._offset[numbers]) / width

        (low, high), choice = function.slopes(x), function.slope_range(x)
        if function.piecewise_linear:
            # One line of an open neuron goes through the kink, the other one is the chord.
            convex = (choice.lower_from != choice.lower_to)[0]
            low, high = torch.where(whole & convex, t, low), torch.where(whole & ~convex, t, high)
            z = torch.cat([x.lower, function.split_point(x), x.upper, x.upper])
            q = remainder(function.value(z) - t * z)
            at, y, first = z[1:2], q[1:2], numbers[whole]
            rates = (q[1:3] - q[:2]) / divisor(z[1:3] - z[:2])
            self.concave[first] = ~convex[whole]
            self.flattest[first], self.steepest[first] = rates[:, whole]
        lines = function.relaxation(x, low, high)
        below, above = (
            torch.cat([(slope - t) / width, remainder(offset)])
            for slope, offset in ((lines.lower_slope, lines.lower_offset), (lines.upper_slope, lines.upper_offset))
        )
        if not function.piecewise_linear:
            z, q = ends.repeat(2, 1), torch.cat([rate * ends + offset for rate, offset in (below, above)])
            share = torch.arange(_POINTS + 1, device=t.device, dtype=t.dtype)[:, None] / _POINTS
            at = torch.lerp(x.lower, x.upper, share)
            y = remainder(function.value(at) - t * at)
        gaps = torch.stack([(y - below[0] * at - below[1]).amax(0), (above[0] * at + above[1] - y).amax(0)])
        place = (numbers, segment)
        self._lines[(slice(None), *place)] = torch.stack([*ends, below[0], above[0], below[1], above[1]])
        self._vertices[(..., *place)], self._gaps[(slice(None), *place)] = torch.stack([z, q]), gaps.clamp(min=0)
        # The function is between its lines.
        slopes = torch.maximum(lines.lower_slope.abs(), lines.upper_slope.abs())[0]
        offsets = torch.maximum(lines.lower_offset.abs(), lines.upper_offset.abs())[0]
        size = (slopes + t.abs()) * ends.abs().amax(0) + offsets
        self._sizes[place] = (size + self._offset[numbers].abs()) / width

    def cut(self, numbers: Tensor, segment: Tensor) -> None:
        """Compute the halves of segments (count,) of neurons (count,), unless they are known."""
        if self.all_kinked:
            return
        keys = (numbers * self._count + segment.long().clamp(min=1)).unique()
        numbers, segment = keys // self._count, keys % self._count
        todo = ~self._is_cut[numbers, segment] & (segment < self.last[numbers])
        numbers, segment = numbers[todo], segment[todo]
        if not len(numbers):
            return
        lower, upper = self._lines[0, numbers, segment], self._lines[1, numbers, segment]
        point = torch.zeros_like(lower)
        for block in self._system.blocks:
            mine = ((numbers >= block.start) & (numbers < block.end)).nonzero().squeeze(1)
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
        """Return the largest distances of q̃ from its lower and its upper linear bound, (nodes, k) each."""
        at = numbers * self._count + segment.long()
        return self._gaps[0].flatten().take(at), self._gaps[1].flatten().take(at)

    @property
    def open_gaps(self) -> tuple[Tensor, Tensor]:
        """The ``gaps`` of open neurons, (m,) each."""
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


class TreeRelaxation:
    """Relaxation that a search tree shares: a reduced system with slopes for one objective.

    Args:
        system: the system.
        rows: the objectives, and rows behind them that are at most zero where it matters.
        slopes: (m,) t.
        objectives: the number of objectives.
        cuts: upper bounds of some neurons, whose values are a cut and a remainder in all forms; None for none.

    Attributes:
        rows: as relaxed forms.
        columns: (k,) the neurons whose pre-activations have been made, in the order in which they were asked for.
        offset, width: (m,) o, rounded down, and Q, rounded up.
        segments: of the neurons.
        over: (m,) bool, the neurons with cuts.
        span: (m,) ``width``, or that of the remainder that a cut leaves: a unit of q̃ in all forms.
    """

    def __init__(
        self,
        system: ReducedSystem,
        rows: AffineForms,
        slopes: Tensor,
        objectives: int = 1,
        cuts: HullCuts | None = None,
    ) -> None:
        self.system, self.slopes, self.objectives, self.cuts = system, slopes, objectives, cuts
        self.offset, top = torch.zeros_like(slopes), torch.zeros_like(slopes)
        size = torch.maximum(-system.lower, system.upper)
        for block in system.blocks:
            x, t = system.interval(block), slopes[None, block.part]
            self.offset[block.part] = block.function.floor(x, t)[0]
            top[block.part] = block.function.top(x, t)[0]
        terms = slopes.abs() * size + self.offset.abs() + top.abs()
        self.width = torch.maximum((top - self.offset) * FEW, LEAST_WIDTH * torch.maximum(terms, size)) + TINY
        self.segments = Segments(system, slopes, self.offset, self.width)
        self.over, self.span = torch.zeros_like(slopes, dtype=torch.bool), self.width.clone()
        if cuts is not None:
            self.over[cuts.neurons] = True
            least = LEAST_WIDTH * size[cuts.neurons]
            self.span[cuts.neurons] = torch.maximum(cuts.width * FEW + TINY, least)
        self.rows = self._relaxed(system.substituted(rows, self._lines))
        self._place = torch.full((system.size,), -1, device=slopes.device)
        self.columns, self._forms, self._base = self._place[:0], Stack(self.rows[:0]), Stack(self.rows[:0])

    @property
    def made(self) -> Tensor:
        """(m,) bool, the neurons among ``columns``."""
        return self._place >= 0

    @property
    def forms(self) -> AffineForms:
        """The pre-activations of the neurons ``columns``."""
        return self._forms.rows

    @property
    def base(self) -> AffineForms:
        """Differences of two forms of a neuron's value, by its cut and by its slope, of the neurons ``columns``.

        At the network's values that of a neuron with a cut is ``width`` times the remainder that its slope leaves.
        """
        return self._base.rows

    def places(self, neurons: Tensor) -> Tensor:
        """Return the rows of ``forms`` that hold some neurons' pre-activations; missing ones are computed."""
        found = self._place[neurons]
        missing = neurons[found < 0]
        if not len(missing):
            return found
        missing = missing.unique()
        self._place[missing] = len(self.columns) + torch.arange(len(missing), device=missing.device)
        forms = self._relaxed(self.system.of_neurons(missing, self._lines))
        self._forms.push(forms)
        self.columns = torch.cat([self.columns, missing])
        if self.cuts is not None:
            self._base.push(self._differences(missing, forms))
        return self._place[neurons]

    def _lines(self, block: Block, mine: Tensor) -> Replacement:
        """Replace each value by t·z + o; the products' rounding is charged here."""
        part, count, before = block.part, len(block), None
        size = torch.maximum(-self.system.lower[part], self.system.upper[part])
        slope, offset = (t[part].masked_fill(self.over[part], 0.0) for t in (self.slopes, self.offset))
        weight, constant = mine * slope, mine @ offset
        error = _UNIT * (weight.abs() @ size) + gamma(count + 4, torch.float64) * (mine.abs() @ offset.abs())
        error = OWN * (error + TINY * (1 + count + size.sum()))
        if self.cuts is not None:
            before, more, lost = self.cuts.combined(mine, block, self.system, self.span)
            constant, error = constant + more, error + lost + _UNIT * (constant.abs() + more.abs())
        return Replacement(weight, constant, error, before)

    def _differences(self, neurons: Tensor, forms: AffineForms) -> AffineForms:
        """Return cut − span + span·q̃ − slope·z − offset of neurons (count,), given their z; 0 of those without cuts."""
        has = self.over[neurons].nonzero().squeeze(1)
        mine, n, found = neurons[has], self.system.inputs, forms.each(torch.zeros_like)
        values = AffineForms.zeros(len(has), n, self.system.size, self.slopes)
        values.matrix[torch.arange(len(has), device=has.device), n + mine] = 1
        value, z = self._relaxed(self.system.substituted(values, self._lines)), forms[has]
        t, o = self.slopes[mine], self.offset[mine]
        size = value.size() + t.abs() * z.size() + o.abs()
        found.matrix[has] = value.matrix - t[:, None] * z.matrix
        found.constant[has] = value.constant - t * z.constant - o
        error = value.error + t.abs() * z.error + 8 * _UNIT * size + TINY * (8 + value.matrix.shape[1])
        found.error[has] = OWN * error
        return found

    def _relaxed(self, rows: AffineForms) -> AffineForms:
        """Return forms of e and of the remainders q as forms of e and q̃."""
        matrix, n = rows.matrix.clone(), rows.n
        matrix[:, n:] *= self.span
        rounding = _UNIT * matrix[:, n:].abs().sum(1) + TINY * (1 + self.system.size)
        return AffineForms(matrix, rows.constant, OWN * (rows.error + rounding), n)
