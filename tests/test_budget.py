"""The ledger of budgets, and what ``auto`` makes of it."""

from __future__ import annotations

import math

from verifiable_relu.verifiers.base import Budget


def test_queries_of_one_purse_pay_together() -> None:
    budget = Budget([10.0, 3.0], [0, 0, 1])
    budget.charge([0, 2], 2.0)
    assert [budget.remaining(i) for i in range(3)] == [9.0, 9.0, 2.0]
    assert budget.total() == 11.0
    budget.charge([2], 5.0)
    assert budget.remaining(2) == 0.0


def test_a_part_draws_on_the_whole() -> None:
    budget = Budget([10.0, 4.0], [0, 1, 1])
    part = budget.subset([2, 0])
    part.charge([0, 1], 2.0)
    assert [budget.remaining(i) for i in range(3)] == [9.0, 3.0, 3.0]
    assert [part.remaining(i) for i in range(2)] == [3.0, 9.0]
    budget.charge([1], 3.0)
    assert part.remaining(0) == 0.0


def test_a_share_ends_before_the_whole() -> None:
    budget = Budget.each(8.0, 2)
    part = budget.subset([1], share=0.25)
    inner = part.subset([0])
    inner.charge([0], 1.5)
    assert part.remaining(0) == 0.5
    assert part.total() == 0.5
    assert budget.remaining(1) == 6.5
    inner.charge([0], 1.5)
    assert part.remaining(0) == 0.0
    assert budget.remaining(1) == 5.0


def test_no_limit_stays_none() -> None:
    budget = Budget([math.inf])
    part = budget.subset([0], share=0.5)
    part.charge([0], 1e9)
    assert part.remaining(0) == math.inf
