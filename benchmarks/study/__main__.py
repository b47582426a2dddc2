"""The command ``python -m benchmarks.study``: run a study that a file describes, or make its page of the records."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.machine import conditions
from benchmarks.common.records import SUFFIX, Records, keep_records, of, read_records
from verifiable_relu.command_line import Parser, add_debug, complain, guarded
from verifiable_relu.errors import InputError

STUDIES = Path(__file__).parents[1] / "studies"
"""The folder of the records of finished studies."""


def parser() -> Parser:
    """The parser of the command line."""
    made = Parser(
        label="study",
        prog="python -m benchmarks.study",
        description="Train the networks of a study, ask the same images of all of them, and make tables and figures. "
        "What has a record is not done again: the same command goes on after Ctrl-C or a kill.",
        allow_abbrev=False,
    )
    made.add_argument("suite", metavar="SUITE", help="a TOML file, or the name of one in benchmarks/suites")
    made.add_argument("--out", type=Path, metavar="DIR", help="folder of networks, records and the page (runs/NAME)")
    made.add_argument("--jobs", type=int, default=1, help="processes that train and answer, of one thread each (1)")
    made.add_argument("--only", metavar="NETWORK", action="append", help="work on this network alone (repeatable)")
    made.add_argument("--arm", action="append", help="work on this arm alone (repeatable)")
    made.add_argument("--seed", type=int, action="append", help="work on this seed alone (repeatable)")
    chosen = made.add_mutually_exclusive_group()
    chosen.add_argument("--plan", action="store_true", help="print what is done and what is left; do nothing")
    chosen.add_argument("--table", action="store_true", help="make the page and its figures, and nothing else")
    chosen.add_argument("--keep", action="store_true", help="move the records to benchmarks/studies, compressed")
    made.add_argument("--quiet", action="store_true", help="print errors only")
    add_debug(made)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status (``command_line.guarded``): after Ctrl-C, the same command resumes."""
    options = parser().parse_args(arguments)
    return guarded("study", lambda: run(options, sys.argv[1:] if arguments is None else arguments), options.debug)


def run(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Run a study by the command line's options; returns the exit status.

    Raises:
        InputError: for a suite, data or a folder that cannot be used.
    """
    # Imported here, because --help need not wait for torch and pandas.
    from benchmarks.study.suite import SUITES, read

    if not 1 <= options.jobs <= 1_000:
        raise InputError(f"must be from 1 to 1,000, not {options.jobs}", place="--jobs")
    suite, name = read(options.suite)
    folder, kept = options.out or Path("runs") / name, STUDIES / f"{name}{SUFFIX}"
    cells = suite.cells()
    for place, asked, field in (
        ("--only", options.only, "network"),
        ("--arm", options.arm, "arm"),
        ("--seed", options.seed, "seed"),
    ):
        there = list(dict.fromkeys(getattr(cell, field) for cell in suite.cells()))
        if unknown := [each for each in asked or () if each not in there]:
            raise InputError(f"'{unknown[0]}' is none of {', '.join(map(str, there))}", place=place)
        cells = [cell for cell in cells if not asked or getattr(cell, field) in asked]
    own = (folder / "records.jsonl").is_file()
    if options.plan:
        records = read_records(folder if own else kept) if own or kept.is_file() else []
        status = Counter(record["status"] for record in of(records, "training"))
        print(f"{name}: {len(cells)} trainings in {folder}; recorded are {status['trained']} networks, "
              f"{len(of(records, 'answer'))} answers")  # fmt: skip
        return 0
    if options.keep:
        keep_records(read_records(folder), kept)
        return 0
    if not options.table:
        import torch

        from benchmarks.study.runner import Runner

        def say(line: str) -> None:
            if not options.quiet:
                print(line, file=sys.stderr, flush=True)

        torch.set_num_threads(1)
        path = Path(options.suite) if Path(options.suite).is_file() else SUITES / f"{name}.toml"
        try:
            with Records(folder, lambda: conditions("benchmarks.study", list(arguments))) as opened:
                Runner(suite, path, folder, opened, options.jobs, say, cells).run()
        except KeyboardInterrupt:
            complain("study", "interrupted; the same command goes on from here")
            return 130
        own = True
    from benchmarks.study import figures
    from benchmarks.study.frames import Study
    from benchmarks.study.tables import page_of

    study = Study(name, suite, read_records(folder if own else kept))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.md").write_text(page_of(study, figures.write(study, folder)), encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", path=folder) from None
    if not options.quiet:
        print(folder / "report.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
