"""The table of the times that verification takes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from verifiable_relu.report.table import Cell as Value
from verifiable_relu.report.table import Table
from verifiable_relu.study.joined import Cell, Setting, Study, attacks, proves
from verifiable_relu.study.statistics import interval


def time_table(study: Study) -> Table:
    """Verdicts, times and sub-problems by setting, radius and method, on images that all arms classify rightly.

    Bounds and attacks alone are left out: they end soon without a verdict, and their times say little. Easy and hard
    images differ more than arms do, so that arms are compared on the same images alone (``common``).
    """
    rows: list[Sequence[Value]] = []
    for setting, cells in study.settings.items():
        for eps in study.radii(setting.network):
            for method in filter(decides, study.asked_with(setting.network)):
                asked = {cell.seed: common(study, cell, eps, method) for cell in cells}
                answers = [cell.answers[eps, method][image] for cell in cells for image in sorted(asked[cell.seed])]
                if not answers:
                    continue
                verdicts = [answer["verdict"] for answer in answers]
                seconds = {cell.seed: cell.costs("seconds", eps, method) or {} for cell in cells}
                times = [seconds[seed][image] for seed, images in asked.items() for image in images]
                means = [
                    statistics.fmean(seconds[seed][image] for image in images)
                    for seed, images in asked.items()
                    if images
                ]
                counts = [answer["subproblems"] for answer in answers if answer.get("subproblems") is not None]
                rows.append(
                    (
                        *(*setting, eps, method, answers[0]["limit"], len(means), len(answers)),
                        *(verdicts.count(verdict) for verdict in ("unsat", "sat", "unknown")),
                        *(statistics.median(times), interval(means), statistics.median(counts) if counts else None),
                    )
                )
    columns = (*Setting._fields, "ε", "method", "limit, s", "seeds", "questions", "safe", "unsafe", "undecided")
    caption = (
        "Verification on the images that all arms of a seed classify rightly: an undecided question counts twice its "
        "limit (PAR-2), in the median too."
    )
    forms = {"limit, s": "g", "median s": ".3g", "mean s (PAR-2)": ".3g", "median sub-problems": ".0f"}
    return Table((*columns, "median s", "mean s (PAR-2)", "median sub-problems"), rows, forms, caption)


def decides(method: str) -> bool:
    """Whether a method proves and refutes, so that an undecided question is one that took too long."""
    return attacks(method) and proves(method)


def common(study: Study, cell: Cell, eps: str, method: str) -> frozenset[int]:
    """The images that a cell and its counterparts of all other arms classify rightly.

    The counterparts have the cell's network, objective, weight and seed. There are none of these images if the method
    has not answered for one of them, so that all arms are compared over equal seeds; arms for which it has answered in
    no seed are left out of account.
    """
    found = cell.right if cell.complete(eps, method) else frozenset()
    for arm in study.arms(cell.setting.network):
        answered = {
            seed: other
            for seed, other in study.group(cell.setting._replace(arm=arm)).items()
            if other.complete(eps, method)
        }
        if answered:
            found &= answered[cell.seed].right if cell.seed in answered else frozenset()
    return found
