"""Torch modules as the exporters write them: read, the same function, sound bounds and a verdict."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import verifiable_relu
from tests.support.modules import MODULES, module
from verifiable_relu.bounds.interval import input_box
from verifiable_relu.bounds.relaxation import Relaxation
from verifiable_relu.bounds.tighten import preactivation_bounds
from verifiable_relu.network import Network, read_onnx

WAYS = {"default": {"dynamo": True}, "torchscript": {"dynamo": False}, "opset 11": {"dynamo": False, "opset_version": 11}}
BY_DEFAULT = ("basic block", "max pool, padded", "concatenation", "gelu")
"""The default exporter takes over a second for each module: of these alone it is asked, unless more cases are wanted."""
NEWER = {("bilinear with constants", "opset 11")}
"""What that opset has no operator for."""


def exported(name: str, way: str, path: Path) -> Network:
    made, shape = module(name)
    silence = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence):
        warnings.simplefilter("ignore")
        torch.onnx.export(made, (torch.zeros(1, *shape),), str(path), **WAYS[way])
    return read_onnx(path)


def cases() -> list[tuple[str, str]]:
    by_default = MODULES if os.environ.get("VERIFIABLE_RELU_CASES") else BY_DEFAULT
    old = [(name, way) for name in MODULES for way in ("torchscript", "opset 11") if (name, way) not in NEWER]
    return old + [(name, "default") for name in by_default]
