"""The reader of VNN-LIB 2.0, which uses the standard's own parser and type checker (the package ``vnnlib``).

Numbers are taken from their text, so that decimals stay exact. The parser is a C++ library that crashes, and the
process with it, on text that is nested too deeply or too long: it is given text within known limits, and without
comments, because it ends these at a line feed only.

A query of several networks, or one that relates inputs to each other or to outputs, becomes one of a single network
(``ir.transform.combine``). Inputs that the query makes equal, as in ``(== X_f[0] X_g[0])``, are one input. What else
relates inputs to each other is a constraint on the outputs, among which the inputs are then passed on. Bounds that such
a constraint implies for an input, as ``(<= X_f[0] X_g[0])`` does, bound its box. A product of variables is one more
output, so that all constraints are linear in outputs.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import vnnlib as standard

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.spec import limits
from verifiable_relu.spec.formula import And, Formula, LinearTerm, TermArithmetic, properties
from verifiable_relu.spec.specfile import KINDS, DeclaredNetwork, JoinedNetwork, SpecFile, Variable, stem
from verifiable_relu.spec.text import PropertyText

_OPERATORS: dict[type, str] = {standard.LessEqual: "<=", standard.LessThan: "<", standard.Equal: "="}
_OPERATORS |= {
    standard.NotEqual: "!=",
    standard.GreaterEqual: ">=",
    standard.GreaterThan: ">",
    standard.And: "and",
    standard.Or: "or",
}
_OPERATORS |= {standard.Negate: "-", standard.Plus: "+", standard.Minus: "-", standard.Multiply: "*"}
# The standard's examples write Real, while its parser knows the type real. The parser accepts any unknown word as a
# type, and then checks no types.
_REAL = re.compile(r"(\(\s*declare-(?:input|hidden|output)\s+[^\s()]+\s+)Real\b")
_SHOWN = 60  # characters of a token that a message quotes
_SYNTAX = re.compile(r"syntax error at line (\d+), column \d+: '(.*)'", re.DOTALL)
_LONG = re.compile(rf"[0-9.]{{{limits.DIGITS + 1}}}")
# Some of the competition's files write the version without its brackets.
_VERSION = re.compile(r"(\(\s*vnnlib-version\s+)([0-9.]+)(?=\s*\))")
# The parser's integers have 64 bits.
_INTEGER = re.compile(r"(?<![0-9.])[0-9]{19}(?![0-9]*\.[0-9])")
# The parser reads 2.0Y[0] and -1.0-0.5 as two tokens each, which nobody who writes them means.
_RUN_TOGETHER = re.compile(r"(?<![\w.])[0-9]+(?:\.[0-9]+)?[A-Za-z_-]")
_LINE = "line {}".format


def parse(source: PropertyText, path: Path) -> SpecFile:
    """Read the text of a 2.0 file; the properties are named after ``path``, errors name no file."""
    query = _parsed(source)
    declared = [
        [tuple(_variable(one, source.text) for one in each) for each in (of.inputs, of.outputs, of.hidden)]
        for of in query.networks
    ]
    inputs = [one for x, _, _ in declared for one in x]
    given = [one for _, y, hidden in declared for one in (*y, *hidden)]
    if max(sum(variable.size for variable in each) for each in (inputs, given)) > limits.ELEMENTS_2:
        raise InputError(f"the networks have more than {limits.ELEMENTS_2:,} inputs or outputs together")
    translator = _QueryTranslator(source, inputs, given)
    rest, pending = [], [assertion.expr for assertion in reversed(query.assertions)]
    while pending:
        condition = pending.pop()
        if isinstance(condition, standard.And):
            pending += reversed(condition.children())
        elif not translator.equal(condition):
            rest.append(condition)
    translator.number_inputs()
    formula = And([translator.value(condition) for condition in rest])
    places, arithmetic = translator.places, translator.arithmetic
    names = {place: one.element(i, "2.0") for one in reversed(inputs) for i, place in enumerate(places[one.name])}
    networks = []
    for network, (x, y, hidden) in zip(query.networks, declared, strict=True):
        mine = tuple(place for one in x for place in places[one.name])
        networks.append(DeclaredNetwork(network.name, network.equal_to, x, hidden, y, mine, places[y[0].name][0]))
    joined = JoinedNetwork(tuple(networks), arithmetic.inputs, arithmetic.related, tuple(arithmetic.products))
    found = properties(formula, arithmetic, names.__getitem__, stem(path), _LINE)
    one = inputs[0] if len(inputs) == 1 else Variable("X", (arithmetic.inputs,))
    other = given[0] if len(given) == 1 else Variable("Y", (arithmetic.outputs,))
    return SpecFile(path, "2.0", found, one, other, tuple(each.name for each in networks), source.network, joined)


def _variable(declared: Any, text: str) -> Variable:
    if declared.dtype.name not in KINDS:
        found = re.search(rf"declare-(?:input|hidden|output)\s+{re.escape(declared.name)}\s", text)
        line = text.count("\n", 0, found.start() if found else 0) + 1
        raise UnsupportedError(f"the element type of '{declared.name}' is not supported", place=_LINE(line))
    return Variable(declared.name, tuple(declared.shape), declared.dtype.name, (declared.onnx_name or "").strip('"'))


def _parsed(source: PropertyText) -> Any:
    text = source.text
    if len(text) > limits.BYTES_2:
        raise InputError(f"larger than {limits.BYTES_2:,} bytes")
    deque(source.tokens(limits.TOKENS_2), maxlen=0)
    if text.count("[") > limits.ELEMENTS_2:
        raise InputError(f"elements of variables are mentioned more than {limits.ELEMENTS_2:,} times")
    for pattern, said in (
        (_LONG, f"a number has more than {limits.DIGITS:,} characters"),
        (_INTEGER, "an integer has more than 18 digits"),
    ):
        if match := pattern.search(text):
            raise InputError(said, place=source.place(match.start()))
    try:
        query = standard.parse_query_string(_VERSION.sub(r"\1<\2>", _REAL.sub(r"\1real", text), count=1))
    except standard.VNNLibException as error:
        raise _explained(str(error), source) from None
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        # The classes of exceptions that the parser raises where its authors did not expect an error.
        raise InputError(f"the parser of VNN-LIB 2.0 refuses the file: {error}") from None
    if match := _RUN_TOGETHER.search(text):
        raise InputError(f"a blank is missing after '{match[0][:-1][:_SHOWN]}'", place=source.place(match.start()))
    return query


def _explained(message: str, source: PropertyText) -> InputError:
    if match := _SYNTAX.search(message):
        line, found = int(match[1]), match[2][:_SHOWN]
        where = f"at '{found}' in '{source.quoted_line(line)}'" if found else "the file ends too early"
        return InputError(f"syntax error: {where}", place=_LINE(line))
    try:
        first = json.loads(message)["errors"][0]
        what, symbol, hint, line = (first[key] for key in ("message", "offendingSymbol", "hint", "line"))
    except (ValueError, LookupError, TypeError):
        return InputError(message)
    said = f"{what}: '{symbol[:_SHOWN]}' in '{source.quoted_line(line)}'. {hint}"
    return InputError(said, place=_LINE(line))


class _QueryTranslator:
    """The translation of the parser's expressions into terms and formulas.

    ``inputs`` are the networks' inputs, ``given`` their outputs and hidden nodes, in the order of declarations.
    ``places`` has, by a variable's name, the input or output of the network asked about that each element is.
    """

    def __init__(self, source: PropertyText, inputs: Sequence[Variable], given: Sequence[Variable]) -> None:
        self.source, self.inputs = source, [variable.name for variable in inputs]
        self.shapes = {variable.name: variable.shape for variable in (*inputs, *given)}
        self.places: dict[str, Sequence[int]] = {}
        for variables in (given, inputs):
            start = 0
            for variable in variables:
                self.places[variable.name] = range(start, start := start + variable.size)
            if variables is given:
                self.arithmetic = TermArithmetic(start)
        # Of each input the least that it was found to equal, or one on the way there.
        self.equals = list(range(start))

    def equal(self, condition: Any) -> bool:
        """Return True if a condition says that two inputs are equal, which is then known."""
        sides: Any = condition.children() if isinstance(condition, standard.Equal) else ()
        if not (sides and all(isinstance(side, standard.Var) and side.name in self.inputs for side in sides)):
            return False
        try:
            least, other = sorted(self._least(self._place(side)) for side in sides)
        except InputError as error:
            raise InputError(f"'{sides[0].name}': {error.message}", place=_LINE(int(sides[0].line))) from None
        self.equals[other] = least
        return True

    def number_inputs(self) -> None:
        """Assign numbers to the inputs that are not equal."""
        known: dict[int, int] = {}
        numbers = [known.setdefault(self._least(element), len(known)) for element in range(len(self.equals))]
        for name in self.inputs:
            self.places[name] = [numbers[element] for element in self.places[name]]
        self.arithmetic.inputs = len(known)

    def _least(self, element: int) -> int:
        while self.equals[element] != element:
            element = self.equals[element]
        return element

    def value(self, root: Any) -> Any:
        """Return the formula of a condition, or the linear term of an arithmetic expression."""
        # The method keeps a stack of its own, because files may be nested more deeply than Python's calls.
        # Of each value done, the line of the first variable or number in its expression is kept.
        done, pending = list[tuple[Any, int]](), [(root, -1)]
        while pending:
            expression, arguments = pending.pop()
            if arguments < 0 and (parts := expression.children()):
                pending.append((expression, len(parts)))
                pending += ((part, -1) for part in reversed(parts))
                continue
            values = done[-arguments:] if arguments > 0 else []
            del done[len(done) - len(values) :]
            line = values[0][1] if values else int(expression.line)
            try:
                done.append((self._combined(expression, [value for value, _ in values], line), line))
            except InputError as error:
                said = f"{error.message}: {self.source.quoted_line(line)}"
                raise type(error)(said, place=_LINE(line)) from None
        return done.pop()[0]

    def _combined(self, expression: Any, values: list[Any], line: int) -> LinearTerm | Formula:
        if isinstance(expression, standard.Literal):
            return LinearTerm.number(expression.lexeme)
        if isinstance(expression, standard.Var):
            place = self._place(expression)
            return LinearTerm.variable(~place if expression.name in self.inputs else place)
        if type(expression) not in _OPERATORS:
            raise UnsupportedError(f"the expression '{str(expression).strip()[:_SHOWN]}' is not supported")
        return self.arithmetic.combined(_OPERATORS[type(expression)], values, line)

    def _place(self, variable: Any) -> int:
        """Return the place of the element that an expression such as ``X[0,1]`` names."""
        position = 0
        for i, extent in zip(variable.indices, self.shapes[variable.name], strict=True):
            if not 0 <= i < extent:  # The parser accepts X[-1].
                raise InputError(f"the index {i} is not in 0 … {extent - 1}")
            position = position * extent + i
        return self.places[variable.name][position]
