"""Merging neighbouring nodes of a network under construction into one, where that is exact.

How often a node is read is counted over the nodes' own wiring. The names that a file gives to values say nothing
about it: one value may have several.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, TypeGuard

import torch
from torch import Tensor

from verifiable_relu.network.derived import both, product
from verifiable_relu.network.dispatch import Table
from verifiable_relu.network.nodes import Gelu, Linear, Node, Scale, Smooth
from verifiable_relu.network.nodes.affine import Division

Graph = tuple[list[Node], int]
"""Nodes in topological order, the input first, and the index of the output."""


def simplify(nodes: Sequence[Node], output: int) -> Graph:
    """Merge nodes with the one before them, and leave out what the output does not need.

    A product with a matrix and the bias after it become one affine map, shifts and factors one Scale,
    GELU(λx)/λ one λ-GELU, and the reciprocal of a root one function. A Scale that changes nothing is left out.

    Args:
        nodes: in topological order; the first is the input.
        output: the index of the output.
    """
    graph = live(nodes, output)
    while True:
        before = len(graph[0])
        graph = live(*_merged_neighbours(*live(*_without_identities(*graph))))
        if len(graph[0]) == before:
            return [_kept(node) for node in graph[0]], graph[1]


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


def _kept(node: Any) -> Any:
    """The node as a network keeps it."""
    return node.kept if isinstance(node, Division) else node


def _shift(made: Sequence[Node], first: Scale, second: Node) -> Node | None:
    """scale·(x − center) and + shift."""
    if not (_only_shifts(second) and _is(first.shift, 0)):
        return None
    return replace(_kept(first), shift=second.shift)


def _factor(made: Sequence[Node], first: Scale, second: Node) -> Node | None:
    """x − center and the product with a factor, or the product of two numbers if that is exact."""
    if not (_only_scales(second) and _is(first.shift, 0)):
        return None
    if _is(first.scale, 1) and not first.weight_error:
        return replace(_kept(first), scale=second.scale, weight_error=second.weight_error)
    if not (first.scale.numel() == second.scale.numel() == 1 and _only_scales(first)):
        return None
    scale = product(first.scale, second.scale)
    if scale is None:
        return None
    shape = torch.broadcast_shapes(first.scale.shape, second.scale.shape)
    return replace(
        _kept(first), scale=scale.expand(shape).clone(), weight_error=both(first.weight_error, second.weight_error)
    )


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
    by_the_same = isinstance(second, Division) and float(second.divisor) == float(times.scale)
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
        Division: (_shift, _factor),
        Gelu: (_hardness,),
        Smooth: (_inverse_root,),
        Node: (),
    },
)
"""By the kind of the first of two nodes. Kinds without a row are left as they are, which is always right."""
