"""What z3 is asked and what it answers, as plain data; its process is imported from nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from verifiable_relu.verifiers.solvers.process import Worker

Z3 = Worker("verifiable_relu.verifiers.solvers.z3_process:search")
"""The process of z3. Its function takes a ``Task`` and, for the conversation, a ``Judge``; it returns nothing."""


@dataclass(frozen=True)
class Task:
    """A conversation about one formula.

    Attributes:
        declarations: of all constants, in SMT-LIB.
        assertions: in SMT-LIB.
        options: z3's, by its names.
        seconds: after which it is told to stop.
    """

    declarations: str
    assertions: str
    options: Mapping[str, bool | int]
    seconds: float


@dataclass(frozen=True)
class Checked:
    """z3's answer to one check.

    Attributes:
        answer: *sat* if the assertions have a model.
        model: the values of the constants in a model; of one that is missing any will do.
        reason: why the answer is unknown.
    """

    answer: Literal["sat", "unsat", "unknown"]
    model: Mapping[str, Fraction]
    reason: str = ""


Judge = Callable[[Checked], str | None]
"""Told the answer to each check: returns assertions for the next check, added to the first ones alone; None ends it."""
