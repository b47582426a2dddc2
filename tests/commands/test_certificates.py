"""Certificates from the command: written, checked, and checked again."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.solver_cases import ball, mlp, row
from verifiable_relu.certify import main
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


def test_a_folder_is_checked_again(instances: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "certificates"
    spec = str(instances.parent / "bounds.vnnlib")
    assert main(["--spec", spec, "--net", str(instances.parent / "net.onnx"), "--certificates", str(folder)]) == 0
    assert "checked" in capsys.readouterr().err
    assert main(["--check", str(folder)]) == 0
    assert capsys.readouterr().out.split(",")[3] == "accepted"
    (file,) = folder.glob("*.jsonl.gz")
    file.write_bytes(gzip.compress(gzip.decompress(file.read_bytes()).replace(b'"end"', b'"End"')))
    assert main(["--check", str(folder)]) == 1
    assert capsys.readouterr().out.split(",")[3] == "refused"
    assert main(["--check", str(tmp_path / "none")]) == 2
    assert "no table of certificates" in capsys.readouterr().err
