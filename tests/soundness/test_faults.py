"""Each seeded fault is caught; on the library as it is, the same checks are silent."""

from __future__ import annotations

import pytest

from tests.support.draws import some
from tests.support.hooks import Hook, modules

from .fault import Fault
from .faults import FAULTS, KINDS, caught_by
from .judge import Report

ELSEWHERE = ("points", "planted", "trees", "smooth corners")
"""Kinds of which ``test_kinds``, ``unit/test_bab.py`` and the other corners show it, which ask about the same cases."""


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ELSEWHERE])
def test_nothing_is_found_where_no_fault_is_seeded(kind: str) -> None:
    report = Report(of=some)
    KINDS[kind](report)
    assert report.problems == []


FIRST = {fault.best: fault for fault in reversed(FAULTS)}
"""The first fault of each kind."""


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=fault.name, marks=[pytest.mark.quick] if fault in FIRST.values() else [])
        for fault in FAULTS
    ],
)
def test_a_seeded_fault_is_caught(fault: Fault) -> None:
    assert caught_by(fault.best, fault) is not None


def test_a_fault_is_seeded_in_public_names_and_leaves_nothing_behind() -> None:
    def library() -> dict[tuple[str, str], int]:
        classes = {v for m in modules() for v in vars(m).values() if isinstance(v, type)}
        places = [*modules(), *(c for c in classes if c.__module__.startswith("verifiable_relu."))]
        return {(str(place), name): id(value) for place in places for name, value in vars(place).items()}

    before = library()
    for fault in FAULTS:
        with fault.applied():
            pass
    assert library() == before
    with pytest.raises(ValueError, match="public names alone"), Hook("bounds.slack:LineStep._slopes", max).applied():
        pass
