"""Boolean combinations of linear constraints: what the readers of property files build.

The leaves of a formula are bounds of one input or rows over the outputs; ``terms.Arithmetic.compare`` makes them, and
``disjuncts.properties`` turns a whole formula into boxes and unions of polytopes.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from verifiable_relu.spec.property import Row


class Bound(NamedTuple):
    """One side of one input: x ≤ value (``upper``) or x ≥ value; ``strict``: < or >.

    ``mark`` is where the reader found it, in the reader's own terms.
    """

    variable: int
    upper: bool
    value: Fraction
    strict: bool
    mark: int

    def tighter(self, other: Bound) -> bool:
        """Whether this bound of the same side of the same input leaves less than ``other``."""
        if self.value == other.value:
            return self.strict and not other.strict
        return (self.value < other.value) is self.upper

    def meets(self, opposite: Bound | None) -> bool:
        """Whether this bound and the one of the other side of the same input, if any, have a point in common."""
        if opposite is None:
            return True
        if self.value == opposite.value:
            return not (self.strict or opposite.strict)
        return (opposite.value < self.value) is self.upper


@dataclass(frozen=True, slots=True)
class And:
    """All parts hold; no parts: true."""

    parts: tuple[Formula, ...]


@dataclass(frozen=True, slots=True)
class Or:
    """Some part holds; no parts: false."""

    parts: tuple[Formula, ...]


@dataclass(frozen=True, slots=True)
class Not:
    """The part does not hold. Kept as it is, so that a negation costs nothing however large the part is."""

    part: And | Or


Formula = Bound | Row | And | Or | Not
TRUE = And(())
FALSE = Or(())


def negate(formula: Formula) -> Formula:
    """What holds where ``formula`` does not."""
    match formula:
        case Bound():
            return formula._replace(upper=not formula.upper, strict=not formula.strict)
        case Row():
            return Row(tuple((j, -c) for j, c in formula.coefficients), -formula.bound, not formula.strict)
        case Not():
            return formula.part
    return Not(formula)
