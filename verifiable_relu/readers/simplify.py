"""Rewriting ops so that no bit of the network's function changes.

Functions that a file writes out as products are recognised, and neighbours are merged into
one op where that is exact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from verifiable_relu.ir.families import find_argument, one_number, scalar_factor
from verifiable_relu.ir.functions import function
from verifiable_relu.ir.linear import Diagonal, Gather
from verifiable_relu.ir.network import Affine, Elementwise, Op, Product, live
from verifiable_relu.readers.builder import OpBuilder, Value
from verifiable_relu.readers.derived import LAMBDA_ERROR, hardness, multiple
from verifiable_relu.rounding import MODERATE, not_below


def finished(build: OpBuilder, output: Value) -> tuple[Sequence[Op], int]:
    """Return the ops with the output's elements in place, and the number of the output."""
    build.name = build.ops[output.op].name if output.op else "output"
    last = build.in_place(output)
    return build.ops, last


def simplified(ops: Sequence[Op], output: int) -> tuple[Op, ...]:
    """Return the ops that the output needs, functions recognised and neighbours merged; there is one op at least.

    c·(1 + erf(kx))·x is a multiple of λ-GELU, x·σ(x) SiLU, and the reciprocal of a root one function. No GELU that is
    left is one of a multiple of something, as far as that is known: GELU(λx)/λ is λ-GELU (arXiv 2603.21991). A product
    with a matrix and the bias after it become one affine map, factors one diagonal map, and a map that changes nothing
    is left out.
    """
    made: list[Op] = []
    at: list[int] = []
    for op in ops:
        moved = replace(op, inputs=tuple(at[i] for i in op.inputs))
        place = _recognised(made, moved)
        at.append(_added(made, moved) if place is None else place)
    found = _merged(made, at[output], factors=True)
    if len(found) > 1:
        return found
    size = found[0].size
    return (*found, Affine(name="output", inputs=(0,), size=size, map=Diagonal(torch.ones(()).expand(size))))


def biased(ops: Sequence[Op], output: int) -> tuple[Op, ...]:
    """Return the ops that the output needs, with biases in the maps before them: all numbers keep their gradients."""
    found = _merged(ops, output, factors=False)
    return found if len(found) > 1 else simplified(ops, output)


def _added(made: list[Op], op: Op) -> int:
    made.append(op)
    return len(made) - 1


# Neighbours


def _merged(ops: Sequence[Op], output: int, factors: bool) -> tuple[Op, ...]:
    """Leave out maps that change nothing, and merge each map with the one that alone reads it, while any are left."""
    while True:
        at: list[int] = []
        for index, op in enumerate(ops):
            changes = not _is_shift(op) or op.bias is not None or op.bias_error is not None
            at.append(index if changes else at[op.inputs[0]])
        found, _ = live([replace(op, inputs=tuple(at[i] for i in op.inputs)) for op in ops], at[output])
        uses = Counter(source for op in found for source in op.inputs)
        made, at = list[Op](), []
        for op in found:
            moved = replace(op, inputs=tuple(at[i] for i in op.inputs))
            alone = len(op.inputs) == 1 and uses[op.inputs[0]] == 1
            one = _as_one(made[moved.inputs[0]], moved, factors) if alone else None
            at.append(_added(made, moved) if one is None else moved.inputs[0])
            if one is not None:
                made[at[-1]] = one
        if len(made) == len(ops):
            return tuple(made)
        ops, output = made, at[-1]


def _is_shift(op: Op) -> TypeGuard[Affine]:
    """Return True for a map that multiplies by nothing but a 1 that is no parameter."""
    if not (isinstance(op, Affine) and isinstance(op.map, Diagonal)) or op.weight_error or op.map.weight.requires_grad:
        return False
    return bool((op.map.weight == 1).all())


def _as_one(first: Op, second: Op, factors: bool) -> Affine | None:
    """Return W·x and + b as W·x + b, and with ``factors`` the product of two numbers as one, if that is exact."""
    if not (isinstance(first, Affine) and isinstance(second, Affine) and isinstance(second.map, Diagonal)):
        return None
    if first.bias is not None or first.bias_error is not None:
        return None
    if _is_shift(second):
        return None if isinstance(first.map, Gather) else _with_bias(first, second)
    exact, other = scalar_factor(first), scalar_factor(second)
    if not factors or exact is None or other is None:
        return None
    # 1/d of a division is exact; where the product with that is no number, the one with its stored one may be.
    stored = [(one_number(op.map.weight) or Fraction(0), Fraction(op.weight_error)) for op in (first, second)]
    for (one, off), (two, too) in ((exact, other), stored):
        found = multiple(one * two)
        if found is not None and not found[1]:
            error = not_below((1 + off) * (1 + too) - 1)
            return _with_bias(replace(first, map=Diagonal(found[0].expand(first.size)), weight_error=error), second)
    return None


def _with_bias(op: Affine, other: Affine) -> Affine:
    return replace(op, bias=other.bias, bias_error=other.bias_error)


# Functions


def _is_function(op: Op, kind: str) -> TypeGuard[Elementwise]:
    return isinstance(op, Elementwise) and op.function.kind == kind


def _recognised(made: list[Op], op: Op) -> int | None:
    """Add the function that an op is, given the ops before it, and return its number; None if it stays as it is."""
    if _is_function(op, "GELU"):
        return _bare(made, op)
    if isinstance(op, Product):
        spelled = _gelu(made, op.inputs) or _other(made, op.inputs)
    else:
        reciprocal = _is_function(op, "Reciprocal") and _is_function(root := made[op.inputs[0]], "Sqrt")
        spelled = (root.inputs[0], "InverseRoot", 1.0, _ONE) if reciprocal else None
    if spelled is None:
        return None
    base, kind, lam, scale = spelled
    found = Elementwise(name=op.name, inputs=(base,), size=op.size, function=function(kind, lam))
    place = _bare(made, found) if kind == "GELU" else None
    place = _added(made, found) if place is None else place
    return place if scale[0] == 1 and not scale[1] else _scaled(made, place, *scale)


def _scaled(made: list[Op], source: int, factor: Tensor, error: float) -> int:
    """Add a factor of the value of an op, under its name."""
    op = made[source]
    map = Diagonal(factor.reshape(()).expand(op.size))
    return _added(made, Affine(name=op.name, inputs=(source,), size=op.size, map=map, weight_error=error))


_ONE = torch.ones(()), 0.0

_Spelling = tuple[int, str, float, tuple[Tensor, float]]
"""An op, the kind and the parameter of a function of its value, and the factor of that with its relative error."""


def _other(ops: Sequence[Op], inputs: tuple[int, ...]) -> _Spelling | None:
    """Return the function of a product x·x, or x times a function of x."""
    for x, second in (inputs, inputs[::-1]):
        factor = ops[second]
        inner = ops[factor.inputs[0]] if _is_function(factor, "Tanh") else factor
        spelled = {"Sigmoid": "SiLU", "Square": "Cube"} if inner is factor else {"Softplus": "Mish"}
        if x == second:
            return x, "Square", 1.0, _ONE
        if isinstance(inner, Elementwise) and inner.inputs == (x,) and inner.function.kind in spelled:
            return x, spelled[inner.function.kind], 1.0, _ONE
    return None


class _ScaledValue(NamedTuple):
    """Value slope·v + offset, v the value of op ``base``; ``error`` bounds the slope's relative error."""

    base: int
    slope: Fraction = Fraction(1)
    offset: Fraction = Fraction(0)
    error: Fraction = Fraction(0)


def _forms(ops: Sequence[Op], index: int) -> Iterator[_ScaledValue]:
    """Yield a value in terms of the op itself, and of each op before it from which scalars alone lead to it."""
    form = _ScaledValue(index)
    while True:
        yield form
        op = ops[form.base]
        if not isinstance(op, Affine) or op.bias_error is not None or (factor := scalar_factor(op)) is None:
            return
        shift, (scale, off) = Fraction(0) if op.bias is None else one_number(op.bias), factor
        if shift is None or ((off or form.error) and shift):
            return
        error = (1 + form.error) * (1 + off) - 1
        form = _ScaledValue(op.inputs[0], form.slope * scale, form.offset + form.slope * shift, error)


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


def _bare(made: list[Op], op: Elementwise) -> int | None:
    """Add λ times λ-GELU of x in the place of GELU(λ·x), so that no GELU is one of a multiple.

    Certificates speak of that x (``docs/certificates.md``). A GELU of a negative multiple, or of one by a number beyond
    ``MODERATE``, is left.
    """
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
    return _scaled(made, source, *factor)
