"""All seeded faults, and the kinds of soundness test as they are held against each."""

from __future__ import annotations

from collections.abc import Callable

from .fault import Fault
from .faults_in_bounds import IN_BOUNDS
from .faults_in_numbers import IN_NUMBERS
from .faults_in_verifiers import IN_VERIFIERS
from .judge import Caught, HandedOn, Report
from .kinds import agreement, boundary, corners, planted, points
from .magnitudes import magnitudes
from .repeats import repeats
from .segments import segments
from .trees import trees

FAULTS: tuple[Fault, ...] = (*IN_BOUNDS, *IN_VERIFIERS, *IN_NUMBERS)

QUICK = {"ibp": 1.0, "crown": 1.0, "milp": 1.0, "smt-exact": 1.0, "alpha-crown": 1.0, "bab": 1.0}
"""Methods asked about every fault, with seconds for each case; those first that take least."""


def _corners(report: Report) -> None:
    corners(report=report)
    corners(smooth=True, report=report)


def _smooth_corners(report: Report) -> None:
    corners(smooth=True, report=report)


def _points(report: Report) -> None:
    # First whoever notices what nobody else would.
    points({HandedOn.name: 1.0, "auto": 1.0, **QUICK}, report=report)
    points(QUICK, decimal=True, report=report)


def _planted(report: Report) -> None:
    planted({"milp": 0.03}, sizes=(3,), report=report)
    planted({"milp": 0.03, "smt-exact": 0.03}, sizes=(6,), report=report)
    planted({**QUICK, "split": 1.0}, sizes=(3,), report=report)


def _agreement(report: Report) -> None:
    agreement({"split": 0.3, **QUICK, "smt-exact": 0.3}, offsets=(1e-3, 1e-9, -1e-9, -0.05, -0.4), report=report)


def _boundary(report: Report) -> None:
    boundary({"milp": 1.0, "smt-exact": 0.5}, kinds=("Relu", "LeakyRelu"), count=16, report=report)
    boundary({"crown": 1.0}, kinds=("LeakyRelu", "PRelu", "SteepPRelu"), count=240, report=report)
    boundary({"ibp": 1.0, "crown": 1.0}, count=70, report=report)


def _magnitudes(report: Report) -> None:
    magnitudes({"ibp": 1.0, "milp": 1.0, "smt-exact": 1.0}, count=270, report=report)


def _factors(report: Report) -> None:
    # Factors that vanish, and networks that are read all the same, are rare.
    magnitudes({"ibp": 1.0}, count=600, kinds=("batch normalisation", "GELU"), report=report)


def _trees(report: Report) -> None:
    trees(report=report)


def _segments(report: Report) -> None:
    segments(report=report)


def _repeats(report: Report) -> None:
    repeats(report=report)


KINDS: dict[str, Callable[[Report], None]] = {
    "corners": _corners,
    "smooth corners": _smooth_corners,
    "points": _points,
    "planted": _planted,
    "agreement": _agreement,
    "boundary": _boundary,
    "trees": _trees,
    "segments": _segments,
    "repeats": _repeats,
    "magnitudes": _magnitudes,
    "factors": _factors,
}
"""The kinds as they are held against a fault: the tests' own cases, fewer methods and less time."""


def caught_by(kind: str, fault: Fault) -> str | None:
    """The first thing that a kind of test has to say against the library with a fault in it."""
    with fault.applied():
        try:
            KINDS[kind](Report(stop_at_first=True))
        except Caught as caught:
            return str(caught)
    return None
