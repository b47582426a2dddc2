"""Values with bounds of their errors: whole numbers are known exactly, and so is what jumps at them."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.support.draws import draws
from verifiable_relu.network.build import Builder
from verifiable_relu.network.enclosure import Enclosed, whole
from verifiable_relu.network.nodes import Step, curve
from verifiable_relu.trust.enclose import enclose, formats


@pytest.mark.parametrize("seed", range(draws(20)))
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.longdouble])
def test_a_whole_number_is_never_taken_for_another(seed: int, dtype: type[np.floating]) -> None:
    rng = np.random.default_rng(seed)
    true = rng.integers(-9, 10, 2000)
    value = true + rng.choice([0, 1e-3, 0.3, 0.49, 0.7, 3.0]) * rng.uniform(-1, 1, 2000)
    value = value.astype(dtype)
    error = np.abs(value - true) * rng.choice([1.0, 1.0001, 1.7, 20.0], 2000).astype(dtype) + dtype(1e-6)
    found = whole(Enclosed(value, error))
    assert (np.abs(found.value - true) <= found.error).all()
    exact = found.error == 0
    assert exact.any() and (found.value[exact] == true[exact]).all()
    assert (found.value[~exact] == value[~exact]).all() and (found.error[~exact] == error[~exact]).all()
    unknown = Enclosed(value, np.full_like(error, np.inf))
    assert np.isinf(whole(unknown).error).all()


def network(step: str, shift: float = 0.0):  # type: ignore[no-untyped-def]
    """4/(1 + step(x_1 + shift)) + step(x_1 + shift) of two inputs."""
    build = Builder((2,))
    pick = torch.tensor([[1.0]]).double()
    x = build.sparse(0, torch.tensor([[1]]), pick, torch.tensor([shift]).double(), (1,), "pick")
    x = build.append(Step(name="step", inputs=(x,), shape=(1,), function=step))
    y = build.scale(x, "more", shift=torch.tensor([1.0]).double())
    y = build.append(curve("Reciprocal", "inverse", (y,), (1,)))
    y = build.scale(y, "four", scale=torch.tensor([4.0]).double())
    return build.network(build.add(x, y, "sum"), name="jumps")


@pytest.mark.parametrize("step", ["Floor", "Ceil", "Truncate", "Round"])
def test_a_step_at_a_whole_number_is_known(step: str) -> None:
    for dtype in formats(network(step)):
        for count in (0, 1, 7, 1000):
            found = enclose(network(step), [Fraction(1, 3), Fraction(count)], dtype)
            assert abs(float(found.value[0]) - (count + 4 / (1 + count))) <= 1e-9 and found.error[0] < 1e-9


def test_a_step_near_a_whole_number_is_known_as_far_as_it_jumps() -> None:
    tenth = float(np.float32(0.1))
    for dtype in formats(network("Floor", tenth)):
        # In float64, 0.9 + 0.1 is on neither side of 1 for certain.
        at = 1 - Fraction(tenth)
        found = enclose(network("Floor", tenth), [Fraction(0), at - Fraction(1, 1 << 60)], dtype)
        assert abs(float(found.value[0]) - 4.0) <= found.error[0]
    inexact = enclose(network("Floor"), [Fraction(0), 1 - Fraction(1, 1 << 80)], np.float64)
    assert abs(float(inexact.value[0]) - 4.0) <= inexact.error[0]
