"""The rules by which ``auto`` chooses methods, and what it says of them."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.support import nets
from tests.support.asking import claims
from tests.support.families import Random, cnn, points, transformer
from tests.unit.test_budget import deep, slow_clock
from verifiable_relu.bounds.backward import Relaxation
from verifiable_relu.bounds.linear_bounds import bound_by_crown, lower_of_rows
from verifiable_relu.campaign.runner import Case
from verifiable_relu.certify.command import explained
from verifiable_relu.errors import counted
from verifiable_relu.ir.interval import Interval
from verifiable_relu.ir.network import Network
from verifiable_relu.search.bounding import Crown
from verifiable_relu.search.budget import TimeBudget
from verifiable_relu.search.outcomes import Reason, Verdict
from verifiable_relu.search.portfolio import PORTFOLIO, ROUNDS, Auto, QueryFeatures, explanation
from verifiable_relu.search.registry import methods
from verifiable_relu.spec.property import Box, Property, Query, Row

COMPLETE = {"bab", "split", "milp", "smt-exact"}


def every() -> list[QueryFeatures]:
    inputs, neurons = (0, 1, 5, 20, 21, 784), (0, 10, 40, 41, 200, 5000, math.inf)
    found = itertools.product(inputs, neurons, (False, True), (False, True))
    return [QueryFeatures(i, n, linear, linear and splittable and n < math.inf) for i, n, linear, splittable in found]


def chosen(features: QueryFeatures) -> list[str]:
    return [stage.method for stage in PORTFOLIO if stage.takes(features) and features.unstable <= stage.most]


def test_every_query_is_attacked_once_and_goes_to_some_method_that_can_prove_it() -> None:
    for features in every():
        names = chosen(features)
        assert names.count("attack") == 1, features
        assert set(names) & {*COMPLETE, "alpha-crown"}, features
        assert ("bab" in names) == features.splittable, features
        assert not (features.splittable and not features.narrow and "alpha-crown" in names), features


def test_the_last_complete_method_has_all_the_time_that_is_left() -> None:
    for features in every():
        stages = [s for s in PORTFOLIO if s.takes(features) and features.unstable <= s.most and s.method in COMPLETE]
        assert all(0 < stage.share(features) <= 1 for stage in stages), features
        assert not stages or stages[-1].share(features) == 1, features


def test_the_explanation_names_the_methods_in_their_order_and_why() -> None:
    for features in every():
        first, *lines, last = explanation(features).splitlines()
        assert re.fullmatch(r"  then, .*: (none|[a-z, -]+)", last) and (features.inputs > 0) == ("attack" in last)
        assert counted(features.inputs, "varying input") in first
        found = [
            re.fullmatch(r"  (\d+)\. (\S+), with up to (\d+)% of the time(?: left)?: .{20,}", line) for line in lines
        ]
        assert [int(match[1]) for match in found if match] == list(range(1, len(lines) + 1))
        assert [match[2] for match in found if match] == ["crown", *chosen(features)]
        large = explanation(replace(features, large=True)).splitlines()
        assert large[1].startswith("  1. attack, with up to 5% of the time: ") and large[2][5:] == lines[0][5:]


def test_a_large_network_is_attacked_before_it_is_bounded() -> None:
    chain = nets.Chain(2)
    chain.linear(torch.ones(50_000, 2), torch.zeros(50_000))
    chain.act()
    chain.linear(torch.ones(1, 50_000) / 50_000, torch.zeros(1))
    network = chain.network("large")
    for threshold, verdict, stages in ((1, Verdict.SAT, {"attack"}), (-1, Verdict.UNSAT, {"attack", "crown"})):
        query = Query(network, Property(Box(-np.ones(2), np.ones(2)), ((Row(((0, 1),), Fraction(threshold)),),)))
        (outcome,) = claims(Auto(), [query], 600.0)
        assert outcome.verdict is verdict and set(outcome.seconds) - {"confirm"} == stages, outcome


def test_every_stage_is_a_method_that_can_be_asked_by_itself() -> None:
    assert {stage.method for stage in (*PORTFOLIO, *ROUNDS)} <= set(methods())


def bordering(network: Network, part: float) -> Query:
    """Whether the first output gets below CROWN's bound (part 0), its least value at some points (1), or between.

    Each input is in an interval of radius 0.3.
    """
    center = Random(1).normal(1, network.input_size)
    box = Interval((center - 0.3).float().double(), (center + 0.3).float().double())
    least = float(network(points(box, 500).flatten(0, 1)).flatten(1)[:, 0].min())
    row = torch.eye(network.output_size)[:1].double()
    bound = float(lower_of_rows(bound_by_crown(Relaxation(network, box)), row)[0])
    threshold = Fraction(bound + part * (least - bound) - 1e-6)
    return Query(
        network,
        Property(Box(*(end.flatten().numpy() for end in (box.lower, box.upper))), ((Row(((0, 1),), threshold),),)),
    )


KINDS = {
    "attention": transformer,
    "smooth": lambda: nets.mlp(
        np.random.default_rng(0), nets.gaussian(np.random.default_rng(0)), "GELU", (8, 20, 20, 20, 3)
    ),
    "convolutions": cnn,
    "deep": lambda: deep(20),
}


@pytest.mark.parametrize("kind", KINDS)
def test_auto_is_undecided_only_at_its_limit(kind: str) -> None:
    """Every reading of the clock takes a hundredth of the limit, so that no method gets far."""
    clock, looks = slow_clock(0.01)
    (outcome,) = claims(Auto(), [bordering(KINDS[kind](), 0.5)], 1.0, clock=clock)
    assert outcome.verdict is not Verdict.UNKNOWN or (outcome.reason is Reason.TIMEOUT and looks() >= 100), outcome


@pytest.mark.parametrize("kind", KINDS)
def test_auto_decides_what_crown_decides_within_nearly_the_limit(kind: str) -> None:
    query = bordering(KINDS[kind](), 0.0)
    clock, looks = slow_clock(1.0)
    (alone,) = claims(Crown(), [query], math.inf, clock=clock)
    assert alone.verdict is Verdict.UNSAT
    (outcome,) = claims(Auto(), [query], 1.1 * looks() + 10, clock=slow_clock(1.0)[0])
    assert outcome.verdict is Verdict.UNSAT, (looks(), outcome)


@pytest.mark.thorough
def test_without_a_limit_auto_ends() -> None:
    (outcome,) = claims(Auto(), [boundary()], math.inf)
    assert outcome.verdict is not Verdict.SAT and outcome.reason is not Reason.TIMEOUT


def boundary() -> Query:
    """Whether the sum of |x_i| over a box around zero is at most zero, which it is at one point only, and strictly."""
    chain = nets.Chain(2)
    chain.linear(torch.tensor([[1.0, 0], [-1, 0], [0, 1], [0, -1]]), torch.zeros(4))
    chain.act()
    chain.linear(torch.ones(1, 4), torch.zeros(1))
    unsafe = (Row(((0, 1),), 0, strict=True),)  # type: ignore[arg-type]
    return Query(chain.network("boundary"), Property(Box(-np.ones(2), np.ones(2)), (unsafe,)))


def test_the_explanation_of_a_query_that_crown_decides_says_so() -> None:
    query = boundary()
    far = Property(query.property.box, ((Row(((0, 1),), -5),),))  # type: ignore[arg-type]
    assert Auto().explain(Query(query.network, far), TimeBudget(5)) == "CROWN's bounds decide"


def test_an_instance_of_several_boxes_is_explained_box_by_box() -> None:
    query = boundary()
    case = Case("n.onnx", "p.vnnlib", (query, query), 5.0)
    lines = list(explained(case, TimeBudget()))
    assert lines[0] == "box 1 of 2:" and "box 2 of 2:" in lines
    assert lines[1] == Auto().explain(query, TimeBudget(5)).splitlines()[0]
