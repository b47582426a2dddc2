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


QUICK = {
    "rows through a product of matrices go to the first factor twice",
    "outputs that repeat others left out with the repeated neurons",
    "lower and upper swapped in an affine image",
    "stale intermediate bound in a relaxation: that of the batch's first box",
    "the line through a kink rounded out of the slopes on either side",
    "a root that serves every query of its network",
    "smt reads unsat from an unknown status",
    "a bias dropped where rows are folded",
    "a half of a smooth neuron's segment forgotten",
    "constants computed in the file's own number type",
    "the factor of a batch normalisation that underflows taken for zero",
}
"""A fault of each kind that is soon caught."""

SLOW = {
    "stale intermediate bound in the encoding: that of the batch's first box",
    "rounding of rows by intervals left out",
    "the line above a maximum below its other candidates",
    "rows' own lower lines taken for those of all rows at the point",
    "smt reads unsat from a time-out",
    "milp reads infeasible from a time-out",
    "milp reads infeasible from an unknown status",
    "strict for non-strict in the SMT formula",
    "a bias dropped in the encoding",
}
"""Faults that take seconds each to be caught, and each of which has a quicker sibling."""


def marks(fault: Fault) -> list[pytest.MarkDecorator]:
    return [pytest.mark.quick] * (fault.name in QUICK) + [pytest.mark.seldom] * (fault.name in SLOW)


@pytest.mark.parametrize(
    "fault",
    [pytest.param(fault, id=fault.name, marks=marks(fault)) for fault in FAULTS],
)
def test_a_seeded_fault_is_caught(fault: Fault) -> None:
    assert caught_by(fault.best, fault) is not None


def test_a_fault_of_each_kind_is_quick() -> None:
    assert {fault.best for fault in FAULTS if fault.name in QUICK} == set(KINDS)


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
