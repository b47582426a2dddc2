"""Networks for sets of networks with λ-GELU, members of the sets that they stand for, and points of boxes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from tests.support.nets import Chain
from verifiable_relu.ir.families import least_lambdas
from verifiable_relu.ir.functions import Hardened, Smooth
from verifiable_relu.ir.functions.piecewise_linear import PiecewiseLinear
from verifiable_relu.ir.interval import Interval
from verifiable_relu.ir.network import Elementwise, Network
from verifiable_relu.readers.builder import Value


class Random:
    """A source of random tensors."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator, dtype=torch.float64)


def mlp(seed: int = 0, sizes: tuple[int, ...] = (5, 8, 8, 7, 3)) -> Network:
    rng, chain = Random(seed), Chain(sizes[0])
    for i, (width, out) in enumerate(pairwise(sizes)):
        chain.linear(1.5 * rng.normal(out, width) / width**0.5, rng.normal(out) / 4)
        if i < len(sizes) - 2:
            chain.act()
    return chain.network("mlp")


def cnn(seed: int = 0) -> Network:
    rng, chain = Random(seed), Chain(2, 6, 5)
    chain.scale(center=rng.normal(2, 1, 1), factor=0.5 + rng.uniform(2, 1, 1))
    chain.conv(rng.normal(3, 2, 3, 3) / 3, rng.normal(3) / 4, padding=(1, 0, 0, 1))
    chain.act()
    chain.conv(rng.normal(4, 3, 2, 2) / 3, rng.normal(4) / 4, stride=(2, 1))
    chain.act()
    chain.transpose(1, 2, 0)
    chain.reshape(chain.last.size)
    chain.linear(rng.normal(3, chain.last.size) / 5, rng.normal(3))
    return chain.network("cnn")


def residual(seed: int = 0) -> Network:
    rng, chain = Random(seed), Chain(1, 4, 4)
    chain.conv(rng.normal(3, 1, 3, 3) / 2, rng.normal(3) / 4, padding=(1, 1, 1, 1))
    x = chain.act()
    for _ in range(2):
        chain.conv(rng.normal(3, 3, 3, 3) / 4, rng.normal(3) / 4, x, padding=(1, 1, 1, 1))
        x = chain.add(x, chain.act())
    chain.scale(center=rng.normal(3, 1, 1), factor=rng.normal(3, 1, 1))
    chain.act()
    chain.reshape(chain.last.size)
    chain.linear(rng.normal(3, chain.last.size) / 5, rng.normal(3))
    return chain.network("residual")


NETWORKS: dict[str, Callable[..., Network]] = {"mlp": mlp, "cnn": cnn, "residual": residual}


def _normalised(chain: Chain, x: Value) -> Value:
    """Layer normalisation over the last axis, without weights."""
    width = x.shape[-1]
    mean = torch.full((width, width), 1 / width, dtype=torch.float64)
    centred = chain.linear(torch.eye(width, dtype=torch.float64) - mean, x=x)
    chain.linear(mean, x=chain.act("Square"))
    chain.scale(shift=torch.tensor(0.1, dtype=torch.float64))
    return chain.made(chain.build.product(centred, chain.act("InverseRoot")))


def _fed_forward(chain: Chain, x: Value, rng: Random) -> Value:
    """x + W₂·relu(W₁·norm(x) + b₁), the feed-forward block of a Transformer."""
    width = x.shape[-1]
    chain.linear(rng.normal(6, width) / 2, rng.normal(6) / 4, _normalised(chain, x))
    return chain.add(x, chain.linear(rng.normal(width, 6) / 3, rng.normal(width) / 4, chain.act()))


def _attended(chain: Chain, x: Value, rng: Random) -> Value:
    """x + softmax(Q·Kᵀ)·V."""
    tokens, width = x.shape
    q, k, v = (chain.linear(rng.normal(width, width) / 4, x=x) for _ in "qkv")
    scores = chain.act("Exp", x=chain.made(chain.build.matmul(q, chain.transpose(1, 0, x=k))))
    chain.linear(torch.ones(tokens, tokens, dtype=torch.float64), x=scores)
    weights = chain.made(chain.build.product(scores, chain.act("Reciprocal")))
    return chain.add(x, chain.made(chain.build.matmul(weights, v)))


def block(seed: int = 0) -> Network:
    """The feed-forward block of a Transformer."""
    chain = Chain(4)
    _fed_forward(chain, chain.input, Random(seed))
    return chain.network("block")


def transformer(seed: int = 0) -> Network:
    """A feed-forward block, attention and another feed-forward block over two tokens."""
    rng, chain = Random(seed), Chain(2, 3)
    x = _attended(chain, _fed_forward(chain, chain.input, rng), rng)
    _fed_forward(chain, x, rng)
    return chain.network("transformer")


def gated(seed: int = 0) -> Network:
    """exp(relu(w·x))·(v·x), of a single neuron each."""
    rng, chain = Random(seed), Chain(2)
    chain.linear(rng.normal(1, 2))
    chain.act()
    gate = chain.act("Exp")
    chain.made(chain.build.product(gate, chain.linear(3 * rng.normal(1, 2), x=chain.input)))
    return chain.network("gated")


COUPLED: dict[str, Callable[..., Network]] = {"block": block, "transformer": transformer, "gated": gated}
"""Networks with products, and functions of one variable, behind and before their activations."""


def member(family: Network, lams: Sequence[float | None]) -> Network:
    """The member of a set of networks with these λ, one per layer; None stands for ReLU."""
    left = iter(lams)
    ops = [
        replace(op, function=PiecewiseLinear() if (lam := next(left)) is None else Smooth("GELU", float(lam)))
        if isinstance(op, Elementwise) and isinstance(op.function, Hardened)
        else op
        for op in family.ops
    ]
    return replace(family, ops=tuple(ops), source=replace(family.source, onnx=None, run=None))


def smooth(family: Network, count: int = 4, seed: int = 3) -> list[Network]:
    """Smooth members of a set of networks.

    The members have λ' = λ in every layer; λ' = 10⁶·λ in every layer; λ' = λ in one layer and 10⁴·λ in the others, for
    each layer; and, in ``count`` networks, random λ' ≥ λ.
    """
    lams, rng = least_lambdas(family), Random(seed)
    chosen = [lams, [1e6 * lam for lam in lams]]
    chosen += [[lam if i == j else 1e4 * lam for j, lam in enumerate(lams)] for i in range(len(lams))]
    for _ in range(count):
        chosen.append([lam * float(torch.exp(2 * rng.normal(1).abs())) for lam in lams])
    return [member(family, each) for each in chosen]


def members(family: Network) -> list[Network]:
    """Members of a set of networks: the ReLU network, then smooth ones, of which the last have ReLU in some layers."""
    lams = least_lambdas(family)
    return [family.limit, *smooth(family), member(family, [None, *lams[1:]]), member(family, [*lams[:-1], None])]


def boxes(network: Network, batch: int = 6, seed: int = 1) -> Interval:
    """Boxes (batch, inputs) from narrow ones, of radius 0.001, to wide ones; about a fifth of the inputs is fixed."""
    rng = Random(seed)
    center = rng.normal(batch, network.input_size)
    eps = torch.logspace(-3, 0, batch, dtype=torch.float64).reshape(-1, 1)
    radius = eps * (rng.uniform(*center.shape) > 0.2)
    return Interval(center - radius, center + radius)


def points(box: Interval, count: int = 48, seed: int = 2) -> Tensor:
    """Points (count, batch, inputs) of boxes: the first inside, later ones on more and more faces, the last corners."""
    mix = Random(seed).uniform(count, *box.lower.shape)
    spread = torch.linspace(0.5, 50, count, dtype=torch.float64).reshape(-1, 1, 1)
    mix = (0.5 + (mix - 0.5) * spread).clamp(0, 1)
    mix[-4:] = mix[-4:].round()
    return (box.lower + mix * (box.upper - box.lower)).clamp(box.lower, box.upper)


def climb(box: Interval, value: Callable[[Tensor], Tensor], steps: int = 15, starts: int = 2, seed: int = 4) -> Tensor:
    """The points (points, batch, inputs) of a gradient ascent on ``value``, a function of tensors (batch, inputs)."""
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
