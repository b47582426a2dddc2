"""Projected gradient descent (PGD) on the margins of properties, which proposes points and proves nothing of them.

Source: Madry et al., Towards Deep Learning Models Resistant to Adversarial Attacks, arXiv 1706.06083, with steps
of the gradient's sign and a step size that shrinks from step to step. Half of the starting points are random *corners*
of the box: in networks with many flat regions these lead to counterexamples that uniform starting points do not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verifiable_relu.bounds.interval import input_box, rough
from verifiable_relu.network.graph import Network
from verifiable_relu.spec.property import Property
from verifiable_relu.spec.row_batch import RowBatch


@dataclass(frozen=True)
class Pgd:
    """Options of the attack.

    Attributes:
        steps: gradient steps in each round.
        starts: starting points per property and round: half of them random corners of the box, one its centre, the
            others uniform.
        rounds: the most rounds; each draws new starting points for the properties without a counterexample so far.
        step_size: the length of the first step, as a fraction of the box's radius; the length shrinks linearly to a
            tenth of that.
        clearance: a property's search ends once a margin is below −clearance. The sign of a margin nearer to zero could
            differ in other arithmetic, such as that of the check by replay.
        seed: seeds the drawing of starting points.
    """

    steps: int = 40
    starts: int = 16
    rounds: int = 2
    step_size: float = 0.5
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
        for _ in range(self.rounds):
            active = (~(worst < -self.clearance)).nonzero().squeeze(1)
            if not len(active) or (stop is not None and stop()):
                break
            rows = RowBatch.of([properties[i] for i in active.tolist()], network.output_size).to(lower)
            points, margins = self._descend(net, lower[active], upper[active], rows, generator, stop)
            better = margins < worst[active]
            best[active[better]] = points[better]
            worst[active[better]] = margins[better]
        return best.double().cpu(), worst.double().cpu()

    def _descend(
        self,
        net: Network,
        lower: Tensor,
        upper: Tensor,
        rows: RowBatch,
        generator: torch.Generator,
        stop: Callable[[], bool] | None,
    ) -> tuple[Tensor, Tensor]:
        count, size = lower.shape
        uniform = torch.rand(self.starts, count, size, generator=generator)
        corners = self.starts // 2
        uniform[:corners] = uniform[:corners].round()
        uniform[-1] = 0.5
        width = upper - lower
        x = lower + uniform.to(lower) * width
        best, worst = x[-1].clone(), lower.new_full((count,), torch.inf)
        for step in range(self.steps + 1):
            x = x.detach().requires_grad_()
            y = net(x.reshape(-1, *net.input_shape)).flatten(1).reshape(self.starts, count, -1)
            margins = rows.margins((y[:, rows.sample] * rows.matrix).sum(-1) - rows.bound)
            value, which = margins.detach().min(0)
            better = value < worst
            worst = torch.where(better, value, worst)
            best = torch.where(better[:, None], x.detach()[which, torch.arange(count, device=x.device)], best)
            if step == self.steps or bool((worst < -self.clearance).all()) or (stop is not None and stop()):
                break
            finite = margins[margins.isfinite()]
            if not finite.numel():
                break
            (gradient,) = torch.autograd.grad(finite.sum(), x)
            size_now = self.step_size * (1 - 0.9 * step / self.steps)
            x = x.detach() - size_now * width / 2 * gradient.sign()
            x = torch.minimum(torch.maximum(x, lower), upper)
        return best, worst
