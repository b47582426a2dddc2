"""Certificates from the command: written, checked, and checked again."""

from __future__ import annotations

import csv
import errno
import gzip
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from tests.soundness import page_checker
from tests.support.solver_cases import ball, mlp, row
from verifiable_relu.campaign import certificates
from verifiable_relu.campaign.store import read_results
from verifiable_relu.certify import main
from verifiable_relu.check import Refused
from verifiable_relu.check import __main__ as check
from verifiable_relu.errors import InputError
from verifiable_relu.readers import read_onnx, write_onnx
from verifiable_relu.report import __main__ as report
from verifiable_relu.spec.property import Box, Property
from verifiable_relu.spec.specfile import vnnlib_text


@pytest.fixture(scope="module")
def instances(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four instances of one network: unsat by bounds, unsat by splits, sat, and one in VNN-LIB 2.0."""
    folder = tmp_path_factory.mktemp("instances")
    rng = np.random.default_rng(5)
    network = mlp(rng, (3, 6, 6, 2))
    write_onnx(network, folder / "net.onnx")
    boxes: dict[str, Box] = {"bounds": ball(np.zeros(3), 0.125), "splits": ball(np.zeros(3), 1.0)}
    for name, box in boxes.items():
        shares = np.concatenate([rng.random((4000, 3)), rng.integers(0, 2, (4000, 3))])
        outputs = network(torch.from_numpy(box.lower + shares * (box.upper - box.lower)))
        least = float((outputs[:, 0] - outputs[:, 1]).min())
        prop = Property(box, ((row({0: 1, 1: -1}, round(least - 0.125, 3)),),))
        (folder / f"{name}.vnnlib").write_text(vnnlib_text(prop))
        (folder / f"{name}2.vnnlib").write_text(vnnlib_text(prop, "2.0"))
    reached = Property(boxes["splits"], ((row({0: 1, 1: -1}, 100),),))
    (folder / "sat.vnnlib").write_text(vnnlib_text(reached))
    names = ("bounds", "splits", "sat", "bounds2")
    (folder / "instances.csv").write_text("".join(f"net.onnx,{name}.vnnlib,60\n" for name in names))
    return folder / "instances.csv"


@pytest.mark.parametrize("method", ["auto", "bab"])
def test_every_verdict_gets_a_certificate_that_is_checked(
    method: str, instances: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "certificates"
    command = ["--spec", str(instances), "--method", method, "--out", str(tmp_path / "out"), "--quiet"]
    assert main([*command, "--certificates", str(folder), "--jobs", "1"]) == 0
    answers = sorted(line.split(",")[2] for line in capsys.readouterr().out.splitlines())
    assert answers == ["sat", "unsat", "unsat", "unsat"]
    with (tmp_path / "out" / "results.csv").open() as file:
        trusted = [(record["answer"], record["trust"]) for record in csv.DictReader(file)]
    assert trusted == [("unsat", "checked"), ("unsat", "checked"), ("sat", "checked"), ("unsat", "checked")]
    with (folder / "certificates.csv").open() as file:
        table = {Path(line["vnnlib"]).stem: line for line in csv.DictReader(file)}
    assert [table[name]["checked"] for name in ("bounds", "splits", "sat", "bounds2")] == ["true"] * 4
    assert b'"split"' in gzip.decompress((folder / table["splits"]["certificate"]).read_bytes())


def test_joint_verdicts_get_certificates_for_the_whole_family(
    instances: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "certificates"
    spec = str(instances.parent / "bounds.vnnlib")
    command = ["--spec", spec, "--net", str(instances.parent / "net.onnx"), "--method", "crown", "--family", "160"]
    assert main([*command, "--certificates", str(folder)]) == 0
    assert "checked" in capsys.readouterr().err
    with (folder / "certificates.csv").open() as file:
        (line,) = csv.DictReader(file)
    assert "λ ≥ 160, 160," in line["detail"]
    assert b'"family": ["160", "160"]' in gzip.decompress((folder / line["certificate"]).read_bytes())


@pytest.mark.parametrize("asked", [["--family", "500"], ["--arithmetic", "float32"]])
def test_trees_of_a_family_and_of_what_runs_are_accepted(
    asked: list[str], instances: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, net = str(instances.parent / "splits.vnnlib"), str(instances.parent / "net.onnx")
    assert main(["--spec", spec, "--net", net, *asked, "--certificates", str(tmp_path / "kept")]) == 0
    shown = capsys.readouterr()
    assert shown.out == "unsat\n" and ", checked" in shown.err
    assert check.main([str(tmp_path / "kept")]) == 0


@pytest.mark.parametrize("other", ["Abs", "MaxPool", "Sigmoid"])
def test_a_family_with_other_activations_has_no_certificate_and_keeps_its_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], other: str
) -> None:
    node, value = onnx.helper.make_node, onnx.helper.make_tensor_value_info
    middle = node(other, ["a"], ["b"], **({"kernel_shape": [1, 2]} if other == "MaxPool" else {}))
    nodes = [node("Relu", ["x"], ["a"]), middle, node("Relu", ["b"], ["c"])]
    ends = value("x", 1, (1, 1, 1, 2)), value("c", 1, (1, 1, 1, 1 if other == "MaxPool" else 2))
    graph = onnx.helper.make_graph(nodes, "g", [ends[0]], [ends[1]])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 13)], ir_version=8)
    net, spec = tmp_path / "net.onnx", tmp_path / "p.vnnlib"
    net.write_bytes(model.SerializeToString())
    names = ["X_0", "X_1", *(f"Y_{i}" for i in range(1 if other == "MaxPool" else 2))]
    spec.write_text(
        "".join(f"(declare-const {name} Real)" for name in names)
        + "".join(f"(assert (>= X_{i} -1))(assert (<= X_{i} 1))" for i in range(2))
        + "(assert (>= Y_0 3))"
    )
    command = ["--spec", str(spec), "--net", str(net), "--family", "160", "--certificates", str(tmp_path / "kept")]
    assert main(command) == 0
    printed = capsys.readouterr()
    assert "unsat" in printed.out and "no certificates of families of networks with" in printed.err


def lax(change: Callable[[onnx.ModelProto], object]) -> onnx.ModelProto:
    """A file with two ReLU layers beside each other, crops around them, and a change to it."""
    rng = np.random.default_rng(3)
    sizes = {"wa": (3, 4), "wb": (3, 4), "a0": (4,), "b0": (4,), "wo": (4, 2), "o0": (2,)}
    weights = {name: rng.normal(size=size).astype(np.float32) for name, size in sizes.items()}
    weights["crop"] = np.array([0, 1, 0, -1])
    named = [numpy_helper.from_array(number, name) for name, number in weights.items()]
    lines = (
        ("Gemm", "x wa a0", "a"), ("Relu", "a", "ra"), ("Gemm", "x wb b0", "b"), ("Relu", "b", "rb"),
        ("Pad", "rb crop", "cropped"), ("Add", "ra cropped", "sum"), ("Gemm", "sum wo o0", "y"),
    )  # fmt: skip
    nodes = [onnx.helper.make_node(operator, inputs.split(), [made]) for operator, inputs, made in lines]
    ends = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, (1, n)) for name, n in (("x", 3), ("y", 2))
    ]
    graph = onnx.helper.make_graph(nodes, "g", ends[:1], ends[1:], named)
    made = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 13)], ir_version=8)
    change(made)
    return made


NEGATIVE = "negative pads of 'cropped' take elements off"
LAX: dict[str, Callable[[onnx.ModelProto], object]] = {
    # How a file is changed, by the sentence that says how it is read.
    "output 'y' has no type or no shape: those": lambda made: made.graph.output[0].ClearField("type"),
    "output 'y' has no type or no shape": lambda made: made.graph.output[0].type.tensor_type.ClearField("shape"),
    "imported twice, in one version": lambda made: made.opset_import.append(onnx.helper.make_opsetid("ai.onnx", 13)),
    "1 tensors are named without a type": lambda made: made.graph.value_info.add(name="a"),
    NEGATIVE: lambda made: None,
}


@pytest.mark.parametrize("sentence", LAX)
def test_the_checker_reads_files_as_tools_write_them_and_the_summary_says_how(
    sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.onnx").write_bytes(lax(LAX[sentence]).SerializeToString())
    network = read_onnx(tmp_path / "net.onnx")
    assert len(network.source.repairs) == len({sentence, NEGATIVE})
    box = ball(np.zeros(3), 1.0)
    rng = np.random.default_rng(0)
    at = torch.from_numpy(np.concatenate([rng.uniform(-1, 1, (4000, 3)), rng.choice([-1.0, 1.0], (99, 3))]))
    outputs = network(at)
    prop = Property(box, ((row({0: 1, 1: -1}, round(float((outputs[:, 0] - outputs[:, 1]).min()) - 0.25, 3)),),))
    (tmp_path / "p.vnnlib").write_text(vnnlib_text(prop))
    command = ["--spec", str(tmp_path / "p.vnnlib"), "--net", str(tmp_path / "net.onnx"), "--method", "bab"]
    assert main([*command, "--certificates", str(tmp_path / "c"), "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr()
    assert said.out == "unsat\n" and "checked" in said.err
    assert [line for line in said.err.splitlines() if line.startswith("  file      ") and sentence in line]
    assert read_results(tmp_path / "out")[0].repairs == network.source.repairs
    (file,) = (tmp_path / "c").glob("*.jsonl.gz")
    certificate = gzip.decompress(file.read_bytes())
    assert b'"split"' in certificate
    files = [(tmp_path / name).read_bytes() for name in ("net.onnx", "p.vnnlib")]
    page_checker.check(certificate, *files)


def test_a_folder_is_checked_again(instances: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "certificates"
    spec = str(instances.parent / "bounds.vnnlib")
    assert main(["--spec", spec, "--net", str(instances.parent / "net.onnx"), "--certificates", str(folder)]) == 0
    assert "checked" in capsys.readouterr().err
    assert check.main([str(folder)]) == 0
    assert ".jsonl.gz: accepted: unsat" in capsys.readouterr().out
    (file,) = folder.glob("*.jsonl.gz")
    file.write_bytes(gzip.compress(gzip.decompress(file.read_bytes()).replace(b'"end"', b'"End"')))
    assert check.main([str(folder)]) == 1
    assert ".jsonl.gz: refused: " in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        check.main([str(folder), "--net", "net.onnx"])
    capsys.readouterr()
    (folder / "certificates.csv").unlink()
    assert check.main([str(folder)]) == 2
    assert "no table of certificates" in capsys.readouterr().err


def test_a_verdict_stands_where_its_certificate_cannot_be_kept(
    instances: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, net = str(instances.parent / "bounds.vnnlib"), str(instances.parent / "net.onnx")
    command = ["--spec", spec, "--net", net, "--method", "crown"]

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def broken(*_: object) -> None:
        raise RecursionError("the checker fails")

    for number, (name, fault, said) in enumerate(
        [("writer", full, "No space left on device"), ("check", broken, "RecursionError: the checker fails")]
    ):
        with monkeypatch.context() as patched:
            # The table has been made before the disk is full.
            module = csv if name == "writer" else certificates
            folder = tmp_path / str(number)
            certificates.Certificates(folder)
            patched.setattr(module, name, fault)
            assert main([*command, "--certificates", str(folder)]) == 0
        found = capsys.readouterr()
        assert found.out == "unsat\n" and said in found.err and "checked" not in found.err


def test_a_line_of_the_table_that_was_not_written_to_its_end_spoils_no_other(
    instances: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, spec = tmp_path / "certificates", str(instances.parent / "bounds.vnnlib")
    certificates.Certificates(folder)
    with (folder / "certificates.csv").open("a") as file:
        file.write("splits.jsonl.gz,net.on")
    assert main(["--spec", spec, "--net", str(instances.parent / "net.onnx"), "--certificates", str(folder)]) == 0
    capsys.readouterr()
    assert check.main([str(folder)]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first == "splits.jsonl.gz: the line of the table is not whole" and ": accepted: unsat" in second


def test_a_table_of_other_columns_gets_no_lines(tmp_path: Path) -> None:
    certificates.Certificates(tmp_path)
    table = tmp_path / "certificates.csv"
    earlier = table.read_text().replace(",other", "")
    table.write_text(earlier)
    with pytest.raises(InputError, match="those of another version"):
        certificates.Certificates(tmp_path)
    assert table.read_text() == earlier


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> str:
        raise Refused("record 3: it proves nothing")

    monkeypatch.setattr(certificates, "check", refuse)


@pytest.mark.usefixtures("refusing")
def test_an_unsat_stands_where_its_hints_fall_short(
    instances: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = ["--spec", str(instances.parent / "bounds.vnnlib"), "--net", str(instances.parent / "net.onnx")]
    assert main([*spec, "--certificates", str(tmp_path / "c"), "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr()
    assert shown.out == "unsat\n" and ", rounded)" in shown.err
    assert "no certificate: the checker refuses it: record 3: it proves nothing" in shown.err
    (result,) = read_results(tmp_path / "out")
    assert not result.disputed and result.trust == "rounded" and result.margin is not None


@pytest.mark.usefixtures("refusing")
@pytest.mark.parametrize("quiet", [[], ["--quiet"]])
def test_a_refused_counterexample_makes_the_verdict_unknown_and_is_never_quiet(
    quiet: list[str], instances: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = ["--spec", str(instances.parent / "sat.vnnlib"), "--net", str(instances.parent / "net.onnx")]
    # The answer of the second run is that of the record.
    for _ in range(2):
        command = [*spec, "--certificates", str(tmp_path / "c"), "--out", str(tmp_path / "out"), *quiet]
        assert main(command) == 3
        shown = capsys.readouterr()
        assert shown.out == "unknown\n"
        first = shown.err.splitlines()[0]
        assert "sat.vnnlib" in first and "the checker refuses the certificate" in first
        assert "record 3: it proves nothing" in first
        assert first.startswith("certify: ") == bool(quiet)
    (result,) = read_results(tmp_path / "out")
    assert result.disputed and result.trust is None and result.margin is None and result.reason == "unconfirmed"


@pytest.mark.usefixtures("refusing")
def test_a_campaign_goes_on_after_a_refused_certificate_and_its_page_warns(
    instances: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = ["--spec", str(instances), "--method", "auto", "--jobs", "1", "--out", str(out)]
    assert main([*command, "--certificates", str(tmp_path / "c")]) == 3
    shown = capsys.readouterr()
    assert [line.split(",")[2] for line in shown.out.splitlines()] == ["unsat", "unsat", "unknown", "unsat"]
    assert shown.err.startswith("certify: ") and shown.err.count("the checker refuses the certificate") == 1
    with (out / "results.csv").open() as file:
        answers = [(row["answer"], row["reason"]) for row in csv.DictReader(file)]
    assert answers[2] == ("unknown", "unconfirmed") and {answers[i] for i in (0, 1, 3)} == {("unsat", "proved")}
    with (tmp_path / "c" / "certificates.csv").open() as file:
        assert [row["checked"] for row in csv.DictReader(file)] == ["false"] * 4
    assert report.main([str(out)]) == 0
    assert "Verifier and checker disagree on 1 instance" in (out / "report.html").read_text()


def test_names_of_certificates_are_harmless_whatever_the_property_is_called(instances: Path, tmp_path: Path) -> None:
    folder = tmp_path / "certificates"
    for name in ("=1+1", "a[red]\x1b[31mb", "\udcff"):
        spec = tmp_path / f"{name}.vnnlib"
        spec.write_text((instances.parent / "bounds.vnnlib").read_text())
        command = ["--spec", str(spec), "--net", str(instances.parent / "net.onnx"), "--method", "crown", "--quiet"]
        assert main([*command, "--certificates", str(folder)]) == 0
    made = [path.name for path in folder.glob("*.jsonl.gz")]
    assert len(made) == 3 and all(re.fullmatch(r"[\w][\w.-]*", name) for name in made)
    assert check.main([str(folder)]) == 0
