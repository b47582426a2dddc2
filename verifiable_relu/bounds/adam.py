"""Gradient ascent by Adam (Kingma and Ba, arXiv 1412.6980, algorithm 1), for slopes of which rows may be dropped.

torch's optimizers cannot drop rows, and importing them takes as long as importing the rest of torch.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Adam:
    """Slopes, (rows, slopes), that ascend along their gradients and stay within [0, 1].

    Args:
        value: where they start; changed in place.

    Attributes:
        value: where they are.
        counted: how many steps are part of the mean.
    """

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self.counted = 0
        self._first = torch.zeros_like(value)
        self._second = torch.zeros_like(value)
        self._sum = torch.zeros_like(value)
        self._steps = 0

    def narrow(self, keep: Tensor) -> None:
        """Go on with some of the rows: ``keep`` (rows,) bool."""
        self.value, self._sum = self.value[keep], self._sum[keep]
        self._first, self._second = self._first[keep], self._second[keep]

    def step(self, gradient: Tensor, rate: float, counts: bool) -> None:
        """Take one step along the gradient.

        Args:
            gradient: (rows, slopes).
            rate: the length of the step, if all gradients so far were the same.
            counts: whether the slopes after the step are to be part of the mean.
        """
        self._steps += 1
        self._first.lerp_(gradient, 0.1)
        self._second.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
        spread = (self._second / (1 - 0.999**self._steps)).sqrt_().add_(1e-8)
        self.value.addcdiv_(self._first, spread, value=rate / (1 - 0.9**self._steps)).clamp_(0, 1)
        if counts:
            self._sum += self.value
            self.counted += 1

    def mean(self) -> Tensor:
        """The mean of the slopes after each step that counts.

        Source: Polyak and Juditsky, SIAM J. Control Optim. 30 (1992), 838-855.
        """
        return self._sum / self.counted
