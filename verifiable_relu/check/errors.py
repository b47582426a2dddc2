"""Ends of a check without acceptance."""

from __future__ import annotations


class _Ended(Exception):
    @classmethod
    def when(cls, fault: object, message: str) -> None:
        """Raise it if there is a fault."""
        if fault:
            raise cls(message)


class Refused(_Ended):
    """A certificate proves less than it claims; the message names the record and the reason."""


class BadInput(_Ended):
    """A file that cannot be read, or holds what the checker does not know."""
