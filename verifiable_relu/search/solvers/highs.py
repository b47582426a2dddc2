"""HiGHS: what it is asked and what it answers, as plain data, and the calls of it, in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from verifiable_relu.supervisor.workers import Worker

if TYPE_CHECKING:
    import highspy

HIGHS = Worker(f"{__name__}:solve", library="highspy")
"""The process of HiGHS, whose function takes a ``HighsTask``, and for a conversation a ``HighsJudge``."""

HighsJudge = Callable[[np.ndarray], bool]
"""Takes the values (columns,) of each better solution of an integer program; True ends the search."""


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
    """One call of HiGHS.

    Attributes:
        program: the program to solve.
        options: HiGHS's, by its names.
        seconds: the time after which it is told to stop (its own ``time_limit`` goes by a clock that may be set).
    """

    program: MixedIntegerProgram
    options: Mapping[str, bool | int | float]
    seconds: float


@dataclass(frozen=True, eq=False)
class HighsResult:
    """HiGHS's answer.

    Attributes:
        status: HiGHS's ``HighsModelStatus``: ``kInterrupt`` where it was told to stop, ``kSolveError`` where it failed.
        values: (columns,) the last solution; empty if there is none.
        objective: its cost.
    """

    status: str
    values: np.ndarray
    objective: float


def solve(task: HighsTask, judge: HighsJudge | None = None) -> HighsResult:
    """Solve a program; of a run that failed, nothing is returned but the status ``kSolveError``."""
    import highspy
    from highspy import HighsModelStatus, HighsStatus

    end, solver, stopped = time.perf_counter() + task.seconds, highspy.Highs(), False
    for option, value in task.options.items():
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
