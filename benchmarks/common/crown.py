"""Bounds of all neurons of a network over boxes, for scripts that count or compare them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from verifiable_relu.bounds.backward import Relaxation
from verifiable_relu.bounds.linear_bounds import bound_by_crown
from verifiable_relu.bounds.neuron_bounds import BASE
from verifiable_relu.ir.interval import Interval
from verifiable_relu.ir.network import Elementwise, Network


def bounded(network: Network, box: Interval, *, intervals: bool = False, **options: Any) -> Relaxation:
    """Bound all ops over boxes of any shape (batch, …) by CROWN, or by intervals alone, without gradients of weights.

    Args:
        network: the network.
        box: the boxes.
        intervals: whether intervals are all.
        options: of ``Relaxation``.
    """
    ends = (end.detach().flatten(1).to(BASE) for end in (box.lower, box.upper))
    relaxation = Relaxation(network, Interval(*ends), **options)
    return relaxation.advance() if intervals else bound_by_crown(relaxation)


def unstable(relaxation: Relaxation) -> dict[int, Tensor]:
    """Return which neurons are unstable, (batch, size) bool, by the number of each elementwise op."""
    found = {}
    for index in relaxation.network.activations:
        op = relaxation.network.ops[index]
        assert isinstance(op, Elementwise)
        found[index] = op.function.unstable(relaxation.bounds[op.inputs[0]].interval)
    return found
