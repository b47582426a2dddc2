"""From the method and the files that a user names to the verifier and the instances that a campaign takes."""

from __future__ import annotations

import hashlib
import math
import operator
import pickle
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from verifiable_relu.campaign.result import Result
from verifiable_relu.campaign.runner import Case, unasked
from verifiable_relu.errors import InputError
from verifiable_relu.files import read_text
from verifiable_relu.network import EVERYTHING, Chosen, Network, compare_at, onnx_bytes, read_onnx
from verifiable_relu.network.graph import require_device
from verifiable_relu.settings import neutral
from verifiable_relu.spec import Property, SpecFile, find_network, limits, queries, read_vnnlib
from verifiable_relu.spec.find import Networks, assigned, paths
from verifiable_relu.spec.specfile import DeclaredNetwork, stem
from verifiable_relu.verifiers.base import TimeBudget, Verifier
from verifiable_relu.verifiers.registry import limited, make


def chosen(
    method: str, device: str = "cpu", memory: int | None = None, processes: int = 1
) -> tuple[Verifier, TimeBudget]:
    """The verifier of a name, and the budget of its work but for time, on a torch device that exists.

    Args:
        method: the verifier's name.
        device: the torch device on which it runs.
        memory: the bytes that its bounds may hold at once, approximately; None leaves the verifier's own limit.
        processes: how many processes may share the work on a query; a method that cannot share it uses one.

    Raises:
        InputError: for an unknown name, a device that torch does not have, a limit that is no positive integer, or a
            device or a limit where the verifier takes none.
    """
    budget = limited(method, device, None if memory is None else _memory_limit(memory), processes)
    made = make(method)
    require_device(device)
    return made, budget


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
        onnx: the network's file, or those of several; None where it is searched for (``spec.find_network``).
        timeout: the time limit in seconds.
    """

    vnnlib: Path
    onnx: Path | Networks | None
    timeout: float


_COMPARED_BOXES = 4
"""The most boxes of a property file at whose points the network as read is compared with its ONNX file."""

_KEPT_NETWORKS = 64 << 20
"""The most bytes of ONNX files whose networks are kept, but for the network that was read last."""

_KEPT_PROPERTIES = 1 << 20
"""The most characters of property files whose content is kept; what they say takes some fifty times as much memory."""

_KEPT = 256
"""The most networks, and the most property files, that are kept."""

_Held = TypeVar("_Held")


class _Recent(Generic[_Held]):
    """What was read last, by key, as far as its size is within a limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: OrderedDict[Hashable, tuple[_Held, int]] = OrderedDict()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._held

    def get(self, key: Hashable) -> _Held | None:
        if key not in self._held:
            return None
        self._held.move_to_end(key)
        return self._held[key][0]

    def put(self, key: Hashable, found: _Held, size: int) -> None:
        self._held[key] = found, size
        while len(self._held) > 1 and (len(self._held) > _KEPT or sum(s for _, s in self._held.values()) > self._limit):
            self._held.popitem(last=False)


@dataclass(frozen=True)
class _Read:
    """A network that was read, or why it was not.

    Attributes:
        found: the network, prepared, or the error.
        digest: of the bytes of the ONNX file.
        seconds: that reading took.
    """

    found: Network | InputError
    digest: str
    seconds: float


@dataclass(frozen=True)
class _Property:
    """A property file that was read.

    Attributes:
        spec: what it says.
        believed: the digests of the files of the networks that were compared at points of its boxes.
    """

    spec: SpecFile
    believed: set[str] = field(default_factory=set)


class Loader:
    """A reader of instances, which reads equal networks and properties once, as far as memory for them is bounded.

    Args:
        networks: the networks' files, by the names that VNN-LIB 2.0 files declare.
        prepare: a function that every network goes through once it was read, such as ``network.hardened``; it may raise
            an InputError. None leaves the networks as they are. A loader with a function that can be pickled can be
            pickled, too.
        arithmetic: about which instances are asked; the results of those that cannot be read say it.

    Attributes:
        clock: returns the present time in seconds, by which reading is charged.
    """

    def __init__(
        self,
        networks: Mapping[str, Path] | None = None,
        prepare: Callable[[Network], Network] | None = None,
        arithmetic: str = "real",
    ) -> None:
        self.networks = dict(networks or {})
        self.prepare = prepare
        self.arithmetic = arithmetic
        self.clock: Callable[[], float] = time.perf_counter
        self._networks = _Recent[_Read](_KEPT_NETWORKS)
        self._properties = _Recent[_Property](_KEPT_PROPERTIES)
        self._digests: dict[Path, str] = {}
        try:
            self._prepared: str | None = pickle.dumps(prepare).hex()
        except Exception:  # pickle lets whatever an object raises through
            self._prepared = None

    def network(self, path: Path, chosen: Chosen = EVERYTHING) -> Network:
        """The network of an ONNX file, read on the first call only.

        Args:
            path: the file.
            chosen: the tensors of the file that are the network's inputs and outputs.

        Raises:
            InputError: as ``read_onnx`` and ``prepare`` do; a later call raises the same error without reading again.
        """
        found = self._network(path, chosen).found
        if isinstance(found, InputError):
            raise found
        return found

    def knows(self, path: Path, chosen: Chosen = EVERYTHING) -> bool:
        """Whether the network of a file, with these inputs and outputs, has been read."""
        return (path.resolve(), chosen) in self._networks

    def _network(self, path: Path, chosen: Chosen = EVERYTHING) -> _Read:
        where = path.resolve(), chosen
        known = self._networks.get(where)
        if known is None:
            start, data, digest = self.clock(), b"", ""
            found: Network | InputError
            try:
                with _bounded(path):
                    data = onnx_bytes(path)
                    digest = hashlib.sha256(data).hexdigest()
                    name = stem(path)
                    known = self._networks.get((digest, chosen))
                    if known is not None and isinstance(known.found, Network):
                        found = known.found if known.found.name == name else replace(known.found, name=name)
                        return self._keep(where, _Read(found, digest, known.seconds), len(data))
                    found = read_onnx(path, chosen=chosen, data=data)
                    whole = found.onnx == data
                    found = found if self.prepare is None else self.prepare(found)
            except InputError as error:
                found, whole = error.located(path), False
            known = _Read(found, digest if whole else "", self.clock() - start)
            if whole:
                # The file says all: none of its tensors lies beside it.
                self._keep((digest, chosen), known, 0)
            self._keep(where, known, len(data))
        return known

    def _keep(self, key: Hashable, read: _Read, size: int) -> _Read:
        self._networks.put(key, read, size)
        return read

    def _property(self, path: Path, text: str, digest: str) -> _Property:
        """What a property file says, parsed once for equal texts in files of one name."""
        key = digest, stem(path)
        known = self._properties.get(key)
        if known is None:
            known = _Property(read_vnnlib(path, text=text))
            self._properties.put(key, known, len(text))
        return known

    def files(self, entry: Entry) -> str:
        """A digest of the bytes of an instance's files and of what is done to them, which says what is asked.

        Returns:
            The digest; empty where the files cannot be read, or the network's file has to be searched for.
        """
        try:
            if entry.onnx is None or self._prepared is None:
                return ""
            for path in paths(entry.onnx):
                if path not in self._digests:
                    self._digests[path] = hashlib.sha256(onnx_bytes(path)).hexdigest()
            digests = [self._digests[path] for path in paths(entry.onnx)]
            return self._files(entry.onnx, digests, _digest(read_text(entry.vnnlib, limits.BYTES)))
        except InputError:
            return ""

    def _files(self, onnx: Path | Networks, digests: Sequence[str], text: str) -> str:
        if self._prepared is None or not all(digests):
            return ""
        names = [f"{name}=" for name, _ in onnx.files] if isinstance(onnx, Networks) else [""]
        said = " ".join(map("".join, zip(names, digests, strict=True)))
        return "files:" + _digest(f"{said} {text} {self._prepared}")

    @neutral()
    def case(self, entry: Entry) -> Case:
        """The instance that a property file and a network make.

        Raises:
            InputError: if a file is bad, the network's file is not found, or property and network do not fit together.
        """
        start = self.clock()
        with _bounded(entry.vnnlib):
            text = read_text(entry.vnnlib, limits.BYTES)
            digest = _digest(text)
            known = self._property(entry.vnnlib, text, digest)
            spec = known.spec if known.spec.path == entry.vnnlib else replace(known.spec, path=entry.vnnlib)
            onnx = entry.onnx if entry.onnx is not None else find_network(spec, None, self.networks)
            files = assigned(spec, onnx)
        before = self.clock()
        declared = (None,) if spec.joined is None else spec.joined.networks
        wanted = [self._chosen(*named) for named in zip(files, declared, strict=True)]
        networks = [self.network(*named) for named in zip(files, wanted, strict=True)]
        read = {named: self._network(*named) for named in zip(files, wanted, strict=True)}
        after = self.clock()
        with _bounded(entry.vnnlib):
            asked = tuple(queries(spec, *networks))
        for index, network in enumerate(networks):
            digest_of = read[files[index], wanted[index]].digest
            if not (digest_of and digest_of in known.believed):
                places = None if spec.joined is None or spec.joined.alone else spec.joined.networks[index].places
                believe(network, spec.properties, files[index], places)
                known.believed.add(digest_of)
        digests = {path: each.digest for (path, _), each in read.items()}
        named = entry.onnx is not None and set(paths(onnx)) <= digests.keys()
        key = self._files(onnx, [digests[path] for path in paths(onnx)], digest) if named else ""
        spent = before - start + sum(each.seconds for each in read.values()) + self.clock() - after
        return Case(str(onnx), str(entry.vnnlib), asked, entry.timeout, spec, key, spent)

    def _chosen(self, path: Path, declared: DeclaredNetwork | None) -> Chosen:
        """The tensors that a query means: of the file's own names where all have one, otherwise those in its order."""
        if declared is None:
            return EVERYTHING
        found = Chosen(hidden=tuple(tensor.node for tensor in declared.hidden))
        ports, inputs = [*self.network(path, found).ports], len(declared.inputs)
        for role, tensors, own in (
            ("inputs", declared.inputs, ports[:inputs]),
            ("outputs", declared.outputs, ports[inputs : inputs + len(declared.outputs)]),
        ):
            names = [tensor.variable.name for tensor in tensors]
            if sorted(names) == sorted(own) and names != own:
                found = replace(found, **{role: tuple(names)})
        return found

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
            return unasked(str(entry.onnx or ""), str(entry.vnnlib), error, entry.timeout, self.arithmetic)


def believe(
    network: Network, properties: Sequence[Property], path: Path | None = None, places: Sequence[int] | None = None
) -> None:
    """Compare a network with its ONNX file at points of properties' boxes.

    The points are the centre, a uniform point and a corner of each of at most ``_COMPARED_BOXES`` boxes.

    Args:
        network: as it was read; a network that came from no ONNX file is not compared.
        properties: the properties that the network is asked about, any number of them.
        path: the network's file, which the error names.
        places: for each of its inputs the property's input that it is, where these are not the same.

    Raises:
        InputError: if the outputs differ by more than rounding explains.
    """
    rng = np.random.default_rng(0)
    points = [np.zeros((0, network.input_size))]
    chosen = slice(None) if places is None else list(places)
    for prop in properties[:: max(1, -(-len(properties) // _COMPARED_BOXES))]:
        box = prop.box
        shares = np.stack([np.full(box.size, 0.5), rng.random(box.size), rng.integers(0, 2, box.size)])
        points.append((box.lower * (1 - shares) + box.upper * shares)[:, chosen])
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


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
