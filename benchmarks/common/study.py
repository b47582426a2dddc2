"""The frame of a script: a command line, a measurement that can be interrupted and resumed, and a page of records."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.machine import command, conditions
from benchmarks.common.markup import Page
from benchmarks.common.records import Record, Records, read_records
from verifiable_relu.arguments import Parser
from verifiable_relu.errors import InputError

ROOT = Path(__file__).resolve().parents[2]
"""The root of the clone."""

RESULTS = ROOT / "benchmarks" / "results"
"""The folder of the committed results, a folder for each study."""

NETWORKS = ROOT / "runs"
"""The folder of trained networks and checkpoints, with a folder for each study."""


@dataclass(frozen=True)
class Study:
    """A script that measures and tabulates.

    Attributes:
        module: the script's name, such as ``benchmarks.training.arms``.
        about: the description that ``--help`` shows.
        options: adds the script's own options to the parser, if it has any.
        measure: measures, by the command line's options, what has no record yet, and records it piece by piece; None
            where suites of ``benchmarks/suites`` ask the same, and the script makes the page of earlier records.
        page: makes the page of all records, with tables; it draws figures into the given folder.
    """

    module: str
    about: str
    options: Callable[[argparse.ArgumentParser], None] | None
    measure: Callable[[argparse.Namespace, Records], None] | None
    page: Callable[[Sequence[Record], Path], Page]

    @property
    def name(self) -> str:
        """The name of the study, of its folder and of its page."""
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
        add_results(made, RESULTS / self.name)
        made.add_argument("--table", action="store_true", help="measure nothing; make the tables of existing records")
        return made

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Measure and tabulate by the command line's arguments; returns the exit status (``guarded``)."""
        asked = self.parser().parse_args(arguments)
        given = None if arguments is None else list(arguments)

        def work() -> None:
            if self.measure is not None and not asked.table:
                with Records(asked.results, lambda: conditions(self.module, given)) as records:
                    self.measure(asked, records)
            print(self.page(read_records(asked.results), asked.results).write(asked.results))

        return guarded(work, command(self.module, given))


def add_results(parser: argparse.ArgumentParser, default: Path) -> None:
    """Add the option that names the folder of a study."""
    shown = default.relative_to(ROOT) if default.is_relative_to(ROOT) else default
    parser.add_argument(
        "--results", type=Path, default=default, help=f"folder of records, tables and figures ({shown})"
    )


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
