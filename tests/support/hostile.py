"""What a foreign library may do to the process that calls it, and solvers that do so on some questions.

``tests.support.hostile:KIND`` does it on every call. ``highs_KIND`` and ``z3_KIND`` stand in for the functions of
HiGHS's and z3's processes: on questions with ``MARKED`` inputs they do it, and to others they give the real answer.
``phases_KIND`` does it in the middle of each of z3's searches over phases.
It imports little, since every process that a test starts does so, too.
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
"""C's: called in this way, it keeps the interpreter."""

MEMORY = 300 << 20
"""A limit for those who eat memory, in bytes: above what the libraries take by themselves."""


def hangs() -> None:
    """Without the interpreter, which others may use."""
    time.sleep(600)


def hangs_in_python() -> None:
    while True:
        pass


def hangs_holding_the_interpreter() -> None:
    """No thread of the process gets to run Python code."""
    SLEEP(600)


def hangs_deaf() -> None:
    """All signals that can be blocked are."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    time.sleep(600)


def stops() -> None:
    """As a debugger would stop it."""
    os.kill(os.getpid(), signal.SIGSTOP)


def crashes() -> None:
    ctypes.string_at(0)


def aborts() -> None:
    os.abort()


def leaves() -> None:
    os._exit(0)


def is_killed() -> None:
    """By somebody else, such as a system that is short of memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def raises() -> None:
    raise ArithmeticError("nothing works")


def eats_memory() -> None:
    """Bit by bit."""
    eaten = []
    while True:
        eaten.append(b"x" * (1 << 20))


def eats_memory_at_once() -> None:
    """In one call that keeps the interpreter."""
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
"""What the caller gets to know, and the reason why the query is unknown."""


def does(name: str) -> None:
    """One of the above, by its name."""
    globals()[name]()


def asks(count: int, ask: Callable[[int], int]) -> int:
    """The sum of the answers to so many questions."""
    return sum(ask(number) for number in range(count))


def _highs(name: str) -> Callable[..., Any]:
    from verifiable_relu.verifiers.solvers.highs_process import solve

    def hostile(task: Any, judge: Any = None) -> Any:
        # Three columns for each unstable neuron, and one for the objective.
        program = task.program
        if len(program.cost) - 1 - 3 * int(program.integral.sum()) == MARKED:
            does(name)
        return solve(task, judge)

    return hostile


def _z3(name: str) -> Callable[..., Any]:
    from verifiable_relu.verifiers.solvers.z3_process import search

    def hostile(task: Any, judge: Any) -> Any:
        if f"x_{MARKED - 1} " in task.declarations and f"x_{MARKED} " not in task.declarations:
            does(name)
        return search(task, judge)

    return hostile


def _phases(name: str) -> Callable[..., Any]:
    from verifiable_relu.verifiers.solvers.phases_process import search

    def hostile(task: Any, adviser: Any = None) -> Any:
        """On every search, in the middle of it: once the adviser has been asked."""

        def asked_once(phases: bytes) -> Any:
            adviser(phases)
            does(name)

        return search(task, asked_once)

    return hostile


def __getattr__(name: str) -> Callable[..., Any]:
    solver, _, kind = name.partition("_")
    solvers = {"highs": _highs, "z3": _z3, "phases": _phases}
    if solver not in solvers or kind not in globals():
        raise AttributeError(name)
    return solvers[solver](kind)
