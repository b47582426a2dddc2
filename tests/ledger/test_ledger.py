"""A part of the ledger in the gate: the verdicts and the accepted certificates of before are there still."""

import json
import zlib
from itertools import chain
from pathlib import Path

from tests.ledger.__main__ import VERDICTS, WITHOUT_DATA, ask, differences, name_of
from tests.ledger.queries import lists
from tests.support.draws import draws
from verifiable_relu.spec import read_instances
from verifiable_relu.spec.find import write_instances


def test_verdicts_and_certificates_are_those_of_the_ledger(tmp_path: Path) -> None:
    kept = {name.partition("/")[2]: answer for name, answer in json.loads(VERDICTS.read_text(encoding="utf-8")).items()}
    written = chain.from_iterable(lists(tmp_path, name) for name in WITHOUT_DATA)
    decided = [
        one
        for _, instances in written
        for one in read_instances(instances)
        if kept[f"{name_of(one.onnx, one.vnnlib)}, auto"][0] != "unknown"
    ]
    every = len(decided) // draws(64)
    chosen = [one for one in decided if zlib.crc32(one.vnnlib.name.encode()) % every == 0]
    write_instances(tmp_path / "chosen.csv", chosen)
    found = {f"{name}, auto": answer for name, answer in ask(tmp_path / "chosen.csv", "auto", tmp_path)[0].items()}
    assert len(found) >= draws(48) and {"sat", "unsat"} <= {verdict for verdict, *_ in found.values()}
    assert not differences({name: kept[name] for name in found}, found)


def test_a_difference_is_named() -> None:
    old = {"a, crown": ["unsat", True, 0.5], "b, crown": ["sat", True, None], "a, auto": 3.0}
    assert not differences(old, {**old, "a, crown": ["unsat", True, 0.5 + 4e-7], "a, auto": 9.0})
    assert differences(old, {"a, crown": ["unsat", True, 0.5 + 6e-7], "b, crown": ["sat", False, None]}) == [
        "a, crown: ['unsat', True, 0.5], now ['unsat', True, 0.5000006]",
        "b, crown: ['sat', True, None], now ['sat', False, None]",
    ]
    assert differences(old, {**old, "b, crown": ["sat", True, 0.1]})
    assert differences({}, {"c, crown": ["sat", True, None]}) == ["c, crown: only in the new ledger"]
