"""Every arm of the comparison, trained and tabulated: λ-GELU hardened, its rivals, and ReLU from the start.

    python benchmarks/arms.py
    python benchmarks/arms.py --data fashion_mnist --hidden 100,100,100,100,100,100 --arms lambda-gelu --seeds 5
    python benchmarks/arms.py --data cifar10 --model cnn --hidden 100 --epochs 10 --crop 4 --flip
    python benchmarks/arms.py --table

A grid of arms × data sets × seeds; each finished run leaves a record in results/arms/, whose name holds a digest of
its options, and is never trained again. A run that was killed goes on from its last whole epoch. The trained networks
go to runs/arms/ as ONNX. Every run uses one core; --workers of them run at once.

Whatever is asked for, the tables are made of all records: results/arms.csv (a row per arm and setting) and
results/arms.md (means over the seeds with 95 % intervals by Student's t). Needs the data sets (see README.md).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from machine import command, describe
from measures import (
    Column,
    Record,
    by_setting,
    correlation,
    difference,
    drift,
    early_oui,
    learned,
    profile,
    read_records,
    reading,
    result,
    stored_options,
    table,
)
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from verifiable_relu.errors import InputError
from verifiable_relu.report import Estimate, Table
from verifiable_relu.train.options import Options, number, sizes

RESULTS = Path(__file__).parent / "results"
RUNS = Path(__file__).parent.parent / "runs" / "arms"
ARMS = (
    "lambda-gelu",
    "lambda-gelu-frozen",
    "swish",
    "gelu-swap",
    "gelu-swap-finetune",
    "gelu-swap-finetune-extra",
    "relu",
    "prelu",
)
EPS = {"mnist": 0.02, "fashion_mnist": 0.01, "cifar10": 1 / 255}


def arm_options(arm: str, base: Options) -> Options:
    """``base`` as the arm of that name.

    It is one of ``Options.arm``, or ``gelu-swap-finetune-extra``: that fine-tunes for as many epochs beyond
    ``base.epochs`` as other arms anneal.
    """
    if arm == "gelu-swap-finetune-extra":
        return replace(base, arm="gelu-swap-finetune", finetune_extra=base.epochs - base.first_annealed)
    return replace(base, arm=arm)  # type: ignore[arg-type]


def arm_name(options: dict[str, Any]) -> str:
    """The inverse of ``arm_options``."""
    return str(options["arm"]) + ("-extra" if options["finetune_extra"] else "")


def architecture(options: dict[str, Any]) -> str:
    """In words: MLP 2×128, CNN 16,32 + 1×100, or CNN3 of a width."""
    if options["model"] not in ("mlp", "cnn"):
        name = options["model"].replace("resnet", "ResNet").replace("cnn", "CNN")
        return name if options["width"] == 1 else f"{name}, width {options['width']:g}"
    hidden = [int(size) for size in options["hidden"]]
    equal = f"{len(hidden)}×{hidden[0]}" if hidden and len(set(hidden)) == 1 else ",".join(map(str, hidden))
    return f"MLP {equal}" if options["model"] == "mlp" else f"CNN {','.join(map(str, options['channels']))} + {equal}"


def run_name(options: Options) -> str:
    """Of a run's files, without suffix: the same for the same options, and for no others.

    Options at their defaults are left out of the digest, so that an option that is new in a later version does not
    make a finished run another one.
    """
    default = asdict(Options(options.data))
    chosen = {name: value for name, value in asdict(options).items() if value != default[name]}
    digest = hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:8]
    return f"{options.data}_{arm_name(asdict(options))}_seed{options.seed}_{digest}"


def finished(options: Options, records: Path) -> bool:
    """Whether the run's record is there.

    Raises:
        InputError: if a file of that name is no record of these options.
    """
    path = records / f"{run_name(options)}.json"
    if not path.is_file():
        return False
    try:
        kept = stored_options(json.loads(path.read_text()))
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"no record of a run ({error})", path=path) from error
    if kept != options:
        raise InputError("a record of other options", path=path)
    return True


@lru_cache(maxsize=2)
def _data(name: str, split: str) -> Any:
    from verifiable_relu.data import load

    return load(name, split)  # type: ignore[arg-type]


def run(options: Options, records: Path, networks: Path) -> str:
    """Train, or go on training, and write first the network, then the record. Returns the run's name.

    Raises:
        InputError: for data or a checkpoint that cannot be used.
    """
    import torch

    from verifiable_relu.network import from_torch, write_onnx
    from verifiable_relu.train.checkpoint import write_whole
    from verifiable_relu.train.export import finish, write_record
    from verifiable_relu.train.loop import train

    torch.set_num_threads(1)
    name = run_name(options)
    training, test = _data(options.data, "train"), _data(options.data, "test")
    saved = networks / f"{name}.checkpoint"
    hard, record = finish(train(options, training, saved, test=test), options, training, test)
    write_whole(networks / f"{name}.onnx", write_onnx(from_torch(hard, training.images.shape[1:])))
    write_record(records / f"{name}.json", record)
    saved.unlink(missing_ok=True)
    return name


def train_all(grid: Sequence[Options], records: Path, networks: Path, workers: int, console: Console) -> None:
    """Train what has no record yet, in ``workers`` processes, with progress on ``console``.

    Raises:
        InputError: for data, a record or a checkpoint that cannot be used.
    """
    for folder in (records, networks):
        folder.mkdir(parents=True, exist_ok=True)
    missing = [options for options in grid if not finished(options, records)]
    console.print(f"{len(grid)} runs, of which {len(grid) - len(missing)} are done", highlight=False)
    columns = (MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"))
    # Forked children would inherit the state of torch's threads.
    pool = ProcessPoolExecutor(min(workers, max(1, len(missing))), multiprocessing.get_context("spawn"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("", total=len(missing))
        try:
            for future in as_completed([pool.submit(run, options, records, networks) for options in missing]):
                bar.update(task, advance=1, description=future.result())
        finally:
            pool.shutdown(cancel_futures=True)


# Tables

SWAP: dict[str, Column] = {
    "clean": result("clean"),
    "before swap": result("clean_before_substitution"),
    "after swap": result("clean_after_substitution"),
    "logit change, mean": result("mean_logit_change"),
    "worst": result("worst_logit_change"),
    "proven": result("proven_logit_change"),
    "flipped": result("flipped_predictions"),
    "λ per layer": profile,
    "drift": drift,
    "Spearman": lambda group: correlation(learned(group)),
}
LATER: dict[str, Column] = {
    "float": result("clean"),
    "int8": result("int8", "clean"),
    "int8, per tensor": result("int8_per_tensor", "clean"),
    **{f"pruned {share}": result("pruned", share) for share in ("0.5", "0.7", "0.9")},
    "attacked": result("attacked_of_these"),
    "unstable": result("unstable_neurons_by_intervals"),
    "OUI at 10 %": early_oui,
    "ms/step": result("seconds_per_step", factor=1e3),
}
ABOUT = """\
Means over the seeds ± half a 95 % interval (Student's t). Accuracies are parts of 1 over the whole test set, but
attacked accuracy and unstable neurons (by interval bounds), at ε, over its first 1,000 images.

The first table of a setting is about the replacement by ReLU, where and when the arm has one: the change of the logits,
the predictions that it flips, and what *proven* says: no logit changes by more for any image of [0, 1]ⁿ. λ per layer is
as the annealing began, *drift* its mean distance from the initial λ, *Spearman* the mean rank correlation of the
layers' λ between seeds. The second is about the network that is used (ReLU, or PReLU): *int8* after static quantisation
(onnxruntime, with a scale per channel or per tensor), *pruned* after setting that part of all weights to 0, the
smallest first, both without further training; the OUI of the activation patterns after a tenth of the training. ms/step
was measured beside other work on the machine and is no comparison of the arms: `benchmarks/activation_cost.py` is.
"""
DIFFERENCES = """\
## λ-GELU, learned and hardened, against the other arms

Accuracy at the end, of the network that is used, minus that of the other arm, paired by seed (same initial weights and
order of the data). A difference is read where its interval leaves out 0, not corrected for the number of comparisons.
"""
VARIED = {"data", "model", "width", "hidden", "channels", "arm", "finetune_extra", "epochs", "eps", "seed"}


def setting(record: Record) -> tuple[Any, ...]:
    """Data, architecture, epochs, the options that are not at their defaults, ε, and the arm's place."""
    options, default = record["options"], asdict(Options(""))
    changed = ", ".join(
        f"{name}={value}" for name, value in options.items() if name not in VARIED and value != default[name]
    )
    place = ARMS.index(arm_name(options))
    return options["data"], architecture(options), options["epochs"], changed, options["eps"], place


def against_rivals(groups: Mapping[tuple[Any, ...], Sequence[Record]]) -> Table:
    """Clean accuracy at the end of λ-GELU, learned and hardened, minus that of each other arm, paired by seed."""
    rows = []
    for key, group in groups.items():
        rivals = {other: runs for other, runs in groups.items() if other[:-1] == key[:-1] and other != key}
        for other, runs in rivals.items() if key[-1] == 0 else ():
            gained = difference("clean", runs)(group)
            if isinstance(gained, Estimate):
                data, net, _, changed, _ = key[:-1]
                said = reading(gained, "λ-GELU higher", "λ-GELU lower")
                rows.append((data, net, changed, ARMS[other[-1]], gained.n, gained, said))
    return Table(("data", "net", "changed", "minus", "seeds", "Δ clean", "reading"), rows)


def write_tables(records: Path, results: Path) -> str:
    """``arms.csv`` and ``arms.md`` in ``results`` from every record in ``records``; the Markdown.

    Raises:
        InputError: if a file there is no record.
    """
    read = read_records(records)
    groups = by_setting(read, setting)
    everything = table(
        ("data", "net", "epochs", "changed", "ε", "arm"),
        {**SWAP, **LATER},
        (((*key[:-1], ARMS[key[-1]]), group) for key, group in groups.items()),
    )
    (results / "arms.csv").write_text(everything.csv(), encoding="utf-8")
    parts = [
        f"# Arms\n\nBy `python benchmarks/arms.py`, from {len(read)} records in results/arms/; {describe()}.\n",
        ABOUT,
    ]
    parts += [DIFFERENCES, against_rivals(groups).markdown()]
    for place in dict.fromkeys(key[:-1] for key in groups):
        data, net, epochs, changed, eps = place
        rows = [((ARMS[key[-1]],), group) for key, group in groups.items() if key[:-1] == place]
        notes = {record["note"] for _, group in rows for record in group} - {""}
        parts.append(f"## {data}, {net}, {epochs} epochs, ε = {eps:.4g}" + (f", {changed}" if changed else "") + "\n")
        parts += [f"{note}.\n" for note in sorted(notes)]
        parts += [table(("arm",), columns, rows).markdown() for columns in (SWAP, LATER)]
    text = "\n".join(parts)
    (results / "arms.md").write_text(text, encoding="utf-8")
    return text


def grid_parser(description: str) -> argparse.ArgumentParser:
    """The options that choose a grid of runs and the folders in which they lie."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--data", type=lambda text: text.split(","), default=["mnist", "fashion_mnist"])
    made.add_argument("--arms", type=lambda text: text.split(","), default=list(ARMS))
    made.add_argument("--seeds", type=int, default=3, help="how many, from 0 on")
    made.add_argument("--model", default="mlp")
    made.add_argument("--hidden", type=sizes, default=(128, 128))
    made.add_argument("--channels", type=sizes, default=(16, 32))
    made.add_argument("--epochs", type=int, default=6)
    made.add_argument("--rate", type=float, default=2e-3)
    made.add_argument("--eps", type=number, help="for attacked accuracy and unstable neurons (by data set)")
    made.add_argument("--crop", type=int, default=0)
    made.add_argument("--flip", action="store_true")
    for name, kind in (
        ("switch", float),
        ("schedule", str),
        ("ramp", str),
        ("lam-rate", str),
        ("fall", str),
        ("inputs", str),
    ):
        made.add_argument(f"--{name}", type=kind, default=getattr(Options, name.replace("-", "_")))
    made.add_argument("--records", type=Path, default=RESULTS / "arms")
    made.add_argument("--networks", type=Path, default=RUNS)
    return made


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = grid_parser(__doc__)
    made.add_argument("--workers", type=int, default=os.cpu_count())
    made.add_argument("--table", action="store_true", help="train nothing, only make the tables")
    made.add_argument("--results", type=Path, default=RESULTS)
    return made


SHARED = (
    "model",
    "hidden",
    "channels",
    "epochs",
    "rate",
    "crop",
    "flip",
    "switch",
    "schedule",
    "ramp",
    "lam_rate",
    "fall",
    "inputs",
)


def grid_of(arguments: argparse.Namespace) -> list[Options]:
    """Every run asked for, seed by seed, so that a grid that is cut short has few seeds rather than few arms.

    Raises:
        InputError: for an option that cannot be.
    """
    grid = []
    for seed in range(arguments.seeds):
        for data in arguments.data:
            eps = EPS.get(data, 0.01) if arguments.eps is None else arguments.eps
            shared = {name: getattr(arguments, name) for name in SHARED}
            base = Options(data, eps=eps, seed=seed, **shared)
            grid += [arm_options(arm, base) for arm in arguments.arms]
    return grid


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and tabulate; 0 when done, 2 for bad input, 130 after Ctrl-C."""
    asked = parser().parse_args(arguments)
    console = Console(stderr=True)
    try:
        if not asked.table:
            train_all(grid_of(asked), asked.records, asked.networks, asked.workers, console)
        print(write_tables(asked.records, asked.results))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        console.print(f"interrupted; the same command goes on: {command()}", highlight=False)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
