"""Counterexamples planted exactly at the boundary of the unsafe set, at all scales and for all activations.

Networks are small, so that the point of the box with the least margin is nearly found by looking at corners and
samples, and the exact value there is the property's threshold. Whoever says *unsat* is wrong by rational arithmetic
(for smooth activations by 60 digits and a margin below 1e-40). Layers are rescaled by powers of two, which changes
nothing that ReLU and LeakyReLU compute; inputs, outputs and slopes have any size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
import torch

from tests.support.exact import DIGITS, exact_outputs
from tests.support.nets import Chain, as_fractions
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import (
    Activation,
    Add,
    Affine,
    Gelu,
    Hardened,
    LeakyRelu,
    Linear,
    Relu,
    Sigmoid,
    Tanh,
)
from verifiable_relu.spec.property import Box, Property, Query, Row

from .judge import Case

STEP = math.ulp(1.0)
SIZES = (1e-300, 1e-30, 1e-8, 0.01, 0.25, 1 - STEP / 2, 1.0, 1 + STEP, 1.5, 512.0, 1e8, 1e16, 1e30, 1e100, 1e300)
SLOPES = (0.0, *(sign * size for size in SIZES for sign in (1, -1)))
STEEP = (1e8, 1e16, 1e30, 1e100)
LAMBDAS = (1e-3, 1.0, 5.0, 160.0, 1e6)

Kind = Callable[[np.random.Generator, int], tuple[type[Activation], dict[str, torch.Tensor]]]
"""An activation over so many neurons: its type and parameters."""


def _leaky(rng: np.random.Generator, size: int) -> tuple[type[Activation], dict[str, torch.Tensor]]:
    return LeakyRelu, {"slope": torch.tensor(float(rng.choice(SLOPES)), dtype=torch.float64)}


def _prelu(rng: np.random.Generator, size: int) -> tuple[type[Activation], dict[str, torch.Tensor]]:
    slopes = rng.choice(SLOPES, size=size) * rng.choice([1.0, 1.0, 1 / 3], size=size)
    return LeakyRelu, {"slope": torch.tensor(slopes, dtype=torch.float64)}


def _steep(rng: np.random.Generator, size: int) -> tuple[type[Activation], dict[str, torch.Tensor]]:
    slopes = rng.choice(STEEP, size=size) * rng.choice([1, -1], size=size)
    return LeakyRelu, {"slope": torch.tensor(slopes, dtype=torch.float64)}


def _with_lambda(kind: type[Activation]) -> Kind:
    return lambda rng, size: (kind, {"lam": torch.tensor(float(rng.choice(LAMBDAS)), dtype=torch.float64)})


KINDS: dict[str, Kind] = {
    "Relu": lambda rng, size: (Relu, {}),
    "LeakyRelu": _leaky,
    "PRelu": _prelu,
    "SteepPRelu": _steep,
    "Sigmoid": lambda rng, size: (Sigmoid, {}),
    "Tanh": lambda rng, size: (Tanh, {}),
    "Gelu": _with_lambda(Gelu),
    "Hardened": _with_lambda(Hardened),
}
LINEAR = ("Relu", "LeakyRelu", "PRelu", "SteepPRelu")
"""Kinds whose layers can be rescaled, and which MILP and SMT take."""


def _scales(rng: np.random.Generator, size: int, most: int) -> np.ndarray:
    """Exponents of two for a layer: none, one for all neurons, or one for each."""
    match int(rng.integers(3)):
        case 0:
            return np.zeros(size, int)
        case 1:
            return np.full(size, int(rng.integers(-most, most + 1)))
    return rng.integers(-most, most + 1, size=size)


def network(rng: np.random.Generator, kind: str, widths: Sequence[int]) -> tuple[Network, float]:
    """A random network of one kind of activation, and the size of its inputs.

    Weights are float32 numbers times powers of two. Layers of piecewise-linear kinds are rescaled by up to 2^±40.
    """
    chain = Chain((widths[0],))
    input_scale, output_scale = (int(s) for s in rng.choice([0, 0, -100, -30, 30, 100], size=2))
    before = np.full(widths[0], input_scale)
    for layer, (fan, out) in enumerate(itertools.pairwise(widths)):
        last = layer == len(widths) - 2
        after = np.full(out, output_scale) if last else _scales(rng, out, 40) if kind in LINEAR else np.zeros(out, int)
        weight = np.float32(rng.normal(size=(out, fan)) * 1.4 / fan**0.5).astype(float)
        bias = np.float32(rng.normal(size=out) * 0.5).astype(float)
        if kind not in LINEAR and not last:
            weight, bias = (a * 2.0 ** int(rng.choice([0, 0, 3, 10, -30])) for a in (weight, bias))
        chain.add(
            Linear,
            (out,),
            weight=torch.from_numpy(np.ldexp(weight, after[:, None] - before)),
            bias=torch.from_numpy(np.ldexp(bias, after)),
        )
        if not last:
            made, parameters = KINDS[kind](rng, out)
            chain.add(made, (out,), **parameters)
        before = after
    return chain.network(f"{kind} {'-'.join(map(str, widths))}"), 2.0**input_scale


def kink(rng: np.random.Generator, kind: str) -> tuple[Network, np.ndarray, np.ndarray]:
    """Neurons w·x, their activations and x itself, over a box whose ends lie at very different distances from zero.

    What a neuron does with the nearer end is small beside the other, however steep it is there: so its lines must be
    right to the last digit.
    """
    chain, size = Chain((1,)), int(rng.integers(1, 4))
    far = float(rng.choice([1.0, 1e-30, 1e30, rng.uniform(0.5, 2)]))
    made, parameters = KINDS[kind](rng, size)
    steep = max(1.0, float(parameters["slope"].abs().max())) if "slope" in parameters else 1.0
    near = far / steep * 2.0 ** -int(rng.integers(0, 12))
    sign = float(rng.choice([1, 1, -1]))
    weight = sign * np.abs(rng.choice([1.0, 1.0, 0.25, rng.uniform(0.5, 2)], size=(size, 1)))
    chain.add(Linear, (size,), weight=torch.from_numpy(weight), bias=torch.zeros(size, dtype=torch.float64))
    chain.add(made, (size,), **parameters)
    out = rng.choice([1.0, -1.0, 0.5, 0.0], size=(1, size))
    out[0, 0] = out[0, 0] or 1.0
    chain.add(Linear, (1,), weight=torch.from_numpy(out), bias=torch.zeros(1, dtype=torch.float64))
    if rng.random() < 0.5:
        other = chain.add(
            Linear,
            (1,),
            0,
            weight=torch.tensor([[float(rng.choice([-2.0, 1.0, 0.5]))]], dtype=torch.float64),
            bias=torch.zeros(1, dtype=torch.float64),
        )
        chain.add(Add, (1,), other - 1, other)
    ends = np.array([[-near], [far]]) if sign > 0 else np.array([[-far], [near]])
    return chain.network(f"{kind}, one kink"), ends[0], ends[1]


def steep(rng: np.random.Generator) -> tuple[Network, np.ndarray, np.ndarray]:
    """Very steep activations of the inputs themselves, each over a box of which the steep part has the smaller values.

    No weights come before: the rounding of w·x, times the slope, would be more than a wrong line may be off by.
    """
    kind, size = "SteepPRelu", int(rng.integers(1, 4))
    made, parameters = KINDS[kind](rng, size)
    far = rng.choice([1.0, 1e-30, 1e30, rng.uniform(0.5, 2)], size=size)
    near = far / parameters["slope"].abs().numpy() * 2.0 ** -rng.integers(0, 12, size=size)
    chain = Chain((size,))
    chain.add(made, (size,), **parameters)
    out = torch.from_numpy(rng.choice([1.0, -1.0, 0.5, -0.5], size=(1, size)))
    chain.add(Linear, (1,), weight=out, bias=torch.zeros(1, dtype=torch.float64))
    return chain.network(f"{kind} of the inputs"), -near, far


def member(rng: np.random.Generator, family: Network) -> Network:
    """One of the networks that a network with ``Hardened`` activations stands for."""
    if not any(isinstance(node, Hardened) for node in family.nodes) or rng.random() < 0.5:
        return family.limit
    nodes = [
        Gelu(name=n.name, inputs=n.inputs, shape=n.shape, lam=n.lam * float(rng.choice([1, 2, 100])))
        if isinstance(n, Hardened)
        else n
        for n in family.nodes
    ]
    return replace(family, nodes=tuple(nodes))


def inexact(rng: np.random.Generator, true: Network) -> Network:
    """The network as a reader stores it that must round its weights, with a ``weight_error`` that says by how much."""

    def stored(node: Affine) -> Affine:
        error = 2.0 ** -int(rng.choice([12, 30, 52]))
        changed = node.map_tensors(
            lambda t: t * (1 + error / 4 * torch.from_numpy(rng.choice([-1, 1], tuple(t.shape))))
        )
        return replace(changed, weight_error=error)  # type: ignore[type-var]

    nodes = (stored(node) if isinstance(node, Affine) else node for node in true.nodes)
    return replace(true, nodes=tuple(nodes), name=f"{true.name}, inexact")


def _worst(rng: np.random.Generator, net: Network, row: np.ndarray, lower: np.ndarray, upper: np.ndarray) -> np.ndarray:
    """The point of a box at which row·y is least, of many samples and corners, improved coordinate by coordinate."""

    def values(x: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            found = (net(torch.from_numpy(x)) * torch.from_numpy(row)).sum(1).numpy()
        return np.where(np.isnan(found), np.inf, found)

    unit = rng.random((512, len(lower)))
    unit[:384] = np.where(rng.random((384, len(lower))) < 0.8, unit[:384].round(), unit[:384])
    x = np.clip(lower + unit * (upper - lower), lower, upper)
    best = x[values(x).argmin()]
    for _ in range(2):
        for i in range(len(lower)):
            moved = np.repeat(best[None], 18, 0)
            moved[:, i] = np.clip(np.concatenate([np.linspace(lower[i], upper[i], 17), [0.0]]), lower[i], upper[i])
            tried = np.concatenate([best[None], moved])
            best = tried[values(tried).argmin()]
    return best


def _box(rng: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
    """A box about zero or elsewhere: wide, narrow, beside its centre by next to nothing, or a point."""
    center = rng.normal(size=size) * rng.choice([0, 1])
    reach = rng.choice([1.0, 1.0, 1e-6, 0.0], size=(2, 1)) * rng.uniform(0, 1, size=(2, size))
    reach = np.where(rng.random((2, size)) < 0.2, 2.0**-20, reach) if reach.any() else reach
    return center - reach[0], center + reach[1]


def cases(seed: int, count: int, kinds: Sequence[str] = tuple(KINDS)) -> Iterator[Case]:
    """So many cases, the kinds of activation in turn."""
    rng = np.random.default_rng(seed)
    shapes = ((1, 1, 1), (1, 2, 1), (2, 3, 2), (3, 5, 4, 2), (8, 8, 6, 1))
    for number in range(count):
        kind = kinds[number % len(kinds)]
        if kind == "SteepPRelu":
            net, lower, upper = steep(rng)
        elif rng.random() < 0.4:
            net, lower, upper = kink(rng, kind)
        else:
            net, size = network(rng, kind, shapes[int(rng.integers(len(shapes)))])
            lower, upper = (side * size for side in _box(rng, net.input_size))
        true = member(rng, net)
        if kind in LINEAR and rng.random() < 0.25:
            net = inexact(rng, true)
        row = np.where(rng.random(net.output_size) < 0.7, rng.choice([-1.0, 1.0, 0.5, -3.0], net.output_size), 0.0)
        row[0] = row[0] or 1.0
        point = as_fractions(_worst(rng, true, row, lower, upper))
        reached = sum(Fraction(c) * y for c, y in zip(row, exact_outputs(true, point), strict=True))
        # Nothing to spare, next to nothing, and a little.
        strict, spare = bool(rng.random() < 0.3), abs(reached) * Fraction(int(rng.choice([0, 1, 10**6])), 10**12)
        if strict or not true.piecewise_linear:
            spare += abs(reached) / 10 ** (DIGITS // 2) + Fraction(1, 10**320)
        unsafe = ((Row(tuple((i, Fraction(c)) for i, c in enumerate(row) if c), reached + spare, strict),),)
        query = Query(net, Property(Box(lower, upper), unsafe))
        yield Case(f"{net.name}, case {number} of seed {seed}", query, point, None if net is true else true)
