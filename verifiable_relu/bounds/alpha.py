"""α-CROWN: linear bounds whose lines are chosen by gradient ascent on the bound itself, row by row.

Source: Xu et al., Fast and Complete: Enabling Complete Verification with Rapid and Massively Parallel Incomplete
Verifiers, arXiv 2011.13824, section 3.2. Every choice of slopes is sound, so the search may run in float32 and
without regard to rounding; what it found is then bounded once more, in the relaxation's dtype, rounding included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from verifiable_relu.bounds.adam import Adam
from verifiable_relu.bounds.interval import rough
from verifiable_relu.bounds.relaxation import Relaxation
from verifiable_relu.bounds.tighten import Search
from verifiable_relu.bounds.tuning import MEMORY
from verifiable_relu.bounds.types import Bounds, Lines
from verifiable_relu.network.nodes import Activation, Relu


@dataclass(frozen=True)
class Ascent:
    """How slopes are searched for.

    Attributes:
        steps: of Adam.
        rate: of the first step; slopes live in [0, 1].
        decay: what the rate is multiplied with after every step.
        patience: rows that need no better bound are dropped every so many steps.
    """

    steps: int = 20
    rate: float = 0.5
    decay: float = 0.98
    patience: int = 4


@dataclass(frozen=True)
class Ascended:
    """What a search has found, row by row.

    Attributes:
        lower: (R,) lower bounds, rounding accounted for, never below those of the relaxation's own lines by more than
            rounding.
        slopes: the slopes with which ``lower`` was computed, (R, neurons of all activations on the way, in node
            order), in the dtype of the search; None where they were not to be kept.
    """

    lower: Tensor
    slopes: Tensor | None = None


def ascend(
    relaxation: Relaxation,
    target: int,
    rows: Tensor,
    sample: Tensor,
    ascent: Ascent,
    *,
    constant: Tensor | None = None,
    keep: bool = False,
    settled: Callable[[Tensor, Tensor], Tensor] | None = None,
    memory: int = MEMORY,
    stop: Callable[[], bool] | None = None,
) -> Ascended:
    """Lower bounds of rows·y + constant with optimised slopes, y being the value of node ``target``.

    Args:
        relaxation: advanced to the target.
        target: the node.
        rows: (R, *shape of the target).
        sample: (R,) the sample of each row.
        ascent: the options of the search.
        constant: (R,), by default 0.
        keep: whether the slopes are wanted, too.
        settled: given row numbers (n,) and the best bounds found for them (n,), tells which of them need no
            better one: (n,) bool. Rows that are asked about together are never split over several calls.
        memory: a limit in bytes on what is held at once.
        stop: asked before every step; once it returns True the best slopes so far are taken.
    """
    constant = rows.new_zeros(len(rows)) if constant is None else constant
    depth = sum(relaxation.network.nodes[i].size for i in _involved(relaxation, target))
    widest = max(node.size for node in relaxation.network.nodes)
    tuning = relaxation.tuning
    working = min(memory, tuning.search_bytes)
    size = max(1, working // (rows.element_size() * tuning.search_copies * (depth + widest)))
    parts: list[Ascended] = []
    for first in range(0, len(rows), size):
        part = slice(first, min(len(rows), first + size))
        number = torch.arange(part.start, part.stop, device=rows.device)
        search = SlopeSearch(relaxation, target, rows[part], sample[part], constant[part], ascent)
        mine = None if settled is None else (lambda at, best, number=number: settled(number[at], best))
        search.run(mine, stop)
        parts.append(search.proven(keep))
    if len(parts) == 1:
        return parts[0]
    lower = torch.cat([rows.new_zeros(0), *(part.lower for part in parts)])
    if not keep or not parts:
        return Ascended(lower)
    return Ascended(lower, torch.cat([part.slopes for part in parts if part.slopes is not None]))


def neurons(ascent: Ascent, *, memory: int = MEMORY, stop: Callable[[], bool] | None = None) -> Search:
    """``ascend`` as ``crown_relaxation`` asks for it: better bounds of single neurons."""

    def search(relaxation: Relaxation, target: int, rows: Tensor, sample: Tensor, constant: Tensor | None) -> Tensor:
        found = ascend(relaxation, target, rows, sample, ascent, constant=constant, memory=memory, stop=stop)
        return found.lower

    return search


def _involved(relaxation: Relaxation, target: int) -> list[int]:
    """The activations that a row of ``target`` passes on its way back."""
    nodes = relaxation.network.nodes
    reached = {target}
    for index in range(target, -1, -1):
        if index in reached:
            reached.update(nodes[index].inputs)
    return [i for i in sorted(reached) if isinstance(nodes[i], Activation)]


class SlopeSearch:
    """The slopes of one chunk of rows, (rows, neurons of all activations on the way, one after another).

    In float32, or in float64 where float32 does not hold the weights.
    """

    def __init__(
        self, relaxation: Relaxation, target: int, rows: Tensor, sample: Tensor, constant: Tensor, ascent: Ascent
    ) -> None:
        self.relaxation = relaxation
        self.target = target
        self.rows, self.sample, self.constant = rows, sample, constant
        self.ascent = ascent
        self.activations = _involved(relaxation, target)
        self.sizes = [relaxation.network.nodes[i].size for i in self.activations]
        box = relaxation.box
        network, self.dtype = rough(relaxation.network, rows.device)
        self.rough = Relaxation(network, Bounds(box.lower.to(self.dtype), box.upper.to(self.dtype)))
        self.best = rows.new_full((len(rows),), -torch.inf, dtype=self.dtype)
        starts, fixed, free = [], [], []
        for index in self.activations:
            common = relaxation.lines.of(index).lower_slope.to(self.dtype).flatten(1)
            if self._relu(index):
                free.append(relaxation.lines.free(index).to(self.dtype).flatten(1))
                starts.append(common * free[-1])
                fixed.append(common - starts[-1])
            else:
                free.append(torch.ones_like(common))
                starts.append(0.5 * free[-1])
                fixed.append(torch.zeros_like(common))
        none = rows.new_zeros(relaxation.samples, 0, dtype=self.dtype)
        start, self.fixed, self.free = (torch.cat([none, *t], 1) for t in (starts, fixed, free))
        self.slopes = start.index_select(0, sample)

    def _relu(self, index: int) -> bool:
        return isinstance(self.relaxation.network.nodes[index], Relu)

    def run(self, settled: Callable[[Tensor, Tensor], Tensor] | None, stop: Callable[[], bool] | None) -> None:
        """Ascend; the best slopes of every row are kept, the mean of the later half of all included."""
        if not self.activations:
            return
        at = torch.arange(len(self.rows), device=self.rows.device)
        slopes = Adam(self.slopes.clone())
        view = self._view(at)
        rate = self.ascent.rate
        for step in range(self.ascent.steps + 1):
            if stop is not None and stop():
                return
            values, gradient = view(slopes.value)
            self.keep(at, values, slopes.value)
            if step == self.ascent.steps:
                break
            going = None
            if settled is not None and step % self.ascent.patience == 0:
                going = ~settled(at, self.best[at])
                if not bool(going.any()):
                    return
            slopes.step(gradient(), rate, counts=2 * step >= self.ascent.steps)
            if going is not None and not bool(going.all()):
                at = at[going]
                slopes.narrow(going)
                view = self._view(at)
            rate *= self.ascent.decay
        # Steps of this size go to and fro about a maximum at which the bound has a kink.
        if slopes.counted and not (stop is not None and stop()):
            mean = slopes.mean()
            self.keep(at, view(mean)[0], mean)

    def _each(self, slopes: Tensor) -> dict[int, Tensor]:
        """The part of every activation, (rows, *shape)."""
        shapes = [self.relaxation.network.nodes[i].shape for i in self.activations]
        parts = zip(self.activations, shapes, slopes.split(self.sizes, 1), strict=True)
        return {index: part.reshape(len(slopes), *shape) for index, shape, part in parts}

    def _view(self, at: Tensor) -> Callable[[Tensor], tuple[Tensor, Callable[[], Tensor]]]:
        """The bounds of the rows ``at`` as a function of their slopes, and a function that gives their gradient."""
        sample = self.sample[at]
        rows, constant = self.rows[at].to(self.dtype), self.constant[at].to(self.dtype)
        fixed, free = self.fixed.index_select(0, sample), self.free.index_select(0, sample)
        common = {
            index: Lines(*(t.to(self.dtype).index_select(0, sample) for t in self.relaxation.lines.of(index).parts()))
            for index in self.activations
            if self._relu(index)
        }

        def bounds(slopes: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
            lines, leaves, chosen = {}, {}, {}
            for index, part in self._each(torch.addcmul(fixed, free, slopes)).items():
                if index in common:
                    lines[index] = replace(common[index], lower_slope=part)
                    continue
                with torch.enable_grad():
                    leaves[index] = part.to(self.rows.dtype).requires_grad_()
                    chosen[index] = self.relaxation.lines.chosen(index, sample, leaves[index]).parts()
                lines[index] = Lines(*(t.detach().to(self.dtype) for t in chosen[index]))
            record: dict[int, Tensor] = {}
            with torch.no_grad():
                values, reached = self.rough.lower(
                    self.target,
                    rows,
                    sample,
                    constant=constant,
                    lines=lines,
                    rounded=False,
                    record=record,
                    coefficients=True,
                )
            assert reached is not None

            def gradient() -> Tensor:
                with torch.no_grad():
                    moved = self._by_lines(lines, record, sample, reached)
                parts = [slopes.new_zeros(len(slopes), 0)]
                for index, size in zip(self.activations, self.sizes, strict=True):
                    if index not in moved:
                        parts.append(slopes.new_zeros(len(slopes), size))
                    elif index in common:
                        parts.append(moved[index][0].flatten(1))
                    else:
                        pairs = zip(chosen[index], moved[index], strict=True)
                        outputs, given = zip(*((c, m.to(c)) for c, m in pairs if c.requires_grad), strict=True)
                        (found,) = torch.autograd.grad(outputs, leaves[index], given)
                        parts.append(found.flatten(1).to(self.dtype))
                return torch.cat(parts, 1) * free

            return values, gradient

        return bounds

    def _by_lines(
        self, lines: Mapping[int, Lines], record: Mapping[int, Tensor], sample: Tensor, reached: Tensor
    ) -> dict[int, tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Derivatives of every row's bound by the slopes and offsets of its lines, in the order of ``Lines``.

        A bound is the least value over the box of a linear function that the rows' coefficients make of the lines. By
        the envelope theorem only its value at the minimiser x counts: going forward from there through the lines that
        were taken, a neuron with the coefficient a and the pre-activation z contributes a⁺·(lower line at z) +
        a⁻·(upper line at z).
        """
        network, entry = self.rough.network, self.rough.nodes.start
        center, radius = self.rough.nodes.ball(entry)
        point = center.index_select(0, sample) - reached.sign() * radius.index_select(0, sample)
        values = {entry: point.reshape(len(point), *network.nodes[entry].shape)}
        found = {}
        for index in range(entry + 1, max(record, default=0) + 1):
            node = network.nodes[index]
            if any(i not in values for i in node.inputs):
                continue
            if not isinstance(node, Activation):
                values[index] = node.forward(*(values[i] for i in node.inputs))
            elif index in record:
                z, mine = values[node.inputs[0]], lines[index]
                above = record[index].reshape(z.shape)
                below = above.clamp(max=0)
                above = above - below
                found[index] = (above * z, above, below * z, below)
                low = torch.addcmul(mine.lower_offset, mine.lower_slope, z)
                high = torch.addcmul(mine.upper_offset, mine.upper_slope, z)
                values[index] = torch.where(below < 0, high, low)
        return found

    def keep(self, at: Tensor, values: Tensor, slopes: Tensor) -> None:
        """Take the slopes of those of the rows ``at`` whose bounds are better than the best so far."""
        better = values > self.best[at]
        chosen = at[better]
        self.best[chosen] = values[better]
        self.slopes[chosen] = slopes[better]

    def proven(self, keep: bool) -> Ascended:
        """The bounds of the best slopes, rounding accounted for; ``keep``: with the slopes."""
        lines = {
            index: self.relaxation.lines.chosen(index, self.sample, slope.to(self.rows.dtype))
            for index, slope in self._each(self.slopes).items()
        }
        found = self.relaxation.lower(self.target, self.rows, self.sample, constant=self.constant, lines=lines)[0]
        # The search starts from CROWN's own lines for ReLU alone.
        if not all(self._relu(index) for index in self.activations):
            common = self.relaxation.lower(self.target, self.rows, self.sample, constant=self.constant)[0]
            found = torch.maximum(found, common)
        return Ascended(found, self.slopes if keep else None)
