"""The command ``verifiable-relu spec``, which writes L∞ robustness properties and their ``instances.csv``."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from verifiable_relu.command_line import Parser, add_debug, fraction, guarded, seconds
from verifiable_relu.data import DATASETS, load
from verifiable_relu.errors import InputError, counted
from verifiable_relu.files import on_disk
from verifiable_relu.spec.balls import linf_properties
from verifiable_relu.spec.find import Instance, read_instances, write_instances
from verifiable_relu.spec.specfile import SpecFile, Variable, stem, write_vnnlib

if TYPE_CHECKING:
    from verifiable_relu.ir.network import Network

DECIMALS = 10
"""Decimals to which bounds of boxes are rounded outward: few readers take quotients such as 1/255."""

_FILE_NAME = re.compile(r"[\w-][\w.-]{0,199}")
_BATCH = 256
_MOST_IMAGES = 1_000_000
_LARGEST_EPS = Fraction(10**6)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status (``command_line.guarded``)."""
    options = parser().parse_args(arguments)
    return guarded("spec", lambda: _generate(options), options.debug)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = Parser(
        label="spec",
        prog="verifiable-relu spec",
        description="Write L∞ robustness properties of a classifier around images as VNN-LIB files, "
        "clipped to the valid range [0, 1], and list them in instances.csv.",
    )
    parser.add_argument("--net", type=Path, required=True, metavar="N.onnx", help="the classifier, an ONNX file")
    parser.add_argument(
        "--data",
        required=True,
        metavar="NAME|FILE.npz",
        help=f"{', '.join(DATASETS)}, or a file with the arrays images (in [0, 1]) and labels",
    )
    parser.add_argument(
        "--split", choices=("test", "train"), default="test", help="part of a named data set (default: test)"
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--images", type=indices, metavar="0-19,25", help="take the images with these indices")
    which.add_argument("--correct", type=_count, metavar="K", help="take the first K correctly classified images")
    parser.add_argument("--eps", type=radius, nargs="+", required=True, metavar="1/255", help="radii of the balls")
    parser.add_argument(
        "--timeout", type=seconds, default=60.0, metavar="S", help="time limit in seconds per instance (default: 60)"
    )
    parser.add_argument("--version", choices=("1.0", "2.0"), default="1.0", help="VNN-LIB version (default: 1.0)")
    parser.add_argument("--gzip", action="store_true", help="write .vnnlib.gz")
    parser.add_argument(
        "--name", help="name of the file for a single property (default: made of network, data set, image and radius)"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write to; made if missing")
    add_debug(parser)
    return parser


def indices(text: str) -> list[int]:
    """Return the numbers of images on a command line, such as ``0-19,25``; raises ``argparse.ArgumentTypeError``."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,9})(?:-([0-9]{1,9}))?\s*", part)
        first, last = (int(match.group(1)), int(match.group(2) or match.group(1))) if match else (1, 0)
        if not first <= last < first + _MOST_IMAGES:
            raise argparse.ArgumentTypeError(f"'{part}' is neither an index nor a range such as 0-19")
        found += range(first, last + 1)
    return list(dict.fromkeys(found))


def _count(text: str) -> int:
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a positive number of images")
    return int(text)


def radius(text: str) -> Fraction:
    """Return the exact radius on a command line, such as ``1/255``; raises ``argparse.ArgumentTypeError``."""
    try:
        value = fraction(text)
    except ValueError:
        value = Fraction(-1)
    if not 0 <= value <= _LARGEST_EPS:
        raise argparse.ArgumentTypeError(f"'{text}' is not a radius such as 1/255 or 0.01")
    return value


def _generate(options: argparse.Namespace) -> int:
    """Write the properties that the command's options describe; returns the exit status."""
    # Imported here, because the import loads torch, for which --help need not wait.
    from verifiable_relu.readers import read_onnx

    net = on_disk(options.net)
    network = read_onnx(net)
    data = load(options.data, "train" if options.data.endswith(".npz") else options.split)
    images, labels, exact = data.images, data.labels, data.exact
    if (pixels := math.prod(images.shape[1:])) != network.input_size:
        said = f"images of shape {images.shape[1:]} have {pixels} pixels, the network {network.input_size} inputs"
        raise InputError(said, path=options.data)
    chosen = options.images or _correct(network, images, labels, exact, options.correct, options.data)
    for index in chosen:
        if index >= len(images):
            raise InputError(f"image {index} does not exist: there are {len(images)}", path=options.data)
        if not exact[index]:
            raise InputError(f"image {index} differs from the official one: choose another", path=options.data)
        if labels[index] >= network.output_size:
            said = f"the label is {labels[index]}, but the network has {network.output_size} outputs"
            raise InputError(said, path=options.data, place=f"image {index}")
    if options.name is not None and not _FILE_NAME.fullmatch(options.name):
        raise InputError(f"'{options.name}' is not a file name of letters, digits, '_', '-' and '.'", place="--name")
    if options.name and len(chosen) * len(options.eps) != 1:
        raise InputError(f"--name names one property, but the options make {len(chosen) * len(options.eps)}")

    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"the folder cannot be made: {error.strerror}", path=options.out) from None
    data_name, written = stem(options.data), list[Instance]()
    inputs, outputs = Variable("X", (1, *network.source.input_shape)), Variable("Y", (1, *network.source.output_shape))
    relative = Path(os.path.relpath(net, options.out)).as_posix().removesuffix(".gz")
    for eps in options.eps:
        names = [options.name or f"{stem(net)}_{data_name}_{i}_eps{eps.numerator}_{eps.denominator}" for i in chosen]
        x, y = images[chosen], labels[chosen]
        balls = linf_properties(x, y, eps, network.output_size, names=names, decimals=DECIMALS)
        for index, prop in zip(chosen, balls, strict=True):
            path = options.out / f"{prop.name}.vnnlib{'.gz' if options.gzip else ''}"
            comments = (
                f"L-infinity robustness: {data_name} {options.split} image {index}, label {labels[index]}, eps {eps}",
                f"clipped to [0, 1]; bounds rounded outward to {DECIMALS} decimals",
                "sat: some image of the box has a class other than the label",
            )
            spec = SpecFile(path, options.version, (prop,), inputs, outputs, network=relative)
            write_vnnlib(spec, path, options.version, comments)
            written.append(Instance(options.out / relative, options.out / f"{prop.name}.vnnlib", options.timeout))
    # Rows of the same properties are replaced.
    path, ours = options.out / "instances.csv", {instance.vnnlib for instance in written}
    older = [row for row in read_instances(path) if row.vnnlib not in ours] if path.exists() else []
    write_instances(path, [*older, *written])
    print(f"{counted(len(written), 'property file')} written to {options.out}, listed in {path}")
    return 0


def _correct(
    network: Network, images: np.ndarray, labels: np.ndarray, exact: np.ndarray, count: int, source: str
) -> list[int]:
    """Return the indices of the first ``count`` official images that the network classifies correctly."""
    import torch

    found: list[int] = []
    for start in range(0, len(images), _BATCH):
        part = slice(start, start + _BATCH)
        x = torch.as_tensor(images[part], dtype=torch.float32).flatten(1)
        with torch.inference_mode():
            classes = network(x).argmax(1).numpy()
        found += (start + np.flatnonzero((classes == labels[part]) & exact[part])).tolist()
        if len(found) >= count:
            return found[:count]
    said = f"only {len(found)} of {counted(len(images), 'image')} classified correctly: ask for fewer with --correct"
    raise InputError(said, path=source)


if __name__ == "__main__":
    sys.exit(main())
