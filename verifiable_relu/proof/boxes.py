"""Trees of boxes as records: where boxes are cut, what is clipped, and by which rows.

The checker bounds halves by itself; a box that was never halved is halved once for it. Numbers of boxes, cuts and rows
are all that is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from verifiable_relu.errors import UnsupportedError
from verifiable_relu.proof.encoding import Record, binary, numbers, step_of
from verifiable_relu.search.property_rows import BoxRows
from verifiable_relu.search.split.boxes import BoxesBounded, BoxesClipped, BoxesHalved, Event

Combined = tuple[int, tuple[float, ...]]
"""A polytope, and multipliers of its rows."""


class BoxTree:
    """The boxes of the query that is number ``owner`` of a search."""

    def __init__(self, owner: int) -> None:
        self._owner, self._whole = owner, False
        self._middle = 0, 0.0
        self.parallel = False
        self._closing: dict[int, list[Combined]] = {}
        self._clipped: dict[int, list[tuple[list[Combined], list[tuple[int, int, float]]]]] = {}
        self._gone: dict[int, list[tuple[int, int, float, list[Combined]]]] = {}
        self._halved: dict[int, tuple[int, float, int, int]] = {}

    def add(self, event: Event) -> None:
        """Take what is told of boxes."""
        match event:
            case BoxesBounded():
                self._bounded(event)
            case BoxesClipped():
                self._clip(event)
            case BoxesHalved():
                self._halve(event)

    def _bounded(self, event: BoxesBounded) -> None:
        self.parallel |= bool(event.slopes)
        self._event = event
        mine = (event.boxes.owner == self._owner).nonzero().squeeze(1)
        largest = event.rows.largest(event.values)
        proved = (event.rows.margins(event.values) > 0)[mine].tolist()
        values = event.rows.unscaled(event.values)
        for at, number, is_proved in zip(mine.tolist(), event.boxes.number[mine].tolist(), proved, strict=True):
            if number == self._owner:
                low, high = event.boxes.lower[at], event.boxes.upper[at]
                place = int((high - low).argmax())
                self._middle = place, float(low[place] / 2 + high[place] / 2)
            if is_proved:
                self._closing[number] = [
                    self._best(event.rows, values, at, polytope)
                    for polytope in event.rows.exists[at].nonzero().squeeze(1).tolist()
                ]
            else:
                self._closing.pop(number, None)
        self._largest, self._values = largest, values

    def _best(self, rows: BoxRows, values: Any, at: int, polytope: int) -> Combined:
        return self._combined(rows, at, polytope, self._row(rows, values, at, polytope))

    @staticmethod
    def _row(rows: BoxRows, values: Any, at: int, polytope: int) -> int:
        mine = (rows.polytope[at] == polytope).nonzero().squeeze(1)
        return int(mine[values[at, mine].argmax()])

    @staticmethod
    def _combined(rows: BoxRows, at: int, polytope: int, row: int) -> Combined:
        """Return a polytope and the multipliers of its rows that make a row: one of them, or a sum."""
        count = rows.bound.shape[1] - (0 if rows.weights is None else rows.exists.shape[1])
        members = rows.members[at, polytope]
        members = members[members < count]
        if row < count:
            return polytope, tuple((members == row).double().tolist())
        assert rows.weights is not None
        weights = rows.weights[at, polytope, : len(members)] * rows.scale[at, members]
        return polytope, tuple(weights.tolist())

    def _clip(self, event: BoxesClipped) -> None:
        before, rest, rows = self._event.boxes, event.rest, self._event.rows
        mine = (before.owner == self._owner).nonzero().squeeze(1)
        low, high = rest.lower > before.lower, rest.upper < before.upper
        for at, number in zip(mine.tolist(), before.number[mine].tolist(), strict=True):
            if number in self._closing:
                continue
            exists = rows.exists[at].nonzero().squeeze(1).tolist()
            if bool((rest.lower[at] > rest.upper[at]).any()):
                self._gone[number] = self._halvings(event, at, exists)
                continue
            groups: dict[tuple[Combined, ...], list[tuple[int, int, float]]] = {}
            for side, moved, ends in ((-1, low, rest.lower), (1, high, rest.upper)):
                for place in moved[at].nonzero().squeeze(1).tolist():
                    combined = []
                    for polytope in exists:
                        row = int(event.row[0 if side < 0 else 1, at, polytope, place])
                        if float(self._largest[at, polytope]) > 0:
                            combined.append(self._best(rows, self._values, at, polytope))
                        else:
                            combined.append(self._combined(rows, at, polytope, row))
                    groups.setdefault(tuple(combined), []).append((place, side, float(ends[at, place])))
            if groups:
                self._clipped[number] = [(list(combined), ends) for combined, ends in groups.items()]

    def _halvings(
        self, event: BoxesClipped, at: int, exists: list[int]
    ) -> list[tuple[int, int, float, list[Combined]]]:
        """Return how a box of which nothing is left is proved: each polytope on both sides of a cut, or at once."""
        found, rows, before = [], self._event.rows, self._event.boxes
        for polytope in exists:
            low, high = event.ends[:, at, polytope]
            if float(self._largest[at, polytope]) > 0:
                best = self._best(rows, self._values, at, polytope)
                found.append((polytope, -1, 0.0, [best]))
                continue
            place = int((low - high).argmax())
            value = float(((low + high) / 2).clamp(before.lower[at], before.upper[at])[place])
            sides = [self._combined(rows, at, polytope, int(row)) for row in event.row[:, at, polytope, place]]
            found.append((polytope, place, value, sides))
        return found

    def _halve(self, event: BoxesHalved) -> None:
        children, count = event.children, len(event.parent)
        mine = (children.owner[:count] == self._owner).nonzero().squeeze(1)
        lower, upper = children[:count], children[count:]
        apart = lower.upper != upper.upper
        for at in mine.tolist():
            places = apart[at].nonzero().squeeze(1).tolist()
            places = places or (lower.lower[at] != upper.lower[at]).nonzero().squeeze(1).tolist()
            if not places:
                self._whole = True
                continue
            value = float(lower.upper[at, places[0]])
            self._whole |= value != float(upper.lower[at, places[0]])
            halves = int(lower.number[at]), int(upper.number[at])
            self._halved[int(event.parent[at])] = (places[0], value, *halves)

    def records(self, left: set[int]) -> Iterator[Record]:
        """Yield the records of all boxes, for the polytopes that are left."""
        if self._whole:
            raise UnsupportedError("boxes that hold whole numbers alone do not cover those between")
        # The root has the query's own number in its search. Lists are what comes behind a cut.
        waiting: list[int | list[Record]] = [self._owner]
        if self._owner in self._closing or self._owner in self._gone:
            # A checker bounds halves by itself, and halves them again where its bounds are looser than the search's.
            place, value = self._middle
            yield {"halve": [place, *binary(value)]}
            waiting.append(self._owner)
        while waiting:
            number = waiting.pop()
            if isinstance(number, list):
                yield from number
                continue
            for combined, ends in self._clipped.get(number, []):
                # What is cut off has better bounds by itself than as a part of the box.
                cut: Record = {"close": self._sums(combined, left)}
                for place, side, value in ends:
                    yield {"halve": [place, *binary(value)]}
                    if side < 0:
                        yield cut
                    else:
                        waiting.append([cut])
            if number in self._gone:
                yield from self._gone_records(self._gone[number], left)
            elif number in self._halved:
                place, value, lower, upper = self._halved[number]
                yield {"halve": [place, *binary(value)]}
                waiting += [upper, lower]
            elif number in self._closing:
                yield {"close": self._sums(self._closing[number], left)}
            else:
                raise UnsupportedError("the search did not tell of every box")

    def _gone_records(self, gone: list[tuple[int, int, float, list[Combined]]], left: set[int]) -> Iterator[Record]:
        mine = [each for each in gone if each[0] in left]
        for count, (polytope, place, value, sides) in enumerate(mine, 1):
            if count < len(mine):
                yield {"only": [polytope]}
            if place >= 0:
                yield {"halve": [place, *binary(value)]}
            yield from ({"close": self._sums([side], left)} for side in sides)

    @staticmethod
    def _sums(combined: Sequence[Combined], left: set[int]) -> list[list[Any]]:
        found: list[list[Any]] = []
        for polytope, weights in combined:
            if polytope in left:
                whole = [] if len(weights) < 2 else [_whole(weights)]
                found.append([polytope, *whole])
        return found


def _whole(weights: Sequence[float]) -> list[int]:
    values = np.array(weights)
    return numbers(values, min(0, step_of(values, 50)))
