"""Answer properties of neural networks: does some input of the box reach the unsafe set?

The help (``certify_options.ABOUT``) says what the command prints and how it exits.
"""

from __future__ import annotations

from collections.abc import Sequence

from verifiable_relu.certify_options import parse, parser
from verifiable_relu.streams import guarded


def main(arguments: Sequence[str] | None = None, alone: bool = False) -> int:
    """Run the command; returns the exit status.

    Args:
        arguments: the command line's arguments; by default those of the process.
        alone: whether the process runs this command only. Then everything that libraries print to stdout, those in C
            included, goes to stderr from now on, so that stdout has the answers alone.
    """
    options = parse(parser(), arguments)

    def work() -> int:
        # Imported here, because --help need not wait for it.
        from verifiable_relu.certify.start import start

        return start(options, alone)

    return guarded("certify", work, options.debug)


def alone(arguments: Sequence[str] | None = None) -> int:
    """Run the command as the only one of its process (``main``); returns the exit status."""
    return main(arguments, alone=True)
