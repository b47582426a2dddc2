"""Every input of the box with the network's values there is a solution of the program that HiGHS gets."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import torch

from tests.support import nets
from tests.support.exact import exact_values, intervals
from verifiable_relu.ir.interval import Interval
from verifiable_relu.search.bab.system import eliminate_stable_neurons
from verifiable_relu.search.solvers.milp import mixed_integer_program

SPREADS = (0, 8, 30)
"""Weights have sizes from 2^-spread to 2^spread: many coefficients are too small for HiGHS, and are left out."""


def problems(count: int = 24, points: int = 4) -> Iterator[str]:
    """Rows of programs, loosened by nothing but what they may be off, that exact values of a network violate."""
    for seed in range(count):
        rng = np.random.default_rng(seed)
        net = nets.mlp(rng, nets.uneven(rng, SPREADS[seed % 3]), "PRelu", (3, 4, 3, 2))
        center = rng.integers(-8, 9, 3) / 8
        box = Interval(*(torch.from_numpy(center + sign * 0.5)[None] for sign in (-1, 1)))
        known = intervals(net, box)
        fed = [net.ops[i].inputs[0] for i in net.activations]
        system = eliminate_stable_neurons(net, box, {i: known[i] for i in fed})
        rows = system.outputs(torch.eye(net.output_size).double())
        program, size = mixed_integer_program(system, rows, 1.0, 0.0), system.size
        for _ in range(points):
            x = [Fraction(float(v)) for v in center - 0.5 + rng.choice([0, 1, 0.25, 0.375], 3)]
            at = exact_values(net, x)
            z = [at[net.ops[op].inputs[0]][i] for op, i in system.places.tolist()]
            # The columns: inputs, both parts of pre-activations as multiples of powers of two, phases, and t.
            parts = [max(v, 0 * v) for v in z] + [max(-v, 0 * v) for v in z]
            ends = torch.cat([system.upper, -system.lower]).tolist()
            unit = [Fraction(2) ** int(np.frexp(end)[1]) for end in ends]
            e = [(x[i] - Fraction(float(system.center[i]))) / Fraction(float(system.radius[i])) for i in system.free]
            scaled = [part / by for part, by in zip(parts, unit, strict=True)]
            columns = [*e, *scaled, *(Fraction(v > 0) for v in z)]
            for row in (*range(size), *range(size + len(rows), 3 * size + len(rows))):
                part = slice(program.starts[row], program.starts[row + 1])
                terms = zip(program.columns[part].tolist(), program.entries[part].tolist(), strict=True)
                total = sum((Fraction(c) * columns[i] for i, c in terms), Fraction(0))
                if not program.row_lower[row] <= total <= program.row_upper[row]:
                    yield f"row {row} of seed {seed} is {float(total)}"
