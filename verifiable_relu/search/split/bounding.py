"""Linear lower bounds of rows over a batch of boxes: by zonotopes, by CROWN, or by intervals alone.

* **Zonotopes** (``bounds.zonotopes``) cost a fraction of CROWN's bounds of all neurons. Rows then go back by CROWN as
  well, over the zonotopes' intervals; the better bound of each row counts.
* **CROWN** bounds the neurons of networks with many inputs, and where zonotopes take more than the memory or leave far
  more neurons unstable, as not every neuron has a symbol. Bounds over a box hold for its parts: only neurons that are
  unstable in the larger box are bounded again.
* **Intervals** where whole numbers of the inputs alone matter: little is left of linear bounds behind steps.
"""

from __future__ import annotations

from collections.abc import Callable
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
from verifiable_relu.rounding import below, unit_roundoff
from verifiable_relu.search.property_rows import BoxRows
from verifiable_relu.search.split.boxes import SubBoxes
from verifiable_relu.search.split.events import BoxesBounded, Observer, ignore

Known = dict[int, Interval]
"""Intervals of ops that feed nonlinear ones, (batch, size) by number."""

DEVICE_BATCH = {"cpu": 512}
"""Boxes that are bounded at once, by kind of device ..."""

OTHER_BATCH = 1 << 15
"""... and on others."""

NARROW = 64
"""Inputs that vary, at most, for zonotopes: more make too many symbols."""

LOOSE = 2
"""Zonotopes are not used that leave more than this multiple of the neurons unstable that is known to be."""

ROW_COEFFICIENTS = 1 << 27
"""Coefficients, about, of the rows by which CROWN bounds neurons of all boxes of a batch."""

SPARE_SYMBOLS = 1.25
"""A zonotope's symbols at an op, by how many the neurons of the last batch would have used at most."""

ROUNDED_AWAY = 0.02
"""Generators are in float32 where errors are at most this part of what the generators of the output make."""


class BoxBounder:
    """Bounds boxes of the queries of a network.

    Args:
        network: the network.
        varying: numbers of the inputs that vary.
        batch: how many boxes are bounded at once, at most; by default as many as suit the device.
        memory: bytes for bounds.
        symbols: how many unstable neurons of an op have a noise symbol of their own in a zonotope.
        max_unstable: ops with more unstable neurons in a box are not bounded by CROWN there.
        points: whether nothing but whole numbers of the inputs that vary matters.

    Attributes:
        batch: how many boxes are to be bounded next.
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
    ) -> None:
        self._network, self._varying, self._memory, self.by_intervals = network, varying, memory, points
        self._symbols, self._max_unstable = symbols, max_unstable
        self._dtype = torch.float32 if is_covered(network, torch.float32, varying.device) else torch.float64
        self._neurons = sum(op.size for op in network.ops)
        self._new = {i: symbols for i, op in enumerate(network.ops) if isinstance(op, NONLINEAR)}
        each = form_bytes(network, len(varying), symbols)
        self.by_zonotopes = bool(self._new) and len(varying) <= NARROW and each <= memory and not points
        each = max(each if self.by_zonotopes else 0, self._neurons * 8 * 16)
        suits = DEVICE_BATCH.get(varying.device.type, OTHER_BATCH) if batch is None else batch
        self.batch = self._most = max(1, min(suits, memory // each))
        self._fed = sorted({source for i in self._new for source in network.ops[i].inputs})

    def over(self, box: Interval, known: Known, first: bool, is_bounded: bool, stop: Callable[[], bool]) -> BoxBounds:
        """Bound a batch of boxes (batch, inputs).

        Args:
            box: the boxes.
            known: intervals over larger boxes.
            first: whether these boxes are the first.
            is_bounded: whether ``known`` is CROWN's over these very boxes.
            stop: returns True once time is over.
        """
        forms = (
            Zonotopes(self._network, box, self._varying, self._new, self._dtype, stop) if self.by_zonotopes else None
        )
        if forms is not None and first:
            part = (forms.output.error / forms.output.radius).amax()
            self._dtype = self._dtype if bool(part <= ROUNDED_AWAY) else torch.float64
            loose = bool(known) and self._unstable(forms.inputs).sum() > LOOSE * self._unstable(known).sum()
            # Forms may leave the interval on which a function is defined.
            if bool(loose | ~forms.output.error.isfinite().all()):
                self.by_zonotopes, forms = False, None
        if forms is not None:
            relaxation = Relaxation(self._network, box, known=forms.inputs, dtype=torch.float64, stop=stop).advance()
            counts = torch.stack([count.amax() for count in forms.unstable.values()])
            return BoxBounds(relaxation, box, {}, counts, forms)
        relaxation = Relaxation(self._network, box, known=known, memory=self._memory, stop=stop)
        if self.by_intervals:
            return BoxBounds(relaxation.advance(), box, {}, self._varying[:0], by_intervals=True)
        most = None if known and (is_bounded or not first) else self._max_unstable
        bound_by_crown(relaxation, by_rows=not is_bounded, max_unstable=most)
        inputs = {i: relaxation.bounds[i].interval for i in self._fed}
        return BoxBounds(relaxation, box, inputs, self._unstable(inputs).sum()[None])

    def notice(self, counts: list[int], boxes: int) -> None:
        """Take note of the ``counts`` of the last bounds, and of the number of their boxes."""
        if self.by_zonotopes:
            for index, count in zip(self._new, counts, strict=True):
                self._new[index] = min(self._symbols, int(SPARE_SYMBOLS * count) + 1)
        elif not self.by_intervals:
            self.batch = max(1, min(self._most, ROW_COEFFICIENTS * boxes // max(1, counts[0] * self._neurons)))

    def _unstable(self, inputs: Known) -> Tensor:
        """The number of unstable neurons of each box, (batch,)."""
        ops = [op for op in self._network.ops if isinstance(op, Elementwise)]
        counts = [op.function.unstable(inputs[op.inputs[0]]).sum(1) for op in ops]
        return torch.stack(counts).sum(0) if counts else self._varying.new_zeros(1)


def form_bytes(network: Network, varying: int, most: int) -> int:
    """About the bytes of one box's affine forms: a few arrays of all symbols at the op where these are largest."""
    symbols, largest = varying, 1
    for op in network.ops:
        symbols += min(op.size, most) if isinstance(op, NONLINEAR) else 0
        largest = max(largest, symbols * op.size)
    return 4 * 8 * largest


@dataclass(frozen=True, eq=False)
class BoxBounds:
    """Bounds of a network over a batch of boxes.

    Attributes:
        relaxation: by which rows go back.
        box: the boxes.
        inputs: intervals of neurons that are worth being known of the boxes' parts.
        counts: (m,) int64, for ``BoxBounder.notice``: unstable neurons.
        forms: the zonotopes whose intervals the relaxation has, if these are used.
        by_intervals: whether rows are bounded by the intervals of the last nonlinear op as well.
    """

    relaxation: Relaxation
    box: Interval
    inputs: Known
    counts: Tensor
    forms: Zonotopes | None = None
    by_intervals: bool = False

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

    def event(self, boxes: SubBoxes, rows: BoxRows, values: Tensor, coefficients: Tensor) -> BoxesBounded:
        """Return what is proven of rows, (boxes, rows) ``values`` with their ``coefficients``."""
        fed = {i for op in self.relaxation.network.ops if isinstance(op, NONLINEAR) for i in op.inputs}
        intervals = {i: self.relaxation.bounds[i].interval for i in sorted(fed)}
        by_forms = torch.zeros_like(values, dtype=torch.bool)
        if self.forms is not None:
            by_forms = below(self.forms.rows(rows.matrix).lower - rows.bound) >= values
        slopes = {} if self.forms is None else self.forms.slopes
        return BoxesBounded(boxes, intervals, slopes, rows, values, coefficients, by_forms)


@dataclass(frozen=True, eq=False)
class RowBounds:
    """Linear lower bounds of the rows of properties over a batch of boxes.

    Attributes:
        rows: the rows of the boxes' properties, and perhaps sums of them.
        values: (batch, rows) lower bounds of matrix·y − bound.
        coefficients: (batch, rows, inputs) of the linear bounds that have these least values.
        influence: (batch, inputs) as of ``BoxBounds``.
        helped: (), in how many boxes a sum of rows proves what no row does.
    """

    rows: BoxRows
    values: Tensor
    coefficients: Tensor
    influence: Tensor
    helped: Tensor


def bound_rows(bounds: BoxBounds, boxes: SubBoxes, rows: BoxRows, with_sums: bool, observer: Observer) -> RowBounds:
    """Bound the rows of the boxes' properties, and sums of them if they are wanted."""
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
    if observer is not ignore:
        observer(bounds.event(boxes, rows, values, coefficients))
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
