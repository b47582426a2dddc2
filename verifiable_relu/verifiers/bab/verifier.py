"""``bab``: branch and bound over the phases of unstable neurons, complete for piecewise-linear networks.

Smooth neurons are split at points of their pre-activations. No number of splits makes such a neuron linear, so that a
query whose margin is zero, or nearly so, stays unknown.

Boxes are bounded in batches; what these bounds leave open is folded to its inputs and unstable neurons, one query
after the other (``system``), and each polytope of the unsafe set that is left becomes a tree (``tree``). An *unsat*
rests on bounds in float64 with rounding accounted for, and on nothing that a solver or a search in float32 says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from verifiable_relu.bounds import MEMORY, Ascent, input_box, neurons, unstable
from verifiable_relu.bounds.rounding import covers
from verifiable_relu.errors import CallFailed, OutOfTime
from verifiable_relu.network.graph import Network
from verifiable_relu.settings import neutral
from verifiable_relu.spec.property import Query
from verifiable_relu.spec.row_batch import RowBatch
from verifiable_relu.trust.certificate import Proof, Tighter, Tree
from verifiable_relu.verifiers.bab.curves import IS_SMOOTH
from verifiable_relu.verifiers.bab.limits import ALONE, Limits
from verifiable_relu.verifiers.bab.query import FoldedQuery, tree_bytes
from verifiable_relu.verifiers.bab.recorded import Refined
from verifiable_relu.verifiers.bab.search import Candidates, Rounds, search
from verifiable_relu.verifiers.bab.slopes import Slopes
from verifiable_relu.verifiers.bab.tree import Branching
from verifiable_relu.verifiers.base import (
    SILENT,
    Budget,
    Outcome,
    Progress,
    Reason,
    Trust,
    Verdict,
    batch_size,
    by_network,
    deadline,
    fault,
)
from verifiable_relu.verifiers.copies import most
from verifiable_relu.verifiers.recording import Recorder, uncertified
from verifiable_relu.verifiers.root import NONE, Roots, relaxation

_BATCH = 64
"""Most queries bounded at once."""


class Decider:
    """A method that decides queries one by one, over bounds of their boxes in batches: a verifier but for ``decide``.

    Attributes:
        name: on the command line.
        memory: a limit in bytes; half of it is for bounds.
        intermediate: the search for bounds of the neurons that CROWN leaves unstable.
        record: whether to keep what proves a verdict, for a certificate.
    """

    name: ClassVar[str]
    memory: int
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

    def decide(self, bounds: BoundedBoxes, number: int, left: Callable[[], float]) -> Outcome:
        """The outcome of one query of a batch that bounds leave open, in the seconds that are ``left``."""
        raise NotImplementedError

    @neutral()
    def verify(
        self, queries: Sequence[Query], budget: Budget, progress: Progress = SILENT, roots: Roots = NONE
    ) -> list[Outcome]:
        """As ``Verifier.verify``: bounds in batches, then the queries that they leave open, one after the other."""
        outcomes: dict[int, Outcome] = {}

        def close(index: int, outcome: Outcome) -> None:
            outcomes[index] = outcome
            progress.finish(index, outcome)
            progress.stage(self.name, len(outcomes), len(queries))

        for network, members in by_network(queries):
            most = batch_size(network, _BATCH, self.memory // 2)
            for start in range(0, len(members), most):
                part = members[start : start + most]
                allowance = budget.subset(part).total()
                if allowance <= 0:
                    for index in part:
                        close(index, Outcome.unknown(Reason.TIMEOUT, self.name, "no time was left"))
                    continue
                try:
                    with budget.charging(part) as elapsed:
                        chosen = [queries[i] for i in part]
                        bounds = BoundedBoxes(self, network, chosen, deadline(elapsed, allowance), roots)
                        share = elapsed() / len(part)
                except Exception as error:
                    for index in part:
                        close(index, fault(error, self.name))
                    continue
                for number, index in enumerate(part):
                    close(index, self._decided(bounds, number, budget, index, share))
        return [outcomes[i] for i in range(len(queries))]

    def _decided(self, bounds: BoundedBoxes, number: int, budget: Budget, index: int, share: float) -> Outcome:
        """The outcome of one query of a batch."""
        seconds, margin = {"bounds": share}, bounds.margin(number)
        known = {
            "margin": margin if margin > -torch.inf else None,
            "unstable": int(bounds.unstable[number]),
            "subproblems": 0,
            "seconds": seconds,
        }
        if margin > 0:
            detail, proof = "decided by bounds alone", bounds.recorded(number, {})
            return Outcome(Verdict.UNSAT, Reason.PROVED, self.name, bounds.trust, detail=detail, proof=proof, **known)  # type: ignore[arg-type]
        allowance = budget.remaining(index)
        if allowance <= 0:
            return Outcome.unknown(Reason.TIMEOUT, self.name, "no time was left", **known)
        try:
            self.start()
        except CallFailed as error:
            return Outcome.unknown(Reason.ERROR, self.name, str(error), **known)
        with budget.charging([index]) as elapsed:
            try:
                outcome = self.decide(bounds, number, lambda: allowance - elapsed())
            except OutOfTime:
                outcome = Outcome.unknown(Reason.TIMEOUT, self.name, "the budget ran out before anything was split")
            except Exception as error:
                outcome = fault(error, self.name)
            seconds[self.name] = elapsed()
        for name in ("margin", "subproblems"):
            if (found := getattr(outcome, name)) is not None:
                known[name] = found
        return replace(outcome, **known)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Bab(Decider):
    """Branch and bound on one relaxation for each polytope of the unsafe set.

    Attributes:
        intermediate: the search for bounds of the neurons that CROWN leaves unstable.
        slopes: the search for the slopes of each relaxation.
        search: how trees are searched.
        rounds: how trees and tighter bounds of neurons take turns.
        memory: a limit in bytes on what bounds hold at once, and on what all trees of a query hold.
        processes: how many processes share the work on a query, where it takes long and the operating system can copy
            processes (Linux). The process that calls ``verify`` should have no other threads at work.
        alone: the work (``loop.Progress``) that one process does alone before others share the rest.
        record: whether to keep what proves a verdict, for a certificate.
    """

    intermediate: Ascent = Ascent(steps=6)  # noqa: RUF009 -- frozen
    slopes: Slopes = field(default_factory=Slopes)
    search: Branching = field(default_factory=Branching)
    rounds: Rounds = field(default_factory=Rounds)
    memory: int = MEMORY
    processes: int = field(default=1, repr=False)
    alone: float = field(default=ALONE, repr=False)
    record: bool = field(default=False, repr=False)

    name: ClassVar[str] = "bab"

    def fits(self, inputs: int, neurons: float) -> bool:
        """Whether there is memory for a query's trees, by how many inputs vary and neurons are unstable."""
        return neurons < self.memory and tree_bytes(inputs, int(neurons)) <= self.memory / 2

    def takes(self, network: Network) -> bool:
        """Whether neurons of every activation of a network can be split."""
        return not network.multiplies and all(network.nodes[index] in IS_SMOOTH for index in network.activations)

    def require(self, network: Network) -> None:
        """Raise an ``UnsupportedError`` where the method does not take a network."""
        if network.multiplies:
            network.require_piecewise_linear()
        for index in network.activations:
            # Raises an error for a kind that is not split.
            IS_SMOOTH[network.nodes[index]]

    def decide(self, bounds: BoundedBoxes, number: int, left: Callable[[], float]) -> Outcome:
        """The outcome of the trees of one query; ``left``: seconds."""
        candidates = Candidates(bounds.queries[number], self.name)
        with torch.no_grad():
            query = bounds.system(number, self.slopes, left)
            if query is None:
                return candidates.anywhere()
            limits = Limits(self.memory // 2, left, most(self.processes), self.alone)
            record = Refined(bounds.queries[number].network.activations) if bounds.recording else None
            found = search(query, candidates, self.search, self.rounds, limits, record)
        bounds.prove(number, found.lower)
        told = f"{found.nodes} sub-problems, {found.rounds} refinements"
        margin = bounds.margin(number)
        if candidates.found is not None:
            return replace(candidates.found, detail=told, subproblems=found.nodes)
        # Nothing but what was proved of every polytope decides.
        if margin > 0:
            proof = bounds.recorded(number, found.recorded) if record is None or record.complete else None
            return Outcome(
                Verdict.UNSAT, Reason.PROVED, self.name, bounds.trust, margin, None, told, {}, None, found.nodes, proof
            )
        known = {"margin": margin if margin > -torch.inf else None, "subproblems": found.nodes}
        return Outcome.unknown(found.ended.reason, self.name, f"{found.ended.detail} after {told}", **known)


class BoundedBoxes:
    """Bounds of a batch of boxes of one network, and of the property's rows there.

    Args:
        method: the options.
        network: of the queries.
        queries: the batch.
        stop: asked now and then.
        roots: what is known of the queries, to which the bounds are added.

    Attributes:
        relaxation: of the boxes.
        lower: for each query (polytopes,) proven lower bounds of the largest row of each polytope, as ``RowBatch``
            counts polytopes.
        unstable: (batch,) how many neurons are unstable.
        trust: in all of this.
    """

    def __init__(
        self, method: Decider, network: Network, queries: Sequence[Query], stop: Callable[[], bool], roots: Roots
    ) -> None:
        method.require(network)
        self.queries, self._roots = queries, roots
        self._recorder: Recorder | None = None
        net, properties = network.to(torch.float64), [query.property for query in queries]
        memory = method.memory // 2
        with torch.no_grad():
            box = input_box(properties, network)
            known = roots.known(queries, net, box.lower)
            search, coarse = neurons(method.intermediate, memory=memory, stop=stop), None
            record = method.record and not uncertified(network)
            if record:
                # What others have proven is not recorded.
                known, recorder = None, Recorder.of(network)
                search, coarse = recorder.search(method.intermediate, memory=memory, stop=stop), recorder.coarse
                self._recorder = recorder
            self.relaxation = relaxation(net, box, known, search=search, memory=memory, stop=stop, coarse=coarse)
            whole = not stop()
            rows = RowBatch.of(properties, network.output_size)
            values = self.relaxation.outputs(rows.matrix, rows.sample, memory=memory, stop=stop)
            values = torch.maximum(values, self.relaxation.outputs(rows.matrix, rows.sample, intervals=True))
            values = torch.nextafter(values - rows.bound, torch.tensor(-torch.inf, dtype=torch.float64))
        pre = self.relaxation.pre
        lower = roots.learn(queries, net, pre, rows, values, bounded=whole, searched=whole)
        self.lower = list(lower.split(rows.polytopes))
        self._counts = torch.bincount(rows.polytope, minlength=len(rows.owner)).split(rows.polytopes)
        free = [unstable(net.nodes[index], bounds).flatten(1).sum(1) for index, bounds in pre.items()]
        self.unstable = sum(free, start=torch.zeros(len(queries), dtype=torch.long))
        self.trust = Trust.ROUNDED if covers(net, torch.float64, "cpu") else Trust.FLOAT

    @property
    def recording(self) -> bool:
        """Whether what proves the bounds is recorded."""
        return self._recorder is not None

    def system(self, number: int, slopes: Slopes, left: Callable[[], float]) -> FoldedQuery | None:
        """The folded system of one query and its open polytopes; None if one of these has no rows: any point is unsafe.

        Raises:
            OutOfTime: if no time is left.
        """
        open_ = [i for i, lower in enumerate(self.lower[number].tolist()) if not lower > 0]
        if any(int(self._counts[number][i]) == 0 for i in open_):
            return None
        return FoldedQuery.of(self.queries[number], self.relaxation, number, open_, slopes, lambda: left() <= 0)

    def prove(self, number: int, lower: Mapping[int, float]) -> None:
        """Take proven lower bounds of some polytopes of one query, by the polytopes' numbers in ``RowBatch``."""
        for polytope, value in lower.items():
            self.lower[number][polytope] = max(float(self.lower[number][polytope]), value)
        self._roots.prove(self.queries[number], lower)

    def recorded(self, number: int, trees: Mapping[int, tuple[list[int], Tree, Sequence[Tighter]]]) -> Proof | None:
        """What proves that one query is unsat, with the trees of some polytopes; None if nothing is recorded."""
        if self._recorder is None:
            return None
        with torch.no_grad():
            return self._recorder.proof(self.relaxation, number, self.queries[number].property, trees)

    def margin(self, number: int) -> float:
        """A proven lower bound of one query's margin."""
        return min(self.lower[number].tolist(), default=torch.inf)
