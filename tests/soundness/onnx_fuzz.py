"""Damaged ONNX files: a reader refuses them in one line, or reads what onnxruntime reads.

The reader is the package's, ``read_onnx``, or that of the checker of certificates.

The files are tried in a process of its own, with limits on its memory and on each case's processor time: a case that
ends the process (a crash, too much memory, no end) is counted, and a new process goes on with the next one.

``python -m tests.soundness.onnx_fuzz --kind messages --count 20000 --seed 1 [--dump DIR]`` prints what is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count as numbers
from itertools import islice
from pathlib import Path

from tests.support.processes import ROOT, Process

from .onnx_mutations import KINDS

READERS = ("package", "checker")
SEEDS = 60
"""So many generated files are damaged, beside those in the data folder."""
LARGEST_SEED = 5_000
CASE_SECONDS = 20.0
"""Processor time for one case: far more than any takes, so that only one without end is stopped."""
MEMORY = 2 * 2**30
"""Address space, in bytes, beside what the process has when it starts with the cases."""
CASE_MEMORY = 400 * 2**20
"""By so many bytes, at most, the process may grow while it reads one file."""


def originals(reader: str) -> list[bytes]:
    """Small files to damage: generated ones, and those on which readers once erred, where the data folder is there.

    Of the generated ones those that the reader reads, which for the checker are few.
    """
    from .check_agreement import judge
    from .onnx_graphs import graph

    if reader == "package":
        made = [graph(seed).data for seed in range(SEEDS)]
    else:
        drawn = (graph(seed).data for seed in numbers())
        made = list(islice((data for data in drawn if judge(data).refused is None), SEEDS))
    folder = os.environ.get("VERIFIABLE_RELU_DATA")
    if folder:
        for name in ("wrong_verdicts", "bad_input/onnx"):
            for path in sorted(Path(folder, name).glob("*.onnx")):
                if 0 < path.stat().st_size <= LARGEST_SEED:
                    made.append(path.read_bytes())
    return made


def damaged(kind: str, seed: int, index: int, files: Sequence[bytes]) -> bytes:
    """The case of a number."""
    rng = random.Random(f"{kind} {seed} {index}")
    while True:
        try:
            return KINDS[kind](rng.choice(files), rng)
        except (TypeError, ValueError, UnicodeError):
            continue  # the original is no message, or protobuf takes no such value


@dataclass
class Findings:
    """What a number of cases came to."""

    cases: int = 0
    loaded: int = 0
    wrong: list[tuple[int, str, str]] = field(default_factory=list)
    """Case, kind, particulars."""

    def kinds(self) -> Counter[str]:
        return Counter(kind for _, kind, _ in self.wrong)


def child(reader: str, kind: str, seed: int, first: int, count: int) -> None:
    """Try cases, and print a line before and after each."""
    from . import check_agreement, onnx_agreement  # torch and onnxruntime come in before memory is limited

    judge = {"package": onnx_agreement.judge, "checker": check_agreement.judge}[reader]

    files = originals(reader)
    judge(files[0])
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, resource.RLIM_INFINITY))
    for index in range(first, count):
        print(json.dumps({"case": index}), flush=True)
        data = damaged(kind, seed, index, files)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        signal.setitimer(signal.ITIMER_PROF, CASE_SECONDS)
        found = judge(data, index)
        signal.setitimer(signal.ITIMER_PROF, 0)
        wrong = [(one.kind, one.detail) for one in found.disagreements]
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
        if grown > CASE_MEMORY:
            wrong.append(("too much memory", f"{grown / 2**20:.0f} MiB"))
        print(json.dumps({"loaded": found.refused is None, "wrong": wrong}), flush=True)


def fuzz(kind: str, count: int, seed: int, reader: str = "package") -> Findings:
    """Try ``count`` damaged files; ``kind`` is a key of ``KINDS``; ``reader``, one of ``READERS``."""
    found = Findings()
    while found.cases < count:
        first = found.cases
        for line in _lines(reader, kind, seed, first, count):
            if "case" in line:
                found.cases = line["case"] + 1
            elif "wrong" in line:
                found.loaded += line["loaded"]
                found.wrong.extend((found.cases - 1, one, detail) for one, detail in line["wrong"])
            elif line["status"] != 0:
                if found.cases == first:
                    raise RuntimeError(f"the process that tries files does not start:\n{line['stderr']}")
                ended = "no end" if line["status"] == -signal.SIGPROF else "the process ended"
                found.wrong.append((found.cases - 1, ended, f"status {line['status']}: {line['stderr'][-300:]}"))
    return found


def _lines(reader: str, kind: str, seed: int, first: int, count: int) -> Iterator[dict]:
    """What a process that tries the cases from ``first`` on prints, and at last how it ended."""
    command = ["-m", "tests.soundness.onnx_fuzz", "--child", "--kind", kind, "--seed", seed]
    command += ["--reader", reader, "--first", first, "--count", count]
    with Process(command, cwd=ROOT) as process:
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
        stderr = process.stderr.read()
    yield {"status": process.returncode, "stderr": stderr}


def main(arguments: list[str] | None = None) -> int:
    """Try damaged files; exit status 1 if something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.soundness.onnx_fuzz")
    parser.add_argument("--kind", choices=KINDS, default="messages")
    parser.add_argument("--reader", choices=READERS, default="package", help="the package's, or the checker's")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dump", type=Path, help="a folder for the files with which something is wrong")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        child(options.reader, options.kind, options.seed, options.first, options.count)
        return 0
    found = fuzz(options.kind, options.count, options.seed, options.reader)
    files = originals(options.reader) if options.dump else []
    for index, kind, detail in found.wrong:
        print(f"case {index}: {kind}: {detail}")
        if options.dump:
            options.dump.mkdir(parents=True, exist_ok=True)
            data = damaged(options.kind, options.seed, index, files)
            (options.dump / f"{options.kind}-{options.seed}-{index}.onnx").write_bytes(data)
    print(f"{found.cases} cases, {found.loaded} loaded, {len(found.wrong)} wrong:", dict(found.kinds().most_common()))
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
