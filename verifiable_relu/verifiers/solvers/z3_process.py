"""Calls of z3, made in the process that ``z3.Z3`` starts."""

from __future__ import annotations

import math
import time
from fractions import Fraction

import z3

from verifiable_relu.verifiers.solvers.z3 import Checked, Judge, Task

LONGEST = 2**31
"""Milliseconds that z3 takes for a limit; more would be none."""


def search(task: Task, judge: Judge) -> None:
    """Check a formula, and then, as long as the judge says so, the formula with further assertions.

    Raises:
        MemoryError: if z3 gets no more memory.
        z3.Z3Exception: if it fails otherwise.
    """
    try:
        _search(task, judge)
    except z3.Z3Exception as error:
        if "out of memory" in str(error):
            raise MemoryError from None
        raise


def _search(task: Task, judge: Judge) -> None:
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
