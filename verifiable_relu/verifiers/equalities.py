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
from verifiable_relu.network.graph import Network
from verifiable_relu.spec.property import Polytope, Property
from verifiable_relu.trust.exact import evaluable, evaluate_exact, multiplications
from verifiable_relu.verifiers.encoding import ExactEncoding

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
    """Look from a point (input_size,) for one of the box whose exact outputs lie in the unsafe set, on its boundary.

    There is none where rational arithmetic does not evaluate the network.
    """
    if not (evaluable(network) and network.piecewise_linear) or prop.ball is not None:
        return None
    for polytope in prop.unsafe:
        rows = min(len(polytope), network.input_size) + 1
        if polytope and _SOLVED * rows * multiplications(network) <= _MULTIPLICATIONS:
            # Numbers may be beyond float64.
            with suppress(OverflowError):
                if (found := _exact_point(network, prop, polytope, start)) is not None:
                    return found
    return None


def _exact_point(network: Network, prop: Property, polytope: Polytope, start: np.ndarray) -> Point | None:
    x = prop.box.witness(_approached(network, prop, polytope, start))
    for _ in range(_SOLVED):
        for point in (x, solved := _solved(network, prop, polytope, x)):
            if prop.box.contains(point) and prop.violated(evaluate_exact(network, point)):
                return point
        x = prop.box.witness(np.array([float(v) for v in solved]))
    return None


def _approached(network: Network, prop: Property, polytope: Polytope, start: np.ndarray) -> np.ndarray:
    """Return a point near a polytope, by damped steps of Newton's method, each the least that does, in widths."""
    net, equal = network.to(torch.float64), equalities(polytope)
    matrix = torch.zeros(len(polytope), network.output_size, dtype=torch.float64)
    for number, row in enumerate(polytope):
        for i, c in row.coefficients:
            matrix[number, i] = float(c)
    bound = torch.tensor([float(row.bound) for row in polytope], dtype=torch.float64)

    def slacks(x: Tensor) -> Tensor:
        return matrix @ net(x.reshape(1, *network.input_shape)).flatten() - bound

    def missing(x: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            found = slacks(torch.from_numpy(x)).numpy()
        found[~equal] = found[~equal].clip(min=0)
        return found

    lower, upper = prop.box.lower, prop.box.upper
    x = np.clip(start, lower, upper)
    away = missing(x)
    for _ in range(_STEPS):
        derivatives = torch.autograd.functional.jacobian(slacks, torch.from_numpy(x)).numpy()[away != 0]
        inward = _inward(prop, x)
        step = inward * np.linalg.lstsq(derivatives * inward, -away[away != 0], rcond=_NEGLIGIBLE)[0]
        tried = (np.clip(x + share * step, lower, upper) for share in 0.5 ** np.arange(8))
        nearer = next((moved for moved in tried if np.abs(missing(moved)).max() < np.abs(away).max()), None)
        if nearer is None:
            break
        x, away = nearer, missing(nearer)
    return x


def _inward(prop: Property, x: np.ndarray) -> np.ndarray:
    """Return how far inputs may move at a point, nearly."""
    lower, upper = prop.box.lower, prop.box.upper
    return np.minimum(x - lower, upper - x) + 1e-3 * (upper - lower)


def _solved(network: Network, prop: Property, polytope: Polytope, x: Point) -> Point:
    """Return the point of the linear piece at x where rows are 0: equalities, and those that are not fulfilled."""
    near = np.array([float(v) for v in x])
    with torch.no_grad():
        values = network.to(torch.float64).values(torch.from_numpy(near).reshape(1, *network.input_shape))
    phases = {i: np.where(values[network.nodes[i].inputs[0]].flatten() >= 0, 1, -1) for i in network.activations}
    used = sorted({i for row in polytope for i, _ in row.coefficients})
    unit = np.zeros((len(used), network.output_size), dtype=object)
    unit[np.arange(len(used)), used] = 1
    outputs = ExactEncoding(network, phases).pull_back(len(network.nodes) - 1, Dyadic(unit, 0))
    gradients, offsets = (f.numbers * Fraction(2) ** f.exponent for f in (outputs.terms[0], outputs.constant))
    derivatives, y = dict(zip(used, gradients, strict=True)), [Fraction(0)] * network.output_size
    for i, value in zip(used, gradients @ np.array(x, dtype=object) + offsets, strict=True):
        y[i] = value
    # The ends of a decimal number as floats differ though it is one point.
    varies = np.array([low < high for low, high in map(prop.box.bounds, range(len(x)))])
    room, moves = _inward(prop, near) * varies, np.zeros(len(x), dtype=object)
    pivots: dict[int, np.ndarray] = {}
    for row, equal in zip(polytope, equalities(polytope), strict=True):
        if not row.coefficients or (not equal and row.slack(y) <= 0):
            continue
        # Gaussian elimination: the row's derivatives, and what is missing, without the inputs that others determine.
        line = np.array([*sum(c * derivatives[i] for i, c in row.coefficients), -row.slack(y)], dtype=object)
        for j, other in pivots.items():
            line = line - line[j] * other
        weights = np.abs(line[:-1].astype(np.float64)) * room
        if weights.any():
            j = int(weights.argmax())
            pivots = {k: other - other[j] * line / line[j] for k, other in pivots.items()} | {j: line / line[j]}
    for j, line in pivots.items():
        moves[j] = line[-1]
    return tuple(Fraction(value) for value in np.array(x, dtype=object) + moves)
