"""Time budgets: how queries share and spend them, and how the methods keep to them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.asking import claims, query_batch
from tests.support.flat_nets import relu_layers
from verifiable_relu.errors import OutOfTime
from verifiable_relu.ir.network import Network
from verifiable_relu.search.batch import QueryBatch
from verifiable_relu.search.budget import TimeBudget
from verifiable_relu.search.outcomes import Reason, Verdict, fault
from verifiable_relu.search.registry import make
from verifiable_relu.spec.property import Box, Property, Query, Row


def budget(*seconds: float, owner: Sequence[int] | None = None, **limits: Any) -> QueryBatch:
    """A batch whose queries do not matter."""
    count = len(seconds if owner is None else owner)
    return query_batch([asked(deep(1), -1.0)] * count, seconds, owner, **limits)


def test_queries_with_a_common_time_limit_spend_it_together() -> None:
    whole = budget(10.0, 3.0, owner=[0, 0, 1])
    whole.charge([0, 2], 2.0)
    assert [whole.left([i]) for i in range(3)] == [9.0, 9.0, 2.0]
    assert whole.left(range(3)) == 11.0
    whole.charge([2], 5.0)
    assert whole.left([2]) == 0.0


def test_a_share_ends_before_the_whole() -> None:
    assert budget(math.inf).part([0], share=0.5).left([0]) == math.inf
    whole = budget(8.0, 8.0)
    part = whole.part([1], share=0.25)
    inner = part.part([1])
    inner.charge([1], 1.5)
    assert part.left([1]) == 0.5
    assert whole.left([1]) == 6.5
    inner.charge([1], 1.5)
    assert part.left([1]) == 0.0
    assert whole.left([1]) == 5.0


def slow_clock(step: float) -> tuple[Callable[[], float], Callable[[], int]]:
    """A clock of which every reading takes ``step`` seconds, and a function that counts the readings."""
    looks = count()
    latest = [0]

    def look() -> float:
        latest[0] = next(looks)
        return latest[0] * step

    return look, lambda: latest[0]


def deep(layers: int = 40) -> Network:
    """A network of many small layers, all of whose neurons are unstable over a wide box."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(3, 3, generator=generator).tolist() for _ in range(layers)]
    return relu_layers(*((weight, [0.0] * 3) for weight in weights), ([[1.0] * 3], [0.0]))


def asked(network: Network, threshold: float) -> Query:
    """The query whether the sum of the outputs, none of which is negative, is below ``threshold``."""
    box = Box(-np.ones(3), np.ones(3))
    return Query(network, Property(box, ((Row(((0, Fraction(1)),), Fraction(threshold)),),)))


def test_work_is_told_to_stop_and_ended_if_it_goes_on() -> None:
    seconds = [1.0]
    work = TimeBudget(clock=lambda: seconds[0]).begun(2.0)
    assert not work.stop() and not work.over() and work.share(0.25).left() == 0.5
    seconds[0] = 3.25
    assert work.stop() and work.over()
    seconds[0] = 3.75
    with pytest.raises(OutOfTime):
        work.stop()


@pytest.mark.parametrize("method", ["ibp", "crown-ibp", "crown", "alpha-crown", "split", "attack"])
def test_no_method_goes_on_long_after_its_budget(method: str) -> None:
    query = asked(deep(), -1.0)
    verifier = make(method)
    clock, looks = slow_clock(0.125)
    (outcome,) = claims(verifier, [query], 1.0, clock=clock)
    # Intervals alone end in time.
    assert outcome.reason is (Reason.PROVED if "ibp" in method else Reason.TIMEOUT)
    # Eight looks are the budget, four the time to stop in; others are for the accounts.
    assert looks() < 25


def test_a_box_whose_bounding_was_cut_short_is_not_taken_for_proved() -> None:
    network = deep(3)
    reached = asked(network, float(network(torch.zeros(1, 3))[0, 0]) + 1e-9)
    for last in range(1, 60, 3):
        # All time is over after that many looks at the clock.
        looks = count()
        (outcome,) = claims(make("split"), [reached], 1.0, clock=lambda: 0.0 if next(looks) < last else 100.0)  # noqa: B023
        assert outcome.verdict is not Verdict.UNSAT


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OutOfTime(), Reason.TIMEOUT),
        (MemoryError(), Reason.MEMORY),
        (RecursionError("maximum recursion depth exceeded"), Reason.UNSUPPORTED),
        (torch.OutOfMemoryError("CUDA out of memory"), Reason.MEMORY),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), Reason.MEMORY),
        (RuntimeError("shapes differ"), Reason.ERROR),
    ],
)
def test_an_exception_is_recorded_with_the_reason_that_it_means(error: Exception, reason: Reason) -> None:
    assert fault(error, "m").reason is reason


def test_work_is_charged_by_the_clock_and_so_are_its_parts() -> None:
    now = [100.0]
    whole = budget(10.0, 5.0, clock=lambda: now[0])
    part = whole.part([1], 0.5)
    with part.work() as work:
        now[0] += 2.0
        assert work.elapsed() == 2.0 and work.left() == 0.5
    assert part.left([1]) == 0.5 and whole.left([1]) == 3.0 and whole.left([0]) == 10.0
    with whole.work():
        now[0] += 4.0
    assert whole.left([0]) == 8.0 and whole.left([1]) == 1.0
