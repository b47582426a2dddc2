"""VNN-LIB 2.0, parsed and type-checked by the standard's own parser (the package ``vnnlib``).

What it gives is walked into a :class:`Formula`; numbers are taken from their text, so that decimals stay exact.
"""

from __future__ import annotations

import json
import re
from decimal import Decimal
from fractions import Fraction
from functools import reduce
from operator import add, mul
from pathlib import Path
from typing import Any

import vnnlib as standard

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.spec.formula import ONE, And, Formula, Linear, Or, compare, properties
from verifiable_relu.spec.specfile import SpecFile, Variable, stem

_COMPARISONS = {
    standard.LessEqual: "<=",
    standard.LessThan: "<",
    standard.GreaterEqual: ">=",
    standard.GreaterThan: ">",
    standard.Equal: "=",
    standard.NotEqual: "!=",
}
_REALS = {"Real", "F16", "BF16", "F32", "F64"}
# The standard's examples write Real, its parser knows real; any other unknown word passes as a type without checks.
_REAL = re.compile(r"(\(\s*declare-(?:input|hidden|output)\s+[^\s()]+\s+)Real\b")
_SYNTAX = re.compile(r"syntax error at line (\d+), column \d+: '(.*)'", re.DOTALL)
_SHOWN = 100


def parse(text: str, path: Path) -> SpecFile:
    """Read the text of a 2.0 file; ``path`` names the properties.

    Raises:
        InputError, UnsupportedError: with the place, without the file.
    """
    try:
        query = standard.parse_query_string(_REAL.sub(r"\1real", text))
    except standard.VNNLibException as error:
        raise _explained(str(error), text) from None
    network = _only_network(query, text)
    inputs, outputs = (Variable(v.name, tuple(v.shape)) for v in (network.inputs[0], network.outputs[0]))
    walker = _Walker(text, {inputs.name: inputs.shape, outputs.name: outputs.shape}, inputs.name)
    formula = And(tuple(walker.formula(assertion.expr) for assertion in query.assertions))
    found = properties(formula, list(inputs.elements("2.0")), stem(path), _place)
    return SpecFile(path, "2.0", found, inputs, outputs, (network.name,))


def _place(line: int) -> str:
    return f"line {line}"


def _explained(message: str, text: str) -> InputError:
    """The parser's complaint as one line."""
    if match := _SYNTAX.search(message):
        line, found = int(match.group(1)), match.group(2)
        where = f"at '{found}' in '{_quoted(text, line)}'" if found else "the file ends too early"
        return InputError(f"syntax error: {where}", place=_place(line))
    try:
        first = json.loads(message)["errors"][0]
        what, symbol, hint, line = (first[key] for key in ("message", "offendingSymbol", "hint", "line"))
    except (ValueError, LookupError, TypeError):
        return InputError(message)
    return InputError(f"{what}: '{symbol}' in '{_quoted(text, line)}'. {hint}", place=_place(line))


def _quoted(text: str, line: int) -> str:
    lines = text.split("\n")
    found = lines[line - 1].strip() if 0 < line <= len(lines) else ""
    return found if len(found) <= _SHOWN else found[: _SHOWN - 2] + " …"


def _only_network(query: Any, text: str) -> Any:
    """The one network of a query that has one real input and one real output.

    Raises:
        UnsupportedError: for any other, with the line of the declaration at fault.
    """
    if len(query.networks) > 1:
        names = ", ".join(network.name for network in query.networks)
        raise _refused(f"a property of several networks ({names})", "network", 1, text)
    (network,) = query.networks
    for kind, declared in (("input", network.inputs), ("output", network.outputs), ("hidden", network.hidden)):
        if kind == "hidden" and declared:
            raise _refused(f"a property of the hidden node '{declared[0].name}'", "hidden", 0, text)
        if len(declared) > 1:
            raise _refused(f"a network with {len(declared)} {kind}s", kind, 1, text)
        for variable in declared:
            if variable.dtype.name not in _REALS:
                raise _refused(f"the element type of '{variable.name}'", kind, 0, text)
    return network


def _refused(what: str, kind: str, number: int, text: str) -> UnsupportedError:
    places = [match.start() for match in re.finditer(rf"^[^;\n]*?\(\s*declare-{kind}\b", text, re.MULTILINE)]
    start = places[number] if number < len(places) else 0
    return UnsupportedError(f"{what} is not supported", place=_place(text.count("\n", 0, start) + 1))


class _Walker:
    """Turns the parser's expressions into terms and formulas."""

    def __init__(self, text: str, shapes: dict[str, tuple[int, ...]], input_name: str) -> None:
        self.text = text
        self.shapes = shapes
        self.input_name = input_name

    def formula(self, expression: Any) -> Formula:
        operator = _COMPARISONS.get(type(expression))
        if operator is None:
            parts = tuple(self.formula(part) for part in expression.args)
            return And(parts) if isinstance(expression, standard.And) else Or(parts)
        line = _line(expression)
        try:
            return compare(operator, self.term(expression.lhs), self.term(expression.rhs), line)
        except InputError as error:
            raise type(error)(f"{error.message}: {_quoted(self.text, line)}", place=_place(line)) from None

    def term(self, expression: Any) -> Linear:
        match expression:
            case standard.Var():
                name = expression.name
                index = 0
                for i, extent in zip(expression.indices, self.shapes[name], strict=True):
                    index = index * extent + i
                one = {index: ONE}
                return Linear(one) if name == self.input_name else Linear(outputs=one)
            case standard.Literal():
                return Linear(constant=Fraction(Decimal(expression.lexeme)))
            case standard.Negate():
                return -self.term(expression.expr)
            case standard.Plus():
                return reduce(add, map(self.term, expression.args))
            case standard.Minus():
                return reduce(lambda a, b: a + -b, map(self.term, (expression.head, *expression.rest)))
            case standard.Multiply():
                return reduce(mul, map(self.term, expression.args))
        raise UnsupportedError(f"the expression '{str(expression).strip()}' is not supported")


def _line(expression: Any) -> int:
    """The line of the first variable or number in an expression."""
    while not isinstance(expression, standard.Var | standard.Literal):
        expression = expression.children()[0]
    return int(expression.line)
