"""One question about all that a network becomes: λ-GELU networks, ReLU, its evaluation in float32, its int8 file."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from torch import nn

from verifiable_relu import Perturbation, certify, verify, verify_change
from verifiable_relu.api.changing import compared
from verifiable_relu.bounds.backward import Relaxation
from verifiable_relu.bounds.linear_bounds import bound_by_crown, lower_of_rows
from verifiable_relu.check import BadInput, Refused, check
from verifiable_relu.errors import InputError
from verifiable_relu.execution.model import as_executed, execution_model
from verifiable_relu.execution.replay import replay
from verifiable_relu.ir.families import harden
from verifiable_relu.ir.functions import Hardened
from verifiable_relu.ir.interval import Interval
from verifiable_relu.ir.linear import Dense
from verifiable_relu.ir.network import Affine, Elementwise
from verifiable_relu.ir.transform import NetworkPart, combine
from verifiable_relu.readers import from_torch, read_onnx, write_onnx
from verifiable_relu.runtime import session
from verifiable_relu.train.export import quantize

LAM = 30.0
IMAGES = np.random.default_rng(0).random((6, 8)).astype(np.float32)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A float file and its int8 file."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
    folder = tmp_path_factory.mktemp("whole")
    single, small = folder / "float.onnx", folder / "int8.onnx"
    single.write_bytes(write_onnx(from_torch(model, (8,))))
    small.write_bytes(quantize(single.read_bytes(), np.random.default_rng(1).random((100, 8)).astype(np.float32)))
    return single, small


def shuffled(network, x: np.ndarray, rng: np.random.Generator) -> np.ndarray:  # type: ignore[no-untyped-def]
    """The outputs with every sum in float32 and in a random order."""
    values = x
    for op in network.ops[1:]:
        if isinstance(op, Affine) and isinstance(op.map, Dense):
            weight, bias = op.map.weight.numpy(), op.bias.numpy()
            order = rng.permutation(weight.shape[1])
            total = np.zeros((len(values), len(bias)), np.float32)
            for j in order:
                total = total + values[:, j : j + 1] * weight[None, :, j]
            values = total + bias
        else:
            assert op.function.kind == "Relu"
            values = np.maximum(values, 0)
    return values


def test_bounds_hold_for_every_member(files: tuple[Path, Path]) -> None:
    read = read_onnx(files[0])
    family, small = execution_model(read, "float32", LAM), as_executed(read_onnx(files[1]), "float32")
    both = combine([NetworkPart("a", family, range(8)), NetworkPart("b", small, range(8))], 8, replay)
    assert both.arithmetic == "float32"
    eps = 0.05
    x = torch.tensor(IMAGES, dtype=torch.float64)
    box = Interval((x - eps).clamp(0, 1), (x + eps).clamp(0, 1))
    one = torch.eye(6, dtype=torch.float64)
    relaxation = bound_by_crown(Relaxation(both, box))
    lower, upper = (
        sign * lower_of_rows(relaxation, sign * one.repeat(6, 1))[0].reshape(6, 6).numpy() for sign in (1, -1)
    )
    rng = np.random.default_rng(2)
    run = session(files[1].read_bytes(), 1, precise=True)
    smooth = [harden(read, LAM), harden(read, 3 * LAM)]
    for image in range(6):
        low, high = box.lower[image].numpy(), box.upper[image].numpy()
        points = (
            (low + (high - low) * rng.choice([0, 0.5, 1], (50, 8)))
            .astype(np.float32)
            .clip(low, high)
            .astype(np.float32)
        )
        found = [shuffled(read, points, rng) for _ in range(3)]
        for family in smooth:
            values = torch.tensor(points, dtype=torch.float64)
            for op in family.ops[1:]:
                member = isinstance(op, Elementwise) and isinstance(op.function, Hardened)
                values = op.function.least.value(values) if member else op.value(values)  # type: ignore[union-attr]
            found.append(values.numpy())
        for outputs in found:
            assert (lower[image, :3] <= outputs).all() and (outputs <= upper[image, :3]).all()
        outputs = run.run(None, {run.get_inputs()[0].name: points})[0]
        assert (lower[image, 3:] <= outputs).all() and (outputs <= upper[image, 3:]).all()


def test_one_answer_about_all(files: tuple[Path, Path]) -> None:
    labels = read_onnx(files[0])(torch.tensor(IMAGES)).argmax(1)
    options = {"family": LAM, "arithmetic": "float32", "other_models": files[1]}
    small = verify(files[0], IMAGES, labels, 1e-4, **options)  # type: ignore[arg-type]
    assert "unsat" in {r.answer for r in small}
    # Of a family in float32 beside another file no evaluation is run: such a counterexample stays unknown.
    wrong = verify(files[0], IMAGES, (labels + 1) % 3, 0.05, arithmetic="float32", other_models=files[1])
    assert [r.answer for r in wrong] == ["sat"] * 6
    assert all(r.arithmetic == "float32" and r.outputs is not None and len(r.outputs) == 6 for r in wrong)
    alone = [verify(model, IMAGES, labels, 0.02, arithmetic="float32") for model in files]
    together = verify(files[0], IMAGES, labels, 0.02, **options)  # type: ignore[arg-type]
    for whole, *each in zip(together, *alone, strict=True):
        assert whole.answer != "unsat" or all(r.answer != "sat" for r in each)
        assert whole.answer != "sat" or any(r.answer != "unsat" for r in each)


def test_one_certificate_of_the_whole_way(files: tuple[Path, Path], tmp_path: Path) -> None:
    labels = read_onnx(files[0])(torch.tensor(IMAGES)).argmax(1)
    pruned, model = tmp_path / "pruned.onnx", onnx.load(files[0])
    for tensor in model.graph.initializer:
        weights = numpy_helper.to_array(tensor)
        tensor.CopyFrom(numpy_helper.from_array(np.where(np.abs(weights) < 0.01, 0, weights), tensor.name))
    onnx.save(model, pruned)
    options = {"family": LAM, "arithmetic": "float32", "certificates": tmp_path}
    (small,) = verify(files[0], IMAGES[:1], labels[:1], 0.01, other_models=files[1], **options)  # type: ignore[arg-type]
    assert small.answer == "unsat" and "its rounding is not known" in small.detail and str(small.trust) != "checked"
    options["other_models"] = pruned
    found = [r for r in verify(files[0], IMAGES, labels, 0.01, **options) if r.answer == "unsat"]  # type: ignore[arg-type]
    assert found and all(str(r.trust) == "checked" for r in found)
    path = Path(found[0].certificate)
    spec = path.with_name(path.name.removesuffix(".jsonl.gz") + ".vnnlib")
    said = check(path, files[0], spec, "float32", pruned)
    assert "in float32, and in real arithmetic" in said and "λ ≥ 30, 30" in said and "with the other network" in said
    records = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    forged = tmp_path / "forged"
    for change in ({"arithmetic": "bfloat16"}, {"family": ["30"]}, {"family": ["30", "1/2"]}, {"other": "0" * 64}):
        forged.write_bytes("\n".join(json.dumps(r) for r in [records[0] | change, *records[1:]]).encode())
        with pytest.raises((Refused, BadInput)):
            check(forged, files[0], spec, None, pruned)
    # Of λ from 1 on the same bounds are no bounds.
    forged.write_bytes("\n".join(json.dumps(r) for r in [records[0] | {"family": ["1", "1"]}, *records[1:]]).encode())
    with pytest.raises(Refused):
        check(forged, files[0], spec, None, pruned)
    for model, more in (
        (files[0].read_bytes(), {}),
        (files[0], {"normalize": (0, 1)}),
        (files[0], {"other_models": files}),
    ):
        with pytest.raises(InputError, match="needs the model and at most one of other_models= as paths of files"):
            verify(model, IMAGES, labels, 0.01, certificates=tmp_path, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("eps", "more"),
    [
        ("1/255", {}),
        (0.05, {}),
        (0.01, {"arithmetic": "float32"}),
        (0.01, {"family": LAM}),
        (0.01, {"method": "crown"}),
    ],
    ids=str,
)
def test_one_file_has_certificates_of_its_own(
    eps: str | float, more: dict[str, object], files: tuple[Path, Path], tmp_path: Path
) -> None:
    """Each comes with its property, so that the checker needs nothing else, and sat has one, too."""
    wrong = eps == 0.05
    labels = (read_onnx(files[0])(torch.tensor(IMAGES)).argmax(1) + wrong) % 3
    found = verify(files[0], IMAGES, labels, eps, certificates=tmp_path / "kept", **more)  # type: ignore[arg-type]
    decided = [result for result in found if result.answer == ("sat" if wrong else "unsat")]
    assert decided
    for result in decided:
        assert str(result.trust) == "checked", result.detail
        path = Path(result.certificate)
        spec = path.with_name(path.name.removesuffix(".jsonl.gz") + ".vnnlib")
        assert result.answer in check(path, files[0], spec, str(more.get("arithmetic", "real")))
    with (tmp_path / "kept" / "certificates.csv").open(newline="") as table:
        assert [row["checked"] for row in csv.DictReader(table)] == ["true"] * len(decided)


def test_a_counterexample_in_an_l2_ball_has_no_certificate(files: tuple[Path, Path], tmp_path: Path) -> None:
    (result,) = verify(files[0], IMAGES[:1], [0], 0.01, perturbation=Perturbation(norm=2), certificates=tmp_path)
    assert not result.certificate and str(result.trust) != "checked"
    assert "no certificate" in result.detail and "ball" in result.detail


def test_a_model_of_another_input_shape_is_not_asked_about_permuted_pixels() -> None:
    """Two networks of images, as files: the second takes the transposed image, of as many pixels."""
    made = []
    for shape in ((1, 2, 3), (1, 3, 2), (6,)):
        model = nn.Sequential(nn.Flatten(), nn.Linear(6, 3))
        made.append(write_onnx(from_torch(model, shape)))
    image = np.full((1, 1, 2, 3), 0.5, np.float32)
    with pytest.raises(InputError, match="unlike the first model"):
        verify(made[0], image, [0], 0.1, other_models=nn.Sequential(nn.Flatten(), nn.Linear(6, 2)))
    for other in made[1:]:
        with pytest.raises(InputError, match="unlike the first model"):
            verify(made[0], image, [0], 0.01, other_models=other)
        with pytest.raises(InputError, match="cannot be compared"):
            compared(read_onnx(made[0]), read_onnx(other), [])
        with pytest.raises(InputError, match="takes"):
            verify_change(made[0], other, image, 0.01)


def write_property(path: Path) -> None:
    """Write the question about outputs up to −0.3 of x from −1.1 to −0.9."""
    path.write_text(
        "(declare-const X_0 Real)(declare-const Y_0 Real)"
        "(assert (>= X_0 -1.1))(assert (<= X_0 -0.9))(assert (<= Y_0 -0.3))"
    )


def test_a_gelu_that_runs_has_to_be_a_member_of_its_family(tmp_path: Path) -> None:
    """GELU(−1) is −0.16 and ReLU(−1) is 0: bounds of λ ≥ 160 do not hold for an evaluation of the file."""
    gelu = nn.Sequential(nn.Linear(1, 1, bias=False), nn.GELU())
    with torch.no_grad():
        gelu[0].weight.fill_(1)  # type: ignore[operator,union-attr]
    net, spec, folder = tmp_path / "gelu.onnx", tmp_path / "p.vnnlib", tmp_path / "proofs"
    net.write_bytes(write_onnx(from_torch(gelu, (1,))))
    read = read_onnx(net)
    with pytest.raises(InputError, match="not in the family"):
        execution_model(read, "float32", 160)
    assert (
        execution_model(read, "float32", 1).arithmetic == "float32"
        and execution_model(read, "real", 160).output_size == 1
    )
    write_property(spec)
    asked = ["--spec", str(spec), "--net", str(net), "--arithmetic", "float32", "--certificates", str(folder)]
    assert certify.main([*asked, "--family", "1", "--method", "crown"]) == 0
    (path,) = folder.glob("*.jsonl.gz")
    assert "λ ≥ 1," in check(path, net, spec, "float32")
    first, *rest = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    path.write_bytes("\n".join(json.dumps(r) for r in [first | {"family": ["160"]}, *rest]).encode())
    with pytest.raises(Refused, match="no member"):
        check(path, net, spec, "float32")


def gelu_file(build: Callable[[Callable[..., str]], str]) -> bytes:
    """A file of one number x and what is built of operators."""
    nodes: list[onnx.NodeProto] = []

    def made(operator: str, *inputs: str | float) -> str:
        names = []
        for value in inputs:
            if isinstance(value, float):
                number = numpy_helper.from_array(np.float32(value))
                nodes.append(helper.make_node("Constant", [], [f"c{len(nodes)}"], value=number))
            names.append(nodes[-1].output[0] if isinstance(value, float) else value)
        nodes.append(helper.make_node(operator, names, [f"v{len(nodes)}"]))
        return str(nodes[-1].output[0])

    output = build(made)
    x, y = (helper.make_tensor_value_info(name, 1, [1, 1]) for name in ("x", output))
    model = helper.make_model(
        helper.make_graph(nodes, "g", [x], [y]), opset_imports=[helper.make_opsetid("", 20)], ir_version=9
    )
    return bytes(model.SerializeToString())


def test_a_family_of_a_gelu_that_is_spelled_out_is_refused_as_it_runs() -> None:
    """Its GELU is a member in real numbers, and as it runs it would be left as it is."""

    def build(made: Callable[..., str]) -> str:
        x = made("Relu", made("Add", made("Mul", "x", 2.0), 1.0))
        return made("Mul", made("Mul", x, 0.5), made("Add", made("Erf", made("Mul", x, 2.0)), 1.0))

    read = read_onnx(gelu_file(build))
    functions = [op.function for op in execution_model(read, "real", 1).ops if isinstance(op, Elementwise)]
    assert [isinstance(f, Hardened) for f in functions].count(True) == 2
    with pytest.raises(InputError, match="spelled out"):
        execution_model(read, "float32", 1)


def test_a_family_of_a_multiple_that_runs_has_no_certificate_unless_it_begins_there(tmp_path: Path) -> None:
    net, spec, folder = tmp_path / "gelu.onnx", tmp_path / "p.vnnlib", tmp_path / "proofs"
    net.write_bytes(gelu_file(lambda made: made("Div", made("Gelu", made("Mul", "x", 4.0)), 4.0)))
    write_property(spec)
    asked = ["--spec", str(spec), "--net", str(net), "--arithmetic", "float32", "--method", "crown"]
    for lam, kept in (("1", 0), ("4", 1)):
        assert certify.main([*asked, "--family", lam, "--certificates", str(folder / lam)]) == 0
        found = list((folder / lam).glob("*.jsonl.gz"))
        assert len(found) == kept and all("λ ≥ 1," in check(path, net, spec, "float32") for path in found)
