"""How a request ends without an answer: refused, in one line that names the file and the place, or out of time."""

from __future__ import annotations

from pathlib import Path


class InputError(ValueError):
    """Bad input from the user: ``path: place: what is wrong``.

    Args:
        message: what is wrong, in one line.
        path: the file at fault, if there is one.
        place: where in it: a line (``line 12``), a node (``node 'conv1' (Conv)``), a field.
    """

    def __init__(self, message: str, *, path: Path | str | None = None, place: str | None = None) -> None:
        self.message = " ".join(message.split())
        self.path = None if path is None else Path(path)
        self.place = place
        super().__init__(": ".join(str(part) for part in (path, place, self.message) if part is not None))

    def located(self, path: Path | str) -> InputError:
        """The same error with the file named, for readers that are handed text rather than a path."""
        return self if self.path is not None else type(self)(self.message, path=path, place=self.place)


class UnsupportedError(InputError):
    """Well-formed input that asks for something this tool does not do (an operator, a non-linear constraint)."""


class OutOfTime(Exception):
    """The budget of some work was spent, and it did not stop by itself when it was told to."""
