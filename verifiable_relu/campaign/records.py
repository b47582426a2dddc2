"""A file of records: a line of JSON for each result, as ``Result.to_json`` makes it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, NoReturn

from verifiable_relu.campaign.result import Result

LONGEST = 1 << 26
"""Bytes in a line. The record of a counterexample with a million inputs has about 40 million."""

_START = b'{"onnx": "'
"""How every record begins."""

_SHOWN = 200
"""Characters of an error's message that are passed on."""


@dataclass(frozen=True)
class Line:
    """A line of a file, or a piece of one that is longer than ``LONGEST`` bytes.

    Attributes:
        number: the line's, from 1.
        data: its bytes, with the end of the line where there is one.
        result: the result that it records; None if it is no record.
        error: why it is none.
        torn: whether it is none because its writer was killed: it ends with the file, and begins as records do.
    """

    number: int
    data: bytes
    result: Result | None
    error: str = ""
    torn: bool = False

    @property
    def ended(self) -> bool:
        """Whether the end of the line is part of it."""
        return self.data.endswith(b"\n")


def write(result: Result) -> bytes:
    """The line that records a result."""
    return json.dumps(result.to_json(), allow_nan=False).encode() + b"\n"


def read(file: BinaryIO) -> Iterator[Line]:
    """The lines of a file, from its present position."""
    number, inside = 0, False
    while data := file.readline(LONGEST):
        number += not inside
        whole = not inside and (data.endswith(b"\n") or len(data) < LONGEST)
        inside = not data.endswith(b"\n")
        if not whole:
            yield Line(number, data, None, f"it is longer than {LONGEST} bytes")
            continue
        try:
            yield Line(number, data, _record(data))
        except ValueError as error:
            torn = inside and data.startswith(_START)
            yield Line(number, data, None, str(error)[:_SHOWN], torn)


def _record(line: bytes) -> Result:
    """The result that a line records.

    Raises:
        ValueError: if it is no record.
    """
    if not line.startswith(_START):
        raise ValueError(f"it does not begin with {_START.decode()}")
    try:
        found = json.loads(line.decode(), object_pairs_hook=_unique, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return Result.from_json(found)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("it has a key twice")
    return found


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
