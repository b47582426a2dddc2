"""The README names every method and every data set that the package has."""

from __future__ import annotations

from pathlib import Path

import pytest

from verifiable_relu.data.registry import DATASETS
from verifiable_relu.verifiers.registry import methods

TEXT = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [*methods(), *DATASETS])
def test_every_method_and_data_set_is_named(name: str) -> None:
    assert f"`{name}`" in TEXT
