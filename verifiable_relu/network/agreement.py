"""Whether a network computes what its source computes, to within rounding.

The network is evaluated in float64, on the CPU (not every device has float64), together with a bound of how far the
source, which computes in a precision of unit roundoff u, may be off by rounding (a running error analysis: Higham,
Accuracy and Stability of Numerical Algorithms, section 3.3). With e the bound of a node's input x, and y its value:

    y = W·x + b of sums of K terms      |W|·(e + c·(|x| + e)) + c·|b|, c = (K + 32)·u
    ReLU, LeakyReLU of slope s          max(1, |s|)·e + 8u·|y|
    λ-GELU, sigmoid, tanh               1.13·e, e/4, e, and 8u·(|x| + e), 8u, 8u·(|x| + e)
    x₁ + x₂                             e₁ + e₂ + 2u·(|x₁| + e₁ + |x₂| + e₂)

1.13, 1/4 and 1 are bounds of the derivatives. The constants 32 and 8 leave room for how libraries compute: elementary
functions of a few units in the last place, batch normalisation as one multiplication and one addition, a division as
a multiplication by the reciprocal. A convolution may be computed by a transform, whose errors spread within an
image: there the largest bound of a channel counts for all of it.

This is a test of whether the graph is the right one, not a proof: it must never refuse a network for rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from verifiable_relu.errors import UnsupportedError
from verifiable_relu.network.graph import (
    Activation,
    Add,
    Affine,
    Conv2d,
    Gelu,
    LeakyRelu,
    Network,
    Node,
    Relu,
    Sigmoid,
    Tanh,
)

_SLACK = 32
"""Rounding errors of an affine map beyond those of its sums."""

_FEW = 8
"""Rounding errors of an activation."""


@dataclass(frozen=True)
class Parting:
    """Where a network and its source differ by more than rounding explains.

    Attributes:
        node: the first such node.
        expected, found: the source's value and the network's.
        bound: the largest difference that rounding explains.
    """

    node: Node
    expected: float
    found: float
    bound: float

    def __str__(self) -> str:
        numbers = f"{self.expected:.9g} there, and {self.found:.9g} here"
        return f"{numbers} (rounding explains a difference of {self.bound:.2g})"


@torch.no_grad()
def parting(network: Network, x: Tensor, seen: Mapping[int, Tensor]) -> Parting | None:
    """The first node at which the source's values are not the network's; None where all agree.

    A node that was seen passes the source's value on, as exact, so that each part of the network is held against its
    own rounding only. With the output alone in ``seen``, all rounding errors on the way add up.

    Args:
        network: to be believed or not.
        x: inputs, (batch, *input_shape), in the source's precision.
        seen: the source's values, (batch, *shape), by node index. Where they overflow, nothing is compared.
    """
    unit, tiny = torch.finfo(x.dtype).eps / 2, torch.finfo(x.dtype).tiny
    huge = torch.finfo(x.dtype).max / 4
    values: list[Tensor] = []
    errors: list[Tensor] = []
    last = {source: index for index, node in enumerate(network.nodes) for source in node.inputs}
    for index, node in enumerate(network.nodes):
        if index == 0:
            value = x.to("cpu", torch.float64)
            error = torch.zeros_like(value)
        else:
            sources = [(values[i], errors[i]) for i in node.inputs]
            value, error = _step(node.map_tensors(lambda t: t.detach().to("cpu", torch.float64)), sources, unit, tiny)
            error = torch.where(value.abs() + error < huge, error, torch.inf)
        if index in seen:
            expected = seen[index].to("cpu", torch.float64)
            close = (error == torch.inf) | ((expected - value).abs() <= error)
            if not bool(close.all()):
                worst = int((~close).flatten().int().argmax())
                numbers = (float(t.flatten()[worst]) for t in (expected, value, error))
                return Parting(node, *numbers)
            value, error = expected, torch.zeros_like(expected).masked_fill(~expected.isfinite(), torch.inf)
        values.append(value)
        errors.append(error)
        for source in node.inputs:
            if last[source] == index:
                values[source] = errors[source] = value.new_zeros(())
    return None


def _step(node: Node, sources: list[tuple[Tensor, Tensor]], unit: float, tiny: float) -> tuple[Tensor, Tensor]:
    """A node's value, and the bound of its error; infinite where nothing is known."""
    value = node.forward(*(v for v, _ in sources))
    error = _error(node, value, sources, unit) + tiny
    # An infinite error times a weight of zero is none, but not a number either.
    return value.nan_to_num(0.0), torch.where(value.isnan() | error.isnan(), torch.inf, error)


def _error(node: Node, value: Tensor, sources: list[tuple[Tensor, Tensor]], unit: float) -> Tensor:
    size = [v.abs() + e for v, e in sources]
    x, e = size[0], sources[0][1]
    match node:
        case Affine():
            part = (node.terms + _SLACK) * unit + node.weight_error
            error = node.absolute(e + part * x) + part * node.offset_magnitude()
            return error.amax((2, 3), keepdim=True).expand_as(value) if isinstance(node, Conv2d) else error
        case Add():
            return e + sources[1][1] + 2 * unit * (x + size[1])
        case Relu():
            return e + _FEW * unit * value.abs()
        case LeakyRelu(slope=slope):
            return slope.abs().clamp_min(1) * e + _FEW * unit * value.abs()
        case Gelu():
            return 1.13 * e + _FEW * unit * x
        case Sigmoid():
            return e / 4 + _FEW * unit
        case Tanh():
            return e + _FEW * unit * x
        case Activation():
            raise UnsupportedError("cannot be compared", place=f"node '{node.name}' ({node.op})")
        case _:
            return node.forward(e)
