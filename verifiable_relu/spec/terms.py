"""Exact linear terms of a property file, and the formulas that comparisons of them stand for.

A property that relates inputs to each other or to outputs, or multiplies variables, is one of a network that passes its
inputs on among its outputs, with products after them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from itertools import combinations

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.spec import limits
from verifiable_relu.spec.formula import FALSE, TRUE, And, Formula, InputBound, Or, flat, negate
from verifiable_relu.spec.property import Row
from verifiable_relu.spec.specfile import ProductFactor

ZERO, ONE = Fraction(0), Fraction(1)
_MIRRORED = {"<=": ">=", ">=": "<=", "<": ">", ">": "<"}
_LARGEST_EXPONENT = 1022
_COMFORTABLE_EXPONENT = 500
_EXACT_IN_FLOAT32 = 1 << 24
_LONG = f"a number has more than {limits.BITS:,} bits"
_PASSES = 10  # over the constraints in which bounds of inputs are implied by those of others, at most


@dataclass(frozen=True, slots=True)
class LinearTerm:
    """The term Σ coefficient·variable + constant; the variable j ≥ 0 is the output j, ~i = −1 − i is the input i."""

    coefficients: Mapping[int, Fraction] = field(default_factory=dict)
    constant: Fraction = ZERO

    def scaled(self, factor: Fraction) -> LinearTerm:
        if not factor:
            return LinearTerm()
        return LinearTerm({v: c * factor for v, c in self.coefficients.items()}, self.constant * factor)


def number(lexeme: str) -> Fraction:
    """Return the exact value of a decimal with or without an exponent, of at most ``limits.DIGITS`` characters."""
    if len(lexeme) > limits.DIGITS:
        raise InputError(f"a number has {len(lexeme):,} characters, more than {limits.DIGITS:,}")
    return Fraction(Decimal(lexeme))


class TermArithmetic:
    """Sums, products and comparisons of one file's terms, whose cost is counted and limited.

    Every operation raises an InputError if a number exceeds ``limits.BITS`` or the file ``limits.ARITHMETIC`` steps.
    The output ``outputs + i`` passes the input i on; ``products``, by their factors, are the outputs behind these.
    ``related`` is True once a formula speaks of either.
    """

    def __init__(self, outputs: int = 0, inputs: int = 0) -> None:
        self.outputs, self.inputs, self.related = outputs, inputs, False
        self.products: dict[tuple[ProductFactor, ProductFactor], int] = {}
        self._degrees: dict[int, int] = {}
        self._steps = 0

    def apply(self, operator: str, terms: Sequence[LinearTerm]) -> LinearTerm:
        """Return the result of one of ``+ - * /`` on terms, from left to right; ``-`` of one term negates it."""
        self._spend(*terms)
        result, *rest = terms
        if operator == "-":
            return _sum([result, *(term.scaled(-ONE) for term in rest)]) if rest else result.scaled(-ONE)
        if operator == "+":
            return _sum(terms)
        if operator == "/" and not rest:
            raise InputError("'/' needs two arguments")
        for term in rest:
            if operator == "*":
                result = self._product(result, term)
            elif term.coefficients:
                raise UnsupportedError("a division by a variable is not linear")
            elif not term.constant:
                raise InputError("division by zero")
            else:
                result = result.scaled(1 / term.constant)
            self._spend(result)
        return result

    def compare(self, operator: str, left: LinearTerm, right: LinearTerm, mark: object) -> Formula:
        """Return the formula ``left operator right``, one of ``<= < >= > = !=``; an ``InputBound`` keeps ``mark``."""
        if operator in ("=", "!="):
            pair = ("<=", ">=") if operator == "=" else ("<", ">")
            parts = tuple(self.compare(each, left, right, mark) for each in pair)
            return And(parts) if operator == "=" else Or(parts)
        if right.coefficients:
            if not left.coefficients:
                return self.compare(_MIRRORED[operator], right, left, mark)
            left, right = self.apply("-", [left, right]), LinearTerm()
        upper, strict = operator[0] == "<", len(operator) == 1
        bound = right.constant - left.constant if left.constant else right.constant
        if not left.coefficients:
            return TRUE if ((bound > 0) is upper if bound else not strict) else FALSE
        variable = min(left.coefficients)
        if len(left.coefficients) > 1 or variable >= 0:
            self.related |= variable < 0
            return self._row(self._by_outputs(left), bound, upper, strict)
        coefficient = left.coefficients[variable]
        if coefficient != 1:
            self._spend(left, right)
            upper = upper == (coefficient > 0)
            bound /= coefficient
        _check(bound)
        return InputBound(~variable, upper, bound, strict, mark)

    def distinct(self, terms: Sequence[LinearTerm], mark: object) -> Formula:
        """Return the formula that no two of the terms are equal; refuses more pairs than ``limits.PAIRS``."""
        if len(terms) * (len(terms) - 1) // 2 > limits.PAIRS:
            raise UnsupportedError(f"'distinct' of {len(terms):,} terms makes more than {limits.PAIRS:,} pairs")
        return And(tuple(self.compare("!=", left, right, mark) for left, right in combinations(terms, 2)))

    def implied_bounds(self, formula: Formula) -> list[InputBound]:
        """Return bounds of inputs that follow from the bounds of others, by related inputs in the whole formula."""
        ends: dict[tuple[int, bool], Fraction] = {}
        rows: list[Row] = []
        for part, positive in flat(formula):
            leaf = part if positive else negate(part)
            if isinstance(leaf, InputBound):
                key, better = (leaf.variable, leaf.upper), min if leaf.upper else max
                ends[key] = better(ends.get(key, leaf.value), leaf.value)
            elif isinstance(leaf, Row) and all(0 <= i - self.outputs < self.inputs for i, _ in leaf.coefficients):
                rows.append(leaf)
        found: dict[tuple[int, bool], Fraction] = {}
        for _ in range(_PASSES):
            before = len(found)
            for row in rows:
                for i, c in row.coefficients:
                    # c·x_i ≤ bound − Σ of the others, each at its least.
                    least = [(d, ends.get((j - self.outputs, d < 0))) for j, d in row.coefficients if j != i]
                    key, known = (i - self.outputs, c > 0), [d * end for d, end in least if end is not None]
                    if key not in ends and len(known) == len(least):
                        ends[key] = found[key] = (row.bound - sum(known, ZERO)) / c
            if len(found) == before:
                break
        return [InputBound(variable, upper, value, False, 0) for (variable, upper), value in found.items()]

    def _row(self, coefficients: Mapping[int, Fraction], bound: Fraction, upper: bool, strict: bool) -> Formula:
        factor = ONE if upper else -ONE
        # A row with very large or very small coefficients is scaled to a largest coefficient of 1, since bounds of the
        # row are computed in float64.
        largest = max(coefficients.values(), key=abs)
        if abs(_exponent(largest)) > _COMFORTABLE_EXPONENT:
            factor /= abs(largest)
        if factor != 1:
            coefficients = {j: c * factor for j, c in coefficients.items()}
            bound *= factor
        _check(bound)
        row = Row(tuple(sorted(coefficients.items())), bound, strict)
        if _bits(bound) + sum(map(_bits, coefficients.values())) > limits.BITS:
            # Over their common denominator, the coefficients can be as long as all of them together.
            whole = row.canonical()
            if any(_bits(value) > limits.BITS for value in (whole.bound, *(c for _, c in whole.coefficients))):
                raise InputError(_LONG)
        return row

    def _by_outputs(self, term: LinearTerm) -> dict[int, Fraction]:
        return {(self.outputs + ~v if v < 0 else v): c for v, c in term.coefficients.items()}

    def _product(self, a: LinearTerm, b: LinearTerm) -> LinearTerm:
        if not b.coefficients:
            return a.scaled(b.constant)
        if not a.coefficients:
            return b.scaled(a.constant)
        self.related = True
        (first, one), (second, other) = self._factor(a), self._factor(b)
        values = (c for factor in (one, other) for c in (factor.constant, *dict(factor.coefficients).values()))
        if max(map(abs, values)) >= _EXACT_IN_FLOAT32:
            # Factors become weights, which are to be exact in every precision.
            pairs = [(c * d, x, y) for x, c in _parts(a) for y, d in _parts(b)]
            self._count(len(pairs))
            return self.apply("+", [self._product(x, y).scaled(c) for c, x, y in pairs])
        factors = min(one, other), max(one, other)
        index = self.products.setdefault(factors, self.outputs + self.inputs + len(self.products))
        self._degrees[index] = sum(max(self._degrees.get(i, 1) for i, _ in each.coefficients) for each in factors)
        if self._degrees[index] > limits.DEGREE:
            raise UnsupportedError(f"a product of more than {limits.DEGREE} variables is not supported")
        if len(self.products) > limits.PRODUCTS:
            raise UnsupportedError(f"more than {limits.PRODUCTS:,} products of variables are not supported")
        return LinearTerm({index: first * second})

    def _factor(self, term: LinearTerm) -> tuple[Fraction, ProductFactor]:
        """Return a term as a number times coprime integers whose first coefficient is positive."""
        coefficients = sorted(self._by_outputs(term).items())
        values = [c for _, c in coefficients] + [term.constant] * bool(term.constant)
        unit = Fraction(math.gcd(*(v.numerator for v in values)), math.lcm(*(v.denominator for v in values)))
        unit = unit if coefficients[0][1] > 0 else -unit
        return unit, ProductFactor(tuple((i, int(c / unit)) for i, c in coefficients), int(term.constant / unit))

    def _spend(self, *terms: LinearTerm) -> None:
        bits = [_bits(value) for term in terms for value in (*term.coefficients.values(), term.constant)]
        if max(bits) > limits.BITS:
            raise InputError(_LONG)
        self._count(sum(1 + each // 64 for each in bits))

    def _count(self, steps: int) -> None:
        self._steps += steps
        if self._steps > limits.ARITHMETIC:
            raise InputError(f"the arithmetic of this file takes more than {limits.ARITHMETIC:,} steps")


def _parts(term: LinearTerm) -> list[tuple[LinearTerm, Fraction]]:
    """Return terms with coefficients of 1 whose weighted sum a term is, inputs first, and the weights."""
    ordered = sorted(term.coefficients.items(), key=lambda pair: pair[0] >= 0)
    parts = [(LinearTerm({variable: ONE}), c) for variable, c in ordered]
    return parts + [(LinearTerm(constant=ONE), term.constant)] * bool(term.constant)


def _sum(terms: Sequence[LinearTerm]) -> LinearTerm:
    total: dict[int | None, Fraction] = {}
    for term in terms:
        for variable, c in (*term.coefficients.items(), (None, term.constant)):
            known = total.get(variable)
            total[variable] = c = c if known is None else known + c
            # The denominator of a sum can be as long as those of all terms together.
            if c.denominator.bit_length() > limits.BITS:
                raise InputError(_LONG)
    constant = total.pop(None)
    return LinearTerm({variable: c for variable, c in total.items() if c and variable is not None}, constant)


def _check(bound: Fraction) -> None:
    if _bits(bound) > limits.BITS:
        raise InputError(_LONG)
    if _exponent(bound) > _LARGEST_EXPONENT:
        raise InputError("a number beyond the range of float64")


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _exponent(value: Fraction) -> int:
    """Return an integer that differs from log₂ |value| by at most 1; −``limits.BITS`` for 0."""
    return value.numerator.bit_length() - value.denominator.bit_length() if value else -limits.BITS
