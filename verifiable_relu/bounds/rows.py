"""Rows of coefficients of one op's value, in three layouts, and their products with one vector per sample.

Rows come in groups of equal size: ``values`` is (groups, each, …). All rows of a group belong to one sample, so that a
vector of the sample is stored once for them. ``DenseRows`` have a coefficient for each neuron, ``ColumnRows`` one for
some neurons of a dense layer, ``patches.Patches`` those within a window of an image.

**Rounding.** Coefficients may be in float32. A sum over a row's coefficients is then taken in blocks of at most
``BLOCK`` numbers, and of the blocks' sums in float64 (``summed``, ``sum_terms``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from verifiable_relu.ir.linear import Image
from verifiable_relu.rounding import negligible, sum_error

BLOCK = 64
"""The longest sum in float32 whose error is a part of a bound: longer ones are sums in float64 of such sums."""


def sum_terms(count: int, dtype: torch.dtype) -> int:
    """Return the most roundings of one product when ``count`` products are ``summed``."""
    # The float64 sum of blocks' sums takes part in fewer units of float32 than one.
    return count + 2 if dtype == torch.float64 else min(count, BLOCK) + 3


@cache
def _block(count: int) -> int:
    """Return the longest block that divides ``count``; 1 if no useful one does."""
    return next((k for k in range(min(count, BLOCK), 15, -1) if count % k == 0), count if 0 < count < 16 else 1)


def summed(products: Tensor) -> Tensor:
    """Return sums over the last axis, in float64."""
    count = products.shape[-1]
    if products.dtype != torch.float64 and (block := _block(count)) > 1:
        if block == count:
            return products.sum(-1).to(torch.float64)
        products = products.unflatten(-1, (count // block, block)).sum(-1)
    return products.sum(-1, dtype=torch.float64)


def dot(a: Tensor, vector: Tensor) -> Tensor:
    """Return a·vector, (groups, each) in float64, for (groups, each, n) and (groups or 1, 1, n)."""
    if a.dtype == torch.float64 and (a.shape[1] > 1 or vector.shape[0] == 1):
        return _product(a, vector)
    return summed(a * vector)


def _product(a: Tensor, vector: Tensor) -> Tensor:
    """Return a·vector as ``dot`` does, in the dtype of both; one vector for all groups makes one matrix product."""
    return a @ vector[0, 0] if vector.shape[0] == 1 else (a @ vector.mT).squeeze(2)


class SampleVectors:
    """Vectors of one op for each sample of a batch, from which rows of any layout pick their elements.

    Args:
        vectors: (batch or 1, n) each, in the dtype of the rows. A batch of one serves the rows of every group.
    """

    def __init__(self, *vectors: Tensor) -> None:
        self._vectors = vectors
        self._columns: dict[int, SampleVectors] = {}
        self._images: Tensor | None = None

    @cached_property
    def batch(self) -> int:
        return max(vector.shape[0] for vector in self._vectors)

    @cached_property
    def _spread(self) -> tuple[Tensor, ...]:
        return tuple(vector.unsqueeze(1) for vector in self._vectors)

    @cached_property
    def _stacked(self) -> Tensor:
        return torch.stack(torch.broadcast_tensors(*self._vectors))

    def dense(self, sample: Tensor | None) -> tuple[Tensor, ...]:
        """Return the vectors of each group's sample, (groups or 1, 1, n) each; None: all samples in order."""
        if sample is None or self.batch == 1:
            return self._spread
        return self._stacked.index_select(1, sample).unsqueeze(2).unbind(0)

    def columns(self, source: int, index: Tensor, sample: Tensor | None) -> tuple[Tensor, ...]:
        """Return the elements ``index`` of the vectors, as ``dense`` does; ``source`` names this choice of elements."""
        if source not in self._columns:
            self._columns[source] = SampleVectors(*(vector.index_select(1, index) for vector in self._vectors))
        return self._columns[source].dense(sample)

    def windows(
        self, pixels: Tensor | None, size: tuple[int, int], image: Image, sample: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Return the vectors' parts in each group's window, (groups, 1, *size, channels) each, 0 beyond the edges.

        Args:
            pixels: (groups, height·width) the pixels' numbers in each group's window, height·width of the image beyond
                its edges; None for windows that are the image.
            size: of the windows.
            image: the shape of the image that the vectors represent.
            sample: (groups,) of each group.
        """
        channels, count = image[0], image[1] * image[2]
        if self._images is None:
            # Pixel by pixel, with one more that stands for all beyond the edges.
            images = self._stacked.new_zeros(len(self._stacked), self.batch, count + 1, channels)
            images[:, :, :count] = self._stacked.unflatten(2, (channels, count)).transpose(2, 3)
            self._images = images
        if pixels is None:
            parts = (part[:, :count].view(self.batch, 1, *size, channels) for part in self._images)
            return tuple(part if sample is None or self.batch == 1 else part.index_select(0, sample) for part in parts)
        if self.batch > 1:
            sample = torch.arange(len(pixels), device=pixels.device) if sample is None else sample
            pixels = pixels + (sample * (count + 1)).unsqueeze(1)
        shape = (len(pixels), 1, *size, channels)
        return tuple(part.flatten(0, 1).index_select(0, pixels.flatten()).view(shape) for part in self._images)


class Rows(ABC):
    """Rows A of coefficients of one op's value.

    Attributes:
        values: (groups, each, *entries).
    """

    values: Tensor

    @abstractmethod
    def pick(self, vectors: SampleVectors, sample: Tensor | None) -> tuple[Tensor, ...]:
        """Return the vectors' elements that belong to ``values``, in shapes that broadcast with it.

        Args:
            vectors: of the rows' op.
            sample: (groups,) the sample of each group; None for every sample, one after another.
        """

    @abstractmethod
    def replace(self, values: Tensor) -> Rows:
        """Return rows in this layout with other coefficients, 0 where ``pick`` says 0."""

    @abstractmethod
    def dense(self) -> Tensor:
        """Return the coefficients of all neurons, (groups, each, n)."""

    def plus(self, other: Rows) -> Rows:
        """Return the sum of both; the step through the rows' op charges its rounding."""
        return DenseRows(self.dense() + other.dense())

    @property
    def count(self) -> int:
        """The number of coefficients of a row."""
        return self.values[0, 0].numel()

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def weigh(self, vectors: SampleVectors, sample: Tensor | None, rounded: bool = True) -> Tensor:
        """Return an upper bound of |A|·vector for one vector ≥ 0, underflow aside; about that without ``rounded``."""
        (vector,) = self.pick(vectors, sample)
        if self.dtype == torch.float64:
            found = dot(self.values.abs().flatten(2), vector.flatten(2))
        else:
            found = summed((self.values * vector).abs_().flatten(2))
        if not rounded:
            return found
        return found * (1 + 2 * sum_error(sum_terms(self.count, self.dtype) + 2, self.dtype))

    def charge(self, vectors: SampleVectors, sample: Tensor | None) -> Tensor:
        """Return an upper bound of |A|·vector that is looser and faster than ``weigh``, for errors."""
        (vector,) = self.pick(vectors, sample)
        if self.values.shape[1] == 1 and vector.shape[0] > 1:
            found = (self.values * vector).abs_().flatten(2).sum(2)
        else:
            found = _product(self.values.abs().flatten(2), vector.flatten(2))
        return found.to(torch.float64) * (1 + 2 * sum_error(self.count + 4, self.dtype))


@dataclass(frozen=True, eq=False)
class DenseRows(Rows):
    """Coefficients of all neurons, (groups, each, n)."""

    values: Tensor

    def pick(self, vectors: SampleVectors, sample: Tensor | None) -> tuple[Tensor, ...]:
        return vectors.dense(sample)

    def replace(self, values: Tensor) -> DenseRows:
        return DenseRows(values)

    def dense(self) -> Tensor:
        return self.values


@dataclass(frozen=True, eq=False)
class Columns:
    """Neurons of an op that may have more than one value; the others stay at the op's point.

    Attributes:
        source: the number of the op that says so.
        index: (count,) their numbers.
    """

    source: int
    index: Tensor


@dataclass(frozen=True, eq=False)
class ColumnRows(Rows):
    """Coefficients (groups, each, count) of the neurons ``columns`` of ``size``; those of others are 0, or idle."""

    values: Tensor
    columns: Columns
    size: int

    def pick(self, vectors: SampleVectors, sample: Tensor | None) -> tuple[Tensor, ...]:
        return vectors.columns(self.columns.source, self.columns.index, sample)

    def replace(self, values: Tensor) -> ColumnRows:
        return ColumnRows(values, self.columns, self.size)

    def dense(self) -> Tensor:
        rows = self.values.new_zeros(*self.values.shape[:2], self.size)
        return rows.index_copy(2, self.columns.index, self.values)


def close(constants: list[Tensor], charges: list[Tensor], lost: Tensor) -> Tensor:
    """Return a number that is at most Σ constants − Σ charges − lost in real arithmetic, (groups, each).

    The sum of k terms, in any order, is off by at most γ_{k−1} of the sum of their sizes; three more roundings are
    those of the terms that are subtracted here. Infinity and NaN stay.
    """
    terms = torch.stack([*constants, *(-charge for charge in charges)])
    error = sum_error(len(terms) + 4, terms.dtype) * terms.abs().sum(0)
    return terms.sum(0) - (error + (lost + negligible(terms.dtype)))
