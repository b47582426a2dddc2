"""Boolean combinations of linear constraints, and the properties that they stand for.

Readers build terms (:class:`Linear`) and compare them, which gives a :class:`Formula` whose leaves are bounds of
one input or rows over the outputs. :func:`properties` turns the whole formula into boxes and unions of polytopes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.spec.property import Box, Polytope, Property, Row, round_down, round_up

MAX_POLYTOPES = 100_000
"""A formula whose disjunctive form is larger than this is refused."""

ZERO, ONE = Fraction(0), Fraction(1)
_MIRRORED = {"<=": ">=", ">=": "<=", "<": ">", ">": "<"}
_LARGEST_EXPONENT = 1022


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


@dataclass(frozen=True, slots=True)
class And:
    """All parts hold; no parts: true."""

    parts: tuple[Formula, ...]


@dataclass(frozen=True, slots=True)
class Or:
    """Some part holds; no parts: false."""

    parts: tuple[Formula, ...]


Formula = Bound | Row | And | Or
TRUE = And(())
FALSE = Or(())


@dataclass(frozen=True, slots=True)
class Linear:
    """Σ inputs[i]·x_i + Σ outputs[j]·y_j + constant, exact."""

    inputs: Mapping[int, Fraction] = field(default_factory=dict)
    outputs: Mapping[int, Fraction] = field(default_factory=dict)
    constant: Fraction = ZERO

    @property
    def is_constant(self) -> bool:
        """Whether no variable is left."""
        return not self.inputs and not self.outputs

    def scaled(self, factor: Fraction) -> Linear:
        """The term multiplied by a number."""
        if not factor:
            return Linear()
        return Linear(
            {i: c * factor for i, c in self.inputs.items()},
            {j: c * factor for j, c in self.outputs.items()},
            self.constant * factor,
        )

    def __neg__(self) -> Linear:
        return self.scaled(-ONE)

    def __add__(self, other: Linear) -> Linear:
        return Linear(
            _added(self.inputs, other.inputs), _added(self.outputs, other.outputs), self.constant + other.constant
        )

    def __mul__(self, other: Linear) -> Linear:
        """The product with a constant term.

        Raises:
            UnsupportedError: if both factors have variables.
        """
        if other.is_constant:
            return self.scaled(other.constant)
        if self.is_constant:
            return other.scaled(self.constant)
        raise UnsupportedError("the product of two variables is not linear")

    def __truediv__(self, other: Linear) -> Linear:
        """The quotient by a constant term.

        Raises:
            InputError: for a division by zero.
            UnsupportedError: if the divisor has variables.
        """
        if not other.is_constant:
            raise UnsupportedError("a division by a variable is not linear")
        if not other.constant:
            raise InputError("division by zero")
        return self.scaled(1 / other.constant)


def _added(a: Mapping[int, Fraction], b: Mapping[int, Fraction]) -> Mapping[int, Fraction]:
    if not a or not b:
        return a or b
    total = dict(a)
    for i, c in b.items():
        total[i] = total.get(i, 0) + c
        if not total[i]:
            del total[i]
    return total


def compare(operator: str, left: Linear, right: Linear, mark: int) -> Formula:
    """The formula ``left operator right`` for one of ``<= < >= > = !=``, found at ``mark``.

    Raises:
        InputError: for a number beyond the range of float64.
        UnsupportedError: if the constraint relates inputs to each other or to outputs.
    """
    match operator:
        case "=":
            return And((compare("<=", left, right, mark), compare("<=", right, left, mark)))
        case "!=":
            return Or((compare("<", left, right, mark), compare("<", right, left, mark)))
    if left.is_constant and not right.is_constant:
        return compare(_MIRRORED[operator], right, left, mark)
    upper, strict = operator[0] == "<", len(operator) == 1
    term = left if right.is_constant else left + -right
    bound = right.constant if term is left else ZERO
    if term.constant:
        bound -= term.constant
    if bound.numerator.bit_length() - bound.denominator.bit_length() > _LARGEST_EXPONENT:
        raise InputError("a number beyond the range of float64")
    if not term.inputs:
        if not upper:
            term, bound = -term, -bound
        if not term.outputs:
            return TRUE if bound > 0 or (bound == 0 and not strict) else FALSE
        return Row(tuple(sorted(term.outputs.items())), bound, strict)
    if term.outputs:
        raise UnsupportedError("a constraint that relates inputs to outputs is not supported")
    if len(term.inputs) > 1:
        raise UnsupportedError("a constraint that relates inputs to each other is not supported: inputs form a box")
    ((variable, coefficient),) = term.inputs.items()
    if coefficient is ONE:  # By far the most frequent: a file may hold thousands of x ≤ number.
        return Bound(variable, upper, bound, strict, mark)
    return Bound(variable, upper == (coefficient > 0), bound / coefficient, strict, mark)


def negate(formula: Formula) -> Formula:
    """What holds where ``formula`` does not."""
    match formula:
        case Bound():
            return formula._replace(upper=not formula.upper, strict=not formula.strict)
        case Row():
            return Row(tuple((j, -c) for j, c in formula.coefficients), -formula.bound, not formula.strict)
        case And():
            return Or(tuple(negate(part) for part in formula.parts))
        case Or():
            return And(tuple(negate(part) for part in formula.parts))


class _Disjunct(NamedTuple):
    """A conjunction of bounds, the tightest of each side of each input, and of rows."""

    bounds: dict[tuple[int, bool], Bound]
    rows: Polytope

    def meet(self, other: _Disjunct) -> _Disjunct | None:
        """Both together; None if their bounds contradict each other."""
        if not other.bounds:
            return _Disjunct(self.bounds, self.rows + other.rows)
        bounds = dict(self.bounds)
        return _Disjunct(bounds, self.rows + other.rows) if _tighten(bounds, other.bounds.values()) else None


def _tighten(bounds: dict[tuple[int, bool], Bound], more: Iterable[Bound]) -> bool:
    """Add ``more`` to ``bounds``; False if that leaves nothing of some input."""
    possible = True
    for bound in more:
        key = bound.variable, bound.upper
        known = bounds.get(key)
        if known is not None and not bound.tighter(known):
            continue
        bounds[key] = bound
        possible = possible and _meet(bound, bounds.get((bound.variable, not bound.upper)))
    return possible


def _meet(bound: Bound, opposite: Bound | None) -> bool:
    """Whether a bound and the one of the other side of the same input, if any, have a point in common."""
    if opposite is None:
        return True
    if bound.value == opposite.value:
        return not (bound.strict or opposite.strict)
    return (opposite.value < bound.value) is bound.upper


def _conjunction(formula: Formula) -> tuple[list[Bound], list[Row], list[Or]]:
    """The bounds, rows and disjunctions that ``formula`` is the conjunction of, in order."""
    bounds: list[Bound] = []
    rows: list[Row] = []
    choices: list[Or] = []
    pending = [formula]
    while pending:
        match part := pending.pop():
            case Bound():
                bounds.append(part)
            case Row():
                rows.append(part)
            case And():
                pending.extend(reversed(part.parts))
            case Or():
                choices.append(part)
    return bounds, rows, choices


def _options(formula: Or) -> list[Formula]:
    """The parts of a disjunction, nested disjunctions opened, in order."""
    options: list[Formula] = []
    pending: list[Formula] = [formula]
    while pending:
        part = pending.pop()
        if isinstance(part, Or):
            pending.extend(reversed(part.parts))
        else:
            options.append(part)
    return options


def _disjuncts(formula: Formula) -> list[_Disjunct]:
    """The disjunctive form of ``formula``, without disjuncts whose bounds contradict each other."""
    bounds, rows, choices = _conjunction(formula)
    tightest: dict[tuple[int, bool], Bound] = {}
    if not _tighten(tightest, bounds):
        return []
    return _distribute([_Disjunct(tightest, tuple(rows))], choices)


def _distribute(found: list[_Disjunct], choices: Sequence[Or]) -> list[_Disjunct]:
    for choice in choices:
        options: list[_Disjunct] = []
        for part in _options(choice):
            options += _disjuncts(part)
            if len(options) * len(found) > MAX_POLYTOPES:
                raise UnsupportedError(f"the disjunctive form has more than {MAX_POLYTOPES} polytopes")
        found = [both for one in found for other in options if (both := one.meet(other)) is not None]
    return found


_Side = tuple[int, bool, Fraction, bool]
"""A bound without its mark."""


class _Sides:
    """The box under construction: float64 bounds rounded outward, and what they leave out."""

    def __init__(self, size: int) -> None:
        self.floats = {False: np.full(size, -np.inf), True: np.full(size, np.inf)}
        self.exact: dict[bool, dict[int, Fraction]] = {False: {}, True: {}}
        self.strict: dict[bool, set[int]] = {False: set(), True: set()}

    def copy(self) -> _Sides:
        twin = _Sides(0)
        twin.floats = {side: values.copy() for side, values in self.floats.items()}
        twin.exact = {side: dict(values) for side, values in self.exact.items()}
        twin.strict = {side: set(values) for side, values in self.strict.items()}
        return twin

    def set(self, bounds: Iterable[_Side]) -> None:
        for variable, upper, value, strict in bounds:
            rounded = round_up(value) if upper else round_down(value)
            self.floats[upper][variable] = rounded
            if rounded.as_integer_ratio() == (value.numerator, value.denominator):
                self.exact[upper].pop(variable, None)
            else:
                self.exact[upper][variable] = value
            (self.strict[upper].add if strict else self.strict[upper].discard)(variable)

    def box(self, names: Sequence[str]) -> Box:
        for upper, values in self.floats.items():
            missing = np.flatnonzero(np.isinf(values))
            if missing.size:
                raise InputError(f"the input {names[missing[0]]} has no {'upper' if upper else 'lower'} bound")
        return Box(
            self.floats[False],
            self.floats[True],
            self.exact[False],
            self.exact[True],
            frozenset(self.strict[False]),
            frozenset(self.strict[True]),
        )


def properties(formula: Formula, inputs: Sequence[str], name: str, place: Callable[[int], str]) -> tuple[Property, ...]:
    """The properties whose answers join to the answer of ``formula``: any sat is sat, all unsat is unsat.

    Disjuncts over the same box become one property with several polytopes; a disjunct that cannot hold vanishes.
    A formula of which nothing is left gives one property with an empty unsafe set.

    Args:
        formula: over the inputs and outputs of one network.
        inputs: the name of each input variable, in order.
        name: the name of the property; several are numbered.
        place: what to call a mark in messages.

    Raises:
        InputError: for an input without bounds, or bounds asserted of all disjuncts that leave no point.
        UnsupportedError: for more than ``MAX_POLYTOPES`` polytopes.
    """
    bounds, rows, choices = _conjunction(formula)
    common: dict[tuple[int, bool], Bound] = {}
    if not _tighten(common, bounds):
        raise _inverted(common, inputs, place)
    sides = _Sides(len(inputs))
    sides.set(bound[:4] for bound in common.values())
    groups: dict[frozenset[_Side], list[Polytope]] = {}
    for disjunct in _distribute([_Disjunct({}, tuple(rows))], choices):
        own = [b for key, b in disjunct.bounds.items() if key not in common or b.tighter(common[key])]
        if all(_meet(bound, common.get((bound.variable, not bound.upper))) for bound in own):
            groups.setdefault(frozenset(bound[:4] for bound in own), []).append(disjunct.rows)
    if not groups:
        if len(common) < 2 * len(inputs) and (cause := next(_all_bounds(choices), None)) is not None:
            raise InputError("in every case the box is empty", place=place(cause.mark))
        return (Property(sides.box(inputs), (), name),)
    found: list[Property] = []
    for number, (own_bounds, polytopes) in enumerate(groups.items()):
        mine = sides.copy()
        mine.set(own_bounds)
        label = name if len(groups) == 1 else f"{name}#{number}"
        found.append(Property(mine.box(inputs), tuple(polytopes), label))
    return tuple(found)


def _all_bounds(parts: Iterable[Formula]) -> Iterator[Bound]:
    for part in parts:
        if isinstance(part, Bound):
            yield part
        elif isinstance(part, And | Or):
            yield from _all_bounds(part.parts)


def _inverted(
    bounds: Mapping[tuple[int, bool], Bound], inputs: Sequence[str], place: Callable[[int], str]
) -> InputError:
    for (variable, upper), high in bounds.items():
        low = bounds.get((variable, not upper))
        if upper and low is not None and not _meet(high, low):
            below, above = ("<" if low.strict else "<="), ("<" if high.strict else "<=")
            name = inputs[variable]
            return InputError(
                f"the box is empty: {float(low.value)!r} {below} {name} ({place(low.mark)}) "
                f"but {name} {above} {float(high.value)!r}",
                place=place(high.mark),
            )
    raise AssertionError("these bounds leave a point")
