"""The search that decides one query: trees of its system, and of tighter systems for what these leave open.

Which of the two decides a query is not known beforehand. On shallow networks trees over the first bounds do, on deep
ones tighter bounds of the neurons do more than millions of sub-problems. So trees begin; those that have closed nothing
worth mentioning when they pause are given up for a refinement, the others get up to its work. Every round takes more.

Before that, one tree is begun a second time with planes over its neurons (``above``). These bound the root much better,
but not always what it is split into: all trees get planes where this one has closed more after the same work.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from verifiable_relu.errors import OutOfTime
from verifiable_relu.spec.property import Query
from verifiable_relu.spec.row_batch import RowBatch
from verifiable_relu.trust.certificate import Tighter
from verifiable_relu.trust.certificate import Tree as Certified
from verifiable_relu.verifiers.attack import claim
from verifiable_relu.verifiers.bab.above import Above
from verifiable_relu.verifiers.bab.limits import Limits
from verifiable_relu.verifiers.bab.recorded import Refined
from verifiable_relu.verifiers.bab.refine import Refinement
from verifiable_relu.verifiers.bab.system import System, tree_bytes
from verifiable_relu.verifiers.bab.tree import Decide, Progress, Search, State, Tree
from verifiable_relu.verifiers.base import Outcome, Reason
from verifiable_relu.verifiers.copies import at_once

_LATE = 0.3
"""Seconds that bounding what is open may take once the budget is spent."""

_SHORT = 0.2
"""Seconds: where the first process had nothing left so soon, copies are not made again at once."""

_WORTH = 3.0
"""Trees are shared where so many times the work that they take alone, at least, seems to be left."""

_LEAST = 1e-9
"""Heuristic: the part of a tree that counts as closed, at least, where its work is estimated."""


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
        self._rows = RowBatch.of([prop], query.network.output_size)
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
        """Who decides the nodes of a polytope's tree that nothing else closes (``Tree``); None for nobody.

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


class Forest:
    """The trees of one query.

    Args:
        system: where they start.
        polytopes: which of its polytopes get a tree.
        candidates: where points are judged.
        search: how each tree is searched.
        limits: what all trees may use.

    Attributes:
        lower: by polytope a proven lower bound of its largest row, so far as it is known.
        recorded: by polytope its tree as it is written, if trees are recorded and all of its nodes are closed.
    """

    def __init__(
        self,
        system: System,
        polytopes: Sequence[int],
        candidates: Candidates,
        search: Search,
        limits: Limits,
    ) -> None:
        self._system, self._candidates, self._search, self._left = system, candidates, search, limits.left
        self.lower: dict[int, float] = {}
        self.recorded: dict[int, Certified] = {}
        self._waiting = list(polytopes)
        self._trees: dict[int, Tree] = {}
        self._ended: set[State] = set()
        self._counted: dict[int, tuple[int, float]] = {}
        planes = any(system.parts[polytope].planes is not None for polytope in polytopes)
        each = tree_bytes(system.folded.inputs, system.folded.size, planes)
        self._most = min(len(polytopes), limits.memory // each)
        # Every process holds the trees' nodes, and of the nodes that it is dealt the children.
        self._alone, self._step = limits.alone - limits.done, limits.alone
        self._processes = 1 if system.folded.functions else limits.processes
        self._memory = limits.memory // max(1, self._most * self._processes)

    def order(self, polytope: int) -> list[int]:
        """The rows of a polytope in the order in which its tree counts them."""
        found: list[int] = self._system.parts[polytope].order.tolist()
        return found

    def search(self, work: float = math.inf, together: int = sys.maxsize) -> Ended | None:
        """Go on with every tree in turn, of as many as there is memory for, until all are decided or time is up.

        Args:
            work: the search pauses, too, once its trees have taken so much work (``Tree``).
            together: trees at once, at most.

        Returns:
            Why there may be something left; None if the search only paused, and can go on.
        """
        if self._waiting and not self._most:
            size = self._system.folded.size
            return Ended(Reason.MEMORY, f"a tree over {size} unstable neurons takes too much memory")
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
            return Ended(Reason.TIMEOUT, "the budget ran out")
        if State.FULL in self._ended:
            return Ended(Reason.MEMORY, "the open sub-problems took too much memory")
        return Ended(Reason.INCOMPLETE, "there are sub-problems whose margin is too near to zero for further splits")

    @property
    def open(self) -> list[int]:
        """The polytopes whose trees are not decided, those first whose trees have begun."""
        return [*self._trees, *self._waiting]

    def closed_of(self, polytope: int) -> float:
        """The part of the tree of an open polytope that is closed."""
        tree = self._trees.get(polytope)
        return 0.0 if tree is None else tree.closed

    @property
    def nodes(self) -> int:
        """How many sub-problems have been bounded."""
        return sum(nodes for nodes, _ in self._counted.values())

    @property
    def work(self) -> float:
        """How much work the trees have taken."""
        return sum(work for _, work in self._counted.values())

    @property
    def closed(self) -> float:
        """The part of a tree that is closed (``Tree``), of that open tree of which it is the least."""
        return min((tree.closed for tree in self._trees.values()), default=0.0)

    def _over(self) -> bool:
        return self._candidates.found is not None or self._left() <= 0

    def _is_worth_sharing(self) -> bool:
        """Whether there is work enough for every process."""
        if self._processes == 1 or self.work < self._alone:
            return False
        trees = [tree for tree in self._trees.values() if tree.waiting >= self._processes]
        ahead = sum(tree.work * (1 / max(_LEAST, tree.closed) - 1) for tree in trees)
        return bool(trees) and ahead >= _WORTH * self._step

    def _share(self, work: float) -> None:
        """Go on with all trees in several processes, until one of these has nothing left, or for so much work."""
        trees, count = self._trees, self._processes
        hands = {polytope: tree.deal(count) for polytope, tree in trees.items()}

        def share(number: int, pause: Callable[[], bool]) -> tuple[dict[int, Progress], Outcome | None]:
            for polytope, tree in trees.items():
                tree.begin(hands[polytope][number])
            is_open = [tree for tree in trees.values() if tree.waiting]
            while is_open and not self._over():
                for tree in is_open:
                    tree.advance()
                    if self._over():
                        break
                is_open = [tree for tree in is_open if tree.state is State.OPEN]
                # Asked after some progress, so that there is some however soon others have ended.
                if pause() or count * sum(tree.work for tree in trees.values()) >= work:
                    break
            return {polytope: tree.end() for polytope, tree in trees.items()}, self._candidates.found

        began = time.perf_counter()
        found = at_once([partial(share, number) for number in range(count)], self._left)
        for number, one in enumerate(found):
            ended, counterexample = one or ({}, None)
            for polytope, tree in trees.items():
                # Nothing is known of what was dealt to a process that failed.
                tree.take(ended.get(polytope) or Progress(hands[polytope][number]))
            self._candidates.found = self._candidates.found or counterexample
        if None in found:
            self._processes = 1
        for polytope in list(trees):
            self._look(polytope)
        if time.perf_counter() - began < _SHORT:
            self._alone = self.work + self._step

    def _plant(self, polytope: int) -> None:
        """Begin a polytope's tree."""
        reached = lambda e: self._candidates.reached(self._system.folded.point(e))  # noqa: E731
        decide = self._candidates.decider(polytope, self._system.folded.places)
        self._trees[polytope] = self._system.tree(polytope, reached, self._left, self._search, self._memory, decide)
        self._look(polytope)

    def _look(self, polytope: int) -> None:
        """Take note of what has become of a tree, and drop it when it has ended."""
        tree = self._trees[polytope]
        self._counted[polytope] = tree.nodes, tree.work
        if tree.state is State.PROVED:
            self.lower[polytope] = tree.lower
            recorded = tree.certified(self._candidates.query.network.activations)
            if recorded is not None:
                self.recorded[polytope] = recorded
        if tree.state is not State.OPEN:
            self._ended.add(tree.state)
            del self._trees[polytope]


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
    recorded: Mapping[int, tuple[list[int], Certified, int]] = field(default_factory=dict)
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
