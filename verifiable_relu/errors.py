"""How a request ends without an answer: refused, in one line that names the file and the place; out of time; broken."""

from __future__ import annotations

from pathlib import Path

LONGEST = 500
"""No error line has more characters."""

_LONGEST_PATH = 250
_LONGEST_PLACE = 100


class InputError(ValueError):
    """Bad input from the user: ``path: place: what is wrong``.

    The line has at most ``LONGEST`` characters. Names and quotations come from files that may be hostile, so that
    control characters, among them the escape sequences of terminals, are shown as ``\\x1b`` and the like.

    Args:
        message: what is wrong, in one line.
        path: the file at fault, if there is one.
        place: where in it: a line (``line 12``), a node (``node 'conv1' (Conv)``), a field.
    """

    def __init__(self, message: str, *, path: Path | str | None = None, place: str | None = None) -> None:
        self.message = printable(message, LONGEST)
        self.path = None if path is None else Path(path)
        self.place = None if place is None else printable(place, _LONGEST_PLACE)
        where = "" if path is None else f"{path_end(path, _LONGEST_PATH)}: "
        where += "" if place is None else f"{self.place}: "
        super().__init__(where + printable(self.message, LONGEST - len(where)))

    def located(self, path: Path | str) -> InputError:
        """The same error with the file named, for readers that are handed text rather than a path."""
        return self if self.path is not None else type(self)(self.message, path=path, place=self.place)


class UnsupportedError(InputError):
    """Well-formed input that asks for something this tool does not do (an operator, a non-linear constraint)."""


class OutOfTime(Exception):
    """The budget of some work was spent, and it did not stop by itself when it was told to."""


class CallFailed(Exception):
    """A call of a foreign library failed: the library raised an exception, or the process that it ran in ended."""


def printable(text: str, longest: int | None = None) -> str:
    """The text as one line that does nothing to a terminal: blanks run together, other unprintable characters escaped.

    Args:
        text: anything, of any length.
        longest: what is longer than so many characters is cut and ends in "…".
    """
    if longest is not None:
        # Escaping makes text longer, never shorter; running blanks together may need a little more of it.
        text = text[: 4 * longest]
    line = " ".join(text.split())
    if not line.isprintable():
        line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    return line if longest is None or len(line) <= longest else line[: longest - 2] + " …"


def path_end(path: Path | str, longest: int = 150) -> str:
    """A path in printable characters; of one that is longer than so many characters, the end."""
    text = printable(str(path))
    return text if len(text) <= longest else "… " + text[2 - longest :]
