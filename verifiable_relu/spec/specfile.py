"""A property file as the readers return it, and the writing of VNN-LIB files, 1.0 and 2.0.

Numbers are written as exact decimals. A constraint with a number that no decimal equals, such as 1/255, is multiplied
by the denominator: ``(<= (* 255.0 X_0) 1.0)``. ``linf_properties(…, decimals=…)`` makes boxes that need no product.
"""

from __future__ import annotations

import gzip
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np

from verifiable_relu.errors import InputError
from verifiable_relu.spec.property import Box, Property, Row

# The types of real numbers by the names that the standard's parser has for them.
KINDS = {"Real": "Real", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}


@dataclass(frozen=True)
class Variable:
    """A network's input, output or hidden node as a property file declares it; the shape () is a scalar's.

    The type ``kind`` of its elements is one of ``KINDS``. A hidden node is the tensor ``node`` of the ONNX file. Inputs
    and outputs are the file's in its order: the standard's parser knows no names for them, and ``node`` is empty.
    """

    name: str
    shape: tuple[int, ...]
    kind: str = field(default="Real", compare=False)
    node: str = field(default="", compare=False)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def element(self, index: int, version: str) -> str:
        """Return the name of the element with a row-major index: X_0, X_1 … in 1.0; X[0,0], X[0,1] … in 2.0."""
        if version == "1.0":
            return f"{self.name}_{index}"
        return f"{self.name}[{','.join(map(str, np.unravel_index(index, self.shape)))}]" if self.shape else self.name

    def elements(self, version: str) -> list[str]:
        return [self.element(index, version) for index in range(self.size)]


@dataclass(frozen=True)
class DeclaredNetwork:
    """A network as a query of VNN-LIB 2.0 declares it; if it equals another, ``equal_to``, it shares its file.

    Its inputs' elements, one input after another, are the inputs ``places`` of the network asked about; its outputs and
    then its hidden nodes begin at the output ``start``.
    """

    name: str
    equal_to: str
    inputs: tuple[Variable, ...]
    hidden: tuple[Variable, ...]
    outputs: tuple[Variable, ...]
    places: tuple[int, ...]
    start: int

    @property
    def given(self) -> tuple[Variable, ...]:
        """The outputs and then the hidden nodes: what the network gives the one asked about."""
        return (*self.outputs, *self.hidden)


class ProductFactor(NamedTuple):
    """The affine form Σ coefficient·y_i + constant of outputs; coefficients are not zero."""

    coefficients: tuple[tuple[int, int], ...]
    constant: int


@dataclass(frozen=True)
class JoinedNetwork:
    """The network that a query of VNN-LIB 2.0 asks about, made of those that it declares, with ``size`` inputs.

    Its outputs are those of the declared networks, then its inputs if they are ``passed`` on, and then products, each
    with its two factors over the outputs before it.
    """

    networks: tuple[DeclaredNetwork, ...]
    size: int
    passed: bool = False
    products: tuple[tuple[ProductFactor, ProductFactor], ...] = ()

    @property
    def alone(self) -> bool:
        return len(self.networks) == 1 and not self.passed and self.networks[0].places == tuple(range(self.size))


@dataclass(frozen=True)
class SpecFile:
    """The content of a property file: *sat* if any of its properties (at least one) is, and *unsat* if all are.

    Attributes:
        path: the file.
        version: "1.0" or "2.0".
        inputs: the declared input, or all of them as one vector.
        outputs: the declared output, or all of them as one vector.
        networks: the names of the networks that 2.0 declares.
        network: the file that a comment ``; network: file.onnx`` names, relative to the folder of ``path``, or None.
        joined: the network asked about as 2.0 declares it, or 1.0 that relates inputs or multiplies variables; or None.
    """

    path: Path
    version: str
    properties: tuple[Property, ...]
    inputs: Variable
    outputs: Variable
    networks: tuple[str, ...] = ()
    network: str | None = None
    joined: JoinedNetwork | None = None


def stem(path: Path | str) -> str:
    """Return a file's name without its folder, without ``.gz`` and without its last extension before that."""
    return Path(Path(path).name.removesuffix(".gz")).stem


_MOST_PLACES = 4_000
_LARGEST = Fraction(10**300)
TRUE, FALSE = "(<= 0.0 1.0)", "(<= 1.0 0.0)"


def write_vnnlib(
    spec: SpecFile | Property, path: Path | str, version: str = "1.0", comments: Sequence[str] = ()
) -> None:
    """Write a property file; the properties that a reader gets from it have the same boxes and unsafe sets.

    Args:
        spec: the properties. A ``SpecFile`` also has the shapes that 2.0 declares and the network's name; a bare
            ``Property`` declares vectors of its inputs, and of outputs up to its largest output index.
        path: the file, which is gzipped if the name ends in ``.gz``.
        version: "1.0" or "2.0".
        comments: comments at the top of the file.

    Raises:
        InputError: if the file cannot be written, and as ``vnnlib_text``.
    """
    path = Path(path)
    data = vnnlib_text(spec, version, comments).encode()
    try:
        path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", path=path) from None


def vnnlib_text(spec: SpecFile | Property, version: str = "1.0", comments: Sequence[str] = ()) -> str:
    """Return the text that :func:`write_vnnlib` writes.

    Raises:
        InputError: for an unknown version, a ball, unbounded inputs, several networks or products.
    """
    if version not in ("1.0", "2.0"):
        raise InputError(f"there is no VNN-LIB '{version}' to write, only 1.0 and 2.0")
    if isinstance(spec, Property):
        inputs, outputs = Variable("X", (spec.box.size,)), Variable("Y", (max(spec.output_size, 1),))
        spec = SpecFile(Path(spec.name), version, (spec,), inputs, outputs)
    if any(prop.ball is not None for prop in spec.properties):
        raise InputError("VNN-LIB cannot describe an L1 or L2 ball")
    if partial := next((prop.partial for prop in spec.properties if prop.partial), ""):
        raise InputError(f"a property of unbounded inputs is not written: {partial}")
    if spec.joined is not None and not spec.joined.alone:
        raise InputError("a property of several networks, of related inputs or of products is not written")
    lines = [f"; {line}" for comment in comments for line in comment.splitlines()]
    if spec.network is not None:
        lines.append(f"; network: {spec.network}")
    inputs, outputs = spec.inputs, spec.outputs
    if version == "1.0":
        inputs, outputs = Variable("X", inputs.shape), Variable("Y", outputs.shape)
        lines += [f"(declare-const {name} Real)" for each in (inputs, outputs) for name in each.elements(version)]
    else:
        lines += ["(vnnlib-version <2.0>)", f"(declare-network {spec.networks[0] if spec.networks else 'N'}"]
        for role, each in (("input", inputs), ("output", outputs)):
            lines.append(f"  (declare-{role} {each.name} float32 [{','.join(map(str, each.shape))}])")
        lines.append(")")
    lines += _assertions(spec.properties, inputs.elements(version), outputs.elements(version))
    return "\n".join(lines) + "\n"


def _assertions(properties: Sequence[Property], inputs: Sequence[str], outputs: Sequence[str]) -> Iterator[str]:
    """Yield the bounds that all boxes share and the disjunction of polytopes, each with its box's other bounds."""
    boxes = [list(_bounds(prop.box, inputs)) for prop in properties]
    shared = [len(set(same)) == 1 for same in zip(*boxes, strict=True)]
    conditions = [bound for bound, common in zip(boxes[0], shared, strict=True) if common]
    cases: list[list[str]] = []
    for prop, box in zip(properties, boxes, strict=True):
        special = [bound for bound, common in zip(box, shared, strict=True) if not common]
        cases += (special + [_row(row, outputs) for row in polytope] for polytope in prop.unsafe)
    if len(cases) == 1:
        conditions += cases[0]
    else:
        texts = [case[0] if len(case) == 1 else f"(and {' '.join(case)})" if case else TRUE for case in cases]
        conditions.append("\n  ".join(["(or", *texts]) + ")" if texts else FALSE)
    return (f"(assert {condition})" for condition in conditions)


def _bounds(box: Box, names: Sequence[str]) -> Iterator[str]:
    for i, name in enumerate(names):
        lower, upper = box.bounds(i)
        yield _bound(">" if i in box.open_lower else ">=", name, lower)
        yield _bound("<" if i in box.open_upper else "<=", name, upper)


def _bound(operator: str, name: str, value: Fraction) -> str:
    if (number := decimal(value)) is not None:
        return f"({operator} {name} {number})"
    return f"({operator} (* {_integer(value.denominator)} {name}) {_integer(value.numerator)})"


def _row(row: Row, names: Sequence[str]) -> str:
    operator = "<" if row.strict else "<="
    if any(decimal(value) is None for value in (*(c for _, c in row.coefficients), row.bound)):
        scale = math.lcm(row.bound.denominator, *(c.denominator for _, c in row.coefficients))
        row = Row(tuple((i, c * scale) for i, c in row.coefficients), row.bound * scale, row.strict)
    match row.coefficients:
        case ((i, c),) if abs(c) == 1:
            return _bound(operator if c > 0 else operator.replace("<", ">"), names[i], row.bound * c)
        case ((i, c), (j, d)) if not row.bound and c == -d and abs(c) == 1:
            return f"({operator} {names[i]} {names[j]})" if c > 0 else f"({operator} {names[j]} {names[i]})"
    # A value without a decimal is an integer after the scaling, and too large for ``decimal``.
    pairs = [(names[i], c, decimal(c) or _integer(c.numerator)) for i, c in row.coefficients]
    terms = [name if c == 1 else f"(* {factor} {name})" for name, c, factor in pairs]
    left = f"(+ {' '.join(terms)})" if len(terms) > 1 else terms[0] if terms else "0.0"
    return f"({operator} {left} {decimal(row.bound) or _integer(row.bound.numerator)})"


def decimal_places(value: Fraction) -> int | None:
    """Return the number of places, from 1 to 4,000, of the exact decimal of a rational; None without one.

    Nor has a rational from 10³⁰⁰ on one: Python turns no integer of more than 4,300 digits into text.
    """
    denominator = value.denominator
    twos = (denominator & -denominator).bit_length() - 1
    rest, fives = denominator >> twos, 0
    while rest % 5 == 0:
        rest, fives = rest // 5, fives + 1
    places = max(twos, fives, 1)
    return places if rest == 1 and places <= _MOST_PLACES and abs(value.numerator) < _LARGEST * denominator else None


def decimal(value: Fraction) -> str | None:
    """Return the exact decimal of a rational, with a decimal point; None where ``decimal_places`` is."""
    if (places := decimal_places(value)) is None:
        return None
    digits = str(abs(value.numerator) * 10**places // value.denominator).rjust(places + 1, "0")
    return f"{'-' if value < 0 else ''}{digits[:-places]}.{digits[-places:]}"


def exact_text(value: Fraction) -> str:
    """Return a rational in SMT-LIB's notation: ``decimal``, or a quotient ``(/ 1.0 3.0)`` where that is None."""
    return decimal(value) or f"(/ {_integer(value.numerator)} {_integer(value.denominator)})"


def decimal_near(value: Fraction, lower: Fraction, upper: Fraction) -> Fraction:
    """Return a short decimal strictly between two bounds, near to ``value`` between them; ``value`` without one."""
    places = 20
    while places <= _MOST_PLACES:
        step = Fraction(1, 10**places)
        nearest = round(value / step) * step
        for candidate in (nearest, nearest + step, nearest - step):
            if lower < candidate < upper:
                return candidate
        places *= 2
    return value


def _integer(value: int) -> str:
    return f"{Decimal(value):f}.0"
