"""Networks in which a part of the gates is linear: x/2, which is x·Φ(λx) at λ = 0.

Each function makes a network for a study's option ``model`` (``module:function``). Which neurons of a layer are linear
is settled before the training, where their weights are drawn alike and the last ones of each layer are a random choice,
or after its first epoch, by what the network has learned (``Choosing``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common.crown import bounded, unstable
from verifiable_relu.ir.linear import Convolution
from verifiable_relu.ir.network import Affine
from verifiable_relu.nn import substitute_relu
from verifiable_relu.nn.models import Make, Normalize, cnn, mlp
from verifiable_relu.readers import from_torch
from verifiable_relu.train.losses import ball

Image = tuple[int, int, int]
"""The channels, height and width of an image."""


class PartlyLinear(nn.Module):
    """An activation of the first neurons, or channels, of a layer, and x/2 of the last ones, the part ``share``."""

    def __init__(self, activation: nn.Module, share: float) -> None:
        super().__init__()
        self.activation, self.share = activation, share

    def forward(self, x: Tensor) -> Tensor:
        first = x.shape[1] - round(self.share * x.shape[1])
        return torch.cat([self.activation(x[:, :first]), x[:, first:] / 2], 1)


def partly(make: Make, share: float) -> Make:
    """Makes activations that are linear for a part of the neurons."""
    return lambda: PartlyLinear(make(), share)


def _network(
    shape: Image, classes: int, make: Make, normalize: Normalize | None, hidden: Sequence[int], channels: Sequence[int]
) -> nn.Module:
    """An MLP, or with channels a CNN."""
    if channels:
        return cnn(shape, channels, hidden, classes, make, normalize)
    return mlp([shape[0] * shape[1] * shape[2], *hidden, classes], make, normalize)


def _settled(share: float, hidden: Sequence[int], channels: Sequence[int] = ()) -> Callable[..., nn.Module]:
    def made(shape: Image, classes: int, make: Make, normalize: Normalize | None) -> nn.Module:
        return _network(shape, classes, partly(make, share), normalize, hidden, channels)

    return made


SIX, TWO, CNN = (6 * [100],), (2 * [128],), ([32], [4, 8])
"""The hidden layers of the networks, and the channels of the CNN."""

six_half, six_most = (_settled(share, *SIX) for share in (0.5, 0.75))
two_half, two_most = (_settled(share, *TWO) for share in (0.5, 0.75))
cnn_half, cnn_most = (_settled(share, *CNN) for share in (0.5, 0.75))


PROBED = 64
"""The number of samples by which neurons are chosen."""

STEEP = 10.0
"""How fast a neuron's λ changes with its parameter, as the inverse of a λ-gate's temperature."""


class Chosen(nn.Module):
    """An activation that some neurons, or channels, of a layer lose during the training, when they become linear.

    Until then, a λ-gate computes x·Φ(λgx), with the log of each neuron's g learned for ``hardness`` (``steepness``).
    Then ``order`` has the neurons, those that keep the activation first; lines are learned for ``grafting``.
    """

    def __init__(self, activation: nn.Module, neurons: int, by: str) -> None:
        super().__init__()
        self.activation = activation
        self.steepness = nn.Parameter(torch.zeros(neurons), requires_grad=by == "hardness")
        self.slope, self.offset = (nn.Parameter(torch.zeros(neurons), requires_grad=by == "grafting") for _ in range(2))
        self.order: Tensor | None = None
        self.back: Tensor | None = None
        self.kept = neurons

    def get_extra_state(self) -> dict[str, Tensor | int | None]:
        return {"order": self.order, "kept": self.kept}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        if state["order"] is not None:
            self.keep(state["order"], state["kept"])

    def keep(self, order: Tensor, kept: int) -> None:
        """Choose the neurons: the first ``kept`` of ``order`` keep the activation."""
        self.order, self.back, self.kept = order, order.argsort(), kept

    def forward(self, x: Tensor) -> Tensor:
        """Apply the activation, and the lines, to (batch, neurons, …)."""
        if self.order is None or self.back is None:
            g = _along(torch.exp(STEEP * self.steepness), x)
            y: Tensor = self.activation(x * g) / g
            return y
        first, others = self.order[: self.kept], self.order[self.kept :]
        rest = x.index_select(1, others)
        line = rest * _along(self.slope[others], x) + _along(self.offset[others], x)
        return torch.cat([self.activation(x.index_select(1, first)), line], 1).index_select(1, self.back)


def _along(vector: Tensor, x: Tensor) -> Tensor:
    """A vector (neurons,) in a shape that multiplies (batch, neurons, …)."""
    return vector.reshape(-1, *(1,) * (x.ndim - 2))


class Choosing(nn.Module):
    """A network that makes half of the neurons of each layer linear when its training has seen enough samples.

    Args:
        net: a network with activations ``Chosen``.
        by: ``hardness`` (those of the least learned λ), ``instability`` (those that CROWN's bounds leave unstable in
            most balls around samples), ``significance`` (those whose line x/2 changes the margin least, to first
            order), or ``grafting`` (of the least sum of the last two ranks, with learned lines, as in Chen et al.,
            Linearity Grafting, ICML 2022).
        samples: the number of samples after which they are chosen.
        eps: the radius of the balls.
    """

    def __init__(self, net: nn.Module, by: str, samples: int, eps: float) -> None:
        super().__init__()
        self.net, self.by, self.samples, self.eps, self.seen = net, by, samples, eps, 0

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        self.seen = state["seen"]

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            if self.seen < self.samples <= self.seen + len(x):
                self.choose(x[:PROBED])
            self.seen += len(x)
        y: Tensor = self.net(x)
        return y

    def choose(self, x: Tensor) -> None:
        """Choose the linear neurons of every layer by a batch of samples."""
        layers = [module for module in self.net.modules() if isinstance(module, Chosen)]
        significance, slopes, offsets = _significance(self.net, x, fitted=self.by == "grafting")
        match self.by:
            case "hardness":
                keep = [layer.steepness.detach() for layer in layers]
            case "instability":
                keep = [-share for share in _instability(self.net, x, self.eps)]
            case "significance":
                keep = significance
            case _:
                unstable = _instability(self.net, x, self.eps)
                keep = [_rank(s) - _rank(u) for s, u in zip(significance, unstable, strict=True)]
        for layer, worth, slope, offset in zip(layers, keep, slopes, offsets, strict=True):
            layer.keep(worth.argsort(descending=True, stable=True), len(worth) - len(worth) // 2)
            layer.slope.data.copy_(slope)
            layer.offset.data.copy_(offset)


def _rank(values: Tensor) -> Tensor:
    return values.argsort(stable=True).argsort()


def _instability(net: nn.Module, x: Tensor, eps: float) -> list[Tensor]:
    """The share of samples, and of a channel's places, whose ball leaves each neuron of each layer unstable."""
    network = from_torch(substitute_relu(deepcopy(net).eval()), tuple(x.shape[1:]))
    with torch.no_grad():
        found = unstable(bounded(network, ball(x.double(), eps)))
    shares = []
    for index, share in found.items():
        # A layer of a convolution has places for each channel.
        before = network.ops[network.ops[index].inputs[0]]
        image = isinstance(before, Affine) and isinstance(before.map, Convolution) and before.map.out_shape
        shares.append(share.double().reshape(len(x), image[0] if image else before.size, -1).mean((0, 2)))
    return shares


def _significance(net: nn.Module, x: Tensor, fitted: bool) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return how much each neuron's line changes the margin of the best class, to first order, on average over x.

    The line is x/2, or (``fitted``) that of least squares. Slopes and offsets follow; each has a vector for each layer.
    """
    net, values = deepcopy(net).eval(), []

    def keep(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        output.retain_grad()
        values.append((inputs[0].detach(), output))

    for module in net.modules():
        if isinstance(module, Chosen):
            module.register_forward_hook(keep)
    with torch.enable_grad():
        best = net(x).topk(2, 1).values
        (best[:, 0] - best[:, 1]).sum().backward()
    changes, slopes, offsets = [], [], []
    for z, a in values:
        assert a.grad is not None
        z, y, g = (t.detach().reshape(len(x), z.shape[1], -1) for t in (z, a, a.grad))
        slope, offset = torch.full_like(z[0, :, 0], 0.5), torch.zeros_like(z[0, :, 0])
        if fitted:
            mz, my = z.mean((0, 2)), y.mean((0, 2))
            slope = ((z - mz[:, None]) * (y - my[:, None])).mean((0, 2)) / z.var((0, 2), correction=0).clamp(min=1e-12)
            offset = my - slope * mz
        changes.append((g * (y - slope[:, None] * z - offset[:, None])).sum(2).abs().mean(0))
        slopes.append(slope)
        offsets.append(offset)
    return changes, slopes, offsets


def _choosing(
    by: str, samples: int, eps: float, hidden: Sequence[int], channels: Sequence[int] = ()
) -> Callable[..., nn.Module]:
    def made(shape: Image, classes: int, make: Make, normalize: Normalize | None) -> nn.Module:
        neurons = iter([*channels, *hidden])
        net = _network(shape, classes, lambda: Chosen(make(), next(neurons), by), normalize, hidden, channels)
        return Choosing(net, by, samples, eps)

    return made


CHOICES = ("hardness", "instability", "significance", "grafting")

FASHION, ADULT = 60_000, 32_561
"""The numbers of training samples: neurons are chosen within the second epoch."""

six_hard, six_stable, six_significant, six_grafted = (_choosing(by, FASHION, 0.02, *SIX) for by in CHOICES)
two_hard, two_stable, two_significant, two_grafted = (_choosing(by, ADULT, 0.06, *TWO) for by in CHOICES)
cnn_hard, cnn_stable, cnn_significant, cnn_grafted = (_choosing(by, FASHION, 0.03, *CNN) for by in CHOICES)
