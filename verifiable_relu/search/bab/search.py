"""The search that decides one query: trees of its system, and of tighter systems for what these leave open.

Which of the two decides a query is not known beforehand. On shallow networks trees over the first intervals do, on deep
ones tighter intervals of the neurons do more than millions of sub-problems. So trees begin; those that have closed
nothing worth mentioning when they pause are given up for a refinement, the others get up to its work. Every round takes
more.

Before that, where a tree stands still, it is begun again with a better relaxation (``slopes``): hull cuts over its
neurons, or better slopes. Cuts bound the root much better, but not always what it is split into: all trees get theirs
where this one has closed more after the same work.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from verifiable_relu.errors import OutOfTime
from verifiable_relu.search.bab.events import Observer
from verifiable_relu.search.bab.query import ReducedQuery
from verifiable_relu.search.bab.refine import Refinement
from verifiable_relu.search.bab.scheduler import IN_TIME, SearchEnd, TreeScheduler
from verifiable_relu.search.bab.slopes import Improve, better_slopes, hull_cuts
from verifiable_relu.search.bab.tree import Branching
from verifiable_relu.search.bab.witness import WitnessCheck
from verifiable_relu.search.budget import TimeBudget

_GROWTH = 4
"""Each refinement has this multiple of the leaves of the one before."""

_TRUST = 8.0
"""Weight of progress made by trees with better relaxations when deciding whether to refine."""

_LAST, _SMALL = Branching(steps=6, adaptive=1 << 20, choices=8), 0.5
"""How trees are searched when no refinement follows, if refinements leave at most this part of the neurons unstable.

Where refinements do little, as on convolutions, so many steps for every node do harm.
"""


@dataclass(frozen=True)
class Schedule:
    """How trees and refinements take turns.

    Attributes:
        refinement: the first one; None for trees alone.
        improve: makes better relaxations; None for none.
        hard: how trees with better relaxations are searched; None for as all others.
        tried: whether all trees get better relaxations only where one of them closes more than the tree before.
        first: work that the trees of a query may take before a refinement is thought of (``TreeProgress``); before
            better relaxations are, one tree takes its share of it.
        improve_below: better relaxations are searched for where a tree has closed no more than this part by then.
        refinement_share: how much work the trees get before a refinement, as a multiple of the refinement's and of the
            part of the trees that is closed after ``first``.
        gain: another refinement is made only where the last one made the intervals of all neurons together narrower by
            this part.
    """

    refinement: Refinement | None = Refinement()  # noqa: RUF009 -- frozen
    improve: Improve | None = hull_cuts
    hard: Branching | None = None
    tried: bool = True
    first: float = 2e9
    improve_below: float = 0.1
    refinement_share: float = 1.0
    gain: float = 0.02


RESIDUAL = Schedule(
    refinement=None, improve=better_slopes, hard=Branching(choices=32, look=0, looked=4000), tried=False, first=2e10
)
"""For networks with shortcuts, where cuts and refinements take longer and gain less than trees in the same time."""


@dataclass
class SearchResult:
    """The result of a search.

    Attributes:
        ended: why there may be something left.
        lower: by polytope a proven lower bound of its largest row, so far as one is known.
        nodes, rounds: how many sub-problems have been bounded, and how many refinements were made.
    """

    ended: SearchEnd
    lower: dict[int, float] = field(default_factory=dict)
    nodes: int = 0
    rounds: int = 0

    def open(self, query: ReducedQuery) -> list[int]:
        """Return the polytopes of a query that are not excluded."""
        return [polytope for polytope in query.parts if not self.lower.get(polytope, -math.inf) > 0]

    def add(self, trees: TreeScheduler, ended: SearchEnd | None = None) -> None:
        """Take what some more trees have found."""
        for polytope, value in trees.lower.items():
            self.lower[polytope] = max(value, self.lower.get(polytope, value))
        self.ended, self.nodes = ended or IN_TIME, self.nodes + trees.nodes


class QuerySearch:
    """The search of one query, which ends with the first counterexample that ``witness`` finds."""

    def __init__(
        self,
        query: ReducedQuery,
        witness: WitnessCheck,
        options: Branching,
        schedule: Schedule,
        budget: TimeBudget,
        observer: Observer | None = None,
    ) -> None:
        self._query, self._witness, self._options = query, witness, options
        self._schedule, self._budget, self._observer = schedule, budget, observer
        # A neuron that no other one feeds has its exact interval.
        self._refinement = schedule.refinement if len(query.system.blocks) > 1 and query.system.whole else None
        self._size = query.system.size
        self._done = 0.0
        self.found = SearchResult(IN_TIME)

    def run(self) -> SearchResult:
        """Take turns until the query is decided, or no time is left."""
        while True:
            self._search_trees()
            is_open = self.found.open(self._query)
            if self._refinement is None or self._witness.found is not None or not is_open or self._budget.over():
                return self.found
            try:
                self._refine(self._refinement, is_open)
            except OutOfTime:
                self.found.ended = IN_TIME
                return self.found

    def _trees(self, query: ReducedQuery, polytopes: Sequence[int], options: Branching | None = None) -> TreeScheduler:
        rest = (self._budget, self._observer, self._done)
        return TreeScheduler(query, polytopes, self._witness, options or self._options, *rest)

    def _search_trees(self) -> None:
        """Search trees of the query as it is now, for as long as a refinement does not do more."""
        schedule, refinement, system = self._schedule, self._refinement, self._query.system
        trees = self._trees(self._query, self.found.open(self._query))
        ended = trees.search(schedule.first / max(1, len(trees.open)), together=1)
        # What the trees may take before a refinement does.
        work = math.inf if refinement is None else schedule.refinement_share * refinement.work(system)
        trust = 1.0
        if ended is None and trees.least_closed()[0] > schedule.improve_below:
            ended = trees.search(schedule.first)
        if ended is None and schedule.improve is not None and system.piecewise_linear:
            better = self._better_trees(schedule.improve, trees, work)
            if better is not None:
                trees, trust = better, _TRUST
        if ended is None:
            ended = trees.search(schedule.first)
        if ended is None and refinement is not None:
            ended = trees.search(min(1.0, trust * trees.least_closed()[0]) * work)
        elif ended is None and system.size > _SMALL * self._size:
            ended = trees.search()
        self.found.add(trees, ended)
        if ended is None and refinement is None:
            last = self._trees(self._query, self.found.open(self._query), _LAST)
            self.found.add(last, last.search())
        self._done += trees.work

    def _better_trees(self, improve: Improve, trees: TreeScheduler, work: float) -> TreeScheduler | None:
        """Return trees with better relaxations, if one closes more with as much work than the least closed tree.

        Cuts for all polytopes take longer than trees that are soon given up for a refinement, which takes ``work``.
        Nothing needs to be tried of what is always worth it.
        """
        hard, query = self._schedule.hard, self._query
        if not self._schedule.tried:
            self.found.add(trees)
            rest = self.found.open(query)
            return self._trees(query.improved(improve, rest, self._budget), rest, hard)
        before, polytope = trees.least_closed()
        trial = self._trees(query.improved(improve, [polytope], self._budget), [polytope], hard)
        ended = trial.search(trees.spent(polytope))
        closed = trial.least_closed()[0] if trial.open else 1.0
        if (ended is None and closed <= before) or closed * _TRUST * work < self._schedule.first:
            self.found.add(trial)
            return None
        self.found.add(trees)
        rest = [number for number in self.found.open(query) if not trial.lower.get(number, -math.inf) > 0]
        if rest == trial.open:
            return trial
        self.found.add(trial)
        return self._trees(trial.query.improved(improve, rest, self._budget), rest, hard)

    def _refine(self, refinement: Refinement, polytopes: Sequence[int]) -> None:
        """Go on with tighter intervals of the neurons."""
        before = self._query
        self._query = before.refined(refinement, polytopes, self._budget, self._observer)
        self.found.rounds += 1
        self._done += refinement.work(before.system)
        worth_it = self._query.width < (1 - self._schedule.gain) * before.width
        self._refinement = replace(refinement, leaves=_GROWTH * refinement.leaves) if worth_it else None
