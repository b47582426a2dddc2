"""Trees of boxes as records: where boxes are cut, what is clipped, and by which rows.

The checker bounds halves by itself, and halves them again where its bounds are looser than the search's. A box that was
never halved is halved once for it, next to the box: one half is empty, the other one is all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from verifiable_relu.errors import UnsupportedError
from verifiable_relu.proof.encoding import Record, binary, numbers, step_of
from verifiable_relu.search.split.bounding import BoxesBounded, BoxesHalved, Event

Combined = tuple[int, tuple[float, ...]]
"""A polytope, and multipliers of its rows."""

Cut = tuple[int, float]
"""An input, and the value at which a box is cut along it."""


class BoxTree:
    """The boxes of the query that is number ``owner`` of a search."""

    def __init__(self, owner: int) -> None:
        self._owner, self._whole, self._least = owner, False, 0.0
        self._closing: dict[int, list[Combined]] = {}
        self._clipped: dict[int, dict[tuple[Combined, ...], list[tuple[int, Cut]]]] = {}
        self._gone: dict[int, list[tuple[Cut, list[Combined]]]] = {}
        self._halved: dict[int, tuple[Cut, int, int]] = {}

    def add(self, event: Event) -> None:
        """Keep what an event says of the query's boxes."""
        if isinstance(event, BoxesHalved):
            return self._halve(event)
        before, rest, ends = event.boxes, event.rest, (event.rest.lower, event.rest.upper)
        empty = (rest.lower > rest.upper).any(1)
        moved = torch.stack([rest.lower > before.lower, rest.upper < before.upper])
        for at in (before.owner == self._owner).nonzero().squeeze(1).tolist():
            number, polytopes = int(before.number[at]), event.rows.exists[at].nonzero().squeeze(1).tolist()
            if number == self._owner:
                self._least = float(before.lower[at, 0])
            if event.proved[at]:
                self._closing[number] = [_combined(event, at, polytope, 0, 0) for polytope in polytopes]
            elif empty[at]:
                self._gone[number] = [_halving(event, at, polytope) for polytope in polytopes]
            else:
                groups = self._clipped[number] = {}
                for side, place in moved[:, at].nonzero().tolist():
                    combined = tuple(_combined(event, at, polytope, side, place) for polytope in polytopes)
                    groups.setdefault(combined, []).append((side, (place, float(ends[side][at, place]))))
        return None

    def _halve(self, event: BoxesHalved) -> None:
        children, count = event.children, len(event.parent)
        lower, upper = children[:count], children[count:]
        apart = (lower.upper != upper.upper) | (lower.lower != upper.lower)
        for at in (lower.owner == self._owner).nonzero().squeeze(1).tolist():
            places = apart[at].nonzero().squeeze(1).tolist()
            if not places or bool(lower.upper[at, places[0]] != upper.lower[at, places[0]]):
                self._whole = True
                continue
            cut = places[0], float(lower.upper[at, places[0]])
            self._halved[int(event.parent[at])] = cut, int(lower.number[at]), int(upper.number[at])

    def records(self, left: set[int]) -> Iterator[Record]:
        """Yield the records of all boxes, for the polytopes that are left."""
        if self._whole:
            raise UnsupportedError("boxes that hold whole numbers alone do not cover those between")
        # The root has the query's own number in its search. Lists are what comes behind a cut.
        waiting: list[int | Record] = [self._owner]
        if self._owner in self._closing:
            yield _halve((0, self._least - 1))
            waiting.append(self._owner)
        while waiting:
            number = waiting.pop()
            if isinstance(number, dict):
                yield number
                continue
            for combined, cuts in self._clipped.get(number, {}).items():
                # What is cut off has better bounds by itself than as a part of the box.
                close = _close(combined, left)
                for side, cut in cuts:
                    yield _halve(cut)
                    if side:
                        waiting.append(close)
                    else:
                        yield close
            if number in self._gone:
                gone = [each for each in self._gone[number] if each[1][0][0] in left]
                for count, (cut, sides) in enumerate(gone, 1):
                    if count < len(gone):
                        yield {"only": [sides[0][0]]}
                    yield _halve(cut)
                    yield from (_close([side], left) for side in sides)
            elif number in self._halved:
                cut, lower, upper = self._halved[number]
                yield _halve(cut)
                waiting += [upper, lower]
            elif number in self._closing:
                yield _close(self._closing[number], left)
            else:
                raise UnsupportedError("the search did not tell of every box")


def _halve(cut: Cut) -> Record:
    return {"halve": [cut[0], *binary(cut[1])]}


def _close(combined: Sequence[Combined], left: set[int]) -> Record:
    """Return the record that excludes those polytopes that are left."""
    found = []
    for polytope, weights in combined:
        if polytope in left:
            found.append([polytope, *([numbers(weights, min(0, step_of(weights, 50)))] if len(weights) > 1 else [])])
    return {"close": found}


def _combined(event: BoxesBounded, at: int, polytope: int, side: int, place: int) -> Combined:
    """Return a polytope and the multipliers of its rows that exclude it at one side of a box: one row, or a sum."""
    rows, row = event.rows, int(event.row[side, at, polytope, place])
    count = rows.bound.shape[1] - (0 if rows.weights is None else rows.exists.shape[1])
    members = rows.members[at, polytope]
    members = members[members < count]
    if row < count:
        return polytope, tuple((members == row).double().tolist())
    assert rows.weights is not None
    return polytope, tuple((rows.weights[at, polytope, : len(members)] * rows.scale[at, members]).tolist())


def _halving(event: BoxesBounded, at: int, polytope: int) -> tuple[Cut, list[Combined]]:
    """Return the cut of a box that a polytope's rows exclude, and the rows that exclude it on both sides."""
    low, high = event.ends[:, at, polytope]
    place = int((low - high).argmax())
    value = ((low + high) / 2).clamp(event.boxes.lower[at], event.boxes.upper[at])[place]
    return (place, float(value)), [_combined(event, at, polytope, side, place) for side in (0, 1)]
