"""Proofs as they are recorded: claims that the checker's floating point decides."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.asking import claims
from tests.support.certificates import Case, checked, excluded, records
from tests.support.solver_cases import ball, mlp, row
from verifiable_relu.network import read_onnx, write_onnx
from verifiable_relu.spec.property import Query
from verifiable_relu.spec.specfile import vnnlib_text
from verifiable_relu.trust.certificate_file import write_unsat
from verifiable_relu.verifiers.incomplete import Crown


@pytest.mark.parametrize("eps", [1e-7, 1e-5])
def test_claims_about_small_balls_of_large_numbers_take_no_exact_arithmetic(eps: float, tmp_path: Path) -> None:
    """Bounds are narrower there than the checker's floating point can tell, and are loosened by more than that."""
    rng = np.random.default_rng(0)
    network = mlp(rng, (40, 60, 60, 60, 2))
    data, center = write_onnx(network), rng.integers(-4000, 4000, 40) / 8
    outputs = network.to(torch.float64)(torch.from_numpy(center)[None]).flatten()
    most = Fraction(int(torch.floor(outputs[0] - outputs[1])) - 1)
    prop = excluded(ball(center, eps), (row({0: 1, 1: -1}, most),))
    (found,) = claims(Crown(record=True), [Query(read_onnx(data), prop)], 60.0)
    assert found.proof is not None
    text, made = vnnlib_text(prop).encode(), tmp_path / "made"
    write_unsat(made, data, text, [(0, found.proof)])
    said = checked(tmp_path, Case(data, text, records(made)), made.read_bytes())
    assert "; 0 of these inequalities in exact arithmetic" in said
