"""What a figure was measured on, for the head of every results file."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

PACKAGES = ("verifiable-relu", "torch", "highspy", "z3-solver", "onnxruntime", "numpy")


def processor() -> str:
    """The processor's name as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def describe() -> str:
    """One line: processor, cores, Python and package versions."""
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    return f"{processor()}, {os.cpu_count()} cores, Python {platform.python_version()}, {versions}"
