"""The reader of VNN-LIB 2.0, which uses the standard's own parser and type checker (the package ``vnnlib``).

The parser's expressions are translated into a :class:`Formula`, with numbers taken from their text, so that decimals
stay exact. The parser is a C++ library that crashes, and the process with it, on text that is nested too deeply or too
long. It is therefore given text within known limits only. Comments are removed before, because the parser ends a
comment at a line feed only, not at a carriage return.

A query of several networks, or one that relates inputs to each other or to outputs, becomes one of a single network
(``network.product``). Inputs that the query makes equal, as in ``(== X_f[0] X_g[0])``, are one input. What else relates
inputs to each other is a constraint on the product's outputs, among which the inputs are then passed on. Bounds that
such a constraint implies for an input, as ``(<= X_f[0] X_g[0])`` does, bound its box.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from pathlib import Path
from typing import Any

import vnnlib as standard

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.files import read_text
from verifiable_relu.spec import limits
from verifiable_relu.spec.formula import (
    ONE,
    And,
    Arithmetic,
    Bound,
    Formula,
    LinearTerm,
    Or,
    conjunction,
    number,
    properties,
)
from verifiable_relu.spec.property import Property
from verifiable_relu.spec.read import Source, located, source
from verifiable_relu.spec.specfile import SpecFile, Variable, stem

_COMPARISONS = {
    standard.LessEqual: "<=",
    standard.LessThan: "<",
    standard.GreaterEqual: ">=",
    standard.GreaterThan: ">",
    standard.Equal: "=",
    standard.NotEqual: "!=",
}
_OPERATORS = {standard.Negate: "-", standard.Plus: "+", standard.Minus: "-", standard.Multiply: "*"}
_REALS = {"Real", "F16", "BF16", "F32", "F64"}
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


_PASSES = 10
"""The most passes over the constraints in which bounds of inputs are implied by those of others."""


def parse(source: Source, path: Path) -> SpecFile:
    """Read the text of a 2.0 file; the properties are named after ``path``.

    Raises:
        InputError, UnsupportedError: with the place in the file, but naming no file.
    """
    query = parsed(source)
    network = _only_network(query, source.text)
    inputs, outputs = _variable(network.inputs[0]), _variable(network.outputs[0])
    for variable in (inputs, outputs):
        if variable.size > limits.ELEMENTS_2:
            raise InputError(f"'{variable.name}' has {variable.size:,} elements, more than {limits.ELEMENTS_2:,}")
    translator = _Translator(source, (inputs, outputs), {inputs.name: range(inputs.size)}, {outputs.name: 0})
    formula = And(tuple(translator.value(assertion.expr) for assertion in query.assertions))
    found = properties(formula, inputs.size, lambda i: inputs.element(i, "2.0"), stem(path), place)
    return SpecFile(path, "2.0", found, inputs, outputs, (network.name,))


def _variable(declared: Any) -> Variable:
    return Variable(declared.name, tuple(declared.shape))


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
    """The network of a query that declares one network, with one input and one output of real numbers."""
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
        arithmetic: Arithmetic | None = None,
    ) -> None:
        self.source, self.inputs, self.outputs = source, inputs, outputs
        self.shapes = {variable.name: variable.shape for variable in variables}
        self.arithmetic = arithmetic or Arithmetic()

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


# --- queries of several networks -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeclaredTensor:
    """An input, output or hidden node of a network as a query declares it.

    Attributes:
        variable: its name and shape.
        kind: the type of its elements, as VNN-LIB writes it.
        node: of a hidden node, the tensor of the ONNX file that it is. Inputs and outputs are the file's in its order:
            the standard's parser knows no names for them. Empty for these.
    """

    variable: Variable
    kind: str
    node: str


@dataclass(frozen=True)
class Declared:
    """A network as a query declares it.

    Attributes:
        name: its name in the query.
        equal_to: the network that it equals, whose file is also this one's; empty if it has a file of its own.
        inputs: its inputs.
        hidden: nodes within it.
        outputs: its outputs.
        places: for each element of its inputs, one input after another, the product's input that it is.
        start: the product's output at which its outputs begin, which its hidden nodes follow.
    """

    name: str
    equal_to: str
    inputs: tuple[DeclaredTensor, ...]
    hidden: tuple[DeclaredTensor, ...]
    outputs: tuple[DeclaredTensor, ...]
    places: tuple[int, ...]
    start: int

    @property
    def given(self) -> tuple[DeclaredTensor, ...]:
        """The outputs and then the hidden nodes: what the network gives the product."""
        return (*self.outputs, *self.hidden)


@dataclass(frozen=True)
class Joined:
    """A query of one or several networks as properties of their product.

    Attributes:
        path: the file.
        networks: the networks, in the order of their declarations.
        properties: the query is *sat* if any of them is, and *unsat* if all are.
        size: the number of the product's inputs.
        passed: whether the product passes its inputs on among its outputs.
    """

    path: Path
    networks: tuple[Declared, ...]
    properties: tuple[Property, ...]
    size: int
    passed: bool


def read_joined(path: Path | str) -> Joined:
    """Read a VNN-LIB 2.0 query of any number of networks.

    Raises:
        InputError: if the file is no well-formed query, or an input has no bounds; with file, line and reason.
        UnsupportedError: for elements that are no floating-point numbers, or constraints that are not linear.
    """
    path = Path(path)
    with located(path):
        text = source(read_text(path, limits.BYTES))
        return _joined(text, path, parsed(text))


def _joined(source: Source, path: Path, query: Any) -> Joined:
    inputs: dict[str, Variable] = {}
    given: dict[str, Variable] = {}
    outputs: dict[str, int] = {}
    total = 0
    for network in query.networks:
        inputs |= {one.name: _variable(one) for one in network.inputs}
        for one in (*network.outputs, *network.hidden):
            given[one.name], outputs[one.name] = _variable(one), total
            total += given[one.name].size
    if max(total, sum(variable.size for variable in inputs.values())) > limits.ELEMENTS_2:
        raise InputError(f"the networks have more than {limits.ELEMENTS_2:,} inputs or outputs together")
    conditions = [part for assertion in query.assertions for part in _conjuncts(assertion.expr)]
    ties = _Ties(inputs)
    rest = [condition for condition in conditions if not ties.take(condition)]
    numbers, size = ties.numbered()
    relations = _Relations(total)
    translator = _Translator(source, (*inputs.values(), *given.values()), numbers, outputs, relations)
    formula: Formula = And(tuple(translator.value(condition) for condition in rest))
    formula = And((formula, *_implied(formula, total)))
    names = {
        number: variable.element(i, "2.0")
        for variable in reversed(inputs.values())
        for i, number in enumerate(numbers[variable.name])
    }
    declared = tuple(_declared(network, numbers, outputs) for network in query.networks)
    return Joined(path, declared, properties(formula, size, names.__getitem__, stem(path), place), size, relations.used)


def _declared(network: Any, numbers: Mapping[str, list[int]], outputs: Mapping[str, int]) -> Declared:
    """A network of the query, given the product's inputs and outputs that its own are."""
    inputs, hidden, given = (
        tuple(DeclaredTensor(_variable(one), one.dtype.name, (one.onnx_name or "").strip('"')) for one in each)
        for each in (network.inputs, network.hidden, network.outputs)
    )
    for tensor in (*inputs, *hidden, *given):
        if tensor.kind not in _REALS:
            raise UnsupportedError(f"the element type of '{tensor.variable.name}' is not supported")
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


class _Relations(Arithmetic):
    """Comparisons in which inputs that are related stand for outputs that pass them on.

    Args:
        start: the first of these outputs.

    Attributes:
        used: whether there was such a comparison.
    """

    def __init__(self, start: int) -> None:
        super().__init__()
        self.start = start
        self.used = False

    def compare(self, operator: str, left: LinearTerm, right: LinearTerm, mark: int) -> Formula:
        if operator not in ("=", "!="):
            term = left if right.is_constant and not right.constant else self.apply("-", [left, right])
            if len(term.inputs) > 1 or (term.inputs and term.outputs):
                self.used = True
                passed = {self.start + i: c for i, c in term.inputs.items()}
                left, right = LinearTerm(outputs={**term.outputs, **passed}, constant=term.constant), LinearTerm()
        return super().compare(operator, left, right, mark)


def _implied(formula: Formula, start: int) -> list[Bound]:
    """The bounds of inputs that follow from the bounds of others, by rows over passed inputs that always hold.

    Args:
        formula: the whole formula.
        start: the first output that passes an input on.
    """
    ends: dict[tuple[int, bool], Fraction] = {}
    bounds, given, _ = conjunction(formula, True)
    for bound in bounds:
        key, better = (bound.variable, bound.upper), min if bound.upper else max
        ends[key] = better(ends.get(key, bound.value), bound.value)
    rows = [row for row in given if all(i >= start for i, _ in row.coefficients)]
    found: dict[tuple[int, bool], Fraction] = {}
    for _ in range(_PASSES):
        changed = False
        for row in rows:
            for i, c in row.coefficients:
                # c·x_i ≤ bound − Σ of the others, each at its least.
                least = [(d, ends.get((j - start, d < 0))) for j, d in row.coefficients if j != i]
                if any(end is None for _, end in least):
                    continue
                value = (row.bound - sum((d * end for d, end in least if end is not None), Fraction(0))) / c
                key = (i - start, c > 0)
                if key not in ends:
                    ends[key] = found[key] = value
                    changed = True
        if not changed:
            break
    return [Bound(variable, upper, value, False, 0) for (variable, upper), value in found.items()]
