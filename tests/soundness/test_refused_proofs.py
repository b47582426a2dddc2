"""What the library proves with a fault in it, and records, is refused by the checker, which shares no code with it."""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.asking import claims
from tests.support.certificates import Case, checked, excluded, over_planes, records
from tests.support.solver_cases import ball, mlp, row
from verifiable_relu.check import Refused
from verifiable_relu.network import read_onnx, write_onnx
from verifiable_relu.spec.property import Property, Query
from verifiable_relu.spec.specfile import vnnlib_text
from verifiable_relu.trust.certificate_file import write_unsat
from verifiable_relu.verifiers.bab import Bab
from verifiable_relu.verifiers.bab.tree import Branching
from verifiable_relu.verifiers.base import Verdict
from verifiable_relu.verifiers.batch import Verifier
from verifiable_relu.verifiers.incomplete import Crown
from verifiable_relu.verifiers.split import InputSplit

from .faults import FAULTS

SEARCH = Branching(steps=0, finishing=0)
METHODS: dict[str, Verifier] = {
    "bab": Bab(search=SEARCH, record=True),
    "split": InputSplit(batch=4, record=True),
    "crown": Crown(record=True),
}

RECORDED = (
    ("lower and upper swapped in the image of ReLU", "relu", "bab"),
    ("a bias dropped in linear bounds", "relu", "bab"),
    ("a bias dropped in interval bounds", "relu", "crown"),
    ("wrong corner when a linear bound meets the box", "relu", "crown"),
    ("rows' own lower lines taken for those of all rows at the point", "relu", "bab"),
    ("stale intermediate bound in a relaxation: that of the batch's first box", "leaky", "split"),
    ("a bias dropped where rows are folded", "relu", "bab"),
)
"""Faults that make a method prove what is not so, and record it: fault, kind of network, method."""


@cache
def question(kind: str) -> tuple[bytes, Property]:
    """A network, and a property that the outputs at some point of the box violate by next to nothing."""
    rng = np.random.default_rng({"relu": 5, "leaky": 3, "wide": 3}[kind])
    network = mlp(rng, (3, 12, 2) if kind == "wide" else (3, 4, 4, 2), leaky=kind == "leaky")
    box = ball(np.round(rng.normal(size=3) * 8) / 8, 1.0)
    # The least values of small networks are often at corners.
    shares = np.concatenate([rng.uniform(size=(5_000, 3)), rng.integers(0, 2, (5_000, 3))])
    outputs = network(torch.from_numpy(box.lower + shares * (box.upper - box.lower)))
    value = float((outputs[:, 0] - outputs[:, 1]).min())
    return write_onnx(network), excluded(box, (row({0: 1, 1: -1}, Fraction(int(np.floor(value * 4096)) + 5, 4096)),))


def test_planes_that_are_not_above_their_neurons_prove_nothing_to_the_checker(tmp_path: Path) -> None:
    """The library takes constants of planes that are too small, and the checker computes its own."""
    network, prop = question("wide")
    name = "hull cuts below their neurons at some points"
    (fault,) = (fault for fault in FAULTS if fault.name == name)
    with fault.applied():
        proof = over_planes(Query(read_onnx(network), prop), SEARCH)
    text = vnnlib_text(prop).encode()
    write_unsat(tmp_path / "made", network, text, [(0, proof)])
    case = Case(network, text, records(tmp_path / "made"))
    with pytest.raises(Refused, match="not excluded"):
        checked(tmp_path, case, (tmp_path / "made").read_bytes())


@pytest.mark.parametrize(("name", "kind", "method"), RECORDED)
def test_what_is_proved_with_a_fault_is_refused(name: str, kind: str, method: str, tmp_path: Path) -> None:
    network, prop = question(kind)
    text = vnnlib_text(prop).encode()
    (fault,) = (fault for fault in FAULTS if fault.name == name)
    with fault.applied():
        (outcome,) = claims(METHODS[method], [Query(read_onnx(network), prop)], 60.0)
    assert outcome.verdict is Verdict.UNSAT, "the fault shows in another network or method"
    assert outcome.proof is not None
    write_unsat(tmp_path / "made", network, text, [(0, outcome.proof)])
    case = Case(network, text, records(tmp_path / "made"))
    with pytest.raises(Refused):
        checked(tmp_path, case, (tmp_path / "made").read_bytes())
