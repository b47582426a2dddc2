"""The measures of a trained network that its record and its answers do not have."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from verifiable_relu.bounds import preactivation_bounds, unstable
from verifiable_relu.data import Dataset
from verifiable_relu.network import Network, hardened
from verifiable_relu.spec import Query, linf_properties
from verifiable_relu.train.losses import ball
from verifiable_relu.train.options import Options
from verifiable_relu.verifiers.base import Limits, Verdict
from verifiable_relu.verifiers.docket import answers
from verifiable_relu.verifiers.registry import make

MEASURED = 50
"""The number of images, the first ones, over which bounds are computed."""

HARDNESSES = (160, 20, 5)
"""The values of λ for which networks are certified jointly with all smooth ones whose λ' is at least λ."""

SECONDS = 2.0
"""The time limit for each image's joint certificate."""

_BATCH = 10


def measure_network(
    network: Network, smooth: Network | None, options: Options, test: Dataset, images: np.ndarray, radii: Sequence[str]
) -> dict[str, Any]:
    """The measures of a network, by name.

    ``unstable``: by radius, ``unstable_layers``. ``weight_norms``: ``weight_norms``. ``joint``: ``joint`` at the middle
    radius, for networks whose activations are all ReLU. Bounds are computed over the first ``MEASURED`` images.

    Args:
        network: the network that is used, which takes images in [0, 1].
        smooth: the network before its activations were replaced by ReLU; None if there is none. It is not measured.
        options: the options of the training.
        test: the test images.
        images: the numbers of the images that the network is asked about and classifies rightly.
        radii: the radii of the L∞ balls, as text.
    """
    few = images[:MEASURED]
    measures: dict[str, Any] = {
        "unstable": {eps: unstable_layers(network, test.images[few], eps) for eps in radii},
        "weight_norms": weight_norms(network),
    }
    if radii and (found := joint(network, test.images[few], test.labels[few], radii[len(radii) // 2])) is not None:
        measures["joint"] = found
    return measures


@torch.no_grad()
def unstable_layers(network: Network, images: np.ndarray, eps: str) -> list[float] | None:
    """The mean number per image of neurons in each layer that CROWN's bounds leave unstable in the image's L∞ ball.

    Args:
        network: the network.
        images: (n, …) in [0, 1].
        eps: the radius of the balls, which are clipped to [0, 1].

    Returns:
        A number for each layer of activations; None without images.
    """
    if not len(images):
        return None
    wide = network.to(torch.float64)
    totals = dict.fromkeys(wide.activations, 0)
    for x in torch.from_numpy(images).double().split(_BATCH):
        pre = preactivation_bounds(wide, ball(x, float(Fraction(eps))))
        for index in totals:
            totals[index] += int(unstable(wide.nodes[index], pre[index]).sum())
    return [total / len(images) for total in totals.values()]


def weight_norms(network: Network) -> list[float]:
    """The Frobenius norm of the matrix or kernel of each affine layer, in the order of the layers."""
    weights = [node.weight for node in network.affine if hasattr(node, "weight")]
    return [weight.detach().double().norm().item() for weight in weights]


def joint(network: Network, images: np.ndarray, labels: np.ndarray, eps: str) -> dict[str, Any] | None:
    """The images that CROWN certifies for the ReLU network and all smooth networks with λ' ≥ λ at once.

    Args:
        network: the ReLU network, each of whose ReLUs stands for all λ'-GELUs of a λ' ≥ λ besides.
        images: (n, …) in [0, 1], which the network classifies rightly.
        labels: (n,), the classes.
        eps: the radius of the L∞ balls.

    Returns:
        ``eps``; ``images``: n; and the number of images that are certified by λ, as text, for ``HARDNESSES`` and for
        ``inf``: the ReLU network alone. None if the network has activations other than ReLU.
    """
    if any(network.nodes[index].op != "Relu" for index in network.activations):
        return None
    properties = linf_properties(images, labels, Fraction(eps), network.output_size)
    found: dict[str, Any] = {"eps": eps, "images": len(images)}
    for lam in (None, *HARDNESSES):
        asked = network if lam is None else hardened(network, lam)
        queries = [Query(asked, prop) for prop in properties]
        outcomes = answers(make("crown"), queries, Limits(SECONDS))
        found["inf" if lam is None else str(lam)] = sum(o.verdict is Verdict.UNSAT for o in outcomes)
    return found
