"""The command ``verifiable-relu``, which runs one of the commands of the table ``commands.COMMANDS``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from difflib import get_close_matches

from verifiable_relu import __version__
from verifiable_relu.arguments import Parser
from verifiable_relu.commands import COMMANDS, NAME


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
            return command.run(given[1:])
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
    made = Parser(
        label=NAME,
        prog=NAME,
        usage=f"{NAME} COMMAND ...",
        description="Train with λ-GELU, harden to ReLU, and prove properties of the network.\n" + "\n".join(lines),
        epilog=f"{NAME} COMMAND --help says more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--version", action="version", version=f"{NAME} {__version__}")
    return made


if __name__ == "__main__":
    sys.exit(main())
