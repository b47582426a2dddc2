"""Counterexamples as texts: exact decimals, in the form of the verification competition (VNN-COMP)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction

from verifiable_relu.campaign.result import Result
from verifiable_relu.spec.property import Query
from verifiable_relu.spec.specfile import SpecFile, Variable, decimal, decimal_near, exact_text
from verifiable_relu.trust.replay import Confirmation, confirm


def in_decimals(
    query: Query, point: Sequence[Fraction], judged: Confirmation
) -> tuple[tuple[Fraction, ...], Confirmation]:
    """A confirmed counterexample whose numbers finite decimals equal, near to a given one.

    Inputs that no decimal equals, such as 1/3, are moved to a decimal beside them, if the box has one and the new point
    is confirmed, too. Otherwise the given point is returned.

    Args:
        query: the query.
        point: a counterexample, in row-major order of the network's input.
        judged: its confirmation.

    Returns:
        The point and its confirmation.
    """
    given = tuple(point)
    if all(decimal(v) is not None for v in given):
        return given, judged
    bounds = map(query.property.box.bounds, range(query.property.box.size))
    moved = tuple(
        v if decimal(v) is not None else decimal_near(v, *between) for v, between in zip(given, bounds, strict=True)
    )
    again = confirm(query, moved)
    return (moved, again) if again.confirmed and again.replayed is not None else (given, judged)


def assignment(result: Result, spec: SpecFile | None = None) -> Iterator[str]:
    """The lines of a counterexample: exact inputs, and the outputs that onnxruntime computes for them.

    A number that no decimal equals is written as a quotient, ``(/ 1.0 3.0)``.

    Args:
        result: of an instance that is *sat*.
        spec: the property file, whose version of VNN-LIB decides the form; None for the form of 1.0 with inputs ``X``
            and outputs ``Y``.
    """
    assert result.witness is not None and result.outputs is not None
    values = [exact_text(v) for v in result.witness] + [repr(float(v)) for v in result.outputs]
    inputs = Variable("X", (len(result.witness),)) if spec is None else spec.inputs
    outputs = Variable("Y", (len(result.outputs),)) if spec is None else spec.outputs
    version = "1.0" if spec is None else spec.version
    names = [*inputs.elements(version), *outputs.elements(version)]
    lines = [f"{name} {value}" for name, value in zip(names, values, strict=True)]
    if version != "1.0":
        yield from lines
        return
    last = len(lines) - 1
    for number, line in enumerate(lines):
        yield f"{' ' if number else '('}({line}){')' if number == last else ''}"
