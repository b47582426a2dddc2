"""What does hardening do to a controller: which decisions does the swap change, and what is proven of it?

    python -m benchmarks.training.policies
    python -m benchmarks.training.policies --game cartpole --seeds 2 --screened 0

Policies are trained by PPO (``policies_playing``) in the arms of the package, their swap is measured and bounded, and
they are asked about regions, balls and, for CartPole, ten steps of the closed loop (``policies_loop``). Other runs are
screened: what tells after a tenth of a training which end well? The script needs gymnasium and Box2D
(pip install "verifiable-relu[policies]"). The first seeds served to try the script out; results are of later ones.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.study import Study
from benchmarks.training.policies_games import GAMES
from verifiable_relu.report.table import Page
from verifiable_relu.study.records import Record, Records

TRAINED = ("lambda-gelu", "gelu", "gelu-swap-finetune", "relu")
"""The trainings; that of GELU gives two arms, with and without the swap."""

SEEDS = {"cartpole": 10, "acrobot": 5, "lander": 2}
"""The seeds of each arm."""

RATES = {
    "cartpole": (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1),
    "acrobot": (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2),
}
"""The learning rates that are screened."""


def wanted(asked: argparse.Namespace) -> Iterator[tuple[str, Record]]:
    """The kind and the title of each record, the most telling first."""
    for game in asked.game:
        seeds = asked.seeds or SEEDS[game]
        for seed in range(asked.first, asked.first + seeds):
            for arm in TRAINED:
                about = {"arm": arm, "seed": seed, "first": asked.first}
                yield "policy", {"game": game, **about, "steps": GAMES[game].steps, "rate": GAMES[game].rate}
        if game in RATES:
            about = {"game": game, "steps": GAMES[game].steps}
            if game == "cartpole":
                yield from (
                    ("screened", {**about, "seed": seed, "rate": None})
                    for seed in range(asked.first, asked.first + asked.random)
                )
            for seed in range(asked.first, asked.first + asked.screened):
                yield from (("screened", {**about, "seed": seed, "rate": rate}) for rate in RATES[game])


def measure(asked: argparse.Namespace, records: Records) -> None:
    """A record for each training."""
    import torch

    from benchmarks.common.progress import bars
    from benchmarks.training.policies_measuring import measured, screened

    torch.set_num_threads(1)
    with bars() as bar:
        for kind, title in bar.track(list(wanted(asked)), description="trainings"):
            if not records.has(kind, title):
                found: dict[str, Any] = {"arms": measured(title)} if kind == "policy" else screened(title)
                records.append(kind, {**title, **found})


def page(records: Sequence[Record], folder: Path) -> Page:
    """The tables."""
    return Page("policies")


def options(parser: argparse.ArgumentParser) -> None:
    """Which games, and how many trainings."""
    parser.add_argument("--game", nargs="+", choices=GAMES, default=list(GAMES), help="(default all)")
    parser.add_argument("--seeds", type=int, help="of each arm (default 10; acrobot 5, lander 2)")
    parser.add_argument("--first", type=int, default=10, help="the first seed (default 10)")
    parser.add_argument("--screened", type=int, default=3, help="seeds of each learning rate screened (default 3)")
    parser.add_argument("--random", type=int, default=30, help="runs with random settings (default 30)")


STUDY = Study("benchmarks.training.policies", __doc__, options, measure, page)

if __name__ == "__main__":
    sys.exit(STUDY.main())
