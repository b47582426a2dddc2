"""Verification by bounds alone, in batches: IBP, CROWN, α-CROWN; *unsat* where the margin is positive for certain."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from verifiable_relu.bounds import Ascent, Bounds, Relaxation, ascend, input_box, neurons, unstable
from verifiable_relu.bounds.operators import needed
from verifiable_relu.bounds.rounding import covers, keeps_activations
from verifiable_relu.network.graph import Network
from verifiable_relu.rounding import below
from verifiable_relu.spec.row_batch import RowBatch
from verifiable_relu.trust.certificate import Proof
from verifiable_relu.verifiers.base import Outcome, Reason, TimeBudget, Trust, Verdict, batch_size
from verifiable_relu.verifiers.batch import Batched, QueryBatch
from verifiable_relu.verifiers.recording import Recorder, uncertified
from verifiable_relu.verifiers.root_bounds import RootBounds, relaxation

_BATCH = 256
"""Most queries bounded at once, so that progress moves and budgets are looked at."""

_CLEAR = 1e-6
"""Heuristic: by this part of its bound, and of 1, a row is above 0 whose slopes are not sought any further."""


@dataclass(frozen=True, eq=False)
class BoundingTask:
    """A network over the boxes of a batch of queries, and what is to be made of it.

    Attributes:
        network, box: as ``crown_relaxation`` takes them.
        known: what is known of the boxes.
        work: what may be used.
        recorder: keeps what proves bounds; None for nobody.
        only: by activation, the neurons that are to be bounded; None for all.
    """

    network: Network
    box: Bounds
    known: RootBounds | None
    work: TimeBudget
    recorder: Recorder | None
    only: Mapping[int, Tensor] | None


@dataclass(frozen=True)
class _Bounding(Batched):
    """The common part of IBP and CROWN: batches, and reading verdicts off margins.

    Attributes:
        dtype: of coefficients, ``float64`` or ``float32``, which takes half the memory; rounding is accounted for in
            both. (On other devices than a CPU, of all numbers, and in float32 rounding makes bounds much wider.)
        record: whether to keep what proves *unsat*, for a certificate, where that is possible.
    """

    dtype: str = "float64"
    record: bool = field(default=False, repr=False)

    mode: ClassVar[type[torch.inference_mode | torch.no_grad]] = torch.inference_mode
    bounded: ClassVar[bool] = True
    """Whether every unstable neuron is bounded by CROWN."""

    @property
    def neurons(self) -> Ascent | None:
        """The search for bounds of the neurons that CROWN leaves unstable."""
        return None

    @property
    def slopes(self) -> Ascent | None:
        """The search for slopes of the output's rows."""
        return None

    def float32(self, device: str) -> bool:
        """Return True if coefficients alone are in float32 (``Relaxation``)."""
        return self.dtype == "float32" and torch.device(device).type == "cpu"

    def relaxation(self, task: BoundingTask) -> Relaxation:
        """Return bounds of every node, at least as tight as those known; here these are intervals."""
        pre = None if task.known is None else task.known.pre
        found = Relaxation(task.network, task.box, pre, self.float32(task.work.device))
        for index in range(task.network.last_activation + 1):
            task.work.stop()
            found.advance(index)
        return found

    def rows(self, relaxation: Relaxation, rows: RowBatch, work: TimeBudget) -> Tensor:
        """Return lower bounds of A·y, (rows,)."""
        raise NotImplementedError

    def size(self, network: Network, budget: TimeBudget) -> int:
        """As ``Batched.size``: half of the memory is for the batch, half for the rows that are bounded."""
        return batch_size(network, _BATCH, budget.memory // 2)

    def answer(self, part: QueryBatch, work: TimeBudget) -> Sequence[Outcome]:
        """As ``Batched.answer``."""
        with self.mode():
            return self._answer(part, work)

    def _answer(self, part: QueryBatch, work: TimeBudget) -> Sequence[Outcome]:
        network, numbers, device = part.network, list(part.queries), work.device
        properties = [query.property for query in part.queries.values()]
        dtype: torch.dtype = torch.float64 if self.float32(device) else getattr(torch, self.dtype)
        net = network.to(dtype, device)
        box = input_box(properties, network, dtype, device)
        work.stop()
        # A certificate holds lines of activations with two phases, in float64.
        plain = self.dtype == "float64" and torch.device(device).type == "cpu" and self.bounded
        recorder = Recorder.of(network) if self.record and plain and not uncertified(network) else None
        # What others have proven is not recorded.
        known = None if recorder else part.bounds_cache.known(numbers, net, box.lower)
        rows = RowBatch.from_properties(properties, network.output_size)
        given = rows.to(box.lower)
        only = needed(net, (given.matrix != 0).any(0), dtype)
        found = self.relaxation(BoundingTask(net, box, known, work, recorder, only))
        whole = not work.stop()
        reached = -1 if not self.bounded else math.inf if whole else found.reached
        values = self.rows(found, given, work).cpu().double()
        values = below(values - rows.bound)
        searched = self.neurons.steps if whole and self.neurons is not None else 0
        lower = part.bounds_cache.learn(numbers, net, found.pre, rows, values, reached=reached, searched=searched)
        margins = rows.least(lower).tolist()
        # Intervals alone, looser than what a search would start from, are known of the neurons that are spared.
        counted = set(net.activations) - net.spared
        told = [unstable(net.nodes[i], bounds) for i, bounds in found.pre.items() if i in counted]
        counts = sum(
            (each.flatten(1).sum(1) for each in told),
            start=torch.zeros(len(numbers), dtype=torch.long, device=device),
        ).tolist()
        # Bounds are those of coefficients, slopes and λ as they were given to them.
        same = torch.equal(given.matrix.cpu().double(), rows.matrix) and keeps_activations(network, net)
        trust = Trust.ROUNDED if same and covers(net, dtype, device) else Trust.FLOAT

        def outcome(sample: int, margin: float) -> Outcome:
            known = {"unstable": counts[sample], "subproblems": 0, "margin": margin if margin == margin else None}
            if not margin > 0:
                return Outcome.unknown(Reason.INCOMPLETE, self.name, "the bounds do not decide", **known)
            proof: Proof | None = None
            if recorder is not None:
                proof = recorder.proof(found, sample, properties[sample], {}, self.slopes)
            return Outcome(Verdict.UNSAT, Reason.PROVED, self.name, trust, proof=proof, **known)

        return [outcome(sample, margin) for sample, margin in enumerate(margins)]


@dataclass(frozen=True)
class Ibp(_Bounding):
    """Interval bound propagation."""

    name = "ibp"
    bounded = False

    def rows(self, relaxation: Relaxation, rows: RowBatch, work: TimeBudget) -> Tensor:
        return relaxation.outputs(rows.matrix, rows.sample, intervals=True)


@dataclass(frozen=True)
class Crown(_Bounding):
    """CROWN with CROWN-tight bounds of every unstable neuron."""

    name = "crown"

    def relaxation(self, task: BoundingTask) -> Relaxation:
        work, coarse = task.work, None if task.recorder is None else task.recorder.coarse
        options: dict[str, Any] = {"memory": work.memory // 2, "stop": work.stop, "coarse": coarse, "only": task.only}
        if self.neurons is not None:
            make = neurons if task.recorder is None else task.recorder.search
            search = make(self.neurons, memory=work.memory // 2, stop=work.stop)
            options |= {"search": search, "steps": self.neurons.steps}
        return relaxation(task.network, task.box, task.known, float32=self.float32(work.device), **options)

    def rows(self, relaxation: Relaxation, rows: RowBatch, work: TimeBudget) -> Tensor:
        values = relaxation.outputs(rows.matrix, rows.sample, memory=work.memory // 2, stop=work.stop)
        # Lines can lose to the intervals that the same pre-activations give, and these cost next to nothing.
        return torch.maximum(values, relaxation.outputs(rows.matrix, rows.sample, intervals=True))


@dataclass(frozen=True)
class CrownIbp(Crown):
    """CROWN-IBP: linear bounds of the output over interval bounds of every pre-activation (arXiv 1906.06316)."""

    name = "crown-ibp"
    bounded = False
    relaxation = _Bounding.relaxation


@dataclass(frozen=True)
class AlphaCrown(Crown):
    """α-CROWN: CROWN, then optimised slopes for what it does not decide.

    Attributes:
        ascent: the search for each row of the output's bounds.
        intermediate: the search for bounds of the neurons that CROWN leaves unstable; None keeps CROWN's.
    """

    ascent: Ascent = Ascent()  # noqa: RUF009 -- frozen
    intermediate: Ascent | None = None

    name = "alpha-crown"
    # The search for lines of smooth activations takes gradients.
    mode = torch.no_grad

    @property
    def neurons(self) -> Ascent | None:
        return self.intermediate

    @property
    def slopes(self) -> Ascent | None:
        return self.ascent

    def rows(self, relaxation: Relaxation, rows: RowBatch, work: TimeBudget) -> Tensor:
        values = super().rows(relaxation, rows, work)
        bound, polytope = rows.bound, rows.polytope
        clear = _CLEAR * (1 + bound.abs())

        def proven(better: Tensor) -> Tensor:
            """Which rows belong to a polytope that one of its rows excludes."""
            excluded = torch.zeros(len(rows.owner), dtype=torch.bool, device=values.device)
            excluded[polytope[better]] = True
            return excluded[polytope]

        undecided = (~proven(values > bound)).nonzero().squeeze(1)
        # The search prepares the network in float32 before it asks for the first time.
        if not len(undecided) or work.stop():
            return values
        latest = values.clone()

        def settled(number: Tensor, best: Tensor) -> Tensor:
            row = undecided[number]
            latest[row] = torch.maximum(latest[row], best.to(latest))
            return proven(latest > bound + clear)[row]

        values[undecided] = torch.maximum(
            values[undecided],
            ascend(
                relaxation,
                len(relaxation.network.nodes) - 1,
                rows.matrix[undecided].reshape(-1, *relaxation.network.output_shape),
                rows.sample[undecided],
                self.ascent,
                settled=settled,
                memory=work.memory // 2,
                stop=work.stop,
            ).lower,
        )
        return values


@dataclass(frozen=True)
class AlphaCrownTight(AlphaCrown):
    """α-CROWN whose slopes are optimised for the bounds of neurons, too: tighter, and slower by their number."""

    intermediate: Ascent | None = Ascent()  # noqa: RUF009 -- frozen

    name = "alpha-crown-tight"
