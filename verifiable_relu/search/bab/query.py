"""One query as reduced system: its open polytopes, their relaxations, and tighter intervals of its neurons."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial

import torch

from verifiable_relu.bounds.alpha import Ascent
from verifiable_relu.errors import OutOfTime
from verifiable_relu.ir.interval import Interval
from verifiable_relu.ir.network import Network
from verifiable_relu.rounding import OWN, unit_roundoff
from verifiable_relu.search.bab.loop import Observer
from verifiable_relu.search.bab.refine import Refinement, refine_intervals
from verifiable_relu.search.bab.relaxation import TreeRelaxation
from verifiable_relu.search.bab.slopes import Improve, OpenPolytope, row_slopes
from verifiable_relu.search.bab.system import eliminate_stable_neurons, is_whole
from verifiable_relu.search.budget import TimeBudget
from verifiable_relu.spec.row_batch import RowBatch
from verifiable_relu.supervisor.forks import run_shares

_ROWS = 512  # The neurons of a system that is not held as a whole of which a tree makes rows, about
_REFINING = 0.25  # The part of the time left that one refinement may take: on convolutions it would take all of it


def tree_bytes(inputs: int, neurons: int) -> int:
    """Return about the memory that a tree takes but for its open nodes."""
    return 16 * ((neurons if is_whole(inputs, neurons) else _ROWS) + 1) * (inputs + neurons + 1)


class ReducedQuery:
    """The reduced system of one query, and the relaxations of its open polytopes.

    Args:
        network: without maxima and products.
        box: of the inputs, (1, inputs).
        intervals: of the ops that feed elementwise ops, (1, size).
        rows: of the query's property.
        polytopes: those that are to be excluded, none of which is empty, as ``rows`` counts them.
        stop: asked now and then.

    Attributes:
        system, intervals: as above.
        parts: the polytopes, the one with the least bound first.

    Raises:
        OutOfTime: once ``stop`` says so.
    """

    def __init__(
        self,
        network: Network,
        box: Interval,
        intervals: Mapping[int, Interval],
        rows: RowBatch,
        polytopes: Collection[int],
        stop: Callable[[], bool],
    ) -> None:
        self._network, self._box, self._rows = network, box, rows
        self.intervals = intervals
        self.system = system = eliminate_stable_neurons(network, box, intervals)
        kept = torch.isin(rows.polytope, torch.tensor(sorted(polytopes))).nonzero().squeeze(1)
        matrix, bound = rows.matrix[kept].to(box.lower), rows.bound[kept].to(box.lower)
        forms = system.outputs(matrix)
        rounding = OWN * unit_roundoff(torch.float64) * (forms.constant.abs() + bound.abs())
        forms = replace(forms, constant=forms.constant - bound, error=forms.error + rounding)
        # Trees over kinks adapt their own lines: there the search took longer than what it saved.
        system.relaxation.stop = stop
        slopes, lower = row_slopes(system, matrix, None if system.piecewise_linear else Ascent())
        lower = lower - bound
        if stop():
            raise OutOfTime
        least, scale, polytope = [], rows.scale[kept].to(box.lower), rows.polytope[kept].to(box.lower.device)
        for number in sorted(polytopes):
            mine = (polytope == number).nonzero().squeeze(1)
            order = lower[mine].argsort(descending=True)
            mine = mine[order]
            first = int(mine[0])
            part = OpenPolytope(forms[mine], scale[mine], order, matrix[first], slopes[first])
            least.append((float(lower[first]), number, part))
        self.parts = {number: part for _, number, part in sorted(least, key=lambda each: each[0])}

    @property
    def width(self) -> float:
        """The widths of all intervals of unstable neurons together."""
        return float((self.system.upper - self.system.lower).sum())

    def refined(
        self, refinement: Refinement, polytopes: Collection[int], budget: TimeBudget, observer: Observer | None
    ) -> ReducedQuery:
        """Return the query with some of the polytopes, and tighter intervals of the neurons.

        Neurons to which the refinement does not come in the part ``_REFINING`` of the time left keep theirs.

        Raises:
            OutOfTime: if no time is left.
        """
        left = budget.left()
        rest = (1 - _REFINING) * left if left < math.inf else 0.0
        short = replace(budget, seconds=budget.seconds - rest)
        found = refine_intervals(self._network, self._box, self.intervals, refinement, short, observer)
        return ReducedQuery(self._network, self._box, found, self._rows, polytopes, budget.over)

    def improved(self, improve: Improve, polytopes: Sequence[int], budget: TimeBudget) -> ReducedQuery:
        """Return the query with better relaxations of those of some polytopes of which none has been searched for."""
        bare = [polytope for polytope in polytopes if not self.parts[polytope].improved]
        found = copy(self)
        found.parts = dict(self.parts)
        hands = [part for part in (bare[k :: budget.processes] for k in range(budget.processes)) if part]

        def share(hand: Sequence[int], pause: Callable[[], bool]) -> list[OpenPolytope]:
            return improve(self.system, [self.parts[number] for number in hand], lambda: budget.over() or pause())

        shares = [partial(share, hand) for hand in hands]
        for hand, parts in zip(hands, run_shares(shares, budget.left, whole=True) if shares else [], strict=True):
            # Where a process has failed, this one does its share.
            every = zip(hand, parts or share(hand, budget.over), strict=True)
            found.parts.update((number, replace(part, improved=True)) for number, part in every)
        return found

    def relaxation(self, polytope: int) -> TreeRelaxation:
        """Return the relaxation for the tree of a polytope."""
        part = self.parts[polytope]
        return TreeRelaxation(self.system, part.rows, part.slopes, 1, part.cuts)
