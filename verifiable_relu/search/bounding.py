"""Bounds of the whole boxes of a batch of queries and of their properties' rows, and verification by these alone.

IBP, CROWN and α-CROWN claim *unsat* if the proven margin is positive. Bounds start from what is known of the
queries (``batch.RootBounds``) and are added to it; what is proven of a polytope is not computed again. Recorders of
certificates are told what is proven, at that moment: ``RowsBounded`` and ``NeuronsBounded``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from verifiable_relu.bounds.alpha import Ascended, Ascent, ascend, search_slopes
from verifiable_relu.bounds.backward import Relaxation
from verifiable_relu.bounds.linear_bounds import bound_by_crown, lower_of_rows
from verifiable_relu.bounds.neuron_bounds import BASE
from verifiable_relu.bounds.precision import is_covered
from verifiable_relu.bounds.structure import NONLINEAR
from verifiable_relu.ir.interval import Interval
from verifiable_relu.ir.network import Affine, Elementwise, Network, Product, Sum
from verifiable_relu.rounding import below, negligible, sum_error
from verifiable_relu.search.batch import QueryBatch, RootBounds, answer_in_parts, batch_size
from verifiable_relu.search.budget import TimeBudget
from verifiable_relu.search.outcomes import Outcome, Reason, Trust, Verdict
from verifiable_relu.search.property_rows import PropertyRows, input_box

_BATCH = 256  # Most queries bounded at once, so that progress moves and budgets are looked at
_CLEAR = 1e-6  # Heuristic: slopes of a row are not sought further that is above 0 by this part of its bound, and of 1


@dataclass(frozen=True, eq=False)
class RowsBounded:
    """Event: rows of properties are bounded from below over their boxes; positive margins prove queries."""

    relaxation: Relaxation  # The intervals of all ops over the boxes, and CROWN's slopes
    rows: PropertyRows  # Of the properties
    values: Tensor  # (boxes, rows) lower bounds of matrix·y − bound
    chosen: Tensor  # (count,) rows for which slopes were searched for, as ``values`` flattened counts them
    # What each of these chose at elementwise ops and products, by number, (count, n) in [0, 1] (``bounds.alpha``).
    # Which slopes prove a row better may be found out by bounding it with both
    choices: Mapping[int, Tensor]
    by_crown: bool = True  # CROWN's rows bound the inputs of nonlinear ops; else intervals alone do
    after: float = -1  # CROWN's rows do so behind this op alone; other inputs are known
    by_intervals: Tensor | None = None  # (boxes, rows) the output's interval alone bounds a row as well


@dataclass(frozen=True, eq=False)
class NeuronsBounded:
    """Event: neurons are bounded by rows with their own slopes; ``RowsBounded`` of this relaxation follows.

    sign·(element ``neuron``) of ``op`` is at least ``lower`` over the box of ``sample``, (rows,) each.
    """

    relaxation: Relaxation  # As far as ops are bounded
    op: int
    neuron: Tensor
    sign: Tensor
    sample: Tensor
    lower: Tensor
    choices: Mapping[int, Tensor]  # As of ``RowsBounded``, (rows, n) by number


@dataclass(frozen=True)
class Crown:
    """CROWN with CROWN-tight bounds of every unstable neuron; others differ from it by their options alone."""

    # Of coefficients, ``float64`` or ``float32``, rounding accounted for in both; by default float32 where that widens
    # bounds little
    dtype: str | None = None
    # The search for slopes of each row of the output that CROWN does not decide; None for none
    ascent: Ascent | None = None
    # The search for bounds of the neurons that CROWN leaves unstable; None keeps CROWN's
    intermediate: Ascent | None = None
    by_crown: bool = field(default=True, repr=False)  # Whether rows bound the neurons that intervals leave unstable
    # Whether rows of properties are bounded by CROWN; else by intervals alone
    linear: bool = field(default=True, repr=False)
    name: str = field(default="crown", repr=False)

    def claims(self, batch: QueryBatch) -> Iterator[tuple[int, Outcome]]:
        return answer_in_parts(self.name, batch, batch_size(_BATCH), self._answer)

    @torch.no_grad()
    def _answer(self, part: QueryBatch, work: TimeBudget) -> Sequence[Outcome]:
        found = BoundedBoxes(self, part, work)
        return [found.outcome(number, self.name, "the bounds are too loose to decide") for number in part.queries]


@dataclass(frozen=True)
class AlphaCrown(Crown):
    """α-CROWN: CROWN, then optimised slopes for the rows that CROWN does not decide."""

    ascent: Ascent | None = Ascent()  # noqa: RUF009 -- frozen
    name: str = field(default="alpha-crown", repr=False)


@dataclass(frozen=True)
class AlphaCrownTight(AlphaCrown):
    """α-CROWN with slopes optimised for the bounds of every unstable neuron, too: tighter, and much slower."""

    intermediate: Ascent | None = Ascent()  # noqa: RUF009 -- frozen
    name: str = field(default="alpha-crown-tight", repr=False)


class BoundedBoxes:
    """Bounds of the boxes of a batch of queries of one network.

    Attributes:
        relaxation, rows: of the boxes, and of the properties.
        lower: for each query (polytopes,) proven lower bounds of the largest row of each polytope, on the CPU.
        unstable: for each query the number of unstable neurons.
        trust: in all of this.

    Raises:
        OutOfTime: if the work has gone on for long after its time.
    """

    def __init__(self, options: Crown, part: QueryBatch, work: TimeBudget) -> None:
        network, device, numbers = part.network, torch.device(work.device), list(part.queries)
        self._options, self._cache, self._reached = options, part.bounds_cache, math.inf
        self._sample = {number: sample for sample, number in enumerate(numbers)}
        self._observer = None if part.observer is None else partial(part.observer, numbers)
        box = input_box(part.properties, BASE, device)
        dtype = None if options.dtype is None else getattr(torch, options.dtype)
        self.trust = (
            Trust.ROUNDED if all(is_covered(network, t, device) for t in (BASE, dtype or BASE)) else Trust.FLOAT
        )
        known = self._cache.known(numbers, device) if self.trust is Trust.ROUNDED else None
        self._known = known or RootBounds({}, torch.zeros(0))
        self.rows = PropertyRows.from_properties(part.properties, network.output_size, device)
        given, memory, stop = self._known.intervals, work.memory // 2, partial(self._stop, work)
        self.relaxation = Relaxation(network, box, known=given, dtype=dtype, memory=memory, stop=stop)
        steps = 0 if options.intermediate is None else options.intermediate.steps
        is_deeper = steps > self._known.searched
        self._has_rows = self._known.has_rows and not (
            options.by_crown and (self._known.reached < math.inf or is_deeper)
        )
        self._bound_neurons(options.intermediate if is_deeper else None)
        fed = sorted({i for op in network.ops if isinstance(op, NONLINEAR) for i in op.inputs})
        self._intervals = intervals = {i: self.relaxation.bounds[i].interval for i in fed}
        counts = [
            op.function.unstable(intervals[op.inputs[0]]).sum(1) for op in network.ops if isinstance(op, Elementwise)
        ]
        every = sum(counts, start=torch.zeros(len(numbers), dtype=torch.long, device=device))
        self.unstable = dict(zip(numbers, every.tolist(), strict=True))
        exists = self.rows.exists.cpu()
        before = torch.full(exists.shape, -math.inf, dtype=BASE)
        for sample, number in enumerate(numbers):
            if self.trust is Trust.ROUNDED and (root := self._cache.get(number)) is not None:
                before[sample, exists[sample]] = root.lower
        self._before = before.to(device)
        lower = self.rows.largest(self._row_values()).cpu()
        searched, self.lower = 0 if self._reached < math.inf else steps, dict[int, Tensor]()
        for sample, number in enumerate(numbers):
            own = lower[sample][exists[sample]]
            if self.trust is Trust.ROUNDED:
                root = RootBounds(self.intervals_of(number), own, self._reached, searched, self._has_rows)
                own = self._cache.learn(number, root)
            self.lower[number] = own

    def _stop(self, work: TimeBudget) -> bool:
        """Return True once time is up, and record the op that was next."""
        stopped, done = work.stop(), len(self.relaxation.bounds)
        if stopped and done < len(self.relaxation.network.ops):
            self._reached = min(self._reached, done - 1)
        return stopped

    def _bound_neurons(self, neurons: Ascent | None) -> None:
        """Bound every op as the options say, except where earlier methods have."""
        relaxation, reached, observer = self.relaxation, self._known.reached, self._observer
        if not self._options.by_crown:
            relaxation.advance()
            self._reached = -1
            return

        def learned(x: Relaxation, op: int, neuron: Tensor, sign: Tensor, sample: Tensor, found: Ascended) -> None:
            assert observer is not None
            observer(NeuronsBounded(x, op, neuron, sign, sample, found.lower, found.choices))

        only = needed_neurons(relaxation.network, (self.rows.matrix != 0).any(1).any(0))
        search = None if neurons is None else search_slopes(neurons, None if observer is None else learned)
        after = len(relaxation.network.ops) if reached == math.inf else int(reached)
        bound_by_crown(relaxation, search=search, after=after, only=only)

    def _row_values(self) -> Tensor:
        """Return lower bounds (boxes, rows) of matrix·y − bound; known ones are not computed again."""
        options, relaxation, rows = self._options, self.relaxation, self.rows
        # Lines can lose to the intervals of what the last layer adds up, and these cost next to nothing.
        last, own = relaxation.structure.last_nonlinear, _by_intervals(rows.matrix, relaxation.bounds[-1].interval)
        flat, _ = lower_of_rows(relaxation, rows.matrix.flatten(0, 1), until=last)
        flat = values = torch.fmax(flat.view_as(own), own)
        if options.linear and not self._has_rows:
            found, _ = lower_of_rows(relaxation, rows.matrix.flatten(0, 1))
            values = torch.fmax(found.view_as(values), values)
            self._has_rows = self._reached == math.inf and not relaxation.stop()
        chosen, choices = torch.zeros(0, dtype=torch.long), {}
        if options.ascent is not None:
            chosen = self._undecided(values - rows.bound).flatten().nonzero().squeeze(1)
            # The search prepares much before it asks for the first time.
            if len(chosen) and not relaxation.stop():
                values = values.clone()
                sample, last = chosen // rows.bound.shape[1], len(relaxation.network.ops) - 1
                matrix, settled = rows.matrix.flatten(0, 1)[chosen], self._settled(values, chosen)
                better = ascend(relaxation, last, matrix, sample, options.ascent, settled=settled)
                values.view(-1)[chosen] = torch.fmax(values.flatten()[chosen], better.lower)
                choices = better.choices
        by_intervals, values = ~(values > flat), below(values - rows.bound)
        if self._observer is not None:
            rest = chosen, choices, options.by_crown, self._known.reached, by_intervals
            self._observer(RowsBounded(relaxation, rows, values, *rest))
        return torch.where(values.isnan(), -math.inf, values)

    def _undecided(self, values: Tensor) -> Tensor:
        """Return which rows (boxes, rows) belong to a polytope that none of its rows excludes."""
        excluded = torch.maximum(self.rows.largest(values), self._before) > 0
        # Rows that fill belong to one more polytope.
        excluded = torch.cat([excluded, torch.ones_like(excluded[:, :1])], 1)
        return ~excluded.gather(1, self.rows.polytope)

    def _settled(self, values: Tensor, chosen: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the test with which ``ascend`` drops rows whose polytope is excluded clearly."""
        clearly = self.rows.bound + _CLEAR * (1 + self.rows.bound.abs())
        latest = values - clearly

        def settled(number: Tensor, best: Tensor) -> Tensor:
            place = chosen[number]
            latest.view(-1)[place] = torch.fmax(latest.flatten()[place], best - clearly.flatten()[place])
            return ~self._undecided(latest).flatten()[place]

        return settled

    def intervals_of(self, number: int) -> dict[int, Interval]:
        """Return the intervals of nonlinear ops' inputs in one query's box, (1, size) on the CPU.

        NaN, which bounds nothing, becomes infinite.
        """
        sample, far, found = self._sample[number], math.inf, {}
        for i, x in self._intervals.items():
            lower, upper = (end[sample : sample + 1].detach().cpu().clone() for end in (x.lower, x.upper))
            found[i] = Interval(lower.nan_to_num_(-far, far, -far), upper.nan_to_num_(far, far, -far))
        return found

    def margin(self, number: int) -> float:
        """Return a proven lower bound of one query's margin."""
        return min(self.lower[number].tolist(), default=math.inf)

    def outcome(self, number: int, name: str, undecided: str = "", decided: str = "") -> Outcome:
        """Return the outcome of one query by bounds alone, in a method's name, with a detail for either case."""
        margin, counts = self.margin(number), {"unstable": self.unstable[number], "subproblems": 0}
        if margin > 0:
            return Outcome(Verdict.UNSAT, Reason.PROVED, name, self.trust, margin, detail=decided, **counts)
        told = margin if margin > -math.inf else None
        return Outcome.unknown(Reason.INCOMPLETE, name, undecided, margin=told, **counts)


def _by_intervals(matrix: Tensor, y: Interval) -> Tensor:
    """Return lower bounds (boxes, rows) of matrix·y, matrix (boxes, rows, n), from the interval of y.

    The sum of 2n products is off by at most γ of the sum of their sizes.
    """
    positive, negative = matrix.clamp(min=0), matrix.clamp(max=0)
    lower, upper = y.lower.unsqueeze(2), y.upper.unsqueeze(2)
    size = positive @ lower.abs() - negative @ upper.abs()
    error = 2 * sum_error(2 * matrix.shape[2] + 4, BASE) * size + 2 * matrix.shape[2] * negligible(BASE)
    return (positive @ lower + negative @ upper - error).squeeze(2)


def needed_neurons(network: Network, outputs: Tensor) -> dict[int, Tensor] | None:
    """Return by elementwise op the neurons on which some outputs (n,) bool depend; None for all.

    Of an op whose inputs may all matter to each element, all are needed.
    """
    if bool(outputs.all()):
        return None
    needed = [torch.zeros(op.size, dtype=torch.bool, device=outputs.device) for op in network.ops]
    needed[-1] |= outputs
    compared = {pair.second: pair[:2] for pair in network.pairs}
    for index in range(len(network.ops) - 1, 0, -1):
        op, mine = network.ops[index], needed[index]
        for source in compared.get(index, ()):
            needed[source] |= mine
        for source in op.inputs:
            if isinstance(op, Affine):
                ones = op.map.with_weight((op.map.weight != 0).to(BASE))
                needed[source] |= ones.transpose(mine[None].to(BASE))[0] != 0
            else:
                alike = isinstance(op, Sum | Elementwise | Product)
                needed[source] |= mine if alike else mine.any()
    return {index: needed[index] for index in network.activations}
