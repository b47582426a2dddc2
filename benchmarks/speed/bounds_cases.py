"""The networks and balls on which bounds are timed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """A network of ``common.networks``, and L∞ balls around test images.

    Attributes:
        name: the network's name.
        data: the data set whose test images are the centres of the balls.
        eps: the radius of the balls, as text.
        mean: the mean of the normalisation that the network does not contain, per channel.
        std: the standard deviation of that normalisation.
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
"""The values of λ for which the widths of bounds with λ-GELU are measured."""

ITERATIONS = 20
"""The number of iterations of α-CROWN's search, in this package and in auto_LiRPA."""

LEAST = 0.1
"""The least seconds of a measurement, which repeats the same work, with warm caches, until they are over."""

EQUAL = 1e-4
"""The largest distance, relative to the width, at which two bounds count as equal."""
