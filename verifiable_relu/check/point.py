"""Certificates of *sat*: a point of the unsafe set, evaluated exactly, or enclosed where there is no exact value."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from verifiable_relu.check.arithmetic import EXACT, Number, outward
from verifiable_relu.check.conditions import UnsafeSet
from verifiable_relu.check.errors import BadInput, Refused
from verifiable_relu.check.graph import ActivationNode, AffineNode, Graph, InputNode, SmoothNode
from verifiable_relu.check.lines import CheckedRelaxation


def evaluated(graph: Graph, point: list[Fraction]) -> list[Fraction] | None:
    """The outputs at a point, exactly; None if some number of the network is irrational, or no binary one."""
    values: dict[int, Number] = {}
    for number in graph.needed:
        node = graph.nodes[number]
        if isinstance(node, ActivationNode):
            z = values[node.source]
            values[number] = np.where(z > 0, z, z * EXACT.of(node.slope))
        elif isinstance(node, AffineNode) and not node.relative:
            value = EXACT.of(node.bias)
            for source, matrix in node.terms:
                value = value + EXACT.times(values[source][None], matrix.T)[0]
            values[number] = value
        elif isinstance(node, SmoothNode) and node.kind == "Sign":
            z = values[node.source]
            values[number] = EXACT.of(np.where(z > 0, 1.0, np.where(z < 0, -1.0, 0.0)))
        elif isinstance(node, InputNode):
            values[number] = np.array(point, dtype=object)
        else:
            return None
    return list(values[graph.output])


def enclosed(graph: Graph, point: list[Fraction]) -> list[tuple[Fraction, Fraction]]:
    """Numbers between which the outputs at a point lie.

    Raises:
        BadInput: if these are too large.
    """
    if (exact := evaluated(graph, point)) is not None:
        return [(value, value) for value in exact]
    low, high = (np.array([outward(value, side) for value in point]) for side in (-np.inf, np.inf))
    relaxation = CheckedRelaxation(graph, low, high)
    for number in graph.activations:
        node = graph.nodes[number]
        assert isinstance(node, ActivationNode | SmoothNode)
        relaxation.claim(number, *relaxation.ends(node.source))
    ends = relaxation.ends(graph.output)
    if not np.isfinite(ends).all():
        raise BadInput("the outputs at the point are too large")
    return [(Fraction(a), Fraction(b)) for a, b in zip(*(side.tolist() for side in ends), strict=True)]


def check_point(graph: Graph, disjuncts: list[UnsafeSet], point: list[Fraction]) -> int:
    """The number of a disjunct that the point is in.

    Raises:
        Refused: if it is in none.
        BadInput: if the outputs are not known closely enough to say so.
    """
    unsure = False
    outputs_of: dict[bool, list[tuple[Fraction, Fraction]]] = {}
    for at, disjunct in enumerate(disjuncts):
        inside = all(low <= x <= high for low, x, high in zip(disjunct.lower, point, disjunct.upper, strict=True))
        inside = inside and all(
            point[i] != (disjunct.upper if up else disjunct.lower)[i] for i, up in disjunct.open_ends
        )
        if not inside:
            continue
        comparing = all(row.compares for row in disjunct.rows)
        if comparing not in outputs_of:
            outputs_of[comparing] = enclosed(graph.asked(comparing), point)
        outputs = outputs_of[comparing]
        sure = possible = True
        for row in disjunct.rows:
            ends = [sum((c * outputs[i][int((c > 0) == up)] for i, c in row.y), Fraction(0)) for up in (False, True)]
            below = [value < row.most or (value == row.most and not row.strict) for value in ends]
            possible, sure = possible and below[0], sure and below[1]
        if sure:
            return at
        unsure = unsure or possible
    if unsure:
        raise BadInput("the outputs at the point are not known closely enough")
    raise Refused("the point is in no disjunct of the property")
