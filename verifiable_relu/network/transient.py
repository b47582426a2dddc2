"""The kinds of node that the ONNX reader makes on the way, and that no network keeps.

Files spell GELU as x·½·(1 + erf(k·x)): the reader makes nodes of the error function, and puts functions of one
variable in the place of those that spell them (``network.onnx.spelled``). Of all consumers only the comparison with the
file (``network.agreement``) meets these kinds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verifiable_relu.network.nodes import Node


class Transient(Node):
    """A kind that no network keeps."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Erf(Transient):
    """The error function, element by element."""

    op = "Erf"

    def forward(self, *xs: Tensor) -> Tensor:
        return torch.erf(xs[0])
