"""What a figure was measured on and by which command, for the head of every results file."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from pathlib import Path

from verifiable_relu.campaign.result import versions


def processor() -> str:
    """The processor's name as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def describe() -> str:
    """One line: processor, cores, Python and package versions."""
    return f"{processor()}, {os.cpu_count()} cores, {', '.join(f'{name} {v}' for name, v in versions().items())}"


def command() -> str:
    """The command line that runs this again, from the root of the clone."""
    return f"python benchmarks/{Path(sys.argv[0]).name} {shlex.join(sys.argv[1:])}".strip()


def load_average() -> str:
    """How busy the machine is with everything that runs on it, as a sentence."""
    return f"Load average {os.getloadavg()[0]:.1f} at the end."
