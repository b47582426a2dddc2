"""What the commands have in common in reading their arguments."""

from __future__ import annotations

import argparse
import re
from fractions import Fraction
from typing import NoReturn

from verifiable_relu.errors import LONGEST, printable

_NUMBER = re.compile(r"\s*[+-]?(?:[0-9]+(?:/[0-9]+|\.[0-9]*)?|\.[0-9]+)(?:e[+-]?[0-9]{1,3})?\s*", re.IGNORECASE)
_LONGEST_NUMBER = 1_000


class Parser(argparse.ArgumentParser):
    """Complains in one line, of a length that is bounded, and exits with status 2."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and leave."""
        self.exit(2, f"error: {printable(message, LONGEST)} (--help says more)\n")


def fraction(text: str) -> Fraction:
    """The exact value of a number such as ``0.01`` or ``1e-3``, or of a fraction such as ``2/255``.

    Raises:
        ValueError: for anything else, a division by zero, more than 1,000 characters, or an exponent of more than
            three digits (which would take any amount of time).
    """
    if len(text) > _LONGEST_NUMBER or not _NUMBER.fullmatch(text):
        raise ValueError(f"'{printable(text, 40)}' is neither a number nor a fraction like 2/255")
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"'{printable(text, 40)}' is neither a number nor a fraction like 2/255") from None
