"""The page of a study and its tables, as files: Markdown, CSV, and LaTeX with the rules of booktabs.

What is missing, since it was not trained, diverged or has not been asked, is a dash: it counts nowhere as zero.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from verifiable_relu.errors import InputError
from verifiable_relu.report.markdown import Page
from verifiable_relu.report.table import Table
from verifiable_relu.study import accuracy_tables, figures, network_tables
from verifiable_relu.study.claims import LEVEL, Outcome, findings, outcomes
from verifiable_relu.study.joined import Study, joined
from verifiable_relu.study.network_tables import screening_table
from verifiable_relu.study.records import Record
from verifiable_relu.study.time_tables import time_table

SECTIONS: Mapping[str, tuple[str, str, Callable[[Study], Table]]] = {
    "main": (
        "Accuracy",
        "Means over the seeds and 95 % percentile-bootstrap intervals over the seeds, which with few seeds are too "
        "narrow: of normal numbers, they hold the true mean in about 75 % of cases for 3 seeds, 86 % for 5 and 90 % "
        "for 10. Fractions of the asked images, but for the last column. *attacked*: classified rightly and refuted by "
        "no method. *certified*: classified rightly and proven by the method, rounding accounted for. *answered*: the "
        "seeds of which all questions at this ε are answered; others have no attacked or certified accuracy yet.",
        accuracy_tables.main_table,
    ),
    "differences": (
        "Differences between arms",
        "Arms with a hardness minus the others, paired by seed. These comparisons were not declared beforehand: they "
        "describe, and no p-value goes with them.",
        accuracy_tables.difference_table,
    ),
    "pareto": (
        "Clean against certified accuracy",
        "Over the objectives and their weights. *front*: no other setting of the same arm is as good in both means and "
        "better in one.",
        accuracy_tables.pareto_table,
    ),
    "times": (
        "Verification time",
        "Each arm on the images that all arms of the same seed classify rightly. Seconds are those charged to a "
        "question: a batch shares its time among its questions.",
        time_table,
    ),
    "unstable": (
        "Unstable neurons",
        "Per rightly classified image, by CROWN's bounds.",
        network_tables.unstable_table,
    ),
    "matched": (
        "Unstable neurons of networks that are alike",
        "Fewer unstable neurons may only mean smaller weights or lower accuracy: here are pairs of networks that are "
        "close in one of them.",
        network_tables.matched_table,
    ),
    "swap": (
        "The swap by ReLU, and compression",
        "On the whole test set. The proven change is an upper bound over all images in [0, 1]ⁿ.",
        network_tables.swap_table,
    ),
    "joint": (
        "Joint certificates",
        "One proof for the ReLU network and all networks with λ'-GELU, λ' ≥ λ, in its place.",
        network_tables.joint_table,
    ),
    "profiles": ("Do seeds agree on the layers' λ?", "", network_tables.profile_table),
    "settling": ("When activation patterns settle, and when weights do", "", network_tables.settling_table),
    "screening": (
        "Screening by early activation patterns",
        "Does the overlap index (OUI) of activation patterns after a tenth of the training tell which trainings end in "
        "the better half? *all* is the fraction of good trainings without a rule.",
        screening_table,
    ),
}
"""The heading, the explanation and the table of each section, by the name of the table's files."""


def tables(study: Study, claimed: Sequence[Outcome]) -> dict[str, Table]:
    """All tables of a study by the name of their files; ``claimed``: the outcomes of its claims."""
    return {
        "claims": accuracy_tables.claim_table(claimed),
        **{name: make(study) for name, (_, _, make) in SECTIONS.items()},
    }


def write(records: Sequence[Record], folder: Path) -> list[Path]:
    """Write the page ``report.md``, the tables into ``tables/`` and, if matplotlib is there, figures into ``figures/``.

    Args:
        records: the records of the study, finished or not.
        folder: the folder of the study.

    Returns:
        The files.

    Raises:
        InputError: if a file cannot be written.
    """
    study = joined(records)
    claimed = outcomes(study)
    page = Page("report")
    page.add(f"# The study “{study.name}”", study.suite.get("about", ""))
    page.bullets(study.notes)
    described = {"Tuning": study.suite.get("tuning"), "What was cut": study.suite.get("cut")}
    page.bullets(f"{title}: {' '.join(text.split())}" for title, text in described.items() if text)
    made = tables(study, claimed)
    page.add("## Findings")
    page.bullets(findings(claimed))
    page.add(_RULE if claimed else "The suite declares no claims.")
    if claimed:
        page.add(made["claims"])
    for name, (title, explanation, _) in SECTIONS.items():
        if made[name].rows:
            page.add(f"## {title}", explanation, made[name])
    files = _tables(made, folder / "tables")
    if importlib.util.find_spec("matplotlib") is not None:
        target = folder / "figures"
        _make(target)
        drawn = figures.draw(records, target)
        page.add(*(["## Figures"] if drawn else []))
        page.add(*(f"![{path.stem}](figures/{path.name})" for path in drawn if path.suffix == ".png"))
        files += drawn
    return [*_write({folder / "report.md": page.markdown()}), *files]


_RULE = f"""\
A difference is *shown* if the larger of two p-values is below {LEVEL:g} after Holm's correction over all claims of the
suite, if both tests agree in its sign, and if the interval over the seeds leaves out zero. The first test, Student's
paired t over the seeds, asks whether the difference is more than chance among trainings; the second, over images
(McNemar's exact test for verdicts, Wilcoxon's signed-rank test for costs; an image that is asked of several seeds
counts once), whether it is more than chance among images. Claims are tested two-sided, whatever was expected. *Not
shown* does not mean that there is no difference. d_z: mean difference divided by its deviation over the seeds; effect
over images: Cohen's g, or the rank-biserial correlation."""


def _tables(made: Mapping[str, Table], folder: Path) -> list[Path]:
    _make(folder)
    contents: dict[Path, str] = {}
    for name, table in made.items():
        if table.rows:
            contents |= {
                folder / f"{name}.csv": table.csv(),
                folder / f"{name}.md": table.markdown(),
                folder / f"{name}.tex": table.latex(name),
            }
    return _write(contents)


def _write(contents: Mapping[Path, str]) -> list[Path]:
    for path, content in contents.items():
        try:
            path.write_text(content, encoding="utf-8")
        except OSError as error:
            raise InputError(f"cannot be written: {error.strerror}", path=path) from None
    return list(contents)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"the folder cannot be made: {error.strerror}", path=folder) from None
