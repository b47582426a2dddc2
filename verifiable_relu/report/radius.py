"""The radius ε of a robustness property, from its file or its name, and its printed form."""

from __future__ import annotations

import contextlib
import re
from fractions import Fraction
from pathlib import Path

from verifiable_relu.arguments import fraction
from verifiable_relu.errors import InputError
from verifiable_relu.files import on_disk, read_text

_COMMENT = re.compile(r"^;.*\beps(?:ilon)?\s*[=:]?\s*([0-9./e-]+)", re.IGNORECASE | re.MULTILINE)
_NAME = re.compile(r"eps_?([0-9]+)_([0-9]+)(?![0-9])|(?:eps_?|_)(0\.[0-9]+)(?![0-9])")
_LARGEST = 1 << 26
_HEAD = 2_000
"""The characters of a property file among which the comment is looked for."""

_LARGEST_BELOW = 1_000
"""The largest denominator of a radius that is printed as a fraction."""


def radius(vnnlib: str) -> Fraction | None:
    """The radius of a property; None if it is not stated.

    The radius is what a comment at the beginning of the file says (``; … eps 1/255``), as the command ``spec`` writes
    it, or else what the file's name says, ``…_eps1_255`` or ``…_0.03``.

    Args:
        vnnlib: the property file, which need not be there any more.
    """
    texts = []
    with contextlib.suppress(InputError):
        texts = _COMMENT.findall(read_text(on_disk(Path(vnnlib)), _LARGEST)[:_HEAD])
    name = _NAME.search(Path(vnnlib).name.removesuffix(".gz").removesuffix(".vnnlib"))
    if name is not None:
        texts.append(name[3] or f"{name[1]}/{name[2]}")
    for text in texts:
        try:
            return fraction(text)
        except ValueError:
            continue
    return None


def spelled(eps: Fraction | float) -> str:
    """A radius as people write it: a decimal number of at most six digits, or ``1/255`` where none is equal to it.

    What is neither, a decimal number of more digits, is rounded to six.
    """
    decimal, nearest = f"{float(eps):g}", Fraction(eps).limit_denominator(_LARGEST_BELOW)
    return str(nearest) if float(nearest) == float(eps) and Fraction(decimal) != nearest else decimal
