"""Bounds of the whole boxes of a batch of queries, and of their properties' rows there.

They start from what is known of the queries (``root_bounds``) and are added to it. What is proven of a polytope is not
computed again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from verifiable_relu.search.batch import QueryBatch
from verifiable_relu.search.budget import TimeBudget
from verifiable_relu.search.events import NeuronsBounded, RowsBounded
from verifiable_relu.search.outcomes import Outcome, Reason, Trust, Verdict
from verifiable_relu.search.property_rows import BoxRows, input_box
from verifiable_relu.search.root_bounds import RootBounds

_CLEAR = 1e-6
"""Heuristic: by this part of its bound, and of 1, a row is above 0 whose slopes are not sought any further."""


@dataclass(frozen=True)
class Bounding:
    """How boxes are bounded.

    Attributes:
        by_crown: whether rows bound the neurons that intervals leave unstable.
        neurons: the search for better bounds of the neurons that rows with CROWN's slopes leave unstable.
        linear: whether rows of properties are bounded by CROWN; else by intervals alone.
        slopes: the search for slopes of rows of properties that CROWN does not decide.
        dtype: of coefficients; by default the one that ``bounds.precision`` chooses.
    """

    by_crown: bool = True
    neurons: Ascent | None = None
    linear: bool = True
    slopes: Ascent | None = None
    dtype: torch.dtype | None = None


class BoundedBoxes:
    """Bounds of the boxes of a batch of queries of one network.

    Attributes:
        queries: by number.
        relaxation: of the boxes.
        rows: of the properties.
        lower: for each query (polytopes,) proven lower bounds of the largest row of each polytope, on the CPU.
        unstable: for each query the number of unstable neurons.
        trust: in all of this.

    Raises:
        OutOfTime: if the work has gone on for long after its time.
    """

    def __init__(self, options: Bounding, part: QueryBatch, work: TimeBudget) -> None:
        network, device = part.network, torch.device(work.device)
        self.queries, self._cache = part.queries, part.bounds_cache
        numbers, properties = list(part.queries), part.properties
        self._sample = {number: sample for sample, number in enumerate(numbers)}
        box = input_box(properties, BASE, device)
        dtypes = (BASE, options.dtype or BASE)
        self.trust = Trust.ROUNDED if all(is_covered(network, t, device) for t in dtypes) else Trust.FLOAT
        known = self._cache.known(numbers, device) if self.trust is Trust.ROUNDED else None
        self._options, self._known, self._reached = options, known or RootBounds({}, torch.zeros(0)), math.inf
        self.rows = BoxRows.from_properties(properties, network.output_size, box.lower)
        given, memory, stop = self._known.intervals, work.memory // 2, partial(self._stop, work)
        self.relaxation = Relaxation(network, box, known=given, dtype=options.dtype, memory=memory, stop=stop)
        steps = 0 if options.neurons is None else options.neurons.steps
        improves = options.by_crown and (self._known.reached < math.inf or steps > self._known.searched)
        self._has_rows = self._known.has_rows and not improves
        self._observer = None if part.observer is None else partial(part.observer, numbers)
        self._bound_neurons(options.neurons if steps > self._known.searched else None)
        fed = sorted({i for op in network.ops if isinstance(op, NONLINEAR) for i in op.inputs})
        self._intervals = intervals = {i: self.relaxation.bounds[i].interval for i in fed}
        functions = [(op.function, op.inputs[0]) for op in network.ops if isinstance(op, Elementwise)]
        counts = [function.unstable(intervals[i]).sum(1) for function, i in functions]
        every = sum(counts, start=torch.zeros(len(numbers), dtype=torch.long, device=device))
        self.unstable = dict(zip(numbers, every.tolist(), strict=True))
        self._before = self._known_of_rows(numbers)
        self.lower = self._learn(numbers, self.rows.largest(self._row_values()).cpu())

    def _stop(self, work: TimeBudget) -> bool:
        """Return True once time is up; notes before which op that was."""
        stopped, done = work.stop(), len(self.relaxation.bounds)
        if stopped and done < len(self.relaxation.network.ops):
            self._reached = min(self._reached, done - 1)
        return stopped

    def _bound_neurons(self, neurons: Ascent | None) -> None:
        """Bound every op, as well as the options say and nobody has done before."""
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

    def _known_of_rows(self, numbers: Sequence[int]) -> Tensor:
        """Return what is known of the largest row of each polytope, (boxes, polytopes); −inf for nothing."""
        exists = self.rows.exists.cpu()
        found = torch.full(exists.shape, -math.inf, dtype=BASE)
        for sample, number in enumerate(numbers):
            if self.trust is Trust.ROUNDED and (root := self._cache.get(number)) is not None:
                found[sample, exists[sample]] = root.lower
        return found.to(self.rows.bound.device)

    def _row_values(self) -> Tensor:
        """Return lower bounds (boxes, rows) of matrix·y − bound; what is known already is not bounded again."""
        options, relaxation, rows = self._options, self.relaxation, self.rows
        flat = values = _by_intervals(rows.matrix, relaxation.bounds[-1].interval)
        if options.linear and not self._has_rows:
            found, _ = lower_of_rows(relaxation, rows.matrix.flatten(0, 1))
            values = torch.fmax(found.view_as(values), values)
            self._has_rows = self._reached == math.inf and not relaxation.stop()
        chosen, choices = torch.zeros(0, dtype=torch.long), {}
        if options.slopes is not None:
            chosen = self._undecided(values - rows.bound).flatten().nonzero().squeeze(1)
            # The search prepares much before it asks for the first time.
            if len(chosen) and not relaxation.stop():
                values = values.clone()
                sample, last = chosen // rows.bound.shape[1], len(relaxation.network.ops) - 1
                matrix, settled = rows.matrix.flatten(0, 1)[chosen], self._settled(values, chosen)
                better = ascend(relaxation, last, matrix, sample, options.slopes, settled=settled)
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
        """Return the test by which ``ascend`` stops with rows whose polytope is excluded clearly."""
        clearly = self.rows.bound + _CLEAR * (1 + self.rows.bound.abs())
        latest = values - clearly

        def settled(number: Tensor, best: Tensor) -> Tensor:
            place = chosen[number]
            latest.view(-1)[place] = torch.fmax(latest.flatten()[place], best - clearly.flatten()[place])
            return ~self._undecided(latest).flatten()[place]

        return settled

    def _learn(self, numbers: Sequence[int], lower: Tensor) -> dict[int, Tensor]:
        """Join what was found with what is known of each query, and return the bounds of its polytopes."""
        exists, neurons = self.rows.exists.cpu(), self._options.neurons
        searched = 0 if neurons is None or self._reached < math.inf else neurons.steps
        found = {}
        for sample, number in enumerate(numbers):
            own = lower[sample][exists[sample]]
            if self.trust is Trust.ROUNDED:
                root = RootBounds(self.intervals_of(number), own, self._reached, searched, self._has_rows)
                own = self._cache.learn(number, root)
            found[number] = own
        return found

    def intervals_of(self, number: int) -> dict[int, Interval]:
        """Return the intervals of what feeds nonlinear ops in one query's box, (1, size) on the CPU."""
        return {i: _of_sample(x, self._sample[number]) for i, x in self._intervals.items()}

    def margin(self, number: int) -> float:
        """Return a proven lower bound of one query's margin."""
        return min(self.lower[number].tolist(), default=math.inf)

    def prove(self, number: int, lower: dict[int, float]) -> None:
        """Take proven lower bounds of some polytopes of one query, by number."""
        for polytope, value in lower.items():
            self.lower[number][polytope] = max(float(self.lower[number][polytope]), value)
        self._cache.prove(number, lower)

    def outcome(self, number: int, name: str, undecided: str = "", decided: str = "") -> Outcome:
        """Return what the bounds alone say of one query, in a method's name, with the detail for either case."""
        margin, counts = self.margin(number), {"unstable": self.unstable[number], "subproblems": 0}
        if margin > 0:
            return Outcome(Verdict.UNSAT, Reason.PROVED, name, self.trust, margin, detail=decided, **counts)
        told = margin if margin > -math.inf else None
        return Outcome.unknown(Reason.INCOMPLETE, name, undecided, margin=told, **counts)


def _of_sample(x: Interval, sample: int) -> Interval:
    """Return a copy of one sample's interval on the CPU; NaN, of which nothing is known, becomes infinite."""
    lower, upper = (end[sample : sample + 1].detach().cpu().clone() for end in (x.lower, x.upper))
    return Interval(lower.nan_to_num_(-math.inf, math.inf, -math.inf), upper.nan_to_num_(math.inf, math.inf, -math.inf))


def _by_intervals(matrix: Tensor, y: Interval) -> Tensor:
    """Return lower bounds (boxes, rows) of matrix·y, matrix (boxes, rows, n), by the interval of y alone.

    The sum of 2n products is off by at most γ of the sum of their sizes.
    """
    positive, negative = matrix.clamp(min=0), matrix.clamp(max=0)
    lower, upper = y.lower.unsqueeze(2), y.upper.unsqueeze(2)
    size = positive @ lower.abs() - negative @ upper.abs()
    error = 2 * sum_error(2 * matrix.shape[2] + 4, BASE) * size + 2 * matrix.shape[2] * negligible(BASE)
    return (positive @ lower + negative @ upper - error).squeeze(2)


def needed_neurons(network: Network, outputs: Tensor) -> dict[int, Tensor] | None:
    """Return the neurons of elementwise ops on which some outputs (n,) bool depend, by number; None for all.

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
