"""Forged certificates of networks of every kind, and faults of the checker that must show in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.soundness import forged
from tests.soundness.fault import Fault, instead
from tests.soundness.forged_networks import KINDS
from tests.support.draws import draws


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_false_is_accepted_of_networks_of_each_kind(kind: str) -> None:
    """``python -m tests.soundness.forged --kind KIND`` tries more."""
    found = forged.forge(kind, draws(100), 26)
    assert not found.wrong, found.wrong
    assert found.ended[f"{kind}: accepted unchanged"]
    assert found.ended[f"{kind}: accepted, tighter"]
    assert found.ended[f"{kind}: refused"] > draws(10)


def _flushed(right: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Forms without coefficients below 1e-200."""
    found = right(*args, **kwargs)
    found.coefficients = np.where(np.abs(found.coefficients) < 1e-200, 0 * found.coefficients, found.coefficients)
    return found


def _without_the_last(right: Callable[..., Any], *args: Any) -> Any:
    """Windows without their last places."""
    found = right(*args).copy()
    found[..., -1] = -1
    return found


FAULTS = {
    "curve": Fault(
        "the lower side of a curve taken for the upper one",
        "forged",
        instead("check.curves:FunctionBand.most", lambda right, self, *args: self.least(*args)),
    ),
    "family": Fault(
        "a family of harder networks than it says",
        "forged",
        instead("check.curves:family", lambda right, hardness: right(4 * hardness)),
    ),
    "large": Fault(
        "coefficients that underflow are zero", "forged", instead("check.lines:CheckedRelaxation.forms", _flushed)
    ),
    "maxpool": Fault(
        "the last place of a window left out", "forged", instead("check.windows:covered", _without_the_last)
    ),
    "conv": Fault(
        "a convolution by its mirrored kernel",
        "forged",
        instead("check.windows:covered", lambda right, *args: right(*args)[..., ::-1]),
    ),
    "residual": Fault(
        "the rounding of all sums left out",
        "forged",
        instead("check.least:Least.beyond", lambda right, self, claim: np.where(self.value > claim, 1, -1)),
    ),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_faults_of_the_checker_are_caught(kind: str) -> None:
    with FAULTS[kind].applied():
        found = forged.forge(kind, 3000, 5, each=4, first=True)
    assert found.wrong, found.ended
