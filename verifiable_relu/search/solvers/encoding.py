"""Exact affine forms of a piecewise-linear network over a box, and exact points of unsafe sets by means of them.

**Forms.** Rows go back from an op to the input, through affine maps and stable neurons alike, and end at unstable
neurons. A formula then has one equation for each unstable neuron and one row for each output constraint, whatever the
size of the network. Weights are dyadic rationals, so that integers with an exponent suffice. Where stored weights are
not those that the file means, a form is not what it stands for: with relative errors ε of W and errors δ of b, rows A
of y = W·x + b change by at most |A|·(ε·|W|·|x| + δ). Every form carries the sum of these over the box. A formula whose
rows are loosened by it has every solution that the network has.

**Points** of sets without interior: equalities of outputs, and sets that the outputs only touch. Floating-point numbers
miss such a set though a rational point of the box reaches it. Newton's method in float64 goes from any point to one
near the set. On the linear piece of the network there, the rows that are to be 0 are affine functions of the inputs,
whose equations are solved in rational arithmetic. Exact evaluation judges each point.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from verifiable_relu.dyadic import Dyadic
from verifiable_relu.errors import UnsupportedError
from verifiable_relu.ir.exact import evaluate_exact, is_evaluable, multiplications
from verifiable_relu.ir.interval import Interval
from verifiable_relu.ir.linear import Dense, LinearMap
from verifiable_relu.ir.network import Affine, Elementwise, Input, Network
from verifiable_relu.rounding import LEAST, OWN
from verifiable_relu.search.outcomes import Witness
from verifiable_relu.search.piecewise_linear import require_piecewise_linear, slopes_below, without_maxima
from verifiable_relu.spec.property import Polytope, Property

_CHUNK = 1 << 21  # Most multiplications in a row, so that the clock is looked at several times a second
# Heuristic
_STEPS, _SOLVED = 40, 4  # Steps of Newton's method in float64, and then in rational arithmetic
_NEGLIGIBLE = 1e-12  # Singular values below this share of the largest one count as 0
_MULTIPLICATIONS = 20_000_000  # The most multiplications of all exact evaluations for one polytope: about 3 s


@dataclass(frozen=True, eq=False)
class ExactForms:
    """Affine forms of the inputs x and the values r of unstable neurons, one per row."""

    coefficients: Dyadic  # (rows, inputs + unstable neurons), the latter in the order of ``ExactEncoding.places``
    constant: Dyadic  # (rows,)
    error: Dyadic  # (rows,), how far each form is from what it stands for, at most


def phases_of(network: Network, intervals: Mapping[int, Interval]) -> dict[int, np.ndarray]:
    """Return by elementwise op the phases (size,) of its neurons: 1 active, −1 inactive, 0 unstable or not known."""
    found = {}
    for index in network.activations:
        x = intervals[network.ops[index].inputs[0]]
        found[index] = np.where(x.lower[0].numpy() >= 0, 1, np.where(x.upper[0].numpy() <= 0, -1, 0))
    return found


class ExactEncoding:
    """A piecewise-linear network without maxima, as exact affine forms, given ``phases`` as of ``phases_of``.

    ``bounds`` returns the interval of an op's value over the box, (1, size), by its number; it is needed where stored
    weights are not those that the file means.
    """

    def __init__(
        self, network: Network, phases: Mapping[int, np.ndarray], bounds: Callable[[int], Interval] | None = None
    ) -> None:
        require_piecewise_linear(network)
        self.network, self._phases, self._bounds = network, phases, bounds
        self._unstable = {index: np.flatnonzero(phase == 0) for index, phase in phases.items()}
        # The elementwise op of each unstable neuron, and its number there
        self.places = [(index, int(j)) for index, chosen in self._unstable.items() for j in chosen]
        functions = {index: op.function for index in phases if isinstance(op := network.ops[index], Elementwise)}
        below = {i: slopes_below(f, network.ops[i].size).numpy() for i, f in functions.items()}
        self._below = {i: Dyadic.from_floats(slope) for i, slope in below.items()}
        slopes = [Dyadic(s.numbers[self._unstable[i]], s.exponent) for i, s in self._below.items()]
        self.slopes = _joined(_zeros(0), *slopes)

    def neurons(self) -> Iterator[tuple[int, ExactForms]]:
        """Yield the pre-activations of all unstable neurons in chunks: the first one's number, and forms."""
        products = sum(op.size * op.map.terms for op in self.network.ops if isinstance(op, Affine))
        size, start = max(1, _CHUNK // max(1, products)), 0
        for index, chosen in self._unstable.items():
            source = self.network.ops[index].inputs[0]
            for part in (chosen[first : first + size] for first in range(0, len(chosen), size)):
                unit = np.zeros((len(part), self.network.ops[source].size), dtype=object)
                unit[np.arange(len(part)), part] = 1
                yield start, self.forms(source, Dyadic(unit, 0))
                start += len(part)

    def forms(self, target: int, rows: Dyadic) -> ExactForms:
        """Return rows (rows, size) of the value of an op as forms of inputs and unstable neurons."""
        count, pending = len(rows.numbers), {target: rows}
        constant, error, inputs = _zeros(count), _zeros(count), _zeros(count, self.network.input_size)
        kept = {i: _zeros(count, len(chosen)) for i, chosen in self._unstable.items()}
        for index in sorted(range(target + 1), reverse=True):
            if index not in pending:
                continue
            op, a = self.network.ops[index], pending.pop(index)
            if isinstance(op, Input):
                inputs = a
            elif isinstance(op, Elementwise):
                kept[index] = Dyadic(a.numbers[:, self._unstable[index]], a.exponent)
                up, down = (Dyadic(np.where(self._phases[index] == s, a.numbers, 0), a.exponent) for s in (1, -1))
                a = up + down * self._below[index]
            elif isinstance(op, Affine):
                if op.bias is not None:
                    bias = Dyadic.from_floats(op.bias.detach().cpu().double().numpy())
                    constant = constant + Dyadic(a.numbers @ bias.numbers, a.exponent + bias.exponent)
                if not op.is_exact:
                    off = Dyadic.from_floats(self._off(op))
                    error = error + Dyadic(np.abs(a.numbers) @ off.numbers, a.exponent + off.exponent)
                a = _transposed(op.map, a)
            for source in op.inputs:
                pending[source] = pending[source] + a if source in pending else a
        return ExactForms(_joined(inputs, *kept.values()), constant, error)

    def _off(self, op: Affine) -> np.ndarray:
        """Return at least ε·|W|·|x| + δ, (size,)."""
        assert self._bounds is not None
        x = self._bounds(op.inputs[0])
        size = op.map.abs_apply(torch.maximum(x.lower.abs(), x.upper.abs()))[0]
        off = OWN * 2 * op.weight_error * size + 2 * LEAST
        # What underflows in the products is no more than is added, however large the rows are.
        found: np.ndarray = (off if op.bias_error is None else off + OWN * op.bias_error.to(off)).numpy()
        if not np.isfinite(found).all():
            raise UnsupportedError("the bounds of the network's values are not finite", place=op.place)
        return found


def _transposed(linear: LinearMap, a: Dyadic) -> Dyadic:
    """Return Wᵀ·a of rows a (rows, n_out)."""
    terms = max(1, linear.back_terms)
    if isinstance(linear, Dense):

        def dense(digits: np.ndarray, rows: np.ndarray) -> np.ndarray:
            return np.matmul(rows.reshape(len(rows), linear.copies, -1), digits).reshape(len(rows), -1)

        return a.weighed(linear.weight.detach().cpu().double().numpy(), terms, dense)
    # Attacks start without it.
    from scipy import sparse

    row, column, weight = ((x.double() if x.is_floating_point() else x).numpy() for x in linear.entries())

    def product(digits: np.ndarray, rows: np.ndarray) -> np.ndarray:
        found: np.ndarray = rows @ sparse.csr_array((digits, (row, column)), (linear.n_out, linear.n_in))
        return found

    return a.weighed(weight, terms, product)


def _zeros(*shape: int) -> Dyadic:
    return Dyadic(np.zeros(shape, dtype=object), 0)


def _joined(*parts: Dyadic) -> Dyadic:
    least = min(part.exponent for part in parts)
    return Dyadic(np.concatenate([part.at(least) for part in parts], -1), least)


def equalities(polytope: Polytope) -> np.ndarray:
    """Return for each row whether its opposite is a row of the polytope, too, which then has no interior."""
    rows = [row.canonical() for row in polytope]
    keys = {(row.coefficients, row.bound) for row in rows}
    return np.array([(tuple((i, -c) for i, c in row.coefficients), -row.bound) in keys for row in rows], dtype=bool)


def exact_point(network: Network, prop: Property, start: np.ndarray) -> Witness | None:
    """Search near a point (inputs,) for a point of the box whose exact outputs lie on the unsafe set's boundary.

    Returns None where rational arithmetic cannot evaluate the network.
    """
    if not (is_evaluable(network) and network.piecewise_linear) or prop.ball is not None:
        return None
    cost = multiplications(network)
    for polytope in prop.unsafe:
        rows = min(len(polytope), network.input_size) + 1
        if polytope and _SOLVED * rows * cost <= _MULTIPLICATIONS:
            # Numbers may be beyond float64.
            with suppress(OverflowError):
                if (found := _Solving(network, prop, polytope).point(start)) is not None:
                    return found
    return None


class _Solving:
    """The search for a point of one polytope."""

    def __init__(self, network: Network, prop: Property, polytope: Polytope) -> None:
        self._network, self._prop, self._polytope = network, prop, polytope
        self._pieces, _ = without_maxima(network)
        self._equal = equalities(polytope)
        self._matrix = torch.zeros(len(polytope), network.output_size, dtype=torch.float64)
        for number, i, c in ((number, *entry) for number, row in enumerate(polytope) for entry in row.coefficients):
            self._matrix[number, i] = float(c)
        self._bound = torch.tensor([float(row.bound) for row in polytope], dtype=torch.float64)

    def point(self, start: np.ndarray) -> Witness | None:
        box = self._prop.box
        x = box.witness(self._approached(start))
        for _ in range(_SOLVED):
            for point in (x, solved := self._solved(x)):
                if box.contains(point) and self._prop.violated(evaluate_exact(self._network, point)):
                    return point
            x = box.witness(np.array([float(v) for v in solved]))
        return None

    def _slacks(self, x: Tensor) -> Tensor:
        return self._matrix @ self._network(x[None])[0] - self._bound

    def _approached(self, start: np.ndarray) -> np.ndarray:
        """Return a point near the polytope, by damped Newton steps of least norm in units of the box's widths."""
        lower, upper = self._prop.box.lower, self._prop.box.upper

        def missing(x: np.ndarray) -> np.ndarray:
            # Any value of an equality, and a positive one of other rows, keeps a point from the polytope.
            with torch.no_grad():
                found = self._slacks(torch.from_numpy(x)).numpy()
            return np.where(self._equal, found, found.clip(min=0))

        x = np.clip(start, lower, upper)
        away = missing(x)
        for _ in range(_STEPS):
            derivatives = torch.autograd.functional.jacobian(self._slacks, torch.from_numpy(x)).numpy()[away != 0]
            inward = self._inward(x)
            step = inward * np.linalg.lstsq(derivatives * inward, -away[away != 0], rcond=_NEGLIGIBLE)[0]
            tried = (np.clip(x + share * step, lower, upper) for share in 0.5 ** np.arange(8))
            nearer = next((moved for moved in tried if np.abs(missing(moved)).max() < np.abs(away).max()), None)
            if nearer is None:
                break
            x, away = nearer, missing(nearer)
        return x

    def _inward(self, x: np.ndarray) -> np.ndarray:
        lower, upper = self._prop.box.lower, self._prop.box.upper
        return np.minimum(x - lower, upper - x) + 1e-3 * (upper - lower)

    def _solved(self, x: Witness) -> Witness:
        """Return the point of the linear piece at x where rows are 0: equalities, and those that are not fulfilled."""
        near, box = np.array([float(v) for v in x]), self._prop.box
        y, gradients = self._piece(x, near)
        # The ends of a decimal number as floats differ though it is one point.
        varies = np.array([low < high for low, high in map(box.bounds, range(len(x)))])
        room, moves = self._inward(near) * varies, np.zeros(len(x), dtype=object)
        pivots: dict[int, np.ndarray] = {}
        for row, equal in zip(self._polytope, self._equal, strict=True):
            if not row.coefficients or (not equal and row.slack(y) <= 0):
                continue
            # Gaussian elimination: the row's derivatives and what it misses, without inputs that others determine.
            line = np.array([*sum(c * gradients[i] for i, c in row.coefficients), -row.slack(y)], dtype=object)
            for j, other in pivots.items():
                line = line - line[j] * other
            weights = np.abs(line[:-1].astype(np.float64)) * room
            if weights.any():
                j = int(weights.argmax())
                pivots = {k: other - other[j] * line / line[j] for k, other in pivots.items()} | {j: line / line[j]}
        for j, line in pivots.items():
            moves[j] = line[-1]
        return tuple(Fraction(value) for value in np.array(x, dtype=object) + moves)

    def _piece(self, x: Witness, near: np.ndarray) -> tuple[list[Fraction], dict[int, np.ndarray]]:
        """Return the outputs that rows name, and their derivatives, at a point of the linear piece at a float point."""
        net = self._pieces
        values = net.values(torch.from_numpy(near)[None])
        phases = {i: np.where(values[net.ops[i].inputs[0]][0].detach().numpy() >= 0, 1, -1) for i in net.activations}
        used = sorted({i for row in self._polytope for i, _ in row.coefficients})
        unit = np.zeros((len(used), net.output_size), dtype=object)
        unit[np.arange(len(used)), used] = 1
        forms = ExactEncoding(net, phases).forms(len(net.ops) - 1, Dyadic(unit, 0))
        gradients, offsets = (f.numbers * Fraction(2) ** f.exponent for f in (forms.coefficients, forms.constant))
        y = [Fraction(0)] * net.output_size
        for i, value in zip(used, gradients @ np.array(x, dtype=object) + offsets, strict=True):
            y[i] = value
        return y, dict(zip(used, gradients, strict=True))
