"""From the method and the files that a user names to the verifier and the instances that a campaign takes."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from verifiable_relu.campaign.result import Result
from verifiable_relu.campaign.runner import Case, unasked
from verifiable_relu.errors import InputError
from verifiable_relu.network import EVERYTHING, Chosen, Network, compare_at, read_onnx
from verifiable_relu.network.device import require_device
from verifiable_relu.settings import neutral
from verifiable_relu.spec import Property, find_network, queries, read_instances, read_vnnlib
from verifiable_relu.verifiers.base import Verifier
from verifiable_relu.verifiers.registry import make


def verifier(method: str, device: str = "cpu", memory: int | None = None, processes: int = 1) -> Verifier:
    """The verifier of a name, on a torch device that exists.

    Args:
        method: the verifier's name.
        device: the torch device on which it runs.
        memory: the bytes that its bounds may hold at once, approximately; None leaves the verifier's own limit.
        processes: how many processes may share the work on a query; a method that cannot share it uses one.

    Raises:
        InputError: for an unknown name, a device that torch does not have, a limit that is no positive integer, or a
            device or a limit where the verifier takes none.
    """
    made = make(method, device, None if memory is None else _memory_limit(memory), processes)
    require_device(device)
    return made


def _memory_limit(size: int) -> int:
    """A limit of memory in bytes, as an ``int`` whatever integer type it came in, so that equal options look alike.

    Raises:
        InputError: if the limit is no positive integer.
    """
    try:
        limit = operator.index(size)
    except TypeError:
        limit = 0
    if limit <= 0:
        raise InputError(f"a limit of memory is a positive whole number of bytes, not {size!r}")
    return int(limit)


def time_limit(seconds: float) -> float:
    """A time limit in seconds, unchanged.

    Raises:
        InputError: if the limit is not positive and finite.
    """
    if not (seconds > 0 and math.isfinite(seconds)):
        raise InputError(f"a time limit is a positive number of seconds, not {seconds}")
    return seconds


@dataclass(frozen=True)
class Entry:
    """An instance as a user names it, before any file is read.

    Attributes:
        vnnlib: the property file.
        onnx: the network's file; None where it is searched for (``spec.find_network``).
        timeout: the time limit in seconds.
    """

    vnnlib: Path
    onnx: Path | None
    timeout: float


_COMPARED_BOXES = 4
"""The most boxes of a property file at whose points the network as read is compared with its ONNX file."""


class Loader:
    """A reader of instances, which reads a network that several instances share once.

    Args:
        networks: the networks' files, by the names that VNN-LIB 2.0 files declare.
        prepare: a function that every network goes through once it was read, such as ``network.hardened``; it may raise
            an InputError. None leaves the networks as they are. A loader with a function that can be pickled can be
            pickled, too.
    """

    def __init__(
        self,
        networks: Mapping[str, Path] | None = None,
        prepare: Callable[[Network], Network] | None = None,
    ) -> None:
        self.networks = dict(networks or {})
        self.prepare = prepare
        self._read: dict[tuple[Path, Chosen], Network | InputError] = {}

    def network(self, path: Path, chosen: Chosen = EVERYTHING) -> Network:
        """The network of an ONNX file, read on the first call only.

        Args:
            path: the file.
            chosen: the tensors of the file that are the network's inputs and outputs.

        Raises:
            InputError: as ``read_onnx`` and ``prepare`` do; a later call raises the same error without reading again.
        """
        where = path.resolve(), chosen
        if where not in self._read:
            try:
                with _bounded(path):
                    network = read_onnx(path, chosen=chosen)
                    self._read[where] = network if self.prepare is None else self.prepare(network)
            except InputError as error:
                self._read[where] = error.located(path)
        found = self._read[where]
        if isinstance(found, InputError):
            raise found
        return found

    def knows(self, path: Path, chosen: Chosen = EVERYTHING) -> bool:
        """Whether the network of a file, with these inputs and outputs, has been read."""
        return (path.resolve(), chosen) in self._read

    def forget(self, kept: Collection[Path]) -> None:
        """Drop the networks that were read, but for those of the files ``kept``."""
        still = {path.resolve() for path in kept}
        self._read = {key: found for key, found in self._read.items() if key[0] in still}

    @neutral()
    def case(self, entry: Entry) -> Case:
        """The instance that a property file and a network make.

        Raises:
            InputError: if a file is bad, the network's file is not found, or property and network do not fit together.
        """
        with _bounded(entry.vnnlib):
            spec = read_vnnlib(entry.vnnlib)
            path = entry.onnx if entry.onnx is not None else find_network(spec, None, self.networks)
        network = self.network(path)
        with _bounded(entry.vnnlib):
            asked = tuple(queries(spec, network))
        believe(network, spec.properties, path)
        return Case(str(path), str(entry.vnnlib), asked, entry.timeout, spec)

    def read(self, entry: Entry, debug: bool = False) -> Case | Result:
        """The instance, or the result that says why it cannot be read.

        Args:
            entry: the instance as the user names it.
            debug: whether an exception that is a fault of the program is raised.
        """
        try:
            return self.case(entry)
        except Exception as error:
            if debug and not isinstance(error, InputError):
                raise
            return unasked(str(entry.onnx or ""), str(entry.vnnlib), error, entry.timeout)


def believe(network: Network, properties: Sequence[Property], path: Path | None = None) -> None:
    """Compare a network with its ONNX file at points of properties' boxes.

    The points are the centre, a uniform point and a corner of each of at most ``_COMPARED_BOXES`` boxes.

    Args:
        network: as it was read; a network that came from no ONNX file is not compared.
        properties: the properties that the network is asked about, any number of them.
        path: the network's file, which the error names.

    Raises:
        InputError: if the outputs differ by more than rounding explains.
    """
    rng = np.random.default_rng(0)
    points = [np.zeros((0, network.input_size))]
    for prop in properties[:: max(1, -(-len(properties) // _COMPARED_BOXES))]:
        box = prop.box
        shares = np.stack([np.full(box.size, 0.5), rng.random(box.size), rng.integers(0, 2, box.size)])
        points.append(box.lower * (1 - shares) + box.upper * shares)
    try:
        compare_at(network, np.concatenate(points))
    except InputError as error:
        raise (error if path is None else error.located(path)) from None


@contextmanager
def _bounded(path: Path) -> Iterator[None]:
    """Turn the MemoryError or RecursionError of reading a file into an error that names the file.

    Raises:
        InputError: in place of a MemoryError or a RecursionError of the block.
    """
    try:
        yield
    except MemoryError:
        raise InputError("reading the file takes more memory than there is", path=path) from None
    except RecursionError:
        raise InputError("the file is nested too deeply", path=path) from None


def instances(path: Path) -> list[tuple[Path, Path | None, float | None]]:
    """The instances of an ``instances.csv`` or a folder: property file, network's file and time limit in seconds.

    A folder with an ``instances.csv`` has the instances that this table lists; any other folder has one for each
    property file in it and below it, with None for the network's file and the time limit.

    Args:
        path: the table or the folder.

    Raises:
        InputError: if there are no instances, or if the table is bad.
    """
    # The methods of Path raise for a name that is too long.
    table = path / "instances.csv" if os.path.isdir(path) else path
    if os.path.isfile(table) or not os.path.isdir(path):
        listed: list[tuple[Path, Path | None, float | None]] = [
            (row.vnnlib, row.onnx, row.timeout) for row in read_instances(table)
        ]
    else:
        found = [file for pattern in ("*.vnnlib", "*.vnnlib.gz") for file in path.rglob(pattern)]
        listed = [(file, None, None) for file in sorted(found)]
    if not listed:
        what = "the table lists no instance" if table.is_file() else "there is no property file in or below the folder"
        raise InputError(what, path=table if table.is_file() else path)
    return listed
