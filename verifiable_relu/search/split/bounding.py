"""Linear lower bounds of rows over a batch of boxes, by zonotopes, CROWN, or intervals alone; and clipping by them.

* **Zonotopes** (``bounds.zonotopes``) cost a fraction of CROWN's bounds of all neurons. Rows then go back by CROWN as
  well, over the zonotopes' intervals; the better bound of each row counts.
* **CROWN** bounds the neurons of networks with many inputs, and where zonotopes take more than the memory or leave far
  more neurons unstable, as not every neuron has a symbol. Bounds over a box hold for its parts: only neurons that are
  unstable in the larger box are bounded again.
* **Intervals** where inputs matter only through whole numbers: linear bounds say little behind steps.

**Clipping** cuts off the part of a box in which a row of each polytope is positive. A row g of a polytope of the unsafe
set has a lower bound g(x) ≥ v + Σ_i |A_i|·|x_i − m_i| over a box: A are the coefficients of its linear bound, m is the
corner where that is least, and v its value there. A counterexample in the polytope has g(x) ≤ 0 for every row, so that
|x_i − m_i| ≤ −v/|A_i| for every input i, since no other term of the sum is negative. What is left of a box is the
smallest box that holds what every polytope leaves of it that is not proved.

**Events**, batches of tensors, tell an observer what a search proves, at the moment it is proven.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from verifiable_relu.bounds.backward import Relaxation
from verifiable_relu.bounds.linear_bounds import bound_by_crown, lower_of_rows
from verifiable_relu.bounds.precision import is_covered
from verifiable_relu.bounds.structure import NONLINEAR, structure
from verifiable_relu.bounds.zonotopes import FormRows, Zonotopes
from verifiable_relu.ir.interval import Interval
from verifiable_relu.ir.network import Affine, Elementwise, Network
from verifiable_relu.rounding import CUT, above, below, reach_of_cut, unit_roundoff
from verifiable_relu.search.property_rows import PropertyRows
from verifiable_relu.search.records import TensorRecord

Intervals = dict[int, Interval]
"""Intervals of ops that feed nonlinear ones, (batch, size) by number."""

BATCH_CPU, BATCH_ELSEWHERE = 512, 1 << 15  # Boxes that are bounded at once by default
NARROW = 64  # Inputs that vary, at most, for zonotopes: more make too many symbols
LOOSE = 2  # Zonotopes are not used that leave more than this multiple of the neurons unstable that is known to be
ROW_COEFFICIENTS = 1 << 27  # Coefficients, about, of the rows by which CROWN bounds neurons of all boxes of a batch
SPARE_SYMBOLS = 1.25  # A zonotope's symbols at an op, by how many the neurons of the last batch would have used at most
ROUNDED_AWAY = 0.02  # Generators are in float32 where errors are at most this part of those of the output

NO_BOUNDS = -1  # ``SubBoxes.within`` of boxes in which nothing is known of neurons


@dataclass(frozen=True, eq=False)
class SubBoxes(TensorRecord):
    """Sub-boxes of the queries of one network."""

    lower: Tensor  # (boxes, inputs), float64, as ``upper``
    upper: Tensor
    owner: Tensor  # (boxes,) the query of each
    number: Tensor  # (boxes,) by which events name it
    within: Tensor  # (boxes,) the serial number of a larger box in which neurons are bounded (``KnownBounds``)

    def whole(self, integer: Tensor) -> SubBoxes:
        """Return the boxes with ends moved inward to whole numbers in the inputs that are ``integer``, (inputs,)."""
        lower = torch.where(integer, self.lower.ceil(), self.lower)
        return replace(self, lower=lower, upper=torch.where(integer, self.upper.floor(), self.upper))

    def halves(self, dimension: Tensor, integer: Tensor, first: int) -> SubBoxes:
        """Return the halves of boxes, each cut in the middle of one input (boxes,), the lower halves first.

        ``integer`` inputs (inputs,) matter only through whole numbers: halves share none. A box that is one point
        along the input is both of its halves. The first half has the number ``first``.
        """
        dimension = dimension[:, None]
        low, high = self.lower.gather(1, dimension), self.upper.gather(1, dimension)
        middle, whole = low + (high - low) / 2, integer[dimension]
        middle = torch.where(whole, middle.floor(), middle)
        beyond = torch.minimum(middle + whole.to(middle), high)
        lower = torch.cat([self.lower, self.lower.scatter(1, dimension, beyond)])
        upper = torch.cat([self.upper.scatter(1, dimension, middle), self.upper])
        number = torch.arange(first, first + 2 * len(self), device=lower.device)
        return SubBoxes(lower, upper, self.owner.repeat(2), number, self.within.repeat(2))


class KnownBounds:
    """Cache of neurons' intervals over the latest ``most`` boxes, by serial number; new ones replace the oldest."""

    def __init__(self, most: int) -> None:
        self._most, self._next = most, 0
        self._kept: dict[int, Interval] = {}
        self._serial: Tensor | None = None

    def keep(self, inputs: Mapping[int, Interval]) -> Tensor:
        """Keep the intervals of a batch of boxes, (batch, size) by op, and return their serial numbers, (batch,)."""
        some = next(iter(inputs.values())).lower
        count = len(some)
        serial = torch.arange(self._next, self._next + count, device=some.device)
        if count > self._most:
            return torch.full_like(serial, NO_BOUNDS)
        if self._serial is None:
            self._serial = torch.full((self._most,), NO_BOUNDS, device=some.device)
            for i, x in inputs.items():
                self._kept[i] = Interval(*(end.new_empty(self._most, end.shape[1]) for end in (x.lower, x.upper)))
        place = serial % self._most
        self._serial[place] = serial
        for i, x in inputs.items():
            self._kept[i].lower[place], self._kept[i].upper[place] = x.lower, x.upper
        self._next += count
        return serial

    def over(self, within: Tensor) -> dict[int, Interval]:
        """Return the intervals of boxes by their serial numbers, (boxes,): infinite where nothing is known any more."""
        if self._serial is None:
            return {}
        place, found = within.clamp(min=0) % self._most, {}
        lost = ((self._serial[place] != within) | (within == NO_BOUNDS))[:, None]
        for i, x in self._kept.items():
            lower, upper = x.lower[place].masked_fill(lost, -torch.inf), x.upper[place].masked_fill(lost, torch.inf)
            found[i] = Interval(lower, upper)
        return found


@dataclass(frozen=True, eq=False)
class BoxesBounded:
    """Event: rows of boxes' properties are bounded from below; nothing beyond the ends of ``rest`` is unsafe."""

    boxes: SubBoxes
    rows: PropertyRows  # Sums of rows among them
    proved: Tensor  # (boxes,) where a row of each polytope is positive
    rest: SubBoxes  # By the same numbers; ends cross where nothing is left
    row: Tensor  # (2, boxes, polytopes, inputs) that is positive, or cuts most off at the lower and the upper end
    ends: Tensor  # (2, boxes, polytopes, inputs) the ends that rows leave of each polytope


@dataclass(frozen=True, eq=False)
class BoxesHalved:
    """Event: boxes are the union of ``children``, lower halves then upper halves of what clipping left."""

    parent: Tensor
    children: SubBoxes


Event = BoxesBounded | BoxesHalved
Observer = Callable[[Event], None]


class BoxBounder:
    """Bounder of boxes of a network's queries, ``batch`` at once.

    Args:
        network, varying: the network, and the numbers of the inputs that vary.
        batch: how many boxes are bounded at once, at most; by default as many as suit the device.
        memory: bytes for bounds.
        symbols, max_unstable: as of ``InputSplit``.
        points: whether all varying inputs matter only through whole numbers.
        is_bounded: whether the known bounds of the first boxes are CROWN's over exactly these boxes.
    """

    def __init__(
        self,
        network: Network,
        varying: Tensor,
        batch: int | None,
        memory: int,
        symbols: int,
        max_unstable: int,
        points: bool,
        is_bounded: bool,
    ) -> None:
        self._network, self._varying, self._memory, self.by_intervals = network, varying, memory, points
        self._symbols, self._max_unstable, self._is_bounded, self._first = symbols, max_unstable, is_bounded, True
        self._dtype = torch.float32 if is_covered(network, torch.float32, varying.device) else torch.float64
        self._neurons = sum(op.size for op in network.ops)
        self._new = {i: symbols for i, op in enumerate(network.ops) if isinstance(op, NONLINEAR)}
        # About the bytes of one box's affine forms: a few arrays of all symbols at the op where these are largest.
        count, largest = len(varying), 1
        for i, op in enumerate(network.ops):
            count += min(op.size, symbols) if i in self._new else 0
            largest = max(largest, count * op.size)
        each = 4 * 8 * largest
        self.by_zonotopes = bool(self._new) and len(varying) <= NARROW and each <= memory and not points
        each = max(each if self.by_zonotopes else 0, self._neurons * 8 * 16)
        suits = BATCH_CPU if varying.device.type == "cpu" else BATCH_ELSEWHERE
        self.batch = self._most = max(1, min(suits if batch is None else batch, memory // each))
        self._fed = sorted({source for i in self._new for source in network.ops[i].inputs})

    def over(self, box: Interval, known: Intervals, stop: Callable[[], bool]) -> BoxBounds:
        """Bound a batch of boxes (batch, inputs), given intervals over larger boxes, until ``stop`` returns True."""
        network, (first, self._first) = self._network, (self._first, False)
        if self.by_zonotopes:
            forms = Zonotopes(network, box, self._varying, self._new, self._dtype, stop)
            if not first or self._suits(forms, known):
                relaxation = Relaxation(network, box, known=forms.inputs, dtype=torch.float64, stop=stop).advance()
                counts = torch.stack([count.amax() for count in forms.unstable.values()])
                return BoxBounds(relaxation, box, {}, counts, forms)
            self.by_zonotopes = False
        relaxation = Relaxation(network, box, known=known, memory=self._memory, stop=stop)
        if self.by_intervals:
            return BoxBounds(relaxation.advance(), box, {}, self._varying[:0], by_intervals=True)
        is_bounded = first and self._is_bounded
        most = None if known and (is_bounded or not first) else self._max_unstable
        bound_by_crown(relaxation, by_rows=not is_bounded, max_unstable=most)
        inputs = {i: relaxation.bounds[i].interval for i in self._fed}
        return BoxBounds(relaxation, box, inputs, self._unstable(inputs).sum()[None])

    def _suits(self, forms: Zonotopes, known: Intervals) -> bool:
        """Return True if zonotopes are not far looser than known bounds; also chooses their generators' dtype."""
        part = (forms.output.error / forms.output.radius).amax()
        self._dtype = self._dtype if bool(part <= ROUNDED_AWAY) else torch.float64
        loose = bool(known) and self._unstable(forms.inputs).sum() > LOOSE * self._unstable(known).sum()
        # Forms may leave the interval on which a function is defined.
        return not bool(loose | ~forms.output.error.isfinite().all())

    def notice(self, counts: list[int], boxes: int) -> None:
        """Record the ``counts`` of the last bounds, and the number of their boxes."""
        if self.by_zonotopes:
            for index, count in zip(self._new, counts, strict=True):
                self._new[index] = min(self._symbols, int(SPARE_SYMBOLS * count) + 1)
        elif not self.by_intervals:
            self.batch = max(1, min(self._most, ROW_COEFFICIENTS * boxes // max(1, counts[0] * self._neurons)))

    def _unstable(self, inputs: Intervals) -> Tensor:
        ops = [op for op in self._network.ops if isinstance(op, Elementwise)]
        counts = [op.function.unstable(inputs[op.inputs[0]]).sum(1) for op in ops]
        return torch.stack(counts).sum(0) if counts else self._varying.new_zeros(1)


@dataclass(frozen=True, eq=False)
class BoxBounds:
    """Bounds of a network over a batch of boxes."""

    relaxation: Relaxation  # By which rows go back
    box: Interval
    inputs: Intervals  # Intervals of neurons that are worth being known of the boxes' parts
    counts: Tensor  # (m,) int64, for ``BoxBounder.notice``: unstable neurons
    forms: Zonotopes | None = None  # The zonotopes whose intervals the relaxation has, if these are used
    by_intervals: bool = False  # Rows are bounded by the intervals of the last nonlinear op as well

    def rows(self, matrix: Tensor) -> FormRows:
        """Return linear lower bounds of rows (batch, rows, outputs)."""
        value, coefficients = backward_rows(self.relaxation, matrix)
        if self.by_intervals:
            last = self.relaxation.structure.last_nonlinear
            flat = lower_of_rows(self.relaxation, matrix.flatten(0, 1), until=last)[0].view_as(value)
            coefficients = torch.where((flat > value)[..., None], 0.0, coefficients)
            value = torch.where(value >= flat, value, flat)
        if self.forms is None:
            along = coefficients * ((self.box.upper - self.box.lower) / 2)[:, None]
            return FormRows(value, value + along.abs().sum(2), along.transpose(1, 2), coefficients)
        found = self.forms.rows(matrix)
        # NaN, which proves nothing, is never the better one.
        better = ~(found.lower >= value) & (value == value)
        coefficients = torch.where(better[..., None], coefficients, found.coefficients)
        return replace(found, lower=torch.where(better, value, found.lower), coefficients=coefficients)

    def influence(self, found: FormRows) -> Tensor:
        """Return the gain of halving each input per unit of its width, (batch, inputs), of any scale."""
        if self.forms is None:
            return found.coefficients.abs().sum(1)
        width = self.box.upper - self.box.lower
        return torch.where(width > 0, self.forms.influence(found.along) / width, 0.0)


@dataclass(frozen=True, eq=False)
class RowBounds:
    """Linear lower bounds of the rows of properties over a batch of boxes."""

    rows: PropertyRows  # The rows of the boxes' properties, and perhaps sums of them
    values: Tensor  # (batch, rows) lower bounds of matrix·y − bound
    coefficients: Tensor  # (batch, rows, inputs) of the linear bounds that have these least values
    influence: Tensor  # (batch, inputs) as of ``BoxBounds``
    helped: Tensor  # (), in how many boxes a sum of rows proves what no row does


def bound_rows(bounds: BoxBounds, rows: PropertyRows, with_sums: bool) -> RowBounds:
    """Bound the rows of the boxes' properties and, with ``with_sums``, sums of them."""
    found = bounds.rows(rows.matrix)
    values, coefficients, influence = below(found.lower - rows.bound), found.coefficients, bounds.influence(found)
    helped = rows.exists.new_zeros((), dtype=torch.long)
    if with_sums:
        sums = rows.sums(values, found.center - rows.bound, found.along)
        more, before = bounds.rows(sums.matrix), rows.margins(values)
        rows = rows.and_sums(sums)
        values = torch.cat([values, below(more.lower - sums.bound)], 1)
        coefficients = torch.cat([coefficients, more.coefficients], 1)
        helped = ((rows.margins(values) > 0) & ~(before > 0)).sum()
    return RowBounds(rows, values, coefficients, influence, helped)


def backward_rows(relaxation: Relaxation, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return CROWN's lower bounds of rows (batch, rows, outputs), and their coefficients of the inputs."""
    batch, count, _ = matrix.shape
    value, reached = lower_of_rows(relaxation, matrix.flatten(0, 1), coefficients=True)
    if reached is None:
        reached = matrix.new_zeros(batch * count, relaxation.network.input_size)
        return value.view(batch, count), reached.view(batch, count, -1)
    for index in range(relaxation.structure.start, 0, -1):
        op = relaxation.network.ops[index]
        assert isinstance(op, Affine)
        reached = op.map.transpose(reached)
    return value.view(batch, count), reached.view(batch, count, -1)


def coefficient_error(network: Network) -> float:
    """Return the relative error of coefficients of the inputs: of those where rows end, only the way to the inputs."""
    ops = [op for op in network.ops[1 : structure(network).start + 1] if isinstance(op, Affine)]
    return 8 * (len(ops) + 2) * unit_roundoff(torch.float64) + 2 * sum(op.weight_error for op in ops)


@dataclass(frozen=True, eq=False)
class Clipped:
    """Remainder of a batch of boxes after clipping."""

    lower: Tensor  # (batch, inputs), as ``upper``
    upper: Tensor
    empty: Tensor  # (batch,) whether nothing is left: the box is proved
    margin: Tensor  # (batch,) a positive lower bound of the property's margin in all that was cut off, else infinity
    ends: Tensor  # (2, batch, rows, inputs) the lower and upper ends that each row leaves of its polytope


def clip(box: Interval, rows: PropertyRows, values: Tensor, coefficients: Tensor, error: float) -> Clipped:
    """Cut off boxes (batch, inputs) where a row of each polytope is positive.

    Rounding: computed coefficients and values are those of a valid bound, but that coefficients may be off by the part
    ``error`` of themselves. That moves g(x) by at most the same part of Σ_i |A_i|·width_i, which counts against what is
    cut off; ends move outward. ``values`` (batch, rows) are lower bounds of the ``rows`` of the boxes' properties, and
    ``coefficients`` (batch, rows, inputs) those of their linear lower bounds.
    """
    low, high = box.lower[:, None], box.upper[:, None]
    width = high - low
    # What is not cut off: |x_i − m_i| ≤ reach. NaN cuts nothing off.
    reach = reach_of_cut(values, coefficients.abs(), width, error)
    spare = rows.unscaled(CUT / 2 * -values)
    polytopes = rows.exists.shape[1]
    cut = (reach < width) & ((spare > 0) & (rows.polytope < polytopes))[..., None]
    rest_high = torch.where(cut & (coefficients > 0), torch.minimum(above(low + reach), high), high)
    rest_low = torch.where(cut & (coefficients < 0), torch.maximum(below(high - reach), low), low)
    place = rows.polytope[..., None].expand_as(rest_low)
    fill = (len(low), polytopes + 1, low.shape[2])
    low = low.expand(fill).scatter_reduce(1, place, rest_low, "amax")[:, :-1]
    high = high.expand(fill).scatter_reduce(1, place, rest_high, "amin")[:, :-1]
    largest = rows.largest(values)
    # Polytopes that do not exist are infinitely far.
    proved = largest > 0
    gone = (proved | (low > high).any(2))[..., None]
    new_low = torch.where(gone, torch.inf, low).amin(1)
    new_high = torch.where(gone, -torch.inf, high).amax(1)
    margin = torch.where(proved, largest, torch.inf).amin(1)
    margin = torch.minimum(margin, torch.where(cut.any(2), spare, torch.inf).amin(1))
    return Clipped(new_low, new_high, (new_low > new_high).any(1), margin, torch.stack([rest_low, rest_high]))


def clipping_rows(found: RowBounds, clipped: Clipped) -> tuple[Tensor, Tensor]:
    """Return rows that prove polytopes, or cut off most at both ends; and the ends, (2, batch, polytopes, inputs)."""
    rows = found.rows
    member = rows.polytope[:, None] == torch.arange(rows.exists.shape[1], device=rows.polytope.device)[:, None]
    low, high = (
        torch.where(member[..., None], end[:, None], worst)
        for end, worst in zip(clipped.ends, (-torch.inf, torch.inf), strict=True)
    )
    (least, at_least), (most, at_most) = low.max(2), high.min(2)
    largest, best = torch.where(member, rows.unscaled(found.values)[:, None], -torch.inf).max(2, keepdim=True)
    return torch.where(largest > 0, best, torch.stack([at_least, at_most])), torch.stack([least, most])
