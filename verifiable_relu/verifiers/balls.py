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
from verifiable_relu.spec.property import Query, round_up
from verifiable_relu.spec.row_batch import RowBatch
from verifiable_relu.verifiers.attack import claim
from verifiable_relu.verifiers.base import Batched, Outcome, Reason, TimeBudget, Trust, Verdict, Verifier, batch_size
from verifiable_relu.verifiers.batch import QueryBatch
from verifiable_relu.verifiers.boxes import input_error
from verifiable_relu.verifiers.root_bounds import relaxation

_BATCH = 64

_INSIDE = 1e-4
"""The part of the radius by which a candidate stays away from the sphere, so that rounding does not leave the ball."""


@dataclass(frozen=True)
class InBalls(Batched):
    """Answers properties of L1 and L2 balls; queries without a ball are left to ``inner`` as they are.

    Attributes:
        inner: the verifier that is asked about the box around a ball, where bounds and attack in the ball decide
            nothing. Its *unsat* holds for the ball; its *sat* only counts if the counterexample lies in the ball.
    """

    inner: Verifier

    name: ClassVar[str] = "balls"

    def claims(self, batch: QueryBatch) -> Iterator[tuple[int, Outcome]]:
        """As ``Verifier.claims``."""
        first: dict[int, Outcome] = {}
        for number, outcome in super().claims(batch):
            if outcome.verdict is Verdict.UNKNOWN:
                first[number] = outcome
            else:
                yield number, outcome
        boxes = {
            number: replace(batch.queries[number], property=replace(batch.queries[number].property, ball=None))
            for number in first
        }
        inner = batch.part(list(first), queries=boxes)
        for number in inner.ask(self.inner):
            yield number, _joined(batch.queries[number], first[number], inner.outcomes[number])

    def size(self, network: Network, budget: TimeBudget) -> int:
        """As ``Batched.size``."""
        return batch_size(network, _BATCH, budget.memory // 2)

    def answer(self, part: QueryBatch, work: TimeBudget) -> Sequence[Outcome]:
        """As ``Batched.answer``, in half of the time."""
        stop, queries = work.share(0.5).stop, list(part.queries.values())
        margins, points, trust = self._margins(part.network, queries, work.memory, stop)
        found = []
        for query, margin, point in zip(queries, margins, points, strict=True):
            if margin > 0:
                found.append(Outcome(Verdict.UNSAT, Reason.PROVED, self.name, trust, margin, subproblems=0))
                continue
            sat = None if query.property.ball is None else claim(part.network, query.property, point, self.name)
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
    ) -> tuple[list[float], list[np.ndarray], Trust]:
        """Lower bounds of the margins over the balls by CROWN, candidates, and how far the bounds can be trusted."""
        properties = [query.property for query in queries]
        net = network.to(torch.float64)
        box = input_box(properties, network, torch.float64, "cpu")
        found = relaxation(net, box, None, memory=memory // 2, stop=stop)
        rows = RowBatch.from_properties(properties, network.output_size)
        values = torch.full_like(rows.bound, -math.inf)
        points = box.lower.flatten(1)[rows.sample]
        size = max(1, chunk_size(net, rows.matrix.reshape(-1, *net.output_shape), memory // 2, found.tuning))
        for start in range(0, len(values), size):
            if stop():
                break
            part = slice(start, start + size)
            values[part], points[part] = self._rows(found, net, rows, part, queries)
        values = below(values - rows.bound)
        margins: list[float] = rows.margins(values).tolist()
        # Of each query's rows, the candidate where the network comes closest to the unsafe set.
        outputs = net(points.reshape(-1, *net.input_shape)).flatten(1)
        chosen = []
        for number in range(len(queries)):
            own = (rows.sample == number).nonzero().flatten()
            reached = RowBatch.from_properties([properties[number]], network.output_size)
            at = reached.margins(outputs[own] @ reached.matrix.T - reached.bound).flatten()
            chosen.append(points[own[at.argmin()]].numpy())
        sound = covers(net, torch.float64, "cpu") and keeps_activations(network, net)
        return margins, chosen, Trust.ROUNDED if sound else Trust.FLOAT

    def _rows(
        self, found: Relaxation, net: Network, rows: RowBatch, part: slice, queries: Sequence[Query]
    ) -> tuple[Tensor, Tensor]:
        """Lower bounds of the rows' A·y over the balls, (rows,), and where they are least, (rows, inputs)."""
        sample = rows.sample[part]
        matrix = rows.matrix[part].reshape(-1, *net.output_shape)
        value, ended = found.lower(len(net.nodes) - 1, matrix, sample, coefficients=True)
        assert ended is not None
        slope = found.of_input(ended)
        lower, upper = found.box.lower.flatten(1)[sample], found.box.upper.flatten(1)[sample]
        least = torch.where(slope > 0, lower, upper)
        unit = unit_roundoff(torch.float64)
        spare = input_error(net, torch.float64) * (slope.abs() * (upper - lower)).sum(1)
        better, points = value.clone(), least.clone()
        for row, index in enumerate(sample.tolist()):
            ball = queries[index].property.ball
            if ball is None:
                continue
            radius, center = round_up(ball.radius), torch.from_numpy(ball.center)
            gain = slope[row] * (center - least[row])
            norm, direction = _dual(slope[row], ball.order)
            # Sums of n terms err by at most n + 4 units of the sum of their sizes, and products by what underflows.
            error = (gain.numel() + 8) * (unit * (gain.abs().sum() + radius * norm) + tiny(gain.dtype)) + spare[row]
            better[row] = value[row] + gain.sum() - radius * norm - 4 * error - 4 * unit * value[row].abs()
            # A candidate's coordinates may be rounded to float32.
            step = radius * (1 - _INSIDE) - center.numel() * epsilon(torch.float32) * float(center.abs().max())
            points[row] = (center - max(step, 0.0) * direction).clamp(lower[row], upper[row])
        return torch.where(better > value, better, value), points


def _dual(slope: Tensor, order: int) -> tuple[Tensor, Tensor]:
    """The dual norm of a vector, and the vector of norm 1 whose product with it that is (up to rounding)."""
    largest = slope.abs().max()
    if order == 1 or largest == 0:
        direction = torch.zeros_like(slope)
        direction[slope.abs().argmax()] = slope[slope.abs().argmax()].sign()
        return largest, direction
    # Squares of small numbers would be lost.
    scaled = slope / largest
    return largest * scaled.norm(), scaled / scaled.norm()


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
