"""``attack``: projected gradient descent (PGD) on the margins of properties, which claims nothing but counterexamples.

Source: Madry et al., Towards Deep Learning Models Resistant to Adversarial Attacks, arXiv 1706.06083, with steps
of the gradient's sign and a step size that shrinks from step to step. Half of the first starting points are random
*corners* of the box: in networks with many flat regions these lead to counterexamples that uniform starting points do
not. Later starting points are corners in some inputs only, the best of many, and others that first move so that the
outputs change most, in a random direction (Tashiro, Song, Ermon, Diversity can be Transferred: Output Diversification
for White- and Black-box Attacks, arXiv 2003.06878).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from verifiable_relu.ir.interval import Interval
from verifiable_relu.ir.network import Affine, Network
from verifiable_relu.rounding import largest
from verifiable_relu.search.batch import QueryBatch, answer_in_parts
from verifiable_relu.search.budget import TimeBudget
from verifiable_relu.search.outcomes import Outcome, Reason, Trust, Verdict, claim
from verifiable_relu.search.property_rows import PropertyRows, input_box
from verifiable_relu.search.solvers.encoding import equalities, exact_point
from verifiable_relu.spec.property import Property

_BATCH = 128  # The most queries that are attacked at once
_NUMBERS = (1 << 30) // (4 * 3)  # Neurons held at once: each with its value, gradient and an intermediate, in 1 GiB
# Numbers that are computed, about, to find a property's starting points, in a step of a later round, and at once
_SCREENED, _STARTED, _TOGETHER = 1 << 22, 1 << 16, 1 << 24


def search_dtype(network: Network) -> torch.dtype:
    """Return the dtype of searches that prove nothing: float32, or float64 if float32 cannot hold a weight."""
    parts = (part for op in network.ops if isinstance(op, Affine) for part in (op.map.weight, op.bias))
    fits = all(part is None or bool((part.abs() <= largest(torch.float32)).all()) for part in parts)
    return torch.float32 if fits else torch.float64


@dataclass(frozen=True)
class Pgd:
    """Options of the attack.

    The starting points of the first round are random corners of the box, its centre, and uniform ones. The lengths of
    its steps shrink linearly to a tenth, those of later rounds geometrically to a hundredth. Of the starting points of
    later rounds, half are the best of many; the others first move so that the outputs differ.
    """

    steps: int = 40  # Gradient steps in each round
    starts: int = 16  # Starting points per property in the first round
    rounds: int = 2  # The most rounds; each draws new starting points for properties without a counterexample so far
    step_size: float = 0.5  # The length of a round's first step, as a fraction of the box's radius
    later_starts: int = 64  # Starting points per property in later rounds; in large networks fewer, down to ``starts``
    screened_points: int = 1024  # Points drawn for a property before a later round; fewer in large networks
    diverse_steps: int = 5  # First steps of a later round, in random directions of the outputs (output diversification)
    # A search ends at a margin below −clearance: the sign of others could differ in the arithmetic of a replay
    clearance: float = 1e-5
    seed: int = 0  # Of the drawing of starting points

    def search(
        self,
        network: Network,
        properties: Sequence[Property],
        stop: Callable[[], bool] = lambda: False,
        device: torch.device | str = "cpu",
    ) -> tuple[Tensor, Tensor]:
        """Search for the point of least margin in the box of each property, for all properties of a network at once.

        Returns:
            The points of least margin found until ``stop`` returns True, (properties, inputs) in float64, which lie in
            the boxes up to float32 rounding; and their margins, (properties,), as the forward pass computed them: ≤ 0
            suggests a counterexample.
        """
        box = input_box(properties, search_dtype(network), device)
        rows = PropertyRows.from_properties(properties, network.output_size, device).to(box.lower.dtype)
        best, generator = torch.lerp(box.lower, box.upper, 0.5), torch.Generator().manual_seed(self.seed)
        worst = box.lower.new_full((len(properties),), torch.inf)
        for number in range(self.rounds):
            active = ~(worst < -self.clearance)
            if number:
                # Another round would find nothing else at a single point.
                active &= (box.lower < box.upper).any(1)
            active = active.nonzero().squeeze(1)
            if not len(active) or stop():
                break
            descent = Descent(self, network, box.pick(active), rows.take(active), stop)
            if number:
                points, margins = descent.toward_polytopes(descent.screened(generator), generator)
            else:
                points, margins = descent.of_margins(descent.anywhere(generator))
            better = (margins < worst[active])[:, None]
            best[active] = torch.where(better, points, best[active])
            worst[active] = torch.minimum(margins, worst[active])
        return best.double().cpu(), worst.double().cpu()


Loss = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Takes the step, the outputs (n, batch, outputs), the rows' values (n, batch, rows), and margins (n, batch)."""


class Descent:
    """One round of PGD in boxes (batch, inputs), which ends early once ``stop`` returns True.

    Without ``stop``, the host never waits for the device.
    """

    def __init__(
        self, options: Pgd, network: Network, box: Interval, rows: PropertyRows, stop: Callable[[], bool] | None = None
    ) -> None:
        self.options, self.network, self.box, self.rows, self._stop = options, network, box, rows, stop
        self._width, self._neurons = box.upper - box.lower, sum(op.size for op in network.ops)
        self.best, self.worst = box.lower + self._width / 2, box.lower.new_full((len(box.lower),), torch.inf)

    def anywhere(self, generator: torch.Generator) -> Tensor:
        """Draw starting points (starts, batch, inputs): corners, uniform points, and the centre."""
        uniform = torch.rand(self.options.starts, *self._width.shape, generator=generator)
        corners = self.options.starts // 2
        uniform[:corners] = uniform[:corners].round()
        uniform[-1] = 0.5
        return self.box.lower + uniform.to(self._width) * self._width

    def screened(self, generator: torch.Generator) -> Tensor:
        """Draw starting points (starts, batch, inputs) with random inputs at an end of the box, half of them screened.

        The first half are those of least margin among ``screened_points``.
        """
        count, inputs = self._width.shape
        starts = max(self.options.starts, min(self.options.later_starts, _STARTED // self._neurons))
        many = max(starts, min(self.options.screened_points, _SCREENED // self._neurons))
        size = max(1, _TOGETHER // (self._neurons * count))
        drawn, margins = [], []
        for first in range(0, many, size):
            if self._stop is not None and self._stop():
                break
            uniform = torch.rand(min(size, many - first), count, inputs, generator=generator)
            share = torch.rand(len(uniform), count, 1, generator=generator)
            at_ends = torch.rand(uniform.shape, generator=generator) < share
            uniform = torch.where(at_ends, uniform.round(), uniform)
            drawn.append(self.box.lower + uniform.to(self._width) * self._width)
            with torch.no_grad():
                margins.append(self._seen(drawn[-1])[2])
        if not drawn:
            return self.best[None].expand(starts, -1, -1)
        points, values = torch.cat(drawn), torch.cat(margins)
        least = values.topk(min(starts // 2, len(values)), dim=0, largest=False).indices
        chosen = points.gather(0, least[:, :, None].expand(-1, -1, inputs))
        return torch.cat([chosen, points[: starts - len(chosen)]])

    def of_margins(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Descend on margins from points (starts, batch, inputs); return the best of each box, and their margins."""
        steps = self.options.steps
        lengths = [1 - 0.9 * step / steps for step in range(steps)]
        return self._descend(x, lengths, lambda _, y, values, margins: margins.where(margins.isfinite(), 0.0).sum())

    def toward_polytopes(self, x: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Move starting points (starts, batch, inputs) towards one unsafe polytope each, by gradient descent.

        The starting points of a property take its polytopes in turn. What keeps a point from a polytope is the sum of
        the rows that are not negative enough. The second half first follows a random direction of the outputs.
        Returned are the points of least margin, (batch, inputs), and their margins, (batch,).
        """
        options, rows = self.options, self.rows
        steps = options.diverse_steps + options.steps
        turn = torch.arange(len(x), device=x.device)[:, None] % rows.exists.sum(1).clamp(min=1)
        directions = torch.randn(len(x), x.shape[1], self.network.output_size, generator=generator).to(x)
        directions[: len(x) // 2] = 0

        def loss(step: int, y: Tensor, values: Tensor, margins: Tensor) -> Tensor:
            missing = torch.relu(values + 2 * options.clearance).nan_to_num(0, 0, 0)
            wanted = torch.where(rows.polytope == turn[..., None], missing, 0.0).sum(2)
            if step < options.diverse_steps:
                wanted = torch.where(directions.any(2), (directions * y).sum(2), wanted)
            return wanted.sum()

        return self._descend(x, [0.01 ** (step / steps) for step in range(steps)], loss)

    def _descend(self, x: Tensor, lengths: Sequence[float], loss: Loss) -> tuple[Tensor, Tensor]:
        """Take steps along the sign of a loss's gradient."""
        movable = (self._width > 0).any()
        for step in range(len(lengths) + 1):
            x = x.detach().requires_grad_()
            with torch.enable_grad():
                y, values, margins = self._seen(x)
                if step == len(lengths) or (self._stop is not None and self._stop()):
                    break
                # Without ``stop``, nothing may wait for the device.
                if self._stop is not None and bool((self.worst < -self.options.clearance).all() | ~movable):
                    break
                wanted = loss(step, y, values, margins)
                if not wanted.requires_grad:
                    break
                (gradient,) = torch.autograd.grad(wanted, x)
            x = x.detach() - self.options.step_size * lengths[step] * self._width / 2 * gradient.sign()
            x = torch.minimum(torch.maximum(x, self.box.lower), self.box.upper)
        return self.best, self.worst

    def _seen(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return outputs, row values and margins at points (n, batch, inputs), and keep each box's best point."""
        y = self.network(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        values = self.rows.values(y)
        margins = self.rows.margins(values)
        value, which = margins.detach().min(0)
        better = value < self.worst
        self.worst = torch.where(better, value, self.worst)
        point = x.detach().gather(0, which[None, :, None].expand(1, -1, x.shape[2]))[0]
        self.best = torch.where(better[:, None], point, self.best)
        return y, values, margins


@dataclass(frozen=True)
class Attack:
    """PGD on the margin, batched over properties; never answers *unsat*."""

    pgd: Pgd = field(default_factory=Pgd)

    name: ClassVar[str] = "attack"

    def claims(self, batch: QueryBatch) -> Iterator[tuple[int, Outcome]]:
        return answer_in_parts(self.name, batch, self._size, self._answer)

    def _size(self, network: Network, budget: TimeBudget) -> int:
        return max(1, min(_BATCH, _NUMBERS // (sum(op.size for op in network.ops) * self.pgd.starts)))

    def _answer(self, part: QueryBatch, work: TimeBudget) -> Sequence[Outcome]:
        points, margins = self.pgd.search(part.network, part.properties, work.stop, work.device)
        each = zip(part.properties, points.numpy(), margins.tolist(), strict=True)
        return [self._claimed(part.network, *found) for found in each]

    def _claimed(self, network: Network, prop: Property, point: np.ndarray, margin: float) -> Outcome:
        """Return a *sat* claim for a point of least margin, or for an exact point near it."""
        clearance = self.pgd.clearance
        near = margin <= clearance or any(equalities(polytope).any() for polytope in prop.unsafe)
        exact = exact_point(network, prop, point) if near and margin > -clearance else None
        if exact is not None:
            return Outcome(Verdict.SAT, Reason.REFUTED, self.name, Trust.EXACT, 0.0, exact, subproblems=0)
        found = claim(network, prop, point, self.name) if margin <= 0 else None
        if found is None and bool(((prop.box.lower < 0) & (prop.box.upper > 0)).any()):
            # Norms and their like are least at 0, where no descent ends.
            found = claim(network, prop, np.zeros(network.input_size), self.name)
        return found or Outcome.unknown(Reason.INCOMPLETE, self.name, "no counterexample was found", subproblems=0)
