"""Formulas: Boolean combinations of linear constraints, which the readers of property files build, and their meaning.

`properties` brings a formula into disjunctive normal form: boxes of inputs, each with a union of polytopes of outputs.

Bounds of inputs are compared by integers there. All numbers that bound an input are sorted, and r is a number's rank;
s is 1 for a strict bound, else 0. A bound's key is 2r + s for a lower and s − 2r for an upper one, so that of two
bounds of one side the one with the larger key is the tighter. A lower and an upper bound contradict exactly if their
keys have a positive sum. The negation of a bound with the key k is the bound of the other side with the key 1 − k.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.rounding import above, below
from verifiable_relu.spec import limits
from verifiable_relu.spec.property import Box, Polytope, Property, Row, round_down


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


def properties(
    formula: Formula, size: int, input_name: Callable[[int], str], name: str, place: Callable[[Any], str]
) -> tuple[Property, ...]:
    """Return the properties that a formula stands for: it is *sat* if any of them is, and *unsat* if all are.

    Disjuncts of the disjunctive normal form with the same box become one property with several polytopes. A disjunct
    with an empty box is left out, and so is one that a comparison of constants makes false. If comparisons of constants
    have removed all disjuncts, the result is one property with an empty unsafe set.

    The formula is over ``size`` inputs and the outputs of one network. ``input_name`` names an input by its index;
    ``place`` gives the words for the place of a bound, by its ``mark``. Several properties are numbered.

    Raises:
        InputError: if the box of every disjunct is empty.
        UnsupportedError: for a normal form beyond ``limits.POLYTOPES``, ``limits.DISJUNCTIVE`` or ``limits.BOUNDS``.
    """
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
