"""Harden a trained model of one's own: its GELU, SiLU and the like become ReLU, and the network is written as ONNX.

python -m verifiable_relu.hardening model.py:make --weights model.pt --data mnist --out hard.onnx
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifiable_relu.arguments import Parser, add_debug, fraction, seconds
from verifiable_relu.data import DATASETS
from verifiable_relu.errors import InputError
from verifiable_relu.files import require_writable
from verifiable_relu.spec.__main__ import radius
from verifiable_relu.streams import guarded
from verifiable_relu.train.options import CHOICES, int8_file

if TYPE_CHECKING:
    from torch import Tensor, nn


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = Parser(label="harden", prog="verifiable-relu harden", text=__doc__)
    made.add_argument(
        "model",
        metavar="MODEL",
        help="FILE.py:NAME or package.module:NAME, where NAME is a torch module or a function that makes one; "
        "the file is run",
    )
    made.add_argument("--weights", type=Path, metavar="FILE", help="a state_dict that torch.save wrote")
    made.add_argument(
        "--data",
        required=True,
        metavar="NAME|FILE.npz",
        help=f"{', '.join(DATASETS)}, or a file with the arrays images (in [0, 1]) and labels",
    )
    made.add_argument("--samples", type=_count, metavar="N", help="fine-tune on the first N images (default: all)")
    made.add_argument("--epochs", type=_count, default=3, metavar="N", help="passes over the data (default: 3)")
    made.add_argument("--rate", type=_rate, metavar="R", help="first learning rate of AdamW (default: 1e-3)")
    made.add_argument("--target", type=float, default=160.0, metavar="LAMBDA", help="λ at the end (default: 160)")
    made.add_argument("--schedule", choices=CHOICES["schedule"], default="log", help="how λ grows (default: log)")
    made.add_argument("--activations", metavar="A,B", help="activations to harden (default: all of hidden layers)")
    made.add_argument(
        "--patience",
        type=_patience,
        default=60.0,
        metavar="S",
        help="seconds for the proof of what the swap changes; 0 leaves it out (default: 60)",
    )
    made.add_argument("--seed", type=_seed, default=0, metavar="N", help="seed of torch's random numbers (default: 0)")
    made.add_argument("--device", default="cpu", help="a torch device (default: cpu)")
    made.add_argument("--out", type=Path, required=True, metavar="N.onnx", help="the ONNX file to write")
    made.add_argument("--int8", action="store_true", help="write the int8 network beside it, too, as N.int8.onnx")
    asked = made.add_argument_group("what is proven of the files")
    asked.add_argument(
        "--eps",
        type=_eps,
        metavar="E",
        help="ask whether test images keep their label in the L∞ ball of this radius, such as 1/255, of the network in "
        "real numbers, of each file in float32, and of these and the λ-GELU networks at once",
    )
    asked.add_argument("--images", type=_count, default=20, metavar="N", help="the first N test images (default: 20)")
    asked.add_argument(
        "--timeout", type=seconds, default=10.0, metavar="S", help="seconds for each image and question (default: 10)"
    )
    asked.add_argument(
        "--certificates",
        type=Path,
        metavar="DIR",
        help="write and check a certificate of all networks at once for each image (with --eps and --int8)",
    )
    made.add_argument("--quiet", action="store_true", help="print nothing but errors to stderr")
    add_debug(made)
    return made


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= len(text) < 10 and int(text)):
        raise argparse.ArgumentTypeError(f"'{text}' is no positive number")
    return int(text)


def _seed(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) < 1 << 63):
        raise argparse.ArgumentTypeError(f"'{text}' is no integer of at least 0 and below 2^63")
    return int(text)


def _patience(text: str) -> float:
    return 0.0 if text == "0" else seconds(text)


def _eps(text: str) -> str:
    radius(text)
    # It is shown as it was given.
    return text


def _rate(text: str) -> float:
    try:
        rate = float(fraction(text))
    except (ValueError, OverflowError):
        rate = 0.0
    if rate <= 0:
        raise argparse.ArgumentTypeError(f"'{text}' is no positive number")
    return rate


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status (``streams.guarded``)."""
    options = parser().parse_args(arguments)
    return guarded("harden", lambda: run(options), options.debug)


def run(options: argparse.Namespace) -> int:
    """Harden the model that the command's options name, write it, and print the report; returns 0.

    Raises:
        InputError: for a model, weights, data, a device or an output file that cannot be used.
    """
    if options.certificates is not None and (options.eps is None or not options.int8):
        raise InputError("--certificates is for --eps and --int8: certify writes those of a single file")
    if options.out.suffix != ".onnx":
        raise InputError("the name of the output file must end in .onnx", path=options.out)
    for written in (options.out, *([int8_file(options.out)] if options.int8 else ())):
        require_writable(written)
    # Imported here, because the imports load torch, for which --help need not wait.
    import torch

    from verifiable_relu.hardening import harden
    from verifiable_relu.hardening.loop import default_optimizer
    from verifiable_relu.network.graph import device
    from verifiable_relu.nn.rectifiers import HIDDEN
    from verifiable_relu.train.batches import DataError, loader

    torch.manual_seed(options.seed)
    model = load(options.model, options.weights).to(device(options.device))
    training, test = _data(options.data)
    held_out = None if training is test and len(test[0]) <= (options.samples or math.inf) else test
    training = (training[0][: options.samples], training[1][: options.samples])
    steps = options.epochs * len(loader(training, True))
    try:
        hardened = harden(
            model,
            training,
            epochs=options.epochs,
            held_out=held_out,
            optimizer=lambda model: default_optimizer(model, steps, options.rate),
            target=options.target,
            schedule=options.schedule,
            activations=HIDDEN if options.activations is None else options.activations.split(","),
            region=(0.0, 1.0),
            patience=options.patience,
            progress=not options.quiet,
        )
    except DataError as error:
        raise error.located(options.data) from None
    hardened.model.cpu()
    hardened.write(options.out)
    print(hardened)
    files = [options.out]
    if options.int8:
        from verifiable_relu.files import write_whole
        from verifiable_relu.train.export import CALIBRATED, quantize

        files.append(int8_file(options.out))
        write_whole(files[1], quantize(options.out.read_bytes(), training[0][:CALIBRATED].numpy()))
    if options.eps is not None:
        from verifiable_relu.hardening.proven import proven
        from verifiable_relu.nn.gates import Hardness, LambdaGELU

        gates = [module for module in hardened.smooth.modules() if isinstance(module, Hardness)]
        lam = options.target if all(isinstance(gate, LambdaGELU) for gate in gates) else None
        asked = test[0][: options.images], test[1][: options.images]
        kept, shown = options.certificates, not options.quiet
        for name, results in proven(files, *asked, options.eps, options.timeout, lam, kept, shown):
            counts = results.summary
            print(
                f"{name}: within {options.eps}, {counts['certified']} of {counts['asked']} images certified, "
                f"{counts['refuted']} refuted, {counts['undecided']} undecided"
            )
    print(f"wrote {' and '.join(map(str, files))}; next, write properties and answer them:")
    print(f"  verifiable-relu spec --net {options.out} --data {options.data} --correct 20 --eps 1/255 --out P")
    print("  verifiable-relu certify --spec P")
    if options.int8:
        print(f"and the same with --net {files[1]}")
    return 0


def load(named: str, weights: Path | None = None) -> nn.Module:
    """The torch module of a name ``FILE.py:NAME`` or ``package.module:NAME``, with weights from a file.

    Args:
        named: where the module, or a function without arguments that makes one, is found. The file is run.
        weights: a ``state_dict``, alone or under the key ``state_dict`` or ``model``; None leaves the weights.

    Raises:
        InputError: if there is no such module, its code fails, or the weights are damaged or do not fit.
    """
    from torch import nn

    source, _, name = named.rpartition(":")
    if not source or not name.isidentifier():
        raise InputError(f"a model is named FILE.py:NAME or package.module:NAME, not {named!r:.100}")
    try:
        found = getattr(_module(source), name)
        model = found if isinstance(found, nn.Module) else found()
    except InputError:
        raise
    except (Exception, SystemExit) as error:  # The user's code may raise anything.
        raise InputError(f"{type(error).__name__}: {error}", path=source, place=name) from error
    if not isinstance(model, nn.Module):
        raise InputError(f"it is a {type(model).__name__}, no torch module", path=source, place=name)
    if weights is not None:
        _load_weights(model, weights)
    return model


def _module(source: str) -> Any:
    if not source.endswith(".py"):
        sys.path.insert(0, "")
        return importlib.import_module(source)
    path = Path(source)
    if not path.is_file():
        raise InputError("no such file", path=path)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module


def _load_weights(model: nn.Module, path: Path) -> None:
    import torch

    # Opening a pipe would wait for its writer.
    if os.path.exists(path) and not os.path.isfile(path):
        raise InputError("cannot be read: not a regular file", path=path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        state = next((state[key] for key in ("state_dict", "model") if isinstance(state.get(key), dict)), state)
        model.load_state_dict(state)
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", path=path) from None
    except Exception as error:  # A damaged file may make torch raise anything.
        raise InputError(f"no weights of this model: {error}", path=path) from None


def _data(source: str) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The images and labels to fine-tune on, and those to measure on; of a file, both are the same."""
    import torch

    if source.endswith(".npz"):
        from verifiable_relu.spec.arrays import read_images

        images, labels = read_images(source)
        pair = torch.as_tensor(images, dtype=torch.float32), torch.as_tensor(labels)
        return pair, pair
    from verifiable_relu.data import load as named

    training, test = named(source, "train"), named(source, "test")
    return (
        (torch.from_numpy(training.images), torch.from_numpy(training.labels)),
        (torch.from_numpy(test.images), torch.from_numpy(test.labels)),
    )


if __name__ == "__main__":
    sys.exit(main())
