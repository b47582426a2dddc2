"""Every leaf that branch and bound closes is proved once more in rational arithmetic, and the leaves make a tree.

The proof here shares no code and no formula with the library's: affine forms over the inputs and the unstable neurons
go forward through the network exactly, and multipliers are put to these forms, not to a relaxation of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from tests.support import nets
from tests.support.asking import claims
from tests.support.exact import ZERO, exact_values, node_value, rational
from verifiable_relu.bounds import Ascent
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Activation, Input, LeakyRelu
from verifiable_relu.spec.property import Box, Polytope, Property, Query, Row
from verifiable_relu.verifiers.bab import Bab
from verifiable_relu.verifiers.bab.folded import Folded
from verifiable_relu.verifiers.bab.proof import Proofs
from verifiable_relu.verifiers.bab.refine import Refinement
from verifiable_relu.verifiers.bab.search import Schedule
from verifiable_relu.verifiers.bab.slopes import HullCuts
from verifiable_relu.verifiers.bab.strip import TreeRelaxation
from verifiable_relu.verifiers.bab.tree import Branching
from verifiable_relu.verifiers.base import Outcome, Verdict

from .judge import Case, Report, judge
from .kinds import boundary_cases

TIGHT = 1e-6
"""How far below the exact bound a leaf's may be, relative to the sizes of what is summed."""


OVER = Bab(intermediate=Ascent(steps=0), rounds=Schedule(refinement=None, first=1e4, still=1.0))
"""Branch and bound that tries planes over neurons early, over loose bounds."""

REFINING = Bab(intermediate=Ascent(steps=0), rounds=Schedule(Refinement(leaves=4), first=0, patience=0, gain=1.0))
"""Branch and bound that refines the bounds of neurons, and loose ones, before it searches for long."""

LOOKING = Bab(search=Branching(steps=1, choices=3), rounds=Schedule(None))
"""Branch and bound that bounds the children of a node by each of several neurons before it splits the node."""


@dataclass(frozen=True)
class Leaf:
    """What the library took for a proof: the side of each neuron, multipliers, and the lower bound of an objective.

    ``v`` is empty, or zero for neurons without planes.
    """

    split: tuple[int, ...]
    w: tuple[float, ...]
    mu: tuple[float, ...]
    lower: float
    objective: int = 0
    v: tuple[float, ...] = ()


@dataclass(frozen=True)
class Recorded:
    """The trees of one relaxation: all nodes that were found to have a positive bound.

    Where there are several objectives, these are sides of intervals that are refined, and every bound is used.
    """

    proofs: Proofs
    strip: TreeRelaxation
    objectives: int
    leaves: list[Leaf] = field(default_factory=list)


@contextmanager
def recorded() -> Iterator[list[Recorded]]:
    """The trees that are searched meanwhile."""
    trees: list[Recorded] = []
    init, lower = Proofs.__init__, Proofs.lower

    def watched_init(self: Proofs, strip: TreeRelaxation, objectives: int = 1) -> None:
        init(self, strip, objectives)
        trees.append(Recorded(self, strip, objectives))

    def tree_of(proofs: Proofs) -> Recorded:
        return next(tree for tree in trees if tree.proofs is proofs)

    def watched(
        self: Proofs,
        split: Tensor,
        columns: Tensor,
        w: Tensor,
        mu: Tensor,
        objective: Tensor | None = None,
        v: Tensor | None = None,
    ) -> Tensor:
        found = lower(self, split, columns, w, mu, objective, v)
        every, values = torch.zeros(2, *split.shape, dtype=torch.float64)
        every[:, columns] = w.double()
        if v is not None:
            values[:, columns[tree_of(self).strip.over[columns]]] = v.double()
        tree = tree_of(self)
        which = torch.zeros(len(found), dtype=torch.long) if objective is None else objective
        for i in (found > (0 if tree.objectives == 1 else -torch.inf)).nonzero().flatten().tolist():
            parts = (tuple(t[i].tolist()) for t in (split, every, mu.double()))
            tree.leaves.append(Leaf(*parts, float(found[i]), int(which[i]), tuple(values[i].tolist())))
        return found

    with patch.object(Proofs, "__init__", watched_init), patch.object(Proofs, "lower", watched):
        yield trees


class System:
    """The exact forms of a network's nodes over a box; its unstable neurons are variables of their own.

    A form is an object array of coefficients of 1, of the inputs x, and of the values r of the unstable neurons.

    Attributes:
        neurons: the pre-activations of the unstable neurons.
        outputs: the network's outputs.
        sides: every pre-activation and its negative.
    """

    def __init__(self, network: Network, folded: Folded) -> None:
        self.folded = folded
        self.inputs = network.input_size
        self.neurons: list[np.ndarray] = []
        self.center = [Fraction(float(v)) for v in folded.center]
        self.radius = [Fraction(float(v)) for v in folded.radius]
        self._places = [tuple(place) for place in folded.places.tolist()]
        # Whoever is stable is on the side that it is on at the centre.
        known = exact_values(network, self.center)
        self.sides: list[np.ndarray] = []
        forms: list[np.ndarray] = []
        for index, node in enumerate(network.nodes):
            sources = [forms[i] for i in node.inputs]
            if isinstance(node, Input):
                form = np.full((node.size, 1 + self.inputs + folded.size), ZERO, dtype=object)
                form[np.arange(node.size), 1 + np.arange(node.size)] = Fraction(1)
            elif isinstance(node, Activation):
                slope = rational(node.slope, node.shape) if isinstance(node, LeakyRelu) else np.full(node.shape, ZERO)
                self.sides += [side for form in sources[0] for side in (form, -form)]
                form = self._activated(index, sources[0], slope.reshape(-1), known[node.inputs[0]].reshape(-1))
            else:
                shapes = [network.nodes[i].shape for i in node.inputs]

                def value(*parts: np.ndarray, node=node, shapes=shapes) -> np.ndarray:  # type: ignore[no-untyped-def]
                    shaped = [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
                    return node_value(node, shaped).reshape(-1)

                offset = value(*(0 * source[:, 0] for source in sources))
                columns = [value(*(source[:, k] for source in sources)) for k in range(sources[0].shape[1])]
                form = np.stack([columns[0], *(column - offset for column in columns[1:])], axis=1)
            forms.append(form)
        self.outputs = forms[-1]

    def _activated(self, index: int, form: np.ndarray, slope: np.ndarray, at_center: np.ndarray) -> np.ndarray:
        form = form.copy()
        for i, z in enumerate(at_center):
            if (index, i) in self._places:
                assert self._places[len(self.neurons)] == (index, i)
                variable = 1 + self.inputs + len(self.neurons)
                self.neurons.append(form[i].copy())
                form[i] = ZERO
                form[i, variable] = Fraction(1)
            elif z < 0:
                form[i] = slope[i] * form[i]
        return form

    def rows(self, polytope: Polytope) -> list[np.ndarray]:
        """A·y − b of each row, with integer coefficients as the library has them."""
        found = []
        for row in polytope:
            form = sum((c * self.outputs[i] for i, c in row.coefficients), start=0 * self.outputs[0])
            form[0] -= row.bound
            found.append(form * scale(row))
        return found

    def plane(self, planes: HullCuts, number: int) -> np.ndarray:
        """The form of one of the planes, whose variables are scaled inputs and values of neurons."""
        rows = planes.rows(torch.tensor([number]), len(self.folded.free), self.folded.size)
        form = np.full(1 + self.inputs + self.folded.size, ZERO, dtype=object)
        form[0] = Fraction(float(rows.constant[0]))
        for e, i in zip(rows.inputs[0].tolist(), self.folded.free.tolist(), strict=True):
            form[1 + i] = Fraction(e) / self.radius[i]
            form[0] -= Fraction(e) * self.center[i] / self.radius[i]
        form[1 + self.inputs :] = [Fraction(v) for v in rows.neurons[0].tolist()]
        return form

    def exceeds(self, form: np.ndarray, j: int) -> tuple[Fraction, Fraction]:
        """By how much a form is above the value of neuron j, at least and at most; the other neurons' are in a box.

        The least value of form − z_j where 0 ≤ z_j ≤ u_j is the greatest, over all y ≥ 0, of that of
        form − z_j − y·(u_j − z_j) over the box; likewise below 0. The greatest value is bounded on the chord's side.
        """
        low, high, slope = (Fraction(float(v[j])) for v in (self.folded.lower, self.folded.upper, self.folded.slope))
        z, constant = self.neurons[j], np.zeros_like(form)
        constant[0] = Fraction(1)
        least = []
        for rate, end, sign in ((Fraction(1), high, 1), (slope, low, -1)):
            over = form - rate * z
            room = sign * (end * constant - z)
            kinks = [c / d for c, d in zip(over[1:], room[1:], strict=True) if d != 0 and c / d > 0]
            least.append(max(self._least(over - y * room) for y in (ZERO, *kinks)))
        chord = (high - slope * low) / (high - low)
        most = min(-self._least(rate * z - form) for rate in (Fraction(1), slope, chord))
        return min(least), most

    def _least(self, form: np.ndarray) -> Fraction:
        """The least value of a form over the box of the inputs and of the neurons' values."""
        total = form[0]
        for c, m, r in zip(form[1 : 1 + self.inputs], self.center, self.radius, strict=True):
            total += c * m - abs(c) * r
        ends = zip(self.folded.lower.tolist(), self.folded.upper.tolist(), self.folded.slope.tolist(), strict=True)
        for c, (low, high, slope) in zip(form[1 + self.inputs :], ends, strict=True):
            below = Fraction(slope) * Fraction(low)
            total += min(c * v for v in (ZERO, below, Fraction(high)))
        return total

    def least(self, objective: np.ndarray, strip: TreeRelaxation, leaf: Leaf) -> Fraction:
        """The least value over the box that weak duality leaves to an objective.

        From the last neuron to the first, a_j·r_j is taken for y_j·z_j plus the least value of a_j·r_j − y_j·z_j over
        the ends of the phases that the leaf leaves, with y_j = w_j + t_j·a_j. Of a neuron with a plane, (a_j + v_j)·r_j
        is at least its value on the plane or, if that is less, as far below it as neuron j can be; and w_j·z_j plus the
        least value of −v_j·r_j − w_j·z_j is left.
        """
        form, total = objective.copy(), ZERO
        numbers = {} if strip.cuts is None else {j: k for k, j in enumerate(strip.cuts.neurons.tolist())}
        for j in reversed(range(self.folded.size)):
            a, form[1 + self.inputs + j] = form[1 + self.inputs + j], ZERO
            y = Fraction(leaf.w[j]) + Fraction(float(strip.slopes[j])) * a
            if j in numbers:
                assert strip.cuts is not None
                v = Fraction(leaf.v[j]) if leaf.v else ZERO
                width = Fraction(float(strip.width[j]))
                rest, a, y = a + v, -v, Fraction(leaf.w[j])
                form = form + rest * self.plane(strip.cuts, numbers[j])
                total -= max(rest, ZERO) * width
            form = form + y * self.neurons[j]
            low, high, slope = (
                Fraction(float(v[j])) for v in (self.folded.lower, self.folded.upper, self.folded.slope)
            )
            ends = [(ZERO, ZERO)]
            ends += [(high, high)] if leaf.split[j] >= 0 else []
            ends += [(low, slope * low)] if leaf.split[j] <= 0 else []
            total += min(a * r - y * z for z, r in ends)
        x = form[1 : 1 + self.inputs]
        return total + form[0] + sum(c * m - abs(c) * r for c, m, r in zip(x, self.center, self.radius, strict=True))


def scale(row: Row) -> int:
    """What makes a row's coefficients integers."""
    return math.lcm(*(c.denominator for _, c in row.coefficients))


def covers(splits: Sequence[tuple[int, ...]]) -> bool:
    """Whether every choice of sides agrees with some leaf."""
    todo = [(list(splits), 0)]
    while todo:
        left, start = todo.pop()
        if not left:
            return False
        column = next((j for j in range(start, len(left[0])) if any(split[j] for split in left)), None)
        if column is not None:
            todo += [([split for split in left if split[column] != -side], column + 1) for side in (1, -1)]
    return True


def examine(
    case: Case, report: Report, *, seconds: float = 10.0, method: Bab | None = None
) -> tuple[Outcome, tuple[int, int]]:
    """Run branch and bound on a case, and prove its leaves again.

    Returns:
        Its outcome; how many leaves there are, and how many of these are of trees with planes.
    """
    with recorded() as trees:
        (outcome,) = claims(method or Bab(), [case.query], seconds)
    polytopes = {polytope for polytope in case.query.property.unsafe if polytope}
    systems: dict[tuple[int, ...], System] = {}
    closed: dict[tuple[int, str], list[tuple[int, ...]]] = {}
    last: list[tuple[int, ...]] | None = None
    for tree in trees:
        places = tuple(tree.strip.folded.places.flatten().tolist())
        if places not in systems:
            systems[places] = System(case.query.network, tree.strip.folded)
        # The bounds of the same neurons may have been refined meanwhile.
        system = systems[places]
        system.folded = tree.strip.folded
        for number, j in enumerate([] if tree.strip.cuts is None else tree.strip.cuts.neurons.tolist()):
            assert tree.strip.cuts is not None
            least, most = system.exceeds(system.plane(tree.strip.cuts, number), j)
            if not 0 <= least <= most <= Fraction(float(tree.strip.width[j])):
                report.note(case.name, f"a plane is above its neuron by {float(least)!r} to {float(most)!r}")
        refined = tree.objectives > 1
        rows = _same(system, system.sides, tree.strip) if refined else _rows(system, polytopes, tree.strip)
        if rows is None:
            report.note(case.name, "a tree's rows are those of no polytope, nor sides of intervals")
            continue
        for leaf in (*tree.leaves, *([] if refined else _probes(tree))):
            behind = (Fraction(max(m, 0.0)) * row for m, row in zip(leaf.mu, rows[tree.objectives :], strict=True))
            objective = sum(behind, start=rows[leaf.objective])
            least = system.least(objective, tree.strip, leaf)
            if not leaf.lower <= least:
                report.note(case.name, f"a leaf is said to be above {leaf.lower!r}, and is above {float(least)!r}")
            size = 1 + sum(abs(float(v)) for v in objective) + sum(abs(v) for v in leaf.w)
            if float(least) - leaf.lower > TIGHT * size:
                report.note(case.name, f"a leaf's bound {leaf.lower!r} is far below {float(least)!r}")
        for number in range(tree.objectives) if refined else ():
            if not covers([leaf.split for leaf in tree.leaves if leaf.objective == number]):
                report.note(case.name, "the leaves of an interval's proof leave out some phases")
        if not refined:
            # Trees of the same rows may have given way to one another: what each of them has closed is closed.
            closed.setdefault((id(tree.strip.folded), str(rows)), []).extend(leaf.split for leaf in tree.leaves)
            last = closed[id(tree.strip.folded), str(rows)]
    if last is not None and outcome.verdict is Verdict.UNSAT and not covers(last):
        report.note(case.name, "the leaves of a proof leave out some phases")
    over = [len(tree.leaves) for tree in trees if tree.strip.cuts is not None and len(tree.strip.cuts.neurons)]
    return outcome, (sum(len(tree.leaves) for tree in trees), sum(over))


def _probes(tree: Recorded, count: int = 4) -> list[Leaf]:
    """What the library makes of splits and multipliers that no search has chosen: each of them gives a bound.

    Many mistakes hardly show at the multipliers that a search ends with: there the rows behind the objective are not
    needed, or they are near zero where the bound is least.
    """
    generator = torch.Generator().manual_seed(0)
    size, others = tree.strip.folded.size, tree.strip.rows.matrix.shape[0] - 1
    split = torch.randint(-1, 2, (count, size), generator=generator, dtype=torch.int8)
    scale = tree.strip.rows.matrix.abs().amax() if tree.strip.rows.matrix.numel() else 1.0
    w = torch.randn(count, size, generator=generator, dtype=torch.float64) * scale
    # Some are negative and count as zero.
    mu = torch.rand(count, others, generator=generator, dtype=torch.float64) * 4 - 1
    v = torch.randn(count, size, generator=generator, dtype=torch.float64) * scale * tree.strip.over
    lower = tree.proofs.lower(split, torch.arange(size), w, mu, v=v[:, tree.strip.over])
    columns = (value.tolist() for value in (split, w, mu, lower, v))
    return [Leaf(tuple(s), tuple(a), tuple(m), low, v=tuple(b)) for s, a, m, low, b in zip(*columns, strict=True)]


def _rows(system: System, polytopes: set[Polytope], strip: TreeRelaxation) -> list[np.ndarray] | None:
    """The exact forms of a tree's rows, in its order, if they are those of a polytope."""
    for polytope in polytopes:
        forms = system.rows(polytope)
        found = _same(system, forms, strip)
        if found is not None and len(found) == len(forms):
            return found
    return None


def _same(system: System, forms: list[np.ndarray], strip: TreeRelaxation) -> list[np.ndarray] | None:
    """Those exact forms that have the same values as a tree's rows at some points, in the order of the rows."""
    points = np.random.default_rng(0).random((3, system.inputs + system.folded.size)).astype(object)
    points = np.vectorize(Fraction, otypes=[object])(points)
    for i, (middle, radius) in enumerate(zip(system.center, system.radius, strict=True)):
        if not radius:
            points[:, i] = middle
    at = [_values(strip, system, point) for point in points]
    values = [[float(form[0] + form[1:] @ point) for point in points] for form in forms]
    order: list[int] = []
    for number in range(strip.rows.matrix.shape[0]):
        same = (
            i
            for i, mine in enumerate(values)
            if i not in order
            and all(
                math.isclose(value, each[number], rel_tol=1e-6, abs_tol=1e-9)
                for value, each in zip(mine, at, strict=True)
            )
        )
        order += [i for i in [next(same, None)] if i is not None]
    return [forms[i] for i in order] if len(order) == strip.rows.matrix.shape[0] else None


def _values(strip: TreeRelaxation, system: System, point: np.ndarray) -> list[float]:
    """A relaxation's rows at inputs x and values r of the neurons, whatever they are, by their remainders."""
    folded = strip.folded
    z = [float(form[0] + form[1:] @ point) for form in system.neurons]
    r = torch.tensor([float(v) for v in point[system.inputs :]], dtype=torch.float64)
    base = strip.slopes * torch.tensor(z, dtype=torch.float64)
    x = torch.tensor([float(v) for v in point[: system.inputs]], dtype=torch.float64)
    e = ((x - folded.center) / folded.radius)[folded.free]
    if strip.cuts is not None:
        over = strip.cuts.neurons
        rows = strip.cuts.rows(torch.arange(len(over)), len(e), len(r))
        base[over] = rows.inputs @ e + rows.neurons @ r + rows.constant - strip.width[over]
    q = (r - base) / strip.width
    return (strip.rows.matrix @ torch.cat([e, q]) + strip.rows.constant).tolist()


def conjunctions(rng: np.random.Generator, network: Network) -> Iterator[Case]:
    """Two rows that nearly contradict each other, neither of which is excluded alone: both are needed for a proof."""
    center, radius = rng.normal(size=network.input_size) * 0.7, rng.uniform(0.05, 0.3, size=network.input_size)
    radius = np.where(rng.permutation(network.input_size) < 3, radius, 0)
    box = Box(np.float32(center - radius).astype(float), np.float32(center + radius).astype(float))
    middle = nets.as_fractions((box.lower + box.upper) / 2)
    y = exact_values(network, middle)[-1].reshape(-1)
    for gap in (Fraction(-1, 2), Fraction(-1, 1000), Fraction(-1, 10**6), Fraction(1, 1000)):
        first = {i: Fraction(int(rng.integers(1, 20)), 10) for i in range(network.output_size)}
        value = sum(c * y[i] for i, c in first.items())
        # The second row is the negative of the first, but for a small part.
        second = {i: -c * Fraction(int(rng.integers(999, 1002)), 1000) for i, c in first.items()}
        other = sum(c * y[i] for i, c in second.items())
        unsafe = ((Row(tuple(first.items()), value + gap), Row(tuple(second.items()), other)),)
        yield Case(f"{network.name}, two rows, gap {float(gap):g}", Query(network, Property(box, unsafe)), middle)


OFFSETS = (1e-9, -1e-9, -1e-3, -1e-2, -0.1, -0.4)
"""How far the cases are from their decision boundary."""


def trees(*, seed: int = 0, offsets: Sequence[float] = OFFSETS, report: Report | None = None) -> Report:
    """Branch and bound on random networks near the decision boundary, each leaf proved again."""
    rng, report = np.random.default_rng(seed), report or Report()
    leaves = planes = 0
    networks = [*nets.pieces(rng, nets.gaussian(rng)), *nets.pieces(rng, nets.uneven(rng, 2))]
    cases = boundary_cases(rng, networks, offsets, boxes=1)
    cases = [*cases, *(case for network in networks for case in conjunctions(rng, network))]
    for number, case in report.of(enumerate(cases)):
        method = (None, REFINING, OVER, LOOKING, REFINING, OVER)[number % 6]
        outcome, found = examine(case, report, method=method)
        judge(case, "bab", outcome, report)
        leaves, planes = leaves + found[0], planes + found[1]
    report.decided["leaves", Verdict.UNSAT] += leaves
    report.decided["leaves over planes", Verdict.UNSAT] += planes
    return report
