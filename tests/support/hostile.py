"""Functions that misbehave as a foreign library can (hang, crash, eat memory), and solvers that do so on some queries.

``tests.support.hostile:KIND`` misbehaves on every call. ``highs_KIND`` and ``z3_KIND`` stand in for the functions of
HiGHS's and z3's processes: they misbehave on problems with ``MARKED`` inputs and solve all others. The module imports
little, because every process that a test starts imports it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from verifiable_relu.errors import CallFailed, OutOfTime

MARKED = 5

SLEEP = ctypes.PyDLL(None).sleep
"""The function sleep of C, which holds Python's global interpreter lock when it is called through ``PyDLL``."""

MEMORY = 300 << 20
"""The limit, in bytes, for functions that eat memory; the libraries by themselves take less."""


class Told:
    """A task of an executor whose result is known, or which fails."""

    def __init__(self, result: Any) -> None:
        self.result = result

    def __call__(self, report: Callable[[Any], Any]) -> Any:
        report(f"at {self.result}")
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


def hangs() -> None:
    """Sleep for 600 s without holding the interpreter lock."""
    time.sleep(600)


def hangs_in_python() -> None:
    while True:
        pass


def hangs_holding_the_interpreter() -> None:
    """Sleep for 600 s while holding the interpreter lock, so that no other thread of the process runs Python code."""
    SLEEP(600)


def hangs_deaf() -> None:
    """Sleep for 600 s with all signals blocked that can be blocked."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    time.sleep(600)


def stops() -> None:
    """Stop the process with SIGSTOP, as a debugger does."""
    os.kill(os.getpid(), signal.SIGSTOP)


def crashes() -> None:
    ctypes.string_at(0)


def aborts() -> None:
    os.abort()


def leaves() -> None:
    os._exit(0)


def is_killed() -> None:
    """Kill the process, as a system that is short of memory does."""
    os.kill(os.getpid(), signal.SIGKILL)


def raises() -> None:
    raise ArithmeticError("nothing works")


def eats_memory() -> None:
    """Allocate memory bit by bit, without end."""
    eaten = []
    while True:
        eaten.append(b"x" * (1 << 20))


def eats_memory_at_once() -> None:
    """Allocate memory in one call that holds the interpreter lock."""
    b"x" * (16 << 30)


def gets_no_memory() -> None:
    raise MemoryError


KINDS: dict[Callable[[], None], tuple[type[Exception], str]] = {
    hangs: (OutOfTime, "timeout"),
    hangs_in_python: (OutOfTime, "timeout"),
    hangs_holding_the_interpreter: (OutOfTime, "timeout"),
    hangs_deaf: (OutOfTime, "timeout"),
    stops: (OutOfTime, "timeout"),
    crashes: (CallFailed, "error"),
    aborts: (CallFailed, "error"),
    leaves: (CallFailed, "error"),
    is_killed: (CallFailed, "error"),
    raises: (CallFailed, "error"),
    eats_memory: (MemoryError, "memory"),
    eats_memory_at_once: (MemoryError, "memory"),
    gets_no_memory: (MemoryError, "memory"),
}
"""For each function the class of the exception that the caller gets, and the reason of the query's *unknown*."""


def does(name: str) -> None:
    """Call one of the misbehaving functions by its name."""
    globals()[name]()


def asks(count: int, ask: Callable[[int], int]) -> int:
    """Ask the caller ``count`` questions, and return the sum of its answers."""
    return sum(ask(number) for number in range(count))


def _highs(name: str) -> Callable[..., Any]:
    from verifiable_relu.search.solvers.workers import solve_program

    def hostile(task: Any, judge: Any = None) -> Any:
        # Three columns for each unstable neuron, and one for the objective.
        program = task.program
        if len(program.cost) - 1 - 3 * int(program.integral.sum()) == MARKED:
            does(name)
        return solve_program(task, judge)

    return hostile


def _z3(name: str) -> Callable[..., Any]:
    from verifiable_relu.search.solvers.workers import solve_formula

    def hostile(task: Any) -> Any:
        if f"x_{MARKED - 1} " in task.declarations and f"x_{MARKED} " not in task.declarations:
            does(name)
        return solve_formula(task)

    return hostile


def __getattr__(name: str) -> Callable[..., Any]:
    solver, _, kind = name.partition("_")
    solvers = {"highs": _highs, "z3": _z3}
    if solver not in solvers or kind not in globals():
        raise AttributeError(name)
    return solvers[solver](kind)
