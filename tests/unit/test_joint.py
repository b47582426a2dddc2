"""Bounds and verdicts for the ReLU network and all smooth networks with λ' ≥ λ at once, and the option ``--family``."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from torch import Tensor

from tests.support.asking import claims
from tests.support.families import COUPLED, NETWORKS, Random, boxes, climb, member, members, mlp, points
from tests.support.nets import Chain
from verifiable_relu import compare, verify, verify_properties
from verifiable_relu.bounds.alpha import Ascent, ascend, search_slopes
from verifiable_relu.bounds.backward import Relaxation
from verifiable_relu.bounds.linear_bounds import bound_by_crown, lower_of_rows
from verifiable_relu.bounds.zonotopes import Zonotopes
from verifiable_relu.certify import main
from verifiable_relu.errors import InputError
from verifiable_relu.execution.model import execution_model
from verifiable_relu.ir.families import harden
from verifiable_relu.ir.interval import Interval
from verifiable_relu.ir.network import Network
from verifiable_relu.readers import read_onnx, write_onnx
from verifiable_relu.search.outcomes import Trust, Verdict
from verifiable_relu.search.registry import make as method
from verifiable_relu.spec import Query, linf_properties
from verifiable_relu.trust.confirmation import confirm

NETS = {**NETWORKS, **COUPLED}
Make = Callable[[int], Network]


def rows(network: Network) -> Tensor:
    """The rows of every output, its negative and every difference of neighbouring outputs."""
    eye = torch.eye(network.output_size, dtype=torch.float64)
    return torch.cat([eye, -eye, eye - eye.roll(1, 0)])


def proven(family: Network, box: Interval) -> tuple[list[list[Interval]], dict[str, Tensor]]:
    """Bounds of all ops, by intervals and by rows, and each method's bounds of ``rows``, (batch, rows)."""
    batch, matrix = len(box.lower), rows(family)
    every, sample = matrix.repeat(batch, 1), torch.arange(batch).repeat_interleave(len(matrix))
    wide, last = Relaxation(family, box).advance(), len(family.ops) - 1
    crown = bound_by_crown(Relaxation(family, box))
    tight = bound_by_crown(Relaxation(family, box), search=search_slopes(Ascent(steps=3)))
    lower = {"crown-ibp": lower_of_rows(wide, every)[0], "crown": lower_of_rows(crown, every)[0]}
    for name, relaxation in (("alpha", crown), ("alpha, tight", tight)):
        lower[name] = ascend(relaxation, last, every, sample, Ascent(steps=4)).lower
    forms = Zonotopes(family, box, (box.lower < box.upper).any(0).nonzero().squeeze(1))
    lower["affine forms"] = forms.rows(matrix.repeat(batch, 1, 1)).lower
    bounds = [[x.interval for x in each.bounds] for each in (wide, crown, tight)]
    return bounds, {name: value.view(batch, -1) for name, value in lower.items()}


def assert_holds(family: Network, box: Interval, x: Tensor, each: list[Network]) -> None:
    """Every op and every row of the networks ``each`` is within its bounds at points x, (count, batch, inputs)."""
    bounds, lower = proven(family, box)
    for network in each:
        values = [v.unflatten(0, x.shape[:2]) for v in network.values(x.flatten(0, 1))]
        for relaxation in bounds:
            for op, interval, value in zip(family.ops, relaxation, values, strict=True):
                assert bool((interval.lower <= value.amin(0) + 1e-12).all()), op.place
                assert bool((value.amax(0) <= interval.upper + 1e-12).all()), op.place
        reached = (values[-1] @ rows(network).T).amin(0)
        for name, bound in lower.items():
            assert not bool((bound > reached + 1e-12).any()), name


@pytest.mark.combined
@pytest.mark.parametrize("make", NETS.values(), ids=NETS.keys())
@pytest.mark.parametrize("lam", (1.0, 5.0, 20.0, 160.0))
@torch.no_grad()
def test_every_member_is_within_the_bounds(make: Make, lam: float) -> None:
    family = harden(make(0), lam)
    box = boxes(family, batch=4)
    assert_holds(family, box, points(box), members(family))


@pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS.keys())
def test_every_layer_has_its_own_lambda_and_attacks_find_no_lower_value(make: Make) -> None:
    network, rng = make(1), Random(7)
    family = harden(network, [1 + 30 * float(rng.uniform(1)) for _ in network.activations])
    box, each = boxes(family, batch=4), members(family)
    weights = rows(family)[0]
    way = torch.cat([climb(box, lambda x, net=net: -(net(x) @ weights), starts=1) for net in each[:4]])  # type: ignore[misc]
    with torch.no_grad():
        assert_holds(family, box, torch.cat([points(box), way]), each)


def classified(seed: int = 0, count: int = 12) -> tuple[Network, np.ndarray, np.ndarray]:
    """A small ReLU network, points in [0, 1] and their classes."""
    network, images = mlp(seed, (3, 6, 5, 3)), Random(seed + 20).uniform(count, 3).float().double()
    return network, images.numpy(), network(images).argmax(1).numpy()


@pytest.mark.parametrize("name", ("ibp", "crown-ibp", "crown", "alpha-crown", "split", "auto"))
@pytest.mark.parametrize("lam", (5.0, 160.0))
def test_what_a_verifier_proves_holds_for_every_member(name: str, lam: float) -> None:
    network, images, labels = classified()
    family = harden(network, lam)
    properties = linf_properties(images, labels, 0.03, 3)
    queries = [Query(family, p) for p in properties]
    outcomes = claims(method(name), queries, 1.0)
    assert any(o.verdict is Verdict.UNSAT for o in outcomes)
    for outcome, p, label in zip(outcomes, properties, labels, strict=True):
        if outcome.verdict is Verdict.SAT:
            assert outcome.witness is not None and confirm(family.limit, p, outcome.witness).confirmed
        if outcome.verdict is not Verdict.UNSAT:
            continue
        assert outcome.margin is not None and outcome.trust is Trust.ROUNDED
        box = Interval(*(torch.from_numpy(np.asarray(end)).reshape(1, 3) for end in (p.box.lower, p.box.upper)))
        for other in members(family):
            y = other(points(box, count=200).flatten(0, 1))
            others = torch.cat([y[:, :label], y[:, label + 1 :]], 1).amax(1)
            assert float((y[:, label] - others).min()) >= outcome.margin


def switch(lam: float | None = None) -> Network:
    """The network y_0 = f(x_0) + f(x_1), y_1 = 0: with ReLU, y_0 ≥ 0; with λ-GELU, y_0 ≥ −0.34/λ."""
    chain = Chain(2)
    chain.linear(torch.eye(2), torch.zeros(2))
    chain.act("Relu") if lam is None else chain.act("GELU", lam)
    chain.linear(torch.tensor([[1.0, 1.0], [0.0, 0.0]]), torch.zeros(2))
    return chain.network()


def spec(unsafe: str) -> str:
    lines = [f"(declare-const {v}_{i} Real)" for v in "XY" for i in range(2)]
    lines += [f"(assert (>= X_{i} -1.0)) (assert (<= X_{i} 1.0))" for i in range(2)]
    return "\n".join([*lines, f"(assert {unsafe})\n"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_onnx(switch(), tmp_path / "relu.onnx")
    write_onnx(switch(2.0), tmp_path / "gelu.onnx")
    affine = Chain(2)
    affine.linear(torch.eye(2), torch.zeros(2))
    write_onnx(affine.network("affine"), tmp_path / "affine.onnx")
    (tmp_path / "dip.vnnlib").write_text(spec("(<= Y_0 -0.1)"))
    (tmp_path / "top.vnnlib").write_text(spec("(>= Y_0 1.5)"))
    return tmp_path


def ask(folder: Path, *options: object, net: str = "relu", prop: str = "dip") -> int:
    files = ["--spec", folder / f"{prop}.vnnlib", "--net", folder / f"{net}.onnx"]
    return main([*map(str, [*files, "--method", "ibp", "--quiet", *options])])


@pytest.mark.parametrize(
    ("net", "options", "answer"),
    [
        ("relu", (), "unsat"),
        ("relu", ("--family", "1"), "unknown"),
        ("relu", ("--family", "5"), "unsat"),
        ("relu", ("--family", "1e6"), "unsat"),
        # 0.34/2 is beyond 0.1; a λ given takes the place of the file's.
        ("gelu", ("--family",), "unknown"),
        ("gelu", ("--family", "5"), "unsat"),
        ("gelu", ("--family", "5", "--method", "split"), "unsat"),
    ],
)
def test_the_command(
    folder: Path, net: str, options: tuple[str, ...], answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(folder, *options, net=net) == 0
    assert capsys.readouterr() == (answer + "\n", "")


@pytest.mark.parametrize(
    ("net", "options", "message"),
    [
        ("relu", ("--family",), "do not tell which λ they come from"),
        ("relu", ("--family", "5,5"), "2 values of λ for 1 layers of activations"),
        ("affine", ("--family", "5"), "has neither ReLU nor λ-GELU activations"),
        ("affine", ("--family",), "has neither ReLU nor λ-GELU activations"),
    ],
)
def test_the_command_refuses_in_one_line(
    folder: Path, net: str, options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(folder, *options, net=net) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1 and f"{net}.onnx" in shown.err and message in shown.err


@pytest.mark.parametrize("text", ["soft", "1,,2", "", "0.5", "1,0.5", "-2", "nan", "inf"])
def test_what_is_no_hardness_is_refused(folder: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        ask(folder, f"--family={text}")
    shown = capsys.readouterr()
    assert stopped.value.code == 2 and shown.out == "" and shown.err.count("\n") == 1
    assert "is not a finite number of at least 1, nor a list of them" in shown.err


def test_a_counterexample_is_one_of_the_relu_network(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for net, options in (("relu", ("--family", "5")), ("gelu", ("--family",))):
        assert ask(folder, *options, "--method", "attack", net=net, prop="top") == 0
        answer, *lines = capsys.readouterr().out.replace("(", "").replace(")", "").splitlines()
        assert answer == "sat"
        value = {name: Fraction(number) for name, number in map(str.split, lines)}
        relu = max(value["X_0"], Fraction(0)) + max(value["X_1"], Fraction(0))
        assert relu >= Fraction(3, 2) and float(value["Y_0"]) == pytest.approx(float(relu), abs=1e-6)


def test_answers_of_one_network_are_not_those_of_many(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Records of different λ, and those of the ReLU network, have different keys."""
    answers = []
    for options in ((), ("--family", "1"), ("--family", "5"), ("--family", "1"), ()):
        assert ask(folder, "--out", folder / "results", *options) == 0
        answers.append(capsys.readouterr().out.strip())
    assert answers == ["unsat", "unknown", "unsat", "unknown", "unsat"]


def verdicts(model: Network, images: np.ndarray, labels: np.ndarray, **options: object) -> list[Verdict]:
    return [r.verdict for r in verify(model, images, labels, 0.02, "crown", **options)]  # type: ignore[arg-type]


def test_verify_in_python() -> None:
    network, images, labels = classified()
    alone = verdicts(network, images, labels)
    assert alone == verdicts(network, images, labels, family=1e7)
    soft = verdicts(network, images, labels, family=1.0)
    assert soft.count(Verdict.UNSAT) < alone.count(Verdict.UNSAT)
    assert verdicts(network, images, labels, family=[1e7, 1.0]) != alone
    # A whole number, and those of the network itself.
    assert soft == verdicts(network, images, labels, family=1)
    gelu = member(harden(network, 1.0), [1.0, 1.0])
    assert soft == verdicts(gelu, images, labels, family=True)


def test_verify_refuses() -> None:
    network, images, labels = classified(count=1)
    for family, message in (
        (True, "which λ they come from"),
        ([5.0], "1 values of λ for 2 layers"),
        (0.99, "at least 1"),
        ([5.0, math.nan], "at least 1"),
        (math.inf, "at least 1"),
    ):
        with pytest.raises(InputError, match=message):
            verdicts(network, images, labels, family=family)


def chain(*steps: tuple[str, float]) -> bytes:
    """A file with GELU of one number behind scalars."""
    nodes, stored, x = [], [], "x"
    for operator, number in (*steps, ("Gelu", 0.0)):
        inputs = [x] if operator == "Gelu" else [x, f"c{len(nodes)}"]
        stored += [numpy_helper.from_array(np.float32(number), name) for name in inputs[1:]]
        x = f"v{len(nodes)}"
        nodes.append(helper.make_node(operator, inputs, [x], name=x))
    ports = (helper.make_tensor_value_info(name, 1, [1, 1]) for name in ("x", x))
    graph = helper.make_graph(nodes, "g", [next(ports)], [next(ports)], stored)
    return bytes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9).SerializeToString()
    )


def test_a_family_is_refused_by_name_where_a_hardness_is_not_known() -> None:
    far, several = chain(("Mul", 2.0**23), ("Mul", 2.0**23)), chain(("Mul", 2.0))
    model = onnx.load_from_string(several)
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.float32([[2.0]]).repeat(2, 1), "c0"))
    for port in (*model.graph.input, *model.graph.output):
        port.type.tensor_type.shape.dim[1].dim_value = 2
    twice = chain(("Gelu", 0.0), ("Mul", 3.0))
    for data, said in ((far, "too small or too large"), (model.SerializeToString(), "'v0'"), (twice, "a GELU, too")):
        for family in (1.0, 5.0):
            with pytest.raises(InputError, match=said):
                execution_model(read_onnx(data), "real", family)
    with pytest.raises(InputError, match="there are no families in bfloat16"):
        execution_model(read_onnx(chain()), "bfloat16", 1.0)


class Scaled(torch.nn.Module):
    """GELU((x·7.1)/3.3) in torch."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.gelu((x * 7.1) / 3.3)


def test_every_caller_takes_the_hardness_for_that_of_what_is_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At x = −1, the member with λ' = 1 is −0.34; the file itself is −0.034."""
    net, spec = tmp_path / "net.onnx", tmp_path / "p.vnnlib"
    net.write_bytes(chain(("Mul", 7.1), ("Div", 3.3)))
    box = "(declare-const X_0 Real)(declare-const Y_0 Real)(assert (>= X_0 -1.1))(assert (<= X_0 -0.9))"
    for most, lam, answer in ((-0.25, "1", "unknown"), (-0.45, "1", "unsat"), (-0.25, "2", "unsat")):
        spec.write_text(f"{box}(assert (<= Y_0 {most}))")
        assert verify_properties(net, spec, "crown", family=float(lam))[0].answer == answer
        assert verify_properties(Scaled(), spec, "crown", family=float(lam))[0].answer == answer
        asked = ["--spec", str(spec), "--net", str(net), "--method", "crown", "--family", lam]
        assert main([*asked, "--certificates", str(tmp_path / lam)]) == 0
        shown = capsys.readouterr()
        assert shown.out == f"{answer}\n" and ("checked" in shown.err) == (answer == "unsat")
    assert compare.main([str(net), "--spec", str(spec), "--family", "1"]) == 0
    assert float(capsys.readouterr().out.split(",")[1]) > 0.34


def test_a_file_that_is_none_of_its_family_is_told(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--spec", str(folder / "dip.vnnlib"), "--net", str(folder / "gelu.onnx"), "--family"]
    for lam, told in (("1", False), ("2", False), ("5", True)):
        assert main([*asked, lam, "--method", "ibp"]) == 0
        assert ("nothing is said about the file itself" in capsys.readouterr().err) == told
        assert compare.main([str(folder / "gelu.onnx"), *asked[:2], "--family", lam]) == 0
        assert ("has λ = 2, which is not in" in capsys.readouterr().err) == told
