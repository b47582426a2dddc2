"""The standard model of floating point, fl(a∘b) = (a∘b)·(1 + δ) with |δ| ≤ u, and what follows from it for sums.

For a sum of n products, in every order of summation, with and without fused multiply-add,

    |fl(Σ a_i·b_i) − Σ a_i·b_i| ≤ γ_n · Σ |a_i|·|b_i|,   γ_n = n·u / (1 − n·u)

(N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., SIAM 2002, section 3.1). A convolution is such a
sum where it is computed directly or as a matrix product, as torch's kernels for CPUs do; transformed algorithms
(Winograd, FFT) are not covered.
"""

from __future__ import annotations

from functools import cache

import torch

from verifiable_relu.network.nodes import Affine


def unit_roundoff(dtype: torch.dtype) -> float:
    """The unit roundoff u of the standard model: half the distance from 1 to the next number."""
    return torch.finfo(dtype).eps / 2


def gamma(terms: int, dtype: torch.dtype) -> float:
    """γ_n for a sum of n = ``terms`` products.

    Raises:
        OverflowError: if n·u reaches 1/2, where the analysis says nothing.
    """
    product = terms * unit_roundoff(dtype)
    if product >= 0.5:
        raise OverflowError(f"a sum of {terms} terms has no rounding bound in {dtype}")
    return product / (1 - product)


def inflated(terms: int, dtype: torch.dtype) -> float:
    """1/(1 − γ) − 1 and a little more, for a sum of ``terms`` products that are not negative.

    If each product is made larger by this part of itself, the computed sum is no smaller than the true one was.
    """
    error = gamma(terms + 4, dtype)
    return 1.01 * error / (1 - error)


@cache
def tiny(dtype: torch.dtype) -> float:
    """The smallest normal number: smaller ones may be lost."""
    return torch.finfo(dtype).tiny


def weight_share(node: Affine) -> float:
    """What the unknown part of stored weights (``Affine.weight_error``) may change in W·x, as a part of |W|·|x|.

    It is counted twice: W·x may be off by it, and so may |W|, which is computed from the stored weights.
    """
    return 2 * node.weight_error
