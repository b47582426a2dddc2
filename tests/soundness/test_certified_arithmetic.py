"""Certificates about an arithmetic: the checker's own model of rounding holds every evaluation, and forgeries fail."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

from tests.soundness.test_arithmetic import (
    RESULTS,
    absorbed,
    beyond,
    box_of,
    evaluated,
    flushed,
    gemm,
    planted,
    residual,
    runs,
    written,
)
from tests.support.asking import claims
from tests.support.certificates import Case, checked, recorded, records
from tests.support.certificates import written as certificate
from tests.support.processes import run
from verifiable_relu.check import BadInput, Refused, check, running
from verifiable_relu.check.arithmetic import ARITHMETICS, RoundingModel
from verifiable_relu.check.graph import ActivationNode, SmoothNode
from verifiable_relu.check.lines import CheckedRelaxation
from verifiable_relu.check.model import read_model
from verifiable_relu.errors import InputError
from verifiable_relu.network import deployed, read_onnx
from verifiable_relu.rounding import ARITHMETICS as OURS
from verifiable_relu.spec.property import Property, Query
from verifiable_relu.spec.specfile import vnnlib_text
from verifiable_relu.trust.certificate import Proof
from verifiable_relu.trust.certificate_file import write_unsat
from verifiable_relu.verifiers.auto import prove, recording
from verifiable_relu.verifiers.bab import Bab
from verifiable_relu.verifiers.base import Verdict
from verifiable_relu.verifiers.split import InputSplit

Rng = np.random.Generator


def convolved(rng: Rng, leaky: bool = True) -> bytes:
    """A convolution, a batch normalisation, a division and a dense layer, whose numbers are of very different sizes."""
    kernel = (rng.normal(size=(2, 1, 2, 2)) * 4.0 ** rng.integers(-6, 7, (2, 1, 2, 2))).astype(np.float32)
    normal = [helper.make_node("BatchNormalization", ["h", "s", "b", "m", "q"], ["n"])]
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["h"]),
        *(normal if leaky else ()),
        helper.make_node("LeakyRelu", ["n"], ["r"], alpha=0.1) if leaky else helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("Flatten", ["r"], ["f"]),
        gemm("f", "y" if not leaky else "g", "v", "d"),
        *([helper.make_node("Div", ["g", "t"], ["y"])] if leaky else ()),
    ]
    v = (rng.normal(size=(2, 8)) * 4.0 ** rng.integers(-6, 7, (2, 8))).astype(np.float32)
    parts = {name: rng.normal(size=2) for name in ("b", "d", "s", "m")}
    return written(nodes, 9, (1, 3, 3), w=kernel, v=v, q=rng.random(2) + 0.1, t=[3], **parts)


def near(rng: Rng) -> bytes:
    """A difference of the input from a number."""
    return written([helper.make_node("Sub", ["x", "c"], ["y"])], 1, c=rng.normal(size=1))


KINDS = (absorbed, flushed, planted, convolved, residual)


def drawn(kind: Callable[..., bytes], rng: Rng, arithmetic: str) -> bytes:
    return convolved(rng, arithmetic not in RESULTS) if kind is convolved else kind(rng)


def enclosed(data: bytes, low: np.ndarray, high: np.ndarray, arithmetic: str) -> tuple[np.ndarray, np.ndarray]:
    """The checker's bounds of all outputs over a box, by intervals alone."""
    with np.errstate(over="ignore"):
        graph = read_model(data, ARITHMETICS[arithmetic])
    found = CheckedRelaxation(graph, low.astype(float), high.astype(float))
    for number in graph.activations:
        node = graph.nodes[number]
        assert isinstance(node, ActivationNode | SmoothNode)
        found.claim(number, *found.ends(node.source))
    return found.ends(graph.output)


def outside(data: bytes, arithmetic: str, rng: Rng, count: int) -> tuple[int, int]:
    """How many evaluations at points the checker's bounds at these points hold, and how many they do not hold."""
    within, beyond_ = 0, 0
    low, high = box_of(data, rng)
    for _ in range(count):
        point = np.clip((low + rng.random(low.size) * (high - low)).astype(np.float32), low, high)
        with np.errstate(all="ignore"):
            bottom, top = enclosed(data, point, point, arithmetic)
            y = evaluated(data, point, arithmetic, rng)
        fits = bool(((bottom <= y) & (y <= top)).all()) or not np.isfinite(y).all()
        within, beyond_ = within + fits, beyond_ + (not fits)
    return within, beyond_


@pytest.mark.parametrize(
    ("kind", "arithmetic"),
    # In float16 the numbers of the others are infinite.
    [(kind, name) for name in ARITHMETICS for kind in (KINDS if name != "float16" else KINDS[2:])],
)
def test_what_an_evaluation_computes_is_within_the_checkers_bounds(kind: Callable[..., bytes], arithmetic: str) -> None:
    rng, seen = np.random.default_rng([KINDS.index(kind), *arithmetic.encode()]), 0
    for _ in range(30):
        if seen >= 48:
            break
        try:
            within, beyond_ = outside(drawn(kind, rng, arithmetic), arithmetic, rng, 12)
        except BadInput:
            continue
        assert not beyond_
        seen += within
    assert seen >= 48


@pytest.mark.parametrize("fault", ["unit", "terms", "lost", "result", "source"])
def test_an_error_that_is_left_out_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above finds a checker whose model lacks a part."""
    name, kinds = ("bfloat16", (near, residual)) if fault in ("result", "source") else ("float32", KINDS)
    known = ARITHMETICS[name]
    if fault == "unit":
        changed: Any = dataclasses.replace(known, unit=known.unit / 64)
    elif fault == "result":
        changed = dataclasses.replace(known, result=known.result / 64)
    else:
        changed = known
    monkeypatch.setitem(ARITHMETICS, name, changed)
    if fault == "terms":
        monkeypatch.setattr(running.Running, "_charge", lambda *_: None)
    elif fault == "lost":
        monkeypatch.setattr(RoundingModel, "lost", lambda self, terms, row, small=False: np.zeros_like(row))
    elif fault == "source":
        monkeypatch.setattr(running.Running, "begun", lambda self, x: (self._count(False), x)[1])
    rng, caught = np.random.default_rng(9), 0
    for case in range(40):
        if caught:
            break
        try:
            caught += outside(drawn(kinds[case % len(kinds)], rng, name), name, rng, 12)[1]
        except BadInput:
            continue
    assert caught


def made(folder: Path, data: bytes, arithmetic: str, seconds: float = 10.0, method: Any = None) -> Case:
    """A certificate that an output does not go far beyond what evaluations reach."""
    rng = np.random.default_rng(1)
    low, high = box_of(data, rng)
    bottom, top = (float(end[0]) for end in enclosed(data, low, high, arithmetic))
    prop = beyond(low, high, 1, top + (top - bottom) + 1e-3)
    query = Query(deployed(read_onnx(data), arithmetic), prop)
    if method is None:
        proof = prove(query, seconds)
    else:
        (outcome,) = claims(recording(method), [query], seconds)
        assert outcome.verdict is Verdict.UNSAT, outcome
        proof = outcome.proof
    assert proof is not None
    text = text_of(prop, data)
    write_unsat(folder / "made", data, text, [(0, proof)], arithmetic=arithmetic)
    return Case(data, text, records(folder / "made"))


def smooth(rng: Rng, kind: str) -> bytes:
    nodes = [gemm("x", "h", "w", "b"), helper.make_node(kind, ["h"], ["r"]), gemm("r", "y", "v", "d")]
    w, v = rng.normal(size=(3, 2)), rng.normal(size=(2, 3))
    return written(nodes, 2, w=w, b=rng.normal(size=3), v=v, d=rng.normal(size=2))


def pooled(rng: Rng) -> bytes:
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["h"]),
        helper.make_node("MaxPool", ["h"], ["p"], kernel_shape=[2, 2]),
        helper.make_node("Flatten", ["p"], ["f"]),
        gemm("f", "g", "v", "d"),
        helper.make_node("PRelu", ["g", "s"], ["y"]),
    ]
    w, v = rng.normal(size=(2, 1, 2, 2)), rng.normal(size=(2, 2))
    return written(nodes, 9, (1, 3, 3), w=w, b=rng.normal(size=2), v=v, d=rng.normal(size=2), s=rng.random(2))


def averaged(rng: Rng) -> bytes:
    """A transposed convolution, means over windows of which the padding counts in some, and over channels."""
    nodes = [
        helper.make_node("ConvTranspose", ["x", "w", "b"], ["h"], strides=[2, 2], pads=[0, 1, 0, 0]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node(
            "AveragePool", ["r"], ["p"], kernel_shape=[3, 2], strides=[2, 1], pads=[1, 0, 0, 1], count_include_pad=1
        ),
        helper.make_node("LeakyRelu", ["p"], ["s"], alpha=0.1),
        helper.make_node("GlobalAveragePool", ["s"], ["m"]),
        helper.make_node("Flatten", ["m"], ["f"]),
        gemm("f", "y", "v", "d"),
    ]
    w, v = rng.normal(size=(1, 2, 2, 2)), rng.normal(size=(2, 2))
    return written(nodes, 9, (1, 3, 3), w=w, b=rng.normal(size=2), v=v, d=rng.normal(size=2))


def text_of(prop: Property, data: bytes) -> bytes:
    """The property's file, in which all outputs of the network are declared."""
    text = vnnlib_text(prop)
    more = range(prop.output_size, read_onnx(data).output_size)
    return ("".join(f"(declare-const Y_{i} Real)\n" for i in more) + text).encode()


def of(name: str, rng: Rng, arithmetic: str) -> bytes:
    kinds: dict[str, Callable[..., bytes]] = {kind.__name__: kind for kind in (*KINDS, near)}
    windowed = {"averaged": averaged, "pooled": pooled}
    if name in windowed:
        return windowed[name](rng)
    return drawn(kinds[name], rng, arithmetic) if name in kinds else smooth(rng, name)


@pytest.mark.combined
@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize("name", ["near", "planted", "convolved", "residual", "Sigmoid", "Tanh", "Gelu", "pooled"])
def test_a_proof_has_a_certificate_that_is_accepted(name: str, arithmetic: str, tmp_path: Path) -> None:
    for seed in range(20):
        data = of(name, np.random.default_rng(seed), arithmetic)
        try:
            case = made(tmp_path, data, arithmetic)
            said = checked(tmp_path, case, certificate(case.records))
        except (BadInput, InputError, Refused) as error:
            # Some of their numbers are large.
            assert arithmetic == "float16" and ("overflow" in str(error) or "finite" in str(error)), error
            continue
        break
    assert f"no evaluation of the network in {arithmetic}" in said


@pytest.mark.parametrize("arithmetic", ["float32", "tf32"])
def test_means_and_transposed_convolutions_that_run_have_certificates(arithmetic: str, tmp_path: Path) -> None:
    data = averaged(np.random.default_rng(0))
    case = made(tmp_path, data, arithmetic)
    assert f"no evaluation of the network in {arithmetic}" in checked(tmp_path, case, certificate(case.records))
    with pytest.raises(BadInput, match="computed from stored ones"):
        read_model(data, ARITHMETICS["bfloat16"])
    rng = np.random.default_rng(5)
    low, high = box_of(data, rng)
    for _ in range(12):
        point = np.clip((low + rng.random(low.size) * (high - low)).astype(np.float32), low, high)
        bottom, top = enclosed(data, point, point, arithmetic)
        y = runs(data, point, point, arithmetic, rng, 4)
        assert ((bottom[0] <= y) & (y <= top[0])).all()


@pytest.mark.parametrize("method", [Bab(), InputSplit()])
def test_branch_and_bound_has_certificates_of_an_arithmetic(method: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    w, v = rng.normal(size=(8, 3)), rng.normal(size=(2, 8))
    nodes = [gemm("x", "h", "w", "b"), helper.make_node("Relu", ["h"], ["r"]), gemm("r", "y", "v", "d")]
    data = written(nodes, 3, w=w, b=rng.normal(size=8), v=v, d=rng.normal(size=2))
    low, high = np.full(3, -1, np.float32), np.full(3, 1, np.float32)
    top = float(runs(data, low, high, "float32", rng, 400).max())
    prop = beyond(low, high, 1, top + 0.02 * abs(top) + 0.05)
    (outcome,) = claims(recording(method), [Query(deployed(read_onnx(data), "float32"), prop)], 60.0)
    assert outcome.verdict is Verdict.UNSAT and outcome.proof is not None
    text = text_of(prop, data)
    write_unsat(tmp_path / "made", data, text, [(0, outcome.proof)], arithmetic="float32")
    case = Case(data, text, records(tmp_path / "made"))
    assert "float32" in checked(tmp_path, case, certificate(case.records))


def head(case: Case, **changes: Any) -> bytes:
    first = {**case.records[0], **changes}
    return certificate([{key: value for key, value in first.items() if value is not None}, *case.records[1:]])


def test_an_arithmetic_that_is_not_the_proofs_is_refused(tmp_path: Path) -> None:
    data = planted(np.random.default_rng(0))
    low, high = box_of(data, np.random.default_rng(2))
    with np.errstate(all="ignore"):
        reach = {name: float(enclosed(data, low, high, name)[1][0]) for name in ("float32", "bfloat16")}
    prop = beyond(low, high, 1, (reach["float32"] + reach["bfloat16"]) / 2)
    proof = prove(Query(deployed(read_onnx(data), "float32"), prop), 10.0)
    assert proof is not None
    text = text_of(prop, data)
    write_unsat(tmp_path / "made", data, text, [(0, proof)], arithmetic="float32")
    case = Case(data, text, records(tmp_path / "made"))
    assert checked(tmp_path, case, head(case))
    for forged in (
        head(case, arithmetic="bfloat16"),
        head(case, arithmetic="float128"),
        head(case, arithmetic=["float32"]),
        head(case, joint=["2"]),
    ):
        with pytest.raises(Refused):
            checked(tmp_path, case, forged)
    # Left out, it is a claim about real numbers, and no answer to who asks about float32.
    (tmp_path / "certificate").write_bytes(head(case, arithmetic=None))
    files = (tmp_path / "certificate", tmp_path / "net.onnx", tmp_path / "p.vnnlib")
    assert "in real arithmetic" in check(*files)
    with pytest.raises(Refused, match="about real arithmetic, not about float32"):
        check(*files, "float32")


def test_a_proof_about_real_numbers_proves_nothing_of_float32(tmp_path: Path) -> None:
    """2³⁰ + x − 2³⁰ is below 1 for x ≤ 1/2, but not in float32."""
    nodes = [
        gemm("x", "h", "w", "b"),
        helper.make_node("Relu", ["h"], ["r"]),
        gemm("r", "y", "v", "d"),
    ]
    data = written(nodes, 1, w=[[1]], b=[2.0**30], v=[[1]], d=[-(2.0**30)])
    prop = beyond(np.float32([0]), np.float32([0.5]), 1, 1.0)
    proof = prove(Query(read_onnx(data), prop), 10.0)
    assert isinstance(proof, Proof)
    case = recorded(tmp_path, data, prop, proof)
    assert "in real arithmetic" in checked(tmp_path, case, head(case))
    with pytest.raises(Refused):
        checked(tmp_path, case, head(case, arithmetic="float32"))
    files = [tmp_path / name for name in ("net.onnx", "p.vnnlib")]
    for bound, holds in ((1.0, False), (2.0**40, True)):
        files[1].write_bytes(text_of(beyond(np.float32([0]), np.float32([0.5]), 1, bound), data))
        asked = run(["-m", "verifiable_relu", "certify", "--spec", files[1], "--net", files[0]])
        assert asked.stdout == "unsat\n" and ("  float32   the verdict holds" in asked.stderr) == holds


def test_what_may_overflow_and_points_have_no_certificate_of_an_arithmetic(tmp_path: Path) -> None:
    nodes = [gemm("x", "h", "w", "b"), helper.make_node("Relu", ["h"], ["r"]), gemm("r", "y", "v", "d")]
    data = written(nodes, 1, w=[[2.0**14]], b=[0], v=[[1]], d=[0])
    prop = beyond(np.float32([0]), np.float32([4]), 1, 2.0**20)
    proof = prove(Query(deployed(read_onnx(data), "float16"), prop), 10.0)
    assert isinstance(proof, Proof)
    text = text_of(prop, data)
    write_unsat(tmp_path / "made", data, text, [(0, proof)], arithmetic="float16")
    case = Case(data, text, records(tmp_path / "made"))
    with pytest.raises(Refused, match="may overflow"):
        checked(tmp_path, case, head(case))
    digests = [hashlib.sha256(part).hexdigest() for part in (data, text)]
    first = {"certificate": 4, "claim": "sat", "network": digests[0], "property": digests[1], "says": ""}
    lines = [{**first, "arithmetic": "float32"}, {"point": ["1"]}, {"end": 2}]
    with pytest.raises(Refused, match="of a claim of unsat"):
        checked(tmp_path, case, "".join(json.dumps(line) + "\n" for line in lines).encode())


def test_both_rooms_have_the_same_arithmetics_and_the_checker_has_the_smaller_errors() -> None:
    assert list(ARITHMETICS) == list(OURS)
    for name, mine in ARITHMETICS.items():
        for terms in (1, 7, 1000):
            ours = OURS[name].relative(terms)
            assert abs(mine.relative(terms) - ours) <= 2**-50 * ours
        assert mine.largest == OURS[name].largest


def test_products_of_weights_that_a_runtime_fuses_may_vanish() -> None:
    """x·a·b·c, of which a runtime may compute a·b first, which is below the smallest normal number."""
    names = ["x", "h", "g", "y"]
    nodes = [helper.make_node("Mul", [names[i], "abc"[i]], [names[i + 1]]) for i in range(3)]
    data = written(nodes, 1, a=[2.0**-80], b=[2.0**-80], c=[2.0**120])
    point = np.float32([2.0**50])
    low, high = enclosed(data, point, point, "float32")
    assert low[0] <= 0 and high[0] >= 2.0**10
