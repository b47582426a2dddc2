"""The reduced system of one query: the inputs that vary, the unstable neurons, and the affine forms between them.

With e ∈ [−1, 1]ⁿ the scaled inputs, z_j ∈ [l_j, u_j] the pre-activation and r_j = f_j(z_j) the value of unstable
neuron j,

    z_j = inputs_j·e + neurons_j·r + constant_j,

up to an error that each form carries. Over a box most neurons of a ReLU network are stable, and some smooth ones
are linear up to a small error: they are eliminated. Rows are pulled back through the network by the relaxation that
bounds are made with (``bounds.backward``), which charges what rounding may change. Two steps of a pass are this
module's: at elementwise ops rows end at unstable neurons, or go on through linear bounds of these, and at the inputs
they become rows of e.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from verifiable_relu.bounds.backward import Relaxation
from verifiable_relu.bounds.neuron_bounds import BASE
from verifiable_relu.bounds.rows import DenseRows, Rows
from verifiable_relu.bounds.steps import BackwardStep, Stepped
from verifiable_relu.errors import UnsupportedError
from verifiable_relu.ir.functions.function import Function
from verifiable_relu.ir.interval import Interval
from verifiable_relu.ir.network import Affine, Elementwise, Network, Sum
from verifiable_relu.rounding import FEW, OWN, TINY, above, negligible, sum_error, unit_roundoff
from verifiable_relu.search.piecewise_linear import slopes_below
from verifiable_relu.search.records import TensorRecord

_WHOLE = 3 << 23  # The most coefficients of a system that is held as a whole, which takes a few copies of them
# Heuristic: a neuron that a line follows up to this part of its values is taken for the line, with an error
_STRAIGHT = 2.0**-30
_UNIT = unit_roundoff(BASE)


@dataclass(frozen=True, eq=False)
class Block:
    """Unstable neurons of one elementwise op: numbers ``start`` up to ``end`` of the system; in float64."""

    op: int
    start: int
    end: int
    chosen: Tensor  # Their numbers in the op
    function: Function

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def part(self) -> slice:
        """The block's neurons among all."""
        return slice(self.start, self.end)

    def select(self, numbers: Tensor) -> Function:
        """Return the function of some of the block's neurons, by their numbers in the system."""
        return self.function.select(numbers - self.start)


@dataclass(frozen=True, eq=False)
class AffineForms(TensorRecord):
    """Affine forms matrix·(e, r) + constant, a row each, of the scaled inputs and the unstable neurons' values.

    Forms of a relaxation have remainders in the place of values.
    """

    matrix: Tensor  # (rows, n + m) for e ∈ [−1, 1]ⁿ
    constant: Tensor  # (rows,)
    error: Tensor  # (rows,) how far the form is from what it stands for, at most, at any point of the box
    n: int  # The number of inputs that vary

    def __neg__(self) -> AffineForms:
        return AffineForms(-self.matrix, -self.constant, self.error, self.n)

    @property
    def inputs(self) -> Tensor:
        return self.matrix[:, : self.n]

    @property
    def neurons(self) -> Tensor:
        return self.matrix[:, self.n :]

    @staticmethod
    def zeros(rows: int, inputs: int, neurons: int, like: Tensor) -> AffineForms:
        """Return forms that are zero, in the dtype and on the device of a tensor."""
        return AffineForms(like.new_zeros(rows, inputs + neurons), like.new_zeros(rows), like.new_zeros(rows), inputs)

    def size(self, reach: Tensor | None = None) -> Tensor:
        """Return the sum (rows,) of the magnitudes of each form's terms, given |r| ≤ reach: 1 if None is given."""
        terms = self.neurons.abs().sum(1) if reach is None else self.neurons.abs() @ reach
        return self.inputs.abs().sum(1) + self.constant.abs() + terms


@dataclass(frozen=True, eq=False)
class Replacement:
    """Replacement of coefficients·r of a block's neurons: weight·z + constant, and remainders."""

    weight: Tensor  # (rows, neurons of the block) the coefficients of the pre-activations z
    constant: Tensor  # (rows,)
    error: Tensor  # (rows,) what rounding has changed in both, at most
    before: Tensor | None = None  # (rows, n + start) coefficients of e and of neurons before the block; None for zeros


LinearBounds = Callable[[Block, Tensor], Replacement]
"""Linear bounds of a block's neurons, given the coefficients (rows, neurons of the block) of their values.

What the bounds leave of each value, its remainder, keeps the value's coefficient.
"""


def is_whole(inputs: int, neurons: int) -> bool:
    """Return True if a system with these numbers of varying inputs and unstable neurons may be held as a whole."""
    return neurons * (inputs + neurons) <= _WHOLE


def eliminate_stable_neurons(
    network: Network, box: Interval, intervals: Mapping[int, Interval], until: int | None = None
) -> ReducedSystem:
    """Return the reduced system of one box.

    Args:
        network: without ``Maximum`` (``without_maxima``) and ``Product``.
        box: of the inputs, (1, inputs) in float64.
        intervals: of the ops that feed elementwise ops, by number, (1, size) in float64.
        until: the number of the first op whose neurons, and those of all later ops, are left out; None for none.

    Raises:
        UnsupportedError: if an op is of a kind that rows do not go back through, or an interval is not finite.
    """
    for op in network.ops[1:until]:
        if not isinstance(op, Affine | Elementwise | Sum):
            raise UnsupportedError("branch and bound splits only elementwise functions", place=op.place)
    relaxation = Relaxation(network, box, known=intervals, dtype=BASE).advance()
    center, stable, blocks, start = relaxation.bounds[0].point[0], dict[int, _Stable](), list[Block](), 0
    reach = torch.maximum(box.upper[0] - center, center - box.lower[0])
    # A difference is rounded, but zero only if it is.
    radius = torch.where(reach > 0, above(reach), reach)
    ends = [center.new_zeros(2, 0)]
    for index, op in enumerate(network.ops[:until]):
        if isinstance(op, Elementwise):
            x = intervals[op.inputs[0]]
            stable[index] = _Stable.from_bounds(op.function, x)
            if len(mine := stable[index].unstable.nonzero().squeeze(1)):
                blocks.append(Block(index, start, start + len(mine), mine, op.function.select(mine)))
                start += len(mine)
                ends.append(torch.cat([x.lower[:, mine], x.upper[:, mine]]))
    lower, upper = torch.cat(ends, 1)
    if not bool((lower.isfinite() & upper.isfinite()).all()):
        raise UnsupportedError("the bounds of a pre-activation are not finite")
    return ReducedSystem(relaxation, radius, lower, upper, tuple(blocks), stable)


@dataclass(frozen=True, eq=False)
class ReducedSystem:
    """The unstable neurons of one box, and their pre-activations as affine forms."""

    relaxation: Relaxation  # Of the network over the box
    radius: Tensor  # (inputs of the network,) of the box about ``center``
    # lower, upper: (m,) of the pre-activations
    lower: Tensor
    upper: Tensor
    # The neurons of each op, in the order of evaluation: a neuron depends on those of earlier blocks alone
    blocks: tuple[Block, ...]
    stable: Mapping[int, _Stable]  # By elementwise op

    @property
    def network(self) -> Network:
        return self.relaxation.network

    @property
    def center(self) -> Tensor:
        """(inputs of the network,) the centre of the box."""
        return self.relaxation.bounds[0].point[0]

    @cached_property
    def free(self) -> Tensor:
        """(n,) the inputs that e scales."""
        return (self.radius > 0).nonzero().squeeze(1)

    @cached_property
    def places(self) -> Tensor:
        """(m, 2) the elementwise op of each neuron, and its number there."""
        parts = [torch.stack([torch.full_like(block.chosen, block.op), block.chosen], 1) for block in self.blocks]
        return torch.cat([self.free.new_zeros(0, 2), *parts])

    @property
    def inputs(self) -> int:
        return len(self.free)

    @property
    def size(self) -> int:
        return len(self.lower)

    @property
    def whole(self) -> bool:
        """True if the coefficients of all pre-activations may be held."""
        return is_whole(self.inputs, self.size)

    @property
    def piecewise_linear(self) -> bool:
        return all(block.function.piecewise_linear for block in self.blocks)

    @cached_property
    def neurons(self) -> AffineForms:
        """All pre-activations, m rows."""
        return self.of_neurons(torch.arange(self.size, device=self.lower.device))

    @cached_property
    def slopes_below(self) -> Tensor:
        """(m,) the slopes below 0 of the neurons of a piecewise-linear system."""
        slopes = (slopes_below(block.function, len(block)).to(self.lower) for block in self.blocks)
        return torch.cat([self.lower[:0], *slopes])

    def outputs(self, matrix: Tensor, op: int | None = None) -> AffineForms:
        """Return the forms of matrix·y, for rows (rows, size) on the value y of an op: the output, if none is given."""
        op = len(self.network.ops) - 1 if op is None else op
        every = torch.arange(len(matrix), device=matrix.device)
        return self._in_parts(every, lambda part: self._pulled({op: matrix[part].to(self.center)}, len(part)))

    def of_neurons(self, chosen: Tensor, lines: LinearBounds | None = None) -> AffineForms:
        """Return the pre-activations of some neurons; with ``lines``, ``substituted``."""

        def pulled(part: Tensor) -> AffineForms:
            given: dict[int, Tensor] = {}
            for block in self.blocks:
                mine = ((part >= block.start) & (part < block.end)).nonzero().squeeze(1)
                if len(mine):
                    (source,) = self.network.ops[block.op].inputs
                    rows = given.setdefault(source, self.center.new_zeros(len(part), self.network.ops[source].size))
                    rows[mine, block.chosen[part[mine] - block.start]] = 1
            return self._pulled(given, len(part), lines)

        return self._in_parts(chosen, pulled)

    def substituted(self, rows: AffineForms, lines: LinearBounds) -> AffineForms:
        """Return forms of e and of remainders: linear bounds replace all values r, from the last block to the first.

        Args:
            rows: the forms of e and r.
            lines: the bounds.

        Returns:
            Forms of e and of the remainder of each r, with the coefficient that r had.
        """
        every = torch.arange(len(rows), device=rows.constant.device)
        return self._in_parts(every, lambda part: self._pulled({}, len(part), lines, rows[part]))

    def _in_parts(self, every: Tensor, pulled: Callable[[Tensor], AffineForms]) -> AffineForms:
        """Return ``pulled`` of the numbers ``every``, in parts that memory allows."""
        most = self.relaxation.rows_at_once(BASE, self.relaxation.structure.widest)
        return AffineForms.cat([*map(pulled, every.split(most))])

    def _pulled(
        self, given: dict[int, Tensor], count: int, lines: LinearBounds | None = None, rows: AffineForms | None = None
    ) -> AffineForms:
        """Return the forms of ``count`` rows (rows, size) of some ops' values, by op, and of further rows of e and r.

        With ``lines``, linear bounds take the place of unstable neurons' values; else rows end there.
        """
        found = rows or AffineForms.zeros(count, self.inputs, self.size, self.center)
        if not count:
            return found
        kept = _KeptRows(self, lines, found.inputs, list(found.neurons.split([len(block) for block in self.blocks], 1)))
        own: dict[int, BackwardStep] = {index: _StepToNeurons(kept, index) for index in self.stable}
        own[0] = _StepToInputs(kept)
        bounds = self.relaxation.bounds
        pending, last = dict(given), len(bounds) if rows is not None else max(given, default=0)
        for block in self.blocks if lines is not None else ():
            # Linear bounds are asked for of every block on the way.
            if block.op < last:
                pending.setdefault(block.op, self.center.new_zeros(count, bounds[block.op].point.shape[1]))
        if not pending:
            return found
        moved, error = self.relaxation.pull_back(pending, own)
        constant = found.constant + moved
        error = OWN * (found.error + error + 2 * _UNIT * (constant.abs() + found.constant.abs()) + TINY)
        return AffineForms(torch.cat([kept.inputs, *kept.neurons], 1), constant, error, self.inputs)

    @cached_property
    def values_range(self) -> Interval:
        """Intervals of the values r, (1, m)."""
        images = [block.function.image(self.interval(block)) for block in self.blocks]
        none = self.lower[None, :0]
        ends = zip((none, none), *((image.lower, image.upper) for image in images), strict=True)
        return Interval(*(torch.cat(end, 1) for end in ends))

    @cached_property
    def reach(self) -> Tensor:
        """(m,) ≥ |value| of each neuron over the box."""
        return _size(self.values_range) * FEW + TINY

    def interval(self, block: Block) -> Interval:
        """Return the intervals of a block's pre-activations, (1, count)."""
        return Interval(self.lower[None, block.part], self.upper[None, block.part])

    def point(self, e: Tensor) -> Tensor:
        """Return the inputs, (points, inputs of the network), at scaled inputs (points, n)."""
        x = self.center.repeat(len(e), 1)
        x[:, self.free] += self.radius[self.free] * e.double()
        return x


@dataclass(frozen=True, eq=False)
class _Stable:
    """Linear approximations of stable neurons, (n,) each: |f(z) − slope·z − offset| ≤ error."""

    unstable: Tensor
    slope: Tensor
    offset: Tensor
    error: Tensor

    @staticmethod
    def from_bounds(function: Function, x: Interval) -> _Stable:
        below, above = function.slopes(x)
        slope = (below + above)[0] / 2
        none = torch.zeros_like(slope)
        if function.piecewise_linear:
            # Both slopes of a stable neuron are its own.
            unstable = function.unstable(x)[0]
            return _Stable(unstable, torch.where(unstable, none, slope), none, none)
        low, high = function.floor(x, slope[None])[0], function.top(x, slope[None])[0]
        offset = low / 2 + high / 2
        error = torch.maximum(high - offset, offset - low) * FEW + TINY
        unstable = ~(error <= _STRAIGHT * _size(function.image(x)))
        return _Stable(unstable, *(torch.where(unstable, none, t) for t in (slope, offset, error)))


@dataclass(eq=False)
class _KeptRows:
    """Parts of rows' forms collected while the rows are pulled back."""

    system: ReducedSystem
    lines: LinearBounds | None
    inputs: Tensor  # (rows, n) the coefficients of e
    neurons: list[Tensor]  # (rows, neurons) those of each block's values

    def add_inputs(self, a: Tensor) -> Tensor:
        """Add coefficients of e; returns a bound of the sums' rounding, (rows,)."""
        self.inputs = self.inputs + a
        return _UNIT * self.inputs.abs().sum(1)

    def add_neurons(self, number: int, a: Tensor) -> Tensor:
        """Add coefficients of a block's values; returns a bound of the sums' rounding, (rows,)."""
        self.neurons[number] = self.neurons[number] + a
        return self.neurons[number].abs() @ (_UNIT * self.system.reach[self.system.blocks[number].part])


class _StepToInputs:
    """Take rows of the inputs, x = center + radius·e, for rows of e."""

    def __init__(self, kept: _KeptRows) -> None:
        self._kept = kept

    def back(self, rows: Rows, sample: Tensor | None) -> Stepped:
        a, system = rows.dense()[0], self._kept.system
        uses = system.relaxation.structure.uses[0]
        lost = a.abs() @ ((2 + 2 * uses) * _UNIT * system.radius) + len(system.radius) * negligible(BASE)
        return Stepped([], [], (lost + self._kept.add_inputs((a * system.radius)[:, system.free]))[None])


class _StepToNeurons:
    """Take rows back through f: v − v₀ = slope·(z − z₀) + (slope·z₀ + offset − v₀) of stable neurons.

    The last term is rounded three times. A product with the slope is rounded once, and counts by |z − z₀|. Slope and
    offset of an unstable neuron are 0 here: its value is v₀ + (v − v₀), and its coefficient is kept. With lines,
    weight·z + constant takes its place as well.
    """

    def __init__(self, kept: _KeptRows, index: int) -> None:
        self._kept, self._index = kept, index

    def back(self, rows: Rows, sample: Tensor | None) -> Stepped:
        kept, system, a = self._kept, self._kept.system, rows.dense()[0]
        relaxation, stable = system.relaxation, system.stable[self._index]
        (source,), y = system.network.ops[self._index].inputs, relaxation.bounds[self._index]
        x, moved = relaxation.bounds[source], stable.slope * relaxation.bounds[source].point[0]
        level = moved + stable.offset - y.point[0]
        size = moved.abs() + stable.offset.abs() + y.point[0].abs() + stable.slope.abs() * x.radius[0]
        size = 4 * size + 2 * relaxation.structure.uses[self._index] * y.radius[0]
        off = stable.error + _UNIT * size + sum_error(len(level) + 4, BASE) * level.abs()
        passed, constants, charge = a * stable.slope, [(a @ level)[None]], a.abs() @ off
        number = next((k for k, block in enumerate(system.blocks) if block.op == self._index), None)
        if number is not None:
            block = system.blocks[number]
            charge = charge + kept.add_neurons(number, a[:, block.chosen])
            if kept.lines is not None:
                by, z = kept.lines(block, kept.neurons[number]), x.point[0, block.chosen]
                constants += [by.constant[None], (by.weight @ z)[None]]
                charge = charge + by.error + by.weight.abs() @ (sum_error(len(block) + 4, BASE) * z.abs())
                passed = passed.index_copy(1, block.chosen, by.weight)
                if by.before is not None:
                    parts = by.before.split([system.inputs, *(len(each) for each in system.blocks[:number])], 1)
                    charge = charge + kept.add_inputs(parts[0])
                    for place, part in enumerate(parts[1:]):
                        charge = charge + kept.add_neurons(place, part)
        return Stepped([(source, DenseRows(passed[None]))], constants, charge[None])


def _size(x: Interval) -> Tensor:
    """Return the largest magnitude in each interval (1, n): (n,)."""
    return torch.maximum(x.lower.abs(), x.upper.abs())[0]
