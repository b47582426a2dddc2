"""The command ``completion``: a script that completes the commands' names, options and files in a shell."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from verifiable_relu.__main__ import COMMANDS, NAME
from verifiable_relu.command_line import Parser, guarded
from verifiable_relu.errors import missing
from verifiable_relu.rounding import ARITHMETICS
from verifiable_relu.search.registry import methods

SHELLS = ("bash", "zsh", "tcsh", "fish")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the script for a shell; returns the exit status."""
    shell = parser().parse_args(arguments).shell
    return guarded("completion", lambda: _print(shell))


def parser() -> Parser:
    """The parser of the command line."""
    made = Parser(
        label="completion",
        prog=f"{NAME} completion",
        description="Print a script that completes the commands in a shell.",
        epilog=f'bash: put  eval "$({NAME} completion bash)"  into ~/.bashrc; '
        f"zsh: {NAME} completion zsh > a file _{NAME} in a folder of $fpath; "
        f"fish: {NAME} completion fish > ~/.config/fish/completions/{NAME}.fish.",
    )
    made.add_argument("shell", choices=SHELLS)
    return made


def _print(shell: str) -> int:
    named = {"method": tuple(methods()), "arithmetic": ("real", *ARITHMETICS)}
    parsers = {command.name: command.load().parser() for command in COMMANDS}
    for action in (action for made in parsers.values() for action in made._actions):
        # Options whose values are names have these.
        action.choices = action.choices or named.get(action.dest)
    try:
        import shtab
    except ModuleNotFoundError:
        raise missing("completion", "shtab") from None
    whole = argparse.ArgumentParser(NAME)
    commands = whole.add_subparsers()
    for command in COMMANDS:
        for action in parsers[command.name]._actions:
            if action.type is Path:
                action.complete = shtab.DIRECTORY if action.metavar == "DIR" else shtab.FILE
        # The help of each command is in its own parser already.
        commands.add_parser(command.name, help=command.about, parents=[parsers[command.name]], add_help=False)
    print(shtab.complete(whole, shell))
    return 0
