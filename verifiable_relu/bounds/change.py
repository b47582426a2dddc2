"""How far the outputs move when a network's λ-GELUs are replaced by ReLU: proven, over a box of inputs.

For z in the smooth network and z + d in the ReLU network at the same neuron and the same input,

    ReLU(z + d) − f(z) = (ReLU(z + d) − ReLU(z)) + (ReLU(z) − f(z)) = s·d + e,   s ∈ [0, 1],   e ∈ [0, δ],

because ReLU is monotone and 1-Lipschitz, and δ is the maximum of |z|·Φ(−λ|z|) over the neuron's interval (arXiv
2603.21991), or minus the least f(−|z|) of another function f that is ``gated``. That interval is the one of all members
of the family (``network.Hardened``), so it holds z and z + d both: where it is on one side of zero, s is 1 or 0. A
function that both networks have, such as the exponential of a softmax, makes g(z + d) − g(z) = s·d of a difference d,
where s is a slope of g within the interval (the mean value theorem). A product makes (x + d₁)∘(y + d₂) − x∘y = d₁∘(y +
d₂) + x∘d₂ of two differences, where the factors x and y + d₂ are somewhere in their intervals.

So the difference of the two networks is itself a network, without biases. Its inputs are the factors of products, free
within their intervals, and a zero. Its activations are d ↦ s·d + e. It is bounded like any other network: by intervals,
and backward by lines over and under max(s·d) and min(s·d). What comes before all λ-GELUs, such as the layer
normalisation in front of a feed-forward block, has no difference, and is not in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from verifiable_relu.bounds.beside import Secants
from verifiable_relu.bounds.crown import interval_is_exact, preactivation_bounds
from verifiable_relu.bounds.forward import Rules, intersect
from verifiable_relu.bounds.relaxation import Relaxation
from verifiable_relu.bounds.tuning import MEMORY, Bounds, Lines, chunk_size, groups
from verifiable_relu.network.dispatch import Table
from verifiable_relu.network.family import hardened
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import (
    Activation,
    Add,
    Affine,
    Bilinear,
    Conv2d,
    Hardened,
    Input,
    Linear,
    Node,
    Permute,
    Reshape,
    Scale,
    Seen,
    Sparse,
)


def substitution_change(
    network: Network, box: Bounds, *, memory: int = MEMORY, stop: Callable[[], bool] | None = None
) -> Bounds:
    """Bounds of (outputs of the ReLU network − outputs of the smooth one) for the same input in the box.

    They hold for every smooth network with λ' ≥ λ in each layer, at all inputs of the box, rounding accounted for;
    the box [0, 1]ⁿ gives the change over a whole domain of images.

    Args:
        network: with λ-GELU activations, all of which are replaced, or as ``hardened`` or ``network.family.swapped``
            makes it, in the dtype and on the device of ``box``.
        box: the inputs, shaped (batch, *input_shape).
        memory: a limit in bytes on the coefficients held at once.
        stop: asked between chunks; once it returns True what is left keeps its interval bounds.

    Returns:
        Shaped (batch, *output_shape); NaN or infinite where nothing is known.

    Raises:
        InputError: if no λ is known for a ReLU, or there is no activation.
        UnsupportedError: for an activation behind a λ-GELU of which the slopes are not known.
    """
    family = network if any(isinstance(node, Hardened) for node in network.nodes) else hardened(network)
    known = preactivation_bounds(family, box, exact=True, memory=memory, stop=stop)
    made = _Differences(family, Relaxation(family, box, known))
    last = made.at[len(family.nodes) - 1]
    if last is None:
        zero = box.lower.new_zeros(len(box.lower), *family.output_shape)
        return Bounds(zero, zero)
    difference = Network(tuple(made.nodes), name=family.name)
    relaxation = Relaxation(difference, made.box(), rules=made.rules)

    def tighten(index: int, bounds: Bounds) -> Bounds:
        source = difference.nodes[index].inputs[0]
        if interval_is_exact(difference, source):
            return bounds
        return bounded(relaxation, source, bounds, made.rules.free[index], memory, stop)

    relaxation.advance(last, tighten)
    outputs = relaxation.bounds(last)
    return bounded(relaxation, last, outputs, torch.ones_like(outputs.lower, dtype=torch.bool), memory, stop)


class Differences(Rules):
    """The activations d ↦ s·d + e of the difference network.

    Attributes:
        free: by activation, for which neurons s is not known exactly, (batch, *shape) bool.
    """

    def __init__(self) -> None:
        self.free: dict[int, Tensor] = {}
        self._secants: dict[int, Secants] = {}

    def add(self, index: int, node: Activation, pre: Bounds) -> None:
        """Say what an activation of the family makes of differences.

        Args:
            index: the activation's place in the difference network.
            node: the activation.
            pre: bounds of its input, (batch, *shape), of all members of the family.

        Raises:
            UnsupportedError: for an activation of which that is not known.
        """
        limit = node.limit
        assert isinstance(limit, Activation)
        self._secants[index] = Secants.of(node, limit, pre, pre)
        self.free[index] = self._secants[index].free

    def image(self, index: int, node: Activation, pre: Bounds) -> Bounds:
        return self._secants[index].image(pre)

    def lines(self, index: int, node: Activation, pre: Bounds) -> Lines:
        return self._secants[index].lines(pre)


class _Differences:
    """The difference network of a family, node after node.

    Attributes:
        nodes: of the difference network; its input, a vector, begins with a zero, which the factors follow.
        at: by node of the family, the node of its difference; None where there is no difference.
        rules: what the activations make of differences.
    """

    def __init__(self, family: Network, joint: Relaxation) -> None:
        self.family, self.joint = family, joint
        self.rules = Differences()
        self.nodes: list[Node] = [Input(name="factors", inputs=(), shape=(1,))]
        self.at: list[int | None] = []
        self._factors: dict[int, int] = {}
        self._boxes: list[Bounds] = []
        self._zero = joint.box.lower.new_zeros(())
        # Bounds of an activation's input are intersected with those that are known once the activation is passed.
        joint.advance(len(family.nodes) - 1)
        for index, node in enumerate(family.nodes):
            sources = [self.at[i] for i in node.inputs]
            self.at.append(MAKERS[node](self, index, node, sources))
        self.nodes[0] = Input(name="factors", inputs=(), shape=(self._size,))

    @property
    def _size(self) -> int:
        return 1 + sum(box.lower[0].numel() for box in self._boxes)

    def box(self) -> Bounds:
        """The inputs' bounds, (batch, inputs)."""
        zero = self._zero.new_zeros(self.joint.samples, 1)
        flat = [box.flat() for box in self._boxes]
        return Bounds(torch.cat([zero, *(b.lower for b in flat)], 1), torch.cat([zero, *(b.upper for b in flat)], 1))

    def nothing(self, index: int, node: Node, sources: list[int | None]) -> None:
        """The input is the same in both networks."""
        return None

    def mapped(self, index: int, node: Node, sources: list[int | None]) -> int | None:
        """An affine map of a difference is the map without its bias."""
        return None if sources[0] is None else self._append(_without_bias(node), sources[0])

    def exact(self, index: int, node: Node, sources: list[int | None]) -> int | None:
        """The difference of what it is made of."""
        return sources[-1]

    def added(self, index: int, node: Node, sources: list[int | None]) -> int | None:
        """The sum of those that there are."""
        first, second = sources
        if first is None or second is None:
            return second if first is None else first
        return self._append(node, first, second)

    def activated(self, index: int, node: Activation, sources: list[int | None]) -> int | None:
        """An activation makes a difference by itself only if it is another one in the two networks."""
        source = sources[0]
        if source is None:
            if not isinstance(node, Hardened):
                return None
            source = self._input(0, node, 0.0)
        place = self._append(node, source)
        self.rules.add(place, node, self.joint.bounds(node.inputs[0]))
        return place

    def multiplied(self, index: int, node: Bilinear, sources: list[int | None]) -> int | None:
        """d₁∘(y + d₂) + x∘d₂, of the differences that there are."""
        (x, y), (first, second) = node.inputs, sources
        left = None if first is None else self._append(node, first, self._factor(y))
        right = None if second is None else self._append(node, self._factor(x), second)
        if left is None or right is None:
            return right if left is None else left
        return self._append(Add(name=node.name, inputs=(0, 0), shape=node.shape), left, right)

    def _append(self, node: Node, *sources: int) -> int:
        self.nodes.append(replace(node, inputs=sources))
        return len(self.nodes) - 1

    def _factor(self, index: int) -> int:
        """The node of the difference network that is anywhere in the bounds of the family's node ``index``."""
        if index not in self._factors:
            self._factors[index] = self._input(self._size, self.family.nodes[index], 1.0)
            self._boxes.append(self.joint.bounds(index))
        return self._factors[index]

    def _input(self, start: int, node: Node, weight: float) -> int:
        """As many inputs as a node has values, from ``start`` on, times a weight; with a weight of 0, the first one."""
        places = torch.arange(start, start + node.size) if weight else torch.zeros(node.size, dtype=torch.long)
        return self._append(
            Sparse(
                name=node.name,
                inputs=(0,),
                shape=node.shape,
                index=places[:, None].to(self._zero.device),
                weight=self._zero.new_full((node.size, 1), weight),
                bias=self._zero.new_zeros(node.size),
            ),
            0,
        )


MAKERS: Table[Callable[..., int | None]] = Table(
    "the change by the substitution of ReLU",
    {
        Input: _Differences.nothing,
        Affine: _Differences.mapped,
        Seen: _Differences.exact,
        Reshape: _Differences.mapped,
        Permute: _Differences.mapped,
        Add: _Differences.added,
        Activation: _Differences.activated,
        Bilinear: _Differences.multiplied,
    },
)
"""What each kind of node makes of differences: of (differences, index, node, the inputs' differences)."""


def _without_bias(node: Node) -> Node:
    match node:
        case Linear() | Conv2d() | Sparse():
            return replace(node, bias=torch.zeros_like(node.bias))
        case Scale():
            return replace(node, center=torch.zeros_like(node.center), shift=torch.zeros_like(node.shift))
    return node


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
