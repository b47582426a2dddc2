"""The scripts of examples/ and the code of docs/harden.md and docs/reference.md do what they show."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from verifiable_relu.readers import read_onnx
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
            assert "Relu" in {read_onnx(path).ops[i].function.kind for i in read_onnx(path).activations}
        elif path.suffix == ".vnnlib":
            assert read_vnnlib(path).properties
    assert list(tmp_path.iterdir())


def test_the_cells_of_the_notebook_run_one_after_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    cells = json.loads((EXAMPLES / "quickstart.ipynb").read_text(encoding="utf-8"))["cells"]
    names: dict[str, Any] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), "quickstart.ipynb", "exec"), names)
            assert cell["outputs"] == [], "outputs are made where the notebook is opened"
    certified = {name: [each.summary["certified"] for each in found] for name, found in names["results"].items()}
    assert certified["hardened"][0] >= 35 and certified["hardened"] == sorted(certified["hardened"], reverse=True)
    assert names["again"].summary["certified"] >= 4
    drawn = names["left"].lines
    assert [y * 40 for y in drawn[0].get_ydata()] == pytest.approx(certified["hardened"])
    assert len(names["right"].lines) == 2


def run_page(name: str) -> dict[str, Any]:
    """Run the Python code of a page of docs/, block after block; returns the names that it defines."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / name).read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, name, "exec"), names)
    return names


def test_the_code_about_hardening_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = run_page("harden.md")
    assert read_onnx(tmp_path / "diagonal.onnx").output_size == 2
    assert [result.answer for result in names["results"]].count("unsat") >= 4


def test_the_code_of_the_python_page_runs() -> None:
    names = run_page("reference.md")
    radii, large = names["radii"], names["large"]
    assert names["box"].output_size == 2 and (radii.certified > 0).all()
    assert not any(r.answer == "sat" and radius > 0.1 for r, radius in zip(large, radii.certified, strict=True))
