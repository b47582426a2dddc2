"""benchmarks/training/certified_training.py: its tables say what the records hold."""

import pytest

from benchmarks.training import certified_training as benchmark
from verifiable_relu.train.options import Options

RESULTS = {"seconds_per_step": 0.002}


def kept(run: str, part: str, ibp: int, unstable: float) -> dict[str, object]:
    few = {"clean": 19, "attacked": 18, "crown": 10, "alpha-crown": 12, "unstable": unstable}
    about = {"part": part, "run": run, "network": "x", "eps": "0.02", "images": [100, 20]}
    return {"kind": "measured", **about, "clean": 90, "ibp": ibp, "few": few}


def test_rows_are_means_over_seeds() -> None:
    records = []
    for seed, (ibp, unstable) in enumerate([(10, 4.0), (20, 6.0)]):
        options = {**vars(Options("mnist", hidden=(6, 4), eps=0.02, stability=0.1, seed=seed))}
        records.append({"kind": "run", "run": f"run{seed}", "options": options, "results": RESULTS})
        records.append(kept(f"run{seed}", "stability", ibp, unstable))
    table = benchmark.table(records, "stability")
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert len(table.rows) == 1 and row["seeds"] == 2 and row["net"] == "MLP 6,4" and row["stability, summed"] == "0.01"
    shares = ("clean", "certified, IBP", "CROWN", "α-CROWN", "attacked", "unstable")
    assert [row[name].mean for name in shares] == pytest.approx([0.9, 0.15, 0.5, 0.6, 0.9, 5.0])
    assert not benchmark.table(records, "certified").rows
