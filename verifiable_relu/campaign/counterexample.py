"""Counterexamples as texts: exact decimals, in the form of the verification competition (VNN-COMP)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction

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
    version = "1.0" if spec is None else spec.version
    lines = [
        f"{name} {value}"
        for variable, _, values in tensors(result, spec, exact_text)
        for name, value in zip(variable.elements(version), values, strict=True)
    ]
    if version != "1.0":
        yield from lines
        return
    last = len(lines) - 1
    for number, line in enumerate(lines):
        yield f"{' ' if number else '('}({line}){')' if number == last else ''}"


def tensors(
    result: Result, spec: SpecFile | None, text: Callable[[Fraction], str]
) -> Iterator[tuple[Variable, str, list[str]]]:
    """The inputs and outputs of a counterexample by variables, with the kind of their elements and their values.

    Args:
        result: of an instance that is *sat*.
        spec: as for ``assignment``.
        text: writes the value of an input.
    """
    assert result.witness is not None and result.outputs is not None
    witness, outputs = [text(v) for v in result.witness], [repr(float(v)) for v in result.outputs]
    if spec is None or spec.joined is None:
        yield Variable("X", (len(witness),)) if spec is None else spec.inputs, "", witness
        yield Variable("Y", (len(outputs),)) if spec is None else spec.outputs, "", outputs
        return
    for declared in spec.joined.networks:
        inputs, given = [witness[i] for i in declared.places], outputs[declared.start :]
        for each, values in ((declared.inputs, inputs), (declared.given, given)):
            start = 0
            for tensor in each:
                yield tensor.variable, tensor.kind, values[start : start + tensor.variable.size]
                start += tensor.variable.size
