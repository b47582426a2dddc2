"""What is known of one query before anything is split, and the trees that start there."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from verifiable_relu.bounds import Relaxation
from verifiable_relu.errors import OutOfTime
from verifiable_relu.rounding import OWN, unit_roundoff
from verifiable_relu.spec.property import Query
from verifiable_relu.spec.row_batch import RowBatch
from verifiable_relu.supervisor.forks import run_shares
from verifiable_relu.verifiers.bab.folded import AffineForms, Folded, is_whole
from verifiable_relu.verifiers.bab.folding import fold
from verifiable_relu.verifiers.bab.recorded import Refined
from verifiable_relu.verifiers.bab.refine import Refinement
from verifiable_relu.verifiers.bab.slopes import HullCuts, Slopes
from verifiable_relu.verifiers.bab.strip import TreeRelaxation
from verifiable_relu.verifiers.base import TimeBudget

_ROWS = 512
"""The neurons of a system that is not held as a whole of which a tree makes rows, about."""

_REFINING = 0.25
"""The part of the time left that one refinement may take: on convolutions it would take all of it."""


def tree_bytes(inputs: int, neurons: int, cuts: bool = False) -> int:
    """Return about the memory that a tree takes but for its open nodes, with hull cuts over all neurons or without."""
    made = neurons if is_whole(inputs, neurons) else _ROWS
    return (28 if cuts else 16) * (made + 1) * (inputs + neurons + 1)


@dataclass(frozen=True, eq=False)
class OpenPolytope:
    """One polytope of the unsafe set that bounds do not exclude.

    Attributes:
        rows: its rows, A·y − b as forms of e and r, the one with the largest lower bound first.
        scale: (rows,) what each row was multiplied with to have integer coefficients.
        slopes: (m,) of the relaxation that is best for the first row.
        lower: its lower bound by this relaxation, not proven.
        order: (rows,) which row of the polytope each is.
        cuts: over neurons, the best ones known for the first row together with ``slopes``; None for chords alone.
        searched: whether its relaxation has been searched for once more.
    """

    rows: AffineForms
    scale: Tensor
    slopes: Tensor
    lower: float
    order: Tensor
    cuts: HullCuts | None = None
    searched: bool = False


class FoldedQuery:
    """One query as the folded system of its unstable neurons, and the slopes of its relaxations.

    Args:
        folded: the unstable neurons.
        rows, scale: of all polytopes that are to be excluded, as ``OpenPolytope`` has them.
        polytope: (rows,) the polytope of each, as ``RowBatch`` counts them.
        slopes: the search for slopes.
        stop: asked now and then.

    Attributes:
        parts: the polytopes, the one with the least bound first.

    Raises:
        OutOfTime: once ``stop`` says so.
    """

    def __init__(
        self,
        folded: Folded,
        rows: AffineForms,
        scale: Tensor,
        polytope: Tensor,
        slopes: Slopes,
        stop: Callable[[], bool],
    ) -> None:
        self.folded = folded
        self._rows, self._scale, self._polytope, self._slopes = rows, scale, polytope, slopes
        found, lower = slopes.search(folded, rows, stop)
        if stop():
            raise OutOfTime
        parts = {}
        for number in polytope.unique().tolist():
            mine = (polytope == number).nonzero().squeeze(1)
            order = lower[mine].argsort(descending=True)
            mine = mine[order]
            parts[number] = OpenPolytope(rows[mine], scale[mine], found[mine[0]], float(lower[mine[0]]), order)
        self.parts = dict(sorted(parts.items(), key=lambda item: item[1].lower))

    @staticmethod
    def of(
        query: Query,
        relaxation: Relaxation,
        sample: int,
        polytopes: Sequence[int],
        slopes: Slopes,
        stop: Callable[[], bool],
    ) -> FoldedQuery:
        """Return the system of one query, whose box is number ``sample`` of those that have been bounded.

        Its polytopes ``polytopes``, none of which is empty, are to be excluded.

        Raises:
            OutOfTime: once ``stop`` says so.
        """
        rows = RowBatch.from_properties([query.property], query.network.output_size)
        kept = torch.isin(rows.polytope, torch.tensor(polytopes)).nonzero().squeeze(1)
        folded, forms = fold(relaxation, sample, query.property.box, rows.matrix[kept], stop)
        bound = rows.bound[kept]
        rounding = OWN * unit_roundoff(torch.float64) * (forms.constant.abs() + bound.abs())
        forms = AffineForms(forms.inputs, forms.neurons, forms.constant - bound, forms.error + rounding)
        return FoldedQuery(folded, forms, rows.scale[kept], rows.polytope[kept], slopes, stop)

    def bytes_of_trees(self, polytopes: Sequence[int]) -> int:
        """Return about the memory that the tree of each of some polytopes takes before it has open nodes."""
        cuts = any(self.parts[polytope].cuts is not None for polytope in polytopes)
        return tree_bytes(self.folded.inputs, self.folded.size, cuts)

    @property
    def width(self) -> float:
        """The widths of all intervals of unstable neurons together."""
        return float((self.folded.upper - self.folded.lower).sum())

    def refined(
        self, refinement: Refinement, polytopes: Collection[int], budget: TimeBudget, record: Refined | None = None
    ) -> FoldedQuery:
        """Return the system of some of the polytopes, with tighter bounds of the neurons, whose proofs may be kept.

        Neurons to which the refinement does not come in the part ``_REFINING`` of the time left keep their bounds.

        Raises:
            OutOfTime: if no time is left.
        """
        kept = torch.isin(self._polytope, torch.tensor(sorted(polytopes))).nonzero().squeeze(1)
        left = budget.left()
        rest = (1 - _REFINING) * left if left < math.inf else 0.0
        short = replace(budget, seconds=budget.seconds - rest)
        folded, rows = refinement.refine(self.folded, self._rows[kept], short, record)
        return FoldedQuery(folded, rows, self._scale[kept], self._polytope[kept], self._slopes, budget.over)

    def with_relaxations(self, better: Slopes, polytopes: Sequence[int], budget: TimeBudget) -> FoldedQuery:
        """Return the system with better relaxations of those of some polytopes of which none has been searched for."""
        bare = [polytope for polytope in polytopes if not self.parts[polytope].searched]
        found = copy(self)
        found.parts = dict(self.parts)
        hands = [part for part in (bare[k :: budget.processes] for k in range(budget.processes)) if part]
        shares = [partial(self._searched, better, hand, budget.over) for hand in hands]
        for share, parts in zip(shares, run_shares(shares, budget.left, whole=True) if shares else [], strict=True):
            # Where a process has failed, this one does its share.
            found.parts.update(parts or share(budget.over))
        return found

    def _searched(
        self, better: Slopes, polytopes: Sequence[int], stop: Callable[[], bool], pause: Callable[[], bool]
    ) -> dict[int, OpenPolytope]:
        parts = [self.parts[polytope] for polytope in polytopes]
        objectives, slopes = AffineForms.cat([part.rows[:1] for part in parts]), torch.stack([p.slopes for p in parts])
        searched = better.relaxations(self.folded, objectives, slopes, lambda: stop() or pause())
        found = zip(polytopes, parts, searched, strict=True)
        return {
            polytope: replace(part, cuts=cuts, slopes=mine, lower=lower, searched=True)
            for polytope, part, (cuts, mine, lower) in found
        }

    def strip(self, polytope: int) -> TreeRelaxation:
        """Return the relaxation for the tree of a polytope."""
        part = self.parts[polytope]
        return TreeRelaxation(self.folded, part.rows, part.slopes, part.cuts)
