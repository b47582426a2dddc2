"""The names that pages mention: modules, functions, classes, their arguments, and files exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.names import ROOT, stale

PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md")), *sorted((ROOT / "docs").rglob("*.md"))]

OTHERS = {
    "docs/arithmetic.md": {"session.x64quantprecision"},
    "docs/benchmarks.md": {"benchmarks/results/STUDY/records.jsonl"},
    "docs/trust.md": {"module.weight"},
}
"""What looks like a name of this project and is none, or is made of parts: an option of onnxruntime, the place of a
name, an attribute of a user's module."""


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
        ("`verify(…, joint=160)`, `TimeBudget(processes=2)`, `families.harden`, `Result.certificate`, "
         "`bounds/alpha.py`, `records.jsonl`, `torch.nn.GELU`, `nn.GELU`, `Conv(x=1)`", []),
        ("```\n`Auto(processes=2)`\n```\n", []),
    ],
)  # fmt: skip
def test_what_a_page_names_and_is_gone_is_found(text: str, found: list[str]) -> None:
    assert stale(text) == found
