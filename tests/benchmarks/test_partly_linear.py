"""Networks of which half of the gates become linear: which half, and what is computed afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.training.partly_linear import CHOICES, Choosing, Chosen
from verifiable_relu.nn import LambdaGELU

KEPT = [0, 2, 5]
"""The neurons of six that are made to deserve their activation."""


def network(by: str) -> tuple[Choosing, Chosen]:
    """Six neurons, of which those of ``KEPT`` deserve their activation by each measure."""
    torch.manual_seed(0)
    first, gate, last = nn.Linear(4, 6), Chosen(LambdaGELU(), 6, by), nn.Linear(6, 3)
    others = [i for i in range(6) if i not in KEPT]
    with torch.no_grad():
        gate.steepness[KEPT] = 0.1
        # What is always below zero is stable, and no line x/2 at all; what no output sees changes no margin.
        first.bias[KEPT] = -10.0
        first.weight[others] = torch.tensor([3.0, -3.0, 3.0, -3.0])
        first.bias[others] = 0
        last.weight[:, others] = 0
    return Choosing(nn.Sequential(first, gate, last), by, samples=100, eps=0.1), gate


@pytest.mark.parametrize("by", CHOICES)
def test_half_of_the_neurons_become_linear_once_enough_samples_were_seen(by: str) -> None:
    net, gate = network(by)
    x = torch.rand(60, 4)
    net.train()(x)
    assert gate.order is None
    net(x)
    assert gate.order is not None and sorted(gate.order[: gate.kept].tolist()) == KEPT
    order = gate.order.clone()
    net(x)
    assert torch.equal(gate.order, order)
    with torch.no_grad():
        z = net.eval().net[0](x)  # type: ignore[index]
        expected = z * gate.slope + gate.offset
        expected[:, KEPT] = LambdaGELU()(z[:, KEPT])
        assert torch.allclose(net(x), net.net[2](expected), atol=1e-6)  # type: ignore[index]
    lines = gate.slope[[i for i in range(6) if i not in KEPT]]
    # A line is fitted for grafting alone; elsewhere it is the gate at λ = 0.
    assert bool((lines == 0.5).all()) is (by != "grafting")
    again, other = network(by)
    again.load_state_dict(net.state_dict())
    assert torch.equal(again.eval()(x), net(x)) and again.seen == 180 and other.order is not None
