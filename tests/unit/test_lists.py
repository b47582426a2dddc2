"""Lists: a bad row is told first, equal files are read once, and answers are found by the bytes of the files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.hostile_verifier import Hostile
from tests.unit.test_parallel import SPEC, Here, entries, ran
from verifiable_relu.campaign import Store, inputs
from verifiable_relu.campaign.inputs import Loader
from verifiable_relu.campaign.queue import InstancePart, Job
from verifiable_relu.errors import InputError, OutOfTime
from verifiable_relu.ir.families import harden
from verifiable_relu.search.outcomes import Reason
from verifiable_relu.spec import instances
from verifiable_relu.supervisor.workers import Deadline, Report


def test_a_bad_row_comes_before_any_answer(tmp_path: Path) -> None:
    (tmp_path / "instances.csv").write_text("net0.onnx,0.vnnlib,30\n" * 3000 + "net0.onnx,0.vnnlib,x\n")
    with pytest.raises(InputError, match=r"instances\.csv: line 3001: 'x' is not a number of seconds"):
        instances(tmp_path / "instances.csv")


def test_equal_networks_and_properties_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = entries(tmp_path, [5, 6])
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "0.vnnlib").write_text(SPEC.format(bound=5))
    read: list[str] = []
    for name in ("read_onnx", "read_vnnlib"):
        original = getattr(inputs, name)
        monkeypatch.setattr(
            inputs, name, lambda path, *, o=original, **k: (read.append(Path(path).name), o(path, **k))[1]
        )
    loader = Loader()
    cases = [loader.case(entry) for entry in [*made, replace(made[0], vnnlib=tmp_path / "below" / "0.vnnlib"), *made]]
    assert sorted(read) == ["0.vnnlib", "1.vnnlib", "net0.onnx"]
    assert cases[2].spec is not None and cases[2].spec.path == tmp_path / "below" / "0.vnnlib"
    # The first of a network's instances has no less time than the others, nor more.
    assert all(case.spent >= loader._network(made[0].onnx or Path()).seconds for case in cases)
    # A file that changes is another one.
    made[0].vnnlib.write_text(SPEC.format(bound=7))
    assert loader.case(made[0]).digest != cases[0].digest


def test_few_networks_are_kept_where_they_are_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = entries(tmp_path, [5, 6, 7], networks=3)
    monkeypatch.setattr(inputs, "_KEPT_NETWORKS", 2 * (tmp_path / "net0.onnx").stat().st_size + 10)
    original, read = inputs.read_onnx, list[str]()
    monkeypatch.setattr(inputs, "read_onnx", lambda path, **k: (read.append(path.name), original(path, **k))[1])
    loader = Loader()
    for entry in [*made, *reversed(made)]:
        loader.case(entry)
    assert read == ["net0.onnx", "net1.onnx", "net2.onnx", "net0.onnx"]


@pytest.mark.parametrize("change", ["", "network", "property", "family", "limit", "method"])
def test_a_resumed_list_is_found_by_the_bytes_of_its_files(change: str, tmp_path: Path) -> None:
    made = entries(tmp_path, [5, 6, 7])
    with Store(tmp_path / "out") as store:
        ran(made, Job(Hostile(), Loader()), Here(), store)
    loader, verifier = Loader(), Hostile()
    if change == "network":
        (tmp_path / "net0.onnx").write_bytes((tmp_path / "net0.onnx").read_bytes() + b"\x12\x01x")
    elif change == "property":
        made[1].vnnlib.write_text(SPEC.format(bound=8))
    elif change == "family":
        loader = Loader(prepare=harden)
    elif change == "method":
        verifier = Hostile(tmp_path / "log")
    elif change == "limit":
        made = [replace(entry, timeout=99.0) for entry in made]
    slot = Here()
    with Store(tmp_path / "out") as store:
        results = ran(made, Job(verifier, loader), slot, store)
    expected = {"": [], "limit": [], "property": [1]}.get(change, [0, 1, 2])
    assert sorted(number for part in slot.parts for number in part) == expected
    assert [Path(r.vnnlib).stem for r in results] == ["0", "1", "2"]


@pytest.mark.parametrize("reading", [True, False])
def test_what_is_late_costs_itself_alone(reading: bool, tmp_path: Path) -> None:
    made = entries(tmp_path, [5 + i for i in range(20)])

    class Slow(Here):
        """A worker that instance 4 keeps from reading, or from answering."""

        def perform(self, task: InstancePart, report: Report) -> Any:
            numbers = [number for number, _ in task.entries]
            self.parts.append(numbers)
            if 4 in numbers:
                raise OutOfTime(4 if reading else None)
            self.parts.pop()
            return super().perform(task, report)

    slot = Slow()
    results = ran(made, Job(Hostile(), Loader()), slot)
    assert [r.answer for r in results] == ["timed-out" if number == 4 else "unsat" for number in range(20)]
    assert results[4].reason is Reason.TIMEOUT and results[4].seconds == 30.0
    # What was not read in time is known; what was not answered is found by halves.
    assert sum(4 in part for part in slot.parts) == (1 if reading else 4)


def test_a_worker_names_the_limits_of_what_it_does(tmp_path: Path) -> None:
    made, said = entries(tmp_path, [5, 6]), list[Any]()

    class Heard(Here):
        def perform(self, task: InstancePart, report: Report) -> Any:
            return super().perform(task, lambda message: (said.append(message), report(message))[1])

    for certificates in (None, tmp_path / "certificates"):
        said.clear()
        ran(made[:1], Job(Hostile(), Loader(), certificates), Heard())
        limits = [(m.subject, m.seconds) for m in said if isinstance(m, Deadline)]
        assert [number for number, _ in limits] == [0, None] and limits[0][1] == pytest.approx(30.8)
        assert limits[1][1] == float("inf") if certificates else 30 < limits[1][1] <= 31.6
        assert said[-1][0] == "result"
