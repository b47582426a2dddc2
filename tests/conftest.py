"""The fixtures of all tests, and the environment in which they run."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

# torch reads it when it is first imported. The networks of the tests are small, and the processes share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Some tests import onnxruntime by themselves, and are not to report to its maker either (verifiable_relu.runtime).
os.environ["ORT_DISABLE_TELEMETRY"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    """Where no test is left out, none draws fewer cases either (``tests/support/draws.py``)."""
    if not config.option.markexpr:
        os.environ.setdefault("VERIFIABLE_RELU_CASES", "1")


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder with the data sets and competition benchmarks; tests that ask for it are skipped without one."""
    named = os.environ.get("VERIFIABLE_RELU_DATA")
    if not named:
        pytest.skip("needs the data sets: VERIFIABLE_RELU_DATA names no folder")
    if not Path(named).is_dir():
        pytest.skip(f"needs the data sets: VERIFIABLE_RELU_DATA = {named} is no folder")
    return Path(named)


TRIED = {
    "test_bad_onnx",
    "test_limits",
    "test_lists",
    "test_onnx_fuzz",
    "test_onnx_refused",
    "test_parallel",
    "test_forks",
}
"""The modules of ``unit`` and ``soundness`` whose files may crash the ONNX library."""


@pytest.fixture(autouse=True)
def no_trials(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that tests make themselves are read without a trial in a copy of the process: a test process is large."""
    path = request.path
    if path.parent.name in ("unit", "soundness") and path.stem not in TRIED:
        monkeypatch.setattr("verifiable_relu.readers.onnx.model.survives", lambda work: True)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Modules without quick tests are not imported where these alone are wanted."""
    of_unit = collection_path.parent.name == "unit"
    if config.option.markexpr != "quick" or collection_path.suffix != ".py" or of_unit:
        return None
    return "mark.quick" not in collection_path.read_text(encoding="utf-8") or None


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: that the collector of garbage looks at them costs 6 % of the tests' time."""
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what ``-m quick`` takes of ``unit``: of each test the first case, unless the test is marked otherwise.

    Elsewhere, and where another case says more, ``quick`` stands at the test or at the case. Of tests that are marked
    ``combined``, the combinations that are not needed for each value of each parameter are marked ``seldom``.
    """
    done = {_named(item) for item in items if any(map(item.get_closest_marker, ("quick", "thorough", "seldom")))}
    combined: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.path.parent.name == "unit" and _named(item) not in done:
            item.add_marker("quick")
            done.add(_named(item))
        if item.get_closest_marker("combined"):
            combined.setdefault(_named(item), []).append(item)
    for cases in combined.values():
        values = {case: {(name, id(value)) for name, value in case.callspec.params.items()} for case in cases}
        left = set.union(*values.values())
        while left:
            best = max(values, key=lambda case: len(values[case] & left))
            left -= values.pop(best)
        for case in values:
            case.add_marker("seldom")


def _named(item: pytest.Item) -> str:
    """The name of an item without its parameters."""
    return item.nodeid.partition("[")[0]
