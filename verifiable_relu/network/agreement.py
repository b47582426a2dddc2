"""Whether a network computes what its source computes, to within rounding.

Wrong verdicts have come from networks that were read wrongly, not only from wrong bounds, so that a network is believed
once it has been compared. It is evaluated together with a bound of how far the source, which computes in a precision of
unit roundoff u, may be off by rounding. With e the bound of a node's input x, and y its value:

    y = W·x + b of sums of K terms      |W|·(e + c·(|x| + e)) + c·|b|, c = (min(K, 16·√K) + 32)·u
    ReLU, LeakyReLU of slope s          max(1, |s|)·e + 32u·|y|
    other functions of one variable     the largest slope within e of x, times e, and 32u·(|y| + min(1, |slope·x|))
    λ-GELU, sigmoid, tanh               1.13·e, e/4, e, and 32u·(|x| + e), 32u, 32u·(|x| + e)
    x₁∘x₂ of sums of K terms            |x₁|∘e₂ + e₁∘|x₂| + e₁∘e₂ + c·(|x₁| + e₁)∘(|x₂| + e₂)
    x₁ + x₂                             e₁ + e₂ + 2u·(|x₁| + e₁ + |x₂| + e₂)

This is a running error analysis (N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., SIAM 2002,
section 3.3); in a long sum rounding errors are as good as independent, and grow with √K (N. J. Higham, T. Mary, A New
Approach to Probabilistic Rounding Error Analysis, SIAM J. Sci. Comput. 41, 2019, A2815). 1.13, 1/4 and 1 are bounds of
the derivatives. The constants leave room for how libraries compute: elementary functions of some units in the last
place, batch normalisation as one multiplication and one addition, a division as a multiplication by the reciprocal. A
convolution may be computed by a transform, whose errors spread within an image: there the largest bound of a channel
counts for all of it.

This is a test of whether the graph is the right one, not a proof: no bound and no verdict rests on the numbers here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from verifiable_relu.network.dispatch import Table
from verifiable_relu.network.nodes import (
    FUNCTIONS,
    Add,
    Affine,
    Bilinear,
    Conv2d,
    Gelu,
    Hardened,
    Identity,
    LeakyRelu,
    Linear,
    Node,
    Permute,
    Relu,
    Reshape,
    Scale,
    Shape,
    Sigmoid,
    Smooth,
    Sparse,
    Tanh,
)
from verifiable_relu.network.transient import Division, Erf
from verifiable_relu.rounding import largest, tiny

_INDEPENDENT = 16
"""Times √K: how far a sum of K terms is off where errors are independent, in units of roundoff of its terms."""

_SLACK = 32
"""Rounding errors of an affine map beyond those of its sums."""

_FEW = 32
"""Rounding errors of an activation."""


def sample_points(shape: Shape, dtype: torch.dtype) -> Tensor:
    """Inputs that suit any network: zero, pixels in [0, 1], and normal draws of deviation 1 and 8, 3 of each.

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


Source = tuple[Tensor, Tensor]
"""A node's value and the bound of its error, each (batch, *shape)."""

Step = Callable[[Any, Sequence[Source], float], Source]
"""From a node, its inputs and the unit roundoff to the node's value and error."""


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
def parting(
    nodes: Sequence[Node], x: Tensor, seen: Mapping[int, Tensor], unit: float, dtype: torch.dtype = torch.float64
) -> Parting | None:
    """The first node at which the source's values are not the network's; None where all agree.

    A node that was seen passes the source's value on, as exact, so that each part of the network is held against its
    own rounding only. With the output alone in ``seen``, all rounding errors on the way add up.

    Args:
        nodes: of the network that is to be believed or not, in topological order, the input first.
        x: inputs, (batch, *input_shape), in the source's precision.
        seen: the source's values, (batch, *shape), by node index. Where they overflow, nothing is compared.
        unit: the unit roundoff of the source; where ``dtype`` is no finer than the source, twice that.
        dtype: in which the network is evaluated here.
    """
    smallest, huge = tiny(x.dtype), largest(x.dtype) / 4
    values: list[Tensor] = []
    errors: list[Tensor] = []
    last = {source: index for index, node in enumerate(nodes) for source in node.inputs}
    for index, node in enumerate(nodes):
        if index == 0:
            value = x.to("cpu", dtype)
            error = torch.zeros_like(value)
        else:
            sources = [(values[i], errors[i]) for i in node.inputs]
            value, error = _step(node.map_tensors(lambda t: t.detach().to("cpu", dtype)), sources, unit, smallest)
            error = torch.where(value.abs() + error < huge, error, torch.inf)
        if index in seen:
            expected = seen[index].to("cpu", dtype)
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


def _step(node: Node, sources: Sequence[Source], unit: float, smallest: float) -> Source:
    """A node's value, and the bound of its error; infinite where nothing is known."""
    value, error = STEPS[node](node, sources, unit)
    error = error + smallest
    # An infinite error times a weight of zero is none, but not a number either.
    return value.nan_to_num(0.0), torch.where(value.isnan() | error.isnan(), torch.inf, error)


def _relative(node: Affine, unit: float) -> float:
    """c of the table above, and what the stored weights may be off by, relative to the terms of the node's sums."""
    return (min(node.terms, _INDEPENDENT * math.sqrt(node.terms)) + _SLACK) * unit + node.weight_error


# The affine nodes' own products would keep |W|, and sparse copies of W: that takes memory, and longer than one use of
# them saves.


def _linear(node: Linear, sources: Sequence[Source], unit: float) -> Source:
    (x, e), part = sources[0], _relative(node, unit)
    size = e + part * (x.abs() + e)
    error = F.linear(size, node.weight.abs()) + part * node.bias.abs()
    return F.linear(x, node.weight, node.bias), error


def _conv2d(node: Conv2d, sources: Sequence[Source], unit: float) -> Source:
    (x, e), part = sources[0], _relative(node, unit)
    size = e + part * (x.abs() + e)
    value = node.forward(x)
    absolute = replace(node, weight=node.weight.abs(), bias=part * node.bias.abs())
    return value, absolute.forward(size).amax((2, 3), keepdim=True).expand_as(value)


def _scale(node: Scale, sources: Sequence[Source], unit: float) -> Source:
    (x, e), part = sources[0], _relative(node, unit)
    size = e + part * (x.abs() + e)
    return node.forward(x), node.scale.abs() * size + part * node.offset_magnitude()


def _sparse(node: Sparse, sources: Sequence[Source], unit: float) -> Source:
    (x, e), part = sources[0], _relative(node, unit)
    return node.forward(x), node.absolute(e + part * (x.abs() + e)) + part * node.offset_magnitude()


def _add(node: Add, sources: Sequence[Source], unit: float) -> Source:
    (x, e), (y, f) = sources
    return x + y, e + f + 2 * unit * (x.abs() + e + y.abs() + f)


def _product(node: Bilinear, sources: Sequence[Source], unit: float) -> Source:
    (x, e), (y, f) = sources
    left, right = x.abs() + e, y.abs() + f
    part = (min(node.terms, _INDEPENDENT * math.sqrt(node.terms)) + _SLACK) * unit
    return node.forward(x, y), node.forward(left, f) + node.forward(e, right) + part * node.forward(left, right)


def _moved(node: Node, sources: Sequence[Source], unit: float) -> Source:
    x, e = sources[0]
    return node.forward(x), node.forward(e)


def _relu(node: Relu | Hardened, sources: Sequence[Source], unit: float) -> Source:
    x, e = sources[0]
    value = node.forward(x)
    return value, e + _FEW * unit * value.abs()


def _leaky_relu(node: LeakyRelu, sources: Sequence[Source], unit: float) -> Source:
    x, e = sources[0]
    value = node.forward(x)
    return value, node.slope.abs().clamp_min(1) * e + _FEW * unit * value.abs()


def _smooth(slope: float, relative: bool) -> Step:
    """The step of a smooth activation whose derivative is at most ``slope``.

    ``relative``: what the activation's own computation is off by is relative to its input, not to 1.
    """

    def step(node: Node, sources: Sequence[Source], unit: float) -> Source:
        x, e = sources[0]
        return node.forward(x), slope * e + _FEW * unit * (x.abs() + e if relative else 1.0)

    return step


def _function(node: Smooth, sources: Sequence[Source], unit: float) -> Source:
    """The slope anywhere within the error of the input, at its ends and bends, bounds what becomes of that error."""
    (x, e), function = sources[0], FUNCTIONS[node.function]
    value = node.forward(x)
    steep = node.parameter.abs().clamp(min=1) * function.steepest
    if not math.isfinite(function.steepest):
        ends = [function.slope(end, node.parameter).abs() for end in (x - e, x, x + e)]
        steep = torch.stack(ends).amax(0)
    size = value.abs() + function.absolute + (steep * x.abs()).clamp(max=1.0)
    return value, steep * e + _FEW * unit * size


STEPS: Table[Step] = Table(
    "the comparison of a network with its source",
    {
        Linear: _linear,
        Conv2d: _conv2d,
        Sparse: _sparse,
        Scale: _scale,
        Division: _scale,
        Add: _add,
        Bilinear: _product,
        Reshape: _moved,
        Permute: _moved,
        Identity: _moved,
        Relu: _relu,
        Hardened: _relu,
        LeakyRelu: _leaky_relu,
        Gelu: _smooth(1.13, relative=True),
        Sigmoid: _smooth(0.25, relative=False),
        Tanh: _smooth(1.0, relative=True),
        Smooth: _function,
        # The slope of the error function is at most 2/√π.
        Erf: _smooth(1.13, relative=False),
    },
)
"""The value of each kind of node, and how far its source's may be off, by those of its inputs (the table above)."""
