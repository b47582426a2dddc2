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

from verifiable_relu.bounds.linear import MEMORY, Relaxation, Search, preactivation_bounds
from verifiable_relu.bounds.types import Bounds, Lines
from verifiable_relu.network.graph import Activation, Network, Relu

_WORKING = 1 << 28
"""Most bytes that the search holds at once: larger chunks gain nothing."""

_COPIES = 12
"""How many arrays of every activation's size are alive at once, for each row."""


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


def ascend(
    relaxation: Relaxation,
    target: int,
    rows: Tensor,
    sample: Tensor,
    ascent: Ascent,
    *,
    constant: Tensor | None = None,
    settled: Callable[[Tensor, Tensor], Tensor] | None = None,
    memory: int = MEMORY,
    stop: Callable[[], bool] | None = None,
) -> Tensor:
    """Lower bounds of rows·y + constant with optimised slopes, y being the value of node ``target``.

    Args:
        relaxation: advanced to the target.
        target: the node.
        rows: (R, *shape of the target).
        sample: (R,) the sample of each row.
        ascent: the options of the search.
        constant: (R,), by default 0.
        settled: given row numbers (n,) and the best bounds found for them (n,), tells which of them need no
            better one: (n,) bool. Rows that are asked about together are never split over several calls.
        memory: a limit in bytes on what is held at once.
        stop: asked before every step; once it returns True the best slopes so far are taken.

    Returns:
        (R,) lower bounds, rounding accounted for, never below those of the relaxation's own lines by more than
        rounding.
    """
    constant = rows.new_zeros(len(rows)) if constant is None else constant
    depth = sum(relaxation.network.nodes[i].size for i in _involved(relaxation, target))
    widest = max(node.size for node in relaxation.network.nodes)
    size = max(1, min(memory, _WORKING) // (rows.element_size() * _COPIES * (depth + widest)))
    parts = []
    for start in range(0, len(rows), size):
        part = slice(start, min(len(rows), start + size))
        number = torch.arange(part.start, part.stop, device=rows.device)
        search = _Search(relaxation, target, rows[part], sample[part], constant[part], ascent)
        mine = None if settled is None else (lambda at, best, number=number: settled(number[at], best))
        search.run(mine, stop)
        parts.append(search.proven())
    return torch.cat(parts) if parts else rows.new_zeros(0)


def alpha_lower_bounds(
    network: Network,
    box: Bounds,
    preactivations: Mapping[int, Bounds],
    matrix: Tensor,
    sample: Tensor,
    ascent: Ascent | None = None,
    *,
    settled: Callable[[Tensor, Tensor], Tensor] | None = None,
    memory: int = MEMORY,
    stop: Callable[[], bool] | None = None,
) -> Tensor:
    """α-CROWN lower bounds of matrix·y over the box, y being the network's flattened output.

    Like ``linear_lower_bounds``, with slopes optimised for every row; the bounds of pre-activations are taken as
    they are.

    Args:
        network: in the dtype and on the device of ``box``.
        box: the inputs, shaped (batch, *input_shape).
        preactivations: bounds of every activation's input.
        matrix: (R, outputs).
        sample: (R,) the sample of each row.
        ascent: the options of the search.
        settled: which rows need no better bound (``ascend``).
        memory: a limit in bytes on what is held at once.
        stop: asked before every step (``ascend``).

    Returns:
        (R,), rounding accounted for.
    """
    relaxation = Relaxation(network, box, preactivations)
    last = len(network.nodes) - 1
    relaxation.advance(last)
    rows = matrix.to(box.lower).reshape(len(matrix), *network.output_shape)
    return ascend(relaxation, last, rows, sample, ascent or Ascent(), settled=settled, memory=memory, stop=stop)


def alpha_preactivation_bounds(
    network: Network,
    box: Bounds,
    ascent: Ascent | None = None,
    *,
    memory: int = MEMORY,
    stop: Callable[[], bool] | None = None,
) -> dict[int, Bounds]:
    """``preactivation_bounds`` with slopes optimised for either side of every neuron that CROWN leaves unstable."""
    search = neurons(ascent or Ascent(steps=8), memory=memory, stop=stop)
    return preactivation_bounds(network, box, memory=memory, stop=stop, search=search)


def neurons(ascent: Ascent, *, memory: int = MEMORY, stop: Callable[[], bool] | None = None) -> Search:
    """``ascend`` as ``relaxed`` asks for it: better bounds of single neurons."""

    def search(relaxation: Relaxation, target: int, rows: Tensor, sample: Tensor, constant: Tensor | None) -> Tensor:
        return ascend(relaxation, target, rows, sample, ascent, constant=constant, memory=memory, stop=stop)

    return search


def _involved(relaxation: Relaxation, target: int) -> list[int]:
    """The activations that a row of ``target`` passes on its way back."""
    nodes = relaxation.network.nodes
    reached = {target}
    for index in range(target, -1, -1):
        if index in reached:
            reached.update(nodes[index].inputs)
    return [i for i in sorted(reached) if isinstance(nodes[i], Activation)]


class _Search:
    """The slopes of one chunk of rows, in float32: (rows, neurons of all activations on the way, one after another)."""

    def __init__(
        self, relaxation: Relaxation, target: int, rows: Tensor, sample: Tensor, constant: Tensor, ascent: Ascent
    ) -> None:
        self.relaxation = relaxation
        self.target = target
        self.rows, self.sample, self.constant = rows, sample, constant
        self.ascent = ascent
        self.activations = _involved(relaxation, target)
        self.sizes = [relaxation.network.nodes[i].size for i in self.activations]
        box = relaxation.values[0]
        single = relaxation.network.to(torch.float32, rows.device)
        self.rough = Relaxation(single, Bounds(box.lower.float(), box.upper.float()))
        self.best = rows.new_full((len(rows),), -torch.inf, dtype=torch.float32)
        starts, fixed, free = [], [], []
        for index in self.activations:
            common = relaxation.lines(index).lower_slope.float().flatten(1)
            if self._relu(index):
                free.append(relaxation.free(index).float().flatten(1))
                starts.append(common * free[-1])
                fixed.append(common - starts[-1])
            else:
                free.append(torch.ones_like(common))
                starts.append(0.5 * free[-1])
                fixed.append(torch.zeros_like(common))
        none = rows.new_zeros(relaxation.samples, 0, dtype=torch.float32)
        start, self.fixed, self.free = (torch.cat([none, *t], 1) for t in (starts, fixed, free))
        self.slopes = start.index_select(0, sample)

    def _relu(self, index: int) -> bool:
        return isinstance(self.relaxation.network.nodes[index], Relu)

    def run(self, settled: Callable[[Tensor, Tensor], Tensor] | None, stop: Callable[[], bool] | None) -> None:
        """Ascend; the best slopes of every row are kept."""
        if not self.activations:
            return
        at = torch.arange(len(self.rows), device=self.rows.device)
        slopes = _Adam(self.slopes.clone())
        view = self._view(at)
        rate = self.ascent.rate
        for step in range(self.ascent.steps + 1):
            if stop is not None and stop():
                return
            last = step == self.ascent.steps
            with torch.set_grad_enabled(not last):
                values = view(slopes.value)
            self._keep(at, values.detach(), slopes.value.detach())
            if last:
                return
            if settled is not None and step % self.ascent.patience == 0:
                going = ~settled(at, self.best[at])
                if not bool(going.any()):
                    return
                if not bool(going.all()):
                    at = at[going]
                    slopes.narrow(going)
                    view = self._view(at)
                    with torch.enable_grad():
                        values = view(slopes.value)
            values.backward(torch.ones_like(values))
            slopes.step(rate)
            rate *= self.ascent.decay

    def _each(self, slopes: Tensor) -> dict[int, Tensor]:
        """The part of every activation, (rows, *shape)."""
        shapes = [self.relaxation.network.nodes[i].shape for i in self.activations]
        parts = zip(self.activations, shapes, slopes.split(self.sizes, 1), strict=True)
        return {index: part.reshape(len(slopes), *shape) for index, shape, part in parts}

    def _view(self, at: Tensor) -> Callable[[Tensor], Tensor]:
        """The bounds of the rows ``at`` as a function of their slopes, with all that is constant worked out."""
        sample = self.sample[at]
        rows, constant = self.rows[at].float(), self.constant[at].float()
        fixed, free = self.fixed.index_select(0, sample), self.free.index_select(0, sample)
        common = {
            index: Lines(*(t.float().index_select(0, sample) for t in _tensors(self.relaxation.lines(index))))
            for index in self.activations
            if self._relu(index)
        }

        def bounds(slopes: Tensor) -> Tensor:
            lines = {}
            for index, part in self._each(torch.addcmul(fixed, free, slopes)).items():
                if index in common:
                    lines[index] = replace(common[index], lower_slope=part)
                else:
                    chosen = self.relaxation.chosen_lines(index, sample, part.to(self.rows.dtype))
                    lines[index] = Lines(*(t.float() for t in _tensors(chosen)))
            return self.rough.lower(self.target, rows, sample, constant=constant, lines=lines, rounded=False)[0]

        return bounds

    def _keep(self, at: Tensor, values: Tensor, slopes: Tensor) -> None:
        better = values > self.best[at]
        chosen = at[better]
        self.best[chosen] = values[better]
        self.slopes[chosen] = slopes[better]

    def proven(self) -> Tensor:
        """The bounds of the best slopes, rounding accounted for."""
        lines = {
            index: self.relaxation.chosen_lines(index, self.sample, slope.to(self.rows.dtype))
            for index, slope in self._each(self.slopes).items()
        }
        found = self.relaxation.lower(self.target, self.rows, self.sample, constant=self.constant, lines=lines)[0]
        if all(self._relu(index) for index in self.activations):
            return found
        # The search starts from CROWN's own lines for ReLU alone.
        return torch.maximum(
            found, self.relaxation.lower(self.target, self.rows, self.sample, constant=self.constant)[0]
        )


def _tensors(lines: Lines) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return lines.lower_slope, lines.lower_offset, lines.upper_slope, lines.upper_offset


class _Adam:
    """Slopes that ascend by Adam (Kingma and Ba, arXiv 1412.6980, algorithm 1) within [0, 1].

    torch's optimizers cannot drop rows, and importing them takes as long as importing the rest of torch.
    """

    def __init__(self, value: Tensor) -> None:
        self.value = value.requires_grad_()
        self._mean = torch.zeros_like(value)
        self._square = torch.zeros_like(value)
        self._steps = 0

    def narrow(self, keep: Tensor) -> None:
        """Go on with some of the rows."""
        self.value = self.value.detach()[keep].requires_grad_()
        self._mean, self._square = self._mean[keep], self._square[keep]

    def step(self, rate: float) -> None:
        """One step along the gradient that has arrived."""
        gradient = self.value.grad
        if gradient is None:
            return
        self._steps += 1
        self._mean.lerp_(gradient, 0.1)
        self._square.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
        spread = (self._square / (1 - 0.999**self._steps)).sqrt_().add_(1e-8)
        with torch.no_grad():
            self.value.addcdiv_(self._mean, spread, value=rate / (1 - 0.9**self._steps)).clamp_(0, 1)
        self.value.grad = None
