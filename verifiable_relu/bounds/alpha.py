"""α-CROWN: every row chooses its own slopes by gradient ascent on its own bound.

Source: Xu et al., Fast and Complete, arXiv 2011.13824, section 3.2. Every choice of slopes is sound, so the search
runs in float32 and ignores rounding; the best slopes are evaluated once more in the dtype of the relaxation, rounding
included. The ascent is Adam's (Kingma and Ba, arXiv 1412.6980, algorithm 1).

**Gradients.** A bound is the least value over the box of a linear function that a row's coefficients make of the
slopes. By the envelope theorem only its value at the minimiser counts: going forward from there through the linear
bounds that were taken (``Step.forward``), a neuron with the coefficient a and the input z contributes a⁺·(lower bound
at z) + a⁻·(upper bound at z), whose derivatives by both slopes are a⁺·(z + offset′) and a⁻·(z + offset′).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from verifiable_relu.bounds.backward import Relaxation, Slopes
from verifiable_relu.bounds.linear_bounds import Search
from verifiable_relu.bounds.neuron_bounds import BASE, NeuronBounds
from verifiable_relu.bounds.steps import FunctionStep, OpBounds, ProductStep, Step
from verifiable_relu.ir.functions.function import LinearRelaxation
from verifiable_relu.ir.interval import Interval
from verifiable_relu.ir.network import Elementwise, Product

SEARCH_BYTES = 1 << 28
"""Bytes that a search holds at once: more gain nothing."""

SEARCH_COPIES = 13
"""Arrays of the size of all choices that a search holds for each row."""

_DECAY = 0.999
"""Heuristic: what a step keeps of the mean of squared gradients."""

_LEAST = 1e-8
"""Heuristic: what is added to the size of gradients, by which steps are divided."""


@dataclass(frozen=True)
class Ascent:
    """Options of the search for slopes.

    Attributes:
        steps: of Adam.
        rate: of the first step, for choices in [0, 1].
        decay: the factor of the rate after every step.
        check_every: steps between two looks for rows that need no better bound and are dropped.
    """

    steps: int = 20
    rate: float = 0.5
    decay: float = 0.98
    check_every: int = 4


@dataclass(frozen=True, eq=False)
class Ascended:
    """Result of a search for slopes.

    Attributes:
        lower: (rows,) lower bounds, rounding accounted for, not below those with CROWN's slopes.
        choices: the choice of each row at each nonlinear op on the way, by number, (rows, n) in [0, 1].
    """

    lower: Tensor
    choices: dict[int, Tensor]


class _Choices:
    """Choices of the rows of a chunk at one op: t ∈ [0, 1] for each neuron. Vectors of the only box have one row."""

    def __init__(self, relaxation: Relaxation, index: int, sample: Tensor) -> None:
        self.index, self.op, self.dtype = index, relaxation.network.ops[index], torch.float32
        self._uses = relaxation.structure.uses[index]
        self._bounds = [self._narrowed(x) for x in (relaxation.bounds[index], *relaxation.inputs(index))]
        self._vectors = [vector.to(self.dtype) for vector in self._of_boxes(relaxation)]
        self.narrow(sample)

    def _of_boxes(self, relaxation: Relaxation) -> list[Tensor]:
        """Return vectors (batch, n) that the choices need, their starting point first."""
        return [torch.full_like(self._bounds[0].point, 0.5)]

    def narrow(self, sample: Tensor) -> None:
        """Restrict the choices to the rows of these samples, (rows,)."""
        self._mine, *self._inputs = (x.pick(sample) for x in self._bounds)
        self.start, *self._picked = (v if len(v) == 1 else v.index_select(0, sample) for v in self._vectors)

    def _op_bounds(self) -> OpBounds:
        return OpBounds(self._mine, self._inputs, self._uses, self.dtype, rounded=False)

    def _narrowed(self, bounds: NeuronBounds) -> NeuronBounds:
        ends = (end.to(self.dtype) for end in (bounds.interval.lower, bounds.interval.upper))
        return NeuronBounds(Interval(*ends), bounds.point.to(self.dtype), bounds.radius.to(self.dtype))


class _PlaneChoices(_Choices):
    """Tilts of a product, from −1 at t = 0 to 1 at t = 1."""

    def step(self, choice: Tensor) -> Step:
        assert isinstance(self.op, Product)
        tilt = 2 * choice - 1
        return ProductStep(self.op, self._op_bounds(), tilt=tilt)

    def gradient(self, choice: Tensor, a: Tensor, values: Sequence[Tensor]) -> Tensor:
        """2·(|a|·s·(x − x₀) + a·r·(z − z₀))."""
        x, z = self._inputs
        return 2 * (a.abs() * z.radius * values[0] + a * x.radius * values[1])


class _SlopeChoices(_Choices):
    """Slopes of a function, from one end of its ``slope_range`` to the other."""

    def _of_boxes(self, relaxation: Relaxation) -> list[Tensor]:
        assert isinstance(self.op, Elementwise)
        (source,) = relaxation.inputs(self.index)
        function, found = self.op.function, self.op.function.slope_range(source.interval)
        low, _ = function.slopes(source.interval, source.by_rows)
        # Where one bound alone has a choice, CROWN's own is the start.
        self.is_crown = torch.equal(found.upper_from, found.upper_to)
        width = found.lower_to - found.lower_from
        start = (low - found.lower_from) / torch.where(width == 0, 1.0, width)
        start = start.clamp(0, 1) if self.is_crown else torch.full_like(start, 0.5)
        vectors = [start, found.lower_from, width, found.upper_from, found.upper_to - found.upper_from]
        # The offsets of a piecewise-linear function do not depend on slopes within their range.
        if function.piecewise_linear:
            vectors.append(function.floor(source.interval, found.lower_from))
            vectors.append(function.top(source.interval, found.upper_from))
        return vectors

    def _relaxation(self, choice: Tensor) -> LinearRelaxation:
        assert isinstance(self.op, Elementwise)
        low_from, low_width, up_from, up_width, *fixed = self._picked
        low = torch.addcmul(low_from, low_width, choice)
        up = up_from if self.is_crown else torch.addcmul(up_from, up_width, choice)
        if fixed:
            return LinearRelaxation(low, fixed[0], up, fixed[1])
        return self.op.function.relaxation(self._inputs[0].interval, low, up)

    def step(self, choice: Tensor) -> Step:
        """Return the step with these slopes; offsets and their derivatives are kept for ``gradient``."""
        assert isinstance(self.op, Elementwise)
        if not self.op.function.piecewise_linear:
            with torch.enable_grad():
                self._leaf = choice.detach().requires_grad_()
                self._lines = self._relaxation(self._leaf)
            parts = (t.detach() for t in vars(self._lines).values())
            relaxation = LinearRelaxation(*parts)
        else:
            relaxation = self._relaxation(choice)
        return FunctionStep(self.op, self._op_bounds(), relaxation=relaxation)

    def gradient(self, choice: Tensor, a: Tensor, values: Sequence[Tensor]) -> Tensor:
        assert isinstance(self.op, Elementwise)
        z, positive = values[0] + self._inputs[0].point, a.clamp(min=0)
        found = (positive * z).mul_(self._picked[1])
        if self.is_crown and self.op.function.piecewise_linear:
            return found
        negative = a - positive
        if not self.is_crown:
            found = found + negative * z * self._picked[3]
        if not self.op.function.piecewise_linear:
            lines = self._lines
            outputs = [(lines.lower_offset, positive), (lines.upper_offset, negative)]
            given = [(offset, weight) for offset, weight in outputs if offset.requires_grad]
            if given:
                offsets, weights = zip(*given, strict=True)
                (more,) = torch.autograd.grad(offsets, self._leaf, weights, allow_unused=True)
                found = found if more is None else found + more
        return found


def slopes_of(relaxation: Relaxation, index: int, choice: Tensor, sample: Tensor) -> Slopes:
    """Return the slopes at an elementwise op for choices t ∈ [0, 1], (rows, n) in float64."""
    op, (source,) = relaxation.network.ops[index], relaxation.inputs(index)
    assert isinstance(op, Elementwise)
    found = op.function.slope_range(source.interval)
    ends = found.lower_from, found.lower_to, found.upper_from, found.upper_to
    low_from, low_to, up_from, up_to = (end if len(end) == 1 else end.index_select(0, sample) for end in ends)
    return Slopes(torch.lerp(low_from, low_to, choice), torch.lerp(up_from, up_to, choice))


def ascend(
    relaxation: Relaxation,
    index: int,
    rows: Tensor,
    sample: Tensor,
    ascent: Ascent,
    *,
    settled: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Ascended:
    """Search for slopes of the bounds of rows·v, v the value of op ``index``; return the best bounds found.

    Args:
        relaxation: whose ops before ``index`` are bounded.
        index: the op.
        rows: (rows, n) in float64.
        sample: (rows,) the sample of each.
        ascent: the options of the search.
        settled: given row numbers (count,) and the best bounds found for them, tells which of them need no better one.
            Rows that are asked about together are never split over several calls.
    """
    ops = relaxation.network.ops
    # What is compared with another op keeps CROWN's slopes.
    fixed = relaxation.structure.pairs if relaxation.structure.compares(index) else ()
    passed = [i for i in _passed(relaxation, index) if isinstance(ops[i], Elementwise | Product) and i not in fixed]
    width = sum(relaxation.network.ops[i].size for i in passed) + relaxation.structure.widest
    size = max(1, min(relaxation.memory, SEARCH_BYTES) // (4 * SEARCH_COPIES * width))
    lower, choices = [rows.new_zeros(0)], {i: [torch.zeros(0, device=rows.device)] for i in passed}
    for part in torch.arange(len(rows), device=rows.device).split(size):
        search = _SlopeSearch(relaxation, index, passed, rows[part], sample[part], ascent)
        search.run(None if settled is None else partial(_settled, settled, part))
        lower.append(search.proven())
        for i, best in search.of_ops(search.best).items():
            choices[i] = [c for c in choices[i] if c.ndim > 1] + [best]
    return Ascended(torch.cat(lower), {i: torch.cat(parts) for i, parts in choices.items()})


def _settled(settled: Callable[[Tensor, Tensor], Tensor], part: Tensor, at: Tensor, best: Tensor) -> Tensor:
    return settled(part[at], best)


Learn = Callable[[Relaxation, int, Tensor, Tensor, Tensor, Ascended], None]
"""Is told of bounds of neurons: the arguments of ``linear_bounds.Search``, and what was found."""


def search_slopes(ascent: Ascent, learn: Learn | None = None) -> Search:
    """Return ``ascend`` in the form that ``bound_by_crown`` takes: better bounds of single neurons."""

    def search(relaxation: Relaxation, index: int, neuron: Tensor, sign: Tensor, sample: Tensor) -> Tensor:
        rows = sign.new_zeros(len(neuron), relaxation.network.ops[index].size)
        found = ascend(relaxation, index, rows.scatter_(1, neuron[:, None], sign[:, None]), sample, ascent)
        if learn is not None:
            learn(relaxation, index, neuron, sign, sample, found)
        return found.lower

    return search


def _passed(relaxation: Relaxation, index: int) -> list[int]:
    """Return the ops that rows of an op pass on their way back to the op at which they end."""
    start, reached = relaxation.structure.start, {index}
    compared = relaxation.structure.compares(index)
    for i in range(index, start, -1):
        if i in reached:
            reached.update(relaxation.structure.given(i, compared))
    return [i for i in sorted(reached - {index}) if i > start]


class _SlopeSearch:
    """Search of one chunk of rows; the choices at all ops are one tensor, (rows, choices), for Adam.

    Attributes:
        value: (rows,) the best bounds found, up to rounding.
        best: (rows, choices) with which they were found.
    """

    def __init__(
        self, relaxation: Relaxation, index: int, passed: list[int], rows: Tensor, sample: Tensor, ascent: Ascent
    ) -> None:
        self._relaxation, self._rough = relaxation, relaxation.rough()
        self._index, self._given, self._samples, self._ascent = index, rows, sample, ascent
        self._order = _passed(relaxation, index)
        self._choices: dict[int, _SlopeChoices | _PlaneChoices] = {}
        for i in passed:
            kind = _PlaneChoices if isinstance(relaxation.network.ops[i], Product) else _SlopeChoices
            self._choices[i] = kind(relaxation, i, sample)
        self.value = rows.new_full((len(rows),), -torch.inf)
        starts = [choices.start.expand(len(rows), -1) for choices in self._choices.values()]
        self.best = torch.cat([torch.zeros(len(rows), 0, device=rows.device), *starts], 1)
        self._narrow(torch.arange(len(rows), device=rows.device))

    def _narrow(self, at: Tensor) -> None:
        """Keep only the rows with these numbers."""
        every = len(at) == len(self._given)
        rows, self._sample = (self._given, self._samples) if every else (self._given[at], self._samples[at])
        self._at, self._rows = at, rows.to(torch.float32).unsqueeze(1)
        if not every:
            for choices in self._choices.values():
                choices.narrow(self._sample)

    def of_ops(self, choice: Tensor) -> dict[int, Tensor]:
        """Return the parts of choices at each op, by number."""
        ops = self._relaxation.network.ops
        parts = choice.split([ops[i].size for i in self._choices], 1) if self._choices else ()
        return dict(zip(self._choices, parts, strict=True))

    def run(self, settled: Callable[[Tensor, Tensor], Tensor] | None) -> None:
        """Run the ascent and keep the best choices of every row; the mean of the later half is tried, too."""
        if not self._choices or not len(self._given):
            return
        adam = Adam(self.best.clone())
        rate = self._ascent.rate
        for number in range(self._ascent.steps):
            if self._relaxation.stop():
                return
            gradient = self._evaluate(adam.value)
            if settled is not None and number % self._ascent.check_every == 0:
                going = (~settled(self._at, self.value[self._at])).nonzero().squeeze(1)
                if not len(going):
                    return
                if len(going) < len(self._at):
                    self._narrow(self._at[going])
                    gradient = gradient[going]
                    adam.narrow(going)
            adam.step(gradient, rate, counts=2 * number >= self._ascent.steps)
            rate *= self._ascent.decay
        self._bounded(adam.value)
        mean = adam.mean()
        if mean is not None:
            self._bounded(mean)

    def _bounded(self, choice: Tensor) -> tuple[dict[int, Tensor], dict[int, Step], dict[int, Tensor], Tensor]:
        """Bound the rows with these choices, and keep the better ones.

        Returns:
            The choices and steps by op, the coefficients that steps were given, and those at which rows end.
        """
        values = self.of_ops(choice)
        own = {i: choices.step(values[i]) for i, choices in self._choices.items()}
        record: dict[int, Tensor] = {}
        found = self._rough.lower_with(self._index, self._rows, self._sample, own, record)
        assert found.coefficients is not None
        value, every = found.value.squeeze(1), len(self._at) == len(self._given)
        before, best = (self.value, self.best) if every else (self.value[self._at], self.best[self._at])
        better = value > before
        value, best = torch.where(better, value, before), torch.where(better[:, None], choice, best)
        if every:
            self.value, self.best = value, best
        else:
            self.value[self._at], self.best[self._at] = value, best
        return values, own, record, found.coefficients.squeeze(1)

    def _evaluate(self, choice: Tensor) -> Tensor:
        """Bound the rows with these choices, keep what is better, and return the gradient."""
        values, own, record, ended = self._bounded(choice)
        rough, sample = self._rough, self._sample
        start, compared = rough.structure.start, rough.structure.compares(self._index)
        radius = rough.bounds[start].radius.to(torch.float32)
        radius = radius if len(radius) == 1 else radius.index_select(0, sample)
        primal, gradients = {start: -ended.sign() * radius}, {}
        for i in self._order:
            inputs = [primal[source] for source in rough.structure.given(i, compared)]
            a = record[i].squeeze(1) if i in record else inputs[0]
            if i in own:
                gradients[i] = self._choices[i].gradient(values[i], a, inputs)
                primal[i] = own[i].forward(inputs, a, None)
            else:
                primal[i] = rough.step(i, torch.float32, compared).forward(inputs, a, sample)
        return torch.cat([gradients[i] for i in self._choices], 1)

    def proven(self) -> Tensor:
        """Return the bounds of the best choices, (rows,), rounding accounted for, never below CROWN's.

        A search that began with CROWN's slopes found no worse ones, up to rounding; else those are evaluated, too.
        """
        relaxation, rows = self._relaxation, self._given.unsqueeze(1)
        best = {i: choice.to(BASE) for i, choice in self.of_ops(self.best).items()}
        planes = {i for i in best if isinstance(relaxation.network.ops[i], Product)}
        found = relaxation.lower(
            self._index,
            rows,
            self._samples,
            slopes={i: slopes_of(relaxation, i, best[i], self._samples) for i in best.keys() - planes},
            tilts={i: 2 * best[i] - 1 for i in planes},
        ).value
        if not all(isinstance(each, _PlaneChoices) or each.is_crown for each in self._choices.values()):
            found = torch.fmax(found, relaxation.lower(self._index, rows, self._samples).value)
        return found.squeeze(1)


class Adam:
    """Adam's ascent of choices, (rows, n), that stay within [0, 1].

    Args:
        value: the initial choices; changed in place.

    Attributes:
        value: the current choices.
    """

    def __init__(self, value: Tensor) -> None:
        self.value, self._steps, self._counted = value, 0, 0
        self._first, self._second, self._total = (torch.zeros_like(value) for _ in range(3))

    def narrow(self, keep: Tensor) -> None:
        """Keep only the rows with these numbers."""
        self.value, self._total = self.value[keep], self._total[keep]
        self._first, self._second = self._first[keep], self._second[keep]

    def step(self, gradient: Tensor, rate: float, counts: bool = False) -> None:
        """Take one step along the gradient; with ``counts``, the choices after it are part of the mean."""
        self._steps += 1
        self._first.lerp_(gradient, 0.1)
        self._second.mul_(_DECAY).addcmul_(gradient, gradient, value=1 - _DECAY)
        size = (self._second / (1 - _DECAY**self._steps)).sqrt_().add_(_LEAST)
        self.value.addcdiv_(self._first, size, value=rate / (1 - 0.9**self._steps)).clamp_(0, 1)
        if counts:
            self._counted += 1
            self._total += self.value

    def mean(self) -> Tensor | None:
        """Return the mean of the choices after each step that counts (Polyak and Juditsky); None without such a step.

        Steps oscillate around a kink. Source: SIAM J. Control Optim. 30 (1992), 838-855.
        """
        return self._total / self._counted if self._counted else None
