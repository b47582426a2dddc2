"""Piecewise-linear networks for solvers: what is stable is folded away, what is left is a system of affine forms.

Under bounds of the pre-activations most neurons are affine on the whole box. Rows are pulled back from a node to the
input, through affine nodes and stable neurons alike, and end at unstable neurons, each of which is two variables

    pre-activation = positive − negative,   value = positive − slope·negative,   positive, negative ≥ 0,

one of which is zero. A solver's problem then has one row per unstable neuron and one per output constraint, whatever
the size of the network. The arithmetic is float64, or exact: weights are dyadic rationals, so integers suffice.

Where float64 rounds, and where stored weights are not the operator's own (``Affine.weight_error``), a form is not what
it stands for. Pulling rows A back through y = W·x + b with relative errors of at most ε changes A·y by at most
ε·|A|·(|W|·|x| + |b|); every form carries the sum of these, over bounds of all values, and a problem whose rows are
loosened by it has every solution that the network has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from threading import Event, Thread
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from verifiable_relu.bounds import Bounds, input_box, interval_bounds
from verifiable_relu.errors import OutOfTime, UnsupportedError
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import (
    PIECEWISE_LINEAR,
    Activation,
    Add,
    Affine,
    Conv2d,
    Input,
    LeakyRelu,
    Linear,
    Permute,
    Reshape,
    Scale,
    Shape,
)
from verifiable_relu.spec.property import Polytope, Query, RowBatch
from verifiable_relu.trust.exact import Dyadic
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
from verifiable_relu.verifiers.root import NONE, Roots, relaxation

T = TypeVar("T")

_BATCH = 64
"""Most queries bounded at once."""

_COEFFICIENTS = 1 << 22
"""Most float coefficients of one node pulled back at once."""

_PRODUCTS = 1 << 21
"""Most multiplications of integers in a row, so that the clock is looked at several times a second."""

_GRACE = 0.6
"""Seconds that a solver told to stop is waited for."""

_UNIT = 2.0**-53
"""The unit roundoff of float64."""

_LEAST = 2.0**-1074
"""The smallest float64 number."""

_GENEROUS = 1.01
"""By this factor sums of errors and sizes are larger than computed, for the rounding of their own."""


def require_piecewise_linear(network: Network) -> None:
    """Refuse what has no exact mixed-integer form.

    Raises:
        UnsupportedError: naming the first activation that is not piecewise linear.
    """
    for index in network.activations:
        node = network.nodes[index]
        if not isinstance(node, PIECEWISE_LINEAR):
            raise UnsupportedError(
                "only piecewise-linear activations can be encoded", place=f"node '{node.name}' ({node.op})"
            )


@dataclass(frozen=True, eq=False)
class Forms:
    """Affine forms Σ terms[node]·(variables of that node) + constant, one a row.

    Attributes:
        terms: by variable node (0: the input, otherwise an activation), (rows, node size), zero where the node's
            neuron is no variable. For an activation they multiply the neuron's *value*.
        constant: (rows,).
        error: (rows,) by how much a form may differ from what it stands for, at the network's own values.
    """

    terms: dict[int, Dyadic]
    constant: Dyadic
    error: Dyadic


@dataclass(frozen=True, eq=False)
class Sizes:
    """Upper bounds of what errors in pulling rows back are relative to, by node; arrays are (node size,).

    Attributes:
        value: ≥ |v|.
        summed: of an affine node y = W·x + b, ≥ |W|·|x| + |b|.
    """

    value: Mapping[int, np.ndarray] = field(default_factory=dict)
    summed: Mapping[int, np.ndarray] = field(default_factory=dict)

    @staticmethod
    def of(network: Network, bounds: Sequence[Bounds], sample: int) -> Sizes:
        """From bounds of every node, in node order, of one sample of their batch."""
        value: dict[int, Tensor] = {}
        summed: dict[int, np.ndarray] = {}
        for index, (node, box) in enumerate(zip(network.nodes, bounds, strict=True)):
            value[index] = torch.maximum(-box.lower[sample], box.upper[sample])
            if isinstance(node, Affine):
                reached = node.absolute(value[node.inputs[0]][None])[0] + node.offset_magnitude()
                summed[index] = _above(reached.expand(node.shape))
        return Sizes({i: _above(v) for i, v in value.items()}, summed)


def _above(values: Tensor) -> np.ndarray:
    """Powers of two above values that are not negative, (size,): few digits suffice for errors. Others are infinite."""
    flat = values.flatten().numpy()
    with np.errstate(over="ignore"):
        above = np.ldexp(1.0, np.frexp(flat * _GENEROUS)[1])
    return np.where(np.isfinite(flat), above, np.inf)


class Folding:
    """A network's affine maps as arrays, and rows pulled back through them.

    Args:
        network: piecewise linear.
        exact: compute in integers with exponents instead of float64 (which is a Dyadic with exponent 0 throughout).

    Raises:
        UnsupportedError: if the network is not piecewise linear.
    """

    def __init__(self, network: Network, *, exact: bool) -> None:
        require_piecewise_linear(network)
        self.network = network
        self.exact = exact
        self._read: dict[tuple[int, str], Dyadic] = {}

    @cached_property
    def _chunk(self) -> int:
        """How many rows to pull back at once."""
        nodes = self.network.nodes
        if self.exact:
            return _PRODUCTS // max(1, sum(node.size * node.terms for node in nodes if isinstance(node, Affine)))
        return _COEFFICIENTS // max(node.size for node in nodes)

    def number(self, array: np.ndarray) -> Dyadic:
        """A float array in this folding's arithmetic."""
        return Dyadic.of(array) if self.exact else Dyadic(np.asarray(array, np.float64), 0)

    def parameter(self, index: int, name: str) -> Dyadic:
        """A tensor of a node."""
        if (index, name) not in self._read:
            tensor: Tensor = getattr(self.network.nodes[index], name)
            self._read[index, name] = self.number(tensor.detach().cpu().numpy())
        return self._read[index, name]

    def slopes(self, index: int) -> Dyadic:
        """An activation's slopes below zero, (size,)."""
        node = self.network.nodes[index]
        if isinstance(node, LeakyRelu):
            slope = self.parameter(index, "slope")
            return Dyadic(np.broadcast_to(slope.numbers, node.shape).reshape(-1), slope.exponent)
        return self.number(np.zeros(node.size))

    def relative(self, index: int) -> float:
        """The relative error of one product in pulling rows back through an affine node."""
        node = self.network.nodes[index]
        assert isinstance(node, Affine)
        if self.exact:
            return 2 * node.weight_error
        # A product takes part in a sum along the node, and its offset in one along all nodes.
        terms = max(node.terms, node.size) + len(self.network.nodes) + 8
        return 2 * node.weight_error + 2 * terms * _UNIT

    def underflow(self, sizes: Sizes) -> float:
        """What products too small for float64 may amount to, on the whole way back."""
        if self.exact:
            return 0.0
        nodes = self.network.nodes
        products = sum(node.terms * nodes[node.inputs[0]].size for node in nodes if isinstance(node, Affine))
        return 4 * _LEAST * products * (1 + max(float(v.max(initial=0.0)) for v in sizes.value.values()))

    def pull_back(self, target: int, rows: Dyadic, phases: Mapping[int, Phases], sizes: Sizes) -> Forms:
        """rows·(value of node ``target``) as forms over the input and the unstable neurons.

        Args:
            target: the node.
            rows: (R, size of the target).
            phases: of every activation before the target.
            sizes: of the nodes before the target, and of itself; needed where something is rounded.

        Raises:
            UnsupportedError: if errors are unbounded, since the sizes are.
        """
        count = len(rows.numbers)
        pending = {target: rows}
        forms = Forms({}, self.number(np.zeros(count)), self.number(np.full(count, self.underflow(sizes))))
        constant, error = forms.constant, forms.error

        def charge(a: Dyadic, size: np.ndarray, relative: float) -> None:
            nonlocal error
            if not np.isfinite(size).all():
                raise UnsupportedError("the bounds of the network's values are not finite")
            share = self.number(np.where(size > 0, np.maximum(_GENEROUS * relative * size, _LEAST), 0.0))
            error = error + Dyadic(np.abs(a.numbers) @ share.numbers, a.exponent + share.exponent)

        def give(index: int, a: Dyadic) -> None:
            if index in pending:
                a = pending[index] + a
                if not self.exact:
                    charge(a, sizes.value[index], _UNIT)
            pending[index] = a

        for index in range(target, -1, -1):
            if index not in pending:
                continue
            a, node = pending.pop(index), self.network.nodes[index]
            if isinstance(node, Affine) and (relative := self.relative(index)):
                charge(a, sizes.summed[index], relative)
            shaped = Dyadic(a.numbers.reshape(count, *node.shape), a.exponent)
            match node:
                case Input():
                    forms.terms[index] = a
                case Activation():
                    phase = phases[index]
                    forms.terms[index] = Dyadic(np.where(phase.unstable, a.numbers, 0), a.exponent)
                    active = Dyadic(np.where(phase.active, a.numbers, 0), a.exponent)
                    inactive = Dyadic(np.where(phase.inactive, a.numbers, 0), a.exponent)
                    folded = active + inactive * self.slopes(index)
                    if not self.exact:
                        charge(folded, sizes.value[node.inputs[0]], _UNIT)
                    give(node.inputs[0], folded)
                case Add():
                    for source in node.inputs:
                        give(source, a)
                case Reshape():
                    give(node.inputs[0], a)
                case Permute():
                    inverse = np.argsort(node.axes)
                    moved = shaped.numbers.transpose(0, *(axis + 1 for axis in inverse))
                    give(node.inputs[0], Dyadic(moved.reshape(count, -1), a.exponent))
                case Scale():
                    scale = self.parameter(index, "scale")
                    offset = self.parameter(index, "shift") - scale * self.parameter(index, "center")
                    constant = constant + _dot(shaped, offset)
                    scaled = shaped * scale
                    give(node.inputs[0], Dyadic(scaled.numbers.reshape(count, -1), scaled.exponent))
                case Linear() | Conv2d():
                    weight, bias = self.parameter(index, "weight"), self.parameter(index, "bias")
                    if isinstance(node, Conv2d):
                        bias = Dyadic(bias.numbers[:, None, None], bias.exponent)
                        pulled = _convolve_back(
                            node, weight.numbers, shaped.numbers, self.network.nodes[node.inputs[0]].shape
                        )
                    else:
                        pulled = shaped.numbers @ weight.numbers
                    constant = constant + _dot(shaped, bias)
                    give(node.inputs[0], Dyadic(pulled.reshape(count, -1), weight.exponent + a.exponent))
                case _:
                    raise UnsupportedError("has no affine form", place=f"node '{node.name}' ({node.op})")
        return Forms(forms.terms, constant, error)

    def neurons(self, phases: Mapping[int, Phases], sizes: Sizes) -> Iterator[tuple[int, np.ndarray, Forms]]:
        """The pre-activations of all unstable neurons, in chunks: activation, neurons (R,), their forms."""
        size = max(1, self._chunk)
        for index, phase in phases.items():
            node = self.network.nodes[index]
            chosen = np.flatnonzero(phase.unstable)
            for start in range(0, len(chosen), size):
                part = chosen[start : start + size]
                unit = np.zeros((len(part), node.size), dtype=object if self.exact else np.float64)
                unit[np.arange(len(part)), part] = 1
                yield index, part, self.pull_back(node.inputs[0], Dyadic(unit, 0), phases, sizes)


def _dot(rows: Dyadic, offset: Dyadic) -> Dyadic:
    """rows (R, *shape) times an offset broadcastable to the shape, (R,)."""
    count, *shape = rows.numbers.shape
    flat = np.broadcast_to(offset.numbers, shape).reshape(-1)
    return Dyadic(rows.numbers.reshape(count, -1) @ flat, rows.exponent + offset.exponent)


def _convolve_back(node: Conv2d, weight: np.ndarray, rows: np.ndarray, input_shape: Shape) -> np.ndarray:
    """The adjoint of a convolution on rows (R, *node shape), in any numbers; returns (R, *input_shape)."""
    count, out, height, width = rows.shape
    top, left, bottom, right = node.padding
    channels, full_height, full_width = input_shape[0], input_shape[1] + top + bottom, input_shape[2] + left + right
    full = np.zeros((count, channels, full_height, full_width), dtype=rows.dtype)
    per_out, per_in = out // node.groups, channels // node.groups
    for group in range(node.groups):
        kernel = weight[group * per_out : (group + 1) * per_out]
        part = rows[:, group * per_out : (group + 1) * per_out]
        into = full[:, group * per_in : (group + 1) * per_in]
        for u, v in np.ndindex(*weight.shape[2:]):
            first_row, first_column = u * node.dilation[0], v * node.dilation[1]
            into[
                :,
                :,
                first_row : first_row + node.stride[0] * (height - 1) + 1 : node.stride[0],
                first_column : first_column + node.stride[1] * (width - 1) + 1 : node.stride[1],
            ] += np.moveaxis(np.tensordot(part, kernel[:, :, u, v], axes=(1, 0)), -1, 1)
    return full[:, :, top : top + input_shape[1], left : left + input_shape[2]]


@dataclass(frozen=True, eq=False)
class Phases:
    """What bounds say of the neurons of one piecewise-linear activation; arrays are (size,).

    Attributes:
        lower: of the pre-activation.
        upper: likewise.
    """

    lower: np.ndarray
    upper: np.ndarray
    active: np.ndarray = field(init=False)
    inactive: np.ndarray = field(init=False)
    unstable: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        active = self.lower >= 0
        inactive = (self.upper <= 0) & ~active
        object.__setattr__(self, "active", active)
        object.__setattr__(self, "inactive", inactive)
        # NaN bounds prove nothing.
        object.__setattr__(self, "unstable", ~(active | inactive))


@dataclass(frozen=True, eq=False)
class Problem:
    """One query, ready for a solver.

    Attributes:
        phases: by activation node.
        sizes: of all values, empty where nothing is rounded.
        open: the polytopes that bounds do not exclude, the likeliest to be reached first.
        margin: a proven lower bound of the margin, −inf without bounds.
    """

    query: Query
    folding: Folding
    phases: dict[int, Phases]
    sizes: Sizes
    open: tuple[Polytope, ...]
    margin: float

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


def _bounded(
    folding: Folding, queries: Sequence[Query], stop: Callable[[], bool], roots: Roots = NONE
) -> list[Problem]:
    """Problems over CROWN bounds, or better ones that are known, in one batch."""
    network, properties = folding.network.to(torch.float64), [q.property for q in queries]
    with torch.no_grad():
        box = input_box(properties, network)
        found = relaxation(network, box, roots.known(queries, network, box.lower), stop=stop)
        pre, whole = found.pre, not stop()
        rows = RowBatch.of(properties, network.output_size)
        values = found.outputs(rows.matrix, rows.sample, stop=stop)
        values = torch.nextafter(values - rows.bound, values.new_full((), -torch.inf))
        sizes = _sizes(folding, box, pre)
        lower = roots.learn(queries, network, pre, rows, values, bounded=whole)
        count = sum(len(prop.unsafe) for prop in properties)
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
                {
                    i: Phases(b.lower[sample].flatten().numpy(), b.upper[sample].flatten().numpy())
                    for i, b in pre.items()
                },
                sizes[sample],
                tuple(query.property.unsafe[i] for i in order),
                float(min(margins, default=np.inf)),
            )
        )
    return problems


def _unbounded(folding: Folding, queries: Sequence[Query]) -> list[Problem]:
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
    *,
    exact: bool,
    bounds: bool,
) -> list[Outcome]:
    """A verifier's ``verify``: bounds in batches, then one solver call after the other.

    Args:
        name: the method.
        roots: what is known of the queries, to which bounds are added.
        solve: asked for every query that bounds don't decide.
        exact: the arithmetic in which the networks are folded.
        bounds: whether to compute bounds; without, every neuron is unstable.
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
                    problems = (
                        _bounded(folding, chosen, deadline(elapsed, allowance), roots)
                        if bounds
                        else _unbounded(folding, chosen)
                    )
                    share = elapsed() / len(part)
            except Exception as error:
                for index in part:
                    close(index, fault(error, name))
                continue
            for index, problem in zip(part, problems, strict=True):
                close(index, _solved(name, problem, solve, budget, index, {"bounds": share}))
    return [outcomes[i] for i in range(len(queries))]


def _solved(
    name: str, problem: Problem, solve: Solve, budget: Budget, index: int, seconds: dict[str, float]
) -> Outcome:
    known = {"margin": problem.margin if problem.margin > -np.inf else None, "unstable": problem.unstable}
    if not problem.open:
        detail = "decided by bounds alone"
        return Outcome(
            Verdict.UNSAT, Reason.PROVED, name, Trust.ROUNDED, problem.margin, None, detail, seconds, problem.unstable
        )
    allowance = budget.remaining(index)
    if allowance <= 0:
        return Outcome.unknown(Reason.TIMEOUT, name, "no time was left", seconds=seconds, **known)
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


def supervised(work: Callable[[], T], interrupt: Callable[[], None], seconds: float) -> T | None:
    """Run a solver call in a thread of its own, so that neither its clock nor its signals have to be trusted.

    A call that does not stop when told is left behind; the interpreter would wait for it before it exits, so the
    command does not leave that to it (``certify.leave``).

    Args:
        work: the call.
        interrupt: asks it to stop; called again and again until it does.
        seconds: when to ask.

    Returns:
        What ``work`` returned, or None if it has not stopped within a grace period after being asked.

    Raises:
        KeyboardInterrupt: on Ctrl-C, after the call has been asked to stop.
    """
    results: list[T] = []
    errors: list[BaseException] = []
    done = Event()

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()

    def stop() -> None:
        for _ in range(int(_GRACE / 0.02)):
            interrupt()
            if done.wait(0.02):
                return

    Thread(target=run).start()
    try:
        if not done.wait(None if seconds == np.inf else max(0.0, seconds)):
            stop()
            # Being stopped is an error to some solvers.
            return results[0] if results else None
    except BaseException:
        stop()
        raise
    if errors:
        raise errors[0]
    return results[0]
