"""The wheel and the source archive: built as a release would be, and used outside the clone."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

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


def test_wheel_works_outside_the_clone(archives: Path, tmp_path: Path) -> None:
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


def test_source_archive_has_the_properties_and_the_tests(archives: Path) -> None:
    (archive,) = archives.glob("*.tar.gz")
    with tarfile.open(archive) as members:
        names = {name.split("/", 1)[1] for name in members.getnames()}
    shipped = {path.relative_to(ROOT).as_posix() for path in (ROOT / "specs").rglob("*") if path.is_file()}
    assert shipped
    assert {*shipped, "LICENSE", "README.md", "constraints.txt", "dev.py", "tests/commands/test_packaging.py"} <= names


def test_every_requirement_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in lines if not line.startswith("#")}
    extras = [r for requirements in PROJECT["optional-dependencies"].values() for r in requirements]
    wanted = {
        r.split(">=")[0].lower() for r in [*PROJECT["dependencies"], *extras] if not r.startswith(PROJECT["name"])
    }
    assert wanted <= pinned
