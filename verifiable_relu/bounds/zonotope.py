"""Bounds of every node of a ReLU network in one forward pass: zonotopes over the inputs, for boxes of few inputs.

A node's value x is enclosed by an affine form, the same for the whole network:

    x ∈ c + Σ_k G_k·ε_k + [−e, e],   ε_k ∈ [−1, 1].

The first noise symbols ε are the inputs that vary. Each unstable ReLU adds one: with slope s = u/(u − l) over its
input's bounds [l, u], max(z, 0) − s·z lies in [0, q], q = −s·l, which is q/2 + (q/2)·ε (Singh et al., Fast and
Effective Robustness Certification, NeurIPS 2018). Stable ReLUs are exact. A pass costs one product with
each weight and as many columns as there are symbols, where backward bounds of all neurons need as many rows as there
are neurons, for every layer and all layers before it.

Neurons of a dense layer that repeat another one, or its negative, have that neuron's symbol.

Rounding: e holds every error that is made, as an interval, and goes through an affine map W·x + b as |W|·e. With
S = |c| + Σ_k |G_k| + e,

* the products W·c + b and W·G_k, and weights that are known up to an error, are off by at most
  γ·(|W|·S + |b|) together, over all k, as ``rounding.interval_affine`` grants for W·c + b alone: the errors of W·c + b
  and of the columns are γ·(|W|·|c| + |b|) and γ·|W|·|G_k|;
* slope·c + q/2 and slope·G_k are off by at most 2u·(slope·S + q) together, and q, computed, by 4u·q;
* sums over k of numbers that are not negative are too small by γ of themselves at most;
* underflow loses at most the smallest normal number in each product.

The slope itself may be any number in [0, 1]: q is the largest value of max(z, 0) − s·z over [l, u], at one of its ends.
NaN goes on to what depends on it, and proves nothing.

**Mirrors.** Networks that compute a maximum or an absolute value hold such neurons: max(a, b) = (|a − b| + a + b)/2 is
written with the ReLUs of a − b, b − a, a + b and −a − b. Since max(−z, 0) = max(z, 0) − z, one unknown serves both
neurons of a pair: bounds that know of it see that max(z, 0) − max(−z, 0) is z, which bounds of each neuron by itself
cannot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from verifiable_relu.bounds import rounding
from verifiable_relu.bounds.beside import Secants
from verifiable_relu.bounds.operators import DenseOperator, Operators, prepared
from verifiable_relu.bounds.tuning import TUNING, Bounds, Tuning
from verifiable_relu.network.dispatch import Refusal, Table
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import (
    Activation,
    Add,
    Affine,
    Beside,
    Bilinear,
    Extreme,
    Input,
    Linear,
    Maximum,
    Permute,
    Relu,
    Reshape,
)
from verifiable_relu.rounding import divisor, epsilon, gamma, tiny, unit_roundoff, varies


@dataclass(frozen=True, eq=False)
class Mirrors:
    """For each neuron of a layer one neuron with the same magnitude for every input.

    Attributes:
        first: (size,) the number of that neuron, which is the neuron itself or an earlier one.
        turned: (size,) whether the neuron has that neuron's value times −1.
    """

    first: Tensor
    turned: Tensor

    @cached_property
    def leads(self) -> Tensor:
        """(size,) whether the neuron is that neuron itself."""
        return self.first == torch.arange(len(self.first), device=self.first.device)


def mirrors(node: Linear) -> Mirrors | None:
    """The neurons of a dense layer that mirror or repeat an earlier one; None where there are none.

    Two neurons belong together where their weights and biases are the same numbers, or the same but for their sign.
    """
    if node.weight_error or node.weight.requires_grad or node.bias.requires_grad:
        return None
    rows = torch.cat([node.weight, node.bias[:, None]], 1).detach().double()
    # Rows with the same magnitudes have the same sum of products with random numbers, up to its sign.
    generator = torch.Generator().manual_seed(0)
    chances = torch.rand(rows.shape[1], generator=generator, dtype=torch.float64).to(rows)
    sums = (rows * chances).sum(1).abs()
    order = sums.argsort(stable=True)
    begins = torch.ones(len(order), dtype=torch.bool, device=rows.device)
    begins[1:] = sums[order[1:]] != sums[order[:-1]]
    place = begins.nonzero().squeeze(1)[begins.cumsum(0) - 1]
    first = torch.empty_like(order)
    first[order] = order[place]
    own = torch.arange(len(order), device=rows.device)
    later = (first != own).nonzero().squeeze(1)
    # What the sums suggest is compared number by number.
    same = (rows[later] == rows[first[later]]).all(1)
    turned = (rows[later] == -rows[first[later]]).all(1) & ~same
    first[later] = torch.where(same | turned, first[later], later)
    if not bool((same | turned).any()):
        return None
    every = torch.zeros_like(begins).index_fill_(0, later[turned], True)
    # The map is applied at every position before the last axis.
    positions = node.size // len(order)
    starts = torch.arange(positions, device=rows.device)[:, None] * len(order)
    return Mirrors((starts + first).flatten(), every.repeat(positions))


@dataclass(frozen=True)
class AffineForm:
    """The affine form of one node over a batch of boxes.

    Attributes:
        center: c, (batch, *shape).
        generators: G, (batch, symbols, *shape), of the first symbols of the network; of later ones it is zero.
        error: e, (batch, *shape).
    """

    center: Tensor
    generators: Tensor
    error: Tensor

    @cached_property
    def widths(self) -> Tensor:
        """|G|, (batch, symbols, *shape)."""
        return self.generators.abs()

    @cached_property
    def size(self) -> Tensor:
        """≥ Σ_k |G_k| + e, (batch, *shape)."""
        found = self.widths.sum(1) + self.error
        return found * (1 + 2 * gamma(self.generators.shape[1] + 4, found.dtype))

    @cached_property
    def reach(self) -> Tensor:
        """≥ |c| + Σ_k |G_k| + e, (batch, *shape)."""
        return (self.center.abs() + self.size) * (1 + 4 * unit_roundoff(self.center.dtype))

    def bounds(self) -> Bounds:
        """Of the node's value, outward; (batch, *shape)."""
        u = unit_roundoff(self.center.dtype)
        reach = self.size + 4 * u * (self.center.abs() + self.size) + tiny(self.center.dtype)
        return Bounds(self.center - reach, self.center + reach)

    def each(self, move: Callable[[Tensor], Tensor]) -> AffineForm:
        """A linear map of every part, given as one of a batch."""
        generators = move(self.generators.flatten(0, 1)).unflatten(0, self.generators.shape[:2])
        return AffineForm(move(self.center), generators, move(self.error))


NARROW = 64
"""Where more inputs vary, zonotopes have too many symbols."""


def takes(network: Network) -> bool:
    """Whether every node of a network has an affine form here."""
    return all(node in FORMS for node in network.nodes[1:])


def box_bytes(network: Network, varying: int, most: int) -> int:
    """About the bytes of one box's affine forms: a few arrays of all symbols at the node where these are largest.

    Args:
        network: the network.
        varying: how many inputs vary.
        most: how many symbols a layer may add.
    """
    symbols, largest = varying, 1
    for node in network.nodes:
        if isinstance(node, Activation):
            symbols += min(node.size, most)
        largest = max(largest, symbols * node.size)
    return 4 * 8 * largest


class Zonotopes:
    """The affine forms of a network's nodes over a batch of boxes.

    Args:
        network: in the dtype and on the device of ``box``; ``takes`` it.
        box: the inputs, (batch, *input_shape).
        most: how many symbols a layer may add; what its other unstable neurons may be off by goes into the error, those
            with the least q first.
        mirrored: whether neurons that repeat or mirror another one share its symbol.
        stop: asked before every node; what it raises ends the pass.
        tuning: of products with weights.

    Attributes:
        pre: bounds of the ReLUs' inputs, by the ReLU's index, each (batch, *shape).
        output: the form of the output.
        share: (batch, symbols, inputs) the part of each symbol's neuron's width that comes from each input; of the
            symbol of an input 1 for itself. Of a steering use: its rounding is not accounted for.
        varying: (V,) the inputs with symbols, in the order of these.
        radius: (batch, V) by how much an input moves per unit of its symbol.

    Raises:
        UnsupportedError: for an operator without an affine form.
    """

    def __init__(
        self,
        network: Network,
        box: Bounds,
        most: int = 64,
        stop: Callable[[], object] | None = None,
        tuning: Tuning = TUNING,
        mirrored: bool = True,
    ) -> None:
        self.operators: Operators = prepared(network, tuning)
        self.nodes, self.most, self._mirrored = network.nodes, most, mirrored
        self.pre: dict[int, Bounds] = {}
        first, self.share, self.varying = _of_inputs(box)
        self.radius = first.generators.flatten(2).sum(2)
        forms: dict[int, AffineForm] = {0: first}
        waiting = dict(network.uses)
        for index, node in enumerate(network.nodes[1:], start=1):
            if stop is not None:
                stop()
            forms[index] = FORMS[node](self, index, node, [forms[i] for i in node.inputs])
            for source in node.inputs:
                waiting[source] -= 1
                if not waiting[source]:
                    del forms[source]
        self.output = forms[len(network.nodes) - 1]

    def mirrors(self, node: Relu) -> Mirrors | None:
        """The neurons before a ReLU that have another's magnitude, if a dense layer computes them."""
        operator = self.operators.find(node.inputs[0])
        if not (self._mirrored and isinstance(operator, DenseOperator)):
            return None
        return operator.once("mirrors", lambda: mirrors(operator.node))

    @property
    def symbols(self) -> int:
        """How many noise symbols there are so far."""
        return self.share.shape[1]

    def lower(self, matrix: Tensor, sample: Tensor) -> tuple[Tensor, Tensor]:
        """Lower bounds of rows·y, and the coefficients of linear lower bounds that are no lower anywhere.

        The value of a form is a·c + Σ_k (a·G_k)·ε_k, give or take |a|·e and γ of Σ |a|·(|c| + Σ_k |G_k| + e) for
        rounding. A symbol ε_k of an input is that input's distance from the center, divided by its radius.

        Args:
            matrix: (R, outputs), rows of the flattened output y.
            sample: (R,) the box of each row.

        Returns:
            (R,) values, and (R, inputs) coefficients that are off by a few units of roundoff of themselves.
        """
        form = self.output
        middle, along = self.along(matrix, sample)
        center, size, error = (part.flatten(1)[sample] for part in (form.center, form.size, form.error))
        row = matrix.abs()
        relative = gamma(matrix.shape[1] + along.shape[1] + 16, matrix.dtype)
        lost = (
            2 * relative * (row * (center.abs() + size)).sum(1)
            + 4 * tiny(matrix.dtype) * along.shape[1] * matrix.shape[1]
        )
        values = middle - along.abs().sum(1) - (row * error).sum(1) - lost
        radius = self.radius[sample]
        own = along[:, : len(self.varying)] / radius
        coefficients = matrix.new_zeros(len(matrix), self.share.shape[2])
        coefficients[:, self.varying] = torch.where(radius > 0, own, 0.0)
        return values, coefficients

    def along(self, matrix: Tensor, sample: Tensor) -> tuple[Tensor, Tensor]:
        """The forms of rows·y without their errors: centers (R,) and coefficients (R, symbols), rounding aside."""
        center, generators = self.output.center.flatten(1), self.output.generators.flatten(2)
        return (matrix * center[sample]).sum(1), torch.einsum("ro,rko->rk", matrix, generators[sample])

    def influence(self, matrix: Tensor, sample: Tensor) -> Tensor:
        """How much of the width of rows·y comes from each input, directly and by way of unstable ReLUs.

        Args:
            matrix: (R, outputs), rows of the flattened output y.
            sample: (R,) the box of each row.

        Returns:
            (R, inputs), in units of the rows; rounding is not accounted for.
        """
        widths = self.along(matrix, sample)[1].abs()
        return torch.einsum("rk,rki->ri", widths, self.share[sample, : widths.shape[1]])


def _of_inputs(box: Bounds) -> tuple[AffineForm, Tensor, Tensor]:
    """The form of the inputs, with a symbol for each that is wider than rounding makes it, the symbols' shares, and
    the inputs with symbols."""
    flat = box.flat()
    center = torch.lerp(flat.lower, flat.upper, 0.5)
    # Two units of roundoff of either, which the error covers.
    radius = torch.maximum(flat.upper - center, center - flat.lower)
    wide = varies(flat.lower, flat.upper).any(0)
    varying = wide.nonzero().squeeze(1)
    batch, inputs = center.shape
    unit = unit_roundoff(center.dtype)
    error = 4 * unit * (center.abs() + radius) + tiny(center.dtype)
    error = torch.where(wide, error, error + radius)
    generators = center.new_zeros(batch, len(varying), inputs)
    own = torch.arange(len(varying), device=center.device)
    generators[:, own, varying] = radius[:, varying]
    share = center.new_zeros(1, len(varying), inputs)
    share[0, own, varying] = 1
    shape = box.lower.shape[1:]
    form = AffineForm(center.unflatten(1, shape), generators.unflatten(2, shape), error.unflatten(1, shape))
    return form, share.expand(batch, -1, -1), varying


def _affine(of: Zonotopes, index: int, node: Affine, inputs: list[AffineForm]) -> AffineForm:
    operator, before = of.operators[index], inputs[0]
    center = operator.forward(before.center)
    radius, growth, extra = rounding.interval_affine(operator, before.reach, before.error, center)
    columns = before.generators.shape[1]
    lost = 8 * tiny(extra.dtype) * node.terms * (columns + 2)
    error = operator.absolute(radius) * growth + (extra + lost)
    generators = before.generators.flatten(0, 1)
    products = operator.linear(generators) if columns else generators.new_zeros(0, *node.shape)
    return AffineForm(center, products.unflatten(0, before.generators.shape[:2]), error)


def _relu(of: Zonotopes, index: int, node: Relu, inputs: list[AffineForm]) -> AffineForm:
    before = inputs[0]
    pre, group = before.bounds(), of.mirrors(node)
    unstable, slope, gap = chord(pre)
    if group is not None:
        pre, unstable, slope, gap = _shared(pre, unstable, slope, gap, group)
    of.pre[index] = pre
    half = gap / 2
    unit = unit_roundoff(gap.dtype)
    reach = slope * (before.center.abs() + before.size) + gap
    own = 4 * unit * reach + (before.generators.shape[1] + 4) * tiny(gap.dtype)
    error = slope * before.error
    error = torch.where(unstable, error * (1 + 4 * unit) + own, error)
    center = slope * before.center + half
    form = AffineForm(center, before.generators, error)
    return _with_symbols(of, before, form, slope, half, unstable, group)


def _beside(of: Zonotopes, index: int, node: Beside, inputs: list[AffineForm]) -> AffineForm:
    """f(z) and a multiple of d, with what the lines of d leave as ±half; or the form of g(z′) by itself.

    Every term of the sums is at most one of the sizes of which 16 units of roundoff are granted.
    """
    apart, first, second = inputs
    d = of.pre[index] = apart.bounds()
    f, g = (of.nodes[i] for i in node.inputs[1:])
    z, other = (of.pre[i] for i in node.inputs[1:])
    assert isinstance(f, Activation) and isinstance(g, Activation)
    known = Secants.of(f, g, z, other)
    lines = known.lines(d)
    slope = (lines.lower_slope + lines.upper_slope) / 2
    low, high = lines.lower_slope - slope, lines.upper_slope - slope
    least = torch.minimum(low * d.lower, low * d.upper) + lines.lower_offset
    most = torch.maximum(high * d.lower, high * d.upper) + lines.upper_offset
    half, center = (most - least) / 2, (most + least) / 2
    alone = ~(~known.free | (2 * half <= chord(z)[2] + chord(other)[2]))

    unit, columns = unit_roundoff(half.dtype), max(form.generators.shape[1] for form in inputs)
    reach = torch.maximum(d.lower.abs(), d.upper.abs()) + apart.center.abs() + apart.size
    own = 16 * unit * (slope.abs() * reach + first.center.abs() + first.size + half + center.abs())
    error = (first.error + slope.abs() * apart.error + own + (columns + 8) * tiny(half.dtype)) * (1 + 8 * unit)
    generators = _padded(first.generators, columns) + slope[:, None] * _padded(apart.generators, columns)
    generators = torch.where(alone[:, None], _padded(second.generators, columns), generators)
    center = torch.where(alone, second.center, first.center + slope * apart.center + center)
    error, half = torch.where(alone, second.error, error), torch.where(alone, 0.0, half)
    form = AffineForm(center, generators, error)
    return _with_symbols(of, apart, form, None, half, half > 0, None)


def _padded(generators: Tensor, columns: int) -> Tensor:
    """The coefficients of more symbols, of which the later ones are zero."""
    batch, count, *shape = generators.shape
    return torch.cat([generators, generators.new_zeros(batch, columns - count, *shape)], 1)


def _with_symbols(
    of: Zonotopes,
    before: AffineForm,
    form: AffineForm,
    slope: Tensor | None,
    half: Tensor,
    own_symbol: Tensor,
    group: Mirrors | None,
) -> AffineForm:
    """A form with a symbol of its own times ``half`` for some neurons, with ``half`` in the error for the others.

    Args:
        of: the forms so far.
        before: the form of whose widths the new symbols' shares are.
        form: without.
        slope: by which its generators are to be multiplied; None for 1.
        half: (batch, *shape).
        own_symbol: which neurons have ``half``; (batch, *shape) bool.
        group: neurons that share symbols.
    """
    error = form.error
    unit = unit_roundoff(half.dtype)
    flat, own_symbol = half.flatten(1), own_symbol.flatten(1)
    if group is not None:
        own_symbol = own_symbol & group.leads
    count = int(own_symbol.sum(1).amax()) if len(own_symbol) else 0
    neuron = torch.where(own_symbol, flat, 0.0).topk(min(count, of.most), dim=1).indices
    symbols, added = of.symbols, neuron.shape[1]
    of.share = torch.cat([of.share, _shares(of.share, before, neuron)], 1)
    number = torch.full_like(flat, -1, dtype=torch.long)
    number.scatter_(1, neuron, torch.arange(added, device=flat.device).expand(len(flat), -1))
    if group is not None:
        number = number[:, group.first]
    if count > of.most:
        rest = torch.where(number < 0, flat, 0.0).unflatten(1, half.shape[1:])
        error = (error + rest) * (1 + 4 * unit)
    columns = form.generators.shape[1]
    generators = half.new_empty(len(half), symbols + added, *half.shape[1:])
    if slope is None:
        generators[:, :columns] = form.generators
    else:
        torch.mul(slope[:, None], form.generators, out=generators[:, :columns])
    generators[:, columns:] = 0
    if added:
        values = torch.where(number < 0, 0.0, flat)
        generators[:, symbols:].flatten(2).scatter_(1, number.clamp(min=0)[:, None], values[:, None])
    return AffineForm(form.center, generators, error)


def _shared(
    pre: Bounds, unstable: Tensor, slope: Tensor, gap: Tensor, group: Mirrors
) -> tuple[Bounds, Tensor, Tensor, Tensor]:
    """Bounds and chords of a layer with those of the first neuron of each group in all of the group.

    From max(z, 0) = s·z + g with 0 ≤ g ≤ q follows max(−z, 0) = max(z, 0) − z = (1 − s)·(−z) + g, with the same g. The
    difference 1 − s, computed, is off by a unit of roundoff of itself at most: ``_relu`` grants twice as much.
    """

    def of_first(values: Tensor) -> Tensor:
        return values.flatten(1)[:, group.first].unflatten(1, values.shape[1:])

    turned = group.turned.reshape(1, *slope.shape[1:])
    lower, upper, first = of_first(pre.lower), of_first(pre.upper), of_first(slope)
    bounds = Bounds(torch.where(turned, -upper, lower), torch.where(turned, -lower, upper))
    return bounds, of_first(unstable), torch.where(turned, 1 - first, first), of_first(gap)


def chord(pre: Bounds) -> tuple[Tensor, Tensor, Tensor]:
    """Where a ReLU is unstable, a slope s in [0, 1], and q so that 0 ≤ max(z, 0) − s·z ≤ q over the bounds of z.

    Args:
        pre: of z, (batch, *shape).

    Returns:
        Three tensors of that shape; of stable neurons s is 0 or 1, and q is 0.
    """
    active = pre.lower >= 0
    unstable = ~active & ~(pre.upper <= 0)
    slope = torch.where(unstable, (pre.upper / (pre.upper - pre.lower)).clamp(0, 1), active.to(pre.lower))
    at_ends = torch.maximum(slope * -pre.lower, (1 - slope) * pre.upper)
    gap = at_ends * (1 + 4 * epsilon(slope.dtype)) + tiny(slope.dtype)
    return unstable, slope, torch.where(unstable, gap, 0.0)


def _shares(share: Tensor, before: AffineForm, neuron: Tensor) -> Tensor:
    """The shares of new symbols, of the neurons with these numbers, (batch, added), from the widths of their inputs."""
    widths = before.widths.flatten(2)
    reached = widths.transpose(1, 2) @ share[:, : widths.shape[1]]
    mine = reached.gather(1, neuron[:, :, None].expand(-1, -1, reached.shape[2]))
    return mine / divisor(mine.sum(2, keepdim=True))


def _add(of: Zonotopes, index: int, node: Add, inputs: list[AffineForm]) -> AffineForm:
    first, second = inputs
    if first.generators.shape[1] < second.generators.shape[1]:
        first, second = second, first
    missing = first.generators.shape[1] - second.generators.shape[1]
    unit = unit_roundoff(first.center.dtype)
    scale = first.reach + second.reach
    padded = torch.cat([second.generators, second.generators.new_zeros(len(second.center), missing, *node.shape)], 1)
    error = (first.error + second.error) * (1 + 4 * unit) + 4 * unit * scale
    return AffineForm(first.center + second.center, first.generators + padded, error)


def _moved(of: Zonotopes, index: int, node: Reshape | Permute, inputs: list[AffineForm]) -> AffineForm:
    return inputs[0].each(node.forward)


FORMS: Table[Callable[[Zonotopes, int, Any, list[AffineForm]], AffineForm]] = Table(
    "zonotopes",
    {
        Input: Refusal("the input's box is given"),
        Affine: _affine,
        Activation: Refusal("zonotopes have a form of ReLU alone"),
        Relu: _relu,
        Add: _add,
        Bilinear: Refusal("zonotopes have no form of products"),
        **dict.fromkeys((Maximum, Extreme), lambda of, index, node, inputs: inputs[-1]),
        Beside: _beside,
        Reshape: _moved,
        Permute: _moved,
    },
)
"""The form of a node from those of its inputs."""
