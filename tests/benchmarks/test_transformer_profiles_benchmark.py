"""benchmarks/training/transformer_profiles.py: small Transformers are trained once, and tabulated."""

from __future__ import annotations

from pathlib import Path

from benchmarks.common.records import Records, of, read_records
from benchmarks.training import transformer_profiles


def test_small_transformers_are_trained_once_and_tabulated(tmp_path: Path) -> None:
    command = "--data language --width 4 --hidden 6 --layers 3 --seeds 2 --train 300 --epochs 2"
    asked = transformer_profiles.SCRIPT.parser().parse_args(command.split())
    for _ in range(2):
        with Records(tmp_path) as records:
            transformer_profiles.measure(asked, records)
    found = of(read_records(tmp_path), "profiled")
    assert [record["seed"] for record in found] == [0, 1] and found[0]["lam"] != found[1]["lam"]
    for record in found:
        assert len(record["lam"]) == 3 and all(lam > 1 for lam in record["lam"])
        assert 0 < record["patterns"] <= 1 and 0 < record["weights"] <= 1 and 0 <= record["accuracy"] <= 1
    page = str(transformer_profiles.page(read_records(tmp_path)).text)
    assert f"{(found[0]['lam'][0] + found[1]['lam'][0]) / 2:.2f}" in page and "| language | 3 | 2 |" in page
