"""What bound propagation takes an activation for."""

from __future__ import annotations

from verifiable_relu.bounds import rounding
from verifiable_relu.bounds.activations import image, relax
from verifiable_relu.bounds.types import Bounds, Lines
from verifiable_relu.network.nodes import Activation


class Rules:
    """The image and the lines of every activation: by default those of the function that the node names.

    A network of differences, whose activations are other functions of the same graph, has rules of its own
    (``change``).
    """

    def image(self, index: int, node: Activation, pre: Bounds) -> Bounds:
        """The box of the activation's output over that of its input, outward; (batch, *shape)."""
        return rounding.interval_activation(node, image(node, pre))

    def lines(self, index: int, node: Activation, pre: Bounds) -> Lines:
        """Lines below and above the activation over its input's box, (batch, *shape), but for their own rounding."""
        return relax(node, pre)
