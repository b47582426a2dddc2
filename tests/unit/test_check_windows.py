"""Certificates of networks with means over windows and transposed convolutions: forged ones are refused."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from tests.soundness import onnx_exact
from tests.support.certificates import Case, Records, checked, recorded, written
from tests.support.solver_cases import ball, row
from tests.unit.test_check_kinds import of_operators
from verifiable_relu.check import BadInput, Refused
from verifiable_relu.check.model import read_model
from verifiable_relu.network import read_onnx
from verifiable_relu.spec.property import Property, Query
from verifiable_relu.trust.certificate import Proof
from verifiable_relu.verifiers.auto import prove

CENTER = np.array([0.5, -0.25, 1.0, 0.75, -1.0, 0.25, 0.5, 1.5]).reshape(1, 2, 2, 2)


def network() -> bytes:
    rng = np.random.default_rng(3)
    given = {"v": rng.normal(size=(2, 2, 3, 2)), "b": rng.normal(size=2), "w": rng.normal(size=(2, 1))}
    given |= {"c": rng.normal(size=(2, 2, 2, 2)), "d": np.ones(2)}
    return of_operators(
        helper.make_node(
            "ConvTranspose", ["x", "v", "b"], ["z"],
            strides=[2, 1], dilations=[1, 2], pads=[1, 0, 0, 1], output_padding=[1, 0], group=1,
        ),
        helper.make_node("Relu", ["z"], ["r"]),
        helper.make_node(
            "AveragePool", ["r"], ["p"],
            kernel_shape=[3, 2], strides=[2, 2], pads=[1, 0, 0, 1], count_include_pad=1, ceil_mode=1,
        ),
        helper.make_node("Conv", ["p", "c", "d"], ["q"], pads=[0, 0, 1, 1]),
        helper.make_node("Relu", ["q"], ["s"]),
        helper.make_node("GlobalAveragePool", ["s"], ["m"]),
        helper.make_node("Flatten", ["m"], ["f"]),
        helper.make_node("Gemm", ["f", "w"], ["y"]),
        inputs=(1, 2, 2, 2),
        **given,
    )  # fmt: skip


def at_center(data: bytes) -> Fraction:
    """The output at the center of the box, exactly, by an evaluator of its own."""
    return Fraction(onnx_exact.exact(onnx.load_from_string(data), {"x": CENTER.astype(np.float32)})["y"].ravel()[0])


def box_and_range() -> tuple[Any, Fraction, Fraction]:
    value = at_center(network())
    return ball(CENTER.ravel(), 1 / 64), value - Fraction(1, 8), value + Fraction(1, 8)


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """The output stays near what it is at the center."""
    box, low, high = box_and_range()
    low, high = (Fraction(round(end * 2**20), 2**20) for end in (low, high))
    prop = Property(box, ((row({0: 1.0}, low),), (row({0: -1.0}, -high),)))
    data = network()
    proof = prove(Query(read_onnx(data), prop), 20.0)
    assert isinstance(proof, Proof)
    return recorded(tmp_path_factory.mktemp("windows"), data, prop, proof)


def changed(name: str, value: Any, kind: str, at: int = 0) -> Callable[[onnx.ModelProto], None]:
    """Another value of an attribute."""

    def change(model: onnx.ModelProto) -> None:
        node = [n for n in model.graph.node if n.op_type == kind][at]
        kept = [a for a in node.attribute if a.name != name]
        del node.attribute[:]
        node.attribute.extend([*kept, helper.make_attribute(name, value)])

    return change


def weights(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[onnx.ModelProto], None]:
    def put(model: onnx.ModelProto) -> None:
        (stored,) = [t for t in model.graph.initializer if t.name == name]
        stored.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(change(numpy_helper.to_array(stored))), name))

    return put


def moved(array: np.ndarray) -> np.ndarray:
    array = array.copy()
    array.flat[0] += 1
    return array


NETWORKS: dict[str, Callable[[onnx.ModelProto], None]] = {
    "padding that no longer counts": changed("count_include_pad", 0, "AveragePool"),
    "windows of the other shape": changed("kernel_shape", [2, 2], "AveragePool"),
    "padding of a mean on the other side": changed("pads", [0, 1, 1, 0], "AveragePool"),
    "windows that step elsewhere": changed("strides", [3, 2], "AveragePool"),
    "another dilation": changed("dilations", [2, 2], "ConvTranspose"),
    "another output padding": changed("output_padding", [0, 1], "ConvTranspose"),
    "padding of a transposed convolution on the other side": changed("pads", [0, 1, 1, 0], "ConvTranspose"),
    "a weight": weights("v", moved),
    "a mirrored kernel": weights("v", lambda v: v[:, :, ::-1, ::-1]),
    "channels exchanged": weights("v", lambda v: v.swapaxes(0, 1)),
    "a bias": weights("b", moved),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_certificate_says_nothing_of_a_network_with_another_operator(name: str, tmp_path: Path, given: Case) -> None:
    """With the digest of the changed file, of which the claim is false."""
    assert "maps no point" in checked(tmp_path, given, written(given.records))
    model = onnx.load_from_string(given.network)
    NETWORKS[name](model)
    data = model.SerializeToString()
    _, low, high = box_and_range()
    assert not low < at_center(data) < high
    forged = copy.deepcopy(given.records)
    forged[0]["network"] = hashlib.sha256(data).hexdigest()
    with pytest.raises((Refused, BadInput)):
        checked(tmp_path, given, written(forged), network=data)


def a_bound(side: str) -> Callable[[Records], None]:
    """Neurons are said to be on one side of a little more than they are."""

    def change(records: Records) -> None:
        (record, *_) = [r for r in records if r.get("activation") == "s"]
        exponent, *values = record[side]
        step = 2 ** max(0, -6 - exponent)
        record[side] = [exponent, *(v + step if side == "lower" else v - step for v in values)]

    return change


def a_claim(records: Records) -> None:
    (part,) = [r["part"] for r in records if "part" in r]
    part["polytopes"][0][0]["most"] = "1000"


FORGED: dict[str, Callable[[Records], None]] = {
    "lower bounds": a_bound("lower"),
    "upper bounds": a_bound("upper"),
    "a claim": a_claim,
}


@pytest.mark.parametrize("name", FORGED)
def test_what_is_claimed_beyond_what_is_proven_is_refused(name: str, tmp_path: Path, given: Case) -> None:
    forged = copy.deepcopy(given.records)
    FORGED[name](forged)
    with pytest.raises(Refused):
        checked(tmp_path, given, written(forged))


def of_window(kind: str, **attributes: Any) -> bytes:
    given = {"w": np.ones((2, 1, 2, 2))} if kind == "ConvTranspose" else {"kernel_shape": [2, 2]}
    weight = {name: value for name, value in given.items() if name == "w"}
    given = {name: value for name, value in given.items() if name != "w"} | attributes
    return of_operators(helper.make_node(kind, ["x", *weight], ["y"], **given), inputs=(1, 2, 4, 4), axes=4, **weight)


REFUSED = {
    "the same size": (of_window("ConvTranspose", auto_pad="SAME_UPPER", strides=[2, 2]), "not given"),
    "a size that is given": (of_window("ConvTranspose", output_shape=[4, 4]), "not given"),
    "pads less than none": (of_window("ConvTranspose", pads=[-1, 0, 0, 0]), "malformed"),
    "groups of no channels": (of_window("ConvTranspose", group=3), "do not fit"),
    "a window of one axis": (of_window("AveragePool", kernel_shape=[2]), "expected"),
    "a window of padding": (of_window("AveragePool", pads=[2, 0, 0, 0]), "as wide as the window"),
    "two ways to pad": (of_window("AveragePool", auto_pad="SAME_UPPER", ceil_mode=1), "ceil_mode"),
    "two images": (
        of_operators(helper.make_node("GlobalAveragePool", ["x"], ["y"]), inputs=(2, 1, 2, 2), axes=4), "one sample",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_windows_that_are_not_known_are_refused_by_name(name: str) -> None:
    data, said = REFUSED[name]
    with pytest.raises(BadInput, match=said):
        read_model(data)
