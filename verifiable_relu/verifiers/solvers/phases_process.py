"""The search of z3 over phases, made in the process that ``phases.PHASES`` starts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import z3

from verifiable_relu.verifiers.solvers.phases import Advice, Adviser, Answer, Searched, Task
from verifiable_relu.verifiers.solvers.z3_process import LONGEST


def search(task: Task, adviser: Adviser | None = None) -> Searched:
    """Search for phases that satisfy all clauses.

    Raises:
        MemoryError: if z3 gets no more memory.
        z3.Z3Exception: if it fails otherwise.
    """
    try:
        return _search(task, adviser if task.advised else None)
    except z3.Z3Exception as error:
        if "out of memory" in str(error):
            raise MemoryError from None
        raise


def _search(task: Task, adviser: Adviser | None) -> Searched:
    end = time.perf_counter() + task.seconds
    context = z3.Context()
    # The solver for finite domains is z3's plain SAT solver; only the general one has user propagators.
    solver = z3.SolverFor("QF_FD", ctx=context) if adviser is None else z3.SimpleSolver(ctx=context)
    solver.set("random_seed", task.seed)
    literals = _Literals(task.neurons, context)
    for clause in task.clauses:
        solver.add(literals.clause(clause))
    propagator = None if adviser is None else _Propagator(solver, literals, adviser)
    solver.set("timeout", min(LONGEST, max(1, math.ceil(1e3 * min(end - time.perf_counter(), LONGEST)))))
    answer = solver.check()
    if propagator is not None and propagator.failed is not None:
        raise propagator.failed
    statistics = solver.statistics()
    counted = dict(statistics[i] for i in range(len(statistics)))
    said: Answer = "unsat" if answer == z3.unsat else "sat" if answer == z3.sat else "unknown"
    reason = solver.reason_unknown() if said == "unknown" else ""
    return Searched(said, reason, int(counted.get("decisions", 0)), int(counted.get("conflicts", 0)))


class _Literals:
    """The phases of neurons in z3.

    Args:
        neurons: how many there are.
        context: of z3.

    Attributes:
        atoms: that each neuron is active.
    """

    def __init__(self, neurons: int, context: z3.Context) -> None:
        self._context = context
        self.atoms = [z3.Bool(f"a{j}", context) for j in range(neurons)]
        self._negated = [z3.Not(atom) for atom in self.atoms]
        self._none = z3.BoolVal(False, context)

    def clause(self, clause: tuple[int, ...]) -> z3.BoolRef:
        """The disjunction of some literals."""
        if not clause:
            return self._none
        parts = [(self.atoms if number > 0 else self._negated)[abs(number) - 1].as_ast() for number in clause]
        # What z3.Or does besides takes most of the time of a search.
        array = (z3.Ast * len(parts))(*parts)
        return z3.BoolRef(z3.Z3_mk_or(self._context.ref(), len(parts), array), self._context)


class _Propagator(z3.UserPropagateBase):  # type: ignore[misc]
    """Keeps book of z3's assignment, and asks the adviser about it.

    A clause is handed over as a consequence of nothing: it is valid by itself, whatever the assignment is.

    Attributes:
        failed: what went wrong in a callback, since z3 does not let exceptions through.
    """

    def __init__(self, solver: z3.Solver, literals: _Literals, adviser: Adviser) -> None:
        super().__init__(solver)
        self.failed: BaseException | None = None
        self._solver, self._literals, self._adviser = solver, literals, adviser
        self._number = {atom.get_id(): number for number, atom in enumerate(literals.atoms)}
        self._phases = bytearray(len(literals.atoms))
        self._trail: list[int] = []
        self._levels: list[int] = []
        self._over = False
        self.add_fixed(self._guarded(self._assign))
        self.add_final(self._guarded(self._ask))
        self.add_decide(self._guarded(self._decide))
        for atom in literals.atoms:
            self.add(atom)

    def push(self) -> None:
        self._levels.append(len(self._trail))

    def pop(self, count: int) -> None:
        kept = self._levels[-count]
        del self._levels[-count:]
        for number in self._trail[kept:]:
            self._phases[number] = 0
        del self._trail[kept:]

    def _guarded(self, callback: Callable[..., object]) -> Callable[..., None]:
        def guarded(*arguments: Any) -> None:
            try:
                if not self._over:
                    callback(*arguments)
            except BaseException as error:
                self.failed = self.failed or error
                self._stop()

        return guarded

    def _stop(self) -> None:
        self._over = True
        self._solver.interrupt()

    def _assign(self, atom: z3.BoolRef, value: z3.BoolRef) -> None:
        number = self._number[atom.get_id()]
        self._phases[number] = 1 if z3.is_true(value) else 255
        self._trail.append(number)

    def _decide(self, *_: object) -> None:
        advice = self._ask()
        if advice.split and not advice.over:
            self.next_split(self._literals.atoms[abs(advice.split) - 1], 0, 1 if advice.split > 0 else -1)

    def _ask(self) -> Advice:
        advice = self._adviser(bytes(self._phases))
        for clause in advice.clauses:
            self.propagate(self._literals.clause(clause), [])
        if advice.over:
            self._stop()
        return advice
