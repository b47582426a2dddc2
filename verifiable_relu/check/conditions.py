"""VNN-LIB 1.0 and 2.0, the part of them that competitions use: boxes of X, and unions of polytopes of Y."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from math import prod
from typing import Any

from verifiable_relu.check.errors import BadInput

MOST, WORDS, NUMBERS = 100_000, 1 << 22, 1 << 24
"""Most disjuncts of a property; most words; most ends of boxes, and conditions, of all disjuncts together."""

_DECIMAL = re.compile(r"[+-]?(\d{1,4000}(\.\d{0,4000})?|\.\d{1,4000})([eE][+-]?\d{1,3})?", re.ASCII)

_CONTROL = re.compile("[\0-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\ufeff]")
"""Characters that readers of a text may take for its end, an end of line, a blank or a letter."""

_WORD = re.compile(r"[()]|[^ \t\r\n()\[\]]+(?:[ \t\r\n]*\[[^\]()]*\])?|[\[\]]")

_NAME = re.compile(r"[A-Za-z_][A-Za-z_0-9]*")

_TYPE = re.compile(r"(?:[Rr]eal|b?float16|float32|float64)\[((?:[1-9][0-9]{0,8}(?:,[1-9][0-9]{0,8})*)?)\]")
"""A type of elements, and the shape."""


@dataclass(frozen=True)
class HalfSpace:
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

    @property
    def compares(self) -> bool:
        """Whether it asks no more than which of two outputs is the larger one."""
        return len(self.y) == 2 and self.y[0][1] + self.y[1][1] == 0 and not self.most


@dataclass
class UnsafeSet:
    """All X of a box whose Y satisfy all rows.

    Attributes:
        lower: (inputs,) the ends of the box.
        upper: likewise.
        rows: the rows.
        open_ends: inputs that may not be at their lower (number, False) or upper end (number, True).
    """

    lower: list[Fraction]
    upper: list[Fraction]
    rows: list[HalfSpace]
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


Names = dict[str, str]
"""The variables of a file, and which of X_0 …, Y_0 … each is."""

Linear = tuple[dict[str, Fraction], Fraction]
Atoms = list[HalfSpace | End]


def number(text: str) -> Fraction:
    """The number that a decimal is exactly.

    Raises:
        BadInput: if it is none, or one of more than a few thousand digits.
    """
    if not _DECIMAL.fullmatch(text):
        raise BadInput(f"'{text[:40]}' is no decimal number")
    return Fraction(text)


def read_property(text: str, inputs: int, outputs: int) -> list[UnsafeSet]:
    """What a property asks for, as a union; disjuncts are in the order in which the file names them.

    An ``or`` is expanded in the place where it stands, and later ones vary fastest. Empty boxes are left out.

    Raises:
        BadInput: if the file is malformed, declares other variables than the network has, or asks for more than linear
            conditions of Y and bounds of single X.
    """
    if match := _CONTROL.search(text):
        raise BadInput(f"the control character U+{ord(match[0]):04X} is not known{' (NUL)' * (match[0] == chr(0))}")
    items = _parsed(text)
    later = bool(items) and items[0][:1] in (["vnnlib-version"], ["declare-network"])
    known = {f"X_{i}" for i in range(inputs)} | {f"Y_{i}" for i in range(outputs)}
    names = _network(items, inputs, outputs) if later else {}
    always: Atoms = []
    unions = []
    for item in items:
        match item:
            case ["declare-const", str(name), "Real"] | ["declare-fun", str(name), [], "Real"]:
                if later or name in names or name not in known:
                    raise BadInput(f"'{name[:40]}' is declared twice, or is no variable of the network")
                names[name] = name
            case ["assert", condition]:
                union = _union(condition, names)
                if len(union) == 1:
                    always += union[0]
                else:
                    unions.append(union)
            case _:
                raise BadInput(f"'{str(item)[:60]}' is not known")
    if prod(map(len, unions)) * inputs > NUMBERS:
        raise BadInput("the property has too many ends of boxes")
    if set(names.values()) != known:
        raise BadInput(f"{inputs} inputs X and {outputs} outputs Y are expected to be declared")
    free: list[End | None] = [None] * inputs
    lower, upper = _narrowed(free, always, False), _narrowed(free, always, True)
    rows = [atom for atom in always if isinstance(atom, HalfSpace)]
    found = []
    for atoms in _joined(unions):
        sides = _narrowed(lower, atoms, False), _narrowed(upper, atoms, True)
        ends = [[end for end in side if end is not None] for side in sides]
        if min(map(len, ends)) < inputs:
            raise BadInput("an input is not bounded on both sides")
        opened = {(end.at, end.above) for side in ends for end in side if end.strict}
        low, high = ([end.value for end in side] for side in ends)
        # An end that is open leaves nothing of a single point.
        points = {at for at, (below, above) in enumerate(zip(low, high, strict=True)) if below == above}
        if any(below > above for below, above in zip(low, high, strict=True)) or points & {at for at, _ in opened}:
            continue
        found.append(UnsafeSet(low, high, rows + [atom for atom in atoms if isinstance(atom, HalfSpace)], opened))
    return found


def _network(items: list[Any], inputs: int, outputs: int) -> Names:
    """The elements of the input and the output that a 2.0 file declares, in row-major order, as those of 1.0."""
    if items[0][:1] == ["vnnlib-version"] and items.pop(0) != ["vnnlib-version", "<2.0>"]:
        raise BadInput("the version is not known")
    match items[:1]:
        case [["declare-network", str(), ["declare-input", str(x), str(of_x)], ["declare-output", str(y), str(of_y)]]]:
            items.pop(0)
        case _:
            raise BadInput("one network with one input and one output is expected to be declared")
    names: Names = {}
    for kind, name, type_, size in (("X", x, of_x, inputs), ("Y", y, of_y, outputs)):
        found = _TYPE.fullmatch(type_)
        if not found or not _NAME.fullmatch(name) or x == y:
            raise BadInput(f"'{name[:40]}' is not declared as real numbers of a shape")
        shape = [int(extent) for extent in found[1].split(",")] if found[1] else []
        if prod(shape) != size:
            raise BadInput(f"'{name[:40]}' has {prod(shape)} elements, and the network {size}")
        for at, index in enumerate(product(*map(range, shape))):
            names[f"{name}[{','.join(map(str, index))}]" if shape else name] = f"{kind}_{at}"
    return names


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
    """The expressions of a file as nested lists; indices, without blanks and leading zeros, belong to their words."""
    stack: list[list[Any]] = [[]]
    for count, match in enumerate(_WORD.finditer(re.sub(r";[^\r\n]*", " ", text))):
        word = match[0]
        if count >= WORDS:
            raise BadInput(f"it has more than {WORDS} words")
        if "[" in word:
            word = re.sub(r"(?<=[\[,])0+(?=[0-9])", "", re.sub(r"[ \t\r\n]", "", word))
        if word == "(":
            stack.append([])
        elif word != ")":
            if len(stack) == 1:
                raise BadInput("words are outside of brackets")
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
        if sum(map(len, every)) * len(union) + sum(map(len, union)) * len(every) > NUMBERS:
            raise BadInput("the property's disjuncts have too many conditions")
        every = [[*first, *second] for first, second in product(every, union)]
    return every


def _union(condition: Any, names: Names) -> list[Atoms]:
    """A condition as a union of conjunctions."""
    match condition:
        case ["or", *parts] if parts:
            return [atoms for part in parts for atoms in _union(part, names)]
        case ["and", *parts] if parts:
            return _joined([_union(part, names) for part in parts])
        case [("<=" | "<") as sign, left, right]:
            return _side(left, right, sign == "<", names)
        case [(">=" | ">") as sign, left, right]:
            return _side(right, left, sign == ">", names)
        case [("=" | "=="), left, right]:
            return _joined([_side(left, right, False, names), _side(right, left, False, names)])
        case [("distinct" | "!="), left, right]:
            return [*_side(left, right, True, names), *_side(right, left, True, names)]
    raise BadInput(f"the condition '{str(condition)[:60]}' is not known")


def _side(left: Any, right: Any, strict: bool, names: Names) -> list[Atoms]:
    """left ≤ right as a union; without variables, all or nothing."""
    for term, value, above in ((left, right, True), (right, left, False)):
        # Most conditions are ends of the box, which need no sums.
        if isinstance(value, str) and value not in names:
            variable, factor = _multiple(term, names)
            if variable[:2] == "X_" and factor:
                return [[End(int(variable[2:]), above == (factor > 0), number(value) / factor, strict)]]
    found, constant = _linear(["-", left, right], names)
    found = {name: value for name, value in found.items() if value}
    if found and all(name[0] == "Y" for name in found):
        return [[HalfSpace(tuple(sorted((int(name[2:]), value) for name, value in found.items())), -constant, strict)]]
    if len(found) == 1:
        ((name, value),) = found.items()
        return [[End(int(name[2:]), value > 0, -constant / value, strict)]]
    if not found:
        return [[]] if constant < 0 or (constant == 0 and not strict) else []
    raise BadInput("a condition of several X, or of X and Y, is not known")


def _multiple(term: Any, names: Names) -> tuple[str, Fraction]:
    """The variable and the factor of a term that is a variable or a number times one; otherwise no variable."""
    match term:
        case str(name) if name in names:
            return names[name], Fraction(1)
        case ["*", str(factor), str(name)] if name in names and factor not in names:
            return names[name], number(factor)
    return "", Fraction(0)


def _linear(term: Any, names: Names) -> Linear:
    match term:
        case str(word) if word in names:
            return {names[word]: Fraction(1)}, Fraction(0)
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
