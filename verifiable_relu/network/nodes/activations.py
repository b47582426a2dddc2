"""Activations: element-wise non-linear nodes of one input."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from verifiable_relu.network.nodes.functions import FUNCTIONS
from verifiable_relu.network.nodes.node import Node


class Activation(Node):
    """An element-wise non-linear node of one input."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Relu(Activation):
    op = "Relu"

    def forward(self, *xs: Tensor) -> Tensor:
        return F.relu(xs[0])


@dataclass(frozen=True, eq=False, kw_only=True)
class LeakyRelu(Activation):
    """max(x, 0) + slope·min(x, 0). ``slope`` is broadcastable to ``shape``: LeakyReLU (scalar) and PReLU."""

    op = "LeakyRelu"
    slope: Tensor

    def forward(self, *xs: Tensor) -> Tensor:
        return torch.where(xs[0] >= 0, xs[0], self.slope * xs[0])


@dataclass(frozen=True, eq=False, kw_only=True)
class Identity(Activation):
    """x itself. What multiplies two computed values needs good bounds of both, and an activation's input gets them."""

    op = "Identity"

    def forward(self, *xs: Tensor) -> Tensor:
        return xs[0]


@dataclass(frozen=True, eq=False, kw_only=True)
class Sigmoid(Activation):
    op = "Sigmoid"

    def forward(self, *xs: Tensor) -> Tensor:
        return torch.sigmoid(xs[0])


@dataclass(frozen=True, eq=False, kw_only=True)
class Tanh(Activation):
    op = "Tanh"

    def forward(self, *xs: Tensor) -> Tensor:
        return torch.tanh(xs[0])


@dataclass(frozen=True, eq=False, kw_only=True)
class Gelu(Activation):
    """λ-GELU, f(x; λ) = x·Φ(λx) = GELU(λx)/λ (arXiv 2603.21991); λ = 1 is GELU. ``lam`` is a scalar tensor."""

    op = "Gelu"
    lam: Tensor

    def forward(self, *xs: Tensor) -> Tensor:
        return F.gelu(self.lam * xs[0]) / self.lam


@dataclass(frozen=True, eq=False, kw_only=True)
class Hardened(Activation):
    """ReLU and every λ'-GELU with λ' ≥ ``lam`` at once: a set of networks, of which ``forward`` runs ReLU's.

    x·Φ(λx) never falls as λ grows, so all of them lie between λ-GELU at ``lam`` and ReLU (arXiv 2603.21991). Bounds
    cover the whole set; a counterexample speaks of its limit, the ReLU network (``Network.limit``).
    """

    op = "Hardened"
    lam: Tensor

    def forward(self, *xs: Tensor) -> Tensor:
        return F.relu(xs[0])

    @property
    def limit(self) -> Node:
        return Relu(name=self.name, inputs=self.inputs, shape=self.shape)


@dataclass(frozen=True, eq=False, kw_only=True)
class Smooth(Activation):
    """A function of one variable, by its name in ``FUNCTIONS``; ``parameter`` is a positive scalar tensor."""

    op = "Smooth"
    function: str
    parameter: Tensor

    def forward(self, *xs: Tensor) -> Tensor:
        return FUNCTIONS[self.function].value(xs[0], self.parameter)

    @property
    def place(self) -> str:
        return f"node '{self.name}' ({self.function})"
