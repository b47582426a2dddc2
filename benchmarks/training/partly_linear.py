"""Networks in which a part of the gates is linear: x/2, which is x·Φ(λx) at λ = 0.

Each function makes a network for a study's option ``model`` (``module:function``). Which neurons of a layer are linear
is settled before the training: their weights are drawn alike, so that the last ones of each layer are a random choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from verifiable_relu.nn.models import Make, Normalize, cnn, mlp

Image = tuple[int, int, int]
"""The channels, height and width of an image."""


class PartlyLinear(nn.Module):
    """An activation of the first neurons, or channels, of a layer, and x/2 of the last ones.

    Args:
        activation: of the first ones.
        share: the part of the neurons that are linear, in (0, 1).
    """

    def __init__(self, activation: nn.Module, share: float) -> None:
        super().__init__()
        self.activation, self.share = activation, share

    def forward(self, x: Tensor) -> Tensor:
        """Apply both to (batch, neurons, …)."""
        first = x.shape[1] - round(self.share * x.shape[1])
        return torch.cat([self.activation(x[:, :first]), x[:, first:] / 2], 1)


def partly(make: Make, share: float) -> Make:
    """Makes activations that are linear for a part of the neurons."""
    return lambda: PartlyLinear(make(), share)


def _mlp(hidden: Sequence[int], share: float) -> Callable[[Image, int, Make, Normalize | None], nn.Module]:
    def made(shape: Image, classes: int, make: Make, normalize: Normalize | None) -> nn.Module:
        return mlp([shape[0] * shape[1] * shape[2], *hidden, classes], partly(make, share), normalize)

    return made


def _cnn(channels: Sequence[int], hidden: Sequence[int], share: float) -> Callable[..., nn.Module]:
    def made(shape: Image, classes: int, make: Make, normalize: Normalize | None) -> nn.Module:
        return cnn(shape, channels, hidden, classes, partly(make, share), normalize)

    return made


six_half, six_most = _mlp(6 * [100], 0.5), _mlp(6 * [100], 0.75)
two_half, two_most = _mlp(2 * [128], 0.5), _mlp(2 * [128], 0.75)
cnn_half, cnn_most = _cnn([4, 8], [32], 0.5), _cnn([4, 8], [32], 0.75)
