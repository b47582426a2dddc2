"""Each acceleration of bound propagation, switched on and off: bounds are equal, or nearly so if float32 takes part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.unit.test_bounds import ACTS, boxes, images, mlp, points
from tests.unit.test_bounds import rows as output_rows
from verifiable_relu.bounds import PLAIN, TUNING, Bounds, Tuning, crown_relaxation, interval_bounds
from verifiable_relu.network.build import Builder
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Relu


def _narrowed(network: Network) -> Network:
    """A copy of a network with its weights rounded to float32 numbers."""
    return replace(network, nodes=tuple(node.map_tensors(lambda t: t.float().double()) for node in network.nodes))


def _sparse() -> Network:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(40, 60, generator=generator) * (torch.rand(40, 60, generator=generator) < 0.03)
    build = Builder((6,))
    x = build.linear(0, torch.randn(60, 6, generator=generator).double(), None, "in")
    x = build.activation(build.linear(build.activation(x, Relu, "one"), weight.double(), None, "sparse"), Relu, "two")
    return build.network(build.linear(x, torch.randn(3, 40, generator=generator).double(), None, "out"), name="sparse")


NETWORKS: dict[str, Callable[[], Network]] = {
    "mlp": lambda: mlp(ACTS["relu"], sizes=(6, 24, 24, 24, 3)),
    "images": lambda: images(ACTS["relu"]),
    "smooth images": lambda: images(ACTS["gelu5"]),
    "narrow mlp": lambda: _narrowed(mlp(ACTS["relu"], sizes=(6, 24, 24, 24, 3))),
    "narrow images": lambda: _narrowed(images(ACTS["relu"])),
    "sparse": _sparse,
}

EAGER = Tuning(
    waiting_coefficients=0,
    active_share=1.0,
    window_share=1.0,
    float32_inputs=1,
    interval_samples=1,
    interval_products=1,
    interval_widening=1e-4,
    sparse_share=0.1,
    sparse_weights=1,
    block_samples=1,
    block_terms=1,
    block_bytes=0,
)
"""Whatever can be faster anywhere is used."""

OFF: dict[str, Callable[[Tuning], Tuning]] = {
    "float32": lambda tuning: replace(tuning, float32=False),
    "windows": lambda tuning: replace(tuning, windows=False),
    "restriction to possibly active neurons": lambda tuning: replace(tuning, restrict=False),
    "sides that wait": lambda tuning: replace(tuning, waiting_coefficients=1 << 60),
    "compressed rows": lambda tuning: replace(tuning, sparse_weights=1 << 60),
    "convolutions by blocks": lambda tuning: replace(tuning, block_samples=1 << 60),
    "windows' adjoints as matrices": lambda tuning: replace(tuning, window_matrix_entries=0),
    "all of them": lambda tuning: PLAIN,
}


def _found(network: Network, box: Bounds, tuning: Tuning) -> tuple[list[Bounds], dict[int, Bounds], torch.Tensor]:
    """Interval bounds of nodes, CROWN's bounds of pre-activations, and its bounds of every output and its negative."""
    with torch.no_grad():
        relaxation = crown_relaxation(network, box, tuning=tuning)
        matrix, sample = output_rows(network, len(box.lower))
        return interval_bounds(network, box, tuning=tuning), relaxation.pre, relaxation.outputs(matrix, sample)


CONCERNED = {
    "float32": ("narrow mlp", "narrow images"),
    "windows": ("images", "smooth images"),
    "restriction to possibly active neurons": ("mlp", "images", "sparse"),
    "sides that wait": ("mlp", "images"),
    "compressed rows": ("sparse",),
    "convolutions by blocks": ("images",),
    "windows' adjoints as matrices": ("images",),
    "all of them": tuple(NETWORKS),
}
"""For each acceleration the networks in which it takes effect."""


@pytest.mark.combined
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("tuning", [TUNING, EAGER], ids=["default", "eager"])
@pytest.mark.parametrize("concerned", [(off, name) for off, names in CONCERNED.items() for name in names], ids="-".join)
def test_bounds_are_those_without_the_acceleration(concerned: tuple[str, str], tuning: Tuning, batch: int) -> None:
    off, name = concerned
    network = NETWORKS[name]()
    box = boxes(network, batch=batch)
    # With float32 beside it, every other acceleration adds up other errors.
    float32 = off in ("float32", "all of them") or tuning is TUNING
    tuning = replace(tuning, float32=float32)
    fast, plain = _found(network, box, tuning), _found(network, box, OFF[off](tuning))
    # What float32 adds is a small part of the bounds' width, about 4 here.
    near = {"rtol": 1e-3, "atol": 1e-2} if float32 else {"rtol": 1e-9, "atol": 1e-9}
    for one, other in zip(fast[0], plain[0], strict=True):
        torch.testing.assert_close(one.lower, other.lower, **near)
        torch.testing.assert_close(one.upper, other.upper, **near)
    torch.testing.assert_close(fast[2], plain[2], **near)
    # Of a side that waits for the other the interval may be left.
    for index, bounds in fast[1].items():
        if off not in ("sides that wait", "all of them"):
            torch.testing.assert_close(bounds.lower, plain[1][index].lower, **near)
            torch.testing.assert_close(bounds.upper, plain[1][index].upper, **near)


@pytest.mark.combined
@pytest.mark.parametrize("tuning", [TUNING, EAGER, PLAIN], ids=["default", "eager", "plain"])
@pytest.mark.parametrize("name", NETWORKS)
def test_bounds_hold_at_points_of_the_box(name: str, tuning: Tuning) -> None:
    network = NETWORKS[name]()
    box = boxes(network, batch=2)
    interval, pre, lower = _found(network, box, tuning)
    x = points(box)
    values = [v.unflatten(0, x.shape[:2]) for v in network.values(x.flatten(0, 1))]
    for bounds, value in zip(interval, values, strict=True):
        assert bool((bounds.lower <= value.amin(0)).all() and (value.amax(0) <= bounds.upper).all())
    for index, bounds in pre.items():
        value = values[network.nodes[index].inputs[0]]
        assert bool((bounds.lower <= value.amin(0)).all() and (value.amax(0) <= bounds.upper).all())
    matrix, sample = output_rows(network, len(box.lower))
    reached = (values[-1].flatten(2)[:, sample] * matrix).sum(2)
    assert bool((lower <= reached.amin(0)).all())
