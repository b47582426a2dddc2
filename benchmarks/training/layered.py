"""Networks whose layers have different λ: a budget of the gates' distance to ReLU, spent evenly or on one layer.

Each function makes a network for a study's option ``model`` (``module:function``). A layer's gate computes x·Φ(λgx) for
the network's λ and a factor g of the layer. λ-GELU's largest distance to ReLU is 0.17/λ, so that factors whose inverses
have the mean 1 spend the same budget as one λ for all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from verifiable_relu.nn.models import Make, Normalize, mlp


class Multiplied(nn.Module):
    """An activation with λ times a factor: activation(g·x)/g, which leaves ReLU as it is.

    Args:
        activation: the activation.
        factor: g > 0.
    """

    def __init__(self, activation: nn.Module, factor: float) -> None:
        super().__init__()
        self.activation, self.factor = activation, factor

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.activation(x * self.factor) / self.factor
        return y


def _layered(hidden: Sequence[int], factors: Sequence[float]) -> Callable[..., nn.Module]:
    def made(shape: tuple[int, int, int], classes: int, make: Make, normalize: Normalize | None) -> nn.Module:
        each = iter(factors)
        sizes = [shape[0] * shape[1] * shape[2], *hidden, classes]
        return mlp(sizes, lambda: Multiplied(make(), next(each)), normalize)

    return made


first, last = (_layered((64, 64), factors) for factors in ((2.0, 2 / 3), (2 / 3, 2.0)))
"""MLPs 2×64 with λ·2 in the first, or the last, hidden layer, and λ·2/3 in the other one."""
