"""The tables of a study, and the page on which they stand.

What is missing, since it was not trained, diverged or has not been asked, is a dash: it counts nowhere as zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.common.markup import Cell, Interval
from benchmarks.common.records import notes
from benchmarks.common.tables import Page, markdown_table
from benchmarks.study.claims import Outcome, cells_of, outcomes
from benchmarks.study.frames import CELL, SETTING, Study, decides
from benchmarks.study.screening import screened
from benchmarks.study.statistics import agreement, interval, scaled
from benchmarks.study.training import HARDNESSES

LEAST = 8
"""The least number of trainings among which a rule is tried."""

Columns = Mapping[str, tuple[str, str]]
"""The column of a frame whose mean is shown, and the format, by heading."""


def mean(values: Any) -> Interval | None:
    """The mean of those of some numbers that are known; None if none is."""
    known = pd.to_numeric(pd.Series(values)).dropna()
    return interval(known) if len(known) else None


def means(frame: pd.DataFrame, by: Sequence[str], columns: Columns) -> str:
    """The table of the means over seeds of some columns, a row for each group that has any of them."""
    rows: list[Sequence[Cell]] = []
    for key, group in frame.groupby(list(by), sort=False):
        cells = [mean(group[column]) if column in group else None for column, _ in columns.values()]
        if any(cells):
            rows.append((*key, len(group), *cells))
    return markdown_table((*by, "seeds", *columns), rows, {title: form for title, (_, form) in columns.items()})


def accuracy_table(study: Study) -> str:
    """Clean accuracy, images that no method refutes, certified images and unstable neurons by setting and radius."""
    by, frame = (
        [*SETTING, "eps"],
        study.overall.join(study.trained.get("clean_test", pd.Series(dtype=float)), on="cell"),
    )
    columns = {
        "clean, test set": ("clean_test", ".1%"),
        "clean": ("clean", ".1%"),
        "not refuted": ("not_refuted", ".1%"),
        "certified": ("certified", ".1%"),
        "unstable": ("unstable", ".1f"),
    }
    for method in dict.fromkeys(study.asked.method):
        mine = study.asked[study.asked.method == method].set_index(["cell", "eps"])
        for share in ("certified", "not_refuted") if "-" in method and decides(method) else ("certified",):
            frame = frame.join(mine[share].rename(f"{share} {method}"), on=["cell", "eps"])
            if frame[f"{share} {method}"].fillna(0).any():
                columns[f"{share.replace('_', ' ')}, {method}"] = (f"{share} {method}", ".1%")
    return means(frame, by, columns)


def claim_table(found: Sequence[Outcome]) -> str:
    """The claims that the suite declares, with both tests and Holm's correction over all of them."""
    rows = [
        (
            *(o.claim.name, o.claim.says, o.claim.expected, o.first, o.second, o.difference, o.seeds.n, o.seeds.p),
            *((None, None) if o.images is None else (o.images.n, o.images.p)),
            *(o.corrected, o.least, o.claim.margin or None, o.corrected_equivalent, o.reading),
        )
        for o in found
    ]
    columns = ("claim", "says", "expected", "arm", "other", "difference", "seeds", "p, seeds", "images", "p, images")
    tests = ("p, corrected", "equivalent within", "margin", "p, equivalence, corrected", "outcome")
    return markdown_table((*columns, *tests), rows, {"difference": "+.4g"})


def common(study: Study, eps: str, method: str) -> pd.DataFrame:
    """The answers of a method at a radius about the images that all arms of a seed classify rightly.

    Easy and hard images differ more than arms do. Arms for which the method has not answered in any seed are left out
    of account; a seed that one of the others lacks has no such images.
    """
    group = ["network", "objective", "weight"]
    asked = study.asked[(study.asked.eps == eps) & (study.asked.method == method) & study.asked.answered]
    answers = study.answers[(study.answers.eps == eps) & (study.answers.method == method)]
    answers = answers[answers.cell.isin(asked.cell)]
    arms = asked.groupby(group).arm.nunique().rename("arms")
    counted = answers.groupby([*group, "seed", "image"]).arm.nunique().rename("with")
    found = answers.join(arms, on=group).join(counted, on=[*group, "seed", "image"])
    return found[found["with"] == found.arms]


def times(study: Study) -> Iterator[tuple[tuple[Any, ...], pd.DataFrame]]:
    """The answers of ``common`` for each setting, radius and deciding method, in the order of the suite."""
    for network in study.suite.network:
        for eps in network.eps:
            for method in filter(decides, network.methods):
                found = common(study, eps, method)
                for key, group in found[found.network == network.name].groupby(SETTING, sort=False):
                    yield (*key, eps, method), group


def time_table(study: Study) -> str:
    """Verdicts, times and sub-problems by setting, radius and method, on images that all arms classify rightly."""
    rows = []
    for key, group in times(study):
        verdicts, split = group.verdict.value_counts(), group.subproblems
        by_seed = group.groupby("seed").cost.mean()
        rows.append(
            (
                *(*key, group.seed.nunique(), len(group)),
                *(int(verdicts.get(verdict, 0)) for verdict in ("unsat", "sat", "unknown")),
                *((split > 0).mean(), math.expm1(np.log1p(split.fillna(0)).mean()), split.mean(), split.median()),
                *(group.cost.median(), mean(by_seed)),
            )
        )
    columns = (*SETTING, "eps", "method", "seeds", "questions", "safe", "unsafe", "undecided", "branch", "sub-problems")
    last = ("mean sub-problems", "median sub-problems", "median s", "mean s (PAR-2)")
    forms = {"branch": ".0%", "sub-problems": ".2f", "mean sub-problems": ".4g", "mean s (PAR-2)": ".3g"}
    return markdown_table((*columns, *last), rows, forms)


@lru_cache(maxsize=1)
def versus(study: Study) -> list[tuple[tuple[str, str, str, str], dict[str, Interval | None]]]:
    """The first arm beside each other arm by network and radius, of the first objective and weight.

    Returns:
        Network, radius, the first arm and the other one, with ``points``: certified accuracy minus the other's;
        ``ratio``: the mean time divided by the other's, over the images that both classify rightly. Means over seeds;
        that of ratios is one of their logarithms. The method is the last one that decides.
    """
    objective, found = study.suite.objective[0], []
    for network in study.suite.network:
        method = next(filter(decides, reversed(network.methods)), "")
        cells = {arm: cells_of(study, network.name, objective.name, objective.weights[0], arm) for arm in network.arms}
        ours = cells.pop(network.arms[0])
        for eps in network.eps if method else ():
            for arm, theirs in cells.items():
                points, ratios = [], []
                for seed in sorted(set(ours.index) & set(theirs.index)):
                    shares = [study.by_image(each[seed], "certified", eps, method).mean() for each in (ours, theirs)]
                    seconds = [study.by_image(each[seed], "seconds", eps, method) for each in (ours, theirs)]
                    one, other = seconds[0].align(seconds[1], join="inner")
                    points.append(shares[0] - shares[1])
                    ratios.append(math.log(one.mean() / other.mean()) if len(one) else math.nan)
                ratio = mean(ratios)
                ratio = None if ratio is None else scaled(ratio, math.exp)
                found.append(((network.name, eps, network.arms[0], arm), {"points": mean(points), "ratio": ratio}))
    return found


def versus_table(study: Study) -> str:
    """The table of ``versus``."""
    rows = [(*key, each["points"], each["ratio"]) for key, each in versus(study) if any(each.values())]
    columns = ("network", "eps", "arm", "against", "certified, difference", "time, ratio")
    return markdown_table(columns, rows, {"certified, difference": "+.1%", "time, ratio": ".2f"})


def swap_table(study: Study) -> str:
    """The changes by the swap, measured on the test set and proven over all images, and compression."""
    columns = {
        "before the swap": ("clean_before_substitution", ".1%"),
        "after the swap": ("clean_after_substitution", ".1%"),
        "at the end": ("clean_test", ".1%"),
        "int8": ("int8", ".1%"),
        **{f"{part} pruned": (f"pruned_{part}", ".1%") for part in ("0.5", "0.7", "0.9")},
        "mean change": ("mean_logit_change", ".3g"),
        "largest change": ("worst_logit_change", ".3g"),
        "proven change": ("proven_logit_change", ".3g"),
        "drift Δλ": ("drift", ".3g"),
        "norm of weights": ("norm", ".1f"),
    }
    return means(study.trained, SETTING, columns)


def joint_table(study: Study) -> str:
    """The rightly classified images that CROWN certifies for the ReLU network and all λ' ≥ λ at once."""
    known = (
        study.trained[study.trained.joint.map(lambda each: isinstance(each, dict))]
        if "joint" in study.trained
        else None
    )
    if known is None or known.empty:
        return ""
    found = pd.json_normalize(known.joint.tolist()).set_index(known.index)
    shares = found[["inf", *map(str, HARDNESSES)]].div(found.images, axis=0)
    columns = {"ReLU alone": ("inf", ".1%"), **{f"λ ≥ {lam}": (str(lam), ".1%") for lam in HARDNESSES}}
    return means(known[SETTING].join(found.eps).join(shares), [*SETTING, "eps"], columns)


def profile_table(study: Study) -> str:
    """The agreement of seeds on the order of the layers' λ when the annealing began."""
    rows: list[Sequence[Cell]] = []
    for key, group in study.trained.groupby(SETTING, sort=False) if "lam_learned" in study.trained else ():
        profiles = [each for each in group.lam_learned if isinstance(each, list)]
        if len(profiles) < len(group) or all(len(set(profile)) == 1 for profile in profiles):
            continue
        layers = " ".join(f"{layer:.2f}" for layer in np.mean(profiles, axis=0))
        comparable = len(profiles) > 1 and len(profiles[0]) > 2
        rows.append((*key, len(profiles), layers, *(agreement(profiles) if comparable else (None,) * 4)))
    return markdown_table((*SETTING, "seeds", "λ per layer", "mean ρ", "least", "greatest", "p"), rows)


def settling_table(study: Study) -> str:
    """The part of a training after which nine tenths of all change of patterns, and of weights, has happened."""
    known = study.trained.reindex(columns=[*SETTING, "patterns_settled", "weights_settled"]).dropna()
    known = known.assign(ratio=known.weights_settled / known.patterns_settled)
    columns = {"patterns": ("patterns_settled", ".2f"), "weights": ("weights_settled", ".2f")}
    return means(known, SETTING, {**columns, "weights : patterns": ("ratio", ".2f")})


RULES: Mapping[str, tuple[str, ...]] = {
    "OUI": ("oui_early",),
    "OUI, batch form": ("oui_batch_early",),
    "early accuracy": ("accuracy_early",),
    "learning rate": ("rate",),
    "accuracy and OUI": ("accuracy_early", "oui_early"),
    "accuracy and rate": ("accuracy_early", "rate"),
}
"""The rules of screening, and the numbers that must lie in their bands."""


def screening_table(study: Study) -> str:
    """Precision and recall of each rule among the trainings of a network and arm, whatever their objective.

    A training ends well if its accuracy on the test set is at least the median. Bands are tried on seeds on which they
    were not chosen.
    """
    numbers = dict.fromkeys(name for rule in RULES.values() for name in rule)
    known = study.trained.reindex(columns=[*CELL, "clean_test", *numbers])
    known = known.dropna(subset=["oui_early", "accuracy_early", "clean_test"])
    rows = []
    for key, group in known.groupby(["network", "arm"], sort=False):
        if len(group) >= LEAST and group.seed.nunique() > 1:
            good = (group.clean_test >= sorted(group.clean_test)[len(group) // 2]).tolist()
            found = (screened([group[name].tolist() for name in rule], good, group.seed) for rule in RULES.values())
            rows.append((*key, len(group), sum(good) / len(good), *map(str, found)))
    return markdown_table(("network", "arm", "trainings", "all", *RULES), rows, {"all": ".0%"})


SECTIONS: Mapping[str, tuple[str, Callable[[Study], str]]] = {
    "Accuracy": (
        "Means over the seeds and 95 % intervals by Student's t, of the asked images but for the first column. *not "
        "refuted*: classified rightly, and no counterexample is known. *certified*: classified rightly and proven, "
        "rounding accounted for, by any method in real arithmetic or the one that is named. *unstable*: neurons per "
        "image by CROWN's bounds.",
        accuracy_table,
    ),
    "Time": (
        "On the images that all arms of a seed classify rightly. Seconds are processor time, and an undecided question "
        "counts twice its limit (PAR-2). *branch*: questions that bounds and attack do not decide. *sub-problems*: exp "
        "of the mean of log(1 + n), minus 1.",
        time_table,
    ),
    "The first arm beside each other": (
        "Paired by seed, of the first objective and weight; time over the images that both classify rightly.",
        versus_table,
    ),
    "The swap by ReLU, and compression": (
        "Accuracies on the whole test set. The proven change is an upper bound over all images in [0, 1]ⁿ.",
        swap_table,
    ),
    "One certificate for the whole family": (
        "The part of the rightly classified images that CROWN certifies for the ReLU network and all networks with "
        "λ'-GELU, λ' ≥ λ, at once.",
        joint_table,
    ),
    "Do seeds agree on the layers' λ?": (
        "λ when the annealing began, Spearman's correlation over pairs of seeds, and how often layers in random order "
        "agree as well.",
        profile_table,
    ),
    "When activation patterns settle, and when weights do": ("A ratio above 1: patterns settle first.", settling_table),
    "Screening by early activation patterns": (
        "Precision in % with Wilson's interval, and recall in %, of rules that keep trainings with a number in a band "
        "that was chosen on the other seeds.",
        screening_table,
    ),
}
"""The explanation and the table of each section, by its heading."""

RULE = """\
A difference is *shown* if the larger of two p-values is below 0.05 after Holm's correction over all claims of the
suite, and both tests agree in its sign: Student's paired t over the seeds, and over images McNemar's exact test for
verdicts or Wilcoxon's signed-rank test for costs. *Not shown* does not mean that there is no difference. *Equivalent
within* a margin: two one-sided t-tests over the seeds show the difference, or the ratio of costs, to be smaller, after
Holm's correction over all claims with a margin. The column *equivalent within* is the least margin for which one test
alone would do so; it describes, and shows nothing."""


def page_of(study: Study, figures: Sequence[str]) -> str:
    """The page of a study with its tables, and with figures by the names of their files."""
    page, found = Page(), outcomes(study)
    page.add(f"# The study `{study.name}`", study.suite.about)
    page.bullets(notes(study.records))
    page.bullets(
        f"{name}: {' '.join(said.split())}" for name, said in (("Tuning", study.suite.tuning), ("Cut", study.suite.cut))
    )
    page.add("## Claims", *((RULE, claim_table(found)) if found else ("The suite declares none.",)))
    for title, (explanation, make) in SECTIONS.items():
        if made := make(study):
            page.add(f"## {title}", explanation, made)
    page.add(*(f"![{name}]({name})" for name in figures))
    return page.text
