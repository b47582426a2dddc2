"""Random and damaged property files: read as an evaluator of its own understands them, or refused in one line."""

from __future__ import annotations

import random
from fractions import Fraction
from pathlib import Path

import pytest

from tests.support.draws import draws
from tests.support.vnnlib_cases import Writer, damaged, exchanged, holds, reached
from verifiable_relu.errors import LONGEST, InputError
from verifiable_relu.spec import Property, read_vnnlib, vnnlib_text
from verifiable_relu.spec.read import parse

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


def writer(kind: str, rng: random.Random) -> Writer:
    return TwoNetworks(rng) if kind == "two networks" else Writer(rng, kind)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["1.0", "2.0", "two networks"])
def test_a_property_means_what_its_formula_says(kind: str) -> None:
    empty = read = satisfied = passed = multiplied = 0
    count = draws(600 if kind == "two networks" else 300)
    for seed in range(count):
        made = writer(kind, random.Random(seed))
        text = made.text()
        points = [made.point() for _ in range(POINTS)]
        expected = [holds(text, point) for point in points]
        try:
            spec = parse(text, Path("p"))
        except InputError as error:
            # The bounds may leave no input, or not bound one; a formula must then hold nowhere, or not in a box.
            assert "bound" in str(error) or ("is empty" in str(error) and not any(expected)), (seed, text, error)
            empty += 1
            continue
        read += 1
        satisfied += sum(expected)
        passed += spec.joined is not None and spec.joined.passed
        multiplied += spec.joined is not None and bool(spec.joined.products)
        assert [reached(spec, point) for point in points] == expected, (seed, text)
        if kind != "two networks":
            written = parse(vnnlib_text(spec, ("1.0", "2.0")[seed % 2]), Path("p"))
            assert [p.digest for p in written.properties] == [p.digest for p in spec.properties]
    # The cases are only worth something if both outcomes occur often.
    assert read > max(empty, count // 3) and satisfied > read // 8
    assert kind != "two networks" or (passed > read // 3 and multiplied > read // 10)


@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_a_damaged_file_is_read_or_refused_in_one_line(version: str, tmp_path: Path) -> None:
    path = tmp_path / "p.vnnlib"
    refused = 0
    for seed in range(draws(300)):
        rng = random.Random(seed)
        data = damaged(rng, Writer(rng, version).text())
        path.write_bytes(data)
        try:
            read_vnnlib(path)
        except InputError as error:
            refused += 1
            line = str(error)
            assert line.startswith(f"{path}: ") and len(line) <= LONGEST and line.isprintable(), (seed, line)
    assert refused > draws(300) // 4


@pytest.mark.thorough
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_a_damaged_file_that_is_read_still_means_what_it_says(version: str) -> None:
    read = 0
    for seed in range(draws(300)):
        rng = random.Random(f"meaning {seed}")
        writer = Writer(rng, version)
        text = exchanged(rng, writer.text())
        if rng.random() < 0.5:
            text = damaged(rng, text).decode("utf-8", "replace")
        try:
            spec = parse(text, Path("p"))
        except InputError:
            continue
        read += 1
        names = [*spec.inputs.elements(version), *spec.outputs.elements(version)]
        for _ in range(POINTS):
            known = writer.point()
            point = {name: known.get(name, Fraction(0)) for name in names}
            found, meant = reached(spec, point), holds(_plain(text), point)
            # Where a side of an input is open, a part is asked about, and no more is said than of that.
            if not (meant and any(prop.partial for prop in spec.properties)):
                assert found is meant, (seed, text, point)
    assert read > draws(300) // 16


def _plain(text: str) -> str:
    """A file as the evaluator reads it: quoted symbols by their names."""
    return text.replace("|X_0|", "X_0").replace("\ufeff", "")


@pytest.mark.thorough
def test_bounds_that_are_read_at_once_mean_what_each_of_them_says() -> None:
    taken = 0
    for seed in range(draws(80)):
        rng = random.Random(seed)
        inputs = rng.randint(4, 6)
        numbers = [f"{rng.randint(-9, 9) / 4}" for _ in range(3)] + ["0.1", "-0.3", "1e-1", "0.10000000000000000001"]

        def bounds(rng: random.Random = rng, inputs: int = inputs, numbers: list[str] = numbers) -> str:
            pairs = [sorted(rng.sample(numbers, 2), key=Fraction) for _ in range(inputs)]
            pairs = [[low, low if rng.random() < 0.3 else high] for low, high in pairs]
            parts = [f"(>= X_{i} {low}) (<= X_{i} {high})" for i, (low, high) in enumerate(pairs)]
            if rng.random() < 0.2:
                parts.append(f"({rng.choice(['<=', '>=', '<'])} X_{rng.randrange(inputs)} {rng.choice(numbers)})")
            rng.shuffle(parts)
            return " ".join(parts)

        cases = [f"(and {bounds()} (<= Y_0 {rng.randint(0, 2)}))" for _ in range(rng.randint(1, 4))]
        common = [f"(assert (and {bounds()}))"] * (rng.random() < 0.2)
        common += [
            f"(assert ({rng.choice(['<', '<='])} X_{i} {rng.choice(numbers)}))" for i in range(rng.randint(0, 2))
        ]
        if rng.random() < 0.2:
            common.append(f"(assert (not (and {bounds()})))")
        head = "".join(f"(declare-const {name} Real)\n" for name in [f"X_{i}" for i in range(inputs)] + ["Y_0"])
        text = head + "\n".join([*common, f"(assert (or {' '.join(cases)}))"])
        names = [f"X_{i}" for i in range(inputs)]
        drawn = ({name: Fraction(rng.choice(numbers)) for name in names} for _ in range(POINTS))
        points = [point | {"Y_0": Fraction(rng.randint(0, 2))} for point in drawn]
        expected = [holds(text, point) for point in points]
        try:
            spec = parse(text, Path("p"))
        except InputError as error:
            assert "is empty" in str(error) and not any(expected), (seed, text, error)
            continue
        taken += 1
        assert [reached(spec, point) for point in points] == expected, (seed, text)
        # In another form, in which they are read one by one, they are the same boxes.
        apart = parse(text.replace("(>= X_0", "(>= (+ X_0)"), Path("p"))
        one, other = ({Property(p.box, ()).digest for p in each.properties} for each in (apart, spec))
        assert one == other, (seed, text)
    assert taken > draws(80) // 4
