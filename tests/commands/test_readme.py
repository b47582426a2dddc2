"""The README names every method, every data set and every ONNX operator that the package has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import verifiable_relu.network.onnx.read  # noqa: F401, because it registers the operators
from verifiable_relu.data.registry import DATASETS
from verifiable_relu.network.onnx.call import CONVERTERS
from verifiable_relu.verifiers.registry import methods

TEXT = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [*methods(), *DATASETS])
def test_every_method_and_data_set_is_named(name: str) -> None:
    assert f"`{name}`" in TEXT


def test_the_operators_named_are_those_that_are_read() -> None:
    (listed,) = re.findall(r"whose meaning is known: (.*?)\. Anything else", TEXT, re.DOTALL)
    named = set(re.findall(r"\b[A-Z][A-Za-z]+\b", listed)) - {"GELU"}
    # Constants are values, not nodes, and have no converter.
    assert named == {operator for operator, _ in CONVERTERS} | {"Constant"}
