"""The reading of VNN-LIB files, whose content tells whether they are 1.0 or 2.0."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from verifiable_relu.errors import InputError
from verifiable_relu.files import read_text
from verifiable_relu.spec import limits
from verifiable_relu.spec.lexical import source
from verifiable_relu.spec.specfile import SpecFile


def read_vnnlib(path: Path | str, text: str | None = None) -> SpecFile:
    """Read a property file, ``.vnnlib`` or ``.vnnlib.gz``.

    A file whose first command exists in VNN-LIB 2.0 only is read as 2.0, any other file as 1.0.

    Args:
        path: the file.
        text: its text, where that has been read.

    Raises:
        InputError: if the file is no well-formed property or exceeds ``spec.limits``; with file, line and reason.
        UnsupportedError: for a well-formed property that is no union of input boxes with output polytopes.
    """
    path = Path(path)
    try:
        found = parse(read_text(path, limits.BYTES) if text is None else text, path)
    except InputError as error:
        raise error.located(path) from None
    except RecursionError:
        raise InputError("conditions are nested too deeply", path=path) from None
    except MemoryError:
        raise InputError("reading the file takes more memory than there is", path=path) from None
    return found


def parse(text: str, path: Path) -> SpecFile:
    """Read the text of a property file; the properties are named after ``path``.

    Raises:
        InputError, UnsupportedError: as ``read_vnnlib`` does, but naming no file.
    """
    found = source(text)
    # Imported here, because the import of the package vnnlib, which 2.0 alone needs, takes long.
    if found.first_words(2) in (["(", "vnnlib-version"], ["(", "declare-network"]):
        from verifiable_relu.spec import vnnlib2

        spec = vnnlib2.parse(found, path)
    else:
        from verifiable_relu.spec import vnnlib1

        spec = vnnlib1.parse(found, path)
    return replace(spec, network=found.network)
