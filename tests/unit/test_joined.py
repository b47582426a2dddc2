"""Random VNN-LIB 2.0 queries of two networks mean, as they are read, what an evaluator of its own makes of them."""

from __future__ import annotations

import random
from fractions import Fraction
from pathlib import Path

import pytest

from tests.support.draws import draws
from tests.support.vnnlib_cases import Writer, holds, reached
from verifiable_relu.errors import InputError
from verifiable_relu.spec.read import read_vnnlib

POINTS = 8


class TwoNetworks(Writer):
    """Random queries of two networks with inputs X and U and outputs Y and V, which they may relate.

    Attributes:
        ties: pairs of inputs that the query makes equal.
    """

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng, "2.0")
        self.sizes = [rng.randint(1, 2) for _ in "XUYV"]
        variables = zip("XUYV", self.sizes, strict=True)
        self.names = [f"{variable}[{i}]" for variable, size in variables for i in range(size)]
        self.inputs, self.outputs = sum(self.sizes[:2]), sum(self.sizes[2:])
        pairs = range(min(self.sizes[:2]))
        self.ties = [(f"X[{i}]", f"U[{i}]") for i in pairs] if rng.random() < 0.5 else []
        if rng.random() < 0.2:
            self.ties.append((rng.choice(self.names[: self.inputs]), rng.choice(self.names[: self.inputs])))

    def declarations(self) -> list[str]:
        x, u, y, v = (f"float32 [{size}]" for size in self.sizes)
        return [
            "(vnnlib-version <2.0>)",
            f"(declare-network f (declare-input X {x}) (declare-output Y {y}))",
            f"(declare-network g (declare-input U {u}) (declare-output V {v}))",
        ]

    def related(self) -> str:
        """A comparison of inputs with each other or with outputs, or of products of them."""
        rng = self.rng
        if rng.random() < 0.4:
            return f"({rng.choice(['<=', '>', '==', '!='])} {self.polynomial(rng.randint(1, 3))} {self.output()})"
        x, other = rng.choice(self.names[: self.inputs]), rng.choice(self.names)
        operator = rng.choice(["<=", ">=", "<", ">", "==", "!="])
        match rng.randrange(4):
            case 0:
                return f"({operator} {x} (+ {other} {self.constant()}))"
            case 1:
                return f"({operator} (- {other} {x}) {self.constant()})"
            case 2:
                return f"({operator} (+ {x} (* -2.0 {other})) 0.0)"
        return f"({operator} {x} {other})"

    def polynomial(self, depth: int) -> str:
        rng = self.rng
        if depth == 0:
            return rng.choice([*self.names, self.constant()])
        parts = " ".join(self.polynomial(rng.randrange(depth)) for _ in range(rng.randint(2, 3)))
        return f"({rng.choice('*+-*')} {parts})"

    def atom(self) -> str:
        return self.related() if self.rng.random() < 0.3 else super().atom()

    def text(self) -> str:
        rng = self.rng
        first, second = (rng.sample(pair, 2) for pair in (("X", "U"), ("<=", ">=")))
        ties = [f"(assert (== {' '.join(rng.sample(pair, 2))}))" for pair in self.ties]
        lines = self.box() + [f"(assert {self.formula(rng.randint(0, 2))})" for _ in range(rng.randint(1, 3))]
        if rng.random() < 0.3:
            # Inputs without bounds of their own get them from those of others.
            gone = f" {first[0]}[0] "
            lines = [line for line in lines if gone not in line or "assert (and" in line or "assert (or" in line]
            lines += [f"(assert ({op} {first[0]}[0] (+ {first[1]}[0] {self.number()})))" for op in second]
        if ties and rng.random() < 0.3:
            both = " ".join(line[8:-1] for line in ties)
            ties = [f"(assert (and {both}))"]
        lines += ties
        rng.shuffle(lines)
        return "\n".join(self.declarations() + lines) + "\n"

    def point(self) -> dict[str, Fraction]:
        """A point at which inputs that are made equal mostly are, and inputs often near to each other."""
        found = super().point()
        for first, second in self.ties:
            if self.rng.random() < 0.9:
                found[second] = found[first]
        return found


@pytest.mark.thorough
def test_a_query_of_two_networks_means_what_its_formula_says(tmp_path: Path) -> None:
    read = satisfied = passed = multiplied = 0
    path = tmp_path / "query.vnnlib"
    for seed in range(draws(600)):
        writer = TwoNetworks(random.Random(seed))
        text = writer.text()
        path.write_text(text, encoding="utf-8")
        points = [writer.point() for _ in range(POINTS)]
        expected = [holds(text, point) for point in points]
        try:
            query = read_vnnlib(path)
        except InputError as error:
            # The bounds may leave no input, or not bound one; a formula must then hold nowhere, or not in a box.
            assert "bound" in str(error) or ("is empty" in str(error) and not any(expected)), (seed, text, error)
            continue
        read += 1
        passed += query.joined is not None and query.joined.passed
        multiplied += query.joined is not None and bool(query.joined.products)
        for point, is_unsafe in zip(points, expected, strict=True):
            satisfied += is_unsafe
            assert reached(query, point) is is_unsafe, (seed, text, point)
    assert read > draws(600) // 2
    assert passed > read // 3
    assert multiplied > read // 10
    assert satisfied > read // 8
