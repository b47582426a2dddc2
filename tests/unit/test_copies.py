"""Work that is dealt out among copies of a process: every share is done once, or known not to be done."""

from __future__ import annotations

import errno
import itertools
import math
import multiprocessing
import os
import signal
import textwrap
import time
import warnings
from collections.abc import Callable
from multiprocessing import active_children
from multiprocessing.context import ForkProcess
from pathlib import Path

import pytest
import torch

from tests.support.processes import Process
from verifiable_relu.verifiers.copies import at_once, most

pytestmark = pytest.mark.skipif(most(2) == 1, reason="processes are copied on Linux alone")

Pause = Callable[[], bool]


def unlimited() -> float:
    return math.inf


def until(done: Callable[[], bool]) -> None:
    """Wait, for a minute at most."""
    for _ in range(6000):
        if done():
            return
        time.sleep(0.01)
    raise AssertionError("nothing happened for a minute")


def test_results_come_in_the_order_of_the_shares() -> None:
    found = at_once([lambda pause, k=k: (k, os.getpid()) for k in range(4)], unlimited, whole=True)
    assert [one and one[0] for one in found] == [0, 1, 2, 3]
    assert found[0] == (0, os.getpid()) and len({one and one[1] for one in found}) == 4
    assert not active_children()


def test_a_copy_begins_with_what_the_process_holds_and_changes_nothing_there() -> None:
    held = torch.zeros(3)

    def add(_: Pause) -> torch.Tensor:
        held.add_(1)
        return held

    mine, other = at_once([lambda _: held.clone(), add], unlimited, whole=True)
    assert mine is not None and other is not None
    assert mine.tolist() == [0, 0, 0] and other.tolist() == [1, 1, 1] and held.tolist() == [0, 0, 0]


def fails(_: Pause) -> int:
    raise ValueError("a fault")


def is_killed(_: Pause) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def exits(_: Pause) -> int:
    os._exit(0)


def returns_what_cannot_be_sent(_: Pause) -> object:
    return lambda: 0


@pytest.mark.parametrize("share", [fails, is_killed, exits, returns_what_cannot_be_sent])
def test_of_a_copy_that_fails_nothing_is_known(share: Callable[[Pause], object]) -> None:
    assert at_once([lambda _: 1, share, lambda _: 3], unlimited, whole=True) == [1, None, 3]
    assert not active_children()


@pytest.mark.parametrize("allowed", [0, 1])
def test_where_no_more_processes_are_allowed_the_shares_that_were_not_done_are_known(
    allowed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork, forks = os.fork, itertools.count()

    def limited() -> int:
        if next(forks) >= allowed:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return fork()

    monkeypatch.setattr(os, "fork", limited)
    shares: list[Callable[[Pause], int]] = [lambda _, k=k: k for k in range(3)]  # type: ignore[misc]
    assert at_once(shares, unlimited, whole=True) == [0, *range(1, 1 + allowed), *[None] * (2 - allowed)]
    assert not active_children()


def test_a_daemonic_process_shares_its_work_too() -> None:
    def shares() -> list[int | None]:
        return at_once([lambda _, k=k: k for k in range(3)], unlimited, whole=True)  # type: ignore[misc]

    mine, theirs = multiprocessing.Pipe()
    process = ForkProcess(target=lambda: theirs.send((shares(), multiprocessing.current_process().daemon)), daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    assert mine.poll(60) and mine.recv() == ([0, 1, 2], True)
    process.join()


def test_what_fails_in_the_first_process_is_raised_and_ends_the_copies() -> None:
    def sleeps(_: Pause) -> int:
        time.sleep(600)
        return 0

    with pytest.raises(ValueError, match="a fault"):
        at_once([fails, sleeps], unlimited)
    assert not active_children()


@pytest.mark.parametrize("ends", [False, True])
def test_copies_are_ended_whenever_an_interrupt_comes(ends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes in the middle of making copies, or of ending them."""
    name = "kill" if ends else "start"
    right = getattr(ForkProcess, name)

    def interrupted(process: ForkProcess) -> None:
        right(process)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(ForkProcess, name, interrupted)
    shares = [lambda _: 1, *[lambda _: time.sleep(600)] * 3]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            at_once(shares, lambda: -2.0)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert not active_children()


def test_every_share_is_told_when_one_has_ended() -> None:
    def waits(pause: Pause) -> str:
        until(pause)
        return "told"

    for number in range(3):
        shares: list[Callable[[Pause], str]] = [waits] * 3
        shares[number] = lambda _: "ended"
        expected = ["told"] * 3
        expected[number] = "ended"
        assert at_once(shares, unlimited) == expected


def test_a_copy_that_does_not_heed_the_time_limit_is_killed() -> None:
    began = time.monotonic()

    def sleeps(_: Pause) -> int:
        time.sleep(600)
        return 0

    assert at_once([lambda _: 1, sleeps], lambda: 0.1 - (time.monotonic() - began)) == [1, None]
    assert not active_children()


def test_the_number_of_threads_is_as_before() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        threads = at_once([lambda _: torch.get_num_threads()] * 2, unlimited, whole=True)
        assert threads == [1, 1] and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.thorough
def test_copies_end_with_the_process_however_that_ends(tmp_path: Path) -> None:
    program = """
        import os, pathlib, sys, time
        from verifiable_relu.verifiers.copies import at_once

        def waits(pause):
            pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
            while not pause():
                time.sleep(0.01)

        at_once([lambda pause: time.sleep(600), waits], lambda: 1e9)
    """
    file = tmp_path / "copy"
    with Process(["-c", textwrap.dedent(program), file]) as process:
        until(lambda: file.exists() and file.read_text() != "")
        copy = int(file.read_text())
        process.kill()
    # A process that has ended, and that nobody has waited for, has no command line.
    until(lambda: not Path(f"/proc/{copy}").exists() or not Path(f"/proc/{copy}/cmdline").read_bytes())
