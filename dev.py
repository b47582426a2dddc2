#!/usr/bin/env python3
"""Set up what a command needs in ``.venv``, and run it there. Needs Python 3.11 or later and nothing else.

    python3 dev.py run COMMAND ...    run a command in the environment
    python3 dev.py check [ARG ...]    lint, types, import contract and tests; ARGs go to pytest
    python3 dev.py check --quick ...  lint and a case of most tests, in under a minute
    python3 dev.py check --all ...    everything, with the tests that a change of the package hardly ever breaks
    python3 dev.py check --newest ... everything but these with the newest versions allowed, in .venv-newest
    python3 dev.py docs               build the documentation in site/
    python3 dev.py setup [EXTRA ...]  only set up the package, and extras of pyproject.toml

Each command installs what is missing for it. The set-up is made anew when pyproject.toml, constraints.txt, this file or
the version of Python changes.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent

# Its metadata asks for torch < 1.13, so that it is never part of a resolution; what it imports is in the extra.
AUTO_LIRPA = "auto_LiRPA==0.3"

# Without it, pip takes a build for GPUs on Linux: 5 GB instead of 1.2 GB.
CPU_BUILDS = "https://download.pytorch.org/whl/cpu"

# The extras that commands need, by the names of programs, modules, scripts' folders and subcommands.
NEEDED = {
    **dict.fromkeys(("benchmarks", "hatchling", "lint-imports", "mypy", "pytest", "ruff", "tests"), ("dev",)),
    **dict.fromkeys(("harden", "spec", "train"), ("data",)),
    "mkdocs": ("docs",),
}

LINT = (("ruff", "check", "."), ("ruff", "format", "--check", "."))
CHECKS = (*LINT, ("mypy",), ("lint-imports", "--no-logo"))

# The checks beside the tests, and what pytest is told, by option of check.
SCOPES: dict[str, tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]] = {
    "--quick": (LINT, ("-m", "quick")),
    "--all": (CHECKS, ("-m", "")),
    "--newest": (CHECKS, ()),
}


@dataclass(frozen=True)
class Environment:
    """A virtual environment of the project.

    Attributes:
        folder: its folder.
        pinned: whether the versions are those of constraints.txt, rather than the newest that pyproject.toml allows.
    """

    folder: Path
    pinned: bool = True

    @property
    def programs(self) -> Path:
        """The folder of its programs."""
        return self.folder / ("Scripts" if os.name == "nt" else "bin")

    def set_up(self, extras: Iterable[str] = ()) -> None:
        """Install the package and extras of it, unless they are there already.

        Raises:
            SystemExit: if this Python is too old or has no ``ensurepip``, or if pip fails.
        """
        if sys.version_info < (3, 11):  # noqa: UP036 -- this file must still explain itself to an older Python
            sys.exit(f"dev.py: Python 3.11 or later is needed, this is {sys.version.split()[0]} ({sys.executable})")
        stamp = self.folder / "set-up.txt"
        state, *there = stamp.read_text().split() if stamp.is_file() else [""]
        if state != fingerprint():
            if find_spec("ensurepip") is None:
                sys.exit(
                    "dev.py: this Python lacks the module ensurepip; on Debian, apt install python3-venv brings it"
                )
            venv.create(self.folder, clear=True, with_pip=True)
            there = []
        wanted = {"base", *extras}
        # The extra "dev" has all others in it.
        if wanted <= {*there} or "dev" in there:
            return
        extra = sorted(wanted - {"base"})
        asked = f".[{','.join(extra)}]" if extra else "."
        print(f"dev.py: setting up {asked} in {self.folder.name}", file=sys.stderr, flush=True)
        try:
            if "base" not in there:
                self._torch()
            self._pip("-e", asked)
            if not {"dev", "auto-lirpa"}.isdisjoint(extra):
                self._pip("--no-deps", AUTO_LIRPA)
        except subprocess.CalledProcessError as error:
            sys.exit(f"dev.py: pip ended with status {error.returncode}, as it says above")
        stamp.write_text("\n".join([fingerprint(), *sorted({*there, *wanted})]))

    def _torch(self) -> None:
        """Install PyTorch's build for CPUs where PyPI's build is for GPUs and this machine has none for it."""
        if sys.platform != "linux" or shutil.which("nvidia-smi") or Path("/proc/driver/nvidia/version").exists():
            return
        file, pattern = (
            ("constraints.txt", r"^(torch==\S+)$") if self.pinned else ("pyproject.toml", r'"(torch>=[^"]+)"')
        )
        found = re.search(pattern, (ROOT / file).read_text(), re.MULTILINE)
        assert found is not None, f"{file} does not say which version of torch"
        # The user's configuration of pip, such as a mirror without this build, comes second.
        alone = {**os.environ, "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": ""}
        options = ("--no-deps", "--retries", "0", "--timeout", "10", "--index-url", CPU_BUILDS)
        try:
            self._pip(*options, found[1], environment=alone, output=subprocess.DEVNULL)
        except subprocess.CalledProcessError:
            print(f"dev.py: no {found[1]} from {CPU_BUILDS}: pip's own choice is taken", file=sys.stderr, flush=True)
            if not self.pinned:
                # The newest build for GPUs would say no more about the package than the pinned one for CPUs.
                self._pip("-c", "constraints.txt", "torch")

    def _pip(self, *arguments: str, environment: Mapping[str, str] | None = None, output: int | None = None) -> None:
        """Install by pip; what pip says goes to stderr."""
        # Modules are compiled when they are imported: most of what is installed never is.
        command = [str(self.programs / "python"), "-m", "pip", "install", "-qq", "--no-compile"]
        command += ["--disable-pip-version-check", *(("-c", "constraints.txt") if self.pinned else ())]
        to = sys.stderr if output is None else output
        subprocess.run([*command, *arguments], cwd=ROOT, env=environment, check=True, stdout=to, stderr=output)

    def variables(self, **extra: str) -> dict[str, str]:
        """Return the variables of this process with the environment active."""
        path = os.pathsep.join([str(self.programs), os.environ.get("PATH", "")])
        variables = {**os.environ, "VIRTUAL_ENV": str(self.folder), "PATH": path, **extra}
        # Byte code that is not kept would be compiled anew by every process, that of torch in several seconds.
        variables.pop("PYTHONDONTWRITEBYTECODE", None)
        return variables


PINNED = Environment(ROOT / ".venv")
NEWEST = Environment(ROOT / ".venv-newest", pinned=False)


def fingerprint() -> str:
    """Return a digest of all that an environment depends on."""
    state = hashlib.sha256(sys.version.encode())
    for name in ("pyproject.toml", "constraints.txt", "dev.py"):
        state.update((ROOT / name).read_bytes())
    return state.hexdigest()


def needed(command: Sequence[str]) -> set[str]:
    """Return the extras that a command is known to need: ``python -m verifiable_relu.train`` needs ``data``."""
    words = (re.split(r"[./\\]", word.removeprefix("verifiable_relu."))[0] for word in command[:3])
    return {extra for word in words for extra in NEEDED.get(word, ())}


def check(where: Environment, pytest_arguments: Sequence[str], checks: Sequence[Sequence[str]] = CHECKS) -> int:
    """Run the tests and every check, whatever the others say, and sum up on stderr; 0 if all passed.

    The checks run beside pytest, and their output comes behind its own.
    """
    # Two test processes with several threads each would only fight for the cores.
    variables = where.variables(OMP_NUM_THREADS="1")
    # Each process takes half of the tests in turn, and what the other has left when it is done with them.
    tests = ("pytest", "-n", "2", "--dist", "worksteal", *pytest_arguments)

    def result(command: Sequence[str], shown: bool) -> tuple[str, bool, float, str]:
        start = time.monotonic()
        to = None if shown else subprocess.PIPE
        done = subprocess.run(
            [where.programs / command[0], *command[1:]],
            cwd=ROOT,
            env=variables,
            stdout=to,
            stderr=subprocess.STDOUT if to else None,
        )
        return " ".join(command), done.returncode != 0, time.monotonic() - start, (done.stdout or b"").decode()

    with ThreadPoolExecutor(len(checks)) as pool:
        beside = [pool.submit(result, command, False) for command in checks]
        results = [result(tests, True), *(one.result() for one in beside)]
    for line, _, _, output in results[1:]:
        print(f"dev.py: {line}\n{output}", end="", flush=True)
    for line, failed, seconds, _ in results:
        print(f"dev.py: {'FAILED' if failed else 'passed'} {seconds:6.1f} s  {line}", file=sys.stderr)
    return int(any(failed for _, failed, _, _ in results))


def run(command: Sequence[str]) -> int:
    """Run one command in the environment, in the caller's folder; its exit status."""
    variables = PINNED.variables()
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
        scope = SCOPES.get("".join(rest[:1]))
        checks, marks = scope or (CHECKS, ())
        where = NEWEST if rest[:1] == ["--newest"] else PINNED
        where.set_up(["dev"])
        return check(where, [*marks, *rest[scope is not None :]], checks)
    if action == "run" and rest:
        PINNED.set_up(needed(rest))
        return run(rest)
    if action == "docs" and not rest:
        PINNED.set_up(["docs"])
        return run(["mkdocs", "build", "--strict"])
    if action == "setup":
        PINNED.set_up(rest)
        return 0
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
