"""The sub-boxes of a search that splits inputs: bounded, tried for counterexamples, clipped and halved, in batches.

**Bounds.** Networks of ReLUs of whose inputs few vary are bounded by zonotopes (``bounds.zonotope``), which cost a
fraction of CROWN's bounds of all neurons; rows of the output then go back by CROWN over these. CROWN's bounds of the
neurons that zonotopes leave unstable would save a tenth to a third of the boxes, and cost more than that. Other
networks are bounded by CROWN alone.

**Which input is halved** is decided by what it has to do with the width of the output's rows: directly, and by way of
every unstable ReLU's contribution, of which each input has a share (``Zonotopes.influence``). Without zonotopes that is
|A_i|·width_i, A being the coefficients of the linear lower bounds (Wang et al., Formal Security Analysis of Neural
Networks using Symbolic Intervals, arXiv 1804.10829, section 4.3).

**Counterexamples.** The corner of every open box where its linear bounds are least, and its centre, are tried; and now
and then the boxes that are furthest from being proved are attacked (``pgd``). A query that takes many boxes is attacked
as a whole, once.

**Clipping.** Where the linear lower bound of a row of the unsafe set is positive, no counterexample is; that part of
the box is cut off (``clipping``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from verifiable_relu.bounds import TUNING, Bounds, Relaxation, crown_relaxation, input_box
from verifiable_relu.bounds.chunks import chunk_size, groups
from verifiable_relu.bounds.rounding import covers
from verifiable_relu.bounds.zonotope import NARROW, Zonotopes, box_bytes, takes
from verifiable_relu.errors import OutOfTime
from verifiable_relu.network.graph import Network
from verifiable_relu.network.repeated import without_repeated
from verifiable_relu.spec.property import Query
from verifiable_relu.spec.row_batch import RowBatch
from verifiable_relu.verifiers.attack import claim
from verifiable_relu.verifiers.base import Budget, Outcome, Reason, Trust, Verdict, batch_size, deadline
from verifiable_relu.verifiers.box_attack import BoxAttack
from verifiable_relu.verifiers.clipping import Clipped, clip, input_error
from verifiable_relu.verifiers.copies import at_once, most
from verifiable_relu.verifiers.sums import sums

if TYPE_CHECKING:
    from verifiable_relu.verifiers.input_split import InputSplit

_SHORT = 0.2
"""Seconds: where one process had no boxes left so soon, copies are not made again at once."""


_WIDE = 128
"""A frontier of fewer boxes has these cut several times at once, so that the next batch is a large one."""


@dataclass(frozen=True, eq=False)
class Lines:
    """Linear lower bounds of the rows of properties over a batch of boxes.

    Attributes:
        rows: what is bounded: the rows of the boxes' properties, and sums of them perhaps.
        values: (rows,) lower bounds of matrix·y − bound.
        coefficients: (rows, inputs) of the linear bounds that have these least values.
        influence: (boxes, inputs) what halving each input is worth per unit of its width; of any scale.
    """

    rows: RowBatch
    values: Tensor
    coefficients: Tensor
    influence: Tensor


@dataclass(frozen=True, eq=False)
class Share:
    """What has become of some boxes of a frontier.

    Attributes:
        lower, upper: (boxes, inputs) those that are left, halved perhaps.
        owner: (boxes,) the query of each.
        margin: (queries,) the least proven margin of the other ones; infinite where there are none.
        boxes: how many boxes of each query have been bounded.
        outcomes: of queries that have been decided meanwhile; none of them is *unsat*.
        proven: for each query what proves the boxes that are not left, where that is recorded.
    """

    lower: Tensor
    upper: Tensor
    owner: Tensor
    margin: Tensor
    boxes: list[int]
    outcomes: dict[int, Outcome]
    proven: list[list[Any]] = field(default_factory=list)


class Frontier:
    """The sub-boxes that are still to be bounded, of all queries of one network."""

    def __init__(self, options: InputSplit, network: Network, queries: Sequence[Query], budget: Budget) -> None:
        self.options = options
        self._charged = budget.clock()
        self.network = self.simplified(network).to(torch.float64, options.device)
        self.queries = queries
        self.budget = budget
        box = input_box([q.property for q in queries], network, torch.float64, options.device).flat()
        self.lower, self.upper = box.lower, box.upper
        varying = int((torch.nextafter(self.lower, self.upper) < self.upper).any(0).sum())
        self.by_zonotopes = takes(self.network) and varying <= NARROW
        self._processes = most(options.processes) if options.device == "cpu" else 1
        # In each process, half for the boxes, half for the rows that are bounded.
        self.memory = options.memory // (2 * self._processes)
        self.batch = batch_size(self.network, options.batch, self.memory)
        if self.by_zonotopes:
            each = box_bytes(self.network, varying, options.symbols)
            self.batch = max(1, min(self.batch, self.memory // each))
        self.rows = RowBatch.of([q.property for q in queries], network.output_size).to(self.lower)
        self.owner = torch.arange(len(queries), device=self.lower.device)
        self.margin = self.lower.new_full((len(queries),), torch.inf)
        self._attack = BoxAttack(self.network, options.pgd, options.search, options.device)
        self._steps = 0
        self.seconds = [0.0] * len(queries)
        self.boxes = [0] * len(queries)
        self.outcomes: dict[int, Outcome] = {}
        self._new: list[int] = []
        self._alone = time.perf_counter() + options.alone
        self._charge(self.owner)

    def simplified(self, network: Network) -> Network:
        """The network that is bounded in place of the queries' network, whose function it computes exactly."""
        return without_repeated(network)

    @property
    def frontier_size(self) -> int:
        return len(self.owner)

    def decided(self) -> list[int]:
        """Queries decided since the last call."""
        new, self._new = self._new, []
        return new

    def undecided(self) -> list[int]:
        return [i for i in range(len(self.queries)) if i not in self.outcomes]

    def is_worth_sharing(self) -> bool:
        """Whether the search takes long, and there are boxes for every process."""
        enough = len(self.owner) >= self._processes * self.batch
        return self._processes > 1 and enough and time.perf_counter() > self._alone

    def share(self) -> None:
        """Go on with all boxes in several processes, until one of these has none left."""
        count, boxes = self._processes, (self.lower, self.upper, self.owner)
        hands = [[part[number::count].clone() for part in boxes] for number in range(count)]
        self.lower, self.upper, self.owner = hands[0]
        began = time.perf_counter()
        start, allowance = self.budget.clock(), self.budget.subset(self.undecided()).total()
        left = lambda: allowance - (self.budget.clock() - start)  # noqa: E731
        shares: list[Callable[[Callable[[], bool]], Share | None]] = [self._go_on]
        shares += [partial(self.go_on_elsewhere, hand) for hand in hands[1:]]
        for hand, share in zip(hands[1:], at_once(shares, left)[1:], strict=True):
            # Nothing is known of what was dealt to a process that failed.
            self._put(*(hand if share is None else (share.lower, share.upper, share.owner)))
            if share is None:
                self._processes = 1
            else:
                self.take(share)
        now = time.perf_counter()
        self._alone = now + self.options.alone if now - began < _SHORT else now

    def _go_on(self, pause: Callable[[], bool]) -> None:
        # A query that is out of time is closed, and its boxes dropped, where the frontier is settled: not here.
        while self.frontier_size and all(self.budget.remaining(i) > 0 for i in self.owner.unique().tolist()):
            self.step()
            if pause():
                break

    def go_on_elsewhere(self, boxes: Sequence[Tensor], pause: Callable[[], bool]) -> Share:
        """In a copy of the process that holds the frontier: go on with boxes, given as ``lower, upper, owner`` are."""
        self.lower, self.upper, self.owner = boxes
        self.margin = torch.full_like(self.margin, torch.inf)
        known, counted = set(self.outcomes), list(self.boxes)
        self._go_on(pause)
        more = [now - before for now, before in zip(self.boxes, counted, strict=True)]
        outcomes = {local: outcome for local, outcome in self.outcomes.items() if local not in known}
        return Share(self.lower, self.upper, self.owner, self.margin, more, outcomes)

    def take(self, share: Share) -> None:
        """Take note of what has become of boxes elsewhere, but for those that are left."""
        self.margin = torch.minimum(self.margin, share.margin)
        self.boxes = [mine + more for mine, more in zip(self.boxes, share.boxes, strict=True)]
        for local, outcome in share.outcomes.items():
            self._decide(local, outcome)

    def step(self) -> None:
        """Bound one batch of sub-boxes from the end of the frontier, and put what is left back, halved.

        No query is *unsat* by this alone: other processes may have boxes of it.
        """
        cut = max(0, len(self.owner) - self.batch)
        lower, upper, owner = self.lower[cut:], self.upper[cut:], self.owner[cut:]
        self.lower, self.upper, self.owner = self.lower[:cut], self.upper[:cut], self.owner[:cut]
        hard = []
        for local, count in enumerate(self._counts(owner)):
            before, self.boxes[local] = self.boxes[local], self.boxes[local] + count
            if before <= self.options.easy < self.boxes[local]:
                hard.append(local)
        self._steps += 1
        try:
            self._search(hard)
            self._bound(lower, upper, owner)
        except OutOfTime:
            # These boxes are not in the frontier any more, and nothing is known of them.
            for local in owner.unique().tolist():
                detail = f"the budget ran out in {self.boxes[local]} boxes"
                self._decide(local, Outcome.unknown(Reason.TIMEOUT, self.options.name, detail))
        self._charge(owner)
        self._drop()

    def _bound(self, lower: Tensor, upper: Tensor, owner: Tensor) -> None:
        """Drop of these boxes those that are proved, and put the others back, clipped and halved.

        Raises:
            OutOfTime: if the time of their queries ends meanwhile; then none was put back.
        """
        rows = self.rows.take(owner)
        shape = (len(owner), *self.network.input_shape)
        box = Bounds(lower.reshape(shape), upper.reshape(shape))
        start, allowance = self.budget.clock(), self.budget.subset(owner.unique().tolist()).total()
        stop = deadline(lambda: self.budget.clock() - start, allowance)
        lines = self.lines(box, rows, owner, stop)
        margins = lines.rows.margins(lines.values)

        proved = margins > 0
        self._known(owner, torch.where(proved, margins, torch.inf))
        open_ = (~proved).nonzero().squeeze(1)
        if not len(open_):
            return
        direction = torch.zeros_like(lower).index_add_(0, lines.rows.sample, lines.coefficients)
        self._charge(owner)
        self._look_for_witness(lower[open_], upper[open_], owner[open_], direction[open_], rows, open_)
        if self._steps % self.options.attacks == 0:
            worst = open_[margins[open_].argsort(stable=True)[: self._attack.most]]
            mine = self.rows.take(owner[worst])
            for number, point in self._attack.boxes(lower[worst], upper[worst], mine, stop):
                self._claim(int(owner[worst[number]]), point)
        clipped = self.clipped(Bounds(lower, upper), lines)
        self._known(owner, clipped.margin)
        left = open_[~clipped.empty[open_]]
        # The boxes at the end of the frontier are the next: those that are furthest from being proved.
        left = left[margins[left].argsort(descending=True, stable=True)]
        self.halve(clipped.box.lower[left], clipped.box.upper[left], owner[left], lines.influence[left])

    def lines(self, box: Bounds, rows: RowBatch, owner: Tensor, stop: Callable[[], bool]) -> Lines:
        """Linear lower bounds of the rows over boxes that belong to these queries.

        Args:
            box: (batch, *input_shape).
            rows: those of the boxes' properties, as a batch.
            owner: (batch,) the query of each box.
            stop: asked now and then.
        """
        forms = Zonotopes(self.network, box, self.options.symbols, stop) if self.by_zonotopes else None
        relaxation = crown_relaxation(
            self.network,
            box,
            known=None if forms is None else forms.pre,
            crown=forms is None,
            memory=self.memory,
            stop=stop,
            max_unstable=self.options.most,
        )
        values, coefficients = self._lower(rows, relaxation, forms, len(owner), stop)

        def affine(part: Tensor) -> tuple[Tensor, Tensor]:
            sample = rows.sample[part]
            if forms is not None:
                center, reach = forms.along(rows.matrix[part], sample)
                return center - rows.bound[part], reach
            reach = coefficients[part] * half[sample]
            return values[part] + reach.abs().sum(1), reach

        half = (box.upper - box.lower).flatten(1) / 2
        more = sums(rows, values, affine)
        if more is not None:
            found = self._lower(more, relaxation, forms, len(owner), stop)
            rows = rows.and_sums(more)
            values, coefficients = torch.cat([values, found[0]]), torch.cat([coefficients, found[1]])
        return Lines(rows, values, coefficients, self.influence(box, rows, coefficients, forms))

    def _lower(
        self, rows: RowBatch, relaxation: Relaxation, forms: Zonotopes | None, boxes: int, stop: Callable[[], bool]
    ) -> tuple[Tensor, Tensor]:
        """Lower bounds (rows,) of the rows' values and the coefficients (rows, inputs) of linear lower bounds."""
        last = len(self.network.nodes) - 1
        matrix = rows.matrix.reshape(-1, *self.network.output_shape)
        values, coefficients = matrix.new_empty(len(matrix)), matrix.new_empty(len(matrix), self.network.input_size)
        size = chunk_size(self.network, matrix, self.memory, TUNING)
        for part, mine in groups(len(matrix), rows.sample, size, boxes):
            stop()
            values[part], reached = relaxation.lower(last, matrix[part], mine, coefficients=True)
            assert reached is not None
            coefficients[part] = relaxation.of_input(reached)
        if forms is not None:
            others, slopes = forms.lower(rows.matrix, rows.sample)
            better = others > values
            values = torch.where(better, others, values)
            coefficients = torch.where(better[:, None], slopes, coefficients)
        return torch.nextafter(values - rows.bound, values.new_full((), -torch.inf)), coefficients

    def influence(self, box: Bounds, rows: RowBatch, coefficients: Tensor, forms: Zonotopes | None) -> Tensor:
        """What halving an input is worth per unit of its width, by its part in the width of the rows."""
        flat = box.flat()
        if forms is None:
            return torch.zeros_like(flat.lower).index_add_(0, rows.sample, coefficients.abs())
        widths = torch.zeros_like(flat.lower).index_add_(0, rows.sample, forms.influence(rows.matrix, rows.sample))
        return torch.where(flat.upper > flat.lower, widths / (flat.upper - flat.lower), 0.0)

    def clipped(self, box: Bounds, lines: Lines) -> Clipped:
        """What is left of boxes (batch, inputs)."""
        return clip(box, lines.rows, lines.values, lines.coefficients, input_error(self.network, lines.values.dtype))

    def _known(self, owner: Tensor, margin: Tensor) -> None:
        """Take notice of the margins of parts of the queries' boxes that are proved; infinite where no part is."""
        self.margin.scatter_reduce_(0, owner, margin, "amin")

    def _look_for_witness(
        self, lower: Tensor, upper: Tensor, owner: Tensor, direction: Tensor, rows: RowBatch, chosen: Tensor
    ) -> None:
        points = torch.stack([torch.where(direction >= 0, lower, upper), lower + (upper - lower) / 2])
        y = self.network(points.reshape(-1, *self.network.input_shape)).flatten(1).reshape(2, len(owner), -1)
        part = rows.take(chosen)
        margins = part.margins((y[:, part.sample] * part.matrix).sum(-1) - part.bound)
        for which, index in (margins <= 0).nonzero().tolist():
            self._claim(int(owner[index]), points[which, index])

    def _search(self, members: Sequence[int]) -> None:
        """Look for a counterexample in the whole box of each of these queries."""
        if members:
            start, allowance = self.budget.clock(), self.budget.subset(list(members)).total()
            stop = deadline(lambda: self.budget.clock() - start, allowance)
            for number, point in self._attack.wholes([self.queries[local].property for local in members], stop):
                self._claim(members[number], point)

    def _claim(self, local: int, point: Tensor) -> None:
        """Decide a query by a point, if that is a counterexample."""
        if local not in self.outcomes:
            query = self.queries[local]
            found = claim(query.network, query.property, point.double().cpu().numpy(), self.options.name, {})
            if found is not None:
                self._decide(local, found)

    def halve(self, lower: Tensor, upper: Tensor, owner: Tensor, influence: Tensor) -> None:
        """Put the boxes back, each cut along its most influential inputs: several while the frontier is small."""
        for _ in range(max(1, (min(self.batch, _WIDE) // (2 * max(1, len(owner)))).bit_length())):
            width = upper - lower
            score = torch.where(width > 0, influence * width + 1e-9 * width, -1.0)
            best, dimension = score.max(1)
            stuck = best <= 0
            for local in owner[stuck].unique().tolist():
                detail = "a box of one point is neither proved nor violated in float64"
                self._decide(local, Outcome.unknown(Reason.INCOMPLETE, self.options.name, detail))
            lower, upper, owner, influence = lower[~stuck], upper[~stuck], owner[~stuck], influence[~stuck]
            dimension = dimension[~stuck, None]
            middle = (lower + (upper - lower) / 2).gather(1, dimension)
            lower = torch.cat([lower, lower.scatter(1, dimension, middle)])
            upper = torch.cat([upper.scatter(1, dimension, middle), upper])
            owner, influence = owner.repeat(2), influence.repeat(2, 1)
        self._put(lower, upper, owner)

    def _put(self, lower: Tensor, upper: Tensor, owner: Tensor) -> None:
        """Put boxes behind those of the frontier."""
        self.lower = torch.cat([self.lower, lower])
        self.upper = torch.cat([self.upper, upper])
        self.owner = torch.cat([self.owner, owner])

    def _counts(self, owner: Tensor) -> list[int]:
        """How many boxes each query has among those with these owners."""
        counts: list[int] = torch.bincount(owner, minlength=len(self.queries)).tolist()
        return counts

    def _charge(self, worked: Tensor) -> None:
        """Charge the time since the last charge to the queries that own these boxes, by their share of them."""
        now = self.budget.clock()
        elapsed, self._charged = now - self._charged, now
        for local, count in enumerate(self._counts(worked)):
            if count:
                self.budget.charge([local], elapsed * count / len(worked))
                self.seconds[local] += elapsed * count / len(worked)

    def settle(self) -> None:
        """Close the queries that are through, of which no box is left anywhere, or out of time."""
        left = self._counts(self.owner)
        for local in self.undecided():
            if not left[local]:
                margin = float(self.margin[local])
                trust = Trust.ROUNDED if covers(self.network, torch.float64, self.options.device) else Trust.FLOAT
                self._decide(local, Outcome(Verdict.UNSAT, Reason.PROVED, "split", trust, margin))
            elif self.budget.remaining(local) <= 0:
                detail = f"the budget ran out after {self.boxes[local]} boxes, {left[local]} were left"
                self._decide(local, Outcome.unknown(Reason.TIMEOUT, self.options.name, detail))
        self._drop()

    def _drop(self) -> None:
        """Drop the boxes of queries that are decided."""
        closed = torch.tensor([i in self.outcomes for i in range(len(self.queries))], device=self.owner.device)
        keep = ~closed[self.owner]
        self.lower, self.upper, self.owner = self.lower[keep], self.upper[keep], self.owner[keep]

    def _decide(self, local: int, outcome: Outcome) -> None:
        if local in self.outcomes:
            return
        detail = outcome.detail or f"{self.boxes[local]} boxes"
        seconds = {self.options.name: self.seconds[local]}
        self.outcomes[local] = Outcome(
            outcome.verdict,
            outcome.reason,
            self.options.name,
            outcome.trust,
            outcome.margin,
            outcome.witness,
            detail,
            seconds,
            subproblems=self.boxes[local],
        )
        self._new.append(local)
