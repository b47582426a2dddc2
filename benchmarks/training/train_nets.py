"""Train the two networks of benchmarks/nets/, which exist for measurements of speed alone.

    python benchmarks/train_nets.py

Plain training, seed 0, one thread: an MNIST network of six hidden layers of 100, and a CIFAR-10 network with two
residual blocks. The weights are rounded to bfloat16, so that the files are small; figures are of the rounded networks.
Needs the data sets (see README.md).
"""

from __future__ import annotations

import gzip
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import track
from torch import nn

from verifiable_relu.data import load
from verifiable_relu.network import from_torch, write_onnx
from verifiable_relu.nn import Normalize, mlp, resnet

NETS = Path(__file__).parent / "nets"


def train(name: str, data: str, model: nn.Sequential, epochs: int) -> float:
    """Train, write ``nets/<name>.onnx.gz``; returns the accuracy over the test split."""
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
    NETS.mkdir(exist_ok=True)
    # Without a time stamp the same network gives the same bytes.
    (NETS / f"{name}.onnx.gz").write_bytes(gzip.compress(write_onnx(network), mtime=0))
    return float(right.float().mean())


def main() -> None:
    """Train both."""
    torch.set_num_threads(1)
    for name, data, epochs in (("mnist_6x100", "mnist", 4), ("cifar_residual", "cifar10", 5)):
        torch.manual_seed(0)
        normalize = Normalize(load(data, "test").mean, load(data, "test").std)
        if data == "mnist":
            model = mlp((784, *6 * (100,), 10), nn.ReLU, normalize)
        else:
            model = resnet((3, 32, 32), 10, nn.ReLU, normalize)
        print(f"{name}: {train(name, data, model, epochs):.2%} of the test images")


if __name__ == "__main__":
    main()
