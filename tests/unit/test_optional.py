"""What only some parts of the package need: without it the other parts work, and these say what to install."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from verifiable_relu.__main__ import main
from verifiable_relu.certify import main as certify
from verifiable_relu.errors import InputError
from verifiable_relu.search import registry
from verifiable_relu.search.registry import METHODS, make

ROOT = Path(__file__).resolve().parents[2]
SPEC = str(ROOT / "specs" / "cifar_eps.vnnlib")
LIST = str(ROOT / "specs" / "instances.csv")

COMMANDS = [
    ("sklearn.datasets", "scikit-learn", ["train", "--data", "digits", "--out", "net.onnx"]),
    (
        "sklearn.datasets",
        "scikit-learn",
        ["spec", "--net", "net.onnx", "--data", "digits", "--correct", "1", "--eps", "0.1", "--out", "s"],
    ),
    ("pooch", "pooch", ["train", "--data", "mnist", "--out", "net.onnx"]),
    ("distributed", "distributed", ["certify", "--spec", LIST, "--executor", "dask://127.0.0.1:1"]),
]


@pytest.mark.parametrize(("module", "package", "command"), COMMANDS, ids=[f"{c[0]}-{m}" for m, _, c in COMMANDS])
def test_a_command_that_lacks_a_package_is_told_its_name(
    module: str,
    package: str,
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delenv("VERIFIABLE_RELU_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.onnx").write_bytes((ROOT / "specs" / "mnist_mlp.onnx").read_bytes())
    np.savez("own.npz", images=np.zeros((20, 4), dtype=np.float32), labels=np.arange(20) % 2)
    if command[0] == "train":
        (tmp_path / "net.onnx").unlink()
    assert (certify(command[1:]) if command[0] == "certify" else main(command)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{command[0]}: ")
    assert line.endswith(f" needs a package that is not installed: pip install {package}")


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.needs])
def test_a_method_whose_packages_are_missing_is_bad_input_and_no_fault(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    method = METHODS[name]
    for lacked in method.needs:
        # The others are there, whatever this environment has.
        monkeypatch.setattr(registry, "find_spec", lambda module, lacked=lacked: None if module == lacked else module)
        for spec in (SPEC, LIST):
            assert certify(["--spec", spec, "--method", name, "--jobs", "1"]) == 2
            out, error = capsys.readouterr()
            said = "needs a package that is not installed: pip install"
            assert error == f"certify: the method '{name}' {said} {method.install}\n"
            assert not out


def test_methods_need_what_their_modules_import_and_the_base_lacks() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    base = {requirement.split(">=")[0].lower() for requirement in declared["dependencies"]}
    for name, method in METHODS.items():
        assert bool(method.needs) == name.startswith(("marabou", "auto_lirpa")), name
        assert base.isdisjoint(method.needs)


def test_no_advice_names_a_package_of_ours_in_a_registry() -> None:
    """The package is in no registry: pip would not find it, or would find somebody else's."""
    ours = ("pip install " + "verifiable", "pip install '" + "verifiable")
    files = [p for f in ("verifiable_relu", "docs", "benchmarks", "examples", "specs") for p in (ROOT / f).rglob("*")]
    for path in [*files, *ROOT.glob("*.md")]:
        if path.suffix in {".py", ".md", ".html", ".j2", ".toml", ".sh"}:
            text = path.read_text(encoding="utf-8")
            assert not any(advice in text for advice in ours), path


def test_the_networks_that_ship_are_found() -> None:
    import verifiable_relu

    assert {path.stem for path in verifiable_relu.specs().glob("*.onnx")} == {"cifar_cnn", "mnist_cnn", "mnist_mlp"}


def installed(method: str) -> bool:
    return all(find_spec(module) for module in METHODS[method].needs)


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.needs])
def test_a_method_is_made_where_its_packages_are(name: str) -> None:
    make_it: Callable[[], Any] = lambda: make(name)  # noqa: E731
    if installed(name):
        assert make_it() is not None
    else:
        with pytest.raises(InputError, match="pip install"):
            make_it()
