"""VNN-LIB 1.0, the part of it that competitions use: boxes of X, and unions of polytopes of Y."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from typing import Any

from verifiable_relu.check.errors import BadInput

MOST = 100_000
"""Most disjuncts of a property."""

_DECIMAL = re.compile(r"[+-]?(\d{1,4000}(\.\d{0,4000})?|\.\d{1,4000})([eE][+-]?\d{1,3})?", re.ASCII)


@dataclass(frozen=True)
class Row:
    """Σ coefficient·Y ≤ most.

    Attributes:
        y: the coefficients that are not zero, by the number of the output.
        most: the right side.
        strict: whether < is meant.
    """

    y: tuple[tuple[int, Fraction], ...]
    most: Fraction
    strict: bool = False

    def key(self) -> tuple[Any, ...]:
        """The same for rows that are positive multiples of one another, strict or not."""
        size = abs(self.y[0][1])
        return (*((i, c / size) for i, c in self.y), self.most / size)


@dataclass
class Disjunct:
    """All X of a box whose Y satisfy all rows.

    Attributes:
        lower: (inputs,) the ends of the box.
        upper: likewise.
        rows: the rows.
        open_ends: inputs that may not be at their lower (number, False) or upper end (number, True).
    """

    lower: list[Fraction]
    upper: list[Fraction]
    rows: list[Row]
    open_ends: set[tuple[int, bool]]


@dataclass(frozen=True)
class End:
    """An end of the box: X ≤ value (``above``) or X ≥ value, or the strict one."""

    at: int
    above: bool
    value: Fraction
    strict: bool

    @property
    def tightness(self) -> tuple[Fraction, bool]:
        """Less for the end that leaves less; of two equal ones that is the strict one."""
        return self.value if self.above else -self.value, not self.strict


Linear = tuple[dict[str, Fraction], Fraction]
Atoms = list[Row | End]


def number(text: str) -> Fraction:
    """The number that a decimal is exactly.

    Raises:
        BadInput: if it is none, or one of more than a few thousand digits.
    """
    if not _DECIMAL.fullmatch(text):
        raise BadInput(f"'{text[:40]}' is no decimal number")
    return Fraction(text)


def read_property(text: str, inputs: int, outputs: int) -> list[Disjunct]:
    """What a property asks for, as a union; disjuncts are in the order in which the file names them.

    An ``or`` is expanded in the place where it stands, and later ones vary fastest.

    Raises:
        BadInput: if the file is malformed, declares other variables than the network has, or asks for more than linear
            conditions of Y and bounds of single X.
    """
    names = {f"X_{i}" for i in range(inputs)} | {f"Y_{i}" for i in range(outputs)}
    declared: set[str] = set()
    always: Atoms = []
    unions = []
    for item in _parsed(text):
        match item:
            case ["declare-const", str(name), "Real"] | ["declare-fun", str(name), [], "Real"]:
                if name in declared or name not in names:
                    raise BadInput(f"'{name[:40]}' is declared twice, or is no variable of the network")
                declared.add(name)
            case ["assert", condition]:
                union = _union(condition, declared)
                if len(union) == 1:
                    always += union[0]
                else:
                    unions.append(union)
            case _:
                raise BadInput(f"'{str(item)[:60]}' is not known")
    if declared != names:
        raise BadInput(f"{inputs} inputs X and {outputs} outputs Y are expected to be declared")
    free: list[End | None] = [None] * inputs
    lower, upper = _narrowed(free, always, False), _narrowed(free, always, True)
    rows = [atom for atom in always if isinstance(atom, Row)]
    found = []
    for atoms in _joined(unions):
        sides = _narrowed(lower, atoms, False), _narrowed(upper, atoms, True)
        ends = [[end for end in side if end is not None] for side in sides]
        if min(map(len, ends)) < inputs:
            raise BadInput("an input is not bounded on both sides")
        opened = {(end.at, end.above) for side in ends for end in side if end.strict}
        low, high = ([end.value for end in side] for side in ends)
        found.append(Disjunct(low, high, rows + [atom for atom in atoms if isinstance(atom, Row)], opened))
    return found


def _narrowed(ends: list[End | None], atoms: Atoms, above: bool) -> list[End | None]:
    """The ends of a box on one side, with those that the atoms give."""
    found = list(ends)
    for atom in atoms:
        if isinstance(atom, End) and atom.above == above:
            known = found[atom.at]
            if known is None or atom.tightness < known.tightness:
                found[atom.at] = atom
    return found


def _parsed(text: str) -> list[Any]:
    """The expressions of a file as nested lists of words."""
    stack: list[list[Any]] = [[]]
    for word in re.findall(r"[()]|[^\s()]+", re.sub(r";[^\r\n]*", " ", text)):
        if word == "(":
            stack.append([])
        elif word != ")":
            stack[-1].append(word)
        elif len(stack) > 1:
            done = stack.pop()
            stack[-1].append(done)
        else:
            raise BadInput("a bracket is closed that was not opened")
        if len(stack) > 100:
            raise BadInput("brackets are nested too deeply")
    if len(stack) > 1:
        raise BadInput("a bracket is not closed")
    return stack[0]


def _joined(unions: Iterable[list[Atoms]]) -> list[Atoms]:
    """The conjunction of unions, as a union."""
    every: list[Atoms] = [[]]
    for union in unions:
        if len(every) * len(union) > MOST:
            raise BadInput(f"the property has more than {MOST} disjuncts")
        every = [[*first, *second] for first, second in product(every, union)]
    return every


def _union(condition: Any, names: set[str]) -> list[Atoms]:
    """A condition as a union of conjunctions."""
    match condition:
        case ["or", *parts] if parts:
            return [atoms for part in parts for atoms in _union(part, names)]
        case ["and", *parts] if parts:
            return _joined([_union(part, names) for part in parts])
        case [("<=" | "<") as sign, left, right]:
            return [[_atom(left, right, sign == "<", names)]]
        case [(">=" | ">") as sign, left, right]:
            return [[_atom(right, left, sign == ">", names)]]
    raise BadInput(f"the condition '{str(condition)[:60]}' is not known")


def _atom(left: Any, right: Any, strict: bool, names: set[str]) -> Row | End:
    """left ≤ right."""
    for name, value, above in ((left, right, True), (right, left, False)):
        # Most conditions are ends of the box, which need no sums.
        words = isinstance(name, str) and isinstance(value, str)
        if words and name[:2] == "X_" and name in names and value not in names:
            return End(int(name[2:]), above, number(value), strict)
    found, constant = _linear(["-", left, right], names)
    found = {name: value for name, value in found.items() if value}
    if found and all(name[0] == "Y" for name in found):
        return Row(tuple(sorted((int(name[2:]), value) for name, value in found.items())), -constant, strict)
    if len(found) == 1:
        ((name, value),) = found.items()
        return End(int(name[2:]), value > 0, -constant / value, strict)
    raise BadInput("a condition of several X, or of X and Y, or of neither, is not known")


def _linear(term: Any, names: set[str]) -> Linear:
    match term:
        case str(word) if word in names:
            return {word: Fraction(1)}, Fraction(0)
        case str(word):
            return {}, number(word)
        case ["-", only]:
            return _times(_linear(only, names), Fraction(-1))
        case [("+" | "-") as sign, first, *rest] if rest:
            found, constant = _linear(first, names)
            for part in rest:
                more, other = _times(_linear(part, names), Fraction(1 if sign == "+" else -1))
                found = {name: found.get(name, Fraction(0)) + more.get(name, Fraction(0)) for name in {*found, *more}}
                constant += other
            return found, constant
        case ["*", first, second]:
            one, two = _linear(first, names), _linear(second, names)
            if not one[0]:
                return _times(two, one[1])
            if not two[0]:
                return _times(one, two[1])
    raise BadInput(f"the term '{str(term)[:60]}' is not known")


def _times(linear: Linear, factor: Fraction) -> Linear:
    return {name: factor * value for name, value in linear[0].items()}, factor * linear[1]
