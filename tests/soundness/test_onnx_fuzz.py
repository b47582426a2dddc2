"""Damaged ONNX files are refused in one line or read as what they are, in bounded time and memory."""

from __future__ import annotations

import pytest

from tests.support.draws import draws

from .onnx_fuzz import fuzz

COUNT = draws(600)


@pytest.mark.parametrize(("kind", "share"), [("bytes", 0.02), ("messages", 0.1)])
def test_damaged_files_are_refused_in_one_line_or_read_as_they_are(kind: str, share: float) -> None:
    found = fuzz(kind, COUNT, seed=0)
    shown = "\n".join(f"case {index}: {what}: {detail}" for index, what, detail in found.wrong[:8])
    assert not found.wrong, f"{len(found.wrong)} of {found.cases} ({found.kinds()})\n{shown}"
    assert found.loaded >= share * COUNT
