"""A process for a foreign library: it answers, it is ended at its limits, it harms nobody, and it outlives nobody."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support import hostile
from tests.support.processes import Process
from verifiable_relu.errors import CallFailed, OutOfTime
from verifiable_relu.supervisor import forks
from verifiable_relu.supervisor.workers import Worker, processor_seconds


@contextmanager
def working(function: str) -> Iterator[Worker]:
    before = threading.active_count()
    made = Worker(function)
    yield made
    made.stop()
    assert threading.active_count() == before


@pytest.fixture
def worker() -> Iterator[Worker]:
    with working("builtins:eval") as made:
        yield made


def alive(pid: int | None) -> bool:
    """Return True if there is such a process, other than one that has ended and waits for its parent to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def has_ended(pid: int) -> bool:
    """Return True if a process ends within a minute."""
    patience = time.monotonic() + 60
    while alive(pid) and time.monotonic() < patience:
        time.sleep(0.02)
    return not alive(pid)


def test_one_process_answers_many_calls_of_many_threads(worker: Worker) -> None:
    assert worker.pid is None and worker.call("6 * 7") == 42
    first = worker.pid
    assert worker.call("__import__('os').getpid()", 60.0) == first
    assert len(worker.call("bytes(10_000_000)")) == 10_000_000
    assert worker.call("len(" + repr("x" * 1_000_000) + ")") == 1_000_000
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda n=n: found.append(worker.call(f"{n} * len(bytes(100_000))"))) for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [n * 100_000 for n in range(8)] and worker.pid == first
    # A limit ends with its call, and whoever kills the process between two calls does no harm.
    assert worker.call("1", 0.2) == 1 and worker.call("__import__('time').sleep(0.5)") is None
    assert first is not None
    os.kill(first, signal.SIGKILL)
    assert has_ended(first) and worker.call("1") == 1


SAID = {
    "crashes": "signal SIGSEGV",
    "aborts": "signal SIGABRT",
    "is_killed": "signal SIGKILL",
    "leaves": "status 0",
    "raises": "^ArithmeticError: nothing works$",
}


@pytest.mark.parametrize("kind", hostile.KINDS, ids=lambda kind: kind.__name__)
def test_whatever_a_library_does_costs_one_call(kind: Callable[[], None]) -> None:
    error, _ = hostile.KINDS[kind]
    with working("tests.support.hostile:does") as worker:
        worker.start()
        first = worker.pid
        with pytest.raises(error, match=SAID.get(kind.__name__)):
            worker.call(kind.__name__, 0.5 if error is OutOfTime else 60.0, hostile.MEMORY)
        if error is not OutOfTime and kind is not hostile.raises:
            assert worker.pid is None
        assert worker.pid is None or kind is hostile.raises
        assert worker.pid == first or not alive(first)
        with pytest.raises(CallFailed, match="KeyError"):
            worker.call("nothing of that name", 60.0)


def test_a_process_that_keeps_much_memory_is_replaced(worker: Worker) -> None:
    assert worker.call("len(b'x' * (100 << 20))", 60.0, hostile.MEMORY) == 100 << 20
    worker.call("globals().__setitem__('kept', b'x' * (100 << 20))", 60.0, 1 << 30)
    first = worker.pid
    assert first is not None
    assert worker.call("len(kept)", 60.0, hostile.MEMORY) == 100 << 20
    assert worker.pid is None and not alive(first)


def test_a_container_may_have_less_memory_than_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    physical = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    assert 0 < forks.default_memory() <= int(physical.split()[1]) * 1024 / 2
    (tmp_path / "max").write_text("1000000\n")
    (tmp_path / "unlimited").write_text("max\n")
    named = (tmp_path / "missing", tmp_path / "unlimited", tmp_path / "max")
    monkeypatch.setattr(forks, "CONTROL_GROUPS", named)
    assert forks.half_of_memory.__wrapped__() == 500_000


@pytest.mark.parametrize(
    ("function", "said"), [("tests.support.hostile:no_such_function", "no_such"), ("no_such_module:f", "no_such_mod")]
)
def test_what_cannot_be_imported_is_said(function: str, said: str) -> None:
    with working(function) as worker, pytest.raises(CallFailed, match=f"does not start: .*{said}"):
        worker.call(1)


def test_questions_are_answered_while_the_call_lasts() -> None:
    with working("tests.support.hostile:asks") as worker:
        assert worker.call(4, 60.0, converse=lambda number: number * number) == 0 + 1 + 4 + 9
        # What is raised by who answers reaches the caller, and the process is not left waiting.
        with pytest.raises(ZeroDivisionError):
            worker.call(1, 60.0, converse=lambda number: 1 / number)
        assert worker.pid is None

        def slow(number: int) -> int:
            time.sleep(0.5)
            return 1

        with pytest.raises(OutOfTime):
            worker.call(2, 0.3, converse=slow)


def test_processor_time_counts_what_workers_do(worker: Worker) -> None:
    def others() -> float:
        return processor_seconds() - time.process_time()

    before = others()
    clock = "__import__('time').process_time()"
    spent = worker.call(f"sum(0 for _ in iter(lambda: {clock} < 0.7, False)) or {clock}")
    running = others() - before
    worker.stop()
    assert spent >= 0.7 and running == pytest.approx(spent, abs=0.05)
    assert others() - before == pytest.approx(running, abs=0.05)


OWNER = """
import os, signal, sys, threading
from verifiable_relu.supervisor.workers import Worker
signal.signal(signal.SIGINT, signal.default_int_handler)
worker = Worker("tests.support.hostile:does")
worker.start()
print(worker.pid, flush=True)
{end}
"""


def owner(end: str, **options: bool) -> Process:
    """A process with a worker, which says the worker's number and ends as it is told."""
    return Process(["-c", OWNER.format(end=end)], **options)


@pytest.mark.parametrize("end", ["", "os._exit(0)", "os.kill(os.getpid(), signal.SIGKILL)", "1 / 0"])
def test_an_idle_process_ends_with_whoever_started_it(end: str) -> None:
    with owner(end) as started:
        assert has_ended(int(started.communicate(timeout=120)[0]))


@pytest.mark.combined
@pytest.mark.parametrize("kind", ["hangs", "hangs_in_python", "hangs_holding_the_interpreter", "eats_memory"])
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_at_work_ends_with_whoever_started_it(kind: str, sent: signal.Signals) -> None:
    with owner(f"worker.call('{kind}', memory=8 << 30)") as started:
        number = int(started.stdout.readline())
        time.sleep(0.2)
        started.send_signal(sent)
        assert has_ended(number)


@pytest.mark.parametrize("kind", ["hangs", "hangs_in_python", "hangs_holding_the_interpreter"])
def test_ctrl_c_in_a_terminal_ends_both_processes(kind: str) -> None:
    """A terminal sends the signal to all its processes."""
    with owner(f"worker.call('{kind}')", new_session=True) as started:
        number = int(started.stdout.readline())
        time.sleep(0.2)
        began = time.monotonic()
        os.killpg(started.pid, signal.SIGINT)
        said = started.stderr.read()
        assert started.wait(60) == -signal.SIGINT and not alive(number) and time.monotonic() - began < 30
        # The worker says nothing about it.
        assert said.count("KeyboardInterrupt") == said.count("Traceback") == 1


@pytest.mark.parametrize("closed", [(0,), (2,), (0, 2)])
def test_a_worker_works_where_standard_streams_are_closed(closed: tuple[int, ...]) -> None:
    """Whatever is opened gets a descriptor that is free then."""
    code = f"""
worker.stop()
for stream in {closed}:
    os.close(stream)
other = Worker("builtins:eval")
print(other.call("[__import__('os').write(fd, b'noise') for fd in (1, 2)] and 42"))
print(other.call("__import__('os').read(0, 10)"))
"""
    with owner(code) as started:
        # What a library prints or reads is no message.
        assert started.communicate(timeout=60)[0].splitlines()[1:] == ["42", "b''"]


def test_a_process_that_does_not_start_in_time_is_ended() -> None:
    made = Worker("builtins:eval", start_s=0.0)
    with pytest.raises(CallFailed, match="takes too long to start"):
        made.start()
    assert made.pid is None
