"""The streams of commands: answers on stdout, one line for each error on stderr."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Iterable
from typing import TextIO

from verifiable_relu.errors import InputError, printable


def complain(command: str, message: object) -> None:
    """Print an error to stderr as one line, ``command: message``; in red where stderr is a terminal."""
    stream = sys.stderr
    if stream is None:
        return
    line = f"{command}: {printable(str(message))}"
    coloured = stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    print(f"\x1b[31m{line}\x1b[0m" if coloured else line, file=stream, flush=True)


def guarded(command: str, work: Callable[[], int], debug: bool = False) -> int:
    """Run a command's work; every exception becomes one line on stderr, or is raised if ``debug`` and no user's fault.

    Returns the exit status: that of the work, 2 for bad input, 130 after Ctrl-C, 1 for a fault of the program, 0 where
    the reader of stdout has ended before the work.
    """
    try:
        return work()
    except InputError as error:
        complain(command, error)
        return 2
    except KeyboardInterrupt:
        complain(command, "interrupted")
        return 130
    except Exception as error:
        if isinstance(error, BrokenPipeError):
            watched = select.poll()
            watched.register(sys.stdout, 0)
            if any(event & select.POLLERR for _, event in watched.poll(0)):
                # The reader of the pipe has ended.
                _drop(sys.stdout)
                return 0
        if debug:
            raise
        complain(command, f"internal error: {type(error).__name__}: {error}")
        return 1


def own_stdout() -> TextIO:
    """Lead the descriptor 1 to stderr; returns a new text file that writes to the former stdout, if that is open."""
    if sys.stderr is None:
        # Stderr is closed. Its descriptor is occupied, so that no file that is opened later takes it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        out = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise InputError(f"stdout cannot be written: {error.strerror}") from None
    os.dup2(2, 1)
    return out


def write(lines: Iterable[str], out: TextIO) -> None:
    """Write lines, as far as the reader of the file, such as ``head -1``, takes them."""
    try:
        print("\n".join(lines), file=out, flush=True)
    except BrokenPipeError:
        _drop(out)


def _drop(out: TextIO) -> None:
    """Lead a file nowhere: writing the rest of its buffer at exit must not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
