"""Numbers that are derived from a network's own, at all scales: verdicts against rational arithmetic."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from tests.support.draws import draws
from verifiable_relu import verify
from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.ir.linear import Diagonal
from verifiable_relu.ir.network import Affine, Elementwise, Network, Product
from verifiable_relu.readers import read_onnx
from verifiable_relu.readers.derived import Derived, cast, hardness, quotient, rounded
from verifiable_relu.search.outcomes import Verdict

from .limited import answers
from .magnitudes import STEPS, magnitudes
from .test_kinds import OWN

CASES = draws(216)

WRONG = {
    "bn_underflow": "sat",
    "constfold_round_main": "sat",
    "constfold_underflow_main": "sat",
    "gelu_outer_underflow": "sat",
    "underflow_5013": "sat",
    "underflow_5017": "sat",
    "underflow_5064": "sat",
}
"""Files that were once answered *unsat*, and what is right."""


def test_no_verdict_contradicts_rational_arithmetic_at_any_scale() -> None:
    outcomes = Counter[str]()
    report = magnitudes(dict.fromkeys(OWN, 0.1), seed=1, count=CASES, outcomes=outcomes)
    assert report.problems == []
    for kind in STEPS:
        assert outcomes[f"read: {kind}"] >= CASES // 54, kind
    for method in ("bab", "milp", "smt-exact", "auto"):
        assert report.decided[method, Verdict.UNSAT] and report.decided[method, Verdict.SAT], method


def test_files_that_were_answered_wrongly_are_refused_or_open(data: Path) -> None:
    folder = data / "faults" / "magnitudes"
    if not folder.is_dir():
        pytest.skip(f"needs {folder}")
    commands = [
        [
            "--net",
            str(folder / f"{n}.net.onnx"),
            "--spec",
            str(folder / f"{n}.prop.vnnlib"),
            "--timeout",
            "3",
            "--quiet",
        ]
        for n in WRONG
    ]
    for name, one in zip(WRONG, answers(commands), strict=True):
        if one.status == 2:
            assert len(one.stderr.splitlines()) == 1, one
        else:
            assert one.verdict in (WRONG[name], "unknown", "timed-out"), one


def made(nodes: list[onnx.NodeProto], constants: dict[str, np.ndarray], kind: int = TensorProto.FLOAT) -> Network:
    """A network of one input X and one output Y, (1, 1) each."""
    graph = helper.make_graph(
        nodes,
        "derived",
        [helper.make_tensor_value_info("X", kind, [1, 1])],
        [helper.make_tensor_value_info("Y", kind, [1, 1])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    return read_onnx(model.SerializeToString())


def node(operator: str, *names: str) -> onnx.NodeProto:
    return helper.make_node(operator, names[:-1], names[-1:])


def test_constants_are_folded_without_rounding() -> None:
    third = made(
        [node("Div", "one", "three", "c"), node("Mul", "X", "c", "Y")],
        {"one": np.float32([[1]]), "three": np.float32([[3]])},
    )
    (scale,) = third.ops[1:]
    assert isinstance(scale, Affine) and isinstance(scale.map, Diagonal)
    stored = Fraction(float(scale.map.weight))
    assert 0 < abs(Fraction(1, 3) - stored) <= Fraction(scale.weight_error) * stored
    # What a sum keeps in float64, but not in the file's float32, is exact.
    tenth = made(
        [node("Add", "big", "small", "c"), node("Add", "X", "c", "Y")],
        {"big": np.float32([[1024]]), "small": np.float32([[2.0**-20]])},
    )
    (shift,) = tenth.ops[1:]
    assert isinstance(shift, Affine) and shift.bias is not None and shift.is_exact
    assert float(shift.bias) == 1024 + 2.0**-20


def test_a_constant_that_no_float64_number_is_decides_nothing_but_weights() -> None:
    constants = {"one": np.float32(1), "three": np.float32(3)}
    with pytest.raises(UnsupportedError, match="float64 cannot hold"):
        made([node("Div", "one", "three", "c"), node("Clip", "X", "c", "Y")], constants)
    with pytest.raises(UnsupportedError, match="not supported"):
        made([node("Sin", "one", "c"), node("Mul", "X", "c", "Y")], constants)


def test_what_rounding_may_have_lost_altogether_is_refused() -> None:
    tiny = Derived(np.array([Fraction(1, 3 * 2**1025)], dtype=object))
    huge = Derived(np.array([Fraction(2**1027, 3)], dtype=object))
    for numbers in (tiny, huge):
        with pytest.raises(UnsupportedError, match="range of float64"):
            rounded(numbers)
    for divisor in (1.7e308, 1e-310):
        with pytest.raises(UnsupportedError, match="range of float64"):
            quotient(1.0, torch.tensor(divisor, dtype=torch.float64))
    with pytest.raises(InputError, match="zero"):
        quotient(1.0, torch.zeros(1))


@pytest.mark.parametrize("value", [1 + 2**-24, 1 + 2**-24 + 2**-60, 2**-149 * 1.5, 3.4028235677973366e38, -(2**-150)])
def test_a_cast_rounds_once(value: float) -> None:
    exact = Fraction(value)
    found = cast(Derived(np.array([exact], dtype=object)), np.dtype(np.float32))
    with np.errstate(over="ignore"):
        assert found[0] == np.float32(value)
    # Just above the halfway point float64 does not see what decides.
    beyond = Fraction(1) + Fraction(1, 2**24) + Fraction(1, 2**200)
    assert cast(Derived(np.array([beyond], dtype=object)), np.dtype(np.float32))[0] == np.float32(1 + 2**-23)


def kinds(network: Network) -> list[str]:
    return [op.function.kind if isinstance(op, Elementwise) else type(op).__name__ for op in network.ops[1:]]


def test_lambda_gelu_is_what_divides_by_the_factor_alone() -> None:
    lam, reciprocal = np.array(3.0), np.array(1 / 3.0)
    nodes = [node("Mul", "X", "lam", "a"), node("Gelu", "a", "b")]
    divided = made([*nodes, node("Div", "b", "lam", "Y")], {"lam": lam}, TensorProto.DOUBLE)
    assert kinds(divided) == ["GELU"]
    times = made([*nodes, node("Mul", "b", "r", "Y")], {"lam": lam, "r": reciprocal}, TensorProto.DOUBLE)
    assert kinds(times) == ["GELU", "Affine", "Affine"]


def test_a_spelled_gelu_whose_factor_is_no_number_stays_a_product() -> None:
    nodes = [
        *(node("Erf", "X", "e"), node("Add", "e", "one", "g"), node("Mul", "X", "t", "a")),
        *(node("Mul", "a", "t", "b"), node("Mul", "b", "g", "c"), node("Mul", "c", "u", "Y")),
    ]
    constants = {"one": np.array(1.0), "t": np.array(1e-200), "u": np.array(1e200)}
    assert any(isinstance(op, Product) for op in made(nodes, constants, TensorProto.DOUBLE).ops)
    assert hardness(Fraction(1, 2), Fraction(1, 2**40)) is None


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_a_normalisation_is_taken_exactly(kind: torch.dtype) -> None:
    net = nn.Linear(1, 2).to(kind)
    with torch.no_grad():
        net.weight[:], net.bias[:] = torch.tensor([[1.0], [0.0]]), torch.tensor([0.0, 2.0])
    reach = 2 * Fraction(0.3) - Fraction(1, 2)
    image = np.array([[0.5]])

    def said(eps: Fraction, seconds: float = 5.0) -> Verdict:
        return verify(net, image, [1], eps, timeout=seconds, normalize=(0, 0.3))[0].verdict

    # Here nothing is decided, and a wrong proof would take no time.
    assert said(reach, 0.3) is not Verdict.UNSAT
    assert said(reach - Fraction(1, 10**10)) is Verdict.UNSAT
    assert said(reach + Fraction(1, 10**10), 0.3) is not Verdict.UNSAT
    assert said(reach + Fraction(1, 10**3)) is Verdict.SAT


class Computing(nn.Module):
    """A module that makes a constant of its parameters."""

    def __init__(self, rounds: bool) -> None:
        super().__init__()
        self.large, self.one = nn.Parameter(torch.tensor(2.0**24)), nn.Parameter(torch.ones(()))
        self.last, self.rounds = nn.Linear(1, 2), rounds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(x + ((self.large + self.one) - self.large if self.rounds else self.one * 2))
        return found


def test_a_module_that_rounds_constants_is_refused() -> None:
    image = np.array([[0.5]])
    with pytest.raises(UnsupportedError, match="computed by the module"):
        verify(Computing(True), image, [0], 0.1)
    assert verify(Computing(False), image, [0], 0.0, timeout=5)[0].verdict is not Verdict.UNKNOWN


def test_a_batch_normalisation_of_a_module_is_known_up_to_rounding() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2)).eval()
    assert verify(net, np.array([[0.5, 0.2]]), [0], 0.0, timeout=5)[0].verdict is not Verdict.UNKNOWN
    with torch.no_grad():
        net[1].running_var.fill_(1e38)
        net[1].weight.fill_(1e-38)
    assert verify(net, np.array([[0.5, 0.2]]), [0], 0.0, timeout=5)[0].verdict is not None
