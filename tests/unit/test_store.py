"""Folders of results: locks, refused and unchanged files, repair, and records after a kill."""

from __future__ import annotations

import csv
import json
import os
import stat
from collections.abc import Callable
from datetime import datetime
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from tests.support.scripted import Scripted, case
from tests.unit.test_campaign import kept, known
from verifiable_relu import journal
from verifiable_relu.campaign import Store, run
from verifiable_relu.campaign.result import Result
from verifiable_relu.campaign.store import read_results
from verifiable_relu.errors import InputError
from verifiable_relu.search.outcomes import Reason, Trust, Verdict


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A results folder with the records of an unsat and a sat answer."""
    kept([case(2, name="a"), case(0.5, name="b")], Scripted(), tmp_path / "out")
    return tmp_path / "out"


def lines(folder: Path) -> list[bytes]:
    return (folder / "records.jsonl").read_bytes().splitlines(keepends=True)


def changed(line: bytes, **fields: Any) -> bytes:
    """A record with other values in some fields; the value ``...`` takes a field away."""
    record = {**json.loads(line), **fields}
    return json.dumps({k: v for k, v in record.items() if v is not ...}).encode() + b"\n"


def test_a_store_locks_out_another_until_it_is_closed_or_refused(folder: Path) -> None:
    with Store(folder, repair=True) as store, pytest.raises(InputError, match="another campaign"):
        assert store.set_aside is None
        Store(folder)
    whole = (folder / "records.jsonl").read_bytes()
    (folder / "records.jsonl").write_bytes(b"garbage\n")
    with pytest.raises(InputError):
        Store(folder)
    (folder / "records.jsonl").write_bytes(whole)
    assert known(folder) == 2
    with pytest.raises(InputError, match=r"results\.csv"):
        Store(folder / "results.csv")


FOREIGN = {
    "text": b"shopping list\nmilk\n",
    "text without an end": b"shopping list",
    "nothing but ends of lines": b"\n\n",
    "zeros": bytes(1000),
    "other JSON that begins alike": b'{"onnx": "n", "colour": "red"}\n',
    "deep, and begins alike": b'{"onnx": "n", "vnnlib": ' + b"[" * 100_000 + b"\n",
    "no UTF-8": b'{"onnx": "\xff"}\n',
    "a number of many digits": b'{"onnx": "n", "seconds": ' + b"9" * 100_000 + b"}\n",
}


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("after", [False, True])
def test_a_file_with_other_lines_is_not_changed(name: str, after: bool, folder: Path) -> None:
    path = folder / "records.jsonl"
    content = (path.read_bytes() if after else b"") + FOREIGN[name]
    path.write_bytes(content)
    with pytest.raises(InputError) as error:
        Store(folder)
    assert path.read_bytes() == content
    assert str(error.value).startswith(f"{path}: line {3 if after else 1}: not a record: ")
    assert "--repair" in str(error.value) and len(str(error.value)) < 600 and "\n" not in str(error.value)


WRONG: dict[str, list[Any]] = {
    "onnx": [None],
    "verdict": ["maybe", ["sat"]],
    "reason": ["boredom"],
    "seconds": ["1", True, 10**400],
    "trust": ["blind", None],
    "margin": ["nan"],
    "timeout": [None],
    "witness": [None, 1, ["one"], ["1e999999999"], ["1/0"], ["1", "2"]],
    "outputs": [None, [None]],
    "shape": [[-1]],
    "stages": [{"look": "long"}],
    "versions": [{}],
    "unstable": [0.5],
    "detail": [...],
    "mood": ["good"],
}


@pytest.mark.parametrize("name", WRONG)
def test_a_record_with_a_wrong_field_is_named(name: str, folder: Path) -> None:
    good, sat = lines(folder)
    for value in WRONG[name]:
        content = good + changed(sat, **{name: value}) + good
        (folder / "records.jsonl").write_bytes(content)
        with pytest.raises(InputError, match=rf"records\.jsonl: line 2: not a record: .*{name}"):
            Store(folder)
        assert (folder / "records.jsonl").read_bytes() == content


@pytest.mark.parametrize("more", [b'"seconds": NaN, ', b'"seconds": 1, ', b'"look": Infinity, '])
def test_what_json_does_not_have_is_no_record(more: bytes, folder: Path) -> None:
    good, sat = lines(folder)
    (folder / "records.jsonl").write_bytes(good + sat.replace(b'"seconds": ', more + b'"seconds": ', 1))
    with pytest.raises(InputError, match="line 2"):
        Store(folder)


def test_a_line_longer_than_any_record_is_not_read_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "LONGEST", 4000)
    good, sat = lines(folder)
    content = good + b'{"onnx": "' + b"x" * 50_000 + b"\n" + sat
    (folder / "records.jsonl").write_bytes(content)
    with pytest.raises(InputError, match="line 2: not a record: it is longer than 4000 bytes"):
        Store(folder)
    with Store(folder, repair=True) as store:
        assert len(store) == 2 and store.set_aside == (13, folder / "records.jsonl.bad-1")
    assert lines(folder) == [good, sat]
    assert good + (folder / "records.jsonl.bad-1").read_bytes() + sat == content


SPOILT: dict[str, Callable[[Path], object]] = {
    "link": lambda path: path.symlink_to(path.parent / "elsewhere"),
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("name", ["records.jsonl", "results.csv"])
@pytest.mark.parametrize("repair", [False, True])
@pytest.mark.parametrize("spoilt", SPOILT)
def test_what_is_no_plain_file_is_refused(spoilt: str, repair: bool, name: str, folder: Path) -> None:
    (folder / name).rename(folder / "elsewhere")
    SPOILT[spoilt](folder / name)
    before = {path.name: path.lstat().st_mtime_ns for path in folder.iterdir()}
    with pytest.raises(InputError, match=name):
        Store(folder, repair)
    assert {path.name: path.lstat().st_mtime_ns for path in folder.iterdir()} == before


def test_a_table_of_somebody_else_is_not_replaced(folder: Path) -> None:
    (folder / "results.csv").write_text("name,mark\n")
    with pytest.raises(InputError, match=r"results\.csv: not a table of this program"):
        Store(folder)
    assert (folder / "results.csv").read_text() == "name,mark\n"


def test_repair_moves_what_is_no_record_and_loses_nothing(folder: Path) -> None:
    good, sat = lines(folder)
    other = changed(good, vnnlib="c", query="another")
    bad = [b"garbage\n", b"\xff\n", b"\n", sat[:-30]]
    (folder / "records.jsonl").write_bytes(bad[0] + good + bad[1] + bad[2] + sat + other + bad[3])
    with Store(folder, repair=True) as store:
        assert len(store) == 3 and store.set_aside == (4, folder / "records.jsonl.bad-1")
    assert lines(folder) == [good, sat, other]
    assert (folder / "records.jsonl.bad-1").read_bytes() == b"".join(bad)
    # What was moved before stays.
    with (folder / "records.jsonl").open("ab") as file:
        file.write(b"again\n")
    with Store(folder, repair=True) as store:
        assert store.set_aside == (1, folder / "records.jsonl.bad-2")
        store.append(Result("n", "d", Verdict.UNKNOWN, Reason.INCOMPLETE, "m", 1.0, query="q"))
    assert lines(folder)[:3] == [good, sat, other] and known(folder) == 4
    assert (folder / "records.jsonl.bad-1").read_bytes() == b"".join(bad)


@pytest.mark.thorough
def test_a_record_cut_anywhere_costs_that_record_alone(folder: Path) -> None:
    good, sat = lines(folder)
    for end in range(1, len(sat) + 1):
        (folder / "records.jsonl").write_bytes(good + sat[:end])
        whole = end >= len(sat) - 1
        assert known(folder) == 1 + whole
        assert lines(folder) == [good, sat][: 1 + whole]


def test_every_result_comes_back_as_it_was(tmp_path: Path) -> None:
    results = [
        Result("n", "p", Verdict.UNKNOWN, Reason.TIMEOUT, "m", 0.1, margin=-float("inf"), query="1"),
        Result("n", "p", Verdict.UNSAT, Reason.PROVED, "m", 0, Trust.ROUNDED, float("inf"), query="2", unstable=0),
        Result(
            "n\n\u2028\udcff", "p", Verdict.SAT, Reason.REFUTED, "a+b", 1e-300, Trust.EXACT, -0.0,
            (Fraction(1, 3), Fraction(-(10**4000), 7)), (5e-324, -1.7976931348623157e308), (1, 2), "\x1b[0m\"",
            {"s": 2.0}, query="3",
        ),
    ]  # fmt: skip
    with Store(tmp_path) as store:
        for number, result in enumerate(results):
            store.result(number, result, False)
    with (tmp_path / "results.csv").open(newline="", encoding="utf-8", errors="surrogateescape") as file:
        rows = list(csv.reader(file))
    assert [row[2] for row in rows[1:]] == ["timed-out", "unsat", "sat"] and rows[3][0] == results[2].onnx
    with Store(tmp_path) as store:
        assert [store.find(result.key, result.timeout) for result in results] == results


def test_records_say_when_where_and_by_what_command_they_came_to_be(tmp_path: Path) -> None:
    with Store(tmp_path, command="verifiable-relu certify --spec 'a b'") as store:
        run([case(2, name="a"), case(0.5, name="b")], Scripted(), store)
    for record in map(json.loads, lines(tmp_path)):
        assert datetime.fromisoformat(record["date"]) and record["processor"]
        assert record["command"] == "verifiable-relu certify --spec 'a b'"
        assert record["processor_seconds"] >= 0 and (record["memory"] or 1 << 30) > 1 << 20


def test_a_record_of_another_version_is_refused_by_a_line_that_says_so(folder: Path) -> None:
    good, sat = lines(folder)
    older = changed(good, repairs=..., versions={"verifiable_relu": "0.1.0"})
    (folder / "records.jsonl").write_bytes(older + sat)
    said = (
        r"line 1: not a record: a record of another version of verifiable_relu \(0\.1\.0\), which differs in 'repairs'"
    )
    with pytest.raises(InputError, match=said + ".*--repair"):
        Store(folder)
    with pytest.raises(InputError, match=said):
        read_results(folder)


def test_a_record_that_does_not_fit_the_disk_leaves_no_part_of_it(folder: Path) -> None:
    class Full:
        """A file on a disk that is full after a few more bytes."""

        def __init__(self, file: Any) -> None:
            self.file, self.room = file, 50

        def write(self, data: bytes) -> int:
            if not self.room:
                raise OSError(28, "No space left on device")
            written, self.room = self.file.write(data[: self.room]), 0
            return int(written)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

    before = lines(folder)
    with Store(folder) as store:
        store._journal._file = Full(store._journal._file)  # type: ignore[assignment]
        with pytest.raises(InputError, match="No space"):
            store.append(Result("n", "d", Verdict.UNKNOWN, Reason.INCOMPLETE, "m", 1.0, query="q"))
    assert lines(folder) == before


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_files_have_the_mode_that_the_umask_gives(mask: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        kept([case(2)], Scripted(), tmp_path / "out")
        with (tmp_path / "out" / "records.jsonl").open("ab") as file:
            file.write(b"garbage\n")
        Store(tmp_path / "out", repair=True).close()
    finally:
        os.umask(before)
    names = ("results.csv", "records.jsonl", "records.jsonl.bad-1")
    modes = {name: stat.S_IMODE((tmp_path / "out" / name).stat().st_mode) for name in names}
    assert modes == dict.fromkeys(names, 0o666 & ~mask)


def test_what_a_kill_left_beside_the_table_goes_at_the_next_start(folder: Path) -> None:
    before = set(folder.rglob("*"))
    for name in (".results.csv.new", ".records.jsonl.new", "counterexamples/.b-1.txt.new"):
        (folder / name).write_text("half a t")
    assert known(folder) == 2
    assert set(folder.rglob("*")) == before
