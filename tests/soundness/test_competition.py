"""Verdicts of ``auto`` on rows of the verification competition never contradict what is known of them."""

from __future__ import annotations

import csv
from fractions import Fraction
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.support.asking import claims
from tests.support.exact import violated
from verifiable_relu.execution.replay import replay
from verifiable_relu.files import on_disk
from verifiable_relu.ir.network import Network
from verifiable_relu.readers import read_onnx
from verifiable_relu.search.outcomes import Verdict
from verifiable_relu.search.registry import make
from verifiable_relu.spec.find import read_instances
from verifiable_relu.spec.property import Query
from verifiable_relu.spec.read import read_vnnlib

RL = tuple(range(296))
PARTS: tuple[tuple[str, tuple[int, ...], float, float], ...] = (
    ("test", tuple(range(5)), 20, 1.0),
    *(("rl_benchmarks", RL[start : start + 74], 10, 0.95) for start in range(0, 296, 74)),
    # Rows spread over the cheaper half of those known to be sat and of those known to be unsat.
    ("collins_rul_cnn", (5, 6, 9, 10, 11, 12, 13, 14, 16, 22), 20, 0.9),
    ("collins_rul_cnn", (25, 26, 30, 31, 43, 45, 51, 54, 55, 61), 20, 0.9),
    ("acasxu", (56, 59, 66, 67, 70, 77, 82, 96, 98, 107), 10, 0.5),
    ("acasxu", (121, 129, 133, 141, 151, 156, 159, 160, 175, 176), 10, 0.5),
    ("safenlp", (43, 159, 178, 209, 226, 229, 347, 415, 456, 636), 10, 0.9),
    ("safenlp", (664, 706, 741, 901, 903, 906, 909, 931, 1042, 1077), 10, 0.9),
)
"""Family, rows of its instances.csv, seconds for each, and the share of them that must be decided."""


@cache
def network(path: Path) -> Network:
    return read_onnx(on_disk(path))


def known(folder: Path) -> list[Verdict | None]:
    """Each row's verdict, where the competition's tools agree or a counterexample was replayed."""
    with (folder / "truth.csv").open(newline="") as file:
        return [
            Verdict(row["consensus_verdict"])
            if row["consensus_verdict"] in ("sat", "unsat")
            and (row["ce_check"] in ("strict", "tol1e-4") or not row["note"])
            else None
            for row in csv.DictReader(file)
        ]


@pytest.mark.parametrize(
    ("family", "rows", "seconds", "share"), PARTS, ids=[f"{family}-{rows[0]}" for family, rows, *_ in PARTS]
)
def test_no_verdict_contradicts_the_competition(
    family: str, rows: tuple[int, ...], seconds: float, share: float, data: Path
) -> None:
    folder = data / "vnncomp" / family
    if not folder.is_dir():
        pytest.skip(f"needs the benchmark {family} of the competition")
    instances, truth = read_instances(folder / "instances.csv"), known(folder)
    assert len(instances) == len(truth)
    queries: list[Query] = []
    owner: list[int] = []
    for position, row in enumerate(rows):
        spec = read_vnnlib(on_disk(instances[row].vnnlib))
        for prop in spec.properties:
            queries.append(Query(network(instances[row].onnx), prop))
            owner.append(position)
    outcomes = claims(make("auto"), queries, [seconds] * len(rows), owner)
    wrong, decided = [], 0
    for position, row in enumerate(rows):
        own = [i for i, position_of in enumerate(owner) if position_of == position]
        verdicts = {outcomes[i].verdict for i in own}
        for i in own:
            if outcomes[i].verdict is Verdict.SAT:
                witness = outcomes[i].witness
                assert witness is not None and queries[i].property.box.contains(witness)
                y = replay(queries[i].network, np.array([float(v) for v in witness], dtype=np.float32))
                assert violated(queries[i].property, [Fraction(float(v)) for v in y]), f"row {row}: not replayed"
        said = Verdict.SAT if Verdict.SAT in verdicts else Verdict.UNSAT if verdicts == {Verdict.UNSAT} else None
        decided += said is not None
        if None not in (said, truth[row]) and said != truth[row]:
            wrong.append(f"row {row}: {said}, known to be {truth[row]}")
    assert wrong == []
    assert decided >= share * len(rows), f"only {decided} of {len(rows)} rows are decided"
