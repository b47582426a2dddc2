"""Copies of the process: shares of work are done once or known not to be, and what crashes costs the copy alone."""

from __future__ import annotations

import ctypes
import errno
import itertools
import math
import os
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.support.processes import Process
from verifiable_relu.supervisor import forks
from verifiable_relu.supervisor.forks import Pause, run_shares, survives

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are copied on Linux alone")


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The copies that a test makes, none of which is left at its end."""
    found: list[int] = []
    fork = os.fork

    def noted() -> int:
        pid = fork()
        found.extend([pid] * bool(pid))
        return pid

    monkeypatch.setattr(os, "fork", noted)
    yield found
    for pid in found:
        assert not Path(f"/proc/{pid}").exists()


def unlimited() -> float:
    return math.inf


def sleeps(_: Pause) -> int:
    time.sleep(600)
    return 0


def await_true(done: Callable[[], bool]) -> None:
    """Wait, for a minute at most."""
    for _ in range(6000):
        if done():
            return
        time.sleep(0.01)
    raise AssertionError("nothing happened for a minute")


def test_results_come_in_the_order_of_the_shares(made: list[int]) -> None:
    held = torch.zeros(3)

    def share(number: int) -> tuple[int, list[float], int]:
        return os.getpid(), held.add_(number).tolist(), torch.get_num_threads()

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        found = run_shares([lambda _, k=k: share(k) for k in range(4)], unlimited, whole=True)  # type: ignore[misc]
        assert found == [(pid, [float(k)] * 3, 1) for k, pid in enumerate([os.getpid(), *made])]
        # What copies change in memory is theirs.
        assert held.tolist() == [0, 0, 0] and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def fails(_: Pause) -> int:
    raise ValueError("a fault")


def is_killed(_: Pause) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def returns_what_cannot_be_sent(_: Pause) -> object:
    return lambda: 0


@pytest.mark.parametrize("share", [fails, is_killed, lambda _: os._exit(0), returns_what_cannot_be_sent])
def test_of_a_copy_that_fails_nothing_is_known(share: Callable[[Pause], object]) -> None:
    assert run_shares([lambda _: 1, share, lambda _: 3], unlimited, whole=True) == [1, None, 3]


@pytest.mark.parametrize("allowed", [0, 1])
def test_where_no_more_processes_are_allowed_it_is_known_which_shares_are_not_done(
    allowed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork, asked = os.fork, itertools.count()

    def limited() -> int:
        if next(asked) >= allowed:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return fork()

    monkeypatch.setattr(os, "fork", limited)
    shares: list[Callable[[Pause], int]] = [lambda _, k=k: k for k in range(3)]  # type: ignore[misc]
    assert run_shares(shares, unlimited, whole=True) == [0, *range(1, 1 + allowed), *[None] * (2 - allowed)]
    # Nothing is tried, and the work is taken for harmless.
    assert survives(os.abort)


def test_what_fails_in_the_first_process_is_raised_and_ends_the_copies() -> None:
    with pytest.raises(ValueError, match="a fault"):
        run_shares([fails, sleeps], unlimited)


@pytest.mark.parametrize("name", ["fork", "kill"])
def test_copies_are_ended_whenever_an_interrupt_comes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes in the middle of making copies, or of ending them."""
    right, me = getattr(os, name), os.getpid()

    def interrupted(*arguments: int) -> int | None:
        done: int | None = right(*arguments)
        if os.getpid() == me:
            signal.raise_signal(signal.SIGINT)
        return done

    monkeypatch.setattr(os, name, interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_shares([lambda _: 1, *[sleeps] * 3], lambda: -2.0)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", range(3))
def test_every_share_is_told_when_one_has_ended(number: int) -> None:
    def waits(pause: Pause) -> str:
        await_true(pause)
        return "told"

    shares: list[Callable[[Pause], str]] = [waits] * 3
    shares[number] = lambda _: "ended"
    expected = ["told"] * 3
    expected[number] = "ended"
    assert run_shares(shares, unlimited) == expected


def test_a_copy_that_does_not_heed_the_time_limit_is_killed() -> None:
    began = time.monotonic()
    assert run_shares([lambda _: 1, sleeps], lambda: 0.1 - (time.monotonic() - began)) == [1, None]


@pytest.mark.thorough
def test_copies_end_with_the_process_however_that_ends(tmp_path: Path) -> None:
    program = """
        import os, pathlib, sys, time
        from verifiable_relu.supervisor.forks import run_shares

        def waits(pause):
            pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
            time.sleep(600)

        run_shares([lambda pause: time.sleep(600), waits], lambda: 1e9)
    """
    file = tmp_path / "copy"
    with Process(["-c", textwrap.dedent(program), file]) as process:
        await_true(lambda: file.exists() and file.read_text() != "")
        copy = int(file.read_text())
        process.kill()
    # A process that has ended, and that nobody has waited for, has no command line.
    await_true(lambda: not Path(f"/proc/{copy}").exists() or not Path(f"/proc/{copy}/cmdline").read_bytes())


@pytest.mark.parametrize("work", [os.abort, lambda: ctypes.string_at(0), lambda: is_killed(bool), lambda: os._exit(3)])
def test_a_crash_is_known_and_costs_this_process_nothing(
    work: Callable[[], object], capfd: pytest.CaptureFixture[str]
) -> None:
    held: list[int] = []
    assert not survives(work)
    assert survives(lambda: held.append(1)) and survives(lambda: 1 // 0) and not held
    assert capfd.readouterr() == ("", "")


def test_work_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "_LONGEST_TRIAL_S", 0.2)
    assert not survives(lambda: sleeps(bool))
