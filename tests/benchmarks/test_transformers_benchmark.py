"""benchmarks/training/transformers.py: a small network is trained, hardened and bounded once, and tabulated."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.common.records import Records, of, read_records
from benchmarks.training import transformers


def test_a_small_transformer_is_measured_once_and_what_is_proven_holds_for_samples(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="needs scikit-learn")
    command = "--data digits --patch 4 --width 4 --hidden 6 --layers 1 --seeds 1 --train 200 --epochs 1 --images 3"
    asked = transformers.SCRIPT.parser().parse_args([*command.split(), "--finetuning", "1"])
    for _ in range(2):
        with Records(tmp_path) as records:
            transformers.measure(asked, records)
    (found,) = of(read_records(tmp_path), "measured")
    assert len(found["lam"]) == 1 and found["lam"][0] >= 1
    assert len(found["blocks"]) == 3
    for block in found["blocks"]:
        # λ was read in float32.
        assert 0 < block["sampled"] <= block["proven"] * (1 + 1e-6) < float("inf")
    assert found["blocks"][0]["proven"] <= found["blocks"][1]["proven"], "a wider box allows no smaller change"
    for counts in found["certified"].values():
        assert counts["crown"] <= counts["alpha-crown"] <= counts["not refuted"] <= counts["clean"] <= 3
    page = str(transformers.page(read_records(tmp_path)).text)
    assert f"{found['blocks'][1]['proven']:.4f}" in page and f"{found['lam'][0]:.2f}" in page
    assert len(transformers.table([found]).rows) == len(transformers.EPS)


def test_what_is_not_proven_is_said() -> None:
    assert transformers.worst([0.5, 0.25]) == "0.5" and transformers.worst([0.5, None]) == "unknown"
