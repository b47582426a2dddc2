"""VNN-LIB 2.0 queries of several networks, and those that relate inputs to each other or to outputs.

Such a query becomes one of a single network (``network.product``). Inputs that the query makes equal, as in
``(== X_f[0] X_g[0])``, are one input. What else relates inputs to each other is a constraint on the product's outputs,
among which the inputs are then passed on. Bounds that such a constraint implies for an input, as ``(<= X_f[0] X_g[0])``
does, bound its box.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import vnnlib as standard

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.files import read_text
from verifiable_relu.spec import limits
from verifiable_relu.spec.disjuncts import properties
from verifiable_relu.spec.formula import And, Bound, Formula
from verifiable_relu.spec.lexical import Source, source
from verifiable_relu.spec.property import Property, Row
from verifiable_relu.spec.specfile import Variable, stem
from verifiable_relu.spec.terms import ONE, Arithmetic, LinearTerm
from verifiable_relu.spec.vnnlib2 import REALS, Translator, parsed, place

_PASSES = 10
"""The most passes over the constraints in which bounds of inputs are implied by those of others."""


@dataclass(frozen=True)
class Tensor:
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
    inputs: tuple[Tensor, ...]
    hidden: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    places: tuple[int, ...]
    start: int

    @property
    def given(self) -> tuple[Tensor, ...]:
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
    try:
        text = source(read_text(path, limits.BYTES))
        return _joined(text, path, parsed(text))
    except InputError as error:
        raise error.located(path) from None
    except RecursionError:
        raise InputError("conditions are nested too deeply", path=path) from None


def _joined(text: Source, path: Path, query: Any) -> Joined:
    inputs: dict[str, Variable] = {}
    shapes: dict[str, Variable] = {}
    outputs: dict[str, int] = {}
    starts: dict[str, int] = {}
    total = 0
    for network in query.networks:
        inputs |= {one.name: _variable(one) for one in network.inputs}
        starts[network.name] = total
        for given in (*network.outputs, *network.hidden):
            shapes[given.name] = _variable(given)
            outputs[given.name] = total
            total += shapes[given.name].size
    shapes |= inputs
    if max(total, sum(variable.size for variable in inputs.values())) > limits.ELEMENTS_2:
        raise InputError(f"the networks have more than {limits.ELEMENTS_2:,} inputs or outputs together")
    conditions = [part for assertion in query.assertions for part in _conjuncts(assertion.expr)]
    ties = _Ties(inputs)
    rest = [condition for condition in conditions if not ties.take(condition)]
    numbers, size = ties.numbered()
    declared = tuple(_declared(network, numbers, starts[network.name]) for network in query.networks)
    translator = _Translator(text, shapes, numbers, outputs, total)
    formula: Formula = And(tuple(translator.value(condition) for condition in rest))
    formula = And((formula, *_implied(formula, total)))
    names = {number: variable.element(i, "2.0") for variable in reversed(inputs.values())
             for i, number in enumerate(numbers[variable.name])}  # fmt: skip
    found = properties(formula, size, lambda i: names[i], stem(path), place)
    return Joined(path, declared, found, size, translator.relations.used)


def _declared(network: Any, numbers: Mapping[str, list[int]], start: int) -> Declared:
    """A network of the query.

    Args:
        network: as the parser has it.
        numbers: the product's input of each element, by the input's name.
        start: the product's output at which the network's outputs begin.

    Raises:
        UnsupportedError: if elements are no floating-point numbers.
    """
    inputs, hidden, outputs = (
        tuple(Tensor(_variable(one), one.dtype.name, (one.onnx_name or "").strip('"')) for one in each)
        for each in (network.inputs, network.hidden, network.outputs)
    )
    for tensor in (*inputs, *hidden, *outputs):
        if tensor.kind not in REALS:
            raise UnsupportedError(f"the element type of '{tensor.variable.name}' is not supported")
    places = tuple(number for tensor in inputs for number in numbers[tensor.variable.name])
    return Declared(network.name, network.equal_to, inputs, hidden, outputs, places, start)


def _variable(declared: Any) -> Variable:
    return Variable(declared.name, tuple(declared.shape))


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
        self.parent = {(name, i): (name, i) for name, v in inputs.items() for i in range(v.size)}

    def take(self, condition: Any) -> bool:
        """Whether a condition says that two inputs are equal, which is then known."""
        if not isinstance(condition, standard.Equal):
            return False
        sides: tuple[Any, Any] = condition.lhs, condition.rhs
        if not all(isinstance(side, standard.Var) and side.name in self.inputs for side in sides):
            return False
        one, other = (self._root((side.name, self._position(side))) for side in sides)
        self.parent[max(one, other, key=self._order)] = min(one, other, key=self._order)
        return True

    def numbered(self) -> tuple[dict[str, list[int]], int]:
        """The number of each input's class, by name and position, and the number of classes."""
        known: dict[tuple[str, int], int] = {}
        numbers = {
            name: [known.setdefault(self._root((name, i)), len(known)) for i in range(variable.size)]
            for name, variable in self.inputs.items()
        }
        return numbers, len(known)

    def _position(self, side: Any) -> int:
        position = 0
        for i, extent in zip(side.indices, self.inputs[side.name].shape, strict=True):
            if not 0 <= i < extent:
                raise InputError(
                    f"the index {i} of '{side.name}' is not in 0 … {extent - 1}", place=place(int(side.line))
                )
            position = position * extent + i
        return position

    def _order(self, element: tuple[str, int]) -> tuple[int, int]:
        return list(self.inputs).index(element[0]), element[1]

    def _root(self, element: tuple[str, int]) -> tuple[str, int]:
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


class _Translator(Translator):
    """The translation of expressions over the variables of several networks.

    Args:
        source: the file.
        variables: all variables by name.
        numbers: the product's input of each element, by the input's name.
        outputs: the product's output at which a network's output begins, by its name.
        total: the number of the networks' outputs together.
    """

    def __init__(
        self,
        source: Source,
        variables: Mapping[str, Variable],
        numbers: Mapping[str, list[int]],
        outputs: Mapping[str, int],
        total: int,
    ) -> None:
        self.source = source
        self.shapes = {name: variable.shape for name, variable in variables.items()}
        self.numbers, self.outputs = numbers, outputs
        self.arithmetic = self.relations = _Relations(total)

    def variable(self, name: str, position: int) -> LinearTerm:
        if name in self.numbers:
            return LinearTerm({self.numbers[name][position]: ONE})
        return LinearTerm(outputs={self.outputs[name] + position: ONE})


def _implied(formula: Formula, start: int) -> list[Bound]:
    """The bounds of inputs that follow from the bounds of others, by rows over passed inputs that always hold.

    Args:
        formula: the whole formula.
        start: the first output that passes an input on.
    """
    ends: dict[tuple[int, bool], Fraction] = {}
    rows: list[Row] = []
    for part in _always(formula):
        if isinstance(part, Bound):
            key, better = (part.variable, part.upper), min if part.upper else max
            ends[key] = better(ends.get(key, part.value), part.value)
        elif isinstance(part, Row) and all(i >= start for i, _ in part.coefficients):
            rows.append(part)
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


def _always(formula: Formula) -> Iterable[Formula]:
    pending = [formula]
    while pending:
        each = pending.pop()
        if isinstance(each, And):
            pending += each.parts
        else:
            yield each
