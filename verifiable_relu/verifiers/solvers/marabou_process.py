"""Calls of Marabou, made in the process that ``marabou.MARABOU`` starts."""

from __future__ import annotations

import os

import numpy as np
from maraboupy import MarabouCore

from verifiable_relu.verifiers.solvers.marabou import Rows, Solved, Task


def solve(task: Task) -> Solved:
    """What Marabou says of a system of constraints."""
    query = MarabouCore.InputQuery()
    query.setNumberOfVariables(len(task.lower))
    for variable, (low, high) in enumerate(zip(task.lower.tolist(), task.upper.tolist(), strict=True)):
        query.setLowerBound(variable, low)
        query.setUpperBound(variable, high)
    for variable in range(task.inputs):
        query.markInputVariable(variable, variable)
    _add(query, task.equal, MarabouCore.Equation.EQ)
    _add(query, task.most, MarabouCore.Equation.LE)
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
    return Solved(answer, found, int(nodes))


def _add(query: MarabouCore.InputQuery, rows: Rows, kind: MarabouCore.Equation.EquationType) -> None:
    for row, number in enumerate(rows.numbers.tolist()):
        equation = MarabouCore.Equation(kind)
        part = slice(rows.starts[row], rows.starts[row + 1])
        for column, entry in zip(rows.columns[part].tolist(), rows.entries[part].tolist(), strict=True):
            equation.addAddend(entry, column)
        equation.setScalar(number)
        query.addEquation(equation)
