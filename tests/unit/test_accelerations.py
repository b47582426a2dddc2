"""Each acceleration of bound propagation, switched on and off: bounds are equal, or nearly so if float32 takes part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.support.draws import draws
from tests.unit.test_bounds import ACTS, Random, boxes, images, mlp, points
from tests.unit.test_bounds import rows as output_rows
from verifiable_relu.bounds import PLAIN, TUNING, Bounds, Tuning, crown_relaxation, interval_bounds
from verifiable_relu.bounds.operators import ConvolutionOperator, needed
from verifiable_relu.bounds.windowed import Window, seen
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


def pooled() -> Network:
    """Images that are averaged, channel by channel, and go through a convolution in groups; outputs are an image."""
    rng, build, relu = Random(3), Builder((2, 15, 14)), ACTS["relu"]
    x = relu(build, build.conv2d(0, rng.normal(4, 2, 3, 3) / 3, rng.normal(4) / 2, "conv1", padding=(1, 1, 1, 1)))
    mean = torch.full((4, 1, 2, 2), 0.25, dtype=torch.float64)
    x = build.conv2d(x, mean, None, "mean", stride=(2, 2), padding=(0, 1, 1, 0), groups=4)
    x = relu(build, build.conv2d(x, rng.normal(4, 4, 3, 3) / 4, rng.normal(4) / 2, "conv2", padding=(1, 0, 1, 1)))
    x = build.conv2d(x, rng.normal(6, 2, 2, 2) / 3, rng.normal(6) / 2, "groups", stride=(1, 2), groups=2)
    before = x = relu(build, x)
    x = relu(build, build.conv2d(x, rng.normal(6, 6, 3, 3) / 4, rng.normal(6) / 2, "conv3", padding=(1, 1, 1, 1)))
    x = build.add(x, before, "shortcut")
    return build.network(build.conv2d(x, rng.normal(2, 6, 1, 1), rng.normal(2), "conv4"), name="pooled")


def turned() -> Network:
    """Images whose channels come last before an activation, so that its neurons are rows of whole images at first."""
    rng, build, relu = Random(4), Builder((2, 13, 12)), ACTS["relu"]
    x = relu(build, build.conv2d(0, rng.normal(3, 2, 3, 3) / 3, rng.normal(3) / 2, "conv1", padding=(1, 1, 1, 1)))
    x = build.conv2d(x, rng.normal(4, 3, 3, 3) / 3, rng.normal(4) / 2, "conv2", stride=(1, 2), padding=(1, 0, 1, 1))
    x = relu(build, build.permute(x, (1, 2, 0), "last"))
    x = build.reshape(x, (build.nodes[x].size,), "flatten")
    return build.network(build.linear(x, rng.normal(3, build.nodes[x].size) / 9, rng.normal(3), "fc"), name="turned")


def _wide(network: Network) -> Bounds:
    """One box in which many neurons are unstable."""
    several = boxes(network, batch=4)
    return Bounds(several.lower[2:3], several.upper[2:3])


NETWORKS: dict[str, Callable[[], Network]] = {
    "mlp": lambda: mlp(ACTS["relu"], sizes=(6, 24, 24, 24, 3)),
    "images": lambda: images(ACTS["relu"]),
    "smooth images": lambda: images(ACTS["gelu5"]),
    "narrow mlp": lambda: _narrowed(mlp(ACTS["relu"], sizes=(6, 24, 24, 24, 3))),
    "narrow images": lambda: _narrowed(images(ACTS["relu"])),
    "sparse": _sparse,
    "pooled images": pooled,
    "turned images": turned,
}

EAGER = Tuning(
    active_share=1.0,
    window_share=1.0,
    window_start=1.0,
    float32_inputs=1,
    interval_samples=1,
    interval_products=1,
    interval_widening=1e-4,
    sparse_share=0.1,
    sparse_weights=1,
)
"""Whatever can be faster anywhere is used."""

OFF: dict[str, Callable[[Tuning], Tuning]] = {
    "float32": lambda tuning: replace(tuning, float32=False),
    "windows": lambda tuning: replace(tuning, windows=False),
    "rows that become windows": lambda tuning: replace(tuning, window_start=0),
    "restriction to possibly active neurons": lambda tuning: replace(tuning, restrict=False),
    "compressed rows": lambda tuning: replace(tuning, sparse_weights=1 << 60),
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
    "windows": ("images", "smooth images", "pooled images", "turned images"),
    "rows that become windows": ("images", "pooled images", "turned images"),
    "restriction to possibly active neurons": ("mlp", "images", "sparse"),
    "compressed rows": ("sparse",),
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
    for index, bounds in fast[1].items():
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


def test_windows_go_through_convolutions_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[int] = []

    def before(window: Window, operator: ConvolutionOperator) -> Window:
        passed.append(operator.node.groups)
        return right(window, operator)

    right = Window.before
    monkeypatch.setattr(Window, "before", before)
    _found(pooled(), _wide(pooled()), replace(EAGER, float32=False))
    assert {1, 2, 4} <= set(passed)


@pytest.mark.parametrize("seed", range(draws(20)))
def test_rows_in_windows_are_the_rows(seed: int) -> None:
    """Those with a few coefficients near each other, at edges too, and one without any."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda most: int(torch.randint(most, (), generator=generator))  # noqa: E731
    rows = torch.zeros(6, 2, 9, 8, dtype=torch.float64)
    for row in rows[1:]:
        top, left = draw(9), draw(8)
        part = row[:, top : top + 3, left : left + 2]
        part.copy_(torch.randn(part.shape, generator=generator) * (torch.rand(part.shape, generator=generator) < 0.6))
    found = seen(rows, 6, TUNING)
    assert found is not None and torch.equal(found.dense((2, 9, 8)), rows)
    assert all(size <= most for size, most in zip(found.grid.size, (3, 2), strict=True))
    rows[0, 0, 0, 0] = rows[0, 1, 8, 7] = 1
    assert seen(rows, 71, TUNING) is None and seen(rows[:0], 6, TUNING) is None


def test_neurons_behind_a_transposition_are_bounded_in_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[int] = []

    def before(window: Window, operator: ConvolutionOperator) -> Window:
        passed.append(len(window))
        return right(window, operator)

    right = Window.before
    monkeypatch.setattr(Window, "before", before)
    network = turned()
    _found(network, _wide(network), replace(EAGER, float32=False, window_start=0.1))
    many = len(passed)
    _found(network, _wide(network), replace(EAGER, float32=False, window_start=0))
    assert len(passed) < 2 * many


@pytest.mark.parametrize("seed", range(draws(8)))
def test_neurons_that_outputs_do_not_depend_on_are_left_out_of_bounds(seed: int) -> None:
    """Numbers in their place change nothing, and neither do their bounds."""
    network, generator = pooled(), torch.Generator().manual_seed(seed)
    outputs = torch.zeros(network.output_size, dtype=torch.bool)
    outputs[torch.randperm(network.output_size, generator=generator)[: 1 + seed % 2]] = True
    only = needed(network, outputs, torch.float64)
    assert only is not None and list(only) == list(network.activations)
    assert all(int(part.sum()) > 0 for part in only.values())
    assert any(not bool(part.all()) for part in only.values())
    x = torch.randn(1, *network.input_shape, generator=generator).double()
    for index, part in only.items():
        values: list[torch.Tensor] = []
        for at, node in enumerate(network.nodes):
            value = node.forward(*(values[i] for i in node.inputs)) if node.inputs else x
            if at == index:
                noise = 1 + torch.rand(1, node.size, generator=generator).double()
                value = (value.flatten(1) + torch.where(part, 0.0, noise)).reshape(value.shape)
            values.append(value)
        torch.testing.assert_close(values[-1].flatten()[outputs], network(x).flatten()[outputs])
    box = _wide(network)
    matrix = torch.eye(network.output_size, dtype=torch.float64)[outputs]
    sample = torch.zeros(len(matrix), dtype=torch.long)
    with torch.no_grad():
        every, mine = crown_relaxation(network, box), crown_relaxation(network, box, only=only)
        torch.testing.assert_close(mine.outputs(matrix, sample), every.outputs(matrix, sample), rtol=1e-9, atol=1e-9)
    for index, part in only.items():
        one, other = mine.pre[index], every.pre[index]
        flat = part.reshape(one.lower.shape)
        torch.testing.assert_close(one.lower[flat], other.lower[flat], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(one.upper[flat], other.upper[flat], rtol=1e-9, atol=1e-9)
        assert bool((one.lower <= other.lower + 1e-9).all()) and bool((one.upper >= other.upper - 1e-9).all())
    assert any(bool((mine.pre[i].lower < every.pre[i].lower - 1e-3).any()) for i in only)


def test_every_neuron_of_a_dense_network_is_needed() -> None:
    network = mlp(ACTS["relu"], sizes=(6, 24, 24, 24, 3))
    assert needed(network, torch.tensor([True, False, False]), torch.float64) is None
    build = Builder((2,))
    affine = build.network(build.linear(0, torch.eye(2).double(), None, "affine"), name="affine")
    assert needed(affine, torch.tensor([True, False]), torch.float64) is None
    assert needed(pooled(), torch.ones(pooled().output_size, dtype=torch.bool), torch.float64) is None
