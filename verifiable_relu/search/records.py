"""Records of tensors with a row per item, and the stack of a search's open sub-problems.

A record is a frozen dataclass whose tensor fields all have one row per item. Searches keep their open
sub-problems in one record that grows in place, on the device of the search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad


class TensorRecord:
    """Base of frozen dataclasses whose tensors have a row per item."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The fields that are tensors, by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def each(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return the record with a function applied to every tensor."""
        changed: dict[str, Any] = {name: change(t) for name, t in self.tensors.items()}
        return replace(self, **changed)  # type: ignore[type-var]

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def __getitem__(self, chosen: Tensor | slice) -> Self:
        return self.each(lambda t: t[chosen])

    @staticmethod
    def cat(parts: Sequence[Record]) -> Record:
        """Return the concatenated rows of at least one record."""
        joined: dict[str, Any] = {name: torch.cat([part.tensors[name] for part in parts]) for name in parts[0].tensors}
        return replace(parts[0], **joined)  # type: ignore[type-var]


Record = TypeVar("Record", bound=TensorRecord)


class Stack(Generic[Record]):
    """Stack of a record's rows, which grows in place; the last rows are taken first (depth-first search)."""

    def __init__(self, rows: Record) -> None:
        self._held, self._count = rows, len(rows)

    def __len__(self) -> int:
        return self._count

    @property
    def rows(self) -> Record:
        """All rows, in order, until more are pushed."""
        return self._held[: self._count]

    @property
    def bytes(self) -> int:
        return sum(t.nbytes for t in self.rows.tensors.values())

    def push(self, more: Record) -> None:
        """Keep copies of more rows; columns that either side lacks are zeros."""
        start, end = self._count, self._count + len(more)
        changed: dict[str, Any] = {}
        for name, new in more.tensors.items():
            held = self._held.tensors[name]
            if held.ndim > 1 and held.shape[1] < new.shape[1]:
                held = pad(held, (0, new.shape[1] - held.shape[1]))
            if end > len(held):
                room = max(end, 2 * start) - start
                held = torch.cat([held[:start], held.new_empty(room, *held.shape[1:])])
            if held.ndim > 1 and new.shape[1] < held.shape[1]:
                new = pad(new, (0, held.shape[1] - new.shape[1]))
            held[start:end] = new
            changed[name] = held
        self._held, self._count = replace(self._held, **changed), end  # type: ignore[type-var]

    def pop(self, count: int) -> Record:
        """Return the last rows, at most ``count``."""
        end, self._count = self._count, max(0, self._count - count)
        # What is pushed next takes their place.
        return self._held[self._count : end].each(Tensor.clone)

    def batches(self, size: int) -> Iterator[Record]:
        """Yield all rows, at most ``size`` at a time."""
        for start in range(0, self._count, size):
            yield self._held[start : min(start + size, self._count)]

    def deal(self, hands: int) -> list[Stack[Record]]:
        """Remove all rows and return them in ``hands`` parts, dealt one by one like cards."""
        every = self.pop(self._count)
        return [Stack(every[number::hands].each(Tensor.clone)) for number in range(hands)]
