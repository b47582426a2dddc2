"""Calls of HiGHS, made in the process that ``highs.HIGHS`` starts."""

from __future__ import annotations

import time
from typing import Any

import highspy
import numpy as np
from highspy import HighsModelStatus, HighsStatus

from verifiable_relu.verifiers.solvers.highs import Judge, Program, Solved, Task

_FAILED = Solved("kSolveError", np.zeros(0), 0.0, np.zeros(0))


def solve(task: Task, judge: Judge | None = None) -> Solved:
    """Solve a program.

    Args:
        task: the program and how to solve it.
        judge: asked about each better solution of an integer program.

    Returns:
        What HiGHS found; of a run that failed, the status ``kSolveError`` and nothing else, whatever HiGHS left behind.

    Raises:
        ValueError: if HiGHS does not take an option or the program.
    """
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
    if not _runs(solver):
        return _FAILED
    ray = None
    if task.ray and solver.getModelStatus() == HighsModelStatus.kInfeasible and time.perf_counter() < end:
        # Presolving may find that out without a ray.
        solver.setOptionValue("presolve", "off")
        if not _runs(solver):
            return _FAILED
        untyped: Any = solver
        found, exists, multipliers = untyped.getDualRay()
        if exists and found == HighsStatus.kOk:
            ray = np.array(multipliers)
    solution = solver.getSolution()
    duals = np.array(solution.row_dual) if solution.dual_valid else np.zeros(0)
    status = solver.getModelStatus().name
    return Solved(status, np.array(solution.col_value), solver.getObjectiveValue(), duals, ray)


def _runs(solver: highspy.Highs) -> bool:
    """Let HiGHS run; False if it failed, as it does where a basis is singular to its arithmetic."""
    # Being told to stop is an error to some of HiGHS's algorithms.
    return solver.run() != HighsStatus.kError or solver.getModelStatus() == HighsModelStatus.kInterrupt


def _model(program: Program) -> highspy.HighsLp:
    """The program in HiGHS's form."""
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
