"""The networks and balls that bounds are timed on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """A network of ``common.networks``, and the L∞ balls put to it.

    Attributes:
        name: the network's.
        data: the data set whose test images are the balls' centres.
        eps: the balls' radius, as text.
        mean, std: of the normalisation that the network leaves to its user.
    """

    name: str
    data: str
    eps: str
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)


_OVAL = ((0.485, 0.456, 0.406), (0.225, 0.225, 0.225))
CASES = (
    Case("mnist_256x2", "mnist", "0.02"),
    Case("mnist_6x100", "mnist", "0.01"),
    Case("cifar_cnn", "cifar10", "2/255"),
    Case("cifar_base_kw", "cifar10", "4/255", *_OVAL),
    Case("cifar_wide_kw", "cifar10", "4/255", *_OVAL),
    Case("cifar_residual", "cifar10", "1/255"),
)
GELU_CASE = Case("mnist_mlp", "mnist", "0.03")

METHODS = ("ibp", "crown", "alpha-crown")
DTYPES = ("float64", "float32")
LAMBDAS = (1, 5, 20, 160)
"""Hardnesses of λ-GELU, whose widths are measured."""

ITERATIONS = 20
"""Of α-CROWN's search, ours and auto_LiRPA's."""

LEAST = 0.1
"""Seconds that a measurement takes at least: as long the same thing is done again, with warm caches, by either side."""

EQUAL = 1e-4
"""Up to so many widths apart bounds are taken for equal."""
