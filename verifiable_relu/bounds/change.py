"""Proven bounds of how far outputs move over boxes of inputs when ReLU replaces a network's λ-GELUs.

The two networks become one, whose output is the difference of theirs. The part before all λ-GELUs is in it
once. Each later activation is in it twice, as a ``Pair``: at z with any function of the family, and at z′ with
ReLU (``differences``). A product makes x′∘y′ = x∘y + (x′ − x)∘y′ + x∘(y′ − y). Bounds of the set of all members of the
family hold for z and for z′, so that only differences are bounded by rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from verifiable_relu.bounds.backward import MEMORY, Relaxation
from verifiable_relu.bounds.linear_bounds import bound_by_crown, lower_of_rows
from verifiable_relu.bounds.neuron_bounds import BASE
from verifiable_relu.ir.families import harden
from verifiable_relu.ir.functions.smooth import Hardened
from verifiable_relu.ir.interval import Interval
from verifiable_relu.ir.linear import Diagonal
from verifiable_relu.ir.network import Affine, Elementwise, Network, Op, Pair, Product, Source, Sum, live
from verifiable_relu.ir.transform import are_alike


def substitution_change(
    network: Network, box: Interval, *, memory: int = MEMORY, stop: Callable[[], bool] | None = None
) -> Interval:
    """Return bounds of (outputs of the ReLU network − outputs of the smooth one) for the same input in the box.

    They hold for every smooth network with λ' ≥ λ in each layer, at all inputs of the box, rounding accounted for;
    the box [0, 1]ⁿ gives the change over a whole domain of images.

    Args:
        network: with λ-GELU activations, which are all replaced, or as ``ir.families`` makes it.
        box: the inputs, (batch, inputs) in float64.
        memory: a limit in bytes on the coefficients held at once.
        stop: asked between chunks; once it returns True what is left keeps its interval bounds.

    Returns:
        (batch, outputs); NaN or infinite where no bound is known.

    Raises:
        InputError: if no λ is known for a ReLU, or there is no activation.
    """
    family = network if any(_is_hardened(op) for op in network.ops) else harden(network)
    bounded = bound_by_crown(Relaxation(family, box, memory=memory, stop=stop))
    made = _DifferenceNetwork(family)
    if made.output is None:
        zero = box.lower.new_zeros(len(box.lower), family.output_size)
        return Interval(zero, zero)
    ops, number = live(made.ops, made.output, made.pairs)
    pairs = tuple(Pair(*(number[i] for i in pair)) for pair in made.pairs if pair.second in number)
    source = Source(family.source.input_shape, family.source.output_shape)
    known = {number[i]: bounded.bounds[old].interval for i, old in made.known.items() if i in number}
    difference = Network(ops, source, family.name, family.arithmetic, pairs)
    # Float32 would be most of what is left of small differences.
    relaxation = Relaxation(difference, box, known=known, dtype=BASE, memory=memory, stop=stop)
    bound_by_crown(relaxation, sources={number[i] for i in made.differences.values() if i in number})
    one = torch.eye(difference.output_size).to(box.lower)
    value, _ = lower_of_rows(relaxation, torch.cat([one, -one]).repeat(len(box.lower), 1))
    lower, upper = value.unflatten(0, (len(box.lower), 2, -1)).unbind(1)
    return relaxation.bounds[-1].interval.intersect(Interval(lower, -upper))


def _is_hardened(op: Op) -> bool:
    return isinstance(op, Elementwise) and isinstance(op.function, Hardened)


class _DifferenceNetwork:
    """Network that computes the differences between a family's limit and its members.

    Attributes:
        ops: made so far; some may turn out to be unused.
        pairs: activations of both.
        known: by number, the op of the family whose bounds hold for it, too, for all members.
        differences: the numbers of z′ − z by those of z′.
        output: the number of the difference of the outputs; None if there is none.
    """

    def __init__(self, family: Network) -> None:
        self.ops: list[Op] = []
        self.pairs: list[Pair] = []
        self.known: dict[int, int] = {}
        self.differences: dict[int, int] = {}
        self._at: list[tuple[int, int]] = []
        for index, op in enumerate(family.ops):
            self._at.append(self._add(op, [self._at[i] for i in op.inputs]))
            self.known |= dict.fromkeys(self._at[-1], index)
        smooth, hard = self._at[-1]
        self.output = None if smooth == hard else self._difference(smooth, hard)

    def _add(self, op: Op, inputs: list[tuple[int, int]]) -> tuple[int, int]:
        """Add an op for the family's members and one for the limit, or one for both; returns their numbers."""
        smooth = self._put(replace(op, inputs=tuple(first for first, _ in inputs)))
        if all(first == second for first, second in inputs) and not _is_hardened(op):
            return smooth, smooth
        if isinstance(op, Product):
            return smooth, self._product(op, smooth, *inputs)
        moved = tuple(second for _, second in inputs)
        if not isinstance(op, Elementwise):
            return smooth, self._put(replace(op, inputs=moved))
        apart = self._difference(*inputs[0])
        found = self._put(replace(op, inputs=moved, function=op.function.limit))
        if are_alike(op.function, op.function.limit):
            self.pairs.append(Pair(smooth, apart, found))
        return smooth, found

    def _product(self, op: Product, smooth: int, left: tuple[int, int], right: tuple[int, int]) -> int:
        """x∘y + (x′ − x)∘y′ + x∘(y′ − y), of the differences that there are."""
        parts = [smooth]
        if left[0] != left[1]:
            parts.append(self._put(replace(op, inputs=(self._difference(*left), right[1]))))
        if right[0] != right[1]:
            parts.append(self._put(replace(op, inputs=(left[0], self._difference(*right)))))
        return self._put(Sum(name=op.name, inputs=tuple(parts), size=op.size))

    def _difference(self, smooth: int, hard: int) -> int:
        if hard not in self.differences:
            op = self.ops[hard]
            minus = Diagonal(torch.full((op.size,), -1.0))
            negative = self._put(Affine(name=f"{op.name}/minus", inputs=(smooth,), size=op.size, map=minus))
            apart = Sum(name=f"{op.name}/apart", inputs=(hard, negative), size=op.size)
            self.differences[hard] = self._put(apart)
        return self.differences[hard]

    def _put(self, op: Op) -> int:
        self.ops.append(op)
        return len(self.ops) - 1
