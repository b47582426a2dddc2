"""ONNX files are read as they are: random ones and the standard's own, against two referees."""

from __future__ import annotations

from collections import Counter

from tests.support.draws import draws

from .onnx_agreement import Source, cases, judge

COUNT = draws(300)
SHOWN = 8


def report(wrong: list[str]) -> str:
    return "\n".join([f"{len(wrong)} disagreements", *wrong[:SHOWN]])


def test_random_files_are_read_as_they_are_or_refused() -> None:
    tally, wrong = Counter(), []
    for case in cases(COUNT, seed=0):
        found = judge(case.data, case.seed)
        tally["refused" if found.refused is not None else "read"] += 1
        tally.update(found.compared)
        wrong += [f"seed {case.seed}: {one.kind}: {one.detail}" for one in found.disagreements]
    assert not wrong, report(wrong)
    # A generator of files that are refused tests nothing.
    assert tally["read"] >= 0.6 * COUNT, tally
    assert tally["exact"] >= 0.6 * COUNT, tally
    assert tally["onnxruntime"] >= COUNT, tally


def test_random_files_that_onnx_or_onnxruntime_refuses_are_refused() -> None:
    """The share of such files is small in the generator: here all seeds but theirs are passed over unread."""
    seen = 0
    for case in cases(COUNT, seed=1):
        try:
            Source(case.data)
        except ValueError as refusal:
            seen += 1
            assert judge(case.data).refused is not None, (case.seed, refusal)
    assert seen
