"""The verifiers ``auto_lirpa…``: agreement with the package's bounds, and their outcomes where the library fails."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from fractions import Fraction
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.soundness.boundary import cases
from tests.support.asking import claims
from tests.support.layers import Layers
from tests.support.processes import run
from verifiable_relu.errors import CallFailed, InputError
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import (
    Add,
    Gelu,
    LeakyRelu,
    Permute,
    Relu,
    Scale,
    Sigmoid,
)
from verifiable_relu.spec.property import Box, Property, Query, Row
from verifiable_relu.verifiers import auto_lirpa
from verifiable_relu.verifiers.auto_lirpa import AutoLirpa
from verifiable_relu.verifiers.base import Outcome, Reason, Trust, Verdict, Verifier
from verifiable_relu.verifiers.incomplete import Crown, Ibp
from verifiable_relu.verifiers.registry import make

ROOT = Path(__file__).parents[2]

try:
    auto_lirpa.version("auto_LiRPA")
except PackageNotFoundError:
    pytest.skip("auto_LiRPA is not installed", allow_module_level=True)


def mlp() -> Network:
    return Layers(5).linear(12).add(Relu).linear(10).add(Relu).linear(4).network()


def cnn() -> Network:
    build = (
        Layers(2, 6, 6).conv(4, (3, 3), (1, 1, 1, 1)).add(Relu).conv(5, (3, 3), (1, 1, 1, 1), stride=(2, 2)).add(Relu)
    )
    return build.flatten().linear(8).add(Relu).linear(3).network()


def uneven_cnn() -> Network:
    build = (
        Layers(2, 5, 7).conv(4, (3, 3), (0, 1, 2, 0), stride=(2, 1)).add(Relu).conv(4, (2, 2), (1, 0, 0, 0)).add(Relu)
    )
    return build.flatten().linear(3).network()


def grouped_cnn() -> Network:
    return (
        Layers(4, 6, 6).conv(4, (3, 3), (2, 2, 2, 2), dilation=(2, 2), groups=2).add(Relu).flatten().linear(3).network()
    )


def residual() -> Network:
    build = Layers(6).linear(8).add(Relu).linear(8).add(Relu).linear(8)
    return build.add(Add, inputs=(2, 5)).add(Relu).linear(3).network()


def scaled() -> Network:
    build = Layers(3, 4, 4)
    build.add(Scale, center=build.numbers(3, 1, 1), scale=build.numbers(3, 1, 1), shift=torch.zeros(()))
    build.conv(4, (3, 3), (1, 1, 1, 1)).add(Relu).flatten()
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


def image_out() -> Network:
    return Layers(1, 4, 4).conv(2, (3, 3), (1, 1, 1, 1)).add(Relu).conv(1, (3, 3), (0, 0, 0, 0)).network()


def smooth() -> Network:
    return Layers(4).linear(8).add(Sigmoid).linear(3).network()


PIECEWISE_LINEAR = (mlp, cnn, uneven_cnn, grouped_cnn, residual, scaled, leaky, permuted, image_out)
Maker = Callable[[], Network]


def queries(network: Network, count: int = 3, eps: float = 0.05, seed: int = 1) -> list[Query]:
    """Queries over boxes around random points, whose unsafe sets have 2 or 3 polytopes of 1 or 2 random rows."""
    rng = np.random.default_rng(seed)
    made = []
    for number in range(count):
        center = rng.normal(size=network.input_size)
        box = Box(center - eps, center + eps)
        polytopes = [
            tuple(
                Row(
                    tuple((i, Fraction(int(c))) for i, c in enumerate(rng.integers(-3, 4, network.output_size)) if c),
                    Fraction(int(rng.integers(-8, 8)), 4),
                )
                for _ in range(1 + (number + p) % 2)
            )
            for p in range(2 + number % 2)
        ]
        made.append(Query(network, Property(box, tuple(polytopes))))
    return made


def margins(verifier: Verifier, asked: list[Query]) -> np.ndarray:
    outcomes = claims(verifier, asked, 60)
    assert [o.detail for o in outcomes if o.margin is None] == []
    return np.array([o.margin for o in outcomes])


@pytest.mark.parametrize("make_network", PIECEWISE_LINEAR)
@pytest.mark.parametrize(("own", "bound"), [(Ibp(), "ibp"), (Crown(), "crown")])
def test_auto_lirpas_bounds_agree_with_the_projects_own(
    make_network: Maker, own: Verifier, bound: auto_lirpa.Bound
) -> None:
    asked = queries(make_network())
    theirs, ours = margins(AutoLirpa(bound), asked), margins(own, asked)
    # Ours intersect CROWN with intervals, and pull rows through whatever the last layer is.
    # Of theirs nothing is said of rounding, and some sums of ours are in float32.
    assert (theirs <= ours + 1e-5 * (1 + np.abs(ours))).all()
    if (make_network, bound) != (image_out, "ibp"):
        np.testing.assert_allclose(theirs, ours, rtol=0.02)


def lowest(query: Query, count: int = 500) -> float:
    """The least margin at random points of the box, most of which lie near its faces."""
    box, network, rng = query.property.box, query.network, np.random.default_rng(0)
    mix = rng.beta(0.1, 0.1, size=(count, box.size))
    x = torch.from_numpy(box.lower + mix * (box.upper - box.lower)).reshape(count, *network.input_shape)
    outputs = network(x).flatten(1).tolist()
    return min(float(query.property.margin([Fraction(v) for v in y])) for y in outputs)


@pytest.mark.parametrize("make_network", PIECEWISE_LINEAR)
def test_optimised_slopes_are_tighter_and_below_every_sample(make_network: Maker) -> None:
    asked = queries(make_network(), eps=0.3)
    crown, alpha = margins(AutoLirpa("crown"), asked), margins(AutoLirpa("alpha-crown", iterations=8), asked)
    assert (alpha >= crown - 1e-9).all()
    assert (alpha > crown + 1e-3).any()
    assert (alpha <= [lowest(query) for query in asked]).all()


def test_bounds_of_smooth_networks_are_below_every_sample() -> None:
    asked = queries(smooth(), eps=0.2)
    assert (margins(AutoLirpa("crown"), asked) <= [lowest(query) for query in asked]).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_planted_counterexamples_are_never_denied(dtype: str) -> None:
    asked = []
    for query in queries(residual(), count=8, eps=0.2):
        # A row that a corner of the box satisfies with equality.
        corner = torch.from_numpy(query.property.box.upper)[None]
        y = query.network(corner).flatten().tolist()
        unsafe = ((Row(((0, Fraction(1)),), Fraction(y[0])), Row(((1, Fraction(-1)),), -Fraction(y[1]))),)
        asked.append(Query(query.network, Property(query.property.box, unsafe)))
    for bound in ("ibp", "crown", "alpha-crown"):
        outcomes = claims(AutoLirpa(bound, iterations=5, dtype=dtype), asked, 60)
        assert {o.verdict for o in outcomes} == {Verdict.UNKNOWN}
        assert {o.reason for o in outcomes} == {Reason.INCOMPLETE}


def test_a_proof_has_the_trust_label_float() -> None:
    query = queries(mlp(), count=1)[0]
    unsafe = ((Row(((0, Fraction(1)),), Fraction(lowest(query) - 100)),),)
    far = Query(query.network, Property(query.property.box, unsafe))
    for name in ("auto_lirpa", "auto_lirpa-ibp", "auto_lirpa-crown", "auto_lirpa-alpha-crown"):
        (outcome,) = claims(make(name), [far], 60)
        assert (outcome.verdict, outcome.reason, outcome.trust) == (Verdict.UNSAT, Reason.PROVED, Trust.FLOAT)
        assert outcome.method == ("auto_lirpa-alpha-crown" if name == "auto_lirpa" else name)
        assert outcome.margin is not None
        assert outcome.margin > 0


TRACES = """
import logging, sys, warnings, torch
from tests.peers.test_auto_lirpa import AutoLirpa, margins, mlp, queries
from verifiable_relu.verifiers import auto_lirpa

def state():
    return (
        list(warnings.filters), list(logging.root.handlers), logging.root.manager.disable, sys.getrecursionlimit(),
        torch.get_default_dtype(), "numpy.lib.arraysetops" in sys.modules, hasattr(torch._C.Node, "__getitem__"),
    )

class Here:
    # Does in this process what another would be asked to do.

    asked = 0

    def start(self):
        pass

    def call(self, task, *limits):
        assert self.asked or "auto_LiRPA" not in sys.modules
        self.asked += 1
        return auto_lirpa.work(task)

before = state()
auto_lirpa.AUTO_LIRPA = Here()
margins(AutoLirpa(iterations=3), queries(mlp(), count=1))
assert "auto_LiRPA" in sys.modules
assert state() == before, (before, state())
"""


def test_the_library_changes_no_global_state_and_is_not_imported_by_the_calling_process() -> None:
    # In a process of its own, since the library's import changes most, and happens once.
    done = run(["-c", TRACES], cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_bounds_of_affine_networks_are_those_of_crown() -> None:
    asked = queries(Layers(3).linear(2).network())
    np.testing.assert_allclose(margins(AutoLirpa(), asked), margins(Crown(), asked), rtol=1e-6)


def outcome_of(network: Network, budget: float = 60.0) -> Outcome:
    (outcome,) = claims(AutoLirpa(), queries(network, count=1), budget)
    return outcome


def test_unsupported_operators_are_named() -> None:
    version = auto_lirpa.version("auto_LiRPA")
    if version == "0.3":
        outcome = outcome_of(Layers(3).linear(4).add(Gelu, lam=torch.tensor(2.0)).linear(2).network())
        assert (outcome.verdict, outcome.reason) == (Verdict.UNKNOWN, Reason.UNSUPPORTED)
        assert "Gelu" in outcome.detail
    matrix = outcome_of(Layers(2, 3).linear(4).add(Relu).flatten().linear(2).network())
    assert matrix.reason is Reason.UNSUPPORTED
    assert "node 'n1' (Linear)" in matrix.detail


def test_a_spent_budget_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcome_of(mlp(), budget=0.0).reason is Reason.TIMEOUT
    assert outcome_of(mlp(), budget=1e-9).reason is Reason.TIMEOUT


def test_without_the_package_the_message_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def missing(name: str, *arguments: object, **options: object) -> object:
        if name == "auto_LiRPA":
            raise ModuleNotFoundError("No module named 'auto_LiRPA'")
        return original(name, *arguments, **options)

    auto_lirpa.library.cache_clear()
    monkeypatch.setattr(builtins, "__import__", missing)
    monkeypatch.setattr(auto_lirpa.AUTO_LIRPA, "call", auto_lirpa.work)
    with pytest.raises(InputError, match="auto_LiRPA cannot be imported: No module named"):
        claims(AutoLirpa(), queries(mlp(), count=1), 1)


def test_a_model_is_made_once_for_all_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    original = auto_lirpa.Model
    monkeypatch.setattr(auto_lirpa, "Model", lambda *arguments: made.append(arguments) or original(*arguments))
    monkeypatch.setattr(auto_lirpa, "MOST_BOXES", 2)
    monkeypatch.setattr(auto_lirpa.AUTO_LIRPA, "call", lambda task, *limits: auto_lirpa.work(task))
    assert len(margins(AutoLirpa("crown"), queries(mlp(), count=5))) == 5 and len(made) == 1
    margins(AutoLirpa("ibp"), queries(mlp(), count=1))
    margins(AutoLirpa("crown"), queries(leaky(), count=1))
    assert len(made) == 3


@pytest.mark.parametrize("batch", [1, 64])
def test_a_crash_of_the_library_costs_one_query(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_lirpa, "MOST_BOXES", batch)
    asked = queries(mlp(), count=3)
    alone = claims(AutoLirpa("ibp"), asked, 60)
    call = auto_lirpa.AUTO_LIRPA.call

    def breaking(task: Any, *limits: object) -> object:
        if task is not None and asked[1].property in task.properties:
            raise CallFailed("it crashed")
        return call(task, *limits)

    monkeypatch.setattr(auto_lirpa.AUTO_LIRPA, "call", breaking)
    outcomes = claims(AutoLirpa("ibp"), asked, 60)
    assert (outcomes[1].reason, outcomes[1].detail) == (Reason.ERROR, "it crashed")
    assert [outcomes[i].margin for i in (0, 2)] == pytest.approx([alone[i].margin for i in (0, 2)], abs=1e-9)


def test_more_memory_than_is_allowed_is_an_unknown_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """``unit/test_solver_process.py`` shows that a process is ended at its limit; here, that it is given one."""
    call = auto_lirpa.AUTO_LIRPA.call

    def limited(task: Any, *limits: Any) -> object:
        if task is not None and limits[1:] == (1 << 20,):
            raise MemoryError("more than it may have")
        return call(task, *limits)

    monkeypatch.setattr(auto_lirpa.AUTO_LIRPA, "call", limited)
    asked = queries(mlp(), count=1)
    (outcome,) = claims(AutoLirpa("ibp", process_memory=1 << 20), asked, 60)
    assert (outcome.verdict, outcome.reason) == (Verdict.UNKNOWN, Reason.MEMORY)
    assert claims(AutoLirpa("ibp"), asked, 60)[0].reason is Reason.INCOMPLETE


def test_an_unknown_kind_of_bound_is_refused() -> None:
    with pytest.raises(InputError, match="no bound 'zonotope'"):
        AutoLirpa("zonotope")  # type: ignore[arg-type]


def test_a_network_on_which_the_library_fails_is_unsupported() -> None:
    """The network's values overflow within the library, which raises exceptions that are no fault of this package."""
    case = list(cases(5, 24, ("Sigmoid", "Tanh", "Gelu", "LeakyRelu", "Relu")))[23]
    (outcome,) = claims(make("auto_lirpa-crown"), [case.query], 5)
    assert (outcome.verdict, outcome.reason) == (Verdict.UNKNOWN, Reason.UNSUPPORTED)
    assert "auto_LiRPA fails" in outcome.detail
