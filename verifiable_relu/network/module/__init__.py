"""From a torch module to a network."""

from verifiable_relu.network.module.reading import from_torch

__all__ = ["from_torch"]
