"""Weights of a conjunction's rows: what no row proves over a box, a sum of rows may."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import linprog

from tests.support import nets
from tests.support.asking import claims
from verifiable_relu.bounds import Bounds
from verifiable_relu.network.nodes import Sigmoid
from verifiable_relu.spec.property import Box, Property, Query, Row
from verifiable_relu.spec.row_batch import RowBatch
from verifiable_relu.verifiers import boxes
from verifiable_relu.verifiers.base import Verdict
from verifiable_relu.verifiers.boxes import KnownBounds, RowBounder, sums
from verifiable_relu.verifiers.split import InputSplit


def rows_of(counts: list[int]) -> RowBatch:
    """A property of polytopes with so many rows each, every row over an output of its own."""
    outputs = iter(range(sum(counts)))
    unsafe = tuple(tuple(Row(((next(outputs), Fraction(1)),), Fraction(0)) for _ in range(count)) for count in counts)
    return RowBatch.from_properties([Property(Box(np.zeros(1), np.ones(1)), unsafe)], sum(counts))


@pytest.mark.parametrize("seed", range(4))
def test_weights_are_nearly_as_good_as_those_of_a_linear_program(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = rows_of([1, 2, 4, 3])
    center, reach = torch.tensor(rng.normal(size=10)), torch.tensor(rng.normal(size=(10, 5)))
    found = sums(rows, center - reach.abs().sum(1), lambda part: (center[part], reach[part]))
    polytopes = [] if found is None else found.polytope.tolist()
    assert 0 not in polytopes, "a polytope of one row has no sums"
    for part in range(1, 4):
        mine = (rows.polytope == part).nonzero().flatten()
        single = float((center - reach.abs().sum(1))[mine].max())
        # The least t such that at some point no row is above t: the dual of the best weights.
        columns = np.column_stack([-reach[mine].numpy(), -np.ones(len(mine))])
        program = linprog([0] * 5 + [1], columns, -center[mine].numpy(), bounds=[(-1, 1)] * 5 + [(None, None)])
        if part in polytopes:
            assert found is not None
            total = found.matrix[polytopes.index(part)]
            assert (total >= 0).all() and total.sum() == total[mine].sum()
            weights = total / total.sum()
            value = float((weights * center).sum() - (weights[:, None] * reach).sum(0).abs().sum())
            assert program.fun - 0.3 * (program.fun - single) <= value <= program.fun + 1e-9
        else:
            assert program.fun <= single + 0.15 * abs(single)


@pytest.mark.thorough
def test_a_conjunction_that_no_row_proves_takes_one_box(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    network = nets.mlp(rng, nets.gaussian(rng))
    both = Row(((0, Fraction(1)),), Fraction(0)), Row(((0, Fraction(-1)),), Fraction(-1))
    query = Query(network, Property(Box(np.full(3, -100.0), np.full(3, 100.0)), (both,)))
    (found,) = claims(InputSplit(), [query], math.inf)
    assert (found.verdict, found.subproblems) == (Verdict.UNSAT, 1)
    monkeypatch.setattr(boxes, "sums", lambda *_: None)
    (without,) = claims(InputSplit(), [query], math.inf)
    assert without.verdict is Verdict.UNSAT and (without.subproblems or 0) > 1


def contradicted(monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """How often something was known of a larger box, and how often a point of its part contradicted that."""
    rng, generator, counts = np.random.default_rng(3), torch.Generator().manual_seed(0), [0, 0]
    network = nets.mlp(rng, nets.gaussian(rng), kind=Sigmoid).to(torch.float64)
    plain = RowBounder.bound

    def inside(box: Bounds, count: int) -> torch.Tensor:
        share = torch.rand(count, *box.lower.shape, dtype=torch.float64, generator=generator)
        return box.lower + share * (box.upper - box.lower)

    def watched(self: RowBounder, box: Bounds, rows: RowBatch, known: Any, *rest: Any) -> Any:
        for x in () if known is None else inside(box, 20):
            values = self.network.values(x)
            before = {i: values[self.network.nodes[i].inputs[0]] for i in known}
            counts[0] += len(box.lower)
            counts[1] += any(bool(((before[i] < b.lower) | (before[i] > b.upper)).any()) for i, b in known.items())
        return plain(self, box, rows, known, *rest)

    monkeypatch.setattr(RowBounder, "bound", watched)
    queries = []
    for low in (-4.0, -3.0, -2.0, 0.0, 1.0):
        box = Box(np.full(3, low), np.full(3, low + 4.0))
        y = network(inside(Bounds(torch.full((1, 3), low), torch.full((1, 3), low + 4.0)), 2000)[:, 0])[:, 0]
        # A little below what is reached, so that the whole box proves nothing and its parts do.
        bound = Fraction(float(y.min() - 0.002 * (y.max() - y.min())))
        queries.append(Query(network, Property(box, ((Row(((0, Fraction(1)),), bound),),))))
    claims(InputSplit(), queries, 1.0)
    return counts[0], counts[1]


def test_what_is_known_of_a_box_holds_for_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, wrong = contradicted(monkeypatch)
    assert asked > 100 and not wrong


def test_a_box_that_is_given_what_is_known_of_another_one_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = KnownBounds.over
    monkeypatch.setattr(KnownBounds, "over", lambda self, within: plain(self, within.roll(1)))
    assert contradicted(monkeypatch)[1]
