"""A folder of certificates, checked on as many processes as there are cores.

``certificates.csv`` in the folder says which network and which property each certificate is of.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from verifiable_relu.check.errors import BadInput
from verifiable_relu.check.records import content

TABLE = "certificates.csv"

LARGEST = 1 << 30
"""Most bytes of the table."""

REFUSED, UNREAD = 1, 2
"""The exit statuses of a check that does not accept."""


def check_folder(folder: Path) -> Iterator[tuple[str, str, str, int, str]]:
    """Check all certificates of a folder, each in a process of its own.

    Yields:
        The names of the certificate, the network and the property, the exit status, and what the checker says, in the
        order of the table; of several lines for a network and a property, the last one counts.

    Raises:
        BadInput: if there is no table, or a file that is none.
    """
    table = folder / TABLE
    try:
        text = content(table, LARGEST).decode("utf-8", "surrogateescape")
        lines = list(csv.DictReader(text.splitlines(), restval=""))
        rows = {(row["onnx"], row["vnnlib"], row.get("other", "")): row["certificate"] for row in lines}
    except (BadInput, KeyError, csv.Error) as error:
        raise BadInput(f"{table}: no table of certificates: {error}") from error
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        waiting = []
        for (net, spec, other), name in rows.items():
            # A name is one of this folder, whatever the table says.
            path = folder / Path(name).name
            whole = name and net and spec
            waiting.append((name, net, spec, pool.submit(_alone, path, net, spec, other) if whole else None))
        for name, net, spec, future in waiting:
            # Of the line that was being written when a run was killed, or the disk was full, the end is missing.
            missing = REFUSED, "the line of the table is not whole" if name else "no certificate"
            yield name, net, spec, *(missing if future is None else future.result())


def _alone(path: Path, net: str, spec: str, other: str) -> tuple[int, str]:
    """The exit status and the last line of a check."""
    files = [str(path), "--net", _packed(net), "--spec", _packed(spec), *(("--other", _packed(other)) if other else ())]
    ended = subprocess.run(
        [sys.executable, "-m", "verifiable_relu.check", *files], capture_output=True, errors="replace", check=False
    )
    lines = (ended.stdout or ended.stderr).splitlines() or [f"the checker ended with status {ended.returncode}"]
    # What ends a process from outside has numbers below 0.
    return ended.returncode if 0 <= ended.returncode <= UNREAD else UNREAD, lines[-1]


def _packed(path: str) -> str:
    return path if os.path.lexists(path) or not os.path.lexists(f"{path}.gz") else f"{path}.gz"
