"""Rewriting nodes so that no bit of the network's function changes.

Neighbours are merged into one node where that is exact, functions that a file writes out as products are put in the
place of what spells them, and neurons that a program has written several times are left out. How often a node is read
is counted over the nodes' own wiring. The names that a file gives to values say nothing about it: one value may have
several.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, TypeGuard

import torch
from torch import Tensor

from verifiable_relu.network.derived import LAMBDA_ERROR, both, hardness, multiple, product
from verifiable_relu.network.dispatch import Table
from verifiable_relu.network.graph import Network, whole
from verifiable_relu.network.nodes import (
    Curve,
    Gelu,
    Identity,
    Linear,
    Node,
    Permute,
    Product,
    Relu,
    Reshape,
    Scale,
    Smooth,
    Sparse,
    curve,
)
from verifiable_relu.rounding import COMMON_STEP, MODERATE

Graph = tuple[list[Node], int]
"""Nodes in topological order, the input first, and the index of the output."""


def simplify(nodes: Sequence[Node], output: int) -> Graph:
    """Merge nodes with the one before them, and leave out what the output does not need.

    A product with a matrix and the bias after it become one affine map, shifts and factors one Scale,
    GELU(λx)/λ one λ-GELU, and the reciprocal of a root one function. A Scale that changes nothing is left out.
    """
    graph = live(nodes, output)
    while True:
        before = len(graph[0])
        graph = live(*_merged_neighbours(*live(*_without_identities(*graph))))
        if len(graph[0]) == before:
            return graph


def needed(nodes: Sequence[Node], output: int) -> list[int]:
    """The nodes that the output depends on, itself and the input included, in order."""
    found = {0}
    pending = [output]
    while pending:
        index = pending.pop()
        if index not in found:
            found.add(index)
            pending += nodes[index].inputs
    return sorted(found)


def live(nodes: Sequence[Node], output: int) -> Graph:
    """The input and the nodes that the output needs."""
    position = {old: new for new, old in enumerate(needed(nodes, output))}
    kept = [replace(nodes[old], inputs=tuple(position[i] for i in nodes[old].inputs)) for old in position]
    return kept, position[output]


def _without_identities(nodes: Sequence[Node], output: int) -> Graph:
    """Every reader of a Scale that changes nothing reads what is before it instead."""
    at: list[int] = []
    for index, node in enumerate(nodes):
        nothing = _only_shifts(node) and _only_scales(node)
        at.append(at[node.inputs[0]] if nothing else index)
    return [replace(node, inputs=tuple(at[i] for i in node.inputs)) for node in nodes], at[output]


def _merged_neighbours(nodes: Sequence[Node], output: int) -> Graph:
    """Each node and the one that alone reads it as one node, where some rule makes one of them."""
    uses = Counter(source for node in nodes for source in node.inputs)
    uses[output] += 1
    made: list[Node] = []
    at: list[int] = []
    for node in nodes:
        moved = replace(node, inputs=tuple(at[i] for i in node.inputs))
        found = None
        if len(moved.inputs) == 1 and uses[node.inputs[0]] == 1:
            first = made[moved.inputs[0]]
            found = next((one for rule in RULES[first] if (one := rule(made, first, moved)) is not None), None)
        if found is None:
            made.append(moved)
            at.append(len(made) - 1)
        else:
            made[moved.inputs[0]] = found
            at.append(moved.inputs[0])
    return made, at[output]


def _is(part: Tensor, number: float) -> bool:
    return bool((part == number).all())


def _only_shifts(node: Node) -> TypeGuard[Scale]:
    return isinstance(node, Scale) and _is(node.scale, 1) and _is(node.center, 0) and not node.weight_error


def _only_scales(node: Node) -> TypeGuard[Scale]:
    return isinstance(node, Scale) and _is(node.center, 0) and _is(node.shift, 0)


def _bias(made: Sequence[Node], first: Linear, second: Node) -> Node | None:
    """W·x and + b are W·x + b: the sum 0 + b is exact. A b that varies over other axes than the last is no bias."""
    if not _only_shifts(second):
        return None
    shift = second.shift
    if any(size != 1 for size in shift.shape[:-1]) or shift.dtype != first.bias.dtype or not _is(first.bias, 0):
        return None
    return replace(first, bias=shift.reshape(-1).expand(first.bias.shape))


def _shift(made: Sequence[Node], first: Scale, second: Node) -> Node | None:
    """scale·(x − center) and + shift."""
    if not (_only_shifts(second) and _is(first.shift, 0)):
        return None
    return replace(first, shift=second.shift)


def _factor(made: Sequence[Node], first: Scale, second: Node) -> Node | None:
    """x − center and the product with a factor, or the product of two numbers if that is exact."""
    if not (_only_scales(second) and _is(first.shift, 0)):
        return None
    if _is(first.scale, 1) and not first.weight_error:
        return replace(first, scale=second.scale, weight_error=second.weight_error, divisor=second.divisor)
    if not (first.scale.numel() == second.scale.numel() == 1 and _only_scales(first)):
        return None
    scale = product(first.scale, second.scale)
    if scale is None:
        return None
    shape = torch.broadcast_shapes(first.scale.shape, second.scale.shape)
    error = both(first.weight_error, second.weight_error)
    return replace(first, scale=scale.expand(shape).clone(), weight_error=error, divisor=None)


def _hardness(made: Sequence[Node], first: Gelu, second: Node) -> Node | None:
    """GELU(λx)/λ is λ-GELU (arXiv 2603.21991): GELU after a factor λ and before a division by the same λ."""
    if not (_is(first.lam, 1) and _only_scales(second)):
        return None
    times = made[first.inputs[0]]
    if not (_only_scales(times) and not times.weight_error):
        return None
    if times.scale.numel() != 1 or second.scale.numel() != 1 or not float(times.scale) > 0:
        return None
    # The product with a rounded 1/λ is another function than the division by λ.
    divisor = second.divisor
    by_the_same = divisor is not None and divisor.numel() == 1 and float(divisor) == float(times.scale)
    inverse = not second.weight_error and _are_inverse(float(second.scale), float(times.scale))
    if not (by_the_same or inverse):
        return None
    return replace(first, inputs=times.inputs, lam=times.scale.reshape(()))


def _are_inverse(first: float, second: float) -> bool:
    finite = math.isfinite(first) and math.isfinite(second)
    return finite and Fraction(first) * Fraction(second) == 1


def _inverse_root(made: Sequence[Node], first: Smooth, second: Node) -> Node | None:
    """1/√x is one function of x."""
    if isinstance(second, Smooth) and (first.function, second.function) == ("Sqrt", "Reciprocal"):
        return replace(first, function="InverseRoot")
    return None


Rule = Callable[[Sequence[Node], Any, Node], Node | None]
"""Make one node of a node and the one that alone reads it, given the nodes before both; None: the rule does not fit."""

RULES: Table[tuple[Rule, ...]] = Table(
    "simplification",
    {
        Linear: (_bias,),
        Scale: (_shift, _factor),
        Gelu: (_hardness,),
        Smooth: (_inverse_root,),
        Node: (),
    },
)
"""By the kind of the first of two nodes. Kinds without a row are left as they are, which is always right."""


@dataclass(frozen=True)
class _Scaled:
    """The value slope·v + offset of a node, v being the value of the node ``base``; exact if ``error`` is 0.

    ``error`` bounds the relative error of ``slope``; an ``offset`` is exact.
    """

    base: int
    slope: Fraction
    offset: Fraction
    error: Fraction


def spelled(nodes: Sequence[Node], output: int) -> tuple[list[Node], int]:
    """Put a function of one variable in the place of every product that spells it.

    Returns:
        Nodes in topological order and the output's new index. Nodes that spelled a function are still there.
    """
    made: list[Node] = []
    at: list[int] = []
    for node in nodes:
        moved = replace(node, inputs=tuple(at[i] for i in node.inputs))
        found = _gelu(made, moved) if isinstance(moved, Product) else None
        if found is None:
            other = _other(made, moved) if isinstance(moved, Product) else None
            made.append(moved if other is None else curve(other[0], node.name, (other[1],), node.shape))
        else:
            base, lam, number, error = found
            made.append(Gelu(name=node.name, inputs=(base,), shape=node.shape, lam=lam))
            if float(number) != 1 or error:
                made.append(_scaled(node, len(made) - 1, number, error))
        at.append(len(made) - 1)
    return made, at[output]


@dataclass(frozen=True)
class Argument:
    """The argument of an activation as factor·x, x being what is before all factors.

    Attributes:
        base: the node that x is made of by ``nodes`` alone, the first one last.
        nodes: those between that are no factors.
        factor: the product of the numbers of all Scales between that multiply or divide by one number.
        error: relative, of ``factor``.
        vague: the name of what stands before x and multiplies, too: by several numbers, or numbers of which some are
            chosen, or of another GELU; or nothing.
    """

    base: int
    nodes: tuple[Node, ...] = ()
    factor: Fraction = Fraction(1)
    error: Fraction = Fraction(0)
    vague: str = ""


def argument(nodes: Sequence[Node], index: int) -> Argument:
    """Trace a node's value back to what is before all factors: λ of a GELU is about that, here and nowhere else.

    Reshape and Permute may stand between, and in (x − c)·s, s is a factor of x − c. What a Scale makes of whole
    numbers, such as a quantised network's, is no multiple of them, and a batch normalisation of several channels is a
    layer as others are.
    """
    found, passed, chosen = Argument(index), list[Node](), False
    counted = whole(nodes[:index])
    while True:
        node = nodes[index]
        if isinstance(node, Gelu):
            return replace(found, vague=node.name)
        if isinstance(node, Sparse) and node.moves:
            chosen = True
        elif isinstance(node, Reshape | Permute | Identity):
            passed.append(node)
        elif not isinstance(node, Scale) or not _is(node.shift, 0) or node.inputs[0] in counted:
            return found
        elif not _is(node.scale, 1):
            if node.scale.numel() > 1 or chosen or not bool(torch.isfinite(node.scale).all()):
                normalised = bool(node.weight_error) and node.divisor is None and not chosen
                return found if normalised else replace(found, vague=node.name)
            number, off = _number(node)
            if not _is(node.center, 0):
                passed.append(replace(node, scale=torch.ones_like(node.scale), weight_error=0.0, divisor=None))
            error = (1 + found.error) * (1 + off) - 1
            found = Argument(node.inputs[0], tuple(passed), found.factor * number, error)
        if isinstance(node, Scale) and not _is(node.center, 0):
            return found
        (index,) = node.inputs


def _number(node: Scale) -> tuple[Fraction, Fraction]:
    """The one number that a Scale multiplies by, of a division the exact quotient, and its relative error."""
    if node.divisor is not None:
        return 1 / Fraction(float(node.divisor)), Fraction(0)
    return Fraction(float(node.scale)), Fraction(node.weight_error)


def bare(nodes: Sequence[Node], output: int) -> tuple[list[Node], int]:
    """Put λ times λ-GELU of x in the place of GELU(λ·x), so that no GELU is one of a multiple.

    Certificates speak of that x (``docs/certificates.md``). A GELU of a negative multiple, or of one by a number beyond
    ``MODERATE``, is left. The arguments and the result are those of ``spelled``.
    """
    made: list[Node] = []
    at: list[int] = []
    for node in nodes:
        moved = replace(node, inputs=tuple(at[i] for i in node.inputs))
        made.append(_bare(made, moved) if isinstance(moved, Gelu) else moved)
        at.append(len(made) - 1)
    return live(made, at[output])


def _bare(made: list[Node], gelu: Gelu) -> Node:
    """A GELU, or the factor behind the λ-GELU that is added to the nodes for it."""
    found = argument(made, gelu.inputs[0])
    lam = found.factor * Fraction(float(gelu.lam))
    if found.factor == 1 or not MODERATE[0] <= lam <= MODERATE[1]:
        return gelu
    number, factor = multiple(lam, found.error), multiple(found.factor, found.error)
    if number is None or factor is None or number[1] > LAMBDA_ERROR:
        return gelu
    source = found.base
    for node in reversed(found.nodes):
        made.append(replace(node, inputs=(source,)))
        source = len(made) - 1
    made.append(replace(gelu, inputs=(source,), lam=number[0]))
    return _scaled(gelu, len(made) - 1, *factor)


def _scaled(node: Node, source: int, factor: Tensor, error: float) -> Scale:
    """A factor of the value of a node, under the name of another."""
    zero = torch.zeros_like(factor)
    return Scale(
        name=node.name,
        inputs=(source,),
        shape=node.shape,
        center=zero,
        scale=factor,
        shift=zero,
        weight_error=error,
    )


def _other(nodes: Sequence[Node], product: Product) -> tuple[str, int] | None:
    """The function that a product is if it is x times a function of x, and the node of x."""
    for x, second in (product.inputs, product.inputs[::-1]):
        if x == second:
            return "Square", x
        factor = nodes[second]
        if _computes(factor, "Sigmoid") and factor.inputs == (x,):
            return "SiLU", x
        if _computes(factor, "Square") and factor.inputs == (x,):
            return "Cube", x
        inner = nodes[factor.inputs[0]] if _computes(factor, "Tanh") else factor
        if _computes(inner, "Softplus") and inner is not factor and inner.inputs == (x,):
            return "Mish", x
    return None


def _computes(node: Node, function: str) -> bool:
    return isinstance(node, Curve) and node.function == function


def _gelu(nodes: Sequence[Node], product: Product) -> tuple[int, Tensor, Tensor, float] | None:
    """What a product is if it is a multiple of λ-GELU: x, λ, the factor, and the factor's relative error.

    With one operand c·(1 + erf(k·x)) and the other d·x, k > 0, the product is 2·c·d·GELU_λ(x), λ = √2·k. It stays a
    product where one number does not hold λ, or the factor.
    """
    for left, right in (product.inputs, product.inputs[::-1]):
        one = _steps(nodes, left)[-1]
        erf = nodes[one.base]
        if not _computes(erf, "Erf") or one.offset != one.slope or one.error or not one.slope:
            continue
        inside = {step.base: step for step in _steps(nodes, erf.inputs[0]) if not step.offset}
        for step in _steps(nodes, right):
            argument = inside.get(step.base)
            if step.offset or not step.slope or argument is None or not argument.slope > 0:
                continue
            lam, factor = hardness(argument.slope, argument.error), multiple(2 * one.slope * step.slope, step.error)
            if lam is not None and factor is not None:
                return step.base, lam, *factor
    return None


def _steps(nodes: Sequence[Node], index: int) -> list[_Scaled]:
    """A node's value in terms of the node itself, and of each node before it from which scalars alone lead to it."""
    steps = [_Scaled(index, Fraction(1), Fraction(0), Fraction(0))]
    while isinstance(node := nodes[index], Scale) and all(
        part.numel() == 1 and bool(torch.isfinite(part).all()) for part in (node.center, node.scale, node.shift)
    ):
        center, shift, (scale, off) = Fraction(float(node.center)), Fraction(float(node.shift)), _number(node)
        last = steps[-1]
        if (off or last.error) and (center or shift):
            break
        index = node.inputs[0]
        offset = last.offset + last.slope * (shift - scale * center)
        steps.append(_Scaled(index, last.slope * scale, offset, (1 + last.error) * (1 + off) - 1))
    return steps


_PRODUCTS = 200_000
"""The most products of numbers that are checked in rational arithmetic for one pair of layers."""


def without_repeated(network: Network) -> Network:
    """The network without repeated neurons; the network itself where there is none, or where it has other operators.

    The result is in float64 and has no ONNX file: its neurons are not those of the file. Cached.
    """
    return network.once("without repeated neurons", lambda: _smaller(network) or network)


def _smaller(network: Network) -> Network | None:
    """The smaller network, or None."""
    chain = network.nodes[1:]
    plain = all(
        type(node) in (Linear, Relu) and node.inputs == (i,) and len(node.shape) == 1 for i, node in enumerate(chain)
    )
    if not plain or len(network.input_shape) != 1 or any(_unsure(node) for node in chain):
        return None
    nodes: list[Node] = [network.nodes[0]]
    # The outputs keep their number and order: no dense layer follows whose columns could be added or sorted.
    last = max((index for index, node in enumerate(chain, start=1) if isinstance(node, Linear)), default=0)
    # For each neuron of the network its number in the last of the nodes.
    place = torch.arange(network.input_size)
    for index, node in enumerate(chain, start=1):
        if isinstance(node, Relu):
            nodes.append(replace(node, inputs=(len(nodes) - 1,), shape=nodes[-1].shape))
            continue
        assert isinstance(node, Linear)
        merged = merged_columns(node.weight.detach().double(), place, nodes[-1].size)
        if merged is None:
            return None
        weight, bias = merged, node.bias.detach().double()
        place = torch.arange(len(bias))
        if index < last:
            rows, place = torch.unique(torch.cat([weight, bias[:, None]], 1), dim=0, return_inverse=True)
            weight, bias = rows[:, :-1].contiguous(), rows[:, -1].contiguous()
        before = nodes[-1]
        if isinstance(before, Linear):
            one = one_layer(weight, bias, before)
            if one is not None:
                nodes.pop()
                weight, bias = one
        made = replace(node, inputs=(len(nodes) - 1,), shape=(len(bias),), weight=weight, bias=bias)
        nodes.append(made)
    if sum(node.size for node in nodes) >= sum(node.size for node in network.nodes):
        return None
    return Network(tuple(nodes), name=network.name, batched=network.batched)


def _unsure(node: Node) -> bool:
    """Whether weights are known up to an error only, or a gradient is wanted."""
    return isinstance(node, Linear) and bool(node.weight_error or node.weight.requires_grad or node.bias.requires_grad)


def merged_columns(weight: Tensor, place: Tensor, size: int) -> Tensor | None:
    """The weights with the columns of repeated neurons added, (rows, size); None where that may not be exact."""
    if size == len(place):
        # Neurons are sorted all the same.
        merged = torch.empty_like(weight)
        merged[:, place] = weight
        return merged
    units = weight[weight != 0] / COMMON_STEP
    if not bool((units == units.round()).all()) or float(weight.abs().sum(1).amax()) >= COMMON_STEP * 2.0**52:
        return None
    return weight.new_zeros(len(weight), size).index_add_(1, place, weight)


def one_layer(weight: Tensor, bias: Tensor, first: Linear) -> tuple[Tensor, Tensor] | None:
    """Weight and bias of two dense layers as one, where that is exact and no larger; else None."""
    inputs = first.weight.shape[1]
    if len(bias) * inputs > weight.numel() + first.weight.numel():
        return None
    if int(weight.count_nonzero()) * (inputs + 1) > _PRODUCTS:
        return None
    before = torch.cat([first.weight, first.bias[:, None]], 1)
    product = weight @ before
    product[:, -1] += bias
    if not bool(product.isfinite().all()):
        return None
    numbers = [[Fraction(v) for v in row] for row in before.tolist()]
    for row, own, found in zip(weight, bias.tolist(), product.tolist(), strict=True):
        terms = [(Fraction(float(row[k])), numbers[k]) for k in row.nonzero().flatten().tolist()]
        for column, value in enumerate(found):
            exact = sum((factor * line[column] for factor, line in terms), Fraction(own if column == inputs else 0))
            if exact != Fraction(value):
                return None
    return product[:, :-1].contiguous(), product[:, -1].contiguous()
