"""Branch and bound over neurons on a device other than the CPU."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from tests.support import flat_nets
from tests.support.asking import claims
from tests.support.elsewhere import DEVICE, Elsewhere
from verifiable_relu.search.bab.ascent import Bounded, DualAscent
from verifiable_relu.search.bab.nodes import Nodes
from verifiable_relu.search.bab.search import RESIDUAL, Schedule
from verifiable_relu.search.bab.verifier import Bab
from verifiable_relu.spec.property import Box, Property, Query, Row


@pytest.mark.parametrize("kind", ["relu", "residual"])
@pytest.mark.parametrize("schedule", [Schedule(first=1.0), RESIDUAL], ids=["cuts and refinements", "slopes"])
def test_bab_decides_on_a_device_as_on_the_cpu(kind: str, schedule: Schedule, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    net = flat_nets.residual(rng) if kind == "residual" else flat_nets.mlp(rng, kind, (4, 10, 8, 2))
    middle = rng.integers(-4, 5, net.input_size) / 8
    (y,), box = net(torch.from_numpy(middle)[None]).tolist(), Box(middle - 0.5, middle + 0.5)
    places, plain = set(), DualAscent.run

    def run(self: DualAscent, nodes: Nodes, *rest: Any) -> Bounded:
        places.add(nodes.mu.device.type)
        return plain(self, nodes, *rest)

    monkeypatch.setattr(DualAscent, "run", run)
    asked = [
        Query(net, Property(box, tuple((Row(((j, Fraction(1)),), Fraction(v) - gap),) for j, v in enumerate(y))))
        for gap in (Fraction(1, 8), Fraction(1))
    ]
    here = claims(Bab(schedule=schedule), asked, 60)
    assert places == {"cpu"}
    places.clear()
    with Elsewhere():
        there = claims(Bab(schedule=schedule), asked, 60, device=DEVICE.type)
    assert places == {DEVICE.type}
    assert [(o.verdict, o.reason, o.trust) for o in there] == [(o.verdict, o.reason, o.trust) for o in here]
