"""benchmarks/training/transformer_profiles.py: small Transformers are trained once, and tabulated."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.common.records import Records, of, read_records
from benchmarks.training import transformer_profiles
from benchmarks.training.profiles_measuring import LENGTH, SYMBOLS, TESTED, language


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


def test_rows_state_the_agreement_and_what_settles_first() -> None:
    def record(lam: list[float], weights: float) -> dict[str, object]:
        return {"data": "mnist", "layers": 3, "lam": lam, "accuracy": 0.5, "patterns": 0.5, "weights": weights}

    same = [record([1.0, 2.0, 3.0], 0.25), record([2.0, 3.0, 4.0], 1.0)]
    other = [record([1.0, 2.0, 3.0], 0.25), record([4.0, 3.0, 2.0], 0.25)]
    assert transformer_profiles.profiles(same).rows[0][4:8] == ("1.50 2.50 3.50", 1.0, 1.0, 1.0)
    assert transformer_profiles.profiles(other).rows[0][5] == -1.0
    ((*_, ratio, first),) = transformer_profiles.settling(same).rows
    assert ratio.mean == (0.5 + 2.0) / 2 and first == "patterns in 1"


def test_the_language_is_the_same_for_all_and_two_symbols_tell_about_the_next() -> None:
    (x, y), (held_out, _) = language(500)
    again, _ = language(500)
    assert torch.equal(x, again[0]) and torch.equal(y, again[1])
    assert x.shape == (500, SYMBOLS, LENGTH, 1) and len(held_out) == TESTED
    assert bool((x.sum(1) == 1).all()) and 0 <= int(y.min()) <= int(y.max()) < SYMBOLS
    told = x.argmax(1)[..., 0]
    triples = torch.cat([told, y[:, None]], 1).unfold(1, 3, 1)[:, 1:].reshape(-1, 3)
    counts = torch.zeros(SYMBOLS, SYMBOLS, SYMBOLS).index_put_(tuple(triples.T), torch.ones(len(triples)), True)
    # Without a rule, the likeliest of 16 symbols would follow in about an eighth of so many cases.
    assert counts.amax(2).sum() / counts.sum() > 0.4
