"""Reading VNN-LIB files, 1.0 and 2.0, told apart by their content."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from verifiable_relu.errors import InputError
from verifiable_relu.files import read_text
from verifiable_relu.spec import limits
from verifiable_relu.spec.specfile import SpecFile

_VERSION_2 = re.compile(r"^[^;\n]*\(\s*(?:vnnlib-version|declare-network)\b", re.MULTILINE)
_NETWORK = re.compile(r"^[ \t]*;+[ \t]*network:[ \t]*(\S.*?\.onnx(?:\.gz)?)[ \t\r]*$", re.MULTILINE | re.IGNORECASE)


def read_vnnlib(path: Path | str) -> SpecFile:
    """Read a property file, ``.vnnlib`` or ``.vnnlib.gz``.

    Raises:
        InputError: for what is no well-formed property, with file, line and reason.
        UnsupportedError: for a well-formed property that is no union of input boxes with output polytopes.
    """
    path = Path(path)
    text = read_text(path, limits.BYTES)
    try:
        if _VERSION_2.search(text):
            # Imported here, because only 2.0 files need the package vnnlib.
            from verifiable_relu.spec import vnnlib2

            spec = vnnlib2.parse(text, path)
        else:
            from verifiable_relu.spec import vnnlib1

            spec = vnnlib1.parse(text, path)
    except InputError as error:
        raise error.located(path) from None
    except RecursionError:
        raise InputError("conditions are nested too deeply", path=path) from None
    comment = _NETWORK.search(text)
    return replace(spec, network=comment.group(1)) if comment else spec
