"""Small networks of every architecture, drawn or built op by op, and some with a hidden counterexample."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from verifiable_relu.ir.functions import Function, function
from verifiable_relu.ir.functions.piecewise_linear import PiecewiseLinear
from verifiable_relu.ir.linear import Dense
from verifiable_relu.ir.network import Affine, Elementwise, Network, Op, Source, live
from verifiable_relu.readers.builder import OpBuilder, Value

Draw = Callable[[Sequence[int], int], Tensor]
"""A function that draws a tensor of a shape, for a given fan-in."""
Weights = Draw


class Chain:
    """A network under construction. Methods add ops that read the last value, or another one, and return the new one.

    Attributes:
        last: the value that was made last.
    """

    def __init__(self, *shape: int) -> None:
        self.build = OpBuilder(shape, "x")
        self.input = self.last = Value(0, shape)

    def made(self, value: Value) -> Value:
        """Take a value of the builder's for the last one, and name the next op."""
        self.last, self.build.name = value, f"n{len(self.build.ops)}"
        return value

    def linear(self, weight: Tensor, bias: Tensor | None = None, x: Value | None = None) -> Value:
        return self.made(self.build.dense(x or self.last, weight, bias))

    def conv(self, weight: Tensor, bias: Tensor | None = None, x: Value | None = None, **window: object) -> Value:
        return self.made(self.build.convolution(x or self.last, weight, bias, **window))  # type: ignore[arg-type]

    def act(self, kind: str | Function = "Relu", parameter: float = 1.0, x: Value | None = None) -> Value:
        """Apply a function, by its kind or itself."""
        of = function(kind, parameter) if isinstance(kind, str) else kind
        return self.made(self.build.apply(x or self.last, of))

    def scale(self, x: Value | None = None, **numbers: Tensor | float) -> Value:
        return self.made(self.build.scale(x or self.last, **numbers))  # type: ignore[arg-type]

    def add(self, *xs: Value) -> Value:
        return self.made(self.build.sum(*xs))

    def reshape(self, *shape: int, x: Value | None = None) -> Value:
        return self.made((x or self.last).reshaped(shape))

    def transpose(self, *axes: int, x: Value | None = None) -> Value:
        return self.made(self.build.transposed(x or self.last, axes))

    def chosen(self, numbers: Sequence[int] | np.ndarray, x: Value | None = None) -> Value:
        """Take some elements by their numbers."""
        return self.made(self.build.moved(x or self.last, np.asarray(numbers)))

    def network(self, name: str = "network") -> Network:
        ops, _ = live(self.build.ops, self.build.in_place(self.last))
        return Network(ops, Source(self.input.shape, self.last.shape), name)


def network(ops: Sequence[Op], name: str = "network") -> Network:
    """The network of ops on vectors."""
    return Network(tuple(ops), Source((ops[0].size,), (ops[-1].size,)), name)


# Weights


def gaussian(rng: np.random.Generator) -> Draw:
    """Normal weights, scaled such that a layer's outputs are as large as its inputs."""
    return lambda shape, fan: torch.from_numpy(rng.normal(size=tuple(shape)) * 1.4 / fan**0.5).float()


def eighths(rng: np.random.Generator) -> Draw:
    """Dyadic weights k/8, |k| ≤ 12: everything computed from dyadic points stays exact in float64."""
    return lambda shape, fan: torch.from_numpy(rng.integers(-12, 13, size=tuple(shape)) / 8).float()


def uneven(rng: np.random.Generator, spread: int = 10, positive: bool = False) -> Draw:
    """Full 24-bit mantissas at magnitudes from 2^-spread to 2^spread, so that sums round at every step."""

    def draw(shape: Sequence[int], fan: int) -> Tensor:
        size = tuple(shape)
        value = rng.uniform(1, 2, size=size) * 2.0 ** rng.integers(-spread, spread + 1, size=size)
        return torch.from_numpy(value if positive else value * rng.choice([-1, 1], size=size)).float()

    return draw


# Architectures

BOUNDED = (
    "SiLU", "Mish", "tanh-GELU", "ELU", "Softplus", "Softsign", "HardSwish", "Erf", "Atan", "Asinh", "Sin", "Cos",
)  # fmt: skip
"""Functions whose slope is bounded; the others have one that is near 1 about 1."""

SMOOTH = ("Sigmoid", "Tanh", "GELU", "any")
"""Kinds of smooth activations that ``drawn_function`` knows."""


def drawn_function(kind: str, size: int, rng: np.random.Generator) -> Function:
    """A function of a kind with random parameters: "any" is any smooth one, "PRelu" has a slope for each neuron."""
    match kind:
        case "LeakyRelu":
            return PiecewiseLinear(torch.tensor(float(rng.choice([0.125, 0.01, 0.3]))))
        case "PRelu":
            return PiecewiseLinear(torch.from_numpy(rng.choice([-0.5, 0.25, 0.5, 1.5], size)).float())
        case "GELU":
            return function("GELU", float(rng.choice([1.0, 3.0, 160.0])))
        case "any":
            name = str(rng.choice([*BOUNDED, "Square", "Cube"]))
            return function(name, 1.5 if name == "ELU" else 1.0)
    return function(kind)


def activation(chain: Chain, kind: str, rng: np.random.Generator) -> Value:
    """Append an activation with random parameters."""
    return chain.act(drawn_function(kind, chain.last.size, rng))


def mlp(rng: np.random.Generator, draw: Draw, kind: str = "Relu", widths: Sequence[int] = (3, 6, 5, 3)) -> Network:
    """Linear layers and activations."""
    chain = Chain(widths[0])
    for i, (fan, out) in enumerate(itertools.pairwise(widths)):
        if i:
            activation(chain, kind, rng)
        chain.linear(draw((out, fan), fan), draw((out,), 4))
    return chain.network(f"mlp-{kind}")


def normalised(rng: np.random.Generator, draw: Draw, kind: str = "Relu") -> Network:
    """A normalisation in front and another one, as of a folded batch norm, between the layers."""
    chain = Chain(3)
    chain.scale(center=draw((3,), 4), factor=draw((3,), 1))
    chain.linear(draw((5, 3), 3), draw((5,), 4))
    chain.scale(center=draw((5,), 4), factor=draw((5,), 1), shift=draw((5,), 4))
    activation(chain, kind, rng)
    chain.linear(draw((4, 5), 5), draw((4,), 4))
    activation(chain, kind, rng)
    chain.linear(draw((2, 4), 4), draw((2,), 4))
    return chain.network(f"normalised-{kind}")


def cnn(rng: np.random.Generator, draw: Draw, kind: str = "Relu") -> Network:
    """Grouped, strided, unevenly padded and dilated convolutions, an axis permutation, a flattening."""
    chain = Chain(2, 3, 3)
    chain.conv(draw((2, 1, 2, 2), 8), draw((2,), 4), stride=(1, 2), padding=(0, 1, 1, 0), groups=2)
    activation(chain, kind, rng)
    chain.conv(draw((2, 2, 2, 1), 4), draw((2,), 4), dilation=(2, 1))
    chain.transpose(1, 2, 0)
    activation(chain, kind, rng)
    chain.reshape(4)
    chain.linear(draw((3, 4), 4), draw((3,), 4))
    return chain.network(f"cnn-{kind}")


def image(rng: np.random.Generator, draw: Draw, kind: str = "Relu") -> Network:
    """Plain convolutions with and without strides, one within a block x + f(x)."""
    chain = Chain(1, 4, 3)
    chain.conv(draw((2, 1, 2, 2), 4), draw((2,), 4), padding=(1, 0, 0, 1))
    before = activation(chain, kind, rng)
    chain.add(chain.conv(draw((2, 2, 3, 1), 6), draw((2,), 4), padding=(1, 0, 1, 0)), before)
    activation(chain, kind, rng)
    chain.conv(draw((2, 2, 2, 2), 8), draw((2,), 4), stride=(2, 2))
    activation(chain, kind, rng)
    chain.reshape(4)
    chain.linear(draw((2, 4), 4), draw((2,), 4))
    return chain.network(f"image-{kind}")


def windows(rng: np.random.Generator, draw: Draw) -> Network:
    """Two convolutions one after the other: a neuron of the second depends on a window of the first, which it moves."""
    chain = Chain(1, 4, 4)
    chain.conv(draw((2, 1, 2, 2), 4), draw((2,), 4))
    chain.act()
    chain.conv(draw((3, 2, 2, 2), 8), draw((3,), 4))
    chain.act()
    chain.reshape(12)
    chain.linear(draw((2, 12), 12), draw((2,), 4))
    return chain.network("windows")


def opposed(rng: np.random.Generator, draw: Draw, images: bool, relu: bool) -> Network:
    """Pairs of nearly equal neurons whose values the next layer subtracts, so that large numbers cancel."""

    def nearly(weight: Tensor) -> Tensor:
        return weight * (1 + torch.from_numpy(rng.uniform(size=weight.shape)) * 2.0**-20)

    def paired(shape: Sequence[int], fan: int) -> Tensor:
        return nearly(draw((shape[0] // 2, *shape[1:]), fan).repeat_interleave(2, 0)).float()

    def cancelling(shape: Sequence[int], fan: int) -> Tensor:
        value = draw((shape[0], shape[1] // 2, *shape[2:]), fan).repeat_interleave(2, 1)
        value[:, 1::2] *= -1
        return nearly(value).float()

    chain = Chain(*((1, 3, 2) if images else (3,)))
    if images:
        chain.conv(paired((4, 1, 2, 1), 2))
        chain.conv(cancelling((4, 4, 1, 2), 4))
    else:
        chain.linear(paired((4, 3), 3))
        chain.linear(cancelling((4, 4), 4))
    if relu:
        chain.act()
    chain.reshape(chain.last.size)
    chain.linear(draw((2, chain.last.size), 8))
    return chain.network(f"opposed-{'image' if images else 'mlp'}{'-Relu' * relu}")


def residual(rng: np.random.Generator, draw: Draw, kind: str = "Relu") -> Network:
    """Two blocks x + f(x), the first around a wide affine op, the second around an activation."""
    chain = Chain(4)
    stem = chain.linear(draw((4, 4), 4), draw((4,), 4))
    activation(chain, kind, rng)
    chain.add(stem, chain.linear(draw((4, 4), 4), draw((4,), 4)))
    first = activation(chain, kind, rng)
    chain.add(first, chain.linear(draw((4, 4), 4), draw((4,), 4)))
    chain.linear(draw((2, 4), 4), draw((2,), 4))
    return chain.network(f"residual-{kind}")


def pooled(rng: np.random.Generator, draw: Draw) -> Network:
    """Maxima as x + relu(y − x), numbers selected, repeated and left out, sums of few terms, and absolute values."""
    chain, index = Chain(1, 3, 3), rng.integers(0, 9, size=(4, 2))
    build = chain.build
    chain.made(build.sparse(chain.input, index, np.tile([1.0, -1.0], (4, 1)), (4,), draw((4,), 4).numpy()))
    chain.add(chain.act(), chain.chosen(index[:, 1], chain.input))
    weight = draw((5, 3), 3).numpy() * rng.integers(0, 2, size=(5, 3))
    chain.made(build.sparse(chain.last, rng.integers(0, 4, size=(5, 3)), weight, (5,), draw((5,), 4).numpy()))
    chain.act(PiecewiseLinear(torch.tensor(-1.0)))
    chain.linear(draw((2, 5), 5), draw((2,), 4))
    return chain.network("pooled")


def maxima(rng: np.random.Generator, draw: Draw) -> Network:
    """Maxima of two or three affine functions, which overlap, and of these behind ReLUs."""
    chain = Chain(4)
    chain.linear(draw((6, 4), 4), draw((6,), 4))
    for size in (6, 5):
        candidates = rng.integers(0, size, size=(3, 5))
        candidates[2, :2] = -1
        chain.made(chain.build.maximum(chain.last, candidates, (5,)))
        chain.linear(draw((5, 5), 5), draw((5,), 4))
        chain.act()
    chain.linear(draw((2, 5), 5), draw((2,), 4))
    return chain.network("maxima")


def extremes(rng: np.random.Generator, draw: Draw) -> Network:
    """Maxima and minima of two computed vectors, as the reader makes them, and of these again."""
    chain = Chain(4)
    for size, sign in ((6, 1), (4, -1), (4, 1)):
        before = chain.linear(draw((size, chain.last.size), 4), draw((size,), 4))
        halves = [chain.chosen(part, before) for part in np.split(np.arange(size), 2)]
        if sign < 0:
            halves = [chain.scale(half, factor=-1.0) for half in halves]
        chain.made(chain.build.larger(*halves))
        if sign < 0:
            chain.scale(factor=-1.0)
    chain.linear(draw((2, 2), 2), draw((2,), 2))
    return chain.network("extremes")


def polynomials(rng: np.random.Generator, draw: Draw) -> Network:
    """Products of numbers and of matrices, of permuted inputs and of each other, with ReLUs between them."""
    chain = Chain(2, 4)
    square = chain.made(chain.build.matmul(chain.transpose(1, 0), chain.input))
    sums = chain.linear(draw((3, 4), 4), draw((3,), 4), square)
    other = chain.linear(draw((3, 4), 4), draw((3,), 4), chain.act(x=square))
    chain.add(chain.made(chain.build.product(sums, other)), sums)
    return chain.network("polynomials")


def divisions(rng: np.random.Generator, draw: Draw) -> Network:
    """Constants subtracted, multiplied and added, and divisions by numbers whose reciprocals are rounded."""
    chain = Chain(2, 3)
    chain.scale(center=draw((1, 3), 1), factor=draw((2, 1), 1), shift=draw((2, 3), 1))
    chain.made(chain.build.divided(chain.last, torch.tensor([[12.0], [0.7]])))
    chain.act()
    chain.made(chain.build.divided(chain.last, torch.tensor(-7.0)))
    chain.scale(shift=0.25)
    chain.scale(factor=-1.0)
    return chain.network("divisions")


def products(rng: np.random.Generator, draw: Draw) -> Network:
    """Products of inputs, of affine maps and of activations, of numbers and of matrices, and quotients."""
    chain, build = Chain(4), None
    build = chain.build
    square = chain.input.reshaped((2, 2))
    inputs = chain.made(build.product(chain.transpose(1, 0, x=square), square))
    parts = [
        chain.linear(draw((6, 4), 4), draw((6,), 4), source.reshaped((4,))).reshaped(shape)
        for source, shape in ((chain.input, (2, 3)), (inputs, (3, 2)))
    ]
    scores = chain.made(build.matmul(*parts)).reshaped((4,))
    # Sigmoids next to each other, divided by one and their sum.
    gates = chain.act("Sigmoid", x=scores)
    chain.linear(torch.ones(4, 4), torch.ones(4), gates)
    chain.add(chain.made(build.product(gates, chain.act("Reciprocal"))), scores)
    chain.linear(draw((2, 4), 4), draw((2,), 4))
    return chain.network("products")


def pieces(rng: np.random.Generator, draw: Draw) -> list[Network]:
    """One piecewise-linear network of each architecture."""
    return [
        mlp(rng, draw),
        mlp(rng, draw, "LeakyRelu"),
        normalised(rng, draw),
        cnn(rng, draw),
        cnn(rng, draw, "LeakyRelu"),
        residual(rng, draw),
        pooled(rng, draw),
    ]


def smooth(rng: np.random.Generator, draw: Draw) -> list[Network]:
    """Networks with smooth activations."""
    return [
        mlp(rng, draw, "Sigmoid"),
        mlp(rng, draw, "Tanh"),
        mlp(rng, draw, "GELU"),
        cnn(rng, draw, "Sigmoid"),
        residual(rng, draw, "GELU"),
        normalised(rng, draw, "Tanh"),
        mlp(rng, draw, "any"),
        cnn(rng, draw, "any"),
        products(rng, draw),
    ]


def mixed(rng: np.random.Generator, kind: str) -> Network:
    """Layers of smooth neurons and of ReLUs in turn, added up."""
    chain, draw = Chain(3), gaussian(rng)
    chain.linear(draw((5, 3), 3), draw((5,), 4))
    first = activation(chain, kind, rng)
    chain.linear(draw((5, 5), 5), draw((5,), 4))
    chain.linear(draw((4, 5), 5), draw((4,), 4), chain.add(first, chain.act()))
    activation(chain, kind, rng)
    chain.linear(draw((2, 4), 4), draw((2,), 4))
    return chain.network(f"mixed-{kind}")


# Changed networks


def changed(net: Network, share: float, seed: int = 1) -> Network:
    """The network with weights that are off by about this share of themselves."""
    rng = torch.Generator().manual_seed(seed)

    def moved(op: Op) -> Op:
        if not isinstance(op, Affine) or not isinstance(op.map, Dense):
            return op
        weight = op.map.weight
        by = 1 + share * torch.randn(weight.shape, generator=rng, dtype=torch.float64).to(weight.dtype)
        return replace(op, map=Dense(weight * by, op.map.copies))

    return replace(net, ops=tuple(map(moved, net.ops)))


def with_functions(net: Network, of: Callable[[Function, int], Function]) -> Network:
    """The network with other activations: of each function, and of its place among them."""
    place = itertools.count()
    ops = (replace(op, function=of(op.function, next(place))) if isinstance(op, Elementwise) else op for op in net.ops)
    return replace(net, ops=tuple(ops), source=replace(net.source, onnx=None, run=None))


# Hidden counterexamples


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
    order = rng.permutation(n) if front == "conv" else np.arange(n)
    chain = Chain(*((n, 1, 1) if front == "conv" else (n,)))
    if front == "conv":
        kernel = np.zeros((n, n, 3, 3))
        kernel[np.arange(n), order, 1, 1] = 2.0
        chain.conv(torch.tensor(kernel).float(), padding=(1, 1, 1, 1))
        chain.scale(factor=0.5)
        chain.reshape(n)
    elif front == "scale":
        chain.scale(center=torch.tensor(point).float())
        chain.scale(shift=torch.tensor(point).float())
    elif front == "residual":
        block = chain.act(x=chain.linear(torch.eye(n)))
        negative = chain.act(x=chain.linear(-torch.eye(n), x=chain.input))
        chain.add(block, chain.linear(-torch.eye(n), x=negative))
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
    chain.linear(torch.tensor(weight[shuffle]).float(), torch.tensor(bias[shuffle]).float())
    chain.act()
    chain.linear(torch.tensor(mix[again][:, shuffle]).float(), torch.tensor(second[again]).float())
    chain.act()
    chain.linear(torch.tensor(out[again][None]).float(), torch.tensor([1.0]))
    return chain.network(f"needle-{front}")


def dyadic(rng: np.random.Generator, n: int, bits: int) -> np.ndarray:
    """A random point of [-1, 1]^n with coordinates k/2^bits."""
    return rng.integers(-(2**bits), 2**bits + 1, size=n) / 2**bits


def as_fractions(x: np.ndarray) -> tuple[Fraction, ...]:
    """The exact values of a float array."""
    return tuple(Fraction(float(v)) for v in np.asarray(x).reshape(-1))
