"""Verification by bounds alone, in batches: IBP, CROWN, α-CROWN; *unsat* where the margin is positive for certain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from verifiable_relu.bounds import MEMORY, Ascent, Bounds, Relaxation, ascend, input_box, neurons, unstable
from verifiable_relu.bounds.rounding import covers, keeps_activations
from verifiable_relu.network.graph import Network
from verifiable_relu.rounding import below
from verifiable_relu.settings import neutral
from verifiable_relu.spec.property import Query
from verifiable_relu.spec.row_batch import RowBatch
from verifiable_relu.trust.certificate import Proof
from verifiable_relu.verifiers.base import (
    SILENT,
    Budget,
    Outcome,
    Progress,
    Reason,
    Trust,
    Verdict,
    batch_size,
    deadline,
    fault,
    in_batches,
)
from verifiable_relu.verifiers.recording import Recorder, uncertified
from verifiable_relu.verifiers.root import NONE, Known, Roots, relaxation

_BATCH = 256
"""Most queries bounded at once, so that progress moves and budgets are looked at."""

_CLEAR = 1e-6
"""Heuristic: by this part of its bound, and of 1, a row is above 0 whose slopes are not sought any further."""


@dataclass(frozen=True)
class _Bounding:
    """What IBP and CROWN share: batches, budgets, and reading verdicts off margins.

    Attributes:
        device: where to run.
        memory: a limit in bytes on what a batch may hold.
        dtype: of coefficients, ``float64`` or ``float32``, which takes half the memory; rounding is accounted for in
            both. (On other devices than a CPU, of all numbers, and in float32 rounding makes bounds much wider.)
        record: whether to keep what proves *unsat*, for a certificate, where that is possible (``records``).
    """

    device: str = "cpu"
    memory: int = MEMORY
    dtype: str = "float64"
    record: bool = field(default=False, repr=False)

    name: ClassVar[str]
    mode: ClassVar[type[torch.inference_mode | torch.no_grad]] = torch.inference_mode
    bounded: ClassVar[bool] = True
    """Whether every unstable neuron is bounded by CROWN."""

    @property
    def searches(self) -> bool:
        """Whether slopes are searched for the bounds of unstable neurons."""
        return False

    @property
    def float32(self) -> bool:
        """Whether coefficients alone are in float32 (``Relaxation``)."""
        return self.dtype == "float32" and torch.device(self.device).type == "cpu"

    def records(self, network: Network) -> bool:
        """Whether what proves *unsat* of a network is kept: of lines of activations with two phases, in float64."""
        plain = self.dtype == "float64" and torch.device(self.device).type == "cpu"
        return self.record and self.bounded and plain and not uncertified(network)

    def relaxation(
        self, network: Network, box: Bounds, known: Known | None, stop: Callable[[], bool], recorder: Recorder | None
    ) -> Relaxation:
        """The network over a batch of boxes, with bounds of every node, at least as tight as those known; recorded."""
        raise NotImplementedError

    def rows(self, relaxation: Relaxation, rows: RowBatch, stop: Callable[[], bool]) -> Tensor:
        """Lower bounds of A·y, (rows,)."""
        raise NotImplementedError

    @neutral()
    def verify(
        self, queries: Sequence[Query], budget: Budget, progress: Progress = SILENT, roots: Roots = NONE
    ) -> list[Outcome]:
        def size(network: Network) -> int:
            # Half for the batch, half for the rows that are bounded.
            return batch_size(network, _BATCH, self.memory // 2)

        return in_batches(
            self.name, queries, progress, size, lambda network, part: self._batch(network, queries, part, budget, roots)
        )

    def _batch(
        self, network: Network, queries: Sequence[Query], part: list[int], budget: Budget, roots: Roots
    ) -> list[Outcome]:
        allowance = budget.subset(part).total()
        if allowance <= 0:
            return [Outcome.unknown(Reason.TIMEOUT, self.name, "no time was left")] * len(part)
        chosen = [queries[i] for i in part]
        properties = [query.property for query in chosen]
        try:
            with budget.charging(part) as elapsed, self.mode():
                stop = deadline(elapsed, allowance)
                dtype: torch.dtype = torch.float64 if self.float32 else getattr(torch, self.dtype)
                net = network.to(dtype, self.device)
                box = input_box(properties, network, dtype, self.device)
                stop()
                recorder = Recorder.of(network) if self.records(network) else None
                # What others have proven is not recorded.
                known = None if recorder else roots.known(chosen, net, box.lower)
                found = self.relaxation(net, box, known, stop, recorder)
                bounded = self.bounded and not stop()
                rows = RowBatch.of(properties, network.output_size)
                given = rows.to(box.lower)
                values = self.rows(found, given, stop).cpu().double()
                values = below(values - rows.bound)
                searched = bounded and self.searches
                lower = roots.learn(chosen, net, found.pre, rows, values, bounded=bounded, searched=searched)
                margins = rows.least(lower).tolist()
                counts = sum(
                    (unstable(net.nodes[i], bounds).flatten(1).sum(1) for i, bounds in found.pre.items()),
                    start=torch.zeros(len(part), dtype=torch.long, device=self.device),
                ).tolist()
                proofs: list[Proof | None] = [None] * len(part)
                for number in (i for i, margin in enumerate(margins) if recorder and margin > 0):
                    assert recorder is not None
                    proofs[number] = recorder.proof(found, number, properties[number], {}, self.slopes)
                share = elapsed() / len(part)
                late = elapsed() > allowance
                # Bounds are those of coefficients, slopes and λ as they were given to them.
                same = torch.equal(given.matrix.cpu().double(), rows.matrix) and keeps_activations(network, net)
                trust = Trust.ROUNDED if same and covers(net, dtype, self.device) else Trust.FLOAT
        except Exception as error:
            return [fault(error, self.name)] * len(part)
        each = zip(margins, counts, proofs, strict=True)
        return [replace(self._outcome(margin, count, share, late, trust), proof=proof) for margin, count, proof in each]

    @property
    def slopes(self) -> Ascent | None:
        """The search for slopes of the output's rows."""
        return None

    def _outcome(self, margin: float, count: int, share: float, late: bool, trust: Trust) -> Outcome:
        known = {"seconds": {self.name: share}, "unstable": count, "subproblems": 0}
        if margin > 0:
            return Outcome(Verdict.UNSAT, Reason.PROVED, self.name, trust, margin, **known)  # type: ignore[arg-type]
        reason = Reason.TIMEOUT if late else Reason.INCOMPLETE
        detail = "the budget ran out" if late else "the bounds do not decide"
        return Outcome.unknown(reason, self.name, detail, margin=margin if margin == margin else None, **known)


@dataclass(frozen=True)
class Ibp(_Bounding):
    """Interval bound propagation."""

    name = "ibp"
    bounded = False

    def relaxation(
        self, network: Network, box: Bounds, known: Known | None, stop: Callable[[], bool], recorder: Recorder | None
    ) -> Relaxation:
        found = Relaxation(network, box, None if known is None else known.pre, self.float32)
        for index in range(network.last_activation + 1):
            stop()
            found.advance(index)
        return found

    def rows(self, relaxation: Relaxation, rows: RowBatch, stop: Callable[[], bool]) -> Tensor:
        return relaxation.outputs(rows.matrix, rows.sample, intervals=True)


@dataclass(frozen=True)
class Crown(_Bounding):
    """CROWN with CROWN-tight bounds of every unstable neuron."""

    name = "crown"

    def relaxation(
        self, network: Network, box: Bounds, known: Known | None, stop: Callable[[], bool], recorder: Recorder | None
    ) -> Relaxation:
        coarse, memory = None if recorder is None else recorder.coarse, self.memory // 2
        return relaxation(network, box, known, memory=memory, stop=stop, float32=self.float32, coarse=coarse)

    def rows(self, relaxation: Relaxation, rows: RowBatch, stop: Callable[[], bool]) -> Tensor:
        values = relaxation.outputs(rows.matrix, rows.sample, memory=self.memory // 2, stop=stop)
        # Lines can lose to the intervals that the same pre-activations give, and these cost next to nothing.
        return torch.maximum(values, relaxation.outputs(rows.matrix, rows.sample, intervals=True))


@dataclass(frozen=True)
class CrownIbp(Crown):
    """CROWN-IBP: linear bounds of the output over interval bounds of every pre-activation (arXiv 1906.06316)."""

    name = "crown-ibp"
    bounded = False

    def relaxation(
        self, network: Network, box: Bounds, known: Known | None, stop: Callable[[], bool], recorder: Recorder | None
    ) -> Relaxation:
        return Ibp.relaxation(self, network, box, known, stop, recorder)  # type: ignore[arg-type]


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
    def searches(self) -> bool:
        return self.intermediate is not None

    @property
    def slopes(self) -> Ascent | None:
        return self.ascent

    def relaxation(
        self, network: Network, box: Bounds, known: Known | None, stop: Callable[[], bool], recorder: Recorder | None
    ) -> Relaxation:
        if self.intermediate is None:
            return super().relaxation(network, box, known, stop, recorder)
        memory, coarse = self.memory // 2, None if recorder is None else recorder.coarse
        make = neurons if recorder is None else recorder.search
        search = make(self.intermediate, memory=memory, stop=stop)
        options = {"memory": memory, "stop": stop, "search": search, "float32": self.float32, "coarse": coarse}
        return relaxation(network, box, known, **options)  # type: ignore[arg-type]

    def rows(self, relaxation: Relaxation, rows: RowBatch, stop: Callable[[], bool]) -> Tensor:
        values = super().rows(relaxation, rows, stop)
        bound, polytope = rows.bound, rows.polytope
        clear = _CLEAR * (1 + bound.abs())

        def proven(better: Tensor) -> Tensor:
            """Which rows belong to a polytope that one of its rows excludes."""
            excluded = torch.zeros(len(rows.owner), dtype=torch.bool, device=values.device)
            excluded[polytope[better]] = True
            return excluded[polytope]

        undecided = (~proven(values > bound)).nonzero().squeeze(1)
        # The search prepares the network in float32 before it asks for the first time.
        if not len(undecided) or stop():
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
                memory=self.memory // 2,
                stop=stop,
            ).lower,
        )
        return values
