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

**Which coefficients are in float32.** Products in float32 take half the time and half the memory. An error in a
coefficient counts by how far the node's value may be from the node's point, so that at most of the first nodes float32
widens bounds by a small part of their width.

**Lines.** The lines of activations are kept as they are (``LineTable``) and about the nodes' points, moved outward by
what rounding may change (``ShiftedLines``): one step of a row back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from verifiable_relu.bounds import rounding, sums
from verifiable_relu.bounds.activations import relax, row, unstable
from verifiable_relu.bounds.beside import Aside
from verifiable_relu.bounds.forward import NodeBounds
from verifiable_relu.bounds.kinds import of_samples
from verifiable_relu.bounds.maxima import Between
from verifiable_relu.bounds.operators import ConvolutionOperator, Operators
from verifiable_relu.bounds.tuning import Bounds, Lines, Tuning
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import (
    Activation,
    Add,
    Affine,
    Beside,
    Bilinear,
    Conv2d,
    Extreme,
    Linear,
    Permute,
    Relu,
    Reshape,
)

_PASSING = Add | Reshape | Permute
"""Nodes that give their rows to their inputs as they are, perhaps in another order."""


class Float32:
    """The nodes of a relaxation whose coefficients are in float32: all up to ``last_node``.

    Args:
        bounds: the nodes' bounds.
        tuning: how far float32 may go.
        everywhere: to go as far as sums in float32 are accounted for.
    """

    def __init__(self, bounds: NodeBounds, tuning: Tuning, everywhere: bool = False) -> None:
        self._network, self._operators, self._start = bounds.network, bounds.operators, bounds.start
        self._tuning, self._everywhere = tuning, everywhere
        self._allowed = bounds.float32

    @cached_property
    def last_node(self) -> int:
        """The last node whose coefficients are in float32; −1 if there is none."""
        # Where rows of two networks cancel, their errors do not.
        if not self._allowed or self._network.paired:
            return -1
        return last_float32_node(self._network, self._operators, self._start, self._everywhere, self._tuning)

    def holds(self, index: int) -> bool:
        """Whether the coefficients of node ``index`` are in float32."""
        return index <= self.last_node

    def sums(self, index: int) -> bool:
        """Whether sums of the affine map ``index`` may be taken in float32."""
        return self._allowed and isinstance(self._network.nodes[index], Affine) and self._operators[index].fits32

    def narrows(self, index: int) -> bool:
        """Whether rows of the dense layer ``index`` are taken in float32 before they are pulled back through it."""
        node = self._network.nodes[index]
        return isinstance(node, Linear) and self.holds(node.inputs[0]) and self.sums(index)


def last_float32_node(network: Network, operators: Operators, start: int, everywhere: bool, tuning: Tuning) -> int:
    """The last node up to which coefficients are in float32; −1 if there is none.

    By default the first convolutions of a network and what lies between them are in float32, and the inputs of a dense
    network if there are many. With ``everywhere`` all nodes are, up to the first whose sums may not be in float32.
    Rows pass from float64 to float32 only on their way through an affine map.
    """
    depth, last, nodes = 0, start, network.nodes
    for index in range(start + 1, len(nodes)):
        node = nodes[index]
        if isinstance(node, Conv2d) or (everywhere and isinstance(node, Linear)):
            operator = operators[index]
            if isinstance(operator, ConvolutionOperator) and not everywhere:
                depth += operator.adjoint_terms
            if depth > tuning.float32_depth or not operator.fits32:
                break
        elif not isinstance(node, Activation | Add | Extreme | Reshape | Permute):
            break
        last = index
    while last >= start and any(
        not isinstance(node, Affine) and min(node.inputs) <= last for node in nodes[last + 1 :]
    ):
        last -= 1
    if everywhere or any(isinstance(node, Conv2d) for node in nodes[start + 1 : last + 1]):
        return last
    first = [(i, node) for i, node in enumerate(nodes) if node.inputs == (start,)]
    narrow = all(
        isinstance(node, Linear) and node.size <= tuning.float32_neurons and operators[i].fits32 for i, node in first
    )
    return start if last >= start and narrow and nodes[start].size >= tuning.float32_inputs else -1


class Slack:
    """The error of one unit of |A| at every node, computed when it is first asked for.

    Args:
        bounds: the nodes' bounds and points.
        float32: which coefficients are in float32.
        tuning: when terms are counted.
    """

    def __init__(self, bounds: NodeBounds, float32: Float32, tuning: Tuning) -> None:
        self.bounds, self.float32, self._tuning = bounds, float32, tuning
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
            self._errors[key] = self._error(index, after, alone)
        return self._errors[key]

    def _error(self, index: int, after: int | None, alone: bool) -> Tensor:
        node = self._nodes[index]
        if index != self.bounds.start and isinstance(node, Affine):
            return self._error_of_map(index, node, after, alone)
        if index != self.bounds.start and isinstance(node, Add):
            # Of both inputs, and of their points' sum.
            first, second = (self.error(i, after if self._uses[i] == 1 else None, alone) for i in node.inputs)
            return first + second + rounding.point(self.bounds.size(index).flatten(1))
        if index != self.bounds.start and isinstance(node, Reshape | Permute):
            before = self.error(node.inputs[0], alone=alone)
            shape = self._nodes[node.inputs[0]].shape
            return before if isinstance(node, Reshape) else node.forward(before.unflatten(1, shape)).flatten(1)
        # Of A·v̂, and of the lines of a ReLU after it.
        error = rounding.value(self.bounds.size(index).flatten(1), self.sums)
        if self.float32.holds(index):
            # An activation may follow, of this or of a sum with it.
            error = error + rounding.backward_single(self.bounds.radius(index).flatten(1))
        return error

    def _error_of_map(self, index: int, node: Affine, after: int | None, alone: bool) -> Tensor:
        bounds, source, error = self.bounds, node.inputs[0], self.of_map(index)
        if self.float32.holds(source) and not (alone and self.float32.sums(index)):
            terms = 0 if alone else self.terms(index, after)
            if bounds.is_centred(source):
                error = error + rounding.backward_single(bounds.reach(index), terms)
            else:
                error = error + rounding.backward_single(bounds.radius(source), terms, bounds.operators[index])
        return error.expand(-1, *node.shape).flatten(1)

    def of_map(self, index: int) -> Tensor:
        """The error of the affine map ``index`` where all is in float64, (batch, *shape)."""
        if index not in self._affine:
            operator = self.bounds.operators[index]
            reach = self.bounds.size(operator.node.inputs[0])
            self._affine[index] = rounding.backward_affine(operator, reach, self.sums)
        return self._affine[index]

    def product(self, index: int) -> Tensor:
        """(batch, size) the error of one unit of |A| in pulling rows A back through the product ``index``."""
        if index not in self._products:
            bounds, node = self.bounds, self._nodes[index]
            assert isinstance(node, Bilinear)
            radii = [bounds.radius(i) for i in node.inputs]
            sizes = [bounds.point(i).abs() + bounds.radius(i) for i in node.inputs]
            sums = self.sums + node.size
            found = rounding.bilinear(node.forward(*radii), node.forward(*sizes), node.terms, sums)
            self._products[index] = found.flatten(1)
        return self._products[index]

    def terms(self, index: int, after: int | None) -> int | Tensor:
        """How many products that are not zero a coefficient is the sum of, in float32, behind an affine map.

        One number for all coefficients of the map's input, or behind a dense layer one for each sample, (batch, 1).
        """
        node, operator = self._nodes[index], self.bounds.operators[index]
        if isinstance(operator, ConvolutionOperator) and self.float32.holds(index):
            return operator.adjoint_terms
        if not self.float32.narrows(index):
            return 0
        if after is None:
            return node.size
        return self.bounds.possibly_active(after).sum(1, keepdim=True, dtype=self.bounds.point(index).dtype)

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
            if isinstance(self._nodes[index], _PASSING):
                for source in self._nodes[index].inputs:
                    if self._uses[source] == 1 and not isinstance(self._nodes[source], Activation):
                        found |= self.covered(source)
            self._covered[index] = frozenset(found)
        return self._covered[index]

    def merged(self, index: int) -> Tensor:
        """(batch, size) the error of one unit of |A| in adding two rows of node ``index``."""
        dtype = torch.float32 if self.float32.holds(index) else self.bounds.point(index).dtype
        return rounding.accumulate(self.bounds.radius(index).flatten(1), dtype)

    def end(self, terms: int = 0) -> Tensor:
        """(batch, size) r so large that −|A|·r, computed, is a lower bound of A·(v − v̂) where rows end.

        Args:
            terms: how many numbers are summed, if not as many as the node has.
        """
        start = self.bounds.start
        terms = terms or self._nodes[start].size
        if terms not in self._ends:
            radius = self.bounds.radius(start).flatten(1)
            if self.float32.holds(start):
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
        bounds, nodes, node = self.bounds, self._nodes, self._nodes[index]
        if index < bounds.start:
            return bounds.values[0].lower.new_zeros(bounds.samples)
        sources = () if index == bounds.start else node.inputs
        parts = [self._lost[i] for i in sources]
        # What is lost at an affine map covers an activation after it.
        covered = isinstance(node, Activation) and bounds.operators.find(node.inputs[0]) is not None
        if not sources or not (isinstance(node, _PASSING) or covered):
            source = sources[0] if sources else index
            magnitude, size = bounds.magnitude(source), max(node.size, nodes[source].size)
            if isinstance(node, Bilinear):
                other = node.inputs[1]
                magnitude = (1 + magnitude) * (1 + bounds.magnitude(other))
                size = max(size, nodes[other].size) * node.terms
            dtype = torch.float32 if self.float32.holds(source) else magnitude.dtype
            operator = bounds.operators.find(index)
            parts.append(rounding.lost(operator, magnitude, size, dtype))
        return sum(parts[1:], parts[0])


class LineTable:
    """The lines of each activation over its input's bounds.

    Attributes:
        identity_lower: of ReLUs whose inputs rows have bounded, by index: for which neurons the lower line is z, not 0;
            (batch, *shape) bool.
    """

    def __init__(self, bounds: NodeBounds) -> None:
        self._bounds = bounds
        self.identity_lower: dict[int, Tensor] = {}
        self._lines: dict[int, Lines] = {}
        self._ends: dict[int, tuple[Tensor, ...]] = {}

    def node(self, index: int) -> Activation:
        """The activation node ``index``."""
        node = self._bounds.network.nodes[index]
        assert isinstance(node, Activation)
        return node

    def of(self, index: int) -> Lines:
        """The lines of activation ``index`` that all rows share, (batch, *shape)."""
        if index not in self._lines:
            lines = self._bounds.rules.lines(index, self.node(index), self._bounds.pre[index])
            if index in self.identity_lower:
                lines = replace(lines, lower_slope=self.identity_lower[index].to(lines.lower_slope))
            self._lines[index] = lines
        return self._lines[index]

    def free(self, index: int) -> Tensor:
        """Where activation ``index`` leaves a choice between lines, as 0 or 1: (batch, *shape)."""
        return unstable(self.node(index), self._bounds.pre[index]).to(self._bounds.values[0].lower)

    def chosen(self, index: int, sample: Tensor, slope: Tensor) -> Lines:
        """The lines of activation ``index`` for rows that choose their own, as ``slope`` of ``activations.relax`` does.

        Args:
            index: the activation.
            sample: (rows,) the sample of each row.
            slope: (rows, *shape), in [0, 1].
        """
        node = self.node(index)
        if not isinstance(node, Relu):
            pre, curve = self._bounds.pre[index], row(node).curve
            mine = Bounds(of_samples(pre.lower, sample), of_samples(pre.upper, sample))
            if curve is None:
                return relax(node, mine, slope)
            if index not in self._ends:
                self._ends[index] = curve.slopes(node, pre, True)
            return curve.between(node, mine, tuple(of_samples(end, sample) for end in self._ends[index]), slope)
        # Of a ReLU only the slope of the lower line can be chosen, and only where the bounds straddle zero.
        common, free = self.of(index), self.free(index)
        fixed = common.lower_slope * (1 - free)
        return Lines(
            torch.addcmul(of_samples(fixed, sample), of_samples(free, sample), slope),
            of_samples(common.lower_offset, sample),
            of_samples(common.upper_slope, sample),
            of_samples(common.upper_offset, sample),
        )


@dataclass(frozen=True)
class LineStep:
    """How rows A of an activation's output are replaced by rows of its input.

    A⁺·(lower line) + A⁻·(upper line) is taken as A·(lower line) + A⁻·(upper line − lower line).

    Attributes:
        low: the slope of the lower line, (batch, neurons).
        rise: the slope of the difference of both lines, likewise.
        floor: the offset of the lower line, likewise; None where all lower lines go through the origin.
        lift: the offset of the difference, likewise.
        float32: whether rows, and the sums of their constants, are in float32 in a network in float64.
    """

    low: Tensor
    rise: Tensor
    floor: Tensor | None
    lift: Tensor
    float32: bool = False

    @staticmethod
    def of(node: Activation, lines: Lines) -> LineStep:
        """The lines as they are."""
        through = isinstance(node, Relu)
        step = LineStep(
            lines.lower_slope,
            lines.upper_slope - lines.lower_slope,
            None if through else lines.lower_offset,
            lines.upper_offset if through else lines.upper_offset - lines.lower_offset,
        )
        return step.map(lambda t: t.flatten(1))

    def map(self, change: Callable[[Tensor], Tensor]) -> LineStep:
        """The step with ``change`` applied to each slope and offset."""
        floor = None if self.floor is None else change(self.floor)
        return LineStep(change(self.low), change(self.rise), floor, change(self.lift), self.float32)

    def of_samples(self, sample: Tensor | None) -> LineStep:
        """The steps of the samples named, one after another; by default of every sample."""
        return self.map(lambda t: of_samples(t, sample))

    def in_float32(self, depth: int) -> LineStep:
        """The step in float32, outward enough for sums in which a product takes part in ``depth`` additions."""
        assert self.floor is not None
        lift, floor = rounding.summed_single(self.lift, self.floor, depth)
        return replace(self, lift=lift, floor=floor, float32=True).map(lambda t: t.float())

    @cached_property
    def _slopes(self) -> tuple[Tensor, Tensor]:
        """``low`` and ``rise`` for every row of a sample, (batch, 1, neurons)."""
        return self.low.unsqueeze(1), self.rise.unsqueeze(1)

    def back(self, a: Tensor, tuning: Tuning) -> tuple[Tensor, Tensor]:
        """Coefficients before the activation of those after it, (groups, each, neurons), and their constants."""
        (low, rise), negative = self._slopes, a.clamp(max=0)
        before = (a * low).addcmul_(negative, rise)
        if self.float32:
            assert self.floor is not None
            products = negative.mul_(self.lift.unsqueeze(1)).addcmul_(a, self.floor.unsqueeze(1))
            return before, sums.last_axes(products, 1, tuning)
        return before, sums.dot(negative, self.lift, None if self.floor is None else (a, self.floor))


class ShiftedLines:
    """The steps through the activations of a relaxation, made as they are needed.

    Args:
        bounds: the nodes' bounds and points.
        lines: the activations' lines.
        slack: what rounding may change.
        float32: which coefficients are in float32.
        tuning: of sums in float32.
    """

    def __init__(self, bounds: NodeBounds, lines: LineTable, slack: Slack, float32: Float32, tuning: Tuning) -> None:
        self.bounds, self._lines, self._slack, self._float32 = bounds, lines, slack, float32
        self._tuning = tuning
        self._steps: dict[tuple[int, bool, int], LineStep] = {}
        self._between: dict[tuple[int, bool], Between] = {}
        self._aside: dict[tuple[int, bool], Aside] = {}

    def depth(self, index: int, count: int | None = None) -> int:
        """In how many float32 additions a product with a neuron of activation ``index`` takes part; 0 in float64.

        Args:
            index: the activation.
            count: how many products are summed, if not as many as the activation has neurons.
        """
        if not self._float32.holds(index):
            return 0
        own = sums.depth(self._lines.node(index).size, self._tuning)
        return own if count is None else max(own, sums.depth(count, self._tuning))

    def step(self, index: int, rounded: bool, depth: int = 0) -> LineStep:
        """The step through activation ``index`` that all rows of a sample share.

        Args:
            index: the activation.
            rounded: whether to account for rounding: about the nodes' points, and outward.
            depth: in float32, how many additions a product takes part in; 0 for float64.
        """
        key = (index, rounded, depth)
        if key not in self._steps:
            if depth:
                self._steps[key] = self.step(index, rounded).in_float32(depth)
            else:
                lines = self._lines.of(index)
                self._steps[key] = (
                    self.outward(index, lines, None) if rounded else LineStep.of(self._lines.node(index), lines)
                )
        return self._steps[key]

    def lend(self, index: int, of: ShiftedLines) -> None:
        """Take the lines of another relaxation for node ``index``, where rounding does not count."""
        dtype = self.bounds.values[0].lower.dtype
        if isinstance(self.bounds.network.nodes[index], Beside):
            self._aside[index, False] = of.aside(index, False).to(dtype)
        else:
            self._between[index, False] = of.between(index, False).to(dtype)

    def between(self, index: int, rounded: bool) -> Between:
        """The step through the maxima of node ``index``."""
        key = (index, rounded)
        if key not in self._between:
            node = self.bounds.network.maxima[index]
            found = Between.of(node, self.bounds.of(node.inputs[0]))
            self._between[key] = found.about(self.bounds, index, self._slack.sums) if rounded else found
        return self._between[key]

    def aside(self, index: int, rounded: bool) -> Aside:
        """The step through the node ``index`` of a network beside another."""
        key = (index, rounded)
        if key not in self._aside:
            found = Aside.of(self.bounds, index)
            self._aside[key] = found.about(self.bounds, index, self._slack.sums) if rounded else found
        return self._aside[key]

    def own(self, index: int, lines: Lines, sample: Tensor, rounded: bool) -> LineStep:
        """The step through activation ``index`` of rows that have their own lines, (rows, *shape).

        ``sample``: (rows,) the sample of each.
        """
        if not rounded:
            return LineStep.of(self._lines.node(index), lines)
        step, depth = self.outward(index, lines, sample), self.depth(index)
        return step.in_float32(depth) if depth else step

    def outward(self, index: int, lines: Lines, sample: Tensor | None) -> LineStep:
        """The step of lines about the points of activation ``index``, moved outward by what rounding may change.

        Args:
            index: the activation.
            lines: those of every sample, (batch, *shape); or rows' own lines, (rows, *shape).
            sample: (rows,) the sample of each row that has its own lines, else None.
        """
        node, bounds, slack = self._lines.node(index), self.bounds, self._slack
        source = node.inputs[0]

        def of(values: Tensor) -> Tensor:
            return values if sample is None else of_samples(values, sample)

        lines = Lines(*(t.flatten(1) for t in lines.parts()))
        z, error = of(bounds.point(source).flatten(1)), of(slack.error(source, slack.after_relu(index)))
        if isinstance(node, Relu):
            error = error * of(bounds.possibly_active(index))
        else:
            error = error * torch.maximum(lines.lower_slope.abs(), lines.upper_slope.abs())
            size, image = of(bounds.size(source).flatten(1)), of(bounds.size(index).flatten(1))
            radius = of(bounds.radius(source).flatten(1)) if self._float32.holds(index) else None
            error = error + rounding.backward_activation(node, size, image, lines, slack.sums, radius)
        rise = lines.upper_slope - lines.lower_slope
        top = torch.addcmul(lines.upper_offset - lines.lower_offset, rise, z)
        floor = torch.addcmul(lines.lower_offset, lines.lower_slope, z) - of(bounds.point(index).flatten(1))
        lift, floor = rounding.outward(top, floor, error, node.size + slack.sums)
        return LineStep(lines.lower_slope, rise, floor, lift)
