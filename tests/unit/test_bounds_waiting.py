"""Bounds of a neuron on one side that are computed only if the other side leaves it unstable (waiting sides).

All bounds stay sound, and those of the outputs do not change.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from fractions import Fraction
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.test_bounds import ACTS, assert_inside, boxes, images, mlp, points
from tests.unit.test_bounds import rows as output_rows
from verifiable_relu.bounds import Ascent, Bounds, Relaxation, Tuning, crown_relaxation
from verifiable_relu.bounds.activations import unstable
from verifiable_relu.bounds.crown import neurons
from verifiable_relu.bounds.tuning import receptive
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Activation
from verifiable_relu.trust.exact import evaluate_exact

ALWAYS, NEVER = Tuning(waiting_coefficients=0), Tuning(waiting_coefficients=1 << 60)
"""Tunings in which sides wait wherever they may, and nowhere."""

NETWORKS: dict[str, Callable[[], Network]] = {
    "mlp": lambda: mlp(ACTS["relu"], sizes=(6, 24, 24, 24, 3)),
    "images": lambda: images(ACTS["relu"]),
}
networks = pytest.mark.parametrize("name", NETWORKS)


@cache
def _case(name: str) -> tuple[Network, Bounds]:
    """A network and boxes such that in every sample different neurons, and different numbers of them, are bounded."""
    network = NETWORKS[name]()
    return network, boxes(network, batch=5)


def _stopping(after: int) -> dict[str, Any]:
    asked = itertools.count()
    return {"stop": lambda: next(asked) >= after, "memory": 1 << 15}


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "all": dict,
    "most": lambda: {"max_unstable": 9},
    "memory": lambda: {"memory": 1 << 14},
    "search": lambda: {"search": neurons(Ascent(steps=2))},
    **{f"stop {n}": partial(_stopping, n) for n in (0, 1, 2, 5, 9)},
}
"""Options of ``crown_relaxation``."""


def _relaxed(name: str, tuning: Tuning = ALWAYS, **options: Any) -> Relaxation:
    with torch.no_grad():
        return crown_relaxation(*_case(name), tuning=tuning, **options)


def _corners(relaxation: Relaxation, index: int, box: Bounds) -> dict[int, Tensor]:
    """For each sample, the points at which a few neurons of a node, and their negatives, attain their linear bounds."""
    size, samples = relaxation.network.nodes[index].size, len(box.lower)
    some = torch.eye(size, dtype=torch.float64)[[0, size // 2, size - 1]]
    every = torch.cat([some, -some]).repeat(samples, 1).reshape(-1, *relaxation.network.nodes[index].shape)
    reached = relaxation.lower(index, every, torch.arange(samples), coefficients=True)[1]
    assert reached is not None
    a = relaxation.of_input(reached).reshape(samples, -1, *box.lower.shape[1:])
    return {i: torch.where(a[i] > 0, box.lower[i], box.upper[i]) for i in (1, samples - 1)}


@pytest.mark.combined
@networks
@pytest.mark.parametrize("option", OPTIONS)
def test_bounds_hold_whichever_sides_have_waited(name: str, option: str) -> None:
    """Bounds are compared with sampled values, and with exact values where the linear bounds are attained."""
    network, box = _case(name)
    relaxation = _relaxed(name, **OPTIONS[option]())
    x = points(box)
    values = [v.unflatten(0, x.shape[:2]) for v in network.values(x.flatten(0, 1))]
    for index, value in enumerate(values):
        assert_inside(relaxation.bounds(index), value)
    for index, bounds in relaxation.pre.items():
        source = network.nodes[index].inputs[0]
        assert_inside(bounds, values[source])
        part = Network(network.nodes[: source + 1], name="part")
        for sample, corners in _corners(relaxation, source, box).items():
            low, high = (t[sample].flatten().tolist() for t in (bounds.lower, bounds.upper))
            for corner in corners[:: 1 if name == "mlp" else 4]:
                exact = evaluate_exact(part, [Fraction(v) for v in corner.flatten().tolist()])
                assert all(a <= v <= b for a, v, b in zip(low, exact, high, strict=True))


@pytest.mark.combined
@networks
@pytest.mark.parametrize("option", ["all", "most", "memory"])
def test_bounds_that_are_used_are_as_tight_as_without_waiting(name: str, option: str) -> None:
    """These are the bounds of the outputs, the stability of neurons, and both bounds of unstable neurons."""
    network, box = _case(name)
    waited = _relaxed(name, **OPTIONS[option]())
    plain = _relaxed(name, NEVER, **OPTIONS[option]())
    matrix, sample = output_rows(network, len(box.lower))
    torch.testing.assert_close(waited.outputs(matrix, sample), plain.outputs(matrix, sample), rtol=1e-9, atol=1e-9)
    for index, found in waited.pre.items():
        other, node = plain.pre[index], network.nodes[index]
        assert isinstance(node, Activation)
        left = unstable(node, found)
        assert torch.equal(left, unstable(node, other)) and torch.equal(found.upper <= 0, other.upper <= 0)
        torch.testing.assert_close(found.lower[left], other.lower[left], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(found.upper[left], other.upper[left], rtol=1e-9, atol=1e-9)


def _asked(
    network: Network, box: Bounds, monkeypatch: pytest.MonkeyPatch, tuning: Tuning = ALWAYS
) -> tuple[Relaxation, dict[int, tuple[Bounds, Tensor]]]:
    """A relaxation; for each activation the intervals of its input, and the sides of its neurons that were bounded.

    The sides are bool tensors (2, batch, neurons), lower sides first.
    """
    intervals: dict[int, Bounds] = {}
    asked: dict[int, Tensor] = {}
    through, sides = Relaxation.advance, Relaxation.neurons

    def advance(self: Relaxation, index: int, tighten: Callable[[int, Bounds], Bounds] | None = None) -> None:
        def watched(index: int, interval: Bounds) -> Bounds:
            assert tighten is not None
            intervals[index] = interval
            return tighten(index, interval)

        through(self, index, None if tighten is None else watched)

    def neurons(self: Relaxation, index: int, neuron: Tensor, sign: Tensor, sample: Tensor) -> Tensor:
        (activation,) = (i for i in network.activations if network.nodes[i].inputs[0] == index)
        table = asked.setdefault(activation, torch.zeros(2, len(box.lower), network.nodes[index].size).bool())
        table[(sign < 0).long(), sample.repeat_interleave(len(neuron) // len(sample)), neuron] = True
        return sides(self, index, neuron, sign, sample)

    with monkeypatch.context() as patch:
        patch.setattr(Relaxation, "advance", advance)
        patch.setattr(Relaxation, "neurons", neurons)
        relaxation = crown_relaxation(network, box, tuning=tuning)
    return relaxation, {index: (intervals[index], table) for index, table in asked.items()}


@networks
def test_a_side_is_left_out_only_where_the_other_decides(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    relaxation, asked = _asked(*_case(name), monkeypatch)
    spared = torch.zeros(2, dtype=torch.long)
    for index, (interval, (lower, upper)) in asked.items():
        node, found = relaxation.network.nodes[index], relaxation.pre[index].flat()
        assert isinstance(node, Activation)
        chosen = unstable(node, interval).flatten(1)
        assert torch.equal(lower | upper, chosen)
        assert bool((found.upper[chosen & ~lower] <= 0).all() and (found.lower[chosen & ~upper] >= 0).all())
        assert index == relaxation.network.last_activation or torch.equal(upper, chosen)
        given = interval.flat()
        assert torch.equal(given.lower[~lower], found.lower[~lower])
        assert torch.equal(given.upper[~upper], found.upper[~upper])
        spared += torch.stack([chosen & ~lower, chosen & ~upper]).sum((1, 2))
    assert bool((spared > 0).all())
    for lower, upper in (sides for _, sides in _asked(*_case(name), monkeypatch, NEVER)[1].values()):
        assert torch.equal(lower, upper)


@pytest.mark.parametrize("act", ["leaky", "tanh"])
def test_no_side_of_an_activation_other_than_relu_waits(act: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines of other activations need both bounds."""
    network = mlp(ACTS[act], sizes=(6, 24, 24, 3))
    for lower, upper in (sides for _, sides in _asked(network, boxes(network), monkeypatch)[1].values()):
        assert torch.equal(lower, upper) and bool(lower.any())


def test_sides_wait_in_samples_that_have_enough_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples with few such sides are bounded on both sides at once; in the middle layer only lower sides may wait."""
    network, box = _case("mlp")
    middle, enough = network.activations[1], 4
    tuning = Tuning(waiting_coefficients=enough * receptive(network)[network.nodes[middle].inputs[0]])
    relaxation, asked = _asked(network, box, monkeypatch, tuning)
    interval, (lower, upper) = asked[middle]
    many = (upper & (interval.lower < -interval.upper)).sum(1) > enough
    assert bool(many.any()) and not bool(many.all())
    assert torch.equal(lower[~many], upper[~many])
    assert bool((relaxation.pre[middle].upper[upper & ~lower] <= 0).all() and (upper & ~lower).sum(1)[many].any())
