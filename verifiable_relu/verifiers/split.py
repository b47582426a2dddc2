"""``split``: branch and bound on the input box, complete in the limit, and quick where few inputs vary.

The frontier holds sub-boxes of *all* queries of a network. Every step bounds a full batch of them, drops
those that are proved, tries points of the others as counterexamples, clips them, and halves them.

**Bounds.** Networks of ReLUs of whose inputs few vary are bounded by zonotopes (``bounds.zonotope``), which cost a
fraction of CROWN's bounds of all neurons; rows of the output then go back by CROWN over these. CROWN's bounds of the
neurons that zonotopes leave unstable would save a tenth to a third of the boxes, and cost more than that. Other
networks, and those of which zonotopes leave far more neurons of the whole boxes unstable than CROWN has left (since not
every neuron has a symbol), or take more than the memory, are bounded by CROWN alone. There what is
known of a box, or of a query's whole box (``root``), holds for its parts: only neurons that are unstable in the larger
box are bounded again. Where a box has many of these, few boxes are bounded at once, so that the search goes deep first.

**Which input is halved** is decided by what it has to do with the width of the output's rows: directly, and by way of
every unstable ReLU's contribution, of which each input has a share (``Zonotopes.influence``). Without zonotopes that is
|A_i|·width_i, A being the coefficients of the linear lower bounds (Wang et al., Formal Security Analysis of Neural
Networks using Symbolic Intervals, arXiv 1804.10829, section 4.3).

**Counterexamples.** The corner of every open box where its linear bounds are least, and its centre, are tried; and now
and then the boxes that are furthest from being proved are attacked (``pgd``). A query that takes many boxes is attacked
as a whole, once.

**Clipping.** Where the linear lower bound of a row of the unsafe set is positive, no counterexample is; that part of
the box is cut off.

A row g of a polytope of the unsafe set has a lower bound g(x) ≥ v + Σ_i |A_i|·|x_i − m_i| over a box: A are the
coefficients of its linear bound, m is the corner where that is least, and v its value there. A counterexample in the
polytope has g(x) ≤ 0 for every row, so that |x_i − m_i| ≤ −v/|A_i| for every input i, since no other term of the sum is
negative. What is left of a box is the smallest box that holds what every polytope leaves of it that is not proved.

**Sums.** Where no single row of a conjunction is positive over a box, a sum of several may be. A polytope of the unsafe
set is where all of its rows g_k are at most 0; for weights w_k ≥ 0, so is Σ_k w_k·g_k there. The best weights make the
least value of that sum over the box as large as possible: this is the Lagrange dual (Boyd and Vandenberghe, Convex
Optimization, section 5.2) of the question by how much some row must be violated. Weights are looked for with affine
forms in the rows' place, by mirror ascent on the simplex (Beck and Teboulle, Mirror Descent and Nonlinear Projected
Subgradient Methods for Convex Optimization, Operations Research Letters 31, 2003). Any weights give a valid row
(``RowBatch.sums``), which is then bounded like every other one.

**Certificates** (``RecordedSplit``, ``trust.certificate.Cover``). A box is proven by its zonotope alone, of which
nothing needs to be written but which row of each polytope is positive; or, where zonotopes do not apply, by CROWN's
bounds of its neurons, which are written; what is known of a larger box is then not used, since a box's proof is its
own. Nothing is cut off: what halving leaves covers the query's box.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from verifiable_relu.bounds import TUNING, Bounds, Relaxation, crown_relaxation, input_box, unstable
from verifiable_relu.bounds.forward import rough
from verifiable_relu.bounds.rounding import covers
from verifiable_relu.bounds.tuning import chunk_size, groups
from verifiable_relu.bounds.zonotope import NARROW, Zonotopes, box_bytes, takes
from verifiable_relu.errors import OutOfTime
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import STEPS, Activation, Relu
from verifiable_relu.network.simplify import without_repeated
from verifiable_relu.rounding import CLEAR, CUT, above, below, divisor, reach_of_cut, unit_roundoff, varies
from verifiable_relu.settings import neutral
from verifiable_relu.spec.property import Property
from verifiable_relu.spec.row_batch import RowBatch
from verifiable_relu.supervisor.forks import most_shares, run_shares
from verifiable_relu.supervisor.workers import processor_seconds
from verifiable_relu.trust.certificate import Cover, Proof
from verifiable_relu.verifiers.attack import Descent, Pgd, claim
from verifiable_relu.verifiers.base import Outcome, Reason, TimeBudget, Trust, Verdict, batch_size, fault
from verifiable_relu.verifiers.batch import QueryBatch
from verifiable_relu.verifiers.recording import Recorder, uncertified
from verifiable_relu.verifiers.root_bounds import InitialBounds

_TIE = 1e-9
"""Heuristic: what the width of an input counts where none has an influence."""

_UNITS = 4
"""Units of roundoff by which one node, at most, changes the coefficients of inputs, if its weights are exact."""


@dataclass(frozen=True)
class Clipped:
    """What is left of a batch of boxes.

    Attributes:
        box: the rest of each box; (batch, inputs).
        empty: (batch,) whether nothing is left: the box is proved.
        margin: (batch,) a positive lower bound of the property's margin in all that was cut off; infinite where nothing
            was.
    """

    box: Bounds
    empty: Tensor
    margin: Tensor


def input_error(network: Network, dtype: torch.dtype) -> float:
    """By what part of themselves computed coefficients of the inputs may be off: nodes scale and move the inputs."""
    unknown = sum(node.weight_error for node in network.affine)
    return _UNITS * (len(network.nodes) + 8) * unit_roundoff(dtype) + 2 * unknown


def clip(box: Bounds, rows: RowBatch, values: Tensor, coefficients: Tensor, share: float) -> Clipped:
    """Cut off boxes where a row of each polytope is positive.

    Rounding: computed coefficients and values are those of a valid bound (``Relaxation.lower``), but that the
    coefficients of the inputs may be off by some units of roundoff for every node that scales or moves the inputs. That
    moves g(x) by at most the same part of Σ_i |A_i|·width_i, which counts against what is cut off; ends move outward.

    Args:
        box: (batch, inputs).
        rows: those of the boxes' properties, as a batch.
        values: (rows,) lower bounds of the rows' values over the box.
        coefficients: (rows, inputs) of their linear lower bounds.
        share: ``input_error`` of the network.
    """
    lower, upper = box.lower[rows.sample], box.upper[rows.sample]
    width = upper - lower
    # What is not cut off: |x_i − m_i| ≤ reach. NaN cuts nothing off.
    reach = reach_of_cut(values, coefficients.abs(), width, share)
    spare = rows.unscaled(CUT / 2 * -values)
    cut = (reach < width) & (spare > 0)[:, None]
    high, low = above(lower + reach), below(upper - reach)
    high = torch.where(cut & (coefficients > 0), torch.minimum(high, upper), upper)
    low = torch.where(cut & (coefficients < 0), torch.maximum(low, lower), lower)

    polytopes, inputs = len(rows.owner), lower.shape[1]
    place = rows.polytope[:, None].expand(-1, inputs)
    rest_low = box.lower[rows.owner].scatter_reduce(0, place, low, "amax")
    rest_high = box.upper[rows.owner].scatter_reduce(0, place, high, "amin")
    largest = rows.largest(values)
    proved = largest > 0
    gone = proved | (rest_low > rest_high).any(1)
    owner = rows.owner[:, None].expand(polytopes, inputs)
    outside = lower.new_full((), torch.inf)
    new_low = torch.full_like(box.lower, torch.inf)
    new_high = torch.full_like(box.upper, -torch.inf)
    new_low.scatter_reduce_(0, owner, torch.where(gone[:, None], outside, rest_low), "amin")
    new_high.scatter_reduce_(0, owner, torch.where(gone[:, None], -outside, rest_high), "amax")
    empty = (new_low > new_high).any(1)

    margin = rows.least(torch.where(proved, largest, torch.inf))
    margin.scatter_reduce_(0, rows.sample, torch.where(cut.any(1), spare, torch.inf), "amin")
    return Clipped(Bounds(new_low, new_high), empty, margin)


_STEPS = 12

_GAIN = 0.1
"""A sum is bounded if its form's least value is above that of every single row by this part of its size."""

_UNIT = 1024
"""Weights are multiples of 1/1024, so that sums of rows with small integers are exact."""


def sums(rows: RowBatch, values: Tensor, forms: Callable[[Tensor], tuple[Tensor, Tensor]]) -> RowBatch | None:
    """A sum of its rows for each polytope of several rows that no row proves, where that promises more than they do.

    Args:
        rows: those of the boxes' properties, as a batch.
        values: (rows,) lower bounds of the rows' values over the box.
        forms: of some rows (r,), by their numbers, affine forms c + Σ_k a_k·ε_k, ε_k ∈ [−1, 1], that are near their
            least values or below: c (r,) and a (r, symbols).

    Returns:
        One row for some of the polytopes, numbered as in ``rows``; None if there is no such polytope.
    """
    count = torch.bincount(rows.polytope, minlength=len(rows.owner))
    chosen = ((count > 1) & (rows.largest(values) <= 0)).nonzero().squeeze(1)
    if not len(chosen):
        return None
    place = torch.arange(int(count[chosen].max()), device=chosen.device).expand(len(chosen), -1)
    present = place < count[chosen, None]
    member = torch.where(present, (count.cumsum(0) - count)[chosen, None] + place, 0)
    flat, symbols = forms(member.flatten())
    center, reach = flat.unflatten(0, member.shape), symbols.unflatten(0, member.shape)
    reach = torch.where(present[..., None], reach, 0.0)
    least = torch.where(present, center - reach.abs().sum(2), -torch.inf)
    single, best = least.max(1)
    # Unless another row is larger at the point where the best one is least, no sum is better than that one.
    corner = reach.gather(1, best[:, None, None].expand(-1, 1, reach.shape[2])).sign()
    there = torch.where(present, center - (reach * corner).sum(2), -torch.inf).amax(1)
    promised = single + _GAIN * single.abs()
    mixed = there > promised
    chosen, member, promised = chosen[mixed], member[mixed], promised[mixed]
    weights, found = _ascend(center[mixed], reach[mixed], present[mixed])
    kept = found > promised
    return rows.sums(chosen[kept], member[kept], (weights[kept] * _UNIT).round()) if kept.any() else None


def _ascend(center: Tensor, reach: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """Weights of the rows of each polytope, of sum 1, and the least value of the sum of their forms.

    Args:
        center: (polytopes, rows) of the rows' forms.
        reach: (polytopes, rows, symbols) their coefficients.
        present: (polytopes, rows) whether there is such a row.
    """
    weights = present.to(center) / present.sum(1, keepdim=True)
    best, found = weights, center.new_full((len(center),), -torch.inf)
    for step in range(_STEPS):
        mixed = torch.einsum("pr,pri->pi", weights, reach)
        value = (weights * center).sum(1) - mixed.abs().sum(1)
        better = value > found
        best, found = torch.where(better[:, None], weights, best), torch.where(better, value, found)
        slope = center - torch.einsum("pi,pri->pr", mixed.sign(), reach)
        slope = torch.where(present, slope - (weights * slope).sum(1, keepdim=True), 0.0)
        longest = divisor(slope.abs().amax(1, keepdim=True))
        weights = weights * torch.exp(2 / (step + 2) ** 0.5 * slope / longest)
        weights = weights / weights.sum(1, keepdim=True)
    return best, found


_ATTACKED = 1 << 13
"""Boxes times neurons of what is attacked at once."""

_TRIED = 1 << 23
"""Points times neurons of what is tried at once."""

_EVERY = 1 << 16
"""The most points of a box all of which are tried."""


class BoxAttack:
    """Searches for points of negative margin; nothing that they find is a verdict.

    Args:
        network: of all queries.
        pgd: how boxes are attacked.
        search: how the whole box of a query is attacked.
        device: where to run.
    """

    def __init__(self, network: Network, pgd: Pgd, search: Pgd, device: str) -> None:
        self._network, self._pgd, self._search, self._device = network, pgd, search, device
        self._rough, self._dtype = rough(network, device)
        self._generator = torch.Generator().manual_seed(pgd.seed)
        neurons = sum(node.size for node in network.nodes)
        self.most, self.together = max(1, _ATTACKED // neurons), max(1, _TRIED // neurons)

    def boxes(self, lower: Tensor, upper: Tensor, rows: RowBatch, stop: Callable[[], bool]) -> list[tuple[int, Tensor]]:
        """Boxes, by number, with points that seem to be counterexamples.

        Args:
            lower, upper: (batch, inputs), of which ``most`` is a good number.
            rows: those of the boxes' properties, as a batch.
            stop: called between steps; the search ends when it returns True.
        """
        low, high = lower.to(self._dtype), upper.to(self._dtype)
        descent = Descent(self._pgd, self._rough, low, high, rows.to(low), stop)
        return _reached(*descent.of_margins(descent.anywhere(self._generator)))

    def least(self, points: Tensor, rows: RowBatch) -> list[tuple[int, Tensor]]:
        """The point (batch, inputs) of least margin, with its number, if it seems to be a counterexample.

        Args:
            points: of which ``together`` is a good number.
            rows: those of one property.
        """
        y = self._rough(points.to(self._dtype).reshape(-1, *self._network.input_shape)).flatten(1).to(points)
        margins = rows.margins(y @ rows.matrix.T - rows.bound)[:, 0]
        least = margins.argmin(keepdim=True)
        return _reached(points[least], margins[least])

    def wholes(self, properties: Sequence[Property], stop: Callable[[], bool]) -> list[tuple[int, Tensor]]:
        """Properties, by number, with points of their boxes that seem to be counterexamples."""
        return _reached(*self._search.search(self._network, properties, stop, self._device))


def _reached(points: Tensor, margins: Tensor) -> list[tuple[int, Tensor]]:
    return [(number, points[number]) for number in (margins <= 0).nonzero().squeeze(1).tolist()]


_SHORT = 0.2
"""Seconds: where one process had no boxes left so soon, copies are not made again at once."""


_LOOSE = 2
"""Zonotopes are not taken that leave more than so many times as many neurons unstable as CROWN does."""

_ROWS = 1 << 27
"""Coefficients, about, of the rows by which neurons of all boxes of a batch are bounded."""

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
        pre: bounds of every activation's input, by the activation's node index, (boxes, *shape), for the boxes' parts.
    """

    rows: RowBatch
    values: Tensor
    coefficients: Tensor
    influence: Tensor
    pre: Mapping[int, Bounds] = field(default_factory=dict)


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
    """The sub-boxes that are still to be bounded, of all queries of one network.

    Attributes:
        lower, upper: (boxes, inputs) the boxes.
        owner: (boxes,) the query of each.
        within: (boxes,) by number, a box that each is a part of and of which bounds are known; −1 for none.
    """

    def __init__(self, options: InputSplit, batch: QueryBatch) -> None:
        self.options = options
        self.query_batch = batch
        self.numbers = list(batch.queries)
        self._budget = batch.budget
        self._charged = self._budget.clock(), processor_seconds()
        network, device = batch.network, self._budget.device
        self.network = self.simplified(network).to(torch.float64, device)
        self.queries = queries = list(batch.queries.values())
        box = input_box([q.property for q in queries], network, torch.float64, device).flat()
        self.lower, self.upper = box.lower, box.upper
        self.counted = torch.zeros(box.lower.shape[1], dtype=torch.bool, device=device)
        same = self._count()
        varying = int((moving := varies(self.lower, self.upper).any(0)).sum())
        # Of whole numbers alone, points are bounded for less than neurons of boxes.
        self._points = bool((self.counted | ~moving).all())
        self._processes = most_shares(self._budget.processes) if device == "cpu" else 1
        # In each process, half for the boxes, half for the rows that are bounded.
        self.memory = self._budget.memory // (2 * self._processes)
        self._most = self.batch = batch_size(self.network, options.batch, self.memory)
        self._attack = BoxAttack(self.network, options.pgd, options.search, device)
        if self._points:
            self.batch = min(self.batch, self._attack.together)
        each = box_bytes(self.network, varying, options.symbols) if takes(self.network) else math.inf
        self.by_zonotopes = varying <= NARROW and each <= self.memory
        if self.by_zonotopes:
            self.batch = max(1, min(self.batch, int(self.memory // each)))
        self.rows = RowBatch.from_properties([q.property for q in queries], network.output_size).to(self.lower)
        self.owner = torch.arange(len(queries), device=self.lower.device)
        self.within = torch.full_like(self.owner, -1)
        self._bounded: dict[int, Mapping[int, Bounds]] = {}
        self._begin(batch.bounds_cache.known(self.numbers, self.network, box.lower) if same else None)
        self.margin = self.lower.new_full((len(queries),), torch.inf)
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

    def _count(self) -> bool:
        """Take whole numbers for inputs of which nothing else counts; whether the ends of their boxes were such."""
        before = self.lower, self.upper
        for function, places in self.network.counted.items():
            self.counted[places] = True
            self.lower, self.upper = (
                end.index_copy(1, places, STEPS[function].value(end[:, places])) for end in (self.lower, self.upper)
            )
        return torch.equal(before[0], self.lower) and torch.equal(before[1], self.upper)

    def _begin(self, known: InitialBounds | None) -> None:
        """Start from what is known of the whole boxes, if all of their neurons have been bounded.

        Of points nothing is handed on: intervals are tight there, and those of larger boxes may be undefined.
        """
        shapes, stored = ([node.shape for node in net.nodes] for net in (self.network, self.query_batch.network))
        if known is not None and known.bounded and shapes == stored and not self._points:
            self.within = self._remembered(known.pre, self.owner)

    def _remembered(self, pre: Mapping[int, Bounds], chosen: Tensor) -> Tensor:
        """Keep bounds of activations' inputs over some of a batch of boxes, so far as there is memory for them.

        Returns:
            The numbers (chosen,) of what is kept; −1 for nothing.
        """
        self._bounded = {number: self._bounded[number] for number in self.within.unique().tolist() if number >= 0}
        each = sum(2 * node.size * 8 for node in self.network.nodes if isinstance(node, Activation))
        room = max(0, self.memory // max(1, each) - len(self._bounded)) if pre else 0
        first = max(self._bounded, default=-1) + 1
        for number, box in enumerate(chosen[:room].tolist(), start=first):
            self._bounded[number] = {i: Bounds(b.lower[box, None], b.upper[box, None]) for i, b in pre.items()}
        place = torch.arange(len(chosen), device=chosen.device)
        return torch.where(place < room, first + place, -1)

    def known(self, within: Tensor) -> Mapping[int, Bounds] | None:
        """What is known of boxes that lie in these (boxes,); None where nothing is known of one of them."""
        found = [self._bounded.get(number) for number in within.tolist()]
        given = [bounds for bounds in found if bounds is not None]
        if not given or len(given) < len(found):
            return None
        ends = {i: ([b[i].lower for b in given], [b[i].upper for b in given]) for i in given[0]}
        return {i: Bounds(torch.cat(lower), torch.cat(upper)) for i, (lower, upper) in ends.items()}

    @property
    def frontier_size(self) -> int:
        return len(self.owner)

    def _left(self, members: Sequence[int]) -> float:
        """The seconds that are left for these queries together."""
        return self.query_batch.left([self.numbers[local] for local in members])

    def _work(self, members: Sequence[int]) -> TimeBudget:
        """What work for these queries may use, from now on."""
        return self._budget.begun(self._left(members))

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
        count, boxes = self._processes, (self.lower, self.upper, self.owner, self.within)
        hands = [[part[number::count].clone() for part in boxes] for number in range(count)]
        self.lower, self.upper, self.owner, self.within = hands[0]
        began = time.perf_counter()
        left = self._work(self.undecided()).left
        shares: list[Callable[[Callable[[], bool]], Share | None]] = [self._go_on]
        shares += [partial(self.go_on_elsewhere, hand) for hand in hands[1:]]
        for hand, share in zip(hands[1:], run_shares(shares, left)[1:], strict=True):
            # Nothing is known of what was dealt to a process that failed. What a copy has come to know stays there, and
            # numbers of what was known before stand for something else by now.
            lower, upper, owner = hand[:3] if share is None else (share.lower, share.upper, share.owner)
            self._put(lower, upper, owner, torch.full_like(owner, -1))
            if share is None:
                self._processes = 1
            else:
                self.take(share)
        now = time.perf_counter()
        self._alone = now + self.options.alone if now - began < _SHORT else now

    def _go_on(self, pause: Callable[[], bool]) -> None:
        # A query that is out of time is closed, and its boxes dropped, where the frontier is settled: not here.
        while self.frontier_size and all(self._left([i]) > 0 for i in self.owner.unique().tolist()):
            self.step()
            if pause():
                break

    def go_on_elsewhere(self, boxes: Sequence[Tensor], pause: Callable[[], bool]) -> Share:
        """In a copy of the process that holds the frontier: go on with boxes, given as those of the frontier are."""
        self.lower, self.upper, self.owner, self.within = boxes
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
        lower, upper, owner, within = self.lower[cut:], self.upper[cut:], self.owner[cut:], self.within[cut:]
        self.lower, self.upper, self.owner = self.lower[:cut], self.upper[:cut], self.owner[:cut]
        self.within = self.within[:cut]
        hard = []
        for local, count in enumerate(self._counts(owner)):
            before, self.boxes[local] = self.boxes[local], self.boxes[local] + count
            if before <= self.options.easy < self.boxes[local]:
                hard.append(local)
        self._steps += 1
        try:
            if self._steps == 1 and self._points:
                self._try_all(lower, upper, owner)
            self._search(hard)
            self._bound(lower, upper, owner, within)
        except OutOfTime:
            # These boxes are not in the frontier any more, and nothing is known of them.
            for local in owner.unique().tolist():
                detail = f"the budget ran out in {self.boxes[local]} boxes"
                self._decide(local, Outcome.unknown(Reason.TIMEOUT, self.options.name, detail))
        self._charge(owner)
        self._drop()

    def _bound(self, lower: Tensor, upper: Tensor, owner: Tensor, within: Tensor) -> None:
        """Drop of these boxes those that are proved, and put the others back, clipped and halved.

        Raises:
            OutOfTime: if the time of their queries ends meanwhile; then none was put back.
        """
        rows = self.rows.take(owner)
        shape = (len(owner), *self.network.input_shape)
        box = Bounds(lower.reshape(shape), upper.reshape(shape))
        stop = self._work(owner.unique().tolist()).stop
        lines = self.lines(box, rows, owner, within, stop)
        margins = lines.rows.margins(lines.values)

        proved = margins > 0
        self._known(owner, torch.where(proved, margins, torch.inf))
        open_ = (~proved).nonzero().squeeze(1)
        if not len(open_):
            return
        direction = torch.zeros_like(lower).index_add_(0, lines.rows.sample, lines.coefficients)
        self._charge(owner)
        self._look_for_witness(lower[open_], upper[open_], owner[open_], direction[open_], rows, open_)
        if self._steps % self.options.attacks == 0 and not self._points:
            worst = open_[margins[open_].argsort(stable=True)[: self._attack.most]]
            mine = self.rows.take(owner[worst])
            for number, point in self._attack.boxes(lower[worst], upper[worst], mine, stop):
                self._claim(int(owner[worst[number]]), point)
        clipped = self.clipped(Bounds(lower, upper), lines)
        self._known(owner, clipped.margin)
        left = open_[~clipped.empty[open_]]
        # The boxes at the end of the frontier are the next: those that are furthest from being proved.
        left = left[margins[left].argsort(descending=True, stable=True)]
        within = self._remembered(lines.pre, left)
        self.halve(clipped.box.lower[left], clipped.box.upper[left], owner[left], lines.influence[left], within)

    def lines(self, box: Bounds, rows: RowBatch, owner: Tensor, within: Tensor, stop: Callable[[], bool]) -> Lines:
        """Linear lower bounds of the rows over boxes that belong to these queries.

        Args:
            box: (batch, *input_shape).
            rows: those of the boxes' properties, as a batch.
            owner: (batch,) the query of each box.
            within: (batch,) of which boxes they are parts of which bounds are known (``known``).
            stop: asked now and then.
        """
        forms = Zonotopes(self.network, box, self.options.symbols, stop) if self.by_zonotopes else None
        known = self.known(within)
        if forms is not None and known is not None and self._unstable(forms.pre) > _LOOSE * self._unstable(known):
            self.by_zonotopes, forms = False, None
        if forms is not None:
            known = forms.pre
        relaxation = crown_relaxation(
            self.network,
            box,
            known=known,
            # The first boxes are those of which bounds are known.
            crown=forms is None and not self._points and (known is None or self._steps > 1),
            memory=self.memory,
            stop=stop,
            max_unstable=self.options.most if known is None else None,
        )
        if forms is None and not self._points:
            self._limit(relaxation)
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
        pre = relaxation.pre if forms is None and not self._points else {}
        return Lines(rows, values, coefficients, self.influence(box, rows, coefficients, forms), pre)

    def _limit(self, relaxation: Relaxation) -> None:
        """Bound so few boxes at once that rows of all of their unstable neurons have about ``_ROWS`` coefficients."""
        neurons = sum(node.size for node in self.network.nodes)
        coefficients = self._unstable(relaxation.pre) * neurons // relaxation.samples
        self.batch = max(1, min(self._most, _ROWS // max(1, coefficients)))

    def _unstable(self, pre: Mapping[int, Bounds]) -> int:
        """How many neurons of all boxes together are unstable by these bounds."""
        return sum(int(unstable(self.network.nodes[i], bounds).sum()) for i, bounds in pre.items())

    def _lower(
        self, rows: RowBatch, relaxation: Relaxation, forms: Zonotopes | None, boxes: int, stop: Callable[[], bool]
    ) -> tuple[Tensor, Tensor]:
        """Lower bounds (rows,) of the rows' values and the coefficients (rows, inputs) of linear lower bounds."""
        last = len(self.network.nodes) - 1
        matrix = rows.matrix.reshape(-1, *self.network.output_shape)
        values, coefficients = matrix.new_empty(len(matrix)), matrix.new_zeros(len(matrix), self.network.input_size)
        size = chunk_size(self.network, matrix, self.memory, TUNING)
        parts = groups(len(matrix), rows.sample, size, boxes)
        if self._points:
            for part, mine in parts:
                values[part] = relaxation.by_intervals(matrix[part], mine)
            # Little is left of lines behind steps, but at a point rows are rounded less often than intervals.
            point = (relaxation.box.lower == relaxation.box.upper).flatten(1)[:, self.counted].all(1)
            rest = (point[rows.sample] & (values <= rows.bound)).nonzero().squeeze(1)
            parts = ((rest[part], mine) for part, mine in groups(len(rest), rows.sample[rest], size, boxes))
        for part, mine in parts:
            stop()
            values[part], reached = relaxation.lower(last, matrix[part], mine, coefficients=True)
            assert reached is not None
            coefficients[part] = relaxation.of_input(reached)
        if forms is not None:
            others, slopes = forms.lower(rows.matrix, rows.sample)
            better = others > values
            values = torch.where(better, others, values)
            coefficients = torch.where(better[:, None], slopes, coefficients)
        return below(values - rows.bound), coefficients

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

    def _try_all(self, lower: Tensor, upper: Tensor, owner: Tensor) -> None:
        """Try every point of boxes in which whole numbers alone count, where these are not too many."""
        for low, high, local in zip(lower, upper, owner.tolist(), strict=True):
            places = ((low < high) & self.counted).nonzero().squeeze(1).tolist()
            sizes = [int(size) + 1 for size in (high - low)[places].tolist()]
            stop, count = self._work([local]).stop, math.prod(sizes)
            for first in range(0, count if count <= _EVERY else 0, self._attack.together):
                if local in self.outcomes or stop():
                    break
                number = torch.arange(first, min(count, first + self._attack.together), device=low.device)
                points = low.repeat(len(number), 1)
                for place, size in zip(places, sizes, strict=True):
                    points[:, place] += number % size
                    number = number // size
                for _, point in self._attack.least(points, self.rows.take(owner.new_tensor([local]))):
                    self._claim(local, point)

    def _search(self, members: Sequence[int]) -> None:
        """Look for a counterexample in the whole box of each of these queries."""
        if members:
            stop = self._work(members).stop
            for number, point in self._attack.wholes([self.queries[local].property for local in members], stop):
                self._claim(members[number], point)

    def _claim(self, local: int, point: Tensor) -> None:
        """Decide a query by a point, if that is a counterexample."""
        if local not in self.outcomes:
            query = self.queries[local]
            found = claim(query.network, query.property, point.double().cpu().numpy(), self.options.name)
            if found is not None:
                self._decide(local, found)

    def halve(self, lower: Tensor, upper: Tensor, owner: Tensor, influence: Tensor, within: Tensor) -> None:
        """Put the boxes back, each cut along its most influential inputs: several while the frontier is small."""
        lower = torch.where(self.counted, lower.ceil(), lower)
        upper = torch.where(self.counted, upper.floor(), upper)
        some = (lower <= upper).all(1)
        lower, upper, owner, influence, within = (part[some] for part in (lower, upper, owner, influence, within))
        for number in range(max(1, (min(self.batch, _WIDE) // (2 * max(1, len(owner)))).bit_length())):
            width = upper - lower
            score = influence * width + _TIE * width
            # Lines hardly tell what whole numbers are worth, of which there are few: they go first.
            score = torch.where(self.counted, score + score.amax(1, keepdim=True), score)
            # Ends that were rounded outward may differ where an input has one value.
            score = torch.where((width > 0) & (self.counted | (not self._points)), score, -1.0)
            best, dimension = score.max(1)
            stuck = best <= 0
            if number:
                # Points that were cut off just now have not been bounded yet.
                self._put(lower[stuck], upper[stuck], owner[stuck], within[stuck])
            for local in () if number else owner[stuck].unique().tolist():
                detail = "a box of one point is neither proved nor violated in float64"
                self._decide(local, Outcome.unknown(Reason.INCOMPLETE, self.options.name, detail))
            lower, upper, owner, within = lower[~stuck], upper[~stuck], owner[~stuck], within[~stuck]
            influence = influence[~stuck]
            dimension = dimension[~stuck, None]
            middle = (lower + (upper - lower) / 2).gather(1, dimension)
            # Between whole numbers there is nothing that counts.
            counts = self.counted[dimension]
            middle = torch.where(counts, middle.floor(), middle)
            lower = torch.cat([lower, lower.scatter(1, dimension, middle + counts.to(middle))])
            upper = torch.cat([upper.scatter(1, dimension, middle), upper])
            owner, within, influence = owner.repeat(2), within.repeat(2), influence.repeat(2, 1)
        self._put(lower, upper, owner, within)

    def _put(self, lower: Tensor, upper: Tensor, owner: Tensor, within: Tensor) -> None:
        """Put boxes behind those of the frontier."""
        self.lower = torch.cat([self.lower, lower])
        self.upper = torch.cat([self.upper, upper])
        self.owner = torch.cat([self.owner, owner])
        self.within = torch.cat([self.within, within])

    def _counts(self, owner: Tensor) -> list[int]:
        """How many boxes each query has among those with these owners."""
        counts: list[int] = torch.bincount(owner, minlength=len(self.queries)).tolist()
        return counts

    def _charge(self, worked: Tensor) -> None:
        """Charge the time since the last charge to the queries that own these boxes, by their share of them."""
        before, self._charged = self._charged, (self._budget.clock(), processor_seconds())
        elapsed, used = (now - then for now, then in zip(self._charged, before, strict=True))
        for local, count in enumerate(self._counts(worked)):
            if count:
                share = count / len(worked)
                self.query_batch.charge([self.numbers[local]], elapsed * share, used * share)
                self.seconds[local] += elapsed * share

    def settle(self) -> None:
        """Close the queries that are through, of which no box is left anywhere, or out of time."""
        left = self._counts(self.owner)
        for local in self.undecided():
            if not left[local]:
                margin = float(self.margin[local])
                trust = Trust.ROUNDED if covers(self.network, torch.float64, self._budget.device) else Trust.FLOAT
                self._decide(local, Outcome(Verdict.UNSAT, Reason.PROVED, "split", trust, margin))
            elif self._left([local]) <= 0:
                detail = f"the budget ran out after {self.boxes[local]} boxes, {left[local]} were left"
                self._decide(local, Outcome.unknown(Reason.TIMEOUT, self.options.name, detail))
        self._drop()

    def give_up(self, outcome: Outcome) -> None:
        """Close all queries that are not decided."""
        for local in self.undecided():
            self.outcomes[local] = outcome
            self._new.append(local)
        self._drop()

    def _drop(self) -> None:
        """Drop the boxes of queries that are decided."""
        closed = torch.tensor([i in self.outcomes for i in range(len(self.queries))], device=self.owner.device)
        keep = ~closed[self.owner]
        if keep.all():
            return
        self.lower, self.upper, self.owner = self.lower[keep], self.upper[keep], self.owner[keep]
        self.within = self.within[keep]

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


@dataclass(frozen=True)
class InputSplit:
    """Branch and bound on the input box. Of memory, the boxes that wait are not counted.

    Attributes:
        batch: most sub-boxes bounded at once.
        most: layers with more unstable neurons in a box are not bounded by CROWN there.
        symbols: how many unstable neurons of a layer have a noise symbol of their own in a zonotope.
        attacks: boxes are attacked in every so-manieth step.
        pgd: how they are attacked.
        easy: a query that is not through after so many boxes is attacked as a whole.
        search: how it is attacked.
        alone: the seconds that one process searches alone before others share the boxes.
    """

    batch: int = 256
    most: int = 512
    symbols: int = 256
    attacks: int = 4
    pgd: Pgd = Pgd(steps=10, starts=8)  # noqa: RUF009 -- frozen
    easy: int = 512
    search: Pgd = Pgd(rounds=3, more=128, screened=16384)  # noqa: RUF009 -- frozen
    alone: float = field(default=0.5, repr=False)

    name: ClassVar[str] = "split"

    def claims(self, batch: QueryBatch) -> Iterator[tuple[int, Outcome]]:
        """As ``Verifier.claims``."""
        done = 0
        for part in batch.batches(lambda network, budget: len(batch.queries)):
            with neutral(), torch.no_grad():
                search = self.frontier(part)
            while search.frontier_size:
                try:
                    with neutral(), torch.no_grad():
                        if search.is_worth_sharing():
                            search.share()
                        else:
                            search.step()
                        search.settle()
                    batch.budget.report_progress({"sub-problems": sum(search.boxes)})
                except Exception as error:
                    search.give_up(fault(error, self.name))
                for local in search.decided():
                    yield search.numbers[local], search.outcomes[local]
                    done += 1
                batch.stage(self.name, done, len(batch.queries))

    def frontier(self, batch: QueryBatch) -> Frontier:
        """Where the search begins, for queries of one network."""
        return Frontier(self, batch)


@dataclass(frozen=True)
class RecordedSplit(InputSplit):
    """Branch and bound on the input box whose outcomes of *unsat* hold their proofs, where certificates know the
    network."""

    # Whoever checks a zonotope gives every unstable neuron a symbol.
    symbols: int = 1 << 30

    def frontier(self, batch: QueryBatch) -> Frontier:
        if uncertified(batch.network):
            return Frontier(replace(self, symbols=InputSplit.symbols), batch)
        return _Recorded(self, batch)


class _Zonotopes(Zonotopes):
    """Zonotopes in which every unstable neuron has a symbol of its own, as whoever checks them has."""

    def mirrors(self, node: Relu) -> None:
        return None


class _Recorded(Frontier):
    """The sub-boxes that are still to be bounded, and those that are proven."""

    def __init__(self, options: InputSplit, batch: QueryBatch) -> None:
        self._proven: list[list[tuple[Tensor, Tensor, list[int] | Proof]]] = [[] for _ in batch.queries]
        super().__init__(options, batch)

    def simplified(self, network: Network) -> Network:
        # The network of the file is what the certificate speaks of.
        return network

    def _begin(self, known: InitialBounds | None) -> None:
        """What others have proven is not recorded."""

    def lines(self, box: Bounds, rows: RowBatch, owner: Tensor, within: Tensor, stop: Callable[[], bool]) -> Lines:
        if not self.by_zonotopes:
            return self._by_claims(box, rows, owner, stop)
        forms = _Zonotopes(self.network, box, self.options.symbols, stop)
        values, coefficients = forms.lower(rows.matrix, rows.sample)
        size = (
            rows.bound.abs()
            + values.abs()
            + (rows.matrix.abs() * forms.output.center.flatten(1)[rows.sample].abs()).sum(1)
        )
        values = below(values - rows.bound - CLEAR * size)
        found = Lines(rows, values, coefficients, self.influence(box, rows, coefficients, forms))
        for number in (rows.margins(values) > 0).nonzero().squeeze(1).tolist():
            self._keep(box, number, owner, _positive(rows, values, number))
        return found

    def _by_claims(self, box: Bounds, rows: RowBatch, owner: Tensor, stop: Callable[[], bool]) -> Lines:
        """By CROWN's bounds of all neurons, which are written for boxes that they prove."""
        recorder, options = Recorder.of(self.network), self.options
        relaxation = crown_relaxation(
            self.network,
            box,
            coarse=recorder.coarse,
            memory=self.memory,
            stop=stop,
            max_unstable=options.most,
        )
        last = len(self.network.nodes) - 1
        matrix = rows.matrix.reshape(-1, *self.network.output_shape)
        values, reached = relaxation.lower(last, matrix, rows.sample, coefficients=True)
        assert reached is not None
        coefficients = relaxation.of_input(reached)
        values = below(values - rows.bound)
        found = Lines(rows, values, coefficients, self.influence(box, rows, coefficients, None))
        for number in (rows.margins(values) > 0).nonzero().squeeze(1).tolist():
            prop = self.queries[int(owner[number])].property
            if len(prop.unsafe) == int((rows.owner == number).sum()):
                proof = recorder.shared(relaxation, number, prop, _positive(rows, values, number))
                self._keep(box, number, owner, proof)
        return found

    def go_on_elsewhere(self, boxes: Sequence[Tensor], pause: Callable[[], bool]) -> Share:
        self._proven = [[] for _ in self.queries]
        return replace(super().go_on_elsewhere(boxes, pause), proven=self._proven)

    def take(self, share: Share) -> None:
        for mine, more in zip(self._proven, share.proven, strict=True):
            mine += more
        super().take(share)

    def _keep(self, box: Bounds, number: int, owner: Tensor, proof: list[int] | Proof) -> None:
        lower, upper = box.lower[number].flatten().clone(), box.upper[number].flatten().clone()
        self._proven[int(owner[number])].append((lower, upper, proof))

    def clipped(self, box: Bounds, lines: Lines) -> Clipped:
        none = torch.zeros(len(box.lower), dtype=torch.bool, device=box.lower.device)
        return Clipped(box, none, box.lower.new_full((len(none),), torch.inf))

    def _decide(self, local: int, outcome: Outcome) -> None:
        if local in self.outcomes:
            return
        super()._decide(local, outcome)
        proven, self._proven[local] = self._proven[local], []
        prop = self.queries[local].property
        rows = RowBatch.from_properties([prop], self.network.output_size)
        counts: list[Any] = torch.bincount(rows.polytope, minlength=len(rows.owner)).tolist()
        # Coefficients that float64 does not hold are split into several rows.
        if outcome.verdict is Verdict.UNSAT and counts == [len(polytope) for polytope in prop.unsafe]:
            lower, upper, proofs = zip(*proven, strict=True)
            low, high = (torch.stack(part).cpu().numpy() for part in (lower, upper))
            self.outcomes[local] = replace(self.outcomes[local], proof=Cover(prop.unsafe, low, high, proofs))


def _positive(rows: RowBatch, values: Tensor, number: int) -> list[int]:
    """Of each polytope of one box the number of the row with the largest value."""
    chosen = []
    for polytope in (rows.owner == number).nonzero().squeeze(1).tolist():
        chosen.append(int(values[rows.polytope == polytope].argmax()))
    return chosen
