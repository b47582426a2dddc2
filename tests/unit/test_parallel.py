"""Campaigns on several workers: every instance is answered once, whatever becomes of the workers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.hostile import Told
from tests.support.hostile_verifier import FILL, KILL, WAIT, Hostile
from tests.support.processes import Process
from tests.support.scripted import tiny
from verifiable_relu.campaign import Observer, Result, Store
from verifiable_relu.campaign.inputs import InstanceFiles, Loader
from verifiable_relu.campaign.queue import InstancePart, Job, Numbered, run_parallel
from verifiable_relu.errors import CallFailed, InputError, OutOfTime
from verifiable_relu.readers import write_onnx
from verifiable_relu.search.outcomes import Reason, Verdict
from verifiable_relu.search.registry import limited
from verifiable_relu.supervisor import workers
from verifiable_relu.supervisor.workers import (
    DaskExecutor,
    Executor,
    LocalExecutor,
    Report,
    run_tasks,
)

SPEC = """(declare-const X_0 Real)
(declare-const Y_0 Real)
(assert (>= X_0 0.0))
(assert (<= X_0 1.0))
(assert (>= Y_0 {bound}))
"""


def entries(folder: Path, bounds: Sequence[float], networks: int = 1) -> list[InstanceFiles]:
    """Instances that ask whether an output reaches a bound: none above 4 is reached; the networks take turns."""
    for number in range(networks):
        write_onnx(tiny(1.0 + number), folder / f"net{number}.onnx")
    listed = []
    for number, bound in enumerate(bounds):
        path = folder / f"{number}.vnnlib"
        path.write_text(SPEC.format(bound=bound))
        listed.append(InstanceFiles(path, folder / f"net{number % networks}.onnx", 30.0))
    return listed


class Here(Executor):
    """Performs parts in this process. It fails as it is told to, after the given number of messages of a part."""

    def __init__(self, fault: Callable[[Sequence[Numbered]], int | None] = lambda part: None, size: int = 1) -> None:
        self.fault, self.size = fault, size
        self.parts: list[list[int]] = []

    def submit(self, task: Any, report: Report) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(self.perform(task, report))
        except (CallFailed, OutOfTime, MemoryError) as error:
            done.set_exception(error)
        return done

    def perform(self, task: InstancePart, report: Report) -> Any:
        self.parts.append([number for number, _ in task.entries])
        after, answered = self.fault(task.entries), 0

        def failing(message: Any) -> Any:
            nonlocal answered
            if isinstance(message, tuple) and message[0] == "result":
                if answered == after:
                    raise CallFailed("its process was ended by the signal SIGBOOM")
                answered += 1
            return report(message)

        result = task(failing)
        if after is not None:
            raise CallFailed("its process was ended by the signal SIGBOOM")
        return result


class Kept(Observer):
    """An observer that keeps the results of a run, and the numbers of those that were recorded."""

    def __init__(self) -> None:
        self.results: dict[int, Result] = {}
        self.recorded: list[int] = []

    def result(self, number: int, result: Result, recorded: bool) -> None:
        assert number not in self.results
        self.results[number] = result
        self.recorded += [number] * recorded


def ran(entries: Iterable[InstanceFiles], job: Job, executor: Executor, store: Store | None = None) -> list[Result]:
    """The results of a run, in the order of the instances."""
    kept = Kept()
    if store is not None:
        store.observer = kept
    run_parallel(entries, job, executor, kept if store is None else store)
    return [kept.results[number] for number in sorted(kept.results)]


def answers(results: Sequence[Result]) -> list[tuple[str, Verdict, Reason]]:
    return [(Path(r.vnnlib).stem, r.verdict, r.reason) for r in results]


def all_proved(count: int) -> list[tuple[str, Verdict, Reason]]:
    return [(str(number), Verdict.UNSAT, Reason.PROVED) for number in range(count)]


@contextmanager
def cluster(workers: int) -> Iterator[tuple[Any, str]]:
    """A Dask cluster in this process, and its address."""
    distributed = pytest.importorskip("distributed")
    options = {"threads_per_worker": 1, "processes": False, "dashboard_address": None, "protocol": "tcp"}
    with distributed.LocalCluster(n_workers=workers, **options) as dask:
        yield dask, dask.scheduler_address.replace("tcp://", "dask://")


@contextmanager
def closing(executor: Executor) -> Iterator[Executor]:
    yield executor
    executor.stop()


@pytest.mark.parametrize("size", [1, 3])
def test_parts_get_smaller_and_have_one_network_together(size: int, tmp_path: Path) -> None:
    listed = entries(tmp_path, [5 + i for i in range(24)], networks=4)
    here = Here(size=size)
    assert answers(ran(listed, Job(Hostile(), Loader()), here)) == all_proved(24)
    line = sorted(range(24), key=lambda number: (number % 4, number))
    assert [number for part in here.parts for number in part] == line
    sizes = [len(part) for part in here.parts]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == -(-24 // (4 * size)) and sizes[-1] == 1


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_worker_that_ends_costs_the_instance_at_fault_alone(after: int, tmp_path: Path) -> None:
    listed = entries(tmp_path, [5 + i for i in range(30)])
    guilty = 4

    def fault(part: Sequence[Numbered]) -> int | None:
        numbers = [number for number, _ in part]
        return min(after, numbers.index(guilty)) if guilty in numbers else None

    with Store(tmp_path / "out") as store:
        results = ran(listed, Job(Hostile(), Loader()), Here(fault, 2), store)
    expected = all_proved(30)
    expected[guilty] = (str(guilty), Verdict.UNKNOWN, Reason.ERROR)
    assert answers(results) == expected and "SIGBOOM" in results[guilty].detail
    with Store(tmp_path / "out") as store:
        # The instance at fault is asked again, and it alone.
        again = ran(listed, Job(Hostile(), Loader()), Here(), store)
    assert answers(again) == all_proved(30)
    lines = (tmp_path / "out" / "records.jsonl").read_text().splitlines()
    assert len(lines) == 31


def test_an_answer_that_comes_twice_is_kept_once(tmp_path: Path) -> None:
    class Twice(Here):
        def perform(self, task: InstancePart, report: Report) -> Any:
            return super().perform(task, lambda message: (report(message), report(message))[1])

    with Store(tmp_path / "out") as store:
        results = ran(entries(tmp_path, [5, 6, 7]), Job(Hostile(), Loader()), Twice(), store)
    assert answers(results) == all_proved(3)
    assert len((tmp_path / "out" / "records.jsonl").read_text().splitlines()) == 3


def test_a_full_disk_ends_the_campaign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(result: Result) -> None:
        raise InputError("cannot keep results here: No space left on device", path=tmp_path)

    with Store(tmp_path / "out") as store:
        monkeypatch.setattr(store, "append", full)
        with pytest.raises(InputError, match="No space"):
            run_parallel(entries(tmp_path, [5, 6, 7]), Job(Hostile(), Loader()), Here(size=2), store)


@pytest.mark.thorough
def test_processes_that_are_killed_or_take_too_much_memory_cost_their_instances_alone(tmp_path: Path) -> None:
    # One worker with four instances or fewer gets them one by one.
    made, log = entries(tmp_path, [5, KILL, 6, FILL]), tmp_path / "log"
    executor = LocalExecutor(1, 600 << 20)
    results = ran(made, Job(Hostile(log), Loader(), memory=600 << 20), executor)
    executor.stop()
    assert answers(results) == [
        ("0", Verdict.UNSAT, Reason.PROVED),
        ("1", Verdict.UNKNOWN, Reason.ERROR),
        ("2", Verdict.UNSAT, Reason.PROVED),
        ("3", Verdict.UNKNOWN, Reason.MEMORY),
    ]
    assert "SIGKILL" in results[1].detail and "600 MiB" in results[3].detail
    processes = [line.split()[0] for line in log.read_text().splitlines()]
    # A process is kept from one part to the next, as long as it lives.
    assert processes[0] == processes[1] != processes[2] == processes[3] and str(os.getpid()) not in processes


COMMAND = """
import sys
from pathlib import Path
from tests.support.hostile_verifier import Hostile
from verifiable_relu.campaign import inputs
from verifiable_relu.certify import main

inputs.make = lambda *_: Hostile(Path("log"))
sys.exit(main(["--spec", "instances.csv", "--out", "out", "--jobs", "2"]))
"""


@pytest.mark.thorough
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_a_campaign_that_is_ended_keeps_every_answer_and_leaves_no_process(
    sent: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = entries(tmp_path, [5, 6, 7, WAIT, 9, WAIT])
    (tmp_path / "instances.csv").write_text("".join(f"{e.onnx},{e.vnnlib},30\n" for e in made))
    with Process(["-c", COMMAND], cwd=tmp_path) as process:
        # The rows come as the answers do, after their records; the other two answers wait.
        rows = [process.stdout.readline().split(",") for _ in range(4)]
        process.send_signal(sent)
        assert process.stdout.read() == ""
    assert process.returncode == (130 if sent is signal.SIGINT else -sent)
    assert {(Path(row[1]).stem, row[2]) for row in rows} == {(number, "unsat") for number in "0124"}
    workers = {int(line.split()[0]) for line in (tmp_path / "log").read_text().splitlines()}
    end = time.monotonic() + 60
    while any(Path(f"/proc/{worker}").exists() for worker in workers) and time.monotonic() < end:
        time.sleep(0.05)
    assert len(workers) == 2 and not any(Path(f"/proc/{worker}").exists() for worker in workers)
    for number in (3, 5):
        made[number].vnnlib.write_text(SPEC.format(bound=20 + number))
    kept = Kept()
    monkeypatch.chdir(tmp_path)
    with Store("out", observer=kept) as store:
        run_parallel(made, Job(Hostile(Path("log")), Loader(), budget=limited("auto")), Here(), store)
    results = [kept.results[number] for number in sorted(kept.results)]
    assert answers(results) == all_proved(6) and sorted(kept.recorded) == [0, 1, 2, 4]


@pytest.mark.thorough
@pytest.mark.parametrize("onnx", [Path("net0.onnx"), None])
def test_a_dask_cluster_gives_the_same_answers_and_asks_nothing_twice(
    onnx: Path | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Networks are named, or found by the workers."""
    monkeypatch.chdir(tmp_path)
    made = [InstanceFiles(Path(e.vnnlib.name), onnx, 30.0) for e in entries(tmp_path, [0.5, 5, 6, 7, 8, 9])]
    job = Job(Hostile(), Loader())
    with cluster(2) as (_, address):
        for answered in (6, 0):
            with Store(tmp_path / "out") as store, closing(DaskExecutor(address)) as executor:
                results = ran(made, job, executor, store)
            assert len(results) == 6 and answers(results)[1:] == all_proved(6)[1:]
            assert [(r.onnx, r.vnnlib) for r in results] == [("net0.onnx", f"{i}.vnnlib") for i in range(6)]
            with (tmp_path / "out" / "records.jsonl").open() as file:
                assert len(file.readlines()) == 6, answered


def test_a_dask_scheduler_that_is_not_there_is_named() -> None:
    pytest.importorskip("distributed")
    with pytest.raises(InputError, match="no Dask scheduler answers"):
        DaskExecutor("dask://127.0.0.1:9", patience_s=0.5)


@pytest.mark.thorough
@pytest.mark.parametrize("gone", ["scheduler", "workers"])
def test_a_cluster_that_is_gone_ends_the_campaign_in_one_line(
    gone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is answered before is kept, and the rest is answered by the next campaign."""
    monkeypatch.setattr(workers, "PATIENCE_S", 1.0)
    made = entries(tmp_path, [6, 7, 8, 9])

    class Ends(Kept):
        def result(self, number: int, result: Result, recorded: bool) -> None:
            if gone == "scheduler":
                dask.close()
            else:
                dask.scale(0)

    with cluster(1) as (dask, address), Store(tmp_path / "out", observer=Ends()) as store:
        began = time.monotonic()
        with pytest.raises(InputError, match=r"any more: .* resumes"):
            run_parallel(made, Job(Hostile(), Loader()), DaskExecutor(address), store)
        assert time.monotonic() - began < 60 and 1 <= len(store) < 4
    with cluster(1) as (_, address), Store(tmp_path / "out") as store, closing(DaskExecutor(address)) as executor:
        results = ran(made, Job(Hostile(), Loader()), executor, store)
        assert answers(results) == all_proved(4) and len(store) == 4


@pytest.mark.parametrize("where", ["processes", "cluster"])
def test_an_executor_performs_any_task_and_one_that_fails_ends_no_other(where: str) -> None:
    tasks = [Told(result) for result in (1, InputError("bad data"), MemoryError("full"), ValueError("odd"), 2)]
    found, said, left = list[Any](), list[Any](), iter(tasks)
    with ExitStack() as stack:
        if where == "processes":
            executor: Executor = LocalExecutor(2)
        else:
            executor = DaskExecutor(stack.enter_context(cluster(2))[1])
        stack.callback(executor.stop)
        run_tasks(executor, lambda: next(left, None), lambda task, result: found.append(result), said.append)
    assert sorted(repr(each).replace("its process got no more memory", "full") for each in found) == sorted(
        ["1", "2", "CallFailed('InputError: bad data')", "CallFailed('ValueError: odd')", "MemoryError('full')"]
    )
    assert where == "cluster" or len(said) == 5
