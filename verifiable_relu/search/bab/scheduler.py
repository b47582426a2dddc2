"""The trees of the open polytopes of one query, which go on in turn, in one process or several."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from verifiable_relu.search.bab.events import Observer, TreeBegun, TreeEnded
from verifiable_relu.search.bab.loop import State, TreeProgress
from verifiable_relu.search.bab.query import ReducedQuery
from verifiable_relu.search.bab.tree import Branching, PhaseTree
from verifiable_relu.search.bab.witness import WitnessCheck
from verifiable_relu.search.budget import TimeBudget
from verifiable_relu.search.outcomes import Outcome, Reason
from verifiable_relu.supervisor.forks import run_shares

_LATE_S = 0.3
"""Seconds that bounding the open nodes may take once the budget is spent."""

_LEAST = 1e-9
"""Heuristic: the part of a tree that counts as closed, at least, where its work is estimated."""

_SHORT_S = 0.2
"""Where the first process had nothing left after fewer seconds, copies are not made again at once."""

_WORTH = 3.0
"""Share trees among processes when their estimated remaining work exceeds this multiple of what one does alone."""


@dataclass(frozen=True)
class SearchEnd:
    """Why a search ended that decides nothing."""

    reason: Reason
    detail: str


IN_TIME = SearchEnd(Reason.TIMEOUT, "the budget ran out")
_FULL = SearchEnd(Reason.MEMORY, "the open sub-problems took too much memory")
_STUCK = SearchEnd(Reason.INCOMPLETE, "there are sub-problems whose margin is too near to zero for further splits")


class TreeScheduler:
    """The trees of some polytopes of one query.

    Args:
        query: the query.
        polytopes: to be excluded.
        witness: tests points that trees come across.
        options: of the trees.
        budget: of their work.
        observer: told of events.
        done: the work that has been done before.

    Attributes:
        query: as above.
        lower: by polytope a proven lower bound of its largest row, so far as it is known.
    """

    def __init__(
        self,
        query: ReducedQuery,
        polytopes: Sequence[int],
        witness: WitnessCheck,
        options: Branching,
        budget: TimeBudget,
        observer: Observer | None = None,
        done: float = 0.0,
    ) -> None:
        self.query, self._witness, self._options, self._budget = query, witness, options, budget
        self._observer = observer
        self.lower: dict[int, float] = {}
        self._waiting = list(polytopes)
        self._trees: dict[int, PhaseTree] = {}
        self._ended: set[State] = set()
        self._counted: dict[int, tuple[int, float]] = {}
        self._most = max(1, min(len(polytopes), budget.memory // query.tree_bytes()))
        # Every process holds the trees' nodes, and of the nodes that it is dealt the children.
        # An observer is told by this process alone.
        alone = observer is not None or query.system.lower.device.type != "cpu" or not query.system.piecewise_linear
        self._alone, self._processes = budget.solo_work - done, 1 if alone else budget.processes
        self._memory = budget.memory // self._most * self._processes

    def search(self, work: float = math.inf, together: int = sys.maxsize) -> SearchEnd | None:
        """Go on with every tree in turn, at most ``together`` at once, until all are decided or time is up.

        The search pauses, too, once its trees have taken some ``work`` (``TreeProgress``). Returned is why there may be
        something left; None if the search only paused, and can go on.
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
                self.lower[polytope] = tree.bound(lambda: self._budget.left() < -_LATE_S)
            return IN_TIME
        return _FULL if State.FULL in self._ended else _STUCK

    @property
    def open(self) -> list[int]:
        """The polytopes whose trees are not decided, those first whose trees have begun."""
        return [*self._trees, *self._waiting]

    def least_closed(self) -> tuple[float, int]:
        """Return the least part of an open tree that is closed, and that tree's polytope."""
        return min(((tree.loop.now.closed, number) for number, tree in self._trees.items()), default=(0.0, -1))

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
        return self._witness.found is not None or self._budget.over()

    def _is_worth_sharing(self) -> bool:
        """Return True if there is work enough for every process."""
        if self._processes == 1 or self.work < self._alone:
            return False
        trees = [tree.loop.now for tree in self._trees.values() if len(tree.loop.now.open) >= self._processes]
        ahead = sum(now.work * (1 / max(_LEAST, now.closed) - 1) for now in trees)
        return bool(trees) and ahead >= _WORTH * self._budget.solo_work

    def _share(self, work: float) -> None:
        """Go on with all trees in several processes, until one of these has nothing left, or for some work."""
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
                is_open = [loop for loop in is_open if loop.now.state is State.OPEN]
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
        query, witness = self.query, self._witness
        reached = lambda e, *descend: witness.reached(query.system.point(e), *descend)  # noqa: E731
        decide = witness.decider(polytope, query.system.places) if witness.decider is not None else None
        rest = (self._budget.left, self._options, self._memory, decide, self._observer)
        part, relaxation = query.parts[polytope], query.relaxation(polytope)
        if self._observer is not None:
            self._observer(TreeBegun(relaxation, polytope, part.order, part.scale))
        self._trees[polytope] = PhaseTree(relaxation, part.scale, reached, *rest)
        self._take_note(polytope)

    def _take_note(self, polytope: int) -> None:
        """Take note of what has become of a tree, and drop it when it has ended."""
        tree, now = self._trees[polytope], self._trees[polytope].loop.now
        self._counted[polytope] = now.nodes, now.work
        if now.state is State.PROVED:
            self.lower[polytope] = tree.lower
        if now.state is not State.OPEN:
            if self._observer is not None:
                self._observer(TreeEnded(tree.loop.relaxation, now.state is State.PROVED))
            self._ended.add(now.state)
            del self._trees[polytope]
        if self._trees:
            self._budget.report_progress({"sub-problems": self.nodes, "closed": self.least_closed()[0]})
