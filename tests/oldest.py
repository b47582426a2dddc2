"""Run tests with the oldest versions that pyproject.toml declares of what the package needs.

    python3 dev.py run python -m tests.oldest                     # the tests of ``TESTS``
    python3 dev.py run python -m tests.oldest tests/soundness     # others

The versions are installed in a temporary folder, which comes before the environment on Python's path. PyTorch is not
exchanged: for many machines there is but one build of it. No part of ``dev.py check``, since it downloads 300 MB.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KEPT = ("torch",)
TESTS = (
    "tests/commands/test_certify.py",
    "tests/unit/test_api.py",
    "tests/unit/test_data.py",
    "tests/unit/test_milp.py",
    "tests/unit/test_network.py",
    "tests/unit/test_smt.py",
    "tests/unit/test_spec.py",
    "tests/unit/test_trust.py",
)
"""Tests of everything that another package does for this one."""


def oldest() -> list[str]:
    """The requirements of pyproject.toml at their lower ends, but for ``KEPT``."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    ends = (re.fullmatch(r"([\w.-]+)>=([\w.]+)(,.*)?", requirement) for requirement in declared)
    return [f"{end[1]}=={end[2]}" for end in ends if end is not None and end[1] not in KEPT]


def main(tests: Sequence[str]) -> int:
    """Install and run; returns pytest's exit status."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--only-binary=:all:", "--target", folder]
        subprocess.run([*command, *oldest()], check=True)
        print("\n".join(oldest()), flush=True)
        path = os.pathsep.join([folder, str(ROOT)])
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-q", *(tests or TESTS)], cwd=ROOT, env={**os.environ, "PYTHONPATH": path}
        ).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
