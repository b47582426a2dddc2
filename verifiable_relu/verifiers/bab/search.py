"""The search that decides one query: trees of its system, and of tighter systems for what these leave open.

Which of the two decides a query is not known beforehand. On shallow networks trees over the first bounds do, on deep
ones tighter bounds of the neurons do more than millions of sub-problems. So trees begin; those that have closed nothing
worth mentioning when they pause are given up for a refinement, the others get up to its work. Every round takes more.

Before that, where a tree stands still, it is begun again with a better relaxation (``slopes``): cuts over its
neurons, or better lines. Planes bound the root much better, but not always what it is split into: all trees get theirs
where this one has closed more after the same work. Where a tree gets on without, the search often takes longer than the
tree.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from verifiable_relu.errors import OutOfTime
from verifiable_relu.spec.property import Query
from verifiable_relu.spec.row_batch import RowBatch
from verifiable_relu.supervisor.forks import run_shares
from verifiable_relu.trust.certificate import Tighter
from verifiable_relu.trust.certificate import Tree as Certified
from verifiable_relu.verifiers.attack import Descent, Pgd, claim
from verifiable_relu.verifiers.bab.loop import State, TreeProgress
from verifiable_relu.verifiers.bab.query import FoldedQuery
from verifiable_relu.verifiers.bab.recorded import Refined
from verifiable_relu.verifiers.bab.refine import Refinement
from verifiable_relu.verifiers.bab.slopes import Above, Slopes
from verifiable_relu.verifiers.bab.tree import Branching, Decide, PhaseTree
from verifiable_relu.verifiers.base import Outcome, Reason, TimeBudget

_DESCENT = Pgd(steps=15, step_size=0.2)
"""The descent from points at which relaxations of nodes that are nearly decided are least."""

_LATE = 0.3
"""Seconds that bounding what is open may take once the budget is spent."""

_LEAST = 1e-9
"""Heuristic: the part of a tree that counts as closed, at least, where its work is estimated."""

_SHORT = 0.2
"""Seconds: where the first process had nothing left so soon, copies are not made again at once."""

_WORTH = 3.0
"""Trees are shared where so many times the work that they take alone, at least, seems to be left."""


class WitnessCheck:
    """Tests points that a search comes across; ``found`` claims the first one that is a counterexample in float64."""

    def __init__(self, query: Query, method: str) -> None:
        self.query = query
        self.found: Outcome | None = None
        self._method = method
        self._network = query.network.to(torch.float64)
        prop = query.property
        self._rows = RowBatch.from_properties([prop], query.network.output_size)
        # Where the margin is zero, the point may be on an edge that is not part of the unsafe set or of the box.
        self._strict = bool(prop.box.open_lower or prop.box.open_upper) or any(
            row.strict for polytope in prop.unsafe for row in polytope
        )

    def anywhere(self) -> Outcome:
        """Return the outcome of a property for which any point should do: the centre of the box is tried."""
        box = self.query.property.box
        self._take((box.lower + box.upper) / 2)
        return self.found or Outcome.unknown(Reason.UNCONFIRMED, self._method, "any point should do")

    def reached(self, points: Tensor, descend: bool = False) -> bool:
        """Return True once a counterexample is known; also tests points (count, inputs), and points on the way down."""
        if descend and self.found is None:
            box = self.query.property.box
            low, high = (torch.from_numpy(end).repeat(len(points), 1) for end in (box.lower, box.upper))
            rows = self._rows.take(torch.zeros(len(points), dtype=torch.long))
            points, _ = Descent(_DESCENT, self._network, low, high, rows, None).of_margins(points[None])
        y = self._network(points.reshape(-1, *self._network.input_shape)).flatten(1)
        margins = self._rows.margins(y @ self._rows.matrix.T - self._rows.bound)
        least = int(margins.argmin())
        if self.found is None and bool(margins[least] <= 0):
            self._take(points[least].numpy())
        return self.found is not None

    def near(self, point: Tensor) -> bool:
        """Return True once a counterexample is known; also tests the exact point nearest to one (1, inputs)."""
        if self.found is None:
            self._take(point[0].numpy())
        return self.found is not None

    def decider(self, polytope: int, places: Tensor) -> Decide | None:
        """Return who decides the nodes of a polytope's tree that nothing else closes (``PhaseTree``); None for nobody.

        ``places``: (m, 2) the activation node of each neuron, and its number there.
        """
        return None

    def _take(self, point: np.ndarray) -> None:
        claimed = claim(self.query.network, self.query.property, point, self._method)
        if claimed is None or claimed.witness is None or claimed.margin is None:
            return
        if self.query.property.box.contains(claimed.witness) and (not self._strict or claimed.margin < 0):
            self.found = claimed


@dataclass(frozen=True)
class SearchEnd:
    """Why a search ended that decides nothing."""

    reason: Reason
    detail: str


IN_TIME = SearchEnd(Reason.TIMEOUT, "the budget ran out")


class TreeScheduler:
    """The trees of some polytopes of one query, which go on in turn.

    Args:
        keep: whether to keep what proves polytopes, for a certificate.
        done: the work that has been done before.

    Attributes:
        lower: by polytope a proven lower bound of its largest row, so far as it is known.
        recorded: by polytope its tree as it is written, if that is kept and all of its nodes are closed.
    """

    def __init__(
        self,
        query: FoldedQuery,
        polytopes: Sequence[int],
        candidates: WitnessCheck,
        options: Branching,
        budget: TimeBudget,
        keep: bool = False,
        done: float = 0.0,
    ) -> None:
        self.query, self._candidates, self._options, self._budget = query, candidates, options, budget
        self._keep = keep
        self.lower: dict[int, float] = {}
        self.recorded: dict[int, Certified] = {}
        self._waiting = list(polytopes)
        self._trees: dict[int, PhaseTree] = {}
        self._ended: set[State] = set()
        self._counted: dict[int, tuple[int, float]] = {}
        self._most = max(1, min(len(polytopes), budget.memory // query.bytes_of_trees(polytopes)))
        # Every process holds the trees' nodes, and of the nodes that it is dealt the children.
        self._alone, self._processes = budget.solo_work - done, 1 if query.folded.functions else budget.processes
        self._memory = budget.memory // self._most * self._processes

    def search(self, work: float = math.inf, together: int = sys.maxsize) -> SearchEnd | None:
        """Go on with every tree in turn, at most ``together`` at once, until all are decided or time is up.

        The search pauses, too, once its trees have taken some ``work`` (``loop.TreeProgress``). Returned is why there
        may be something left; None if the search only paused, and can go on.
        """
        while (self._waiting or self._trees) and not self._over():
            if self._waiting and len(self._trees) < min(self._most, together):
                self._plant(self._waiting.pop(0))
            elif self.work >= work:
                return None
            elif self._is_worth_sharing():
                self._share(work - self.work)
            else:
                for polytope, tree in list(self._trees.items()):
                    tree.advance()
                    self._take_note(polytope)
                    if self._over():
                        break
        if self._budget.over():
            for polytope, tree in self._trees.items():
                self.lower[polytope] = tree.bound(lambda: self._budget.left() < -_LATE)
            return IN_TIME
        if State.FULL in self._ended:
            return SearchEnd(Reason.MEMORY, "the open sub-problems took too much memory")
        return SearchEnd(
            Reason.INCOMPLETE, "there are sub-problems whose margin is too near to zero for further splits"
        )

    @property
    def open(self) -> list[int]:
        """The polytopes whose trees are not decided, those first whose trees have begun."""
        return [*self._trees, *self._waiting]

    def least_closed(self) -> tuple[float, int]:
        """Return the least part of an open tree that is closed, and that tree's polytope."""
        return min(((tree.now.closed, number) for number, tree in self._trees.items()), default=(0.0, -1))

    def spent(self, polytope: int) -> float:
        """Return the work that a polytope's tree has taken."""
        return self._counted[polytope][1]

    @property
    def nodes(self) -> int:
        """The number of sub-problems that have been bounded."""
        return sum(nodes for nodes, _ in self._counted.values())

    @property
    def work(self) -> float:
        """The work that the trees have taken."""
        return sum(work for _, work in self._counted.values())

    def _over(self) -> bool:
        return self._candidates.found is not None or self._budget.over()

    def _is_worth_sharing(self) -> bool:
        """Return True if there is work enough for every process."""
        if self._processes == 1 or self.work < self._alone:
            return False
        trees = [tree.now for tree in self._trees.values() if len(tree.now.open) >= self._processes]
        ahead = sum(now.work * (1 / max(_LEAST, now.closed) - 1) for now in trees)
        return bool(trees) and ahead >= _WORTH * self._budget.solo_work

    def _share(self, work: float) -> None:
        """Go on with all trees in several processes, until one of these has nothing left, or for some work."""
        trees, count = self._trees, self._processes
        hands = {polytope: tree.now.open.dealt(count) for polytope, tree in trees.items()}

        def share(number: int, pause: Callable[[], bool]) -> tuple[dict[int, TreeProgress], Outcome | None]:
            for polytope, tree in trees.items():
                tree.begin_part(hands[polytope][number])
            is_open = [tree for tree in trees.values() if len(tree.now.open)]
            while is_open and not self._over():
                for tree in is_open:
                    tree.advance()
                    if self._over():
                        break
                is_open = [tree for tree in is_open if tree.now.state is State.OPEN]
                # Asked after some progress, so that there is some however soon others have ended.
                if pause() or count * sum(tree.now.work for tree in trees.values()) >= work:
                    break
            return {polytope: tree.end_part() for polytope, tree in trees.items()}, self._candidates.found

        began = time.perf_counter()
        found = run_shares([partial(share, number) for number in range(count)], self._budget.left)
        for number, one in enumerate(found):
            ended, counterexample = one or ({}, None)
            for polytope, tree in trees.items():
                tree.take_part(ended.get(polytope), hands[polytope][number])
            self._candidates.found = self._candidates.found or counterexample
        if None in found:
            self._processes = 1
        for polytope in list(trees):
            self._take_note(polytope)
        if time.perf_counter() - began < _SHORT:
            self._alone = self.work + self._budget.solo_work

    def _plant(self, polytope: int) -> None:
        query, candidates = self.query, self._candidates
        reached = lambda e, *descend: candidates.reached(query.folded.point(e), *descend)  # noqa: E731
        decide = candidates.decider(polytope, query.folded.places)
        rest = (self._budget.left, self._options, self._memory, decide, self._keep)
        self._trees[polytope] = PhaseTree(query.strip(polytope), query.parts[polytope].scale, reached, *rest)
        self._take_note(polytope)

    def _take_note(self, polytope: int) -> None:
        """Take note of what has become of a tree, and drop it when it has ended."""
        tree = self._trees[polytope]
        self._counted[polytope] = tree.now.nodes, tree.now.work
        if tree.now.state is State.PROVED:
            self.lower[polytope] = tree.lower
            recorded = tree.certified(self._candidates.query.network.activations)
            if recorded is not None:
                self.recorded[polytope] = recorded
        if tree.now.state is not State.OPEN:
            self._ended.add(tree.now.state)
            del self._trees[polytope]
        if self._trees:
            self._budget.report_progress({"sub-problems": self.nodes, "closed": self.least_closed()[0]})


_GROWTH = 4
"""Each refinement has this multiple of the leaves of the one before."""

_TRUST = 8.0
"""The weight of the part that trees with better relaxations have closed, before a refinement."""

_LAST, _SMALL = Branching(steps=6, adaptive=1 << 20, choices=8), 0.5
"""How trees are searched when no refinement follows, if refinements leave at most this part of the neurons unstable.

Where refinements do little, as on convolutions, so many steps for every node do harm.
"""


@dataclass(frozen=True)
class Schedule:
    """How trees and refinements take turns.

    Attributes:
        refinement: the first one; None for trees alone.
        better: the search for better relaxations, by cuts over neurons or by lines alone; None for none.
        hard: how trees with better relaxations are searched; None for as all others.
        tried: whether all trees get better relaxations only where one of them closes more than the tree before.
        first: work that the trees of a query may take before a refinement is thought of (``loop.TreeProgress``); before
            better relaxations are, one tree takes its share of it.
        still: better relaxations are searched for where a tree has closed no more than this part by then.
        patience: how much work the trees get before a refinement, as a multiple of the refinement's and of the part of
            the trees that is closed after ``first``.
        gain: another refinement is made only where the last one made the intervals of all neurons together narrower by
            this part.
    """

    refinement: Refinement | None = Refinement()  # noqa: RUF009 -- frozen
    better: Slopes | None = Above()  # noqa: RUF009 -- frozen
    hard: Branching | None = None
    tried: bool = True
    first: float = 2e9
    still: float = 0.1
    patience: float = 1.0
    gain: float = 0.02


@dataclass
class SearchResult:
    """The result of a search.

    Attributes:
        ended: why there may be something left.
        lower: by polytope a proven lower bound of its largest row, so far as one is known.
        nodes, rounds: how many sub-problems have been bounded, and how many refinements were made.
        recorded: by polytope the order of its rows, its tree, and the tighter bounds of neurons that were proven before
            it and after the polytope before it; where all of this is kept.
    """

    ended: SearchEnd
    lower: dict[int, float] = field(default_factory=dict)
    nodes: int = 0
    rounds: int = 0
    recorded: dict[int, tuple[list[int], Certified, Sequence[Tighter]]] = field(default_factory=dict)

    def open(self, query: FoldedQuery) -> list[int]:
        """Return the polytopes of a query that are not excluded."""
        return [polytope for polytope in query.parts if not self.lower.get(polytope, -math.inf) > 0]

    def add(self, trees: TreeScheduler, ended: SearchEnd, record: Refined | None) -> None:
        """Take what some more trees have found."""
        for polytope, value in trees.lower.items():
            self.lower[polytope] = max(value, self.lower.get(polytope, value))
        self.ended, self.nodes = ended, self.nodes + trees.nodes
        for polytope, tree in trees.recorded.items():
            done = sum(len(tighter) for _, _, tighter in self.recorded.values())
            tighter = record.records[done:] if record is not None else ()
            self.recorded[polytope] = trees.query.parts[polytope].order.tolist(), tree, tighter


class QuerySearch:
    """The search of one query: trees, refined bounds of its neurons, and trees of the tighter system.

    It ends with the first counterexample that ``candidates`` find. ``record`` keeps what proves tighter bounds; None if
    no proofs are kept.
    """

    def __init__(
        self,
        query: FoldedQuery,
        candidates: WitnessCheck,
        options: Branching,
        schedule: Schedule,
        budget: TimeBudget,
        record: Refined | None = None,
    ) -> None:
        self._query, self._candidates, self._options = query, candidates, options
        self._schedule, self._budget, self._record = schedule, budget, record
        # A neuron that no other one feeds has its exact interval.
        self._refinement = schedule.refinement if len(query.folded.blocks) > 1 and query.folded.whole else None
        self._size = query.folded.size
        self._done = 0.0
        self.found = SearchResult(IN_TIME)

    def run(self) -> SearchResult:
        """Take turns until the query is decided, or no time is left."""
        while True:
            self._search_trees()
            is_open = self.found.open(self._query)
            if self._refinement is None or self._candidates.found is not None or not is_open or self._budget.over():
                return self.found
            try:
                self._refine(self._refinement, is_open)
            except OutOfTime:
                self.found.ended = IN_TIME
                return self.found

    def _trees(self, query: FoldedQuery, polytopes: Sequence[int], options: Branching | None = None) -> TreeScheduler:
        options, keep = options or self._options, self._record is not None
        return TreeScheduler(query, polytopes, self._candidates, options, self._budget, keep, self._done)

    def _add(self, trees: TreeScheduler, ended: SearchEnd | None = None) -> None:
        self.found.add(trees, ended or IN_TIME, self._record)

    def _search_trees(self) -> None:
        """Search trees of the query as it is now, for as long as a refinement does not do more."""
        schedule, refinement, folded = self._schedule, self._refinement, self._query.folded
        trees = self._trees(self._query, self.found.open(self._query))
        ended = trees.search(schedule.first / max(1, len(trees.open)), together=1)
        # What the trees may take before a refinement does.
        work = math.inf if refinement is None else schedule.patience * refinement.work(folded)
        trust = 1.0
        if ended is None and trees.least_closed()[0] > schedule.still:
            ended = trees.search(schedule.first)
        if ended is None and schedule.better is not None and not folded.functions:
            better = self._better_trees(schedule.better, trees, work)
            if better is not None:
                trees, trust = better, _TRUST
        if ended is None:
            ended = trees.search(schedule.first)
        if ended is None and refinement is not None:
            ended = trees.search(min(1.0, trust * trees.least_closed()[0]) * work)
        elif ended is None and folded.size > _SMALL * self._size:
            ended = trees.search()
        self._add(trees, ended)
        if ended is None and refinement is None:
            last = self._trees(self._query, self.found.open(self._query), _LAST)
            self._add(last, last.search())
        self._done += trees.work

    def _better_trees(self, better: Slopes, trees: TreeScheduler, work: float) -> TreeScheduler | None:
        """Return trees with better relaxations, if one closes more with as much work than the least closed tree.

        Planes for all polytopes take longer than trees that are soon given up for a refinement, which takes ``work``.
        Nothing needs to be tried of what is always worth it.
        """
        hard, query = self._schedule.hard, self._query
        if not self._schedule.tried:
            self._add(trees)
            rest = self.found.open(query)
            return self._trees(query.with_relaxations(better, rest, self._budget), rest, hard)
        before, polytope = trees.least_closed()
        trial = self._trees(query.with_relaxations(better, [polytope], self._budget), [polytope], hard)
        ended = trial.search(trees.spent(polytope))
        closed = trial.least_closed()[0] if trial.open else 1.0
        if (ended is None and closed <= before) or closed * _TRUST * work < self._schedule.first:
            self._add(trial)
            return None
        self._add(trees)
        rest = [number for number in self.found.open(query) if not trial.lower.get(number, -math.inf) > 0]
        if rest == trial.open:
            return trial
        self._add(trial)
        return self._trees(trial.query.with_relaxations(better, rest, self._budget), rest, hard)

    def _refine(self, refinement: Refinement, polytopes: Sequence[int]) -> None:
        """Go on with tighter intervals of the neurons."""
        before = self._query
        self._query = before.refined(refinement, polytopes, self._budget, self._record)
        self.found.rounds += 1
        self._done += refinement.work(before.folded)
        worth_it = self._query.width < (1 - self._schedule.gain) * before.width
        self._refinement = replace(refinement, leaves=_GROWTH * refinement.leaves) if worth_it else None
