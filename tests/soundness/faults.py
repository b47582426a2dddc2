"""Faults put into the library while it runs, each of which some kind of soundness test must catch."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from types import FunctionType

from verifiable_relu.bounds import Tuning

from .judge import Caught, Report
from .kinds import agreement, boundary, corners, planted, points
from .trees import trees

QUICK = {"ibp": 1.0, "crown": 1.0, "milp": 1.0, "smt-exact": 1.0, "alpha-crown": 1.0, "bab": 1.0}
"""Methods asked about every fault, with seconds for each case; those first that take least."""


_SMALL = Tuning(waiting_coefficients=0, counted_terms=0, interval_products=1, interval_widening=1e30)
"""What is worth it in large networks or wide boxes alone, in others, too: sides that wait, terms that are counted,
intervals in float32."""


def _corners(report: Report) -> None:
    corners(tuning=_SMALL, report=report)
    corners(report=report)
    corners(smooth=True, report=report)


def _points(report: Report) -> None:
    points({**QUICK, "auto": 1.0}, report=report)
    points(QUICK, decimal=True, report=report)


def _planted(report: Report) -> None:
    planted({"milp": 0.03, "smt-exact": 0.03}, sizes=(6,), report=report)
    planted({**QUICK, "split": 1.0}, sizes=(3,), report=report)


def _agreement(report: Report) -> None:
    agreement({"split": 0.3, **QUICK}, offsets=(1e-3, 1e-9, -1e-9, -0.05, -0.4), report=report)


def _boundary(report: Report) -> None:
    boundary({"crown": 1.0}, kinds=("LeakyRelu", "PRelu"), count=160, report=report)
    boundary({"ibp": 1.0, "crown": 1.0}, count=70, report=report)
    boundary({"milp": 1.0, "smt-exact": 0.5}, kinds=("Relu", "LeakyRelu"), count=40, report=report)


def _trees(report: Report) -> None:
    trees(report=report)


KINDS: dict[str, Callable[[Report], None]] = {
    "corners": _corners,
    "points": _points,
    "planted": _planted,
    "agreement": _agreement,
    "boundary": _boundary,
    "trees": _trees,
}
"""The kinds as they are held against a fault: the tests' own cases, fewer methods and less time."""


def _function(path: str) -> FunctionType:
    """``module:name`` or ``module:Class.name`` below the package."""
    module, _, qualified = path.partition(":")
    found: object = import_module(f"verifiable_relu.{module}")
    for part in qualified.split("."):
        found = inspect.getattr_static(found, part)
    if isinstance(found, classmethod | staticmethod):
        found = found.__func__
    if isinstance(found, property):
        found = found.fget
    if isinstance(found, cached_property):
        found = found.func
    assert isinstance(found, FunctionType), path
    return found


@dataclass(frozen=True)
class Change:
    """One piece of a function's source text replaced by another."""

    path: str
    old: str
    new: str


@contextmanager
def _changed(path: str, changes: Sequence[Change]) -> Iterator[None]:
    """Exchange a function's code in place, so that every module that has imported it is faulty too."""
    function = _function(path)
    source = textwrap.dedent(inspect.getsource(function))
    for change in changes:
        if change.old not in source:
            raise LookupError(f"the fault no longer fits {path}: {change.old!r} is gone")
        source = source.replace(change.old, change.new)
    text = "\n".join(line for line in source.splitlines() if not line.startswith("@"))
    names: dict[str, FunctionType] = {}
    code = compile("from __future__ import annotations\n" + text, f"<fault in {path}>", "exec")
    exec(code, dict(function.__globals__), names)
    before = function.__code__
    function.__code__ = names[function.__name__].__code__
    try:
        yield
    finally:
        function.__code__ = before


@dataclass(frozen=True)
class Fault:
    """A named fault; ``best`` is the kind of test to ask first."""

    name: str
    best: str
    changes: tuple[Change, ...]

    @contextmanager
    def applied(self) -> Iterator[None]:
        with ExitStack() as stack:
            for path in {change.path for change in self.changes}:
                stack.enter_context(_changed(path, [change for change in self.changes if change.path == path]))
            yield

    def caught_by(self, kind: str) -> str | None:
        """The first thing that a kind of test has to say against the faulty library."""
        with self.applied():
            try:
                KINDS[kind](Report(stop_at_first=True))
            except Caught as caught:
                return str(caught)
        return None


_TIMEOUT = '_unknown(Reason.TIMEOUT, "the budget ran out")'
_PROVED = "Outcome(Verdict.UNSAT, Reason.PROVED, self.name, Trust.FLOAT)"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "lower and upper swapped in an affine image",
        "corners",
        (
            Change(
                "bounds.interval:affine_image",
                "Bounds(middle - spread, spread.add_(middle))",
                "Bounds(middle + spread, middle - spread)",
            ),
        ),
    ),
    Fault(
        "lower and upper swapped in the image of ReLU",
        "corners",
        (
            Change(
                "bounds.activations:_relu_image",
                "Bounds(bounds.lower.clamp(min=0), bounds.upper.clamp(min=0))",
                "Bounds(bounds.upper.clamp(min=0), bounds.lower.clamp(min=0))",
            ),
        ),
    ),
    Fault(
        "a bias dropped in linear bounds",
        "corners",
        (
            Change(
                "bounds.forward:NodeBounds.point",
                "self.operators[index].forward(",
                "self.operators[index].linear(",
            ),
        ),
    ),
    Fault(
        "a bias dropped in interval bounds",
        "corners",
        (Change("bounds.interval:affine_image", "operator.forward(center)", "operator.linear(center)"),),
    ),
    Fault(
        "a bias dropped in interval bounds in float32",
        "corners",
        (Change("bounds.interval:affine_image", ".add_(operator.offset)", ""),),
    ),
    Fault(
        "a bias dropped in the encoding",
        "points",
        (Change("verifiers.encoding:_affine", "+ Dyadic(a.numbers @ flat, a.exponent + offset.exponent)", ""),),
    ),
    Fault(
        "chord for tangent",
        "corners",
        (
            Change(
                "bounds.activations:relax",
                "return row(node).relax(node, bounds, slope)",
                "lines = row(node).relax(node, bounds, slope)\n"
                "    return Lines(*[lines.upper_slope, lines.upper_offset] * 2)",
            ),
        ),
    ),
    Fault(
        "wrong corner when a linear bound meets the box",
        "corners",
        (
            Change(
                "bounds.backward:_Walk._end",
                "self.less(self._summed(",
                "self.plus(self._summed(",
            ),
        ),
    ),
    Fault(
        "wrong side of the padding cut off a convolution's adjoint",
        "corners",
        (
            Change(
                "network.nodes:Conv2d.adjoint",
                "full[:, :, top : top + height, left : left + width]",
                "full[:, :, bottom : bottom + height, right : right + width]",
            ),
            Change(
                "bounds.operators.convolution:ConvolutionOperator._corner",
                "self.node.padding[0], self.node.padding[1]",
                "self.node.padding[2], self.node.padding[3]",
            ),
        ),
    ),
    Fault(
        "wrong corner where the last convolution is taken in cells",
        "corners",
        (Change("bounds.last_convolution:LastConvolution.step", "Stepped(-sums", "Stepped(sums"),),
    ),
    Fault(
        "wrong corner within windows, in cells",
        "corners",
        (Change("bounds.windowed:Windowed.step", "self._added(-self._in_cells(", "self._added(self._in_cells("),),
    ),
    Fault(
        "the cells of a window looked for where its outputs' inputs begin",
        "corners",
        (
            Change(
                "bounds.windowed:Windowed._in_cells",
                "replace(a.grid, size=(shape[1], shape[2]))",
                "replace(a.grid.before(operator.node), size=(shape[1], shape[2]))",
            ),
        ),
    ),
    Fault(
        "the constant at the target's point left out",
        "corners",
        (
            Change(
                "bounds.backward:Backward._at_point",
                "of_samples(self.bounds.point(index).flatten(1), sample)",
                "0 * a[:1, 0]",
            ),
        ),
    ),
    Fault(
        "an activation's point taken for that of its input",
        "corners",
        (Change("bounds.shifted:ShiftedLines.outward", "of(bounds.point(index).flatten(1))", "z"),),
    ),
    Fault(
        "the upper line not raised by how far it lies above the lower one at the point",
        "corners",
        (Change("bounds.shifted:ShiftedLines.outward", "torch.addcmul(lines.upper_offset, rise, z)", "0 * z"),),
    ),
    Fault(
        "the upper line raised as about twice the point",
        "corners",
        (
            Change(
                "bounds.shifted:ShiftedLines.outward",
                "torch.addcmul(lines.upper_offset, rise, z)",
                "torch.addcmul(lines.upper_offset, rise, 2 * z)",
            ),
        ),
    ),
    Fault(
        "rows' own lower lines taken for those of all rows at the point",
        "agreement",
        (Change("bounds.shifted:ShiftedLines.outward", "- of(bounds.point(index).flatten(1))", "* 0"),),
    ),
    Fault(
        "rounding errors of all nodes before a target taken for covered by it",
        "corners",
        (Change("bounds.slack:Slack.covered", "frozenset(found)", "frozenset(range(index + 1))"),),
    ),
    Fault(
        "rounding of coefficients in float32 left out",
        "corners",
        (Change("bounds.rounding:backward_single", "1.01 * gamma(most + _SLOPES, single) / (most + _SLOPES)", "0.0"),),
    ),
    Fault(
        "rows of one of two nodes alone where both use a third",
        "corners",
        (
            Change(
                "bounds.backward:_Walk.give",
                "self.whole(a, index) + self.whole(other, index) if both is None else both",
                "self.whole(a, index)",
            ),
        ),
    ),
    Fault(
        "rows of one of two nodes alone where both use a third, within windows",
        "corners",
        (
            Change(
                "bounds.window:Window.plus",
                "self._within(grid) + other._within(grid)",
                "self._within(grid)",
            ),
        ),
    ),
    Fault(
        "a side that waits taken for one that decides",
        "corners",
        (
            Change(
                "bounds.tighten:_Layer.tightened",
                "self._improve(undecided(later, both).flatten().nonzero().squeeze(1))",
                "both.masked_fill_(later, 0)",
            ),
        ),
    ),
    Fault(
        "the sides of a neuron that waits exchanged",
        "corners",
        (
            Change(
                "bounds.tighten:_Layer.tightened",
                "self._improve(undecided(later, both).flatten().nonzero().squeeze(1))",
                "both.copy_(both.where(~later, both.flip(0)))",
            ),
        ),
    ),
    Fault(
        "rounding of radii in float32 left out",
        "corners",
        (Change("bounds.rounding:interval_affine", "1.01 * gamma(terms + 4, torch.float32)", "0.0"),),
    ),
    Fault(
        "rounding of centres in float32 left out",
        "corners",
        (Change("bounds.rounding:interval_single", "share_single(terms)", "0.0"),),
    ),
    Fault(
        "rounding of rows by intervals left out",
        "corners",
        (
            Change("bounds.rounding:interval_rows", "return value(", "return 0 * value("),
            Change("bounds.rounding:interval_rows", "return backward_affine(", "return 0 * backward_affine("),
        ),
    ),
    Fault(
        "rows in any order taken for rows in turn",
        "corners",
        (Change("bounds.chunks:_in_turn", "return not more and torch.equal(", "return not more or torch.equal("),),
    ),
    Fault(
        "the window of a neighbouring neuron",
        "corners",
        (Change("bounds.window:kernels", "neuron % size", "(neuron + 1) % size"),),
    ),
    Fault(
        "windows of the first box for rows of all",
        "corners",
        (Change("bounds.window:Window.of", "group * (down * right) + self.point", "self.point"),),
    ),
    Fault(
        "the kernel of another channel",
        "corners",
        (
            Change(
                "bounds.window:kernels",
                "operator.weight(sign.dtype).index_select",
                "operator.weight(sign.dtype).flip(0).index_select",
            ),
        ),
    ),
    Fault(
        "stale intermediate bound in a relaxation: that of the batch's first box",
        "agreement",
        (
            Change(
                "bounds.lines:LineTable.of",
                "self._bounds.pre[index])",
                "Bounds(*(b[:1].expand_as(b) for b in vars(self._bounds.pre[index]).values())))",
            ),
        ),
    ),
    Fault(
        "a root that serves every query of its network",
        "points",
        (
            Change("verifiers.root:Roots.of", "self._roots.get(query)", "self._roots.get(query.network)"),
            Change("verifiers.root:Roots._keep", "self._roots[query] = root", "self._roots[query.network] = root"),
        ),
    ),
    Fault(
        "stale intermediate bound in the encoding: that of the batch's first box",
        "agreement",
        (
            Change(
                "verifiers.solving:bounded",
                "Phases(b.lower[sample].flatten().numpy(), b.upper[sample].flatten()",
                "Phases(b.lower[0].flatten().numpy(), b.upper[0].flatten()",
            ),
        ),
    ),
    Fault(
        # The fault needs its occasion: here the solver is given no time at all.
        "milp reads infeasible from a time-out",
        "planted",
        (
            Change("verifiers.milp:Milp._options", '"mip_abs_gap": 0.0', '"mip_abs_gap": 0.0, "time_limit": 0.0'),
            Change("verifiers.milp:Milp._reach", "solved = fault(error, self.name)", f"solved = {_PROVED}"),
            Change("verifiers.milp:Milp._read", f"return {_TIMEOUT}", f"return {_PROVED}"),
        ),
    ),
    Fault(
        # The occasion: the solver may not branch.
        "milp reads infeasible from an unknown status",
        "planted",
        (
            Change("verifiers.milp:Milp._options", '"mip_abs_gap": 0.0', '"mip_abs_gap": 0.0, "mip_max_nodes": 0'),
            Change("verifiers.milp:Milp._read", "case status:\n", f"case status:\n            return {_PROVED}\n"),
        ),
    ),
    Fault(
        # The occasion: the solver gives up after so many steps.
        "smt reads unsat from an unknown status",
        "planted",
        (
            Change("verifiers.smt:Smt._read", 'checked.answer == "unsat"', 'checked.answer != "sat"'),
            Change("verifiers.smt:Smt._options", '"ctrl_c": False', '"rlimit": 1000'),
        ),
    ),
    Fault(
        # The occasion: the solver does not return in time.
        "smt reads unsat from a time-out",
        "planted",
        (
            Change(
                "verifiers.smt:Smt._reach",
                "fault(error, self.name)",
                "Outcome(Verdict.UNSAT, Reason.PROVED, self.name, Trust.ROUNDED)",
            ),
            Change("verifiers.smt:Smt._reach", "seconds + PATIENCE", "0.0"),
        ),
    ),
    Fault(
        "strict for non-strict in the SMT formula",
        "points",
        (Change("verifiers.smt:_Formula._row", "'<' if row.strict else '<='", "'<'"),),
    ),
    Fault(
        "non-strict for strict where a counterexample is judged",
        "points",
        (Change("spec.property:Row.holds", "slack < 0 if self.strict else slack <= 0", "slack <= 0"),),
    ),
    Fault(
        "outward rounding left out",
        "corners",
        (Change("bounds.rounding:unit_roundoff", "torch.finfo(dtype).eps / 2", "0.0"),),
    ),
    Fault(
        "decimals of the box rounded inward",
        "corners",
        (Change("spec.property:round_down", "<= value.numerator * d", ">= value.numerator * d"),),
    ),
    Fault(
        "a union of polytopes taken for their intersection",
        "points",
        (Change("spec.property:RowBatch.least", 'largest, "amin"', 'largest, "amax", include_self=False'),),
    ),
    Fault(
        "half of a split box forgotten",
        "agreement",
        (
            Change(
                "verifiers.input_split:Frontier.halve",
                "torch.cat([upper.scatter(1, dimension, middle), upper])",
                "torch.cat([upper.scatter(1, dimension, middle)] * 2)",
            ),
        ),
    ),
    Fault(
        "a child of a split neuron forgotten",
        "trees",
        (Change("verifiers.bab.tree:Tree._children", "torch.cat([active, inactive])", "torch.cat([active, active])"),),
    ),
    Fault(
        "the phases of split neurons exchanged in a proof",
        "trees",
        (
            Change("verifiers.bab.proof:Proofs.lower", "split < 0", "0 < split"),
            Change("verifiers.bab.proof:Proofs.lower", "split > 0", "0 > split"),
        ),
    ),
    Fault(
        "multipliers with the wrong sign in a proof",
        "trees",
        (Change("verifiers.bab.proof:Proofs.lower", "pull[:, columns] = -w", "pull[:, columns] = w"),),
    ),
    Fault(
        "an end of a phase too near",
        "trees",
        (Change("verifiers.bab.proof:Proofs.lower", "pull, self._upper)", "pull, self._upper / 2)"),),
    ),
    Fault(
        "remainders smaller than they may be in a proof",
        "trees",
        (Change("verifiers.bab.proof:Proofs.lower", "(q * self._at_upper)", "(q * self._at_upper / 2)"),),
    ),
    Fault(
        "rounding left out of a proof",
        "trees",
        (Change("verifiers.bab.proof:Proofs.lower", "found - OWN * error", "found"),),
    ),
    Fault(
        "rows behind the objective that are taken for at least zero",
        "trees",
        (Change("verifiers.bab.proof:Proofs.lower", "mu.double().clamp(min=0)", "-mu.double().clamp(min=0)"),),
    ),
    Fault(
        "a bias dropped where rows are folded",
        "trees",
        (
            Change(
                "verifiers.bab.folding:_affine",
                "walk.constant = walk.constant + a @ node.offset()",
                "0 * a @ node.offset()",
            ),
        ),
    ),
    Fault(
        "an inactive neuron taken for zero where rows are folded, whatever its slope",
        "trees",
        (Change("verifiers.bab.folding:Folded.__init__", "torch.where(inactive, below, 0.0)", "0 * below"),),
    ),
    Fault(
        "one of two nodes' rows alone where both come from a third, where rows are folded",
        "trees",
        (Change("verifiers.bab.folding:_Walk.give", "self.pending[index] + a", "a"),),
    ),
    Fault(
        "a tree proved from a bound that was searched for in float32",
        "trees",
        (Change("verifiers.bab.tree:Tree._prove", "proved[likely] = closed", "pass"),),
    ),
    Fault(
        "open sub-problems forgotten",
        "trees",
        (Change("verifiers.bab.tree:Tree._bound", "self._push(batch[is_open], blame[is_open])", "pass"),),
    ),
    Fault(
        "the line through a kink rounded out of the slopes on either side",
        "boundary",
        (
            Change(
                "bounds.activations:_kinked",
                "torch.lerp(left.expand_as(lb), one, adaptive).clamp(left.clamp(max=1), left.clamp(min=1))",
                "left + adaptive * (1 - left)",
            ),
        ),
    ),
    Fault(
        "columns and rows of the MILP as they come, not scaled to their ranges",
        "boundary",
        (Change("verifiers.mixed_integer:_exponent", "np.frexp(sizes)[1]", "0 * np.frexp(sizes)[1]"),),
    ),
    Fault(
        "the MILP asked without any margin",
        "boundary",
        (
            Change(
                "verifiers.mixed_integer:Model.program",
                "lower, upper = lower - outward, upper + outward",
                "slack = 0.0",
            ),
        ),
    ),
    Fault(
        "the error of stored weights ignored in the encoding",
        "boundary",
        (Change("verifiers.encoding:Folding.relative", "return 2 * node.weight_error", "return 0.0"),),
    ),
    Fault(
        "the error of stored weights ignored in bounds",
        "boundary",
        (
            Change("bounds.rounding:backward_affine", "lines + 2 * node.weight_error", "lines"),
            Change("bounds.rounding:interval_affine", "+ 2 * node.weight_error", ""),
        ),
    ),
)
