"""Zonotopes: an affine form of every op's value in one forward pass, for batches of boxes of few inputs.

    forms = Zonotopes(network, box, varying=torch.tensor([0, 3]))
    found = forms.rows(matrix)      # linear lower bounds of rows of the output, (batch, rows) each
    forms.inputs[3]                 # the interval of op 3, which feeds a nonlinear op

The value x of an op is enclosed by

    x ∈ c + Σ_k G_k·ε_k + [−e, e],   ε_k ∈ [−1, 1],

with the same noise symbols ε for all ops: one for each input that varies, and one for the most important unstable
neurons of each nonlinear op. A function has a slope s there and a band, s·x + t ≤ f(x) ≤ s·x + t′, which is
s·x + (t + t′)/2 + (t′ − t)/2·ε (Singh et al., Fast and Effective Robustness Certification, NeurIPS 2018, for ReLU). A
pass multiplies each weight with as many columns as there are symbols. CROWN's bounds of all neurons need as many rows
as there are neurons, for every layer and all layers before it.

**Rounding.** Each op adds the error of its own arithmetic to e. Centres and errors are in float64, generators G
in the dtype of the pass. With R ≥ Σ_k |G_k|, and u and v the unit roundoffs of float64 and of the generators:

* an affine map of t terms: γ_t(u) of |W|·|c| + |b| for the centre, γ_t(v) of |W|·R for all generators together, what
  its weights are off by, of |W|·(|c| + R + e), and |W|·e;
* s·c + m: 2u of both terms; s·G: v of |s|·R; the slope is a number of the generators' dtype, so that both use the same;
* a new generator is rounded up;
* a sum of p terms that are not negative is too small by γ_p of itself at most, and underflow loses at most
  ``negligible`` in each product.

NaN propagates, and proves nothing.

**Mirrors.** Networks that compute a maximum or an absolute value by ReLUs hold neurons with weights that are equal, or
equal but for their sign. As max(−z, 0) = max(z, 0) − z, one symbol serves both: max(z, 0) − max(−z, 0) is z then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from verifiable_relu.ir.interval import Interval
from verifiable_relu.ir.linear import Dense
from verifiable_relu.ir.network import Affine, Elementwise, Maximum, Network, Op, Product, Sum
from verifiable_relu.rounding import SLOPE_STEP, divisor, negligible, sum_error, unit_roundoff

_U = unit_roundoff(torch.float64)


@dataclass(frozen=True, eq=False)
class AffineForm:
    """The affine form of an op over a batch of boxes.

    Attributes:
        center: c, (batch, n), float64.
        generators: G, (symbols, batch, n), by the number of the op at which the symbols begin: 0 for the inputs.
        error: e, (batch, n), float64.
        radius: R ≥ Σ_k |G_k|, (batch, n), float64.
        new: generators that begin here, each of one neuron: the op, numbers of neurons and values, (symbols, batch).
    """

    center: Tensor
    generators: dict[int, Tensor]
    error: Tensor
    radius: Tensor
    new: tuple[int, Tensor, Tensor] | None = None

    def interval(self) -> Interval:
        """Return bounds of the value, moved outward."""
        reach = (self.radius + self.error).mul_(1 + 8 * _U).add_(self.center.abs(), alpha=4 * _U)
        reach.add_(negligible(reach.dtype))
        return Interval(self.center - reach, self.center + reach)

    def spread(self) -> AffineForm:
        """Return the form with ``new`` among its generators."""
        if self.new is None:
            return self
        op, neuron, value = self.new
        block = value.new_zeros(*value.shape, self.center.shape[1]).scatter_(2, neuron[..., None], value[..., None])
        return replace(self, generators={**self.generators, op: block}, new=None)


@dataclass(frozen=True, eq=False)
class FormRows:
    """Linear lower bounds of rows a·y of the output over a batch of boxes.

    Attributes:
        lower: (batch, rows) lower bounds.
        center: (batch, rows) a·c, rounding aside.
        along: (batch, symbols, rows) a·G_k, rounding aside; the symbols of the inputs first.
        coefficients: (batch, rows, inputs) of linear bounds with these minima; off by a few units of roundoff.
    """

    lower: Tensor
    center: Tensor
    along: Tensor
    coefficients: Tensor


class Zonotopes:
    """The affine forms of a network's ops over a batch of boxes.

    Args:
        network: the network.
        box: of the inputs, (batch, inputs), float64.
        varying: (V,) numbers of the inputs that get a symbol; the width of others counts as an error.
        symbols: the most new symbols at a nonlinear op, by its number. The bands of other neurons go into the
            error, the narrowest first.
        dtype: of the generators.
        stop: asked before every op; what it raises ends the pass.

    Attributes:
        inputs: the intervals of ops that feed nonlinear ops, by number.
        output: the form of the last op.
        unstable: (batch,) by the number of a nonlinear op, how many of its neurons would use a symbol.
        share: (batch, symbols, inputs) by op, the part of each symbol's band that is due to each input; for choices
            alone, its rounding is not accounted for.
    """

    def __init__(
        self,
        network: Network,
        box: Interval,
        varying: Tensor,
        symbols: Mapping[int, int] | None = None,
        dtype: torch.dtype = torch.float64,
        stop: Callable[[], object] = lambda: None,
    ) -> None:
        self.dtype, self.varying = dtype, varying
        self._network, self._symbols, self._v = network, symbols or {}, unit_roundoff(dtype)
        self.inputs: dict[int, Interval] = {}
        self.unstable: dict[int, Tensor] = {}
        self.share: dict[int, Tensor] = {}
        self._forms, waiting = {0: self._of_inputs(box)}, list(network.uses)
        # Of the first op of a pair, the form and its input's are needed once more.
        self._partner = {pair.second: pair.first for pair in network.pairs}
        self._half: dict[int, Tensor] = {}
        extra = [i for first in self._partner.values() for i in (first, *network.ops[first].inputs)]
        for i in extra:
            waiting[i] += 1
        for index, op in enumerate(network.ops[1:], start=1):
            stop()
            self._forms[index] = self._form(index, op, [self._forms[i] for i in op.inputs])
            first = self._partner.get(index)
            for source in (*op.inputs, *(() if first is None else (first, *network.ops[first].inputs))):
                waiting[source] -= 1
                if not waiting[source]:
                    del self._forms[source]
        self.output = self._forms.pop(len(network.ops) - 1).spread()

    def _of_inputs(self, box: Interval) -> AffineForm:
        center = torch.lerp(box.lower, box.upper, 0.5)
        # Two units of roundoff of either, which the error covers.
        radius = torch.maximum(box.upper - center, center - box.lower)
        (batch, inputs), count = center.shape, len(self.varying)
        values = self._raised(radius[:, self.varying])
        self._input_radius = values.to(radius)
        place, own = self.varying.expand(batch, 1, -1).permute(2, 0, 1), torch.eye(inputs, device=center.device)
        block = values.new_zeros(count, batch, inputs).scatter_(2, place, values.T[..., None])
        self.share[0] = own[self.varying].to(self.dtype).expand(batch, -1, -1)
        error = 4 * _U * (center.abs() + radius) + radius.index_fill(1, self.varying, 0) * (1 + 4 * _U)
        reach = torch.zeros_like(radius).index_copy(1, self.varying, self._input_radius)
        return AffineForm(center, {0: block}, error + negligible(center.dtype), reach)

    def _raised(self, value: Tensor) -> Tensor:
        """Return float64 numbers ≥ 0 rounded up to the generators' dtype."""
        return (value * (1 + 4 * self._v)).to(self.dtype)

    def _form(self, index: int, op: Op, forms: list[AffineForm]) -> AffineForm:
        match op:
            case Affine():
                return self._affine(op, forms[0])
            case Sum():
                return self._sum([form.spread() for form in forms])
            case Elementwise():
                return self._elementwise(index, op, forms[0].spread())
            case Product():
                return self._product(index, op, *(form.spread() for form in forms))
            case Maximum():
                return self._maximum(index, op, forms[0].spread())
        raise TypeError(op.place)

    def _affine(self, op: Affine, form: AffineForm) -> AffineForm:
        w, wide = op.map, form.center.dtype
        # Nothing is rounded in a map without terms.
        own, many = (sum_error(w.terms + 2, dtype) if w.terms else 0.0 for dtype in (wide, self.dtype))
        if w.terms and w.weight.dtype.itemsize > self.dtype.itemsize:
            many += w.conversion_error(self.dtype)
        spread = torch.add(form.error, form.radius, alpha=many).add_(form.center.abs(), alpha=own)
        if op.weight_error:
            spread = spread + op.weight_error * (form.center.abs() + form.radius + form.error)
        center = w.apply(form.center)
        # Twice γ: once for this sum, once for those that ``spread`` is made of.
        error = w.abs_apply(spread) * (1 + 2 * sum_error(w.terms + 8, wide))
        count = sum(map(len, form.generators.values())) + 2 + (0 if form.new is None else len(form.new[1]))
        error += (w.terms + 1) * (negligible(wide) + count * negligible(self.dtype)) if w.terms else 0.0
        if op.bias is not None:
            bias = op.bias.to(center)
            center = center + bias
            # The last addition rounds the centre once more.
            error = error + 2 * sum_error(w.terms + 2, wide) * bias.abs() + 2 * _U * center.abs()
        if op.bias_error is not None:
            error = error + op.bias_error.to(center) * (1 + 4 * _U)
        new = form.new if isinstance(w, Dense) and w.copies == 1 else None
        blocks = form.generators if new is not None else form.spread().generators
        generators = {i: w.apply(block.flatten(0, 1)).unflatten(0, block.shape[:2]) for i, block in blocks.items()}
        if new is not None:
            # Of a generator of one neuron the map makes a column of its weights.
            source, neuron, value = new
            key = ("columns", self.dtype, value.device)
            columns = w.cached(key, lambda: w.weight_in(self.dtype, value.device).T.contiguous())
            generators[source] = F.embedding(neuron, columns).mul_(value[..., None])
        return AffineForm(center, generators, error, _radius(generators, center))

    def _sum(self, forms: Sequence[AffineForm]) -> AffineForm:
        center, size = forms[0].center, forms[0].center.abs()
        error, radius, generators = forms[0].error, forms[0].radius, dict(forms[0].generators)
        for form in forms[1:]:
            center, size = center + form.center, size + form.center.abs()
            error, radius = error + form.error, radius + form.radius
            for source, block in form.generators.items():
                generators[source] = generators[source] + block if source in generators else block
        many = 2 * len(forms)
        error = error * (1 + many * _U) + many * (_U * size + self._v * radius)
        return AffineForm(center, generators, error, _radius(generators, center))

    def _elementwise(self, index: int, op: Elementwise, form: AffineForm) -> AffineForm:
        x = self.inputs[op.inputs[0]] = form.interval()
        f, before = op.function, self._network.ops[op.inputs[0]]
        group = mirrors(before) if f.kind == "Relu" and isinstance(before, Affine) else None
        # The slope of the chord, in the generators' dtype: any is sound, for both sides of f.
        slope = (f.value(x.upper) - f.value(x.lower)) / divisor(x.upper - x.lower)
        slope = slope.nan_to_num(0, 0, 0).to(self.dtype).to(slope)
        if group is not None:
            slope = (slope / SLOPE_STEP).round() * SLOPE_STEP
        low, high, unstable = f.floor(x, slope), f.top(x, slope), f.unstable(x)
        if group is not None:
            first, turned = (part.to(slope.device) for part in group)
            low, high, unstable, slope = (part[:, first] for part in (low, high, unstable, slope))
            slope = torch.where(turned, 1 - slope, slope)
        middle = (low + high) / 2
        half = torch.maximum(high - middle, middle - low) * (1 + 4 * _U)
        self._half[index], found = half, self._moved(form, slope, middle)
        if index in self._partner:
            found, half, unstable = self._paired(index, op, form, found, half, unstable)
            group = None
        return self._with_bands(index, found, half, unstable, [form], group)

    def _paired(
        self, index: int, op: Elementwise, form: AffineForm, alone: AffineForm, half: Tensor, unstable: Tensor
    ) -> tuple[AffineForm, Tensor, Tensor]:
        """Return the form of f(z′), its band, and where it needs a symbol: f(z) + m·d ± band with d = z′ − z, or f(z′).

        (f(z′) − f(z))/d lies in ``derivative_range``. The former is chosen where its band is no wider than those of
        f(z) and f(z′), which the difference would have.
        """
        before = self._partner[index]
        partner, ops = op.inputs[0], self._network.ops
        first, (source,) = ops[before], ops[before].inputs
        if not (isinstance(first, Elementwise) and op.function.is_same(first.function)):
            return alone, half, unstable
        apart = self._sum([form, self._moved(self._forms[source].spread(), -torch.ones_like(half), half * 0)])
        x, y, d = self.inputs[source], self.inputs[partner], apart.interval()
        hull = Interval(torch.minimum(x.lower, y.lower), torch.maximum(x.upper, y.upper))
        slopes = op.function.derivative_range(hull)
        slope = ((slopes.lower + slopes.upper) / 2).to(self.dtype).to(half)
        band = torch.maximum(slopes.upper - slope, slope - slopes.lower) * torch.maximum(d.upper, -d.lower)
        band = band * (1 + 8 * _U) + negligible(band.dtype)
        paired = self._sum([self._forms[before].spread(), self._moved(apart, slope, torch.zeros_like(half))])
        chosen = band <= half + self._half[before]
        found = {i: block * ~chosen for i, block in alone.generators.items()}
        for i, block in paired.generators.items():
            found[i] = torch.where(chosen, block, found[i]) if i in found else block * chosen
        center, error, radius = (
            torch.where(chosen, p, a)
            for p, a in ((paired.center, alone.center), (paired.error, alone.error), (paired.radius, alone.radius))
        )
        mixed = AffineForm(center, found, error, radius)
        return mixed, torch.where(chosen, band, half), torch.where(chosen, slopes.upper > slopes.lower, unstable)

    def _moved(self, form: AffineForm, slope: Tensor, offset: Tensor) -> AffineForm:
        """Return the form of slope·x + offset; slopes are numbers of the generators' dtype."""
        size, factor = slope.abs(), slope.to(self.dtype)
        least = negligible(slope.dtype) + sum(map(len, form.generators.values())) * negligible(self.dtype)
        off = torch.add(form.error, form.radius, alpha=2 * self._v).add_(form.center.abs(), alpha=4 * _U)
        error = torch.addcmul(offset.abs() * (4 * _U), off, size).mul_(1 + 8 * _U).add_(least)
        radius = (size * form.radius).mul_(1 + 4 * (_U + self._v)).add_(least)
        generators = {i: block * factor for i, block in form.generators.items()}
        return AffineForm(torch.addcmul(offset, slope, form.center), generators, error, radius)

    def _product(self, index: int, op: Product, x: AffineForm, z: AffineForm) -> AffineForm:
        """(cx + dx)·(cz + dz) = cx·cz + cx·dz + cz·dx + dx·dz, whose last term is at most the radii's product."""
        self.inputs.update({i: form.interval() for i, form in zip(op.inputs, (x, z), strict=True)})
        half = (x.radius + x.error) * (z.radius + z.error) * (1 + 8 * _U)
        # Factors are numbers of the generators' dtype; what centres are off by as such counts by |dx| and |dz|.
        by_x, by_z = (form.center.to(self.dtype).to(half) for form in (x, z))
        total = self._sum([self._moved(z, by_x, -by_x * by_z), self._moved(x, by_z, torch.zeros_like(half))])
        center = x.center * z.center
        error = (x.center - by_x).abs() * (z.radius + z.error) + (z.center - by_z).abs() * (x.radius + x.error)
        error = (total.error + error) * (1 + 8 * _U) + 2 * _U * center.abs()
        found = replace(total, center=center, error=error + negligible(center.dtype))
        return self._with_bands(index, found, half, half > 0, [x, z])

    def _maximum(self, index: int, op: Maximum, form: AffineForm) -> AffineForm:
        """Return the candidate with the largest centre, and the band by which others may exceed it; or the interval."""
        x, candidates = form.interval(), op.candidates.to(form.center.device)
        self.inputs[op.inputs[0]] = x
        best = candidates.T[torch.arange(op.size), form.center[:, candidates].argmax(1)]
        generators = {i: block.gather(2, best.expand(len(block), -1, -1)) for i, block in form.generators.items()}
        center, error, radius = (part.gather(1, best) for part in (form.center, form.error, form.radius))
        excess = torch.zeros_like(center)
        for number in candidates:
            other = {i: block[:, :, number] - generators[i] for i, block in form.generators.items()}
            c, e, r = (part[:, number] for part in (form.center, form.error, form.radius))
            ahead = (_radius(other, center) + 2 * self._v * (radius + r) + error + e) * (1 + 8 * _U) + (c - center)
            # Of the best candidate itself nothing is left.
            ahead = torch.where(number == best, 0.0, ahead + 4 * _U * (c.abs() + center.abs()))
            excess = torch.maximum(excess, ahead)
        low, high = x.lower[:, candidates].amax(1), x.upper[:, candidates].amax(1)
        wide = ~(excess <= high - low)
        middle = torch.where(wide, low / 2 + high / 2, excess / 2)
        half = torch.where(wide, torch.maximum(high - middle, middle - low), middle) * (1 + 4 * _U)
        first = AffineForm(center, generators, error, radius)
        return self._with_bands(index, self._moved(first, (~wide).to(center), middle), half, half > 0, [first])

    def _with_bands(
        self,
        index: int,
        form: AffineForm,
        half: Tensor,
        wanted: Tensor,
        befores: Sequence[AffineForm],
        group: tuple[Tensor, Tensor] | None = None,
    ) -> AffineForm:
        """Return the form with bands ±half: symbols for the widest of the ``wanted`` neurons, errors for the others.

        Args:
            index: of the op.
            form: without the bands.
            half: (batch, n), not negative.
            wanted: (batch, n) bool.
            befores: the forms of what the bands come from, of as many neurons.
            group: ``mirrors``, which share symbols.
        """
        first = None if group is None else group[0].to(half.device)
        own = wanted if first is None else wanted & (first == torch.arange(len(first), device=half.device))
        self.unstable[index] = own.sum(1)
        batch, size = half.shape
        count = min(size, self._symbols.get(index, size))
        neuron = torch.where(own, half, 0.0).topk(count, dim=1, sorted=False).indices
        reached = half.new_zeros(batch, count, self.share[0].shape[2], dtype=self.dtype)
        for before in befores:
            for source, block in before.generators.items():
                part = block.gather(2, neuron.expand(len(block), -1, -1)).abs()
                reached.baddbmm_(part.permute(1, 2, 0), self.share[source])
        self.share[index] = reached / divisor(reached.sum(2, keepdim=True))
        number = torch.full((batch, size), -1, device=half.device)
        number.scatter_(1, neuron, torch.arange(count, device=half.device).expand(batch, -1))
        number = number if first is None else number[:, first]
        has_symbol = (number >= 0) & wanted
        raised = self._raised(torch.where(has_symbol, half, 0.0))
        error = torch.where(has_symbol, form.error, form.error + half) * (1 + 2 * _U)
        form = replace(form, error=error, radius=(form.radius + raised) * (1 + 2 * _U))
        if first is None or not count:
            return replace(form, new=(index, neuron.T, raised.gather(1, neuron).T))
        block = raised.new_zeros(count, batch, size).scatter_(0, number.clamp(min=0)[None], raised[None])
        return replace(form, generators={**form.generators, index: block})

    def rows(self, matrix: Tensor) -> FormRows:
        """Return linear lower bounds of rows of the output, (batch, rows, outputs)."""
        form, wide = self.output, matrix.dtype
        a, sizes = matrix.to(self.dtype).transpose(1, 2), matrix.abs()
        along = torch.cat([block.transpose(0, 1) @ a for block in form.generators.values()], 1).to(wide)
        center = (matrix @ form.center[..., None])[..., 0]
        outputs, symbols = matrix.shape[2], along.shape[1]
        own, many = 2 * sum_error(outputs + symbols + 16, wide), 2 * sum_error(outputs + 4, self.dtype)
        lost = form.error + own * (form.center.abs() + form.radius + form.error) + many * form.radius
        lower = center - along.abs().sum(1) - (sizes @ lost[..., None])[..., 0]
        lower = lower - symbols * outputs * negligible(self.dtype)
        slopes = along[:, : len(self.varying)] / self._input_radius[..., None]
        slopes = torch.where(self._input_radius[..., None] > 0, slopes, 0.0).transpose(1, 2)
        coefficients = matrix.new_zeros(*matrix.shape[:2], self.share[0].shape[2])
        return FormRows(lower, center, along, coefficients.index_copy(2, self.varying, slopes))

    def influence(self, along: Tensor) -> Tensor:
        """Return each input's share in the rows' width, also by way of unstable neurons: (batch, inputs).

        Args:
            along: as ``FormRows`` has it.
        """
        shares = torch.cat(list(self.share.values()), 1)[:, : along.shape[1]]
        return (along.abs().sum(2).to(shares)[:, None] @ shares)[:, 0].to(along)


_MIRRORS: WeakKeyDictionary[Affine, tuple[Tensor, Tensor] | None] = WeakKeyDictionary()


def mirrors(op: Affine) -> tuple[Tensor, Tensor] | None:
    """Return for each output of a dense op the first output that always equals it up to the sign.

    Outputs belong together where their weights and biases are the same numbers, or the same but for their sign.

    Returns:
        (size,) numbers of outputs, and (size,) whether that output's value has the other sign; None where there are no
        such outputs.
    """
    if not (op.is_exact and isinstance(op.map, Dense)):
        return None
    if op not in _MIRRORS:
        weight, place = op.map.weight.detach().cpu().double(), torch.arange(op.size)
        bias = weight.new_zeros(op.size) if op.bias is None else op.bias.detach().cpu().double()
        rows = torch.cat([weight.repeat(op.map.copies, 1), bias[:, None]], 1)
        # Rows with the same magnitudes have the same sum of products with random numbers, up to its sign.
        chances = torch.rand(rows.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        sums = torch.stack([(place // len(weight)).double(), (rows * chances).sum(1).abs()])
        group = torch.unique(sums, dim=1, return_inverse=True)[1]
        first = torch.full((op.size,), op.size).scatter_reduce(0, group, place, "amin")[group]
        # What the sums suggest is compared number by number.
        same, turned = (rows == rows[first]).all(1), (rows == -rows[first]).all(1)
        first = torch.where(same | turned, first, place)
        _MIRRORS[op] = (first, turned & ~same) if bool((first != place).any()) else None
    return _MIRRORS[op]


def _radius(generators: Mapping[int, Tensor], like: Tensor) -> Tensor:
    """≥ Σ_k |G_k|, in the dtype of a tensor."""
    total = torch.zeros_like(like)
    for block in generators.values():
        total = total.add_(block.abs().sum(0), alpha=1 + 2 * sum_error(len(block) + 4, block.dtype))
    return total.mul_(1 + 2 * sum_error(2 * len(generators) + 4, like.dtype))
