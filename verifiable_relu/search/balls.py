"""L1 and L2 balls: linear bounds in the dual norm; where these do not decide, the box around the ball.

A row g of a polytope of the unsafe set has a lower bound g(x) ≥ v + Σ_i A_i·(x_i − m_i) over the box around the ball: A
are the coefficients of its linear bound, m is the corner of the box where that is least, and v its value there. Over
the ball {c + d : ‖d‖_p ≤ ε}, Hölder's inequality gives g(x) ≥ v + A·(c − m) − ε·‖A‖_q with 1/p + 1/q = 1. The point of
the ball where this bound is least is tried as a counterexample.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from verifiable_relu.bounds.neuron_bounds import BASE
from verifiable_relu.ir.interval import Interval
from verifiable_relu.rounding import below, epsilon, tiny, unit_roundoff
from verifiable_relu.search.batch import QueryBatch, Verifier, answer_in_parts, batch_size
from verifiable_relu.search.bounding import BoundedBoxes, Crown
from verifiable_relu.search.budget import TimeBudget
from verifiable_relu.search.outcomes import Outcome, Reason, Verdict, claim
from verifiable_relu.search.split.bounding import backward_rows, coefficient_error
from verifiable_relu.spec.property import Ball, round_up

_BATCH = 64  # Most balls bounded at once
_INSIDE = 1e-4  # The part of the radius by which candidates stay inside, so that rounding does not leave the ball


@dataclass(frozen=True)
class InBalls:
    """Verifier of properties of L1 and L2 balls; each query has one ball.

    If bounds over the ball do not decide, ``inner`` is asked about the box around it: *unsat* holds for the ball, and
    *sat* counts only if the counterexample lies in the ball.
    """

    inner: Verifier

    name: ClassVar[str] = "balls"

    def claims(self, batch: QueryBatch) -> Iterator[tuple[int, Outcome]]:
        first: dict[int, Outcome] = {}
        for number, outcome in answer_in_parts(self.name, batch, batch_size(_BATCH), self._answer):
            if outcome.verdict is Verdict.UNKNOWN:
                first[number] = outcome
            else:
                yield number, outcome
        asked = {number: batch.queries[number] for number in first}
        boxes = {number: replace(q, property=replace(q.property, ball=None)) for number, q in asked.items()}
        inner = batch.part(list(asked), queries=boxes)
        for number in inner.ask(self.inner):
            box = inner.outcomes[number]
            if box.witness is not None and not asked[number].property.admits(box.witness):
                box = Outcome.unknown(Reason.INCOMPLETE, box.method, "the box is not proved", seconds=box.seconds)
            detail = "; ".join(filter(None, (box.detail, "asked about the box around the ball")))
            yield number, replace(box, detail=detail).after(first[number])

    @torch.no_grad()
    def _answer(self, part: QueryBatch, work: TimeBudget) -> Sequence[Outcome]:
        # The error of coefficients of the inputs is known in float64.
        bounds = BoundedBoxes(Crown("float64", linear=False), part, work.share(0.5))
        relaxation, rows, error = bounds.relaxation, bounds.rows, coefficient_error(part.network)
        balls, box = [prop.ball for prop in part.properties if prop.ball], relaxation.bounds[0].interval
        lower, points = least_in_balls(*backward_rows(relaxation, rows.matrix), box, balls, error)
        margins = rows.margins(below(lower - rows.bound)).tolist()
        # Of each query's rows, the point where the network comes closest to the unsafe set is tried.
        outputs = part.network(points.flatten(0, 1)).unflatten(0, points.shape[:2]).transpose(0, 1)
        best = rows.margins(rows.values(outputs)).argmin(0)
        found = []
        for prop, margin, point in zip(part.properties, margins, points[range(len(points)), best].cpu(), strict=True):
            outcome = None if margin > 0 else claim(part.network, prop, point.numpy(), self.name)
            if margin > 0:
                outcome = Outcome(Verdict.UNSAT, Reason.PROVED, self.name, bounds.trust, margin, subproblems=0)
            elif outcome is None or outcome.witness is None or not prop.admits(outcome.witness):
                outcome = Outcome.unknown(Reason.INCOMPLETE, self.name, margin=margin, subproblems=0)
            found.append(outcome)
        return found


def least_in_balls(
    value: Tensor, slope: Tensor, box: Interval, balls: Sequence[Ball], slope_error: float
) -> tuple[Tensor, Tensor]:
    """Return lower bounds (balls, rows) of linear functions, and points (balls, rows, inputs) where they are least.

    ``value`` (balls, rows) are lower bounds over the boxes (balls, inputs) around the balls, ``slope`` (balls, rows,
    inputs) the functions' coefficients, in float64, and ``slope_error`` their relative error.
    """
    lower, upper = box.lower.unsqueeze(1), box.upper.unsqueeze(1)
    center = torch.from_numpy(np.stack([ball.center for ball in balls])).to(slope).unsqueeze(1)
    radius = slope.new_tensor([[[round_up(ball.radius)]] for ball in balls])
    is_l1 = slope.new_tensor([[[ball.order]] for ball in balls]) == 1
    # The dual norm, and the vector of norm 1 whose product with the slope that is. Small squares would be lost.
    largest, place = slope.abs().max(2, keepdim=True)
    scaled = slope / torch.where(largest > 0, largest, 1.0)
    length = scaled.norm(dim=2, keepdim=True).clamp(min=1)
    peak = torch.zeros_like(slope).scatter(2, place, slope.gather(2, place).sign())
    norm, direction = torch.where(is_l1, largest, largest * length), torch.where(is_l1, peak, scaled / length)
    gain, inputs = slope * (center - torch.where(slope > 0, lower, upper)), slope.shape[2]
    # Sums of n terms err by at most n + 4 units of the sum of their sizes, and products by underflow.
    unit, reach = unit_roundoff(BASE), (radius * norm).squeeze(2)
    error = (inputs + 8) * (unit * (gain.abs().sum(2) + reach) + tiny(BASE))
    error = error + slope_error * (slope.abs() * (upper - lower)).sum(2)
    better = value + gain.sum(2) - reach - 4 * error - 4 * unit * value.abs()
    # A candidate's coordinates may be rounded to float32.
    step = radius * (1 - _INSIDE) - inputs * epsilon(torch.float32) * center.abs().amax(2, keepdim=True)
    points = (center - step.clamp(min=0) * direction).clamp(lower, upper)
    return torch.where(better > value, better, value), points
