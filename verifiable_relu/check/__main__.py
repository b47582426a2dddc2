"""``python -m verifiable_relu.check CERTIFICATE --net NET.onnx --spec PROPERTY.vnnlib``: check a certificate.

In place of a certificate, the folder of a campaign's certificates may be given, without ``--net`` and ``--spec``:
``certificates.csv`` in it says which network and which property each is of. As many are checked at once as there are
cores.

Exit status 0: accepted; 1: refused; 2: a file cannot be read or judged; 130: interrupted.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

from verifiable_relu.check import BadInput, Refused, check
from verifiable_relu.check.records import TABLE, content


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the certificate that the arguments name, and print what it proves."""
    made = parser()
    given = made.parse_args(arguments)
    folder = os.path.isdir(given.certificate)
    if folder != (given.net is None) or folder != (given.spec is None):
        made.error("a certificate needs --net and --spec, and a folder of certificates takes neither")
    try:
        if folder:
            return _check_folder(given.certificate)
        print(f"accepted: {check(given.certificate, given.net, given.spec, other=given.other)}")
        return 0
    except Refused as error:
        print(f"refused: {_line(error)}")
        return 1
    except KeyboardInterrupt:
        print("check: interrupted", file=sys.stderr)
        return 130
    except Exception as error:  # whatever happens, 1 would say that the certificate was read and refused
        print(
            f"check: {'' if isinstance(error, BadInput) else type(error).__name__ + ': '}{_line(error)}",
            file=sys.stderr,
        )
        return 2


def _check_folder(folder: Path) -> int:
    """Check each certificate of a folder's table in a process of its own; return the first status that is not 0."""
    table = folder / TABLE
    try:
        text = content(table, 1 << 30).decode("utf-8", "surrogateescape")
        lines = csv.DictReader(text.splitlines(), restval="")
        # Of several lines for a network and a property, the last one counts.
        rows = {(row["onnx"], row["vnnlib"], row.get("other", "")): row["certificate"] for row in lines}
    except (BadInput, KeyError, csv.Error) as error:
        raise BadInput(f"{table}: no table of certificates: {error}") from error

    def alone(name: str, net: str, spec: str, other: str) -> tuple[int, str]:
        # Of the line that was being written when a run was killed, or the disk was full, the end is missing.
        if not (name and net and spec):
            return 1, "the line of the table is not whole" if name else "no certificate"
        # A name is one of this folder, whatever the table says.
        files = [str(folder / Path(name).name), "--net", _packed(net), "--spec", _packed(spec)]
        files += ["--other", _packed(other)] if other else []
        command = [sys.executable, "-m", "verifiable_relu.check", *files]
        ended = subprocess.run(command, capture_output=True, errors="replace", check=False)
        said = (ended.stdout or ended.stderr).splitlines() or [f"the checker ended with status {ended.returncode}"]
        # What ends a process from outside has numbers below 0.
        return ended.returncode if 0 <= ended.returncode <= 2 else 2, said[-1]

    status = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(lambda row: alone(row[1], *row[0]), rows.items())
        for ((_, spec, _), name), (ended, said) in zip(rows.items(), found, strict=True):
            print(f"{_line(name or spec)}: {_line(said)}", flush=True)
            status = status or ended
    return status


def _packed(path: str) -> str:
    return path if os.path.lexists(path) or not os.path.lexists(f"{path}.gz") else f"{path}.gz"


class _CheckParser(argparse.ArgumentParser):
    """A parser whose errors are one line, as those of the other commands, whose code the checker does not share."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        for given in sys.argv[1:] if args is None else args:
            if given.startswith("-") and given.endswith("=--"):
                self.error(f"argument {given[:-3]}: '--' is not a value")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"check: {_line(message)} (--help says more)\n")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = _CheckParser(
        prog="verifiable-relu check",
        description="Check a certificate without trusting who wrote it.",
        epilog="Exit status 0: accepted; 1: refused; 2: a file cannot be read or judged.",
    )
    made.add_argument("certificate", type=Path, metavar="CERTIFICATE|DIR", help="a certificate, or a folder of them")
    made.add_argument("--net", type=Path, metavar="NET.onnx", help="the network, gzipped or not")
    made.add_argument("--other", type=Path, metavar="NET.onnx", help="the second network of a certificate of two")
    made.add_argument("--spec", type=Path, metavar="SPEC.vnnlib", help="the property, gzipped or not")
    return made


def _line(error: object) -> str:
    """Return the message as one line that does nothing to a terminal."""
    text = " ".join(str(error).split())
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)[:500]


if __name__ == "__main__":
    sys.exit(main())
