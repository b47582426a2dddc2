"""The limits on the size of a property; the readers refuse a larger one before it costs much time or memory."""

BYTES = 256 << 20
"""The most bytes of a property file, unpacked."""

BYTES_2 = 24 << 20
"""The most characters of a 2.0 file without its comments."""

ROW = 1 << 18
"""The most bytes of a line of an ``instances.csv``, which may have any number of lines."""

TOKENS = 4_000_000
"""The most names, numbers and parentheses in a VNN-LIB 1.0 file: enough for two bounds of each of 224×224×3 inputs.

Bounds of inputs that follow each other in a conjunction do not count (``formula.Block``).
"""

RUN = 8, 2_000
"""How many bounds of inputs that follow each other are read at once, at least and at the most."""

BOUNDS = 50_000_000
"""The most inputs of all boxes of a file together."""

TOKENS_2 = 2_500_000
"""The most names, numbers and parentheses in a 2.0 file, which the standard's parser turns into a tree of objects."""

ELEMENTS_2 = 400_000
"""The most mentions of elements, such as ``X[0,1]``, in a 2.0 file; also the most elements of its input or output."""

WORDS = 1_000_000
"""The most words, terms and conditions directly within one pair of parentheses."""

OPAQUE = 1_000_000
"""The most semicolons, quotation marks and vertical bars, which begin comments, strings and quoted symbols."""

DEPTH = 1_000
"""The most parentheses that are open at once."""

DIGITS = 1_000
"""The most characters of a number, sign and exponent included; the exponent may have three digits."""

BITS = 3_500
"""The most bits of the numerator, and of the denominator, of a coefficient or bound that a file's arithmetic gives."""

ARITHMETIC = 2_000_000
"""The most steps of a file's arithmetic with constants: one per coefficient, and one more per 64 bits of it."""

PRODUCTS = 1_000
"""The most different products of variables in a 2.0 file."""

DEGREE = 16
"""The most variables in one product of a 2.0 file, counted as often as they occur."""

PAIRS = 10_000
"""The most pairs of terms in one ``distinct``; 141 terms make fewer."""

POLYTOPES = 100_000
"""The most conjunctions in the disjunctive form of a property."""

DISJUNCTIVE = 2_000_000
"""The most bounds and rows in all conjunctions of the disjunctive form together."""
