"""Grids of trainings: the names of runs, the command line of a grid, and the training of runs without a record."""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

from benchmarks.common.measures import stored_options
from verifiable_relu.data.registry import DATASETS
from verifiable_relu.errors import InputError
from verifiable_relu.study.records import Record, Records
from verifiable_relu.study.variants import VARIANTS, architecture, changed, place, variant_name, variant_options
from verifiable_relu.train.options import Options, number, sizes

SHARED = (
    "model", "hidden", "channels", "epochs", "rate", "crop", "flip", "switch", "schedule", "ramp", "lam_rate", "fall",
    "inputs",
)  # fmt: skip
"""The options of a training that are the same in all runs of a grid."""


_TOLD = {"data", "model", "width", "hidden", "channels", "arm", "finetune_extra", "epochs", "eps", "seed"}
"""The options that have a part of their own in a ``setting``."""


def setting(record: Record) -> tuple[Any, ...]:
    """The setting of a run's record; two runs have the same setting if their options differ in the seed alone.

    Returns:
        The data set, the architecture, the number of epochs, the other options that differ from their defaults, ε, and
        the place of the variant in tables.
    """
    options, default = record["options"], asdict(Options(""))
    changed = ", ".join(
        f"{name}={value}" for name, value in options.items() if name not in _TOLD and value != default[name]
    )
    net, where = architecture(options), place(variant_name(options))
    return options["data"], net, options["epochs"], changed, options["eps"], where


def run_name(options: Options) -> str:
    """The name of a run and, without suffix, of its files; runs with different options have different names.

    The digest in the name leaves out options at their defaults: a finished run keeps its name when a later version has
    a new option.
    """
    digest = hashlib.sha256(json.dumps(changed(options), sort_keys=True).encode()).hexdigest()[:8]
    return f"{options.data}_{variant_name(asdict(options))}_seed{options.seed}_{digest}"


def network_path(folder: Path, options: Options) -> Path:
    """The path of a run's trained network."""
    return folder / f"{run_name(options)}.onnx"


# The command line of a grid


def add_grid(parser: argparse.ArgumentParser, networks: Path) -> None:
    """Add the options that choose a grid of runs, and the option of their networks' folder.

    Args:
        parser: the parser of the script's command line.
        networks: the default folder.
    """
    data, arms = ", ".join(DATASETS), ", ".join(VARIANTS)
    parser.add_argument("--data", type=_names, default=["mnist", "fashion_mnist"], help=f"data sets, some of {data}")
    parser.add_argument("--arms", type=_names, default=list(VARIANTS), help=f"variants, some of {arms} (default all)")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds, from 0 on (default 3)")
    parser.add_argument("--model", default="mlp", help="the architecture (default mlp)")
    parser.add_argument("--hidden", type=sizes, default=(128, 128), help="sizes of hidden layers (default 128,128)")
    parser.add_argument("--channels", type=sizes, default=(16, 32), help="channels of convolutions (default 16,32)")
    parser.add_argument("--epochs", type=int, default=6, help="epochs of each training (default 6)")
    parser.add_argument("--rate", type=float, default=2e-3, help="highest learning rate (default 0.002)")
    parser.add_argument(
        "--eps", type=number, help="radius for attacked accuracy and unstable neurons (default by data set)"
    )
    parser.add_argument("--crop", type=int, default=0, help="padding of random crops in pixels (default 0)")
    parser.add_argument("--flip", action="store_true", help="mirror images at random")
    for name, kind in (
        ("switch", float),
        *((name, str) for name in ("schedule", "ramp", "lam-rate", "fall", "inputs")),
    ):
        default = getattr(Options, name.replace("-", "_"))
        about = f"as for python -m verifiable_relu.train (default {default})"
        parser.add_argument(f"--{name}", type=kind, default=default, help=about)
    parser.add_argument("--networks", type=Path, default=networks, help="folder of the trained networks")


def _names(text: str) -> list[str]:
    return text.split(",")


def grid_of(asked: argparse.Namespace) -> list[Options]:
    """The options of every run of the grid that a command line describes.

    The runs are ordered by seed first: a grid that is interrupted has few seeds of all arms.

    Raises:
        InputError: for an option with an impossible value.
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
    """Whether a run has a record.

    Raises:
        InputError: if the record of the run's name has other options.
    """
    for record in records:
        if record["kind"] == "run" and record["run"] == run_name(options):
            if stored_options(record) != options:
                raise InputError(f"the record of {run_name(options)} has other options")
            return True
    return False


@lru_cache(maxsize=2)
def dataset_of(name: str, split: str) -> Any:
    """A split of a data set; the last two splits are kept, for the next runs that a process trains."""
    from verifiable_relu.data import load

    return load(name, split)  # type: ignore[arg-type]


def run(options: Options, networks: Path) -> Record:
    """Train the network of a run, resuming from its checkpoint if there is one, and write the network.

    Returns:
        The record that ``train.export.finish`` makes, and in it ``run``, the run's name. The checkpoint is kept.

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
    """The path of a run's checkpoint, from which a run that was interrupted resumes."""
    return networks / f"{run_name(options)}.checkpoint"


def keep(options: Options, record: Record, records: Records, networks: Path) -> None:
    """Record a trained run and then delete its checkpoint; in this order, a kill in between loses no training."""
    records.append("run", record)
    checkpoint(networks, options).unlink(missing_ok=True)


def train_all(grid: Sequence[Options], records: Records, networks: Path, workers: int) -> None:
    """Train the runs of a grid that have no record, with a progress bar on stderr.

    Args:
        grid: the options of the runs.
        records: the records of the study, to which each run adds a record of kind ``run`` when it is finished.
        networks: the folder of the trained networks and the checkpoints, which is made if it does not exist.
        workers: the number of processes that train at once, of one thread each.

    Raises:
        InputError: for data, a record or a checkpoint that cannot be used, or for less than one worker.
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
            # Runs that were finished while this process was being interrupted are kept, too.
            for future, options in waiting.items():
                if future.done() and not future.cancelled() and future.exception() is None:
                    keep(options, future.result(), records, networks)
