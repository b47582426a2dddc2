"""Formulas: Boolean combinations of linear constraints, which the readers of property files build.

The leaves of a formula are bounds of one input and rows over the outputs, both made by ``terms.Arithmetic.compare``.
``disjuncts.properties`` turns a formula into boxes and unions of polytopes.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from verifiable_relu.spec.property import Row


class Bound(NamedTuple):
    """A bound of one input: x ≤ value if ``upper``, else x ≥ value; with < or > if ``strict``.

    ``mark`` says where in the file the bound is written: a position or a line, as the reader of the file chooses.
    """

    variable: int
    upper: bool
    value: Fraction
    strict: bool
    mark: int

    def tighter(self, other: Bound) -> bool:
        """Whether this bound is tighter than ``other``, a bound of the same side of the same input."""
        if self.value == other.value:
            return self.strict and not other.strict
        return (self.value < other.value) is self.upper

    def meets(self, opposite: Bound | None) -> bool:
        """Whether some value satisfies both this bound and ``opposite``, the same input's bound of the other side.

        The answer is True where there is no opposite bound.
        """
        if opposite is None:
            return True
        if self.value == opposite.value:
            return not (self.strict or opposite.strict)
        return (opposite.value < self.value) is self.upper


@dataclass(frozen=True, slots=True)
class And:
    """The conjunction of the parts; true without any."""

    parts: tuple[Formula, ...]


@dataclass(frozen=True, slots=True)
class Or:
    """The disjunction of the parts; false without any."""

    parts: tuple[Formula, ...]


@dataclass(frozen=True, slots=True)
class Not:
    """The negation of a conjunction or disjunction; since it is not pushed inward, it costs the same for any part."""

    part: And | Or


Formula = Bound | Row | And | Or | Not
TRUE = And(())
FALSE = Or(())


def negate(formula: Formula) -> Formula:
    """The negation of a formula: a leaf for a leaf, and ``Not`` for a conjunction or a disjunction."""
    match formula:
        case Bound():
            return formula._replace(upper=not formula.upper, strict=not formula.strict)
        case Row():
            return Row(tuple((j, -c) for j, c in formula.coefficients), -formula.bound, not formula.strict)
        case Not():
            return formula.part
    return Not(formula)
