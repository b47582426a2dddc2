"""What HiGHS is asked and what it answers, as plain data; its process is imported from nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from verifiable_relu.verifiers.solvers.process import Worker

HIGHS = Worker("verifiable_relu.verifiers.solvers.highs_process:solve")
"""The process of HiGHS. Its function takes a ``Task``, and for a conversation a ``Judge``."""

Judge = Callable[[np.ndarray], bool]
"""Told the values (columns,) of each better solution of an integer program; True ends the search."""


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
class Task:
    """One call of HiGHS.

    Attributes:
        program: to solve.
        options: HiGHS's, by its names.
        seconds: after which it is told to stop, by a clock that nobody sets (its own ``time_limit`` goes by the clock
            that tells the time of day).
        ray: whether a ray is asked for where the program is linear and infeasible.
    """

    program: Program
    options: Mapping[str, bool | int | float]
    seconds: float
    ray: bool = False


@dataclass(frozen=True, eq=False)
class Solved:
    """What HiGHS found.

    Attributes:
        status: HiGHS's name for how it ended: ``kOptimal``, ``kInfeasible``, ``kInterrupt`` where it was told to stop,
            ``kSolveError`` where its arithmetic failed, or another of its ``HighsModelStatus``.
        values: (columns,) the last solution; empty if there is none.
        objective: its cost.
        duals: (rows,) the multipliers of the rows; empty if there are none.
        ray: (rows,) multipliers of the rows that show that a program is infeasible; None if there are none.
    """

    status: str
    values: np.ndarray
    objective: float
    duals: np.ndarray
    ray: np.ndarray | None = None
