"""benchmarks/verification/hub_models.py: a module of torch goes the whole way once, and pages say what was lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.records import Records, of, read_records
from benchmarks.verification import hub_models
from benchmarks.verification.hub_kinds import CHANNELS, CLASSES, KINDS, SIZE, Kind
from verifiable_relu.errors import InputError


def small(nn: Any) -> Any:
    return nn.Sequential(
        nn.AvgPool2d(SIZE // 2), nn.Flatten(), nn.Linear(CHANNELS * 4, 8), nn.GELU(), nn.Linear(8, CLASSES)
    )


def test_a_model_is_measured_once_and_what_is_proven_of_the_change_holds_for_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KINDS, "small", Kind("torch", "torch.nn", small))
    monkeypatch.setitem(KINDS, "broken", Kind("torch", "torch.nn", lambda nn: nn.Linear(2, 2)))
    asked = hub_models.SCRIPT.parser().parse_args(["--model", "small", "broken", "--timeout", "20"])
    for _ in range(2):
        with Records(tmp_path) as records:
            hub_models.measure(asked, records)
    found, broken = of(read_records(tmp_path), "asked")
    assert not found["failed"] and found["gates"] == 1 and found["hard"] > 0.9 and found["difference"] < 1e-4
    assert 0 < found["change"] <= found["proven"]
    near = [found["around"][eps] for eps in hub_models.EPS]
    assert near == sorted(near) and near[-1] <= found["proven"] * (1 + 1e-6)
    for method in hub_models.METHODS:
        assert [found["answers"][method][eps]["answer"] for eps in hub_models.EPS] == ["unsat"] * 3
    assert broken["failed"].startswith("training: RuntimeError: ")
    page = str(hub_models.page(read_records(tmp_path)).text)
    assert f"broken, seed 0: {broken['failed']}" in page and "what `auto` does not: nowhere" in page
    found["answers"]["auto"]["1e-3"]["answer"] = "timed-out"
    assert hub_models.worse([found, broken]) == ["small at 1e-3"]


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    asked = hub_models.SCRIPT.parser().parse_args(["--model", "nothing"])
    with Records(tmp_path) as records, pytest.raises(InputError, match="no model is called 'nothing'"):
        hub_models.measure(asked, records)
