"""Work that is tried in a copy of the process: the copy alone takes the consequences."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import time

import pytest

from verifiable_relu import trial
from verifiable_relu.trial import survived

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are copied on Linux alone")


def reads_nowhere() -> None:
    ctypes.string_at(0)


def kills_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("work", [os.abort, reads_nowhere, kills_itself, lambda: os._exit(3)])
def test_a_crash_is_known_and_costs_this_process_nothing(work: object, capfd: pytest.CaptureFixture[str]) -> None:
    assert not survived(work)  # type: ignore[arg-type]
    assert capfd.readouterr() == ("", "")


def test_results_exceptions_and_changes_are_lost() -> None:
    held: list[int] = []
    assert survived(lambda: held.append(1)) and not held
    assert survived(lambda: 1 // 0)


class EndsTheProcess:
    """An object in a circle that a copy must not collect, as sessions of onnxruntime whose threads stay behind."""

    def __init__(self) -> None:
        self.first, self.itself = os.getpid(), self

    def __del__(self) -> None:
        if os.getpid() != self.first:
            os.abort()


def test_what_the_process_no_longer_needs_is_not_collected_in_the_copy() -> None:
    gc.disable()
    try:
        EndsTheProcess()
        assert survived(gc.collect)
    finally:
        gc.enable()


def test_work_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_LONGEST", 0.2)
    began = time.monotonic()
    assert not survived(lambda: time.sleep(600))
    assert time.monotonic() - began < 60


def test_an_interrupt_ends_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = []
    fork = os.fork

    def noted() -> int:
        copies.append(fork())
        return copies[-1]

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fork", noted)
    monkeypatch.setattr(time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        survived(signal.pause)
    with pytest.raises(ProcessLookupError):
        os.kill(copies[0], 0)


def test_without_memory_for_a_process_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise BlockingIOError

    monkeypatch.setattr(os, "fork", refuse)
    assert survived(os.abort)
