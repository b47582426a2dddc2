"""HiGHS: what it is asked and what it answers, as plain data, and the calls of it, in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from verifiable_relu.supervisor.workers import Worker

if TYPE_CHECKING:
    import highspy

SMALL = 1e-12
"""Heuristic: HiGHS ignores coefficients up to this."""

HIGHS = Worker(f"{__name__}:solve", library="highspy")
"""The process of HiGHS."""


@dataclass(frozen=True, eq=False)
class MixedIntegerProgram:
    """Minimise cost·x where lower ≤ x ≤ upper and row_lower ≤ A·x ≤ row_upper, A being a sparse matrix by rows.

    Bounds may be infinite. Row i of A has the ``entries`` from ``starts[i]`` to ``starts[i + 1]``, in ``columns`` of
    these numbers. ``integral`` (columns,) are the variables that are integers.
    """

    cost: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    row_lower: np.ndarray
    row_upper: np.ndarray
    starts: np.ndarray
    columns: np.ndarray
    entries: np.ndarray
    integral: np.ndarray


@dataclass(frozen=True, eq=False)
class HighsTask:
    """A program, HiGHS's tolerance of feasibility, and the seconds after which it is told to stop.

    HiGHS's own ``time_limit`` goes by a clock that may be set.
    """

    program: MixedIntegerProgram
    tolerance: float
    seconds: float


@dataclass(frozen=True, eq=False)
class HighsResult:
    """HiGHS's ``HighsModelStatus``, its last solution (columns,), empty if there is none, and the solution's cost.

    The status is ``kInterrupt`` where it was told to stop, ``kSolveError`` where it failed.
    """

    status: str
    values: np.ndarray
    objective: float


def solve(task: HighsTask, judge: Callable[[np.ndarray], bool] | None = None) -> HighsResult:
    """Solve a program; of a run that failed, nothing is returned but the status ``kSolveError``.

    ``judge`` takes the values (columns,) of each better solution of an integer program; True ends the search.
    """
    import highspy
    from highspy import HighsModelStatus, HighsStatus

    end, solver, stopped = time.perf_counter() + task.seconds, highspy.Highs(), False
    options: dict[str, float] = {"output_flag": False, "log_to_console": False, "threads": 1, "random_seed": 0}
    options |= {"small_matrix_value": SMALL, "mip_rel_gap": 0.0, "mip_abs_gap": 0.0}
    options |= {f"{kind}_feasibility_tolerance": task.tolerance for kind in ("primal", "dual", "mip")}
    for option, value in options.items():
        if solver.setOptionValue(option, value) != HighsStatus.kOk:
            raise ValueError(f"HiGHS does not take {value!r} for its option '{option}'")
    if solver.passModel(_model(task.program)) == HighsStatus.kError:
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


def _model(program: MixedIntegerProgram) -> highspy.HighsLp:
    import highspy

    model, kinds = highspy.HighsLp(), (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
    model.num_col_, model.num_row_ = len(program.cost), len(program.row_lower)
    model.col_cost_ = program.cost
    model.col_lower_, model.col_upper_ = program.lower, program.upper
    model.row_lower_, model.row_upper_ = program.row_lower, program.row_upper
    matrix = model.a_matrix_
    matrix.format_ = highspy.MatrixFormat.kRowwise
    matrix.start_, matrix.index_, matrix.value_ = program.starts, program.columns, program.entries
    model.integrality_ = [kinds[integral] for integral in program.integral.astype(int)]
    return model
