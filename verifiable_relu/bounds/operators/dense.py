"""Dense layers: products with a matrix, or with a matrix in compressed rows where most of it is zeros."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from verifiable_relu.bounds.operators import sums
from verifiable_relu.bounds.operators.operator import Operator, exact_in_float32
from verifiable_relu.bounds.tuning import Tuning
from verifiable_relu.network.nodes import Linear, Shape


@dataclass(frozen=True)
class _Sparse:
    """A weight W, Wᵀ and |W|ᵀ in compressed rows: what dense rows are multiplied with."""

    weight: Tensor
    transposed: Tensor
    absolute: Tensor

    @staticmethod
    def of(weight: Tensor) -> _Sparse:
        # torch's own conversion of a dense matrix takes several times as long, and a dense transpose before it.
        rows, columns = (torch.from_numpy(place) for place in np.nonzero(weight.detach().cpu().numpy()))
        rows, columns = rows.to(weight.device), columns.to(weight.device)
        values = weight[rows, columns]
        by_column = columns.argsort(stable=True)
        turned = columns[by_column], rows[by_column], values[by_column], weight.shape[::-1]
        return _Sparse(
            _compressed(rows, columns, values, weight.shape),
            _compressed(*turned),
            _compressed(*turned[:2], turned[2].abs(), turned[3]),
        )


def _compressed(rows: Tensor, columns: Tensor, values: Tensor, shape: Sequence[int]) -> Tensor:
    """A matrix in compressed rows, of its entries in row-major order."""
    starts = torch.zeros(shape[0] + 1, dtype=torch.long, device=rows.device)
    starts[1:] = torch.bincount(rows, minlength=shape[0]).cumsum(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support", category=UserWarning)
        return torch.sparse_csr_tensor(starts, columns, values, tuple(shape), check_invariants=False)


class DenseOperator(Operator[Linear]):
    """y = x·Wᵀ + b over the last axis."""

    def __init__(self, node: Linear, tuning: Tuning) -> None:
        super().__init__(node, tuning)
        # The error of ``linear32`` counts by |centre|, that of ``absolute32`` by the radius, which is smaller.
        self._lines = tuple(sums.lines(node.weight.shape[1], n) for n in (tuning.weight_sum_length, tuning.sum_length))
        first, second = (length + sum(sums.steps(many, tuning.sum_steps)) - 2 for many, length in self._lines)
        self.terms32 = first, second

    def forward(self, x: Tensor) -> Tensor:
        return self.node.forward(x) if self._sparse is None else self.linear(x) + self.node.bias

    def linear(self, x: Tensor) -> Tensor:
        if self._sparse is None:
            return F.linear(x, self.node.weight)
        return (x.reshape(-1, x.shape[-1]) @ self._sparse.transposed).reshape(*x.shape[:-1], -1)

    def absolute(self, x: Tensor) -> Tensor:
        if self._sparse is None:
            return F.linear(x, self.once("absolute", self.node.weight.abs))
        return (x.reshape(-1, x.shape[-1]) @ self._sparse.absolute).reshape(*x.shape[:-1], -1)

    def linear32(self, x: Tensor) -> Tensor:
        return self._in_lines(x, absolute=False)

    def absolute32(self, x: Tensor) -> Tensor:
        return self._in_lines(x, absolute=True)

    def _in_lines(self, x: Tensor, absolute: bool) -> Tensor:
        """W·x or |W|·x for x of shape (batch, in), summed in float32 line by line, in the dtype of W."""
        lines = self._lines[absolute]

        def make() -> Tensor:
            weight = self.weight(torch.float32)
            return (weight.abs() if absolute else weight).T.reshape(*lines, -1).contiguous()

        weight = self.once(("in lines", absolute), make)
        found = torch.bmm(x.to(torch.float32).unflatten(1, lines).transpose(0, 1), weight)
        for parts in sums.steps(lines[0], self.tuning.sum_steps):
            if parts > 1:
                # A product with ones, which is exact, is faster than a sum over the first axis.
                found = found.new_ones(parts) @ found.reshape(parts, -1)
        return found.reshape(len(x), -1).to(self.node.weight.dtype)

    def adjoint(self, a: Tensor, input_shape: Shape) -> Tensor:
        if self._sparse is None:
            return a @ self.weight(a.dtype)
        return (a.reshape(-1, a.shape[-1]) @ self._sparse.weight).reshape(*a.shape[:-1], -1)

    def weight(self, dtype: torch.dtype) -> Tensor:
        """W in a dtype, (out, in)."""
        return (
            self.node.weight
            if dtype == self.node.weight.dtype
            else self.once(dtype, lambda: self.node.weight.to(dtype))
        )

    @cached_property
    def fits32(self) -> bool:
        return self.constant and not self.sparse and len(self.node.shape) == 1 and exact_in_float32(self.node.weight)

    @property
    def sparse(self) -> bool:
        """Whether products go through compressed rows."""
        return self._sparse is not None

    @cached_property
    def _sparse(self) -> _Sparse | None:
        weight, tuning = self.node.weight, self.tuning
        if weight.numel() < tuning.sparse_weights or not self.constant:
            return None
        if int(weight.count_nonzero()) > tuning.sparse_share * weight.numel():
            return None
        return _Sparse.of(weight)
