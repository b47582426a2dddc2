"""What rounding adds where rows of coefficients are propagated about a point of every node.

Rows A of a node of values v are taken about a point v̂ of it: A·v is A·v̂, once, where the rows begin, and A·(v − v̂),
which is pulled back. For an affine map y = W·x + b and ŷ = W·x̂ + b, A·(y − ŷ) = (A·W)·(x − x̂): no constant is left.
For an activation x̂ is the centre of its box, and A·(x − x̂) ≥ A·(low·(z − ẑ) + floor) + A⁻·((up − low)·(z − ẑ) + top),
where ``floor`` is how far the lower line lies above x̂ at ẑ, and ``top`` the upper line above that. What is left over at
the input is −|A|·radius. So errors in A count by how far v may be from v̂, not by how large v is, and A may be taken in
float32 without bounds being moved by more than a small part of their width.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from verifiable_relu.bounds import rounding
from verifiable_relu.bounds.float32 import Float32
from verifiable_relu.bounds.forward import NodeBounds
from verifiable_relu.bounds.operators import ConvolutionOperator, sums
from verifiable_relu.bounds.tuning import Tuning
from verifiable_relu.network.nodes import Activation, Add, Affine, Linear, Permute, Relu, Reshape


class Slack:
    """The errors of one unit of |A| at every node, made as they are needed.

    Args:
        bounds: the nodes' bounds and points.
        float32: which coefficients are in float32.
        tuning: when terms are counted.
    """

    def __init__(self, bounds: NodeBounds, float32: Float32, tuning: Tuning) -> None:
        self._bounds, self._float32, self._tuning = bounds, float32, tuning
        self._nodes, self._uses = bounds.network.nodes, bounds.network.uses
        self._errors: dict[tuple[int, int | None, bool], Tensor] = {}
        self._affine: dict[int, Tensor] = {}
        self._lost: list[Tensor] = []
        self._covered: dict[int, frozenset[int]] = {}
        self._ends: dict[int, Tensor] = {}

    @cached_property
    def sums(self) -> int:
        """How many additions a row's value may be the result of: what rows begin with, and one for every node, two for
        the sum of two."""
        return 4 + len(self._nodes) + sum(isinstance(node, Add) for node in self._nodes)

    def error(self, index: int, after: int | None = None, alone: bool = False) -> Tensor:
        """(batch, size) the error of one unit of |A| in pulling rows A back through node ``index``.

        It covers the lines of a ReLU after the node too, and A·v̂ where rows begin, and the nodes before it to which it
        passes A on unchanged (``covered``).

        Args:
            index: the node.
            after: the ReLU that rows come from, if they do: they have no coefficients where it is inactive.
            alone: of rows that begin at one neuron each, of the same node.
        """
        key = (index, after, alone)
        if key not in self._errors:
            bounds, node = self._bounds, self._nodes[index]
            if index == bounds.start or isinstance(node, Activation):
                error = rounding.value(node.size, bounds.magnitude(index), self.sums).expand(-1, node.size)
                if self._float32.holds(index):
                    # An activation may follow, of this or of a sum with it.
                    error = error + rounding.backward_single(bounds.radius(index).flatten(1))
            elif isinstance(node, Affine):
                error = self._affine_error(index, node, after, alone)
            elif isinstance(node, Add):
                first, second = (self.error(i, after if self._uses[i] == 1 else None, alone) for i in node.inputs)
                error = first + second + rounding.point(bounds.magnitude(index))
            elif isinstance(node, Permute):
                source = node.inputs[0]
                before = self.error(source, alone=alone).unflatten(1, self._nodes[source].shape)
                error = node.forward(before).flatten(1)
            else:
                error = self.error(node.inputs[0], alone=alone)
            self._errors[key] = error
        return self._errors[key]

    def _affine_error(self, index: int, node: Affine, after: int | None, alone: bool) -> Tensor:
        bounds, source, operator = self._bounds, node.inputs[0], self._bounds.operators[index]
        if index not in self._affine:
            self._affine[index] = rounding.backward_affine(operator, bounds.magnitude(source), self.sums)
        error = self._affine[index]
        if self._float32.holds(source) and not (alone and self._float32.sums(index)):
            terms = 0 if alone else self._terms(index, after)
            if bounds.is_centred(source) and (isinstance(terms, int) or isinstance(node, Linear)):
                error = error + rounding.backward_single(bounds.reach(index), terms)
            else:
                error = error + rounding.backward_single(bounds.radius(source), terms, operator)
        return error.expand(-1, *node.shape).flatten(1)

    def _terms(self, index: int, after: int | None) -> int | Tensor:
        """How many products that are not zero are summed up in float32, in pulling rows back through an affine map.

        For every coefficient of its input, (batch, *shape) or broadcastable to it; or for all, as at the start always.
        """
        node, operator = self._nodes[index], self._bounds.operators[index]
        source = node.inputs[0]
        if isinstance(operator, ConvolutionOperator) and self._float32.holds(index):
            few = operator.adjoint_terms <= self._tuning.counted_terms
            if after is None or source == self._bounds.start or few:
                return operator.adjoint_terms
            active = self._bounds.possibly_active(after).unflatten(1, node.shape)
            return operator.outputs_that_see(active, self._nodes[source].shape)
        if not self._float32.narrows(index):
            return 0
        if after is None:
            return node.size
        return self._bounds.possibly_active(after).sum(1, keepdim=True, dtype=self._bounds.point(index).dtype)

    def after_relu(self, index: int) -> int | None:
        """The activation ``index``, if rows of its input that come from it are zero where it is inactive."""
        node = self._nodes[index]
        return index if isinstance(node, Relu) and self._uses[node.inputs[0]] == 1 else None

    def covered(self, index: int) -> frozenset[int]:
        """The nodes whose error in pulling rows back is part of ``error`` of node ``index``.

        Its own, and that of those before it to which it alone gives its rows, as they are.
        """
        if index not in self._covered:
            found = {index}
            if isinstance(self._nodes[index], Add | Reshape | Permute):
                for source in self._nodes[index].inputs:
                    if self._uses[source] == 1 and not isinstance(self._nodes[source], Activation):
                        found |= self.covered(source)
            self._covered[index] = frozenset(found)
        return self._covered[index]

    def merged(self, index: int) -> Tensor:
        """(batch, size) the error of one unit of |A| in adding two rows of node ``index``."""
        dtype = torch.float32 if self._float32.holds(index) else self._bounds.point(index).dtype
        return rounding.accumulate(self._bounds.radius(index).flatten(1), dtype)

    def end(self, terms: int = 0) -> Tensor:
        """(batch, size) r so large that −|A|·r, computed, is a lower bound of A·(v − v̂) where rows end.

        Args:
            terms: how many numbers are summed, if not as many as the node has.
        """
        start = self._bounds.start
        terms = terms or self._nodes[start].size
        if terms not in self._ends:
            radius = self._bounds.radius(start).flatten(1)
            if self._float32.holds(start):
                radius = rounding.concretise(radius, sums.depth(terms, self._tuning), torch.float32).float()
            else:
                radius = rounding.concretise(radius, terms, radius.dtype)
            self._ends[terms] = radius
        return self._ends[terms]

    def lost(self, index: int) -> Tensor:
        """(batch,) what underflow may change in a row of node ``index`` on its way back."""
        # In node order, for networks of any depth.
        for current in range(len(self._lost), index + 1):
            self._lost.append(self._lost_at(current))
        return self._lost[index]

    def _lost_at(self, index: int) -> Tensor:
        """``lost`` of one node, from that of the nodes before it."""
        bounds, nodes, node = self._bounds, self._nodes, self._nodes[index]
        if index < bounds.start:
            return bounds.values[0].lower.new_zeros(bounds.samples)
        sources = () if index == bounds.start else node.inputs
        parts = [self._lost[i] for i in sources]
        # An activation after an affine map is part of that, the others move rows about as they are.
        own = Affine if sources and isinstance(nodes[sources[0]], Affine) else Affine | Activation
        if not sources or isinstance(node, own):
            source = sources[0] if sources else index
            magnitude, size = bounds.magnitude(source), max(node.size, nodes[source].size)
            dtype = torch.float32 if self._float32.holds(source) else magnitude.dtype
            operator = bounds.operators.find(index)
            parts.append(rounding.lost(operator, magnitude, size, dtype))
        return sum(parts[1:], parts[0])
