"""The reader of VNN-LIB 2.0, which uses the standard's own parser and type checker (the package ``vnnlib``).

The parser's expressions are translated into a :class:`Formula`, with numbers taken from their text, so that decimals
stay exact. The parser is a C++ library that crashes, and the process with it, on text that is nested too deeply or too
long. It is therefore given text within known limits only. Comments are removed before, because the parser ends a
comment at a line feed only, not at a carriage return.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import vnnlib as standard

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.spec import limits
from verifiable_relu.spec.disjuncts import properties
from verifiable_relu.spec.formula import And, Formula, Or
from verifiable_relu.spec.lexical import Source
from verifiable_relu.spec.specfile import SpecFile, Variable, stem
from verifiable_relu.spec.terms import ONE, Arithmetic, LinearTerm, number

_COMPARISONS = {
    standard.LessEqual: "<=",
    standard.LessThan: "<",
    standard.GreaterEqual: ">=",
    standard.GreaterThan: ">",
    standard.Equal: "=",
    standard.NotEqual: "!=",
}
_OPERATORS = {standard.Negate: "-", standard.Plus: "+", standard.Minus: "-", standard.Multiply: "*"}
REALS = {"Real", "F16", "BF16", "F32", "F64"}
# The standard's examples write Real, while its parser knows the type real. The parser accepts any unknown word as a
# type, and then checks no types.
_REAL = re.compile(r"(\(\s*declare-(?:input|hidden|output)\s+[^\s()]+\s+)Real\b")
_SHOWN = 60
"""The most characters of a token that a message quotes."""
_SYNTAX = re.compile(r"syntax error at line (\d+), column \d+: '(.*)'", re.DOTALL)
_LONG = re.compile(rf"[0-9.]{{{limits.DIGITS + 1}}}")
# The parser's integers have 64 bits.
_INTEGER = re.compile(r"(?<![0-9.])[0-9]{19}(?![0-9]*\.[0-9])")
# The parser reads 2.0Y[0] and -1.0-0.5 as two tokens each, which nobody who writes them means.
_RUN_TOGETHER = re.compile(r"(?<![\w.])[0-9]+(?:\.[0-9]+)?[A-Za-z_-]")


def parse(source: Source, path: Path) -> SpecFile:
    """Read the text of a 2.0 file; the properties are named after ``path``.

    Raises:
        InputError, UnsupportedError: with the place in the file, but naming no file.
    """
    query = parsed(source)
    network = _only_network(query, source.text)
    inputs, outputs = (Variable(v.name, tuple(v.shape)) for v in (network.inputs[0], network.outputs[0]))
    for variable in (inputs, outputs):
        if variable.size > limits.ELEMENTS_2:
            raise InputError(f"'{variable.name}' has {variable.size:,} elements, more than {limits.ELEMENTS_2:,}")
    translator = Translator(source, inputs, outputs)
    formula = And(tuple(translator.value(assertion.expr) for assertion in query.assertions))
    found = properties(formula, inputs.size, lambda i: inputs.element(i, "2.0"), stem(path), place)
    return SpecFile(path, "2.0", found, inputs, outputs, (network.name,))


def parsed(source: Source) -> Any:
    """The query that the standard's parser makes of a text.

    Raises:
        InputError: with the place in the file, but naming no file.
    """
    _check_size(source)
    try:
        query = standard.parse_query_string(_REAL.sub(r"\1real", source.text))
    except standard.VNNLibException as error:
        raise _explained(str(error), source) from None
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        # The classes of exceptions that the parser raises where its authors did not expect an error.
        raise InputError(f"the parser of VNN-LIB 2.0 refuses the file: {error}") from None
    if match := _RUN_TOGETHER.search(source.text):
        raise InputError(f"a blank is missing after '{match[0][:-1][:_SHOWN]}'", place=source.place(match.start()))
    return query


def _check_size(source: Source) -> None:
    for _ in source.tokens(limits.TOKENS_2):
        pass
    if source.text.count("[") > limits.ELEMENTS_2:
        raise InputError(f"elements of variables are mentioned more than {limits.ELEMENTS_2:,} times")
    if match := _LONG.search(source.text):
        said = f"a number has more than {limits.DIGITS:,} characters"
        raise InputError(said, place=source.place(match.start()))
    if match := _INTEGER.search(source.text):
        raise InputError("an integer has more than 18 digits", place=source.place(match.start()))


def place(line: int) -> str:
    """The words with which messages name a line."""
    return f"line {line}"


def _explained(message: str, source: Source) -> InputError:
    """The error for a message of the standard's parser, in one line."""
    if match := _SYNTAX.search(message):
        line, found = int(match.group(1)), match.group(2)
        where = f"at '{found[:_SHOWN]}' in '{source.quoted_line(line)}'" if found else "the file ends too early"
        return InputError(f"syntax error: {where}", place=place(line))
    try:
        first = json.loads(message)["errors"][0]
        what, symbol, hint, line = (first[key] for key in ("message", "offendingSymbol", "hint", "line"))
    except (ValueError, LookupError, TypeError):
        return InputError(message)
    said = f"{what}: '{symbol[:_SHOWN]}' in '{source.quoted_line(line)}'. {hint}"
    return InputError(said, place=place(line))


def _only_network(query: Any, text: str) -> Any:
    """The network of a query that declares one network, with one input and one output of real numbers.

    Raises:
        UnsupportedError: for a query that declares anything else, with the line of the declaration.
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
            if variable.dtype.name not in REALS:
                raise _refused(f"the element type of '{variable.name}'", kind, 0, text, solver=False)
    return network


def _refused(what: str, kind: str, number: int, text: str, solver: bool = True) -> UnsupportedError:
    """The error for a declaration that is not supported.

    Args:
        what: is not supported.
        kind: of the declaration: network, input, hidden or output.
        number: of the declaration among those of its kind.
        text: the file's.
        solver: whether the standard's command line supports it.
    """
    places = [match.start() for match in re.finditer(rf"\(\s*declare-{kind}\b", text)]
    start = places[number] if number < len(places) else 0
    instead = "here, but by `python -m verifiable_relu.solver verify`"
    return UnsupportedError(
        f"{what} is not supported{f' {instead}' * solver}", place=place(text.count("\n", 0, start) + 1)
    )


class Translator:
    """The translation of the parser's expressions into terms and formulas."""

    def __init__(self, source: Source, inputs: Variable, outputs: Variable) -> None:
        self.source = source
        self.shapes = {inputs.name: inputs.shape, outputs.name: outputs.shape}
        self.input_name = inputs.name
        self.arithmetic = Arithmetic()

    def value(self, root: Any) -> Any:
        """The formula of a condition, or the linear term of an arithmetic expression.

        The method keeps a stack of its own, because files may be nested more deeply than Python's calls.
        """
        done: list[Any] = []
        pending = [(root, -1)]
        while pending:
            expression, arguments = pending.pop()
            if arguments < 0 and (parts := _parts(expression)):
                pending.append((expression, len(parts)))
                pending += ((part, -1) for part in reversed(parts))
            elif arguments < 0:
                done.append(self.leaf(expression))
            else:
                values = done[-arguments:]
                del done[-arguments:]
                done.append(self.combined(expression, values))
        return done.pop()

    def leaf(self, expression: Any) -> LinearTerm:
        if isinstance(expression, standard.Literal):
            try:
                return LinearTerm(constant=number(expression.lexeme))
            except InputError as error:
                raise self.located(error, expression) from None
        if not isinstance(expression, standard.Var):
            raise UnsupportedError(f"the expression '{str(expression).strip()[:_SHOWN]}' is not supported")
        position = 0
        for i, extent in zip(expression.indices, self.shapes[expression.name], strict=True):
            if not 0 <= i < extent:  # The parser accepts X[-1].
                raise self.located(InputError(f"the index {i} is not in 0 … {extent - 1}"), expression)
            position = position * extent + i
        return self.variable(expression.name, position)

    def variable(self, name: str, position: int) -> LinearTerm:
        """The term of one element of a variable."""
        one = {position: ONE}
        return LinearTerm(one) if name == self.input_name else LinearTerm(outputs=one)

    def combined(self, expression: Any, values: list[Any]) -> LinearTerm | Formula:
        kind = type(expression)
        if kind in (standard.And, standard.Or):
            return And(tuple(values)) if kind is standard.And else Or(tuple(values))
        try:
            if kind in _COMPARISONS:
                left, right = values
                return self.arithmetic.compare(_COMPARISONS[kind], left, right, line_of(expression))
            return self.arithmetic.apply(_OPERATORS[kind], values)
        except InputError as error:
            raise self.located(error, expression) from None

    def located(self, error: InputError, expression: Any) -> InputError:
        line = line_of(expression)
        return type(error)(f"{error.message}: {self.source.quoted_line(line)}", place=place(line))


def _parts(expression: Any) -> tuple[Any, ...]:
    """The direct subexpressions of an expression in order; none for a variable, a number or an unknown expression."""
    match expression:
        case standard.And() | standard.Or() | standard.Plus() | standard.Multiply():
            return tuple(expression.args)
        case standard.Comparison():
            return expression.lhs, expression.rhs
        case standard.Minus():
            return expression.head, *expression.rest
        case standard.Negate():
            return (expression.expr,)
    return ()


def line_of(expression: Any) -> int:
    """The line of the first variable or number in an expression."""
    while not isinstance(expression, standard.Var | standard.Literal):
        expression = expression.children()[0]
    return int(expression.line)
