"""Random small networks with ``Hardened`` activations, members of the sets that they stand for, and points of boxes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor
from verifiable_relu.network.build import Builder, as_network
from verifiable_relu.network.factors import bounded_factors
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Activation, Gelu, Hardened, Relu, Smooth

from verifiable_relu.bounds import Bounds


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


def _normalised(build: Builder, x: int, name: str) -> int:
    """Layer normalisation over the last axis, without weights."""
    width = build.shape(x)[-1]
    mean = torch.full((width, width), 1 / width, dtype=torch.float64)
    centred = build.linear(x, torch.eye(width, dtype=torch.float64) - mean, None, f"{name}/centred")
    variance = build.linear(function(build, centred, "Square", f"{name}/square"), mean, None, f"{name}/variance")
    shifted = build.scale(variance, f"{name}/shifted", shift=torch.tensor(0.1, dtype=torch.float64))
    return build.product(centred, function(build, shifted, "InverseRoot", f"{name}/inverse"), name)


def function(build: Builder, x: int, name: str, label: str) -> int:
    """A function of one variable, by its name."""
    one = torch.ones((), dtype=torch.float64)
    return build.append(Smooth(name=label, inputs=(x,), shape=build.shape(x), function=name, parameter=one))


def _fed_forward(build: Builder, x: int, rng: Random, name: str) -> int:
    """x + W₂·relu(W₁·norm(x) + b₁), the feed-forward block of a Transformer."""
    width = build.shape(x)[-1]
    y = build.linear(_normalised(build, x, f"{name}/norm"), rng.normal(6, width) / 2, rng.normal(6) / 4, f"{name}/in")
    y = build.activation(y, Relu, f"{name}/act")
    return build.add(x, build.linear(y, rng.normal(width, 6) / 3, rng.normal(width) / 4, f"{name}/out"), name)


def _attended(build: Builder, x: int, rng: Random, name: str) -> int:
    """x + softmax(Q·Kᵀ)·V."""
    tokens, width = build.shape(x)
    q, k, v = (build.linear(x, rng.normal(width, width) / 4, None, f"{name}/{part}") for part in "qkv")
    scores = function(build, build.matmul(q, build.permute(k, (1, 0), f"{name}/kt"), "scores"), "Exp", f"{name}/exp")
    sums = build.linear(scores, torch.ones(tokens, tokens, dtype=torch.float64), None, f"{name}/sums")
    weights = build.product(scores, function(build, sums, "Reciprocal", f"{name}/quotient"), f"{name}/weights")
    return build.add(x, build.matmul(weights, v, f"{name}/values"), name)


def _built(build: Builder, output: int, name: str) -> Network:
    return as_network(*bounded_factors(build.nodes, output), name=name)


def block(seed: int = 0) -> Network:
    """The feed-forward block of a Transformer."""
    rng, build = Random(seed), Builder((4,))
    return _built(build, _fed_forward(build, 0, rng, "block"), "block")


def transformer(seed: int = 0) -> Network:
    """A feed-forward block, attention and another feed-forward block over two tokens."""
    rng, build = Random(seed), Builder((2, 3))
    x = _fed_forward(build, 0, rng, "first")
    x = _fed_forward(build, _attended(build, x, rng, "attention"), rng, "second")
    return _built(build, x, "transformer")


def padded(seed: int = 0) -> Network:
    """Constants put beside what a layer computes, as a pad does it."""
    rng, build = Random(seed), Builder((3,))
    x = build.activation(build.linear(0, rng.normal(4, 3), rng.normal(4) / 4, "fc0"), Relu, "act0")
    places, weights = torch.tensor([[0], [1], [2], [3], [0], [0]]), torch.ones(6, 1, dtype=torch.float64)
    weights[4:] = 0
    constants = torch.tensor([0, 0, 0, 0, 2.0, -1.5], dtype=torch.float64)
    x = build.sparse(x, places, weights, constants, (6,), "pad")
    x = build.activation(build.linear(x, rng.normal(5, 6) / 2, rng.normal(5) / 4, "fc1"), Relu, "act1")
    return build.network(build.linear(x, rng.normal(2, 5), None, "fc2"), name="padded")


def gated(seed: int = 0) -> Network:
    """exp(relu(w·x))·(v·x), of a single neuron each."""
    rng, build = Random(seed), Builder((2,))
    x = build.activation(build.linear(0, rng.normal(1, 2), None, "gate"), Relu, "act")
    x = build.product(function(build, x, "Exp", "exp"), build.linear(0, 3 * rng.normal(1, 2), None, "value"), "product")
    return _built(build, x, "gated")


COUPLED = {"block": block, "transformer": transformer, "padded": padded, "gated": gated}
"""Networks with products, functions of one variable and constants behind and before their activations."""


def member(family: Network, lams: Sequence[float | Tensor | None]) -> Network:
    """The member of a set of networks with these λ, one per layer; None stands for ReLU."""
    nodes = list(family.nodes)
    places = [index for index in family.activations if isinstance(nodes[index], Hardened)]
    for index, lam in zip(places, lams, strict=True):
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
