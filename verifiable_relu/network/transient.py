"""The kinds of node that the ONNX reader makes on the way, and that no network keeps.

Files spell GELU as x·½·(1 + erf(k·x)): the reader makes nodes of the error function, and puts functions of one
variable in the place of those that spell them (``network.simplify``). They spell λ-GELU as GELU(λx)/λ, which is one
only where the divisor is the factor; of a division a ``Scale`` knows the rounded reciprocal alone. Of all consumers
only simplification and the comparison with the file (``network.agreement``) meet these kinds.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from verifiable_relu.network.nodes import Node, Scale


class Transient(Node):
    """A kind that no network keeps."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Erf(Transient):
    """The error function, element by element."""

    op = "Erf"

    def forward(self, *xs: Tensor) -> Tensor:
        return torch.erf(xs[0])


@dataclass(frozen=True, eq=False, kw_only=True)
class Division(Scale):
    """x divided by one number: a ``Scale`` that still knows its divisor, a scalar tensor."""

    op = "Division"
    divisor: Tensor

    @staticmethod
    def of(made: Scale, divisor: Tensor) -> Division:
        """A product with the rounded reciprocal of a number as the division that it stands for."""
        return Division(**{f.name: getattr(made, f.name) for f in fields(Scale)}, divisor=divisor)

    @property
    def kept(self) -> Scale:
        """What a network keeps of it."""
        return Scale(**{f.name: getattr(self, f.name) for f in fields(Scale)})
