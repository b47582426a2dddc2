"""A point for every node of a network about which rows of coefficients are propagated, and what rounding adds there.

Rows A of a node of values v are taken about a point v̂ of it: A·v is A·v̂, once, where the rows begin, and A·(v − v̂),
which is pulled back. For an affine map y = W·x + b and ŷ = W·x̂ + b, A·(y − ŷ) = (A·W)·(x − x̂): no constant is left.
For an activation x̂ is the centre of its box, and A·(x − x̂) ≥ A·(low·(z − ẑ) + floor) + A⁻·((up − low)·(z − ẑ) + top),
where ``floor`` is how far the lower line lies above x̂ at ẑ, and ``top`` the upper line above that. What is left over at
the input is −|A|·radius. So errors in A count by how far v may be from v̂, not by how large v is, and A may be taken in
float32 without bounds being moved by more than a small part of their width.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING
from weakref import proxy

import torch
from torch import Tensor

from verifiable_relu.bounds import rounding
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Activation, Add, Affine, Conv2d, Linear, Permute, Reshape

if TYPE_CHECKING:
    from verifiable_relu.bounds.linear import Relaxation

_SINGLE = 192
"""So deep may the sums in float32 be, of the first convolutions together: these are where the time goes, and where
it moves bounds least, in the networks of ``benchmarks/bounds_speed.py`` by at most 1e-4 of their width."""

_FEW = 64
"""So few terms need not be counted: that takes longer than it is worth."""

_MANY = 256
"""From so many inputs on float32 is worth it for these alone."""

_WIDEST = 256
"""Up to so many neurons of the first linear map."""


class Reference:
    """The points of a relaxation's nodes, made as they are needed; (batch, *shape) each.

    Args:
        relaxation: whose node bounds and lines are used.
    """

    def __init__(self, relaxation: Relaxation) -> None:
        # Which owns this object: with a cycle, its tensors would wait for the garbage collector.
        self._of: Relaxation = proxy(relaxation)
        self._points: dict[int, Tensor] = {}
        self._reaches: dict[int, Tensor] = {}
        self._radii: dict[int, Tensor] = {}
        self._units: dict[tuple[int, int | None, bool], Tensor] = {}
        self._affine: dict[int, Tensor] = {}
        self._losses: dict[int, Tensor] = {}
        self._single: dict[int, bool] = {}
        self._covered: dict[int, frozenset[int]] = {}

    @cached_property
    def sums(self) -> int:
        """How many additions a row's value may be the result of: what rows begin with, and one for every node, two for
        the sum of two."""
        nodes = self._of.network.nodes
        return 4 + len(nodes) + sum(isinstance(node, Add) for node in nodes)

    def point(self, index: int) -> Tensor:
        """v̂ of node ``index``."""
        if index not in self._points:
            node = self._of.network.nodes[index]
            if index == self._of.entry or isinstance(node, Activation):
                box = self._of.bounds(index)
                found = torch.lerp(box.lower, box.upper, 0.5)
            else:
                found = node.forward(*(self.point(i) for i in node.inputs))
            self._points[index] = found
        return self._points[index]

    def centred(self, index: int) -> bool:
        """Whether v̂ is the centre of the node's box: not of one that an activation after it has made smaller since."""
        node = self._of.network.nodes[index]
        if index == self._of.entry:
            return True
        if self._of.interval(index) is not self._of.bounds(index):
            return False
        return isinstance(node, Activation) or (isinstance(node, Reshape | Permute) and self.centred(node.inputs[0]))

    def reach(self, index: int) -> Tensor:
        """(batch,) ≥ |v|, |v̂|."""
        if self.centred(index):
            return self._of.largest(index)
        if index not in self._reaches:
            size = self.point(index).flatten(1).abs().amax(1)
            self._reaches[index] = torch.maximum(self._of.largest(index), size)
        return self._reaches[index]

    def radius(self, index: int) -> Tensor:
        """≥ |v − v̂|, but for rounding (``rounding.radius``)."""
        if index not in self._radii:
            self._radii[index] = rounding.radius(self._of.bounds(index), self.point(index))
        return self._radii[index]

    def unit(self, index: int, after: int | None = None, alone: bool = False) -> Tensor:
        """(batch, size) the error of one unit of |A| in pulling rows A back through node ``index``.

        It covers the lines of a ReLU after the node too, and A·v̂ where rows begin, and what is before the node if
        it passes A on unchanged (``covered``).

        Args:
            index: the node.
            after: the ReLU that rows come from, if they do: they have no coefficients where it is inactive.
            alone: of rows that begin at one neuron each, of the same node.
        """
        key = (index, after, alone)
        if key not in self._units:
            nodes = self._of.network.nodes
            node = nodes[index]
            if index == self._of.entry or isinstance(node, Activation):
                unit = rounding.value(node.size, self.reach(index), self.sums).expand(-1, node.size)
                if index <= self._of.border:
                    # An activation may follow, of this or of a sum with it.
                    unit = unit + rounding.backward_single(self.radius(index).flatten(1))
            elif isinstance(node, Affine):
                source = node.inputs[0]
                if index not in self._affine:
                    self._affine[index] = rounding.backward_affine(node, self.reach(source), self.sums)
                unit = self._affine[index]
                if source <= self._of.border and not (alone and self.takes_single(index)):
                    terms = 0 if alone else self._terms(index, after)
                    if self.centred(source) and (isinstance(terms, int) or isinstance(node, Linear)):
                        # |W|·|x − x̂| is how far the intervals reach.
                        reach = rounding.radius(self._of.interval(index), self.point(index))
                        unit = unit + rounding.backward_single(reach, terms)
                    else:
                        unit = unit + rounding.backward_single(self.radius(source), terms, node)
                unit = unit.expand(-1, *node.shape).flatten(1)
            elif isinstance(node, Add):
                first, second = (
                    self.unit(i, after if self._of.network.uses[i] == 1 else None, alone) for i in node.inputs
                )
                unit = first + second + rounding.point(self.reach(index))
            elif isinstance(node, Permute):
                before = self.unit(node.inputs[0], alone=alone).unflatten(1, nodes[node.inputs[0]].shape)
                unit = node.forward(before).flatten(1)
            else:
                unit = self.unit(node.inputs[0], alone=alone)
            self._units[key] = unit
        return self._units[key]

    def _terms(self, index: int, after: int | None) -> int | Tensor:
        """How many products that are not zero are summed up in float32, in pulling rows back through an affine map.

        For every coefficient of its input, (batch, *shape) or broadcastable to it, or for all, as of the entry always.
        """
        node = self._of.network.nodes[index]
        if isinstance(node, Conv2d) and index <= self._of.border:
            if after is None or node.inputs[0] == self._of.entry or node.adjoint_terms <= _FEW:
                return node.adjoint_terms
            living = self._of.living(after).unflatten(1, node.shape)
            return node.seen_by(living, self._of.network.nodes[node.inputs[0]].shape)
        if not self.narrows(index):
            return 0
        if after is None:
            return node.size
        return self._of.living(after).sum(1, keepdim=True, dtype=self.point(index).dtype)

    def narrows(self, index: int) -> bool:
        """Whether rows of the linear map ``index`` are taken in float32 in pulling them back."""
        node = self._of.network.nodes[index]
        return isinstance(node, Linear) and node.inputs[0] <= self._of.border and self.takes_single(index)

    def takes_single(self, index: int) -> bool:
        """Whether sums of node ``index`` may be taken in float32."""
        if index not in self._single:
            node = self._of.network.nodes[index]
            self._single[index] = isinstance(node, Conv2d | Linear) and self._of.narrows and node.single
        return self._single[index]

    def covered(self, index: int) -> frozenset[int]:
        """The nodes whose error in pulling rows back is part of ``unit`` of node ``index``.

        Its own, and that of those before it to which it alone gives its rows, as they are.
        """
        if index not in self._covered:
            network, found = self._of.network, {index}
            if isinstance(network.nodes[index], Add | Reshape | Permute):
                for source in network.nodes[index].inputs:
                    if network.uses[source] == 1 and not isinstance(network.nodes[source], Activation):
                        found |= self.covered(source)
            self._covered[index] = frozenset(found)
        return self._covered[index]

    def merged(self, index: int) -> Tensor:
        """(batch, size) the error of one unit of |A| in adding two rows of node ``index``."""
        dtype = torch.float32 if index <= self._of.border else self.point(index).dtype
        return rounding.accumulate(self.radius(index).flatten(1), dtype)

    def lost(self, index: int) -> Tensor:
        """(batch,) what underflow may change in a row of node ``index`` on its way back."""
        if index not in self._losses:
            nodes, node = self._of.network.nodes, self._of.network.nodes[index]
            sources = () if index == self._of.entry else node.inputs
            parts = [self.lost(i) for i in sources]
            # An activation after an affine map is part of that, the others move rows about as they are.
            own = Affine if sources and isinstance(nodes[sources[0]], Affine) else Affine | Activation
            if not sources or isinstance(node, own):
                source = sources[0] if sources else index
                reach, size = self.reach(source), max(node.size, nodes[source].size)
                dtype = torch.float32 if source <= self._of.border else reach.dtype
                parts.append(rounding.lost(node, reach, size, dtype))
            self._losses[index] = sum(parts[1:], parts[0])
        return self._losses[index]


def border(network: Network, entry: int, every: bool = False) -> int:
    """The last node up to which coefficients are taken in float32, where that may be; −1 if none.

    These are the inputs, where there are many, and the first convolutions of a network, with what is between them; or
    ``every`` node up to one whose sums may not be. Only affine maps take rows across.
    """
    depth, last, nodes = 0, entry, network.nodes
    for index in range(entry + 1, len(nodes)):
        node = nodes[index]
        if isinstance(node, Conv2d) or (every and isinstance(node, Linear)):
            if isinstance(node, Conv2d) and not every:
                depth += node.adjoint_terms
            if depth > _SINGLE or not node.single:
                break
        elif not isinstance(node, Activation | Add | Reshape | Permute):
            break
        last = index
    while last >= entry and any(
        not isinstance(node, Affine) and min(node.inputs) <= last for node in nodes[last + 1 :]
    ):
        last -= 1
    if every or any(isinstance(node, Conv2d) for node in nodes[entry + 1 : last + 1]):
        return last
    first = [node for node in nodes[1:] if node.inputs == (entry,)]
    narrow = all(isinstance(node, Linear) and node.size <= _WIDEST and node.single for node in first)
    return entry if last >= entry and narrow and nodes[entry].size >= _MANY else -1
