"""Screening: how well early numbers of a training predict which trainings end well.

The method's authors propose the overlap index of activation patterns (OUI) after a tenth of the training as such a
rule. It is compared with the obvious one, the accuracy at the same time, and with both together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scipy import stats

from verifiable_relu.report.table import Cell as Value
from verifiable_relu.report.table import Table
from verifiable_relu.study.joined import Cell, Study
from verifiable_relu.study.outcomes import number

RECALL = 0.8
"""The fraction of good trainings that a rule must keep."""

LEAST = 8
"""The least number of trainings among which a rule is tried."""


def precision_at(scores: Sequence[float], good: Sequence[bool], recall: float = RECALL) -> float:
    """The precision of the rule "keep what scores at least t", for the largest t that keeps the fraction ``recall``.

    Args:
        scores: a score for each training, the higher the better.
        good: whether each ended well; at least one did.
        recall: the least fraction of the good ones that is kept.

    Returns:
        The fraction of good ones among those that are kept; trainings of equal scores are kept together.
    """
    wanted = recall * sum(good) - 1e-9
    threshold = next(t for t in sorted(scores, reverse=True) if _kept(scores, good, t)[1] >= wanted)
    kept, right = _kept(scores, good, threshold)
    return right / kept


def _kept(scores: Sequence[float], good: Sequence[bool], threshold: float) -> tuple[int, int]:
    kept = [well for score, well in zip(scores, good, strict=True) if score >= threshold]
    return len(kept), sum(kept)


def screening_table(study: Study) -> Table:
    """The precision of each rule among the trainings of a network and arm, whatever their objective.

    A training ends well if its accuracy on the test set is at least the median. A training that diverged ends badly; it
    has no early numbers on record and is left out. The third rule takes the mean of the two numbers' ranks. The OUI is
    tried in both directions: that a high one is good is the claim, and that a low one is no better must be seen.
    """
    rows: list[Sequence[Value]] = []
    groups: dict[tuple[str, str], list[Cell]] = {}
    for setting, cells in study.settings.items():
        groups.setdefault((setting.network, setting.arm), []).extend(cells)
    for key, cells in groups.items():
        known = [numbers for cell in cells if (numbers := _numbers(cell)) is not None]
        if len(known) < LEAST:
            continue
        oui, accuracy, final = (list(column) for column in zip(*known, strict=True))
        middle = sorted(final)[len(final) // 2]
        good = [value >= middle for value in final]
        both = [a + b for a, b in zip(stats.rankdata(oui), stats.rankdata(accuracy), strict=True)]
        rules: Mapping[str, Sequence[float]] = {
            "high OUI": oui,
            "low OUI": [-value for value in oui],
            "early accuracy": accuracy,
            "both": both,
        }
        rows.append(
            (*key, len(known), sum(good) / len(good), *(precision_at(scores, good) for scores in rules.values()))
        )
    columns = ("network", "arm", "trainings", "all", "high OUI", "low OUI", "early accuracy", "both")
    caption = (
        f"The fraction of good trainings among those that a rule keeps, where it keeps {RECALL:.0%} of the good ones."
    )
    return Table(columns, rows, dict.fromkeys(columns[3:], ".0%"), caption)


def _numbers(cell: Cell) -> tuple[float, float, float] | None:
    oui, accuracy, final = (number(cell.training, name) for name in ("oui_early", "accuracy_early", "clean_test"))
    return None if oui is None or accuracy is None or final is None else (oui, accuracy, final)
