"""What the process of a ``Worker`` runs: it imports a function, and calls it with one argument after another.

It imports nothing else, so that the process starts fast.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from importlib import import_module
from typing import Any, Literal

Kind = Literal["ready", "question", "done", "memory", "failed"]
"""What a message of the process is: the function is imported, an interim question, a result, and two ways to fail."""


def serve(function: str, lifeline: int) -> None:
    """Answer the calls of a ``Worker`` until it is gone: what its process runs.

    Args:
        function: ``module:name``.
        lifeline: the reading end of a pipe whose other end the parent holds and never writes to.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        _end_with(lifeline)
    # What the library prints or reads must not get among the messages. The parent may have closed its stderr, and the
    # number must not become that of anything else here.
    nowhere = os.open(os.devnull, os.O_RDWR)
    try:
        os.fstat(2)
    except OSError:
        os.dup2(nowhere, 2)
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(nowhere, 0)
    # HiGHS 1.16, for one, prints its name before it can be told not to.
    os.dup2(nowhere, 1)

    def send(kind: Kind, value: object) -> None:
        replies.write(pickle.dumps((kind, value), pickle.HIGHEST_PROTOCOL))
        replies.flush()

    def ask(question: object) -> Any:
        try:
            send("question", question)
            return pickle.load(requests)
        except (EOFError, BrokenPipeError):
            # The parent was killed: there is nobody to answer, and nothing that went wrong here.
            os._exit(0)

    module, _, name = function.partition(":")
    try:
        called = getattr(import_module(module), name)
    except Exception as error:
        send("failed", f"{type(error).__name__}: {error}")
        return
    send("ready", None)
    while True:
        try:
            argument, converses = pickle.load(requests)
        except EOFError:
            return
        except MemoryError:
            send("memory", None)
            return
        try:
            send("done", called(argument, ask) if converses else called(argument))
        except MemoryError:
            send("memory", None)
        except Exception as error:
            send("failed", f"{type(error).__name__}: {error}")
        del argument


def _end_with(lifeline: int) -> None:
    """Have the kernel end this process as soon as the other end of a pipe is closed.

    Linux sends SIGIO when that happens, and the signal ends the process whatever it does: a thread that waits for the
    end of the pipe would need the interpreter, which the library's code may hold.
    """
    import fcntl

    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
