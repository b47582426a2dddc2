"""Rows of the possibly active neurons of a ReLU alone, where a dense layer is before it.

An inactive neuron passes no coefficient on. Its column of the rows, and its row of the weight, are left out of the
product with the layer's weight; and where two such layers follow each other, of the next product's result, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verifiable_relu.bounds.float32 import Float32
from verifiable_relu.bounds.forward import NodeBounds
from verifiable_relu.bounds.operators import DenseOperator, sums
from verifiable_relu.bounds.rows import Chunk, Restricted, Rows, Stepped
from verifiable_relu.bounds.shifted import ShiftedLines, Step
from verifiable_relu.bounds.tuning import Tuning
from verifiable_relu.bounds.window import Window
from verifiable_relu.network.nodes import Relu


@dataclass(frozen=True)
class _Active:
    """The neurons of a ReLU that are not known to be inactive, sample by sample, with the map W·x + b before it.

    Attributes:
        numbers: (batch, most) their numbers; what lies beyond a sample's count is to be ignored, and has a step of 0.
        counts: for each sample.
        step: theirs, (batch, most) each.
        weight: their rows of W, (1, most, inputs), where there is one sample.
    """

    numbers: Tensor
    counts: list[int]
    step: Step
    weight: Tensor | None

    @staticmethod
    def of(places: Tensor, samples: int, step: Step, weight: Tensor) -> _Active:
        """The possibly active neurons at ``places``, (n, 2) sample and number of each, in order.

        Args:
            places: which they are.
            samples: how many samples there are.
            step: that of all neurons.
            weight: W, (neurons, inputs).
        """
        sample, neuron = places.unbind(1)
        if samples == 1:
            chosen = step.map(lambda t: t.index_select(1, neuron))
            return _Active(neuron[None], [len(neuron)], chosen, weight.index_select(0, neuron)[None])
        counts = torch.bincount(sample, minlength=samples)
        place = torch.arange(len(sample), device=sample.device) - (counts.cumsum(0) - counts)[sample]
        most = int(counts.max())
        numbers = sample.new_zeros(len(counts), most)
        numbers[sample, place] = neuron
        there = torch.arange(most, device=sample.device) < counts[:, None]
        return _Active(numbers, counts.tolist(), step.map(lambda t: t.gather(1, numbers) * there), None)

    def of_rows(self, a: Tensor, sample: Tensor | None, weight: Tensor) -> tuple[Tensor, Step, Tensor, Tensor]:
        """What rows need of the possibly active neurons of their samples.

        Args:
            a: the rows' coefficients of all neurons, (groups, each, neurons).
            sample: (groups,) the sample of each group; None for every sample, one after another.
            weight: W, (neurons, inputs).

        Returns:
            Of these neurons alone the coefficients (groups, each, most), the steps (groups, most), the rows of W
            (groups, most, inputs), and the neurons' numbers (groups, most).
        """
        if self.weight is not None and a.shape[0] == 1:
            return a.index_select(2, self.numbers[0]), self.step, self.weight, self.numbers
        numbers, step = self.numbers, self.step
        if sample is not None:
            most = max((self.counts[i] for i in sample.tolist()), default=0)
            numbers, step = numbers[sample, :most], step.map(lambda t: t[sample, :most])
        chosen = a.gather(2, numbers[:, None].expand(-1, a.shape[1], -1))
        return chosen, step, weight[numbers], numbers


class Restriction:
    """A stepper through a ReLU and the dense layer before it at once.

    Args:
        bounds: the nodes' bounds.
        shifted: the steps through activations.
        float32: which coefficients are in float32.
        tuning: from which share of inactive neurons on that is worth it.
    """

    def __init__(self, bounds: NodeBounds, shifted: ShiftedLines, float32: Float32, tuning: Tuning) -> None:
        self._bounds, self._shifted, self._float32, self._tuning = bounds, shifted, float32, tuning
        self._active: dict[tuple[int, bool], _Active | None] = {}
        self._between: dict[int, Tensor | None] = {}

    def step(self, index: int, rows: Rows, chunk: Chunk) -> Stepped | None:
        """Two steps back: through ReLU ``index`` and the layer before it."""
        if index in chunk.lines or isinstance(rows, Window):
            return None
        active = self.active(index, chunk.rounded)
        if active is None:
            return None
        source = self._bounds.network.nodes[index].inputs[0]
        operator = self._dense(source)
        assert operator is not None
        if isinstance(rows, Restricted):
            assert active.weight is not None
            a, step, weight, numbers = rows.values, active.step, active.weight, active.numbers
        else:
            given = operator.weight(self._dtype(source, chunk.rounded))
            a, step, weight, numbers = active.of_rows(rows, chunk.sample, given)
        before, constant = step.back(a, self._tuning)
        further = operator.node.inputs[0]
        between = self.between(index) if chunk.rounded and further not in chunk.lines else None
        found = before.to(weight.dtype) @ (weight if between is None else between)
        if not chunk.rounded:
            constant = constant + sums.dot(before, operator.node.bias[numbers])
        return Stepped(constant, further, found if between is None else Restricted(found))

    def active(self, index: int, rounded: bool) -> _Active | None:
        """What of activation ``index`` may be active, where it is a ReLU and leaving out the others is worth it."""
        if (index, rounded) not in self._active:
            node, found = self._bounds.network.nodes[index], None
            operator = self._dense(node.inputs[0]) if isinstance(node, Relu) else None
            # Rows come to the last activation once only: it is not worth the preparation.
            if operator is not None and index < self._bounds.network.last_activation:
                places = self._bounds.possibly_active(index)
                samples = self._bounds.samples
                most = int(places.sum(1).amax()) if samples > 1 else int(places.sum())
                if most <= self._tuning.active_share * node.size:
                    # The number of those that may be active may have no factors.
                    depth = sums.deepest(node.size) if rounded and self._float32.holds(index) else 0
                    step = self._shifted.step(index, rounded, depth)
                    weight = operator.weight(self._dtype(node.inputs[0], rounded))
                    found = _Active.of(places.nonzero(), samples, step, weight)
            self._active[index, rounded] = found
        return self._active[index, rounded]

    def between(self, index: int) -> Tensor | None:
        """W between what of activation ``index`` and of that before it may be active: (1, most, most of the other).

        None unless the linear map before ``index`` directly follows a ReLU that nobody else uses, in one sample.
        """
        if index not in self._between:
            network, found = self._bounds.network, None
            before = network.nodes[network.nodes[index].inputs[0]].inputs[0]
            if self._bounds.samples == 1 and network.uses[before] == 1:
                mine = self.active(index, True)
                other = self.active(before, True) if isinstance(network.nodes[before], Relu) else None
                if mine is not None and other is not None:
                    assert mine.weight is not None
                    found = mine.weight.index_select(2, other.numbers[0])
            self._between[index] = found
        return self._between[index]

    def _dense(self, index: int) -> DenseOperator | None:
        """The operator of node ``index``, if that is a dense layer of vectors that one node alone uses."""
        network = self._bounds.network
        if len(network.nodes[index].shape) != 1 or network.uses[index] != 1:
            return None
        operator = self._bounds.operators.find(index)
        return operator if isinstance(operator, DenseOperator) and not operator.sparse else None

    def _dtype(self, index: int, rounded: bool) -> torch.dtype:
        """Of the weight of layer ``index`` as rows are multiplied with it."""
        return torch.float32 if rounded and self._float32.narrows(index) else self._bounds.values[0].lower.dtype
