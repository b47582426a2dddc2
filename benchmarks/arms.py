"""Every arm of the comparison, trained and tabulated: λ-GELU hardened, its rivals, and ReLU from the start.

    python benchmarks/arms.py
    python benchmarks/arms.py --data fashion_mnist --hidden 100,100,100,100,100,100 --arms lambda-gelu --seeds 5
    python benchmarks/arms.py --table

A grid of arms × data sets × seeds; each finished run leaves a record in results/arms/, whose name holds a digest of
its options, and is never trained again. A run that was killed goes on from its last whole epoch. The trained networks
go to runs/arms/ as ONNX. Every run uses one core; --workers of them run at once.

Whatever is asked for, the tables are made of all records: results/arms.csv (a row per arm and setting) and
results/arms.md (means over the seeds with 95 % intervals by Student's t). Needs the data sets (see README.md).
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import math
import multiprocessing
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from typing import Any

from machine import command, describe
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from scipy import stats

from verifiable_relu.errors import InputError
from verifiable_relu.report import Estimate, estimate
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
    """In words: MLP 2×128, or CNN 16,32 + 100."""
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


def stored_options(record: dict[str, Any]) -> Options:
    """The options of a record, with today's defaults for those it does not know.

    Raises:
        KeyError, TypeError: if it is no record.
    """
    return Options(**{name: tuple(v) if isinstance(v, list) else v for name, v in record["options"].items()})


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


def profile_correlation(profiles: Sequence[Sequence[float]]) -> float:
    """Mean over all pairs of runs of Spearman's correlation of their λ per layer; NaN for one run or under 3 layers."""
    if len(profiles) < 2 or len(profiles[0]) < 3:
        return math.nan
    return statistics.fmean(float(stats.spearmanr(a, b).statistic) for a, b in combinations(profiles, 2))


def drift(profiles: Sequence[Sequence[float]], start: float) -> float:
    """Mean over runs and layers of |λ where the annealing began − λ at the start|."""
    return statistics.fmean(abs(lam - start) for profile in profiles for lam in profile)


@dataclass(frozen=True)
class Line:
    """One arm in one setting: means over its seeds, each with half a 95 % interval.

    Attributes:
        runs: number of seeds.
        clean: accuracy at the end, of what is used: the ReLU network (or PReLU).
        before, after: accuracy just before and just after the replacement by ReLU, wherever it takes place.
        mean_change, worst_change, flipped: the measured disruption (``train.swap``).
        proven: the proven bound on the change of a logit.
        attacked, unstable: attacked accuracy and mean number of unstable neurons by interval bounds at ``eps``, over
            the first 1,000 test images.
        profile: λ per layer where the annealing began, mean over the seeds.
        drift: mean over seeds and layers of its distance from the initial λ.
        correlation: of the profile between seeds (Spearman).
        milliseconds: per training step.
    """

    data: str
    architecture: str
    epochs: int
    changed: str
    arm: str
    runs: int
    eps: float
    clean: Estimate
    before: Estimate | None
    after: Estimate | None
    mean_change: Estimate | None
    worst_change: Estimate | None
    proven: Estimate | None
    flipped: Estimate | None
    attacked: Estimate | None
    unstable: Estimate | None
    profile: str
    drift: float
    correlation: float
    milliseconds: Estimate


ESTIMATES = frozenset(field.name for field in fields(Line) if "Estimate" in str(field.type))
VARIED = {"data", "model", "hidden", "channels", "arm", "finetune_extra", "epochs", "eps", "seed"}


def summarise(records: Iterable[dict[str, Any]]) -> list[Line]:
    """One line per arm and setting, sorted; ``changed`` names the options that are not at their defaults."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    default = asdict(Options(""))
    for record in records:
        options = record["options"]
        changed = ", ".join(
            f"{name}={value}" for name, value in options.items() if name not in VARIED and value != default[name]
        )
        place = ARMS.index(arm_name(options))
        groups[options["data"], architecture(options), options["epochs"], changed, place, options["eps"]].append(record)
    return [_line(*key, sorted(group, key=lambda r: r["options"]["seed"])) for key, group in sorted(groups.items())]


def _line(data: str, net: str, epochs: int, changed: str, place: int, eps: float, group: list[dict[str, Any]]) -> Line:
    results = [record["results"] for record in group]

    def of(name: str, factor: float = 1.0) -> Estimate | None:
        if any(result.get(name) is None for result in results):
            return None
        return estimate([factor * result[name] for result in results])

    profiles = [result["lam_learned"] for result in results]
    means = [statistics.fmean(layer) for layer in zip(*profiles, strict=True)]
    clean, milliseconds = of("clean"), of("seconds_per_step", 1e3)
    assert clean is not None and milliseconds is not None
    return Line(
        data,
        net,
        epochs,
        changed,
        ARMS[place],
        len(group),
        eps,
        clean,
        of("clean_before_substitution"),
        of("clean_after_substitution"),
        of("mean_logit_change"),
        of("worst_logit_change"),
        of("proven_logit_change"),
        of("flipped_predictions"),
        of("attacked_of_these"),
        of("unstable_neurons_by_intervals"),
        " ".join(f"{lam:.2f}" for lam in means),
        drift(profiles, group[0]["options"]["lam_init"]) if means else math.nan,
        profile_correlation(profiles),
        milliseconds,
    )


HEADS = {
    "arm": "arm",
    "runs": "seeds",
    "clean": "clean",
    "before": "before swap",
    "after": "after swap",
    "mean_change": "logit change, mean",
    "worst_change": "worst",
    "proven": "proven",
    "flipped": "flipped",
    "attacked": "attacked",
    "unstable": "unstable",
    "profile": "λ per layer",
    "drift": "drift",
    "correlation": "Spearman",
    "milliseconds": "ms/step",
}


def _cell(value: object) -> str:
    if value is None or value == "" or (isinstance(value, float) and math.isnan(value)):
        return "–"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def markdown(lines: Sequence[Line]) -> str:
    """A table for each data set and setting."""
    parts = []
    settings: dict[tuple[Any, ...], list[Line]] = defaultdict(list)
    for line in lines:
        settings[line.data, line.architecture, line.epochs, line.changed, line.eps].append(line)
    for (data, net, epochs, changed, eps), rows in settings.items():
        title = f"## {data}, {net}, {epochs} epochs, ε = {eps:.4g}" + (f", {changed}" if changed else "")
        body = ["| " + " | ".join(_cell(getattr(row, name)) for name in HEADS) + " |" for row in rows]
        head = "| " + " | ".join(HEADS.values()) + " |"
        parts.append("\n".join([title, "", head, "|" + "---|" * len(HEADS), *body, ""]))
    return "\n".join(parts)


def write_tables(records: Path, results: Path) -> list[Line]:
    """``arms.csv`` and ``arms.md`` in ``results`` from every record in ``records``.

    Raises:
        InputError: if a file there is no record.
    """
    read = []
    for path in sorted(records.glob("*.json")):
        try:
            record = json.loads(path.read_text())
            record["options"] = asdict(stored_options(record))
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"no record of a run ({error})", path=path) from error
        read.append(record)
    lines = summarise(read)
    with (results / "arms.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        names = [field.name for field in fields(Line)]
        writer.writerow([head for name in names for head in ([name, f"{name}_half"] if name in ESTIMATES else [name])])
        for line in lines:
            writer.writerow([entry for name in names for entry in _entries(name, getattr(line, name))])
    text = (
        "# Arms\n\n"
        f"By `python benchmarks/arms.py`, from {len(read)} records in results/arms/; {describe()}.\n\n"
        "Means over the seeds ± half a 95 % interval (Student's t). Accuracies are parts of 1 over the whole test set, "
        "but attacked accuracy and unstable neurons (by interval bounds), at ε, over its first 1,000 images. The "
        "change of the logits and the flipped predictions are those of the replacement by ReLU, where and when the arm "
        "has one; *proven* bounds the change over all images of [0, 1]ⁿ. λ per layer is as the annealing began. "
        "ms/step was measured beside other work on the machine and is no comparison of the arms: "
        "`benchmarks/activation_cost.py` is.\n\n"
    )
    (results / "arms.md").write_text(text + markdown(lines), encoding="utf-8")
    return lines


def _entries(name: str, value: Any) -> list[object]:
    if name not in ESTIMATES:
        return [value]
    return ["", ""] if value is None else [f"{value.mean:.6g}", f"{value.half:.3g}"]


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
    for name, kind in (("switch", float), ("schedule", str), ("ramp", str), ("lam-rate", str)):
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


SHARED = ("model", "hidden", "channels", "epochs", "rate", "crop", "flip", "switch", "schedule", "ramp", "lam_rate")


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
        print(markdown(write_tables(asked.records, asked.results)))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        console.print(f"interrupted; the same command goes on: {command()}", highlight=False)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
