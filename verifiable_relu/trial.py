"""Work at which a library may crash, tried in a copy of this process first, which the operating system makes (fork)."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress

import torch

_LONGEST = 120.0
"""The seconds after which work is taken for hanging."""

_TICK = 0.002
"""The seconds between two looks at whether the copy has ended."""


def survived(work: Callable[[], object]) -> bool:
    """Whether a copy of this process survives some work, whose results and exceptions are lost.

    Nothing is tried, and the answer is yes, where processes cannot be copied safely (other systems than Linux have
    libraries that do not work in a copy), or there is no memory for another one.
    """
    if sys.platform != "linux":
        return True
    end = time.monotonic() + _LONGEST
    try:
        with warnings.catch_warnings():
            # Python 3.12 and later warn of threads, whose locks a copy may wait for: hence the time limit.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
    except OSError:
        return True
    if not pid:
        _work(work)
    try:
        while time.monotonic() < end:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                pid = 0
                return status == 0
            time.sleep(_TICK)
        return False
    finally:
        if pid:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _work(work: Callable[[], object]) -> None:
    """In the copy: do the work, and end."""
    try:
        # The thread that was copied is the main one here. Ctrl-C is for the first process.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # What a library says of its crash is for nobody.
        faulthandler.disable()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        # The threads of OpenMP are not there in a copy, which would wait for them.
        torch.set_num_threads(1)
        # An object whose threads are not there, onnxruntime's sessions for one, crashes or hangs where it is collected.
        gc.freeze()
        with suppress(Exception):
            work()
    finally:
        os._exit(0)
