"""Branch and bound on the input box: its parts, its verdicts, and what its events say."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from tests.support import nets
from tests.support.asking import claims
from tests.support.draws import draws
from tests.support.elsewhere import Elsewhere
from tests.support.exact import exact_outputs
from tests.support.solver_cases import UNIT, check, hinge, planted, random_query, row
from tests.unit.test_sharing import QUESTIONS, question
from verifiable_relu.bounds.backward import Relaxation
from verifiable_relu.bounds.linear_bounds import bound_by_crown
from verifiable_relu.ir.interval import Interval
from verifiable_relu.ir.network import Network
from verifiable_relu.search.attack import Pgd
from verifiable_relu.search.batch import answers
from verifiable_relu.search.budget import TimeBudget
from verifiable_relu.search.outcomes import Verdict
from verifiable_relu.search.property_rows import PropertyRows
from verifiable_relu.search.split import InputSplit, search
from verifiable_relu.search.split.bounding import (
    BoxesBounded,
    Clipped,
    Event,
    SubBoxes,
    backward_rows,
    clip,
    coefficient_error,
)
from verifiable_relu.spec.property import Box, Property, Query, Row
from verifiable_relu.trust.confirmation import confirm

SMALL = InputSplit(batch=4, share_after_s=0)


# Boxes


def sub_boxes(lower: list[list[float]], upper: list[list[float]]) -> SubBoxes:
    low, high = (torch.tensor(end, dtype=torch.float64) for end in (lower, upper))
    owner = torch.zeros(len(low), dtype=torch.long)
    return SubBoxes(low, high, owner, torch.arange(len(low)), owner - 1)


def test_halves_cover_a_box_and_whole_numbers_are_in_one_of_them() -> None:
    boxes = sub_boxes([[0.5, 0.0], [1.0, 2.0], [-0.75, 3.0]], [[3.5, 7.0], [1.0, 2.0], [0.25, 3.0]])
    counted = torch.tensor([False, True])
    for dimension in itertools.product((0, 1), repeat=3):
        halves = boxes.halves(torch.tensor(dimension), counted, 10)
        assert halves.number.tolist() == list(range(10, 16))
        low, high = halves[:3], halves[3:]
        for box, i in enumerate(dimension):
            ends = [float(end[box, i]) for end in (low.lower, low.upper, high.lower, high.upper)]
            assert ends[0] == float(boxes.lower[box, i]) and ends[3] == float(boxes.upper[box, i])
            # Whole numbers have none in common, unless there is but one.
            assert ends[1] == ends[2] or (i == 1 and ends[2] == ends[1] + 1)
            assert ends[0] <= ends[1] and ends[2] <= ends[3]


# Clipping


def clipping_case(seed: int) -> tuple[Network, list[Property], Interval]:
    """A network of two inputs, and unions of polytopes that a part of each box reaches."""
    rng = np.random.default_rng(seed)
    draft, draw = nets.Chain(2), nets.gaussian(rng)
    draft.linear(draw((6, 2), 2), draw((6,), 2))
    if seed % 2:
        draft.act()
    draft.linear(draw((3, 6), 6), draw((3,), 6))
    network, center = draft.network("clipped"), rng.normal(size=(3, 2))
    box, properties = Interval(torch.from_numpy(center - 0.4), torch.from_numpy(center + 0.4)), []
    for sample in range(3):
        y = network((box.lower + (box.upper - box.lower) / 4)[sample : sample + 1].float()).flatten().double().numpy()
        polytopes = []
        for size in ((1,), (2,), (2, 1))[int(rng.integers(3))]:
            signs = rng.choice([-1, 1, 2], size=(size, 3))
            values = [Fraction(float(np.dot(one, y))) for one in signs]
            coefficients = [tuple((i, Fraction(int(c))) for i, c in enumerate(one)) for one in signs]
            polytopes.append(tuple(map(Row, coefficients, values)))
        properties.append(Property(Box(box.lower[sample].numpy(), box.upper[sample].numpy()), tuple(polytopes)))
    return network, properties, box


def clipped_away(seed: int, cut: Callable[..., Clipped]) -> tuple[int, int]:
    """Count the points below the stated margin that clipping takes away from a grid, and the boxes it changes."""
    network, properties, box = clipping_case(seed)
    rows = PropertyRows.from_properties(properties, network.output_size)
    value, coefficients = backward_rows(bound_by_crown(Relaxation(network, box)), rows.matrix)
    found = cut(box, rows, value - rows.bound, coefficients, coefficient_error(network))
    steps = torch.linspace(0, 1, 17, dtype=torch.float64)
    grid, gone, smaller = torch.cartesian_prod(steps, steps), 0, 0
    for sample, prop in enumerate(properties):
        points = torch.lerp(box.lower[sample], box.upper[sample], grid)
        lower, upper = found.lower[sample], found.upper[sample]
        smaller += bool((lower > box.lower[sample]).any() or (upper < box.upper[sample]).any())
        for point in points[((points < lower) | (points > upper)).any(1)].tolist():
            margin = prop.margin(list(exact_outputs(network, [Fraction(v) for v in point])))
            gone += margin <= 0 or margin < float(found.margin[sample])
    return gone, smaller


def test_clipping_keeps_every_counterexample() -> None:
    found = [clipped_away(seed, clip) for seed in range(draws(12))]
    assert sum(gone for gone, _ in found) == 0
    assert sum(smaller for _, smaller in found) >= 2


def test_clipping_keeps_a_counterexample_on_the_very_boundary() -> None:
    """Dyadic weights: y = x₀ − x₁/2 is at most c in a triangle, of which one corner is on the edge that is left."""
    draft = nets.Chain(2)
    draft.linear(torch.tensor([[1.0, -0.5]]), torch.tensor([0.25]))
    network = draft.network("line")
    lower, upper = torch.zeros(1, 2).double(), torch.ones(1, 2).double()
    for bound in (0.0, 0.125, 0.25, 0.5):
        rows = PropertyRows.from_properties([Property(UNIT, ((row({0: 1}, bound),),))], 1)
        value, coefficients = backward_rows(Relaxation(network, Interval(lower, upper)).advance(), rows.matrix)
        found = clip(Interval(lower, upper), rows, value - rows.bound, coefficients, coefficient_error(network))
        # x₁ = 1, and x₀ as large as can be: c + 1/2 − 1/4.
        edge = bound + 0.25
        assert edge <= float(found.upper[0, 0]) <= edge + 1e-5
        assert float(found.lower[0, 1]) <= max(0.0, 2 * (0.25 - bound)) <= float(found.lower[0, 1]) + 1e-5


# Verdicts


def test_verdicts_are_those_of_enumeration() -> None:
    cases = [random_query(seed, leaky=seed % 3 == 0, dyadic=seed % 2 == 0) for seed in range(draws(40))]
    queries = [query for query, _ in cases]
    for method in (InputSplit(), SMALL):
        for (query, gap), outcome in zip(cases, claims(method, queries, 20.0), strict=True):
            check(query, outcome, gap)


@pytest.mark.parametrize("seed", range(draws(12)))
def test_a_planted_counterexample_is_never_denied(seed: int) -> None:
    """With attacks that find nothing, as well: only its bounds keep the search from *unsat*."""
    blind = InputSplit(batch=16, box_attack=Pgd(steps=0, starts=1), query_attack=Pgd(rounds=0))
    (outcome,) = claims(blind, [planted(seed)], 2.0)
    assert outcome.verdict is not Verdict.UNSAT


@pytest.mark.parametrize("front", ["plain", "scale", "conv", "residual"])
def test_a_needle_at_a_dyadic_point_is_never_denied(front: str) -> None:
    rng = np.random.default_rng(5)
    for depth in (0.25, 2.0**-20, 0.0):
        point = nets.dyadic(rng, 3, 4)
        network = nets.needle(rng, point, 0.25, 1.5, decoys=3, front=front)
        (value,) = exact_outputs(network, [Fraction(float(v)) for v in point.flatten()])[:1]
        box = Box((point.flatten() - 0.5), (point.flatten() + 0.5))
        asked = Query(network, Property(box, ((Row(((0, Fraction(1)),), value + Fraction(depth)),),)))
        (outcome,) = claims(InputSplit(), [asked], 2.0)
        assert outcome.verdict is not Verdict.UNSAT, (front, depth)


def test_strict_rows_and_unions_are_decided_as_properties_say() -> None:
    queries = [Query(hinge(), Property(UNIT, ((row({0: 1}, 0, strict),),))) for strict in (False, True)]
    touched, missed = answers(InputSplit(), queries, TimeBudget(1.0))
    assert touched.verdict is Verdict.SAT and missed.verdict is not Verdict.SAT
    far, near = (row({0: -1}, -1.5),), (row({0: -1}, -1.125),)
    every = ((far,), (far, near), (near, far), (), ((),))
    found = claims(InputSplit(), [Query(hinge(bias=0.25), Property(UNIT, unsafe)) for unsafe in every], 20.0)
    wanted = [Verdict.UNSAT, Verdict.SAT, Verdict.SAT, Verdict.UNSAT, Verdict.SAT]
    assert [outcome.verdict for outcome in found] == wanted


# Processes, devices, and what is waited for


@pytest.mark.parametrize("seed", range(3))
def test_boxes_elsewhere_are_decided_as_here(seed: int) -> None:
    query, gap = random_query(seed)
    with Elsewhere():
        (outcome,) = claims(InputSplit(), [query], 60.0, device="cuda")
    assert outcome.verdict is (Verdict.SAT if gap < 0 else Verdict.UNSAT), outcome.detail


class Waits(TorchFunctionMode):
    """Counts the calls for which the host waits for the pretended device."""

    NAMES = frozenset(
        ("tolist", "item", "__bool__", "__float__", "__int__", "nonzero", "unique", "cpu", "numpy", "bincount")
    )

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += getattr(func, "__name__", "") in self.NAMES and args[0].device.type == "cuda"
        return func(*args, **(kwargs or {}))


def test_a_step_waits_for_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, waited = search.BoxSearch._step, []

    def watched(self: search.BoxSearch) -> None:
        with Waits() as waits:
            plain(self)
        waited.append(waits.count)

    monkeypatch.setattr(search.BoxSearch, "_step", watched)
    method = InputSplit(batch=16, attack_after_boxes=1 << 30)
    with Elsewhere():
        claims(method, [question(*QUESTIONS["input splits"][1])], 20.0, device="cuda")
    # The first step chooses how boxes are bounded.
    assert len(waited) > 4 and set(waited[1:]) == {1}


# Events


def assert_proven(query: Query, heard: list[Event]) -> None:
    """Check that events prove a query *unsat*: every box is proved, or its rest is what its children cover."""
    whole = {0: (query.property.box.lower, query.property.box.upper)}
    boxes, rest, proved = dict(whole), dict(whole), set()
    children: dict[int, list[int]] = {}
    for event in heard:
        if isinstance(event, BoxesBounded):
            proved |= set(event.boxes.number[event.proved].tolist())
            for found, of in ((boxes, event.boxes), (rest, event.rest)):
                ends = zip(of.number.tolist(), of.lower.numpy(), of.upper.numpy(), strict=True)
                found.update((number, (low, high)) for number, low, high in ends)
        else:
            count = len(event.parent)
            for place, parent in enumerate(event.parent.tolist()):
                mine = event.children[torch.tensor([place, place + count])]
                children[parent] = mine.number.tolist()
                for number, low, high in zip(children[parent], mine.lower, mine.upper, strict=True):
                    boxes[number] = rest[number] = (low.numpy(), high.numpy())
                ends = [boxes[number] for number in children[parent]]
                cut = [i for i in range(len(ends[0][0])) if ends[0][1][i] != ends[1][1][i]]
                assert len(cut) <= 1 and all(ends[0][1][i] >= ends[1][0][i] for i in cut)
                assert (ends[0][0] == rest[parent][0]).all() and (ends[1][1] == rest[parent][1]).all()
    open_ = [0]
    while open_:
        number = open_.pop()
        is_empty = bool((rest[number][0] > rest[number][1]).any())
        assert number in proved or is_empty or number in children
        open_ += [] if number in proved or is_empty else children[number]


@pytest.mark.parametrize("seed", range(4))
def test_events_tell_a_proof(seed: int) -> None:
    rng = np.random.default_rng(seed)
    network = nets.mlp(rng, nets.gaussian(rng))
    values = network(torch.from_numpy(rng.uniform(-1, 1, size=(4096, 3)))).flatten().numpy()
    bound = Fraction(float(values.min() - 0.05 * (values.max() - values.min())))
    box = Box(np.full(3, -1.0), np.full(3, 1.0))
    query, heard = Query(network, Property(box, ((Row(((0, Fraction(1)),), bound),),))), list[Event]()
    (outcome,) = claims(InputSplit(batch=8), [query], 60.0, observer=lambda numbers, event: heard.append(event))
    assert outcome.verdict is Verdict.UNSAT
    assert_proven(query, heard)
    events = [event for event in heard if isinstance(event, BoxesBounded)]
    for event in events[:: max(1, len(events) // 8)]:
        x = event.boxes.lower + torch.rand(200, 1, 3, dtype=torch.float64) * (event.boxes.upper - event.boxes.lower)
        values = event.rows.values(network(x.flatten(0, 1)).unflatten(0, x.shape[:2]))
        gone = torch.stack([x < event.rest.lower, x > event.rest.upper])
        for side, _, at, place in gone.nonzero().unique(dim=0).tolist():
            beyond = gone[side, :, at, place]
            assert bool((values[beyond, at, event.row[side, at, 0, place]] > 0).all())
        assert bool((gone.any(0).any(2) | ~event.proved).all())


def test_a_query_that_asks_nothing_of_the_outputs_is_violated() -> None:
    rng = np.random.default_rng(0)
    network, box = nets.mlp(rng, nets.gaussian(rng)), Box(np.zeros(3), np.ones(3))
    nothing, unlikely = Property(box, ((),)), Property(box, ((Row(((0, Fraction(1)),), Fraction(-1000)),),))
    queries = [Query(network, prop) for prop in (nothing, unlikely)]
    found = claims(InputSplit(), queries, math.inf)
    assert [outcome.verdict for outcome in found] == [Verdict.SAT, Verdict.UNSAT]
    assert found[0].witness is not None and confirm(network, nothing, found[0].witness).confirmed
