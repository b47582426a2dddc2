"""The limits on the size of a property; the readers refuse a larger one before it costs much time or memory."""

BYTES = 256 << 20  # bytes of a property file or an instances.csv, unpacked
BYTES_2 = 24 << 20  # characters of a 2.0 file without its comments

# Names, numbers and parentheses in a 1.0 file: enough for two bounds of each of 224×224×3 inputs. Bounds of inputs that
# follow each other in a conjunction do not count.
TOKENS = 4_000_000
RUN = 8, 2_000  # bounds of inputs that follow each other and are read at once, at least and at the most
BOUNDS = 50_000_000  # inputs of all boxes of a file together
TOKENS_2 = 2_500_000  # as TOKENS, of a 2.0 file, which the standard's parser turns into a tree of objects
ELEMENTS_2 = 400_000  # mentions of elements, such as X[0,1], in a 2.0 file; also elements of its input or output
WORDS = 1_000_000  # words, terms and conditions directly within one pair of parentheses
OPAQUE = 1_000_000  # semicolons, quotation marks and vertical bars: beginnings of comments, strings, quoted symbols
DEPTH = 1_000  # parentheses that are open at once

DIGITS = 1_000  # characters of a number, sign and exponent included; the exponent may have three digits
BITS = 3_500  # bits of numerator, and of denominator, of a coefficient or bound that a file's arithmetic gives
ARITHMETIC = 2_000_000  # steps of arithmetic with constants: one per coefficient, and one more per 64 bits of it
PRODUCTS = 1_000  # different products of variables in a file
DEGREE = 16  # variables in one product, counted as often as they occur
PAIRS = 10_000  # pairs of terms in one distinct; 141 terms make fewer
POLYTOPES = 100_000  # conjunctions in the disjunctive form of a property
DISJUNCTIVE = 2_000_000  # bounds and rows in all conjunctions of the disjunctive form together
