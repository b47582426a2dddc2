"""Certificates as streams of records: JSON objects, one a line, gzipped or not."""

from __future__ import annotations

import gzip
import json
import re
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from verifiable_relu.check.errors import BadInput, Refused
from verifiable_relu.check.numbers import Number
from verifiable_relu.check.properties import decimal

TABLE = "certificates.csv"
"""The file of a folder that says which network and which property each certificate is of."""

LONGEST, TOKENS = 1 << 25, 1 << 21
"""Most bytes of one line, and most characters [, { and " in it."""

_DIGITS = re.compile(r"[0-9]{4001}", re.ASCII)


class Records:
    """The records of a file, one after another; the next one is looked at before it is taken.

    Args:
        lines: a function that reads the next line, of at most the given number of bytes.
    """

    def __init__(self, lines: Callable[[int], bytes]) -> None:
        self._lines = lines
        self._next: dict[str, Any] | None = None
        self.count = 0

    @property
    def place(self) -> str:
        return f"record {self.count}"

    def peek(self) -> dict[str, Any]:
        """Return the record that is next."""
        if self._next is None:
            line, place = self._read(), f"the certificate's record {self.count + 1}"
            if len(line) > LONGEST or sum(map(line.count, (b"[", b"{", b'"'))) > TOKENS:
                raise BadInput(f"{place}: a line is too long")
            Refused.when(not line.endswith(b"\n"), "the certificate ends too early")
            try:
                record = json.loads(line, object_pairs_hook=_unique, parse_float=_no, parse_constant=_no)
            except RecursionError as error:
                raise BadInput(f"{place}: lists are nested too deeply") from error
            except ValueError as error:
                if "digits" in str(error):
                    raise BadInput(f"{place}: a number has too many digits") from error
                raise Refused(f"no record: {str(error)[:80]}") from error
            if not isinstance(record, dict):
                raise Refused("a record is an object")
            self._next = record
        return self._next

    def take(self, *keys: str, optional: tuple[str, ...] = ()) -> list[Any]:
        """Return the values of a record with just these keys; of an optional one that is missing, None."""
        record = self.peek()
        self.count += 1
        nothing = any(record.get(key, "") is None for key in optional)
        if nothing or not set(keys) <= record.keys() <= {*keys, *optional}:
            raise Refused(f"a record of {', '.join(keys)} is expected, not of {', '.join(record)[:80] or 'nothing'}")
        self._next = None
        return [record.get(key) for key in (*keys, *optional)]

    def end(self) -> None:
        """Make sure that nothing is left."""
        before = self.count
        (found,) = self.take("end")
        wrong = type(found) is not int or found != before
        Refused.when(wrong, f"{before} records come before the end, not {str(found)[:20]}")
        Refused.when(self._read(), "something follows the end")

    def _read(self) -> bytes:
        try:
            return self._lines(LONGEST + 1)
        except (EOFError, OSError, zlib.error) as error:
            raise Refused(f"the certificate cannot be read: {error}") from error


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open a regular file, unpacked if it is gzipped: for the content of a pipe or a device one would wait."""
    try:
        BadInput.when(not stat.S_ISREG(path.stat().st_mode), f"{path}: it is not a regular file")
        file = path.open("rb")
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}") from error
    with file:
        packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        yield gzip.GzipFile(fileobj=file) if packed else file


def content(path: Path, most: int) -> bytes:
    """Return the content of a file, unpacked; larger ones are refused."""
    try:
        with opened(path) as file:
            data: bytes = file.read(most + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise BadInput(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    BadInput.when(len(data) > most, f"{path}: it is larger than {most} bytes")
    return data


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a key occurs twice")
    return dict(pairs)


def _no(text: str) -> None:
    raise ValueError(f"'{text[:20]}' is no integer")


def listed(value: Any, size: int | None = None) -> list[Any]:
    """Return a list; with ``size``, one of that length."""
    if not isinstance(value, list) or (size is not None and len(value) != size):
        raise Refused("a list is expected" if size is None else f"a list of {size} is expected")
    return value


def number_of(value: Any, size: int, what: str) -> int:
    """Return an integer of 0 … size − 1."""
    if type(value) is not int or not 0 <= value < size:
        raise Refused(f"{value!r:.20} is the number of no {what}")
    return value


def numbers_of(value: Any, size: int, what: str) -> Number:
    """Return integers of 0 … size − 1, each once."""
    found = np.array([number_of(each, size, what) for each in listed(value)], np.int64)
    Refused.when(len(np.unique(found)) < len(found), f"a {what} is named twice")
    return found


def sign(value: Any) -> int:
    """Return a side, 1 or −1."""
    if type(value) is not int or value not in (1, -1):
        raise Refused("a side is 1 or -1")
    return value


def binary(value: Any, size: int | None = None) -> Number:
    """Return the numbers mantissa·2^exponent of [exponent, mantissa, mantissa, …], exactly, in float64."""
    exponent, *mantissas = listed(value, None if size is None else size + 1) or [0]
    Refused.when(not {type(exponent), *map(type, mantissas)} <= {int}, "a list of integers is expected")
    Refused.when(not -900 <= exponent <= 900, f"the exponent {str(exponent)[:20]} is beyond ±900")
    large = mantissas and max(max(mantissas), -min(mantissas)) > 1 << 53
    Refused.when(large, "a mantissa is beyond ±2⁵³")
    return np.ldexp(np.array(mantissas, np.float64), exponent)


def rational(value: Any) -> Fraction:
    """Return the number that a string is, p/q or a decimal."""
    if not isinstance(value, str):
        raise Refused("a rational number is a string")
    BadInput.when(_DIGITS.search(value), "a rational number of the certificate has too many digits")
    try:
        top, _, bottom = value.partition("/")
        return decimal(top) / (decimal(bottom) if bottom else 1)
    except (BadInput, ZeroDivisionError) as error:
        raise Refused(f"'{value[:40]}' is no rational number") from error
