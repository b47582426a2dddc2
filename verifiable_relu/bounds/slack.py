"""What rounding adds where rows of coefficients are propagated about a point of every node.

A row A of a node with values v is propagated about a point v̂ of the node: A·v = A·v̂ + A·(v − v̂). The first part is
computed once, where the row begins; the second is pulled back from node to node:

* through an affine map y = W·x + b, with ŷ = W·x̂ + b, as A·(y − ŷ) = (A·W)·(x − x̂), which leaves no constant;
* through an activation x = f(z), whose x̂ is the centre of its box, as
  A·(x − x̂) ≥ A·(low·(z − ẑ) + floor) + A⁻·((up − low)·(z − ẑ) + top), where low and up are the slopes of the lower and
  of the upper line, ``floor`` is how far the lower line lies above x̂ at ẑ, and ``top`` how far the upper line lies
  above the lower line there;
* at the node where rows end, as A·(v − v̂) ≥ −|A|·radius.

So an error in A counts by how far v may be from v̂, not by how large v is. This is why A may be in float32 and move
bounds by a small part of their width only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from verifiable_relu.bounds import rounding
from verifiable_relu.bounds.float32 import Float32
from verifiable_relu.bounds.forward import NodeBounds
from verifiable_relu.bounds.operators import ConvolutionOperator, sums
from verifiable_relu.bounds.tuning import Tuning
from verifiable_relu.network.dispatch import Table
from verifiable_relu.network.nodes import Activation, Add, Affine, Bilinear, Input, Linear, Node, Permute, Relu, Reshape


class Slack:
    """The error of one unit of |A| at every node, computed when it is first asked for.

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
        self._products: dict[int, Tensor] = {}
        self._lost: list[Tensor] = []
        self._covered: dict[int, frozenset[int]] = {}
        self._ends: dict[int, Tensor] = {}

    @cached_property
    def sums(self) -> int:
        """How many additions a row's value takes part in at most: those where rows begin, and those at the nodes, one
        at each, two at the sum of two."""
        return 4 + sum(max(1, len(node.inputs)) for node in self._nodes)

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
            node = self._nodes[index]
            made = Slack.error_of_value if index == self._bounds.start else KINDS[node].error
            self._errors[key] = made(self, index, node, after, alone)
        return self._errors[key]

    def error_of_value(self, index: int, node: Node, after: int | None, alone: bool) -> Tensor:
        """``error`` where rows end, and at an activation or a product: of A·v̂, and of the lines of a ReLU after it."""
        bounds = self._bounds
        error = rounding.value(node.size, bounds.magnitude(index), self.sums).expand(-1, node.size)
        if self._float32.holds(index):
            # An activation may follow, of this or of a sum with it.
            error = error + rounding.backward_single(bounds.radius(index).flatten(1))
        return error

    def error_of_sum(self, index: int, node: Add, after: int | None, alone: bool) -> Tensor:
        """``error`` of a sum: of both its inputs, and of their points' sum."""
        first, second = (self.error(i, after if self._uses[i] == 1 else None, alone) for i in node.inputs)
        return first + second + rounding.point(self._bounds.magnitude(index))

    def error_of_permuted(self, index: int, node: Permute, after: int | None, alone: bool) -> Tensor:
        """``error`` of the input, reordered as the values are."""
        source = node.inputs[0]
        return node.forward(self.error(source, alone=alone).unflatten(1, self._nodes[source].shape)).flatten(1)

    def error_of_reshaped(self, index: int, node: Reshape, after: int | None, alone: bool) -> Tensor:
        """``error`` of the input."""
        return self.error(node.inputs[0], alone=alone)

    def error_of_map(self, index: int, node: Affine, after: int | None, alone: bool) -> Tensor:
        """``error`` of an affine map."""
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

    def product(self, index: int) -> Tensor:
        """(batch, size) the error of one unit of |A| in pulling rows A back through the product ``index``."""
        if index not in self._products:
            bounds, node = self._bounds, self._nodes[index]
            assert isinstance(node, Bilinear)
            radii = [bounds.radius(i) for i in node.inputs]
            sizes = [bounds.point(i).abs() + bounds.radius(i) for i in node.inputs]
            sums = self.sums + node.size
            found = rounding.bilinear(node.forward(*radii), node.forward(*sizes), node.terms, sums)
            self._products[index] = found.flatten(1)
        return self._products[index]

    def _terms(self, index: int, after: int | None) -> int | Tensor:
        """How many products that are not zero a coefficient is the sum of, in float32, behind an affine map.

        One number for all coefficients of the map's input; or a number for each, (batch, *shape) or broadcastable to
        it, which is never so at the node where rows end.
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
            if KINDS[self._nodes[index]].passes:
                for source in self._nodes[index].inputs:
                    if self._uses[source] == 1 and KINDS[self._nodes[source]].covered:
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
        # What is lost at an affine map covers an activation after it.
        covered = bool(sources) and not KINDS[node].covered and bounds.operators.find(sources[0]) is not None
        if not sources or not (KINDS[node].passes or covered):
            source = sources[0] if sources else index
            magnitude, size = bounds.magnitude(source), max(node.size, nodes[source].size)
            if isinstance(node, Bilinear):
                other = node.inputs[1]
                magnitude = (1 + magnitude) * (1 + bounds.magnitude(other))
                size = max(size, nodes[other].size) * node.terms
            dtype = torch.float32 if self._float32.holds(source) else magnitude.dtype
            operator = bounds.operators.find(index)
            parts.append(rounding.lost(operator, magnitude, size, dtype))
        return sum(parts[1:], parts[0])


@dataclass(frozen=True)
class Kind:
    """What a kind of node means to the rounding of rows.

    Attributes:
        error: ``Slack.error`` of a node, (batch, size), of the slack and of the arguments that ``error`` has, the node
            itself after its index.
        passes: whether the node gives its rows to its inputs as they are, perhaps in another order.
        covered: whether a node that alone uses it, and passes its rows on to it, covers its error (``Slack.covered``).
    """

    error: Callable[[Slack, int, Any, int | None, bool], Tensor]
    passes: bool = False
    covered: bool = True


KINDS: Table[Kind] = Table(
    "the rounding of rows",
    {
        Input: Kind(Slack.error_of_value),
        Affine: Kind(Slack.error_of_map),
        Activation: Kind(Slack.error_of_value, covered=False),
        Add: Kind(Slack.error_of_sum, passes=True),
        Bilinear: Kind(Slack.error_of_value),
        Permute: Kind(Slack.error_of_permuted, passes=True),
        Reshape: Kind(Slack.error_of_reshaped, passes=True),
    },
)
