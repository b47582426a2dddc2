"""Exact affine forms of a piecewise-linear network over a box: stable neurons are eliminated, unstable ones variables.

Rows go back from an op to the input, through affine maps and stable neurons alike, and end at unstable neurons. A
formula then has one equation for each unstable neuron and one row for each output constraint, whatever the size of the
network. Weights are dyadic rationals, so that integers with an exponent suffice.

Where stored weights are not those that the file means, a form is not what it stands for: with relative errors ε of W
and errors δ of b, rows A of y = W·x + b change by at most |A|·(ε·|W|·|x| + δ). Every form carries the sum of these over
the box. A formula whose rows are loosened by it has every solution that the network has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from scipy import sparse
from torch import Tensor

from verifiable_relu.dyadic import Dyadic
from verifiable_relu.errors import UnsupportedError
from verifiable_relu.ir.interval import Interval
from verifiable_relu.ir.linear import Dense, LinearMap
from verifiable_relu.ir.network import Affine, Elementwise, Input, Network
from verifiable_relu.rounding import LEAST, OWN
from verifiable_relu.search.question import require_piecewise_linear, slopes_below

_CHUNK = 1 << 21
"""Most multiplications in a row, so that the clock is looked at several times a second."""


@dataclass(frozen=True, eq=False)
class ExactForms:
    """Affine forms of the inputs x and of the values r of unstable neurons, one a row.

    Attributes:
        coefficients: (rows, inputs + unstable neurons), the latter in the order of ``ExactEncoding.places``.
        constant: (rows,).
        error: (rows,), how far each form is from what it stands for, at most.
    """

    coefficients: Dyadic
    constant: Dyadic
    error: Dyadic


def phases_of(network: Network, intervals: Mapping[int, Interval]) -> dict[int, np.ndarray]:
    """Return by elementwise op the phases (size,) of its neurons: 1 active, −1 inactive, 0 unstable or not known."""
    found = {}
    for index in network.activations:
        x = intervals[network.ops[index].inputs[0]]
        found[index] = np.where(x.lower[0].numpy() >= 0, 1, np.where(x.upper[0].numpy() <= 0, -1, 0))
    return found


class ExactEncoding:
    """A piecewise-linear network without maxima, as exact affine forms.

    Args:
        phases: as ``phases_of`` returns them.
        size: returns bounds (size,) of the magnitude of an op's value over the box, by its number; needed where stored
            weights are not those that the file means.

    Attributes:
        places: the elementwise op of each unstable neuron, and its number there.
        slopes: of the unstable neurons, below 0.
    """

    def __init__(
        self, network: Network, phases: Mapping[int, np.ndarray], size: Callable[[int], Tensor] | None = None
    ) -> None:
        require_piecewise_linear(network)
        self.network, self._phases, self._size = network, phases, size
        self._unstable = {index: np.flatnonzero(phase == 0) for index, phase in phases.items()}
        self.places = [(index, int(j)) for index, chosen in self._unstable.items() for j in chosen]
        functions = {index: op.function for index in phases if isinstance(op := network.ops[index], Elementwise)}
        self._below = {i: Dyadic.of(slopes_below(f, network.ops[i].size).numpy()) for i, f in functions.items()}
        self._entries: dict[int, tuple[np.ndarray, ...]] = {}
        none = Dyadic(np.zeros(0, dtype=object), 0)
        self.slopes = _joined(none, *(Dyadic(s.numbers[self._unstable[i]], s.exponent) for i, s in self._below.items()))

    def neurons(self) -> Iterator[tuple[int, ExactForms]]:
        """Yield the pre-activations of all unstable neurons in chunks: the first one's number, and forms."""
        products = sum(op.size * op.map.terms for op in self.network.ops if isinstance(op, Affine))
        size, start = max(1, _CHUNK // max(1, products)), 0
        for index, chosen in self._unstable.items():
            source = self.network.ops[index].inputs[0]
            for part in (chosen[first : first + size] for first in range(0, len(chosen), size)):
                unit = np.zeros((len(part), self.network.ops[source].size), dtype=object)
                unit[np.arange(len(part)), part] = 1
                yield start, self.forms(source, Dyadic(unit, 0))
                start += len(part)

    def forms(self, target: int, rows: Dyadic) -> ExactForms:
        """Return rows (rows, size) of the value of an op as forms of inputs and unstable neurons."""
        count, pending = len(rows.numbers), {target: rows}
        constant = error = Dyadic(np.zeros(count, dtype=object), 0)
        inputs = Dyadic(np.zeros((count, self.network.input_size), dtype=object), 0)
        kept = {i: Dyadic(np.zeros((count, len(c)), dtype=object), 0) for i, c in self._unstable.items()}
        for index in sorted(range(target + 1), reverse=True):
            if index not in pending:
                continue
            op, a = self.network.ops[index], pending.pop(index)
            if isinstance(op, Input):
                inputs = a
            elif isinstance(op, Elementwise):
                kept[index] = Dyadic(a.numbers[:, self._unstable[index]], a.exponent)
                up, down = (Dyadic(np.where(self._phases[index] == s, a.numbers, 0), a.exponent) for s in (1, -1))
                a = up + down * self._below[index]
            elif isinstance(op, Affine):
                if op.bias is not None:
                    bias = Dyadic.of(op.bias.detach().cpu().double().numpy())
                    constant = constant + Dyadic(a.numbers @ bias.numbers, a.exponent + bias.exponent)
                if not op.is_exact:
                    off = Dyadic.of(self._off(op))
                    error = error + Dyadic(np.abs(a.numbers) @ off.numbers, a.exponent + off.exponent)
                a = self._transposed(index, op.map, a)
            for source in op.inputs:
                pending[source] = pending[source] + a if source in pending else a
        return ExactForms(_joined(inputs, *kept.values()), constant, error)

    def _off(self, op: Affine) -> np.ndarray:
        """Return at least ε·|W|·|x| + δ, (size,)."""
        assert self._size is not None
        size = op.map.abs_apply(self._size(op.inputs[0])[None])[0]
        off = OWN * 2 * op.weight_error * size + 2 * LEAST
        # What underflows in the products is no more than is added, however large the rows are.
        found: np.ndarray = (off if op.bias_error is None else off + OWN * op.bias_error.to(off)).numpy()
        if not np.isfinite(found).all():
            raise UnsupportedError("the bounds of the network's values are not finite", place=op.place)
        return found

    def _transposed(self, index: int, linear: LinearMap, a: Dyadic) -> Dyadic:
        """Return Wᵀ·a of rows a (rows, n_out)."""
        terms = max(1, linear.back_terms)
        if isinstance(linear, Dense):

            def dense(digits: np.ndarray, rows: np.ndarray) -> np.ndarray:
                return np.matmul(rows.reshape(len(rows), linear.copies, -1), digits).reshape(len(rows), -1)

            return a.weighed(linear.weight.detach().cpu().double().numpy(), terms, dense)
        if index not in self._entries:
            parts = linear.entries()
            self._entries[index] = tuple((x.double() if x.is_floating_point() else x).numpy() for x in parts)
        row, column, weight = self._entries[index]

        def product(digits: np.ndarray, rows: np.ndarray) -> np.ndarray:
            found: np.ndarray = rows @ sparse.csr_array((digits, (row, column)), (linear.n_out, linear.n_in))
            return found

        return a.weighed(weight, terms, product)


def _joined(*parts: Dyadic) -> Dyadic:
    """Return the columns of all parts."""
    least = min(part.exponent for part in parts)
    return Dyadic(np.concatenate([part.at(least) for part in parts], -1), least)
