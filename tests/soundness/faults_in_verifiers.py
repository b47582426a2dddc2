"""Mistakes that someone could make in properties and verifiers, which some kind of soundness test must catch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tests.support.hooks import Hook
from verifiable_relu.bounds import Bounds
from verifiable_relu.errors import OutOfTime
from verifiable_relu.network.nodes import Affine, Node
from verifiable_relu.search.solvers import highs, z3
from verifiable_relu.spec.property import Polytope
from verifiable_relu.spec.row_batch import RowBatch
from verifiable_relu.supervisor.workers import Worker
from verifiable_relu.verifiers.bab import proof
from verifiable_relu.verifiers.base import Outcome, Reason, Trust, Verdict
from verifiable_relu.verifiers.boxes import SubBoxes
from verifiable_relu.verifiers.milp import Milp
from verifiable_relu.verifiers.root_bounds import BoundsCache, RootBounds
from verifiable_relu.verifiers.smt import SmtFormula

from .fault import Fault, instead

Right = Callable[..., Any]


def _without_rounding(right: Right, *args: Any, **named: Any) -> Tensor:
    with patch.object(proof, "OWN", 0.0):
        found: Tensor = right(*args, **named)
    return found


def _bounds_dropped(right: Right, rows: RowBatch, *args: Tensor) -> RowBatch:
    found = right(rows, *args)
    return replace(found, bound=found.bound - found.bound.abs())


def _root_of_any(right: Right, bounds_cache: BoundsCache, number: int) -> RootBounds | None:
    """The root of the query that was asked about last before, whichever it is."""
    found = (right(bounds_cache, other) for other in range(number, -1, -1))
    return next((root for root in found if root is not None), None)


def _highs_with(taken: Callable[[str], bool], **options: float) -> Hook:
    """HiGHS is called with some options, and what is ``taken`` of its words is read as infeasible."""

    def wrong(right: Right, worker: Worker, task: object, *args: Any) -> Any:
        if not isinstance(task, highs.HighsTask):
            return right(worker, task, *args)
        found = right(worker, replace(task, options={**task.options, **options}), *args)
        return replace(found, status="kInfeasible") if taken(found.status) else found

    return Hook("supervisor.workers:Worker.call", wrong)


def _z3_gives_up(right: Right, worker: Worker, task: object, *args: Any) -> Any:
    if not isinstance(task, z3.Z3Task):
        return right(worker, task, *args)
    found = right(worker, replace(task, options={**task.options, "rlimit": 1000}), *args)
    return z3.Z3Answer("unsat") if found.answer == "unknown" else found


def _z3_too_slow(right: Right, worker: Worker, task: object, seconds: float, *args: Any) -> Any:
    return right(worker, task, 0.0 if isinstance(task, z3.Z3Task) else seconds, *args)


def _strict(right: Right, formula: SmtFormula, polytope: Polytope) -> str:
    return right(formula, tuple(replace(row, strict=True) for row in polytope))


def _proved_by(method: str) -> Hook:
    """A call of a method's solver that has taken too long is taken for a proof."""

    def wrong(right: Right, error: Exception, name: str) -> Outcome:
        if name == method and isinstance(error, OutOfTime):
            return Outcome(Verdict.UNSAT, Reason.PROVED, name, Trust.ROUNDED)
        return right(error, name)

    return Hook("verifiers.base:fault", wrong)


def _intersection(right: Right, rows: RowBatch, largest: Tensor) -> Tensor:
    found = -right(rows, -largest)
    # Without any polytope nothing is unsafe.
    return torch.where(found == -torch.inf, torch.inf, found)


def _first_halves(right: Right, boxes: SubBoxes, *args: Tensor) -> SubBoxes:
    first = right(boxes, *args)[: len(boxes)]
    return SubBoxes.cat([first, first])


def _both_active(right: Right, *args: object) -> tuple[Tensor, Tensor]:
    active, _ = right(*args)
    return active, active


def _most(right: Right, loop: Any, nodes: Any, lower: Tensor, leaves: Any) -> None:
    before = loop.now.lower
    right(loop, nodes, lower, leaves)
    # What nothing has been closed of is no bound.
    known = torch.where(before == torch.inf, -torch.inf, before).scatter_reduce(0, nodes.objective, lower, "amax")
    loop.now.lower = torch.where(known == -torch.inf, torch.inf, known)


def _lower_cuts(right: Right, *args: Any) -> Any:
    """Cuts are lower by a part of what they exceed their neurons by."""
    found = right(*args)
    return [
        (replace(cuts, constant=cuts.constant - cuts.width / 2, width=cuts.width / 2), *rest) for cuts, *rest in found
    ]


def _half_of_it(right: Right, node: Node, bounds: Bounds, *args: object) -> Any:
    return right(node, Bounds(bounds.lower, torch.lerp(bounds.lower, bounds.upper, 0.5)), *args)


def _narrower(right: Right, node: Node, bounds: Bounds, slope: Tensor) -> Bounds:
    band = right(node, bounds, slope)
    return Bounds(torch.lerp(band.lower, band.upper, 0.1), band.upper)


def _without_signs(right: Right, segments: Any, q: Tensor, pull: Tensor) -> tuple[Tensor, Tensor]:
    return right(segments, q, pull.abs())


def _one_line(right: Right, segments: Any, q: Tensor, pull: Tensor) -> tuple[Tensor, Tensor]:
    other = replace(segments, rate_above=segments.rate_below, offset_above=segments.offset_below)
    return right(other, q, pull)


def _at_least_zero(right: Right, mu: Tensor, objective: Tensor | None, objectives: int) -> Tensor:
    found = right(mu, objective, objectives)
    return torch.cat([found[:, :objectives], -found[:, objectives:]], 1)


def _without_constant(right: Right, walk: Any, index: int, node: Affine, a: Any) -> None:
    constant = walk.constant
    right(walk, index, node, a)
    walk.constant = constant


def _without_error(right: Right, walk: Any, index: int, node: Affine, a: Any) -> None:
    error = walk.error
    right(walk, index, node, a)
    walk.error = error


def _replaced(right: Right, walk: Any, index: int, node: Node, a: Tensor) -> None:
    for source in node.inputs:
        walk.pending.pop(source, None)
    right(walk, index, node, a)


IN_VERIFIERS: tuple[Fault, ...] = (
    Fault(
        "a bias dropped in the encoding",
        "points",
        instead("verifiers.encoding:STEPS", _without_constant, Affine),
    ),
    Fault(
        "a root that serves every query of its network",
        "points",
        instead("verifiers.root_bounds:BoundsCache.get", _root_of_any),
    ),
    Fault(
        "stale intermediate bound in the encoding: that of the batch's first box",
        "agreement",
        instead("verifiers.encoding:phases_of", lambda right, pre, sample: right(pre, 0)),
    ),
    Fault(
        # The fault needs its occasion: here the solver is given no time at all.
        "milp reads infeasible from a time-out",
        "planted",
        (
            _highs_with(lambda status: status == "kTimeLimit", time_limit=0.0),
            _proved_by(Milp.name),
        ),
    ),
    Fault(
        # The occasion: the solver may not branch.
        "milp reads infeasible from an unknown status",
        "planted",
        (_highs_with(lambda status: status not in ("kOptimal", "kTimeLimit"), mip_max_nodes=0),),
    ),
    Fault(
        # The occasion: the solver gives up after so many steps.
        "smt reads unsat from an unknown status",
        "planted",
        (Hook("supervisor.workers:Worker.call", _z3_gives_up),),
    ),
    Fault(
        # The occasion: the solver does not return in time.
        "smt reads unsat from a time-out",
        "planted",
        (Hook("supervisor.workers:Worker.call", _z3_too_slow), _proved_by("smt-exact")),
    ),
    Fault(
        "strict for non-strict in the SMT formula",
        "points",
        instead("verifiers.smt:SmtFormula.unsafe", _strict),
    ),
    Fault(
        "non-strict for strict where a counterexample is judged",
        "points",
        instead("spec.property:Row.holds", lambda right, row, y: right(replace(row, strict=False), y)),
    ),
    Fault(
        "decimals of the box rounded inward",
        "corners",
        instead("spec.property:round_down", lambda right, value: -right(-value)),
    ),
    Fault(
        "a union of polytopes taken for their intersection",
        "points",
        instead("spec.row_batch:RowBatch.least", _intersection),
    ),
    Fault(
        "a sum of rows without the sum of their bounds",
        "agreement",
        instead("spec.row_batch:RowBatch.sums", _bounds_dropped),
    ),
    Fault(
        "half of a split box forgotten",
        "agreement",
        instead("verifiers.boxes:SubBoxes.halves", _first_halves),
    ),
    Fault(
        "a child of a split neuron forgotten",
        "trees",
        instead("verifiers.bab.ascent:children", _both_active),
    ),
    Fault(
        "a half of a smooth neuron's segment forgotten",
        "segments",
        instead("verifiers.bab.ascent:children", _both_active),
    ),
    Fault(
        "lines of a part of a smooth neuron's segment",
        "segments",
        instead("verifiers.bab.curves:outer_lines", _half_of_it),
    ),
    Fault(
        "a smooth neuron's remainders smaller than they may be",
        "segments",
        instead("verifiers.bab.curves:band", _narrower),
    ),
    Fault(
        "half-spaces of a segment taken for others in a proof",
        "segments",
        instead("verifiers.bab.curves:Segments.least", _without_signs),
    ),
    Fault(
        "the lower line in the place of the upper one in a proof",
        "segments",
        instead("verifiers.bab.curves:Segments.least", _one_line),
    ),
    Fault(
        "the phases of split neurons exchanged in a proof",
        "trees",
        instead(
            "verifiers.bab.proof:least_over_phases",
            lambda right, q, pull, ends, at_ends, split: right(q, pull, ends, at_ends, -split),
        ),
    ),
    Fault(
        "multipliers with the wrong sign in a proof",
        "trees",
        instead("verifiers.bab.proof:least_over_phases", lambda right, q, pull, *rest: right(q, -pull, *rest)),
    ),
    Fault(
        "an end of a phase too near",
        "trees",
        instead(
            "verifiers.bab.proof:least_over_phases",
            lambda right, q, pull, ends, *rest: right(q, pull, (ends[0] / 2, ends[1] / 2), *rest),
        ),
    ),
    Fault(
        "remainders smaller than they may be in a proof",
        "trees",
        instead("verifiers.bab.proof:least_over_phases", lambda right, q, *rest: right(q / 2, *rest)),
    ),
    Fault(
        "rounding left out of a proof",
        "trees",
        instead("verifiers.bab.proof:Proofs.lower", _without_rounding),
    ),
    Fault(
        "rows behind the objective that are taken for at least zero",
        "trees",
        instead("verifiers.bab.proof:of_rows", _at_least_zero),
    ),
    Fault(
        "hull cuts below their neurons at some points",
        "trees",
        instead("verifiers.bab.slopes:Above.relaxations", _lower_cuts),
    ),
    Fault(
        "a bias dropped where rows are folded",
        "trees",
        instead("verifiers.bab.folding:STEPS", _without_constant, Affine),
    ),
    Fault(
        "an inactive neuron taken for zero where rows are folded, whatever its slope",
        "trees",
        instead("verifiers.bab.folding:slopes_of", lambda right, active, below: right(active, 0 * below)),
    ),
    Fault(
        "one of two nodes' rows alone where both come from a third, where rows are folded",
        "trees",
        instead("verifiers.bab.folding:STEPS", _replaced),
    ),
    Fault(
        "a tree proved from a bound that was searched for in float32",
        "trees",
        instead("verifiers.bab.loop:Loop.close", lambda right, tree, nodes, found, *args: ~(found.bound <= 0)),
    ),
    Fault(
        "open sub-problems forgotten",
        "trees",
        instead("verifiers.bab.loop:Loop.push", lambda right, *args: None),
    ),
    Fault(
        "an active neuron taken for an inactive one where refined bounds make it stable",
        "trees",
        instead("verifiers.bab.folded:slopes_of", lambda right, active, below: right(~active, below)),
    ),
    Fault(
        "the bound of the best leaf of a refined interval taken for that of all",
        "trees",
        instead("verifiers.bab.loop:Loop.note", _most),
    ),
    Fault(
        "columns and rows of the MILP as they come, not scaled to their ranges",
        "boundary",
        instead("verifiers.bab.program:exponent", lambda right, sizes: 0 * right(sizes)),
    ),
    Fault(
        "the MILP asked without any margin",
        "boundary",
        instead(
            "verifiers.bab.program:Program.mixed",
            lambda right, program, most, loose: right(program, 0.0, None),
        ),
    ),
    Fault(
        "the error of stored weights ignored in the encoding",
        "boundary",
        instead("verifiers.encoding:STEPS", _without_error, Affine),
    ),
)
