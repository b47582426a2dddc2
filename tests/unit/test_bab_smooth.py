"""Branch and bound over segments of smooth neurons: verdicts, refinements, and what it does not take or record."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.soundness.judge import Case, Report, judge
from tests.soundness.segments import low_points, mixed, segments
from tests.soundness.trees import REFINING
from tests.support import nets
from tests.support.asking import claims
from tests.support.draws import draws
from tests.support.solver_cases import row
from verifiable_relu.bounds import crown_relaxation, input_box
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Activation, Gelu, Hardened, Relu, Sigmoid, Smooth, Tanh
from verifiable_relu.spec.property import Box, Property, Query
from verifiable_relu.verifiers.auto import Auto
from verifiable_relu.verifiers.bab import Bab
from verifiable_relu.verifiers.bab.folding import fold
from verifiable_relu.verifiers.bab.refine import Refinement
from verifiable_relu.verifiers.bab.slopes import Slopes
from verifiable_relu.verifiers.base import Outcome, Reason, TimeBudget, Trust, Verdict
from verifiable_relu.verifiers.smt import Smt

CASES = draws(24)

KINDS: tuple[type[Activation], ...] = (Sigmoid, Tanh, Gelu, Smooth)


def network_of(rng: np.random.Generator, kind: type[Activation]) -> Network:
    """A random network of two or three layers."""
    widths = ((2, 5, 1), (3, 5, 4, 1))[int(rng.integers(2))]
    return nets.mlp(rng, nets.gaussian(rng), kind, widths)


def below(rng: np.random.Generator, network: Network, gap: float) -> tuple[Case, float]:
    """Whether an output can be so much below about its least value, in parts of its spread; and that distance."""
    center, eps = rng.normal(size=network.input_size) * 0.5, 0.4
    box = Box(center - eps, center + eps)
    one = torch.zeros(network.output_size, dtype=torch.float64)
    one[0] = 1
    points = low_points(rng, network, box, one)
    y = network.to(torch.float64)(torch.from_numpy(points).reshape(-1, *network.input_shape)).flatten(1)[:, 0]
    distance = gap * float(y.max() - y.min())
    query = Query(network, Property(box, ((row({0: 1}, Fraction(float(y[0])) - Fraction(distance)),),)))
    return Case(f"{network.name}, gap {gap}", query, nets.as_fractions(points[0])), distance


def decide(case: Case, method: Bab | None = None, seconds: float = 10.0) -> Outcome:
    (outcome,) = claims(method or Bab(), [case.query], seconds)
    return outcome


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_far_from_the_boundary_is_decided(kind: type[Activation]) -> None:
    rng, report = np.random.default_rng(5), Report()
    split = 0
    for gap, verdict in ((0.4, Verdict.UNSAT), (0.2, Verdict.UNSAT), (-0.2, Verdict.SAT)):
        case, _ = below(rng, network_of(rng, kind), gap)
        outcome = decide(case)
        judge(case, "bab", outcome, report)
        assert outcome.verdict is verdict, outcome
        assert verdict is Verdict.SAT or outcome.trust is Trust.ROUNDED
        split += "sub-problems" in outcome.detail
    assert report.problems == []
    assert split


@pytest.mark.thorough
@pytest.mark.parametrize("method", [Bab(), REFINING], ids=["trees", "refining"])
def test_a_planted_counterexample_is_never_denied(method: Bab) -> None:
    """The threshold is the value at a point: exactly, and a little above it."""
    rng, report = np.random.default_rng(6), Report()
    for number in range(CASES):
        kind = KINDS[number % len(KINDS)]
        network = mixed(rng, kind) if number % 3 == 2 else network_of(rng, kind)
        case, _ = below(rng, network, (0.0, -1e-9, -1e-3)[number % 3])
        judge(case, "bab", decide(case, method, 0.4), report)
    assert report.problems == []


@pytest.mark.thorough
def test_refined_intervals_hold_what_is_attained() -> None:
    rng = np.random.default_rng(7)
    narrower = 0
    for kind in KINDS:
        network = nets.mlp(rng, nets.gaussian(rng), kind, (2, 4, 4, 1))
        box = Box(np.full(2, -0.6), np.full(2, 0.6))
        relaxation = crown_relaxation(network.to(torch.float64), input_box([Property(box, ())], network))
        folded, rows = fold(relaxation, 0, box, torch.eye(1))
        tighter, _ = Refinement(leaves=8).refine(folded, rows, TimeBudget())
        assert torch.equal(tighter.places, folded.places)
        e = torch.rand(2000, 2, dtype=torch.float64) * 2 - 1
        z, _ = folded.values(e)
        assert bool(((z >= tighter.lower - 1e-12) & (z <= tighter.upper + 1e-12)).all())
        width, before = tighter.upper - tighter.lower, folded.upper - folded.lower
        assert bool((width <= before).all())
        narrower += int((width < 0.99 * before).sum())
    assert narrower > 4


@pytest.mark.parametrize("scale", [1.0, 1e30])
def test_slopes_are_found_beside_neurons_of_which_float32_knows_no_bounds(scale: float) -> None:
    """The tangent of zero has bounds of 1e-308, which float32 takes for zero; of large weights it knows no squares."""
    chain = nets.Chain((3,))
    for kind in (Relu, Tanh, Relu):
        chain.add(kind, (3,))
    chain.linear(torch.tensor([[1.0, 1.0, -1.0], [2.0, -1.0, 1.0]]) * scale, torch.zeros(2))
    chain.add(Tanh, (2,))
    chain.linear(torch.tensor([[1.0, -1.0]]), torch.zeros(1))
    network = chain.network("zero").to(torch.float64)
    box = Box(np.array([-1.0, -1.0, -1.0]), np.array([-0.5, 1.0, 1.0]))
    relaxation = crown_relaxation(network, input_box([Property(box, ())], network))
    folded, rows = fold(relaxation, 0, box, torch.tensor([[1.0], [-1.0]]).double())
    assert float(folded.upper.min()) < 1e-300
    slopes, bounds = Slopes().search(folded, rows, lambda: False)
    assert bool(slopes.isfinite().all())
    assert bool(bounds.isfinite().all())


def test_lines_of_a_fan_are_beside_the_curve() -> None:
    """The search starts from CROWN's lines, so that its bound is no worse than CROWN's."""
    rng = np.random.default_rng(8)
    for kind in KINDS:
        network = nets.mlp(rng, nets.gaussian(rng), kind, (3, 6, 5, 1))
        box = Box(np.full(3, -0.4), np.full(3, 0.4))
        net = network.to(torch.float64)
        relaxation = crown_relaxation(net, input_box([Property(box, ())], network))
        crown = relaxation.outputs(torch.eye(1).double(), torch.zeros(1, dtype=torch.long))
        folded, rows = fold(relaxation, 0, box, torch.eye(1))
        _, lower = Slopes(steps=30).search(folded, rows, lambda: False)
        assert float(lower) >= float(crown) - 1e-4 * (1 + abs(float(crown)))


def test_all_of_a_hardened_network_is_split() -> None:
    """ReLU and every λ'-GELU with λ' ≥ λ at once: what is proved holds of members of both kinds."""
    rng = np.random.default_rng(9)
    plain = nets.mlp(rng, nets.gaussian(rng), Relu, (2, 5, 4, 1))
    lam = torch.tensor(4.0)

    def family(kind: type[Activation], **fields: object) -> Network:
        nodes = [
            kind(name=n.name, inputs=n.inputs, shape=n.shape, **fields) if isinstance(n, Relu) else n
            for n in plain.nodes
        ]
        return Network(tuple(nodes), name=kind.op)

    both = family(Hardened, lam=lam)
    members = [plain, family(Gelu, lam=lam), family(Gelu, lam=2 * lam)]
    least, spread = [], 0.0
    for member in members:
        case, distance = below(np.random.default_rng(1), member, 1.0)
        least.append(float(case.outputs[0]))
        spread = max(spread, distance)
    for gap in (0.5, -0.05):
        threshold = min(least) - gap * spread
        query = Query(both, Property(case.query.property.box, ((row({0: 1}, threshold),),)))
        (outcome,) = claims(Bab(), [query], 10.0)
        assert outcome.verdict is not Verdict.UNSAT or (gap > 0 and outcome.margin <= gap * spread + 1e-9)
        if gap > 0:
            assert outcome.verdict is Verdict.UNSAT, outcome


def test_proofs_of_smooth_networks_are_recorded() -> None:
    case, _ = below(np.random.default_rng(5), network_of(np.random.default_rng(5), Sigmoid), 0.3)
    method = Bab()
    method = replace(method, record=True)
    (outcome,) = claims(method, [case.query], 600.0)
    assert outcome.verdict is Verdict.UNSAT and outcome.proof is not None


def test_phases_of_smooth_neurons_are_refused_where_a_method_needs_them() -> None:
    case, _ = below(np.random.default_rng(5), network_of(np.random.default_rng(5), Tanh), 0.01)
    (outcome,) = claims(Smt(), [case.query], 5.0)
    assert outcome.reason is Reason.UNSUPPORTED and "Tanh" in outcome.detail


def test_auto_splits_smooth_neurons() -> None:
    """Over many inputs that vary, boxes are not split; what is left after bounds is decided by neurons."""
    rng = np.random.default_rng(3)
    network = nets.mlp(rng, nets.gaussian(rng), Gelu, (30, 6, 2))
    case, _ = below(rng, network, 1.0)
    (outcome,) = claims(Auto(), [case.query], 20.0)
    assert (outcome.verdict, outcome.method) == (Verdict.UNSAT, "bab"), outcome


@pytest.mark.skipif(CASES < 24, reason="the seeded faults' tests have one seed")
def test_no_node_denies_a_point_in_it() -> None:
    for seed in range(CASES):
        assert segments(seed=seed).problems == []
