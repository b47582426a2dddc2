"""The page on certificates suffices to write a checker: one written from it alone agrees with the project's.

``page_checker`` accepts every certificate that the verifier's methods write of small piecewise-linear networks. Of
certificates that are changed at random both accept the same, but where the project's leaves an inequality undecided
between rounding and the truth: it may refuse what the other, which rounds nowhere, accepts by less than that.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from tests.soundness import forged_dense, forged_networks, onnx_exact, page_checker
from tests.soundness.forged import certificate
from tests.soundness.forgery import forged
from tests.support.asking import claims
from tests.support.certificates import (
    Case,
    checked,
    cover_case,
    one_point,
    planes_case,
    refined_case,
    tree_case,
    written,
)
from tests.support.draws import draws
from tests.support.solver_cases import random_query
from verifiable_relu.campaign.certificates import proofs
from verifiable_relu.check import BadInput, Refused
from verifiable_relu.network import read_onnx, write_onnx
from verifiable_relu.spec.property import Query
from verifiable_relu.spec.specfile import vnnlib_text
from verifiable_relu.trust.certificate_file import write_unsat
from verifiable_relu.verifiers.auto import recording
from verifiable_relu.verifiers.base import Verdict
from verifiable_relu.verifiers.registry import make

METHODS = ("crown", "alpha-crown", "split", "bab", "auto")

UNDECIDED = ("at least, only", "is not proven, only", "are proven to reach", "is above the upper one")
"""What the project's checker says where it has bounded an inequality and found it wanting."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("page")


def theirs(folder: Path, case: Case, records: list[dict[str, Any]]) -> str | None:
    """Why the project's checker refuses a certificate."""
    try:
        checked(folder, case, written(records))
    except (Refused, BadInput) as error:
        return str(error)
    return None


def ours(case: Case, records: list[dict[str, Any]]) -> str | None:
    """Why the page's checker refuses it."""
    try:
        page_checker.check(written(records), case.network, case.prop)
    except page_checker.Refused as error:
        return str(error)
    return None


def by_methods(folder: Path, count: int) -> Iterator[tuple[str, Case]]:
    """What each method writes of random queries that hold, by a little."""
    queries = (random_query(seed, leaky=seed % 2 == 0, dyadic=True) for seed in itertools.count())
    holding = (query for query, gap in queries if gap > 0)
    for number, query in enumerate(itertools.islice(holding, count)):
        method = METHODS[number % len(METHODS)]
        data, text = write_onnx(query.network), vnnlib_text(query.property).encode()
        asked = Query(read_onnx(data), query.property)
        outcomes = claims(recording(make(method)), [asked], 20.0)
        if outcomes[0].verdict is Verdict.UNSAT:
            write_unsat(folder / "made", data, text, list(proofs([asked], outcomes, 20.0)))
            yield method, Case(data, text, forged_dense.records(folder / "made"))


@pytest.fixture(scope="module")
def drawn(folder: Path) -> list[tuple[str, Case]]:
    """Certificates of networks of all kinds that both checkers know."""
    found = []
    for seed in range(draws(96)):
        dense = forged_dense.drawn(seed)
        reached = forged_dense.reached(dense, dense.polytopes)
        if not reached and (given := forged_dense.certificate(folder, dense, seed)) is not None:
            found.append(("dense", Case(forged_dense.network(dense), forged_dense.prop(dense), given)))
        kind = ("maxpool", "conv", "residual")[seed % 3]
        net = forged_networks.drawn(kind, seed)
        if net.scales == forged_networks.Scales():
            made = certificate(folder, net, forged_networks.Referee(net), seed)
            if made is not None:
                found.append((kind, Case(net.plain, (folder / "p.vnnlib").read_bytes(), made[0])))
    return found


def test_every_method_s_certificates_are_accepted_by_the_page_alone(folder: Path) -> None:
    found: Counter[str] = Counter()
    for method, case in by_methods(folder, draws(20)):
        assert theirs(folder, case, case.records) is None
        assert ours(case, case.records) is None, method
        found[method] += 1
    assert set(found) == set(METHODS), found


def test_certificates_of_each_kind_are_accepted_by_the_page_alone(folder: Path, drawn: list[tuple[str, Case]]) -> None:
    """Trees, tighter bounds, planes, zonotopes of halves, MaxPool, convolutions, residual networks, absolute values."""
    every = [make(folder, kind) for make in (tree_case, refined_case, cover_case) for kind in ("mlp", "leaky")]
    every += [planes_case(folder, 4), tree_case(folder, "residual")]
    for case in every:
        assert ours(case, case.records) is None
    said = {key for case in every for record in case.records for key in record}
    assert {"tree", "tighter", "plane", "zonotope", "halve", "split", "leaf"} <= said
    for kind, case in drawn:
        assert ours(case, case.records) is None, kind
    assert {kind for kind, _ in drawn} == {"dense", "maxpool", "conv", "residual"}


def test_both_accept_the_same_of_changed_certificates(folder: Path, drawn: list[tuple[str, Case]]) -> None:
    """What one accepts and the other refuses is an inequality that rounding hides; the page's checker accepts it."""
    ended: Counter[str] = Counter()
    for number, (kind, case) in enumerate(drawn):
        rng = random.Random(number)
        for _ in range(10):
            changed = forged(rng, case.records)
            changed[0]["property"] = hashlib.sha256(case.prop).hexdigest()
            mine, other = ours(case, changed), theirs(folder, case, changed)
            ended["accepted" if mine is None else "refused"] += 1
            if (mine is None) != (other is None):
                undecided = mine is None and any(text in (other or "") for text in UNDECIDED)
                assert undecided, f"{kind} {number}: the page {mine}, the checker {other}"
                ended["undecided"] += 1
    assert ended["accepted"] > draws(10), ended
    assert ended["refused"] > draws(100), ended
    assert ended["undecided"] < 0.02 * ended.total(), ended


def test_points_are_judged_by_both(folder: Path) -> None:
    ended: Counter[bool] = Counter()
    for seed in range(draws(30)):
        case = forged_dense.drawn(seed)
        net, text = forged_dense.network(case), forged_dense.prop(case)
        rng = random.Random(seed)
        point = [rng.choice([a, b, (a + b) / 3 + a / 3]) for a, b in zip(case.lower, case.upper, strict=True)]
        given = Case(net, text, one_point(net, text, point))
        mine, other = ours(given, given.records), theirs(folder, given, given.records)
        assert (mine is None) == (other is None), (seed, mine, other)
        ended[mine is None] += 1
    assert ended[True] and ended[False], ended


def test_the_page_s_checker_reads_networks_as_they_are_defined() -> None:
    """Values at random points are those of the rational evaluator of ONNX files."""
    for seed in range(draws(30)):
        net = forged_networks.drawn(("maxpool", "conv", "residual")[seed % 3], seed)
        rng = random.Random(seed)
        read, model = page_checker.read_network(net.plain), onnx.load_from_string(net.plain)
        atoms = [Fraction(rng.randint(-20, 20), 8) for _ in net.lower]
        x = np.empty((1, len(atoms)), object)
        x[0, :] = atoms
        for z, s in zip(read.z, read.s, strict=True):
            value = page_checker.at(z, atoms)
            atoms.append(value if value >= 0 else s * value)
        expected = onnx_exact.exact(model, {"x": x})["y"].ravel()
        assert [page_checker.at(form, atoms) for form in read.outputs] == [Fraction(v) for v in expected]


@pytest.mark.parametrize("wrong", ["chord", "interval", "fixed"])
def test_faults_of_a_checker_show(
    folder: Path, drawn: list[tuple[str, Case]], wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison notices a checker that takes the page's words otherwise."""
    chord = page_checker.Bounds.chord
    instead = {
        "chord": lambda self, k: chord(self, k) / 2,
        "interval": lambda self, form: form.constant,
        "fixed": lambda self, k: Fraction(1),
    }
    monkeypatch.setattr(page_checker.Bounds, wrong, instead[wrong])
    with pytest.raises(AssertionError):
        test_both_accept_the_same_of_changed_certificates(folder, drawn)
