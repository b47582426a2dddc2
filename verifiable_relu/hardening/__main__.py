"""Harden a trained model of one's own: its GELU, SiLU and the like become ReLU, and the network is written as ONNX.

python -m verifiable_relu.hardening model.py:make --weights model.pt --data mnist --out hard.onnx
"""

from __future__ import annotations

import argparse
import math
import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from verifiable_relu import data
from verifiable_relu.command_line import Parser, guarded
from verifiable_relu.errors import InputError
from verifiable_relu.spec.__main__ import radius
from verifiable_relu.train.__main__ import resumable
from verifiable_relu.train.options import DATA_HELP, Growth, add_options, int8_file, require_allowed, require_outputs

if TYPE_CHECKING:
    from torch import Tensor, nn

    from verifiable_relu.hardening.loop import HardenedModel


@dataclass(frozen=True)
class HardeningOptions:
    """The options of a hardening; the text next to each one is the command's help."""

    model: str
    data: Annotated[str, DATA_HELP]
    weights: Annotated[Path | None, "a state_dict that torch.save wrote"] = None
    samples: Annotated[int | None, "number of images to fine-tune on, the first ones (default: all)"] = None
    epochs: Annotated[int, "passes over the data"] = 3
    rate: Annotated[float, "first learning rate of AdamW"] = 1e-3
    target: Annotated[float, "λ at the end"] = 160.0
    schedule: Growth = "log"
    activations: Annotated[str | None, "activations to harden, such as gelu,silu (default: all of hidden layers)"] = (
        None
    )
    change_timeout: Annotated[float, "time limit in seconds of the proof of what the swap changes; 0: no proof"] = 60.0
    seed: Annotated[int, "seed of torch's random numbers"] = 0
    eps: Annotated[
        str | None,
        "ask whether test images keep their label in the L∞ ball of this radius, such as 1/255, of the network in real "
        "numbers, of each file in float32, and of these and the λ-GELU networks at once",
    ] = None
    images: Annotated[int, "number of test images, the first ones, for --eps"] = 20
    timeout: Annotated[float, "time limit in seconds for each image and question of --eps"] = 10.0
    certificates: Annotated[
        Path | None,
        "folder for a checked certificate of both files and the λ-GELU networks in real numbers for each image (with "
        "--eps and --int8)",
    ] = None

    def __post_init__(self) -> None:
        """Raise an InputError for a bad option, which the error names."""
        require_allowed(self)
        if self.eps is not None:
            try:
                radius(self.eps)
            except argparse.ArgumentTypeError as error:
                raise InputError(str(error), place="--eps") from None


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    made = Parser(label="harden", prog="verifiable-relu harden", text=__doc__)
    text = "FILE.py:NAME or package.module:NAME; NAME is a torch module or a function that makes one; the file is run"
    made.add_argument("model", metavar="MODEL", help=text)
    add_options(made, HardeningOptions, device="cpu")
    made.add_argument("--quiet", action="store_true", help="print nothing but errors to stderr")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status (``command_line.guarded``); after Ctrl-C, the same command resumes."""
    values = vars(parser().parse_args(arguments))
    out, device, debug, int8, quiet = (values.pop(name) for name in ("out", "device", "debug", "int8", "quiet"))
    return guarded("harden", lambda: run(HardeningOptions(**values), out, device, int8, quiet), debug)


def run(options: HardeningOptions, out: Path, device: str, int8: bool, quiet: bool) -> int:
    """Harden the model that the options name, write it, and print the report; returns 0, or 130 after Ctrl-C."""
    if options.certificates is not None and (options.eps is None or not int8):
        raise InputError("--certificates needs --eps and --int8; for a single file, use certify --certificates")
    require_outputs(out, int8, ".checkpoint")
    # Imported here, because the imports load torch, for which --help need not wait.
    import torch

    from verifiable_relu.hardening.loop import default_optimizer, harden
    from verifiable_relu.nn.gates import HIDDEN
    from verifiable_relu.settings import find_device
    from verifiable_relu.train.batches import DataError, loader
    from verifiable_relu.train.export import write_int8

    torch.manual_seed(options.seed)
    model = load(options.model, options.weights).to(find_device(device))
    # Of a file, the images are those to fine-tune on and those to measure on.
    splits: list[data.Split] = ["train"] if options.data.endswith(".npz") else ["train", "test"]
    read = [data.load(options.data, split) for split in splits]
    pairs = [(torch.as_tensor(each.images, dtype=torch.float32), torch.from_numpy(each.labels)) for each in read]
    training, test = pairs[0], pairs[-1]
    held_out = None if training is test and len(test[0]) <= (options.samples or math.inf) else test
    training = (training[0][: options.samples], training[1][: options.samples])
    steps, saved = options.epochs * len(loader(training, True)), out.with_suffix(".checkpoint")
    activations = HIDDEN if options.activations is None else options.activations.split(",")
    ask = partial(
        harden,
        model,
        training,
        epochs=options.epochs,
        held_out=held_out,
        target=options.target,
        checkpoint=saved,
        optimizer=lambda model: default_optimizer(model, steps, options.rate),
        schedule=options.schedule,
        activations=activations,
        region=(0.0, 1.0),
        change_timeout=options.change_timeout,
        progress=not quiet,
    )
    try:
        hardened = resumable(saved, ask)
    except DataError as error:
        raise error.located(options.data) from None
    if hardened is None:
        return 130
    hardened.model.cpu()
    hardened.write(out)
    print(hardened)
    files = [out, int8_file(out)] if int8 else [out]
    if int8:
        write_int8(out.read_bytes(), out, training[0].numpy())
    if options.eps is not None:
        _prove(options, hardened, files, test, shown=not quiet)
    saved.unlink(missing_ok=True)
    print(f"wrote {' and '.join(map(str, files))}; next, write properties and answer them:")
    print(f"  verifiable-relu spec --net {out} --data {options.data} --correct 20 --eps 1/255 --out P")
    print("  verifiable-relu certify --spec P")
    if int8:
        print(f"and the same with --net {files[1]}")
    return 0


def _prove(
    options: HardeningOptions, hardened: HardenedModel, files: list[Path], test: tuple[Tensor, Tensor], shown: bool
) -> None:
    """Print how many test images keep their label, for the network in real numbers, each file in float32, and all.

    The last question is about all networks at once: the λ'-GELU networks with λ' ≥ ``target`` (where no gate is of
    another activation) and ReLU in real numbers, and every evaluation of the files in float32. What is certified is
    asked of real numbers alone.
    """
    from verifiable_relu.api import verify
    from verifiable_relu.nn.gates import Hardness, LambdaGELU

    gates = [module for module in hardened.smooth.modules() if isinstance(module, Hardness)]
    family = all(isinstance(gate, LambdaGELU) for gate in gates)
    asked: dict[str, dict[str, Any]] = {f"{files[0].name} in real numbers": {"model": files[0]}}
    asked |= {f"{file.name} in float32": {"model": file, "arithmetic": "float32"} for file in files}
    whole = {"model": files[0], "other_models": files[1:], **({"family": options.target} if family else {})}
    also = f" and λ-GELU with λ ≥ {options.target:g}" if family else ""
    asked[f"all of these{also} at once"] = {**whole, "arithmetic": "float32"}
    if options.certificates is not None:
        asked[f"both files{also} in real numbers"] = {**whole, "certificates": options.certificates}
    images, labels = test[0][: options.images], test[1][: options.images]
    for name, how in asked.items():
        counts = verify(
            images=images, labels=labels, eps=options.eps, timeout=options.timeout, progress=shown, **how
        ).summary
        print(
            f"{name}: within {options.eps}, {counts['certified']} of {counts['asked']} images certified, "
            f"{counts['refuted']} refuted, {counts['undecided']} undecided"
        )


def load(named: str, weights: Path | None = None) -> nn.Module:
    """Return the torch module of a name ``FILE.py:NAME`` or ``package.module:NAME``, with weights from a file.

    The name may be that of a function without arguments that makes a module; the file is run. The weights are a
    ``state_dict``, alone or under the key ``state_dict`` or ``model``. Raises an InputError if there is no such module,
    its code fails, or the weights are damaged or do not fit.
    """
    from torch import nn

    source, _, name = named.rpartition(":")
    if not source or not name.isidentifier():
        raise InputError(f"a model is named FILE.py:NAME or package.module:NAME, not {named!r:.100}")
    if is_file := source.endswith(".py"):
        if not Path(source).is_file():
            raise InputError("no such file", path=source)
    else:
        sys.path.insert(0, "")
    try:
        stem = Path(source).stem
        found = runpy.run_path(source, run_name=stem)[name] if is_file else getattr(import_module(source), name)
        model = found if isinstance(found, nn.Module) else found()
    except InputError:
        raise
    except (Exception, SystemExit) as error:  # The user's code may raise anything.
        raise InputError(f"{type(error).__name__}: {error}", path=source, place=name) from error
    if not isinstance(model, nn.Module):
        raise InputError(f"a {type(model).__name__}, not a torch module", path=source, place=name)
    if weights is not None:
        _load_weights(model, weights)
    return model


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
        raise InputError(f"these weights do not fit the model: {error}", path=path) from None


if __name__ == "__main__":
    sys.exit(main())
