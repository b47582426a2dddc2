"""The settings of the process that results or their speed depend on.

What users, and libraries that they import, have set for their own work is no setting of this package's: arithmetic in
half precision, warnings and floating-point flags that raise exceptions, another default type or device. Every function
that answers, from Python or from a command, does its work within ``default_settings``, which restores the old ones.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from verifiable_relu import COPIED, TORCH_CAME_FIRST
from verifiable_relu.errors import InputError


class _ThreadState(threading.local):
    """A thread's state: whether it is within ``default_settings``, and the default device that was there."""

    within = False
    device = torch.device("cpu")


_HERE = _ThreadState()
_LOCK = threading.RLock()
_WITHIN = [0]  # The number of threads within ``default_settings``; the last one restores what all threads share
_WAS: dict[str, Any] = {}  # The settings that all threads share, as they were before the first thread came

_ONEDNN: Any = torch.backends.mkldnn
_CUDNN: Any = torch.backends.cudnn
_PRECISE = tuple(
    enumerate(
        [(each, "none") for each in (torch.backends, _ONEDNN, _CUDNN)]
        + [(each, "ieee") for each in (_ONEDNN.matmul, _ONEDNN.conv, torch.backends.cuda.matmul)]
    )
)
"""What may compute float32 products in less precision (``torch.set_float32_matmul_precision`` sets some, too), and what
it is to do. What comes first decides on later parts that have ``none``, which alone is full precision."""


def _shared() -> dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Any]]:
    """Return the settings that all threads share, by name: how each is read and set, and the neutral value."""
    # Threads that there were before a fork are gone, and may not round as this one will: OpenMP would wait for them.
    threads = 1 if COPIED or _flushes() else torch.get_num_threads()
    return {
        **{f"precision {n}": (partial(getattr, b, "fp32_precision"), partial(_let, b), v) for n, (b, v) in _PRECISE},
        # Unless it is told otherwise, cuDNN takes 10 bits of the factors (TF32).
        "convolutions": (_convolutions, _let_convolutions, (False, "none", "none")),
        "dtype": (torch.get_default_dtype, torch.set_default_dtype, torch.float32),
        "deterministic": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, 0),
        "anomalies": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly, False),
        "threads": (torch.get_num_threads, torch.set_num_threads, threads),
    }


def _let(backend: Any, given: str) -> None:
    """Set a precision; what it is a part of decides where that says the same, since both read alike."""
    backend.fp32_precision = "none"
    if backend.fp32_precision != given:
        backend.fp32_precision = given


def _convolutions() -> tuple[bool | None, str, str]:
    """Return cuDNN's precisions: the older setting, unreadable where newer ones differ, and the newer ones."""
    try:
        older = _CUDNN.allow_tf32
    except RuntimeError:
        older = None
    return older, _CUDNN.conv.fp32_precision, _CUDNN.rnn.fp32_precision


def _let_convolutions(given: tuple[bool | None, str, str]) -> None:
    """Set what ``_convolutions`` has read; the older setting first, since it sets the newer ones, too."""
    older, convolutions, recurrent = given
    if older is not None:
        _CUDNN.allow_tf32 = older
    _let(_CUDNN.conv, convolutions)
    _let(_CUDNN.rnn, recurrent)


def _flushes() -> bool:
    """Return True if the processor takes the smallest numbers for 0, as a library built for speed can make it."""
    return bool(np.float64(5e-324) * np.float64(1) == 0)


@contextmanager
def default_settings() -> Iterator[None]:
    """Run a block, or a function (``@default_settings()``), as in a fresh process, whatever was set in this one.

    Number and priority of threads stay the user's; a fork of a process that had imported the package has one thread.
    """
    if _HERE.within:
        yield
        return
    _HERE.within = True
    try:
        with ExitStack() as stack:
            stack.enter_context(_settled())
            stack.enter_context(np.errstate(divide="warn", over="warn", under="ignore", invalid="warn"))
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            for kind in ("cpu", "cuda"):
                if torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            _HERE.device = torch.get_default_device()
            if _HERE.device.type != "cpu":
                stack.enter_context(torch.device("cpu"))
            if _flushes():
                torch.set_flush_denormal(False)
                stack.callback(torch.set_flush_denormal, True)
            yield
    finally:
        _HERE.within = False


@contextmanager
def user_settings() -> Iterator[None]:
    """Run a block within ``default_settings`` with the user's default dtype and device, on which modules may rely."""
    mine = torch.get_default_dtype()
    with ExitStack() as stack:
        if _HERE.within and _HERE.device.type != "cpu":
            stack.enter_context(_HERE.device)
        stack.callback(torch.set_default_dtype, mine)
        torch.set_default_dtype(_WAS.get("dtype", mine))
        yield


@contextmanager
def _settled() -> Iterator[None]:
    with _LOCK:
        if not _WITHIN[0]:
            _relax_openmp()
            # All are read before one is set: a part whose own precision is none reads as what it is part of.
            shared = _shared()
            _WAS.update({name: read() for name, (read, _, _) in shared.items()})
            for name, (_, put, value) in shared.items():
                if _WAS[name] != value:
                    put(value)
            if any(action == "error" for action, *_ in warnings.filters):
                _WAS["warnings"] = warnings.catch_warnings()
                _WAS["warnings"].__enter__()
                warnings.simplefilter("ignore")
        _WITHIN[0] += 1
    try:
        yield
    finally:
        with _LOCK:
            _WITHIN[0] -= 1
            if not _WITHIN[0]:
                for name, (read, put, _) in _shared().items():
                    if read() != _WAS[name]:
                        put(_WAS[name])
                if "warnings" in _WAS:
                    _WAS["warnings"].__exit__(None, None, None)
                _WAS.clear()


@cache
def _relax_openmp() -> None:
    """Have OpenMP's threads wait without work for one another, where torch was loaded before this package.

    By default they wait in busy loops, which took up to fifty times longer where others use the same cores. OpenMP
    reads ``OMP_WAIT_POLICY`` when torch is loaded only. But a thread of GNU's OpenMP that waits gives up its core after
    a moment if OpenMP has more threads than there are cores: a team of that size, which sleeps for ever, makes that
    true.
    """
    if not TORCH_CAME_FIRST:
        return
    import ctypes
    from pathlib import Path

    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        if hasattr(library, "kmp_set_blocktime"):
            # Intel's and LLVM's OpenMP have a function for it.
            library.kmp_set_blocktime(0)
            return
        begin, nothing = library.GOMP_parallel, ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)
    except (OSError, AttributeError):
        return
    begun = threading.Event()

    def sleep() -> None:
        # Each thread of the team calls free(NULL), and waits for work that never comes.
        begin(nothing, None, ctypes.c_uint((os.cpu_count() or 1) + 1), ctypes.c_uint(0))
        begun.set()
        threading.Event().wait()

    threading.Thread(target=sleep, name="openmp", daemon=True).start()
    begun.wait(1)


def find_device(name: str) -> str:
    """Return the torch device of a name (``require_device``); ``auto`` is a GPU if there is one."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    require_device(name)
    return name


def require_device(name: str) -> None:
    """Raise an InputError unless torch has the device, and numbers come back from it (``meta`` holds none)."""
    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError) as error:
        # What torch says first is enough; it goes on for a page.
        reason = str(error).splitlines()[0].partition(". ")[0]
        raise InputError(f"no device '{name}': {reason}") from None
