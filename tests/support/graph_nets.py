"""Small networks for soundness tests: random ones of every architecture, and some with a hidden counterexample."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import (
    Activation,
    Add,
    Conv2d,
    Extreme,
    Gelu,
    Identity,
    Input,
    LeakyRelu,
    Linear,
    MatMul,
    Maximum,
    Node,
    Permute,
    Product,
    Relu,
    Reshape,
    Scale,
    Shape,
    Sigmoid,
    Smooth,
    Sparse,
    Tanh,
)

Weights = Callable[[Shape, int], Tensor]
"""A function that draws a float32 tensor of a shape, for a given fan-in."""


class Chain:
    """A network under construction, whose methods append a node and return its index."""

    def __init__(self, shape: Shape) -> None:
        self.nodes: list[Node] = [Input(name="x", inputs=(), shape=shape)]

    @property
    def last(self) -> int:
        return len(self.nodes) - 1

    def add(self, kind: type[Node], shape: Shape, *inputs: int, **fields: object) -> int:
        sources = inputs or (self.last,)
        self.nodes.append(kind(name=f"n{len(self.nodes)}", inputs=sources, shape=shape, **fields))
        return self.last

    def linear(self, weight: Tensor, bias: Tensor, *inputs: int) -> int:
        return self.add(
            Linear,
            (*self.nodes[(inputs or (self.last,))[0]].shape[:-1], len(bias)),
            *inputs,
            weight=weight.float(),
            bias=bias.float(),
        )

    def network(self, name: str) -> Network:
        return Network(tuple(self.nodes), name=name)


def gaussian(rng: np.random.Generator) -> Weights:
    """Normal weights, scaled such that a layer's outputs are as large as its inputs."""
    return lambda shape, fan: torch.from_numpy(rng.normal(size=shape) * 1.4 / fan**0.5).float()


def eighths(rng: np.random.Generator) -> Weights:
    """Dyadic weights k/8, |k| ≤ 12: everything computed from dyadic points stays exact in float64."""
    return lambda shape, fan: torch.from_numpy(rng.integers(-12, 13, size=shape) / 8).float()


def uneven(rng: np.random.Generator, spread: int = 10, positive: bool = False) -> Weights:
    """Full 24-bit mantissas at magnitudes from 2^-spread to 2^spread, so that sums round at every step."""

    def draw(shape: Shape, fan: int) -> Tensor:
        value = rng.uniform(1, 2, size=shape) * 2.0 ** rng.integers(-spread, spread + 1, size=shape)
        return torch.from_numpy(value if positive else value * rng.choice([-1, 1], size=shape)).float()

    return draw


BOUNDED = (
    "SiLU",
    "Mish",
    "tanh-GELU",
    "ELU",
    "Softplus",
    "Softsign",
    "HardSwish",
    "Erf",
    "Atan",
    "Asinh",
    "Sin",
    "Cos",
)
"""Functions whose slope is bounded; the others have one that is near 1 about 1."""


def activation(chain: Chain, kind: type[Activation], rng: np.random.Generator) -> int:
    """Append an activation with random parameters."""
    extra: dict[str, object] = {}
    if kind is Smooth:
        extra["function"] = str(rng.choice([*BOUNDED, "Square", "Cube"]))
        extra["parameter"] = torch.tensor(1.5 if extra["function"] == "ELU" else 1.0)
    if kind is LeakyRelu:
        extra["slope"] = torch.tensor(float(rng.choice([0.125, 0.01, 0.3])))
    if kind is Gelu:
        extra["lam"] = torch.tensor(float(rng.choice([1.0, 3.0, 160.0])))
    return chain.add(kind, chain.nodes[-1].shape, **extra)


def mlp(
    rng: np.random.Generator, draw: Weights, kind: type[Activation] = Relu, widths: Sequence[int] = (3, 6, 5, 3)
) -> Network:
    """Linear layers and activations."""
    chain = Chain((widths[0],))
    for i, (fan, out) in enumerate(itertools.pairwise(widths)):
        if i:
            activation(chain, kind, rng)
        chain.linear(draw((out, fan), fan), draw((out,), 4))
    return chain.network(f"mlp-{kind.op}")


def normalised(rng: np.random.Generator, draw: Weights, kind: type[Activation] = Relu) -> Network:
    """A normalisation in front and another one, as of a folded batch norm, between the layers."""
    chain = Chain((3,))
    chain.add(Scale, (3,), center=draw((3,), 4), scale=draw((3,), 1), shift=torch.zeros(3))
    chain.linear(draw((5, 3), 3), draw((5,), 4))
    chain.add(Scale, (5,), center=draw((5,), 4), scale=draw((5,), 1), shift=draw((5,), 4))
    activation(chain, kind, rng)
    chain.linear(draw((4, 5), 5), draw((4,), 4))
    activation(chain, kind, rng)
    chain.linear(draw((2, 4), 4), draw((2,), 4))
    return chain.network(f"normalised-{kind.op}")


def cnn(rng: np.random.Generator, draw: Weights, kind: type[Activation] = Relu) -> Network:
    """Grouped, strided, unevenly padded and dilated convolutions, an axis permutation, a flattening."""
    chain = Chain((2, 3, 3))
    chain.add(
        Conv2d,
        (2, 3, 2),
        weight=draw((2, 1, 2, 2), 8),
        bias=draw((2,), 4),
        stride=(1, 2),
        padding=(0, 1, 1, 0),
        groups=2,
    )
    activation(chain, kind, rng)
    chain.add(Conv2d, (2, 1, 2), weight=draw((2, 2, 2, 1), 4), bias=draw((2,), 4), dilation=(2, 1))
    chain.add(Permute, (1, 2, 2), axes=(1, 2, 0))
    activation(chain, kind, rng)
    chain.add(Reshape, (4,))
    chain.linear(draw((3, 4), 4), draw((3,), 4))
    return chain.network(f"cnn-{kind.op}")


def image(rng: np.random.Generator, draw: Weights, kind: type[Activation] = Relu) -> Network:
    """Plain convolutions with and without strides, one within a block x + f(x).

    Bound propagation takes coefficients of such a network in float32 and in windows.
    """
    chain = Chain((1, 4, 3))
    chain.add(Conv2d, (2, 4, 3), weight=draw((2, 1, 2, 2), 4), bias=draw((2,), 4), padding=(1, 0, 0, 1))
    before = activation(chain, kind, rng)
    inner = chain.add(Conv2d, (2, 4, 3), weight=draw((2, 2, 3, 1), 6), bias=draw((2,), 4), padding=(1, 0, 1, 0))
    chain.add(Add, (2, 4, 3), inner, before)
    activation(chain, kind, rng)
    chain.add(Conv2d, (2, 2, 1), weight=draw((2, 2, 2, 2), 8), bias=draw((2,), 4), stride=(2, 2))
    activation(chain, kind, rng)
    chain.add(Reshape, (4,))
    chain.linear(draw((2, 4), 4), draw((2,), 4))
    return chain.network(f"image-{kind.op}")


def windows(rng: np.random.Generator, draw: Weights) -> Network:
    """Two convolutions one after the other: a neuron of the second depends on a window of the first, which it moves."""
    chain = Chain((1, 4, 4))
    chain.add(Conv2d, (2, 3, 3), weight=draw((2, 1, 2, 2), 4), bias=draw((2,), 4))
    activation(chain, Relu, rng)
    chain.add(Conv2d, (3, 2, 2), weight=draw((3, 2, 2, 2), 8), bias=draw((3,), 4))
    activation(chain, Relu, rng)
    chain.add(Reshape, (12,))
    chain.linear(draw((2, 12), 12), draw((2,), 4))
    return chain.network("windows")


def opposed(rng: np.random.Generator, draw: Weights, images: bool, relu: bool) -> Network:
    """Pairs of nearly equal neurons whose values the next layer subtracts, so that large numbers cancel."""

    def nearly(weight: Tensor) -> Tensor:
        return weight * (1 + torch.from_numpy(rng.uniform(size=weight.shape)) * 2.0**-20)

    def paired(shape: Shape, fan: int) -> Tensor:
        return nearly(draw((shape[0] // 2, *shape[1:]), fan).repeat_interleave(2, 0)).float()

    def cancelling(shape: Shape, fan: int) -> Tensor:
        value = draw((shape[0], shape[1] // 2, *shape[2:]), fan).repeat_interleave(2, 1)
        value[:, 1::2] *= -1
        return nearly(value).float()

    nothing = torch.zeros(4)
    chain = Chain((1, 3, 2) if images else (3,))
    if images:
        chain.add(Conv2d, (4, 2, 2), weight=paired((4, 1, 2, 1), 2), bias=nothing)
        chain.add(Conv2d, (4, 2, 1), weight=cancelling((4, 4, 1, 2), 4), bias=nothing)
    else:
        chain.linear(paired((4, 3), 3), nothing)
        chain.linear(cancelling((4, 4), 4), nothing)
    if relu:
        activation(chain, Relu, rng)
    if images:
        chain.add(Reshape, (8,))
    chain.linear(draw((2, chain.nodes[-1].size), 8), torch.zeros(2))
    return chain.network(f"opposed-{'image' if images else 'mlp'}{'-Relu' * relu}")


def residual(rng: np.random.Generator, draw: Weights, kind: type[Activation] = Relu) -> Network:
    """Two blocks x + f(x), the first around a wide affine node, the second around an activation."""
    chain = Chain((4,))
    stem = chain.linear(draw((4, 4), 4), draw((4,), 4))
    activation(chain, kind, rng)
    inner = chain.linear(draw((4, 4), 4), draw((4,), 4))
    chain.add(Add, (4,), stem, inner)
    first = activation(chain, kind, rng)
    branch = chain.linear(draw((4, 4), 4), draw((4,), 4))
    chain.add(Add, (4,), first, branch)
    chain.linear(draw((2, 4), 4), draw((2,), 4))
    return chain.network(f"residual-{kind.op}")


def pooled(rng: np.random.Generator, draw: Weights) -> Network:
    """Maxima as x + relu(y − x), numbers selected, repeated and left out, sums of few terms, and absolute values."""
    chain = Chain((1, 3, 3))
    index = torch.from_numpy(rng.integers(0, 9, size=(4, 2)))
    chain.add(Sparse, (2, 2), index=index, weight=torch.tensor([[1.0, -1.0]]).repeat(4, 1), bias=draw((4,), 4))
    ahead = chain.add(Relu, (2, 2))
    behind = chain.add(Sparse, (2, 2), 0, index=index[:, 1:], weight=torch.ones(4, 1), bias=torch.zeros(4))
    chain.add(Add, (2, 2), ahead, behind)
    weight = draw((5, 3), 3) * torch.from_numpy(rng.integers(0, 2, size=(5, 3)))
    chain.add(Sparse, (5,), index=torch.from_numpy(rng.integers(0, 4, size=(5, 3))), weight=weight, bias=draw((5,), 4))
    chain.add(LeakyRelu, (5,), slope=torch.tensor(-1.0))
    chain.linear(draw((2, 5), 5), draw((2,), 4))
    return chain.network("pooled")


def maxima(rng: np.random.Generator, draw: Weights) -> Network:
    """Maxima of pairs of affine functions, which overlap, and of pairs of these behind ReLUs."""
    chain = Chain((4,))
    chain.linear(draw((6, 4), 4), draw((6,), 4))
    for size in (6, 5):
        before, index = len(chain.nodes) - 1, torch.from_numpy(rng.integers(0, size, size=(5, 2)))
        chain.add(Sparse, (5,), index=index, weight=torch.tensor([[1.0, -1.0]]).repeat(5, 1), bias=torch.zeros(5))
        ahead = chain.add(Relu, (5,))
        behind = chain.add(Sparse, (5,), before, index=index[:, 1:], weight=torch.ones(5, 1), bias=torch.zeros(5))
        chain.add(Maximum, (5,), before, chain.add(Add, (5,), ahead, behind), candidates=index.T)
        chain.linear(draw((5, 5), 5), draw((5,), 4))
        chain.add(Relu, (5,))
    chain.linear(draw((2, 5), 5), draw((2,), 4))
    return chain.network("maxima")


def extremes(rng: np.random.Generator, draw: Weights) -> Network:
    """Maxima and minima of two computed vectors, as the reader makes them, and of these again."""
    chain = Chain((4,))
    one = {"center": torch.zeros(()), "shift": torch.zeros(()), "scale": -torch.ones(())}
    for size, sign in ((6, 1), (4, -1), (4, 1)):
        before = chain.linear(draw((size, chain.nodes[-1].size), 4), draw((size,), 4))
        half = torch.arange(size)[:, None].split(size // 2)
        ones, zeros = torch.ones(size // 2, 1), torch.zeros(size // 2)
        x, y = (chain.add(Sparse, (size // 2,), before, index=i, weight=ones, bias=zeros) for i in half)
        ahead, behind = (y, x) if sign > 0 else (x, y)
        minus = chain.add(Scale, (size // 2,), behind, **one)
        gained = chain.add(Relu, (size // 2,), chain.add(Add, (size // 2,), ahead, minus))
        if sign < 0:
            gained = chain.add(Scale, (size // 2,), gained, **one)
        chain.add(Extreme, (size // 2,), x, y, chain.add(Add, (size // 2,), x, gained), sign=sign)
    chain.linear(draw((2, 2), 2), draw((2,), 2))
    return chain.network("extremes")


def pieces(rng: np.random.Generator, draw: Weights) -> list[Network]:
    """One piecewise-linear network of each architecture."""
    return [
        mlp(rng, draw),
        mlp(rng, draw, LeakyRelu),
        normalised(rng, draw),
        cnn(rng, draw),
        cnn(rng, draw, LeakyRelu),
        residual(rng, draw),
        pooled(rng, draw),
    ]


def products(rng: np.random.Generator, draw: Weights) -> Network:
    """Products of inputs, of affine maps and of activations, of numbers and of matrices, and quotients."""
    chain = Chain((4,))
    swapped = chain.add(Permute, (2, 2), chain.add(Reshape, (2, 2), 0), axes=(1, 0))
    inputs = chain.add(Reshape, (4,), chain.add(Product, (2, 2), swapped, chain.add(Reshape, (2, 2), 0)))
    parts = []
    for source, shape in ((0, (2, 3)), (inputs, (3, 2))):
        chain.linear(draw((6, 4), 4), draw((6,), 4), source)
        parts.append(chain.add(Reshape, shape, chain.add(Identity, (6,))))
    scores = chain.add(Reshape, (4,), chain.add(MatMul, (2, 2), *parts, inner=3))
    chain.add(Identity, (4,), scores)
    # Sigmoids beside each other, divided by one and their sum.
    gates = chain.add(Sigmoid, (4,))
    chain.linear(torch.ones(4, 4), torch.ones(4), gates)
    shares = chain.add(Smooth, (4,), function="Reciprocal", parameter=torch.ones(()))
    chain.add(Add, (4,), chain.add(Product, (4,), gates, shares), scores)
    chain.linear(draw((2, 4), 4), draw((2,), 4))
    return chain.network("products")


def smooth(rng: np.random.Generator, draw: Weights) -> list[Network]:
    """Networks with smooth activations."""
    return [
        mlp(rng, draw, Sigmoid),
        mlp(rng, draw, Tanh),
        mlp(rng, draw, Gelu),
        cnn(rng, draw, Sigmoid),
        residual(rng, draw, Gelu),
        normalised(rng, draw, Tanh),
        mlp(rng, draw, Smooth),
        cnn(rng, draw, Smooth),
        products(rng, draw),
    ]


def needle(
    rng: np.random.Generator,
    point: np.ndarray,
    radius: float,
    height: float,
    *,
    decoys: int = 0,
    front: str = "plain",
) -> Network:
    """A network whose one output is 1 − hills(x) − height·max(0, 1 − ‖x − point‖₁ / radius), the point being hidden.

    The hills are 0 at the point and grow away from it, so that descent leads away from the needle; they stay below
    decoys·n/64. All weights are dyadic, hence the output at the (dyadic) point is exactly 1 − height.

    Args:
        rng: shuffles and rescales the neurons, so that the structure is not visible in the weights.
        point: (n,) dyadic.
        radius: a power of two; the needle occupies (2·radius)^n / n! of the volume.
        height: dyadic.
        decoys: number of hills, each 0 on one side of a hyperplane through the point.
        front: ``plain``, ``scale`` (a shift of the input in front), ``conv`` (the input as an image, through a
            convolution that permutes and scales), ``residual`` (a skip connection around a zero-valued block).
    """
    n = len(point)
    chain, order = Chain((n,)), np.arange(n)
    if front == "conv":
        chain = Chain((n, 1, 1))
        order = rng.permutation(n)
        kernel = np.zeros((n, n, 3, 3))
        kernel[np.arange(n), order, 1, 1] = 2.0
        chain.add(Conv2d, (n, 1, 1), weight=torch.tensor(kernel).float(), bias=torch.zeros(n), padding=(1, 1, 1, 1))
        chain.add(Scale, (n, 1, 1), center=torch.zeros(()), scale=torch.tensor(0.5), shift=torch.zeros(()))
        chain.add(Reshape, (n,))
    elif front == "scale":
        chain.add(
            Scale, (n,), center=torch.tensor(point).float(), scale=torch.ones(n), shift=torch.tensor(point).float()
        )
    elif front == "residual":
        block = chain.linear(torch.eye(n), torch.zeros(n))
        chain.add(Relu, (n,), block)
        negative = chain.linear(-torch.eye(n), torch.zeros(n), 0)
        negative = chain.add(Relu, (n,), negative)
        flipped = chain.linear(-torch.eye(n), torch.zeros(n), negative)
        chain.add(Add, (n,), block + 1, flipped)
    where = point[order]
    # |x − p| = relu(x − p) + relu(p − x), the pieces scaled by powers of two and undone by the next layer.
    scale = 2.0 ** rng.integers(-2, 3, size=2 * n)
    first = np.concatenate([np.eye(n), -np.eye(n)]) * scale[:, None]
    offset = np.concatenate([-where, where]) * scale
    hills = rng.integers(-4, 5, size=(decoys, n)) / 8
    weight, bias = np.concatenate([first, hills]), np.concatenate([offset, -(hills @ where)])
    mix = np.zeros((1 + decoys, 2 * n + decoys))
    mix[0, : 2 * n] = -1 / (radius * scale)
    mix[1:, 2 * n :] = np.eye(decoys)
    second = np.concatenate([[1.0], np.zeros(decoys)])
    out = np.concatenate([[-height], -np.full(decoys, 1 / 64)])
    shuffle, again = rng.permutation(len(bias)), rng.permutation(1 + decoys)
    chain.linear(torch.tensor(weight[shuffle]), torch.tensor(bias[shuffle]))
    chain.add(Relu, (len(bias),))
    chain.linear(torch.tensor(mix[again][:, shuffle]), torch.tensor(second[again]))
    chain.add(Relu, (1 + decoys,))
    chain.linear(torch.tensor(out[again][None]), torch.tensor([1.0]))
    return chain.network(f"needle-{front}")


def dyadic(rng: np.random.Generator, n: int, bits: int) -> np.ndarray:
    """A random point of [-1, 1]^n with coordinates k/2^bits."""
    return rng.integers(-(2**bits), 2**bits + 1, size=n) / 2**bits


def as_fractions(x: np.ndarray) -> tuple[Fraction, ...]:
    """The exact values of a float array."""
    return tuple(Fraction(float(v)) for v in np.asarray(x).reshape(-1))
