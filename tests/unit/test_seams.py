"""The interface of bounds for branch and bound: splits, known bounds, rows of several nodes, resumed searches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.unit.test_bounds import ACTS, boxes, images, mlp, points
from tests.unit.test_bounds import rows as output_rows
from verifiable_relu.bounds import Ascent, Bounds, Splits, ascend, crown_relaxation
from verifiable_relu.network.graph import Network

NETWORKS: dict[str, Callable[[], Network]] = {
    "mlp": lambda: mlp(ACTS["relu"], sizes=(6, 16, 16, 16, 3)),
    "leaky": lambda: mlp(ACTS["leaky"], sizes=(6, 16, 16, 16, 3)),
    "images": lambda: images(ACTS["relu"]),
}
networks = pytest.mark.parametrize("name", NETWORKS)


def _values(network: Network, box: Bounds, count: int = 400) -> tuple[Tensor, list[Tensor]]:
    """Points of the boxes, (points, batch, *shape), and the value of every node at them."""
    x = torch.cat([points(box) for _ in range(max(1, count // len(points(box))))])
    return x, [v.unflatten(0, x.shape[:2]) for v in network.values(x.flatten(0, 1))]


@networks
def test_bounds_with_splits_hold_at_the_points_that_the_splits_allow(name: str) -> None:
    network = NETWORKS[name]()
    box, generator = boxes(network, batch=3), torch.Generator().manual_seed(1)
    plain = crown_relaxation(network, box)
    x, values = _values(network, box)
    phase, allowed = {}, torch.ones(x.shape[:2], dtype=torch.bool)
    for index in network.activations[:2]:
        node, pre = network.nodes[index], plain.pre[index]
        free = ((pre.lower < 0) & (pre.upper > 0)).flatten(1)
        chosen = free & (torch.rand(free.shape, generator=generator) < 2 / free.sum(1, keepdim=True).clamp(min=1))
        sign = torch.where(torch.rand(free.shape, generator=generator) < 0.5, -1, 1)
        phase[index] = (sign * chosen).to(torch.int8)
        allowed &= (values[node.inputs[0]].flatten(2) * phase[index] >= 0).all(2)
    split = crown_relaxation(network, box, splits=Splits(phase))
    assert int(allowed.sum()) > 10
    for index, pre in split.pre.items():
        value = values[network.nodes[index].inputs[0]]
        inside = (pre.lower <= value) & (value <= pre.upper)
        assert bool(inside.flatten(2).all(2)[allowed].all())
        assert bool((pre.upper[phase[index].reshape(pre.upper.shape) < 0] <= 0).all()) if index in phase else True
    matrix, sample = output_rows(network, len(box.lower))
    lower, before = (r.outputs(matrix, sample).reshape(3, -1) for r in (split, plain))
    reached = torch.einsum("ro,pbo->pbr", matrix[: lower.shape[1]], values[-1].flatten(2))
    assert bool((lower <= reached)[allowed].all())
    assert bool((lower > before + 1e-6).any())


def test_a_box_in_which_a_split_leaves_nothing_is_noticed() -> None:
    network = NETWORKS["mlp"]()
    box = boxes(network, batch=4)
    pre = crown_relaxation(network, box).pre
    index = network.activations[1]
    phase = torch.zeros(4, network.nodes[index].size, dtype=torch.int8)
    stable = (pre[index].lower > 0).nonzero()
    sample, neuron = stable[0].tolist()
    phase[sample, neuron] = -1
    empty = crown_relaxation(network, box, splits=Splits({index: phase})).nodes.empty()
    assert empty.tolist() == [i == sample for i in range(4)]
    assert not bool(crown_relaxation(network, box).nodes.empty().any())


@networks
def test_known_bounds_are_tightened_further(name: str) -> None:
    """Known bounds of one activation's input are used, and the inputs of the others are still bounded by rows."""
    network = NETWORKS[name]()
    box = boxes(network, batch=3)
    plain = crown_relaxation(network, box)
    first, second = network.activations[:2]
    middle = (plain.pre[first].lower + plain.pre[first].upper) / 2
    known = {first: Bounds(middle - 0.1, middle + 0.1)}
    found = crown_relaxation(network, box, known=known)
    assert bool((found.pre[first].lower >= known[first].lower).all())
    assert bool((found.pre[first].upper <= known[first].upper).all())
    width = [(r.pre[second].upper - r.pre[second].lower).mean() for r in (plain, found)]
    assert float(width[1]) < 0.9 * float(width[0])
    again = crown_relaxation(network, box, known=plain.pre)
    for index, bounds in again.pre.items():
        assert bool((bounds.lower >= plain.pre[index].lower).all() and (bounds.upper <= plain.pre[index].upper).all())


@networks
def test_rows_of_several_nodes_are_bounded_together(name: str) -> None:
    """The joint bounds hold at sampled points, and are no looser than those of each node's rows alone."""
    network = NETWORKS[name]()
    box = boxes(network, batch=2)
    relaxation = crown_relaxation(network, box)
    last, middle = len(network.nodes) - 1, network.nodes[network.activations[1]].inputs[0]
    generator = torch.Generator().manual_seed(0)

    def draw(index: int) -> Tensor:
        return torch.randn(6, *network.nodes[index].shape, generator=generator, dtype=torch.float64)

    outer, inner, sample = draw(last), draw(middle), torch.arange(2).repeat_interleave(3)
    both = relaxation.lower(last, outer, sample, also={middle: inner})[0]
    apart = relaxation.lower(last, outer, sample)[0] + relaxation.lower(middle, inner, sample)[0]
    assert bool((both >= apart - 1e-6).all()) and bool((both > apart + 1e-6).any())
    _, values = _values(network, box)
    reached = sum((values[i][:, sample] * rows).flatten(2).sum(2) for i, rows in ((last, outer), (middle, inner)))
    assert bool((both <= reached.amin(0)).all())


@networks
def test_a_search_starts_where_another_ended(name: str) -> None:
    network = NETWORKS[name]()
    box = boxes(network, batch=2)
    relaxation = crown_relaxation(network, box)
    matrix, sample = output_rows(network, 2)
    last = len(network.nodes) - 1
    rows = matrix.reshape(-1, *network.output_shape)
    first = ascend(relaxation, last, rows, sample, Ascent(steps=8), keep=True)
    none = ascend(relaxation, last, rows, sample, Ascent(steps=0), start=first.slopes)
    more = ascend(relaxation, last, rows, sample, Ascent(steps=4), start=first.slopes)
    torch.testing.assert_close(none.lower, first.lower, rtol=0, atol=1e-9)
    assert bool((more.lower >= first.lower - 1e-5).all())
    assert float((first.lower - relaxation.outputs(matrix, sample)).max()) > 1e-3


@networks
def test_the_minimiser_is_where_the_linear_bound_is_least(name: str) -> None:
    network = NETWORKS[name]()
    box = boxes(network, batch=2)
    relaxation = crown_relaxation(network, box)
    matrix, sample = output_rows(network, 2)
    rows = matrix.reshape(-1, *network.output_shape)
    found = ascend(relaxation, len(network.nodes) - 1, rows, sample, Ascent(steps=3), keep=True)
    assert found.coefficients is not None and found.minimiser is not None
    inputs = relaxation.bounds(relaxation.nodes.start).flat()
    low, high = inputs.lower[sample], inputs.upper[sample]
    assert bool(((found.minimiser >= low - 1e-9) & (found.minimiser <= high + 1e-9)).all())
    ends = torch.where(found.coefficients > 0, low, high)
    chosen = found.coefficients != 0
    torch.testing.assert_close(found.minimiser[chosen], ends[chosen], rtol=1e-9, atol=1e-9)
