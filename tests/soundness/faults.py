"""Mistakes that someone could make at the seams of the library, and the kinds of test that must see them.

Five seams: *relax* (linear bounds of one op), *back-propagate* (rows through an op), *concretise* (rows over a box),
*close* (what is decided), *read* (numbers of files). Those within branch and bound are in ``unit/test_search_bab.py``,
those of curves in ``unit/test_ir_functions.py``, those of a runtime's arithmetic in ``test_arithmetic.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.unit import test_engine_soundness as engine
from verifiable_relu.bounds.zonotopes import AffineForm
from verifiable_relu.errors import OutOfTime
from verifiable_relu.ir.interval import Interval
from verifiable_relu.ir.linear import Convolution
from verifiable_relu.readers.onnx.constants import evaluated
from verifiable_relu.search.outcomes import Outcome, Reason, Trust, Verdict
from verifiable_relu.search.solvers.workers import Z3Answer
from verifiable_relu.spec.property import Property

from . import programs
from .fault import Fault, Hook, instead
from .judge import Caught, HandedOn, Report
from .kinds import agreement, boundary, corners, planted, points
from .magnitudes import magnitudes

Right = Callable[..., Any]

# The kinds of test, as they are held against a fault: the tests' own cases, fewer methods and less time.

QUICK = dict.fromkeys(("ibp", "crown", "milp", "smt-exact", "alpha-crown", "bab"), 1.0)


def _noted(problems: Iterator[str], report: Report) -> None:
    for problem in problems:
        report.note("", problem)


def _boundary(report: Report) -> None:
    boundary({"smt-exact": 0.5}, kinds=("Relu", "LeakyRelu"), count=100, report=report)
    boundary({"ibp": 1.0, "crown": 1.0}, count=70, report=report)


def _planted(report: Report) -> None:
    planted({"milp": 0.03, "smt-exact": 0.03}, sizes=(3, 6), report=report)
    planted({**QUICK, "split": 1.0}, sizes=(3,), report=report)


def _points(report: Report) -> None:
    # First whoever notices what nobody else would.
    points({HandedOn.name: 1.0, "auto": 0.5, **QUICK}, report=report)


def _agreement(report: Report) -> None:
    agreement({"split": 0.3, **QUICK, "smt-exact": 0.3}, offsets=(1e-3, 1e-9, -1e-9, -0.05, -0.4), report=report)


KINDS: dict[str, Callable[[Report], Any]] = {
    "engine": lambda report: _noted(engine.problems(), report),
    "corners": lambda report: corners(report=report),
    "smooth corners": lambda report: corners(smooth=True, report=report),
    "points": _points,
    "planted": _planted,
    "agreement": _agreement,
    "boundary": _boundary,
    "programs": lambda report: _noted(programs.problems(), report),
    "magnitudes": lambda report: magnitudes(dict.fromkeys(("ibp", "milp", "smt-exact"), 1.0), count=270, report=report),
    "factors": lambda report: magnitudes({"ibp": 1.0}, count=600, kinds=("batch normalisation", "GELU"), report=report),
}
"""A kind notes what it has against the library."""


def caught_by(kind: str, fault: Fault) -> str | None:
    """The first thing that a kind of test has to say against the library with a fault in it."""
    with fault.applied():
        try:
            KINDS[kind](Report(stop_at_first=True))
        except Caught as caught:
            return str(caught)
    return None


# What is wrong


def _part(share: float) -> Right:
    return lambda right, *args: share * right(*args)


def _moved(share: float) -> Right:
    """An offset that is off by a part of the interval's width."""
    return lambda right, function, x, slope: right(function, x, slope) + share * (x.upper - x.lower)


def _narrower(right: Right, function: object, x: Interval) -> Interval:
    found = right(function, x)
    return Interval(found.lower, found.upper - 0.25 * (found.upper - found.lower))


def _first_sample(right: Right, vectors: Any, sample: Tensor | None) -> Tensor:
    return right(vectors, None if sample is None else torch.zeros_like(sample))


def _first_windows(right: Right, vectors: Any, pixels: Tensor, size: Any, image: Any, sample: Tensor | None) -> Any:
    return right(vectors, pixels, size, image, None if sample is None else torch.zeros_like(sample))


def _careless(right: Right, form: AffineForm) -> Interval:
    reach = sum(block.abs().sum(0) for block in form.spread().generators.values())
    return Interval(form.center - reach, form.center + reach)


def _next_channel(right: Right, conv: Convolution, neuron: Tensor, sign: Tensor) -> Any:
    size = conv.n_out // len(conv.weight)
    return right(conv, (neuron + size) % conv.n_out, sign)


def _columns_added_anyway(right: Right, weight: Tensor, place: Tensor, size: int) -> Tensor:
    return weight.new_zeros(len(weight), size).index_add_(1, place, weight)


def _best_polytope(right: Right, bounds: Any, number: int) -> float:
    return max(bounds.lower[number].tolist(), default=float("inf"))


def _any_root(right: Right, cache: Any, number: int) -> Any:
    return right(cache, min(cache._kept, default=number))


def _closed(prop: Property) -> Property:
    """The property with ≤ in the place of <."""
    return replace(prop, unsafe=tuple(tuple(replace(row, strict=False) for row in rows) for rows in prop.unsafe))


def _upper_half(right: Right, boxes: Any, *args: Any) -> Any:
    found = right(boxes, *args)
    return found[torch.arange(len(boxes)).repeat(2)]


def _strict(right: Right, formula: Any, polytope: Any) -> str:
    return right(formula, polytope).replace("<=", "<")


def _infeasible(right: Right, method: Any, solved: Any) -> Outcome:
    found = right(method, solved)
    is_open = found.verdict is Verdict.UNKNOWN and solved.status != "kOptimal"
    return Outcome(Verdict.UNSAT, Reason.PROVED, method.name, Trust.FLOAT) if is_open else found


def _nothing(right: Right, worker: Any, task: Any, *rest: Any) -> Any:
    return Z3Answer("unsat", []) if hasattr(task, "declarations") else right(worker, task, *rest)


def _late(right: Right, worker: Any, task: Any, seconds: float, *rest: Any) -> Any:
    if hasattr(task, "declarations"):
        raise OutOfTime
    return right(worker, task, seconds, *rest)


def _proved(right: Right, error: Exception, name: str) -> Outcome:
    return Outcome(Verdict.UNSAT, Reason.PROVED, name, Trust.EXACT) if name.startswith("smt") else right(error, name)


def _stopped_at_once(right: Right, worker: Any, task: Any, *rest: Any) -> Any:
    if hasattr(task, "program"):
        task = replace(task, options={**task.options, "time_limit": 0.0})
    return right(worker, task, *rest)


def _all_active(right: Right, network: Any, intervals: Any) -> Any:
    return {index: np.where(phase == 0, 1, phase) for index, phase in right(network, intervals).items()}


def _in_floats(right: Right, gamma: Tensor, variance: Tensor, epsilon: float) -> tuple[Tensor, float]:
    return gamma.double() / (variance.double() + epsilon).sqrt(), 2.0**-51


def _exactly(right: Right, *args: Any) -> Any:
    return right(*args)[0], 0.0


def _none(right: Right, *args: Any) -> float:
    return 0.0


def _smooth(name: str, wrong: Right) -> tuple[Hook, ...]:
    return instead(f"ir.functions.smooth:Smooth.{name}", wrong)


def _uncharged(right: Right, rows: Any, *_: object) -> Tensor:
    return torch.zeros(rows.values.shape[:2], dtype=torch.float64)


def _plain_sum(right: Right, terms: list[Tensor], charges: list[Tensor], lost: Tensor) -> Tensor:
    return torch.stack([*terms, *(-charge for charge in charges)]).sum(0)


NO_PROOF = Hook("search.solvers.milp:QuerySearch.run", lambda right, search: replace(right(search), lower={}))

FAULTS: tuple[Fault, ...] = (
    # relax
    Fault(
        "relax: a floor too high",
        "corners",
        instead("ir.functions.piecewise_linear:PiecewiseLinear.floor", _moved(0.25)),
    ),
    Fault(
        "relax: a top too low", "corners", instead("ir.functions.piecewise_linear:PiecewiseLinear.top", _moved(-0.25))
    ),
    Fault(
        "relax: an image too small",
        "corners",
        instead("ir.functions.piecewise_linear:PiecewiseLinear.image", _narrower),
    ),
    Fault("relax: a curve's floor too high", "smooth corners", _smooth("floor", _moved(0.1))),
    Fault("relax: a curve's top too low", "smooth corners", _smooth("top", _moved(-0.1))),
    Fault("relax: a curve's image too small", "smooth corners", _smooth("image", _narrower)),
    Fault(
        "relax: a maximum is at most another of its candidates",
        "corners",
        instead("bounds.steps:of_samples", lambda right, index, sample: right(index.flip(1), sample), here=True),
    ),
    Fault(
        "relax: a difference of two functions without its band",
        "corners",
        instead(
            "bounds.zonotopes:Zonotopes._paired",
            lambda right, *args: (lambda form, band, wanted: (form, 0 * band, wanted))(*right(*args)),
        ),
    ),
    Fault(
        "relax: rounding of constants not covered",
        "engine",
        instead("bounds.steps:_covering", lambda right, floor, top, n, d: (floor.to(d), (top - floor).to(d))),
    ),
    Fault("relax: lines of another sample", "engine", instead("bounds.rows:SampleVectors.dense", _first_sample)),
    Fault("relax: windows of another sample", "engine", instead("bounds.rows:SampleVectors.windows", _first_windows)),
    # back-propagate
    Fault("back-propagate: biases dropped", "corners", instead("ir.network:Affine.bias_as", lambda right, *_: None)),
    Fault("back-propagate: no error of sums", "engine", instead("bounds.steps:sum_error", _none, here=True)),
    Fault(
        "back-propagate: nothing charged",
        "engine",
        instead("bounds.rows:Rows.charge", _uncharged),
    ),
    Fault(
        "back-propagate: weights that float32 loses are not charged",
        "engine",
        instead("ir.linear:LinearMap.conversion_error", _none),
    ),
    Fault(
        "back-propagate: coefficients beyond edges",
        "engine",
        instead("bounds.patches:Patches.cleaned", lambda right, patches: patches),
    ),
    Fault("back-propagate: the kernel of another channel", "corners", instead("bounds.patches:kernels", _next_channel)),
    Fault(
        "back-propagate: rows of one of two users",
        "corners",
        instead("bounds.rows:Rows.plus", lambda right, rows, other: other),
    ),
    Fault(
        "back-propagate: columns of repeated neurons added where their sums are rounded",
        "corners",
        instead("ir.transform:_merged_columns", _columns_added_anyway),
    ),
    Fault(
        "back-propagate: a bias dropped in exact forms",
        "points",
        instead(
            "search.solvers.encoding:ExactEncoding.forms",
            lambda right, *args: replace(form := right(*args), constant=form.constant + form.constant),
        ),
    ),
    Fault(
        "back-propagate: errors of stored weights ignored in exact forms",
        "boundary",
        instead("search.solvers.encoding:ExactEncoding._off", lambda right, encoding, op: np.zeros(op.size)),
    ),
    # concretise
    Fault("concretise: half of the radius", "corners", instead("bounds.rows:Rows.weigh", _part(0.5))),
    Fault(
        "concretise: a radius not enlarged",
        "engine",
        instead("bounds.neuron_bounds:radius_about", lambda right, point, x: (x.upper - x.lower) / 2),
    ),
    Fault("concretise: a sum not enlarged", "engine", instead("bounds.rows:sum_error", _none, here=True)),
    Fault(
        "concretise: intervals without rounding", "engine", instead("bounds.neuron_bounds:sum_error", _none, here=True)
    ),
    Fault(
        "concretise: affine forms without rounding",
        "corners",
        instead("bounds.zonotopes:AffineForm.interval", _careless),
    ),
    Fault(
        "concretise: decimals of a box rounded inward",
        "corners",
        instead("spec.property:round_down", lambda right, value: -right(-value)),
    ),
    # close
    Fault(
        "close: constants added without rounding",
        "engine",
        instead(
            "bounds.rows:close",
            _plain_sum,
        ),
    ),
    Fault(
        "close: charges forgotten",
        "engine",
        instead("bounds.backward:close", lambda right, terms, charges, lost: right(terms, [], lost), here=True),
    ),
    Fault(
        "close: a union of polytopes excluded with one of them",
        "points",
        instead("search.bounding:BoundedBoxes.margin", _best_polytope),
    ),
    Fault("close: bounds of another query", "points", instead("search.batch:BoundsCache.get", _any_root)),
    Fault(
        "close: non-strict for strict where a counterexample is judged",
        "points",
        instead("spec.property:Property.violated", lambda right, prop, y: right(_closed(prop), y)),
    ),
    Fault("close: half of a box forgotten", "agreement", instead("search.split.bounding:SubBoxes.halves", _upper_half)),
    Fault("close: too much cut off a box", "agreement", instead("search.split.bounding:reach_of_cut", _part(0.25))),
    Fault(
        "close: the sum of rows without their bounds",
        "agreement",
        instead(
            "search.property_rows:PropertyRows.sums",
            lambda right, *args: replace(found := right(*args), bound=torch.zeros_like(found.bound) - 1),
        ),
    ),
    Fault(
        "close: unstable neurons taken for active ones in exact forms",
        "agreement",
        instead("search.solvers.smt:phases_of", _all_active, here=True),
    ),
    Fault(
        "close: strict for non-strict in the SMT formula",
        "points",
        instead("search.solvers.smt:SmtFormula.unsafe", _strict),
    ),
    Fault("close: z3 says nothing, and that is unsat", "planted", instead("supervisor.workers:Worker.call", _nothing)),
    Fault(
        "close: z3 is late, and that is unsat",
        "planted",
        (Hook("supervisor.workers:Worker.call", _late), Hook("search.solvers.smt:fault", _proved, here=True)),
    ),
    Fault(
        "close: HiGHS runs out of time, and that is unsat",
        "planted",
        (
            Hook("supervisor.workers:Worker.call", _stopped_at_once),
            Hook("search.solvers.milp:Milp._read", _infeasible),
            NO_PROOF,
        ),
    ),
    Fault(
        "close: coefficients dropped from HiGHS's program and not charged",
        "programs",
        instead("search.solvers.milp:_leave_out_small", lambda right, matrix: 0 * right(matrix)),
    ),
    # read
    Fault(
        "read: constants computed in the file's own number type",
        "magnitudes",
        instead("readers.onnx.constants:folded", lambda right, node, inputs, opset: evaluated(node, inputs, opset)),
    ),
    Fault(
        "read: the factor of a batch normalisation that underflows taken for zero",
        "factors",
        instead("readers.derived:deviations", _in_floats),
    ),
    Fault("read: a rounded quotient taken for exact", "magnitudes", instead("readers.derived:quotient", _exactly)),
    Fault("read: rounded constants taken for exact", "magnitudes", instead("readers.derived:rounded", _exactly)),
    Fault("read: 1/n of a mean taken for exact", "magnitudes", instead("readers.derived:share", _exactly)),
)
