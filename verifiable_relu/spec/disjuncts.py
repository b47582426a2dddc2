"""The translation of a formula into properties: boxes of inputs, each with a union of polytopes of outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.spec import limits
from verifiable_relu.spec.formula import And, Bound, Formula, Not, Or, negate
from verifiable_relu.spec.property import Box, Polytope, Property, Row, round_down, round_up


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
        InputError: for an input without a bound on one side, or if the box of every disjunct is empty.
        UnsupportedError: for a disjunctive form beyond ``limits.POLYTOPES`` or ``limits.DISJUNCTIVE``.
    """
    form = _Form()
    bounds, rows, choices = _conjunction(formula, True)
    common: _Bounds = {}
    disjuncts: list[_Disjunct] = []
    if form.tighten(common, bounds):
        disjuncts = form.distribute([_Disjunct({}, tuple(rows))], choices)
    for disjunct in disjuncts:
        form.spend(len(disjunct.rows))
    sides = _Sides(size)
    sides.set(bound[:4] for bound in common.values())
    groups: dict[frozenset[_Side], list[Polytope]] = {}
    for disjunct in disjuncts:
        own = [b for key, b in disjunct.bounds.items() if key not in common or b.tighter(common[key])]
        if all(form.agree(bound, common.get((bound.variable, not bound.upper))) for bound in own):
            groups.setdefault(frozenset(bound[:4] for bound in own), []).append(disjunct.rows)
    if not groups and form.contradiction is not None:
        raise _empty("in every case the box" if choices else "the box", form.contradiction, input_name, place)
    if not groups:
        return (Property(sides.box(input_name), (), name),)
    found: list[Property] = []
    for number, (own_bounds, polytopes) in enumerate(groups.items()):
        mine = sides.copy()
        mine.set(own_bounds)
        label = name if len(groups) == 1 else f"{name}#{number}"
        found.append(Property(mine.box(input_name), tuple(polytopes), label))
    return tuple(found)


_Bounds = dict[tuple[int, bool], Bound]
"""The tightest bounds found, by input and side; the side is whether the bound is an upper one."""


class _Disjunct(NamedTuple):
    """A conjunction of bounds of inputs and rows over outputs."""

    bounds: _Bounds
    rows: Polytope


_Choice = tuple[Or | And, bool]
"""A disjunction: an ``Or`` with True, or an ``And`` with False, which stands for the negation of the ``And``."""


def _conjunction(formula: Formula, positive: bool) -> tuple[list[Bound], list[Row], list[_Choice]]:
    """The bounds, rows and disjunctions whose conjunction is ``formula`` (``positive``) or its negation, in order."""
    bounds: list[Bound] = []
    rows: list[Row] = []
    choices: list[_Choice] = []
    pending = [(formula, positive)]
    while pending:
        part, positive = pending.pop()
        match part:
            case Not():
                pending.append((part.part, not positive))
            case And() | Or():
                if isinstance(part, And) is positive or len(part.parts) == 1:
                    pending.extend((each, positive) for each in reversed(part.parts))
                else:
                    choices.append((part, positive))
            case _:
                leaf = part if positive else negate(part)
                if isinstance(leaf, Bound):
                    bounds.append(leaf)
                elif isinstance(leaf, Row):
                    rows.append(leaf)
    return bounds, rows, choices


def _options(choice: _Choice) -> list[tuple[Formula, bool]]:
    """The parts of a disjunction in order, with those of nested disjunctions in these disjunctions' place."""
    options: list[tuple[Formula, bool]] = []
    pending: list[tuple[Formula, bool]] = [choice]
    while pending:
        part, positive = pending.pop()
        if isinstance(part, Not):
            pending.append((part.part, not positive))
        elif isinstance(part, And | Or) and (isinstance(part, Or) is positive or len(part.parts) == 1):
            pending.extend((each, positive) for each in reversed(part.parts))
        else:
            options.append((part, positive))
    return options


class _Form:
    """The construction of a disjunctive form, whose size it counts.

    Attributes:
        contradiction: the first pair of a lower and an upper bound found that no value of their input satisfies.
    """

    def __init__(self) -> None:
        self.contradiction: tuple[Bound, Bound] | None = None
        self._spent = 0

    def spend(self, constraints: int) -> None:
        """Count constraints towards ``limits.DISJUNCTIVE``.

        Raises:
            UnsupportedError: if the count exceeds the limit.
        """
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

        Raises:
            UnsupportedError: beyond ``limits.POLYTOPES`` or ``limits.DISJUNCTIVE``.
        """
        for choice in choices:
            options: list[_Disjunct] = []
            for part, positive in _options(choice):
                bounds, rows, inner = _conjunction(part, positive)
                tightest: _Bounds = {}
                if self.tighten(tightest, bounds):
                    options += self.distribute([_Disjunct(tightest, tuple(rows))], inner)
                if len(options) * len(found) > limits.POLYTOPES:
                    raise UnsupportedError(f"the disjunctive form has more than {limits.POLYTOPES:,} polytopes")
            found = [both for one in found for other in options if (both := self._meet(one, other)) is not None]
        return found

    def _meet(self, one: _Disjunct, other: _Disjunct) -> _Disjunct | None:
        # A row counts as a 32nd of a bound, because copying a row takes far less time than looking a bound up.
        self.spend(1 + len(one.bounds) + len(other.bounds) + (len(one.rows) + len(other.rows)) // 32)
        if not other.bounds:
            return _Disjunct(one.bounds, one.rows + other.rows)
        bounds = dict(one.bounds)
        return _Disjunct(bounds, one.rows + other.rows) if self.tighten(bounds, other.bounds.values()) else None


_Side = tuple[int, bool, Fraction, bool]
"""The first four fields of a ``Bound``, without the mark."""


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

    def set(self, bounds: Iterable[_Side]) -> None:
        for variable, upper, value, strict in bounds:
            rounded = round_up(value) if upper else round_down(value)
            self.floats[upper][variable] = rounded
            if rounded.as_integer_ratio() == (value.numerator, value.denominator):
                self.exact[upper].pop(variable, None)
            else:
                self.exact[upper][variable] = value
            (self.strict[upper].add if strict else self.strict[upper].discard)(variable)

    def box(self, input_name: Callable[[int], str]) -> Box:
        for upper, values in self.floats.items():
            missing = np.flatnonzero(np.isinf(values))
            if missing.size:
                raise InputError(f"the input {input_name(missing[0])} has no {'upper' if upper else 'lower'} bound")
        return Box(
            self.floats[False],
            self.floats[True],
            self.exact[False],
            self.exact[True],
            frozenset(self.strict[False]),
            frozenset(self.strict[True]),
        )


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
