"""The scripts of examples/ and the code of docs/harden.md do what they show."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from verifiable_relu.network import read_onnx
from verifiable_relu.spec import read_vnnlib

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_an_example_ends_with_a_certified_relu_network(name: str, tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = module.main(tmp_path)
    assert found["accuracy"] > 0.95 and found["certified"] >= 0.7
    for path in tmp_path.iterdir():
        if path.suffix == ".onnx":
            assert any(node.op == "Relu" for node in read_onnx(path).nodes)
        elif path.suffix == ".vnnlib":
            assert read_vnnlib(path).properties
    assert list(tmp_path.iterdir())


def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "harden.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 3
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "docs/harden.md", "exec"), names)
    assert read_onnx(tmp_path / "diagonal.onnx").output_size == 2
    answers = [result.answer for result in names["results"]]  # type: ignore[attr-defined]
    assert answers.count("unsat") >= 4
