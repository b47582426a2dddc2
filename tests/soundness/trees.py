"""Every leaf that branch and bound closes is proved once more in rational arithmetic, and the leaves make a tree.

The proof here shares no code and no formula with the library's: the network is evaluated forward on affine forms over
the inputs and the unstable neurons, exactly, and multipliers are put to the folded system itself, not to a relaxation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from verifiable_relu.network.graph import Activation, Conv2d, LeakyRelu, Linear, Network
from verifiable_relu.spec.property import Row
from verifiable_relu.verifiers.bab import Bab
from verifiable_relu.verifiers.bab.folding import Folded
from verifiable_relu.verifiers.bab.proof import Proofs
from verifiable_relu.verifiers.bab.strip import Strip
from verifiable_relu.verifiers.base import Budget, Outcome, Verdict

from .exact import ZERO, exact_values, rational
from .judge import Case, Report

ONE = Fraction(1)


@dataclass(frozen=True)
class Leaf:
    """What the library took for a proof: splits by neuron, multipliers, and the lower bound that it claims."""

    split: tuple[int, ...]
    w: tuple[float, ...]
    mu: tuple[float, ...]
    lower: float


@contextmanager
def recorded() -> Iterator[list[tuple[Proofs, Strip, list[Leaf]]]]:
    """All positive bounds of nodes that any tree is given meanwhile, by tree."""
    trees: list[tuple[Proofs, Strip, list[Leaf]]] = []
    init, lower = Proofs.__init__, Proofs.lower

    def watched_init(self: Proofs, strip: Strip) -> None:
        init(self, strip)
        trees.append((self, strip, []))

    def watched(self: Proofs, split: Tensor, columns: Tensor, w: Tensor, mu: Tensor) -> Tensor:
        found = lower(self, split, columns, w, mu)
        every = torch.zeros(split.shape, dtype=torch.float64)
        every[:, columns] = w.double()
        leaves = next(of for proofs, _, of in trees if proofs is self)
        for number in (found > 0).nonzero().flatten().tolist():
            leaves.append(
                Leaf(
                    tuple(split[number].tolist()),
                    tuple(every[number].tolist()),
                    tuple(mu[number].double().tolist()),
                    float(found[number]),
                )
            )
        return found

    with patch.object(Proofs, "__init__", watched_init), patch.object(Proofs, "lower", watched):
        yield trees


class System:
    """A network over the unstable neurons of a box, exactly.

    Forms are object arrays over (1, the inputs x, the values r of the unstable neurons).
    """

    def __init__(self, network: Network, folded: Folded) -> None:
        self.folded = folded
        size = network.input_size
        width = 1 + size + folded.size
        self.neurons: list[np.ndarray] = []
        center = [Fraction(float(v)) for v in folded.center]
        at_center = exact_values(network, center)
        places = [tuple(place) for place in folded.places.tolist()]
        forms: list[np.ndarray] = []
        for index, node in enumerate(network.nodes):
            inputs = [forms[i] for i in node.inputs]
            if not inputs:
                form = np.full((size, width), ZERO, dtype=object)
                form[np.arange(size), 1 + np.arange(size)] = ONE
            elif isinstance(node, Activation):
                slope = np.full(node.size, ZERO, dtype=object)
                if isinstance(node, LeakyRelu):
                    slope = rational(node.slope, node.shape).reshape(-1)
                form = inputs[0].copy()
                for i, z in enumerate(at_center[node.inputs[0]].reshape(-1)):
                    if (index, i) in places:
                        number = places.index((index, i))
                        assert number == len(self.neurons)
                        self.neurons.append(inputs[0][i])
                        form[i] = ZERO
                        form[i, 1 + size + number] = ONE
                    elif z < 0:
                        form[i] = slope[i] * form[i]
            else:
                form = _affine(network, index, inputs)
            forms.append(form)
        self.outputs = forms[-1]
        self.places = places
        self.network = network

    def rows(self, polytope: Sequence[Row]) -> list[np.ndarray]:
        """A·y − b of each row."""
        found = []
        for row in polytope:
            form = sum((c * self.outputs[i] for i, c in row.coefficients), start=0 * self.outputs[0])
            form = form.copy()
            form[0] -= row.bound
            found.append(form)
        return found

    def lower(self, objective: np.ndarray, slopes: Sequence[float], leaf: Leaf) -> Fraction:
        """The least value over the box that weak duality leaves to an objective, exactly.

        From the last neuron to the first, a_j·r_j is taken for y_j·z_j plus the least value of a_j·r_j − y_j·z_j over
        the ends of the phases that the leaf leaves, with y_j = w_j + t_j·a_j.
        """
        folded, size = self.folded, self.network.input_size
        form, total = objective.copy(), ZERO
        for j in reversed(range(folded.size)):
            a = form[1 + size + j]
            form[1 + size + j] = ZERO
            y = Fraction(leaf.w[j]) + Fraction(slopes[j]) * a
            form = form + y * self.neurons[j]
            low, high, slope = (Fraction(float(v[j])) for v in (folded.lower, folded.upper, folded.slope))
            ends = [(ZERO, ZERO)]
            if leaf.split[j] >= 0:
                ends.append((high, high))
            if leaf.split[j] <= 0:
                ends.append((low, slope * low))
            total += min(a * r - y * z for z, r in ends)
        total += form[0]
        for i in range(size):
            middle, reach = Fraction(float(folded.center[i])), Fraction(float(folded.radius[i]))
            total += form[1 + i] * middle - abs(form[1 + i]) * reach
        return total


def _affine(network: Network, index: int, inputs: list[np.ndarray]) -> np.ndarray:
    """An affine node on forms, by its exact values at zero and at unit vectors."""
    node = network.nodes[index]
    shapes = [network.nodes[i].shape for i in node.inputs]

    def value(*points: np.ndarray) -> np.ndarray:
        part = [p.reshape(shape) for p, shape in zip(points, shapes, strict=True)]
        return _apply(node, part).reshape(-1)

    zeros = [np.full(len(form), ZERO, dtype=object) for form in inputs]
    offset = value(*zeros)
    columns = inputs[0].shape[1]
    found = np.stack([value(*(form[:, k] for form in inputs)) - offset for k in range(columns)], axis=1)
    found[:, 0] += offset
    return found


def _apply(node: object, inputs: list[np.ndarray]) -> np.ndarray:
    from . import exact

    match node:
        case Linear():
            return exact._linear(node, inputs[0])
        case Conv2d():
            return exact._convolution(node, inputs[0])
    if hasattr(node, "center"):
        center, scale, shift = (rational(t, node.shape) for t in (node.center, node.scale, node.shift))
        return scale * (inputs[0] - center) + shift
    if hasattr(node, "axes"):
        return inputs[0].transpose(node.axes)
    return inputs[0] + inputs[1] if len(inputs) == 2 else inputs[0]


def covers(leaves: Sequence[tuple[int, ...]]) -> bool:
    """Whether every choice of phases agrees with some leaf."""
    todo = [(tuple(leaves), 0)]
    while todo:
        of, start = todo.pop()
        if not of:
            return False
        size = len(of[0])
        column = next((j for j in range(start, size) if any(leaf[j] for leaf in of)), None)
        if column is None:
            continue
        todo += [(tuple(leaf for leaf in of if leaf[column] != -side), column + 1) for side in (1, -1)]
    return True


def examine(case: Case, report: Report, *, seconds: float = 10.0, tight: float = 1e-5) -> Outcome:
    """Run branch and bound on a case and prove each of its leaves again.

    Args:
        case: of a piecewise-linear network.
        report: where problems are noted.
        seconds: for the case.
        tight: how far, relatively, a bound may be below the exact one, so that this test is not of nothing.
    """
    prop = case.query.property
    with recorded() as trees:
        (outcome,) = Bab().verify([case.query], Budget.each(seconds, 1))
    systems: dict[Folded, System] = {}
    for _, strip, leaves in trees:
        if strip.folded not in systems:
            systems[strip.folded] = System(case.query.network, strip.folded)
        system = systems[strip.folded]
        rows = _matched(system, prop.unsafe, strip)
        if rows is None:
            report.note(case.name, "a tree's rows are those of no polytope")
            continue
        for leaf in leaves:
            objective = sum(
                (Fraction(max(m, 0.0)) * row for m, row in zip(leaf.mu, rows[1:], strict=True)), start=rows[0]
            )
            exact = system.lower(objective, strip.slopes.tolist(), leaf)
            if not leaf.lower <= exact:
                report.note(
                    case.name, f"a leaf is said to be above {leaf.lower!r} and is proved above {float(exact)!r}"
                )
            if float(exact) - leaf.lower > tight * (1 + sum(abs(float(v)) for v in objective)):
                report.note(case.name, f"a leaf's bound {leaf.lower!r} is far below the exact {float(exact)!r}")
        proved = outcome.verdict is Verdict.UNSAT
        if proved and not covers([leaf.split for leaf in leaves]):
            report.note(case.name, "the leaves of a proof leave out some phases")
    return outcome


def _matched(system: System, unsafe: Sequence[Sequence[Row]], strip: Strip) -> list[np.ndarray] | None:
    """The exact forms of a tree's rows, scaled and in its order."""
    for polytope in unsafe:
        if len(polytope) != strip.rows.matrix.shape[0]:
            continue
        forms = system.rows(polytope)
        scaled = [form * _scale(row) for form, row in zip(forms, polytope, strict=True)]
        taken = []
        for number in range(len(polytope)):
            constant = float(strip.rows.constant[number])
            near = [i for i, form in enumerate(scaled) if abs(_constant(system, form, strip) - constant) < 1e-6]
            near = [i for i in near if i not in taken]
            if not near:
                break
            taken.append(near[0])
        else:
            return [scaled[i] for i in taken]
    return None


def _scale(row: Row) -> Fraction:
    import math

    return Fraction(math.lcm(*(c.denominator for _, c in row.coefficients)))


def _constant(system: System, form: np.ndarray, strip: Strip) -> float:
    """The constant of a form over (e, q) with the relaxation's slopes."""
    size = system.network.input_size
    form = form.copy()
    for j in reversed(range(system.folded.size)):
        a = form[1 + size + j]
        form[1 + size + j] = ZERO
        form = form + a * Fraction(float(strip.slopes[j])) * system.neurons[j]
    center = [Fraction(float(v)) for v in system.folded.center]
    return float(form[0] + sum((c * x for c, x in zip(form[1 : 1 + size], center, strict=True)), start=ZERO))
