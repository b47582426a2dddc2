"""VNN-LIB 1.0 and 2.0, the part of them that competitions use: boxes of X, and unions of polytopes of Y."""

from __future__ import annotations

import re
from collections import defaultdict
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
_WORD = re.compile(r"[()]|[^ \t\r\n()\[\]]+(?:[ \t\r\n]*\[[^\]()]*\])?|[\[\]]")
_NAME = re.compile(r"[A-Za-z_][A-Za-z_0-9]*")
_TYPE = re.compile(r"(?:[Rr]eal|b?float16|float32|float64)\[((?:[1-9][0-9]{0,8}(?:,[1-9][0-9]{0,8})*)?)\]")


@dataclass(frozen=True)
class RowCondition:
    """Σ coefficient·Y ≤ most (< if ``strict``); ``y`` has the coefficients that are not zero, by output."""

    y: tuple[tuple[int, Fraction], ...]
    most: Fraction
    strict: bool = False

    def key(self) -> tuple[Any, ...]:
        """Return what rows that are positive multiples of one another share, strict or not."""
        size = abs(self.y[0][1])
        return (*((i, c / size) for i, c in self.y), self.most / size)

    @property
    def compares(self) -> bool:
        """Return True if it asks no more than which of two outputs is the larger one."""
        return len(self.y) == 2 and self.y[0][1] + self.y[1][1] == 0 and not self.most


@dataclass
class Disjunct:
    """All X of a box whose Y satisfy all rows.

    Attributes:
        lower, upper: (inputs,) the ends of the box.
        open_ends: inputs that may not be at their lower (number, False) or upper end (number, True).
    """

    lower: list[Fraction]
    upper: list[Fraction]
    rows: list[RowCondition]
    open_ends: set[tuple[int, bool]]


_End = tuple[int, bool, Fraction, bool]
"""An input, whether it is at most (or at least) a number, the number, and whether it is not that number itself."""

_Atoms = list[RowCondition | _End]


def decimal(text: str) -> Fraction:
    """Return the number that a decimal, of a few thousand digits at most, is exactly."""
    BadInput.when(not _DECIMAL.fullmatch(text), f"'{text[:40]}' is no decimal number")
    return Fraction(text)


def read_property(text: str, inputs: int, outputs: int) -> list[Disjunct]:
    """Return a property as a union; disjuncts are in the order in which the file names them.

    An ``or`` is expanded in the place where it stands, and later ones vary fastest. Empty boxes are left out.

    Raises:
        BadInput: if the file is malformed, declares other variables than the network has, or asks for more than linear
            conditions of Y and bounds of single X.
    """
    if match := _CONTROL.search(text):
        raise BadInput(f"the control character U+{ord(match[0]):04X} is not known{' (NUL)' * (match[0] == chr(0))}")
    items = _parsed(text)
    is_second = bool(items) and items[0][:1] in (["vnnlib-version"], ["declare-network"])
    names = _declared(items, inputs, outputs) if is_second else {}
    always: _Atoms = []
    unions = []
    for item in items:
        match item:
            case ["declare-const", str(name), "Real"] | ["declare-fun", str(name), [], "Real"] if not is_second:
                BadInput.when(name in names, f"'{name[:40]}' is declared twice")
                names[name] = name
            case ["assert", condition]:
                union = _union(condition, names)
                always += union[0] if len(union) == 1 else []
                unions += [union] if len(union) != 1 else []
            case _:
                raise BadInput(f"'{str(item)[:60]}' is not known")
    BadInput.when(prod(map(len, unions)) * inputs > NUMBERS, "the property has too many ends of boxes")
    known = {f"X_{i}" for i in range(inputs)} | {f"Y_{i}" for i in range(outputs)}
    declared = f"{inputs} inputs X and {outputs} outputs Y are expected to be declared"
    BadInput.when(set(names.values()) != known, declared)
    rows, ends = [atom for atom in always if isinstance(atom, RowCondition)], _narrowed({}, always)
    made = (_disjunct(_narrowed(ends, atoms), [*rows, *atoms], inputs) for atoms in _conjunction(unions))
    return [disjunct for disjunct in made if disjunct is not None]


def _narrowed(ends: dict[tuple[int, bool], _End], atoms: _Atoms) -> dict[tuple[int, bool], _End]:
    found = dict(ends)
    for atom in atoms:
        if not isinstance(atom, RowCondition):
            known = found.get(atom[:2], atom)
            # Of two equal ends the strict one leaves less.
            found[atom[:2]] = min(known, atom, key=lambda end: (end[2] if end[1] else -end[2], not end[3]))
    return found


def _disjunct(ends: dict[tuple[int, bool], _End], atoms: _Atoms, inputs: int) -> Disjunct | None:
    """Return the disjunct of ends and of the rows among atoms; None if its box is empty."""
    BadInput.when(len(ends) < 2 * inputs, "an input is not bounded on both sides")
    low, high = ([ends[i, above][2] for i in range(inputs)] for above in (False, True))
    strict = {place for place, end in ends.items() if end[3]}
    # An end that is open leaves nothing of a single point.
    points = {place for at in range(inputs) if low[at] == high[at] for place in ((at, False), (at, True))}
    if any(below > above for below, above in zip(low, high, strict=True)) or points & strict:
        return None
    return Disjunct(low, high, [atom for atom in atoms if isinstance(atom, RowCondition)], strict)


def _parsed(text: str) -> list[Any]:
    """Return a file's expressions as nested lists; indices, without blanks and leading zeros, belong to their words."""
    stack: list[list[Any]] = [[]]
    for number, match in enumerate(_WORD.finditer(re.sub(r";[^\r\n]*", " ", text))):
        word = match[0]
        BadInput.when(number >= WORDS, f"it has more than {WORDS} words")
        if word == "(":
            stack.append([])
            BadInput.when(len(stack) > 100, "brackets are nested too deeply")
            continue
        BadInput.when(len(stack) == 1, f"{'a bracket is closed' if word == ')' else 'words are'} outside of brackets")
        if word == ")":
            done = stack.pop()
            stack[-1].append(done)
        else:
            if "[" in word:
                word = re.sub(r"(?<=[\[,])0+(?=[0-9])", "", re.sub(r"[ \t\r\n]", "", word))
            stack[-1].append(word)
    BadInput.when(len(stack) > 1, "a bracket is not closed")
    return stack[0]


def _declared(items: list[Any], inputs: int, outputs: int) -> dict[str, str]:
    """Take the declarations of a 2.0 file; return which of X_0 …, Y_0 … each element is, in row-major order."""
    wrong = items[0][:1] == ["vnnlib-version"] and items.pop(0) != ["vnnlib-version", "<2.0>"]
    BadInput.when(wrong, "the version is not known")
    match items[:1]:
        case [["declare-network", str(), ["declare-input", str(x), str(of_x)], ["declare-output", str(y), str(of_y)]]]:
            items.pop(0)
        case _:
            raise BadInput("one network with one input and one output is expected to be declared")
    names = {}
    for kind, name, type_, size in (("X", x, of_x, inputs), ("Y", y, of_y, outputs)):
        found = _TYPE.fullmatch(type_)
        if not found or not _NAME.fullmatch(name) or x == y:
            raise BadInput(f"'{name[:40]}' is not declared as real numbers of a shape")
        shape = [int(extent) for extent in found[1].split(",")] if found[1] else []
        BadInput.when(prod(shape) != size, f"'{name[:40]}' has {prod(shape)} elements, and the network {size}")
        for at, index in enumerate(product(*map(range, shape))):
            names[f"{name}[{','.join(map(str, index))}]" if shape else name] = f"{kind}_{at}"
    return names


def _conjunction(unions: Iterable[list[_Atoms]]) -> list[_Atoms]:
    every: list[_Atoms] = [[]]
    for union in unions:
        BadInput.when(len(every) * len(union) > MOST, f"the property has more than {MOST} disjuncts")
        conditions = sum(map(len, every)) * len(union) + sum(map(len, union)) * len(every)
        BadInput.when(conditions > NUMBERS, "the property's disjuncts have too many conditions")
        every = [[*first, *second] for first, second in product(every, union)]
    return every


def _union(condition: Any, names: dict[str, str]) -> list[_Atoms]:
    match condition:
        case ["or", *parts] if parts:
            return [atoms for part in parts for atoms in _union(part, names)]
        case ["and", *parts] if parts:
            return _conjunction([_union(part, names) for part in parts])
        case [("<=" | "<" | ">=" | ">" | "=" | "==" | "distinct" | "!=") as sign, left, right]:
            strict = sign in ("<", ">", "distinct", "!=")
            below, above = (_side(["-", *pair], strict, names) for pair in ((left, right), (right, left)))
            if sign[0] in "<>":
                return below if sign[0] == "<" else above
            return _conjunction([below, above]) if sign[0] == "=" else [*below, *above]
    raise BadInput(f"the condition '{str(condition)[:60]}' is not known")


def _side(difference: Any, strict: bool, names: dict[str, str]) -> list[_Atoms]:
    """Return difference ≤ 0 as a union; without variables, all or nothing."""
    found: dict[str, Fraction] = defaultdict(Fraction)
    for name, value in _terms(difference, names):
        found[name] += value
    constant = found.pop("", Fraction(0))
    terms = sorted(((name[0], int(name[2:])), value) for name, value in found.items() if value)
    if not terms:
        return [[]] if constant < 0 or (constant == 0 and not strict) else []
    if all(kind == "Y" for (kind, _), _ in terms):
        return [[RowCondition(tuple((at, value) for (_, at), value in terms), -constant, strict)]]
    BadInput.when(len(terms) > 1, "a condition of several X, or of X and Y, is not known")
    (((_, at), value),) = terms
    return [[(at, value > 0, -constant / value, strict)]]


def _terms(term: Any, names: dict[str, str]) -> list[tuple[str, Fraction]]:
    """Return the variables of a linear term and their coefficients; a constant is that of the name ""."""
    match term:
        case str(word):
            return [(names[word], Fraction(1))] if word in names else [("", decimal(word))]
        case ["-", only]:
            return [(name, -value) for name, value in _terms(only, names)]
        case [("+" | "-") as sign, first, *rest] if rest:
            later = [(name, value) for part in rest for name, value in _terms(part, names)]
            return [*_terms(first, names), *((name, value if sign == "+" else -value) for name, value in later)]
        case ["*", first, second]:
            parts = _terms(first, names), _terms(second, names)
            for linear, factor in (parts, parts[::-1]):
                if not any(name for name, _ in factor):
                    times = sum((value for _, value in factor), Fraction(0))
                    return [(name, times * value) for name, value in linear]
    raise BadInput(f"the term '{str(term)[:60]}' is not known")
