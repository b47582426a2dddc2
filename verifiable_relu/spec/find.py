"""Which network belongs to a property file: lists of instances (`instances.csv`), and the search for an ONNX file.

A line `onnx,vnnlib,timeout` of a list is an instance. The format is the verification competition's (VNN-COMP).
"""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import dropwhile
from pathlib import Path
from typing import TYPE_CHECKING

from verifiable_relu.errors import InputError, path_end
from verifiable_relu.files import on_disk, read_lines
from verifiable_relu.spec import limits
from verifiable_relu.spec.property import Query
from verifiable_relu.spec.specfile import SpecFile, stem

if TYPE_CHECKING:
    from verifiable_relu.network.graph import Network


@dataclass(frozen=True)
class Instance:
    """One row of an ``instances.csv``.

    Attributes:
        onnx: the network's file, joined to the folder of the table; only the file with ``.gz`` appended may exist
            (:func:`verifiable_relu.files.on_disk`).
        vnnlib: the property file, likewise.
        timeout: the time limit in seconds.
    """

    onnx: Path
    vnnlib: Path
    timeout: float


def read_instances(path: Path | str) -> list[Instance]:
    """The rows of an ``instances.csv`` in their order (``each_instance``), all at once.

    Raises:
        InputError: if the file is missing or no text, or if a row is not two file names and a number of seconds.
    """
    return list(each_instance(path))


def each_instance(path: Path | str) -> Iterator[Instance]:
    """The rows of an ``instances.csv`` in their order, read as they are asked for; empty lines are skipped.

    Raises:
        InputError: if the file is missing or no text, or if a row is not two file names and a number of seconds, when
            that row is reached.
    """
    path = Path(path)
    reader = csv.reader(read_lines(path, limits.ROW), strict=True)
    while True:
        try:
            row = next(reader, None)
            if row is None:
                return
            found = _instance([field.strip(" \t\r\n") for field in row], path.parent) if row else None
        except (csv.Error, InputError) as error:
            located = error if isinstance(error, InputError) and error.path is not None else None
            raise located or InputError(str(error), path=path, place=f"line {reader.line_num}") from None
        if found is not None:
            yield found


def _instance(row: list[str], folder: Path) -> Instance:
    if len(row) != 3:
        raise InputError(f"the row has {len(row)} fields where onnx, vnnlib and timeout are expected")
    onnx, vnnlib, timeout = row
    if not onnx or not vnnlib:
        raise InputError("a file name is empty")
    try:
        seconds = float(timeout)
    except ValueError:
        raise InputError(f"'{timeout}' is no number of seconds") from None
    if not 0 < seconds < math.inf:
        raise InputError(f"the timeout is {timeout} s, which is not positive and finite")
    return Instance(folder / onnx, folder / vnnlib, seconds)


def instances(path: Path) -> tuple[Iterator[tuple[Path, Path | None, float | None]], int]:
    """The instances of an ``instances.csv`` or a folder: property file, network's file and time limit in seconds.

    A folder with an ``instances.csv`` has the instances that this table lists; any other folder has one for each
    property file in it and below it, with None for the network's file and the time limit.

    Args:
        path: the table or the folder.

    Returns:
        The instances, which a table is read for as they are asked for, and their number; of a table, that of its lines
        that are not empty.

    Raises:
        InputError: if there are no instances, or if the table cannot be read; the iterator raises it for a bad row.
    """
    # The methods of Path raise for a name that is too long.
    table = path / "instances.csv" if os.path.isdir(path) else path
    if os.path.isfile(table) or not os.path.isdir(path):
        count = sum(bool(line.strip()) for line in read_lines(table, limits.ROW))
        if not count:
            raise InputError("the table lists no instance", path=table)
        return ((row.vnnlib, row.onnx, row.timeout) for row in each_instance(table)), count
    found = sorted(file for pattern in ("*.vnnlib", "*.vnnlib.gz") for file in path.rglob(pattern))
    if not found:
        raise InputError("there is no property file in or below the folder", path=path)
    return ((file, None, None) for file in found), len(found)


def write_instances(path: Path | str, instances: Iterable[Instance]) -> None:
    """Write an ``instances.csv``, with file names relative to its folder.

    Raises:
        InputError: if the file cannot be written.
    """
    path = Path(path)
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    for instance in instances:
        names = [Path(os.path.relpath(file, path.parent)).as_posix() for file in (instance.onnx, instance.vnnlib)]
        writer.writerow([*names, f"{instance.timeout:g}"])
    try:
        path.write_text(buffer.getvalue(), encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", path=path) from None


_FOLDERS = 3
_LISTED = 5


def find_network(
    spec: SpecFile, net: Path | str | None = None, networks: Mapping[str, Path | str] | None = None
) -> Path:
    """The ONNX file of a property file's network, which is an existing file.

    The first of these sources that names a file decides:

    1. ``net``;
    2. a comment ``; network: x.onnx`` in the property file, relative to that file's folder;
    3. ``networks``, by the name of the network that a VNN-LIB 2.0 file declares;
    4. the property file's row in the ``instances.csv`` of its folder or of one of the two folders above (the
       verification competition keeps properties in a folder of their own);
    5. the file ``*.onnx`` in the property file's folder that has the property file's name or is the only one.

    A name ``x.onnx`` means ``x.onnx.gz`` where only that file exists.

    Raises:
        InputError: if no source names a file (the message lists the sources), if the named file does not exist, if
            ``networks`` has a name that the property file does not declare or a file other than the comment's, or if
            rows of ``instances.csv`` name different networks.
    """
    folder = spec.path.parent
    for name in networks or {}:
        if name not in spec.networks:
            declared = f"it declares {', '.join(spec.networks)}" if spec.networks else "VNN-LIB 1.0 names no network"
            raise InputError(f"no network '{name}' is declared; {declared}", path=spec.path)
    chosen = next(iter((networks or {}).values()), None)
    if net is not None:
        return _existing(Path(net), "--net", spec)
    if spec.network is not None:
        commented = _existing(folder / spec.network, "the network comment", spec)
        if chosen is not None and not commented.samefile(_existing(Path(chosen), "--network", spec)):
            raise InputError(
                f"--network names {chosen}, but the network comment names {spec.network}; choose one with --net",
                path=spec.path,
            )
        return commented
    if chosen is not None:
        return _existing(Path(chosen), "--network", spec)
    found = _in_instances(spec) or _sibling(spec)
    if found is None:
        siblings = len(_networks_in(folder))
        raise InputError(
            "no network is named: neither --net, nor a '; network: file.onnx' comment, nor --network name=file, nor "
            f"a row of instances.csv in {folder} or two folders above, nor is there {stem(spec.path)}.onnx or a single "
            f".onnx beside it ({siblings} there)",
            path=spec.path,
        )
    return found


def queries(spec: SpecFile, network: Network) -> list[Query]:
    """The queries of a property file about a network, one for each of the file's properties.

    The file's answer joins theirs: *sat* if any is *sat*, *unsat* if all are *unsat*.

    VNN-LIB 1.0 numbers the elements of a network's input and output in row-major order, whatever their shapes. A 2.0
    file declares shapes, which must be the network's; leading axes of length 1 do not count, because a network may have
    a batch axis or none.

    Raises:
        InputError: if the file declares another number or another shape of inputs or outputs than the network has.
    """
    for role, declared, actual in (
        ("input", spec.inputs, network.input_shape),
        ("output", spec.outputs, network.output_shape),
    ):
        size = math.prod(actual)
        if declared.size != size:
            raise InputError(
                f"{declared.size} {role}s are declared, but the network '{network.name}' has {size}", path=spec.path
            )
        if spec.version != "1.0" and without_batch(declared.shape) != without_batch(actual):
            raise InputError(
                f"the {role} {declared.name} is declared with shape {list(declared.shape)}, but the network "
                f"'{network.name}' has {list(actual)}",
                path=spec.path,
            )
    return [Query(network, prop) for prop in spec.properties]


def without_batch(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without its leading axes of length 1: a network may have a batch axis or none."""
    return tuple(dropwhile(lambda extent: extent == 1, shape))


def _existing(path: Path, source: str, spec: SpecFile) -> Path:
    found = on_disk(path)
    # Path.is_file raises for a name that is too long.
    if not os.path.isfile(found):
        raise InputError(f"the network {path_end(path)} that {source} names does not exist", path=spec.path)
    return found


def _in_instances(spec: SpecFile) -> Path | None:
    mine = _plain(spec.path)
    for folder in mine.parents[:_FOLDERS]:
        csv = folder / "instances.csv"
        if not os.path.isfile(csv):
            continue
        status = csv.stat()
        rows = _listed(csv, status.st_mtime_ns, status.st_size).get(mine.name, ())
        named = list(dict.fromkeys(onnx for onnx, vnnlib in rows if _plain(vnnlib) == mine))
        if len(named) > 1:
            shown = ", ".join(path.name for path in named[:_LISTED]) + (" …" if len(named) > _LISTED else "")
            message = f"{csv} names {len(named)} networks for this property ({shown}); choose one with --net"
            raise InputError(message, path=spec.path)
        if named:
            return _existing(named[0], str(csv), spec)
    return None


@lru_cache(maxsize=_FOLDERS)
def _listed(csv: Path, changed: int, size: int) -> dict[str, list[tuple[Path, Path]]]:
    """The networks and properties of a table, by the properties' names, since resolving all paths takes long.

    ``changed`` and ``size`` are the table's: another table at the same path is read again.
    """
    found: dict[str, list[tuple[Path, Path]]] = {}
    for row in read_instances(csv):
        found.setdefault(row.vnnlib.name.removesuffix(".gz"), []).append((row.onnx, row.vnnlib))
    return found


def _plain(path: Path) -> Path:
    return path.resolve().with_name(path.name.removesuffix(".gz"))


def _sibling(spec: SpecFile) -> Path | None:
    there = _networks_in(spec.path.parent)
    same = [path for path in there if stem(path) == stem(spec.path)]
    return same[0] if same else there[0] if len(there) == 1 else None


def _networks_in(folder: Path) -> list[Path]:
    """The ONNX files in a folder; a gzipped file is left out where its unpacked form is beside it."""
    plain = sorted(folder.glob("*.onnx"))
    return plain + [path for path in sorted(folder.glob("*.onnx.gz")) if path.with_suffix("") not in plain]
