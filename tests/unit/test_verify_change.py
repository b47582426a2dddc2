"""Two models compared from Python: bounds, questions and bad input."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from verifiable_relu import verify_change
from verifiable_relu.api import Change
from verifiable_relu.errors import InputError
from verifiable_relu.nn import LambdaGELU
from verifiable_relu.readers import from_torch


def model(change: float = 0.0, gate: type[nn.Module] = nn.ReLU) -> nn.Module:
    torch.manual_seed(3)
    made = nn.Sequential(nn.Linear(4, 12), gate(), nn.Linear(12, 12), gate(), nn.Linear(12, 3))
    with torch.no_grad():
        for weight in made.parameters():
            weight.mul_(1 + change * torch.randn_like(weight))
    return made


IMAGES = np.random.default_rng(0).random((3, 4)).astype(np.float32)


def sampled(first: nn.Module, second: nn.Module, eps: float) -> torch.Tensor:
    """(points, images, outputs) differences at random points of the balls."""
    x = torch.tensor(IMAGES) + eps * (2 * torch.rand(500, 3, 4) - 1)
    return (second(x.clamp(0, 1)) - first(x.clamp(0, 1))).detach().double()


def check(found: Change, seen: torch.Tensor) -> None:
    """The bounds hold at sampled points."""
    assert (found.lower <= seen.amin(0).numpy() + 1e-6).all() and (seen.amax(0).numpy() <= found.upper + 1e-6).all()


def test_bounds_hold_and_are_close_for_close_models() -> None:
    first, second = model(), model(1e-3)
    found = verify_change(first, second, IMAGES, 0.1)
    seen = sampled(first, second, 0.1)
    check(found, seen)
    assert found.compared and not found.results
    assert found.largest.max() < 4 * float(seen.abs().max())
    # Networks of modules are differentiable, by themselves.
    read = verify_change(from_torch(first, (4,)), from_torch(second, (4,)), IMAGES, 0.1)
    np.testing.assert_allclose(read.upper, found.upper, rtol=1e-9)


def test_a_difference_beyond_what_is_proven_or_seen() -> None:
    first, second = model(), model(1e-2)
    seen = float(sampled(first, second, 0.1).abs().max())
    most = float(verify_change(first, second, IMAGES, 0.1).largest.max())
    assert {r.answer for r in verify_change(first, second, IMAGES, 0.1, delta=most * 1.01).results} == {"unsat"}
    answers = [r.answer for r in verify_change(first, second, IMAGES, 0.1, delta=seen * 0.99).results]
    assert "sat" in answers


def test_the_same_class() -> None:
    first = model()
    close = verify_change(first, model(1e-6), IMAGES, 0.001, top1=True).results
    assert [r.answer for r in close] == ["unsat"] * 3
    other = model()
    with torch.no_grad():
        other[-1].weight.mul_(-1)  # type: ignore[operator, union-attr]
        other[-1].bias.mul_(-1)  # type: ignore[operator, union-attr]
    assert [r.answer for r in verify_change(first, other, IMAGES, 0.001, top1=True).results] == ["sat"] * 3


def test_the_swap_of_a_family() -> None:
    def gate() -> nn.Module:
        return LambdaGELU(20.0)

    smooth, hard = model(gate=gate), model()  # type: ignore[arg-type]
    found = verify_change(smooth, None, IMAGES, 0.1, family=True, delta=0.5)
    check(found, sampled(smooth, hard, 0.1))
    assert {r.answer for r in found.results} == {"unsat"}


def test_other_builds_are_bounded_each_by_itself() -> None:
    torch.manual_seed(0)
    other = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    found = verify_change(model(), other, IMAGES, 0.1)
    check(found, sampled(model(), other, 0.1))
    assert not found.compared


@pytest.mark.parametrize(
    ("second", "options", "said"),
    [
        (None, {}, "a second model is needed"),
        (nn.Linear(4, 2), {}, "3 outputs and .* 2 outputs"),
        (model(), {"delta": 0}, "must be positive, got 0"),
        (model(), {"delta": 1, "top1": True}, "one question"),
    ],
)
def test_bad_input(second: nn.Module | None, options: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        verify_change(model(), second, IMAGES, 0.1, **options)  # type: ignore[arg-type]
