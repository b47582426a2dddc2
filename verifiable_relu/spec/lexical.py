"""The lexical rules that both versions of VNN-LIB share: line ends, comments and tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator
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
_SHOWN = 100
"""The most characters of a constraint that a message quotes."""


@dataclass(frozen=True)
class Source:
    """The text of a property file without its comments.

    Attributes:
        text: the text in ASCII; every line end is a line feed, tokens have the lines and columns that they have in the
            file, and white space at the end is cut off.
        network: the file that a comment ``; network: file.onnx`` names; None without such a comment.
    """

    text: str
    network: str | None

    def tokens(self, most: int = limits.TOKENS) -> Iterator[tuple[str | tuple[str, str, str], int, int]]:
        """The tokens of the text: parentheses, words, strings and quoted symbols.

        Yields:
            A token and the positions of its beginning and end in ``text``. Three words in parentheses are yielded as
            one tuple of the words.

        Raises:
            InputError: for more than ``most`` tokens, or more than ``limits.DEPTH`` parentheses open at once.
        """
        count = depth = 0
        found: str | tuple[str, str, str]
        for match in _TOKEN.finditer(self.text):
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

    def first_words(self, count: int) -> list[str]:
        """The first ``count`` tokens, or all if there are fewer."""
        words: list[str] = []
        for token, _, _ in islice(self.tokens(), count):
            words += [token] if isinstance(token, str) else ["(", *token, ")"]
        return words[:count]

    def line(self, position: int) -> int:
        """The number, from 1, of the line that a position lies in."""
        return self.text.count("\n", 0, position) + 1

    def place(self, position: int) -> str:
        """Line and column of a position, for messages."""
        return f"line {self.line(position)}, column {position - self.text.rfind(chr(10), 0, position)}"

    def quote(self, start: int, end: int) -> str:
        """The text between two positions as one line of at most ``_SHOWN`` characters."""
        return _short(" ".join(self.text[start : min(end, start + 10 * _SHOWN)].split()))

    def quoted_line(self, number: int) -> str:
        """The line with a number, cut to ``_SHOWN`` characters; empty if the text has no such line."""
        lines = self.text.split("\n", number)
        return _short(lines[number - 1].strip()) if 0 < number <= len(lines) else ""


def source(text: str) -> Source:
    """The text of a property file without its comments.

    A comment runs from a semicolon to the end of the line, which is a line feed or a carriage return, as SMT-LIB 2.6
    (section 3.1) has it. A semicolon within a string or a quoted symbol begins no comment.

    Raises:
        InputError: for a text that does not begin with a parenthesis; a control character (``files.require_plain``); a
            string or quoted symbol without end; a character outside of ASCII, other than in comments, strings and
            quoted symbols; more than ``limits.OPAQUE`` comments, strings and quoted symbols; or comments that name
            different networks.
    """
    require_plain(text)
    if sum(map(text.count, ';"|')) > limits.OPAQUE:
        raise InputError(f"more than {limits.OPAQUE:,} comments, strings and quoted symbols")
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    networks: list[str] = []

    def without(match: re.Match[str]) -> str:
        found = match.group()
        if found[0] == ";":
            if named := _NETWORK.fullmatch(found):
                networks.append(named[1])
            return ""
        if len(found) == 1:
            what = "a string" if found == '"' else "a quoted symbol"
            raise InputError(f"{what} is never closed", place=Source(text, None).place(match.start()))
        return found if found.isascii() else found.encode("ascii", "replace").decode()

    made = Source(_OPAQUE.sub(without, text).rstrip(" \t\n"), next(iter(networks), None))
    if made.text.lstrip()[:1] not in ("", "(", ")"):
        # A list from elsewhere may name any file of this machine, of which messages are to show nothing.
        raise InputError("no property: its first word is outside of parentheses")
    if not made.text.isascii():
        position, character = next((i, c) for i, c in enumerate(made.text) if not c.isascii())
        raise InputError(f"the character '{character}' is not ASCII", place=made.place(position))
    if len(set(networks)) > 1:
        raise InputError(
            f"comments name two networks, {networks[0]} and {next(n for n in networks if n != networks[0])}"
        )
    return made


def _short(line: str) -> str:
    return line if len(line) <= _SHOWN else line[: _SHOWN - 2] + " …"
