"""Counterexamples planted exactly at the boundary of the unsafe set, at all scales and for all activations.

Networks are small, so that the point of the box with the least margin is nearly found by looking at corners and
samples, and the exact value there is the property's threshold. Whoever says *unsat* is wrong by rational arithmetic
(for smooth activations by 60 digits and a margin below 1e-40). Layers are rescaled by powers of two, which changes
nothing that ReLU and LeakyReLU compute; inputs, outputs and slopes have any size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
import torch

from tests.support.exact import DIGITS, exact_outputs
from tests.support.families import least_lambdas, member
from tests.support.nets import Chain, as_fractions
from verifiable_relu.ir.functions import Function, Hardened, Smooth, function
from verifiable_relu.ir.functions.piecewise_linear import PiecewiseLinear
from verifiable_relu.ir.linear import Dense
from verifiable_relu.ir.network import Affine, Network, Op
from verifiable_relu.spec.property import Box, Property, Query, Row

from .judge import Case

STEP = math.ulp(1.0)
SIZES = (1e-300, 1e-30, 1e-8, 0.01, 0.25, 1 - STEP / 2, 1.0, 1 + STEP, 1.5, 512.0, 1e8, 1e16, 1e30, 1e100, 1e300)
SLOPES = (0.0, *(sign * size for size in SIZES for sign in (1, -1)))
STEEP = (1e8, 1e16, 1e30, 1e100)
LAMBDAS = (1e-3, 1.0, 5.0, 160.0, 1e6)

KINDS = ("Relu", "LeakyRelu", "PRelu", "SteepPRelu", "Sigmoid", "Tanh", "GELU", "Hardened")
LINEAR = KINDS[:4]
"""Kinds whose layers can be rescaled, and which MILP and SMT take."""


def drawn_function(rng: np.random.Generator, kind: str, size: int) -> Function:
    """A function of a kind over so many neurons, with extreme parameters."""

    def slopes(numbers: np.ndarray | float) -> PiecewiseLinear:
        return PiecewiseLinear(torch.tensor(numbers, dtype=torch.float64))

    match kind:
        case "LeakyRelu":
            return slopes(float(rng.choice(SLOPES)))
        case "PRelu":
            return slopes(rng.choice(SLOPES, size=size) * rng.choice([1.0, 1.0, 1 / 3], size=size))
        case "SteepPRelu":
            return slopes(rng.choice(STEEP, size=size) * rng.choice([1, -1], size=size))
        case "GELU" | "Hardened":
            gelu = Smooth("GELU", float(rng.choice(LAMBDAS)))
            return gelu if kind == "GELU" else Hardened(gelu)
    return function(kind)


def _scales(rng: np.random.Generator, size: int, most: int) -> np.ndarray:
    """Exponents of two for a layer: none, one for all neurons, or one for each."""
    match int(rng.integers(3)):
        case 0:
            return np.zeros(size, int)
        case 1:
            return np.full(size, int(rng.integers(-most, most + 1)))
    return rng.integers(-most, most + 1, size=size)


def network(rng: np.random.Generator, kind: str, widths: Sequence[int]) -> tuple[Network, float]:
    """A network whose layers have any scale, and that of its inputs."""
    chain = Chain(widths[0])
    input_scale, output_scale = (int(s) for s in rng.choice([0, 0, -100, -30, 30, 100], size=2))
    before = np.full(widths[0], input_scale)
    for layer, (fan, out) in enumerate(itertools.pairwise(widths)):
        last = layer == len(widths) - 2
        after = np.full(out, output_scale) if last else _scales(rng, out, 40) if kind in LINEAR else np.zeros(out, int)
        weight = np.float32(rng.normal(size=(out, fan)) * 1.4 / fan**0.5).astype(float)
        bias = np.float32(rng.normal(size=out) * 0.5).astype(float)
        if kind not in LINEAR and not last:
            weight, bias = (a * 2.0 ** int(rng.choice([0, 0, 3, 10, -30])) for a in (weight, bias))
        chain.linear(
            *(torch.from_numpy(each) for each in (np.ldexp(weight, after[:, None] - before), np.ldexp(bias, after)))
        )
        if not last:
            chain.act(drawn_function(rng, kind, out))
        before = after
    return chain.network(f"{kind} {'-'.join(map(str, widths))}"), 2.0**input_scale


def kink(rng: np.random.Generator, kind: str) -> tuple[Network, np.ndarray, np.ndarray]:
    """Neurons w·x, their activations and x itself, over a box whose ends lie at very different distances from zero.

    What a neuron does with the nearer end is small next to the other, however steep it is there: so its lines must be
    right to the last digit.
    """
    chain, size = Chain(1), int(rng.integers(1, 4))
    far = float(rng.choice([1.0, 1e-30, 1e30, rng.uniform(0.5, 2)]))
    made = drawn_function(rng, kind, size)
    steep = max(1.0, float(made.slope_below.abs().max())) if isinstance(made, PiecewiseLinear) else 1.0
    near = far / steep * 2.0 ** -int(rng.integers(0, 12))
    sign = float(rng.choice([1, 1, -1]))
    chain.linear(torch.from_numpy(sign * np.abs(rng.choice([1.0, 1.0, 0.25, rng.uniform(0.5, 2)], size=(size, 1)))))
    chain.act(made)
    out = rng.choice([1.0, -1.0, 0.5, 0.0], size=(1, size))
    out[0, 0] = out[0, 0] or 1.0
    y = chain.linear(torch.from_numpy(out))
    if rng.random() < 0.5:
        by = torch.tensor([[float(rng.choice([-2.0, 1.0, 0.5]))]], dtype=torch.float64)
        chain.add(y, chain.linear(by, x=chain.input))
    ends = np.array([[-near], [far]]) if sign > 0 else np.array([[-far], [near]])
    return chain.network(f"{kind}, one kink"), ends[0], ends[1]


def steep(rng: np.random.Generator) -> tuple[Network, np.ndarray, np.ndarray]:
    """Very steep activations of the inputs themselves, each over a box of which the steep part has the smaller values.

    No weights come before: the rounding of w·x, times the slope, would be more than a wrong line may be off by.
    """
    size = int(rng.integers(1, 4))
    made = drawn_function(rng, "SteepPRelu", size)
    assert isinstance(made, PiecewiseLinear)
    far = rng.choice([1.0, 1e-30, 1e30, rng.uniform(0.5, 2)], size=size)
    near = far / made.slope_below.abs().numpy() * 2.0 ** -rng.integers(0, 12, size=size)
    chain = Chain(size)
    chain.act(made)
    chain.linear(torch.from_numpy(rng.choice([1.0, -1.0, 0.5, -0.5], size=(1, size))))
    return chain.network("SteepPRelu of the inputs"), -near, far


def drawn_member(rng: np.random.Generator, family: Network) -> Network:
    """One of the networks that a network with ``Hardened`` activations stands for."""
    lams = least_lambdas(family)
    if not lams or rng.random() < 0.5:
        return family.limit
    return member(family, [lam * float(rng.choice([1, 2, 100])) for lam in lams])


def inexact(rng: np.random.Generator, true: Network) -> Network:
    """The network as a reader stores it that must round its weights, with errors that say by how much."""

    def stored(op: Op) -> Op:
        if not isinstance(op, Affine) or not isinstance(op.map, Dense):
            return op
        error = 2.0 ** -int(rng.choice([12, 30, 52]))
        weight, bias = (
            None if t is None else t.double() * (1 + error / 4 * torch.from_numpy(rng.choice([-1, 1], tuple(t.shape))))
            for t in (op.map.weight, op.bias)
        )
        off = None if bias is None else error * bias.abs() + 1e-320
        return replace(op, map=Dense(weight), bias=bias, weight_error=error, bias_error=off)  # type: ignore[arg-type]

    return replace(true, ops=tuple(map(stored, true.ops)), name=f"{true.name}, inexact")


def _worst(rng: np.random.Generator, net: Network, row: np.ndarray, lower: np.ndarray, upper: np.ndarray) -> np.ndarray:
    """The point of a box at which row·y is least, of many samples and corners, improved coordinate by coordinate."""

    def values(x: np.ndarray) -> np.ndarray:
        found = (net(torch.from_numpy(x)) * torch.from_numpy(row)).sum(1).numpy()
        return np.where(np.isnan(found), np.inf, found)

    unit = rng.random((512, len(lower)))
    unit[:384] = np.where(rng.random((384, len(lower))) < 0.8, unit[:384].round(), unit[:384])
    x = np.clip(lower + unit * (upper - lower), lower, upper)
    best = x[values(x).argmin()]
    for _ in range(2):
        for i in range(len(lower)):
            moved = np.repeat(best[None], 18, 0)
            moved[:, i] = np.clip(np.append(np.linspace(lower[i], upper[i], 17), 0.0), lower[i], upper[i])
            tried = np.concatenate([best[None], moved])
            best = tried[values(tried).argmin()]
    return best


def _box(rng: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
    """A box about zero or elsewhere: wide, narrow, next to its centre by next to nothing, or a point."""
    center = rng.normal(size=size) * rng.choice([0, 1])
    reach = rng.choice([1.0, 1.0, 1e-6, 0.0], size=(2, 1)) * rng.uniform(0, 1, size=(2, size))
    reach = np.where(rng.random((2, size)) < 0.2, 2.0**-20, reach) if reach.any() else reach
    return center - reach[0], center + reach[1]


def cases(seed: int, count: int, kinds: Sequence[str] = KINDS) -> Iterator[Case]:
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
        true = drawn_member(rng, net)
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
