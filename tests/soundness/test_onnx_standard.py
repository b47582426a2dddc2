"""All of the ONNX standard's cases of a single operator: read with the right result, or refused in one line."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from verifiable_relu.readers.onnx.call import GROUP, GROUPS

from . import onnx_standard

AGREE = 560
"""So many of them at least are read."""

PAGE = Path(__file__).parents[2] / "docs" / "operators.md"


def test_the_standards_cases_have_their_results_or_are_refused() -> None:
    answers = onnx_standard.answers()
    assert not [answer for answer in answers if answer.refused is None and not answer.right]
    assert not [answer for answer in answers if answer.refused is not None and "\n" in answer.refused]
    assert sum(answer.right for answer in answers) >= AGREE


def test_the_page_of_operators_says_of_each_what_it_is_read_as() -> None:
    """The group of an operator is that of the network with most in it that any of its cases is read as."""
    found: dict[str, str] = {}
    for answer in onnx_standard.answers():
        if answer.operators in GROUP and answer.refused is None:
            before = found.setdefault(answer.operators, answer.group)
            found[answer.operators] = max(before, answer.group, key=GROUPS.index)
    said = {operator: GROUP[operator].replace("maxima", "pieces") for operator in found}
    assert len(found) > 60 and found == said


def test_the_documentation_has_the_figures_of_the_standards_cases() -> None:
    written = PAGE.read_text(encoding="utf-8")
    if f"onnx {onnx.__version__}," not in written:
        pytest.skip("another version of onnx has other cases")
    assert written[written.find(onnx_standard.HEADING) :] == onnx_standard.section()
