"""z3: what it is asked and what it answers, as plain data, and the calls of it, in a process of its own."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Literal

from verifiable_relu.supervisor.workers import Worker

if TYPE_CHECKING:
    import z3

_LONGEST = 2**31
"""Milliseconds that z3 takes for a limit; more would be none."""

Z3 = Worker(f"{__name__}:solve", library="z3")
"""The process of z3."""


@dataclass(frozen=True)
class Z3Task:
    """A formula in SMT-LIB, for which a model is sought, and then another with the same signs.

    Attributes:
        declarations, assertions: the formula.
        pairs: the names of constants of which one is zero.
        deeper: further assertions, to be tried in turn once there is a model; each keeps the pairs' zeros.
        seconds: the time after which z3 is told to stop.
    """

    declarations: str
    assertions: str
    pairs: Sequence[tuple[str, str]]
    deeper: Sequence[str]
    seconds: float


@dataclass(frozen=True)
class Z3Answer:
    """z3's answer; for *sat* a model, and the first one with further assertions, if any; for *unknown* a reason.

    Constants that a model lacks may have any value.
    """

    answer: Literal["sat", "unsat", "unknown"]
    models: tuple[Mapping[str, Fraction], ...] = ()
    reason: str = ""


def solve(task: Z3Task) -> Z3Answer:
    """Check a formula, and if it has a model, look for a deeper one."""
    import z3

    end = time.perf_counter() + task.seconds
    try:
        solver = z3.SolverFor("QF_LRA", ctx=z3.Context())
        solver.set("random_seed", 0)
        solver.set("ctrl_c", False)
        solver.from_string(task.declarations + task.assertions)
        answer = _check(solver, end)
        if answer == z3.unsat:
            return Z3Answer("unsat")
        if answer != z3.sat:
            return Z3Answer("unknown", reason=solver.reason_unknown())
        models = [_values(solver.model())]
        zeros = (second if models[0].get(first, 0) > 0 else first for first, second in task.pairs)
        fixed = "".join(f"(assert (<= {name} 0.0))\n" for name in zeros)
        for more in task.deeper:
            if len(models) > 1 or time.perf_counter() >= end:
                break
            solver.push()
            solver.add(z3.parse_smt2_string(task.declarations + fixed + more, ctx=solver.ctx))
            if _check(solver, end) == z3.sat:
                models.append(_values(solver.model()))
            solver.pop()
        return Z3Answer("sat", tuple(models))
    except z3.Z3Exception as error:
        if "out of memory" in str(error):
            raise MemoryError from None
        raise


def _check(solver: z3.Solver, end: float) -> z3.CheckSatResult:
    solver.set("timeout", min(_LONGEST, max(1, math.ceil(1e3 * min(end - time.perf_counter(), _LONGEST)))))
    answer: z3.CheckSatResult = solver.check()
    return answer


def _values(model: z3.ModelRef) -> dict[str, Fraction]:
    values = {declared.name(): model[declared] for declared in model.decls()}
    return {name: Fraction(v.numerator_as_long(), v.denominator_as_long()) for name, v in values.items()}
