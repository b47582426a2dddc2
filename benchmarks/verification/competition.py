"""What does the command line decide of the verification competition's instances, in what time, beside other tools?

    python -m benchmarks.verification.competition
    python -m benchmarks.verification.competition oval21 mnist_fc --modes campaign --pin 1
    python -m benchmarks.verification.competition --set peers --modes process
    python -m benchmarks.verification.competition --set peers --modes process cores --results runs/cores
    python -m benchmarks.verification.competition --set every --modes certified --count 2 --limit 10 [FOLDER …]

Verdicts are judged by the competition's consensus. Each family is answered twice: as one campaign in one process, and
with one process for every instance (as the competition runs tools). With the mode ``cores`` every instance has a
command of its own, whose search is shared by a process for each core; with the mode ``certified`` it also writes a
certificate and has it checked. The set ``every`` is all folders of the competition's form under
VERIFIABLE_RELU_DATA/vnncomp and VERIFIABLE_RELU_DATA/competition_2026, or those that are named. Each answer is a
record: what was interrupted or killed goes on after the last one. The other sets need VERIFIABLE_RELU_DATA/vnncomp. The
answers of other tools are read once, from ``peers/peers.csv`` beside that folder, and kept as records.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from benchmarks.common.records import Records
from benchmarks.common.script import Script, data_folder
from benchmarks.verification import competition_asking, competition_instances, competition_tables
from verifiable_relu.errors import InputError

MODES = {
    "campaign": competition_asking.campaign,
    "process": competition_asking.processes,
    "cores": competition_asking.sharing,
    "certified": competition_asking.certified,
}
SETS = ("standing", "peers", "every")


def measure(asked: argparse.Namespace, records: Records) -> None:
    """Ask what is not answered yet, by the same method and within the same limit.

    Raises:
        InputError: if the benchmarks are missing, or the core to run on is not there.
    """
    data = data_folder().resolve()
    peers = asked.peers or data.parent / "peers" / "peers.csv"
    if asked.peers or asked.set == "peers" or peers.is_file():
        competition_instances.take_peers(peers, records)
    if asked.pin is not None:
        try:
            os.sched_setaffinity(0, {asked.pin})
        except (OSError, AttributeError) as error:
            raise InputError(f"--pin: no core {asked.pin} to run on ({error})") from None
    for family in asked.families or competition_instances.families(data, asked.set):
        folder = competition_instances.folder(data, family)
        family = folder.name
        chosen = competition_instances.chosen(family, folder, asked.set, asked.count, records.all)
        for mode in asked.modes:
            title = {"family": family, "set": asked.set, "mode": mode, "method": asked.method, "limit": asked.limit}
            MODES[mode](competition_asking.Question(folder, title, asked.method, asked.limit), chosen, records)


def options(parser: argparse.ArgumentParser) -> None:
    """Which families, how, and for how long."""
    parser.add_argument(
        "families",
        nargs="*",
        help=f"folders, by their names below the data or by their paths (default for the set every: all, else "
        f"{' '.join(competition_instances.STANDING)})",
    )
    parser.add_argument(
        "--set",
        choices=SETS,
        default=SETS[0],
        help="standing: the families (of safenlp the first 300 instances); peers: the instances that other tools were "
        "asked about; every: all families at hand (default standing)",
    )
    parser.add_argument("--method", default="auto", help="of certify (default auto)")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds per instance at the most (default 60)")
    parser.add_argument("--count", type=int, help="only the first COUNT instances of each family")
    parser.add_argument(
        "--modes", nargs="+", choices=MODES, default=("campaign", "process"), help="(default %(default)s)"
    )
    parser.add_argument("--pin", type=int, metavar="CORE", help="run everything on this core alone (Linux)")
    parser.add_argument(
        "--peers", type=Path, metavar="CSV", help="answers of other tools (default ../peers/peers.csv beside the data)"
    )


SCRIPT = Script("benchmarks.verification.competition", __doc__, options, measure, competition_tables.page)

if __name__ == "__main__":
    sys.exit(SCRIPT.main())
