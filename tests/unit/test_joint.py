"""Bounds and verdicts for the ReLU network and all smooth networks with λ' ≥ λ at once, and the option ``--joint``."""

from __future__ import annotations

import dataclasses
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
from tests.support.bounds import alpha_lower_bounds, alpha_preactivation_bounds, linear_lower_bounds
from tests.support.families import (
    NETWORKS,
    Random,
    boxes,
    climb,
    cnn,
    least,
    member,
    members,
    mlp,
    points,
    residual,
)
from tests.support.hooks import Hook
from verifiable_relu import compare, verify, verify_properties
from verifiable_relu.bounds import Ascent, Bounds, interval_bounds, preactivation_bounds
from verifiable_relu.certify import main
from verifiable_relu.errors import InputError
from verifiable_relu.network import hardened, read_onnx, write_onnx
from verifiable_relu.network.build import Builder
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Activation, Gelu, Hardened, Input, Linear, Relu
from verifiable_relu.network.onnx.running import meant
from verifiable_relu.spec import Query, linf_properties
from verifiable_relu.trust.replay import confirm
from verifiable_relu.verifiers.base import Trust, Verdict
from verifiable_relu.verifiers.registry import make as method

networks = pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS.keys())
hardnesses = pytest.mark.parametrize("lam", (1.0, 5.0, 20.0, 160.0))
Make = Callable[[int], Network]


def rows(network: Network, batch: int) -> tuple[Tensor, Tensor]:
    """The rows of every output, its negative and every difference of neighbouring outputs, for every sample."""
    eye = torch.eye(network.output_size, dtype=torch.float64)
    matrix = torch.cat([eye, -eye, eye - eye.roll(1, 0)])
    return matrix.repeat(batch, 1), torch.arange(batch).repeat_interleave(len(matrix))


@dataclasses.dataclass
class Proven:
    """The bounds of a set of networks over a batch of boxes."""

    nodes: list[Bounds]
    crown: dict[int, Bounds]
    lower: dict[str, Tensor]


def proven(family: Network, box: Bounds, alpha: bool = True) -> Proven:
    """Interval bounds of all nodes, CROWN's bounds of pre-activations, and each method's bounds of ``rows``."""
    matrix, sample = rows(family, len(box.lower))
    matrix = matrix.to(box.lower)
    nodes = interval_bounds(family, box)
    pre = {i: nodes[family.nodes[i].inputs[0]] for i in family.activations}
    crown = preactivation_bounds(family, box)
    lower = {
        "ibp": linear_lower_bounds(family, box, pre, matrix, sample, intervals=True),
        "crown-ibp": linear_lower_bounds(family, box, pre, matrix, sample),
        "crown": linear_lower_bounds(family, box, crown, matrix, sample),
    }
    if alpha:
        lower["alpha"] = alpha_lower_bounds(family, box, crown, matrix, sample, Ascent(steps=6))
        tight = alpha_preactivation_bounds(family, box, Ascent(steps=3))
        lower["alpha, tight"] = alpha_lower_bounds(family, box, tight, matrix, sample, Ascent(steps=3))
    return Proven(nodes, crown, lower)


def reached(network: Network, x: Tensor) -> Tensor:
    """The least value of every row over points x, (count, batch, *shape)."""
    matrix, sample = rows(network, x.shape[1])
    outputs = network(x.flatten(0, 1)).unflatten(0, x.shape[:2])
    return torch.einsum("ro,pro->pr", matrix, outputs[:, sample]).amin(0)


def assert_holds(family: Network, box: Bounds, found: Proven, x: Tensor, each: list[Network]) -> None:
    """Every node and every row of the networks ``each`` is within its bounds at points x."""
    for network in each:
        values = [v.unflatten(0, x.shape[:2]) for v in network.values(x.flatten(0, 1))]
        for bounds, value in zip(found.nodes, values, strict=True):
            assert bool((bounds.lower <= value.amin(0)).all()) and bool((value.amax(0) <= bounds.upper).all())
        for index, bounds in found.crown.items():
            value = values[family.nodes[index].inputs[0]]
            assert bool((bounds.lower <= value.amin(0)).all()) and bool((value.amax(0) <= bounds.upper).all())
        least_values = reached(network, x)
        for bound in found.lower.values():
            assert bool((bound <= least_values).all())


@pytest.mark.combined
@networks
@hardnesses
def test_every_member_is_within_the_bounds(make: Make, lam: float) -> None:
    family = hardened(make(0), lam)
    box = boxes(family)
    found = proven(family, box)
    assert_holds(family, box, found, points(box), members(family))
    for bound in found.lower.values():
        assert bool(torch.isfinite(bound).all())


@networks
def test_every_layer_has_its_own_lambda(make: Make) -> None:
    network, rng = make(1), Random(7)
    family = hardened(network, [1 + 30 * float(rng.uniform(1)) for _ in network.activations])
    box = boxes(family)
    assert_holds(family, box, proven(family, box), points(box), members(family))


@pytest.mark.thorough
@pytest.mark.combined
@networks
@pytest.mark.parametrize("lam", (1.0, 20.0))
def test_no_attack_gets_below_the_margin(make: Make, lam: float) -> None:
    """The attack searches for points by gradient and for λ' ≥ λ layer by layer."""
    family = hardened(make(2), lam)
    box = boxes(family, batch=4)
    found = proven(family, box)
    matrix, sample = rows(family, len(box.lower))
    wide = Bounds(box.lower[sample], box.upper[sample])
    harder = torch.zeros(len(family.activations), dtype=torch.float64, requires_grad=True)

    def descent(x: Tensor) -> Tensor:
        lams = [low * torch.exp(h.clamp(min=0)) for low, h in zip(least(family), harder, strict=True)]
        value = x
        values: list[Tensor] = []
        for node in family.nodes:
            inputs = [values[i] for i in node.inputs]
            if isinstance(node, Hardened):
                factor = lams[family.activations.index(len(values))]
                value = inputs[0] * 0.5 * torch.special.erfc(-factor * inputs[0] / math.sqrt(2))
            else:
                value = node.forward(*inputs) if inputs else x
            values.append(value)
        falling = -(matrix * value).sum(1)
        (gradient,) = torch.autograd.grad(falling.sum(), harder, retain_graph=True)
        with torch.no_grad():
            harder.add_(0.3 * gradient.sign()).clamp_(min=0)
        return falling

    way = climb(wide, descent, steps=25, starts=2)
    last = [low * math.exp(h) for low, h in zip(least(family), harder.tolist(), strict=True)]
    for network in (*members(family), member(family, last)):
        outputs = network(way.flatten(0, 1)).unflatten(0, way.shape[:2])
        values = (outputs * matrix).sum(-1).amin(0)
        for bound in found.lower.values():
            assert bool((bound <= values).all())
        # It comes close where boxes are nearly points and members nearly one: it would see a bound that is too high.
        near = (values - found.lower["crown"])[sample == 0]
        assert lam == 1 or float(near.min()) < 0.05


def test_lambda_rounded_up_is_still_covered() -> None:
    """λ = 1.1 is rounded up in float32, and the network with exactly λ = 1.1 is a member nevertheless."""
    single = hardened(mlp(), 1.1).to(torch.float32)
    assert least(single)[0] > 1.1
    box = boxes(single)
    wide, narrow = single.to(torch.float64), Bounds(box.lower.float(), box.upper.float())
    x = points(Bounds(narrow.lower.double(), narrow.upper.double()))
    found = proven(single, narrow)
    assert_holds(single, narrow, found, x, [member(wide, [1.1] * 3), *members(wide)])


def classified(seed: int = 0, count: int = 12) -> tuple[Network, np.ndarray, np.ndarray]:
    """A small ReLU network, points in [0, 1] and their classes."""
    network = mlp(seed, (3, 6, 5, 3)).to(torch.float32)
    images = Random(seed + 20).uniform(count, 3).float().double()
    return network, images.numpy(), network(images).argmax(1).numpy()


@pytest.mark.parametrize("name", ("ibp", "crown-ibp", "crown", "alpha-crown", "split", "auto"))
@pytest.mark.parametrize("lam", (5.0, 160.0))
def test_what_a_verifier_proves_holds_for_every_member(name: str, lam: float) -> None:
    network, images, labels = classified()
    family = hardened(network, lam)
    properties = linf_properties(images, labels, 0.03, 3)
    queries = [Query(family, p) for p in properties]
    outcomes = claims(method(name), queries, 1.0)
    assert any(o.verdict is Verdict.UNSAT for o in outcomes)
    for outcome, p, label in zip(outcomes, properties, labels, strict=True):
        if outcome.verdict is Verdict.SAT:
            assert outcome.witness is not None and confirm(Query(family.limit, p), outcome.witness).confirmed
        if outcome.verdict is not Verdict.UNSAT:
            continue
        assert outcome.margin is not None and outcome.trust is Trust.ROUNDED
        box = Bounds(*(torch.from_numpy(np.asarray(end)).reshape(1, 3) for end in (p.box.lower, p.box.upper)))
        for other in members(family):
            y = other(points(box, count=200).flatten(0, 1))
            others = torch.cat([y[:, :label], y[:, label + 1 :]], 1).amax(1)
            assert float((y[:, label] - others).min()) >= outcome.margin


def switch(lam: float | None = None) -> Network:
    """The network y_0 = f(x_0) + f(x_1), y_1 = 0: with ReLU, y_0 ≥ 0; with λ-GELU, y_0 ≥ −0.34/λ."""
    act = (
        Relu(name="r", inputs=(1,), shape=(2,))
        if lam is None
        else Gelu(name="r", inputs=(1,), shape=(2,), lam=torch.tensor(lam))
    )
    weight = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    return Network(
        (
            Input(name="x", inputs=(), shape=(2,)),
            Linear(name="l", inputs=(0,), shape=(2,), weight=torch.eye(2), bias=torch.zeros(2)),
            act,
            Linear(name="m", inputs=(2,), shape=(2,), weight=weight, bias=torch.zeros(2)),
        )
    )


def spec(unsafe: str) -> str:
    lines = [f"(declare-const {v}_{i} Real)" for v in "XY" for i in range(2)]
    lines += [f"(assert (>= X_{i} -1.0)) (assert (<= X_{i} 1.0))" for i in range(2)]
    return "\n".join([*lines, f"(assert {unsafe})\n"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_onnx(switch(), tmp_path / "relu.onnx")
    write_onnx(switch(2.0), tmp_path / "gelu.onnx")
    empty = Builder((2,))
    write_onnx(
        empty.network(empty.linear(0, torch.eye(2), torch.zeros(2), "l"), name="affine"), tmp_path / "affine.onnx"
    )
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
        ("relu", ("--joint", "1"), "unknown"),
        ("relu", ("--joint", "5"), "unsat"),
        ("relu", ("--joint", "1e6"), "unsat"),
        # 0.34/2 is beyond 0.1; a λ given takes the place of the file's.
        ("gelu", ("--joint",), "unknown"),
        ("gelu", ("--joint", "5"), "unsat"),
        ("gelu", ("--joint", "5", "--method", "split"), "unsat"),
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
        ("relu", ("--joint",), "do not tell which λ they come from"),
        ("relu", ("--joint", "5,5"), "2 values of λ for 1 layers of activations"),
        ("affine", ("--joint", "5"), "has neither ReLU nor λ-GELU activations"),
        ("affine", ("--joint",), "has neither ReLU nor λ-GELU activations"),
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
        ask(folder, f"--joint={text}")
    shown = capsys.readouterr()
    assert stopped.value.code == 2 and shown.out == "" and shown.err.count("\n") == 1
    assert "is no finite number of at least 1, nor a list of them" in shown.err


def test_a_counterexample_is_one_of_the_relu_network(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for net, options in (("relu", ("--joint", "5")), ("gelu", ("--joint",))):
        assert ask(folder, *options, "--method", "attack", net=net, prop="top") == 0
        answer, *lines = capsys.readouterr().out.replace("(", "").replace(")", "").splitlines()
        assert answer == "sat"
        value = {name: Fraction(number) for name, number in map(str.split, lines)}
        relu = max(value["X_0"], Fraction(0)) + max(value["X_1"], Fraction(0))
        assert relu >= Fraction(3, 2) and float(value["Y_0"]) == pytest.approx(float(relu), abs=1e-6)


def test_answers_of_one_network_are_not_those_of_many(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Records of different λ, and those of the ReLU network, have different keys."""
    answers = []
    for options in ((), ("--joint", "1"), ("--joint", "5"), ("--joint", "1"), ()):
        assert ask(folder, "--out", folder / "results", *options) == 0
        answers.append(capsys.readouterr().out.strip())
    assert answers == ["unsat", "unknown", "unsat", "unknown", "unsat"]


def verdicts(model: Network, images: np.ndarray, labels: np.ndarray, **options: object) -> list[Verdict]:
    return [r.verdict for r in verify(model, images, labels, 0.02, "crown", **options)]  # type: ignore[arg-type]


def test_verify_in_python() -> None:
    network, images, labels = classified()
    alone = verdicts(network, images, labels)
    assert alone == verdicts(network, images, labels, joint=1e7)
    soft = verdicts(network, images, labels, joint=1.0)
    assert soft.count(Verdict.UNSAT) < alone.count(Verdict.UNSAT)
    assert verdicts(network, images, labels, joint=[1e7, 1.0]) != alone
    # A whole number, and those of the network itself.
    assert soft == verdicts(network, images, labels, joint=1)
    gelu = member(hardened(network, 1.0), [1.0, 1.0])
    assert soft == verdicts(gelu, images, labels, joint=True)


def test_verify_refuses() -> None:
    network, images, labels = classified(count=1)
    for joint, message in (
        (True, "which λ they come from"),
        ([5.0], "1 values of λ for 2 layers"),
        (0.99, "at least 1"),
        ([5.0, math.nan], "at least 1"),
        (math.inf, "at least 1"),
    ):
        with pytest.raises(InputError, match=message):
            verdicts(network, images, labels, joint=joint)


def test_the_family_keeps_to_itself() -> None:
    network = mlp()
    soft, hard = hardened(network, 2.0), hardened(network, 3.0)
    assert len({network.digest, soft.digest, hard.digest}) == 3
    assert soft.limit.digest == network.digest and network.limit is network
    assert not soft.piecewise_linear and hardened(soft).digest == soft.digest
    assert hardened(soft, 3.0).digest == hard.digest
    x = points(boxes(network))[:, 0]
    assert torch.equal(soft(x), network(x))


@pytest.mark.parametrize("name", ["image", "relax"])
@pytest.mark.parametrize("lam", [None, 1.0], ids=["relu", "gelu"])
def test_bounds_of_one_member_alone_are_seen(name: str, lam: float | None) -> None:
    """Faults: activations of the family have the intervals or the lines of ReLU, or of GELU with the least λ."""

    def of_one(right: Callable[..., object], node: Activation, *rest: object) -> object:
        if isinstance(node, Hardened):
            own = {"name": node.name, "inputs": node.inputs, "shape": node.shape}
            node = Relu(**own) if lam is None else Gelu(**own, lam=node.lam)
        return right(node, *rest)

    with Hook(f"bounds.activations:{name}", of_one).applied(), pytest.raises(AssertionError):
        for seed in range(3):
            for make in (mlp, cnn, residual):
                family = hardened(make(seed), 1.0)
                box = boxes(family)
                assert_holds(family, box, proven(family, box, alpha=False), points(box), members(family))


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
        for joint in (1.0, 5.0):
            with pytest.raises(InputError, match=said):
                meant(read_onnx(data), "real", joint)
    with pytest.raises(InputError, match="no family is known in bfloat16"):
        meant(read_onnx(chain()), "bfloat16", 1.0)


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
        assert verify_properties(net, spec, "crown", joint=float(lam))[0].answer == answer
        assert verify_properties(Scaled(), spec, "crown", joint=float(lam))[0].answer == answer
        asked = ["--spec", str(spec), "--net", str(net), "--method", "crown", "--joint", lam]
        assert main([*asked, "--certificates", str(tmp_path / lam)]) == 0
        shown = capsys.readouterr()
        assert shown.out == f"{answer}\n" and ("checked" in shown.err) == (answer == "unsat")
    assert compare.main([str(net), "--spec", str(spec), "--joint", "1"]) == 0
    assert float(capsys.readouterr().out.split(",")[1]) > 0.34


def test_a_file_that_is_none_of_its_family_is_told(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--spec", str(folder / "dip.vnnlib"), "--net", str(folder / "gelu.onnx"), "--joint"]
    for lam, told in (("1", False), ("2", False), ("5", True)):
        assert main([*asked, lam, "--method", "ibp"]) == 0
        assert ("nothing is said about the file itself" in capsys.readouterr().err) == told
        assert compare.main([str(folder / "gelu.onnx"), *asked[:2], "--joint", lam]) == 0
        assert ("has λ = 2, which is none" in capsys.readouterr().err) == told
