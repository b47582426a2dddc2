"""``dev.py``: each command finds what it needs installed, and nothing is installed twice."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def load() -> Any:
    spec = importlib.util.spec_from_file_location("dev_script", ROOT / "dev.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


dev = load()


class Pip:
    """Stands in for pip and venv, and keeps what they are told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, unreachable: bool = False, gpu: bool = False) -> None:
        self.calls: list[list[str]] = []
        self.made = 0
        self.fails = False

        def run(command: list[Any], **options: Any) -> None:
            words = [str(word) for word in command]
            assert words[1:4] == ["-m", "pip", "install"]
            self.calls.append(words[4:])
            if self.fails or (unreachable and dev.CPU_BUILDS in words):
                raise subprocess.CalledProcessError(1, words)

        def create(folder: Path, clear: bool, with_pip: bool) -> None:
            assert clear and with_pip
            self.made += 1
            folder.mkdir(exist_ok=True)
            (folder / "set-up.txt").unlink(missing_ok=True)

        monkeypatch.setattr(dev.subprocess, "run", run)
        monkeypatch.setattr(dev.venv, "create", create)
        monkeypatch.setattr(dev.sys, "platform", "linux")
        monkeypatch.setattr(dev.shutil, "which", lambda name: "/usr/bin/nvidia-smi" if gpu else None)
        monkeypatch.setattr(dev.Path, "exists", lambda path: False)

    def asked(self) -> list[str]:
        """What was installed, in order: the last word of each call."""
        asked, self.calls = [call[-1] for call in self.calls], []
        return asked


@pytest.mark.parametrize(
    ("command", "extras"),
    [
        ("python -m verifiable_relu.certify --spec specs/cifar_eps.vnnlib", set()),
        ("verifiable-relu certify --spec train", set()),
        ("pytest tests/unit", {"dev"}),
        ("python -m benchmarks.study smoke", {"dev"}),
        ("python benchmarks/speed/memory.py", {"dev"}),
        ("mkdocs serve", {"docs"}),
        ("verifiable-relu train --data digits", {"data"}),
    ],
)
def test_a_command_gets_the_extras_that_it_needs(command: str, extras: set[str]) -> None:
    assert dev.needed(command.split()) == extras
    assert extras <= EXTRAS.keys()


@pytest.mark.parametrize(
    ("asked", "marks", "mypy"),
    [([], [], True), (["--quick"], ["-m", "quick"], False), (["--all"], ["-m", ""], True), (["--newest"], [], True)],
)
def test_a_scope_chooses_checks_and_tests(
    asked: list[str], marks: list[str], mypy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Any] = []
    monkeypatch.setattr(dev.Environment, "set_up", lambda where, extras: None)
    monkeypatch.setattr(dev, "check", lambda *given: done.append(given) or 0)
    assert dev.main(["check", *asked, "-x"]) == 0
    ((where, arguments, checks),) = done
    assert arguments == [*marks, "-x"] and (("mypy",) in checks) is mypy
    assert where == (dev.NEWEST if asked == ["--newest"] else dev.PINNED)


def test_extras_are_added_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip, where = Pip(monkeypatch), dev.Environment(tmp_path / "env")
    where.set_up()
    assert pip.asked() == ["torch==2.13.0", "."] and pip.made == 1
    where.set_up()
    assert pip.asked() == [] and pip.made == 1
    where.set_up(["data"])
    assert pip.asked() == [".[data]"]
    where.set_up(["dask", "data"])
    assert pip.asked() == [".[dask,data]"]
    where.set_up(["dev"])
    assert pip.asked() == [".[dev]", dev.AUTO_LIRPA]
    for extras in ([], ["docs"], ["dev"], ["data", "docs"]):
        where.set_up(extras)
    assert pip.asked() == [] and pip.made == 1
    monkeypatch.setattr(dev, "fingerprint", lambda: "other")
    where.set_up()
    assert pip.asked() == ["torch==2.13.0", "."] and pip.made == 2


def test_the_build_for_cpus_is_tried_first_and_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = Pip(monkeypatch, unreachable=True)
    dev.Environment(tmp_path / "env").set_up()
    first, second = pip.calls
    assert dev.CPU_BUILDS in first and "--no-deps" in first and first[first.index("--retries") + 1] == "0"
    assert second[-2:] == ["-e", "."] and dev.CPU_BUILDS not in second and "constraints.txt" in second
    # A machine with a GPU gets pip's own choice.
    pip = Pip(monkeypatch, gpu=True)
    dev.Environment(tmp_path / "other").set_up()
    assert pip.asked() == ["."]
