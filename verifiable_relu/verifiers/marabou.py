"""Marabou (Wu et al., Marabou 2.0: A Versatile Formal Analyzer of Neural Networks, arXiv 2401.14461) as a verifier.

It is asked about the folded system of branch and bound: it is told the bounds of unstable neurons that this package has
found, and nothing of stable ones. Its arithmetic is floating point with tolerances, and what it says comes without a
proof that is checked here: *unsat* is labelled ``Trust.FLOAT``. The unsafe rows are loosened a little, so that its
tolerances are less likely to exclude a point. A *sat* is claimed only where float64 confirms the point.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from scipy import sparse

from verifiable_relu.bounds import Ascent
from verifiable_relu.errors import CallFailed, OutOfTime, UnsupportedError
from verifiable_relu.verifiers.bab import folded
from verifiable_relu.verifiers.bab.search import WitnessCheck
from verifiable_relu.verifiers.bab.slopes import Slopes
from verifiable_relu.verifiers.bab.verifier import BoundedBoxes, Decider
from verifiable_relu.verifiers.base import PATIENCE, Outcome, Reason, TimeBudget, Trust, Verdict, fault
from verifiable_relu.verifiers.solvers.marabou import MARABOU, MarabouResult, MarabouRows, MarabouTask


@dataclass(frozen=True)
class Marabou(Decider):
    """Verification by Marabou, which is an optional dependency.

    Attributes:
        loose: by this part of the largest coefficient, or of the bound, unsafe rows are loosened.
        deep: by this part they are tightened where a point was found that float64 does not confirm.
        intermediate: the search for bounds of the neurons that CROWN leaves unstable.
        process_memory: most bytes that Marabou's process may have resident, its libraries included; None for half of
            the machine's memory.
    """

    loose: float = 1e-6
    deep: float = 1e-4
    intermediate: Ascent = Ascent(steps=6)  # noqa: RUF009 -- frozen
    process_memory: int | None = None

    name: ClassVar[str] = "marabou"

    def start(self) -> None:
        MARABOU.start()

    def decide(self, bounds: BoundedBoxes, number: int, work: TimeBudget) -> Outcome:
        """Go through the open polytopes; sat ends the search, unsat needs all of them excluded."""
        candidates, nodes = WitnessCheck(bounds.queries[number], self.name), 0
        undecided: Outcome | None = None
        with torch.no_grad():
            system = bounds.system(number, Slopes(steps=0), work)
            if system is None:
                return candidates.anywhere()
            asked = _System(system.folded)
            for part in system.parts.values():
                for loose in (self.loose, -self.deep):
                    outcome, visited = self._reach(asked, part.rows, loose, candidates, work)
                    nodes += visited
                    # A point that is just feasible lies on the boundary, give or take its tolerances.
                    if outcome.reason is not Reason.INCOMPLETE:
                        break
                if loose < 0 and outcome.verdict is not Verdict.SAT:
                    outcome = self._near()
                if outcome.verdict is Verdict.SAT or outcome.reason is Reason.TIMEOUT:
                    return replace(
                        outcome, detail=f"{outcome.detail} after {nodes} sub-problems".strip(), subproblems=nodes
                    )
                if outcome.verdict is Verdict.UNKNOWN:
                    undecided = undecided or outcome
        proved = Outcome(Verdict.UNSAT, Reason.PROVED, self.name, Trust.FLOAT, 0.0)
        proved = replace(proved, detail=f"it is Marabou's word after {nodes} sub-problems")
        return replace(undecided or proved, subproblems=nodes)

    def _reach(
        self, asked: _System, rows: folded.AffineForms, loose: float, candidates: WitnessCheck, work: TimeBudget
    ) -> tuple[Outcome, int]:
        """Look for a point whose output lies in one polytope; also how many nodes that took."""
        seconds = work.left()
        if seconds <= 0:
            return Outcome.unknown(Reason.TIMEOUT, self.name, "the budget ran out"), 0
        # It takes whole seconds, and 0 for no limit.
        task = asked.task(rows, loose, max(1, math.ceil(seconds)))
        try:
            solved: MarabouResult = MARABOU.call(task, seconds + PATIENCE, self.process_memory)
        except (OutOfTime, MemoryError, CallFailed) as error:
            return fault(error, self.name), 0
        match solved.answer:
            case "unsat":
                return Outcome(Verdict.UNSAT, Reason.PROVED, self.name, Trust.FLOAT), solved.nodes
            case "sat":
                candidates.reached(asked.folded.point(torch.from_numpy(solved.values[None, : asked.folded.inputs])))
                return candidates.found or self._near(), solved.nodes
            case "TIMEOUT":
                return Outcome.unknown(Reason.TIMEOUT, self.name, "the budget ran out"), solved.nodes
            case answer:
                return Outcome.unknown(Reason.ERROR, self.name, f"Marabou ended with '{answer}'"), solved.nodes

    def _near(self) -> Outcome:
        detail = "Marabou's point is within its tolerances of the boundary, on the safe side"
        return Outcome.unknown(Reason.INCOMPLETE, self.name, detail)


class _System:
    """What Marabou is asked. Variables: scaled inputs, then all unstable neurons' pre-activations, then their values.

    Args:
        folded: the system.

    Raises:
        UnsupportedError: if a slope below zero is not in [0, 1).
    """

    def __init__(self, folded: folded.Folded) -> None:
        self.folded = folded
        self._slopes = folded.slope.numpy()
        if not ((self._slopes >= 0) & (self._slopes < 1)).all():
            raise UnsupportedError("Marabou takes ReLUs with slopes below zero from 0 to 1 alone")
        lower, upper, one = folded.lower.numpy(), folded.upper.numpy(), np.ones(folded.inputs)
        self._lower = np.concatenate([-one, lower, self._slopes * lower])
        self._upper = np.concatenate([one, upper, upper])
        self._equal = self._rows(folded.neurons, -sparse.eye_array(folded.size), -folded.neurons.constant.numpy())

    def _rows(self, forms: folded.AffineForms, z: sparse.sparray, numbers: np.ndarray) -> MarabouRows:
        """Forms over the variables, with coefficients of the pre-activations, beside their numbers.

        Raises:
            UnsupportedError: if a number is beyond float64.
        """
        matrix = sparse.hstack([forms.inputs.numpy(), z, forms.neurons.numpy()], format="csr")
        if not (np.isfinite(matrix.data).all() and np.isfinite(numbers).all()):
            raise UnsupportedError("the numbers of the property or of the network are beyond float64")
        return MarabouRows(matrix.indptr, matrix.indices, matrix.data, numbers)

    def task(self, unsafe: folded.AffineForms, loose: float, seconds: int) -> MarabouTask:
        """What Marabou is asked about the rows of one polytope, which are loosened."""
        numbers = -unsafe.constant.numpy()
        sizes = [part.abs().amax(1).numpy() for part in (unsafe.inputs, unsafe.neurons) if part.shape[1]]
        size = np.maximum.reduce([np.abs(numbers), *sizes])
        nothing = sparse.csr_array((len(numbers), self.folded.size))
        before = self.folded.inputs + np.arange(self.folded.size)
        relus = np.stack([before, before + self.folded.size], 1)
        most = self._rows(unsafe, nothing, numbers + loose * size)
        return MarabouTask(
            self._lower, self._upper, self.folded.inputs, self._equal, most, relus, self._slopes, seconds
        )
