"""Options of branch and bound that are switched off one by one: which they are, and what the tables count."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.common.records import Record, Records, of
from benchmarks.verification import bab_ingredients

ROOT = Path(__file__).resolve().parents[2]


def test_an_instance_is_asked_once_by_every_variant_and_its_sub_problems_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "vnncomp" / "shipped"
    folder.mkdir(parents=True)
    for name in ("mnist_mlp.onnx", "mnist_mlp_mnist_92_eps3_100.vnnlib.gz"):
        (folder / name).symlink_to(ROOT / "specs" / name)
    line = "mnist_mlp.onnx,mnist_mlp_mnist_92_eps3_100.vnnlib"
    (folder / "instances.csv").write_text(f"{line},60\n")
    (folder / "truth.csv").write_text(f"onnx,vnnlib,ce_check,consensus_verdict,note\n{line},,unsat,\n")
    monkeypatch.setenv("VERIFIABLE_RELU_DATA", str(tmp_path))
    asked = bab_ingredients.SCRIPT.parser().parse_args(
        ["--families", "shipped", "--limit", "600", "--vary", "search.batch=16"]
    )
    with Records(tmp_path / "out") as records:
        for _ in range(2):
            bab_ingredients.measure(asked, records)
        answers = of(records.all, "answer")
    assert [record["variant"] for record in answers] == ["as it is", "search.batch = 16"]
    for record in answers:
        assert (record["verdict"], record["truth"]) == ("unsat", "unsat")
        assert record["sub_problems"] > 1 and record["unstable"] > 10 and record["search"] > 0
    assert [row[1:3] for row in bab_ingredients.speeds(answers).rows] == [("as it is", 1), ("search.batch = 16", 1)]


def answer(variant: str, number: int, verdict: str, cpu: float, nodes: int | None, search: float = 1.0) -> Record:
    names = {"family": "f", "variant": variant, "onnx": "n", "vnnlib": str(number), "truth": "unsat", "reason": "?"}
    return {**names, "verdict": verdict, "cpu": cpu, "sub_problems": nodes, "search": search}


def test_a_variant_is_compared_over_what_it_and_the_unchanged_method_solve() -> None:
    answers = [
        *(answer("as it is", 1, "unsat", 2.0, 10), answer("x = 0", 1, "unsat", 4.0, 30)),
        *(answer("as it is", 2, "unsat", 1.0, 10), answer("x = 0", 2, "unknown", 9.0, 90)),
        *(answer("as it is", 3, "sat", 1.0, 5), answer("x = 0", 3, "sat", 1.0, 5)),
        *(answer("as it is", 4, "unsat", 0.1, None, 0.0), answer("x = 0", 4, "unsat", 0.1, None, 0.0)),
        answer("as it is", 5, "unsat", 1.0, 10),
    ]
    table = bab_ingredients.table(answers)
    rows = {row[1]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    usual, off = rows["as it is"], rows["x = 0"]
    assert [row["instances"] for row in rows.values()] == [3, 3], "asked of both, and one of them had to search"
    assert (usual["unsat"], usual["sat"], usual["wrong"], usual["part of as it is"]) == (2, 1, 1, 1)
    assert (off["undecided"], off["solved by both"], off["CPU s there"], off["sub-problems there"]) == (1, 2, 5, 35)
    assert off["part of as it is"] == 5 / 3
