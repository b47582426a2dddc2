"""Convolutions pulled back in float32: whole images, windows and cells of one stride agree with the plain adjoint."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.support.float32_cases import GEOMETRIES, Draw, Geometry, convolution
from verifiable_relu.bounds import TUNING, Bounds, Relaxation, rounding
from verifiable_relu.bounds.operators import ConvolutionOperator
from verifiable_relu.bounds.windowed import Chunk, LastConvolution, kernels, windows
from verifiable_relu.network.build import Builder
from verifiable_relu.network.nodes import Conv2d
from verifiable_relu.rounding import gamma


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("channels", (3, 17))
def test_the_adjoint_in_float32_is_the_adjoint(geometry: Geometry, channels: int) -> None:
    """For small integers, the adjoint in float32 equals the exact one entry by entry."""
    draw = Draw(0)
    net, operator = convolution(draw, geometry, channels)
    a = draw.integers(5, *operator.node.shape)
    found, plain = (operator.adjoint(rows, net.input_shape) for rows in (a.float(), a))
    assert found.dtype == torch.float32 and torch.equal(found.double(), plain)
    assert torch.equal(plain, operator.node.adjoint(a, net.input_shape))
    x = draw.integers(1, *net.input_shape)
    assert torch.equal((found * x).flatten(1).sum(1), (a * operator.node.linear(x)).flatten(1).sum(1))


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_coefficients_of_cells_and_images_in_cells_make_the_product(geometry: Geometry) -> None:
    """For small integers, the product a·(W·x) taken cell by cell is exact, for whole images and for windows."""
    draw = Draw(2)
    net, operator = convolution(draw, geometry)
    node = operator.node
    a, x = draw.integers(5, *node.shape), draw.integers(1, *net.input_shape)
    right = (a * node.linear(x)).flatten(1).sum(1)
    cells, image = operator.cells(a.float()), operator.image_in_cells(x)
    assert cells.shape[1:] == image.shape[1:] == operator.cells_shape(node.shape[1:])
    assert torch.equal((cells * image).flatten(1).sum(1), right)
    outputs = windows(node.shape, torch.arange(node.size), a[0].flatten(), TUNING)
    seen = replace(outputs.grid, size=operator.cells_shape(outputs.grid.size)[1:]).table(image)
    found = (operator.cells(outputs.values.float()) * seen[outputs.point]).flatten(1).sum(1)
    assert torch.equal(found, (a[0] * node.linear(x)[0]).flatten())


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("after", GEOMETRIES[:5], ids=str)
def test_windows_of_a_later_convolution_end_in_cells_as_whole_images_end_in_pixels(
    after: Geometry, geometry: Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sums |A|·radius are equal for windows with strides, also for windows partly or entirely beyond the edges."""
    build, draw = Builder((2, *geometry[3])), Draw(3)
    kernel, stride, padding, _ = geometry
    x = build.conv2d(0, draw.integers(3, 2, *kernel), None, "conv", padding=padding, stride=stride)
    _, height, width = build.shape(x)
    kernel, stride, (top, left, bottom, right), _ = after
    top, left = max(top, kernel[0] - height), max(left, kernel[1] - width)
    y = build.conv2d(x, draw.integers(2, 3, *kernel), None, "after", padding=(top, left, bottom, right), stride=stride)
    net = build.network(y, name="two")
    first, second = net.nodes[1:]
    assert isinstance(first, Conv2d) and isinstance(second, Conv2d)
    radius = draw.integers(3, *net.input_shape).abs()
    tuning = replace(TUNING, window_share=math.inf)
    relaxation = Relaxation(net, Bounds(-radius, radius), tuning=tuning)
    nodes, walk = relaxation.nodes, relaxation.backward
    assert LastConvolution(nodes, walk.slack, walk.float32, tuning).operator(1) is nodes.operators[1]
    # What is added to radii is less than can be seen in sums of whole numbers.
    monkeypatch.setattr(rounding, "concretise", lambda radius, *given: radius)
    neuron = torch.arange(second.size)
    rows = torch.eye(second.size, dtype=torch.float64).reshape(-1, *second.shape)
    whole = first.adjoint(second.adjoint(rows, first.shape), net.input_shape).abs().flatten(1)
    operator = nodes.operators[2]
    assert isinstance(operator, ConvolutionOperator)
    for sample in range(3):
        start = kernels(operator, neuron, torch.ones(second.size), tuning)
        stepped = walk.windowed.step(1, start, Chunk(second.size, 1, torch.full((second.size,), sample)))
        assert stepped is not None and stepped.constant is not None and stepped.rows is None
        expected = -(whole @ radius[sample].flatten())
        torch.testing.assert_close(stepped.constant[:, 0].double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_an_entry_of_the_adjoint_sums_no_more_terms_than_are_accounted_for(geometry: Geometry) -> None:
    """With weights of 1, an entry is the number of its terms; one infinite coefficient affects no other row."""
    net, operator = convolution(Draw(0), geometry)
    operator.node.weight.fill_(1)
    a = torch.ones(3, *operator.node.shape)
    counted = operator.adjoint(a, net.input_shape)
    assert counted.dtype == torch.float32 and 1 <= counted.amax() <= operator.adjoint_terms
    a[1] = math.inf
    spoilt = operator.adjoint(a, net.input_shape)
    assert torch.equal(spoilt[::2], counted[::2])
    assert not bool(spoilt[1][counted[1] > 0].isfinite().any())


@pytest.mark.parametrize("channels", (3, 9))
def test_a_product_of_the_adjoint_is_rounded_no_more_often_than_is_accounted_for(channels: int) -> None:
    """The error of an entry is at most γ times its products, for the stated number of roundings, and not far less."""
    share = 0.0
    for seed, geometry in enumerate(GEOMETRIES):
        draw = Draw(seed)
        net, operator = convolution(draw, geometry, channels)
        node = operator.node
        node.weight.copy_(draw(*node.weight.shape).float())
        a = draw(200, *node.shape).float()
        off = (operator.adjoint(a, net.input_shape) - node.adjoint(a.double(), net.input_shape)).abs()
        size = replace(node, weight=node.weight.abs()).adjoint(a.double().abs(), net.input_shape)
        allowed = size * gamma(operator.adjoint_terms, torch.float32)
        assert bool((off <= allowed).all()), geometry
        share = max(share, float((off / allowed).nan_to_num().amax()))
    assert share > 0.1


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_windows_are_pulled_back_as_whole_images_are(geometry: Geometry) -> None:
    """Windows of every neuron are pulled back through two convolutions; at the edges they lie partly in the padding."""
    draw = Draw(1)
    net, operator = convolution(draw, geometry)
    node = operator.node
    same: Geometry = (3, 3), (1, 1), (1, 1, 1, 1), (node.shape[1], node.shape[2])
    _, after = convolution(draw, same, channels=4)
    neuron = torch.arange(after.node.size)
    image = windows(after.node.shape, neuron, 1 - 2.0 * (neuron % 2).double(), TUNING)
    middle = image.before(after)
    inside = middle.dense(node.shape)
    clean = middle.of(torch.ones(1, *node.shape, dtype=torch.float64))
    middle = replace(middle, values=middle.values * clean, clean=True)
    plain, found = middle.before(operator), middle.float().before(operator)
    assert found.grid == plain.grid and found.values.dtype == torch.float32 != plain.values.dtype
    for pulled in (plain, found):
        assert torch.equal(pulled.dense(net.input_shape).double(), node.adjoint(inside, net.input_shape))
