"""What the records of a study hold, and what is therefore still to be done."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verifiable_relu.study import answers
from verifiable_relu.study.answers import Question
from verifiable_relu.study.cells import Cell
from verifiable_relu.study.records import Record
from verifiable_relu.study.suite import Method, Suite
from verifiable_relu.verifiers.base import Reason


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
        """The state that records describe, of which a later one replaces an earlier one about the same."""
        state = cls()
        for record in records:
            match record["kind"]:
                case "training":
                    state.trainings[record["cell"]] = record
                case "images":
                    state.images[record["cell"]] = record
                case answers.ONE | answers.MANY:
                    state.answers.update((answers.question(answer), answer) for answer in answers.each(record))
                case "measure":
                    state.measures[record["cell"], record["name"]] = record
                case "suite":
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
            count: the number of images of which those are taken that the network classifies rightly.
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
