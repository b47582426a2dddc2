"""The page on certificates suffices for what runs, pairs of networks, quantised files, curves and families, too.

The checker that is written from the page alone accepts what the verifier writes of each kind, and of certificates that
are changed at random both checkers accept the same. What each arithmetic charges is compared as a number.
"""

from __future__ import annotations

import copy
import hashlib
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from tests.soundness import page_checker, page_network
from tests.soundness import test_certified_arithmetic as arithmetics
from tests.soundness import test_certified_pairs as pairs
from tests.soundness import test_certified_quantised as quantised
from tests.soundness.forgery import decimal, forged
from tests.soundness.test_page_checker import UNDECIDED
from tests.support.certificates import Case, Records, checked, written
from tests.support.draws import draws
from tests.support.solver_cases import ball
from tests.unit import test_check_curves as curves
from verifiable_relu.check import BadInput, Refused
from verifiable_relu.errors import InputError
from verifiable_relu.network import hardened


@dataclass(frozen=True)
class Given:
    """A certificate, and what both checkers say of its records when they are changed."""

    name: str
    case: Case
    other: bytes | None
    verdict: Callable[[Records], str]

    def theirs(self, changed: Records) -> str | None:
        try:
            self.verdict(changed)
        except (Refused, BadInput) as error:
            return str(error)
        return None

    def ours(self, changed: Records) -> str | None:
        try:
            page_checker.check(written(changed), self.case.network, self.case.prop, self.other)
        except page_checker.Refused as error:
            return str(error)
        return None


def single(folder: Path, name: str, case: Case) -> Given:
    return Given(name, case, None, lambda changed: checked(folder, case, written(changed)))


def running(folder: Path, arithmetic: str, name: str) -> Given:
    """A certificate about an arithmetic."""
    for seed in range(20):
        data = arithmetics.of(name, np.random.default_rng(seed), arithmetic)
        try:
            case = arithmetics.made(folder, data, arithmetic)
            checked(folder, case, written(case.records))
        except (BadInput, InputError, Refused) as error:
            # Some of their numbers are large.
            assert "overflow" in str(error) or "finite" in str(error), error
            continue
        return single(folder, f"{arithmetic} {name}", case)
    raise AssertionError(f"no certificate of {name} in {arithmetic}")


def paired(folder: Path, seed: int, smooth: bool, family: float, share: float) -> Given:
    """A certificate of how far the outputs of two networks differ."""
    folder.mkdir()
    networks, box = pairs.pair(seed, smooth, share), ball(np.random.default_rng(seed).normal(size=3), 0.25)
    one = hardened(networks[0], family) if family else networks[0]
    most = Fraction(round(pairs.proven((one, networks[1]), box) * 1.001 * 2**20) + 1, 2**20)
    files = pairs.made(folder, networks, box, most, family)
    case = Case((folder / "a.onnx").read_bytes(), (folder / "p.vnnlib").read_bytes(), files.records)
    return Given(f"pair {smooth} {family} {share}", case, (folder / "b.onnx").read_bytes(), files.checked)


PAIRS = [(False, 0.0, 0.01), (False, 0.0, 1.0), (True, 0.0, 0.01), (True, 8.0, 0.01), (False, 20.0, 0.01)]
NETWORKS = ("near", "planted", "convolved", "residual", "pooled", "Sigmoid", "Tanh", "Gelu")


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> list[Given]:
    folder, known = tmp_path_factory.mktemp("kinds"), list(page_network.ARITHMETICS)
    found = []
    for number, name in enumerate(NETWORKS):
        found += [running(folder, known[(number + by) % 4], name) for by in (0, 1 + number // 4)]
    found += [paired(folder / str(n), n, *kind) for n, kind in enumerate(PAIRS)]
    for method in ("crown", "alpha-crown", "split"):
        found += [single(folder, f"int8 {name}", quantised.proved(folder, name, method)[0]) for name in quantised.CASES]
    for made in (curves.proven, curves.branched):
        found += [single(folder, kind, made(folder, kind)[3]) for kind in curves.KINDS]
    return found


def test_certificates_of_each_kind_are_accepted_by_the_page_alone(given: list[Given]) -> None:
    for one in given:
        assert one.theirs(one.case.records) is None
        assert one.ours(one.case.records) is None, one.name


def changed_head(rng: random.Random, records: Records) -> Records:
    """A certificate whose claim is another, as its first record or its polytopes have it."""
    found = copy.deepcopy(records)
    first = found[0]
    match rng.choice(["arithmetic", "joint", "beside", "other", "alone", "most", "less"]):
        case "arithmetic":
            first["arithmetic"] = rng.choice([*page_network.ARITHMETICS, "real", "float64", None, ["float32"]])
        case "joint":
            length = len(first.get("joint", "x"))
            first["joint"] = rng.choice([["1"], ["160"], ["160"] * 2, ["3", "1/2"], ["7"] * length])
        case "beside" if "beside" in first:
            first["beside"] = rng.choice([[], [[0, 0]], [[0, 1], [1, 0]], [[0, 0], [1, 1], [0, 1]], [[0, 0], [5, 1]]])
        case "other" if "other" in first:
            first["network"], first["other"] = first["other"], first["network"]
        case "alone":
            for record in found:
                if "alone" in record:
                    record["alone"] = [j for j in range(7) if rng.random() < 0.5]
        case "most":
            more = rng.choice([Fraction(1, 1000), Fraction(1, 10), 1])
            for record in found:
                for row in (row for rows in record.get("part", {}).get("polytopes", ()) for row in rows):
                    row["most"] = str(Fraction(row["most"]) + more)
        case "less":
            first.pop(rng.choice(["arithmetic", "joint", "beside", "other"]), None)
    return found


def test_both_accept_the_same_of_changed_certificates(given: list[Given]) -> None:
    ended: Counter[str] = Counter()
    for number, one in enumerate(given):
        rng = random.Random(number)
        for _ in range(draws(24)):
            changed = (forged if rng.random() < 0.6 else changed_head)(rng, one.case.records)
            mine, other = one.ours(changed), one.theirs(changed)
            ended["accepted" if mine is None else "refused"] += 1
            if (mine is None) != (other is None):
                undecided = mine is None and any(text in (other or "") for text in UNDECIDED)
                assert undecided, f"{one.name}: the page {mine}, the checker {other}"
                ended["undecided"] += 1
    assert ended["accepted"] > draws(100) and ended["refused"] > draws(400), ended
    assert ended["undecided"] < 0.03 * ended.total(), ended


def moved(case: Case, most: Fraction) -> Case:
    """The same certificate, of the same row with another right side."""
    found = copy.deepcopy(case.records)
    ((row,),) = found[1]["part"]["polytopes"]
    ((output, coefficient),) = row["y"]
    row["most"] = str(most)
    asked = f"(assert (<= (* {decimal(Fraction(coefficient))} Y_{output}) {decimal(most)}))"
    kept = [line for line in case.prop.decode().splitlines() if "assert" not in line or "Y_" not in line]
    prop = "\n".join([*kept, asked]).encode()
    found[0]["property"] = hashlib.sha256(prop).hexdigest()
    return Case(case.network, prop, found)


def proved(case: Case) -> Fraction:
    """The largest right side that the page's checker accepts, up to 2⁻³⁶ of the numbers that it is found between."""
    most = Fraction(case.records[1]["part"]["polytopes"][0][0]["most"])
    low, size = Fraction(int(most * 2**40) - 1, 2**40), Fraction(1, 2**40)

    def holds(value: Fraction) -> bool:
        new = moved(case, value)
        try:
            page_checker.check(written(new.records), new.network, new.prop)
        except page_checker.Refused:
            return False
        return True

    while holds(low + size):
        size *= 4
    high = low + size
    for _ in range(36):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


@pytest.mark.combined
@pytest.mark.parametrize("arithmetic", page_network.ARITHMETICS)
@pytest.mark.parametrize("name", ["near", "planted", "convolved", "residual", "pooled", "Gelu"])
def test_both_charge_the_same_for_rounding(
    name: str, arithmetic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the page's checker just proves a row, the project's needs 1 % of the rounding more, of GELU 10 %."""
    case = running(tmp_path, arithmetic, name).case
    rounded = proved(case)
    small = {key: Fraction(0) for key in ("operand", "step", "result", "least")}
    exact = page_network.Arithmetic(**small, largest=Fraction(2) ** 90, digits=200, lowest=-126)
    with monkeypatch.context() as patch:
        patch.setitem(page_network.ARITHMETICS, arithmetic, exact)
        charge = proved(case) - rounded
    assert charge > 0
    for share, accepted in ((Fraction(1, 10 if name == "Gelu" else 100), True), (Fraction(-1, 100), False)):
        new = moved(case, Fraction(int((rounded - share * charge) * 2**80), 2**80))
        said = single(tmp_path, name, new).theirs(new.records)
        assert (said is None) == accepted, said


@pytest.mark.parametrize("wrong", ["sizes", "part", "gap", "Round"])
def test_faults_of_a_checker_show(given: list[Given], wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison notices a checker that takes the page's words otherwise."""
    if wrong == "sizes":
        monkeypatch.setattr(page_network.Arithmetic, "sizes", lambda *_, **__: (Fraction(1, 8), Fraction(0)))
    elif wrong == "part":
        monkeypatch.setattr(page_checker.Bounds, "part", lambda *_: None)
    elif wrong == "gap":
        monkeypatch.setattr(page_checker, "gap", lambda *_: Fraction(1))
    else:
        monkeypatch.setattr(page_network.Round, "term", lambda *_: Fraction(-(10**6)))
    with pytest.raises(AssertionError):
        test_certificates_of_each_kind_are_accepted_by_the_page_alone(given)
