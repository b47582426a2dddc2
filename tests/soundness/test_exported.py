"""Torch modules as the exporters write them: read, the same function, and verdicts that are right."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import warnings
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.draws import draws
from tests.support.module_kinds import MODULES, module
from verifiable_relu.bounds.backward import Relaxation
from verifiable_relu.ir.network import Network
from verifiable_relu.readers import read_onnx
from verifiable_relu.search.outcomes import Verdict
from verifiable_relu.search.property_rows import input_box
from verifiable_relu.spec.property import Box, Property, Query, Row

from .judge import Case, Report, ask

MANY = draws(4) > 1
WAYS = {
    "default": {"dynamo": True},
    "torchscript": {"dynamo": False},
    "opset 11": {"dynamo": False, "opset_version": 11},
}
BY_DEFAULT = ("basic block", "max pool, padded")
"""The default exporter takes a second for each module: it is asked of these alone unless more cases are wanted."""
VERDICTS = (
    "relu6", "maxout", "absolute value", "concatenation", "max pool, padded", "average pool, padding left out",
    "transposed convolution", "upsampling, bilinear", "conv3d", "smallest", "silu", "selu", "sine and cosine",
    "quotient", "softmax", "layer norm", "attention, two heads",
)  # fmt: skip
"""Modules with an operator each that no other of these has: about them alone methods are asked, likewise."""
_LAYERS = ("transformer layer", "transformer layer, normalised last")
_UNFLATTENED = ("attention head", "attention, two heads", "attention, causal", "multihead attention")
NEWER = {(name, "torchscript") for name in _LAYERS} | {
    (name, "opset 11") for name in (*_LAYERS, *_UNFLATTENED, "bilinear with constants", "celu", "scores by einsum")
}
"""What the exporter itself refuses in that way."""


def exported(name: str, way: str, path: Path) -> Network:
    """The network of a module's file; its outputs are the module's own."""
    made, shape = module(name)
    silence = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence):
        warnings.simplefilter("ignore")
        torch.onnx.export(made, (torch.zeros(1, *shape),), str(path), **WAYS[way])
    network = read_onnx(path)
    assert network.source.input_shape == shape
    x = torch.randn(4, *shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = made(x).reshape(len(x), -1)
    torch.testing.assert_close(network(x.flatten(1)), expected, rtol=1e-4, atol=1e-5)
    return network


@pytest.mark.parametrize("way", ["torchscript", pytest.param("opset 11", marks=pytest.mark.seldom)])
def test_exported_modules_are_read_as_they_are(way: str, tmp_path: Path) -> None:
    names = [name for name in MODULES if (name, way) not in NEWER]
    for name in names:
        exported(name, way, tmp_path / "net.onnx")
    assert len(names) >= 60


@pytest.mark.skipif(importlib.util.find_spec("onnxscript") is None, reason="needs the package onnxscript")
def test_modules_exported_by_default_are_read_as_they_are(tmp_path: Path) -> None:
    for name in MODULES if MANY else BY_DEFAULT:
        exported(name, "default", tmp_path / "net.onnx")


def questions(name: str, network: Network) -> list[Case]:
    """Whether one output can be as small as at the best of many points of a box, and less than it can be."""
    rng = np.random.default_rng(0)
    center = rng.normal(size=network.input_size)
    radius = np.where(rng.permutation(network.input_size) < 4, 0.5, 0.0)
    lower, upper = (np.float32(center + sign * radius).astype(float) for sign in (-1, 1))
    unit = rng.random((256, len(lower)))
    unit[:128] = unit[:128].round()
    x = np.clip(lower + unit * (upper - lower), lower, upper)
    y = network(torch.from_numpy(x)).numpy()
    output = int(rng.integers(network.output_size))
    best = int(y[:, output].argmin())
    box, point = Box(lower, upper), tuple(Fraction(float(v)) for v in x[best])
    whole = input_box([Property(box, ())], torch.float64, "cpu")
    least = float(Relaxation(network, whole, dtype=torch.float64).advance().bounds[-1].interval.lower[0, output])
    made = []
    for threshold in (Fraction(float(y[best, output])) + Fraction(1, 1 << 20), Fraction(least) - 1):
        prop = Property(box, ((Row(((output, Fraction(1)),), threshold),),))
        made.append(Case(name, Query(network, prop), point))
    return made


def test_verdicts_on_exported_modules_are_right(tmp_path: Path) -> None:
    report, smooth = Report(), 0
    cases: list[Case] = []
    names = MODULES if MANY else VERDICTS
    for name in names:
        network = exported(name, "torchscript", tmp_path / "net.onnx")
        smooth += not network.piecewise_linear
        cases += questions(name, network)
    ask(cases, {"ibp": 60.0, "crown": 60.0, "attack": 0.2}, report)
    pieces = [case for case in cases if case.query.network.piecewise_linear]
    ask(pieces, {"bab": 60.0, "milp": 60.0, "smt": 60.0}, report)
    assert report.problems == []
    assert report.decided["ibp", Verdict.UNSAT] == report.decided["crown", Verdict.UNSAT] == len(names)
    for method in ("bab", "milp", "smt"):
        assert report.decided[method, Verdict.UNSAT] == report.decided[method, Verdict.SAT] == len(names) - smooth
