"""Exact affine forms of a piecewise-linear network over a box: stable neurons are eliminated, unstable ones variables.

Rows are pulled back from a node to the input, through affine nodes and stable neurons alike, and end at unstable
neurons. A formula then has one equation per unstable neuron and one row per output constraint, whatever the size of the
network. Weights are dyadic rationals, so that integers with an exponent suffice.

Where stored weights are not the operator's own (``Affine.weight_error``), a form is not what it stands for. Pulling
rows A back through y = W·x + b with relative errors of at most ε changes A·y by at most ε·|A|·(|W|·|x| + |b|); every
form carries the sum of these, over bounds of all values, and a formula whose rows are loosened by it has every solution
that the network has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from verifiable_relu.bounds import Bounds
from verifiable_relu.dyadic import Dyadic
from verifiable_relu.errors import UnsupportedError
from verifiable_relu.network import nodes as kinds
from verifiable_relu.network.dispatch import Refusal, Table
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Activation, Affine, Kinked
from verifiable_relu.rounding import LEAST, OWN
from verifiable_relu.trust.exact import VALUES, array

_CHUNK = 1 << 21
"""Most multiplications in a row, so that the clock is looked at several times a second."""


@dataclass(frozen=True, eq=False)
class ExactForms:
    """Affine forms Σ terms[node]·(values of that node) + constant, one a row.

    Attributes:
        terms: by node, the input or an activation, (rows, node size): zero for neurons that are no variables.
        constant: (rows,).
        error: (rows,), the most by which a form differs from what it stands for.
    """

    terms: dict[int, Dyadic]
    constant: Dyadic
    error: Dyadic


def phases_of(pre: Mapping[int, Bounds], sample: int) -> dict[int, np.ndarray]:
    """Return by activation the phases (size,) of neurons in one sample: 1 active, −1 inactive, 0 unstable."""
    found = {}
    for index, bounds in pre.items():
        lower, upper = bounds.lower[sample].flatten().numpy(), bounds.upper[sample].flatten().numpy()
        # NaN bounds prove nothing.
        found[index] = np.where(lower >= 0, 1, np.where(upper <= 0, -1, 0))
    return found


def magnitudes(network: Network, bounds: Sequence[Bounds]) -> dict[int, np.ndarray]:
    """Return by affine node y = W·x + b powers of two (size,) above |W|·|x| + |b|, by bounds of all nodes' values."""
    found = {}
    for index, node in enumerate(network.nodes):
        if isinstance(node, Affine):
            before = bounds[node.inputs[0]]
            most = torch.maximum(-before.lower[:1], before.upper[:1])
            size = OWN * (node.absolute(most)[0] + node.offset_magnitude()).expand(node.shape).flatten().numpy()
            with np.errstate(over="ignore"):
                found[index] = np.where(np.isfinite(size), np.ldexp(1.0, np.frexp(size)[1]), np.inf)
    return found


class ExactEncoding:
    """A piecewise-linear network over a box, as exact affine forms.

    Args:
        network: the network.
        phases: as ``phases_of`` returns them.
        sizes: as ``magnitudes`` returns them; needed where stored weights are not the operators' own.
    """

    def __init__(
        self, network: Network, phases: Mapping[int, np.ndarray], sizes: Mapping[int, np.ndarray] | None = None
    ) -> None:
        network.require_piecewise_linear()
        self.network, self.phases, self.sizes = network, phases, sizes or {}
        self._offsets: dict[int, Dyadic] = {}

    def slopes(self, index: int) -> Dyadic:
        """Return an activation's slopes below zero, (size,)."""
        node = self.network.nodes[index]
        assert isinstance(node, Kinked)
        return Dyadic.of(np.broadcast_to(array(node.below), node.shape).reshape(-1))

    def offset(self, index: int) -> Dyadic:
        """Return an affine node's value at 0, (size,), of the stored numbers."""
        if index not in self._offsets:
            node = self.network.nodes[index]
            assert isinstance(node, Affine)
            stored, zero = node.with_error(0.0), np.zeros(self.network.nodes[node.inputs[0]].shape)
            value = VALUES[stored](stored, 1, Dyadic.of(zero))
            self._offsets[index] = Dyadic(np.broadcast_to(value.numbers, node.shape).reshape(-1), value.exponent)
        return self._offsets[index]

    def pull_back(self, target: int, rows: Dyadic) -> ExactForms:
        """Return rows (R, node size) of the value of the node ``target`` as forms of input and unstable neurons."""
        rest = ExactBackwardPass(self, len(rows.numbers))
        rest.give(target, rows)
        for index in range(target, -1, -1):
            if index in rest.pending:
                node = self.network.nodes[index]
                STEPS[node](rest, index, node, rest.pending.pop(index))
        return ExactForms(rest.terms, rest.constant, rest.error)

    def neurons(self) -> Iterator[tuple[int, np.ndarray, ExactForms]]:
        """Yield the pre-activations of all unstable neurons in chunks: activation, neurons (R,), their forms."""
        products = sum(node.size * node.terms for node in self.network.affine)
        for index, phase in self.phases.items():
            node, chosen = self.network.nodes[index], np.flatnonzero(phase == 0)
            size = max(1, _CHUNK // max(1, products))
            for part in (chosen[start : start + size] for start in range(0, len(chosen), size)):
                unit = np.zeros((len(part), node.size), dtype=object)
                unit[np.arange(len(part)), part] = 1
                yield index, part, self.pull_back(node.inputs[0], Dyadic(unit, 0))


class ExactBackwardPass:
    """Rows on their way back to the input: what is known of their ``ExactForms``, and what is ``pending`` by node."""

    def __init__(self, encoding: ExactEncoding, count: int) -> None:
        self.encoding = encoding
        self.pending: dict[int, Dyadic] = {}
        self.terms: dict[int, Dyadic] = {}
        self.constant = self.error = Dyadic.of(np.zeros(count))

    def give(self, index: int, a: Dyadic) -> None:
        """Add rows (R, …) that multiply the value of a node."""
        a = Dyadic(a.numbers.reshape(len(a.numbers), self.encoding.network.nodes[index].size), a.exponent)
        self.pending[index] = self.pending[index] + a if index in self.pending else a


def _activation(rest: ExactBackwardPass, index: int, node: Activation, a: Dyadic) -> None:
    phase = rest.encoding.phases[index]
    unstable, active, inactive = (Dyadic(np.where(phase == side, a.numbers, 0), a.exponent) for side in (0, 1, -1))
    rest.terms[index] = unstable
    rest.give(node.inputs[0], active + inactive * rest.encoding.slopes(index))


def _unchanged(rest: ExactBackwardPass, index: int, node: kinds.Node, a: Dyadic) -> None:
    for source in node.inputs:
        rest.give(source, a)


def _permute(rest: ExactBackwardPass, index: int, node: kinds.Permute, a: Dyadic) -> None:
    shaped = a.numbers.reshape(-1, *node.shape)
    moved = shaped.transpose(0, *(axis + 1 for axis in np.argsort(node.axes)))
    rest.give(node.inputs[0], Dyadic(moved, a.exponent))


def _affine(weights: str, rest: ExactBackwardPass, index: int, node: Affine, a: Dyadic) -> None:
    """Pull rows back through y = W·x + b, of which the field ``weights`` holds W's entries."""
    if node.weight_error:
        size = rest.encoding.sizes[index]
        if not np.isfinite(size).all():
            raise UnsupportedError("the bounds of the network's values are not finite")
        # What underflows in the products is no more than is added, however large the rows are.
        off = Dyadic.of(OWN * 2 * node.weight_error * size + 2 * LEAST)
        rest.error = rest.error + Dyadic(np.abs(a.numbers) @ off.numbers, a.exponent + off.exponent)
    offset, before = rest.encoding.offset(index), rest.encoding.network.nodes[node.inputs[0]].shape
    rest.constant = rest.constant + Dyadic(a.numbers @ offset.numbers, a.exponent + offset.exponent)

    def product(digits: np.ndarray, rows: np.ndarray) -> np.ndarray:
        # On the CPU, float64 sums are of products alone, and exact.
        changed: Any = {weights: torch.from_numpy(np.asarray(digits))}
        found: np.ndarray = replace(node, **changed).adjoint(torch.from_numpy(rows), before).numpy()
        return found

    shaped = Dyadic(a.numbers.reshape(-1, *node.shape), a.exponent)
    rest.give(node.inputs[0], shaped.weighed(array(getattr(node, weights)), node.terms, product))


STEPS: Table[Callable[[ExactBackwardPass, int, Any, Dyadic], None]] = Table(
    "the encoding for z3",
    {
        kinds.Input: lambda rest, index, node, a: rest.terms.update({index: a}),
        Activation: _activation,
        kinds.Bilinear: Refusal("only piecewise-linear networks can be split into phases"),
        **dict.fromkeys((kinds.Add, kinds.Reshape), _unchanged),
        kinds.Seen: lambda rest, index, node, a: rest.give(node.inputs[-1], a),
        kinds.Permute: _permute,
        kinds.Scale: partial(_affine, "scale"),
        Affine: partial(_affine, "weight"),
    },
)
"""How rows (R, node size) that multiply the value of a node, given by its index too, go on to the node's inputs."""
