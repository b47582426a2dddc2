"""Sums in the order that rounding harms most."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def in_order(products: Tensor) -> Tensor:
    """Sums along the last axis, one number after the other: an order that the analysis allows as it does any other."""
    return torch.from_numpy(np.add.accumulate(products.numpy(), axis=-1)[..., -1])
