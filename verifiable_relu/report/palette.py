"""Colours, markers and hatches that readers tell apart whatever colours they see, and in print without colours.

The colours are those of Okabe and Ito, "Color Universal Design" (2008).
"""

from __future__ import annotations

from collections.abc import Mapping

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
"""The colours of series, in their order."""

MARKERS = "osD^vPX*"
"""The markers of series, by matplotlib's names, in their order."""

HATCHES = ("", "///", "...", "xxx", "\\\\\\", "++", "oo", "--")
"""The hatches of bars, by matplotlib's names, in their order."""

LINES = ("-", "--", "-.", ":")
"""The styles of lines, by matplotlib's names, in their order."""

ANSWERS: Mapping[str, tuple[str, str]] = {
    "unsat": ("#0072B2", "verified"),
    "sat": ("#D55E00", "violated"),
    "unknown": ("#7A7A7A", "undecided"),
    "timed-out": ("#E69F00", "out of time"),
}
"""For each answer of ``Result.answer`` its colour and its name for readers."""
