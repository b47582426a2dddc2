"""Slopes of a tree's relaxation, and hull cuts over neurons, that make the bound of an objective as good as it gets.

Beside a function any slope between two will do (``Function.slope_range``), as in α-CROWN (Xu et al., arXiv 2011.13824);
over a ReLU there are hull cuts (``cuts``). Slopes and cuts are made of parameters in [0, 1], by which the bound is
differentiated, and Adam steps along. Nothing here is proven: every slope is sound, and cuts are rounded at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verifiable_relu.bounds.alpha import Adam
from verifiable_relu.ir.interval import Interval
from verifiable_relu.search.bab.cuts import BlockCuts, CutSearch, HullCuts
from verifiable_relu.search.bab.forms import AffineForms, Block, Replacement
from verifiable_relu.search.bab.system import ReducedSystem


@dataclass(frozen=True)
class SlopeSearch:
    """How the slopes of a relaxation are searched for.

    Attributes:
        steps: at most.
        rate: of the first step, of parameters between 0 and 1.
        decay: the factor of the rate after every step.
    """

    steps: int = 60
    rate: float = 0.3
    decay: float = 0.98

    def search(
        self, system: ReducedSystem, rows: AffineForms, stop: Callable[[], bool], start: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return for each row the best parameters found, the slopes that they give (rows, m), and the bounds (rows,).

        The search runs in float32, until all bounds are positive.

        Args:
            system: the system.
            rows: the objectives.
            stop: asked after every step.
            start: (rows, m) parameters to begin with; those of CROWN's slopes by default.
        """
        bound = _SlopeBound(system, rows)
        start = bound.start.repeat(len(rows), 1) if start is None else start
        found, best = self.climb(lambda alpha: bound(alpha)[0], start, stop)
        return found, bound(found)[1].double(), best

    def climb(
        self, bound: Callable[[Tensor], Tensor], start: Tensor, stop: Callable[[], bool]
    ) -> tuple[Tensor, Tensor]:
        """Ascend from ``start``, (rows, parameters) in [0, 1], until all bounds are positive, or ``stop`` says so.

        Returns:
            The best parameters of every row, and their bounds (rows,).
        """
        adam, rate = Adam(start), self.rate
        found, best = start.clone(), start.new_full((len(start),), -torch.inf)
        for step in range(self.steps + 1):
            with torch.enable_grad():
                value = adam.value.detach().requires_grad_()
                bounds = bound(value)
                total = bounds.sum()
            better = bounds.detach() > best
            best = torch.where(better, bounds.detach(), best)
            found = torch.where(better[:, None], adam.value, found)
            if step == self.steps or bool((best > 0).all()) or stop():
                break
            if total.requires_grad:
                (gradient,) = torch.autograd.grad(total, value)
                # Where float32 overflows, nothing is known of where to go.
                adam.step(torch.where(gradient.isfinite(), gradient, 0.0), rate)
            rate *= self.decay
        return found, best


def slopes_for_all(system: ReducedSystem) -> Tensor:
    """Return slopes (m,) that serve objectives of all kinds."""
    found = torch.zeros_like(system.lower)
    for block in system.blocks:
        x = system.interval(block)
        (low, high), choice = block.function.slopes(x), block.function.slope_range(x)
        if block.function.piecewise_linear:
            # The chord is on the side on which there is no choice.
            found[block.part] = torch.where(choice.lower_from != choice.lower_to, low, high)[0]
        else:
            found[block.part] = (low + high)[0] / 2
    return found


@dataclass(frozen=True, eq=False)
class BetterRelaxation:
    """Slopes (m,) of a relaxation, hull cuts if there are any, and the objective's bound, not proven."""

    slopes: Tensor
    cuts: HullCuts | None
    lower: float


Improve = Callable[[ReducedSystem, AffineForms, Tensor, Callable[[], bool]], list[BetterRelaxation]]
"""Returns better relaxations of objectives, one a row, given a system, and parameters (rows, m) to begin with."""


def better_slopes(
    system: ReducedSystem, objectives: AffineForms, start: Tensor, stop: Callable[[], bool]
) -> list[BetterRelaxation]:
    """Return the best slopes found for each objective (``Improve``)."""
    _, slopes, lower = SlopeSearch().search(system, objectives, stop, start)
    return [BetterRelaxation(mine, None, least) for mine, least in zip(slopes, lower.tolist(), strict=True)]


def hull_cuts(
    system: ReducedSystem,
    objectives: AffineForms,
    start: Tensor,
    stop: Callable[[], bool],
    search: SlopeSearch = SlopeSearch(rate=0.1, decay=0.95),
) -> list[BetterRelaxation]:
    """Return the best hull cuts found for each objective, and slopes of the lines below them (``Improve``).

    The searches run one after the other, over the neurons of which the objective wants large values.
    """
    over = CutSearch(system, stop)
    found = []
    for number, alpha in enumerate(start):
        bound = _SlopeBound(system, objectives[number : number + 1])
        over.choose(bound(alpha[None])[2][0] < 0)
        size = system.size

        def value(given: Tensor, bound: _SlopeBound = bound, size: int = size) -> Tensor:
            return bound(given[:, :size], over.at(given[0, size:]))[0]

        best, least = search.climb(value, torch.cat([alpha, over.start])[None], stop)
        _, slopes, _ = bound(best[:, :size], over.at(best[0, size:]))
        cuts = over.rounded(best[0, size:])
        found.append(BetterRelaxation(slopes[0].double(), cuts, float(least)))
    return found


_POINTS = 9
"""Slopes of which the offsets of smooth functions are computed; between them offsets are interpolated."""


def _table(block: Block, x: Interval) -> Tensor:
    """Return slopes and offsets, below and above, from one end of the slopes' range to the other.

    A mean of two linear bounds is a linear bound.

    Returns:
        (2, 2, points, neurons of the block).
    """
    count, range_ = 2 if block.function.piecewise_linear else _POINTS, block.function.slope_range(x)
    share = torch.linspace(0, 1, count, dtype=x.lower.dtype, device=x.lower.device)[:, None]
    low = torch.lerp(range_.lower_from, range_.lower_to, share)
    high = torch.lerp(range_.upper_from, range_.upper_to, share)
    offsets = (block.function.floor(x, low[:, None])[:, 0], block.function.top(x, high[:, None])[:, 0])
    return torch.stack([torch.stack([low, high]), torch.stack(offsets)])


class _SlopeBound:
    """Lower bounds of rows in float32, as a function of the slopes that are taken.

    Attributes:
        start: (m,) parameters of CROWN's slopes.
    """

    def __init__(self, system: ReducedSystem, rows: AffineForms) -> None:
        self._system, self._rows = system, AffineForms(*(t.float() for t in vars(rows).values()))
        self._tables: dict[int, Tensor] = {}
        self.start = torch.full_like(system.lower, 0.5, dtype=torch.float32)
        for block in system.blocks:
            self._tables[block.start] = _table(block, system.interval(block)).float()
            if block.function.piecewise_linear:
                self.start[block.part] = (system.upper[block.part] > -system.lower[block.part]).float()

    def __call__(self, alpha: Tensor, cuts: Sequence[BlockCuts] = ()) -> tuple[Tensor, Tensor, Tensor]:
        """Return bounds (rows,), and slopes and coefficients (rows, m), by parameters (rows, m) in [0, 1].

        Cuts take the place of the upper bounds of some neurons, block by block; for one row.
        """
        system, n = self._system, self._system.inputs
        slopes, numbers = torch.zeros_like(alpha), {block.start: k for k, block in enumerate(system.blocks)}

        def taken(block: Block, mine: Tensor) -> Replacement:
            table, above = self._tables[block.start], mine < 0
            count = table.shape[2]
            place = alpha[:, block.part] * (count - 1)
            piece = place.detach().floor().clamp(0, count - 2)
            at = ((above * count + piece) * mine.shape[1]).long() + torch.arange(mine.shape[1], device=mine.device)
            ends = (table.flatten(1)[:, at.flatten() + k * mine.shape[1]].unflatten(1, at.shape) for k in range(2))
            first, second = ends
            slope, offset = torch.lerp(first, second, place - piece)
            slopes[:, block.part] = slope.detach()
            weight, rest, before = mine * slope, mine * offset, None
            constant = rest.sum(1)
            if cuts:
                over = cuts[numbers[block.start]]
                covered = above & over.covered
                weight, rest = torch.where(covered, 0.0, weight), torch.where(covered, 0.0, rest)
                amount = torch.where(covered, mine, 0.0)[0, over.covered]
                terms = (amount[:, None] * over.coefficients).flatten()[None]
                before = mine.new_zeros(1, n + block.start).index_add(1, over.places.flatten(), terms)
                constant = rest.sum(1) + amount @ over.constant
            return Replacement(weight, constant, before=before)

        first = AffineForms(*(t.expand(len(alpha), *t.shape[1:]) for t in vars(self._rows).values()))
        found = system.substituted(first, taken, rounded=False)
        return found.constant - found.inputs.abs().sum(1), slopes, found.neurons.detach()
