"""Verification by bounds alone, in batches: IBP, CROWN, α-CROWN; *unsat* where the margin is positive for certain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from verifiable_relu.bounds.alpha import Ascent
from verifiable_relu.ir.network import Network
from verifiable_relu.search.batch import QueryBatch, answer_in_parts, batch_size
from verifiable_relu.search.bounding import BoundedBoxes, Bounding
from verifiable_relu.search.budget import TimeBudget
from verifiable_relu.search.outcomes import Outcome

_BATCH = 256
"""Most queries bounded at once, so that progress moves and budgets are looked at."""


@dataclass(frozen=True)
class Crown:
    """CROWN with CROWN-tight bounds of every unstable neuron; others differ from it by their options alone.

    Attributes:
        dtype: of coefficients, ``float64`` or ``float32``, rounding accounted for in both; by default float32 where
            that widens bounds little.
        ascent: the search for slopes of each row of the output that CROWN does not decide; None for none.
        intermediate: the search for bounds of the neurons that CROWN leaves unstable; None keeps CROWN's.
    """

    dtype: str | None = None
    ascent: Ascent | None = None
    intermediate: Ascent | None = None

    name: ClassVar[str] = "crown"
    by_crown: ClassVar[bool] = True
    linear: ClassVar[bool] = True

    def claims(self, batch: QueryBatch) -> Iterator[tuple[int, Outcome]]:
        """As ``Verifier.claims``."""
        return answer_in_parts(self.name, batch, self._size, self._answer)

    def _size(self, network: Network, budget: TimeBudget) -> int:
        # Half of the memory is for the batch, half for the rows that are bounded.
        return batch_size(network, _BATCH, budget.memory // 2)

    @torch.no_grad()
    def _answer(self, part: QueryBatch, work: TimeBudget) -> Sequence[Outcome]:
        dtype = None if self.dtype is None else getattr(torch, self.dtype)
        options = Bounding(self.by_crown, self.intermediate, self.linear, self.ascent, dtype)
        found = BoundedBoxes(options, part, work)
        return [found.outcome(number, self.name, "the bounds do not decide") for number in part.queries]


@dataclass(frozen=True)
class Ibp(Crown):
    """Interval bound propagation."""

    name = "ibp"
    by_crown = linear = False


@dataclass(frozen=True)
class CrownIbp(Crown):
    """CROWN-IBP: linear bounds of the output over interval bounds of every pre-activation (arXiv 1906.06316)."""

    name = "crown-ibp"
    by_crown = False


@dataclass(frozen=True)
class AlphaCrown(Crown):
    """α-CROWN: CROWN, then optimised slopes for what it does not decide."""

    ascent: Ascent | None = Ascent()  # noqa: RUF009 -- frozen

    name = "alpha-crown"


@dataclass(frozen=True)
class AlphaCrownTight(AlphaCrown):
    """α-CROWN whose slopes are optimised for the bounds of neurons, too: tighter, and slower by their number."""

    intermediate: Ascent | None = Ascent()  # noqa: RUF009 -- frozen

    name = "alpha-crown-tight"
