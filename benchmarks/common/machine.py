"""The conditions of a measurement: the machine, its load, the versions of packages and the command."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path


def describe() -> str:
    """A line with the processor, the number of cores, and the versions of Python and of packages."""
    # Imported here, because the import loads torch, for which --help need not wait.
    from verifiable_relu.campaign.result import processor, versions

    return f"{processor()}, {os.cpu_count()} cores, {', '.join(f'{name} {v}' for name, v in versions().items())}"


def commit(folder: Path) -> str:
    """The commit of the git clone that a folder lies in; ends with ``-changed`` where files in the folder differ.

    Empty outside a clone, or where git is not installed.
    """

    def git(*arguments: str) -> str:
        line = ["git", "-C", str(folder), *arguments]
        return subprocess.run(line, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=10", "HEAD") + ("-changed" if git("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def load_average() -> float:
    """The system's load average over the last minute, in processes; NaN if the system reports none."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")


def command(module: str, arguments: list[str] | None = None) -> str:
    """The command line that runs a script again, from the root of the clone.

    Args:
        module: the script's name, such as ``benchmarks.training.arms``.
        arguments: the command line's arguments; None takes those of this process.
    """
    return f"python -m {module} {shlex.join(sys.argv[1:] if arguments is None else arguments)}".strip()


def conditions(module: str, arguments: list[str] | None = None) -> str:
    """The line that is noted before the first record of a run: command, load average and machine.

    Arguments of the command that are absolute paths are replaced by PATH, since they mean nothing on another machine.
    """
    told = ["PATH" if Path(text).is_absolute() else text for text in (sys.argv[1:] if arguments is None else arguments)]
    return f"`{command(module, told)}`. Load average {load_average():.1f} at the start. {describe()}."
