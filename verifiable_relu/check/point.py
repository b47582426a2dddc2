"""Certificates of *sat*: a point of the unsafe set, evaluated exactly, or enclosed where there is no exact value."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np

from verifiable_relu.check.bounds import root
from verifiable_relu.check.errors import BadInput, Refused
from verifiable_relu.check.functions import Kinked, Signs
from verifiable_relu.check.graph import Activation, Affine, Graph, Maximum
from verifiable_relu.check.numbers import EXACT, Number, outward, rational
from verifiable_relu.check.properties import Disjunct


def evaluated(graph: Graph, point: list[Fraction]) -> list[Fraction] | None:
    """The outputs at a point, exactly; None if some number of the network is irrational, or no binary one."""
    values: dict[int, Number] = {0: rational(np.array(point, object))}
    for number in graph.order[1:]:
        node: Any = graph.nodes[number]
        if isinstance(node, Affine) and not node.relative and not np.any(node.lost):
            value = rational(node.bias)
            for source, matrix in node.terms:
                value = value + EXACT.pull(values[source][None], matrix if matrix.ndim == 1 else matrix.T)[0]
            values[number] = value
        elif isinstance(node, Maximum):
            values[number] = values[node.source][node.rivals].max(0)
        elif isinstance(node, Activation) and isinstance(node.function, Kinked):
            z = values[node.source]
            values[number] = np.where(z > 0, z, z * rational(node.function.slope))
        elif isinstance(node, Activation) and isinstance(node.function, Signs):
            values[number] = rational(np.sign(values[node.source]).astype(float))
        else:
            return None
    return list(values[graph.output])


def enclosed(graph: Graph, point: list[Fraction]) -> list[tuple[Fraction, Fraction]]:
    """Numbers between which the outputs at a point lie."""
    if (exact := evaluated(graph, point)) is not None:
        return [(value, value) for value in exact]
    low, high = (np.array([outward(value, side) for value in point]) for side in (-np.inf, np.inf))
    ends = root(graph, low, high).ends[graph.output]
    return [(Fraction(a), Fraction(b)) for a, b in zip(*(side.tolist() for side in ends), strict=True)]


def check_point(graph: Graph, disjuncts: list[Disjunct], point: list[Fraction]) -> int:
    """The number of a disjunct that the point is in.

    Raises:
        Refused: if it is in none.
        BadInput: if the outputs are not known closely enough to say so.
    """
    unsure = False
    outputs_of: dict[bool, list[tuple[Fraction, Fraction]]] = {}
    for at, disjunct in enumerate(disjuncts):
        inside = all(low <= x <= high for low, x, high in zip(disjunct.lower, point, disjunct.upper, strict=True))
        ends = (point[i] == (disjunct.upper if up else disjunct.lower)[i] for i, up in disjunct.open_ends)
        if not inside or any(ends):
            continue
        comparing = all(row.compares for row in disjunct.rows)
        if comparing not in outputs_of:
            outputs_of[comparing] = enclosed(graph.asked(comparing), point)
        outputs = outputs_of[comparing]
        sure = possible = True
        for row in disjunct.rows:
            sums = [sum((c * outputs[i][int((c > 0) == up)] for i, c in row.y), Fraction(0)) for up in (False, True)]
            below = [value < row.most or (value == row.most and not row.strict) for value in sums]
            possible, sure = possible and below[0], sure and below[1]
        if sure:
            return at
        unsure = unsure or possible
    BadInput.when(unsure, "the outputs at the point are not known closely enough")
    raise Refused("the point is in no disjunct of the property")
