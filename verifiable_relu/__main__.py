"""The command ``verifiable-relu``, which runs one of a table of commands; those of one group stand together."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from verifiable_relu import __version__
from verifiable_relu.command_line import Parser

NAME = "verifiable-relu"


@dataclass(frozen=True)
class Command:
    """A command: what the user types, the heading of its group in the help, its module, and what it does.

    The module has functions ``main``, which takes the arguments and returns the exit status, and ``parser``.
    """

    name: str
    group: str
    module: str
    about: str

    def load(self) -> Any:
        """Import the module, for which other commands, and --help, need not wait."""
        return import_module(f"verifiable_relu.{self.module}")


COMMANDS = (
    Command("certify", "Verify", "certify.__main__", "answer VNN-LIB properties of ONNX networks"),
    Command("compare", "Verify", "compare", "bound how far two networks' outputs differ, and whether their answers do"),
    Command("spec", "Verify", "spec.__main__", "write robustness properties of a classifier around images"),
    Command("check", "Verify", "check.__main__", "check a certificate without trusting who wrote it"),
    Command("report", "Verify", "report.__main__", "write one HTML page of results, and figures for papers"),
    Command("train", "Train", "train.__main__", "train with λ-GELU, swap in ReLU, and write the network as ONNX"),
    Command("harden", "Train", "hardening.__main__", "harden a network of one's own to ReLU by fine-tuning"),
    Command("completion", "Shell", "completion", "print the completion of these commands for bash, zsh, tcsh or fish"),
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
            return int(command.load().main(given[1:]))
    names = [command.name for command in COMMANDS]
    near = get_close_matches(given[0], names, 1)
    made.error(f"no command '{given[0]}'; " + (f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"))


def parser() -> Parser:
    """The parser of the options before the command, whose help lists the commands by group."""
    lines: list[str] = []
    for number, command in enumerate(COMMANDS):
        if number == 0 or command.group != COMMANDS[number - 1].group:
            lines += ["", f"{command.group}:"]
        lines.append(f"  {command.name:<12}{command.about}")
    about = "\n".join(["Train with λ-GELU, harden to ReLU, and prove properties of the network.", *lines])
    made = Parser(
        label=NAME,
        prog=NAME,
        usage=f"{NAME} COMMAND ...",
        epilog=f"{NAME} COMMAND --help says more.",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--version", action="version", version=f"{NAME} {__version__}")
    return made


if __name__ == "__main__":
    sys.exit(main())
