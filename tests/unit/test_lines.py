"""The linear relaxation of a single activation, its rounding slack included, against exact values at all scales."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.draws import draws
from tests.support.exact import exact_values
from verifiable_relu.bounds import Bounds, Relaxation
from verifiable_relu.bounds.activations import relax
from verifiable_relu.network import nodes
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import (
    Activation,
    Gelu,
    Hardened,
    Identity,
    Input,
    LeakyRelu,
    Relu,
    Sigmoid,
    Smooth,
    Step,
    Tanh,
)

Made = tuple[type[Activation], float | None]


def scaled(most: int) -> st.SearchStrategy[float]:
    """Numbers of either sign, from 2^-most to 2^most, powers of two among them."""
    mantissa = st.one_of(st.just(1.0), st.floats(1.0, 2.0, exclude_max=True), st.sampled_from([1 + 2.0**-52, 4 / 3]))
    return st.builds(lambda s, m, e: s * math.ldexp(m, e), st.sampled_from([1, -1]), mantissa, st.integers(-most, most))


SLOPE = st.one_of(scaled(1000), st.sampled_from([0.0, 1.0, 1 - 2.0**-53, 1 + 2.0**-52, -1e16, -512.0, 1e16]))
LAM = st.builds(lambda e: 10.0**e, st.floats(-3, 6))
PARAMETERS: dict[type[Activation], st.SearchStrategy[float | None]] = {
    **dict.fromkeys((Identity, Relu, Sigmoid, Tanh), st.none()),
    LeakyRelu: SLOPE,
    **dict.fromkeys((Gelu, Hardened), LAM),
}
"""The parameter of each kind of activation: slopes of any size, λ from 1e-3 to 1e6, None for kinds without one."""

MADE: st.SearchStrategy[Made] = st.one_of([st.tuples(st.just(kind), drawn) for kind, drawn in PARAMETERS.items()])


def test_activations_of_every_kind_are_drawn() -> None:
    """All kinds but ``Smooth`` and ``Step``, of which test_activations.py and test_steps.py test each function."""
    kinds = {kind for kind in vars(nodes).values() if isinstance(kind, type) and issubclass(kind, Activation)}
    assert {kind for kind in kinds if "op" in vars(kind)} == {Smooth, Step, *PARAMETERS}


def one(kind: type[Activation], parameter: float | None, dtype: torch.dtype) -> Network:
    """A network of one input and one neuron."""
    name = {LeakyRelu: "slope", Gelu: "lam", Hardened: "lam"}.get(kind)
    with_it = {name: torch.tensor(parameter, dtype=dtype)} if name else {}
    return Network((Input(name="x", inputs=(), shape=(1,)), kind(name="f", inputs=(0,), shape=(1,), **with_it)))


def members(net: Network) -> list[Network]:
    """The network itself, or of a set of networks the two at its ends: with ReLU, and with the smallest λ."""
    node = net.nodes[1]
    if not isinstance(node, Hardened):
        return [net]
    smooth = Gelu(name="f", inputs=(0,), shape=(1,), lam=node.lam)
    return [net.limit, replace(net, nodes=(net.nodes[0], smooth))]


def points(low: float, high: float, net: Network) -> list[Fraction]:
    """Points of [low, high]: both ends, evenly spaced points, zero, and points near to where the activation bends."""
    node = net.nodes[1]
    bend = 1 / float(node.lam) if isinstance(node, Gelu | Hardened) else 1.0
    first, last = Fraction(low), Fraction(high)
    even = [first + (last - first) * Fraction(k, 16) for k in range(0, 17, 2)]
    near = [side * Fraction(bend) * Fraction(k, 4) for k in (1, 3, 6, 16, 40) for side in (1, -1)]
    small = [Fraction(side * math.ldexp(max(abs(low), abs(high)), -k)) for k in (10, 30, 60) for side in (1, -1)]
    return sorted({min(max(x, first), last) for x in (*even, *near, *small, Fraction(0))})


@pytest.mark.thorough
@settings(max_examples=draws(120), deadline=None)
@given(
    made=MADE,
    ends=st.tuples(scaled(1000), scaled(1000)),
    about=st.sampled_from(["any", "bend", "balanced"]),
    alpha=st.sampled_from([None, 0.0, 0.3, 1.0]),
    single=st.booleans(),
    narrow=st.booleans(),
)
@example(made=(LeakyRelu, 1e16), ends=(-(2.0**-20), 1.0), about="any", alpha=None, single=False, narrow=False)
@example(made=(LeakyRelu, 2.0**60), ends=(-(2.0**-60), 1.0), about="any", alpha=1.0, single=False, narrow=False)
@example(made=(LeakyRelu, -1e16), ends=(-1e-20, 1.0), about="any", alpha=1.0, single=False, narrow=False)
@example(made=(LeakyRelu, 1e7 / 3), ends=(-(2.0**-10), 1.0), about="any", alpha=1.0, single=True, narrow=True)
def test_outward_lines_hold_at_every_scale(
    made: Made, ends: tuple[float, float], about: str, alpha: float | None, single: bool, narrow: bool
) -> None:
    """The lines lie below and above the activation, and the image holds its values.

    ``about`` says where the interval lies: anywhere, with one end where the activation bends (``bend``), or with values
    of similar size at both ends (``balanced``). ``single`` has coefficients in float32, ``narrow`` all numbers.
    """
    kind, parameter = made
    dtype = torch.float32 if narrow else torch.float64
    own = 1 / (parameter or 1.0)
    values = [
        ends[0],
        {"any": ends[1], "bend": math.copysign(1.5 * own, ends[1]), "balanced": -ends[0] * abs(own)}[about],
    ]
    info = torch.finfo(dtype)
    low, high = sorted(float(np.clip(v, -info.max / 4, info.max / 4)) for v in values)
    low, high = (float(torch.tensor(v, dtype=dtype)) for v in (low, high))
    if parameter is not None:
        parameter = float(torch.tensor(float(np.clip(parameter, -info.max / 4, info.max / 4)), dtype=dtype))
        if kind is not LeakyRelu:
            parameter = max(parameter, 1e-3)
    net = one(kind, parameter, dtype)
    node = net.nodes[1]
    assert isinstance(node, Activation)
    box = Bounds(torch.full((1, 1), low, dtype=dtype), torch.full((1, 1), high, dtype=dtype))
    relaxation = Relaxation(net, box, float32=single)
    relaxation.advance(1)
    chosen = None if alpha is None else torch.full((1, 1), alpha, dtype=dtype)
    lines = relax(node, box, chosen)
    x = points(low, high, net)
    exact = [exact_values(member, [p])[1].item() for member in members(net) for p in x]

    image = relaxation.bounds(1)
    assert not float(image.lower) > min(exact)
    assert not float(image.upper) < max(exact)
    for sign, least in ((1.0, min(exact)), (-1.0, -max(exact))):
        row = torch.full((1, 1), sign, dtype=dtype)
        found = relaxation.lower(1, row, torch.tensor([0]), lines={1: lines})[0]
        assert not float(found) > least, "a bound excludes a value"

    step = relaxation.backward.shifted.outward(1, lines, None)
    assert step.floor is not None
    parts = [float(t) for t in (step.low, step.rise, step.floor, step.lift)]
    middle = [float(relaxation.nodes.point(i)) for i in (0, 1)]
    if not all(map(math.isfinite, (*parts, *middle))):
        return
    slope, rise, floor, lift = map(Fraction, parts)
    z, y = map(Fraction, middle)
    for point, value in zip(x * len(members(net)), exact, strict=True):
        below = slope * (point - z) + floor
        assert below <= value - y, "the lower line is above the activation"
        assert value - y <= below + rise * (point - z) + lift, "the upper line is below the activation"
