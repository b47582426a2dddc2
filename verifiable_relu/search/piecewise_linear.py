"""Piecewise-linear networks in the form that complete methods take: each neuron has two phases.

Maxima are tournaments of ReLUs: max(a, b) = a + relu(b − a).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from verifiable_relu.bounds.backward import Relaxation
from verifiable_relu.bounds.linear_bounds import bound_by_crown
from verifiable_relu.errors import UnsupportedError
from verifiable_relu.ir.functions.function import Function
from verifiable_relu.ir.functions.piecewise_linear import PiecewiseLinear
from verifiable_relu.ir.interval import Interval
from verifiable_relu.ir.linear import Gather, Sparse
from verifiable_relu.ir.network import Affine, Elementwise, Maximum, Network, Op, Pair, Sum
from verifiable_relu.rounding import above, below


def require_piecewise_linear(network: Network) -> None:
    """Raise an ``UnsupportedError``, which names the first op that is not piecewise linear, if there is one."""
    if network.curved is not None:
        raise UnsupportedError("only piecewise-linear networks can be split into phases", place=network.curved.place)


def slopes_below(function: Function, size: int) -> Tensor:
    """Return the slopes below 0, (size,) in float64, of a piecewise-linear function, whose slope above 0 is 1."""
    assert isinstance(function, PiecewiseLinear)
    return function.slope_below.detach().cpu().double().expand(size)


def without_maxima(network: Network) -> tuple[Network, dict[int, int]]:
    """Return a network that computes the same function without ``Maximum``, and each op's number there.

    Each round of a tournament takes pairwise maxima of the remaining candidates.
    """
    if not any(isinstance(op, Maximum) for op in network.ops):
        return network, {index: index for index in range(len(network.ops))}
    ops: list[Op] = []
    number: dict[int, int] = {}
    for index, op in enumerate(network.ops):
        inputs = tuple(number[i] for i in op.inputs)
        if isinstance(op, Maximum):
            _play(op, inputs[0], ops)
        else:
            ops.append(replace(op, inputs=inputs))
        number[index] = len(ops) - 1
    pairs = tuple(Pair(*(number[i] for i in pair)) for pair in network.pairs)
    return replace(network, ops=tuple(ops), pairs=pairs), number


def _play(op: Maximum, source: int, ops: list[Op]) -> None:
    """Add the ops that compute a maximum of elements of an op, the maximum last."""
    size, n_in, candidates = op.size, ops[source].size, op.candidates
    if len(candidates) == 1:
        ops.append(Affine(name=op.name, inputs=(source,), size=size, map=Gather(candidates[0], n_in)))
    while len(candidates) > 1:
        count, half = len(candidates), (len(candidates) + 1) // 2
        first, second = candidates[:half], candidates[count - half :]
        index = torch.stack([second.flatten(), first.flatten()], 1)
        # Where a candidate meets itself, 1 − 1 is 0.
        weight = torch.tensor([1.0, -1.0]).repeat(len(index), 1)
        names = [f"{op.name}/{what}{count}" for what in ("difference", "rest", "first")]
        ops += [
            Affine(name=names[0], inputs=(source,), size=len(index), map=Sparse(index, weight, n_in)),
            Elementwise(name=names[1], inputs=(len(ops),), size=len(index), function=PiecewiseLinear()),
            Affine(name=names[2], inputs=(source,), size=len(index), map=Gather(first.flatten(), n_in)),
            Sum(name=op.name, inputs=(len(ops) + 1, len(ops) + 2), size=len(index)),
        ]
        source, n_in = len(ops) - 1, len(index)
        candidates = torch.arange(n_in).reshape(half, size)


def tournament_intervals(
    network: Network, number: Mapping[int, int], intervals: Mapping[int, Interval]
) -> dict[int, Interval]:
    """Return intervals of the inputs of tournaments' ReLUs, and the given ones, by ops of the new network.

    Args:
        network, number: as ``without_maxima`` returns them.
        intervals: of ops of the old network by their numbers, those that feed maxima among them.
    """
    found, old = {number[index]: interval for index, interval in intervals.items()}, set(number.values())
    for index, op in enumerate(network.ops):
        if index in old or not (isinstance(op, Affine) and isinstance(op.map, Sparse)):
            continue
        x = found[op.inputs[0]]
        second, first = (x.columns(place) for place in op.map.index.T)
        # A candidate that meets itself differs by nothing.
        meets_itself = op.map.index[:, 0] == op.map.index[:, 1]
        found[index] = Interval(
            below(second.lower - first.upper).masked_fill(meets_itself, 0.0),
            above(second.upper - first.lower).masked_fill(meets_itself, 0.0),
        )
        ends = zip((first.lower, first.upper), (second.lower, second.upper), strict=True)
        # The winners' op is the last of the four of a round.
        found.setdefault(index + 3, Interval(*(torch.maximum(*end) for end in ends)))
    return found


def bound_differences(
    network: Network, box: Interval, intervals: Mapping[int, Interval], stop: Callable[[], bool]
) -> tuple[Relaxation, int]:
    """Bound elementwise ops' inputs by CROWN behind the first tournament; returns that op's number, too.

    Candidates read nearly the same inputs, so that their difference varies far less than their intervals say.

    Args:
        network, box, intervals: without maxima, the box (1, inputs), and what is known, (1, size).
        stop: once it returns True, the rest keeps what is known.
    """
    relaxation = Relaxation(network, box, known=intervals, stop=stop)
    first = min(i for i, op in enumerate(network.ops) if isinstance(op, Affine) and isinstance(op.map, Sparse))
    return bound_by_crown(relaxation, sources=range(first, len(network.ops))), first
