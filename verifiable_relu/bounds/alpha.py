"""α-CROWN: every row chooses its own slopes by gradient ascent on its own bound.

Source: Xu et al., Fast and Complete, arXiv 2011.13824, section 3.2. Every choice of slopes is sound, so that the search
runs in float32 without regard to rounding; what it found is bounded once more in the dtype of the relaxation, rounding
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
    """How slopes are searched for.

    Attributes:
        steps: of Adam.
        rate: of the first step; choices live in [0, 1].
        decay: what the rate is multiplied with after every step.
        patience: rows that need no better bound are dropped every so many steps.
    """

    steps: int = 20
    rate: float = 0.5
    decay: float = 0.98
    patience: int = 4


@dataclass(frozen=True, eq=False)
class Ascended:
    """Bounds that a search has found.

    Attributes:
        lower: (rows,) lower bounds, rounding accounted for, not below those with CROWN's slopes.
        choices: what each row chose at each nonlinear op on the way, by number, (rows, n) in [0, 1].
    """

    lower: Tensor
    choices: dict[int, Tensor]


class _Choices:
    """What the rows of a chunk choose at one op: t ∈ [0, 1] for each neuron."""

    def __init__(self, relaxation: Relaxation, index: int, sample: Tensor) -> None:
        self.index, self.op, self.dtype = index, relaxation.network.ops[index], torch.float32
        self._uses = relaxation.structure.uses[index]
        self._bounds = relaxation.bounds[index], relaxation.inputs(index)
        self.narrow(sample)

    def narrow(self, sample: Tensor) -> None:
        """Take the rows of these samples, (rows,)."""
        mine, inputs = self._bounds
        self._mine, self._inputs = self._picked(mine, sample), [self._picked(x, sample) for x in inputs]

    def _op_bounds(self) -> OpBounds:
        return OpBounds(self._mine, self._inputs, self._uses, self.dtype, rounded=False)

    def _picked(self, bounds: NeuronBounds, sample: Tensor) -> NeuronBounds:
        picked = bounds.pick(sample)
        ends = (end.to(self.dtype) for end in (picked.interval.lower, picked.interval.upper))
        return NeuronBounds(Interval(*ends), picked.point.to(self.dtype), picked.radius.to(self.dtype))


class _PlaneChoices(_Choices):
    """Tilts of a product, from −1 at t = 0 to 1 at t = 1."""

    def start(self) -> Tensor:
        return torch.full_like(self._mine.point, 0.5)

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

    def narrow(self, sample: Tensor) -> None:
        super().narrow(sample)
        assert isinstance(self.op, Elementwise)
        source = self._bounds[1][0]
        function, found = self.op.function, self.op.function.slope_range(source.interval)
        low, _ = function.slopes(source.interval, source.by_rows)
        # Where one bound alone has a choice, CROWN's own is the start.
        self._one = torch.equal(found.upper_from, found.upper_to)
        width = found.lower_to - found.lower_from
        start = (low - found.lower_from) / torch.where(width == 0, 1.0, width)
        start = start.clamp(0, 1) if self._one else torch.full_like(start, 0.5)
        self._start = start.to(self.dtype).index_select(0, sample)
        ends = (found.lower_from, width, found.upper_from, found.upper_to - found.upper_from)
        self._ends = [end.to(self.dtype).index_select(0, sample) for end in ends]
        # The offsets of a piecewise-linear function do not depend on slopes within their range.
        self._fixed: tuple[Tensor, Tensor] | None = None
        if function.piecewise_linear:
            offsets = function.floor(source.interval, found.lower_from), function.top(source.interval, found.upper_from)
            first, second = (offset.to(self.dtype).index_select(0, sample) for offset in offsets)
            self._fixed = first, second

    def start(self) -> Tensor:
        return self._start

    def _relaxation(self, choice: Tensor) -> LinearRelaxation:
        assert isinstance(self.op, Elementwise)
        low_from, low_width, up_from, up_width = self._ends
        low = torch.addcmul(low_from, low_width, choice)
        up = up_from if self._one else torch.addcmul(up_from, up_width, choice)
        if self._fixed is not None:
            return LinearRelaxation(low, self._fixed[0], up, self._fixed[1])
        return self.op.function.relaxation(self._inputs[0].interval, low, up)

    def step(self, choice: Tensor) -> Step:
        """The step with these slopes; their offsets are kept with their derivatives until ``gradient`` is asked."""
        assert isinstance(self.op, Elementwise)
        if self._fixed is None:
            with torch.enable_grad():
                self._leaf = choice.detach().requires_grad_()
                self._lines = self._relaxation(self._leaf)
            parts = (t.detach() for t in vars(self._lines).values())
            relaxation = LinearRelaxation(*parts)
        else:
            relaxation = self._relaxation(choice)
        return FunctionStep(self.op, self._op_bounds(), relaxation=relaxation)

    def gradient(self, choice: Tensor, a: Tensor, values: Sequence[Tensor]) -> Tensor:
        z, negative = values[0] + self._inputs[0].point, a.clamp(max=0)
        positive = a - negative
        found = positive * z * self._ends[1]
        if not self._one:
            found = found + negative * z * self._ends[3]
        if self._fixed is None:
            lines = self._lines
            outputs = [(lines.lower_offset, positive), (lines.upper_offset, negative)]
            given = [(offset, weight) for offset, weight in outputs if offset.requires_grad]
            if given:
                offsets, weights = zip(*given, strict=True)
                (more,) = torch.autograd.grad(offsets, self._leaf, weights, allow_unused=True)
                found = found if more is None else found + more
        return found


def slopes_of(relaxation: Relaxation, index: int, choice: Tensor, sample: Tensor) -> Slopes:
    """Return the slopes that choices t ∈ [0, 1], (rows, n) in float64, stand for at an elementwise op."""
    op, (source,) = relaxation.network.ops[index], relaxation.inputs(index)
    assert isinstance(op, Elementwise)
    found = op.function.slope_range(source.interval)
    low_from, low_to, up_from, up_to = (
        end.index_select(0, sample) for end in (found.lower_from, found.lower_to, found.upper_from, found.upper_to)
    )
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
    """Return lower bounds of rows·v with slopes that are searched for, v being the value of op ``index``.

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
        for i in passed:
            choices[i] = [c for c in choices[i] if c.ndim > 1] + [search.best[i]]
    return Ascended(torch.cat(lower), {i: torch.cat(parts) for i, parts in choices.items()})


def _settled(settled: Callable[[Tensor, Tensor], Tensor], part: Tensor, at: Tensor, best: Tensor) -> Tensor:
    return settled(part[at], best)


Learn = Callable[[Relaxation, int, Tensor, Tensor, Tensor, Ascended], None]
"""Is told of bounds of neurons: the arguments of ``linear_bounds.Search``, and what was found."""


def search_slopes(ascent: Ascent, learn: Learn | None = None) -> Search:
    """Return ``ascend`` as ``bound_by_crown`` asks for it: better bounds of single neurons."""

    def search(relaxation: Relaxation, index: int, neuron: Tensor, sign: Tensor, sample: Tensor) -> Tensor:
        rows = sign.new_zeros(len(neuron), relaxation.network.ops[index].size)
        found = ascend(relaxation, index, rows.scatter_(1, neuron[:, None], sign[:, None]), sample, ascent)
        if learn is not None:
            learn(relaxation, index, neuron, sign, sample, found)
        return found.lower

    return search


def _passed(relaxation: Relaxation, index: int) -> list[int]:
    """The ops behind the one at which rows end that rows of an op pass on their way back."""
    start, reached = relaxation.structure.start, {index}
    compared = relaxation.structure.compares(index)
    for i in range(index, start, -1):
        if i in reached:
            reached.update(relaxation.structure.given(i, compared))
    return [i for i in sorted(reached - {index}) if i > start]


class _SlopeSearch:
    """The search of one chunk of rows."""

    def __init__(
        self, relaxation: Relaxation, index: int, passed: list[int], rows: Tensor, sample: Tensor, ascent: Ascent
    ) -> None:
        self._relaxation, self._rough = relaxation, relaxation.rough()
        self._index, self._rows, self._sample, self._ascent = index, rows, sample, ascent
        self._choices: dict[int, _SlopeChoices | _PlaneChoices] = {}
        for i in passed:
            kind = _PlaneChoices if isinstance(relaxation.network.ops[i], Product) else _SlopeChoices
            self._choices[i] = kind(relaxation, i, sample)
        self.value = rows.new_full((len(rows),), -torch.inf)
        self.best = {i: choices.start().clone() for i, choices in self._choices.items()}

    def run(self, settled: Callable[[Tensor, Tensor], Tensor] | None) -> None:
        """Ascend; the best choices of every row are kept, the mean of the later half of all included."""
        if not self.best or not len(self._rows):
            return
        at = torch.arange(len(self._rows), device=self._rows.device)
        adam = {i: Adam(best.clone()) for i, best in self.best.items()}
        rate = self._ascent.rate
        for number in range(self._ascent.steps):
            if self._relaxation.stop():
                return
            gradients = self._evaluate(at, {i: each.value for i, each in adam.items()})
            if settled is not None and number % self._ascent.patience == 0:
                going = (~settled(at, self.value[at])).nonzero().squeeze(1)
                if not len(going):
                    return
                if len(going) < len(at):
                    at = at[going]
                    gradients = {i: gradient[going] for i, gradient in gradients.items()}
                    for i, choices in self._choices.items():
                        adam[i].narrow(going)
                        choices.narrow(self._sample[at])
            for i, gradient in gradients.items():
                adam[i].step(gradient, rate, counts=2 * number >= self._ascent.steps)
            rate *= self._ascent.decay
        self._evaluate(at, {i: each.value for i, each in adam.items()})
        means = {i: mean for i, each in adam.items() if (mean := each.mean()) is not None}
        if means:
            self._evaluate(at, means)

    def _evaluate(self, at: Tensor, values: dict[int, Tensor]) -> dict[int, Tensor]:
        """Bound the rows ``at`` with these choices, keep what is better, and return the gradients."""
        rough, rows, sample = self._rough, self._rows[at].unsqueeze(1), self._sample[at]
        own = {i: choices.step(values[i]) for i, choices in self._choices.items()}
        record: dict[int, Tensor] = {}
        found = rough.lower_with(self._index, rows, sample, own, record)
        self._keep(at, found.value.squeeze(1), values)
        assert found.coefficients is not None
        start = rough.structure.start
        radius = rough.bounds[start].radius.to(torch.float32).index_select(0, sample)
        primal = {start: -found.coefficients.squeeze(1).sign() * radius}
        gradients, every = {}, torch.arange(len(at), device=at.device)
        compared = rough.structure.compares(self._index)
        for i in _passed(self._relaxation, self._index):
            inputs = [primal[source] for source in rough.structure.given(i, compared)]
            a = record[i].squeeze(1) if i in record else inputs[0]
            if i in own:
                gradients[i] = self._choices[i].gradient(values[i], a, inputs)
                primal[i] = own[i].forward(inputs, a, every)
            else:
                primal[i] = rough.step(i, torch.float32, compared).forward(inputs, a, sample)
        return gradients

    def _keep(self, at: Tensor, value: Tensor, values: dict[int, Tensor]) -> None:
        better = value > self.value[at]
        self.value[at] = torch.where(better, value, self.value[at])
        for i, choice in values.items():
            self.best[i][at] = torch.where(better[:, None], choice, self.best[i][at])

    def proven(self) -> Tensor:
        """(rows,) the bounds of the best choices, and of CROWN's slopes, rounding accounted for."""
        relaxation, rows = self._relaxation, self._rows.unsqueeze(1)
        best = {i: choice.to(BASE) for i, choice in self.best.items()}
        planes = {i for i in best if isinstance(relaxation.network.ops[i], Product)}
        found = relaxation.lower(
            self._index,
            rows,
            self._sample,
            slopes={i: slopes_of(relaxation, i, best[i], self._sample) for i in best.keys() - planes},
            tilts={i: 2 * best[i] - 1 for i in planes},
        ).value
        common = relaxation.lower(self._index, rows, self._sample).value
        return torch.fmax(found, common).squeeze(1)


class Adam:
    """Choices, (rows, n), that ascend along their gradients and stay within [0, 1].

    Args:
        value: where they start; changed in place.

    Attributes:
        value: where they are.
    """

    def __init__(self, value: Tensor) -> None:
        self.value, self._steps, self._counted = value, 0, 0
        self._first, self._second, self._total = (torch.zeros_like(value) for _ in range(3))

    def narrow(self, keep: Tensor) -> None:
        """Go on with the rows of these numbers."""
        self.value, self._total = self.value[keep], self._total[keep]
        self._first, self._second = self._first[keep], self._second[keep]

    def step(self, gradient: Tensor, rate: float, counts: bool = False) -> None:
        """Take one step along the gradient; ``counts``: the choices after it are part of the mean."""
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

        Steps go to and fro about a kink. Source: SIAM J. Control Optim. 30 (1992), 838-855.
        """
        return self._total / self._counted if self._counted else None
