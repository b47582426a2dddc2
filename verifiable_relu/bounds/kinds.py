"""What each kind of node means to bounds: one row for each, with its interval, its point, its errors and its step back.

* ``image``: the box of a node's value over boxes of its inputs, by interval arithmetic, rounded outward.
* ``box``: the same, with what is known of the node otherwise.
* ``point``: the point of a node, about which rows of coefficients are propagated (``slack``).
* ``error``: what rounding may change in a row on its way back through the node, for one unit of its coefficients.
* ``back``: rows of a node as rows of its inputs. An affine node pulls them back by its adjoint, an activation replaces
  A⁺ by A⁺·(lower line) and A⁻ by A⁻·(upper line).

Source of the intervals: Gowal et al., On the Effectiveness of Interval Bound Propagation for Training Verifiably Robust
Models, arXiv 1810.12715, section 3.1 (centre and radius through an affine map).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from verifiable_relu.bounds import rounding, sums
from verifiable_relu.bounds.operators import Operator
from verifiable_relu.bounds.tuning import Bounds
from verifiable_relu.errors import UnsupportedError
from verifiable_relu.network.dispatch import Table
from verifiable_relu.network.nodes import (
    Activation,
    Add,
    Affine,
    Beside,
    Bilinear,
    Extreme,
    Input,
    Linear,
    MatMul,
    Maximum,
    Permute,
    Product,
    Reshape,
    Scale,
    Sparse,
)

if TYPE_CHECKING:
    from verifiable_relu.bounds.forward import NodeBounds, Tighten
    from verifiable_relu.bounds.relaxation import Walk
    from verifiable_relu.bounds.slack import Slack
    from verifiable_relu.bounds.windowed import Coefficients

_HUGE = 1e37
"""Sums of up to this size do not overflow in float32, nor on the way."""


def affine_image(
    operator: Operator[Affine],
    box: Bounds,
    about: tuple[Tensor, Tensor] | None = None,
    float32: bool | None = None,
) -> Bounds:
    """The box of W·x + b over a box of x, shaped (batch, *shape).

    Args:
        operator: of the affine map.
        box: of x.
        about: the box's centre, and W·x + b there, if known.
        float32: whether sums may be in float32 (``rounding.float32_is_plain``), if known.
    """
    node = operator.node
    if isinstance(node, Scale):
        return _scaled(node, operator, box)
    if isinstance(node, Sparse) and node.moves:
        # A whole number stays one: within the least error it could jump.
        return Bounds(node.forward(box.lower), node.forward(box.upper))
    center, radius = rounding.ball(box, None if about is None else about[0])
    middle, terms = None if about is None else about[1], _float32_terms(operator, radius, float32)
    rows = operator.one_sign
    if rows is not None and rows.all and not terms and bool((box.lower >= 0).all()):
        return _by_ends(operator, box, rows.rising)
    narrow = center.float() if terms else center
    size, radius = narrow.abs(), radius.to(narrow)
    if terms and middle is None and _bearable(operator, size.flatten(1).sum(1), radius.flatten(1).sum(1)):
        middle = operator.forward32(narrow)
        radius = rounding.interval_single(size, radius, operator.terms32[0])
    if middle is None:
        middle = operator.forward(center)
    radius, growth, extra = rounding.interval_affine(operator, size, radius, middle, terms)
    spread = torch.add(extra, operator.absolute32(radius) if terms else operator.absolute(radius), alpha=growth)
    if rows is None:
        return Bounds(middle - spread, spread.add_(middle))
    found = Bounds(middle - spread, middle + spread)
    near = (torch.minimum(found.lower.abs(), found.upper.abs()) <= _NEAR * spread) & rows.any | rows.constant
    if not bool(near.any()):
        return found
    ends = _by_ends(operator, box, rows.rising)
    return Bounds(torch.where(near, ends.lower, found.lower), torch.where(near, ends.upper, found.upper))


def _scaled(node: Scale, operator: Operator[Affine], box: Bounds) -> Bounds:
    """The box of s·x + b, element by element: its ends are the values at the ends of the box of x."""
    low, high = box.lower, box.upper
    rising = operator.once("rising", lambda: node.scale >= 0)
    if not operator.once("increasing", lambda: bool(rising.all())):
        low, high = torch.where(rising, low, high), torch.where(rising, high, low)
    if not operator.careful:
        error = rounding.interval_end(operator, 2 * operator.row_sums * rounding.size(box))
        return Bounds(
            torch.addcmul(operator.offset - error, node.scale, low),
            torch.addcmul(operator.offset + error, node.scale, high),
        )
    least, most = node.scale * low, node.scale * high
    lost = [rounding.interval_end(operator, 2 * part.abs()) for part in (least, most)]
    if operator.once("copies", lambda: not node.weight_error and bool((node.scale.abs() == 1).all())):
        # The sum of a number and its negative is 0, without an error: 1 − x at x = 1.
        known = operator.once("offset range", lambda: rounding.offset_range(operator))
        minus = torch.where(known.lower == known.upper, -operator.offset, torch.nan)
        lost = [off.masked_fill(part == minus, 0) for off, part in zip(lost, (least, most), strict=True)]
    found = Bounds(least + operator.offset - lost[0], most + operator.offset + lost[1])
    sign = operator.once("sign", node.scale.sign)
    return _beyond_offset(operator, found, sign * low >= 0, sign * high <= 0)


def _beyond_offset(operator: Operator[Affine], box: Bounds, positive: Tensor, negative: Tensor) -> Bounds:
    """The box of W·x + b cut where no term of W·x is negative, or none is positive (``rounding.offset_range``)."""
    offset = operator.once("offset range", lambda: rounding.offset_range(operator))
    return Bounds(
        torch.where(positive, torch.maximum(box.lower, offset.lower), box.lower),
        torch.where(negative, torch.minimum(box.upper, offset.upper), box.upper),
    )


_NEAR = 2.0**-10
"""Up to this part of a box's radius an end is near zero: centre ± radius leaves it few digits."""


def _by_ends(operator: Operator[Affine], box: Bounds, rising: Tensor) -> Bounds:
    """The box of W·x + b as its values at the ends of the box of x, in rows whose weights have one sign.

    Let W_i ≥ 0. Over l ≤ x ≤ u the least value is W_i·l + b_i, which is off by γ·(W_i·|l| + |b_i|): an end that is
    small next to the width of the box keeps its digits. Where no term of W_i·l is negative, the value is not below
    b_i, which no rounding moves. W_i ≤ 0 mirrors that.

    Args:
        operator: of the affine map.
        box: of x.
        rising: the rows of W that are not negative; others are taken for rows that are not positive.
    """
    signed = bool((box.lower >= 0).all()) or bool((box.upper <= 0).all())
    ends = []
    for x in (box.lower, box.upper):
        part = operator.linear(x)
        size = 2 * part.abs() if signed else operator.absolute(2 * x.abs())
        ends.append((part + operator.offset, rounding.interval_end(operator, size)))
    (low, lost_low), (high, lost_high) = ends
    lower, upper = (
        torch.where(rising, low - lost_low, high - lost_high),
        torch.where(rising, high + lost_high, low + lost_low),
    )
    first, second = (_sees_none(operator, x) for x in (box.lower < 0, box.upper > 0))
    positive, negative = torch.where(rising, first, second), torch.where(rising, second, first)
    if operator.adds_up and bool((box.lower >= 0).all()):
        # A sum is not below any of its terms, whatever rounding makes of it.
        lower = torch.maximum(lower, box.lower.amax(-1, keepdim=True))
    return _beyond_offset(operator, Bounds(lower, upper), positive, negative)


def _sees_none(operator: Operator[Affine], inputs: Tensor) -> Tensor:
    """Where every weight at these inputs, (batch, *shape) bool, is 0."""
    if not bool(inputs.any()):
        return torch.ones_like(operator.offset, dtype=torch.bool)
    # By a factor that keeps products with the least weights from being taken for 0.
    return operator.absolute(inputs.to(operator.offset) * 2.0**60) == 0


def _float32_terms(operator: Operator[Affine], radius: Tensor, float32: bool | None) -> int:
    """In how many float32 additions a product of |W|·radius takes part; 0 where sums are in float64."""
    node, tuning, terms = operator.node, operator.tuning, operator.terms32
    if not tuning.float32 or len(radius) < tuning.interval_samples or not 0 < max(terms) <= tuning.interval_terms:
        return 0
    large = not isinstance(node, Linear) or len(radius) * node.weight.numel() >= tuning.interval_products
    if not large or not operator.fits32 or radius[0].numel() > tuning.interval_inputs:
        return 0
    return terms[1] if (rounding.float32_is_plain(radius) if float32 is None else float32) else 0


def _bearable(operator: Operator[Affine], size: Tensor, radius: Tensor) -> bool:
    """Whether W·centre, too, may be summed in float32: no sum overflows, and no sample's box is widened by much.

    Args:
        operator: of the affine map.
        size: (batch,) the sum of |centre|.
        radius: (batch,) the sum of the radius, to a share of which the widening is compared (``interval_widening``).
    """
    most = operator.once("largest row sum", lambda: float(operator.row_sums.amax().clamp(min=1)))
    part = rounding.share_single(operator.terms32[0])
    allowed = (radius * operator.tuning.interval_widening).clamp_(max=part * _HUGE / most)
    return bool((size * part <= allowed).all())


def _corners(x: Bounds, y: Bounds) -> Bounds:
    """The least and the largest product of numbers of two boxes, which are at corners; (batch, …) each."""
    products = [a * b for a in (x.lower, x.upper) for b in (y.lower, y.upper)]
    least, most = torch.minimum(*products[:2]), torch.maximum(*products[:2])
    for product in products[2:]:
        least, most = torch.minimum(least, product), torch.maximum(most, product)
    return Bounds(least, most)


def _signed(box: Bounds, positive: Tensor, negative: Tensor) -> Bounds:
    """A box cut at 0 where its values are known not to be negative, or not to be positive."""
    return Bounds(
        torch.where(positive, box.lower.clamp(min=0), box.lower),
        torch.where(negative, box.upper.clamp(max=0), box.upper),
    )


def of_samples(values: Tensor, sample: Tensor | None) -> Tensor:
    """The values, (batch, …), of the samples named, one after another; by default of every sample."""
    if sample is None or values.shape[0] == 1 == sample.shape[0]:
        return values
    return values.index_select(0, sample)


class NodeKind:
    """A kind of node. What is here is that of a kind without anything of its own.

    Attributes:
        centred: whether the point is the centre of the box.
        moves: whether a node has the numbers of its input, perhaps in another order.
        keeps_box: whether, over a box of its input, its values fill a box.
        passes: whether a node gives its rows to its inputs as they are, perhaps in another order.
        covered: whether a node that alone uses it, and passes its rows on to it, covers its error (``Slack.covered``).
    """

    centred = moves = keeps_box = passes = False
    covered = True

    def image(self, node: Any, boxes: Sequence[Bounds], operator: Operator[Affine] | None) -> Bounds:
        """The box of the value by intervals, (batch, *shape).

        Args:
            node: the node.
            boxes: of its inputs.
            operator: of an affine map.
        """
        raise UnsupportedError("the input's box is given", place=node.place)

    def box(self, bounds: NodeBounds, index: int, node: Any, tighten: Tighten | None) -> Bounds:
        """The box of node ``index`` from the bounds of the nodes before it, (batch, *shape)."""
        return self.image(node, [bounds.values[i] for i in node.inputs], bounds.operators.find(index))

    def point(self, bounds: NodeBounds, index: int, node: Any) -> Tensor:
        """The point of node ``index``, (batch, *shape): by default the value at its inputs' points."""
        return node.forward(*(bounds.point(i) for i in node.inputs))

    def error(self, slack: Slack, index: int, node: Any, after: int | None, alone: bool) -> Tensor:
        """``Slack.error`` of node ``index``, (batch, size): by default of A·v̂, and of the lines of a ReLU after it."""
        bounds = slack.bounds
        error = rounding.value(bounds.size(index).flatten(1), slack.sums)
        if slack.float32.holds(index):
            # An activation may follow, of this or of a sum with it.
            error = error + rounding.backward_single(bounds.radius(index).flatten(1))
        return error

    def back(self, walk: Walk, index: int, node: Any, a: Coefficients) -> None:
        """Give rows of node ``index`` to its inputs."""
        raise UnsupportedError("rows end at the input", place=node.place)


class _Map(NodeKind):
    def image(self, node: Affine, boxes: Sequence[Bounds], operator: Operator[Affine] | None) -> Bounds:
        assert operator is not None
        return affine_image(operator, boxes[0])

    def box(self, bounds: NodeBounds, index: int, node: Affine, tighten: Tighten | None) -> Bounds:
        source, about = node.inputs[0], None
        # Rows of coefficients, where there will be any, need the nodes' points anyway.
        if (tighten is not None or bounds.known) and bounds.is_centred(source):
            about = bounds.point(source), bounds.point(index)
        return affine_image(bounds.operators[index], bounds.values[source], about, bounds.float32)

    def point(self, bounds: NodeBounds, index: int, node: Affine) -> Tensor:
        return bounds.operators[index].forward(bounds.point(node.inputs[0]))

    def error(self, slack: Slack, index: int, node: Affine, after: int | None, alone: bool) -> Tensor:
        bounds, source, operator = slack.bounds, node.inputs[0], slack.bounds.operators[index]
        error = slack.of_map(index)
        if slack.float32.holds(source) and not (alone and slack.float32.sums(index)):
            terms = 0 if alone else slack.terms(index, after)
            if bounds.is_centred(source):
                error = error + rounding.backward_single(bounds.reach(index), terms)
            else:
                error = error + rounding.backward_single(bounds.radius(source), terms, operator)
        return error.expand(-1, *node.shape).flatten(1)

    def back(self, walk: Walk, index: int, node: Affine, a: Coefficients) -> None:
        dense, source = walk.whole(a, index), node.inputs[0]
        # Rows that begin here may have coefficients for neurons that are inactive after it.
        if walk.chunk.rounded and index != walk.start and walk.of.float32.narrows(index):
            dense = dense.float()
        shaped = dense if len(node.shape) == 1 else dense.reshape(-1, *node.shape)
        back = walk.bounds.operators[index].adjoint(shaped, walk.nodes[source].shape)
        walk.give(source, back.reshape(*dense.shape[:2], -1))
        if not walk.chunk.rounded:
            walk.plus(dense @ walk.bounds.operators[index].offset.expand(node.shape).flatten())


class _Scale(_Map):
    keeps_box = True


class _Activation(NodeKind):
    centred, covered = True, False

    def image(self, node: Activation, boxes: Sequence[Bounds], operator: Operator[Affine] | None) -> Bounds:
        return rounding.interval_activation(node, boxes[0])

    def box(self, bounds: NodeBounds, index: int, node: Activation, tighten: Tighten | None) -> Bounds:
        return bounds.rules.image(index, node, bounds.tightened(index, node.inputs[0], tighten))

    def point(self, bounds: NodeBounds, index: int, node: Activation) -> Tensor:
        return bounds.center(index)

    def back(self, walk: Walk, index: int, node: Activation, a: Coefficients) -> None:
        dense, chunk, shifted = walk.whole(a, index), walk.chunk, walk.of.shifted
        if index in chunk.lines:
            if walk.record is not None:
                walk.record[index] = dense.flatten(0, 1)
            named = torch.arange(chunk.groups, device=dense.device) if chunk.sample is None else chunk.sample
            step = shifted.own(index, chunk.lines[index], named, chunk.rounded)
        else:
            step = shifted.step(index, chunk.rounded, shifted.depth(index) if chunk.rounded else 0)
            if chunk.sample is not None and walk.bounds.samples > 1:
                step = step.of_samples(chunk.sample)
        before, constant = step.back(dense, walk.of.tuning)
        walk.plus(constant)
        walk.give(node.inputs[0], before)


class _Sum(NodeKind):
    passes = True

    def image(self, node: Add, boxes: Sequence[Bounds], operator: Operator[Affine] | None) -> Bounds:
        x, y = boxes
        total = rounding.widen(Bounds(x.lower + y.lower, x.upper + y.upper), 2)
        return _signed(total, torch.minimum(x.lower, y.lower) >= 0, torch.maximum(x.upper, y.upper) <= 0)

    def error(self, slack: Slack, index: int, node: Add, after: int | None, alone: bool) -> Tensor:
        """Of both inputs, and of their points' sum."""
        uses = slack.bounds.network.uses
        first, second = (slack.error(i, after if uses[i] == 1 else None, alone) for i in node.inputs)
        return first + second + rounding.point(slack.bounds.size(index).flatten(1))

    def back(self, walk: Walk, index: int, node: Add, a: Coefficients) -> None:
        for source in node.inputs:
            walk.give(source, a)


class _Bilinear(NodeKind):
    def back(self, walk: Walk, index: int, node: Bilinear, a: Coefficients) -> None:
        """(x̂₁ + d₁)∘(x̂₂ + d₂) is linear in d₁ and d₂ but for d₁∘d₂.

        With |d₁| ≤ r₁ and |d₂| ≤ r₂, for every t in [−1, 1] and σ = ±1

            σ·d₁·d₂  ≥  t·(r₂·d₁ + σ·r₁·d₂) − r₁·r₂,

        a mean of McCormick's two planes (``rounding.bilinear``), whose constant does not depend on t; without a choice
        of t it is 0. A row that has a at the product takes |a| times that for the sign σ of a.
        """
        dense, (first, second) = walk.whole(a, index), node.inputs
        walk.less(walk.weighed(dense, index, "product", walk.slack.product(index)))
        rows = dense.reshape(*dense.shape[:2], *node.shape)
        x, y = (of_samples(walk.bounds.point(i), walk.chunk.sample) for i in node.inputs)
        to_first, to_second = node.to_first(rows, y), node.to_second(rows, x)
        if walk.record is not None:
            walk.record[index] = dense.flatten(0, 1)
        tilt = walk.chunk.tilts.get(index)
        if tilt is not None:
            r, s = (of_samples(walk.bounds.radius(i), walk.chunk.sample) for i in node.inputs)
            rows = rows.flatten(0, 1)
            more = node.weighed_to_first(rows.abs(), tilt, s), node.weighed_to_second(rows, tilt, r)
            to_first, to_second = to_first + more[0].unsqueeze(1), to_second + more[1].unsqueeze(1)
            if not walk.chunk.rounded:
                # Without rounding rows are of the factors themselves, not of their distances from the points.
                for extra, at in zip(more, (x, y), strict=True):
                    walk.less((extra * at).flatten(1).sum(1, keepdim=True))
        walk.give(first, to_first.flatten(2))
        walk.give(second, to_second.flatten(2))
        if not walk.chunk.rounded:
            walk.less(value_at_point(walk.bounds, index, dense, walk.chunk.sample))


class _Product(_Bilinear):
    def image(self, node: Product, boxes: Sequence[Bounds], operator: Operator[Affine] | None) -> Bounds:
        x, y = boxes
        above, below = [b.lower >= 0 for b in boxes], [b.upper <= 0 for b in boxes]
        alike = (above[0] & above[1]) | (below[0] & below[1])
        return _signed(rounding.widen(_corners(x, y), 1), alike, (above[0] & below[1]) | (below[0] & above[1]))


class _MatMul(_Bilinear):
    def image(self, node: MatMul, boxes: Sequence[Bounds], operator: Operator[Affine] | None) -> Bounds:
        x, y = boxes
        lower = upper = low = high = torch.zeros((), dtype=x.lower.dtype, device=x.lower.device)
        for k in range(node.inner):
            column = Bounds(x.lower[..., k, None], x.upper[..., k, None])
            term = _corners(column, Bounds(y.lower[..., k, None, :], y.upper[..., k, None, :]))
            lower, upper = lower + term.lower, upper + term.upper
            low, high = low + term.lower.abs(), high + term.upper.abs()
        low, high = (rounding.interval_products(size, node.inner) for size in (low, high))
        above = [(x.lower >= 0).all(-1, keepdim=True), (y.lower >= 0).all(-2, keepdim=True)]
        below = [(x.upper <= 0).all(-1, keepdim=True), (y.upper <= 0).all(-2, keepdim=True)]
        alike, unlike = (above[0] & above[1]) | (below[0] & below[1]), (above[0] & below[1]) | (below[0] & above[1])
        return _signed(Bounds(lower - low, upper + high), alike, unlike)


class _Maximum(NodeKind):
    def image(self, node: Maximum, boxes: Sequence[Bounds], operator: Operator[Affine] | None) -> Bounds:
        """The largest ends, and what is known of the tournament."""
        seen, made = boxes
        ends = (node.seen(end, -torch.inf).amax(1).reshape(-1, *node.shape) for end in (seen.lower, seen.upper))
        low, high = ends
        return Bounds(torch.maximum(low, made.lower), torch.minimum(high, made.upper))

    def back(self, walk: Walk, index: int, node: Maximum, a: Coefficients) -> None:
        dense, (source, _), chunk = walk.whole(a, index), node.inputs, walk.chunk
        if walk.record is not None:
            walk.record[index] = dense.flatten(0, 1)
        between = walk.of.shifted.between(index, chunk.rounded).of_samples(chunk.sample)
        before, constant = between.back(dense, walk.nodes[source].size)
        walk.plus(constant)
        walk.give(source, before)


def extremes(sign: int, x: Bounds, y: Bounds) -> Bounds:
    """The box of max(x, y), or of min(x, y) for ``sign`` −1, over boxes of x and y: the larger, or the lesser ends."""
    of = torch.maximum if sign > 0 else torch.minimum
    return Bounds(of(x.lower, y.lower), of(x.upper, y.upper))


class _Extreme(NodeKind):
    def image(self, node: Extreme, boxes: Sequence[Bounds], operator: Operator[Affine] | None) -> Bounds:
        """That of the extreme, and what is known of x + relu(y − x)."""
        found, made = extremes(node.sign, *boxes[:2]), boxes[2]
        return Bounds(torch.maximum(found.lower, made.lower), torch.minimum(found.upper, made.upper))

    def back(self, walk: Walk, index: int, node: Extreme, a: Coefficients) -> None:
        walk.give(node.inputs[-1], a)


class _Beside(NodeKind):
    def image(self, node: Beside, boxes: Sequence[Bounds], operator: Operator[Affine] | None) -> Bounds:
        return boxes[2]

    def box(self, bounds: NodeBounds, index: int, node: Beside, tighten: Tighten | None) -> Bounds:
        bounds.tightened(index, node.inputs[0], tighten)
        return bounds.values[node.inputs[2]]

    def back(self, walk: Walk, index: int, node: Beside, a: Coefficients) -> None:
        dense, chunk = walk.whole(a, index), walk.chunk
        if walk.alone:
            # A neuron of the second network is bounded as if there were no other.
            walk.give(node.inputs[2], dense)
            return
        if walk.record is not None:
            walk.record[index] = dense.flatten(0, 1)
        *rows, constant = walk.of.shifted.aside(index, chunk.rounded).of_samples(chunk.sample).back(dense)
        walk.plus(constant)
        for source, mine in zip(node.inputs, rows, strict=True):
            if mine is not None:
                walk.give(source, mine)


class _Moved(NodeKind):
    moves = keeps_box = passes = True

    def image(self, node: Reshape | Permute, boxes: Sequence[Bounds], operator: Operator[Affine] | None) -> Bounds:
        return Bounds(node.forward(boxes[0].lower), node.forward(boxes[0].upper))


class _Reshape(_Moved):
    def error(self, slack: Slack, index: int, node: Reshape, after: int | None, alone: bool) -> Tensor:
        return slack.error(node.inputs[0], alone=alone)

    def back(self, walk: Walk, index: int, node: Reshape, a: Coefficients) -> None:
        walk.give(node.inputs[0], walk.whole(a, index))


class _Permute(_Moved):
    def error(self, slack: Slack, index: int, node: Permute, after: int | None, alone: bool) -> Tensor:
        source = node.inputs[0]
        before = slack.error(source, alone=alone).unflatten(1, slack.bounds.network.nodes[source].shape)
        return node.forward(before).flatten(1)

    def back(self, walk: Walk, index: int, node: Permute, a: Coefficients) -> None:
        dense = walk.whole(a, index)
        walk.give(node.inputs[0], node.adjoint(dense.reshape(-1, *node.shape)).reshape(*dense.shape[:2], -1))


def value_at_point(bounds: NodeBounds, index: int, a: Tensor, sample: Tensor | None) -> Tensor:
    """A·v̂ of rows A of node ``index``, (groups, each, neurons), and its point v̂: (groups, each)."""
    return sums.dot(a, of_samples(bounds.point(index).flatten(1), sample))


NODE_KINDS: Table[NodeKind] = Table(
    "bounds of nodes",
    {
        Input: NodeKind(),
        Affine: _Map(),
        Scale: _Scale(),
        Activation: _Activation(),
        Add: _Sum(),
        Product: _Product(),
        MatMul: _MatMul(),
        Maximum: _Maximum(),
        Extreme: _Extreme(),
        Beside: _Beside(),
        Reshape: _Reshape(),
        Permute: _Permute(),
    },
)
