"""Train the networks of benchmarks/nets/, which exist for measurements of speed alone.

    python -m benchmarks.training.train_nets
    python -m benchmarks.training.train_nets --out /tmp/nets --only mnist_6x100

The networks are an MNIST network of six hidden layers of 100, and a CIFAR-10 network with two residual blocks, both
trained plainly with seed 0 and one thread. The weights are rounded to bfloat16, so that the files are small; the
reported figures are those of the rounded networks. The files in the folder are replaced. The script needs the data sets
(see README.md).
"""

from __future__ import annotations

import argparse
import gzip
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.common.machine import command
from benchmarks.common.study import ROOT, guarded
from verifiable_relu.arguments import Parser

if TYPE_CHECKING:
    from torch import nn

NETS = ROOT / "benchmarks" / "nets"
EPOCHS = {"mnist_6x100": ("mnist", 4), "cifar_residual": ("cifar10", 5)}
"""For each network its data set and how long it is trained."""

_MODULE = "benchmarks.training.train_nets"


def build(data: str) -> nn.Sequential:
    """The untrained network for a data set, with the weights of seed 0."""
    import torch
    from torch import nn

    from verifiable_relu.data import load
    from verifiable_relu.nn import Normalize, fixed, mlp

    torch.manual_seed(0)
    test = load(data, "test")
    normalize = Normalize(test.mean, test.std)
    if data == "mnist":
        return mlp((784, *6 * (100,), 10), nn.ReLU, normalize)
    return fixed("resnet", (3, 32, 32), 10, nn.ReLU, normalize)


def train(name: str, data: str, model: nn.Sequential, epochs: int, out: Path) -> float:
    """Train a network and write ``<name>.onnx.gz`` into ``out``; returns the accuracy on the test split."""
    import torch
    import torch.nn.functional as F
    from rich.progress import track

    from verifiable_relu.data import load
    from verifiable_relu.network import from_torch, write_onnx

    train_split, test = load(data, "train"), load(data, "test")
    images, labels = torch.from_numpy(train_split.images), torch.from_numpy(train_split.labels)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3, weight_decay=1e-4)
    steps = [order for _ in range(epochs) for order in torch.randperm(len(images)).split(256)]
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, len(steps))
    for order in track(steps, name):
        optimizer.zero_grad()
        F.cross_entropy(model(images[order]), labels[order]).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
        right = model(torch.from_numpy(test.images)).argmax(1) == torch.from_numpy(test.labels)
    network = from_torch(model, tuple(images.shape[1:]))
    out.mkdir(parents=True, exist_ok=True)
    # Without a time stamp the same network gives the same bytes.
    (out / f"{name}.onnx.gz").write_bytes(gzip.compress(write_onnx(network), mtime=0))
    return float(right.float().mean())


def parser() -> argparse.ArgumentParser:
    """The command line."""
    formatter = argparse.RawDescriptionHelpFormatter
    made = Parser(prog=f"python -m {_MODULE}", description=__doc__, formatter_class=formatter, allow_abbrev=False)
    made.add_argument("--only", choices=EPOCHS, nargs="+", default=list(EPOCHS), help="(default both)")
    made.add_argument("--out", type=Path, default=NETS, help="folder of the networks (benchmarks/nets)")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Train; 0 when done, 2 for bad input, 130 after Ctrl-C."""
    asked = parser().parse_args(arguments)

    def work() -> None:
        import torch

        torch.set_num_threads(1)
        for name in asked.only:
            data, epochs = EPOCHS[name]
            print(f"{name}: {train(name, data, build(data), epochs, asked.out):.2%} of the test images")

    return guarded(work, command(_MODULE, None if arguments is None else list(arguments)))


if __name__ == "__main__":
    sys.exit(main())
