"""Commands in processes of their own, without two seconds of imports each.

``Process`` and ``run`` do what ``subprocess.Popen`` and ``subprocess.run`` do with ``python -c CODE`` or ``python -m
MODULE``, in a fork of a server that has imported what the commands need. Everything else is as in a fresh process. A
test of what a command imports, or of what it does before its first import, starts a real one.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).parents[2]
IMPORTED = (
    "onnxruntime",
    "pytest",
    "verifiable_relu.api",
    "verifiable_relu.campaign",
    "verifiable_relu.runtime",
    "verifiable_relu.search.solvers.milp",
    "verifiable_relu.search.portfolio",
)
"""Modules of the server, with all that they import. No module here starts a thread."""
QUIET = {"ORT_DISABLE_TELEMETRY": "1"}
"""onnxruntime's reports to its maker would be a thread of the server, without which no fork of it could end."""
WIDTH = 20
"""Bytes of a process's number, on its way from the server."""


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


class Process:
    """A command in a process of its own, with the arguments of python; may lead a session of its own.

    Attributes:
        pid: its number.
        returncode: None while it runs, then its exit status, below zero for the signal that ended it.
        seconds, mebibytes: what it took, once it has ended, of processor time and, at most, of memory beside that with
            which it begins.
        stdin, stdout, stderr: text streams to and from it.
    """

    def __init__(
        self, arguments: Sequence[object], *, cwd: Path | str | None = None, new_session: bool = False
    ) -> None:
        pipes = [os.pipe() for _ in range(4)]
        (theirs_in, ours_in), (ours_out, theirs_out), (ours_err, theirs_err), (self._end, status) = pipes
        theirs = [theirs_in, theirs_out, theirs_err, status]
        asked: dict[str, Any] = {"arguments": list(map(str, arguments)), "session": new_session}
        asked["cwd"] = str(cwd or Path.cwd())
        asked["env"] = environment()
        text = json.dumps(asked).encode()
        link = _server()
        socket.send_fds(link, [len(text).to_bytes(8, "big")], theirs)
        link.sendall(text)
        for fd in theirs:
            os.close(fd)
        self.stdin: TextIO = os.fdopen(ours_in, "w")
        self.stdout: TextIO = os.fdopen(ours_out)
        self.stderr: TextIO = os.fdopen(ours_err)
        self.returncode: int | None = None
        self.seconds = self.mebibytes = 0.0
        self.pid = int(os.read(self._end, WIDTH))

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self.stdin, self.stdout, self.stderr):
            stream.close()
        self.wait()
        os.close(self._end)

    def poll(self, timeout: float | None = 0) -> int | None:
        """The exit status, or None while the process runs."""
        if self.returncode is None and select.select([self._end], [], [], timeout)[0]:
            found = json.loads(os.read(self._end, 1000))
            self.returncode, self.seconds, self.mebibytes = found["status"], found["seconds"], found["mebibytes"]
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, once the process has ended; raises ``TimeoutExpired`` after ``timeout`` seconds."""
        if (status := self.poll(timeout)) is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        return status

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Close stdin and read stdout and stderr to their ends; raises ``TimeoutExpired`` as ``wait`` does."""
        self.stdin.close()
        with ThreadPoolExecutor() as readers:
            read = [readers.submit(stream.read) for stream in (self.stdout, self.stderr)]
            try:
                self.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()
                raise
            return read[0].result(), read[1].result()


def run(
    arguments: Sequence[object], *, cwd: Path | str | None = None, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; it is killed after ``timeout`` seconds, which raises ``TimeoutExpired``."""
    with Process(arguments, cwd=cwd) as process:
        out, err = process.communicate(timeout)
        return subprocess.CompletedProcess(list(map(str, arguments)), process.wait(), out, err)


@cache
def _server() -> socket.socket:
    """The link to the server, which ends when the link is closed, hence with this process."""
    ours, theirs = socket.socketpair()
    code = f"from tests.support.processes import serve; serve({theirs.fileno()})"
    # In a session of its own: Ctrl-C ends the tests, and with them the server.
    server = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        cwd=ROOT,
        env={**environment(), **QUIET},
        pass_fds=[theirs.fileno()],
        start_new_session=True,
    )
    theirs.close()
    atexit.register(server.wait)
    atexit.register(ours.close)
    return ours


def serve(number: int) -> None:
    """Fork a process for each request that comes over a socket, the descriptor ``number``."""
    for name in IMPORTED:
        with warnings.catch_warnings(action="ignore"):
            importlib.import_module(name)
    gc.freeze()
    link = socket.socket(fileno=number)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        head, fds, _, _ = socket.recv_fds(link, 8, 4)
        if not head:
            return
        size, text = int.from_bytes(head, "big"), b""
        while len(text) < size:
            text += link.recv(size - len(text))
        if os.fork() == 0:
            link.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            child = os.fork()
            if child == 0:
                os.close(fds[3])
                _command(json.loads(text), fds[:3])
                return
            _report(child, fds)
        for fd in fds:
            os.close(fd)


def _report(child: int, fds: Sequence[int]) -> None:
    """Wait for a command's process, and say its number and how it ended."""
    for fd in fds[:3]:
        os.close(fd)
    # As much as the command's process, which is a fork of this one, begins with.
    begun = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20
    os.write(fds[3], str(child).zfill(WIDTH).encode())
    _, ended, used = os.wait4(child, 0)
    found: dict[str, Any] = {"status": os.waitstatus_to_exitcode(ended)}
    found["seconds"], found["mebibytes"] = used.ru_utime + used.ru_stime, used.ru_maxrss / 1024 - begun
    try:
        os.write(fds[3], json.dumps(found).encode())
    finally:
        os._exit(0)


def _command(asked: Mapping[str, Any], streams: Sequence[int]) -> None:
    """Become the process of a command."""
    for stream, fd in enumerate(streams):
        os.dup2(fd, stream)
        os.close(fd)
    if asked["session"]:
        os.setsid()
    # Whoever started the tests in the background may have had the interrupt ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    kind, what, *arguments = asked["arguments"]
    if kind == "-m":
        sys.argv = [what, *arguments]
        sys.modules.pop(what, None)
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        sys.argv = ["-c", *arguments]
        exec(compile(what, "<string>", "exec"), sys.modules["__main__"].__dict__)
