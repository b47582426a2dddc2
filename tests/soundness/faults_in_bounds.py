"""Mistakes that someone could make in the bounds, each of which some kind of soundness test must catch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from verifiable_relu.bounds import Bounds, Lines
from verifiable_relu.bounds.forward import NodeBounds
from verifiable_relu.bounds.kinds import of_samples
from verifiable_relu.bounds.maxima import Between
from verifiable_relu.bounds.operators import ConvolutionOperator, Operator
from verifiable_relu.bounds.relaxation import BackwardPass
from verifiable_relu.bounds.slack import LineStep, ShiftedLines, Slack
from verifiable_relu.bounds.windowed import Coefficients, Grid, Stepped, Window
from verifiable_relu.bounds.zonotope import Mirrors
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Activation, Affine, Conv2d, Extreme, Linear, Relu

from .fault import Fault, instead

Right = Callable[..., Any]


def _zero(right: Right, *args: object) -> Tensor:
    return torch.zeros_like(right(*args))


def _by_one_candidate(right: Right, *args: object) -> Between:
    found = right(*args)
    return replace(found, slope=torch.ones_like(found.slope), top=torch.zeros_like(found.top))


def _negative(right: Right, *args: object) -> Tensor:
    return -right(*args)


def _flipped(bounds: Bounds) -> Bounds:
    return Bounds(bounds.upper, bounds.lower)


def _flipped_image_of_relu(right: Right, node: Activation, bounds: Bounds) -> Bounds:
    found = right(node, bounds)
    return _flipped(found) if isinstance(node, Relu) else found


def _point_without_bias(right: Right, bounds: NodeBounds, index: int) -> Tensor:
    point = right(bounds, index)
    known = index == bounds.start or not isinstance(bounds.network.nodes[index], Affine)
    return point if known else point - bounds.operators[index].offset


def _image_without_bias(right: Right, operator: Operator[Affine], *args: object) -> Bounds:
    found = right(operator, *args)
    return Bounds(found.lower - operator.offset, found.upper - operator.offset)


def _upper_line_twice(right: Right, *args: object) -> Lines:
    lines = right(*args)
    return Lines(lines.upper_slope, lines.upper_offset, lines.upper_slope, lines.upper_offset)


def _end_of_the_padding(right: Right, node: Conv2d) -> tuple[int, int]:
    _, _, *end = node.padding
    return tuple(end)


def _greatest_for_least(right: Right, *args: object) -> Stepped | None:
    found = right(*args)
    return None if found is None else replace(found, constant=-found.constant)


def _cells_at_inputs(right: Right, grid: Grid, operator: ConvolutionOperator) -> Grid:
    return replace(grid.before(operator.node), size=right(grid, operator).size)


def _floor_of_common_lines(
    right: Right, shifted: ShiftedLines, index: int, lines: Lines, sample: Tensor, rounded: bool
) -> LineStep:
    own = right(shifted, index, lines, sample, rounded)
    return (
        replace(own, floor=shifted.step(index, True, shifted.depth(index)).of_samples(sample).floor) if rounded else own
    )


def _point(shifted: ShiftedLines, index: int, sample: Tensor | None) -> Tensor:
    return of_samples(shifted.bounds.point(index).flatten(1), sample)


def _point_of_the_input(
    right: Right, shifted: ShiftedLines, index: int, lines: Lines, sample: Tensor | None
) -> LineStep:
    found, (source,) = right(shifted, index, lines, sample), shifted.bounds.network.nodes[index].inputs
    return replace(found, floor=found.floor + _point(shifted, index, sample) - _point(shifted, source, sample))


def _not_lifted(right: Right, *args: object) -> LineStep:
    found = right(*args)
    return replace(found, lift=torch.zeros_like(found.lift))


def _lifted_as_at_twice_the_point(
    right: Right, shifted: ShiftedLines, index: int, lines: Lines, sample: Tensor | None
) -> LineStep:
    found, (source,) = right(shifted, index, lines, sample), shifted.bounds.network.nodes[index].inputs
    return replace(found, lift=found.lift + found.rise * _point(shifted, source, sample))


def _all_before(right: Right, slack: Slack, index: int) -> frozenset[int]:
    return frozenset(range(index + 1))


def _first_alone(
    right: Right, walk: BackwardPass, index: int, first: Coefficients, second: Coefficients
) -> Coefficients:
    return first


def _other_window_empty(right: Right, window: Window, other: Window) -> Window:
    return right(window, replace(other, values=torch.zeros_like(other.values)))


def _error_of_rows_left_out(right: Right, *args: object) -> tuple[Tensor, Tensor]:
    error, lost = right(*args)
    return 0 * error, lost


def _next_neuron(right: Right, operator: ConvolutionOperator, *args: Any) -> Window:
    found = right(operator, *args)
    down, across = found.grid.points
    return replace(found, point=(found.point + 1) % (down * across))


def _first_image(right: Right, window: Window, images: Tensor, grid: Grid | None = None) -> Tensor:
    return right(window, images[:1].expand_as(images), grid)


def _last_channel_first(right: Right, operator: ConvolutionOperator, neuron: Tensor, *args: Any) -> Window:
    out, height, width = operator.node.shape
    size = height * width
    return right(operator, (out - 1 - neuron // size) * size + neuron % size, *args)


def _first_box(right: Right, rules: object, index: int, node: Activation, pre: Bounds) -> Lines:
    return right(rules, index, node, Bounds(*(end[:1].expand_as(end) for end in (pre.lower, pre.upper))))


def _outputs_too(right: Right, network: Network) -> Network:
    if not isinstance(network.nodes[-1], Relu):
        return right(network)
    size = network.output_size
    same = Linear(
        name="same",
        inputs=(len(network.nodes) - 1,),
        shape=(size,),
        weight=torch.eye(size, dtype=torch.float64),
        bias=torch.zeros(size, dtype=torch.float64),
    )
    longer = Network((*network.nodes, same))
    found = right(longer)
    return network if found is longer else Network(found.nodes[:-1])


def _columns_added_anyway(right: Right, weight: Tensor, place: Tensor, size: int) -> Tensor:
    return weight.new_zeros(len(weight), size).index_add_(1, place, weight)


def _rounded_product(right: Right, weight: Tensor, bias: Tensor, first: Linear) -> tuple[Tensor, Tensor]:
    return weight @ first.weight, weight @ first.bias + bias


def _never_turned(right: Right, node: Linear) -> Mirrors | None:
    found = right(node)
    return None if found is None else replace(found, turned=torch.zeros_like(found.turned))


def _nearly_mirrored(right: Right, node: Linear) -> Mirrors | None:
    return right(replace(node, weight=node.weight.bfloat16().double(), bias=node.bias.bfloat16().double()))


IN_BOUNDS: tuple[Fault, ...] = (
    Fault(
        "rows through a product leave out what is not linear",
        "smooth corners",
        instead("bounds.rounding:bilinear", _zero),
    ),
    Fault(
        "rows through a product of matrices go to the first factor twice",
        "smooth corners",
        instead("network.nodes:MatMul.to_second", _zero),
    ),
    Fault(
        "outputs that repeat others left out with the repeated neurons",
        "repeats",
        instead("network.simplify:without_repeated", _outputs_too),
    ),
    Fault(
        "columns of repeated neurons added where their sums are rounded",
        "repeats",
        instead("network.simplify:merged_columns", _columns_added_anyway),
    ),
    Fault(
        "two dense layers taken for one where the product is rounded",
        "repeats",
        instead("network.simplify:one_layer", _rounded_product),
    ),
    Fault(
        "a mirrored neuron taken for a repeated one",
        "repeats",
        instead("bounds.zonotope:mirrors", _never_turned),
    ),
    Fault(
        "a neuron taken for the mirror of one with nearly its weights",
        "repeats",
        instead("bounds.zonotope:mirrors", _nearly_mirrored),
    ),
    Fault(
        "lower and upper swapped in an affine image",
        "corners",
        instead("bounds.kinds:affine_image", lambda right, *args: _flipped(right(*args))),
    ),
    Fault(
        "lower and upper swapped in the image of ReLU",
        "corners",
        instead("bounds.activations:image", _flipped_image_of_relu),
    ),
    Fault(
        "a bias dropped in linear bounds",
        "corners",
        instead("bounds.forward:NodeBounds.point", _point_without_bias),
    ),
    Fault(
        "a bias dropped in interval bounds",
        "corners",
        instead("bounds.kinds:affine_image", _image_without_bias),
    ),
    Fault(
        "a bias dropped in interval bounds in float32",
        "corners",
        instead("bounds.operators:Operator.forward32", lambda right, operator, x: operator.linear32(x)),
    ),
    Fault(
        "chord for tangent",
        "corners",
        instead("bounds.activations:relax", _upper_line_twice),
    ),
    Fault(
        "wrong corner when a linear bound meets the box",
        "corners",
        instead("bounds.relaxation:BackwardPass.least", _negative),
    ),
    Fault(
        "wrong side of the padding cut off a convolution's adjoint",
        "corners",
        instead("network.nodes:Conv2d.corner", _end_of_the_padding),
    ),
    Fault(
        "wrong corner where the last convolution is taken in cells",
        "corners",
        instead("bounds.windowed:LastConvolution.step", _greatest_for_least),
    ),
    Fault(
        "wrong corner within windows, in cells",
        "corners",
        instead("bounds.windowed:Windowed.in_cells", _negative),
    ),
    Fault(
        "the cells of a window looked for where its outputs' inputs begin",
        "corners",
        instead("bounds.windowed:Grid.cells_before", _cells_at_inputs),
    ),
    Fault(
        "the constant at the target's point left out",
        "corners",
        instead("bounds.relaxation:value_at_point", _zero),
    ),
    Fault(
        "an activation's point taken for that of its input",
        "corners",
        instead("bounds.slack:ShiftedLines.outward", _point_of_the_input),
    ),
    Fault(
        "the upper line not raised by how far it lies above the lower one at the point",
        "corners",
        instead("bounds.slack:ShiftedLines.outward", _not_lifted),
    ),
    Fault(
        "the upper line raised as about twice the point",
        "corners",
        instead("bounds.slack:ShiftedLines.outward", _lifted_as_at_twice_the_point),
    ),
    Fault(
        "rows' own lower lines taken for those of all rows at the point",
        "agreement",
        instead("bounds.slack:ShiftedLines.own", _floor_of_common_lines),
    ),
    Fault(
        "rounding errors of all nodes before a target taken for covered by it",
        "corners",
        instead("bounds.slack:Slack.covered", _all_before),
    ),
    Fault(
        "rounding of coefficients in float32 left out",
        "corners",
        instead("bounds.rounding:backward_single", _zero),
    ),
    Fault(
        "rows of one of two nodes alone where both use a third",
        "corners",
        instead("bounds.relaxation:BackwardPass.merged", _first_alone),
    ),
    Fault(
        "rows of one of two nodes alone where both use a third, within windows",
        "corners",
        instead("bounds.windowed:Window.plus", _other_window_empty),
    ),
    Fault(
        "rounding of radii in float32 left out",
        "corners",
        instead("bounds.rounding:interval_affine", lambda right, *given: right(*given[:4])),
    ),
    Fault(
        "rounding of centres in float32 left out",
        "corners",
        instead("bounds.rounding:interval_single", lambda right, size, radius, terms: radius),
    ),
    Fault(
        "rounding of rows by intervals left out",
        "corners",
        instead("bounds.rounding:interval_rows", _error_of_rows_left_out),
    ),
    Fault(
        "the line above a maximum below its other candidates",
        "corners",
        instead("bounds.maxima:Between.of", _by_one_candidate),
    ),
    Fault(
        "the ends of a maximum those of a minimum",
        "corners",
        instead(
            "bounds.kinds:IMAGES",
            lambda right, node, *args: right(replace(node, sign=-node.sign), *args),
            Extreme,
        ),
    ),
    Fault(
        "rows in any order taken for rows in turn",
        "corners",
        instead("bounds.tuning:in_turn", lambda right, sample, samples: len(sample) % samples == 0),
    ),
    Fault(
        "the window of a neighbouring neuron",
        "corners",
        instead("bounds.windowed:kernels", _next_neuron),
    ),
    Fault(
        "windows of the first box for rows of all",
        "corners",
        instead("bounds.windowed:Window.of", _first_image),
    ),
    Fault(
        "the kernel of another channel",
        "corners",
        instead("bounds.windowed:kernels", _last_channel_first),
    ),
    Fault(
        "stale intermediate bound in a relaxation: that of the batch's first box",
        "agreement",
        instead("bounds.forward:Rules.lines", _first_box),
    ),
    Fault(
        "outward rounding left out",
        "corners",
        instead("rounding:unit_roundoff", lambda right, dtype: 0.0),
    ),
    Fault(
        "the line through a kink rounded out of the slopes on either side",
        "boundary",
        instead("bounds.activations:kink_slope", lambda right, left, weight: left + weight * (1 - left)),
    ),
    Fault(
        "the error of stored weights ignored in bounds",
        "boundary",
        instead("bounds.rounding:weight_share", lambda right, node: 0.0),
    ),
)
