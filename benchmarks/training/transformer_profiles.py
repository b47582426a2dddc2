"""Do seeds of a small Transformer agree on the layers' λ, and do activation patterns settle before weights?

    python -m benchmarks.training.transformer_profiles
    python -m benchmarks.training.transformer_profiles --data language --layers 4 --seeds 3

Transformers with λ-GELU in their feed-forward blocks (``transformers_models``) are trained with learned λ, on images of
MNIST and on sentences of an artificial language (``profiles_measuring``); nothing is hardened or verified. Each network
leaves a record, and is not trained again. The script needs the data sets (see README.md).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks.common.markup import Cell, Table
from benchmarks.common.records import Record, Records, grouped, notes, of
from benchmarks.common.script import Script
from benchmarks.common.tables import Page, estimate

DATA = ("mnist", "language")
_SETTING = ("patch", "width", "hidden", "train", "epochs")
_ABOUT = """\
λ-GELU in the feed-forward blocks, λ learned at the paper's rate. *ρ*: Spearman's correlation of the layers' learned λ
over all pairs of seeds, its mean, least and greatest; *p*: how often layers in random order agree as well on average,
not corrected for the number of rows. *patterns* and *weights*: the part of the training after which nine tenths of all
change of the activation patterns of 200 training samples, and of the weights, had happened; *weights : patterns* above
1 means that patterns settled first. ± is half a 95 % interval over the seeds (Student's t).
"""


def measure(asked: argparse.Namespace, records: Records) -> None:
    """A record per data set, number of layers and seed."""
    import torch

    from benchmarks.common.progress import bars
    from benchmarks.training.profiles_measuring import profiled

    torch.set_num_threads(1)
    about = {name: getattr(asked, name) for name in _SETTING}
    with bars() as bar:
        # The first seeds of everything come first: a run that is stopped has few seeds of all settings.
        for seed in bar.track(range(asked.seeds), description="seeds"):
            for data in asked.data:
                for layers in asked.layers:
                    title = {"data": data, "layers": layers, "seed": seed, **about}
                    if not records.has("profiled", title):
                        records.append("profiled", {**title, **profiled(title)})


def profiles(found: Sequence[Record]) -> Table:
    """A row per data set and number of layers: the seeds' agreement on the layers' λ."""
    from benchmarks.study.statistics import agreement

    rows: list[tuple[Cell, ...]] = []
    for (data, layers), group in grouped(found, "data", "layers").items():
        lams = [record["lam"] for record in group]
        means = " ".join(f"{sum(layer) / len(layer):.2f}" for layer in zip(*lams, strict=True))
        ranks: tuple[float | None, ...] = agreement(lams) if len(group) > 1 and layers > 2 else (None,) * 4
        rows.append((data, layers, len(group), estimate([record["accuracy"] for record in group]), means, *ranks))
    columns = ("data", "layers", "seeds", "accuracy", "λ per layer", "mean ρ", "least", "greatest", "p")
    return Table(columns, rows, {"mean ρ": ".2f", "least": ".2f", "greatest": ".2f"})


def settling(found: Sequence[Record]) -> Table:
    """A row per data set and number of layers: when patterns and weights had made nine tenths of their way."""
    rows: list[tuple[Cell, ...]] = []
    for (data, layers), group in grouped(found, "data", "layers").items():
        ratios = [record["weights"] / record["patterns"] for record in group]
        first = sum(ratio > 1 for ratio in ratios)
        parts = [estimate([record[name] for record in group]) for name in ("patterns", "weights")]
        rows.append((data, layers, len(group), *parts, estimate(ratios), f"patterns in {first}"))
    return Table(("data", "layers", "seeds", "patterns", "weights", "weights : patterns", "first"), rows)


def page(records: Sequence[Record]) -> Page:
    """Both tables."""
    found = of(records, "profiled")
    made = Page.headed("# Profiles of small Transformers", notes(records))
    settings = "; ".join(
        dict.fromkeys(
            f"{r['train']:,} training samples, {r['epochs']} epochs, tokens of {r['width']} numbers, {r['hidden']} in "
            f"the feed-forward blocks, patches of {r['patch']}×{r['patch']} pixels"
            for r in found
        )
    )
    made.add(f"{settings}. {_ABOUT}", "## Do seeds agree on the layers' λ?", profiles(found))
    made.add("## When activation patterns settle, and when weights do", settling(found))
    return made


def options(parser: argparse.ArgumentParser) -> None:
    """Which networks, and how much is trained."""
    parser.add_argument("--data", choices=DATA, nargs="+", default=list(DATA), help="images, sentences (default both)")
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 6], help="numbers of layers (default 4 6)")
    parser.add_argument("--seeds", type=int, default=8, help="how many, from 0 on (default 8)")
    parser.add_argument("--patch", type=int, default=14, help="pixels of a patch's side, of images (default 14)")
    parser.add_argument("--width", type=int, default=16, help="numbers of a token (default 16)")
    parser.add_argument("--hidden", type=int, default=32, help="numbers in a feed-forward block (default 32)")
    parser.add_argument("--train", type=int, default=10_000, help="training samples, the first (default 10000)")
    parser.add_argument("--epochs", type=int, default=8, help="of training with learned λ (default 8)")


SCRIPT = Script("benchmarks.training.transformer_profiles", __doc__, options, measure, page)

if __name__ == "__main__":
    sys.exit(SCRIPT.main())
