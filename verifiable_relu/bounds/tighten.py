"""CROWN: bounds of every unstable neuron's pre-activation by rows of coefficients, layer after layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from verifiable_relu.bounds.activations import unstable
from verifiable_relu.bounds.chunks import chunk_size, groups
from verifiable_relu.bounds.interval import intersect
from verifiable_relu.bounds.relaxation import Relaxation
from verifiable_relu.bounds.tuning import MEMORY, TUNING, Tuning
from verifiable_relu.bounds.types import Bounds
from verifiable_relu.bounds.work import receptive
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Activation, Affine, Input, Linear, Permute, Relu, Reshape, Scale

Search = Callable[[Relaxation, int, Tensor, Tensor, Tensor | None], Tensor]
"""Bounds rows·y + constant from below: of (relaxation, target, rows, sample, constant), as ``Relaxation.lower``."""


def crown_relaxation(
    network: Network,
    box: Bounds,
    *,
    known: Mapping[int, Bounds] | None = None,
    crown: bool = True,
    memory: int = MEMORY,
    stop: Callable[[], bool] | None = None,
    search: Search | None = None,
    max_unstable: int | None = None,
    float32: bool = False,
    tuning: Tuning = TUNING,
    coarse: Callable[[int, Bounds], Bounds] | None = None,
) -> Relaxation:
    """A relaxation whose unstable neurons' pre-activations have been bounded by CROWN.

    Args:
        network: in the dtype and on the device of ``box``.
        box: the inputs, shaped (batch, *input_shape).
        known: bounds of activations' inputs, by activation node index: of these, only neurons that are unstable by them
            are bounded again.
        crown: whether to bound unstable neurons by CROWN; without, only ``search`` does.
        memory: a limit in bytes on the coefficients held at once.
        stop: asked between chunks; once it returns True the rest keeps its interval bounds, which are looser and just
            as sound.
        search: better bounds for the neurons that CROWN leaves unstable (``alpha.neurons``).
        max_unstable: a layer of which more neurons are unstable keeps its intervals, sample by sample: a box in which
            nearly everything is unstable is bounded badly whatever it costs. By default no layer does.
        float32: coefficients in float32 (``Relaxation``).
        tuning: thresholds.
        coarse: makes bounds of an activation's input, given with its index, looser before anything else is bounded
            with them.
    """
    relaxation = Relaxation(network, box, known, float32, tuning=tuning)
    exact = _exact_by_intervals(network)

    def tighten(index: int, bounds: Bounds) -> Bounds:
        if exact[network.nodes[index].inputs[0]]:
            return bounds
        if crown:
            bounds = _Layer(relaxation, index, bounds, max_unstable, memory, stop).tightened()
        if search is not None:
            bounds = _Layer(relaxation, index, bounds, max_unstable, memory, stop, search).tightened()
        return bounds

    if coarse is None:
        relaxation.advance(network.last_activation, tighten)
    else:
        relaxation.advance(network.last_activation, lambda index, bounds: coarse(index, tighten(index, bounds)))
    return relaxation


def preactivation_bounds(
    network: Network,
    box: Bounds,
    *,
    memory: int = MEMORY,
    stop: Callable[[], bool] | None = None,
    search: Search | None = None,
    float32: bool = False,
    tuning: Tuning = TUNING,
) -> dict[int, Bounds]:
    """CROWN bounds of every activation's input, by activation node index, each (batch, *shape).

    Neurons that intervals already prove stable are not bounded again. The arguments are those of ``crown_relaxation``.
    """
    return crown_relaxation(network, box, memory=memory, stop=stop, search=search, float32=float32, tuning=tuning).pre


class _Layer:
    """The neurons of one activation's input that are to be bounded anew.

    The lower line of a ReLU is chosen by the bounds that rows have found alone. If the tighter interval took part, it
    could change the choice for the worse; with the same choice, it can only tighten what follows.

    Args:
        relaxation: advanced to the activation.
        index: the activation.
        bounds: of its input so far.
        max_unstable: the most unstable neurons of a sample, if its neurons are to be bounded at all.
        memory: a limit in bytes on the coefficients held at once.
        stop: asked between chunks.
        search: what bounds rows; by default CROWN's lines.
    """

    def __init__(
        self,
        relaxation: Relaxation,
        index: int,
        bounds: Bounds,
        max_unstable: int | None,
        memory: int,
        stop: Callable[[], bool] | None,
        search: Search | None = None,
    ) -> None:
        node = relaxation.network.nodes[index]
        assert isinstance(node, Activation)
        self.relaxation, self.index, self.node, self.bounds = relaxation, index, node, bounds
        self.source = node.inputs[0]
        self.stop, self.search = stop, search
        chosen = unstable(node, bounds).flatten(1)
        if max_unstable is not None:
            chosen = chosen & (chosen.sum(1, keepdim=True) <= max_unstable)
        self.chosen = chosen
        # Lower bounds of every neuron and of its negative.
        self.both = torch.stack([bounds.lower.flatten(1), -bounds.upper.flatten(1)])
        tuning, self.narrow = relaxation.tuning, relaxation.backward.float32.last_node > relaxation.nodes.start
        windowed = search is None and len(bounds.lower.shape) == 4
        copies = tuning.windowed_copies if windowed else tuning.copies
        self.multiple = tuning.row_multiple if self.narrow and relaxation.samples == 1 else 1
        # Coefficients in float32 take half the memory.
        size = chunk_size(relaxation.network, self.both, memory, tuning, copies / 2 if self.narrow else copies)
        self.size = -(-size // self.multiple) * self.multiple

    def tightened(self) -> Bounds:
        """The bounds, intersected with what rows find for both sides, lower and upper, of the chosen neurons.

        The lower bound of a ReLU's input is of no use if the ReLU turns out inactive. Neither is the upper bound of an
        input of the last ReLU that turns out active. Such sides, where they are so many that it pays, wait until the
        other side is bounded.
        """
        chosen, both, relaxation = self.chosen, self.both, self.relaxation
        last = self.index == relaxation.network.last_activation
        places = chosen.flatten().nonzero().squeeze(1)
        enough = relaxation.tuning.waiting_coefficients // receptive(relaxation.network)[self.source]
        if isinstance(self.node, Relu) and len(places) > enough and int(chosen.sum(1).amax()) > enough:
            negative = both[0] < both[1]
            later = torch.stack([negative, ~negative & last]) & chosen
            later &= later.sum((0, 2))[:, None] > enough
            self._improve((chosen & ~later).flatten().nonzero().squeeze(1))
            self._improve(undecided(later, both).flatten().nonzero().squeeze(1))
        else:
            self._improve(torch.cat([places, places + chosen.numel()]))
        low, high = (side.reshape(self.bounds.lower.shape) for side in both.unbind())
        if isinstance(self.node, Relu):
            relaxation.lines.identity_lower[self.index] = low > high
        return intersect(self.bounds, Bounds(low, -high))

    def _improve(self, places: Tensor) -> None:
        """Bound what lies at these places of ``both``, flattened, anew."""
        samples, total, neurons = self.relaxation.samples, self.chosen.numel(), self.chosen.shape[1]
        sample = places // neurons % samples if samples > 1 else None
        count = places.shape[0]
        if count % self.multiple:
            places = torch.cat([places, places[-1:].expand(-count % self.multiple)])
        one = self.both.new_ones(())
        digits = self.relaxation.tuning.row_digits if self.narrow else None
        for part, mine in groups(places.shape[0], sample, self.size, samples, digits):
            if self.stop is not None and self.stop():
                return
            place = places[part]
            neuron, sign = place % neurons, torch.where(place < total, one, -one)
            if self.search is None:
                found = self.relaxation.neurons(self.source, neuron, sign, mine)
            else:
                target, rows, constant = signed(self.relaxation.network, self.source, neuron, sign)
                every = torch.zeros_like(place) if sample is None else sample[part]
                found = self.search(self.relaxation, target, rows, every, constant)
            self.both.view(-1).index_copy_(0, place, found)


def undecided(later: Tensor, both: Tensor) -> Tensor:
    """Which of the sides that wait must be bounded after all: those of neurons that the other side leaves unstable.

    Args:
        later: (2, batch, neurons) bool.
        both: (2, batch, neurons) lower bounds of every neuron and of its negative, so far.
    """
    return later & (both < 0).all(0)


def signed(network: Network, index: int, neuron: Tensor, sign: Tensor) -> tuple[int, Tensor, Tensor | None]:
    """sign·(neurons of node ``index``) as rows of a target node, and constants, typed like ``sign``.

    ``neuron`` and ``sign``, ±1, are (R,). A neuron of a linear layer is its row of the weights.
    """
    node = network.nodes[index]
    if isinstance(node, Linear) and len(node.shape) == 1 and not node.weight_error:
        return node.inputs[0], node.weight[neuron] * sign[:, None], node.bias[neuron] * sign
    ones = sign.new_zeros(len(neuron), node.size).scatter(1, neuron[:, None], sign[:, None])
    return index, ones.reshape(-1, *node.shape), None


def interval_is_exact(network: Network, index: int) -> bool:
    """Whether interval arithmetic bounds every neuron of the node exactly (one affine map on a box)."""
    return _exact_by_intervals(network)[index]


def _exact_by_intervals(network: Network) -> tuple[bool, ...]:
    """Whether intervals bound a node exactly, for every node: its values fill a box, or are an affine map of a box."""

    def find() -> tuple[bool, ...]:
        shaped: list[bool] = []
        exact: list[bool] = []
        for node in network.nodes:
            moves = isinstance(node, Scale | Reshape | Permute)
            before = bool(node.inputs) and shaped[node.inputs[0]]
            shaped.append(isinstance(node, Input) or (before and (moves or isinstance(node, Activation))))
            exact.append(exact[node.inputs[0]] if moves else shaped[-1] or (before and isinstance(node, Affine)))
        return tuple(exact)

    return network.once(interval_is_exact, find)
