"""Formulas that the readers of property files build: exact linear terms, their comparisons, and their normal form.

A property that relates inputs to each other or to outputs, or multiplies variables, is one of a network that passes its
inputs on among its outputs, with products after them (``TermArithmetic``).

`properties` brings a formula into disjunctive normal form: boxes of inputs, each with a union of polytopes of outputs.

Bounds of inputs are compared by integers there. All numbers that bound an input are sorted, and r is a number's rank;
s is 1 for a strict bound, else 0. A bound's key is 2r + s for a lower and s − 2r for an upper one, so that of two
bounds of one side the one with the larger key is the tighter. A lower and an upper bound contradict exactly if their
keys have a positive sum. The negation of a bound with the key k is the bound of the other side with the key 1 − k.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.rounding import above, below
from verifiable_relu.spec import limits
from verifiable_relu.spec.property import Box, Polytope, Property, Row, round_down
from verifiable_relu.spec.specfile import ProductFactor

ZERO, ONE = Fraction(0), Fraction(1)
_COMPARISONS = ("<=", "<", ">=", ">", "=", "!=")
_MIRRORED = {"<=": ">=", ">=": "<=", "<": ">", ">": "<"}
_LARGEST_EXPONENT = 1022
_COMFORTABLE_EXPONENT = 500
_EXACT_IN_FLOAT32 = 1 << 24
_LONG = f"a number has more than {limits.BITS:,} bits"
_PASSES = 10  # over the constraints in which bounds of inputs are implied by those of others, at most


class InputBound(NamedTuple):
    """A bound of one input: x ≤ value if ``upper``, else x ≥ value; with < or > if ``strict``.

    ``mark`` says where in the file the bound is written, as the reader of the file chooses.
    """

    variable: int
    upper: bool
    value: Fraction
    strict: bool
    mark: Any


@dataclass(frozen=True, slots=True, eq=False)
class And:
    """The conjunction of the parts; true without any."""

    parts: Sequence[Formula]


@dataclass(frozen=True, slots=True, eq=False)
class Or:
    """The disjunction of the parts; false without any."""

    parts: Sequence[Formula]


@dataclass(frozen=True, slots=True, eq=False)
class Not:
    """The negation of a conjunction or disjunction; since it is not pushed inward, it costs the same for any part."""

    part: And | Or


Formula = InputBound | Row | And | Or | Not
_LEAVES = (InputBound, Row)
TRUE = And(())
FALSE = Or(())


def negate(formula: Formula) -> Formula:
    """Return the negation of a formula: a leaf for a leaf, and ``Not`` for a conjunction or a disjunction."""
    match formula:
        case InputBound():
            return formula._replace(upper=not formula.upper, strict=not formula.strict)
        case Row():
            return formula.negated()
        case Not():
            return formula.part
    return Not(formula)


def flat(
    formula: Formula, positive: bool = True, kind: type[And] | type[Or] = And
) -> Iterator[tuple[InputBound | Row | And | Or, bool]]:
    """Yield the parts of nested conjunctions (``kind`` And) or disjunctions (Or) in order, and False for negated ones.

    If not ``positive``, the parts are those of the formula's negation.
    """
    pending: list[tuple[Iterator[Formula], bool]] = [(iter((formula,)), positive)]
    while pending:
        parts, positive = pending[-1]
        for part in parts:
            if isinstance(part, Not):
                pending.append((iter((part.part,)), not positive))
                break
            if not isinstance(part, _LEAVES) and (isinstance(part, kind) is positive or len(part.parts) == 1):
                pending.append((iter(part.parts), positive))
                break
            yield part, positive
        else:
            pending.pop()


@dataclass(frozen=True, slots=True)
class LinearTerm:
    """The term Σ coefficient·variable + constant; the variable j ≥ 0 is the output j, ~i = −1 − i is the input i."""

    coefficients: Mapping[int, Fraction] = field(default_factory=dict)
    constant: Fraction = ZERO

    @classmethod
    def variable(cls, index: int) -> LinearTerm:
        return cls({index: ONE})

    @classmethod
    def number(cls, lexeme: str) -> LinearTerm:
        """Return the exact value of a decimal with or without an exponent, of at most ``limits.DIGITS`` characters."""
        if len(lexeme) > limits.DIGITS:
            raise InputError(f"a number has {len(lexeme):,} characters, more than {limits.DIGITS:,}")
        return cls(constant=Fraction(Decimal(lexeme)))

    def scaled(self, factor: Fraction) -> LinearTerm:
        if not factor:
            return LinearTerm()
        return LinearTerm({v: c * factor for v, c in self.coefficients.items()}, self.constant * factor)


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

    def combined(self, operator: str, values: Sequence[Any], mark: object) -> LinearTerm | Formula:
        """Return the value of ``and`` or ``or`` of formulas, or of a comparison or ``apply`` of terms."""
        if operator in ("and", "or"):
            return And(values) if operator == "and" else Or(values)
        if operator in _COMPARISONS:
            left, right = values
            return self.compare(operator, left, right, mark)
        return self.apply(operator, values)

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
    parts = [(LinearTerm.variable(variable), c) for variable, c in ordered]
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


def properties(
    formula: Formula,
    arithmetic: TermArithmetic,
    input_name: Callable[[int], str],
    name: str,
    place: Callable[[Any], str],
) -> tuple[Property, ...]:
    """Return the properties that a formula stands for: it is *sat* if any of them is, and *unsat* if all are.

    Disjuncts of the disjunctive normal form with the same box become one property with several polytopes. A disjunct
    with an empty box is left out, and so is one that a comparison of constants makes false. If comparisons of constants
    have removed all disjuncts, the result is one property with an empty unsafe set.

    The formula was made by ``arithmetic``. ``input_name`` names an input by its index; ``place`` gives the words for
    the place of a bound, by its ``mark``. Several properties are numbered.

    Raises:
        InputError: if the box of every disjunct is empty.
        UnsupportedError: for a normal form beyond ``limits.POLYTOPES``, ``limits.DISJUNCTIVE`` or ``limits.BOUNDS``.
    """
    size = arithmetic.inputs
    if arithmetic.related:
        formula = And((formula, *arithmetic.implied_bounds(formula)))
    form = _NormalForm(formula)
    bounds, rows, choices = form.conjunction(formula, True)
    common: _Keys = {}
    disjuncts: list[_Conjunction] = []
    if form.tighten(common, bounds):
        disjuncts = form.distribute([_Conjunction({}, tuple(rows))], choices)
    groups: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[_Keys, list[Polytope]]] = {}
    for disjunct in disjuncts:
        form.spend(len(disjunct.rows))
        own = disjunct.keys
        if common:
            own = {side: key for side, key in own.items() if key > common.get(side, _NONE)}
        if not common or all(form.agree(side, key, common) for side, key in own.items()):
            sides = tuple(sorted(own))
            groups.setdefault((sides, tuple(map(own.__getitem__, sides))), (own, []))[1].append(disjunct.rows)
    if len(groups) * size > limits.BOUNDS:
        raise UnsupportedError(f"{len(groups):,} boxes of {size:,} inputs are more than {limits.BOUNDS:,} inputs")
    if not groups and form.contradiction is not None:
        raise form.empty("in every case the box" if choices else "the box", input_name, place)
    keys = np.full(2 * size, _NONE)
    keys[list(common)] = list(common.values())
    found = []
    for number, (own, polytopes) in enumerate(groups.values() or [({}, [])]):
        mine = keys.copy()
        mine[list(own)] = list(own.values())
        label = name if len(groups) < 2 else f"{name}#{number}"
        found.append(form.property(mine, tuple(polytopes), label, input_name))
    return tuple(found)


_NONE = -(1 << 60)  # the key where there is no bound

_Keys = dict[int, int]
"""Keys of the tightest bounds by side: 2i is the lower side of the input i, and 2i + 1 the upper one."""

_Choice = tuple[Or | And, bool]
"""A disjunction: an ``Or`` with True, or an ``And`` with False, which stands for the negation of the ``And``."""


class _Conjunction(NamedTuple):
    keys: _Keys
    rows: Polytope


class _NormalForm:
    """The construction of a formula's disjunctive normal form, whose size it counts.

    ``bounds`` has the formula's bounds, ``keys`` side and key of each by its identity, ``values`` the numbers by rank,
    ``contradiction`` side and key of the first two bounds found that no value of their input satisfies.
    """

    def __init__(self, formula: Formula) -> None:
        self.contradiction: tuple[tuple[int, int], tuple[int, int]] | None = None
        self._spent = 0
        found: dict[int, Formula] = {}
        pending: list[Sequence[Formula]] = [(formula,)]
        while pending:
            parts = pending.pop()
            found.update(zip(map(id, parts), parts, strict=True))
            pending += [(p.part,) if isinstance(p, Not) else p.parts for p in parts if not isinstance(p, _LEAVES)]
        self.bounds = [part for part in found.values() if isinstance(part, InputBound)]
        # Floats are compared first, because fractions take ten times the time.
        numbers = {id(bound.value): bound.value for bound in self.bounds}
        ordered = sorted((round_down(value), value, place) for place, value in numbers.items())
        self.values, floats, ranks = list[Fraction](), list[float](), dict[int, int]()
        for rounded, value, place in ordered:
            if not floats or rounded != floats[-1] or value != self.values[-1]:
                floats.append(rounded)
                self.values.append(value)
            ranks[place] = len(floats) - 1
        self._down, pairs = np.array(floats), zip(floats, self.values, strict=True)
        self._inexact = np.array([f.as_integer_ratio() != v.as_integer_ratio() for f, v in pairs], dtype=bool)
        self._up = np.where(self._inexact, above(self._down), self._down)
        signed = ((b, (-2 if b.upper else 2) * ranks[id(b.value)]) for b in self.bounds)
        self.keys = {id(b): (2 * b.variable + b.upper, b.strict + key) for b, key in signed}

    def spend(self, constraints: int) -> None:
        self._spent += constraints
        if self._spent > limits.DISJUNCTIVE:
            raise UnsupportedError(f"the disjunctive form has more than {limits.DISJUNCTIVE:,} constraints")

    def conjunction(self, formula: Formula, positive: bool) -> tuple[list[tuple[int, int]], list[Row], list[_Choice]]:
        """Return bounds (side and key), rows and disjunctions whose conjunction is ``formula`` or its negation."""
        bounds, rows, choices = list[tuple[int, int]](), list[Row](), list[_Choice]()
        for part, kept in flat(formula, positive):
            if isinstance(part, InputBound):
                side, key = pair = self.keys[id(part)]
                bounds.append(pair if kept else (side ^ 1, 1 - key))
            elif isinstance(part, Row):
                rows.append(part if kept else part.negated())
            else:
                choices.append((part, kept))
        return bounds, rows, choices

    def agree(self, side: int, key: int, others: _Keys) -> bool:
        """Return True if a bound and the bound of its input's other side, if there is one, do not contradict."""
        opposite = others.get(side ^ 1, _NONE)
        if key + opposite <= 0:
            return True
        if self.contradiction is None:
            self.contradiction = (side, key), (side ^ 1, opposite)
        return False

    def tighten(self, keys: _Keys, more: Iterable[tuple[int, int]]) -> bool:
        """Tighten bounds in place by more of them; returns False if the bounds of some input then contradict."""
        possible = True
        for side, key in more:
            if key > keys.get(side, _NONE):
                keys[side] = key
                if key + keys.get(side ^ 1, _NONE) > 0:
                    possible = self.agree(side, key, keys)
        return possible

    def distribute(self, found: list[_Conjunction], choices: Sequence[_Choice]) -> list[_Conjunction]:
        """Return the disjuncts, without contradictions, of the conjunction of disjuncts found with disjunctions."""
        for choice in choices:
            options: list[_Conjunction] = []
            for part, positive in flat(*choice, Or):
                bounds, rows, inner = self.conjunction(part, positive)
                tightest: _Keys = {}
                if self.tighten(tightest, bounds):
                    options += self.distribute([_Conjunction(tightest, tuple(rows))], inner)
                if len(options) * len(found) > limits.POLYTOPES:
                    raise UnsupportedError(f"the disjunctive form has more than {limits.POLYTOPES:,} polytopes")
            found = [both for one in found for other in options if (both := self._meet(one, other)) is not None]
        return found

    def _meet(self, one: _Conjunction, other: _Conjunction) -> _Conjunction | None:
        # A row counts as a 32nd of a bound, because copying a row takes far less time than looking a bound up.
        self.spend(1 + (len(one.rows) + len(other.rows)) // 32)
        rows = one.rows + other.rows
        if not (one.keys and other.keys):
            return _Conjunction(one.keys or other.keys, rows)
        self.spend(len(one.keys) + len(other.keys))
        keys = dict(one.keys)
        return _Conjunction(keys, rows) if self.tighten(keys, other.keys.items()) else None

    def property(
        self, keys: np.ndarray, unsafe: tuple[Polytope, ...], name: str, input_name: Callable[[int], str]
    ) -> Property:
        """Return the property of a box with keys (2·size,) by side; partial where a bound is missing."""
        present = keys != _NONE
        ranks = np.where(present, np.where(np.arange(len(keys)) % 2, 1 - keys, keys) >> 1, 0)
        strict = present & (keys % 2 == 1)
        exact, floats = present.copy(), np.empty((2, len(keys) // 2))
        floats[:] = [[-np.inf], [np.inf]]
        if len(self.values):
            exact &= self._inexact[ranks]
            for side, rounded in enumerate((self._down, self._up)):
                floats[side] = np.where(present[side::2], rounded[ranks[side::2]], floats[side])
        low, high = floats
        partial = ""
        if unsafe and not present.all():
            side = int(present.argmin())
            partial = f"the input {input_name(side // 2)} has no {'upper' if side % 2 else 'lower'} bound"
        # What most inputs are, between −1 and 1, is in this part, or where they begin to be larger.
        least = np.minimum(np.minimum(high, 0.0) - 1, below(high))
        most = np.maximum(np.maximum(low, 0.0) + 1, above(low))
        low, high = np.where(np.isinf(low), least, low), np.where(np.isinf(high), most, high)
        where = (np.flatnonzero(exact[side::2]).tolist() for side in (0, 1))
        lower, upper = ({i: self.values[ranks[2 * i + side]] for i in each} for side, each in enumerate(where))
        strict_lower, strict_upper = (frozenset(np.flatnonzero(strict[side::2]).tolist()) for side in (0, 1))
        return Property(Box(low, high, lower, upper, strict_lower, strict_upper), unsafe, name, partial=partial)

    def empty(self, box: str, input_name: Callable[[int], str], place: Callable[[Any], str]) -> InputError:
        texts, places = [], []
        for side, key in sorted(self.contradiction or (), key=lambda bound: bound[0]):
            # The bound is written so, or as the negation of another.
            marks = {self.keys[id(bound)]: bound.mark for bound in reversed(self.bounds)}
            places.append(place(marks.get((side, key), marks.get((side ^ 1, 1 - key), 0))))
            texts += [repr(float(self.values[(1 - key if side % 2 else key) >> 1])), "<" if key % 2 else "<="]
        variable = input_name(side // 2)
        said = f"{texts[0]} {texts[1]} {variable} ({places[0]}) but {variable} {texts[3]} {texts[2]}"
        return InputError(f"{box} is empty: {said}", place=places[1])
