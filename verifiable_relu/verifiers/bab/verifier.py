"""``bab``: branch and bound over the phases of unstable neurons, complete for piecewise-linear networks.

Boxes are bounded in batches; what these bounds leave open is folded to its inputs and unstable neurons, one query
after the other (``root``), and each polytope of the unsafe set that is left becomes a tree (``tree``). An *unsat*
rests on bounds in float64 with rounding accounted for, and on nothing that a solver or a search in float32 says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from verifiable_relu.bounds import Ascent, input_box, neurons, relaxed
from verifiable_relu.bounds.linear import MEMORY
from verifiable_relu.bounds.rounding import covers
from verifiable_relu.network.graph import Network
from verifiable_relu.spec.property import Query, RowBatch
from verifiable_relu.verifiers.attack import claim
from verifiable_relu.verifiers.bab.folding import require_piecewise_linear
from verifiable_relu.verifiers.bab.root import OutOfTime, Root, tree_bytes
from verifiable_relu.verifiers.bab.strip import Slopes
from verifiable_relu.verifiers.bab.tree import Search, State, Tree
from verifiable_relu.verifiers.base import (
    SILENT,
    Budget,
    Outcome,
    Progress,
    Reason,
    Trust,
    Verdict,
    batch_size,
    by_network,
    fault,
)

_BATCH = 64
"""Most queries bounded at once."""

_LATE = 0.3
"""Seconds that bounding what is open may take once the budget is spent."""


@dataclass(frozen=True)
class Bab:
    """Branch and bound on one relaxation for each polytope of the unsafe set.

    Attributes:
        intermediate: the search for bounds of the neurons that CROWN leaves unstable.
        slopes: the search for the slopes of each relaxation.
        search: how trees are searched.
        memory: a limit in bytes on what bounds hold at once, and on what all trees of a query hold.
    """

    intermediate: Ascent = Ascent(steps=6)  # noqa: RUF009 -- frozen
    slopes: Slopes = field(default_factory=Slopes)
    search: Search = field(default_factory=Search)
    memory: int = MEMORY

    name: ClassVar[str] = "bab"
    complete: ClassVar[bool] = True

    def fits(self, inputs: int, neurons: float) -> bool:
        """Whether there is memory for a query's trees, by how many inputs vary and neurons are unstable."""
        return neurons < self.memory and tree_bytes(inputs, int(neurons)) <= self.memory / 2

    def verify(self, queries: Sequence[Query], budget: Budget, progress: Progress = SILENT) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}

        def close(index: int, outcome: Outcome) -> None:
            outcomes[index] = outcome
            progress.finish(index, outcome)
            progress.stage(self.name, len(outcomes), len(queries))

        for network, members in by_network(queries):
            most = batch_size(network, _BATCH, self.memory // 2)
            for start in range(0, len(members), most):
                part = members[start : start + most]
                allowance = budget.subset(part).total()
                if allowance <= 0:
                    for index in part:
                        close(index, Outcome.unknown(Reason.TIMEOUT, self.name, "no time was left"))
                    continue
                try:
                    with budget.charging(part) as elapsed:
                        chosen = [queries[i] for i in part]
                        bounds = _Bounds(self, network, chosen, lambda: elapsed() > allowance)  # noqa: B023
                        share = elapsed() / len(part)
                except Exception as error:
                    for index in part:
                        close(index, fault(error, self.name))
                    continue
                for number, index in enumerate(part):
                    close(index, self._decide(bounds, number, budget, index, share))
        return [outcomes[i] for i in range(len(queries))]

    def _decide(self, bounds: _Bounds, number: int, budget: Budget, index: int, share: float) -> Outcome:
        """The outcome of one query of a batch."""
        seconds, margin = {"bounds": share}, bounds.margin(number)
        known = {
            "margin": margin if margin > -torch.inf else None,
            "unstable": int(bounds.unstable[number]),
            "seconds": seconds,
        }
        if margin > 0:
            detail = "decided by bounds alone"
            return replace(_unsat(bounds.trust, margin, detail), **known)  # type: ignore[arg-type]
        allowance = budget.remaining(index)
        if allowance <= 0:
            return Outcome.unknown(Reason.TIMEOUT, self.name, "no time was left", **known)
        with budget.charging([index]) as elapsed:
            try:
                with torch.no_grad():
                    outcome = _Run(self, bounds, number, lambda: allowance - elapsed()).outcome()
            except OutOfTime:
                outcome = Outcome.unknown(Reason.TIMEOUT, self.name, "the budget ran out before anything was split")
            except Exception as error:
                outcome = fault(error, self.name)
            seconds[self.name] = elapsed()
        if outcome.margin is not None:
            known["margin"] = outcome.margin
        return replace(outcome, **known)  # type: ignore[arg-type]


class _Bounds:
    """Bounds of a batch of boxes of one network, and of the property's rows there."""

    def __init__(self, method: Bab, network: Network, queries: Sequence[Query], stop: Callable[[], bool]) -> None:
        require_piecewise_linear(network)
        self.queries = queries
        net, properties = network.to(torch.float64), [query.property for query in queries]
        with torch.no_grad():
            box = input_box(properties, network)
            search = neurons(method.intermediate, memory=method.memory // 2, stop=stop)
            self.relaxation = relaxed(net, box, memory=method.memory // 2, stop=stop, search=search)
            rows = RowBatch.of(properties, network.output_size)
            values = self.relaxation.outputs(rows.matrix, rows.sample, memory=method.memory // 2, stop=stop)
            values = torch.maximum(values, self.relaxation.outputs(rows.matrix, rows.sample, intervals=True))
        below = torch.nextafter(values - rows.bound, torch.tensor(-torch.inf, dtype=torch.float64))
        slack = rows.unscaled(below).nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        best = torch.full((len(rows.owner),), -torch.inf, dtype=torch.float64)
        best = best.scatter_reduce(0, rows.polytope, slack, "amax")
        self._margins = [best[rows.owner == number].tolist() for number in range(len(queries))]
        unstable = [~((b.lower >= 0) | (b.upper <= 0)).flatten(1) for b in self.relaxation.pre.values()]
        self.unstable = torch.cat([torch.zeros(len(queries), 0, dtype=torch.bool), *unstable], 1).sum(1)
        self.trust = Trust.ROUNDED if covers(net, torch.float64, "cpu") else Trust.FLOAT

    def margins(self, number: int) -> list[float]:
        """Proven lower bounds of the largest row of each polytope of one query."""
        return self._margins[number]

    def margin(self, number: int) -> float:
        """A proven lower bound of one query's margin."""
        return min(self._margins[number], default=torch.inf)


class _Run:
    """One query that bounds leave open."""

    def __init__(self, method: Bab, bounds: _Bounds, number: int, left: Callable[[], float]) -> None:
        self._method, self._bounds, self._number, self._left = method, bounds, number, left
        self._query = bounds.queries[number]
        self._network = bounds.relaxation.network
        self._rows = RowBatch.of([self._query.property], self._network.output_size)
        self._margins = dict(enumerate(bounds.margins(number)))
        self._root: Root | None = None
        self._found: Outcome | None = None
        prop = self._query.property
        # Where the margin is zero, the point may be on an edge that is not part of the unsafe set or of the box.
        self._strict = bool(prop.box.open_lower or prop.box.open_upper) or any(
            row.strict for polytope in prop.unsafe for row in polytope
        )

    def outcome(self) -> Outcome:
        """Search all trees in turn, as many at once as there is memory for."""
        unsafe = self._query.property.unsafe
        undecided = [i for i, margin in self._margins.items() if not margin > 0]
        if any(not unsafe[i] for i in undecided):
            box = self._query.property.box
            self._take((box.lower + box.upper) / 2)
            return self._found or self._unknown(Reason.UNCONFIRMED, "any point should do")
        method, stop = self._method, lambda: self._left() <= 0
        args = (self._query, self._bounds.relaxation, self._number, undecided, method.slopes, stop)
        root = self._root = Root(*args)
        at_once = int(method.memory / 2 / max(1, tree_bytes(root.folded.inputs, root.folded.size)))
        if at_once < 1:
            return self._unknown(Reason.MEMORY, f"a relaxation of {root.folded.size} neurons takes too much memory")
        share = method.memory // 2 // min(at_once, len(undecided))
        waiting, alive = list(root.parts), dict[int, Tree]()
        ended = set[State]()
        while waiting or alive:
            while waiting and len(alive) < at_once:
                polytope = waiting.pop(0)
                alive[polytope] = root.tree(polytope, self._reached, self._left, method.search, share)
                ended |= self._look(alive)
                if self._found or self._left() <= 0:
                    return self._found or self._late(alive)
            for tree in list(alive.values()):
                tree.advance()
                ended |= self._look(alive)
                if self._found or self._left() <= 0:
                    return self._found or self._late(alive)
        if State.FULL in ended:
            return self._unknown(Reason.MEMORY, "the open sub-problems take too much memory")
        margin = min(self._margins.values())
        # Nothing but what was proved of every polytope decides.
        if State.STUCK in ended or not margin > 0:
            return self._unknown(Reason.INCOMPLETE, "there are sub-problems whose margin is within rounding of zero")
        return _unsat(self._bounds.trust, margin, "")

    def _look(self, alive: dict[int, Tree]) -> set[State]:
        """Drop the trees that have ended; what else has become of them than a proof."""
        ended = set[State]()
        for polytope, tree in list(alive.items()):
            if tree.state is State.PROVED:
                self._margins[polytope] = max(self._margins[polytope], tree.lower)
            elif tree.state is not State.OPEN:
                ended.add(tree.state)
            if tree.state is not State.OPEN:
                del alive[polytope]
        return ended

    def _late(self, alive: dict[int, Tree]) -> Outcome:
        """No time is left."""
        nodes = 0
        for polytope, tree in alive.items():
            nodes += tree.nodes
            lower = tree.bound(lambda: self._left() < -_LATE)
            self._margins[polytope] = max(self._margins[polytope], lower)
        return self._unknown(Reason.TIMEOUT, f"the budget ran out after {nodes} sub-problems")

    def _unknown(self, reason: Reason, detail: str) -> Outcome:
        margin = min(self._margins.values())
        return Outcome.unknown(reason, Bab.name, detail, margin=margin if margin > -torch.inf else None)

    def _reached(self, points: Tensor) -> bool:
        """Whether one of the scaled inputs (points, n) is a counterexample."""
        assert self._root is not None
        x = self._root.folded.point(points)
        y = self._network(x.reshape(-1, *self._network.input_shape)).flatten(1)
        margins = self._rows.margins(y @ self._rows.matrix.T - self._rows.bound)
        least = int(margins.argmin())
        return bool(margins[least] <= 0) and self._take(x[least].numpy())

    def _take(self, point: object) -> bool:
        """Judge one point; the first true counterexample is kept."""
        claimed = claim(self._query.network, self._query.property, point, Bab.name, {})  # type: ignore[arg-type]
        if claimed is not None and claimed.witness is not None and claimed.margin is not None:
            inside = self._query.property.box.contains(claimed.witness)
            if inside and (not self._strict or claimed.margin < 0):
                self._found = claimed
        return self._found is not None


def _unsat(trust: Trust, margin: float, detail: str) -> Outcome:
    return Outcome(Verdict.UNSAT, Reason.PROVED, Bab.name, trust, margin, detail=detail)
