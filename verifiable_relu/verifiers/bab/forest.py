"""All trees of one query, searched in turn, and the points that they come across."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from verifiable_relu.copies import at_once
from verifiable_relu.spec.property import Query
from verifiable_relu.spec.row_batch import RowBatch
from verifiable_relu.trust.certificate import Tree as Certified
from verifiable_relu.verifiers.attack import claim
from verifiable_relu.verifiers.bab.frontier import Progress, State
from verifiable_relu.verifiers.bab.limits import Limits
from verifiable_relu.verifiers.bab.system import System, tree_bytes
from verifiable_relu.verifiers.bab.tree import Search, Tree
from verifiable_relu.verifiers.base import Outcome, Reason

_LATE = 0.3
"""Seconds that bounding what is open may take once the budget is spent."""

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
        self._rows = RowBatch.of([prop], query.network.output_size)
        # Where the margin is zero, the point may be on an edge that is not part of the unsafe set or of the box.
        self._strict = bool(prop.box.open_lower or prop.box.open_upper) or any(
            row.strict for polytope in prop.unsafe for row in polytope
        )

    def anywhere(self) -> Outcome | None:
        """The centre of the box, of a property for which any point should do."""
        box = self.query.property.box
        self._take((box.lower + box.upper) / 2)
        return self.found

    def reached(self, points: Tensor) -> bool:
        """Whether a counterexample is known, be it one of the points (count, inputs) or found earlier."""
        y = self._network(points.reshape(-1, *self._network.input_shape)).flatten(1)
        margins = self._rows.margins(y @ self._rows.matrix.T - self._rows.bound)
        least = int(margins.argmin())
        if self.found is None and bool(margins[least] <= 0):
            self._take(points[least].numpy())
        return self.found is not None

    def _take(self, point: np.ndarray) -> None:
        claimed = claim(self.query.network, self.query.property, point, self._method, {})
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
        ahead = sum(tree.work * (1 / max(1e-9, tree.closed) - 1) for tree in trees)
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
        self._trees[polytope] = self._system.tree(polytope, reached, self._left, self._search, self._memory)
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
