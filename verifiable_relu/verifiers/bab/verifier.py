"""``bab``: branch and bound over the phases of unstable neurons, complete for piecewise-linear networks.

Smooth neurons are split at points of their pre-activations. No number of splits makes such a neuron linear, so that a
query whose margin is zero, or nearly so, stays unknown.

Boxes are bounded in batches; what these bounds leave open is folded to its inputs and unstable neurons, one query
after the other (``query``), and each polytope of the unsafe set that is left becomes a tree (``tree``). An *unsat*
rests on bounds in float64 with rounding accounted for, and on nothing that a solver or a search in float32 says.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from verifiable_relu.bounds import Ascent, input_box, neurons, unstable
from verifiable_relu.bounds.rounding import covers
from verifiable_relu.errors import CallFailed, OutOfTime, UnsupportedError
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Activation
from verifiable_relu.rounding import below
from verifiable_relu.spec.row_batch import RowBatch
from verifiable_relu.supervisor.forks import most_shares
from verifiable_relu.trust.certificate import Proof, Tighter, Tree
from verifiable_relu.verifiers.bab.curves import is_smooth
from verifiable_relu.verifiers.bab.query import FoldedQuery, tree_bytes
from verifiable_relu.verifiers.bab.recorded import Refined
from verifiable_relu.verifiers.bab.search import QuerySearch, Schedule, WitnessCheck
from verifiable_relu.verifiers.bab.slopes import Slopes
from verifiable_relu.verifiers.bab.tree import Branching
from verifiable_relu.verifiers.base import SOLO_WORK, Outcome, Reason, TimeBudget, Trust, Verdict, batch_size, fault
from verifiable_relu.verifiers.batch import QueryBatch, attempted
from verifiable_relu.verifiers.recording import Recorder, uncertified
from verifiable_relu.verifiers.root_bounds import relaxation

_BATCH = 64
"""Most queries bounded at once."""

_HARD = Branching(choices=32, look=0, looked=4000)
"""How trees of a network with shortcuts are searched once they have stood still."""

_BESIDE = 2e10
"""``Schedule.first`` in networks with shortcuts."""

_CURVED = 6
"""Steps of the search for bounds of neurons where some are smooth: there they are worth more than splits."""


class Decider:
    """A method that decides queries one by one, over bounds of their boxes in batches: a verifier but for ``decide``.

    Attributes:
        name: on the command line.
        intermediate: the search for bounds of the neurons that CROWN leaves unstable.
        record: whether to keep what proves a verdict, for a certificate.
    """

    name: ClassVar[str]
    intermediate: Ascent
    record = False

    def require(self, network: Network) -> None:
        """Raise an ``UnsupportedError`` where the method does not take a network."""
        network.require_piecewise_linear()

    def start(self) -> None:
        """Start what the method needs, which takes none of a query's time.

        Raises:
            CallFailed: if it does not start.
        """

    def decide(self, bounds: BoundedBoxes, number: int, work: TimeBudget) -> Outcome:
        """Return the outcome of one query of a batch that bounds leave open."""
        raise NotImplementedError

    def claims(self, batch: QueryBatch) -> Iterator[tuple[int, Outcome]]:
        """As ``Verifier.claims``: bounds in batches, then the queries that they leave open, one after the other."""
        done = 0
        for part in batch.batches(lambda network, budget: batch_size(network, _BATCH, budget.memory // 2)):
            made: list[BoundedBoxes] = []

            def bound(part: QueryBatch, work: TimeBudget) -> Sequence[Outcome]:
                made.append(BoundedBoxes(self, part, work))  # noqa: B023 -- called at once
                return [made[0].outcome(number) for number in part.queries]  # noqa: B023

            for number, outcome in zip(part.queries, attempted(part, "bounds", bound), strict=True):
                if not made:
                    outcome = replace(outcome, method=self.name)
                elif outcome.verdict is Verdict.UNKNOWN:
                    outcome = self._decided(made[0], part.part([number]), number).after(outcome)
                yield number, outcome
                done += 1
                batch.stage(self.name, done, len(batch.queries))

    def _decided(self, bounds: BoundedBoxes, alone: QueryBatch, number: int) -> Outcome:
        """Return the outcome of one query of a batch."""
        try:
            self.start()
        except CallFailed as error:
            return fault(error, self.name)

        def decide(_: QueryBatch, work: TimeBudget) -> Sequence[Outcome]:
            try:
                return [self.decide(bounds, number, work)]
            except OutOfTime:
                detail = "the budget ran out before anything was split"
                return [Outcome.unknown(Reason.TIMEOUT, self.name, detail)]

        return attempted(alone, self.name, decide)[0]


@dataclass(frozen=True)
class Bab(Decider):
    """Branch and bound on one relaxation for each polytope of the unsafe set.

    Attributes:
        intermediate: the search for bounds of the neurons that CROWN leaves unstable, where all are piecewise linear.
        slopes: the search for the slopes of each relaxation.
        search: how trees are searched.
        rounds: how trees and tighter bounds of neurons take turns; in networks with shortcuts trees alone, on better
            lines where they stand still.
        alone: the work (``loop.TreeProgress``) that one process does alone before others share the rest.
        record: whether to keep what proves a verdict, for a certificate.
    """

    intermediate: Ascent = Ascent(steps=2)  # noqa: RUF009 -- frozen
    slopes: Slopes = field(default_factory=Slopes)
    search: Branching = field(default_factory=Branching)
    rounds: Schedule = field(default_factory=Schedule)
    alone: float = field(default=SOLO_WORK, repr=False)
    record: bool = field(default=False, repr=False)

    name: ClassVar[str] = "bab"

    def fits(self, inputs: int, neurons: float, memory: int) -> bool:
        """Return True if some memory suffices for a query's trees, by how many inputs vary and neurons are unstable."""
        return neurons < memory and tree_bytes(inputs, int(neurons)) <= memory / 2

    def takes(self, network: Network) -> bool:
        """Return True if neurons of every activation of a network can be split."""
        try:
            self.require(network)
        except UnsupportedError:
            return False
        return True

    def require(self, network: Network) -> None:
        if network.multiplies:
            network.require_piecewise_linear()
        for node in network.nodes:
            if isinstance(node, Activation):
                is_smooth(node)

    def decide(self, bounds: BoundedBoxes, number: int, work: TimeBudget) -> Outcome:
        query = bounds.queries[number]
        candidates = WitnessCheck(query, self.name)
        with torch.no_grad():
            system = bounds.system(number, self.slopes, work)
            if system is None:
                return candidates.anywhere()
            record = Refined(query.network.activations) if bounds.recorder is not None else None
            within = replace(work, memory=work.memory // 2, processes=most_shares(work.processes), solo_work=self.alone)
            rounds = self.rounds
            if query.network.joins:
                # Beside shortcuts, cuts and refinements take longer and gain less than trees do in the same time.
                rounds = replace(rounds, refinement=None, better=Slopes(), hard=_HARD, tried=False, first=_BESIDE)
            found = QuerySearch(system, candidates, self.search, rounds, within, record).run()
        bounds.prove(number, found.lower)
        told, margin = f"{found.nodes} sub-problems, {found.rounds} refinements", bounds.margin(number)
        if candidates.found is not None:
            return replace(candidates.found, detail=told, subproblems=found.nodes)
        # Nothing but what was proved of every polytope decides.
        if margin > 0:
            proof = bounds.proof(number, found.recorded) if record is None or record.complete else None
            proved = Outcome(Verdict.UNSAT, Reason.PROVED, self.name, bounds.trust, margin, detail=told, proof=proof)
            return replace(proved, subproblems=found.nodes)
        known = {"margin": margin if margin > -torch.inf else None, "subproblems": found.nodes}
        return Outcome.unknown(found.ended.reason, self.name, f"{found.ended.detail} after {told}", **known)


class BoundedBoxes:
    """Bounds of a batch of boxes of one network, and of the property's rows there.

    They start from what is known of the queries, and are added to it.

    Attributes:
        queries: by number.
        recorder: keeps what proves the bounds; None for nobody.
        relaxation: of the boxes.
        lower: for each query (polytopes,) proven lower bounds of the largest row of each polytope, as ``RowBatch``
            counts polytopes.
        unstable: for each query the number of unstable neurons.
        trust: in all of this.
    """

    def __init__(self, method: Decider, part: QueryBatch, work: TimeBudget) -> None:
        network = part.network
        method.require(network)
        self.queries, self._bounds_cache, self._method = part.queries, part.bounds_cache, method.name
        numbers = list(part.queries)
        self._samples = {number: sample for sample, number in enumerate(numbers)}
        net, properties = network.to(torch.float64), [query.property for query in part.queries.values()]
        limits: dict[str, Any] = {"memory": work.memory // 2, "stop": work.stop}
        with torch.no_grad():
            box = input_box(properties, network)
            ascent = method.intermediate
            if not network.piecewise_linear:
                ascent = replace(ascent, steps=_CURVED)
            # What others have proven is not recorded.
            self.recorder = Recorder.of(network) if method.record and not uncertified(network) else None
            if self.recorder is None:
                known, search, coarse = (
                    part.bounds_cache.known(numbers, net, box.lower),
                    neurons(ascent, **limits),
                    None,
                )
            else:
                known, search, coarse = None, self.recorder.search(ascent, **limits), self.recorder.coarse
            options = {"search": search, "steps": ascent.steps, "coarse": coarse, "exact": True, **limits}
            self.relaxation = relaxation(net, box, known, **options)
            whole = not work.stop()
            rows = RowBatch.from_properties(properties, network.output_size)
            values = self.relaxation.outputs(rows.matrix, rows.sample, **limits)
            values = torch.maximum(values, self.relaxation.outputs(rows.matrix, rows.sample, intervals=True))
            values = below(values - rows.bound)
        pre = self.relaxation.pre
        reached, searched = (math.inf, ascent.steps) if whole else (self.relaxation.reached, 0)
        lower = part.bounds_cache.learn(numbers, net, pre, rows, values, reached=reached, searched=searched)
        self.lower = dict(zip(numbers, lower.split(rows.polytopes), strict=True))
        counts = torch.bincount(rows.polytope, minlength=len(rows.owner)).split(rows.polytopes)
        self._counts = dict(zip(numbers, counts, strict=True))
        free = [unstable(net.nodes[index], pre[index]).flatten(1).sum(1) for index in net.activations]
        every = sum(free, start=torch.zeros(len(numbers), dtype=torch.long))
        self.unstable = dict(zip(numbers, every.tolist(), strict=True))
        self.trust = Trust.ROUNDED if covers(net, torch.float64, "cpu") else Trust.FLOAT

    def sample(self, number: int) -> int:
        """Return the place of a query in the batch."""
        return self._samples[number]

    def outcome(self, number: int) -> Outcome:
        """Return what the bounds alone say of one query."""
        margin = self.margin(number)
        known = {"margin": margin if margin > -torch.inf else None, "unstable": self.unstable[number], "subproblems": 0}
        if not margin > 0:
            return Outcome.unknown(Reason.INCOMPLETE, self._method, **known)
        known |= {"detail": "decided by bounds alone", "proof": self.proof(number, {})}
        return Outcome(Verdict.UNSAT, Reason.PROVED, self._method, self.trust, **known)

    def system(self, number: int, slopes: Slopes, work: TimeBudget) -> FoldedQuery | None:
        """Return the folded system of one query and its open polytopes.

        None if one of these has no rows: any point is unsafe.

        Raises:
            OutOfTime: if no time is left.
        """
        open_ = [i for i, lower in enumerate(self.lower[number].tolist()) if not lower > 0]
        if any(int(self._counts[number][i]) == 0 for i in open_):
            return None
        return FoldedQuery.of(self.queries[number], self.relaxation, self.sample(number), open_, slopes, work.over)

    def prove(self, number: int, lower: Mapping[int, float]) -> None:
        """Take proven lower bounds of some polytopes of one query, by the polytopes' numbers in ``RowBatch``."""
        for polytope, value in lower.items():
            self.lower[number][polytope] = max(float(self.lower[number][polytope]), value)
        self._bounds_cache.prove(number, lower)

    def proof(self, number: int, trees: Mapping[int, tuple[list[int], Tree, Sequence[Tighter]]]) -> Proof | None:
        """Return what proves that one query is unsat, with the trees of some polytopes; None if nothing is recorded."""
        if self.recorder is None:
            return None
        with torch.no_grad():
            return self.recorder.proof(self.relaxation, self.sample(number), self.queries[number].property, trees)

    def margin(self, number: int) -> float:
        """Return a proven lower bound of one query's margin."""
        return min(self.lower[number].tolist(), default=torch.inf)
