"""Each seeded fault is seen; on the library as it is, the same checks are silent."""

from __future__ import annotations

import pytest

from tests.support.draws import some
from tests.support.hooks import modules

from .fault import Fault
from .faults import FAULTS, KINDS, caught_by
from .judge import Report

ELSEWHERE = ("engine", "points", "planted", "boundary")
"""Kinds of which ``test_kinds`` and ``unit/test_engine_soundness.py`` show it, which ask about the same cases."""


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ELSEWHERE])
def test_nothing_is_found_where_no_fault_is_seeded(kind: str) -> None:
    report = Report(of=some)
    KINDS[kind](report)
    assert report.problems == []


SLOW = ("two functions", "repeated", "two layers", "without their bounds", "taken for active", "HiGHS runs", "window")
"""Parts of the names of faults that take seconds to be seen, and that have a quicker sibling each."""


def marks(fault: Fault) -> list[pytest.MarkDecorator]:
    first = next(each for each in FAULTS if each.best == fault.best)
    slow = any(part in fault.name for part in SLOW)
    return [pytest.mark.quick] * (fault is first) + [pytest.mark.seldom] * slow


@pytest.mark.parametrize("fault", [pytest.param(fault, id=fault.name, marks=marks(fault)) for fault in FAULTS])
def test_a_seeded_fault_is_seen(fault: Fault) -> None:
    assert caught_by(fault.best, fault) is not None


def test_faults_are_seeded_at_every_seam_and_leave_nothing_behind() -> None:
    seams = {fault.name.partition(":")[0] for fault in FAULTS}
    assert seams == {"relax", "back-propagate", "concretise", "close", "read"}

    def library() -> dict[tuple[str, str], int]:
        classes = {v for m in modules() for v in vars(m).values() if isinstance(v, type)}
        places = [*modules(), *(c for c in classes if c.__module__.startswith("verifiable_relu."))]
        return {(str(place), name): id(value) for place in places for name, value in vars(place).items()}

    before = library()
    for fault in FAULTS:
        with fault.applied():
            pass
    assert library() == before
