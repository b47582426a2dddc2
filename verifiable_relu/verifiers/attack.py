"""``attack``: projected gradient descent (PGD) on the margins of properties, which claims nothing but counterexamples.

Source: Madry et al., Towards Deep Learning Models Resistant to Adversarial Attacks, arXiv 1706.06083, with steps
of the gradient's sign and a step size that shrinks from step to step. Half of the first starting points are random
*corners* of the box: in networks with many flat regions these lead to counterexamples that uniform starting points do
not. Later starting points are corners in some inputs only, the best of many, and others that first move so that the
outputs change most, in a random direction (Tashiro, Song, Ermon, Diversity can be Transferred: Output Diversification
for White- and Black-box Attacks, arXiv 2003.06878).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from verifiable_relu.bounds.forward import input_box, rough
from verifiable_relu.network.graph import Network
from verifiable_relu.spec.property import Property, Query
from verifiable_relu.spec.row_batch import RowBatch
from verifiable_relu.verifiers.base import Outcome, Reason, TimeBudget, Trust, Verdict
from verifiable_relu.verifiers.batch import Batched, QueryBatch
from verifiable_relu.verifiers.equalities import equalities, exact_point

_BATCH = 128
"""The most queries that are attacked at once."""

_NUMBERS = (1 << 30) // (4 * 3)
"""The numbers of neurons that may be held at once: each with its value, gradient and an intermediate, in 1 GiB."""

_SCREENED, _STARTED, _TOGETHER = 1 << 22, 1 << 16, 1 << 24
"""About so many numbers are computed to find a property's starting points, in a step of a later round, and at once."""


@dataclass(frozen=True)
class Pgd:
    """Options of the attack.

    Attributes:
        steps: gradient steps in each round.
        starts: starting points per property and round. In the first round half of them are random corners of the box,
            one is its centre, the others are uniform.
        rounds: the most rounds; each draws new starting points for the properties without a counterexample so far.
        step_size: the length of a round's first step, as a fraction of the box's radius. In the first round the length
            shrinks linearly to a tenth of that, in later ones geometrically to a hundredth.
        more: starting points per property in later rounds; fewer in larger networks, but no fewer than ``starts``.
        screened: how many points are drawn for a property before a later round, the best of which are half of its
            starting points; fewer in large networks.
        diverse: the steps that the other half of these first makes for the sake of different outputs.
        clearance: a property's search ends once a margin is below −clearance. The sign of a margin nearer to zero could
            differ in other arithmetic, such as that of the check by replay.
        seed: seeds the drawing of starting points.
    """

    steps: int = 40
    starts: int = 16
    rounds: int = 2
    step_size: float = 0.5
    more: int = 64
    screened: int = 1024
    diverse: int = 5
    clearance: float = 1e-5
    seed: int = 0

    def search(
        self,
        network: Network,
        properties: Sequence[Property],
        stop: Callable[[], bool] = lambda: False,
        device: torch.device | str = "cpu",
    ) -> tuple[Tensor, Tensor]:
        """Search for the point of least margin in the box of each property, for all properties of a network at once.

        It runs in float32, or in float64 where weights exceed the range of float32, until ``stop`` returns True.

        Returns:
            The points of least margin found, (batch, input_size) in float64, which lie in the boxes up to float32
            rounding; and their margins, (batch,), as the forward pass computed them: ≤ 0 suggests a counterexample.
        """
        net, dtype = rough(network, device)
        box = input_box(properties, network, dtype, device)
        lower, upper = box.lower.flatten(1), box.upper.flatten(1)
        best = lower + (upper - lower) / 2
        worst = lower.new_full((len(properties),), torch.inf)
        generator = torch.Generator().manual_seed(self.seed)
        for number in range(self.rounds):
            active = ~(worst < -self.clearance)
            if number:
                # Another round would find nothing else at a single point.
                active &= (lower < upper).any(1)
            active = active.nonzero().squeeze(1)
            if not len(active) or stop():
                break
            rows = RowBatch.from_properties([properties[i] for i in active.tolist()], network.output_size).to(lower)
            descent = Descent(self, net, lower[active], upper[active], rows, stop)
            if number:
                points, margins = descent.toward_polytopes(descent.screened(generator), generator)
            else:
                points, margins = descent.of_margins(descent.anywhere(generator))
            better = margins < worst[active]
            best[active[better]] = points[better]
            worst[active[better]] = margins[better]
        return best.double().cpu(), worst.double().cpu()


Loss = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Takes the step, the outputs (n, batch, outputs), the rows' values (n, rows), and the margins (n, batch)."""


class Descent:
    """One round of descents in boxes (batch, inputs), one for each property of a network, until ``stop`` returns True.

    Boxes and rows are those of the properties, in the dtype and on the device of the network ``net``.
    """

    def __init__(
        self,
        options: Pgd,
        net: Network,
        lower: Tensor,
        upper: Tensor,
        rows: RowBatch,
        stop: Callable[[], bool] | None = None,
    ) -> None:
        self.options, self.net, self.lower, self.upper, self.rows = options, net, lower, upper, rows
        self._stop, self._width, self._neurons = stop, upper - lower, sum(node.size for node in net.nodes)
        self.best, self.worst = lower + self._width / 2, lower.new_full((len(lower),), torch.inf)

    def anywhere(self, generator: torch.Generator) -> Tensor:
        """Draw starting points (starts, batch, inputs): corners, uniform ones, and the centre."""
        uniform = torch.rand(self.options.starts, *self.lower.shape, generator=generator)
        corners = self.options.starts // 2
        uniform[:corners] = uniform[:corners].round()
        uniform[-1] = 0.5
        return self.lower + uniform.to(self.lower) * self._width

    def screened(self, generator: torch.Generator) -> Tensor:
        """Draw starting points (starts, batch, inputs), each at an end of the box in a random part of its inputs; the
        first half of them are those of least margin of many."""
        count, inputs = self.lower.shape
        starts = max(self.options.starts, min(self.options.more, _STARTED // self._neurons))
        many = max(starts, min(self.options.screened, _SCREENED // self._neurons))
        size = max(1, _TOGETHER // (self._neurons * count))
        drawn, margins = [], []
        for first in range(0, many, size):
            if self._stop is not None and self._stop():
                break
            uniform = torch.rand(min(size, many - first), count, inputs, generator=generator)
            share = torch.rand(len(uniform), count, 1, generator=generator)
            at_ends = torch.rand(uniform.shape, generator=generator) < share
            uniform = torch.where(at_ends, uniform.round(), uniform)
            drawn.append(self.lower + uniform.to(self.lower) * self._width)
            with torch.no_grad():
                margins.append(self._notice(drawn[-1], self._outputs(drawn[-1])[1]))
        if not drawn:
            return self.best[None].expand(starts, -1, -1)
        points, values = torch.cat(drawn), torch.cat(margins)
        least = values.topk(min(starts // 2, len(values)), dim=0, largest=False).indices
        chosen = points.gather(0, least[:, :, None].expand(-1, -1, inputs))
        return torch.cat([chosen, points[: starts - len(chosen)]])

    def of_margins(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Descend on margins from points (starts, batch, inputs); return the best of each box, and their margins."""
        steps = self.options.steps

        def loss(step: int, y: Tensor, values: Tensor, margins: Tensor) -> Tensor:
            return margins[margins.isfinite()].sum()

        return self._descend(x, steps, lambda step: 1 - 0.9 * step / steps, loss)

    def toward_polytopes(self, x: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Descend from each of the starting points (starts, batch, inputs) on what keeps it from one polytope.

        The starting points of a property take its polytopes in turn. What keeps a point from a polytope is the sum of
        the rows that are not negative enough. The second half first follows a random direction of the outputs.
        Returned are the points of least margin, (batch, inputs), and their margins, (batch,).
        """
        options, rows = self.options, self.rows
        if not len(rows.owner):
            return self.best, self.worst
        steps = options.diverse + options.steps
        counts = torch.bincount(rows.owner, minlength=rows.samples)
        turn = torch.arange(len(x), device=x.device)[:, None] % counts.clamp(min=1)
        asked = (counts.cumsum(0) - counts + turn).clamp(max=len(rows.owner) - 1)
        directions = torch.randn(len(x), x.shape[1], self.net.output_size, generator=generator).to(x)
        directions[: len(x) // 2] = 0

        def loss(step: int, y: Tensor, values: Tensor, margins: Tensor) -> Tensor:
            missing = torch.relu(values + 2 * options.clearance).nan_to_num(0, 0, 0)
            sums = missing.new_zeros(len(x), len(rows.owner)).index_add(1, rows.polytope, missing)
            wanted = sums.gather(1, asked)
            if step < options.diverse:
                wanted = torch.where(directions.any(-1), (directions * y).sum(-1), wanted)
            return wanted.sum()

        return self._descend(x, steps, lambda step: 0.01 ** (step / steps), loss)

    def _descend(self, x: Tensor, steps: int, length: Callable[[int], float], loss: Loss) -> tuple[Tensor, Tensor]:
        """Take steps of the sign of a loss's gradient."""
        movable = bool((self.lower < self.upper).any())
        for step in range(steps + 1):
            x = x.detach().requires_grad_()
            with torch.enable_grad():
                y, values = self._outputs(x)
                margins = self._notice(x, values)
                found = bool((self.worst < -self.options.clearance).all())
                if step == steps or not movable or found or (self._stop is not None and self._stop()):
                    break
                wanted = loss(step, y, values, margins)
                if not wanted.requires_grad:
                    break
                (gradient,) = torch.autograd.grad(wanted, x)
            x = x.detach() - self.options.step_size * length(step) * self._width / 2 * gradient.sign()
            x = torch.minimum(torch.maximum(x, self.lower), self.upper)
        return self.best, self.worst

    def _outputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The outputs at points (n, batch, inputs), and (n, rows) matrix·y − bound there."""
        y = self.net(x.reshape(-1, *self.net.input_shape)).flatten(1).reshape(len(x), len(self.lower), -1)
        return y, (y[:, self.rows.sample] * self.rows.matrix).sum(-1) - self.rows.bound

    def _notice(self, x: Tensor, values: Tensor) -> Tensor:
        """The margins (n, batch) of points; the least of each box is kept with its point."""
        margins = self.rows.margins(values)
        value, which = margins.detach().min(0)
        better = value < self.worst
        self.worst = torch.where(better, value, self.worst)
        own = torch.arange(len(better), device=x.device)
        self.best = torch.where(better[:, None], x.detach()[which, own], self.best)
        return margins


def claim(network: Network, prop: Property, point: np.ndarray, method: str) -> Outcome | None:
    """Return a *sat* claim for the exact point of the box nearest to a point; None if its margin there is positive.

    Args:
        network: of any dtype; it is evaluated in float64, or in float32 where what runs it rounds.
        prop: the property.
        point: (input_size,), a point in or near the property's box.
        method: the verifier that claims.
    """
    witness = prop.box.witness(point)
    rows = RowBatch.from_properties([prop], network.output_size)
    dtype = torch.float64 if network.arithmetic == "real" else torch.float32
    x = torch.tensor([float(v) for v in witness], dtype=dtype).reshape(1, *network.input_shape)
    with torch.no_grad():
        y = network(x).flatten().double()
    margin = float(rows.margins(rows.matrix @ y - rows.bound))
    # An overflow to infinity or NaN says nothing of the true margin.
    if not (margin <= 0 and bool(torch.isfinite(y).all())):
        return None
    return Outcome(Verdict.SAT, Reason.REFUTED, method, Trust.FLOAT, margin, witness, subproblems=0)


@dataclass(frozen=True)
class Attack(Batched):
    """PGD on the margin, batched over properties; never answers *unsat*."""

    pgd: Pgd = field(default_factory=Pgd)

    name: ClassVar[str] = "attack"

    def size(self, network: Network, budget: TimeBudget) -> int:
        return max(1, min(_BATCH, _NUMBERS // (sum(node.size for node in network.nodes) * self.pgd.starts)))

    def answer(self, part: QueryBatch, work: TimeBudget) -> Sequence[Outcome]:
        queries = list(part.queries.values())
        found = self.pgd.search(part.network, [query.property for query in queries], work.stop, work.device)
        points, margins = found[0].numpy(), found[1].tolist()
        return [self._claimed(*each) for each in zip(queries, points, margins, strict=True)]

    def _claimed(self, query: Query, point: np.ndarray, margin: float) -> Outcome:
        """The claim that a point of least margin allows, or an exact point near it."""
        network, prop, clearance = query.network, query.property, self.pgd.clearance
        near = margin <= clearance or any(equalities(polytope).any() for polytope in prop.unsafe)
        exact = exact_point(network, prop, point) if near and margin > -clearance else None
        if exact is not None:
            return Outcome(Verdict.SAT, Reason.REFUTED, self.name, Trust.EXACT, 0.0, exact, subproblems=0)
        found = claim(network, prop, point, self.name) if margin <= 0 else None
        if found is None and bool(((prop.box.lower < 0) & (prop.box.upper > 0)).any()):
            # Norms and their like are least at 0, where no descent ends.
            found = claim(network, prop, np.zeros(network.input_size), self.name)
        return found or Outcome.unknown(Reason.INCOMPLETE, self.name, "no counterexample was found", subproblems=0)
