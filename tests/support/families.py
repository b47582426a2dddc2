"""Random small networks with ``Hardened`` activations, members of the sets that they stand for, and points of boxes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from verifiable_relu.bounds import Bounds
from verifiable_relu.network.build import Builder
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Activation, Gelu, Hardened, Relu


class Random:
    """A source of random tensors."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator, dtype=torch.float64)


def mlp(seed: int = 0, sizes: tuple[int, ...] = (5, 8, 8, 7, 3)) -> Network:
    rng, build = Random(seed), Builder(sizes[:1])
    x = 0
    for i, (width, out) in enumerate(pairwise(sizes)):
        x = build.linear(x, 1.5 * rng.normal(out, width) / width**0.5, rng.normal(out) / 4, f"fc{i}")
        x = build.activation(x, Relu, f"act{i}") if i < len(sizes) - 2 else x
    return build.network(x, name="mlp")


def cnn(seed: int = 0) -> Network:
    rng, build = Random(seed), Builder((2, 6, 5))
    x = build.scale(0, "normalise", center=rng.normal(2, 1, 1), scale=0.5 + rng.uniform(2, 1, 1))
    x = build.conv2d(x, rng.normal(3, 2, 3, 3) / 3, rng.normal(3) / 4, "conv1", padding=(1, 0, 0, 1))
    x = build.activation(x, Relu, "act1")
    x = build.conv2d(x, rng.normal(4, 3, 2, 2) / 3, rng.normal(4) / 4, "conv2", stride=(2, 1))
    x = build.activation(x, Relu, "act2")
    x = build.reshape(build.permute(x, (1, 2, 0), "permute"), (build.nodes[x].size,), "flatten")
    return build.network(build.linear(x, rng.normal(3, build.nodes[x].size) / 5, rng.normal(3), "fc"), name="cnn")


def residual(seed: int = 0) -> Network:
    rng, build = Random(seed), Builder((1, 4, 4))
    x = build.conv2d(0, rng.normal(3, 1, 3, 3) / 2, rng.normal(3) / 4, "stem", padding=(1, 1, 1, 1))
    x = build.activation(x, Relu, "act0")
    for i in (1, 2):
        y = build.conv2d(x, rng.normal(3, 3, 3, 3) / 4, rng.normal(3) / 4, f"conv{i}", padding=(1, 1, 1, 1))
        x = build.add(x, build.activation(y, Relu, f"act{i}"), f"add{i}")
    x = build.activation(build.scale(x, "norm", center=rng.normal(3, 1, 1), scale=rng.normal(3, 1, 1)), Relu, "act3")
    x = build.reshape(x, (build.nodes[x].size,), "flatten")
    return build.network(build.linear(x, rng.normal(3, build.nodes[x].size) / 5, rng.normal(3), "fc"), name="residual")


NETWORKS = {"mlp": mlp, "cnn": cnn, "residual": residual}


def member(family: Network, lams: Sequence[float | Tensor | None]) -> Network:
    """The member of a set of networks with these λ, one per layer; None stands for ReLU."""
    nodes = list(family.nodes)
    for index, lam in zip(family.activations, lams, strict=True):
        name, inputs, shape = nodes[index].name, nodes[index].inputs, nodes[index].shape
        act: Activation = Relu(name=name, inputs=inputs, shape=shape)
        if lam is not None:
            act = Gelu(name=name, inputs=inputs, shape=shape, lam=torch.as_tensor(lam, dtype=torch.float64))
        nodes[index] = act
    return replace(family, nodes=tuple(nodes), onnx=None)


def least(family: Network) -> list[float]:
    """The smallest λ of each layer of a set of networks."""
    nodes = (family.nodes[i] for i in family.activations)
    return [float(node.lam) for node in nodes if isinstance(node, Hardened)]


def smooth(family: Network, count: int = 4, seed: int = 3) -> list[Network]:
    """Smooth members of a set of networks.

    The members have λ' = λ in every layer; λ' = 10⁶·λ in every layer; λ' = λ in one layer and 10⁴·λ in the others, for
    each layer; and, in ``count`` networks, random λ' ≥ λ.
    """
    lams, rng = least(family), Random(seed)
    chosen = [lams, [1e6 * lam for lam in lams]]
    chosen += [[lam if i == j else 1e4 * lam for j, lam in enumerate(lams)] for i in range(len(lams))]
    for _ in range(count):
        chosen.append([lam * float(torch.exp(2 * rng.normal(1).abs())) for lam in lams])
    return [member(family, each) for each in chosen]


def members(family: Network) -> list[Network]:
    """Members of a set of networks: the ReLU network, then smooth ones, of which the last have ReLU in some layers."""
    lams = least(family)
    return [family.limit, *smooth(family), member(family, [None, *lams[1:]]), member(family, [*lams[:-1], None])]


def boxes(network: Network, batch: int = 6, seed: int = 1) -> Bounds:
    """Boxes from narrow ones, of radius 0.001, to wide ones, of radius 1; about a fifth of the inputs is fixed."""
    rng = Random(seed)
    center = rng.normal(batch, *network.input_shape)
    eps = torch.logspace(-3, 0, batch, dtype=torch.float64).reshape(-1, *[1] * len(network.input_shape))
    radius = eps * (rng.uniform(*center.shape) > 0.2)
    return Bounds(center - radius, center + radius)


def points(box: Bounds, count: int = 48, seed: int = 2) -> Tensor:
    """Points (count, batch, *shape) of boxes: the first inside, later ones on more and more faces, the last corners."""
    mix = Random(seed).uniform(count, *box.lower.shape)
    spread = torch.linspace(0.5, 50, count, dtype=torch.float64).reshape(-1, *[1] * box.lower.dim())
    mix = (0.5 + (mix - 0.5) * spread).clamp(0, 1)
    mix[-4:] = mix[-4:].round()
    return (box.lower + mix * (box.upper - box.lower)).clamp(box.lower, box.upper)


def climb(box: Bounds, value: Callable[[Tensor], Tensor], steps: int = 15, starts: int = 2, seed: int = 4) -> Tensor:
    """The points (points, batch, *shape) of a gradient ascent on ``value``, a function of tensors (batch, *shape)."""
    rng, seen, width = Random(seed), [], box.upper - box.lower
    for _ in range(starts):
        x = box.lower + rng.uniform(*box.lower.shape) * width
        for step in range(steps):
            x = x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(value(x).sum(), x)
            seen.append(x.detach())
            x = x.detach() + 0.4 * (1 - step / steps) * width * gradient.sign()
            x = torch.minimum(torch.maximum(x, box.lower), box.upper)
        seen.append(x.detach())
    return torch.stack(seen)
