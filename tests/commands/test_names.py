"""Names and words: what pages name exists, and the package keeps to plain docstrings and one meaning for each name."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.names import ROOT, stale

PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md")), *sorted((ROOT / "docs").rglob("*.md"))]

OTHERS = {
    "docs/arithmetic.md": {"session.x64quantprecision"},
    "docs/trust.md": {"module.weight"},
}
"""What looks like a name of this project and is none: an option of onnxruntime, an attribute of a user's module."""


def variables(text: str) -> frozenset[str]:
    """The names that a page's examples give to objects."""
    return frozenset(re.findall(r"^(\w+) = ", text, re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page: Path) -> None:
    text, name = page.read_text(encoding="utf-8"), str(page.relative_to(ROOT))
    assert set(stale(text, variables(text))) - OTHERS.get(name, set()) == set()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("so it is unless `Auto(processes=2)` or `Bab(processes=2)` says otherwise",
         ["Auto(processes)", "Bab(processes)"]),
        ("`verify(model, images, labels, eps=0.1, tolerance=1)`", ["verify(eps, tolerance)"]),
        ("`network.hardend`, `verifiable_relu.spec.reed` and `bounds/chunks.py`",
         ["network.hardend", "verifiable_relu.spec.reed", "bounds/chunks.py"]),
        ("`verify(…, family=160)`, `TimeBudget(processes=2)`, `families.harden`, `Result.certificate`, "
         "`bounds/alpha.py`, `records.jsonl`, `torch.nn.GELU`, `nn.GELU`, `Conv(x=1)`", []),
        ("```\n`Auto(processes=2)`\n```\n", []),
    ],
)  # fmt: skip
def test_what_a_page_names_and_is_gone_is_found(text: str, found: list[str]) -> None:
    assert stale(text) == found


MOST_OPENERS, MOST_PHRASES = 0, 0
TWICE: set[str] = set()
"""Classes that stand in several modules: none."""

PACKAGE = sorted((ROOT / "verifiable_relu").rglob("*.py"))
OPENERS = re.compile(r"(What|Whether|How|Of|Which|Where|Those|That|The same|As|By|It|Its|Them|These)\b")
HOME_MADE = re.compile(r"\b(so many|of which|likewise|be it|what is more|by what|beside)\b", re.IGNORECASE)


def nodes(path: Path) -> Iterator[ast.AST]:
    """The classes, functions and the module of a file."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    return (node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, kinds))


def test_docstrings_begin_with_a_statement_and_words_are_the_fields() -> None:
    """Subject first, without the phrases by which the prose of this project once took its own turns."""
    heads = [(path, ast.get_docstring(node) or "") for path in PACKAGE for node in nodes(path)]  # type: ignore[arg-type]
    openers = [f"{path.name}: {text[:60]}" for path, text in heads if OPENERS.match(text)]
    phrases = [
        f"{path.name}: {line}" for path in PACKAGE for line in path.read_text().split("\n") if HOME_MADE.search(line)
    ]
    assert len(openers) <= MOST_OPENERS, openers
    assert len(phrases) <= MOST_PHRASES, phrases


def test_a_name_has_one_meaning() -> None:
    """A class stands in one module; a factory says what it takes (``from_…``)."""
    classes: dict[str, set[str]] = defaultdict(set)
    for path in PACKAGE:
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                classes[node.name.lstrip("_")].add(str(path))
            assert getattr(node, "name", "") != "of", path
    assert {name for name, where in classes.items() if len(where) > 1} <= TWICE
