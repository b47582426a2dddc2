"""The records of a benchmark: what is kept when a run is killed, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.common.records import NOTE, Records, notes, of, read_records
from verifiable_relu.errors import InputError

ROOT = Path(__file__).resolve().parents[2]


def kept(folder: Path) -> list[str]:
    return (folder / "records.jsonl").read_text(encoding="utf-8").splitlines()


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    record = {"name": "λ = 1", "seconds": 1e-300, "settings": [1, {"a": None}]}
    with Records(tmp_path) as records:
        records.append("run", record)
        records.append("other", {"name": "b"})
    found = read_records(tmp_path)
    assert found == [{"kind": "run", **record}, {"kind": "other", "name": "b"}]
    assert of(found, "run") == found[:1]
    with Records(tmp_path) as records:
        assert records.has("run", {"name": "λ = 1"}) and not records.has("run", {"name": "b"})
        assert records.has("other", {}) and not records.has("third", {})


def test_the_beginning_of_a_record_is_dropped_and_the_rest_is_known(tmp_path: Path) -> None:
    with Records(tmp_path) as records:
        for name in "ab":
            records.append("run", {"name": name})
    first, second = kept(tmp_path)
    for end in range(len('{"kind": "'), len(second)):
        (tmp_path / "records.jsonl").write_text(f"{first}\n{second[:end]}", encoding="utf-8")
        assert [record["name"] for record in read_records(tmp_path)] == ["a"]
        with Records(tmp_path) as records:
            assert not records.has("run", {"name": "b"})
            records.append("run", {"name": "c"})
        assert [json.loads(line)["name"] for line in kept(tmp_path)] == ["a", "c"]


@pytest.mark.parametrize("line", ['{"other": 1}', '{"kind": 3}', "[]", "text", '{"kind": "a", "x": NaN}'])
def test_a_file_of_something_else_is_refused_and_left_as_it_is(line: str, tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(line + "\n", encoding="utf-8")
    for use in (Records, read_records):
        with pytest.raises(InputError, match=r"records\.jsonl: line 1: not a record"):
            use(tmp_path)
    assert path.read_text(encoding="utf-8") == line + "\n"


def test_without_records_there_is_one_line_that_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"records\.jsonl: no such file"):
        read_records(tmp_path)


def test_conditions_are_noted_before_the_first_record_of_a_run_and_never_without_one(tmp_path: Path) -> None:
    with Records(tmp_path, lambda: "nothing to do"):
        pass
    for number in range(2):
        with Records(tmp_path, lambda number=number: f"run {number}") as records:  # type: ignore[misc]
            for name in "ab":
                records.append("line", {"name": name})
    assert [record["kind"] for record in read_records(tmp_path)] == [NOTE, "line", "line"] * 2
    assert list(notes(read_records(tmp_path))) == ["run 0", "run 1"]


def test_two_processes_do_not_measure_into_one_folder(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from benchmarks.common.records import Records\n"
        "with Records(Path(sys.argv[1])) as records:\n"
        "    records.append('run', {'name': 'theirs'})\n"
        "    print('open', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == b"open\n"
        with pytest.raises(InputError, match="another campaign"):
            Records(tmp_path)
        assert [record["name"] for record in read_records(tmp_path)] == ["theirs"], "whoever reads is not kept out"
        process.kill()
        process.stdin.close()
    with Records(tmp_path) as records:
        assert records.has("run", {"name": "theirs"}), "a kill loses no record"
