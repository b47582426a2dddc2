"""VNN-LIB 1.0: the subset of SMT-LIB in which properties of networks are written.

One pass over the tokens with a stack: whenever a parenthesis closes, what it holds becomes a term, a formula or
a command. Tokens carry no positions; the place of one is worked out when a message needs it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from decimal import Decimal
from fractions import Fraction
from functools import reduce
from itertools import combinations, pairwise
from operator import add, mul, truediv
from pathlib import Path
from typing import Any

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.spec.formula import FALSE, ONE, TRUE, And, Bound, Formula, Linear, Or, compare, negate, properties
from verifiable_relu.spec.property import Row
from verifiable_relu.spec.specfile import SpecFile, Variable, stem

_TOKEN = re.compile(r"""[()]|[^\s()";|]+|;[^\n]*|"(?:[^"]|"")*"|\|[^|]*\||["|]""")
_NUMERAL = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?")
_VARIABLE = re.compile(r"([XY])_(0|[1-9][0-9]*)")
_COMPARISONS = {"<=": "<=", "<": "<", ">=": ">=", ">": ">", "=": "=", "distinct": "!="}
_ARITHMETIC = {"+": add, "*": mul, "/": truediv, "-": lambda a, b: a + -b}
_IGNORED = {"set-logic", "set-info", "set-option", "check-sat", "get-model", "get-value", "exit"}
_COMMANDS = {"declare-const", "declare-fun", "assert", *_IGNORED}
_SHOWN = 100
"""So many characters of a constraint are quoted in a message."""


def parse(text: str, path: Path) -> SpecFile:
    """Read the text of a 1.0 file; ``path`` names the properties.

    Raises:
        InputError, UnsupportedError: with the place, without the file.
    """
    return _Reader(text).read(path)


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens: list[str] = [token for token in _TOKEN.findall(text) if token[0] != ";"]
        self.terms: dict[str, Linear] = {}
        self.declared: dict[str, list[int]] = {"X": [], "Y": []}
        self.asserted: list[Formula] = []

    def read(self, path: Path) -> SpecFile:
        self.evaluate()
        inputs, outputs = self.variable("X", "input"), self.variable("Y", "output")
        found = properties(And(tuple(self.asserted)), list(inputs.elements("1.0")), stem(path), self.place)
        return SpecFile(path, "1.0", found, inputs, outputs)

    def evaluate(self) -> None:
        """Run all commands. A frame is the index of its parenthesis and then what it holds so far."""
        stack: list[list[Any]] = []
        for index, token in enumerate(self.tokens):
            if token == "(":
                stack.append([index])
            elif token == ")":
                if not stack:
                    raise InputError("a closing parenthesis that nothing opened", place=self.place(index))
                frame = stack.pop()
                try:
                    if not stack:
                        self.command(frame)
                    else:
                        stack[-1].append(self.value(frame) if stack[0][1:2] == ["assert"] else frame)
                except InputError as error:
                    raise type(error)(
                        f"{error.message}: {self.quote(frame[0], index)}", place=self.place(frame[0])
                    ) from None
                except RecursionError:
                    raise InputError("nested too deeply", place=self.place(frame[0])) from None
            elif not stack:
                raise InputError(f"'{token}' outside of parentheses", place=self.place(index))
            else:
                if len(stack) > 1 and len(stack[-1]) == 1 and token in _COMMANDS:
                    raise self.unclosed(stack[0][0])
                stack[-1].append(token)
        if stack:
            raise self.unclosed(stack[0][0])

    def unclosed(self, index: int) -> InputError:
        return InputError("this parenthesis is never closed", place=self.place(index))

    def command(self, frame: list[Any]) -> None:
        match frame[1:]:
            case ["assert", body]:
                self.asserted.append(self.formula(body))
            case ["declare-const", str(name), str(sort)]:
                self.declare(name, sort, frame[0])
            case ["declare-fun", str(name), [_], str(sort)]:
                self.declare(name, sort, frame[0])
            case [str(head), *_] if head in _IGNORED:
                pass
            case [str(head), *_] if head in _COMMANDS:
                raise InputError(f"'{head}' has the wrong number or kind of arguments")
            case [str(head), *_]:
                raise UnsupportedError(f"the command '{head}' is not supported")
            case _:
                raise InputError("a command is expected")

    def declare(self, name: str, sort: str, index: int) -> None:
        match = _VARIABLE.fullmatch(name)
        if not match:
            raise UnsupportedError(f"'{name}' is neither an input X_i nor an output Y_i")
        if sort != "Real":
            raise UnsupportedError(f"'{name}' is of sort {sort}, only Real is supported")
        if name in self.terms:
            raise InputError(f"'{name}' is declared twice")
        kind, number = match.group(1), int(match.group(2))
        self.declared[kind].append(number)
        one = {number: ONE}
        self.terms[name] = Linear(one) if kind == "X" else Linear(outputs=one)

    def variable(self, kind: str, role: str) -> Variable:
        numbers = self.declared[kind]
        if not numbers:
            raise InputError(f"no {role} variables ({kind}_0 …) are declared" if self.tokens else "the file is empty")
        missing = next((i for i, number in enumerate(sorted(numbers)) if i != number), None)
        if missing is not None:
            raise InputError(f"{kind}_{missing} is not declared, but {kind}_{max(numbers)} is")
        return Variable(kind, (len(numbers),))

    def value(self, frame: list[Any]) -> Linear | Formula:
        """The term or formula that a parenthesis inside an assertion holds."""
        match frame:
            case [index, str(head), *arguments]:
                pass
            case _:
                raise InputError("an operator is expected after '('")
        if head in _COMPARISONS:
            if len(arguments) < 2:
                raise InputError(f"'{head}' needs two arguments")
            terms = [self.term(argument) for argument in arguments]
            pairs: Iterable[tuple[Linear, Linear]] = combinations(terms, 2) if head == "distinct" else pairwise(terms)
            found = tuple(compare(_COMPARISONS[head], left, right, index) for left, right in pairs)
            return found[0] if len(found) == 1 else And(found)
        if head in _ARITHMETIC:
            return self.arithmetic(head, [self.term(argument) for argument in arguments])
        if head in ("and", "or", "not", "=>"):
            return self.connective(head, [self.formula(argument) for argument in arguments])
        raise UnsupportedError(f"the operator '{head}' is not supported")

    def arithmetic(self, operator: str, terms: Sequence[Linear]) -> Linear:
        if not terms:
            raise InputError(f"'{operator}' needs an argument")
        if len(terms) == 1 and operator == "-":
            return -terms[0]
        return reduce(_ARITHMETIC[operator], terms)

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

    def term(self, item: Any) -> Linear:
        if isinstance(item, Linear):
            return item
        if not isinstance(item, str):
            raise InputError("a number is expected where a condition stands")
        known = self.terms.get(item)
        if known is None:
            known = self.terms[item] = Linear(constant=_number(item))
        return known

    def formula(self, item: Any) -> Formula:
        if isinstance(item, Bound | Row | And | Or):
            return item
        if item in ("true", "false"):
            return TRUE if item == "true" else FALSE
        what = f"'{item}'" if isinstance(item, str) else "a number"
        raise InputError(f"a condition is expected where {what} stands")

    def place(self, index: int) -> str:
        """Line and column of a token."""
        kept = (match for match in _TOKEN.finditer(self.text) if match.group()[0] != ";")
        start = next(match.start() for number, match in enumerate(kept) if number == index)
        line = self.text.count("\n", 0, start) + 1
        return f"line {line}, column {start - self.text.rfind(chr(10), 0, start)}"

    def quote(self, first: int, last: int) -> str:
        """The tokens from ``first`` to ``last`` as one line, shortened."""
        line = " ".join(self.tokens[first : last + 1]).replace("( ", "(").replace(" )", ")")
        return line if len(line) <= _SHOWN else line[: _SHOWN - 2] + " …"


def _number(token: str) -> Fraction:
    if _NUMERAL.fullmatch(token):
        return Fraction(Decimal(token))
    if token.lstrip("+-").lower() in ("nan", "inf", "infinity", "oo"):
        raise InputError(f"'{token}' is not a finite number")
    if re.fullmatch(r"[+-]?[0-9.]+[eE][+-]?[0-9]+", token):
        raise InputError(f"the exponent of '{token}' is out of range")
    raise InputError(f"'{token}' is neither a number nor a declared variable")
