"""Heads that keep the order of outputs: what is answered without them, and what is not."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.support.module_kinds import Does
from verifiable_relu.campaign.runner import HEADLESS, Case, run
from verifiable_relu.network import from_torch, hardened
from verifiable_relu.network.build import Builder
from verifiable_relu.network.head import headless
from verifiable_relu.network.nodes import Sigmoid, Smooth
from verifiable_relu.spec.property import Box, Property, Query, Row
from verifiable_relu.verifiers.base import Trust, Verdict
from verifiable_relu.verifiers.registry import make


def module(head: Callable[[Tensor], Tensor], outputs: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, outputs), Does(head))


HEADS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda z: torch.softmax(z, -1),
    "log softmax": lambda z: torch.log_softmax(z, -1),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "sigmoid of softmax": lambda z: torch.sigmoid(torch.softmax(z, -1)),
}
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmin": lambda z: torch.softmax(-z, -1) * torch.tensor([1.0, 2.0, 1.0, 1.0]),
    "softmax of halves": lambda z: torch.softmax(z.reshape(-1, 2, 2), -1).reshape(-1, 4),
    "softmax reordered": lambda z: torch.softmax(z, -1)[:, [1, 0, 2, 3]],
    "square": lambda z: z * z,
    "one minus softmax": lambda z: 1 - torch.softmax(z, -1),
    "cosine": torch.cos,
    "gelu": nn.functional.gelu,
}
"""Functions that change the order of outputs or the outputs that are compared."""


@pytest.mark.parametrize("outputs", [2, 4])
@pytest.mark.parametrize("name", HEADS)
def test_a_head_that_keeps_the_order_is_found(name: str, outputs: int) -> None:
    network = from_torch(module(HEADS[name], outputs), (3,))
    found = headless(network)
    assert found is not None and found.piecewise_linear
    x = torch.randn(50, 3, dtype=torch.float64)
    torch.testing.assert_close(HEADS[name](found(x)), network(x))


@pytest.mark.parametrize("name", OTHERS)
def test_what_may_change_the_order_stays(name: str) -> None:
    network = from_torch(module(OTHERS[name]), (3,))
    found = headless(network)
    x = torch.randn(400, 3, dtype=torch.float64)
    if found is not None:
        assert torch.equal(found(x).flatten(1).argsort(-1), network(x).flatten(1).argsort(-1))


def query(head: Callable[[Tensor], Tensor], row: Row) -> Query:
    return Query(from_torch(module(head), (3,)), Property(Box(np.full(3, -0.1), np.full(3, 0.1)), ((row,),)))


def compared(first: int, second: int, bound: Fraction = Fraction(0)) -> Row:
    return Row(((first, Fraction(1)), (second, Fraction(-1))), bound)


def test_only_comparisons_do_without_the_head() -> None:
    for row in (
        compared(0, 1, Fraction(1, 10)),
        Row(((0, Fraction(1)),), Fraction(0)),
        Row(((0, Fraction(1)), (1, Fraction(-2))), Fraction(0)),
        Row(((0, Fraction(1)), (1, Fraction(-1)), (2, Fraction(1))), Fraction(0)),
    ):
        asked = query(HEADS["softmax"], row)
        assert not asked.property.only_compares
        assert asked.without_head is asked
    asked = query(HEADS["softmax"], compared(0, 1))
    assert asked.without_head.network.piecewise_linear
    assert asked.without_head.network.onnx == asked.network.onnx


@pytest.mark.thorough
def test_verdicts_say_that_the_head_was_left_out_and_counterexamples_are_of_the_whole_network() -> None:
    cases = []
    for first in range(4):
        for second in range(4):
            if first != second:
                cases.append(Case("net", "spec", (query(HEADS["softmax"], compared(first, second)),), 60.0))
    results = run(cases, make("bab"))
    for case, result in zip(cases, results, strict=True):
        assert result.verdict in (Verdict.SAT, Verdict.UNSAT) and HEADLESS in result.detail
        if result.verdict is Verdict.SAT:
            assert result.trust is Trust.EXACT
            assert result.outputs is not None and sum(result.outputs) == pytest.approx(1)
            x = torch.tensor([float(v) for v in result.witness or ()], dtype=torch.float64)
            y = case.queries[0].network(x.reshape(1, 3))[0].tolist()
            assert case.queries[0].property.violated([Fraction(v) for v in y])
    assert {result.verdict for result in results} == {Verdict.SAT, Verdict.UNSAT}


def test_families_of_networks_have_heads_too() -> None:
    asked = query(HEADS["sigmoid"], compared(0, 1))
    family = Query(hardened(asked.network, 160.0), asked.property)
    found = family.without_head.network
    assert found is not family.network and [node.op for node in found.nodes].count("Hardened") == 1


@pytest.mark.parametrize("change", ["weight", "error"])
@pytest.mark.parametrize("log", [False, True])
def test_differences_that_are_nearly_those_of_a_softmax_of_two_are_no_head(log: bool, change: str) -> None:
    sign = -1.0 if log else 1.0
    weight = sign * torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=torch.float64)
    if change == "weight":
        weight[0, 0] *= 1 + 1e-12
    build = Builder((2,))
    at = build.linear(0, weight, None, "differences", 1e-12 if change == "error" else 0.0)
    if log:
        softplus = Smooth(name="f", inputs=(at,), shape=(2,), function="Softplus", parameter=torch.ones(()))
        at = build.scale(build.append(softplus), "minus", scale=torch.tensor(-1.0))
    else:
        at = build.append(Sigmoid(name="f", inputs=(at,), shape=(2,)))
    found = headless(build.network(at, name="nearly"))
    # A sigmoid is a head by itself; the differences before it stay.
    assert (found is None) if log else (found is not None and len(found.nodes) == 2)


def test_a_network_that_is_nothing_but_a_head_has_none() -> None:
    for head in HEADS.values():
        network = from_torch(Does(head), (3,))
        found = headless(network)
        x = torch.randn(20, 3)
        assert found is None or torch.equal(found(x).argsort(-1), network(x).argsort(-1))
