"""Whether a network computes what its source does: the two evaluated at the same points, with what rounding explains.

Wrong verdicts have come from networks that were read wrongly, not only from wrong bounds, so that a network is believed
once it has been compared. Two evaluations of one function in floating point with unit roundoff u differ by

    |Δy| ≲ √n·u·(|W|·|x| + |b|) + |W|·|Δx|     for y = W·x + b, a sum of n products

if rounding errors are as good as independent (N. J. Higham, T. Mary, A New Approach to Probabilistic Rounding Error
Analysis, SIAM J. Sci. Comput. 41, 2019, A2815), and an activation passes Δx on by at most its Lipschitz constant. What
is more than ``MARGIN`` times that is a misreading. This is a check of reading: no bound and no verdict rests on the
numbers here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from verifiable_relu.errors import InputError
from verifiable_relu.network.graph import (
    Add,
    Affine,
    Conv2d,
    Gelu,
    Hardened,
    LeakyRelu,
    Linear,
    Network,
    Node,
    Permute,
    Relu,
    Reshape,
    Scale,
    Shape,
    Sigmoid,
    Tanh,
)

MARGIN = 16.0
"""How many times the expected rounding error two evaluations may differ by."""

_FUNCTION_UNITS = 16.0
"""Error of a library's exp, erf or tanh, in units of roundoff of 1."""


@dataclass(frozen=True)
class Rounded:
    """A value as computed, (batch, *shape), and the rounding error to expect in it, broadcastable to it."""

    value: Tensor
    error: Tensor


def sample_points(shape: Shape, dtype: torch.dtype) -> Tensor:
    """Inputs at which networks are compared: zero, pixels in [0, 1], and normal draws of deviation 1 and 8, 3 of each.

    Args:
        shape: of one sample.
        dtype: of the points, which are float32 numbers in any case.

    Returns:
        (10, *shape); the same for every call.
    """
    generator = torch.Generator().manual_seed(0)
    pixels = torch.rand((3, *shape), generator=generator)
    normal = torch.randn((6, *shape), generator=generator)
    normal[3:] *= 8
    return torch.cat([torch.zeros((1, *shape)), pixels, normal]).to(dtype)


def evaluate(nodes: Sequence[Node], x: Tensor, unit: float) -> Iterator[Rounded]:
    """Every node's value, in node order, with the rounding error to expect.

    Args:
        nodes: in topological order, the input first, their tensors in the dtype of x.
        x: (batch, *input shape).
        unit: the unit roundoff of the coarser of the two evaluations that are compared.
    """
    last_use = {source: index for index, node in enumerate(nodes) for source in node.inputs}
    known: dict[int, Rounded] = {}
    for index, node in enumerate(nodes):
        inputs = [known[source] for source in node.inputs]
        with torch.no_grad():
            known[index] = _passed(node, inputs, unit) if inputs else Rounded(x, torch.zeros((), dtype=x.dtype))
        yield known[index]
        for source in node.inputs:
            if last_use[source] == index:
                known.pop(source, None)


def differences(found: Tensor, expected: Rounded) -> Tensor:
    """Where numbers that were found are not those expected: (batch, size) bool.

    What is not finite in either counts as equal: an overflow says nothing, since the other may have added in another
    order.

    Args:
        found: (batch, size).
        expected: as many numbers per sample, in any shape.

    Raises:
        InputError: if they are not as many.
    """
    value = expected.value.flatten(1)
    if found.shape != value.shape:
        raise InputError(f"{found.shape[1]} numbers are computed where {value.shape[1]} were read")
    error = expected.error.expand_as(expected.value).flatten(1)
    allowed = MARGIN * error + torch.finfo(value.dtype).tiny
    known = torch.isfinite(found) & torch.isfinite(value) & torch.isfinite(allowed)
    return known & ((found - value).abs() > allowed)


def first_difference(network: Network, points: Tensor, found: Tensor, unit: float) -> int | None:
    """The number of a point at which a network and its source differ; None if there is none.

    Args:
        network: as it was read.
        points: (batch, *input shape).
        found: what the source computes there, (batch, output size).
        unit: the unit roundoff in which the source computes.

    Raises:
        InputError: if the numbers of outputs differ.
    """
    typed = network.to(points.dtype)
    *_, expected = evaluate(typed.nodes, points, max(unit, torch.finfo(points.dtype).eps / 2))
    differ = differences(found, expected).any(1)
    return int(differ.nonzero()[0]) if bool(differ.any()) else None


def _passed(node: Node, inputs: Sequence[Rounded], unit: float) -> Rounded:
    """What a node makes of values that carry errors."""
    if isinstance(node, Affine):
        return _affine(node, inputs[0], unit)
    x = inputs[0]
    value = node.forward(*(given.value for given in inputs))
    match node:
        case Add():
            error = x.error + inputs[1].error + unit * value.abs()
        case Reshape() | Permute():
            error = node.forward(x.error.expand_as(x.value))
        case Relu() | Hardened():
            error = x.error
        case LeakyRelu():
            error = x.error * node.slope.abs().clamp(min=1) + unit * value.abs()
        case Sigmoid() | Tanh():
            error = x.error + _FUNCTION_UNITS * unit
        case Gelu():
            # The slope of x·Φ(λx) lies in [−0.12890, 1.12890] for every λ.
            error = 1.1290 * x.error + _FUNCTION_UNITS * unit * x.value.abs()
        case _ if len(inputs) == 1:
            # The error function, of slope 2/√π at most.
            error = 2 / math.sqrt(math.pi) * x.error + _FUNCTION_UNITS * unit
        case _:
            # A product.
            y = inputs[1]
            error = x.value.abs() * y.error + y.value.abs() * x.error + x.error * y.error + unit * value.abs()
    return Rounded(value, error)


def _affine(node: Affine, x: Rounded, unit: float) -> Rounded:
    """W·x + b, with |W|·|x| + |b| and |W|·|Δx| for its error."""
    sizes = torch.cat([x.value.abs(), x.error.expand_as(x.value)])
    match node:
        case Linear():
            # Not the node's own product: a sparse copy of the weight takes longer to make than one use of it saves.
            value = F.linear(x.value, node.weight, node.bias)
            product, offset = F.linear(sizes, node.weight.abs()), node.bias.abs()
        case Conv2d():
            value = node.forward(x.value)
            product = replace(node, weight=node.weight.abs(), bias=torch.zeros_like(node.bias)).forward(sizes)
            offset = node.bias.abs()[:, None, None]
        case Scale():
            value = node.forward(x.value)
            product = node.scale.abs() * sizes
            offset = (node.scale * node.center).abs() + node.shift.abs()
        case _:
            raise NotImplementedError(type(node).__name__)
    size, spread = product.chunk(2)
    return Rounded(value, spread + (math.sqrt(node.terms + 2) * unit + node.weight_error) * (size + offset))
