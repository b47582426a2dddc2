"""One backward step through each kind of op: rows of its value become rows of its inputs, and a constant.

For rows c of an op y a pass maintains, for every input of the box and in real arithmetic,

    c·y  ≥  Σ constants + Σ_v A_v·(v − v₀),                                                                      (∗)

over the pending ops v, with the coefficients A_v *as they are stored*. A step replaces one term A·(y − y₀) by terms of
the op's inputs, and (∗) still holds: a bound of its rounding errors is its *charge* |A|·e, and each
class here derives its e. No step charges anything for another op. Sources: Zhang et al., arXiv 1811.00866, theorem 3.2;
for general graphs Xu et al., arXiv 2002.12920.

Coefficients are in float64 or in float32, one dtype for a pass, of unit roundoff u_D. Constants are in float64. γ_n is
that of ``rounding``, in D where coefficients are summed. Where an op has several users, the sum A of their rows was
rounded: the op's own step charges the last addition, by (uses)·u_D·|A|·|y − y₀|. The sums before it, of three users
and more, may be larger than A; the pass charges them where it adds (``Relaxation._back``).

Products that underflow lose less than ``negligible`` each (``underflows``), and count by at most 1 + the largest radius
of the ops on the way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from verifiable_relu.bounds.neuron_bounds import BASE, NeuronBounds
from verifiable_relu.bounds.patches import Patches, kernels, unit_patches
from verifiable_relu.bounds.rows import ColumnRows, Columns, DenseRows, Rows, SampleVectors, dot, sum_terms, summed
from verifiable_relu.ir.functions.function import LinearRelaxation
from verifiable_relu.ir.linear import Convolution, Dense, Diagonal, Image
from verifiable_relu.ir.network import Affine, Elementwise, Maximum, Op, Product, Sum
from verifiable_relu.rounding import negligible, sum_error, unit_roundoff


@dataclass(frozen=True, eq=False)
class Stepped:
    """Result of taking rows back through one step.

    Attributes:
        given: rows of the inputs, by the number of their op.
        constants: (groups, each) each in float64.
        charge: (groups, each), ≥ 0, to be subtracted from the constants; None for no separate charge.
    """

    given: list[tuple[int, Rows]]
    constants: list[Tensor]
    charge: Tensor | None = None


class BackwardStep(Protocol):
    """Interface of a step: it pulls rows, whose groups belong to these samples, back to an op's inputs."""

    def back(self, rows: Rows, sample: Tensor | None) -> Stepped: ...


def underflows(op: Op, before: int) -> float:
    """Return the most products that underflow in a step through an op whose inputs have ``before`` elements."""
    terms = max(op.map.terms, op.map.back_terms) if isinstance(op, Affine) else 2 * op.size
    return 32.0 * (terms + 4) * (op.size + before)


@dataclass(frozen=True, eq=False)
class OpBounds:
    """Bounds of an op and its inputs, and the arithmetic of a step back through it.

    Attributes:
        mine: the bounds of its value.
        inputs: those of its inputs.
        uses: the most rows that are added up before the step.
        dtype: of coefficients.
        rounded: whether rounding is charged. If not, values steer a search and prove nothing.
    """

    mine: NeuronBounds
    inputs: Sequence[NeuronBounds]
    uses: int
    dtype: torch.dtype
    rounded: bool = True


class Step(ABC):
    """Base of the steps back through one op.

    Args:
        op: the op.
        bounds: its bounds and those of its inputs.
    """

    def __init__(self, op: Op, bounds: OpBounds) -> None:
        self.op, self.dtype, self.rounded = op, bounds.dtype, bounds.rounded
        self.mine, self.inputs, self._uses = bounds.mine, bounds.inputs, bounds.uses

    @abstractmethod
    def back(self, rows: Rows, sample: Tensor | None) -> Stepped:
        """Pull rows, whose groups belong to these samples, back to the op's inputs."""

    @abstractmethod
    def forward(self, values: Sequence[Tensor], rows: Tensor, sample: Tensor | None) -> Tensor:
        """Return the y − y₀ that the step's bounds of rows assume, at given x − x₀ of the inputs.

        Args:
            values: (rows, n) of each input, in the dtype of the rows.
            rows: (rows, size) the coefficients that the step was given.
            sample: (rows,) the sample of each.
        """

    def _merging(self) -> Tensor:
        """Return the error, per unit of |A|, of adding the rows of several users."""
        return self.mine.radius * (2 * self._uses * unit_roundoff(self.dtype))

    def _charge(self, rows: Rows, sample: Tensor | None) -> Tensor | None:
        """Return |A|·e for the vector ``error``; None in a search."""
        return rows.charge(self._error, sample) if self.rounded else None

    def _errors(self, error: Tensor) -> SampleVectors:
        """Return the vector of errors in the dtype of rows, rounded such that no error becomes smaller."""
        return SampleVectors((error * (1 + 4 * unit_roundoff(self.dtype)) + negligible(self.dtype)).to(self.dtype))

    _error: SampleVectors


class AffineStep(Step):
    """Dense layer or convolution: A·(y − y₀) = (A·W)·(x − x₀) + A·(W·x₀ + b − y₀), W and b as the file means them.

    A′ = fl(A·W) sums at most n products: ``back_terms``, or a row's coefficients if these are fewer. The stored weights
    are off from the meant ones by ``weight_error``, and in D by c = ``conversion_error``. So |A·W − A′|·|x − x₀| ≤
    |A|·(γ + c + weight_error)·|W|·|x − x₀|, and the last term is at most |A|·``off``:

        e = (γ_{n + 2} + c + weight_error)·reach + off + merging.
    """

    op: Affine

    def __init__(self, op: Affine, bounds: OpBounds) -> None:
        super().__init__(op, bounds)
        mine, inputs, uses, dtype, rounded = bounds.mine, bounds.inputs, bounds.uses, bounds.dtype, bounds.rounded
        self._parts: dict[tuple[int | None, int | None], Tensor] = {}
        self._live = inputs[0].columns if isinstance(op.map, Dense) and op.map.copies == 1 else None
        if rounded:
            assert mine.reach is not None and mine.off is not None
            known = op.weight_error + (op.map.conversion_error(dtype) if dtype != BASE else 0.0)
            # The error of each neuron of ``neurons``, (batch, n); without that of sums.
            self.alone = torch.add(mine.off, mine.reach, alpha=known + 2 * unit_roundoff(BASE))
            self._unsummed = self.alone + self._merging() if uses > 1 else self.alone
            self._by_terms: dict[int, SampleVectors] = {}

    def _charge(self, rows: Rows, sample: Tensor | None) -> Tensor | None:
        if not self.rounded:
            return None
        terms, reach = min(rows.count, self.op.map.back_terms), self.mine.reach
        if terms not in self._by_terms:
            assert reach is not None
            self._by_terms[terms] = self._errors(
                torch.add(self._unsummed, reach, alpha=sum_error(terms + 2, self.dtype))
            )
        return rows.charge(self._by_terms[terms], sample)

    def back(self, rows: Rows, sample: Tensor | None) -> Stepped:
        linear, source = self.op.map, self.op.inputs[0]
        charge = self._charge(rows, sample)
        if isinstance(rows, Patches) and isinstance(linear, Convolution | Diagonal):
            patches = rows.through(linear) if isinstance(linear, Convolution) else rows.scaled(linear)
            return Stepped([(source, patches)], [], charge)
        if isinstance(linear, Dense) and (self._live is not None or isinstance(rows, ColumnRows)):
            return Stepped([(source, self._in_columns(rows, linear))], [], charge)
        a = rows.dense()
        given = DenseRows(linear.transpose(a.flatten(0, 1)).view(*a.shape[:2], -1))
        return Stepped([(source, given)], [], charge)

    def _in_columns(self, rows: Rows, linear: Dense) -> Rows:
        """Return A·W for the neurons that rows name, and for inputs with more than one value."""
        columns, a = (rows.columns, rows.values) if isinstance(rows, ColumnRows) else (None, rows.dense())
        found = a @ self._part(linear, columns)
        return DenseRows(found) if self._live is None else ColumnRows(found, self._live, linear.n_in)

    def _part(self, linear: Dense, columns: Columns | None) -> Tensor:
        """Return W for some outputs, and for the inputs that may have more than one value."""
        key = (None if columns is None else columns.source, None if self._live is None else self._live.source)
        if key not in self._parts:
            part = linear.weight_in(self.dtype, self.mine.point.device)
            part = part if columns is None else part.index_select(0, columns.index)
            self._parts[key] = part if self._live is None else part.index_select(1, self._live.index)
        return self._parts[key]

    def neurons(self, neuron: Tensor, sign: Tensor) -> Rows | None:
        """Return sign·(neurons of y), (groups, each), as rows of x; None if ``back`` of unit rows is as good.

        A coefficient is a weight: only ``alone`` must be charged, instead of γ_{back_terms}.
        """
        linear, live = self.op.map, self._live
        if isinstance(linear, Convolution) and linear.groups == 1 and linear.dilation == (1, 1):
            return kernels(linear, neuron, sign)
        if not isinstance(linear, Dense) or linear.copies > 1:
            return None
        rows = self._part(linear, None).index_select(0, neuron.flatten()) * sign.reshape(-1, 1)
        rows = rows.unflatten(0, neuron.shape)
        return DenseRows(rows) if live is None else ColumnRows(rows, live, linear.n_in)

    def forward(self, values: Sequence[Tensor], rows: Tensor, sample: Tensor | None) -> Tensor:
        return self.op.map.apply(values[0])


class SumStep(Step):
    """A·(y − y₀) = Σ_i A·(x_i − x_{i,0}) + A·(Σ_i x_{i,0} − y₀), where y₀ is the sum as computed.

    e = γ·Σ|x_{i,0}| + merging.
    """

    def __init__(self, op: Sum, bounds: OpBounds) -> None:
        super().__init__(op, bounds)
        inputs = bounds.inputs
        if bounds.rounded:
            size = torch.stack([x.point.abs() for x in inputs]).sum(0)
            self._error = self._errors(self._merging() + sum_error(len(inputs) + 2, BASE) * size)

    def back(self, rows: Rows, sample: Tensor | None) -> Stepped:
        return Stepped([(source, rows) for source in self.op.inputs], [], self._charge(rows, sample))

    def forward(self, values: Sequence[Tensor], rows: Tensor, sample: Tensor | None) -> Tensor:
        return torch.stack(list(values)).sum(0)


def _covering(floor: Tensor, top: Tensor, terms: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return f and t in ``dtype`` such that the computed Σ A·f + A⁻·t is at most Σ A⁺·floor + A⁻·top.

    Each product takes part in at most n = ``terms`` roundings, two more turn f and t to ``dtype``. Let γ be that of n +
    4. f = floor − 2γ|floor| and t = d + 2γ|d| + 2γ|f| with d = top − f. For A ≥ 0 the sum has at most A·(f + γ|f|) ≤
    A·floor. For A < 0 it has at most −|A|·(f + t − γ(|f| + |t|)), and f + t − γ(|f| + |t|) ≥ f + d = top.
    """
    share = 2 * sum_error(terms + 4, dtype)
    low = torch.sub(floor, floor.abs(), alpha=share)
    rise = top - low
    rise = torch.add(rise, rise.abs().add_(low.abs()), alpha=share)
    return low.to(dtype), rise.to(dtype)


class FunctionStep(Step):
    """A·(y − y₀) ≥ A⁺·(low·(z − z₀) + floor) + A⁻·(up·(z − z₀) + top): linear bounds of y = f(z), about the points.

    low and up are numbers of D, for which the function's own offsets hold in real arithmetic. With them

        floor = low·z₀ + lower offset − y₀,   top = up·z₀ + upper offset − y₀

    are computed in float64 by three roundings. A′ = A·low + A⁻·(up − low) takes at most five of size u_D·(|low| +
    |up|)·|A|, which count by |z − z₀|. floor moves down and top up by

        e = 6u_D·(|low| + |up|)·radius(z) + 8u·((|low| + |up|)·|z₀| + |offsets| + |y₀|) + merging,

    and ``_covering`` allows for the sum of the constants, which is taken as Σ A·floor + A⁻·(top − floor).
    """

    op: Elementwise

    def __init__(self, op: Elementwise, bounds: OpBounds, *, relaxation: LinearRelaxation) -> None:
        super().__init__(op, bounds)
        mine, inputs, dtype = bounds.mine, bounds.inputs, bounds.dtype
        low, up = relaxation.lower_slope, relaxation.upper_slope
        z, y = inputs[0].point, mine.point
        floor = torch.addcmul(relaxation.lower_offset, low, z) - y
        top = torch.addcmul(relaxation.upper_offset, up, z) - y
        if bounds.rounded:
            slope = low.abs() + up.abs()
            size = relaxation.lower_offset.abs() + relaxation.upper_offset.abs() + y.abs()
            reach = torch.add(z.abs() * (8 * unit_roundoff(BASE)), inputs[0].radius, alpha=6 * unit_roundoff(dtype))
            error = torch.add(slope * reach, size, alpha=8 * unit_roundoff(BASE))
            if bounds.uses > 1:
                error = error + self._merging()
            floor, top = _covering(floor - error, top + error, sum_terms(op.size, dtype), dtype)
        else:
            floor, top = floor.to(dtype), (top - floor).to(dtype)
        self._lines = SampleVectors(low.to(dtype), (up - low).to(dtype), floor, top)

    def back(self, rows: Rows, sample: Tensor | None) -> Stepped:
        low, rise, floor, lift = rows.pick(self._lines, sample)
        a = rows.values
        negative = a.clamp(max=0)
        given = rows.replace((a * low).addcmul_(negative, rise))
        if a.dtype == BASE:
            a, negative, floor, lift = (part.flatten(2) for part in (a, negative, floor, lift))
            return Stepped([(self.op.inputs[0], given)], [dot(a, floor), dot(negative, lift)])
        # A gradient may want what was multiplied.
        products = negative * lift if negative.requires_grad else negative.mul_(lift)
        return Stepped([(self.op.inputs[0], given)], [summed(products.addcmul_(a, floor).flatten(2))])

    def forward(self, values: Sequence[Tensor], rows: Tensor, sample: Tensor | None) -> Tensor:
        low, rise, floor, lift = (part.squeeze(1) for part in self._lines.dense(sample))
        negative = (rows < 0).to(rows.dtype)
        return torch.addcmul(floor, low, values[0]).add_(torch.addcmul(lift, rise, values[0]).mul_(negative))


class ProductStep(Step):
    """A·(y − y₀) = A·z₀·(x − x₀) + A·x₀·(z − z₀) + A·(x − x₀)·(z − z₀) + A·(x₀z₀ − y₀).

    With d = x − x₀, g = z − z₀ and their radii r and s, means of McCormick's planes (Math. Program. 10, 1976) bound the
    third term for every *tilt* t ∈ [−1, 1]:

        A·d·g  ≥  |A|·t·s·d + A·t·r·g − |A|·r·s,

    as (r + d)(s + g) ≥ 0 and (r − d)(s − g) ≥ 0 say for A ≥ 0, and (r + d)(s − g) ≥ 0 and (r − d)(s + g) ≥ 0 for A ≤ 0.
    CROWN takes t = 0. The last term is a rounding of y₀. A coefficient sums two products of rounded factors: it is off
    by at most 5u_D of |A|·(|z₀| + s) or |A|·(|x₀| + r), and counts by r or s:

        e = r·s + 5u_D·((|z₀| + s)·r + (|x₀| + r)·s) + 2u·|y₀| + merging.
    """

    def __init__(self, op: Product, bounds: OpBounds, *, tilt: Tensor | None = None) -> None:
        super().__init__(op, bounds)
        mine, inputs, dtype = bounds.mine, bounds.inputs, bounds.dtype
        x, z = inputs
        gap = x.radius * z.radius
        if bounds.rounded:
            sizes = (z.point.abs() + z.radius) * x.radius + (x.point.abs() + x.radius) * z.radius
            gap = torch.add(gap * (1 + 4 * unit_roundoff(BASE)), sizes, alpha=5 * unit_roundoff(dtype))
            gap = gap + 2 * unit_roundoff(BASE) * mine.point.abs() + self._merging()
        self._error = self._errors(gap)
        vectors = [x.point, z.point]
        if tilt is not None:
            tilt = tilt.to(dtype).clamp(-1, 1).to(x.radius)
            vectors += [tilt * z.radius, tilt * x.radius]
        self._vectors = SampleVectors(*(vector.to(dtype) for vector in vectors))

    def back(self, rows: Rows, sample: Tensor | None) -> Stepped:
        x, z, *tilted = rows.pick(self._vectors, sample)
        first, second = self.op.inputs
        a = rows.values
        to_first, to_second = a * z, a * x
        if tilted:
            to_first, to_second = to_first + a.abs() * tilted[0], to_second + a * tilted[1]
        # Not an error alone: the gap is a part of the bound.
        given = [(first, rows.replace(to_first)), (second, rows.replace(to_second))]
        return Stepped(given, [-rows.weigh(self._error, sample, self.rounded)])

    def forward(self, values: Sequence[Tensor], rows: Tensor, sample: Tensor | None) -> Tensor:
        (x, z, *tilted), (gap,) = ([p.squeeze(1) for p in t.dense(sample)] for t in (self._vectors, self._error))
        side = rows.sign()
        found = z * values[0] + x * values[1] - side * gap
        return found + side * tilted[0] * values[0] + tilted[1] * values[1] if tilted else found


class MaximumStep(Step):
    """x[i] ≤ y ≤ s·x[j] + t: i has the largest lower end l, j the largest upper end h.

    With m = max(l[j], the next largest upper end) and s = (h[j] − m)/(h[j] − l[j]), the line s·(x − h[j]) + h[j] is not
    below x[j], nor below m on [l[j], h[j]]. t is the larger of what the two ends ask for, so that rounding s changes
    nothing. Source: Xiao et al., Towards General Robustness Verification of MaxPool-based Convolutional Neural Networks
    via Tightening Linear Approximation, CVPR 2024.

    The offsets are off by at most 16u of the candidates' sizes; coefficients, sums of two products for each maximum
    that a candidate is one of, by γ_D of |A| times the candidates' radii.
    """

    def __init__(self, op: Maximum, bounds: OpBounds) -> None:
        super().__init__(op, bounds)
        mine, inputs, dtype = bounds.mine, bounds.inputs, bounds.dtype
        (x,), candidates = inputs, op.candidates.to(mine.point.device)
        lower, upper = x.interval.lower[:, candidates], x.interval.upper[:, candidates]
        # The first one is repeated where an output has fewer: it is to count once.
        repeated = (candidates == candidates[:1]) & (
            torch.arange(len(candidates), device=candidates.device)[:, None] > 0
        )
        upper = upper.masked_fill(repeated, -torch.inf)
        i = upper.masked_fill(lower != lower.amax(1, keepdim=True), -torch.inf).argmax(1, keepdim=True)
        most, j = upper.max(1, keepdim=True)
        end, others = lower.gather(1, j), upper.scatter(1, j, -torch.inf)
        level = torch.maximum(others.amax(1, keepdim=True), end)
        slope = ((most - level) / (most - end).clamp(min=negligible(BASE))).clamp(0, 1).to(dtype).to(BASE)
        top = torch.maximum(level - slope * end, most - slope * most)
        chosen = candidates.expand(upper.shape)
        self._low, self._high = (chosen.gather(1, k).squeeze(1) for k in (i, j))
        slope, top = slope.squeeze(1), top.squeeze(1)
        floor = x.point.gather(1, self._low) - mine.point
        top = torch.addcmul(top, slope, x.point.gather(1, self._high)) - mine.point
        if bounds.rounded:
            size = torch.maximum(lower.abs(), most.abs()).amax(1) + mine.point.abs()
            size = size + x.point.abs()[:, candidates].amax(1)
            shared = int(torch.bincount(op.candidates.flatten()).max())
            sums = 2 * sum_error(2 * shared + 4, dtype) * x.radius[:, candidates].amax(1)
            error = 16 * unit_roundoff(BASE) * size + sums + self._merging()
            floor, top = _covering(floor - error, top + error, sum_terms(op.size, dtype), dtype)
        else:
            floor, top = floor.to(dtype), (top - floor).to(dtype)
        self._lines = SampleVectors(slope.to(dtype), floor, top)
        self._n_in = x.point.shape[1]

    def back(self, rows: Rows, sample: Tensor | None) -> Stepped:
        a = rows.dense()
        slope, floor, lift = self._lines.dense(sample)
        low, high = (of_samples(index, sample).unsqueeze(1).expand_as(a) for index in (self._low, self._high))
        negative = a.clamp(max=0)
        given = a.new_zeros(*a.shape[:2], self._n_in).scatter_add(2, low, a - negative)
        given = given.scatter_add(2, high, negative * slope)
        return Stepped([(self.op.inputs[0], DenseRows(given))], [summed(negative * lift + a * floor)])

    def forward(self, values: Sequence[Tensor], rows: Tensor, sample: Tensor | None) -> Tensor:
        slope, floor, lift = (part.squeeze(1) for part in self._lines.dense(sample))
        low, high = (of_samples(index, sample).expand(len(rows), -1) for index in (self._low, self._high))
        above = torch.addcmul(floor + lift, slope, values[0].gather(1, high))
        return torch.where(rows < 0, above, values[0].gather(1, low) + floor)


def of_samples(vectors: Tensor, sample: Tensor | None) -> Tensor:
    """Return the vectors (batch, n) of the groups' samples; all if there is one sample, or ``sample`` is None."""
    return vectors if sample is None or len(vectors) == 1 else vectors.index_select(0, sample)


def unit_rows(image: Image | None, size: int, neuron: Tensor, sign: Tensor) -> Rows:
    """Return sign·(neurons of an op), (groups, each), as rows of the op itself."""
    if image is not None:
        return unit_patches(image, neuron, sign)
    rows = sign.new_zeros(*neuron.shape, size)
    return DenseRows(rows.scatter_(2, neuron.unsqueeze(2), sign.unsqueeze(2)))
