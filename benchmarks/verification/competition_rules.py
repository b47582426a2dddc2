"""The verification competition's rules for counterexamples, for files in VNN-LIB 1.0.

A counterexample has a value for every input and output. onnxruntime computes the outputs of the inputs, each rounded to
float32; in the largest difference they must equal the given ones, up to a thousandth of the largest computed output.
Then inputs and computed outputs must satisfy the property's assertions: exactly, or else with every comparison relaxed
by 10⁻⁴. The rules are those of the competition's scoring in 2023 to 2026. Nothing of the package is used: an error of
its parser or its replay would show here.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator, Mapping
from enum import Enum
from fractions import Fraction
from pathlib import Path

import numpy as np
import onnxruntime

MATCHING = 1e-3
"""The largest difference of given from computed outputs, by the largest computed output."""

RELAXED = Fraction(1, 10_000)
"""By how much comparisons are relaxed."""

Term = str | list["Term"]
"""An s-expression."""


class Judgement(Enum):
    """What the competition calls a counterexample; the first two count as counterexamples."""

    CORRECT = "correct"
    TOLERATED = "correct up to tolerance"
    MISSING = "no counterexample"
    OTHER_OUTPUTS = "onnxruntime computes other outputs"
    NOT_VIOLATED = "the property is not violated"


def judged(onnx: Path, vnnlib: Path, said: str) -> Judgement:
    """The judgement of a result file's text, whose first line is sat.

    Args:
        onnx: the network, gzipped if there is only ``onnx``.gz.
        vnnlib: the property, likewise.
        said: the text; after its first line comes an s-expression of pairs of a variable and its value.
    """
    pairs = next(terms(said.partition("\n")[2]), [])
    try:
        values = {str(pair[0]): evaluated(pair[1], {}) for pair in pairs if len(pair) == 2}
    except (ValueError, ZeroDivisionError):
        return Judgement.MISSING
    x, y = (vector(values, letter) for letter in "XY")
    if not x or not y:
        return Judgement.MISSING
    session = onnxruntime.InferenceSession(content(onnx), providers=["CPUExecutionProvider"])
    (declared,) = session.get_inputs()
    shape = [size if isinstance(size, int) and size > 0 else 1 for size in declared.shape]
    if np.prod(shape) != len(x):
        return Judgement.MISSING
    point = np.array([float(value) for value in x], np.float32).reshape(shape)
    computed = session.run(None, {declared.name: point})[0].ravel().astype(np.float64)
    given = np.array([float(value) for value in y])
    largest = float(np.abs(computed).max())
    if given.shape != computed.shape or float(np.abs(given - computed).max()) > MATCHING * (largest or 1.0):
        return Judgement.OTHER_OUTPUTS
    point_of = {name: value for name, value in values.items() if name.startswith("X_")}
    point_of |= {f"Y_{i}": Fraction(value) for i, value in enumerate(computed.tolist())}
    asserted = [term[1] for term in terms(content(vnnlib).decode()) if term[0] == "assert"]
    for slack, judgement in ((Fraction(0), Judgement.CORRECT), (RELAXED, Judgement.TOLERATED)):
        if all(holds(term, point_of, slack) for term in asserted):
            return judgement
    return Judgement.NOT_VIOLATED


def content(path: Path) -> bytes:
    """The bytes of a file, unpacked."""
    packed = path.with_name(f"{path.name}.gz")
    return gzip.decompress(packed.read_bytes()) if packed.is_file() else path.read_bytes()


def terms(text: str) -> Iterator[list[Term]]:
    """The s-expressions of a text, one after another."""
    stack: list[list[Term]] = [[]]
    for word in re.findall(r"[()]|[^\s()]+", re.sub(r";.*", "", text)):
        if word == "(":
            stack.append([])
        elif word == ")":
            done = stack.pop()
            if len(stack) == 1:
                yield done
            else:
                stack[-1].append(done)
        else:
            stack[-1].append(word)


def vector(values: Mapping[str, Fraction], letter: str) -> list[Fraction]:
    """The values of X_0, X_1, …, or of Y_0, Y_1, …; nothing if one is missing."""
    count = sum(name.startswith(f"{letter}_") for name in values)
    names = [f"{letter}_{i}" for i in range(count)]
    return [values[name] for name in names] if all(name in values for name in names) else []


def evaluated(term: Term, values: Mapping[str, Fraction]) -> Fraction:
    """The value of an arithmetic term.

    Raises:
        ValueError: for a word that is neither a number nor among ``values``, or an operator that is none.
    """
    if isinstance(term, str):
        return values[term] if term in values else Fraction(term)
    operator, *parts = term
    numbers = [evaluated(part, values) for part in parts]
    match operator, len(numbers):
        case "+", _:
            return sum(numbers, Fraction(0))
        case "-", 1:
            return -numbers[0]
        case "-", 2:
            return numbers[0] - numbers[1]
        case "*", 2:
            return numbers[0] * numbers[1]
        case "/", 2:
            return numbers[0] / numbers[1]
    raise ValueError(f"no arithmetic: {operator}")


def holds(term: Term, values: Mapping[str, Fraction], slack: Fraction) -> bool:
    """Whether an assertion holds, every comparison relaxed by ``slack``.

    Raises:
        ValueError: for an operator that is none.
    """
    operator, parts = term[0], term[1:]
    match operator:
        case "and":
            return all(holds(part, values, slack) for part in parts)
        case "or":
            return any(holds(part, values, slack) for part in parts)
    left, right = (evaluated(part, values) for part in parts)
    match operator:
        case "<=":
            return left <= right + slack
        case ">=":
            return left >= right - slack
        case "<":
            return left < right or (slack > 0 and left < right + slack)
        case ">":
            return left > right or (slack > 0 and left > right - slack)
    raise ValueError(f"no comparison: {operator}")
