"""How OpenMP's threads wait for one another.

By default they wait in busy loops. Where other processes, or other guests of a virtual machine, use the same cores,
computations took up to fifty times longer. OpenMP reads ``OMP_WAIT_POLICY`` when torch is loaded, and not after.
"""

from __future__ import annotations

import os
import threading
from functools import cache

from verifiable_relu import COPIED, TORCH_CAME_FIRST


def copied() -> bool:
    """Whether this process was forked when torch was there, whose threads OpenMP would wait for, and they are gone."""
    return bool(COPIED)


@cache
def relax() -> None:
    """Have threads wait without work for their cores, where torch was loaded before this module.

    A thread of GNU's OpenMP that waits gives up its core after a moment if OpenMP has more threads in all than there
    are cores. A team of so many threads, which sleep for ever, makes that true.
    """
    if not TORCH_CAME_FIRST:
        return
    import ctypes
    from pathlib import Path

    import torch

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
