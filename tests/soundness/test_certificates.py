"""The checker of certificates against referees: exact evaluation of files, and exact minimisation of networks."""

from __future__ import annotations

import copy
import hashlib
import random
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.soundness import check_agreement, forged_dense, onnx_agreement
from tests.support.certificates import Case, Records, checked, excluded, proven, written
from tests.support.draws import draws
from tests.support.solver_cases import ball, chain, least, mlp, row
from tests.support.vnnlib_cases import Writer, damaged, exchanged, holds
from verifiable_relu.check import BadInput, Refused
from verifiable_relu.check.conditions import read_property
from verifiable_relu.errors import InputError
from verifiable_relu.network import write_onnx
from verifiable_relu.network.graph import Network
from verifiable_relu.spec.property import Box
from verifiable_relu.spec.read import parse
from verifiable_relu.spec.specfile import vnnlib_text


def test_files_are_read_as_their_operators_are_defined() -> None:
    """Random graphs at points with short coordinates: the value that the standard's definitions give is enclosed."""
    ended: Counter[str] = Counter()
    for case in onnx_agreement.cases(draws(60), 77):
        found = check_agreement.judge(case.data, case.seed)
        assert not found.disagreements, (case.seed, found.disagreements)
        ended["refused" if found.refused else "read"] += 1
        ended.update(found.compared)
    assert ended["read"] >= draws(60) // 8, ended
    assert ended["exact"] >= draws(60) // 10, ended


@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_properties_are_read_as_they_are_meant(version: str) -> None:
    """Random formulas at random points: in some disjunct exactly where the formula holds."""
    read = 0
    for seed in range(draws(150)):
        rng = random.Random(seed)
        writer = Writer(rng, version)
        text = writer.text()
        try:
            disjuncts = read_property(text, writer.inputs, writer.outputs)
        except BadInput:
            continue
        read += 1
        for _ in range(20):
            point = writer.point()
            values = [point[name] for name in writer.names]
            x, y = values[: writer.inputs], values[writer.inputs :]
            inside = any(
                all(low <= v <= high for low, v, high in zip(d.lower, x, d.upper, strict=True))
                and all(x[i] != (d.upper if up else d.lower)[i] for i, up in d.open_ends)
                and all(
                    (total < r.most) if r.strict else (total <= r.most)
                    for r in d.rows
                    for total in [sum(c * y[i] for i, c in r.y)]
                )
                for d in disjuncts
            )
            assert inside == holds(text, point), seed
    assert read > draws(150) // 20


@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_damaged_properties_are_refused_or_read_as_the_package_reads_them(version: str) -> None:
    """Files with changes at random: no traceback, and where both readers take a file they find the same boxes."""
    read = 0
    for seed in range(draws(200)):
        rng = random.Random(seed)
        writer = Writer(rng, version)
        text = exchanged(rng, writer.text()) if seed % 4 else damaged(rng, writer.text()).decode("utf-8", "replace")
        try:
            disjuncts = read_property(text, writer.inputs, writer.outputs)
        except BadInput:
            continue
        read += 1
        try:
            found = parse(text, Path("p.vnnlib")).properties
        except InputError as error:
            assert "is empty" in str(error) or "more than" in str(error), seed
            continue
        ours = [(d.lower, d.upper) for d in disjuncts if all(a <= b for a, b in zip(d.lower, d.upper, strict=True))]
        theirs = [
            tuple(list(side) for side in zip(*(q.box.bounds(i) for i in range(q.box.size)), strict=True))
            for q in found
            if q.unsafe
        ]
        assert all(box in ours for box in theirs if all(a <= b for a, b in zip(*box, strict=True))), seed
    assert read > draws(200) // 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certificates")


@cache
def small(folder: Path) -> tuple[Network, Box, float, Case]:
    """A network, a box, the least value of y_0 − y_1 there, and the proof that a little less is not reached."""
    rng = np.random.default_rng(3)
    network = mlp(rng, (3, 3, 4, 2), leaky=True)
    box = ball(np.round(rng.normal(size=3) * 8) / 8, 1.0)
    value = least(network, box, (row({0: 1, 1: -1}, 0),))
    prop = excluded(box, (row({0: 1, 1: -1}, Fraction(value) - Fraction(1, 1024)),))
    return network, box, value, proven(folder, write_onnx(network), prop, steps=0, finishing=0)


def spoiled(rng: random.Random, records: Records) -> Records:
    """Records with one to three changes at random."""
    found = copy.deepcopy(records)
    for _ in range(rng.randint(1, 3)):
        lists = [value for record in found for value in numbers(record)]
        leaves = [i for i, record in enumerate(found) if "leaf" in record or "split" in record]
        kind = rng.randrange(6)
        if kind < 3 and lists:
            chosen = rng.choice(lists)
            place = rng.randrange(len(chosen))
            value = chosen[place]
            steps = [1, -1, 2, -2, 1 << rng.randrange(40), -(1 << rng.randrange(40)), -2 * value, value]
            chosen[place] = value + rng.choice(steps[:4] if place == 0 else steps)
        elif kind == 3:
            one, other = rng.choice(leaves), rng.choice(leaves)
            found[one], found[other] = found[other], found[one]
        elif kind == 4:
            one, other = rng.choice(leaves), rng.choice(leaves)
            found[one] = copy.deepcopy(found[other])
        else:
            del found[rng.choice(leaves)]
    return found


def numbers(record: dict[str, Any]) -> list[list[int]]:
    """The lists of numbers in a record."""
    return [
        value for key, value in record.items() if key not in ("neurons", "part") and isinstance(value, list) and value
    ]


def test_nothing_false_is_accepted_of_forged_certificates() -> None:
    """Dense networks, all kinds of slopes and sizes; ``python -m tests.soundness.forged --kind dense`` tries more."""
    found = forged_dense.forge(draws(60), 11, each=25)
    assert not found.wrong, found.wrong
    assert found.ended["accepted unchanged"]
    assert found.ended["accepted"]


@cache
def ranges(folder: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """The least and the largest values of every activation's inputs over the box."""
    network, box, _, _ = small(folder)
    first, second = (network.nodes[: network.nodes[index].inputs[0] + 1] for index in network.activations)
    center, radius = (box.lower + box.upper) / 2, (box.upper - box.lower) / 2
    weight, bias = first[-1].weight.double().numpy(), first[-1].bias.double().numpy()
    middle, reach = weight @ center + bias, np.abs(weight) @ radius
    part = chain(second)
    sides = [[least(part, box, (row({j: s}, 0),)) for j in range(part.output_size)] for s in (1, -1)]
    return [(middle - reach, middle + reach), (np.array(sides[0]), -np.array(sides[1]))]


def test_no_certificate_of_something_false_is_accepted(folder: Path) -> None:
    """A proof of what barely holds, changed at random and said to prove what barely does not."""
    _, box, value, case = small(folder)
    rng = random.Random(0)
    for number in range(draws(200)):
        most = Fraction(value) + Fraction(1, 1 << rng.randint(1, 14))
        text = vnnlib_text(excluded(box, (row({0: 1, 1: -1}, most),))).encode()
        records = spoiled(rng, case.records) if number else copy.deepcopy(case.records)
        records[0]["property"] = hashlib.sha256(text).hexdigest()
        for record in records:
            if "part" in record:
                record["part"]["polytopes"][0][0]["most"] = str(most)
        try:
            said = checked(folder, replace(case, prop=text), written(records))
        except Refused:
            continue
        raise AssertionError(f"{number}: {said}")


def test_bounds_of_accepted_certificates_hold(folder: Path) -> None:
    """Whatever is changed: no bound of a neuron that is accepted excludes a value that the neuron takes."""
    case = small(folder)[3]
    rng = random.Random(1)
    accepted = 0
    for _ in range(draws(200)):
        records = spoiled(rng, case.records)
        try:
            checked(folder, case, written(records))
        except Refused:
            continue
        accepted += 1
        claims = [record for record in records if "activation" in record]
        for claim, (low, high) in zip(claims, ranges(folder), strict=True):
            lower, upper = (np.ldexp(np.array(claim[s][1:], float), claim[s][0]) for s in ("lower", "upper"))
            # The referee is a linear program in floating point.
            assert (lower <= low + 1e-7).all()
            assert (upper >= high - 1e-7).all()
    assert accepted
