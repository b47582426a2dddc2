"""Exact linear terms over inputs and outputs, and the arithmetic and comparisons of property files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from itertools import combinations

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.spec import limits
from verifiable_relu.spec.formula import FALSE, TRUE, And, Bound, Formula, Or
from verifiable_relu.spec.property import Row

ZERO, ONE = Fraction(0), Fraction(1)
_MIRRORED = {"<=": ">=", ">=": "<=", "<": ">", ">": "<"}
_LARGEST_EXPONENT = 1022
_COMFORTABLE_EXPONENT = 500
_SHORT = 2**64
_NONE: Mapping[int, Fraction] = {}


@dataclass(frozen=True, slots=True)
class LinearTerm:
    """The term Σ inputs[i]·x_i + Σ outputs[j]·y_j + constant, without coefficients of zero."""

    inputs: Mapping[int, Fraction] = field(default_factory=lambda: _NONE)
    outputs: Mapping[int, Fraction] = field(default_factory=lambda: _NONE)
    constant: Fraction = ZERO

    @property
    def is_constant(self) -> bool:
        """Whether the term has no variable."""
        return not self.inputs and not self.outputs

    def scaled(self, factor: Fraction) -> LinearTerm:
        """The term multiplied by a number."""
        if not factor:
            return LinearTerm()
        return LinearTerm(
            {i: c * factor for i, c in self.inputs.items()},
            {j: c * factor for j, c in self.outputs.items()},
            self.constant * factor,
        )

    def values(self) -> Iterable[Fraction]:
        """All coefficients and the constant."""
        yield from self.inputs.values()
        yield from self.outputs.values()
        yield self.constant


def number(lexeme: str) -> Fraction:
    """The exact value of a decimal with or without an exponent.

    Raises:
        InputError: if it has more than ``limits.DIGITS`` characters.
    """
    if len(lexeme) > limits.DIGITS:
        raise InputError(f"a number has {len(lexeme):,} characters, more than {limits.DIGITS:,}")
    return Fraction(Decimal(lexeme))


class Arithmetic:
    """Sums, products and comparisons of one file's terms, whose cost is counted and limited.

    Every operation raises an InputError if a number exceeds ``limits.BITS`` or the file ``limits.ARITHMETIC`` steps.
    """

    def __init__(self) -> None:
        self.steps = 0

    def apply(self, operator: str, terms: Sequence[LinearTerm]) -> LinearTerm:
        """The result of an operator on one or more terms, applied from left to right; ``-`` of one term negates it.

        Args:
            operator: one of ``+ - * /``.
            terms: the arguments of the operator.

        Raises:
            InputError: for a division by zero or of a single term.
            UnsupportedError: if the result is not linear.
        """
        self._spend(terms)
        if operator == "-":
            head, *rest = terms
            return _sum([head, *(term.scaled(-ONE) for term in rest)]) if rest else head.scaled(-ONE)
        if operator == "+":
            return _sum(terms)
        if operator == "/" and len(terms) < 2:
            raise InputError("'/' needs two arguments")
        operation: Callable[[LinearTerm, LinearTerm], LinearTerm] = _product if operator == "*" else _quotient
        result = terms[0]
        for term in terms[1:]:
            result = operation(result, term)
            self._spend([result])
        return result

    def compare(self, operator: str, left: LinearTerm, right: LinearTerm, mark: int) -> Formula:
        """The formula ``left operator right``.

        Args:
            operator: one of ``<= < >= > = !=``.
            left: a term.
            right: a term.
            mark: the place of the comparison in the file, which a ``Bound`` keeps.

        Raises:
            InputError: for a number beyond the range of float64.
            UnsupportedError: if the comparison relates inputs to each other or to outputs.
        """
        match operator:
            case "=":
                return And((self.compare("<=", left, right, mark), self.compare(">=", left, right, mark)))
            case "!=":
                return Or((self.compare("<", left, right, mark), self.compare(">", left, right, mark)))
        if not right.is_constant:
            if left.is_constant:
                return self.compare(_MIRRORED[operator], right, left, mark)
            left, right = self.apply("-", [left, right]), LinearTerm()
        upper, strict = operator[0] == "<", len(operator) == 1
        bound = right.constant - left.constant if left.constant else right.constant
        if not left.inputs:
            return self._row(left.outputs, bound, upper, strict)
        if left.outputs:
            raise UnsupportedError("a constraint that relates inputs to outputs is not supported")
        if len(left.inputs) > 1:
            raise UnsupportedError("a constraint that relates inputs to each other is not supported: inputs form a box")
        ((variable, coefficient),) = left.inputs.items()
        if coefficient is not ONE:  # A file may hold many thousands of bounds x ≤ number, which skip this division.
            self._spend([left, right])
            upper = upper == (coefficient > 0)
            bound /= coefficient
        _check(bound)
        return Bound(variable, upper, bound, strict, mark)

    def distinct(self, terms: Sequence[LinearTerm], mark: int) -> Formula:
        """The formula that no two of the terms are equal.

        Raises:
            InputError: as :meth:`compare` does.
            UnsupportedError: as :meth:`compare` does, and for more pairs of terms than ``limits.PAIRS``.
        """
        pairs = len(terms) * (len(terms) - 1) // 2
        if pairs > limits.PAIRS:
            raise UnsupportedError(f"'distinct' of {len(terms):,} terms makes more than {limits.PAIRS:,} pairs")
        return And(tuple(self.compare("!=", left, right, mark) for left, right in combinations(terms, 2)))

    def _row(self, coefficients: Mapping[int, Fraction], bound: Fraction, upper: bool, strict: bool) -> Formula:
        if not coefficients:
            holds = bound > 0 if upper else bound < 0
            return TRUE if holds or (bound == 0 and not strict) else FALSE
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
                raise _long()
        return row

    def _spend(self, terms: Iterable[LinearTerm]) -> None:
        for term in terms:
            for value in term.values():
                bits = _bits(value)
                self.steps += 1 + bits // 64
                if bits > limits.BITS:
                    raise _long()
        if self.steps > limits.ARITHMETIC:
            raise InputError(f"the arithmetic of this file takes more than {limits.ARITHMETIC:,} steps")


def _check(bound: Fraction) -> None:
    if max(bound.numerator, -bound.numerator, bound.denominator) < _SHORT:
        return
    if _bits(bound) > limits.BITS:
        raise _long()
    if _exponent(bound) > _LARGEST_EXPONENT:
        raise InputError("a number beyond the range of float64")


def _long() -> InputError:
    return InputError(f"a number has more than {limits.BITS:,} bits")


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _exponent(value: Fraction) -> int:
    """An integer that differs from log₂ |value| by at most 1; −``limits.BITS`` for 0."""
    return value.numerator.bit_length() - value.denominator.bit_length() if value else -limits.BITS


def _sum(terms: Sequence[LinearTerm]) -> LinearTerm:
    inputs: dict[int, Fraction] = {}
    outputs: dict[int, Fraction] = {}
    constant = ZERO
    for term in terms:
        constant = _added(constant, term.constant)
        for total, more in ((inputs, term.inputs), (outputs, term.outputs)):
            for i, c in more.items():
                known = total.get(i)
                total[i] = c if known is None else _added(known, c)
    return LinearTerm({i: c for i, c in inputs.items() if c}, {j: c for j, c in outputs.items() if c}, constant)


def _added(a: Fraction, b: Fraction) -> Fraction:
    total = a + b
    # The denominator of a sum can be as long as those of all terms together.
    if total.denominator.bit_length() > limits.BITS:
        raise _long()
    return total


def _product(a: LinearTerm, b: LinearTerm) -> LinearTerm:
    if b.is_constant:
        return a.scaled(b.constant)
    if a.is_constant:
        return b.scaled(a.constant)
    raise UnsupportedError("the product of two variables is not linear")


def _quotient(a: LinearTerm, b: LinearTerm) -> LinearTerm:
    if not b.is_constant:
        raise UnsupportedError("a division by a variable is not linear")
    if not b.constant:
        raise InputError("division by zero")
    return a.scaled(1 / b.constant)
