"""Grids of trainings: what a run is called, and training those that have no record yet."""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

from benchmarks.common.measures import stored_options
from benchmarks.common.records import Record, Records
from verifiable_relu.data.registry import DATASETS
from verifiable_relu.errors import InputError
from verifiable_relu.train.arms import ARMS
from verifiable_relu.train.options import Options, number, sizes

_EXTRA = "-extra"

VARIANTS: dict[str, str] = {
    name: arm for arm, row in ARMS.items() for name in ((arm, arm + _EXTRA) if row.swap == "switch" else (arm,))
}
"""What is compared, by name in the order of the tables: the arm of each. A name that ends in ``-extra`` is an arm that
does not replace its activation at the switch, but fine-tunes for as many epochs after the training as others anneal."""

SHARED = (
    "model", "hidden", "channels", "epochs", "rate", "crop", "flip", "switch", "schedule", "ramp", "lam_rate", "fall",
    "inputs",
)  # fmt: skip
"""The options of a training that are the same in all runs of a grid."""


def variant_options(variant: str, base: Options) -> Options:
    """``base`` as one of ``VARIANTS``.

    Raises:
        InputError: if there is none of that name.
    """
    if variant not in VARIANTS:
        raise InputError(f"'{variant}' is none of {', '.join(VARIANTS)}", place="--arms")
    extra = base.epochs - base.first_annealed if variant.endswith(_EXTRA) else 0
    return replace(base, arm=VARIANTS[variant], finetune_extra=extra)


def variant_name(options: Mapping[str, Any]) -> str:
    """The inverse of ``variant_options``, of the fields of ``Options``."""
    return str(options["arm"]) + (_EXTRA if options["finetune_extra"] else "")


def place(variant: str) -> int:
    """Where a variant stands in tables."""
    return list(VARIANTS).index(variant)


def architecture(options: Mapping[str, Any]) -> str:
    """In words: MLP 2×128, CNN 16,32 + 1×100, or CNN3 of a width."""
    if options["model"] not in ("mlp", "cnn"):
        name = options["model"].replace("resnet", "ResNet").replace("cnn", "CNN")
        return name if options["width"] == 1 else f"{name}, width {options['width']:g}"
    hidden = [int(size) for size in options["hidden"]]
    equal = f"{len(hidden)}×{hidden[0]}" if hidden and len(set(hidden)) == 1 else ",".join(map(str, hidden))
    return f"MLP {equal}" if options["model"] == "mlp" else f"CNN {','.join(map(str, options['channels']))} + {equal}"


_TOLD = {"data", "model", "width", "hidden", "channels", "arm", "finetune_extra", "epochs", "eps", "seed"}
"""The options that the other parts of a setting say."""


def setting(record: Record) -> tuple[Any, ...]:
    """What runs that differ by their seed alone share, of the record of one of them.

    Data, architecture, epochs, the other options that are not at their defaults, ε, and the place of the variant.
    """
    options, default = record["options"], asdict(Options(""))
    changed = ", ".join(
        f"{name}={value}" for name, value in options.items() if name not in _TOLD and value != default[name]
    )
    net, where = architecture(options), place(variant_name(options))
    return options["data"], net, options["epochs"], changed, options["eps"], where


def run_name(options: Options) -> str:
    """The name of a run and of its files, without suffix: the same for the same options, and for no others.

    Options at their defaults are left out of the digest, so that an option that is new in a later version does not
    make a finished run another one.
    """
    default = asdict(Options(options.data))
    chosen = {name: value for name, value in asdict(options).items() if value != default[name]}
    digest = hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:8]
    return f"{options.data}_{variant_name(asdict(options))}_seed{options.seed}_{digest}"


def network_path(folder: Path, options: Options) -> Path:
    """Where the network of a run lies."""
    return folder / f"{run_name(options)}.onnx"


# The command line of a grid


def add_grid(parser: argparse.ArgumentParser, networks: Path) -> None:
    """The options that choose a grid of runs, and the folder of their networks."""
    parser.add_argument("--data", type=_names, default=["mnist", "fashion_mnist"], help=f"of {', '.join(DATASETS)}")
    parser.add_argument("--arms", type=_names, default=list(VARIANTS), help=f"of {', '.join(VARIANTS)}")
    parser.add_argument("--seeds", type=int, default=3, help="how many, from 0 on (default 3)")
    parser.add_argument("--model", default="mlp", help="the architecture (default mlp)")
    parser.add_argument("--hidden", type=sizes, default=(128, 128), help="(default 128,128)")
    parser.add_argument("--channels", type=sizes, default=(16, 32), help="(default 16,32)")
    parser.add_argument("--epochs", type=int, default=6, help="(default 6)")
    parser.add_argument("--rate", type=float, default=2e-3, help="(default 0.002)")
    parser.add_argument("--eps", type=number, help="for attacked accuracy and unstable neurons (by data set)")
    parser.add_argument("--crop", type=int, default=0, help="(default 0)")
    parser.add_argument("--flip", action="store_true")
    for name, kind in (
        ("switch", float),
        *((name, str) for name in ("schedule", "ramp", "lam-rate", "fall", "inputs")),
    ):
        default = getattr(Options, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"(default {default})")
    parser.add_argument("--networks", type=Path, default=networks, help="folder of the trained networks")


def _names(text: str) -> list[str]:
    return text.split(",")


def grid_of(asked: argparse.Namespace) -> list[Options]:
    """Every run asked for, seed by seed, so that a grid that is cut short has few seeds rather than few arms.

    Raises:
        InputError: for an option that cannot be.
    """
    grid = []
    for seed in range(asked.seeds):
        for data in asked.data:
            if data not in DATASETS:
                raise InputError(f"'{data}' is none of {', '.join(DATASETS)}", place="--data")
            radii = DATASETS[data].radii
            eps = float(Fraction(radii[len(radii) // 2])) if asked.eps is None else asked.eps
            shared = {name: getattr(asked, name) for name in SHARED}
            base = Options(data, eps=eps, seed=seed, **shared)
            grid += [variant_options(variant, base) for variant in asked.arms]
    return grid


# Training


def finished(options: Options, records: Sequence[Record]) -> bool:
    """Whether the run has a record.

    Raises:
        InputError: if a record of its name is of other options.
    """
    for record in records:
        if record["kind"] == "run" and record["run"] == run_name(options):
            if stored_options(record) != options:
                raise InputError(f"the record of {run_name(options)} is of other options")
            return True
    return False


@lru_cache(maxsize=2)
def dataset_of(name: str, split: str) -> Any:
    """A split of a data set; the last two are kept, for the runs that a process trains one after another."""
    from verifiable_relu.data import load

    return load(name, split)  # type: ignore[arg-type]


def run(options: Options, networks: Path) -> Record:
    """Train, or go on training from the checkpoint, and write the network.

    Returns:
        The record, as ``train.export.finish`` makes it, with ``run``, the run's name. The checkpoint stays.

    Raises:
        InputError: for data or a checkpoint that cannot be used.
    """
    import torch

    from verifiable_relu.network import from_torch, write_onnx
    from verifiable_relu.train.checkpoint import write_whole
    from verifiable_relu.train.export import finish
    from verifiable_relu.train.loop import train

    torch.set_num_threads(1)
    training, test = dataset_of(options.data, "train"), dataset_of(options.data, "test")
    hard, record = finish(train(options, training, checkpoint(networks, options), test=test), options, training, test)
    write_whole(network_path(networks, options), write_onnx(from_torch(hard, training.images.shape[1:])))
    return {"run": run_name(options), **record}


def checkpoint(networks: Path, options: Options) -> Path:
    """Where a run that is not finished goes on from."""
    return networks / f"{run_name(options)}.checkpoint"


def keep(options: Options, record: Record, records: Records, networks: Path) -> None:
    """Record a run that was trained; then only its checkpoint goes, so that no kill in between loses the training."""
    records.append("run", record)
    checkpoint(networks, options).unlink(missing_ok=True)


def train_all(grid: Sequence[Options], records: Records, networks: Path, workers: int) -> None:
    """Train what has no record yet, in ``workers`` processes of one thread each, with a bar on stderr.

    Args:
        grid: what is to be trained.
        records: of the study, which get a record of kind ``run`` for each run as soon as it is finished.
        networks: the folder of the trained networks and of the checkpoints; made if it does not exist.
        workers: how many processes train at once.

    Raises:
        InputError: for data, a record or a checkpoint that cannot be used, or for no worker.
    """
    from benchmarks.common.progress import bars, say

    if workers < 1:
        raise InputError(f"must be at least 1, got {workers}", place="--workers")
    networks.mkdir(parents=True, exist_ok=True)
    missing = [options for options in grid if not finished(options, records.all)]
    say(f"{len(grid)} runs, of which {len(grid) - len(missing)} are done")
    if not missing:
        return
    # Forked children would inherit the state of torch's threads.
    pool = ProcessPoolExecutor(min(workers, len(missing)), multiprocessing.get_context("spawn"))
    waiting: dict[Future[Record], Options] = {}
    with bars() as bar:
        task = bar.add_task("", total=len(missing))
        try:
            waiting = {pool.submit(run, options, networks): options for options in missing}
            for future in as_completed(list(waiting)):
                record = future.result()
                keep(waiting.pop(future), record, records, networks)
                bar.update(task, advance=1, description=record["run"])
        finally:
            pool.shutdown(cancel_futures=True)
            # Whatever was finished while this process was being interrupted.
            for future, options in waiting.items():
                if future.done() and not future.cancelled() and future.exception() is None:
                    keep(options, future.result(), records, networks)
