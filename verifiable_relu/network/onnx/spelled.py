"""Functions of one variable where a file writes them out as products.

    x·½·(1 + erf(k·x))    λ-GELU with λ = √2·k
    x·σ(x)                SiLU
    x·tanh(softplus(x))   Mish
    x·x, x·x²             powers

``spelled`` puts a function in the place of each product that spells one: bounds of a function of x know that both
factors are of the same x. It looks at nodes, never at the file's names, of which one value may have several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import torch
from torch import Tensor

from verifiable_relu.network.derived import hardness, multiple, narrow, scaled_hardness
from verifiable_relu.network.nodes import Curve, Gelu, Node, Product, Scale, curve
from verifiable_relu.network.simplify import live
from verifiable_relu.rounding import MODERATE, not_below


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

    Args:
        nodes: in topological order.
        output: the index of the output.

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
                zero = torch.zeros_like(number)
                scale = Scale(
                    name=node.name,
                    inputs=(len(made) - 1,),
                    shape=node.shape,
                    center=zero,
                    scale=number,
                    shift=zero,
                    weight_error=error,
                )
                made.append(scale)
        at.append(len(made) - 1)
    return made, at[output]


def bare(nodes: Sequence[Node], output: int) -> tuple[list[Node], int]:
    """Put λ times λ-GELU of x in the place of GELU(λ·x), so that no GELU is one of a multiple.

    Certificates speak of that x (``docs/certificates.md``), and so does the λ of a family of networks. The arguments
    and the result are those of ``spelled``.
    """
    made: list[Node] = []
    at: list[int] = []
    for node in nodes:
        moved = replace(node, inputs=tuple(at[i] for i in node.inputs))
        if isinstance(moved, Gelu):
            first = _steps(made, moved.inputs[0])[-1]
            lam = first.slope * Fraction(float(moved.lam))
            fits = not first.offset and made[first.base].shape == moved.shape and MODERATE[0] <= lam <= MODERATE[1]
            number = scaled_hardness(lam, first.error) if fits else None
            if number is not None and first.slope != 1 and Fraction(float(first.slope)) == first.slope:
                wide = torch.tensor([float(first.slope), 0.0], dtype=torch.float64)
                factor, zero = narrow(wide)
                made.append(replace(moved, inputs=(first.base,), lam=number))
                moved = Scale(
                    name=node.name,
                    inputs=(len(made) - 1,),
                    shape=node.shape,
                    center=zero,
                    scale=factor,
                    shift=zero,
                    weight_error=not_below(first.error),
                )
        made.append(moved)
        at.append(len(made) - 1)
    return live(made, at[output])


def _other(nodes: Sequence[Node], product: Product) -> tuple[str, int] | None:
    """The function that a product is if it is x times a function of x, and the node of x."""
    for x, second in (product.inputs, product.inputs[::-1]):
        if x == second:
            return "Square", x
        factor = nodes[second]
        if _is(factor, "Sigmoid") and factor.inputs == (x,):
            return "SiLU", x
        if _is(factor, "Square") and factor.inputs == (x,):
            return "Cube", x
        inner = nodes[factor.inputs[0]] if _is(factor, "Tanh") else factor
        if _is(inner, "Softplus") and inner is not factor and inner.inputs == (x,):
            return "Mish", x
    return None


def _is(node: Node, function: str) -> bool:
    return isinstance(node, Curve) and node.function == function


def _gelu(nodes: Sequence[Node], product: Product) -> tuple[int, Tensor, Tensor, float] | None:
    """What a product is if it is a multiple of λ-GELU: x, λ, the factor, and the factor's relative error.

    With one operand c·(1 + erf(k·x)) and the other d·x, k > 0, the product is 2·c·d·GELU_λ(x), λ = √2·k. It stays a
    product where one number does not hold λ, or the factor.
    """
    for left, right in (product.inputs, product.inputs[::-1]):
        one = _steps(nodes, left)[-1]
        erf = nodes[one.base]
        if not _is(erf, "Erf") or one.offset != one.slope or one.error or not one.slope:
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
        center, scale, shift = (Fraction(float(part)) for part in (node.center, node.scale, node.shift))
        last, off = steps[-1], Fraction(node.weight_error)
        if (off or last.error) and (center or shift):
            break
        index = node.inputs[0]
        offset = last.offset + last.slope * (shift - scale * center)
        steps.append(_Scaled(index, last.slope * scale, offset, (1 + last.error) * (1 + off) - 1))
    return steps
