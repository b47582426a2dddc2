"""Certificates of *sat*: a point of the unsafe set, evaluated exactly."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from verifiable_relu.check.arithmetic import EXACT, Number
from verifiable_relu.check.conditions import Disjunct
from verifiable_relu.check.errors import BadInput, Refused
from verifiable_relu.check.graph import Activation, Affine, Graph, Smooth


def evaluated(graph: Graph, point: list[Fraction]) -> list[Fraction]:
    """The outputs at a point, exactly.

    Raises:
        BadInput: if some number of the network is irrational, or no binary one.
    """
    values: list[Number] = []
    for node in graph.nodes:
        if isinstance(node, Activation):
            z = values[node.source]
            values.append(np.where(z > 0, z, z * EXACT.of(node.slope)))
        elif isinstance(node, Affine):
            if node.relative:
                raise BadInput("the network has weights that are rounded, and no exact value")
            value = EXACT.of(node.bias)
            for source, matrix in node.terms:
                value = value + EXACT.times(values[source][None], matrix.T)[0]
            values.append(value)
        elif isinstance(node, Smooth):
            raise BadInput(f"{node.kind} has no exact value")
        else:
            values.append(np.array(point, dtype=object))
    return list(values[graph.output])


def check_point(graph: Graph, disjuncts: list[Disjunct], point: list[Fraction]) -> int:
    """The number of a disjunct that the point is in.

    Raises:
        Refused: if it is in none.
    """
    outputs = evaluated(graph, point)
    for at, disjunct in enumerate(disjuncts):
        inside = all(low <= x <= high for low, x, high in zip(disjunct.lower, point, disjunct.upper, strict=True))
        ends = {False: disjunct.lower, True: disjunct.upper}
        inside = inside and all(point[i] != ends[up][i] for i, up in disjunct.open_ends)
        for row in disjunct.rows:
            value = sum((c * outputs[i] for i, c in row.y), Fraction(0)) - row.most
            inside = inside and (value < 0 if row.strict else value <= 0)
        if inside:
            return at
    raise Refused("the point is in no disjunct of the property")
