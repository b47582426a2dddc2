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
from verifiable_relu.verifiers.base import Batched, Outcome, Reason, TimeBudget, Trust, Verdict
from verifiable_relu.verifiers.batch import QueryBatch
from verifiable_relu.verifiers.equalities import exact_point, is_thin

_BATCH = 128
"""The most queries that are attacked at once."""

_MEMORY = 1 << 30
"""The bytes that an attack may hold at once, approximately."""

_COPIES = 3
"""The numbers held for each neuron and starting point: value, gradient, and an intermediate result for the gradient."""

_SCREENED = 1 << 22
"""About so many numbers are computed to find starting points for one property."""

_STARTED = 1 << 16
"""About so many numbers are computed in each step of a later round for one property."""

_TOGETHER = 1 << 24
"""About so many numbers are computed at once."""


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
        stop: Callable[[], bool] | None = None,
        device: torch.device | str = "cpu",
    ) -> tuple[Tensor, Tensor]:
        """Search for the point of least margin in the box of each property, for all properties of a network at once.

        Args:
            network: of any dtype; the search runs in float32, or in float64 where weights exceed the range of float32.
            properties: the properties, all of this network.
            stop: called between steps; the search ends when it returns True.
            device: the torch device on which the search runs.

        Returns:
            The points of least margin found, (batch, input_size) in float64, which lie in the boxes up to float32
            rounding; and their margins, (batch,), as the forward pass computed them. A margin ≤ 0 suggests a
            counterexample.
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
            if not len(active) or (stop is not None and stop()):
                break
            rows = RowBatch.from_properties([properties[i] for i in active.tolist()], network.output_size).to(lower)
            round_ = Descent(self, net, lower[active], upper[active], rows, stop)
            if number:
                points, margins = round_.toward_polytopes(round_.screened(generator), generator)
            else:
                points, margins = round_.of_margins(round_.anywhere(generator))
            better = margins < worst[active]
            best[active[better]] = points[better]
            worst[active[better]] = margins[better]
        return best.double().cpu(), worst.double().cpu()


class Descent:
    """One round of descents in a batch of boxes, one for each of some properties of a network.

    Args:
        options: of the attack.
        net: the network, in the dtype and on the device of the boxes.
        lower, upper: (batch, inputs), the boxes.
        rows: those of the properties, in the same dtype.
        stop: called between steps; the round ends when it returns True.
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
        self.options, self.net, self.rows, self._stop = options, net, rows, stop
        self.lower, self.upper = lower, upper
        self.best = lower + (upper - lower) / 2
        self.worst = lower.new_full((len(lower),), torch.inf)
        self._movable = bool((lower < upper).any())

    def anywhere(self, generator: torch.Generator) -> Tensor:
        """Starting points (starts, batch, inputs): corners, uniform ones, and the centre."""
        uniform = torch.rand(self.options.starts, *self.lower.shape, generator=generator)
        corners = self.options.starts // 2
        uniform[:corners] = uniform[:corners].round()
        uniform[-1] = 0.5
        return self._at(uniform)

    def screened(self, generator: torch.Generator) -> Tensor:
        """Starting points (starts, batch, inputs), each at an end of the box in a random part of its inputs; the first
        half of them are those of least margin of many."""
        count, inputs = self.lower.shape
        neurons = sum(node.size for node in self.net.nodes)
        starts = max(self.options.starts, min(self.options.more, _STARTED // neurons))
        many = max(starts, min(self.options.screened, _SCREENED // neurons))
        drawn = []
        margins = []
        size = max(1, _TOGETHER // (neurons * count))
        for first in range(0, many, size):
            if self._late():
                break
            uniform = torch.rand(min(size, many - first), count, inputs, generator=generator)
            share = torch.rand(len(uniform), count, 1, generator=generator)
            at_ends = torch.rand(uniform.shape, generator=generator) < share
            drawn.append(self._at(torch.where(at_ends, uniform.round(), uniform)))
            with torch.no_grad():
                margins.append(self._notice(drawn[-1], self._outputs(drawn[-1])[1]))
        if not drawn:
            return self.best[None].expand(starts, -1, -1)
        points, values = torch.cat(drawn), torch.cat(margins)
        least = values.topk(min(starts // 2, len(values)), dim=0, largest=False).indices
        chosen = points.gather(0, least[:, :, None].expand(-1, -1, inputs))
        return torch.cat([chosen, points[: starts - len(chosen)]])

    def of_margins(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Descend on the margins from starting points (starts, batch, inputs).

        Returns:
            The points of least margin, (batch, inputs), and their margins, (batch,).
        """
        steps = self.options.steps

        def loss(step: int, y: Tensor, values: Tensor, margins: Tensor) -> Tensor:
            return margins[margins.isfinite()].sum()

        return self._descend(x, steps, lambda step: 1 - 0.9 * step / steps, loss)

    def toward_polytopes(self, x: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Descend from each of the starting points (starts, batch, inputs) on what keeps it from one polytope.

        The starting points of a property take its polytopes in turn. What keeps a point from a polytope is the sum of
        the rows that are not negative enough. The second half first follows a random direction of the outputs.

        Returns:
            The points of least margin, (batch, inputs), and their margins, (batch,).
        """
        options, rows = self.options, self.rows
        steps = options.diverse + options.steps
        counts = torch.bincount(rows.owner, minlength=rows.samples)
        first = counts.cumsum(0) - counts
        turn = torch.arange(len(x), device=x.device)[:, None] % counts.clamp(min=1)
        asked = (first + turn).clamp(max=max(0, len(rows.owner) - 1))
        directions = torch.randn(len(x), x.shape[1], self.net.output_size, generator=generator).to(x)
        directions[: len(x) // 2] = 0

        def loss(step: int, y: Tensor, values: Tensor, margins: Tensor) -> Tensor:
            missing = torch.relu(values + 2 * options.clearance).nan_to_num(0, 0, 0)
            sums = missing.new_zeros(len(x), len(rows.owner)).index_add(1, rows.polytope, missing)
            wanted = sums.gather(1, asked)
            if step < options.diverse:
                wanted = torch.where(directions.any(-1), (directions * y).sum(-1), wanted)
            return wanted.sum()

        if not len(rows.owner):
            return self.best, self.worst
        return self._descend(x, steps, lambda step: 0.01 ** (step / steps), loss)

    def _descend(
        self,
        x: Tensor,
        steps: int,
        length: Callable[[int], float],
        loss: Callable[[int, Tensor, Tensor, Tensor], Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Steps of the sign of a loss's gradient; ``loss`` takes the step, the outputs, rows' values, and margins."""
        width = self.upper - self.lower
        for step in range(steps + 1):
            x = x.detach().requires_grad_()
            with torch.enable_grad():
                y, values = self._outputs(x)
                margins = self._notice(x, values)
                if step == steps or not self._movable or self._late():
                    break
                if bool((self.worst < -self.options.clearance).all()):
                    break
                wanted = loss(step, y, values, margins)
                if not wanted.requires_grad:
                    break
                (gradient,) = torch.autograd.grad(wanted, x)
            x = x.detach() - self.options.step_size * length(step) * width / 2 * gradient.sign()
            x = torch.minimum(torch.maximum(x, self.lower), self.upper)
        return self.best, self.worst

    def _late(self) -> bool:
        return self._stop is not None and self._stop()

    def _at(self, uniform: Tensor) -> Tensor:
        """The points of the boxes at these parts of their widths."""
        return self.lower + uniform.to(self.lower) * (self.upper - self.lower)

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
    """A *sat* claim for the exact point of the box nearest to ``point``; None if its margin there is positive.

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
    """PGD on the margin, batched over properties; never answers *unsat*.

    Attributes:
        pgd: the options of the search.
    """

    pgd: Pgd = field(default_factory=Pgd)

    name: ClassVar[str] = "attack"

    def size(self, network: Network, budget: TimeBudget) -> int:
        """As ``Batched.size``, by what a search holds."""
        neurons = sum(node.size for node in network.nodes)
        return max(1, min(_BATCH, _MEMORY // (neurons * 4 * _COPIES * self.pgd.starts)))

    def answer(self, part: QueryBatch, work: TimeBudget) -> Sequence[Outcome]:
        """As ``Batched.answer``."""
        properties = [query.property for query in part.queries.values()]
        points, margins = self.pgd.search(part.network, properties, work.stop, work.device)
        return [
            self._claimed(query, point, margin)
            for query, point, margin in zip(part.queries.values(), points.numpy(), margins.tolist(), strict=True)
        ]

    def _claimed(self, query: Query, point: np.ndarray, margin: float) -> Outcome:
        """The claim that a point of least margin allows, or an exact point near it."""
        network, prop = query.network, query.property
        if margin <= self.pgd.clearance or any(is_thin(polytope) for polytope in prop.unsafe):
            exact = exact_point(network, prop, point) if margin > -self.pgd.clearance else None
            if exact is not None:
                return Outcome(Verdict.SAT, Reason.REFUTED, self.name, Trust.EXACT, 0.0, exact, subproblems=0)
        found = claim(network, prop, point, self.name) if margin <= 0 else None
        if found is None and bool(((prop.box.lower < 0) & (prop.box.upper > 0)).any()):
            # Norms and their like are least at 0, where no descent ends.
            found = claim(network, prop, np.zeros(network.input_size), self.name)
        return found or Outcome.unknown(Reason.INCOMPLETE, self.name, "no counterexample was found", subproblems=0)
