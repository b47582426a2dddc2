"""The page of a study and its tables, as files: Markdown, CSV, and LaTeX with the rules of booktabs.

What is missing, since it was not trained, diverged or has not been asked, is a dash: it counts nowhere as zero.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import NamedTuple

from benchmarks.common.markup import Cell as Value
from benchmarks.common.markup import Column, Interval, Page, Table, tabulate
from benchmarks.common.records import Record
from benchmarks.study.claims import LEVEL, Outcome, findings, other, outcomes
from benchmarks.study.joined import Cell, Setting, Study, attacks, joined, proves, runs
from benchmarks.study.measures import HARDNESSES
from benchmarks.study.screening import RECALL, screened
from benchmarks.study.statistics import agreement, interval
from verifiable_relu.errors import InputError

CLOSE = {"clean": 0.01, "norm": 0.05}
"""The distance at which two networks are matched, in clean accuracy, and in the norm of the weights by the second's."""

LEAST = 8
"""The least number of trainings among which a rule is tried."""

_DIGITS = 9
"""The decimals of means that count: fractions of fewer than a million images differ before the ninth decimal."""


class Group(NamedTuple):
    """A row of most tables: the networks of a setting, at a radius where the table has radii."""

    setting: Setting
    cells: Sequence[Cell]
    eps: str = ""


def by_setting(study: Study) -> list[Group]:
    """A group for each setting."""
    return [Group(*each) for each in study.settings.items()]


def by_radius(study: Study) -> list[Group]:
    """A group for each setting and radius."""
    return [Group(*each, eps) for each in study.settings.items() for eps in study.radii(each[0].network)]


def mean(cells: Iterable[Cell], measure: str, eps: str = "", method: str = "") -> Interval | None:
    """The mean of a measure (``Cell.value``) over those of the cells that have it; None if none has it."""
    known = [found for cell in cells if (found := cell.value(measure, eps, method)) is not None]
    return interval(known) if known else None


def _mean(title: str, form: str, measure: str, method: str = "") -> Column[Group]:
    return title, form, lambda group: mean(group.cells, measure, group.eps, method)


def _text(name: str) -> Column[Group]:
    return name, "", lambda group: getattr(group.setting, name)


_SETTING = tuple(map(_text, Setting._fields))
_EPS: Column[Group] = ("ε", "", lambda group: group.eps)
_SEEDS: Column[Group] = ("seeds", "", lambda group: len(group.cells))


def main_table(study: Study) -> Table:
    """Clean, attacked and certified accuracy by setting and radius, on the asked images."""

    def seeds(group: Group) -> str:
        failed = study.failed(group.setting)
        planned = study.planned(group.setting.network)
        return f"{len(group.cells)} of {planned}" + (f", {failed} failed" if failed else "")

    columns = (
        *(*_SETTING, _EPS, ("seeds", "", seeds)),
        ("answered", "", lambda group: sum(cell.complete(group.eps) for cell in group.cells)),
        _mean("clean", ".1%", "clean"),
        _mean("attacked", ".1%", "attacked"),
        *(_mean(f"certified, {method}", ".1%", "certified", method) for method in study.methods if proves(method)),
        *(_mean(f"attacked, {method}", ".1%", "attacked", method) for method in study.methods if runs(method)),
        _mean("clean, test set", ".1%", "clean_test"),
    )
    caption = "Clean, attacked and certified accuracy: means over the seeds with 95 % intervals."
    return tabulate(by_radius(study), columns, caption)


def claim_table(found: Sequence[Outcome]) -> Table:
    """The claims that the suite declares, with both tests and Holm's correction over all of them."""

    def claimed(name: str) -> Column[Outcome]:
        return "ε" if name == "eps" else name, "", lambda each: each.claim[name]

    def of_images(title: str, name: str) -> Column[Outcome]:
        return title, "", lambda each: None if each.images is None else getattr(each.images, name)

    columns: tuple[Column[Outcome], ...] = (
        ("claim", "", lambda each: each.claim["name"]),
        *map(claimed, Setting._fields),
        ("against", "", lambda each: other(each.claim)),
        *map(claimed, ("measure", "eps", "method", "expected")),
        ("of arm", "", lambda each: each.first),
        ("of the other", "", lambda each: each.second),
        ("difference", "", lambda each: each.difference),
        ("seeds", "", lambda each: each.seeds.n),
        ("d_z", "", lambda each: each.seeds.effect),
        ("p, seeds", "", lambda each: each.seeds.p),
        *map(of_images, ("images", "effect, images", "p, images"), ("n", "effect", "p")),
        ("p, corrected", "", lambda each: each.corrected),
        ("equivalent within", "", lambda each: each.least),
        ("margin", "", lambda each: each.claim.get("margin") or None),
        ("p, equivalence", "", lambda each: each.equivalent),
        ("p, equivalence, corrected", "", lambda each: each.corrected_equivalent),
        ("outcome", "", lambda each: each.reading),
    )
    return tabulate(found, columns, "The claims that were declared beforehand, and what the records say on them.")


@dataclass(frozen=True)
class Point:
    """Clean and certified accuracy of a setting at a radius, over the seeds that have both."""

    setting: Setting
    clean: Interval
    certified: Interval


def fronts(study: Study) -> dict[tuple[str, str, str], list[Point]]:
    """By network, radius and arm: the points of all settings, in the order of the suite."""
    found: dict[tuple[str, str, str], list[Point]] = {}
    for setting, cells, eps in by_radius(study):
        asked = [cell for cell in cells if cell.complete(eps)]
        clean, certified = mean(asked, "clean"), mean(asked, "certified", eps)
        if clean is not None and certified is not None:
            found.setdefault((setting.network, eps, setting.arm), []).append(Point(setting, clean, certified))
    return found


def undominated(points: Sequence[Point]) -> list[Point]:
    """Those of the points whose means no other point's dominate, by their clean accuracy.

    A point dominates another one if it is at least as good in both means, and better in one. Means that differ by
    rounding alone, since the same numbers were added in another order, are equal.
    """
    means = [(round(point.clean.mean, _DIGITS), round(point.certified.mean, _DIGITS)) for point in points]
    kept = [
        point
        for point, (x, y) in zip(points, means, strict=True)
        if not any(a >= x and b >= y and (a, b) != (x, y) for a, b in means)
    ]
    return sorted(kept, key=lambda point: point.clean.mean)


def pareto_table(study: Study) -> Table:
    """Clean against certified accuracy of each arm over objectives and weights; dominated settings are marked."""
    rows: list[Sequence[Value]] = []
    for key, points in fronts(study).items():
        kept = undominated(points)
        for point in points:
            setting, mark = point.setting, "front" if point in kept else "dominated"
            rows.append((*key, setting.objective, setting.weight, point.clean.n, point.clean, point.certified, mark))
    columns = ("network", "ε", "arm", "objective", "weight", "seeds", "clean", "certified", "of its arm")
    caption = "Clean against certified accuracy (by any method) over the objectives' weights."
    return Table(columns, rows, dict.fromkeys(("clean", "certified"), ".1%"), caption)


def difference_table(study: Study) -> Table:
    """Each arm with a hardness minus each other arm of the same objective and weight, paired by seed.

    These differences were not declared beforehand. They describe, and carry no p-value.
    """
    rows: list[tuple[Group, str, list[tuple[Cell, Cell]]]] = []
    for setting, cells in study.settings.items():
        rivals = [arm for arm in study.arms(setting.network) if arm != setting.arm and not study.hardened(arm)]
        for eps, rival in product(study.radii(setting.network), rivals if study.hardened(setting.arm) else ()):
            others = study.group(setting._replace(arm=rival))
            pairs = [(cell, others[cell.seed]) for cell in cells if cell.seed in others]
            if pairs:
                rows.append((Group(setting, cells, eps), rival, pairs))

    def gained(measure: str, form: str) -> Column[tuple[Group, str, list[tuple[Cell, Cell]]]]:
        def difference(row: tuple[Group, str, list[tuple[Cell, Cell]]]) -> Interval | None:
            known = [tuple(cell.value(measure, row[0].eps) for cell in pair) for pair in row[2]]
            found = [one - other for one, other in known if one is not None and other is not None]
            return interval(found) if found else None

        return f"Δ {measure}", form, difference

    columns = (
        *((title, form, lambda row, of=of: of(row[0])) for title, form, of in _SETTING),
        ("minus", "", lambda row: row[1]),
        ("ε", "", lambda row: row[0].eps),
        ("seeds", "", lambda row: len(row[2])),
        *(gained(measure, "+z.2%") for measure in ("clean", "attacked", "certified")),
        gained("unstable", "+z.1f"),
    )
    caption = "Differences between arms, paired by seed; certified by any method. Not declared beforehand."
    return tabulate(rows, columns, caption)


def time_table(study: Study) -> Table:
    """Verdicts, times and sub-problems by setting, radius and method, on images that all arms classify rightly.

    Bounds and attacks alone are left out: they end soon without a verdict, and their times say little. Easy and hard
    images differ more than arms do, so that arms are compared on the same images alone (``common``).
    """
    rows: list[Sequence[Value]] = []
    for setting, cells, eps in by_radius(study):
        for method in filter(decides, study.asked_with(setting.network)):
            asked = [(cell, sorted(common(study, cell, eps, method))) for cell in cells]
            answers = [cell.answers[eps, method][image] for cell, images in asked for image in images]
            if not answers:
                continue
            verdicts = [answer["verdict"] for answer in answers]
            seconds = [(cell.costs("seconds", eps, method) or {}, images) for cell, images in asked]
            times = [[taken[image] for image in images] for taken, images in seconds if images]
            counts = [answer["subproblems"] for answer in answers if answer.get("subproblems") is not None]
            rows.append(
                (
                    *(*setting, eps, method, answers[0]["limit"], len(times), len(answers)),
                    *(verdicts.count(verdict) for verdict in ("unsat", "sat", "unknown")),
                    statistics.median([time for each in times for time in each]) if study.timed else None,
                    interval(list(map(statistics.fmean, times))) if study.timed else None,
                    statistics.median(counts) if counts else None,
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


def unstable_table(study: Study) -> Table:
    """The unstable neurons by setting and radius, in all layers and in each, with the norm of the weights."""

    def layers(group: Group) -> list[Sequence[float]]:
        return [found for cell in group.cells if (found := cell.unstable(group.eps)) is not None]

    def each(group: Group) -> str | None:
        return " + ".join(f"{statistics.fmean(layer):.1f}" for layer in zip(*layers(group), strict=True)) or None

    columns = (
        *(*_SETTING, _EPS),
        ("seeds", "", lambda group: len(layers(group))),
        _mean("unstable", ".1f", "unstable"),
        ("per layer", "", each),
        _mean("norm of weights", ".1f", "norm"),
    )
    caption = "Neurons per image that CROWN's bounds leave unstable: means over the seeds with 95 % intervals."
    return tabulate(by_radius(study), columns, caption)


def matched_table(study: Study) -> Table:
    """Unstable neurons of each arm with a hardness minus those of each other arm, among networks that are alike.

    Within each seed, every network of the arm, whatever its objective, is matched with the network of the other arm
    whose clean accuracy, or whose norm of weights, is nearest, if the two are as close as ``CLOSE`` says.
    """
    rows: list[Sequence[Value]] = []
    for network in study.networks:
        arms = study.arms(network)
        hardened = [arm for arm in arms if study.hardened(arm)]
        pairs = list(product(hardened, [arm for arm in arms if arm not in hardened]))
        for eps, (arm, rival), alike in product(study.radii(network), pairs, CLOSE):
            gained: dict[int, list[float]] = {}
            for one, another in matches(study, (network, arm, rival), alike):
                ours, theirs = one.value("unstable", eps), another.value("unstable", eps)
                if ours is not None and theirs is not None:
                    gained.setdefault(one.seed, []).append(ours - theirs)
            if gained:
                by_seed = interval([statistics.fmean(each) for each in gained.values()])
                rows.append((network, arm, rival, eps, alike, sum(map(len, gained.values())), len(gained), by_seed))
    columns = ("network", "arm", "minus", "ε", "matched by", "pairs", "seeds", "Δ unstable")
    caption = (
        f"Unstable neurons at clean accuracies within {CLOSE['clean']:.0%} of each other, and at norms of the weights "
        f"within {CLOSE['norm']:.0%}: the mean difference of each seed's pairs, over the seeds."
    )
    return Table(columns, rows, {"Δ unstable": "+z.1f"}, caption)


def matches(study: Study, between: tuple[str, str, str], alike: str) -> Iterator[tuple[Cell, Cell]]:
    """Pairs of networks of equal seeds, each of the first arm with the nearest of the second.

    Args:
        study: the study.
        between: the network's name, and the two arms.
        alike: the measure by which networks are matched, of ``CLOSE``.
    """
    network, *arms = between
    cells = [cell for setting, group in study.settings.items() if setting.network == network for cell in group]
    first, second = ([cell for cell in cells if cell.setting.arm == arm] for arm in arms)
    for one in first:
        at = one.value(alike)
        distances = [
            (abs(at - theirs) / (theirs if alike == "norm" else 1), other)
            for other in second
            if other.seed == one.seed and at is not None and (theirs := other.value(alike)) is not None
        ]
        distance, nearest = min(distances, key=lambda pair: pair[0], default=(math.inf, one))
        if distance <= CLOSE[alike]:
            yield one, nearest


def swap_table(study: Study) -> Table:
    """What the replacement by ReLU changes, on the test set and at most anywhere, and accuracies after compression."""
    columns = (
        *(*_SETTING, _SEEDS),
        _mean("before the swap", ".1%", "clean_before_substitution"),
        _mean("after the swap", ".1%", "clean_after_substitution"),
        _mean("at the end", ".1%", "clean_test"),
        _mean("int8", ".1%", "int8"),
        *(_mean(f"{part} pruned", ".1%", f"pruned_{part}") for part in ("0.5", "0.7", "0.9")),
        _mean("mean change", ".3g", "mean_logit_change"),
        _mean("largest change", ".3g", "worst_logit_change"),
        _mean("proven change", ".3g", "proven_logit_change"),
        _mean("drift Δλ", ".3g", "drift"),
    )
    caption = (
        "Test accuracy before and after the swap by ReLU, at the end of the training and after compression; the swap's "
        "mean, largest and largest possible change of a logit; and the drift of λ before the annealing."
    )
    return tabulate(by_setting(study), columns, caption)


def joint_table(study: Study) -> Table:
    """The share of rightly classified images that CROWN certifies for the ReLU network and all λ' ≥ λ at once."""

    def eps(group: Group) -> str | None:
        return ", ".join(sorted({cell.measures["joint"]["eps"] for cell in group.cells})) or None

    groups = [
        Group(setting, [cell for cell in cells if cell.value("joint_inf") is not None])
        for setting, cells in study.settings.items()
    ]
    columns = (
        *(*_SETTING, ("ε", "", eps), _SEEDS),
        _mean("ReLU alone", ".1%", "joint_inf"),
        *(_mean(f"λ ≥ {lam}", ".1%", f"joint_{lam}") for lam in HARDNESSES),
    )
    caption = (
        "Rightly classified images that CROWN certifies for all smooth networks of λ' ≥ λ and the ReLU network at once."
    )
    return tabulate(groups, columns, caption)


def profile_table(study: Study) -> Table:
    """The agreement of seeds on the order of the layers' λ when the annealing began."""
    rows: list[Sequence[Value]] = []
    for setting, cells in study.settings.items():
        profiles = [cell.training["results"].get("lam_learned") or [] for cell in cells]
        if not profiles or not all(profiles) or all(len(set(profile)) == 1 for profile in profiles):
            continue
        means = " ".join(f"{statistics.fmean(layer):.2f}" for layer in zip(*profiles, strict=True))
        comparable = len(profiles) > 1 and len(profiles[0]) > 2
        ranks: Sequence[float | None] = agreement(profiles) if comparable else (None,) * 4
        rows.append((*setting, len(profiles), means, *ranks))
    columns = (*Setting._fields, "seeds", "λ per layer", "mean ρ", "least", "greatest", "p")
    caption = (
        "λ of each layer when the annealing began, and Spearman's correlation of it over pairs of seeds, with how "
        "often layers in random order agree as well."
    )
    return Table(columns, rows, caption=caption)


def settling_table(study: Study) -> Table:
    """When activation patterns and weights have made nine tenths of their way."""
    rows: list[Sequence[Value]] = []
    for setting, cells in study.settings.items():
        pairs = [(cell.value("patterns_settled"), cell.value("weights_settled")) for cell in cells]
        both = [(a, b) for a, b in pairs if a and b]
        if both:
            first = sum(a < b for a, b in both)
            parts = [interval(column) for column in zip(*both, strict=True)]
            rows.append((*setting, len(both), *parts, interval([b / a for a, b in both]), f"patterns in {first}"))
    columns = (*Setting._fields, "seeds", "patterns", "weights", "weights : patterns", "first")
    caption = (
        "The part of the training after which nine tenths of all change of activation patterns, and of weights, has "
        "happened; a ratio above 1 means that patterns settle first."
    )
    return Table(columns, rows, dict.fromkeys(("patterns", "weights", "weights : patterns"), ".2f"), caption)


RULES: Mapping[str, tuple[str, ...]] = {
    "OUI": ("oui_early",),
    "OUI, batch form": ("oui_batch_early",),
    "early accuracy": ("accuracy_early",),
    "learning rate": ("rate",),
    "accuracy and OUI": ("accuracy_early", "oui_early"),
    "accuracy and rate": ("accuracy_early", "rate"),
}
"""The rules of screening, and the numbers that must lie in their bands."""


def screening_table(study: Study) -> Table:
    """What each rule keeps of the trainings of a network and arm, whatever their objective.

    A training ends well if its accuracy on the test set is at least the median. A training that diverged ends badly; it
    has no early numbers on record and is left out. Bands are tried on seeds on which they were not chosen.
    """
    rows: list[Sequence[Value]] = []
    groups: dict[tuple[str, str], list[Cell]] = {}
    for setting, cells in study.settings.items():
        groups.setdefault((setting.network, setting.arm), []).extend(cells)
    for key, cells in groups.items():
        needed = ("oui_early", "accuracy_early", "clean_test")
        known = [cell for cell in cells if all(cell.value(name) is not None for name in needed)]
        seeds = [cell.seed for cell in known]
        if len(known) < LEAST or len(set(seeds)) < 2:
            continue
        final = [cell.value("clean_test") or 0.0 for cell in known]
        good = [value >= sorted(final)[len(final) // 2] for value in final]
        found = []
        for rule in RULES.values():
            early = [[math.nan if (v := cell.value(name)) is None else v for cell in known] for name in rule]
            found.append(str(screened(early, good, seeds)))
        rows.append((*key, len(known), sum(good) / len(good), *found))
    columns = ("network", "arm", "trainings", "all", *RULES)
    caption = (
        f"Precision in % with its 95 % interval (Wilson's, as if trainings were independent) / recall in % of rules "
        f"whose bands were chosen on all other seeds, for a recall of {RECALL:.0%}."
    )
    return Table(columns, rows, {"all": ".0%"}, caption)


SECTIONS: Mapping[str, tuple[str, str, Callable[[Study], Table]]] = {
    "main": (
        "Accuracy",
        "Means over the seeds and their 95 % intervals by Student's t. Fractions of the asked images, but for the last "
        "column. *attacked*: classified rightly and refuted by no method. *certified*: classified rightly and proven "
        "by the method, rounding accounted for. *answered*: the seeds of which all questions at this ε are answered; "
        "others have no attacked or certified accuracy yet.",
        main_table,
    ),
    "differences": (
        "Differences between arms",
        "Arms with a hardness minus the others, paired by seed. These comparisons were not declared beforehand: they "
        "describe, and no p-value goes with them.",
        difference_table,
    ),
    "pareto": (
        "Clean against certified accuracy",
        "Over the objectives and their weights. *front*: no other setting of the same arm is as good in both means and "
        "better in one.",
        pareto_table,
    ),
    "times": (
        "Verification time",
        "Each arm on the images that all arms of the same seed classify rightly. Seconds are processor time; each "
        "question is asked by itself, in random order over the arms.",
        time_table,
    ),
    "unstable": (
        "Unstable neurons",
        "Per rightly classified image, by CROWN's bounds.",
        unstable_table,
    ),
    "matched": (
        "Unstable neurons of networks that are alike",
        "Fewer unstable neurons may only mean smaller weights or lower accuracy: here are pairs of networks that are "
        "close in one of them.",
        matched_table,
    ),
    "swap": (
        "The swap by ReLU, and compression",
        "On the whole test set. The proven change is an upper bound over all images in [0, 1]ⁿ.",
        swap_table,
    ),
    "joint": (
        "Joint certificates",
        "One proof for the ReLU network and all networks with λ'-GELU, λ' ≥ λ, in its place.",
        joint_table,
    ),
    "profiles": ("Do seeds agree on the layers' λ?", "", profile_table),
    "settling": ("When activation patterns settle, and when weights do", "", settling_table),
    "screening": (
        "Screening by early activation patterns",
        "Does the overlap index (OUI) of activation patterns after a tenth of the training tell which trainings end in "
        "the better half, and more than the learning rate does? *all* is the fraction of good trainings without a "
        "rule. A rule keeps what lies in a band with two ends, chosen on all other seeds.",
        screening_table,
    ),
}
"""The heading, the explanation and the table of each section, by the name of the table's files."""


def tables(study: Study, claimed: Sequence[Outcome]) -> dict[str, Table]:
    """All tables of a study by the name of their files; ``claimed``: the outcomes of its claims."""
    return {
        "claims": claim_table(claimed),
        **{name: make(study) for name, (_, _, make) in SECTIONS.items()},
    }


def write(records: Sequence[Record], folder: Path) -> list[Path]:
    """Write the page ``report.md``, the tables into ``tables/`` and figures into ``figures/``.

    Args:
        records: the records of the study, finished or not.
        folder: the folder of the study.

    Returns:
        The files.

    Raises:
        InputError: if a file cannot be written.
    """
    # Figures are drawn of what is tabulated here.
    from benchmarks.study import figures

    study = joined(records)
    claimed = outcomes(study)
    page = Page("report")
    page.add(f"# The study “{study.name}”", study.suite.get("about", ""))
    page.bullets(study.notes)
    described = {"Tuning": study.suite.get("tuning"), "What was cut": study.suite.get("cut")}
    page.bullets(f"{title}: {' '.join(text.split())}" for title, text in described.items() if text)
    made = {name: table for name, table in tables(study, claimed).items() if table.rows}
    page.add("## Findings")
    page.bullets(findings(claimed))
    page.add(*((_RULE, made["claims"]) if claimed else ("The suite declares no claims.",)))
    for name, (title, explanation, _) in SECTIONS.items():
        if name in made:
            page.add(f"## {title}", explanation if study.timed or name != "times" else _VOID, made[name])
    files: dict[Path, str] = {}
    for name, table in made.items():
        forms = {"csv": table.csv(), "md": table.markdown(), "tex": table.latex(name)}
        files |= {folder / "tables" / f"{name}.{suffix}": text for suffix, text in forms.items()}
    drawn = figures.write(study, folder / "figures")
    page.add("## Figures" if drawn else "")
    page.add(*(f"![{path.stem}](figures/{path.name})" for path in drawn if path.suffix == ".png"))
    files = {folder / "report.md": page.markdown(), **files}
    for path, content in files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
        except OSError as error:
            raise InputError(f"cannot be written: {error.strerror}", path=path) from None
    return [*files, *drawn]


_VOID = """\
Each arm on the images that all arms of the same seed classify rightly. The seconds of this study are void, and left
out: its questions were asked in batches that shrink along the list and share their time evenly, so that they compare
the arms' places in the list. Verdicts and sub-problems are not touched."""

_RULE = f"""\
A difference is *shown* if the larger of two p-values is below {LEVEL:g} after Holm's correction over all claims of the
suite, and if both tests agree in its sign. The first test, Student's
paired t over the seeds, asks whether the difference is more than chance among trainings; the second, over images
(McNemar's exact test for verdicts, Wilcoxon's signed-rank test for costs; an image that is asked of several seeds
counts once), whether it is more than chance among images. Claims are tested two-sided, whatever was expected. *Not
shown* does not mean that there is no difference. Arms are *equivalent* within the margin that a claim declares if two
one-sided t-tests over the seeds show the difference, or of costs the ratio of the seeds' means, to be smaller, after
Holm's correction over all claims with a margin. *equivalent within* is the least margin for which one test alone would
do so; where no margin was declared it describes, and shows nothing. d_z: mean difference divided by its deviation over
the seeds; effect over images: Cohen's g, or the rank-biserial correlation."""
