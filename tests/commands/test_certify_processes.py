"""The command certify and its solver's process: when one of them ends, in whatever way, no process is left running."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from tests.support.processes import Process
from tests.support.solver_cases import mlp
from verifiable_relu.readers import write_onnx

METHODS = ("milp", "smt-exact")
INPUTS = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a property that neither solver decides within the time of a test."""
    made = tmp_path_factory.mktemp("hard")
    write_onnx(mlp(np.random.default_rng(1), (INPUTS, 60, 60, 60, 2)), made / "net.onnx")
    names = [*(f"X_{i}" for i in range(INPUTS)), "Y_0", "Y_1"]
    lines = [f"(declare-const {name} Real)" for name in names]
    lines += [f"(assert (>= X_{i} -0.5)) (assert (<= X_{i} 0.5))" for i in range(INPUTS)]
    (made / "hard.vnnlib").write_text("\n".join([*lines, "(assert (<= (- Y_0 Y_1) -300.0))"]))
    return made


def session(number: int) -> dict[int, tuple[int, float]]:
    """The processes of a session that have not ended, with their parents and seconds of processor time."""
    members = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == number and fields[0] != "Z":
                members[int(entry.name)] = int(fields[1]), int(fields[11]) / os.sysconf("SC_CLK_TCK")
    return members


@contextmanager
def command(folder: Path, method: str, seconds: float) -> Iterator[Process]:
    """The command certify, started in a session of its own."""
    arguments = ["--spec", "hard.vnnlib", "--net", "net.onnx", "--method", method, "--timeout", f"{seconds}"]
    with Process(["-m", "verifiable_relu.certify", *arguments], cwd=folder, new_session=True) as started:
        try:
            yield started
        finally:
            for left in session(started.pid):
                os.kill(left, signal.SIGKILL)


@contextmanager
def working(folder: Path, method: str) -> Iterator[tuple[Process, int]]:
    """The command certify and the process number of its solver, once the solver is at work."""
    with command(folder, method, 600.0) as started:
        end = time.monotonic() + 120
        while time.monotonic() < end and started.poll() is None:
            # A copy of the command answers, and starts the solver, which takes less than 0.8 s to start.
            members = session(started.pid)
            workers = [n for n, (by, spent) in members.items() if by in members and by != started.pid and spent > 0.8]
            if workers:
                yield started, *workers
                return
            time.sleep(0.05)
        pytest.fail("no solver is at work")


@pytest.mark.parametrize("method", METHODS)
def test_ctrl_c_ends_the_command_and_its_solver(folder: Path, method: str) -> None:
    """A terminal sends the signal to the command, which ends only after the solver's process."""
    with working(folder, method) as (started, _):
        os.killpg(started.pid, signal.SIGINT)
        _, errors = started.communicate(timeout=60)
        assert not session(started.pid)
    assert started.returncode == 130
    assert errors.startswith("certify: interrupted") and errors.count("\n") == 1


@pytest.mark.parametrize(
    ("method", "sent"), [("milp", signal.SIGKILL), ("smt-exact", signal.SIGKILL), ("milp", signal.SIGTERM)]
)
def test_the_solver_ends_with_the_command(folder: Path, method: str, sent: signal.Signals) -> None:
    with working(folder, method) as (started, _):
        started.send_signal(sent)
        started.communicate(timeout=60)
        end = time.monotonic() + 60
        while session(started.pid) and time.monotonic() < end:
            time.sleep(0.02)
        assert not session(started.pid)
    assert started.returncode == -sent


def test_a_solver_that_is_killed_costs_the_query_and_not_the_command(folder: Path) -> None:
    with working(folder, "milp") as (started, worker):
        os.kill(worker, signal.SIGKILL)
        answer, errors = started.communicate(timeout=60)
    assert answer == "unknown\n" and started.returncode == 1
    assert "fault of milp: its process was ended by the signal SIGKILL" in errors


@pytest.mark.parametrize("method", [*METHODS, "smt"])
def test_nothing_is_left_after_the_time_limit(folder: Path, method: str) -> None:
    with command(folder, method, 1.0) as started:
        answer, _ = started.communicate(timeout=120)
        assert not session(started.pid)
    assert (answer, started.returncode) == ("timed-out\n", 0)
