"""``python -m verifiable_relu.train``: train with λ-GELU, harden, substitute ReLU, write ONNX."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from verifiable_relu.arguments import Parser
from verifiable_relu.data.registry import DATASETS
from verifiable_relu.errors import InputError
from verifiable_relu.train.options import CHOICES, Options, flag, number, sizes

HELP: dict[str, tuple[Callable[[str], Any], str]] = {
    "data": (str, ", ".join(DATASETS)),
    "model": (str, "the architecture"),
    "arm": (str, "which activation is trained, and when ReLU takes its place"),
    "switch": (float, "part of the training after which λ is annealed, or GELU replaced"),
    "finetune_extra": (int, "epochs of fine-tuning beyond --epochs, for arms that replace GELU at the switch"),
    "finetune_rate": (float, "the rate that these begin with, as part of --rate"),
    "optimizer": (str, "of the weights and λ"),
    "momentum": (float, "of sgd"),
    "beta1": (float, "decay of adamw's mean of gradients"),
    "beta2": (float, "decay of adamw's mean of squared gradients"),
    "hidden": (sizes, "sizes of the fully connected hidden layers, as 100,100 (mlp, cnn)"),
    "channels": (sizes, "channels of the convolutions, as 16,32 (cnn)"),
    "width": (float, "factor of the layers' sizes (cnn3, cnn5, cnn7, resnet)"),
    "epochs": (int, "epochs in all, with those that anneal λ"),
    "batch": (int, "images per step"),
    "rate": (float, "highest learning rate of the weights"),
    "rise": (float, "part of the training over which the rate rises"),
    "fall": (str, "how it falls after that"),
    "decay": (float, "decoupled weight decay"),
    "l1": (float, "factor of the weights' absolute values in the loss"),
    "eps": (number, "radius of the attack and the intervals, as 2/255"),
    "warmup": (int, "epochs over which ε grows from 0"),
    "attack_steps": (int, "steps of the attack in training; 0: none"),
    "certified": (float, "weight of the loss of the worst logits by bounds"),
    "certified_by": (str, "these bounds"),
    "small_box": (float, "radius of sabr's box, as part of ε"),
    "stability": (float, "weight of the ReLU-stability term"),
    "terms_grow": (str, "when these two weights grow: with ε, or over the first half of λ's ramp"),
    "initialisation": (str, "of the weights; ibp: intervals keep their width"),
    "inputs": (str, "whether images are standardised first"),
    "crop": (int, "zero padding of random crops, in pixels; 0: none"),
    "lam_init": (float, "λ of every layer at the start"),
    "lam_target": (float, "λ of every layer at the end"),
    "lam_temperature": (float, "t in λ = 1 + softplus(s/t)"),
    "tolerance": (float, "distance to ReLU that λ's target follows from, instead of --lam-target; 0: unused"),
    "tolerance_on": (str, "the distance meant: integral over the gate or the function, or its supremum"),
    "ramp": (str, "whether λ still learns while it is annealed"),
    "schedule": (str, "the annealing is linear in λ, log λ or 1/λ"),
    "lam_rate": (str, "learning rate of λ's parameter"),
    "lam_factor": (float, "step of λ over step of a weight"),
    "seed": (int, "of weights, order, augmentation and attacks"),
}


def parser() -> argparse.ArgumentParser:
    """The command line: one option for each field of ``Options``, and ``--out``."""
    made = Parser(prog="python -m verifiable_relu.train", description=__doc__, allow_abbrev=False)
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
    made.add_argument("--out", type=Path, required=True, help="the ONNX file to write; the record goes beside it")
    return made


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and export; 0 when done, 2 for bad input, 130 after Ctrl-C (the same command then goes on)."""
    values = vars(parser().parse_args(arguments))
    out, device = values.pop("out"), values.pop("device")
    try:
        return run(Options(**values), out, device)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run(options: Options, out: Path, device: str = "auto") -> int:
    """Train by ``options`` on ``device`` with a progress bar on stderr and write ``out``.

    Raises:
        InputError: for data, a device, an output path or a checkpoint that cannot be used.
    """
    if out.suffix != ".onnx":
        raise InputError("the output's name must end in .onnx", path=out)
    _require_place(out)
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from verifiable_relu.data import load
    from verifiable_relu.network.device import device as find_device
    from verifiable_relu.train.loop import train

    where = find_device(device)
    training, test = load(options.data, "train"), load(options.data, "test")
    saved = out.with_suffix(".checkpoint")
    console = Console(stderr=True)
    if training.note:
        console.print(training.note, highlight=False)
    columns = (MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"))
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
            )
        except KeyboardInterrupt:
            bar.stop()
            console.print(f"interrupted; the same command goes on from the last whole epoch ({saved})", highlight=False)
            return 130
        except (MemoryError, RuntimeError) as error:
            bar.stop()
            if isinstance(error, RuntimeError) and "allocate" not in str(error):
                raise
            raise InputError("the training does not fit into the memory", place=flag("model")) from None
    from verifiable_relu.train.export import export

    results = export(trained, options, training, test, out)
    saved.unlink(missing_ok=True)
    results.pop("monitor")
    for name, value in results.items():
        print(f"{name}: {value:.4f}" if isinstance(value, float) else f"{name}: {value}")
    print(f"wrote {out} and {out.with_suffix('.json')}")
    return 0


def _require_place(out: Path) -> None:
    """Nothing is trained whose network cannot be written.

    Raises:
        InputError: if there is no such folder, or no file of this name can be in it.
    """
    try:
        if not out.parent.is_dir():
            raise InputError("no such folder", path=out.parent)
        if not os.access(out.parent, os.W_OK):
            raise InputError("nothing can be written into this folder", path=out.parent)
        os.lstat(out.with_suffix(".checkpoint"))
    except FileNotFoundError:
        pass
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", path=out) from None
    except InputError:
        raise
    except ValueError as error:  # A null character in the name.
        raise InputError(f"not a file name: {error}", path=out) from None


if __name__ == "__main__":
    sys.exit(main())
