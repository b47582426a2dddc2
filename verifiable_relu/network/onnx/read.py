"""Networks from ONNX files: read as flat ones (``readers.onnx``), and compared with what the file computes."""

from __future__ import annotations

from pathlib import Path

from verifiable_relu.errors import InputError
from verifiable_relu.files import read_bytes
from verifiable_relu.network.adapt import Nodes, as_graph
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Node
from verifiable_relu.network.onnx.compare import compare, require_runs
from verifiable_relu.readers.onnx.model import EVERYTHING, MAX_BYTES, Chosen, require_onnx
from verifiable_relu.readers.onnx.read import read_flat
from verifiable_relu.settings import neutral


@neutral()
def read_onnx(
    source: Path | str | bytes, name: str | None = None, chosen: Chosen = EVERYTHING, data: bytes | None = None
) -> Network:
    """Read a network from an ONNX file (gzipped or not) or from the bytes of one.

    Args:
        source: the path, or the file's bytes. Where ``NAME`` does not exist but ``NAME.gz`` does, that is read.
        name: what to call the network; by default the file's stem.
        chosen: the tensors of the file that are the network's inputs and outputs.
        data: the bytes of the file that ``source`` names, unpacked, where they have been read (``onnx_bytes``).

    Returns:
        The network with the weights' own bits; it computes what the file does in onnxruntime, up to rounding, at
        the points at which both were evaluated (``compare``). An input of rank ≥ 2 whose leading dimension is 1 or
        symbolic has a batch axis, which the network's shapes leave out; any other input is one sample. Of a file with
        several inputs or outputs, or with outputs that are left out, the network takes and gives one vector, in which
        they follow each other (``Network.ports``).

    Raises:
        UnsupportedError: if an operator, or the form in which it is used, is not supported; names the node.
        InputError: if the file is missing, malformed, refused by the ONNX checker or by onnxruntime, holds NaN or
            infinite parameters, or computes something else than the network that was read from it.
    """
    if isinstance(source, bytes):
        return _read(source, name or "network", None, chosen)
    path = Path(source)
    try:
        given = onnx_bytes(path) if data is None else data
        return _read(given, name or Path(path.name.removesuffix(".gz")).stem, path.parent, chosen)
    except InputError as error:
        raise error.located(path) from error


def onnx_bytes(path: Path) -> bytes:
    """Return the bytes of an ONNX file, unpacked.

    Raises:
        InputError: if the file cannot be read, is larger than ``MAX_BYTES``, or begins as no ONNX file does.
    """
    return read_bytes(path, MAX_BYTES, require_onnx)


def _read(data: bytes, name: str, folder: Path | None, chosen: Chosen) -> Network:
    # A file with several inputs or outputs must run, too, with what the network leaves out of it.
    flat, reading = read_flat(data, name, folder, chosen, require_runs)
    network, ops, values = as_graph(flat), reading.build.ops, reading.computed()

    def unmerged() -> tuple[list[Node], dict[str, int]]:
        made = Nodes(ops, flat.source.input_shape)
        in_place = {name: made.at[value.op] for name, value in values.items() if value.index is None}
        return made.nodes, {name: at for name, at in in_place.items() if at >= 0}

    # Large files are in memory several times over by now.
    del reading
    compare(network, unmerged)
    return network
