"""Rewriting ops so that no bit of the network's function changes.

Neighbours are merged into one op where that is exact, and functions that a file writes out as products are put in the
place of what spells them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import torch
from torch import Tensor

from verifiable_relu.ir.families import find_argument
from verifiable_relu.ir.functions import function
from verifiable_relu.ir.linear import Diagonal, Gather
from verifiable_relu.ir.network import Affine, Elementwise, Op, Product, live
from verifiable_relu.readers.builder import Builder, Value
from verifiable_relu.readers.derived import LAMBDA_ERROR, both, hardness, multiple
from verifiable_relu.rounding import MODERATE

Graph = tuple[Sequence[Op], int]
"""Ops in topological order, the input first, and the number of the output."""

Rule = Callable[[Sequence[Op], Op, Op], Op | None]
"""Makes one op of an op and the one that alone reads it, given the ops before both; None: the rule does not fit."""


def finished(build: Builder, output: Value) -> Graph:
    """Return the ops with the output's elements in place."""
    build.name = build.ops[output.op].name if output.op else "output"
    last = build.in_place(output)
    return build.ops, last


def simplified(ops: Sequence[Op], output: int) -> tuple[Op, ...]:
    """Return the ops that the output needs, merged with their neighbours.

    A product with a matrix and the bias after it become one affine map, factors one diagonal map, GELU(λx)/λ one
    λ-GELU, c·(1 + erf(kx))·x a multiple of one, x·σ(x) SiLU, and the reciprocal of a root one function. A map that
    changes nothing is left out. No GELU that is left is one of a multiple of something, as far as that is known.
    """
    found = _live(_bare(*_merged(*_spelled(ops, output), _RULES)))[0]
    if len(found) > 1:
        return found
    size = found[0].size
    return (*found, Affine(name="output", inputs=(0,), size=size, map=Diagonal(torch.ones(()).expand(size))))


def biased(ops: Sequence[Op], output: int) -> tuple[Op, ...]:
    """Return the ops that the output needs, with biases in the maps before them: all numbers keep their gradients."""
    found = _merged(ops, output, (_bias,))[0]
    return found if len(found) > 1 else simplified(ops, output)


def _live(graph: Graph) -> tuple[tuple[Op, ...], int]:
    kept, number = live(*graph)
    return kept, number[graph[1]]


class _Rewriting:
    """Ops that are made anew from others: ``made`` so far, and ``at`` the new op's number by that of the old one."""

    def __init__(self) -> None:
        self.made: list[Op] = []
        self.at: list[int] = []

    def moved(self, op: Op) -> Op:
        """Return an old op that reads the new ones."""
        return replace(op, inputs=tuple(self.at[i] for i in op.inputs))

    def add(self, op: Op) -> int:
        """Add a new op."""
        self.made.append(op)
        return len(self.made) - 1


# Diagonal maps


def _one_number(part: Tensor | None) -> Fraction | None:
    """Return the one number that stands for all elements; None where there are several, or it is infinite.

    Several numbers that are equal are a constant of several numbers still.
    """
    if part is None:
        return Fraction(0)
    first = float(part.reshape(-1)[0])
    alike = part.stride() == (0,) or part.numel() == 1
    return Fraction(first) if alike and math.isfinite(first) else None


def _factor(op: Op) -> tuple[Fraction, Fraction] | None:
    """Return the one number by which an op multiplies each element, and its relative error; that of x/d is exact."""
    if not (isinstance(op, Affine) and isinstance(op.map, Diagonal)):
        return None
    if op.map.divisor is not None:
        by = _one_number(op.map.divisor)
        return None if by is None else (1 / by, Fraction(0))
    number = _one_number(op.map.weight)
    return None if number is None else (number, Fraction(op.weight_error))


def _scales(op: Op) -> bool:
    return isinstance(op, Affine) and isinstance(op.map, Diagonal) and op.bias is None and op.bias_error is None


def _shifts(op: Op) -> bool:
    diagonal = isinstance(op, Affine) and isinstance(op.map, Diagonal) and not op.weight_error
    return diagonal and bool((op.map.weight == 1).all())  # type: ignore[attr-defined]


# Neighbours


def _merged(ops: Sequence[Op], output: int, rules: Sequence[Rule]) -> tuple[tuple[Op, ...], int]:
    """Merge each op with the one that alone reads it, until no rule makes one of two."""
    graph = _live((ops, output))
    while True:
        before = len(graph[0])
        graph = _live(_merged_once(*_live(_without_identities(*graph)), rules))
        if len(graph[0]) == before:
            return graph


def _without_identities(ops: Sequence[Op], output: int) -> Graph:
    """Let each reader of an op that changes nothing read what is before it."""
    at: list[int] = []
    for index, op in enumerate(ops):
        nothing = _shifts(op) and _scales(op)
        at.append(at[op.inputs[0]] if nothing else index)
    return [replace(op, inputs=tuple(at[i] for i in op.inputs)) for op in ops], at[output]


def _merged_once(ops: Sequence[Op], output: int, rules: Sequence[Rule]) -> Graph:
    uses = Counter(source for op in ops for source in op.inputs)
    uses[output] += 1
    new = _Rewriting()
    for op in ops:
        moved, found = new.moved(op), None
        if len(moved.inputs) == 1 and uses[op.inputs[0]] == 1:
            first = new.made[moved.inputs[0]]
            found = next((one for rule in rules if (one := rule(new.made, first, moved)) is not None), None)
        if found is None:
            new.at.append(new.add(moved))
        else:
            new.made[moved.inputs[0]] = found
            new.at.append(moved.inputs[0])
    return new.made, new.at[output]


def _bias(made: Sequence[Op], first: Op, second: Op) -> Op | None:
    """W·x and + b are W·x + b."""
    if not (isinstance(first, Affine) and isinstance(second, Affine) and _shifts(second)):
        return None
    if first.bias is not None or first.bias_error is not None or isinstance(first.map, Gather):
        return None
    return replace(first, bias=second.bias, bias_error=second.bias_error)


def _factors(made: Sequence[Op], first: Op, second: Op) -> Op | None:
    """The product of two numbers is one number, if that is exact."""
    if not (isinstance(second, Affine) and isinstance(second.map, Diagonal) and isinstance(first, Affine)):
        return None
    if not (_scales(first) and isinstance(first.map, Diagonal)):
        return None
    if _shifts(first):
        return replace(second, name=first.name, inputs=first.inputs)
    one, other = _one_number(first.map.weight), _one_number(second.map.weight)
    found = None if one is None or other is None else multiple(one * other, Fraction(0))
    if found is None or found[1]:
        return None
    error = both(first.weight_error, second.weight_error)
    map = Diagonal(found[0].expand(first.size))
    return replace(first, map=map, bias=second.bias, bias_error=second.bias_error, weight_error=error)


def _hardness(made: Sequence[Op], first: Op, second: Op) -> Op | None:
    """GELU(λx)/λ is λ-GELU (arXiv 2603.21991): GELU after a factor λ and before a division by the same λ."""
    if not (_is_function(first, "GELU") and isinstance(first, Elementwise) and _scales(second)):
        return None
    times = made[first.inputs[0]]
    if first.function.parameters["parameter"] != 1 or not (_scales(times) and isinstance(times, Affine)):
        return None
    if isinstance(times.map, Diagonal) and times.map.divisor is not None:
        return None
    factor, inverse = _factor(times), _factor(second)
    # The product with a rounded 1/λ is another function than the division by λ.
    if factor is None or inverse is None or factor[1] or inverse[1] or factor[0] <= 0 or factor[0] * inverse[0] != 1:
        return None
    return replace(first, inputs=times.inputs, function=function("GELU", float(factor[0])))


def _inverse_root(made: Sequence[Op], first: Op, second: Op) -> Op | None:
    """1/√x is one function of x."""
    if isinstance(first, Elementwise) and _is_function(first, "Sqrt") and _is_function(second, "Reciprocal"):
        return replace(first, function=function("InverseRoot"))
    return None


_RULES: tuple[Rule, ...] = (_bias, _factors, _hardness, _inverse_root)


def _is_function(op: Op, kind: str) -> bool:
    return isinstance(op, Elementwise) and op.function.kind == kind


# Functions that are spelled


def _spelled(ops: Sequence[Op], output: int) -> Graph:
    """Put a function of one variable in the place of every product that spells it."""
    new = _Rewriting()
    for op in ops:
        moved = new.moved(op)
        if isinstance(op, Product):
            found = _gelu(new.made, moved.inputs) or _other(new.made, moved.inputs)
            if found is not None:
                of = function(found.kind, found.parameter)
                moved = Elementwise(name=op.name, inputs=(found.base,), size=op.size, function=of)
                if found.scale is not None and (found.scale[0] != 1 or found.scale[1]):
                    moved = _scaled(moved, new.add(moved), *found.scale)
        new.at.append(new.add(moved))
    return new.made, new.at[output]


@dataclass(frozen=True)
class _Spelling:
    """A multiple of a function of an op's value.

    Attributes:
        base: the op.
        kind, parameter: the function.
        scale: the multiple and its relative error; None for 1.
    """

    base: int
    kind: str
    parameter: float = 1.0
    scale: tuple[Tensor, float] | None = None


def _other(ops: Sequence[Op], inputs: tuple[int, ...]) -> _Spelling | None:
    """Return the function that a product is if it is x times a function of x."""
    for x, second in (inputs, inputs[::-1]):
        if x == second:
            return _Spelling(x, "Square")
        factor = ops[second]
        if factor.inputs == (x,):
            for kind, made in (("Sigmoid", "SiLU"), ("Square", "Cube")):
                if _is_function(factor, kind):
                    return _Spelling(x, made)
        if _is_function(factor, "Tanh"):
            inner = ops[factor.inputs[0]]
            if _is_function(inner, "Softplus") and inner.inputs == (x,):
                return _Spelling(x, "Mish")
    return None


@dataclass(frozen=True)
class _AffineForm:
    """slope·v + offset, v being the value of the op ``base``; ``error`` bounds the relative error of the slope."""

    base: int
    slope: Fraction
    offset: Fraction
    error: Fraction


def _gelu(ops: Sequence[Op], inputs: tuple[int, ...]) -> _Spelling | None:
    """Return a multiple of λ-GELU that a product is.

    With one operand c·(1 + erf(k·x)) and the other d·x, k > 0, the product is 2·c·d·GELU_λ(x), λ = √2·k. It stays a
    product where one number does not hold λ, or the factor.
    """
    for left, right in (inputs, inputs[::-1]):
        *_, one = _forms(ops, left)
        erf = ops[one.base]
        if not _is_function(erf, "Erf") or one.offset != one.slope or one.error or not one.slope:
            continue
        inside = {form.base: form for form in _forms(ops, erf.inputs[0]) if not form.offset}
        for form in _forms(ops, right):
            argument = inside.get(form.base)
            if form.offset or not form.slope or argument is None or not argument.slope > 0:
                continue
            lam, factor = hardness(argument.slope, argument.error), multiple(2 * one.slope * form.slope, form.error)
            if lam is not None and factor is not None:
                return _Spelling(form.base, "GELU", float(lam), factor)
    return None


def _forms(ops: Sequence[Op], index: int) -> Iterator[_AffineForm]:
    """Yield a value in terms of the op itself, and of each op before it from which scalars alone lead to it."""
    form = _AffineForm(index, Fraction(1), Fraction(0), Fraction(0))
    while True:
        yield form
        op = ops[form.base]
        factor = _factor(op)
        if factor is None or not isinstance(op, Affine) or op.bias_error is not None:
            return
        shift, (scale, off) = _one_number(op.bias), factor
        if shift is None or ((off or form.error) and shift):
            return
        error = (1 + form.error) * (1 + off) - 1
        form = _AffineForm(op.inputs[0], form.slope * scale, form.offset + form.slope * shift, error)


def _bare(ops: Sequence[Op], output: int) -> Graph:
    """Put λ times λ-GELU of x in the place of GELU(λ·x), so that no GELU is one of a multiple.

    Certificates speak of that x (``docs/certificates.md``). A GELU of a negative multiple, or of one by a number beyond
    ``MODERATE``, is left.
    """
    new = _Rewriting()
    for op in ops:
        moved = new.moved(op)
        if isinstance(moved, Elementwise) and _is_function(moved, "GELU"):
            moved = _bare_gelu(new, moved)
        new.at.append(new.add(moved))
    return new.made, new.at[output]


def _bare_gelu(new: _Rewriting, gelu: Elementwise) -> Op:
    """Return a GELU, or the factor behind the λ-GELU that is added to the ops for it."""
    found = find_argument(new.made, gelu.inputs[0])
    lam = found.factor * Fraction(float(gelu.function.parameters["parameter"]))
    if found.factor == 1 or not MODERATE[0] <= lam <= MODERATE[1]:
        return gelu
    number, factor = multiple(lam, found.error), multiple(found.factor, found.error)
    if number is None or factor is None or number[1] > LAMBDA_ERROR:
        return gelu
    source = found.base
    for op in reversed(found.moves):
        source = new.add(replace(op, inputs=(source,)))
    made = new.add(replace(gelu, inputs=(source,), function=function("GELU", float(number[0]))))
    return _scaled(gelu, made, *factor)


def _scaled(op: Op, source: int, factor: Tensor, error: float) -> Affine:
    """Return a factor of the value of an op, under the name of another."""
    map = Diagonal(factor.reshape(()).expand(op.size))
    return Affine(name=op.name, inputs=(source,), size=op.size, map=map, weight_error=error)
