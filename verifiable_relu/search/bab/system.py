"""The reduced system of one query: the inputs that vary, the unstable neurons, and the affine forms between them.

With e ∈ [−1, 1]ⁿ the scaled inputs, z_j ∈ [l_j, u_j] the pre-activation and r_j = f_j(z_j) the value of unstable
neuron j,

    z_j = inputs_j·e + neurons_j·r + constant_j,

up to an error that every form comes with. Over a box most neurons of a ReLU network are stable, and some smooth ones
are lines but for a small error: they are eliminated. Rows are pulled back from an op towards the input, through affine
maps and stable neurons, and end at unstable ones, or go on through linear bounds of these. The steps through affine
maps and sums are those of ``bounds.steps``: rows are of differences v − v₀ from points, and each op charges what its
own step may lose to rounding, in either direction. Without an account of rounding, in float32, rows serve searches.

The coefficients of all pre-activations are as many as the square of their number. Where that is too much, or nobody
asks for them, those of a few neurons are made by passes through the network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from verifiable_relu.bounds.neuron_bounds import BASE, NeuronBounds, propagate
from verifiable_relu.bounds.rows import DenseRows, Rows
from verifiable_relu.bounds.steps import AffineStep, OpBounds, Step, SumStep, underflows
from verifiable_relu.errors import OutOfTime, UnsupportedError
from verifiable_relu.ir.functions.function import Function
from verifiable_relu.ir.interval import Interval
from verifiable_relu.ir.network import Affine, Elementwise, Network, Sum
from verifiable_relu.rounding import FEW, OWN, TINY, above, gamma, negligible, sum_error, unit_roundoff

_WHOLE = 3 << 23  # The most coefficients of a system that is held as a whole, which takes a few copies of them
_WORKING = 1 << 27  # Bytes of coefficients that are pulled back at once
# Heuristic: a neuron that a line follows up to this part of its values is taken for the line, with an error
_STRAIGHT = 2.0**-30
_UNIT = unit_roundoff(BASE)


@dataclass(frozen=True, eq=False)
class Block:
    """Unstable neurons of elementwise op ``op``: numbers ``start`` up to ``end`` of a system; in float64."""

    op: int
    start: int
    end: int
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
class AffineForms:
    """Affine forms matrix·(e, r) + constant of the scaled inputs and the values of the unstable neurons, one a row.

    Forms of a relaxation have remainders in the place of values.
    """

    matrix: Tensor  # (rows, n + m) for e ∈ [−1, 1]ⁿ
    constant: Tensor  # (rows,)
    error: Tensor  # (rows,) how far the form is from what it stands for, at most, at any point of the box
    n: int  # The number of inputs that vary

    def __getitem__(self, chosen: Tensor | slice) -> AffineForms:
        return self.each(lambda t: t[chosen])

    def __len__(self) -> int:
        return len(self.constant)

    def __neg__(self) -> AffineForms:
        return AffineForms(-self.matrix, -self.constant, self.error, self.n)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.matrix, self.constant, self.error

    @property
    def inputs(self) -> Tensor:
        return self.matrix[:, : self.n]

    @property
    def neurons(self) -> Tensor:
        return self.matrix[:, self.n :]

    def each(self, change: Callable[[Tensor], Tensor]) -> AffineForms:
        """Return the forms with every tensor changed."""
        matrix, constant, error = map(change, self.tensors)
        return AffineForms(matrix, constant, error, self.n)

    @staticmethod
    def cat(parts: Sequence[AffineForms]) -> AffineForms:
        """Return all rows of several."""
        matrix, constant, error = map(torch.cat, zip(*(part.tensors for part in parts), strict=True))
        return AffineForms(matrix, constant, error, parts[0].n)

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
    """Terms that take the place of coefficients·r of a block's neurons: weight·z + constant, and the remainders."""

    weight: Tensor  # (rows, neurons of the block) the coefficients of the pre-activations z
    constant: Tensor  # (rows,)
    error: Tensor | None = None  # (rows,) what rounding has changed in both, at most; None in searches
    before: Tensor | None = None  # (rows, n + start) coefficients of e and of neurons before the block; None for zeros


Lines = Callable[[Block, Tensor], Replacement]
"""Linear bounds of a block's neurons, given the coefficients (rows, neurons of the block) of their values.

What the bounds leave of each value, its remainder, keeps the value's coefficient.
"""


def is_whole(inputs: int, neurons: int) -> bool:
    """Return True if a system with these numbers of varying inputs and unstable neurons may be held as a whole."""
    return neurons * (inputs + neurons) <= _WHOLE


def eliminate_stable_neurons(
    network: Network,
    box: Interval,
    intervals: Mapping[int, Interval],
    stop: Callable[[], bool] | None = None,
    until: int | None = None,
) -> ReducedSystem:
    """Return the reduced system of one box.

    Args:
        network: without ``Maximum`` (``tournament.without_maxima``) and ``Product``.
        box: of the inputs, (1, inputs) in float64.
        intervals: of the ops that feed elementwise ops, by number, (1, size) in float64.
        stop: asked between ops of a pass whether to raise ``OutOfTime``; None for never.
        until: the number of the first op that is left out, with all behind it; None for all ops.

    Raises:
        UnsupportedError: if an op is of a kind that rows do not go back through, or an interval is not finite.
    """
    bounds, stable, chosen, blocks = [NeuronBounds.centred(box)], dict[int, _Stable](), dict[int, Tensor](), []
    center, start = bounds[0].point[0], 0
    reach = torch.maximum(box.upper[0] - center, center - box.lower[0])
    # A difference is rounded, but zero only if it is.
    radius = torch.where(reach > 0, above(reach), reach)
    free = (radius > 0).nonzero().squeeze(1)
    places, ends = [free.new_zeros(0, 2)], [center.new_zeros(2, 0)]
    for index, op in enumerate(network.ops[1:until], 1):
        if not isinstance(op, Affine | Elementwise | Sum):
            raise UnsupportedError("branch and bound splits elementwise functions alone", place=op.place)
        if isinstance(op, Elementwise):
            x = intervals[op.inputs[0]]
            stable[index] = _Stable.of(op.function, x)
            chosen[index] = mine = stable[index].unstable.nonzero().squeeze(1)
            if len(mine):
                blocks.append(Block(index, start, start + len(mine), op.function.select(mine)))
                start += len(mine)
                ends.append(torch.cat([x.lower[:, mine], x.upper[:, mine]]))
                places.append(torch.stack([torch.full_like(mine, index), mine], 1))
        found = propagate(op, [bounds[i] for i in op.inputs])
        if index in intervals:
            found = found.tightened(found.interval.intersect(intervals[index]))
        bounds.append(found)
    lower, upper = torch.cat(ends, 1)
    if not bool((lower.isfinite() & upper.isfinite()).all()):
        raise UnsupportedError("the bounds of a pre-activation are not finite")
    passes = _Passes(network, radius, free, tuple(blocks), bounds, stable, chosen, stop)
    return ReducedSystem(center, radius, free, lower, upper, torch.cat(places), tuple(blocks), passes)


@dataclass(frozen=True, eq=False)
class ReducedSystem:
    """The unstable neurons of one box, and their pre-activations as affine forms."""

    # center, radius: of the box, (inputs of the network,)
    center: Tensor
    radius: Tensor
    free: Tensor  # (n,) the inputs that e scales
    # lower, upper: (m,) of the pre-activations
    lower: Tensor
    upper: Tensor
    places: Tensor  # (m, 2) the elementwise op of each, and its number there
    # The neurons of each op, in the order of evaluation: a neuron depends on those of earlier blocks alone
    blocks: tuple[Block, ...]
    given: AffineForms | _Passes  # The pre-activations, m rows, or what makes them

    @property
    def inputs(self) -> int:
        return len(self.free)

    @property
    def size(self) -> int:
        return len(self.lower)

    @property
    def whole(self) -> bool:
        """True if the system may be held as a whole."""
        return is_whole(self.inputs, self.size)

    @property
    def piecewise_linear(self) -> bool:
        return all(block.function.piecewise_linear for block in self.blocks)

    @property
    def passes(self) -> _Passes:
        """What pulls rows back through the network, of a system that was made from one."""
        assert isinstance(self.given, _Passes)
        return self.given

    @cached_property
    def neurons(self) -> AffineForms:
        """All pre-activations, m rows."""
        if isinstance(self.given, AffineForms):
            return self.given
        return self._made(torch.arange(self.size, device=self.lower.device))

    @property
    def _is_held(self) -> bool:
        return isinstance(self.given, AffineForms) or "neurons" in vars(self)

    def outputs(self, matrix: Tensor, op: int | None = None) -> AffineForms:
        """Return the forms of matrix·y, for rows (rows, size) on the value y of an op: the output, if none is given."""
        passes, op = self.passes, len(self.passes.bounds) - 1 if op is None else op
        every = torch.arange(len(matrix), device=matrix.device)
        return passes.in_parts(every, lambda part: passes.pulled({op: matrix[part].to(self.center)}))

    def of_neurons(self, chosen: Tensor, lines: Lines | None = None) -> AffineForms:
        """Return the pre-activations of some neurons; with ``lines``, ``substituted``."""
        if not self._is_held:
            return self._made(chosen, lines)
        rows = self.neurons[chosen]
        return rows if lines is None else self.substituted(rows, lines)

    def _made(self, chosen: Tensor, lines: Lines | None = None) -> AffineForms:
        """As ``of_neurons``, by passes."""

        def pulled(part: Tensor) -> AffineForms:
            given: dict[int, Tensor] = {}
            for index in self.places[part, 0].unique().tolist():
                source = self.passes.network.ops[index].inputs[0]
                mine = (self.places[part, 0] == index).nonzero().squeeze(1)
                size = self.passes.network.ops[source].size
                rows = given.setdefault(source, self.center.new_zeros(len(part), size))
                rows[mine, self.places[part[mine], 1]] = 1
            return self.passes.pulled(given, lines)

        return self.passes.in_parts(chosen, pulled)

    def substituted(self, rows: AffineForms, lines: Lines, rounded: bool = True) -> AffineForms:
        """Return forms of e and of remainders: linear bounds take the place of all values r, of the last block first.

        Args:
            rows: the forms of e and r.
            lines: the bounds.
            rounded: whether to account for rounding. Without, all is in float32, for searches.

        Returns:
            Forms of e and of what the bounds leave of each r, with the coefficient that r had.
        """
        if not self._is_held:
            if not rounded:
                # The lines of a search may be those of its rows.
                return self.passes.pulled({}, lines, rows, rounded)
            every = torch.arange(len(rows), device=rows.constant.device)
            return self.passes.in_parts(every, lambda part: self.passes.pulled({}, lines, rows[part]))
        n, kept, a, constant, error = self.inputs, list[Tensor](), *rows.tensors
        matrix, constants, _ = self.neurons.tensors if rounded else self._single
        for block in reversed(self.blocks):
            mine, a = a[:, n + block.start : n + block.end], a[:, : n + block.start]
            kept.insert(0, mine)
            by = lines(block, mine)
            if rounded:
                assert by.error is not None
                error = error + by.error + self._lost(a, constant, by, block)
            a = torch.addmm(a, by.weight, matrix[block.part, : n + block.start])
            constant = constant + by.weight @ constants[block.part] + by.constant
            if by.before is not None:
                a = a + by.before
                if rounded:
                    error = error + _UNIT * self._most(a)
        return AffineForms(torch.cat([a, *kept], 1), constant, OWN * error, n)

    def _most(self, a: Tensor) -> Tensor:
        """Return the sum (rows,) of the magnitudes of terms of e and of the first neurons over the box."""
        n = self.inputs
        return a[:, :n].abs().sum(1) + a[:, n:].abs() @ self.reach[: a.shape[1] - n]

    def _lost(self, a: Tensor, constant: Tensor, by: Replacement, block: Block) -> Tensor:
        """Return what forms lose where pre-activations take the place of a block's values, (rows,).

        Every coefficient becomes a sum of as many products as the block has neurons, and one more number.
        """
        size = by.weight.abs()
        terms = self._most(a) + constant.abs() + by.constant.abs() + size @ self._sizes[block.part]
        lost = size @ self.neurons.error[block.part] + gamma(len(block) + 8, BASE) * terms
        return lost + 8 * TINY * (len(block) + 1) * (1 + self.inputs + self.size) * (1 + self.reach.sum())

    @cached_property
    def _single(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.neurons.each(Tensor.float).tensors

    @cached_property
    def _sizes(self) -> Tensor:
        """(m,) ≥ the sum of the magnitudes of each pre-activation's terms over the box."""
        return self.neurons.size(self.reach)

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

    def values(self, e: Tensor) -> tuple[Tensor, Tensor]:
        """Return pre-activations and values of the neurons, (points, m) each, at scaled inputs; not proven."""
        z = torch.addmm(self.neurons.constant, e.double(), self.neurons.inputs.T)
        r = torch.zeros_like(z)
        for block in self.blocks:
            z[:, block.part] += r[:, : block.start] @ self.neurons.neurons[block.part, : block.start].T
            r[:, block.part] = block.function.value(z[:, block.part])
        return z, r

    def support(self, rows: AffineForms) -> Tensor:
        """Return the neurons that each row depends on, through other neurons included, (rows, m) bool."""
        mine = (rows.neurons != 0).float()
        return (mine + mine @ self._feeding) > 0

    @cached_property
    def _feeding(self) -> Tensor:
        """(m, m) 1 where a neuron depends on another one, through others included."""
        every = (self.neurons.neurons != 0).float()
        for block in self.blocks:
            mine = every[block.part]
            every[block.part] = ((mine + mine[:, : block.start] @ every[: block.start]) > 0).float()
        return every

    def restricted(self, rows: AffineForms) -> tuple[ReducedSystem, AffineForms]:
        """Return the system of the inputs and neurons that some rows depend on, and these rows there.

        What is left out has the coefficient zero in every form.
        """
        kept = self.support(rows).any(0).nonzero().squeeze(1)
        mine = self.neurons[kept]
        read = ((rows.inputs != 0).any(0) | (mine.inputs != 0).any(0)).nonzero().squeeze(1)
        blocks, start = [], 0
        for block in self.blocks:
            chosen = kept[(kept >= block.start) & (kept < block.end)]
            if len(chosen):
                blocks.append(Block(block.op, start, start + len(chosen), block.select(chosen)))
                start += len(chosen)
        parts = (self.free[read], self.lower[kept], self.upper[kept], self.places[kept], tuple(blocks))
        columns = torch.cat([read, self.inputs + kept])
        small, own = (AffineForms(f.matrix[:, columns], f.constant, f.error, len(read)) for f in (mine, rows))
        return ReducedSystem(self.center, self.radius, *parts, small), own


@dataclass(frozen=True, eq=False)
class _Stable:
    """Lines of an elementwise op's neurons: |f(z) − slope·z − offset| ≤ error for each that is not unstable; (n,)."""

    unstable: Tensor
    slope: Tensor
    offset: Tensor
    error: Tensor

    @staticmethod
    def of(function: Function, x: Interval) -> _Stable:
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
class _Passes:
    """Passes back through the network of a reduced system."""

    # network, radius, free, blocks: as of the system
    network: Network
    radius: Tensor
    free: Tensor
    blocks: tuple[Block, ...]
    bounds: list[NeuronBounds]  # Of every op's value
    # stable, chosen: by elementwise op, its lines, and the places of its unstable neurons
    stable: dict[int, _Stable]
    chosen: dict[int, Tensor]
    stop: Callable[[], bool] | None  # Asked between ops whether to raise ``OutOfTime``; None for never

    @cached_property
    def number(self) -> dict[int, int]:
        """By elementwise op, the number of its block."""
        return {block.op: number for number, block in enumerate(self.blocks)}

    @cached_property
    def lost(self) -> float:
        """What the products of a pass may lose to underflow."""
        ops = self.network.ops[: len(self.bounds)]
        products = sum(underflows(op, sum(self.network.ops[i].size for i in op.inputs)) for op in ops)
        return products * negligible(BASE) * (1 + max(float(each.radius.max()) for each in self.bounds))

    @cached_property
    def _steps(self) -> dict[tuple[int, bool], Step]:
        return {}

    def none(self, rows: int) -> AffineForms:
        """Return forms that are zero."""
        return AffineForms.zeros(rows, len(self.free), sum(map(len, self.blocks)), self.radius)

    def size(self, index: int) -> Tensor:
        """Return the largest magnitudes of the value of an op over the box, (size,)."""
        return _size(self.bounds[index].interval)

    def in_parts(self, every: Tensor, pulled: Callable[[Tensor], AffineForms]) -> AffineForms:
        """Return what is pulled back for all of some numbers, as many at once as memory allows."""
        chunk = max(1, _WORKING // (8 * 6 * max(each.point.shape[1] for each in self.bounds)))
        return AffineForms.cat([*map(pulled, every.split(chunk))])

    def step(self, index: int, rounded: bool) -> Step:
        """Return the step through an affine map or a sum."""
        if (index, rounded) not in self._steps:
            op, dtype = self.network.ops[index], BASE if rounded else torch.float32
            inputs = [self.bounds[i] for i in op.inputs]
            # Rows are added to each other here, which is charged here.
            about = OpBounds(self.bounds[index], inputs, 1, dtype, rounded)
            if isinstance(op, Sum):
                self._steps[index, rounded] = SumStep(op, about)
            else:
                assert isinstance(op, Affine)
                self._steps[index, rounded] = AffineStep(op, about)
        return self._steps[index, rounded]

    def pulled(
        self,
        given: Mapping[int, Tensor],
        lines: Lines | None = None,
        rows: AffineForms | None = None,
        rounded: bool = True,
    ) -> AffineForms:
        """Return the forms of rows (rows, size) of some ops' values, by op, and of further rows of e and r.

        Args:
            given: the rows.
            lines: bounds of unstable neurons' values; None where rows end there.
            rows: the further rows, which are taken along; None for none.
            rounded: whether there is an account of rounding; without, coefficients are in float32.
        """
        rows = self.none(len(next(iter(given.values()), ()))) if rows is None else rows
        return _BackwardPass(self, given, rows, lines, rounded).run() if len(rows) else rows


class _BackwardPass:
    """Rows on their way back to the input, and the parts of their forms that are known (``_Passes.pulled``)."""

    def __init__(
        self, over: _Passes, given: Mapping[int, Tensor], rows: AffineForms, lines: Lines | None, rounded: bool
    ) -> None:
        self._over, self._lines, self._rounded = over, lines, rounded
        self._pending: dict[int, Rows] = {}
        self._inputs, self._kept = rows.inputs, list(rows.neurons.split([len(block) for block in over.blocks], 1))
        self._constants, self._errors = [rows.constant], [rows.error]
        for index, a in given.items():
            self._pending[index] = DenseRows(a[None])
            self._add(a, over.bounds[index].point[0])

    def run(self) -> AffineForms:
        over = self._over
        for index in range(len(over.bounds) - 1, -1, -1):
            rows = self._pending.pop(index, None)
            if rows is None and (self._lines is None or index not in over.number):
                continue
            if over.stop is not None and over.stop():
                raise OutOfTime
            if index in over.chosen:
                self._elementwise(index, None if rows is None else rows.dense()[0])
            elif rows is not None and index:
                stepped = over.step(index, self._rounded).back(rows, None)
                if stepped.charge is not None:
                    self._errors.append(stepped.charge[0])
                for source, more in stepped.given:
                    self._give(source, more)
            elif rows is not None:
                self._input(rows.dense()[0])
        constants = torch.stack(self._constants)
        constant, error = constants.sum(0), torch.stack(self._errors).sum(0)
        if self._rounded:
            error = error + sum_error(len(constants) + 4, BASE) * constants.abs().sum(0) + over.lost + TINY
        return AffineForms(torch.cat([self._inputs, *self._kept], 1), constant, OWN * error, self._inputs.shape[1])

    def _add(self, a: Tensor, vector: Tensor, error: Tensor | None = None) -> None:
        """Add a·vector to the constants; elements of the vector are off by ``error``."""
        self._constants.append(a @ vector.to(a))
        if self._rounded:
            off = sum_error(len(vector) + 4, BASE) * vector.abs()
            self._errors.append(a.abs() @ (off if error is None else off + error))

    def _elementwise(self, index: int, a: Tensor | None) -> None:
        """Pull rows of v − v₀ back through f: v − v₀ = slope·(z − z₀) + (slope·z₀ + offset − v₀) of stable neurons.

        The last term is rounded three times. A product with the slope is rounded once, and counts by |z − z₀|. Slope
        and offset of an unstable neuron are 0 here: its value is v₀ + (v − v₀).
        """
        over, stable, chosen = self._over, self._over.stable[index], self._over.chosen[index]
        (source,) = over.network.ops[index].inputs
        x, y, passed = over.bounds[source], over.bounds[index].point[0], None
        if a is not None:
            passed, moved = a * stable.slope.to(a), stable.slope * x.point[0]
            size = moved.abs() + stable.offset.abs() + y.abs() + stable.slope.abs() * x.radius[0]
            self._add(a, moved + stable.offset - y, stable.error + 4 * _UNIT * size)
        if index in over.number:
            through = self._through(over.number[index], None if a is None else a[:, chosen], x.point[0, chosen])
            if through is not None:
                passed = through.new_zeros(len(through), len(y)) if passed is None else passed
                passed = passed.index_copy(1, chosen, through)
        if passed is not None:
            self._give(source, DenseRows(passed[None]))

    def _through(self, number: int, a: Tensor | None, z: Tensor) -> Tensor | None:
        """Return the coefficients of a block's pre-activations, given rows of the values; None where rows end there."""
        blocks, n = self._over.blocks, len(self._over.free)
        if a is not None:
            self._keep(number, a)
        if self._lines is None:
            return None
        by = self._lines(blocks[number], self._kept[number])
        self._constants.append(by.constant)
        if self._rounded:
            assert by.error is not None
            self._errors.append(by.error)
        if by.before is not None:
            self._more(by.before[:, :n])
            for place, part in enumerate(by.before[:, n:].split([len(block) for block in blocks[:number]], 1)):
                self._keep(place, part)
        self._add(by.weight, z)
        return by.weight

    def _keep(self, number: int, a: Tensor) -> None:
        """Add coefficients of the values of a block's neurons."""
        self._kept[number] = self._kept[number] + a
        if self._rounded:
            op = self._over.blocks[number].op
            self._errors.append(self._kept[number].abs() @ (_UNIT * self._over.size(op)[self._over.chosen[op]]))

    def _more(self, a: Tensor) -> None:
        """Add coefficients of e."""
        self._inputs = self._inputs + a
        if self._rounded:
            self._errors.append(_UNIT * self._inputs.abs().sum(1))

    def _input(self, a: Tensor) -> None:
        """Take rows (rows, inputs of the network) that have reached the input: x = center + radius·e."""
        radius = self._over.radius.to(a)
        if self._rounded:
            self._errors.append(a.abs() @ (2 * _UNIT * radius) + len(radius) * negligible(BASE))
        self._more((a * radius)[:, self._over.free])

    def _give(self, index: int, rows: Rows) -> None:
        """Add rows of the value of an op to those that wait for it."""
        if index in self._pending:
            rows = self._pending[index].plus(rows)
            if self._rounded:
                self._errors.append(rows.dense()[0].abs() @ (_UNIT * self._over.bounds[index].radius[0]))
        self._pending[index] = rows


def _size(x: Interval) -> Tensor:
    """Return the largest magnitude in each interval (1, n): (n,)."""
    return torch.maximum(x.lower.abs(), x.upper.abs())[0]
