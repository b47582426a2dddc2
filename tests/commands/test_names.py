"""The names that pages and docstrings mention: modules, functions, classes, their arguments, and files exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.names import ROOT, docstrings, stale

PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md")), *sorted((ROOT / "docs").rglob("*.md"))]

MODULES = sorted((ROOT / "verifiable_relu").rglob("*.py"))

OTHERS = {
    "docs/arithmetic.md": {"session.x64quantprecision"},
    "docs/benchmarks.md": {"benchmarks/results/STUDY/records.jsonl"},
    "docs/trust.md": {"module.weight"},
    "verifiable_relu/data/readers.py": {"adult.names", "adult.test"},
    "verifiable_relu/train/export.py": {"patterns_settled", "weights_settled"},
}
"""What looks like a name of this project and is none, or is made of parts: an option of onnxruntime, the place of a
name, an attribute of a user's module, files of a data set, keys of records."""


def variables(text: str) -> frozenset[str]:
    """The names that a page's examples give to objects."""
    return frozenset(re.findall(r"^(\w+) = ", text, re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page: Path) -> None:
    text, name = page.read_text(encoding="utf-8"), str(page.relative_to(ROOT))
    assert set(stale(text, "`", variables(text))) - OTHERS.get(name, set()) == set()


def test_what_docstrings_name_exists() -> None:
    found = {
        str(path.relative_to(ROOT)): {name for text, own in docstrings(path) for name in stale(text, "``", own)}
        for path in MODULES
    }
    assert len(found) > 100
    assert {name: names for name in found if (names := found[name] - OTHERS.get(name, set()))} == {}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("so it is unless `Auto(processes=2)` or `Bab(processes=2)` says otherwise",
         ["Auto(processes)", "Bab(processes)"]),
        ("`verify(model, images, labels, eps=0.1, tolerance=1)`", ["verify(eps, tolerance)"]),
        ("`network.hardend`, `verifiable_relu.spec.reed` and `bounds/chunks.py`",
         ["network.hardend", "verifiable_relu.spec.reed", "bounds/chunks.py"]),
        ("`verify(…, joint=160)`, `TimeBudget(processes=2)`, `families.harden`, `Result.certificate`, "
         "`bounds/alpha.py`, `records.jsonl`, `torch.nn.GELU`, `nn.GELU`, `Conv(x=1)`", []),
        ("```\n`Auto(processes=2)`\n```\n", []),
    ],
)  # fmt: skip
def test_what_a_page_names_and_is_gone_is_found(text: str, found: list[str]) -> None:
    assert stale(text, "`") == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("rows come in groups (``chunks.groups``), as the neurons do (``alpha.neurons``)",
         ["chunks.groups", "alpha.neurons"]),
        ("a faster way (``windowed``, ``last_convolution``), see ``benchmarks/bounds_speed.py`` and ``Docketed``",
         ["last_convolution", "benchmarks/bounds_speed.py", "Docketed"]),
        ("``benchmarks.training.arms``, ``_no_such``, ``TimeBudget(jobs=2)``",
         ["benchmarks.training.arms", "_no_such", "TimeBudget(jobs)"]),
        ("``differences``, ``benchmarks/speed/bounds_speed.py``, ``QueryBatch``, ``np.ndarray``, ``own.field``", []),
    ],
)  # fmt: skip
def test_what_a_docstring_names_and_is_gone_is_found(text: str, found: list[str]) -> None:
    assert stale(text, "``", frozenset({"own"})) == found
