"""Certificates from the command: written, checked, and checked again."""

from __future__ import annotations

import csv
import errno
import gzip
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.solver_cases import ball, mlp, row
from verifiable_relu.campaign import certificates
from verifiable_relu.certify import main
from verifiable_relu.check import __main__ as check
from verifiable_relu.network import write_onnx
from verifiable_relu.spec.property import Box, Property
from verifiable_relu.spec.write import vnnlib_text


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
    command = ["--spec", spec, "--net", str(instances.parent / "net.onnx"), "--method", "crown", "--joint", "160"]
    assert main([*command, "--certificates", str(folder)]) == 0
    assert "checked" in capsys.readouterr().err
    with (folder / "certificates.csv").open() as file:
        (line,) = csv.DictReader(file)
    assert "λ ≥ 160, 160," in line["detail"]
    assert b'"joint": ["160", "160"]' in gzip.decompress((folder / line["certificate"]).read_bytes())


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
    assert ".jsonl.gz: refused: a record of end is expected" in capsys.readouterr().out
    assert check.main([str(tmp_path)]) == 2
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
    cut, whole = capsys.readouterr().out.splitlines()
    assert cut.endswith("splits.jsonl.gz: refused: the line of the table is not whole")
    assert ": accepted: unsat" in whole
