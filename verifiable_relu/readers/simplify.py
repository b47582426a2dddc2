"""Rewriting ops so that no bit of the network's function changes.

Neighbours are merged into one op where that is exact, and functions that a file writes out as products are put in the
place of what spells them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from verifiable_relu.ir.families import find_argument, one_number, scalar_factor
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
    merged = _merged(_rewritten((ops, output), _spelled), (_bias, _factors, _hardness, _inverse_root))
    found = _live(_rewritten(merged, _bare))[0]
    if len(found) > 1:
        return found
    size = found[0].size
    return (*found, Affine(name="output", inputs=(0,), size=size, map=Diagonal(torch.ones(()).expand(size))))


def biased(ops: Sequence[Op], output: int) -> tuple[Op, ...]:
    """Return the ops that the output needs, with biases in the maps before them: all numbers keep their gradients."""
    found = _merged((ops, output), (_bias,))[0]
    return tuple(found) if len(found) > 1 else simplified(ops, output)


def _live(graph: Graph) -> tuple[tuple[Op, ...], int]:
    kept, number = live(*graph)
    return kept, number[graph[1]]


def _rewritten(graph: Graph, change: Callable[[list[Op], Op, Op], int | None]) -> Graph:
    """Make ops anew one by one.

    Args:
        graph: to begin with.
        change: takes the new ops so far, to which it may add, the next op as it reads these, and that op as it was;
            returns the number of what stands for it; None keeps it.
    """
    made: list[Op] = []
    at: list[int] = []
    for op in graph[0]:
        moved = replace(op, inputs=tuple(at[i] for i in op.inputs))
        place = change(made, moved, op)
        at.append(_added(made, moved) if place is None else place)
    return made, at[graph[1]]


def _added(made: list[Op], op: Op) -> int:
    made.append(op)
    return len(made) - 1


# Diagonal maps


def _is_diagonal(op: Op, scales: bool = False, shifts: bool = False) -> TypeGuard[Affine]:
    """Return True for a diagonal map, perhaps one that adds nothing, or has no factor but 1."""
    if not (isinstance(op, Affine) and isinstance(op.map, Diagonal)):
        return False
    if scales and not (op.bias is None and op.bias_error is None):
        return False
    return not shifts or (not op.weight_error and bool((op.map.weight == 1).all()))


def _is_function(op: Op, kind: str) -> TypeGuard[Elementwise]:
    return isinstance(op, Elementwise) and op.function.kind == kind


def _scaled(op: Op, source: int, factor: Tensor, error: float) -> Affine:
    """Return a factor of the value of an op, under the name of another."""
    map = Diagonal(factor.reshape(()).expand(op.size))
    return Affine(name=op.name, inputs=(source,), size=op.size, map=map, weight_error=error)


# Neighbours


def _merged(graph: Graph, rules: Sequence[Rule]) -> tuple[tuple[Op, ...], int]:
    """Merge each op with the one that alone reads it, until no rule makes one of two."""

    def skip(made: list[Op], op: Op, before: Op) -> int | None:
        return op.inputs[0] if _is_diagonal(op, scales=True, shifts=True) else None

    def merge(made: list[Op], op: Op, before: Op) -> int | None:
        if len(op.inputs) != 1 or uses[before.inputs[0]] != 1:
            return None
        (place,) = op.inputs
        found = next((one for rule in rules if (one := rule(made, made[place], op)) is not None), None)
        if found is None:
            return None
        made[place] = found
        return place

    found = _live(graph)
    while True:
        count = len(found[0])
        ops, output = _live(_rewritten(found, skip))
        uses = Counter([output, *(source for op in ops for source in op.inputs)])
        found = _live(_rewritten((ops, output), merge))
        if len(found[0]) == count:
            return found


def _bias(made: Sequence[Op], first: Op, second: Op) -> Op | None:
    """W·x and + b are W·x + b."""
    if not (isinstance(first, Affine) and _is_diagonal(second, shifts=True)) or isinstance(first.map, Gather):
        return None
    if first.bias is not None or first.bias_error is not None:
        return None
    return replace(first, bias=second.bias, bias_error=second.bias_error)


def _factors(made: Sequence[Op], first: Op, second: Op) -> Op | None:
    """The product of two numbers is one number, if that is exact."""
    if not (_is_diagonal(first, scales=True) and _is_diagonal(second)):
        return None
    if _is_diagonal(first, shifts=True):
        return replace(second, name=first.name, inputs=first.inputs)
    one, other = one_number(first.map.weight), one_number(second.map.weight)
    found = None if one is None or other is None else multiple(one * other)
    if found is None or found[1]:
        return None
    error = both(first.weight_error, second.weight_error)
    map = Diagonal(found[0].expand(first.size))
    return replace(first, map=map, bias=second.bias, bias_error=second.bias_error, weight_error=error)


def _hardness(made: Sequence[Op], first: Op, second: Op) -> Op | None:
    """GELU(λx)/λ is λ-GELU (arXiv 2603.21991): GELU after a factor λ and before a division by the same λ."""
    if not (_is_function(first, "GELU") and _is_diagonal(second, scales=True)):
        return None
    times = made[first.inputs[0]]
    if first.function.parameters["parameter"] != 1 or not _is_diagonal(times, scales=True):
        return None
    factor, inverse = scalar_factor(times), scalar_factor(second)
    # The product with a rounded 1/λ is another function than the division by λ, and λ one number of the file.
    if factor is None or inverse is None or factor[1] or inverse[1] or times.map.parameters.get("divisor") is not None:
        return None
    if factor[0] <= 0 or factor[0] * inverse[0] != 1:
        return None
    return replace(first, inputs=times.inputs, function=function("GELU", float(factor[0])))


def _inverse_root(made: Sequence[Op], first: Op, second: Op) -> Op | None:
    """1/√x is one function of x."""
    if _is_function(first, "Sqrt") and _is_function(second, "Reciprocal"):
        return replace(first, function=function("InverseRoot"))
    return None


# Functions that are spelled


class _AffineForm(NamedTuple):
    """slope·v + offset, v being the value of the op ``base``; ``error`` bounds the relative error of the slope."""

    base: int
    slope: Fraction = Fraction(1)
    offset: Fraction = Fraction(0)
    error: Fraction = Fraction(0)


def _forms(ops: Sequence[Op], index: int) -> Iterator[_AffineForm]:
    """Yield a value in terms of the op itself, and of each op before it from which scalars alone lead to it."""
    form = _AffineForm(index)
    while True:
        yield form
        op = ops[form.base]
        if not isinstance(op, Affine) or op.bias_error is not None or (factor := scalar_factor(op)) is None:
            return
        shift, (scale, off) = Fraction(0) if op.bias is None else one_number(op.bias), factor
        if shift is None or ((off or form.error) and shift):
            return
        error = (1 + form.error) * (1 + off) - 1
        form = _AffineForm(op.inputs[0], form.slope * scale, form.offset + form.slope * shift, error)


def _spelled(made: list[Op], op: Op, before: Op) -> int | None:
    """Put a function of one variable in the place of a product that spells it."""
    if not isinstance(op, Product):
        return None
    base, kind, lam, scale = _gelu(made, op.inputs) or _other(made, op.inputs)
    if not kind:
        return None
    of = Elementwise(name=op.name, inputs=(base,), size=op.size, function=function(kind, lam))
    place = _added(made, of)
    return place if scale[0] == 1 and not scale[1] else _added(made, _scaled(op, place, *scale))


_Spelling = tuple[int, str, float, tuple[Tensor, float]]
"""The op, the kind and the parameter of a function of it, and by what, of a relative error, that is multiplied."""


def _other(ops: Sequence[Op], inputs: tuple[int, ...]) -> _Spelling:
    """Return the function that a product is if it is x times a function of x; its kind is empty if it is none."""
    one = torch.ones(()), 0.0
    for x, second in (inputs, inputs[::-1]):
        factor = ops[second]
        inner = ops[factor.inputs[0]] if _is_function(factor, "Tanh") else factor
        spelled = {"Sigmoid": "SiLU", "Square": "Cube"} if inner is factor else {"Softplus": "Mish"}
        if x == second:
            return x, "Square", 1.0, one
        if isinstance(inner, Elementwise) and inner.inputs == (x,) and inner.function.kind in spelled:
            return x, spelled[inner.function.kind], 1.0, one
    return 0, "", 1.0, one


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
                return form.base, "GELU", float(lam), factor
    return None


def _bare(made: list[Op], op: Op, before: Op) -> int | None:
    """Put λ times λ-GELU of x in the place of GELU(λ·x), so that no GELU is one of a multiple.

    Certificates speak of that x (``docs/certificates.md``). A GELU of a negative multiple, or of one by a number beyond
    ``MODERATE``, is left.
    """
    if not _is_function(op, "GELU"):
        return None
    found = find_argument(made, op.inputs[0])
    lam = found.factor * Fraction(float(op.function.parameters["parameter"]))
    if found.factor == 1 or not MODERATE[0] <= lam <= MODERATE[1]:
        return None
    number, factor = multiple(lam, found.error), multiple(found.factor, found.error)
    if number is None or factor is None or number[1] > LAMBDA_ERROR:
        return None
    source = found.base
    for move in reversed(found.moves):
        source = _added(made, replace(move, inputs=(source,)))
    source = _added(made, replace(op, inputs=(source,), function=function("GELU", float(number[0]))))
    return _added(made, _scaled(op, source, *factor))
