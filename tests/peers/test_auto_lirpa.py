"""The verifiers ``auto_lirpa…``: agreement with the package's bounds, and their outcomes where the library fails."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

from tests.soundness.boundary import cases
from tests.support.asking import claims
from tests.support.layers import Layers
from verifiable_relu.adapters import auto_lirpa
from verifiable_relu.adapters.auto_lirpa import AutoLirpa
from verifiable_relu.errors import CallFailed
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Add, Gelu, LeakyRelu, Permute, Relu, Scale, Sigmoid
from verifiable_relu.spec.property import Box, Property, Query, Row
from verifiable_relu.verifiers.base import Outcome, Reason, Trust, Verdict
from verifiable_relu.verifiers.batch import Verifier
from verifiable_relu.verifiers.incomplete import Crown, Ibp
from verifiable_relu.verifiers.registry import make

if find_spec("auto_LiRPA") is None:
    pytest.skip("auto_LiRPA is not installed", allow_module_level=True)


def mlp() -> Network:
    return Layers(5).linear(12).add(Relu).linear(10).add(Relu).linear(4).network()


def convolutions(*options: dict[str, Any]) -> Network:
    build = Layers(2, 6, 8)
    for one in options:
        build.conv(4, **one).add(Relu)
    return build.flatten().linear(6).add(Relu).linear(3).network()


def residual() -> Network:
    build = Layers(6).linear(8).add(Relu).linear(8).add(Relu).linear(8)
    return build.add(Add, inputs=(2, 5)).add(Relu).linear(3).network()


def residual_image() -> Network:
    """A residual connection behind which strides differ: the library's sparse form of convolutions fails on it."""
    build = Layers(2, 6, 8).conv(4, (3, 3), (1, 1, 1, 1)).add(Relu).conv(4, (3, 3), (1, 1, 1, 1)).add(Relu)
    build.add(Add, inputs=(2, 4)).add(Relu).conv(3, (3, 3), (1, 1, 1, 1), stride=(2, 1)).add(Relu)
    return build.flatten().linear(3).network()


def scaled() -> Network:
    build = Layers(3, 4, 4)
    build.add(Scale, center=build.numbers(3, 1, 1), scale=build.numbers(3, 1, 1), shift=torch.zeros(()))
    build.conv(4, (3, 3), (1, 1, 1, 1)).add(LeakyRelu, slope=build.numbers(4, 1, 1).abs()).flatten()
    build.add(Scale, center=torch.zeros(()), scale=build.numbers(64), shift=build.numbers(64))
    return build.linear(6).add(Relu).linear(3).network()


def leaky() -> Network:
    build = Layers(4).linear(9)
    build.add(LeakyRelu, slope=torch.tensor(0.125)).linear(7)
    return build.add(LeakyRelu, slope=build.numbers(7).abs()).linear(3).network()


def permuted() -> Network:
    build = Layers(5, 5, 2).add(Permute, (2, 5, 5), axes=(2, 0, 1)).conv(3, (2, 2), (0, 0, 0, 0))
    build.add(Permute, (4, 4, 3), axes=(1, 2, 0)).add(Relu).flatten()
    return build.linear(6).add(Relu).linear(3).network()


EVEN: dict[str, Any] = {"kernel": (3, 3), "padding": (1, 1, 1, 1)}
NETWORKS: dict[str, Callable[[], Network]] = {
    "mlp": mlp,
    "strides": lambda: convolutions(EVEN, {**EVEN, "stride": (2, 2)}),
    "other strides": lambda: convolutions({**EVEN, "stride": (2, 1)}, EVEN),
    "dilation": lambda: convolutions({"kernel": (3, 3), "padding": (2, 2, 2, 2), "dilation": (2, 2)}, EVEN),
    "groups": lambda: convolutions({**EVEN, "groups": 2}, {**EVEN, "groups": 4}),
    "padding": lambda: convolutions({"kernel": (3, 5), "padding": (1, 2, 1, 2)}, {"kernel": (3, 1)}),
    "residual": residual,
    "residual image": residual_image,
    "scaled": scaled,
    "leaky": leaky,
    "permuted": permuted,
    "affine": lambda: Layers(3).linear(2).network(),
}
networks = pytest.mark.parametrize("name", NETWORKS)


def queries(network: Network, count: int = 3, eps: float = 0.05) -> list[Query]:
    """Queries over boxes around random points, whose unsafe sets have 2 or 3 polytopes of 1 or 2 random rows."""
    rng = np.random.default_rng(1)

    def row() -> Row:
        coefficients = enumerate(rng.integers(-3, 4, network.output_size))
        return Row(tuple((i, Fraction(int(c))) for i, c in coefficients if c), Fraction(int(rng.integers(-8, 8)), 4))

    made = []
    for number in range(count):
        center = rng.normal(size=network.input_size)
        polytopes = [tuple(row() for _ in range(1 + (number + p) % 2)) for p in range(2 + number % 2)]
        made.append(Query(network, Property(Box(center - eps, center + eps), tuple(polytopes))))
    return made


def margins(verifier: Verifier, asked: list[Query]) -> np.ndarray:
    outcomes = claims(verifier, asked, 60)
    assert [o.detail for o in outcomes if o.margin is None] == []
    return np.array([o.margin for o in outcomes])


def lowest(query: Query, count: int = 500) -> float:
    """The least margin at random points of the box, most of which lie near its faces."""
    box, network, rng = query.property.box, query.network, np.random.default_rng(0)
    mix = rng.beta(0.1, 0.1, size=(count, box.size))
    x = torch.from_numpy(box.lower + mix * (box.upper - box.lower)).reshape(count, *network.input_shape)
    outputs = network(x).flatten(1).tolist()
    return min(float(query.property.margin([Fraction(v) for v in y])) for y in outputs)


@networks
@pytest.mark.parametrize(("own", "bound"), [(Ibp(), "ibp"), (Crown(), "crown")])
def test_auto_lirpas_bounds_agree_with_the_projects_own(name: str, own: Verifier, bound: Any) -> None:
    asked = queries(NETWORKS[name]())
    theirs, ours = margins(AutoLirpa(bound), asked), margins(own, asked)
    # Ours intersect CROWN with intervals. Of theirs nothing is said of rounding, and some sums of ours are in float32.
    assert (theirs <= ours + 5e-5 * (1 + np.abs(ours))).all()
    if bound == "crown" or name == "mlp":
        np.testing.assert_allclose(theirs, ours, rtol=0.02)


@networks
def test_optimised_slopes_are_tighter_and_below_every_sample(name: str) -> None:
    asked = queries(NETWORKS[name](), 2, eps=0.3)
    crown, alpha = margins(AutoLirpa("crown"), asked), margins(AutoLirpa("alpha-crown"), asked)
    assert (alpha >= crown - 1e-9).all()
    assert (alpha > crown + 1e-3).any() or name == "affine"
    assert (alpha <= [lowest(query) for query in asked]).all()


def test_bounds_of_smooth_networks_are_below_every_sample() -> None:
    asked = queries(Layers(4).linear(8).add(Sigmoid).linear(3).network(), eps=0.2)
    assert (margins(AutoLirpa("crown"), asked) <= [lowest(query) for query in asked]).all()


def test_planted_counterexamples_are_never_denied() -> None:
    asked = []
    for query in queries(residual(), count=8, eps=0.2):
        # A row that a corner of the box satisfies with equality.
        corner = torch.from_numpy(query.property.box.upper)[None]
        y = query.network(corner).flatten().tolist()
        unsafe = ((Row(((0, Fraction(1)),), Fraction(y[0])), Row(((1, Fraction(-1)),), -Fraction(y[1]))),)
        asked.append(Query(query.network, Property(query.property.box, unsafe)))
    for bound in ("ibp", "crown", "alpha-crown"):
        assert {o.reason for o in claims(make(f"auto_lirpa-{bound}"), asked, 60)} == {Reason.INCOMPLETE}


def test_a_proof_has_the_trust_label_float() -> None:
    query = queries(mlp(), count=1)[0]
    unsafe = ((Row(((0, Fraction(1)),), Fraction(lowest(query) - 100)),),)
    far = Query(query.network, Property(query.property.box, unsafe))
    for name in ("auto_lirpa", "auto_lirpa-ibp", "auto_lirpa-crown", "auto_lirpa-alpha-crown"):
        (outcome,) = claims(make(name), [far], 60)
        assert (outcome.verdict, outcome.reason, outcome.trust) == (Verdict.UNSAT, Reason.PROVED, Trust.FLOAT)
        assert outcome.method == ("auto_lirpa-alpha-crown" if name == "auto_lirpa" else name)
        assert outcome.margin is not None and outcome.margin > 0


def outcome_of(network: Network, budget: float = 60.0) -> Outcome:
    return claims(AutoLirpa(), queries(network, count=1), budget)[0]


def test_unsupported_operators_are_named() -> None:
    if version("auto_LiRPA") == "0.3":
        outcome = outcome_of(Layers(3).linear(4).add(Gelu, lam=torch.tensor(2.0)).linear(2).network())
        assert outcome.reason is Reason.UNSUPPORTED and "Gelu" in outcome.detail
    uneven = {"kernel": (3, 3), "padding": (0, 1, 2, 0)}
    assert outcome_of(convolutions(uneven)).reason is not Reason.UNSUPPORTED
    outcome = outcome_of(convolutions({**uneven, "dilation": (2, 2)}))
    assert outcome.reason is Reason.UNSUPPORTED and "Conv2d" in outcome.detail


@pytest.mark.parametrize("budget", [0.0, 1e-9])
def test_a_spent_budget_is_a_timeout(budget: float) -> None:
    assert outcome_of(mlp(), budget).reason is Reason.TIMEOUT


@pytest.mark.parametrize(("error", "reason"), [(CallFailed("it crashed"), "error"), (MemoryError(), "memory")])
def test_a_failure_of_the_process_costs_one_query(
    error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``unit/test_solver_process.py`` shows that a process is ended at its limits; here, that it is given them."""
    asked, limits = queries(mlp()), []
    call = auto_lirpa.AUTO_LIRPA.call

    def failing(task: Any, *limit: Any) -> object:
        limits.append(limit)
        if asked[1].property in task:
            raise error
        return call(task, *limit)

    monkeypatch.setattr(auto_lirpa.AUTO_LIRPA, "call", failing)
    outcomes = claims(AutoLirpa("ibp", process_memory=1 << 32), asked, 60)
    assert [outcome.reason is Reason(reason) for outcome in outcomes] == [False, True, False]
    assert None not in (outcomes[0].margin, outcomes[2].margin)
    assert all(seconds <= 61 and memory == 1 << 32 for seconds, memory in limits)


def test_a_network_on_which_the_library_fails_is_unsupported() -> None:
    """The network's values overflow within the library, which raises exceptions that are no fault of this package."""
    case = list(cases(5, 24, ("Sigmoid", "Tanh", "Gelu", "LeakyRelu", "Relu")))[23]
    (outcome,) = claims(make("auto_lirpa-crown"), [case.query], 5)
    assert outcome.reason is Reason.UNSUPPORTED and "auto_LiRPA fails" in outcome.detail
