"""CROWN: bounds of the inputs of nonlinear ops by rows of coefficients, layer after layer.

Intervals bound every op first. Of the inputs of nonlinear ops, those elements are bounded again on both sides for
which the op is not one linear function on the interval. Source: Zhang et al., arXiv 1811.00866.

The slopes of linear bounds are chosen by the bounds of rows alone (``NeuronBounds.by_rows``). If the tighter interval
took part, it could change the choice for the worse; with the same choice, it can only tighten what follows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping
from typing import Any

import torch
from torch import Tensor

from verifiable_relu.bounds.backward import Relaxation
from verifiable_relu.bounds.differences import Secants
from verifiable_relu.bounds.grouping import Grouping
from verifiable_relu.ir.interval import Interval
from verifiable_relu.ir.linear import Gather
from verifiable_relu.ir.network import Affine, Elementwise

Search = Callable[[Relaxation, int, Tensor, Tensor, Tensor], Tensor]
"""Bounds sign·(neurons of an op) from below: of (relaxation, op, neuron, sign, sample), all three (rows,)."""


def bound_by_crown(
    relaxation: Relaxation,
    *,
    search: Search | None = None,
    by_rows: bool = True,
    after: int = -1,
    only: Mapping[int, Tensor] | None = None,
    max_unstable: int | None = None,
    sources: Container[int] | None = None,
) -> Relaxation:
    """Bound every op by intervals, and the inputs of nonlinear ops by rows; returns the relaxation.

    Args:
        relaxation: of the network.
        search: better bounds of the neurons that rows with CROWN's slopes leave unstable (``alpha``).
        by_rows: whether to bound neurons by such rows; without, only ``search`` does.
        after: the inputs of nonlinear ops up to this one already have bounds as tight as rows give.
        only: the neurons to be bounded by rows, by the number of the nonlinear op, (n,) bool; others keep their
            intervals.
        max_unstable: a layer with more unstable neurons keeps its intervals, sample by sample: a box in which
            nearly everything is unstable is bounded badly whatever it costs. By default no layer does.
        sources: the numbers of the ops that are bounded by rows; by default every input of a nonlinear op.
    """

    def tighten(index: int) -> None:
        for source in relaxation.structure.bounded_inputs(index):
            if sources is not None and source not in sources:
                continue
            chosen = _unstable(relaxation, source, index)
            if only is not None and index in only:
                chosen = chosen & only[index]
            if max_unstable is not None:
                chosen = chosen & (chosen.sum(1, keepdim=True) <= max_unstable)
            if by_rows and index > after:
                _tighten(relaxation, source, index, chosen, None)
            if search is not None:
                chosen = chosen & _unstable(relaxation, source, index)
                _tighten(relaxation, source, index, chosen, search)

    return relaxation.advance(tighten)


def _unstable(relaxation: Relaxation, index: int, user: int) -> Tensor:
    """Return the neurons of an input of op ``user`` whose bounds are worth improving, (batch, n) bool."""
    op, interval = relaxation.network.ops[user], relaxation.bounds[index].interval
    if not isinstance(op, Elementwise):
        return torch.ones_like(interval.lower, dtype=torch.bool)
    if index in op.inputs:
        return op.function.unstable(interval)
    first = relaxation.network.ops[relaxation.structure.pairs[user].first]
    assert isinstance(first, Elementwise)
    z, moved = (relaxation.bounds[each.inputs[0]].interval for each in (first, op))
    return Secants.from_functions(first.function, op.function, z, moved).is_free


def _tighten(relaxation: Relaxation, index: int, user: int, chosen: Tensor, search: Search | None) -> None:
    """Bound chosen neurons of an input of op ``user``, (batch, n) bool, by rows; moved neurons at their source op."""
    op = relaxation.network.ops[index]
    if isinstance(op, Affine) and isinstance(op.map, Gather) and op.is_exact and op.bias is None:
        (source,) = op.inputs
        _tighten(relaxation, source, user, op.map.transpose(chosen.to(torch.float64)) > 0, search)
        before = relaxation.bounds[source]
        moved, by_rows = (_moved(op.map, part) for part in (before.interval, before.by_rows))
        assert moved is not None
        relaxation.replace(index, relaxation.bounds[index].interval.intersect(moved), by_rows)
        return
    if not relaxation.structure.is_bounded_by_rows(index, user):
        return
    interval = relaxation.bounds[index].interval
    both = torch.cat([interval.lower, -interval.upper], 1)
    _bound_chosen(relaxation, index, torch.cat([chosen, chosen], 1), both, search)
    lower, upper = both.chunk(2, 1)
    found = Interval(lower, -upper)
    relaxation.replace(index, interval.intersect(found), found)


def _moved(map_: Gather, interval: Interval | None) -> Interval | None:
    return None if interval is None else Interval(map_.apply(interval.lower), map_.apply(interval.upper))


def _bound_chosen(relaxation: Relaxation, index: int, chosen: Tensor, both: Tensor, search: Search | None) -> None:
    """Write lower bounds of chosen neurons, and of their negatives, into ``both``, (batch, 2n)."""
    batch, width = both.shape
    place = chosen.flatten().nonzero().squeeze(1)
    if not len(place):
        return
    size, image = width // 2, relaxation.structure.images[index]
    points = math.prod(image[1:]) if image is not None else 1
    neuron, sample = place % size, place // width if batch > 1 else torch.zeros_like(place)
    sign = 1.0 - 2.0 * (place % width >= size).to(both)
    rows = relaxation.rows_at_once(relaxation.dtype, relaxation.structure.coefficients(index))
    found = both.view(-1)
    grouping = Grouping.by_key(sample * points + neuron % points, batch * points, rows)
    for number, chunk in enumerate(grouping.chunks(rows)):
        if relaxation.stop():
            return
        mine = chunk.rows
        if search is None:
            # The samples of one box are those of every group.
            which = chunk.key // points if batch > 1 else torch.zeros_like(chunk.key)
            lower = relaxation.lower_of_neurons(index, neuron[mine], sign[mine], which, measure=number == 0)
        else:
            flat = mine.flatten()
            lower = search(relaxation, index, neuron[flat], sign[flat], sample[flat]).view(mine.shape)
        # Rows that overflowed say nothing; what intervals say of the neurons holds all the same.
        found.index_copy_(0, place[mine.flatten()], lower.masked_fill(lower.isnan(), -torch.inf).flatten())


def lower_of_rows(
    relaxation: Relaxation, matrix: Tensor, sample: Tensor | None = None, *, until: int = 0, coefficients: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return lower bounds of matrix·y, y the network's output, and coefficients where rows end.

    Args:
        relaxation: whose ops are all bounded.
        matrix: (rows, outputs) in float64.
        sample: (rows,) the sample of each row; by default the same number for each sample, one after another.
        until: see ``Relaxation.lower``.
        coefficients: whether they are wanted.

    Returns:
        (rows,) bounds, −inf for rows that were not reached when time was up; (rows, n) coefficients, or None.
    """
    last, batch, count = len(relaxation.network.ops) - 1, relaxation.batch, len(matrix)
    options: dict[str, Any] = {"until": until, "coefficients": coefficients}
    most = relaxation.rows_at_once(relaxation.dtype, relaxation.structure.widest)
    if sample is None and count <= max(most, batch):
        found = relaxation.lower(last, matrix.view(batch, -1, matrix.shape[1]), measure=True, **options)
        return found.value.flatten(), None if found.coefficients is None else found.coefficients.flatten(0, 1)
    if sample is None:
        sample = torch.arange(batch, device=matrix.device).repeat_interleave(count // batch)
    value, reached = matrix.new_full((count,), -torch.inf), None
    for number, chunk in enumerate(Grouping.by_key(sample, batch, most).chunks(most)):
        if relaxation.stop():
            break
        flat = chunk.rows.flatten()
        found = relaxation.lower(last, matrix[chunk.rows], chunk.key, measure=number == 0, **options)
        value.index_copy_(0, flat, found.value.flatten())
        if found.coefficients is not None:
            reached = found.coefficients.new_zeros(count, found.coefficients.shape[2]) if reached is None else reached
            reached.index_copy_(0, flat, found.coefficients.flatten(0, 1))
    return value, reached
