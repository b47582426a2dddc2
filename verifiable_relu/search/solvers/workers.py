"""Tasks for z3 and HiGHS and their answers, as plain data, and the calls, which run in processes of their own."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Literal

from verifiable_relu.supervisor.workers import Worker

if TYPE_CHECKING:  # Each process imports its library alone
    import highspy
    import numpy as np
    import z3

SMALL = 1e-12  # HiGHS ignores coefficients up to this
_LONGEST = 2**31  # Milliseconds that z3 takes for a limit; more would be none

HIGHS = Worker(f"{__name__}:solve_program", library="highspy")
Z3 = Worker(f"{__name__}:solve_formula", library="z3")


@dataclass(frozen=True, eq=False)
class MixedIntegerProgram:
    """Minimise cost·x where lower ≤ x ≤ upper and row_lower ≤ A·x ≤ row_upper, A being a sparse matrix by rows."""

    cost: np.ndarray
    lower: np.ndarray  # Bounds may be infinite
    upper: np.ndarray
    row_lower: np.ndarray
    row_upper: np.ndarray
    starts: np.ndarray  # Row i of A has the ``entries`` from ``starts[i]`` to ``starts[i + 1]``, in ``columns``
    columns: np.ndarray
    entries: np.ndarray
    integral: np.ndarray  # (columns,) bool: the variables that are integers


@dataclass(frozen=True, eq=False)
class HighsTask:
    """A program for HiGHS."""

    program: MixedIntegerProgram
    tolerance: float  # Of feasibility
    seconds: float  # After which it is told to stop: its own ``time_limit`` goes by a clock that may be set


@dataclass(frozen=True, eq=False)
class HighsResult:
    """HiGHS's answer."""

    status: str  # A ``HighsModelStatus``: ``kInterrupt`` where it was told to stop, ``kSolveError`` where it failed
    values: np.ndarray  # (columns,) of its last solution, empty if there is none
    objective: float  # The solution's cost


def solve_program(task: HighsTask, judge: Callable[[np.ndarray], bool] | None = None) -> HighsResult:
    """Solve a program; a run that failed returns only the status ``kSolveError``.

    ``judge`` takes the values (columns,) of each better solution of an integer program; True ends the search.
    """
    import highspy
    import numpy as np
    from highspy import HighsModelStatus, HighsStatus

    end, solver, stopped = time.perf_counter() + task.seconds, highspy.Highs(), False
    options: dict[str, float] = {"output_flag": False, "log_to_console": False, "threads": 1, "random_seed": 0}
    options |= {"small_matrix_value": SMALL, "mip_rel_gap": 0.0, "mip_abs_gap": 0.0}
    options |= {f"{kind}_feasibility_tolerance": task.tolerance for kind in ("primal", "dual", "mip")}
    for option, value in options.items():
        if solver.setOptionValue(option, value) != HighsStatus.kOk:
            raise ValueError(f"HiGHS does not take {value!r} for its option '{option}'")
    if solver.passModel(_highs_model(task.program)) == HighsStatus.kError:
        raise ValueError("HiGHS refuses the model")

    def improving(event: highspy.HighsCallbackEvent) -> None:
        nonlocal stopped
        assert judge is not None
        stopped = stopped or judge(np.array(event.data_out.mip_solution))

    def interrupt(event: highspy.HighsCallbackEvent) -> None:
        event.interrupt(stopped or time.perf_counter() >= end)

    if judge is not None:
        solver.cbMipImprovingSolution.subscribe(improving)
    solver.cbMipInterrupt.subscribe(interrupt)
    solver.cbSimplexInterrupt.subscribe(interrupt)
    # Being told to stop is an error to some of HiGHS's algorithms; a basis can be singular to its arithmetic.
    if solver.run() == HighsStatus.kError and solver.getModelStatus() != HighsModelStatus.kInterrupt:
        return HighsResult("kSolveError", np.zeros(0), 0.0)
    values = np.array(solver.getSolution().col_value)
    return HighsResult(solver.getModelStatus().name, values, solver.getObjectiveValue())


def _highs_model(program: MixedIntegerProgram) -> highspy.HighsLp:
    import highspy

    model, kinds = highspy.HighsLp(), (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
    model.num_col_, model.num_row_ = len(program.cost), len(program.row_lower)
    model.col_cost_, model.col_lower_, model.col_upper_ = program.cost, program.lower, program.upper
    model.row_lower_, model.row_upper_ = program.row_lower, program.row_upper
    matrix = model.a_matrix_
    matrix.format_ = highspy.MatrixFormat.kRowwise
    matrix.start_, matrix.index_, matrix.value_ = program.starts, program.columns, program.entries
    model.integrality_ = [kinds[integral] for integral in program.integral.astype(int)]
    return model


@dataclass(frozen=True)
class Z3Task:
    """A formula in SMT-LIB, for which a model is sought, and then another with the same signs."""

    declarations: str
    assertions: str
    pairs: Sequence[tuple[str, str]]  # Names of constants; one of each pair is zero
    deeper: Sequence[str]  # Further assertions, to be tried in turn once there is a model; each keeps the pairs' zeros
    seconds: float  # After which z3 is told to stop


@dataclass(frozen=True)
class Z3Answer:
    """z3's answer; constants that a model lacks may have any value."""

    answer: Literal["sat", "unsat", "unknown"]
    models: tuple[Mapping[str, Fraction], ...] = ()  # For *sat*: a model, and the first with further assertions, if any
    reason: str = ""  # For *unknown*


def solve_formula(task: Z3Task) -> Z3Answer:
    """Check a formula, and if it has a model, look for a deeper one."""
    import z3

    end = time.perf_counter() + task.seconds
    try:
        solver = z3.SolverFor("QF_LRA", ctx=z3.Context())
        solver.set("random_seed", 0)
        solver.set("ctrl_c", False)
        solver.from_string(task.declarations + task.assertions)
        answer = _checked(solver, end)
        if answer != z3.sat:
            return Z3Answer("unsat") if answer == z3.unsat else Z3Answer("unknown", reason=solver.reason_unknown())
        models = [_values(solver.model())]
        zeros = (second if models[0].get(first, 0) > 0 else first for first, second in task.pairs)
        fixed = "".join(f"(assert (<= {name} 0.0))\n" for name in zeros)
        for more in task.deeper:
            if len(models) > 1 or time.perf_counter() >= end:
                break
            solver.push()
            solver.add(z3.parse_smt2_string(task.declarations + fixed + more, ctx=solver.ctx))
            if _checked(solver, end) == z3.sat:
                models.append(_values(solver.model()))
            solver.pop()
        return Z3Answer("sat", tuple(models))
    except z3.Z3Exception as error:
        if "out of memory" in str(error):
            raise MemoryError from None
        raise


def _checked(solver: z3.Solver, end: float) -> z3.CheckSatResult:
    solver.set("timeout", min(_LONGEST, max(1, math.ceil(1e3 * min(end - time.perf_counter(), _LONGEST)))))
    answer: z3.CheckSatResult = solver.check()
    return answer


def _values(model: z3.ModelRef) -> dict[str, Fraction]:
    values = {declared.name(): model[declared] for declared in model.decls()}
    return {name: Fraction(v.numerator_as_long(), v.denominator_as_long()) for name, v in values.items()}
