"""Answers of the command ``certify``, in the process in which they are computed, and what it prints of them."""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from verifiable_relu.campaign import QUIET, Case, Observer, Result, Store, run
from verifiable_relu.campaign.inputs import InstanceFiles, Loader, chosen, unanswered
from verifiable_relu.campaign.queue import GRACE_S, Job, run_parallel
from verifiable_relu.campaign.store import assignment
from verifiable_relu.certify import DISPUTED, TIMEOUT
from verifiable_relu.command_line import complain, write
from verifiable_relu.errors import InputError, printable
from verifiable_relu.execution.model import as_executed, execution_model
from verifiable_relu.readers import is_quantised
from verifiable_relu.search.batch import Verifier, answers, described
from verifiable_relu.search.bounding import Crown
from verifiable_relu.search.budget import SearchProgress, TimeBudget
from verifiable_relu.search.outcomes import Verdict
from verifiable_relu.search.portfolio import Auto
from verifiable_relu.spec.find import Networks, onnx_files
from verifiable_relu.spec.property import Query
from verifiable_relu.supervisor.forks import SetLimits, default_shares, process_memory, resident
from verifiable_relu.supervisor.workers import Executor

if TYPE_CHECKING:
    from verifiable_relu.campaign.certificates import Certificates

SHARE_FLOAT32 = 0.05  # The part of the time so far that a proof about real numbers may take once more, about float32
_say = partial(complain, "certify")
_REDRAWN = 0.2  # Seconds between two drawings of the line of one question
ERASE = "\r\x1b[2K"  # Erases the line on a terminal


class ProgressLine(Observer):
    """An observer of one instance, which shows where the work on it stands in a line until it is left.

    The line is drawn, on a terminal, when its clock is read, which work does all the time: a thread that drew it would
    be at work while processes are copied.
    """

    def __init__(self, seconds: float) -> None:
        self._shown = sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._seconds, self._process, self._began, self._due = seconds, os.getpid(), time.perf_counter(), 0.0
        self._stage, self._done, self._total = "reading", 0, 1
        self._told: dict[str, float] = {}

    def __enter__(self) -> ProgressLine:
        self.clock()
        return self

    def __exit__(self, *_: object) -> None:
        self._draw("")

    def stage(self, name: str, done: int, total: int) -> None:
        if name != self._stage:
            self._told = {"margin": self._told["margin"]} if "margin" in self._told else {}
        self._stage, self._done, self._total = name, done, total

    def report_progress(self, progress: SearchProgress) -> None:
        """As ``TimeBudget.report_progress``."""
        self._told |= progress

    def clock(self) -> float:
        """The present time in seconds, by ``time.perf_counter``."""
        now = time.perf_counter()
        if now >= self._due:
            self._due = now + _REDRAWN
            self._draw(self._text(now)[: shutil.get_terminal_size().columns - 1])
        return now

    def _draw(self, text: str) -> None:
        # A copy of the process has the same terminal.
        if self._shown and os.getpid() == self._process:
            print(f"{ERASE}{text}", end="", file=sys.stderr, flush=True)

    def _text(self, now: float) -> str:
        parts, told = [self._stage], self._told
        if self._total > 1:
            parts.append(f"{self._done} of {self._total} boxes")
        elif "margin" in told:
            parts.append(f"margin at least {told['margin']:.4g}")
        if "sub-problems" in told:
            parts.append(f"{told['sub-problems']:,.0f} sub-problems")
        if "closed" in told:
            parts.append(f"{told['closed']:.0%} closed")
        return ", ".join([*parts, f"{max(0.0, self._seconds - now + self._began):.0f} s left"])


def _loader(options: argparse.Namespace) -> Loader:
    """The reader of instances that the options describe: ``--joint`` and ``--arithmetic`` say what a network is."""
    family, arithmetic = options.joint, options.arithmetic
    if family is None and arithmetic == "real":
        return Loader(dict(options.network))
    return Loader(dict(options.network), partial(execution_model, arithmetic=arithmetic, family=family), arithmetic)


def _entry(
    options: argparse.Namespace, spec: Path, onnx: Path | Networks | None = None, limit: float | None = None
) -> InstanceFiles:
    """An instance as the options ask for it, of a list with a network and a time limit of its own."""
    named = onnx if options.net is None else onnx_files(options.net)
    return InstanceFiles(spec, named, options.timeout or limit or TIMEOUT)


def _chosen(options: argparse.Namespace, processes: int) -> tuple[Verifier, TimeBudget, Certificates | None]:
    """Return the method, its limits, and the folder of certificates; None where none are wanted."""
    method, budget = chosen(options.method, options.device, options.memory, processes)
    if options.certificates is None:
        return method, budget, None
    # Imported here, because the checker takes 0.4 s of processor time.
    from verifiable_relu.campaign.certificates import Certificates

    return method, budget, Certificates(options.certificates)


def _store(options: argparse.Namespace, observer: Observer = QUIET) -> AbstractContextManager[Observer]:
    """The store of the option ``--out``, to be closed, which tells the observer; the observer without the option."""
    if options.out is None:
        return nullcontext(observer)
    store = Store(options.out, options.repair, options.command, observer)
    if store.set_aside is not None:
        count, path = store.set_aside
        _say(f"{store.records}: {count} line{'s' * (count > 1)} moved to {path}")
    return store


def explain(options: argparse.Namespace, out: TextIO) -> int:
    """Say which methods of ``auto`` a property file goes to, in which order, why, and for how long; returns 0."""
    method, budget = chosen(options.method, options.device, options.memory)
    write(list(explained(_loader(options).case(_entry(options, options.spec)), method, budget)), out)
    return 0


def explained(case: Case, verifier: Verifier, budget: TimeBudget) -> Iterator[str]:
    """Lines that say which methods of ``auto`` an instance goes to, in which order, why, and for how long."""
    if not isinstance(verifier, Auto):
        raise InputError(f"only the method 'auto' chooses and can be explained, not '{verifier.name}'")
    for number, query in enumerate(case.queries, start=1):
        if len(case.queries) > 1:
            yield f"box {number} of {len(case.queries)}:"
        yield from verifier.explain(query, replace(budget, seconds=case.timeout / len(case.queries))).splitlines()


def answer_property(
    options: argparse.Namespace, out: TextIO, set_limits: SetLimits = lambda seconds, memory: None
) -> int:
    """Answer one property file, on ``out``; returns the exit status. ``set_limits`` limits this process."""
    start = time.perf_counter()
    method, budget, certificates = _chosen(options, options.jobs or default_shares())
    memory = process_memory(options.worker_memory, options.memory, resident(os.getpid()))
    entry = _entry(options, options.spec)
    shown: AbstractContextManager[Observer] = nullcontext(QUIET) if options.quiet else ProgressLine(entry.timeout)
    with shown as line, _store(options, line) as observer:
        if isinstance(line, ProgressLine):
            budget = replace(budget, clock=line.clock, report_progress=line.report_progress)
        set_limits(entry.timeout + GRACE_S, memory)
        case = _loader(options).case(entry)
        # Certificates come on top of the limit.
        set_limits(math.inf if certificates else max(0.0, entry.timeout - case.spent) + GRACE_S, memory)
        (result,) = run([case], method, observer, certificates, budget)
        spent = time.perf_counter() - start
        single = not (options.quiet or options.joint is not None) and _in_float32(case, result, spent)
    set_limits(math.inf, math.inf)
    write([result.answer, *(assignment(result, case.spec) if result.answer == "sat" else ())], out)
    if not options.quiet:
        print("\n".join(_summary(result, case, time.perf_counter() - start, single)), file=sys.stderr)
    if result.disputed:
        _say(f"{result.vnnlib}: {result.detail}")
        return DISPUTED
    if result.reason != "error":
        return 0
    if result.method:
        _say(f"{result.vnnlib}: fault of {result.method}: {result.detail}")
    return 1 if result.method else 2


def record_lost(options: argparse.Namespace, error: Exception) -> None:
    """Record that the process that was to answer one property file has ended (``unanswered``)."""
    method, budget, _ = _chosen(options, options.jobs or default_shares())
    entry, of = _entry(options, options.spec), (options.arithmetic, method.name, described(method, budget))
    with _store(options) as store:
        store.result(0, unanswered(entry, error, *of), False)
        store.finish()


def _in_float32(case: Case, result: Result, spent: float) -> bool:
    """Return True if CROWN proves of every evaluation in float32, too, what it has proved of real numbers."""
    if result.verdict is not Verdict.UNSAT or result.arithmetic != "real" or result.method != Crown.name:
        return False
    try:
        network = as_executed(case.queries[0].network, "float32")
    except (InputError, ArithmeticError, MemoryError):
        return False
    queries = [Query(network, query.property) for query in case.queries]
    found = answers(Crown(), queries, TimeBudget(SHARE_FLOAT32 * spent))
    return all(outcome.verdict is Verdict.UNSAT for outcome in found)


def _summary(result: Result, case: Case, elapsed: float, single: bool) -> Iterator[str]:
    """The lines of the summary for one property file, whose verdict is ``single`` if it is known to hold in float32."""
    network = case.queries[0].network
    trust = f", {result.trust}" if result.trust else ""
    trust += "" if result.arithmetic == "real" else f", about {result.arithmetic}"
    note = printable(result.detail)
    said = f": {note}" if result.disputed else ""
    yield f"{printable(result.vnnlib)}: {result.answer} ({result.reason} by {result.method}{trust}){said}"
    neurons = sum(network.ops[i].size for i in network.activations)
    boxes = f", {len(case.queries)} boxes" if len(case.queries) > 1 else ""
    size = f"{network.input_size} inputs, {neurons} neurons, {network.output_size} outputs{boxes}"
    yield f"  network   {printable(result.onnx)}: {size}"
    for sentence in result.mended:
        yield f"  file      {printable(sentence)}"
    if result.answer == "unsat" and result.margin == 0:
        yield "  margin    positive; the method proves no larger bound"
    elif result.margin is not None:
        meanings = {"sat": "at the counterexample", "unsat": "a proven lower bound"}
        yield f"  margin    {result.margin:.6g} ({meanings.get(result.answer, 'the best lower bound found')})"
    if single:
        yield "  float32   the verdict holds for every evaluation in float32, too"
    runs = single or (result.answer == "unsat" and result.arithmetic != "real")
    if runs and network.source.onnx is not None and is_quantised(network.source.onnx):
        yield "  int8      on processors without VNNI if onnxruntime's option session.x64quantprecision is 1"
    if result.unstable is not None:
        yield f"  unstable  {result.unstable} neurons"
    stages = ", ".join(f"{name} {spent:.2f} s" for name, spent in result.stages.items())
    yield f"  time      {stages or f'{result.seconds:.2f} s'}; with reading and start-up {elapsed:.2f} s"
    if note and not said:
        yield f"  note      {note}"


def answer_list(
    options: argparse.Namespace,
    out: TextIO,
    listed: Iterator[tuple[Path, Path | Networks | None, float | None]],
    count: int,
    executor: Executor,
) -> int:
    """Answer a folder or a table of ``count`` instances (``spec.instances``), on ``out``; returns the exit status."""
    # Imported here, because it draws with rich, which one property does not need.
    from verifiable_relu.campaign.console import Watcher

    watcher = Watcher(count, options.quiet, out)
    try:
        several = executor.size > 1 or options.executor is not None
        method, budget, _ = _chosen(options, 1 if several else options.jobs or default_shares())
        job = Job(method, _loader(options), options.certificates, options.worker_memory, budget, options.debug)
        with watcher, _store(options, watcher) as observer:
            run_parallel((_entry(options, *instance) for instance in listed), job, executor, observer)
    except KeyboardInterrupt:
        kept = f"kept in {options.out}; the same command resumes" if options.out else "lost, since --out was not given"
        _say(f"interrupted: {watcher.done} of {count} instances are answered and {kept}")
        return 130
    except InputError:
        # The list has a bad row, or there is no more space for records.
        if watcher.done and not options.quiet:
            watcher.summary()
        raise
    for vnnlib, detail in watcher.disputed:
        _say(f"{vnnlib}: {detail}")
    if not options.quiet:
        watcher.summary()
    for vnnlib, name, detail in watcher.faults:
        _say(f"{vnnlib}: fault of {name}: {detail}")
    return DISPUTED if watcher.disputed else 2 if watcher.bad else 1 if watcher.faults else 0
