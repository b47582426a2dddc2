"""The parser of command lines that all commands share, and the reading of numbers that stay exact."""

from __future__ import annotations

import argparse
import atexit
import gc
import io
import math
import re
import sys
from fractions import Fraction
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from verifiable_relu.errors import LONGEST, InputError, printable

_NUMBER = re.compile(r"\s*[+-]?(?:[0-9]+(?:/[0-9]+|\.[0-9]*)?|\.[0-9]+)(?:e[+-]?[0-9]{1,3})?\s*", re.IGNORECASE)
_LONGEST_NUMBER = 1_000  # Characters; an exact number with a large exponent could fill the memory, too


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one printable line of at most about ``LONGEST`` characters, and exit status 2.

    Whoever has one is a command, whose process ends soon after: at its end, Python then looks for no unreachable cycles
    among the objects of torch and the other libraries, which takes a quarter of the processor time of starting up.

    Error lines begin with ``label``. The first line of ``text`` comes in the help before the options, the others,
    unwrapped, after them, instead of a description and an epilog.
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
        """Parse the command line; ``--option=--``, of which argparse makes an empty list, is an error."""
        for given in sys.argv[1:] if args is None else args:
            if given.startswith("-") and given.endswith("=--"):
                self.error(f"argument {given[:-3]}: '--' is no value")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Print an error line to stderr and end the process with status 2."""
        self.exit(2, f"{self.label}: {printable(message, LONGEST)} (--help says more)\n")


def add_debug(to: argparse._ActionsContainer) -> None:
    """Add the option ``--debug``, with which ``streams.guarded`` raises what is a fault of the program."""
    to.add_argument("--debug", action="store_true", help="show the traceback of a fault of the program")


def seconds(text: str) -> float:
    """A time limit on the command line: a positive, finite number of seconds."""
    try:
        limit = float(text)
    except ValueError:
        limit = math.nan
    if not 0 < limit < math.inf:
        raise argparse.ArgumentTypeError(f"'{text}' is no positive number of seconds")
    return limit


def fraction(text: str) -> Fraction:
    """The exact value of a number such as ``1e-3``, or of a fraction such as ``2/255``; else a ValueError."""
    try:
        if len(text) <= _LONGEST_NUMBER and _NUMBER.fullmatch(text):
            return Fraction(text)
    except (ValueError, ZeroDivisionError):
        pass
    raise ValueError(f"'{printable(text, 40)}' is neither a number nor a fraction like 2/255")


def named_file(text: str) -> tuple[str, Path]:
    """The name and the file of ``NAME=FILE``."""
    name, separator, file = text.partition("=")
    if not (name and separator and file):
        raise argparse.ArgumentTypeError(f"'{text}' is not of the form NAME=FILE")
    return name, Path(file)


def scheduler(text: str) -> str:
    """The address of a Dask scheduler, ``dask://HOST:PORT``."""
    if not re.fullmatch(r"dask://[^\s/:]+:[0-9]{1,5}", text):
        raise argparse.ArgumentTypeError(f"'{printable(text, 80)}' is not of the form dask://HOST:PORT")
    return text


def imported(name: str, place: str) -> Any:
    """What ``package.module:name``, the value of the option ``place``, names; an InputError if there is none."""
    module, _, attribute = name.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(f"'{name}' cannot be imported: {error}", place=place) from error
