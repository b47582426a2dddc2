"""The README and the documentation: their examples run, the site is built without a warning, nothing is left out."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.examples import Block, blocks, commands, fits, problems
from tests.support.processes import environment
from verifiable_relu.data import DATASETS
from verifiable_relu.search.registry import methods

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md")), *sorted(DOCS.rglob("*.md"))]

RUN = [page for page in PAGES if page.name != "harden.md"]
"""All pages but one, whose examples train networks: ``test_examples.py`` runs them and looks at what they make."""


@pytest.mark.parametrize("page", RUN, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_example_of_a_page_runs_and_prints_what_it_says(page: Path, tmp_path: Path) -> None:
    assert problems(page, tmp_path) == []


def test_an_example_that_is_wrong_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    for text in (
        "```python\n1 / 0\n```\n",
        "```console\n$ python -m verifiable_relu.certify --spec none.vnnlib\nunsat\n```\n",
        "```console\n$ python -m verifiable_relu.check --help\n...no such word...\n```\n",
        "```sh\nrm -r /\n```\n",
        "```\nno language\n```\n",
    ):
        page.write_text(text)
        folder = tmp_path / str(abs(hash(text)))
        folder.mkdir()
        assert len(problems(page, folder)) == 1, text
    assert fits("a ... c", "a b\nb c\n") and not fits("a ... c", "a b c d")
    (block,) = [Block(page, 1, "console", "$ python -m x 'a b'\nsaid\n[exit status 2]\n")]
    (command,) = commands(block)
    assert (command.words, command.expected, command.status) == (("python", "-m", "x", "a b"), "said\n", 2)


def test_there_are_examples() -> None:
    languages = [block.language for page in PAGES for block in blocks(page)]
    assert languages.count("python") >= 10 and languages.count("console") >= 6


@pytest.mark.quick
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8"))
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.quick
@pytest.mark.parametrize(
    ("page", "name"), [*(("methods", name) for name in methods()), *(("networks", name) for name in DATASETS)]
)
def test_every_method_and_data_set_is_named(page: str, name: str) -> None:
    assert f"`{name}`" in (DOCS / f"{page}.md").read_text(encoding="utf-8")


def site(folder: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """Build the site of a folder; mkdocs counts no warning with ``--quiet``."""
    pytest.importorskip("mkdocs", reason="needs mkdocs")
    pytest.importorskip("mkdocstrings", reason="needs mkdocstrings")
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", out],
        cwd=folder, env=environment(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def test_a_docstring_of_a_parameter_that_is_none_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# Page\n\n::: told\n")
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("nav:")[0]
    (tmp_path / "mkdocs.yml").write_text(settings.replace("extra_css: [site.css]\n", ""), encoding="utf-8")
    text = 'def told(x: int) -> None:\n    """Tell.\n\n    Args:\n        x, y: it.\n    """\n'
    (tmp_path / "told.py").write_text(text)
    built = site(tmp_path, tmp_path / "site")
    assert built.returncode == 1 and "x, y" in built.stdout + built.stderr, built.stdout + built.stderr


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    built = site(ROOT, tmp_path / "site")
    assert built.returncode == 0, built.stdout + built.stderr
    reference = (tmp_path / "site" / "reference.html").read_text(encoding="utf-8")
    assert "Decide for each image whether the model" in reference
    loaded = re.compile(
        r"<(?:script|img|source|iframe)\b[^>]*\ssrc=.?(?:https?:)?//|<link\b[^>]*stylesheet[^>]*href=.?https?:"
    )
    assert [file.name for file in (tmp_path / "site").rglob("*.html") if loaded.search(file.read_text())] == []


def test_the_figures_are_those_of_their_script() -> None:
    spec = importlib.util.spec_from_file_location("draw", DOCS / "figures" / "draw.py")
    assert spec is not None and spec.loader is not None
    draw = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw)
    for name, make in draw.FIGURES.items():
        assert (DOCS / "figures" / name).read_text(encoding="utf-8") == make(), (
            f"run python docs/figures/draw.py: {name}"
        )
    assert {path.name for path in (DOCS / "figures").glob("*.svg")} == set(draw.FIGURES)
