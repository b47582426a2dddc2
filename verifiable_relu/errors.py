"""The exceptions with which a request ends without an answer: bad input, a spent budget, a failed foreign library."""

from __future__ import annotations

from pathlib import Path

LONGEST = 500  # The most characters of an error line
_LONGEST_PATH = 250
_LONGEST_PLACE = 100


class InputError(ValueError):
    """Bad input from the user: ``path: place: what is wrong``, in one line of at most ``LONGEST`` characters.

    Its names and quotations come from files that may be hostile: unprintable characters are shown escaped
    (``printable``). ``place`` is a place in the file: a line (``line 12``), a node (``node 'conv1' (Conv)``), a field.
    """

    def __init__(self, message: str, *, path: Path | str | None = None, place: str | None = None) -> None:
        self.message = printable(message, LONGEST)
        self.path = None if path is None else Path(path)
        self.place = None if place is None else printable(place, _LONGEST_PLACE)
        where = "" if path is None else f"{path_end(path, _LONGEST_PATH)}: "
        where += "" if place is None else f"{self.place}: "
        super().__init__(where + printable(self.message, LONGEST - len(where)))

    def located(self, path: Path | str) -> InputError:
        """Return this error with ``path`` as the file at fault, unless the error names a file already."""
        return self if self.path is not None else type(self)(self.message, path=path, place=self.place)


def missing(what: str, install: str, *, place: str | None = None) -> InputError:
    """Return the error of a part of the package that needs what ``pip install`` of ``install`` brings."""
    return InputError(f"{what} needs a package that is not installed: pip install {install}", place=place)


class UnsupportedError(InputError):
    """Well-formed input that needs what this package does not support: an operator, a non-linear constraint."""


class OutOfTime(Exception):
    """Work on a subject, which may be unknown, whose time budget was spent did not stop when it was told to."""

    def __init__(self, subject: object = None) -> None:
        super().__init__(subject)
        self.subject = subject


class CallFailed(Exception):
    """A call of a foreign library failed: the library raised an exception, or the process that it ran in ended."""


def printable(text: str, longest: int | None = None) -> str:
    """Return a text as one line of printable characters, which cannot change the state of a terminal.

    Every run of white space becomes one blank; every other unprintable character is escaped (``\\x1b``). A line of more
    than ``longest`` characters is cut and ends in "…".
    """
    if longest is not None:
        # The cut spares the work on a very long text. White space alone makes the line shorter than the text.
        text = text[: 4 * longest]
    line = " ".join(text.split())
    if not line.isprintable():
        line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    return line if longest is None or len(line) <= longest else line[: longest - 2] + " …"


def counted(number: float, noun: str) -> str:
    """Return a number and a noun: "1 box", "2 boxes"."""
    plural = "" if number == 1 else "es" if noun.endswith(("x", "ss")) else "s"
    return f"{number:.0f} {noun}{plural}"


def path_end(path: Path | str, longest: int = 150) -> str:
    """Return a path in printable characters; "…" and its end where it has more than ``longest`` of them."""
    text = printable(str(path))
    return text if len(text) <= longest else "… " + text[2 - longest :]
