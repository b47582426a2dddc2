"""Sub-boxes of ``split``: linear bounds of properties over them, and the parts that these bounds cut off.

**Clipping.** A row g of a polytope of the unsafe set has a lower bound g(x) ≥ v + Σ_i |A_i|·|x_i − m_i| over a box: A
are the coefficients of its linear bound, m is the corner where that is least, and v its value there. A counterexample
in the polytope has g(x) ≤ 0 for every row, so that |x_i − m_i| ≤ −v/|A_i| for every input i, since no other term of the
sum is negative. What is left of a box is the smallest box that holds what every polytope leaves of it that is not
proved.

**Sums.** Where no single row of a conjunction is positive over a box, a sum of several may be. A polytope of the unsafe
set is where all of its rows g_k are at most 0; for weights w_k ≥ 0, so is Σ_k w_k·g_k there. The best weights make the
least value of that sum over the box as large as possible: this is the Lagrange dual (Boyd and Vandenberghe, Convex
Optimization, section 5.2) of the question by how much some row must be violated. Weights are looked for with affine
forms in the rows' place, by mirror ascent on the simplex (Beck and Teboulle, Mirror Descent and Nonlinear Projected
Subgradient Methods for Convex Optimization, Operations Research Letters 31, 2003). Any weights give a valid row
(``RowBatch.sums``), which is then bounded like every other one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verifiable_relu.bounds import TUNING, Bounds, Relaxation, crown_relaxation, unstable
from verifiable_relu.bounds.tuning import chunk_size, groups
from verifiable_relu.bounds.zonotope import NARROW, Zonotopes, box_bytes, takes
from verifiable_relu.network.graph import Network
from verifiable_relu.rounding import CUT, above, below, divisor, reach_of_cut, unit_roundoff
from verifiable_relu.spec.row_batch import RowBatch

_UNITS = 4
"""Units of roundoff by which one node, at most, changes the coefficients of inputs, if its weights are exact."""

_SUM_STEPS = 12

_SUM_GAIN = 0.1
"""A sum is bounded if its form's least value is above that of every single row by this part of its size."""

_WEIGHT_UNIT = 1024
"""Weights are multiples of 1/1024, so that sums of rows with small integers are exact."""

_LOOSE = 2
"""Zonotopes are not taken that leave more than this multiple of the neurons unstable that CROWN does."""

_ROWS = 1 << 27
"""Coefficients, about, of the rows by which neurons of all boxes of a batch are bounded."""


@dataclass(frozen=True, eq=False)
class SubBoxes:
    """Sub-boxes of the queries of one network.

    Attributes:
        lower, upper: (boxes, inputs) their ends.
        owner: (boxes,) the query of each.
        within: (boxes,) by number, a larger box whose bounds are known (``KnownBounds``); −1 for none.
    """

    lower: Tensor
    upper: Tensor
    owner: Tensor
    within: Tensor

    def __len__(self) -> int:
        return len(self.owner)

    def __getitem__(self, chosen: Tensor | slice) -> SubBoxes:
        return SubBoxes(self.lower[chosen], self.upper[chosen], self.owner[chosen], self.within[chosen])

    @staticmethod
    def cat(parts: Sequence[SubBoxes]) -> SubBoxes:
        """All boxes of several."""
        columns = zip(*(vars(part).values() for part in parts), strict=True)
        return SubBoxes(*(torch.cat(column) for column in columns))

    def halves(self, dimension: Tensor, counted: Tensor) -> SubBoxes:
        """Twice as many boxes: each cut in the middle of one input (boxes,), the lower halves first.

        Of inputs that are ``counted``, (inputs,) bool, whole numbers alone matter: the halves have none in common.
        """
        dimension = dimension[:, None]
        middle = (self.lower + (self.upper - self.lower) / 2).gather(1, dimension)
        whole = counted[dimension]
        middle = torch.where(whole, middle.floor(), middle)
        lower = torch.cat([self.lower, self.lower.scatter(1, dimension, middle + whole.to(middle))])
        upper = torch.cat([self.upper.scatter(1, dimension, middle), self.upper])
        return SubBoxes(lower, upper, self.owner.repeat(2), self.within.repeat(2))


class KnownBounds:
    """Bounds of neurons over boxes, by number, for the parts of these boxes.

    Args:
        most: boxes whose bounds are kept at once.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._bounds: dict[int, Mapping[int, Bounds]] = {}

    def keep(self, pre: Mapping[int, Bounds], chosen: Tensor, used: Tensor) -> Tensor:
        """Keep bounds over some boxes, and forget those of boxes that are not ``used``, by number, any more.

        Of bounds (batch, *shape) by node, those of the boxes ``chosen``, (count,), are kept, as far as there is room.
        Returned are the numbers (count,) by which they are known; −1 where nothing is kept.
        """
        self._bounds = {number: self._bounds[number] for number in used.unique().tolist() if number >= 0}
        room = max(0, self._most - len(self._bounds)) if pre else 0
        first = max(self._bounds, default=-1) + 1
        for number, box in enumerate(chosen[:room].tolist(), start=first):
            self._bounds[number] = {i: Bounds(b.lower[box, None], b.upper[box, None]) for i, b in pre.items()}
        place = torch.arange(len(chosen), device=chosen.device)
        return torch.where(place < room, first + place, -1)

    def over(self, within: Tensor) -> Mapping[int, Bounds] | None:
        """Return the bounds of the boxes of these numbers (boxes,); None where nothing is known of one of them."""
        found = [self._bounds.get(number) for number in within.tolist()]
        given = [bounds for bounds in found if bounds is not None]
        if not given or len(given) < len(found):
            return None
        ends = {i: ([b[i].lower for b in given], [b[i].upper for b in given]) for i in given[0]}
        return {i: Bounds(torch.cat(lower), torch.cat(upper)) for i, (lower, upper) in ends.items()}


@dataclass(frozen=True, eq=False)
class RowBounds:
    """Linear lower bounds of the rows of properties over a batch of boxes.

    Attributes:
        rows: the rows of the boxes' properties, and sums of them perhaps.
        values: (rows,) lower bounds of matrix·y − bound.
        coefficients: (rows, inputs) of the linear bounds that have these least values.
        influence: (boxes, inputs) the gain of halving each input per unit of its width; of any scale.
        pre: bounds of every activation's input by node, (boxes, *shape), which hold for the boxes' parts.
    """

    rows: RowBatch
    values: Tensor
    coefficients: Tensor
    influence: Tensor
    pre: Mapping[int, Bounds]

    @staticmethod
    def of_lines(rows: RowBatch, values: Tensor, coefficients: Tensor, pre: Mapping[int, Bounds]) -> RowBounds:
        """Bounds by lines: an input's influence is the size of its coefficients."""
        influence = coefficients.new_zeros(rows.samples, coefficients.shape[1])
        return RowBounds(rows, values, coefficients, influence.index_add_(0, rows.sample, coefficients.abs()), pre)

    @staticmethod
    def of_zonotopes(rows: RowBatch, values: Tensor, coefficients: Tensor, forms: Zonotopes, box: Bounds) -> RowBounds:
        """Bounds by zonotopes: an input's influence is its part in the width of the rows (``Zonotopes.influence``)."""
        width = (box.upper - box.lower).flatten(1)
        widths = torch.zeros_like(width).index_add_(0, rows.sample, forms.influence(rows.matrix, rows.sample))
        return RowBounds(rows, values, coefficients, torch.where(width > 0, widths / width, 0.0), {})


class RowBounder:
    """Bounds rows over boxes, by zonotopes and lines over these where few inputs vary, else by CROWN.

    Args:
        network: in float64, on the boxes' device.
        varying: how many inputs vary.
        symbols, most, batch: as ``InputSplit`` has them.
        memory: bytes for a batch.
        counted: (inputs,) bool, those of which whole numbers alone matter.
        points: whether that is true of all inputs that vary; neurons are not bounded then.

    Attributes:
        batch: how many boxes are to be bounded at once.
        by_zonotopes: whether zonotopes are used.
    """

    def __init__(
        self,
        network: Network,
        varying: int,
        symbols: int,
        most: int,
        batch: int,
        memory: int,
        counted: Tensor,
        points: bool,
    ) -> None:
        self.network, self._symbols, self._max_unstable, self._memory = network, symbols, most, memory
        self._counted, self._points = counted, points
        self._most = self.batch = batch
        each = box_bytes(network, varying, symbols) if takes(network) else math.inf
        self.by_zonotopes = varying <= NARROW and each <= memory
        if self.by_zonotopes:
            self.batch = max(1, min(batch, int(memory // each)))

    def bound(
        self, box: Bounds, rows: RowBatch, known: Mapping[int, Bounds] | None, stop: Callable[[], bool], first: bool
    ) -> RowBounds:
        """Bound the rows of the properties of boxes (batch, *input_shape), and sums of them.

        Bounds over larger boxes are ``known``; those over the ``first`` boxes are CROWN's over these very boxes.
        """
        forms = Zonotopes(self.network, box, self._symbols, stop) if self.by_zonotopes else None
        if forms is not None and known is not None and self._unstable(forms.pre) > _LOOSE * self._unstable(known):
            self.by_zonotopes, forms = False, None
        if forms is not None:
            known = forms.pre
        by_lines = forms is None and not self._points
        relaxation = crown_relaxation(
            self.network,
            box,
            known=known,
            crown=by_lines and not (first and known is not None),
            memory=self._memory,
            stop=stop,
            max_unstable=self._max_unstable if known is None else None,
        )
        if by_lines:
            # Rows of all unstable neurons of the boxes that are bounded at once have about ``_ROWS`` coefficients.
            neurons = sum(node.size for node in self.network.nodes)
            coefficients = self._unstable(relaxation.pre) * neurons // relaxation.samples
            self.batch = max(1, min(self._most, _ROWS // max(1, coefficients)))
        values, lines = self._lower(rows, relaxation, forms, stop)

        def affine(part: Tensor) -> tuple[Tensor, Tensor]:
            sample = rows.sample[part]
            if forms is not None:
                center, reach = forms.along(rows.matrix[part], sample)
                return center - rows.bound[part], reach
            reach = lines[part] * half[sample]
            return values[part] + reach.abs().sum(1), reach

        half = (box.upper - box.lower).flatten(1) / 2
        more = sums(rows, values, affine)
        if more is not None:
            found = self._lower(more, relaxation, forms, stop)
            rows = rows.and_sums(more)
            values, lines = torch.cat([values, found[0]]), torch.cat([lines, found[1]])
        if forms is not None:
            return RowBounds.of_zonotopes(rows, values, lines, forms, box)
        return RowBounds.of_lines(rows, values, lines, relaxation.pre if by_lines else {})

    def _unstable(self, pre: Mapping[int, Bounds]) -> int:
        return sum(int(unstable(self.network.nodes[i], bounds).sum()) for i, bounds in pre.items())

    def _lower(
        self, rows: RowBatch, relaxation: Relaxation, forms: Zonotopes | None, stop: Callable[[], bool]
    ) -> tuple[Tensor, Tensor]:
        """Lower bounds (rows,) of the rows' values and the coefficients (rows, inputs) of linear lower bounds."""
        last = len(self.network.nodes) - 1
        matrix = rows.matrix.reshape(-1, *self.network.output_shape)
        values, coefficients = matrix.new_empty(len(matrix)), matrix.new_zeros(len(matrix), self.network.input_size)
        size = chunk_size(self.network, matrix, self._memory, TUNING)
        parts = groups(len(matrix), rows.sample, size, relaxation.samples)
        if self._points:
            for part, mine in parts:
                values[part] = relaxation.by_intervals(matrix[part], mine)
            # Little is left of lines behind steps, but at a point rows are rounded less often than intervals.
            point = (relaxation.box.lower == relaxation.box.upper).flatten(1)[:, self._counted].all(1)
            rest = (point[rows.sample] & (values <= rows.bound)).nonzero().squeeze(1)
            few = groups(len(rest), rows.sample[rest], size, relaxation.samples)
            parts = ((rest[part], mine) for part, mine in few)
        for part, mine in parts:
            stop()
            values[part], reached = relaxation.lower(last, matrix[part], mine, coefficients=True)
            assert reached is not None
            coefficients[part] = relaxation.of_input(reached)
        if forms is not None:
            others, slopes = forms.lower(rows.matrix, rows.sample)
            better = others > values
            values = torch.where(better, others, values)
            coefficients = torch.where(better[:, None], slopes, coefficients)
        return below(values - rows.bound), coefficients


@dataclass(frozen=True)
class Clipped:
    """The rest of a batch of boxes.

    Attributes:
        box: (batch, inputs) the rest of each box.
        empty: (batch,) whether nothing is left: the box is proved.
        margin: (batch,) a positive lower bound of the property's margin in all that was cut off, else infinity.
    """

    box: Bounds
    empty: Tensor
    margin: Tensor


def input_error(network: Network, dtype: torch.dtype) -> float:
    """Return the relative error of computed coefficients of the inputs: nodes scale and move the inputs."""
    unknown = sum(node.weight_error for node in network.affine)
    return _UNITS * (len(network.nodes) + 8) * unit_roundoff(dtype) + 2 * unknown


def clip(box: Bounds, rows: RowBatch, values: Tensor, coefficients: Tensor, share: float) -> Clipped:
    """Cut off boxes where a row of each polytope is positive.

    Rounding: computed coefficients and values are those of a valid bound (``Relaxation.lower``), but that the
    coefficients of the inputs may be off by some units of roundoff for every node that scales or moves the inputs. That
    moves g(x) by at most the same part of Σ_i |A_i|·width_i, which counts against what is cut off; ends move outward.

    Args:
        box: (batch, inputs).
        rows: those of the boxes' properties, as a batch.
        values: (rows,) lower bounds of the rows' values over the box.
        coefficients: (rows, inputs) of their linear lower bounds.
        share: ``input_error`` of the network.
    """
    lower, upper = box.lower[rows.sample], box.upper[rows.sample]
    width = upper - lower
    # What is not cut off: |x_i − m_i| ≤ reach. NaN cuts nothing off.
    reach = reach_of_cut(values, coefficients.abs(), width, share)
    spare = rows.unscaled(CUT / 2 * -values)
    cut = (reach < width) & (spare > 0)[:, None]
    high, low = above(lower + reach), below(upper - reach)
    high = torch.where(cut & (coefficients > 0), torch.minimum(high, upper), upper)
    low = torch.where(cut & (coefficients < 0), torch.maximum(low, lower), lower)

    polytopes, inputs = len(rows.owner), lower.shape[1]
    place = rows.polytope[:, None].expand(-1, inputs)
    rest_low = box.lower[rows.owner].scatter_reduce(0, place, low, "amax")
    rest_high = box.upper[rows.owner].scatter_reduce(0, place, high, "amin")
    largest = rows.largest(values)
    proved = largest > 0
    gone = proved | (rest_low > rest_high).any(1)
    owner = rows.owner[:, None].expand(polytopes, inputs)
    outside = lower.new_full((), torch.inf)
    new_low = torch.full_like(box.lower, torch.inf)
    new_high = torch.full_like(box.upper, -torch.inf)
    new_low.scatter_reduce_(0, owner, torch.where(gone[:, None], outside, rest_low), "amin")
    new_high.scatter_reduce_(0, owner, torch.where(gone[:, None], -outside, rest_high), "amax")
    empty = (new_low > new_high).any(1)

    margin = rows.least(torch.where(proved, largest, torch.inf))
    margin.scatter_reduce_(0, rows.sample, torch.where(cut.any(1), spare, torch.inf), "amin")
    return Clipped(Bounds(new_low, new_high), empty, margin)


def sums(rows: RowBatch, values: Tensor, forms: Callable[[Tensor], tuple[Tensor, Tensor]]) -> RowBatch | None:
    """Sum the rows of each polytope that no row proves, where that promises more than they do.

    Args:
        rows: those of the boxes' properties, as a batch.
        values: (rows,) lower bounds of the rows' values over the box.
        forms: of some rows (r,), by their numbers, affine forms c + Σ_k a_k·ε_k, ε_k ∈ [−1, 1], that are near their
            least values or below: c (r,) and a (r, symbols).

    Returns:
        One row for some of the polytopes, numbered as in ``rows``; None if there is no such polytope.
    """
    count = torch.bincount(rows.polytope, minlength=len(rows.owner))
    chosen = ((count > 1) & (rows.largest(values) <= 0)).nonzero().squeeze(1)
    if not len(chosen):
        return None
    place = torch.arange(int(count[chosen].max()), device=chosen.device).expand(len(chosen), -1)
    present = place < count[chosen, None]
    member = torch.where(present, (count.cumsum(0) - count)[chosen, None] + place, 0)
    flat, symbols = forms(member.flatten())
    center, reach = flat.unflatten(0, member.shape), symbols.unflatten(0, member.shape)
    reach = torch.where(present[..., None], reach, 0.0)
    least = torch.where(present, center - reach.abs().sum(2), -torch.inf)
    single, best = least.max(1)
    # Unless another row is larger at the point where the best one is least, no sum is better than that one.
    corner = reach.gather(1, best[:, None, None].expand(-1, 1, reach.shape[2])).sign()
    there = torch.where(present, center - (reach * corner).sum(2), -torch.inf).amax(1)
    promised = single + _SUM_GAIN * single.abs()
    mixed = there > promised
    chosen, member, promised = chosen[mixed], member[mixed], promised[mixed]
    weights, found = _ascend(center[mixed], reach[mixed], present[mixed])
    kept = found > promised
    return rows.sums(chosen[kept], member[kept], (weights[kept] * _WEIGHT_UNIT).round()) if kept.any() else None


def _ascend(center: Tensor, reach: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """Return weights of the rows of each polytope, of sum 1, and the least value of the sum of their forms.

    The forms have centres (polytopes, rows) and coefficients (polytopes, rows, symbols), where ``present``.
    """
    weights = present.to(center) / present.sum(1, keepdim=True)
    best, found = weights, center.new_full((len(center),), -torch.inf)
    for step in range(_SUM_STEPS):
        mixed = torch.einsum("pr,pri->pi", weights, reach)
        value = (weights * center).sum(1) - mixed.abs().sum(1)
        better = value > found
        best, found = torch.where(better[:, None], weights, best), torch.where(better, value, found)
        slope = center - torch.einsum("pi,pri->pr", mixed.sign(), reach)
        slope = torch.where(present, slope - (weights * slope).sum(1, keepdim=True), 0.0)
        longest = divisor(slope.abs().amax(1, keepdim=True))
        weights = weights * torch.exp(2 / (step + 2) ** 0.5 * slope / longest)
        weights = weights / weights.sum(1, keepdim=True)
    return best, found
