"""The methods ``auto_lirpa…`` agree with the package's bounds of flat networks, and say no more than *float*."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from tests.support.asking import claims
from tests.support.solver_cases import ball, mlp, residual
from verifiable_relu.ir.network import Network
from verifiable_relu.search.outcomes import Reason, Trust, Verdict
from verifiable_relu.search.registry import make
from verifiable_relu.spec.property import Property, Query, Row

try:
    from verifiable_relu.search.solvers import auto_lirpa_import as _  # noqa: F401
except (ImportError, ModuleNotFoundError) as missing:
    pytest.skip(str(missing), allow_module_level=True)


def networks() -> dict[str, Network]:
    rng = np.random.default_rng(0)
    return {"mlp": mlp(rng, (5, 12, 10, 3)), "leaky": mlp(rng, (4, 9, 7, 3), leaky=True), "residual": residual(rng)}


def queries(network: Network, count: int = 3) -> list[Query]:
    rng = np.random.default_rng(1)
    boxes = [ball(rng.normal(size=network.input_size), 0.05) for _ in range(count)]
    row = Row(((0, Fraction(1)), (1, Fraction(-1))), Fraction(-8))
    return [Query(network, Property(box, ((row,),))) for box in boxes]


@pytest.mark.parametrize("name", ["mlp", "leaky", "residual"])
@pytest.mark.parametrize("bound", ["crown"])
def test_auto_lirpas_bounds_agree_with_the_projects_own(name: str, bound: str) -> None:
    asked = queries(networks()[name])
    theirs, ours = (
        np.array([outcome.margin for outcome in claims(make(method), asked, 60)], dtype=float)
        for method in (f"auto_lirpa-{bound}", bound)
    )
    # Ours intersect CROWN with intervals. Of theirs nothing is said of rounding.
    assert (theirs <= ours + 5e-5 * (1 + np.abs(ours))).all()


def test_a_proof_has_the_trust_label_float_and_a_spent_budget_is_a_timeout() -> None:
    asked = queries(networks()["mlp"], 1)
    (outcome,) = claims(make("auto_lirpa"), asked, 60)
    assert (outcome.verdict, outcome.reason, outcome.trust) == (Verdict.UNSAT, Reason.PROVED, Trust.FLOAT)
    assert claims(make("auto_lirpa"), asked, 0.0)[0].reason is Reason.TIMEOUT
