"""onnxruntime writes no files of its own and sends nothing over the network when this package runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

WATCHED = """
import sys
touched = []
sys.addaudithook(lambda event, arguments: event.startswith("socket.") and touched.append((event, arguments)))
from verifiable_relu.certify import main
assert main(["--spec", sys.argv[1], "--method", "attack", "--quiet"]) == 0
import numpy as np
import torch
from verifiable_relu.train.export import quantize, written
images = np.random.default_rng(0).random((8, 4), np.float32)
quantize(written(torch.nn.Sequential(torch.nn.Linear(4, 3)).eval(), (4,)), images)
assert "onnxruntime" in sys.modules
sys.exit(f"network: {touched}" if touched else 0)
"""


def left_behind(code: str, folder: Path, *arguments: str) -> tuple[list[str], subprocess.CompletedProcess[str]]:
    """The files that a program leaves below an empty home folder and temporary folder, and its exit status."""
    for name in ("home", "tmp", "work"):
        (folder / name).mkdir()
    kept = {k: v for k, v in os.environ.items() if k != "ORT_DISABLE_TELEMETRY" and not k.startswith("XDG_")}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        cwd=folder / "work",
        env={**kept, "HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"), "PYTHONPATH": str(ROOT)},
        timeout=120,
    )
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()), done


@pytest.fixture
def violated(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A property whose counterexample is replayed by onnxruntime."""
    from tests.commands.test_certify import VIOLATED, network, spec
    from verifiable_relu.readers import write_onnx

    folder = tmp_path_factory.mktemp("instance")
    write_onnx(network(), folder / "net.onnx")
    (folder / "violated.vnnlib").write_text(spec(VIOLATED))
    return str(folder / "violated.vnnlib")


def test_an_answer_and_quantisation_leave_no_file_in_an_empty_home_and_open_no_socket(
    tmp_path: Path, violated: str
) -> None:
    files, done = left_behind(WATCHED, tmp_path, violated)
    assert (done.returncode, done.stdout.split("\n")[0], files) == (0, "sat", []), done.stderr


def test_onnxruntime_by_itself_does_leave_files(tmp_path: Path) -> None:
    files, done = left_behind("import onnxruntime", tmp_path)
    assert done.returncode == 0, done.stderr
    if not files:
        pytest.skip("this build of onnxruntime has no telemetry, so that the tests above show nothing")


def test_nothing_imports_onnxruntime_but_the_module_that_switches_its_telemetry_off() -> None:
    imports = re.compile(r"^\s*(import|from) onnxruntime", re.MULTILINE)
    files = list((ROOT / "verifiable_relu").rglob("*.py"))
    assert len(files) > 100 and not [path for path in files if imports.search(path.read_text())]
