"""The text of a property file: its comments removed, its tokens, and the places of these for messages."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from verifiable_relu.errors import InputError
from verifiable_relu.files import require_plain
from verifiable_relu.spec import limits

# Strings and quoted symbols may hold semicolons. The quantifiers are possessive, which rules out backtracking.
_OPAQUE = re.compile(r';[^\n]*+|"(?:[^"]++|"")*+"|\|[^|]*+\||["|]')
_WORD = r'[^ \t\n()"|]++'
# Most of every file is parentheses around three words, such as (<= X_0 1.0). One match takes such a group, for speed.
_TOKEN = re.compile(
    rf"""[ \t\n]*+(?:\([ \t\n]*+({_WORD})[ \t\n]++({_WORD})[ \t\n]++({_WORD})[ \t\n]*+\)"""
    rf"""|([()]|{_WORD}|"(?:[^"]++|"")*+"|\|[^|]*+\|))"""
)
_NETWORK = re.compile(r";+[ \t]*network:[ \t]*(\S.*?\.onnx(?:\.gz)?)[ \t]*", re.IGNORECASE)

Words = tuple[str, str, str]
"""Three words in parentheses."""


@dataclass(frozen=True)
class PropertyText:
    """The text of a property file without its comments.

    Attributes:
        text: the text in ASCII with line feeds, in which tokens have the lines and columns that they have in the file.
        network: the file that a comment ``; network: file.onnx`` names; None without such a comment.
    """

    text: str
    network: str | None

    @classmethod
    def without_comments(cls, text: str) -> PropertyText:
        """Remove the comments of a file, from a semicolon to the line's end, LF or CR (SMT-LIB 2.6, section 3.1).

        A semicolon within a string or a quoted symbol begins no comment.

        Raises:
            InputError: for other text than printable ASCII, but in comments, strings and quoted symbols.
        """
        require_plain(text)
        if sum(map(text.count, ';"|')) > limits.OPAQUE:
            raise InputError(f"more than {limits.OPAQUE:,} comments, strings and quoted symbols")
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        networks: dict[str, None] = {}

        def without(match: re.Match[str]) -> str:
            found = match.group()
            if found[0] == ";":
                if named := _NETWORK.fullmatch(found):
                    networks[named[1]] = None
                return ""
            if len(found) == 1:
                what = "a string" if found == '"' else "a quoted symbol"
                raise InputError(f"{what} is never closed", place=cls(text, None).place(match.start()))
            return found if found.isascii() else found.encode("ascii", "replace").decode()

        found = cls(_OPAQUE.sub(without, text).rstrip(" \t\n"), next(iter(networks), None))
        if found.text.lstrip()[:1] not in ("", "(", ")"):
            # A list from elsewhere may name any file of this machine; messages are not to show its content.
            raise InputError("no property: its first word is outside of parentheses")
        if not found.text.isascii():
            position, character = next((i, c) for i, c in enumerate(found.text) if not c.isascii())
            raise InputError(f"the character '{character}' is not ASCII", place=found.place(position))
        if len(networks) > 1:
            raise InputError(f"comments name two networks, {' and '.join(islice(networks, 2))}")
        return found

    def tokens(
        self, most: int, bounds: Callable[[int], int] = lambda start: start
    ) -> Iterator[tuple[str | Words, int, int]]:
        """Yield parentheses, words, strings and quoted symbols with the positions of beginning and end in ``text``.

        Three words in parentheses are one token. From the position behind an ``and``, ``bounds`` returns one up to
        which the text is passed over.

        Raises:
            InputError: for more than ``most`` tokens, or more than ``limits.DEPTH`` parentheses open at once.
        """
        count = depth = end = 0
        found: str | Words = ""
        while match := _TOKEN.match(self.text, bounds(end) if found == "and" else end):
            first, second, third, token = match.groups()
            end = match.end()
            if token is None:
                count += 5
                start, deepest = self.text.rindex("(", 0, match.start(1)), depth + 1
                found = first, second, third
            else:
                count += 1
                depth += 1 if token == "(" else -1 if token == ")" else 0
                start, deepest = end - len(token), depth
                found = token
            if deepest > limits.DEPTH or count > most:
                what = f"{most:,} words and parentheses" if count > most else f"{limits.DEPTH:,} open parentheses"
                raise InputError(f"more than {what}", place=self.place(start))
            yield found, start, end

    def place(self, position: int) -> str:
        """Return line and column of a position, for messages."""
        line = self.text.count("\n", 0, position) + 1
        return f"line {line}, column {position - self.text.rfind(chr(10), 0, position)}"

    def quoted_line(self, number: int) -> str:
        """Return the line with a number, cut to 100 characters; empty if the text has no such line."""
        lines = self.text.split("\n", number)
        return shortened(lines[number - 1].strip(), 100) if 0 < number <= len(lines) else ""


def shortened(text: str, most: int = 40) -> str:
    """Return the beginning of a text, of at most this number of characters."""
    return text if len(text) <= most else text[: most - 2] + " …"
