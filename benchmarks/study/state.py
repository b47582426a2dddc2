"""What the records of a study hold, and what is therefore still to be done.

A record of kind ``answer`` is written as soon as there is an answer, so that a kill loses none. Most of its text is the
same for many images. When a run ends, the answers about a network, radius and method that agree in all but the image
and its numbers become one record of kind ``answers``. That has the list of the images, and for each number a list too,
or the number alone if all are equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.common.records import Record
from benchmarks.study.cells import Cell
from benchmarks.study.suite import Method, Suite
from verifiable_relu.campaign.result import Result
from verifiable_relu.verifiers.base import Reason, Verdict

ONE = "answer"
"""The kind of the record of one answer."""

MANY = "answers"
"""The kind of a record of several answers."""

_LISTED = ("image", "seconds", "subproblems", "unstable", "margin")
"""The fields that an answer has for itself; the others are equal in all answers of a record."""

FAILED = "failed"
"""The name of the measure that is recorded where measuring failed, which the next run tries again."""

_DIGITS = 3
"""The significant digits of seconds and margins, which are told for tables and prove nothing."""

Question = tuple[str, str, str, int]
"""A question that was asked: cell, radius, method, number of the image."""


def fields(result: Result) -> dict[str, Any]:
    """The fields of the record of a result, without those of its question.

    The detail of a decided question is left out: it repeats the other fields.
    """
    return {
        "verdict": str(result.verdict),
        "reason": str(result.reason),
        "by": result.method,
        "trust": None if result.trust is None else str(result.trust),
        "limit": result.timeout,
        "detail": result.detail if result.verdict is Verdict.UNKNOWN else "",
        "seconds": _short(result.seconds),
        "subproblems": result.subproblems,
        "unstable": result.unstable,
        "margin": _short(result.margin),
    }


def question(answer: Record) -> Question:
    """The question of an answer."""
    return answer["cell"], answer["eps"], answer["method"], answer["image"]


def each(record: Record) -> Iterator[Record]:
    """The answers, one by one, that a record of kind ``ONE`` or ``MANY`` holds."""
    if record["kind"] == ONE:
        yield record
        return
    shared = {name: value for name, value in record.items() if name not in _LISTED}
    count = len(record["image"])
    columns = (value if isinstance(value := record[name], list) else count * [value] for name in _LISTED)
    for values in zip(*columns, strict=True):
        yield {**shared, "kind": ONE, **dict(zip(_LISTED, values, strict=True))}


def gathered(records: Iterable[Record]) -> list[Record]:
    """The records with all answers gathered in records of kind ``MANY``, at the end, and the others as they are.

    Of several answers to a question, the last one is kept.
    """
    others: list[Record] = []
    answers: dict[Question, Record] = {}
    for record in records:
        if record["kind"] not in (ONE, MANY):
            others.append(record)
            continue
        for answer in each(record):
            answers[question(answer)] = answer
    groups: dict[tuple[Any, ...], Record] = {}
    for answer in answers.values():
        shared = {name: value for name, value in answer.items() if name not in _LISTED}
        group = groups.setdefault(tuple(shared.items()), {**shared, "kind": MANY, **{name: [] for name in _LISTED}})
        for name in _LISTED:
            group[name].append(answer[name])
    for group in groups.values():
        group.update({name: group[name][0] for name in _LISTED[1:] if len(set(group[name])) == 1})
    return [*others, *groups.values()]


def _short(number: float | None) -> float | None:
    """A number with ``_DIGITS`` digits; None for none and for one that is not finite."""
    return None if number is None or not math.isfinite(number) else float(f"{number:.{_DIGITS}g}")


@dataclass
class State:
    """The latest records of a study, by what they are about.

    Attributes:
        trainings: the records of trainings by cell.
        images: the records of the images that are asked about, by cell.
        answers: the records of answers.
        measures: the records of measures by cell and name.
        suite: the record of the suite.
        notes: the records of commands and machines.
    """

    trainings: dict[str, Record] = field(default_factory=dict)
    images: dict[str, Record] = field(default_factory=dict)
    answers: dict[Question, Record] = field(default_factory=dict)
    measures: dict[tuple[str, str], Record] = field(default_factory=dict)
    suite: Record | None = None
    notes: list[Record] = field(default_factory=list)

    @classmethod
    def of(cls, records: Iterable[Record]) -> State:
        """The state that records describe; a later record replaces an earlier one about the same."""
        state = cls()
        for record in records:
            match record["kind"]:
                case "training":
                    state.trainings[record["cell"]] = record
                case "images":
                    state.images[record["cell"]] = record
                case "answer" | "answers":
                    state.answers.update((question(answer), answer) for answer in each(record))
                case "measure":
                    state.measures[record["cell"], record["name"]] = record
                case "suite":
                    # Records that a suite without arms of its own began keep seconds that are void (``Study.timed``).
                    if state.suite is not None and "variants" not in state.suite.get("suite", {"variants": ()}):
                        asked = {name: value for name, value in record["suite"].items() if name != "variants"}
                        record = {**record, "suite": asked}
                    state.suite = record
                case "note":
                    state.notes.append(record)
        return state

    def records(self, cells: Iterable[Cell]) -> list[Record]:
        """The records of some cells, of the suite and of machines, without those that were replaced."""
        names = {cell.name for cell in cells}
        kinds: tuple[dict[Any, Record], ...] = (self.trainings, self.images, self.answers, self.measures)
        mine = [record for kind in kinds for record in kind.values() if record["cell"] in names]
        return [*self.notes, *([] if self.suite is None else [self.suite]), *mine]

    def trained(self, cell: Cell) -> bool:
        """Whether a cell has a network."""
        record = self.trainings.get(cell.name)
        return record is not None and record["status"] == "trained"

    def settled(self, cell: Cell) -> bool:
        """Whether training a cell again would add nothing: it has a network, or its training diverged."""
        record = self.trainings.get(cell.name)
        return record is not None and record["status"] != "failed"

    def right(self, cell: Cell, count: int) -> list[int] | None:
        """The images that a cell's network is asked about; None if they were not chosen, or are of another number.

        Args:
            cell: the cell.
            count: the number of images from which those are taken that the network classifies rightly.
        """
        record = self.images.get(cell.name)
        return None if record is None or record["asked"] != count else list(record["right"])

    def open(self, suite: Suite, cell: Cell, method: Method) -> list[tuple[str, int]]:
        """The radii and images about which a method is still to be asked of a network whose images are known."""
        setting = suite.setting(cell.network)
        if method.name not in setting.methods:
            return []
        return [
            (eps, image)
            for eps in setting.eps
            for image in self.right(cell, setting.images) or ()
            if not self.answered((cell.name, eps, method.name, image), method.limit)
        ]

    @property
    def measured(self) -> set[str]:
        """The names of the cells whose networks were measured."""
        return {cell for cell, name in self.measures if name != FAILED}

    def left(self, suite: Suite, cell: Cell) -> bool:
        """Whether something is left to choose, measure or ask of a trained network."""
        chosen = self.right(cell, suite.setting(cell.network).images) is not None
        return not (chosen and cell.name in self.measured) or any(
            self.open(suite, cell, each) for each in suite.methods
        )

    def answered(self, question: Question, limit: float) -> bool:
        """Whether a question has an answer to which another run with a time limit in seconds would add nothing."""
        record = self.answers.get(question)
        return record is not None and final(record, limit)


def final(record: Mapping[str, Any], limit: float) -> bool:
    """Whether another run with a time limit in seconds would add nothing to the record of an answer."""
    passing = record["reason"] in (Reason.ERROR, Reason.MEMORY)
    return not passing and (record["verdict"] != "unknown" or record["limit"] >= limit)


def of_seed(cells: Sequence[Cell], seed: int) -> list[Cell]:
    """The cells of one seed."""
    return [cell for cell in cells if cell.options.seed == seed]
