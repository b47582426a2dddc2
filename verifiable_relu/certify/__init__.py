"""The command ``certify``: its options, and the processes that answer, with limits of time and memory.

These are started before anything large is imported. One property is answered in a copy of this process, which is killed
at its limits; copies are made before torch starts threads. The instances of a list are answered by worker processes,
which import torch while this process does.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from verifiable_relu.command_line import (
    ERASE,
    Parser,
    add_debug,
    complain,
    guarded,
    named_file,
    own_stdout,
    seconds,
    write,
)
from verifiable_relu.errors import CallFailed, InputError, OutOfTime
from verifiable_relu.files import on_disk
from verifiable_relu.search.registry import methods

ABOUT = """Answer properties of neural networks: does some input of the box reach the unsafe set?

    verifiable-relu certify specs/cifar_eps.vnnlib
    verifiable-relu certify --spec specs/instances.csv --out results

For a property file, the first line of stdout is sat (there is a counterexample, which follows), unsat (there is none:
verified), unknown or timed-out. For a folder or an instances.csv, stdout has a line onnx,vnnlib,answer,seconds for
each instance as soon as it is answered. Exit status: 0 for every verdict, 2 for bad input, 1 for a fault of the
program, 130 if interrupted, 3 if the checker refuses the certificate of a verdict, which then is unknown.
"""

TIMEOUT = 60.0  # The time limit of an instance in seconds, where nothing else says one
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30}  # The binary logarithm of each unit of memory, in bytes


def parser() -> Parser:
    """Return the parser of the command line."""
    made = Parser(label="certify", prog="verifiable-relu certify", text=ABOUT)
    asked = made.add_argument_group("what is asked")
    either, what = asked.add_mutually_exclusive_group(required=True), "FILE|DIR|CSV"
    either.add_argument("file", type=Path, nargs="?", metavar=what, help="the same as --spec")
    either.add_argument("--spec", type=Path, metavar=what, help="the property file, folder or list")
    text = "the network, unless the property file names it; several networks in the form of instances.csv"
    asked.add_argument("--net", metavar="FILE", help=text)
    text = "the file of a network that a VNN-LIB 2.0 property declares; may be repeated"
    asked.add_argument("--network", type=named_file, action="append", default=[], metavar="NAME=FILE", help=text)
    text = """answer at once for the ReLU network and every network with λ-GELU of λ at least LAMBDA (one number, or one
        per layer) in its place; without a number, LAMBDA is the λ of the network's own λ-GELUs"""
    asked.add_argument("--family", nargs="?", type=hardness, const=True, metavar="LAMBDA[,LAMBDA…]", help=text)
    text = """answer for real numbers (real, the default), or for every evaluation of the file in float32, tf32,
        bfloat16 or float16: sums in any order, with or without fused operations and subnormal numbers; declared
        takes the type that a VNN-LIB 2.0 property declares for its networks"""
    asked.add_argument("--arithmetic", type=arithmetic, default="real", metavar="NAME", help=text)
    how = made.add_argument_group("how it is answered")
    text = f"{', '.join(methods())} (default: auto)"
    how.add_argument("--method", default="auto", choices=methods(), metavar="METHOD", help=text)
    text = f"the time limit for each instance (default: that of instances.csv, else {TIMEOUT:g})"
    how.add_argument("--timeout", type=seconds, metavar="SECONDS", help=text)
    how.add_argument("--device", default="cpu", help="a torch device (default: cpu)")
    text = """the memory of bounds, approximately, in bytes, such as 500000000, 512M or 2G (default: 1G); the program
        itself needs more"""
    how.add_argument("--memory", type=_bytes, metavar="BYTES", help=text)
    many = made.add_argument_group("many instances")
    text = """the number of processes that answer the instances of a folder or list, with one thread each, or that
        share the search for a single property (default: one for each core; 1: one process with all threads)"""
    many.add_argument("--jobs", type=_count, metavar="N", help=text)
    text = """the memory limit of each of these processes; an instance that needs more is unknown (default: half of
        the machine's memory)"""
    many.add_argument("--worker-memory", type=_bytes, metavar="BYTES", help=text)
    text = """a running Dask scheduler, whose workers answer the instances; they need the same files under the same
        paths (needs the package distributed)"""
    many.add_argument("--executor", metavar="dask://HOST:PORT", help=text)
    kept = made.add_argument_group("what is kept")
    text = """the folder for results.csv (this run), counterexamples, and records.jsonl (all runs, whose answers are not
        computed again, unless a longer time limit may decide more)"""
    kept.add_argument("--out", type=Path, metavar="DIR", help=text)
    text = "move lines of DIR/records.jsonl that are no records to a file DIR/records.jsonl.bad-N, and go on"
    kept.add_argument("--repair", action="store_true", help=text)
    text = """write a certificate of every sat and unsat there, and have it checked by the independent checker (python
        -m verifiable_relu.check); a verdict whose certificate is accepted is 'checked'"""
    kept.add_argument("--certificates", type=Path, metavar="DIR", help=text)
    shown = made.add_argument_group("what is shown")
    text = "print which methods auto would use for a property file, in which order and why, and do not answer it"
    shown.add_argument("--explain", action="store_true", help=text)
    shown.add_argument("--quiet", action="store_true", help="print nothing but errors to stderr")
    add_debug(shown)
    for action in made._actions:
        action.help = " ".join((action.help or "").split())
    made.set_defaults(command="", end=math.inf, lines=None)
    return made


def main(arguments: Sequence[str] | None = None, alone: bool = False) -> int:
    """Run the command; returns the exit status.

    If the process runs this command alone, everything that libraries print to stdout, those in C included, goes to
    stderr from now on, so that stdout has the answers alone.
    """
    made = parser()
    options = made.parse_args(arguments)
    options.command = shlex.join([*made.prog.split(), *(sys.argv[1:] if arguments is None else arguments)])
    return answer(made, options, alone)


def answer(made: Parser, options: argparse.Namespace, alone: bool) -> int:
    """Do what the options of ``parser`` ask for; returns the exit status.

    ``end`` among them is the time, by ``time.perf_counter``, at which the answer to one property has to be there, and
    ``lines`` returns what stdout gets of it; None for the verdict and the counterexample of the competition.
    """
    options.label, options.spec = made.label, options.spec or options.file
    if options.explain and options.method != "auto":
        made.error("--explain needs the method auto")
    if options.executor and not re.fullmatch(r"dask://[^\s/:]+:[0-9]{1,5}", options.executor):
        made.error(f"--executor: '{options.executor}' is not of the form dask://HOST:PORT")
    if options.repair and not options.out:
        made.error("--repair needs --out")
    if options.executor and (options.jobs is not None or options.worker_memory is not None):
        made.error("--executor excludes --jobs and --worker-memory, about which the Dask cluster decides")

    def work() -> int:
        out = own_stdout() if alone else sys.stdout
        _require_files(options)
        if options.explain:
            return int(_command().explain(options, out))
        if os.path.isdir(options.spec) or options.spec.suffix == ".csv":
            return _answer_list(options, out, alone)
        return _answer_property(options, out, alone)

    return guarded(made.label, work, options.debug)


def _require_files(options: argparse.Namespace) -> None:
    """Raise an InputError, before anything is imported, for a file that is not there or stands in a wrong place."""
    spec, net = options.spec, options.net
    if spec.name.removesuffix(".gz").endswith(".onnx"):
        raise InputError("a network, where a property is expected: give the network with --net", path=spec)
    if net is not None and options.network:
        raise InputError("give either --net or --network, not both", place="--net")
    for path in (spec,) if net is None or net.lstrip().startswith("[") else (spec, Path(net)):
        try:
            os.stat(on_disk(path))
        except FileNotFoundError:
            raise InputError("no such file", path=path) from None
        except (OSError, ValueError):
            # Whoever reads it says why it cannot be read.
            continue


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _count(text: str) -> int:
    if not re.fullmatch(r"0*[1-9][0-9]{0,3}", text):
        raise argparse.ArgumentTypeError(f"'{text}' is not a number from 1 to 9999")
    return int(text)


def _bytes(text: str) -> int:
    found = re.fullmatch(r"([0-9]+)([KMG]?)", text, re.IGNORECASE)
    size = int(found[1]) << _UNITS[found[2].upper()] if found else 0
    if not size:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of bytes, such as 500000000, 512M or 2G")
    return size


def hardness(text: str) -> float | tuple[float, ...]:
    """Return λ as a command line has it, one for the network or one for each layer: finite numbers from 1 on."""
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = (math.nan,)
    if not all(1 <= lam < math.inf for lam in found):
        raise argparse.ArgumentTypeError(f"'{text}' is not a finite number of at least 1, nor a list of them")
    return found if len(found) > 1 else found[0]


def arithmetic(text: str) -> str:
    """Return the name of an arithmetic on a command line."""
    if text not in ("real", "declared"):
        # Imported here, because numpy comes with it.
        from verifiable_relu.rounding import ARITHMETICS

        if text not in ARITHMETICS:
            said = f"unknown arithmetic '{text}'; there are real, declared, {', '.join(ARITHMETICS)}"
            raise argparse.ArgumentTypeError(said)
    return text


def _command() -> Any:
    """Import what answers: torch, onnx and the methods take more than a second of processor time."""
    from verifiable_relu.certify import command

    return command


def _answer_list(options: argparse.Namespace, out: TextIO, alone: bool) -> int:
    # Imported here, because one property does not need them before the copy is made.
    from verifiable_relu.spec import instances
    from verifiable_relu.supervisor.workers import DaskExecutor, Executor, LocalExecutor

    listed = instances(options.spec)
    # Processes would share one accelerator.
    jobs = min(len(listed), options.jobs or (cores() if options.device == "cpu" else 1))
    # In this process, exceptions can be raised, and objects given, that do not go from one process to another.
    executor = Executor()
    if options.executor is not None:
        kept = "answers so far are kept, the same command resumes" if options.out else "answers so far are lost"
        executor = DaskExecutor(options.executor, kept)
    elif jobs > 1 or options.worker_memory is not None or (alone and not options.debug):
        limits, threads = (options.worker_memory, options.memory), None if jobs == 1 else 1
        executor = LocalExecutor(jobs, *limits, threads, "verifiable_relu.campaign.queue")
    try:
        return int(_command().answer_list(options, out, listed, executor))
    finally:
        executor.stop()


def _answer_property(options: argparse.Namespace, out: TextIO, alone: bool) -> int:
    """Answer one property; returns the exit status.

    A process that is ``alone`` does it in a copy, which is killed at the limits that it sets. Where the copy ends
    without an answer, this process says and records that.
    """
    if not alone or options.debug:
        return int(_command().answer_property(options, out))
    # Imported here, because --help need not wait for it.
    from verifiable_relu.supervisor.forks import run_limited

    seconds = options.end - time.perf_counter()
    ended = run_limited(lambda set_limits: int(_command().answer_property(options, out, set_limits)), seconds)
    if ended.status is not None and ended.status >= 0:
        return ended.status
    late = ended.status is None and not ended.out_of_memory
    verdict = "timed-out" if late else "unknown"
    # This comes before imports, which take longer than the limit allows for.
    write([verdict], out)
    # The first limit is that of reading.
    reading = ended.limits_set <= 1
    where = "reading its files" if reading else options.method
    failed = not late and not ended.out_of_memory
    why = "time limit reached" if late else "failed" if failed else "out of memory"
    if not options.quiet:
        # The process that has ended may have left the line of its progress.
        erased = ERASE if sys.stderr is not None and sys.stderr.isatty() else ""
        print(f"{erased}{options.spec}: {verdict} ({why} in {where}); its process has ended", file=sys.stderr)
    if failed:
        complain(options.label, f"{options.spec}: fault of {where}: its process ended with the status {ended.status}")
    if options.out is not None:
        killed = OutOfTime(0 if reading else None) if late else MemoryError()
        _command().record_lost(options, CallFailed(where) if failed else killed)
    return 1 if failed else 0
