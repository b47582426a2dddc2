"""Sums at every magnitude: what the checker of certificates bounds in float64 against the same bound in rationals.

Weights, slopes, boxes and multipliers have random digits and exponents that are far from one another, so that products
are too small for float64 here and large again there; rows are such that terms all but cancel. The bound in float64,
less its slack, may nowhere be above the bound in rational numbers. That holds without any allowance where all neurons
have one phase. Where some are open, a slack speaks of the points of the box, and both bounds of any remainders: the
slack counts ``ALLOWED`` times there. What underflow loses is larger by far.
"""

from __future__ import annotations

import random
from fractions import Fraction
from itertools import pairwise

import numpy as np
from scipy import sparse

from verifiable_relu.check.arithmetic import EXACT, FLOAT
from verifiable_relu.check.graph import ActivationNode, AffineNode, Graph, InputNode, Node
from verifiable_relu.check.least import BoundedRows, Least, TreeBounds, TreeLeaves, of_box
from verifiable_relu.check.lines import CheckedRelaxation, Signed

ALLOWED = 1024

POWERS = [0, 0, 0, -60, 60, -300, 300, -500, 500, -900, 800]

TINY_WEIGHTS, TINY_SLOPES = [-900, -300, 800], [-300, 0, 800]
"""The powers of a box, of the one map that follows, and of rows, in cases where underflow is multiplied afterwards."""


class Case:
    """A network, a box, bounds of its neurons by interval arithmetic, and rows of its output, drawn by number."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.powers: list[int] = rng.choice([[], [], TINY_WEIGHTS, TINY_SLOPES])
        kinked = self.powers == TINY_SLOPES
        sizes = [rng.randint(1, 3) for _ in range(2 if self.powers else rng.randint(2, 4))]
        low, high = np.sort(self.numbers((2, sizes[0]), 0), 0)
        nodes: list[Node] = [InputNode(sizes[0])]
        for at, (before, after) in enumerate(pairwise(sizes)):
            if at:
                nodes.append(ActivationNode(len(nodes) - 1, self.slopes(before), f"a{at}"))
            relative = rng.choice([0.0, 0.0, 2.0**-52])
            bias = self.numbers((after,)) * rng.choice([0, 1 - bool(self.powers)])
            nodes.append(AffineNode([(len(nodes) - 1, self.numbers((after, before), 1))], bias, relative))
        if kinked:
            nodes.append(ActivationNode(len(nodes) - 1, self.numbers((sizes[-1],), 1) * 2.0**-770, "a"))
        graph = Graph(nodes, len(nodes) - 1)
        self.relaxation = CheckedRelaxation(graph, low, np.where([rng.random() < 0.2 for _ in low], low, high))
        for number in graph.activations:
            node = nodes[number]
            assert isinstance(node, ActivationNode)
            self.relaxation.claim(number, *self.relaxation.ends(node.source))

    @property
    def finite(self) -> bool:
        """Whether nothing has overflowed so far."""
        every = (self.relaxation.ends(number) for number in self.relaxation.graph.needed)
        return all(np.isfinite(end).all() for ends in every for end in ends)

    def numbers(self, shape: tuple[int, ...], of: int = 2) -> np.ndarray:
        """Of all digits, and of about one magnitude: that of a box, of weights, or of rows."""
        power = (self.powers[of] if self.powers else self.rng.choice(POWERS)) + self.rng.choice([0, -3, 7])
        digits = [self.rng.choice([-1, 1]) * self.rng.getrandbits(53) for _ in range(int(np.prod(shape)))]
        found: np.ndarray = np.ldexp(np.array(digits, float), power - 53).reshape(shape)
        return found

    def slopes(self, count: int) -> np.ndarray:
        rng = self.rng
        every = [0.0, 0.0, 0.25, rng.random(), 1 - 2.0**-53, rng.random() * 2.0**-1000, 2.0**-1060]
        return np.array([rng.choice(every) for _ in range(count)])

    def rows(self) -> np.ndarray:
        """Two rows of the output, in which the coefficients of the last map's first input all but cancel."""
        last = self.relaxation.graph.nodes[self.relaxation.graph.output]
        found = self.numbers((2, last.size))
        if isinstance(last, AffineNode) and last.size > 1:
            column = last.terms[0][1][:, 0] / np.abs(last.terms[0][1][:, 0]).max()
            found[:, -1] = -(found[:, :-1] @ column[:-1]) / column[-1]
        return found

    def box(self) -> list[tuple[Least, Least]]:
        """The bounds of rows of the output over the box, in float64 and in rational numbers."""
        relaxation = self.relaxation
        rows = {relaxation.graph.output: self.rows()}
        lines = Signed(self.slopes(relaxation.slopes))
        found = [of_box(relaxation, relaxation.pulled(rows, lines, ring), lines, ring) for ring in (FLOAT, EXACT)]
        return [
            (Least(found[0].value[i], found[0].slack[i]), Least(found[1].value[i], found[1].slack[i])) for i in (0, 1)
        ]

    def leaves(self) -> list[tuple[Least, Least]]:
        """The same of leaves of a tree."""
        relaxation, rng = self.relaxation, self.rng
        output = relaxation.graph.output
        rows = BoundedRows(output, self.rows(), self.numbers((2,)) * rng.choice([0, 1]))
        named = [(number, int(j)) for number, known in relaxation.neurons.items() for j in known.open]
        slopes = self.slopes(relaxation.open)
        tree = TreeBounds(relaxation, rows, slopes, named, [], {})
        lower, upper = (np.tile(end, (3, 1)) for end in tree.ends)
        split = np.array([[rng.random() < 0.4 for _ in named] for _ in range(3)]).reshape(3, len(named))
        for at, neuron in zip(*np.nonzero(split), strict=True):
            (lower if rng.random() < 0.5 else upper)[at, neuron] = 0.0
        given = np.array([[rng.random() < 0.5 for _ in named] for _ in range(3)]).reshape(3, len(named))
        multipliers = np.where(given, self.numbers((3, len(named))), 0)
        leaves = TreeLeaves(lower, upper, split, multipliers, given, sparse.csr_array(np.abs(self.numbers((3, 2)))))
        w = tree.multipliers(leaves)
        found = tree.least(leaves, w)
        exact = [tree.exactly(leaves[np.array([i])], w[[i]]) for i in range(3)]
        return [(Least(found.value[i], found.slack[i]), Least(e.value[0], e.slack[0])) for i, e in enumerate(exact)]


def wrong(seed: int) -> tuple[int, str]:
    """How many bounds were compared in a case, and what is wrong."""
    compared = 0
    with np.errstate(all="ignore"):
        case = Case(seed)
        if not case.finite:
            return 0, ""
        allowed = ALLOWED if case.relaxation.open else 1
        for kind, bounds in (("box", case.box), ("leaves", case.leaves)):
            try:
                pairs = bounds()
            except (OverflowError, ValueError):
                continue
            for found, exact in pairs:
                below = float(found.value) - allowed * float(found.slack)
                if not np.isfinite(below):
                    continue
                compared += 1
                if Fraction(float(found.value)) - allowed * Fraction(float(found.slack)) > exact.value - exact.slack:
                    return compared, f"{seed} {kind}: {found.value} ∓ {found.slack}, not {float(exact.value)}"
    return compared, ""
