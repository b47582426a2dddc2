"""A part of a campaign in a process of its own: instances are read, answered and certified there.

The process that runs the campaign keeps the records. It is told of every answer as soon as there is one (``Answered``),
and is asked what earlier runs have recorded (``Wanted``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from verifiable_relu.campaign.inputs import Entry, Loader
from verifiable_relu.campaign.result import Key, Result
from verifiable_relu.campaign.runner import Case, run
from verifiable_relu.supervisor.memory import limit_memory
from verifiable_relu.verifiers.base import Limits, Verifier

STAGE_EVERY = 0.2
"""The least seconds between two messages about stages."""


@dataclass(frozen=True)
class Job:
    """The part of a campaign's task that is the same for all instances.

    Attributes:
        verifier: the verifier, which records proofs if certificates are wanted.
        loader: the reader of the instances, which has read none.
        certificates: the folder of certificates; None where none are wanted.
        memory: the bytes that a worker's process, and each process that it starts, may have resident; None for half of
            the machine's memory.
        limits: of the verifier's work. Instances are charged, and their time limits count, by its clock.
        debug: whether an exception of reading that is a fault of the program is raised.
    """

    verifier: Verifier
    loader: Loader
    certificates: Path | None = None
    memory: int | None = None
    limits: Limits = Limits()  # noqa: RUF009 -- frozen
    debug: bool = False


Numbered = tuple[int, Entry]
"""An instance with its number in the campaign."""


@dataclass(frozen=True)
class Answered:
    """The message that an instance is answered.

    Attributes:
        number: the instance's number.
        result: the answer.
        recorded: whether the answer is of an earlier run.
        counterexample: the text of the counterexample of a new answer that has one.
    """

    number: int
    result: Result
    recorded: bool
    counterexample: str | None = None


@dataclass(frozen=True)
class Wanted:
    """The question for an earlier answer; the arguments are those of ``Store.find``."""

    key: Key
    timeout: float
    checked: bool


@dataclass(frozen=True)
class Stage:
    """The message that ``done`` of ``total`` queries of a worker's present part have been through a stage."""

    name: str
    done: int
    total: int


@dataclass(frozen=True)
class Limit:
    """The message that the process is to be ended, unless there is another of these messages within some seconds.

    Attributes:
        seconds: the time limit of what is done next, by the wall clock, and ``GRACE``; infinite for none.
        number: the instance that is read next; None where all that were read are answered.
    """

    seconds: float
    number: int | None


GRACE = 0.8
"""The seconds after its time limit in which an instance may still end by itself."""

Ask = Callable[[Answered | Wanted | Stage | Limit], Any]
"""A function that sends a message, and returns the answer: a ``Result`` or None for ``Wanted``, else nothing."""


@dataclass(frozen=True)
class Part:
    """A part of a campaign, as a task: instances that are answered as one batch.

    Attributes:
        job: the job, pickled. Its networks stay prepared from one part to the next.
        entries: the instances.
    """

    job: bytes
    entries: Sequence[Numbered]

    def below(self, folder: Path) -> Part:
        """The part with relative paths taken from a folder."""
        there = [
            (n, replace(e, vnnlib=folder / e.vnnlib, onnx=None if e.onnx is None else folder / e.onnx))
            for n, e in self.entries
        ]
        return Part(self.job, there)

    def __call__(self, ask: Ask) -> None:
        """Answer the instances; ``ask`` sends messages to the process that runs the campaign."""
        perform(_job(self.job), self.entries, ask)


def perform_task(task: Callable[[Ask], Any], ask: Ask) -> Any:
    """The result of a task, in the process of a hand."""
    return task(ask)


def perform(job: Job, entries: Sequence[Numbered], ask: Ask) -> None:
    """Answer instances as one batch.

    Args:
        job: what is to be done with them.
        entries: the instances.
        ask: sends messages to the process that runs the campaign.
    """
    timed = job.limits.clock is time.perf_counter
    cases: list[Case | Result] = []
    for number, entry in entries:
        if timed:
            ask(Limit(entry.timeout + GRACE, number))
        cases.append(job.loader.read(entry, job.debug))
    if timed:
        # Certificates come on top of the limits.
        left = sum(GRACE + max(0.0, case.timeout - case.spent) for case in cases if isinstance(case, Case))
        ask(Limit(math.inf if job.certificates is not None else left + GRACE, None))
    certificates = None
    if job.certificates is not None:
        from verifiable_relu.campaign.certificates import Certificates

        certificates = Certificates(job.certificates)
    messages = _Messages(ask, [number for number, _ in entries])
    run(cases, job.verifier, messages, messages, certificates, job.limits)


@lru_cache(maxsize=1)
def _job(pickled: bytes) -> Job:
    import pickle

    job: Job = pickle.loads(pickled)
    job.loader.clock = job.limits.clock
    if job.memory is not None:
        limit_memory(job.memory)
    return job


class _Messages:
    """The records and the observer of a worker's run: what it is told becomes messages.

    Args:
        ask: sends a message.
        numbers: the instances' numbers in the campaign.
    """

    def __init__(self, ask: Ask, numbers: Sequence[int]) -> None:
        self._ask = ask
        self._numbers = numbers
        self._counterexample: str | None = None
        self._told = 0.0

    def find(self, key: Key, timeout: float, checked: bool) -> Result | None:
        found: Result | None = self._ask(Wanted(key, timeout, checked))
        return found

    def holds(self, result: Result) -> bool:
        # The process that runs the campaign sees to it.
        return True

    def append(self, result: Result, counterexample: str | None) -> None:
        # It goes with the message about the result, which comes next.
        self._counterexample = counterexample

    def result(self, number: int, result: Result, recorded: bool) -> None:
        text, self._counterexample = self._counterexample, None
        self._ask(Answered(self._numbers[number], result, recorded, text))

    def enter(self, number: int, result: Result) -> None:
        pass

    def tabulate(self) -> None:
        pass

    def stage(self, name: str, done: int, total: int) -> None:
        if time.monotonic() - self._told > STAGE_EVERY:
            self._told = time.monotonic()
            self._ask(Stage(name, done, total))
