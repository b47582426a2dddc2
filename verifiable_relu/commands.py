"""The table of commands: what ``verifiable-relu NAME`` runs. A command more is a row more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argparse import ArgumentParser

NAME = "verifiable-relu"


@dataclass(frozen=True)
class Command:
    """A command.

    Attributes:
        name: what the user types after ``verifiable-relu``.
        group: the heading of its group in the help.
        about: what it does, in a line.
        main: ``module:name`` of the function that runs it, which takes the arguments and returns the exit status.
        parser: ``module:name`` of the function that makes its parser, without arguments.
    """

    name: str
    group: str
    about: str
    main: str
    parser: str

    def run(self, arguments: Sequence[str]) -> int:
        """Run the command; returns the exit status."""
        status: int = _found(self.main)(arguments)
        return status

    def make_parser(self) -> ArgumentParser:
        """The parser of the command's arguments."""
        made: ArgumentParser = _found(self.parser)()
        return made


COMMANDS = (
    Command(
        "certify",
        "Verify",
        "answer VNN-LIB properties of ONNX networks: sat, unsat or unknown",
        "verifiable_relu.certify:alone",
        "verifiable_relu.certify_options:parser",
    ),
    Command(
        "compare",
        "Verify",
        "bound how far the outputs of two networks differ, and decide whether their answers do",
        "verifiable_relu.compare:main",
        "verifiable_relu.compare:parser",
    ),
    Command(
        "spec",
        "Verify",
        "write robustness properties of a classifier around images",
        "verifiable_relu.spec.__main__:main",
        "verifiable_relu.spec.__main__:parser",
    ),
    Command(
        "check",
        "Verify",
        "check a certificate without trusting who wrote it",
        "verifiable_relu.check.__main__:main",
        "verifiable_relu.check.__main__:parser",
    ),
    Command(
        "report",
        "Verify",
        "write one HTML page of a folder of results, and figures for papers",
        "verifiable_relu.report.__main__:main",
        "verifiable_relu.report.__main__:parser",
    ),
    Command(
        "train",
        "Train",
        "train with λ-GELU, replace the activation by ReLU, and write the network as ONNX",
        "verifiable_relu.train.__main__:main",
        "verifiable_relu.train.__main__:parser",
    ),
    Command(
        "harden",
        "Train",
        "harden a network of one's own: its smooth activations become ReLU by fine-tuning",
        "verifiable_relu.hardening.__main__:main",
        "verifiable_relu.hardening.__main__:parser",
    ),
    Command(
        "completion",
        "Shell",
        "print the completion of these commands for bash, zsh, tcsh or fish",
        "verifiable_relu.completion:main",
        "verifiable_relu.completion:parser",
    ),
)
"""All commands, those of one group together."""


def _found(function: str) -> Any:
    # Imported here, because other commands, and --help, need not wait for the import.
    module, _, name = function.partition(":")
    return getattr(import_module(module), name)
