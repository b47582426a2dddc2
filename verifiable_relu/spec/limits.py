"""How large a property may be. What is larger is refused in one line, before it costs much time or memory."""

BYTES = 24 << 20
"""Of a property file or an ``instances.csv``, once it is unpacked."""

TOKENS = 4_000_000
"""Names, numbers and parentheses in a 1.0 file: enough for 150,528 inputs (224×224×3), each with two bounds."""

TOKENS_2 = 2_500_000
"""The same in a 2.0 file, of which the standard's parser makes a tree of objects."""

ELEMENTS_2 = 400_000
"""Mentions of elements, such as ``X[0,1]``, in a 2.0 file; elements of its input and of its output."""

WORDS = 1_000_000
"""Words, terms and conditions within one pair of parentheses."""

OPAQUE = 1_000_000
"""Semicolons, quotation marks and vertical bars: what begins comments, strings and quoted symbols."""

DEPTH = 1_000
"""Parentheses within parentheses."""

DIGITS = 1_000
"""Characters of a number, sign and exponent included; an exponent has at most three digits."""

BITS = 3_500
"""Of the numerator and of the denominator of a coefficient or bound that a file's arithmetic leads to."""

ARITHMETIC = 2_000_000
"""Steps of arithmetic with constants: one for each coefficient, and one more for each 64 bits of it."""

PAIRS = 10_000
"""Pairs of terms in one ``distinct``: all pairs of 141 terms."""

POLYTOPES = 100_000
"""Conjunctions in the disjunctive form of a property."""

DISJUNCTIVE = 2_000_000
"""Bounds and rows in all conjunctions together."""
