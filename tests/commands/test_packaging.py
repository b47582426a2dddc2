"""The wheel and the source archive: built as a release would be, and used outside the clone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

try:
    version("hatchling")
except PackageNotFoundError:
    pytest.skip("needs hatchling", allow_module_level=True)


def run(*command: str | Path, cwd: Path = ROOT, **variables: str) -> str:
    return subprocess.run(
        [sys.executable, *command], cwd=cwd, env={**os.environ, **variables}, check=True, capture_output=True, text=True
    ).stdout


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run("-m", "hatchling", "build", "-d", folder)
    return folder


def test_the_wheel_works_outside_the_clone(archives: Path, tmp_path: Path) -> None:
    (wheel,) = archives.glob("*.whl")
    site = tmp_path / "site"
    run("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site, wheel)
    (licence,) = site.glob("*.dist-info/licenses/LICENSE")
    assert licence.read_text() == (ROOT / "LICENSE").read_text()
    assert (site / "verifiable_relu" / "py.typed").is_file()

    def installed(*command: str) -> str:
        return run(*command, cwd=tmp_path, PYTHONPATH=str(site))

    where = installed("-c", "import verifiable_relu as v; print(v.__file__, v.__version__)").split()
    assert where == [str(site / "verifiable_relu" / "__init__.py"), PROJECT["version"]]
    for command in ("certify", "spec", "train"):
        assert installed("-m", f"verifiable_relu.{command}", "--help").startswith("usage: ")
    shipped = Path(installed("-c", "import verifiable_relu; print(verifiable_relu.specs())").strip())
    assert shipped == site / "verifiable_relu" / "specs"
    assert {path.name for path in shipped.iterdir()} == {path.name for path in (ROOT / "specs").iterdir()}
    answer = installed("-m", "verifiable_relu.certify", "--quiet", "--spec", str(shipped / "cifar_eps.vnnlib"))
    assert answer.split() == ["unsat"]


def test_source_archive_has_the_properties_and_the_tests(archives: Path) -> None:
    (archive,) = archives.glob("*.tar.gz")
    with tarfile.open(archive) as members:
        names = {name.split("/", 1)[1] for name in members.getnames()}
    shipped = {path.relative_to(ROOT).as_posix() for path in (ROOT / "specs").rglob("*") if path.is_file()}
    assert shipped
    assert {*shipped, "LICENSE", "README.md", "constraints.txt", "dev.py", "tests/commands/test_packaging.py"} <= names


def pins() -> dict[str, list[Requirement]]:
    """The requirements of constraints.txt by name."""
    found: dict[str, list[Requirement]] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if not line.startswith("#"):
            found.setdefault(Requirement(line).name.lower().replace("_", "-"), []).append(Requirement(line))
    return found


def test_every_requirement_is_pinned() -> None:
    extras = [r for requirements in PROJECT["optional-dependencies"].values() for r in requirements]
    wanted = {Requirement(r).name.lower() for r in [*PROJECT["dependencies"], *extras]}
    assert wanted - {PROJECT["name"]} <= pins().keys()


def test_the_version_is_the_same_in_every_file() -> None:
    found = {
        "CITATION.cff": r"^version: (\S+)$",
        "CHANGELOG.md": r"^## (\S+)$",
        "verifiable_relu/__init__.py": r'^__version__ = "(\S+)"$',
    }
    versions = {name: re.findall(rule, (ROOT / name).read_text("utf-8"), re.M)[:1] for name, rule in found.items()}
    assert versions == {name: [PROJECT["version"]] for name in found}
