"""The frame of a script: a command line, a measurement that can be interrupted and resumed, and a page of records."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.machine import command, conditions
from benchmarks.common.records import SUFFIX, Record, Records, keep_records, read_records
from benchmarks.common.tables import Page
from verifiable_relu.command_line import Parser
from verifiable_relu.errors import InputError

ROOT = Path(__file__).resolve().parents[2]
"""The root of the clone."""

RESULTS = ROOT / "benchmarks" / "results"
"""The folder of the kept results: a page and a file of compressed records for each script."""

RUNS = ROOT / "runs"
"""The folder of what is measured now, and of trained networks, with a folder for each script."""


@dataclass(frozen=True)
class Script:
    """A script that measures and tabulates.

    Attributes:
        module: the script's name, such as ``benchmarks.speed.memory``.
        about: the description that ``--help`` shows.
        options: adds the script's own options to the parser, if it has any.
        measure: measures, by the command line's options, what has no record yet, and records it piece by piece.
        page: makes the page of all records.
    """

    module: str
    about: str
    options: Callable[[argparse.ArgumentParser], None] | None
    measure: Callable[[argparse.Namespace, Records], None]
    page: Callable[[Sequence[Record]], Page]

    @property
    def name(self) -> str:
        """The name of the script, of its folder and of its page."""
        return self.module.rpartition(".")[2]

    def parser(self) -> argparse.ArgumentParser:
        """The command line."""
        made = Parser(
            prog=f"python -m {self.module}",
            description=self.about,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if self.options is not None:
            self.options(made)
        made.add_argument(
            "--results", type=Path, default=RUNS / self.name, help="folder of records (default below runs/)"
        )
        done = made.add_mutually_exclusive_group()
        done.add_argument("--table", metavar="RECORDS", nargs="?", const=RESULTS / f"{self.name}{SUFFIX}", type=Path,
                          help="measure nothing; make the page of a folder, or of kept records (those of "
                          f"benchmarks/results/{self.name})")  # fmt: skip
        done.add_argument("--keep", action="store_true", help="measure nothing; move the records to benchmarks/results")
        return made

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Measure and tabulate by the command line's arguments; returns the exit status (``guarded``)."""
        asked = self.parser().parse_args(arguments)
        given = None if arguments is None else list(arguments)

        def work() -> None:
            if not asked.table and not asked.keep:
                with Records(asked.results, lambda: conditions(self.module, given)) as records:
                    self.measure(asked, records)
            place = asked.table or asked.results
            if asked.keep:
                place = RESULTS / f"{asked.results.name}{SUFFIX}"
                keep_records(read_records(asked.results), place)
            text = self.page(read_records(place)).text
            page_of(place).write_text(text, encoding="utf-8")
            print(text)

        return guarded(work, command(self.module, given))


def page_of(records: Path) -> Path:
    """The file of the page of a folder, or of kept records."""
    name = records.name.removesuffix(SUFFIX)
    return (records.parent if records.name.endswith(SUFFIX) else records) / f"{name}.md"


def guarded(work: Callable[[], None], line: str) -> int:
    """Do the work of a command.

    Args:
        work: does it, and raises an InputError for bad input.
        line: the command line, which resumes the work when it is run again.

    Returns:
        The exit status: 0 when done, 2 for bad input, 130 after Ctrl-C.
    """
    try:
        work()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"interrupted; the same command resumes: {line}", file=sys.stderr)
        return 130
    return 0


def data_folder() -> Path:
    """The folder that VERIFIABLE_RELU_DATA names.

    Raises:
        InputError: if the variable is not set or names no folder.
    """
    named = os.environ.get("VERIFIABLE_RELU_DATA")
    if not named or not Path(named).is_dir():
        raise InputError("VERIFIABLE_RELU_DATA names no folder with the data")
    return Path(named)
