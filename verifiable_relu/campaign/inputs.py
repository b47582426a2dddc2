"""Inputs of a campaign: the verifier and the instances for a method and files that a user names."""

from __future__ import annotations

import hashlib
import pickle
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
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
from verifiable_relu.settings import default_settings, require_device
from verifiable_relu.spec import Property, SpecFile, find_network, limits, queries, read_vnnlib
from verifiable_relu.spec.find import Networks, assigned, paths
from verifiable_relu.spec.specfile import KINDS, DeclaredNetwork, stem

_COMPARED_BOXES = 4  # Most boxes of a property at whose points a network is compared with its ONNX file
_KEPT_NETWORKS = 64 << 20  # Most bytes of ONNX files whose networks are kept, but for the last one
_KEPT_PROPERTIES = 1 << 20  # Most characters of property files that are kept; what they say takes 50 times as much
READING = "reading"  # Method of an instance whose reading failed by a fault of the program rather than by a bad file
_KEPT = 256  # The most networks, and the most property files, that are kept

_Held = TypeVar("_Held")


def chosen(
    method: str, device: str = "cpu", memory: int | None = None, processes: int = 1
) -> tuple[Verifier, TimeBudget]:
    """Return the verifier of a name and its budget without time, on a torch device that exists.

    Bounds may hold ``memory`` bytes at once, approximately; None leaves the verifier's own limit. A method that cannot
    share its work uses one process. Raises an InputError for an unknown name, or a limit that the verifier lacks.
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
    """Return the result of an instance that could not be read, or whose process has ended.

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
    """Cache of the latest items by key, within a limit of their total size."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: OrderedDict[Hashable, tuple[_Held, int]] = OrderedDict()

    def __call__(self, key: Hashable, make: Callable[[], tuple[_Held, int]]) -> _Held:
        """Return the item of a key; if it is missing, that which ``make`` returns with its size."""
        if key not in self._held:
            self._held[key] = make()
            sizes = [size for _, size in self._held.values()]
            while len(self._held) > 1 and (len(self._held) > _KEPT or sum(sizes) > self._limit):
                self._held.popitem(last=False)
                del sizes[0]
        self._held.move_to_end(key)
        return self._held[key][0]


@dataclass(frozen=True)
class _Read:
    """A network that was read and prepared, the digest of its file unless that is not all, and the seconds it took."""

    network: Network
    digest: str
    seconds: float


class Loader:
    """Reader of instances, which reads a network and equal properties once, as far as memory for them is bounded.

    Every network goes through ``prepare``, such as ``execution_model``, once it was read. If the ``arithmetic`` is
    *declared*, that function also takes the type that the property file declares. Results of instances that cannot be
    read name the arithmetic.
    """

    def __init__(self, prepare: Callable[..., Network] | None = None, arithmetic: str = "real") -> None:
        self.prepare, self.arithmetic = prepare, arithmetic
        self._networks = _Recent[_Read | InputError](_KEPT_NETWORKS)
        self._properties = _Recent[tuple[SpecFile, set[str]]](_KEPT_PROPERTIES)
        self._digests: dict[Path, str] = {}
        try:
            self._prepared: bytes | None = pickle.dumps(prepare)
        except Exception:  # pickle lets whatever an object raises through
            self._prepared = None

    def __reduce__(self) -> tuple[object, ...]:
        # In another process, networks stay prepared from one task to the next.
        return _kept_loader, (pickle.dumps(self.prepare), self.arithmetic)

    def files(self, entry: InstanceFiles, text: str | None = None) -> str:
        """Return a digest of the bytes of an instance's files and of what is done to them; empty where one is unknown.

        ``text`` is that of the property file, which is read without.
        """
        if entry.onnx is None or self._prepared is None:
            return ""
        try:
            for path in paths(entry.onnx):
                if path not in self._digests:
                    self._digests[path] = hashlib.sha256(onnx_bytes(path)).hexdigest()
            text = read_text(entry.vnnlib, limits.BYTES) if text is None else text
        except InputError:
            return ""
        read = [self._digests[path] for path in paths(entry.onnx)]
        names = [f"{name}=" for name, _ in entry.onnx.files] if isinstance(entry.onnx, Networks) else [""]
        said = " ".join(map("".join, zip(names, read, strict=True)))
        return "files:" + _digest(f"{said} {_digest(text)} {self._prepared.hex()}") if all(read) else ""

    @default_settings()
    def case(self, entry: InstanceFiles) -> Case:
        """Return the instance of a property file and a network; an InputError if these are bad or do not fit."""
        start = time.perf_counter()
        with _bounded(entry.vnnlib):
            text = read_text(entry.vnnlib, limits.BYTES)
            # Equal texts in files of one name are parsed once.
            named = _digest(text), stem(entry.vnnlib)
            spec, compared = self._properties(named, lambda: ((read_vnnlib(entry.vnnlib, text=text), set()), len(text)))
            spec = spec if spec.path == entry.vnnlib else replace(spec, path=entry.vnnlib)
            onnx = entry.onnx if entry.onnx is not None else find_network(spec)
            files = assigned(spec, onnx)
        before = time.perf_counter()
        declared = (None,) if spec.joined is None else spec.joined.networks
        kinds = declared_types(spec) if self.arithmetic == "declared" else ()
        if len(kinds) > 1:
            raise InputError(f"the query declares several element types: {', '.join(kinds)}", path=spec.path)
        wanted = [(path, self._chosen(path, each, kinds), kinds) for path, each in zip(files, declared, strict=True)]
        read = {each: self._network(*each) for each in wanted}
        networks = [read[each].network for each in wanted]
        after = time.perf_counter()
        with _bounded(entry.vnnlib):
            asked = tuple(queries(spec, *networks))
        self._digests |= {path: each.digest for (path, *_), each in read.items()}
        for index, (path, network) in enumerate(zip(files, networks, strict=True)):
            digest = self._digests[path]
            if not (digest and digest in compared):
                places = None if spec.joined is None or spec.joined.alone else spec.joined.networks[index].places
                compare_on_boxes(network, spec.properties, path, places)
                compared.add(digest)
        spent = before - start + sum(each.seconds for each in read.values()) + time.perf_counter() - after
        return Case(str(onnx), str(entry.vnnlib), asked, entry.timeout, spec, self.files(entry, text), spent)

    def read(self, entry: InstanceFiles, debug: bool = False) -> Case | Result:
        """Return the instance, or a result that says why it cannot be read; ``debug`` raises faults of the program."""
        try:
            return self.case(entry)
        except Exception as error:
            if debug and not isinstance(error, InputError):
                raise
            return unanswered(entry, error, self.arithmetic)

    def _network(self, path: Path, chosen: Chosen = EVERYTHING, kinds: Sequence[str] = ()) -> _Read:
        """Return the network of an ONNX file, read on the first call only; a later call raises the same InputError."""
        where = path.resolve(), chosen, kinds
        known = self._networks(where, lambda: self._read_network(path, chosen, kinds))
        if isinstance(known, InputError):
            raise known
        return known

    def _read_network(self, path: Path, chosen: Chosen, kinds: Sequence[str]) -> tuple[_Read | InputError, int]:
        start, data = time.perf_counter(), b""
        try:
            with _bounded(path):
                data = onnx_bytes(path)
                found = read_onnx(path, chosen=chosen, data=data)
                whole = found.source.onnx == data
                found = found if self.prepare is None else self.prepare(found, *kinds)
        except InputError as error:
            return error.located(path), len(data)
        digest = hashlib.sha256(data).hexdigest() if whole else ""
        return _Read(found, digest, time.perf_counter() - start), len(data)

    def _chosen(self, path: Path, declared: DeclaredNetwork | None, kinds: Sequence[str]) -> Chosen:
        """Return the tensors that a query means: of the file's names where all have one, otherwise in its order."""
        if declared is None:
            return EVERYTHING
        found = Chosen(hidden=tuple(tensor.node for tensor in declared.hidden))
        ports, inputs = [*self._network(path, found, kinds).network.source.ports], len(declared.inputs)
        for role, tensors, own in (
            ("inputs", declared.inputs, ports[:inputs]),
            ("outputs", declared.outputs, ports[inputs : inputs + len(declared.outputs)]),
        ):
            names = [tensor.name for tensor in tensors]
            if sorted(names) == sorted(own) and names != own:
                found = replace(found, **{role: tuple(names)})
        return found


@lru_cache(maxsize=1)
def _kept_loader(prepare: bytes, arithmetic: str) -> Loader:
    return Loader(pickle.loads(prepare), arithmetic)


def declared_types(spec: SpecFile) -> tuple[str, ...]:
    """Return the element types that a VNN-LIB 2.0 query declares, as arithmetics are called; in 1.0 *real* alone."""
    declared = () if spec.joined is None else spec.joined.networks
    found = {KINDS[tensor.kind].lower() for each in declared for tensor in (*each.inputs, *each.given)}
    return tuple(sorted(found)) or ("real",)


def compare_on_boxes(
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
        raise InputError("there is not enough memory to read the file", path=path) from None
    except RecursionError:
        raise InputError("the file is nested too deeply", path=path) from None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
