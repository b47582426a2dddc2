"""z3: what it is asked and what it answers, as plain data, and the calls of it, in a process of its own."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Literal

from verifiable_relu.supervisor.workers import Worker

if TYPE_CHECKING:
    import z3

LONGEST = 2**31
"""Milliseconds that z3 takes for a limit; more would be none."""

Z3 = Worker(f"{__name__}:search", library="z3")
"""The process of z3. Its function takes a ``Z3Task`` and, for the conversation, a ``Z3Judge``; it returns nothing."""


@dataclass(frozen=True)
class Z3Task:
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


Z3Judge = Callable[[Checked], str | None]
"""Takes the answer to each check; returns assertions for the next one, added to the first ones alone; None ends it."""


def search(task: Z3Task, judge: Z3Judge) -> None:
    """Check a formula, and then, as long as the judge says so, the formula with further assertions.

    Raises:
        MemoryError: if z3 gets no more memory.
        z3.Z3Exception: if it fails otherwise.
    """
    import z3

    try:
        _search(task, judge)
    except z3.Z3Exception as error:
        if "out of memory" in str(error):
            raise MemoryError from None
        raise


def _search(task: Z3Task, judge: Z3Judge) -> None:
    import z3

    end = time.perf_counter() + task.seconds
    solver = z3.SolverFor("QF_LRA", ctx=z3.Context())
    for option, value in task.options.items():
        solver.set(option, value)
    solver.from_string(task.declarations + task.assertions)
    more = judge(_check(solver, end))
    while more is not None:
        solver.push()
        solver.add(z3.parse_smt2_string(task.declarations + more, ctx=solver.ctx))
        more = judge(_check(solver, end))
        solver.pop()


def _check(solver: z3.Solver, end: float) -> Checked:
    import z3

    solver.set("timeout", min(LONGEST, max(1, math.ceil(1e3 * min(end - time.perf_counter(), LONGEST)))))
    answer = solver.check()
    if answer == z3.sat:
        return Checked("sat", _values(solver.model()))
    if answer == z3.unsat:
        return Checked("unsat", {})
    return Checked("unknown", {}, solver.reason_unknown())


def _values(model: z3.ModelRef) -> dict[str, Fraction]:
    values = {}
    for declared in model.decls():
        value = model[declared]
        values[declared.name()] = Fraction(value.numerator_as_long(), value.denominator_as_long())
    return values
