"""A process for what cannot be interrupted: it answers, it is ended in time, and it outlives nobody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from verifiable_relu.errors import OutOfTime
from verifiable_relu.verifiers.adapters.worker import Worker

ROOT = Path(__file__).parents[2]


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker("builtins:eval")
    yield made
    made.stop()


def test_one_process_answers_many_calls(worker: Worker) -> None:
    assert worker.number is None
    assert worker.call("6 * 7") == 42
    first = worker.number
    assert worker.call("__import__('os').getpid()", 60.0) == first == worker.number
    assert len(worker.call("bytes(10_000_000)")) == 10_000_000


def test_a_limit_ends_with_its_call(worker: Worker) -> None:
    assert worker.call("1", 0.2) == 1
    assert worker.call("__import__('time').sleep(0.5)") is None


@pytest.mark.parametrize(
    "endless", ["__import__('time').sleep(600)", "all(True for _ in iter(int, 1))", "2 ** 10 ** 10"]
)
def test_a_call_that_takes_too_long_is_ended_and_the_next_is_answered(endless: str, worker: Worker) -> None:
    with pytest.raises(OutOfTime):
        worker.call(endless, 0.3)
    assert worker.number is None and worker.call("1") == 1


@pytest.mark.parametrize(("end", "status"), [("__import__('os')._exit(7)", 7), ("__import__('os').abort()", -6)])
def test_a_process_that_ends_by_itself_is_a_fault(end: str, status: int, worker: Worker) -> None:
    with pytest.raises(RuntimeError, match=f"ended with the status {status}$"):
        worker.call(end, 60.0)
    assert worker.call("1") == 1


def test_what_is_printed_does_not_get_among_the_answers(worker: Worker) -> None:
    assert worker.call("__import__('os').write(1, b'hello') + len(str(print('hello', flush=True)))") == 9


def test_ctrl_c_ends_the_process_at_once(worker: Worker) -> None:
    worker.call("1")
    number = worker.number
    assert number is not None
    threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT]).start()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            worker.call("__import__('time').sleep(600)")
    finally:
        signal.signal(signal.SIGINT, before)
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)


OWNER = """
import os, signal
from verifiable_relu.verifiers.adapters.worker import Worker
worker = Worker("builtins:eval")
worker.call("1")
print(worker.number, flush=True)
{end}
"""


@pytest.mark.parametrize("end", ["", "os._exit(0)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_it_ends_with_whoever_started_it(end: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OWNER.format(end=end)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=120,
    )
    number, patience = int(done.stdout), time.monotonic() + 60
    while time.monotonic() < patience:
        state = Path(f"/proc/{number}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail("it goes on")
