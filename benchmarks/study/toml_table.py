"""A TOML file whose errors name the line: tables that know which of their keys were taken.

Lines are looked up in the text, since no well-kept parser for Python tells where a value stands: ``tomllib`` and
``tomlkit`` have positions in the errors of their own alone.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from verifiable_relu.errors import InputError
from verifiable_relu.files import read_text

T = TypeVar("T")

Path_ = tuple[str | int, ...]
"""The place of a value: names of tables and keys, and indices in arrays of tables."""

_LARGEST = 1 << 20
"""The most bytes of a file."""

_HEADER = re.compile(r"\s*(\[\[?)\s*([^\[\]]+?)\s*\]\]?\s*(#.*)?$")
_KEY = re.compile(r"\s*([A-Za-z0-9_\-.\"' ]+?)\s*=")


class Keys:
    """A table of a TOML file; each key is taken once.

    Args:
        path: the file.
        text: its text, in which lines are looked up.
        values: the table's values.
        place: the place of the table in the file.

    Attributes:
        names: the keys of the table.
    """

    def __init__(self, path: Path, text: str, values: Mapping[str, Any], place: Path_ = ()) -> None:
        self._path = path
        self._text = text
        self._left = dict(values)
        self._known: list[str] = []
        self.names = frozenset(values)
        self._place = place

    @classmethod
    def read(cls, path: Path) -> Keys:
        """The table that a file holds.

        Raises:
            InputError: if the file cannot be read, or is no TOML.
        """
        text = read_text(path, _LARGEST)
        try:
            return cls(path, text, tomllib.loads(text))
        except tomllib.TOMLDecodeError as error:
            found = re.search(r"\(at (?:line (\d+).*|end of document)\)$", str(error))
            line = found[1] if found and found[1] else str(text.count("\n") + 1)
            message = str(error)[: found.start()].strip() if found else str(error)
            raise InputError(f"no TOML: {message}", path=path, place=f"line {line}") from None
        except RecursionError:
            raise InputError("no TOML: it is nested too deeply", path=path) from None

    @property
    def text(self) -> str:
        """The text of the file."""
        return self._text

    def error(self, message: str, key: str | None = None) -> InputError:
        """The error to raise for a key of the table, or for the table as a whole."""
        place = self._place if key is None else (*self._place, key)
        lines = _lines(self._text)
        while place and place not in lines:
            place = place[:-1]
        return InputError(message, path=self._path, place=f"line {lines[place]}" if place else None)

    def take(self, key: str, read: Callable[[Any], T], default: T | None = None) -> T:
        """The value of a key.

        Args:
            key: the key.
            read: makes of the TOML value what is returned; raises a ValueError that says what the value should be.
            default: returned where the table has no such key; without it, the key must be there.

        Raises:
            InputError: if the key is missing, or if its value is refused.
        """
        self._known.append(key)
        if key not in self._left:
            if default is None:
                raise self.error(f"'{key}' is missing")
            return default
        try:
            return read(self._left.pop(key))
        except InputError as error:
            raise self.error(error.message, key) from None
        except ValueError as error:
            raise self.error(f"{key}: {error}", key) from None

    def table(self, key: str) -> Keys:
        """The table that a key names; an empty one where there is none.

        Raises:
            InputError: if the value of the key is no table.
        """
        values: dict[str, Any] = self.take(key, _dict, {})
        return Keys(self._path, self._text, values, (*self._place, key))

    def tables(self, key: str) -> list[Keys]:
        """The tables of an array of tables; none where the key is missing.

        Raises:
            InputError: if the value of the key is no array of tables.
        """
        found: list[dict[str, Any]] = self.take(key, lambda value: [_dict(each) for each in _list(value)], [])
        return [Keys(self._path, self._text, each, (*self._place, key, i)) for i, each in enumerate(found)]

    def done(self) -> None:
        """Check that all keys were taken.

        Raises:
            InputError: for a key that nobody knows.
        """
        for key in self._left:
            raise self.error(f"unknown key '{key}'; known are {', '.join(self._known)}", key)


# What reads a value raises a ValueError, which says what the value should be.


def text(value: object) -> str:
    """A text."""
    if not isinstance(value, str):
        raise ValueError("must be a text")
    return value


def texts(value: object) -> tuple[str, ...]:
    """At least one text, each once."""
    found = tuple(text(each) for each in _list(value))
    if not found or len(set(found)) < len(found):
        raise ValueError("must be a list of texts, each once")
    return found


def positive(value: object) -> float:
    """A positive, finite number."""
    found = number(value)
    if found <= 0:
        raise ValueError("must be a positive number")
    return found


def number(value: object) -> float:
    """A finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
        raise ValueError("must be a finite number")
    return float(value)


def count(value: object) -> int:
    """A positive whole number of at most a million."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= 1_000_000:
        raise ValueError("must be a positive whole number")
    return value


def one_of(names: Sequence[str]) -> Callable[[object], str]:
    """The reader of one of some names."""

    def read(value: object) -> str:
        if value not in names:
            raise ValueError(f"'{value}' is none of {', '.join(names)}")
        return str(value)

    return read


def _dict(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("must be a table")
    return value


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError("must be a list")
    return value


def _lines(source: str) -> dict[Path_, int]:
    """The line at which each table and key begins.

    Text that looks like a key within a text of several lines is taken for one: the result is for messages alone.
    """
    found: dict[Path_, int] = {}
    counts: dict[Path_, int] = {}
    prefix: Path_ = ()
    for line, content in enumerate(source.splitlines(), 1):
        if header := _HEADER.match(content):
            prefix = ()
            names = _parts(header[2])
            for depth, name in enumerate(names, 1):
                prefix = (*prefix, name)
                if depth == len(names) and header[1] == "[[":
                    counts[prefix] = counts.get(prefix, -1) + 1
                found.setdefault(prefix, line)
                if prefix in counts:
                    prefix = (*prefix, counts[prefix])
            found.setdefault(prefix, line)
        elif key := _KEY.match(content):
            place = prefix
            for name in _parts(key[1]):
                place = (*place, name)
                found.setdefault(place, line)
    return found


def _parts(dotted: str) -> list[str]:
    return [part.strip().strip("\"'") for part in dotted.split(".")]
