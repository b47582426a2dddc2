"""The reader of VNN-LIB 1.0, the subset of SMT-LIB in which properties of networks are written.

The reader passes over the tokens once, with a stack of open parentheses: when a parenthesis closes, its content becomes
a term, a formula or a command. Unlike in SMT-LIB, numbers may have a sign, an exponent, and no digits before or after
the point (``-1e-5``, ``.5``, ``1.``), since many property files have such numbers, whose meaning is clear.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.spec import limits
from verifiable_relu.spec.disjuncts import properties
from verifiable_relu.spec.formula import FALSE, TRUE, And, Bound, Formula, Not, Or, negate
from verifiable_relu.spec.lexical import Source
from verifiable_relu.spec.property import Row
from verifiable_relu.spec.specfile import SpecFile, Variable, stem
from verifiable_relu.spec.terms import ONE, Arithmetic, LinearTerm, number

_NUMERAL = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?")
_VARIABLE = re.compile(r"([XY])_(0|[1-9][0-9]*)")
_QUOTED = re.compile(r"\|([XY]_[0-9]+)\|")
_LONGEST_INDEX = 9
_REMEMBERED = 500_000
"""The most tokens of variables and numbers whose terms are kept, because files repeat the same numbers."""
_SHOWN = 40
"""The most characters of a token that a message quotes."""
_COMPARISONS = ("<=", "<", ">=", ">", "=")
_IGNORED = {"set-logic", "set-info", "set-option"}
_QUESTIONS = {"check-sat", "get-model", "get-value", "exit"}
_COMMANDS = {"declare-const", "declare-fun", "assert", *_IGNORED, *_QUESTIONS}
_OF_2 = {"vnnlib-version", "declare-network"}


def parse(source: Source, path: Path) -> SpecFile:
    """Read the text of a 1.0 file; the properties are named after ``path``.

    Raises:
        InputError, UnsupportedError: with the place in the file, but naming no file.
    """
    return _Reader(source).read(path)


class _Reader:
    """The state of reading one file.

    Attributes:
        source: the text.
        arithmetic: the arithmetic of the file's terms.
        terms: the term of each token that stands for a variable or a number.
        declared: the indices of the declared variables, inputs under "X" and outputs under "Y".
        asserted: the asserted formulas.
        question: the first command that asks for an answer, such as "check-sat"; empty before it.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.arithmetic = Arithmetic()
        self.terms: dict[str, LinearTerm] = {}
        self.declared: dict[str, list[int]] = {"X": [], "Y": []}
        self.asserted: list[Formula] = []
        self.question = ""

    def read(self, path: Path) -> SpecFile:
        self.evaluate()
        inputs, outputs = self.variable("X", "input"), self.variable("Y", "output")
        formula = And(tuple(self.asserted))
        found = properties(formula, inputs.size, lambda i: f"X_{i}", stem(path), self.source.place)
        return SpecFile(path, "1.0", found, inputs, outputs)

    def evaluate(self) -> None:
        """Execute all commands of the file.

        A frame of the stack belongs to an open parenthesis: a list of its position and of its content so far.
        """
        place, stack = self.source.place, list[list[Any]]()
        for token, start, end in self.source.tokens():
            if token == "(":
                stack.append([start])
            elif token == ")":
                if not stack:
                    raise InputError("a closing parenthesis has no opening one", place=place(start))
                self.close(stack.pop(), stack, end)
            elif isinstance(token, tuple):
                if stack and token[0] in _COMMANDS:
                    raise self.unclosed(stack[0][0])
                self.close([start, *token], stack, end)
            elif not stack:
                raise InputError(f"'{_shown(token)}' is outside of parentheses", place=place(start))
            else:
                if len(stack) > 1 and len(stack[-1]) == 1 and token in _COMMANDS:
                    raise self.unclosed(stack[0][0])
                stack[-1].append(token)
                if len(stack[-1]) > limits.WORDS:
                    raise InputError(f"more than {limits.WORDS:,} words in one parenthesis", place=place(start))
        if stack:
            raise self.unclosed(stack[0][0])

    def close(self, frame: list[Any], stack: list[list[Any]], end: int) -> None:
        """Execute a complete frame as a command, or add its term or formula to the frame around it."""
        try:
            if not stack:
                self.command(frame)
            else:
                stack[-1].append(self.value(frame) if stack[0][1:2] == ["assert"] else frame)
        except InputError as error:
            said = f"{error.message}: {self.source.quote(frame[0], end)}"
            raise type(error)(said, place=self.source.place(frame[0])) from None

    def unclosed(self, position: int) -> InputError:
        return InputError("this parenthesis is never closed", place=self.source.place(position))

    def command(self, frame: list[Any]) -> None:
        match frame[1:]:
            case ["assert" | "declare-const" | "declare-fun" as head, *_] if self.question:
                # An SMT solver answers a question about the assertions before it alone.
                raise InputError(f"'{head}' comes after '{self.question}'")
            case ["assert", body]:
                self.asserted.append(self.formula(body))
            case ["declare-const", str(name), str(sort)]:
                self.declare(name, sort, frame[0])
            case ["declare-fun", str(name), [_], str(sort)]:
                self.declare(name, sort, frame[0])
            case [str(head), *_] if head in _IGNORED:
                pass
            case [str(head), *_] if head in _QUESTIONS:
                self.question = head
            case [str(head), *_] if head in _COMMANDS:
                raise InputError(f"'{head}' has the wrong number or kind of arguments")
            case [str(head), *_] if head in _OF_2:
                raise InputError(f"'{head}' is a command of VNN-LIB 2.0, whose files begin with (vnnlib-version <2.0>)")
            case [str(head), *_]:
                raise UnsupportedError(f"the command '{_shown(head)}' is not supported")
            case _:
                raise InputError("a command is expected")

    def declare(self, name: str, sort: str, position: int) -> None:
        name = _unquoted(name)
        match = _VARIABLE.fullmatch(name)
        if not match:
            raise UnsupportedError(f"'{_shown(name)}' is neither an input X_i nor an output Y_i")
        if len(match.group(2)) > _LONGEST_INDEX:
            raise InputError(f"the index of '{_shown(name)}' is too large")
        if sort != "Real":
            raise UnsupportedError(f"'{name}' is of sort {_shown(sort)}, only Real is supported")
        if name in self.terms:
            raise InputError(f"'{name}' is declared twice")
        kind, index = match.group(1), int(match.group(2))
        self.declared[kind].append(index)
        one = {index: ONE}
        self.terms[name] = LinearTerm(one) if kind == "X" else LinearTerm(outputs=one)

    def variable(self, kind: str, role: str) -> Variable:
        numbers = self.declared[kind]
        if not numbers:
            empty = not self.source.text.strip()
            raise InputError("the file is empty" if empty else f"no {role} variables ({kind}_0 …) are declared")
        missing = next((i for i, number in enumerate(sorted(numbers)) if i != number), None)
        if missing is not None:
            raise InputError(f"{kind}_{missing} is not declared, but {kind}_{max(numbers)} is")
        return Variable(kind, (len(numbers),))

    def value(self, frame: list[Any]) -> LinearTerm | Formula:
        """The term or formula of a complete frame inside an assertion."""
        match frame:
            case [position, str(head), *arguments]:
                pass
            case _:
                raise InputError("an operator is expected after '('")
        if head in _COMPARISONS or head == "distinct":
            if len(arguments) < 2:
                raise InputError(f"'{head}' needs two arguments")
            terms = [self.term(argument) for argument in arguments]
            if head == "distinct":
                return self.arithmetic.distinct(terms, position)
            found = tuple(self.arithmetic.compare(head, left, right, position) for left, right in pairwise(terms))
            return found[0] if len(found) == 1 else And(found)
        if not arguments and head in ("+", "-", "*", "/", "and", "or", "=>"):
            raise InputError(f"'{head}' needs an argument")
        if head in ("+", "-", "*", "/"):
            return self.arithmetic.apply(head, [self.term(argument) for argument in arguments])
        if head in ("and", "or", "not", "=>"):
            return self.connective(head, [self.formula(argument) for argument in arguments])
        raise UnsupportedError(f"the operator '{_shown(head)}' is not supported")

    def connective(self, operator: str, parts: Sequence[Formula]) -> Formula:
        match operator, parts:
            case "and", _:
                return And(tuple(parts))
            case "or", _:
                return Or(tuple(parts))
            case "not", [part]:
                return negate(part)
            case "=>", [*premises, conclusion] if premises:
                return Or((*map(negate, premises), conclusion))
        raise InputError(f"'{operator}' has the wrong number of arguments")

    def term(self, item: Any) -> LinearTerm:
        if isinstance(item, LinearTerm):
            return item
        if not isinstance(item, str):
            raise InputError("a number is expected where a condition stands")
        known = self.terms.get(item)
        if known is None:
            known = self.terms.get(_unquoted(item)) or LinearTerm(constant=_number(item))
            if len(self.terms) < _REMEMBERED:
                self.terms[item] = known
        return known

    def formula(self, item: Any) -> Formula:
        if isinstance(item, Bound | Row | And | Or | Not):
            return item
        if item in ("true", "false"):
            return TRUE if item == "true" else FALSE
        what = f"'{_shown(item)}'" if isinstance(item, str) else "a number"
        raise InputError(f"a condition is expected where {what} stands")


def _unquoted(name: str) -> str:
    """The name of a variable, without the bars if it is written as a quoted symbol: ``X_0`` for ``|X_0|``."""
    match = _QUOTED.fullmatch(name)
    return match[1] if match else name


def _shown(token: str) -> str:
    return token if len(token) <= _SHOWN else token[: _SHOWN - 2] + " …"


def _number(token: str) -> Fraction:
    # The length is checked first, because matching the pattern with a million digits takes long.
    if len(token) > limits.DIGITS and token[0] in "+-.0123456789":
        return number(token)
    if _NUMERAL.fullmatch(token):
        return number(token)
    if token.lstrip("+-").lower() in ("nan", "inf", "infinity", "oo"):
        raise InputError(f"'{token}' is not a finite number")
    if re.fullmatch(r"[+-]?[0-9.]+[eE][+-]?[0-9]+", token):
        raise InputError(f"the exponent of '{_shown(token)}' is out of range")
    raise InputError(f"'{_shown(token)}' is neither a number nor a declared variable")
