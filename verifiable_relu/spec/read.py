"""Reading VNN-LIB files, 1.0 and 2.0, told apart by their content."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from verifiable_relu.errors import InputError
from verifiable_relu.files import read_text
from verifiable_relu.spec import limits
from verifiable_relu.spec.lexical import source
from verifiable_relu.spec.specfile import SpecFile


def read_vnnlib(path: Path | str) -> SpecFile:
    """Read a property file, ``.vnnlib`` or ``.vnnlib.gz``; it is 2.0 if its first command is one of 2.0 only.

    Raises:
        InputError: for what is no well-formed property or beyond ``spec.limits``, with file, line and reason.
        UnsupportedError: for a well-formed property that is no union of input boxes with output polytopes.
    """
    path = Path(path)
    try:
        found = parse(read_text(path, limits.BYTES), path)
    except InputError as error:
        raise error.located(path) from None
    except RecursionError:
        raise InputError("conditions are nested too deeply", path=path) from None
    except MemoryError:
        raise InputError("too large for the memory that is left", path=path) from None
    return found


def parse(text: str, path: Path) -> SpecFile:
    """Read the text of a property file; ``path`` names the properties.

    Raises:
        InputError, UnsupportedError: with the place, without the file.
    """
    found = source(text)
    # Each version is imported when a file needs it: the package vnnlib takes its time.
    if found.first_words(2) in (["(", "vnnlib-version"], ["(", "declare-network"]):
        from verifiable_relu.spec import vnnlib2

        spec = vnnlib2.parse(found, path)
    else:
        from verifiable_relu.spec import vnnlib1

        spec = vnnlib1.parse(found, path)
    return replace(spec, network=found.network)
