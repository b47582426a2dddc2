"""Tables of what the networks of a study are like: unstable neurons, the swap by ReLU, compression, hardness."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from scipy import stats

from verifiable_relu.report.table import Cell as Value
from verifiable_relu.report.table import Table
from verifiable_relu.study.joined import Cell, Setting, Study
from verifiable_relu.study.measures import HARDNESSES
from verifiable_relu.study.numbers import Number, mean, norm, result, share, unstable
from verifiable_relu.study.outcomes import number
from verifiable_relu.study.statistics import agreement, interval

CLOSE = {"clean": 0.01, "norm": 0.05}
"""The distance at which two networks are matched, in clean accuracy, and in the norm of the weights by the second's."""


def unstable_table(study: Study) -> Table:
    """The unstable neurons by setting and radius, in all layers and in each, with the norm of the weights."""
    rows: list[Sequence[Value]] = []
    for setting, cells in study.settings.items():
        for eps in study.radii(setting.network):
            layers = [found for cell in cells if (found := cell.unstable(eps)) is not None]
            each = " + ".join(f"{statistics.fmean(layer):.1f}" for layer in zip(*layers, strict=True)) or None
            rows.append((*setting, eps, len(layers), mean(cells, unstable(eps)), each, mean(cells, norm)))
    columns = (*Setting._fields, "ε", "seeds", "unstable", "per layer", "norm of weights")
    caption = (
        "Neurons per image that CROWN's bounds leave unstable: means over the seeds with 95 % bootstrap intervals."
    )
    return Table(columns, rows, {"unstable": ".1f", "norm of weights": ".1f"}, caption)


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
        for eps, (arm, rival), name in product(study.radii(network), pairs, CLOSE):
            alike: Number = norm if name == "norm" else share("clean")
            found = matches(study, (network, arm, rival), alike, CLOSE[name], name == "norm")
            gained: dict[int, list[float]] = {}
            for one, other in found:
                ours, theirs = unstable(eps)(one), unstable(eps)(other)
                if ours is not None and theirs is not None:
                    gained.setdefault(one.seed, []).append(ours - theirs)
            if gained:
                by_seed = interval([statistics.fmean(each) for each in gained.values()])
                rows.append((network, arm, rival, eps, name, sum(map(len, gained.values())), len(gained), by_seed))
    columns = ("network", "arm", "minus", "ε", "matched by", "pairs", "seeds", "Δ unstable")
    caption = (
        f"Unstable neurons at clean accuracies within {CLOSE['clean']:.0%} of each other, and at norms of the weights "
        f"within {CLOSE['norm']:.0%}: the mean difference of each seed's pairs, over the seeds."
    )
    return Table(columns, rows, {"Δ unstable": "+z.1f"}, caption)


def matches(
    study: Study, between: tuple[str, str, str], alike: Number, close: float, relative: bool
) -> Iterator[tuple[Cell, Cell]]:
    """Pairs of networks of equal seeds, each of the first arm with the nearest of the second.

    Args:
        study: the study.
        between: the network's name, and the two arms.
        alike: the number by which networks are matched.
        close: the largest distance of two matched numbers.
        relative: whether the distance is divided by the second network's number.
    """
    network, *arms = between
    cells = [cell for setting, group in study.settings.items() if setting.network == network for cell in group]
    first, second = ([cell for cell in cells if cell.setting.arm == arm] for arm in arms)
    for one in first:
        at = alike(one)
        distances = [
            (abs(at - theirs) / (theirs if relative else 1), other)
            for other in second
            if other.seed == one.seed and at is not None and (theirs := alike(other)) is not None
        ]
        distance, nearest = min(distances, key=lambda pair: pair[0], default=(math.inf, one))
        if distance <= close:
            yield one, nearest


def swap_table(study: Study) -> Table:
    """What the replacement by ReLU changes, on the test set and at most anywhere, and accuracies after compression."""
    accuracies = {
        "before the swap": "clean_before_substitution",
        "after the swap": "clean_after_substitution",
        "at the end": "clean_test",
        "int8": "int8",
        **{f"{part} pruned": f"pruned_{part}" for part in ("0.5", "0.7", "0.9")},
    }
    changes = {
        "mean change": "mean_logit_change",
        "largest change": "worst_logit_change",
        "proven change": "proven_logit_change",
    }
    columns = {**accuracies, **changes, "drift Δλ": "drift"}
    rows = [
        (*setting, len(cells), *(mean(cells, result(name)) for name in columns.values()))
        for setting, cells in study.settings.items()
    ]
    caption = (
        "Test accuracy before and after the swap by ReLU, at the end of the training and after compression; the swap's "
        "mean, largest and largest possible change of a logit; and the drift of λ before the annealing."
    )
    forms = {**dict.fromkeys(accuracies, ".1%"), **dict.fromkeys(changes, ".3g"), "drift Δλ": ".3g"}
    return Table((*Setting._fields, "seeds", *columns), rows, forms, caption)


def joint_table(study: Study) -> Table:
    """The share of rightly classified images that CROWN certifies for the ReLU network and all λ' ≥ λ at once."""
    lams = ("inf", *map(str, HARDNESSES))

    def at(lam: str) -> Number:
        def value(cell: Cell) -> float | None:
            found = cell.measures.get("joint")
            return found[lam] / found["images"] if found and found["images"] else None

        return value

    rows: list[Sequence[Value]] = []
    for setting, cells in study.settings.items():
        measured = [cell for cell in cells if at("inf")(cell) is not None]
        eps = ", ".join(sorted({cell.measures["joint"]["eps"] for cell in measured})) or None
        rows.append((*setting, eps, len(measured), *(mean(measured, at(lam)) for lam in lams)))
    titles = ["ReLU alone", *(f"λ ≥ {lam}" for lam in HARDNESSES)]
    caption = (
        "Rightly classified images that CROWN certifies for all smooth networks of λ' ≥ λ and the ReLU network at once."
    )
    return Table((*Setting._fields, "ε", "seeds", *titles), rows, dict.fromkeys(titles, ".1%"), caption)


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
        pairs = [tuple(result(f"{name}_settled")(cell) for name in ("patterns", "weights")) for cell in cells]
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
