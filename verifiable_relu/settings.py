"""The settings of the process that results or their speed depend on.

What users, and libraries that they import, have set for their own work is no setting of this package's: arithmetic in
half precision, warnings and floating-point flags that raise exceptions, another default type or device. Every front
door, from Python or from a command, does its work within ``neutral``, which restores what was there.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch

from verifiable_relu.openmp import copied, relax


class _Here(threading.local):
    """What a thread has found: whether it is within ``neutral``, and the default device that was there."""

    within = False
    device = torch.device("cpu")


_HERE = _Here()
_LOCK = threading.RLock()
_WITHIN: list[int] = []
"""The threads that are within ``neutral``; settings that all threads share are restored by the last one."""

_WAS: dict[str, Any] = {}
"""The settings that all threads share, as they were before the first thread came."""


def _shared() -> dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Any]]:
    """The settings that all threads share, by name: how each is read and set, and the value that is neutral."""
    return {
        **{f"precision {number}": _precision(*each) for number, each in enumerate(_PRECISE)},
        # Unless it is told otherwise, cuDNN takes 10 bits of the factors (TF32).
        "convolutions": (_convolutions, _let_convolutions, (False, "none", "none")),
        "dtype": (torch.get_default_dtype, torch.set_default_dtype, torch.float32),
        "deterministic": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, 0),
        "anomalies": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly, False),
        "threads": (torch.get_num_threads, torch.set_num_threads, _threads()),
    }


_ONEDNN: Any = torch.backends.mkldnn

_CUDNN: Any = torch.backends.cudnn

_PRECISE = (
    *((each, "none") for each in (torch.backends, _ONEDNN, _CUDNN)),
    *((each, "ieee") for each in (_ONEDNN.matmul, _ONEDNN.conv, torch.backends.cuda.matmul)),
)
"""What may compute float32 products in less precision (``torch.set_float32_matmul_precision`` sets some, too), and what
it is to do. What comes first decides on later parts that have ``none``, which alone is full precision."""


def _precision(backend: Any, value: str) -> tuple[Callable[[], Any], Callable[[Any], Any], Any]:
    return lambda: backend.fp32_precision, lambda given: _let(backend, given), value


def _let(backend: Any, given: str) -> None:
    """Set a precision; what it is a part of decides where that says the same, since both read alike."""
    backend.fp32_precision = "none"
    if backend.fp32_precision != given:
        backend.fp32_precision = given


def _convolutions() -> tuple[bool | None, str, str]:
    """What cuDNN may do: torch's older setting, which cannot be read where newer ones differ, and the newer ones."""
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


def _threads() -> int:
    """The threads of torch: one where the threads that there were may be gone, or do not round as this one will."""
    return 1 if copied() or _flushes() else torch.get_num_threads()


def _flushes() -> bool:
    """Whether this thread's processor takes the smallest numbers for 0, as a library built for speed can make it."""
    return bool(np.float64(5e-324) * np.float64(1) == 0)


@contextmanager
def neutral() -> Iterator[None]:
    """A block, or a function (``@neutral()``), that computes as in a fresh process, whatever was set in this one.

    Number and priority of the process's threads stay the user's, other than in a process that was forked from one that
    had imported the package: it computes in one thread.
    """
    if _HERE.within:
        yield
        return
    _HERE.within, me = True, threading.get_ident()
    try:
        with ExitStack() as stack:
            stack.enter_context(_settled(me))
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
def as_given() -> Iterator[None]:
    """Within ``neutral``, a block with the user's default type and device, on which a module's ``forward`` may rely."""
    mine = torch.get_default_dtype()
    with ExitStack() as stack:
        if _HERE.within and _HERE.device.type != "cpu":
            stack.enter_context(_HERE.device)
        stack.callback(torch.set_default_dtype, mine)
        torch.set_default_dtype(_WAS.get("dtype", mine))
        yield


@contextmanager
def _settled(me: int) -> Iterator[None]:
    """A block with neutral values of the settings that all threads share."""
    with _LOCK:
        if not _WITHIN:
            relax()
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
        _WITHIN.append(me)
    try:
        yield
    finally:
        with _LOCK:
            _WITHIN.remove(me)
            if not _WITHIN:
                for name, (read, put, _) in _shared().items():
                    if read() != _WAS[name]:
                        put(_WAS[name])
                if "warnings" in _WAS:
                    _WAS["warnings"].__exit__(None, None, None)
                _WAS.clear()
