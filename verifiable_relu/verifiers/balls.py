"""L1 and L2 balls: linear bounds in the dual norm, and the box around the ball where these do not decide.

A row g of a polytope of the unsafe set has a lower bound g(x) ≥ v + Σ_i A_i·(x_i − m_i) over the box around the ball: A
are the coefficients of its linear bound, m is the corner of the box where that is least, and v its value there. Over
the ball {c + d : ‖d‖_p ≤ ε}, Hölder's inequality gives g(x) ≥ v + A·(c − m) − ε·‖A‖_q with 1/p + 1/q = 1. The point of
the ball where this bound is least is tried as a counterexample.
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
from verifiable_relu.rounding import below, epsilon, tiny, unit_roundoff
from verifiable_relu.spec.property import Ball, round_up
from verifiable_relu.spec.row_batch import RowBatch
from verifiable_relu.verifiers.attack import claim
from verifiable_relu.verifiers.base import Outcome, Reason, TimeBudget, Trust, Verdict, batch_size
from verifiable_relu.verifiers.batch import Batched, QueryBatch, Verifier
from verifiable_relu.verifiers.boxes import input_error
from verifiable_relu.verifiers.root_bounds import relaxation

_BATCH = 64

_INSIDE = 1e-4
"""The part of the radius by which a candidate stays away from the sphere, so that rounding does not leave the ball."""


@dataclass(frozen=True)
class InBalls(Batched):
    """Answers properties of L1 and L2 balls; queries without a ball are left to ``inner`` as they are.

    Attributes:
        inner: the verifier that is asked about the box around a ball where bounds in the ball decide nothing. Its
            *unsat* holds for the ball; its *sat* only counts if the counterexample lies in the ball.
    """

    inner: Verifier

    name: ClassVar[str] = "balls"

    def claims(self, batch: QueryBatch) -> Iterator[tuple[int, Outcome]]:
        asked = {number: query.property for number, query in batch.queries.items()}
        first: dict[int, Outcome] = {}
        for number, outcome in super().claims(batch.part([n for n, prop in asked.items() if prop.ball is not None])):
            if outcome.verdict is Verdict.UNKNOWN:
                first[number] = outcome
            else:
                asked.pop(number)
                yield number, outcome
        boxes = {n: replace(batch.queries[n], property=replace(prop, ball=None)) for n, prop in asked.items()}
        inner = batch.part(list(asked), queries=boxes)
        for number in inner.ask(self.inner):
            box = inner.outcomes[number]
            if number in first:
                if box.witness is not None and not asked[number].admits(box.witness):
                    # It is none of the ball's.
                    box = Outcome.unknown(Reason.INCOMPLETE, box.method, "no proof for the box", seconds=box.seconds)
                detail = "; ".join(filter(None, (box.detail, "asked about the box around the ball")))
                box = replace(box, detail=detail).after(first[number])
            yield number, box

    def size(self, network: Network, budget: TimeBudget) -> int:
        return batch_size(network, _BATCH, budget.memory // 2)

    def answer(self, part: QueryBatch, work: TimeBudget) -> Sequence[Outcome]:
        network, net = part.network, part.network.to(torch.float64)
        margins, points = self._margins(part, net, work.memory, work.share(0.5).stop)
        sound = covers(net, torch.float64, "cpu") and keeps_activations(network, net)
        trust = Trust.ROUNDED if sound else Trust.FLOAT
        found = []
        for query, margin, point in zip(part.queries.values(), margins, points, strict=True):
            sat = None if margin > 0 else claim(network, query.property, point, self.name)
            if margin > 0:
                outcome = Outcome(Verdict.UNSAT, Reason.PROVED, self.name, trust, margin, subproblems=0)
            elif sat is not None and sat.witness is not None and query.property.admits(sat.witness):
                outcome = sat
            else:
                outcome = Outcome.unknown(Reason.INCOMPLETE, self.name, margin=margin, subproblems=0)
            found.append(outcome)
        return found

    @torch.inference_mode()
    def _margins(
        self, part: QueryBatch, net: Network, memory: int, stop: Callable[[], bool]
    ) -> tuple[list[float], list[np.ndarray]]:
        """Lower bounds of the margins over the balls by CROWN, and candidates for counterexamples."""
        properties = [query.property for query in part.queries.values()]
        box = input_box(properties, net, torch.float64, "cpu")
        found = relaxation(net, box, None, memory=memory // 2, stop=stop)
        rows = RowBatch.from_properties(properties, net.output_size)
        balls = [properties[i].ball for i in rows.sample.tolist()]
        values = torch.full_like(rows.bound, -math.inf)
        points = box.lower.flatten(1)[rows.sample]
        size = max(1, chunk_size(net, rows.matrix.reshape(-1, *net.output_shape), memory // 2, found.tuning))
        for start in range(0, len(values), size):
            if stop():
                break
            chunk = slice(start, start + size)
            values[chunk], points[chunk] = _least(found, net, rows, chunk, [b for b in balls[chunk] if b is not None])
        margins: list[float] = rows.margins(below(values - rows.bound)).tolist()
        # Of each query's rows, the candidate where the network comes closest to the unsafe set.
        chosen = []
        for number, prop in enumerate(properties):
            own, mine = points[rows.sample == number], RowBatch.from_properties([prop], net.output_size)
            outputs = net(own.reshape(-1, *net.input_shape)).flatten(1)
            chosen.append(own[mine.margins(outputs @ mine.matrix.T - mine.bound).argmin()].numpy())
        return margins, chosen


def _least(
    found: Relaxation, net: Network, rows: RowBatch, part: slice, balls: Sequence[Ball]
) -> tuple[Tensor, Tensor]:
    """Lower bounds (rows,) of some rows' A·y over their balls, and points (rows, inputs) where these are least."""
    sample = rows.sample[part]
    matrix = rows.matrix[part].reshape(-1, *net.output_shape)
    value, ended = found.lower(len(net.nodes) - 1, matrix, sample, coefficients=True)
    assert ended is not None
    slope = found.of_input(ended)
    lower, upper = found.box.lower.flatten(1)[sample], found.box.upper.flatten(1)[sample]
    center = torch.from_numpy(np.stack([ball.center for ball in balls]))
    radius = torch.tensor([[round_up(ball.radius)] for ball in balls], dtype=torch.float64)
    order = torch.tensor([[ball.order] for ball in balls])
    # The dual norm, and the vector of norm 1 whose product with the slope that is. Small squares would be lost.
    largest, place = slope.abs().max(1, keepdim=True)
    scaled = slope / torch.where(largest > 0, largest, 1.0)
    length = scaled.norm(dim=1, keepdim=True).clamp(min=1)
    peak = torch.zeros_like(slope).scatter(1, place, slope.gather(1, place).sign())
    norm, direction = torch.where(order == 1, largest, largest * length), torch.where(order == 1, peak, scaled / length)
    gain, inputs = slope * (center - torch.where(slope > 0, lower, upper)), slope.shape[1]
    # Sums of n terms err by at most n + 4 units of the sum of their sizes, and products by what underflows.
    unit, reach = unit_roundoff(torch.float64), (radius * norm).squeeze(1)
    error = (inputs + 8) * (unit * (gain.abs().sum(1) + reach) + tiny(gain.dtype))
    error = error + input_error(net, torch.float64) * (slope.abs() * (upper - lower)).sum(1)
    better = value + gain.sum(1) - reach - 4 * error - 4 * unit * value.abs()
    # A candidate's coordinates may be rounded to float32.
    step = radius * (1 - _INSIDE) - inputs * epsilon(torch.float32) * center.abs().amax(1, keepdim=True)
    points = (center - step.clamp(min=0) * direction).clamp(lower, upper)
    return torch.where(better > value, better, value), points
