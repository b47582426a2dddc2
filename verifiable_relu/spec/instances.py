"""The reading and writing of ``instances.csv``: a line ``onnx,vnnlib,timeout`` for each instance.

The format is the verification competition's (VNN-COMP).
"""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from verifiable_relu.errors import InputError
from verifiable_relu.files import read_lines
from verifiable_relu.spec import limits


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
