"""Rounding has one room: ``rounding`` is that of the verifier, ``check.arithmetic`` that of the checker."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

import verifiable_relu
from verifiable_relu import rounding

PACKAGE = Path(verifiable_relu.__file__).parent
ROOMS = {
    "rounding.py": ("spec", "bounds", "execution", "trust", "dyadic.py"),
}
"""Each room, and the folders for which it is one."""

NAMES = {"finfo", "float_info", "nextafter", "ulp", "spacing"}
"""What tells a machine epsilon, a smallest number or a neighbour."""

HEURISTIC = "Heuristic:"
"""How the docstring of a constant begins that decides how something is found, and never what is claimed.

Besides, defaults of a dataclass's fields are for the user, or for ``Tuning``, and are no errors of rounding.
"""


def number(node: ast.expr) -> float | None:
    """The value of an expression of numbers and ``**``, ``/``, unary minus or ``Fraction`` alone."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return float(value) if abs(value) < 1e300 else None
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            found = number(operand)
            return None if found is None else -found
        case ast.BinOp(op=ast.Pow(), left=left, right=right):
            base, power = number(left), number(right)
            return None if base is None or power is None or abs(power) > 1100 else base**power if power < 1000 else None
        case (
            ast.BinOp(op=ast.Div(), left=left, right=right) | ast.Call(func=ast.Name(id="Fraction"), args=[left, right])
        ):
            over, under = number(left), number(right)
            return None if over is None or not under else over / under
    return None


def is_small(value: float) -> bool:
    """Whether a number is a tolerance, or a factor next to 1, as opposed to a measured or mathematical constant."""
    few_digits = len(repr(value).strip("-0.").split("e")[0].replace(".", "")) <= 5 or math.frexp(value)[0] == 0.5
    return (0 < abs(value) < 1e-5 or 0 < abs(value - 1) < 0.02) and few_digits


def heuristics(tree: ast.Module) -> Iterator[ast.AST]:
    """The values that decide how, never what: constants whose docstring says so, and defaults of dataclasses."""
    for before, after in zip(tree.body, tree.body[1:], strict=False):
        match before, after:
            case ast.Assign(value=value), ast.Expr(value=ast.Constant(value=str() as said)) if said.startswith(
                HEURISTIC
            ):
                yield value
    for each in ast.walk(tree):
        if isinstance(each, ast.ClassDef) and any("dataclass" in ast.unparse(d) for d in each.decorator_list):
            yield from (field.value for field in each.body if isinstance(field, ast.AnnAssign) and field.value)


def strangers(source: str) -> list[str]:
    """What a module has that belongs into a room of rounding, by its lines."""
    tree = ast.parse(source)
    passed = {id(inner) for each in heuristics(tree) for inner in ast.walk(each)}
    found = {}
    for node in ast.walk(tree):
        if id(node) in passed:
            continue
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        value = number(node) if isinstance(node, ast.expr) else None
        if name in NAMES or (value is not None and is_small(value)):
            found.setdefault(node.lineno, ast.unparse(node))
    return [f"{line}: {what}" for line, what in sorted(found.items())]


def sources(room: str) -> list[Path]:
    folders = [PACKAGE / each for each in ROOMS[room]]
    files = [file for each in folders for file in (each.rglob("*.py") if each.is_dir() else [each])]
    return [file for file in files if file != PACKAGE / room]


@pytest.mark.thorough
@pytest.mark.parametrize("room", ROOMS)
def test_nothing_of_rounding_stands_outside_its_room(room: str) -> None:
    found = {str(file.relative_to(PACKAGE)): strangers(file.read_text("utf-8")) for file in sources(room)}
    assert not {name: lines for name, lines in found.items() if lines}


@pytest.mark.parametrize("room", ROOMS)
def test_each_entry_of_a_room_has_its_derivation(room: str) -> None:
    tree = ast.parse((PACKAGE / room).read_text("utf-8"))
    assert all(
        ast.get_docstring(each) for each in tree.body if isinstance(each, ast.FunctionDef) and each.name[0] != "_"
    )
    for before, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(before, ast.Assign) and any(
            isinstance(n, ast.expr) and number(n) for n in ast.walk(before.value)
        ):
            assert isinstance(after, ast.Expr), ast.unparse(before)


@pytest.mark.parametrize(
    "line",
    ["x * 1.01", "eps = torch.finfo(x.dtype).eps", "np.nextafter(x, y)", "2.0**-60 * x", "1e-12 * x",
     "Fraction(1, 2**53)", "1 - 2.0**-34", "math.ulp(0.0)", "x.clamp(min=1e-30)"],
)  # fmt: skip
def test_what_belongs_into_the_room_is_seen(line: str) -> None:
    assert strangers(f"def f(x):\n    {line}")
    assert not strangers("X = 1e-8\n'''Heuristic: so that Adam's first steps are short.'''\n\ny = 0.5 * 1e-3 + 2**53")


# Entries, against rational numbers


def numbers(count: int) -> torch.Tensor:
    """Numbers of both signs and many sizes, powers of two among them."""
    random = np.random.default_rng(0)
    mantissas = np.where(random.random(count) < 0.2, 1.0, random.uniform(1, 2, count))
    return torch.from_numpy(random.choice([-1, 1], count) * np.ldexp(mantissas, random.integers(-60, 60, count)))


def test_a_quotient_is_bounded_from_below() -> None:
    above, under = numbers(3000), numbers(3001)[1:].abs()
    for a, b, found in zip(above.tolist(), under.tolist(), rounding.quotient_below(above, under).tolist(), strict=True):
        assert Fraction(found) <= Fraction(a) / Fraction(b)


def test_exact_numbers_are_rounded_to_the_nearest_float_on_one_side() -> None:
    for a, b in zip(numbers(1000).tolist(), numbers(1001)[1:].tolist(), strict=True):
        number = Fraction(a) / Fraction(b)
        low, high = rounding.not_above(number), rounding.not_below(number)
        assert Fraction(low) <= number <= Fraction(high) and high in (low, rounding.above(low))


def test_few_roundings_are_covered() -> None:
    u = rounding.UNIT
    assert (1 - u) ** 7 * Fraction(rounding.FEW) >= 1 > (1 - u) ** 8 * Fraction(rounding.FEW)


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_neighbours_are_those_of_the_dtype(kind: type) -> None:
    x = numbers(100).numpy().astype(kind)
    for one in (x, torch.from_numpy(x), x[0]):
        low, high = rounding.below(one), rounding.above(one)
        assert np.array_equal(np.asarray(low), np.nextafter(np.asarray(one), kind(-np.inf)))
        assert np.array_equal(np.asarray(high), np.nextafter(np.asarray(one), kind(np.inf)))
        assert np.asarray(rounding.varies(low, high)).all() and not np.asarray(rounding.varies(low, one)).any()


def test_the_mean_of_rows_is_rounded_up() -> None:
    values, scales = numbers(3000).reshape(-1, 5), numbers(3001)[1:].reshape(-1, 5).abs()
    bound, scale = rounding.mean_of_rows(values, scales)
    for row, found in zip([*values, *scales], torch.cat([bound, scale]).tolist(), strict=True):
        assert sum(map(Fraction, row.tolist())) <= Fraction(found)
