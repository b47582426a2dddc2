"""Answers of the command ``certify``, in the process in which they are computed, and what it prints of them."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from verifiable_relu.campaign import QUIET, Case, Result, Store, run
from verifiable_relu.campaign.inputs import InstanceFiles, Loader, chosen
from verifiable_relu.campaign.queue import GRACE_S, Job, run_parallel
from verifiable_relu.campaign.runner import lost
from verifiable_relu.campaign.store import assignment
from verifiable_relu.certify import DISPUTED, TIMEOUT
from verifiable_relu.command_line import complain, write
from verifiable_relu.errors import InputError, printable
from verifiable_relu.execution.model import as_executed, execution_model
from verifiable_relu.readers import is_quantised
from verifiable_relu.search.batch import Verifier, answers
from verifiable_relu.search.bounding import Crown
from verifiable_relu.search.budget import TimeBudget
from verifiable_relu.search.outcomes import Verdict
from verifiable_relu.search.portfolio import Auto
from verifiable_relu.spec.find import Networks, onnx_files
from verifiable_relu.spec.property import Query
from verifiable_relu.supervisor.forks import SetLimits, default_shares, process_memory, resident
from verifiable_relu.supervisor.workers import DaskExecutor, Executor, InlineExecutor, LocalExecutor, Worker

if TYPE_CHECKING:
    from verifiable_relu.campaign.certificates import Certificates
    from verifiable_relu.campaign.console import ProgressLine, Watcher

SHARE_FLOAT32 = 0.05  # The part of the time so far that a proof about real numbers may take once more, about float32


def _optional(module: str) -> Any:
    """Import what few runs need: the checker (0.4 s of processor time), and rich, which draws on terminals."""
    return import_module(f"verifiable_relu.campaign.{module}")


def _say(message: object) -> None:
    complain("certify", message)


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
    wanted = options.certificates
    return method, budget, None if wanted is None else _optional("certificates").Certificates(wanted)


def _store(options: argparse.Namespace) -> AbstractContextManager[Store | None]:
    """The store of the option ``--out``, to be closed; None without the option."""
    if options.out is None:
        return nullcontext()
    store = Store(options.out, options.repair, options.command)
    if store.set_aside is not None:
        count, path = store.set_aside
        _say(f"{store.records}: {count} line{'s' * (count > 1)} moved to {path}")
    return store


def explain(options: argparse.Namespace, out: TextIO) -> int:
    """Say which methods of ``auto`` a property file goes to, in which order, why, and for how long; returns 0."""
    method, budget = chosen(options.method, options.device, options.memory)
    case = _loader(options).case(_entry(options, options.spec))
    write(list(explained(case, method, budget)), out)
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
    terminal = not options.quiet and sys.stderr is not None and sys.stderr.isatty()
    shown: AbstractContextManager[ProgressLine | None]
    shown = _optional("console").ProgressLine(entry.timeout) if terminal else nullcontext()
    with _store(options) as store, shown as line:
        if line is not None:
            budget = replace(budget, clock=line.clock, report_progress=line.report_progress)
        set_limits(entry.timeout + GRACE_S, memory)
        case = _loader(options).case(entry)
        # Certificates come on top of the limit.
        set_limits(math.inf if certificates else max(0.0, entry.timeout - case.spent) + GRACE_S, memory)
        (result,) = run([case], method, store, line or QUIET, certificates, budget)
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
    """Record that the process that was to answer one property file has ended (``lost``)."""
    method, budget, _ = _chosen(options, options.jobs or default_shares())
    asked = str(options.net or ""), str(options.spec), options.timeout or TIMEOUT
    with _store(options) as store:
        assert store is not None
        store.keep(0, lost(asked, method, budget, error, options.arithmetic))
        store.tabulate()


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
    started: Sequence[Worker],
) -> int:
    """Answer a folder or a table as one campaign, on ``out``; returns the exit status.

    There are ``count`` instances (``spec.instances``); ``started`` are the processes that answer, none where this
    process does, or a cluster.
    """
    watcher: Watcher = _optional("console").Watcher(count, options.quiet, out)
    try:
        several = len(started) > 1 or options.executor is not None
        method, budget, _ = _chosen(options, 1 if several else options.jobs or default_shares())
        job = Job(method, _loader(options), options.certificates, options.worker_memory, budget, options.debug)
        with _store(options) as store, watcher, ExitStack() as stack:
            executor = _executor(options, started, store)
            stack.callback(executor.stop)
            run_parallel((_entry(options, *instance) for instance in listed), job, executor, store, watcher)
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


def _executor(options: argparse.Namespace, started: Sequence[Worker], store: Store | None) -> Executor:
    if options.executor is not None:
        kept = "answers so far are lost" if store is None else "answers so far are kept, the same command resumes"
        return DaskExecutor(options.executor, kept)
    return LocalExecutor(started, options.worker_memory, options.memory) if started else InlineExecutor()
