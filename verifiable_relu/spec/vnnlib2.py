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
from pathlib import Path
from typing import Any

import vnnlib as standard

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.spec import limits, specfile
from verifiable_relu.spec.formula import And, Formula, Or, properties
from verifiable_relu.spec.specfile import DeclaredNetwork, DeclaredTensor, JoinedNetwork, SpecFile, Variable
from verifiable_relu.spec.terms import ONE, LinearTerm, TermArithmetic, number
from verifiable_relu.spec.text import PropertyText

_COMPARISONS = {standard.LessEqual: "<=", standard.LessThan: "<", standard.Equal: "=", standard.NotEqual: "!="}
_COMPARISONS |= {standard.GreaterEqual: ">=", standard.GreaterThan: ">"}
_OPERATORS = {standard.Negate: "-", standard.Plus: "+", standard.Minus: "-", standard.Multiply: "*"}
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
    inputs, given = dict[str, Variable](), dict[str, Variable]()
    for network in query.networks:
        inputs |= {one.name: _variable(one, source.text) for one in network.inputs}
        given |= {one.name: _variable(one, source.text) for one in (*network.outputs, *network.hidden)}
    if max(sum(variable.size for variable in each.values()) for each in (inputs, given)) > limits.ELEMENTS_2:
        raise InputError(f"the networks have more than {limits.ELEMENTS_2:,} inputs or outputs together")
    translator = _QueryTranslator(source, inputs, given)
    rest = [each for assertion in query.assertions for each in _conjuncts(assertion.expr) if not translator.equal(each)]
    size, total = translator.number_inputs(), sum(variable.size for variable in given.values())
    formula: Formula = And([translator.value(condition) for condition in rest])
    formula = And((formula, *translator.arithmetic.implied_bounds(formula)))
    places = translator.places
    names = {
        place: variable.element(i, "2.0")
        for variable in reversed(inputs.values())
        for i, place in enumerate(places[variable.name])
    }
    networks = []
    for network in query.networks:
        x, hidden, y = (tuple(map(_tensor, each)) for each in (network.inputs, network.hidden, network.outputs))
        mine = tuple(place for tensor in x for place in places[tensor.variable.name])
        start = places[y[0].variable.name][0]
        networks.append(DeclaredNetwork(network.name, network.equal_to, x, hidden, y, mine, start))
    arithmetic = translator.arithmetic
    joined = JoinedNetwork(tuple(networks), size, arithmetic.related, tuple(arithmetic.products))
    found = properties(formula, size, names.__getitem__, specfile.stem(path), _LINE)
    one = Variable("X", (size,)) if len(inputs) > 1 else next(iter(inputs.values()))
    other = Variable("Y", (total,)) if len(given) > 1 else next(iter(given.values()))
    declared = tuple(network.name for network in networks)
    return SpecFile(path, "2.0", found, one, other, declared, source.network, joined)


def _variable(declared: Any, text: str) -> Variable:
    if declared.dtype.name not in specfile.KINDS:
        found = re.search(rf"declare-(?:input|hidden|output)\s+{re.escape(declared.name)}\s", text)
        line = text.count("\n", 0, found.start() if found else 0) + 1
        raise UnsupportedError(f"the element type of '{declared.name}' is not supported", place=_LINE(line))
    return Variable(declared.name, tuple(declared.shape))


def _tensor(one: Any) -> DeclaredTensor:
    return DeclaredTensor(Variable(one.name, tuple(one.shape)), one.dtype.name, (one.onnx_name or "").strip('"'))


def _parsed(source: PropertyText) -> Any:
    """Return the query that the standard's parser makes of a text."""
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


def _conjuncts(expression: Any) -> list[Any]:
    """Return the parts of a condition that all must hold."""
    found, pending = [], [expression]
    while pending:
        each = pending.pop()
        if isinstance(each, standard.And):
            pending += reversed(list(each.args))
        else:
            found.append(each)
    return found


class _QueryTranslator:
    """The translation of the parser's expressions into terms and formulas.

    ``inputs`` are the networks' inputs by name, ``given`` their outputs and hidden nodes, in the order of declarations.
    ``places`` has, by a variable's name, the input or output of the network asked about that each element is.
    """

    def __init__(self, source: PropertyText, inputs: dict[str, Variable], given: dict[str, Variable]) -> None:
        self.source, self.inputs, self.given = source, inputs, given
        self.places: dict[str, list[int]] = {}
        for variables in (inputs, given):
            start = 0
            for name, variable in variables.items():
                self.places[name] = list(range(start, start := start + variable.size))
            # Of each input the least that it was found to equal, or one on the way there.
            if variables is inputs:
                self.equals = list(range(start))
        self.arithmetic = TermArithmetic(start)

    def equal(self, condition: Any) -> bool:
        """Return True if a condition says that two inputs are equal, which is then known."""
        sides: Any = (condition.lhs, condition.rhs) if isinstance(condition, standard.Equal) else ()
        if not (sides and all(isinstance(side, standard.Var) and side.name in self.inputs for side in sides)):
            return False
        try:
            least, other = sorted(self._least(self.places[side.name][self._position(side)]) for side in sides)
        except InputError as error:
            raise InputError(f"'{sides[0].name}': {error.message}", place=_LINE(int(sides[0].line))) from None
        self.equals[other] = least
        return True

    def number_inputs(self) -> int:
        """Number the inputs that are not equal, and return their number."""
        known: dict[int, int] = {}
        numbers = [known.setdefault(self._least(element), len(known)) for element in range(len(self.equals))]
        for name in self.inputs:
            self.places[name] = [numbers[element] for element in self.places[name]]
        self.arithmetic.inputs = len(known)
        return len(known)

    def _least(self, element: int) -> int:
        while self.equals[element] != element:
            element = self.equals[element]
        return element

    def value(self, root: Any) -> Any:
        """Return the formula of a condition, or the linear term of an arithmetic expression."""
        # The method keeps a stack of its own, because files may be nested more deeply than Python's calls.
        done, pending = list[Any](), [(root, -1)]
        while pending:
            expression, arguments = pending.pop()
            if arguments < 0 and (parts := _parts(expression)):
                pending.append((expression, len(parts)))
                pending += ((part, -1) for part in reversed(parts))
                continue
            values = done[-arguments:] if arguments > 0 else []
            del done[len(done) - len(values) :]
            try:
                done.append(self.combined(expression, values) if values else self.leaf(expression))
            except InputError as error:
                line = _line_of(expression)
                said = f"{error.message}: {self.source.quoted_line(line)}"
                raise type(error)(said, place=_LINE(line)) from None
        return done.pop()

    def leaf(self, expression: Any) -> LinearTerm:
        if isinstance(expression, standard.Literal):
            return LinearTerm(constant=number(expression.lexeme))
        place = self.places[expression.name][self._position(expression)]
        return LinearTerm({~place if expression.name in self.inputs else place: ONE})

    def combined(self, expression: Any, values: list[Any]) -> LinearTerm | Formula:
        kind = type(expression)
        if kind in (standard.And, standard.Or):
            return And(values) if kind is standard.And else Or(values)
        if kind in _COMPARISONS:
            left, right = values
            return self.arithmetic.compare(_COMPARISONS[kind], left, right, _line_of(expression))
        return self.arithmetic.apply(_OPERATORS[kind], values)

    def _position(self, variable: Any) -> int:
        """Return the row-major index of the element that an expression such as ``X[0,1]`` names."""
        position = 0
        shape = (self.inputs.get(variable.name) or self.given[variable.name]).shape
        for i, extent in zip(variable.indices, shape, strict=True):
            if not 0 <= i < extent:  # The parser accepts X[-1].
                raise InputError(f"the index {i} is not in 0 … {extent - 1}")
            position = position * extent + i
        return position


def _parts(expression: Any) -> tuple[Any, ...]:
    """Return the direct subexpressions of an expression in order; none for a variable or a number."""
    match expression:
        case standard.And() | standard.Or() | standard.Plus() | standard.Multiply():
            return tuple(expression.args)
        case standard.Comparison():
            return expression.lhs, expression.rhs
        case standard.Minus():
            return expression.head, *expression.rest
        case standard.Negate():
            return (expression.expr,)
        case standard.Var() | standard.Literal():
            return ()
    raise UnsupportedError(f"the expression '{str(expression).strip()[:_SHOWN]}' is not supported")


def _line_of(expression: Any) -> int:
    """Return the line of the first variable or number in an expression."""
    while not isinstance(expression, standard.Var | standard.Literal):
        expression = expression.children()[0]
    return int(expression.line)
