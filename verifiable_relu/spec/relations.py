"""Properties that relate inputs to each other or to outputs, or multiply variables.

Such a property is one of a network that passes its inputs on among its outputs, with products after them: what is said
of these is said of outputs, which every method takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from itertools import chain

from verifiable_relu.errors import UnsupportedError
from verifiable_relu.spec import limits
from verifiable_relu.spec.formula import ONE, Arithmetic, Bound, Formula, LinearTerm, conjunction
from verifiable_relu.spec.specfile import Form

_SHORT = 1 << 24
"""Integers below this are exact in float32."""

_PASSES = 10
"""The most passes over the constraints in which bounds of inputs are implied by those of others."""


class Relations(Arithmetic):
    """Arithmetic in which inputs that are related, and products, stand for outputs of the network asked about.

    Args:
        start: the first output that passes an input on.
        size: how many inputs there are.

    Attributes:
        used: whether something stands for such an output.
        products: the factors of each product, the first of which is the output ``start + size``.
    """

    def __init__(self, start: int, size: int) -> None:
        super().__init__()
        self.start, self.size = start, size
        self.used = False
        self.products: dict[tuple[Form, Form], int] = {}
        self.degrees: dict[int, int] = {}

    def compare(self, operator: str, left: LinearTerm, right: LinearTerm, mark: int) -> Formula:
        inputs = len(left.inputs) + len(right.inputs)
        # Many thousands of bounds of single inputs pass here.
        if (inputs > 1 or (inputs and (left.outputs or right.outputs))) and operator not in ("=", "!="):
            term = left if right.is_constant and not right.constant else self.apply("-", [left, right])
            if len(term.inputs) > 1 or (term.inputs and term.outputs):
                self.used = True
                left, right = LinearTerm(outputs=self._numbered(term), constant=term.constant), LinearTerm()
        return super().compare(operator, left, right, mark)

    def product(self, a: LinearTerm, b: LinearTerm) -> LinearTerm:
        if a.is_constant or b.is_constant:
            return super().product(a, b)
        self.used = True
        (first, one), (second, other) = self._form(a), self._form(b)
        if max(map(_longest, (one, other))) >= _SHORT:
            # Forms become weights, which are to be exact in every precision.
            parts = [(c * d, x, y) for x, c in self._parts(a) for y, d in self._parts(b)]
            self.spend(len(parts))
            return self.apply("+", [self.product(x, y).scaled(c) for c, x, y in parts])
        factors = min(one, other), max(one, other)
        index = self.products.setdefault(factors, self.start + self.size + len(self.products))
        self.degrees[index] = sum(max(self.degrees.get(i, 1) for i, _ in form.coefficients) for form in factors)
        if self.degrees[index] > limits.DEGREE:
            raise UnsupportedError(f"a product of more than {limits.DEGREE} variables is not supported")
        if len(self.products) > limits.PRODUCTS:
            raise UnsupportedError(f"more than {limits.PRODUCTS:,} products of variables are not supported")
        return LinearTerm(outputs={index: first * second})

    def _numbered(self, term: LinearTerm) -> dict[int, Fraction]:
        """The coefficients of a term by outputs."""
        return {**term.outputs, **{self.start + i: c for i, c in term.inputs.items()}}

    def _parts(self, term: LinearTerm) -> Iterator[tuple[LinearTerm, Fraction]]:
        """Terms with coefficients of 1 whose weighted sum a term is, and the weights."""
        yield from ((LinearTerm({i: ONE}), c) for i, c in term.inputs.items())
        yield from ((LinearTerm(outputs={j: ONE}), c) for j, c in term.outputs.items())
        yield from [(LinearTerm(constant=ONE), term.constant)] * bool(term.constant)

    def _form(self, term: LinearTerm) -> tuple[Fraction, Form]:
        """A term as a number times the form of coprime integers whose first coefficient is positive."""
        coefficients = sorted(self._numbered(term).items())
        values = [c for _, c in coefficients] + [term.constant] * bool(term.constant)
        unit = Fraction(math.gcd(*(v.numerator for v in values)), math.lcm(*(v.denominator for v in values)))
        unit = unit if coefficients[0][1] > 0 else -unit
        return unit, Form(tuple((i, int(c / unit)) for i, c in coefficients), int(term.constant / unit))


def _longest(form: Form) -> int:
    return max(abs(form.constant), *(abs(c) for _, c in form.coefficients))


def implied(formula: Formula, start: int, size: int) -> list[Bound]:
    """The bounds of inputs that follow from the bounds of others, by rows over passed inputs that always hold.

    Args:
        formula: the whole formula.
        start: the first output that passes an input on.
        size: how many inputs there are.
    """
    ends: dict[tuple[int, bool], Fraction] = {}
    bounds, blocks, given, _ = conjunction(formula, True)
    for bound in chain(bounds, *(block.bounds() for block in blocks)):
        key, better = (bound.variable, bound.upper), min if bound.upper else max
        ends[key] = better(ends.get(key, bound.value), bound.value)
    rows = [row for row in given if all(start <= i < start + size for i, _ in row.coefficients)]
    found: dict[tuple[int, bool], Fraction] = {}
    for _ in range(_PASSES):
        changed = False
        for row in rows:
            for i, c in row.coefficients:
                # c·x_i ≤ bound − Σ of the others, each at its least.
                least = [(d, ends.get((j - start, d < 0))) for j, d in row.coefficients if j != i]
                if any(end is None for _, end in least):
                    continue
                value = (row.bound - sum((d * end for d, end in least if end is not None), Fraction(0))) / c
                key = (i - start, c > 0)
                if key not in ends:
                    ends[key] = found[key] = value
                    changed = True
        if not changed:
            break
    return [Bound(variable, upper, value, False, 0) for (variable, upper), value in found.items()]
