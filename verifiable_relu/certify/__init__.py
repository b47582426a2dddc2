"""Answer properties of neural networks: does some input of the box reach the unsafe set?

The help (``certify_options.ABOUT``) says what the command prints and how it exits. Processes with limits of time and
memory are started here, before anything large is imported. One property is answered in a copy of this process, which is
killed at its limits; copies are made before torch starts threads. The instances of a list are answered by worker
processes, which import torch while this process does.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, TextIO

from verifiable_relu.certify_options import parse, parser, require_files, workers
from verifiable_relu.errors import CallFailed, OutOfTime
from verifiable_relu.streams import complain, guarded, own_stdout, write

if TYPE_CHECKING:
    from verifiable_relu.supervisor.forks import Ended


def main(arguments: Sequence[str] | None = None, alone: bool = False) -> int:
    """Run the command; returns the exit status.

    If the process runs this command alone, everything that libraries print to stdout, those in C included, goes to
    stderr from now on, so that stdout has the answers alone.
    """
    options = parse(parser(), arguments)

    def work() -> int:
        out = own_stdout() if alone else sys.stdout
        require_files(options)
        if options.explain:
            return int(_command().explain(options, out))
        if os.path.isdir(options.spec) or options.spec.suffix == ".csv":
            return _answer_list(options, out, alone)
        if not alone or options.debug:
            return int(_command().answer_property(options, out))
        # Imported here, because --help need not wait for it.
        from verifiable_relu.supervisor.forks import run_limited

        ended = run_limited(lambda set_limits: _command().answer_property(options, out, set_limits))
        return ended.status if ended.status is not None and ended.status >= 0 else _tell_lost(options, out, ended)

    return guarded("certify", work, options.debug)


def _command() -> ModuleType:
    """Import what answers: torch, onnx and the methods take more than a second of processor time."""
    from verifiable_relu.certify import command

    return command


def _answer_list(options: argparse.Namespace, out: TextIO, alone: bool) -> int:
    # Imported here, because one property does not need them before the copy is made.
    from verifiable_relu.spec import instances
    from verifiable_relu.supervisor.workers import launch_workers

    listed, count = instances(options.spec)
    jobs = 0 if options.executor is not None else workers(options, count)
    # In this process, exceptions can be raised, and objects given, that do not go from one process to another.
    here = jobs == 1 and options.worker_memory is None and (options.debug or not alone)
    started = launch_workers(0 if here else jobs, None if jobs == 1 else 1, "verifiable_relu.campaign.queue")
    try:
        return int(_command().answer_list(options, out, listed, count, started))
    finally:
        for worker in started:
            worker.stop()


def _tell_lost(options: argparse.Namespace, out: TextIO, ended: Ended) -> int:
    """Say and record that the process that was to answer one property file has ended; returns the exit status."""
    late = ended.status is None and not ended.out_of_memory
    answer = "timed-out" if late else "unknown"
    # This comes before imports, which take longer than the limit allows for.
    write([answer], out)
    # The first limit is that of reading.
    reading = ended.limits_set == 1
    where = "reading its files" if reading else options.method
    why = "timeout" if late else "memory" if ended.out_of_memory else "error"
    if not options.quiet:
        # The process that has ended may have left the line of its progress.
        erased = "\r\x1b[2K" if sys.stderr is not None and sys.stderr.isatty() else ""
        print(f"{erased}{options.spec}: {answer} ({why} by {where}); its process has ended", file=sys.stderr)
    if why == "error":
        complain("certify", f"{options.spec}: fault of {where}: its process ended with the status {ended.status}")
    if options.out is not None:
        killed = OutOfTime(0 if reading else None) if late else MemoryError()
        _command().record_lost(options, CallFailed(where) if why == "error" else killed)
    return 1 if why == "error" else 0
