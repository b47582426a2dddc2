"""What does hardening do to a trained GELU network, beside fine-tuning after a direct swap?

    python -m benchmarks.training.hardening
    python -m benchmarks.training.hardening --seeds 1 --images 100

On MNIST, an MLP 2×128 that calls F.gelu and a small CNN with nn.GELU are trained with GELU. Each is then hardened
by ``verifiable_relu.harden`` with all defaults, or its GELUs are replaced by ReLU at once and the network is fine-tuned
with the same data in the same order, optimizer, rate and number of steps: the control. Each seed of a network leaves a
record, and is not trained again. The script needs the data sets (see README.md).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks.common.markup import Cell, Table
from benchmarks.common.records import Record, Records, grouped, notes, of
from benchmarks.common.script import Script
from benchmarks.common.tables import Page, estimate

EPS = {"mlp": "0.02", "cnn": "0.05"}
"""The radius of the balls, by network."""

ARMS = ("GELU", "swap", "swap, fine-tuning", "hardened")
MEASURES = ("clean", "not refuted", "crown", "alpha-crown")


def measure(asked: argparse.Namespace, records: Records) -> None:
    """A record per network and seed, with the numbers of images of each arm."""
    import torch

    from benchmarks.common.progress import bars
    from benchmarks.training.hardening_measuring import measured

    torch.set_num_threads(1)
    about = {"train": asked.train, "epochs": asked.epochs, "finetuning": asked.finetuning, "images": asked.images}
    with bars() as bar:
        for name in bar.track(asked.network, description="networks"):
            for seed in range(asked.seeds):
                title = {"network": name, "eps": EPS[name], "seed": seed, **about}
                if not records.has("measured", title):
                    records.append("measured", {**title, **measured(title, bar)})


def table(found: Sequence[Record]) -> Table:
    """A row per network and arm."""
    rows: list[tuple[Cell, ...]] = []
    for key, group in grouped(found, "network", "eps").items():
        for arm in ARMS:
            few = [[record[arm][name] / record[arm]["images"] for name in MEASURES] for record in group]
            accuracy = estimate([record[arm]["accuracy"] for record in group])
            rows.append((*key, arm, len(group), accuracy, *map(estimate, zip(*few, strict=True))))
    return Table(("net", "ε", "arm", "seeds", "accuracy", "clean", "not refuted", "certified, CROWN", "α-CROWN"), rows)


def differences(found: Sequence[Record]) -> Table:
    """Hardened minus the control, seed by seed, and what the swap after hardening changes."""
    rows: list[tuple[Cell, ...]] = []
    for key, group in grouped(found, "network", "eps").items():
        pairs = [(record["hardened"], record["swap, fine-tuning"]) for record in group]
        accuracy = estimate([a["accuracy"] - b["accuracy"] for a, b in pairs])
        parts = [(a["alpha-crown"] - b["alpha-crown"]) / a["images"] for a, b in pairs]
        changes = [record["hardened"]["change"] for record in group]
        worst, proven = (max(change[name] for change in changes) for name in ("worst", "proven"))
        rows.append(
            (*key, len(group), accuracy, estimate(parts), worst, proven, sum(change["flipped"] for change in changes))
        )
    columns = ("net", "ε", "seeds", "Δ accuracy", "Δ certified", "worst change", "proven change", "flipped")
    return Table(columns, rows)


def page(records: Sequence[Record]) -> Page:
    """Both tables."""
    found = of(records, "measured")
    made = Page.headed("# Hardening a trained GELU network", notes(records))
    about = "; ".join(
        dict.fromkeys(
            f"{r['train']:,} training images, {r['epochs']} epochs with GELU, then {r['finetuning']} of fine-tuning; "
            f"{r['images']} images asked"
            for r in found
        )
    )
    made.add(
        f"MNIST, {about}. Means over the seeds ± half a 95 % interval (Student's t). *accuracy*: over all test images. "
        "The rest are parts of the first exact test images: *not refuted*, by the attack; *certified*, proven "
        "by CROWN, and by α-CROWN. *swap*: ReLU in place of GELU, nothing else. *swap, fine-tuning*: the control.",
        table(found),
        "Hardened minus control, seed by seed (α-CROWN); then, over all seeds, the largest change of an output by the "
        "swap after hardening on the test images, its proven bound over all images of [0, 1]ⁿ, and the number of test "
        "images whose predicted class changes.",
        differences(found),
    )
    return made


def options(parser: argparse.ArgumentParser) -> None:
    """Which networks, and how much is trained and asked."""
    parser.add_argument("--network", nargs="+", choices=EPS, default=list(EPS), help="(default all)")
    parser.add_argument("--seeds", type=int, default=3, help="how many, from 0 on (default 3)")
    parser.add_argument("--train", type=int, default=20_000, help="training images, the first (default 20000)")
    parser.add_argument("--epochs", type=int, default=6, help="of training with GELU (default 6)")
    parser.add_argument("--finetuning", type=int, default=3, help="epochs of fine-tuning (default 3)")
    parser.add_argument("--images", type=int, default=200, help="exact test images asked about (default 200)")


SCRIPT = Script("benchmarks.training.hardening", __doc__, options, measure, page)

if __name__ == "__main__":
    sys.exit(SCRIPT.main())
