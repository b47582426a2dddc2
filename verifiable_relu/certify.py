"""Answer properties of neural networks: does some input of the box reach the unsafe set?

What the command prints and how it exits is said in its help (``certify_options.ABOUT``).
"""

from __future__ import annotations

import argparse
import csv
import io
import math
import os
import pickle
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from verifiable_relu.certify_options import (
    DISPUTED,
    TIMEOUT,
    entries,
    launched,
    loader,
    net,
    parse,
    parser,
    require_files,
    workers,
)
from verifiable_relu.errors import CallFailed, InputError, printable
from verifiable_relu.files import csv_cell
from verifiable_relu.streams import complain, guarded, own_stdout, write
from verifiable_relu.watched import Ended, copied, resident

if TYPE_CHECKING:
    from verifiable_relu.campaign import Case, Result, Store
    from verifiable_relu.campaign.certificates import Certificates
    from verifiable_relu.campaign.console import Line, Watcher
    from verifiable_relu.campaign.inputs import Entry
    from verifiable_relu.campaign.worker import Job
    from verifiable_relu.verifiers.base import Limits, Verifier
    from verifiable_relu.verifiers.solvers.process import Worker


def main(arguments: Sequence[str] | None = None, alone: bool = False) -> int:
    """Run the command; returns the exit status.

    Args:
        arguments: the command line's arguments; by default those of the process.
        alone: whether the process runs this command only. Then everything that libraries print to stdout, those in C
            included, goes to stderr from now on, so that stdout has the answers alone.
    """
    options = parse(parser(), arguments)

    def work() -> int:
        out = own_stdout() if alone else sys.stdout
        if options.check is not None:
            return _check(options, out)
        require_files(options)
        if options.explain:
            return _explain(options, out)
        many = os.path.isdir(options.spec) or options.spec.suffix == ".csv"
        return _many(options, out, alone) if many else _one(options, out, alone)

    return guarded("certify", work, options.debug)


def alone(arguments: Sequence[str] | None = None) -> int:
    """Run the command as the only one of its process (``main``); returns the exit status."""
    return main(arguments, alone=True)


def _say(message: object) -> None:
    complain("certify", message)


@contextmanager
def _store(options: argparse.Namespace) -> Iterator[Store | None]:
    """The store of the option ``--out``, open until the ``with`` block ends; None without the option."""
    from verifiable_relu.campaign import Store

    if options.out is None:
        yield None
        return
    with Store(options.out, options.repair, options.command) as store:
        if store.set_aside is not None:
            count, path = store.set_aside
            _say(f"{store.records}: {count} line{'s' * (count > 1)} moved to {path}")
        yield store


def _on_terminal() -> bool:
    """Whether stderr, which may be closed, is a terminal."""
    return sys.stderr is not None and sys.stderr.isatty()


@contextmanager
def _line(options: argparse.Namespace, seconds: float) -> Iterator[Line | None]:
    """The line in which a terminal shows where the work on a property stands; None where there is no terminal."""
    if options.quiet or not _on_terminal():
        yield None
        return
    # Imported here, because the line alone needs the library rich.
    from verifiable_relu.campaign.console import Line

    with Line(seconds) as line:
        yield line


def _explain(options: argparse.Namespace, out: TextIO) -> int:
    """Say what ``auto`` would do with a property file; returns the exit status."""
    from verifiable_relu.campaign.explaining import explained
    from verifiable_relu.campaign.inputs import Entry, chosen

    method, limits = chosen(options.method, options.device, options.memory)
    case = loader(options).case(Entry(options.spec, net(options), options.timeout or TIMEOUT))
    write(list(explained(case, method, limits)), out)
    return 0


def _one(options: argparse.Namespace, out: TextIO, alone: bool) -> int:
    """Answer one property file; returns the exit status.

    Args:
        options: the options.
        out: the file for the answer.
        alone: whether a copy of this process answers, which is ended with the time limit.
    """
    start = time.perf_counter()
    until = copied() if alone and not options.debug else None
    if isinstance(until, Ended):
        return until.status if until.status is not None and until.status >= 0 else _lost(options, out, until)
    from verifiable_relu.campaign import QUIET, run
    from verifiable_relu.campaign.counterexample import assignment
    from verifiable_relu.campaign.inputs import Entry, chosen
    from verifiable_relu.campaign.worker import GRACE
    from verifiable_relu.verifiers.copies import sharing
    from verifiable_relu.verifiers.solvers.process import most_memory

    method, limits = chosen(options.method, options.device, options.memory, options.jobs or sharing())
    method, certificates = _certifying(options, method)
    memory = most_memory(options.worker_memory, options.memory, resident(os.getpid()))
    entry = Entry(options.spec, net(options), options.timeout or TIMEOUT)
    with _store(options) as store, _line(options, entry.timeout) as line:
        if line is not None:
            limits = replace(limits, clock=line.clock, tell=line.tell)
        if until is not None:
            until(entry.timeout + GRACE, memory)
        case = loader(options).case(entry)
        if until is not None:
            # Certificates come on top of the limit.
            until(math.inf if certificates else max(0.0, entry.timeout - case.spent) + GRACE, memory)
        (result,) = run([case], method, store, line or QUIET, certificates, limits)
        spent = time.perf_counter() - start
        single = not (options.quiet or options.joint is not None) and _in_float32(case, result, spent)
    if until is not None:
        until(math.inf, math.inf)
    write([result.answer, *(assignment(result, case.spec) if result.answer == "sat" else ())], out)
    if not options.quiet:
        print("\n".join(_summary(result, case, time.perf_counter() - start, single)), file=sys.stderr)
    return _status(result)


def _lost(options: argparse.Namespace, out: TextIO, ended: Ended) -> int:
    """Say and record that the process that was to answer one property file has ended; returns the exit status."""
    late = ended.status is None and not ended.memory
    answer = "timed-out" if late else "unknown"
    # This comes before imports, which take longer than the limit allows for.
    write([answer], out)
    # The first limit is that of reading.
    where = "reading its files" if ended.named == 1 else options.method
    why = "timeout" if late else "memory" if ended.memory else "error"
    if not options.quiet:
        # The process that has ended may have left the line of its progress.
        erased = "\r\x1b[2K" if _on_terminal() else ""
        print(f"{erased}{options.spec}: {answer} ({why} by {where}); its process has ended", file=sys.stderr)
    if why == "error":
        _fault(options.spec, where, f"its process ended with the status {ended.status}")
    if options.out is not None:
        from verifiable_relu.campaign.inputs import chosen
        from verifiable_relu.campaign.runner import Late, lost
        from verifiable_relu.verifiers.copies import sharing

        error = Late(0 if ended.named == 1 else None) if late else MemoryError() if ended.memory else CallFailed(where)
        method, limits = chosen(options.method, options.device, options.memory, options.jobs or sharing())
        method, _ = _certifying(options, method)
        named = str(options.net or ""), str(options.spec), options.timeout or TIMEOUT
        result = lost(*named, method, limits, error, options.arithmetic)
        with _store(options) as store:
            assert store is not None
            store.append(result)
            store.enter(0, result)
            store.tabulate()
    return 1 if why == "error" else 0


def _certifying(options: argparse.Namespace, method: Verifier) -> tuple[Verifier, Certificates | None]:
    """The method, recording what it proves, and the folder of certificates, if there is to be one."""
    if options.certificates is None:
        return method, None
    from verifiable_relu.campaign.certificates import Certificates
    from verifiable_relu.verifiers.auto import recording

    return recording(method), Certificates(options.certificates)


def _check(options: argparse.Namespace, out: TextIO) -> int:
    """Check a folder of certificates; 0 if all are accepted, else 1."""
    from verifiable_relu.check import BadInput
    from verifiable_relu.check.folder import check_folder

    lines, accepted, total = io.StringIO(), 0, 0
    table = csv.writer(lines, lineterminator="\n")
    try:
        for name, _, vnnlib, status, said in check_folder(options.check):
            accepted, total = accepted + (status == 0), total + 1
            # What is accepted is sat or unsat; certificates.csv has the files, and what exactly was checked.
            answer, told = ("refused", said) if status else ("accepted", said.split(": ")[1])
            table.writerow((csv_cell(name or Path(vnnlib).name), answer, told))
    except BadInput as error:
        raise InputError(str(error)) from None
    write(lines.getvalue().splitlines(), out)
    if not options.quiet:
        print(f"{accepted} of {total} certificates are accepted", file=sys.stderr)
    return 0 if accepted == total else 1


def _travels(job: Job) -> bool:
    """Whether another process can be given a job: a verifier of somebody's own need not be made for that."""
    try:
        return bool(pickle.dumps(job))
    except (AttributeError, TypeError, pickle.PicklingError):
        return False


SHARE_FLOAT32 = 0.05
"""What part of the time so far a proof about real numbers may take once more, about float32."""


def _in_float32(case: Case, result: Result, spent: float) -> bool:
    """Whether what CROWN has proved of real numbers it proves of every evaluation in float32, too."""
    from verifiable_relu.network import deployed
    from verifiable_relu.spec.property import Query
    from verifiable_relu.verifiers.base import Limits, Verdict
    from verifiable_relu.verifiers.docket import answers
    from verifiable_relu.verifiers.incomplete import Crown

    if result.verdict is not Verdict.UNSAT or result.arithmetic != "real" or result.method != Crown.name:
        return False
    try:
        network = deployed(case.queries[0].network, "float32")
    except (InputError, ArithmeticError, MemoryError):
        return False
    queries = [Query(network, query.property) for query in case.queries]
    found = answers(Crown(), queries, Limits(SHARE_FLOAT32 * spent))
    return all(outcome.verdict is Verdict.UNSAT for outcome in found)


def _summary(result: Result, case: Case, elapsed: float, single: bool) -> Iterator[str]:
    """The lines of the summary that the user sees on stderr for one property file.

    Args:
        result, case: the file's.
        elapsed: the seconds since the start.
        single: whether a verdict about real numbers is known to hold in float32, too.
    """
    network = case.queries[0].network
    trust = f", {result.trust}" if result.trust else ""
    trust += "" if result.arithmetic == "real" else f", about {result.arithmetic}"
    note = printable(result.detail)
    said = f": {note}" if result.disputed else ""
    yield f"{printable(result.vnnlib)}: {result.answer} ({result.reason} by {result.method}{trust}){said}"
    neurons = sum(network.nodes[i].size for i in network.activations)
    boxes = f", {len(case.queries)} boxes" if len(case.queries) > 1 else ""
    size = f"{network.input_size} inputs, {neurons} neurons, {network.output_size} outputs{boxes}"
    yield f"  network   {printable(result.onnx)}: {size}"
    for sentence in result.mended:
        yield f"  file      {printable(sentence)}"
    match result.answer, result.margin:
        case _, None:
            pass
        case "unsat", 0.0:
            yield "  margin    positive; the method proves no larger bound"
        case answer, margin:
            meanings = {"sat": "at the counterexample", "unsat": "a proven lower bound"}
            yield f"  margin    {margin:.6g} ({meanings.get(answer, 'the best lower bound found')})"
    if single:
        yield "  float32   the verdict holds for every evaluation in float32, too"
    if result.unstable is not None:
        yield f"  unstable  {result.unstable} neurons"
    stages = ", ".join(f"{name} {spent:.2f} s" for name, spent in result.stages.items())
    yield f"  time      {stages or f'{result.seconds:.2f} s'}; with reading and start-up {elapsed:.2f} s"
    if note and not said:
        yield f"  note      {note}"


def _many(options: argparse.Namespace, out: TextIO, alone: bool) -> int:
    """Answer the instances of a folder or a table as one campaign; returns the exit status.

    Args:
        options: the options.
        out: the file for the answers.
        alone: whether a process that is not this one answers even with ``--jobs 1``.
    """
    from verifiable_relu.spec import instances

    listed, count = instances(options.spec)
    jobs = 0 if options.executor is not None else workers(options, count)
    # In this process, exceptions can be raised, and objects given, that do not go from one process to another.
    here = jobs == 1 and options.worker_memory is None and (options.debug or not alone)
    started = launched(0 if here else jobs, None if jobs == 1 else 1)
    from verifiable_relu.campaign.console import Watcher
    from verifiable_relu.campaign.inputs import chosen
    from verifiable_relu.verifiers.copies import sharing

    watcher = Watcher(count, options.quiet, out)
    try:
        sharers = (options.jobs or sharing()) if jobs == 1 else 1
        method, limits = chosen(options.method, options.device, options.memory, sharers)
        method, _ = _certifying(options, method)
        with _store(options) as store, watcher:
            _answer(options, entries(options, listed), method, limits, started, store, watcher)
    except KeyboardInterrupt:
        kept = f"kept in {options.out}; the same command resumes" if options.out else "lost, since --out was not given"
        _say(f"interrupted: {watcher.done} of {count} instances are answered and {kept}")
        return 130
    except InputError:
        # The list has a bad row, or there is no more space for records.
        if watcher.done and not options.quiet:
            watcher.summary()
        raise
    finally:
        for worker in started:
            worker.stop()
    for vnnlib, detail in watcher.disputed:
        _say(f"{vnnlib}: {detail}")
    if not options.quiet:
        watcher.summary()
    for vnnlib, name, detail in watcher.faults:
        _fault(vnnlib, name, detail)
    return DISPUTED if watcher.disputed else 2 if watcher.bad else 1 if watcher.faults else 0


def _answer(
    options: argparse.Namespace,
    listed: Iterator[Entry],
    method: Verifier,
    limits: Limits,
    started: Sequence[Worker],
    store: Store | None,
    watcher: Watcher,
) -> None:
    """Answer a campaign, on a cluster, in the processes that were started, or in this one."""
    from verifiable_relu.campaign.queue import Local, run_parallel
    from verifiable_relu.campaign.worker import Job

    memory = options.worker_memory
    job = Job(method, loader(options), options.certificates, memory, limits, options.debug)
    if options.executor is None:
        here = len(started) == 1 and not _travels(job)
        hands = [] if here else [Local(worker, memory, options.memory) for worker in started]
        run_parallel(listed, job, hands, store, watcher)
        return
    from verifiable_relu.campaign.cluster import Cluster

    with Cluster(options.executor, store) as cluster:
        run_parallel(listed, job, cluster.hands, store, watcher)


def _status(result: Result) -> int:
    """The exit status; faults go to stderr.

    It is 3 if the checker refused a certificate, else 2 if an input was bad, else 1 if the program was at fault.
    """
    if result.disputed:
        _say(f"{result.vnnlib}: {result.detail}")
        return DISPUTED
    if result.reason != "error":
        return 0
    if result.method:
        _fault(result.vnnlib, result.method, result.detail)
    return 1 if result.method else 2


def _fault(vnnlib: object, method: str, detail: str) -> None:
    _say(f"{vnnlib}: fault of {method}: {detail}")


if __name__ == "__main__":
    sys.exit(alone())
