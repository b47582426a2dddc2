"""The answers of a study in its records: one by one as they come, and later many in one record.

A record of kind ``answer`` is written as soon as there is an answer, so that a kill loses none. Most of its text is the
same for many images. When a run ends, the answers about a network, radius and method that agree in all but the image
and its numbers become one record of kind ``answers``. That has the list of the images, and for each number a list too,
or the number alone if all are equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from verifiable_relu.campaign.result import Result
from verifiable_relu.study.records import Record
from verifiable_relu.verifiers.base import Verdict

ONE = "answer"
"""The kind of the record of one answer."""

MANY = "answers"
"""The kind of a record of several answers."""

_LISTED = ("image", "seconds", "subproblems", "unstable", "margin")
"""The fields that an answer has for itself; the others are equal in all answers of a record."""

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
