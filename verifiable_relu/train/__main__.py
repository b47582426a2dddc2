"""Train a network with λ-GELU, anneal λ, replace the activation by ReLU, and write the network as ONNX."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from verifiable_relu.arguments import Parser, add_debug
from verifiable_relu.data.registry import DATASETS
from verifiable_relu.errors import InputError
from verifiable_relu.files import require_writable
from verifiable_relu.streams import guarded
from verifiable_relu.train.options import CHOICES, Options, flag, number, sizes

HELP: dict[str, tuple[Callable[[str], Any], str]] = {
    "data": (
        str,
        "the data set: " + ", ".join(DATASETS) + "; or a FILE.npz with the arrays images, in [0, 1], and labels "
        "(test_images and test_labels too, else every tenth image is kept for the test)",
    ),
    "model": (str, "the architecture"),
    "arm": (str, "the activation that is trained, and when ReLU takes its place"),
    "switch": (float, "fraction of the training after which λ is annealed or GELU replaced"),
    "finetune_extra": (int, "epochs of fine-tuning beyond --epochs, for arms that replace GELU at the switch"),
    "finetune_rate": (float, "first learning rate of these epochs, as a fraction of --rate"),
    "optimizer": (str, "the optimizer of the weights and λ"),
    "momentum": (float, "momentum of sgd"),
    "beta1": (float, "decay of adamw's mean of gradients"),
    "beta2": (float, "decay of adamw's mean of squared gradients"),
    "hidden": (sizes, "sizes of the fully connected hidden layers, such as 100,100 (mlp, cnn)"),
    "channels": (sizes, "channels of the convolutions, such as 16,32 (cnn)"),
    "width": (float, "factor of the layers' sizes (cnn3, cnn5, cnn7, resnet)"),
    "epochs": (int, "epochs in all, including those in which λ is annealed"),
    "batch": (int, "images per step"),
    "rate": (float, "highest learning rate of the weights"),
    "rise": (float, "fraction of the training over which the learning rate rises"),
    "fall": (str, "how the learning rate falls after its rise"),
    "decay": (float, "decoupled weight decay"),
    "l1": (float, "factor of the sum of the weights' absolute values in the loss"),
    "eps": (number, "radius ε of the attack and of the intervals, such as 2/255"),
    "warmup": (int, "epochs over which ε grows from 0"),
    "attack_steps": (int, "steps of the attack in training; 0: no attack"),
    "certified": (float, "weight of the certified loss, the cross-entropy of the worst logits by bounds"),
    "certified_by": (str, "the bounds of the certified loss"),
    "small_box": (float, "radius of sabr's box, as a fraction of ε"),
    "stability": (float, "weight of the ReLU-stability term of the loss"),
    "terms_grow": (str, "when --certified and --stability grow from 0: with ε, or over the first half of λ's ramp"),
    "initialisation": (str, "distribution of the initial weights; ibp: intervals keep their width"),
    "inputs": (str, "whether the network standardises its inputs"),
    "crop": (int, "zero padding of random crops in pixels; 0: no crops"),
    "lam_init": (float, "λ of every layer at the start"),
    "lam_target": (float, "λ of every layer at the end"),
    "lam_temperature": (float, "t in λ = 1 + softplus(s/t)"),
    "tolerance": (float, "distance to ReLU from which λ at the end follows, in place of --lam-target; 0: unused"),
    "tolerance_on": (str, "the distance: the gate's or the function's integral, or the function's supremum"),
    "ramp": (str, "whether λ is learned further while it is annealed"),
    "schedule": (str, "whether the annealing is linear in λ, in log λ or in 1/λ (inverse)"),
    "lam_rate": (str, "how the learning rate of λ's parameter s follows from the weights'"),
    "lam_factor": (float, "a step of λ divided by a step of a weight"),
    "seed": (int, "seed of the initial weights, the order of the images, augmentation and attacks"),
}
"""For each field of ``Options`` the conversion of its text on the command line, and the help text."""


def parser() -> argparse.ArgumentParser:
    """The command line: one option for each field of ``Options``, ``--device`` and ``--out``."""
    made = Parser(label="train", prog="verifiable-relu train", description=__doc__, allow_abbrev=False)
    for field in fields(Options):
        if field.name == "flip":
            made.add_argument("--flip", action="store_true", help="mirror images at random")
            continue
        kind, text = HELP[field.name]
        if field.name in CHOICES:
            text += ": " + ", ".join(CHOICES[field.name])
        if field.default is MISSING:
            made.add_argument(flag(field.name), type=kind, required=True, help=text)
        else:
            shown = _shown(field.default)
            made.add_argument(flag(field.name), type=kind, default=field.default, help=f"{text} ({shown})")
    made.add_argument("--device", default="auto", help="a torch device (auto: a GPU if there is one)")
    made.add_argument(
        "--tensorboard",
        type=Path,
        metavar="DIR",
        help="write curves for TensorBoard there (pip install 'verifiable-relu[tensorboard]')",
    )
    made.add_argument("--out", type=Path, required=True, help="the ONNX file to write; its record goes beside it")
    add_debug(made)
    return made


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and export a network by the command line's arguments.

    Returns:
        The exit status (``streams.guarded``); after Ctrl-C, the same command resumes.
    """
    values = vars(parser().parse_args(arguments))
    out, device, board = values.pop("out"), values.pop("device"), values.pop("tensorboard")
    debug = values.pop("debug")
    return guarded("train", lambda: run(Options(**values), out, device, board), debug)


def run(options: Options, out: Path, device: str = "auto", tensorboard: Path | None = None) -> int:
    """Train a network with a progress bar on stderr, and write it as ONNX.

    Args:
        options: the options of the training.
        out: the ONNX file; the record is written beside it with the suffix ``.json``.
        device: a torch device; ``auto`` takes a GPU if there is one.
        tensorboard: a folder for TensorBoard's curves, or None.

    Returns:
        The exit status: 0 when done, 130 after Ctrl-C.

    Raises:
        InputError: for data, a device, an output path or a checkpoint that cannot be used.
    """
    if out.suffix != ".onnx":
        raise InputError("the name of the output file must end in .onnx", path=out)
    saved = out.with_suffix(".checkpoint")
    for written in (out, saved, out.with_suffix(".json")):
        require_writable(written)
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from verifiable_relu.network.device import device as find_device
    from verifiable_relu.train.board import Board
    from verifiable_relu.train.loop import train
    from verifiable_relu.train.own_data import training_and_test

    where = find_device(device)
    training, test = training_and_test(options.data)
    board = None if tensorboard is None else Board(tensorboard)
    console = Console(stderr=True)
    if training.note:
        console.print(training.note, highlight=False, markup=False)
    columns = (MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as bar:
        steps = options.total_epochs * -(-len(training) // options.batch)
        task = bar.add_task("", total=steps)
        try:
            trained = train(
                options,
                training,
                saved,
                lambda step, text: bar.update(task, completed=step, description=text),
                test,
                where,
                None if board is None else board.epoch,
            )
        except KeyboardInterrupt:
            bar.stop()
            said = f"interrupted; the same command resumes after the last complete epoch ({saved})"
            console.print(said, highlight=False, markup=False)
            return 130
        except (MemoryError, RuntimeError) as error:
            bar.stop()
            if isinstance(error, RuntimeError) and "allocate" not in str(error):
                raise
            raise InputError("the training does not fit into the memory", place=flag("model")) from None
    from verifiable_relu.train.export import export

    results = export(trained, options, training, test, out)
    saved.unlink(missing_ok=True)
    points = results.pop("monitor")
    if board is not None:
        board.finish(points, results)
    _show(results)
    print(f"wrote {out} and {out.with_suffix('.json')}")
    return 0


def _show(results: Mapping[str, Any]) -> None:
    """Print a table of the results; parts of all images are percentages."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("result", "value", box=None)
    for name, value in results.items():
        parts = value.items() if isinstance(value, dict) else [("", value)]
        for part, each in parts:
            share = isinstance(each, float) and name.startswith(("clean", "attacked", "pruned", "int8"))
            table.add_row(" ".join([*name.split("_"), *part.split("_")]).strip(), Text(_value(each, share)))
    Console(soft_wrap=True).print(table)


def _value(value: Any, share: bool) -> str:
    if isinstance(value, list):
        return ", ".join(_value(each, share) for each in value) or "–"
    if isinstance(value, float):
        return f"{100 * value:.2f} %" if share and 0 <= value <= 1 else f"{value:.4g}"
    return "–" if value is None else str(value)


if __name__ == "__main__":
    sys.exit(main())
