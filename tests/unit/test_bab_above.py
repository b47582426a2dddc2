"""HullCuts over unstable neurons: bounds whatever the search does, and better ones than chords."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.soundness.trees import System
from tests.support.asking import claims
from tests.support.solver_cases import ball, mlp, residual, row
from verifiable_relu.bounds import crown_relaxation, input_box
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Add, Input, Linear, Relu
from verifiable_relu.spec.property import Box, Property, Query
from verifiable_relu.verifiers.bab.ascent import DualAscent, Nodes
from verifiable_relu.verifiers.bab.folded import AffineForms, Folded
from verifiable_relu.verifiers.bab.folding import fold
from verifiable_relu.verifiers.bab.proof import Proofs
from verifiable_relu.verifiers.bab.search import Schedule
from verifiable_relu.verifiers.bab.slopes import Above, HullCuts, Slopes
from verifiable_relu.verifiers.bab.strip import TreeRelaxation
from verifiable_relu.verifiers.bab.tree import Branching
from verifiable_relu.verifiers.bab.verifier import Bab
from verifiable_relu.verifiers.base import Verdict

NEVER = lambda: False  # noqa: E731


def system(network: Network, box: Box, matrix: torch.Tensor) -> tuple[Folded, AffineForms]:
    bounds = crown_relaxation(network.to(torch.float64), input_box([Property(box, ())], network))
    return fold(bounds, 0, box, matrix)


def planes_of(folded: Folded, rows: AffineForms, above: Above) -> tuple[HullCuts, torch.Tensor, float]:
    slopes, _ = Slopes().search(folded, rows, NEVER)
    (found,) = above.relaxations(folded, rows, slopes, NEVER)
    return found


@pytest.mark.combined
@pytest.mark.parametrize("above", [Above(), Above(rate=5.0, decay=1.0, steps=7), Above(steps=0)], ids=str)
@pytest.mark.parametrize("few", [None, 5])
@pytest.mark.parametrize("kind", ["mlp", "leaky", "residual"])
def test_planes_are_above_their_neurons_by_at_most_their_width(
    kind: str, above: Above, few: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In rational arithmetic, over the whole box, whatever steps were taken, of all neurons or those of few terms."""
    if few is not None:
        monkeypatch.setattr("verifiable_relu.verifiers.bab.folded._WHOLE", 0)
        monkeypatch.setattr("verifiable_relu.verifiers.bab.slopes._FEW", few)
    rng = np.random.default_rng(len(kind))
    network = residual(rng) if kind == "residual" else mlp(rng, (5, 9, 8, 3), leaky=kind == "leaky")
    box = ball(rng.integers(-4, 5, network.input_size) / 8, 1.0)
    folded, rows = system(network, box, torch.tensor([[1.0, -1.0, 0.5][: network.output_size]]))
    planes, _, _ = planes_of(folded, rows, above)
    exact = System(network, folded)
    assert len(planes.neurons) > 2
    assert few is None or int(torch.bincount(planes.entries[0]).max()) <= few
    for number, j in enumerate(planes.neurons.tolist()):
        least, most = exact.exceeds(exact.plane(planes, number), j)
        assert 0 <= least <= most <= Fraction(float(planes.width[number]))


def concave(rng: np.random.Generator, inputs: int, neurons: int) -> Network:
    """y = −Σ relu(W·x + b), whose least value is at a corner of the box."""
    weight = torch.from_numpy(rng.normal(size=(neurons, inputs)))
    bias = torch.from_numpy(rng.normal(size=neurons))
    last = -torch.ones(1, neurons, dtype=torch.float64)
    return Network(
        (
            Input(name="x", inputs=(), shape=(inputs,)),
            Linear(name="fc", inputs=(0,), shape=(neurons,), weight=weight, bias=bias),
            Relu(name="act", inputs=(1,), shape=(neurons,)),
            Linear(name="out", inputs=(2,), shape=(1,), weight=last, bias=torch.zeros(1, dtype=torch.float64)),
        )
    )


@pytest.mark.thorough
def test_planes_over_one_layer_come_near_its_least_value() -> None:
    """The convex hull of each neuron over the box leaves less than half of the gap that chords leave."""
    rng = np.random.default_rng(0)
    network = concave(rng, 6, 12)
    box = ball(np.zeros(6), 1.0)
    folded, rows = system(network, box, torch.ones(1, 1))
    corners = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=torch.float64)] * 6)
    least = float(network(corners).min())
    _, chords = Slopes().search(folded, rows, NEVER)
    planes, slopes, bound = planes_of(folded, rows, Above(steps=200, decay=0.98))
    assert chords[0] < bound <= least + 1e-5
    assert least - bound < 0.5 * (least - float(chords[0]))
    # The relaxation of a tree has that bound without a multiplier, and proves it.
    strip = TreeRelaxation(folded, rows, slopes, planes)
    none = torch.zeros(1, folded.size, dtype=torch.int8)
    nothing = torch.zeros(1, 0)
    proved = Proofs(strip).lower(none, torch.arange(0), nothing, nothing)
    assert bound - 1e-3 < float(proved) <= least


@pytest.mark.thorough
@pytest.mark.parametrize("whole", [True, False])
def test_steps_with_planes_find_what_is_proved(whole: bool) -> None:
    """What the ascent says of nodes with splits, and with chords mixed in, is what the proof makes of it."""
    rng = np.random.default_rng(3)
    network = mlp(rng, (5, 12, 10, 2))
    folded, rows = system(network, ball(np.zeros(5), 1.0), torch.tensor([[1.0, -1.0]]))
    assert not whole or folded.neurons is folded.neurons
    planes, slopes, _ = planes_of(folded, rows, Above())
    strip = TreeRelaxation(folded, rows, slopes, planes)
    assert len(planes.neurons) > 4
    split = torch.from_numpy(rng.choice([-1, 0, 0, 0, 1], (16, folded.size)).astype(np.int8))
    proofs = Proofs(strip)
    for adaptive in (False, True):
        ascent = DualAscent(strip, torch.full((folded.size,), adaptive), torch.float64)
        before = torch.full((16,), -torch.inf, dtype=torch.float64)
        for steps in (0, 2, 40):
            batch = Nodes(split, torch.zeros(split.shape), torch.zeros(16, 0), torch.zeros(16, dtype=torch.long))
            ascent.aim = torch.full((1,), 1e3, dtype=torch.float64)
            ascent.closed = ascent.aim
            found = ascent.run(batch, steps)
            lower = proofs.lower(split, found.columns, found.w, batch.mu, v=found.v)
            torch.testing.assert_close(lower, found.bound, rtol=1e-9, atol=1e-9)
            assert bool((lower >= before - 1e-9).all())
            before = lower
        sampled = torch.from_numpy(rng.uniform(-1, 1, (4096, 5)))
        z, _ = folded.values(sampled[:, folded.free])
        y = network.to(torch.float64)(sampled)
        margin = y[:, 0] - y[:, 1]
        inside = ((split[:, None] == 0) | ((z > 0) == (split[:, None] > 0))).all(2)
        least = torch.where(inside, margin, torch.inf).amin(1)
        assert bool(inside.any(1).sum() > 2) and bool((before <= least).all())


def shortcut(rng: np.random.Generator, inputs: int, neurons: int) -> Network:
    """Two layers of ReLUs, the second of which sees the sum of both, and one output."""

    def linear(name: str, source: int, before: int, after: int) -> Linear:
        weight = torch.from_numpy(rng.normal(size=(after, before)) / before**0.5)
        return Linear(name=name, inputs=(source,), shape=(after,), weight=weight, bias=weight[:, 0] / 2)

    return Network(
        (
            Input(name="x", inputs=(), shape=(inputs,)),
            linear("first", 0, inputs, neurons),
            Relu(name="act", inputs=(1,), shape=(neurons,)),
            linear("second", 2, neurons, neurons),
            Add(name="sum", inputs=(2, 3), shape=(neurons,)),
            Relu(name="last", inputs=(4,), shape=(neurons,)),
            linear("out", 5, neurons, 1),
        )
    )


def test_trees_on_better_lines_decide_what_points_say() -> None:
    """Of networks with shortcuts, whose trees are begun again at once: unsat only where no point of many is one."""
    rng = np.random.default_rng(3)
    again = Schedule(
        refinement=None, better=Slopes(), hard=Branching(choices=16, look=0, looked=9), tried=False, first=0.0
    )
    decided = []
    for _ in range(4):
        network = shortcut(rng, 5, 12)
        box = ball(np.zeros(5), 1.0)
        folded, rows = system(network, box, torch.ones(1, 1))
        start, before = Slopes(steps=0).search(folded, rows, NEVER)
        ((planes, slopes, bound),) = Slopes().relaxations(folded, rows, start, NEVER)
        assert planes is None and bound >= float(before[0])
        none, nothing = torch.zeros(1, folded.size, dtype=torch.int8), torch.zeros(1, 0)
        proved = float(Proofs(TreeRelaxation(folded, rows, slopes)).lower(none, torch.arange(0), nothing, nothing))
        points = torch.from_numpy(rng.uniform(-1.5, 1.5, (1 << 16, 5)).clip(-1, 1))
        least = float(network(points).min())
        assert bound - 1e-3 < proved <= least
        for most in (least - 0.1, least + 0.02):
            query = Query(network, Property(box, ((row({0: 1}, Fraction(most)),),)))
            (found,) = claims(Bab(rounds=again), [query], 60.0)
            assert found.verdict is (Verdict.UNSAT if most < least else Verdict.SAT)
            decided.append(found.subproblems or 0)
    assert max(decided) > 8
