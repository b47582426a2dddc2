"""How far the outputs move when a network's λ-GELUs are replaced by ReLU: proven, over a box of inputs.

For z in the smooth network and z + d in the ReLU network at the same neuron and the same input,

    ReLU(z + d) − f(z) = (ReLU(z + d) − ReLU(z)) + (ReLU(z) − f(z)) = s·d + e,   s ∈ [0, 1],   e ∈ [0, δ],

because ReLU is monotone and 1-Lipschitz, and δ is the maximum of |z|·Φ(−λ|z|) over the neuron's interval (arXiv
2603.21991). That interval is the one of all members of the family (``network.Hardened``), so it holds z and z + d
both: where it is on one side of zero, s is 1 or 0. So the difference of the two networks is itself a network, without
biases, whose input is zero and whose activations are d ↦ s·d + e, and is bounded like any other: by intervals, and
backward by lines over and under max(0, d) and min(0, d).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from verifiable_relu.bounds import rounding
from verifiable_relu.bounds.activations import image
from verifiable_relu.bounds.chunks import chunk_size, groups
from verifiable_relu.bounds.interval import intersect
from verifiable_relu.bounds.relaxation import Relaxation
from verifiable_relu.bounds.rules import Rules
from verifiable_relu.bounds.tighten import interval_is_exact, preactivation_bounds
from verifiable_relu.bounds.tuning import MEMORY
from verifiable_relu.bounds.types import Bounds, Lines
from verifiable_relu.errors import UnsupportedError
from verifiable_relu.network.family import hardened
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Activation, Bilinear, Conv2d, Hardened, Linear, Node, Scale


def substitution_change(
    network: Network, box: Bounds, *, memory: int = MEMORY, stop: Callable[[], bool] | None = None
) -> Bounds:
    """Bounds of (outputs of the ReLU network − outputs of the smooth one) for the same input in the box.

    They hold for every smooth network with λ' ≥ λ in each layer, at all inputs of the box, rounding accounted for;
    the box [0, 1]ⁿ gives the change over a whole domain of images.

    Args:
        network: with λ-GELU activations, or as ``hardened`` makes it, in the dtype and on the device of ``box``.
        box: the inputs, shaped (batch, *input_shape).
        memory: a limit in bytes on the coefficients held at once.
        stop: asked between chunks; once it returns True what is left keeps its interval bounds.

    Returns:
        Shaped (batch, *output_shape).

    Raises:
        InputError: if no λ is known for a ReLU, or there is no activation.
        UnsupportedError: for other activations beside them.
    """
    family = hardened(network)
    nodes = tuple(_without_bias(node) for node in family.nodes)
    rules = Differences(family, preactivation_bounds(family, box, memory=memory, stop=stop))
    zero = torch.zeros_like(box.lower)
    relaxation = Relaxation(replace(family, nodes=nodes, onnx=None), Bounds(zero, zero), rules=rules)

    def tighten(index: int, difference: Bounds) -> Bounds:
        source = family.nodes[index].inputs[0]
        if interval_is_exact(relaxation.network, source):
            return difference
        return bounded(relaxation, source, difference, rules.free[index], memory, stop)

    last = len(nodes) - 1
    relaxation.advance(last, tighten)
    outputs = relaxation.bounds(last)
    return bounded(relaxation, last, outputs, torch.ones_like(outputs.lower, dtype=torch.bool), memory, stop)


def _without_bias(node: Node) -> Node:
    match node:
        case Linear() | Conv2d():
            return replace(node, bias=torch.zeros_like(node.bias))
        case Scale():
            return replace(node, center=torch.zeros_like(node.center), shift=torch.zeros_like(node.shift))
        case Bilinear():
            raise UnsupportedError("the change is not bounded through products", place=node.place)
        case Activation() if not isinstance(node, Hardened):
            raise UnsupportedError(
                "the change is not bounded through this activation", place=f"node '{node.name}' ({node.op})"
            )
    return node


def gap(node: Hardened, pre: Bounds) -> Tensor:
    """δ, rounded up: −|z|·Φ(−λ|z|) is λ-GELU at −|z|, so that δ is minus the least value there."""
    near = torch.maximum(pre.lower, -pre.upper).clamp(min=0)
    far = torch.maximum(-pre.lower, pre.upper)
    return -rounding.interval_activation(node, image(node, Bounds(-far, -near))).lower


class Differences(Rules):
    """The activations d ↦ s·d + e of the difference network.

    Args:
        family: as ``hardened`` makes it.
        joint: bounds of its activations' inputs, (batch, *shape), of all members of the family.

    Attributes:
        free: by activation, for which neurons s is neither 0 nor 1 for certain, (batch, *shape) bool.
    """

    def __init__(self, family: Network, joint: Mapping[int, Bounds]) -> None:
        self.free: dict[int, Tensor] = {}
        self._slopes: dict[int, Bounds] = {}
        self._gaps: dict[int, Tensor] = {}
        for index in family.activations:
            node, bounds = family.nodes[index], joint[index]
            assert isinstance(node, Hardened)
            on, off = bounds.lower >= 0, bounds.upper <= 0
            self.free[index] = ~(on | off)
            self._slopes[index] = Bounds(on.to(bounds.lower), (~off).to(bounds.lower))
            self._gaps[index] = gap(node, bounds)

    def image(self, index: int, node: Activation, pre: Bounds) -> Bounds:
        ends = Bounds(self.moved(index, pre.lower).lower, self.moved(index, pre.upper).upper)
        return rounding.widen(Bounds(ends.lower, ends.upper + self._gaps[index]), 2)

    def lines(self, index: int, node: Activation, pre: Bounds) -> Lines:
        """The chord of the concave min(s·d), the chord of the convex max(s·d) and δ above it."""
        left, right = self.moved(index, pre.lower), self.moved(index, pre.upper)
        width = (pre.upper - pre.lower).clamp(min=torch.finfo(pre.lower.dtype).tiny)
        low, high = (right.lower - left.lower) / width, (right.upper - left.upper) / width
        # Offsets last, from both ends: they are sound whatever the slopes became in floating point.
        under = torch.minimum(left.lower - low * pre.lower, right.lower - low * pre.upper)
        over = torch.maximum(left.upper - high * pre.lower, right.upper - high * pre.upper)
        return Lines(low, under, high, over + self._gaps[index])

    def moved(self, index: int, d: Tensor) -> Bounds:
        """The least and the greatest s·d at activation ``index``, (batch, *shape)."""
        slopes = self._slopes[index]
        ends = slopes.lower * d, slopes.upper * d
        return Bounds(torch.minimum(*ends), torch.maximum(*ends))


def bounded(
    relaxation: Relaxation,
    index: int,
    interval: Bounds,
    wanted: Tensor,
    memory: int,
    stop: Callable[[], bool] | None,
) -> Bounds:
    """The bounds of node ``index``, those of the ``wanted`` neurons, (batch, *shape), bounded anew by lines."""
    sample, neuron = wanted.flatten(1).nonzero().unbind(1)
    lower, upper = interval.lower.flatten(1).clone(), interval.upper.flatten(1).clone()
    tuning = relaxation.tuning
    size = chunk_size(relaxation.network, lower, memory, tuning, 2 * tuning.copies)
    for part, mine in groups(sample.shape[0], sample, size, relaxation.samples):
        if stop is not None and stop():
            break
        chosen = neuron[part]
        for sign, bounds in ((1, lower), (-1, upper)):
            signs = lower.new_full(chosen.shape, sign)
            bounds[sample[part], chosen] = sign * relaxation.neurons(index, chosen, signs, mine)
    shape = interval.lower.shape
    return intersect(interval, Bounds(lower.reshape(shape), upper.reshape(shape)))
