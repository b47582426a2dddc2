"""Linear maps between flat vectors: the weights of a network in the layouts in which networks have them.

    conv = Convolution(weight, in_shape=(3, 32, 32), stride=(2, 2))
    y = conv.apply(x)           # W·x,   (batch, n_out) from (batch, n_in)
    a = conv.transpose(rows)    # Wᵀ·a,  (rows, n_in) from (rows, n_out): one step of backward propagation
    r = conv.abs_apply(radius)  # |W|·r: one step of interval propagation

A map knows its products and the length of its sums; rounding follows from these by ``rounding.gamma``. It knows nothing
of bounds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor

Image = tuple[int, int, int]
"""Channels, height, width."""


class LinearMap(ABC):
    """y = W·x.

    Attributes:
        weight: the stored numbers that W is made of, in the dtype of the file.
        n_in, n_out: sizes of x and y.
        terms: the largest number of products that one output of ``apply`` sums.
        back_terms: the largest number of products that one output of ``transpose`` sums.
    """

    weight: Tensor
    n_in: int
    n_out: int
    terms: int
    back_terms: int

    def __init__(self) -> None:
        self._cache: dict[object, Tensor] = {}

    @abstractmethod
    def apply(self, x: Tensor) -> Tensor:
        """Return W·x, (batch, n_out), in the dtype of x, for x (batch, n_in)."""

    @abstractmethod
    def abs_apply(self, x: Tensor) -> Tensor:
        """Return |W|·x, (batch, n_out), for x (batch, n_in)."""

    @abstractmethod
    def transpose(self, a: Tensor) -> Tensor:
        """Return Wᵀ·a, (rows, n_in), in the dtype of a, for rows a (rows, n_out)."""

    @abstractmethod
    def rows(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the rows of W with these numbers, dense: (count, n_in)."""

    @abstractmethod
    def product(self, weight: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Return the product of other weights in this layout with one sample, (n_out,), in numpy.

        Args:
            weight: of the shape of ``self.weight``: its numbers as integers, say, or their sizes.
            x: (n_in,), of the same kind of number.
        """

    @abstractmethod
    def entries(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the row numbers, column numbers and weights (count,) of the entries of W that are not 0."""

    @property
    def parameters(self) -> dict[str, object]:
        """Everything but ``weight`` that defines W, by name: for digests."""
        return {}
