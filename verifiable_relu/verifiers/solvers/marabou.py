"""Marabou: what it is asked and what it answers, as plain data, and the calls of it, in a process of its own."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from verifiable_relu.supervisor.workers import Worker

MARABOU = Worker(f"{__name__}:solve", library="maraboupy.MarabouCore")
"""The process of Marabou. Its function takes a ``MarabouTask``."""


@dataclass(frozen=True, eq=False)
class MarabouRows:
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
class MarabouTask:
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
    equal: MarabouRows
    most: MarabouRows
    relus: np.ndarray
    slopes: np.ndarray
    seconds: int


@dataclass(frozen=True, eq=False)
class MarabouResult:
    """Marabou's answer.

    Attributes:
        answer: its word for how it ended: ``sat``, ``unsat``, ``TIMEOUT``, ``UNKNOWN``, ``ERROR`` or another.
        values: (variables,) of *sat*; empty otherwise.
        nodes: how many states of its search tree it has visited.
    """

    answer: str
    values: np.ndarray
    nodes: int


def solve(task: MarabouTask) -> MarabouResult:
    """What Marabou says of a system of constraints."""
    from maraboupy import MarabouCore

    query = MarabouCore.InputQuery()
    query.setNumberOfVariables(len(task.lower))
    for variable, (low, high) in enumerate(zip(task.lower.tolist(), task.upper.tolist(), strict=True)):
        query.setLowerBound(variable, low)
        query.setUpperBound(variable, high)
    for variable in range(task.inputs):
        query.markInputVariable(variable, variable)
    for rows, kind in ((task.equal, MarabouCore.Equation.EQ), (task.most, MarabouCore.Equation.LE)):
        for row, number in enumerate(rows.numbers.tolist()):
            equation = MarabouCore.Equation(kind)
            part = slice(rows.starts[row], rows.starts[row + 1])
            for column, entry in zip(rows.columns[part].tolist(), rows.entries[part].tolist(), strict=True):
                equation.addAddend(entry, column)
            equation.setScalar(number)
            query.addEquation(equation)
    for (before, after), slope in zip(task.relus.tolist(), task.slopes.tolist(), strict=True):
        if slope:
            MarabouCore.addLeakyReluConstraint(query, before, after, slope)
        else:
            MarabouCore.addReluConstraint(query, before, after)
    options = MarabouCore.Options()
    options._verbosity = 0
    options._timeoutInSeconds = task.seconds
    answer, values, statistics = MarabouCore.solve(query, options, os.devnull)
    found = np.array([values[i] for i in range(len(task.lower))]) if answer == "sat" else np.zeros(0)
    nodes = statistics.getUnsignedAttribute(MarabouCore.StatisticsUnsignedAttribute.NUM_VISITED_TREE_STATES)
    return MarabouResult(answer, found, int(nodes))
