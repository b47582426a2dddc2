"""What tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder with the data sets and competition benchmarks; tests that ask for it are skipped without one."""
    named = os.environ.get("VERIFIABLE_RELU_DATA")
    if not named:
        pytest.skip("needs the data sets: VERIFIABLE_RELU_DATA names no folder")
    if not Path(named).is_dir():
        pytest.skip(f"needs the data sets: VERIFIABLE_RELU_DATA = {named} is no folder")
    return Path(named)
