"""The command ``certify``, run with limits on processor time, wall-clock time and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.processes import ROOT, Process

PROCESSOR_SECONDS = 10
"""Twice what a bad file may take: the machine of the tests can be a slow one."""
WALL_SECONDS = 60
ADDRESS_SPACE = 2 * 2**30
"""Bytes beside what the process has when a command starts: a command that asks for more fails at once."""

_COMMAND = f"""
import resource, signal, sys
from pathlib import Path
from verifiable_relu.certify import main

seconds = float(sys.argv.pop(1))
size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + {ADDRESS_SPACE},) * 2)
resource.setrlimit(resource.RLIMIT_CPU, (int(max({PROCESSOR_SECONDS}, seconds)),) * 2)
signal.setitimer(signal.ITIMER_REAL, seconds)
sys.exit(main())
"""
"""The command, whose first argument is its limit of wall-clock time."""


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
    """The most that was resident beside the libraries."""

    def __str__(self) -> str:
        command = " ".join(Path(a).name if "/" in a else a for a in self.arguments)
        printed = f"{self.stdout[:100]!r}, {self.stderr[-300:]!r}"
        return f"{command}: status {self.status}, {printed}, {self.seconds:.1f} s, {self.mebibytes:.0f} MiB"

    @property
    def verdict(self) -> str:
        return self.stdout.partition("\n")[0]


def answers(commands: Sequence[Sequence[str]], *, wall_seconds: float = WALL_SECONDS) -> list[Answer]:
    """Run ``certify`` with each list of arguments, each in a process of its own."""
    found = []
    for command in commands:
        with Process(["-c", _COMMAND, wall_seconds, *command], cwd=ROOT) as process:
            stdout, stderr = process.communicate()
        found.append(Answer(tuple(command), process.wait(), stdout, stderr, process.seconds, process.mebibytes))
    return found
