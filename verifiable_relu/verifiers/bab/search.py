"""The search that decides one query: trees of its system, and of tighter systems for what these leave open.

Which of the two decides a query is not known beforehand. On shallow networks trees over the first bounds do, on deep
ones tighter bounds of the neurons do more than millions of sub-problems. So trees begin; those that have closed nothing
worth mentioning when they pause are given up for a refinement, the others get up to its work. Every round takes more.

Before that, where a tree stands still, it is begun again with a better relaxation (``slopes``): planes over its
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
from verifiable_relu.verifiers.attack import claim
from verifiable_relu.verifiers.bab.ascent import Nodes
from verifiable_relu.verifiers.bab.loop import State, TreeProgress
from verifiable_relu.verifiers.bab.query import FoldedQuery
from verifiable_relu.verifiers.bab.recorded import Refined
from verifiable_relu.verifiers.bab.refine import Refinement
from verifiable_relu.verifiers.bab.slopes import Above, Slopes
from verifiable_relu.verifiers.bab.tree import Branching, Decide, PhaseTree
from verifiable_relu.verifiers.base import Outcome, Reason, TimeBudget

_LATE = 0.3
"""Seconds that bounding what is open may take once the budget is spent."""

_LEAST = 1e-9
"""Heuristic: the part of a tree that counts as closed, at least, where its work is estimated."""

_SHORT = 0.2
"""Seconds: where the first process had nothing left so soon, copies are not made again at once."""

_WORTH = 3.0
"""Trees are shared where so many times the work that they take alone, at least, seems to be left."""


class Candidates:
    """Points that a search comes across; the first one that is a counterexample in float64 is kept.

    Args:
        query: the question.
        method: who claims it.

    Attributes:
        found: the claim.
    """

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
        """The outcome of a property for which any point should do: the centre of the box is tried."""
        box = self.query.property.box
        self._take((box.lower + box.upper) / 2)
        return self.found or Outcome.unknown(Reason.UNCONFIRMED, self._method, "any point should do")

    def reached(self, points: Tensor) -> bool:
        """Whether a counterexample is known, be it one of the points (count, inputs) or found earlier."""
        y = self._network(points.reshape(-1, *self._network.input_shape)).flatten(1)
        margins = self._rows.margins(y @ self._rows.matrix.T - self._rows.bound)
        least = int(margins.argmin())
        if self.found is None and bool(margins[least] <= 0):
            self._take(points[least].numpy())
        return self.found is not None

    def near(self, point: Tensor) -> bool:
        """Whether a counterexample is known, be it the number of its own precision nearest to a point (1, inputs)."""
        if self.found is None:
            self._take(point[0].numpy())
        return self.found is not None

    def decider(self, polytope: int, places: Tensor) -> Decide | None:
        """Who decides the nodes of a polytope's tree that nothing else closes (``PhaseTree``); None for nobody.

        Args:
            polytope: as ``RowBatch`` counts them.
            places: (m, 2) the activation node of each neuron, and its number there.
        """
        return None

    def _take(self, point: np.ndarray) -> None:
        claimed = claim(self.query.network, self.query.property, point, self._method)
        if claimed is None or claimed.witness is None or claimed.margin is None:
            return
        if self.query.property.box.contains(claimed.witness) and (not self._strict or claimed.margin < 0):
            self.found = claimed


@dataclass(frozen=True)
class Ended:
    """Why a search ended that decides nothing."""

    reason: Reason
    detail: str


IN_TIME = Ended(Reason.TIMEOUT, "the budget ran out")


class Forest:
    """The trees of one query.

    Args:
        query: where they start.
        polytopes: which of its polytopes get a tree.
        candidates: where points are judged.
        options: how each tree is searched.
        budget: what all trees may use.
        keep: whether to keep what proves polytopes, for a certificate.
        done: the work that has been done already.

    Attributes:
        query: where the trees start.
        lower: by polytope a proven lower bound of its largest row, so far as it is known.
        recorded: by polytope its tree as it is written, if that is kept and all of its nodes are closed.
    """

    def __init__(
        self,
        query: FoldedQuery,
        polytopes: Sequence[int],
        candidates: Candidates,
        options: Branching,
        budget: TimeBudget,
        keep: bool = False,
        done: float = 0.0,
    ) -> None:
        self.query, self._candidates, self._options, self._left = query, candidates, options, budget.left
        self._keep = keep
        self.lower: dict[int, float] = {}
        self.recorded: dict[int, Certified] = {}
        self._waiting = list(polytopes)
        self._trees: dict[int, PhaseTree] = {}
        self._ended: set[State] = set()
        self._counted: dict[int, tuple[int, float]] = {}
        self._report_progress = budget.report_progress
        self._most = max(1, min(len(polytopes), budget.memory // query.bytes_of_trees(polytopes)))
        # Every process holds the trees' nodes, and of the nodes that it is dealt the children.
        self._alone, self._step = budget.solo_work - done, budget.solo_work
        self._processes = 1 if query.folded.functions else budget.processes
        self._memory = budget.memory // self._most * self._processes

    def search(self, work: float = math.inf, together: int = sys.maxsize) -> Ended | None:
        """Go on with every tree in turn, of as many as there is memory for, until all are decided or time is up.

        Args:
            work: the search pauses, too, once its trees have taken so much work (``loop.TreeProgress``).
            together: trees at once, at most.

        Returns:
            Why there may be something left; None if the search only paused, and can go on.
        """
        while (self._waiting or self._trees) and not self._over():
            if self._waiting and len(self._trees) < min(self._most, together):
                self._plant(self._waiting.pop(0))
                continue
            if self.work >= work:
                return None
            if self._is_worth_sharing():
                self._share(work - self.work)
                continue
            for polytope, tree in list(self._trees.items()):
                tree.advance()
                self._look(polytope)
                if self._over():
                    break
        if self._left() <= 0:
            for polytope, tree in self._trees.items():
                self.lower[polytope] = tree.bound(lambda: self._left() < -_LATE)
            return IN_TIME
        if State.FULL in self._ended:
            return Ended(Reason.MEMORY, "the open sub-problems took too much memory")
        return Ended(Reason.INCOMPLETE, "there are sub-problems whose margin is too near to zero for further splits")

    @property
    def open(self) -> list[int]:
        """The polytopes whose trees are not decided, those first whose trees have begun."""
        return [*self._trees, *self._waiting]

    def closed(self, polytope: int | None = None) -> float:
        """The part of a tree that is closed: of one polytope, or of that open tree of which it is the least."""
        trees = [tree for number, tree in self._trees.items() if polytope in (None, number)]
        return min((tree.now.closed for tree in trees), default=0.0)

    def least(self) -> tuple[float, int]:
        """Of that open tree of which the least part is closed this part, and its polytope."""
        return min(((tree.now.closed, number) for number, tree in self._trees.items()), default=(0.0, -1))

    def spent(self, polytope: int) -> float:
        """How much work a polytope's tree has taken."""
        return self._counted[polytope][1]

    @property
    def nodes(self) -> int:
        """How many sub-problems have been bounded."""
        return sum(nodes for nodes, _ in self._counted.values())

    @property
    def work(self) -> float:
        """How much work the trees have taken."""
        return sum(work for _, work in self._counted.values())

    def _over(self) -> bool:
        return self._candidates.found is not None or self._left() <= 0

    def _is_worth_sharing(self) -> bool:
        """Whether there is work enough for every process."""
        if self._processes == 1 or self.work < self._alone:
            return False
        trees = [tree.now for tree in self._trees.values() if len(tree.now.open) >= self._processes]
        ahead = sum(now.work * (1 / max(_LEAST, now.closed) - 1) for now in trees)
        return bool(trees) and ahead >= _WORTH * self._step

    def _share(self, work: float) -> None:
        """Go on with all trees in several processes, until one of these has nothing left, or for so much work."""
        trees, count = self._trees, self._processes
        hands = {polytope: tree.now.open.dealt(count) for polytope, tree in trees.items()}

        def share(number: int, pause: Callable[[], bool]) -> tuple[dict[int, TreeProgress[Nodes]], Outcome | None]:
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
        found = run_shares([partial(share, number) for number in range(count)], self._left)
        for number, one in enumerate(found):
            ended, counterexample = one or ({}, None)
            for polytope, tree in trees.items():
                tree.take_part(ended.get(polytope), hands[polytope][number])
            self._candidates.found = self._candidates.found or counterexample
        if None in found:
            self._processes = 1
        for polytope in list(trees):
            self._look(polytope)
        if time.perf_counter() - began < _SHORT:
            self._alone = self.work + self._step

    def _plant(self, polytope: int) -> None:
        """Begin a polytope's tree."""
        query, part = self.query, self.query.parts[polytope]
        reached = lambda e: self._candidates.reached(query.folded.point(e))  # noqa: E731
        decide = self._candidates.decider(polytope, query.folded.places)
        rest = (self._left, self._options, self._memory, decide, self._keep)
        self._trees[polytope] = PhaseTree(query.strip(polytope), part.rows, part.scale, reached, *rest)
        self._look(polytope)

    def _look(self, polytope: int) -> None:
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
            self._report_progress({"sub-problems": self.nodes, "closed": self.closed()})


@dataclass(frozen=True)
class Rounds:
    """How trees and refinements take turns.

    Attributes:
        refinement: the first one; None for trees alone.
        better: the search for better relaxations, by planes over neurons or by lines alone; None for none.
        hard: how trees with better relaxations are searched; None for as all others.
        tried: whether all trees get better relaxations only where one of them closes more than the tree before.
        first: work that the trees of a query may take before a refinement is thought of (``loop.TreeProgress``); before
            better relaxations are, one tree takes its share of it.
        still: better relaxations are searched for where a tree has closed no more than this part by then, and for trees
            that have closed more once they have taken ``longer`` times as much work as ``first``.
        longer: see ``still``.
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
    better: Slopes | None = Above()  # noqa: RUF009 -- frozen
    hard: Branching | None = None
    tried: bool = True
    first: float = 2e9
    still: float = 0.1
    longer: float = 10.0
    patience: float = 1.0
    last: Branching = Branching(steps=6, adaptive=1 << 20, choices=8)  # noqa: RUF009 -- frozen
    small: float = 0.5
    growth: int = 4
    gain: float = 0.02


@dataclass
class Searched:
    """What trees have found.

    Attributes:
        ended: why there may be something left.
        lower: by polytope a proven lower bound of its largest row, so far as one is known.
        nodes: how many sub-problems have been bounded.
        rounds: how many refinements were made.
        recorded: by polytope the order of its rows, its tree, and the tighter bounds of neurons that were proven before
            it and after the polytope before it; where all of this is kept.
    """

    ended: Ended
    lower: dict[int, float] = field(default_factory=dict)
    nodes: int = 0
    rounds: int = 0
    recorded: dict[int, tuple[list[int], Certified, Sequence[Tighter]]] = field(default_factory=dict)

    def open(self, query: FoldedQuery) -> list[int]:
        """The polytopes of a query that are not excluded."""
        return [polytope for polytope in query.parts if not self.lower.get(polytope, -math.inf) > 0]

    def add(self, forest: Forest, ended: Ended, record: Refined | None) -> None:
        """Take what the trees of one more forest have found."""
        for polytope, value in forest.lower.items():
            self.lower[polytope] = max(value, self.lower.get(polytope, value))
        self.ended, self.nodes = ended, self.nodes + forest.nodes
        for polytope, tree in forest.recorded.items():
            done = sum(len(tighter) for _, _, tighter in self.recorded.values())
            tighter = record.records[done:] if record is not None else ()
            self.recorded[polytope] = forest.query.parts[polytope].order.tolist(), tree, tighter


_TRUST = 8.0
"""What the part counts that trees with better relaxations have closed beside that of others, before a refinement."""


class _Search:
    """The search of one query: trees, and refinements of what these leave open.

    The arguments are those of ``search``.
    """

    def __init__(
        self,
        query: FoldedQuery,
        candidates: Candidates,
        options: Branching,
        rounds: Rounds,
        budget: TimeBudget,
        record: Refined | None,
    ) -> None:
        self._query, self._candidates, self._options = query, candidates, options
        self._rounds, self._budget, self._record = rounds, budget, record
        # A neuron that no other one feeds has its exact interval.
        self._refinement = rounds.refinement if len(query.folded.blocks) > 1 and query.folded.whole else None
        self._size = query.folded.size
        self._done = 0.0
        self.found = Searched(IN_TIME)

    def run(self) -> Searched:
        """Take turns until the query is decided, or no time is left."""
        while True:
            self._done += self._trees()
            is_open = self.found.open(self._query)
            if self._refinement is None or self._candidates.found is not None or not is_open or self._budget.over():
                return self.found
            try:
                self._refine(self._refinement, is_open)
            except OutOfTime:
                self.found.ended = IN_TIME
                return self.found

    def _forest(self, query: FoldedQuery, polytopes: Sequence[int], options: Branching | None = None) -> Forest:
        # A refinement does more than a linear program for each of many nodes.
        mine = self._options if self._refinement is None else replace(self._options, exact=0.0)
        rest = (options or mine, self._budget, self._record is not None, self._done)
        return Forest(query, polytopes, self._candidates, *rest)

    def _trees(self) -> float:
        """Search trees of the query as it is now, for as long as a refinement does not do more; returns their work."""
        rounds, refinement, size = self._rounds, self._refinement, self._query.folded.size
        forest = self._forest(self._query, self.found.open(self._query))
        ended = forest.search(rounds.first / max(1, len(forest.open)), together=1)
        # What the trees may take before a refinement does.
        work = math.inf if refinement is None else rounds.patience * refinement.work(self._query.folded)
        trust = 1.0
        if ended is None and forest.least()[0] > rounds.still:
            ended = forest.search(rounds.first)
            if ended is None and forest.least()[0] > rounds.still and refinement is not None:
                ended = forest.search(min(rounds.longer * rounds.first, forest.closed() * work))
        if ended is None and rounds.better is not None and not self._query.folded.functions:
            outdone = self._outdone(rounds.better, forest, forest.least()[1], work)
            if outdone is not None:
                forest, trust = outdone, _TRUST
        if ended is None:
            ended = forest.search(rounds.first)
        if ended is None and refinement is not None:
            ended = forest.search(min(1.0, trust * forest.closed()) * work)
        elif ended is None and size > rounds.small * self._size:
            ended = forest.search()
        self.found.add(forest, ended or IN_TIME, self._record)
        if ended is None and refinement is None:
            last = self._forest(self._query, self.found.open(self._query), rounds.last)
            self.found.add(last, last.search() or IN_TIME, self._record)
        return forest.work

    def _outdone(self, better: Slopes, forest: Forest, polytope: int, work: float) -> Forest | None:
        """Trees with better relaxations, if one closes more with as much work than a polytope's tree that has begun.

        Planes for all polytopes take longer than trees that are soon given up for a refinement, which takes ``work``.
        Nothing needs to be tried of what is always worth it.
        """
        hard = self._rounds.hard
        if not self._rounds.tried:
            self.found.add(forest, IN_TIME, self._record)
            rest = self.found.open(self._query)
            return self._forest(self._query.with_relaxations(better, rest, self._budget), rest, hard)
        trial = self._forest(self._query.with_relaxations(better, [polytope], self._budget), [polytope], hard)
        ended = trial.search(forest.spent(polytope))
        closed = trial.closed() if trial.open else 1.0
        more = ended is not None or trial.closed() > forest.closed(polytope)
        if not (more and closed * _TRUST * work >= self._rounds.first):
            self.found.add(trial, IN_TIME, self._record)
            return None
        self.found.add(forest, IN_TIME, self._record)
        rest = [number for number in self.found.open(self._query) if not trial.lower.get(number, -math.inf) > 0]
        if rest == trial.open:
            return trial
        self.found.add(trial, IN_TIME, self._record)
        return self._forest(trial.query.with_relaxations(better, rest, self._budget), rest, hard)

    def _refine(self, refinement: Refinement, polytopes: Sequence[int]) -> None:
        """Go on with tighter intervals of the neurons."""
        before = self._query
        self._query = before.refined(refinement, polytopes, self._budget, self._record)
        self.found.rounds += 1
        self._done += refinement.work(before.folded)
        worth_it = self._query.width < (1 - self._rounds.gain) * before.width
        more = replace(refinement, leaves=self._rounds.growth * refinement.leaves)
        self._refinement = more if worth_it else None


def search(
    query: FoldedQuery,
    candidates: Candidates,
    options: Branching,
    rounds: Rounds,
    budget: TimeBudget,
    record: Refined | None = None,
) -> Searched:
    """Search the trees of a query, refining the bounds of its neurons now and then, until it is decided.

    Args:
        query: where the trees start.
        candidates: where points are judged; the search ends with the first counterexample.
        options: how each tree is searched.
        rounds: how trees and refinements take turns.
        budget: what the search may use.
        record: keeps what proves tighter bounds; None if no proofs are kept.
    """
    return _Search(query, candidates, options, rounds, budget, record).run()
