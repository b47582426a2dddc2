"""Ranges that are not negative stay so: against sampling, an interval evaluation in mpmath, and faults seeded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mpmath
import pytest
import torch
from torch import Tensor, nn

from tests.support.hooks import Hook
from verifiable_relu.bounds import Bounds, crown_relaxation, interval_bounds
from verifiable_relu.network import from_torch
from verifiable_relu.network.build import Builder
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import LeakyRelu, Relu, curve

BOXES = {
    "about 0": ([-1.0, -0.5, 0.0], [1.0, 2.0, 1.0]),
    "from 0": ([0.0, 0.0, 0.0], [1.0, 1e-3, 3.0]),
    "at 0": ([0.0, 0.0, 0.0], [0.0, 0.0, 0.0]),
    "away from 0": ([1.0, 0.7, 2.0], [1.5, 0.9, 2.25]),
}


def double(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


@dataclass
class Made:
    """A network of three inputs in the making, with what it computes in intervals of mpmath."""

    build: Builder
    index: int
    ends: list[Any]

    def curved(self, function: str, at: Callable[[Any], Any], parameter: float = 1.0) -> Made:
        shape = self.build.shape(self.index)
        index = self.build.append(curve(function, f"f{self.index}", (self.index,), shape, parameter))
        return Made(self.build, index, [at(x) for x in self.ends])

    def summed(self, *weights: float, bias: float = 0.0) -> Made:
        weight, offset = double(*weights)[None], double(bias)
        total = mpmath.iv.mpf(bias) + sum((mpmath.iv.mpf(w) * x for w, x in zip(weights, self.ends, strict=True)), 0)
        return Made(self.build, self.build.linear(self.index, weight, offset, f"s{self.index}"), [total])

    def scaled(self, factor: float, shift: float = 0.0) -> Made:
        index = self.build.scale(self.index, f"c{self.index}", scale=double(factor), shift=double(shift))
        return Made(self.build, index, [mpmath.iv.mpf(factor) * x + mpmath.iv.mpf(shift) for x in self.ends])

    def kinked(self, slope: float | None) -> Made:
        kind, parameters = (Relu, {}) if slope is None else (LeakyRelu, {"slope": double(slope)[0]})
        index = self.build.activation(self.index, kind, f"r{self.index}", **parameters)
        below = 0 if slope is None else slope
        at = [_hull([v if v > 0 else below * v for v in (x.a, x.b, *([0] if 0 in x else []))]) for x in self.ends]
        return Made(self.build, index, at)


def _hull(values: list[Any]) -> Any:
    return mpmath.iv.mpf([min(mpmath.mpf(v) for v in values), max(mpmath.mpf(v) for v in values)])


def _root(x: Any) -> Any:
    return mpmath.iv.sqrt(_hull([max(x.a, 0), x.b]))


def _power(exponent: float) -> Callable[[Any], Any]:
    return lambda x: _hull([mpmath.mpf(max(end, 0)) ** exponent for end in (x.a, x.b)])


SQUARE: tuple[str, Callable[[Any], Any]] = ("Square", lambda x: x**2)
EXP: tuple[str, Callable[[Any], Any]] = ("Exp", mpmath.iv.exp)
ROOT: tuple[str, Callable[[Any], Any]] = ("Sqrt", _root)
LOG: tuple[str, Callable[[Any], Any]] = ("Log", mpmath.iv.log)

RANGES: dict[str, Callable[[Made], Made]] = {
    "root of a square": lambda x: x.curved(*SQUARE).curved(*ROOT),
    "root of |x|": lambda x: x.kinked(-1.0).curved(*ROOT),
    "root of 3·relu(x)": lambda x: x.kinked(None).scaled(3.0).curved(*ROOT),
    "norm": lambda x: x.curved(*SQUARE).summed(1.0, 1.0, 1.0).curved(*ROOT),
    "norm by negatives": lambda x: x.curved(*SQUARE).summed(-1.0, -2.0, -0.3).scaled(-1.0).curved(*ROOT),
    "power 1.5": lambda x: x.kinked(None).curved("Power", _power(1.5), 1.5),
    "power 0.7 of |x|": lambda x: x.kinked(-1.0).curved("Root", _power(0.75), 0.75),
    "log-sum-exp": lambda x: x.scaled(20.0).curved(*EXP).summed(1.0, 1.0, 1.0).curved(*LOG),
    "root of log(1 + x²)": lambda x: x.curved(*SQUARE).scaled(1.0, 1.0).curved(*LOG).curved(*ROOT),
    "reciprocal of 1 + relu(x)": lambda x: x.kinked(None).scaled(1.0, 1.0).curved("Reciprocal", lambda v: 1 / v),
    "root of 1 − σ(x)": lambda x: (
        x.scaled(60.0).curved("Sigmoid", lambda v: 1 / (1 + mpmath.iv.exp(-v))).scaled(-1.0, 1.0).curved(*ROOT)
    ),
}


def made(kind: str, box: str) -> tuple[Network, Bounds, list[Any]]:
    """The network, its box, and the intervals of mpmath of its outputs."""
    lower, upper = BOXES[box]
    with mpmath.workdps(60):
        mpmath.iv.dps = 60
        ends = [mpmath.iv.mpf([low, high]) for low, high in zip(lower, upper, strict=True)]
        found = RANGES[kind](Made(Builder((3,)), 0, ends))
    network = found.build.network(found.index, name=kind).to(torch.float64)
    return network, Bounds(double(*lower)[None], double(*upper)[None]), found.ends


def tight(found: Bounds, ends: list[Any]) -> bool:
    """Return True if bounds contain the intervals of mpmath and are hardly wider."""
    lower, upper = found.lower.flatten().tolist(), found.upper.flatten().tolist()
    for low, high, end in zip(lower, upper, ends, strict=True):
        slack = 1e-6 * (1 + max(abs(end.a), abs(end.b)))
        if not (end.a - slack <= low <= end.a and end.b <= high <= end.b + slack):
            return False
    return True


@pytest.mark.parametrize("box", BOXES)
@pytest.mark.parametrize("kind", RANGES)
def test_intervals_are_those_of_mpmath(kind: str, box: str) -> None:
    network, inputs, ends = made(kind, box)
    found = interval_bounds(network, inputs)[-1]
    assert tight(found, ends)
    x = inputs.lower + torch.rand(500, 3, dtype=torch.float64) * (inputs.upper - inputs.lower)
    y = network(x)
    assert bool(((y >= found.lower - 1e-12) & (y <= found.upper + 1e-9 * y.abs())).all())


@pytest.mark.parametrize("kind", RANGES)
def test_rows_through_roots_and_logarithms_are_finite_and_hold(kind: str) -> None:
    network, inputs, _ = made(kind, "about 0")
    with torch.no_grad():
        relaxation = crown_relaxation(network, inputs)
        rows = torch.cat([torch.eye(network.output_size), -torch.eye(network.output_size)]).double()
        lower = relaxation.lower(len(network.nodes) - 1, rows)[0].flatten()
    x = inputs.lower + torch.rand(2000, 3, dtype=torch.float64) * (inputs.upper - inputs.lower)
    values = network(x) @ rows.T
    assert bool(torch.isfinite(lower).all()) and bool((values >= lower - 1e-9).all())


FAULTS = {
    "an image that is not cut to the function's range": Hook(
        "bounds.activations:within_range", lambda right, node, bounds, image: image
    ),
    "a root that is taken for positive": Hook(
        "bounds.activations:within_range",
        lambda right, node, bounds, image: Bounds(right(node, bounds, image).lower.clamp(min=0.5), image.upper),
    ),
    "an offset that is passed though terms have the other sign": Hook(
        "bounds.rounding:offset_range", lambda right, operator: Bounds(operator.offset + 1, operator.offset + 1)
    ),
    "no error at the end of a sum": Hook("bounds.rounding:interval_end", lambda right, operator, size: -1e-9 * size),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_ranges_is_seen(fault: str) -> None:
    def seen() -> bool:
        cases = (made(kind, box) for kind in RANGES for box in BOXES)
        return any(not tight(interval_bounds(network, box)[-1], ends) for network, box, ends in cases)

    assert not seen()
    with FAULTS[fault].applied():
        assert seen()


@pytest.mark.parametrize("width", (0.5, 100.0))
def test_a_softmax_is_at_most_1_and_what_is_left_of_1_not_negative(width: float) -> None:
    class Left(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sqrt(1 - torch.softmax(x, -1))

    network = from_torch(Left().eval(), (5,)).to(torch.float64)
    box = Bounds(*(torch.full((1, 5), end, dtype=torch.float64) for end in (-width, width)))
    with torch.no_grad():
        found = interval_bounds(network, box)[-1]
        relaxation = crown_relaxation(network, box)
        eye = torch.eye(5, dtype=torch.float64)
        lower, upper = relaxation.outputs(eye), -relaxation.outputs(-eye)
        x = box.lower + (box.upper - box.lower) * torch.rand(2000, 5, dtype=torch.float64)
        y = Left()(torch.cat([x, torch.diag(2 * width * torch.ones(5, dtype=torch.float64)) - width]))
    assert bool((found.lower >= 0).all()) and bool((found.lower <= y.amin(0)).all())
    assert bool((found.upper >= y.amax(0)).all()) and bool((found.upper <= 1 + 1e-12).all())
    assert bool((lower <= y.amin(0)).all()) and bool((y.amax(0) <= upper).all())
    assert bool(torch.isfinite(lower).all()) and bool(torch.isfinite(upper).all())
