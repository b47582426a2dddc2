"""Train a network with λ-GELU, anneal λ, replace the activation by ReLU, and write the network as ONNX."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from verifiable_relu.arguments import Parser, add_debug
from verifiable_relu.data import DATASETS
from verifiable_relu.errors import InputError
from verifiable_relu.files import require_writable
from verifiable_relu.streams import guarded
from verifiable_relu.train.options import ABOUT, CHOICES, Options, flag, int8_file, reader


def parser() -> argparse.ArgumentParser:
    """The command line: one option for each field of ``Options``, ``--device`` and ``--out``."""
    made = Parser(label="train", prog="verifiable-relu train", description=__doc__, allow_abbrev=False)
    for field in fields(Options):
        about = ABOUT[field.name]
        if field.name == "data":
            about += (
                f": {', '.join(DATASETS)}; or a FILE.npz with the arrays images, in [0, 1], and labels "
                "(test_images and test_labels too, else every tenth image is kept for the test)"
            )
        if field.default is False:
            made.add_argument(flag(field.name), action="store_true", help=about)
            continue
        if field.name in CHOICES:
            about += ": " + ", ".join(CHOICES[field.name])
        if field.default is MISSING:
            made.add_argument(flag(field.name), required=True, help=about)
        else:
            kind, about = reader(field.default), f"{about} ({_shown(field.default)})"
            made.add_argument(flag(field.name), type=kind, default=field.default, help=about)
    made.add_argument("--device", default="auto", help="a torch device (auto: a GPU if there is one)")
    made.add_argument(
        "--tensorboard",
        type=Path,
        metavar="DIR",
        help="write curves for TensorBoard there (needs tensorboard)",
    )
    made.add_argument("--int8", action="store_true", help="write the int8 network beside it, too, as NAME.int8.onnx")
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
    debug, int8 = values.pop("debug"), values.pop("int8")
    return guarded("train", lambda: run(Options(**values), out, device, board, int8), debug)


def run(options: Options, out: Path, device: str = "auto", tensorboard: Path | None = None, int8: bool = False) -> int:
    """Train a network with a progress bar on stderr, and write it as ONNX.

    Args:
        options: the options of the training.
        out: the ONNX file; the record is written beside it with the suffix ``.json``.
        device: a torch device; ``auto`` takes a GPU if there is one.
        tensorboard: a folder for TensorBoard's curves, or None.
        int8: whether the int8 network is written, too.

    Returns:
        The exit status: 0 when done, 130 after Ctrl-C.

    Raises:
        InputError: for data, a device, an output path or a checkpoint that cannot be used.
    """
    if out.suffix != ".onnx":
        raise InputError("the name of the output file must end in .onnx", path=out)
    saved = out.with_suffix(".checkpoint")
    for written in (out, saved, out.with_suffix(".json"), *([int8_file(out)] if int8 else ())):
        require_writable(written)
    from verifiable_relu.network.graph import device as find_device
    from verifiable_relu.train.batches import training_and_test
    from verifiable_relu.train.loop import train
    from verifiable_relu.train.progress import Board, shown

    where = find_device(device)
    training, test = training_and_test(options.data)
    board = None if tensorboard is None else Board(tensorboard)
    if training.note:
        print(training.note, file=sys.stderr)
    steps = options.total_epochs * -(-len(training) // options.batch)
    try:
        with shown(True, steps) as show:
            trained = train(options, training, saved, show, test, where, None if board is None else board.epoch)
    except KeyboardInterrupt:
        print(f"interrupted; the same command resumes after the last complete epoch ({saved})", file=sys.stderr)
        return 130
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate" not in str(error):
            raise
        raise InputError("the training does not fit into the memory", place=flag("model")) from None
    from verifiable_relu.train.export import export

    results = export(trained, options, training, test, out, int8)
    saved.unlink(missing_ok=True)
    points = results.pop("monitor")
    if board is not None:
        board.finish(points, results)
    _show(results)
    more = f", {int8_file(out)}" if int8 else ""
    print(f"wrote {out}{more} and {out.with_suffix('.json')}")
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
            share = isinstance(each, float) and name.startswith(("clean", "not_refuted", "pruned", "int8"))
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
