"""Heads that keep the order of outputs, in the checker of certificates: of no account where outputs are compared."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto, helper

from tests.support.asking import claims
from tests.support.certificates import Case, checked, excluded, one_point, question, records, tree_case, written
from tests.support.solver_cases import row
from verifiable_relu.campaign.certificates import Certificates, proofs
from verifiable_relu.check import BadInput, Refused
from verifiable_relu.network import read_onnx
from verifiable_relu.spec.property import Query
from verifiable_relu.spec.specfile import vnnlib_text
from verifiable_relu.trust.certificate_file import write_unsat
from verifiable_relu.verifiers.base import Outcome, Reason, Verdict
from verifiable_relu.verifiers.registry import make

HEADS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "softmax": [("Softmax", {"axis": -1})],
    "log softmax": [("LogSoftmax", {"axis": 1})],
    "sigmoid": [("Sigmoid", {})],
    "exponential of tanh": [("Tanh", {}), ("Exp", {})],
    "sigmoid of softmax, flattened": [("Softmax", {"axis": 1}), ("Flatten", {}), ("Sigmoid", {})],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certificates")


def under(network: bytes, *head: tuple[str, dict[str, Any]]) -> bytes:
    """The file of a network with further operators behind its output."""
    model = onnx.load_from_string(network)
    (output,) = model.graph.output
    name = output.name
    for at, (kind, attributes) in enumerate(head):
        model.graph.node.append(helper.make_node(kind, [name], [f"head{at}"], **attributes))
        name = f"head{at}"
    shape = [axis.dim_value for axis in output.type.tensor_type.shape.dim]
    model.graph.output.pop()
    model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
    return model.SerializeToString()


@cache
def body(folder: Path) -> tuple[bytes, Case]:
    """A network whose first output stays above the other, and the certificate of that for it with a sigmoid behind."""
    network, prop = question("mlp")
    (given,) = prop.unsafe[0]
    model = onnx.load_from_string(network)
    # What the row has on its right side is a part of the network now.
    model.graph.initializer.append(helper.make_tensor("shift", TensorProto.FLOAT, [1, 2], [-float(given.bound), 0.0]))
    model.graph.node.append(helper.make_node("Add", [model.graph.output[0].name, "shift"], ["shifted"]))
    model.graph.output[0].name = "shifted"
    network = model.SerializeToString()
    whole = under(network, ("Sigmoid", {}))
    comparison = excluded(prop.box, (row({0: 1, 1: -1}, 0),))
    text = vnnlib_text(comparison).encode()
    query = Query(read_onnx(whole), comparison)
    outcomes = claims(make("bab"), [query.without_head], 600.0)
    write_unsat(folder / "made", whole, text, list(proofs([query], outcomes, 60.0)))
    return network, Case(whole, text, records(folder / "made"))


def of(case: Case, network: bytes) -> Case:
    """The same certificate, said to be one of another network."""
    first = dict(case.records[0], network=hashlib.sha256(network).hexdigest())
    return replace(case, network=network, records=[first, *case.records[1:]])


@pytest.mark.parametrize("name", HEADS)
def test_comparisons_are_proven_before_the_head(name: str, folder: Path) -> None:
    network, case = body(folder)
    case = of(case, under(network, *HEADS[name]))
    assert checked(folder, case, written(case.records)).startswith("unsat: ")


def test_a_certificate_that_is_written_for_a_network_with_a_head_is_accepted(folder: Path) -> None:
    _, case = body(folder)
    assert checked(folder, case, written(case.records)).startswith("unsat: ")


@pytest.mark.parametrize(("kind", "reason"), [("Softmax", "nothing is known but"), ("Sigmoid", "activations are")])
def test_rows_that_do_not_compare_are_rows_of_the_head(kind: str, reason: str, folder: Path) -> None:
    """What is proven of the outputs before a head says nothing of their values behind it."""
    network, prop = question("mlp")
    assert prop.unsafe[0][0].bound
    case = of(tree_case(folder), under(network, (kind, {})))
    with pytest.raises(BadInput if kind == "Softmax" else Refused, match=reason):
        checked(folder, case, written(case.records))


@pytest.mark.parametrize(
    ("behind", "reason"),
    [
        ([("Softmax", {"axis": 0})], "over a part"),
        ([("Softmax", {"axis": 2})], "over a part"),
        ([("Neg", {})], "not known"),
        ([("LeakyRelu", {"alpha": -1.0})], "activations are expected"),
        ([("Softmax", {}), ("Relu", {})], "nothing is known but"),
        ([("Transpose", {"perm": [1, 0]}), ("Softmax", {"axis": 1})], "over a part|no ONNX model"),
    ],
)
def test_what_may_change_the_order_is_no_head(behind: list[Any], reason: str, folder: Path) -> None:
    network, case = body(folder)
    case = of(case, under(network, *behind))
    with pytest.raises((Refused, BadInput), match=reason):
        checked(folder, case, written(case.records))


def test_points_are_compared_exactly_before_the_head(folder: Path) -> None:
    """Behind a softmax the outputs at a point have no rational values, and yet they compare."""
    network, prop = question("mlp")
    whole = under(network, ("Softmax", {}))
    point = [Fraction(float(v)) for v in prop.box.lower]
    ended = []
    for sign in (1, -1):
        text = vnnlib_text(excluded(prop.box, (row({0: sign, 1: -sign}, 0),))).encode()
        case = Case(whole, text, one_point(whole, text, point))
        try:
            ended.append(checked(folder, case, written(case.records))[:5])
        except Refused as error:
            assert "in no disjunct" in str(error)
            ended.append("refused")
    assert sorted(ended) == ["refused", "sat: "]


@pytest.mark.parametrize(("head", "reason"), [("Softsign", "nothing is known but"), ("Sigmoid", "closely enough")])
def test_points_whose_outputs_the_checker_does_not_know_are_not_judged(head: str, reason: str, folder: Path) -> None:
    """So that certify keeps *sat*: with a function that the checker does not know, and within its own rounding."""
    network, prop = question("mlp")
    whole, point = under(network, (head, {})), [Fraction(float(v)) for v in prop.box.lower]
    x = torch.tensor([float(v) for v in point], dtype=torch.float64)
    net = read_onnx(whole).to(torch.float64)
    most = sum(Fraction(float(value)) for value in net(x.reshape(1, *net.input_shape)).flatten())
    unsafe = excluded(prop.box, (row({0: 1, 1: 1}, most),))
    text = vnnlib_text(unsafe).encode()
    case = Case(whole, text, one_point(whole, text, point))
    with pytest.raises(BadInput, match=reason):
        checked(folder, case, written(case.records))
    kept = Certificates(folder / head)
    (folder / f"{head}.onnx").write_bytes(whole)
    (folder / f"{head}.vnnlib").write_bytes(text)
    query = Query(read_onnx(whole), unsafe)
    outcome = Outcome(Verdict.SAT, Reason.REFUTED, "attack", witness=tuple(point))
    said = kept.keep(str(folder / f"{head}.onnx"), str(folder / f"{head}.vnnlib"), [query], [outcome], 1.0)
    assert not said.accepted and not said.refused and reason in said.detail
