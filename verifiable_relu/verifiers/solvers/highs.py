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
"""The process of HiGHS. Its function takes a ``HighsTask``, and for a conversation a ``HighsJudge``."""

HighsJudge = Callable[[np.ndarray], bool]
"""Takes the values (columns,) of each better solution of an integer program; True ends the search."""


@dataclass(frozen=True, eq=False)
class Program:
    """Minimise cost·x where lower ≤ x ≤ upper and row_lower ≤ A·x ≤ row_upper, A being a sparse matrix by rows.

    Attributes:
        cost: (columns,).
        lower: (columns,), −inf for none.
        upper: (columns,), inf for none.
        row_lower: (rows,), −inf for none.
        row_upper: (rows,), inf for none.
        starts: (rows + 1,) where each row of A starts in the next two arrays.
        columns: (entries,) the column of each entry of A.
        entries: (entries,).
        integral: (columns,) bool: which variables are integers.
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
        program: to solve.
        options: HiGHS's, by its names.
        seconds: after which it is told to stop, by a clock that nobody sets (its own ``time_limit`` goes by the clock
            that tells the time of day).
    """

    program: Program
    options: Mapping[str, bool | int | float]
    seconds: float


@dataclass(frozen=True, eq=False)
class HighsResult:
    """What HiGHS found.

    Attributes:
        status: HiGHS's name for how it ended: ``kOptimal``, ``kInfeasible``, ``kInterrupt`` where it was told to stop,
            ``kSolveError`` where its arithmetic failed, or another of its ``HighsModelStatus``.
        values: (columns,) the last solution; empty if there is none.
        objective: its cost.
    """

    status: str
    values: np.ndarray
    objective: float


_FAILED = HighsResult("kSolveError", np.zeros(0), 0.0)


def solve(task: HighsTask, judge: HighsJudge | None = None) -> HighsResult:
    """Solve a program.

    Args:
        task: the program and how to solve it.
        judge: asked about each better solution of an integer program.

    Returns:
        What HiGHS found; of a run that failed, the status ``kSolveError`` and nothing else, whatever HiGHS left behind.

    Raises:
        ValueError: if HiGHS does not take an option or the program.
    """
    import highspy
    from highspy import HighsModelStatus, HighsStatus

    end = time.perf_counter() + task.seconds
    solver = highspy.Highs()
    for option, value in task.options.items():
        if solver.setOptionValue(option, value) != HighsStatus.kOk:
            raise ValueError(f"HiGHS does not take {value!r} for its option '{option}'")
    if solver.passModel(_model(task.program)) == HighsStatus.kError:
        raise ValueError("HiGHS refuses the model")
    stopped = False

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
        return _FAILED
    values = np.array(solver.getSolution().col_value)
    return HighsResult(solver.getModelStatus().name, values, solver.getObjectiveValue())


def _model(program: Program) -> highspy.HighsLp:
    """The program in HiGHS's form."""
    import highspy

    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = len(program.cost), len(program.row_lower)
    model.col_cost_ = program.cost
    model.col_lower_, model.col_upper_ = program.lower, program.upper
    model.row_lower_, model.row_upper_ = program.row_lower, program.row_upper
    matrix = model.a_matrix_
    matrix.format_ = highspy.MatrixFormat.kRowwise
    matrix.start_, matrix.index_, matrix.value_ = program.starts, program.columns, program.entries
    if program.integral.any():
        kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
        model.integrality_ = [kinds[integral] for integral in program.integral.astype(int)]
    return model
