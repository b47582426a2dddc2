"""The readings, comparisons and questions of the study ``exported_modules``; it may import torch at its head."""

from __future__ import annotations

import contextlib
import io
import tempfile
import warnings
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import Tensor, nn

from benchmarks.common.records import Record
from benchmarks.verification.module_kinds import Shape, module
from verifiable_relu import verify_properties
from verifiable_relu.bounds import Relaxation, input_box, interval_bounds, preactivation_bounds
from verifiable_relu.errors import InputError
from verifiable_relu.network import Network, from_torch, read_onnx
from verifiable_relu.spec.property import Box, Property, Row
from verifiable_relu.trust.enclose import enclose
from verifiable_relu.trust.exact import evaluable, evaluate_exact

EXPORTS: dict[str, dict[str, Any]] = {"default": {}, "dynamo=False": {"dynamo": False}}
"""The arguments of torch.onnx.export in each way that writes a file."""

SAMPLES = 256
VARYING = 4
"""Inputs that vary in a box, at most: its corners are counted."""
RADIUS = 0.5
TOLERANCE = 1e-4
"""The difference from another program's outputs up to which they agree; both compute in float32."""


def measured(name: str, way: str, timeout: float) -> Record:
    """What becomes of a module that is read in a way.

    Returns:
        ``exporter``: why torch writes no file, in a line, or nothing. ``refused``: why the file or module is not read.
        If it is read: the ``difference`` from what onnxruntime or torch computes and whether it ``agrees``; the numbers
        of sampled ``points`` and of corners (``exact``); how many of these lie outside of bounds (``escaped``);
        CROWN's ``looseness``; and the ``answers`` to the questions (``questions``).
    """
    made, shape = module(name)
    found: Record = {"exporter": "", "refused": ""}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net.onnx"
        if way in EXPORTS:
            # The exporter raises whatever it likes.
            try:
                export(made, shape, path, way)
            except Exception as error:
                return {**found, "exporter": first_line(error)}
        try:
            network = read_onnx(path) if way in EXPORTS else from_torch(made, shape)
        except InputError as error:
            return {**found, "refused": first_line(error).removeprefix(f"{path}: ")}
        difference = compared(network, made, path if way in EXPORTS else None)
    found |= {"difference": difference, "agrees": difference <= TOLERANCE}
    box = a_box(network)
    x = sampled(box)
    y = network(x.reshape(-1, *network.input_shape)).flatten(1).detach().numpy()
    lower, upper = bounded(network, box)
    # The samples' outputs are rounded; the corners' are not.
    rounding = 1e-9 * (1 + np.abs(y))
    escaped = sum(
        int(((y < low - rounding) | (y > high + rounding)).any(1).sum()) for low, high in zip(lower, upper, strict=True)
    )
    corners = list(product(*({low, high} for low, high in zip(box.lower, box.upper, strict=True))))
    escaped += sum(escapes(network, corner, lower, upper) for corner in corners)
    span = y.max(0) - y.min(0)
    there = span > 1e-6
    loose = float(((upper[-1] - lower[-1])[there] / span[there]).mean()) if there.any() else 1.0
    answers = questions(network, box, x, y, lower[-1], timeout)
    return {
        **found,
        "points": len(x),
        "exact": len(corners),
        "escaped": escaped,
        "looseness": loose,
        "answers": answers,
    }


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its name."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:200]


def export(made: nn.Module, shape: Shape, path: Path, way: str) -> None:
    """Write a module's file, without the exporter's words."""
    silence = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence):
        warnings.simplefilter("ignore")
        torch.onnx.export(made, (torch.zeros(1, *shape),), str(path), **EXPORTS[way])


def compared(network: Network, made: nn.Module, path: Path | None) -> float:
    """The largest difference of an output from that of onnxruntime for a file, or of torch for a module without one.

    Differences are divided by the largest output where that is above 1. The points are eight random ones.
    """
    x = torch.randn(8, *network.input_shape, generator=torch.Generator().manual_seed(1))
    if path is None:
        with torch.no_grad():
            expected = made(x).reshape(len(x), -1).numpy()
    else:
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        (declared,) = session.get_inputs()
        rows = [session.run(None, {declared.name: row[None].numpy()})[0].reshape(-1) for row in x]
        expected = np.stack(rows)
    found = network(x).flatten(1).detach().numpy()
    return float(np.abs(found - expected).max() / max(1.0, float(np.abs(expected).max())))


def a_box(network: Network) -> Box:
    """A box around a random point in which few inputs vary; all ends are float32 numbers."""
    rng = np.random.default_rng(0)
    center = rng.normal(size=network.input_size)
    radius = np.where(rng.permutation(network.input_size) < VARYING, RADIUS, 0.0)
    lower, upper = (np.float32(center + sign * radius).astype(float) for sign in (-1, 1))
    return Box(lower, upper)


def sampled(box: Box) -> Tensor:
    """Points of a box, half of them on corners."""
    lower, upper = (np.array([float(end) for end in ends]) for ends in (box.lower, box.upper))
    unit = np.random.default_rng(1).random((SAMPLES, len(lower)))
    unit[: SAMPLES // 2] = unit[: SAMPLES // 2].round()
    return torch.from_numpy(np.clip(lower + unit * (upper - lower), lower, upper))


def bounded(network: Network, box: Box) -> tuple[np.ndarray, np.ndarray]:
    """The lower and the upper bounds of the outputs, (2, outputs) each: by IBP and by CROWN, in float64."""
    wide, start = network.to(torch.float64), input_box([Property(box, ())], network)
    intervals = interval_bounds(wide, start)[-1]
    unit = torch.eye(network.output_size, dtype=torch.float64)
    rows = torch.cat([unit, -unit])
    low, high = Relaxation(wide, start, preactivation_bounds(wide, start)).outputs(rows).chunk(2)
    lower = torch.stack([intervals.lower.flatten(), low])
    upper = torch.stack([intervals.upper.flatten(), -high])
    return lower.detach().numpy(), upper.detach().numpy()


def escapes(network: Network, corner: tuple[float, ...], lower: np.ndarray, upper: np.ndarray) -> int:
    """By how many methods' bounds the exact outputs at a corner are denied."""
    x = [Fraction(value) for value in corner]
    if evaluable(network):
        exact = evaluate_exact(network, x)
        ends = [(value, value) for value in exact]
    else:
        found = enclose(network, x)
        pairs = zip(found.value.tolist(), found.error.tolist(), strict=True)
        ends = [(Fraction(value) - Fraction(error), Fraction(value) + Fraction(error)) for value, error in pairs]
    return sum(
        any(end < low or start > high for (start, end), low, high in zip(ends, lows, highs, strict=True))
        for lows, highs in zip(lower.tolist(), upper.tolist(), strict=True)
    )


def questions(
    network: Network, box: Box, x: Tensor, y: np.ndarray, lower: np.ndarray, timeout: float
) -> tuple[str, str]:
    """The answers to two questions about the output that varies most, of which the first is sat, the second unsat.

    Whether the output can be as small as at the best sample, but for 2⁻²⁰ of its size, and whether it can be smaller
    than its lower bound by CROWN minus a thousandth of the width that the samples span.

    Args:
        network: the network.
        box: the box of inputs.
        x: points of the box.
        y: (points, outputs), the network's outputs at these.
        lower: (outputs,), proven lower bounds.
        timeout: the limit of each question, in seconds.
    """
    spans = y.max(0) - y.min(0)
    output = int(spans.argmax())
    least = Fraction(float(y[:, output].min()))
    reached = least + Fraction(max(1.0, abs(float(least)))) / (1 << 20)
    missed = Fraction(float(lower[output])) - Fraction(max(1e-3, float(spans[output]) / 1000))
    found = []
    for threshold in (reached, missed):
        prop = Property(box, ((Row(((output, Fraction(1)),), threshold),),))
        (result,) = verify_properties(network, prop, timeout=timeout)
        found.append(result.answer)
    return found[0], found[1]
