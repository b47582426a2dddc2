"""What Marabou is asked and what it answers, as plain data; its process is imported from nowhere else."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from verifiable_relu.verifiers.solvers.process import Worker

MARABOU = Worker("verifiable_relu.verifiers.solvers.marabou_process:solve")
"""The process of Marabou. Its function takes a ``Task``."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a sparse matrix, each with a number: matrix·variables = number, or ≤ number.

    Attributes:
        starts: (rows + 1,) where each row starts in the next two arrays.
        columns: (entries,) the variable of each entry.
        entries: (entries,).
        numbers: (rows,).
    """

    starts: np.ndarray
    columns: np.ndarray
    entries: np.ndarray
    numbers: np.ndarray


@dataclass(frozen=True, eq=False)
class Task:
    """Find variables between bounds that fulfil equations, inequalities, and ReLUs.

    Attributes:
        lower, upper: (variables,) finite bounds.
        inputs: the first so many variables are inputs.
        equal: equations.
        most: inequalities.
        relus: (neurons, 2) the variables before and after each ReLU.
        slopes: (neurons,) the slope of each below zero; zero for ReLU itself.
        seconds: after which Marabou is told to stop, whole ones.
    """

    lower: np.ndarray
    upper: np.ndarray
    inputs: int
    equal: Rows
    most: Rows
    relus: np.ndarray
    slopes: np.ndarray
    seconds: int


@dataclass(frozen=True, eq=False)
class Solved:
    """Marabou's answer.

    Attributes:
        answer: its word for how it ended: ``sat``, ``unsat``, ``TIMEOUT``, ``UNKNOWN``, ``ERROR`` or another.
        values: (variables,) of *sat*; empty otherwise.
        nodes: how many states of its search tree it has visited.
    """

    answer: str
    values: np.ndarray
    nodes: int
