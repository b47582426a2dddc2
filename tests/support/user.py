"""What a user's program may look like: mypy checks it strictly, as it does a program outside the package."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import assert_type

import numpy as np
from torch import nn

import verifiable_relu
from verifiable_relu.api import Results
from verifiable_relu.ir.network import Network
from verifiable_relu.nn import LambdaGELU, substitute_relu
from verifiable_relu.readers import from_torch, read_onnx, write_onnx
from verifiable_relu.search.batch import answers
from verifiable_relu.search.budget import TimeBudget
from verifiable_relu.search.outcomes import Outcome, Verdict
from verifiable_relu.search.registry import make
from verifiable_relu.spec import Property, Query, read_vnnlib


def certified(model: nn.Module, images: np.ndarray, labels: list[int]) -> int:
    """How many images are certified."""
    results = verifiable_relu.verify(model, images, labels, eps=Fraction(1, 255), timeout=10)
    assert_type(results, Results)
    return sum(result.verdict is Verdict.UNSAT for result in results)


def asked(network_file: Path, property_file: Path) -> list[Outcome]:
    """The outcomes of a file's properties."""
    network = read_onnx(network_file)
    assert_type(network, Network)
    properties = read_vnnlib(property_file).properties
    assert_type(properties, tuple[Property, ...])
    queries = [Query(network, prop) for prop in properties]
    return answers(make("crown"), queries, TimeBudget(10.0))


def deployed(path: Path) -> None:
    """Write a hardened network."""
    model = substitute_relu(nn.Sequential(nn.Linear(2, 3), LambdaGELU(160.0), nn.Linear(3, 2)))
    write_onnx(from_torch(model, (2,)), path)
