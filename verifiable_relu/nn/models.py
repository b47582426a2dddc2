"""Plain networks as ``nn.Sequential``, with the normalisation of the data as their first module."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from verifiable_relu.nn.activation import LambdaGELU


class Normalize(nn.Module):
    """(x − mean)/std per channel, so that a network takes inputs in [0, 1] and ε has the units of the data.

    Args:
        mean: one number for each channel of (batch, channels, …), or a single one for all of x.
        std: likewise; positive.

    Attributes:
        mean, std: float32 buffers, shaped () for one number and (channels, 1, 1) for several.

    Raises:
        ValueError: if ``std`` is not positive and finite, or ``mean`` not finite.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float] | float, std: Sequence[float] | float) -> None:
        super().__init__()
        for name, value in (("mean", mean), ("std", std)):
            number = torch.as_tensor(value, dtype=torch.float32)
            self.register_buffer(name, number.reshape(()) if number.numel() == 1 else number.reshape(-1, 1, 1))
        if not (self.mean.isfinite().all() and self.std.isfinite().all() and (self.std > 0).all()):
            raise ValueError(f"the mean must be finite and the std positive and finite, got {mean} and {std}")

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std


def mlp(
    sizes: Sequence[int],
    activation: Callable[[], nn.Module] = LambdaGELU,
    normalize: Normalize | None = None,
) -> nn.Sequential:
    """A fully connected network: inputs of any shape are flattened, then Linear, activation, …, Linear.

    Args:
        sizes: of the input, each hidden layer, and the output.
        activation: makes the module after each hidden layer.
        normalize: applied to the input first.
    """
    modules: list[nn.Module] = [] if normalize is None else [normalize]
    modules.append(nn.Flatten())
    for inputs, outputs in pairwise(sizes[:-1]):
        modules += [nn.Linear(inputs, outputs), activation()]
    modules.append(nn.Linear(sizes[-2], sizes[-1]))
    return nn.Sequential(*modules)


def cnn(
    input_shape: tuple[int, int, int],
    channels: Sequence[int],
    hidden: Sequence[int],
    classes: int,
    activation: Callable[[], nn.Module] = LambdaGELU,
    normalize: Normalize | None = None,
    kernel: int = 4,
    stride: int = 2,
    padding: int = 1,
) -> nn.Sequential:
    """Strided convolutions without pooling, then fully connected layers; an activation after each but the last.

    Args:
        input_shape: (channels, height, width) of a sample.
        channels: of each convolution's output.
        hidden: sizes of the fully connected layers before the output.
        classes: number of outputs.
        activation: makes the module after each hidden layer.
        normalize: applied to the input first.
        kernel, stride, padding: of every convolution; the defaults halve an even height and width.

    Raises:
        ValueError: if a convolution's input is smaller than its kernel.
    """
    modules: list[nn.Module] = [] if normalize is None else [normalize]
    inputs, *size = input_shape
    for outputs in channels:
        if min(size) + 2 * padding < kernel:
            raise ValueError(f"a {kernel}×{kernel} kernel does not fit the {'×'.join(map(str, size))} input of a layer")
        modules += [nn.Conv2d(inputs, outputs, kernel, stride, padding), activation()]
        inputs, size = outputs, [(n + 2 * padding - kernel) // stride + 1 for n in size]
    head = mlp([inputs * math.prod(size), *hidden, classes], activation)
    return nn.Sequential(*modules, *head)
