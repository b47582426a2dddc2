"""The checker accepts every certificate that the library writes of networks in which activations follow each other."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import pytest

from tests.soundness.proven_networks import KINDS, METHODS, Asked, Draft, asked, boxed, drawn, refusal
from tests.support.asking import claims
from tests.support.certificates import Case, checked, records, written
from tests.support.draws import draws
from tests.support.solver_cases import row
from verifiable_relu.campaign.certificates import beside
from verifiable_relu.check import Refused, check, curves
from verifiable_relu.check.graph import ActivationNode
from verifiable_relu.network import read_onnx
from verifiable_relu.spec.property import Box, Property, Query
from verifiable_relu.spec.specfile import vnnlib_text
from verifiable_relu.trust.certificate_file import encoded, write_unsat
from verifiable_relu.verifiers.auto import recording
from verifiable_relu.verifiers.base import Verdict
from verifiable_relu.verifiers.registry import make

CHAINS = (
    ("Relu", "Relu"),
    ("Relu", "Abs"),
    ("Relu", "LeakyRelu"),
    ("Abs", "PRelu"),
    ("Relu", "Sigmoid"),
    ("Relu", "Gelu"),
    ("MaxPool", "Relu", "Relu"),
    ("LeakyRelu", "Relu", "Tanh"),
    ("Sigmoid", "Relu"),
    ("Relu", "Gelu", "Gelu"),
)


def chain(kinds: tuple[str, ...], dead: bool = False) -> bytes:
    """Activations after one another, with layers around them; ``dead``: of a GELU whose input is far below 0."""
    draft = Draft(random.Random(1), "dense", "ordinary", (1, 1, 2, 2) if "MaxPool" in kinds else (1, 2))
    if dead:
        weight, bias = np.full((2, 1), 0.5, np.float32), np.full(1, -30, np.float32)
        draft.add("Gemm", draft.value, draft.store(weight), draft.store(bias))
        draft.shape = (1, 1)
    for kind in kinds:
        if kind == "MaxPool":
            draft.add("Relu", draft.value)
            draft.add(kind, draft.value, kernel_shape=[2, 1])
            draft.shape = (1, 1, 1, 2)
        else:
            draft.activation(kind)
    draft.dense(1)
    return draft.file()


def refused(folder: Path, data: bytes, method: str = "crown") -> str:
    """Why the checker refuses a certificate that Y is above a number that interval arithmetic proves with room."""
    network = read_onnx(data)
    box = Box(np.full(network.input_size, -1.0), np.full(network.input_size, 2.0))
    query = Query(network, Property(box, ((row({0: 1}, -8),),), "p"))
    (outcome,) = claims(recording(make(method)), [query], 10.0)
    assert outcome.verdict is Verdict.UNSAT
    return refusal(folder, data, Asked(query, outcome))


@pytest.mark.parametrize("kinds", CHAINS, ids=" ".join)
def test_bounds_that_are_exactly_zero_are_accepted(kinds: tuple[str, ...], tmp_path: Path) -> None:
    for method in ("crown", "bab"):
        assert refused(tmp_path, chain(kinds), method) == ""


@pytest.mark.parametrize("kind", ["Gelu", "Sigmoid", "spelled Gelu"])
def test_saturated_curves_are_accepted(kind: str, tmp_path: Path) -> None:
    assert refused(tmp_path, chain((kind, "Relu"), dead=True)) == ""


def test_a_difference_of_two_windows_is_accepted_in_both(tmp_path: Path) -> None:
    """Entries 2 and 3 meet in both windows: the slopes that bound their difference are written for each."""
    draft = Draft(random.Random(4), "pooled", "ordinary", (1, 1, 3, 2))
    draft.conv(1)
    draft.activation("Relu")
    draft.add("MaxPool", draft.value, kernel_shape=[2, 2])
    draft.shape = (1, 1, 2, 1)
    draft.dense(1)
    assert refused(tmp_path, draft.file(), "bab") == ""


def test_no_certificate_of_a_random_network_is_refused(tmp_path: Path) -> None:
    said: Counter[str] = Counter()
    for seed in range(draws(64)):
        rng, data = random.Random(f"question {seed}"), drawn(seed, KINDS[seed % len(KINDS)])
        network, method = read_onnx(data), METHODS[seed // len(KINDS) % len(METHODS)]
        found = asked(method, network, boxed(rng, network.input_size), rng)
        why = "open" if found is None else refusal(tmp_path, data, found)
        assert why in ("", "open") or why.startswith("none: "), f"seed {seed}, {method}: {why}"
        said[why[:4]] += 1
    assert said[""] > 0.6 * said.total(), said


def test_a_checker_that_rounds_what_is_exact_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = ActivationNode.at

    def rounded(self: ActivationNode, z: Any) -> Any:
        low, high = exact(self, z)
        return low - 1e-15, high + 1e-15

    monkeypatch.setattr(ActivationNode, "at", rounded)
    assert "the lower bound 0.0" in refused(tmp_path, chain(("Relu", "Relu")))


def test_a_checker_that_does_not_know_erf_far_out_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = curves.normal

    def coarse(h: Any) -> Any:
        value, error, bell, part = exact(h)
        return value, error + 37 * 32 * 2.0**-53, bell, part

    monkeypatch.setattr(curves, "normal", coarse)
    assert "is not proven" in refused(tmp_path, chain(("Gelu", "Relu"), dead=True))


@pytest.mark.parametrize("kinds", [("Relu", "Relu"), ("LeakyRelu", "Relu"), ("Abs", "Relu")], ids=" ".join)
def test_what_a_point_contradicts_is_refused(kinds: tuple[str, ...], tmp_path: Path) -> None:
    """Claims beyond what the second activation gets at the ends of the box, by a little and by a quarter."""
    data = chain(kinds)
    assert refused(tmp_path, data) == ""
    (path,) = (tmp_path / "c").glob("*.jsonl.gz")
    case = Case(data, (tmp_path / "p.vnnlib").read_bytes(), records(path))
    checked(tmp_path, case, written(case.records))
    places = [i for i, record in enumerate(case.records) if "activation" in record]
    for place in places[1:]:
        for side, sign in (("lower", 1), ("upper", -1)):
            exponent, *mantissas = case.records[place][side]
            for size in (1 << 20, 1 << 40):
                # Of inputs in [−1, 2] the second activation's reach 0, or what the first one makes of −1, and 2.
                step = max(abs(m) for m in mantissas) // size + 1 if any(mantissas) else 1
                changed = [dict(record) for record in case.records]
                moved = [m + sign * (step + abs(m) // 4) for m in mantissas]
                changed[place][side] = [exponent, *moved]
                with pytest.raises(Refused):
                    checked(tmp_path, case, written(changed))


def test_a_claim_about_a_saturated_gelu_that_a_point_contradicts_is_refused(tmp_path: Path) -> None:
    """At x = (2, 2) the GELU's input is −28 and its value −28·erfc(28/√2)/2, as mpmath computes it."""
    data = chain(("Gelu", "Relu"), dead=True)
    assert refused(tmp_path, data) == ""
    (path,) = (tmp_path / "c").glob("*.jsonl.gz")
    case = Case(data, (tmp_path / "p.vnnlib").read_bytes(), records(path))
    place = [i for i, record in enumerate(case.records) if "activation" in record][1]
    with mpmath.workdps(40):
        value = float(-14 * mpmath.erfc(28 / mpmath.sqrt(2)))
    for share, holds in ((1 + 1e-5, True), (1 - 1e-9, False)):
        changed = [dict(record) for record in case.records]
        changed[place] |= {"lower": encoded(np.array([value * share]))}
        if holds:
            checked(tmp_path, case, written(changed))
        else:
            with pytest.raises(Refused, match="lower bound"):
                checked(tmp_path, case, written(changed))


@pytest.mark.parametrize("kind", ["Relu", "LeakyRelu"])
def test_pairs_whose_first_node_is_an_activation_of_the_input(kind: str, tmp_path: Path) -> None:
    """Accepted, and refused of a smaller difference than one that is attained."""
    files = []
    for name, by in (("a", 1.0), ("b", 1.01)):
        draft = Draft(random.Random(1), "dense", "ordinary", (1, 2))
        draft.add(kind, draft.value)
        weight, bias = np.array([[1.0], [-2.0]], np.float32) * np.float32(by), np.zeros(1, np.float32)
        draft.add("Gemm", draft.value, draft.store(weight), draft.store(bias))
        draft.shape = (1, 1)
        files.append(tmp_path / f"{name}.onnx")
        files[-1].write_bytes(draft.file())
    one, other = (read_onnx(file) for file in files)
    most = Fraction(1, 16)
    unsafe = ((row({0: 1, 1: -1}, -most),), (row({0: -1, 1: 1}, -most),))
    prop = Property(Box(np.full(2, -1.0), np.full(2, 1.0)), unsafe, "p")
    (tmp_path / "p.vnnlib").write_text(vnnlib_text(prop))
    pairs, proof = beside(one, other, prop, 10.0)
    assert proof is not None and (pairs == [(0, 0)]) == (kind == "Relu")
    data = [(file).read_bytes() for file in (*files, tmp_path / "p.vnnlib")]
    write_unsat(tmp_path / "c", data[0], data[2], [(0, proof)], other=(data[1], pairs))
    assert check(tmp_path / "c", files[0], tmp_path / "p.vnnlib", None, files[1]).startswith("unsat")
    # At (0, 1) the outputs differ by 0.02.
    given = records(tmp_path / "c")
    for polytope in given[1]["part"]["polytopes"]:
        polytope[0]["most"] = "-0.015"
    prop = Property(prop.box, tuple((row(dict(r.coefficients), Fraction(-15, 1000)),) for (r,) in unsafe), "p")
    (tmp_path / "q.vnnlib").write_text(vnnlib_text(prop))

    given[0]["property"] = hashlib.sha256((tmp_path / "q.vnnlib").read_bytes()).hexdigest()
    (tmp_path / "f").write_bytes(written(given))
    with pytest.raises(Refused, match="not excluded"):
        check(tmp_path / "f", files[0], tmp_path / "q.vnnlib", None, files[1])
