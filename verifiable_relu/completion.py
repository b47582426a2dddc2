"""The command ``completion``: a script that completes the commands' names, options and files in a shell."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from shlex import quote

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
    if shell == "fish":
        print("\n".join(_fish(parsers)))
        return 0
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


def _fish(parsers: dict[str, argparse.ArgumentParser]) -> Iterator[str]:
    """The script for fish, of which shtab knows nothing."""
    begin = f"complete -c {NAME}"
    for command in COMMANDS:
        yield f"{begin} -f -n __fish_use_subcommand -a {command.name} -d {quote(command.about)}"
    for name, parser in parsers.items():
        for action in parser._actions:
            words = [f"{begin} -n '__fish_seen_subcommand_from {name}'"]
            words += [f"-{'l' if o.startswith('--') else 's'} {o.lstrip('-')}" for o in action.option_strings]
            if action.choices is not None:
                words.append(f"-x -a {quote(' '.join(map(str, action.choices)))}")
            elif action.option_strings and action.nargs != 0:
                words.append("-r")
            if action.help and action.option_strings:
                words.append(f"-d {quote(action.help.replace('%%', '%')[:60])}")
            if action.option_strings or action.choices is not None:
                yield " ".join(words)
