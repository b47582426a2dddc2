"""What z3 is asked about the phases of neurons and what it asks in turn, as plain data.

A literal is a number: +(j + 1) says that neuron j is active, −(j + 1) that it is inactive. A clause is a disjunction of
literals. z3's process is imported from nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from verifiable_relu.verifiers.solvers.process import Worker

Clause = tuple[int, ...]
Answer = Literal["sat", "unsat", "unknown"]

PHASES = Worker("verifiable_relu.verifiers.solvers.phases_process:search")
"""The process of z3 as a search over phases. Its function takes a ``Task`` and an ``Adviser``, returns ``Searched``."""


@dataclass(frozen=True)
class Task:
    """A search for phases of so many neurons that satisfy all clauses, those that the adviser adds included.

    Attributes:
        neurons: how many there are.
        clauses: known before the search.
        seconds: after which z3 is told to stop.
        seed: of z3.
        advised: whether an adviser is asked; otherwise z3's solver for propositional formulas searches by itself.
    """

    neurons: int
    clauses: tuple[Clause, ...]
    seconds: float
    seed: int = 0
    advised: bool = True


@dataclass(frozen=True)
class Advice:
    """What is said about an assignment of phases to some neurons.

    Attributes:
        clauses: that hold, and were not known to z3.
        split: the literal to decide on next, 0 to leave that to z3.
        over: whether the search is to stop.
    """

    clauses: tuple[Clause, ...] = ()
    split: int = 0
    over: bool = False


Adviser = Callable[[bytes], Advice]
"""Asked before each decision, and where every neuron has a phase. A byte per neuron: 1 active, 255 inactive, 0 open."""


@dataclass(frozen=True)
class Searched:
    """How a search ended.

    Attributes:
        answer: *unsat* if no phases satisfy all clauses.
        reason: why the answer is unknown.
        decisions: how many z3 has made.
        conflicts: how many z3 has met.
    """

    answer: Answer
    reason: str = ""
    decisions: int = 0
    conflicts: int = 0
