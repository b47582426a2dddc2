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
import math
import sys
from collections.abc import Callable, Iterator, Sequence

from benchmarks.common.markup import Cell, Interval, Table
from benchmarks.common.records import Record, Records, notes, of
from benchmarks.common.script import Script
from benchmarks.common.tables import Page, estimate, spoken
from benchmarks.training.policies_games import GAMES

TRAINED = ("lambda-gelu", "gelu", "gelu-swap-finetune", "relu")
"""The trainings; that of GELU gives two arms, with and without the swap."""

ARMS = ("lambda-gelu", "gelu-swap", "gelu-swap-finetune", "relu", "gelu")
"""The arms, in the order of the tables."""

SEEDS = {"cartpole": 10, "acrobot": 5, "lander": 2}
"""The seeds of each arm."""

LOOPS = 2
"""The seeds of each arm whose closed loop is asked about."""

RATES = {
    "cartpole": (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1),
    "acrobot": (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2),
}
"""The learning rates that are screened."""


def wanted(asked: argparse.Namespace) -> Iterator[tuple[str, Record]]:
    """The kind and the title of each record, the most telling first."""
    for game in asked.game:
        seeds = SEEDS[game] if asked.seeds is None else asked.seeds
        for seed in range(asked.first, asked.first + seeds):
            for arm in TRAINED:
                about = {"arm": arm, "seed": seed, "first": asked.first}
                yield "policy", {"game": game, **about, "steps": GAMES[game].steps, "rate": GAMES[game].rate}
        if game == "cartpole":
            for seed in range(asked.first, asked.first + min(seeds, LOOPS)):
                yield from (("loop", {"game": game, "arm": arm, "seed": seed}) for arm in ARMS)
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
    from benchmarks.training.policies_measuring import looped, measured, screened

    ways: dict[str, Callable[[Record], Record]] = {"policy": measured, "loop": looped, "screened": screened}
    torch.set_num_threads(1)
    with bars() as bar:
        for kind, title in bar.track(list(wanted(asked)), description="trainings"):
            if not records.has(kind, title):
                records.append(kind, {**title, **ways[kind](title)})


def groups(records: Sequence[Record]) -> dict[tuple[str, str], list[Record]]:
    """What was measured of each game and arm, with the seed."""
    found: dict[tuple[str, str], list[Record]] = {(game, arm): [] for game in GAMES for arm in ARMS}
    for record in of(records, "policy"):
        for arm, measured in record["arms"].items():
            found[record["game"], arm].append({**measured, "seed": record["seed"]})
    return {key: group for key, group in found.items() if group}


def number(record: Record, name: str) -> float:
    """A number of a policy; NaN where it has none."""
    match name:
        case "unsat" | "sat":
            return record["regions"].count(name) / len(record["regions"])
        case "0.001" | "0.01":
            return float(record["balls"][name].get("unsat", 0) / sum(record["balls"][name].values()))
        case "before" | "after" | "visited" | "drawn" | "proven" | "kept" | "kept_each":
            return float(record["swap"][name]) if record.get("swap") else math.nan
    return float(record[name])


COLUMNS = {
    "return": (".1f", "return"),
    "before the swap": (".1f", "before"),
    "after it": (".1f", "after"),
    "decisions changed": (".2%", "visited"),
    "of drawn states": (".2%", "drawn"),
    "proven change": (".3g", "proven"),
    "proven kept": (".1%", "kept_each"),
    "by the change over the box": (".1%", "kept"),
    "regions proven": (".0%", "unsat"),
    "regions refuted": (".0%", "sat"),
    "balls proven, ε 0.001": (".0%", "0.001"),
    "ε 0.01": (".0%", "0.01"),
    "training, s": (".1f", "training_seconds"),
    "questions, s": (".2f", "question_seconds"),
}
"""The headings of the numbers of a policy, their forms and names."""


def policies(records: Sequence[Record]) -> Table:
    """A row for each game and arm."""
    rows: list[tuple[Cell, ...]] = []
    for (game, arm), group in groups(records).items():
        numbers: list[Interval | None] = []
        for _, name in COLUMNS.values():
            values = [value for record in group if not math.isnan(value := number(record, name))]
            numbers.append(estimate(values) if values else None)
        layers = zip(*(record["lam"] for record in group if record["lam"]), strict=True)
        lam = " ".join(f"{sum(each) / len(each):.2f}" for each in layers)
        rows.append((game, spoken(arm), len(group), *numbers, lam or "–"))
    return Table(("game", "arm", "seeds", *COLUMNS, "learned λ"), rows, {k: form for k, (form, _) in COLUMNS.items()})


CLAIMS = (
    ("A direct swap changes more decisions than one after hardening", "visited", "gelu-swap", "lambda-gelu", None),
    ("and the return hides it: the swapped policy earns what GELU earns", "return", "gelu-swap", "gelu", None),
    ("Hardening costs no return against GELU", "return", "lambda-gelu", "gelu", None),
    ("Hardening costs no return against ReLU", "return", "lambda-gelu", "relu", None),
    ("For more states it is proven that the swap keeps the decision", "kept_each", "lambda-gelu", "gelu-swap", None),
    ("As many regions are proven as of ReLU", "unsat", "lambda-gelu", "relu", 0.1),
    ("As many balls of 0.01 are proven as of ReLU", "0.01", "lambda-gelu", "relu", 0.1),
)
"""What is claimed: in words, the number, two arms, and the margin within which they are equal.

A return's margin is the game's; without a margin, the first is claimed to have more.
"""


def claims(records: Sequence[Record]) -> Table:
    """A row for each claim and game, tested over the seeds, and corrected over all."""
    from benchmarks.study.claims import LEVEL
    from benchmarks.study.statistics import by_seed, equivalence, holm

    found, rows, values = groups(records), [], []
    for game in GAMES:
        for says, name, arm, against, bound in CLAIMS:
            margin = GAMES[game].margin if name == "return" else bound
            one, other = ({r["seed"]: number(r, name) for r in found.get((game, each), ())} for each in (arm, against))
            differences = [one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())]
            if differences:
                test = by_seed(differences).p if margin is None else equivalence(differences, margin)
                values.append(test)
                more = margin is not None or sum(differences) > 0
                rows.append(
                    (
                        more,
                        (
                            says,
                            game,
                            spoken(arm),
                            spoken(against),
                            len(differences),
                            estimate(differences),
                            margin,
                            test,
                        ),
                    )
                )
    made = [
        (*row, p, "shown" if p < LEVEL and more else "not shown")
        for (more, row), p in zip(rows, holm(values), strict=True)
    ]
    columns = ("claim", "game", "arm", "against", "seeds", "difference", "margin", "p", "p, corrected", "outcome")
    return Table(columns, made)


RULES = {
    "early return": ("return",),
    "clip fraction": ("clip",),
    "KL": ("kl",),
    "flips, policy": ("flips_actor",),
    "OUI of the policy": ("oui_actor",),
    "OUI of the estimate": ("oui_critic",),
    "OUI of the policy, pair form": ("oui_pairs_actor",),
    "the learning rate itself": ("log_rate",),
    "return and OUI of the policy": ("return", "oui_actor"),
    "return and learning rate": ("return", "log_rate"),
}
"""What each rule looks at after a tenth of the training."""


def screening(records: Sequence[Record]) -> Table:
    """A row for each rule, a column for each set of runs."""
    from benchmarks.study.screening import screened

    runs: dict[str, list[Record]] = {}
    for record in of(records, "screened"):
        kind = f"{len(RATES[record['game']])} rates" if record["rate"] else "random settings"
        runs.setdefault(f"{record['game']}, {kind}", []).append(record)
    columns = []
    for name, group in runs.items():
        good = [run["return"] is not None and run["return"] >= GAMES[run["game"]].good for run in group]
        # Runs with random settings have a seed each, and are held out in tenths.
        folds = [run["seed"] if run["rate"] else run["seed"] % 10 for run in group]
        cells = [f"{len(group)} runs, {sum(good) / len(good):.0%} good"]
        for rule in RULES.values():
            early = [[_early(run, each) for run in group] for each in rule]
            cells.append(str(screened(early, good, folds)))
        columns.append((name, cells))
    rows = list(zip(("without a rule", *RULES), *(cells for _, cells in columns), strict=True))
    return Table(("rule", *(name for name, _ in columns)), rows)


def _early(run: Record, name: str) -> float:
    value = None if run["early"] is None else run["early"][name]
    return math.nan if value is None else float(value)


def loops(records: Sequence[Record]) -> Table:
    """A row for each arm and box: for how many steps it is proven that no episode ends."""
    rows: list[tuple[Cell, ...]] = []
    for arm in ARMS:
        asked = [record["boxes"] for record in of(records, "loop") if record["arm"] == arm]
        for width in asked[0] if asked else ():
            found = [loop[width] for loop in asked]
            proven = ", ".join(str(each["proven"]) for each in found)
            refuted = ", ".join(str(each["refuted"] or "–") for each in found)
            seconds = sum(each["seconds"] for each in found) / len(found)
            rows.append((spoken(arm), f"±{width}", proven, refuted, max(each["boxes"] for each in found), seconds))
    columns = ("arm", "box", "steps proven, by seed", "steps to the end", "boxes", "seconds")
    return Table(columns, rows, {"seconds": ".1f"})


_ABOUT = """\
Policies of two hidden layers of 64 neurons, trained by PPO; λ grows from half of a training to nine tenths, ReLU takes
GELU's place at the end, or at half (*fine-tuned*: there, the swap is the one at half). Means over the seeds ± half a
95 % interval (Student's t). *return*: of the policy as it is deployed, over 50 episodes. *before the swap*, *after
it*: of the policy with smooth activations, and of the same with ReLU. *decisions changed*: the part of the states that
the smooth policy visits for which the other decides otherwise; *of drawn states*: of 10,000 states of the game's box.
*proven change*: the bound of the change of any output over the box. *proven kept*: the part of visited states for which
it is proven that the decision stays, by bounds at the state, and by the change over the whole box. *regions*: parts of
the game where it is plain what to do. *balls*: around 50 visited states; ε is in units of the game's scales. Seconds
are of the processor, on a machine that other work shared.
"""
_CLAIMS = """\
Written down when one training of these seeds was known, and not changed since. Tested over pairs of equal seeds: *more*
by Student's paired t, *equal* by two one-sided tests within the margin; p is corrected by Holm over all rows. *Not
shown* does not mean that it is not so.
"""
_RULES = """\
After a tenth of the training, a rule keeps runs whose number lies in a band, chosen for a recall of 80 % and the best
precision on all other seeds. Cells: precision on held-out seeds in % [95 % interval by Wilson, as if runs were
independent] / recall in %. *good*: a return of at least 475 (cartpole), −100 (acrobot) at the end, over 20 episodes.
ReLU policies. OUI: the overlap index of the layer before the outputs in its batch form; the pair form is of both.
Declared before the grids of rates were run, on seeds of their own: a rule *discriminates* if its interval lies above
the share of good runs without a rule, and tells *more than the rate* if it lies above the precision of the rate.
"""
_LOOPS = """\
*steps proven*: the most for which it is proven that no episode ends that begins in the box, all four numbers within its
half-width of 0 (25 steps are asked of ±0.05, where episodes begin, and 10 of the others), in float32 as the policy's
file runs; of GELU, in real arithmetic. *steps to the end*: those of an episode of gymnasium that begins in the box and
ends too early; a dash where none was found. *boxes*: most after the last step.
"""


def page(records: Sequence[Record]) -> Page:
    """The tables."""
    made = Page.headed("# Policies", notes(records))
    made.add(_ABOUT, policies(records))
    made.add("## Claims", _CLAIMS, claims(records))
    made.add("## Screening", _RULES, screening(records))
    made.add("## More than one step", _LOOPS, loops(records))
    return made


def options(parser: argparse.ArgumentParser) -> None:
    """Which games, and how many trainings."""
    parser.add_argument("--game", nargs="+", choices=GAMES, default=list(GAMES), help="(default all)")
    parser.add_argument("--seeds", type=int, help="of each arm (default 10; acrobot 5, lander 2)")
    parser.add_argument("--first", type=int, default=10, help="the first seed (default 10)")
    parser.add_argument("--screened", type=int, default=3, help="seeds of each learning rate screened (default 3)")
    parser.add_argument("--random", type=int, default=30, help="runs with random settings (default 30)")


SCRIPT = Script("benchmarks.training.policies", __doc__, options, measure, page)

if __name__ == "__main__":
    sys.exit(SCRIPT.main())
