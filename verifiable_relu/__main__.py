"""The command ``verifiable-relu``, which runs one of a table of commands; those of one group stand together."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import NamedTuple

from verifiable_relu import __version__
from verifiable_relu.command_line import Parser

NAME = "verifiable-relu"


class Command(NamedTuple):
    """A command: its name, the heading of its group in the help, its module with ``main``, and a line about it."""

    name: str
    group: str
    module: str
    about: str


COMMANDS = (
    Command("certify", "Verify", "certify.__main__", "answer VNN-LIB properties of ONNX networks"),
    Command("compare", "Verify", "compare", "bound how far two networks' outputs differ, and whether their answers do"),
    Command("spec", "Verify", "spec.__main__", "write robustness properties of a classifier around images"),
    Command("check", "Verify", "check.__main__", "check a certificate without trusting who wrote it"),
    Command("report", "Verify", "report.__main__", "write one HTML page of results, and figures for papers"),
    Command("train", "Train", "train.__main__", "train with λ-GELU, swap in ReLU, and write the network as ONNX"),
    Command("harden", "Train", "hardening.__main__", "harden a network of one's own to ReLU by fine-tuning"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the first argument names, with the others; returns the exit status."""
    made = parser()
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given:
        made.print_help()
        return 0
    if given[0].startswith("-"):
        # --help and --version end the process; there are no other options.
        made.parse_args(given[:1])
    for command in COMMANDS:
        if command.name == given[0]:
            # The other commands, and --help, need not wait for its module.
            return int(import_module(f"verifiable_relu.{command.module}").main(given[1:]))
    names = [command.name for command in COMMANDS]
    near = get_close_matches(given[0], names, 1)
    made.error(f"no command '{given[0]}'; " + (f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"))


def parser() -> Parser:
    """Return the parser of the options before the command, whose help lists the commands by group."""
    lines: list[str] = []
    for number, command in enumerate(COMMANDS):
        if number == 0 or command.group != COMMANDS[number - 1].group:
            lines += ["", f"{command.group}:"]
        lines.append(f"  {command.name:<12}{command.about}")
    about = "\n".join(["Train with λ-GELU, harden to ReLU, and prove properties of the network.", *lines])
    more, shown = f"{NAME} COMMAND --help says more.", argparse.RawDescriptionHelpFormatter
    usage = f"{NAME} COMMAND ..."
    made = Parser(NAME, prog=NAME, usage=usage, epilog=more, description=about, formatter_class=shown)
    made.add_argument("--version", action="version", version=f"{NAME} {__version__}")
    return made


if __name__ == "__main__":
    sys.exit(main())
