"""Planes: upper bounds of neurons' values, affine in the inputs and in the values of open neurons before them.

With v these inputs and values, each of which lies in an interval that is known, a pre-activation is z = W·v + b, with
l ≤ z ≤ u. For any coefficients g and any μ, ν ≥ 0, g·v + c is at least the neuron's value r over the whole box if

    c ≥ max over v of ((1 − μ)·z − g·v) + μ·u   and   c ≥ max over v of ((s + ν)·z − g·v) − ν·l,

s being the slope below zero: where z ≥ 0, r = z ≤ z + μ·(u − z), and where z ≤ 0, r = s·z ≤ s·z + ν·(z − l). Where
s ≤ 1, r is at least t·z for any t between s and 1, so that r is below the plane by no more than the largest value of
g·v + c − t·z, the plane's *width*. A certificate gives θ, μ and ν; g_i = θ_i·W_i, c and the width are computed here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import sparse

from verifiable_relu.check.arithmetic import OWN, SMALL, TINY, UNIT, Number, gamma
from verifiable_relu.check.errors import Refused
from verifiable_relu.check.graph import ActivationNode
from verifiable_relu.check.lines import WORKING, CheckedRelaxation, Fixed, LinearForms, MultiNeuronBounds, Neurons
from verifiable_relu.check.records import CertificateRecords, integer, integers, numbers


@dataclass(frozen=True, eq=False)
class _Written:
    """One plane as a certificate has it.

    Attributes:
        terms: the variables that have a coefficient, inputs and then open neurons, by number.
        parts: θ of each.
        bends: μ and ν.
    """

    terms: list[int]
    parts: Number
    bends: Number


def taken(records: CertificateRecords, relaxation: CheckedRelaxation) -> dict[int, MultiNeuronBounds]:
    """The planes that come next in a certificate, by the number of the activation's node.

    Raises:
        Refused: if one of them is over no open neuron, or of a neuron that is not before it.
    """
    activations = relaxation.graph.activations
    written: dict[int, dict[int, _Written]] = {}
    terms: list[int] | None = None
    while "plane" in records.peek():
        plane, parts, bends, given = records.take("plane", "parts", "bends", optional=("terms",))
        number, neuron = integers(plane, 2)
        activation = activations[integer(number, len(activations), "activation")]
        known = relaxation.neurons[activation]
        at = int(np.searchsorted(known.open, integer(neuron, len(known.lower), "neuron")))
        if at == len(known.open) or known.open[at] != neuron:
            raise Refused(f"{records.place}: neuron {neuron} of the activation {number} has one phase by its bounds")
        convex = isinstance(known, Neurons) and known.slope[at] <= 1
        if not convex or not all(isinstance(each, Neurons) for each in relaxation.neurons.values()):
            raise Refused(f"{records.place}: there are planes over convex functions with a kink alone")
        if at in written.setdefault(activation, {}):
            raise Refused(f"{records.place}: neuron {neuron} has two planes")
        terms = integers(given) if given is not None else terms
        if terms is None or len(set(terms)) < len(terms):
            raise Refused(f"{records.place}: a plane has terms, each of them once")
        for term in (min(terms), max(terms)) if terms else ():
            integer(term, relaxation.inputs + known.first, "input or neuron of an earlier activation")
        written[activation][at] = found = _Written(terms, numbers(parts, len(terms)), numbers(bends, 2))
        if not (found.bends >= 0).all():
            raise Refused(f"{records.place}: a bend of a plane is negative")
    return {activation: _made(relaxation, activation, found) for activation, found in written.items()}


def _made(relaxation: CheckedRelaxation, activation: int, written: dict[int, _Written]) -> MultiNeuronBounds:
    """The planes over some open neurons of one activation, given by their numbers among these."""
    node, known = relaxation.graph.nodes[activation], relaxation.neurons[activation]
    assert isinstance(node, ActivationNode) and isinstance(known, Neurons)
    size = relaxation.inputs + known.first
    every, together = sorted(written), max(1, WORKING // max(node.size, size))
    found = []
    for start in range(0, len(every), together):
        some = every[start : start + together]
        unit = np.zeros((len(some), node.size))
        unit[np.arange(len(some)), known.open[some]] = 1
        # With slopes of zero, what is left of the neurons before is their values.
        form = relaxation.forms({node.source: unit}, Fixed(np.zeros(relaxation.open)))
        found.append(_bounding(relaxation, known, form, some, [written[at] for at in some]))
    matrices, *rest = zip(*found, strict=True)
    matrix, (constant, width, unit_) = sparse.vstack(matrices, format="csr"), (np.concatenate(part) for part in rest)
    if not all(np.isfinite(part).all() for part in (matrix.data, constant, width, unit_)):
        raise Refused("the numbers of a plane are too large")
    terms = [(0, matrix[:, : relaxation.inputs])]
    for number, before in relaxation.neurons.items():
        if number < activation and len(before.open):
            part = matrix[:, relaxation.inputs :][:, before.part].tocoo()
            shape = (len(every), len(before.lower))
            terms.append((number, sparse.csr_array((part.data, (part.row, before.open[part.col])), shape=shape)))
    return MultiNeuronBounds(np.array(every), terms, constant, width, unit_)


def _bounding(
    relaxation: CheckedRelaxation, known: Neurons, form: LinearForms, at: list[int], written: list[_Written]
) -> tuple[sparse.csr_array, Number, Number, Number]:
    """Coefficients g, constants c, widths, and what rounding loses with one unit of each plane (``MultiNeuronBounds``).

    Args:
        form: z of each neuron, affine in the variables.
        at: the neurons, by number among the open ones ``known``.
        written: their planes.
    """
    low, high = _variables(relaxation)
    count = relaxation.inputs + known.first
    weight, low, high = form.coefficients[:, :count], low[:count], high[:count]
    most = np.maximum(np.abs(low), np.abs(high))
    theta = np.zeros_like(weight)
    for row, one in zip(theta, written, strict=True):
        row[one.terms] = one.parts
    g = theta * weight
    (mu, nu), slope, chord = np.stack([one.bends for one in written]).T, known.slope[at], known.chord[at]
    spread = TINY * (1 + float(most.sum()))

    def largest(rate: Number, sign: float, rest: Number) -> Number:
        """The largest value of rate·z + sign·(g·v) + rest over the box, or a little more."""
        a = rate[:, None] * weight + sign * g
        value = rate * form.constant + rest + np.where(a > 0, a * high, a * low).sum(1)
        size = np.abs(rate) * (np.abs(form.constant) + np.abs(weight) @ most + SMALL) + np.abs(g) @ most + np.abs(rest)
        return np.asarray(value + OWN * (np.abs(rate) * form.error + 2 * gamma(count + 16) * size + spread))

    constant = np.maximum(largest(1 - mu, -1.0, mu * known.high[at]), largest(slope + nu, -1.0, -nu * known.low[at]))
    width = np.maximum(largest(-chord, 1.0, constant), 0)
    unit = gamma(2 * (len(relaxation.graph.nodes) + len(known.open)) + 16) * (np.abs(g) @ most + np.abs(constant))
    return sparse.csr_array(g), constant, width, unit + TINY


def _variables(relaxation: CheckedRelaxation) -> tuple[Number, Number]:
    """The ends of the inputs, and of the values of all open neurons."""
    low, high = [relaxation.lower], [relaxation.upper]
    for known in relaxation.neurons.values():
        assert isinstance(known, Neurons)
        below = known.slope * known.low
        slack = 2 * UNIT * np.abs(below) + TINY
        low.append(np.minimum(below - slack, 0))
        high.append(np.maximum(below + slack, known.high))
    return np.concatenate(low), np.concatenate(high)
