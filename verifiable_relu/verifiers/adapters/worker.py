"""A process for the calls of a library that cannot be interrupted: it ends itself when its time is over."""

from __future__ import annotations

import atexit
import faulthandler
import math
import os
import pickle
import signal
import subprocess
import sys
import time
from importlib import import_module
from typing import Any

from verifiable_relu.errors import OutOfTime

_START = "import sys; sys.path[:] = {path!r}; from {module} import serve; serve({function!r})"


class Worker:
    """Calls a function in another Python process, which is started by the first call and serves all that follow.

    The process ends when a call takes too long, and with this one, however that ends; the next call starts another.

    Args:
        function: ``module:name``, of one argument. Argument and result must be picklable.
    """

    def __init__(self, function: str) -> None:
        self._function = function
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.stop)

    @property
    def number(self) -> int | None:
        """The process's, None while there is none."""
        return None if self._process is None else self._process.pid

    def call(self, argument: object, seconds: float = math.inf) -> Any:
        """What the function makes of the argument.

        Args:
            argument: of the function.
            seconds: for the call, the transfer of the argument included; the start of a process is not.

        Raises:
            OutOfTime: if it takes longer.
            RuntimeError: if the process ends in another way, such as by a fault in the library's own code.
            KeyboardInterrupt: on Ctrl-C, after the process has been ended.
        """
        start = time.perf_counter()
        try:
            process = self._started()
            start = time.perf_counter()
            assert process.stdin is not None and process.stdout is not None
            for part in (seconds, argument):
                pickle.dump(part, process.stdin, pickle.HIGHEST_PROTOCOL)
                process.stdin.flush()
            return pickle.load(process.stdout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            status = self.stop()
            if time.perf_counter() - start >= seconds:
                raise OutOfTime from None
            raise RuntimeError(f"its process ended with the status {status}") from None
        except BaseException:
            self.stop()
            raise

    def stop(self) -> int | None:
        """End the process, if there is one; returns its exit status."""
        process, self._process = self._process, None
        if process is None:
            return None
        # One that has ended by itself keeps its status.
        process.kill()
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            try:
                stream.close()
            except BrokenPipeError:
                continue
        return process.wait()

    def _started(self) -> subprocess.Popen[bytes]:
        """The process, ready for a call."""
        if self._process is None:
            code = _START.format(path=sys.path, module=__name__, function=self._function)
            self._process = subprocess.Popen(
                [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            assert self._process.stdout is not None
            pickle.load(self._process.stdout)
        return self._process


def serve(function: str) -> None:
    """Answer the calls of a ``Worker`` until it is gone: what its process runs."""
    # Ctrl-C reaches both processes; the other one decides what becomes of this.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # What a library prints must not get among the replies.
    os.dup2(2, 1)
    module, _, name = function.partition(":")
    called = getattr(import_module(module), name)
    with open(os.devnull, "w") as nowhere:
        reply: object = "ready"
        while True:
            pickle.dump(reply, replies, pickle.HIGHEST_PROTOCOL)
            replies.flush()
            try:
                seconds = pickle.load(requests)
                if math.isfinite(seconds):
                    # Its clock runs in a thread that needs nothing of the interpreter.
                    faulthandler.dump_traceback_later(max(seconds, 1e-3), exit=True, file=nowhere)
                argument = pickle.load(requests)
            except EOFError:
                return
            reply = called(argument)
            del argument
            faulthandler.cancel_dump_traceback_later()
