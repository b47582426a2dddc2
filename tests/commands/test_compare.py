"""The command compare: two files on boxes, bounds against onnxruntime at random points, and bad input."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.solver_cases import ball, row
from verifiable_relu.check.__main__ import main as checker
from verifiable_relu.compare import main
from verifiable_relu.nn import mlp
from verifiable_relu.readers import from_torch, write_onnx
from verifiable_relu.runtime import session
from verifiable_relu.spec.property import Property
from verifiable_relu.spec.specfile import vnnlib_text
from verifiable_relu.train.export import quantize

IMAGES = np.random.default_rng(2).random((4, 6)).astype(np.float32)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network, the same with weights that are off by a thousandth, its int8 file, and one of another shape."""
    folder = tmp_path_factory.mktemp("compare")
    rng = np.random.default_rng(4)
    torch.manual_seed(4)
    network = mlp([6, 10, 10, 3], nn.ReLU)
    write_onnx(from_torch(network, (6,)), folder / "a.onnx")
    with torch.no_grad():
        for parameter in network.parameters():
            parameter *= 1.001
    write_onnx(from_torch(network, (6,)), folder / "b.onnx")
    seen = rng.random((200, 6)).astype(np.float32)
    (folder / "int8.onnx").write_bytes(quantize((folder / "a.onnx").read_bytes(), seen))
    write_onnx(from_torch(mlp([5, 4, 3], nn.ReLU), (5,)), folder / "other.onnx")
    np.savez(folder / "images.npz", images=IMAGES, labels=np.zeros(4, np.int64))
    for name, eps in (("p", 0.25), ("near", 0.05)):
        box = Property(ball(IMAGES[0].astype(float), eps), ((row({0: 1}, 0),),))
        (folder / f"{name}.vnnlib").write_text(vnnlib_text(box))
    return folder


def sampled(first: Path, second: Path, image: np.ndarray, eps: float) -> float:
    """The largest difference of outputs at random points of the ball and at its corners, as onnxruntime computes it."""
    rng = np.random.default_rng(0)
    shares = np.concatenate([rng.random((2000, image.size)), rng.integers(0, 2, (2000, image.size))])
    x = np.clip(image + eps * (2 * shares - 1), 0, 1).astype(np.float32)
    found = []
    for path in (first, second):
        run = session(path.read_bytes(), 1, precise=True)
        (name,) = (each.name for each in run.get_inputs())
        found.append(run.run(None, {name: x})[0])
    return float(np.abs(found[1] - found[0]).max())


@pytest.mark.parametrize("second", ["b.onnx", "int8.onnx"])
def test_no_difference_that_runs_is_larger(second: str, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--data", str(files / "images.npz"), "--images", "0-3", "--eps", "0.2"]
    assert main([str(files / "a.onnx"), str(files / second), *given]) == 0
    shown = capsys.readouterr()
    assert "neuron by neuron" in shown.err
    for number, line in enumerate(shown.out.splitlines()):
        name, largest = line.split(",")
        seen = sampled(files / "a.onnx", files / second, IMAGES[number], 0.2)
        assert name == f"image {number}" and seen <= float(largest) * (1 + 1e-6)
        # Of the smaller change nothing is lost to how wide the ball is.
        assert second == "int8.onnx" or float(largest) < 5 * seen


def test_answers(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b, boxes = str(files / "a.onnx"), str(files / "b.onnx"), ["--spec", str(files / "p.vnnlib"), "--quiet"]
    seen = sampled(files / "a.onnx", files / "b.onnx", IMAGES[0], 0.25)
    for asked, answer in (
        (["--delta", str(10 * seen)], "unsat"),
        (["--delta", str(0.9 * seen)], "sat"),
        (["--delta", str(10 * seen), "--arithmetic", "float32"], "unsat"),
        (["--delta", "0.5", "--family", "100"], "unsat"),
    ):
        # A family alone is compared with its limit.
        assert main([a, *([] if "--family" in asked else [b]), *boxes, *asked]) == 0
        name, _, found, _ = capsys.readouterr().out.strip().split(",")
        assert (name, found) == ("box 0", answer)
    assert main([a, a, "--spec", str(files / "p.vnnlib"), "--delta", "1e-3"]) == 0
    shown = capsys.readouterr()
    assert shown.out.split(",")[2] == "unsat" and "1 unsat" in shown.err


def test_certificates_of_two_networks(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Written and accepted, and once more by the checker alone; not for another δ."""
    a, kept = str(files / "a.onnx"), str(tmp_path / "kept")
    for second, more in (("b.onnx", []), ("int8.onnx", []), ("a.onnx", ["--family", "50"]), ("b.onnx", ["--top1"])):
        asked = more if "--top1" in more else ["--delta", "5", *more]
        assert main([a, str(files / second), "--spec", str(files / "near.vnnlib"), *asked, "--certificates", kept]) == 0
        shown = capsys.readouterr()
        assert "top1" in asked[0] or "box 0: checked" in shown.err
    assert checker([kept]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 3 and all("accepted: unsat: " in line for line in lines)
    changed = {path: path.read_text().replace("5.0", "0.5") for path in (tmp_path / "kept").glob("*.vnnlib")}
    for path, text in changed.items():
        path.write_text(text)
    assert checker([kept]) == 1
    assert "another property" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["a.onnx", "other.onnx", "--spec", "p.vnnlib"], "cannot be compared: their shapes differ"),
        (["a.onnx", "b.onnx", "--spec", "none.vnnlib"], "none.vnnlib: no such file"),
        (["a.onnx", "none.onnx", "--spec", "p.vnnlib"], "none.onnx: no such file"),
        (["a.onnx", "p.vnnlib", "--spec", "p.vnnlib"], "p.vnnlib: "),
        (["a.onnx", "b.onnx", "--spec", "p.vnnlib", "--arithmetic", "float33"], "unknown arithmetic"),
        (["a.onnx", "b.onnx", "--data", "images.npz", "--images", "4", "--eps", "1"], "image 4 does not"),
        (["a.onnx", "b.onnx", "--spec", "p.vnnlib", "--delta", "1", "--method", "none"], "unknown method"),
        (["a.onnx", "--spec", "p.vnnlib"], "a second network is needed"),
        (["a.onnx", "b.onnx"], "--spec --data"),
        (["a.onnx", "b.onnx", "--data", "mnist", "--eps", "1"], "go together"),
        (["a.onnx", "b.onnx", "--spec", "p.vnnlib", "--delta", "1", "--top1"], "not allowed with"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], said: str, files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files)
    try:
        status: object = main(arguments)
    except SystemExit as end:
        status = end.code
    assert status == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1 and said in shown.err
