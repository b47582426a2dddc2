"""Linear bounds of a network over a batch of boxes: intervals forward, rows of coefficients backward.

    relaxation = Relaxation(network, Interval(lower, upper))     # boxes of the inputs, (batch, inputs)
    bound_by_crown(relaxation)                                   # ``crown``: bounds of every op
    found = relaxation.lower(len(network.ops) - 1, rows)         # lower bounds of rows·y over each box

To follow a row, read four modules: the pass is here, its step through one op in ``steps``, a linear map's products
in ``ir.linear`` (within windows: ``patches``), a function's linear bounds in ``ir.functions``.

**Rounding.** The pass maintains the inequality (∗) of ``steps``. It begins with A·v₀ and ends with A·(v − v₀) ≥
−|A|·radius, both with their own rounding accounted for here; ``rows.close`` sums the constants.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from verifiable_relu.bounds.differences import ComparedOp, DifferenceStep
from verifiable_relu.bounds.neuron_bounds import BASE, NeuronBounds, propagate
from verifiable_relu.bounds.precision import WIDENING, holds_weights, is_covered, widening
from verifiable_relu.bounds.rows import Columns, DenseRows, Rows, SampleVectors, close, dot
from verifiable_relu.bounds.steps import (
    AffineStep,
    BackwardStep,
    FunctionStep,
    MaximumStep,
    OpBounds,
    ProductStep,
    Step,
    SumStep,
    of_samples,
    underflows,
    unit_rows,
)
from verifiable_relu.bounds.structure import structure
from verifiable_relu.ir.interval import Interval
from verifiable_relu.ir.network import Affine, Elementwise, Maximum, Network, Product, Sum
from verifiable_relu.rounding import OWN, negligible, sum_error, unit_roundoff

MEMORY = 1 << 30
"""Bytes of coefficients that may be held at once by default."""

CHUNK_BYTES = 1 << 26
"""Bytes of coefficients that are propagated together on a CPU: more leave its cache, fewer repeat small steps."""

ACTIVE_SHARE = 0.75
"""Rows leave out neurons that have one value where at most this share of them is left."""

COPIES = 6
"""Arrays of a chunk's coefficients that are alive at once at the widest op."""


@dataclass(frozen=True, eq=False)
class Slopes:
    """Slopes of the linear bounds of one elementwise op that rows choose, (groups, n) each, in float64."""

    lower: Tensor
    upper: Tensor


@dataclass(eq=False)
class _Pass:
    """Backward pass of one chunk of rows.

    Attributes:
        pending: rows by the number of their op.
        constants: (groups, each) each, of (∗).
        charges: (groups, each) each, rounding errors to be subtracted from them.
        sample: (groups,) of each group; None for every sample, one after another.
        own: steps that belong to these groups alone, by the number of their op.
        record: collects the coefficients, (groups, each, n), that reach nonlinear ops.
        compared: whether the second op of a pair is compared with the first.
    """

    pending: dict[int, Rows]
    constants: list[Tensor]
    sample: Tensor | None
    own: Mapping[int, BackwardStep] = field(default_factory=dict)
    charges: list[Tensor] = field(default_factory=list)
    record: dict[int, Tensor] | None = None
    compared: bool = True


@dataclass(frozen=True, eq=False)
class LowerBounds:
    """Lower bounds of rows over a batch of boxes.

    Attributes:
        value: (groups, each) in float64, never too high; NaN or −inf where arithmetic broke down.
        coefficients: (groups, each, n) A of the op at which rows ended, if they were wanted, in the dtype of the pass:
            value + |A|·radius + A·(v − v₀) is a lower bound, too.
    """

    value: Tensor
    coefficients: Tensor | None
    passed: _Pass = field(repr=False)


def _may_narrow(network: Network, device: torch.device) -> bool:
    return is_covered(network, torch.float32, device) and holds_weights(network, torch.float32)


class Relaxation:
    """Bounds of a network's ops over a batch of boxes, and the steps that rows take back through them.

    Args:
        network: its ops.
        box: of the inputs, (batch, inputs) in float64.
        known: further intervals, (batch, n), of inputs of nonlinear ops, by number.
        dtype: of coefficients. By default they are in float32 until that widens bounds too much (``precision``).
        memory: a limit in bytes on the coefficients held at once.
        stop: asked between chunks; once it returns True the rest keeps the bounds that it has.
        rounded: whether rounding is accounted for. If not, the box may have any dtype, which all numbers then have:
            for training losses.

    Attributes:
        bounds: of each op so far, in order.
        dtype: of the coefficients of the next pass.
    """

    def __init__(
        self,
        network: Network,
        box: Interval,
        *,
        known: Mapping[int, Interval] | None = None,
        dtype: torch.dtype | None = None,
        memory: int = MEMORY,
        stop: Callable[[], bool] | None = None,
        rounded: bool = True,
    ) -> None:
        self.rounded = rounded
        self.network, self.structure = network, structure(network)
        self.known, self.memory = known or {}, memory
        self.stop = stop or (lambda: False)
        self.bounds = [NeuronBounds.centred(box)]
        self._whole = [_is_one_whole_number(box)]
        if dtype is None and not rounded:
            dtype = box.lower.dtype
        self.dtype = dtype or (torch.float32 if _may_narrow(network, box.lower.device) else BASE)
        self._chosen = dtype is None
        self._steps: dict[tuple[int, torch.dtype, bool], Step] = {}
        self._ends: dict[tuple[int, torch.dtype], SampleVectors] = {}
        self._lost: list[tuple[float, Tensor]] = []

    @property
    def batch(self) -> int:
        """The number of boxes."""
        return self.bounds[0].batch

    @property
    def device(self) -> torch.device:
        return self.bounds[0].point.device

    def inputs(self, index: int) -> list[NeuronBounds]:
        """Return the bounds of the inputs of op ``index``."""
        return [self.bounds[i] for i in self.network.ops[index].inputs]

    def rough(self) -> Relaxation:
        """Return this relaxation in float32 without rounding, to steer a search that proves nothing."""
        found = copy.copy(self)
        found.rounded, found.dtype, found._steps, found._ends = False, torch.float32, {}, {}
        return found

    # Forward

    def advance(self, tighten: Callable[[int], None] | None = None) -> Relaxation:
        """Bound every op that has no bounds yet, by intervals, and return the relaxation.

        Args:
            tighten: called with the number of each nonlinear op before it is bounded, to tighten its inputs' bounds.
        """
        for index in range(len(self.bounds), len(self.network.ops)):
            op = self.network.ops[index]
            if isinstance(op, Elementwise | Product | Maximum):
                for source in self.structure.bounded_inputs(index):
                    if source in self.known:
                        self.intersect(source, self.known[source])
                if tighten is not None:
                    tighten(index)
            found = propagate(op, self.inputs(index), self.dtype, self.rounded)
            self.bounds.append(self._with_whole_ends(index, found) if self.rounded and self.network.keeping else found)
            if self.rounded and isinstance(op, Elementwise) and self.structure.leaves_out(index):
                self._leave_out(index)
        return self

    def _with_whole_ends(self, index: int, bounds: NeuronBounds) -> NeuronBounds:
        """Round ends inward to whole numbers in the boxes where the op's values are whole.

        They are whole in all boxes (``Network.whole``), or where an op that maps whole numbers to whole numbers has
        inputs that are whole, or that have one value each, a whole one. A step function that follows may jump there.
        """
        x, whole = bounds.interval, _is_one_whole_number(bounds.interval)
        if index in self.network.whole:
            whole = torch.ones_like(whole)
        elif index in self.network.keeping:
            whole = whole | torch.stack([self._whole[i] for i in self.network.ops[index].inputs]).all(0)
        self._whole.append(whole)
        lower = torch.where(whole[:, None], x.lower.ceil(), x.lower)
        upper = torch.where(whole[:, None], x.upper.floor(), x.upper)
        return bounds.tightened(Interval(lower, upper))

    def _leave_out(self, index: int) -> None:
        """Record which neurons of a function have more than one value in some sample, if they are few."""
        mine = self.bounds[index]
        varies = (mine.interval.lower != mine.interval.upper) | (mine.interval.lower != mine.point)
        # (One synchronisation with the device for each op.)
        columns = varies.any(0).nonzero().squeeze(1)
        if len(columns) <= ACTIVE_SHARE * self.network.ops[index].size:
            self.bounds[index] = replace(mine, columns=Columns(index, columns))

    def intersect(self, index: int, interval: Interval) -> None:
        """Tighten the bounds of op ``index`` by other bounds."""
        self.replace(index, self.bounds[index].interval.intersect(interval))

    def replace(self, index: int, interval: Interval, by_rows: Interval | None = None) -> None:
        """Replace the interval of op ``index`` by another valid one."""
        before = self.bounds[index]
        if interval is not before.interval:
            self.bounds[index] = before.tightened(interval, by_rows or before.by_rows)

    # Backward

    def lower(
        self,
        index: int,
        rows: Tensor,
        sample: Tensor | None = None,
        *,
        slopes: Mapping[int, Slopes] | None = None,
        tilts: Mapping[int, Tensor] | None = None,
        until: int = 0,
        coefficients: bool = False,
        record: dict[int, Tensor] | None = None,
        measure: bool = False,
    ) -> LowerBounds:
        """Return lower bounds of rows·v over the boxes, v being the value of op ``index``.

        Args:
            index: the op.
            rows: (groups, each, n) in float64.
            sample: (groups,) the sample of each group; by default every sample, one after another.
            slopes: for some elementwise ops, by number, those of each group; by default CROWN's.
            tilts: for some products, by number, the planes of each group (``ProductStep``): numbers in [−1, 1],
                (groups, n).
            until: rows end at this op, or at the last op up to which the inputs are only scaled and moved. With a
                later op only the intervals of the ops up to it count.
            coefficients: whether to return those of the op at which rows end.
            record: collects the coefficients that reach nonlinear ops, (groups, each, n), by number.
            measure: see ``lower_of_neurons``.
        """
        dtype = self.dtype
        own = self._function_steps(index, slopes, sample)
        own |= {i: self._own_planes(i, part, sample, dtype) for i, part in (tilts or {}).items()}
        found = self.lower_with(index, rows, sample, own, record, until)
        if measure and self._widens(found.passed):
            return self.lower(
                index, rows, sample, slopes=slopes, tilts=tilts, until=until, coefficients=coefficients, record=record
            )
        return found if coefficients else replace(found, coefficients=None)

    def lower_with(
        self,
        index: int,
        rows: Tensor,
        sample: Tensor | None,
        own: Mapping[int, Step],
        record: dict[int, Tensor] | None = None,
        until: int = 0,
    ) -> LowerBounds:
        """Return lower bounds as ``lower`` does, for groups with their own steps through some ops."""
        end, dtype = max(until, self.structure.start), self.dtype
        point, radius = (of_samples(t, sample) for t in (self.bounds[index].point, self.bounds[index].radius))
        narrow = rows.to(dtype)
        constants = [dot(rows, point.unsqueeze(1))]
        if self.rounded:
            # What is lost in A·v₀, and by A in D, which counts by |v − v₀|.
            share = 2 * sum_error(rows.shape[2] + 4, BASE)
            error = point.abs() * share
            if dtype != BASE:
                error = torch.add(error, radius, alpha=2 * unit_roundoff(dtype))
            constants.append(-dot(rows.abs(), error.unsqueeze(1)) * (1 + share))
        compared = self.structure.compares(index)
        passed = _Pass({index: DenseRows(narrow)}, constants, sample, own, record=record, compared=compared)
        reached = self._back(passed, end, dtype)
        value = self._closed(passed, index, dtype)
        return LowerBounds(value, None if reached is None else reached.dense(), passed)

    def lower_of_neurons(
        self,
        index: int,
        neuron: Tensor,
        sign: Tensor,
        sample: Tensor | None,
        slopes: Mapping[int, Slopes] | None = None,
        *,
        measure: bool = False,
    ) -> Tensor:
        """Return lower bounds of sign·(neurons of op ``index``), (groups, each), by CROWN's slopes or others.

        Args:
            index: the op.
            neuron: (groups, each) numbers; in an image, those of a group lie at one pixel.
            sign: ±1, (groups, each) in float64.
            sample: (groups,) the sample of each group; by default every sample, one after another.
            slopes: see ``lower``.
            measure: whether to go on in float64, from these rows on, if float32 widens their bounds too much.
        """
        op, mine, dtype = self.network.ops[index], self.bounds[index], self.dtype
        own = self._function_steps(index, slopes, sample)
        place = of_samples(mine.point, sample).expand(len(neuron), -1).gather(1, neuron)
        constants, narrow = [sign * place], sign.to(dtype)
        step = self.step(index, dtype) if isinstance(op, Affine) else None
        rows = step.neurons(neuron, narrow) if isinstance(step, AffineStep) else None
        if rows is None:
            pending = {index: unit_rows(self.structure.images[index], op.size, neuron, narrow)}
        else:
            assert isinstance(step, AffineStep)
            pending = {op.inputs[0]: rows}
            if self.rounded:
                constants.append(-of_samples(step.alone, sample).expand(len(neuron), -1).gather(1, neuron))
        passed = _Pass(pending, constants, sample, own, compared=self.structure.compares(index))
        self._back(passed, self.structure.start, dtype)
        found = self._closed(passed, index, dtype)
        if measure and self._widens(passed):
            return self.lower_of_neurons(index, neuron, sign, sample, slopes)
        return found

    def pull_back(self, given: Mapping[int, Tensor], own: Mapping[int, BackwardStep]) -> tuple[Tensor, Tensor]:
        """Pull rows (rows, n) of some ops, by number, back over one box; steps in ``own`` replace the usual ones.

        Rows go back until no step returns any; the step at the inputs must be among ``own``.

        Returns:
            (rows,) the sum of the constants, and a bound of what rounding and charges change in it.
        """
        passed = _Pass({i: DenseRows(rows[None]) for i, rows in given.items()}, [], None, own)
        for index, rows in given.items():
            point = self.bounds[index].point[0]
            passed.constants.append((rows @ point)[None])
            passed.charges.append((rows.abs() @ (sum_error(len(point) + 4, BASE) * point.abs()))[None])
        self._back(passed, -1, self.dtype)
        constants = torch.stack(passed.constants)
        total, terms = constants.sum(0), sum_error(len(constants) + 4, BASE) * constants.abs().sum(0)
        passed.constants = [torch.zeros_like(total)]
        error = OWN * (terms - self._closed(passed, max(given), self.dtype))
        return total[0], error[0]

    def _widens(self, passed: _Pass) -> bool:
        """Return True if float32 widened the rows' bounds too much, and switch to float64 then."""
        if not self._chosen or self.dtype == BASE or not passed.charges or not self.rounded:
            return False
        distance = passed.constants[0] - torch.stack(passed.constants).sum(0)
        if widening(torch.stack(passed.charges), distance) <= WIDENING:
            return False
        self.dtype = BASE
        return True

    def _back(self, passed: _Pass, end: int, dtype: torch.dtype) -> Rows | None:
        """Pull rows back to op ``end``, and end them there or at earlier ops; returns the rows of ``end``."""
        pending, reached = passed.pending, None
        added = Counter(pending.keys())
        for index in range(max(pending), -1, -1):
            rows = pending.pop(index, None)
            if rows is None:
                continue
            if index <= end:
                passed.constants.append(-rows.weigh(self._end(index, dtype), passed.sample, self.rounded))
                reached = rows if index == end else reached
                continue
            own = passed.own.get(index)
            if passed.record is not None and not isinstance(self.network.ops[index], Affine | Sum):
                passed.record[index] = rows.dense()
            if own is not None:
                stepped = own.back(rows, None)
            else:
                stepped = self.step(index, dtype, passed.compared).back(rows, passed.sample)
            passed.constants += stepped.constants
            if stepped.charge is not None:
                passed.charges.append(stepped.charge)
            for source, more in stepped.given:
                if added[source] > 1 and self.rounded:
                    # An op's step charges one addition by the sum; what was lost before may be more if users cancel.
                    lost = pending[source].charge(self._end(source, dtype), passed.sample)
                    passed.charges.append(lost * (2 * unit_roundoff(dtype)))
                pending[source] = pending[source].plus(more) if source in pending else more
                added[source] += 1
        return reached

    def _closed(self, passed: _Pass, index: int, dtype: torch.dtype) -> Tensor:
        """Return the constants of rows of op ``index`` less their charges, rounded down."""
        if not self.rounded:
            return torch.stack(passed.constants).sum(0)
        for i in range(len(self._lost), index + 1):
            op, most = self.network.ops[i], 1 + self.bounds[i].radius.amax(1, keepdim=True)
            products = underflows(op, sum(self.network.ops[source].size for source in self.structure.given(i)))
            before = self._lost[-1] if i else (0.0, most)
            self._lost.append((before[0] + products, torch.maximum(before[1], most)))
        products, most = self._lost[index]
        return close(passed.constants, passed.charges, of_samples(most, passed.sample) * (products * negligible(dtype)))

    def _end(self, index: int, dtype: torch.dtype) -> SampleVectors:
        """Return the radius with which rows end, in ``dtype``; rows may be sums over several users."""
        if (index, dtype) not in self._ends:
            radius = self.bounds[index].radius
            if self.rounded:
                uses = self.structure.uses[index] if self.structure.uses[index] > 1 else 0
                radius = torch.add(radius, radius, alpha=(4 + 2 * uses) * unit_roundoff(dtype)) + negligible(dtype)
            self._ends[index, dtype] = SampleVectors(radius.to(dtype))
        return self._ends[index, dtype]

    # Steps

    def step(self, index: int, dtype: torch.dtype, compared: bool = True) -> Step:
        """Return the step through op ``index`` that all rows of a sample share; ``compared`` if a pair says so."""
        key = (index, dtype, compared and index in self.structure.pairs)
        if key not in self._steps:
            self._steps[key] = self._made(*key)
        return self._steps[key]

    def _made(self, index: int, dtype: torch.dtype, compared: bool) -> Step:
        op, bounds = self.network.ops[index], self._op_bounds(index, dtype)
        match op:
            case Affine():
                return AffineStep(op, bounds)
            case Sum():
                return SumStep(op, bounds)
            case Elementwise():
                (x,) = bounds.inputs
                slopes = Slopes(*op.function.slopes(x.interval, x.by_rows))
                return self._function_step(index, None, slopes, dtype, compared)
            case Product():
                return ProductStep(op, bounds)
            case Maximum():
                return MaximumStep(op, bounds)
        raise TypeError(f"no step through {op.place}")

    def _op_bounds(self, index: int, dtype: torch.dtype, sample: Tensor | None = None) -> OpBounds:
        """Return the bounds of op ``index`` for the step of groups of these samples, or of all samples."""
        mine, inputs = self.bounds[index].pick(sample), [x.pick(sample) for x in self.inputs(index)]
        return OpBounds(mine, inputs, self.structure.uses[index], dtype, self.rounded)

    def _own_planes(self, index: int, tilt: Tensor, sample: Tensor | None, dtype: torch.dtype) -> Step:
        op = self.network.ops[index]
        assert isinstance(op, Product)
        return ProductStep(op, self._op_bounds(index, dtype, sample), tilt=tilt)

    def _function_steps(
        self, index: int, slopes: Mapping[int, Slopes] | None, sample: Tensor | None
    ) -> dict[int, Step]:
        """Return the steps of rows of op ``index`` through elementwise ops, with each group's own slopes."""
        compared = self.structure.compares(index)
        return {i: self._function_step(i, sample, part, self.dtype, compared) for i, part in (slopes or {}).items()}

    def _function_step(
        self, index: int, sample: Tensor | None, slopes: Slopes, dtype: torch.dtype, compared: bool
    ) -> Step:
        """Return the step through an elementwise op over the groups' samples, with these slopes."""
        op, pair, bounds = (
            self.network.ops[index],
            self.structure.pairs.get(index),
            self._op_bounds(index, dtype, sample),
        )
        assert isinstance(op, Elementwise)
        lower, upper = (slope if dtype == BASE else slope.to(dtype).to(BASE) for slope in (slopes.lower, slopes.upper))
        relaxation = op.function.relaxation(bounds.inputs[0].interval, lower, upper)
        if pair is None or not compared:
            return FunctionStep(op, bounds, relaxation=relaxation)
        first = self.network.ops[pair.first]
        assert isinstance(first, Elementwise)
        other = ComparedOp(first, *(self.bounds[i].pick(sample) for i in (pair.first, first.inputs[0], pair.apart)))
        return DifferenceStep(op, bounds, pair=pair, compared=other, relaxation=relaxation)

    def rows_at_once(self, dtype: torch.dtype, coefficients: int) -> int:
        """Return the number of rows propagated together, given the most coefficients of a row."""
        limit = min(self.memory, CHUNK_BYTES) if self.device.type == "cpu" else self.memory
        return max(1, limit // (coefficients * dtype.itemsize * COPIES))


def _is_one_whole_number(x: Interval) -> Tensor:
    """Return True for samples in which each element has one value, a whole number, (batch,)."""
    return ((x.lower == x.upper) & (x.lower == x.lower.round())).all(1)
