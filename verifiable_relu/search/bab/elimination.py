"""Stable neurons eliminated: rows of coefficients of a network's values as forms of its inputs and unstable neurons.

Over a box most neurons of a ReLU network are stable, and some smooth ones are lines but for a small error. Rows are
pulled back from an op towards the input, through affine maps and stable neurons, and end at unstable ones, or go on
through linear bounds of these. Rows are pulled back in float64, and each op charges what its own step may lose to
rounding, for any point of the box. Without an account of rounding, in float32, they serve searches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from verifiable_relu.errors import OutOfTime, UnsupportedError
from verifiable_relu.ir.functions.function import Function
from verifiable_relu.ir.interval import Interval
from verifiable_relu.ir.network import Affine, Elementwise, Input, Network, Sum
from verifiable_relu.rounding import FEW, LEAST, OWN, TINY, above, gamma, unit_roundoff
from verifiable_relu.search.bab.forms import AffineForms, Block, Lines

_WORKING = 1 << 27
"""Bytes of coefficients that are pulled back at once."""

_STRAIGHT = 2.0**-30
"""Heuristic: a neuron that a line follows up to this part of its values is taken for the line, with an error."""

_UNIT = unit_roundoff(torch.float64)

_LEAST = 4 * LEAST
"""What the few products that make a bound of an error may lose to underflow."""


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


class Elimination:
    """The neurons of one network over one box, of which the stable ones are eliminated.

    Args:
        network: without ``Maximum`` (``tournament.without_maxima``) and ``Product``.
        box: of the inputs, (1, inputs) in float64.
        intervals: of the ops that feed elementwise ops, by number, (1, size) in float64.
        stop: asked between ops whether to raise ``OutOfTime``; None for never.
        until: the number of the first op that is left out, with all behind it; None for all ops.

    Attributes:
        network: as above.
        center, radius: of the box, (inputs,).
        free: (n,) the inputs that vary.
        blocks: the unstable neurons.
        lower, upper: (m,) of their pre-activations.
        places: (m, 2) the elementwise op of each, and its number there.
        stable, block, chosen: by op, the lines of stable neurons, and the block and places of unstable ones.
        sizes: of each op, (size,) ≥ |value| over the box.
        unit: by affine op, what one unit of a coefficient loses, (size,), and what underflow takes of a row.

    Raises:
        UnsupportedError: if an op is of a kind that rows do not go back through, or an interval is not finite.
    """

    def __init__(
        self,
        network: Network,
        box: Interval,
        intervals: Mapping[int, Interval],
        stop: Callable[[], bool] | None = None,
        until: int | None = None,
    ) -> None:
        until = len(network.ops) if until is None else until
        self.network, self.stop, self._ops = network, stop, network.ops[:until]
        low, high = box.lower[0], box.upper[0]
        self.center = torch.lerp(low, high, 0.5)
        reach = torch.maximum(high - self.center, self.center - low)
        # A difference is rounded, but zero only if it is.
        self.radius = torch.where(reach > 0, above(reach), reach)
        self.free = (self.radius > 0).nonzero().squeeze(1)
        self.stable: dict[int, _Stable] = {}
        self.block: dict[int, Block] = {}
        self.chosen: dict[int, Tensor] = {}
        places, ends = [torch.zeros(0, 2, dtype=torch.long, device=low.device)], [low.new_zeros(2, 0)]
        start = 0
        for index, op in enumerate(self._ops):
            if not isinstance(op, Elementwise):
                continue
            x, function = intervals[op.inputs[0]], op.function
            self.stable[index] = stable = _Stable.of(function, x)
            chosen = stable.unstable.nonzero().squeeze(1)
            self.chosen[index] = chosen
            if len(chosen):
                self.block[index] = Block(index, start, start + len(chosen), function.select(chosen))
                start += len(chosen)
                ends.append(torch.stack([x.lower[0, chosen], x.upper[0, chosen]]))
                places.append(torch.stack([torch.full_like(chosen, index), chosen], 1))
        self.places, self.blocks = torch.cat(places), tuple(self.block.values())
        self.lower, self.upper = torch.cat(ends, 1)
        if not bool((self.lower.isfinite() & self.upper.isfinite()).all()):
            raise UnsupportedError("the bounds of a pre-activation are not finite")
        self._sums = 2 * len(network.ops) + 8
        self._measure(box, intervals)

    def _measure(self, box: Interval, intervals: Mapping[int, Interval]) -> None:
        """Bound the size of every op's value, and what a unit of its coefficients loses on the way back through it.

        For a row a of y = W·x + b the new row is Wᵀ·a, off by γ·|W|ᵀ·|a| for sums of ``back_terms`` products, and the
        constant grows by a·b. With |x| ≤ M, a·y changes by at most |a|·(γ·|W|·M + γ'·|b|). The errors of W and b
        themselves add as they are. Additions of constants, at most two for each op, are covered by γ and γ' as well.
        """
        none, self.sizes = torch.zeros_like(self.center), [_size(box)]
        self.unit: dict[int, tuple[Tensor, float]] = {}
        for index, op in enumerate(self._ops[1:], 1):
            before = [self.sizes[i] for i in op.inputs]
            if isinstance(op, Affine):
                spread = op.map.abs_apply(before[0][None])[0]
                bias = none.new_zeros(op.size) if op.bias is None else op.bias.to(none).abs()
                error = none.new_zeros(op.size) if op.bias_error is None else op.bias_error.to(none)
                relative = gamma(op.map.back_terms + self._sums, torch.float64) + op.weight_error
                unit = relative * spread + gamma(op.size + self._sums, torch.float64) * bias + error + _LEAST
                # However large a coefficient is, what underflows here is not lost.
                self.unit[index] = unit, 8 * TINY * op.size * (1 + float(before[0].sum()))
                size = OWN * ((1 + op.weight_error) * spread + bias + error)
            elif isinstance(op, Elementwise):
                size = _size(op.function.image(intervals[op.inputs[0]]))
            elif isinstance(op, Sum):
                size = OWN * torch.stack(before).sum(0)
            else:
                raise UnsupportedError("branch and bound splits elementwise functions alone", place=op.place)
            if index in intervals:
                size = torch.minimum(size, _size(intervals[index]))
            self.sizes.append(size)

    def outputs(self, matrix: Tensor, op: int | None = None) -> AffineForms:
        """Return the forms of matrix·y, for rows (rows, size) on the value y of an op: the output, if none is given."""
        op = len(self._ops) - 1 if op is None else op
        every = torch.arange(len(matrix), device=matrix.device)
        return self._parts(every, lambda part: self._pulled({op: matrix[part].to(self.center)}))

    def of_neurons(self, chosen: Tensor, lines: Lines | None = None) -> AffineForms:
        """Return the pre-activations of some unstable neurons; with ``lines``, ``substituted``."""

        def pulled(part: Tensor) -> AffineForms:
            given: dict[int, Tensor] = {}
            for index in self.places[part, 0].unique().tolist():
                source = self.network.ops[index].inputs[0]
                mine = (self.places[part, 0] == index).nonzero().squeeze(1)
                rows = given.setdefault(source, self.center.new_zeros(len(part), self.network.ops[source].size))
                rows[mine, self.places[part[mine], 1]] = 1
            return self._pulled(given, lines)

        return self._parts(chosen, pulled)

    def substituted(self, rows: AffineForms, lines: Lines, rounded: bool = True) -> AffineForms:
        """As ``ReducedSystem.substituted``."""

        def pulled(part: Tensor | slice) -> AffineForms:
            return self._pulled({}, lines, rows[part], rounded)

        # The lines of a search may be those of its rows.
        every = torch.arange(len(rows), device=rows.constant.device)
        return self._parts(every, pulled) if rounded else pulled(slice(None))

    def _parts(self, every: Tensor, pulled: Callable[[Tensor], AffineForms]) -> AffineForms:
        chunk = max(1, _WORKING // (8 * 6 * max(op.size for op in self._ops)))
        none = AffineForms.zeros(0, len(self.free), len(self.lower), self.center)
        return AffineForms.cat([none, *map(pulled, every.split(chunk))])

    def _pulled(
        self,
        given: Mapping[int, Tensor],
        lines: Lines | None = None,
        rows: AffineForms | None = None,
        rounded: bool = True,
    ) -> AffineForms:
        """Return the forms of rows (rows, size) of some ops' values, by op, and of further rows of e and r."""
        count = len(next(iter(given.values()))) if given else 0
        rows = AffineForms.zeros(count, len(self.free), len(self.lower), self.center) if rows is None else rows
        return _BackwardPass(self, given, rows, lines, rounded).run()

    def sums(self, terms: int) -> float:
        """Return γ for constants that are sums of this number of terms and are added up over all ops."""
        return gamma(terms + self._sums, torch.float64)


class _BackwardPass:
    """Rows on their way back to the input, and the parts of their forms that are known.

    Args:
        system: the box.
        given: by op, rows (rows, size) that multiply its value.
        rows: of e and r, which are taken along.
        lines: bounds of unstable neurons' values; None where rows end there.
        rounded: whether there is an account of rounding; without, coefficients are those of a search, in float32.
    """

    def __init__(
        self, system: Elimination, given: Mapping[int, Tensor], rows: AffineForms, lines: Lines | None, rounded: bool
    ) -> None:
        self.system, self._lines, self._rounded = system, lines, rounded
        self._dtype = torch.float64 if rounded else torch.float32
        self._pending = {index: a.to(self._dtype) for index, a in given.items()}
        self._inputs, self._neurons, self._constant, self._error = vars(rows).values()
        self._kept = list(rows.neurons.split([block.end - block.start for block in system.blocks], 1))
        self._number = {block.op: number for number, block in enumerate(system.blocks)}
        if rounded:
            self._error = self._error + system.sums(0) * self._constant.abs() + TINY

    def run(self) -> AffineForms:
        ops, blocks = self.system.network.ops, {block.op for block in self.system.blocks}
        for index in range(len(ops) - 1, -1, -1):
            if index not in self._pending and (self._lines is None or index not in blocks):
                continue
            if self.system.stop is not None and self.system.stop():
                raise OutOfTime
            op, a = ops[index], self._pending.pop(index, None)
            match op:
                case Elementwise():
                    self._elementwise(index, op, a)
                case Affine() if a is not None:
                    self._affine(index, op, a)
                case Input() if a is not None:
                    self._input(a)
                case Sum() if a is not None:
                    for source in op.inputs:
                        self._give(source, a)
        neurons = torch.cat([self._neurons[:, :0], *self._kept], 1)
        return AffineForms(self._inputs, neurons, self._constant, OWN * self._error)

    def _affine(self, index: int, op: Affine, a: Tensor) -> None:
        if op.bias is not None:
            self._constant = self._constant + a @ op.bias.to(a)
        if self._rounded:
            unit, lost = self.system.unit[index]
            self._error = self._error + a.abs() @ unit + lost
        self._give(op.inputs[0], op.map.transpose(a))

    def _elementwise(self, index: int, op: Elementwise, a: Tensor | None) -> None:
        block, chosen = self.system.block.get(index), self.system.chosen[index]
        stable, before = self.system.stable[index], self.system.sizes[op.inputs[0]]
        passed = None
        if a is not None:
            passed = a * stable.slope.to(a)
            if not op.function.piecewise_linear:
                self._constant = self._constant + a @ stable.offset.to(a)
            if self._rounded:
                lost = _UNIT * stable.slope.abs() * before + stable.error + _LEAST
                lost += self.system.sums(op.size) * stable.offset.abs()
                self._error = self._error + a.abs() @ lost + TINY * (before.sum() + 8 * op.size)
        if block is not None:
            through = self._through(block, index, a, chosen)
            if through is not None:
                passed = through.new_zeros(len(through), op.size) if passed is None else passed
                passed.index_copy_(1, chosen, through)
        if passed is not None:
            self._give(op.inputs[0], passed)

    def _through(self, block: Block, index: int, a: Tensor | None, chosen: Tensor) -> Tensor | None:
        """Return the coefficients of unstable neurons' pre-activations, given rows of the values; None for zeros."""
        number, system = self._number[index], self.system
        mine = self._kept[number]
        if a is not None:
            mine = mine + a[:, chosen]
            if self._rounded:
                self._error = self._error + mine.abs() @ (_UNIT * system.sizes[index][chosen])
        self._kept[number] = mine
        if self._lines is None:
            return None
        by = self._lines(block, mine)
        self._constant = self._constant + by.constant
        if by.before is not None:
            n = len(system.free)
            self._inputs = self._inputs + by.before[:, :n]
            ends = [each.end - each.start for each in system.blocks[:number]]
            for place, part in enumerate(by.before[:, n:].split(ends, 1)):
                self._kept[place] = self._kept[place] + part
        if self._rounded:
            assert by.error is not None
            self._error = self._error + by.error + system.sums(0) * by.constant.abs()
            if by.before is not None:
                kept = torch.cat([self._neurons[:, :0], *self._kept[:number]], 1).abs()
                reach = [system.sizes[each.op][system.chosen[each.op]] for each in system.blocks[:number]]
                size = self._inputs.abs().sum(1) + kept @ torch.cat([system.center[:0], *reach])
                self._error = self._error + _UNIT * size
        return by.weight

    def _input(self, a: Tensor) -> None:
        """Take rows (rows, inputs of the network) that have reached the input: x = center + radius·e."""
        system = self.system
        center, radius = system.center.to(a), system.radius.to(a)
        self._inputs = self._inputs + (a * radius)[:, system.free]
        self._constant = self._constant + a @ center
        if self._rounded:
            size = system.sums(len(center)) * (center.abs() + radius)
            self._error = self._error + a.abs() @ (size + _LEAST) + 4 * len(center) * TINY
            self._error = self._error + _UNIT * self._inputs.abs().sum(1)

    def _give(self, index: int, a: Tensor) -> None:
        """Add rows that multiply the value of an op."""
        if index in self._pending:
            a = self._pending[index] + a
            if self._rounded:
                self._error = self._error + a.abs() @ (_UNIT * self.system.sizes[index] + _LEAST)
        self._pending[index] = a


def _size(x: Interval) -> Tensor:
    """Return the largest magnitude in each interval (1, n): (n,)."""
    return torch.maximum(x.lower.abs(), x.upper.abs())[0]
