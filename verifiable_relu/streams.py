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
    print(f"\x1b[31m{line}\x1b[0m" if coloured(stream) else line, file=stream, flush=True)


def coloured(stream: TextIO) -> bool:
    """Whether colours are for a stream: it is a terminal, and the user does not refuse them (``NO_COLOR``)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def guarded(command: str, work: Callable[[], int], debug: bool = False) -> int:
    """Run a command's work; every exception becomes one line on stderr.

    Args:
        command: its name, with which the line begins.
        work: returns the exit status.
        debug: whether an exception that is a fault of the program is raised.

    Returns:
        The exit status: that of the work, 2 for bad input, 130 after Ctrl-C, 1 for a fault of the program, 0 where the
        reader of stdout has ended before the work.
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
        if isinstance(error, BrokenPipeError) and _unread(sys.stdout):
            return 0
        if debug:
            raise
        complain(command, f"internal error: {type(error).__name__}: {error}")
        return 1


def own_stdout() -> TextIO:
    """Redirect the descriptor 1 to stderr; returns a new text file that writes to the former stdout.

    Raises:
        InputError: if stdout is closed.
    """
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
    """Write lines, as far as the reader of the file takes them."""
    try:
        print("\n".join(lines), file=out, flush=True)
    except BrokenPipeError:
        # The reader, such as ``head -1``, has ended. Writing the rest of the buffer at exit must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())


def _unread(out: TextIO) -> bool:
    """Whether the reader of a pipe, such as ``head -1``, has ended; then what is written to the pipe is dropped."""
    watched = select.poll()
    watched.register(out, 0)
    ended = any(event & select.POLLERR for _, event in watched.poll(0))
    if ended:
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
    return ended
