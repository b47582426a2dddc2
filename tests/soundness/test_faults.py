"""Each seeded fault is caught; on the library as it is, the same checks are silent."""

from __future__ import annotations

import pytest

from .fault import Fault
from .faults import FAULTS, KINDS, caught_by
from .judge import Report

ELSEWHERE = ("points", "planted")
"""Kinds of which ``test_kinds`` shows it, where all methods are asked about the same cases."""


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ELSEWHERE])
def test_nothing_is_found_where_no_fault_is_seeded(kind: str) -> None:
    report = Report()
    KINDS[kind](report)
    assert report.problems == []


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_seeded_fault_is_caught(fault: Fault) -> None:
    assert caught_by(fault.best, fault) is not None
