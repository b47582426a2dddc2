"""Random and damaged property files: read as an evaluator of its own understands them, or refused in one line."""

from __future__ import annotations

import random
from fractions import Fraction
from pathlib import Path

import pytest

from tests.support.draws import draws
from tests.support.vnnlib_cases import Writer, damaged, exchanged, holds, reached
from verifiable_relu.errors import LONGEST, InputError
from verifiable_relu.spec import Property, SpecFile, read_vnnlib, vnnlib_text
from verifiable_relu.spec.read import parse

POINTS = 8


def inside(spec: SpecFile, x: list[Fraction], y: list[Fraction]) -> bool:
    return any(prop.box.contains(x) and prop.violated(y) for prop in spec.properties)


@pytest.mark.thorough
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_a_property_means_what_its_formula_says(version: str) -> None:
    empty = read = satisfied = 0
    for seed in range(draws(300)):
        writer = Writer(random.Random(seed), version)
        text = writer.text()
        points = [writer.point() for _ in range(POINTS)]
        expected = [holds(text, point) for point in points]
        try:
            spec = parse(text, Path("p"))
        except InputError as error:
            # The bounds may leave no input, or not bound one; a formula must then hold nowhere, or not in a box.
            assert "is empty" in str(error) or "bound" in str(error), (seed, error)
            assert "bound" in str(error) or not any(expected), (seed, text)
            empty += 1
            continue
        read += 1
        written = parse(vnnlib_text(spec, ("1.0", "2.0")[seed % 2]), Path("p"))
        for point, is_unsafe in zip(points, expected, strict=True):
            x = [point[name] for name in writer.names[: writer.inputs]]
            y = [point[name] for name in writer.names[writer.inputs :]]
            satisfied += is_unsafe
            for each in (spec, written):
                assert inside(each, x, y) is is_unsafe, (seed, text, point)
        assert [p.digest for p in written.properties] == [p.digest for p in spec.properties]
    # The cases are only worth something if both outcomes occur often.
    assert read > empty and satisfied > read // 4


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
        points = []
        for _ in range(POINTS):
            point = {f"X_{i}": Fraction(rng.choice(numbers)) for i in range(inputs)} | {
                "Y_0": Fraction(rng.randint(0, 2))
            }
            points.append(point)
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
