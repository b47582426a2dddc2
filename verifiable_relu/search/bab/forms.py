"""Affine forms of the inputs that vary and of unstable neurons: the rows of a reduced system (``system``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verifiable_relu.ir.functions.function import Function


@dataclass(frozen=True, eq=False)
class Block:
    """Unstable neurons of one elementwise op: numbers ``start`` up to ``end`` of a reduced system.

    Attributes:
        op: the number of the op in the network.
        function: that of these neurons, in float64.
    """

    op: int
    start: int
    end: int
    function: Function

    @property
    def part(self) -> slice:
        """The block's neurons among all."""
        return slice(self.start, self.end)

    def select(self, numbers: Tensor) -> Function:
        """Return the function of some of the block's neurons, by their numbers in the system."""
        return self.function.select(numbers - self.start)


@dataclass(frozen=True, eq=False)
class AffineForms:
    """Affine forms of inputs and unstable neurons, inputs·e + neurons·r + constant, one a row.

    Attributes:
        inputs: (rows, n) coefficients of the scaled inputs e ∈ [−1, 1]ⁿ.
        neurons: (rows, m) coefficients of the values r of the unstable neurons.
        constant: (rows,).
        error: (rows,) how far the form is from what it stands for, at most, at any point of the box.
    """

    inputs: Tensor
    neurons: Tensor
    constant: Tensor
    error: Tensor

    def __getitem__(self, chosen: Tensor | slice) -> AffineForms:
        return AffineForms(*(t[chosen] for t in vars(self).values()))

    def __len__(self) -> int:
        return len(self.constant)

    def __neg__(self) -> AffineForms:
        return AffineForms(-self.inputs, -self.neurons, -self.constant, self.error)

    @staticmethod
    def cat(parts: Sequence[AffineForms]) -> AffineForms:
        """Return all rows of several."""
        columns = zip(*(vars(part).values() for part in parts), strict=True)
        return AffineForms(*(torch.cat(column) for column in columns))

    @staticmethod
    def zeros(rows: int, inputs: int, neurons: int, like: Tensor) -> AffineForms:
        """Return forms that are zero, in the dtype and on the device of a tensor."""
        return AffineForms(*(like.new_zeros(shape) for shape in ((rows, inputs), (rows, neurons), (rows,), (rows,))))

    def size(self, reach: Tensor) -> Tensor:
        """Return the sum (rows,) of the magnitudes of each form's terms over the box, given |r| ≤ reach."""
        return self.inputs.abs().sum(1) + self.constant.abs() + self.neurons.abs() @ reach

    def columns(self, inputs: Tensor, neurons: Tensor) -> AffineForms:
        """Return the forms with some of their columns; the others are zero."""
        return AffineForms(self.inputs[:, inputs], self.neurons[:, neurons], self.constant, self.error)


@dataclass(frozen=True, eq=False)
class Replacement:
    """Terms that take the place of coefficients·r of a block's neurons: weight·z + constant, and the remainders.

    Attributes:
        weight: (rows, neurons of the block) the coefficients of the pre-activations z.
        constant: (rows,).
        error: (rows,) what rounding has changed in both, at most; None in searches.
        before: (rows, n + start) coefficients of e and of neurons before the block; None for zeros.
    """

    weight: Tensor
    constant: Tensor
    error: Tensor | None = None
    before: Tensor | None = None


Lines = Callable[[Block, Tensor], Replacement]
"""Linear bounds of a block's neurons, given the coefficients (rows, neurons of the block) of their values.

What the bounds leave of each value, its remainder, keeps the value's coefficient.
"""
