"""Counterexamples as texts: exact decimals, in the form of the verification competition (VNN-COMP)."""

from __future__ import annotations

from collections.abc import Iterator

from verifiable_relu.campaign.result import Result
from verifiable_relu.spec.specfile import SpecFile, Variable, exact_text


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
