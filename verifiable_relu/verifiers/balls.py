"""L1 and L2 balls: linear bounds in the dual norm, an attack in the ball, and the box around it for the rest.

A row g of a polytope of the unsafe set has a lower bound g(x) ≥ v + Σ_i A_i·(x_i − m_i) over the box around the ball: A
are the coefficients of its linear bound, m is the corner of the box where that is least, and v its value there. Over
the ball {c + d : ‖d‖_p ≤ ε}, Hölder's inequality gives g(x) ≥ v + A·(c − m) − ε·‖A‖_q with 1/p + 1/q = 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from verifiable_relu.bounds import input_box
from verifiable_relu.bounds.relaxation import Relaxation
from verifiable_relu.bounds.rounding import covers, keeps_activations
from verifiable_relu.bounds.tuning import chunk_size
from verifiable_relu.network.graph import Network
from verifiable_relu.rounding import below, divisor, epsilon, tiny, unit_roundoff
from verifiable_relu.spec.property import Query, round_up
from verifiable_relu.spec.row_batch import RowBatch
from verifiable_relu.verifiers.attack import claim
from verifiable_relu.verifiers.base import Batched, Limits, Outcome, Reason, Trust, Verdict, Verifier, batch_size
from verifiable_relu.verifiers.docket import Docket
from verifiable_relu.verifiers.root import relaxation
from verifiable_relu.verifiers.split import input_error

_BATCH = 64

_STEPS, _STARTS = 60, 4
_INSIDE = 1e-4
"""The part of the radius by which an attack stays away from the sphere, so that rounding does not leave the ball."""


@dataclass(frozen=True)
class InBalls(Batched):
    """Answers properties of L1 and L2 balls; queries without a ball are left to ``inner`` as they are.

    Attributes:
        inner: the verifier that is asked about the box around a ball, where bounds and attack in the ball decide
            nothing. Its *unsat* holds for the ball; its *sat* only counts if the counterexample lies in the ball.
    """

    inner: Verifier

    name: ClassVar[str] = "balls"

    def claims(self, docket: Docket) -> Iterator[tuple[int, Outcome]]:
        """As ``Verifier.claims``."""
        first: dict[int, Outcome] = {}
        for number, outcome in super().claims(docket):
            if outcome.verdict is Verdict.UNKNOWN:
                first[number] = outcome
            else:
                yield number, outcome
        boxes = {
            number: replace(docket.queries[number], property=replace(docket.queries[number].property, ball=None))
            for number in first
        }
        inner = docket.part(list(first), queries=boxes)
        for number in inner.ask(self.inner):
            yield number, _joined(docket.queries[number], first[number], inner.outcomes[number])

    def size(self, network: Network, limits: Limits) -> int:
        """As ``Batched.size``."""
        return batch_size(network, _BATCH, limits.memory // 2)

    def answer(self, part: Docket, work: Limits) -> Sequence[Outcome]:
        """As ``Batched.answer``, in half of the time."""
        stop, queries = work.share(0.5).stop, list(part.queries.values())
        margins, trust = self._margins(part.network, queries, work.memory, stop)
        found = []
        for query, margin in zip(queries, margins, strict=True):
            if margin > 0:
                proved = Outcome(Verdict.UNSAT, Reason.PROVED, self.name, trust, margin)
                found.append(replace(proved, subproblems=0))
                continue
            point = None if query.property.ball is None or stop() else _attack(query)
            sat = None if point is None else claim(part.network, query.property, point, self.name)
            if sat is not None and sat.witness is not None and query.property.admits(sat.witness):
                found.append(sat)
            else:
                known = None if math.isnan(margin) else margin
                detail = "the bounds do not decide"
                found.append(Outcome.unknown(Reason.INCOMPLETE, self.name, detail, margin=known, subproblems=0))
        return found

    @torch.inference_mode()
    def _margins(
        self, network: Network, queries: Sequence[Query], memory: int, stop: Callable[[], bool]
    ) -> tuple[list[float], Trust]:
        """Lower bounds of the margins over the balls by CROWN, and how far they can be trusted."""
        properties = [query.property for query in queries]
        net = network.to(torch.float64)
        box = input_box(properties, network, torch.float64, "cpu")
        found = relaxation(net, box, None, memory=memory // 2, stop=stop)
        rows = RowBatch.of(properties, network.output_size)
        values = torch.full_like(rows.bound, -math.inf)
        size = max(1, chunk_size(net, rows.matrix.reshape(-1, *net.output_shape), memory // 2, found.tuning))
        for start in range(0, len(values), size):
            if stop():
                break
            part = slice(start, start + size)
            values[part] = self._rows(found, net, rows, part, queries)
        values = below(values - rows.bound)
        margins: list[float] = rows.margins(values).tolist()
        sound = covers(net, torch.float64, "cpu") and keeps_activations(network, net)
        return margins, Trust.ROUNDED if sound else Trust.FLOAT

    def _rows(self, found: Relaxation, net: Network, rows: RowBatch, part: slice, queries: Sequence[Query]) -> Tensor:
        """Lower bounds of the rows' A·y over the balls, (rows,)."""
        sample = rows.sample[part]
        matrix = rows.matrix[part].reshape(-1, *net.output_shape)
        value, ended = found.lower(len(net.nodes) - 1, matrix, sample, coefficients=True)
        assert ended is not None
        slope = found.of_input(ended)
        lower, upper = found.box.lower.flatten(1)[sample], found.box.upper.flatten(1)[sample]
        least = torch.where(slope > 0, lower, upper)
        unit = unit_roundoff(torch.float64)
        spare = input_error(net, torch.float64) * (slope.abs() * (upper - lower)).sum(1)
        better = value.clone()
        for row, index in enumerate(sample.tolist()):
            ball = queries[index].property.ball
            if ball is None:
                continue
            radius = round_up(ball.radius)
            gain = slope[row] * (torch.from_numpy(ball.center) - least[row])
            norm = slope[row].abs().max()
            if ball.order == 2 and norm > 0:
                # Squares of small numbers would be lost.
                norm = norm * (slope[row] / norm).norm()
            # Sums of n terms err by at most n + 4 units of the sum of their sizes, and products by what underflows.
            error = (gain.numel() + 8) * (unit * (gain.abs().sum() + radius * norm) + tiny(gain.dtype)) + spare[row]
            better[row] = value[row] + gain.sum() - radius * norm - 4 * error - 4 * unit * value[row].abs()
        return torch.where(better > value, better, value)


def _joined(query: Query, ours: Outcome, box: Outcome) -> Outcome:
    """The outcome for a ball of what is known of the ball and of the box around it."""
    if query.property.ball is None:
        return box
    seconds = {**ours.seconds, **box.seconds}
    detail = f"{box.detail}; " if box.detail else ""
    if box.verdict is Verdict.UNSAT:
        return replace(box, seconds=seconds, detail=f"{detail}proved for the box around the ball")
    if box.verdict is Verdict.SAT:
        if box.witness is not None and query.property.admits(box.witness):
            return replace(box, seconds=seconds)
        said = "the box around the ball has a counterexample that lies outside of the ball"
        return Outcome.unknown(Reason.INCOMPLETE, box.method, said, margin=ours.margin, seconds=seconds)
    return replace(box, seconds=seconds, margin=ours.margin, detail=f"{detail}asked about the box around the ball")


def _attack(query: Query) -> np.ndarray | None:
    """A point of least margin that projected gradient descent finds in a ball and its box; None for a radius of 0."""
    ball, box = query.property.ball, query.property.box
    assert ball is not None
    net = query.network.to(torch.float64)
    rows = RowBatch.of([query.property], net.output_size)
    center = torch.from_numpy(ball.center)
    # A coordinate is rounded to float32 afterwards.
    spare = ball.center.size * epsilon(torch.float32) * float(np.abs(ball.center).max(initial=1.0))
    radius = float(ball.radius) * (1 - _INSIDE) - spare
    if radius <= 0:
        return None
    lower, upper = torch.from_numpy(box.lower), torch.from_numpy(box.upper)
    generator = torch.Generator().manual_seed(0)
    x = center + _projected(
        torch.randn(_STARTS, len(center), generator=generator, dtype=torch.float64), radius, ball.order
    )
    best, worst = center, math.inf
    for step in range(_STEPS + 1):
        x = torch.minimum(torch.maximum(x, lower), upper).detach().requires_grad_()
        y = net(x.reshape(-1, *net.input_shape)).flatten(1)
        margins = rows.margins(y @ rows.matrix.T - rows.bound).squeeze(1)
        value, which = margins.detach().min(0)
        if value < worst:
            best, worst = x.detach()[which], float(value)
        if step == _STEPS or worst < -1e-5 or not bool(margins.isfinite().all()):
            break
        (gradient,) = torch.autograd.grad(margins.sum(), x)
        length = radius * (1 - 0.9 * step / _STEPS) / 2
        moved = x.detach() - length * _direction(gradient, ball.order)
        x = center + _projected(moved - center, radius, ball.order)
    return best.numpy()


def _direction(gradient: Tensor, order: int) -> Tensor:
    """The steepest direction of length 1 in the norm: along the gradient, or along its largest coordinate."""
    if order == 2:
        return gradient / divisor(gradient.norm(dim=1, keepdim=True))
    largest = gradient.abs().argmax(1, keepdim=True)
    return torch.zeros_like(gradient).scatter(1, largest, gradient.gather(1, largest).sign())


def _projected(d: Tensor, radius: float, order: int) -> Tensor:
    """The nearest points of the ball around 0 to points (n, inputs).

    For L1: Duchi et al., Efficient Projections onto the l1-Ball, ICML 2008.
    """
    if order == 2:
        return d * (radius / d.norm(dim=1, keepdim=True).clamp(min=radius))
    size = d.abs()
    ordered = size.sort(dim=1, descending=True).values
    count = torch.arange(1, d.shape[1] + 1, dtype=d.dtype)
    threshold = (ordered.cumsum(1) - radius) / count
    kept = (ordered > threshold).sum(1, keepdim=True).clamp(min=1)
    cut = threshold.gather(1, kept - 1).clamp(min=0)
    return d.sign() * (size - cut).clamp(min=0)
