"""The search for multipliers that prove nodes: dual ascent over a batch of nodes of a tree, rounding not accounted for.

The multipliers w of ``proof`` are not free here: for all but a few neurons the best one is known in closed form once
the coefficient of the neuron's remainder q̃ is, and that depends on the multipliers of later neurons alone. With c_j
that coefficient, and going from the last block to the first,

    split active:    w_j = c_j·(1 − t_j)/Q_j − β_j,          β_j ≥ 0,
    split inactive:  w_j = c_j·(slope_j − t_j)/Q_j + β_j,    β_j ≥ 0,
    open, c_j < 0:   w_j = c_j·(chord_j − t_j)/Q_j, the line over the activation,
    open, c_j ≥ 0:   w_j = γ_j between c_j·(slope_j − t_j)/Q_j and c_j·(1 − t_j)/Q_j, a line below it.

and of a smooth neuron on its segment (``curves``)

    c_j < 0:         w_j = c_j·rate_above_j + γ_j, the line over the activation,
    c_j ≥ 0:         w_j = c_j·rate_below_j + γ_j, the line below it,

where any γ_j will do: a positive one is the multiplier of z_j ≤ the segment's upper end, the size of a negative one
that of z_j ≥ its lower end. An open neuron has such adaptive lines only if it is among a few chosen for the whole tree,
so that a node's bound does not depend on the batch it is in; for the others w_j = 0. A neuron with a cut (``slopes``)
has the slope t_j = 0 here and, where it is split or has an adaptive line below it, v_j = −c_j/Q_j, which leaves q̃_j
without a coefficient; where c_j is negative and it is open, the cut is all there is. The ascent is by Polyak's steps
towards a bound just above zero, scaled by the neurons' widths, with momentum (B. T. Polyak, USSR Comput. Math. Math.
Phys. 9 (1969), 14-29).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verifiable_relu.verifiers.bab.curves import LAST, Curves, Segments
from verifiable_relu.verifiers.bab.strip import FormStore, RelaxedForms, TreeRelaxation


@dataclass(eq=False)
class Nodes:
    """Nodes that are bounded together.

    Attributes:
        split: (nodes, m) int8, +1 active, −1 inactive, 0 open; of a smooth neuron, the number of its segment.
        multipliers: (nodes, m) β of split neurons, γ of open ones that have adaptive lines, otherwise zero.
        mu: (nodes, rows behind the objectives) of these rows.
        objective: (nodes,) the number of the relaxation's row that is bounded.
    """

    split: Tensor
    multipliers: Tensor
    mu: Tensor
    objective: Tensor

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, chosen: Tensor | slice) -> Nodes:
        return Nodes(self.split[chosen], self.multipliers[chosen], self.mu[chosen], self.objective[chosen])

    @staticmethod
    def roots(neurons: int, behind: int, objectives: int = 1) -> Nodes:
        """A node without splits for each objective, of so many neurons and rows behind the objectives."""
        split = torch.zeros(objectives, neurons, dtype=torch.int8)
        multipliers, mu = torch.zeros(objectives, neurons), torch.zeros(objectives, behind)
        return Nodes(split, multipliers, mu, torch.arange(objectives))

    def split_on(self, neuron: Tensor, curves: Curves | None = None) -> Nodes:
        """Twice as many nodes: those in which each node's neuron (nodes,) is active, then those in which it is not.

        A segment of a smooth neuron is cut, and the nodes of the lower halves come first.
        """
        smooth = None
        if curves is not None:
            curves.cut(neuron, self.split[torch.arange(len(self)), neuron])
            smooth = curves.holds(neuron)
        multipliers = self.multipliers.scatter(1, neuron[:, None], 0)
        rest = (t.repeat(2, *[1] * (t.dim() - 1)) for t in (multipliers, self.mu, self.objective))
        return Nodes(torch.cat(children(self.split, neuron, smooth)), *rest)

    def packed(self) -> Packed:
        """Return the nodes in less memory."""
        columns = ((self.split != 0) | (self.multipliers != 0)).any(0).nonzero().squeeze(1)
        mine = Nodes(self.split[:, columns], self.multipliers[:, columns], self.mu, self.objective)
        return Packed(mine, columns, self.split.shape[1])


@dataclass(eq=False)
class Packed:
    """Nodes without the columns, among ``size``, that have neither splits nor multipliers."""

    nodes: Nodes
    columns: Tensor
    size: int

    def __len__(self) -> int:
        return len(self.nodes)

    def __getitem__(self, chosen: Tensor | slice) -> Packed:
        return Packed(self.nodes[chosen], self.columns, self.size)

    @property
    def bytes(self) -> int:
        """The memory that the nodes take."""
        return sum(t.nbytes for t in vars(self.nodes).values())

    @staticmethod
    def join(parts: Sequence[Packed]) -> Nodes:
        """Return the nodes of several, with all columns."""
        count, size = sum(map(len, parts)), parts[0].size
        split, multipliers = torch.zeros(count, size, dtype=torch.int8), torch.zeros(count, size)
        start = 0
        for part in parts:
            mine = slice(start, start + len(part))
            split[mine, part.columns], multipliers[mine, part.columns] = part.nodes.split, part.nodes.multipliers
            start = mine.stop
        mu, objective = (torch.cat([getattr(p.nodes, name) for p in parts]) for name in ("mu", "objective"))
        return Nodes(split, multipliers, mu, objective)


def children(split: Tensor, neuron: Tensor, smooth: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the two nodes that each node is split into: its neuron is active in the first, inactive in the second.

    A smooth neuron is in the lower half of its segment in the first, in the upper half in the second.

    Args:
        split: (nodes, m) int8.
        neuron: (nodes,) the number of the neuron that each node is split on.
        smooth: (nodes,) bool, whether that neuron is smooth; None if none is.
    """
    active, inactive, number = split.clone(), split.clone(), torch.arange(len(split))
    active[number, neuron], inactive[number, neuron] = 1, -1
    if smooth is not None and bool(smooth.any()):
        number, neuron = number[smooth], neuron[smooth]
        before = split[number, neuron]
        lower = 2 * before.clamp(min=1, max=LAST - 1)
        # What is not cut stays as it is in both.
        whole = before >= LAST
        active[number, neuron] = torch.where(whole, before, lower)
        inactive[number, neuron] = torch.where(whole, before, lower + 1)
    return active, inactive


def depth(split: Tensor, smooth: Tensor) -> Tensor:
    """Return how many splits led to each node, (nodes,): one for a phase, for a segment the cuts that made it."""
    cuts = split.double().clamp(min=1).log2().floor()
    return torch.where(smooth, cuts, (split != 0).double()).sum(1)


@dataclass(eq=False)
class Bounded:
    """The best that an ascent found for each node of a batch.

    Attributes:
        bound: (nodes,) of each node's objective; not a proof.
        columns: (k,) the neurons that have multipliers in some node.
        w, v: (nodes, k) their multipliers, and (nodes, h) those of the values of the h that have hull cuts; v is None
            without cuts.
        coefficients: (nodes, m) of the remainders q̃.
        blame: (nodes, m) how much each open neuron's line over the activation costs the bound, or how much a smooth
            neuron's line costs at most; −1 if it is not split further.
    """

    bound: Tensor
    columns: Tensor
    w: Tensor
    v: Tensor | None
    coefficients: Tensor
    blame: Tensor

    def __getitem__(self, chosen: Tensor) -> Bounded:
        parts = (t[chosen] for t in (self.coefficients, self.blame))
        v = None if self.v is None else self.v[chosen]
        return Bounded(self.bound[chosen], self.columns, self.w[chosen], v, *parts)


_LEAST = 1e-30
"""Heuristic: what steps are divided by is at least this."""

_CLOSED = 1e-6
"""Heuristic: an objective above 0 by this part of its size counts as closed in float32."""

_FACTOR = 2.0
"""The factor of Polyak's step: where few are taken, longer ones than those that converge for certain get further."""

_MOMENTUM = 0.3


class DualAscent:
    """Dual ascent for the nodes of one tree.

    Args:
        strip: the tree's relaxation, with ``objectives`` first rows; the rows behind them are at most zero.
        adaptive: (m,) bool, the neurons that have adaptive lines while they are open.
        dtype: of the search.

    Attributes:
        closed: (objectives,) a node needs no better bound where its own is above this.
        aim: (objectives,) the bound that steps are made towards, above ``closed``.
    """

    def __init__(self, strip: TreeRelaxation, adaptive: Tensor, dtype: torch.dtype, objectives: int = 1) -> None:
        folded, slopes, width = strip.folded, strip.slopes, strip.width
        lower, upper, slope = folded.lower, folded.upper, folded.slope
        self.strip, self.dtype, self.adaptive, self.objectives = strip, dtype, adaptive, objectives
        self.ends = torch.tensor([0] + [end for _, end in folded.blocks])
        self.rows, self.row_constant = self._centred(strip.rows)
        self.neurons, self.base = _Centred(self, strip.neurons), _Centred(self, strip.base)
        chord = (upper - slope * lower) / (upper - lower)
        # In units of the remainders: q̃ per z where the neuron is active, inactive, or on its chord.
        self.active, self.inactive = ((1 - slopes) / width).to(dtype), ((slope - slopes) / width).to(dtype)
        self.chord, self.offset = ((chord - slopes) / width).to(dtype), ((slope - chord) * lower / width).to(dtype)
        self.share = (1 / width).to(dtype)
        self.scale = ((upper - lower).clamp(min=_LEAST) ** -2).to(dtype).clamp(max=1e30)
        sizes = strip.rows.matrix.abs().sum(1) + strip.rows.constant.abs()
        self._row_scale = ((sizes[objectives:] + _LEAST) ** -2).to(dtype).clamp(max=1e30)
        self.closed = _CLOSED * sizes[:objectives].to(dtype)
        self.aim = 2 * self.closed

    def _centred(self, forms: RelaxedForms) -> tuple[Tensor, Tensor]:
        """Matrix and constant of forms of e and p ∈ [−1, 1]ᵐ, where q̃ = (1 + p)/2: the least value is one norm."""
        n = self.strip.folded.inputs
        constant = (forms.constant + forms.matrix[:, n:].sum(1) / 2).to(self.dtype)
        matrix = forms.matrix.to(self.dtype, copy=True)
        matrix[:, n:] /= 2
        return matrix, constant

    def run(self, batch: Nodes, steps: int, factor: float = _FACTOR) -> Bounded:
        """Take some steps, ``factor`` of Polyak's, from the batch's multipliers, which become the best ones found."""
        view = _View(self, batch)
        closed, aim = self.closed[batch.objective], self.aim[batch.objective]
        multipliers, mu = batch.multipliers[:, view.columns].to(self.dtype), batch.mu.to(self.dtype)
        best: tuple[Tensor, ...] = ()
        moved = moved_mu = None
        for step in range(steps + 1):
            bound, c, q, w, limits = view.bound(multipliers, mu)
            new = (bound, c[:, view.inputs :], w, multipliers, mu)
            if best:
                better = bound > best[0]
                pairs = zip(new, best, strict=True)
                best = tuple(torch.where(better[:, None] if n.dim() > 1 else better, n, old) for n, old in pairs)
            else:
                best = new
            if step == steps or bool((best[0] > closed).all()):
                break
            gradient, gradient_mu = view.gradient(c, q, multipliers, mu, limits)
            moved = gradient if moved is None else gradient.add_(moved, alpha=_MOMENTUM)
            moved_mu = gradient_mu if moved_mu is None else gradient_mu.add_(moved_mu, alpha=_MOMENTUM)
            along, along_mu = moved * view.scale, moved_mu * self._row_scale
            length = (along * moved).sum(1) + (along_mu * moved_mu).sum(1)
            size = factor * (aim - bound).clamp(min=0) / length.clamp(min=_LEAST)
            multipliers = view.clamped(multipliers, torch.addcmul(multipliers, size[:, None], along), limits)
            mu = torch.addcmul(mu, size[:, None], along_mu).clamp_(min=0)
        bound, c, both, multipliers, mu = best
        batch.multipliers = torch.zeros_like(batch.multipliers)
        batch.multipliers[:, view.columns] = multipliers.to(batch.multipliers.dtype)
        batch.mu = mu.to(batch.mu.dtype)
        count, coefficients, curves = len(view.columns), 2 * c, self.strip.curves
        blame = -coefficients.clamp(max=0) * self.offset
        blame.masked_fill_(batch.split != 0, -1)
        if curves is not None:
            blame[:, curves.neurons] = curves.blame(batch.split, coefficients)
        v = None if view.over is None else both[:, count:]
        return Bounded(bound, view.columns, both[:, :count], v, coefficients, blame)

    def minimisers(self, batch: Nodes) -> Tensor:
        """Return points of the box, (nodes, n), where the objective as the batch's multipliers relax it is least."""
        view = _View(self, batch)
        c = view.bound(batch.multipliers[:, view.columns].to(self.dtype), batch.mu.to(self.dtype))[1]
        return -c[:, : view.inputs].sign()


class _Centred:
    """Forms of a store, centred (``DualAscent``), those that have been made."""

    def __init__(self, ascent: DualAscent, store: FormStore) -> None:
        self._ascent, self._store = ascent, store
        self._matrix, self._constant = ascent._centred(store.forms[:0])

    def of(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Return matrix and constant of some forms."""
        places, forms = self._store.places(chosen), self._store.forms
        if len(forms) > len(self._constant):
            matrix, constant = self._ascent._centred(forms[len(self._constant) :])
            self._matrix, self._constant = torch.cat([self._matrix, matrix]), torch.cat([self._constant, constant])
        return self._matrix.index_select(0, places), self._constant[places]


class _View:
    """The rows of the system that a batch multiplies, and what each node makes of them.

    ``slope_low`` and ``slope_up`` are the q̃ per z of a remainder whose coefficient is negative, and of another one.
    """

    def __init__(self, ascent: DualAscent, batch: Nodes) -> None:
        strip, split = ascent.strip, batch.split
        self.ascent, self.inputs = ascent, strip.folded.inputs
        self.columns = columns = ((split != 0).any(0) | ascent.adaptive).nonzero().squeeze(1)
        self.places = self.inputs + columns
        ends = torch.searchsorted(columns, ascent.ends).tolist()
        self.blocks = [(a, b) for a, b in itertools.pairwise(ends) if b > a]
        self.matrix, self.constant = ascent.neurons.of(columns)
        self.between = 2 * self.matrix.index_select(1, self.places)
        count, between = ascent.objectives, 2 * ascent.rows.index_select(1, self.places)
        # One objective is the same for all nodes.
        of = slice(0, 1) if count == 1 else batch.objective
        self.objective = (ascent.rows[of], between[of], ascent.row_constant[of])
        self.rows = (ascent.rows[count:], between[count:], ascent.row_constant[count:])
        self.scale = ascent.scale[columns]
        self.sign = split.index_select(1, columns).to(ascent.dtype)
        self.split = self.sign != 0
        self.lines = ~self.split & ascent.adaptive[columns]
        none = torch.zeros((), dtype=ascent.dtype)
        self.least = torch.where(self.lines, ascent.inactive[columns], none)
        self.most = torch.where(self.lines, ascent.active[columns], none)
        self.slope_up = torch.where(self.sign < 0, ascent.inactive[columns], none)
        self.slope_up = torch.where(self.sign > 0, ascent.active[columns], self.slope_up)
        self.slope_low = torch.where(self.lines, ascent.chord[columns], self.slope_up)
        self.offset = torch.where(self.split, none, torch.where(self.lines, ascent.offset[columns], 1 - none))
        self.over = _Cuts(self, ascent, columns) if bool(strip.over[columns].any()) else None
        self.segments = None if strip.curves is None else strip.curves.of(columns, split, ascent.dtype)
        self.smooth: list[bool] = [False] * len(self.blocks)
        if self.segments is not None:
            self._take(self.segments)

    def _take(self, segments: Segments) -> None:
        """The lines of smooth neurons on their segments, in the place of phases."""
        which = segments.which
        self.smooth = torch.isin(torch.tensor([start for start, _ in self.blocks]), which).tolist()
        self.slope_low[:, which], self.offset[:, which] = segments.rate_above, segments.offset_above
        self.slope_up[:, which] = segments.rate_below
        for table in (self.split, self.lines):
            table[:, which] = False

    def bound(self, multipliers: Tensor, mu: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
        """Bounds; the coefficients of e and p; those of the view's q̃; w and v; the limits of open neurons' multipliers.

        v of the neurons with cuts is behind w, in the order of ``over``.
        """
        first, q, constant = self.objective
        if mu.shape[1]:
            first, q, constant = (own + mu @ rows for own, rows in zip(self.objective, self.rows, strict=True))
        q = q.expand(len(mu), -1).clone()
        w = torch.empty_like(q)
        v = q[:, :0] if self.over is None else q.new_zeros(len(q), len(self.over.which))
        least, most = torch.empty_like(q), torch.empty_like(q)
        for (start, end), smooth in zip(reversed(self.blocks), reversed(self.smooth), strict=True):
            mine = q[:, start:end]
            negative, positive = mine.clamp(max=0), mine.clamp(min=0)
            low, high = positive * self.least[:, start:end], positive * self.most[:, start:end]
            if self.over is not None:
                low = low.addcmul(negative, self.over.mixed[:, start:end])
            if smooth:
                low, high = torch.full_like(low, -torch.inf), torch.full_like(high, torch.inf)
            least[:, start:end], most[:, start:end] = low, high
            given = multipliers[:, start:end]
            free = torch.where(
                self.split[:, start:end],
                -self.sign[:, start:end] * given,
                torch.maximum(torch.minimum(given, high), low),
            )
            value = negative * self.slope_low[:, start:end]
            value = value.addcmul_(positive, self.slope_up[:, start:end]).add_(free)
            w[:, start:end] = value
            if start:
                q[:, :start] += value @ self.between[start:end, :start]
            if self.over is not None:
                self.over.pass_on(q, w, v, start, end)
        c = torch.addmm(first, w, self.matrix)
        if self.over is not None:
            c.addmm_(v, self.over.matrix)
            constant = constant + v @ self.over.constant
        # The norm takes the remainders of the view for free ones, whose least value is min(q, 0).
        bound = constant + w @ self.constant - torch.linalg.vector_norm(c, 1, dim=1)
        bound = bound + (q.clamp(max=0) * (self.offset - 1)).sum(1)
        if self.over is not None:
            bound = bound + self.over.chords(q, w)
        if self.segments is not None:
            bound = bound + self.segments.below(q, multipliers)
        return bound, c, q, torch.cat([w, v], 1), (least, most)

    def gradient(
        self, c: Tensor, q: Tensor, multipliers: Tensor, mu: Tensor, limits: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Of the bound by the multipliers and by μ, zero where they are at a limit and the gradient leads out."""
        y = torch.copysign(torch.ones((), dtype=c.dtype), c).neg_()
        y.index_fill_(1, self.places, -1)
        z = torch.addmm(self.constant, y, self.matrix.T)
        values = torch.zeros_like(z)
        base = None if self.over is None else torch.addmm(self.over.constant, y, self.over.matrix.T)
        for (start, end), smooth in zip(self.blocks, self.smooth, strict=True):
            if start:
                z[:, start:end] += values[:, :start] @ self.between[start:end, :start].T
            part = slice(start, end)
            if smooth:
                assert self.segments is not None
                values[:, part] = self.segments.values(part, q[:, part], z[:, part])
                continue
            mine, lines = z[:, part], self.lines[:, part]
            negative = q[:, part] < 0
            rate = torch.where(negative, self.slope_low[:, part], self.slope_up[:, part])
            given = multipliers[:, part]
            at = torch.where(given >= limits[1][:, part], self.most[:, part], 0)
            at = torch.where(given <= limits[0][:, part], self.least[:, part], at)
            if self.over is not None:
                at = torch.where(negative, 0, at)
                at += negative * (given <= limits[0][:, part]) * self.over.mixed[:, part]
            rate = torch.where(lines & ~negative, at, rate)
            values[:, part] = rate * mine + negative * self.offset[:, part]
            if self.over is not None and base is not None:
                self.over.lower(values, base, q, z, at, start, end)
        low, high = self._limits(limits)
        found = torch.where(self.split, -self.sign * z, z)
        if self.over is not None and base is not None:
            found[:, self.over.which] += self.over.turned(q, base)
        if self.segments is not None:
            which = self.segments.which
            found[:, which] = z[:, which] - self.segments.ends(z[:, which], multipliers[:, which])
        found *= ((multipliers > low) | (found > 0)) & ((multipliers < high) | (found < 0))
        of_mu = mu
        if mu.shape[1]:
            rows, between, constant = self.rows
            of_mu = constant + y @ rows.T + values @ between.T
            of_mu *= (mu > 0) | (of_mu > 0)
        return found, of_mu

    def clamped(self, before: Tensor, multipliers: Tensor, limits: tuple[Tensor, Tensor]) -> Tensor:
        """Multipliers within their limits. One of two half-spaces stops at zero before that of the other begins."""
        low, high = self._limits(limits)
        found = torch.maximum(torch.minimum(multipliers, high), low)
        if self.segments is not None:
            which = self.segments.which
            found[:, which] = torch.where(before[:, which] * found[:, which] < 0, 0, found[:, which])
        return found

    def _limits(self, limits: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Of the multipliers: none below zero where a neuron is split, none but zero where it has no lines."""
        return limits[0].masked_fill(self.split, 0), limits[1].masked_fill(self.split, torch.inf)


class _Cuts:
    """The neurons with hull cuts among those of a view, and their values without remainders.

    Attributes:
        which: (h,) their places among the view's neurons.
        matrix, constant: their values without remainders, as forms of e and p.
    """

    def __init__(self, view: _View, ascent: DualAscent, columns: Tensor) -> None:
        self.which, place = ascent.strip.over_of(columns)
        mine = columns[self.which]
        self.matrix, self.constant = ascent.base.of(place)
        self._between = 2 * self.matrix.index_select(1, view.places)
        none = torch.zeros((), dtype=ascent.dtype)
        share = -ascent.share[mine]
        split, lines = view.split[:, self.which], view.lines[:, self.which]
        self._of_negative = torch.where(split, share, none)
        self._of_positive = torch.where(split | lines, share, none)
        # The cut: q̃ = 1. A multiplier below zero takes so much of the chord in its place.
        view.offset[:, self.which] = torch.where(split, none, none + 1)
        view.slope_low[:, self.which] = torch.where(split, view.slope_low[:, self.which], none)
        chord = ascent.chord[mine]
        # A chord that does not rise takes the place of no cut.
        lines = lines & (chord > 0)
        self.mixed = torch.zeros_like(view.sign)
        self.mixed[:, self.which] = torch.where(lines, chord, none)
        # Of v, by w; and what one unit of w takes from the bound.
        self._lines = lines
        self._by_multiplier = torch.where(lines, share / chord, none)
        self._lost = torch.where(lines, (1 - ascent.offset[mine]) / chord, none)

    def _part(self, start: int, end: int) -> slice:
        """Those among the view's neurons from ``start`` to ``end``."""
        ends = torch.searchsorted(self.which, torch.tensor([start, end])).tolist()
        return slice(*ends)

    def pass_on(self, q: Tensor, w: Tensor, v: Tensor, start: int, end: int) -> None:
        """Fill v for a part of the view, and take what it makes of earlier neurons' coefficients q into account."""
        part = self._part(start, end)
        mine, negative = q[:, self.which[part]], q[:, self.which[part]].clamp(max=0)
        v[:, part] = negative * self._of_negative[:, part] + mine.clamp(min=0) * self._of_positive[:, part]
        v[:, part] += (mine < 0) * w[:, self.which[part]] * self._by_multiplier[:, part]
        if start:
            q[:, :start] += v[:, part] @ self._between[part, :start]

    def chords(self, q: Tensor, w: Tensor) -> Tensor:
        """(nodes,) what the bounds change by where chords take the place of cuts."""
        mine = (q[:, self.which] < 0) * w[:, self.which]
        return -(mine * self._lost).sum(1)

    def turned(self, q: Tensor, base: Tensor) -> Tensor:
        """What the gradient by multipliers has beside z, (nodes, h)."""
        return (q[:, self.which] < 0) * self._lines * (base * self._by_multiplier - self._lost)

    def lower(self, values: Tensor, base: Tensor, q: Tensor, z: Tensor, at: Tensor, start: int, end: int) -> None:
        """Take the values without remainders from those of a part of the view, which makes them remainders."""
        part = self._part(start, end)
        which = self.which[part]
        if start:
            base[:, part] += values[:, :start] @ self._between[part, :start].T
        negative = q[:, which] < 0
        rate = torch.where(negative, self._of_negative[:, part], self._of_positive[:, part])
        change = rate * base[:, part]
        # A chord in place of the cut: q̃ = chord·z/Q + offset − base/Q.
        chord = at[:, which - start] * negative * self._lines[:, part]
        by_chord = chord * z[:, which] + (chord != 0) * (
            base[:, part] * self._by_multiplier[:, part] * self.mixed[:, which]
            - self._lost[:, part] * self.mixed[:, which]
        )
        values[:, which] += change + by_chord
