"""The rules by which ``auto`` chooses methods, and what it says of them."""

from __future__ import annotations

import itertools
import math
import re

import numpy as np
import pytest
import torch

from tests.support import nets
from tests.support.asking import claims
from verifiable_relu.campaign.explaining import explained
from verifiable_relu.campaign.runner import Case
from verifiable_relu.errors import InputError
from verifiable_relu.network.nodes import Relu
from verifiable_relu.spec.property import Box, Property, Query, Row
from verifiable_relu.verifiers.auto import STAGES, Auto, Traits, explanation
from verifiable_relu.verifiers.base import Limits, Reason, Verdict
from verifiable_relu.verifiers.registry import make, methods

COMPLETE = {"bab", "split", "milp", "smt"}


def every() -> list[Traits]:
    inputs, neurons = (0, 1, 5, 20, 21, 784), (0, 10, 40, 41, 200, 5000, math.inf)
    found = itertools.product(inputs, neurons, (False, True), (False, True))
    return [Traits(i, n, linear, linear and foldable and n < math.inf) for i, n, linear, foldable in found]


def chosen(traits: Traits) -> list[str]:
    return [stage.method for stage in STAGES if stage.takes(traits) and traits.unstable <= stage.most]


def test_every_query_is_attacked_once_and_goes_to_some_method_that_can_prove_it() -> None:
    for traits in every():
        names = chosen(traits)
        assert names.count("attack") == 1, traits
        assert set(names) & {*COMPLETE, "alpha-crown"}, traits
        assert ("bab" in names) == traits.foldable, traits
        assert not (traits.foldable and not traits.narrow and "alpha-crown" in names), traits


def test_the_last_complete_method_has_all_the_time_that_is_left() -> None:
    for traits in every():
        stages = [s for s in STAGES if s.takes(traits) and traits.unstable <= s.most and s.method in COMPLETE]
        assert all(0 < stage.share(traits) <= 1 for stage in stages), traits
        assert not stages or stages[-1].share(traits) == 1, traits


def test_the_explanation_names_the_methods_in_their_order_and_why() -> None:
    for traits in every():
        first, *lines = explanation(traits).splitlines()
        assert f"{traits.inputs} inputs vary" in first
        found = [
            re.fullmatch(r"  (\d+)\. (\S+), with up to (\d+)% of the time(?: left)?: .{20,}", line) for line in lines
        ]
        assert [int(match[1]) for match in found if match] == list(range(1, len(lines) + 1))
        assert [match[2] for match in found if match] == ["crown", *chosen(traits)]


def test_every_stage_is_a_method_that_can_be_asked_by_itself() -> None:
    assert {stage.method for stage in STAGES} <= set(methods())


def boundary() -> Query:
    """Whether the sum of |x_i| over a box around zero is at most zero, which it is at one point only, and strictly."""
    chain = nets.Chain((2,))
    chain.linear(torch.tensor([[1.0, 0], [-1, 0], [0, 1], [0, -1]]), torch.zeros(4))
    chain.add(Relu, (4,))
    chain.linear(torch.ones(1, 4), torch.zeros(1))
    unsafe = (Row(((0, 1),), 0, strict=True),)  # type: ignore[arg-type]
    return Query(chain.network("boundary"), Property(Box(-np.ones(2), np.ones(2)), (unsafe,)))


@pytest.mark.thorough
def test_auto_goes_through_the_stages_that_it_explains() -> None:
    query = boundary()
    told = Auto().explain(query, Limits(5))
    (outcome,) = claims(Auto(), [query], 3.0)
    assert outcome.verdict is not Verdict.SAT
    assert outcome.reason in (Reason.PROVED, Reason.INCOMPLETE, Reason.TIMEOUT, Reason.UNCONFIRMED)
    named = re.findall(r"\d+\. (\S+),", told)
    spent = {name for name in outcome.seconds if name in named}
    assert {"crown", "attack"} <= spent
    assert named[:2] == ["crown", "attack"]


def test_the_explanation_of_a_query_that_crown_decides_says_so() -> None:
    query = boundary()
    far = Property(query.property.box, ((Row(((0, 1),), -5),),))  # type: ignore[arg-type]
    assert Auto().explain(Query(query.network, far), Limits(5)) == "CROWN's bounds decide"


def test_an_instance_of_several_boxes_is_explained_box_by_box() -> None:
    query = boundary()
    case = Case("n.onnx", "p.vnnlib", (query, query), 5.0)
    lines = list(explained(case, Auto(), Limits()))
    assert lines[0] == "box 1 of 2:" and "box 2 of 2:" in lines
    assert lines[1] == Auto().explain(query, Limits(5)).splitlines()[0]
    with pytest.raises(InputError, match="only the method 'auto'"):
        list(explained(case, make("crown"), Limits()))
