"""What a script is: a command line, a measurement that can be interrupted, and tables of its records."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.machine import command, conditions
from benchmarks.common.records import Record, Records, read_records
from benchmarks.report.page import Page
from verifiable_relu.arguments import Parser
from verifiable_relu.errors import InputError

ROOT = Path(__file__).resolve().parents[2]
"""The clone."""

RESULTS = ROOT / "benchmarks" / "results"
"""The folder of the committed results, a folder for each study."""

NETWORKS = ROOT / "runs"
"""Where trained networks and checkpoints go, a folder for each study."""


@dataclass(frozen=True)
class Study:
    """A script.

    Attributes:
        module: the script's name, as ``benchmarks.training.arms``.
        about: what ``--help`` says.
        options: adds the script's own options to the parser.
        measure: measures what is asked for and not recorded yet, and records it piece by piece.
        page: makes the page with tables and figures of all that is recorded. The folder is for figures.
    """

    module: str
    about: str
    options: Callable[[argparse.ArgumentParser], None]
    measure: Callable[[argparse.Namespace, Records], None]
    page: Callable[[Sequence[Record], Path], Page]

    @property
    def name(self) -> str:
        """Of the study, its folder and its page."""
        return self.module.rpartition(".")[2]

    def parser(self) -> argparse.ArgumentParser:
        """The command line."""
        made = Parser(
            prog=f"python -m {self.module}",
            description=self.about,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.options(made)
        add_results(made, RESULTS / self.name)
        made.add_argument("--table", action="store_true", help="measure nothing, only make the tables")
        return made

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Measure and tabulate; 0 when done, 2 for bad input, 130 after Ctrl-C."""
        asked = self.parser().parse_args(arguments)
        given = None if arguments is None else list(arguments)

        def work() -> None:
            if not asked.table:
                with Records(asked.results, lambda: conditions(self.module, given)) as records:
                    self.measure(asked, records)
            print(self.page(read_records(asked.results), asked.results).write(asked.results))

        return guarded(work, command(self.module, given))


def add_results(parser: argparse.ArgumentParser, default: Path) -> None:
    """The option that names the folder of a study."""
    shown = default.relative_to(ROOT) if default.is_relative_to(ROOT) else default
    parser.add_argument(
        "--results", type=Path, default=default, help=f"folder of records, tables and figures ({shown})"
    )


def guarded(work: Callable[[], None], line: str) -> int:
    """Do the work of a command; 0 when done, 2 for bad input, 130 after Ctrl-C.

    Args:
        work: what is to be done.
        line: the command line, which goes on with the work when it is given again.
    """
    try:
        work()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"interrupted; the same command goes on: {line}", file=sys.stderr)
        return 130
    return 0


def data_folder() -> Path:
    """The folder that VERIFIABLE_RELU_DATA names.

    Raises:
        InputError: if it names none.
    """
    named = os.environ.get("VERIFIABLE_RELU_DATA")
    if not named or not Path(named).is_dir():
        raise InputError("VERIFIABLE_RELU_DATA names no folder with the data")
    return Path(named)
