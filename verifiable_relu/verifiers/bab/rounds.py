"""Trees and refinements in turn: what the trees of one system leave open, trees of a tighter system go on with.

Which of the two decides a query is not known beforehand. On shallow networks trees over the first bounds do, on deep
ones tighter bounds of the neurons do more than millions of sub-problems. So trees begin; those that have closed nothing
worth mentioning when they pause are given up for a refinement, the others get up to its work. Every round takes more.

Before that, one tree is begun a second time with planes over its neurons (``above``). These bound the root much better,
but not always what it is split into: all trees get planes where this one has closed more after the same work.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from verifiable_relu.errors import OutOfTime
from verifiable_relu.trust.certificate import Tighter, Tree
from verifiable_relu.verifiers.bab.above import Above
from verifiable_relu.verifiers.bab.forest import Candidates, Ended, Forest
from verifiable_relu.verifiers.bab.limits import Limits
from verifiable_relu.verifiers.bab.recorded import Refined
from verifiable_relu.verifiers.bab.refine import Refinement
from verifiable_relu.verifiers.bab.system import System
from verifiable_relu.verifiers.bab.tree import Search
from verifiable_relu.verifiers.base import Reason


@dataclass(frozen=True)
class Rounds:
    """How trees and refinements take turns.

    Attributes:
        refinement: the first one; None for trees alone.
        above: the search for planes over neurons; None for none.
        first: work that the trees of a query may take before a refinement is thought of (``Tree.work``); before planes
            are, one tree takes its share of it.
        patience: how much work the trees get before a refinement, as a multiple of the refinement's and of the part of
            the trees that is closed after ``first``.
        last: how the trees of a system are searched that are open after ``first`` when no refinement follows, if
            refinements have left it at most the part ``small`` of its unstable neurons.
        small: see ``last``. Where refinements do little, as on convolutions, so many steps for every node do harm.
        growth: how many times as many leaves each refinement has as the one before.
        gain: another refinement is made only where the last one made the intervals of all neurons together narrower by
            this part.
    """

    refinement: Refinement | None = Refinement()  # noqa: RUF009 -- frozen
    above: Above | None = Above()  # noqa: RUF009 -- frozen
    first: float = 2e9
    patience: float = 1.0
    last: Search = Search(steps=6, adaptive=1 << 20, choices=8)  # noqa: RUF009 -- frozen
    small: float = 0.5
    growth: int = 4
    gain: float = 0.02


@dataclass(frozen=True)
class Searched:
    """What trees have found.

    Attributes:
        lower: by polytope a proven lower bound of its largest row, so far as one is known.
        ended: why there may be something left.
        nodes: how many sub-problems have been bounded.
        rounds: how many refinements were made.
        recorded: by polytope the order of its rows, its tree, and how many of ``tighter`` come before it,
            where these are recorded.
        tighter: tighter bounds of neurons, where these are recorded.
    """

    lower: dict[int, float]
    ended: Ended
    nodes: int
    rounds: int
    recorded: Mapping[int, tuple[list[int], Tree, int]] = field(default_factory=dict)
    tighter: Sequence[Tighter] = ()

    def open(self, system: System) -> list[int]:
        """The polytopes of a system that are not excluded."""
        return [polytope for polytope in system.parts if not self.lower.get(polytope, -math.inf) > 0]

    def and_trees(self, forest: Forest, ended: Ended) -> Searched:
        """With what the trees of one more forest have found."""
        lower = dict(self.lower)
        for polytope, value in forest.lower.items():
            lower[polytope] = max(value, lower.get(polytope, value))
        count = len(self.tighter)
        trees = {number: (forest.order(number), recorded, count) for number, recorded in forest.recorded.items()}
        recorded = {**self.recorded, **trees}
        return replace(self, lower=lower, ended=ended, nodes=self.nodes + forest.nodes, recorded=recorded)


_TRUST = 8.0
"""What the part counts that trees with planes have closed, beside that of others, when a refinement is thought of."""

_IN_TIME = Ended(Reason.TIMEOUT, "the budget ran out")


def search(system: System, candidates: Candidates, options: Search, rounds: Rounds, limits: Limits) -> Searched:
    """Search the trees of a query, refining the bounds of its neurons now and then, until it is decided.

    Args:
        system: where the trees start.
        candidates: where points are judged; the search ends with the first counterexample.
        options: how each tree is searched.
        rounds: how trees and refinements take turns.
        limits: what the search may use.
    """
    found = Searched({}, _IN_TIME, 0, 0)
    # A neuron that no other one feeds has its exact interval.
    refinement = rounds.refinement if len(system.folded.blocks) > 1 else None
    record = Refined(candidates.query.network.activations) if options.record else None
    size = system.folded.size
    while True:
        # A refinement does more than a linear program for each of many nodes.
        mine = options if refinement is None else replace(options, exact=0.0)
        forest = Forest(system, found.open(system), candidates, mine, limits)
        ended = forest.search(rounds.first / max(1, len(forest.open)), together=1)
        # What the trees may take before a refinement does.
        work = math.inf if refinement is None else rounds.patience * refinement.work(system.folded)
        outdone = False
        if ended is None and rounds.above is not None and not system.folded.functions:
            trial = _Trial(system, rounds.above, candidates, mine, limits)
            # Planes for all polytopes take longer than trees that are soon given up for a refinement.
            outdone = trial.outdoes(forest) and trial.closed * _TRUST * work >= rounds.first
            if outdone:
                found = found.and_trees(forest, _IN_TIME)
                forest = trial.forest(found.open(system))
            if forest is not trial.tried:
                found = found.and_trees(trial.tried, _IN_TIME)
        if ended is None:
            ended = forest.search(rounds.first)
        part = min(1.0, _TRUST * forest.closed) if outdone else forest.closed
        if ended is None and refinement is not None:
            ended = forest.search(part * work)
        elif ended is None and system.folded.size > rounds.small * size:
            ended = forest.search()
        found = found.and_trees(forest, ended or _IN_TIME)
        if ended is None and refinement is None:
            last = replace(rounds.last, record=options.record)
            forest = Forest(system, found.open(system), candidates, last, limits)
            found = found.and_trees(forest, forest.search() or _IN_TIME)
        is_open = found.open(system)
        if refinement is None or candidates.found is not None or not is_open or limits.over():
            return found
        try:
            tighter = system.refined(refinement, is_open, limits, record)
        except OutOfTime:
            return replace(found, ended=_IN_TIME)
        proven = () if record is None else tuple(record.records)
        found = replace(found, rounds=found.rounds + 1, tighter=proven)
        limits = replace(limits, done=limits.done + forest.work + refinement.work(system.folded))
        worth_it = _width(tighter) < (1 - rounds.gain) * _width(system)
        system = tighter
        refinement = replace(refinement, leaves=rounds.growth * refinement.leaves) if worth_it else None


class _Trial:
    """Trees with planes over their neurons, tried on one polytope before others get them.

    Args:
        system: where the trees start.
        above: the search for planes.
        candidates, search, limits: as ``Forest`` takes them.

    Attributes:
        polytope: the one polytope.
        tried: its tree.
    """

    def __init__(
        self,
        system: System,
        above: Above,
        candidates: Candidates,
        search: Search,
        limits: Limits,
    ) -> None:
        self._system, self._above, self._limits = system, above, limits
        self._rest = candidates, search, limits

    @property
    def closed(self) -> float:
        """The part of the tree with planes that is closed."""
        return self.tried.closed_of(self.polytope) if self.tried.open else 1.0

    def outdoes(self, forest: Forest) -> bool:
        """Whether planes close more of a polytope, with as much work, than the tree that a forest has begun."""
        self.polytope = polytope = forest.open[0]
        self.tried = self._planted([polytope])
        ended = self.tried.search(forest.work)
        return ended is not None or self.tried.closed > forest.closed_of(polytope)

    def forest(self, polytopes: Sequence[int]) -> Forest:
        """Trees with planes for polytopes that are still open."""
        rest = [polytope for polytope in polytopes if not self.tried.lower.get(polytope, -math.inf) > 0]
        return self.tried if rest == self.tried.open else self._planted(rest)

    def _planted(self, polytopes: Sequence[int]) -> Forest:
        bare = [polytope for polytope in polytopes if self._system.parts[polytope].planes is None]
        self._system = self._system.with_planes(self._above, bare, self._limits)
        return Forest(self._system, polytopes, *self._rest)


def _width(system: System) -> float:
    """The widths of all intervals of unstable neurons together."""
    return float((system.folded.upper - system.folded.lower).sum())
