"""The command ``certify``, run with limits on processor time, wall-clock time and memory.

``answers`` starts one process for all tests, which imports what the command needs and then runs each command line in a
child of its own: as isolated as a process each, without two seconds of imports each. ``python -m
tests.soundness.limited`` is that process: for each line of JSON on stdin, a command line and its limit of wall-clock
time, a line of JSON goes out.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROCESSOR_SECONDS = 10
"""Twice what a bad file may take: the machine of the tests can be a slow one."""
WALL_SECONDS = 60
ADDRESS_SPACE = 2 * 2**30
"""Bytes beside what the process has when a command starts: a command that asks for more fails at once."""


@dataclass(frozen=True)
class Answer:
    """How a command ended, what it printed and what it took."""

    arguments: tuple[str, ...]
    status: int
    """Its exit status; below zero the signal that ended it."""
    stdout: str
    stderr: str
    seconds: float
    """Of processor time."""
    mebibytes: float
    """The most that was resident, libraries included."""

    def __str__(self) -> str:
        command = " ".join(Path(a).name if "/" in a else a for a in self.arguments)
        printed = f"{self.stdout[:100]!r}, {self.stderr[-300:]!r}"
        return f"{command}: status {self.status}, {printed}, {self.seconds:.1f} s, {self.mebibytes:.0f} MiB"

    @property
    def verdict(self) -> str:
        return self.stdout.partition("\n")[0]


@cache
def _server() -> subprocess.Popen[str]:
    """The process that runs all commands; it ends with its stdin, hence with this process."""
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.soundness.limited"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    atexit.register(server.wait)
    assert server.stdin is not None
    atexit.register(server.stdin.close)
    return server


def answers(commands: Sequence[Sequence[str]], *, wall_seconds: float = WALL_SECONDS) -> list[Answer]:
    """Run ``certify`` with each list of arguments."""
    server, found = _server(), []
    assert server.stdin is not None and server.stdout is not None
    for command in commands:
        print(json.dumps([list(command), wall_seconds]), file=server.stdin, flush=True)
        found.append(Answer(tuple(command), **json.loads(server.stdout.readline())))
    return found


def _child(arguments: list[str], wall_seconds: float) -> None:
    from verifiable_relu.certify import main

    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + ADDRESS_SPACE,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (int(max(PROCESSOR_SECONDS, wall_seconds)),) * 2)
    signal.setitimer(signal.ITIMER_REAL, wall_seconds)
    status = 1
    try:
        status = main(arguments)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _run(arguments: list[str], wall_seconds: float) -> dict[str, object]:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if child == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            _child(arguments, wall_seconds)
        _, ended, used = os.wait4(child, 0)
        printed = []
        for file in (out, err):
            file.seek(0)
            printed.append(file.read(1_000_000).decode(errors="replace"))
    return {
        "status": os.waitstatus_to_exitcode(ended),
        "stdout": printed[0],
        "stderr": printed[1],
        "seconds": used.ru_utime + used.ru_stime,
        "mebibytes": used.ru_maxrss / 1024,
    }


def main() -> None:
    """Run the commands on stdin."""
    for name in ("torch", "onnx", "verifiable_relu.certify", "verifiable_relu.api", "onnxruntime"):
        with warnings.catch_warnings(action="ignore"):
            importlib.import_module(name)
    for line in sys.stdin:
        print(json.dumps(_run(*json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
