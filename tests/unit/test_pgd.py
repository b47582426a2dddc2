"""What the attack finds."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import torch

from tests.support import nets
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Relu
from verifiable_relu.spec.property import Box, Property, Row
from verifiable_relu.verifiers.attack import Pgd


def narrow() -> tuple[Network, Property]:
    """A network that is flat but near three ends of the inputs and one inner value of the fourth, and that point."""
    chain = nets.Chain((4,))
    chain.linear(
        torch.tensor([[1.0, 1, 1, 0], [0, 0, 0, 20], [0, 0, 0, 20], [0, 0, 0, 20]]), torch.tensor([-2.8, -5, -6, -7])
    )
    chain.add(Relu, (4,))
    chain.linear(torch.tensor([[-1.0, 0, 0, 0], [0, -1.0, 2, -1]]), torch.tensor([0.1, 0.5]))
    box = Box(np.zeros(4), np.ones(4))
    rows = tuple(Row(((i, Fraction(1)),), Fraction(0)) for i in range(2))
    return chain.network("narrow"), Property(box, (rows,))


def test_points_at_some_ends_of_the_box_lead_to_counterexamples_that_corners_do_not() -> None:
    network, prop = narrow()
    for seed in range(3):
        _, first = Pgd(rounds=1, seed=seed).search(network, [prop])
        assert float(first) > 0
        point, margin = Pgd(screened=16384, seed=seed).search(network, [prop])
        assert float(margin) < 0
        y = network(point.reshape(1, 4).float()).flatten()
        assert (y <= 0).all()


def test_the_same_seed_gives_the_same_point() -> None:
    network, prop = narrow()
    found = [Pgd(screened=16384, seed=1).search(network, [prop, prop]) for _ in range(2)]
    assert torch.equal(found[0][0], found[1][0])


def test_properties_without_unsafe_outputs_have_no_counterexample() -> None:
    network, prop = narrow()
    nothing = Property(prop.box, ())
    _, margins = Pgd(steps=3, screened=16384).search(network, [nothing, prop, nothing])
    assert margins[0] == torch.inf
    assert margins[1] < 0
    assert margins[2] == torch.inf
