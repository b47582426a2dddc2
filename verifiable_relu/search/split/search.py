"""``split``: branch and bound on the input box, complete in the limit, and quick where few inputs vary.

Every step takes the last boxes of all queries of a network from a stack, bounds them, tries points of them as
counterexamples, clips them, drops those that are proved, and puts the others back, halved. It reads from the device
once: how many boxes are left of each query, and whether something needs attention. All else is done with tensors of
known sizes.

**The input that is halved** has the largest part in the width of the output's rows. With zonotopes, that is directly,
and by way of every unstable neuron's contribution, in which each input has a share. With CROWN it is |A_i|·width_i, A
being the coefficients of the linear lower bounds (Wang et al., Formal Security Analysis of Neural Networks using
Symbolic Intervals, arXiv 1804.10829, section 4.3).

**Counterexamples.** The corner of every box where its linear bounds are least, and its centre, are tried. Now and then
the boxes that are furthest from being proved are attacked, and a query that takes many boxes as a whole, once.
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

from verifiable_relu.bounds.precision import is_covered
from verifiable_relu.errors import OutOfTime, counted
from verifiable_relu.ir.interval import Interval
from verifiable_relu.ir.network import Network
from verifiable_relu.ir.transform import without_repeated
from verifiable_relu.rounding import varies
from verifiable_relu.search.attack import Descent, Pgd, search_dtype
from verifiable_relu.search.batch import QueryBatch, RootBounds
from verifiable_relu.search.outcomes import Outcome, Reason, Trust, Verdict, claim, fault
from verifiable_relu.search.property_rows import PropertyRows, input_box
from verifiable_relu.search.records import Stack
from verifiable_relu.search.split.bounding import (
    NO_BOUNDS,
    BoxBounder,
    BoxesBounded,
    BoxesHalved,
    Event,
    KnownBounds,
    Observer,
    SubBoxes,
    bound_rows,
    clip,
    clipping_rows,
    coefficient_error,
)
from verifiable_relu.settings import default_settings
from verifiable_relu.supervisor.forks import most_shares, run_shares
from verifiable_relu.supervisor.workers import processor_seconds

_TIE = 1e-9  # Heuristic: the score of an input's width where none has an influence
_ATTACKED, _TRIED = 1 << 13, 1 << 23  # Neurons times the boxes that are attacked, or points that are tried, at once
_EVERY = 1 << 16  # Points of a box up to which all are tried
_SHORT = 0.2  # Seconds: where one process had no boxes left so soon, copies are not made again at once
_WIDE = 128  # Fewer boxes than this are cut several times at once, so that the next batch is a large one
# Sums of rows are bounded in every such step, in as many at first, and in as many after one in which they proved a box
_SUMS_EVERY = 8

Points = tuple[Tensor, Tensor, Tensor]
"""Queries (count,), points (count, inputs), and their margins (count,)."""


@dataclass(frozen=True)
class InputSplit:
    """``split``: branch and bound on the input box. Waiting boxes do not count towards the memory limit."""

    batch: int | None = None  # Most sub-boxes bounded at once; by default as many as suit the device
    max_unstable: int = 512  # Layers with more unstable neurons in a box are not bounded by CROWN there
    symbols: int = 256  # How many unstable neurons of a layer have a noise symbol of their own in a zonotope
    attack_every: int = 4  # Boxes are attacked each time this number of steps is done
    box_attack: Pgd = Pgd(steps=10, starts=8)  # noqa: RUF009 -- frozen
    attack_after_boxes: int = 512  # A query that is not through after this number of boxes is attacked as a whole
    query_attack: Pgd = Pgd(rounds=3, later_starts=128, screened_points=16384)  # noqa: RUF009 -- frozen
    share_after_s: float = field(default=0.5, repr=False)  # One process searches alone before others share the boxes

    name: ClassVar[str] = "split"

    def claims(self, batch: QueryBatch) -> Iterator[tuple[int, Outcome]]:
        done = 0
        for part in batch.batches(lambda network, budget: len(batch.queries)):
            with default_settings(), torch.no_grad():
                network = without_repeated(part.network)
                # Bounds are known of the ops of the network that was asked about.
                device = torch.device(part.budget.device)
                known = part.bounds_cache.known(list(part.queries), device) if network is part.network else None
                search = BoxSearch(self, part, network, known)
            numbers, told = list(part.queries), set[int]()
            while len(search.now.frontier):
                try:
                    with default_settings(), torch.no_grad():
                        search.advance()
                    batch.budget.report_progress({"sub-problems": sum(search.now.bounded)})
                except Exception as error:
                    for local in search.undecided():
                        search.decide(local, fault(error, self.name))
                    search.drop()
                for local, outcome in search.now.outcomes.items():
                    if local not in told:
                        yield numbers[local], outcome
                        told.add(local)
                batch.stage(self.name, done + len(told), len(batch.queries))
            done += len(told)


@dataclass(eq=False)
class Progress:
    """Progress of a search, or of the part of it that a copied process has."""

    frontier: Stack[SubBoxes]  # The boxes that are open
    margin: Tensor  # (queries,) the least proven one of the boxes that are not open any more, else infinity
    open: list[int]  # For each query, how many boxes are open
    bounded: list[int]  # For each query, how many boxes have been bounded
    outcomes: dict[int, Outcome] = field(default_factory=dict)  # Of queries, in the order in which they are decided
    number: int = 0  # The next box's, under which events name it
    events: list[Event] = field(default_factory=list)  # Of a copy


class BoxSearch:
    """Search of the queries of one network, which are numbered from 0 here."""

    def __init__(self, options: InputSplit, batch: QueryBatch, network: Network, known: RootBounds | None) -> None:
        self._options, self._batch, self._budget, self._network = options, batch, batch.budget, network
        self._numbers, self._properties = list(batch.queries), batch.properties
        self._observer: Observer | None = None if batch.observer is None else partial(batch.observer, self._numbers)
        self._charged = self._budget.clock(), processor_seconds()
        device, count = torch.device(self._budget.device), len(self._numbers)
        box = input_box(self._properties, torch.float64, device)
        self._integer = torch.zeros(network.input_size, dtype=torch.bool, device=device)
        for places in network.integer_inputs.values():
            self._integer[places] = True
        moving = varies(box.lower, box.upper).any(0)
        self._points = bool(self._integer.any() and (self._integer | ~moving).all())
        self._processes = most_shares(self._budget.processes) if device.type == "cpu" else 1
        # In each process, half for the boxes, half for the rows that are bounded.
        memory, neurons = self._budget.memory // (2 * self._processes), sum(op.size for op in network.ops)
        self._attacked, self._tried = max(1, _ATTACKED // neurons), max(1, _TRIED // neurons)
        limits = (options.batch, memory, options.symbols, options.max_unstable)
        is_bounded = known is not None and known.reached == math.inf
        self.bounder = BoxBounder(network, moving.nonzero().squeeze(1), *limits, self._points, is_bounded)
        self._rows = PropertyRows.from_properties(self._properties, network.output_size, device)
        self._known, owner = KnownBounds(memory // (16 * neurons)), torch.arange(count, device=device)
        within = torch.full_like(owner, NO_BOUNDS)
        if known is not None and known.intervals and not self._points:
            within = self._known.keep(known.intervals)
        frontier = Stack(SubBoxes(box.lower, box.upper, owner, owner.clone(), within))
        nothing = box.lower.new_full((count,), torch.inf)
        self.now = Progress(frontier, nothing, [1] * count, [0] * count, number=count)
        self._steps, self._seconds, self._sums_until = 0, [0.0] * count, _SUMS_EVERY
        self._has_joint_rows = self._rows.members.shape[2] > 1
        self._generator = torch.Generator().manual_seed(options.box_attack.seed)
        self._rough, self._error = search_dtype(network), coefficient_error(network)
        self._trust = Trust.ROUNDED if is_covered(network, torch.float64, device) else Trust.FLOAT
        self._alone = time.perf_counter() + options.share_after_s
        self._charge(self.now.open)

    def advance(self) -> None:
        """Take a step, or go on in several processes; then decide the queries without open boxes or time."""
        shared = self._processes > 1 and len(self.now.frontier) >= self._processes * self.bounder.batch
        if shared and time.perf_counter() > self._alone:
            self._share()
        else:
            self._step()
        for local in self.undecided():
            if not (left := self.now.open[local]):
                margin = float(self.now.margin[local])
                self.decide(local, Outcome(Verdict.UNSAT, Reason.PROVED, self._options.name, self._trust, margin))
            elif self._left([local]) <= 0:
                self._time_out(local, f"after {counted(self.now.bounded[local], 'box')}, with {left} left")
        self.drop()

    def undecided(self) -> list[int]:
        return [i for i in range(len(self._numbers)) if i not in self.now.outcomes]

    def decide(self, local: int, outcome: Outcome) -> None:
        """Record the outcome of a query, unless it has one."""
        if local not in self.now.outcomes:
            boxes, name = self.now.bounded[local], self._options.name
            outcome = replace(outcome, method=name, detail=outcome.detail or counted(boxes, "box"))
            self.now.outcomes[local] = replace(outcome, seconds={name: self._seconds[local]}, subproblems=boxes)

    def drop(self) -> None:
        """Drop the boxes of queries that are decided."""
        gone = [local for local in self.now.outcomes if self.now.open[local]]
        if gone:
            every = self.now.frontier.rows
            closed = torch.zeros(len(self._numbers), dtype=torch.bool, device=every.owner.device)
            closed[gone] = True
            self.now.frontier = Stack(every[~closed[every.owner]])
            self.now.open = [0 if local in gone else left for local, left in enumerate(self.now.open)]

    def _time_out(self, local: int, where: str) -> None:
        detail = f"the time limit was reached {where}"
        self.decide(local, Outcome.unknown(Reason.TIMEOUT, self._options.name, detail))

    def _left(self, members: Sequence[int]) -> float:
        return self._batch.left([self._numbers[local] for local in members])

    def _stop(self, members: Sequence[int]) -> Callable[[], bool]:
        return self._budget.begun(self._left(members)).stop

    def _open_boxes(self) -> list[int]:
        owner = self.now.frontier.rows.owner
        found: list[int] = torch.bincount(owner, minlength=len(self._numbers)).tolist()
        return found

    def _share(self) -> None:
        """Search all boxes in several processes until one of these has none left."""
        began = time.perf_counter()
        self.now.frontier, *hands = self.now.frontier.deal(self._processes)
        self.now.open = self._open_boxes()
        shares: list[Callable[[Callable[[], bool]], Any]] = [self._go_on]
        shares += [partial(self._go_on_elsewhere, hand, place) for place, hand in enumerate(hands, start=1)]
        found = run_shares(shares, self._budget.begun(self._left(self.undecided())).left)[1:]
        for hand, part in zip(hands, found, strict=True):
            left = (hand if part is None else part.frontier).rows
            if part is None:
                # Nothing is known of what was dealt to a process that failed.
                self._processes = 1
            else:
                self.now.margin = torch.minimum(self.now.margin, part.margin)
                self.now.bounded = [mine + more for mine, more in zip(self.now.bounded, part.bounded, strict=True)]
                self.now.number = max(self.now.number, part.number)
                if self._observer is not None:
                    for event in part.events:
                        self._observer(event)
                for local, outcome in part.outcomes.items():
                    self.decide(local, outcome)
            # Bounds that a copy has come to know stay there, and numbers stand for something else by now.
            self.now.frontier.push(replace(left, within=torch.full_like(left.owner, NO_BOUNDS)))
        self.now.open = self._open_boxes()
        now = time.perf_counter()
        self._alone = now + self._options.share_after_s if now - began < _SHORT else now

    def _go_on(self, pause: Callable[[], bool]) -> None:
        # A query that is out of time is closed, and its boxes dropped, by ``advance``: not here.
        while len(self.now.frontier) and all(self._left([i]) > 0 for i, left in enumerate(self.now.open) if left):
            self._step()
            if pause():
                break

    def _go_on_elsewhere(self, boxes: Stack[SubBoxes], place: int, pause: Callable[[], bool]) -> Progress:
        """Search some boxes in a copy of the process; returns the progress made."""
        before, count = self.now, len(self._numbers)
        # Numbers of boxes are this copy's own.
        margin, number = torch.full_like(before.margin, torch.inf), before.number + (place << 40)
        self.now = Progress(boxes, margin, [], [0] * count, dict(before.outcomes), number)
        self.now.open = self._open_boxes()
        if self._observer is not None:
            self._observer = self.now.events.append
        self._go_on(pause)
        new = {local: found for local, found in self.now.outcomes.items() if local not in before.outcomes}
        return replace(self.now, outcomes=new)

    def _step(self) -> None:
        """Bound a batch of the last boxes, and push the halves of what remains.

        No query is *unsat* by this alone: other processes may have boxes of it.
        """
        boxes = self.now.frontier.pop(self.bounder.batch)
        stop = self._stop([local for local, left in enumerate(self.now.open) if left])
        self._steps += 1
        try:
            if self._steps == 1 and self._points:
                self._try_all(boxes)
            self._bound(boxes, stop)
        except OutOfTime:
            # These boxes are not open any more, and nothing is known of them.
            for local in boxes.owner.unique().tolist():
                self._time_out(local, f"in {counted(self.now.bounded[local], 'box')}")
        self.drop()

    def _bound(self, boxes: SubBoxes, stop: Callable[[], bool]) -> None:
        """Bound boxes, drop those that are proved, and push the halves of the others, clipped.

        Raises:
            OutOfTime: if the time of their queries ends meanwhile; then none was put back.
        """
        rows, count = self._rows.take(boxes.owner), len(self._numbers)
        box = Interval(boxes.lower, boxes.upper)
        bounds = self.bounder.over(box, self._known.over(boxes.within), stop)
        with_sums = self._has_joint_rows and (self._steps <= self._sums_until or not self._steps % _SUMS_EVERY)
        found = bound_rows(bounds, rows, with_sums)
        margins = found.rows.margins(found.values)
        proved = margins > 0
        clipped = clip(box, found.rows, found.values, found.coefficients, self._error)
        self.now.margin.scatter_reduce_(0, boxes.owner, torch.where(proved, margins, clipped.margin), "amin")
        rest = replace(boxes, lower=clipped.lower, upper=clipped.upper).whole(self._integer)
        left = ~(proved | clipped.empty | (rest.lower > rest.upper).any(1))
        stuck = left & (self._score(rest, found.influence).amax(1) <= 0)
        left = left & ~stuck
        tried = self._try_points(boxes, found.coefficients.sum(1), rows) + self._attack(boxes, margins, rows)
        # Boxes that are furthest from being proved come last, and are taken first.
        order = torch.where(left, -margins, -torch.inf).argsort(stable=True)
        by_query = torch.zeros(2, count, dtype=torch.long, device=left.device)
        by_query.index_add_(1, boxes.owner, torch.stack([torch.ones_like(left), left]).long())
        hits = torch.stack([(margin <= 0).any() for _, _, margin in tried]).any()
        seen = torch.stack([stuck.any().long(), hits.long(), found.helped])
        # The step's one look at what the device has found.
        summary: list[int] = torch.cat([seen, by_query.flatten(), bounds.counts]).tolist()
        (any_stuck, any_hit, helped), taken, kept = summary[:3], summary[3 : 3 + count], summary[3 + count :][:count]
        self.bounder.notice(summary[3 + 2 * count :], len(boxes))
        self._sums_until = self._steps + _SUMS_EVERY if helped else self._sums_until
        # Few boxes are cut several times at once.
        cuts = max(1, (min(self.bounder.batch, _WIDE) // (2 * max(1, sum(kept)))).bit_length())
        now, limit = self.now, self._options.attack_after_boxes
        long = [i for i, more in enumerate(taken) if now.bounded[i] <= limit < now.bounded[i] + more]
        now.bounded = [bounded + more for bounded, more in zip(now.bounded, taken, strict=True)]
        now.open = [was + (new << cuts) - more for was, new, more in zip(now.open, kept, taken, strict=True)]
        for points in tried if any_hit else ():
            self._claim(*points)
        for local in boxes.owner[stuck].unique().tolist() if any_stuck else ():
            detail = "a box of one point is neither proved nor violated in float64"
            self.decide(local, Outcome.unknown(Reason.INCOMPLETE, self._options.name, detail))
        self._charge(taken)
        self._attack_queries([local for local in long if local not in now.outcomes], stop)
        if self._observer is not None:
            self._observer(BoxesBounded(boxes, found.rows, proved, rest, *clipping_rows(found, clipped)))
        chosen = order[len(order) - sum(kept) :]
        if len(chosen):
            within = torch.full_like(chosen, NO_BOUNDS)
            if bounds.inputs:
                within = self._known.keep({i: x.pick(chosen) for i, x in bounds.inputs.items()})
            self._halve(replace(rest[chosen], within=within), found.influence[chosen], cuts)

    def _halve(self, boxes: SubBoxes, influence: Tensor, cuts: int) -> None:
        """Push the parts of boxes, each cut along its most influential inputs."""
        for _ in range(cuts):
            parent, boxes = boxes, boxes.halves(self._score(boxes, influence).argmax(1), self._integer, self.now.number)
            self.now.number += len(boxes)
            influence = influence.repeat(2, 1)
            if self._observer is not None:
                self._observer(BoxesHalved(parent.number, boxes))
        self.now.frontier.push(boxes)

    def _score(self, boxes: SubBoxes, influence: Tensor) -> Tensor:
        """Return scores of halving each input, (boxes, inputs); not positive where it cannot be halved."""
        width = boxes.upper - boxes.lower
        score = influence * width + _TIE * width
        # Linear bounds hardly tell what whole numbers are worth; there are few, and they go first.
        score = torch.where(self._integer, score + score.amax(1, keepdim=True), score)
        # Ends that were rounded outward may differ where an input has one value.
        return torch.where((width > 0) & (self._integer | (not self._points)), score, -1.0)

    def _try_points(self, boxes: SubBoxes, direction: Tensor, rows: PropertyRows) -> list[Points]:
        """Try the corner of each box against a direction (boxes, inputs), and the centre."""
        corner = torch.where(direction >= 0, boxes.lower, boxes.upper)
        points = torch.stack([corner, boxes.lower + (boxes.upper - boxes.lower) / 2])
        margins = rows.margins(rows.values(self._network(points.flatten(0, 1)).unflatten(0, points.shape[:2])))
        return [(boxes.owner, *found) for found in zip(points, margins, strict=True)]

    def _attack(self, boxes: SubBoxes, margins: Tensor, rows: PropertyRows) -> list[Points]:
        """Attack the boxes that are furthest from being proved, now and then."""
        if self._steps % self._options.attack_every or self._points:
            return []
        worst = margins.argsort(stable=True)[: self._attacked]
        box = Interval(*(end[worst].to(self._rough) for end in (boxes.lower, boxes.upper)))
        descent = Descent(self._options.box_attack, self._network, box, rows.take(worst).to(self._rough))
        return [(boxes.owner[worst], *descent.of_margins(descent.anywhere(self._generator)))]

    def _attack_queries(self, members: list[int], stop: Callable[[], bool]) -> None:
        if members:
            properties = [self._properties[local] for local in members]
            found = self._options.query_attack.search(self._network, properties, stop, self._budget.device)
            self._claim(torch.tensor(members), *found)
            self._charge([int(local in members) for local in range(len(self._numbers))])

    def _try_all(self, boxes: SubBoxes) -> None:
        """Try every point of boxes whose inputs matter only through whole numbers, if these are few."""
        boxes = boxes.whole(self._integer)
        for low, high, local in zip(boxes.lower, boxes.upper, boxes.owner.tolist(), strict=True):
            places = ((low < high) & self._integer).nonzero().squeeze(1).tolist()
            sizes = [int(size) + 1 for size in (high - low)[places].tolist()]
            owner = boxes.owner.new_tensor([local])
            stop, count, rows = self._stop([local]), math.prod(sizes), self._rows.take(owner)
            for first in range(0, count if count <= _EVERY else 0, self._tried):
                if local in self.now.outcomes or stop():
                    break
                number = torch.arange(first, min(count, first + self._tried), device=low.device)
                points = low.repeat(len(number), 1)
                for place, size in zip(places, sizes, strict=True):
                    points[:, place] += number % size
                    number = number // size
                margins = rows.margins(rows.values(self._network(points.to(self._rough)).to(points)[:, None]))[:, 0]
                least = margins.argmin(keepdim=True)
                self._claim(owner, points[least], margins[least])

    def _claim(self, owner: Tensor, points: Tensor, margins: Tensor) -> None:
        """Claim *sat* for queries ``owner`` at points (count, inputs) with margins (count,) at most 0."""
        for number in (margins <= 0).nonzero().squeeze(1).tolist():
            local = int(owner[number])
            if local not in self.now.outcomes:
                point = points[number].double().cpu().numpy()
                found = claim(self._network, self._properties[local], point, self._options.name)
                if found is not None:
                    self.decide(local, found)

    def _charge(self, worked: Sequence[int]) -> None:
        """Charge the time since the last charge to queries, in proportion to their ``worked`` boxes."""
        before, self._charged = self._charged, (self._budget.clock(), processor_seconds())
        elapsed, used = (now - then for now, then in zip(self._charged, before, strict=True))
        for local, count in enumerate(worked):
            if count:
                share = count / sum(worked)
                self._batch.charge([self._numbers[local]], elapsed * share, used * share)
                self._seconds[local] += elapsed * share
