"""Flat networks from ONNX files and torch modules, compared with their source; and ONNX files of flat networks."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifiable_relu.errors import InputError
from verifiable_relu.files import read_bytes
from verifiable_relu.ir.network import Network
from verifiable_relu.readers.onnx.compare import compare, compare_at, is_quantised, require_runs
from verifiable_relu.readers.onnx.model import EVERYTHING, MAX_BYTES, Chosen, require_onnx
from verifiable_relu.readers.onnx.read import read_flat
from verifiable_relu.settings import default_settings

if TYPE_CHECKING:
    from verifiable_relu.readers.onnx.write import write_onnx
    from verifiable_relu.readers.torch.reading import from_torch, runner

__all__ = [
    "EVERYTHING",
    "Chosen",
    "compare_at",
    "from_torch",
    "is_quantised",
    "onnx_bytes",
    "read_onnx",
    "runner",
    "write_onnx",
]


@default_settings()
def read_onnx(
    source: Path | str | bytes, name: str | None = None, chosen: Chosen = EVERYTHING, data: bytes | None = None
) -> Network:
    """Read a network from an ONNX file (gzipped or not) or from the bytes of one.

    Args:
        source: the path, or the file's bytes. Where ``NAME`` does not exist but ``NAME.gz`` does, that is read.
        name: the network's name; by default the file's stem.
        chosen: the tensors of the file that are the network's inputs and outputs.
        data: the bytes of the file that ``source`` names, unpacked, where they have been read (``onnx_bytes``).

    Raises:
        UnsupportedError: if an operator, or the form in which it is used, is not supported; names the node.
        InputError: if the file is missing, malformed, refused by the ONNX checker or by onnxruntime, holds NaN or
            infinite parameters, or does not compute what the network read from it computes.
    """
    path = None if isinstance(source, bytes) else Path(source)
    name = name or ("network" if path is None else Path(path.name.removesuffix(".gz")).stem)
    try:
        given = source if isinstance(source, bytes) else onnx_bytes(Path(source)) if data is None else data
        # A file with several inputs or outputs must run, too, with what the network leaves out of it.
        network, reading = read_flat(given, name, path and path.parent, chosen, require_runs)
        ops = reading.build.ops
        places = {name: value.op for name, value in reading.computed().items() if value.index is None}
        # Large files are in memory several times over by now.
        del reading
        compare(network, ops, places)
    except InputError as error:
        if path is None:
            raise
        raise error.located(path) from error
    return network


def onnx_bytes(path: Path) -> bytes:
    """Return the bytes of an ONNX file, unpacked; other files, and more than ``MAX_BYTES``, are refused."""
    return read_bytes(path, MAX_BYTES, require_onnx)


def __getattr__(name: str) -> Any:
    """Import the torch reader only when it is asked for: networks of files do not need it."""
    module = {"from_torch": "torch.reading", "runner": "torch.reading", "write_onnx": "onnx.write"}.get(name)
    if module is None:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
