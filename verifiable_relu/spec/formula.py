"""Formulas: Boolean combinations of linear constraints, which the readers of property files build, and what they mean.

`Arithmetic` computes with the exact linear terms of a file and makes the leaves of formulas: bounds of one input, and
rows over the outputs. `properties` turns a formula into boxes of inputs, each with a union of polytopes of outputs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from itertools import chain, combinations
from typing import NamedTuple

import numpy as np

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.rounding import above, below
from verifiable_relu.spec import limits
from verifiable_relu.spec.property import Box, Polytope, Property, Row, round_down, round_up


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


@dataclass(frozen=True, eq=False, slots=True)
class Block:
    """The conjunction of many bounds of inputs, none strict, and no two of the same side of an input.

    A large file has millions of bounds, of which objects would take some hundred times the memory of these arrays.

    Attributes:
        variables: (n,) the inputs.
        upper: bool (n,), whether the bound is an upper one.
        values: float64 (n,), the bounds rounded outward.
        exact: the bounds that float64 does not represent, by their places.
        bounds: returns the bounds one by one.
    """

    variables: np.ndarray
    upper: np.ndarray
    values: np.ndarray
    exact: Mapping[int, Fraction]
    bounds: Callable[[], Iterable[Bound]]

    @property
    def key(self) -> bytes:
        """A digest; equal digests mean equal bounds."""
        state = hashlib.sha256(self.variables.tobytes() + self.upper.tobytes() + (self.values + 0.0).tobytes())
        state.update(repr(list(self.exact.items())).encode())
        return state.digest()


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


Formula = Bound | Block | Row | And | Or | Not
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
        case Block():
            return Not(And(tuple(formula.bounds())))
    return Not(formula)


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
        operation: Callable[[LinearTerm, LinearTerm], LinearTerm] = self.product if operator == "*" else _quotient
        result = terms[0]
        for term in terms[1:]:
            result = operation(result, term)
            self._spend([result])
        return result

    def product(self, a: LinearTerm, b: LinearTerm) -> LinearTerm:
        """The product of two terms.

        Raises:
            UnsupportedError: if both have variables.
        """
        if b.is_constant:
            return a.scaled(b.constant)
        if a.is_constant:
            return b.scaled(a.constant)
        raise UnsupportedError("the product of two variables is not linear")

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
        steps = 0
        for term in terms:
            for value in term.values():
                bits = _bits(value)
                steps += 1 + bits // 64
                if bits > limits.BITS:
                    raise _long()
        self.spend(steps)

    def spend(self, steps: int) -> None:
        """Count steps towards ``limits.ARITHMETIC``."""
        self.steps += steps
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


def _quotient(a: LinearTerm, b: LinearTerm) -> LinearTerm:
    if not b.is_constant:
        raise UnsupportedError("a division by a variable is not linear")
    if not b.constant:
        raise InputError("division by zero")
    return a.scaled(1 / b.constant)


def properties(
    formula: Formula, size: int, input_name: Callable[[int], str], name: str, place: Callable[[int], str]
) -> tuple[Property, ...]:
    """The properties that a formula stands for: the formula is *sat* if any of them is, and *unsat* if all are.

    The formula is brought into disjunctive form. Disjuncts with the same box become one property with several
    polytopes. A disjunct with an empty box is left out, and so is one that a comparison of constants makes false. If
    comparisons of constants have removed all disjuncts, the result is one property with an empty unsafe set. A formula
    in which every disjunct's box is empty is refused, as an empty box is wherever it is written.

    Args:
        formula: the formula, over the inputs and outputs of one network.
        size: the number of inputs.
        input_name: the name of an input variable, by its index.
        name: the name of the property; several properties are numbered.
        place: the words with which messages name the place of a bound, by the bound's ``mark``.

    Raises:
        InputError: if the box of every disjunct is empty.
        UnsupportedError: for a disjunctive form beyond ``limits.POLYTOPES`` or ``limits.DISJUNCTIVE``.
    """
    form = _Form()
    bounds, blocks, rows, choices = conjunction(formula, True)
    common: _Bounds = {}
    disjuncts: list[_Disjunct] = []
    if form.tighten(common, chain(bounds, *(block.bounds() for block in blocks))):
        disjuncts = form.distribute([_Disjunct({}, tuple(rows))], choices)
    for disjunct in disjuncts:
        form.spend(len(disjunct.rows))
    sides = _Sides(size)
    sides.set(bound[:4] for bound in common.values())
    groups: dict[_Own, tuple[_Disjunct, list[Polytope]]] = {}
    for disjunct in disjuncts:
        own = [b for key, b in disjunct.bounds.items() if key not in common or b.tighter(common[key])]
        if all(form.agree(bound, common.get((bound.variable, not bound.upper))) for bound in own):
            named = frozenset(bound[:4] for bound in own), tuple(block.key for block in disjunct.blocks)
            groups.setdefault(named, (disjunct, []))[1].append(disjunct.rows)
    if len(groups) * size > limits.BOUNDS:
        raise UnsupportedError(f"{len(groups):,} boxes of {size:,} inputs are more than {limits.BOUNDS:,} inputs")
    for named, (first, _) in list(groups.items()):
        if first.blocks and not sides.meets(named[0], first.blocks):
            # Which bounds contradict is looked for one by one.
            each = (common.values(), first.bounds.values(), *(block.bounds() for block in first.blocks))
            form.tighten({}, chain.from_iterable(each))
            del groups[named]
    if not groups and form.contradiction is not None:
        raise _empty("in every case the box" if choices else "the box", form.contradiction, input_name, place)
    if not groups:
        return (sides.property((), name, input_name),)
    found: list[Property] = []
    for number, ((own_bounds, _), (first, polytopes)) in enumerate(groups.items()):
        mine = sides.within(own_bounds, first.blocks)
        label = name if len(groups) == 1 else f"{name}#{number}"
        found.append(mine.property(tuple(polytopes), label, input_name))
    return tuple(found)


_Bounds = dict[tuple[int, bool], Bound]
"""The tightest bounds found, by input and side; the side is whether the bound is an upper one."""


class _Disjunct(NamedTuple):
    """A conjunction of bounds of inputs, blocks of them, and rows over outputs."""

    bounds: _Bounds
    rows: Polytope
    blocks: tuple[Block, ...] = ()


_Choice = tuple[Or | And, bool]
"""A disjunction: an ``Or`` with True, or an ``And`` with False, which stands for the negation of the ``And``."""


def _flat(formula: Formula, positive: bool, kind: type[And] | type[Or]) -> Iterator[tuple[Formula, bool]]:
    """The parts of nested conjunctions (``kind`` And) or disjunctions (Or) in order, each True or False if negated."""
    pending = [(formula, positive)]
    while pending:
        part, positive = pending.pop()
        if isinstance(part, Block) and not positive:
            part, positive = negate(part), True
        if isinstance(part, Not):
            pending.append((part.part, not positive))
        elif isinstance(part, And | Or) and (isinstance(part, kind) is positive or len(part.parts) == 1):
            pending.extend((each, positive) for each in reversed(part.parts))
        else:
            yield part, positive


def conjunction(formula: Formula, positive: bool) -> tuple[list[Bound], list[Block], list[Row], list[_Choice]]:
    """The bounds, blocks of them, rows and disjunctions whose conjunction is ``formula``, or its negation, in order.

    Args:
        formula: the formula.
        positive: whether it is the formula, not its negation.
    """
    bounds: list[Bound] = []
    blocks: list[Block] = []
    rows: list[Row] = []
    choices: list[_Choice] = []
    for part, kept in _flat(formula, positive, And):
        if isinstance(part, And | Or):
            choices.append((part, kept))
            continue
        leaf = part if kept else negate(part)
        if isinstance(leaf, Bound):
            bounds.append(leaf)
        elif isinstance(leaf, Block):
            blocks.append(leaf)
        elif isinstance(leaf, Row):
            rows.append(leaf)
    return bounds, blocks, rows, choices


class _Form:
    """The construction of a disjunctive form, whose size it counts.

    Attributes:
        contradiction: the first pair of a lower and an upper bound found that no value of their input satisfies.
    """

    def __init__(self) -> None:
        self.contradiction: tuple[Bound, Bound] | None = None
        self._spent = 0

    def spend(self, constraints: int) -> None:
        """Count constraints towards ``limits.DISJUNCTIVE``."""
        self._spent += constraints
        if self._spent > limits.DISJUNCTIVE:
            raise UnsupportedError(f"the disjunctive form has more than {limits.DISJUNCTIVE:,} constraints")

    def agree(self, bound: Bound, opposite: Bound | None) -> bool:
        """Whether some value satisfies a bound and, if there is one, the same input's bound of the other side."""
        if bound.meets(opposite):
            return True
        if self.contradiction is None and opposite is not None:
            self.contradiction = bound, opposite
        return False

    def tighten(self, bounds: _Bounds, more: Iterable[Bound]) -> bool:
        """Tighten ``bounds`` in place by ``more``; returns False if the bounds of some input then contradict."""
        possible = True
        for bound in more:
            key = bound.variable, bound.upper
            known = bounds.get(key)
            if known is None or bound.tighter(known):
                bounds[key] = bound
                possible = self.agree(bound, bounds.get((bound.variable, not bound.upper))) and possible
        return possible

    def distribute(self, found: list[_Disjunct], choices: Sequence[_Choice]) -> list[_Disjunct]:
        """The conjunction of a disjunctive form with disjunctions, in disjunctive form.

        Args:
            found: the disjuncts of the form.
            choices: the disjunctions.

        Returns:
            The disjuncts whose bounds do not contradict.
        """
        for choice in choices:
            options: list[_Disjunct] = []
            for part, positive in _flat(*choice, Or):
                bounds, blocks, rows, inner = conjunction(part, positive)
                tightest: _Bounds = {}
                if self.tighten(tightest, bounds):
                    options += self.distribute([_Disjunct(tightest, tuple(rows), tuple(blocks))], inner)
                if len(options) * len(found) > limits.POLYTOPES:
                    raise UnsupportedError(f"the disjunctive form has more than {limits.POLYTOPES:,} polytopes")
            found = [both for one in found for other in options if (both := self._meet(one, other)) is not None]
        return found

    def _meet(self, one: _Disjunct, other: _Disjunct) -> _Disjunct | None:
        # A row counts as a 32nd of a bound, because copying a row takes far less time than looking a bound up.
        self.spend(1 + len(one.bounds) + len(other.bounds) + (len(one.rows) + len(other.rows)) // 32)
        rows, blocks = one.rows + other.rows, one.blocks + other.blocks
        if not other.bounds:
            return _Disjunct(one.bounds, rows, blocks)
        bounds = dict(one.bounds)
        return _Disjunct(bounds, rows, blocks) if self.tighten(bounds, other.bounds.values()) else None


_Side = tuple[int, bool, Fraction, bool]
"""The first four fields of a ``Bound``, without the mark."""

_Own = tuple[frozenset[_Side], tuple[bytes, ...]]
"""The bounds that a disjunct has beside those of all, and the keys of its blocks."""


class _Sides:
    """The sides of a box under construction, by whether they are the upper ones.

    Attributes:
        floats: the bounds in float64, rounded outward; infinite where an input has none so far.
        exact: the exact bounds that float64 does not represent, by input.
        strict: the inputs whose bound is strict.
    """

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

    def within(self, bounds: Iterable[_Side], blocks: Iterable[Block]) -> _Sides:
        """These sides made as tight as bounds, each tighter than these, and blocks."""
        mine = self.copy()
        mine.set(bounds)
        for block in blocks:
            mine.tighten(block)
        return mine

    def meets(self, bounds: Iterable[_Side], blocks: Iterable[Block]) -> bool:
        """Whether some input satisfies these sides, bounds that are tighter, and blocks."""
        mine = self.within(bounds, blocks)
        low, high = mine.floats[False], mine.floats[True]
        doubtful = {*mine.exact[False], *mine.exact[True], *mine.strict[False], *mine.strict[True]}
        near = set(np.flatnonzero(low >= below(high)).tolist()) & doubtful
        return not (low > high).any() and all(mine.bound(i, False).meets(mine.bound(i, True)) for i in near)

    def bound(self, variable: int, upper: bool) -> Bound:
        """A bound that there is."""
        known = self.exact[upper].get(variable)
        value = Fraction(float(self.floats[upper][variable])) if known is None else known
        return Bound(variable, upper, value, variable in self.strict[upper], 0)

    def tighten(self, block: Block) -> None:
        """Make these sides as tight as a block."""
        for upper, floats in self.floats.items():
            chosen = block.upper == upper
            variables, values = block.variables[chosen], block.values[chosen]
            known = floats[variables]
            exact = {int(block.variables[place]): v for place, v in block.exact.items() if chosen[place]}
            fresh = ~np.isfinite(known)
            tightest = (np.minimum if upper else np.maximum)(known, values)
            if listed := exact.keys() | self.exact[upper].keys() | self.strict[upper]:
                # Where bounds round to the same number, the exact ones decide.
                doubtful = np.isin(variables, list(listed)) & ~fresh
                for variable, value in zip(variables[doubtful].tolist(), values[doubtful].tolist(), strict=True):
                    mine = Bound(variable, upper, exact.get(variable, Fraction(value)), False, 0)
                    if mine.tighter(self.bound(variable, upper)):
                        self.set([mine[:4]])
                tightest[doubtful] = floats[variables[doubtful]]
                first = set(variables[fresh].tolist())
                self.exact[upper] |= {variable: value for variable, value in exact.items() if variable in first}
            floats[variables] = tightest

    def set(self, bounds: Iterable[_Side]) -> None:
        for variable, upper, value, strict in bounds:
            rounded = round_up(value) if upper else round_down(value)
            self.floats[upper][variable] = rounded
            if rounded.as_integer_ratio() == (value.numerator, value.denominator):
                self.exact[upper].pop(variable, None)
            else:
                self.exact[upper][variable] = value
            (self.strict[upper].add if strict else self.strict[upper].discard)(variable)

    def property(self, unsafe: tuple[Polytope, ...], name: str, input_name: Callable[[int], str]) -> Property:
        """The property of these sides; where one is missing, of a part of its inputs (``Property.partial``)."""
        low, high = self.floats[False], self.floats[True]
        missing = {"lower": np.flatnonzero(np.isinf(low)), "upper": np.flatnonzero(np.isinf(high))}
        first = min(((int(found[0]), side) for side, found in missing.items() if found.size), default=None)
        partial = "" if first is None or not unsafe else f"the input {input_name(first[0])} has no {first[1]} bound"
        # What most inputs are, between −1 and 1, is in this part, or where they begin to be larger.
        least = np.minimum(np.minimum(high, 0.0) - 1, below(high))
        most = np.maximum(np.maximum(low, 0.0) + 1, above(low))
        low, high = np.where(np.isinf(low), least, low), np.where(np.isinf(high), most, high)
        ends = self.exact[False], self.exact[True], frozenset(self.strict[False]), frozenset(self.strict[True])
        return Property(Box(low, high, *ends), unsafe, name, partial=partial)


def _empty(
    box: str, contradiction: tuple[Bound, Bound], input_name: Callable[[int], str], place: Callable[[int], str]
) -> InputError:
    high, low = contradiction if contradiction[0].upper else contradiction[::-1]
    below, above = ("<" if low.strict else "<="), ("<" if high.strict else "<=")
    variable = input_name(high.variable)
    return InputError(
        f"{box} is empty: {float(low.value)!r} {below} {variable} ({place(low.mark)}) "
        f"but {variable} {above} {float(high.value)!r}",
        place=place(high.mark),
    )
