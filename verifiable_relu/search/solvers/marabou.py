"""Marabou (Wu et al., Marabou 2.0: A Versatile Formal Analyzer of Neural Networks, arXiv 2401.14461) as a method.

It gets the reduced system of branch and bound: unstable neurons with the intervals that this
package has proven. Its arithmetic is floating point with tolerances, and its *unsat* comes without a proof that is
checked here. A *sat* is claimed only where float64 confirms the point.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from verifiable_relu.errors import UnsupportedError
from verifiable_relu.search.bab.system import AffineForms, ReducedSystem
from verifiable_relu.search.budget import OVERTIME_S, TimeBudget
from verifiable_relu.search.outcomes import Outcome, Reason, Trust, Verdict
from verifiable_relu.search.question import BoundedQuery, CompleteMethod, all_excluded
from verifiable_relu.search.witness import WitnessCheck
from verifiable_relu.supervisor.workers import Worker


@dataclass(frozen=True)
class Marabou(CompleteMethod):
    """Verification by Marabou."""

    ascent_steps: int = 6

    name: ClassVar[str] = "marabou"

    def start(self) -> None:
        MARABOU.start()

    def decide(self, query: BoundedQuery, budget: TimeBudget) -> Outcome:
        witness = WitnessCheck(query.network, query.prop, self.name)
        told = "Marabou's claim, which is not verified independently"
        proved = Outcome(Verdict.UNSAT, Reason.PROVED, self.name, Trust.FLOAT, 0.0, detail=told)
        with torch.no_grad():
            reduced = query.reduced(budget.over)
            if reduced is None:
                return witness.anywhere()
            parts = reduced.parts.values()
            return all_excluded((self._reach(reduced.system, part.rows, witness, budget) for part in parts), proved)

    def _reach(self, system: ReducedSystem, rows: AffineForms, witness: WitnessCheck, budget: TimeBudget) -> Outcome:
        # Rows are loosened, so that tolerances exclude no point; then tightened where float64 denies Marabou's point.
        for loose in (1e-6, -1e-4):
            seconds = max(0.0, budget.left())
            answer, inputs = MARABOU.call((*_constraints(system, rows, loose), seconds), seconds + OVERTIME_S)
            if answer == "unsat" and loose > 0:
                return Outcome(Verdict.UNSAT, Reason.PROVED, self.name, Trust.FLOAT)
            if answer == "sat" and witness.reached(system.point(torch.from_numpy(inputs)[None])):
                return witness.found or witness.anywhere()
            if answer not in ("sat", "unsat"):
                reason = Reason.TIMEOUT if answer == "TIMEOUT" else Reason.ERROR
                return Outcome.unknown(reason, self.name, f"Marabou ended with '{answer}'")
        return Outcome.unknown(Reason.INCOMPLETE, self.name, "Marabou's point is within its tolerances of the boundary")


def _constraints(system: ReducedSystem, rows: AffineForms, loose: float) -> tuple[Any, ...]:
    """Return bounds of variables (variables, 2), slopes, and matrix and right-hand side of equations and inequalities.

    Variables are scaled inputs, pre-activations of unstable neurons, and their values.
    """
    slopes, lower, upper = system.slopes_below.numpy(), system.lower.numpy(), system.upper.numpy()
    if not ((slopes >= 0) & (slopes < 1)).all():
        raise UnsupportedError("Marabou takes ReLUs with slopes below zero from 0 to 1 alone")
    found = []
    for forms, own in ((system.neurons, -np.eye(system.size)), (rows, np.zeros((len(rows), system.size)))):
        found.append((np.hstack([forms.inputs.numpy(), own, forms.neurons.numpy()]), -forms.constant.numpy()))
    matrix, right = found[1]
    found[1] = matrix, right + loose * np.maximum(np.abs(right), np.abs(matrix).max(axis=1, initial=0.0))
    if not all(np.isfinite(numbers).all() for pair in found for numbers in pair):
        raise UnsupportedError("the numbers of the property or of the network are beyond float64")
    one = np.ones(system.inputs)
    bounds = [np.concatenate([-one, lower, slopes * lower]), np.concatenate([one, upper, upper])]
    return np.stack(bounds, 1), slopes, found


def solve(task: tuple[Any, ...]) -> tuple[str, np.ndarray]:
    """Return Marabou's answer (sat, unsat, TIMEOUT, UNKNOWN, ERROR), and the inputs if it is *sat*."""
    from maraboupy import MarabouCore

    bounds, slopes, constraints, seconds = task
    query, neurons, inputs = MarabouCore.InputQuery(), len(slopes), len(bounds) - 2 * len(slopes)
    query.setNumberOfVariables(len(bounds))
    for variable, (low, high) in enumerate(bounds.tolist()):
        query.setLowerBound(variable, low)
        query.setUpperBound(variable, high)
    for variable in range(inputs):
        query.markInputVariable(variable, variable)
    kinds = (MarabouCore.Equation.EQ, MarabouCore.Equation.LE)
    for (matrix, numbers), kind in zip(constraints, kinds, strict=True):
        for row, number in enumerate(numbers.tolist()):
            equation = MarabouCore.Equation(kind)
            for column in np.flatnonzero(matrix[row]).tolist():
                equation.addAddend(float(matrix[row, column]), column)
            equation.setScalar(number)
            query.addEquation(equation)
    for before, slope in enumerate(slopes.tolist(), inputs):
        if slope:
            MarabouCore.addLeakyReluConstraint(query, before, before + neurons, slope)
        else:
            MarabouCore.addReluConstraint(query, before, before + neurons)
    options = MarabouCore.Options()
    options._verbosity = 0
    # It takes whole seconds, and 0 for no limit.
    options._timeoutInSeconds = max(1, math.ceil(seconds))
    answer, values, _ = MarabouCore.solve(query, options, os.devnull)
    return answer, np.array([values[i] for i in range(inputs)] if answer == "sat" else [])


MARABOU = Worker(f"{__name__}:solve", library="maraboupy.MarabouCore")
