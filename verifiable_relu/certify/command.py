"""Answers of the command ``certify``, in the process in which they are computed, and what it prints of them."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from verifiable_relu.campaign import QUIET, Case, Observer, Result, Store, open_certificates, run
from verifiable_relu.campaign.console import ProgressLine, Watcher
from verifiable_relu.campaign.inputs import InstanceFiles, Loader, chosen, unanswered
from verifiable_relu.campaign.queue import GRACE_S, Job, run_parallel
from verifiable_relu.campaign.result import BAD_INPUT, DISPUTED, FAULT
from verifiable_relu.campaign.store import assignment
from verifiable_relu.certify import TIMEOUT
from verifiable_relu.command_line import complain, write
from verifiable_relu.errors import InputError, counted, printable
from verifiable_relu.execution.model import as_executed, execution_model
from verifiable_relu.readers import is_quantised
from verifiable_relu.search.batch import Verifier, answers, described
from verifiable_relu.search.bounding import Crown
from verifiable_relu.search.budget import TimeBudget
from verifiable_relu.search.outcomes import Verdict
from verifiable_relu.search.portfolio import Auto
from verifiable_relu.spec.find import Networks, onnx_files
from verifiable_relu.spec.property import Query
from verifiable_relu.supervisor.forks import SetLimits, default_shares, process_memory, resident
from verifiable_relu.supervisor.workers import Executor

if TYPE_CHECKING:
    from verifiable_relu.campaign.certificates import Certificates

SHARE_FLOAT32 = 0.05  # The part of the time so far that a proof about real numbers may take once more, about float32
_SPARE = 0.3  # The seconds before the end of the time for an answer at which methods are told to stop
_SHORTEST = 1e-3  # The least seconds of a time limit


def _loader(options: argparse.Namespace) -> Loader:
    """Return the reader of instances; the options ``--family`` and ``--arithmetic`` say what a network is."""
    arithmetic, family = options.arithmetic, options.family
    given = {} if arithmetic == "declared" else {"arithmetic": arithmetic}
    prepare = partial(execution_model, family=family, **given)
    return Loader(None if (family, arithmetic) == (None, "real") else prepare, arithmetic)


def _entry(
    options: argparse.Namespace, spec: Path, onnx: Path | Networks | None = None, limit: float | None = None
) -> InstanceFiles:
    """Return an instance as the options ask for it, of a list with a network and a time limit of its own."""
    if options.net is not None:
        onnx = onnx_files(options.net)
    elif onnx is None and options.network:
        onnx = Networks(tuple(options.network))
    return InstanceFiles(spec, onnx, options.timeout or limit or TIMEOUT)


def _chosen(options: argparse.Namespace, processes: int) -> tuple[Verifier, TimeBudget, Certificates | None]:
    """Return the method, its limits, and the folder of certificates; None where none are wanted."""
    method, budget = chosen(options.method, options.device, options.memory, processes)
    return method, budget, open_certificates(options.certificates)


def _store(options: argparse.Namespace, observer: Observer = QUIET) -> AbstractContextManager[Observer]:
    """Return the store of the option ``--out``, to be closed, which tells the observer; without it, the observer."""
    if options.out is None:
        return nullcontext(observer)
    store = Store(options.out, options.repair, options.command, observer)
    if store.set_aside is not None:
        count, path = store.set_aside
        complain(options.label, f"{store.records}: {counted(count, 'line')} moved to {path}")
    return store


def explain(options: argparse.Namespace, out: TextIO) -> int:
    """Say which methods of ``auto`` a property file goes to, in which order, why, and for how long; returns 0."""
    _, budget = chosen(options.method, options.device, options.memory)
    write(explained(_loader(options).case(_entry(options, options.spec)), budget), out)
    return 0


def explained(case: Case, budget: TimeBudget) -> Iterator[str]:
    """Yield lines about which methods of ``auto`` an instance goes to, in which order, why, and for how long."""
    for number, query in enumerate(case.queries, start=1):
        if len(case.queries) > 1:
            yield f"box {number} of {len(case.queries)}:"
        yield from Auto().explain(query, replace(budget, seconds=case.timeout / len(case.queries))).splitlines()


def answer_property(
    options: argparse.Namespace, out: TextIO, set_limits: SetLimits = lambda seconds, memory: None
) -> int:
    """Answer one property file, on ``out``; returns the exit status. ``set_limits`` limits this process."""
    start = time.perf_counter()
    method, budget, certificates = _chosen(options, options.jobs or default_shares())
    memory = process_memory(options.worker_memory, options.memory, resident(os.getpid()))

    def limit(seconds: float) -> None:
        set_limits(min(seconds, options.end - time.perf_counter()), memory)

    entry = _entry(options, options.spec)
    entry = replace(entry, timeout=min(entry.timeout, max(_SHORTEST, options.end - start - _SPARE)))
    with ProgressLine(entry.timeout, options.quiet) as line, _store(options, line) as observer:
        budget = replace(budget, clock=line.clock, report_progress=line.report_progress)
        limit(entry.timeout + GRACE_S)
        case = _loader(options).case(entry)
        # Certificates come on top of the limit.
        limit(math.inf if certificates else max(0.0, entry.timeout - case.spent) + GRACE_S)
        (result,) = run([case], method, observer, certificates, budget)
        spent = time.perf_counter() - start
        single = not (options.quiet or options.family is not None) and _in_float32(case, result, spent)
    set_limits(math.inf, math.inf)
    write((options.lines or _lines)(result, case), out)
    if not options.quiet:
        print("\n".join(_summary(result, case, time.perf_counter() - start, single)), file=sys.stderr)
    status, said = result.complaint
    if said:
        complain(options.label, said)
    return status


def _lines(result: Result, case: Case) -> list[str]:
    return [result.answer, *(assignment(result, case.spec) if result.answer == "sat" else ())]


def record_lost(options: argparse.Namespace, error: Exception) -> None:
    """Record that the process that was to answer one property file has ended (``unanswered``)."""
    method, budget, _ = _chosen(options, options.jobs or default_shares())
    entry, of = _entry(options, options.spec), (options.arithmetic, method.name, described(method, budget))
    with _store(options) as store:
        store.result(0, unanswered(entry, error, *of), False)


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
    """Yield the summary of one property file, whose verdict is ``single`` if it is known to hold in float32."""
    network = case.queries[0].network
    trust = f", {result.trust}" if result.trust else ""
    trust += "" if result.arithmetic == "real" else f", about {result.arithmetic}"
    note = printable(result.detail)
    said = f": {note}" if result.disputed else ""
    yield f"{printable(result.vnnlib)}: {result.answer} ({result.ending}{trust}){said}"
    neurons = sum(network.ops[i].size for i in network.activations)
    parts = {"input": network.input_size, "neuron": neurons, "output": network.output_size}
    parts |= {"box": len(case.queries)} if len(case.queries) > 1 else {}
    size = ", ".join(counted(count, noun) for noun, count in parts.items())
    yield f"  network   {printable(result.onnx)}: {size}"
    for sentence in result.repairs:
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
        yield f"  unstable  {counted(result.unstable, 'neuron')}"
    stages = ", ".join(f"{name} {spent:.2f} s" for name, spent in result.stages.items())
    yield f"  time      {stages or f'{result.seconds:.2f} s'}; with reading and start-up {elapsed:.2f} s"
    if note and not said:
        yield f"  note      {note}"


def answer_list(
    options: argparse.Namespace,
    out: TextIO,
    listed: Sequence[tuple[Path, Path | Networks | None, float | None]],
    executor: Executor,
) -> int:
    """Answer the instances of a folder or a table (``spec.instances``), on ``out``; returns the exit status."""
    watcher = Watcher(len(listed), options.quiet, out)
    try:
        several = executor.size > 1 or options.executor is not None
        method, budget, _ = _chosen(options, 1 if several else options.jobs or default_shares())
        job = Job(method, _loader(options), options.certificates, options.worker_memory, budget, options.debug)
        with watcher, _store(options, watcher) as observer:
            run_parallel([_entry(options, *instance) for instance in listed], job, executor, observer)
    except KeyboardInterrupt:
        kept = f"kept in {options.out}; the same command resumes" if options.out else "lost, since --out was not given"
        complain(options.label, f"interrupted: {watcher.done} of {len(listed)} instances are answered and {kept}")
        return 130
    except InputError:
        # There is no more space for records.
        if watcher.done and not options.quiet:
            watcher.summary()
        raise
    for said in watcher.complaints[DISPUTED]:
        complain(options.label, said)
    if not options.quiet:
        watcher.summary()
    for said in watcher.complaints[FAULT]:
        complain(options.label, said)
    return next((status for status in (DISPUTED, BAD_INPUT, FAULT) if watcher.complaints[status]), 0)
