"""What methods with a solver have in common: bounds in batches, then the solver, one problem after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from verifiable_relu.bounds import MEMORY, Ascent, Bounds, Relaxation, input_box, interval_bounds, neurons
from verifiable_relu.errors import CallFailed, OutOfTime
from verifiable_relu.spec.property import Polytope, Query
from verifiable_relu.spec.row_batch import RowBatch
from verifiable_relu.verifiers.base import (
    Budget,
    Outcome,
    Progress,
    Reason,
    Trust,
    Verdict,
    by_network,
    deadline,
    fault,
)
from verifiable_relu.verifiers.encoding import Folding, Phases, Sizes
from verifiable_relu.verifiers.root import Roots, relaxation
from verifiable_relu.verifiers.solvers.process import Worker

_BATCH = 64
"""Most queries bounded at once."""

INTERMEDIATE = Ascent(steps=6)
"""A search for bounds of the neurons that CROWN leaves unstable: each that becomes stable halves a solver's work."""


@dataclass(frozen=True, eq=False)
class Boxes:
    """What bounds a problem comes from.

    Attributes:
        relaxation: of a batch of boxes.
        sample: which of them is the problem's.
        lower: (polytopes,) proven lower bounds of the largest row of each polytope, as ``RowBatch`` counts polytopes
            of the problem's property.
    """

    relaxation: Relaxation
    sample: int
    lower: torch.Tensor


@dataclass(frozen=True, eq=False)
class Problem:
    """One query, ready for a solver.

    Attributes:
        phases: by activation node.
        sizes: of all values, empty where nothing is rounded.
        open: the polytopes that bounds do not exclude, the likeliest to be reached first.
        margin: a proven lower bound of the margin, −inf without bounds.
        boxes: the bounds; None without.
    """

    query: Query
    folding: Folding
    phases: dict[int, Phases]
    sizes: Sizes
    open: tuple[Polytope, ...]
    margin: float
    boxes: Boxes | None = None

    @property
    def unstable(self) -> int:
        """Number of unstable neurons."""
        return sum(int(phase.unstable.sum()) for phase in self.phases.values())


def _sizes(folding: Folding, box: Bounds, known: Mapping[int, Bounds] | None = None) -> list[Sizes]:
    """The sizes of all values over a batch of boxes, by intervals; empty where nothing is rounded."""
    if folding.exact and not folding.network.weight_error:
        return [Sizes()] * len(box.lower)
    network = folding.network.to(torch.float64)
    bounds = interval_bounds(network, box, known)
    return [Sizes.of(network, bounds, sample) for sample in range(len(box.lower))]


def bounded(
    folding: Folding,
    queries: Sequence[Query],
    stop: Callable[[], bool],
    roots: Roots,
    intermediate: Ascent | None = None,
) -> list[Problem]:
    """Problems over CROWN bounds, or better ones that are known, in one batch.

    Args:
        folding: of the queries' network.
        queries: the batch.
        stop: asked now and then.
        roots: what is known of the queries, to which the bounds are added.
        intermediate: the search for bounds of the neurons that CROWN leaves unstable; None for none.
    """
    network, properties = folding.network.to(torch.float64), [q.property for q in queries]
    with torch.no_grad():
        box = input_box(properties, network)
        known = roots.known(queries, network, box.lower)
        search = None if intermediate is None else neurons(intermediate, memory=MEMORY, stop=stop)
        found = relaxation(network, box, known, search=search, stop=stop)
        pre, whole = found.pre, not stop()
        rows = RowBatch.of(properties, network.output_size)
        values = found.outputs(rows.matrix, rows.sample, stop=stop)
        values = torch.nextafter(values - rows.bound, values.new_full((), -torch.inf))
        sizes = _sizes(folding, box, pre)
        lower = roots.learn(queries, network, pre, rows, values, bounded=whole, searched=whole and search is not None)
        count = sum(len(prop.unsafe) for prop in properties)
        parts = lower.split(rows.polytopes)
        reached = lower.new_full((count,), torch.inf).scatter_reduce(0, rows.origin, lower, "amin").numpy()
    problems, at = [], 0
    for sample, query in enumerate(queries):
        margins = reached[at : at + len(query.property.unsafe)]
        at += len(margins)
        order = [int(i) for i in np.argsort(margins, kind="stable") if not margins[i] > 0]
        problems.append(
            Problem(
                query,
                folding,
                {i: Phases.of(b, sample) for i, b in pre.items()},
                sizes[sample],
                tuple(query.property.unsafe[i] for i in order),
                float(min(margins, default=np.inf)),
                Boxes(found, sample, parts[sample]),
            )
        )
    return problems


def unbounded(folding: Folding, queries: Sequence[Query]) -> list[Problem]:
    """Problems in which every neuron is unstable; where weights are exact, nothing rests on floating point."""
    network = folding.network
    free = {i: np.full(network.nodes[i].size, np.inf) for i in network.activations}
    phases = {i: Phases(-width, width) for i, width in free.items()}
    with torch.no_grad():
        sizes = _sizes(folding, input_box([q.property for q in queries], network))
    return [Problem(q, folding, phases, sizes[i], q.property.unsafe, -np.inf) for i, q in enumerate(queries)]


Solve = Callable[[Problem, Callable[[], float]], Outcome]
"""Decide one problem; the second argument tells how many seconds are left."""


def solve_each(
    name: str,
    queries: Sequence[Query],
    budget: Budget,
    progress: Progress,
    roots: Roots,
    solve: Solve,
    worker: Worker,
    *,
    exact: bool,
    bounds: bool,
    intermediate: Ascent | None = None,
) -> list[Outcome]:
    """A verifier's ``verify``: bounds in batches, then the queries that they leave open, one after the other.

    Args:
        name: of the method.
        queries: all of them.
        budget: of the queries. Starting the solver's process is not charged to it.
        progress: told of every outcome as it comes.
        roots: what is known of the queries, to which bounds are added.
        solve: asked for every query that bounds do not decide.
        worker: the solver's process, which ``solve`` calls.
        exact: whether networks are folded in exact arithmetic, instead of float64.
        bounds: whether to compute bounds; without, every neuron is unstable.
        intermediate: the search for bounds of neurons (``bounded``).
    """
    outcomes: dict[int, Outcome] = {}

    def close(index: int, outcome: Outcome) -> None:
        outcomes[index] = outcome
        progress.finish(index, outcome)
        progress.stage(name, len(outcomes), len(queries))

    for network, members in by_network(queries):
        for start in range(0, len(members), _BATCH):
            part = members[start : start + _BATCH]
            chosen = [queries[i] for i in part]
            allowance = budget.subset(part).total()
            try:
                with budget.charging(part) as elapsed:
                    folding = Folding(network, exact=exact)
                    stop = deadline(elapsed, allowance)
                    problems = (
                        bounded(folding, chosen, stop, roots, intermediate) if bounds else unbounded(folding, chosen)
                    )
                    share = elapsed() / len(part)
            except Exception as error:
                for index in part:
                    close(index, fault(error, name))
                continue
            for index, problem in zip(part, problems, strict=True):
                close(index, _solved(name, problem, solve, worker, budget, index, {"bounds": share}))
    return [outcomes[i] for i in range(len(queries))]


def _solved(
    name: str, problem: Problem, solve: Solve, worker: Worker, budget: Budget, index: int, seconds: dict[str, float]
) -> Outcome:
    """The outcome of query number ``index``; ``seconds``: by stage, what has been charged to it."""
    known = {"margin": problem.margin if problem.margin > -np.inf else None, "unstable": problem.unstable}
    if not problem.open:
        detail = "decided by bounds alone"
        proved = Outcome(Verdict.UNSAT, Reason.PROVED, name, Trust.ROUNDED, problem.margin, None, detail, seconds)
        return replace(proved, unstable=problem.unstable, subproblems=0)
    allowance = budget.remaining(index)
    if allowance <= 0:
        return Outcome.unknown(Reason.TIMEOUT, name, "no time was left", seconds=seconds, **known)
    try:
        worker.start()
    except CallFailed as error:
        return Outcome.unknown(Reason.ERROR, name, str(error), seconds=seconds, **known)
    with budget.charging([index]) as elapsed:
        try:
            outcome = solve(problem, lambda: allowance - elapsed())
        except OutOfTime:
            outcome = Outcome.unknown(Reason.TIMEOUT, name, "the budget ran out while the problem was written")
        except Exception as error:
            outcome = fault(error, name)
        seconds[name] = elapsed()
    margin = known["margin"] if outcome.margin is None else outcome.margin
    return replace(outcome, margin=margin, seconds=seconds, unstable=problem.unstable)
