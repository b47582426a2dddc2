"""Marabou (Wu et al., Marabou 2.0: A Versatile Formal Analyzer of Neural Networks, arXiv 2401.14461) as a verifier.

It is asked about the reduced system of branch and bound: about unstable neurons and the bounds of these that this
package has found. Its arithmetic is floating point with tolerances, and its *unsat* comes without a proof that is
checked here. A *sat* is claimed only where float64 confirms the point.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from verifiable_relu.bounds import Ascent
from verifiable_relu.errors import UnsupportedError
from verifiable_relu.search.solvers.marabou import MARABOU
from verifiable_relu.verifiers.bab.folded import AffineForms, Folded
from verifiable_relu.verifiers.bab.search import WitnessCheck
from verifiable_relu.verifiers.bab.slopes import Slopes
from verifiable_relu.verifiers.bab.verifier import BoundedBoxes, Decider
from verifiable_relu.verifiers.base import PATIENCE, Outcome, Reason, TimeBudget, Trust, Verdict


@dataclass(frozen=True)
class Marabou(Decider):
    """Verification by Marabou; ``intermediate`` searches for bounds of the neurons that CROWN leaves unstable."""

    intermediate: Ascent = Ascent(steps=6)  # noqa: RUF009 -- frozen

    name: ClassVar[str] = "marabou"

    def start(self) -> None:
        MARABOU.start()

    def decide(self, bounds: BoundedBoxes, number: int, work: TimeBudget) -> Outcome:
        candidates = WitnessCheck(bounds.queries[number], self.name)
        result = Outcome(Verdict.UNSAT, Reason.PROVED, self.name, Trust.FLOAT, 0.0, detail="it is Marabou's word")
        with torch.no_grad():
            system = bounds.system(number, Slopes(steps=0), work)
            if system is None:
                return candidates.anywhere()
            for part in system.parts.values():
                outcome = self._reach(system.folded, part.rows, candidates, work)
                if outcome.verdict is Verdict.SAT or outcome.reason is Reason.TIMEOUT:
                    return outcome
                result = outcome if outcome.verdict is Verdict.UNKNOWN else result
        return result

    def _reach(self, system: Folded, rows: AffineForms, candidates: WitnessCheck, work: TimeBudget) -> Outcome:
        # Rows are loosened, so that tolerances exclude no point; then tightened where float64 denies Marabou's point.
        for loose in (1e-6, -1e-4):
            seconds = max(0.0, work.left())
            answer, inputs = MARABOU.call((*_constraints(system, rows, loose), seconds), seconds + PATIENCE)
            if answer == "unsat" and loose > 0:
                return Outcome(Verdict.UNSAT, Reason.PROVED, self.name, Trust.FLOAT)
            if answer == "sat" and candidates.reached(system.point(torch.from_numpy(inputs)[None])):
                return candidates.found or candidates.anywhere()
            if answer not in ("sat", "unsat"):
                reason = Reason.TIMEOUT if answer == "TIMEOUT" else Reason.ERROR
                return Outcome.unknown(reason, self.name, f"Marabou ended with '{answer}'")
        return Outcome.unknown(Reason.INCOMPLETE, self.name, "Marabou's point is within its tolerances of the boundary")


def _constraints(system: Folded, rows: AffineForms, loose: float) -> tuple[Any, ...]:
    """Return what ``solve`` is asked; raises ``UnsupportedError`` for other slopes than from 0 to 1, or huge numbers.

    Variables are scaled inputs, pre-activations of unstable neurons, and their values. Returned are their bounds
    (variables, 2), the slopes, and matrix and right-hand side of equations, and of rows that are at most that.
    """
    slopes, lower, upper = system.slope.numpy(), system.lower.numpy(), system.upper.numpy()
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
