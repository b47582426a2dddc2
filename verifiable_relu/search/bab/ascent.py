"""Dual ascent over a batch of tree nodes: the search for multipliers that prove them. Rounding is left to ``proof``.

The multipliers w of ``proof`` are not free here: for all but a few neurons the best one is known in closed form once
the coefficient c_j of the neuron's remainder q̃_j is, and that depends on the multipliers of later neurons alone. Going
from the last block to the first,

    w_j = c_j·rate_j + γ_j,

with the rate of a line of q̃_j on the neuron's segment (``Segments``): of the line above where c_j < 0, below where not.
Then c_j·offset_j is left of c_j·q̃_j − w_j·z_j, and −γ_j·z_j: a positive γ_j is the multiplier of z_j ≤ the segment's
upper end, the size of a negative one that of z_j ≥ its lower end. On a phase of a ReLU both lines are its graph, and a
γ_j of one sign costs nothing: it is the β of Wang et al. (arXiv 2103.06624). On the side of an open neuron's kink γ_j
also chooses the line through the kink, at no cost between the slopes of both phases.

An open neuron has lines only if it is among a few chosen for the whole tree, so that a node's bound does not depend on
the batch it is in; of the others 0 ≤ q̃_j ≤ 1 is used. The ascent is by Polyak's steps towards a bound just above zero,
scaled by the neurons' widths, with momentum (B. T. Polyak, USSR Comput. Math. Math. Phys. 9 (1969), 14-29). A neuron's
blame is the line's largest distance from q̃_j, times |c_j|.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from verifiable_relu.search.bab.loop import Bounded, Nodes
from verifiable_relu.search.bab.relaxation import TreeRelaxation
from verifiable_relu.search.bab.system import AffineForms
from verifiable_relu.search.records import Stack

_LEAST = 1e-30  # Heuristic: what steps are divided by is at least this
_CLOSED = 1e-6  # Heuristic: an objective above 0 by this part of its size counts as closed in float32
# The factor of Polyak's step: where few are taken, longer ones than those that converge for certain get further
_FACTOR = 2.0
_MOMENTUM = 0.3

_Layout = tuple[Tensor, Tensor, list[slice]]
"""Columns of a relaxation by ascending neuron, these neurons, and those of each block."""


class DualAscent:
    """Dual ascent for the nodes of one tree.

    Args:
        relaxation: that of the tree.
        adaptive: (m,) bool, the open neurons whose linear bounds each node optimises.
        dtype: of the search.

    Attributes:
        closed: (objectives,) a node with a bound above this needs no better one.
        aim: (objectives,) the bound that steps are made towards, above ``closed``.
    """

    def __init__(self, relaxation: TreeRelaxation, adaptive: Tensor, dtype: torch.dtype) -> None:
        system = relaxation.system
        self.relaxation, self.adaptive, self.dtype = relaxation, adaptive, dtype
        self._ends = torch.tensor([0] + [block.end for block in system.blocks])
        # Gaps are in units of the remainders that slopes leave.
        self.stretch = relaxation.width / relaxation.span
        self.open_gaps = [(gap * self.stretch).to(dtype) for gap in relaxation.segments.open_gaps]
        sizes, count = relaxation.rows.size(), relaxation.objectives
        self.closed = _CLOSED * sizes[:count].to(dtype)
        self.aim = 2 * self.closed
        self.scale, self.row_scale = (
            (size.clamp(min=_LEAST) ** -2).to(dtype).clamp(max=1e30)
            for size in (system.upper - system.lower, sizes[count:])
        )
        relaxation.places(adaptive.nonzero().squeeze(1))
        self.rows = self._centred(relaxation.rows)
        self._forms, self._base = Stack(self.rows[:0]), Stack(self.rows[:0])
        self._last: _Layout | None = None

    def _centred(self, forms: AffineForms) -> AffineForms:
        """Return forms of e and p ∈ [−1, 1]ᵐ with q̃ = (1 + p)/2: their least value is constant − ‖·‖₁."""
        n = self.relaxation.system.inputs
        constant = (forms.constant + forms.matrix[:, n:].sum(1) / 2).to(self.dtype)
        matrix = forms.matrix.to(self.dtype, copy=True)
        matrix[:, n:] /= 2
        return replace(forms, matrix=matrix, constant=constant)

    def forms(self, columns: Tensor, of_base: bool = False) -> tuple[Tensor, Tensor]:
        """Return the pre-activations of some columns, or ``base`` of these, as forms of e and p."""
        kept, made = (self._base, self.relaxation.base) if of_base else (self._forms, self.relaxation.forms)
        if len(made) > len(kept):
            kept.push(self._centred(made[len(kept) :]))
        return kept.rows.matrix.index_select(0, columns), kept.rows.constant[columns]

    def layout(self, nodes: Nodes) -> _Layout:
        """Return the columns that some node uses; all of them on an accelerator, to avoid waiting for it."""
        every, is_cpu = self.relaxation.columns, nodes.mu.device.type == "cpu"
        if is_cpu:
            columns = ((nodes.segment != 0).any(0) | self.adaptive[every]).nonzero().squeeze(1)
        elif self._last is not None and len(self._last[0]) == len(every):
            return self._last
        else:
            columns = torch.arange(len(every), device=every.device)
        columns = columns[every[columns].argsort()]
        neurons = every[columns]
        ends = torch.searchsorted(neurons, self._ends.to(neurons)).tolist()
        self._last = columns, neurons, [slice(a, b) for a, b in itertools.pairwise(ends) if b > a]
        return self._last

    def run(self, nodes: Nodes, steps: int, factor: float = _FACTOR) -> Bounded:
        """Take steps, ``factor`` times Polyak's, from the nodes' multipliers, and return the best bounds found."""
        view = _View(self, nodes)
        closed, aim = self.closed[nodes.objective], self.aim[nodes.objective]
        best = point = view.bound(view.given)
        moved: Tensor | None = None
        for _ in range(steps):
            if nodes.mu.device.type == "cpu" and bool((best.bound > closed).all()):
                break
            gradient = view.gradient(point)
            moved = gradient if moved is None else gradient.add(moved, alpha=_MOMENTUM)
            along = moved * view.scale
            size = factor * (aim - point.bound).clamp(min=0) / (along * moved).sum(1).clamp(min=_LEAST)
            point = view.bound(view.clamped(point, point.at + along * size[:, None]))
            best = best.better(point)
        return view.bounded(best)

    def minimisers(self, nodes: Nodes) -> Tensor:
        """Return points of the box, (nodes, n), where the objective as the multipliers relax it is least."""
        view = _View(self, nodes)
        return -view.bound(view.given).c[:, : view.inputs].sign()


@dataclass(frozen=True, eq=False)
class _Point:
    """Bounds of nodes by some multipliers."""

    at: Tensor  # (nodes, k + rows) the multipliers, γ of the view's k neurons and μ of its rows
    bound: Tensor  # (nodes,)
    c: Tensor  # (nodes, n + m) the coefficients of e and p
    q: Tensor  # (nodes, k) those of the remainders of the view's neurons that their slopes leave
    w: Tensor  # (nodes, k) the multipliers of pre-activations
    v: Tensor  # (nodes, h) those of the values of neurons with cuts
    # low, high: (nodes, k + rows) the limits of the multipliers
    low: Tensor
    high: Tensor

    def better(self, other: _Point) -> _Point:
        """Return the better of both for each node; only its c, w, v and multipliers are read afterwards."""
        wins = (other.bound > self.bound)[:, None]
        at, c, w, v = (
            torch.where(wins, new, old) if old.shape[1] else old
            for new, old in ((other.at, self.at), (other.c, self.c), (other.w, self.w), (other.v, self.v))
        )
        return replace(self, at=at, bound=torch.maximum(self.bound, other.bound), c=c, w=w, v=v)


class _View:
    """Rows of the relaxation, and each node's linear bounds of neurons, for one batch of nodes.

    Attributes:
        given: the nodes' multipliers.
        scale: of steps.
        inputs: the number of inputs that vary.
    """

    def __init__(self, ascent: DualAscent, nodes: Nodes) -> None:
        relaxation, dtype, count = ascent.relaxation, ascent.dtype, ascent.relaxation.objectives
        nodes = nodes.widened(len(relaxation.columns))
        self._ascent, self._nodes, self.inputs = ascent, nodes, relaxation.system.inputs
        self._columns, self._neurons, self._blocks = columns, neurons, _ = ascent.layout(nodes)
        self._places = self.inputs + neurons
        self._matrix, self._constant = ascent.forms(columns)
        self._between = 2 * self._matrix.index_select(1, self._places)
        # One objective is the same for all nodes.
        self._objective = self._rows_of(slice(0, 1) if count == 1 else nodes.objective)
        self._rows = self._rows_of(slice(count, None))
        self.scale = torch.cat([ascent.scale[neurons], ascent.row_scale])
        self.given = torch.cat([nodes.multipliers.index_select(1, columns), nodes.mu], 1).to(dtype)
        segment, adaptive = nodes.segment.index_select(1, columns), ascent.adaptive[neurons]
        is_open = segment == 0
        has_lines = is_open & adaptive
        self._segment = torch.where(has_lines, 1, segment)
        self._lines = lines = relaxation.segments.lines(neurons, self._segment, dtype)
        self._set_limits(segment, is_open, has_lines)
        self._lift, self._cuts = lines.offset_above - 1, None
        if relaxation.cuts is not None:
            self._cuts = _ViewCuts(ascent, columns, neurons, self._places, is_open, adaptive)
            self._lift[:, self._cuts.which] += 1

    def _set_limits(self, segment: Tensor, is_open: Tensor, has_lines: Tensor) -> None:
        """Set the limits of γ: c·``flattest`` + ``least`` and c·``steepest`` + ``most``, on the side of the kink.

        Of an open neuron with a kink γ chooses a line through it; of a phase it has one sign, and costs nothing. Of a
        segment of a smooth neuron γ is free, and multiplies the segment's ends. Without lines it is zero.
        """
        segments, dtype = self._ascent.relaxation.segments, self._ascent.dtype
        kinked = segments.kinked[self._neurons]
        none = torch.zeros((), dtype=dtype, device=segment.device)
        through = has_lines & kinked
        self._flattest, self._steepest = (
            torch.where(through, rates[self._neurons].to(dtype), none)
            for rates in (segments.flattest, segments.steepest)
        )
        curved = ~kinked & (has_lines | ~is_open)
        self._least = none.new_zeros(segment.shape).masked_fill_((segment == 3) & kinked | curved, -torch.inf)
        self._most = none.new_zeros(segment.shape).masked_fill_((segment == 2) & kinked | curved, torch.inf)
        self._concave = segments.concave[self._neurons] if segments.has_concave else None
        self._ends: tuple[Tensor, Tensor] | None = None
        if not segments.all_kinked:
            lower, upper = (end.masked_fill(~curved, 0) for end in (self._lines.lower, self._lines.upper))
            self._ends = lower, upper

    def _rows_of(self, numbers: Tensor | slice) -> tuple[Tensor, Tensor, Tensor]:
        """Return some of the relaxation's rows: coefficients of e and p, of the view's q̃, and constants."""
        matrix, constant = self._ascent.rows.matrix[numbers], self._ascent.rows.constant[numbers]
        return matrix, 2 * matrix.index_select(1, self._places), constant

    def bound(self, at: Tensor) -> _Point:
        """Bound the nodes with multipliers, γ within its limits."""
        lines, count = self._lines, len(self._neurons)
        (first, q, constant), mu = self._objective, at[:, count:]
        if mu.shape[1]:
            first, q, constant = (own + mu @ rows for own, rows in zip(self._objective, self._rows, strict=True))
        q = q.expand(len(at), -1).clone()
        w, gamma = torch.empty_like(q), torch.empty_like(q)
        low, high = torch.zeros_like(at), torch.full_like(at, torch.inf)
        v = q.new_zeros(len(q), 0 if self._cuts is None else len(self._cuts.which))
        for part in reversed(self._blocks):
            if self._cuts is not None:
                self._cuts.exchange(q, v, part)
            mine, free = q[:, part], gamma[:, part]
            negative, positive = mine.clamp(max=0), mine.clamp(min=0)
            side = positive if self._concave is None else torch.where(self._concave[part], negative, positive)
            torch.addcmul(self._least[:, part], side, self._flattest[:, part], out=low[:, part])
            torch.addcmul(self._most[:, part], side, self._steepest[:, part], out=high[:, part])
            torch.maximum(torch.minimum(at[:, part], high[:, part]), low[:, part], out=free)
            value = torch.addcmul(free, negative, lines.rate_above[:, part])
            w[:, part] = value.addcmul_(positive, lines.rate_below[:, part])
            if part.start:
                q[:, : part.start] += value @ self._between[part, : part.start]
        c = torch.addmm(first, w, self._matrix)
        if self._cuts is not None:
            c, constant = c.addmm_(v, self._cuts.matrix), constant + v @ self._cuts.constant
        # The norm takes the remainders of the view for free ones, whose least value is min(q, 0).
        bound = constant + w @ self._constant - torch.linalg.vector_norm(c, 1, dim=1)
        rest = q.clamp(max=0) * self._lift
        if self._ends is not None or self._concave is not None:
            rest.addcmul_(q.clamp(min=0), lines.offset_below)
        if self._ends is not None:
            lower, upper = self._ends
            rest += torch.minimum(-gamma * lower, -gamma * upper)
        return _Point(at, bound + rest.sum(1), c, q, w, v, low, high)

    def gradient(self, point: _Point) -> Tensor:
        """Return the gradient of the bound, zero where a multiplier is at a limit and the gradient leads out."""
        lines, count = self._lines, len(self._neurons)
        y = torch.copysign(torch.ones((), dtype=point.c.dtype, device=point.c.device), point.c).neg_()
        y.index_fill_(1, self._places, -1)
        z = torch.addmm(self._constant, y, self._matrix.T)
        base = None if self._cuts is None else torch.addmm(self._cuts.constant, y, self._cuts.matrix.T)
        negative, lowest, highest = point.q < 0, point.at <= point.low, point.at >= point.high
        rate = torch.where(negative, lines.rate_above, lines.rate_below)
        offset = torch.where(negative, lines.offset_above, lines.offset_below)
        # At a limit, the line through the kink moves with the coefficient.
        turned = torch.where(highest[:, :count], self._steepest, 0).where(~lowest[:, :count], self._flattest)
        on_other = negative if self._concave is None else negative != self._concave
        rate += turned.masked_fill_(on_other, 0)
        values = torch.zeros_like(z)
        for part in self._blocks:
            if part.start:
                z[:, part] += values[:, : part.start] @ self._between[part, : part.start].T
            torch.addcmul(offset[:, part], rate[:, part], z[:, part], out=values[:, part])
            if self._cuts is not None and base is not None:
                self._cuts.values(values, base, part)
        found = z
        if self._ends is not None:
            # The point of each segment at which −γ·z is least: the nearest to z where γ is zero.
            (lower, upper), given = self._ends, point.at[:, :count]
            nearest = torch.maximum(torch.minimum(z, upper), lower)
            found = z - torch.where(given > 0, upper, torch.where(given < 0, lower, nearest))
        if point.at.shape[1] > count:
            rows, between, constant = self._rows
            found = torch.cat([found, constant + y @ rows.T + values @ between.T], 1)
        return found * ((~lowest | (found > 0)) & (~highest | (found < 0)))

    def clamped(self, before: _Point, at: Tensor) -> Tensor:
        """Return multipliers within their limits; γ stops at zero before it passes from one end to the other."""
        found = torch.maximum(torch.minimum(at, before.high), before.low)
        if self._ends is not None:
            crossed = (before.at * found < 0) & before.low.isinf() & before.high.isinf()
            found = found.masked_fill(crossed, 0)
        return found

    def bounded(self, best: _Point) -> Bounded:
        relaxation, nodes, count = self._ascent.relaxation, self._nodes, len(self._neurons)
        segments = relaxation.segments
        multipliers = torch.zeros_like(nodes.multipliers)
        multipliers[:, self._columns] = best.at[:, :count].to(multipliers.dtype)
        coefficients = 2 * best.c[:, self.inputs :]
        below, above = self._ascent.open_gaps
        blame = coefficients.clamp(max=0) * -above
        if self._ends is not None or self._concave is not None:
            blame += coefficients.clamp(min=0) * below
        segment, mine = nodes.segment[:, self._columns], coefficients[:, self._neurons]
        low, high = segments.gaps(self._neurons, self._segment)
        cost = mine.abs() * torch.where(mine >= 0, low, high).to(mine)
        if self._cuts is not None:
            cost *= self._ascent.stretch[self._neurons].to(cost)
        blame[:, self._neurons] = cost.masked_fill_(segment >= segments.last[self._neurons], -1)
        found = replace(nodes, multipliers=multipliers, mu=best.at[:, count:].to(nodes.mu.dtype))
        parts = (self._columns, self._neurons, self._segment, best.w, best.v)
        return Bounded(found, best.bound, *parts, coefficients, blame)


class _ViewCuts:
    """The neurons with hull cuts among those of a view.

    Of such a neuron q̃ is no function of z. Where it is split, or open with lines of its own and a coefficient that is
    not negative, v·``base`` is added (``TreeRelaxation.base``), which exchanges q̃ for the remainder that its slope
    leaves. Elsewhere the cut is all that is used of it.

    Attributes:
        which: (h,) their places among the view's neurons.
        matrix, constant: ``base`` as forms of e and p.
    """

    def __init__(
        self, ascent: DualAscent, columns: Tensor, neurons: Tensor, places: Tensor, is_open: Tensor, adaptive: Tensor
    ) -> None:
        relaxation = ascent.relaxation
        self.which = relaxation.over[neurons].nonzero().squeeze(1)
        self.matrix, self.constant = ascent.forms(columns[self.which], of_base=True)
        self._between = 2 * self.matrix.index_select(1, places)
        mine = neurons[self.which]
        self._share, self._stretch = (t[mine].to(ascent.dtype) for t in (1 / relaxation.span, ascent.stretch))
        self._always, self._adaptive = ~is_open[:, self.which], adaptive[self.which]
        self._free = torch.zeros_like(self._always)
        self._is_exchanged = torch.zeros_like(self._always)

    def _part(self, part: slice) -> slice:
        ends = torch.tensor([part.start, part.stop], device=self.which.device)
        return slice(*torch.searchsorted(self.which, ends).tolist())

    def exchange(self, q: Tensor, v: Tensor, of: slice) -> None:
        """Exchange the coefficients q of a part of the view for those of the remainders that slopes leave."""
        part = self._part(of)
        which = self.which[part]
        mine = q[:, which]
        exchanged = self._always[:, part] | (self._adaptive[part] & (mine >= 0))
        v[:, part] = torch.where(exchanged, -mine * self._share[part], 0.0)
        self._is_exchanged[:, part], self._free[:, part] = exchanged, ~exchanged & (mine < 0)
        q[:, which] = torch.where(exchanged, mine * self._stretch[part], 0.0)
        if of.start:
            q[:, : of.start] += v[:, part] @ self._between[part, : of.start]

    def values(self, values: Tensor, base: Tensor, of: slice) -> None:
        """Make values of q̃ of those of the remainders that slopes leave, for a part of the view."""
        part = self._part(of)
        which = self.which[part]
        if of.start:
            base[:, part] += values[:, : of.start] @ self._between[part, : of.start].T
        found = self._stretch[part] * values[:, which] - self._share[part] * base[:, part]
        values[:, which] = torch.where(self._is_exchanged[:, part], found, self._free[:, part].to(found))
