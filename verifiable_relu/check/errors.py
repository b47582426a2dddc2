"""How a check ends without acceptance."""

from __future__ import annotations


class Refused(Exception):
    """A certificate proves less than it claims; the message names the record and the reason."""


class BadInput(Exception):
    """A network or a property that cannot be read, or holds what the checker does not know."""
