"""Branch and bound over neurons on a device other than the CPU."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

from tests.support import flat_nets
from tests.support.asking import claims
from tests.support.elsewhere import DEVICE, Elsewhere
from verifiable_relu.search.bab.ascent import DualAscent
from verifiable_relu.search.bab.loop import Bounded, Loop, Nodes
from verifiable_relu.search.bab.tree import Branching
from verifiable_relu.search.bab.verifier import RESIDUAL, Bab, Schedule
from verifiable_relu.spec.property import Box, Property, Query, Row

WAITS, MAKING = 7, 7
"""How often the host may wait for the device in one step of a search, and for rows of neurons that are split anew."""

WAITING = ("item", "tolist", "cpu", "nonzero", "unique", "__bool__", "__int__", "__float__")


@pytest.mark.parametrize("kind", ["relu", "residual"])
@pytest.mark.parametrize("schedule", [Schedule(first_work=1.0), RESIDUAL], ids=["cuts and refinements", "slopes"])
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


class Counting(Elsewhere):
    """A pretended device that counts how often the host waits for it."""

    waits = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        by_mask = name in ("__getitem__", "__setitem__") and any(
            isinstance(t, torch.Tensor) and t.dtype == torch.bool for t in tree_leaves(args[1])
        )
        self.waits += (by_mask or name in WAITING) and type(args[0]) is not torch.Tensor
        return super().__torch_function__(func, types, args, kwargs)


def test_a_step_waits_for_the_device_a_few_times_however_many_nodes_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, counts, plain = np.random.default_rng(1), [], Loop.advance
    net, box = flat_nets.mlp(rng, "relu", (4, 16, 12, 2)), Box(np.full(4, -1.0), np.full(4, 1.0))
    lowest = float(net(torch.from_numpy(rng.uniform(-1, 1, (4000, 4))))[:, 0].min())
    query = Query(net, Property(box, ((Row(((0, Fraction(1)),), Fraction(lowest - 0.02)),),)))
    device = Counting()

    def advance(self: Loop, *chosen: Any) -> None:
        before = device.waits
        plain(self, *chosen)
        counts.append(device.waits - before)

    monkeypatch.setattr(Loop, "advance", advance)
    search = Bab(
        search=Branching(steps=1, adaptive_neurons=0, finish_below_blame=0.0, batch=8),
        schedule=Schedule(refinement=None, improve=None),
    )
    with device:
        claims(search, [query], 60, device=DEVICE.type)
    # The last nodes, whose neurons are all split, are finished one by one.
    early = counts[: len(counts) // 2]
    assert len(early) > 3 and min(counts) <= WAITS and max(early) <= WAITS + MAKING, counts
