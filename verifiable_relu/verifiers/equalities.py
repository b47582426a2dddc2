"""Exact points of unsafe sets without interior: equalities of outputs, and sets that the outputs only touch.

Floating-point numbers miss such a set though a rational point of the box reaches it. Newton's method in float64 goes
from any point to one near the set. On the linear piece of the network there, the rows that are to be 0 are affine
functions of a few inputs; their values at as many further points of the piece, in rational arithmetic, give the
solution of their equations exactly. Nothing here is believed: exact evaluation judges each point that is returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import torch

from verifiable_relu.network.graph import Network
from verifiable_relu.spec.property import Polytope, Property, Row
from verifiable_relu.trust.exact import evaluable, evaluate_exact, multiplications

Point = tuple[Fraction, ...]
Matrix = list[list[Fraction]]

_STEPS = 40
"""Heuristic: the steps of Newton's method in float64."""

_SOLVED = 4
"""Heuristic: how often the equations are solved in rational arithmetic, each time from the solution before."""

_MULTIPLICATIONS = 20_000_000
"""Heuristic: the most multiplications of all exact evaluations for one polytope: about 3 s."""

_RANK = 1e-12
"""Heuristic: singular values below this part of the largest one count as zero in a step of Newton's method."""

_PIVOT = 1e-9
"""Heuristic: pivots below this part of the largest number are taken for rounding."""

_SMALL = Fraction(1, 1 << 24)
"""Heuristic: how far the further points are from the first, as a part of an input's width."""


def is_thin(polytope: Polytope) -> bool:
    """Return True if some row and its negative are rows of the polytope, so that it has no interior."""
    return any(_opposite(row) in _keys(polytope) for row in polytope)


def exact_point(network: Network, prop: Property, start: np.ndarray) -> Point | None:
    """Look for a point of the box whose exact outputs lie in the unsafe set, on its boundary.

    Args:
        network: any network; there is no point where rational arithmetic does not evaluate it.
        prop: the property.
        start: (input_size,), a point in or near the box.
    """
    if not (evaluable(network) and network.piecewise_linear) or prop.ball is not None:
        return None
    for polytope in prop.unsafe:
        rows = min(len(polytope), network.input_size) + 1
        if polytope and _SOLVED * rows * multiplications(network) <= _MULTIPLICATIONS:
            found = _Search(network, prop, polytope).solve(start)
            if found is not None:
                return found
    return None


def _keys(polytope: Polytope) -> set[tuple[object, Fraction]]:
    return {(row.canonical().coefficients, row.canonical().bound) for row in polytope}


def _opposite(row: Row) -> tuple[object, Fraction]:
    same = row.canonical()
    return tuple((i, -c) for i, c in same.coefficients), -same.bound


class _Search:
    """The search for a point of one polytope.

    Args:
        network: piecewise linear.
        prop: the property.
        polytope: of its unsafe set, with one row at least.
    """

    def __init__(self, network: Network, prop: Property, polytope: Polytope) -> None:
        self._network, self._prop, self._polytope = network, prop, polytope
        self._net = network.to(torch.float64)
        self._matrix = torch.zeros(len(polytope), network.output_size, dtype=torch.float64)
        for number, row in enumerate(polytope):
            for i, c in row.coefficients:
                self._matrix[number, i] = float(c)
        self._bound = torch.tensor([float(row.bound) for row in polytope], dtype=torch.float64)
        self._lower, self._upper = np.asarray(prop.box.lower), np.asarray(prop.box.upper)
        # The ends of a decimal number as floats differ though it is one point.
        ends = (prop.box.bounds(i) for i in range(network.input_size))
        self._varies = np.array([low < high for low, high in ends])
        keys = _keys(polytope)
        self._equal = np.array([_opposite(row) in keys for row in polytope])

    def solve(self, start: np.ndarray) -> Point | None:
        x = self._prop.box.witness(self._approach(np.clip(start, self._lower, self._upper)))
        for _ in range(_SOLVED):
            y = evaluate_exact(self._network, x)
            if self._prop.box.contains(x) and self._prop.violated(y):
                return x
            moved = self._solved(x, y)
            if moved is None:
                return None
            if self._prop.box.contains(moved) and self._prop.violated(evaluate_exact(self._network, moved)):
                return moved
            x = self._prop.box.witness(np.array([float(v) for v in moved]))
        return None

    def _slacks(self, x: np.ndarray, derivatives: bool) -> tuple[np.ndarray, np.ndarray]:
        """The rows' values A·y − b at a point, and their derivatives by the inputs where they are wanted."""
        point = torch.from_numpy(x).reshape(1, *self._network.input_shape).requires_grad_(derivatives)
        with torch.set_grad_enabled(derivatives):
            values = self._matrix @ self._net(point).flatten() - self._bound
        if not derivatives:
            return values.numpy(), np.zeros(0)
        parts = [torch.autograd.grad(v, point, retain_graph=True, materialize_grads=True)[0].flatten() for v in values]
        return values.detach().numpy(), torch.stack(parts).numpy()

    def _missing(self, slacks: np.ndarray) -> np.ndarray:
        """How far each row is from where it is to be: 0, or at most 0."""
        found: np.ndarray = np.where(self._equal, slacks, np.maximum(slacks, 0))
        return found

    def _approach(self, x: np.ndarray) -> np.ndarray:
        """A point near the polytope by damped steps of Newton's method, each the least that does, in widths."""
        slacks, derivatives = self._slacks(x, True)
        for _ in range(_STEPS):
            missing = self._missing(slacks)
            if not missing.any():
                break
            inward = np.minimum(x - self._lower, self._upper - x) + 1e-3 * (self._upper - self._lower)
            chosen = missing != 0
            step = inward * np.linalg.lstsq(derivatives[chosen] * inward, -missing[chosen], rcond=_RANK)[0]
            for share in 0.5 ** np.arange(8):
                moved = np.clip(x + share * step, self._lower, self._upper)
                after = self._missing(self._slacks(moved, False)[0])
                if np.abs(after).max() < np.abs(missing).max():
                    break
            else:
                return x
            x = moved
            slacks, derivatives = self._slacks(x, True)
        return x

    def _solved(self, x: Point, y: Sequence[Fraction]) -> Point | None:
        """The point of the piece of ``x`` at which the rows that are to be 0 are, moved along as few inputs as do."""
        near = np.array([float(v) for v in x])
        _, derivatives = self._slacks(near, True)
        values = [row.slack(y) for row in self._polytope]
        rows = [i for i, (value, equal) in enumerate(zip(values, self._equal, strict=True)) if equal or value > 0]
        width = self._upper - self._lower
        inward = np.minimum(near - self._lower, self._upper - near) + 1e-3 * width
        weights = derivatives[rows] * np.where(self._varies, inward, 0.0)
        chosen = _pivots(weights)
        if not chosen:
            return None
        kept, inputs = [rows[i] for i, _ in chosen], [j for _, j in chosen]
        columns = []
        for j in inputs:
            low, high = self._prop.box.bounds(j)
            small = _SMALL * (high - low) * (1 if 2 * x[j] < low + high else -1)
            beside = evaluate_exact(self._network, (*x[:j], x[j] + small, *x[j + 1 :]))
            columns.append([(self._polytope[i].slack(beside) - values[i]) / small for i in kept])
        moves = linear_solution([list(row) for row in zip(*columns, strict=True)], [-values[i] for i in kept])
        if moves is None:
            return None
        by_input = dict(zip(inputs, moves, strict=True))
        return tuple(v + by_input.get(i, 0) for i, v in enumerate(x))


def _pivots(weights: np.ndarray) -> list[tuple[int, int]]:
    """Rows and columns of the pivots of Gaussian elimination, the largest first, without those that are rounding."""
    left = weights.copy()
    found: list[tuple[int, int]] = []
    least = _PIVOT * np.abs(weights).max(initial=0.0)
    while left.size and np.abs(left).max() > least and len(found) < min(left.shape):
        i, j = (int(k) for k in np.unravel_index(np.abs(left).argmax(), left.shape))
        found.append((i, j))
        left = left - np.outer(left[:, j], left[i] / left[i, j])
    return found


def linear_solution(matrix: Matrix, right: list[Fraction]) -> list[Fraction] | None:
    """The solution of a square system by Gaussian elimination; None if there is none, or more than one."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for k in range(len(rows)):
        pivot = next((i for i in range(k, len(rows)) if rows[i][k]), None)
        if pivot is None:
            return None
        rows[k], rows[pivot] = rows[pivot], rows[k]
        for i in range(len(rows)):
            if i != k and rows[i][k]:
                factor = rows[i][k] / rows[k][k]
                rows[i] = [a - factor * b for a, b in zip(rows[i], rows[k], strict=True)]
    return [row[-1] / row[k] for k, row in enumerate(rows)]
