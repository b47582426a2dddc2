"""``bab``: branch and bound over the splits of unstable neurons, complete for piecewise-linear networks.

Smooth neurons are split at points of their pre-activations. No number of splits makes such a neuron linear, so that a
query whose margin is zero, or nearly so, stays unknown.

What bounds of whole boxes leave open is reduced to its inputs and unstable neurons, one query after the other
(``query``), and each polytope of the unsafe set that is left becomes a tree (``tree``). An *unsat* rests on bounds in
float64 with rounding accounted for, never on the result of a solver or of a search in float32.

**The search** takes turns between trees of a query's system and trees of tighter systems for what these leave open.
Which of the two decides a query is not known beforehand: on shallow networks trees over the first intervals; on deep
ones tighter intervals of the neurons do more than millions of sub-problems. So trees begin; those that have closed
almost nothing when they pause are given up for a refinement; the others get up to its work. Every round takes
more.

Before that, where a tree stands still, it is begun again with a better relaxation (``slopes``): hull cuts over its
neurons, or better slopes. Cuts bound the root much better, but not always what it is split into: all trees get theirs
where this one has closed more after the same work.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

import torch

from verifiable_relu.errors import OutOfTime, UnsupportedError, counted
from verifiable_relu.ir.functions.steps import StepFunction
from verifiable_relu.ir.linear import Gather
from verifiable_relu.ir.network import Affine, Elementwise, Network, Product, Sum
from verifiable_relu.search.bab.loop import Observer, TreeBegun, TreeEnded, TreeProgress, TreeState
from verifiable_relu.search.bab.query import ReducedQuery, Refinement, tree_bytes
from verifiable_relu.search.bab.slopes import Improve, better_slopes, hull_cuts
from verifiable_relu.search.bab.tree import Branching, PhaseTree
from verifiable_relu.search.budget import SOLO_WORK, TimeBudget
from verifiable_relu.search.outcomes import Outcome, Reason, Verdict
from verifiable_relu.search.piecewise_linear import require_piecewise_linear
from verifiable_relu.search.question import BoundedQuery, CompleteMethod
from verifiable_relu.search.witness import WitnessCheck
from verifiable_relu.supervisor.forks import most_shares, run_shares

_GROWTH = 4  # Each refinement has this multiple of the leaves of the one before
_TRUST = 8.0  # Weight of progress made by trees with better relaxations when deciding whether to refine
# How trees are searched when no refinement follows, if refinements leave at most this part of the neurons unstable.
# Where refinements do little, as on convolutions, this number of steps for every node does harm
_LAST, _SMALL = Branching(steps=6, adaptive_neurons=1 << 20, choices=8), 0.5
_LATE_S = 0.3  # Seconds that bounding the open nodes may take once the budget is spent
_LEAST = 1e-9  # Heuristic: the part of a tree that counts as closed, at least, where its work is estimated
_SHORT_S = 0.2  # Where the first process had nothing left after fewer seconds, copies are not made again at once
# Share trees among processes when their estimated remaining work exceeds this multiple of what one does alone
_WORTH = 3.0


@dataclass(frozen=True)
class Schedule:
    """Options that decide when trees are searched, relaxations improved, and neurons' intervals refined."""

    # The first refinement; None: trees alone
    refinement: Refinement | None = Refinement()  # noqa: RUF009 -- frozen
    improve: Improve | None = hull_cuts  # Makes tighter relaxations of polytopes; None: none
    # Options of trees with these relaxations; None: those of all other trees
    improved_branching: Branching | None = None
    # Improve one tree's relaxation first, and the others' only if that tree then closes more than before
    improve_after_trial: bool = True
    # Work (``TreeProgress``) of a query's trees before the first refinement, and of one tree, in its share, before
    # relaxations are improved
    first_work: float = 2e9
    # Relaxations are improved if a tree has closed at most this part of itself by then
    improve_below: float = 0.1
    # Work of the trees before a refinement, as a multiple of the refinement's work and of the part of the trees that is
    # closed after ``first_work``
    refinement_share: float = 1.0
    # Refine again only if the last refinement narrowed the intervals of all neurons together by this part
    least_gain: float = 0.02


RESIDUAL = Schedule(
    refinement=None,
    improve=better_slopes,
    improved_branching=Branching(choices=32, look_steps=0, look_until_nodes=4000),
    improve_after_trial=False,
    first_work=2e10,
)
"""For networks with shortcuts, where cuts and refinements take longer and gain less than trees in the same time."""


ENDS = {
    TreeState.OPEN: (Reason.TIMEOUT, "the time limit was reached"),
    TreeState.FULL: (Reason.MEMORY, "the open sub-problems took too much memory"),
    TreeState.STUCK: (Reason.INCOMPLETE, "there are sub-problems whose margin is too near to zero for further splits"),
}
"""Why a search ended that decides nothing."""


@dataclass
class SearchResult:
    """The result of a search, as far as it has come."""

    ended: TreeState = TreeState.OPEN  # Why there may be something left (``ENDS``)
    # By polytope a proven lower bound of its largest row, so far as one is known
    lower: dict[int, float] = field(default_factory=dict)
    # nodes, rounds: how many sub-problems have been bounded, and how many refinements were made
    nodes: int = 0
    rounds: int = 0
    work: float = 0.0  # What that took (``TreeProgress``)

    def prove(self, polytope: int, lower: float) -> None:
        """Take note of a lower bound of a polytope's largest row."""
        self.lower[polytope] = max(lower, self.lower.get(polytope, lower))

    def outcome(self, query: BoundedQuery, name: str, told: str) -> Outcome:
        """Return the claim of the method ``name`` if no counterexample was found; ``told`` is its detail."""
        margin = query.margin(self.lower)
        # Nothing but what was proved of every polytope decides.
        if margin > 0:
            proved = Verdict.UNSAT, Reason.PROVED, name, query.trust, margin
            return Outcome(*proved, detail=told, subproblems=self.nodes)
        (reason, detail), known = ENDS[self.ended], margin if margin > -math.inf else None
        return Outcome.unknown(reason, name, f"{detail} after {told}", margin=known, subproblems=self.nodes)


@dataclass(eq=False)
class QuerySearch:
    """The search of one query, which ends with the first counterexample that ``witness`` finds."""

    query: ReducedQuery
    witness: WitnessCheck
    options: Branching
    schedule: Schedule
    budget: TimeBudget
    observer: Observer | None = None
    found: SearchResult = field(default_factory=SearchResult)

    def __post_init__(self) -> None:
        system = self.query.system
        # A neuron that no other one feeds has its exact interval.
        self._refinement = self.schedule.refinement if len(system.blocks) > 1 and system.whole else None
        self._size = system.size

    def run(self) -> SearchResult:
        """Search trees and refine intervals in turn until the query is decided or no time is left."""
        while True:
            self._search_trees()
            rest = self._open()
            if self._refinement is None or self.witness.found is not None or not rest or self.budget.over():
                return self.found
            try:
                self._refine(self._refinement, rest)
            except OutOfTime:
                self.found.ended = TreeState.OPEN
                return self.found

    def _open(self) -> list[int]:
        return [polytope for polytope in self.query.parts if not self.found.lower.get(polytope, -math.inf) > 0]

    def _search_trees(self) -> None:
        """Search the current trees, for as long as a refinement is not worth more."""
        schedule, refinement, system = self.schedule, self._refinement, self.query.system
        trees, trust = TreeScheduler(self, self.query, self._open()), 1.0
        ended = trees.search(schedule.first_work / max(1, len(trees.open)), together=1)
        # What the trees may take before a refinement does.
        work = math.inf if refinement is None else schedule.refinement_share * refinement.work(system)
        if ended is None and trees.least_closed()[0] > schedule.improve_below:
            ended = trees.search(schedule.first_work)
        if ended is None and schedule.improve is not None and system.piecewise_linear:
            better = self._better_trees(schedule.improve, trees, work)
            if better is not None:
                trees, trust = better, _TRUST
        if ended is None:
            ended = trees.search(schedule.first_work)
        if ended is None and refinement is not None:
            ended = trees.search(min(1.0, trust * trees.least_closed()[0]) * work)
        elif ended is None:
            last = system.size <= _SMALL * self._size
            ended = (TreeScheduler(self, self.query, self._open(), _LAST) if last else trees).search()
        self.found.ended = ended or TreeState.OPEN

    def _better_trees(self, improve: Improve, trees: TreeScheduler, work: float) -> TreeScheduler | None:
        """Return trees with better relaxations, if one closes more with as much work as the least closed tree.

        With cuts for all polytopes, trees may take longer than a refinement, which takes ``work``, would.
        Without ``improve_after_trial`` all trees get better relaxations at once.
        """
        schedule, query = self.schedule, self.query
        if schedule.improve_after_trial:
            before, polytope = trees.least_closed()
            query = query.improved(improve, [polytope], self.budget)
            trial = TreeScheduler(self, query, [polytope], schedule.improved_branching)
            ended = trial.search(trees.spent(polytope))
            closed = trial.least_closed()[0] if trial.open else 1.0
            worse = ended is None and closed * trees.spent(polytope) <= before * trial.work
            if worse or closed * _TRUST * work < schedule.first_work:
                return None
            if self._open() == trial.open:
                return trial
        rest = self._open()
        return TreeScheduler(self, query.improved(improve, rest, self.budget), rest, schedule.improved_branching)

    def _refine(self, refinement: Refinement, polytopes: Sequence[int]) -> None:
        before = self.query
        self.query = before.refined(refinement, polytopes, self.budget, self.observer)
        self.found.rounds += 1
        self.found.work += refinement.work(before.system)
        worth_it = self.query.width < (1 - self.schedule.least_gain) * before.width
        self._refinement = replace(refinement, leaves=_GROWTH * refinement.leaves) if worth_it else None


class TreeScheduler:
    """Scheduler of the trees of some polytopes, which are searched in turn, in one process or several."""

    def __init__(
        self, search: QuerySearch, query: ReducedQuery, polytopes: Sequence[int], options: Branching | None = None
    ) -> None:
        self._query, self._options, self._observer = query, options or search.options, search.observer
        self._witness, self._found, self._budget = search.witness, search.found, search.budget
        self._waiting = list(polytopes)
        self._trees: dict[int, PhaseTree] = {}
        self._ended: set[TreeState] = set()
        self._counted: dict[int, tuple[int, float]] = {}
        system, budget = query.system, search.budget
        self._most = max(1, min(len(polytopes), budget.memory // tree_bytes(system.inputs, system.size)))
        # Every process holds the trees' nodes, and of the nodes that it is dealt the children.
        # An observer is told by this process alone.
        alone = search.observer is not None or system.lower.device.type != "cpu" or not system.piecewise_linear
        self._alone, self._processes = budget.solo_work - search.found.work, 1 if alone else budget.processes
        self._memory = budget.memory // self._most * self._processes

    def search(self, work: float = math.inf, together: int = sys.maxsize) -> TreeState | None:
        """Go on with every tree in turn, at most ``together`` at once, until all are decided or time is up.

        The search pauses, too, once its trees have taken some ``work`` (``TreeProgress``). Returned is why there may be
        something left; None if the search has only paused.
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
                    tree.loop.advance()
                    self._take_note(polytope)
                    if self._over():
                        break
        if self._budget.over():
            for polytope, tree in self._trees.items():
                lower = tree.bound(lambda: self._budget.left() < -_LATE_S)
                self._found.prove(polytope, lower)
                if self._observer is not None:
                    self._observer(TreeEnded(tree.loop.relaxation, lower > 0))
            return TreeState.OPEN
        return TreeState.FULL if TreeState.FULL in self._ended else TreeState.STUCK

    @property
    def open(self) -> list[int]:
        """The polytopes that are not decided, those first whose trees have begun."""
        return [*self._trees, *self._waiting]

    def least_closed(self) -> tuple[float, int]:
        """Return the smallest closed part of any open tree, and that tree's polytope."""
        return min(((tree.loop.now.closed, number) for number, tree in self._trees.items()), default=(0.0, -1))

    def spent(self, polytope: int) -> float:
        """Return the work that a polytope's tree has taken."""
        return self._counted[polytope][1]

    @property
    def work(self) -> float:
        """The work that the trees have taken."""
        return sum(work for _, work in self._counted.values())

    def _over(self) -> bool:
        return self._witness.found is not None or self._budget.over()

    def _is_worth_sharing(self) -> bool:
        if self._processes == 1 or self.work < self._alone:
            return False
        trees = [tree.loop.now for tree in self._trees.values() if len(tree.loop.now.open) >= self._processes]
        ahead = sum(now.work * (1 / max(_LEAST, now.closed) - 1) for now in trees)
        return bool(trees) and ahead >= _WORTH * self._budget.solo_work

    def _share(self, work: float) -> None:
        """Search all trees in several processes until one has no nodes left, or ``work`` is done."""
        trees, count = {polytope: tree.loop for polytope, tree in self._trees.items()}, self._processes
        hands = {polytope: loop.now.open.deal(count) for polytope, loop in trees.items()}

        def share(number: int, pause: Callable[[], bool]) -> tuple[dict[int, TreeProgress], Outcome | None]:
            for polytope, loop in trees.items():
                loop.begin_part(hands[polytope][number])
            is_open = [loop for loop in trees.values() if len(loop.now.open)]
            while is_open and not self._over():
                for loop in is_open:
                    loop.advance()
                    if self._over():
                        break
                is_open = [loop for loop in is_open if loop.now.state is TreeState.OPEN]
                # Asked after some progress, so that there is some however soon others have ended.
                if pause() or count * sum(loop.now.work for loop in trees.values()) >= work:
                    break
            return {polytope: loop.end_part() for polytope, loop in trees.items()}, self._witness.found

        began = time.perf_counter()
        found = run_shares([partial(share, number) for number in range(count)], self._budget.left)
        for number, one in enumerate(found):
            ended, counterexample = one or ({}, None)
            for polytope, loop in trees.items():
                loop.take_part(ended.get(polytope), hands[polytope][number])
            self._witness.found = self._witness.found or counterexample
        if None in found:
            self._processes = 1
        for polytope in trees:
            self._take_note(polytope)
        if time.perf_counter() - began < _SHORT_S:
            self._alone = self.work + self._budget.solo_work

    def _plant(self, polytope: int) -> None:
        query, witness = self._query, self._witness
        reached = lambda e, *descend: witness.reached(query.system.point(e), *descend)  # noqa: E731
        decide = witness.decider(polytope, query.system.places) if witness.decider is not None else None
        rest = (self._budget.left, self._options, self._memory, decide, self._observer)
        part, relaxation = query.parts[polytope], query.relaxation(polytope)
        if self._observer is not None:
            self._observer(TreeBegun(relaxation, polytope, part.order, part.scale))
        self._trees[polytope] = PhaseTree(relaxation, part.scale, reached, *rest)
        self._take_note(polytope)

    def _take_note(self, polytope: int) -> None:
        """Record a tree's progress, and drop the tree when it has ended."""
        tree, now = self._trees[polytope], self._trees[polytope].loop.now
        nodes, work = self._counted.get(polytope, (0, 0.0))
        self._counted[polytope] = now.nodes, now.work
        self._found.nodes, self._found.work = self._found.nodes + now.nodes - nodes, self._found.work + now.work - work
        if now.state is TreeState.PROVED:
            self._found.prove(polytope, float(now.lower[0]))
        if now.state is not TreeState.OPEN:
            if self._observer is not None:
                self._observer(TreeEnded(tree.loop.relaxation, now.state is TreeState.PROVED))
            self._ended.add(now.state)
            del self._trees[polytope]
        if self._trees:
            self._budget.report_progress({"sub-problems": self._found.nodes, "closed": self.least_closed()[0]})


@dataclass(frozen=True)
class Bab(CompleteMethod):
    """Branch and bound on one relaxation for each polytope of the unsafe set."""

    ascent_steps: int = 2  # As of ``CompleteMethod``, where all neurons are piecewise linear
    search: Branching = field(default_factory=Branching)  # How trees are searched
    # How trees and tighter intervals of neurons take turns; None for a choice by the network
    schedule: Schedule | None = None
    # The work (``TreeProgress``) that one process does alone before others share the rest
    solo_work: float = field(default=SOLO_WORK, repr=False)

    name: ClassVar[str] = "bab"

    def fits(self, inputs: int, neurons: float, memory: int) -> bool:
        """Return True if ``memory`` suffices for a query's trees, with these varying inputs and unstable neurons."""
        return neurons < memory and tree_bytes(inputs, int(neurons)) <= memory / 2

    def takes(self, network: Network) -> bool:
        """Return True if neurons of every function of a network can be split."""
        try:
            self.require(network)
        except UnsupportedError:
            return False
        return True

    def require(self, network: Network) -> None:
        if any(isinstance(op, Product) for op in network.ops):
            require_piecewise_linear(network)
        for op in network.ops:
            if isinstance(op, Elementwise) and isinstance(op.function, StepFunction):
                raise UnsupportedError("step functions are not split", place=op.place)

    def decide(self, query: BoundedQuery, budget: TimeBudget) -> Outcome:
        # A device other than the CPU works for one process.
        processes = most_shares(budget.processes) if torch.device(budget.device).type == "cpu" else 1
        within = replace(budget, memory=budget.memory // 2, solo_work=self.solo_work, processes=processes)
        witness = WitnessCheck(query.network, query.prop, self.name)
        with torch.no_grad():
            reduced = query.reduced(budget.over, budget.device)
            if reduced is None:
                # A polytope without rows is the whole space.
                return witness.anywhere()
            schedule = self.schedule or (RESIDUAL if has_shortcuts(query.network) else Schedule())
            found = QuerySearch(reduced, witness, self.search, schedule, within, query.observer).run()
        query.learn(found.lower)
        told = f"{counted(found.nodes, 'sub-problem')}, {counted(found.rounds, 'refinement')}"
        if witness.found is not None:
            return replace(witness.found, detail=told, subproblems=found.nodes)
        return found.outcome(query, self.name, told)


def has_shortcuts(network: Network) -> bool:
    """Return True if the network adds computed values to each other, as residual networks do."""
    moved = {i for i, op in enumerate(network.ops) if isinstance(op, Affine) and isinstance(op.map, Gather)}
    return any(isinstance(op, Sum) and not moved.issuperset(op.inputs) for op in network.ops)
