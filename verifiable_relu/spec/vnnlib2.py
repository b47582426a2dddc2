"""The reader of VNN-LIB 2.0, which uses the standard's own parser and type checker (the package ``vnnlib``).

The parser's expressions are translated into a :class:`Formula`, with numbers taken from their text, so that decimals
stay exact. The parser is a C++ library that crashes, and the process with it, on text that is nested too deeply or too
long. It is therefore given text within known limits only. Comments are removed before, because the parser ends a
comment at a line feed only, not at a carriage return.

A query of several networks, or one that relates inputs to each other or to outputs, becomes one of a single network
(``network.product``). Inputs that the query makes equal, as in ``(== X_f[0] X_g[0])``, are one input. What else relates
inputs to each other is a constraint on the product's outputs, among which the inputs are then passed on. Bounds that
such a constraint implies for an input, as ``(<= X_f[0] X_g[0])`` does, bound its box. A product of variables is one
more of the product's outputs, so that all constraints are linear in its outputs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import vnnlib as standard

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.spec import limits
from verifiable_relu.spec.formula import (
    ONE,
    And,
    Arithmetic,
    Formula,
    LinearTerm,
    Or,
    number,
    properties,
)
from verifiable_relu.spec.read import Source
from verifiable_relu.spec.relations import Relations, implied
from verifiable_relu.spec.specfile import KINDS, Declared, DeclaredTensor, Joined, SpecFile, Variable, stem

_COMPARISONS = {
    standard.LessEqual: "<=",
    standard.LessThan: "<",
    standard.GreaterEqual: ">=",
    standard.GreaterThan: ">",
    standard.Equal: "=",
    standard.NotEqual: "!=",
}
_OPERATORS = {standard.Negate: "-", standard.Plus: "+", standard.Minus: "-", standard.Multiply: "*"}
# The standard's examples write Real, while its parser knows the type real. The parser accepts any unknown word as a
# type, and then checks no types.
_REAL = re.compile(r"(\(\s*declare-(?:input|hidden|output)\s+[^\s()]+\s+)Real\b")
_SHOWN = 60
"""The most characters of a token that a message quotes."""
_SYNTAX = re.compile(r"syntax error at line (\d+), column \d+: '(.*)'", re.DOTALL)
_LONG = re.compile(rf"[0-9.]{{{limits.DIGITS + 1}}}")
# Some of the competition's files write the version without its brackets.
_VERSION = re.compile(r"(\(\s*vnnlib-version\s+)([0-9.]+)(?=\s*\))")
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
    inputs: dict[str, Variable] = {}
    given: dict[str, Variable] = {}
    outputs: dict[str, int] = {}
    total = 0
    for network in query.networks:
        inputs |= {one.name: _variable(one, source.text) for one in network.inputs}
        for one in (*network.outputs, *network.hidden):
            given[one.name], outputs[one.name] = _variable(one, source.text), total
            total += given[one.name].size
    if max(total, sum(variable.size for variable in inputs.values())) > limits.ELEMENTS_2:
        raise InputError(f"the networks have more than {limits.ELEMENTS_2:,} inputs or outputs together")
    conditions = [part for assertion in query.assertions for part in _conjuncts(assertion.expr)]
    ties = _Ties(inputs)
    rest = [condition for condition in conditions if not ties.take(condition)]
    numbers, size = ties.numbered()
    relations = Relations(total, size)
    translator = _Translator(source, (*inputs.values(), *given.values()), numbers, outputs, relations)
    formula: Formula = And(tuple(translator.value(condition) for condition in rest))
    formula = And((formula, *implied(formula, total, size)))
    names = {
        number: variable.element(i, "2.0")
        for variable in reversed(inputs.values())
        for i, number in enumerate(numbers[variable.name])
    }
    joined = Joined(
        tuple(_declared(network, numbers, outputs) for network in query.networks),
        size,
        relations.used,
        tuple(relations.products),
    )
    found = properties(formula, size, names.__getitem__, stem(path), place)
    x, y = (
        next(iter(each.values())) if len(each) == 1 else Variable(name, (count,))
        for each, name, count in ((inputs, "X", size), (given, "Y", total))
    )
    return SpecFile(path, "2.0", found, x, y, tuple(network.name for network in query.networks), joined=joined)


def _variable(declared: Any, text: str) -> Variable:
    """A variable of real numbers that a network declares."""
    if declared.dtype.name not in KINDS:
        found = re.search(rf"declare-(?:input|hidden|output)\s+{re.escape(declared.name)}\s", text)
        line = place(text.count("\n", 0, found.start() if found else 0) + 1)
        raise UnsupportedError(f"the element type of '{declared.name}' is not supported", place=line)
    return Variable(declared.name, tuple(declared.shape))


def parsed(source: Source) -> Any:
    """The query that the standard's parser makes of a text.

    Raises:
        InputError: with the place in the file, but naming no file.
    """
    _check_size(source)
    try:
        query = standard.parse_query_string(_VERSION.sub(r"\1<\2>", _REAL.sub(r"\1real", source.text), count=1))
    except standard.VNNLibException as error:
        raise _explained(str(error), source) from None
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        # The classes of exceptions that the parser raises where its authors did not expect an error.
        raise InputError(f"the parser of VNN-LIB 2.0 refuses the file: {error}") from None
    if match := _RUN_TOGETHER.search(source.text):
        raise InputError(f"a blank is missing after '{match[0][:-1][:_SHOWN]}'", place=source.place(match.start()))
    return query


def _check_size(source: Source) -> None:
    if len(source.text) > limits.BYTES_2:
        raise InputError(f"larger than {limits.BYTES_2:,} bytes")
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


class _Translator:
    """The translation of the parser's expressions into terms and formulas.

    Args:
        source: the text.
        variables: of all networks.
        inputs: for each element of an input, by the input's name, the input of the network asked about that it is.
        outputs: by the name of an output or hidden node, the output of that network at which it begins.
        arithmetic: of the file's terms.
    """

    def __init__(
        self,
        source: Source,
        variables: Sequence[Variable],
        inputs: Mapping[str, Sequence[int]],
        outputs: Mapping[str, int],
        arithmetic: Arithmetic,
    ) -> None:
        self.source, self.inputs, self.outputs, self.arithmetic = source, inputs, outputs, arithmetic
        self.shapes = {variable.name: variable.shape for variable in variables}

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
                continue
            values = done[-arguments:] if arguments > 0 else []
            del done[len(done) - len(values) :]
            try:
                done.append(self.combined(expression, values) if values else self.leaf(expression))
            except InputError as error:
                line = _line_of(expression)
                said = f"{error.message}: {self.source.quoted_line(line)}"
                raise type(error)(said, place=place(line)) from None
        return done.pop()

    def leaf(self, expression: Any) -> LinearTerm:
        if isinstance(expression, standard.Literal):
            return LinearTerm(constant=number(expression.lexeme))
        name, position = expression.name, _position(expression, self.shapes[expression.name])
        if name in self.inputs:
            return LinearTerm({self.inputs[name][position]: ONE})
        return LinearTerm(outputs={self.outputs[name] + position: ONE})

    def combined(self, expression: Any, values: list[Any]) -> LinearTerm | Formula:
        kind = type(expression)
        if kind in (standard.And, standard.Or):
            return And(tuple(values)) if kind is standard.And else Or(tuple(values))
        if kind in _COMPARISONS:
            left, right = values
            return self.arithmetic.compare(_COMPARISONS[kind], left, right, _line_of(expression))
        return self.arithmetic.apply(_OPERATORS[kind], values)


def _position(variable: Any, shape: Sequence[int]) -> int:
    """The row-major index of the element that an expression such as ``X[0,1]`` names."""
    position = 0
    for i, extent in zip(variable.indices, shape, strict=True):
        if not 0 <= i < extent:  # The parser accepts X[-1].
            raise InputError(f"the index {i} is not in 0 … {extent - 1}")
        position = position * extent + i
    return position


def _parts(expression: Any) -> tuple[Any, ...]:
    """The direct subexpressions of an expression in order; none for a variable or a number."""
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
    """The line of the first variable or number in an expression."""
    while not isinstance(expression, standard.Var | standard.Literal):
        expression = expression.children()[0]
    return int(expression.line)


# --- several networks, related inputs, products ----------------------------------------------------------------------


def _declared(network: Any, numbers: Mapping[str, list[int]], outputs: Mapping[str, int]) -> Declared:
    """A network of the query, given the product's inputs and outputs that its own are."""
    inputs, hidden, given = (
        tuple(
            DeclaredTensor(Variable(one.name, tuple(one.shape)), one.dtype.name, (one.onnx_name or "").strip('"'))
            for one in each
        )
        for each in (network.inputs, network.hidden, network.outputs)
    )
    places = tuple(number for tensor in inputs for number in numbers[tensor.variable.name])
    start = outputs[given[0].variable.name]
    return Declared(network.name, network.equal_to, inputs, hidden, given, places, start)


def _conjuncts(expression: Any) -> Iterator[Any]:
    """The parts of a condition that all must hold."""
    pending = [expression]
    while pending:
        each = pending.pop()
        if isinstance(each, standard.And):
            pending += reversed(list(each.args))
        else:
            yield each


class _Ties:
    """The inputs that a query makes equal.

    Args:
        inputs: the networks' inputs, by name, in the order of their declarations.
    """

    def __init__(self, inputs: Mapping[str, Variable]) -> None:
        self.inputs = inputs
        ends = list(accumulate((variable.size for variable in inputs.values()), initial=0))
        self.first = dict(zip(inputs, ends, strict=False))
        # Of each element the least that it was found to equal, or one on the way there.
        self.parent = list(range(ends[-1]))

    def take(self, condition: Any) -> bool:
        """Whether a condition says that two inputs are equal, which is then known."""
        if not isinstance(condition, standard.Equal):
            return False
        sides: tuple[Any, Any] = condition.lhs, condition.rhs
        if not all(isinstance(side, standard.Var) and side.name in self.inputs for side in sides):
            return False
        least, other = sorted(map(self._root, map(self._element, sides)))
        self.parent[other] = least
        return True

    def numbered(self) -> tuple[dict[str, list[int]], int]:
        """The number of each input's class, by name and position, and the number of classes."""
        known: dict[int, int] = {}
        numbers = [known.setdefault(self._root(element), len(known)) for element in range(len(self.parent))]
        return {name: numbers[self.first[name] :][: one.size] for name, one in self.inputs.items()}, len(known)

    def _element(self, side: Any) -> int:
        try:
            return self.first[side.name] + _position(side, self.inputs[side.name].shape)
        except InputError as error:
            raise InputError(f"'{side.name}': {error.message}", place=place(int(side.line))) from None

    def _root(self, element: int) -> int:
        while self.parent[element] != element:
            element = self.parent[element]
        return element
