"""The checker of certificates by itself: false certificates, odd shapes, sums at every magnitude, seeded faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from tests.soundness import check_magnitudes, check_shapes
from tests.support.draws import draws
from tests.support.hooks import Hook
from verifiable_relu.check import BadInput, Refused, check
from verifiable_relu.check import operators as reading
from verifiable_relu.check.arithmetic import OWN, TINY
from verifiable_relu.check.graph import AffineNode
from verifiable_relu.check.lines import CheckedRelaxation
from verifiable_relu.check.model import _ModelReader
from verifiable_relu.check.tensors import GraphBuilder, Multiple, Tensor

FALSE = [
    "bn_underflow", "curve_underflow32", "curve_underflow64", "curve_underflow_large", "div_underflow", "gate_rank",
    "gelu_denormal", "gelu_outer_underflow",
]  # fmt: skip
"""Certificates of what is false, found in an attack from outside: all of them were accepted once."""


def said(data: Path, name: str) -> str:
    folder = data / "faults" / "magnitudes"
    files = (folder / f"{name}.{suffix}" for suffix in ("cert.jsonl", "net.onnx", "prop.vnnlib"))
    return check(*files)


@pytest.mark.parametrize("name", FALSE)
def test_what_is_false_is_refused(name: str, data: Path) -> None:
    with pytest.raises((Refused, BadInput)):
        said(data, name)


def _rounded_multiples(builder: GraphBuilder, tensor: Tensor) -> list[Multiple]:
    """Products of scalars in float64."""
    found = [Multiple(tensor)]
    while (step := builder.multiples.get(found[-1].x.node)) is not None:
        factor = Fraction(float(found[-1].factor) * float(step.factor))
        found.append(Multiple(Tensor(step.x.node, step.x.index.ravel()[found[-1].x.index]), factor))
    return found


def _float_errors(right: Any) -> Callable[..., Any]:
    """The relative errors of weights, times these and times the largest values, in float64."""

    def lost(relaxation: CheckedRelaxation, number: int, node: Any, part: Any, given: Any, ring: Any) -> Any:
        if ring.exact and isinstance(node, AffineNode) and node.relative:
            ends = ((relaxation.ends(source), absolute) for source, absolute in node.absolute)
            size = np.abs(node.bias) + sum(absolute @ np.maximum(*map(np.abs, pair)) for pair, absolute in ends)
            return np.asarray(np.abs(part.values) @ ring.of((OWN * node.relative * size)[part.entries]))
        return right(relaxation, number, node, part, given, ring)

    return lost


def _narrow_gate(right: Any) -> Callable[..., Any]:
    """A gate keeps its shape, whatever the scalar's."""

    def with_gate(call: Any) -> Any:
        found = right(call)
        gate = next((value for value in call.inputs if isinstance(value, reading.Gate)), None)
        return found if found is None or gate is None else (replace(found[0], x=gate.x), found[1])

    return with_gate


@contextmanager
def hooked(*hooks: Hook) -> Iterator[None]:
    with ExitStack() as stack:
        for hook in hooks:
            stack.enter_context(hook.applied())
        yield


UNDERFLOW = Hook("check.arithmetic:derived", lambda right, found, of: found)
SIGNS = Hook("check.arithmetic:positive", lambda right, values: np.asarray(values.astype(np.float64) > 0))
MULTIPLES = Hook(
    "check.tensors:GraphBuilder.traced", lambda right, builder, tensor: _rounded_multiples(builder, tensor)
)


def _narrow() -> Any:
    return patch.object(reading, "_with_gate", _narrow_gate(reading._with_gate))


def _unshaped() -> Any:
    return patch.object(_ModelReader, "compare_shapes", lambda reader: None)


@contextmanager
def both() -> Iterator[None]:
    with _narrow(), _unshaped():
        yield


SEEDED: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "underflow of γ/√σ² taken for exact": (lambda: hooked(UNDERFLOW), ["bn_underflow"]),
    "signs of rounded multipliers": (lambda: hooked(SIGNS), [name for name in FALSE if name.startswith("curve")]),
    "products of scalars in float64": (lambda: hooked(MULTIPLES, UNDERFLOW), ["gelu_outer_underflow"]),
    "relative errors in float64": (
        lambda: patch.object(CheckedRelaxation, "_lost", _float_errors(CheckedRelaxation._lost)),
        ["div_underflow"],
    ),
    "a gate of its own shape, and shapes that nobody compares": (both, ["gate_rank"]),
}
"""Old faults of the checker, and the false certificates that it accepts with them."""


@pytest.mark.parametrize(("fault", "name"), [(fault, name) for fault, (_, every) in SEEDED.items() for name in every])
def test_a_seeded_fault_shows_in_a_false_certificate(fault: str, name: str, data: Path) -> None:
    with SEEDED[fault][0]():
        assert said(data, name).startswith("unsat")


def test_graphs_of_odd_shapes_are_read_as_the_reference_evaluator_evaluates_them() -> None:
    ended, wrong = check_shapes.judge(draws(300), 5_000_000)
    assert not wrong, wrong
    assert ended["read"] > draws(300) // 2, ended
    assert min(ended[f"read {kind}"] for kind in check_shapes.STEPS) >= draws(300) // 60, ended
    assert ended["invalid"] > draws(300) // 50, ended


def _flattened(call: Any) -> Tensor:
    """Flatten, as if its axis were always 1."""
    x = call.tensor()
    return Tensor(x.node, x.index.reshape(x.shape[0] if x.shape else 1, -1))


def test_a_wrong_shape_shows_in_graphs_of_odd_shapes_and_is_refused() -> None:
    """Of a reader that is wrong about shapes: what it reads wrong, ONNX's own inference refuses."""
    steps = ("flatten", "flatten", "transpose", "unsqueeze", "arithmetic")
    fault = patch.dict(reading.OPERATORS, {"Flatten": _flattened})
    with _unshaped():
        assert not check_shapes.judge(60, 7_000_000, steps)[1]
        with fault:
            wrong = check_shapes.judge(200, 7_000_000, steps)[1]
    assert wrong
    with fault:
        for line in wrong:
            assert not check_shapes.judged(int(line.split()[0]), steps).wrong


def test_sums_are_off_by_no_more_than_is_said_at_every_magnitude() -> None:
    compared = 0
    for seed in range(draws(150)):
        count, wrong = check_magnitudes.wrong(seed)
        assert not wrong
        compared += count
    assert compared > draws(150)


def test_underflow_that_is_multiplied_afterwards_shows_in_sums() -> None:
    right = CheckedRelaxation._unit
    with patch.object(
        CheckedRelaxation, "_unit", lambda r, i, node: (right(r, i, node)[0] - TINY, right(r, i, node)[1])
    ):
        assert any(check_magnitudes.wrong(seed)[1] for seed in range(60))
