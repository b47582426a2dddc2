"""Exact points of unsafe sets without interior: equalities of outputs, and sets that the outputs only touch.

Floating-point numbers miss such a set though a rational point of the box reaches it. Newton's method in float64 goes
from any point to one near the set. On the linear piece of the network there, the rows that are to be 0 are affine
functions of the inputs, whose equations are solved in rational arithmetic. Exact evaluation judges each point.
"""

from __future__ import annotations

from contextlib import suppress
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from verifiable_relu.dyadic import Dyadic
from verifiable_relu.ir.exact import evaluate_exact, is_evaluable, multiplications
from verifiable_relu.ir.network import Network
from verifiable_relu.search.bab.tournament import without_maxima
from verifiable_relu.search.solvers.encoding import ExactEncoding
from verifiable_relu.spec.property import Polytope, Property

Point = tuple[Fraction, ...]

_STEPS, _SOLVED = 40, 4
"""Heuristic: the steps of Newton's method in float64, and then in rational arithmetic."""

_NEGLIGIBLE = 1e-12
"""Heuristic: singular values below this share of the largest one count as 0."""

_MULTIPLICATIONS = 20_000_000
"""Heuristic: the most multiplications of all exact evaluations for one polytope: about 3 s."""


def equalities(polytope: Polytope) -> np.ndarray:
    """Return for each row whether its opposite is a row of the polytope, too, which then has no interior."""
    rows = [row.canonical() for row in polytope]
    keys = {(row.coefficients, row.bound) for row in rows}
    return np.array([(tuple((i, -c) for i, c in row.coefficients), -row.bound) in keys for row in rows], dtype=bool)


def exact_point(network: Network, prop: Property, start: np.ndarray) -> Point | None:
    """Look from a point (inputs,) for one of the box whose exact outputs lie in the unsafe set, on its boundary.

    There is none where rational arithmetic does not evaluate the network.
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

    def point(self, start: np.ndarray) -> Point | None:
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

    def _missing(self, x: np.ndarray) -> np.ndarray:
        """What keeps a point from the polytope, row by row: any value of an equality, a positive one of others."""
        with torch.no_grad():
            found = self._slacks(torch.from_numpy(x)).numpy()
        return np.where(self._equal, found, found.clip(min=0))

    def _approached(self, start: np.ndarray) -> np.ndarray:
        """Return a point near the polytope, by damped steps of Newton's method, each the least that does, in widths."""
        lower, upper = self._prop.box.lower, self._prop.box.upper
        x = np.clip(start, lower, upper)
        away = self._missing(x)
        for _ in range(_STEPS):
            derivatives = torch.autograd.functional.jacobian(self._slacks, torch.from_numpy(x)).numpy()[away != 0]
            inward = self._inward(x)
            step = inward * np.linalg.lstsq(derivatives * inward, -away[away != 0], rcond=_NEGLIGIBLE)[0]
            tried = (np.clip(x + share * step, lower, upper) for share in 0.5 ** np.arange(8))
            nearer = next((moved for moved in tried if np.abs(self._missing(moved)).max() < np.abs(away).max()), None)
            if nearer is None:
                break
            x, away = nearer, self._missing(nearer)
        return x

    def _inward(self, x: np.ndarray) -> np.ndarray:
        """Return how far inputs may move at a point, nearly."""
        lower, upper = self._prop.box.lower, self._prop.box.upper
        return np.minimum(x - lower, upper - x) + 1e-3 * (upper - lower)

    def _solved(self, x: Point) -> Point:
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

    def _piece(self, x: Point, near: np.ndarray) -> tuple[list[Fraction], dict[int, np.ndarray]]:
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
