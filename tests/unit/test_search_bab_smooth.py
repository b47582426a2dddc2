"""Branch and bound over segments of smooth neurons: no node denies a point in it, and verdicts are those of points.

At points of a box the values of a network are known to 80 digits. Nodes are split again and again, and each time a half
that holds the point is kept; no bound of such a node, by multipliers of a search or by any others, may exceed the value
there.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.soundness.judge import Case, Report, judge
from tests.soundness.kinds import low_points
from tests.support import nets
from tests.support.asking import claims
from tests.support.draws import draws
from tests.support.exact import exact_values, intervals
from tests.support.solver_cases import row
from verifiable_relu.bounds.alpha import Ascent
from verifiable_relu.ir.interval import Interval
from verifiable_relu.ir.network import Elementwise
from verifiable_relu.search.bab.ascent import DualAscent
from verifiable_relu.search.bab.loop import Nodes
from verifiable_relu.search.bab.proof import lower_bounds
from verifiable_relu.search.bab.relaxation import TreeRelaxation
from verifiable_relu.search.bab.slopes import row_slopes
from verifiable_relu.search.bab.system import eliminate_stable_neurons
from verifiable_relu.search.bab.verifier import Bab
from verifiable_relu.search.outcomes import Trust, Verdict
from verifiable_relu.spec.property import Box, Property, Query


def below(rng: np.random.Generator, kind: str, gap: float) -> Case:
    """Whether an output can be so much below about its least value, in parts of its spread."""
    net = nets.mlp(rng, nets.gaussian(rng), kind, ((2, 5, 1), (3, 5, 4, 1))[int(rng.integers(2))])
    center = rng.normal(size=net.input_size) * 0.5
    box = Box(center - 0.4, center + 0.4)
    points = low_points(rng, net, box, torch.ones(1, dtype=torch.float64))
    y = net(torch.from_numpy(points))[:, 0]
    threshold = Fraction(float(y[0])) - Fraction(gap * float(y.max() - y.min()))
    query = Query(net, Property(box, ((row({0: 1}, threshold),),)))
    return Case(f"{net.name}, gap {gap}", query, nets.as_fractions(points[0]))


def denied(kind: str, seed: int, shared: bool) -> list[str]:
    """Split and bound nodes of a random network that hold some points. Returns the bounds that exceed a value."""
    rng, problems = np.random.default_rng(seed), []
    net = nets.mixed(rng, kind) if shared else nets.mlp(rng, nets.gaussian(rng), kind, (2, 5, 4, 2))
    center, radius = rng.normal(size=net.input_size) * 0.7, rng.choice([0.05, 0.3, 1.0])
    box = Box(center - radius, center + radius)
    weights = torch.tensor([1.0, -0.5], dtype=torch.float64)
    ends = Interval(torch.from_numpy(box.lower)[None], torch.from_numpy(box.upper)[None])
    every = intervals(net, ends)
    known = {op.inputs[0]: every[op.inputs[0]] for op in net.ops if isinstance(op, Elementwise)}
    system = eliminate_stable_neurons(net, ends, known)
    rows = system.outputs(weights[None])
    slopes, _ = row_slopes(system, weights[None], Ascent(steps=10))
    made = TreeRelaxation(system, rows, slopes[0])
    points = low_points(rng, net, box, weights)
    z, values = [], []
    for point in points:
        exact = exact_values(net, nets.as_fractions(point))
        z.append([exact[net.ops[op].inputs[0]][i] for op, i in system.places.tolist()])
        values.append(exact[-1][0] - exact[-1][1] / 2)
    adaptive = torch.from_numpy(rng.random(system.size) < 0.5)
    ascent = DualAscent(made, adaptive, torch.float64)
    batch = Nodes.roots(made)[torch.zeros(len(points), dtype=torch.long)]
    for _ in range(8):
        found = ascent.run(batch, 6)
        drawn = torch.from_numpy(rng.normal(size=found.w.shape)) * (1 + found.w.abs().sum())
        for w in (found.w, drawn):
            for lower, value in zip(lower_bounds(made, replace(found, w=w)).tolist(), values, strict=True):
                problems += [f"{kind} {seed}: {lower} above {value}"] * (not lower <= value)
        if not system.size:
            return problems
        neuron = torch.from_numpy(rng.integers(0, system.size, len(points)))
        place = made.places(neuron)[:, None]
        before = batch.widened(len(made.columns)).segment.gather(1, place)[:, 0]
        halves, count = batch.split_on(neuron, made), len(points)
        cut = before < made.segments.last[neuron]
        at = made.segments.point(neuron, before.clamp(max=63))
        upper = [
            bool(c) and z[i][int(j)] >= p for i, (c, j, p) in enumerate(zip(cut, neuron, at.tolist(), strict=True))
        ]
        batch = halves[torch.tensor([i if up else i + count for i, up in enumerate(upper)])]
    return problems


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kind", nets.SMOOTH)
def test_no_node_denies_a_point_in_it(kind: str, shared: bool) -> None:
    for seed in range(draws(8)):
        assert denied(kind, seed, shared) == []


@pytest.mark.parametrize("kind", nets.SMOOTH)
def test_what_is_far_from_the_boundary_is_decided(kind: str) -> None:
    rng, report = np.random.default_rng(5), Report()
    for gap, verdict in ((0.4, Verdict.UNSAT), (-0.2, Verdict.SAT), (0.0, None), (-1e-9, None)):
        case = below(rng, kind, gap)
        (outcome,) = claims(Bab(), [case.query], 10.0 if verdict else 0.4)
        judge(case, "bab", outcome, report)
        assert verdict is None or outcome.verdict is verdict, outcome
        assert outcome.verdict is not Verdict.UNSAT or outcome.trust is Trust.ROUNDED
    assert report.problems == []
