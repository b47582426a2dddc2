"""From what the user names (a method, files) to what a campaign takes."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from verifiable_relu.campaign.runner import Case
from verifiable_relu.errors import InputError
from verifiable_relu.network import Network, compare_at, read_onnx
from verifiable_relu.network.device import require_device
from verifiable_relu.spec import Property, SpecFile, find_network, queries, read_instances, read_vnnlib
from verifiable_relu.verifiers.base import Verifier
from verifiable_relu.verifiers.registry import make


def verifier(method: str, device: str = "cpu", memory: int | None = None) -> Verifier:
    """The method of a name, on a device of which it is certain that it exists.

    Args:
        method: the name.
        device: where it runs.
        memory: a limit in bytes on what its bounds hold at once; None leaves the method's own.

    Raises:
        InputError: for an unknown method, a device that torch does not have, a limit that is no positive integer, or
            either of the two where the method does not take it.
    """
    made = make(method, device, None if memory is None else _memory_limit(memory))
    require_device(device)
    return made


def _memory_limit(size: int) -> int:
    """The bytes, if they are a limit; one number is one ``int``, lest equal options look different in the records."""
    try:
        limit = operator.index(size)
    except TypeError:
        limit = 0
    if limit <= 0:
        raise InputError(f"a limit of memory is a positive whole number of bytes, not {size!r}")
    return int(limit)


def time_limit(seconds: float) -> float:
    """The seconds, if they are a time limit.

    Raises:
        InputError: if they are not positive and finite.
    """
    if not (seconds > 0 and math.isfinite(seconds)):
        raise InputError(f"a time limit is a positive number of seconds, not {seconds}")
    return seconds


_COMPARED_BOXES = 4
"""Most boxes of a property file at whose points its network is compared with the network's file."""


class Loader:
    """Reads instances; a network that several of them share is read once.

    Args:
        networks: files by the names that VNN-LIB 2.0 files declare.
        prepare: what to make of every network that was read (``network.hardened``); raises InputError.
    """

    def __init__(
        self,
        networks: Mapping[str, Path] | None = None,
        prepare: Callable[[Network], Network] | None = None,
    ) -> None:
        self.networks = dict(networks or {})
        self.prepare = prepare
        self._read: dict[Path, Network | InputError] = {}

    def network(self, path: Path) -> Network:
        """The network of a file.

        Raises:
            InputError: as ``read_onnx`` does; for a second time without reading again.
        """
        where = path.resolve()
        if where not in self._read:
            try:
                with _bounded(path):
                    network = read_onnx(path)
                    self._read[where] = network if self.prepare is None else self.prepare(network)
            except InputError as error:
                self._read[where] = error.located(path)
        found = self._read[where]
        if isinstance(found, InputError):
            raise found
        return found

    def case(self, vnnlib: Path, timeout: float, onnx: Path | None = None) -> tuple[Case, SpecFile]:
        """An instance and the property file that it came from.

        Args:
            vnnlib: the property file.
            timeout: seconds for the instance.
            onnx: the network's file; found by way of the property file if it is not given.

        Raises:
            InputError: if a file is bad, the network cannot be found, or the two do not fit.
        """
        with _bounded(vnnlib):
            spec = read_vnnlib(vnnlib)
            path = onnx if onnx is not None else find_network(spec, None, self.networks)
        network = self.network(path)
        with _bounded(vnnlib):
            asked = tuple(queries(spec, network))
        believe(network, spec.properties, path)
        return Case(str(path), str(vnnlib), asked, timeout), spec


def believe(network: Network, properties: Sequence[Property], path: Path | None = None) -> None:
    """Compare a network with the file it was read from at a few points of the boxes that it is asked about.

    Args:
        network: as it was read; one that came from no file is not compared here.
        properties: any number.
        path: of the file, for messages.

    Raises:
        InputError: if the two differ by more than rounding explains.
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
    """Blame a file for what reading it exhausts.

    Raises:
        InputError: instead of MemoryError and RecursionError.
    """
    try:
        yield
    except MemoryError:
        raise InputError("reading it takes more memory than there is", path=path) from None
    except RecursionError:
        raise InputError("it is nested too deeply", path=path) from None


def instances(path: Path) -> list[tuple[Path, Path | None, float | None]]:
    """The property files that an ``instances.csv`` lists or a folder holds, with network and seconds where said.

    A folder's ``instances.csv`` comes before the ``.vnnlib`` files in and below it.

    Raises:
        InputError: if there are none, or the table is bad.
    """
    table = path / "instances.csv" if path.is_dir() else path
    if table.is_file() or not path.is_dir():
        listed: list[tuple[Path, Path | None, float | None]] = [
            (row.vnnlib, row.onnx, row.timeout) for row in read_instances(table)
        ]
    else:
        found = [file for pattern in ("*.vnnlib", "*.vnnlib.gz") for file in path.rglob(pattern)]
        listed = [(file, None, None) for file in sorted(found)]
    if not listed:
        raise InputError("no property in it", path=table if table.is_file() else path)
    return listed
