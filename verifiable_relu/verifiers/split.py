"""``split``: branch and bound on the input box, complete in the limit, and quick where few inputs vary.

The search holds sub-boxes of *all* queries of a network. Every step bounds a full batch of them (``boxes``), drops
those that are proved, tries points of the others as counterexamples, clips them, and halves them.

**Bounds.** Networks of ReLUs with few inputs that vary are bounded by zonotopes (``bounds.zonotope``), which cost a
fraction of CROWN's bounds of all neurons; rows of the output then go back by CROWN over these. CROWN alone bounds other
networks, and those where zonotopes take more than the memory or leave far more neurons unstable than CROWN has, since
not every neuron has a symbol. There, bounds over a box hold for its parts: only neurons that are unstable in the larger
box are bounded again. Where a box has many of these, few boxes are bounded at once, so that the search goes deep first.

**The input that is halved** has the largest part in the width of the output's rows: directly, and by way of every
unstable ReLU's contribution, of which each input has a share (``Zonotopes.influence``). Without zonotopes that is
|A_i|·width_i, A being the coefficients of the linear lower bounds (Wang et al., Formal Security Analysis of Neural
Networks using Symbolic Intervals, arXiv 1804.10829, section 4.3).

**Counterexamples.** The corner of every open box where its linear bounds are least, and its centre, are tried; now and
then the boxes that are furthest from being proved are attacked, and a query that takes many boxes as a whole, once.

**Certificates** (``trust.certificate.Cover``). A box is proven by its zonotope alone, of which nothing needs to be
written but which row of each polytope is positive; or, where zonotopes do not apply, by CROWN's bounds of its neurons,
which are written; bounds over a larger box are then not used, since a box's proof is its own. Nothing is cut off: what
halving leaves covers the query's box.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from verifiable_relu.bounds import Bounds, input_box
from verifiable_relu.bounds.forward import rough
from verifiable_relu.bounds.rounding import covers
from verifiable_relu.errors import OutOfTime
from verifiable_relu.network.nodes import STEPS, Activation
from verifiable_relu.network.simplify import without_repeated
from verifiable_relu.rounding import varies
from verifiable_relu.settings import neutral
from verifiable_relu.spec.row_batch import RowBatch
from verifiable_relu.supervisor.forks import most_shares, run_shares
from verifiable_relu.supervisor.workers import processor_seconds
from verifiable_relu.verifiers.attack import Descent, Pgd, claim
from verifiable_relu.verifiers.base import Outcome, Reason, TimeBudget, Trust, Verdict, batch_size, fault
from verifiable_relu.verifiers.batch import QueryBatch
from verifiable_relu.verifiers.boxes import KnownBounds, RowBounder, SubBoxes, clip, input_error
from verifiable_relu.verifiers.recording import EVERY_NEURON, CoverRecorder, uncertified

_TIE = 1e-9
"""Heuristic: the score of an input's width where none has an influence."""

_ATTACKED, _TRIED = 1 << 13, 1 << 23
"""SubBoxes times neurons of what is attacked at once, and points times neurons of what is tried at once."""

_EVERY = 1 << 16
"""The most points of a box all of which are tried."""

_SHORT = 0.2
"""Seconds: where one process had no boxes left so soon, copies are not made again at once."""

_WIDE = 128
"""Fewer boxes than this are cut several times at once, so that the next batch is a large one."""


@dataclass(frozen=True)
class InputSplit:
    """Branch and bound on the input box. Of memory, the boxes that wait are not counted.

    Attributes:
        batch: most sub-boxes bounded at once.
        most: layers with more unstable neurons in a box are not bounded by CROWN there.
        symbols: how many unstable neurons of a layer have a noise symbol of their own in a zonotope.
        attacks: boxes are attacked each time this number of steps is done.
        pgd: how they are attacked.
        easy: a query that is not through after this number of boxes is attacked as a whole.
        search: how it is attacked.
        alone: the seconds that one process searches alone before others share the boxes.
        record: whether to keep what proves *unsat*, for a certificate, where certificates know the network.
    """

    batch: int = 256
    most: int = 512
    symbols: int = 256
    attacks: int = 4
    pgd: Pgd = Pgd(steps=10, starts=8)  # noqa: RUF009 -- frozen
    easy: int = 512
    search: Pgd = Pgd(rounds=3, more=128, screened=16384)  # noqa: RUF009 -- frozen
    alone: float = field(default=0.5, repr=False)
    record: bool = field(default=False, repr=False)

    name: ClassVar[str] = "split"

    def claims(self, batch: QueryBatch) -> Iterator[tuple[int, Outcome]]:
        """As ``Verifier.claims``."""
        done = 0
        for part in batch.batches(lambda network, budget: len(batch.queries)):
            with neutral(), torch.no_grad():
                search = BoxSearch(self, part)
            while len(search.now.open):
                try:
                    with neutral(), torch.no_grad():
                        search.advance()
                    batch.budget.report_progress({"sub-problems": sum(search.now.bounded)})
                except Exception as error:
                    search.give_up(fault(error, self.name))
                for local in search.decided():
                    yield search.numbers[local], search.now.outcomes[local]
                    done += 1
                batch.stage(self.name, done, len(batch.queries))


@dataclass(eq=False)
class BoxProgress:
    """The state of a search, or of the part of it that a copy of the process has.

    The margin (queries,) is the least proven one of the boxes that are not open any more, else infinity.
    ``bounded`` counts the boxes of each query that have been bounded.
    """

    open: SubBoxes
    margin: Tensor
    bounded: list[int]
    outcomes: dict[int, Outcome] = field(default_factory=dict)


class BoxSearch:
    """The search for the queries of one network, with their ``numbers`` in the batch and its state ``now``."""

    def __init__(self, options: InputSplit, batch: QueryBatch) -> None:
        network, device = batch.network, batch.budget.device
        self._options, self._batch, self._budget = options, batch, batch.budget
        self.numbers, self._queries = list(batch.queries), list(batch.queries.values())
        self._charged = self._budget.clock(), processor_seconds()
        record = options.record and not uncertified(network)
        # The network of the file is what the certificate speaks of.
        simplified = network if record else without_repeated(network)
        self.network = simplified.to(torch.float64, device)
        box = input_box([q.property for q in self._queries], network, torch.float64, device).flat()
        lower, upper = box.lower, box.upper
        self._counted = torch.zeros(lower.shape[1], dtype=torch.bool, device=device)
        for function, places in self.network.counted.items():
            self._counted[places] = True
            lower, upper = (end.index_copy(1, places, STEPS[function].value(end[:, places])) for end in (lower, upper))
        moving = varies(lower, upper).any(0)
        # Of whole numbers alone, points are bounded for less than neurons of boxes.
        self._points = bool((self._counted | ~moving).all())
        self._processes = most_shares(self._budget.processes) if device == "cpu" else 1
        # In each process, half for the boxes, half for the rows that are bounded.
        memory = self._budget.memory // (2 * self._processes)
        most, neurons = batch_size(self.network, options.batch, memory), sum(node.size for node in self.network.nodes)
        self._rough, self._generator = rough(self.network, device), torch.Generator().manual_seed(options.pgd.seed)
        self._attacked, self._tried = max(1, _ATTACKED // neurons), max(1, _TRIED // neurons)
        self._recorder = CoverRecorder(self.network, self._queries, options.most, memory) if record else None
        most, symbols = min(most, self._tried) if self._points else most, EVERY_NEURON if record else options.symbols
        limits = (symbols, options.most, most, memory)
        self._bounder = RowBounder(self.network, int(moving.sum()), *limits, self._counted, self._points)
        self._rows = RowBatch.from_properties([q.property for q in self._queries], network.output_size).to(lower)
        owner = torch.arange(len(self._queries), device=lower.device)
        size = sum(2 * node.size * 8 for node in self.network.nodes if isinstance(node, Activation))
        self._known, within = KnownBounds(memory // max(1, size)), torch.full_like(owner, -1)
        same = torch.equal(lower, box.lower) and torch.equal(upper, box.upper)
        if same and not record and not self._points and simplified is network:
            known = batch.bounds_cache.known(self.numbers, self.network, box.lower)
            if known is not None and known.bounded:
                within = self._known.keep(known.pre, owner, within)
        nothing = lower.new_full((len(self._queries),), torch.inf)
        self.now = BoxProgress(SubBoxes(lower, upper, owner, within), nothing, [0] * len(self._queries))
        self._steps, self._seconds = 0, [0.0] * len(self._queries)
        self._new: list[int] = []
        self._alone = time.perf_counter() + options.alone
        self._charge(owner)

    def decided(self) -> list[int]:
        """Return the queries decided since the last call."""
        new, self._new = self._new, []
        return new

    def give_up(self, outcome: Outcome) -> None:
        """Close all queries that are not decided."""
        for local in self._undecided():
            self.now.outcomes[local] = outcome
            self._new.append(local)
        self._drop()

    def advance(self) -> None:
        """Go on by a step, or in several processes; then close the queries that are through or out of time."""
        shared = self._processes > 1 and len(self.now.open) >= self._processes * self._bounder.batch
        if shared and time.perf_counter() > self._alone:
            self._share()
        else:
            self._step()
        left = self._counts(self.now.open.owner)
        for local in self._undecided():
            if not left[local]:
                trust = Trust.ROUNDED if covers(self.network, torch.float64, self._budget.device) else Trust.FLOAT
                proof = None if self._recorder is None else self._recorder.proof(local)
                proved = Outcome(Verdict.UNSAT, Reason.PROVED, "split", trust, float(self.now.margin[local]))
                self._decide(local, replace(proved, proof=proof))
            elif self._left([local]) <= 0:
                detail = f"the budget ran out after {self.now.bounded[local]} boxes, {left[local]} were left"
                self._decide(local, Outcome.unknown(Reason.TIMEOUT, self._options.name, detail))
        self._drop()

    def _undecided(self) -> list[int]:
        return [i for i in range(len(self._queries)) if i not in self.now.outcomes]

    def _left(self, members: Sequence[int]) -> float:
        return self._batch.left([self.numbers[local] for local in members])

    def _work(self, members: Sequence[int]) -> TimeBudget:
        return self._budget.begun(self._left(members))

    def _share(self) -> None:
        """Go on with all boxes in several processes, until one of these has none left."""
        count, every = self._processes, self.now.open
        hands = [every[torch.arange(number, len(every), count)] for number in range(count)]
        self.now.open, began = hands[0], time.perf_counter()
        shares: list[Callable[[Callable[[], bool]], Any]] = [self._go_on]
        shares += [partial(self.go_on_elsewhere, hand) for hand in hands[1:]]
        found = run_shares(shares, self._work(self._undecided()).left)[1:]
        for hand, share in zip(hands[1:], found, strict=True):
            if share is None:
                # Nothing is known of what was dealt to a process that failed.
                self._processes, left = 1, hand
            else:
                part, proven = share
                left = part.open
                self.now.margin = torch.minimum(self.now.margin, part.margin)
                self.now.bounded = [mine + more for mine, more in zip(self.now.bounded, part.bounded, strict=True)]
                for mine, more in zip(self._recorder.proven if self._recorder else (), proven, strict=True):
                    mine += more
                for local, outcome in part.outcomes.items():
                    self._decide(local, outcome)
            # Bounds that a copy has come to know stay there, and numbers stand for something else by now.
            self._put(replace(left, within=torch.full_like(left.owner, -1)))
        now = time.perf_counter()
        self._alone = now + self._options.alone if now - began < _SHORT else now

    def _go_on(self, pause: Callable[[], bool]) -> None:
        # A query that is out of time is closed, and its boxes dropped, by ``advance``: not here.
        while len(self.now.open) and all(self._left([i]) > 0 for i in self.now.open.owner.unique().tolist()):
            self._step()
            if pause():
                break

    def go_on_elsewhere(self, boxes: SubBoxes, pause: Callable[[], bool]) -> tuple[BoxProgress, list[list[Any]]]:
        """Go on with some boxes in a copy of the process that has all; returns the progress made, and proofs."""
        before, margin = self.now, torch.full_like(self.now.margin, torch.inf)
        self.now = BoxProgress(boxes, margin, list(before.bounded), dict(before.outcomes))
        if self._recorder is not None:
            self._recorder.proven = [[] for _ in self._queries]
        self._go_on(pause)
        more = [now - then for now, then in zip(self.now.bounded, before.bounded, strict=True)]
        new = {local: found for local, found in self.now.outcomes.items() if local not in before.outcomes}
        proven = [] if self._recorder is None else self._recorder.proven
        return BoxProgress(self.now.open, self.now.margin, more, new), proven

    def _step(self) -> None:
        """Bound one batch of the last boxes, and put what is left back, halved.

        No query is *unsat* by this alone: other processes may have boxes of it.
        """
        cut = max(0, len(self.now.open) - self._bounder.batch)
        boxes, self.now.open = self.now.open[cut:], self.now.open[:cut]
        hard = []
        for local, count in enumerate(self._counts(boxes.owner)):
            before, self.now.bounded[local] = self.now.bounded[local], self.now.bounded[local] + count
            if before <= self._options.easy < self.now.bounded[local]:
                hard.append(local)
        self._steps += 1
        try:
            if self._steps == 1 and self._points:
                self._try_all(boxes)
            if hard:
                properties, stop = [self._queries[local].property for local in hard], self._work(hard).stop
                found = self._options.search.search(self.network, properties, stop, self._budget.device)
                self._claim(torch.tensor(hard), *found)
            self._bound(boxes)
        except OutOfTime:
            # These boxes are not open any more, and nothing is known of them.
            for local in boxes.owner.unique().tolist():
                detail = f"the budget ran out in {self.now.bounded[local]} boxes"
                self._decide(local, Outcome.unknown(Reason.TIMEOUT, self._options.name, detail))
        self._charge(boxes.owner)
        self._drop()

    def _bound(self, boxes: SubBoxes) -> None:
        """Drop of these boxes those that are proved, and put the others back, clipped and halved.

        Raises:
            OutOfTime: if the time of their queries ends meanwhile; then none was put back.
        """
        owner, rows = boxes.owner, self._rows.take(boxes.owner)
        box = Bounds(*(end.reshape(-1, *self.network.input_shape) for end in (boxes.lower, boxes.upper)))
        stop = self._work(owner.unique().tolist()).stop
        if self._recorder is not None:
            found = self._recorder.bound(box, rows, owner, self._bounder.by_zonotopes, stop)
        else:
            found = self._bounder.bound(box, rows, self._known.over(boxes.within), stop, self._steps == 1)
        margins = found.rows.margins(found.values)
        proved = margins > 0
        self._note(owner, torch.where(proved, margins, torch.inf))
        open_ = (~proved).nonzero().squeeze(1)
        if not len(open_):
            return
        direction = torch.zeros_like(boxes.lower).index_add_(0, found.rows.sample, found.coefficients)
        self._charge(owner)
        self._try_points(boxes[open_], direction[open_], rows.take(open_))
        if self._steps % self._options.attacks == 0 and not self._points:
            worst, (net, dtype) = boxes[open_[margins[open_].argsort(stable=True)[: self._attacked]]], self._rough
            low, high, mine = worst.lower.to(dtype), worst.upper.to(dtype), self._rows.take(worst.owner)
            descent = Descent(self._options.pgd, net, low, high, mine.to(low), stop)
            self._claim(worst.owner, *descent.of_margins(descent.anywhere(self._generator)))
        left = open_
        if self._recorder is None:
            share = input_error(self.network, found.values.dtype)
            clipped = clip(Bounds(boxes.lower, boxes.upper), found.rows, found.values, found.coefficients, share)
            self._note(owner, clipped.margin)
            boxes, left = replace(boxes, lower=clipped.box.lower, upper=clipped.box.upper), left[~clipped.empty[left]]
        # The last boxes are the next: those that are furthest from being proved.
        left = left[margins[left].argsort(descending=True, stable=True)]
        within = self._known.keep(found.pre, left, self.now.open.within)
        self._halve(replace(boxes[left], within=within), found.influence[left])

    def _note(self, owner: Tensor, margin: Tensor) -> None:
        """Take note of the margins of parts of boxes that are proved; infinite where no part is."""
        self.now.margin.scatter_reduce_(0, owner, margin, "amin")

    def _try_points(self, boxes: SubBoxes, direction: Tensor, rows: RowBatch) -> None:
        """Try of each box the corner against a direction (boxes, inputs), and the centre."""
        lower, upper = boxes.lower, boxes.upper
        points = torch.stack([torch.where(direction >= 0, lower, upper), lower + (upper - lower) / 2])
        y = self.network(points.reshape(-1, *self.network.input_shape)).flatten(1).reshape(2, len(boxes), -1)
        margins = rows.margins((y[:, rows.sample] * rows.matrix).sum(-1) - rows.bound)
        self._claim(boxes.owner.repeat(2), points.flatten(0, 1), margins.flatten())

    def _try_all(self, boxes: SubBoxes) -> None:
        """Try every point of boxes in which whole numbers alone count, where these are not too many."""
        for low, high, local in zip(boxes.lower, boxes.upper, boxes.owner.tolist(), strict=True):
            places = ((low < high) & self._counted).nonzero().squeeze(1).tolist()
            sizes = [int(size) + 1 for size in (high - low)[places].tolist()]
            owner = boxes.owner.new_tensor([local])
            stop, count, rows = self._work([local]).stop, math.prod(sizes), self._rows.take(owner)
            for first in range(0, count if count <= _EVERY else 0, self._tried):
                if local in self.now.outcomes or stop():
                    break
                number = torch.arange(first, min(count, first + self._tried), device=low.device)
                points = low.repeat(len(number), 1)
                for place, size in zip(places, sizes, strict=True):
                    points[:, place] += number % size
                    number = number // size
                y = self._rough[0](points.to(self._rough[1]).reshape(-1, *self.network.input_shape)).flatten(1)
                margins = rows.margins(y.to(points) @ rows.matrix.T - rows.bound)[:, 0]
                least = margins.argmin(keepdim=True)
                self._claim(owner, points[least], margins[least])

    def _claim(self, owner: Tensor, points: Tensor, margins: Tensor) -> None:
        """Decide queries ``owner`` by points (count, inputs) whose margins (count,) seem not to be positive."""
        for number in (margins <= 0).nonzero().squeeze(1).tolist():
            local = int(owner[number])
            if local not in self.now.outcomes:
                query, point = self._queries[local], points[number].double().cpu().numpy()
                found = claim(query.network, query.property, point, self._options.name)
                if found is not None:
                    self._decide(local, found)

    def _halve(self, boxes: SubBoxes, influence: Tensor) -> None:
        """Put boxes back, each cut along its most influential inputs: several where there are few boxes."""
        lower, upper = boxes.lower, boxes.upper
        lower, upper = torch.where(self._counted, lower.ceil(), lower), torch.where(self._counted, upper.floor(), upper)
        some = (lower <= upper).all(1)
        boxes, influence = replace(boxes, lower=lower, upper=upper)[some], influence[some]
        few = min(self._bounder.batch, _WIDE)
        for number in range(max(1, (few // (2 * max(1, len(boxes)))).bit_length())):
            width = boxes.upper - boxes.lower
            score = influence * width + _TIE * width
            # Lines hardly tell what whole numbers are worth, of which there are few: they go first.
            score = torch.where(self._counted, score + score.amax(1, keepdim=True), score)
            # Ends that were rounded outward may differ where an input has one value.
            score = torch.where((width > 0) & (self._counted | (not self._points)), score, -1.0)
            best, dimension = score.max(1)
            stuck = best <= 0
            if number:
                # Points that were cut off just now have not been bounded yet.
                self._put(boxes[stuck])
            for local in () if number else boxes.owner[stuck].unique().tolist():
                detail = "a box of one point is neither proved nor violated in float64"
                self._decide(local, Outcome.unknown(Reason.INCOMPLETE, self._options.name, detail))
            boxes = boxes[~stuck].halves(dimension[~stuck], self._counted)
            influence = influence[~stuck].repeat(2, 1)
        self._put(boxes)

    def _put(self, boxes: SubBoxes) -> None:
        self.now.open = SubBoxes.cat([self.now.open, boxes])

    def _counts(self, owner: Tensor) -> list[int]:
        counts: list[int] = torch.bincount(owner, minlength=len(self._queries)).tolist()
        return counts

    def _charge(self, worked: Tensor) -> None:
        """Charge the time since the last charge to the queries that own these boxes, by their share of them."""
        before, self._charged = self._charged, (self._budget.clock(), processor_seconds())
        elapsed, used = (now - then for now, then in zip(self._charged, before, strict=True))
        for local, count in enumerate(self._counts(worked)):
            if count:
                share = count / len(worked)
                self._batch.charge([self.numbers[local]], elapsed * share, used * share)
                self._seconds[local] += elapsed * share

    def _drop(self) -> None:
        closed = torch.tensor([i in self.now.outcomes for i in range(len(self._queries))], device=self._counted.device)
        gone = closed[self.now.open.owner]
        if bool(gone.any()):
            self.now.open = self.now.open[~gone]

    def _decide(self, local: int, outcome: Outcome) -> None:
        if local not in self.now.outcomes:
            boxes, seconds = self.now.bounded[local], {self._options.name: self._seconds[local]}
            known: dict[str, Any] = {
                "detail": outcome.detail or f"{boxes} boxes",
                "seconds": seconds,
                "subproblems": boxes,
            }
            self.now.outcomes[local] = replace(outcome, method=self._options.name, **known)
            self._new.append(local)
