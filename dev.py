#!/usr/bin/env python3
"""Set everything up in ``.venv`` and work in it. Needs Python 3.11 or later and nothing else.

    python3 dev.py run COMMAND ...    run a command in the environment
    python3 dev.py check [ARG ...]    lint, types, import contract and tests; ARGs go to pytest
    python3 dev.py docs               build the documentation in site/
    python3 dev.py setup              only set up

The set-up is skipped while pyproject.toml, constraints.txt and this file are what they were.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
PYTHON = BIN / ("python.exe" if os.name == "nt" else "python")
STAMP = VENV / "set-up.sha256"

# Its metadata asks for torch < 1.13, so that it is never part of a resolution; what it imports is in the extra.
AUTO_LIRPA = "auto_LiRPA==0.3"

CHECKS = (
    ("ruff", "check", "."),
    ("ruff", "format", "--check", "."),
    ("mypy",),
    ("lint-imports", "--no-logo"),
)


def fingerprint() -> str:
    """What the environment depends on, as a digest."""
    state = hashlib.sha256(sys.version.encode())
    for name in ("pyproject.toml", "constraints.txt", "dev.py"):
        state.update((ROOT / name).read_bytes())
    return state.hexdigest()


def set_up() -> None:
    """Make ``.venv`` with the pinned versions, unless it is there already.

    Raises:
        SystemExit: if this Python is too old.
        subprocess.CalledProcessError: if pip fails.
    """
    if sys.version_info < (3, 11):  # noqa: UP036 -- this file must still explain itself to an older Python
        sys.exit(f"dev.py: Python 3.11 or later is needed, this is {sys.version.split()[0]} ({sys.executable})")
    wanted = fingerprint()
    if STAMP.is_file() and STAMP.read_text() == wanted:
        return
    print("dev.py: setting up .venv (about a minute)", file=sys.stderr, flush=True)
    venv.create(VENV, clear=True, with_pip=True)
    # Modules are compiled when they are imported: most of what is installed never is.
    pip = [str(PYTHON), "-m", "pip", "install", "-qq", "--no-compile", "--disable-pip-version-check"]
    for arguments in (["-c", "constraints.txt", "-e", ".[dev]"], ["--no-deps", AUTO_LIRPA]):
        subprocess.run([*pip, *arguments], cwd=ROOT, check=True, stdout=sys.stderr)
    STAMP.write_text(wanted)


def environment(**extra: str) -> Mapping[str, str]:
    """The variables of this process with ``.venv`` active."""
    path = os.pathsep.join([str(BIN), os.environ.get("PATH", "")])
    variables = {**os.environ, "VIRTUAL_ENV": str(VENV), "PATH": path, **extra}
    # Byte code that is not kept would be compiled anew by every process, that of torch in several seconds.
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    return variables


def check(pytest_arguments: Sequence[str]) -> int:
    """Run every check, whatever the others say, and sum up on stderr; 0 if all passed.

    The others run beside pytest, and their output comes behind its own.
    """
    # Two test processes with several threads each would only fight for the cores.
    variables = environment(OMP_NUM_THREADS="1")
    # Each process takes half of the tests in turn, and what the other has left when it is done with them.
    tests = ("pytest", "-n", "2", "--dist", "worksteal", *pytest_arguments)

    def result(command: Sequence[str], shown: bool) -> tuple[str, bool, float, str]:
        start = time.monotonic()
        to = None if shown else subprocess.PIPE
        done = subprocess.run(
            [BIN / command[0], *command[1:]],
            cwd=ROOT,
            env=variables,
            stdout=to,
            stderr=subprocess.STDOUT if to else None,
        )
        return " ".join(command), done.returncode != 0, time.monotonic() - start, (done.stdout or b"").decode()

    with ThreadPoolExecutor(len(CHECKS)) as pool:
        beside = [pool.submit(result, command, False) for command in CHECKS]
        results = [result(tests, True), *(one.result() for one in beside)]
    for line, _, _, output in results[1:]:
        print(f"dev.py: {line}\n{output}", end="", flush=True)
    for line, failed, seconds, _ in results:
        print(f"dev.py: {'FAILED' if failed else 'passed'} {seconds:6.1f} s  {line}", file=sys.stderr)
    return int(any(failed for _, failed, _, _ in results))


def run(command: Sequence[str]) -> int:
    """Run one command in the environment, in the caller's folder; its exit status."""
    variables = environment()
    program = shutil.which(command[0], path=variables["PATH"])
    if program is None:
        sys.exit(f"dev.py: no program '{command[0]}'")
    with subprocess.Popen([program, *command[1:]], env=variables) as process:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                # The terminal interrupts the command too: how it ends is its own affair.
                continue


def main(arguments: Sequence[str]) -> int:
    """Do what the command line says; returns the exit status."""
    action, rest = "".join(arguments[:1]), arguments[1:]
    if action == "check":
        set_up()
        return check(rest)
    if action == "run" and rest:
        set_up()
        return run(rest)
    if action == "docs" and not rest:
        set_up()
        return run(["mkdocs", "build", "--strict"])
    if action == "setup" and not rest:
        set_up()
        return 0
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
