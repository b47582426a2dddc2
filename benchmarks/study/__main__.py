"""The command ``python -m benchmarks.study``: run a study that a file describes, or say what it would do."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from verifiable_relu.arguments import Parser, add_debug, scheduler
from verifiable_relu.errors import InputError
from verifiable_relu.streams import complain, guarded

if TYPE_CHECKING:
    from benchmarks.study.suite import Suite


def parser() -> Parser:
    """The parser of the command line."""
    made = Parser(
        label="study",
        prog="python -m benchmarks.study",
        description="Train the networks of a study, ask the same images of all of them, and make tables and figures. "
        "What has a record is not done again: the same command goes on after Ctrl-C or a kill.",
        allow_abbrev=False,
    )
    made.add_argument("suite", metavar="SUITE", help="a TOML file, or a suite of the package, such as smoke")
    made.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of networks, records, tables and figures (study-NAME)"
    )
    hands = made.add_mutually_exclusive_group()
    hands.add_argument("--jobs", type=int, default=1, help="processes that train and answer, of one thread each (1)")
    hands.add_argument(
        "--executor",
        type=scheduler,
        metavar="dask://HOST:PORT",
        help="a running Dask scheduler, whose workers train and answer; they need the same files under the same paths "
        "(needs the package distributed)",
    )
    made.add_argument(
        "--only", metavar="NETWORK", action="append", default=[], help="work on this network alone (repeatable)"
    )
    made.add_argument("--arm", action="append", default=[], help="work on this arm alone (repeatable)")
    made.add_argument("--seed", type=int, action="append", default=[], help="work on this seed alone (repeatable)")
    chosen = made.add_mutually_exclusive_group()
    chosen.add_argument("--plan", action="store_true", help="print the cells, what they have and the time; do nothing")
    chosen.add_argument("--table", action="store_true", help="make tables and figures of the records, and nothing else")
    made.add_argument("--quiet", action="store_true", help="print errors only")
    add_debug(made)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status (``streams.guarded``): after Ctrl-C, the same command resumes."""
    options = parser().parse_args(arguments)
    return guarded("study", lambda: run(options, sys.argv[1:] if arguments is None else arguments), options.debug)


def run(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Run a study by the command line's options; returns the exit status.

    Raises:
        InputError: for a suite, data or a folder that cannot be used.
    """
    if not 1 <= options.jobs <= 1_000:
        raise InputError(f"must be from 1 to 1,000, not {options.jobs}", place="--jobs")
    from benchmarks.study.suite import find, read

    suite = read(find(options.suite))
    cells = suite.cells()
    for place, asked, of in (
        ("--only", options.only, "network"),
        ("--arm", options.arm, "arm"),
        ("--seed", options.seed, "seed"),
    ):
        there = list(dict.fromkeys(cell.record[of] for cell in suite.cells()))
        if unknown := [each for each in asked if each not in there]:
            raise InputError(f"'{unknown[0]}' is none of {', '.join(map(str, there))}", place=place)
        cells = [cell for cell in cells if not asked or cell.record[of] in asked]
    if not cells:
        raise InputError("no network of the suite has these arms and seeds", place="--only")
    from benchmarks.common.records import Records, read_records
    from benchmarks.study.cells import Places

    places = Places(options.out or Path(f"study-{suite.name}"))
    known = places.folder / "records.jsonl"
    if options.plan:
        from benchmarks.study.plan import plan

        print("\n".join(plan(suite, places, read_records(places.folder) if known.is_file() else [], options.jobs)))
        return 0
    if not options.table:
        from benchmarks.common.machine import conditions
        from benchmarks.study.runner import Runner
        from verifiable_relu.campaign.queue import hired

        def say(line: str) -> None:
            if not options.quiet:
                print(line, file=sys.stderr, flush=True)

        try:
            with (
                Records(places.folder, lambda: conditions("benchmarks.study", list(arguments))) as records,
                hired(options.jobs, options.executor) as hands,
            ):
                Runner(suite, places, records, hands, say, cells).run()
        except KeyboardInterrupt:
            complain("study", "interrupted; the same command goes on from here")
            return 130
    tabulate(suite, places.folder, options.quiet)
    return 0


def tabulate(suite: Suite, folder: Path, quiet: bool) -> None:
    """Make the tables and figures of the records of a suite's cells.

    Raises:
        InputError: if there are no records, or if they cannot be read.
    """
    from benchmarks.common.records import read_records
    from benchmarks.study import tables
    from benchmarks.study.state import State

    records = State.of(read_records(folder)).records(suite.cells())
    written = tables.write(records, folder)
    if not quiet:
        print("\n".join(map(str, written)))


if __name__ == "__main__":
    sys.exit(main())
