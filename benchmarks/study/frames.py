"""The records of a study as tables of pandas: a row for each training, and a row for each answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import pandas as pd

from benchmarks.common.records import Record, of
from benchmarks.study.suite import Cell, Setting, Suite
from verifiable_relu.search.registry import METHODS

SETTING = list(Setting._fields)
CELL = list(Cell._fields)
ANSWER = ["cell", "eps", "method", "image", "verdict", "limit", "seconds", "subproblems", "margin"]


@dataclass(frozen=True, eq=False)
class Study:
    """A study and what its records say so far; a later record of the same thing replaces an earlier one.

    Attributes:
        name: its name.
        suite: the suite.
        records: all records.
    """

    name: str
    suite: Suite
    records: Sequence[Record]

    @cached_property
    def trainings(self) -> pd.DataFrame:
        """A row for each training of the suite by the name of its cell: its setting, seed, status, images, results."""
        cells = {cell: cell.name for cell in self.suite.cells()}
        rows: dict[str, Record] = {}
        for record in of(self.records, "training"):
            cell = Cell(*(record[name] for name in CELL))
            if cell in cells:
                images = {"images": record.get("images", []), "right": frozenset(record.get("right", ()))}
                rows[cell.name] = {**cell._asdict(), "status": record["status"], **images, **record.get("results", {})}
        order = [name for name in cells.values() if name in rows]
        return (
            pd.DataFrame([rows[name] for name in order], index=order)
            if rows
            else pd.DataFrame(columns=[*CELL, "status"])
        )

    @cached_property
    def trained(self) -> pd.DataFrame:
        """The rows of ``trainings`` that have a network."""
        return self.trainings[self.trainings.status == "trained"]

    @cached_property
    def answers(self) -> pd.DataFrame:
        """A row for each answer about an image that the network classifies rightly; ``cost`` is PAR-2.

        An undecided question costs twice its limit: shorter times of others stay shorter, which is all that a test of
        ranks needs of times that a limit censors.
        """
        found = pd.DataFrame([{name: r[name] for name in ANSWER} for r in of(self.records, "answer")], columns=ANSWER)
        found = found.drop_duplicates(["cell", "eps", "method", "image"], keep="last")
        found = found.join(self.trained[[*CELL, "right"]], on="cell", how="inner")
        found = found[[image in right for image, right in zip(found.image, found.right, strict=True)]].drop(
            columns="right"
        )
        seconds = pd.to_numeric(found.seconds)
        cost = seconds.clip(upper=found.limit).where(found.verdict != "unknown", 2 * found.limit)
        return found.assign(
            seconds=seconds, subproblems=pd.to_numeric(found.subproblems), cost=cost.where(seconds.notna())
        )

    @cached_property
    def asked(self) -> pd.DataFrame:
        """A row for each trained cell, radius and method: the fractions of the asked images with each verdict.

        ``answered`` says whether all questions have an answer: fractions of some so far are no accuracy, and are NaN.
        """
        rows = [
            (cell, eps, method)
            for cell, row in self.trained.iterrows()
            for eps in self.suite.architecture(row.network).eps
            for method in self.suite.architecture(row.network).methods
        ]
        index = pd.MultiIndex.from_tuples(rows, names=["cell", "eps", "method"])
        counts = self.answers.groupby(["cell", "eps", "method"]).verdict.value_counts().unstack(fill_value=0)
        counts = counts.reindex(index, fill_value=0).reindex(columns=["unsat", "sat", "unknown"], fill_value=0)
        found = counts.reset_index().join(self.trained[[*CELL, "images", "right"]], on="cell")
        images, right = found.images.map(len), found.right.map(len)
        found["answered"] = (found[["unsat", "sat", "unknown"]].sum(axis=1) == right) & (images > 0)
        found["clean"] = right / images
        found["certified"] = (found.unsat / images).where(found.answered)
        attacks = found.method.map(attacks_too)
        found["not_refuted"] = ((right - found.sat) / images).where(found.answered & attacks)
        return found.drop(columns=["images", "right"])

    @cached_property
    def overall(self) -> pd.DataFrame:
        """A row for each trained cell and radius: the same by any method in real arithmetic."""
        real = self.asked[self.asked.method.isin(METHODS)]
        key = ["cell", "eps"]
        found = real.groupby(key, sort=False).agg(answered=("answered", "all"), clean=("clean", "first"))
        of_real = self.answers[self.answers.method.isin(METHODS)]
        some = {v: of_real[of_real.verdict == v].groupby(key).image.nunique() for v in ("unsat", "sat")}
        images = self.trained.images.map(len).reindex(found.index.get_level_values("cell")).to_numpy()
        unsat, sat = (some[v].reindex(found.index, fill_value=0) / images for v in ("unsat", "sat"))
        refutes = real.assign(attacks=real.method.map(attacks_too)).groupby(key, sort=False).attacks.any()
        found["certified"] = unsat.where(found.answered)
        found["not_refuted"] = (found.clean - sat).where(found.answered & refutes)
        found["unstable"] = [self.unstable(cell, eps) for cell, eps in found.index]
        return found.reset_index().join(self.trained[CELL], on="cell")

    def unstable(self, cell: str, eps: str) -> float:
        """The mean number of unstable neurons per image; NaN if it was not measured."""
        known = self.trained.unstable[cell] if "unstable" in self.trained else {}
        return sum(known[eps]) if isinstance(known, dict) and eps in known else float("nan")

    @cached_property
    def questions(self) -> dict[tuple[str, str, str], pd.DataFrame]:
        """The answers by image of each cell, radius and method."""
        grouped = self.answers.set_index("image")[[*ANSWER[:3], "verdict", "cost", "subproblems"]].groupby(ANSWER[:3])
        return {(str(cell), str(eps), str(method)): found for (cell, eps, method), found in grouped}

    def by_image(self, cell: str, measure: str, eps: str, method: str) -> pd.Series[float]:
        """The value of a share or a cost for each image; empty until all images are answered."""
        row = self.trained.loc[cell]
        if measure == "clean":
            return pd.Series({image: float(image in row.right) for image in row.images})
        methods = [method] if method else [m for m in self.suite.architecture(row.network).methods if m in METHODS]
        known = [self.questions[cell, eps, each] for each in methods if (cell, eps, each) in self.questions]
        if sum(map(len, known)) < len(row.right) * len(methods) or not row.images:
            return pd.Series(dtype=float)
        if measure == "seconds":
            return known[0].cost.dropna()
        if measure == "subproblems":
            return known[0][known[0].verdict != "unknown"].subproblems.dropna()
        if measure == "not_refuted" and not any(map(attacks_too, methods)):
            return pd.Series(dtype=float)
        verdict = "unsat" if measure == "certified" else "sat"
        said = {image for each in known for image in each.index[each.verdict == verdict]}
        kept = said if measure == "certified" else row.right - said
        return pd.Series({image: float(image in kept) for image in row.images})

    def value(self, cell: str, measure: str, eps: str = "") -> float:
        """A number of a training; NaN where the records do not have it."""
        if measure == "unstable":
            return self.unstable(cell, eps)
        found = self.trained[measure][cell] if measure in self.trained else None
        return float("nan") if found is None else float(found)


def attacks_too(method: str) -> bool:
    """Return True if a method looks for counterexamples: bounds alone only prove."""
    return METHODS[method if method in METHODS else method.rpartition("-")[0]].attacks


def decides(method: str) -> bool:
    """Return True if a method proves and refutes, so that an undecided question is one that took too long."""
    return attacks_too(method) and METHODS[method if method in METHODS else method.rpartition("-")[0]].proves
