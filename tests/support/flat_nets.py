"""Small flat networks with kinks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from verifiable_relu.ir.functions.function import Function
from verifiable_relu.ir.functions.piecewise_linear import PiecewiseLinear
from verifiable_relu.ir.interval import Interval
from verifiable_relu.ir.linear import Convolution, Dense
from verifiable_relu.ir.network import Affine, Elementwise, Input, Maximum, Network, Op, Source, Sum

SLOPES = (-0.5, 0.25, 0.5, 1.5)


def _numbers(rng: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy(rng.integers(-16, 17, shape).astype(np.float32) / 16)


def network(ops: Sequence[Op]) -> Network:
    return Network(tuple(ops), Source((ops[0].size,), (ops[-1].size,)))


def chain(rng: np.random.Generator, sizes: Sequence[int], functions: Sequence[Function]) -> Network:
    """A fully connected network of dyadic weights."""
    ops: list[Op] = [Input(name="x", size=sizes[0])]
    for layer, size in enumerate(sizes[1:]):
        if layer:
            function, width = functions[(layer - 1) % len(functions)], ops[-1].size
            ops.append(Elementwise(name=f"act{layer}", inputs=(len(ops) - 1,), size=width, function=function))
        weight, bias = _numbers(rng, size, ops[-1].size), _numbers(rng, size)
        ops.append(Affine(name=f"fc{layer}", inputs=(len(ops) - 1,), size=size, map=Dense(weight), bias=bias))
    return network(ops)


def relu_layers(
    *layers: tuple[Sequence[Sequence[float]], Sequence[float]], dtype: torch.dtype = torch.float32
) -> Network:
    """A fully connected network of the given weights and biases, with ReLU between layers."""
    ops: list[Op] = [Input(name="x", size=len(layers[0][0][0]))]
    for number, (weight, bias) in enumerate(layers):
        if number:
            ops.append(
                Elementwise(name=f"r{number}", inputs=(len(ops) - 1,), size=ops[-1].size, function=PiecewiseLinear())
            )
        map, last = Dense(torch.tensor(weight, dtype=dtype)), len(ops) - 1
        offset = torch.tensor(bias, dtype=dtype)
        ops.append(Affine(name=f"l{number}", inputs=(last,), size=len(bias), map=map, bias=offset))
    return network(ops)


def leaky(rng: np.random.Generator, size: int) -> PiecewiseLinear:
    """LeakyReLU with a slope for each neuron, some above 1 and some below 0."""
    return PiecewiseLinear(torch.from_numpy(rng.choice(SLOPES, size).astype(np.float32)))


def mlp(rng: np.random.Generator, kind: str = "relu", sizes: Sequence[int] = (4, 7, 6, 2)) -> Network:
    functions = [PiecewiseLinear() if kind == "relu" else leaky(rng, size) for size in sizes[1:-1]]
    return chain(rng, sizes, functions)


def residual(rng: np.random.Generator) -> Network:
    """Convolutions and a shortcut."""
    ops: list[Op] = [Input(name="x", size=8)]
    conv = Convolution(_numbers(rng, 2, 2, 2, 2), (2, 2, 2), (1, 1), (1, 0, 0, 1))
    ops.append(Affine(name="c0", inputs=(0,), size=conv.n_out, map=conv, bias=_numbers(rng, conv.n_out)))
    ops.append(Elementwise(name="r0", inputs=(1,), size=8, function=PiecewiseLinear()))
    again = Convolution(_numbers(rng, 2, 2, 2, 2), (2, 2, 2), (1, 1), (0, 1, 1, 0))
    ops.append(Affine(name="c1", inputs=(2,), size=again.n_out, map=again, bias=_numbers(rng, again.n_out)))
    ops.append(Sum(name="sum", inputs=(2, 3), size=8))
    ops.append(Elementwise(name="r1", inputs=(4,), size=8, function=PiecewiseLinear(torch.tensor(0.25))))
    ops.append(Affine(name="fc", inputs=(5,), size=2, map=Dense(_numbers(rng, 2, 8)), bias=_numbers(rng, 2)))
    return network(ops)


def pooled(rng: np.random.Generator) -> Network:
    """A maximum of two to four candidates between two layers."""
    ops: list[Op] = [Input(name="x", size=4)]
    ops.append(Affine(name="fc0", inputs=(0,), size=9, map=Dense(_numbers(rng, 9, 4)), bias=_numbers(rng, 9)))
    candidates = torch.from_numpy(rng.integers(0, 9, (4, 3)))
    candidates[3, 0] = candidates[0, 0]
    ops.append(Maximum(name="pool", inputs=(1,), size=3, candidates=candidates))
    ops.append(Affine(name="fc1", inputs=(2,), size=2, map=Dense(_numbers(rng, 2, 3)), bias=_numbers(rng, 2)))
    return network(ops)


def ball(center: np.ndarray, radius: float) -> Interval:
    x = torch.from_numpy(np.asarray(center, dtype=np.float64))[None]
    return Interval(x - radius, x + radius)
