"""From the method and the files that a user names to the verifier and the instances that a campaign takes."""

from __future__ import annotations

import hashlib
import pickle
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from verifiable_relu.campaign.result import Result
from verifiable_relu.campaign.runner import Case
from verifiable_relu.errors import CallFailed, InputError, OutOfTime
from verifiable_relu.files import read_text
from verifiable_relu.ir.network import Network
from verifiable_relu.readers import EVERYTHING, Chosen, compare_at, onnx_bytes, read_onnx
from verifiable_relu.search.batch import Verifier
from verifiable_relu.search.budget import TimeBudget
from verifiable_relu.search.outcomes import Reason, Verdict
from verifiable_relu.search.registry import limited, make
from verifiable_relu.settings import neutral, require_device
from verifiable_relu.spec import Property, SpecFile, find_network, limits, queries, read_vnnlib
from verifiable_relu.spec.find import Networks, assigned, paths
from verifiable_relu.spec.specfile import DeclaredNetwork, stem

_COMPARED_BOXES = 4  # Most boxes of a property at whose points a network is compared with its ONNX file
_KEPT_NETWORKS = 64 << 20  # Most bytes of ONNX files whose networks are kept, but for the last one
_KEPT_PROPERTIES = 1 << 20  # Most characters of property files that are kept; what they say takes 50 times as much
READING = "reading"  # Method of an instance whose reading failed by a fault of the program rather than by a bad file
_KEPT = 256  # The most networks, and the most property files, that are kept

_Held = TypeVar("_Held")


def chosen(
    method: str, device: str = "cpu", memory: int | None = None, processes: int = 1
) -> tuple[Verifier, TimeBudget]:
    """The verifier of a name, and the budget of its work but for time, on a torch device that exists.

    Bounds may hold ``memory`` bytes at once, approximately; None leaves the verifier's own limit. A method that cannot
    share its work uses one process. Raises an InputError for what is unknown, or what the verifier does not take.
    """
    if memory is not None and (not isinstance(memory, int | np.integer) or memory <= 0):
        raise InputError(f"a limit of memory is a positive whole number of bytes, not {memory!r}")
    # Whatever type of integer it came in, equal options look alike.
    budget = limited(method, device, None if memory is None else int(memory), processes)
    made = make(method)
    require_device(device)
    return made, budget


@dataclass(frozen=True)
class InstanceFiles:
    """An instance as a user names it, before any file is read; a network that is None is searched for."""

    vnnlib: Path
    onnx: Path | Networks | None
    timeout: float


def unanswered(
    entry: InstanceFiles, error: Exception, arithmetic: str, method: str = READING, verifier: str = ""
) -> Result:
    """The result of an instance that could not be read, or whose process has ended.

    The error is an InputError for bad input, OutOfTime, which names the instance if its files were not read in time,
    MemoryError, CallFailed, which says how the process ended, or a fault of the program.
    """
    reason, detail, seconds = Reason.ERROR, f"{type(error).__name__}: {error}", 0.0
    match error:
        case InputError():
            method, detail = "", str(error)
        case OutOfTime():
            reason, detail, seconds = Reason.TIMEOUT, "the process did not end within the time limit", entry.timeout
            if error.subject is not None:
                method, detail = READING, "the files were not read within the time limit"
        case MemoryError():
            reason, detail = Reason.MEMORY, str(error) or "out of memory"
        case CallFailed():
            detail = str(error)
    # Without the digest of the query, the record is no answer for later runs, which ask again.
    return Result(
        str(entry.onnx or ""), str(entry.vnnlib), Verdict.UNKNOWN, reason, method, seconds,
        detail=detail, timeout=entry.timeout, arithmetic=arithmetic, verifier=verifier,
    )  # fmt: skip


class _Recent(Generic[_Held]):
    """What was read last, by key, as far as its size is within a limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: OrderedDict[Hashable, tuple[_Held, int]] = OrderedDict()

    def get(self, key: Hashable) -> _Held | None:
        if key not in self._held:
            return None
        self._held.move_to_end(key)
        return self._held[key][0]

    def put(self, key: Hashable, found: _Held, size: int) -> _Held:
        self._held[key] = found, size
        while len(self._held) > 1 and (len(self._held) > _KEPT or sum(s for _, s in self._held.values()) > self._limit):
            self._held.popitem(last=False)
        return found


@dataclass(frozen=True)
class _Read:
    """A network that was read and prepared, the digest of its file unless that is not all, and the seconds it took."""

    network: Network
    digest: str
    seconds: float


class Loader:
    """A reader of instances, which reads equal networks and properties once, as far as memory for them is bounded.

    ``networks`` are the files by the names that VNN-LIB 2.0 files declare; every network goes through ``prepare``, such
    as ``execution_model``, once it was read. Results of instances that cannot be read name the ``arithmetic``.
    """

    def __init__(
        self,
        networks: Mapping[str, Path] | None = None,
        prepare: Callable[[Network], Network] | None = None,
        arithmetic: str = "real",
    ) -> None:
        self.networks, self.prepare, self.arithmetic = dict(networks or {}), prepare, arithmetic
        self.clock: Callable[[], float] = time.perf_counter
        self._networks = _Recent[_Read | InputError](_KEPT_NETWORKS)
        self._properties = _Recent[tuple[SpecFile, set[str]]](_KEPT_PROPERTIES)
        self._digests: dict[Path, str] = {}
        try:
            self._prepared: bytes | None = pickle.dumps(prepare)
        except Exception:  # pickle lets whatever an object raises through
            self._prepared = None

    def __reduce__(self) -> tuple[object, ...]:
        # In another process, networks stay prepared from one task to the next.
        return _kept_loader, (tuple(self.networks.items()), pickle.dumps(self.prepare), self.arithmetic)

    def files(self, entry: InstanceFiles) -> str:
        """A digest of the bytes of an instance's files and of what is done to them; empty where one cannot be read."""
        if entry.onnx is None:
            return ""
        try:
            for path in paths(entry.onnx):
                if path not in self._digests:
                    self._digests[path] = hashlib.sha256(onnx_bytes(path)).hexdigest()
            return self._files(entry.onnx, self._digests, _digest(read_text(entry.vnnlib, limits.BYTES)))
        except InputError:
            return ""

    def _files(self, onnx: Path | Networks, digests: Mapping[Path, str], text: str) -> str:
        read = [digests.get(path, "") for path in paths(onnx)]
        if self._prepared is None or not all(read):
            return ""
        names = [f"{name}=" for name, _ in onnx.files] if isinstance(onnx, Networks) else [""]
        said = " ".join(map("".join, zip(names, read, strict=True)))
        return "files:" + _digest(f"{said} {text} {self._prepared.hex()}")

    @neutral()
    def case(self, entry: InstanceFiles) -> Case:
        """The instance that a property file and a network make; an InputError if these are bad or do not fit."""
        start = self.clock()
        with _bounded(entry.vnnlib):
            text = read_text(entry.vnnlib, limits.BYTES)
            # Equal texts in files of one name are parsed once.
            digest = _digest(text)
            named = digest, stem(entry.vnnlib)
            spec, compared = self._properties.get(named) or self._properties.put(
                named, (read_vnnlib(entry.vnnlib, text=text), set()), len(text)
            )
            spec = spec if spec.path == entry.vnnlib else replace(spec, path=entry.vnnlib)
            onnx = entry.onnx if entry.onnx is not None else find_network(spec, None, self.networks)
            files = assigned(spec, onnx)
        before = self.clock()
        declared = (None,) if spec.joined is None else spec.joined.networks
        wanted = [(path, self._chosen(path, each)) for path, each in zip(files, declared, strict=True)]
        read = {each: self._network(*each) for each in wanted}
        networks = [read[each].network for each in wanted]
        after = self.clock()
        with _bounded(entry.vnnlib):
            asked = tuple(queries(spec, *networks))
        digests = {path: each.digest for (path, _), each in read.items()}
        for index, (path, network) in enumerate(zip(files, networks, strict=True)):
            if not (digests[path] and digests[path] in compared):
                places = None if spec.joined is None or spec.joined.alone else spec.joined.networks[index].places
                believe(network, spec.properties, path, places)
                compared.add(digests[path])
        key = "" if entry.onnx is None else self._files(onnx, digests, digest)
        spent = before - start + sum(each.seconds for each in read.values()) + self.clock() - after
        return Case(str(onnx), str(entry.vnnlib), asked, entry.timeout, spec, key, spent)

    def read(self, entry: InstanceFiles, debug: bool = False) -> Case | Result:
        """The instance, or the result that says why it cannot be read; ``debug`` raises faults of the program."""
        try:
            return self.case(entry)
        except Exception as error:
            if debug and not isinstance(error, InputError):
                raise
            return unanswered(entry, error, self.arithmetic)

    def _network(self, path: Path, chosen: Chosen = EVERYTHING) -> _Read:
        """Return the network of an ONNX file, read on the first call only; a later call raises the same InputError."""
        where = path.resolve(), chosen
        known = self._networks.get(where) or self._networks.put(where, *self._read_network(path, chosen))
        if isinstance(known, InputError):
            raise known
        return known

    def _read_network(self, path: Path, chosen: Chosen) -> tuple[_Read | InputError, int]:
        start, data = self.clock(), b""
        try:
            with _bounded(path):
                data = onnx_bytes(path)
                digest, name = hashlib.sha256(data).hexdigest(), stem(path)
                known = self._networks.get((digest, chosen))
                if isinstance(known, _Read):
                    same = known.network.name == name
                    return known if same else replace(known, network=replace(known.network, name=name)), len(data)
                found = read_onnx(path, chosen=chosen, data=data)
                whole = found.source.onnx == data
                found = found if self.prepare is None else self.prepare(found)
        except InputError as error:
            return error.located(path), len(data)
        read = _Read(found, digest if whole else "", self.clock() - start)
        if whole:
            self._networks.put((digest, chosen), read, 0)
        return read, len(data)

    def _chosen(self, path: Path, declared: DeclaredNetwork | None) -> Chosen:
        """The tensors that a query means: of the file's own names where all have one, otherwise those in its order."""
        if declared is None:
            return EVERYTHING
        found = Chosen(hidden=tuple(tensor.node for tensor in declared.hidden))
        ports, inputs = [*self._network(path, found).network.source.ports], len(declared.inputs)
        for role, tensors, own in (
            ("inputs", declared.inputs, ports[:inputs]),
            ("outputs", declared.outputs, ports[inputs : inputs + len(declared.outputs)]),
        ):
            names = [tensor.name for tensor in tensors]
            if sorted(names) == sorted(own) and names != own:
                found = replace(found, **{role: tuple(names)})
        return found


@lru_cache(maxsize=1)
def _kept_loader(networks: tuple[tuple[str, Path], ...], prepare: bytes, arithmetic: str) -> Loader:
    return Loader(dict(networks), pickle.loads(prepare), arithmetic)


def believe(
    network: Network, properties: Sequence[Property], path: Path | None = None, places: Sequence[int] | None = None
) -> None:
    """Compare a network with its ONNX file at points of boxes; an InputError if they differ beyond rounding.

    The points are the centre, a uniform point and a corner of each of at most ``_COMPARED_BOXES`` boxes. ``places`` are
    for each of the network's inputs the property's input that it is, where these are not the same.
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
    """Turn the MemoryError or RecursionError of reading a file into an InputError that names the file."""
    try:
        yield
    except MemoryError:
        raise InputError("reading the file takes more memory than there is", path=path) from None
    except RecursionError:
        raise InputError("the file is nested too deeply", path=path) from None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
