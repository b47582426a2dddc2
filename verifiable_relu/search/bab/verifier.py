"""``bab``: branch and bound over the splits of unstable neurons, complete for piecewise-linear networks.

Smooth neurons are split at points of their pre-activations. No number of splits makes such a neuron linear, so that a
query whose margin is zero, or nearly so, stays unknown.

What bounds of whole boxes leave open is reduced to its inputs and unstable neurons, one query after the other
(``query``), and each polytope of the unsafe set that is left becomes a tree (``tree``). An *unsat* rests on bounds in
float64 with rounding accounted for, and on nothing that a solver or a search in float32 says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from verifiable_relu.errors import UnsupportedError
from verifiable_relu.ir.functions.steps import StepFunction
from verifiable_relu.ir.linear import Gather
from verifiable_relu.ir.network import Affine, Elementwise, Network, Product, Sum
from verifiable_relu.search.bab.query import tree_bytes
from verifiable_relu.search.bab.search import RESIDUAL, QuerySearch, Schedule
from verifiable_relu.search.bab.tree import Branching
from verifiable_relu.search.bab.witness import WitnessCheck
from verifiable_relu.search.batch import QueryBatch
from verifiable_relu.search.budget import SOLO_WORK, TimeBudget
from verifiable_relu.search.outcomes import Outcome, Reason, Verdict
from verifiable_relu.search.question import BoundedQuery, decide_one_by_one, require_piecewise_linear
from verifiable_relu.supervisor.forks import most_shares


@dataclass(frozen=True)
class Bab:
    """Branch and bound on one relaxation for each polytope of the unsafe set.

    Attributes:
        ascent_steps: as of ``CompleteMethod``, where all neurons are piecewise linear.
        search: how trees are searched.
        schedule: how trees and tighter intervals of neurons take turns; None for a choice by the network.
        alone: the work (``TreeProgress``) that one process does alone before others share the rest.
    """

    ascent_steps: int = 2
    search: Branching = field(default_factory=Branching)
    schedule: Schedule | None = None
    alone: float = field(default=SOLO_WORK, repr=False)

    name: ClassVar[str] = "bab"

    def fits(self, inputs: int, neurons: float, memory: int) -> bool:
        """Return True if some memory suffices for a query's trees, by how many inputs vary and neurons are unstable."""
        return neurons < memory and tree_bytes(inputs, int(neurons)) <= memory / 2

    def takes(self, network: Network) -> bool:
        """Return True if neurons of every function of a network can be split."""
        try:
            self.require(network)
        except UnsupportedError:
            return False
        return True

    def claims(self, batch: QueryBatch) -> Iterator[tuple[int, Outcome]]:
        """As ``Verifier.claims``."""
        return decide_one_by_one(self, batch)

    def require(self, network: Network) -> None:
        """As of ``CompleteMethod``."""
        if any(isinstance(op, Product) for op in network.ops):
            require_piecewise_linear(network)
        for op in network.ops:
            if isinstance(op, Elementwise) and isinstance(op.function, StepFunction):
                raise UnsupportedError("step functions are not split", place=op.place)

    def start(self) -> None:
        """As of ``CompleteMethod``."""

    def decide(self, query: BoundedQuery, budget: TimeBudget) -> Outcome:
        """As of ``CompleteMethod``."""
        # A device other than the CPU works for one process.
        processes = most_shares(budget.processes) if torch.device(budget.device).type == "cpu" else 1
        within = replace(budget, memory=budget.memory // 2, solo_work=self.alone, processes=processes)
        witness = WitnessCheck(query.network, query.prop, self.name)
        with torch.no_grad():
            reduced = query.reduced(budget.over, budget.device)
            if reduced is None:
                # A polytope without rows is the whole space.
                return witness.anywhere()
            schedule = self.schedule or (RESIDUAL if has_shortcuts(query.network) else Schedule())
            found = QuerySearch(reduced, witness, self.search, schedule, within, query.observer).run()
        query.learn(found.lower)
        told, margin = f"{found.nodes} sub-problems, {found.rounds} refinements", query.margin(found.lower)
        if witness.found is not None:
            return replace(witness.found, detail=told, subproblems=found.nodes)
        # Nothing but what was proved of every polytope decides.
        if margin > 0:
            proved = Outcome(Verdict.UNSAT, Reason.PROVED, self.name, query.trust, margin, detail=told)
            return replace(proved, subproblems=found.nodes)
        rest = {"margin": margin if margin > -torch.inf else None, "subproblems": found.nodes}
        return Outcome.unknown(found.ended.reason, self.name, f"{found.ended.detail} after {told}", **rest)


def has_shortcuts(network: Network) -> bool:
    """Return True if computed values are added to each other; a concatenation is a sum of parts that are moved."""

    def is_moved(index: int) -> bool:
        op = network.ops[index]
        return isinstance(op, Affine) and isinstance(op.map, Gather)

    return any(isinstance(op, Sum) and not all(map(is_moved, op.inputs)) for op in network.ops)
