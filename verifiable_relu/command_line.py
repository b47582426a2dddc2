"""The command line, for all commands: its parser, numbers that stay exact, answers on stdout and errors on stderr."""

from __future__ import annotations

import argparse
import atexit
import gc
import io
import math
import os
import re
import select
import sys
from collections.abc import Callable, Iterable
from fractions import Fraction
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, TextIO

from verifiable_relu.errors import LONGEST, InputError, printable

_NUMBER = re.compile(r"\s*[+-]?(?:[0-9]+(?:/[0-9]+|\.[0-9]*)?|\.[0-9]+)(?:e[+-]?[0-9]{1,3})?\s*", re.IGNORECASE)
ERASE = "\r\x1b[2K"  # Erases the line on a terminal
_LONGEST_NUMBER = 1_000  # Characters; an exact number with a large exponent could fill the memory, too


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one printable line of at most about ``LONGEST`` characters, and exit status 2.

    Error lines begin with ``label``. The first line of ``text`` comes in the help before the options, the others,
    unwrapped, after them. Whoever has a parser is a command: at the end of its process, Python looks for no unreachable
    cycles among objects, which takes a quarter of the processor time of starting up.
    """

    def __init__(self, label: str = "error", text: str | None = None, **options: Any) -> None:
        if text is not None:
            first, _, rest = text.partition("\n")
            options |= {"description": first, "epilog": rest, "formatter_class": argparse.RawDescriptionHelpFormatter}
        super().__init__(**options)
        self.label = label
        # Names of files and mathematics are text in UTF-8, whatever the terminal says that it takes.
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower().replace("-", "") != "utf8":
                stream.reconfigure(encoding="utf-8", errors="backslashreplace")
        atexit.unregister(gc.freeze)
        atexit.register(gc.freeze)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the command line; ``--option=--``, which argparse turns into an empty list, is an error."""
        for given in sys.argv[1:] if args is None else args:
            if given.startswith("-") and given.endswith("=--"):
                self.error(f"argument {given[:-3]}: '--' is not a value")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Print an error line to stderr and end the process with status 2."""
        self.exit(2, f"{self.label}: {printable(message, LONGEST)} (--help says more)\n")


def add_debug(to: argparse._ActionsContainer) -> None:
    """Add the option ``--debug``, with which ``guarded`` raises what is a fault of the program."""
    to.add_argument("--debug", action="store_true", help="show the traceback of a fault of the program")


def seconds(text: str) -> float:
    """Return a time limit on the command line: a positive, finite number of seconds."""
    try:
        limit = float(text)
    except ValueError:
        limit = math.nan
    if not 0 < limit < math.inf:
        raise argparse.ArgumentTypeError(f"'{text}' is not a positive number of seconds")
    return limit


def fraction(text: str) -> Fraction:
    """Return the exact value of a number such as ``1e-3``, or of a fraction such as ``2/255``; else a ValueError."""
    try:
        if len(text) <= _LONGEST_NUMBER and _NUMBER.fullmatch(text):
            return Fraction(text)
    except (ValueError, ZeroDivisionError):
        pass
    raise ValueError(f"'{printable(text, 40)}' is neither a number nor a fraction like 2/255")


def named_file(text: str) -> tuple[str, Path]:
    """Return the name and the file of ``NAME=FILE``."""
    name, separator, file = text.partition("=")
    if not (name and separator and file):
        raise argparse.ArgumentTypeError(f"'{text}' is not of the form NAME=FILE")
    return name, Path(file)


def imported(name: str, place: str) -> Any:
    """Return what ``package.module:name``, the value of the option ``place``, names; an InputError for nothing."""
    module, _, attribute = name.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(f"'{name}' cannot be imported: {error}", place=place) from error


def complain(command: str, message: object) -> None:
    """Print an error to stderr as one line, ``command: message``; in red where stderr is a terminal."""
    stream = sys.stderr
    if stream is None:
        return
    print(coloured(f"{command}: {printable(str(message))}", 31, stream), file=stream, flush=True)


def coloured(text: str, colour: int, stream: TextIO) -> str:
    """Return a text in a colour, by ANSI's number, where a stream is a terminal that shows colours."""
    shown = stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return f"\x1b[{colour}m{text}\x1b[0m" if shown else text


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
