"""What does hardening do to small vision Transformers, and by how much can the swap change a feed-forward block?

    python -m benchmarks.training.transformers
    python -m benchmarks.training.transformers --data digits --patch 4 --layers 1 --seeds 1

Transformers with λ-GELU in their feed-forward blocks (``transformers_models``) are trained with learned λ, hardened by
``verifiable_relu.harden``, and verified with ReLU. The hardness that the layers have learned is compared across seeds;
the change that the swap makes to a block is bounded over boxes of the block's inputs. Each network leaves a record, and
is not trained again. The script needs the data sets (see README.md).
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Sequence

from benchmarks.common.markup import Cell, Table
from benchmarks.common.records import Record, Records, grouped, notes, of
from benchmarks.common.script import Script
from benchmarks.common.tables import Page, estimate

EPS = ("0.001", "0.002", "0.005")
"""The radii of the balls."""

_SETTING = ("data", "patch", "width", "hidden", "train", "epochs", "finetuning", "images")


def measure(asked: argparse.Namespace, records: Records) -> None:
    """A record per number of layers and seed."""
    import torch

    from benchmarks.common.progress import bars
    from benchmarks.training.transformers_measuring import measured

    torch.set_num_threads(1)
    about = {name: getattr(asked, name) for name in _SETTING}
    with bars() as bar:
        for layers in bar.track(asked.layers, description="layers"):
            for seed in range(asked.seeds):
                title = {"layers": layers, "seed": seed, **about}
                if not records.has("measured", title):
                    records.append("measured", {**title, **measured(title, EPS, bar)})


def table(found: Sequence[Record]) -> Table:
    """A row per number of layers and radius: accuracies, and what is proven of the network with ReLU."""
    rows: list[tuple[Cell, ...]] = []
    for layers, group in grouped(found, "layers").items():
        changes = [record["change"] for record in group]
        names = ("accuracy_before", "accuracy_smooth", "accuracy")
        accuracies = [estimate([change[name] for change in changes]) for name in names]
        flipped = sum(change["flipped"] for change in changes)
        for eps in EPS:
            counts = [record["certified"][eps] for record in group]
            shares = [
                estimate([count[name] / record["images"] for count, record in zip(counts, group, strict=True)])
                for name in ("clean", "not refuted", "crown", "alpha-crown")
            ]
            rows.append((layers, len(group), *accuracies, flipped, eps, *shares))
    columns = ("layers", "seeds", "accuracy, learned λ", "hardened", "with ReLU", "flipped", "ε")
    return Table((*columns, "clean", "not refuted", "certified, CROWN", "α-CROWN"), rows)


def profiles(found: Sequence[Record]) -> Table:
    """A row per network: the learned λ of each layer; then the mean correlation of all pairs of seeds."""
    from benchmarks.study.statistics import agreement

    rows: list[tuple[Cell, ...]] = []
    for layers, group in grouped(found, "layers").items():
        lams = [record["lam"] for record in group]
        rho = agreement(lams)[0] if len(lams) > 1 and len(lams[0]) > 2 else None
        for record in group:
            shown = " ".join(f"{lam:.2f}" for lam in record["lam"])
            rows.append((layers, record["seed"], shown, rho))
    columns = ("layers", "seed", "learned λ, layer by layer", "mean ρ of all pairs")
    return Table(columns, rows, {"mean ρ of all pairs": ".2f"})


def blocks(found: Sequence[Record]) -> Table:
    """A row per number of layers, block and box: the proven and the sampled error of the swap, at worst over seeds."""
    rows: list[tuple[Cell, ...]] = []
    for layers, group in grouped(found, "layers").items():
        several = zip(*(record["blocks"] for record in group), strict=True)
        for same in several:
            sampled = max(block["sampled"] for block in same)
            proven = None if any(block["proven"] is None for block in same) else max(block["proven"] for block in same)
            size = max(block["size"] for block in same)
            rows.append((layers, same[0]["layer"], same[0]["box"], size, sampled, proven))
    columns = ("layers", "block", "box of inputs", "largest input", "sampled change", "proven change")
    return Table(columns, rows, dict.fromkeys(columns[3:], ".4f"))


def worst(figures: Iterable[float | None]) -> str:
    """The largest of several figures as text; "unknown" if one of them is."""
    known = [math.inf if figure is None else figure for figure in figures]
    return f"{max(known):.3g}" if max(known) < math.inf else "unknown"


def page(records: Sequence[Record]) -> Page:
    """The tables."""
    found = of(records, "measured")
    made = Page.headed("# Small vision Transformers", notes(records))
    about = "; ".join(
        dict.fromkeys(
            f"{r['data']}: {r['train']:,} training images, patches of {r['patch']}×{r['patch']} pixels, tokens of "
            f"{r['width']} numbers, {r['hidden']} in the feed-forward blocks; {r['epochs']} epochs with learned λ, "
            f"then {r['finetuning']} of hardening to λ = 160; {r['images']} images asked"
            for r in found
        )
    )
    made.add(
        f"{about}. Means over the seeds ± half a 95 % interval (Student's t). Accuracies are over all test images; "
        "*flipped* are those, over all seeds, whose class the swap after hardening changes. The rest are parts of the "
        "first exact test images, asked about the network with ReLU: *not refuted*, by the attack; "
        "*certified*, proven by CROWN, and by α-CROWN.",
        table(found),
        "The λ that each layer has learned before hardening, and Spearman's ρ between the layers' orders in two seeds, "
        "the mean over all pairs of seeds; it needs three layers.",
        profiles(found),
        "The largest change of an output of a feed-forward block when its λ-GELU with λ = 160 is replaced by ReLU, "
        "over boxes of the block's own inputs: *sampled* at random points and corners, and *proven* for all points. "
        "Boxes are around the tokens of test images, or the range of all of these.",
        blocks(found),
        "The largest change of an output of the whole network, proven over balls of radius "
        f"{EPS[0]} around test images: "
        + "; ".join(
            f"{layers} layers {worst(record['proven'] for record in group)}"
            for layers, group in grouped(found, "layers").items()
        )
        + ".",
    )
    return made


def options(parser: argparse.ArgumentParser) -> None:
    """Which networks, and how much is trained and asked."""
    parser.add_argument("--data", default="mnist", help="a data set of images (default mnist)")
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 2, 4], help="numbers of layers (default 1 2 4)")
    parser.add_argument("--seeds", type=int, default=3, help="how many, from 0 on (default 3)")
    parser.add_argument("--patch", type=int, default=14, help="pixels of a patch's side (default 14)")
    parser.add_argument("--width", type=int, default=16, help="numbers of a token (default 16)")
    parser.add_argument("--hidden", type=int, default=32, help="numbers in a feed-forward block (default 32)")
    parser.add_argument("--train", type=int, default=10_000, help="training images, the first (default 10000)")
    parser.add_argument("--epochs", type=int, default=8, help="of training with learned λ (default 8)")
    parser.add_argument("--finetuning", type=int, default=3, help="epochs of hardening (default 3)")
    parser.add_argument("--images", type=int, default=40, help="exact test images asked about (default 40)")


SCRIPT = Script("benchmarks.training.transformers", __doc__, options, measure, page)

if __name__ == "__main__":
    sys.exit(SCRIPT.main())
